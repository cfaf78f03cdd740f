// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Memory is memory for Go programs to register: mapped outside the Go heap, so
// that it can be paged through userfaultfd, and untouched until somebody uses it.
type Memory struct {
	mu sync.Mutex
	b  []byte
	fd int
}

// AllocOption modifies Alloc.
type AllocOption func(*allocConfig)

type allocConfig struct{ shared bool }

// Shared makes the memory a shared mapping of a memfd; see FD.
func Shared() AllocOption { return func(c *allocConfig) { c.shared = true } }

// Alloc maps n > 0 bytes, rounded up to pages, all zero and none of them present.
// Close frees them. Errors: ErrInvalid, and those of mmap(2).
func Alloc(n int, opts ...AllocOption) (*Memory, error) {
	var c allocConfig
	for _, o := range opts {
		o(&c)
	}
	if n <= 0 {
		return nil, fmt.Errorf("%w: %d bytes", ErrInvalid, n)
	}
	m := &Memory{fd: -1}
	flags := unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_NORESERVE
	if c.shared {
		fd, err := unix.MemfdCreate("tapverbs", unix.MFD_CLOEXEC)
		if err != nil {
			return nil, fmt.Errorf("memfd: %w", err)
		}
		if err := unix.Ftruncate(fd, int64(n+pageMask)&^pageMask); err != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("memfd of %d bytes: %w", n, err)
		}
		m.fd, flags = fd, unix.MAP_SHARED
	}
	b, err := unix.Mmap(m.fd, 0, (n+pageMask)&^pageMask, unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		if m.fd >= 0 {
			unix.Close(m.fd)
		}
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	m.b = b[:n]
	return m, nil
}

// Bytes is the memory. It must not be used after Close.
func (m *Memory) Bytes() []byte { return m.b }

// Addr is where the memory starts.
func (m *Memory) Addr() uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(m.b))) }

// FD is the memfd behind Shared memory, -1 otherwise. It is closed by Close.
func (m *Memory) FD() int { return m.fd }

// Close unmaps the memory. Regions that are still registered there answer further
// requests with an error. ErrClosed if it was closed before.
func (m *Memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.b == nil {
		return ErrClosed
	}
	// The kernel holds munmap until the pager has read what it means for regions.
	err := unix.Munmap(m.b[:cap(m.b)])
	m.b = nil
	if m.fd >= 0 {
		unix.Close(m.fd)
		m.fd = -1
	}
	return err
}
