// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"errors"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
)

// Unplug takes the device off its port, as though the adapter were pulled out of the
// machine. All ends as it does when the TAP is taken away: by its deletion, or with its
// network namespace. What is outstanding is flushed, EventDeviceFatal comes once, those
// that wait are woken up, and every call but Poll and those that destroy answers
// ErrGone. What receives of SRQs are posted stays in them. Another device can be opened
// on the port at once; memory is registered there anew. ErrGone if the device was gone
// before, ErrClosed.
func (d *Device) Unplug() error {
	if err := d.alive(); err != nil {
		return err
	}
	if !d.unplugged.CompareAndSwap(false, true) {
		return ErrGone
	}
	var errs []error
	for i := len(d.shards) - 1; i >= 0; i-- { // the first is the last to go
		errs = append(errs, d.shards[i].unplug())
	}
	return errors.Join(errs...)
}

func (s *shard) unplug() error {
	s.lock()
	defer s.release()
	if s.closing {
		return ErrClosed
	}
	s.now = s.clock()
	s.lose()
	if u, ok := s.dev.(tap.Unplugger); ok {
		return u.Unplug()
	}
	return nil // it is not used any more
}

// lose is the end of the device: its TAP was taken away (IBA 11.6.3.2,
// IBV_EVENT_DEVICE_FATAL). Every QP goes to the error state and is flushed before
// anybody hears of it, so that who is told finds all that there will be. It is called
// between iterations, with the baton. With several shards each ends on its own, and the
// first when all others have: then it is told.
func (s *shard) lose() {
	s.lost = false
	if s.gone.Load() || !s.othersGone() {
		return
	}
	s.gone.Store(true)
	s.full, s.up = false, false
	s.look.Store(false)
	s.eg.drop()
	s.eg.loopHead = s.eg.loopTail
	for _, q := range s.table {
		if q != nil && q.q.State() != qp.StateReset {
			s.toError(q)
			q.q.Run(runBudget)
			s.timers.remove(q)
		}
	}
	s.failOverrun()
	for _, c := range s.held {
		c.q.Expire()
	}
	clear(s.held)
	s.held, s.heldDue = s.held[:0], qp.Never
	if h := s.d.sh; s != h {
		h.tell(s, func() { h.lost = true })
		return
	}
	s.failResolves(ErrGone)
	s.cm.lose()
	s.probes.lose()
	s.pub.rouse()
	s.d.deviceEvent(qp.EventDeviceFatal)
	close(s.d.lost)
	s.bg.callLeader()
}

// othersGone says whether a shard may end: the first has the others end before.
func (s *shard) othersGone() bool {
	if s != s.d.sh {
		return true
	}
	all := true
	for _, o := range s.d.shards[1:] {
		if !o.gone.Load() {
			all = false
			o.tell(s, func() { o.lost = !o.gone.Load() })
		}
	}
	return all
}
