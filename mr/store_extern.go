// SPDX-License-Identifier: Apache-2.0

package mr

// #include <stdlib.h>
// #include "store.h"
//
// typedef int (*tv_extern_write)(void *user, uint32_t slot, const void *page);
// typedef int (*tv_extern_read)(void *user, uint32_t slot, void *page);
// typedef void (*tv_extern_free)(void *user, uint32_t slot);
// typedef void (*tv_extern_close)(void *user);
//
// static int extern_write(void *fn, void *user, uint32_t slot, const void *page)
// {
// 	return ((tv_extern_write)fn)(user, slot, page);
// }
// static void extern_reader(struct tv_reader *r, void *fn, void *user)
// {
// 	r->read = (tv_extern_read)fn;
// 	r->ctx = user;
// }
// static void extern_free(void *fn, void *user, uint32_t slot) { ((tv_extern_free)fn)(user, slot); }
// static void extern_close(void *fn, void *user) { ((tv_extern_close)fn)(user); }
import "C"

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ExternStore is a Store that is C code: the functions of a C program, by their addresses.
// Those that return something return 0 or an errno. They are called by any thread, Read
// also by the pager thread, which serves the faults of all others: it must not touch
// memory of regions, nor wait for who does.
type ExternStore struct {
	User  unsafe.Pointer // handed to all of them
	Write unsafe.Pointer // int (*)(void *user, uint32_t slot, const void *page)
	Read  unsafe.Pointer // int (*)(void *user, uint32_t slot, void *page)
	Free  unsafe.Pointer // void (*)(void *user, uint32_t slot)
	Close unsafe.Pointer // void (*)(void *user), or nil
}

// externStore is the Store of an ExternStore.
type externStore struct {
	cBacked
	fn ExternStore
}

// NewExternStore makes a Store of C functions. ErrInvalid if one of Write, Read and Free
// is nil.
func NewExternStore(e ExternStore) (Store, error) {
	if e.Write == nil || e.Read == nil || e.Free == nil {
		return nil, fmt.Errorf("%w: a store without a function to write, read or free", ErrInvalid)
	}
	s := &externStore{fn: e}
	s.reader = (*C.struct_tv_reader)(C.calloc(1, C.sizeof_struct_tv_reader))
	C.extern_reader(s.reader, e.Read, e.User)
	return s, nil
}

func (e *externStore) Write(slot uint32, page []byte) error {
	if err := e.enter(slot, page); err != nil {
		return err
	}
	defer e.leave()
	if no := C.extern_write(e.fn.Write, e.fn.User, C.uint32_t(slot), unsafe.Pointer(unsafe.SliceData(page))); no != 0 {
		return fmt.Errorf("write an evicted page to the program's store: %w", unix.Errno(no))
	}
	return nil
}

func (e *externStore) Read(slot uint32, page []byte) error {
	if err := e.read(slot, page); err != nil {
		return fmt.Errorf("read an evicted page from the program's store: %w", err)
	}
	return nil
}

func (e *externStore) Free(slot uint32) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	if !e.closed {
		C.extern_free(e.fn.Free, e.fn.User, C.uint32_t(slot))
	}
}

// Disown is Close for a store that nobody has taken: the program's function to close it is
// not called.
func (e *externStore) Disown() error {
	e.fn.Close = nil
	return e.Close()
}

func (e *externStore) Close() error {
	if err := e.close(); err != nil {
		return err
	}
	defer e.mu.Unlock()
	if e.fn.Close != nil {
		C.extern_close(e.fn.Close, e.fn.User)
	}
	C.free(unsafe.Pointer(e.reader))
	e.reader = nil
	return nil
}
