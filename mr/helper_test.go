// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const allRights = LocalWrite | RemoteWrite | RemoteRead | RemoteAtomic

// newSpace starts a Space that really pages by userfaultfd, unless told otherwise.
func newSpace(t testing.TB, o Options) *Space {
	t.Helper()
	s, err := NewSpace(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.UserFault(); (err == nil) == o.NoUserFault {
		t.Fatalf("NoUserFault %v, but UserFault says %v", o.NoUserFault, err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func alloc(t testing.TB, n int, o ...AllocOption) *Memory {
	t.Helper()
	m, err := Alloc(n, o...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil && err != ErrClosed {
			t.Error(err)
		}
	})
	return m
}

// register makes a region of all rights, and ends it with the test.
func register(t testing.TB, tab *Table, addr uintptr, n int, mod ...func(*RegAttr)) *Region {
	t.Helper()
	a := RegAttr{PD: 1, Addr: addr, Length: uint64(n), Access: allRights}
	for _, f := range mod {
		f(&a)
	}
	r, err := tab.Register(a)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Deregister() }) // ErrClosed if the test did it
	return r
}

func accessor(t testing.TB, s *Space) *Accessor {
	a := s.NewAccessor()
	t.Cleanup(a.Close)
	return a
}

// bed is a Space, memory, a region over all of it and an engine's hand.
type bed struct {
	s   *Space
	tab *Table
	m   *Memory
	r   *Region
	a   *Accessor
	st  Stage
}

func newBed(t testing.TB, n int, o ...AllocOption) *bed {
	t.Helper()
	return newBedIn(t, newSpace(t, Options{}), n, o...)
}

func newBedIn(t testing.TB, s *Space, n int, o ...AllocOption) *bed {
	t.Helper()
	b := &bed{s: s}
	b.tab = NewTable(b.s)
	b.m = alloc(t, n, o...)
	b.r = register(t, b.tab, b.m.Addr(), n)
	b.a = accessor(t, b.s)
	if b.r.Paging() != UserFault {
		t.Fatalf("the region is paged by %v", b.r.Paging())
	}
	return b
}

// put writes and flushes.
func (b *bed) put(t testing.TB, off int, src []byte) {
	t.Helper()
	if err := b.a.Write(&b.st, b.r, b.r.IOVA()+uint64(off), src); err != nil {
		t.Fatalf("write %d bytes at %d: %v", len(src), off, err)
	}
	if err := b.a.Flush(&b.st); err != nil {
		t.Fatalf("flush %d bytes at %d: %v", len(src), off, err)
	}
}

func (b *bed) get(t testing.TB, off, n int) []byte {
	t.Helper()
	d := make([]byte, n)
	if err := b.a.Read(b.r, b.r.IOVA()+uint64(off), d); err != nil {
		t.Fatalf("read %d bytes at %d: %v", n, off, err)
	}
	return d
}

// pattern is n bytes that differ from place to place and from seed to seed, none 0.
func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7+i>>8*13)%251 + seed%4 + 1
	}
	return b
}

// same fails with the first difference.
func same(t testing.TB, what string, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("%s: byte %d of %d is %#x, want %#x", what, i, len(want), got[i], want[i])
		}
	}
}

// status is a number of /proc/self/status, in KiB or as it stands.
func status(t testing.TB, name string) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			n, err := strconv.Atoi(strings.Fields(v)[0])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no %s in /proc/self/status", name)
	return 0
}

// mmapAt maps n anonymous bytes at an address, replacing what is there.
func mmapAt(addr uintptr, n int, prot, flags int) (uintptr, error) {
	p, _, e := unix.Syscall6(unix.SYS_MMAP, addr, uintptr(n), uintptr(prot), uintptr(flags|unix.MAP_ANONYMOUS), ^uintptr(0), 0)
	if e != 0 {
		return 0, e
	}
	return p, nil
}

func munmap(addr uintptr, n int) error {
	if _, _, e := unix.Syscall(unix.SYS_MUNMAP, addr, uintptr(n), 0); e != 0 {
		return e
	}
	return nil
}

func madvise(addr uintptr, n, advice int) error {
	if _, _, e := unix.Syscall(unix.SYS_MADVISE, addr, uintptr(n), uintptr(advice)); e != 0 {
		return e
	}
	return nil
}

// stormTime is how long a storm lasts; TAPVERBS_STORM lengthens it (a Go duration).
func stormTime(t testing.TB, d time.Duration) time.Duration {
	if v := os.Getenv("TAPVERBS_STORM"); v != "" {
		long, err := time.ParseDuration(v)
		if err != nil {
			t.Fatal(err)
		}
		return long
	}
	return d
}

// storming waits for a storm's time to be over and for what it must have met: on a machine
// that has more to do that may take longer.
func storming(t testing.TB, d time.Duration, met func() bool) {
	end := time.Now().Add(stormTime(t, d))
	for time.Now().Before(end) || !met() && time.Now().Before(end.Add(stormPatience)) {
		time.Sleep(10 * time.Millisecond)
	}
}

const stormPatience = time.Minute

func ptr(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }
