// SPDX-License-Identifier: Apache-2.0

package mr

// #include <stdlib.h>
// #include "store.h"
import "C"

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// fileStore is the store of store_file.c.
type fileStore struct {
	cBacked
	dir string
	s   *C.struct_tv_file_store
}

// NewFileStore makes a store of a temporary file in a directory, "" for os.TempDir. The
// file has no name, so it is gone with the process, and takes up what the pages in it
// take: pages of zeros nothing, and those that were freed nothing for long, where the
// file system can punch holes. In a tmpfs that is memory again. Other bytes than those
// written, because the disk failed, are found out: Read gives EIO.
func NewFileStore(dir string) (Store, error) {
	if dir == "" {
		dir = os.TempDir()
	}
	fd, err := temporary(dir)
	if err != nil {
		return nil, fmt.Errorf("store of evicted pages in %s: %w", dir, err)
	}
	return newFileStore(fd, dir)
}

// newFileStore takes the file over.
func newFileStore(fd int, dir string) (*fileStore, error) {
	f := &fileStore{dir: dir}
	f.reader = (*C.struct_tv_reader)(C.calloc(1, C.sizeof_struct_tv_reader))
	f.s = C.tv_file_store_new(C.int(fd), f.reader)
	if f.s == nil {
		C.free(unsafe.Pointer(f.reader))
		unix.Close(fd)
		return nil, fmt.Errorf("store of evicted pages: %w", unix.ENOMEM)
	}
	return f, nil
}

// temporary opens a file that has no name, or none any more.
func temporary(dir string) (int, error) {
	const flags = unix.O_RDWR | unix.O_EXCL | unix.O_CLOEXEC
	fd, err := unix.Open(dir, unix.O_TMPFILE|flags, 0o600)
	// open(2): what file systems and kernels say that do not know O_TMPFILE.
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EINVAL) {
		return fd, err
	}
	return named(dir)
}

// named is temporary where there is no O_TMPFILE.
func named(dir string) (int, error) {
	f, err := os.CreateTemp(dir, ".tapverbs-*")
	if err != nil {
		return -1, err
	}
	defer f.Close()
	if err := os.Remove(f.Name()); err != nil {
		return -1, err
	}
	return unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
}

func (f *fileStore) Write(slot uint32, page []byte) error {
	if err := f.enter(slot, page); err != nil {
		return err
	}
	defer f.leave()
	switch e := unix.Errno(C.tv_file_store_write(f.s, C.uint32_t(slot), unsafe.Pointer(unsafe.SliceData(page)))); e {
	case 0:
		return nil
	case unix.ENOSPC, unix.EDQUOT:
		return fmt.Errorf("no room for another evicted page in %s: %w; make room there, or choose another directory (TAPVERBS_STORE=file:DIR)", f.dir, e)
	default:
		return fmt.Errorf("write an evicted page to the store in %s: %w", f.dir, e)
	}
}

func (f *fileStore) Read(slot uint32, page []byte) error {
	if err := f.read(slot, page); err != nil {
		return fmt.Errorf("read an evicted page from the store in %s: %w", f.dir, err)
	}
	return nil
}

func (f *fileStore) Free(slot uint32) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if !f.closed {
		C.tv_file_store_release(f.s, C.uint32_t(slot))
	}
}

// Usage is what the store has; Held is what the file system says.
func (f *fileStore) Usage() StoreUsage {
	f.mu.RLock()
	defer f.mu.RUnlock()
	var u C.struct_tv_store_usage
	if f.closed || C.tv_file_store_usage(f.s, &u) != 0 {
		return StoreUsage{}
	}
	return StoreUsage{In: uint64(u.pages) * pageSize, Held: uint64(u.held)}
}

func (f *fileStore) Close() error {
	if err := f.close(); err != nil {
		return err
	}
	defer f.mu.Unlock()
	C.tv_file_store_close(f.s)
	C.free(unsafe.Pointer(f.reader))
	return nil
}
