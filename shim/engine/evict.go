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

//export tvSetBudget
func tvSetBudget(h C.tv_handle, bytes C.uint64_t) C.int {
	stackroom.Reserve()
	return errno(object[*ectx](h).dev.d.Space().SetBudget(uint64(bytes)))
}

//export tvPDBudget
func tvPDBudget(h C.tv_handle, bytes C.uint64_t) C.int {
	stackroom.Reserve()
	return errno(of[*provider.PD](h).SetBudget(uint64(bytes)))
}

//export tvMRBudget
func tvMRBudget(h C.tv_handle, bytes C.uint64_t) C.int {
	stackroom.Reserve()
	return errno(of[*provider.MR](h).SetBudget(uint64(bytes)))
}

// setStore hands a new store to a context's Space. One that is not taken stays the caller's.
func setStore(h C.tv_handle, st mr.Store) C.int {
	return errno(object[*ectx](h).dev.d.Space().SetStore(st))
}

//export tvNameStore
func tvNameStore(h C.tv_handle, spec *C.char) C.int {
	stackroom.Reserve()
	st, err := provider.NewStore(C.GoString(spec))
	if err != nil {
		return errno(err)
	}
	rc := setStore(h, st)
	if rc != 0 {
		_ = st.Close()
	}
	return rc
}

//export tvSetStore
func tvSetStore(h C.tv_handle, s *C.struct_tv_store) C.int {
	stackroom.Reserve()
	st, err := mr.NewExternStore(mr.ExternStore{User: s.user, Write: unsafe.Pointer(s.write), Read: unsafe.Pointer(s.read),
		Free: unsafe.Pointer(s.free), Close: unsafe.Pointer(s.close)})
	if err != nil {
		return errno(err)
	}
	rc := setStore(h, st)
	if d, ok := st.(interface{ Disown() error }); rc != 0 && ok {
		_ = d.Disown() // it is still the program's
	}
	return rc
}

//export tvEvictMR
func tvEvictMR(h C.tv_handle, iova, length C.uint64_t, to C.uint32_t, pages *C.uint64_t) C.int {
	stackroom.Reserve()
	n, err := of[*provider.MR](h).Evict(uint64(iova), uint64(length), mr.Level(min(to, 0xff)))
	*pages = C.uint64_t(n)
	return errno(err)
}

//export tvEvictionStopped
func tvEvictionStopped(h C.tv_handle, text *C.char, n C.uint64_t) C.int {
	stackroom.Reserve()
	err := object[*ectx](h).dev.d.Space().EvictionStopped()
	giveText(text, n, err)
	return errno(err)
}
