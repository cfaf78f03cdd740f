// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
import "C"

import (
	"unsafe"

	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
)

// giveUsage fills in numbers for C.
func giveUsage(o *C.struct_tv_usage, u mr.Usage, err error) C.int {
	if err != nil {
		return errno(err)
	}
	n := func(v uint64) C.uint64_t { return C.uint64_t(v) }
	*o = C.struct_tv_usage{
		size: n(u.Size), present: n(u.Present), limbo: n(u.Limbo), stored: n(u.Stored), dirty: n(u.Dirty), budget: n(u.Budget),
		faults_minor: n(u.FaultsMinor), faults_major: n(u.FaultsMajor),
		app_faults_minor: n(u.AppFaultsMinor), app_faults_major: n(u.AppFaultsMajor), fault_ns: n(u.FaultNs),
		app_fault_ns: n(u.AppFaultNs),
		rnrs:         n(u.RNRs), evictions: n(u.Evictions), invalidations: n(u.Invalidations), prefetches: n(u.Prefetches),
	}
	return 0
}

//export tvMRUsage
func tvMRUsage(h C.tv_handle, o *C.struct_tv_usage) C.int {
	stackroom.Reserve()
	u, err := of[*provider.MR](h).Usage()
	return giveUsage(o, u, err)
}

//export tvUsage
func tvUsage(h C.tv_handle, o *C.struct_tv_usage) C.int {
	stackroom.Reserve()
	u, err := object[*ectx](h).dev.d.Space().Usage()
	return giveUsage(o, u, err)
}

//export tvPDUsage
func tvPDUsage(h C.tv_handle, o *C.struct_tv_usage) C.int {
	stackroom.Reserve()
	u, err := of[*provider.PD](h).Usage()
	return giveUsage(o, u, err)
}

//export tvQPFaults
func tvQPFaults(h C.tv_handle, o *C.struct_tv_qp_faults) C.int {
	stackroom.Reserve()
	f := of[*provider.QP](h).Faults()
	*o = C.struct_tv_qp_faults{minor: C.uint64_t(f.Minor), major: C.uint64_t(f.Major), ns: C.uint64_t(f.Ns), rnrs: C.uint64_t(f.RNRs)}
	return 0
}

//export tvThreadFaults
func tvThreadFaults(h C.tv_handle, out *C.struct_tv_thread_faults, n *C.uint32_t) C.int {
	stackroom.Reserve()
	fs := object[*ectx](h).dev.d.Space().FaultThreads()
	for i, f := range fs[:min(len(fs), int(*n))] {
		o := (*C.struct_tv_thread_faults)(unsafe.Add(unsafe.Pointer(out), uintptr(i)*unsafe.Sizeof(*out)))
		*o = C.struct_tv_thread_faults{tid: C.uint32_t(f.TID), minor: C.uint64_t(f.Minor), major: C.uint64_t(f.Major), ns: C.uint64_t(f.Ns)}
		for k := 0; k < len(f.Name) && k < len(o.name)-1; k++ {
			o.name[k] = C.char(f.Name[k])
		}
	}
	*n = C.uint32_t(len(fs))
	return 0
}

// maxParts bounds the parts that a region is shown in.
const maxParts = 1 << 20

//export tvResidency
func tvResidency(h C.tv_handle, out *C.struct_tv_residency, n *C.uint32_t) C.int {
	stackroom.Reserve()
	if *n == 0 || *n > maxParts {
		return errno(provider.ErrInvalid)
	}
	parts := of[*provider.MR](h).Map(int(*n))
	if parts == nil {
		return errno(provider.ErrNotSupported)
	}
	dst := unsafe.Slice(out, int(*n))
	for i, p := range parts {
		dst[i] = C.struct_tv_residency{size: C.uint64_t(p.Size), present: C.uint64_t(p.Present),
			limbo: C.uint64_t(p.Limbo), stored: C.uint64_t(p.Stored), poisoned: C.uint64_t(p.Poisoned)}
	}
	*n = C.uint32_t(len(parts))
	return 0
}
