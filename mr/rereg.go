// SPDX-License-Identifier: Apache-2.0

package mr

// #include "pager.h"
import "C"

import (
	"fmt"
	"sync"
)

// Rereg says what Reregister changes, with the values of enum ibv_rereg_mr_flags.
type Rereg uint8

// What Reregister changes (ibv_rereg_mr(3)).
const (
	ChangeTranslation Rereg = 1 << iota
	ChangePD
	ChangeAccess

	allRereg = ChangeTranslation | ChangePD | ChangeAccess
)

// Reregister changes a region (ibv_rereg_mr(3)): of a, PD counts with ChangePD, Access
// with ChangeAccess, and the range with ChangeTranslation, whose IOVA is Addr again if
// a does not have one. The key stays. It returns the region that is to be used from then
// on: itself, if it lies where it did; otherwise another one, and this one is
// deregistered.
//
// Requests find the region as it was or as it is, never in between: engine, if not nil,
// is held for the moment in which it changes. When this returns, none reaches the memory
// by what was. One that is under way then goes on if the memory is the same and the new
// rights allow it, and fails otherwise.
//
// When it fails nothing has changed: errors as of Register, ErrClosed, ErrBound while
// memory windows are bound to it. A suspended region stays suspended: what is returned is
// to be resumed as often.
func (r *Region) Reregister(what Rereg, a RegAttr, engine sync.Locker) (*Region, error) {
	if what == 0 || what&^allRereg != 0 {
		return nil, fmt.Errorf("%w: change %#x of a region", ErrInvalid, uint8(what))
	}
	if r.paging == NullMemory || r.attr.Device {
		return nil, fmt.Errorf("%w: memory of its own kind cannot be changed", ErrInvalid)
	}
	s := r.table.space
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.gate.has(gateEliminated) {
		return nil, ErrClosed
	}
	if r.susp.count > 0 {
		if _, err := s.follow(r); err != nil {
			return nil, err
		}
	}
	n := r.attr
	n.PD, n.Access = r.PD(), r.Access()
	if at := r.Addr(); at != n.Addr { // MoveTo: the addresses of requests are what they were
		n.Addr, n.HaveIOVA = at, true
	}
	if what&ChangePD != 0 {
		n.PD = a.PD
	}
	if what&ChangeAccess != 0 {
		n.Access = a.Access
	}
	if what&ChangeTranslation != 0 {
		n.Addr, n.Length, n.IOVA, n.HaveIOVA = a.Addr, a.Length, a.IOVA, a.HaveIOVA
	} else if (n.Access^r.Access())&ZeroBased != 0 && !n.HaveIOVA {
		n.IOVA = 0 // or Addr, as check says
	}
	if r.paging == Implicit && what&ChangeTranslation == 0 && !n.implicit() {
		return nil, fmt.Errorf("%w: implicit region that is not on demand", ErrInvalid)
	}
	if err := n.check(); err != nil {
		return nil, err
	}
	if what&ChangeTranslation == 0 && n.IOVA == r.attr.IOVA {
		if n.Access&FlushPersistent != 0 && r.paging != Implicit {
			if err := persistable(r.pages); err != nil {
				return nil, err
			}
		}
		return r, r.change(n.PD, n.Access, engine)
	}
	by, err := r.table.open(n)
	if err != nil {
		return nil, err
	}
	by.key = r.key
	by.policy.Store(r.policy.Load())
	by.susp.inherit(&r.susp)
	if by.susp.count > 0 {
		if !s.watchMoves(by) {
			s.release(by)
			return nil, fmt.Errorf("%w: %d regions are suspended", ErrNoMem, C.TV_SUSPENDED)
		}
		by.gate.set(gateSuspended)
	}
	if err := r.moveTo(by, engine); err != nil {
		by.endSuspension()
		s.release(by)
		return nil, err
	}
	r.endSuspension()
	s.regions[by] = struct{}{}
	tracked := r.dirty != nil
	s.drop(r)
	by.inherit(r)
	r.heir = by
	if tracked {
		s.trackAnew(by)
	}
	return by, nil
}

// moveTo puts another region in a region's place.
func (r *Region) moveTo(by *Region, engine sync.Locker) error {
	if engine != nil {
		engine.Lock()
		defer engine.Unlock()
	}
	by.moved = r.table.moved.Load() + 1 // writers hold Space.mu
	if err := r.table.retire(r, by); err != nil {
		return err
	}
	r.table.moved.Store(by.moved)
	return nil
}

// Moved counts the regions of the table that Reregister has put elsewhere. Who takes it
// down when a message begins can ask MovedSince for the message's later packets.
func (t *Table) Moved() uint64 { return t.moved.Load() }

// MovedSince says whether the region lies elsewhere than when Moved said so much: half a
// message must not come from where it was and half from where it is.
func (r *Region) MovedSince(moved uint64) bool { return r.moved > moved }

// change gives a region other rights.
func (r *Region) change(pd PD, acc Access, engine sync.Locker) error {
	t := r.table
	if engine != nil {
		engine.Lock()
		defer engine.Unlock()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case r.gate.has(gateDead):
		return ErrClosed
	case r.windows > 0:
		return ErrBound
	}
	r.rights.Store(pd, acc)
	r.invalid.Store(false)
	t.space.quiesce()() // those inside a section were let in by the old rights
	return nil
}

// inherit adds the counts of the region whose place r takes.
func (r *Region) inherit(old *Region) {
	r.faults.Add(old.faults.Load())
	r.handled.Add(old.handled.Load())
	r.prefetched.Add(old.prefetched.Load())
	r.major.Add(old.major.Load())
	r.faultNs.Add(old.faultNs.Load())
	r.rnrs.Add(old.rnrs.Load())
	r.placements.Add(old.placements.Load())
	r.limit.Store(old.limit.Load())
}
