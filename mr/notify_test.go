// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// heard is what a notifier was told, with addresses in pages from a base.
type heard struct {
	base  uintptr
	mu    sync.Mutex
	calls []string
}

func (h *heard) add(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls = append(h.calls, fmt.Sprintf(format, args...))
}

func (h *heard) take() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := h.calls
	h.calls = nil
	return c
}

func (h *heard) ranges(name string) func(start, end uintptr) {
	return func(start, end uintptr) {
		h.add("%s %d-%d", name, int(start-h.base)>>pageShift, int(end-h.base)>>pageShift)
	}
}

func (h *heard) page(name string) func(addr uintptr) {
	return func(addr uintptr) { h.add("%s page %d", name, int(addr-h.base)>>pageShift) }
}

func (h *heard) notifier() *Notifier {
	return &Notifier{
		Release:   func() { h.add("release") },
		SyncRange: h.ranges("sync"), InvalidateRange: h.ranges("invalidate"), UpdateRange: h.ranges("update"),
		ChangeProtection: func(start, end uintptr, prot int) {
			h.add("protect %d-%d %d", int(start-h.base)>>pageShift, int(end-h.base)>>pageShift, prot)
		},
		SyncPage: h.page("sync"), InvalidatePage: h.page("invalidate"), UpdatePage: h.page("update"),
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestNotifier: each change calls the hooks that the table at Notifier says, in order,
// clipped to the notifier's range; nothing else does.
func TestNotifier(t *testing.T) {
	const pages = 32
	s := newSpace(t, Options{})
	tab, a := NewTable(s), accessor(t, s)
	base := apart(t, 2*pages*pageSize)
	at := func(page int) uintptr { return base + uintptr(page)*pageSize }
	r := register(t, tab, base, pages*pageSize)
	all, some := &heard{base: base}, &heard{base: base}
	stopAll := listen(t, s, all.notifier(), 0, 0)
	stopSome := listen(t, s, some.notifier(), at(4), at(6))
	defer stopAll()
	put := func(page int) error {
		var st Stage
		if err := a.Write(&st, r, uint64(at(page)), []byte{1}); err != nil {
			return err
		}
		return a.Flush(&st)
	}
	fixed := func(page, n int) error {
		_, err := mmapAt(at(page), n*pageSize, rw, unix.MAP_PRIVATE|unix.MAP_FIXED)
		return err
	}
	for _, c := range []struct {
		name      string
		change    func() error
		all, some []string
	}{
		{"fault", func() error { bytesOf(base, 1)[0] = 1; return put(1) }, nil, nil},
		{"dontneed", func() error { return madvise(at(0), 5*pageSize, unix.MADV_DONTNEED) }, []string{"invalidate 0-5"}, []string{"invalidate page 4"}},
		{"dontneed of a page", func() error { return madvise(at(1), pageSize, unix.MADV_DONTNEED) }, []string{"invalidate page 1"}, nil},
		{"fixed", func() error { return fixed(30, 2) }, []string{"invalidate 30-32"}, nil},
		{"mremap", func() error { mremapTo(t, at(28), 2*pageSize, at(pages)); return nil },
			[]string{"invalidate 28-30", "update 32-34", "invalidate 28-30"}, nil},
		{"munmap", func() error { return munmap(at(27), pageSize) }, []string{"invalidate page 27"}, nil},
		{"suspend", r.Suspend, []string{"sync 0-32", "invalidate 0-32"}, []string{"sync 4-6", "invalidate 4-6"}},
		{"suspend again", r.Suspend, nil, nil},
		{"replace", func() error {
			must(t, put2(at(40), 2))
			return r.Replace(r.IOVA()+4*pageSize, 2*pageSize, at(40))
		}, []string{"sync 40-42", "invalidate 40-42", "invalidate 4-6", "update 4-6"}, []string{"invalidate 4-6", "update 4-6"}},
		{"resume once", r.Resume, nil, nil},
		{"move", func() error {
			_, err := mmapAt(at(0), pages*pageSize, rw, unix.MAP_PRIVATE|unix.MAP_FIXED)
			must(t, err)
			s.SettleNotifiers()
			all.take()
			some.take()
			return r.MoveTo(at(pages))
		}, []string{"update 32-64"}, nil},
		{"move back", func() error { return r.MoveTo(base) }, []string{"update 0-32"}, []string{"update 4-6"}},
		{"resume", r.Resume, []string{"update 0-32"}, []string{"update 4-6"}},
		{"mprotect", func() error {
			must(t, put(9))
			must(t, unix.Mprotect(bytesOf(at(8), 4*pageSize), unix.PROT_READ))
			s.SettleNotifiers()
			if got := all.take(); got != nil {
				t.Errorf("told before an access: %v", got)
			}
			if err := put(9); err != ErrFault {
				t.Errorf("write: %v", err)
			}
			return nil
		}, []string{fmt.Sprintf("protect 8-12 %d", unix.PROT_READ)}, nil},
		{"a right too many", func() error {
			x, err := tab.Register(RegAttr{Addr: at(11), Length: 3 * pageSize, Access: LocalWrite})
			must(t, err)
			return x.Deregister()
		}, []string{fmt.Sprintf("protect 11-12 %d", unix.PROT_READ)}, nil},
		{"no right too many", func() error {
			x, err := tab.Register(RegAttr{Addr: at(11), Length: 3 * pageSize})
			must(t, err)
			return x.Deregister()
		}, nil, nil},
		{"unmapped", func() error {
			must(t, munmap(at(20), pageSize))
			if err := put(20); err != ErrRemoved {
				t.Errorf("write: %v", err)
			}
			return nil
		}, []string{"invalidate page 20"}, nil},
		{"announced", func() error {
			s.await(s.announce(KindEvict, uint64(at(5)), uint64(at(9))))
			if got := all.take(); len(got) != 2 {
				t.Errorf("heard %v when await returned", got)
			}
			s.bumpGeneration(KindEvict, uint64(at(5)), uint64(at(9)), 0)
			return nil
		}, nil, []string{"sync page 5", "invalidate page 5"}},
		{"eliminate", r.Eliminate, []string{"invalidate 0-32"}, []string{"invalidate 4-6"}},
		{"stopped", func() error {
			x, err := tab.Register(RegAttr{Addr: at(0), Length: 8 * pageSize})
			must(t, err)
			stopSome()
			must(t, madvise(at(4), 4*pageSize, unix.MADV_DONTNEED))
			return x.Deregister()
		}, []string{"invalidate 4-8"}, nil},
	} {
		must(t, c.change())
		s.SettleNotifiers()
		if got := all.take(); !reflect.DeepEqual(got, c.all) {
			t.Errorf("%s: heard %v, want %v", c.name, got, c.all)
		}
		if got := some.take(); !reflect.DeepEqual(got, c.some) {
			t.Errorf("%s, in a part: heard %v, want %v", c.name, got, c.some)
		}
	}
}

// put2 touches pages.
func put2(at uintptr, pages int) error {
	for i := range pages {
		bytesOf(at, pages*pageSize)[i*pageSize] = 1
	}
	return nil
}

// TestNotifierEviction: hooks hear of pages before they leave, by hand or over a budget,
// and can touch them; what would wait for the eviction that waits for the hook says so.
func TestNotifierEviction(t *testing.T) {
	const pages = 256
	b := evicting(t, pages, nil)
	b.put(t, 0, pattern(pages*pageSize, 1))
	var n int
	var busy, there error
	h := &heard{base: b.m.Addr()}
	nt := h.notifier()
	invalidate := nt.InvalidateRange
	nt.InvalidateRange = func(start, end uintptr) {
		invalidate(start, end)
		n += int(end-start) / pageSize
		_, busy = b.s.Evict(b.r, b.r.IOVA(), pageSize, Limbo)
		for _, err := range []error{b.s.SetBudget(MinBudget), b.r.SetBudget(MinBudget), b.s.SetStore(&memStore{})} {
			if err != ErrBusy {
				busy = err
			}
		}
		if b.s.state(uint64(start)) != pagePresent || *(*byte)(ptr(memory(uint64(start), 1))) == 0 {
			there = ErrRemoved
		}
	}
	defer listen(t, b.s, nt, 0, 0)()
	if got := b.evict(t, 8, 16, Limbo); got != 16 || busy != ErrBusy || there != nil {
		t.Errorf("%d pages, in the hook: evict %v, memory %v", got, busy, there)
	}
	if got, want := h.take(), []string{"sync 8-24", "invalidate 8-24"}; !reflect.DeepEqual(got, want) {
		t.Errorf("heard %v, want %v", got, want)
	}
	must(t, b.r.SetBudget(MinBudget))
	b.s.SettleNotifiers()
	if present := int(b.usage(t).Present) / pageSize; n < pages-present {
		t.Errorf("%d pages are in place, and %d left, as far as hooks know", present, n)
	}
	back := make([]byte, pages*pageSize)
	for at := 0; at < len(back); at += pageSize {
		err := ErrBusy
		for Postponed(err) {
			err = b.a.Read(b.r, b.r.IOVA()+uint64(at), back[at:at+pageSize])
		}
		must(t, err)
	}
	same(t, "evicted, and back", back, pattern(pages*pageSize, 1))
}

// TestNotifierErasedFirst: when a hook hears that a range is gone, no engine reaches it any
// more; when Suspend or await has returned, the hook has.
func TestNotifierErasedFirst(t *testing.T) {
	const n = 8 * pageSize
	s := newSpace(t, Options{})
	tab, a := NewTable(s), accessor(t, s)
	base := apart(t, n)
	r := register(t, tab, base, n)
	var err error
	var invalidated atomic.Int32
	stop := listen(t, s, &Notifier{InvalidateRange: func(start, end uintptr) {
		invalidated.Add(1)
		var st Stage
		if err = a.Write(&st, r, uint64(start), []byte{1}); err == nil {
			err = a.Flush(&st)
		}
		st.Drop()
	}}, base, base+n)
	defer stop()
	must(t, r.Suspend())
	if invalidated.Load() != 1 || err != ErrSuspended {
		t.Errorf("%d hooks when Suspend returned, the write in it: %v", invalidated.Load(), err)
	}
	must(t, r.Resume())
	must(t, munmap(base+pageSize, 2*pageSize))
	s.SettleNotifiers()
	if invalidated.Load() != 2 || err != ErrRemoved {
		t.Errorf("%d hooks after munmap, the write in it: %v", invalidated.Load(), err)
	}
}

// TestNotifierCallsBack: hooks may call what they like, even what calls hooks, and end
// notifiers, also their own; stop waits for a hook that runs.
func TestNotifierCallsBack(t *testing.T) {
	const n = 8 * pageSize
	s := newSpace(t, Options{})
	tab := NewTable(s)
	base := apart(t, 2*n)
	r, other := register(t, tab, base, n), register(t, tab, base+n, n)
	var h heard
	var stopOwn, stopNew func()
	busy, goOn := make(chan struct{}), make(chan struct{})
	stopOwn = listen(t, s, &Notifier{InvalidateRange: func(start, end uintptr) {
		h.add("one")
		if err := other.Suspend(); err != nil {
			t.Error(err)
		}
		if err := other.Resume(); err != nil {
			t.Error(err)
		}
		s.SettleNotifiers()
		x, err := tab.Register(RegAttr{Addr: start, Length: pageSize})
		if err != nil {
			t.Error(err)
		}
		if err := x.Deregister(); err != nil {
			t.Error(err)
		}
		stopOwn()
		stopNew = listen(t, s, &Notifier{InvalidateRange: func(start, end uintptr) { h.add("two"); close(busy); <-goOn }}, base, base+n)
	}}, base, base+n)
	must(t, r.Suspend())
	if got := h.take(); !reflect.DeepEqual(got, []string{"one"}) {
		t.Errorf("%v", got)
	}
	must(t, madvise(base, 2*pageSize, unix.MADV_DONTNEED))
	<-busy
	ended := make(chan struct{})
	go func() { stopNew(); close(ended) }()
	for range 100 {
		runtime.Gosched()
	}
	select {
	case <-ended:
		t.Error("stop has returned while the hook runs")
	default:
	}
	close(goOn)
	<-ended
	must(t, madvise(base, 2*pageSize, unix.MADV_DONTNEED))
	s.SettleNotifiers()
	stopNew() // again
	if got := h.take(); !reflect.DeepEqual(got, []string{"two"}) {
		t.Errorf("%v", got)
	}
	must(t, r.Resume())
	if s.listening().Load() != 0 {
		t.Error("nobody is left, and changes still wake somebody")
	}
}

// TestNotifierOverflow: who is told too late is told of everything, once.
func TestNotifierOverflow(t *testing.T) {
	s := newSpace(t, Options{})
	var h heard
	busy, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	n := h.notifier()
	n.SyncRange = func(start, end uintptr) { once.Do(func() { close(busy); <-goOn }) }
	defer listen(t, s, n, 0, 64*pageSize)()
	s.announce(KindEvict, 0, 2*pageSize)
	<-busy
	for range 5000 {
		s.bumpGeneration(KindUnmap, 0, 3*pageSize, 0)
	}
	close(goOn)
	s.SettleNotifiers()
	s.bumpGeneration(KindUnmap, 0, 4*pageSize, 0)
	s.SettleNotifiers()
	if got, want := h.take(), []string{"invalidate 0-2", "invalidate 0-64", "update 0-64", "invalidate 0-4"}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// listen is AddNotifier, which does not fail.
func listen(t *testing.T, s *Space, n *Notifier, start, end uintptr) (stop func()) {
	t.Helper()
	stop, err := s.AddNotifier(n, start, end)
	must(t, err)
	return stop
}

// TestNotifierWithoutDescriptor: without a file descriptor there is an error, and nothing
// is left of the attempt: the next finds one.
func TestNotifierWithoutDescriptor(t *testing.T) {
	s := newSpace(t, Options{})
	var h heard
	var had unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &had))
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: had.Max}))
	stop, err := s.AddNotifier(h.notifier(), 0, 0)
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &had))
	if stop != nil || !errors.Is(err, unix.EMFILE) {
		t.Fatalf("without descriptors: %v", err)
	}
	s.bumpGeneration(KindUnmap, 0, pageSize, 0)
	s.SettleNotifiers()
	defer listen(t, s, h.notifier(), 0, 0)()
	s.bumpGeneration(KindUnmap, 0, 2*pageSize, 0)
	s.SettleNotifiers()
	if got, want := h.take(), []string{"invalidate 0-2"}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestNotifierRelease: the end of a Space is told, last; goroutine and descriptor end.
func TestNotifierRelease(t *testing.T) {
	round := func() {
		s, err := NewSpace(Options{})
		must(t, err)
		var h heard
		listen(t, s, h.notifier(), 0, 0)
		listen(t, s, &Notifier{}, 0, 0)
		s.bumpGeneration(KindUnmap, 0, pageSize, 0)
		must(t, s.Close())
		if got, want := h.take(), []string{"invalidate page 0", "release"}; !reflect.DeepEqual(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
	round()
	fds, _, _ := holdings(t)
	goroutines := runtime.NumGoroutine()
	for range 20 {
		round()
	}
	// One that has just ended may still count.
	if f, _, _ := holdings(t); f > fds || runtime.NumGoroutine() >= goroutines+10 {
		t.Errorf("%d descriptors, then %d; %d goroutines, then %d", fds, f, goroutines, runtime.NumGoroutine())
	}
}
