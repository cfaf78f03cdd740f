// SPDX-License-Identifier: Apache-2.0

package wire

// AETH is the acknowledge header (IBA 9.3.5).
type AETH struct {
	Syndrome uint8  // what is said: Kind and Value take it apart
	MSN      uint32 // message sequence number, 24 bits: messages completed so far (9.7.7.1)
}

// Put writes the header's four bytes to b.
func (a AETH) Put(b []byte) { be.PutUint32(b, uint32(a.Syndrome)<<24|a.MSN&0xffffff) }

// ParseAETH decodes the four bytes at the start of b.
func ParseAETH(b []byte) AETH {
	w := be.Uint32(b)
	return AETH{uint8(w >> 24), w & 0xffffff}
}

// NAK codes (IBA 9.7.5).
const (
	NakPSNSeq            = 0
	NakInvalidRequest    = 1
	NakRemoteAccess      = 2
	NakRemoteOperational = 3
	NakInvalidRD         = 4
)

// NoCredits is the credit code of an ACK that says nothing about credits
// (IBA 9.7.7.2): what a responder sends whose QP uses an SRQ.
const NoCredits = 31

// AckKind is what a syndrome says, its upper three bits (IBA 9.7.5.1).
type AckKind uint8

// The kinds of syndromes.
const (
	AckOK       AckKind = iota // ACK; the value is the credit code
	AckRNR                     // RNR NAK; the value is the timer code
	AckReserved                // 010ttttt, or the reserved top bit is set
	AckNak                     // NAK; the value is the NAK code
)

// String names the kind.
func (k AckKind) String() string {
	switch k {
	case AckOK:
		return "ACK"
	case AckRNR:
		return "RNR_NAK"
	case AckNak:
		return "NAK"
	}
	return "RESERVED"
}

// AckSyndrome gives the syndrome of an ACK with a 5-bit credit code, NoCredits if
// it is to say nothing about credits.
func AckSyndrome(credits uint8) uint8 { return credits & 0x1f }

// RNRSyndrome gives the syndrome of an RNR NAK with a 5-bit timer code.
func RNRSyndrome(timer uint8) uint8 { return 0x20 | timer&0x1f }

// NakSyndrome gives the syndrome of a NAK with a NAK code.
func NakSyndrome(code uint8) uint8 { return 0x60 | code&0x1f }

// Kind says what sort of acknowledge this is.
func (a AETH) Kind() AckKind {
	if a.Syndrome&0x80 != 0 {
		return AckReserved
	}
	return AckKind(a.Syndrome >> 5)
}

// Value gives the syndrome's lower five bits: credit code, timer code or NAK code.
func (a AETH) Value() uint8 { return a.Syndrome & 0x1f }

// RNRDelay gives the time, in nanoseconds, that a requester waits at least after
// an RNR NAK with this timer code (IBA 9.7.5.2.8, table 45). Only the lower five
// bits count. Code 0 is the longest, 655.36 ms.
func RNRDelay(code uint8) int64 {
	const unit = 10_000 // 0.01 ms
	// Behind 0.03 ms two sequences alternate, 4·2^k and 6·2^k units.
	c := code & 0x1f
	switch {
	case c == 0:
		return 65536 * unit
	case c < 4:
		return int64(c) * unit
	}
	return (4 + 2*int64(c&1)) << ((c - 4) / 2) * unit
}

// RNRCode gives the timer code of the shortest delay that is at least ns
// nanoseconds long; 0, the longest, for all that no other code reaches.
func RNRCode(ns int64) uint8 {
	for c := uint8(1); c < 32; c++ {
		if RNRDelay(c) >= ns {
			return c
		}
	}
	return 0
}

// AckTimeout gives a QP's local ACK timeout in nanoseconds for its 5-bit code:
// 4.096 µs · 2^code, and 0, which stands for no timeout, for code 0
// (IBA 9.7.6.1.3).
func AckTimeout(code uint8) int64 {
	if code &= 0x1f; code == 0 {
		return 0
	}
	return 4096 << code
}

// CreditCount gives the receive WQEs that a 5-bit credit code of an ACK stands
// for, -1 for NoCredits (IBA 9.7.7.2): 0, 1, 2, 3, 4, 6, 8, 12, … 32768.
func CreditCount(code uint8) int {
	c := code & 0x1f
	switch {
	case c == NoCredits:
		return -1
	case c < 2:
		return int(c)
	}
	return (2 + int(c&1)) << ((c - 2) / 2)
}

// CreditCode gives the code of the largest count that is not above n, for
// n receive WQEs at hand.
func CreditCode(n int) uint8 {
	for c := uint8(NoCredits - 1); c > 0; c-- {
		if CreditCount(c) <= n {
			return c
		}
	}
	return 0
}
