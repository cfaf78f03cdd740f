// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"bytes"
	"errors"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// own is how much of a range has pages of its own, by /proc/self/pagemap: pages that
// are present and not the kernel's zero page, which is never counted as exclusive.
func own(t testing.TB, va uintptr, pages int) (n int) {
	t.Helper()
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	buf := make([]uint64, pages)
	if _, err := f.ReadAt(unsafe.Slice((*byte)(unsafe.Pointer(&buf[0])), 8*pages), int64(va>>pageShift)*8); err != nil {
		t.Fatal(err)
	}
	for _, e := range buf {
		if e>>63 == 1 && e>>56&1 == 1 { // present, mapped exclusively
			n++
		}
	}
	return n
}

func TestPrefetch(t *testing.T) {
	const pages = 600 // more than a leaf, and no multiple of a batch
	for _, paging := range []Paging{UserFault, KernelPaging, Implicit} {
		t.Run(paging.String(), func(t *testing.T) {
			s := newSpace(t, Options{NoUserFault: paging == KernelPaging})
			tab, m := NewTable(s), alloc(t, pages*pageSize)
			var r *Region
			if paging == Implicit {
				r = implicitRegion(t, tab)
			} else {
				r = register(t, tab, m.Addr(), pages*pageSize)
			}
			if r.Paging() != paging {
				t.Fatalf("paged by %v", r.Paging())
			}
			advise := func(from, n int, adv Advice) {
				t.Helper()
				if err := s.Prefetch(r, uint64(m.Addr())+uint64(from), uint64(n), adv); err != nil {
					t.Fatalf("advice %d of %d bytes at %d: %v", adv, n, from, err)
				}
			}
			present := func(want int) {
				t.Helper()
				var vec [pages]byte
				if _, _, e := unix.Syscall(unix.SYS_MINCORE, m.Addr(), pages*pageSize, uintptr(unsafe.Pointer(&vec))); e != 0 {
					t.Fatal(e)
				}
				n := 0
				for _, b := range vec {
					n += int(b & 1)
				}
				if n != want {
					t.Errorf("%d pages are present, want %d", n, want)
				}
				if c := r.Stats().PagePrefetch; c != uint64(want) {
					t.Errorf("%d pages were counted, want %d", c, want)
				}
				if c := s.Stats(); c.PagePrefetch != uint64(want) || c.PageFaults != 0 {
					t.Errorf("of all regions, %d pages and %d faults were counted", c.PagePrefetch, c.PageFaults)
				}
			}
			advise(0, pages*pageSize, PrefetchNoFault)
			present(0)
			advise(5*pageSize+4095, 2, Prefetch)
			present(2)
			if n := own(t, m.Addr(), pages); n != 0 {
				t.Errorf("%d pages are writable, which nobody has asked for", n)
			}
			advise(0, 100*pageSize, PrefetchWrite)
			present(100)
			if n := own(t, m.Addr(), pages); n != 100 {
				t.Errorf("%d pages are writable, want 100", n)
			}
			advise(0, pages*pageSize, Prefetch)
			present(pages)
			advise(0, pages*pageSize, PrefetchWrite)
			present(pages)
			if n := own(t, m.Addr(), pages); n != pages {
				t.Errorf("%d pages are writable, want all %d", n, pages)
			}
			if c := s.Stats(); c.AppFaults != 0 {
				t.Errorf("%d faults came to the pager", c.AppFaults)
			}
			for i, b := range m.Bytes() {
				if b != 0 {
					t.Fatalf("byte %d is %#x", i, b)
				}
			}
		})
	}
}

// TestPrefetchKeepsData: pages with data keep it, and pages shared with a child's
// would-be copy become writable all the same.
func TestPrefetchKeepsData(t *testing.T) {
	b := newBed(t, 4*pageSize)
	b.put(t, 100, []byte("data"))
	for _, adv := range []Advice{PrefetchNoFault, Prefetch, PrefetchWrite} {
		if err := b.s.Prefetch(b.r, b.r.IOVA(), 4*pageSize, adv); err != nil {
			t.Fatal(err)
		}
		if got := string(b.m.Bytes()[100:104]); got != "data" {
			t.Fatalf("advice %d: %q", adv, got)
		}
	}
}

func TestPrefetchErrors(t *testing.T) {
	b := newBed(t, 4*pageSize)
	at := uint64(b.m.Addr())
	if _, _, e := unix.Syscall(unix.SYS_MUNMAP, uintptr(at)+2*pageSize, pageSize, 0); e != 0 {
		t.Fatal(e)
	}
	for _, adv := range []Advice{Prefetch, PrefetchWrite, PrefetchNoFault} {
		if err := b.s.Prefetch(b.r, at, 4*pageSize, adv); err != ErrRemoved {
			t.Errorf("advice %d over a hole: %v", adv, err)
		}
		if err := b.s.Prefetch(b.r, at, 2*pageSize, adv); err != nil {
			t.Errorf("advice %d before a hole: %v", adv, err)
		}
	}
	if err := b.r.Deregister(); err != nil {
		t.Fatal(err)
	}
	if err := b.s.Prefetch(b.r, at, 1, Prefetch); err != ErrKey {
		t.Errorf("after deregistration: %v", err)
	}

	s := newSpace(t, Options{NoUserFault: true})
	m := alloc(t, 4*pageSize)
	r := register(t, NewTable(s), m.Addr(), 4*pageSize)
	at = uint64(m.Addr())
	if _, _, e := unix.Syscall(unix.SYS_MUNMAP, uintptr(at)+2*pageSize, pageSize, 0); e != 0 {
		t.Fatal(e)
	}
	for _, adv := range []Advice{Prefetch, PrefetchWrite, PrefetchNoFault} {
		if err := s.Prefetch(r, at, 4*pageSize, adv); !errors.Is(err, ErrRemoved) && !errors.Is(err, ErrUnmapped) {
			t.Errorf("kernel paging, advice %d over a hole: %v", adv, err)
		}
	}
}

// stuckStore is a Store that reads nothing before it may. For tests.
type stuckStore struct {
	memStore
	reading chan struct{} // has a value once somebody reads
	gate    chan struct{} // closed: all may
}

func (s *stuckStore) Read(slot uint32, page []byte) error {
	select {
	case s.reading <- struct{}{}:
	default:
	}
	<-s.gate
	return s.memStore.Read(slot, page)
}

// TestPrefetchForPeerIsInNobodysWay: while a peer's prefetch waits for the store, regions are
// suspended, changed and prefetched as ever.
func TestPrefetchForPeerIsInNobodysWay(t *testing.T) {
	st := &stuckStore{reading: make(chan struct{}, 1), gate: make(chan struct{})}
	b := evicting(t, 4, st)
	copy(b.m.Bytes(), pattern(4*pageSize, 1))
	if n, err := b.s.Evict(b.r, b.r.IOVA(), 4*pageSize, Stored); err != nil || n == 0 {
		t.Fatalf("%d pages evicted: %v", n, err)
	}
	tab, m, y := NewTable(b.s), alloc(t, 4*pageSize), alloc(t, 4*pageSize)
	r := register(t, tab, m.Addr(), 4*pageSize)
	copy(y.Bytes(), pattern(4*pageSize, 2))
	done := make(chan error)
	go func() { done <- b.s.PrefetchForPeer(b.r, b.r.IOVA(), 4*pageSize) }()
	<-st.reading
	if err := b.s.Prefetch(r, r.IOVA(), 4*pageSize, Prefetch); err != nil {
		t.Errorf("prefetch: %v", err)
	}
	suspend(t, r)
	if err := r.Replace(r.IOVA(), 4*pageSize, y.Addr()); err != nil {
		t.Errorf("replace: %v", err)
	}
	resume(t, r)
	close(st.gate)
	if err := <-done; err != nil {
		t.Errorf("the peer's prefetch: %v", err)
	}
	if !bytes.Equal(m.Bytes(), pattern(4*pageSize, 2)) || !bytes.Equal(b.m.Bytes(), pattern(4*pageSize, 1)) {
		t.Error("wrong data")
	}
}
