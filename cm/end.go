// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"net/netip"

	"github.com/tapverbs/tapverbs/wire"
)

// How connections end (IBA 12.9.9), and what is refused.

// Disconnect ends an established connection. Its queue pair is no more to be used; Ended
// follows when the other end knows, Gone when nothing that is on its way can arrive. ErrState,
// ErrPrivate.
func (c *Conn) Disconnect(now int64, data []byte) error {
	if c.state != stateEstablished && c.state != stateRepSent {
		return ErrState
	}
	m := wire.CMDreq{LocalID: c.id, RemoteID: c.remoteID, RemoteQPN: c.peer.QPN}
	if err := private(m.Private[:], data); err != nil {
		return err
	}
	if c.listener != nil {
		c.tid = c.newTID() // not the transaction of the peer's REQ
	}
	c.enter(nil)
	c.state = stateDreqSent
	c.a.format(&c.kept, c.tid, wire.CMDREQ, 0, &m)
	c.await(now)
	return nil
}

// dreq: the other end has ended the connection.
func (a *Agent) dreq(in arrival, b []byte) {
	var m wire.CMDreq
	m.Parse(b)
	drep := func(local, remote uint32) *wire.CMDrep { return &wire.CMDrep{LocalID: local, RemoteID: remote} }
	c := a.find(in, m.RemoteID, m.LocalID)
	if c == nil {
		// IBA 12.9.9: it is over as far as we know. One answer to one question.
		if known := a.conns[m.RemoteID]; known == nil {
			a.send(in.dst, in.src, in.tid, wire.CMDREP, drep(m.RemoteID, m.LocalID))
		}
		return
	}
	switch c.state {
	case stateEstablished, stateRepSent, stateRepRcvd, stateDreqSent:
		if m.RemoteQPN != c.me.QPN {
			a.stats.Stray++ // whoever it is does not know our queue pair
			return
		}
		told := c.state == stateDreqSent
		c.tid = in.tid
		c.answer(wire.CMDREP, 0, drep(c.id, c.remoteID))
		c.linger(in.now)
		if told {
			c.tell(Event{Kind: Ended})
		} else {
			c.tell(Event{Kind: Disconnected, Private: m.Private[:]})
		}
	case stateTimewait:
		a.send(in.dst, in.src, in.tid, wire.CMDREP, drep(c.id, c.remoteID))
	default:
		a.stats.Stray++
	}
}

// drep: the other end knows that it is over.
func (a *Agent) drep(in arrival, b []byte) {
	var m wire.CMDrep
	m.Parse(b)
	c := a.find(in, m.RemoteID, m.LocalID)
	switch {
	case c == nil:
	case c.state == stateDreqSent:
		c.keeps = false
		c.linger(in.now)
		c.tell(Event{Kind: Ended})
	default:
		a.stats.Stray++
	}
}

// lap: there are no alternate paths here.
func (a *Agent) lap(in arrival, b []byte) {
	var m wire.CMLap
	m.Parse(b)
	status := uint8(wire.APRNotSupported)
	if c := a.find(in, m.RemoteID, m.LocalID); c == nil || c.state != stateEstablished {
		status = wire.APRInvalidComm
	}
	a.send(in.dst, in.src, in.tid, wire.CMAPR, &wire.CMApr{LocalID: m.RemoteID, RemoteID: m.LocalID, Status: status})
}

// gid is the address that a GID spells.
func gid(g [16]byte) netip.Addr { return netip.AddrFrom16(g).Unmap() }
