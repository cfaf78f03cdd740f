// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"net/netip"
	"time"

	"github.com/tapverbs/tapverbs/wire"
)

// Internet group management, the host's part: version 3 (RFC 3376), and 2 (RFC
// 2236) and 1 (RFC 1112 appendix I) with routers that know no better.
const (
	protoIGMP = 2

	igmpQuery    = 0x11
	igmpReport1  = 0x12
	igmpReport2  = 0x16
	igmpLeave    = 0x17
	igmpReport3  = 0x22
	igmpLen      = 8  // versions 1 and 2
	igmpQueryLen = 12 // version 3, without sources
	igmpOneGroup = 16 // a version 3 report of one group without sources

	igmpTOS     = 0xc0 // internetwork control (RFC 3376 4)
	igmpHdrLen  = wire.IPv4Len + 4
	igmpV1Delay = 100 // tenths of a second

	tenth = int64(100 * time.Millisecond)
)

// Record types of version 3 reports; those of MLD version 2 are the same (RFC 3376
// 4.2.12, RFC 3810 5.2.12). No source excluded is what membership was before
// there were source filters.
const (
	recordIsExclude = 2 // we are in the group: answers a query
	recordToInclude = 3 // we have left
	recordToExclude = 4 // we have joined
)

var (
	allSystems    = netip.AddrFrom4([4]byte{224, 0, 0, 1})
	allRouters4   = netip.AddrFrom4([4]byte{224, 0, 0, 2})
	igmpRouters   = netip.AddrFrom4([4]byte{224, 0, 0, 22})
	ipRouterAlert = [4]byte{0x94, 0x04, 0, 0} // RFC 2113
)

// record is the type of a report's record about g.
func (g *mcastGroup) record() byte {
	switch {
	case !g.member():
		return recordToInclude
	case g.changes > 0:
		return recordToExclude
	}
	return recordIsExclude
}

// sendIGMP reports a group in the version that the routers of the link understand.
func (s *shard) sendIGMP(g *mcastGroup) {
	group := g.addr.As4()
	switch {
	case s.now < s.mc.igmp1:
		if g.member() { // version 1 has no leave
			s.putIGMP(g.addr, igmpReport1, group, igmpLen)
		}
	case s.now < s.mc.igmp2:
		if g.member() {
			s.putIGMP(g.addr, igmpReport2, group, igmpLen)
		} else {
			s.putIGMP(allRouters4, igmpLeave, group, igmpLen)
			g.changes = 1 // the router asks whether anybody is left: once is enough
		}
	default:
		if p := s.igmpFrame(igmpRouters, igmpOneGroup); p != nil {
			p[0], p[7], p[8] = igmpReport3, 1, g.record()
			copy(p[12:], group[:])
			s.pushIGMP(p)
		}
	}
}

func (s *shard) putIGMP(dst netip.Addr, kind byte, group [4]byte, n int) {
	if p := s.igmpFrame(dst, n); p != nil {
		p[0] = kind
		copy(p[4:], group[:])
		s.pushIGMP(p)
	}
}

// igmpFrame makes the headers before n bytes of IGMP and returns those, all zero;
// nil if there is no room. pushIGMP sends it.
func (s *shard) igmpFrame(dst netip.Addr, n int) []byte {
	b := s.eg.control(wire.EthLen + igmpHdrLen + n)
	if b == nil {
		return nil
	}
	s.igmpOut = b
	mac := multicastMAC(dst)
	copy(b, mac[:])
	copy(b[6:], s.d.mac[:])
	be.PutUint16(b[12:], etherIPv4)
	h := b[wire.EthLen:]
	clear(h)
	h[0], h[1] = 0x40|igmpHdrLen/4, igmpTOS
	be.PutUint16(h[2:], uint16(igmpHdrLen+n))
	be.PutUint16(h[6:], 0x4000) // DF
	h[8], h[9] = 1, protoIGMP
	for _, a := range s.d.gids.addrs {
		if a.Is4() { // none: 0.0.0.0 (RFC 3376 4.2.13)
			src := a.As4()
			copy(h[12:], src[:])
			break
		}
	}
	to := dst.As4()
	copy(h[16:], to[:])
	copy(h[20:], ipRouterAlert[:])
	be.PutUint16(h[10:], checksum(0, h[:igmpHdrLen]))
	return h[igmpHdrLen:]
}

func (s *shard) pushIGMP(body []byte) {
	be.PutUint16(body[2:], checksum(0, body))
	s.cnt.IGMPReports++
	s.eg.push(s.igmpOut)
	s.igmpOut = nil
}

// inputIGMP takes in queries, and other hosts' reports.
func (s *shard) inputIGMP(b []byte) {
	h := b[wire.EthLen:]
	ihl, total := int(h[0]&0xf)*4, int(be.Uint16(h[2:]))
	if ihl < wire.IPv4Len || total < ihl+igmpLen || total > len(h) || be.Uint16(h[6:])&ipv4FragmentBits != 0 ||
		checksum(0, h[:ihl]) != 0 || checksum(0, h[ihl:total]) != 0 || h[8] != 1 {
		s.drop(DropBadIGMP) // TTL 1: RFC 3376 4
		return
	}
	p := h[ihl:total]
	dst, group := netip.AddrFrom4([4]byte(h[16:])), netip.AddrFrom4([4]byte(p[4:]))
	switch p[0] {
	case igmpQuery:
		if !dst.IsMulticast() || !group.IsUnspecified() && !group.IsMulticast() {
			s.drop(DropBadIGMP)
			return
		}
		s.igmpQueried(p, group)
	case igmpReport1, igmpReport2:
		if s.now < max(s.mc.igmp1, s.mc.igmp2) && dst == group {
			s.suppress(group)
		}
	default:
		s.drop(DropNotRoCE) // what only routers listen to
	}
}

// igmpQueried notes which version the router speaks (RFC 3376 7.1, 7.2.1) and plans
// the answer.
func (s *shard) igmpQueried(p []byte, group netip.Addr) {
	delay := int64(p[1])
	switch {
	case len(p) >= igmpQueryLen:
		if c := delay; c >= 128 { // RFC 3376 4.1.1: a small floating point number
			delay = (c&0xf | 0x10) << (c>>4&7 + 3)
		}
	case len(p) != igmpLen:
		s.drop(DropBadIGMP)
		return
	case delay == 0:
		s.mc.igmp1 = s.now + olderQuerier
		delay = igmpV1Delay
	default:
		s.mc.igmp2 = s.now + olderQuerier
	}
	if group.IsUnspecified() {
		group = netip.Addr{}
	}
	s.queried(group, false, max(delay, 1)*tenth)
}
