// SPDX-License-Identifier: Apache-2.0

package wire

import "encoding/binary"

var be = binary.BigEndian

func putUint24(b []byte, v uint32) {
	_ = b[2]
	b[0], b[1], b[2] = byte(v>>16), byte(v>>8), byte(v)
}

func uint24(b []byte) uint32 {
	_ = b[2]
	return uint32(b[0])<<16 | uint32(b[1])<<8 | uint32(b[2])
}

// BTH is the base transport header, the first of every packet (IBA 9.2).
type BTH struct {
	Op         Opcode
	SE         bool   // solicited event (9.2.2)
	MigReq     bool   // migration state (9.2.3); set by a peer that knows no migration
	Pad        uint8  // bytes of pad behind the payload, 0..3 (9.2.4)
	TVer       uint8  // transport header version, 0 (9.2.5)
	PKey       uint16 // partition key (9.2.6)
	FECN, BECN bool   // congestion, forward and backward; not covered by the ICRC
	Resv6      uint8  // 6 reserved bits beside them, not covered either
	DestQP     QPN
	AckReq     bool  // the responder is to acknowledge
	Resv7      uint8 // 7 reserved bits beside it
	PSN        PSN
}

// Put writes the header's 12 bytes to b.
func (h *BTH) Put(b []byte) {
	_ = b[BTHLen-1]
	b[0] = byte(h.Op)
	f := h.Pad&3<<4 | h.TVer&0xf
	if h.SE {
		f |= 0x80
	}
	if h.MigReq {
		f |= 0x40
	}
	b[1] = f
	be.PutUint16(b[2:], h.PKey)
	// One write for each byte-aligned word: the upper byte holds the flags.
	w := uint32(h.Resv6&0x3f)<<24 | uint32(h.DestQP)&QPNMask
	if h.FECN {
		w |= 1 << 31
	}
	if h.BECN {
		w |= 1 << 30
	}
	be.PutUint32(b[4:], w)
	w = uint32(h.Resv7&0x7f)<<24 | uint32(h.PSN)&PSNMask
	if h.AckReq {
		w |= 1 << 31
	}
	be.PutUint32(b[8:], w)
}

// ParseBTH decodes the 12 bytes at the start of b.
func ParseBTH(b []byte) BTH {
	_ = b[BTHLen-1]
	q, s := be.Uint32(b[4:]), be.Uint32(b[8:])
	return BTH{
		Op:     Opcode(b[0]),
		SE:     b[1]&0x80 != 0,
		MigReq: b[1]&0x40 != 0,
		Pad:    b[1] >> 4 & 3,
		TVer:   b[1] & 0xf,
		PKey:   be.Uint16(b[2:]),
		FECN:   q&(1<<31) != 0,
		BECN:   q&(1<<30) != 0,
		Resv6:  uint8(q >> 24 & 0x3f),
		DestQP: QPN(q & QPNMask),
		AckReq: s&(1<<31) != 0,
		Resv7:  uint8(s >> 24 & 0x7f),
		PSN:    PSN(s & PSNMask),
	}
}

// RETH says where an RDMA operation goes (IBA 9.3.3).
type RETH struct {
	VA   uint64 // start, as an iova of the region
	RKey uint32
	Len  uint32 // bytes of the whole message, 0 to 2^31
}

// Put writes the header's 16 bytes to b.
func (h RETH) Put(b []byte) {
	_ = b[RETHLen-1]
	be.PutUint64(b, h.VA)
	be.PutUint32(b[8:], h.RKey)
	be.PutUint32(b[12:], h.Len)
}

// ParseRETH decodes the 16 bytes at the start of b.
func ParseRETH(b []byte) RETH {
	_ = b[RETHLen-1]
	return RETH{be.Uint64(b), be.Uint32(b[8:]), be.Uint32(b[12:])}
}

// AtomicETH is the request of a compare-and-swap or fetch-and-add (IBA 9.3.4).
// All values are as numbers; which bytes they are in memory is the responder's
// order of bytes.
type AtomicETH struct {
	VA      uint64 // multiple of 8
	RKey    uint32
	SwapAdd uint64 // what to store, or what to add
	Compare uint64 // what to compare with; not used by fetch-and-add
}

// Put writes the header's 28 bytes to b.
func (h AtomicETH) Put(b []byte) {
	_ = b[AtomicETHLen-1]
	be.PutUint64(b, h.VA)
	be.PutUint32(b[8:], h.RKey)
	be.PutUint64(b[12:], h.SwapAdd)
	be.PutUint64(b[20:], h.Compare)
}

// ParseAtomicETH decodes the 28 bytes at the start of b.
func ParseAtomicETH(b []byte) AtomicETH {
	_ = b[AtomicETHLen-1]
	return AtomicETH{be.Uint64(b), be.Uint32(b[8:]), be.Uint64(b[12:]), be.Uint64(b[20:])}
}

// AtomicAckETH carries an atomic's answer (IBA 9.3).
type AtomicAckETH struct {
	Orig uint64 // what the memory held before
}

// Put writes the header's 8 bytes to b.
func (h AtomicAckETH) Put(b []byte) { be.PutUint64(b, h.Orig) }

// ParseAtomicAckETH decodes the 8 bytes at the start of b.
func ParseAtomicAckETH(b []byte) AtomicAckETH { return AtomicAckETH{be.Uint64(b)} }

// ImmDt is immediate data: the four bytes on the wire, read as a big-endian number
// (IBA 9.3). Verbs hand the bytes on unchanged, as a __be32.
type ImmDt uint32

// Put writes the four bytes to b.
func (h ImmDt) Put(b []byte) { be.PutUint32(b, uint32(h)) }

// ParseImmDt decodes the four bytes at the start of b.
func ParseImmDt(b []byte) ImmDt { return ImmDt(be.Uint32(b)) }

// IETH is the rkey that a SEND with invalidate invalidates (IBA 9.3).
type IETH uint32

// Put writes the four bytes to b.
func (h IETH) Put(b []byte) { be.PutUint32(b, uint32(h)) }

// ParseIETH decodes the four bytes at the start of b.
func ParseIETH(b []byte) IETH { return IETH(be.Uint32(b)) }

// DETH is the datagram header of UD (IBA 9.3.2).
type DETH struct {
	QKey  uint32
	SrcQP QPN
	Resv  uint8 // reserved byte before SrcQP
}

// Put writes the header's 8 bytes to b.
func (h DETH) Put(b []byte) {
	_ = b[DETHLen-1]
	be.PutUint32(b, h.QKey)
	b[4] = h.Resv
	putUint24(b[5:], uint32(h.SrcQP))
}

// ParseDETH decodes the 8 bytes at the start of b.
func ParseDETH(b []byte) DETH {
	_ = b[DETHLen-1]
	return DETH{be.Uint32(b), QPN(uint24(b[5:])), b[4]}
}

// XRCETH names the shared receive queue that an XRC request is for (IBA A14).
type XRCETH struct {
	SRQ  uint32 // 24 bits
	Resv uint8  // reserved byte before it
}

// Put writes the four bytes to b.
func (h XRCETH) Put(b []byte) {
	_ = b[XRCETHLen-1]
	b[0] = h.Resv
	putUint24(b[1:], h.SRQ)
}

// ParseXRCETH decodes the four bytes at the start of b.
func ParseXRCETH(b []byte) XRCETH {
	_ = b[XRCETHLen-1]
	return XRCETH{uint24(b[1:]), b[0]}
}

// Placement types of a FLUSH, a set of bits (IBA A19).
const (
	FlushGlobal     = 1 << 0 // make visible to every other reader
	FlushPersistent = 1 << 1 // make survive a loss of power
)

// Selectivity levels of a FLUSH (IBA A19).
const (
	FlushRange = 0 // the range that the RETH names
	FlushMR    = 1 // the whole memory region of the RETH's rkey
)

// FETH says what a FLUSH is to do (IBA A19).
type FETH struct {
	Placement   uint8  // 4 bits: FlushGlobal, FlushPersistent
	Selectivity uint8  // 2 bits: FlushRange or FlushMR
	Resv        uint32 // 26 reserved bits above them
}

// Put writes the four bytes to b.
func (h FETH) Put(b []byte) {
	be.PutUint32(b, h.Resv<<6|uint32(h.Selectivity&3)<<4|uint32(h.Placement&0xf))
}

// ParseFETH decodes the four bytes at the start of b.
func ParseFETH(b []byte) FETH {
	w := be.Uint32(b)
	return FETH{uint8(w & 0xf), uint8(w >> 4 & 3), w >> 6}
}
