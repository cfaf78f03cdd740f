// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"os"
	"runtime"
	"runtime/metrics"
	"sync/atomic"
	"time"
)

// turnTime is after how long, in ns, a goroutine that calls and sleeps without end takes a new
// turn with Go's scheduler. A thread of the runtime, sysmon, looks for those that were not scheduled
// for 10 ms, and takes the place (GOMAXPROCS) of one that it finds in C or in a system call,
// however short they are; and as long as it finds one it looks each 20 µs, at the price
// of two switches of threads. Threads that poll, and the background goroutine, are such ones. It
// sleeps for 10 ms when it finds none.
const turnTime = int64(9 * time.Millisecond)

// turn is when the last one was taken, in ns of the engine's clock.
type turn struct{ at int64 }

// over says whether it is time for a new one, and that it is taken: by runtime.Gosched,
// when no baton is held.
func (t *turn) over(now int64) bool {
	if now-t.at < turnTime || sysmonSlow.Load() {
		return false
	}
	t.at = now
	return true
}

var sysmonSlow atomic.Bool

// SlowSysmon says that sysmon is in no hurry to look, whatever it finds, so that nobody needs to
// take turns: a place that it has taken is there again when its goroutine comes back (MakeRoom), without a
// switch. It is for who has made it so, as the engine of the C library has (shim/engine/sysmon.c), before devices
// are opened. A thread that calls from C keeps its place when it is back there, until sysmon looks; so
// with more threads there are more places.
func SlowSysmon() { sysmonSlow.Store(true) }

// roomy is how many goroutines may be in C or in system calls, beside one for each processor,
// before there is no place left: sysmon leaves those alone that nobody waits for.
const roomy = 16

// MakeRoom sets GOMAXPROCS to more than the processors that may be used, so that goroutines in C and in system
// calls need not wait for each other's places, nor sysmon take them (turnTime), unless the environment
// says what it is to be. It is for programs in which engines do most of what is done in Go, as those
// of C that load one; a program that computes in Go would have as many threads compete for
// its processors. false: the environment does.
func MakeRoom() (made bool) {
	if os.Getenv("GOMAXPROCS") != "" {
		return false
	}
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + roomy)
	return true
}

const (
	// roomTime is how often it is looked whether there is room left, in ns.
	roomTime = int64(20 * time.Millisecond)
	// maxRoom bounds it: that many threads are not all at work in verbs.
	maxRoom = 1024
)

// room is when that was last done, in ns of the engine's clock, and what was found.
type room struct {
	at      int64
	threads [1]metrics.Sample
}

// keep makes more places if threads have become more.
func (r *room) keep(now int64) {
	if !sysmonSlow.Load() || now-r.at < roomTime {
		return
	}
	r.at = now
	n := &r.threads[0]
	n.Name = "/sched/threads/total:threads"
	metrics.Read(r.threads[:])
	if n.Value.Kind() != metrics.KindUint64 {
		return
	}
	if want := int(min(n.Value.Uint64(), maxRoom)); want > runtime.GOMAXPROCS(0)-roomy/4 {
		runtime.GOMAXPROCS(want + roomy)
	}
}
