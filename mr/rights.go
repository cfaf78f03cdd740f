// SPDX-License-Identifier: Apache-2.0

package mr

import "sync/atomic"

// rights is a protection domain and access rights in one word, as requests must see
// both as they were, or both as Reregister has changed them.
type rights uint64

func (r rights) pd() PD         { return PD(r >> 32) }
func (r rights) access() Access { return Access(r) }

// allows is the part of Check that asks for domain and rights.
func (r rights) allows(pd PD, need Access) error {
	switch {
	case r.pd() != pd:
		return ErrPD
	case r.access()&need != need:
		return ErrAccess
	}
	return nil
}

type atomicRights struct{ v atomic.Uint64 }

func (a *atomicRights) Load() rights            { return rights(a.v.Load()) }
func (a *atomicRights) Store(pd PD, acc Access) { a.v.Store(uint64(pd)<<32 | uint64(acc)) }
