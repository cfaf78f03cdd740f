// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"bytes"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// poller is the thread that polled first in a window of watch's. It is asked for shortly before the
// first and at the beginning of each, and answers with its next poll. One that did not get to that in
// a window is known by what it said last.
type poller struct {
	asked   atomic.Bool
	seen    sighting // guarded by the baton
	skipped int64    // windows in a row that were not judged, in ns
	// When this window began, and the one before it.
	began, before int64
}

// begin begins a window.
func (p *poller) begin(now int64) {
	p.before, p.began = p.began, now
	p.asked.Store(true)
}

// last is who was seen, unless that was too long ago to say anything. The caller holds the baton.
func (p *poller) last() sighting {
	if p.seen.at < p.before {
		return sighting{}
	}
	return p.seen
}

// sighting is a thread that polled.
type sighting struct {
	tid int   // 0: none
	at  int64 // of the engine's clock
	cpu int64 // what it had used of a processor by then, in ns
}

// maxSkipped bounds them.
const maxSkipped = int64(6 * time.Millisecond)

// answer is called by a thread that polls, with the baton held.
func (p *poller) answer(now int64) {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts) == nil {
		p.seen = sighting{unix.Gettid(), now, ts.Nano()}
	}
	p.asked.Store(false)
}

// pushedAside says whether the thread has not polled since lastCall because it did not run, or for grace
// at most, though it wants to: others have the processor. A program that has gone on to something else runs, or sleeps.
func (p sighting) pushedAside(lastCall, grace int64) bool {
	if p.tid == 0 || lastCall < p.at {
		return false
	}
	var ts unix.Timespec
	if unix.ClockGettime(threadClock(p.tid), &ts) != nil {
		return false // it has ended
	}
	return ts.Nano()-p.cpu < lastCall-p.at+grace && runnable(p.tid)
}

// threadClock is the clock of what a thread has used of the processors (clock_getcpuclockid(3)).
func threadClock(tid int) int32 {
	const perThread, sched = 4, 2 // CPUCLOCK_… of <linux/posix-timers.h>
	return int32(^tid<<3 | perThread | sched)
}

// runnable says whether a thread of this process runs or waits for a processor (proc_pid_stat(5)).
func runnable(tid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/stat", tid))
	_, state, ok := bytes.Cut(b, []byte(") "))
	return err == nil && ok && state[0] == 'R'
}
