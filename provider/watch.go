// SPDX-License-Identifier: Apache-2.0

package provider

import "time"

const (
	// pollGrace is how long after its last call an application still counts as
	// polling, in ns. It is longer than what lies between two polls of a loop that
	// waits, and about what being woken costs.
	pollGrace = int64(20 * time.Microsecond)
	// endGrace is how long after it the polling has ended. One that polls and finds
	// completions makes no call while it works them off: a batch of them takes longer
	// than pollGrace.
	endGrace = int64(100 * time.Microsecond)
	// The background goroutine stays away from the TAP for firstWindow to begin
	// with, and twice as long each time that it finds the polling to go on, up to
	// maxWindow, or to a longShare of how long it has gone on, up to longWindow: so long may a
	// frame wait, once, when the polling has ended.
	firstWindow = int64(25 * time.Microsecond)
	maxWindow   = int64(400 * time.Microsecond)
	longWindow  = int64(4 * time.Millisecond)
	longShare   = 32
	// It goes away after so many frames that an application would have polled;
	// after more and more of them when the polling keeps ending soon after.
	minProof = 16
	maxProof = 1024
	// lateFrame is how many of them one counts that it would have let wait.
	lateFrame = 8
	// fewWindows are few, manyWindows many.
	fewWindows  = 4
	manyWindows = 16
)

// watch decides who looks at the TAP: the background goroutine, who is woken by each
// frame then, or an application that polls. Being woken costs the peer and both
// CPUs some µs for each frame, which a program that polls all the time does not want
// to pay. One that waits for memory to change (ib_write_lat) does not poll while it
// waits; nobody but the background reads its frames. Both poll now and then, and
// nothing tells them apart but to stay away, and see whether the polling goes on.
//
// So: it watches first. After some frames that came when an application had polled
// just before it goes away for a short time, and looks again. If the polling goes
// on it stays away, for longer times; otherwise it watches again, and then it takes
// four times as many frames to make it go. A program that polls pays for the first
// frames, and for a timer that runs out each 400 µs, later each 4 ms; one that never polls for
// nothing; one that does both for a try of 200 µs each thousand frames.
//
// It knows no clock and does no I/O. All times are in ns of a usual machine (pace).
type watch struct {
	window int64 // to stay away for next; 0: it watches
	proof  int   // frames it takes to go away
	seen   int   // of them
	good   int   // windows in which the polling went on
	went   int64 // how long they were
}

func newWatch() watch { return watch{proof: minProof} }

// frame: the goroutine was woken by a frame, and this is how long ago an
// application polled.
func (w *watch) frame(ago int64) {
	if ago >= pollGrace {
		w.seen = max(0, w.seen-lateFrame) // nobody else would have taken it soon
		return
	}
	if w.seen++; w.seen >= w.proof {
		w.window, w.seen, w.good, w.went = firstWindow, 0, 0, 0
	}
}

// about says whether the goroutine is about to go away.
func (w *watch) about() bool { return w.seen >= w.proof-4 }

// over: a window has passed, and this is how long ago an application polled; whole says that
// the window was not cut short, and could be judged.
func (w *watch) over(ago int64, whole bool) {
	if ago < endGrace {
		if !whole {
			return
		}
		w.good++
		w.went += w.window
		w.window = min(2*w.window, max(maxWindow, w.went/longShare), longWindow)
		return
	}
	w.window = 0
	switch {
	case w.good < fewWindows:
		w.proof = min(4*w.proof, maxProof)
	case w.good >= manyWindows:
		w.proof = minProof
	}
}
