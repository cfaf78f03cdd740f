// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
import "C"

import (
	"unsafe"

	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/provider"
)

// The filters of engine.h's specs. A field that the spec's type has not is zero, as
// is its mask.

func macOf(m [6]C.uint8_t) (o [6]byte) {
	for i := range o {
		o[i] = byte(m[i])
	}
	return o
}

func ip4Of(a [16]C.uint8_t) (o [4]byte) {
	for i := range o {
		o[i] = byte(a[i])
	}
	return o
}

func ip6Of(a [16]C.uint8_t) (o [16]byte) {
	for i := range o {
		o[i] = byte(a[i])
	}
	return o
}

func ethFilter(f *C.struct_tv_flow_filter) provider.EthFilter {
	return provider.EthFilter{Dst: macOf(f.dst_mac), Src: macOf(f.src_mac), EtherType: uint16(f.ether_type), VLANTag: uint16(f.vlan_tag)}
}

func ipv4Filter(f *C.struct_tv_flow_filter) provider.IPv4Filter {
	return provider.IPv4Filter{Src: ip4Of(f.src_ip), Dst: ip4Of(f.dst_ip), Proto: uint8(f.proto), TOS: uint8(f.tclass), TTL: uint8(f.ttl), Flags: uint8(f.flags)}
}

func ipv6Filter(f *C.struct_tv_flow_filter) provider.IPv6Filter {
	return provider.IPv6Filter{Src: ip6Of(f.src_ip), Dst: ip6Of(f.dst_ip), FlowLabel: uint32(f.flow_label),
		NextHdr: uint8(f.proto), TClass: uint8(f.tclass), HopLimit: uint8(f.ttl)}
}

func portFilter(f *C.struct_tv_flow_filter) provider.PortFilter {
	return provider.PortFilter{Dst: uint16(f.dst_port), Src: uint16(f.src_port)}
}

func flowSpec(s *C.struct_tv_flow_spec) provider.FlowSpec {
	switch s._type {
	case C.TV_FLOW_ETH:
		return provider.EthSpec{Val: ethFilter(&s.val), Mask: ethFilter(&s.mask)}
	case C.TV_FLOW_IPV4:
		return provider.IPv4Spec{Val: ipv4Filter(&s.val), Mask: ipv4Filter(&s.mask)}
	case C.TV_FLOW_IPV6:
		return provider.IPv6Spec{Val: ipv6Filter(&s.val), Mask: ipv6Filter(&s.mask)}
	case C.TV_FLOW_TCP:
		return provider.TCPSpec{Val: portFilter(&s.val), Mask: portFilter(&s.mask)}
	case C.TV_FLOW_UDP:
		return provider.UDPSpec{Val: portFilter(&s.val), Mask: portFilter(&s.mask)}
	case C.TV_FLOW_TAG:
		return provider.TagAction{Tag: uint32(s.tag)}
	case C.TV_FLOW_DROP:
		return provider.DropAction{}
	case C.TV_FLOW_COUNT:
		return provider.CountAction{Counters: of[*provider.Counters](s.counters)}
	}
	return nil
}

//export tvCreateFlow
func tvCreateFlow(h C.tv_handle, a *C.struct_tv_flow_attr) C.int {
	stackroom.Reserve()
	if a.num > C.TV_FLOW_SPECS || a._type > 255 {
		return errno(provider.ErrInvalid)
	}
	fa := provider.FlowAttr{Type: provider.FlowType(a._type), Priority: uint16(a.priority), Port: uint8(a.port), DontTrap: a.dont_trap != 0}
	for i := range a.num {
		s := flowSpec(&a.specs[i])
		if s == nil {
			return errno(provider.ErrInvalid)
		}
		fa.Specs = append(fa.Specs, s)
	}
	f, err := of[*provider.QP](h).CreateFlow(fa)
	if err != nil {
		return errno(err)
	}
	a.handle = ctxOf(h).add(rankFlow, f, f.Destroy)
	return 0
}

//export tvCreateCounters
func tvCreateCounters(h C.tv_handle, out *C.tv_handle) C.int {
	stackroom.Reserve()
	c := object[*ectx](h)
	n, err := c.dev.d.CreateCounters()
	if err != nil {
		return errno(err)
	}
	*out = c.add(rankCounters, n, n.Destroy)
	return 0
}

//export tvAttachCounters
func tvAttachCounters(h C.tv_handle, kind, index C.uint32_t) C.int {
	stackroom.Reserve()
	return errno(of[*provider.Counters](h).Attach(provider.CounterKind(kind), uint32(index)))
}

//export tvReadCounters
func tvReadCounters(h C.tv_handle, values *C.uint64_t, n C.uint32_t) C.int {
	stackroom.Reserve()
	return errno(of[*provider.Counters](h).Read(unsafe.Slice((*uint64)(unsafe.Pointer(values)), int(n))))
}
