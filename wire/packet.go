// SPDX-License-Identifier: Apache-2.0

package wire

import "net/netip"

// Packet is a parsed packet, a view into the buffer that Parse was given: nothing
// is copied, and it is good only as long as the buffer is. Offsets are in bytes
// from the start of Frame.
type Packet struct {
	Frame   []byte // from the Ethernet header to the ICRC's end, padding cut off
	L3      int    // IP header
	L4      int    // UDP header
	BTHOff  int
	V6      bool
	BTH     BTH
	Info    *OpInfo // the opcode's row; never nil after Parse gave nil
	Payload []byte  // without headers, pad and ICRC
	TClass  uint8   // IPv4 TOS or IPv6 traffic class; ECN is TClass&3
	TTL     uint8   // or IPv6 hop limit

	// The ICRC's register behind the UDP header, if it is known: that of packets of a
	// super-frame is.
	crc    uint32
	hasCRC bool
}

// Parse takes frame, an untagged Ethernet frame, apart. The package's documentation
// says what it checks and what it leaves to others. On an error, which is always
// an Error, the contents of p are not to be used.
func Parse(frame []byte, p *Packet) error {
	if len(frame) < EthLen {
		return ErrTruncated
	}
	var l4, end int
	var err error
	switch be.Uint16(frame[12:]) {
	case etherIPv4:
		l4, end, err = parseIPv4(frame, p)
	case etherIPv6:
		l4, end, err = parseIPv6(frame, p)
	default:
		return ErrNotRoCE
	}
	if err != nil {
		return err
	}
	if len(frame) < l4+UDPLen {
		return ErrTruncated
	}
	if be.Uint16(frame[l4+2:]) != UDPPort {
		return ErrNotRoCE
	}
	// From here on the packet is meant for us, and what is wrong is an error.
	if !p.V6 {
		if l4 != EthLen+IPv4Len {
			return ErrMalformed // options: the ICRC of IBA A17 knows none
		}
		if fold(sum16(0, frame[EthLen:EthLen+IPv4Len])) != 0xffff {
			return ErrChecksum
		}
	}
	if end < l4+UDPLen || int(be.Uint16(frame[l4+4:])) != end-l4 {
		return ErrMalformed
	}
	if len(frame) < end {
		return ErrTruncated
	}
	f := frame[:end:end]
	if f[l4+6]|f[l4+7] != 0 && !udpChecksumOK(f, p.V6, l4) {
		return ErrChecksum
	}

	p.L3, p.L4, p.hasCRC = EthLen, l4, false
	return p.parseTransport(f)
}

// parseTransport is the part of Parse behind the UDP header of f, which ends with the ICRC.
func (p *Packet) parseTransport(f []byte) error {
	off, end := p.L4+UDPLen, len(f)
	if end < off+BTHLen+ICRCLen {
		return ErrTruncated
	}
	p.BTH = ParseBTH(f[off:])
	if p.BTH.TVer != 0 {
		return ErrVersion
	}
	info := p.BTH.Op.Info()
	if info.Mask&Valid == 0 {
		return ErrOpcode
	}
	body, tail := off+info.HdrLen, end-ICRCLen-int(p.BTH.Pad)
	if tail < body {
		return ErrTruncated
	}
	if (end-off)&3 != 0 {
		return ErrMalformed // IBA 9.2.4: pad fills up to a multiple of 4
	}
	p.Frame, p.BTHOff = f, off
	p.Info = info
	p.Payload = f[body:tail:tail]
	return nil
}

// parseIPv4 gives the offsets of the UDP header and of the datagram's end. It
// only finds out whose packet it is; checks of a packet that is ours follow later.
func parseIPv4(frame []byte, p *Packet) (l4, end int, err error) {
	if len(frame) < EthLen+IPv4Len {
		return 0, 0, ErrTruncated
	}
	h := frame[EthLen : EthLen+IPv4Len]
	ihl := int(h[0]&0xf) * 4
	if h[0]>>4 != 4 || ihl < IPv4Len {
		return 0, 0, ErrMalformed
	}
	if h[9] != protoUDP {
		return 0, 0, ErrNotRoCE
	}
	if be.Uint16(h[6:])&ipv4FragBits != 0 {
		return 0, 0, ErrFragment // any but the first has no ports to go by
	}
	p.V6, p.TClass, p.TTL = false, h[1], h[8]
	return EthLen + ihl, EthLen + int(be.Uint16(h[2:])), nil
}

// parseIPv6 does the same for IPv6.
func parseIPv6(frame []byte, p *Packet) (l4, end int, err error) {
	if len(frame) < EthLen+IPv6Len {
		return 0, 0, ErrTruncated
	}
	h := frame[EthLen : EthLen+IPv6Len]
	if h[0]>>4 != 6 {
		return 0, 0, ErrMalformed
	}
	if h[6] != protoUDP {
		if h[6] == protoFrag && len(frame) > EthLen+IPv6Len && frame[EthLen+IPv6Len] == protoUDP {
			return 0, 0, ErrFragment
		}
		return 0, 0, ErrNotRoCE
	}
	p.V6, p.TClass, p.TTL = true, h[0]<<4|h[1]>>4, h[7]
	return EthLen + IPv6Len, EthLen + IPv6Len + int(be.Uint16(h[4:])), nil
}

// udpChecksumOK verifies the checksum over pseudo header and datagram (RFC 768,
// RFC 8200 8.1). f ends with the datagram.
func udpChecksumOK(f []byte, v6 bool, l4 int) bool {
	addrs := f[EthLen+12 : EthLen+20]
	if v6 {
		addrs = f[EthLen+8 : EthLen+40]
	}
	sum := uint64(protoUDP) + uint64(len(f)-l4)
	return fold(sum16(sum16(sum, addrs), f[l4:])) == 0xffff
}

// RETH decodes the header; only where Info.Mask has HasRETH, and so on for all below.
func (p *Packet) RETH() RETH { return ParseRETH(p.Frame[p.BTHOff+int(p.Info.RETH):]) }

// AETH decodes the header; needs HasAETH.
func (p *Packet) AETH() AETH { return ParseAETH(p.Frame[p.BTHOff+int(p.Info.AETH):]) }

// AtomicETH decodes the header; needs HasAtomicETH.
func (p *Packet) AtomicETH() AtomicETH {
	return ParseAtomicETH(p.Frame[p.BTHOff+int(p.Info.AtomicETH):])
}

// AtomicAckETH decodes the header; needs HasAtomicAckETH.
func (p *Packet) AtomicAckETH() AtomicAckETH {
	return ParseAtomicAckETH(p.Frame[p.BTHOff+int(p.Info.AtomicAckETH):])
}

// Imm gives the immediate data, its wire bytes read as big-endian; needs HasImm.
func (p *Packet) Imm() uint32 { return be.Uint32(p.Frame[p.BTHOff+int(p.Info.ImmDt):]) }

// InvKey gives the rkey to invalidate; needs HasIETH.
func (p *Packet) InvKey() uint32 { return be.Uint32(p.Frame[p.BTHOff+int(p.Info.IETH):]) }

// DETH decodes the header; needs HasDETH.
func (p *Packet) DETH() DETH { return ParseDETH(p.Frame[p.BTHOff+int(p.Info.DETH):]) }

// FETH decodes the header; needs HasFETH.
func (p *Packet) FETH() FETH { return ParseFETH(p.Frame[p.BTHOff+int(p.Info.FETH):]) }

// XRCETH decodes the header; needs HasXRCETH.
func (p *Packet) XRCETH() XRCETH { return ParseXRCETH(p.Frame[p.BTHOff+int(p.Info.XRCETH):]) }

// Ext gives the bytes of all extended headers, between BTH and payload.
func (p *Packet) Ext() []byte {
	a, b := p.BTHOff+BTHLen, p.BTHOff+p.Info.HdrLen
	return p.Frame[a:b:b]
}

// Src gives the IP source address, IPv4 unmapped.
func (p *Packet) Src() netip.Addr {
	if p.V6 {
		return netip.AddrFrom16([16]byte(p.Frame[p.L3+8:]))
	}
	return netip.AddrFrom4([4]byte(p.Frame[p.L3+12:]))
}

// Dst gives the IP destination address, IPv4 unmapped.
func (p *Packet) Dst() netip.Addr {
	if p.V6 {
		return netip.AddrFrom16([16]byte(p.Frame[p.L3+24:]))
	}
	return netip.AddrFrom4([4]byte(p.Frame[p.L3+16:]))
}

// SrcMAC gives the Ethernet source address.
func (p *Packet) SrcMAC() [6]byte { return [6]byte(p.Frame[6:]) }

// DstMAC gives the Ethernet destination address.
func (p *Packet) DstMAC() [6]byte { return [6]byte(p.Frame) }

// SrcPort gives the UDP source port.
func (p *Packet) SrcPort() uint16 { return be.Uint16(p.Frame[p.L4:]) }

// FlowLabel gives the 20 bits of the IPv6 flow label, 0 for IPv4.
func (p *Packet) FlowLabel() uint32 {
	if !p.V6 {
		return 0
	}
	return be.Uint32(p.Frame[p.L3:]) & 0xfffff
}

// IPID gives the IPv4 identification, 0 for IPv6.
func (p *Packet) IPID() uint16 {
	if p.V6 {
		return 0
	}
	return be.Uint16(p.Frame[p.L3+4:])
}

// Path gives the path that the packet took, as its sender saw it.
func (p *Packet) Path() Path {
	return Path{
		SrcMAC: p.SrcMAC(), DstMAC: p.DstMAC(),
		Src: p.Src(), Dst: p.Dst(),
		SrcPort: p.SrcPort(), TClass: p.TClass, HopLimit: p.TTL, FlowLabel: p.FlowLabel(),
	}
}

// GRH writes the 40 bytes that a UD receive buffer begins with to b: the IPv6
// header, or 20 bytes of zero and the IPv4 header (IBA A17; what the kernel's
// soft-RoCE and struct ibv_grh's users expect).
func (p *Packet) GRH(b []byte) {
	b = b[:GRHLen]
	if p.V6 {
		copy(b, p.Frame[p.L3:p.L3+IPv6Len])
		return
	}
	clear(b[:GRHLen-IPv4Len])
	copy(b[GRHLen-IPv4Len:], p.Frame[p.L3:p.L3+IPv4Len])
}
