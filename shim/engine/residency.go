// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
import "C"

import (
	"time"

	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
)

//export tvEnableResidency
func tvEnableResidency(h C.tv_handle, a *C.struct_tv_residency_attr) C.int {
	stackroom.Reserve()
	const most = int64(time.Hour / time.Microsecond) // longer is as good as for ever
	hold := time.Duration(max(-1, min(int64(a.max_hold), most))) * time.Microsecond
	return errno(of[*provider.QP](h).EnableResidency(provider.ResidencyOptions{Ahead: uint32(a.ahead), MaxHold: hold}))
}

//export tvDisableResidency
func tvDisableResidency(h C.tv_handle) C.int {
	stackroom.Reserve()
	of[*provider.QP](h).DisableResidency()
	return 0
}

func flag(b bool) C.int32_t {
	if b {
		return 1
	}
	return 0
}

//export tvQueryRemote
func tvQueryRemote(h C.tv_handle, rkey C.uint32_t, iova, length C.uint64_t, out *C.struct_tv_remote) C.int {
	stackroom.Reserve()
	q := of[*provider.QP](h)
	r, err := q.RemoteResidency(mr.Key(rkey), uint64(iova), uint64(length))
	if err != nil {
		return errno(err)
	}
	*out = C.struct_tv_remote{away: C.uint64_t(r.Away), agreed: flag(q.ResidencyAgreed()), watched: flag(r.Known), held_off: flag(r.HeldOff)}
	return 0
}

//export tvPrefetchRemote
func tvPrefetchRemote(h C.tv_handle, rkey C.uint32_t, iova, length C.uint64_t) C.int {
	stackroom.Reserve()
	return errno(of[*provider.QP](h).PrefetchRemote(mr.Key(rkey), uint64(iova), uint64(length)))
}
