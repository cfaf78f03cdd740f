// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// track tracks a region, or skips the test where the kernel cannot.
func track(t testing.TB, r *Region) {
	t.Helper()
	switch err := r.TrackDirty(true); {
	case errors.Is(err, ErrNotSupported):
		t.Skip(err)
	case err != nil:
		t.Fatal(err)
	}
}

// dirty is the pages of a region that was registered at a page's start, one bool each.
func dirty(t testing.TB, r *Region, clear bool) []bool {
	t.Helper()
	rs, err := r.Dirty(clear)
	if err != nil {
		t.Fatal(err)
	}
	out := make([]bool, (r.Length()+pageMask)>>pageShift)
	last := uint64(0)
	for i, g := range rs {
		at := g.IOVA - r.IOVA()
		if g.Length == 0 || at%pageSize != 0 || at+g.Length > r.Length() || i > 0 && at <= last {
			t.Fatalf("range %d of %+v, the one before ended at %#x", i, rs, last)
		}
		for last = at; last < at+g.Length; last += pageSize {
			out[last>>pageShift] = true
		}
	}
	return out
}

// wantDirty fails unless exactly these pages are dirty.
func wantDirty(t testing.TB, what string, r *Region, clear bool, want ...int) {
	t.Helper()
	m := map[int]bool{}
	for _, p := range want {
		m[p] = true
	}
	for i, d := range dirty(t, r, clear) {
		if d != m[i] {
			t.Errorf("%s: page %d dirty: %v", what, i, d)
		}
	}
}

func TestDirty(t *testing.T) {
	b := newBed(t, 40*pageSize)
	mem := b.m.Bytes()
	mem[0], mem[30*pageSize] = 1, 1
	if _, err := b.r.Dirty(true); !errors.Is(err, ErrInvalid) {
		t.Errorf("not tracked: %v", err)
	}
	track(t, b.r)
	wantDirty(t, "at first", b.r, true)
	mem[5] = 1           // present
	mem[2*pageSize] = 1  // absent
	_ = mem[30*pageSize] // read only
	if mem[31*pageSize] != 0 {
		t.Fatal("not zero")
	}
	b.put(t, 4*pageSize-10, pattern(20, 1))                                            // absent, two pages in part
	b.put(t, 8*pageSize, pattern(3*pageSize, 1))                                       // whole
	b.put(t, 30*pageSize+7, pattern(1, 1))                                             // present
	b.get(t, 20*pageSize, 2*pageSize)                                                  // absent, read
	if _, err := b.a.Atomic(b.r, b.r.IOVA()+25*pageSize, FetchAdd, 0, 1); err != nil { // absent
		t.Fatal(err)
	}
	if err := b.s.Prefetch(b.r, b.r.IOVA()+35*pageSize, pageSize, Prefetch); err != nil {
		t.Fatal(err)
	}
	all := []int{0, 2, 3, 4, 8, 9, 10, 25, 30}
	wantDirty(t, "written", b.r, false, all...)
	wantDirty(t, "not cleared", b.r, true, all...)
	wantDirty(t, "cleared", b.r, true)
	mem[20*pageSize] = 1 // was the zero page
	mem[9*pageSize] = 2
	if _, err := b.a.Atomic(b.r, b.r.IOVA()+25*pageSize, FetchAdd, 0, 1); err != nil {
		t.Fatal(err)
	}
	wantDirty(t, "again", b.r, true, 9, 20, 25)
	// Dropped: zero instead of what they were; those that were zero stay so.
	if err := madvise(b.m.Addr()+8*pageSize, 6*pageSize, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	wantDirty(t, "dropped", b.r, true, 8, 9, 10, 11, 12, 13)
	dirty(t, b.r, true)
	wantDirty(t, "long since dropped", b.r, true)
	mem[8*pageSize] = 1
	if err := madvise(b.m.Addr()+8*pageSize, pageSize, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	wantDirty(t, "written and dropped between looks", b.r, true, 8)
	dirty(t, b.r, true)
	b.s.mu.Lock()
	if n := b.s.dirtyBytes(b.r); n != 0 {
		t.Errorf("%d dirty bytes", n)
	}
	mem[0] = 9
	if n := b.s.dirtyBytes(b.r); n != pageSize {
		t.Errorf("%d dirty bytes", n)
	}
	b.s.mu.Unlock()
	wantDirty(t, "counted, not told", b.r, true, 0)
	if err := b.r.TrackDirty(false); err != nil {
		t.Fatal(err)
	}
	mem[0], mem[39*pageSize] = 3, 3
	if _, err := b.r.Dirty(true); !errors.Is(err, ErrInvalid) {
		t.Errorf("not tracked any more: %v", err)
	}
	track(t, b.r)
	wantDirty(t, "tracked again", b.r, true)
	mem[39*pageSize] = 4
	wantDirty(t, "written again", b.r, true, 39)
	if err := b.r.Deregister(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.r.Dirty(true); err != ErrClosed {
		t.Errorf("deregistered: %v", err)
	}
	if err := b.r.TrackDirty(true); err != ErrClosed {
		t.Errorf("deregistered: %v", err)
	}
}

// Regions that overlap are told separately, and a region need not be of whole pages.
func TestDirtyOverlap(t *testing.T) {
	b := newBed(t, 16*pageSize)
	part := register(t, b.tab, b.m.Addr()+2*pageSize+100, 5*pageSize, func(a *RegAttr) { a.IOVA, a.HaveIOVA = 1<<40, true })
	track(t, b.r)
	track(t, part)
	b.put(t, 2*pageSize, []byte{1})
	b.put(t, 7*pageSize, []byte{1})
	wantDirty(t, "the whole", b.r, true, 2, 7)
	for range 2 {
		rs, err := part.Dirty(false)
		if want := []Range{{1 << 40, pageSize - 100}, {1<<40 + 5*pageSize - 100, 100}}; err != nil || len(rs) != 2 || rs[0] != want[0] || rs[1] != want[1] {
			t.Fatalf("%+v, %v; want %+v", rs, err, want)
		}
	}
	if rs, err := part.Dirty(true); err != nil || len(rs) != 2 {
		t.Fatalf("%+v, %v", rs, err)
	}
	// The other way round; and one goes.
	b.put(t, 3*pageSize, []byte{1})
	if rs, err := part.Dirty(true); err != nil || len(rs) != 1 {
		t.Fatalf("%+v, %v", rs, err)
	}
	if err := part.Deregister(); err != nil {
		t.Fatal(err)
	}
	b.put(t, 4*pageSize, []byte{1})
	wantDirty(t, "the one that is left", b.r, true, 3, 4)
	// Registered over what is tracked.
	again := register(t, b.tab, b.m.Addr(), 8*pageSize)
	b.put(t, 4*pageSize, []byte{2})
	if err := again.Deregister(); err != nil {
		t.Fatal(err)
	}
	b.m.Bytes()[5*pageSize] = 2
	wantDirty(t, "beside an untracked one", b.r, true, 4, 5)
}

// Memory of other kinds.
func TestDirtyKinds(t *testing.T) {
	s := newSpace(t, Options{})
	const n = 12 * pageSize
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(n); err != nil {
		t.Fatal(err)
	}
	file, err := unix.Mmap(int(f.Fd()), 0, n, rw, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(file)
	heap := make([]byte, n+pageSize)
	heap = heap[-uintptr(ptr(heap))&pageMask:][:n]
	shared := alloc(t, n, Shared())
	for _, c := range []struct {
		name string
		mem  []byte
		pin  bool
	}{{"file", file, false}, {"Go heap", heap, false}, {"shared", shared.Bytes(), false}, {"pinned", alloc(t, n).Bytes(), true}} {
		t.Run(c.name, func(t *testing.T) {
			r := register(t, NewTable(s), uintptr(ptr(c.mem)), n, func(a *RegAttr) { a.Pin = c.pin })
			c.mem[0], c.mem[pageSize] = 1, 1
			track(t, r)
			wantDirty(t, "at first", r, true)
			a := accessor(t, s)
			var st Stage
			if err := errors.Join(a.Write(&st, r, r.IOVA()+2*pageSize, pattern(pageSize+1, 1)), a.Flush(&st)); err != nil {
				t.Fatal(err)
			}
			c.mem[0], c.mem[7*pageSize] = 2, 2
			if c.mem[pageSize] != 1 {
				t.Fatal("other content")
			}
			wantDirty(t, "written", r, true, 0, 2, 3, 7)
			wantDirty(t, "cleared", r, true)
			c.mem[2*pageSize]++
			wantDirty(t, "again", r, true, 2)
			if err := r.TrackDirty(false); err != nil {
				t.Fatal(err)
			}
			c.mem[2*pageSize]++
		})
	}
	t.Run("private mapping of shared memory", func(t *testing.T) {
		mem, err := unix.Mmap(shared.FD(), 0, n, rw, unix.MAP_PRIVATE)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(mem)
		r := register(t, NewTable(s), uintptr(ptr(mem)), n)
		if r.Paging() != UserFault {
			t.Skipf("paged by %v", r.Paging())
		}
		if err := r.TrackDirty(true); !errors.Is(err, ErrNotSupported) {
			t.Error(err)
		}
		if err := r.Deregister(); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("all memory", func(t *testing.T) {
		r, err := NewTable(s).Register(RegAttr{PD: 1, Length: ^uint64(0), Access: allRights | OnDemand})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Deregister()
		if err := r.TrackDirty(true); !errors.Is(err, ErrNotSupported) {
			t.Error(err)
		}
	})
	t.Run("no userfaultfd", func(t *testing.T) {
		r := register(t, NewTable(newSpace(t, Options{NoUserFault: true})), alloc(t, n).Addr(), n)
		if err := r.TrackDirty(true); !errors.Is(err, ErrNotSupported) {
			t.Error(err)
		}
	})
}

// A region that is put on other memory, or goes elsewhere with its memory.
func TestDirtyMoved(t *testing.T) {
	// Mapped by hand, as addresses are used again.
	mapped := func() uintptr {
		p, err := mmapAt(0, 8*pageSize, rw, unix.MAP_PRIVATE)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = munmap(p, 8*pageSize) })
		return p
	}
	b := newBed(t, pageSize)
	from := mapped()
	b.r = register(t, b.tab, from, 8*pageSize)
	track(t, b.r)
	b.put(t, pageSize, []byte{1})
	wantDirty(t, "before", b.r, true, 1)
	b.put(t, 2*pageSize, []byte{1})
	if err := b.r.Suspend(); err != nil {
		t.Fatal(err)
	}
	to, _, e := unix.Syscall6(unix.SYS_MREMAP, from, 8*pageSize, 8*pageSize, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, mapped(), 0)
	if e != 0 {
		t.Fatal(e)
	}
	if err := b.r.Resume(); err != nil {
		t.Fatal(err)
	}
	if b.r.Addr() != to {
		t.Fatalf("the region is at %#x, its memory at %#x", b.r.Addr(), to)
	}
	b.put(t, 5*pageSize, []byte{1})
	d := dirty(t, b.r, true)
	if !d[2] || !d[5] {
		t.Errorf("after mremap: %v", d)
	}
	b.put(t, 5*pageSize, []byte{2})
	wantDirty(t, "at the new place", b.r, true, 5)

	third := mapped()
	memory(uint64(third), 8*pageSize)[6*pageSize] = 1
	if err := b.r.Suspend(); err != nil {
		t.Fatal(err)
	}
	if err := b.r.MoveTo(third); err != nil {
		t.Fatal(err)
	}
	if err := b.r.Resume(); err != nil {
		t.Fatal(err)
	}
	wantDirty(t, "on other memory", b.r, true, 0, 1, 2, 3, 4, 5, 6, 7)
	b.put(t, 3*pageSize, []byte{3})
	wantDirty(t, "there", b.r, true, 3)

	fourth := mapped()
	by, err := b.r.Reregister(ChangeTranslation, RegAttr{Addr: fourth, Length: 4 * pageSize}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer by.Deregister()
	wantDirty(t, "registered anew", by, true, 0, 1, 2, 3)
	memory(uint64(fourth), 1)[0] = 1
	wantDirty(t, "then", by, true, 0)
}

// Checkpoints: who copies only what is said to be dirty, while everybody writes, has
// everything in the end.
func TestDirtyCheckpoint(t *testing.T) {
	const pages = 700
	for _, c := range []struct {
		name string
		opts []AllocOption
	}{{"private", nil}, {"shared", []AllocOption{Shared()}}} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t, pages*pageSize, c.opts...)
			mem := b.m.Bytes()
			track(t, b.r)
			image := make([]byte, len(mem))
			copied := 0
			checkpoint := func() {
				rs, err := b.r.Dirty(true)
				if err != nil {
					t.Error(err)
				}
				for _, g := range rs {
					at := g.IOVA - b.r.IOVA()
					copied += copy(image[at:at+g.Length], mem[at:])
				}
			}
			var wg sync.WaitGroup
			var writing atomic.Int32
			writing.Store(2)
			wg.Go(func() { // the engine
				defer writing.Add(-1)
				rng := rand.New(rand.NewPCG(1, 2))
				for range 3000 {
					n := rng.IntN(3 * pageSize)
					off := rng.IntN(len(mem)/2 - n)
					data := pattern(n+1, byte(rng.Int()))
					err := ErrBusy
					for err == ErrBusy { // the mapping changes all the time
						err = b.a.Write(&b.st, b.r, b.r.IOVA()+uint64(off), data)
					}
					for ok := err == nil; ok && (err == nil || err == ErrBusy) && b.st.Active(); {
						err = b.a.Flush(&b.st)
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
			wg.Go(func() { // the application, in the other half
				defer writing.Add(-1)
				rng := rand.New(rand.NewPCG(3, 4))
				for i := range 3000 {
					at := len(mem)/2 + rng.IntN(len(mem)/2)
					mem[at] = byte(i)
					if i%10 == 0 {
						if err := madvise(b.m.Addr()+uintptr(at&^pageMask), pageSize, unix.MADV_DONTNEED); err != nil {
							t.Error(err)
							return
						}
					}
				}
			})
			looks := 0
			for ; writing.Load() > 0; looks++ {
				checkpoint()
			}
			wg.Wait()
			checkpoint()
			if !bytes.Equal(image, mem) {
				for i := range image {
					if image[i] != mem[i] {
						t.Fatalf("byte %d (page %d) is %#x in the checkpoint, %#x in memory", i, i>>pageShift, image[i], mem[i])
					}
				}
			}
			t.Logf("%d looks, %d pages copied", looks, copied>>pageShift)
			copied = 0
			mem[3*pageSize]++
			checkpoint()
			if copied != pageSize {
				t.Errorf("%d bytes copied for one", copied)
			}
		})
	}
}
