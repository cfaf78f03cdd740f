// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"encoding/binary"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// The completer takes what comes back from the peer: acknowledgements, READ
// responses, results of atomics. It moves the requester's una and retires its
// work requests.

// compStep is a step of taking one response.
type compStep uint8

const (
	compCheckPSN compStep = iota
	compClassify
	compAck
	compRNR
	compNak
	compReadResponse
	compAtomicAck
	compLost
	compDone
)

type completer struct {
	q     *QP
	stage mr.Stage
	// dirty: stage holds bytes of a READ response
	dirty bool
}

func (c *completer) init(q *QP) { c.q = q; c.stop() }

// stop forgets what was staged.
func (c *completer) stop() {
	c.stage.Drop()
	c.dirty = false
}

func (c *completer) endBatch() {
	if c.dirty {
		c.flush()
	}
}

// storeError ends the READ or atomic that is the oldest request because its
// result can't be stored. If the mapping is only changing just now, the packet
// counts as lost: it is asked for again; and so it is, later, when there will be
// memory for it (postpone.go).
func (c *completer) storeError(err error) {
	switch {
	case err == mr.ErrBusy:
	case !c.q.failing(err):
		c.q.req.hold(err, true)
	default:
		c.q.req.failHead(localStatus(err))
	}
}

func (c *completer) handle(p *wire.Packet) {
	for step := compCheckPSN; step != compDone; {
		switch step {
		case compCheckPSN:
			step = c.checkPSN(p)
		case compClassify:
			step = c.classify(p)
		case compAck:
			step = c.ack(p)
		case compRNR:
			step = c.rnr(p)
		case compNak:
			step = c.nak(p)
		case compReadResponse:
			step = c.readResponse(p)
		case compAtomicAck:
			step = c.atomicAck(p)
		case compLost:
			step = c.lost()
		}
	}
}

// checkPSN drops responses to what is acknowledged already (IBA 9.7.5.1.3:
// ghosts and duplicates) and to what was never sent.
func (c *completer) checkPSN(p *wire.Packet) compStep {
	r := &c.q.req
	if p.BTH.PSN.Before(r.una) || !p.BTH.PSN.Before(r.end) {
		c.q.env.Stats.StaleResponse.Add(1)
		return compDone
	}
	return compClassify
}

func (c *completer) classify(p *wire.Packet) compStep {
	switch p.Info.Kind {
	case wire.KindReadResp:
		return compReadResponse
	case wire.KindAtomicAck:
		return compAtomicAck
	case wire.KindAck:
		c.q.env.Stats.RcvdAcks.Add(1)
		switch p.AETH().Kind() {
		case wire.AckOK:
			return compAck
		case wire.AckRNR:
			return compRNR
		case wire.AckNak:
			return compNak
		}
	}
	c.q.env.Stats.Dropped.Add(1) // IBA 9.7.5.2.8: reserved syndromes
	return compDone
}

func (c *completer) ack(p *wire.Packet) compStep {
	if c.q.req.acked(p.BTH.PSN) {
		return compLost
	}
	return compDone
}

// lost: a later response shows that the one to the oldest READ or atomic is
// missing (implied NAK, IBA 9.7.5.1.2). Go back once, not for each packet that
// shows it.
func (c *completer) lost() compStep {
	c.q.env.Stats.OutOfSeqResponse.Add(1)
	if r := &c.q.req; !r.recovering && r.rnrAt == Never && !r.heldBack {
		r.retry(afterNak)
	}
	return compDone
}

// ackedBefore takes a NAK's PSN as acknowledging all before it (IBA 9.7.5.2.1).
// It says false when a response before it is missing, which then comes first.
func (c *completer) ackedBefore(psn wire.PSN) bool {
	r := &c.q.req
	return psn == r.una || !r.acked(psn.Add(wire.PSNMask))
}

func (c *completer) rnr(p *wire.Packet) compStep {
	c.q.env.Stats.RcvdRNRNak.Add(1)
	if !c.ackedBefore(p.BTH.PSN) {
		return compLost
	}
	r := &c.q.req
	if r.una == r.end || r.rnrAt != Never {
		return compDone // it came too late: the QP has failed meanwhile; or the network delivered it twice
	}
	r.rnr(wire.RNRDelay(p.AETH().Value()))
	return compDone
}

// nakStatus is how a fatal NAK ends the request it names (IBA 9.7.5.2, table 46).
var nakStatus = [...]WCStatus{
	wire.NakInvalidRequest:    WCRemInvReqErr,
	wire.NakRemoteAccess:      WCRemAccessErr,
	wire.NakRemoteOperational: WCRemOpErr,
	wire.NakInvalidRD:         WCRemInvRDReqErr,
}

func (c *completer) nak(p *wire.Packet) compStep {
	code := int(p.AETH().Value())
	if code >= len(nakStatus) {
		c.q.env.Stats.Dropped.Add(1)
		return compDone
	}
	if !c.ackedBefore(p.BTH.PSN) {
		return compLost
	}
	r := &c.q.req
	if r.una == r.end {
		return compDone // what it acknowledged let an error of our own come to its turn
	}
	if code == wire.NakPSNSeq {
		c.q.env.Stats.RcvdNakSeq.Add(1)
		// The responder sends one until it has what it asks for (IBA 9.7.5.2.2):
		// another is a duplicate, and must not cost a retry.
		if r.rnrAt == Never && !r.nakked && !r.heldBack {
			r.nakked = true
			r.retry(afterNak)
		}
		return compDone
	}
	c.q.env.Stats.RcvdNakErr.Add(1)
	r.failHead(nakStatus[code])
	return compDone
}

// head brings the requester to the READ or atomic whose response has this PSN,
// and returns it; nil if the PSN is not the next one expected or belongs to
// something that is not answered so.
func (c *completer) head(psn wire.PSN, kind wire.Kind) (*SendWQE, *sendState, compStep) {
	r := &c.q.req
	// IBA 9.7.5.1.2: a response acknowledges all requests before its own.
	if psn != r.una && r.acked(psn.Add(wire.PSNMask)) || psn != r.una {
		return nil, nil, compLost
	}
	if r.head == c.q.sq.prod().Load() {
		return nil, nil, compDone
	}
	w, s := c.q.sq.sendWQE(r.head), r.at(r.head)
	if !s.started || w.answered() != kind {
		// IBA 9.9.2.4.2: a response of the wrong kind.
		r.failHead(WCBadRespErr)
		return nil, nil, compDone
	}
	return w, s, compDone
}

func (c *completer) readResponse(p *wire.Packet) compStep {
	w, s, next := c.head(p.BTH.PSN, wire.KindReadResp)
	if w == nil {
		return next
	}
	q, r := c.q, &c.q.req
	q.env.ReadResponses++
	off := uint32(p.BTH.PSN.Sub(s.first)) * q.mtu
	n := uint32(len(p.Payload))
	if want := min(w.responseLen()-off, q.mtu); n != want {
		// IBA 9.9.2.4.2 / 9.7.5.1.4: wrong length of a response packet.
		r.failHead(WCBadRespErr)
		return compDone
	}
	if n > 0 {
		if err := q.scatter(&c.stage, c.q.init.PD, s.moved, w.sges(), off, p.Payload); err != nil {
			c.storeError(err)
			return compDone
		}
		c.dirty = true
	}
	if p.BTH.PSN != s.last {
		r.advance(p.BTH.PSN.Next())
		return compDone
	}
	if !c.flush() {
		return compDone
	}
	r.advance(p.BTH.PSN.Next())
	r.retire(w)
	return compDone
}

// flush places what is staged. On failure the request has been ended, or, if it is
// only too early, all stays staged until the packet that needs it placed has been
// asked for again.
func (c *completer) flush() bool {
	err := c.q.env.Mem.Flush(&c.stage)
	c.dirty = c.stage.Active()
	if err != nil {
		c.storeError(err)
	}
	return err == nil
}

func (c *completer) atomicAck(p *wire.Packet) compStep {
	w, s, next := c.head(p.BTH.PSN, wire.KindAtomicAck)
	if w == nil {
		return next
	}
	var b [wire.AtomicLen]byte
	binary.NativeEndian.PutUint64(b[:], p.AtomicAckETH().Orig)
	if err := c.q.scatter(&c.stage, c.q.init.PD, s.moved, w.sges(), 0, b[:]); err != nil {
		c.storeError(err)
		return compDone
	}
	if !c.flush() {
		return compDone
	}
	c.q.req.advance(p.BTH.PSN.Next())
	c.q.req.retire(w)
	return compDone
}
