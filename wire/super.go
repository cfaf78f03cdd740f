// SPDX-License-Identifier: Apache-2.0

package wire

import "net/netip"

// A super-frame is a run of packets of one flow behind one Ethernet, IP and UDP header:
// all of them have the same length but the last, which may be shorter. The kernel calls it
// UDP segmentation offload, and takes it apart where somebody wants single frames: packet i
// then has the identification of the first plus i (inet_gso_segment), its own lengths and
// checksums. The ICRC covers identification and lengths, so it must have been computed
// for those.

// MaxSuper is the longest super-frame in bytes, from the Ethernet header on: its IP
// datagram has a length of 16 bits.
const MaxSuper = EthLen + 65535

const (
	// minSegment is the shortest packet in bytes from the BTH on.
	minSegment = BTHLen + ICRCLen
	// minUDP is the shortest that packets of anything else may be, so that there are not too many.
	minUDP = 8
)

// PutSingle makes headers, as Path.Put or PutSuper made them, those of one packet of n bytes
// from the BTH to the ICRC, with the identification id if they are of IPv4.
func PutSingle(hdr []byte, n int, id uint16) {
	l4 := len(hdr) - UDPLen
	if l4 == EthLen+IPv4Len {
		ip := hdr[EthLen:l4]
		be.PutUint16(ip[2:], uint16(IPv4Len+UDPLen+n))
		be.PutUint16(ip[4:], id)
		be.PutUint16(ip[10:], 0)
		be.PutUint16(ip[10:], ^fold(sum16(0, ip)))
	} else {
		be.PutUint16(hdr[EthLen+4:], uint16(UDPLen+n))
	}
	be.PutUint16(hdr[l4+4:], uint16(UDPLen+n))
	be.PutUint16(hdr[l4+6:], 0)
}

// RoCE gives the length in bytes of the headers in front of the BTH if frame is an untagged
// RoCEv2 packet without IP options, 0 otherwise.
func RoCE(frame []byte) int {
	h := udp(frame)
	if h == 0 || be.Uint16(frame[h-UDPLen+2:]) != UDPPort {
		return 0
	}
	return h
}

// udp is the same for any UDP datagram that is not fragmented.
func udp(frame []byte) int {
	switch {
	case len(frame) < EthLen+IPv4Len+UDPLen:
	case be.Uint16(frame[12:]) == etherIPv4 && frame[14] == 0x45 && frame[23] == protoUDP && be.Uint16(frame[20:])&ipv4FragBits == 0:
		return EthLen + IPv4Len + UDPLen
	case be.Uint16(frame[12:]) == etherIPv6 && frame[14]>>4 == 6 && frame[20] == protoUDP && len(frame) >= EthLen+IPv6Len+UDPLen:
		return EthLen + IPv6Len + UDPLen
	}
	return 0
}

// PutSuper writes to dst the headers of a super-frame, of which first is the first packet
// and n the number of bytes from the first's BTH to the last's ICRC. It gives their length,
// RoCE(first), which is at most 62; dst may be first. The UDP checksum holds the sum of the pseudo header
// alone, as tap.Frame wants it.
func PutSuper(dst, first []byte, n int) int {
	h := RoCE(first)
	copy(dst, first[:h])
	l4 := h - UDPLen
	var addrs []byte
	if l4 == EthLen+IPv4Len {
		ip := dst[EthLen:l4]
		be.PutUint16(ip[2:], uint16(IPv4Len+UDPLen+n))
		be.PutUint16(ip[10:], 0)
		be.PutUint16(ip[10:], ^fold(sum16(0, ip)))
		addrs = ip[12:20]
	} else {
		be.PutUint16(dst[EthLen+4:], uint16(UDPLen+n))
		addrs = dst[EthLen+8 : l4]
	}
	be.PutUint16(dst[l4+4:], uint16(UDPLen+n))
	be.PutUint16(dst[l4+6:], fold(sum16(protoUDP+uint64(UDPLen+n), addrs)))
	return h
}

// Super takes a super-frame apart, in place: each packet gets its headers in front of
// it, where the end of the one before was.
type Super struct {
	frame  []byte
	hdr    [EthLen + IPv6Len + UDPLen]byte
	h, at  int // length of hdr; of the frame so far, without the headers
	gso, n int // how long packets are; how long the last one was
	id     uint16
	roce   bool
	sum    uint64 // of the IPv4 header, without identification and checksum
	crc    uint32 // icrcHeaders of hdr, with an identification of 0
}

// Open begins with frame, an untagged one whose packets have size bytes each behind the UDP
// header. It is an Error if that is no super-frame of UDP.
func (s *Super) Open(frame []byte, size int) error {
	h := udp(frame)
	if h == 0 {
		return ErrNotRoCE
	}
	l4, end := h-UDPLen, EthLen+int(be.Uint16(frame[16:]))
	if l4 != EthLen+IPv4Len {
		end = l4 + int(be.Uint16(frame[18:]))
	}
	roce := be.Uint16(frame[l4+2:]) == UDPPort
	switch {
	case size < minUDP || roce && size < minSegment:
		return ErrMalformed
	case end < h || len(frame) < end:
		return ErrTruncated
	}
	s.frame, s.h, s.at, s.gso, s.n, s.roce = frame[:end], h, 0, size, 0, roce
	copy(s.hdr[:], frame[:h])
	be.PutUint16(s.hdr[l4+6:], 0)
	s.id = be.Uint16(frame[18:])
	return nil
}

// RoCE says whether the packets are RoCEv2, so that NextPacket may be called.
func (s *Super) RoCE() bool { return s.roce }

// Dst is the IP destination address of all the packets, IPv4 unmapped.
func (s *Super) Dst() netip.Addr {
	if s.h == EthLen+IPv4Len+UDPLen {
		return netip.AddrFrom4([4]byte(s.hdr[EthLen+16:]))
	}
	return netip.AddrFrom16([16]byte(s.hdr[EthLen+24:]))
}

// Next is the next packet as a frame, nil after the last. It is good until Next is called
// again.
func (s *Super) Next() []byte {
	n := min(len(s.frame)-s.h-s.at, s.gso)
	if n <= 0 {
		return nil
	}
	if n != s.n { // the first, and the last
		s.setLength(n)
	}
	f := s.frame[s.at : s.at+s.h+n : s.at+s.h+n]
	if s.h == EthLen+IPv4Len+UDPLen {
		*(*[EthLen + IPv4Len + UDPLen]byte)(f) = [EthLen + IPv4Len + UDPLen]byte(s.hdr[:])
		be.PutUint16(f[EthLen+4:], s.id)
		be.PutUint16(f[EthLen+10:], ^fold(s.sum+uint64(s.id)))
		s.id++
	} else {
		*(*[EthLen + IPv6Len + UDPLen]byte)(f) = s.hdr
		if l4 := EthLen + IPv6Len; !s.roce {
			// RoCE has its ICRC, and IPv4 can do without; others need it (RFC 8200 8.1).
			sum := ^fold(sum16(sum16(protoUDP+uint64(UDPLen+n), f[EthLen+8:l4]), f[l4:]))
			if sum == 0 {
				sum = 0xffff
			}
			be.PutUint16(f[l4+6:], sum)
		}
	}
	s.at += n
	return f
}

// setLength makes hdr that of a packet of n bytes behind the UDP header.
func (s *Super) setLength(n int) {
	s.n = n
	l4 := s.h - UDPLen
	if l4 == EthLen+IPv4Len {
		ip := s.hdr[EthLen:l4]
		be.PutUint16(ip[2:], uint16(IPv4Len+UDPLen+n))
		be.PutUint16(ip[4:], 0)
		be.PutUint16(ip[10:], 0)
		s.sum = sum16(0, ip)
	} else {
		be.PutUint16(s.hdr[EthLen+4:], uint16(UDPLen+n))
	}
	be.PutUint16(s.hdr[l4+4:], uint16(UDPLen+n))
	s.crc = icrcHeaders(s.hdr[EthLen:s.h])
}

// NextPacket is Parse of what Next gives, for packets of RoCE. Ethernet, IP and UDP headers
// are the same for all of them but for lengths and identification, and need not be looked at
// again. more is false after the last; n is the frame's length in bytes. It is good until it
// is called again.
func (s *Super) NextPacket(p *Packet) (n int, more bool, err error) {
	id := s.id
	f := s.Next()
	if f == nil {
		return 0, false, nil
	}
	p.L3, p.L4 = EthLen, s.h-UDPLen
	p.crc, p.hasCRC = s.crc, true
	if s.h == EthLen+IPv4Len+UDPLen {
		p.V6, p.TClass, p.TTL = false, s.hdr[EthLen+1], s.hdr[EthLen+8]
		p.crc ^= icrcID[0][id>>8] ^ icrcID[1][byte(id)]
	} else {
		p.V6, p.TClass, p.TTL = true, s.hdr[EthLen]<<4|s.hdr[EthLen+1]>>4, s.hdr[EthLen+7]
	}
	return len(f), true, p.parseTransport(f)
}
