// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// Packets that are held while a region is suspended, in the order in which they are to be
// executed: copies, charged to the region's hold buffer. To a reliable peer they are not
// taken yet. It is told nothing until they are, or until it asks again; then RNR NAK, so
// that it loses one retry and not all of them.

// heldOverhead is what a packet costs beside its bytes.
const heldOverhead = 64

// inHand is what is being handled: a packet or, of a RAW_PACKET QP, a frame.
type inHand struct {
	frame []byte
	raw   bool
	tag   uint32
}

type heldPackets struct {
	queue     []inHand
	region    *mr.Region // whose buffer
	next      wire.PSN   // what is expected behind the last
	replaying bool
	pkt       wire.Packet
}

func (h *heldPackets) n() int { return len(h.queue) }

// hold keeps the packet in hand, which takes some PSNs, as the first; false if there is no
// room for it.
func (r *responder) hold(region *mr.Region, what inHand, span uint32) bool {
	r.held.region, r.held.next = region, r.epsn
	return r.held.push(what, span)
}

func (h *heldPackets) push(what inHand, span uint32) bool {
	if what.frame == nil || !h.region.Hold(len(what.frame)+heldOverhead) {
		return false
	}
	what.frame = append([]byte(nil), what.frame...)
	h.queue = append(h.queue, what)
	h.next = h.next.Add(span)
	return true
}

func (h *heldPackets) pop() {
	h.region.Unhold(len(h.queue[0].frame) + heldOverhead)
	h.queue[0] = inHand{}
	if h.queue = h.queue[1:]; len(h.queue) == 0 {
		h.queue, h.region = nil, nil
	}
}

// drop forgets all that is held.
func (h *heldPackets) drop() {
	for len(h.queue) > 0 {
		h.pop()
	}
}

// spanOf is how many PSNs a request takes.
func (q *QP) spanOf(p *wire.Packet) uint32 {
	if p.Info.Kind == wire.KindRead {
		if n := p.RETH().Len; n <= MaxMessage {
			return q.packets(n)
		}
	}
	return 1
}

// behindHeld takes what comes while packets are held; false if it is none that has to
// wait behind them.
func (r *responder) behindHeld(p *wire.Packet) bool {
	if !r.held.region.Suspended() {
		r.replay()
	}
	h := &r.held
	switch {
	case h.n() == 0:
		return false
	case !r.q.tr.acked:
		if !h.push(inHand{frame: p.Frame}, 1) {
			r.q.env.Stats.Dropped.Add(1)
		}
		return true
	case p.BTH.PSN.Before(r.epsn):
		return false // a duplicate of what was executed
	}
	switch d := p.BTH.PSN.Sub(h.next); {
	case d == 0 && h.push(inHand{frame: p.Frame}, r.q.spanOf(p)):
	case p.BTH.PSN == r.epsn:
		// The peer has waited long enough to ask again.
		r.out.askedAgain(p.BTH.PSN)
		r.quiet = false
		r.q.env.Stats.DuplicateRequest.Add(1)
		r.tellHeld()
	case d < 0:
		r.q.env.Stats.DuplicateRequest.Add(1)
	default:
		// No room, or one is missing: all is to come again, since a NAK acknowledges
		// what is before it.
		r.q.env.Stats.OutOfSeqRequest.Add(1)
		r.tellHeld()
	}
	return true
}

// tellHeld asks the peer to wait, with what was held first.
func (r *responder) tellHeld() {
	if r.quiet {
		return
	}
	region := r.held.region
	region.CountRNR()
	r.psn = r.epsn
	r.notReady(r.waitTimer(region, mr.ErrSuspended, 1))
}

// replay executes what is held, as far as it can.
func (r *responder) replay() {
	h := &r.held
	if h.replaying || h.n() == 0 {
		return
	}
	h.replaying = true
	defer func() { h.replaying = false }()
	for h.n() > 0 {
		was := r.q.State()
		r.putBack = false
		psn := r.epsn
		if in := h.queue[0]; in.raw {
			r.frame(in.frame, in.tag)
		} else if wire.Parse(in.frame, &h.pkt) == nil {
			r.take1(&h.pkt)
		}
		switch {
		case r.putBack:
			r.putBack = false
			return
		case r.q.State() != was || h.n() == 0: // the QP has ended, and all of this with it
			return
		case r.q.tr.acked && r.epsn == psn:
			h.drop() // refused: what comes next is this one, again
			return
		}
		h.pop()
	}
}
