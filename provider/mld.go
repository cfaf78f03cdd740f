// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"net/netip"
	"time"

	"github.com/tapverbs/tapverbs/wire"
)

// Multicast listener discovery, the listener's part: version 2 (RFC 3810), and 1
// (RFC 2710) with routers that know no better.
const (
	mldQuery   = 130
	mldReport1 = 131
	mldDone    = 132
	mldReport2 = 143

	mldLen      = 24 // version 1
	mldQueryLen = 28 // version 2, without sources
	mldOneGroup = 28 // a version 2 report of one group without sources

	protoHopOpts = 0
	hopOptsLen   = 8
)

var (
	mldRouters  = netip.AddrFrom16([16]byte{0: 0xff, 1: 0x02, 15: 0x16})
	allRouters6 = netip.AddrFrom16([16]byte{0: 0xff, 1: 0x02, 15: 0x02})
	// mldAlert is a hop-by-hop header before ICMPv6 with a router alert for MLD
	// and two bytes of padding (RFC 2711, RFC 8200 4.3).
	mldAlert = [hopOptsLen]byte{protoICMP6, 0, 5, 2, 0, 0, 1, 0}
)

// sendMLD reports a group in the version that the routers of the link understand.
func (s *shard) sendMLD(g *mcastGroup) {
	if s.now >= s.mc.mld1 {
		s.putMLD(mldRouters, mldReport2, mldOneGroup, func(p []byte) {
			p[7], p[8] = 1, g.record()
			group := g.addr.As16()
			copy(p[12:], group[:])
		})
		return
	}
	kind, dst := byte(mldReport1), g.addr
	if !g.member() {
		kind, dst = mldDone, allRouters6
		g.changes = 1
	}
	s.putMLD(dst, kind, mldLen, func(p []byte) {
		group := g.addr.As16()
		copy(p[8:], group[:])
	})
}

// putMLD sends a message of n bytes that fill completes, from the link-local address
// as RFC 3810 5.2.13 wants.
func (s *shard) putMLD(dst netip.Addr, kind byte, n int, fill func(p []byte)) {
	b := s.eg.control(wire.EthLen + wire.IPv6Len + hopOptsLen + n)
	if b == nil {
		return
	}
	src := s.d.gids.addrs[0]
	h := putIP6(b, s.d.mac, multicastMAC(dst), src, dst, 1, hopOptsLen+n)
	b[wire.EthLen+6] = protoHopOpts
	copy(h, mldAlert[:])
	p := h[hopOptsLen:]
	clear(p)
	p[0] = kind
	fill(p)
	be.PutUint16(p[2:], icmp6Checksum(src, dst, p))
	s.cnt.MLDReports++
	s.eg.push(b)
}

// routerAlert finds MLD's router alert among the options of a hop-by-hop header.
func routerAlert(opts []byte) bool {
	for len(opts) > 0 {
		if opts[0] == 0 { // Pad1
			opts = opts[1:]
			continue
		}
		if len(opts) < 2 || len(opts) < 2+int(opts[1]) {
			return false
		}
		if opts[0] == 5 && opts[1] == 2 && opts[2] == 0 && opts[3] == 0 {
			return true
		}
		opts = opts[2+opts[1]:]
	}
	return false
}

// inputMLD takes in what comes with hop-by-hop options: queries, and other
// listeners' reports. The frame is as long as the IPv6 header.
func (s *shard) inputMLD(b []byte) {
	p := b[wire.EthLen:]
	n := int(be.Uint16(p[4:]))
	if n < hopOptsLen || wire.IPv6Len+n > len(p) {
		s.drop(DropBadIGMP)
		return
	}
	src, dst := netip.AddrFrom16([16]byte(p[8:])), netip.AddrFrom16([16]byte(p[24:]))
	ext := p[wire.IPv6Len : wire.IPv6Len+n]
	opts := (int(ext[1]) + 1) * 8
	if ext[0] != protoICMP6 || opts > n || !dst.IsMulticast() {
		s.drop(DropNotRoCE)
		return
	}
	body := ext[opts:]
	switch {
	case len(body) < icmpHeaderLen || icmp6Checksum(src, dst, body) != 0:
		s.drop(DropBadIGMP)
		return
	case body[0] != mldQuery && body[0] != mldReport1:
		s.drop(DropNotRoCE)
		return
	// RFC 3810 5.1.14, 6.2; RFC 2710 4: such a message is from somewhere else.
	case len(body) < mldLen || p[7] != 1 || !src.IsLinkLocalUnicast() || !routerAlert(ext[2:opts]):
		s.drop(DropBadIGMP)
		return
	}
	group := netip.AddrFrom16([16]byte(body[8:]))
	if body[0] == mldReport1 {
		if s.now < s.mc.mld1 && dst == group {
			s.suppress(group)
		}
		return
	}
	if !group.IsUnspecified() && !group.IsMulticast() {
		s.drop(DropBadIGMP)
		return
	}
	delay := int64(be.Uint16(body[4:])) // milliseconds
	switch {
	case len(body) >= mldQueryLen:
		if c := delay; c >= 1<<15 { // RFC 3810 5.1.3
			delay = (c&0xfff | 0x1000) << (c>>12&7 + 3)
		}
	case len(body) == mldLen:
		s.mc.mld1 = s.now + olderQuerier
	default:
		s.drop(DropBadIGMP)
		return
	}
	if group.IsUnspecified() {
		group = netip.Addr{}
	}
	s.queried(group, true, delay*int64(time.Millisecond))
}
