// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestRegisterTouchesNothing registers 4 GiB: no page becomes present, and nothing is
// locked. What it takes is shown (make bench has it, too).
func TestRegisterTouchesNothing(t *testing.T) {
	for _, kind := range []string{"private", "shared"} {
		var o []AllocOption
		if kind == "shared" {
			o = append(o, Shared())
		}
		s := newSpace(t, Options{})
		tab := NewTable(s)
		const n = 4 << 30
		m := alloc(t, n, o...)
		rss, lck, pin := status(t, "VmRSS"), status(t, "VmLck"), status(t, "VmPin")
		var best [2]time.Duration
		for range 20 {
			start := time.Now()
			r, err := tab.Register(RegAttr{Addr: m.Addr() + 5, Length: n - 100, Access: allRights})
			registered := time.Now()
			if err != nil {
				t.Fatal(err)
			}
			if r.Paging() != UserFault {
				t.Fatal(r.Paging())
			}
			if err := r.Deregister(); err != nil {
				t.Fatal(err)
			}
			for i, d := range []time.Duration{registered.Sub(start), time.Since(registered)} {
				if best[i] == 0 || d < best[i] {
					best[i] = d
				}
			}
		}
		t.Logf("%s: register %v, deregister %v", kind, best[0], best[1])
		r := register(t, tab, m.Addr(), n)
		if got, err := r.Present(); got != 0 || err != nil {
			t.Errorf("%s: %d bytes are present, %v", kind, got, err)
		}
		if got := status(t, "VmRSS") - rss; got > 20<<10 { // 1 MiB of mincore's answer for each GiB, and the Go heap
			t.Errorf("%s: RSS has grown by %d KiB", kind, got)
		}
		if l, p := status(t, "VmLck")-lck, status(t, "VmPin")-pin; l != 0 || p != 0 {
			t.Errorf("%s: %d KiB locked, %d KiB pinned", kind, l, p)
		}
		if st := s.Stats(); st != (Counters{}) {
			t.Errorf("%s: %+v", kind, st)
		}
	}
}

// TestOverlap: pages stay with userfaultfd until the last region over them ends.
func TestOverlap(t *testing.T) {
	b := newBed(t, 64*pageSize)
	mem := b.m.Bytes()
	r2 := register(t, b.tab, b.m.Addr()+16*pageSize+7, 16*pageSize)
	r3 := register(t, b.tab, b.m.Addr()+20*pageSize, 100, func(a *RegAttr) { a.Access = 0 })
	faults := func(page int, want uint64) {
		t.Helper()
		before := b.s.Stats().AppFaults
		mem[page*pageSize] = 1
		if got := b.s.Stats().AppFaults - before; got != want {
			t.Errorf("page %d: %d faults came to the pager, want %d", page, got, want)
		}
	}
	if err := b.r.Deregister(); err != nil {
		t.Fatal(err)
	}
	faults(0, 0)
	faults(15, 0)
	faults(16, 1)
	faults(32, 1)
	faults(33, 0)
	if err := r2.Deregister(); err != nil {
		t.Fatal(err)
	}
	faults(19, 0)
	faults(20, 1)
	faults(21, 0)
	if err := r3.Deregister(); err != nil {
		t.Fatal(err)
	}
	b.r = register(t, b.tab, b.m.Addr(), 64*pageSize)
	b.put(t, 0, pattern(64*pageSize, 2)) // all are known to be present
	if err := b.r.Deregister(); err != nil {
		t.Fatal(err)
	}
	// Nobody follows the pages for a while: what was known of them is forgotten.
	if err := madvise(b.m.Addr(), 64*pageSize, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	mem[3*pageSize] = 3
	b.r = register(t, b.tab, b.m.Addr(), 64*pageSize)
	before := b.s.Stats().PageFaults
	msg := pattern(64*pageSize-2, 1)
	b.put(t, 1, msg)
	same(t, "all", mem[1:len(mem)-1], msg)
	if got := b.s.Stats().PageFaults - before; got != 63 {
		t.Errorf("%d page faults, want 63", got)
	}
	if len(b.s.armed.segs) != 1 {
		t.Errorf("%d pieces are armed", len(b.s.armed.segs))
	}
}

// TestCoverage compares the interval bookkeeping with an array of counts.
func TestCoverage(t *testing.T) {
	type op struct{ a, b uint64 }
	var c coverage
	var model [64]int
	var held []op
	x := uint32(12345)
	next := func(n int) int { x = x*1664525 + 1013904223; return int(x>>8) % n }
	whole := func(step int) { // the list is the shortest that says what the model says
		t.Helper()
		var want []covered
		for p, n := range model {
			k := len(want)
			switch {
			case n == 0:
			case k > 0 && want[k-1].end == uint64(p) && want[k-1].n == n:
				want[k-1].end++
			default:
				want = append(want, covered{span{uint64(p), uint64(p) + 1}, n})
			}
		}
		if !slices.Equal(c.segs, want) {
			t.Fatalf("step %d: %v, want %v", step, c.segs, want)
		}
	}
	for step := range 20000 {
		if len(held) > 0 && (next(2) == 0 || len(held) > 12) {
			i := next(len(held))
			o := held[i]
			held = slices.Delete(held, i, i+1)
			var want []span
			for p := o.a; p < o.b; p++ {
				if model[p]--; model[p] == 0 {
					if k := len(want); k > 0 && want[k-1].end == p {
						want[k-1].end++
					} else {
						want = append(want, span{p, p + 1})
					}
				}
			}
			if got := c.remove(o.a, o.b); !slices.Equal(got, want) {
				t.Fatalf("step %d: remove %v gives %v, want %v", step, o, got, want)
			}
			whole(step)
			continue
		}
		a := uint64(next(63))
		o := op{a, a + 1 + uint64(next(int(64-a)))}
		held = append(held, o)
		var want []span
		for p := o.a; p < o.b; p++ {
			if model[p] == 0 {
				if k := len(want); k > 0 && want[k-1].end == p {
					want[k-1].end++
				} else {
					want = append(want, span{p, p + 1})
				}
			}
		}
		if got := c.missing(o.a, o.b); !slices.Equal(got, want) {
			t.Fatalf("step %d: missing of %v is %v, want %v", step, o, got, want)
		}
		c.add(o.a, o.b)
		for p := o.a; p < o.b; p++ {
			model[p]++
		}
		whole(step)
	}
}

func TestIOVA(t *testing.T) {
	b := newBed(t, 8*pageSize)
	for name, c := range map[string]struct {
		mod  func(*RegAttr)
		iova uint64
	}{
		"address":          {func(*RegAttr) {}, uint64(b.m.Addr()) + 77},
		"zero-based":       {func(a *RegAttr) { a.Access |= ZeroBased }, 0},
		"iova":             {func(a *RegAttr) { a.IOVA, a.HaveIOVA = 0x1234_5678_9abc_def1, true }, 0x1234_5678_9abc_def1},
		"highest iova":     {func(a *RegAttr) { a.IOVA, a.HaveIOVA = ^uint64(5*pageSize), true }, ^uint64(5 * pageSize)},
		"iova without say": {func(a *RegAttr) { a.IOVA = 99 }, uint64(b.m.Addr()) + 77},
	} {
		r := register(t, b.tab, b.m.Addr()+77, 5*pageSize, c.mod)
		if r.IOVA() != c.iova || r.Addr() != b.m.Addr()+77 || r.Length() != 5*pageSize {
			t.Errorf("%s: iova %#x, address %#x, length %d", name, r.IOVA(), r.Addr(), r.Length())
		}
		msg := pattern(9000, name[0])
		if _, err := b.tab.Check(r.RKey(), 1, c.iova+1000, 9000, RemoteWrite); err != nil {
			t.Fatal(name, err)
		}
		var st Stage
		if err := b.a.Write(&st, r, c.iova+1000, msg); err != nil {
			t.Fatal(name, err)
		}
		if err := b.a.Flush(&st); err != nil {
			t.Fatal(name, err)
		}
		same(t, name, b.m.Bytes()[1077:][:9000], msg)
	}
}

func TestPinned(t *testing.T) {
	s := newSpace(t, Options{})
	tab := NewTable(s)
	m := alloc(t, 64*pageSize)
	before := status(t, "VmLck")
	pin := func(a *RegAttr) { a.Pin = true }
	r1 := register(t, tab, m.Addr()+10, 32*pageSize, pin)
	r2 := register(t, tab, m.Addr()+16*pageSize, 32*pageSize, pin)
	locked := func(pages int) {
		t.Helper()
		if got := status(t, "VmLck") - before; got != pages*4 {
			t.Errorf("%d KiB are locked, want %d", got, pages*4)
		}
	}
	locked(48)
	if r1.Paging() != Pinned || r1.Paging().String() != "pinned" {
		t.Error(r1.Paging())
	}
	if n, _ := r1.Present(); n != 33*pageSize {
		t.Errorf("%d bytes are present", n)
	}
	if err := r1.Deregister(); err != nil {
		t.Fatal(err)
	}
	locked(32)
	a := accessor(t, s)
	var st Stage
	if err := a.Write(&st, r2, r2.IOVA()+3, pattern(pageSize, 1)); err != nil || st.Active() {
		t.Fatal(err, st.Active())
	}
	same(t, "pinned", m.Bytes()[16*pageSize+3:][:pageSize], pattern(pageSize, 1))
	if err := r2.Deregister(); err != nil {
		t.Fatal(err)
	}
	locked(0)

	// More than RLIMIT_MEMLOCK allows: root may, so it is asked of a child, see
	// TestOrdinaryUser.
	r3 := register(t, tab, m.Addr(), 64*pageSize)
	r4 := register(t, tab, m.Addr()+8*pageSize, 8*pageSize, pin) // populates through the pager
	if got := s.Stats().AppFaults; r3.Paging() != UserFault || got > 8 {
		t.Errorf("%v, %d faults", r3.Paging(), got)
	}
	if err := r4.Deregister(); err != nil {
		t.Fatal(err)
	}
	locked(0)
}

// TestDeregisterWhileEnginesWrite: after Deregister has returned nothing arrives.
func TestDeregisterWhileEnginesWrite(t *testing.T) {
	s := newSpace(t, Options{})
	tab := NewTable(s)
	const n = 16 * pageSize
	m := alloc(t, n)
	var cur atomic.Pointer[Region]
	var stop atomic.Bool
	var wg sync.WaitGroup
	var done, refused atomic.Int64
	for range 2 {
		wg.Go(func() {
			a := s.NewAccessor()
			defer a.Close()
			var st Stage
			src := pattern(6000, 1)
			for i := uint64(0); !stop.Load(); i++ {
				r := cur.Load()
				if r == nil {
					continue
				}
				err := a.Write(&st, r, r.IOVA()+i*1111%(n-6000), src)
				if err == nil && i%4 != 0 {
					err = a.Flush(&st)
				}
				switch {
				case err == nil:
					done.Add(1)
				case err == ErrKey:
					refused.Add(1)
				case err != ErrBusy:
					t.Error(err)
					return
				}
			}
			st.Drop()
		})
	}
	for round := range 300 {
		a := RegAttr{Addr: m.Addr(), Length: n, Access: allRights, Pin: round%5 == 4}
		r, err := tab.Register(a)
		if err != nil {
			t.Fatal(err)
		}
		cur.Store(r)
		for was, i := done.Load(), 0; done.Load() == was && i < 1e6; i++ {
			_ = i // until an engine has written
		}
		if err := r.Deregister(); err != nil {
			t.Fatal(err)
		}
		clear(m.Bytes())
		for k, v := range m.Bytes() {
			if v != 0 {
				t.Fatalf("round %d: byte %d is %#x after Deregister", round, k, v)
			}
		}
		if round%3 == 0 {
			if err := madvise(m.Addr(), n, unix.MADV_DONTNEED); err != nil {
				t.Fatal(err)
			}
		}
	}
	stop.Store(true)
	wg.Wait()
	t.Logf("%d writes, %d refused", done.Load(), refused.Load())
	if done.Load() == 0 || refused.Load() == 0 {
		t.Error("nothing was tried")
	}
}

// TestConcurrentRegistration registers and ends overlapping regions from several
// goroutines while one region over all is written to.
func TestConcurrentRegistration(t *testing.T) {
	const n = 256 * pageSize
	b := newBed(t, n)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 300 {
				off := uintptr(g*1000 + i*777%(n/2))
				r, err := b.tab.Register(RegAttr{Addr: b.m.Addr() + off, Length: uint64(1 + i*3331%(n/2-8000)), Pin: i%7 == 0})
				if err == nil {
					err = r.Deregister()
				}
				if err != nil && !errors.Is(err, ErrMemlock) {
					t.Error(fmt.Errorf("region %d of %d: %w", i, g, err))
					return
				}
			}
		})
	}
	msg := pattern(n, 1)
	for range 20 {
		b.put(t, 0, msg)
		same(t, "all", b.get(t, 0, n), msg)
	}
	wg.Wait()
	if len(b.s.armed.segs) != 1 || len(b.s.locked.segs) != 0 {
		t.Errorf("armed %v, locked %v", b.s.armed.segs, b.s.locked.segs)
	}
}
