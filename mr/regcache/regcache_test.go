// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"errors"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
)

// wants compares the counters that are not 0 in want, and those that must be.
func (b *bed) wants(what string, want Stats) {
	b.t.Helper()
	got := b.c.Stats()
	got.Resyncs, got.Overflows = 0, 0
	if got != want {
		b.t.Errorf("%s: %+v, want %+v", what, got, want)
	}
}

func TestLookup(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{})
	p := room(t, 0, 64*page)
	k := b.touch(p+100, 5000)
	b.wants("first", Stats{Misses: 1, Entries: 1, Bytes: 5000})
	if b.touch(p+100, 5000) != k || b.touch(p+101, 4999) != k || b.touch(p+100, 4999) != k || b.touch(p+3000, 1) != k {
		t.Error("not covered")
	}
	b.wants("covered", Stats{Hits: 1, Covered: 3, Misses: 1, Entries: 1, Bytes: 5000})
	if b.touch(p+99, 5000) == k || b.touch(p+101, 5000) == k {
		t.Error("covered outside")
	}
	b.wants("overlapping", Stats{Hits: 1, Covered: 3, Misses: 3, Entries: 3, Bytes: 15000})
	for _, bad := range []struct {
		addr uintptr
		n    uint64
		acc  mr.Access
	}{{p, 0, rights}, {p, 1 << 63, rights}, {p, ^uint64(0), 0}, {p, 8, mr.ZeroBased}, {p, 8, mr.RemoteWrite}} {
		if _, err := b.c.Get(bad.addr, bad.n, bad.acc); err == nil {
			t.Errorf("%+v was registered", bad)
		}
	}
	if _, err := b.c.Get(room(t, 1, page)+page, page, rights); !errors.Is(err, mr.ErrUnmapped) {
		t.Errorf("what is not mapped: %v", err)
	}
	if _, err := New(b.s, b.register, Options{Align: 3}); !errors.Is(err, mr.ErrInvalid) {
		t.Error(err)
	}
	b.c.Close()
	if _, err := b.c.Get(p, 1, rights); err != mr.ErrClosed {
		t.Errorf("closed: %v", err)
	}
}

// TestRights: a registration serves those who ask for fewer rights; one that has too few
// is replaced by one for all.
func TestRights(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{})
	p := room(t, 0, 16*page)
	get := func(acc mr.Access) mr.Key {
		e, err := b.c.Get(p, page, acc)
		if err != nil {
			t.Fatal(err)
		}
		defer b.c.Put(e)
		if have := e.Registration().Access(); have&acc&^hintsOnly != acc&^hintsOnly {
			t.Errorf("asked for %#x, got %#x", acc, have)
		}
		return e.RKey()
	}
	read := get(mr.RemoteRead)
	if get(0) != read || get(mr.RemoteRead|mr.OnDemand|mr.RelaxedOrdering) != read {
		t.Error("fewer rights, or none that count, registered anew")
	}
	write := get(mr.LocalWrite | mr.RemoteWrite)
	if write == read || get(mr.RemoteRead) != write || get(mr.RemoteRead|mr.LocalWrite|mr.RemoteWrite) != write {
		t.Error("rights are not joined")
	}
	b.wants("at the end", Stats{Hits: 4, Misses: 2, Entries: 1, Bytes: page})
	if b.live.Load() != 1 {
		t.Errorf("%d registrations", b.live.Load())
	}
}

// TestPages: a registration that has lost a page serves what it still has; what asks for
// that page gets another, and who uses the old keeps it.
func TestPages(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{})
	a := b.s.NewAccessor()
	defer a.Close()
	p := room(t, 0, 64*page)
	e := b.get(p, 64*page)
	mmap(t, p+10*page, page, unix.MAP_FIXED)
	if k := b.touch(p, 10*page); k != e.RKey() {
		t.Error("pages before it are not served any more")
	}
	if k := b.touch(p+11*page, page); k != e.RKey() {
		t.Error("pages behind it are not served any more")
	}
	x := b.get(p+10*page+5, 10)
	if x == e {
		t.Fatal("a key that does not reach it")
	}
	b.wants("one page", Stats{Covered: 2, Misses: 2, Invalidated: 1, Entries: 2, Bytes: 64*page + 10, InUse: 2})
	for _, c := range []struct {
		k    mr.Key
		at   uintptr
		want error
	}{{e.RKey(), p + 9*page, nil}, {e.RKey(), p + 10*page + 5, mr.ErrRemoved}, {x.RKey(), p + 10*page + 5, nil}} {
		if err := b.reaches(a, c.k, c.at, []byte("page by page")[:10]); err != c.want {
			t.Errorf("page %d: %v, want %v", (c.at-p)/page, err, c.want)
		}
	}
	if b.touch(p+9*page, 2*page) == e.RKey() {
		t.Error("served across the page that is lost")
	}
	// All of it, piece by piece.
	mmap(t, p, 32*page, unix.MAP_FIXED)
	mmap(t, p+32*page, 32*page, unix.MAP_FIXED)
	b.c.Resync()
	b.wants("all", Stats{Covered: 2, Misses: 3, Invalidated: 5, InUse: 0})
	if b.live.Load() != 2 {
		t.Errorf("%d are registered; two are in use", b.live.Load())
	}
	if b.touch(p+3, 30) == e.RKey() {
		t.Error("a stale key")
	}
	b.c.Put(e)
	b.c.Put(x)
	if b.live.Load() != 1 {
		t.Errorf("%d are registered", b.live.Load())
	}
}

// TestManyHoles: too many of them are the end of an entry.
func TestManyHoles(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{})
	p := room(t, 0, 3*maxHoles*page)
	k := b.touch(p, 3*maxHoles*page)
	for i := range maxHoles {
		mmap(t, p+uintptr((2*i+1)*page), page, unix.MAP_FIXED)
	}
	if b.touch(p, page) != k {
		t.Error("given up too early")
	}
	mmap(t, p+uintptr(2*maxHoles+1)*page, page, unix.MAP_FIXED)
	if b.touch(p, page) == k {
		t.Error("not given up")
	}
}

// TestNotInvalid: what does not change where addresses lead leaves registrations alone.
func TestNotInvalid(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{})
	a := b.s.NewAccessor()
	defer a.Close()
	p := room(t, 0, 32*page)
	e := b.get(p, 16*page)
	defer b.c.Put(e)
	for i, change := range []func(){
		func() { memory(p, page)[5] = 1 },
		func() { _ = unix.Madvise(memory(p, 2*page), unix.MADV_DONTNEED) },
		func() { _ = e.Registration().Suspend() },
		func() { _ = e.Registration().Replace(uint64(p), page, p+20*page) },
		func() { _ = e.Registration().Resume() },
	} {
		change()
		if k := b.touch(p, 16*page); k != e.RKey() {
			t.Fatalf("change %d", i)
		}
	}
	if err := b.reaches(a, e.RKey(), p+5, []byte("still there")); err != nil {
		t.Error(err)
	}
	if st := b.c.Stats(); st.Invalidated != 0 || st.Resyncs == 0 {
		t.Errorf("%+v", st)
	}
}

// TestElsewhere: regions that were moved or eliminated are not handed out any more, also
// when the journal does not say so.
func TestElsewhere(t *testing.T) {
	for _, overflow := range []bool{false, true} {
		for name, change := range map[string]func(r *region, to uintptr) error{
			"moved": func(r *region, to uintptr) error {
				return errors.Join(r.Suspend(), r.MoveTo(to), r.Resume())
			},
			"followed": func(r *region, to uintptr) error {
				err := r.Suspend()
				mremap(t, r.Addr(), 4*page, to)
				return errors.Join(err, r.Resume())
			},
			"eliminated": func(r *region, _ uintptr) error { return r.Eliminate() },
			"remapped": func(r *region, to uintptr) error {
				mremap(t, r.Addr(), 4*page, to)
				return nil
			},
			"unmapped": func(r *region, _ uintptr) error {
				munmap(t, r.Addr(), 4*page)
				return nil
			},
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, mr.Options{}, Options{})
				a := b.s.NewAccessor()
				defer a.Close()
				p, other, to := room(t, 0, 4*page), room(t, 1, 4*page), room(t, 2, 4*page)
				keep, there := b.touch(other, 4*page), b.touch(to, 4*page)
				e := b.get(p, 4*page)
				if err := change(e.Registration(), to); err != nil {
					t.Fatal(err)
				}
				if overflow {
					b.flood()
				}
				mmap(t, p, 4*page, unix.MAP_FIXED)
				k := b.touch(p, 4*page)
				if k == e.RKey() {
					t.Error("handed out again")
				}
				if err := b.reaches(a, k, p+10, []byte("here")); err != nil {
					t.Error(err)
				}
				if err := b.reaches(a, b.touch(to, 4*page), to+10, []byte("there")); err != nil {
					t.Error(err)
				}
				if b.touch(other, 4*page) != keep {
					t.Error("so is the other")
				}
				if (name == "eliminated" || name == "unmapped" || name == "moved") && b.touch(to, 4*page) != there {
					t.Error("what lies where it went is not handed out any more")
				}
				if (b.c.Stats().Overflows > 0) != overflow {
					t.Errorf("%+v", b.c.Stats())
				}
				b.c.Put(e)
			})
		}
	}
}

// flood has more changes happen than the journal holds.
func (b *bed) flood() {
	p := room(b.t, 9, page)
	r, err := b.register(p, page, rights)
	if err != nil {
		b.t.Fatal(err)
	}
	for at := b.s.LastChange(); b.s.LastChange() < at+5000; {
		if err := unix.Madvise(memory(p, page), unix.MADV_DONTNEED); err != nil {
			b.t.Fatal(err)
		}
	}
	if err := r.Dereg(); err != nil {
		b.t.Fatal(err)
	}
}

// TestOverflow: after an overflow entries lose what they have lost, and no more.
func TestOverflow(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{})
	p := room(t, 0, 64*page)
	k, k2 := b.touch(p, 32*page), b.touch(p+32*page, 32*page)
	mmap(t, p+7*page, page, unix.MAP_FIXED)
	mmap(t, p+32*page, 32*page, unix.MAP_FIXED)
	b.flood()
	if b.touch(p, 7*page) != k || b.touch(p+8*page, 24*page) != k {
		t.Error("lost too much")
	}
	if b.touch(p+7*page, 1) == k || b.touch(p+32*page, 1) == k2 {
		t.Error("a stale key")
	}
	if st := b.c.Stats(); st.Overflows != 1 || st.Invalidated != 2 {
		t.Errorf("%+v", st)
	}
}

func TestBounds(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{MaxEntries: 3, MaxBytes: 100 * page})
	p := room(t, 0, 256*page)
	at := func(i int) uintptr { return p + uintptr(i)*page }
	ks := []mr.Key{b.touch(at(0), page), b.touch(at(1), page), b.touch(at(2), page)}
	b.touch(at(0), page)
	b.touch(at(3), page)
	b.wants("three", Stats{Hits: 1, Misses: 4, Evicted: 1, Entries: 3, Bytes: 3 * page})
	if b.touch(at(0), page) != ks[0] || b.touch(at(2), page) != ks[2] {
		t.Error("the wrong one went")
	}
	if b.touch(at(1), page) == ks[1] {
		t.Error("what was used least is still there")
	}
	// Bytes; what is in use stays, whatever it takes.
	big := b.get(at(100), 90*page)
	b.touch(at(4), 11*page)
	if b.touch(at(100), 90*page) != big.RKey() {
		t.Error("in use, and gone")
	}
	var es []*Entry[*region]
	for i := range 6 {
		es = append(es, b.get(at(20+i), page))
	}
	if st := b.c.Stats(); st.InUse != 7 || st.Entries < 7 {
		t.Errorf("%+v", st)
	}
	for _, e := range append(es, big) {
		b.c.Put(e)
	}
	if st := b.c.Stats(); st.Entries != 3 || b.live.Load() != 3 {
		t.Errorf("%+v, %d registered", st, b.live.Load())
	}
}

func TestPutTwice(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{})
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	b.c.Put(new(Entry[*region]))
}

// TestNoRoom: when no more can be registered, what nobody uses goes.
func TestNoRoom(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{})
	p := room(t, 0, 16*page)
	e := b.get(p, page)
	b.touch(p+2*page, page)
	b.fail = mr.ErrNoMem
	b.touch(p+4*page, page)
	if st := b.c.Stats(); st.Evicted != 1 || st.Entries != 2 || b.live.Load() != 2 {
		t.Errorf("%+v", st)
	}
	b.c.Put(e)
}

// TestNoRoomForHint: a hinted area for which there is no room does not cost what there is.
func TestNoRoomForHint(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{})
	p := room(t, 0, 64*page)
	b.touch(p, page)
	if err := b.c.Hint(p+16*page, 48*page, rights); err != nil {
		t.Fatal(err)
	}
	b.fail = mr.ErrNoMem
	b.touch(p+20*page, page)
	b.wants("no room for the area", Stats{Misses: 2, Entries: 2, Bytes: 2 * page})
}

// TestHint: one registration of a hinted area serves what lies in it, again so after a
// part of it was mapped anew; without all of it mapped, each is for itself.
func TestHint(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{})
	p := room(t, 0, 1024*page)
	if err := b.c.Hint(p, 0, rights); !errors.Is(err, mr.ErrInvalid) {
		t.Error(err)
	}
	if err := b.c.Hint(p, 1024*page, rights); err != nil {
		t.Fatal(err)
	}
	k := b.touch(p+5, 10)
	for i := range 100 {
		if b.touch(p+uintptr(i*10*page+i), 300) != k {
			t.Fatal("not served by the hinted area")
		}
	}
	b.wants("hinted", Stats{Covered: 100, Misses: 1, Entries: 1, Bytes: 1024 * page})
	mmap(t, p+500*page, page, unix.MAP_FIXED)
	if b.touch(p, 100) != k {
		t.Error("one page too much")
	}
	again := b.touch(p+500*page, 8)
	if again == k || b.touch(p, 100) != again {
		t.Error("not served by the area as it is now")
	}
	b.wants("again", Stats{Covered: 102, Misses: 2, Invalidated: 1, Entries: 1, Bytes: 1024 * page})
	munmap(t, p+700*page, page)
	if b.touch(p, 8) != again {
		t.Error("one page too much")
	}
	mmap(t, p+800*page, page, unix.MAP_FIXED)
	if e := b.get(p+800*page, 8); e.Length() != 8 {
		t.Errorf("%d bytes, with a page in the area that is not mapped", e.Length())
	} else {
		b.c.Put(e)
	}
	if !b.c.Unhint(p, 1024*page) || b.c.Unhint(p, 1024*page) {
		t.Error("unhint")
	}
	mmap(t, p+700*page, page, unix.MAP_FIXED)
}

func TestAlign(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{Align: 4 * page})
	p := room(t, 0, 18*page)
	if k := b.touch(p+10, 10); b.touch(p+3*page, page) != k || b.touch(p+4*page, 1) == k {
		t.Error("not aligned")
	}
	if e := b.get(p+17*page, page); e.Length() != page {
		t.Errorf("%d bytes at the end of the mapping", e.Length())
	} else {
		b.c.Put(e)
	}
}

// TestUnfollowed: without events each lookup registers; the Go heap, which is never mapped
// anew, needs none.
func TestUnfollowed(t *testing.T) {
	b := newBed(t, mr.Options{NoUserFault: true}, Options{})
	p := room(t, 0, 4*page)
	e := b.get(p, page)
	if b.live.Load() != 1 {
		t.Error("not registered")
	}
	b.c.Put(e)
	if b.live.Load() != 0 {
		t.Error("still registered")
	}
	b.touch(p, page)
	b.wants("mapped", Stats{Misses: 2, Uncached: 2})
	heap := new([4 * page]byte)
	if k := b.touch(uintptr(ptr(heap)), len(heap)); b.touch(uintptr(ptr(heap))+3, 5) != k {
		t.Error("the heap is not cached")
	}
	b.wants("heap", Stats{Covered: 1, Misses: 3, Uncached: 2, Entries: 1, Bytes: 4 * page})
	runtime.KeepAlive(heap)
}

// TestFlush: nothing is kept, and what is in use is deregistered when it is put back.
func TestFlush(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{})
	p := room(t, 0, 8*page)
	e := b.get(p, page)
	b.touch(p+2*page, page)
	b.c.Flush()
	if b.live.Load() != 1 {
		t.Errorf("%d registered", b.live.Load())
	}
	if b.touch(p, page) == e.RKey() {
		t.Error("handed out again")
	}
	b.c.Put(e)
	if b.live.Load() != 1 {
		t.Errorf("%d registered", b.live.Load())
	}
}

// TestConcurrent: many goroutines share entries that come and go.
func TestConcurrent(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{MaxEntries: 8})
	p := room(t, 0, 64*page)
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			a := b.s.NewAccessor()
			defer a.Close()
			for i := range 2000 {
				at := p + uintptr((i*7+g*13)%60)*page
				e, err := b.c.Get(at, page+uint64(i%3)*page, rights)
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := b.tab.CheckRemote(e.RKey(), 1, 7, uint64(at), page, mr.RemoteWrite); err != nil {
					t.Errorf("an entry in use: %v", err)
				}
				b.c.Put(e)
			}
		})
	}
	all.Wait()
	st := b.c.Stats()
	if st.Hits+st.Covered+st.Misses != 16000 || st.InUse != 0 || st.Entries != 8 || b.live.Load() != 8 {
		t.Errorf("%+v, %d registered", st, b.live.Load())
	}
}
