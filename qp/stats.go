// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"sync/atomic"
	"unsafe"
)

// Stats counts what the protocol did, for all QPs of a shard. Names are those
// of rdma_rxe's and mlx5's hw_counters where there is one.
type Stats struct {
	SentPkts, RcvdPkts         atomic.Uint64
	SentBytes, RcvdBytes       atomic.Uint64 // payload
	Sends, Recvs               atomic.Uint64 // SENDs completed with success, and received
	DuplicateRequest           atomic.Uint64 // requests received again
	OutOfSeqRequest            atomic.Uint64 // requests with a PSN beyond the expected one
	OutOfSeqResponse           atomic.Uint64 // responses that show an earlier one was lost
	StaleResponse              atomic.Uint64 // responses to what is acknowledged already, or was never sent
	RetransmittedPkts          atomic.Uint64
	SentAcks, RcvdAcks         atomic.Uint64
	SentNakSeq, RcvdNakSeq     atomic.Uint64
	SentRNRNak, RcvdRNRNak     atomic.Uint64
	SentNakErr, RcvdNakErr     atomic.Uint64 // fatal NAKs
	LocalAckTimeout            atomic.Uint64
	Probes                     atomic.Uint64 // oldest packets sent again before the ACK timeout
	RetryExceeded, RNRExceeded atomic.Uint64
	ReadReexecuted             atomic.Uint64 // duplicate READs answered
	AtomicReplayed             atomic.Uint64 // duplicate atomics, FLUSHes and ATOMIC WRITEs answered from what was kept
	Dropped                    atomic.Uint64 // packets a QP could do nothing with
	MessagesDropped            atomic.Uint64 // UC messages of which packets are missing
	OutOfBuffer                atomic.Uint64 // UC and UD packets that met no receive work request
	QKeyViolations             atomic.Uint64 // datagrams with another Q_Key than the QP's
}

// Add adds what another shard has counted.
func (s *Stats) Add(o *Stats) {
	const n = unsafe.Sizeof(*s) / 8
	to, from := (*[n]atomic.Uint64)(unsafe.Pointer(s)), (*[n]atomic.Uint64)(unsafe.Pointer(o))
	for i := range to {
		to[i].Add(from[i].Load())
	}
}
