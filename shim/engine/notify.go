// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
// #include "call.h"
import "C"

import (
	"sync/atomic"

	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
)

// hooks are the functions of a C program that want to know of changes of mappings.
type hooks struct {
	fn      C.struct_tv_notifier
	removed atomic.Bool // by the program; else it ends with its context
}

// ranged is one of the hooks for ranges, or nil if the program has none.
func (n *hooks) ranged(have bool, hook C.int) func(start, end uintptr) {
	if !have {
		return nil
	}
	return func(start, end uintptr) { C.tv_call_hook(&n.fn, hook, C.uintptr_t(start), C.uintptr_t(end), 0) }
}

// paged is ranged for one page.
func (n *hooks) paged(have bool, hook C.int) func(addr uintptr) {
	if !have {
		return nil
	}
	return func(addr uintptr) { C.tv_call_hook(&n.fn, hook, C.uintptr_t(addr), 0, 0) }
}

func (n *hooks) notifier() *mr.Notifier {
	m := &mr.Notifier{
		SyncRange:       n.ranged(n.fn.sync_range != nil, C.TV_HOOK_SYNC),
		InvalidateRange: n.ranged(n.fn.invalidate_range != nil, C.TV_HOOK_INVALIDATE),
		UpdateRange:     n.ranged(n.fn.update_range != nil, C.TV_HOOK_UPDATE),
		SyncPage:        n.paged(n.fn.sync_page != nil, C.TV_HOOK_SYNC_PAGE),
		InvalidatePage:  n.paged(n.fn.invalidate_page != nil, C.TV_HOOK_INVALIDATE_PAGE),
		UpdatePage:      n.paged(n.fn.update_page != nil, C.TV_HOOK_UPDATE_PAGE),
	}
	if n.fn.change_protection != nil {
		m.ChangeProtection = func(start, end uintptr, prot int) {
			C.tv_call_hook(&n.fn, C.TV_HOOK_PROTECT, C.uintptr_t(start), C.uintptr_t(end), C.int(prot))
		}
	}
	return m
}

//export tvAddNotifier
func tvAddNotifier(h C.tv_handle, fn *C.struct_tv_notifier, start, end C.uint64_t, out *C.tv_handle) C.int {
	stackroom.Reserve()
	if start > end || start == end && start != 0 {
		return errno(provider.ErrInvalid)
	}
	c := object[*ectx](h)
	n := &hooks{fn: *fn}
	stop, err := c.dev.d.Space().AddNotifier(n.notifier(), uintptr(start), uintptr(end))
	if err != nil {
		return errno(err)
	}
	*out = c.add(rankNotifier, n, func() error {
		stop()
		if !n.removed.Load() && n.fn.release != nil {
			C.tv_call_hook(&n.fn, C.TV_HOOK_RELEASE, 0, 0, 0)
		}
		return nil
	})
	return 0
}

//export tvRemoveNotifier
func tvRemoveNotifier(h C.tv_handle) C.int {
	stackroom.Reserve()
	of[*hooks](h).removed.Store(true)
	return errno(destroy(h))
}

//export tvSettleNotifiers
func tvSettleNotifiers(h C.tv_handle) C.int {
	stackroom.Reserve()
	object[*ectx](h).dev.d.Space().SettleNotifiers()
	return 0
}
