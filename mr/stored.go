// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"math/bits"
	"sync/atomic"
)

// Stored sets bit i of out if the content of the region's page from+i is in the store, to
// be fetched before a request can have it, and clears it otherwise; pages count from the
// one in which the region begins. It says whether any is set. What it says may be old when
// it returns. Regions that this package does not page have none. It costs a look at one
// word for 512 pages of which none is stored.
func (r *Region) Stored(from int, out []uint64) (any bool) {
	clear(out)
	if r.base.paging != UserFault {
		return false
	}
	s := r.table.space
	start := r.va(r.attr.IOVA) &^ pageMask
	va := start + uint64(from)<<pageShift
	end := min(va+uint64(len(out))*64<<pageShift, start+r.Pages()<<pageShift)
	first := va
	s.eachLeaf(va, end, func(sl *atomic.Uint64, start, stop uint64) {
		w := sl.Load()
		if w <= goneLeaf {
			return
		}
		l := pointer[leaf](w)
		if l.n[pageStored].Load() == 0 {
			return
		}
		for at := start; at < stop; at += pageSize {
			if l.word[pageIndex(at)].Load()&stateMask == pageStored {
				i := (at - first) >> pageShift
				out[i/64] |= 1 << (i % 64)
				any = true
			}
		}
	})
	return any
}

// Pages is how many pages the region has a part in.
func (r *Region) Pages() uint64 {
	return (r.va(r.attr.IOVA)&pageMask + r.attr.Length + pageMask) >> pageShift
}

// Runs calls f with each run of set bits: its first, and how many.
func Runs(set []uint64, f func(first, n int)) {
	begin := -1
	for i := 0; i < len(set)*64; {
		w := set[i/64] >> (i % 64)
		if begin < 0 {
			if w == 0 {
				i = (i/64 + 1) * 64
				continue
			}
			i += bits.TrailingZeros64(w)
			begin = i
			continue
		}
		n := bits.TrailingZeros64(^w)
		if n > 64-i%64 {
			n = 64 - i%64
		}
		if n == 64-i%64 {
			i += n
			continue
		}
		i += n
		f(begin, i-begin)
		begin = -1
	}
	if begin >= 0 {
		f(begin, len(set)*64-begin)
	}
}

// PagesAt is the part of the region that lies in n of its pages, counted as by Stored: the
// address of its first byte, as requests name it, and its length in bytes, which is 0
// beyond the region's end.
func (r *Region) PagesAt(first, n int) (iova, length uint64) {
	off := r.va(r.attr.IOVA) & pageMask
	from := max(uint64(first)<<pageShift, off) - off
	to := min(uint64(first+n)<<pageShift-off, r.attr.Length)
	if to <= from {
		return 0, 0
	}
	return r.attr.IOVA + from, to - from
}
