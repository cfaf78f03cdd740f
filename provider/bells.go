// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"math/bits"
	"sync/atomic"
)

// bells is the doorbell page: one bit per QP index, in three levels so that the
// engine sees with one load that nobody has rung. Anyone rings; only the holder
// of the baton sweeps. A bit is set from the bottom up and taken from the top
// down, so a bit below is never without those above, except while it is rung.
//
// Who has rung calls the engine, unless held says that it looks soon by itself. The C
// library does the same on the same page (shim/verbs/ring.h).
type bells struct {
	top atomic.Uint64 // 16 bits, one for each of mid
	_   [56]byte

	// The engine's side. patient: the background goroutine looks at the bells within a
	// window of watch's, and whoever has posted so far has polled soon after. polls
	// counts the times that an application made progress.
	patient, polls atomic.Uint32
	_              [56]byte

	// The drivers' side: polls when one of them last called the engine, and how many
	// work requests were posted since and left to the next poll. Several may write at a
	// time: then some are counted too little, or a call is made too much.
	seen, left atomic.Uint32
	_          [56]byte

	mid  [16]atomic.Uint64   // bits for leaf words
	leaf [1024]atomic.Uint64 // bits for QP indices
}

// maxLeft is how many work requests are left to the next poll at most. They go as one
// super-frame, while those behind them are being posted.
const maxLeft = 32

// held is called when n work requests were posted and the bell was rung, and says
// whether that is all there is to do. The first after a poll goes at once, whatever
// comes behind it; the others wait for the next poll, or for as many as are worth a call.
//
// Nothing is left behind: patient ends before the bells are looked at for the last time,
// and the bell was rung before patient is looked at here.
func (b *bells) held(n int) bool {
	if b.patient.Load() == 0 {
		return false
	}
	if p := b.polls.Load(); b.seen.Load() != p {
		b.seen.Store(p)
		b.left.Store(0)
		return false
	}
	if l := b.left.Load() + uint32(n); l < maxLeft {
		b.left.Store(l)
		return true
	}
	b.left.Store(0)
	return false
}

// ring sets the bit of a QP index. A bit that is seen set above need not be set
// again: the sweep that will take it looks at the words below afterwards.
func (b *bells) ring(i uint16) {
	set(&b.leaf[i>>6], 1<<(i&63))
	set(&b.mid[i>>12], 1<<(i>>6&63))
	set(&b.top, 1<<(i>>12))
}

func set(w *atomic.Uint64, bit uint64) {
	if w.Load()&bit == 0 {
		w.Or(bit)
	}
}

// quiet says whether nobody has rung.
func (b *bells) quiet() bool { return b.top.Load() == 0 }

// sweep takes all bits and calls fn for each.
func (b *bells) sweep(fn func(i uint16)) {
	for t := b.top.Swap(0); t != 0; t &= t - 1 {
		hi := bits.TrailingZeros64(t)
		for m := b.mid[hi].Swap(0); m != 0; m &= m - 1 {
			w := hi<<6 | bits.TrailingZeros64(m)
			for l := b.leaf[w].Swap(0); l != 0; l &= l - 1 {
				fn(uint16(w<<6 | bits.TrailingZeros64(l)))
			}
		}
	}
}
