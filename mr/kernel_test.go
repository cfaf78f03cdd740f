// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"testing"

	"golang.org/x/sys/unix"
)

var packageData [3 * pageSize]byte

// kernelRegion registers and expects ordinary paging, and that all of it works.
func kernelRegion(t *testing.T, s *Space, mem []byte) *Region {
	t.Helper()
	r := register(t, NewTable(s), uintptr(ptr(mem)), len(mem))
	if r.Paging() != KernelPaging || r.Paging().String() != "kernel" {
		t.Errorf("paged by %v", r.Paging())
	}
	a := accessor(t, s)
	var st Stage
	msg := pattern(len(mem)-100, 1)
	if err := a.Write(&st, r, r.IOVA()+50, msg); err != nil || st.Active() {
		t.Fatalf("write: %v, staged: %v", err, st.Active())
	}
	if err := a.Flush(&st); err != nil {
		t.Fatal(err)
	}
	same(t, "written", mem[50:len(mem)-50], msg)
	got := make([]byte, len(msg))
	if err := a.Read(r, r.IOVA()+50, got); err != nil {
		t.Fatal(err)
	}
	same(t, "read", got, msg)
	off := uint64(-uintptr(ptr(mem)) & 7)
	old, err := a.Atomic(r, r.IOVA()+off, FetchAdd, 0, 1)
	if again, _ := a.Atomic(r, r.IOVA()+off, CompareSwap, old+1, 7); err != nil || again != old+1 {
		t.Errorf("atomics: %d, %d, %v", old, again, err)
	}
	if st := r.Stats(); st != (Counters{}) {
		t.Errorf("%+v", st)
	}
	return r
}

func TestKernelPaging(t *testing.T) {
	s := newSpace(t, Options{})
	t.Run("Go heap", func(t *testing.T) {
		kernelRegion(t, s, make([]byte, 1<<20))
		kernelRegion(t, s, make([]byte, 300))
	})
	t.Run("data of the program", func(t *testing.T) { kernelRegion(t, s, packageData[:]) })
	t.Run("file", func(t *testing.T) {
		f, err := os.Create(filepath.Join(t.TempDir(), "f"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := f.Truncate(8 * pageSize); err != nil {
			t.Fatal(err)
		}
		var fs unix.Statfs_t
		if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
			t.Fatal(err)
		}
		if fs.Type == unix.TMPFS_MAGIC {
			t.Skip("the temporary directory is a tmpfs, which userfaultfd can page")
		}
		mem, err := unix.Mmap(int(f.Fd()), 0, 8*pageSize, rw, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(mem)
		r := kernelRegion(t, s, mem)
		// Cut short: SIGBUS in the engine's copy is an error of the request.
		if err := f.Truncate(2 * pageSize); err != nil {
			t.Fatal(err)
		}
		a := accessor(t, s)
		if err := a.Write(&Stage{}, r, r.IOVA()+3*pageSize, []byte{1, 2}); err != ErrFault {
			t.Errorf("write behind the end: %v", err)
		}
		if err := a.Read(r, r.IOVA()+3*pageSize, make([]byte, 2)); err != ErrFault {
			t.Errorf("read behind the end: %v", err)
		}
		a.Linger()
		for range 2 {
			if err := a.Write(&Stage{}, r, r.IOVA()+3*pageSize, []byte{1, 2}); err != ErrFault {
				t.Errorf("write behind the end in a section that lingers: %v", err)
			}
			if err := a.Write(&Stage{}, r, r.IOVA()+pageSize, []byte{1, 2}); err != nil {
				t.Errorf("write before it: %v", err)
			}
		}
		if a.seq.Load()%2 == 0 {
			t.Error("the section does not linger")
		}
		a.Leave()
		if a.seq.Load()%2 == 1 || debug.SetPanicOnFault(false) {
			t.Error("the section lingers on")
		}
	})
	t.Run("hugetlb", func(t *testing.T) {
		// Reserved or not, the mapping is of a kind that the pager does not page;
		// nothing of it is touched.
		p, err := mmapAt(0, 4<<20, rw, unix.MAP_PRIVATE|unix.MAP_HUGETLB|unix.MAP_NORESERVE)
		if err != nil {
			t.Logf("no hugetlb mapping to be had: %v", err)
			return
		}
		defer munmap(p, 4<<20)
		if r := register(t, NewTable(s), p, 4<<20); r.Paging() != KernelPaging {
			t.Errorf("paged by %v", r.Paging())
		}
	})
	t.Run("partly a file", func(t *testing.T) {
		exe, err := os.Open("/proc/self/exe")
		if err != nil {
			t.Fatal(err)
		}
		defer exe.Close()
		m := alloc(t, 8*pageSize)
		below := register(t, NewTable(s), m.Addr(), 2*pageSize)
		_, _, e := unix.Syscall6(unix.SYS_MMAP, m.Addr()+4*pageSize, pageSize, rw, unix.MAP_PRIVATE|unix.MAP_FIXED, exe.Fd(), 0)
		if e != 0 {
			t.Fatal(e)
		}
		kernelRegion(t, s, m.Bytes())
		if below.Paging() != UserFault {
			t.Errorf("the region below is paged by %v", below.Paging())
		}
	})
}

// TestKernelPagedMemoryVanishes: nothing tells of a munmap under such a region.
func TestKernelPagedMemoryVanishes(t *testing.T) {
	s := newSpace(t, Options{NoUserFault: true})
	m := alloc(t, 8*pageSize)
	r := kernelRegion(t, s, m.Bytes())
	a := accessor(t, s)
	if err := munmap(m.Addr()+4*pageSize, pageSize); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 2*pageSize)
	if err := a.Write(&Stage{}, r, r.IOVA()+3*pageSize, buf); err != ErrFault {
		t.Errorf("write: %v", err)
	}
	if err := a.Read(r, r.IOVA()+3*pageSize, buf); err != ErrFault {
		t.Errorf("read: %v", err)
	}
	if _, err := a.Atomic(r, r.IOVA()+4*pageSize, FetchAdd, 0, 1); err != ErrFault {
		t.Errorf("fetch-add: %v", err)
	}
	if _, err := a.Atomic(r, r.IOVA()+4*pageSize, CompareSwap, 0, 1); err != ErrFault {
		t.Errorf("compare-swap: %v", err)
	}
	if err := a.Write(&Stage{}, r, r.IOVA(), buf); err != nil {
		t.Errorf("the rest of it: %v", err)
	}
	// Read-only memory, paged by the pager.
	s2 := newSpace(t, Options{})
	m2 := alloc(t, pageSize)
	m2.Bytes()[0] = 1
	r2 := register(t, NewTable(s2), m2.Addr(), pageSize)
	if _, _, e := unix.Syscall(unix.SYS_MPROTECT, m2.Addr(), pageSize, unix.PROT_READ); e != 0 {
		t.Fatal(e)
	}
	if err := accessor(t, s2).Write(&Stage{}, r2, r2.IOVA(), buf[:1]); err != ErrFault {
		t.Errorf("write to read-only memory: %v", err)
	}
}
