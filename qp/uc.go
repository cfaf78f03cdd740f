// SPDX-License-Identifier: Apache-2.0

package qp

import "github.com/tapverbs/tapverbs/wire"

// Unreliable services: what requester and responder do where there are no
// acknowledgements. UD shares all of it but the PSNs (ud.go).

// done is the requester's end of a packet that nobody acknowledges: its PSN is
// over with, and the work request, too, when it was its last (IBA 9.8.2.1, 9.8.3.1).
func (r *requester) done(w *SendWQE) {
	r.cong.sent(r.q.env.Now)
	last := r.at(r.cur).last
	r.psn = r.psn.Next()
	r.una, r.end = r.psn, r.psn
	if r.psn == last.Next() {
		r.cur++
		r.retire(w)
	}
}

// toSQE is what a failed send does to a QP of an unreliable service: the send
// queue stops and everything in it is flushed, the receive side goes on (IBA
// 10.3.1.6). Modify to RTS starts it again.
func (q *QP) toSQE() {
	if s := q.State(); s != StateRTS && s != StateSQD {
		return
	}
	q.state.Store(uint32(StateSQE))
	q.req.stop()
	q.flushSend()
}

// resync takes the packet's PSN as the expected one (IBA 9.8.2.2.1): a gap ends the
// message under way, whose missing packets will not come again. Nothing tells a
// duplicate from a packet that the requester meant.
func (r *responder) resync(p *wire.Packet) respStep {
	if p.BTH.PSN != r.epsn {
		r.q.env.Stats.OutOfSeqRequest.Add(1)
		r.forget()
		r.epsn = p.BTH.PSN
	}
	if !p.Info.MayFollow(r.prev) {
		if p.Info.Mask&wire.Start == 0 {
			return r.abandon(WCSuccess) // the rest of a message that was dropped
		}
		r.forget() // IBA 9.8.2.2.2: the last packets of the message before are missing
	}
	return respCheckOp
}

// forget ends the message under way as if it had not begun. A receive work request
// that it was using stays for the next message (IBA 9.8.2.2.4).
func (r *responder) forget() {
	if r.prev != nil {
		r.q.env.Stats.MessagesDropped.Add(1)
	}
	r.stage.Drop()
	r.dirty = false
	r.endMessage()
}

// abandon drops a packet of an unreliable service and the message it belongs to. A
// receive work request goes to the next message; one that came from an SRQ can't
// be held back and ends with status st, unless that is success (IBA 9.9.3.1.4 and
// 9.9.3.1.5, fault classes D and E).
func (r *responder) abandon(st WCStatus) respStep {
	r.q.env.Stats.Dropped.Add(1)
	r.forget()
	if st != WCSuccess && r.hasRecv && r.wants && r.q.init.SRQ != nil {
		r.completeRecv(&CQE{Status: st, Opcode: WCRecv}, true)
	}
	return respDone
}

// unreliableError is memoryError for services that answer nothing. What goes by makes
// the message one of those that get lost, if it is not held.
func (r *responder) unreliableError(err error) respStep {
	switch {
	case !r.q.failing(err):
		return r.abandon(WCSuccess)
	case r.kind == wire.KindSend:
		return r.recvError(localStatus(err))
	}
	return r.abandon(WCRemAccessErr) // IBA 9.8.2.2.3: a bad R_Key is not told to anybody
}

// localFault ends the receive work request with an error that is the receiver's own
// (a bad list), and the QP with it (IBA 9.9.3.1.1, fault class A).
func (r *responder) localFault(st WCStatus) respStep {
	r.forget()
	if r.hasRecv && r.wants {
		r.completeRecv(&CQE{Status: st, Opcode: WCRecv}, true)
	}
	r.q.toError()
	return respDone
}
