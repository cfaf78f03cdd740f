// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"fmt"
	"time"
)

// FaultPolicy is what a request does that meets content in the store (a major fault).
// Absent pages, and those in limbo, are brought in at once under any policy: that takes
// less than the shortest time that a peer can be asked to wait, 10 µs.
type FaultPolicy uint8

const (
	// FaultHybrid: what a store gives in less than a peer would wait is waited for, as with
	// FaultStall; for all else it is FaultRNR.
	FaultHybrid FaultPolicy = iota
	// FaultStall: the engine waits, and all QPs of its shard with it.
	FaultStall
	// FaultRNR: the content is fetched in the background. The peer is asked to wait (RNR
	// NAK) for about as long as the store takes; work requests of this end are held.
	FaultRNR
	// FaultDrop: as FaultRNR, but the request counts as lost, for the peer's timeout.
	FaultDrop
	// FaultError: the request fails with a remote operational error, and a work request of
	// this end with a local QP operation error.
	FaultError

	numFaultPolicies

	// FaultByRegion is for QPs: the policy is that of each region.
	FaultByRegion FaultPolicy = 255
)

// String names the policy as ParseFaultPolicy takes it.
func (p FaultPolicy) String() string {
	if p == FaultByRegion {
		return "region"
	}
	if p >= numFaultPolicies {
		return fmt.Sprintf("FaultPolicy(%d)", uint8(p))
	}
	return [...]string{"hybrid", "stall", "rnr", "drop", "error"}[p]
}

// ParseFaultPolicy is the policy of a name; ErrInvalid if there is none.
func ParseFaultPolicy(name string) (FaultPolicy, error) {
	for p := range numFaultPolicies {
		if p.String() == name {
			return p, nil
		}
	}
	return 0, fmt.Errorf("%w: fault policy %q", ErrInvalid, name)
}

// SetFaultPolicy sets what requests do that meet content in the store, at once.
// ErrInvalid for a policy that there is not.
func (r *Region) SetFaultPolicy(p FaultPolicy) error {
	if p >= numFaultPolicies {
		return fmt.Errorf("%w: fault policy %d", ErrInvalid, p)
	}
	r.base.policy.Store(uint32(p))
	return nil
}

// FaultPolicy is what SetFaultPolicy has set.
func (r *Region) FaultPolicy() FaultPolicy { return FaultPolicy(r.base.policy.Load()) }

// Override has a policy count for all regions that the Accessor reaches from now on, or
// with FaultByRegion each region's own.
func (a *Accessor) Override(p FaultPolicy) { a.policy = p }

// FaultPolicy is what counts for a region now.
func (a *Accessor) FaultPolicy(r *Region) FaultPolicy {
	if a.policy != FaultByRegion {
		return a.policy
	}
	return r.FaultPolicy()
}

// Faults are pages that requests found absent: filled or brought back from limbo, and those
// whose content was in the store.
type Faults struct {
	Minor uint64 `json:"minor"`
	Major uint64 `json:"major"`
	// Ns is the time spent waiting in place for the store; what was put off meanwhile does
	// not count.
	Ns uint64 `json:"ns"`
	// RNRs is how often a peer was asked to wait because content was in the store.
	RNRs uint64 `json:"rnrs"`
}

// Account has the faults of what the Accessor reaches from now on counted in f, too, by
// whoever uses the Accessor; nil for nowhere. A fetch that is asked for counts when it is.
func (a *Accessor) Account(f *Faults) { a.account = f }

// stallLimit is how long a store may take for a fault that FaultHybrid waits for: about
// the shortest delay of an RNR NAK and the way there and back.
const stallLimit = int64(20 * time.Microsecond)

// stalls says whether a request waits in place for content of a region that the store
// will take fetch ns to give.
func (a *Accessor) stalls(r *Region, fetch int64) bool {
	switch a.FaultPolicy(r) {
	case FaultStall:
		return true
	case FaultHybrid:
		return fetch <= stallLimit
	}
	return false
}

// firstFetch is how long a store is supposed to take before it was asked for anything.
const firstFetch = int64(100 * time.Microsecond)

// FetchDelay is how long the store has been taking to give content back, in ns: what a
// peer is asked to wait.
func (s *Space) FetchDelay() int64 {
	if d := s.fetchDelay.Load(); d > 0 {
		return d
	}
	return firstFetch
}

// CountRNR counts that a peer was asked to wait because of the region.
func (r *Region) CountRNR() { r.base.rnrs.Add(1) }
