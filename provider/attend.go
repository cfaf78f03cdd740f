// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"runtime"

	"github.com/tapverbs/tapverbs/qp"
)

// What an application does for the engine when it polls, and what is noted of it: whether it comes
// again soon, so that something may be left to its next call.

// attend makes progress for an application that found its CQ empty, until there is something in
// it or nothing to do; again says that it will be back at once. Who finds others at it
// leaves it to them. some says that it has found something.
func (s *shard) attend(c *qp.CQ, again bool) (some bool) {
	if !s.baton.TryLock() {
		return false
	}
	if !s.closing {
		s.polled()
		s.holds = again && s.patient()
		for range pollRounds {
			s.lookIn()
			if some = c.Len() > 0; some || !s.pending() {
				break
			}
		}
		s.holds = false
		if again {
			if s.rested.Load() {
				s.rested.Store(false)
			}
			if s.bg.poller.asked.Load() {
				s.bg.poller.answer(s.now)
			}
		}
	}
	over := s.turn.over(s.now)
	s.release()
	if over {
		runtime.Gosched()
	}
	return some
}

// lookIn is an iteration for an application that polls.
func (s *shard) lookIn() {
	if did := s.step(true); !did && s.pace.due() {
		s.pace.took(s.clock() - s.now)
	}
	s.lastCall.Store(s.now)
}

// patient says whether the application can be relied on to call again at once: it has
// done so, and the background goroutine looks what has become of it within a window.
func (s *shard) patient() bool { return s.eager.Load() > 0 && s.bg.away.Load() }

// settle lets the acknowledgement go that was held back.
func (s *shard) settle() {
	if q := s.owes; q != nil {
		s.owes = nil
		s.activate(q)
	}
}

// polled notes that an application makes progress, and whether it does so soon after it
// has posted: then it may post the next time without calling.
func (s *shard) polled() {
	s.bells.polls.Add(1)
	if s.posted || s.owes != nil || !s.bells.quiet() {
		s.called()
	}
	s.posted = false
	s.settle()
}

// called notes how long somebody has let wait what was left to his next call.
func (s *shard) called() {
	e := s.eager.Load()
	if s.clock()-s.lastCall.Load() < s.pace.stretch(pollGrace) {
		if e < maxEager {
			s.eager.Store(e + 1)
		}
		return
	}
	if e = max(e-maxEager/2, -maxEager); e <= 0 {
		s.bells.patient.Store(0)
	}
	s.eager.Store(e)
}
