// SPDX-License-Identifier: Apache-2.0

package stackroom

import (
	"testing"
	"unsafe"
)

// TestReserve looks at where a local variable lies: growing copies the stack.
func TestReserve(t *testing.T) {
	moved := make(chan bool)
	go func() { // a fresh goroutine has a small stack
		var x byte
		before := uintptr(unsafe.Pointer(&x))
		Reserve()
		after := uintptr(unsafe.Pointer(&x))
		Reserve()
		moved <- before != after && after == uintptr(unsafe.Pointer(&x))
	}()
	if !<-moved {
		t.Error("a fresh goroutine's stack has not grown once and for all")
	}
	if n := testing.AllocsPerRun(100, Reserve); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkReserve(b *testing.B) {
	for b.Loop() {
		Reserve()
	}
}
