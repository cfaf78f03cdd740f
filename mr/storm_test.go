// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/internal/rawfork"
	"golang.org/x/sys/unix"
)

// storm is memory in which mappings change while engines write: guard pages on both
// sides of every piece, which never change.
type storm struct {
	t      *testing.T
	s      *Space
	tab    *Table
	rnd    *rand.Rand
	base   uintptr // reserved addresses: piece i is at base + i*pieceStep
	pieces []atomic.Pointer[Region]
	stop   atomic.Bool
	wrote  atomic.Int64
	failed atomic.Int64 // requests that were answered with an error
}

const (
	piecePages = 32
	pieceBytes = piecePages * pageSize
	pieceStep  = pieceBytes + 2*pageSize // with a guard page before and behind
	stormData  = 0xee
	guardData  = 0x5a
)

func (st *storm) at(i int) uintptr { return st.base + uintptr(i*pieceStep) + pageSize }

func (st *storm) guards(i int) [][]byte {
	return [][]byte{memory(uint64(st.at(i))-pageSize, pageSize), memory(uint64(st.at(i))+pieceBytes, pageSize)}
}

func newStorm(t *testing.T, pieces int) *storm {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	st := &storm{t: t, s: newSpace(t, Options{}), rnd: rand.New(rand.NewPCG(seed, 2)), pieces: make([]atomic.Pointer[Region], pieces)}
	st.tab = NewTable(st.s)
	st.base = apart(t, pieces*pieceStep)
	for i := range pieces {
		for _, g := range st.guards(i) {
			for k := range g {
				g[k] = guardData
			}
		}
		st.arm(i)
	}
	return st
}

// apart maps n bytes far below where the kernel and the Go heap put mappings of their
// own: what the test unmaps there for a moment no other thread's mapping gets.
func apart(t *testing.T, n int) uintptr {
	t.Helper()
	const low = 0x4800_0000_0000
	p, err := mmapAt(low, n, rw, unix.MAP_PRIVATE|unix.MAP_FIXED_NOREPLACE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := munmap(p, n); err != nil {
			t.Error(err)
		}
	})
	return p
}

// arm registers a piece anew, the old region stays registered: its key must not
// reach what is mapped there now.
func (st *storm) arm(i int) *Region {
	r, err := st.tab.Register(RegAttr{Addr: st.at(i), Length: pieceBytes, Access: allRights})
	if err != nil {
		st.t.Fatal(err)
	}
	return st.pieces[i].Swap(r)
}

// engine writes to all pieces until the storm is over, at any alignment.
func (st *storm) engine(seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 3))
	a := st.s.NewAccessor()
	defer a.Close()
	src, dst := make([]byte, 3*pageSize), make([]byte, 3*pageSize)
	for i := range src {
		src[i] = stormData
	}
	var stages [2]Stage
	for !st.stop.Load() {
		r := st.pieces[rnd.IntN(len(st.pieces))].Load()
		n := rnd.IntN(len(src)) + 1
		off := uint64(rnd.IntN(pieceBytes - n + 1))
		var err error
		switch rnd.IntN(100) {
		case 0:
			a.Linger()
		case 1, 2:
			a.Leave()
		}
		switch rnd.IntN(8) {
		case 0:
			err = a.Read(r, r.IOVA()+off, dst[:n])
		case 1:
			_, err = a.Atomic(r, r.IOVA()+off&^7, CompareSwap, 1, 1)
		default:
			s := &stages[rnd.IntN(2)]
			err = a.Write(s, r, r.IOVA()+off, src[:n])
			if err == nil && rnd.IntN(2) == 0 {
				err = a.Flush(s)
			}
		}
		switch err {
		case nil:
			st.wrote.Add(1)
		case ErrRemoved, ErrFault, ErrBusy, ErrKey:
			st.failed.Add(1)
		default:
			st.t.Errorf("an engine got: %v", err)
			return
		}
	}
	a.Leave()
	for i := range stages {
		_ = a.Flush(&stages[i]) // the memory may be gone
	}
}

func (st *storm) checkGuards() {
	for i := range st.pieces {
		for _, g := range st.guards(i) {
			for k := range g {
				if g[k] != guardData {
					st.t.Fatalf("byte %d of a guard page of piece %d has become %#x", k, i, g[k])
				}
			}
		}
	}
}

const rw = unix.PROT_READ | unix.PROT_WRITE

// TestStorm changes mappings in every way while engines write, and looks at what
// must not change: guard pages between the regions, and new memory at addresses
// where a region was.
func TestStorm(t *testing.T) {
	stopWatch := watchdog(t)
	defer stopWatch()
	st := newStorm(t, 8)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	var wg sync.WaitGroup
	for g := range 2 {
		wg.Go(func() { st.engine(uint64(g)) })
	}
	defer func() { st.stop.Store(true); wg.Wait() }()
	var old []*Region
	var did [7]int
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// Each way has its turn before one comes again: a machine that has more to do does few.
	var turns []int
	met := func() bool { return st.wrote.Load() > 0 && st.failed.Load() > 0 && !slices.Contains(did[:], 0) }
	for end := time.Now().Add(stormTime(t, 3*time.Second)); time.Now().Before(end) || !met() && time.Now().Before(end.Add(stormPatience)); {
		i := st.rnd.IntN(len(st.pieces))
		from := st.rnd.IntN(piecePages)
		n := (st.rnd.IntN(piecePages-from) + 1) * pageSize
		at := st.at(i) + uintptr(from*pageSize)
		if len(turns) == 0 {
			turns = st.rnd.Perm(len(did))
		}
		what := turns[0]
		turns = turns[1:]
		did[what]++
		switch what {
		case 0, 1:
			must(madvise(at, n, unix.MADV_DONTNEED))
			continue
		case 2: // unmapped, and something else mapped there: no write of before lands in it
			must(munmap(at, n))
			_, err := mmapAt(at, n, rw, unix.MAP_PRIVATE|unix.MAP_FIXED_NOREPLACE)
			must(err)
			mem := memory(uint64(at), n)
			for round := range 3 {
				for k := range mem {
					if mem[k] != 0 {
						t.Fatalf("after munmap, round %d: byte %d of %d of the new mapping is %#x", round, k, n, mem[k])
					}
				}
				runtime.Gosched()
			}
		case 3: // replaced in one step
			_, err := mmapAt(at, n, rw, unix.MAP_PRIVATE|unix.MAP_FIXED)
			must(err)
			mem := memory(uint64(at), n)
			for k := range mem {
				mem[k] = guardData // after mmap has returned it is ours
			}
			runtime.Gosched()
			for k := range mem {
				if mem[k] != guardData {
					t.Fatalf("after MAP_FIXED: byte %d of %d has become %#x", k, n, mem[k])
				}
			}
		case 4: // moved away: what is at the new place is no region's
			to, err := mmapAt(0, n, unix.PROT_NONE, unix.MAP_PRIVATE)
			must(err)
			_, _, e := unix.Syscall6(unix.SYS_MREMAP, at, uintptr(n), uintptr(n), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, to, 0)
			if e == unix.EFAULT { // several mappings by now; some of them may have moved
				did[what]--
				must(munmap(to, n))
				_, err = mmapAt(at, n, rw, unix.MAP_PRIVATE|unix.MAP_FIXED)
				must(err)
				break
			}
			if e != 0 {
				t.Fatal(e)
			}
			mem := memory(uint64(to), n)
			for k := range mem {
				if v := mem[k]; v != 0 && v != stormData && v != guardData {
					t.Fatalf("moved memory has %#x", v)
				}
				mem[k] = guardData
			}
			runtime.Gosched()
			for k := range mem {
				if mem[k] != guardData {
					t.Fatalf("moved memory has become %#x", mem[k])
				}
			}
			must(munmap(to, n))
			_, err = mmapAt(at, n, rw, unix.MAP_PRIVATE|unix.MAP_FIXED_NOREPLACE)
			must(err)
		case 5: // a child, which copies pages on write, and exits
			pid, e := rawfork.Exit()
			if e != 0 {
				t.Fatal(e)
			}
			_, err := unix.Wait4(int(pid), nil, 0, nil)
			must(err)
			continue
		case 6: // gone and back while it is registered, application touching it
			must(munmap(at, n))
			_, err := mmapAt(at, n, rw, unix.MAP_SHARED|unix.MAP_FIXED_NOREPLACE)
			must(err)
		}
		// A new region over the new mapping; the one before keeps its key, with a
		// hole, until there are many.
		if old = append(old, st.arm(i)); len(old) > 20 {
			for _, r := range old {
				must(r.Deregister())
			}
			old = old[:0]
		}
		st.checkGuards()
	}
	st.stop.Store(true)
	wg.Wait()
	st.checkGuards()
	for i := range st.pieces {
		old = append(old, st.pieces[i].Load())
	}
	for _, r := range old {
		must(r.Deregister())
	}
	t.Logf("2 MADV_DONTNEED, munmap, MAP_FIXED, mremap, fork, munmap for shared: %v; %d requests done, %d answered with errors; %+v",
		did, st.wrote.Load(), st.failed.Load(), st.s.Stats())
	if st.wrote.Load() == 0 || st.failed.Load() == 0 {
		t.Error("the storm met nobody")
	}
	for k, n := range did {
		if n == 0 {
			t.Errorf("way %d was not taken", k)
		}
	}
}

// TestOldKeyNeverReachesNewMapping: the deterministic part of the storm.
func TestOldKeyNeverReachesNewMapping(t *testing.T) {
	b := newBed(t, 16*pageSize)
	msg := pattern(2*pageSize, 1)
	b.put(t, 0, pattern(16*pageSize, 2))
	at := b.m.Addr() + 4*pageSize
	if err := munmap(at, 4*pageSize); err != nil {
		t.Fatal(err)
	}
	fails := func(r *Region, off int) {
		t.Helper()
		err := b.a.Write(&b.st, r, r.IOVA()+uint64(off), msg)
		if err == nil {
			err = b.a.Flush(&b.st)
		}
		if err != ErrRemoved {
			t.Errorf("write at page %d: %v", off/pageSize, err)
		}
		if err := b.a.Read(r, r.IOVA()+uint64(off), make([]byte, 2*pageSize)); err != ErrRemoved {
			t.Errorf("read at page %d: %v", off/pageSize, err)
		}
		if _, err := b.a.Atomic(r, r.IOVA()+uint64(off+pageSize), FetchAdd, 0, 1); err != ErrRemoved {
			t.Errorf("atomic at page %d: %v", off/pageSize, err)
		}
	}
	fails(b.r, 5*pageSize)
	if _, err := mmapAt(at, 4*pageSize, rw, unix.MAP_PRIVATE|unix.MAP_FIXED_NOREPLACE); err != nil {
		t.Fatal(err)
	}
	fails(b.r, 5*pageSize)
	r2 := register(t, b.tab, at, 4*pageSize)
	fails(b.r, 5*pageSize) // its pages are known again, through the new region
	same(t, "new mapping", memory(uint64(at), 4*pageSize), make([]byte, 4*pageSize))
	fails(b.r, 5*pageSize) // present now
	if err := b.a.Write(&b.st, r2, r2.IOVA()+pageSize, msg); err != nil {
		t.Fatal(err)
	}
	if err := b.a.Flush(&b.st); err != nil {
		t.Fatal(err)
	}
	same(t, "through the new region", memory(uint64(at)+pageSize, 2*pageSize), msg)
	b.put(t, 0, msg) // the rest of the old one still works
	b.put(t, 8*pageSize, msg)
	// The old region ends: the new one's pages stay with userfaultfd, the others not.
	if err := b.r.Deregister(); err != nil {
		t.Fatal(err)
	}
	if err := madvise(b.m.Addr(), 16*pageSize, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	before := b.s.Stats().AppFaults
	for p := range 16 {
		memory(uint64(b.m.Addr())+uint64(p*pageSize), 1)[0] = 1
	}
	if got := b.s.Stats().AppFaults - before; got != 4 {
		t.Errorf("%d faults came to the pager, want 4", got)
	}

	// Moved away: the key reaches neither place.
	b.r = register(t, b.tab, b.m.Addr()+8*pageSize, 8*pageSize)
	to, _, e := unix.Syscall6(unix.SYS_MREMAP, b.m.Addr()+8*pageSize, 4*pageSize, 4*pageSize, unix.MREMAP_MAYMOVE|unix.MREMAP_DONTUNMAP, 0, 0)
	if e != 0 {
		t.Fatal(e)
	}
	defer munmap(to, 4*pageSize)
	fails(b.r, pageSize)
	if v := memory(uint64(b.m.Addr())+9*pageSize, 1)[0]; v != 0 {
		t.Errorf("where it was reads %d", v)
	}
	fails(b.r, pageSize)
	before = b.s.Stats().AppFaults
	for p := range uint64(4) {
		if v := memory(uint64(to)+p*pageSize, 1)[0]; v != 1 {
			t.Errorf("page %d of the moved memory reads %d", p, v)
		}
	}
	if err := madvise(to, 4*pageSize, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	memory(uint64(to), 1)[0] = 1
	if got := b.s.Stats().AppFaults - before; got != 0 {
		t.Errorf("%d faults of moved memory came to the pager", got)
	}
	// Registered where it is now, and written.
	r3 := register(t, b.tab, to, 4*pageSize)
	if err := b.a.Write(&b.st, r3, r3.IOVA()+10, msg); err != nil {
		t.Fatal(err)
	}
	if err := b.a.Flush(&b.st); err != nil {
		t.Fatal(err)
	}
	same(t, "moved", memory(uint64(to)+10, len(msg)), msg)
}

// TestStageMeetsUnmap: bytes staged for pages that go before they are placed.
func TestStageMeetsUnmap(t *testing.T) {
	b := newBed(t, 16*pageSize)
	msg := pattern(6*pageSize-100, 1)
	if err := b.a.Write(&b.st, b.r, b.r.IOVA()+100, msg); err != nil {
		t.Fatal(err)
	}
	if err := munmap(b.m.Addr()+3*pageSize, pageSize); err != nil {
		t.Fatal(err)
	}
	if err := b.a.Flush(&b.st); err != ErrRemoved || b.st.Active() {
		t.Errorf("flush: %v, active %v", err, b.st.Active())
	}
	same(t, "before the hole", b.m.Bytes()[100:3*pageSize], msg[:3*pageSize-100])
	if _, err := mmapAt(b.m.Addr()+3*pageSize, pageSize, rw, unix.MAP_PRIVATE|unix.MAP_FIXED_NOREPLACE); err != nil {
		t.Fatal(err)
	}
	if v := b.m.Bytes()[3*pageSize]; v != 0 {
		t.Errorf("the new page has %#x", v)
	}
	// Deregistered while something is staged.
	if err := b.a.Write(&b.st, b.r, b.r.IOVA()+8*pageSize+1, msg[:100]); err != nil {
		t.Fatal(err)
	}
	if err := b.r.Deregister(); err != nil {
		t.Fatal(err)
	}
	if err := b.a.Flush(&b.st); err != ErrKey {
		t.Errorf("flush after Deregister: %v", err)
	}
	if err := b.a.Write(&b.st, b.r, b.r.IOVA(), msg); err != ErrKey {
		t.Errorf("write after Deregister: %v", err)
	}
}
