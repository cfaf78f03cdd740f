// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"net/netip"

	"github.com/tapverbs/tapverbs/wire"
)

// Service ID resolution: which queue pair a datagram service has (IBA 12.11).

// Resolve asks for a datagram service at dst from our address src. Resolved or Unreachable
// answer, and then Gone. ErrPrivate, ErrAddr.
func (a *Agent) Resolve(now int64, src, dst netip.Addr, service uint64, pkey uint16, data []byte) (*Conn, error) {
	c, err := a.open(dst, service, Params{Addr: src}, Route{PKey: pkey})
	if err != nil {
		return nil, err
	}
	c.Transport = UD
	m := wire.CMSidrReq{RequestID: c.id, PKey: pkey, ServiceID: service}
	if err := private(m.Private[:], data); err != nil {
		return nil, err
	}
	a.conns[c.id] = c
	c.state = stateSidrSent
	a.format(&c.kept, c.tid, wire.CMSIDRREQ, 0, &m)
	c.await(now)
	return c, nil
}

func (a *Agent) sidrReq(in arrival, b []byte) {
	var m wire.CMSidrReq
	m.Parse(b)
	if c := a.passive[peerKey{in.src, m.RequestID, true}]; c != nil && c.local == in.dst {
		if c.state == stateTimewait {
			c.again()
		}
		return
	}
	l := a.listener(m.ServiceID, in.dst)
	if l == nil {
		if in.now < a.expected[m.ServiceID] {
			return
		}
		a.send(in.dst, in.src, in.tid, wire.CMSIDRREP, &wire.CMSidrRep{RequestID: m.RequestID, Status: wire.SIDRUnsupported, ServiceID: m.ServiceID})
		return
	}
	if l.Wants != nil && !l.Wants(UD, m.Private[:]) {
		a.send(in.dst, in.src, in.tid, wire.CMSIDRREP, &wire.CMSidrRep{RequestID: m.RequestID, Status: wire.SIDRRejected, ServiceID: m.ServiceID})
		return
	}
	if l.pending >= l.backlog {
		a.stats.Refused++
		return
	}
	c := &Conn{a: a, Service: m.ServiceID, Transport: UD, Route: Route{PKey: m.PKey}, listener: l, local: in.dst, id: a.newID(),
		remoteID: m.RequestID, tid: in.tid, pos: -1, peer: Params{Addr: in.src}, state: stateSidrRcvd}
	a.conns[c.id], a.passive[peerKey{in.src, m.RequestID, true}] = c, c
	l.pending++
	a.due(c, in.now+maxWait)
	c.tell(Event{Kind: Request, Private: m.Private[:]})
}

// AcceptService answers a request for a datagram service: who we are, by QPN and QKey.
// Nothing more happens but Gone. ErrState, ErrPrivate.
func (c *Conn) AcceptService(now int64, me Params) error {
	c.me = me
	return c.replyService(now, wire.SIDROK, me.Private)
}

// RejectService says no: status is one of wire.SIDRRejected and so on. ErrState, ErrPrivate.
func (c *Conn) RejectService(now int64, status uint8, data []byte) error {
	return c.replyService(now, status, data)
}

func (c *Conn) replyService(now int64, status uint8, data []byte) error {
	if c.state != stateSidrRcvd {
		return ErrState
	}
	m := wire.CMSidrRep{RequestID: c.remoteID, Status: status, QPN: c.me.QPN, QKey: c.me.QKey, ServiceID: c.Service}
	if err := private(m.Private[:], data); err != nil {
		return err
	}
	c.answer(wire.CMSIDRREP, 0, &m)
	c.linger(now)
	return nil
}

func (a *Agent) sidrRep(in arrival, b []byte) {
	var m wire.CMSidrRep
	m.Parse(b)
	c := a.conns[m.RequestID]
	if c == nil || c.state != stateSidrSent || c.peer.Addr != in.src || c.local != in.dst || m.ServiceID != c.Service {
		a.stats.Stray++
		return
	}
	c.peer.QPN, c.peer.QKey = m.QPN, m.QKey
	c.tell(Event{Kind: Resolved, Status: m.Status, Private: m.Private[:]})
	c.forget(true)
}
