// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"github.com/tapverbs/tapverbs/cm"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// Connection management: package cm's state machines on queue pair 1 of the device. They
// belong to the holder of the baton, as all else that the network reaches; what they have
// to say goes to a function of whoever asked, which must neither block nor call back.

// connManager is a shard's part in it.
type connManager struct {
	s     *shard
	agent *cm.Agent
	due   int64
	path  wire.Path // of the MAD that is sent
	// from is who sent the MAD that is handled, whose answer goes where it came from: strangers
	// are not worth a place in the neighbour table.
	from    netip.Addr
	fromMAC [6]byte
}

// CMConn is a connection, or a request for one, as connection management sees it: what is
// made known of both ends' queue pairs. The queue pairs themselves are the caller's; see
// Conn for connections that come with theirs.
type CMConn struct {
	// Owner is the caller's; a listener's sink sets it when it hears of a request.
	Owner any

	d    *Device
	c    *cm.Conn
	sink func(*CMConn, cm.Event)
}

// CMListener takes requests for a service.
type CMListener struct {
	d *Device
	l *cm.Listener
}

func (m *connManager) init(s *shard) {
	m.s, m.due = s, qp.Never
	guid := s.d.mac
	m.agent = cm.New(cm.Config{GUID: binary.BigEndian.Uint64([]byte{guid[0] ^ 2, guid[1], guid[2], 0xff, 0xfe, guid[3], guid[4], guid[5]}),
		MTU: uint8(s.d.mtu), Send: m.send, Event: m.event})
}

// event passes on what has happened.
func (m *connManager) event(c *cm.Conn, e cm.Event) {
	k, _ := c.Owner.(*CMConn)
	if k == nil { // a request: its listener's
		l, ok := c.Listener().Owner.(func(*CMConn, cm.Event))
		if !ok {
			return
		}
		k = &CMConn{d: m.s.d, c: c, sink: l}
		c.Owner = k
	}
	k.sink(k, e)
}

// waitingMAD is a MAD for a neighbour whose MAC is not known yet.
type waitingMAD struct {
	src, dst netip.Addr
	mad      [wire.MADLen]byte
}

// maxWaitingMADs bounds those of one neighbour. What is beyond that is lost.
const maxWaitingMADs = 8

// send sends a MAD, when it is known whereto: not every message is sent again if it is lost,
// or soon enough.
func (m *connManager) send(src, dst netip.Addr, mad *[wire.MADLen]byte) {
	s := m.s
	if s.gone.Load() {
		return
	}
	m.path = wire.Path{SrcMAC: s.d.mac, Src: src, Dst: dst, HopLimit: defaultHopLimit}
	if s.d.gids.has(dst) {
		m.path.DstMAC = s.d.mac
	} else {
		hop, err := s.d.gids.nextHop(dst)
		if err != nil {
			return
		}
		n := s.nb.m[hop]
		switch {
		case n != nil && n.state != neighIncomplete:
			m.path.DstMAC = n.mac
		case dst == m.from:
			m.path.DstMAC = m.fromMAC
		case n == nil:
			n = &neighbour{addr: hop, src: src, deadline: qp.Never}
			if s.nb.add(n) != nil {
				return
			}
			s.ask(n)
			fallthrough
		default:
			if len(n.mads) < maxWaitingMADs {
				n.mads = append(n.mads, waitingMAD{src, dst, *mad})
			}
			return
		}
	}
	if b := s.sendMAD(&m.path); b != nil {
		copy(b, mad[:])
		s.eg.End()
	}
}

// input takes a MAD of class 7.
func (m *connManager) input(p *wire.Packet) {
	m.from, m.fromMAC = p.Src(), [6]byte(p.Frame[6:12])
	m.agent.Receive(m.s.now, p.Src(), p.Dst(), p.Payload)
	m.from = netip.Addr{}
	m.due = m.agent.Next()
}

// lose ends everything when the device is gone: who has a connection hears that it is, too.
func (m *connManager) lose() {
	m.agent.Close(m.s.now)
	m.due = qp.Never
}

func (m *connManager) tick() {
	m.agent.Tick(m.s.now)
	m.due = m.agent.Next()
}

// do calls the agent with the baton held, and sends what it has to say.
func (d *Device) do(f func(a *cm.Agent, now int64) error) error {
	s := d.sh
	s.lock()
	defer s.release()
	if err := d.alive(); err != nil {
		return err
	}
	s.now = s.clock()
	err := f(s.cm.agent, s.now)
	s.cm.due = s.cm.agent.Next()
	s.eg.flush()
	return err
}

// CMStats counts the messages of connection management.
func (d *Device) CMStats() (st cm.Stats) {
	d.sh.lock()
	defer d.sh.release()
	return d.sh.cm.agent.Stats()
}

// CMListen takes requests for a service that come to one of the device's addresses, to any of
// IPv4's or IPv6's if addr is unspecified, or to any if it is the zero Addr; see cm.Agent.Listen
// and wire.ServiceID. wants may be nil; see cm.Listener. sink is told of each connection that is
// asked for, by cm.Request, and of what becomes of it. ErrInvalid if addr is not the device's,
// cm.ErrInUse.
func (d *Device) CMListen(service uint64, addr netip.Addr, backlog int, wants func(tr cm.Transport, private []byte) bool, sink func(*CMConn, cm.Event)) (*CMListener, error) {
	if addr = addr.Unmap().WithZone(""); addr.IsValid() && !addr.IsUnspecified() && !d.gids.has(addr) {
		return nil, fmt.Errorf("%v is not an address of %s: %w", addr, d.Name(), ErrInvalid)
	}
	l := &CMListener{d: d}
	return l, d.do(func(a *cm.Agent, _ int64) (err error) {
		if l.l, err = a.Listen(service, addr, backlog); err == nil {
			l.l.Owner, l.l.Wants = sink, wants
		}
		return err
	})
}

// CMExpect says that somebody may listen for a service soon, within a time; 0: not any more. See
// cm.Agent.Expect.
func (d *Device) CMExpect(service uint64, within time.Duration) {
	_ = d.do(func(a *cm.Agent, now int64) error { // nobody asks a device that is gone
		until := int64(0)
		if within > 0 {
			until = now + int64(within)
		}
		a.Expect(service, until)
		return nil
	})
}

// Close ends listening. Requests that were neither answered nor taken are rejected.
func (l *CMListener) Close() error {
	return l.d.do(func(_ *cm.Agent, now int64) error { l.l.Close(now); return nil })
}

// source is the address of ours that dst is reached from, and its index in the GID table: src
// if that is given, else dst itself if that is ours, else one on its link, if there is one.
// ErrInvalid, ErrUnreachable.
func (d *Device) source(src, dst netip.Addr) (netip.Addr, int, error) {
	found, near := -1, false
	for i, e := range d.gids.entries {
		a := d.gids.addrs[i]
		if src.IsValid() && a != src || a.Is4() != dst.Is4() || a.Is6() && a.IsLinkLocalUnicast() != (dst.IsLinkLocalUnicast() || dst.IsLinkLocalMulticast()) {
			continue
		}
		if a == dst {
			return a, i, nil
		}
		if on := e.Prefix.Contains(dst); found < 0 || on && !near {
			found, near = i, on
		}
	}
	if found < 0 {
		if src.IsValid() && !d.gids.has(src) {
			return netip.Addr{}, 0, fmt.Errorf("%v is not an address of %s: %w", src, d.Name(), ErrInvalid)
		}
		return netip.Addr{}, 0, fmt.Errorf("no address of %s reaches %v: %w", d.Name(), dst, ErrUnreachable)
	}
	return d.gids.addrs[found], found, nil
}

// CMConnect asks a service at dst for a connection of me, whose Addr is one of the device's,
// or the zero Addr for the one that reaches dst. It does not wait: a neighbour that is not known
// is asked for, and the request sent again. sink is told what becomes of it. ErrInvalid,
// ErrUnreachable, and the errors of cm.Agent.Connect.
func (d *Device) CMConnect(dst netip.Addr, service uint64, tr cm.Transport, me cm.Params, r cm.Route, sink func(*CMConn, cm.Event)) (*CMConn, error) {
	return d.ask(dst, &me, sink, func(a *cm.Agent, now int64) (*cm.Conn, error) {
		return a.Connect(now, dst.Unmap().WithZone(""), service, tr, me, r)
	})
}

// CMResolve asks for a datagram service, as CMConnect for a connection. cm.Resolved answers.
func (d *Device) CMResolve(src, dst netip.Addr, service uint64, private []byte, sink func(*CMConn, cm.Event)) (*CMConn, error) {
	me := cm.Params{Addr: src}
	return d.ask(dst, &me, sink, func(a *cm.Agent, now int64) (*cm.Conn, error) {
		return a.Resolve(now, me.Addr, dst.Unmap().WithZone(""), service, wire.DefaultPKey, private)
	})
}

func (d *Device) ask(dst netip.Addr, me *cm.Params, sink func(*CMConn, cm.Event), ask func(a *cm.Agent, now int64) (*cm.Conn, error)) (*CMConn, error) {
	src, _, err := d.source(me.Addr.Unmap().WithZone(""), dst.Unmap())
	if err != nil {
		return nil, err
	}
	me.Addr = src
	k := &CMConn{d: d, sink: sink}
	return k, d.do(func(a *cm.Agent, now int64) error {
		c, err := ask(a, now)
		if err == nil {
			k.c, c.Owner = c, k
		}
		return err
	})
}

// Route tells which of the device's addresses packets to dst come from, and its index in the
// GID table: src, if that is given. ErrInvalid if src is not the device's, ErrUnreachable.
func (d *Device) Route(src, dst netip.Addr) (netip.Addr, int, error) {
	if err := d.alive(); err != nil {
		return netip.Addr{}, 0, err
	}
	dst = dst.Unmap().WithZone("")
	a, i, err := d.source(src.Unmap().WithZone(""), dst)
	if err == nil && !dst.IsMulticast() && !d.gids.has(dst) {
		_, err = d.gids.nextHop(dst)
	}
	return a, i, err
}

// Reach waits until the neighbour is known that packets from src to dst go to. Errors are
// those of CreateAH, and the context's.
func (d *Device) Reach(ctx context.Context, src, dst netip.Addr) error {
	_, _, err := d.resolve(ctx, src.Unmap().WithZone(""), dst.Unmap().WithZone(""))
	return err
}

// CMInfo is what is known of a connection.
type CMInfo struct {
	Service    uint64
	Transport  cm.Transport
	Route      cm.Route
	Local      netip.Addr
	Peer, Mine cm.Params
}

// Info tells what is known of the connection.
func (k *CMConn) Info() (i CMInfo) {
	k.d.sh.lock()
	defer k.d.sh.release()
	c := k.c
	return CMInfo{c.Service, c.Transport, c.Route, c.Local(), *c.Peer(), *c.Mine()}
}

// Accept says yes to a request; see cm.Conn.Accept, and AcceptService for datagram services.
func (k *CMConn) Accept(me cm.Params) error {
	return k.d.do(func(_ *cm.Agent, now int64) error {
		if k.c.Transport == cm.UD {
			return k.c.AcceptService(now, me)
		}
		return k.c.Accept(now, me)
	})
}

// Reject says no to a request, or to a reply.
func (k *CMConn) Reject(reason wire.CMReason, private []byte) error {
	return k.d.do(func(_ *cm.Agent, now int64) error {
		if k.c.Transport == cm.UD {
			return k.c.RejectService(now, wire.SIDRRejected, private)
		}
		return k.c.Reject(now, reason, private)
	})
}

// Ready says, after cm.Reply, that our queue pair can be sent to.
func (k *CMConn) Ready(private []byte) error {
	return k.d.do(func(_ *cm.Agent, now int64) error { return k.c.Ready(now, private) })
}

// Take says that the application has the request; see cm.Conn.Take.
func (k *CMConn) Take() error {
	return k.d.do(func(*cm.Agent, int64) error { k.c.Take(); return nil })
}

// Notify says that a message has come over the connection; see cm.Conn.Notify.
func (k *CMConn) Notify() error {
	return k.d.do(func(*cm.Agent, int64) error { return k.c.Notify() })
}

// Disconnect ends an established connection; cm.Gone follows.
func (k *CMConn) Disconnect(private []byte) error {
	return k.d.do(func(_ *cm.Agent, now int64) error { return k.c.Disconnect(now, private) })
}

// Ending says whether Disconnect was called and the other end has not answered.
func (k *CMConn) Ending() bool {
	k.d.sh.lock()
	defer k.d.sh.release()
	return k.c.Ending()
}

// Open says whether the connection is established.
func (k *CMConn) Open() bool {
	k.d.sh.lock()
	defer k.d.sh.release()
	return k.c.Open()
}

// Destroy ends whatever is under way. sink is told nothing more.
func (k *CMConn) Destroy() error {
	return k.d.do(func(_ *cm.Agent, now int64) error { k.c.Destroy(now); return nil })
}
