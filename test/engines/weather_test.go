// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// What a cell's own goroutine does with its region suspended.
const (
	deedReplace = firstSuspended + iota // pages by others
	deedRemap                           // mremap to the other place, which the region follows
	deedMoveTo                          // other memory at the other place
	numDeeds
)

// suspended makes a change for which the region is suspended.
func (s *cell) suspended(d deed, off, n int) (err error) {
	m := s.region.Load()
	// Where content stays, a WRITE that is under way meanwhile arrives, before or afterwards.
	written := make(chan error, 1)
	if n = min(n, cellMost); d == deedReplace {
		written <- nil
	} else {
		src := s.r.IntN(readsAt - n)
		copy(s.model[off:off+n], s.l.data.Bytes()[src:])
		go func() {
			written <- s.request(qp.SendWR{Opcode: qp.WRWrite, SGL: []qp.SGE{s.l.sge(src, n)}}, off)
		}()
		runtime.Gosched()
	}
	if err := m.Suspend(); err != nil {
		return fmt.Errorf("suspend: %w", err)
	}
	switch d {
	case deedReplace:
		err = s.replace(m, off, n)
	case deedRemap:
		err = s.remap()
	case deedMoveTo:
		err = s.moveTo(m)
	}
	if err != nil {
		return err
	}
	defer func() {
		// It takes a while, and the next deed is not to come before its end.
		if e := <-written; err == nil {
			err = e
		}
	}()
	if err = m.Resume(); err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	if got := m.Addr(); got != s.addr {
		return fmt.Errorf("the region is at %#x, its memory at %#x", got, s.addr)
	}
	return nil
}

func (s *cell) replace(m *provider.MR, off, n int) error {
	with, err := mmap(0, n, 0)
	if err != nil {
		return err
	}
	defer munmap(with, n)
	src := s.r.IntN(readsAt - n)
	copy(at(with, n), s.l.data.Bytes()[src:])
	copy(s.model[off:off+n], at(with, n))
	if err := m.Replace(m.IOVA()+uint64(off), uint64(n), with); err != nil {
		return err
	}
	if !bytesAreZero(at(with, n)) {
		return errors.New("the pages that were put in place of others are still where they were")
	}
	return nil
}

// other is the place where the memory is not.
func (s *cell) other() uintptr {
	if s.addr == s.places[0] {
		return s.places[1]
	}
	return s.places[0]
}

func (s *cell) remap() error {
	to := s.other()
	_, _, e := unix.Syscall6(unix.SYS_MREMAP, s.addr, cellLen, cellLen, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, to, 0)
	switch {
	case e == unix.EFAULT:
		// It consists of several mappings since a part was unmapped.
		s.did[deedRemap].Add(-1)
		return nil
	case e != 0:
		return fmt.Errorf("mremap: %w", e)
	}
	s.addr = to
	return nil
}

func (s *cell) moveTo(m *provider.MR) error {
	from, to := s.addr, s.other()
	if _, err := mmap(to, cellLen, unix.MAP_FIXED_NOREPLACE); err != nil {
		return err
	}
	copy(at(to, cellLen), s.mem())
	if err := m.MoveTo(to); err != nil {
		return err
	}
	s.addr = to
	return munmap(from, cellLen)
}

func bytesAreZero(b []byte) bool { return !slices.ContainsFunc(b, func(c byte) bool { return c != 0 }) }

// kind is what goes on in cells beside what their own goroutines do: it must not change a
// byte, nor fail a request.
type kind int

const (
	kindLimbo kind = iota
	kindStore
	kindSuspend
	kindBudget
	kindPolicy
	kindPrefetch
	numKinds
)

var kindNames = [numKinds]string{"evictions to limbo", "evictions to the store", "suspensions", "budgets", "policies", "prefetches"}

// weather does all kinds to a cell until stop says so, and counts what came to something.
func (s *cell) weather(stop func() bool, seed uint64, did *[numKinds]atomic.Int64) error {
	r := rand.New(rand.NewPCG(seed, 77))
	for !stop() {
		k, m := kind(r.IntN(int(numKinds))), s.region.Load()
		if m == nil {
			runtime.Gosched()
			continue
		}
		n := (1 + r.IntN(64)) * page
		off := uint64(r.IntN((cellLen-n)/page+1) * page)
		done, err := s.blow(k, m, m.IOVA()+off, uint64(n), r)
		switch {
		case err != nil && s.region.Load() == m && !passes(k, err):
			return fmt.Errorf("%s: %w", kindNames[k], err)
		case err == nil:
			did[k].Add(int64(done))
		}
		time.Sleep(time.Duration(r.IntN(1000)) * time.Microsecond)
	}
	return nil
}

// passes says whether an error is because of what else is done to the cell.
func passes(k kind, err error) bool {
	return errors.Is(err, mr.ErrBusy) || errors.Is(err, mr.ErrSuspended) || k == kindPrefetch && errors.Is(err, mr.ErrRemoved)
}

var policies = [...]mr.FaultPolicy{mr.FaultHybrid, mr.FaultStall, mr.FaultRNR}

func (s *cell) blow(k kind, m *provider.MR, iova, n uint64, r *rand.Rand) (int, error) {
	switch k {
	case kindLimbo:
		return m.Evict(iova, n, mr.Limbo)
	case kindStore:
		return m.Evict(iova, n, mr.Stored)
	case kindSuspend:
		mode := mr.SuspendMode(r.IntN(2))
		if r.IntN(10) == 0 {
			mode = mr.SuspendDrop // costs the peer a timeout
		}
		if err := m.SetSuspendMode(mode, time.Millisecond); err != nil {
			return 0, err
		}
		if err := m.Suspend(); err != nil {
			return 0, err
		}
		time.Sleep(time.Duration(r.IntN(600)) * time.Microsecond)
		return 1, m.Resume()
	case kindBudget:
		return 1, m.SetBudget(uint64(r.IntN(8)) * cellLen / 8)
	case kindPolicy:
		p := policies[r.IntN(len(policies))]
		if r.IntN(10) == 0 {
			p = mr.FaultDrop // the same
		}
		return 1, m.SetFaultPolicy(p)
	}
	return 1, m.PD().AdviseMR(mr.PrefetchWrite, provider.AdviseFlush, []qp.SGE{{Addr: iova, Length: uint32(n), LKey: m.LKey()}})
}
