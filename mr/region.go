// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// RegAttr says what to register (ibv_reg_mr(3), ibv_reg_mr_iova(3)).
type RegAttr struct {
	PD     PD
	Addr   uintptr
	Length uint64 // bytes
	// IOVA is the address that work requests use for the first byte. It counts
	// with HaveIOVA, and with ZeroBased in Access; otherwise it is Addr.
	IOVA     uint64
	HaveIOVA bool
	Access   Access
	// Pin locks the memory with mlock(2), under RLIMIT_MEMLOCK.
	Pin bool
	// Invalidatable lets a peer's SEND with invalidate end the region.
	Invalidatable bool
	// Device says that the memory is the device's own.
	Device bool
}

// Region is a memory region, or what one bind of a memory window opens of it.
type Region struct {
	// What each request looks at comes first.
	key     Key
	qp      uint32      // the one QP that may use it; 0: all
	invalid atomic.Bool // the key does not work any more
	gate    gateWord    // what keeps requests out, even those under way; 0 mostly
	rights  atomicRights
	win     *Window // whose bind it is
	// base is the region whose memory it is: itself, or the one a window is bound to;
	// nil for a window that is not bound.
	base   *Region
	moved  uint64                 // see MovedSince
	holes  atomic.Pointer[[]span] // unmapped since, and perhaps mapped anew; nil mostly
	addr   atomic.Uint64          // of the base: where it starts in memory; see va
	skew   uint64                 // from an address of requests to an offset in the base
	paging Paging
	attr   RegAttr // as it was registered, without PD and Access: Addr is addr's to say

	table   *Table
	pages   span // what it covers, in whole pages
	windows int  // bound to it; guarded by table.mu

	faults, handled, prefetched atomic.Uint64
	policy                      atomic.Uint32 // FaultPolicy
	rnrs                        atomic.Uint64 // asked of peers because of it
	placements                  atomic.Uint64 // see Usage
	major, faultNs              atomic.Uint64 // of handled, those from the store; the time spent on them
	limit                       atomic.Uint64 // its budget in bytes; 0: none
	susp                        suspension
	heir                        *Region  // what Reregister has put in its place; guarded by Space.mu
	dirty                       *tracker // nil: written pages are not asked for; guarded by Space.mu
}

// Table is the table that the region's keys are of.
func (r *Region) Table() *Table { return r.table }

// LKey and RKey are the region's keys; they are the same number.
func (r *Region) LKey() Key { return r.key }

// RKey is described at LKey.
func (r *Region) RKey() Key { return r.key }

// Addr is where the region starts in memory.
func (r *Region) Addr() uintptr { return uintptr(r.va(r.attr.IOVA)) }

// va is where the byte with an address of requests lies. It changes only while the
// region is suspended: ask inside a section, and go by it if run lets the access in.
func (r *Region) va(iova uint64) uint64 { return r.base.addr.Load() + r.skew + iova }

// Length is the region's length in bytes.
func (r *Region) Length() uint64 { return r.attr.Length }

// IOVA is the address that work requests use for the first byte.
func (r *Region) IOVA() uint64 { return r.attr.IOVA }

// Access is the region's rights.
func (r *Region) Access() Access { return r.rights.Load().access() }

// PD is the region's protection domain.
func (r *Region) PD() PD { return r.rights.Load().pd() }

// Allows says whether requests of a protection domain may do what needs these rights:
// the part of Check that Reregister and Invalidate can change while a message is under
// way. ErrKey, ErrPD, ErrAccess.
func (r *Region) Allows(pd PD, need Access) error {
	if r.invalid.Load() {
		return ErrKey
	}
	return r.rights.Load().allows(pd, need)
}

// contains says whether n bytes at iova lie in the region.
func (r *Region) contains(iova, n uint64) bool {
	return iova >= r.attr.IOVA && iova-r.attr.IOVA <= r.attr.Length && n <= r.attr.Length-(iova-r.attr.IOVA)
}

// Paging says who brings absent pages in.
func (r *Region) Paging() Paging { return r.paging }

// Stats counts page events of requests to this region. Invalidations and the
// application's own faults are counted for the Space only.
func (r *Region) Stats() Counters {
	return Counters{PageFaults: r.faults.Load(), PageFaultsHandled: r.handled.Load(), PagePrefetch: r.prefetched.Load()}
}

// Present is how many bytes of the region's pages are in memory now, by mincore(2).
func (r *Region) Present() (uint64, error) {
	switch r.paging {
	case Implicit:
		return resident()
	case NullMemory:
		return 0, nil
	}
	r.table.space.mu.Lock()
	pages := r.pages
	r.table.space.mu.Unlock()
	const chunk = 1 << 30
	vec := make([]byte, min(chunk, pages.end-pages.start)>>pageShift)
	n := uint64(0)
	for va := pages.start; va < pages.end; va += chunk {
		l := min(chunk, pages.end-va)
		if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(va), uintptr(l), uintptr(unsafe.Pointer(&vec[0]))); e != 0 {
			return 0, fmt.Errorf("mincore: %w", e)
		}
		for _, b := range vec[:l>>pageShift] {
			n += uint64(b&1) << pageShift
		}
	}
	return n, nil
}

// check refuses what can't be a region (ibv_reg_mr(3)) and fills in the IOVA.
func (a *RegAttr) check() error {
	if a.implicit() {
		return a.checkImplicit()
	}
	end := uint64(a.Addr) + a.Length
	switch {
	case a.Length == 0 && !a.Device:
		return fmt.Errorf("%w: length 0", ErrInvalid)
	case end < uint64(a.Addr) || end > maxVA:
		return fmt.Errorf("%w: %d bytes at %#x end outside the address space", ErrUnmapped, a.Length, a.Addr)
	}
	if err := a.checkRights(); err != nil {
		return err
	}
	if !a.HaveIOVA && a.Access&ZeroBased == 0 {
		a.IOVA = uint64(a.Addr)
	}
	if a.IOVA+a.Length < a.IOVA {
		return fmt.Errorf("%w: iova %#x wraps around", ErrInvalid, a.IOVA)
	}
	return nil
}

// checkRights refuses access flags that cannot be.
func (a *RegAttr) checkRights() error {
	switch {
	case a.Access&^allAccess != 0:
		return fmt.Errorf("%w: access flags %#x", ErrInvalid, uint32(a.Access&^allAccess))
	case a.Access&(RemoteWrite|RemoteAtomic) != 0 && a.Access&LocalWrite == 0:
		return fmt.Errorf("%w: remote write and atomic access need local write access", ErrInvalid)
	}
	return nil
}

// Register makes a memory region. It touches no page of it and, unless Pin is set,
// takes time that does not depend on its length. Errors: ErrInvalid, ErrUnmapped,
// ErrNoMem, ErrMemlock.
func (t *Table) Register(a RegAttr) (*Region, error) {
	if err := a.check(); err != nil {
		return nil, err
	}
	s := t.space
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := t.open(a)
	if err != nil {
		return nil, err
	}
	if err := t.insert(r); err != nil {
		s.release(r)
		return nil, err
	}
	s.regions[r] = struct{}{}
	s.suspectRights(r)
	return r, nil
}

// newRegion is a region that has no pages and no key yet.
func (t *Table) newRegion(a RegAttr) *Region {
	r := &Region{table: t, attr: a}
	r.base, r.skew = r, -a.IOVA
	r.susp.room.Store(DefaultHoldBuffer)
	r.addr.Store(uint64(a.Addr))
	r.rights.Store(a.PD, a.Access)
	return r
}

// open makes a region that has no key yet. It is called with s.mu held.
func (t *Table) open(a RegAttr) (*Region, error) {
	s, r := t.space, t.newRegion(a)
	if a.implicit() {
		r.paging = Implicit
		return r, nil
	}
	r.pages = span{uint64(a.Addr) &^ pageMask, (uint64(a.Addr) + a.Length + pageMask) &^ pageMask}
	if err := mapped(r.pages); err != nil {
		return nil, err
	}
	if a.Access&FlushPersistent != 0 {
		if err := persistable(r.pages); err != nil {
			return nil, err
		}
	}
	switch {
	case a.Device:
		r.paging = DeviceMemory
	case a.Pin:
		if err := s.lock(r.pages); err != nil {
			return nil, err
		}
		r.paging = Pinned
	default:
		if err := s.takeOver(r); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// mapped says ErrUnmapped if a part of the range is not mapped. MS_ASYNC does
// nothing but look at the mappings.
func mapped(p span) error {
	if _, _, e := unix.Syscall(unix.SYS_MSYNC, uintptr(p.start), uintptr(p.end-p.start), unix.MS_ASYNC); e != 0 {
		return fmt.Errorf("%w: %#x to %#x: %w", ErrUnmapped, p.start, p.end, e)
	}
	return nil
}

// takeOver registers a region's pages with userfaultfd, or leaves them to the
// kernel if that can't be.
func (s *Space) takeOver(r *Region) error {
	r.paging = KernelPaging
	ok, err := s.adopt(r.pages)
	if ok {
		r.paging = UserFault
	}
	return err
}

// adopt registers pages with userfaultfd for one region more; false if that can't be.
func (s *Space) adopt(p span) (bool, error) {
	if s.uffd < 0 || s.ordinary(p.start, p.end) {
		return false, nil
	}
	if !s.addNodes(p.start, p.end) {
		return false, fmt.Errorf("%w: page table", ErrNoMem)
	}
	s.settle()
	if (*atomic.Uint32)(unsafe.Pointer(&s.sh.gone)).Load() != 0 {
		s.punchHoles(p)
	}
	for _, m := range s.armed.missing(p.start, p.end) {
		// Nobody followed these pages until now: what is remembered may be old.
		s.forget(m.start, m.end)
	}
	s.markArmed(p)
	if s.arm(p.start, p.end) != nil {
		return false, nil
	}
	if s.ev.ready.Load() {
		s.ev.budgets.fresh = append(s.ev.budgets.fresh, s.armed.missing(p.start, p.end)...)
		s.unorphan(p)
		defer s.rouse()
	}
	s.armed.add(p.start, p.end)
	return true, nil
}

// punchHoles takes what was unmapped, and is mapped anew now that a region is
// registered there, out of the older regions: their keys must not reach it.
func (s *Space) punchHoles(p span) {
	gone := s.gone(p.start, p.end)
	if len(gone) == 0 {
		return
	}
	defer s.quiesce()()
	for r := range s.regions {
		for _, g := range gone {
			if r.paging != UserFault || g.end <= r.pages.start || r.pages.end <= g.start {
				continue
			}
			var hs []span
			if old := r.holes.Load(); old != nil {
				hs = append(hs, *old...)
			}
			hs = append(hs, g)
			r.holes.Store(&hs)
			r.gate.set(gateHoles)
		}
	}
	for _, g := range gone {
		s.forget(g.start, g.end)
	}
}

// inHole says whether a part of a range is in a hole of the region, which has some.
func (r *Region) inHole(start, end uint64) bool {
	for _, h := range *r.base.holes.Load() {
		if start < h.end && h.start < end {
			return true
		}
	}
	return false
}

// lock pins pages.
func (s *Space) lock(p span) error {
	if _, _, e := unix.Syscall(unix.SYS_MLOCK, uintptr(p.start), uintptr(p.end-p.start), 0); e != 0 {
		var lim unix.Rlimit
		_ = unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim)
		// Part of it may be locked by now.
		for _, m := range s.locked.missing(p.start, p.end) {
			_, _, _ = unix.Syscall(unix.SYS_MUNLOCK, uintptr(m.start), uintptr(m.end-m.start), 0)
		}
		return fmt.Errorf("%w: %d bytes, RLIMIT_MEMLOCK is %d bytes: %w", ErrMemlock, p.end-p.start, lim.Cur, e)
	}
	s.locked.add(p.start, p.end)
	return nil
}

// release undoes takeOver or lock.
func (s *Space) release(r *Region) { s.giveBack(r.paging, r.pages) }

// giveBack ends what one region did to pages.
func (s *Space) giveBack(by Paging, p span) {
	switch by {
	case UserFault:
		for _, f := range s.armed.remove(p.start, p.end) {
			s.letGo(f)
		}
	case Pinned:
		for _, f := range s.locked.remove(p.start, p.end) {
			_, _, _ = unix.Syscall(unix.SYS_MUNLOCK, uintptr(f.start), uintptr(f.end-f.start), 0) // unmapped meanwhile: nothing to unlock
		}
	}
}

// Deregister ends the region (ibv_dereg_mr(3)). When it returns no request reaches
// the memory through it. ErrClosed if it was ended before, ErrBound while memory windows
// are bound to it.
func (r *Region) Deregister() error {
	s := r.table.space
	waited, err := r.deregister()
	if waited {
		s.tell(r, RegionClosed)
	}
	return err
}

// deregister is Deregister, and says whether the region was suspended.
func (r *Region) deregister() (waited bool, err error) {
	s := r.table.space
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := r.table.retire(r, nil); err != nil {
		return false, err
	}
	waited = r.endSuspension()
	if !r.gate.has(gateEliminated) { // else it has been dropped
		s.drop(r)
	}
	return waited, nil
}

// retire takes a region's key away, or gives it to the region that takes its place.
func (t *Table) retire(r, by *Region) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case r.gate.has(gateDead):
		return ErrClosed
	case r.windows > 0:
		return ErrBound
	}
	r.gate.set(gateDead)
	if by == nil {
		t.hashRemove(r)
	} else {
		t.hashReplace(r, by)
	}
	return nil
}

// drop gives a dead region's pages back. It is called with s.mu held.
func (s *Space) drop(r *Region) {
	s.quiesce()() // those inside a section have seen it alive
	s.untrack(r)
	delete(s.regions, r)
	s.release(r)
}

// IsFault says whether an error means that memory was not there or not accessible,
// rather than a key or a right.
func IsFault(err error) bool { return errors.Is(err, ErrRemoved) || errors.Is(err, ErrFault) }
