// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
import "C"

import (
	"cmp"
	"slices"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
)

// told is what of a region was found to be written, and the program had no room to be told.
type told struct {
	mu   sync.Mutex
	left []mr.Range
}

// merge joins two lists of ranges, in order and without overlaps.
func merge(a, b []mr.Range) []mr.Range {
	if len(a) == 0 {
		return b
	}
	all := append(slices.Clone(a), b...)
	slices.SortFunc(all, func(x, y mr.Range) int { return cmp.Compare(x.IOVA, y.IOVA) })
	out := all[:1]
	for _, r := range all[1:] {
		if last := &out[len(out)-1]; r.IOVA <= last.IOVA+last.Length {
			last.Length = max(last.Length, r.IOVA+r.Length-last.IOVA)
		} else {
			out = append(out, r)
		}
	}
	return out
}

//export tvTrackDirty
func tvTrackDirty(h C.tv_handle, on C.int32_t) C.int {
	stackroom.Reserve()
	it := object[*item](h)
	it.dirty.mu.Lock()
	defer it.dirty.mu.Unlock()
	err := it.obj.(*provider.MR).TrackDirty(on != 0)
	if err == nil && on == 0 {
		it.dirty.left = nil
	}
	return errno(err)
}

//export tvDirtyMR
func tvDirtyMR(h C.tv_handle, clearIt C.int32_t, out *C.struct_tv_range, n *C.uint64_t) C.int {
	stackroom.Reserve()
	it := object[*item](h)
	it.dirty.mu.Lock()
	defer it.dirty.mu.Unlock()
	ranges, err := it.obj.(*provider.MR).Dirty(clearIt != 0)
	if err != nil {
		return errno(err)
	}
	ranges = merge(it.dirty.left, ranges)
	room := uint64(*n)
	*n = C.uint64_t(len(ranges))
	if uint64(len(ranges)) > room {
		if clearIt != 0 {
			it.dirty.left = ranges
		}
		return C.int(unix.ENOSPC)
	}
	dst := unsafe.Slice(out, len(ranges))
	for i, r := range ranges {
		dst[i] = C.struct_tv_range{iova: C.uint64_t(r.IOVA), length: C.uint64_t(r.Length)}
	}
	if clearIt != 0 {
		it.dirty.left = nil
	}
	return 0
}
