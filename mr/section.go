// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"
	"unsafe"
)

// Accessor is one engine's hand in memory. It is used by one goroutine at a time,
// the holder of the shard's baton.
//
// All touching of region memory happens in sections: between enter and exit the
// states of pages hold, because whoever changes mappings waits for sections to
// end (quiesce here, the function of that name in pager.c). Sections are short:
// one copy, or one ioctl; one that lingers ends at the next access when it is waited for.
type Accessor struct {
	s      *Space
	index  int
	seq    *atomic.Uint32 // of the section: odd while it is open
	bufs   []*stageBuf    // free staging buffers
	spare  int            // how many more may be made
	closed bool
	// blocked is the region of the last ErrSuspended or ErrMajor.
	blocked *Region
	// policy overrides those of regions, unless it is FaultByRegion.
	policy FaultPolicy
	// account, if set, counts the faults of whom the Accessor works for.
	account *Faults
	// wanted is the page that errStored was about, with its word.
	wanted     uint64
	wantedWord uint32
	// rest is the end of what is wanted soon with it, or 0: see ReadOf.
	rest uint64
	// refused is the page that the kernel would not fill when it was last tried, or 0.
	refused uint64
	// patient has it wait for the store, whatever the policy: nobody holds a baton.
	patient bool
	// forced has it bring pages back whatever the budgets: somebody waits for them.
	forced bool
	// open: its section is; lingers: it stays so between accesses. faulted is what
	// debug.SetPanicOnFault said when that began.
	open, lingers, faulted bool
}

const stageBufs = 32 // staging buffers of an Accessor, at most

// NewAccessor makes an Accessor; Close gives it back. There may be 256 at a time;
// more panic, as it is a mistake of the program.
func (s *Space) NewAccessor() *Accessor {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.sections {
		if !s.sections[i] {
			s.sections[i] = true
			return &Accessor{s: s, index: i, spare: stageBufs, policy: FaultByRegion, seq: (*atomic.Uint32)(unsafe.Pointer(&s.sh.section[i].seq))}
		}
	}
	panic("mr: more than 256 accessors")
}

// Close gives the Accessor back. What is still staged may only be dropped then.
func (a *Accessor) Close() {
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	a.s.sections[a.index] = false
	for _, b := range a.bufs {
		_ = b.mem.Close() // nothing is registered there
	}
	a.bufs, a.closed = nil, true
}

func (s *Space) change() *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&s.sh.change)) }

// enter opens a section; it waits while somebody changes what pages are.
func (a *Accessor) enter() {
	if a.open {
		if a.s.change().Load() == 0 {
			return // it has lingered
		}
		a.close()
	}
	for i := 0; ; i++ {
		a.seq.Add(1)
		if a.s.change().Load() == 0 {
			a.open = true
			return
		}
		a.seq.Add(1)
		pause(i)
	}
}

// exit ends what enter has begun.
func (a *Accessor) exit() {
	if !a.lingers {
		a.close()
	}
}

// close closes the section if it is open. Who is about to wait for anything calls it.
func (a *Accessor) close() {
	if a.open {
		a.open = false
		a.seq.Add(1)
	}
}

// Linger has the section stay open between the accesses that follow, until Leave, so that
// each of many small ones need not open it and prepare for faults. Whoever waits for
// sections waits for the access under way at most. Meanwhile the caller does not block, nor
// call what changes regions or windows. Both are called by the same goroutine.
func (a *Accessor) Linger() {
	if !a.lingers {
		a.lingers, a.faulted = true, debug.SetPanicOnFault(true)
	}
}

// Leave ends what Linger has begun, if it has.
func (a *Accessor) Leave() {
	if a.lingers {
		a.lingers = false
		a.close()
		debug.SetPanicOnFault(a.faulted)
	}
}

// pause waits a little, and longer if it is not the first time.
func pause(i int) {
	switch {
	case i < 50:
	case i < 100:
		runtime.Gosched()
	default:
		time.Sleep(20 * time.Microsecond)
	}
}

// quiesce keeps sections from being opened and waits until none is open. The
// function it returns allows them again.
func (s *Space) quiesce() func() {
	s.change().Add(1)
	for i := range s.sh.section {
		seq := (*atomic.Uint32)(unsafe.Pointer(&s.sh.section[i].seq))
		for k := 0; seq.Load()%2 == 1; k++ {
			pause(k)
		}
	}
	evictor := (*atomic.Uint32)(unsafe.Pointer(&s.sh.evictor.seq))
	for k := 0; evictor.Load()%2 == 1; k++ {
		pause(k)
	}
	return func() { s.change().Add(^uint32(0)) }
}

// settle waits until the pager has finished with the message that it is acting on,
// if any. A system call that changed mappings returns when the pager has read of it,
// and what follows here must find it in the page table.
func (s *Space) settle() {
	turn := (*atomic.Uint32)(unsafe.Pointer(&s.sh.turn))
	was := turn.Load()
	for i := 0; was%2 == 1 && turn.Load() == was; i++ {
		pause(i)
	}
}
