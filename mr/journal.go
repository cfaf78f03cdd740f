// SPDX-License-Identifier: Apache-2.0

package mr

// #include "pager.h"
import "C"

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ChangeKind is what has happened to a range of memory.
type ChangeKind uint32

const (
	// KindUnmap: the mapping is gone (munmap(2), and what MAP_FIXED and the like replace).
	KindUnmap ChangeKind = C.TV_UNMAP
	// KindRemap: it has moved to To (mremap(2)).
	KindRemap ChangeKind = C.TV_REMAP
	// KindRemove: its content was dropped (MADV_DONTNEED, MADV_FREE, MADV_REMOVE).
	KindRemove ChangeKind = C.TV_REMOVE
	// KindEvict: its content was taken away by this package, which brings it back.
	KindEvict ChangeKind = C.TV_EVICT
	// KindSuspend and KindResume are about the memory of a region.
	KindSuspend ChangeKind = C.TV_SUSPEND
	// KindResume is described at KindSuspend.
	KindResume ChangeKind = C.TV_RESUME
	// KindReplace: its pages were replaced by those at To (Region.Replace).
	KindReplace ChangeKind = C.TV_REPLACE
	// KindMoved: a region that lay there lies at To (Region.MoveTo, and mremap(2) of a
	// suspended region).
	KindMoved ChangeKind = C.TV_MOVED
	// KindEliminate: a region that lies there was eliminated.
	KindEliminate ChangeKind = C.TV_ELIMINATE
	// KindProtect: it was found to have other protection; To is that, as of mmap(2).
	KindProtect ChangeKind = C.TV_PROTECT
)

func (k ChangeKind) String() string {
	names := [...]string{"", "unmap", "remap", "remove", "evict", "suspend", "resume", "replace", "moved", "eliminate", "protect"}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("ChangeKind(%d)", uint32(k))
}

// Change is an entry of the journal: what happened to the addresses Start ≤ x < End.
type Change struct {
	Kind           ChangeKind
	Start, End, To uintptr
}

// Generation is a word that moves with each change of memory that regions lie in: whoever
// remembers something of it looks here first, with one atomic load, and need not do more
// as long as the word is what it was. A value that is odd counts as another: the change is
// being taken notice of, see Settled. It never shows an old value to a thread whose
// munmap(2), mmap(2) with MAP_FIXED or mremap(2) has returned. The page it is in is
// read-only, and stays until the Space is closed.
//
// Without userfaultfd (UserFault), and for regions that the kernel pages, the kernel tells
// of no change, and the word tells of those that are made by this package alone.
func (s *Space) Generation() *uint64 { return pointer[uint64](s.generation) }

// Settled waits until the word of Generation is even, and returns it: what has happened
// is in the journal then. The wait is for the pager thread, and takes microseconds.
func (s *Space) Settled() uint64 {
	w := pointer[atomic.Uint64](s.generation)
	for i := 0; ; i++ {
		if g := w.Load(); g%2 == 0 {
			return g
		}
		pause(i)
	}
}

// openGeneration makes the page of the generation word and maps it twice, to be written
// and to be read by others. Where a memfd is not to be had one mapping does for both.
func (s *Space) openGeneration() error {
	var err error
	if fd, e := unix.MemfdCreate("tapverbs-generation", unix.MFD_CLOEXEC); e == nil {
		defer unix.Close(fd)
		if err = unix.Ftruncate(fd, pageSize); err == nil {
			s.wordMem, err = unix.Mmap(fd, 0, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		}
		if err == nil {
			s.wordView, err = unix.Mmap(fd, 0, pageSize, unix.PROT_READ, unix.MAP_SHARED)
		}
	} else {
		s.wordMem, err = unix.Mmap(-1, 0, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		s.wordView = s.wordMem
	}
	if err != nil {
		s.closeGeneration()
		return fmt.Errorf("generation word: %w", err)
	}
	s.generation = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(s.wordView))))
	s.sh.journal.generation = C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(s.wordMem))))
	s.sh.journal.fd = -1
	return nil
}

func (s *Space) closeGeneration() {
	if s.wordView != nil && &s.wordView[0] != &s.wordMem[0] {
		_ = unix.Munmap(s.wordView)
	}
	if s.wordMem != nil {
		_ = unix.Munmap(s.wordMem)
	}
	s.wordMem, s.wordView = nil, nil
}

// bumpGeneration enters a change that was made in Go, after it, and behind what the
// kernel has told of by then.
func (s *Space) bumpGeneration(k ChangeKind, start, end, to uint64) {
	s.Settled()
	C.tv_changed(&s.sh.journal, C.uint64_t(k), C.uint64_t(start), C.uint64_t(end), C.uint64_t(to))
}

func (s *Space) head() *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&s.sh.journal.head))
}

// LastChange is the number of the last change there has been.
func (s *Space) LastChange() uint64 { return s.head().Load() }

// Changes calls f for each change since the one with a number, in order, until it returns
// false, and returns the number of the last that f was called for, or might have been.
// complete is false if some were overwritten since: then anything may have changed until
// last. Who has heard of all finds Generation's word as Settled gave it before the call.
func (s *Space) Changes(since uint64, f func(Change) bool) (last uint64, complete bool) {
	return s.entries(since, func(k ChangeKind, c Change) bool { return k&C.TV_BEFORE != 0 || f(c) })
}

// entries is Changes with those that are only about to happen.
func (s *Space) entries(since uint64, f func(ChangeKind, Change) bool) (last uint64, complete bool) {
	last = s.LastChange()
	for n := since + 1; n <= last; n++ {
		e := &s.sh.journal.ring[n%C.TV_CHANGES]
		load := func(p *C.uint64_t) uint64 { return (*atomic.Uint64)(unsafe.Pointer(p)).Load() }
		if load(&e.seq) != n {
			return last, false
		}
		k := ChangeKind(load(&e.kind))
		c := Change{k &^ C.TV_BEFORE, uintptr(load(&e.start)), uintptr(load(&e.end)), uintptr(load(&e.to))}
		if load(&e.seq) != n {
			return last, false
		}
		if !f(k, c) {
			return n, true
		}
	}
	return last, true
}

// Followed says whether what happens to the region's memory is heard of, as Generation
// tells: userfaultfd pages it, or it is the Go heap's or the program's own, which are
// never mapped anew.
func (r *Region) Followed() bool {
	s := r.table.space
	s.mu.Lock()
	defer s.mu.Unlock()
	return r.base.paging == UserFault ||
		r.base.paging == KernelPaging && (inside(r.base.pages, s.image) || inside(r.base.pages, s.goHeap))
}

func inside(a, b span) bool { return b.start <= a.start && a.end <= b.end }

// Lost calls f with each range of the region's memory that the region has no more of: its
// mapping has gone, whatever is mapped there now. What the kernel pages is not lost before
// the region has ended, or was eliminated.
func (r *Region) Lost(f func(start, end uintptr)) {
	s, r := r.table.space, r.base
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.gate.has(gateDead | gateEliminated) {
		f(uintptr(r.pages.start), uintptr(r.pages.end))
		return
	}
	if r.paging != UserFault {
		return
	}
	s.settle()
	lost := s.gone(r.pages.start, r.pages.end)
	if hs := r.holes.Load(); hs != nil {
		lost = append(lost, *hs...)
	}
	for _, g := range lost {
		f(uintptr(max(g.start, r.pages.start)), uintptr(min(g.end, r.pages.end)))
	}
}
