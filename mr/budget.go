// SPDX-License-Identifier: Apache-2.0

package mr

// #include "evict.h"
import "C"

import (
	"fmt"
	"math"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Budgets say how much memory pages may take, in place and in limbo, of a region, of a
// protection domain's regions, and of all. Who brings a page in counts arrivals; when
// there have been so many that a budget may be mostly through its reserve, the evictor
// is roused, and when there have been so many that one may be used up, engines say
// ErrBusy, and the pager thread holds faults up for 1 ms at most. So a budget can be
// exceeded by what is being placed in that moment: overshoot pages for each engine, and
// what threads of the application touch while the store is slow.
//
// Who goes: the pages that arrived first, by generations of arrivals. They go to limbo,
// which keeps up to an eighth of the budget; a page that is wanted back from there comes
// back as a new one. What has been in limbo longest goes to the store.

// MinBudget is the smallest budget.
const MinBudget = 64 * pageSize

const never = math.MaxUint64

type budgets struct {
	process *budget
	pds     map[tablePD]*budget
	regions map[*Region]*budget
	fresh   []span // armed, and not looked at; guarded by Space.mu
	all     bool   // what was armed before the first budget was looked at
	bumped  uint64 // arrivals at the last generation
	quantum uint64 // arrivals of a generation
}

type tablePD struct {
	t  *Table
	pd PD
}

// budget is one of them, in pages.
type budget struct {
	pages uint64
	h     hunt
}

// reserve is what is kept free.
func (b *budget) reserve() uint64 { return max(min(b.pages/32, 1024), 16) }

// share is the limbo's part.
func (b *budget) share() uint64 { return b.pages / 8 }

// hunt is where somebody looks for victims.
type hunt struct {
	at  uint64 // address
	gen uint32 // the youngest generation that goes
}

// limits are in arrivals.
type limits struct{ wake, stop uint64 }

func (s *Space) setLimits(l limits) {
	(*atomic.Uint64)(unsafe.Pointer(&s.sh.stop_at)).Store(l.stop)
	(*atomic.Uint64)(unsafe.Pointer(&s.sh.wake_at)).Store(l.wake)
}

func (s *Space) arrivals() *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&s.sh.arrivals)) }

// arrive counts pages that have come to be in place.
func (s *Space) arrive(pages int) {
	if s.arrivals().Add(uint64(pages)) >= (*atomic.Uint64)(unsafe.Pointer(&s.sh.wake_at)).Load() {
		s.rouse()
	}
}

// leftSlots counts slots that pages have ceased to need.
func (s *Space) leftSlots(n int) {
	if n > 0 && (*atomic.Uint64)(unsafe.Pointer(&s.sh.back)).Add(uint64(n)) >= C.TV_DEAD {
		s.rouse()
	}
}

// rouse has the evictor look.
func (s *Space) rouse() {
	roused := (*atomic.Uint32)(unsafe.Pointer(&s.sh.roused))
	if roused.Swap(1) == 0 {
		one := [8]byte{1}
		if _, err := unix.Write(int(s.sh.rouse_fd), one[:]); err != nil {
			roused.Store(0)
		}
	}
}

// full says whether no more may come in now.
func (s *Space) full() bool {
	if s.arrivals().Load() < (*atomic.Uint64)(unsafe.Pointer(&s.sh.stop_at)).Load() {
		return false
	}
	s.rouse()
	return true
}

func budgetPages(bytes uint64) (*budget, error) {
	if bytes > 0 && bytes < MinBudget {
		return nil, fmt.Errorf("%w: budget of %d bytes, at least %d", ErrInvalid, bytes, MinBudget)
	}
	if bytes == 0 {
		return nil, nil
	}
	return &budget{pages: bytes >> pageShift}, nil
}

// SetBudget sets how many bytes of memory all regions of the process may take, in place and
// in limbo; 0: no limit, as in the beginning. It counts what userfaultfd pages, shared
// memory too, although that stays; pinned regions do not count. What is too much goes
// before this returns. ErrInvalid for less than MinBudget, ErrNotSupported.
func (s *Space) SetBudget(bytes uint64) error {
	return s.setBudget(bytes, func(b *budget) {
		s.ev.budgets.process = b
		s.limit.Store(bytes)
	})
}

// SetBudget is Space.SetBudget for the regions of a protection domain.
func (t *Table) SetBudget(pd PD, bytes uint64) error {
	return t.space.setBudget(bytes, func(b *budget) {
		if b == nil {
			delete(t.space.ev.budgets.pds, tablePD{t, pd})
		} else {
			t.space.ev.budgets.pds[tablePD{t, pd}] = b
		}
	})
}

// budget is that of a protection domain in bytes, 0 for none.
func (t *Table) budget(pd PD) uint64 {
	ev := &t.space.ev
	ev.mu.Lock()
	defer ev.mu.Unlock()
	if b := ev.budgets.pds[tablePD{t, pd}]; b != nil {
		return b.pages << pageShift
	}
	return 0
}

// DropBudgets ends the budgets of all protection domains of the table, which is not used any
// more. ErrBusy when a notifier's hook calls it.
func (t *Table) DropBudgets() error {
	s := t.space
	if s.inHook() {
		return ErrBusy
	}
	s.ev.mu.Lock()
	defer s.ev.mu.Unlock()
	had := false
	for k := range s.ev.budgets.pds {
		if k.t == t {
			delete(s.ev.budgets.pds, k)
			had = true
		}
	}
	if had && s.ev.ready.Load() {
		s.enforce()
	}
	return nil
}

// SetBudget is Space.SetBudget for one region. ErrInvalid if it is not one that
// userfaultfd pages, ErrClosed if it was deregistered.
func (r *Region) SetBudget(bytes uint64) error {
	s := r.table.space
	switch {
	case r.gates()&gateDead != 0:
		return ErrClosed
	case r.paging != UserFault || r.base != r:
		return fmt.Errorf("%w: budget of a region whose paging is %v", ErrInvalid, r.paging)
	}
	return s.setBudget(bytes, func(b *budget) {
		if b == nil {
			delete(s.ev.budgets.regions, r)
			r.limit.Store(0)
		} else {
			s.ev.budgets.regions[r] = b
			r.limit.Store(bytes)
		}
	})
}

func (s *Space) setBudget(bytes uint64, set func(*budget)) error {
	b, err := budgetPages(bytes)
	if err != nil {
		return err
	}
	if s.inHook() {
		return ErrBusy // whoever evicts waits for hooks
	}
	s.ev.mu.Lock()
	defer s.ev.mu.Unlock()
	if b == nil && !s.ev.ready.Load() {
		return nil
	}
	if err := s.openEviction(); err != nil {
		return err
	}
	bs := &s.ev.budgets
	if bs.regions == nil {
		bs.regions, bs.pds = map[*Region]*budget{}, map[tablePD]*budget{}
	}
	set(b)
	s.enforce()
	return nil
}

// watched says whether there is a budget. It is called with ev.mu held.
func (bs *budgets) watched() bool { return bs.process != nil || len(bs.pds)+len(bs.regions) > 0 }

// evictInBackground is the evictor.
func (s *Space) evictInBackground() {
	ev := &s.ev
	defer ev.done.Done()
	rouse := ev.rouse
	var b [8]byte
	for {
		if _, err := rouse.Read(b[:]); err != nil {
			return
		}
		(*atomic.Uint32)(unsafe.Pointer(&s.sh.roused)).Store(0)
		ev.mu.Lock()
		if !ev.closed && ev.ready.Load() {
			s.enforce()
			s.cleanUp()
		}
		ev.mu.Unlock()
	}
}

// cleanUp frees slots, when many have become free.
func (s *Space) cleanUp() {
	back := (*atomic.Uint64)(unsafe.Pointer(&s.sh.back))
	if back.Load() < C.TV_DEAD {
		return
	}
	back.Store(0)
	s.ev.limbo.tidy(s, len(s.ev.limbo.owner))
	s.ev.store.clean(s, int(s.ev.store.next))
	s.endOrphans()
}

// target is a budget with what it is for.
type target struct {
	*budget
	in []span
}

// targets lists the budgets, the small ones first.
func (s *Space) targets() (ts []target) {
	bs := &s.ev.budgets
	s.mu.Lock()
	defer s.mu.Unlock()
	var heirs map[*Region]*budget
	for r, b := range bs.regions {
		if r.gates()&(gateDead|gateEliminated) == 0 {
			ts = append(ts, target{b, []span{r.pages}})
			continue
		}
		delete(bs.regions, r)
		for r.heir != nil {
			r = r.heir
		}
		// One that has been given a budget since keeps that, or has none.
		if r.gates()&(gateDead|gateEliminated) == 0 && r.paging == UserFault && r.limit.Load() == b.pages<<pageShift {
			if heirs == nil {
				heirs = map[*Region]*budget{}
			}
			heirs[r] = b
		}
	}
	for r, b := range heirs {
		if bs.regions[r] == nil {
			bs.regions[r] = b
			ts = append(ts, target{b, []span{r.pages}})
		}
	}
	for k, b := range bs.pds {
		var c coverage
		for r := range s.regions {
			if r.paging == UserFault && r.table == k.t && r.PD() == k.pd {
				c.add(r.pages.start, r.pages.end)
			}
		}
		ts = append(ts, target{b, c.spans()})
	}
	if bs.process != nil {
		var c coverage
		for _, p := range append(s.armed.spans(), s.orphans.spans()...) {
			c.add(p.start, p.end)
		}
		ts = append(ts, target{bs.process, c.spans()})
	}
	return ts
}

func (c *coverage) spans() (out []span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, g := range c.segs {
		if n := len(out); n > 0 && out[n-1].end == g.start {
			out[n-1].end = g.end
		} else {
			out = append(out, g.span)
		}
	}
	return out
}

// enforce has all budgets kept, and says when to look again. It is called with ev.mu held.
func (s *Space) enforce() {
	bs := &s.ev.budgets
	if !bs.watched() {
		s.mu.Lock()
		bs.fresh, bs.all = nil, false
		s.mu.Unlock()
		s.setLimits(limits{never, never})
		return
	}
	s.lookAtFresh()
	began := s.arrivals().Load()
	next := limits{never, never}
	bs.quantum = never
	for _, t := range s.targets() {
		if t.fits() {
			continue
		}
		bs.quantum = min(bs.quantum, max(t.pages/16, 16))
		have, ok := s.keep(t)
		if !ok || have >= t.pages {
			// Nothing more can go: try again when more has come.
			next.wake = min(next.wake, began+t.reserve())
			continue
		}
		next.stop = min(next.stop, began+(t.pages-have))
		next.wake = min(next.wake, began+(t.pages-have)-min(t.pages-have, t.reserve()/4))
	}
	s.setLimits(next)
	if n := s.arrivals().Load(); n-bs.bumped >= bs.quantum {
		bs.bumped = n
		s.arrived().Add(1 << payloadShift)
	}
	if s.arrivals().Load() >= next.wake {
		s.rouse()
	}
}

// fits says whether the budget allows all there is, in memory or not. When more is
// registered the evictor is roused.
func (t target) fits() bool {
	n := uint64(0)
	for _, p := range t.in {
		n += (p.end - p.start) >> pageShift
	}
	return n <= t.pages
}

// keep has one budget kept, and says how many pages there are now, and whether that is
// as it should be.
func (s *Space) keep(t target) (have uint64, ok bool) {
	limit := t.pages - t.reserve()/2
	for {
		n := s.tally(t.in)
		have = n.present + n.limbo
		if have <= limit {
			return have, true
		}
		limit = t.pages - t.reserve() // if at all, then some at once
		if s.EvictionStopped() != nil {
			return have, false
		}
		some := min(have-limit, 16*C.TV_BATCH)
		out, went := 0, 1
		for want := some + t.share(); went > 0 && n.limbo+uint64(out) < want; out += went {
			went = s.evictBatch(s.victims(t.in, &t.h, int(min(want-n.limbo-uint64(out), C.TV_BATCH)), false))
		}
		stored, err := s.storeLimbo(t.in, int(some))
		if err != nil || out == 0 && stored == 0 {
			return have, false
		}
	}
}

// tally is how many pages of ranges are in which state.
type tally struct{ present, limbo, stored, poisoned uint64 }

func (s *Space) tally(in []span) (n tally) {
	for _, p := range in {
		s.eachLeaf(p.start, p.end, func(sl *atomic.Uint64, from, to uint64) {
			at := sl.Load()
			if at <= goneLeaf {
				return
			}
			l := pointer[leaf](at)
			if to-from == leafBytes {
				n.present += uint64(l.n[pagePresent].Load())
				n.limbo += uint64(l.n[pageLimbo].Load())
				n.stored += uint64(l.n[pageStored].Load())
				n.poisoned += uint64(l.n[pagePoisoned].Load())
				return
			}
			for ; from < to; from += pageSize {
				switch l.word[pageIndex(from)].Load() & stateMask {
				case pagePresent:
					n.present++
				case pageLimbo:
					n.limbo++
				case pageStored:
					n.stored++
				case pagePoisoned:
					n.poisoned++
				}
			}
		})
	}
	return n
}

// victims puts into ev.victims the pages that go next, n at most, and says how many: those
// of old generations, or any in the order of their addresses.
func (s *Space) victims(in []span, h *hunt, n int, any bool) int {
	now := s.arrived().Load() >> payloadShift
	age := func(gen uint32) uint32 { return (now - gen) & ownerCount }
	limit, oldest, found := age(h.gen), uint32(0), 0
	if any {
		limit = 0
	}
	n = min(n, C.TV_BATCH)
	pick := func(sl *atomic.Uint64, from, to uint64) bool {
		at := sl.Load()
		if at <= goneLeaf || pointer[leaf](at).n[pagePresent].Load() == 0 {
			return true
		}
		l := pointer[leaf](at)
		for ; from < to && found < n; from += pageSize {
			w := l.word[pageIndex(from)].Load()
			if w&stateMask != pagePresent {
				continue
			}
			if a := age(w >> payloadShift); a < limit {
				oldest = max(oldest, a)
				continue
			}
			s.ev.victims[found].va = C.uint64_t(from)
			found++
			h.at = from + pageSize
		}
		return found < n
	}
	for range 3 {
		begin := h.at
		for _, p := range in {
			if p.end > begin && !s.eachLeafUntil(max(p.start, begin), p.end, pick) {
				return found
			}
		}
		h.at = never
		if any {
			break
		}
		h.at = 0
		if begin == 0 { // all round: the oldest of those that are left are next
			limit, h.gen, oldest = oldest, now-oldest, 0
		}
		if found > 0 {
			break
		}
	}
	return found
}

// lookAtFresh asks the kernel what is in memory of what was registered since.
func (s *Space) lookAtFresh() {
	bs := &s.ev.budgets
	s.mu.Lock()
	fresh := bs.fresh
	bs.fresh = nil
	if !bs.all {
		bs.all = true
		fresh = s.armed.spans()
	}
	s.mu.Unlock()
	for _, p := range fresh {
		// What was unmapped meanwhile is not there.
		_ = s.scan(p, 0, 0, pageIsSomewhere, pageIsSomewhere, s.ev.scanned[:], func(g scanned) { s.look(span{g.start, g.end}) })
	}
}
