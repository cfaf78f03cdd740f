// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
import "C"

import (
	"syscall"
	"unsafe"

	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
)

//export tvGeneration
func tvGeneration(h C.tv_handle, addr *C.uint64_t) C.int {
	stackroom.Reserve()
	*addr = C.uint64_t(uintptr(unsafe.Pointer(object[*ectx](h).dev.d.Space().Generation())))
	return 0
}

// tvChanges tells the changes that registrations do not survive.
//
//export tvChanges
func tvChanges(h C.tv_handle, c *C.struct_tv_changed) C.int {
	stackroom.Reserve()
	c.n, c.more = 0, 0
	add := func(start, end uintptr, whole C.int32_t) {
		r := &c.ranges[c.n]
		r.start, r.end, r.whole = C.uint64_t(start), C.uint64_t(end), whole
		c.n++
	}
	last, complete := object[*ectx](h).dev.d.Space().Changes(uint64(c.since), func(ch mr.Change) bool {
		switch ch.Kind {
		case mr.KindUnmap, mr.KindRemap: // what mremap replaces is told of as unmapped
			add(ch.Start, ch.End, 0)
		case mr.KindMoved, mr.KindEliminate:
			add(ch.Start, ch.End, 1)
		}
		if c.n == C.TV_CHANGED_RANGES {
			c.more = 1
		}
		return c.more == 0
	})
	c.last = C.uint64_t(last)
	if !complete {
		return C.int(syscall.EOVERFLOW)
	}
	return 0
}

//export tvMRLost
func tvMRLost(h C.tv_handle, l *C.struct_tv_lost) C.int {
	stackroom.Reserve()
	m := of[*provider.MR](h)
	l.addr, l.n, l.followed = C.uint64_t(m.Addr()), 0, 0
	if m.Followed() {
		l.followed = 1
	}
	m.Lost(func(start, end uintptr) {
		if l.n < C.TV_LOST_RANGES {
			l.ranges[l.n] = C.struct_tv_span{C.uint64_t(start), C.uint64_t(end)}
		}
		l.n = min(l.n+1, C.TV_LOST_RANGES+1)
	})
	return 0
}
