// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Advice is what ibv_advise_mr(3) can ask for, with the values of enum
// ib_uverbs_advise_mr_advice.
type Advice uint8

const (
	// Prefetch makes pages present, for reading.
	Prefetch Advice = iota
	// PrefetchWrite makes pages present and writable.
	PrefetchWrite
	// PrefetchNoFault takes notice of pages that are present, and brings none in.
	PrefetchNoFault
)

// Of linux/mman.h, madvise(2); since Linux 5.14.
const (
	madvPopulateRead  = 22
	madvPopulateWrite = 23
)

// Prefetch does for n bytes at iova of a region what an advice says; that they lie in
// it was checked. It may block for as long as the kernel takes to bring pages in.
// PagePrefetch counts the pages that were absent. Errors: ErrKey when the region is
// deregistered meanwhile, ErrRemoved and ErrFault for what is not mapped (or not for
// writing), ErrBusy, ErrNoMem.
func (s *Space) Prefetch(r *Region, iova, n uint64, adv Advice) error {
	return s.advised.prefetch(s, r, iova, n, adv)
}

// PrefetchForPeer is Prefetch as a peer asks for it, which keeps nobody in this process
// from a Prefetch of its own. PagePrefetch counts these pages, too.
func (s *Space) PrefetchForPeer(r *Region, iova, n uint64) error {
	return s.asked.prefetch(s, r, iova, n, Prefetch)
}

// prefetcher brings in pages for one kind of those who ask for it, one at a time.
type prefetcher struct {
	mu sync.Mutex
	a  *Accessor // made at the first prefetch; used with mu held
}

func (p *prefetcher) prefetch(s *Space, r *Region, iova, n uint64, adv Advice) error {
	if r.paging == NullMemory || n == 0 {
		return r.living()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.a == nil {
		p.a = s.NewAccessor()
		p.a.patient = true
	}
	va := r.va(iova)
	if r.paging == Implicit && (va < pageSize || va >= userEnd || n > userEnd-va) {
		return ErrFault
	}
	// Addresses of pages as requests count: the region may be moved meanwhile.
	start := iova - va&pageMask
	end := start + (va&pageMask+n+pageMask)&^pageMask
	var wait waiter
	for start != end {
		done, err := p.a.prefetch(r, start, min(end-start, leafBytes-r.va(start)%leafBytes), adv)
		if err != nil {
			if err = p.a.again(r, err, &wait); err != nil {
				return err
			}
			continue
		}
		start, wait = start+done, waiter{}
	}
	return nil
}

// prefetch does so for the first pages of a range, and says how many bytes these are.
func (a *Accessor) prefetch(r *Region, iova, length uint64, adv Advice) (uint64, error) {
	start, n, present, err := a.prefetchAbsent(r, iova, int(length), adv)
	if err == nil && adv == PrefetchNoFault && r.paging != UserFault {
		err = mapped(span{start, start + uint64(n)})
	}
	if err != nil || !present || adv == PrefetchNoFault {
		return uint64(n), err
	}
	// A page that is present may still be the kernel's zero page, or shared since a
	// fork, or not follow userfaultfd. No section is open for that: no data is touched.
	a.close()
	absent := a.countAbsent(r, start, n)
	if err := populate(start, n, adv == PrefetchWrite); err != nil {
		return 0, err
	}
	a.countPrefetched(r, absent)
	return uint64(n), nil
}

// prefetchAbsent brings in the pages at the start of a range that are known to be
// absent, a batch of them at most; or says where there are how many bytes present.
func (a *Accessor) prefetchAbsent(r *Region, iova uint64, n int, adv Advice) (start uint64, done int, present bool, err error) {
	a.enter()
	defer a.exit()
	start = r.va(iova)
	n, present, err = a.run(r, start, n)
	if err == nil && !present && adv != PrefetchNoFault {
		n, err = a.prefetchPages(r, start, min(n, stagePages*pageSize), adv)
	}
	return start, n, present, err
}

// prefetchPages brings absent pages in, and says how many bytes.
func (a *Accessor) prefetchPages(r *Region, start uint64, n int, adv Advice) (int, error) {
	switch w := a.s.word(start); w & stateMask {
	case pageLimbo:
		done, err := a.recall(start, n)
		a.countPrefetched(r, done>>pageShift)
		return done, err
	case pageStored:
		a.wanted, a.wantedWord = start, w
		return 0, errStored
	}
	if a.s.full() {
		return 0, ErrBusy
	}
	n = a.plain(start, n)
	var src unsafe.Pointer // none: the kernel's zero page, which is there to be read
	if adv == PrefetchWrite {
		b := a.buffer()
		if b == nil {
			return 0, ErrNoMem
		}
		defer func() { a.bufs = append(a.bufs, b) }()
		clear(b.data[:n])
		src = unsafe.Pointer(&b.data[0])
	}
	done, e := a.s.bring(start, src, n)
	switch {
	case e == 0:
		a.countPrefetched(r, done>>pageShift)
	case e == unix.EEXIST || r.kernels(e):
		a.s.found(start, pageSize) // the next look sees it
		return 0, nil
	case e == unix.EAGAIN:
		a.refused = start
		return 0, ErrBusy
	case e == unix.ENOMEM:
		return 0, ErrNoMem
	default:
		return 0, ErrRemoved
	}
	a.s.setPresent(start, done)
	return done, nil
}

func (a *Accessor) countPrefetched(r *Region, pages int) {
	r.prefetched.Add(uint64(pages))
	a.s.prefetched.Add(uint64(pages))
}

// countAbsent is how many pages of a range of 2 MiB at most are not in memory, by
// mincore(2). Of a region that userfaultfd pages none is: those were brought in.
func (a *Accessor) countAbsent(r *Region, start uint64, n int) (absent int) {
	if r.paging == UserFault {
		return 0
	}
	var vec [leafPages]byte
	if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(start), uintptr(n), uintptr(unsafe.Pointer(&vec))); e != 0 {
		return 0
	}
	for _, b := range vec[:n>>pageShift] {
		absent += 1 - int(b&1)
	}
	return absent
}

// populate makes pages present, and writable, as an access would. Kernels that cannot
// do so leave them: an advice promises nothing.
func populate(start uint64, n int, write bool) error {
	how := uintptr(madvPopulateRead)
	if write {
		how = madvPopulateWrite
	}
	for {
		_, _, e := unix.Syscall(unix.SYS_MADVISE, uintptr(start), uintptr(n), how)
		switch e {
		case 0:
			return nil
		case unix.EINTR, unix.EAGAIN:
			continue
		case unix.EINVAL:
			if _, _, e := unix.Syscall(unix.SYS_MADVISE, uintptr(start), 0, how); e != 0 {
				return nil // unknown to this kernel
			}
		case unix.ENOMEM:
			if mapped(span{start, start + uint64(n)}) != nil {
				return ErrRemoved
			}
			return ErrNoMem
		}
		return ErrFault
	}
}
