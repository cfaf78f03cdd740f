// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
)

// TestStorm: goroutines change the mappings of areas of their own at random, while all of
// them look up, in one cache. What a lookup gives must reach what is mapped then: a peer's
// write through its key is what the program reads at that address.
func TestStorm(t *testing.T) {
	t.Run("resident", func(t *testing.T) { testStorm(t, 0) })
	t.Run("evicted", func(t *testing.T) { testStorm(t, mr.MinBudget) })
}

func testStorm(t *testing.T, budget uint64) {
	d := time.Second
	if v := os.Getenv("TAPVERBS_STORM"); v != "" {
		var err error
		if d, err = time.ParseDuration(v); err != nil {
			t.Fatal(err)
		}
	}
	b := newBed(t, mr.Options{}, Options{MaxEntries: 100})
	if err := b.s.SetBudget(budget); errors.Is(err, mr.ErrNotSupported) {
		t.Skip(err)
	} else if err != nil {
		t.Fatal(err)
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var stop atomic.Bool
	var all sync.WaitGroup
	var lookups atomic.Uint64
	for g := range 4 {
		x := &gust{b: b, t: t, rnd: rand.New(rand.NewPCG(seed, uint64(g))), p: room(t, g, 2*gustPages*page)}
		all.Go(func() {
			x.a = b.s.NewAccessor()
			defer x.a.Close()
			for !stop.Load() && !t.Failed() {
				x.change()
				for range 3 {
					x.lookup()
				}
				lookups.Add(3)
			}
			for _, e := range x.held {
				b.c.Put(e)
			}
		})
	}
	// On a machine that has more to do it takes longer until all has happened.
	met := func() bool {
		st := b.c.Stats()
		return st.Hits+st.Covered > 0 && st.Misses > 0 && st.Invalidated > 0 && (budget == 0 || b.s.EvictionStats().Evicted > 0)
	}
	for end := time.Now().Add(d); time.Now().Before(end) || !met() && !t.Failed() && time.Now().Before(end.Add(time.Minute)); {
		time.Sleep(10 * time.Millisecond)
	}
	stop.Store(true)
	all.Wait()
	st := b.c.Stats()
	evicted := b.s.EvictionStats().Evicted
	t.Logf("%d lookups, %d pages were evicted: %+v", lookups.Load(), evicted, st)
	if (evicted > 0) != (budget > 0) {
		t.Errorf("%d pages were evicted, with a budget of %d bytes", evicted, budget)
	}
	if st.Hits+st.Covered == 0 || st.Misses == 0 || st.Invalidated == 0 || st.InUse != 0 {
		t.Errorf("nothing happened: %+v", st)
	}
}

const gustPages = 64

// gust is a goroutine of the storm: all of its area is mapped between two changes.
type gust struct {
	b    *bed
	t    *testing.T
	rnd  *rand.Rand
	a    *mr.Accessor
	p    uintptr
	held []*Entry[*region]
	n    uint64
}

// some is a range of the first half of the area, in pages.
func (x *gust) some() (at uintptr, n int) {
	n = 1 + x.rnd.IntN(1+x.rnd.IntN(gustPages))
	return x.p + uintptr(x.rnd.IntN(gustPages-n+1))*page, n * page
}

func (x *gust) change() {
	at, n := x.some()
	switch x.rnd.IntN(7) {
	case 0:
		munmap(x.t, at, n)
		mmap(x.t, at, n, unix.MAP_FIXED)
	case 1:
		mmap(x.t, at, n, unix.MAP_FIXED)
	case 2: // away, and something else in its place; one page is of one mapping
		n = page
		mremap(x.t, at, n, x.p+gustPages*page)
		mmap(x.t, at, n, unix.MAP_FIXED)
	case 3: // something else here, by way of mremap
		mmap(x.t, x.p+gustPages*page, n, unix.MAP_FIXED)
		mremap(x.t, x.p+gustPages*page, n, at)
		mmap(x.t, x.p+gustPages*page, n, unix.MAP_FIXED)
	case 4:
		if err := unix.Madvise(memory(at, n), unix.MADV_DONTNEED); err != nil {
			x.t.Error(err)
		}
	case 5:
		_ = x.b.c.Hint(x.p, gustPages*page, rights)
	case 6:
		x.b.c.Unhint(x.p, gustPages*page)
	}
}

func (x *gust) lookup() {
	at, n := x.some()
	at += uintptr(x.rnd.IntN(page - 8))
	n -= page
	n += 8
	e, err := x.b.c.Get(at, uint64(n), rights)
	if err != nil {
		x.t.Errorf("get: %v", err)
		return
	}
	x.n++
	for _, off := range []int{0, n - 8} {
		w := binary.LittleEndian.AppendUint64(nil, x.n<<8|uint64(off&0xff))
		if err := x.b.reaches(x.a, e.RKey(), at+uintptr(off), w); err != nil {
			x.t.Errorf("%d bytes at page %d, byte %d of them: %v (entry of %d at page %d)", n, (at-x.p)/page, off, err, e.Length(), (e.Addr()-x.p)/page)
		}
	}
	if x.held = append(x.held, e); len(x.held) > 10 {
		i := x.rnd.IntN(len(x.held))
		x.b.c.Put(x.held[i])
		x.held[i] = x.held[len(x.held)-1]
		x.held = x.held[:len(x.held)-1]
	}
}

// TestHitAllocatesNothing: the path that is taken all the time.
func TestHitAllocatesNothing(t *testing.T) {
	b := newBed(t, mr.Options{}, Options{})
	p := room(t, 0, 64*page)
	b.touch(p, 32*page)
	b.touch(p+40*page, page)
	for _, off := range []uintptr{0, 3*page + 7, 40 * page} {
		if n := testing.AllocsPerRun(100, func() {
			e, err := b.c.Get(p+off, 100, rights)
			if err != nil {
				t.Fatal(err)
			}
			b.c.Put(e)
		}); n != 0 {
			t.Errorf("%v allocations at %d", n, off)
		}
	}
}

// BenchmarkGet is a lookup and its Put: exact, within an area of another's, and in a
// cache of 10,000, against registering and deregistering.
func BenchmarkGet(b *testing.B) {
	const n = 1 << 20
	for _, c := range []struct {
		name   string
		others int
		step   uintptr
		over   uintptr
	}{{"exact", 0, 0, n}, {"covered", 0, 7 * 64, n}, {"exact-of-10000", 10000, 0, n}, {"any-of-10000", 10000, 7 * page, 10000 * page}} {
		b.Run(c.name, func(b *testing.B) {
			bed := newBed(b, mr.Options{}, Options{})
			p := room(b, 0, 64*n)
			if c.over > n {
				for i := range c.others {
					bed.touch(p+uintptr(i)*page, page)
				}
			} else {
				for i := range c.others {
					bed.touch(p+n+uintptr(i)*page, page)
				}
				bed.touch(p, n)
			}
			size, at := uint64(n), uintptr(0)
			if c.step > 0 {
				size = 64
			}
			b.ReportAllocs()
			for b.Loop() {
				e, err := bed.c.Get(p+at, size, rights)
				if err != nil {
					b.Fatal(err)
				}
				bed.c.Put(e)
				if at += c.step; at >= c.over {
					at -= c.over
				}
			}
		})
	}
	b.Run("parallel", func(b *testing.B) {
		bed := newBed(b, mr.Options{}, Options{})
		p := room(b, 0, 64*n)
		var g atomic.Uint64
		b.RunParallel(func(pb *testing.PB) {
			at := p + uintptr(g.Add(1))*n
			for pb.Next() {
				e, err := bed.c.Get(at, n, rights)
				if err != nil {
					b.Error(err)
					return
				}
				bed.c.Put(e)
			}
		})
	})
	b.Run("register", func(b *testing.B) {
		bed := newBed(b, mr.Options{}, Options{})
		p := room(b, 0, n)
		for b.Loop() {
			r, err := bed.register(p, n, rights)
			if err != nil {
				b.Fatal(err)
			}
			if err := r.Dereg(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("stale", func(b *testing.B) { // the word moves between any two lookups
		bed := newBed(b, mr.Options{}, Options{})
		p := room(b, 0, n)
		bed.touch(p, n-page)
		for b.Loop() {
			if err := unix.Madvise(memory(p+n-2*page, page), unix.MADV_DONTNEED); err != nil {
				b.Fatal(err)
			}
			bed.touch(p, page)
		}
	})
}
