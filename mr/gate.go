// SPDX-License-Identifier: Apache-2.0

package mr

import "sync/atomic"

// gateWord holds what keeps requests out of a region, so that those that nothing keeps
// out look at one word. A window's view has one of its own beside its base's.
type gateWord struct{ v atomic.Uint32 }

const (
	gateDead       = 1 << iota // deregistered, or the bind is over
	gateEliminated             // see Region.Eliminate
	gateSuspended              // see Region.Suspend
	gateHoles                  // parts of it, see Region.holes
)

func (g *gateWord) set(bit uint32)      { g.v.Or(bit) }
func (g *gateWord) clear(bit uint32)    { g.v.And(^bit) }
func (g *gateWord) has(bit uint32) bool { return g.v.Load()&bit != 0 }

// gates is what keeps requests out; 0: nothing.
func (r *Region) gates() uint32 { return r.gate.v.Load() | r.base.gate.v.Load() }

// bars is the error for what is set in a region's gates, apart from holes.
func (r *Region) bars(g uint32) error {
	switch {
	case g&gateDead != 0:
		return ErrKey
	case g&gateEliminated != 0:
		return ErrEliminated
	case g&gateSuspended != 0:
		return ErrSuspended
	}
	return nil
}

// barred says why an access to a range has to stay out, if so. Call it inside a section.
func (a *Accessor) barred(r *Region, g uint32, va uint64, n int) error {
	err := r.bars(g)
	if err == ErrSuspended {
		a.blocked = r
	}
	if err == nil && g&gateHoles != 0 && r.paging == UserFault && r.inHole(va, va+uint64(n)) {
		return ErrRemoved
	}
	return err
}

// Blocked is the region that the last ErrSuspended or ErrMajor was about.
func (a *Accessor) Blocked() *Region { return a.blocked }

// Postponed says whether an error of an Accessor goes by: the request is to be repeated.
func Postponed(err error) bool { return err == ErrBusy || err == ErrSuspended || err == ErrMajor }
