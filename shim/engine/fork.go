// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
import "C"

import (
	"runtime/cgo"

	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/mr"
)

//export tvForkBegin
func tvForkBegin(out *C.tv_handle) C.int {
	stackroom.Reserve()
	after, err := mr.Process().BeforeFork()
	*out = C.tv_handle(cgo.NewHandle(after))
	return errno(err)
}

//export tvForkEnd
func tvForkEnd(h C.tv_handle) C.int {
	stackroom.Reserve()
	object[func()](h)()
	cgo.Handle(h).Delete()
	return 0
}

//export tvForkFinish
func tvForkFinish() C.int {
	stackroom.Reserve()
	mr.Process().AfterForks()
	return 0
}
