// SPDX-License-Identifier: Apache-2.0

package taptest

import (
	"sync/atomic"
	"time"
)

// Clock is virtual time that the test owns. It starts at 0 ns and moves only
// when told. The zero value is ready; all methods are safe for concurrent use.
type Clock struct{ now atomic.Int64 }

// NewClock returns a clock that stands at start, in nanoseconds.
func NewClock(start int64) *Clock {
	c := new(Clock)
	c.now.Store(start)
	return c
}

// Now is the present time in nanoseconds.
func (c *Clock) Now() int64 { return c.now.Load() }

// Advance moves the clock forward by d. A negative d panics: time does not go back.
func (c *Clock) Advance(d time.Duration) {
	if d < 0 {
		panic("taptest: Clock.Advance by a negative duration")
	}
	c.now.Add(int64(d))
}

// AdvanceTo moves the clock forward to t, in nanoseconds. A t in the past
// changes nothing, so a scheduler may pass the time of an event already due.
func (c *Clock) AdvanceTo(t int64) {
	for {
		now := c.now.Load()
		if t <= now || c.now.CompareAndSwap(now, t) {
			return
		}
	}
}
