// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// pace is how fast this machine is at what watch judges applications by: what a poll takes that
// finds nothing, a read(2) of the TAP most of it. That is some 0.6 µs on the hardware of 2025,
// and 50 times that in an emulated guest, where between two polls of a loop there is
// more than what means elsewhere that the polling has ended. All of watch's times are stretched by it.
type pace struct {
	polls int          // since the last that was measured
	ns    atomic.Int64 // what one takes, at least usualPoll
}

const (
	// usualPoll is as long as a poll is taken to last at least, slowestPoll at most, in ns.
	usualPoll   = int64(time.Microsecond)
	slowestPoll = 100 * usualPoll
	// measureEvery: so seldom is the clock read once more.
	measureEvery = 16
)

func (p *pace) init() { p.ns.Store(usualPoll) }

// due says whether the poll that has just found nothing is to be measured.
func (p *pace) due() bool {
	if p.polls++; p.polls < measureEvery {
		return false
	}
	p.polls = 0
	return true
}

// took notes that one has taken so many ns. One in which the thread was pushed aside says
// nothing: long ones count little.
func (p *pace) took(ns int64) {
	at := p.ns.Load()
	if ns < at {
		at -= (at - ns) / 4
	} else {
		at += min(ns-at, at) / 8
	}
	p.ns.Store(min(max(at, usualPoll), slowestPoll))
}

// stretch makes of a time on a usual machine the same here, shrink the other way round.
func (p *pace) stretch(ns int64) int64 { return ns * p.ns.Load() / usualPoll }

func (p *pace) shrink(ns int64) int64 {
	if at := p.ns.Load(); at > usualPoll {
		// In floating point: a call long ago is too far away to be multiplied.
		return int64(float64(ns) * float64(usualPoll) / float64(at))
	}
	return ns
}

// shortSlice is the time slice that the thread of the background goroutine asks for, in ns.
const shortSlice = uint64(100 * time.Microsecond)

// urgentNice is its nice value while it sleeps between frames, where the kernel permits that (CAP_SYS_NICE, or RLIMIT_NICE). It is
// what an interrupt is to a card: what it uses of a processor is not held against it the next time,
// when a program waits there, computing, for what it is to bring. While it looks for frames
// instead of sleeping, and when it has been at work for maxUrgent ns, it has no such right.
const (
	urgentNice = -20
	maxUrgent  = int64(time.Millisecond)
)

// mayNotUrge: the kernel has said so.
var mayNotUrge atomic.Bool

// plainNice is the nice value of other threads.
var plainNice = sync.OnceValue(func() int32 {
	attr, err := unix.SchedGetAttr(0, 0)
	if err != nil {
		return 0
	}
	return attr.Nice
})

// preferSoon keeps the goroutine on a thread of its own, with a time slice so short that
// the kernel (from 6.12 on, EEVDF) lets it push aside a thread that computes, as one does that waits
// for its memory to change, instead of waiting for the end of that one's slice of milliseconds, and with urgentNice
// if it is urgent. Older kernels, and sandboxes that forbid it, do without. Threads that come of it have neither.
func preferSoon(urgent bool) {
	runtime.LockOSThread()
	setSoon(urgent)
}

// setSoon does so for the thread that the goroutine has.
func setSoon(urgent bool) {
	const resetOnFork = 1 // SCHED_FLAG_RESET_ON_FORK
	nice := plainNice()   // first of all: this thread's, as it was
	attr, err := unix.SchedGetAttr(0, 0)
	if err != nil || attr.Policy != unix.SCHED_NORMAL {
		return
	}
	attr.Runtime, attr.Flags = shortSlice, resetOnFork
	if urgent && !mayNotUrge.Load() {
		attr.Nice = urgentNice
		if unix.SchedSetAttr(0, attr, 0) == nil {
			return
		}
		mayNotUrge.Store(true)
	}
	attr.Nice = nice
	_ = unix.SchedSetAttr(0, attr, 0)
}

// giveWay takes a new turn (turnTime). For one that keeps its thread that would be a handing over
// between threads, there and back, on processors that others compute on; so it lets go of the thread for it,
// and keeps the one that it finds itself on, which mostly is the same.
func giveWay(urgent bool) {
	was := unix.Gettid()
	runtime.UnlockOSThread()
	runtime.Gosched()
	preferSoon(urgent)
	if was == unix.Gettid() {
		return
	}
	if attr, err := unix.SchedGetAttr(was, 0); err == nil && attr.Policy == unix.SCHED_NORMAL {
		attr.Runtime, attr.Nice = 0, plainNice() // what others have
		_ = unix.SchedSetAttr(was, attr, 0)
	}
}
