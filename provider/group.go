// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"
	"net/netip"

	"github.com/tapverbs/tapverbs/wire"
)

// Multicast joins as RDMA CM has them (rdma_join_multicast(3)): by IP address, and of the
// device; queue pairs are attached beside that.

// UDPQKey is the Q_Key of datagrams between programs of RDMA CM, to groups and to each
// other's queue pairs (RDMA_UDP_QKEY of rdma_cma.h).
const UDPQKey = 0x01234567

// Group is a device's membership in a multicast group. It ends with Leave, or with the device.
type Group struct {
	// AH is what a handle for datagrams to the group is made of (PD.CreateAH).
	AH AHAttr
	// QPN and QKey are what such a datagram goes to.
	QPN  wire.QPN
	QKey uint32

	d    *Device
	addr netip.Addr
	left bool // guarded by the first shard's baton, as whether we are counted is
	sink bool // only to send: not counted
}

// JoinGroup joins the multicast group of an IPv4 or IPv6 address, by the address of the
// device's that reaches it: the link hears of it by IGMP or MLD, so that bridges that snoop
// forward what is sent to the group, and of its end when the last has left, queue pairs
// (AttachMcast) included. Who only sends to the group (sendOnly) tells nobody (RDMA_MC_JOIN_FLAG_
// SENDONLY_FULLMEMBER). The group's GID is the address, one of IPv4 mapped into IPv6 (IBA annex
// A17.4.5), its MAC that of the address (RFC 1112, RFC 2464). Receiving takes a queue pair with
// Group.Attach. ErrInvalid, ErrUnreachable, ErrNoMem beyond MaxMcastGrp groups or
// MaxTotalMcastQPAttach memberships.
func (d *Device) JoinGroup(addr netip.Addr, sendOnly bool) (*Group, error) {
	if err := d.alive(); err != nil {
		return nil, err
	}
	addr = addr.Unmap().WithZone("")
	if !addr.IsMulticast() {
		return nil, fmt.Errorf("join %v: no multicast group: %w", addr, ErrInvalid)
	}
	_, sgid, err := d.source(netip.Addr{}, addr)
	if err != nil {
		return nil, fmt.Errorf("join %v: %w", addr, err)
	}
	g := &Group{AH: AHAttr{DGID: GIDOf(addr), SGIDIndex: sgid, HopLimit: defaultHopLimit, PortNum: 1}, QPN: wire.MulticastQPN, QKey: UDPQKey,
		d: d, addr: addr, sink: sendOnly}
	if sendOnly {
		return g, nil
	}
	s := d.sh
	s.lock()
	defer s.release()
	s.now = s.clock()
	m, err := s.room(addr)
	if err != nil {
		return nil, err
	}
	s.join(m, func() { m.joins++ })
	return g, nil
}

// Attach has a UD queue pair of the device receive what is sent to the group; Detach ends
// that. Errors as for QP.AttachMcast.
func (g *Group) Attach(q *QP) error { return q.AttachMcast(g.AH.DGID) }

// Detach is the end of Attach.
func (g *Group) Detach(q *QP) error { return q.DetachMcast(g.AH.DGID) }

// Leave ends the membership. Queue pairs that are attached stay so. ErrClosed if it has ended.
func (g *Group) Leave() error {
	s := g.d.sh
	s.lock()
	defer s.release()
	if g.left || g.d.closed.Load() {
		return ErrClosed
	}
	g.left = true
	if m := s.mc.m[g.addr]; !g.sink && m != nil && m.joins > 0 {
		s.now = s.clock()
		s.part(m, func() { m.joins-- })
		s.eg.flush()
	}
	return nil
}

// room finds a group, or makes one, if there may be one more member.
func (s *shard) room(a netip.Addr) (*mcastGroup, error) {
	g := s.mc.m[a]
	switch {
	case (g == nil || !g.wanted()) && s.mc.groups >= maxMcastGrp:
		return nil, fmt.Errorf("%d multicast groups: %w", maxMcastGrp, ErrNoMem)
	case g != nil && len(g.qps)+g.joins >= maxMcastQPAttach || s.mc.attached >= maxMcastAttach:
		return nil, fmt.Errorf("members of %v: %w", a, ErrNoMem)
	case g == nil:
		g = s.mc.add(a)
	}
	return g, nil
}

// join has a group get one more member, and tells the link if it is the first.
func (s *shard) join(g *mcastGroup, enter func()) {
	was := g.member()
	if !g.wanted() {
		s.mc.groups++
	}
	enter()
	s.mc.attached++
	if !was {
		s.changed(g)
		s.eg.flush()
	}
}

// part is the end of join; the caller flushes.
func (s *shard) part(g *mcastGroup, leave func()) {
	leave()
	s.mc.attached--
	if !g.wanted() {
		s.mc.groups--
	}
	if !g.member() {
		s.changed(g)
	}
}

// leaveGroups ends all memberships that are no queue pair's, when the device is closed.
func (s *shard) leaveGroups() {
	s.now = s.clock()
	for i := len(s.mc.list) - 1; i >= 0; i-- { // a group that is left may go
		if g := s.mc.list[i]; g.joins > 0 {
			s.mc.attached -= g.joins - 1
			s.part(g, func() { g.joins = 0 })
		}
	}
	s.eg.flush()
}
