// SPDX-License-Identifier: Apache-2.0

package wire

import "net/netip"

const (
	etherIPv4 = 0x0800
	etherIPv6 = 0x86dd
	protoUDP  = 17
	protoFrag = 44 // IPv6 fragment header (RFC 8200 4.5)

	ipv4DF       = 0x4000
	ipv4FragBits = 0x3fff // MF and the offset
)

// Path is what stands before the BTH: where a packet comes from and goes to.
type Path struct {
	SrcMAC, DstMAC [6]byte
	// Src and Dst are both IPv4 or both IPv6. IPv4 is plain, not mapped to IPv6;
	// zones are ignored.
	Src, Dst netip.Addr
	// SrcPort is the UDP source port, by which switches spread flows. The
	// destination port is always UDPPort.
	SrcPort   uint16
	TClass    uint8  // IPv6 traffic class or IPv4 TOS, ECN in the lower two bits
	HopLimit  uint8  // IPv6 hop limit or IPv4 TTL
	FlowLabel uint32 // IPv6 only, 20 bits
}

// HdrLen gives the length in bytes of Ethernet, IP and UDP header: 42 for IPv4, 62
// for IPv6.
func (p *Path) HdrLen() int {
	if p.Dst.Is4() {
		return EthLen + IPv4Len + UDPLen
	}
	return EthLen + IPv6Len + UDPLen
}

// Put writes Ethernet, IP and UDP header to b for rocelen bytes behind them (BTH to
// ICRC) and gives their length. IPv4 has DF set and a right checksum, and ipid as
// its identification, which the ICRC covers; IPv6 has no such field. The UDP
// checksum is 0, over IPv6 too: the ICRC does its work (IBA A17, RFC 6936).
func (p *Path) Put(b []byte, rocelen int, ipid uint16) int {
	copy(b[0:6], p.DstMAC[:])
	copy(b[6:12], p.SrcMAC[:])
	n := p.HdrLen()
	if n == EthLen+IPv4Len+UDPLen {
		be.PutUint16(b[12:], etherIPv4)
		p.putIPv4(b[EthLen:], IPv4Len+UDPLen+rocelen, ipid)
	} else {
		be.PutUint16(b[12:], etherIPv6)
		p.putIPv6(b[EthLen:], UDPLen+rocelen)
	}
	u := b[n-UDPLen : n]
	be.PutUint16(u, p.SrcPort)
	be.PutUint16(u[2:], UDPPort)
	be.PutUint16(u[4:], uint16(UDPLen+rocelen))
	be.PutUint16(u[6:], 0)
	return n
}

func (p *Path) putIPv4(h []byte, total int, ipid uint16) {
	_ = h[IPv4Len-1]
	h[0] = 0x45
	h[1] = p.TClass
	be.PutUint16(h[2:], uint16(total))
	be.PutUint16(h[4:], ipid)
	be.PutUint16(h[6:], ipv4DF)
	h[8] = p.HopLimit
	h[9] = protoUDP
	be.PutUint16(h[10:], 0)
	src, dst := p.Src.As4(), p.Dst.As4()
	copy(h[12:16], src[:])
	copy(h[16:20], dst[:])
	be.PutUint16(h[10:], ^fold(sum16(0, h[:IPv4Len])))
}

func (p *Path) putIPv6(h []byte, payload int) {
	_ = h[IPv6Len-1]
	be.PutUint32(h, 6<<28|uint32(p.TClass)<<20|p.FlowLabel&0xfffff)
	be.PutUint16(h[4:], uint16(payload))
	h[6] = protoUDP
	h[7] = p.HopLimit
	src, dst := p.Src.As16(), p.Dst.As16()
	copy(h[8:24], src[:])
	copy(h[24:40], dst[:])
}

// PadLen gives the bytes of pad, 0 to 3, behind a payload of n bytes (IBA 9.2.4).
func PadLen(n int) int { return -n & 3 }

// FrameLen gives the length of the whole frame, Ethernet to ICRC, of a packet with
// opcode op and n bytes of payload over this path.
func (p *Path) FrameLen(op Opcode, n int) int {
	return p.HdrLen() + op.Info().HdrLen + n + PadLen(n) + ICRCLen
}

// Encode writes a whole frame to dst and gives its length: path, BTH, extended
// headers as they are, payload, pad of zeroes and ICRC. bth.Pad is not used: it
// follows from the payload. dst must not overlap ext or payload and is at least
// path.HdrLen()+BTHLen+len(ext)+len(payload)+3+ICRCLen bytes long. It is for
// control packets and tests; hot paths use the parts and place payload once.
func Encode(dst []byte, path *Path, ipid uint16, bth *BTH, ext []byte, payload []byte) int {
	pad := PadLen(len(payload))
	n := path.Put(dst, BTHLen+len(ext)+len(payload)+pad+ICRCLen, ipid)
	h := *bth
	h.Pad = uint8(pad)
	h.Put(dst[n:])
	n += BTHLen
	n += copy(dst[n:n+len(ext)], ext)
	n += copy(dst[n:n+len(payload)], payload)
	clear(dst[n : n+pad])
	n += pad + ICRCLen
	Seal(dst[:n], EthLen)
	return n
}

// sum16 adds the 16-bit big-endian words of b to sum, an odd byte at the end as the
// upper half of a word (RFC 1071).
func sum16(sum uint64, b []byte) uint64 {
	for len(b) >= 4 {
		sum += uint64(be.Uint32(b))
		b = b[4:]
	}
	if len(b) >= 2 {
		sum += uint64(be.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		sum += uint64(b[0]) << 8
	}
	return sum
}

// fold brings a sum down to 16 bits with end-around carry.
func fold(sum uint64) uint16 {
	sum = sum>>32 + sum&0xffffffff
	sum = sum>>32 + sum&0xffffffff
	sum = sum>>16 + sum&0xffff
	sum = sum>>16 + sum&0xffff
	sum = sum>>16 + sum&0xffff
	return uint16(sum)
}
