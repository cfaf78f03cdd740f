// SPDX-License-Identifier: Apache-2.0

package wire

// Management datagrams (MADs) are datagrams of 256 bytes to queue pair 1 of a port (IBA
// 13.4, 13.5.1.1). Their headers say to which class they belong; who does not know a
// class drops its MADs without a word.

// Lengths in bytes.
const (
	MADLen       = 256
	MADHeaderLen = 24
	rmppLen      = 12
	// VendorDataLen is what a MAD of a vendor's class carries behind its headers (IBA
	// 16.5.1, classes 0x30 to 0x4f: MAD header, RMPP header, a reserved byte, the OUI).
	VendorDataLen = MADLen - vendorDataOff
	vendorOUIOff  = MADHeaderLen + rmppLen + 1
	vendorDataOff = vendorOUIOff + 3
)

// MADVersion is the base version of MADs (IBA 13.4.3).
const MADVersion = 1

// MADMethod is a method (IBA 13.4.5).
type MADMethod uint8

// MADSend is the method that asks for no response.
const MADSend MADMethod = 3

// MADHeader is the header that all MADs begin with (IBA 13.4.3).
type MADHeader struct {
	Class        uint8
	ClassVersion uint8
	Method       MADMethod
	Status       uint16
	TID          uint64 // transaction
	Attr         uint16 // what it is about
	AttrMod      uint32
}

// Put writes the header's 24 bytes to b.
func (h *MADHeader) Put(b []byte) {
	_ = b[MADHeaderLen-1]
	b[0], b[1], b[2], b[3] = MADVersion, h.Class, h.ClassVersion, byte(h.Method)
	be.PutUint16(b[4:], h.Status)
	be.PutUint16(b[6:], 0)
	be.PutUint64(b[8:], h.TID)
	be.PutUint16(b[16:], h.Attr)
	be.PutUint16(b[18:], 0)
	be.PutUint32(b[20:], h.AttrMod)
}

// ParseMAD decodes the header of a MAD; false if b is none: another length or version.
func ParseMAD(b []byte) (h MADHeader, ok bool) {
	if len(b) != MADLen || b[0] != MADVersion {
		return h, false
	}
	return MADHeader{Class: b[1], ClassVersion: b[2], Method: MADMethod(b[3]), Status: be.Uint16(b[4:]),
		TID: be.Uint64(b[8:]), Attr: be.Uint16(b[16:]), AttrMod: be.Uint32(b[20:])}, true
}

// The class of messages about residency: which pages of a region are in memory. It is
// one of those that vendors may use as they like, by their OUI; this OUI is one that
// nobody is assigned (the bit for locally administered ones is set).
const (
	ResidencyClass   = 0x4e
	ResidencyVersion = 1
)

var residencyOUI = [3]byte{0x02, 'T', 'V'}

// ResidencyKind is what a residency message says; it is its attribute.
type ResidencyKind uint16

const (
	// ResHello asks the peer of a connection whether it speaks the class.
	ResHello ResidencyKind = 1 + iota
	// ResAgree says so, and proves by the cookie that the Hello was received.
	ResAgree
	// ResWatch asks to be told of a region; the ranges in it that matter follow.
	ResWatch
	// ResAway: ranges of a region are not in memory any more.
	ResAway
	// ResBack: ranges of a region are in memory.
	ResBack
	// ResPrefetch asks for ranges to be brought into memory.
	ResPrefetch
	// ResHoldOff asks to send nothing to a region for a time, in Arg: ms.
	ResHoldOff
	// ResGoOn ends that.
	ResGoOn
	// ResEnded: the receiver is told no more of the region that it watched.
	ResEnded

	resKinds = iota
)

// ResidencyRange is a range of a region's addresses, as requests name them.
type ResidencyRange struct{ IOVA, Len uint64 }

const (
	resFixed    = 40 // bytes in front of the ranges
	resRangeLen = 16
	// MaxResidencyRanges is how many ranges a message has room for.
	MaxResidencyRanges = (VendorDataLen - resFixed) / resRangeLen
)

// Residency is a residency message between the two ends of a connection.
type Residency struct {
	Kind     ResidencyKind
	Src, Dst QPN    // the ends' queue pairs
	Cookie   uint64 // the receiver's, which only its peer knows; 0 in a Hello
	Own      uint64 // the sender's; with Hello and Agree
	Seq      uint32 // of the sender's messages on this connection
	RKey     uint32
	// Arg is a time in ms, or flags: what Kind says.
	Arg    uint32
	N      int // ranges
	Ranges [MaxResidencyRanges]ResidencyRange
}

// ResKnown in the Arg of an Agree: the sender knows the receiver's cookie to be right.
const ResKnown = 1

// Put writes the MAD's 256 bytes to b.
func (m *Residency) Put(b []byte) {
	_ = b[MADLen-1]
	h := MADHeader{Class: ResidencyClass, ClassVersion: ResidencyVersion, Method: MADSend, TID: uint64(m.Src)<<32 | uint64(m.Seq), Attr: uint16(m.Kind)}
	h.Put(b)
	clear(b[MADHeaderLen:MADLen])
	copy(b[vendorOUIOff:], residencyOUI[:])
	d := b[vendorDataOff:MADLen]
	be.PutUint32(d, uint32(m.Src))
	be.PutUint32(d[4:], uint32(m.Dst))
	be.PutUint64(d[8:], m.Cookie)
	be.PutUint64(d[16:], m.Own)
	be.PutUint32(d[24:], m.Seq)
	be.PutUint32(d[28:], m.RKey)
	be.PutUint32(d[32:], m.Arg)
	be.PutUint32(d[36:], uint32(m.N))
	for i := range m.N {
		be.PutUint64(d[resFixed+i*resRangeLen:], m.Ranges[i].IOVA)
		be.PutUint64(d[resFixed+i*resRangeLen+8:], m.Ranges[i].Len)
	}
}

// ParseResidency decodes a MAD into m; false if it is no residency message, or none that
// makes sense: another class, method, OUI or version, a kind that there is not, more
// ranges than there is room for, or a range that is empty or wraps around.
func ParseResidency(b []byte, m *Residency) bool {
	h, ok := ParseMAD(b)
	if !ok || h.Class != ResidencyClass || h.ClassVersion != ResidencyVersion || h.Method != MADSend ||
		[3]byte(b[vendorOUIOff:]) != residencyOUI || h.Attr == 0 || h.Attr > resKinds {
		return false
	}
	d := b[vendorDataOff:]
	n := be.Uint32(d[36:])
	if n > MaxResidencyRanges {
		return false
	}
	*m = Residency{Kind: ResidencyKind(h.Attr), Src: QPN(be.Uint32(d)), Dst: QPN(be.Uint32(d[4:])), Cookie: be.Uint64(d[8:]),
		Own: be.Uint64(d[16:]), Seq: be.Uint32(d[24:]), RKey: be.Uint32(d[28:]), Arg: be.Uint32(d[32:]), N: int(n)}
	if m.Src > QPNMask || m.Dst > QPNMask {
		return false
	}
	for i := range m.N {
		r := ResidencyRange{be.Uint64(d[resFixed+i*resRangeLen:]), be.Uint64(d[resFixed+i*resRangeLen+8:])}
		if r.Len == 0 || r.IOVA+r.Len < r.IOVA {
			return false
		}
		m.Ranges[i] = r
	}
	return true
}
