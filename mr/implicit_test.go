// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func implicitRegion(t testing.TB, tab *Table) *Region {
	t.Helper()
	r, err := tab.Register(RegAttr{PD: 1, Length: math.MaxUint64, Access: allRights | OnDemand})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Deregister() }) // ErrClosed if the test did it
	if r.Paging() != Implicit {
		t.Fatalf("paged by %v", r.Paging())
	}
	return r
}

func TestImplicitAttributes(t *testing.T) {
	tab := NewTable(newSpace(t, Options{}))
	for _, c := range []struct {
		what string
		a    RegAttr
		want error
	}{
		{"without on demand", RegAttr{Length: math.MaxUint64, Access: LocalWrite}, ErrUnmapped},
		{"with an iova", RegAttr{Length: math.MaxUint64, IOVA: 4096, HaveIOVA: true, Access: OnDemand}, ErrInvalid},
		{"of huge pages", RegAttr{Length: math.MaxUint64, Access: OnDemand | HugeTLB}, ErrInvalid},
		{"pinned", RegAttr{Length: math.MaxUint64, Access: OnDemand, Pin: true}, ErrInvalid},
		{"with remote write alone", RegAttr{Length: math.MaxUint64, Access: OnDemand | RemoteWrite}, ErrInvalid},
	} {
		if _, err := tab.Register(c.a); !errors.Is(err, c.want) {
			t.Errorf("implicit region %s: %v, want %v", c.what, err, c.want)
		}
	}
	r := implicitRegion(t, tab)
	if got, err := tab.Check(r.RKey(), 1, 0x7fff00000000, 1<<20, RemoteWrite); got != r || err != nil {
		t.Errorf("check: %v, %v", got, err)
	}
	if n, err := r.Present(); err != nil || n == 0 {
		t.Errorf("%d bytes present, %v", n, err)
	}
	if err := r.Deregister(); err != nil {
		t.Error(err)
	}
	if err := r.Deregister(); err != ErrClosed {
		t.Errorf("a second time: %v", err)
	}
}

// TestImplicitWhatIsThere: memory of no region, of a region, of one that was, of the
// Go heap, and all that with data that runs from one into the next.
func TestImplicitWhatIsThere(t *testing.T) {
	b := newBed(t, 8*pageSize)
	im := implicitRegion(t, b.tab)
	put := func(what string, va uintptr, n int) {
		t.Helper()
		src := bytes.Repeat([]byte{0x5a}, n)
		src[0], src[n-1] = 1, 2
		if err := b.a.Write(&b.st, im, uint64(va), src); err != nil {
			t.Fatalf("%s: write: %v", what, err)
		}
		if err := b.a.Flush(&b.st); err != nil {
			t.Fatalf("%s: flush: %v", what, err)
		}
		dst := make([]byte, n)
		if err := b.a.Read(im, uint64(va), dst); err != nil || !bytes.Equal(src, dst) {
			t.Fatalf("%s: read: %v, equal %v", what, err, bytes.Equal(src, dst))
		}
		if got := memory(uint64(va), n); !bytes.Equal(got, src) {
			t.Fatalf("%s: memory differs", what)
		}
	}
	put("in a region", b.m.Addr()+100, 2*pageSize)
	if c := im.Stats(); c.PageFaultsHandled != 3 {
		t.Errorf("%d pages were placed, want 3", c.PageFaultsHandled)
	}
	if c := b.s.Stats(); c.AppFaults != 0 {
		t.Errorf("%d pages were touched before they were there", c.AppFaults)
	}
	plain := alloc(t, 4*pageSize)
	put("in no region", plain.Addr()+8, 2*pageSize)
	heap := make([]byte, 3*pageSize)
	put("in the Go heap", uintptr(unsafe.Pointer(&heap[0]))+1, 2*pageSize)

	// What the page table remembers of a region that is gone is no hindrance.
	if err := b.r.Deregister(); err != nil {
		t.Fatal(err)
	}
	put("in a former region, absent", b.m.Addr()+4*pageSize, 2*pageSize+1)
	if err := unix.Madvise(b.m.Bytes(), unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	put("in a former region, present once", b.m.Addr()+100, 7*pageSize)

	// Half of it is a region again: absent pages of both kinds in one message.
	if err := unix.Madvise(b.m.Bytes(), unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	register(t, b.tab, b.m.Addr()+2*pageSize, 2*pageSize)
	put("across a border", b.m.Addr()+1, 8*pageSize-2)
	old, err := b.a.Atomic(im, uint64(b.m.Addr())+8, FetchAdd, 0, 1)
	if want := uint64(0x5a5a5a5a5a5a5a5a); err != nil || old != want || *pointer[uint64](uint64(b.m.Addr()) + 8) != want+1 {
		t.Errorf("atomic: %#x, %v", old, err)
	}
}

// TestImplicitFormerRegion: absent pages that the page table knows from a region
// which ended are left to the kernel, whatever is done first.
func TestImplicitFormerRegion(t *testing.T) {
	for name, do := range map[string]func(b *bed, im *Region) error{
		"read": func(b *bed, im *Region) error { return b.a.Read(im, uint64(b.m.Addr()), make([]byte, 100)) },
		"atomic": func(b *bed, im *Region) error {
			_, err := b.a.Atomic(im, uint64(b.m.Addr()), CompareSwap, 0, 7)
			return err
		},
		"prefetch":       func(b *bed, im *Region) error { return b.s.Prefetch(im, uint64(b.m.Addr()), 4*pageSize, Prefetch) },
		"prefetch write": func(b *bed, im *Region) error { return b.s.Prefetch(im, uint64(b.m.Addr()), 4*pageSize, PrefetchWrite) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, 4*pageSize)
			im := implicitRegion(t, b.tab)
			b.put(t, 3*pageSize, []byte{1}) // the table asks the kernel for all of it
			if err := b.r.Deregister(); err != nil {
				t.Fatal(err)
			}
			if err := do(b, im); err != nil {
				t.Error(err)
			}
		})
	}
}

func writeAndFlush(b *bed, r *Region, va uint64, src []byte) error {
	if err := b.a.Write(&b.st, r, va, src); err != nil {
		return err
	}
	return b.a.Flush(&b.st)
}

// TestImplicitFaults: what is not mapped, or not for writing, ends the request.
func TestImplicitFaults(t *testing.T) {
	b := newBed(t, 4*pageSize)
	im := implicitRegion(t, b.tab)
	gone := alloc(t, pageSize)
	readOnly := alloc(t, pageSize)
	if err := unix.Mprotect(readOnly.Bytes(), unix.PROT_READ); err != nil {
		t.Fatal(err)
	}
	at := uint64(gone.Addr())
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	for _, va := range []uint64{0, 8, pageSize - 1, at, 1 << 46, 1<<47 - 8, 1 << 47, 1 << 48, 0xffff800000000000, 0xffffffffff600000, math.MaxUint64 - 8} {
		buf := make([]byte, 8)
		if err := writeAndFlush(b, im, va, buf); err != ErrFault {
			t.Errorf("write at %#x: %v", va, err)
		}
		if err := b.a.Read(im, va, buf); err != ErrFault {
			t.Errorf("read at %#x: %v", va, err)
		}
		if _, err := b.a.Atomic(im, va&^7, FetchAdd, 0, 1); err != ErrFault {
			t.Errorf("atomic at %#x: %v", va, err)
		}
		for _, adv := range []Advice{Prefetch, PrefetchWrite, PrefetchNoFault} {
			if err := b.s.Prefetch(im, va, 8, adv); err != ErrFault && !errors.Is(err, ErrRemoved) && !errors.Is(err, ErrUnmapped) {
				t.Errorf("advice %d at %#x: %v", adv, va, err)
			}
		}
	}
	ro := uint64(readOnly.Addr())
	if err := writeAndFlush(b, im, ro, []byte{1, 2}); err != ErrFault {
		t.Errorf("write to what is read-only: %v", err)
	}
	if err := b.s.Prefetch(im, ro, 8, PrefetchWrite); err != ErrFault {
		t.Errorf("prefetch for writing of what is read-only: %v", err)
	}
	if err := b.a.Read(im, ro, make([]byte, 8)); err != nil {
		t.Errorf("read of what is read-only: %v", err)
	}
	// Unmapped while data for it is staged.
	if err := b.a.Write(&b.st, im, uint64(b.m.Addr()), []byte("staged")); err != nil || !b.st.Active() {
		t.Fatalf("%v, staged %v", err, b.st.Active())
	}
	if err := b.m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := b.a.Flush(&b.st); err != ErrFault || b.st.Active() {
		t.Errorf("flush: %v, still staged %v", err, b.st.Active())
	}
	// The key works for what is mapped there later, which the old region's must not.
	if _, err := unix.MmapPtr(-1, 0, unsafe.Pointer(pointer[byte](uint64(b.r.Addr()))), 4*pageSize, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.MunmapPtr(unsafe.Pointer(pointer[byte](uint64(b.r.Addr()))), 4*pageSize) }()
	if err := b.a.Write(&b.st, im, uint64(b.r.Addr()), []byte("later")); err != nil {
		t.Error(err)
	}
	if err := b.a.Write(&b.st, b.r, uint64(b.r.Addr()), []byte("later")); err != ErrRemoved {
		t.Errorf("the old region's key: %v", err)
	}
	if !bytes.Equal(memory(uint64(b.r.Addr()), 5), []byte("later")) {
		t.Error("not written")
	}
	if err := im.Deregister(); err != nil {
		t.Fatal(err)
	}
	if err := b.a.Write(&b.st, im, uint64(b.r.Addr()), []byte("end")); err != ErrKey {
		t.Errorf("after deregistration: %v", err)
	}
}

func TestNull(t *testing.T) {
	s := newSpace(t, Options{})
	tab, a := NewTable(s), accessor(t, s)
	r, err := tab.RegisterNull(1)
	if err != nil {
		t.Fatal(err)
	}
	for _, va := range []uint64{0, 1 << 47, math.MaxUint64 - 64} {
		if got, err := tab.Check(r.LKey(), 1, va, 64, LocalWrite); got != r || err != nil {
			t.Errorf("check of %#x: %v, %v", va, got, err)
		}
		var st Stage
		if err := a.Write(&st, r, va, bytes.Repeat([]byte{1}, 64)); err != nil || st.Active() {
			t.Errorf("write at %#x: %v", va, err)
		}
		buf := bytes.Repeat([]byte{0xa5}, 64)
		if err := a.Read(r, va, buf); err != nil || !bytes.Equal(buf, make([]byte, 64)) {
			t.Errorf("read at %#x: %v, %x", va, err, buf)
		}
		if _, err := a.Atomic(r, va&^7, FetchAdd, 0, 1); err != ErrAccess {
			t.Errorf("atomic at %#x: %v", va, err)
		}
	}
	for _, right := range []Access{RemoteRead, RemoteWrite, RemoteAtomic} {
		if _, err := tab.Check(r.RKey(), 1, 0, 8, right); err != ErrAccess {
			t.Errorf("a peer's access %#x: %v", right, err)
		}
	}
	if err := r.Deregister(); err != nil {
		t.Fatal(err)
	}
	if err := a.Write(new(Stage), r, 0, []byte{1}); err != ErrKey {
		t.Errorf("after deregistration: %v", err)
	}
	if err := a.Read(r, 0, make([]byte, 1)); err != ErrKey {
		t.Errorf("after deregistration: %v", err)
	}
}

// TestImplicitStorm: requests by the key of all memory, while regions come and go there,
// pages are thrown away, mappings are replaced, and the garbage collector runs. Every
// request succeeds or fails as a fault; memory that none names is not touched.
func TestImplicitStorm(t *testing.T) {
	const pages = 64
	s := newSpace(t, Options{})
	tab := NewTable(s)
	im := implicitRegion(t, tab)
	m := alloc(t, (pages+2)*pageSize)
	first, last := m.Bytes()[:pageSize], m.Bytes()[(pages+1)*pageSize:]
	clear(first)
	clear(last)
	base := uint64(m.Addr()) + pageSize
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var ok, failed atomic.Int64
	each := func(f func(r *rand.Rand) error) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for r := rand.New(rand.NewPCG(1, uint64(stormSeed.Add(1)))); ; {
				select {
				case <-stop:
					return
				default:
				}
				switch err := f(r); {
				case err == nil:
					ok.Add(1)
				case IsFault(err) || err == ErrBusy || errors.Is(err, ErrUnmapped):
					failed.Add(1)
				default:
					t.Errorf("%v", err)
					return
				}
			}
		}()
	}
	for range 2 {
		a, st := accessor(t, s), new(Stage)
		buf := bytes.Repeat([]byte{0x77}, 4*pageSize)
		each(func(r *rand.Rand) error {
			off := r.Uint64N(pages*pageSize - 8)
			n := min(1+r.Uint64N(uint64(len(buf))), pages*pageSize-off)
			switch r.IntN(4) {
			case 0:
				return a.Read(im, base+off, make([]byte, n))
			case 1:
				_, err := a.Atomic(im, base+off&^7, FetchAdd, 0, 0)
				return err
			}
			if err := a.Write(st, im, base+off, buf[:n]); err != nil {
				st.Drop()
				return err
			}
			err := a.Flush(st)
			st.Drop()
			return err
		})
	}
	each(func(r *rand.Rand) error {
		off := r.Uint64N(pages)
		err := s.Prefetch(im, base+off*pageSize, 1+r.Uint64N((pages-off)*pageSize), Advice(r.IntN(3)))
		return err
	})
	each(func(r *rand.Rand) error {
		off := r.Uint64N(pages)
		reg, err := tab.Register(RegAttr{PD: 1, Addr: uintptr(base + off*pageSize), Length: 1 + r.Uint64N((pages-off)*pageSize), Access: allRights})
		if err != nil {
			return err
		}
		runtime.Gosched()
		return reg.Deregister()
	})
	each(func(r *rand.Rand) error {
		off := r.Uint64N(pages)
		n := uintptr(1+r.Uint64N(pages-off)) * pageSize
		at := unsafe.Pointer(pointer[byte](base + off*pageSize))
		if r.IntN(2) == 0 {
			return unix.Madvise(unsafe.Slice((*byte)(at), n), unix.MADV_DONTNEED)
		}
		_, err := unix.MmapPtr(-1, 0, at, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED)
		return err
	})
	each(func(*rand.Rand) error { runtime.GC(); return nil })
	for ok.Load() < 60000 && !t.Failed() {
		time.Sleep(time.Millisecond)
	}
	close(stop)
	wg.Wait()
	if !bytes.Equal(first, make([]byte, pageSize)) || !bytes.Equal(last, make([]byte, pageSize)) {
		t.Error("memory that no request names was written to")
	}
	t.Logf("%d operations succeeded, %d met what was not there", ok.Load(), failed.Load())
}

var stormSeed atomic.Int64
