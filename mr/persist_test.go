// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// fileMapping maps 4 pages of a new file.
func fileMapping(t *testing.T, flags int) ([]byte, string) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(4 * pageSize); err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(int(f.Fd()), 0, 4*pageSize, unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) }) // EINVAL: the test has done it
	return b, name
}

// Only shared mappings of files can be flushed to persistence.
func TestPersistable(t *testing.T) {
	s := newSpace(t, Options{})
	tab := NewTable(s)
	reg := func(addr uintptr, n uint64) error {
		r, err := tab.Register(RegAttr{Addr: addr, Length: n, Access: LocalWrite | RemoteWrite | FlushPersistent})
		if err == nil {
			err = r.Deregister()
		}
		return err
	}
	at := func(b []byte) uintptr { return uintptr(unsafe.Pointer(&b[0])) }
	shared, _ := fileMapping(t, unix.MAP_SHARED)
	private, _ := fileMapping(t, unix.MAP_PRIVATE)
	deleted, name := fileMapping(t, unix.MAP_SHARED)
	if err := os.Remove(name); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"a file":                 reg(at(shared), 4*pageSize),
		"the middle of a file":   reg(at(shared)+5000, 100),
		"a private mapping":      reg(at(private), 100),
		"a file without a name":  reg(at(deleted), 100),
		"anonymous memory":       reg(alloc(t, pageSize).Addr(), pageSize),
		"shared anonymous pages": reg(alloc(t, pageSize, Shared()).Addr(), pageSize),
	} {
		good := what == "a file" || what == "the middle of a file"
		if good && err != nil || !good && !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	// A file with something else behind it, in one range.
	if err := unix.Mprotect(shared[pageSize:2*pageSize], unix.PROT_READ); err != nil {
		t.Fatal(err)
	}
	if err := reg(at(shared), 4*pageSize); err != nil {
		t.Errorf("three mappings of one file: %v", err)
	}
	if _, _, e := unix.Syscall6(unix.SYS_MMAP, at(shared)+2*pageSize, pageSize, unix.PROT_READ,
		unix.MAP_FIXED|unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uintptr(0), 0); e != 0 {
		t.Fatal(e)
	}
	if err := reg(at(shared), 4*pageSize); !errors.Is(err, ErrInvalid) {
		t.Errorf("a file with a hole: %v", err)
	}
}

// Persist writes dirty pages back, and says when there is nothing to write to.
func TestPersist(t *testing.T) {
	s := newSpace(t, Options{})
	tab := NewTable(s)
	b, _ := fileMapping(t, unix.MAP_SHARED)
	r, err := tab.Register(RegAttr{Addr: uintptr(unsafe.Pointer(&b[0])) + 100, Length: 3 * pageSize, IOVA: 1 << 40, HaveIOVA: true,
		Access: LocalWrite | RemoteWrite | FlushPersistent})
	if err != nil {
		t.Fatal(err)
	}
	b[pageSize] = 1
	if err := r.Persist(1<<40+5000, 3000); err != nil {
		t.Error(err)
	}
	// What is not mapped any more can't be written back.
	if err := unix.Munmap(b); err != nil {
		t.Fatal(err)
	}
	if err := r.Persist(1<<40, 100); !errors.Is(err, ErrRemoved) {
		t.Errorf("unmapped: %v", err)
	}
	if err := r.Deregister(); err != nil {
		t.Fatal(err)
	}
	if err := r.Persist(1<<40, 100); !errors.Is(err, ErrKey) {
		t.Errorf("deregistered: %v", err)
	}
}
