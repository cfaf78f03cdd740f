// SPDX-License-Identifier: Apache-2.0

package mr

// #include "pager.h"
import "C"

import (
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"
)

// Suspending a region keeps engines out of its memory while its mapping is changed:
//
//	Suspend  no engine touches the memory when it returns
//	         Replace pages, MoveTo other memory, mremap(2), write what shall be there
//	Resume   what was held goes on, in what is there now
//
// Suspensions are counted. They are about one region's keys, and the windows bound to it:
// other regions over the same memory go on, and whoever changes the mapping suspends
// those too.
//
// What requests find afterwards: the bytes that are in the region's memory at Resume. What
// was written to it by requests before Suspend is in place, or is held (Stage) and comes
// behind Resume, wherever the region lies then: nothing is written in between. Pages that
// are dropped meanwhile (MADV_DONTNEED) are absent, and read as zeros; what is unmapped is
// gone for good (ErrRemoved), unless MoveTo says what is to be there instead. A region that
// userfaultfd pages follows mremap(2) of all of it; one that the kernel pages does not hear
// of that, and is told by MoveTo.

// SuspendMode is what a suspended region has the responder do with requests that reach
// it. Work requests of this end are held in any mode, where they are.
type SuspendMode uint8

const (
	// SuspendRNR: the peer is asked to wait, by RNR NAK. Unreliable services lose the packet.
	SuspendRNR SuspendMode = iota
	// SuspendHold: packets are kept, up to the region's hold buffer, and executed at
	// Resume; beyond that it is SuspendRNR.
	SuspendHold
	// SuspendDrop: packets count as lost, for the peer's timeout.
	SuspendDrop

	numSuspendModes
)

func (m SuspendMode) String() string {
	if m >= numSuspendModes {
		return fmt.Sprintf("SuspendMode(%d)", uint8(m))
	}
	return [...]string{"rnr", "hold", "drop"}[m]
}

const (
	// MaxSuspendDelay is the longest that one RNR NAK asks for (IBA 9.7.5.2.8, table 45).
	MaxSuspendDelay = 655360 * time.Microsecond
	// DefaultHoldBuffer is how many bytes of packets a region holds, of all QPs together.
	DefaultHoldBuffer = 1 << 20
)

// suspension is a region's state of being suspended.
type suspension struct {
	count int // guarded by Space.mu
	slot  int // of Space.sh.suspended, 1 more; 0: none. Guarded by Space.mu

	mode  atomic.Uint32 // SuspendMode
	delay atomic.Int64  // ns; 0: by how long it lasts
	held  atomic.Int64  // bytes of packets that are held
	room  atomic.Int64  // how many there may be
}

// inherit takes another region's over, which r takes the place of.
func (u *suspension) inherit(o *suspension) {
	u.count = o.count
	u.mode.Store(o.mode.Load())
	u.delay.Store(o.delay.Load())
	u.room.Store(o.room.Load())
}

// SetSuspendMode says what the responder does with requests while the region is
// suspended, and how long an RNR NAK asks for: up to MaxSuspendDelay, rounded up to what
// there is on the wire; 0 for 1 ms at first, and longer the longer the suspension lasts. A
// peer whose rnr_retry is not 7 (without end) gives up after that many delays, so a long
// one keeps a connection alive for longer, and a short one lets it go on sooner.
// ErrInvalid for a mode or delay that there is not.
func (r *Region) SetSuspendMode(m SuspendMode, delay time.Duration) error {
	if m >= numSuspendModes || delay < 0 || delay > MaxSuspendDelay {
		return fmt.Errorf("%w: suspend mode %d with a delay of %v", ErrInvalid, m, delay)
	}
	r.susp.mode.Store(uint32(m))
	r.susp.delay.Store(int64(delay))
	return nil
}

// SuspendMode is what SetSuspendMode has set; the delay is in ns.
func (r *Region) SuspendMode() (m SuspendMode, delay int64) {
	u := &r.base.susp
	return SuspendMode(u.mode.Load()), u.delay.Load()
}

// SetHoldBuffer sets how many bytes of packets the region may hold, of all QPs together;
// DefaultHoldBuffer when it was not called. ErrInvalid if negative.
func (r *Region) SetHoldBuffer(bytes int64) error {
	if bytes < 0 {
		return fmt.Errorf("%w: hold buffer of %d bytes", ErrInvalid, bytes)
	}
	r.susp.room.Store(bytes)
	return nil
}

// Hold takes n bytes of the region's hold buffer; false if it has not as many left.
func (r *Region) Hold(n int) bool {
	u := &r.base.susp
	if u.held.Add(int64(n)) <= u.room.Load() {
		return true
	}
	u.held.Add(-int64(n))
	return false
}

// Unhold gives n bytes back that Hold has taken.
func (r *Region) Unhold(n int) { r.base.susp.held.Add(-int64(n)) }

// Held is how many bytes of packets the region holds.
func (r *Region) Held() int64 { return r.base.susp.held.Load() }

// Suspended says whether requests have to wait: the region is suspended, and neither
// deregistered nor eliminated.
func (r *Region) Suspended() bool { return r.bars(r.gates()) == ErrSuspended }

// Suspend keeps engines out of the region's memory until as many calls of Resume. When it
// returns, none touches it. Errors: ErrClosed when the region was deregistered or
// eliminated, ErrNoMem when too many regions are suspended.
func (r *Region) Suspend() error {
	ticket, err := r.suspendTelling()
	r.table.space.await(ticket) // hooks may want updateMu
	return err
}

func (r *Region) suspendTelling() (ticket uint64, err error) {
	s := r.table.space
	s.updateMu.Lock()
	defer s.updateMu.Unlock()
	first, err := r.suspend()
	if first {
		s.tell(r, RegionSuspended)
		s.bumpGeneration(KindSuspend, r.pages.start, r.pages.end, 0)
		s.announce(KindSuspend, r.pages.start, r.pages.end)
	}
	return s.announced(), err
}

func (r *Region) suspend() (first bool, err error) {
	s := r.table.space
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.gate.has(gateDead | gateEliminated) {
		return false, ErrClosed
	}
	if r.susp.count == 0 {
		if !s.watchMoves(r) {
			return false, fmt.Errorf("%w: %d regions are suspended", ErrNoMem, C.TV_SUSPENDED)
		}
		r.gate.set(gateSuspended)
	}
	// Those inside a section have seen it as it was.
	s.quiesce()()
	r.susp.count++
	return r.susp.count == 1, nil
}

// Resume takes one Suspend back. With the last the region's work goes on. ErrInvalid if it
// is not suspended, ErrClosed when it was deregistered or eliminated, ErrNoMem and
// ErrUnmapped if it was moved to where it cannot be followed; it is suspended then.
func (r *Region) Resume() error {
	s := r.table.space
	s.updateMu.Lock()
	defer s.updateMu.Unlock()
	moved, last, err := r.resume()
	if moved {
		s.tell(r, RegionMoved)
	}
	if last {
		s.bumpGeneration(KindResume, r.pages.start, r.pages.end, 0)
		s.tell(r, RegionResumed)
	}
	return err
}

func (r *Region) resume() (moved, last bool, err error) {
	s := r.table.space
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := r.updatable(); err != nil {
		return false, false, err
	}
	if moved, err = s.follow(r); err != nil {
		return false, false, fmt.Errorf("follow the region's mremap: %w", err)
	}
	if r.susp.count > 1 {
		r.susp.count--
		return moved, false, nil
	}
	r.endSuspension()
	r.gate.clear(gateSuspended)
	return moved, true, nil
}

// updatable says whether the region's mapping may be changed: ErrClosed, or ErrInvalid if
// it is not suspended. It is called with Space.mu held.
func (r *Region) updatable() error {
	switch {
	case r.gate.has(gateDead | gateEliminated):
		return ErrClosed
	case r.susp.count == 0:
		return fmt.Errorf("%w: the region is not suspended", ErrInvalid)
	}
	return nil
}

// endSuspension forgets that a region is suspended, and says whether it was. It is called
// with Space.mu held.
func (r *Region) endSuspension() bool {
	was := r.susp.count > 0
	r.susp.count = 0
	if r.susp.slot > 0 {
		s := r.table.space
		if at := s.suspendedAt(r.susp.slot).Swap(0); at != r.pages.start {
			// It went there, and the pager has left it to be followed.
			for _, m := range s.armed.missing(at, at+(r.pages.end-r.pages.start)) {
				s.letGo(m)
			}
		}
		s.freeSlots = append(s.freeSlots, r.susp.slot)
		r.susp.slot = 0
	}
	return was
}

// watchMoves has the pager follow a region's memory, if userfaultfd tells of it; false if
// there is no room for another. It is called with Space.mu held.
func (s *Space) watchMoves(r *Region) bool {
	if r.paging != UserFault {
		return true
	}
	top := (*atomic.Uint32)(unsafe.Pointer(&s.sh.suspended_top))
	if n := len(s.freeSlots); n > 0 {
		r.susp.slot = s.freeSlots[n-1]
		s.freeSlots = s.freeSlots[:n-1]
	} else if r.susp.slot = int(top.Load()) + 1; r.susp.slot > C.TV_SUSPENDED {
		r.susp.slot = 0
		return false
	}
	s.sh.suspended[r.susp.slot-1].len = C.uint64_t(r.pages.end - r.pages.start)
	s.suspendedAt(r.susp.slot).Store(r.pages.start)
	top.Store(max(top.Load(), uint32(r.susp.slot)))
	return true
}

// suspendedAt is where the pager notes the memory of a suspended region to lie.
func (s *Space) suspendedAt(slot int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&s.sh.suspended[slot-1].at))
}

// follow moves a suspended region to where mremap(2) has put its memory. It is called with
// Space.mu held.
func (s *Space) follow(r *Region) (moved bool, err error) {
	if r.susp.slot == 0 {
		return false, nil
	}
	s.settle()
	at := s.suspendedAt(r.susp.slot).Load()
	if at == r.pages.start {
		return false, nil
	}
	to := span{at, at + (r.pages.end - r.pages.start)}
	if err := mapped(to); err != nil {
		return false, err
	}
	return true, s.rebase(r, to, true)
}

// rebase puts a suspended region on other memory; its pages went there, or are others. It
// is called with Space.mu held.
func (s *Space) rebase(r *Region, to span, went bool) error {
	from := r.pages
	r.pages = span{} // what is there now is not a hole of this one
	if r.paging == UserFault {
		if ok, err := s.adopt(to); !ok || err != nil {
			r.pages = from
			if err == nil {
				err = fmt.Errorf("%w: userfaultfd cannot page the memory at %#x", ErrInvalid, to.start)
			}
			return err
		}
	}
	r.pages = to
	s.retrack(r, from, went)
	switch hs := r.holes.Load(); {
	case hs == nil:
	case went:
		moved := make([]span, len(*hs))
		for i, h := range *hs {
			moved[i] = span{h.start - from.start + to.start, h.end - from.start + to.start}
		}
		r.holes.Store(&moved)
	default:
		r.gate.clear(gateHoles)
		r.holes.Store(nil)
	}
	r.addr.Add(to.start - from.start)
	if r.susp.slot > 0 {
		s.suspendedAt(r.susp.slot).Store(to.start)
	}
	s.giveBack(r.paging, from)
	s.bumpGeneration(KindMoved, from.start, from.end, to.start)
	return nil
}

// MoveTo puts the suspended region on the memory at addr, of the same length, which stays
// the caller's as what it leaves does: no byte is copied. Its keys, and the addresses of
// requests, stay. addr may be where the region is: then it takes over what is mapped there
// now. Errors: ErrInvalid if the region is not suspended, is no range of memory of the
// program's, or if addr has another offset in its page or is memory of a kind that cannot
// be paged as the region is; ErrClosed, ErrUnmapped, ErrNoMem, ErrMemlock.
func (r *Region) MoveTo(addr uintptr) error {
	s := r.table.space
	s.updateMu.Lock()
	defer s.updateMu.Unlock()
	if err := r.moveMemory(uint64(addr)); err != nil {
		return err
	}
	s.tell(r, RegionMoved)
	return nil
}

func (r *Region) moveMemory(addr uint64) error {
	s := r.table.space
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := r.updatable(); err != nil {
		return err
	}
	if r.paging == Implicit || r.paging == NullMemory || r.paging == DeviceMemory {
		return fmt.Errorf("%w: a region of this kind (%v) cannot be moved", ErrInvalid, r.paging)
	}
	_, _ = s.follow(r) // where it went may be gone, too
	n := r.pages.end - r.pages.start
	to := span{addr &^ pageMask, addr&^pageMask + n}
	switch {
	case (addr^r.addr.Load())&pageMask != 0:
		return fmt.Errorf("%w: address %#x has another offset in its page than the region at %#x", ErrInvalid, addr, r.addr.Load())
	case to.end < to.start || to.end > maxVA:
		return fmt.Errorf("%w: %d bytes at %#x end outside the address space", ErrUnmapped, n, addr)
	}
	if err := mapped(to); err != nil {
		return err
	}
	if r.Access()&FlushPersistent != 0 {
		if err := persistable(to); err != nil {
			return err
		}
	}
	if r.paging == Pinned {
		if err := s.lock(to); err != nil {
			return err
		}
	}
	return s.rebase(r, to, false)
}

// Eliminate ends the region by force, suspended or not, with windows bound and work under
// way: work requests that name it fail with a local protection error, the peers' with a
// remote access error. When it returns, no engine touches the memory. The handle is there
// until Deregister, and so its key is nobody else's; windows that were bound to it are not
// bound any more. ErrClosed when it was eliminated or deregistered before.
func (r *Region) Eliminate() error {
	s := r.table.space
	s.updateMu.Lock()
	defer s.updateMu.Unlock()
	if err := r.eliminate(); err != nil {
		return err
	}
	s.tell(r, RegionEliminated)
	return nil
}

func (r *Region) eliminate() error {
	s, t := r.table.space, r.table
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.gate.has(gateDead | gateEliminated) {
		return ErrClosed
	}
	t.mu.Lock()
	r.gate.set(gateEliminated)
	r.invalid.Store(true)
	if r.windows > 0 {
		h := t.hash.Load()
		for i := range h.slots {
			if v := h.slots[i].Load(); v != nil && v != r && v.win != nil && v.base == r {
				t.closeWindow(v)
			}
		}
	}
	t.mu.Unlock()
	r.endSuspension()
	s.drop(r)
	s.bumpGeneration(KindEliminate, r.pages.start, r.pages.end, 0)
	return nil
}

// RegionEventKind is what has happened to a region.
type RegionEventKind uint8

const (
	// RegionSuspended: no engine touches its memory any more.
	RegionSuspended RegionEventKind = iota
	// RegionResumed: work on it goes on.
	RegionResumed
	// RegionEliminated: work on it fails.
	RegionEliminated
	// RegionMoved: its memory lies elsewhere; it is suspended.
	RegionMoved
	// RegionClosed: it was deregistered while it was suspended.
	RegionClosed
)

func (k RegionEventKind) String() string {
	return [...]string{"suspended", "resumed", "eliminated", "moved", "closed"}[k]
}

// RegionEvent is what OnRegion tells.
type RegionEvent struct {
	Region *Region
	Kind   RegionEventKind
}

// OnRegion has f called with what happens to regions, by who makes it happen and before
// that call returns, in order. f must not suspend, move or eliminate regions, nor stop.
func (s *Space) OnRegion(f func(RegionEvent)) (stop func()) {
	s.tellMu.Lock()
	defer s.tellMu.Unlock()
	p := &f
	s.told = append(s.told, p)
	return func() {
		s.tellMu.Lock()
		defer s.tellMu.Unlock()
		for i, q := range s.told {
			if q == p {
				s.told = append(s.told[:i:i], s.told[i+1:]...)
				return
			}
		}
	}
}

func (s *Space) tell(r *Region, k RegionEventKind) {
	s.tellMu.Lock()
	defer s.tellMu.Unlock()
	for _, f := range s.told {
		(*f)(RegionEvent{r, k})
	}
}
