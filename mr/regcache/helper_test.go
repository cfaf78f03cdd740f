// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"bytes"
	"errors"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
)

const (
	page   = 4096
	rights = mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead
	prot   = unix.PROT_READ | unix.PROT_WRITE
)

// region is a registration of a Table, which is counted.
type region struct {
	*mr.Region
	b *bed
}

func (r *region) Dereg() error {
	err := r.Deregister()
	if err == nil {
		r.b.live.Add(-1)
	}
	return err
}

// bed is a cache with a table, and a hand to reach memory by key.
type bed struct {
	t          testing.TB
	s          *mr.Space
	tab        *mr.Table
	c          *Cache[*region]
	live, made atomic.Int64
	fail       error // of the next registration
}

func newBed(t testing.TB, so mr.Options, o Options) *bed {
	t.Helper()
	s, err := mr.NewSpace(so)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.UserFault(); err != nil && !so.NoUserFault {
		t.Skip(err)
	}
	b := &bed{t: t, s: s, tab: mr.NewTable(s)}
	if b.c, err = New(s, b.register, o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.c.Close()
		if n := b.live.Load(); n != 0 {
			t.Errorf("%d registrations are left", n)
			return
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func (b *bed) register(addr uintptr, n uint64, access mr.Access) (*region, error) {
	if err := b.fail; err != nil {
		b.fail = nil
		return nil, err
	}
	r, err := b.tab.Register(mr.RegAttr{PD: 1, Addr: addr, Length: n, Access: access})
	if err != nil {
		return nil, err
	}
	b.live.Add(1)
	b.made.Add(1)
	return &region{r, b}, nil
}

func (b *bed) get(addr uintptr, n int) *Entry[*region] {
	b.t.Helper()
	e, err := b.c.Get(addr, uint64(n), rights)
	if err != nil {
		b.t.Fatalf("get %d bytes at %#x: %v", n, addr, err)
	}
	if e.Addr() > addr || addr+uintptr(n) > e.Addr()+uintptr(e.Length()) {
		b.t.Fatalf("%d bytes at %#x: got %d at %#x", n, addr, e.Length(), e.Addr())
	}
	return e
}

// touch gets and puts, and gives the region's key.
func (b *bed) touch(addr uintptr, n int) mr.Key {
	b.t.Helper()
	e := b.get(addr, n)
	defer b.c.Put(e)
	return e.RKey()
}

// reaches writes through a key, and says whether that is what is in memory then.
func (b *bed) reaches(a *mr.Accessor, k mr.Key, addr uintptr, data []byte) error {
	r, err := b.tab.CheckRemote(k, 1, 7, uint64(addr), uint64(len(data)), mr.RemoteWrite)
	if err != nil {
		return err
	}
	var st mr.Stage
	defer st.Drop()
	for {
		err := a.Write(&st, r, uint64(addr), data)
		if err == nil {
			err = a.Flush(&st)
		}
		if mr.Postponed(err) {
			continue
		}
		if err != nil {
			return err
		}
		break
	}
	if !bytes.Equal(memory(addr, len(data)), data) {
		return errElsewhere
	}
	return nil
}

var errElsewhere = errors.New("the bytes went elsewhere")

// addr is a pointer that go vet does not mind.
func memory(at uintptr, n int) []byte {
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&at)), n)
}

func mmap(t testing.TB, at uintptr, n int, flags int) uintptr {
	t.Helper()
	p, _, e := unix.Syscall6(unix.SYS_MMAP, at, uintptr(n), prot, uintptr(flags|unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE), ^uintptr(0), 0)
	if e != 0 {
		t.Fatalf("mmap %d bytes at %#x: %v", n, at, e)
	}
	return p
}

func munmap(t testing.TB, at uintptr, n int) {
	t.Helper()
	if _, _, e := unix.Syscall(unix.SYS_MUNMAP, at, uintptr(n), 0); e != 0 {
		t.Fatalf("munmap: %v", e)
	}
}

func mremap(t testing.TB, from uintptr, n int, to uintptr) {
	t.Helper()
	const mayMove, fixed = 1, 2
	if _, _, e := unix.Syscall6(unix.SYS_MREMAP, from, uintptr(n), uintptr(n), mayMove|fixed, to, 0); e != 0 {
		t.Fatalf("mremap: %v", e)
	}
}

// room is n bytes for a test, at an address where nobody else maps anything meanwhile.
func room(t testing.TB, i, n int) uintptr {
	t.Helper()
	p := mmap(t, 0x4a00_0000_0000+uintptr(i)<<32, n, unix.MAP_FIXED_NOREPLACE)
	t.Cleanup(func() { munmap(t, p, n) })
	return p
}

func ptr[T any](p *T) unsafe.Pointer { return unsafe.Pointer(p) }
