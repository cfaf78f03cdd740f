// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

// TestSRQResize: what is posted moves to the new ring, in order, from wherever the old
// one's indices had come to.
func TestSRQResize(t *testing.T) {
	fired := 0
	s, err := NewSRQ(1, 8, 2, func() { fired++ })
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var w recvWork
	next, taken := uint64(0), uint64(0)
	post := func(n int) {
		t.Helper()
		for range n {
			if _, err := s.PostRecv([]RecvWR{{ID: next, SGL: []SGE{{Addr: next, Length: 1, LKey: 7}, {Addr: next + 1, Length: 2}}}}); err != nil {
				t.Fatal(err)
			}
			next++
		}
	}
	take := func(n int) {
		t.Helper()
		for range n {
			if !s.take(&w) || w.id != taken || len(w.sges) != 2 || w.sges[0] != (SGE{taken, 1, 7}) || w.total != 3 {
				t.Fatalf("took %+v, want %d", w, taken)
			}
			taken++
		}
	}
	post(8)
	take(6)
	post(5) // 7 posted, around the end of the ring
	for _, n := range []int{-1, 0, 6} {
		if err := s.Resize(n); !errors.Is(err, ErrAttrValue) {
			t.Errorf("%d for 7: %v", n, err)
		}
	}
	if err := s.Resize(100); err != nil {
		t.Fatal(err)
	}
	if n, sge, _ := s.Query(); n != 128 || sge != 2 {
		t.Error(n, sge)
	}
	post(121)
	if _, err := s.PostRecv(make([]RecvWR, 1)); !errors.Is(err, ErrFull) {
		t.Error(err)
	}
	take(120)
	if err := s.Resize(8); err != nil {
		t.Fatal(err)
	}
	if _, err := s.PostRecv(make([]RecvWR, 1)); !errors.Is(err, ErrFull) {
		t.Error(err)
	}
	if err := s.SetLimit(5); err != nil {
		t.Fatal(err)
	}
	take(3)
	if fired != 0 {
		t.Error("limit reached at 5")
	}
	if err := s.Resize(4); !errors.Is(err, ErrAttrValue) {
		t.Errorf("below the limit: %v", err)
	}
	take(5)
	if fired != 1 || s.take(&w) {
		t.Errorf("%d limit events", fired)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Resize(8); !errors.Is(err, ErrState) {
		t.Errorf("closed: %v", err)
	}
}

// TestSRQResizeBusy: work requests come out once each and in order, while one posts, one
// takes and one changes the size.
func TestSRQResizeBusy(t *testing.T) {
	const n = 20000
	s, err := NewSRQ(1, 8, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var wg sync.WaitGroup
	var done atomic.Bool
	wg.Go(func() {
		for id := uint64(0); id < n && !done.Load(); {
			switch _, err := s.PostRecv([]RecvWR{{ID: id}}); {
			case err == nil:
				id++
			case errors.Is(err, ErrFull):
				runtime.Gosched()
			default:
				t.Error(err)
				return
			}
		}
	})
	resized := 0
	wg.Go(func() {
		for size := 1; !done.Load(); size = size*5%251 + 1 {
			if err := s.Resize(size); err == nil {
				resized++
			} else if !errors.Is(err, ErrAttrValue) {
				t.Error(err)
				return
			}
		}
	})
	var w recvWork
	for want := uint64(0); want < n && !t.Failed(); {
		if !s.take(&w) {
			runtime.Gosched()
			continue
		}
		if w.id != want {
			t.Errorf("took %d, want %d", w.id, want)
			break
		}
		want++
	}
	done.Store(true)
	wg.Wait()
	if resized == 0 {
		t.Error("never resized")
	}
}
