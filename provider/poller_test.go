// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"golang.org/x/sys/unix"
)

// A thread that polled is pushed aside if it wants to run and has hardly done so since; not if it
// has gone on to something else, sleeps, or has ended.
func TestPushedAside(t *testing.T) {
	var stop atomic.Bool
	spins, ended := make(chan sighting), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // the thread ends with the goroutine
		p := poller{}
		p.answer(1000)
		spins <- p.seen
		for !stop.Load() {
		}
	}()
	s := <-spins
	if s.tid == 0 || s.at != 1000 {
		t.Fatalf("seen: %+v", s)
	}
	ran := func() int64 {
		var ts unix.Timespec
		if err := unix.ClockGettime(threadClock(s.tid), &ts); err != nil {
			t.Fatal(err)
		}
		return ts.Nano() - s.cpu
	}
	for ran() <= 2*endGrace { // it gets that sooner or later
		time.Sleep(time.Millisecond)
	}
	if s.pushedAside(s.at, endGrace) {
		t.Error("a thread that runs without polling counts as pushed aside")
	}
	for !s.pushedAside(s.at+int64(time.Hour), endGrace) { // it has polled for longer than it has run
		time.Sleep(time.Millisecond) // Go's scheduler has just stopped it
	}
	if s.pushedAside(s.at-1, endGrace) || (sighting{}).pushedAside(s.at, endGrace) {
		t.Error("one that was not seen to poll counts as pushed aside")
	}
	stop.Store(true)
	<-ended
	for runnable(s.tid) { // a main thread sleeps for ever
		time.Sleep(time.Millisecond)
	}
	if s.pushedAside(s.at+int64(time.Hour), endGrace) {
		t.Error("a thread that has ended counts as pushed aside")
	}

	sleeps, wake := make(chan sighting), make([]int, 2)
	if err := unix.Pipe(wake); err != nil {
		t.Fatal(err)
	}
	go func() {
		runtime.LockOSThread()
		p := poller{}
		p.answer(1000)
		sleeps <- p.seen
		unix.Read(wake[0], make([]byte, 1))
	}()
	s = <-sleeps
	for runnable(s.tid) {
		time.Sleep(time.Millisecond)
	}
	if s.pushedAside(s.at+int64(time.Hour), endGrace) {
		t.Error("a thread that sleeps counts as pushed aside")
	}
	unix.Close(wake[1])
}

// Whoever polls answers, a program of Go's and one that is driven by rings.
func TestPollerAnswers(t *testing.T) {
	d, cq, _ := errQP(t, Config{Manual: true, Clock: taptest.NewClock(int64(time.Hour)).Now})
	p := &d.sh.bg.poller
	for name, poll := range map[string]func(){
		"Poll":     func() { cq.Poll(make([]qp.WC, 1)) },
		"Progress": func() { cq.Progress(false) },
	} {
		p.seen = sighting{}
		p.asked.Store(true)
		poll()
		if p.asked.Load() || p.seen.tid == 0 || p.seen.at != int64(time.Hour) {
			t.Errorf("%s: asked %v, seen %+v", name, p.asked.Load(), p.seen)
		}
	}
	p.asked.Store(true)
	if cq.Progress(true); !p.asked.Load() {
		t.Error("one that goes to sleep answers")
	}
}
