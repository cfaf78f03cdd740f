// SPDX-License-Identifier: Apache-2.0

package qp

import "github.com/tapverbs/tapverbs/wire"

// Losses. A responder takes packets in order, so all that was sent behind a lost one is
// sent again (IBA 9.7.5.2.2). What a loss costs is therefore the packets that are out when
// it is noticed, and the time until it is. Two things keep both small:
//
// The window is a quarter of what passes between two losses, as smoothed over some of
// them: then a fifth of what is sent is for nothing, whatever the rate of loss. It may be
// more where it takes that to fill the link: what is out beyond that waits in queues, and
// makes round trips longer than the shortest (as TCP Vegas looks at it). After going back it
// begins small and grows by what is acknowledged, so that what the peer has yet to throw away
// and what comes anew do not fill its queue together. After a timeout it begins with one
// packet: a peer that is only slow gets no more than that from each retry.
//
// Nothing tells of a loss behind which nothing comes, or of a lost NAK. So when there was
// no progress for some round trips the oldest packet is sent once more, as RFC 8985 7.3
// does it for TCP: this probe is answered, and the answer says how far the peer is. Probes
// cost no retry, are twice as far apart each time, and end after maxProbes without progress.

const (
	// lossShare of what passes between two losses is the window, but at least minLossWindow.
	lossShare     = 4
	minLossWindow = 16
	// lossless is how many packets without a loss make a link one that loses nothing.
	lossless = 4096
	// afterNak and afterTimeout are how many packets may be out after going back.
	afterNak     = 16
	afterTimeout = 1

	// A probe comes after the smoothed round trip and four times its variation (RFC 6298),
	// and no sooner than minProbe, in ns. On a link that has lost nothing it comes after a quarter
	// of the ACK timeout, between minProbe and calmProbe: there, a peer is silent because it is busy.
	minProbe  = 1_000_000
	calmProbe = 20_000_000
	maxProbes = 6

	// After suspectAfter losses in a row between which hardly anything passed, packets by
	// twos at most, the egress is told that what leaves together may not arrive.
	suspectAfter = 4
	hardly       = 2
)

// recovery is what the requester knows about losses.
type recovery struct {
	allowed int32 // packets out at a time: the lesser of the two that follow
	limit   int32 // grows by what is acknowledged after going back
	between int32 // packets between losses, smoothed, and
	passed  int32 // since the last one; both up to lossless
	poor    uint8 // losses in a row between which hardly anything passed

	probeAt int64
	probes  uint8 // sent since there was progress
	// probed: probe has been sent again, when probeNext was what was to be sent next.
	probed           bool
	probeRead        bool // it asks for a READ response
	probe, probeNext wire.PSN
	probedAt         int64 // when; 0: it has been answered

	srtt, rttvar, minRTT int64
	timed                wire.PSN // packet whose round trip is taken, since
	timedAt              int64    // that time; 0: none
	timedOut             int32    // how many packets were out with it
	pipe                 int32    // twice what the link holds, in packets
}

func (c *recovery) init() {
	*c = recovery{limit: maxWindow, between: lossless, passed: lossless, probeAt: Never}
	c.update()
}

func (c *recovery) update() {
	c.allowed = min(c.limit, max(minLossWindow, c.pipe, max(c.between, c.passed)/lossShare))
}

// loses says whether the link has lost something not long ago.
func (c *recovery) loses() bool { return max(c.between, c.passed) < lossless }

// lost notes a loss; limit packets may be out from now on.
func (c *recovery) lost(limit int32) {
	c.noteLoss()
	if c.limit = limit; limit > afterTimeout {
		c.limit = max(limit, c.pipe/2)
	}
	c.probed, c.probedAt, c.timedAt = false, 0, 0
	c.update()
}

func (c *recovery) noteLoss() {
	if c.passed > hardly {
		c.poor = 0
	} else {
		c.poor++
	}
	c.between = (3*c.between + c.passed) / 4
	c.passed = 0
}

// progress notes that n packets were acknowledged, all before una. It says whether that
// was a probe's doing, as far as one can tell by the time it took.
func (c *recovery) progress(una wire.PSN, n int32, now int64) (probed bool) {
	if c.probedAt != 0 {
		if probed = now-c.probedAt <= max(c.srtt+4*c.rttvar, minProbe/4); probed {
			c.noteLoss()
		}
		c.probedAt = 0
	}
	if c.timedAt != 0 && c.timed.Before(una) {
		c.sample(now - c.timedAt)
		c.timedAt = 0
	}
	if c.passed < lossless || c.limit < maxWindow {
		c.passed, c.limit = min(c.passed+n, lossless), min(c.limit+n, maxWindow)
		c.update()
	}
	return probed
}

// time begins to take a round trip, with out packets out.
func (c *recovery) time(psn wire.PSN, out int32, now int64) {
	c.timed, c.timedAt, c.timedOut = psn, now, out
}

// heard notes that the peer is there, without progress: it has asked to wait.
func (c *recovery) heard() { c.probed, c.probedAt, c.timedAt = false, 0, 0 }

// sample takes a round trip into account (RFC 6298 2.3).
func (c *recovery) sample(rtt int64) {
	rtt = max(rtt, 1)
	if c.srtt == 0 {
		c.srtt, c.rttvar, c.minRTT = rtt, rtt/2, rtt
		return
	}
	c.minRTT = min(c.minRTT, rtt)
	c.pipe = int32(min(2*int64(c.timedOut)*c.minRTT/rtt, maxWindow))
	c.rttvar += (max(c.srtt-rtt, rtt-c.srtt) - c.rttvar) / 4
	c.srtt += (rtt - c.srtt) / 8
}

// armProbe sets when the next probe is due, if it comes before the ACK timeout.
func (r *requester) armProbe(now int64) {
	c := &r.rec
	c.probeAt = Never
	if c.probes >= maxProbes || r.una == r.end {
		return
	}
	wait := int64(minProbe)
	if !c.loses() {
		wait = calmProbe
		if r.ackAt != Never {
			wait = max(minProbe, min((r.ackAt-now)/4, calmProbe))
		}
	}
	if at := now + max(wait, c.srtt+4*c.rttvar)<<c.probes; at < r.ackAt {
		c.probeAt = at
	}
}

// probe sends the oldest packet once more, whatever else is to be sent next.
func (r *requester) probe() {
	c := &r.rec
	c.probeAt = Never
	if r.una == r.end || r.psn == r.una || r.rnrAt != Never || r.held || r.head == r.q.sq.prod().Load() {
		return // it is about to be sent
	}
	w, s := r.q.sq.sendWQE(r.head), r.at(r.head)
	kind := wrOps[w.Opcode].kind
	if !s.started || s.fail != WCSuccess || kind == wire.KindFlush {
		return // a FLUSH takes its time
	}
	if r.q.env.share.probes >= maxShardProbes {
		r.armProbe(r.q.env.Now())
		return
	}
	psn, cur := r.psn, r.cur
	r.psn, r.cur, r.forceAck = r.una, r.head, true
	c.probe, c.probeNext, c.probeRead = r.una, psn, kind == wire.KindRead
	var sent sendResult
	if kind == wire.KindRead {
		sent = r.sendRead(w, s, 1)
	} else {
		sent = r.send(w, s)
	}
	r.q.env.count()
	r.psn, r.cur = psn, cur
	if sent == sendOK {
		r.q.env.Stats.Probes.Add(1)
		c.probed, c.probedAt = true, r.q.env.Now()
		c.timedAt = 0 // an answer might be to either
	}
	c.probes++
	r.q.env.share.probes++
	r.armProbe(r.q.env.Now())
}

// split makes two of a READ request that was sent, the second from a PSN on, so that a part can
// be asked for: as the peer may never have got the whole, nothing longer than that part may be
// asked for in its place any more (IBA 9.7.5.1.4). It says false if there are too many requests.
func (r *requester) split(at wire.PSN) bool {
	if len(r.reads) >= int(r.q.attr.MaxRdAtomic) {
		return false
	}
	for i := range r.reads {
		if q := &r.reads[i]; q.first.Before(at) && !q.last.Before(at) {
			r.reads = append(r.reads, readReq{})
			copy(r.reads[i+2:], r.reads[i+1:])
			r.reads[i+1] = readReq{at, r.reads[i].last}
			r.reads[i].last = at.Add(wire.PSNMask)
			return true
		}
	}
	return false
}

// probeAnswered goes back to behind a probe that has been answered: there was nothing behind
// it by which the peer could notice that the rest is missing. READ responses that go on
// by themselves were only late.
func (r *requester) probeAnswered() {
	c := &r.rec
	if r.una == c.probe {
		return
	}
	c.probed = false
	if c.probeRead && r.una != c.probe.Next() {
		return
	}
	if r.una.Before(c.probeNext) && r.psn == c.probeNext && r.rnrAt == Never && !r.held {
		c.lost(afterNak)
		r.goBack()
	}
}
