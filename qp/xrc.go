// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// Extended reliable connections (IBA A14): RC whose two directions are two kinds
// of QP. An initiator (XRC_SEND) only sends, a target (XRC_RECV) only receives. A
// target has no protection domain, CQ or receive queue: each request names an SRQ,
// and all these are the SRQ's.

// XRCD numbers an XRC domain: a target QP uses the SRQs of its own.
type XRCD uint32

// NewXRCSRQ makes an SRQ like NewSRQ, for targets of an XRC domain; what is
// received with it completes to cq.
func NewXRCSRQ(pd mr.PD, xrcd XRCD, cq *CQ, maxWR, maxSGE int, limitReached func()) (*SRQ, error) {
	s, err := NewSRQ(pd, maxWR, maxSGE, limitReached)
	if err != nil {
		return nil, err
	}
	s.xrcd, s.cq = xrcd, cq
	return s, nil
}

// Fail makes targets refuse what is for this SRQ: its CQ takes no more completions.
func (s *SRQ) Fail() { s.failed.Store(true) }

// isClosed says whether the SRQ was destroyed: targets do not keep it.
func (s *SRQ) isClosed() bool {
	s.emu.Lock()
	defer s.emu.Unlock()
	return s.q.closed
}

// checkSRQ finds the SRQ that a request names. One that does not exist or is of
// another domain is an invalid request (IBA A14: invalid XRCETH, XRC domain
// violation), and so is one that changes within a message, or when the first packet
// of one comes again.
func (r *responder) checkSRQ(p *wire.Packet) respStep {
	var s *SRQ
	if r.q.env.SRQ != nil {
		s = r.q.env.SRQ(p.XRCETH().SRQ)
	}
	switch {
	case s == nil || s.xrcd != r.q.init.XRCD || (r.prev != nil || r.hasRecv) && s != r.srq:
		return r.invalid()
	case s.failed.Load():
		return r.recvError(WCGeneralErr) // IBA 10.2.9: an SRQ in error
	}
	r.srq, r.cq, r.pd, r.listPD = s, s.cq, s.pd, s.pd
	return respCheckLength
}
