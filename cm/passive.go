// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"encoding/binary"

	"github.com/tapverbs/tapverbs/wire"
)

// The end that is asked (IBA 12.9.6, the passive side).

// req: somebody asks for a connection.
func (a *Agent) req(in arrival, b []byte) {
	var m wire.CMReq
	m.Parse(b)
	if c := a.passive[peerKey{addr: in.src, id: m.LocalID}]; c != nil && c.local == in.dst {
		c.askedAgain(in)
		return
	}
	refuse := func(why wire.CMReason, info ...byte) {
		r := &wire.CMRej{RemoteID: m.LocalID, Reason: why, InfoLen: uint8(len(info))}
		copy(r.Info[:], info)
		a.send(in.dst, in.src, in.tid, wire.CMREJ, r)
	}
	tr, known := Transport(m.Transport), m.Transport <= uint8(UC)
	if m.Transport == transportExt && m.ExtTransport == extXRC {
		tr, known = XRC, true
	}
	switch {
	case m.LocalID == 0 || m.LocalQPN <= wire.GSIQPN:
		a.stats.Malformed++
		return
	case !known:
		refuse(wire.RejInvalidTransport)
		return
	case m.MTU < 1 || m.MTU > a.cfg.MTU:
		refuse(wire.RejInvalidMTU)
		return
	case gid(m.Primary.LocalGID) != in.src || gid(m.Primary.RemoteGID) != in.dst:
		g := in.dst.As16()
		refuse(wire.RejInvalidGID, g[:]...) // its queue pair would not hear us
		return
	}
	l := a.listener(m.ServiceID, in.dst)
	if l == nil {
		if in.now >= a.expected[m.ServiceID] {
			refuse(wire.RejInvalidServiceID)
		}
		return
	}
	if l.Wants != nil && !l.Wants(tr, m.Private[:]) {
		refuse(wire.RejConsumer)
		return
	}
	k := qpKey{in.src, m.LocalQPN}
	if old := a.byQP[k]; old != nil {
		if old.alive() {
			// IBA 12.4.1, 12.9.8.3.1: the peer has forgotten that connection.
			refuse(wire.RejStale)
			old.stale(in.now)
			return
		}
		delete(a.byQP, k)
	}
	if l.pending >= l.backlog {
		a.stats.Refused++
		return
	}
	p := &m.Primary
	c := &Conn{
		a: a, Service: m.ServiceID, Transport: tr, listener: l, local: in.dst, id: a.newID(), remoteID: m.LocalID, tid: in.tid, pos: -1,
		guid:  m.LocalCAGUID,
		Route: Route{MTU: m.MTU, AckTimeout: p.AckTimeout, PKey: m.PKey, FlowLabel: p.FlowLabel, TrafficClass: p.TrafficClass, HopLimit: p.HopLimit},
		peer: Params{Addr: in.src, QPN: m.LocalQPN, PSN: m.StartingPSN, Responder: m.ResponderResources, Initiator: m.InitiatorDepth,
			RetryCount: m.RetryCount, RNRRetry: m.RNRRetry, FlowControl: m.FlowControl, SRQ: m.SRQ, ECEVendor: m.VendorID, ECEOptions: in.mod},
		waits: min(codeTime(m.LocalTimeout), codeTime(responseTimeout+2)), tries: int(m.MaxCMRetries), state: stateReqRcvd,
	}
	c.waits = max(c.waits, firstInterval)
	a.conns[c.id], a.passive[peerKey{addr: in.src, id: m.LocalID}], a.byQP[k] = c, c, c
	l.pending++
	// So long the peer asks again; MRA makes it longer.
	a.due(c, in.now+max(firstInterval, min(int64(m.MaxCMRetries+1)*codeTime(m.RemoteTimeout), maxWait)))
	c.tell(Event{Kind: Request, Private: m.Private[:]})
}

// askedAgain: the REQ, or SIDR_REQ, of a connection that is known has come once more.
func (c *Conn) askedAgain(in arrival) {
	switch c.state {
	case stateReqRcvd:
		c.wait(in.now, 0)
		c.acked = true
		c.a.due(c, in.now+2*maxWait) // it still wants to know, and asks again when its time is over
	case stateTimewait:
		if !c.keeps { // what answered it is not what ended it
			c.a.send(c.local, c.peer.Addr, in.tid, wire.CMREJ, &wire.CMRej{RemoteID: c.remoteID, Reason: wire.RejStale})
			return
		}
		c.again()
	case stateRepSent:
		c.again()
	default: // it has had its answer; this one was late
		c.a.stats.Stray++
	}
}

// Accept says yes to a request, and who we are. ErrState, ErrPrivate.
func (c *Conn) Accept(now int64, me Params) error {
	if c.state != stateReqRcvd || c.Transport == UD {
		return ErrState
	}
	m := wire.CMRep{LocalID: c.id, RemoteID: c.remoteID, LocalQPN: me.QPN, StartingPSN: me.PSN, ResponderResources: me.Responder,
		InitiatorDepth: me.Initiator, TargetAckDelay: me.AckDelay, FlowControl: me.FlowControl, RNRRetry: me.RNRRetry, SRQ: me.SRQ,
		LocalCAGUID: c.a.cfg.GUID, VendorID: me.ECEVendor}
	if err := private(m.Private[:], me.Private); err != nil {
		return err
	}
	c.unpend()
	me.Addr = c.local
	c.me, c.state = me, stateRepSent
	c.a.format(&c.kept, c.tid, wire.CMREP, me.ECEOptions, &m)
	c.await(now)
	half := &c.a.half
	if c.enter(half); half.Len() > MaxHalfOpen {
		c.a.stats.GivenUp++
		half.Front().Value.(*Conn).noAnswer(now)
	}
	return nil
}

// Reject says no: to a request, or to a reply. RDMA CM's reason is wire.RejConsumer.
// ErrState, ErrPrivate.
func (c *Conn) Reject(now int64, reason wire.CMReason, data []byte) error {
	switch c.state {
	case stateReqRcvd, stateRepRcvd:
	default:
		return ErrState
	}
	return c.reject(now, reason, data)
}

func (c *Conn) reject(now int64, reason wire.CMReason, data []byte) error {
	if err := c.rejectWith(reason, data); err != nil {
		return err
	}
	if c.state == stateReqSent {
		c.forget(true) // there is no answer to this one
		return nil
	}
	c.leaveQP()
	c.linger(now)
	return nil
}

// rejectWith sends a REJ, and keeps it for when the peer asks again.
func (c *Conn) rejectWith(reason wire.CMReason, data []byte) error {
	m := wire.CMRej{LocalID: c.id, RemoteID: c.remoteID, Reason: reason}
	if c.state == stateReqRcvd && !c.acked {
		m.LocalID = 0 // which the peer has not heard, as the kernel has it
	}
	if reason == wire.RejTimeout {
		m.InfoLen = 8
		binary.BigEndian.PutUint64(m.Info[:], c.a.cfg.GUID)
	}
	switch c.state {
	case stateRepRcvd:
		m.Of = 1
	case stateReqSent, stateRepSent:
		m.Of = 2 // of no message: it has not come
	}
	if err := private(m.Private[:], data); err != nil {
		return err
	}
	c.answer(wire.CMREJ, 0, &m)
	return nil
}

// rtu: the other end is ready.
func (a *Agent) rtu(in arrival, b []byte) {
	var m wire.CMRtu
	m.Parse(b)
	c := a.find(in, m.RemoteID, m.LocalID)
	switch {
	case c == nil:
	case c.state == stateRepSent:
		c.established(m.Private[:])
	default:
		a.stats.Stray++ // once more
	}
}

func (c *Conn) established(data []byte) {
	c.enter(nil)
	c.state, c.keeps = stateEstablished, false
	c.a.due(c, Never)
	c.tell(Event{Kind: Established, Private: data})
}

// Notify says that a message has come over the connection: the peer is ready, and its RTU
// was lost (IBA 12.9.6, Communication Established). ErrState unless Accept was called.
func (c *Conn) Notify() error {
	switch c.state {
	case stateRepSent:
		c.established(nil)
	case stateEstablished:
	default:
		return ErrState
	}
	return nil
}

// alive says whether a connection is one, or is to be: not one that has ended.
func (c *Conn) alive() bool { return c.state != stateTimewait && c.state != stateGone }

// lost: the other end does not know the connection any more.
func (c *Conn) lost(now int64) {
	switch c.state {
	case stateEstablished, stateRepRcvd, stateReqRcvd, stateRepSent:
		c.leaveQP()
		c.keeps = false
		c.linger(now)
		c.tell(Event{Kind: Disconnected})
	case stateDreqSent:
		c.leaveQP()
		c.linger(now)
		c.tell(Event{Kind: Ended})
	}
}

// stale: the other end uses the connection's queue pair for another one. It is told that this one
// is over, once: it may have forgotten it, or have made a mistake.
func (c *Conn) stale(now int64) {
	if c.state == stateEstablished || c.state == stateRepSent {
		c.a.send(c.local, c.peer.Addr, c.tid, wire.CMDREQ, &wire.CMDreq{LocalID: c.id, RemoteID: c.remoteID, RemoteQPN: c.peer.QPN})
	}
	c.lost(now)
}
