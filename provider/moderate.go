// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"
	"time"

	"github.com/tapverbs/tapverbs/qp"
)

// Moderate holds the CQ's events back (ibv_modify_cq(3), IBV_CQ_ATTR_MODERATE): an
// event comes when count completions have arrived that would have given one, or when
// period has passed since the first of them. A count of 0 is any number; a period of
// 0, or a count of 1, ends it. ErrInvalid beyond MaxCQModCount and MaxCQModPeriod.
func (c *CQ) Moderate(count int, period time.Duration) error {
	if err := c.d.alive(); err != nil {
		return err
	}
	if c.dead.Load() {
		return ErrClosed
	}
	if count < 0 || count > maxCQModCount || period < 0 || period > maxCQModPeriod {
		return fmt.Errorf("events after %d completions or %v: %w", count, period, ErrInvalid)
	}
	s := c.home.Load()
	s.lock()
	defer s.release()
	c.q.Moderate(uint32(count), int64(period), c.later)
	return nil
}

// IgnoreOverrun has completions that find no room dropped without more ado
// (IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN). By default they are an error of the CQ and of
// all queue pairs that complete to it.
func (c *CQ) IgnoreOverrun() { c.q.IgnoreOverrun() }

// later has an event that is held back given in time; the caller has the baton.
func (c *CQ) later(at int64) {
	s := c.home.Load()
	if c.feeds.Load()&^(1<<s.id) != 0 { // whose baton that is nobody knows
		s.tellAny(func() { s.hold(c, at) })
		return
	}
	s.hold(c, at)
}

func (s *shard) hold(c *CQ, at int64) {
	for _, o := range s.held {
		if o == c {
			s.heldDue = min(s.heldDue, at)
			return
		}
	}
	s.held = append(s.held, c)
	s.heldDue = min(s.heldDue, at)
}

// expireEvents gives the events that are due.
func (s *shard) expireEvents() {
	s.heldDue = qp.Never
	kept := s.held[:0]
	for _, c := range s.held {
		at := c.q.Due()
		if at <= s.now {
			c.q.Expire()
		} else if at != qp.Never {
			kept = append(kept, c)
			s.heldDue = min(s.heldDue, at)
		}
	}
	clear(s.held[len(kept):])
	s.held = kept
}

// forgetHeld is the end of a CQ; the caller has the baton.
func (s *shard) forgetHeld(c *CQ) {
	for i, o := range s.held {
		if o == c {
			s.held = append(s.held[:i], s.held[i+1:]...)
			return
		}
	}
}
