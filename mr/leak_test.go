// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// holdings is what the process has: file descriptors, large mappings that are not
// the Go runtime's, and threads of the pager.
func holdings(t *testing.T) (fds, maps, pagers int) {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		// Thread stacks and arenas of the C library come and go: PROT_NONE, or named.
		if f := strings.Fields(line); len(f) == 5 && strings.HasPrefix(f[1], "rw") || strings.Contains(line, "memfd") {
			maps++
		}
	}
	tasks, err := filepath.Glob("/proc/self/task/*/comm")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range tasks {
		if b, err := os.ReadFile(c); err == nil && strings.HasPrefix(string(b), "tapverbs-pager") {
			pagers++
		}
	}
	return len(d), maps, pagers
}

// settled is holdings once there are no more pagers than that: pthread_join(3) returns a
// little before a thread is off the kernel's list. One that is left for good ends the test
// by its timeout.
func settled(t *testing.T, most int) (fds, maps, pagers int) {
	t.Helper()
	for {
		if fds, maps, pagers = holdings(t); pagers <= most {
			return fds, maps, pagers
		}
		runtime.Gosched()
	}
}

func TestNothingIsLeftAfterClose(t *testing.T) {
	Process() // whose pager stays: another test may have started it before
	round := func() {
		s, err := NewSpace(Options{})
		if err != nil {
			t.Fatal(err)
		}
		tab := NewTable(s)
		m, err := Alloc(1<<20, Shared())
		if err != nil {
			t.Fatal(err)
		}
		r, err := tab.Register(RegAttr{Addr: m.Addr(), Length: 1 << 20, Access: allRights})
		if err != nil {
			t.Fatal(err)
		}
		a := s.NewAccessor()
		var st, late Stage
		for _, st := range []*Stage{&st, &late} {
			if err := a.Write(st, r, r.IOVA()+5, make([]byte, 6000)); err != nil {
				t.Fatal(err)
			}
		}
		if _, _, pagers := settled(t, 2); pagers != 2 {
			t.Errorf("%d pager threads while one Space is open, and the process's", pagers)
		}
		if err := a.Flush(&st); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); !errors.Is(err, ErrInvalid) {
			t.Errorf("close with a region: %v", err)
		}
		if err := r.Deregister(); err != nil {
			t.Fatal(err)
		}
		a.Close()
		late.Drop()
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		if err := m.Close(); err != ErrClosed {
			t.Errorf("second close of memory: %v", err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != ErrClosed {
			t.Errorf("second close: %v", err)
		}
	}
	round() // the runtime's own: threads, their stacks, poller
	fds, maps, _ := settled(t, 1)
	for range 50 {
		round()
	}
	fds2, maps2, pagers := settled(t, 1)
	// A thread that the runtime starts meanwhile brings a mapping or two.
	if fds2 > fds || maps2 > maps+10 || pagers != 1 {
		t.Errorf("before: %d fds, %d mappings; after 50 rounds: %d fds, %d mappings, %d pagers", fds, maps, fds2, maps2, pagers)
	}
}

// TestMemoryIsFreeAfterClose: memory that was a Space's can be another's, also when
// something else was mapped into it, or it was moved.
func TestMemoryIsFreeAfterClose(t *testing.T) {
	m := alloc(t, 64*pageSize)
	for range 3 {
		func() {
			b := &bed{s: newSpace(t, Options{}), m: m}
			r, err := NewTable(b.s).Register(RegAttr{Addr: m.Addr(), Length: 64 * pageSize, Access: allRights})
			if err != nil || r.Paging() != UserFault {
				t.Fatal(err, r.Paging())
			}
			exe, err := os.Open("/proc/self/exe")
			if err != nil {
				t.Fatal(err)
			}
			defer exe.Close()
			if _, _, e := unix.Syscall6(unix.SYS_MMAP, m.Addr()+9*pageSize, pageSize, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_FIXED, exe.Fd(), 0); e != 0 {
				t.Fatal(e)
			}
			if err := r.Deregister(); err != nil {
				t.Fatal(err)
			}
			// The pager does not answer here any more: the kernel does.
			before := b.s.Stats().AppFaults
			m.Bytes()[0], m.Bytes()[60*pageSize] = 1, 1
			if got := b.s.Stats().AppFaults - before; got != 0 {
				t.Errorf("%d faults came to the pager after Deregister", got)
			}
			if _, err := mmapAt(m.Addr(), 64*pageSize, rw, unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
				t.Fatal(err)
			}
		}()
	}
}

func TestProcess(t *testing.T) {
	if s := Process(); s != Process() || s.UserFault() != nil {
		t.Error(s.UserFault())
	}
}

func TestAlloc(t *testing.T) {
	for _, n := range []int{0, -1} {
		if _, err := Alloc(n); !errors.Is(err, ErrInvalid) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	m := alloc(t, 5000, Shared())
	if len(m.Bytes()) != 5000 || m.Addr()%pageSize != 0 || m.FD() < 0 {
		t.Errorf("%d bytes at %#x, fd %d", len(m.Bytes()), m.Addr(), m.FD())
	}
	if alloc(t, 1).FD() != -1 {
		t.Error("private memory has a file")
	}
}

// TestOrdinaryUser runs TestAsOrdinaryUser in a process of user 65534.
func TestOrdinaryUser(t *testing.T) {
	if os.Getuid() != 0 {
		TestAsOrdinaryUser(t)
		return
	}
	// The test binary is where others may not read it.
	dir, err := os.MkdirTemp("/tmp", "tapverbs-mr-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	exe := filepath.Join(dir, "mr.test")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(exe, b, 0o755), os.Chmod(exe, 0o755)); err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe, "-test.v", "-test.run=^TestAsOrdinaryUser$")
	c.Env = append(os.Environ(), "TAPVERBS_ORDINARY=1")
	c.Dir = dir
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := c.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestAsOrdinaryUser") {
		t.Errorf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}

// TestAsOrdinaryUser is what an ordinary user gets: without UserModeOnly paging by
// the kernel and the reason for it (unless the machine lets anybody), with it paging
// by userfaultfd.
func TestAsOrdinaryUser(t *testing.T) {
	if os.Getuid() == 0 {
		return // TestOrdinaryUser comes back as somebody else
	}
	s, err := NewSpace(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.UserFault(); err != nil {
		t.Logf("as user %d: %v", os.Getuid(), err)
		if !strings.Contains(err.Error(), "vm.unprivileged_userfaultfd") {
			t.Errorf("does not say what to do: %v", err)
		}
		kernelRegion(t, s, alloc(t, 64*pageSize).Bytes())
	}
	b := newBedIn(t, newSpace(t, Options{UserModeOnly: true}), 64*pageSize)
	msg := pattern(20*pageSize, 1)
	b.put(t, 100, msg)
	same(t, "written", b.m.Bytes()[100:][:len(msg)], msg)
	b.m.Bytes()[40*pageSize] = 1
	if st := b.s.Stats(); st.PageFaults != 21 || st.AppFaults != 1 {
		t.Errorf("%+v", st)
	}
	// Locking more than is allowed.
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 8 * pageSize, Max: 8 * pageSize}); err != nil {
		t.Fatal(err)
	}
	m := alloc(t, 64*pageSize)
	_, err = b.tab.Register(RegAttr{Addr: m.Addr(), Length: 64 * pageSize, Pin: true})
	if !errors.Is(err, ErrMemlock) || !strings.Contains(err.Error(), "32768") {
		t.Errorf("pin 64 pages of 8: %v", err)
	}
	if got := status(t, "VmLck"); got != 0 {
		t.Errorf("%d KiB are locked after it", got)
	}
	// What several regions lock counts once, and stays locked for the last of them.
	pin := func(a *RegAttr) { a.Pin = true }
	whole, part := register(t, b.tab, m.Addr(), 8*pageSize, pin), register(t, b.tab, m.Addr()+4*pageSize, 4*pageSize, pin)
	locked := func(what string, want int) {
		t.Helper()
		if got := status(t, "VmLck"); got != want {
			t.Errorf("%s: %d KiB are locked, want %d", what, got, want)
		}
	}
	locked("two that overlap", 32)
	more := RegAttr{PD: 1, Addr: m.Addr() + 4*pageSize, Length: 5 * pageSize, Access: allRights, Pin: true}
	if _, err := b.tab.Register(more); !errors.Is(err, ErrMemlock) {
		t.Errorf("one page more than is allowed: %v", err)
	}
	locked("after one more was refused", 32)
	if err := whole.Deregister(); err != nil {
		t.Fatal(err)
	}
	locked("the first is gone", 16)
	third, err := b.tab.Register(more)
	if err != nil {
		t.Fatalf("one page more, when there is room: %v", err)
	}
	locked("another", 20)
	if err := part.Deregister(); err != nil {
		t.Fatal(err)
	}
	locked("the second is gone", 20)
	if err := third.Deregister(); err != nil {
		t.Fatal(err)
	}
	locked("all are gone", 0)
}
