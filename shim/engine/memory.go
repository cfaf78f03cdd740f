// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
// #include "ring.h"
import "C"

import (
	"unsafe"

	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

//export tvAllocParent
func tvAllocParent(h C.tv_handle, out *C.tv_handle) C.int {
	stackroom.Reserve()
	pd, err := of[*provider.PD](h).AllocParent()
	if err != nil {
		return errno(err)
	}
	*out = ctxOf(h).add(rankParent, pd, pd.Dealloc)
	return 0
}

// remoteKey is a region's rkey; 0 for a null region, which has none
// (ibv_alloc_null_mr(3)).
func remoteKey(m *provider.MR) C.uint32_t {
	if m.Paging() == mr.NullMemory {
		return 0
	}
	return C.uint32_t(m.RKey())
}

// entered enters a new region and fills in its handle and keys.
func entered(h C.tv_handle, r *C.struct_tv_reg, m *provider.MR, err error) C.int {
	if err != nil {
		return errno(err)
	}
	c := ctxOf(h)
	c.own(m.LKey(), r.cookie)
	r.handle = c.add(rankMR, m, m.Dereg)
	r.lkey, r.rkey = C.uint32_t(m.LKey()), remoteKey(m)
	return 0
}

//export tvNullMR
func tvNullMR(h C.tv_handle, r *C.struct_tv_reg) C.int {
	stackroom.Reserve()
	m, err := of[*provider.PD](h).AllocNullMR()
	return entered(h, r, m, err)
}

//export tvDMMR
func tvDMMR(h, dm C.tv_handle, r *C.struct_tv_reg) C.int {
	stackroom.Reserve()
	m, err := of[*provider.PD](h).RegDM(of[*provider.DM](dm), uint64(r.addr), uint64(r.length), mr.Access(r.access))
	return entered(h, r, m, err)
}

//export tvAdviseMR
func tvAdviseMR(h C.tv_handle, advice, flags C.uint32_t, sg *C.struct_tv_sge, n C.uint32_t) C.int {
	stackroom.Reserve()
	if advice > C.uint32_t(mr.PrefetchNoFault) {
		return errno(provider.ErrNotSupported)
	}
	var ranges []qp.SGE
	if n > 0 {
		ranges = unsafe.Slice((*qp.SGE)(unsafe.Pointer(sg)), int(n))
	}
	return errno(of[*provider.PD](h).AdviseMR(mr.Advice(advice), uint32(flags), ranges))
}

//export tvAllocDM
func tvAllocDM(h C.tv_handle, a *C.struct_tv_dm_attr) C.int {
	stackroom.Reserve()
	c := object[*ectx](h)
	dm, err := c.dev.d.AllocDM(uint64(a.length), int(a.log_align))
	if err != nil {
		return errno(err)
	}
	a.addr = C.uint64_t(dm.Addr())
	a.handle = c.add(rankDM, dm, dm.Free)
	return 0
}

// Package mr's Paging in engine.h's numbers; this does not compile when they differ.
var (
	_ [C.TV_PAGED_USERFAULT]byte = [mr.UserFault]byte{}
	_ [C.TV_PAGED_KERNEL]byte    = [mr.KernelPaging]byte{}
	_ [C.TV_PAGED_PINNED]byte    = [mr.Pinned]byte{}
	_ [C.TV_PAGED_DEVICE]byte    = [mr.DeviceMemory]byte{}
	_ [C.TV_PAGED_IMPLICIT]byte  = [mr.Implicit]byte{}
	_ [C.TV_PAGED_NULL]byte      = [mr.NullMemory]byte{}
)

//export tvQueryMR
func tvQueryMR(h C.tv_handle, i *C.struct_tv_mr_info) C.int {
	stackroom.Reserve()
	m := of[*provider.MR](h)
	if i.present != 0 {
		n, err := m.Present()
		if err != nil {
			return errno(err)
		}
		i.present = C.uint64_t(n)
	}
	c := m.Stats()
	i.paging = C.uint32_t(m.Paging())
	i.page_faults, i.page_faults_handled = C.uint64_t(c.PageFaults), C.uint64_t(c.PageFaultsHandled)
	i.page_prefetch = C.uint64_t(c.PagePrefetch)
	return 0
}

//export tvQueryCounters
func tvQueryCounters(h C.tv_handle, o *C.struct_tv_counters) C.int {
	stackroom.Reserve()
	d := object[*ectx](h).dev.d
	p, s := d.Space().Stats(), d.Stats()
	*o = C.struct_tv_counters{
		page_faults: C.uint64_t(p.PageFaults), page_faults_handled: C.uint64_t(p.PageFaultsHandled),
		page_invalidations: C.uint64_t(p.PageInvalidations), page_prefetch: C.uint64_t(p.PagePrefetch),
		app_faults: C.uint64_t(p.AppFaults),
		rx_frames:  C.uint64_t(s.RxFrames), rx_bytes: C.uint64_t(s.RxBytes),
		tx_frames: C.uint64_t(s.TxFrames), tx_bytes: C.uint64_t(s.TxBytes),
		rx_dropped: C.uint64_t(s.Dropped()), tx_dropped: C.uint64_t(s.TxDropped),
	}
	return 0
}
