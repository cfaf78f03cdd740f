// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"

	"github.com/tapverbs/tapverbs/mr"
)

// SetFaultPolicy sets what requests to the QP, and its own work requests, do that meet
// content in the store, whatever the regions say; with mr.FaultByRegion, which it begins
// with, each region's own policy counts. Errors: ErrInvalid for a policy that there is
// not, ErrClosed.
func (q *QP) SetFaultPolicy(p mr.FaultPolicy) error {
	if p > mr.FaultError && p != mr.FaultByRegion {
		return fmt.Errorf("fault policy %d: %w", p, ErrInvalid)
	}
	s, b := q.s, q.base()
	s.lock()
	defer s.release()
	if q.dead.Load() || b.gone {
		return ErrClosed
	}
	b.q.SetFaultPolicy(p)
	return nil
}

// FaultPolicy is what SetFaultPolicy has set.
func (q *QP) FaultPolicy() mr.FaultPolicy {
	q.s.lock()
	defer q.s.release()
	return q.base().q.FaultPolicy()
}
