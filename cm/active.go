// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"encoding/binary"
	"net/netip"

	"github.com/tapverbs/tapverbs/wire"
)

// The end that asks (IBA 12.9.6, the active side).

// Connect asks for a connection of me, an address and a queue pair of ours, with a service
// at dst. Reply, Rejected or Unreachable answer. ErrPrivate, ErrAddr, ErrState for UD, which
// Resolve is for.
func (a *Agent) Connect(now int64, dst netip.Addr, service uint64, tr Transport, me Params, route Route) (*Conn, error) {
	c, err := a.open(dst, service, me, route)
	if err != nil {
		return nil, err
	}
	c.Transport = tr
	r := &c.Route
	m := wire.CMReq{
		LocalID: c.id, ServiceID: service, LocalCAGUID: a.cfg.GUID, LocalQPN: me.QPN, ResponderResources: me.Responder,
		InitiatorDepth: me.Initiator, RemoteTimeout: responseTimeout, FlowControl: me.FlowControl, StartingPSN: me.PSN,
		LocalTimeout: responseTimeout, RetryCount: me.RetryCount, PKey: r.PKey, MTU: r.MTU, RNRRetry: me.RNRRetry,
		MaxCMRetries: maxRetries, SRQ: me.SRQ, VendorID: me.ECEVendor,
		Primary: wire.CMPath{LocalLID: 0xffff, RemoteLID: 0xffff, LocalGID: me.Addr.As16(), RemoteGID: dst.As16(), FlowLabel: r.FlowLabel,
			TrafficClass: r.TrafficClass, HopLimit: r.HopLimit, AckTimeout: r.AckTimeout},
	}
	switch tr {
	case RC, UC:
		m.Transport = uint8(tr)
	case XRC:
		m.Transport, m.ExtTransport = transportExt, extXRC
	default:
		return nil, ErrState
	}
	if err := private(m.Private[:], me.Private); err != nil {
		return nil, err
	}
	a.conns[c.id] = c
	c.state = stateReqSent
	a.format(&c.kept, c.tid, wire.CMREQ, me.ECEOptions, &m)
	c.await(now)
	return c, nil
}

// open makes a connection that we ask for.
func (a *Agent) open(dst netip.Addr, service uint64, me Params, route Route) (*Conn, error) {
	if !dst.IsValid() || me.Addr.Is4() != dst.Is4() || !me.Addr.IsValid() {
		return nil, ErrAddr
	}
	c := &Conn{a: a, Service: service, Route: route, local: me.Addr, me: me, peer: Params{Addr: dst}, id: a.newID(), pos: -1,
		waits: codeTime(responseTimeout), tries: maxRetries}
	c.tid = c.newTID()
	return c, nil
}

// newTID makes the number of a transaction that we begin.
func (c *Conn) newTID() uint64 { return uint64(c.a.newID())<<32 | uint64(c.id) }

// rep: the other end accepts.
func (a *Agent) rep(in arrival, b []byte) {
	var m wire.CMRep
	m.Parse(b)
	c := a.find(in, m.RemoteID, m.LocalID)
	if c == nil {
		// IBA 12.9.8.3.1: who is not waiting for it says so, or the other end would for long.
		a.send(in.dst, in.src, in.tid, wire.CMREJ, &wire.CMRej{LocalID: m.RemoteID, RemoteID: m.LocalID, Of: 1, Reason: wire.RejInvalidCommID})
		return
	}
	switch c.state {
	case stateReqSent:
		c.remoteID = m.LocalID
		p := &c.peer
		p.QPN, p.PSN, p.Responder, p.Initiator = m.LocalQPN, m.StartingPSN, m.ResponderResources, m.InitiatorDepth
		p.RNRRetry, p.SRQ, p.FlowControl, p.AckDelay = m.RNRRetry, m.SRQ, m.FlowControl, m.TargetAckDelay
		p.ECEVendor, p.ECEOptions = m.VendorID, in.mod
		if old := a.byQP[qpKey{p.Addr, p.QPN}]; old != nil && old != c {
			// IBA 12.9.8.3.1: what is known under that number is stale.
			if old.alive() {
				c.state = stateRepRcvd // it is the REP that is rejected
				c.tell(Event{Kind: Rejected, Reason: wire.RejStale})
				c.reject(in.now, wire.RejStale, nil)
				old.stale(in.now)
				return
			}
			delete(a.byQP, qpKey{p.Addr, p.QPN})
		}
		a.byQP[qpKey{p.Addr, p.QPN}] = c
		c.state, c.keeps = stateRepRcvd, false
		a.due(c, Never)
		c.tell(Event{Kind: Reply, Private: m.Private[:]})
	case stateEstablished:
		c.again() // it has not had our RTU
	case stateRepRcvd:
		c.wait(in.now, 1)
	case stateTimewait:
		if wire.CMAttr(binary.BigEndian.Uint16(c.kept[16:])) == wire.CMREJ {
			c.again() // it has not had our REJ
			return
		}
		a.stats.Stray++
	default:
		a.stats.Stray++
	}
}

// Ready says that our queue pair can be sent to, after Reply. ErrState, ErrPrivate.
func (c *Conn) Ready(now int64, data []byte) error {
	m := wire.CMRtu{LocalID: c.id, RemoteID: c.remoteID}
	if c.state != stateRepRcvd {
		return ErrState
	}
	if err := private(m.Private[:], data); err != nil {
		return err
	}
	c.state = stateEstablished
	c.answer(wire.CMRTU, 0, &m)
	return nil
}

// mra: the other end wants more time.
func (a *Agent) mra(in arrival, b []byte) {
	var m wire.CMMra
	m.Parse(b)
	c := a.find(in, m.RemoteID, m.LocalID)
	if c == nil {
		return
	}
	if c.state != stateReqSent && c.state != stateRepSent || (c.state == stateRepSent) != (m.Of == 1) {
		a.stats.Stray++ // of a message that is not waited for any more, or was never sent
		return
	}
	if c.remoteID == 0 {
		c.remoteID = m.LocalID
	}
	// IBA 12.9.8.4: it is asked again when that time is over, not before.
	more := min(codeTime(m.ServiceTimeout)+c.waits, maxWait)
	c.giveUp = in.now + more + int64(c.tries+1)*c.waits
	a.due(c, in.now+more)
}

// wait asks the other end for time: of is 0 for its REQ, 1 for its REP.
func (c *Conn) wait(now int64, of uint8) {
	c.a.send(c.local, c.peer.Addr, c.tid, wire.CMMRA, &wire.CMMra{LocalID: c.id, RemoteID: c.remoteID, Of: of, ServiceTimeout: serviceTimeout})
}

// rej: the other end says no, at whatever point.
func (a *Agent) rej(in arrival, b []byte) {
	var m wire.CMRej
	m.Parse(b)
	local, remote := m.RemoteID, m.LocalID
	c := a.conns[local]
	switch {
	case c != nil && remote == 0:
		// A REJ of a REQ comes from who has no communication ID yet, and may name 0.
		remote = c.remoteID
	case local == 0 && m.Reason == wire.RejTimeout:
		// IBA 12.6.7.2: who has had no answer does not know our ID; it names itself.
		if p := a.passive[peerKey{addr: in.src, id: remote}]; p != nil && m.InfoLen >= 8 && binary.BigEndian.Uint64(m.Info[:]) == p.guid {
			local = p.id
		}
	}
	if c = a.find(in, local, remote); c == nil {
		return
	}
	e := Event{Kind: Rejected, Reason: m.Reason, Private: m.Private[:]}
	switch c.state {
	case stateReqSent, stateRepRcvd:
		c.tell(e)
		c.forget(true)
	case stateReqRcvd, stateRepSent:
		c.tell(e)
		c.keeps = false
		c.leaveQP()
		c.linger(in.now)
	case stateEstablished:
		// The answer to an RTU, or to a REP that was sent again: it knows nothing of us.
		c.lost(in.now)
	case stateDreqSent:
		c.linger(in.now)
		c.tell(Event{Kind: Ended})
	default:
		a.stats.Stray++
	}
}
