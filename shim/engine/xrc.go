// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
import "C"

import (
	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/provider"
)

//export tvOpenXRCD
func tvOpenXRCD(h C.tv_handle, fd, create, exclusive C.int32_t, out *C.tv_handle) C.int {
	stackroom.Reserve()
	c := object[*ectx](h)
	x, err := c.dev.d.OpenXRCD(provider.XRCDAttr{FD: int(fd), Create: create != 0, Exclusive: exclusive != 0})
	if err != nil {
		return errno(err)
	}
	*out = c.add(rankXRCD, x, x.Close)
	return 0
}

//export tvOpenQP
func tvOpenQP(h C.tv_handle, in *C.struct_tv_qp_init) C.int {
	stackroom.Reserve()
	q, err := of[*provider.XRCD](h).OpenQP(asQPN(in.num), nil)
	if err != nil {
		return errno(err)
	}
	ctxOf(h).addQP(q, in)
	return 0
}
