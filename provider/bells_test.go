// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
)

// Of what is posted between two polls the first goes at once, the others with the next
// poll, or when there are enough of them.
func TestPostsAreHeld(t *testing.T) {
	d, cq, q := errQP(t, Config{Manual: true, Clock: taptest.NewClock(int64(time.Hour)).Now})
	wcs := make([]qp.WC, 2*maxLeft)
	one := []qp.SendWR{{Opcode: qp.WRSend}}
	post := func(n int) {
		t.Helper()
		for range n {
			if _, err := q.PostSend(one); err != nil {
				t.Fatal(err)
			}
		}
	}
	done := func(what string, want int) {
		t.Helper()
		if n := cq.Len(); n != want {
			t.Errorf("%s: %d completions, want %d", what, n, want)
		}
	}
	if err := cq.Resize(4 * maxLeft); err != nil {
		t.Fatal(err)
	}
	post(2)
	done("nobody is patient", 2)
	cq.Poll(wcs)
	cq.Poll(wcs)
	d.sh.bells.patient.Store(1)
	post(1)
	done("the first", 1)
	post(maxLeft - 1)
	done("those behind it", 1)
	post(1)
	done("enough of them", 1+maxLeft)
	post(1)
	done("one more", 1+maxLeft)
	if n := cq.Poll(wcs[:maxLeft+1]); n != maxLeft+1 {
		t.Errorf("%d completions polled", n)
	}
	done("completions that were there", 0) // were polled without the engine
	if n := cq.Poll(wcs); n != 1 {
		t.Errorf("%d completions by the next poll", n)
	}
	// A list that is long enough goes at once.
	cq.Poll(wcs)
	post(1)
	if n, err := q.PostSend(make([]qp.SendWR, maxLeft)); n != maxLeft || err != nil {
		t.Fatal(n, err)
	}
	done("a list", 1+maxLeft)
	cq.Poll(wcs)
	// What is left when a control verb is called, as Destroy, goes first.
	cq.Poll(wcs)
	post(2)
	done("the first of two", 1)
	d.sh.lock()
	done("the other", 2)
	d.sh.release()
}

// Whoever has posted and not polled soon after is not made to wait the next time, until
// that has changed for good.
func TestEager(t *testing.T) {
	clock := taptest.NewClock(int64(time.Hour))
	d, cq, q := errQP(t, Config{Manual: true, Clock: clock.Now})
	s := d.sh
	wcs := make([]qp.WC, 1)
	round := func(gap time.Duration) {
		t.Helper()
		if _, err := q.PostSend([]qp.SendWR{{}}); err != nil {
			t.Fatal(err)
		}
		clock.Advance(gap)
		for cq.Poll(wcs) > 0 {
		}
	}
	for range 2 * maxEager {
		round(time.Microsecond)
	}
	if e := s.eager.Load(); e != maxEager {
		t.Errorf("eager is %d when all polls came soon", e)
	}
	s.bells.patient.Store(1)
	round(time.Millisecond)
	if s.bells.patient.Load() == 0 {
		t.Error("a single late poll counts for more than those before")
	}
	for range 3 {
		round(time.Millisecond)
	}
	if e := s.eager.Load(); e != -maxEager || s.bells.patient.Load() != 0 {
		t.Errorf("eager is %d, patient %d when polls come late", e, s.bells.patient.Load())
	}
	// Polls without posts say nothing.
	for range 100 {
		cq.Poll(wcs)
	}
	if e := s.eager.Load(); e != -maxEager {
		t.Errorf("eager is %d", e)
	}
}

// Nothing that was posted waits for another call: whatever the background goroutine is
// about, it is sent.
func TestNoPostIsLeft(t *testing.T) {
	n := taptest.New(nil, taptest.Config{})
	d, cq, q := errQPOn(t, Config{Clock: taptest.NewClock(int64(time.Hour)).Now}, n)
	wcs := make([]qp.WC, 16)
	end := time.Now().Add(60 * time.Second)
	held := 0
	d.sh.eager.Store(maxEager)
	for i := 0; i < 300 || held < 30; i++ {
		if time.Now().After(end) {
			t.Fatalf("%d posts were held in %d rounds", held, i)
		}
		pollWithFrames(t, d, cq, n.Port(1))
		// At any time: in a window, at its end, or behind it.
		for range rand.N(200) {
			runtime.Gosched()
		}
		for range 1 + i%5 {
			if n, err := q.PostSend([]qp.SendWR{{}}); n != 1 || err != nil {
				t.Fatal(n, err)
			}
		}
		if cq.Len() < 1+i%5 {
			held++
		}
		for cq.Len() < 1+i%5 {
			if time.Now().After(end) {
				t.Fatalf("round %d: %d of %d work requests are done", i, cq.Len(), 1+i%5)
			}
			runtime.Gosched()
		}
		for cq.Poll(wcs) > 0 {
		}
	}
}

// The model of the two sides: drivers that post, and call unless they are held, and wait
// for what they posted to be done; an engine that is patient for a time, looks, and sleeps
// until it is called. None sleeps for ever.
func TestHeldRace(t *testing.T) {
	var b bells
	const drivers, each = 3, 10_000
	call := make(chan struct{}, 1)
	var posted, done [drivers]struct {
		n atomic.Uint64
		_ [56]byte
	}
	finished := make(chan struct{}, drivers)
	for i := range drivers {
		go func() {
			defer func() { finished <- struct{}{} }()
			for k := uint64(0); k < each; {
				for range 1 + k%4 {
					k++
					posted[i].n.Store(k)
					b.ring(uint16(i))
					if !b.held(1) {
						select {
						case call <- struct{}{}:
						default:
						}
					}
				}
				for done[i].n.Load() < k {
					runtime.Gosched()
				}
			}
		}()
	}
	asleep := time.NewTimer(time.Minute)
	for left := drivers; left > 0; {
		b.patient.Store(1)
		b.polls.Add(1)
		for range rand.N(4) {
			runtime.Gosched()
		}
		b.patient.Store(0)
		b.sweep(func(i uint16) { done[i].n.Store(posted[i].n.Load()) })
		select {
		case <-call:
		case <-finished:
			left--
		case <-asleep.C:
			t.Fatal("the engine sleeps, and a driver waits for it")
		}
	}
}
