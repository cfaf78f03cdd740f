// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"net/netip"
	"time"

	"github.com/tapverbs/tapverbs/wire"
)

const (
	arpLen     = 28 // Ethernet and IPv4 (RFC 826)
	arpRequest = 1
	arpReply   = 2

	// defendEvery is how often an address is defended at most (RFC 5227 2.4,
	// DEFEND_INTERVAL).
	defendEvery = int64(10 * time.Second)
)

var broadcastMAC = [6]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// inputARP answers requests for our addresses and learns from what neighbours say
// (RFC 826, RFC 5227).
func (s *shard) inputARP(b []byte) {
	p := b[wire.EthLen:]
	if len(p) < arpLen || be.Uint16(p) != 1 || be.Uint16(p[2:]) != etherIPv4 || p[4] != 6 || p[5] != 4 {
		s.drop(DropBadARP)
		return
	}
	op := be.Uint16(p[6:])
	mac := [6]byte(p[8:])
	sender, target := netip.AddrFrom4([4]byte(p[14:])), netip.AddrFrom4([4]byte(p[24:]))
	if op != arpRequest && op != arpReply || mac[0]&1 != 0 || mac == [6]byte{} || sender.IsMulticast() {
		s.drop(DropBadARP)
		return
	}
	if mac == s.d.mac {
		return // our own frame, sent back by the network
	}
	if s.d.gids.has(sender) {
		s.conflict(sender)
		return
	}
	s.heard(sender, mac, true)
	// Requests whose sender is 0.0.0.0 are probes: answered too (RFC 5227 2.1.1).
	if op == arpRequest && s.d.gids.has(target) {
		s.cnt.ARPReplies++
		s.sendARP(arpReply, mac, target, mac, sender)
	}
}

// conflict is called when somebody else says to have one of our addresses. We say
// once more that it is ours (RFC 5227 2.4 (b)).
func (s *shard) conflict(a netip.Addr) {
	s.cnt.ARPConflicts++
	if s.defended == 0 || s.now-s.defended >= defendEvery {
		s.defended = s.now
		s.sendGratuitousARP(a)
	}
}

// sendARPRequest asks for a neighbour; one whose MAC is known is asked directly
// first (RFC 1122 2.3.2.1).
func (s *shard) sendARPRequest(n *neighbour) {
	dst := broadcastMAC
	if n.state == neighProbing && n.tries == 0 {
		dst = n.mac
	}
	src := n.src
	if !src.Is4() {
		src = netip.IPv4Unspecified()
	}
	s.cnt.ARPRequests++
	s.sendARP(arpRequest, dst, src, [6]byte{}, n.addr)
}

// sendGratuitousARP announces an address (RFC 5227 2.3, 3: a request).
func (s *shard) sendGratuitousARP(a netip.Addr) {
	s.sendARP(arpRequest, broadcastMAC, a, [6]byte{}, a)
}

func (s *shard) sendARP(op uint16, dst [6]byte, sender netip.Addr, targetMAC [6]byte, target netip.Addr) {
	b := s.eg.control(wire.EthLen + arpLen)
	if b == nil {
		return
	}
	copy(b, dst[:])
	copy(b[6:], s.d.mac[:])
	be.PutUint16(b[12:], etherARP)
	p := b[wire.EthLen:]
	be.PutUint16(p, 1)
	be.PutUint16(p[2:], etherIPv4)
	p[4], p[5] = 6, 4
	be.PutUint16(p[6:], op)
	copy(p[8:], s.d.mac[:])
	from, to := sender.As4(), target.As4()
	copy(p[14:], from[:])
	copy(p[18:], targetMAC[:])
	copy(p[24:], to[:])
	s.eg.push(b)
}
