// SPDX-License-Identifier: Apache-2.0

package mr

// #include <stdlib.h>
// #include "evict.h"
// #include "store.h"
import "C"

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Pages of regions that userfaultfd pages can be evicted: moved into the limbo, which is
// memory of this package, where they still are if they are wanted back soon, and from
// there to a Store. The pager thread brings them back for the application, an Accessor
// for requests. evict.c says how a page goes; limbo.go keeps the slots of limbo and store,
// budget.go decides who goes, fetch.go gets content back from the store.
//
// Only private anonymous memory is evicted. Shared memory and files are the kernel's to
// page out.

// Level is how far away content is.
type Level uint8

const (
	// Limbo: the page was moved away, within memory.
	Limbo Level = iota
	// Stored: the content is in the store.
	Stored
)

// evictor is a Space's means of evicting.
type evictor struct {
	// mu is held by who decides what is evicted, for a store's writes too. Before Space.mu.
	mu sync.Mutex
	// hold is held while pages are on their way out: who must not have pages evicted
	// takes it. After mu and Space.mu.
	hold sync.Mutex

	ready   atomic.Bool
	closed  bool
	limboFD int
	mem     [][]byte // to be unmapped
	a       *Accessor
	victims *[C.TV_BATCH]C.struct_tv_victim // in C memory
	rouse   *os.File                        // eventfd: the evictor has something to do
	asked   *os.File                        // pipe: addresses of pages that the pager cannot read
	asking  *os.File                        // its other end
	done    sync.WaitGroup

	limbo slots
	store storage

	stopped  atomic.Pointer[error]
	toldMu   sync.Mutex
	told     []*func(error)
	budgets  budgets
	fetching fetching

	evicted atomic.Uint64
	scanned [64]scanned // what scan fills in
}

const limboSlack = 64 << 20 // more of limbo's address space than there is memory

// openEviction makes what eviction needs, once. It is called with ev.mu held.
func (s *Space) openEviction() error {
	ev := &s.ev
	switch {
	case ev.ready.Load():
		return nil
	case ev.closed:
		return ErrClosed
	case s.uffd < 0:
		return fmt.Errorf("%w: %w", ErrNotSupported, s.uffdErr)
	case s.features&uffdFeatureMove == 0:
		return fmt.Errorf("%w: the kernel's userfaultfd cannot move pages (UFFDIO_MOVE, Linux 6.8)", ErrNotSupported)
	}
	err := s.mapLimbo()
	if err == nil {
		err = s.store().open(s)
	}
	if err == nil {
		err = s.startEvictor()
	}
	if err != nil {
		s.stopEvictor()
		// The store that was chosen stays so, for when there is room for the rest.
		st := s.store().st
		s.store().st = nil
		s.unmapEviction()
		s.store().st = st
		ev.closed = false
		return fmt.Errorf("pages cannot be evicted: %w", err)
	}
	ev.ready.Store(true)
	return nil
}

func (s *Space) store() *storage { return &s.ev.store }

// reserve maps address space that takes memory when it is used: n bytes, or less, as long
// as it is not less than least.
func (s *Space) reserve(n, least uint64) (mem []byte, err error) {
	for ; n >= least; n /= 2 {
		mem, err = unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
		if err == nil {
			s.ev.mem = append(s.ev.mem, mem)
			return mem, nil
		}
	}
	return nil, fmt.Errorf("map %d bytes: %w", least, err)
}

func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

// mapLimbo makes limbo and airlock, and the tables of who is where.
func (s *Space) mapLimbo() error {
	ev := &s.ev
	ev.limboFD = -1
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return err
	}
	memory := (info.Totalram+info.Totalswap)*uint64(info.Unit) + limboSlack
	limbo, err := s.reserve(min(memory&^(leafBytes-1), C.TV_STORE_SLOTS*pageSize), limboSlack)
	if err != nil {
		return err
	}
	owners, err := s.reserve(uint64(len(limbo)>>pageShift*8), uint64(len(limbo)>>pageShift*8))
	if err != nil {
		return err
	}
	stored, err := s.reserve(C.TV_STORE_SLOTS*8, 1<<20)
	if err != nil {
		return err
	}
	held, err := s.reserve(uint64(len(stored)/4), uint64(len(stored)/4))
	if err != nil {
		return err
	}
	airlock, err := s.reserve(C.TV_BATCH*pageSize, C.TV_BATCH*pageSize)
	if err != nil {
		return err
	}
	for _, m := range [][]byte{limbo, airlock} {
		// A child gets no pages of ours; and shared since fork they could not be moved.
		if err := unix.Madvise(m, unix.MADV_DONTFORK); err != nil {
			return err
		}
		_ = unix.Madvise(m, unix.MADV_NOHUGEPAGE) // a kernel that has none
	}
	if ev.limboFD, err = openLimboUffd(); err != nil {
		return err
	}
	a := uffdRegisterArg{r: uffdRange{addressOf(limbo), uint64(len(limbo))}, mode: uffdRegisterMiss}
	if err := uffdIoctl(ev.limboFD, uffdioRegister, unsafe.Pointer(&a)); err != nil {
		return fmt.Errorf("register the limbo with userfaultfd: %w", err)
	}
	a = uffdRegisterArg{r: uffdRange{addressOf(airlock), uint64(len(airlock))}, mode: uffdRegisterMiss}
	if err := uffdIoctl(s.uffd, uffdioRegister, unsafe.Pointer(&a)); err != nil {
		return fmt.Errorf("register the airlock with userfaultfd: %w", err)
	}
	ev.victims = (*[C.TV_BATCH]C.struct_tv_victim)(C.calloc(C.TV_BATCH, C.sizeof_struct_tv_victim))
	ev.limbo = slots{owner: atomics(owners)}
	ev.store.owner, ev.store.held = atomics(stored), held
	sh := s.sh
	sh.uffd, sh.limbo_fd = C.int32_t(s.uffd), C.int32_t(ev.limboFD)
	sh.airlock, sh.limbo, sh.limbo_owner = C.uint64_t(addressOf(airlock)), C.uint64_t(addressOf(limbo)), C.uint64_t(addressOf(owners))
	sh.store_owner, sh.store_held = C.uint64_t(addressOf(stored)), C.uint64_t(addressOf(held))
	return nil
}

func atomics(mem []byte) []atomic.Uint64 {
	return unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(mem))), len(mem)/8)
}

// openLimboUffd gives the userfaultfd of the limbo: no events, and a signal, or EFAULT,
// for who touches what is not there. It needs no privilege.
func openLimboUffd() (int, error) {
	const flags = unix.O_CLOEXEC | unix.O_NONBLOCK
	fd, err := userfaultfd(flags)
	if err != nil {
		if fd, err = userfaultfd(flags | uffdUserModeOnly); err != nil {
			return -1, fmt.Errorf("another userfaultfd: %w", err)
		}
	}
	a := uffdAPIArg{api: uffdAPI, features: uffdFeatureSigbus}
	if err := uffdIoctl(fd, uffdioAPI, unsafe.Pointer(&a)); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("userfaultfd with signals: %w", err)
	}
	return fd, nil
}

// startEvictor starts the goroutines.
func (s *Space) startEvictor() error {
	ev := &s.ev
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	ev.rouse = os.NewFile(uintptr(fd), "evictor")
	s.sh.rouse_fd = C.int32_t(fd)
	if ev.asked, ev.asking, err = os.Pipe(); err != nil {
		return fmt.Errorf("pipe: %w", err)
	}
	// The pager must not wait for us; os.Pipe's ends do not block as long as nobody asks
	// for their descriptors.
	c, err := ev.asking.SyscallConn()
	if err != nil {
		return err
	}
	if err := c.Control(func(fd uintptr) { s.sh.ask_fd = C.int32_t(fd) }); err != nil {
		return err
	}
	ev.a = s.NewAccessor()
	s.startFetching()
	ev.done.Add(2)
	go s.evictInBackground()
	go s.answerPager()
	return nil
}

// stopEvictor ends the goroutines. It is called with ev.mu held, and gives it back for
// that time: they may want it before they end.
func (s *Space) stopEvictor() {
	ev := &s.ev
	ev.closed = true
	for _, f := range []*os.File{ev.rouse, ev.asked, ev.asking} {
		if f != nil {
			_ = f.Close()
		}
	}
	ev.mu.Unlock()
	ev.done.Wait()
	s.stopFetching()
	ev.mu.Lock()
	ev.rouse, ev.asked, ev.asking = nil, nil, nil
	if ev.a != nil {
		ev.a.Close()
		ev.a = nil
	}
}

// unmapEviction gives back the memory, when no page is evicted any more.
func (s *Space) unmapEviction() {
	ev := &s.ev
	ev.ready.Store(false)
	if ev.limboFD > 0 {
		unix.Close(ev.limboFD)
	}
	ev.limboFD = 0
	for _, m := range ev.mem {
		_ = unix.Munmap(m)
	}
	ev.mem = nil
	C.free(unsafe.Pointer(ev.victims))
	ev.victims = nil
	ev.store.close()
}

// closeEviction is what Close does about eviction as long as the pager is there: all
// content is brought back.
func (s *Space) closeEviction() error {
	ev := &s.ev
	ev.mu.Lock()
	defer ev.mu.Unlock()
	if !ev.ready.Load() {
		ev.closed = true
		return nil
	}
	s.setLimits(limits{wake: never, stop: never})
	err := s.bringAllBack()
	s.stopEvictor()
	return err
}

// Evict takes the pages of n bytes at iova of a region that are present, and for Stored
// those in limbo too, out of memory, to a level: how many have gone there. Pages that are
// in use stay, those that are pinned or cannot be moved, and those of memory that is not
// private anonymous memory. Errors: ErrRange, ErrNotSupported, ErrClosed when the region was
// deregistered, ErrBusy when a notifier's hook calls it, and what the store says.
func (s *Space) Evict(r *Region, iova, n uint64, to Level) (pages int, err error) {
	if to > Stored {
		return 0, fmt.Errorf("%w: level %d", ErrInvalid, to)
	}
	if !r.contains(iova, n) {
		return 0, ErrRange
	}
	if s.inHook() {
		return 0, ErrBusy // whoever evicts waits for hooks
	}
	ev := &s.ev
	ev.mu.Lock()
	defer ev.mu.Unlock()
	if err := s.openEviction(); err != nil {
		return 0, err
	}
	if r.gates()&gateDead != 0 {
		return 0, ErrClosed
	}
	if r.paging != UserFault || n == 0 {
		return 0, nil
	}
	if to == Stored {
		if err := s.EvictionStopped(); err != nil {
			return 0, err
		}
	}
	va := r.va(iova)
	p := span{va &^ pageMask, (va + n + pageMask) &^ pageMask}
	s.look(p)
	// Twice: what is shared since a fork is made the process's own, and tried again.
	for range 2 {
		h := hunt{at: p.start}
		for {
			vs := s.victims([]span{p}, &h, C.TV_BATCH, true)
			if vs == 0 {
				break
			}
			pages += s.evictBatch(vs)
		}
	}
	if to == Stored {
		pages, err = s.storeLimbo([]span{p}, len(ev.limbo.owner))
	}
	return pages, err
}

// look asks the kernel about pages of a range of which nothing is known.
func (s *Space) look(p span) {
	a := s.ev.a
	for va := p.start; va < p.end; va = (va/leafBytes + 1) * leafBytes {
		a.enter()
		end := min((va/leafBytes+1)*leafBytes, p.end)
		for at := va; at < end; at += pageSize {
			s.word(at) // which asks for all of the leaf
		}
		a.exit()
	}
}

// evictBatch moves the first n of ev.victims into limbo, and says how many have gone.
func (s *Space) evictBatch(n int) (gone int) {
	ev := &s.ev
	vs := ev.victims[:n]
	for len(vs) > 0 {
		slot, k := ev.limbo.take(s, len(vs))
		if k == 0 {
			return gone
		}
		for i := range vs[:k] {
			vs[i].slot = C.uint32_t(slot + i)
		}
		gone += s.moveOut(vs[:k])
		vs = vs[k:]
	}
	return gone
}

// moveOut evicts pages to slots that have been taken for them.
func (s *Space) moveOut(vs []C.struct_tv_victim) (gone int) {
	runs(vs, func(run []C.struct_tv_victim) {
		s.await(s.announce(KindEvict, uint64(run[0].va), uint64(run[len(run)-1].va)+pageSize))
	})
	for i := 0; ; i++ {
		s.ev.hold.Lock()
		e := C.int(0)
		if vs = s.stillArmed(vs); len(vs) > 0 {
			e = C.tv_evict(s.sh, &vs[0], C.uint32_t(len(vs)))
		}
		s.ev.hold.Unlock()
		if e == 0 {
			break
		}
		pause(i) // mappings are being changed
	}
	runs(vs, func(run []C.struct_tv_victim) {
		n := 0
		for _, v := range run {
			switch v.result {
			case C.TV_EVICTED:
				n++
			case C.TV_SHARED:
				// Written to as by the application, with its own content: the next try finds
				// it to be the process's own, unless somebody has pinned it.
				_ = populate(uint64(v.va), pageSize, true)
			}
		}
		if n > 0 {
			gone += n
			s.bumpGeneration(KindEvict, uint64(run[0].va), uint64(run[len(run)-1].va)+pageSize, 0)
		}
	})
	s.ev.evicted.Add(uint64(gone))
	return gone
}

// stillArmed takes those pages out that no region wants any more, since they were looked
// for: what is evicted of them nobody would bring back. It is called with ev.hold held,
// which letGo takes before such pages are given back to the kernel.
func (s *Space) stillArmed(vs []C.struct_tv_victim) []C.struct_tv_victim {
	n := 0
	for _, v := range vs {
		if s.armed.has(uint64(v.va)) {
			vs[n] = v
			n++
		}
	}
	return vs[:n]
}

// runs calls f for each run of pages in a row.
func runs(vs []C.struct_tv_victim, f func([]C.struct_tv_victim)) {
	for len(vs) > 0 {
		n := 1
		for n < len(vs) && vs[n].va == vs[n-1].va+pageSize {
			n++
		}
		f(vs[:n])
		vs = vs[n:]
	}
}

// SetStore says where content goes that limbo has no room for; what is there by itself is
// NewFileStore in the directory for temporary files. The Space closes it. Only before the
// first eviction, and not by a notifier's hook: ErrBusy.
//
// A store that is Go code is read by a goroutine when the application touches a page that
// is in it. A goroutine that does so keeps the garbage collector waiting, and if that has
// stopped the other already both wait for ever: touch what may be evicted to such a store
// from C, or Prefetch it before.
func (s *Space) SetStore(st Store) error {
	if st == nil {
		return fmt.Errorf("%w: no store", ErrInvalid)
	}
	if s.inHook() {
		return ErrBusy // whoever evicts waits for hooks
	}
	s.ev.mu.Lock()
	defer s.ev.mu.Unlock()
	if s.ev.ready.Load() || s.ev.closed {
		return fmt.Errorf("%w: pages may have been evicted", ErrBusy)
	}
	old := s.ev.store.st
	s.ev.store.st = st
	if old != nil {
		return old.Close()
	}
	return nil
}

// EvictionStopped is why no more pages go to the store: it failed to take one. What is in
// limbo stays there, and memory grows beyond its budgets. nil: it has not.
func (s *Space) EvictionStopped() error {
	if e := s.ev.stopped.Load(); e != nil {
		return *e
	}
	return nil
}

// OnEvictionStopped has f called when eviction stops, with what EvictionStopped says from
// then on. f must not call anything of the Space.
func (s *Space) OnEvictionStopped(f func(error)) (stop func()) {
	ev := &s.ev
	ev.toldMu.Lock()
	defer ev.toldMu.Unlock()
	p := &f
	ev.told = append(ev.told, p)
	return func() {
		ev.toldMu.Lock()
		defer ev.toldMu.Unlock()
		for i, q := range ev.told {
			if q == p {
				ev.told = append(ev.told[:i:i], ev.told[i+1:]...)
				return
			}
		}
	}
}

// stopEviction is called when the store failed.
func (s *Space) stopEviction(err error) {
	err = fmt.Errorf("eviction has stopped: %w", err)
	if !s.ev.stopped.CompareAndSwap(nil, &err) {
		return
	}
	s.ev.toldMu.Lock()
	defer s.ev.toldMu.Unlock()
	for _, f := range s.ev.told {
		(*f)(err)
	}
}
