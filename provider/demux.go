// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"encoding/binary"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

var be = binary.BigEndian

// Ethernet types.
const (
	etherIPv4 = 0x0800
	etherARP  = 0x0806
	etherIPv6 = 0x86dd
)

// input takes one frame in, checks it and brings it to whom it is for. What fails
// a check is counted and otherwise dropped without a word, as the specification
// asks of all these checks (IBA 9.6).
func (s *shard) input(b []byte) {
	s.cnt.RxFrames++
	s.cnt.RxBytes += uint64(len(b))
	if len(b) < wire.EthLen {
		s.drop(DropTruncated)
		return
	}
	if s.id != 0 && s.d.flowing.Load() {
		s.handOver(s.d.sh, b, handFlows) // flows see a frame before anybody else
		return
	}
	s.sort(b)
}

// sort shows a frame to the flows before it is taken in.
func (s *shard) sort(b []byte) {
	if s.flows.n > 0 && s.steer(b) {
		return
	}
	s.accept(b, false)
}

// accept takes a frame in, or, if it was not handed over, hands it to the shard it is for.
func (s *shard) accept(b []byte, handed bool) {
	if [6]byte(b) != s.d.mac && b[0]&1 == 0 {
		s.drop(DropWrongMAC) // a bridge floods what it does not know
		return
	}
	if be.Uint16(b[12:]) == etherARP {
		if s.id != 0 {
			s.handOver(s.d.sh, b, handPacket)
			return
		}
		s.inputARP(b)
		return
	}
	p := &s.pkt
	switch err := wire.Parse(b, p); err {
	case nil:
		if o := s.owner(p); o != s && !handed {
			s.handOver(o, b, handPacket)
			return
		}
		s.inputRoCE(p)
	case wire.ErrNotRoCE:
		if s.id != 0 {
			s.handOver(s.d.sh, b, handPacket)
			return
		}
		s.inputICMP(b)
	default:
		r, _ := err.(wire.Error)
		s.drop(DropReason(r))
	}
}

// inputSuper takes a super-frame apart, whose packets have size bytes each behind the UDP
// header, and gives their number.
func (s *shard) inputSuper(b []byte, size int) (n int) {
	if err := s.super.Open(b, size); err != nil {
		s.cnt.RxFrames++
		s.cnt.RxBytes += uint64(len(b))
		s.drop(DropSuperFrame)
		return 1
	}
	if !s.super.RoCE() || s.d.flowing.Load() || [6]byte(b) != s.d.mac || !s.d.gids.has(s.super.Dst()) {
		for f := s.super.Next(); f != nil; f = s.super.Next() {
			s.input(f)
			n++
		}
		return n
	}
	// They are from one address to another, which is ours: what is true of one of
	// them is of all.
	p, sure := &s.pkt, (*QP)(nil)
	for {
		size, more, err := s.super.NextPacket(p)
		if !more {
			return n
		}
		n++
		s.cnt.RxFrames++
		s.cnt.RxBytes += uint64(size)
		if err != nil {
			r, _ := err.(wire.Error)
			s.drop(DropReason(r))
			continue
		}
		if o := s.owner(p); o != s {
			s.handOver(o, p.Frame, handPacket)
			continue
		}
		sure = s.inputOurs(p, sure)
	}
}

func (s *shard) drop(r DropReason) { s.cnt.Drops[r]++ }

// inputRoCE makes the checks of IBA 9.6 and A17.4 that need no inner state of the
// QP, and hands the packet to it.
func (s *shard) inputRoCE(p *wire.Packet) {
	dst := p.Dst()
	if dst.IsMulticast() {
		s.inputGroup(p, dst)
		return
	}
	if !s.d.gids.has(dst) {
		s.drop(DropWrongIP)
		return
	}
	s.inputOurs(p, nil)
}

// inputOurs takes a packet to one of our addresses. sure is the QP that the last packet
// with the same addresses was for, if there was one, and what it returns is that for the next.
func (s *shard) inputOurs(p *wire.Packet, sure *QP) *QP {
	// IBA 9.6.1.1: nothing in a packet is looked at before its ICRC.
	if !p.ICRCValid() {
		s.drop(DropICRC)
		return sure
	}
	s.cnt.RxPackets++
	s.cnt.RxPacketBytes += uint64(len(p.Frame))
	if p.Info.Service == wire.ServiceCNP {
		s.inputCNP(p)
		return sure
	}
	if p.BTH.DestQP == wire.GSIQPN {
		s.acc.Leave() // who manages may wait for much
		s.inputGSI(p)
		return sure
	}
	if sure == nil || sure.num != p.BTH.DestQP {
		q, why := s.lookup(p.BTH.DestQP)
		if q == nil && p.BTH.DestQP == smiQPN && isFiller(p) {
			why = DropFiller
		}
		if q == nil {
			s.drop(why)
			return sure
		}
		if s.deliver(q, p, false) {
			sure = q
		}
		return sure
	}
	s.deliver(sure, p, true)
	return sure
}

// deliver hands a packet to a QP that may see it. sure: its addresses are known to be
// right; it says whether they are.
func (s *shard) deliver(q *QP, p *wire.Packet, sure bool) bool {
	if why := admit(q.q, p); why != 0 {
		s.drop(why)
		return sure
	}
	if !sure && !fromPeer(q.q, p) {
		s.drop(DropSource)
		return false
	}
	if marked := p.TClass&ecnCE == ecnCE || p.BTH.FECN; (marked || s.notify) && !s.looping {
		s.congested(q, p, marked)
	}
	if !q.touched {
		q.touched = true
		s.touched = append(s.touched, q)
	}
	q.q.Handle(p)
	return true
}

// lookup finds the QP of a number (IBA 9.6.1.1.1).
func (s *shard) lookup(n wire.QPN) (*QP, DropReason) {
	switch {
	case n <= wire.GSIQPN:
		return nil, DropMAD
	case n == wire.MulticastQPN:
		return nil, DropMulticast
	}
	i := int(s.index(n))
	if i >= len(s.table) || s.table[i] == nil || s.table[i].num != n {
		return nil, DropNoQP
	}
	return s.table[i], 0
}

// admit says why a QP must not see a packet, apart from its addresses; 0 if it may.
func admit(q *qp.QP, p *wire.Packet) DropReason {
	t := q.Type()
	if !serviceFits(t, p.Info.Service) {
		return DropService // IBA 9.6.1.1.2
	}
	// IBA 10.3.1: packets are received in RTR, RTS, SQD and SQE.
	if st := q.State(); st < qp.StateRTR || st == qp.StateErr {
		return DropState
	}
	if !pkeyMatch(p.BTH.PKey, q.PKey()) {
		return DropPKey
	}
	return 0
}

// fromPeer says whether a packet's addresses are those of the connection (IBA 9.6.1.2.1,
// A17.4.5.2). Datagrams have none.
func fromPeer(q *qp.QP, p *wire.Packet) bool {
	if q.Type() == qp.TypeUD {
		return true
	}
	path := q.Peer()
	return p.Src() == path.Dst && p.Dst() == path.Src
}

// serviceFits says whether packets of a service are for QPs of a type (IBA 9.2.1).
func serviceFits(t qp.Type, s wire.Service) bool {
	switch t {
	case qp.TypeRC:
		return s == wire.ServiceRC
	case qp.TypeUC:
		return s == wire.ServiceUC
	case qp.TypeUD:
		return s == wire.ServiceUD
	case qp.TypeXRCSend, qp.TypeXRCRecv:
		return s == wire.ServiceXRC
	}
	return false
}

// pkeyMatch compares partition keys (IBA 10.9.3): the same partition, and not
// both limited members.
func pkeyMatch(a, b uint16) bool {
	return a&0x7fff == b&0x7fff && a&0x7fff != 0 && (a|b)&0x8000 != 0
}
