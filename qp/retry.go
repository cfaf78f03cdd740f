// SPDX-License-Identifier: Apache-2.0

package qp

import "github.com/tapverbs/tapverbs/wire"

// The requester's clocks: retries after losses and RNR NAKs, and its rate limit.

// goBack makes una the next PSN to send.
func (r *requester) goBack() {
	if r.rec.poor >= suspectAfter {
		r.rec.poor = 0
		r.q.env.Out.Suspect(&r.q.attr.Path)
	}
	r.psn = r.una
	r.cur = r.head
	r.asked = r.una.Add(wire.PSNMask)
	r.forceAck = true
	r.sinceAckReq = 0
	r.held, r.heldBack, r.lookAt = false, false, Never
}

// Retries says how many chances the QP has to send anew what is lost: some, if it is of a reliable service and
// one that is wasted does no harm; last, if what it sends now must not get lost.
func (q *QP) Retries() (some, last bool) {
	r := &q.req
	return q.tr.acked && q.attr.RetryCnt > 1 && r.retries > 1, r.recovering && r.retries <= 1
}

// retry goes back after a loss, if a retry is left (IBA 9.7.6.1.1); it ends the
// oldest request otherwise. So many packets may be out from then on.
func (r *requester) retry(limit int32) {
	if r.una == r.end {
		return
	}
	if r.retries == 0 {
		r.q.env.Stats.RetryExceeded.Add(1)
		r.failHead(WCRetryExcErr)
		return
	}
	r.retries--
	r.q.losses++
	r.recovering = true
	r.rec.lost(limit)
	r.goBack()
	r.armTimer()
}

// rnr waits as long as the peer asks (IBA 9.7.5.2.8), 7 retries being any number.
func (r *requester) rnr(delay int64) {
	if r.rnrRetries == 0 {
		r.q.env.Stats.RNRExceeded.Add(1)
		r.failHead(WCRNRRetryExcErr)
		return
	}
	r.q.rnrsHeeded++
	if r.q.attr.RNRRetry != 7 {
		r.rnrRetries--
	}
	r.goBack()
	// The peer is there: retries are for one that is silent, and a long wait is many RNR
	// NAKs of which some get lost.
	r.retries, r.recovering, r.nakked = r.q.attr.RetryCnt, false, false
	r.probesOver()
	r.rec.heard()
	r.ackAt, r.rec.probeAt = Never, Never
	r.rnrAt = r.q.env.Now() + delay
}

// tick acts on expired timers.
func (r *requester) tick(now int64) {
	if now >= r.rateAt {
		r.rateAt = Never // Run, which follows, goes on
	}
	if now >= r.lookAt {
		r.look()
	}
	if now >= r.rnrAt {
		r.rnrAt = Never
		r.armTimer()
	}
	if now >= r.ackAt {
		r.ackAt, r.rec.probeAt = Never, Never
		r.q.env.Stats.LocalAckTimeout.Add(1)
		// On a link that loses so much that going back once did not help, what is
		// waited for is sent two times, as RFC 9002 6.2.4 advises for probes:
		// retries are few (IBA 9.7.6.1.3), and the peer takes duplicates anyway.
		again := r.recovering
		r.nakked = false
		r.retry(afterTimeout)
		r.twice = again && r.una != r.end
	}
	if now >= r.rec.probeAt {
		r.probe()
	}
}

// rateBurst is how far a QP with a rate limit may catch up after it had nothing to
// send, in ns.
const rateBurst = 100_000

// withinRate says whether the QP's rate limit, and congestion, let a packet go now,
// and has Tick called when they will.
func (r *requester) withinRate() bool {
	at := r.cong.quietUntil
	if r.rate.rate != 0 {
		r.rate.pass(r.q.env.Now())
	}
	if r.q.attr.RateLimit != 0 || r.rate.rate != 0 {
		at = max(at, r.paidUntil)
	}
	if at == 0 || at <= r.q.env.Now() {
		return true
	}
	r.rateAt = at
	return false
}

// pay charges a packet of so many payload bytes to the rate limit, or to the rate that
// congestion has left, whichever is less.
func (r *requester) pay(bytes int64) {
	kbps := int64(r.q.attr.RateLimit)
	if r.rate.rate != 0 {
		if kbps == 0 || r.rate.rate < kbps {
			kbps = r.rate.rate
		}
		r.rate.sent(bytes)
	}
	if kbps != 0 {
		const headers = 64 // about what surrounds a payload on the wire
		r.paidUntil = max(r.paidUntil, r.q.env.Now()-rateBurst) + (bytes+headers)*8_000_000/kbps
	}
}

// payRead charges a READ request to the rate limit for all that it asks for; congestion is
// about what we send.
func (r *requester) payRead(bytes int64) {
	if r.q.attr.RateLimit == 0 {
		bytes = 0
	}
	r.pay(bytes)
}
