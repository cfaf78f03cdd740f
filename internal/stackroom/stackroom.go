// SPDX-License-Identifier: Apache-2.0

// Package stackroom makes room on a goroutine's stack for signal handlers of C.
//
// A C thread that calls into Go runs on a goroutine's stack, of a few KiB. A signal
// handler that was installed without SA_ONSTACK, as by signal(3), runs wherever the
// thread is; on such a stack it overwrites what lies below: the registers that the
// kernel saves for it take some 3 KiB with AVX-512 alone. Programs that use C
// libraries cannot be asked for SA_ONSTACK, so the stack is made large instead.
package stackroom

// Bytes is how much Reserve makes sure of.
const Bytes = 64 << 10

// Reserve grows the calling goroutine's stack, if need be, until there are Bytes
// bytes below the caller's frame. Exported functions that C calls begin with it: it
// costs a comparison when there is room already.
func Reserve()
