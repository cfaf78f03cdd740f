// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"
)

// TestWriteAtEveryAlignment writes messages that start and end everywhere around
// page borders, in packets of several sizes, to absent pages and to present ones,
// and compares all of memory with a model. Memory outside the region is a guard.
func TestWriteAtEveryAlignment(t *testing.T) {
	const span = 12 * pageSize
	s := newSpace(t, Options{})
	tab := NewTable(s)
	a := accessor(t, s)
	starts := []int{0, 1, 7, 8, 100, 4088, 4095, 4096, 4097, 5000, 8191}
	lengths := []int{1, 2, 7, 8, 9, 255, 256, 4088, 4095, 4096, 4097, 8191, 8192, 8193, 12288, 20000}
	for _, packet := range []int{256, 1024, 4096, 3 * 4096, 1 << 20} {
		for _, first := range []string{"absent", "present", "mixed"} {
			m := alloc(t, span+2*pageSize)
			mem := m.Bytes()
			model := make([]byte, len(mem))
			base := pageSize
			guard := pattern(pageSize, 3)
			copy(mem, guard)
			copy(mem[base+span:], guard)
			r := register(t, tab, m.Addr()+uintptr(base), span)
			seed := byte(0)
			for _, start := range starts {
				for _, length := range lengths {
					seed++
					if err := madvise(m.Addr()+uintptr(base), span, unix.MADV_DONTNEED); err != nil {
						t.Fatal(err)
					}
					clear(model)
					copy(model, guard)
					copy(model[base+span:], guard)
					for p := 0; p < span; p += pageSize {
						if first == "present" || first == "mixed" && p/pageSize%2 == 1 {
							fill := pattern(pageSize, seed+1)
							copy(mem[base+p:], fill)
							copy(model[base+p:], fill)
						}
					}
					msg := pattern(length, seed)
					before := s.Stats().PageFaults
					var st Stage
					for at := 0; at < length; at += packet {
						if err := a.Write(&st, r, r.IOVA()+uint64(start+at), msg[at:min(at+packet, length)]); err != nil {
							t.Fatal(err)
						}
					}
					if err := a.Flush(&st); err != nil {
						t.Fatal(err)
					}
					if st.Active() || st.buf != nil {
						t.Fatal("something is still staged")
					}
					copy(model[base+start:], msg)
					what := fmt.Sprintf("%s, packets of %d, %d bytes at %d", first, packet, length, start)
					pages := uint64(0)
					for p := start / pageSize; p <= (start+length-1)/pageSize; p++ {
						if first == "absent" || first == "mixed" && p%2 == 0 {
							pages++
						}
					}
					if got := s.Stats().PageFaults - before; got != pages {
						t.Fatalf("%s: %d page faults, want %d", what, got, pages)
					}
					same(t, what, mem, model)
				}
			}
			if err := r.Deregister(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if st := s.Stats(); st.PageFaults != st.PageFaultsHandled {
		t.Errorf("%d faults, %d handled", st.PageFaults, st.PageFaultsHandled)
	}
}

// TestRandomWrites writes at random through two overlapping regions, one with
// another iova, with two streams that are flushed at random, and drops pages.
func TestRandomWrites(t *testing.T) {
	const n = 64 * pageSize
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 1))
	t.Logf("seed %d", seed)
	for _, kind := range []string{"private", "shared"} {
		var o []AllocOption
		if kind == "shared" {
			o = append(o, Shared())
		}
		b := newBed(t, n, o...)
		r2 := register(t, b.tab, b.m.Addr()+1000, n-5000, func(a *RegAttr) { a.Access |= ZeroBased })
		model := make([]byte, n)
		var sts [2]Stage
		for i := range 3000 {
			off, l := rnd.IntN(n-9000)+1000, rnd.IntN(4097)+1
			if rnd.IntN(4) == 0 {
				off, l = off&^pageMask+pageSize, pageSize
			}
			l = min(l, n-4000-off)
			msg := pattern(l, byte(i))
			r, iova := b.r, b.r.IOVA()+uint64(off)
			if i%2 == 1 {
				r, iova = r2, uint64(off-1000)
			}
			st := &sts[rnd.IntN(2)]
			if err := b.a.Write(st, r, iova, msg); err != nil {
				t.Fatal(err)
			}
			copy(model[off:], msg)
			// The other stream's bytes would come later than these: flush both.
			for k := range sts {
				if err := b.a.Flush(&sts[k]); err != nil {
					t.Fatal(err)
				}
			}
			if rnd.IntN(8) == 0 {
				off, l := rnd.IntN(n), rnd.IntN(9000)+1
				l = min(l, n-off)
				got := b.get(t, off, l)
				same(t, fmt.Sprintf("%s, read %d at %d", kind, l, off), got, model[off:off+l])
			}
			if kind == "private" && rnd.IntN(16) == 0 {
				p := rnd.IntN(n/pageSize-4) * pageSize
				if err := madvise(b.m.Addr()+uintptr(p), 4*pageSize, unix.MADV_DONTNEED); err != nil {
					t.Fatal(err)
				}
				clear(model[p : p+4*pageSize])
			}
		}
		same(t, kind, b.m.Bytes(), model)
	}
}

// TestReadThenWrite: read of untouched pages gives zeros, a write after it goes to
// the page that the read brought in, and an untouched page next to it stays so.
func TestReadThenWrite(t *testing.T) {
	b := newBed(t, 8*pageSize)
	same(t, "untouched", b.get(t, 100, 2*pageSize), make([]byte, 2*pageSize))
	if n, err := b.r.Present(); n != 3*pageSize || err != nil {
		t.Fatalf("%d bytes are present, %v, want 3 pages", n, err)
	}
	msg := pattern(300, 1)
	b.put(t, pageSize-10, msg)
	same(t, "after the write", b.get(t, pageSize-10, 300), msg)
	b.put(t, 4*pageSize+5, msg)
	if n, _ := b.r.Present(); n != 4*pageSize {
		t.Errorf("%d bytes are present, want 4 pages", n)
	}
	if got := b.r.Stats(); got.PageFaults != 4 || got.PageFaultsHandled != 4 {
		t.Errorf("%+v, want 4 faults", got)
	}
}

func TestAtomic(t *testing.T) {
	b := newBed(t, 4*pageSize)
	do := func(off int, op AtomicOp, cmp, v, want uint64) {
		t.Helper()
		if old, err := b.a.Atomic(b.r, b.r.IOVA()+uint64(off), op, cmp, v); old != want || err != nil {
			t.Errorf("%d, %v, want %d", old, err, want)
		}
	}
	do(pageSize-8, FetchAdd, 0, 5, 0)
	do(pageSize-8, FetchAdd, 0, ^uint64(0), 5)
	do(pageSize-8, CompareSwap, 4, 77, 4)
	do(pageSize-8, CompareSwap, 4, 78, 77)
	do(2*pageSize, CompareSwap, 0, 9, 0)
	do(2*pageSize, FetchAdd, 0, 0, 9)
	if got := b.r.Stats().PageFaults; got != 2 {
		t.Errorf("%d faults, want 2", got)
	}
	if _, err := b.a.Atomic(b.r, b.r.IOVA()+4, FetchAdd, 0, 1); err != ErrInvalid {
		t.Errorf("misaligned: %v", err)
	}
}

// TestColdWritesCountEachPageOnce writes 16 MiB of untouched memory in packets that
// do not fit pages, flushing in between as an engine does that has no more packets.
func TestColdWritesCountEachPageOnce(t *testing.T) {
	for _, c := range []struct{ packet, flushEvery, start int }{
		{4096, 0, 0}, {4096, 1, 0}, {4096, 0, 1}, {1024, 0, 0}, {1000, 3, 0}, {1000, 7, 4095}, {1 << 20, 0, 123}, {256, 5, 8},
	} {
		const n = 16 << 20
		b := newBed(t, n)
		src := pattern(c.packet, 1)
		for at, i := c.start, 1; at < n; at, i = at+c.packet, i+1 {
			if err := b.a.Write(&b.st, b.r, b.r.IOVA()+uint64(at), src[:min(c.packet, n-at)]); err != nil {
				t.Fatal(err)
			}
			if c.flushEvery > 0 && i%c.flushEvery == 0 {
				if err := b.a.Flush(&b.st); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := b.a.Flush(&b.st); err != nil {
			t.Fatal(err)
		}
		want := uint64(n / pageSize)
		st := b.s.Stats()
		if st.PageFaults != want || st.PageFaultsHandled != want || st.AppFaults != 0 {
			t.Errorf("%+v: %+v, want %d faults by requests and none by the application", c, st, want)
		}
		got := b.m.Bytes()[c.start:]
		for at := 0; at < len(got); at += c.packet {
			same(t, fmt.Sprintf("%+v at %d", c, at), got[at:min(at+c.packet, len(got))], src[:min(c.packet, len(got)-at)])
		}
	}
}

// TestOneRegionOverSeveralMappings: the kernel places pages of one mapping at a
// time; a message may cross into the next.
func TestOneRegionOverSeveralMappings(t *testing.T) {
	b := newBed(t, pageSize)
	const n = 24 * pageSize
	p, err := mmapAt(0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer munmap(p, n)
	for i := uintptr(1); i < 24; i += 3 {
		if _, err := mmapAt(p+i*pageSize, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
			t.Fatal(err)
		}
	}
	b.r = register(t, b.tab, p, n)
	if b.r.Paging() != UserFault {
		t.Fatal(b.r.Paging())
	}
	same(t, "read", b.get(t, 10, 5*pageSize), make([]byte, 5*pageSize))
	msg := pattern(n-7*pageSize-100, 1)
	b.put(t, 6*pageSize+50, msg)
	same(t, "write", b.get(t, 6*pageSize+50, len(msg)), msg)
	if got, want := b.r.Stats().PageFaults, uint64(6+17); got != want {
		t.Errorf("%d faults, want %d", got, want)
	}
}

// TestStagingBuffersRunOut: more streams than an Accessor has buffers.
func TestStagingBuffersRunOut(t *testing.T) {
	const streams = 3 * stageBufs
	b := newBed(t, 4*streams*pageSize)
	sts := make([]Stage, streams)
	msg := pattern(9000, 2)
	for part := range 3 {
		for i := range sts {
			at := uint64(i*4*pageSize + 17 + part*3000)
			if err := b.a.Write(&sts[i], b.r, b.r.IOVA()+at, msg[part*3000:][:3000]); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i := range sts {
		if err := b.a.Flush(&sts[i]); err != nil {
			t.Fatal(err)
		}
		same(t, fmt.Sprint("stream ", i), b.m.Bytes()[i*4*pageSize+17:][:9000], msg)
	}
	if len(b.a.bufs) != stageBufs || b.a.spare != 0 {
		t.Errorf("%d buffers are back, %d were never made", len(b.a.bufs), b.a.spare)
	}
	st := Stage{}
	if err := b.a.Write(&st, b.r, b.r.IOVA()+3*pageSize+100, msg[:10]); err != nil {
		t.Fatal(err)
	}
	if !st.Active() {
		t.Fatal("nothing is staged")
	}
	st.Drop()
	if st.Active() || b.m.Bytes()[3*pageSize+100] != 0 {
		t.Error("dropped bytes arrived")
	}
}
