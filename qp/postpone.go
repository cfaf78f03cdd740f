// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// Requests that meet memory which is to be had later: a region that is suspended
// (mr.Region.Suspend), or content that its store has yet to give (a major fault). Nothing
// fails because of that, unless the region's mr.FaultPolicy wants it to.
//
// The responder asks the peer to wait (RNR NAK), keeps packets until they can be executed
// (held.go), or lets them be lost, as the region's mr.SuspendMode and mr.FaultPolicy say.
// Requester and completer hold the work request where it is: nothing of it is sent, no
// retry is used up and no timer runs; READs and atomics whose result has no place to go
// to are asked for again, and the responder does not execute an atomic twice.
//
// It goes on when QP.Wake is called, and from time to time it looks by itself.

const (
	// lookAgain is how often a QP looks by itself whether a region is resumed, in ns: who
	// resumes it calls Wake.
	lookAgain = int64(50 * time.Millisecond)
	// firstSuspendDelay is what the first RNR NAK for a suspended region asks for, in ns.
	firstSuspendDelay = int64(time.Millisecond)
	// minFetch and maxFetch bound how soon a QP looks again for content of a store, in ns.
	minFetch = int64(20 * time.Microsecond)
	maxFetch = int64(10 * time.Millisecond)
)

// SetFaultPolicy sets what requests to the QP, and its work requests, do that meet content
// in the store, instead of what their regions say; mr.FaultByRegion: what those say.
func (q *QP) SetFaultPolicy(p mr.FaultPolicy) { q.policy = p }

// FaultPolicy is what SetFaultPolicy has set.
func (q *QP) FaultPolicy() mr.FaultPolicy { return q.policy }

// Wake has the QP look again at what it holds, in the Run that follows. It says whether
// there is any.
func (q *QP) Wake() bool {
	waits := q.req.lookAt != Never
	q.req.look()
	return waits || q.resp.waits()
}

// SetAdvised has Env.Advise asked about each WRITE and READ before it begins.
func (q *QP) SetAdvised(on bool) { q.advised = on }

// adviseGo says whether a WRITE or READ may begin; if not, when to look again is set.
func (r *requester) adviseGo(w *SendWQE) bool {
	if k := wrOps[w.Opcode].kind; k != wire.KindWrite && k != wire.KindRead {
		return true
	}
	until := r.q.env.Advise(r.q, w)
	if until <= r.q.env.Now() {
		return true
	}
	r.lookAt = until // what is under way before it goes on, retransmissions too
	return false
}

// enter has the QP's policy count for what follows, and faults count as the QP's.
func (q *QP) enter() {
	q.env.Mem.Override(q.policy)
	q.env.Mem.Account(&q.faults)
}

// fetchDelay is when content of the store may be there, in ns from now.
func (q *QP) fetchDelay() int64 {
	return min(max(q.env.Keys.Space().FetchDelay(), minFetch), maxFetch)
}

// lookAfter is how long from now to look again for what an error was about.
func (q *QP) lookAfter(err error) int64 {
	switch err {
	case mr.ErrSuspended:
		return lookAgain
	case mr.ErrMajor:
		return q.fetchDelay()
	}
	return wire.RNRDelay(busyTimer)
}

// failing says whether an error ends what has met it, rather than putting it off.
func (q *QP) failing(err error) bool {
	return !mr.Postponed(err) || err == mr.ErrMajor && q.env.Mem.FaultPolicy(q.env.Mem.Blocked()) == mr.FaultError
}

// putOff is what a responder does with a packet for which it is too early.
type putOff uint8

const (
	putRNR putOff = iota
	putHold
	putDrop
)

// putsOff says what to do when access to a region gave an error that goes by.
func (r *responder) putsOff(region *mr.Region, err error) putOff {
	acked := r.q.tr.acked
	switch err {
	case mr.ErrSuspended:
		switch m, _ := region.SuspendMode(); {
		case m == mr.SuspendHold:
			return putHold
		case m == mr.SuspendDrop:
			return putDrop
		}
	case mr.ErrMajor:
		switch {
		case r.q.env.Mem.FaultPolicy(region) == mr.FaultDrop:
			return putDrop
		case !acked:
			return putHold // nobody can be asked to send it again
		}
	}
	if !acked {
		return putDrop
	}
	return putRNR
}

// postpone deals with the packet in hand, whose access to memory gave an error that goes
// by.
func (r *responder) postpone(err error) respStep {
	return r.postponeFor(r.q.env.Mem.Blocked(), err)
}

// postponeFor is postpone, with the region that is to be waited for.
func (r *responder) postponeFor(region *mr.Region, err error) respStep {
	if err == mr.ErrBusy {
		if r.held.replaying {
			r.putBack = true
			return r.lookIn(err)
		}
		if !r.q.tr.acked {
			return r.abandon(WCSuccess)
		}
		return r.notReady(busyTimer)
	}
	if r.held.replaying {
		r.putBack = true // where it was
		return r.lookIn(err)
	}
	how := r.putsOff(region, err)
	if how == putHold && !r.hold(region, r.inHand, r.span) {
		how = putRNR
		if !r.q.tr.acked {
			how = putDrop
		}
	}
	switch how {
	case putHold:
		return r.lookIn(err)
	case putRNR:
		r.countRNR(region, err)
		return r.notReady(r.waitTimer(region, err, 1))
	}
	if !r.q.tr.acked {
		return r.abandon(WCSuccess)
	}
	// The peer's timeout is to find out, not what is behind this one.
	r.q.env.Stats.Dropped.Add(1)
	r.quiet = true
	return respDone
}

// countRNR counts that the peer is asked to wait because of what an error was about.
func (r *responder) countRNR(region *mr.Region, err error) {
	region.CountRNR()
	if err == mr.ErrMajor {
		r.q.faults.RNRs++
	}
}

// lookIn has the responder look again by itself.
func (r *responder) lookIn(err error) respStep {
	r.lookAt = min(r.lookAt, r.q.env.Now()+r.q.lookAfter(err))
	return respDone
}

// waitTimer is the RNR timer for what an error was about. For a suspended region whose
// owner has not said how long, it is half as long as the peer has been waiting. For content
// of the store it is as long as that takes, so many times one after the other.
func (r *responder) waitTimer(region *mr.Region, err error, times int64) uint8 {
	now := r.q.env.Now()
	if r.waitFor != region {
		r.waitFor, r.waitSince = region, now
	}
	if err == mr.ErrMajor {
		// Not fast enough once: twice as long. Each time more is a time more for a loss.
		return wire.RNRCode(min(max(times*r.q.fetchDelay(), now-r.waitSince), maxFetch))
	}
	_, delay := region.SuspendMode()
	if delay == 0 {
		delay = max(firstSuspendDelay, (now-r.waitSince)/2)
	}
	return wire.RNRCode(delay)
}

// waits says whether the responder has something to do when memory is there again.
func (r *responder) waits() bool {
	return r.lookAt != Never || r.held.n() > 0 || r.repersist != nil || r.out.held()
}

// resume goes on with what was put off, as far as it can.
func (r *responder) resume() {
	r.lookAt = Never
	r.out.lookBack(r)
	if f := r.repersist; f != nil && !f.region.Suspended() {
		r.repersist = nil
		r.q.env.Persist(r.q, f.region, f.va, f.n, r.ticket)
	} else if f != nil {
		r.lookIn(mr.ErrSuspended)
	}
	r.replay()
	r.endBatch()
}

// flushJob is a FLUSH to persistence that was begun when its region was suspended.
type flushJob struct {
	region *mr.Region
	va, n  uint64
}

// hold keeps the send queue where it is, as a work request's memory is to be had later.
// back: its result has no place to go to, so all from there on is asked for again.
func (r *requester) hold(err error, back bool) {
	if back {
		r.goBack()
	}
	now, after := r.q.env.Now(), r.q.lookAfter(err)
	if r.heldSince < 0 {
		r.heldSince = now
	}
	if err == mr.ErrMajor {
		after = min(max(after, now-r.heldSince), maxFetch)
	}
	r.held, r.heldBack, r.lookAt = true, back, now+after
	if r.waitsAlone() {
		r.ackAt = Never
	}
}

// waitsAlone says whether the send queue is held and no acknowledgement is to be expected:
// what is on its way is of the work request that is held, and has perhaps not asked for one.
func (r *requester) waitsAlone() bool {
	if !r.held || r.heldBack {
		return r.held
	}
	s := r.at(r.cur)
	return !s.started || !r.una.Before(s.first)
}

// look lets the send queue go on.
func (r *requester) look() {
	r.lookAt = Never
	if r.held {
		r.held, r.heldBack = false, false
		if r.ackAt == Never {
			r.armTimer()
		}
	}
}
