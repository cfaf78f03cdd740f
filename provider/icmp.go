// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"net/netip"

	"github.com/tapverbs/tapverbs/wire"
)

const (
	protoICMP  = 1
	protoICMP6 = 58

	icmpEchoReply    = 0 // RFC 792
	icmpEcho         = 8
	icmp6Echo        = 128 // RFC 4443 4
	icmp6EchoReply   = 129
	icmpHeaderLen    = 8
	defaultHopLimit  = 64
	ipv4FragmentBits = 0x3fff
)

// ip6Header is what ICMPv6 needs of the headers in front of it.
type ip6Header struct {
	srcMAC   [6]byte
	src, dst netip.Addr
	hops     uint8
}

// inputICMP takes in what is no RoCE packet: ICMP echo requests, neighbour
// discovery, IGMP and MLD. Anything else is not for this device. The lengths are checked
// against the frame; fragments are ignored.
func (s *shard) inputICMP(b []byte) {
	switch be.Uint16(b[12:]) {
	case etherIPv4:
		s.inputICMP4(b)
	case etherIPv6:
		s.inputICMP6(b)
	default:
		s.drop(DropNotRoCE)
	}
}

func (s *shard) inputICMP4(b []byte) {
	h := b[wire.EthLen:]
	if len(h) >= wire.IPv4Len && h[0]>>4 == 4 && h[9] == protoIGMP {
		s.inputIGMP(b)
		return
	}
	if len(h) < wire.IPv4Len || h[0]>>4 != 4 || h[9] != protoICMP {
		s.drop(DropNotRoCE)
		return
	}
	ihl, total := int(h[0]&0xf)*4, int(be.Uint16(h[2:]))
	if ihl < wire.IPv4Len || total < ihl+icmpHeaderLen || total > len(h) || be.Uint16(h[6:])&ipv4FragmentBits != 0 ||
		checksum(0, h[:ihl]) != 0 {
		s.drop(DropBadICMP)
		return
	}
	src, dst := netip.AddrFrom4([4]byte(h[12:])), netip.AddrFrom4([4]byte(h[16:]))
	body := h[ihl:total]
	if !s.d.gids.has(dst) {
		s.drop(DropWrongIP)
		return
	}
	if body[0] != icmpEcho || body[1] != 0 {
		s.drop(DropNotRoCE)
		return
	}
	// RFC 1122 3.2.1.3: a reply needs one to go to.
	if checksum(0, body) != 0 || src.IsMulticast() || src.IsUnspecified() || src == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		s.drop(DropBadICMP)
		return
	}
	r := s.eg.control(wire.EthLen + wire.IPv4Len + len(body))
	if r == nil {
		return
	}
	copy(r, b[6:12])
	copy(r[6:], s.d.mac[:])
	be.PutUint16(r[12:], etherIPv4)
	p := r[wire.EthLen:]
	clear(p[:wire.IPv4Len])
	p[0], p[1] = 0x45, h[1]
	be.PutUint16(p[2:], uint16(wire.IPv4Len+len(body)))
	be.PutUint16(p[4:], s.eg.ipid)
	s.eg.ipid++
	p[8], p[9] = defaultHopLimit, protoICMP
	copy(p[12:], h[16:20])
	copy(p[16:], h[12:16])
	be.PutUint16(p[10:], checksum(0, p[:wire.IPv4Len]))
	e := p[wire.IPv4Len:]
	copy(e, body)
	e[0], e[2], e[3] = icmpEchoReply, 0, 0
	be.PutUint16(e[2:], checksum(0, e))
	s.cnt.EchoReplies++
	s.eg.push(r)
}

func (s *shard) inputICMP6(b []byte) {
	p := b[wire.EthLen:]
	if len(p) >= wire.IPv6Len && p[0]>>4 == 6 && p[6] == protoHopOpts {
		s.inputMLD(b)
		return
	}
	if len(p) < wire.IPv6Len || p[0]>>4 != 6 || p[6] != protoICMP6 {
		s.drop(DropNotRoCE)
		return
	}
	n := int(be.Uint16(p[4:]))
	if n < icmpHeaderLen || wire.IPv6Len+n > len(p) {
		s.drop(DropBadICMP)
		return
	}
	h := ip6Header{srcMAC: [6]byte(b[6:]), src: netip.AddrFrom16([16]byte(p[8:])), dst: netip.AddrFrom16([16]byte(p[24:])), hops: p[7]}
	body := p[wire.IPv6Len : wire.IPv6Len+n]
	if icmp6Checksum(h.src, h.dst, body) != 0 || h.src.IsMulticast() {
		s.drop(DropBadICMP)
		return
	}
	mine := s.d.gids.has(h.dst)
	if !mine && !h.dst.IsMulticast() {
		s.drop(DropWrongIP)
		return
	}
	switch {
	case body[0] == ndSolicit || body[0] == ndAdvert:
		s.inputND(&h, body)
	case body[0] == icmp6Echo && body[1] == 0 && !h.src.IsUnspecified():
		from := h.dst
		if !mine {
			// RFC 4443 4.2: a request to a group is answered from an address of ours.
			from = s.d.gids.addrs[0]
		}
		s.sendEcho6(&h, from, body)
	default:
		s.drop(DropNotRoCE) // router advertisements, multicast listeners, …
	}
}

func (s *shard) sendEcho6(h *ip6Header, from netip.Addr, body []byte) {
	r := s.eg.control(wire.EthLen + wire.IPv6Len + len(body))
	if r == nil {
		return
	}
	e := putIP6(r, s.d.mac, h.srcMAC, from, h.src, defaultHopLimit, len(body))
	copy(e, body)
	e[0], e[2], e[3] = icmp6EchoReply, 0, 0
	be.PutUint16(e[2:], icmp6Checksum(from, h.src, e))
	s.cnt.EchoReplies++
	s.eg.push(r)
}

// putIP6 writes Ethernet and IPv6 headers for n bytes of ICMPv6 and returns those.
func putIP6(b []byte, srcMAC, dstMAC [6]byte, src, dst netip.Addr, hops uint8, n int) []byte {
	copy(b, dstMAC[:])
	copy(b[6:], srcMAC[:])
	be.PutUint16(b[12:], etherIPv6)
	p := b[wire.EthLen:]
	be.PutUint32(p, 6<<28)
	be.PutUint16(p[4:], uint16(n))
	p[6], p[7] = protoICMP6, hops
	from, to := src.As16(), dst.As16()
	copy(p[8:], from[:])
	copy(p[24:], to[:])
	return p[wire.IPv6Len : wire.IPv6Len+n]
}

// icmp6Checksum is the checksum of body with its pseudo header (RFC 4443 2.3); 0
// when the one in the body is right.
func icmp6Checksum(src, dst netip.Addr, body []byte) uint16 {
	a, b := src.As16(), dst.As16()
	sum := sum16(sum16(uint64(len(body))+protoICMP6, a[:]), b[:])
	return checksum(sum, body)
}

// checksum is the Internet checksum (RFC 1071) of b and what sum holds already.
func checksum(sum uint64, b []byte) uint16 {
	sum = sum16(sum, b)
	for sum>>16 != 0 {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

func sum16(sum uint64, b []byte) uint64 {
	for len(b) >= 2 {
		sum += uint64(be.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		sum += uint64(b[0]) << 8
	}
	return sum
}
