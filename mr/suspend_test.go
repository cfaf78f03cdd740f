// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mremapTo moves a mapping to another address.
func mremapTo(t testing.TB, from uintptr, n int, to uintptr) {
	t.Helper()
	const mayMove, fixed = 1, 2
	if _, _, e := unix.Syscall6(unix.SYS_MREMAP, from, uintptr(n), uintptr(n), mayMove|fixed, to, 0); e != 0 {
		t.Fatalf("mremap: %v", e)
	}
}

// roomsAt is far from where the kernel and the Go heap put mappings: nobody else's comes
// to lie where one has been moved away, to be unmapped at the end.
var roomsAt = func() *atomic.Uint64 {
	a := new(atomic.Uint64)
	a.Store(0x4a00_0000_0000)
	return a
}()

// room is memory that can be moved, or that something can be moved to, gone with the test.
func room(t testing.TB, n int) uintptr {
	t.Helper()
	at := uintptr(roomsAt.Add(uint64(n)+leafBytes) - uint64(n) - leafBytes)
	p, err := mmapAt(at, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_NORESERVE|unix.MAP_FIXED_NOREPLACE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = munmap(p, n) })
	return p
}

func bytesOf(p uintptr, n int) []byte { return memory(uint64(p), n) }

func suspend(t testing.TB, r *Region) {
	t.Helper()
	if err := r.Suspend(); err != nil {
		t.Fatal(err)
	}
}

func resume(t testing.TB, r *Region) {
	t.Helper()
	if err := r.Resume(); err != nil {
		t.Fatal(err)
	}
}

// kinds of memory that a region may be of.
var kinds = []struct {
	name  string
	alloc []AllocOption
	opts  Options
	mod   func(*RegAttr)
}{
	{"userfault", nil, Options{}, func(*RegAttr) {}},
	{"shared", []AllocOption{Shared()}, Options{}, func(*RegAttr) {}},
	{"kernel", nil, Options{NoUserFault: true}, func(*RegAttr) {}},
	{"pinned", nil, Options{}, func(a *RegAttr) { a.Pin = true }},
}

// TestSuspended: no access gets through, whatever its kind and whatever the region is,
// all do afterwards, and what was staged waits.
func TestSuspended(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			s := newSpace(t, k.opts)
			tab, m, a := NewTable(s), alloc(t, 64*pageSize, k.alloc...), accessor(t, s)
			r := register(t, tab, m.Addr(), 64*pageSize, k.mod)
			w := bind(t, tab, r, RemoteWrite|RemoteRead|RemoteAtomic)
			other := register(t, tab, m.Addr(), 64*pageSize, k.mod)
			at := r.IOVA()
			var st Stage
			if err := a.Write(&st, r, at+50, pattern(3000, 1)); err != nil {
				t.Fatal(err)
			}
			staged := st.Active()
			suspend(t, r)
			suspend(t, r)
			before := bytes.Clone(m.Bytes()[8*pageSize:])
			all := func(x *Region, want error) {
				t.Helper()
				var st Stage
				buf := make([]byte, 5000)
				for name, f := range map[string]func() error{
					"write": func() error {
						if err := a.Write(&st, x, at+40*pageSize, pattern(5000, 3)); err != nil {
							return err
						}
						return a.Flush(&st)
					},
					"place":    func() error { return a.Write(&st, x, at+16*pageSize, pattern(16*pageSize, 3)) },
					"read":     func() error { return a.Read(x, at+8*pageSize, buf) },
					"atomic":   func() error { _, err := a.Atomic(x, at+40*pageSize, FetchAdd, 0, 1); return err },
					"prefetch": func() error { return s.Prefetch(x, at+33*pageSize, 5000, PrefetchWrite) },
				} {
					if err := f(); err != want {
						t.Errorf("%s: %v, want %v", name, err, want)
					}
					if want == ErrSuspended && name != "prefetch" && a.Blocked() != x {
						t.Errorf("%s: not blocked by the region", name)
					}
					st.Drop()
				}
			}
			all(r, ErrSuspended)
			all(w, ErrSuspended)
			if err := a.Flush(&st); staged && (err != ErrSuspended || !st.Active()) {
				t.Errorf("flush of what was staged: %v", err)
			}
			if !bytes.Equal(before, m.Bytes()[8*pageSize:]) {
				t.Error("memory changed while it was suspended")
			}
			if !r.Suspended() || !w.Suspended() || other.Suspended() {
				t.Error("Suspended says otherwise")
			}
			all(other, nil)
			resume(t, r)
			all(r, ErrSuspended) // suspended twice
			resume(t, r)
			if err := r.Resume(); !errors.Is(err, ErrInvalid) {
				t.Errorf("resumed once too often: %v", err)
			}
			all(r, nil)
			all(w, nil)
			if err := a.Flush(&st); err != nil {
				t.Fatal(err)
			}
			same(t, "staged before", m.Bytes()[50:3050], pattern(3000, 1))
		})
	}
}

// bind opens all of a region by a window and gives the window's view.
func bind(t testing.TB, tab *Table, r *Region, acc Access) *Region {
	t.Helper()
	win, err := tab.AllocWindow(1, Window1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = win.Dealloc() })
	old := r.rights.Load()
	r.rights.Store(old.pd(), old.access()|MWBind)
	if err := tab.Bind(&BindAttr{Key: win.RKey()&^0xff | (win.RKey()+1)&0xff, PD: 1, Region: r.LKey(), Addr: r.IOVA(), Length: r.Length(), Access: acc}); err != nil {
		t.Fatal(err)
	}
	return tab.Lookup(win.RKey())
}

// TestSuspendKinds: what has no memory of its own can be suspended, too.
func TestSuspendKinds(t *testing.T) {
	s := newSpace(t, Options{})
	tab, a, m := NewTable(s), accessor(t, s), alloc(t, pageSize)
	null, err := tab.RegisterNull(1)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Deregister()
	implicit := register(t, tab, 0, 0, func(a *RegAttr) { a.Length, a.Access = 1<<64-1, LocalWrite|OnDemand })
	for _, r := range []*Region{null, implicit} {
		suspend(t, r)
		var st Stage
		if err := a.Write(&st, r, uint64(m.Addr()), []byte{1}); err != ErrSuspended {
			t.Errorf("%v: %v", r.Paging(), err)
		}
		if err := r.MoveTo(m.Addr()); !errors.Is(err, ErrInvalid) {
			t.Errorf("%v: moved: %v", r.Paging(), err)
		}
		if err := r.Replace(0, pageSize, m.Addr()); !errors.Is(err, ErrInvalid) {
			t.Errorf("%v: replaced: %v", r.Paging(), err)
		}
		resume(t, r)
		if err := a.Write(&st, r, uint64(m.Addr()), []byte{1}); err != nil {
			t.Errorf("%v: %v", r.Paging(), err)
		}
		if err := a.Flush(&st); err != nil {
			t.Error(err)
		}
	}
	if m.Bytes()[0] != 1 {
		t.Error("not written")
	}
}

// TestSuspendQuiesces: engines write all the time; between Suspend and Resume nothing
// changes, however often and from how many sides it is suspended.
func TestSuspendQuiesces(t *testing.T) {
	s := newSpace(t, Options{})
	const n = 32 * pageSize
	tab, m := NewTable(s), alloc(t, n)
	r := register(t, tab, m.Addr(), n)
	var stop atomic.Bool
	var writes atomic.Uint64
	var engines, users sync.WaitGroup
	for e := range 2 {
		a := accessor(t, s)
		engines.Add(1)
		go func() {
			defer engines.Done()
			var st Stage
			defer st.Drop()
			if e == 1 { // one of them does not leave its section by itself
				a.Linger()
				defer a.Leave()
			}
			for i := 0; !stop.Load(); i++ {
				err := a.Write(&st, r, r.IOVA()+uint64(i%31*pageSize+e*100), pattern(3000, byte(i)))
				if err == nil {
					err = a.Flush(&st)
				}
				if err != nil && err != ErrSuspended {
					t.Error(err)
					return
				}
				if err == nil {
					writes.Add(1)
				}
			}
		}()
	}
	var moving sync.RWMutex // one looks while the others do not write
	for u := range 2 {
		users.Add(1)
		go func() {
			defer users.Done()
			for i := range 100 {
				if err := r.Suspend(); err != nil {
					t.Error(err)
					return
				}
				moving.RLock()
				before := bytes.Clone(m.Bytes())
				if i%2 == u {
					_ = madvise(m.Addr()+31*pageSize, pageSize, unix.MADV_DONTNEED)
				}
				if !bytes.Equal(before, m.Bytes()) {
					t.Error("written while suspended")
				}
				moving.RUnlock()
				if err := r.Resume(); err != nil {
					t.Error(err)
					return
				}
				for w := writes.Load(); writes.Load() == w && !t.Failed(); {
					pause(60) // for the engines' turn
				}
			}
		}()
	}
	users.Wait()
	stop.Store(true)
	engines.Wait()
	if r.Suspended() || r.susp.count != 0 {
		t.Error("still suspended")
	}
}

// TestReplace: the content of other pages, holes included, stands in the place of the
// region's, whatever the memory of both; the other memory is absent afterwards.
func TestReplace(t *testing.T) {
	const n = 600 * pageSize // more than a chunk
	for _, k := range kinds {
		for _, source := range []string{"private", "shared", "registered"} {
			t.Run(k.name+"/"+source, func(t *testing.T) {
				s := newSpace(t, k.opts)
				tab, a := NewTable(s), accessor(t, s)
				m := alloc(t, n+2*pageSize, k.alloc...)
				var so []AllocOption
				if source == "shared" {
					so = []AllocOption{Shared()}
				}
				y := alloc(t, n, so...)
				r := register(t, tab, m.Addr()+100, n+pageSize, k.mod)
				if source == "registered" {
					register(t, tab, y.Addr(), n)
				}
				copy(m.Bytes(), pattern(n+2*pageSize, 1))
				want := make([]byte, n)
				for p := 0; p < 600; p += 1 + p%3 { // the others are absent
					copy(y.Bytes()[p*pageSize:], pattern(pageSize, byte(p)))
					copy(want[p*pageSize:], pattern(pageSize, byte(p)))
				}
				at := r.IOVA() - 100 + pageSize
				if err := r.Replace(at, n, y.Addr()); !errors.Is(err, ErrInvalid) {
					t.Errorf("replaced though it was not suspended: %v", err)
				}
				suspend(t, r)
				if err := r.Replace(at, n, y.Addr()); err != nil {
					t.Fatal(err)
				}
				resume(t, r)
				got := make([]byte, n)
				if err := a.Read(r, at, got); err != nil {
					t.Fatal(err)
				}
				same(t, "read by an engine", got, want)
				same(t, "read by the program", m.Bytes()[pageSize:pageSize+n], want)
				same(t, "before", m.Bytes()[:pageSize], pattern(n+2*pageSize, 1)[:pageSize])
				same(t, "behind", m.Bytes()[n+pageSize:], pattern(n+2*pageSize, 1)[n+pageSize:])
				if source != "shared" {
					same(t, "the source", y.Bytes(), make([]byte, n))
				}
				var st Stage
				if err := a.Write(&st, r, at+77, pattern(100_000, 2)); err != nil {
					t.Fatal(err)
				}
				if err := a.Flush(&st); err != nil {
					t.Fatal(err)
				}
				copy(want[77:], pattern(100_000, 2))
				same(t, "written afterwards", m.Bytes()[pageSize:pageSize+n], want)
			})
		}
	}
}

// TestReplaceMoves: pages move, where the kernel can: what was Y is X then, no copy of it.
func TestReplaceMoves(t *testing.T) {
	b := newBed(t, 64*pageSize)
	y := alloc(t, 64*pageSize)
	copy(y.Bytes(), pattern(64*pageSize, 3))
	b.put(t, 0, pattern(64*pageSize, 1))
	frames := func(p uintptr) (out [64]uint64) {
		if _, err := unix.Pread(b.s.pagemap, out8(&out), int64(p>>pageShift)*8); err != nil {
			t.Fatal(err)
		}
		for i := range out {
			out[i] &= 1<<55 - 1
		}
		return out
	}
	was := frames(y.Addr())
	if was[0] == 0 {
		t.Skip("page frame numbers are for the privileged")
	}
	suspend(t, b.r)
	if err := b.r.Replace(b.r.IOVA(), 64*pageSize, y.Addr()); err != nil {
		t.Fatal(err)
	}
	resume(t, b.r)
	if now := frames(b.m.Addr()); now != was {
		t.Errorf("pages were copied: frames %x, were %x", now[:4], was[:4])
	}
}

func out8(v *[64]uint64) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(v)), 64*8) }

// TestReplaceArguments: what cannot be is refused, and changes nothing.
func TestReplaceArguments(t *testing.T) {
	b := newBed(t, 8*pageSize)
	y := alloc(t, 8*pageSize)
	gap := room(t, 2*pageSize)
	if err := munmap(gap, 2*pageSize); err != nil {
		t.Fatal(err)
	}
	b.put(t, 0, pattern(8*pageSize, 1))
	at := b.r.IOVA()
	suspend(t, b.r)
	for _, c := range []struct {
		iova, n uint64
		with    uintptr
		want    error
	}{
		{at + 1, pageSize, y.Addr(), ErrInvalid},
		{at, pageSize - 1, y.Addr(), ErrInvalid},
		{at, pageSize, y.Addr() + 8, ErrInvalid},
		{at, 9 * pageSize, y.Addr(), ErrRange},
		{at - pageSize, pageSize, y.Addr(), ErrRange},
		{at, 2 * pageSize, b.m.Addr() + pageSize, ErrInvalid},
		{at, 2 * pageSize, gap, ErrUnmapped},
		{at, 2 * pageSize, ^uintptr(pageMask), ErrUnmapped},
	} {
		if err := b.r.Replace(c.iova, c.n, c.with); !errors.Is(err, c.want) {
			t.Errorf("%d bytes at %#x with %#x: %v, want %v", c.n, c.iova, c.with, err, c.want)
		}
	}
	if err := b.r.Replace(at, 0, y.Addr()); err != nil {
		t.Error(err)
	}
	resume(t, b.r)
	same(t, "untouched", b.m.Bytes(), pattern(8*pageSize, 1))
	b.r.Deregister()
	if err := b.r.Replace(at, pageSize, y.Addr()); err != ErrClosed {
		t.Error(err)
	}
}

// TestMoveTo: the region lies elsewhere, its keys and addresses are what they were, and so
// for windows and for what was staged; the old memory is the program's own again.
func TestMoveTo(t *testing.T) {
	const n = 16 * pageSize
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			s := newSpace(t, k.opts)
			tab, m, to, a := NewTable(s), alloc(t, n, k.alloc...), alloc(t, n, k.alloc...), accessor(t, s)
			r := register(t, tab, m.Addr()+8, n-8, k.mod)
			w := bind(t, tab, r, RemoteWrite|RemoteRead)
			key, iova, paging := r.LKey(), r.IOVA(), r.Paging()
			write := func(x *Region, off uint64, b []byte) {
				t.Helper()
				var st Stage
				if err := a.Write(&st, x, iova+off, b); err != nil {
					t.Fatal(err)
				}
				if err := a.Flush(&st); err != nil {
					t.Fatal(err)
				}
			}
			write(r, 0, pattern(1000, 1))
			var st Stage
			if err := a.Write(&st, w, iova+3*pageSize-20, pattern(900, 2)); err != nil {
				t.Fatal(err)
			}
			if err := r.MoveTo(to.Addr() + 8); !errors.Is(err, ErrInvalid) {
				t.Errorf("moved though it was not suspended: %v", err)
			}
			suspend(t, r)
			if err := r.MoveTo(to.Addr() + 16); !errors.Is(err, ErrInvalid) {
				t.Errorf("moved within the page: %v", err)
			}
			copy(to.Bytes(), m.Bytes())
			old := bytes.Clone(m.Bytes())
			if err := r.MoveTo(to.Addr() + 8); err != nil {
				t.Fatal(err)
			}
			if r.Addr() != to.Addr()+8 || r.IOVA() != iova || r.LKey() != key || r.Paging() != paging {
				t.Errorf("at %#x, iova %#x, key %#x, %v", r.Addr(), r.IOVA(), r.LKey(), r.Paging())
			}
			resume(t, r)
			staged := st.Active()
			if err := a.Flush(&st); err != nil {
				t.Fatal(err)
			}
			if staged { // otherwise it was written where the region was
				same(t, "staged", to.Bytes()[3*pageSize-12:][:900], pattern(900, 2))
				same(t, "the old place", m.Bytes(), old)
			}
			write(r, 5000, pattern(9000, 3))
			same(t, "written", to.Bytes()[5008:][:9000], pattern(9000, 3))
			write(w, 20000, pattern(9000, 2))
			same(t, "written by the window", to.Bytes()[20008:][:9000], pattern(9000, 2))
			same(t, "copied", to.Bytes()[8:1008], pattern(1000, 1))
			same(t, "the old place", m.Bytes(), old)
			if err := m.Close(); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, 1000)
			if err := a.Read(r, iova, got); err != nil {
				t.Fatal(err)
			}
			same(t, "read", got, pattern(1000, 1))
			if k.name == "pinned" {
				if kb := status(t, "VmLck"); kb != n>>10 {
					t.Errorf("%d KiB are locked", kb)
				}
			}
			// What changes the rest leaves the addresses.
			r2, err := r.Reregister(ChangeAccess, RegAttr{Access: LocalWrite | RemoteRead}, nil)
			if k.name != "pinned" && !errors.Is(err, ErrBound) && (r2.IOVA() != iova || r2.Addr() != to.Addr()+8) {
				t.Errorf("re-registered: iova %#x at %#x, %v", r2.IOVA(), r2.Addr(), err)
			}
		})
	}
}

// TestMoveToSamePlace: a suspended region takes over what was mapped in its place, which
// without that is gone for it.
func TestMoveToSamePlace(t *testing.T) {
	const n = 8 * pageSize
	b := newBed(t, n)
	b.put(t, 0, pattern(n, 1))
	for _, take := range []bool{false, true} {
		suspend(t, b.r)
		if _, err := mmapAt(b.m.Addr(), n, rw, unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
			t.Fatal(err)
		}
		b.m.Bytes()[5] = 7
		if take {
			if err := b.r.MoveTo(b.m.Addr()); err != nil {
				t.Fatal(err)
			}
		}
		resume(t, b.r)
		got := make([]byte, 10)
		err := b.a.Read(b.r, b.r.IOVA(), got)
		if take && (err != nil || got[5] != 7) || !take && err != ErrRemoved {
			t.Errorf("taken over %v: % x, %v", take, got, err)
		}
	}
	b.put(t, 100, pattern(20000, 2))
	same(t, "written", b.m.Bytes()[100:20100], pattern(20000, 2))
}

// TestMremap: the region goes where its memory goes while it is suspended, twice; not
// suspended, it stays without. Another region over the same memory stays without, too.
func TestMremap(t *testing.T) {
	const n = 16 * pageSize
	s := newSpace(t, Options{})
	tab, a := NewTable(s), accessor(t, s)
	from, to := room(t, n), []uintptr{room(t, n), room(t, n), room(t, n)}
	r := register(t, tab, from+50, n-100)
	w := bind(t, tab, r, RemoteWrite)
	other := register(t, tab, from, n)
	var st Stage
	put := func(x *Region, off uint64, b []byte) error {
		if err := a.Write(&st, x, r.IOVA()+off, b); err != nil {
			st.Drop()
			return err
		}
		return a.Flush(&st)
	}
	if err := put(r, 0, pattern(9000, 1)); err != nil {
		t.Fatal(err)
	}
	if err := a.Write(&st, r, r.IOVA()+8*pageSize, pattern(2000, 3)); err != nil || !st.Active() {
		t.Fatalf("staged: %v, %v", st.Active(), err)
	}
	var events []RegionEventKind
	stop := s.OnRegion(func(e RegionEvent) { events = append(events, e.Kind) })
	suspend(t, r)
	mremapTo(t, from, n, to[0])
	mremapTo(t, to[0], n, to[1])
	bytesOf(to[1], n)[50+12*pageSize] = 99 // the program touches it meanwhile
	resume(t, r)
	stop()
	if want := []RegionEventKind{RegionSuspended, RegionMoved, RegionResumed}; !slices.Equal(events, want) {
		t.Errorf("events %v, want %v", events, want)
	}
	if r.Addr() != to[1]+50 {
		t.Fatalf("the region is at %#x, its memory at %#x", r.Addr(), to[1]+50)
	}
	if err := a.Flush(&st); err != nil {
		t.Fatal(err)
	}
	mem := bytesOf(to[1]+50, n-100)
	same(t, "written before", mem[:9000], pattern(9000, 1))
	same(t, "staged before", mem[8*pageSize:][:2000], pattern(2000, 3))
	if mem[12*pageSize] != 99 {
		t.Error("what the program wrote is lost")
	}
	for i, x := range []*Region{r, w} {
		if err := put(x, uint64(3*pageSize+i*pageSize), pattern(5000, 2)); err != nil {
			t.Fatal(err)
		}
		same(t, "written", mem[3*pageSize+i*pageSize:][:5000], pattern(5000, 2))
	}
	// Userfaultfd pages it, as before.
	if err := madvise(to[1], n, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	handled := r.Stats().PageFaultsHandled
	if err := put(r, 0, pattern(9000, 1)); err != nil || r.Stats().PageFaultsHandled == handled {
		t.Errorf("%v, %d faults", err, r.Stats().PageFaultsHandled-handled)
	}
	if err := put(other, 0, []byte{1}); err != ErrRemoved {
		t.Errorf("a region that was not suspended: %v", err)
	}
	mremapTo(t, to[1], n, to[2])
	if err := put(r, 0, []byte{1}); err != ErrRemoved {
		t.Errorf("not suspended, but followed: %v", err)
	}
	if len(s.armed.segs) == 0 {
		t.Error("nothing is registered")
	}
	for _, x := range []*Region{other, r} {
		if err := x.Deregister(); !errors.Is(err, ErrBound) && err != nil {
			t.Fatal(err)
		}
	}
}

// TestMremapLost: memory that went where nobody can follow leaves the region suspended;
// MoveTo says where it is to be.
func TestMremapLost(t *testing.T) {
	const n = 4 * pageSize
	s := newSpace(t, Options{})
	tab, a := NewTable(s), accessor(t, s)
	from, to := room(t, n), room(t, n)
	r := register(t, tab, from, n)
	suspend(t, r)
	mremapTo(t, from, n, to)
	if err := munmap(to, n); err != nil {
		t.Fatal(err)
	}
	if err := r.Resume(); !errors.Is(err, ErrUnmapped) || !r.Suspended() {
		t.Fatalf("resumed, %v", err)
	}
	m := alloc(t, n)
	if err := r.MoveTo(m.Addr()); err != nil {
		t.Fatal(err)
	}
	resume(t, r)
	var st Stage
	if err := a.Write(&st, r, r.IOVA(), pattern(n, 1)); err != nil {
		t.Fatal(err)
	}
	if err := a.Flush(&st); err != nil {
		t.Fatal(err)
	}
	same(t, "written", m.Bytes(), pattern(n, 1))
}

// TestSuspendManyFollow: a thousand regions move at the same time, each to its own place.
func TestSuspendManyFollow(t *testing.T) {
	s := newSpace(t, Options{})
	tab, a := NewTable(s), accessor(t, s)
	const regions = 500
	base, away := room(t, 2*regions*pageSize), room(t, 2*regions*pageSize)
	var rs []*Region
	for round := range 2 { // the second time with slots that were in use
		for i := range regions {
			if round == 0 {
				rs = append(rs, register(t, tab, base+uintptr(2*i*pageSize), pageSize))
			}
			suspend(t, rs[i])
		}
		from, to := base, away
		if round == 1 {
			from, to = away, base
		}
		for i := range regions {
			mremapTo(t, from+uintptr(2*i*pageSize), pageSize, to+uintptr(2*(regions-1-i)*pageSize))
			if round == 1 {
				continue
			}
		}
		for i, r := range rs {
			resume(t, r)
			want := to + uintptr(2*(regions-1-i)*pageSize)
			if round == 1 {
				want = to + uintptr(2*i*pageSize)
			}
			if r.Addr() != want {
				t.Fatalf("region %d is at %#x, want %#x", i, r.Addr(), want)
			}
			var st Stage
			if err := a.Write(&st, r, r.IOVA(), []byte{byte(i), byte(round)}); err != nil {
				t.Fatal(err)
			}
			if err := a.Flush(&st); err != nil {
				t.Fatal(err)
			}
			if b := bytesOf(want, 2); b[0] != byte(i) || b[1] != byte(round) {
				t.Fatalf("region %d: % x", i, b)
			}
		}
	}
}

// TestEliminate: with windows bound and suspended or not, nothing gets through any more;
// overlapping regions live on; the handle ends with Deregister, once, and the memory is
// userfaultfd's no more.
func TestEliminate(t *testing.T) {
	for _, suspended := range []bool{false, true} {
		for _, k := range kinds {
			t.Run(fmt.Sprintf("%s/%v", k.name, suspended), func(t *testing.T) {
				s := newSpace(t, k.opts)
				tab, m, a := NewTable(s), alloc(t, 16*pageSize, k.alloc...), accessor(t, s)
				r := register(t, tab, m.Addr(), 16*pageSize, k.mod)
				other := register(t, tab, m.Addr()+8*pageSize, 8*pageSize, k.mod)
				w := bind(t, tab, r, RemoteWrite)
				wkey := w.RKey()
				var st Stage
				if err := a.Write(&st, r, r.IOVA()+10, pattern(100, 1)); err != nil {
					t.Fatal(err)
				}
				staged := st.Active()
				if suspended {
					suspend(t, r)
				}
				var events []RegionEvent
				defer s.OnRegion(func(e RegionEvent) { events = append(events, e) })()
				if err := r.Deregister(); err != ErrBound {
					t.Fatal(err)
				}
				if err := r.Eliminate(); err != nil {
					t.Fatal(err)
				}
				if len(events) != 1 || events[0] != (RegionEvent{r, RegionEliminated}) {
					t.Errorf("events %v", events)
				}
				if err := a.Flush(&st); staged && (err != ErrEliminated || st.Active()) {
					t.Errorf("flush of what was staged: %v", err)
				}
				for _, x := range []*Region{r, w} {
					if err := a.Write(&st, x, r.IOVA(), []byte{1}); err != ErrEliminated && err != ErrKey {
						t.Errorf("write: %v", err)
					}
				}
				if _, err := tab.CheckRemote(r.RKey(), 1, testQP, r.IOVA(), 1, 0); err != ErrKey {
					t.Errorf("key: %v", err)
				}
				if _, err := tab.CheckRemote(wkey, 1, testQP, r.IOVA(), 1, 0); err != ErrKey {
					t.Errorf("window's key: %v", err)
				}
				if r.Suspended() {
					t.Error("suspended")
				}
				for name, err := range map[string]error{"suspend": r.Suspend(), "resume": r.Resume(), "eliminate": r.Eliminate(),
					"move": r.MoveTo(m.Addr()), "replace": r.Replace(r.IOVA(), pageSize, m.Addr())} {
					if err != ErrClosed {
						t.Errorf("%s: %v", name, err)
					}
				}
				if _, err := r.Reregister(ChangeAccess, RegAttr{}, nil); err != ErrClosed {
					t.Error(err)
				}
				if err := a.Write(&st, other, other.IOVA()+3, pattern(5000, 2)); err != nil {
					t.Fatal(err)
				}
				if err := a.Flush(&st); err != nil {
					t.Fatal(err)
				}
				same(t, "the other region", m.Bytes()[8*pageSize+3:][:5000], pattern(5000, 2))
				if err := r.Deregister(); err != nil {
					t.Error(err)
				}
				if err := r.Deregister(); err != ErrClosed {
					t.Error(err)
				}
				if err := other.Deregister(); err != nil {
					t.Error(err)
				}
				if len(s.armed.segs)+len(s.locked.segs)+len(s.regions) != 0 {
					t.Errorf("left: %v %v", s.armed.segs, s.locked.segs)
				}
			})
		}
	}
}

// TestSuspendedEnds: a suspended region can be deregistered, which is told, and registered
// anew elsewhere, which stays suspended with all that was set.
func TestSuspendedEnds(t *testing.T) {
	b := newBed(t, 8*pageSize)
	to := alloc(t, 8*pageSize)
	var events []RegionEventKind
	defer b.s.OnRegion(func(e RegionEvent) { events = append(events, e.Kind) })()
	for _, bad := range []func() error{func() error { return b.r.SetSuspendMode(3, 0) }, func() error { return b.r.SetSuspendMode(0, -1) },
		func() error { return b.r.SetSuspendMode(0, time.Second) }, func() error { return b.r.SetHoldBuffer(-1) },
		func() error { return b.r.SetFaultPolicy(99) }} {
		if err := bad(); !errors.Is(err, ErrInvalid) {
			t.Error(err)
		}
	}
	if err := errors.Join(b.r.SetSuspendMode(SuspendHold, 5*time.Millisecond), b.r.SetHoldBuffer(100), b.r.SetFaultPolicy(FaultDrop)); err != nil {
		t.Fatal(err)
	}
	suspend(t, b.r)
	suspend(t, b.r)
	r, err := b.r.Reregister(ChangeTranslation, RegAttr{Addr: to.Addr(), Length: 8 * pageSize}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.a.Write(&b.st, r, r.IOVA(), []byte{1}); err != ErrSuspended {
		t.Error(err)
	}
	if m, d := r.SuspendMode(); m != SuspendHold || d != 5e6 || r.FaultPolicy() != FaultDrop {
		t.Errorf("%v, %d ns, %v", m, d, r.FaultPolicy())
	}
	if !r.Hold(60) || r.Hold(41) || !r.Hold(40) || r.Held() != 100 {
		t.Errorf("%d bytes held", r.Held())
	}
	r.Unhold(100)
	resume(t, r)
	resume(t, r)
	b.r = r
	b.put(t, 0, []byte{1})
	suspend(t, r)
	if err := r.Deregister(); err != nil {
		t.Fatal(err)
	}
	if err := b.a.Write(&b.st, r, r.IOVA(), []byte{1}); err != ErrKey || r.Suspended() {
		t.Errorf("%v, suspended %v", err, r.Suspended())
	}
	if err := r.Suspend(); err != ErrClosed {
		t.Error(err)
	}
	if want := []RegionEventKind{RegionSuspended, RegionResumed, RegionSuspended, RegionClosed}; !slices.Equal(events, want) {
		t.Errorf("events %v, want %v", events, want)
	}
}

// TestFaultPolicyNames: each policy's name is that policy.
func TestFaultPolicyNames(t *testing.T) {
	for p := range numFaultPolicies {
		if q, err := ParseFaultPolicy(p.String()); err != nil || q != p {
			t.Errorf("%v: %v, %v", p, q, err)
		}
	}
	if _, err := ParseFaultPolicy("none"); !errors.Is(err, ErrInvalid) {
		t.Error(err)
	}
	b := newBed(t, pageSize)
	if b.a.FaultPolicy(b.r) != FaultHybrid || !b.a.stalls(b.r, stallLimit) || b.a.stalls(b.r, stallLimit+1) {
		t.Error("hybrid")
	}
	b.a.Override(FaultStall)
	if !b.a.stalls(b.r, 1<<40) {
		t.Error("stall")
	}
	b.a.Override(FaultByRegion)
	if err := b.r.SetFaultPolicy(FaultRNR); err != nil || b.a.stalls(b.r, 0) {
		t.Error("rnr")
	}
}

// TestMremapThenEnd: memory that a suspended region has gone with is the kernel's again
// when the region ends without having been resumed.
func TestMremapThenEnd(t *testing.T) {
	const n = 4 * pageSize
	s := newSpace(t, Options{})
	for _, end := range []func(*Region) error{(*Region).Deregister, (*Region).Eliminate} {
		from, to := room(t, n), room(t, n)
		r := register(t, NewTable(s), from, n)
		suspend(t, r)
		mremapTo(t, from, n, to)
		if err := end(r); err != nil {
			t.Fatal(err)
		}
		before := s.Stats().AppFaults
		bytesOf(to, n)[pageSize] = 1
		if got := s.Stats().AppFaults; got != before {
			t.Error("userfaultfd still pages it")
		}
	}
}

// TestSuspendWaitsForSections: Suspend returns when who was inside a section has left it.
func TestSuspendWaitsForSections(t *testing.T) {
	b := newBed(t, pageSize)
	b.a.enter()
	done := make(chan error, 1)
	go func() { done <- b.r.Suspend() }()
	for !b.r.Suspended() {
		pause(60)
	}
	for i := range 2000 {
		if len(done) > 0 {
			t.Fatal("Suspend did not wait")
		}
		pause(i%50 + 50) // for its turn
	}
	b.a.exit()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}
