// SPDX-License-Identifier: Apache-2.0

package mr

// #include "evict.h"
// #include "store.h"
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The slots of limbo and store. A table says for each which page it was given to, and it
// is that page's as long as its word names the slot: nobody gives a slot back, but who
// looks for slots finds those that are free.

// slots are those of the limbo, used in a circle: so the oldest are behind the tail.
type slots struct {
	owner []atomic.Uint64 // address; 0: free
	next  uint64          // counts on round the circle
	tail  uint64          // nothing older is in use
	sweep uint64          // where dead is going on
}

func (l *slots) at(n uint64) int { return int(n % uint64(len(l.owner))) }

// lives says whether the slot holds a page's content, and whose.
func (s *Space) lives(slot int) (va uint64, ok bool) {
	o := &s.ev.limbo.owner[slot]
	for {
		va = o.Load()
		if va == 0 {
			return 0, false
		}
		if s.peek(va) == uint32(slot)<<payloadShift|pageLimbo {
			return va, true
		}
		if o.Load() == va { // else mremap has taken it along
			return va, false
		}
	}
}

// peek is a page's word, as it stands.
func (s *Space) peek(va uint64) uint32 {
	sl := s.slot(va)
	if sl == nil {
		return pageUnknown
	}
	l := sl.Load()
	if l <= goneLeaf {
		return pageUnknown
	}
	return pointer[leaf](l).word[pageIndex(va)].Load()
}

// take gives slots in a row that are free and empty, n at most, from the first on; none if
// all are in use.
func (l *slots) take(s *Space, n int) (slot, k int) {
	for tried := 0; tried < len(l.owner); {
		slot = l.at(l.next)
		for k = 0; k < n && slot+k < len(l.owner) && s.free(slot+k); k++ {
		}
		if k > 0 {
			l.next += uint64(k)
			l.tail = max(l.tail, l.next-min(l.next, uint64(len(l.owner))))
			s.dropLimbo(slot, k)
			return slot, k
		}
		l.next++
		tried++
	}
	return 0, 0
}

// free makes sure that a slot is nobody's, if it is nobody's any more.
func (s *Space) free(slot int) bool {
	va, ok := s.lives(slot)
	return !ok && (va == 0 || s.ev.limbo.owner[slot].CompareAndSwap(va, 0))
}

// dropLimbo drops what may be left in slots that are free.
func (s *Space) dropLimbo(slot, n int) {
	at := uint64(s.sh.limbo) + uint64(slot)<<pageShift
	_, _, _ = unix.Syscall(unix.SYS_MADVISE, uintptr(at), uintptr(n)<<pageShift, unix.MADV_DONTNEED) // of our own mapping
}

// tidy looks at n slots, and drops what is left in those that are nobody's any more.
func (l *slots) tidy(s *Space, n int) {
	for l.tail < l.next {
		if !s.free(l.at(l.tail)) {
			break
		}
		s.dropLimbo(l.at(l.tail), 1)
		l.tail++
	}
	if l.sweep < l.tail || l.sweep >= l.next {
		l.sweep = l.tail
	}
	for ; n > 0 && l.sweep < l.next; n-- {
		slot := l.at(l.sweep)
		if l.owner[slot].Load() != 0 && s.free(slot) {
			s.dropLimbo(slot, 1)
		}
		l.sweep++
	}
}

// storage is the store with its slots.
type storage struct {
	st    Store
	owner []atomic.Uint64 // the page's number, and below 28 bits of how often the slot was used
	held  []byte          // by slot a uint16: how many others may still read it
	next  uint32          // slots from here on were never used
	spare []uint32        // slots that are free
	sweep uint32
	// bounce is a page of a memfd: what is in limbo is written there by its address, which
	// fails if it is gone.
	bounce   []byte
	bounceFD int
	once     sync.Once

	used atomic.Int64 // slots that were not found to be free yet
}

const ownerCount = 1<<28 - 1

// open makes the store ready.
func (t *storage) open(s *Space) (err error) {
	if t.st == nil {
		if t.st, err = NewFileStore(""); err != nil {
			return err
		}
	}
	if t.bounceFD, err = unix.MemfdCreate("tapverbs-evicted", unix.MFD_CLOEXEC); err != nil {
		return fmt.Errorf("memfd: %w", err)
	}
	if err = unix.Ftruncate(t.bounceFD, pageSize); err == nil {
		t.bounce, err = unix.Mmap(t.bounceFD, 0, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		return fmt.Errorf("memfd: %w", err)
	}
	if c, ok := t.st.(cStore); ok {
		(*atomic.Uint64)(unsafe.Pointer(&s.sh.reader)).Store(uint64(uintptr(unsafe.Pointer(c.cReader()))))
	}
	return nil
}

func (t *storage) close() {
	if t.st != nil {
		_ = t.st.Close()
	}
	t.st = nil
	if t.bounce != nil {
		_ = unix.Munmap(t.bounce)
		unix.Close(t.bounceFD)
	}
	t.bounce = nil
}

// holds says whether a slot of the store has a page's content, and whose.
func (s *Space) holds(slot uint32) (owner uint64, ok bool) {
	o := &s.ev.store.owner[slot]
	for {
		owner = o.Load()
		va := owner >> 28 << pageShift
		if va == 0 {
			return owner, false
		}
		if s.peek(va) == slot<<payloadShift|pageStored {
			return owner, true
		}
		if o.Load() == owner {
			return owner, false
		}
	}
}

// heldBy is how many others may still read a slot.
func (t *storage) heldBy(slot uint32) uint32 {
	// Two to a word: there is no atomic load of 16 bits.
	w := (*atomic.Uint32)(unsafe.Pointer(&t.held[slot/2*4])).Load()
	return w >> (slot % 2 * 16) & 0xffff
}

// clean looks at n slots of the store and frees those that are nobody's any more.
func (t *storage) clean(s *Space, n int) {
	for ; n > 0 && t.next > 0; n-- {
		if t.sweep >= t.next {
			t.sweep = 0
		}
		slot := t.sweep
		t.sweep++
		owner, ok := s.holds(slot)
		if owner>>28 == 0 || ok || t.heldBy(slot) > 0 || !t.owner[slot].CompareAndSwap(owner, owner&ownerCount) {
			continue
		}
		t.st.Free(slot)
		t.spare = append(t.spare, slot)
		t.used.Add(-1)
	}
}

// take gives a free slot of the store.
func (t *storage) take(s *Space) (uint32, bool) {
	t.clean(s, 4)
	if n := len(t.spare); n > 0 {
		slot := t.spare[n-1]
		t.spare = t.spare[:n-1]
		t.used.Add(1)
		return slot, true
	}
	if int(t.next) == min(len(t.owner), C.TV_STORE_SLOTS) {
		return 0, false
	}
	t.next++
	t.used.Add(1)
	return t.next - 1, true
}

// give takes back a slot that was taken and not used.
func (t *storage) give(slot uint32) {
	t.st.Free(slot)
	t.owner[slot].And(ownerCount)
	t.spare = append(t.spare, slot)
	t.used.Add(-1)
}

var errStoreFull = errors.New("all slots of the store are in use")

// storeLimbo writes up to n pages of ranges that are in limbo to the store, the oldest
// first, and says how many; all ranges if there is none.
func (s *Space) storeLimbo(in []span, n int) (stored int, err error) {
	l := &s.ev.limbo
	l.tidy(s, 2*n)
	for at := l.tail; at < l.next && stored < n; at++ {
		slot := l.at(at)
		va, ok := s.lives(slot)
		if !ok || in != nil && !within(in, va) {
			continue
		}
		done, err := s.storePage(slot, va)
		if err != nil {
			s.stopEviction(err)
			return stored, err
		}
		if done {
			stored++
		}
	}
	return stored, nil
}

func within(in []span, va uint64) bool {
	for _, p := range in {
		if p.start <= va && va < p.end {
			return true
		}
	}
	return false
}

// storePage writes a page in limbo to the store; false if it was brought back meanwhile.
func (s *Space) storePage(slot int, va uint64) (bool, error) {
	t := &s.ev.store
	l := s.leaf(va)
	if l == nil {
		return false, nil
	}
	from := uintptr(s.sh.limbo) + uintptr(slot)<<pageShift
	if n, _, e := unix.Syscall6(unix.SYS_PWRITE64, uintptr(t.bounceFD), from, pageSize, 0, 0, 0); e != 0 || n != pageSize {
		if e == unix.EFAULT || e == 0 {
			return false, nil // it is back, or on its way
		}
		return false, fmt.Errorf("read an evicted page: %w", e)
	}
	k, ok := t.take(s)
	if !ok {
		return false, errStoreFull
	}
	if err := t.st.Write(k, t.bounce); err != nil {
		t.give(k)
		return false, err
	}
	t.owner[k].Store(va>>pageShift<<28 | (t.owner[k].Load()+1)&ownerCount)
	if !s.become(l, va, uint32(slot)<<payloadShift|pageLimbo, k<<payloadShift|pageStored) {
		t.give(k)
		return false, nil
	}
	if s.free(slot) {
		s.dropLimbo(slot, 1)
	}
	return true, nil
}

// EvictionStats are of the limbo and the store.
type EvictionStats struct {
	Evicted uint64 // pages that have gone to limbo so far
	Slots   uint64 // of the store, in use or not found to be free yet
	// Fetching is how many pages requests have asked to be fetched, which are not there yet.
	Fetching int
}

// EvictionStats gives the numbers of now.
func (s *Space) EvictionStats() EvictionStats {
	f := &s.ev.fetching
	f.mu.Lock()
	defer f.mu.Unlock()
	return EvictionStats{Evicted: s.ev.evicted.Load(), Slots: uint64(max(s.ev.store.used.Load(), 0)), Fetching: len(f.pending)}
}

// backLimit is how long mappings may be changing while a page is brought back for Close.
const backLimit = 5 * time.Second

// bringAllBack brings back what is evicted, for Close. The pager is still there.
func (s *Space) bringAllBack() error {
	ev := &s.ev
	a := s.NewAccessor()
	defer a.Close()
	a.forced = true
	var lost error
	try := func(va uint64) {
		began := time.Now()
		for {
			w := s.peek(va)
			err := error(nil)
			switch w & stateMask {
			case pageLimbo:
				a.enter()
				_, err = a.recall(va, pageSize)
				a.exit()
			case pageStored:
				err = a.fromStore(va, w)
			default:
				return
			}
			switch {
			case err == nil:
			case err != ErrBusy || time.Since(began) > backLimit:
				lost = fmt.Errorf("bring back the page at %#x: %w", va, err)
				return
			default:
				pause(100)
			}
		}
	}
	for at := ev.limbo.tail; at < ev.limbo.next; at++ {
		if va, ok := s.lives(ev.limbo.at(at)); ok {
			try(va)
		}
	}
	for slot := range ev.store.next {
		if owner, ok := s.holds(slot); ok {
			try(owner >> 28 << pageShift)
		}
	}
	return lost
}
