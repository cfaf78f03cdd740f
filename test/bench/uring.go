// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Fixed buffers of io_uring: the one way to have the kernel pin memory for a long time
// (FOLL_LONGTERM, as RDMA drivers do) that needs no device. io_uring_register(2).

// maxFixed is the longest buffer in bytes that can be registered.
const maxFixed = 1 << 30

const (
	uringRegisterBuffers   = 0 // IORING_REGISTER_BUFFERS
	uringUnregisterBuffers = 1 // IORING_UNREGISTER_BUFFERS
	uringParamsLen         = 120
)

// uring is an io_uring that nothing is ever submitted to.
type uring struct{ fd int }

func newUring() (*uring, error) {
	var params [uringParamsLen]byte // of struct io_uring_params; all zero is what is wanted
	fd, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
	if e != 0 {
		return nil, fmt.Errorf("io_uring_setup: %w", e)
	}
	return &uring{int(fd)}, nil
}

func (u *uring) register(op, arg, n uintptr) error {
	if _, _, e := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(u.fd), op, arg, n, 0, 0); e != 0 {
		return fmt.Errorf("io_uring_register: %w", e)
	}
	return nil
}

// pin registers n bytes at addr, outside of the Go heap, as fixed buffers.
func (u *uring) pin(addr uintptr, n uint64) error {
	type iovec struct {
		base uintptr
		len  uint64
	}
	var v []iovec
	for ; n > 0; n -= v[len(v)-1].len {
		l := min(n, maxFixed)
		v = append(v, iovec{addr, l})
		addr += uintptr(l)
	}
	err := u.register(uringRegisterBuffers, uintptr(unsafe.Pointer(&v[0])), uintptr(len(v)))
	runtime.KeepAlive(v)
	return err
}

// unpin gives back what pin took.
func (u *uring) unpin() error { return u.register(uringUnregisterBuffers, 0, 0) }

func (u *uring) close() error { return unix.Close(u.fd) }
