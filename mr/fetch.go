// SPDX-License-Identifier: Apache-2.0

package mr

// #include "evict.h"
import "C"

import (
	"encoding/binary"
	"errors"
	"io"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Content comes back from limbo inside a section, as a page is brought in. From the store
// it comes in the engine, if the policy has it wait, or in the background: fetchers read
// ahead, since pages that were evicted in a row are mostly wanted in a row.

// errStored is what accesses give one another inside this package: the page in
// Accessor.wanted is in the store. See again.
var errStored = errors.New("mr: content is in the store")

const (
	fetchers   = 4  // goroutines
	fetchQueue = 64 // pages that wait for them; a request that finds no room asks again
	fetchAhead = 8  // pages that are read behind the one that was asked for
)

// MaxFetch is how many bytes are fetched at once for one request, at most: what comes must
// not push out of the smallest budget what has come before it.
const MaxFetch = MinBudget / 2

type fetching struct {
	jobs    chan fetchJob
	mu      sync.Mutex
	pending map[uint64]asking
	done    sync.WaitGroup
}

// fetchJob is a page to be fetched, and how many behind it.
type fetchJob struct {
	va    uint64
	ahead int
}

// asking is who asked for a page first, and when.
type asking struct {
	r     *Region
	since int64
}

// again says whether an access that gave an error is to be tried again at once: nil. Call
// it when enter has been followed by exit.
func (a *Accessor) again(r *Region, err error, wait *waiter) error {
	a.close()
	if err == errStored {
		err = a.major(r)
	}
	if err != ErrBusy || !wait.more() {
		return err
	}
	if a.refused != 0 && wait.tired() {
		// Mappings are changed one after the other: the kernel might never say yes, to
		// engines. The pager has means of its own against that, for threads that touch
		// the page. (In a system call a goroutine is in nobody's way.)
		_, _, _ = unix.Syscall(unix.SYS_MADVISE, uintptr(a.refused), pageSize, madvPopulateRead)
	}
	a.refused = 0
	return nil
}

// major deals with a page in the store: nil if it is to be looked at again, ErrMajor when
// it is being fetched, ErrPoisoned if it was lost.
func (a *Accessor) major(r *Region) error {
	if !a.patient && !a.stalls(r, a.s.FetchDelay()) {
		a.blocked = r
		begun := 0
		if a.rest > a.wanted {
			begun, _ = a.fetchRange(r, a.wanted, a.rest)
		} else if a.s.fetch(r, a.wanted, fetchAhead) {
			begun = 1
		}
		if a.account != nil {
			a.account.Major += uint64(begun)
		}
		return ErrMajor
	}
	began := a.s.opts.Clock()
	err := a.fromStore(a.wanted, a.wantedWord)
	spent := uint64(a.s.opts.Clock() - began)
	r.base.faultNs.Add(spent)
	if a.account != nil {
		a.account.Ns += spent
	}
	if err == nil {
		r.base.major.Add(1)
		a.countHandled(r, 1)
		if a.account != nil {
			a.account.Minor--
			a.account.Major++
		}
	}
	return err
}

// recall brings pages back from the limbo, those at the start of a range whose pages lie
// in a row there, and says how many bytes. ErrBusy: they are on their way. Call it inside a
// section, with the first page in limbo.
func (a *Accessor) recall(va uint64, n int) (int, error) {
	s := a.s
	if s.full() && !a.forced {
		return 0, ErrBusy
	}
	first := s.peek(va)
	if first&stateMask != pageLimbo {
		return 0, nil // since
	}
	pages := 1
	for (pages+1)*pageSize <= n && s.peek(va+uint64(pages)<<pageShift) == first+uint32(pages)<<payloadShift {
		pages++
	}
	from := uint64(s.sh.limbo) + uint64(first>>payloadShift)<<pageShift
	m := uffdMoveArg{dst: va, src: from, len: uint64(pages) << pageShift, mode: uffdMoveDontWake}
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(s.uffd), uffdioMove, uintptr(unsafe.Pointer(&m)))
	done, e := ioctlResult(e, m.moved, pages<<pageShift)
	switch e {
	case 0:
	case unix.EAGAIN, unix.EEXIST, unix.ENOENT, unix.EBUSY:
		return 0, ErrBusy
	default:
		// Read-only by now, say: then the content has to do.
		done, e = s.placePages(va, unsafe.Pointer(pointer[byte](from)), pageSize)
		switch e {
		case 0:
		case unix.ENOMEM:
			return 0, ErrNoMem
		case unix.ENOENT, unix.ESRCH, unix.EINVAL:
			return 0, ErrRemoved
		default:
			return 0, ErrBusy
		}
	}
	for i := range done >> pageShift {
		s.isBack(va+uint64(i)<<pageShift, first+uint32(i)<<payloadShift)
	}
	return done, nil
}

// isBack notes that a page is in place whose content was elsewhere. It cannot have left
// again before the section is over; but it may have been stored.
func (s *Space) isBack(va uint64, was uint32) {
	l := s.leaf(va)
	for l != nil && !s.become(l, va, was, s.arrived().Load()) {
		if was = s.peek(va); was&stateMask != pageStored {
			return
		}
	}
	s.arrive(1)
}

// fromStore brings a page back from the store that its word says it is in: nil also if it
// turns out to be elsewhere by now. Call it outside sections; it takes as long as the
// store does. ErrPoisoned: the content is lost. ErrBusy, ErrRemoved, ErrNoMem.
func (a *Accessor) fromStore(va uint64, word uint32) error {
	s, slot := a.s, word>>payloadShift
	b := a.buffer()
	if b == nil {
		return ErrNoMem
	}
	defer func() { a.bufs = append(a.bufs, b) }()
	owner := s.ev.store.owner[slot].Load()
	if s.peek(va) != word {
		return nil
	}
	began := s.opts.Clock()
	lost := s.ev.store.st.Read(slot, b.data[:pageSize])
	s.measured(s.opts.Clock() - began)
	a.enter()
	defer a.exit()
	// The owner's number says that the slot is what it was when it was read.
	if s.peek(va) != word || s.ev.store.owner[slot].Load() != owner {
		return nil
	}
	if lost != nil {
		if l := s.leaf(va); l != nil && s.become(l, va, word, pagePoisoned) {
			C.tv_poison(s.sh, C.uint64_t(va))
		}
		return ErrPoisoned
	}
	if s.full() && !a.forced {
		return ErrBusy
	}
	_, e := s.placePages(va, unsafe.Pointer(&b.data[0]), pageSize)
	switch e {
	case 0:
		s.isBack(va, word)
		s.leftSlots(1)
	case unix.EEXIST:
		s.found(va, pageSize)
	case unix.ENOENT, unix.ESRCH, unix.EINVAL:
		return ErrRemoved
	case unix.ENOMEM:
		return ErrNoMem
	default:
		return ErrBusy
	}
	return nil
}

// measured adds a time in ns that the store took to what FetchDelay says.
func (s *Space) measured(is int64) {
	is = max(is, 1)
	if was := s.fetchDelay.Load(); was > 0 {
		is = was + (is-was)/8
	}
	s.fetchDelay.Store(max(is, 1))
}

// startFetching starts the fetchers.
func (s *Space) startFetching() {
	f := &s.ev.fetching
	f.jobs, f.pending = make(chan fetchJob, fetchQueue), map[uint64]asking{}
	for range fetchers {
		a := s.NewAccessor()
		f.done.Add(1)
		go func() {
			defer f.done.Done()
			defer a.Close()
			for job := range f.jobs {
				va := job.va
				f.mu.Lock()
				who := f.pending[va]
				f.mu.Unlock()
				count := func(n int) {
					who.r.base.major.Add(uint64(n))
					a.countHandled(who.r, n)
				}
				for i := range uint64(job.ahead + 1) {
					at := va + i<<pageShift
					w := s.peek(at)
					if w&stateMask != pageStored || i > 0 && (s.full() || at%leafBytes == 0) {
						break
					}
					// Counted before it is there, so that who found it there finds it counted.
					if i == 0 {
						count(1)
					}
					if a.fromStore(at, w) != nil {
						if i == 0 {
							count(-1)
						}
						break
					}
				}
				f.mu.Lock()
				delete(f.pending, va)
				f.mu.Unlock()
				who.r.base.faultNs.Add(uint64(s.opts.Clock() - who.since))
			}
		}()
	}
}

// stopFetching ends the fetchers; nobody asks any more.
func (s *Space) stopFetching() {
	if f := &s.ev.fetching; f.jobs != nil {
		close(f.jobs)
		f.done.Wait()
		f.jobs = nil
	}
}

// ReadOf is Read of the first bytes of n at iova, all of which are wanted soon: what is in
// the store of them is fetched at once, MaxFetch of it.
func (a *Accessor) ReadOf(r *Region, iova, n uint64, dst []byte) error {
	a.rest = r.va(iova) + n
	err := a.Read(r, iova, dst)
	a.rest = 0
	return err
}

// FetchAhead has n bytes at iova of a region fetched in the background, if its policy is
// not to wait for them, nor to fail: what is in the store of them, if there is room for it,
// and MaxFetch of it. It says how often FetchDelay that takes, about.
func (a *Accessor) FetchAhead(r *Region, iova, n uint64) int64 {
	if p := a.FaultPolicy(r); p == FaultStall || p == FaultError || r.Suspended() {
		return 0
	}
	va := r.va(iova)
	_, deep := a.fetchRange(r, va&^pageMask, va+n)
	return deep
}

// fetchRange has fetched what is in the store of a range. It says how many fetches begin
// now, and how many pages each fetcher has to read.
func (a *Accessor) fetchRange(r *Region, start, end uint64) (begun int, deep int64) {
	pages := min(end-start+pageMask, MaxFetch) >> pageShift
	each := max((pages+fetchers-1)/fetchers, 1) // all fetchers have an equal share
	stored := uint64(0)
	for i := uint64(0); i < pages; {
		va := start + i<<pageShift
		if a.s.peek(va)&stateMask != pageStored {
			i++
			continue
		}
		k := min(each, pages-i)
		if a.s.fetch(r, va, int(k-1)) {
			begun++
		}
		i, stored = i+k, stored+k
	}
	return begun, int64((stored + fetchers - 1) / fetchers)
}

// fetch has a page of a region fetched in the background, and as many behind it, if there
// is room for it. It says whether that begins now.
func (s *Space) fetch(r *Region, va uint64, ahead int) bool {
	f := &s.ev.fetching
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.pending[va]; ok {
		return false
	}
	select {
	case f.jobs <- fetchJob{va, ahead}:
		f.pending[va] = asking{r, s.opts.Clock()}
		return true
	default:
		return false
	}
}

// answerPager brings pages back that the pager thread cannot, as their store is Go code.
func (s *Space) answerPager() {
	defer s.ev.done.Done()
	a := s.NewAccessor()
	defer a.Close()
	a.forced = true
	asked := s.ev.asked
	var b [8]byte
	for {
		if _, err := io.ReadFull(asked, b[:]); err != nil {
			return
		}
		va := binary.NativeEndian.Uint64(b[:])
		for i := 0; ; i++ {
			w := s.peek(va)
			if w&stateMask != pageStored || a.fromStore(va, w) != ErrBusy {
				break
			}
			pause(i + 100)
		}
		C.tv_pager_again(s.pager)
	}
}

// letGo gives pages back to the kernel that no region wants any more; those near evicted
// ones when these are back, or gone: so what was evicted is there for the application. It
// is called with s.mu held.
func (s *Space) letGo(p span) {
	if s.ev.ready.Load() {
		// Nobody evicts while this is being found out, and no word changes otherwise than to
		// say that a page is back. Afterwards nobody does, as nobody wants the pages.
		s.ev.hold.Lock()
		defer s.ev.hold.Unlock()
	}
	for va := p.start; va < p.end; va = (va/nodeBytes + 1) * nodeBytes {
		if s.evictedNear(va).Load() == 0 {
			continue
		}
		if n := s.tally([]span{p}); n.limbo+n.stored+n.poisoned > 0 {
			for _, m := range s.orphans.missing(p.start, p.end) {
				s.orphans.add(m.start, m.end)
			}
			return
		}
		break
	}
	s.disarm(p.start, p.end)
}

// unorphan takes a range out of the orphans: regions are there again. It is called with
// s.mu held.
func (s *Space) unorphan(p span) {
	missing := s.orphans.missing(p.start, p.end)
	at := p.start
	for _, m := range append(missing, span{p.end, p.end}) {
		if at < m.start {
			s.orphans.remove(at, m.start)
		}
		at = m.end
	}
}

// endOrphans gives those orphans back to the kernel that have nothing evicted any more.
func (s *Space) endOrphans() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.orphans.spans() {
		s.orphans.remove(p.start, p.end)
		s.letGo(p)
	}
}
