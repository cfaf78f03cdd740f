// SPDX-License-Identifier: Apache-2.0

package wire

import "hash/crc32"

// Prefix is the ICRC's state behind the Ethernet, IP and UDP headers of packets that have
// them in common but for the IPv4 identification: packets of one length on one path. A CRC
// is linear, so what the identification adds is looked up.
type Prefix struct {
	crc uint32
	v4  bool
}

// PrefixOf is that of the headers that Path.Put made. Their identification does not count.
func PrefixOf(hdr []byte) Prefix {
	p := Prefix{icrcHeaders(hdr[EthLen:]), hdr[EthLen]>>4 == 4}
	if p.v4 {
		p.crc ^= icrcID[0][hdr[EthLen+4]] ^ icrcID[1][hdr[EthLen+5]]
	}
	return p
}

// Seal writes the ICRC to the last four bytes of a packet, which is whole from the BTH on
// and has the identification id if it is one of IPv4.
func (p Prefix) Seal(packet []byte, id uint16) {
	n := len(packet) - ICRCLen
	p.SealApart(packet[:n:n], nil, packet[n:], id)
}

// SealApart is Seal for a packet in pieces: what comes before the payload, the payload, and
// where the ICRC goes to. There is no pad: the payload's length is a multiple of 4.
func (p Prefix) SealApart(head, payload, icrc []byte, id uint16) {
	crc := p.crc
	if p.v4 {
		crc ^= icrcID[0][id>>8] ^ icrcID[1][byte(id)]
	}
	// FECN and BECN count as ones.
	was := head[4]
	head[4] = 0xff
	crc = crcWords(crc, head)
	head[4] = was
	le.PutUint32(icrc, ^crcWords(crc, payload))
}

// crcWords takes the inverted CRC over bytes whose number is a multiple of 4. hash/crc32 has
// vector instructions for 16 bytes at a time, if there are 64, and goes byte by byte
// for what is left; so what does not fit comes first, here.
func crcWords(crc uint32, b []byte) uint32 {
	few := len(b)
	if few >= 64 {
		few &= 15
	}
	for ; few >= 8; few -= 8 {
		crc = crcStep(crc, le.Uint64(b))
		b = b[8:]
	}
	if few >= 4 {
		crc = crcHalfStep(crc, le.Uint32(b))
		b = b[4:]
	}
	if len(b) >= 64 {
		crc = ^crc32.Update(^crc, crc32.IEEETable, b)
	}
	return crc
}
