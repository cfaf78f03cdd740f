// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ksmSetting sets one of the settings of kernel samepage merging until the test ends
// (Documentation/admin-guide/mm/ksm.rst); false if that is not allowed.
func ksmSetting(t testing.TB, name, value string) bool {
	path := filepath.Join("/sys/kernel/mm/ksm", name)
	was, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, []byte(value), 0)
	}
	if err != nil {
		t.Logf("KSM: %v", err)
		return false
	}
	t.Cleanup(func() {
		if err := os.WriteFile(path, was, 0); err != nil {
			t.Error(err)
		}
	})
	return true
}

// shared is which of n pages have their page frame in common with another of them, by
// /proc/self/pagemap.
func shared(t testing.TB, s *Space, addr uintptr, n int) (out []bool, total int) {
	t.Helper()
	entries := make([]uint64, n)
	if _, err := unix.Pread(s.pagemap, unsafe.Slice((*byte)(unsafe.Pointer(&entries[0])), 8*n), int64(addr>>pageShift*8)); err != nil {
		t.Fatal(err)
	}
	frames := map[uint64]int{}
	for _, e := range entries {
		if e&(1<<55-1) == 0 {
			t.Skip("/proc/self/pagemap does not tell page frames")
		}
		frames[e&(1<<55-1)]++
	}
	for _, e := range entries {
		k := frames[e&(1<<55-1)]
		out = append(out, k > 1)
		total += min(k-1, 1)
	}
	return out, total
}

// Pages that the kernel has merged, as they were alike, come apart when a request writes
// to one of them, and nothing else changes.
func TestMergedPages(t *testing.T) {
	const pages = 256
	b := newBed(t, pages*pageSize)
	alike := pattern(pageSize, 1)
	want := make([]byte, 0, pages*pageSize)
	for range pages {
		want = append(want, alike...)
	}
	b.put(t, 0, want)
	if err := madvise(b.m.Addr(), pages*pageSize, unix.MADV_MERGEABLE); err != nil {
		t.Skipf("MADV_MERGEABLE: %v", err)
	}
	if !ksmSetting(t, "pages_to_scan", "10000") || !ksmSetting(t, "sleep_millisecs", "1") || !ksmSetting(t, "run", "1") {
		t.Skip("kernel samepage merging cannot be set up")
	}
	for until := time.Now().Add(2 * time.Minute); ; time.Sleep(5 * time.Millisecond) {
		_, n := shared(t, b.s, b.m.Addr(), pages)
		if n >= pages*3/4 {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("only %d of %d pages were merged", n, pages)
		}
	}
	same(t, "read from merged pages", b.get(t, 0, len(want)), want)
	for p := 0; p < pages; p += 3 {
		copy(want[p*pageSize+100:], pattern(50, byte(p)))
		b.put(t, p*pageSize+100, pattern(50, byte(p)))
		if _, err := b.a.Atomic(b.r, b.r.IOVA()+uint64(p)*pageSize, StoreWord, 0, uint64(p)); err != nil {
			t.Fatal(err)
		}
		*(*uint64)(unsafe.Pointer(&want[p*pageSize])) = uint64(p)
	}
	same(t, "written to merged pages", b.m.Bytes(), want)
	same(t, "as requests see it", b.get(t, 0, len(want)), want)
	are, _ := shared(t, b.s, b.m.Addr(), pages)
	for p := 0; p < pages; p += 3 {
		if are[p] {
			t.Errorf("page %d was written to, and is still shared", p)
		}
	}
}

// numaNodes lists the nodes that have memory.
func numaNodes(t testing.TB) []int32 {
	b, err := os.ReadFile("/sys/devices/system/node/has_memory")
	if err != nil {
		t.Skip(err)
	}
	var out []int32
	for part := range strings.SplitSeq(strings.TrimSpace(string(b)), ",") {
		var from, to int32
		if n, _ := fmt.Sscanf(part, "%d-%d", &from, &to); n == 1 {
			to = from
		}
		for ; from <= to; from++ {
			out = append(out, from)
		}
	}
	return out
}

// move_pages(2) moves pages between nodes, and the kernel takes them out to swap where there is
// some, while an engine writes and reads: nothing is lost. With one node alone move_pages has nothing
// to do, but does it.
func TestPagesAreMoved(t *testing.T) {
	const pages = 128
	b := newBed(t, pages*pageSize)
	nodes := numaNodes(t)
	b.put(t, 0, pattern(pages*pageSize, 1))
	at := make([]uintptr, pages)
	for i := range at {
		at[i] = b.m.Addr() + uintptr(i)*pageSize
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	rounds := 0
	wg.Go(func() {
		node, status := make([]int32, pages), make([]int32, pages)
		for ; !stop.Load(); rounds++ {
			for i := range node {
				node[i] = nodes[(rounds+i)%len(nodes)]
			}
			n, _, e := unix.Syscall6(unix.SYS_MOVE_PAGES, 0, pages, uintptr(unsafe.Pointer(&at[0])), uintptr(unsafe.Pointer(&node[0])), uintptr(unsafe.Pointer(&status[0])), 2)
			if e != 0 && e != unix.EPERM {
				t.Errorf("move_pages: %v", e)
				return
			}
			for i, s := range status {
				// ENOENT: swapped out, EBUSY: in use
				if n == 0 && e == 0 && s != node[i] && s != -int32(unix.ENOENT) && s != -int32(unix.EBUSY) {
					t.Errorf("page %d: %v", i, unix.Errno(-s))
				}
			}
			if err := madvise(b.m.Addr(), pages*pageSize, unix.MADV_PAGEOUT); err != nil {
				t.Errorf("MADV_PAGEOUT: %v", err)
				return
			}
		}
	})
	want := pattern(pages*pageSize, 1)
	for i := range 20000 {
		off := i * 7919 % (pages*pageSize - 300)
		src := pattern(1+i%300, byte(i))
		copy(want[off:], src)
		b.put(t, off, src)
		if i%16 == 0 {
			look := (off + 40*pageSize) % (pages * pageSize / 2)
			same(t, "read", b.get(t, look, 2*pageSize), want[look:look+2*pageSize])
		}
	}
	stop.Store(true)
	wg.Wait()
	same(t, "in the end", b.m.Bytes(), want)
	if rounds == 0 {
		t.Error("nothing was moved")
	}
	t.Logf("%d rounds on %d nodes", rounds, len(nodes))
}
