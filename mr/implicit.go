// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"fmt"
	"math"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Regions that are not a range of memory: the implicit one, which is all of it, and
// the null region, which is none.

// implicit says whether the attributes ask for an implicit region: on demand, at
// address 0 and of length SIZE_MAX (ibv_reg_mr(3)).
func (a *RegAttr) implicit() bool {
	return a.Addr == 0 && a.Length == math.MaxUint64 && a.Access&OnDemand != 0
}

// checkImplicit is check for an implicit region. Its addresses are the memory's own,
// and it cannot promise huge pages.
func (a *RegAttr) checkImplicit() error {
	switch {
	case a.IOVA != 0:
		return fmt.Errorf("%w: implicit region with iova %#x", ErrInvalid, a.IOVA)
	case a.Pin || a.Device:
		return fmt.Errorf("%w: implicit region to be pinned", ErrInvalid)
	case a.Access&HugeTLB != 0:
		return fmt.Errorf("%w: implicit region of huge pages", ErrInvalid)
	case a.Access&FlushPersistent != 0:
		return fmt.Errorf("%w: persistent flush of an implicit region", ErrInvalid)
	}
	return a.checkRights()
}

// RegisterNull makes a null region (ibv_alloc_null_mr(3)): it can be read and written
// by its own process, at any address; reads give zeros and writes go nowhere. Peers
// have no right to it.
func (t *Table) RegisterNull(pd PD) (*Region, error) {
	r := t.newRegion(RegAttr{PD: pd, Length: math.MaxUint64, Access: LocalWrite})
	r.paging = NullMemory
	s := t.space
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := t.insert(r); err != nil {
		return nil, err
	}
	s.regions[r] = struct{}{}
	return r, nil
}

// living is why a region without memory cannot be used: it was deregistered while a
// request was under way, eliminated, or is suspended.
func (r *Region) living() error {
	return r.bars(r.gates() &^ gateHoles)
}

// userEnd is where addresses of user space end, and below it no hole is left that a
// processor treats otherwise than as unmapped.
var userEnd = func() uint64 {
	if runtime.GOARCH == "amd64" {
		return 1<<47 - pageSize
	}
	return maxVA - pageSize
}()

// runOther is run for regions that are not paged through userfaultfd by themselves.
// Memory of an implicit region may be part of one that is. There the page table says
// what is absent, so that data is placed and not stored; elsewhere, and where it is
// wrong, the page is touched, and the kernel does what it does for any access. So it
// does not matter whether the page table is up to date: a page that is left to the
// kernel and stands as absent is not placed (kernels), and one that is ours and stands
// as present is answered by the pager thread, as a fault of the application is. The
// first page is not touched, since Go takes a fault there for one of its own.
func (a *Accessor) runOther(r *Region, va uint64, n int) (int, bool, error) {
	switch {
	case r.paging == NullMemory:
		return 0, false, ErrAccess
	case r.paging != Implicit:
		return n, true, nil
	case va < pageSize || va >= userEnd || uint64(n) > userEnd-va:
		return 0, false, ErrFault
	}
	done, absent := 0, a.s.absent(va)
	for done = pageSize - int(va&pageMask); done < n && a.s.absent(va+uint64(done)) == absent; {
		done += pageSize
	}
	return min(done, n), !absent, nil
}

// absent says whether a page is known to be absent and, as far as is known, userfaultfd's.
func (s *Space) absent(va uint64) bool {
	if s.uffd < 0 || s.l1(va).Load() == 0 {
		return false
	}
	st := s.state(va)
	return st == pageAbsent || st >= pageLimbo
}

// kernels says whether an errno of UFFDIO_COPY or UFFDIO_ZEROPAGE means, for a page
// of an implicit region, that it is paged by the kernel, if it is there at all.
func (r *Region) kernels(e unix.Errno) bool {
	return r.paging == Implicit && (e == unix.ENOENT || e == unix.ESRCH || e == unix.EINVAL)
}

// resident is how many bytes of the process are in memory (proc(5), statm).
func resident() (uint64, error) {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0, err
	}
	var size, pages uint64
	if _, err := fmt.Sscan(string(b), &size, &pages); err != nil {
		return 0, fmt.Errorf("/proc/self/statm: %w", err)
	}
	return pages << pageShift, nil
}
