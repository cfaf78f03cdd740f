// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"hash/crc32"
)

var le = binary.LittleEndian

// The ICRC (IBA 7.8.1, A17) is the CRC-32 of Ethernet over eight bytes of ones
// (where InfiniBand has its local route header), then everything from the IP header
// to the pad, with ones in place of what routers may change: IPv4 TOS, TTL and
// checksum, IPv6 traffic class, flow label and hop limit, the UDP checksum and the
// BTH's byte with FECN and BECN. It goes to the wire least significant byte first.

// icrcSeed is the CRC after those eight bytes of ones.
const icrcSeed = 0x2144df1c

// icrcTable serves eight bytes at a step for the masked headers. hash/crc32 takes
// a slice, so masking would mean copying the headers to a buffer which then escapes
// to the heap. Here the masks are applied in registers; the rest of the packet,
// where nothing is masked, goes to hash/crc32 and its vector instructions.
// Written once, here.
var icrcTable = buildICRCTable()

func buildICRCTable() (t [8][256]uint32) {
	t[0] = *crc32.IEEETable
	for i := range t[0] {
		c := t[0][i]
		for j := 1; j < 8; j++ {
			c = t[0][byte(c)] ^ c>>8
			t[j][i] = c
		}
	}
	return t
}

// crcStep takes the CRC, inverted as the register holds it, over the eight bytes
// of w, the lowest first.
func crcStep(crc uint32, w uint64) uint32 {
	t := &icrcTable
	w ^= uint64(crc)
	return t[7][byte(w)] ^ t[6][byte(w>>8)] ^ t[5][byte(w>>16)] ^ t[4][byte(w>>24)] ^
		t[3][byte(w>>32)] ^ t[2][byte(w>>40)] ^ t[1][byte(w>>48)] ^ t[0][w>>56]
}

// crcHalfStep is crcStep for four bytes.
func crcHalfStep(crc, w uint32) uint32 {
	t := &icrcTable
	w ^= crc
	return t[3][byte(w)] ^ t[2][byte(w>>8)] ^ t[1][byte(w>>16)] ^ t[0][w>>24]
}

// What is masked, as it stands in little-endian words of eight bytes.
const (
	mask4W0 = 0xff << 8                     // TOS
	mask4W1 = 0xff | 0xffff<<16             // TTL, header checksum
	mask4W3 = 0xffff << 16                  // UDP checksum, in the half word at its length
	mask6W0 = 0x0f | 0xffffff<<8 | 0xff<<56 // traffic class, flow label, hop limit
	mask6W5 = 0xffff << 48                  // UDP checksum
	maskBTH = 0xff                          // BTH byte 4, in the word that begins there
)

// ICRC computes the invariant CRC of a packet (IBA 7.8.1, A17). frame ends with the
// four bytes of the ICRC, which are not looked at; l3 is the offset of the IP
// header, 14 in an untagged Ethernet frame. The IP header says which version it is
// and has no options. The frame must hold IP, UDP, BTH and ICRC, or ICRC panics.
func ICRC(frame []byte, l3 int) uint32 {
	l4 := l3 + IPv4Len
	if frame[l3]>>4 != 4 {
		l4 = l3 + IPv6Len
	}
	return icrcBehind(icrcHeaders(frame[l3:l4+UDPLen]), frame, l4+UDPLen)
}

// icrcHeaders is the register, as crcStep holds it, behind the IP and UDP headers h.
func icrcHeaders(h []byte) uint32 {
	crc := ^uint32(icrcSeed)
	if h[0]>>4 == 4 {
		h = h[:IPv4Len+UDPLen]
		crc = crcStep(crc, le.Uint64(h)|mask4W0)
		crc = crcStep(crc, le.Uint64(h[8:])|mask4W1)
		crc = crcStep(crc, le.Uint64(h[16:]))
		return crcHalfStep(crc, le.Uint32(h[24:])|mask4W3)
	}
	h = h[:IPv6Len+UDPLen]
	crc = crcStep(crc, le.Uint64(h)|mask6W0)
	crc = crcStep(crc, le.Uint64(h[8:]))
	crc = crcStep(crc, le.Uint64(h[16:]))
	crc = crcStep(crc, le.Uint64(h[24:]))
	crc = crcStep(crc, le.Uint64(h[32:]))
	return crcStep(crc, le.Uint64(h[40:])|mask6W5)
}

// icrcBehind is the ICRC of a frame whose BTH is at bth and whose headers gave crc.
func icrcBehind(crc uint32, frame []byte, bth int) uint32 {
	b := frame[bth : len(frame)-ICRCLen]
	crc = crcHalfStep(crc, le.Uint32(b))
	crc = crcStep(crc, le.Uint64(b[4:BTHLen])|maskBTH)
	return crc32.Update(^crc, crc32.IEEETable, b[BTHLen:])
}

// icrcID is what the identification of IPv4 adds to the register that icrcHeaders gives for
// an identification of 0, by its two bytes: a CRC is linear.
var icrcID = buildICRCID()

func buildICRCID() (t [2][256]uint32) {
	for k := range t {
		for v := range t[k] {
			var h [IPv4Len + UDPLen]byte
			h[4+k] = byte(v)
			c := uint32(0)
			for _, b := range h {
				c = icrcTable[0][byte(c)^b] ^ c>>8
			}
			t[k][v] = c
		}
	}
	return t
}

// Seal computes the ICRC and writes it to the last four bytes of frame. Everything
// before must be in place; later changes are allowed only to what the ICRC does
// not cover. frame and l3 are as for ICRC.
func Seal(frame []byte, l3 int) {
	le.PutUint32(frame[len(frame)-ICRCLen:], ICRC(frame, l3))
}

// ICRCValid says whether the packet's ICRC is right. A packet with a wrong one is
// dropped without a word (IBA 9.6.1.1).
func (p *Packet) ICRCValid() bool {
	want := le.Uint32(p.Frame[len(p.Frame)-ICRCLen:])
	if p.hasCRC {
		return want == icrcBehind(p.crc, p.Frame, p.BTHOff)
	}
	return want == ICRC(p.Frame, p.L3)
}
