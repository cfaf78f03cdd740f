// SPDX-License-Identifier: Apache-2.0

package qp

import "slices"

// What the QPs of a shard have out together is bounded, too, so that the packets of all of
// them fit into the queue of one receiver that does not read it just then. Each may have
// its share out. One that finds no room because others had more, from a time when they were
// fewer, waits in line.

// share is what is out, and who waits.
type share struct {
	out    int32 // packets out, of all QPs, as their windows count them
	active int   // QPs that have some
	probes int   // probes of all QPs that have seen no progress since
	line   line  // those that found no room
}

// line is QPs that wait.
type line struct {
	qs    []*QP // from first on
	first int
	dest  bool // at a receiver's, not the shard's
}

func (l *line) len() int { return len(l.qs) - l.first }

// has is whether a QP is in this line.
func (l *line) has(q *QP) *bool {
	if l.dest {
		return &q.req.inDestLine
	}
	return &q.req.inLine
}

// join has a QP wait, if it does not yet.
func (l *line) join(q *QP) {
	if in := l.has(q); !*in {
		*in = true
		l.qs = append(l.qs, q)
	}
}

// next takes the first off the line.
func (l *line) next() *QP {
	q := l.qs[l.first]
	*l.has(q) = false
	l.qs[l.first] = nil
	if l.first++; l.first == len(l.qs) {
		l.qs, l.first = l.qs[:0], 0
	} else if l.first > len(l.qs)/2 {
		n := copy(l.qs, l.qs[l.first:])
		clear(l.qs[n:])
		l.qs, l.first = l.qs[:n], 0
	}
	return q
}

// leave takes one off that waits no more.
func (l *line) leave(q *QP) {
	in := l.has(q)
	if !*in {
		return
	}
	*in = false
	for i := l.first; i < len(l.qs); i++ {
		if l.qs[i] == q {
			l.qs = slices.Delete(l.qs, i, i+1)
			return
		}
	}
}

// admit lets as many go on as there is room.
func (l *line) admit(room int32) {
	for room > 0 && l.len() > 0 {
		room -= l.next().ready()
	}
}

// move counts a QP that had so many packets out and has now.
func (s *share) move(from, to int32) {
	switch {
	case from == 0 && to != 0:
		s.active++
	case from != 0 && to == 0:
		s.active--
	}
	s.out += to - from
}

// each is how much of a window there is for each QP.
func (s *share) each(window int32) int32 {
	return max(minWindow, window/int32(max(s.active+s.line.len(), 1)))
}

// minWindow is a share at least, so that not each packet has to be acknowledged by itself.
const minWindow = 4

// maxShardProbes is how many probes may be out at a time: a receiver that reads nothing
// gets them in addition to what it has got.
const maxShardProbes = 64

// account keeps the shard's counts, and the receiver's, of what is out. It is called when
// una or end has moved.
func (r *requester) account() {
	was, out := r.out, r.end.Sub(r.una)
	if out == was {
		return
	}
	r.out = out
	e, d := r.q.env, r.q.dest
	e.share.move(was, out)
	if d != nil {
		d.move(was, out)
	}
	if out < was {
		if e.share.line.len() > 0 {
			e.admit()
		}
		if d != nil && d.line.len() > 0 {
			d.admit()
		}
	}
}

// shardWindow is how many packets all QPs of the shard may have out.
func (e *Env) shardWindow() int32 {
	if e.Window != 0 {
		return e.Window
	}
	return shardWindow
}

// admit lets those go on for whom there is room now.
func (e *Env) admit() { e.share.line.admit(e.shardWindow() - e.share.out) }

// ready has a QP run that has waited for room. It gives how many places that takes: none if
// there is nothing left that it can send now, so that the next in line is not left to wait for
// somebody who does not come.
func (q *QP) ready() int32 {
	if q.closed || !q.req.wantsRoom() {
		return 0
	}
	if q.env.Ready != nil {
		q.env.Ready(q)
	}
	return 1
}

// wantsRoom says whether there is something to send that waits for nothing but room.
func (r *requester) wantsRoom() bool {
	if st := r.q.State(); st != StateRTS && st != StateSQD {
		return false
	}
	return r.cur != r.q.sq.prod().Load() && r.rnrAt == Never && !r.held
}

// window is how many packets may be unacknowledged.
func (r *requester) window() int32 {
	e := r.q.env
	all := e.shardWindow()
	n := min(r.rec.allowed, e.share.each(all))
	if d := r.q.dest; d != nil {
		// Unless it is short, the share of those who send there is the greater one.
		if most := d.window(); most < all {
			n = min(n, d.each(most))
		}
	}
	return n
}

// room is for how many packets there is room from psn on, 0 if it is to be waited for. When
// a window has become smaller than what is out, and the peer was not asked to acknowledge
// any of that, there is room for one that asks. Who takes the last place asks in any case.
func (r *requester) room() int32 {
	n := r.window() - r.psn.Sub(r.una)
	if n <= 0 && r.unasked() {
		r.forceAck = true
		return 1
	}
	if r.psn != r.end || n <= 0 {
		return max(n, 0) // what is sent again is counted
	}
	e, d := r.q.env, r.q.dest
	n = r.place(n, e.shardWindow()-e.share.out, &e.share.line)
	if d != nil && n > 0 {
		n = r.place(n, d.window()-d.out, &d.line)
	}
	return n
}

// place is for how many of n packets there is room where so many places are left: with none,
// the QP waits in line.
func (r *requester) place(n, left int32, l *line) int32 {
	switch {
	case left >= n:
		return n
	case left > 0:
		return left
	case left < 0 && r.unasked():
		r.forceAck = true
		return 1
	}
	l.join(r.q)
	return 0
}

// unasked says whether there are packets out of which the peer was not asked to
// acknowledge any.
func (r *requester) unasked() bool { return r.psn != r.una && r.asked.Before(r.una) }

// probesOver notes that there was progress, or will be none.
func (r *requester) probesOver() {
	r.q.env.share.probes -= int(r.rec.probes)
	r.rec.probes = 0
}
