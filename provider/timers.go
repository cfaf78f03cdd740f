// SPDX-License-Identifier: Apache-2.0

package provider

import "github.com/tapverbs/tapverbs/qp"

// timerHeap holds QPs by the time their Tick is due: a binary heap. An entry is a
// lower bound: deadlines move later all the time (each acknowledgement moves one)
// without the heap being told, and are looked at again when the entry is due.
type timerHeap []*QP

// next is the earliest entry, qp.Never if there is none.
func (h timerHeap) next() int64 {
	if len(h) == 0 {
		return qp.Never
	}
	return h[0].timerAt
}

// set puts q in with time at, or moves it there.
func (h *timerHeap) set(q *QP, at int64) {
	if q.timerPos < 0 {
		q.timerPos = len(*h)
		*h = append(*h, q)
	}
	old := q.timerAt
	q.timerAt = at
	if at < old || q.timerPos == len(*h)-1 {
		h.up(q.timerPos)
	} else {
		h.down(q.timerPos)
	}
}

// remove takes q out, if it is in.
func (h *timerHeap) remove(q *QP) {
	i := q.timerPos
	if i < 0 {
		return
	}
	old := *h
	last := len(old) - 1
	moved := old[last]
	old[last] = nil
	*h = old[:last]
	q.timerPos, q.timerAt = -1, qp.Never
	if i == last {
		return
	}
	old[i], moved.timerPos = moved, i
	h.up(i)
	h.down(moved.timerPos)
}

func (h timerHeap) up(i int) {
	q := h[i]
	for i > 0 {
		p := (i - 1) / 2
		if h[p].timerAt <= q.timerAt {
			break
		}
		h[i] = h[p]
		h[i].timerPos = i
		i = p
	}
	h[i], q.timerPos = q, i
}

func (h timerHeap) down(i int) {
	q := h[i]
	for {
		c := 2*i + 1
		if c >= len(h) {
			break
		}
		if c+1 < len(h) && h[c+1].timerAt < h[c].timerAt {
			c++
		}
		if h[c].timerAt >= q.timerAt {
			break
		}
		h[i] = h[c]
		h[i].timerPos = i
		i = c
	}
	h[i], q.timerPos = q, i
}

// schedule enters q's deadline when it is earlier than what the heap knows.
func (s *shard) schedule(q *QP) {
	if at := q.q.Deadline(); at < q.timerAt {
		s.timers.set(q, at)
	}
}

// expire lets timers run out that are due: those of QPs, of neighbours,
// of multicast groups, of events that are held back, and of questions to destinations.
func (s *shard) expire() (did bool) {
	if s.nb.next() <= s.now {
		s.expireNeighbours()
		did = true
	}
	if s.mc.due <= s.now {
		s.expireGroups()
		did = true
	}
	if s.heldDue <= s.now {
		s.expireEvents()
		did = true
	}
	if s.resDue <= s.now {
		s.tickResidency()
		did = true
	}
	if s.cm.due <= s.now {
		s.cm.tick()
		did = true
	}
	if s.probes.due <= s.now {
		s.probes.tick()
		did = true
	}
	for s.timers.next() <= s.now {
		q := s.timers[0]
		at := q.q.Deadline()
		if at > s.now { // it has moved
			if at == qp.Never {
				s.timers.remove(q)
			} else {
				s.timers.set(q, at)
			}
			continue
		}
		did = true
		s.cnt.Timeouts++
		q.q.Tick()
		s.doubt(q) // perhaps the peer's MAC has changed
		s.activate(q)
		// Whatever Tick made of it, it is not due a second time in this iteration.
		if at = q.q.Deadline(); at == qp.Never {
			s.timers.remove(q)
		} else {
			s.timers.set(q, max(at, s.now+1))
		}
	}
	return did
}
