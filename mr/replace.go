// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Replacing pages of a suspended region: the pages move, where the kernel can (private
// anonymous memory, Linux 6.8); otherwise their content is copied.

// replaceChunk is how many bytes are moved while no section is open.
const replaceChunk = 256 << pageShift

// replaceTries is how often pages are dropped again that the application has touched
// behind Replace's back.
const replaceTries = 16

// replaceWait is how long Replace waits for other threads that change mappings without a
// pause: while the kernel tells of one it moves no page.
const replaceWait = 5 * time.Second

// Replace puts the content of n bytes at with in the place of those at iova of the
// suspended region, in whole pages. with is left as by MADV_DONTNEED: private anonymous
// memory is absent, unless it is locked. Where it was absent the region's pages are, and read as zeros. Neither
// range is to be touched meanwhile. Errors: ErrInvalid if the region is not suspended, or
// when a range does not consist of whole pages, or they overlap; ErrClosed, ErrRange,
// ErrUnmapped; ErrFault for memory that cannot be accessed, ErrBusy when somebody keeps
// touching the range, ErrNoMem. After these three a part of the range is replaced.
func (r *Region) Replace(iova, n uint64, with uintptr) error {
	s := r.table.space
	if s.listening().Load() != 0 {
		s.await(r.announceReplace(iova, n, uint64(with)))
	}
	s.updateMu.Lock()
	defer s.updateMu.Unlock()
	va, err := r.replaceable(iova, n, uint64(with))
	if err != nil || n == 0 {
		return err
	}
	defer func() { s.bumpGeneration(KindReplace, va, va+n, uint64(with)) }()
	if s.replacer == nil {
		s.replacer = s.NewAccessor()
	}
	c := replacement{a: s.replacer, r: r, move: r.paging == UserFault}
	for done := uint64(0); done < n; {
		k, err := c.some(va+done, uint64(with)+done, min(n-done, replaceChunk))
		if err != nil {
			return fmt.Errorf("replace %d bytes at %#x: %w", n, iova, err)
		}
		done += k
	}
	return nil
}

// announceReplace announces what Replace will do, unless it will not.
func (r *Region) announceReplace(iova, n, with uint64) (ticket uint64) {
	s := r.table.space
	s.updateMu.Lock()
	defer s.updateMu.Unlock()
	if _, err := r.replaceable(iova, n, with); err != nil {
		return 0
	}
	return s.announce(KindReplace, with, with+n)
}

// replaceable checks what Replace is asked for, and says where the range lies.
func (r *Region) replaceable(iova, n, with uint64) (va uint64, err error) {
	s := r.table.space
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := r.updatable(); err != nil {
		return 0, err
	}
	if r.paging == Implicit || r.paging == NullMemory {
		return 0, fmt.Errorf("%w: a region of this kind (%v) has no pages of its own", ErrInvalid, r.paging)
	}
	if _, err := s.follow(r); err != nil {
		return 0, err
	}
	if !r.contains(iova, n) {
		return 0, ErrRange
	}
	va = r.va(iova)
	switch {
	case (va|n|with)&pageMask != 0:
		return 0, fmt.Errorf("%w: %d bytes at %#x and %#x are not whole pages", ErrInvalid, n, va, with)
	case with+n < with || with+n > maxVA:
		return 0, fmt.Errorf("%w: %d bytes at %#x", ErrUnmapped, n, with)
	case n > 0 && with < va+n && va < with+n:
		return 0, fmt.Errorf("%w: %#x and %#x overlap within %d bytes", ErrInvalid, va, with, n)
	case n == 0:
		return va, nil
	}
	if err := mapped(span{va, va + n}); err != nil {
		return 0, err
	}
	return va, mapped(span{with, with + n})
}

// replacement is one Replace under way.
type replacement struct {
	a    *Accessor
	r    *Region
	move bool // UFFDIO_MOVE has not been found wanting
}

// some replaces pages at the start of a range, and says how many bytes.
func (c *replacement) some(va, with, n uint64) (uint64, error) {
	settled := c.a.s.settled(with, n)
	// What is brought in is not to leave again before it is moved.
	c.a.s.ev.hold.Lock()
	defer c.a.s.ev.hold.Unlock()
	if !c.move {
		return n, c.copy(va, with, n)
	}
	// What came to be there by a fault of the application's, or of the store's, is content
	// that the kernel has to have in place before it can move it.
	if !settled {
		if populate(with, int(n), false) != nil {
			return n, c.copy(va, with, n) // a kernel that leaves faults in user mode to us
		}
	}
	for tries, begun := 0, time.Now(); tries < replaceTries; {
		if err := drop(va, n); err != nil {
			return 0, err
		}
		done, e := c.moveSome(va, with, n)
		switch {
		case done > 0:
			return done, nil
		case e == unix.EAGAIN && time.Since(begun) < replaceWait:
			pause(100)
			continue
		case e == unix.EEXIST || e == unix.EAGAIN:
			tries++
			continue
		case e == unix.EBUSY:
			return pageSize, c.copy(va, with, pageSize) // once shared by fork, or pinned
		}
		c.move = false
		return n, c.copy(va, with, n)
	}
	return 0, ErrBusy
}

// settled says whether no page of a range is userfaultfd's: its content, if any, is where
// the kernel finds it.
func (s *Space) settled(start, n uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.armed.missing(start, start+n)
	t := s.tally([]span{{start, start + n}})
	return len(m) == 1 && m[0] == span{start, start + n} && t.limbo+t.stored+t.poisoned == 0
}

// drop makes pages absent.
func drop(va, n uint64) error {
	if _, _, e := unix.Syscall(unix.SYS_MADVISE, uintptr(va), uintptr(n), unix.MADV_DONTNEED); e != 0 {
		return fmt.Errorf("%w: madvise: %w", ErrFault, e)
	}
	return nil
}

type uffdMoveArg struct {
	dst, src, len, mode uint64
	moved               int64
}

// moveSome moves pages, and says how many bytes, or why not one.
func (c *replacement) moveSome(va, with, n uint64) (uint64, unix.Errno) {
	s := c.a.s
	// Other regions may reach either range: their engines stay out, and find afterwards
	// that the source is absent.
	defer s.quiesce()()
	s.setState(with, int(n), pageAbsent)
	m := uffdMoveArg{dst: va, src: with, len: n, mode: uffdMoveDontWake | uffdMoveHoles}
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(s.uffd), uffdioMove, uintptr(unsafe.Pointer(&m)))
	done, e := ioctlResult(e, m.moved, int(n))
	// Which of them were holes the kernel knows.
	s.forget(va, va+uint64(done))
	s.forget(with, with+n)
	return uint64(done), e
}

// copy copies content, and leaves the source as MADV_DONTNEED does.
func (c *replacement) copy(va, with, n uint64) error {
	b := c.a.buffer()
	if b == nil {
		return ErrNoMem
	}
	defer func() { c.a.bufs = append(c.a.bufs, b) }()
	for done := uint64(0); done < n; {
		k := min(n-done, stagePages*pageSize)
		// Outside sections, as the application's threads touch memory: the pager thread
		// answers for what is absent.
		if err := guardedCopy(b.data[:k], memory(with+done, int(k))); err != nil {
			return err
		}
		if err := guardedCopy(memory(va+done, int(k)), b.data[:k]); err != nil {
			return err
		}
		done += k
	}
	_ = drop(with, n) // what is locked stays
	return nil
}
