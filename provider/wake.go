// SPDX-License-Identifier: Apache-2.0

package provider

import "github.com/tapverbs/tapverbs/mr"

// wakeBell is the bell that has all QPs look at what they hold: index 0 is no QP's.
const wakeBell = 0

// mailBell says that another shard has left something; index 1 is no QP's either.
const mailBell = 1

// regionChanged is told what happens to regions. Work that waits for one of the device
// goes on at once, by the goroutine that has made it so, or by who has the baton.
func (s *shard) regionChanged(e mr.RegionEvent) {
	if e.Region.Table() != s.d.keys {
		return
	}
	switch e.Kind {
	case mr.RegionSuspended, mr.RegionResumed, mr.RegionEliminated, mr.RegionClosed:
		s.bells.ring(wakeBell)
		if s.baton.TryLock() {
			if !s.closing {
				s.progress(false, postRounds)
			}
			s.release()
		}
	}
}

// wakeHeld lets the QPs go on that wait for memory.
func (s *shard) wakeHeld() {
	for _, q := range s.res {
		s.tellSuspensions(q)
	}
	for _, q := range s.table {
		if q != nil && !q.gone && q.q.Wake() {
			s.activate(q)
		}
	}
}
