// SPDX-License-Identifier: Apache-2.0

package mr

// #include "pager.h"
import "C"

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Notifier is what a device or a library above has called when memory changes that
// regions lie in: the hooks of the ioproc patch (D. Addison, linux-kernel, April 2005).
// Those that are nil are not called. Ranges are of whole pages. The one-page forms are
// called instead of the range forms, where they are set, for changes of one page; changes
// of more pages always come as ranges.
//
// Sync says: what is kept about the range is to be written back now. Invalidate: nothing
// about it is to be used any more. Update: what is there now may be used. They are called
// when, and in this order:
//
//	munmap, MAP_FIXED     the kernel unmaps; requests are refused; Invalidate
//	mremap                the kernel moves; requests are refused; Invalidate the old place,
//	                      Update the new one; then Invalidate the old place once more, as
//	                      the kernel tells of it as a munmap, too
//	MADV_DONTNEED, _FREE, _REMOVE
//	                      requests find nothing; the kernel drops it; Invalidate
//	eviction              Sync, Invalidate; requests find nothing; the pages leave, but for
//	                      those that are found to be in use
//	Region.Suspend        requests are held; Sync, Invalidate; Suspend returns
//	Region.Replace        Sync and Invalidate where the pages come from; they move; Update
//	                      where they go to
//	Region.MoveTo, mremap of a suspended region
//	                      the region moves; Update the new place (not before Resume, which
//	                      is when a region follows mremap)
//	Region.Resume         requests go on; Update
//	Region.Eliminate      requests are refused; Invalidate
//	mprotect              ChangeProtection, when an engine's access has failed on it, or
//	                      when a region is registered with rights that the mapping does
//	                      not give: the kernel does not tell of it
//	Space.Close           Release
//
// Where the kernel tells (the first three) a hook follows on the change, and the thread
// that made it may have gone on: SettleNotifiers waits for the hooks. In the others what
// stands behind Sync and Invalidate does not happen before these have returned. A page that
// comes back, from eviction or as it is touched first, is not told of.
//
// When more changes wait to be told than the journal holds, Invalidate and Update are
// called once for all of the notifier's range.
//
// Hooks are called one at a time, by a goroutine of the Space that is locked to its
// thread. They may call what they like of this package, also what makes hooks be called:
// these calls do not wait, and their hooks come when the one that runs has returned. What
// evicts, or sets budgets or the store, is ErrBusy then, and Close is not for hooks. A hook
// must not wait for another goroutine that evicts or suspends.
type Notifier struct {
	Release func()

	SyncRange, InvalidateRange, UpdateRange func(start, end uintptr)
	// ChangeProtection is told the protection that was found, as of mmap(2).
	ChangeProtection func(start, end uintptr, prot int)

	SyncPage, InvalidatePage, UpdatePage func(addr uintptr)
}

// listener is a Notifier that was added.
type listener struct {
	n    *Notifier
	span span
	from uint64 // what happened until then is not told
	gone bool
}

// notifiers are those of a Space.
type notifiers struct {
	wake    *os.File     // eventfd of the journal; open until the Space is closed
	suspect chan suspect // accesses that failed
	noted   atomic.Uint64
	thread  atomic.Int32 // that runs hooks

	mu      sync.Mutex
	turned  sync.Cond // told, looked, running or list have changed
	list    []*listener
	running *listener // whose hook is being called
	told    uint64    // seq of the last change that all have been told of
	looked  uint64    // how many of noted were looked at
	active  bool      // the goroutine runs, and will look at list once more

	ends sync.WaitGroup // of goroutines
}

// suspect is memory whose protection may be other than somebody thinks.
type suspect struct {
	span
	write bool // reading is not enough
	whole bool // the mapping is of interest, not the range alone
}

// AddNotifier has hooks called for changes of the addresses start ≤ x < end, or of all
// memory if both are 0, from now on. stop ends that, and returns when no hook of n is
// running (unless it is called by one). The first takes a file descriptor for as long as the
// Space lives; the error is what the kernel says when there is none (EMFILE, ENFILE).
func (s *Space) AddNotifier(n *Notifier, start, end uintptr) (stop func(), err error) {
	l := &listener{n: n, span: span{uint64(start), uint64(end)}}
	if start == 0 && end == 0 {
		l.span.end = maxVA
	}
	h := &s.hooks
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.wake == nil {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			return nil, fmt.Errorf("eventfd for notifiers: %w", err)
		}
		h.turned.L = &h.mu
		h.suspect = make(chan suspect, 64)
		h.wake = os.NewFile(uintptr(fd), "journal")
		(*atomic.Int32)(unsafe.Pointer(&s.sh.journal.fd)).Store(int32(fd))
	}
	s.listening().Store(1)
	if !h.active {
		h.active, h.told = true, s.LastChange()
		h.ends.Go(s.runHooks)
	}
	l.from = s.LastChange()
	h.list = append(h.list, l)
	return func() { s.stopNotifier(l) }, nil
}

func (s *Space) listening() *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&s.sh.journal.listening))
}

// stopNotifier ends a listener, and the goroutine with the last.
func (s *Space) stopNotifier(l *listener) {
	h := &s.hooks
	h.mu.Lock()
	defer h.mu.Unlock()
	if !l.gone {
		l.gone = true
		h.list = slices.DeleteFunc(slices.Clone(h.list), func(o *listener) bool { return o == l })
		if len(h.list) == 0 {
			s.listening().Store(0)
			s.wakeHooks()
			h.turned.Broadcast()
		}
	}
	for h.running == l && !s.inHook() {
		h.turned.Wait()
	}
}

func (s *Space) wakeHooks() {
	one := [8]byte{1}
	_, _ = s.hooks.wake.Write(one[:]) // one is all it needs
}

// inHook says whether the caller is a hook.
func (s *Space) inHook() bool { return s.hooks.thread.Load() == int32(unix.Gettid()) }

// SettleNotifiers waits until hooks have been told of all that has happened before. Called
// by a hook it returns at once.
func (s *Space) SettleNotifiers() {
	s.Settled()
	if s.listening().Load() == 0 {
		return
	}
	s.waitTold(s.LastChange(), s.hooks.noted.Load())
}

// announce enters what is about to happen, for hooks; await waits for these. Between the
// two locks may be given back that hooks may want. It costs a load if nobody listens.
func (s *Space) announce(k ChangeKind, start, end uint64) (ticket uint64) {
	if s.listening().Load() == 0 || start == end {
		return 0
	}
	s.Settled() // behind what the kernel has told of
	return uint64(C.tv_record(&s.sh.journal, C.uint64_t(k|C.TV_BEFORE), C.uint64_t(start), C.uint64_t(end), 0))
}

// await is described at announce.
func (s *Space) await(ticket uint64) {
	if ticket > 0 {
		s.waitTold(ticket, 0)
	}
}

// announced is a ticket for what was announced so far.
func (s *Space) announced() uint64 {
	if s.listening().Load() == 0 {
		return 0
	}
	return s.LastChange()
}

func (s *Space) waitTold(change, noted uint64) {
	if s.inHook() {
		return
	}
	h := &s.hooks
	h.mu.Lock()
	defer h.mu.Unlock()
	for len(h.list) > 0 && (h.told < change || h.looked < noted) {
		h.turned.Wait()
	}
}

// runHooks calls hooks until nobody listens any more.
func (s *Space) runHooks() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	h := &s.hooks
	thread := int32(unix.Gettid())
	h.thread.Store(thread)
	defer h.thread.CompareAndSwap(thread, 0) // the next goroutine may have begun
	var b [8]byte
	for s.tellHooks() {
		if _, err := h.wake.Read(b[:]); err != nil {
			panic(fmt.Sprintf("mr: eventfd of the journal: %v", err)) // it is ours until this goroutine has ended
		}
	}
}

// tellHooks tells what has happened, and what failed accesses are about; false if nobody
// listens.
func (s *Space) tellHooks() bool {
	h := &s.hooks
	looked := s.lookAtSuspects()
	h.mu.Lock()
	seq := h.told
	h.mu.Unlock()
	last, complete := s.entries(seq, func(k ChangeKind, c Change) bool {
		seq++
		s.tellChange(k, c, seq)
		h.mu.Lock()
		h.told = seq
		h.turned.Broadcast()
		h.mu.Unlock()
		return true
	})
	if !complete {
		s.each(last, func(l *listener) {
			l.n.call(l.n.InvalidateRange, nil, l.span)
			l.n.call(l.n.UpdateRange, nil, l.span)
		})
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.told = last
	h.looked += looked
	h.turned.Broadcast()
	h.active = len(h.list) > 0
	return h.active
}

// each calls f for those who listened when a change happened.
func (s *Space) each(seq uint64, f func(l *listener)) {
	h := &s.hooks
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, l := range h.list { // the list is never changed, but replaced
		if l.gone || seq <= l.from {
			continue
		}
		h.running = l
		h.mu.Unlock()
		f(l)
		h.mu.Lock()
		h.running = nil
		h.turned.Broadcast()
	}
}

// tellChange calls what the table at Notifier says.
func (s *Space) tellChange(k ChangeKind, c Change, seq uint64) {
	at := span{uint64(c.Start), uint64(c.End)}
	to := span{uint64(c.To), uint64(c.To + c.End - c.Start)}
	s.each(seq, func(l *listener) {
		n := l.n
		if k&C.TV_BEFORE != 0 {
			n.call(n.SyncRange, n.SyncPage, l.common(at))
			n.call(n.InvalidateRange, n.InvalidatePage, l.common(at))
			return
		}
		switch k {
		case KindUnmap, KindRemap, KindRemove, KindEliminate:
			n.call(n.InvalidateRange, n.InvalidatePage, l.common(at))
		case KindReplace, KindResume:
			n.call(n.UpdateRange, n.UpdatePage, l.common(at))
		}
		if k == KindRemap || k == KindMoved {
			n.call(n.UpdateRange, n.UpdatePage, l.common(to))
		}
	})
}

// common is what two ranges have in common; with start ≥ end if that is nothing.
func (a span) common(b span) span { return span{max(a.start, b.start), min(a.end, b.end)} }

func (l *listener) common(o span) span { return l.span.common(o) }

// call calls a hook, in its form for one page or for a range.
func (n *Notifier) call(f func(start, end uintptr), page func(addr uintptr), at span) {
	switch {
	case at.start >= at.end:
	case page != nil && at.end-at.start == pageSize:
		page(uintptr(at.start))
	case f != nil:
		f(uintptr(at.start), uintptr(at.end))
	}
}

// suspectFault has memory looked at on which an engine's access has failed, if anybody
// wants to know. It returns the error of the access.
func (s *Space) suspectFault(r *Region, iova uint64, n int, write bool, err error) error {
	if err == ErrFault {
		va := r.va(iova)
		s.suspect(suspect{span{va, va + uint64(n)}, write, true})
	}
	return err
}

// suspectRights has the memory of a new region looked at.
func (s *Space) suspectRights(r *Region) {
	if r.pages.start < r.pages.end {
		s.suspect(suspect{r.pages, r.Access()&LocalWrite != 0, false})
	}
}

func (s *Space) suspect(u suspect) {
	if s.listening().Load() == 0 {
		return
	}
	select {
	case s.hooks.suspect <- u:
		s.hooks.noted.Add(1)
		s.wakeHooks()
	default: // as many wait to be looked at, and requests fail
	}
}

// lookAtSuspects tells of memory whose protection does not allow what was tried, and says
// at how much it has looked.
func (s *Space) lookAtSuspects() (looked uint64) {
	for {
		select {
		case u := <-s.hooks.suspect:
			looked++
			s.lookAt(u)
		default:
			return looked
		}
	}
}

// lookAt asks /proc/self/maps (proc(5)).
func (s *Space) lookAt(u suspect) {
	_ = mappings(func(found mapping) bool { // without /proc nobody knows
		m := found.span
		if c := m.common(u.span); c.start >= c.end {
			return m.start < u.end
		} else if !u.whole {
			m = c
		}
		prot := 0
		for i, bit := range [...]int{unix.PROT_READ, unix.PROT_WRITE, unix.PROT_EXEC} {
			if found.perms[i] != '-' {
				prot |= bit
			}
		}
		if prot&unix.PROT_READ != 0 && (prot&unix.PROT_WRITE != 0 || !u.write) {
			return true // it was something else, or is over
		}
		s.bumpGeneration(KindProtect, m.start, m.end, uint64(prot))
		s.each(s.LastChange(), func(l *listener) {
			if c := l.common(m); c.start < c.end && l.n.ChangeProtection != nil {
				l.n.ChangeProtection(uintptr(c.start), uintptr(c.end), prot)
			}
		})
		return true
	})
}

// releaseNotifiers tells that the Space ends, and ends the goroutine. It is called without
// locks, while the pager thread is there.
func (s *Space) releaseNotifiers() {
	s.SettleNotifiers()
	h := &s.hooks
	h.mu.Lock()
	list := h.list
	h.mu.Unlock()
	for _, l := range list {
		s.stopNotifier(l)
	}
	h.ends.Wait()
	for _, l := range list {
		if l.n.Release != nil {
			l.n.Release()
		}
	}
}
