// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"errors"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"github.com/tapverbs/tapverbs/mr"
)

// A ring is memory shared by a driver (the Go API or the C library) and the
// engine, like the queues of a real adapter. This file is the only description
// of it.
//
//	offset 0    producer index, uint32   WQ: driver writes, engine reads.
//	                                     CQ: engine writes, driver reads.
//	offset 64   consumer index, uint32   the other way round
//	offset 128  CQ: arm word, uint32; see Arm values
//	offset 132  send queue: the QP's state, uint32: engine writes, driver reads
//	offset 192  number of slots (a power of two), uint32
//	offset 196  stride of a slot in bytes, uint32
//	offset 256  slots
//
// Indices run freely and wrap at 2^32; slot i is at 256 + (i & (slots-1)) *
// stride. The producer fills a slot, then stores its index with release order;
// the consumer loads it with acquire order, reads the slot, then stores its own
// index with release order. Each index has one writer at a time: several
// posting or polling threads take the driver's lock first, the engine's side is
// the holder of the baton (or of the CQ's and SRQ's own lock, where more than
// one shard uses it).
const (
	ringProd   = 0
	ringCons   = 64
	ringArm    = 128
	ringState  = 132
	ringCount  = 192
	ringStride = 196
	ringSlots  = 256
)

// Values of a CQ ring's arm word (ibv_req_notify_cq(3)).
const (
	ArmNone      = 0
	ArmAny       = 1
	ArmSolicited = 2
)

// SendWQE is a slot of a send queue: 64 bytes, then NumSGE SGEs of 16 bytes or,
// with SendInline, Length bytes of payload.
type SendWQE struct {
	ID         uint64
	Opcode     WROpcode
	Flags      SendFlags
	NumSGE     uint16
	ImmOrKey   uint32
	RemoteAddr uint64
	RKey       mr.Key
	// Length is the sum of the list's or the inline bytes.
	Length     uint32
	CompareAdd uint64
	Swap       uint64
	// AH, DestQPN and QKey address a datagram.
	AH, DestQPN, QKey uint32
	// SRQN is the peer's SRQ that an XRC request is for, 24 bits (IBA A14).
	SRQN uint32
}

// RecvWQE is a slot of a receive queue or SRQ: 16 bytes, then NumSGE SGEs.
type RecvWQE struct {
	ID     uint64
	NumSGE uint32
	_      uint32
}

// CQE is a slot of a completion queue: 64 bytes.
type CQE struct {
	ID        uint64
	Status    WCStatus
	Opcode    WCOpcode
	Flags     WCFlags
	VendorErr uint32
	ByteLen   uint32
	ImmOrKey  uint32
	QPN       uint32
	SrcQP     uint32
	Timestamp uint64
	// UserQP is the QP's handle, for drivers that look QPs up by it.
	UserQP    uint64
	PKeyIndex uint16
	SLID      uint16
	SL        uint8
	PathBits  uint8
	_         [2]byte
	FlowTag   uint32
	_         [4]byte
}

const (
	sendWQESize = 64
	recvWQESize = 16
	cqeSize     = 64
	sgeSize     = 16
)

// The sizes are part of the layout: these do not compile if they change.
var (
	_ [sendWQESize]byte = [unsafe.Sizeof(SendWQE{})]byte{}
	_ [recvWQESize]byte = [unsafe.Sizeof(RecvWQE{})]byte{}
	_ [cqeSize]byte     = [unsafe.Sizeof(CQE{})]byte{}
	_ [sgeSize]byte     = [unsafe.Sizeof(SGE{})]byte{}
)

// ErrFull: the queue has no free slot (ENOMEM of ibv_post_send(3)).
var ErrFull = errors.New("work queue full")

// ErrTooManySGE: the list is longer than the queue was made for, or the inline
// data larger (EINVAL).
var ErrTooManySGE = errors.New("more scatter/gather elements or inline data than the queue was made for")

// Ring is a work or completion queue's memory. The zero value is of no use.
type Ring struct {
	mem    *mr.Memory
	base   unsafe.Pointer
	mask   uint32
	stride uint32
}

func newRing(slots, stride int) (*Ring, error) {
	if slots < 1 {
		slots = 1
	}
	n := 1 << bits.Len(uint(slots-1))
	m, err := mr.Alloc(ringSlots + n*stride)
	if err != nil {
		return nil, err
	}
	r := &Ring{mem: m, base: unsafe.Pointer(unsafe.SliceData(m.Bytes())), mask: uint32(n - 1), stride: uint32(stride)}
	*(*uint32)(unsafe.Add(r.base, ringCount)) = uint32(n)
	*(*uint32)(unsafe.Add(r.base, ringStride)) = uint32(stride)
	return r, nil
}

func (r *Ring) word(off uintptr) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Add(r.base, off)) }
func (r *Ring) prod() *atomic.Uint32            { return r.word(ringProd) }
func (r *Ring) cons() *atomic.Uint32            { return r.word(ringCons) }

func (r *Ring) slot(i uint32) unsafe.Pointer {
	return unsafe.Add(r.base, ringSlots+uintptr(i&r.mask)*uintptr(r.stride))
}

// Slots is how many entries the ring holds.
func (r *Ring) Slots() int { return int(r.mask) + 1 }

// Len is how many entries are in the ring now.
func (r *Ring) Len() int { return int(r.prod().Load() - r.cons().Load()) }

// Memory is the ring's memory, laid out as ring.go says, for a driver in
// another language.
func (r *Ring) Memory() []byte { return r.mem.Bytes() }

func (r *Ring) close() error { return r.mem.Close() }

// sendStride is the stride of a send queue for so many SGEs and inline bytes,
// rounded up to a cache line so that neighbouring slots do not share one.
func sendStride(maxSGE, maxInline int) int {
	return (sendWQESize + max(maxSGE*sgeSize, maxInline) + 63) &^ 63
}

func recvStride(maxSGE int) int { return (recvWQESize + maxSGE*sgeSize + 31) &^ 31 }

// wqeSGEs is the list behind a send WQE.
func (w *SendWQE) sges() []SGE {
	return unsafe.Slice((*SGE)(unsafe.Add(unsafe.Pointer(w), sendWQESize)), int(w.NumSGE))
}

// inline is the payload behind an inline send WQE.
func (w *SendWQE) inline() []byte {
	return unsafe.Slice((*byte)(unsafe.Add(unsafe.Pointer(w), sendWQESize)), int(w.Length))
}

func (w *RecvWQE) sges() []SGE {
	return unsafe.Slice((*SGE)(unsafe.Add(unsafe.Pointer(w), recvWQESize)), int(w.NumSGE))
}

func (r *Ring) sendWQE(i uint32) *SendWQE { return (*SendWQE)(r.slot(i)) }
func (r *Ring) recvWQE(i uint32) *RecvWQE { return (*RecvWQE)(r.slot(i)) }
func (r *Ring) cqe(i uint32) *CQE         { return (*CQE)(r.slot(i)) }
