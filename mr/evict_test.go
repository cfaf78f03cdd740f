// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"bytes"
	"errors"
	"math"
	"os"
	"testing"
	"unsafe"

	"github.com/tapverbs/tapverbs/internal/rawfork"
	"golang.org/x/sys/unix"
)

// evicting is a bed that can evict, or the test is skipped.
func evicting(t testing.TB, pages int, st Store) *bed {
	t.Helper()
	s := newSpace(t, Options{})
	if st != nil {
		if err := s.SetStore(st); err != nil {
			t.Fatal(err)
		}
	}
	b := newBedIn(t, s, pages*pageSize)
	if _, err := s.Evict(b.r, b.r.IOVA(), 0, Limbo); errors.Is(err, ErrNotSupported) {
		t.Skip(err)
	}
	return b
}

func (b *bed) evict(t testing.TB, page, pages int, to Level) int {
	t.Helper()
	n, err := b.s.Evict(b.r, b.r.IOVA()+uint64(page*pageSize), uint64(pages*pageSize), to)
	if err != nil {
		t.Fatalf("evict %d pages at %d to %d: %v", pages, page, to, err)
	}
	return n
}

func (b *bed) usage(t testing.TB) Usage {
	t.Helper()
	u, err := b.r.Usage()
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// away says how many pages of the region are where.
func (b *bed) where(t testing.TB, present, limbo, stored int) {
	t.Helper()
	u := b.usage(t)
	if u.Present != uint64(present)*pageSize || u.Limbo != uint64(limbo)*pageSize || u.Stored != uint64(stored)*pageSize {
		t.Fatalf("%d pages are present, %d in limbo, %d stored; want %d, %d, %d",
			u.Present/pageSize, u.Limbo/pageSize, u.Stored/pageSize, present, limbo, stored)
	}
	if in, err := b.r.Present(); err != nil || in != u.Present {
		t.Fatalf("mincore says %d pages, %v; usage %d", in/pageSize, err, u.Present/pageSize)
	}
}

// TestEvict: pages go to each level and come back for each kind of access, with their
// content.
func TestEvict(t *testing.T) {
	for _, to := range []Level{Limbo, Stored} {
		for name, access := range map[string]func(t *testing.T, b *bed, want []byte){
			"read":  func(t *testing.T, b *bed, want []byte) { same(t, "read", b.get(t, 0, len(want)), want) },
			"touch": func(t *testing.T, b *bed, want []byte) { same(t, "touch", b.m.Bytes(), want) },
			"write(2)": func(t *testing.T, b *bed, want []byte) {
				r, w, err := os.Pipe()
				if err != nil {
					t.Fatal(err)
				}
				go func() { _, _ = w.Write(b.m.Bytes()); w.Close() }()
				var got bytes.Buffer
				if _, err := got.ReadFrom(r); err != nil {
					t.Fatal(err)
				}
				same(t, "write(2)", got.Bytes(), want)
			},
			"write a part": func(t *testing.T, b *bed, want []byte) {
				for page := range len(want) / pageSize {
					copy(want[page*pageSize+100:], "part")
					b.put(t, page*pageSize+100, []byte("part"))
				}
				same(t, "write", b.get(t, 0, len(want)), want)
			},
			"write all": func(t *testing.T, b *bed, want []byte) {
				copy(want, pattern(len(want), 7))
				b.put(t, 0, want)
				same(t, "write", b.m.Bytes(), want)
			},
			"atomic": func(t *testing.T, b *bed, want []byte) {
				for at := 8; at < len(want); at += pageSize {
					old, err := b.a.Atomic(b.r, b.r.IOVA()+uint64(at), FetchAdd, 0, 1)
					if was := *(*uint64)(unsafe.Pointer(&want[at])); err != nil || old != was {
						t.Fatalf("atomic: %#x, %v; want %#x", old, err, was)
					}
					*(*uint64)(unsafe.Pointer(&want[at]))++
				}
				same(t, "atomic", b.m.Bytes(), want)
			},
			"implicit": func(t *testing.T, b *bed, want []byte) {
				r, err := b.tab.Register(RegAttr{PD: 1, Length: math.MaxUint64, Access: allRights | OnDemand})
				if err != nil {
					t.Fatal(err)
				}
				defer r.Deregister()
				b.a.Override(FaultStall)
				got := make([]byte, len(want))
				if err := b.a.Read(r, uint64(b.m.Addr()), got); err != nil {
					t.Fatal(err)
				}
				same(t, "read", got, want)
			},
			"prefetch": func(t *testing.T, b *bed, want []byte) {
				if err := b.s.Prefetch(b.r, b.r.IOVA(), uint64(len(want)), PrefetchWrite); err != nil {
					t.Fatal(err)
				}
				b.where(t, len(want)/pageSize, 0, 0)
				same(t, "prefetch", b.m.Bytes(), want)
			},
		} {
			t.Run(name, func(t *testing.T) {
				const pages = 100
				b := evicting(t, pages, nil)
				b.a.Override(FaultStall)
				want := pattern(pages*pageSize, byte(to))
				b.put(t, 0, want)
				if n := b.evict(t, 0, pages, to); n != pages {
					t.Fatalf("%d of %d pages went", n, pages)
				}
				if to == Limbo {
					b.where(t, 0, pages, 0)
				} else {
					b.where(t, 0, 0, pages)
				}
				access(t, b, want)
				b.where(t, pages, 0, 0)
				if u := b.usage(t); u.Evictions != pages {
					t.Errorf("%d evictions", u.Evictions)
				}
			})
		}
	}
}

// TestEvictedMapping: what was evicted follows mremap, is dropped with its mapping, and
// stays for the application when the region is gone, and when all is.
func TestEvictedMapping(t *testing.T) {
	const pages = 1200 // more than two leaves
	for _, to := range []Level{Limbo, Stored} {
		setup := func(t *testing.T) (*bed, []byte) {
			b := evicting(t, pages, nil)
			b.a.Override(FaultStall)
			want := pattern(pages*pageSize, 3)
			b.put(t, 0, want)
			if n := b.evict(t, 100, 1000, to); n != 1000 {
				t.Fatalf("%d of 1000 pages went", n)
			}
			return b, want
		}
		t.Run("mremap", func(t *testing.T) {
			b, want := setup(t)
			there, err := mmapAt(0, len(want)+5*pageSize, unix.PROT_NONE, unix.MAP_PRIVATE)
			if err != nil {
				t.Fatal(err)
			}
			dst := there + 5*pageSize // elsewhere in its leaf
			if _, _, e := unix.Syscall6(unix.SYS_MREMAP, b.m.Addr(), uintptr(len(want)), uintptr(len(want)),
				unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, dst, 0); e != 0 {
				t.Fatal(e)
			}
			b.m.b = nil
			defer func() { _ = munmap(there, len(want)+5*pageSize) }()
			buf := make([]byte, 10)
			if err := b.a.Read(b.r, b.r.IOVA()+200*pageSize, buf); err != ErrRemoved {
				t.Errorf("read where it was: %v", err)
			}
			// A part by the application, a part by a region that is registered there.
			same(t, "moved", memory(uint64(dst), 500*pageSize), want[:500*pageSize])
			r := register(t, b.tab, dst, len(want))
			got := make([]byte, len(want))
			if err := b.a.Read(r, r.IOVA(), got); err != nil {
				t.Fatal(err)
			}
			same(t, "registered there", got, want)
		})
		t.Run("mremap of a suspended region", func(t *testing.T) {
			b, want := setup(t)
			suspend(t, b.r)
			dst, _, e := unix.Syscall6(unix.SYS_MREMAP, b.m.Addr(), uintptr(len(want)), uintptr(len(want)),
				unix.MREMAP_MAYMOVE|unix.MREMAP_DONTUNMAP, 0, 0)
			if e != 0 {
				t.Fatal(e)
			}
			defer func() { _ = munmap(dst, len(want)) }()
			resume(t, b.r)
			if b.r.Addr() != dst {
				t.Fatalf("the region is at %#x, its memory at %#x", b.r.Addr(), dst)
			}
			same(t, "read", b.get(t, 0, len(want)), want)
			same(t, "touch", memory(uint64(dst), len(want)), want)
			same(t, "what it left", b.m.Bytes(), make([]byte, len(want)))
		})
		t.Run("replace", func(t *testing.T) {
			b, want := setup(t)
			with := newBedIn(t, b.s, 600*pageSize)
			pages := pattern(600*pageSize, 8)
			with.put(t, 0, pages)
			if n := with.evict(t, 0, 600, to); n != 600 {
				t.Fatalf("%d of 600 pages went", n)
			}
			suspend(t, b.r)
			if err := b.r.Replace(b.r.IOVA()+200*pageSize, 600*pageSize, with.m.Addr()); err != nil {
				t.Fatal(err)
			}
			resume(t, b.r)
			copy(want[200*pageSize:], pages)
			same(t, "read", b.get(t, 0, len(want)), want)
			same(t, "touch", b.m.Bytes(), want)
			same(t, "what it was replaced with", with.m.Bytes(), make([]byte, len(pages)))
		})
		t.Run("dontneed", func(t *testing.T) {
			b, want := setup(t)
			if err := madvise(b.m.Addr()+300*pageSize, 300*pageSize, unix.MADV_DONTNEED); err != nil {
				t.Fatal(err)
			}
			clear(want[300*pageSize : 600*pageSize])
			same(t, "read", b.get(t, 0, len(want)), want)
			same(t, "touch", b.m.Bytes(), want)
		})
		t.Run("munmap", func(t *testing.T) {
			b, want := setup(t)
			if err := munmap(b.m.Addr()+300*pageSize, 300*pageSize); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 10)
			if err := b.a.Read(b.r, b.r.IOVA()+400*pageSize, buf); err != ErrRemoved {
				t.Errorf("read what is unmapped: %v", err)
			}
			if _, err := mmapAt(b.m.Addr()+300*pageSize, 300*pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
				t.Fatal(err)
			}
			clear(want[300*pageSize : 600*pageSize])
			r := register(t, b.tab, b.m.Addr(), len(want))
			got := make([]byte, len(want))
			if err := b.a.Read(r, r.IOVA(), got); err != nil {
				t.Fatal(err)
			}
			same(t, "mapped anew", got, want)
		})
		t.Run("deregister", func(t *testing.T) {
			b, want := setup(t)
			if err := b.r.Deregister(); err != nil {
				t.Fatal(err)
			}
			same(t, "touch", b.m.Bytes()[:400*pageSize], want[:400*pageSize])
			b.r = register(t, b.tab, b.m.Addr(), len(want))
			same(t, "read", b.get(t, 0, len(want)), want)
		})
		t.Run("close", func(t *testing.T) {
			s, err := NewSpace(Options{})
			if err != nil {
				t.Fatal(err)
			}
			tab, m := NewTable(s), alloc(t, pages*pageSize)
			r, err := tab.Register(RegAttr{PD: 1, Addr: m.Addr(), Length: pages * pageSize, Access: allRights})
			if err != nil {
				t.Fatal(err)
			}
			want := pattern(pages*pageSize, 5)
			copy(m.Bytes(), want)
			if n, err := s.Evict(r, r.IOVA(), r.Length(), to); errors.Is(err, ErrNotSupported) {
				t.Skip(err)
			} else if n != pages || err != nil {
				t.Fatalf("%d of %d pages went: %v", n, pages, err)
			}
			if err := r.Deregister(); err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			same(t, "touch", m.Bytes(), want)
		})
		t.Run("read-only", func(t *testing.T) {
			b, want := setup(t)
			if err := unix.Mprotect(b.m.Bytes(), unix.PROT_READ); err != nil {
				t.Fatal(err)
			}
			same(t, "touch", b.m.Bytes()[:400*pageSize], want[:400*pageSize])
			same(t, "read", b.get(t, 0, len(want)), want)
			if n := b.evict(t, 0, pages, to); n != 0 {
				t.Errorf("%d pages went that cannot", n)
			}
			if err := unix.Mprotect(b.m.Bytes(), unix.PROT_READ|unix.PROT_WRITE); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestEvictKinds: what is not private anonymous memory stays, and says nothing wrong.
func TestEvictKinds(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			s := newSpace(t, k.opts)
			b := &bed{s: s, tab: NewTable(s), m: alloc(t, 64*pageSize, k.alloc...), a: accessor(t, s)}
			b.r = register(t, b.tab, b.m.Addr(), 64*pageSize, k.mod)
			want := pattern(64*pageSize, 1)
			b.put(t, 0, want)
			n, err := s.Evict(b.r, b.r.IOVA(), b.r.Length(), Stored)
			switch {
			case errors.Is(err, ErrNotSupported):
			case err != nil:
				t.Fatal(err)
			case (n > 0) != (k.name == "userfault"):
				t.Errorf("%d pages went", n)
			}
			same(t, "touch", b.m.Bytes(), want)
		})
	}
}

// TestEvictShared: pages that are shared since a fork are made the process's own, and go.
func TestEvictShared(t *testing.T) {
	b := evicting(t, 64, nil)
	want := pattern(64*pageSize, 1)
	b.put(t, 0, want)
	pid, e := rawfork.Exit()
	if e != 0 {
		t.Fatal(e)
	}
	if _, err := unix.Wait4(int(pid), nil, 0, nil); err != nil {
		t.Fatal(err)
	}
	if n := b.evict(t, 0, 64, Limbo); n != 64 {
		t.Errorf("%d of 64 pages went", n)
	}
	same(t, "touch", b.m.Bytes(), want)
}

// TestEvictNotAfterDeregister: pages that are found for eviction, and are no region's any
// more when it comes to that, stay: nobody would bring them back.
func TestEvictNotAfterDeregister(t *testing.T) {
	b := newBed(t, 64*pageSize)
	b.put(t, 0, pattern(64*pageSize, 1))
	b.s.ev.mu.Lock()
	defer b.s.ev.mu.Unlock()
	if err := b.s.openEviction(); err != nil {
		t.Fatal(err)
	}
	p := b.r.pages
	h := hunt{at: p.start}
	n := b.s.victims([]span{p}, &h, 32, true)
	if n != 32 {
		t.Fatalf("%d pages were found", n)
	}
	if err := b.r.Deregister(); err != nil {
		t.Fatal(err)
	}
	if gone := b.s.evictBatch(n); gone != 0 {
		t.Errorf("%d pages were evicted", gone)
	}
	same(t, "the application's memory", b.m.Bytes(), pattern(64*pageSize, 1))
}

// TestEvictWaitsForSections: as long as an engine may be using pages none of them goes, and
// their words are what they were; nobody waits for ever.
func TestEvictWaitsForSections(t *testing.T) {
	b := evicting(t, 64, nil)
	want := pattern(64*pageSize, 1)
	b.put(t, 0, want)
	b.a.enter()
	n := b.evict(t, 0, 64, Stored)
	for i := range uint64(64) {
		if st := b.s.state(uint64(b.m.Addr()) + i<<pageShift); st != pagePresent {
			t.Errorf("page %d has state %d", i, st)
		}
	}
	b.a.exit()
	if n != 0 {
		t.Errorf("%d pages went", n)
	}
	b.where(t, 64, 0, 0)
	if n := b.evict(t, 0, 64, Limbo); n != 64 {
		t.Errorf("%d of 64 pages went", n)
	}
	same(t, "touch", b.m.Bytes(), want)
}
