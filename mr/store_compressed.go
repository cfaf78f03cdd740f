// SPDX-License-Identifier: Apache-2.0

package mr

// #include <stdlib.h>
// #include "store.h"
import "C"

import (
	"fmt"
	"unsafe"

	_ "github.com/DataDog/zstd" // its C code, which store_compressed.c calls
	"golang.org/x/sys/unix"
)

// compressedStore is the store of store_compressed.c.
type compressedStore struct {
	cBacked
	s *C.struct_tv_packed_store
}

// NewCompressedStore makes a store in memory that compresses pages with zstd. Pages of
// one repeated 64-bit word take up nothing but 16 bytes, as any slot does; those that
// cannot be compressed a page. Errors: there is no memory.
func NewCompressedStore() (Store, error) {
	c := &compressedStore{}
	c.reader = (*C.struct_tv_reader)(C.calloc(1, C.sizeof_struct_tv_reader))
	if c.s = C.tv_packed_store_new(c.reader); c.s == nil {
		C.free(unsafe.Pointer(c.reader))
		return nil, fmt.Errorf("compressed store of evicted pages: %w", unix.ENOMEM)
	}
	return c, nil
}

func (c *compressedStore) Write(slot uint32, page []byte) error {
	if err := c.enter(slot, page); err != nil {
		return err
	}
	defer c.leave()
	if e := C.tv_packed_store_write(c.s, C.uint32_t(slot), unsafe.Pointer(unsafe.SliceData(page))); e != 0 {
		return fmt.Errorf("compress an evicted page: %w", unix.Errno(e))
	}
	return nil
}

func (c *compressedStore) Read(slot uint32, page []byte) error {
	if err := c.read(slot, page); err != nil {
		return fmt.Errorf("unpack an evicted page: %w", err)
	}
	return nil
}

func (c *compressedStore) Free(slot uint32) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if !c.closed {
		C.tv_packed_store_release(c.s, C.uint32_t(slot))
	}
}

// Usage is what the store has; Held is the memory that compressed pages are in.
func (c *compressedStore) Usage() StoreUsage {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.closed {
		return StoreUsage{}
	}
	var u C.struct_tv_store_usage
	C.tv_packed_store_usage(c.s, &u)
	return StoreUsage{In: uint64(u.pages) * pageSize, Held: uint64(u.held)}
}

func (c *compressedStore) Close() error {
	if err := c.close(); err != nil {
		return err
	}
	defer c.mu.Unlock()
	C.tv_packed_store_close(c.s)
	C.free(unsafe.Pointer(c.reader))
	return nil
}
