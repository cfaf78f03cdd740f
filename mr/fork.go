// SPDX-License-Identifier: Apache-2.0

package mr

// #include "fork.h"
import "C"

import (
	"sync/atomic"
	"time"
	"unsafe"
)

// Children of fork(2): fork.c says what they get, and how. It takes the kernel's event,
// which is for those with CAP_SYS_PTRACE; without it a child has what is in place, and
// the kernel gives it zeros for the rest.

// forkWait is how many pages may still have to be placed in children, about, when fork returns.
const forkWait = 64 << 20 >> pageShift

// markArmed notes that a range is about to be registered with userfaultfd.
func (s *Space) markArmed(p span) {
	C.tv_mark_armed(s.sh, C.uint64_t(p.start), C.uint64_t(p.end))
}

// TellsFork says whether the kernel tells of forks, so that a child finds evicted pages
// without BeforeFork.
func (s *Space) TellsFork() bool { return s.features&uffdFeatureFork != 0 }

// BeforeFork is for a process that is about to fork(2), and what it returns for the
// parent once fork has returned; the C library's handlers of pthread_atfork(3) do both. It
// has nothing to do with programs being started (os/exec, posix_spawn(3)).
//
// The child has to see evicted pages, too. Where the kernel tells of forks they are copied
// then, or read for it later, and only the second half waits: until the child has all, if
// what it lacks is 64 MiB at most. Of more, the child gets what it touches, and the rest as
// time allows: if its parent is killed or leaves by _exit(2) before, what it still lacks
// reads as zeros. Elsewhere, and with a store that only Go can read, everything evicted is
// brought back, and stays until the second half: what cannot be is the error, and zeros in
// the child.
func (s *Space) BeforeFork() (after func(), err error) {
	ev := &s.ev
	if s.TellsFork() && (!ev.ready.Load() || s.sh.reader != 0) {
		return s.afterFork, nil
	}
	ev.mu.Lock()
	if ev.ready.Load() {
		s.setLimits(limits{wake: never, stop: never})
		err = s.bringAllBack()
	}
	return func() {
		if ev.ready.Load() {
			s.enforce()
		}
		ev.mu.Unlock()
	}, err
}

// AfterForks waits until no child lacks a page, or needs this process for one, any more: then the process may end.
func (s *Space) AfterForks() {
	s.settle()
	for s.unplaced().Load() > 0 {
		time.Sleep(50 * time.Microsecond)
	}
}

// unplaced is how many pages children still lack, and one for each that is not left alone yet.
func (s *Space) unplaced() *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&s.sh.unplaced))
}

// afterFork waits until children have what they are to have at once.
func (s *Space) afterFork() {
	s.settle() // the pager takes note of what the child is to get
	for {
		if n := s.unplaced().Load(); n == 0 || n > forkWait {
			return
		}
		time.Sleep(50 * time.Microsecond)
	}
}
