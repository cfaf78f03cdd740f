// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

const benchBytes = 64 << 20

// cold runs f for each page of memory that has no page present.
func cold(b *testing.B, packet int, f func(t *bed, va uint64)) {
	t := newBed(b, benchBytes)
	b.SetBytes(int64(packet))
	b.ReportAllocs()
	at := uint64(0)
	for b.Loop() {
		if at+uint64(packet) > benchBytes {
			b.StopTimer()
			if err := t.a.Flush(&t.st); err != nil {
				b.Fatal(err)
			}
			if err := madvise(t.m.Addr(), benchBytes, unix.MADV_DONTNEED); err != nil {
				b.Fatal(err)
			}
			at = 0
			b.StartTimer()
		}
		f(t, uint64(t.m.Addr())+at)
		at += uint64(packet)
	}
	_ = t.a.Flush(&t.st)
}

// BenchmarkPlacePage compares the ways to place whole pages that arrive in packets
// of 4 KiB: from where they arrived, one by one, or gathered in 16.
func BenchmarkPlacePage(b *testing.B) {
	src := alloc(b, pageSize+64)
	copy(src.Bytes(), pattern(pageSize+64, 1))
	packet := src.Bytes()[54:][:pageSize] // as behind the headers of a frame
	b.Run("direct", func(b *testing.B) {
		cold(b, pageSize, func(t *bed, va uint64) {
			if err := t.a.place(t.r, va, 0, packet, packet); err != nil {
				b.Fatal(err)
			}
		})
	})
	b.Run("gathered", func(b *testing.B) {
		cold(b, pageSize, func(t *bed, va uint64) {
			if _, err := t.a.gather(&t.st, t.r, va, packet); err != nil {
				b.Fatal(err)
			}
		})
	})
	big := pattern(16*pageSize, 1)
	b.Run("direct-16-pages", func(b *testing.B) {
		cold(b, 16*pageSize, func(t *bed, va uint64) {
			if err := t.a.place(t.r, va, 0, big, big); err != nil {
				b.Fatal(err)
			}
		})
	})
}

// BenchmarkWrite is Write in packets, to absent and to present pages.
func BenchmarkWrite(b *testing.B) {
	for _, packet := range []int{64, 1024, 4096} {
		src := pattern(packet, 1)
		b.Run(fmt.Sprintf("cold/%d", packet), func(b *testing.B) {
			cold(b, packet, func(t *bed, va uint64) {
				if err := t.a.Write(&t.st, t.r, va, src); err != nil {
					b.Fatal(err)
				}
			})
		})
		b.Run(fmt.Sprintf("present/%d", packet), func(b *testing.B) {
			t := newBed(b, 1<<20)
			t.put(b, 0, make([]byte, 1<<20))
			b.SetBytes(int64(packet))
			b.ReportAllocs()
			at := 0
			for b.Loop() {
				if err := t.a.Write(&t.st, t.r, t.r.IOVA()+uint64(at), src); err != nil {
					b.Fatal(err)
				}
				at = (at + packet) % (1 << 20)
			}
		})
	}
}

func BenchmarkRead(b *testing.B) {
	t := newBed(b, 1<<20)
	t.put(b, 0, make([]byte, 1<<20))
	dst := make([]byte, pageSize)
	b.SetBytes(pageSize)
	b.ReportAllocs()
	for b.Loop() {
		if err := t.a.Read(t.r, t.r.IOVA(), dst); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAtomic(b *testing.B) {
	t := newBed(b, pageSize)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := t.a.Atomic(t.r, t.r.IOVA(), FetchAdd, 0, 1); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCheck(b *testing.B) {
	t := newBed(b, pageSize)
	for range 1000 {
		register(b, t.tab, t.m.Addr(), 1)
	}
	k := t.r.RKey()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := t.tab.Check(k, 1, t.r.IOVA(), 64, RemoteWrite); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkRegister(b *testing.B) {
	for _, n := range []int{4 << 10, 1 << 20, 64 << 20, 1 << 30, 4 << 30} {
		b.Run(fmt.Sprintf("%dKiB", n>>10), func(b *testing.B) {
			s := newSpace(b, Options{})
			tab := NewTable(s)
			m := alloc(b, n)
			b.ReportAllocs()
			for b.Loop() {
				r, err := tab.Register(RegAttr{Addr: m.Addr(), Length: uint64(n), Access: allRights})
				if err == nil {
					err = r.Deregister()
				}
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkWriteAmongDiscards writes to a region of which another thread discards pages
// without a pause: the kernel hardly ever lets pages be filled.
func BenchmarkWriteAmongDiscards(b *testing.B) {
	const n = 64 << 10
	t := newBed(b, 4<<20)
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; !stop.Load(); i++ {
			_ = madvise(t.m.Addr()+uintptr(i%48*n), n, unix.MADV_DONTNEED)
		}
	})
	src := make([]byte, n)
	b.SetBytes(n)
	for i := 0; b.Loop(); {
		err := t.a.Write(&t.st, t.r, t.r.IOVA()+uint64(i%48*n), src)
		if err == nil {
			err = t.a.Flush(&t.st)
		}
		switch err {
		case nil:
			i++
		case ErrBusy:
		default:
			b.Fatal(err)
		}
	}
	stop.Store(true)
	wg.Wait()
}

// BenchmarkApplicationFault is what the application's first touch of a page costs.
func BenchmarkApplicationFault(b *testing.B) {
	cold(b, pageSize, func(t *bed, va uint64) { memory(va, 1)[0] = 1 })
}

// BenchmarkBind is a bind of a window of type 2 and its invalidation.
func BenchmarkBind(b *testing.B) {
	t := newBed(b, 16*pageSize)
	r := register(b, t.tab, t.m.Addr(), 8*pageSize, func(a *RegAttr) { a.Access |= MWBind })
	w, err := t.tab.AllocWindow(1, Window2)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = w.Dealloc() })
	a := BindAttr{Key: w.RKey(), PD: 1, QP: 77, Region: r.LKey(), Addr: r.IOVA(), Length: 100, Access: RemoteWrite}
	b.ReportAllocs()
	for b.Loop() {
		a.Key = a.Key&^0xff | (a.Key+1)&0xff
		if err := t.tab.Bind(&a); err != nil {
			b.Fatal(err)
		}
		if err := t.tab.Invalidate(a.Key, 1, 77); err != nil {
			b.Fatal(err)
		}
	}
}
