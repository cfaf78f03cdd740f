// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"net/netip"

	"github.com/tapverbs/tapverbs/wire"
)

// Neighbour discovery (RFC 4861).
const (
	ndSolicit = 135
	ndAdvert  = 136
	ndLen     = 24 // type to target address
	ndOptLen  = 8  // link-layer address option for Ethernet (RFC 2464 6)

	ndOptSource = 1
	ndOptTarget = 2

	ndSolicited = 0x40 // flags of an advertisement
	ndOverride  = 0x20
)

var allNodes = netip.AddrFrom16([16]byte{0: 0xff, 1: 0x02, 15: 0x01})

// solicitedNode is the group of those whose address ends like a's (RFC 4291 2.7.1).
func solicitedNode(a netip.Addr) netip.Addr {
	b := a.As16()
	return netip.AddrFrom16([16]byte{0: 0xff, 1: 0x02, 11: 0x01, 12: 0xff, 13: b[13], 14: b[14], 15: b[15]})
}

// ndOption finds a link-layer address option; ok is false if the options are
// malformed (RFC 4861 7.1: a length of 0 discards the packet).
func ndOption(opts []byte, kind byte) (mac [6]byte, found, ok bool) {
	for len(opts) > 0 {
		if len(opts) < 2 || opts[1] == 0 || len(opts) < int(opts[1])*8 {
			return mac, false, false
		}
		if opts[0] == kind && opts[1] == 1 && !found {
			mac, found = [6]byte(opts[2:]), true
		}
		opts = opts[int(opts[1])*8:]
	}
	return mac, found, true
}

// inputND takes in a solicitation or advertisement; the ICMPv6 checksum is right.
func (s *shard) inputND(h *ip6Header, body []byte) {
	// RFC 4861 7.1.1, 7.1.2: a router cannot have forwarded it.
	if h.hops != 255 || len(body) < ndLen || body[1] != 0 {
		s.drop(DropBadND)
		return
	}
	target := netip.AddrFrom16([16]byte(body[8:]))
	if target.IsMulticast() {
		s.drop(DropBadND)
		return
	}
	if body[0] == ndSolicit {
		s.inputNS(h, target, body[ndLen:])
	} else {
		s.inputNA(h, target, body[4], body[ndLen:])
	}
}

func (s *shard) inputNS(h *ip6Header, target netip.Addr, opts []byte) {
	mac, has, ok := ndOption(opts, ndOptSource)
	dad := h.src.IsUnspecified()
	// RFC 4861 7.1.1: duplicate address detection goes to the solicited-node
	// group and has no source address to tell.
	if !ok || dad && (has || h.dst != solicitedNode(target)) {
		s.drop(DropBadND)
		return
	}
	if mac == s.d.mac {
		return // our own, sent back
	}
	if has {
		s.heard(h.src, mac, true)
	}
	if !s.d.gids.has(target) {
		return
	}
	s.cnt.NDAdverts++
	if dad {
		s.sendNA(multicastMAC(allNodes), target, allNodes, ndOverride)
		return
	}
	if !has {
		mac = h.srcMAC // RFC 4861 7.2.4 would have us look it up; this is where it came from
	}
	s.sendNA(mac, target, h.src, ndSolicited|ndOverride)
}

func (s *shard) inputNA(h *ip6Header, target netip.Addr, flags byte, opts []byte) {
	mac, has, ok := ndOption(opts, ndOptTarget)
	if !ok || h.dst.IsMulticast() && flags&ndSolicited != 0 {
		s.drop(DropBadND)
		return
	}
	if mac == s.d.mac && has {
		return
	}
	if s.d.gids.has(target) {
		s.cnt.ARPConflicts++
		return
	}
	if !has {
		// RFC 4861 7.2.5: nothing to learn for an incomplete entry; a known one
		// is confirmed by a solicited answer.
		if n := s.nb.m[target]; n != nil && n.state != neighIncomplete && flags&ndSolicited != 0 {
			s.heard(target, n.mac, true)
		}
		return
	}
	s.heard(target, mac, flags&ndOverride != 0)
}

// sendNS asks for a neighbour: its group, or the neighbour itself when its MAC is
// to be confirmed (RFC 4861 7.2.2, 7.3.3).
func (s *shard) sendNS(n *neighbour) {
	dst := solicitedNode(n.addr)
	mac := multicastMAC(dst)
	if n.state == neighProbing && n.tries == 0 {
		dst, mac = n.addr, n.mac
	}
	src := n.src
	if !src.Is6() {
		src = s.d.gids.addrs[0]
	}
	s.cnt.NDSolicits++
	s.sendND(mac, src, dst, ndSolicit, 0, n.addr, ndOptSource)
}

func (s *shard) sendNA(mac [6]byte, target, dst netip.Addr, flags byte) {
	s.sendND(mac, target, dst, ndAdvert, flags, target, ndOptTarget)
}

// sendUnsolicitedNA announces an address (RFC 4861 7.2.6).
func (s *shard) sendUnsolicitedNA(a netip.Addr) {
	s.sendNA(multicastMAC(allNodes), a, allNodes, ndOverride)
}

func (s *shard) sendND(mac [6]byte, src, dst netip.Addr, kind, flags byte, target netip.Addr, opt byte) {
	b := s.eg.control(wire.EthLen + wire.IPv6Len + ndLen + ndOptLen)
	if b == nil {
		return
	}
	p := putIP6(b, s.d.mac, mac, src, dst, 255, ndLen+ndOptLen)
	clear(p)
	p[0], p[4] = kind, flags
	t := target.As16()
	copy(p[8:], t[:])
	p[ndLen], p[ndLen+1] = opt, 1
	copy(p[ndLen+2:], s.d.mac[:])
	be.PutUint16(p[2:], icmp6Checksum(src, dst, p))
	s.eg.push(b)
}
