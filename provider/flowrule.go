// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"

	"github.com/tapverbs/tapverbs/wire"
)

// Filters compare a header's fields where their mask has ones
// (ibv_create_flow(3)). Numbers are in host order.

// EthFilter are the fields of an Ethernet header. EtherType is what follows the VLAN
// tags; VLANTag is the outer tag's control word (IEEE 802.1Q 9.6): a mask that is not
// zero wants there to be a tag.
type EthFilter struct {
	Dst, Src           [6]byte
	EtherType, VLANTag uint16
}

// IPv4Filter are the fields of an IPv4 header. Flags are its upper three bits of
// flags and fragment offset: 2 is DF, 1 is MF.
type IPv4Filter struct {
	Src, Dst               [4]byte
	Proto, TOS, TTL, Flags uint8
}

// IPv6Filter are the fields of an IPv6 header.
type IPv6Filter struct {
	Src, Dst                  [16]byte
	FlowLabel                 uint32
	NextHdr, TClass, HopLimit uint8
}

// PortFilter are the ports of a TCP or UDP header. Fragments but the first have none.
type PortFilter struct {
	Dst, Src uint16
}

// The filters with their masks.
type (
	EthSpec  struct{ Val, Mask EthFilter }
	IPv4Spec struct{ Val, Mask IPv4Filter }
	IPv6Spec struct{ Val, Mask IPv6Filter }
	TCPSpec  struct{ Val, Mask PortFilter }
	UDPSpec  struct{ Val, Mask PortFilter }
)

// TagAction gives completions a flow tag (ibv_create_cq_ex(3),
// IBV_WC_EX_WITH_FLOW_TAG).
type TagAction struct{ Tag uint32 }

// DropAction drops the frame: neither the QP nor the engine sees it.
type DropAction struct{}

// CountAction counts the frame.
type CountAction struct{ Counters *Counters }

const (
	protoTCP = 6
	protoUDP = 17
)

// flowRule is a flow's specs, sorted.
type flowRule struct {
	eth   *EthSpec
	ip4   *IPv4Spec
	ip6   *IPv6Spec
	proto uint8 // of ports; 0: no such spec
	ports struct{ Val, Mask PortFilter }
	tag   *TagAction
	drop  bool
	count *Counters
}

// once stores a spec that may be there once.
func once[T any](p **T, v T) error {
	if *p != nil {
		return fmt.Errorf("two flow specs of the type %T: %w", v, ErrInvalid)
	}
	*p = &v
	return nil
}

func (e EthSpec) addTo(r *flowRule) error   { return once(&r.eth, e) }
func (i IPv4Spec) addTo(r *flowRule) error  { return once(&r.ip4, i) }
func (i IPv6Spec) addTo(r *flowRule) error  { return once(&r.ip6, i) }
func (t TCPSpec) addTo(r *flowRule) error   { return r.transport(protoTCP, t.Val, t.Mask) }
func (u UDPSpec) addTo(r *flowRule) error   { return r.transport(protoUDP, u.Val, u.Mask) }
func (t TagAction) addTo(r *flowRule) error { return once(&r.tag, t) }

func (DropAction) addTo(r *flowRule) error {
	if r.drop {
		return fmt.Errorf("two drop actions in a flow: %w", ErrInvalid)
	}
	r.drop = true
	return nil
}

func (c CountAction) addTo(r *flowRule) error {
	if c.Counters == nil || r.count != nil {
		return fmt.Errorf("no counters in a flow's count action, or two: %w", ErrInvalid)
	}
	r.count = c.Counters
	return nil
}

func (r *flowRule) transport(proto uint8, val, mask PortFilter) error {
	if r.proto != 0 {
		return fmt.Errorf("two transport specs in a flow: %w", ErrInvalid)
	}
	r.proto, r.ports.Val, r.ports.Mask = proto, val, mask
	return nil
}

func (r *flowRule) filters() bool {
	return r.eth != nil || r.ip4 != nil || r.ip6 != nil || r.proto != 0
}

// check refuses specs that no frame can match together.
func (r *flowRule) check() error {
	bad := r.ip4 != nil && r.ip6 != nil
	if e := r.eth; e != nil && e.Mask.EtherType == 0xffff {
		bad = bad || r.ip4 != nil && e.Val.EtherType != etherIPv4 || r.ip6 != nil && e.Val.EtherType != etherIPv6 ||
			r.proto != 0 && e.Val.EtherType != etherIPv4 && e.Val.EtherType != etherIPv6
	}
	if i := r.ip4; i != nil && r.proto != 0 {
		bad = bad || (i.Val.Proto^r.proto)&i.Mask.Proto != 0
	}
	if bad {
		return fmt.Errorf("flow specs contradict each other: %w", ErrInvalid)
	}
	return nil
}

// frameView is a frame and where its headers are.
type frameView struct {
	b      []byte
	tagged bool
	tci    uint16 // of the outer VLAN tag
	ether  uint16 // type behind the tags
	l3     int    // IP header, whole
	ver    uint8  // of IP; 0: none
	proto  uint8  // of the transport header
	l4     int    // its place, 4 bytes of it being there; 0: none
}

// Types of VLAN tags (IEEE 802.1Q 9.5), and how many of them are looked behind.
const (
	etherCTag = 0x8100
	etherSTag = 0x88a8
	maxTags   = 2
)

// parse takes any frame of at least an Ethernet header. A header that is cut short or
// makes no sense is none.
func (v *frameView) parse(b []byte) {
	*v = frameView{b: b, ether: be.Uint16(b[12:])}
	off := wire.EthLen
	for range maxTags {
		if v.ether != etherCTag && v.ether != etherSTag || len(b) < off+4 {
			break
		}
		if !v.tagged {
			v.tagged, v.tci = true, be.Uint16(b[off:])
		}
		v.ether = be.Uint16(b[off+2:])
		off += 4
	}
	switch {
	case v.ether == etherIPv4 && len(b) >= off+wire.IPv4Len && b[off]>>4 == 4:
		v.parse4(off)
	case v.ether == etherIPv6 && len(b) >= off+wire.IPv6Len && b[off]>>4 == 6:
		v.parse6(off)
	}
}

func (v *frameView) parse4(off int) {
	h := v.b[off:]
	hl := int(h[0]&0xf) * 4
	if hl < wire.IPv4Len || hl > len(h) {
		return
	}
	v.ver, v.l3, v.proto = 4, off, h[9]
	if be.Uint16(h[6:])&0x1fff == 0 && len(h) >= hl+4 {
		v.l4 = off + hl
	}
}

// Extension headers of IPv6 that are looked behind (RFC 8200 4).
const (
	hopByHop    = 0
	routing     = 43
	fragment    = 44
	destOptions = 60
)

func (v *frameView) parse6(off int) {
	v.ver, v.l3, v.proto = 6, off, v.b[off+6]
	for at := off + wire.IPv6Len; at+4 <= len(v.b); {
		h := v.b[at:]
		switch v.proto {
		case hopByHop, routing, destOptions:
			v.proto = h[0]
			at += 8 + int(h[1])*8
		case fragment:
			if be.Uint16(h[2:])&^7 != 0 {
				return // not the first: no transport header
			}
			v.proto = h[0]
			at += 8
		default:
			v.l4 = at
			return
		}
	}
}

// same compares where mask has ones.
func same(got, val, mask []byte) bool {
	for i, m := range mask {
		if (got[i]^val[i])&m != 0 {
			return false
		}
	}
	return true
}

func (r *flowRule) matches(v *frameView) bool {
	return (r.eth == nil || r.eth.matches(v)) && (r.ip4 == nil || r.ip4.matches(v)) &&
		(r.ip6 == nil || r.ip6.matches(v)) && (r.proto == 0 || r.matchPorts(v))
}

func (e *EthSpec) matches(v *frameView) bool {
	return same(v.b, e.Val.Dst[:], e.Mask.Dst[:]) && same(v.b[6:], e.Val.Src[:], e.Mask.Src[:]) &&
		(v.ether^e.Val.EtherType)&e.Mask.EtherType == 0 &&
		(e.Mask.VLANTag == 0 || v.tagged && (v.tci^e.Val.VLANTag)&e.Mask.VLANTag == 0)
}

func (i *IPv4Spec) matches(v *frameView) bool {
	if v.ver != 4 {
		return false
	}
	h, val, m := v.b[v.l3:], &i.Val, &i.Mask
	return same(h[12:], val.Src[:], m.Src[:]) && same(h[16:], val.Dst[:], m.Dst[:]) &&
		(h[9]^val.Proto)&m.Proto|(h[1]^val.TOS)&m.TOS|(h[8]^val.TTL)&m.TTL|(h[6]>>5^val.Flags)&m.Flags == 0
}

func (i *IPv6Spec) matches(v *frameView) bool {
	if v.ver != 6 {
		return false
	}
	h, val, m := v.b[v.l3:], &i.Val, &i.Mask
	first := be.Uint32(h)
	return same(h[8:], val.Src[:], m.Src[:]) && same(h[24:], val.Dst[:], m.Dst[:]) &&
		(first^val.FlowLabel)&m.FlowLabel&0xfffff == 0 &&
		(h[6]^val.NextHdr)&m.NextHdr|(uint8(first>>20)^val.TClass)&m.TClass|(h[7]^val.HopLimit)&m.HopLimit == 0
}

func (r *flowRule) matchPorts(v *frameView) bool {
	if v.ver == 0 || v.proto != r.proto {
		return false
	}
	m := &r.ports.Mask
	if *m == (PortFilter{}) {
		return true
	}
	return v.l4 != 0 && (be.Uint16(v.b[v.l4:])^r.ports.Val.Src)&m.Src == 0 && (be.Uint16(v.b[v.l4+2:])^r.ports.Val.Dst)&m.Dst == 0
}
