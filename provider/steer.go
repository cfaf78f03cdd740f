// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"net/netip"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// Who gets a frame when there are flows.
//
//   - Of the normal flows that match, those of the highest priority get it, each QP
//     once. A unicast frame is then taken, so the engine does not see it, RoCE or
//     not; a multicast one goes to all who want it, the engine included. A flow with
//     a drop action takes whatever matches.
//   - What no normal flow takes and is not RoCE for this device goes to the default
//     flows. ARP, neighbour discovery and echo are answered by the engine as ever.
//   - Sniffers get a copy of all that is received or sent.
//
// What a RAW_PACKET QP sends is shown to the flows of the device's other QPs as if
// it had come from the link, and leaves all the same, unless it is for the engine's
// own MAC: then it comes back to the device and nowhere else.

// flowTable holds the device's flows. It belongs to the holder of the baton.
type flowTable struct {
	n        int     // all of them
	normal   []*Flow // by priority, then in the order of their making
	defaults []*Flow
	sniffers []*Flow
	view     frameView
	round    uint64 // of the frame in hand: a QP gets it once
}

func (t *flowTable) list(f *Flow) *[]*Flow {
	switch f.typ {
	case FlowNormal:
		return &t.normal
	case FlowSniffer:
		return &t.sniffers
	}
	return &t.defaults
}

func (t *flowTable) add(f *Flow) {
	l := t.list(f)
	i := len(*l)
	*l = append(*l, f)
	if f.typ == FlowNormal {
		for ; i > 0 && (*l)[i-1].priority > f.priority; i-- {
			(*l)[i] = (*l)[i-1]
		}
		(*l)[i] = f
	}
	t.n++
}

func (t *flowTable) remove(f *Flow) {
	l := t.list(f)
	for i, o := range *l {
		if o == f {
			last := len(*l) - 1
			copy((*l)[i:], (*l)[i+1:])
			(*l)[last] = nil
			*l = (*l)[:last]
			t.n--
			return
		}
	}
}

// noteFlows tells the other shards whether there are flows.
func (s *shard) noteFlows() {
	s.d.flowing.Store(s.flows.n > 0)
	s.d.sniffing.Store(len(s.flows.sniffers) > 0)
}

// look starts with a frame.
func (t *flowTable) look(b []byte) {
	t.view.parse(b)
	t.round++
}

// hit lets a flow have the frame in hand.
func (s *shard) hit(f *Flow) {
	b := s.flows.view.b
	if c := f.rule.count; c != nil {
		c.count(len(b))
	}
	q := f.q
	if f.rule.drop || q.round == s.flows.round {
		return
	}
	q.round = s.flows.round
	s.cnt.FlowDelivered++
	tag := uint32(0)
	if f.rule.tag != nil {
		tag = f.rule.tag.Tag
	}
	q.q.HandleFrame(b, tag)
}

// hitNormal lets the normal flows have the frame, but not those of the QP from. It
// says whether one took it, and whether one of these drops it.
func (s *shard) hitNormal(from *QP) (taken, dropped bool) {
	priority := uint16(0)
	for _, f := range s.flows.normal {
		if taken && f.priority != priority {
			break
		}
		if f.q == from || !f.rule.matches(&s.flows.view) {
			continue
		}
		if !f.dontTrap {
			taken, priority = true, f.priority
			dropped = dropped || f.rule.drop
		}
		s.hit(f)
	}
	return taken, dropped
}

func (s *shard) hitDefaults(from *QP) (found bool) {
	mcast := s.flows.view.b[0]&1 != 0
	for _, f := range s.flows.defaults {
		if f.q != from && (mcast || f.typ == FlowAllDefault) {
			s.hit(f)
			found = true
		}
	}
	return found
}

func (s *shard) hitSniffers(from *QP) {
	for _, f := range s.flows.sniffers {
		if f.q != from {
			s.hit(f)
		}
	}
}

// steer shows a frame that has arrived to the flows, and says whether that was all:
// the engine need not look at it.
func (s *shard) steer(b []byte) bool {
	s.flows.look(b)
	mcast := b[0]&1 != 0
	taken, dropped := s.hitNormal(nil)
	if !s.looping || !mcast { // one that was sent to a group of ours is known to sniffers
		s.hitSniffers(nil)
	}
	switch {
	case dropped:
		s.cnt.FlowDropped++
		return true
	case taken:
		return !mcast
	}
	if len(s.flows.defaults) == 0 || s.isRoCE() {
		return false
	}
	return s.hitDefaults(nil) && !mcast && [6]byte(b) != s.d.mac
}

// steerSent shows a frame that a QP sends to the flows of others.
func (s *shard) steerSent(b []byte, from *QP) {
	s.flows.look(b)
	taken, _ := s.hitNormal(from)
	s.hitSniffers(from)
	if !taken && b[0]&1 != 0 {
		s.hitDefaults(from)
	}
}

// sniff shows a frame that the engine sends to sniffers.
func (s *shard) sniff(b []byte) {
	s.flows.look(b)
	s.hitSniffers(nil)
}

// isRoCE says whether the frame in hand is RoCE for this device.
func (s *shard) isRoCE() bool {
	v := &s.flows.view
	if v.l4 == 0 || v.proto != protoUDP || v.tagged || be.Uint16(v.b[v.l4+2:]) != wire.UDPPort {
		return false
	}
	var dst netip.Addr
	if v.ver == 4 {
		dst = netip.AddrFrom4([4]byte(v.b[v.l3+16:]))
	} else {
		dst = netip.AddrFrom16([16]byte(v.b[v.l3+24:]))
	}
	if v.b[0]&1 != 0 {
		return s.mc.joined(dst)
	}
	return [6]byte(v.b) == s.d.mac && s.d.gids.has(dst)
}

// MaxFrame is the longest frame without a VLAN tag: the qp.FrameEgress of RAW_PACKET
// QPs is the egress, too.
func (e *egress) MaxFrame() int { return e.maxFrame }

// BeginFrame reserves a frame; nil when there is no room for it.
func (e *egress) BeginFrame(n int) []byte {
	if e.loopTail-e.loopHead == loopSlots {
		return nil // it may be for ourselves
	}
	e.cur = e.slot(n)
	return e.cur
}

// EndFrame queues the frame begun last.
func (e *egress) EndFrame(q *qp.QP) {
	b := e.cur
	e.sent++
	e.sentBytes += uint64(len(b))
	e.sentGroup += uint64(b[0] & 1)
	if [6]byte(b) == e.s.d.mac {
		l := e.loop[e.loopTail%loopSlots][:len(b)]
		copy(l, b)
		e.pushLoop(l)
		return
	}
	if e.s.flows.n > 0 {
		e.s.steerSent(b, q.User().(*QP))
	}
	e.queue(b)
}
