// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"os"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

func word(s *Space) uint64 { return (*atomic.Uint64)(ptrTo(s.Generation())).Load() }

// since is what the journal says after a change.
func since(t testing.TB, s *Space, at uint64) []Change {
	t.Helper()
	s.Settled()
	var got []Change
	if _, complete := s.Changes(at, func(c Change) bool { got = append(got, c); return true }); !complete {
		t.Fatal("the journal has overflowed")
	}
	return got
}

// TestGeneration: each change of a region's mapping moves the word, to a thread whose
// system call has returned, and is in the journal; nothing else does.
func TestGeneration(t *testing.T) {
	const n = 16 * pageSize
	s := newSpace(t, Options{})
	tab := NewTable(s)
	base := apart(t, 2*n)
	register(t, tab, base, n)
	for _, c := range []struct {
		name   string
		change func() error
		want   []Change
	}{
		{"fault", func() error { bytesOf(base, n)[0] = 1; return nil }, nil},
		{"dontneed", func() error { return madvise(base, 2*pageSize, unix.MADV_DONTNEED) }, []Change{{KindRemove, base, base + 2*pageSize, 0}}},
		{"fixed", func() error {
			_, err := mmapAt(base+4*pageSize, pageSize, rw, unix.MAP_PRIVATE|unix.MAP_FIXED)
			return err
		}, []Change{{KindUnmap, base + 4*pageSize, base + 5*pageSize, 0}}},
		{"not ours", func() error { return madvise(base+4*pageSize, pageSize, unix.MADV_DONTNEED) }, nil},
		{"mremap", func() error {
			mremapTo(t, base+8*pageSize, pageSize, base+n)
			return nil
		}, []Change{{KindRemap, base + 8*pageSize, base + 9*pageSize, base + n}, {KindUnmap, base + 8*pageSize, base + 9*pageSize, 0}}},
		{"protect", func() error {
			return unix.Mprotect(bytesOf(base+9*pageSize, pageSize), unix.PROT_READ)
		}, nil},
		{"munmap", func() error { return munmap(base+9*pageSize, 2*pageSize) }, []Change{{KindUnmap, base + 9*pageSize, base + 11*pageSize, 0}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			at, was := s.LastChange(), s.Settled()
			if err := c.change(); err != nil {
				t.Fatal(err)
			}
			now := word(s)
			if changed := now != was; changed != (c.want != nil) && now%2 == 0 {
				t.Errorf("the word was %d and is %d", was, now)
			}
			if got := since(t, s, at); !reflect.DeepEqual(got, c.want) {
				t.Errorf("journal %+v, want %+v", got, c.want)
			}
			if now := s.Settled(); (now != was) != (c.want != nil) || now != was && now < was+2 {
				t.Errorf("the word was %d and is %d at the end", was, now)
			}
		})
	}
}

// TestGenerationNeverOld: a thread that comes back from munmap never sees the word as it
// was when it was even, whatever else the pager is doing.
func TestGenerationNeverOld(t *testing.T) {
	s := newSpace(t, Options{})
	tab := NewTable(s)
	// Large, with leaves of the page table: the pager takes its time after the thread goes on.
	const n, step = 64 << 20, 2 << 20
	var all sync.WaitGroup
	for g := range 2 {
		base := apart4(t, g, n)
		all.Go(func() {
			for range 30 {
				r, err := tab.Register(RegAttr{Addr: base, Length: n, Access: allRights})
				if err != nil {
					t.Error(err)
					return
				}
				for at := 0; at < n; at += step {
					bytesOf(base, n)[at] = 1 // faults, which leave the word
				}
				was := s.Settled()
				if _, err := mmapAt(base, n, rw, unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
					t.Error(err)
				}
				if now := word(s); now == was {
					t.Errorf("the word is still %d after MAP_FIXED", now)
				}
				if err := r.Deregister(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

// TestGenerationReadOnly: the page that is given out is there to be read, alone in its page.
func TestGenerationReadOnly(t *testing.T) {
	s := newSpace(t, Options{})
	w := s.Generation()
	at := uintptr(ptrTo(w))
	if at%pageSize != 0 {
		t.Errorf("the word is at %#x", at)
	}
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(b), "tapverbs-generation"); n < 2 {
		t.Errorf("%d mappings", n)
	}
	if err := guardedCopy(memory(uint64(at), 8), make([]byte, 8)); err != ErrFault {
		t.Errorf("write to the word: %v", err)
	}
	was := s.Settled()
	s.bumpGeneration(KindSuspend, 0, 1, 2)
	if now := word(s); now != was+2 {
		t.Errorf("%d, then %d", was, now)
	}
}

// TestJournalOverflow: who was away for too long is told so, and hears of the rest again.
func TestJournalOverflow(t *testing.T) {
	s := newSpace(t, Options{NoUserFault: true})
	const ring = 4096
	var all sync.WaitGroup
	for range 2 { // two at the same time leave no gap
		all.Go(func() {
			for i := range ring / 2 {
				s.bumpGeneration(KindReplace, uint64(i), uint64(i), 0)
			}
		})
	}
	all.Wait()
	n := 0
	last, complete := s.Changes(0, func(Change) bool { n++; return true })
	if last != ring || !complete || n != ring {
		t.Fatalf("%d changes, the last is %d, complete %v", n, last, complete)
	}
	if last, complete := s.Changes(5, func(Change) bool { n++; return n < ring+10 }); last != 15 || !complete {
		t.Errorf("stopped at %d", last)
	}
	s.bumpGeneration(KindMoved, 5, 6, 7)
	if last, complete := s.Changes(0, func(Change) bool { return true }); complete || last != ring+1 {
		t.Errorf("overflow was not noticed: %d", last)
	}
	if got := since(t, s, ring); !reflect.DeepEqual(got, []Change{{KindMoved, 5, 6, 7}}) {
		t.Errorf("%+v", got)
	}
}

// TestLost: a region says what of its memory it has no more, also when something else is
// registered there now, and when the journal has overflowed.
func TestLost(t *testing.T) {
	const n = 16 * pageSize
	s := newSpace(t, Options{})
	tab := NewTable(s)
	base := apart(t, n)
	r := register(t, tab, base, n)
	if !r.Followed() {
		t.Error("not followed")
	}
	lost := func() (out []span) {
		r.Lost(func(start, end uintptr) { out = append(out, span{uint64(start - base), uint64(end - base)}) })
		return out
	}
	for _, i := range []uintptr{3, 7} {
		if _, err := mmapAt(base+i*pageSize, pageSize, rw, unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
			t.Fatal(err)
		}
	}
	want := []span{{3 * pageSize, 4 * pageSize}, {7 * pageSize, 8 * pageSize}}
	if got := lost(); !reflect.DeepEqual(got, want) {
		t.Errorf("lost %v, want %v", got, want)
	}
	register(t, tab, base+3*pageSize, pageSize)
	want[0], want[1] = want[1], want[0]
	if got := lost(); !reflect.DeepEqual(got, want) {
		t.Errorf("lost %v, want %v", got, want)
	}
	k := register(t, NewTable(newSpace(t, Options{NoUserFault: true})), base, n)
	if k.Followed() {
		t.Error("followed without userfaultfd")
	}
	heap := make([]byte, 3*pageSize)
	if h := register(t, tab, uintptr(ptr(heap)), len(heap)); !h.Followed() {
		t.Error("the Go heap is not followed")
	}
}

// apart4 is apart for several at a time.
func apart4(t testing.TB, i, n int) uintptr {
	t.Helper()
	p, err := mmapAt(0x4900_0000_0000+uintptr(i)<<30, n, rw, unix.MAP_PRIVATE|unix.MAP_FIXED_NOREPLACE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = munmap(p, n) })
	return p
}

func ptrTo(p *uint64) unsafe.Pointer { return unsafe.Pointer(p) }
