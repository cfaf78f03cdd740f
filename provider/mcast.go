// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// Multicast (IBA 10.5): datagrams to QPN 0xffffff at a group's address go to each
// UD QP that is attached to the group. The link hears of our membership by IGMP
// (igmp.go) and MLD (mld.go), as it would from the kernel of a host whose RDMA
// device is attached: switches that snoop forward only what somebody asked for.

const (
	// robustness is how often a join or leave is said, the times between being
	// random up to changeInterval (RFC 3376 8.1, 8.11; RFC 3810 9.1, 9.11).
	robustness     = 2
	changeInterval = int64(time.Second)
	// olderQuerier is how long the router that sent a query of an older version
	// is remembered: robustness times 125 s between queries, and 10 s for the
	// answers (RFC 3376 8.12, RFC 3810 9.12).
	olderQuerier = int64(260 * time.Second)
)

// mcastGroup is a group that QPs are attached to, or were until just now, or that
// neighbour discovery listens to.
type mcastGroup struct {
	addr netip.Addr
	qps  []*QP // in the order of attaching
	// joins is how often the device is in the group for its own sake (JoinGroup).
	joins int
	// nd: a solicited-node group of one of our addresses (RFC 4861 7.2.1), ours
	// for as long as the device is open.
	nd bool
	// at is when the next report is due, qp.Never if none is; changes says how
	// many reports of a join or leave are still to be sent; with 0 a query is
	// answered.
	at      int64
	changes int
}

// member says whether the device is in the group; it has left it otherwise, and is
// still saying so.
func (g *mcastGroup) member() bool { return g.nd || g.wanted() }

// wanted says whether the application is in the group.
func (g *mcastGroup) wanted() bool { return len(g.qps) > 0 || g.joins > 0 }

// mcastTable holds the device's groups. It belongs to the holder of the baton.
type mcastTable struct {
	m        map[netip.Addr]*mcastGroup
	list     []*mcastGroup // of m, in the order of joining
	groups   int           // that the application is in
	attached int           // QPs in all groups, and joins
	due      int64         // not after the earliest group's at
	rng      *rand.Rand
	// Until when there is a router that knows only an older version of IGMP or MLD.
	igmp1, igmp2, mld1 int64
}

func (t *mcastTable) init(d *Device) {
	t.m, t.due = make(map[netip.Addr]*mcastGroup), qp.Never
	var seed [8]byte
	copy(seed[:], d.mac[:])
	t.rng = rand.New(rand.NewPCG(be.Uint64(seed[:]), 1)) // stations differ, runs do not
	for _, a := range d.gids.addrs {
		if a.Is6() {
			n := solicitedNode(a)
			if t.m[n] == nil {
				t.add(n).nd = true
			}
		}
	}
}

func (t *mcastTable) add(a netip.Addr) *mcastGroup {
	g := &mcastGroup{addr: a, at: qp.Never}
	t.m[a] = g
	t.list = append(t.list, g)
	return g
}

func (t *mcastTable) remove(g *mcastGroup) {
	delete(t.m, g.addr)
	for i, o := range t.list {
		if o == g {
			last := len(t.list) - 1
			copy(t.list[i:], t.list[i+1:])
			t.list[last] = nil
			t.list = t.list[:last]
			return
		}
	}
}

// joined says whether a QP of ours is attached to the group.
func (t *mcastTable) joined(a netip.Addr) bool {
	g := t.m[a]
	return g != nil && len(g.qps) > 0
}

// plan has g reported at a time.
func (t *mcastTable) plan(g *mcastGroup, at int64) {
	g.at = at
	t.due = min(t.due, at)
}

// random is a time from 0 to n ns.
func (t *mcastTable) random(n int64) int64 { return t.rng.Int64N(n + 1) }

// AttachMcast has the QP receive what is sent to a group (ibv_attach_mcast(3)); the
// device joins it by IGMP or MLD when it is the first. A QP that is attached already
// stays so. A QP receives a datagram of its own never, those of the device's other
// QPs always. ErrInvalid if the QP is not UD or gid no multicast address (an IPv4
// group is given mapped into IPv6, ::ffff:239.1.2.3), ErrNoMem beyond MaxMcastGrp,
// MaxMcastQPAttach or MaxTotalMcastQPAttach.
func (q *QP) AttachMcast(gid GID) error {
	if err := q.s.d.alive(); err != nil {
		return err
	}
	if err := q.mcastCall(gid); err != nil {
		return err
	}
	s := q.s
	s.lock()
	defer s.release()
	if q.gone {
		return ErrClosed
	}
	s.now = s.clock()
	a := gid.Addr()
	if g := s.mc.m[a]; g != nil && g.index(q) >= 0 {
		return nil
	}
	g, err := s.room(a)
	if err != nil {
		return err
	}
	s.join(g, func() {
		g.qps = append(g.qps, q)
		q.groups++
	})
	return nil
}

// DetachMcast ends AttachMcast (ibv_detach_mcast(3)); the device leaves the group
// with the last of its QPs. ErrInvalid if the QP is not attached. A device that is gone
// detaches, too, so that the QP can be destroyed.
func (q *QP) DetachMcast(gid GID) error {
	if err := q.mcastCall(gid); err != nil {
		return err
	}
	s := q.s
	s.lock()
	defer s.release()
	if q.gone {
		return ErrClosed
	}
	g := s.mc.m[gid.Addr()]
	if g == nil || g.index(q) < 0 {
		return fmt.Errorf("QP %#x is not attached to %v: %w", uint32(q.num), gid, ErrInvalid)
	}
	s.now = s.clock()
	s.detach(g, q)
	s.eg.flush()
	return nil
}

func (q *QP) mcastCall(gid GID) error {
	if q.dead.Load() || q.s.d.closed.Load() {
		return ErrClosed
	}
	if q.init.Type != qp.TypeUD || !gid.Addr().IsMulticast() {
		return fmt.Errorf("multicast group %v for a %v QP: %w", gid, q.init.Type, ErrInvalid)
	}
	return nil
}

// index finds a QP among those attached.
func (g *mcastGroup) index(q *QP) int {
	for i, o := range g.qps {
		if o == q {
			return i
		}
	}
	return -1
}

func (s *shard) detach(g *mcastGroup, q *QP) {
	s.part(g, func() {
		i := g.index(q)
		copy(g.qps[i:], g.qps[i+1:])
		g.qps[len(g.qps)-1] = nil
		g.qps = g.qps[:len(g.qps)-1]
		q.groups--
	})
}

// detachAll is the end of a QP.
func (s *shard) detachAll(q *QP) {
	if q.groups == 0 {
		return
	}
	for i := len(s.mc.list) - 1; i >= 0; i-- { // a group that is left may go
		if g := s.mc.list[i]; g.index(q) >= 0 {
			s.detach(g, q)
		}
	}
}

// changed tells the link of a group joined or left: at once, and once more later.
func (s *shard) changed(g *mcastGroup) {
	g.changes = robustness
	s.report(g)
}

// rejoin tells the link of all groups, as after it was down.
func (s *shard) rejoin() {
	for _, g := range s.mc.list { // members stay in it
		if g.member() {
			s.changed(g)
		}
	}
}

// report says what is to be said of a group, and plans what comes after it.
func (s *shard) report(g *mcastGroup) {
	g.at = qp.Never
	if s.mc.reported(g.addr) {
		if g.addr.Is4() {
			s.sendIGMP(g)
		} else {
			s.sendMLD(g)
		}
	} else {
		g.changes = 0
	}
	if g.changes > 0 {
		g.changes--
	}
	if !g.member() && len(s.mc.list) > 2*maxMcastGrp {
		g.changes = 0 // who comes and goes that fast must not fill the table with what was
	}
	if g.changes > 0 {
		s.mc.plan(g, s.now+s.mc.random(changeInterval))
	} else if !g.member() {
		s.mc.remove(g)
	}
}

// reported says whether membership is told at all: not for the groups that all are
// in, nor for those that do not leave the node or are reserved (RFC 3376 5, RFC 3810 6).
func (t *mcastTable) reported(a netip.Addr) bool {
	if a.Is4() {
		return a != allSystems
	}
	return a != allNodes && a.As16()[1]&0xf > 1
}

// expireGroups sends the reports that are due.
func (s *shard) expireGroups() {
	s.mc.due = qp.Never
	for i := 0; i < len(s.mc.list); {
		g := s.mc.list[i]
		if g.at <= s.now {
			s.report(g) // may plan the next one
		} else {
			s.mc.due = min(s.mc.due, g.at)
		}
		if i < len(s.mc.list) && s.mc.list[i] == g {
			i++
		}
	}
}

// queried plans the answer to a query for one group, or with an invalid address for
// all, within so many ns (RFC 3376 5.2, RFC 3810 6.2).
func (s *shard) queried(group netip.Addr, v6 bool, within int64) {
	for _, g := range s.mc.list {
		if group.IsValid() && g.addr != group || g.addr.Is6() != v6 || !g.member() || !s.mc.reported(g.addr) {
			continue
		}
		if at := s.now + s.mc.random(within); at < g.at {
			s.mc.plan(g, at)
		}
	}
}

// suppress takes back the answer to a query that somebody else in the group has
// given, with the versions in which one answer is enough (RFC 2236 3, RFC 2710 4).
func (s *shard) suppress(group netip.Addr) {
	if g := s.mc.m[group]; g != nil && g.member() && g.changes == 0 {
		g.at = qp.Never
	}
}

// inputGroup takes in a packet to a multicast address.
func (s *shard) inputGroup(p *wire.Packet, dst netip.Addr) {
	g := s.mc.m[dst]
	if g == nil || len(g.qps) == 0 {
		s.drop(DropMulticast)
		return
	}
	if !s.looping && p.SrcMAC() == s.d.mac {
		s.drop(DropWrongMAC) // our own, sent back by the network; our QPs have it
		return
	}
	if !p.ICRCValid() {
		s.drop(DropICRC)
		return
	}
	s.cnt.RxPackets++
	s.cnt.RxPacketBytes += uint64(len(p.Frame))
	s.cnt.RxGroupPackets++
	// IBA 9.6.1.2.2: a group's packets have the multicast QPN, and only datagrams do.
	if p.Info.Service != wire.ServiceUD {
		s.drop(DropService)
		return
	}
	if p.BTH.DestQP != wire.MulticastQPN {
		s.drop(DropMulticast)
		return
	}
	from := p.DETH().SrcQP
	for _, q := range g.qps {
		if s.looping && q.num == from {
			continue
		}
		s.cnt.McastDelivered++
		s.deliver(q, p, false)
	}
}
