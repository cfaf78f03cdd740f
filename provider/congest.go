// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// The ECN bits of a traffic class (RFC 3168 5): their mask and what a switch makes of them
// when it is congested, and what we send where the application has said nothing: that
// queue pairs of a reliable service slow down when they are told. Others send what the
// application has them send.
const (
	ecnCE   = 3
	ecnECT0 = 2
)

// behindFrames is how many frames are read one after the other, with more waiting
// all the time, before a sender is told: some ms of work, and a quarter of what a
// TAP's queue holds.
const behindFrames = 2048

// fellBehind is called with each batch that was read: n frames, all that were asked
// for or not.
func (s *shard) fellBehind(n int, full bool) {
	if !full {
		s.behind, s.notify, s.inb.emptied = 0, false, true
		return
	}
	if s.behind += n; s.behind >= behindFrames {
		s.behind, s.notify = 0, true
	}
}

// cnpEvery is how often a QP's peer is told of marked packets at most, in ns (DCQCN's N).
const cnpEvery = 50_000

// congested tells the sender of a packet that it met congestion: a switch has marked it
// (RFC 3168 5; IBA A17.9.3), or we do not keep up, and it is the first of an unreliable
// service since notify was set: those who send most are told first. Reliable services are
// held back by their windows (inbound.go).
func (s *shard) congested(q *QP, p *wire.Packet, marked bool) {
	if p.Dst().IsMulticast() {
		s.notify = false
		return // it is not we alone who set the pace of a group
	}
	unreliable := p.Info.Service == wire.ServiceUC || p.Info.Service == wire.ServiceUD
	if marked {
		s.cnt.Marked++
		marked = q.cnpAt <= s.now
	}
	if !marked && !(s.notify && unreliable) {
		return
	}
	if marked {
		q.cnpAt = s.now + cnpEvery
	}
	if unreliable {
		s.notify = false
	}
	s.sendCNP(q, p)
}

// sendCNP sends a congestion notification to the sender of a packet.
func (s *shard) sendCNP(q *QP, p *wire.Packet) {
	to := q.q.DestQPN()
	if p.Info.Service == wire.ServiceUD {
		to = p.DETH().SrcQP
	}
	path := wire.Path{SrcMAC: s.d.mac, DstMAC: [6]byte(p.Frame[6:12]), Src: p.Dst(), Dst: p.Src()}
	s.putCNP(&path, p.BTH.PKey, to, 0)
}

// putCNP sends a notification. window is how many packets there is room for from that
// sender; 0: that is not what it is about.
func (s *shard) putCNP(path *wire.Path, pkey uint16, to wire.QPN, window uint16) bool {
	s.cnpPath = *path
	s.cnpPath.SrcPort, s.cnpPath.HopLimit = udpSourcePort(0, path.Src, path.Dst), 64
	b := s.eg.Begin(&s.cnpPath, wire.BTHLen+wire.CNPLen+wire.ICRCLen)
	if b == nil {
		return false
	}
	bth := wire.BTH{Op: wire.CNP, BECN: true, PKey: pkey, DestQP: to}
	bth.Put(b)
	wire.PutCNPWindow(b[wire.BTHLen:], window)
	s.eg.End()
	s.cnt.CNPsSent++
	return true
}

// inputCNP hands a notification to the QP it is for; a connected one takes it from its
// peer only.
func (s *shard) inputCNP(p *wire.Packet) {
	s.cnt.CNPs++
	q, why := s.lookup(p.BTH.DestQP)
	if q == nil {
		s.drop(why)
		return
	}
	if q.q.Type() != qp.TypeUD {
		if path := q.q.Peer(); p.Src() != path.Dst || p.Dst() != path.Src {
			s.drop(DropSource)
			return
		}
	}
	if n := p.CNPWindow(); n != 0 {
		s.heardWindow(q, p.Src(), n)
	} else if q.q.Congested() {
		s.cnt.CNPsHandled++
	}
	s.schedule(q)
}
