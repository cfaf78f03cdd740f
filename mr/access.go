// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// busyLimit is how long an access waits for a mapping that is being changed
// before it says ErrBusy: the holder of a baton waits, and all QPs of its shard with it.
const busyLimit = 5 * time.Millisecond

// Write puts src at iova of a region; Check has been asked. Pages that are present
// are written to, last byte last, as programs poll on it. Bytes for absent pages
// gather in st until Flush, or until a page that is present or not adjacent comes.
// Errors: ErrKey when the region was deregistered meanwhile, ErrEliminated, ErrRemoved,
// ErrFault, ErrPoisoned, ErrNoMem; ErrBusy, ErrSuspended and ErrMajor, after which the same
// bytes may be written again: any part of them may be staged or written by then.
func (a *Accessor) Write(st *Stage, r *Region, iova uint64, src []byte) error {
	if r.paging == NullMemory {
		return r.living()
	}
	for len(src) > 0 {
		n, absent, err := a.writePresent(st, r, iova, src)
		if err != nil {
			return a.s.suspectFault(r, iova, len(src), true, err)
		}
		if n == 0 {
			if absent > 0 {
				n, err = a.stage(st, r, iova, src[:absent])
			} else {
				err = a.Flush(st) // a present page follows on staged ones: those first
			}
			if err != nil {
				return err
			}
		}
		src, iova = src[n:], iova+uint64(n)
	}
	return nil
}

// run is how many of the n bytes at va lie in pages that are present alike, the
// first one's state, and an error if that page is not the region's any more. Call
// it inside a section.
func (a *Accessor) run(r *Region, va uint64, n int) (int, bool, error) {
	if g := r.gates(); g != 0 {
		if err := a.barred(r, g, va, n); err != nil {
			return 0, false, err
		}
	}
	if r.paging != UserFault {
		return a.runOther(r, va, n)
	}
	done, present := 0, false
	for done < n {
		st := a.s.state(va + uint64(done))
		if st == pageGone || st == pagePoisoned {
			if done == 0 && st == pageGone {
				return 0, false, ErrRemoved
			}
			if done == 0 {
				return 0, false, ErrPoisoned
			}
			break
		}
		if done == 0 {
			present = st == pagePresent
		} else if (st == pagePresent) != present {
			break
		}
		done += pageSize - int((va+uint64(done))&pageMask)
	}
	return min(done, n), present, nil
}

// writePresent copies as many bytes as go to present pages at once. If the first
// page is absent it says how many bytes go to absent pages instead. (0, 0): st has
// bytes that must be placed first.
func (a *Accessor) writePresent(st *Stage, r *Region, iova uint64, src []byte) (n, absent int, err error) {
	a.enter()
	va := r.va(iova)
	n, present, err := a.run(r, va, len(src))
	switch {
	case err != nil:
		n = 0
	case !present:
		n, absent = 0, n
	case st.n > 0:
		n = 0
	default:
		err = a.copy(memory(va, n), src[:n])
	}
	a.exit()
	return n, absent, err
}

// memory is n bytes at an address, as a slice.
func memory(va uint64, n int) []byte { return unsafe.Slice(pointer[byte](va), n) }

// copy is guardedCopy, inside a section.
func (a *Accessor) copy(dst, src []byte) error {
	if a.lingers {
		return caughtCopy(dst, src)
	}
	return guardedCopy(dst, src)
}

// guardedCopy copies, the last byte last, and turns a fault that nobody can answer
// (the mapping vanished behind the kernel-paged region's back, a truncated file)
// into ErrFault.
func guardedCopy(dst, src []byte) error {
	old := debug.SetPanicOnFault(true)
	err := caughtCopy(dst, src)
	debug.SetPanicOnFault(old)
	return err
}

// caughtCopy is guardedCopy where faults panic already.
func caughtCopy(dst, src []byte) (err error) {
	defer func() {
		if e := recover(); e != nil {
			err = faultError(e)
		}
	}()
	last := len(src) - 1
	copy(dst, src[:last])
	// A program that polls on the last byte must find the rest when it sees it:
	// an ordinary store on a strongly ordered machine, and never before the copy,
	// as the compiler does not move it across the call.
	dst[last] = src[last]
	return nil
}

// faultError is ErrFault for a recovered memory fault; other panics go on.
func faultError(e any) error {
	if re, ok := e.(runtime.Error); ok {
		if _, ok := re.(interface{ Addr() uintptr }); ok {
			return ErrFault
		}
	}
	panic(e)
}

// Read copies len(dst) bytes at iova of a region; Check has been asked. Absent
// pages are brought in. Errors as for Write.
func (a *Accessor) Read(r *Region, iova uint64, dst []byte) error {
	if r.paging == NullMemory {
		clear(dst)
		return r.living()
	}
	var wait waiter
	for len(dst) > 0 {
		n, err := a.readSome(r, iova, dst)
		if err != nil {
			if err = a.again(r, err, &wait); err == nil {
				continue
			}
			return a.s.suspectFault(r, iova, len(dst), false, err)
		}
		dst, iova = dst[n:], iova+uint64(n)
	}
	return nil
}

// readSome copies what is present, or brings in what is not and says 0.
func (a *Accessor) readSome(r *Region, iova uint64, dst []byte) (int, error) {
	a.enter()
	va := r.va(iova)
	n, present, err := a.run(r, va, len(dst))
	switch {
	case err != nil:
	case present:
		err = a.copy(dst[:n], memory(va, n))
	default:
		n, err = 0, a.bringIn(r, va, n)
	}
	a.exit()
	return n, err
}

// bringIn makes the absent pages of a range present, a batch of them at most: zero
// pages, as that is what an untouched page reads as, or those that were evicted. Call it
// inside a section, after run has said that they are absent. errStored: the first is in
// the store, see again.
func (a *Accessor) bringIn(r *Region, va uint64, n int) error {
	start, end := va&^pageMask, (va+uint64(n)+pageMask)&^pageMask
	end = min(end, start+stagePages*pageSize)
	if a.s.full() {
		return ErrBusy
	}
	for first := true; start < end; first = false {
		done, err := a.bringSome(r, start, int(end-start))
		if err == errStored && !first {
			return nil // when it is first
		}
		if err != nil {
			return err
		}
		start += uint64(done)
	}
	return nil
}

// bringSome does so for the first pages of a range, and says how many bytes.
func (a *Accessor) bringSome(r *Region, start uint64, n int) (int, error) {
	switch w := a.s.word(start); w & stateMask {
	case pageLimbo:
		done, err := a.recall(start, n)
		a.countHandled(r, done>>pageShift)
		return done, err
	case pageStored:
		a.wanted, a.wantedWord = start, w
		return 0, errStored
	case pagePoisoned:
		return 0, ErrPoisoned
	}
	done, e := a.s.bring(start, nil, a.plain(start, n))
	switch {
	case e == 0:
		a.countHandled(r, done>>pageShift)
		a.s.setPresent(start, done)
		return done, nil
	case e == unix.EEXIST || r.kernels(e):
		a.s.found(start, pageSize) // present after all, or to be touched: the kernel knows what it is
		return pageSize, nil
	}
	return 0, a.uffdError(r, start, e)
}

// plain is how many of the n bytes at va, in whole pages of which the first counts in any
// case, come before a page that was evicted. None of them can be before the section is over.
func (a *Accessor) plain(va uint64, n int) int {
	for i := pageSize; i < n; i += pageSize {
		if a.s.state(va+uint64(i)) >= pageLimbo {
			return i
		}
	}
	return n
}

// countHandled counts pages that were found absent and brought in. Pages are
// counted when it has succeeded or failed for good, so that what is tried again
// counts once.
func (a *Accessor) countHandled(r *Region, pages int) {
	if a.account != nil {
		a.account.Minor += uint64(pages)
	}
	r.base.faults.Add(uint64(pages))
	a.s.faults.Add(uint64(pages))
	r.base.handled.Add(uint64(pages))
	a.s.handled.Add(uint64(pages))
}

// uffdError is what an errno of UFFDIO_COPY or UFFDIO_ZEROPAGE for the page at va means
// for a request (ioctl_userfaultfd(2)). Other than ErrBusy it counts a page fault that
// was not handled.
func (a *Accessor) uffdError(r *Region, va uint64, e unix.Errno) error {
	if e == unix.EAGAIN {
		a.refused = va
		return ErrBusy // an event about the mappings waits to be read
	}
	r.base.faults.Add(1)
	a.s.faults.Add(1)
	switch e {
	case unix.ENOENT, unix.ESRCH, unix.EINVAL:
		return ErrRemoved // the range is not the mapping that was registered
	case unix.ENOMEM:
		return ErrNoMem
	}
	return ErrFault
}

// waiter bounds repeated tries.
type waiter struct {
	tries int
	since time.Time
}

// tired says whether it was tried so often that an event would have been read.
func (w *waiter) tired() bool { return w.tries >= 50 }

// more waits a little; false when busyLimit is over.
func (w *waiter) more() bool {
	if w.tries == 0 {
		w.since = time.Now()
	}
	w.tries++
	pause(w.tries + 50)
	return time.Since(w.since) < busyLimit
}

// AtomicOp is an atomic operation on a word of 8 bytes.
type AtomicOp uint8

// Atomic operations (IBA 9.4.5).
const (
	// CompareSwap stores swapAdd if the word is compare.
	CompareSwap AtomicOp = iota
	// FetchAdd adds swapAdd.
	FetchAdd
	// StoreWord stores swapAdd (IBA A19, ATOMIC WRITE); there is no result.
	StoreWord
)

// Atomic does op on the word at iova, atomically for the processor too, and returns
// what was there. The address must be a multiple of 8: ErrInvalid. Other errors as
// for Write.
func (a *Accessor) Atomic(r *Region, iova uint64, op AtomicOp, compare, swapAdd uint64) (uint64, error) {
	if r.va(iova)%8 != 0 { // wherever the region is moved to
		return 0, ErrInvalid
	}
	var wait waiter
	for {
		old, done, err := a.tryAtomic(r, iova, op, compare, swapAdd)
		if err != nil {
			if err = a.again(r, err, &wait); err == nil {
				continue
			}
		}
		if done || err != nil {
			return old, a.s.suspectFault(r, iova, 8, true, err)
		}
	}
}

func (a *Accessor) tryAtomic(r *Region, iova uint64, op AtomicOp, compare, swapAdd uint64) (old uint64, done bool, err error) {
	a.enter()
	defer a.exit()
	va := r.va(iova)
	_, present, err := a.run(r, va, 8)
	if err != nil {
		return 0, false, err
	}
	if !present {
		return 0, false, a.bringIn(r, va, 8)
	}
	old, err = guardedAtomic(pointer[atomic.Uint64](va), op, compare, swapAdd)
	return old, true, err
}

func guardedAtomic(w *atomic.Uint64, op AtomicOp, compare, swapAdd uint64) (old uint64, err error) {
	before := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(before)
		if e := recover(); e != nil {
			err = faultError(e)
		}
	}()
	switch op {
	case FetchAdd:
		return w.Add(swapAdd) - swapAdd, nil
	case StoreWord:
		w.Store(swapAdd)
		return 0, nil
	}
	for {
		if old = w.Load(); old != compare || w.CompareAndSwap(compare, swapAdd) {
			return old, nil
		}
	}
}
