// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Which pages of a region were written, for checkpoints. The kernel write-protects pages
// and lifts that by itself at the first write, whoever's it is (UFFD_FEATURE_WP_ASYNC);
// PAGEMAP_SCAN says where it has, and protects anew.
//
// Absent pages cannot be protected but by markers in the kernel's page table, and on
// those UFFDIO_MOVE and UFFDIO_ZEROPAGE fail as on pages that are there. So private
// anonymous memory gets none. What an absent page was at the last look is kept here
// instead: zero, or evicted. What became of it since shows by what it is now, but for
// pages that came and went again: of what goes the pager and the evictor take notice
// before it does (leaf.left).
//
// Elsewhere (shared memory, files, what the kernel pages) there are markers: there the
// kernel takes pages away and maps them again as it likes, and keeps markers for them.

// Range is bytes of a region, as requests count them.
type Range struct{ IOVA, Length uint64 }

// tracker is what is known of a region whose written pages are asked for. Bits are of its
// pages, from the first one on; so it moves with its region. Guarded by Space.mu.
type tracker struct {
	written bitmap // and not told
	zero    bitmap // absent, or the zero page, when last looked at
	away    bitmap // evicted then
	own     bool   // by the second userfaultfd, which has no events
	buf     []scanned
}

type bitmap []uint64

func newBitmap(pages uint64) bitmap   { return make(bitmap, (pages+63)/64) }
func (b bitmap) get(i uint64) bool    { return b[i/64]>>(i%64)&1 != 0 }
func (b bitmap) set(i uint64)         { b[i/64] |= 1 << (i % 64) }
func (b bitmap) put(i uint64, v bool) { b[i/64] = b[i/64]&^(1<<(i%64)) | b2u(v)<<(i%64) }

func b2u(v bool) uint64 {
	if v {
		return 1
	}
	return 0
}

// setRange sets the bits from ≤ i < to.
func (b bitmap) setRange(from, to uint64) {
	for from < to {
		n := min(64-from%64, to-from)
		b[from/64] |= (1<<n - 1) << (from % 64) // n 64 shifts to 0, and 0-1 is all ones
		from += n
	}
}

// runs calls f for each run of set bits below n.
func (b bitmap) runs(n uint64, f func(from, to uint64)) {
	for i := uint64(0); i < n; {
		w := b[i/64] >> (i % 64)
		if w == 0 {
			i = (i/64 + 1) * 64
			continue
		}
		i += uint64(bits.TrailingZeros64(w))
		from := i
		for i < n && b.get(i) {
			i++
		}
		if from < n {
			f(from, min(i, n))
		}
	}
}

// TrackDirty begins or ends to note which pages of the region are written, by whomever;
// see Dirty. What was written before does not count. It works for all memory that is
// mapped, also where userfaultfd does not page it: pages of a file, or that are pinned.
// Of shared memory, what is written through this process's mapping of it counts. While a
// region is tracked that userfaultfd does not page, others over the same memory are paged
// by the kernel, too.
//
// Pages that are tracked cost a short fault, in the kernel, at their first write after
// each look. Errors: ErrNotSupported with the reason (Linux before 6.7, no userfaultfd,
// regions without memory of their own, private mappings of shared memory), ErrClosed,
// ErrNoMem. On what is as asked already it does nothing.
func (r *Region) TrackDirty(on bool) error {
	s := r.table.space
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case r.base != r:
		return fmt.Errorf("%w: a memory window is not tracked", ErrInvalid)
	case r.gate.has(gateDead | gateEliminated):
		return ErrClosed
	case !on:
		s.untrack(r)
		return nil
	case r.dirty != nil:
		return nil
	}
	t, err := s.track(r)
	if err != nil {
		return err
	}
	r.dirty = t
	s.tracked[r] = struct{}{}
	if err := s.inspect(r); err != nil {
		s.untrack(r)
		return err
	}
	clear(t.written)
	return nil
}

// Dirty lists what was written of a tracked region since it was tracked, or last asked for
// with clear set: by the application, by requests, or by the kernel in its place. Ranges
// are of whole pages, within the region, in order and not adjacent. Nobody need stop: of a
// page that is written while Dirty runs, either this list tells or the next one, and what
// this list tells may have been written until it returns. So who copies what each list
// says, and the last one with nobody writing, has copied all.
//
// A page that was dropped (MADV_DONTNEED) counts as written. One that was evicted, or came
// back, counts at the next look or two even if it was not written; so does, in shared
// memory, one that was absent and is read. Errors: ErrInvalid if the
// region is not tracked, ErrClosed, ErrNotSupported if memory came to be there of which
// nothing tells.
func (r *Region) Dirty(clearIt bool) ([]Range, error) {
	s := r.table.space
	s.mu.Lock()
	defer s.mu.Unlock()
	t := r.dirty
	switch {
	case r.gate.has(gateDead | gateEliminated):
		return nil, ErrClosed
	case t == nil:
		return nil, fmt.Errorf("%w: the region is not tracked", ErrInvalid)
	}
	if err := s.inspect(r); err != nil {
		return nil, err
	}
	var out []Range
	first := r.va(r.attr.IOVA) - r.pages.start // bytes of the first page that are before the region
	t.written.runs((r.pages.end-r.pages.start)>>pageShift, func(from, to uint64) {
		a, b := max(from<<pageShift, first)-first, min(to<<pageShift-first, r.attr.Length)
		out = append(out, Range{r.attr.IOVA + a, b - a})
	})
	if clearIt {
		clear(t.written)
	}
	return out, nil
}

// dirtyBytes is how much Dirty would tell of, in whole pages; 0 if the region is not
// tracked. It is called with s.mu held.
func (s *Space) dirtyBytes(r *Region) (n uint64) {
	if r.dirty == nil || s.inspect(r) != nil {
		return 0
	}
	for _, w := range r.dirty.written {
		n += uint64(bits.OnesCount64(w)) << pageShift
	}
	return n
}

// track makes what is needed to look at a region. It is called with s.mu held, as are
// those below.
func (s *Space) track(r *Region) (*tracker, error) {
	if r.paging == Implicit || r.paging == NullMemory {
		return nil, fmt.Errorf("%w: a region of this kind (%v) has no pages of its own", ErrNotSupported, r.paging)
	}
	n := (r.pages.end - r.pages.start) >> pageShift
	t := &tracker{written: newBitmap(n), zero: newBitmap(n), away: newBitmap(n), buf: make([]scanned, scanRanges)}
	if r.paging == UserFault {
		if s.features&(uffdFeatureWPAsync|uffdFeatureWPHoles) != uffdFeatureWPAsync|uffdFeatureWPHoles {
			return nil, fmt.Errorf("%w: the kernel does not tell of writes (UFFD_FEATURE_WP_ASYNC, Linux 6.7)", ErrNotSupported)
		}
		return t, nil
	}
	t.own = true
	if err := s.openWatch(); err != nil {
		return nil, err
	}
	s.watched.add(r.pages.start, r.pages.end)
	return t, nil
}

// openWatch opens the userfaultfd that watches writes alone: it has no events, so that
// nobody ever waits for it, and may have the Go heap, too.
func (s *Space) openWatch() error {
	if s.watch >= 0 {
		return nil
	}
	if s.pagemap < 0 {
		return fmt.Errorf("%w: %w", ErrNotSupported, s.uffdErr)
	}
	fd, err := userfaultfd(unix.O_CLOEXEC | unix.O_NONBLOCK | uffdUserModeOnly)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotSupported, err)
	}
	a := uffdAPIArg{api: uffdAPI, features: dirtyUffdFeatures}
	if err := uffdIoctl(fd, uffdioAPI, unsafe.Pointer(&a)); err != nil {
		unix.Close(fd)
		return fmt.Errorf("%w: the kernel does not tell of writes (UFFD_FEATURE_WP_ASYNC, Linux 6.7): %w", ErrNotSupported, err)
	}
	s.watch = fd
	return nil
}

// untrack ends it for a region, if it was tracked.
func (s *Space) untrack(r *Region) {
	t := r.dirty
	if t == nil {
		return
	}
	r.dirty = nil
	delete(s.tracked, r)
	if t.own {
		for _, f := range s.watched.remove(r.pages.start, r.pages.end) {
			s.unregisterFrom(s.watch, f.start, f.end)
		}
		return
	}
	for q := range s.tracked {
		if q.pages.start < r.pages.end && r.pages.start < q.pages.end {
			return // still wanted; what is protected needlessly costs a fault once
		}
	}
	// It stays registered for both kinds of faults: to take it out for a moment would have
	// the kernel fill pages that are evicted. Nothing is protected any more.
	w := struct {
		r    uffdRange
		mode uint64
	}{uffdRange{r.pages.start, r.pages.end - r.pages.start}, 0}
	_ = uffdIoctl(s.uffd, uffdioWriteProtect, unsafe.Pointer(&w)) // partly unmapped: that costs the rest a fault each
}

// trackAnew goes on to track a region whose memory is other memory now: all of it counts
// as written. If it cannot be tracked it is not.
func (s *Space) trackAnew(r *Region) {
	t, err := s.track(r)
	if err != nil {
		return
	}
	r.dirty = t
	s.tracked[r] = struct{}{}
	t.written.setRange(0, (r.pages.end-r.pages.start)>>pageShift)
}

// retrack follows a suspended region from where it was. What went there with it is known.
func (s *Space) retrack(r *Region, from span, went bool) {
	t := r.dirty
	if t == nil {
		return
	}
	if t.own {
		s.watched.add(r.pages.start, r.pages.end)
		for _, f := range s.watched.remove(from.start, from.end) {
			s.unregisterFrom(s.watch, f.start, f.end)
		}
	}
	if !went || t.own {
		t.written.setRange(0, (r.pages.end-r.pages.start)>>pageShift)
	}
}

// piece is a part of a region whose pages are looked at in one way.
type piece struct {
	span
	marked bool // by markers, see above
}

// pieces says how to look at a region: mapping by mapping, without what was unmapped.
func (s *Space) pieces(r *Region) ([]piece, error) {
	s.settle()
	if r.dirty.own {
		return []piece{{r.pages, true}}, nil
	}
	var out []piece
	add := func(p piece) {
		if n := len(out); n > 0 && out[n-1].end == p.start && out[n-1].marked == p.marked {
			out[n-1].end = p.end
		} else if p.start < p.end {
			out = append(out, p)
		}
	}
	gone := s.gone(r.pages.start, r.pages.end)
	var foreign error
	err := mappings(func(m mapping) bool {
		c := m.common(r.pages)
		if c.start >= c.end {
			return m.start < r.pages.end
		}
		at, end, private := c.start, c.end, m.perms[3] == 'p'
		for _, g := range gone {
			if g.end <= at || end <= g.start {
				continue
			}
			add(piece{span{at, max(at, g.start)}, !private})
			at = min(g.end, end)
		}
		if private && m.file && at < end {
			foreign = fmt.Errorf("%w: a private mapping of shared memory at %#x", ErrNotSupported, at)
			return false
		}
		add(piece{span{at, end}, !private})
		return true
	})
	if err := errors.Join(err, foreign); err != nil {
		return nil, err
	}
	return out, nil
}

const lookTries = 1000 // the pager has a page out for microseconds

// inspect notes what was written to a region's pages since it, or another region on the same
// pages, was looked at.
func (s *Space) inspect(r *Region) error {
	ps, err := s.pieces(r)
	if err != nil {
		return err
	}
	for _, p := range ps {
		e := unix.Errno(0)
		for i := range lookTries {
			// What came to be there since, or was out for a moment, is not registered so.
			if e = s.watchWrites(r.dirty, p); e == 0 {
				if e = s.lookPiece(r, p); e == 0 {
					break
				}
			}
			if e == unix.EBUSY || e == unix.EINVAL || e == unix.ENOMEM {
				break
			}
			pause(i)
		}
		switch e {
		case 0:
		case unix.ENOMEM:
			return ErrNoMem
		default:
			return fmt.Errorf("%w: the kernel does not tell of writes to the memory at %#x: %w", ErrNotSupported, p.start, e)
		}
	}
	return nil
}

// watchWrites registers pages so that the kernel notes writes to them.
func (s *Space) watchWrites(t *tracker, p piece) unix.Errno {
	fd, mode := s.uffd, uint64(uffdRegisterMiss|uffdRegisterWP)
	if t.own {
		fd, mode = s.watch, uffdRegisterWP
	}
	_, e := s.registerPages(fd, p.start, p.end, mode)
	return e
}

// lookPiece looks at one piece of a region.
func (s *Space) lookPiece(r *Region, p piece) unix.Errno {
	t, base := r.dirty, r.pages.start
	defer runtime.KeepAlive(t)
	for va := p.start; va < p.end && !p.marked; va = (va/leafBytes + 1) * leafBytes {
		s.leaf(va) // without one it goes unnoticed that pages leave
	}
	if p.marked {
		return s.scan(p.span, scanProtect|scanCheck, pageIsWritten, 0, pageIsWritten, t.buf, func(g scanned) {
			s.eachTracker(g.start, g.end, func(q *tracker, from, to uint64) { q.written.setRange(from, to) })
		})
	}
	at := p.start
	e := s.scan(p.span, scanProtect|scanCheck, 0, pageIsSomewhere, pageIsWritten|pageIsZero, t.buf, func(g scanned) {
		s.lookAbsent(t, base, at, g.start)
		at = g.end
		zero := g.categories&pageIsZero != 0
		if g.categories&pageIsWritten != 0 {
			s.eachTracker(g.start, g.end, func(q *tracker, from, to uint64) {
				if !zero {
					q.written.setRange(from, to)
					return
				}
				for i := from; i < to; i++ { // it is read as before, if it was zero
					if !q.zero.get(i) {
						q.written.set(i)
					}
				}
			})
		}
		for i := (g.start - base) >> pageShift; i < (g.end-base)>>pageShift; i++ {
			t.zero.put(i, zero)
			t.away.put(i, false)
		}
	})
	if e != 0 {
		return e
	}
	s.lookAbsent(t, base, at, p.end)
	s.lookLeft(p.span)
	return 0
}

// lookAbsent notes what pages are that are not in place.
func (s *Space) lookAbsent(t *tracker, base, start, end uint64) {
	for va := start; va < end; {
		next := min((va/leafBytes+1)*leafBytes, end)
		var l *leaf
		if sl := s.slot(va); sl != nil {
			if at := sl.Load(); at != 0 && at != goneLeaf {
				l = pointer[leaf](at)
			}
		}
		for ; va < next; va += pageSize {
			away := l != nil && l.word[pageIndex(va)].Load()&stateMask >= pageLimbo
			i := (va - base) >> pageShift
			if t.zero.get(i) != !away || t.away.get(i) != away {
				t.written.set(i)
				t.zero.put(i, !away)
				t.away.put(i, away)
			}
		}
	}
}

// lookLeft takes down which pages were dropped or evicted since somebody looked. Such a
// page may be in place still: the next look must find that it is not what it was now,
// whatever it is then.
func (s *Space) lookLeft(p span) {
	s.settle() // who dropped pages goes on when the pager has read of it
	s.eachLeafMade(p.start, p.end, func(l *leaf, from, to uint64) {
		for va := from; va < to; {
			i := pageIndex(va)
			n := min(64-i%64, (to-va)>>pageShift)
			mask := (uint64(1)<<n - 1) << (i % 64)
			left := l.left[i/64].And(^mask) & mask
			for w := left; w != 0; w &= w - 1 {
				page := va&^(64*pageSize-1) + uint64(bits.TrailingZeros64(w))<<pageShift
				s.eachTracker(page, page+pageSize, func(q *tracker, k, _ uint64) {
					q.written.set(k)
					q.zero.put(k, false)
					q.away.put(k, false)
				})
			}
			va += n << pageShift
		}
	})
}

// eachLeafMade calls f with the leaves of a range that there are and the part of the range
// in each.
func (s *Space) eachLeafMade(start, end uint64, f func(l *leaf, from, to uint64)) {
	for va := start; va < end; {
		next := min((va/leafBytes+1)*leafBytes, end)
		if sl := s.slot(va); sl != nil {
			if at := sl.Load(); at != 0 && at != goneLeaf {
				f(pointer[leaf](at), va, next)
			}
		}
		va = next
	}
}

// eachTracker calls f for the tracked regions on a range of pages, with the pages'
// numbers in it.
func (s *Space) eachTracker(start, end uint64, f func(t *tracker, from, to uint64)) {
	for r := range s.tracked {
		if end <= r.pages.start || r.pages.end <= start {
			continue
		}
		from, to := max(start, r.pages.start), min(end, r.pages.end)
		f(r.dirty, (from-r.pages.start)>>pageShift, (to-r.pages.start)>>pageShift)
	}
}
