// SPDX-License-Identifier: Apache-2.0

package mr

// #include <stdlib.h>
// #include "pager.h"
import "C"

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Space is the process's memory as engines see it: one userfaultfd, one page
// table, one pager thread. The kernel lets a range of memory belong to one
// userfaultfd only, so all devices of a process share one; see Process.
type Space struct {
	opts       Options
	uffd       int // -1: none
	uffdErr    error
	features   uint64 // of the userfaultfd
	watch      int    // the second userfaultfd, see dirty.go; -1: not needed yet
	pager      *C.struct_tv_pager
	sh         *C.struct_tv_shared
	shMem      []byte
	arenaMem   []byte
	wordMem    []byte // the page of the generation word
	wordView   []byte // the same, to be read
	generation uint64 // address of the word in wordView
	hooks      notifiers
	pagemap    int
	pagemapMu  sync.Mutex
	pagemapBuf [leafPages]uint64
	image      span // the executable's own addresses
	goHeap     span // where the Go heap lies and grows

	mu       sync.Mutex // regions and coverage
	regions  map[*Region]struct{}
	armed    coverage // pages registered with userfaultfd
	locked   coverage // pages locked for pinned regions
	watched  coverage // pages whose writes the second userfaultfd notes, see dirty.go
	tracked  map[*Region]struct{}
	sections [C.TV_SECTIONS]bool

	faults, handled, prefetched atomic.Uint64
	limit                       atomic.Uint64 // the process's budget in bytes; 0: none

	updateMu sync.Mutex // one change of a suspended region at a time; before mu
	tellMu   sync.Mutex // before nothing but what OnRegion's functions lock
	told     []*func(RegionEvent)

	freeSlots []int // of sh.suspended; guarded by mu

	ev      evictor
	orphans coverage // armed for evicted pages of regions that are gone; guarded by mu

	fetchDelay atomic.Int64 // see FetchDelay; 0: not known yet

	advised  prefetcher // for the application
	asked    prefetcher // for peers
	replacer *Accessor  // made at the first Replace; used with updateMu held
}

// Options of a Space.
type Options struct {
	// NoUserFault leaves all paging to the kernel.
	NoUserFault bool
	// UserModeOnly allows a userfaultfd without the privilege to answer faults in
	// system calls: a read(2) or write(2) of the application on an absent page of
	// a region then fails with EFAULT. For programs that know that they never
	// hand region memory to the kernel.
	UserModeOnly bool
	// Clock is the time, in ns, by which stores are found fast or slow, see
	// Space.FetchDelay; nil: the monotonic clock. It is called by many goroutines.
	Clock func() int64

	deafToFork bool // for tests: as without the privilege to hear of forks
}

var (
	processOnce sync.Once
	process     *Space
	processOpts Options
)

// Configure sets the options of the Space that Process starts. It must come
// before the first call of Process.
func Configure(o Options) { processOpts = o }

// Process is the Space of this process, started at the first call. It never
// fails: without userfaultfd every region is paged by the kernel, and UserFault
// says why. It is the one thing in this package that exists once a process, as
// the address space does.
func Process() *Space {
	processOnce.Do(func() {
		var err error
		if process, err = NewSpace(processOpts); err != nil {
			panic(err) // no memory for the page table
		}
	})
	return process
}

const arenaBytes = 1 << 30 // of address space; leaves for about 1 TiB of touched memory

// NewSpace starts a Space of its own, for tests. Close ends it.
func NewSpace(o Options) (*Space, error) {
	if o.Clock == nil {
		start := time.Now()
		o.Clock = func() int64 { return int64(time.Since(start)) }
	}
	s := &Space{opts: o, uffd: -1, watch: -1, pagemap: -1, regions: map[*Region]struct{}{}, tracked: map[*Region]struct{}{}}
	var err error
	mmap := func(n int) []byte {
		if err != nil {
			return nil
		}
		var b []byte
		b, err = unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
		return b
	}
	s.shMem = mmap(int(unsafe.Sizeof(C.struct_tv_shared{})))
	s.arenaMem = mmap(arenaBytes)
	if err != nil {
		if s.shMem != nil {
			_ = unix.Munmap(s.shMem)
		}
		return nil, fmt.Errorf("page table: %w", err)
	}
	s.sh = (*C.struct_tv_shared)(unsafe.Pointer(unsafe.SliceData(s.shMem)))
	s.sh.arena = C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(s.arenaMem))))
	s.sh.arena_size = arenaBytes
	s.sh.arrived = 1<<payloadShift | pagePresent
	s.setLimits(limits{wake: never, stop: never})
	s.sh.rouse_fd, s.sh.ask_fd = -1, -1
	if err := s.openGeneration(); err != nil {
		_, _ = unix.Munmap(s.shMem), unix.Munmap(s.arenaMem)
		return nil, err
	}
	var a, b C.uint64_t
	C.tv_image(&a, &b)
	s.image = span{uint64(a), uint64(b)}
	s.goHeap = goHeapSpan()
	if s.uffdErr = s.startPager(); s.uffdErr != nil {
		s.closeFDs()
	}
	return s, nil
}

func (s *Space) startPager() (err error) {
	if s.opts.NoUserFault {
		return fmt.Errorf("userfaultfd turned off")
	}
	if os.Getpagesize() != pageSize {
		return fmt.Errorf("pages of %d bytes: only %d are supported", os.Getpagesize(), pageSize)
	}
	if s.pagemap, err = unix.Open("/proc/self/pagemap", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return fmt.Errorf("open /proc/self/pagemap: %w", err)
	}
	if s.uffd, s.features, err = openUffd(s.opts); err != nil {
		return err
	}
	var e C.int
	if s.pager = C.tv_pager_start(C.int(s.uffd), s.sh, &e); s.pager == nil {
		return fmt.Errorf("start the pager thread: %w", unix.Errno(e))
	}
	return nil
}

func (s *Space) closeFDs() {
	for _, fd := range []int{s.uffd, s.watch, s.pagemap} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	s.uffd, s.watch, s.pagemap = -1, -1, -1
}

// UserFault is nil if regions can be paged through userfaultfd, else what is
// missing and what to do about it.
func (s *Space) UserFault() error { return s.uffdErr }

// Close ends a Space that NewSpace made; its Accessors are not used any more, nor is
// anything else of it. What was evicted is brought back; an error that says that content
// was lost comes when all is closed. ErrInvalid if it still has regions, ErrClosed if it
// was closed before.
func (s *Space) Close() error {
	if err := s.closable(); err != nil {
		return err
	}
	s.releaseNotifiers()
	lost := s.closeEviction()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pager != nil {
		C.tv_pager_stop(s.pager)
		s.pager = nil
	}
	if at := uint64(s.sh.airlock); at != 0 {
		// A child of fork may have the descriptor, too: to unmap what is registered would
		// wait for somebody to read of it.
		s.unregister(at, at+uint64(len(s.ev.victims))*pageSize)
	}
	s.closeFDs()
	s.unmapEviction()
	s.closeGeneration()
	if s.hooks.wake != nil {
		_ = s.hooks.wake.Close()
	}
	for _, m := range [][]byte{s.shMem, s.arenaMem} {
		if err := unix.Munmap(m); err != nil {
			return err
		}
	}
	s.sh = nil
	return lost
}

func (s *Space) closable() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.sh == nil:
		return ErrClosed
	case len(s.regions) > 0:
		return fmt.Errorf("%w: %d regions are still registered", ErrInvalid, len(s.regions))
	}
	return nil
}

// Stats are the page events of all regions of the process so far, those of system
// calls that have returned included.
func (s *Space) Stats() Counters {
	s.settle()
	return Counters{
		PageFaults:        s.faults.Load(),
		PageFaultsHandled: s.handled.Load(),
		PagePrefetch:      s.prefetched.Load(),
		PageInvalidations: (*atomic.Uint64)(unsafe.Pointer(&s.sh.invalidations)).Load(),
		AppFaults:         (*atomic.Uint64)(unsafe.Pointer(&s.sh.app_faults)).Load(),
	}
}

// goHeapSpan is where the Go heap lies and grows. The runtime reserves arenas
// upwards from one base (0xc000000000, or a random one below 2^46 since Go 1.26),
// far from where the kernel puts mappings; an object tells where the base is about.
func goHeapSpan() span {
	p := new([64]byte)
	at := uint64(uintptr(unsafe.Pointer(p)))
	runtime.KeepAlive(p)
	const below, above = 64 << 30, 448 << 30
	return span{at - min(at, below), at + above}
}

// ordinary says whether a range holds memory of the Go heap or the executable's
// own data, whose paging must be left alone: the runtime's own threads would wait
// for the pager at places where they must not.
func (s *Space) ordinary(start, end uint64) bool {
	overlaps := func(o span) bool { return start < o.end && o.start < end }
	return overlaps(s.image) || overlaps(s.goHeap)
}
