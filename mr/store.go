// SPDX-License-Identifier: Apache-2.0

package mr

// #include "store.h"
import "C"

import (
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Store keeps the content of evicted pages, 4096 bytes in each of up to 2^28 slots.
// Who uses it hands the slots out, and does not write, read or free one slot at the
// same time; different slots may be at once.
//
// Those of NewFileStore and NewCompressedStore are read by the pager thread itself. Of
// any other, which is Go code, the pager has a goroutine read, so that a goroutine
// which touches an evicted page waits for another one: see Space.SetStore.
type Store interface {
	// Write gives a slot its content, in place of what it had. The page is memory
	// that stays in place meanwhile. An error leaves the slot as after Free.
	Write(slot uint32, page []byte) error
	// Read gives the content of a slot that was written. Never other bytes than
	// those: an error, rather.
	Read(slot uint32, page []byte) error
	// Free gives up the content of a slot; one that has none may be freed.
	Free(slot uint32)
	// Close ends the store, with all that is in it.
	Close() error
}

// StoreUsage is what a store of this package has.
type StoreUsage struct {
	In   uint64 // bytes of the pages that are in it
	Held uint64 // bytes that it takes up for them
}

// cStore is a Store that C can read.
type cStore interface {
	Store
	// cReader is valid until Close.
	cReader() *C.struct_tv_reader
}

// cBacked is what the stores in C have in common.
type cBacked struct {
	// mu is held shared by calls, alone by Close. The pager, which does not know it, is
	// stopped before its store is closed.
	mu     sync.RWMutex
	closed bool
	reader *C.struct_tv_reader // in C memory
}

func (c *cBacked) cReader() *C.struct_tv_reader { return c.reader }

// enter begins a call about a slot and a page; leave ends it.
func (c *cBacked) enter(slot uint32, page []byte) error {
	if len(page) != pageSize || slot >= C.TV_STORE_SLOTS {
		return fmt.Errorf("%w: slot %#x of a store, with %d bytes", ErrInvalid, slot, len(page))
	}
	c.mu.RLock()
	if c.closed {
		c.mu.RUnlock()
		return ErrClosed
	}
	return nil
}

func (c *cBacked) leave() { c.mu.RUnlock() }

// read is what the pager does.
func (c *cBacked) read(slot uint32, page []byte) error {
	if err := c.enter(slot, page); err != nil {
		return err
	}
	defer c.leave()
	if e := C.tv_read(c.reader, C.uint32_t(slot), unsafe.Pointer(unsafe.SliceData(page))); e != 0 {
		return unix.Errno(e)
	}
	return nil
}

// close begins Close: it gives ErrClosed, or keeps mu, which the caller unlocks.
func (c *cBacked) close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return ErrClosed
	}
	c.closed = true
	return nil
}
