// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// overshoot is how many pages a budget may be exceeded by with one engine: what it
// places at a time, and what the application's threads touch while they are held up.
const overshoot = 2*stagePages + 16

// within fails if more is in memory than the budget says.
func (b *bed) within(t testing.TB, budget int) {
	t.Helper()
	if n := b.s.tally([]span{b.r.pages}); n.present+n.limbo > uint64(budget/pageSize+overshoot) {
		t.Fatalf("%d pages are present and %d in limbo, with a budget of %d", n.present, n.limbo, budget/pageSize)
	}
	in, err := b.r.Present()
	if err != nil {
		t.Fatal(err)
	}
	if in > uint64(budget+overshoot*pageSize) {
		t.Fatalf("mincore: %d pages are present, with a budget of %d", in/pageSize, budget/pageSize)
	}
}

// waitIn tries what may say ErrBusy or ErrMajor for as long as it does.
func waitIn(t testing.TB, f func() error) {
	t.Helper()
	for until := time.Now().Add(2 * time.Minute); ; {
		err := f()
		if err == nil {
			return
		}
		if !Postponed(err) || time.Now().After(until) {
			t.Fatal(err)
		}
		runtime.Gosched()
	}
}

// TestBudget: four times as much as a budget allows is written and read, by requests and
// the application, and the budget is kept at each step, whoever sets it.
func TestBudget(t *testing.T) {
	const pages, budget = 4096, 1024 * pageSize
	for name, set := range map[string]func(b *bed, n uint64) error{
		"region":  func(b *bed, n uint64) error { return b.r.SetBudget(n) },
		"pd":      func(b *bed, n uint64) error { return b.tab.SetBudget(1, n) },
		"process": func(b *bed, n uint64) error { return b.s.SetBudget(n) },
	} {
		t.Run(name, func(t *testing.T) {
			b := evicting(t, pages, nil)
			b.a.Override(FaultStall)
			want := pattern(pages*pageSize, 9)
			copy(b.m.Bytes()[:2000*pageSize], want) // too much to begin with
			if err := set(b, budget); err != nil {
				t.Fatal(err)
			}
			b.within(t, budget)
			for at := 0; at < len(want); at += 3 * pageSize / 2 {
				src := want[at:min(at+3*pageSize/2, len(want))]
				waitIn(t, func() error { return b.a.Write(&b.st, b.r, b.r.IOVA()+uint64(at), src) })
				waitIn(t, func() error { return b.a.Flush(&b.st) })
				if at%(64*pageSize) == 0 {
					b.within(t, budget)
				}
			}
			got := make([]byte, 8*pageSize)
			for at := 0; at < len(want); at += len(got) {
				waitIn(t, func() error { return b.a.Read(b.r, b.r.IOVA()+uint64(at), got) })
				same(t, "read", got, want[at:at+len(got)])
				b.within(t, budget)
			}
			for at := 0; at < len(want); at += 8 * pageSize {
				same(t, "touch", b.m.Bytes()[at:at+8*pageSize], want[at:at+8*pageSize])
				b.within(t, budget)
			}
			u := b.usage(t)
			if u.Stored == 0 || u.Evictions == 0 || u.FaultsMajor == 0 || u.AppFaultsMajor == 0 || u.FaultNs == 0 {
				t.Errorf("usage: %+v", u)
			}
			if err := set(b, 0); err != nil {
				t.Fatal(err)
			}
			same(t, "without a budget", b.m.Bytes(), want)
			b.where(t, pages, 0, 0)
		})
	}
}

// TestBudgetBounds: what cannot be a budget.
func TestBudgetBounds(t *testing.T) {
	b := evicting(t, 16, nil)
	if err := b.r.SetBudget(MinBudget - 1); !errors.Is(err, ErrInvalid) {
		t.Errorf("less than the least: %v", err)
	}
	if err := b.s.SetStore(&memStore{}); !errors.Is(err, ErrBusy) {
		t.Errorf("another store: %v", err)
	}
	if err := b.r.Deregister(); err != nil {
		t.Fatal(err)
	}
	if err := b.r.SetBudget(MinBudget); err != ErrClosed {
		t.Errorf("of a region that is gone: %v", err)
	}
	if _, err := b.s.Evict(b.r, b.r.IOVA(), 1, Limbo); err != ErrClosed {
		t.Errorf("evict of a region that is gone: %v", err)
	}
}

// TestBudgetIsInherited: a region that is registered elsewhere keeps its budget, unless it
// is given another.
func TestBudgetIsInherited(t *testing.T) {
	for _, other := range []int64{-1, 0, 256} { // pages
		b := evicting(t, 1024, nil)
		b.a.Override(FaultStall)
		mem := alloc(t, 1024*pageSize)
		if err := b.r.SetBudget(128 * pageSize); err != nil {
			t.Fatal(err)
		}
		r, err := b.r.Reregister(ChangeTranslation, RegAttr{PD: 1, Addr: mem.Addr(), Length: 1024 * pageSize}, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = r.Deregister() })
		want := uint64(128)
		if other >= 0 {
			want = uint64(other)
			if err := r.SetBudget(want * pageSize); err != nil {
				t.Fatal(err)
			}
		}
		// A few pages at a time: what is tried again begins anew, and earlier pages leave.
		data := pattern(16*pageSize, 3)
		for at := uint64(0); at < 1024*pageSize; at += uint64(len(data)) {
			waitIn(t, func() error { return b.a.Write(&b.st, r, r.IOVA()+at, data) })
			waitIn(t, func() error { return b.a.Flush(&b.st) })
		}
		b.s.ev.mu.Lock()
		b.s.enforce()
		b.s.ev.mu.Unlock()
		u, err := r.Usage()
		if err != nil || u.Budget != want*pageSize {
			t.Errorf("%d: budget %d, %v", other, u.Budget, err)
		}
		if in := (u.Present + u.Limbo) / pageSize; want > 0 && in > want+overshoot || want == 0 && in != 1024 {
			t.Errorf("%d: %d pages in memory", other, in)
		}
	}
}

// TestBudgetsOfATable: those of protection domains end with their table, and can be read.
func TestBudgetsOfATable(t *testing.T) {
	b := evicting(t, 256, nil)
	if err := b.tab.SetBudget(1, 64*pageSize); err != nil {
		t.Fatal(err)
	}
	other := register(t, b.tab, alloc(t, pageSize).Addr(), pageSize, func(a *RegAttr) { a.PD = 2 })
	if u, err := b.tab.Usage(1); err != nil || u.Size != 256*pageSize || u.Budget != 64*pageSize {
		t.Errorf("%+v, %v", u, err)
	}
	if u, err := b.tab.Usage(other.PD()); err != nil || u.Size != pageSize || u.Budget != 0 {
		t.Errorf("the other domain's: %+v, %v", u, err)
	}
	if err := b.tab.DropBudgets(); err != nil {
		t.Fatal(err)
	}
	if u, _ := b.tab.Usage(1); u.Budget != 0 || b.s.ev.budgets.watched() {
		t.Errorf("budget %d, watched %v", u.Budget, b.s.ev.budgets.watched())
	}
}

// TestStoreOutlivesFailure: the store that was chosen is the one that is used, although there
// was no room for eviction at first.
func TestStoreOutlivesFailure(t *testing.T) {
	s := newSpace(t, Options{})
	st := &memStore{}
	if err := s.SetStore(st); err != nil {
		t.Fatal(err)
	}
	b := newBedIn(t, s, 16*pageSize)
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	_, err := s.Evict(b.r, b.r.IOVA(), pageSize, Stored)
	if e := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); e != nil {
		t.Fatal(e)
	}
	switch {
	case errors.Is(err, ErrNotSupported):
		t.Skip(err)
	case err == nil:
		t.Fatal("there was room")
	}
	want := pattern(16*pageSize, 5)
	b.put(t, 0, want)
	if n := b.evict(t, 0, 16, Stored); n != 16 {
		t.Errorf("%d pages evicted", n)
	}
	if s.ev.store.st != Store(st) {
		t.Errorf("the store is %T", s.ev.store.st)
	}
	b.a.Override(FaultStall)
	same(t, "read", b.get(t, 0, len(want)), want)
}

// TestStoreFailsToWrite: what is in limbo stays, eviction says why it has stopped, and
// requests go on beyond the budget.
func TestStoreFailsToWrite(t *testing.T) {
	st := &failingStore{}
	b := evicting(t, 1024, st)
	b.a.Override(FaultStall)
	st.failWrites.Store(true)
	told := make(chan error, 2)
	defer b.s.OnEvictionStopped(func(err error) { told <- err })()
	want := pattern(1024*pageSize, 2)
	if err := b.r.SetBudget(128 * pageSize); err != nil {
		t.Fatal(err)
	}
	waitIn(t, func() error { return b.a.Write(&b.st, b.r, b.r.IOVA(), want) })
	waitIn(t, func() error { return b.a.Flush(&b.st) })
	if err := <-told; !errors.Is(err, errStoreTest) || !errors.Is(b.s.EvictionStopped(), errStoreTest) {
		t.Errorf("told %v, says %v", err, b.s.EvictionStopped())
	}
	if n, err := b.s.Evict(b.r, b.r.IOVA(), pageSize, Stored); n != 0 || !errors.Is(err, errStoreTest) {
		t.Errorf("by hand: %d pages, %v", n, err)
	}
	if u := b.usage(t); u.Stored != 0 {
		t.Errorf("%d bytes stored", u.Stored)
	}
	same(t, "read", b.get(t, 0, len(want)), want)
	same(t, "touch", b.m.Bytes(), want)
}

// TestStoreFailsToRead: requests get an error, the application a fault, nobody other bytes.
func TestStoreFailsToRead(t *testing.T) {
	for name, touch := range map[string]func(b *bed) error{
		"read": func(b *bed) error {
			return b.a.Read(b.r, b.r.IOVA()+3*pageSize, make([]byte, 10))
		},
		"write a part": func(b *bed) error {
			if err := b.a.Write(&b.st, b.r, b.r.IOVA()+3*pageSize+7, []byte("part")); err != nil {
				return err
			}
			return b.a.Flush(&b.st)
		},
		"atomic": func(b *bed) error {
			_, err := b.a.Atomic(b.r, b.r.IOVA()+3*pageSize, FetchAdd, 0, 1)
			return err
		},
		"prefetch": func(b *bed) error { return b.s.Prefetch(b.r, b.r.IOVA(), 8*pageSize, Prefetch) },
	} {
		t.Run(name, func(t *testing.T) {
			st := &failingStore{}
			b := evicting(t, 16, st)
			b.a.Override(FaultStall)
			want := pattern(16*pageSize, 2)
			b.put(t, 0, want)
			if n := b.evict(t, 0, 16, Stored); n != 16 {
				t.Fatalf("%d pages went", n)
			}
			same(t, "before", b.get(t, 0, 3*pageSize), want[:3*pageSize])
			st.failReads.Store(true)
			if err := touch(b); err != ErrPoisoned {
				t.Fatalf("%v", err)
			}
			st.failReads.Store(false)
			if err := b.a.Read(b.r, b.r.IOVA()+3*pageSize, make([]byte, 10)); err != ErrPoisoned {
				t.Errorf("again: %v", err)
			}
			if n, err := unix.Write(pipeEnd(t), b.m.Bytes()[3*pageSize:4*pageSize]); err != unix.EFAULT && err != unix.EHWPOISON {
				t.Errorf("write(2) from it: %d, %v", n, err)
			}
			same(t, "behind", b.get(t, 4*pageSize, 4*pageSize), want[4*pageSize:8*pageSize])
			// Dropped, it is a page like any.
			if err := madvise(b.m.Addr()+3*pageSize, pageSize, unix.MADV_DONTNEED); err != nil {
				t.Fatal(err)
			}
			same(t, "dropped", b.get(t, 3*pageSize, pageSize), make([]byte, pageSize))
		})
	}
}

// TestApplicationMeetsPoison: the pager cannot read, and the application finds out.
func TestApplicationMeetsPoison(t *testing.T) {
	st := &failingStore{}
	b := evicting(t, 16, st)
	b.put(t, 0, pattern(16*pageSize, 2))
	b.evict(t, 0, 16, Stored)
	st.failReads.Store(true)
	defer letTouch()()
	if n, err := unix.Write(pipeEnd(t), b.m.Bytes()[:pageSize]); err != unix.EFAULT && err != unix.EHWPOISON {
		t.Errorf("write(2) from it: %d, %v", n, err)
	}
	if err := guardedCopy(make([]byte, 8), memory(uint64(b.m.Addr())+pageSize, 8)); err != ErrFault {
		t.Errorf("touch: %v", err)
	}
}

// letTouch is for goroutines that touch what only Go code can read from the store: they keep
// their scheduler slot meanwhile, so there has to be another, and no garbage collection may
// wait for them. It gives what ends that.
func letTouch() (end func()) {
	procs, gc := runtime.GOMAXPROCS(0), debug.SetGCPercent(-1)
	runtime.GC() // one that is under way is over then
	runtime.GOMAXPROCS(max(procs, 2))
	return func() {
		runtime.GOMAXPROCS(procs)
		debug.SetGCPercent(gc)
	}
}

func pipeEnd(t testing.TB) int {
	t.Helper()
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(p[0]); unix.Close(p[1]) })
	return p[1]
}

// TestFaultPolicies: who waits for a store that takes its time, and who is told to.
func TestFaultPolicies(t *testing.T) {
	for _, p := range []FaultPolicy{FaultHybrid, FaultStall, FaultRNR, FaultDrop, FaultError} {
		t.Run(p.String(), func(t *testing.T) {
			st := newSlowStore()
			b := evicting(t, 16, st)
			want := pattern(16*pageSize, 2)
			b.put(t, 0, want)
			go func() {
				for range 16 {
					st.gate <- struct{}{}
				}
			}()
			b.evict(t, 0, 16, Stored)
			if err := b.r.SetFaultPolicy(p); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, pageSize)
			if p == FaultStall {
				go func() { st.gate <- struct{}{} }()
				if err := b.a.Read(b.r, b.r.IOVA(), buf); err != nil {
					t.Fatal(err)
				}
			} else {
				if err := b.a.Read(b.r, b.r.IOVA(), buf); err != ErrMajor || b.a.Blocked() != b.r {
					t.Fatalf("read: %v, about %v", err, b.a.Blocked())
				}
				close(st.gate)
				waitIn(t, func() error { return b.a.Read(b.r, b.r.IOVA(), buf) })
			}
			same(t, "read", buf, want[:pageSize])
			if p == FaultStall {
				close(st.gate)
			}
			if b.s.FetchDelay() <= 0 {
				t.Errorf("fetch delay %d", b.s.FetchDelay())
			}
		})
	}
}

// TestEvictionModel: requests, the application's threads, system calls, eviction to both
// levels, dropped and moved memory and the garbage collector, all at once, on cells of
// which a model knows each byte.
func TestEvictionModel(t *testing.T) {
	for _, k := range []struct {
		name string
		make func() (Store, error)
	}{
		{"file", func() (Store, error) { return NewFileStore(t.TempDir()) }},
		{"compressed", NewCompressedStore},
	} {
		t.Run(k.name, func(t *testing.T) {
			st, err := k.make()
			if err != nil {
				t.Fatal(err)
			}
			evictionModel(t, st)
		})
	}
}

// TestEvictionAndRegistration: regions come and go, and move, while their pages are being
// evicted, and never is a page of memory that is nobody's any more taken.
func TestEvictionAndRegistration(t *testing.T) {
	b := evicting(t, 512, nil)
	if err := b.s.SetBudget(128 * pageSize); err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	var bad atomic.Pointer[string]
	for w := range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			const n = 100 * pageSize
			rnd := rand.New(rand.NewPCG(uint64(w), 3))
			// Addresses of its own, between two places of which it moves: see the package's
			// documentation for what comes of addresses that threads snatch from one another. They are
			// where no other thread's mapping gets, or one might land in the gap that is there
			// after a move, and be moved over.
			base, err := mmapAt(0x4b00_0000_0000+uintptr(w)<<30, 3*n, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_FIXED_NOREPLACE)
			at := base
			if err == nil {
				_, err = mmapAt(at, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_FIXED)
			}
			if err != nil {
				what := err.Error()
				bad.Store(&what)
				return
			}
			defer func() { _ = munmap(base, 3*n) }()
			want := make([]byte, n)
			for k := 0; !stop.Load() && bad.Load() == nil; k++ {
				r, err := b.tab.Register(RegAttr{PD: 1, Addr: at, Length: n, Access: allRights})
				if err != nil {
					what := "register: " + err.Error()
					bad.Store(&what)
					return
				}
				for i := range 10 {
					p := rnd.IntN(n - 5000)
					for j := range 5000 {
						want[p+j] = byte(k + i + j)
					}
					copy(memory(uint64(at)+uint64(p), 5000), want[p:])
				}
				if rnd.IntN(3) == 0 {
					_, _ = b.s.Evict(r, r.IOVA(), n, Level(rnd.IntN(2)))
				}
				if rnd.IntN(3) == 0 {
					if r, err = r.Reregister(ChangeTranslation, RegAttr{Addr: at, Length: n}, nil); err != nil {
						what := "reregister: " + err.Error()
						bad.Store(&what)
						return
					}
				}
				if err := r.Deregister(); err != nil {
					what := "deregister: " + err.Error()
					bad.Store(&what)
				}
				if rnd.IntN(2) == 0 {
					to := 2*base + 2*n - at
					_, _, e := unix.Syscall6(unix.SYS_MREMAP, at, n, n, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, to, 0)
					if e != 0 {
						what := "mremap: " + e.Error()
						bad.Store(&what)
						return
					}
					_, _ = mmapAt(at, n, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_FIXED_NOREPLACE)
					at = to
				}
				if got := memory(uint64(at), n); string(got) != string(want) {
					what := differs("when it is nobody's", got, want, 0)
					bad.Store(&what)
				}
			}
		}()
	}
	storming(t, time.Second, func() bool { return bad.Load() != nil || b.s.EvictionStats().Evicted > 0 })
	stop.Store(true)
	wg.Wait()
	if what := bad.Load(); what != nil {
		t.Fatal(*what)
	}
	if b.s.EvictionStats().Evicted == 0 {
		t.Error("nothing was evicted")
	}
}

func evictionModel(t *testing.T, st Store) {
	const cells, cellPages = 6, 96
	b := evicting(t, cells*cellPages, st)
	if err := b.s.SetBudget(cells * cellPages * pageSize / 4); err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	var bad atomic.Pointer[string]
	fail := func(what string) {
		bad.CompareAndSwap(nil, &what)
		stop.Store(true)
	}
	for c := range cells {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if what := cellStorm(b, c*cellPages*pageSize, cellPages, uint64(c), &stop); what != "" {
				fail(what)
			}
		}()
	}
	wg.Add(2)
	go func() {
		defer wg.Done()
		for !stop.Load() {
			runtime.GC()
		}
	}()
	go func() {
		defer wg.Done()
		rnd := rand.New(rand.NewPCG(7, 7))
		for !stop.Load() {
			page := rnd.Uint64N(cells * cellPages)
			n := min(rnd.Uint64N(100), cells*cellPages-page)
			if _, err := b.s.Evict(b.r, b.r.IOVA()+page*pageSize, n*pageSize, Level(rnd.IntN(2))); err != nil {
				fail("evict: " + err.Error())
			}
			runtime.Gosched()
		}
	}()
	time.AfterFunc(stormTime(t, 2*time.Second), func() { stop.Store(true) })
	wg.Wait()
	if what := bad.Load(); what != nil {
		t.Fatal(*what)
	}
	t.Logf("%+v, %+v", b.usage(t), b.s.EvictionStats())
}

// cellStorm does at random what can be done to a cell, and says what was wrong.
func cellStorm(b *bed, off, pages int, seed uint64, stop *atomic.Bool) string {
	rnd := rand.New(rand.NewPCG(seed, 1))
	model := make([]byte, pages*pageSize)
	mem := memory(uint64(b.m.Addr())+uint64(off), len(model))
	a := b.s.NewAccessor()
	defer a.Close()
	var st Stage
	defer st.Drop()
	if seed%2 == 0 {
		a.Override(FaultStall)
	} else {
		a.Override(FaultRNR)
	}
	try := func(f func() error) error {
		for {
			err := f()
			if !Postponed(err) {
				return err
			}
			if stop.Load() && err == ErrMajor {
				time.Sleep(time.Millisecond)
			}
			runtime.Gosched()
		}
	}
	buf := make([]byte, len(model))
	for n := 0; !stop.Load(); n++ {
		at := rnd.IntN(len(model))
		l := 1 + rnd.IntN(min(len(model)-at, 20*pageSize))
		if rnd.IntN(3) == 0 {
			at, l = at&^pageMask, max(l&^pageMask, pageSize)
		}
		iova := b.r.IOVA() + uint64(off+at)
		what, err := "", error(nil)
		switch rnd.IntN(9) {
		case 0, 1:
			what = "write"
			for i := range model[at : at+l] {
				model[at+i] = byte(n + i)
			}
			if err = try(func() error { return a.Write(&st, b.r, iova, model[at:at+l]) }); err == nil {
				err = try(func() error { return a.Flush(&st) })
			}
		case 2:
			what = "read"
			err = try(func() error { return a.Read(b.r, iova, buf[:l]) })
			if err == nil && string(buf[:l]) != string(model[at:at+l]) {
				return differs("read", buf[:l], model[at:at+l], at)
			}
		case 3:
			what = "touch"
			if string(mem[at:at+l]) != string(model[at:at+l]) {
				return differs("touch", mem[at:at+l], model[at:at+l], at)
			}
		case 4:
			what = "store"
			for i := range model[at : at+l] {
				model[at+i] = byte(n + 3*i)
			}
			copy(mem[at:at+l], model[at:at+l])
		case 5:
			what = "process_vm_readv"
			lo := []unix.Iovec{{Base: &buf[0], Len: uint64(l)}}
			re := []unix.RemoteIovec{{Base: uintptr(unsafe.Pointer(&mem[at])), Len: l}}
			if _, err = unix.ProcessVMReadv(unix.Getpid(), lo, re, 0); err == nil && string(buf[:l]) != string(model[at:at+l]) {
				return differs("process_vm_readv", buf[:l], model[at:at+l], at)
			}
		case 6:
			what = "atomic"
			at &^= 7
			var old uint64
			w := (*uint64)(unsafe.Pointer(&model[at]))
			err = try(func() (err error) {
				old, err = a.Atomic(b.r, b.r.IOVA()+uint64(off+at), FetchAdd, 0, 5)
				return err
			})
			if err == nil && old != *w {
				return "atomic found something else"
			}
			*w += 5
		case 7:
			what = "dontneed"
			at &^= pageMask
			l = min(l, 5*pageSize)
			err = madvise(b.m.Addr()+uintptr(off+at), l, unix.MADV_DONTNEED)
			clear(model[at:min((at+l+pageMask)&^pageMask, len(model))])
		case 8:
			what = "prefetch"
			err = try(func() error { return b.s.Prefetch(b.r, iova, uint64(l), Advice(rnd.IntN(3))) })
		}
		if err != nil {
			return what + ": " + err.Error()
		}
	}
	if string(mem) != string(model) {
		return differs("at the end", mem, model, 0)
	}
	return ""
}

func differs(what string, got, want []byte, at int) string {
	for i := range want {
		if got[i] != want[i] {
			b := []byte(what + ": wrong byte at page ")
			for _, n := range []int{(at + i) / pageSize, (at + i) % pageSize, int(got[i]), int(want[i])} {
				b = append(b, []byte(" "+strconv.Itoa(n))...)
			}
			return string(b)
		}
	}
	return what + ": other bytes, but not any more"
}

// TestSlotsAreFreed: what pages have ceased to need is given back, in limbo and store.
func TestSlotsAreFreed(t *testing.T) {
	const pages = 600
	st := &memStore{}
	b := evicting(t, pages, st)
	b.a.Override(FaultStall)
	want := pattern(pages*pageSize, 1)
	b.put(t, 0, want)
	if n := b.evict(t, 0, pages, Stored); n != pages || st.inUse() != pages {
		t.Fatalf("%d pages went, %d slots are in use", n, st.inUse())
	}
	same(t, "read", b.get(t, 0, len(want)), want)
	b.s.ev.mu.Lock()
	b.s.cleanUp() // unless the evictor has
	b.s.ev.mu.Unlock()
	if n := st.inUse(); n >= 256 {
		t.Errorf("%d slots of the store are in use for nothing", n)
	}
	b.evict(t, 0, pages, Limbo)
	b.put(t, 0, want) // whole pages: what is in limbo is not needed
	b.s.ev.mu.Lock()
	b.s.cleanUp()
	b.s.ev.mu.Unlock()
	if n := b.limboPresent(t); n >= 256 {
		t.Errorf("%d pages are in limbo for nothing", n)
	}
}

// limboPresent is how many pages the limbo has, by mincore(2).
func (b *bed) limboPresent(t testing.TB) (n int) {
	t.Helper()
	vec := make([]byte, b.s.ev.limbo.next)
	if err := inCore(uint64(b.s.sh.limbo), vec); err != nil {
		t.Fatal(err)
	}
	for _, v := range vec {
		n += int(v & 1)
	}
	return n
}
