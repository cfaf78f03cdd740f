// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
)

// CompChannel collects the events of completion queues (ibv_create_comp_channel(3)).
type CompChannel struct {
	d    *Device
	q    *fifo[*CQ]
	sink func(*CQ) // takes the events instead of q
	told func()    // is called when sink has taken some
	// untold: it is to be called.
	untold atomic.Bool
	// ready: there is an event, or there will be none.
	ready func() bool
	refs  int // CQs; guarded by d.mu
	dead  bool
}

// CreateCompChannel makes a completion channel.
func (d *Device) CreateCompChannel() (*CompChannel, error) { return d.CreateCompChannelFunc(nil, nil) }

// CreateCompChannelFunc makes a completion channel whose events go to sink, for
// drivers that have a queue of their own; Wait finds none then, and there is
// nothing to acknowledge. After one or more of them, at the end of the engine's iteration at
// the latest, told is called: it is the time to wake somebody up. The caller of both holds a
// baton: they must neither block nor call back.
func (d *Device) CreateCompChannelFunc(sink func(*CQ), told func()) (*CompChannel, error) {
	if err := d.alive(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed.Load() { // since alive looked
		return nil, ErrClosed
	}
	ch := &CompChannel{d: d, q: newFIFO[*CQ](d.lost), sink: sink, told: told}
	ch.ready = func() bool { return ch.q.len() > 0 || isClosed(ch.q.done) || isClosed(d.lost) }
	d.chans[ch] = struct{}{}
	return ch, nil
}

// tell gives an event to the sink, and remembers that it is to be told of.
func (ch *CompChannel) tell(c *CQ) {
	ch.sink(c)
	if ch.untold.Load() || ch.untold.Swap(true) {
		return
	}
	u := &ch.d.untold
	u.mu.Lock()
	u.list = append(u.list, ch)
	u.some.Store(true)
	u.mu.Unlock()
}

// untoldChannels are those with events that nobody was told of. Events come with any
// shard's baton, so whoever ends an iteration, or gives a baton back, tells of all.
type untoldChannels struct {
	some atomic.Bool
	mu   sync.Mutex
	list []*CompChannel
}

func (u *untoldChannels) tell() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.some.Store(false)
	for i, ch := range u.list {
		ch.untold.Store(false) // what comes from here on is told of once more
		ch.told()
		u.list[i] = nil
	}
	u.list = u.list[:0]
}

// Wait sleeps until a CQ that was armed has an event and returns that CQ
// (ibv_get_cq_event(3)). Each event is to be acknowledged with CQ.AckEvents.
// Errors: ErrClosed when the channel or the device is destroyed, ErrGone when the device
// is gone and there are no more events, or the context's.
func (ch *CompChannel) Wait(ctx context.Context) (*CQ, error) {
	s := ch.d.sh
	for {
		if c, ok := ch.TryWait(); ok {
			return c, nil
		}
		if isClosed(ch.q.done) || isClosed(ch.d.lost) || ctx.Err() != nil || !s.sleepLeading(ctx, ch.ready) {
			break
		}
	}
	s.bg.sleepers.Add(1)
	defer s.bg.sleepers.Add(-1)
	ch.d.wanted()
	return ch.q.take(ctx, ch.d.idle(), (*CQ).taken)
}

// TryWait is Wait for a channel that does not block.
func (ch *CompChannel) TryWait() (*CQ, bool) { return ch.q.tryTake((*CQ).taken) }

func (c *CQ) taken() { c.comps.deliver() }

// Destroy ends the channel (ibv_destroy_comp_channel(3)): ErrBusy while CQs use
// it, ErrClosed twice.
func (ch *CompChannel) Destroy() error {
	if ch.d.closed.Load() {
		return ErrClosed
	}
	ch.d.mu.Lock()
	defer ch.d.mu.Unlock()
	switch {
	case ch.dead:
		return ErrClosed
	case ch.refs > 0:
		return fmt.Errorf("completion channel serves %d CQs: %w", ch.refs, ErrBusy)
	}
	ch.dead = true
	delete(ch.d.chans, ch)
	ch.q.close()
	ch.d.sh.bg.callLeader()
	return nil
}
