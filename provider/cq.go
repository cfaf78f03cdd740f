// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"context"
	"fmt"
	"math/bits"
	"slices"
	"sync/atomic"

	"github.com/tapverbs/tapverbs/qp"
)

// CQ is a completion queue (IBA 10.8).
type CQ struct {
	d       *Device
	home    atomic.Pointer[shard] // whose engine completes to it, see spread.go
	feeds   atomic.Uint32         // the shards that do
	q       *qp.CQ
	ch      *CompChannel
	refs    int // QPs that complete to it; guarded by d.mu
	dead    atomic.Bool
	overrun atomic.Bool
	comps   acks          // completion events
	asyncs  acks          // async events
	wake    chan struct{} // for Wait; capacity 1
	ready   func() bool   // Wait has no reason to sleep
}

// CreateCQ makes a completion queue for at least n completions (ibv_create_cq(3));
// Entries says how many it really holds. Its events go to ch, which may be nil.
// ErrInvalid if n is not from 1 to MaxCQE, ErrNoMem at MaxCQ.
func (d *Device) CreateCQ(n int, ch *CompChannel) (*CQ, error) {
	if err := d.alive(); err != nil {
		return nil, err
	}
	if n < 1 || n > maxCQE {
		return nil, fmt.Errorf("%d completions, from 1 to %d: %w", n, maxCQE, ErrInvalid)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed.Load() { // since alive looked
		return nil, ErrClosed
	}
	if len(d.cqs) >= maxCQ {
		return nil, fmt.Errorf("%d completion queues: %w", maxCQ, ErrNoMem)
	}
	if ch != nil && (ch.dead || ch.d != d) {
		return nil, fmt.Errorf("completion channel: %w", ErrInvalid)
	}
	c := &CQ{d: d, ch: ch, wake: make(chan struct{}, 1)}
	c.home.Store(d.sh)
	c.comps.init()
	c.asyncs.init()
	c.ready = func() bool {
		return c.q.Len() > 0 || c.dead.Load() || isClosed(d.lost) || isClosed(d.events.done)
	}
	var err error
	if c.q, err = qp.NewCQ(n, c.notify, c.overflow); err != nil {
		return nil, fmt.Errorf("create CQ: %w", err)
	}
	if ch != nil {
		ch.refs++
	}
	d.cqs[c] = struct{}{}
	return c, nil
}

// notify is called by the holder of the baton when the CQ was armed.
func (c *CQ) notify(bool) {
	c.tell()
	if !c.d.sh.leading {
		c.d.sh.bg.callLeader()
	}
}

// tell gives an event to those who wait.
func (c *CQ) tell() {
	if c.ch != nil {
		if c.ch.sink != nil {
			c.ch.tell(c)
		} else {
			c.ch.q.put(c)
		}
		return
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// overflow is called by the holder of the baton when a completion found no room.
// Its QPs go to the error state at the end of the iteration.
func (c *CQ) overflow() {
	if c.overrun.Swap(true) {
		return
	}
	c.d.events.put(&asyncEvent{Event: Event{Type: qp.EventCQErr, CQ: c}, acks: &c.asyncs})
	if len(c.d.shards) == 1 {
		c.d.sh.overrun = append(c.d.sh.overrun, c)
		return
	}
	for _, s := range c.d.shards {
		s.tellAny(func() { s.overrun = append(s.overrun, c) })
	}
}

// Poll takes up to len(wcs) completions (ibv_poll_cq(3)) and returns their number.
// It never blocks. When the queue is empty it makes progress itself, unless
// somebody else is at it, and looks again.
func (c *CQ) Poll(wcs []qp.WC) int {
	if c.dead.Load() {
		return 0
	}
	if n := c.q.Poll(wcs); n > 0 || len(wcs) == 0 {
		return n
	}
	n := 0
	if c.home.Load().attend(c.q, true) {
		n = c.q.Poll(wcs)
	}
	for m := c.others(); m != 0 && n == 0; m &= m - 1 {
		c.d.shards[bits.TrailingZeros32(m)].attend(c.q, true)
		n = c.q.Poll(wcs) // somebody may have handed over what was for it
	}
	return n
}

// ReqNotify asks for one event on the channel for the next completion, or the
// next solicited one or error (ibv_req_notify_cq(3)).
func (c *CQ) ReqNotify(solicitedOnly bool) {
	if !c.dead.Load() {
		c.q.Arm(solicitedOnly)
	}
}

// Wait polls until there is at least one completion, and sleeps meanwhile. It is
// for CQs without a channel, ErrInvalid otherwise; ErrClosed when the CQ or the
// device is destroyed, ErrGone when the device is gone and nothing is left to be polled,
// or the context's error.
func (c *CQ) Wait(ctx context.Context, wcs []qp.WC) (int, error) {
	if c.ch != nil || len(wcs) == 0 {
		return 0, fmt.Errorf("wait on a CQ with a channel, or for no completions: %w", ErrInvalid)
	}
	idle := c.d.idle()
	for {
		if c.dead.Load() || c.d.closed.Load() {
			return 0, ErrClosed
		}
		lost := isClosed(c.d.lost) // looked at first: what was flushed before is polled yet
		n := c.Poll(wcs)
		if n == 0 {
			c.q.Arm(false)
			n = c.q.Poll(wcs) // one may have come before the arming
		}
		if n > 0 {
			// Another who waits may have armed together with us: it looks again.
			c.tell()
			c.d.sh.bg.callLeader()
			return n, nil
		}
		if lost {
			return 0, ErrGone
		}
		if idle != nil {
			if err := ctx.Err(); err != nil {
				return 0, err
			}
			idle()
			continue
		}
		s := c.d.sh
		if s.sleepLeading(ctx, c.ready) {
			if err := ctx.Err(); err != nil {
				return 0, err
			}
			continue
		}
		s.bg.sleepers.Add(1)
		err := c.sleep(ctx)
		s.bg.sleepers.Add(-1)
		if err != nil {
			return 0, err
		}
	}
}

// sleep waits for an event of a CQ without a channel.
func (c *CQ) sleep(ctx context.Context) error {
	c.wanted()
	select {
	case <-c.wake:
	case <-c.d.lost:
	case <-ctx.Done():
		return ctx.Err()
	case <-c.d.events.done:
		return ErrClosed
	}
	return nil
}

// AckEvents acknowledges n events of the CQ that CompChannel.Wait returned
// (ibv_ack_cq_events(3)).
func (c *CQ) AckEvents(n int) { c.comps.ack(uint64(n)) }

// Entries is how many completions the CQ holds.
func (c *CQ) Entries() int {
	if c.dead.Load() {
		return 0
	}
	return c.q.Entries()
}

// Len is how many completions wait to be polled.
func (c *CQ) Len() int {
	if c.dead.Load() {
		return 0
	}
	return c.q.Len()
}

// Resize changes how many completions the CQ holds at least and keeps those that
// wait (ibv_resize_cq(3)); ErrInvalid when they would not fit.
func (c *CQ) Resize(n int) error {
	if err := c.d.alive(); err != nil {
		return err
	}
	if c.dead.Load() {
		return ErrClosed
	}
	if n < 1 || n > maxCQE {
		return fmt.Errorf("%d completions, from 1 to %d: %w", n, maxCQE, ErrInvalid)
	}
	s := c.home.Load()
	s.lock()
	defer s.release()
	return c.q.Resize(n)
}

// Channel is the channel the CQ's events go to; nil if there is none.
func (c *CQ) Channel() *CompChannel { return c.ch }

// Destroy ends the CQ (ibv_destroy_cq(3)): ErrBusy while QPs use it, ErrClosed
// twice. It waits until all events taken from the channel are acknowledged.
// Completions that were not polled are lost.
func (c *CQ) Destroy() error {
	d := c.d
	if d.closed.Load() {
		return ErrClosed
	}
	d.mu.Lock()
	if c.refs > 0 {
		d.mu.Unlock()
		return fmt.Errorf("completion queue serves %d queues: %w", c.refs, ErrBusy)
	}
	if c.dead.Load() {
		d.mu.Unlock()
		return ErrClosed
	}
	delete(d.cqs, c)
	err := c.teardown()
	if c.ch != nil {
		c.ch.refs--
	}
	d.mu.Unlock()
	c.comps.wait()
	c.asyncs.wait()
	return err
}

// teardown is called with d.mu held. Events go last: until it is out of the engine, one
// that was held back may still come.
func (c *CQ) teardown() error {
	c.dead.Store(true)
	err := c.leave()
	if c.ch != nil {
		c.ch.q.remove(func(o *CQ) bool { return o == c })
	} else {
		c.tell() // whoever waits finds it dead
		c.d.sh.bg.callLeader()
	}
	c.d.events.remove(func(e *asyncEvent) bool { return e.CQ == c })
	return err
}

// leave takes the CQ out of the engine.
func (c *CQ) leave() error {
	for _, s := range c.d.shards {
		s.lock()
		s.forgetHeld(c)
		if i := slices.Index(s.overrun, c); i >= 0 {
			s.overrun = slices.Delete(s.overrun, i, i+1)
		}
		s.release()
	}
	return c.q.Close()
}
