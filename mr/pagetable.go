// SPDX-License-Identifier: Apache-2.0

package mr

// #include "pager.h"
import "C"

import (
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The page table says what is known of each page near a region, by virtual
// address: one table for all regions of the process, so that overlapping regions
// agree. It is a radix tree (1 GiB, 2 MiB, page) in memory that Go and the pager
// thread access atomically (pager.h). Nodes are made when a region is registered,
// leaves at the first access, and both stay until the Space is closed.
//
// A state is a hint that errs to the safe side: "absent" may be wrong, the kernel
// then answers EEXIST when the page is placed; "present" is withdrawn by events
// before the page goes. An evicted page's word says where its content is, unless the
// page is in place all the same: that, too, the kernel says.
//
// The low bits of a word are the state. Above them is, for a page that is present, the
// generation in which it arrived, and for an evicted one its slot (see evict.go).
const (
	pageUnknown  = C.TV_UNKNOWN // ask the kernel; 0
	pageAbsent   = C.TV_ABSENT
	pagePresent  = C.TV_PRESENT
	pageGone     = C.TV_GONE     // unmapped under a region
	pageLimbo    = C.TV_LIMBO    // its page is in that slot of the limbo
	pageStored   = C.TV_STORED   // its content is in that slot of the store
	pagePoisoned = C.TV_POISONED // the store has lost its content

	stateMask    = C.TV_STATE
	payloadShift = C.TV_PAYLOAD

	leafPages = C.TV_LEAF_PAGES
	leafBytes = leafPages * pageSize
	nodeBytes = C.TV_L2_LEAVES * leafBytes
	maxVA     = 1 << 48
)

type leaf struct {
	word [leafPages]atomic.Uint32
	n    [C.TV_STATES]atomic.Uint32 // pages in each state from pagePresent on
	// lost is pages that were dropped or unmapped with content.
	lost, appMinor, appMajor, evictions atomic.Uint32

	_     uint32
	appNs atomic.Uint64 // that threads of the application waited
	_     [2]uint32
	left  [leafPages / 64]atomic.Uint64 // dropped or evicted since somebody looked, see dirty.go
}

var _ [0]struct{} = [unsafe.Sizeof(leaf{}) - C.sizeof_struct_tv_leaf]struct{}{} // pager.h has the same

type node [C.TV_L2_LEAVES]atomic.Uint64

// goneLeaf stands in for leaves whose pages are all gone.
const goneLeaf = C.TV_GONE_LEAF

func pointer[T any](a uint64) *T {
	p := uintptr(a)
	return *(**T)(unsafe.Pointer(&p))
}

func (s *Space) l1(va uint64) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&s.sh.l1[va>>30]))
}

// cut takes n zeroed bytes from the arena; 0 if it is used up.
func (s *Space) cut(n uint64) uint64 {
	at := (*atomic.Uint64)(unsafe.Pointer(&s.sh.arena_next)).Add(n) - n
	if at+n > uint64(s.sh.arena_size) {
		return 0
	}
	return uint64(s.sh.arena) + at
}

// addNodes makes the nodes for a range; false if memory for them has run out.
func (s *Space) addNodes(start, end uint64) bool {
	for va := start &^ (nodeBytes - 1); va < end; va += nodeBytes {
		if e := s.l1(va); e.Load() == 0 {
			n := s.cut(uint64(unsafe.Sizeof(node{})))
			if n == 0 {
				return false
			}
			e.CompareAndSwap(0, n) // a race loses a node of 4 KiB, once
		}
	}
	return true
}

// slot is where the pointer to va's leaf stands; nil where no region ever was.
func (s *Space) slot(va uint64) *atomic.Uint64 {
	n := s.l1(va).Load()
	if n == 0 {
		return nil
	}
	return &pointer[node](n)[va>>21&(C.TV_L2_LEAVES-1)]
}

// leaf gives va's leaf, making it if need be; nil if all of it is gone (or memory
// for leaves has run out).
func (s *Space) leaf(va uint64) *leaf {
	sl := s.slot(va)
	if sl == nil {
		return nil
	}
	l := sl.Load()
	if l == 0 {
		n := s.cut(uint64(unsafe.Sizeof(leaf{})))
		if n == 0 {
			return nil
		}
		if !sl.CompareAndSwap(0, n) {
			n = sl.Load()
		}
		l = n
	}
	if l == goneLeaf {
		return nil
	}
	return pointer[leaf](l)
}

func pageIndex(va uint64) uint64 { return va >> pageShift & (leafPages - 1) }

// state is what is known of va's page. Unknown is resolved by asking the kernel,
// for the whole leaf. Call it inside a section.
func (s *Space) state(va uint64) uint32 { return s.word(va) & stateMask }

// word is the page's word, otherwise as state.
func (s *Space) word(va uint64) uint32 {
	l := s.leaf(va)
	if l == nil {
		return pageGone
	}
	w := l.word[pageIndex(va)].Load()
	if w == pageUnknown {
		s.ask(l, va&^(leafBytes-1))
		w = l.word[pageIndex(va)].Load()
	}
	return w
}

// setPresent notes that the pages of a range are in place, whatever was known of them,
// but for those that are gone. Call it inside a section.
func (s *Space) setPresent(va uint64, n int) {
	s.setState(va, n, s.arrived().Load())
	s.arrive(n >> pageShift)
}

// arrived is the word of pages that arrive now.
func (s *Space) arrived() *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&s.sh.arrived)) }

// found notes that the pages of a range turned out to be in place: those that were thought
// to be absent, or stored. One in limbo may be about to leave. Call it inside a section.
func (s *Space) found(va uint64, n int) {
	for end := va + uint64(n); va < end; va += pageSize {
		l := s.leaf(va)
		if l == nil {
			continue
		}
		for w := s.peek(va); w&stateMask < pagePresent || w&stateMask == pageStored; w = s.peek(va) {
			if s.become(l, va, w, s.arrived().Load()) {
				s.arrive(1)
				break
			}
		}
	}
}

// setState gives the pages of a range a word, but for those that are gone. Call it inside
// a section, or with none open.
func (s *Space) setState(va uint64, n int, is uint32) {
	for end := va + uint64(n); va < end; {
		next := min((va/leafBytes+1)*leafBytes, end)
		if l := s.leaf(va); l != nil {
			var d changes
			for ; va < next; va += pageSize {
				w := &l.word[pageIndex(va)]
				for was := w.Load(); was != pageGone; was = w.Load() {
					if w.CompareAndSwap(was, is) {
						d.note(was, is)
						break
					}
				}
			}
			s.count(l, next-1, &d)
			s.leftSlots(-int(d.n[pageLimbo] + d.n[pageStored]))
		}
		va = next
	}
}

// changes counts what became of pages of one leaf.
type changes struct{ n [C.TV_STATES]int32 }

func (d *changes) note(was, is uint32) {
	d.n[was&stateMask]--
	d.n[is&stateMask]++
}

// count adds changes to the numbers that are kept of the leaf that va is in.
func (s *Space) count(l *leaf, va uint64, d *changes) {
	evicted := int32(0)
	// From the last state on: a page that goes from limbo to the store is counted as evicted
	// all the time, or the pager would not carry it along with mremap.
	for st := C.TV_STATES - 1; st >= pagePresent; st-- {
		if d.n[st] != 0 {
			l.n[st].Add(uint32(d.n[st]))
		}
		if st >= pageLimbo {
			evicted += d.n[st]
		}
	}
	if evicted != 0 {
		s.evictedNear(va).Add(uint32(evicted))
	}
}

// evictedNear is how many pages of va's GiB are evicted, or poisoned.
func (s *Space) evictedNear(va uint64) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&s.sh.evicted[va>>30]))
}

// become changes a page's word if it is what it is thought to be.
func (s *Space) become(l *leaf, va uint64, was, is uint32) bool {
	if !l.word[pageIndex(va)].CompareAndSwap(was, is) {
		return false
	}
	if was&stateMask != is&stateMask {
		var d changes
		d.note(was, is)
		s.count(l, va, &d)
	}
	return true
}

// ask fills in what is unknown in a leaf from /proc/self/pagemap: pages that are
// present or swapped out never come to userfaultfd. Bits 62 and 63 of an entry
// (pagemap, Documentation/admin-guide/mm).
func (s *Space) ask(l *leaf, base uint64) {
	buf := &s.pagemapBuf
	s.pagemapMu.Lock()
	defer s.pagemapMu.Unlock()
	b := unsafe.Slice((*byte)(unsafe.Pointer(buf)), len(buf)*8)
	n, err := unix.Pread(s.pagemap, b, int64(base>>pageShift)*8)
	if err != nil {
		n = 0
	}
	var d changes
	for i := range l.word {
		st := uint32(pageAbsent)
		if i < n/8 && buf[i]>>62 != 0 {
			st = pagePresent // of the first generation
		}
		if l.word[i].CompareAndSwap(pageUnknown, st) {
			d.note(pageUnknown, st)
		}
	}
	s.count(l, base, &d)
}

// forget makes a range unknown again, but for pages whose content is elsewhere.
func (s *Space) forget(start, end uint64) {
	s.eachLeaf(start, end, func(sl *atomic.Uint64, from, to uint64) {
		l := sl.Load()
		switch {
		case l == 0:
		case l == goneLeaf && to-from == leafBytes:
			sl.Store(0)
		case l == goneLeaf:
			n := s.cut(uint64(unsafe.Sizeof(leaf{})))
			if n == 0 {
				return // stays gone
			}
			nl := pointer[leaf](n)
			for i := range nl.word {
				if va := from&^(leafBytes-1) + uint64(i)<<pageShift; va < from || va >= to {
					nl.word[i].Store(pageGone)
					nl.n[pageGone].Add(1)
				}
			}
			sl.Store(n)
		case to-from == leafBytes && s.evictedNear(from).Load() == 0:
			// At once: a large region is registered again in microseconds. No
			// region is there, or no section is open, so nobody else looks.
			clear(unsafe.Slice((*uint32)(unsafe.Pointer(pointer[leaf](l))), leafPages+C.TV_STATES))
		default:
			var d changes
			for va := from; va < to; va += pageSize {
				w := &pointer[leaf](l).word[pageIndex(va)]
				if was := w.Load(); was&stateMask < pageLimbo && w.CompareAndSwap(was, pageUnknown) {
					d.note(was, pageUnknown)
				}
			}
			s.count(pointer[leaf](l), from, &d)
		}
	})
}

// gone lists the ranges within a range whose pages were unmapped.
func (s *Space) gone(start, end uint64) (out []span) {
	add := func(a, b uint64) {
		if n := len(out); n > 0 && out[n-1].end == a {
			out[n-1].end = b
		} else {
			out = append(out, span{a, b})
		}
	}
	s.eachLeaf(start, end, func(sl *atomic.Uint64, from, to uint64) {
		switch l := sl.Load(); l {
		case 0:
		case goneLeaf:
			add(from, to)
		default:
			for va := from; va < to; va += pageSize {
				if pointer[leaf](l).word[pageIndex(va)].Load() == pageGone {
					add(va, va+pageSize)
				}
			}
		}
	})
	return out
}

// eachLeaf calls f with the slot of each leaf of a range and the part of the range
// in it, skipping where no region ever was.
func (s *Space) eachLeaf(start, end uint64, f func(sl *atomic.Uint64, from, to uint64)) {
	s.eachLeafUntil(start, end, func(sl *atomic.Uint64, from, to uint64) bool {
		f(sl, from, to)
		return true
	})
}

// eachLeafUntil is eachLeaf until f says false, and then is false.
func (s *Space) eachLeafUntil(start, end uint64, f func(sl *atomic.Uint64, from, to uint64) bool) bool {
	for va := start; va < end; {
		next := min((va/leafBytes+1)*leafBytes, end)
		if s.l1(va).Load() == 0 {
			va = min((va/nodeBytes+1)*nodeBytes, end)
			continue
		}
		if !f(s.slot(va), va, next) {
			return false
		}
		va = next
	}
	return true
}

// span is a range of addresses, or of pages: start ≤ x < end.
type span struct{ start, end uint64 }
