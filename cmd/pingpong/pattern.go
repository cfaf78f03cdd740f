// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"math/rand/v2"
)

// patternSteps is how many different messages of one size a pattern holds.
// Prime, so that no power-of-two slot layout repeats along with it.
const patternSteps = 16381

// patternStride is how many bytes apart two messages begin in the pattern.
const patternStride = 64

// pattern is the data that every message is cut from: pseudo-random bytes that
// follow from the seed alone, so that both ends make the same ones. Message i is
// a window whose place depends on i, so a byte depends on seed, message number
// and offset, and sending or verifying a message costs no making of bytes.
type pattern struct {
	b []byte
}

// patternLen gives the bytes that a pattern for messages of up to size bytes needs.
func patternLen(size int) int { return patternSteps*patternStride + size }

// newPattern fills b, of patternLen(largest message) bytes, for a seed.
func newPattern(b []byte, seed uint64) pattern {
	var key [32]byte
	for i := range 8 {
		key[i] = byte(seed >> (8 * i))
	}
	// Read of ChaCha8 never fails.
	_, _ = rand.NewChaCha8(key).Read(b)
	return pattern{b}
}

// offset says where in the pattern message i begins.
func (p pattern) offset(i uint64) int { return int(i%patternSteps) * patternStride }

// message gives the size bytes of message i.
func (p pattern) message(i uint64, size int) []byte {
	o := p.offset(i)
	return p.b[o : o+size]
}

// check says whether b holds message i, and if not, at which offset it begins to
// differ.
//
// A page may have to come back first. Until it is there the goroutine keeps its scheduler
// slot, perhaps the only one, and what compares bytes fast cannot be interrupted: so each
// page is looked at by ordinary code, which can, and the rest of it then.
func (p pattern) check(i uint64, b []byte) (at int, ok bool) {
	want := p.message(i, len(b))
	same := true
	for o := 0; o < len(b) && same; o += pageSize {
		end := min(o+pageSize, len(b))
		// Memory need not begin with a page: the last byte may be another's.
		same = b[o] == want[o] && b[end-1] == want[end-1] && bytes.Equal(b[o:end], want[o:end])
	}
	if same {
		return 0, true
	}
	for at = range b {
		if b[at] != want[at] {
			break
		}
	}
	return at, false
}

// word gives the 64-bit operand of atomic operation i.
func (p pattern) word(i uint64) uint64 {
	w := uint64(0)
	for _, c := range p.message(i, 8) {
		w = w<<8 | uint64(c)
	}
	return w
}
