// SPDX-License-Identifier: Apache-2.0

package tap

import (
	"encoding/binary"
	"math/bits"
)

// complete fills in a transport checksum that the kernel left to the device: the
// field at start+offset holds the folded sum of the pseudo header, and the sum runs
// from start to the end of the frame (virtio 1.2 section 5.1.6.2). It reports false
// when the field is not inside of the frame.
func complete(b []byte, start, offset int) bool {
	at := start + offset
	if start > len(b) || at+2 > len(b) {
		return false
	}
	sum := ^fold(sum(b[start:]))
	if sum == 0 {
		sum = 0xffff // 0 would say "no checksum" (RFC 768)
	}
	binary.BigEndian.PutUint16(b[at:], sum)
	return true
}

// sum is the ones' complement sum of b in network order (RFC 1071), not folded.
func sum(b []byte) uint64 {
	var s, carry uint64
	for ; len(b) >= 8; b = b[8:] {
		s, carry = bits.Add64(s, binary.BigEndian.Uint64(b), carry)
	}
	var last [8]byte
	copy(last[:], b)
	s, carry = bits.Add64(s, binary.BigEndian.Uint64(last[:]), carry)
	s, carry = bits.Add64(s, 0, carry)
	return s + carry
}

func fold(s uint64) uint16 {
	s = s>>32 + s&0xffffffff
	s = s>>32 + s&0xffffffff
	s = s>>16 + s&0xffff
	s = s>>16 + s&0xffff
	return uint16(s)
}
