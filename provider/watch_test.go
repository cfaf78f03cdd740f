// SPDX-License-Identifier: Apache-2.0

package provider

import "testing"

// program is an application as watch sees it: how long ago it polled when a frame
// comes, and when a window of so many ns is over.
type program struct {
	frame func() int64
	over  func(window int64) int64
}

// observe runs a program for so many frames, or windows in their place, and gives
// how many of them the background goroutine watched for.
func observe(w *watch, p program, n int) (watched int) {
	for range n {
		if w.window == 0 {
			watched++
			w.frame(p.frame())
		} else {
			w.over(p.over(w.window), true)
		}
	}
	return watched
}

func polls(int64) int64 { return 0 }
func now() int64        { return 0 }

func TestWatch(t *testing.T) {
	const long = 1 << 40
	w := newWatch()

	// One that never polls is never left alone.
	if n := observe(&w, program{frame: func() int64 { return long }}, 1000); n != 1000 {
		t.Errorf("it watched for %d of 1000 frames of a program that does not poll", n)
	}
	// Nor is one that polls for some frames, and computes.
	i := 0
	some := func() int64 {
		if i++; i%8 == 0 {
			return long
		}
		return 0
	}
	if n := observe(&w, program{frame: some}, 1000); n != 1000 {
		t.Errorf("it watched for %d of 1000 frames of a program that polls now and then", n)
	}
	// One that polls all the time is left alone after a few, for longer and longer.
	if n := observe(&w, program{frame: now, over: polls}, 1000); n > minProof || w.window != longWindow {
		t.Errorf("it watched for %d of 1000 frames of a program that polls, and stays away for %d ns", n, w.window)
	}
	// Windows that were cut short prove nothing.
	was := w
	if w.over(0, false); w != was {
		t.Errorf("%+v became %+v", was, w)
	}
	// It is back at once when the polling ends.
	w.over(endGrace, true)
	if w.window != 0 || w.proof != minProof {
		t.Errorf("the polling has ended: %+v", w)
	}
}

// One that polls when it has posted, and then waits for memory to change, is tried
// more and more seldom.
func TestWatchMemory(t *testing.T) {
	w := newWatch()
	since := int64(0) // it waits for a frame that nobody reads
	p := program{frame: func() int64 { since = 0; return 0 }, over: func(window int64) int64 { since += window; return since }}
	observe(&w, p, 10_000)
	if w.proof != maxProof {
		t.Errorf("it is tried after %d frames", w.proof)
	}
	if n := observe(&w, p, 10_000); n < 9_950 {
		t.Errorf("it was left alone %d times of 10000", 10_000-n)
	}
	// And when it polls again, it is left alone after those.
	p.over = polls
	if n := observe(&w, p, 10_000); n > maxProof {
		t.Errorf("it watched for %d frames more", n)
	}
	for range manyWindows {
		w.over(0, true)
	}
	if w.over(endGrace, true); w.proof != minProof {
		t.Errorf("it has polled for long, and is tried after %d frames", w.proof)
	}
}

// On a machine where a poll takes 50 times as long, all times are, so that a loop that polls
// is still one; the odd poll that was pushed aside changes little.
func TestPace(t *testing.T) {
	var p pace
	p.init()
	if p.stretch(pollGrace) != pollGrace || p.shrink(endGrace) != endGrace {
		t.Fatal("a usual machine has other times")
	}
	measured := 0
	for i := range 16 * 200 {
		if !p.due() {
			continue
		}
		measured++
		if i%80 == 79 {
			p.took(int64(20e6))
		} else {
			p.took(50_000)
		}
	}
	if measured != 200 {
		t.Errorf("%d of 3200 polls were measured", measured)
	}
	if s := p.stretch(1000); s < 40_000 || s > 75_000 {
		t.Errorf("1 µs becomes %d ns where polls take 50 µs", s)
	}
	if back := p.shrink(p.stretch(pollGrace)); back < pollGrace-1 || back > pollGrace+1 {
		t.Errorf("there and back: %d ns of %d", back, pollGrace)
	}
	for range 100 {
		p.took(600)
	}
	if p.stretch(pollGrace) != pollGrace {
		t.Errorf("it stays at %d ns", p.ns.Load())
	}
	for range 1000 {
		p.took(int64(1e9))
	}
	if p.ns.Load() != slowestPoll {
		t.Errorf("no bound: %d ns", p.ns.Load())
	}
}
