// SPDX-License-Identifier: Apache-2.0

package qp

import "github.com/tapverbs/tapverbs/wire"

// Unreliable datagrams (IBA 9.8.3): one packet a message, a destination with each
// work request, a Q_Key instead of a connection.

// ownQKey is the bit of a work request's Q_Key that stands for the QP's own (IBA
// 10.2.5): so applications can't make up keys of the upper half.
const ownQKey = 1 << 31

// route gives the path of the next packet: the connection's, or that of a
// datagram's address handle. A datagram that can't be sent has its failure noted
// and gives nil.
func (r *requester) route(w *SendWQE, s *sendState) *wire.Path {
	q := r.q
	if !q.tr.datagram {
		return &q.attr.Path
	}
	if w.Length > q.mtu {
		s.fail = WCLocLenErr // IBA 9.8.3.1: a datagram is one packet
		return nil
	}
	if q.env.AH != nil {
		if p := q.env.AH(q, w.AH); p != nil {
			return p
		}
	}
	s.fail = WCLocQPOpErr // IBA 11.4.1.1: no such address handle in the QP's domain
	return nil
}

// dest is the QP the next packet is for.
func (r *requester) dest(w *SendWQE) wire.QPN {
	if r.q.tr.datagram {
		return wire.QPN(w.DestQPN) & wire.QPNMask
	}
	return r.q.attr.DestQPN
}

// deth is the datagram header of a work request.
func (r *requester) deth(w *SendWQE) wire.DETH {
	key := w.QKey
	if key&ownQKey != 0 {
		key = r.q.attr.QKey
	}
	return wire.DETH{QKey: key, SrcQP: r.q.init.Num}
}

// checkQKey lets datagrams in whose Q_Key is the QP's (IBA 10.2.5, 9.6.1.4); the
// PSN says nothing about them.
func (r *responder) checkQKey(p *wire.Packet) respStep {
	if p.DETH().QKey != r.q.attr.QKey {
		r.q.env.Stats.QKeyViolations.Add(1)
		r.q.env.Stats.Dropped.Add(1)
		return respDone
	}
	r.epsn = p.BTH.PSN
	return respCheckOp
}

// datagram places a datagram behind the 40 bytes for its GRH (IBA 11.4.1.2); the
// buffer must hold both.
func (r *responder) datagram(p *wire.Packet) error {
	if uint64(wire.GRHLen)+uint64(len(p.Payload)) > uint64(r.recv.total) {
		return errListShort
	}
	p.GRH(r.grh[:])
	if err := r.q.scatter(&r.stage, r.listPD, r.moved, r.recv.sges, 0, r.grh[:]); err != nil {
		return err
	}
	r.dirty = true
	r.got = wire.GRHLen
	if len(p.Payload) == 0 {
		return nil
	}
	return r.q.scatter(&r.stage, r.listPD, r.moved, r.recv.sges, wire.GRHLen, p.Payload)
}
