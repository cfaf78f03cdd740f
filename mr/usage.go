// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Usage says where the pages of a region, or of all memory with regions, are, and what
// became of them. Invalidations, evictions and the application's faults are counted for
// each 2 MiB of addresses, so regions that share such a piece share these numbers.
type Usage struct {
	Size    uint64 `json:"size"`    // bytes
	Present uint64 `json:"present"` // bytes in memory, in whole pages, as mincore(2) says
	Limbo   uint64 `json:"limbo"`   // bytes evicted, of which the content is still in memory
	Stored  uint64 `json:"stored"`  // bytes evicted to the store
	Dirty   uint64 `json:"dirty"`   // bytes written since Dirty cleared them; 0 if that is not tracked

	// Pages that requests found absent: filled or brought back from limbo, and brought
	// back from the store.
	FaultsMinor uint64 `json:"faults_minor"`
	FaultsMajor uint64 `json:"faults_major"`
	// How many UFFDIO_COPYs made arriving data pages that were absent. Neighbours of one
	// super-frame go together, so there are about as many as super-frames.
	Placements uint64 `json:"placements"`
	// The same of the application's own threads.
	AppFaultsMinor uint64 `json:"app_faults_minor"`
	AppFaultsMajor uint64 `json:"app_faults_major"`
	AppFaultNs     uint64 `json:"app_fault_ns"`  // time that the application's threads waited
	FaultNs        uint64 `json:"fault_ns"`      // time that requests spent on major faults
	RNRs           uint64 `json:"rnrs"`          // asked of peers because of a page, or a suspension
	Evictions      uint64 `json:"evictions"`     // pages that were evicted
	Invalidations  uint64 `json:"invalidations"` // pages that left by munmap, MADV_DONTNEED and the like
	Prefetches     uint64 `json:"prefetches"`    // pages brought in because somebody asked beforehand
	Budget         uint64 `json:"budget"`        // bytes that may be in memory; 0: any number
}

// Residency says where the pages of one part of a region are, in bytes. What is in none
// of the others is absent.
type Residency struct {
	Size     uint64 `json:"size"`
	Present  uint64 `json:"present,omitempty"`
	Limbo    uint64 `json:"limbo,omitempty"`
	Stored   uint64 `json:"stored,omitempty"`
	Poisoned uint64 `json:"poisoned,omitempty"`
}

// Usage says where the region's pages are, and what became of them. It looks at each
// page: some milliseconds a GiB.
func (r *Region) Usage() (Usage, error) {
	s := r.table.space
	u := Usage{Size: r.attr.Length, Budget: r.limit.Load()}
	r.countRequests(&u)
	if !r.ownMemory() {
		n, err := r.Present()
		u.Present = n
		return u, err
	}
	s.settle()
	s.mu.Lock()
	pages := r.pages
	u.Dirty = s.dirtyBytes(r)
	s.mu.Unlock()
	return u, s.countPages(pages, &u)
}

// Usage is that of all regions of the process; pages that several have are counted once.
// Implicit regions count by what requests did to them only.
func (s *Space) Usage() (Usage, error) {
	u := Usage{Budget: s.limit.Load()}
	err := s.usageOf(func(*Region) bool { return true }, &u)
	return u, err
}

// Usage is that of all regions of a protection domain, as Space.Usage.
func (t *Table) Usage(pd PD) (Usage, error) {
	u := Usage{Budget: t.budget(pd)}
	err := t.space.usageOf(func(r *Region) bool { return r.table == t && r.PD() == pd }, &u)
	return u, err
}

func (s *Space) usageOf(some func(*Region) bool, u *Usage) error {
	s.settle()
	s.mu.Lock()
	var all coverage
	for r := range s.regions {
		if !some(r) {
			continue
		}
		r.countRequests(u)
		if r.base == r && r.ownMemory() {
			all.add(r.pages.start, r.pages.end)
			u.Dirty += s.dirtyBytes(r)
		}
	}
	s.mu.Unlock()
	for _, c := range all.segs {
		if c.n == 0 {
			continue
		}
		u.Size += c.end - c.start
		if err := s.countPages(c.span, u); err != nil {
			return err
		}
	}
	return nil
}

// Map says where the region's pages are, for so many parts of about the same length, one
// a page at most; nil for a region without memory of its own.
func (r *Region) Map(parts int) []Residency {
	s := r.table.space
	if !r.ownMemory() || parts <= 0 {
		return nil
	}
	s.settle()
	s.mu.Lock()
	pages := r.pages
	s.mu.Unlock()
	n := (pages.end - pages.start) >> pageShift
	out := make([]Residency, min(uint64(parts), n))
	var buf [leafPages]byte
	at := pages.start
	for i := range out {
		end := pages.start + n*uint64(i+1)/uint64(len(out))<<pageShift
		if err := s.residency(span{at, end}, &buf, &out[i], nil); err != nil {
			return nil
		}
		at = end
	}
	return out
}

// ownMemory says whether the region is a range of memory.
func (r *Region) ownMemory() bool { return r.paging != Implicit && r.paging != NullMemory }

// countRequests adds what requests did to the region.
func (r *Region) countRequests(u *Usage) {
	major := r.major.Load()
	u.FaultsMajor += major
	u.FaultsMinor += r.handled.Load() - min(major, r.handled.Load())
	u.FaultNs += r.faultNs.Load()
	u.RNRs += r.rnrs.Load()
	u.Placements += r.placements.Load()
	u.Prefetches += r.prefetched.Load()
}

// countPages adds where the pages of a range are, and what became of them.
func (s *Space) countPages(pages span, u *Usage) error {
	var buf [leafPages]byte
	var at Residency
	err := s.residency(pages, &buf, &at, func(l *leaf) {
		u.AppFaultsMinor += uint64(l.appMinor.Load())
		u.AppFaultsMajor += uint64(l.appMajor.Load())
		u.AppFaultNs += l.appNs.Load()
		u.Evictions += uint64(l.evictions.Load())
		u.Invalidations += uint64(l.lost.Load())
	})
	u.Present += at.Present
	u.Limbo += at.Limbo
	u.Stored += at.Stored
	return err
}

// residency adds where the pages of a range are, leaf by leaf, each of which it shows to
// see. What is unmapped is absent.
func (s *Space) residency(pages span, buf *[leafPages]byte, to *Residency, see func(*leaf)) error {
	to.Size += pages.end - pages.start
	for va := pages.start; va < pages.end; {
		end := min((va/leafBytes+1)*leafBytes, pages.end)
		var l *leaf
		if sl := s.slot(va); sl != nil {
			if p := sl.Load(); p != 0 && p != goneLeaf {
				l = pointer[leaf](p)
			}
		}
		if l != nil && see != nil {
			see(l)
		}
		vec := buf[:(end-va)>>pageShift]
		if err := inCore(va, vec); err != nil {
			return err
		}
		for i, b := range vec {
			if b&1 != 0 {
				to.Present += pageSize
				continue
			}
			if l == nil {
				continue
			}
			switch l.word[pageIndex(va+uint64(i)<<pageShift)].Load() & stateMask {
			case pageLimbo:
				to.Limbo += pageSize
			case pageStored:
				to.Stored += pageSize
			case pagePoisoned:
				to.Poisoned += pageSize
			}
		}
		va = end
	}
	return nil
}

// inCore sets bit 0 of each page's byte if it is in memory (mincore(2)), and clears those
// of pages that are not mapped.
func inCore(va uint64, vec []byte) error {
	_, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(va), uintptr(len(vec))<<pageShift, uintptr(unsafe.Pointer(unsafe.SliceData(vec))))
	switch {
	case e == unix.ENOMEM && len(vec) == 1:
		vec[0] = 0
	case e == unix.ENOMEM:
		half := len(vec) / 2
		if err := inCore(va, vec[:half]); err != nil {
			return err
		}
		return inCore(va+uint64(half)<<pageShift, vec[half:])
	case e != 0:
		return fmt.Errorf("mincore: %w", e)
	}
	return nil
}
