// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"fmt"
	"sync"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// CQ is a completion queue: a ring that engines fill and a driver empties.
// Engines of several shards may complete to one CQ, and several threads may
// poll it; each side has its lock, the two sides share only the ring's indices.
type CQ struct {
	emu      sync.Mutex // engines' side
	dmu      sync.Mutex // driver's side
	ring     *Ring      // replaced by Resize, under both locks
	failed   bool       // overflowed; guarded by emu
	lossy    bool       // does not care; guarded by emu
	mod      moderation
	closed   bool // its ring is freed; written under both locks
	notify   func(solicited bool)
	overflow func()
}

// NewCQ makes a CQ for at least so many entries. notify is called when a
// completion arrives after Arm, once per arming; overflow when a completion
// finds no room (IBV_EVENT_CQ_ERR). Both are called by an engine with its baton
// held and must not call back into it.
func NewCQ(entries int, notify func(solicited bool), overflow func()) (*CQ, error) {
	r, err := newRing(entries, cqeSize)
	if err != nil {
		return nil, err
	}
	return &CQ{ring: r, notify: notify, overflow: overflow, mod: moderation{due: Never}}, nil
}

// push adds a completion. A CQ that overflowed once takes no more: what would
// be missing from it can't be told apart any longer (IBA 11.2.8.1).
func (c *CQ) push(e *CQE, solicited bool) {
	c.emu.Lock()
	if c.closed {
		c.emu.Unlock()
		return
	}
	r := c.ring
	p := r.prod().Load()
	if c.failed || p-r.cons().Load() > r.mask {
		first := !c.failed && !c.lossy
		c.failed = !c.lossy
		c.emu.Unlock()
		if first && c.overflow != nil {
			c.overflow()
		}
		return
	}
	*r.cqe(p) = *e
	r.prod().Store(p + 1)
	arm := r.word(ringArm)
	a := arm.Load()
	solicited = solicited || e.Status != WCSuccess // IBA 11.4.2.2: errors count as solicited
	fire, later := a == ArmAny || a == ArmSolicited && solicited, Never
	if fire {
		fire, later = c.mod.moderate(int64(e.Timestamp))
	}
	fire = fire && arm.CompareAndSwap(a, ArmNone)
	c.emu.Unlock()
	if fire && c.notify != nil {
		c.notify(solicited)
	}
	if later != Never {
		c.mod.later(later)
	}
}

// Poll takes up to len(wcs) completions off the queue and returns their number.
// It only looks at the ring and may be called by any goroutine.
func (c *CQ) Poll(wcs []WC) int {
	c.dmu.Lock()
	if c.closed {
		c.dmu.Unlock()
		return 0
	}
	r := c.ring
	ci := r.cons().Load()
	n := min(int(r.prod().Load()-ci), len(wcs))
	for i := range n {
		e := r.cqe(ci + uint32(i))
		wc := &wcs[i]
		*wc = WC{ID: e.ID, Status: e.Status, Opcode: e.Opcode, Flags: e.Flags, VendorErr: e.VendorErr,
			ByteLen: e.ByteLen, QPN: wire.QPN(e.QPN), SrcQP: wire.QPN(e.SrcQP), Timestamp: int64(e.Timestamp), FlowTag: e.FlowTag}
		if e.Flags&WCWithInv != 0 {
			wc.InvKey = mr.Key(e.ImmOrKey)
		} else {
			wc.Imm = e.ImmOrKey
		}
	}
	if n > 0 {
		r.cons().Store(ci + uint32(n))
	}
	c.dmu.Unlock()
	return n
}

// Arm asks for one notification for the next completion, or the next solicited
// one (ibv_req_notify_cq(3)). A request for any is not weakened by a later one
// for solicited ones.
func (c *CQ) Arm(solicitedOnly bool) {
	c.dmu.Lock()
	if c.closed {
		c.dmu.Unlock()
		return
	}
	arm := c.ring.word(ringArm)
	if solicitedOnly {
		arm.CompareAndSwap(ArmNone, ArmSolicited)
	} else {
		arm.Store(ArmAny)
	}
	c.dmu.Unlock()
}

// Len is how many completions wait to be polled.
func (c *CQ) Len() int {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	if c.closed {
		return 0
	}
	return c.ring.Len()
}

// Entries is how many completions the CQ holds.
func (c *CQ) Entries() int {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	return c.ring.Slots()
}

// Resize gives the CQ room for at least so many entries and keeps what is in it
// (ibv_resize_cq(3)). It fails with ErrAttrValue when more than that wait.
func (c *CQ) Resize(entries int) error {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	c.emu.Lock()
	defer c.emu.Unlock()
	if c.closed {
		return ErrState
	}
	old := c.ring
	if n := old.Len(); entries < n {
		return fmt.Errorf("%w: %d entries for %d waiting completions", ErrAttrValue, entries, n)
	}
	r, err := newRing(entries, cqeSize)
	if err != nil {
		return err
	}
	c.copyInto(r, nil)
	r.word(ringArm).Store(old.word(ringArm).Load())
	c.ring = r
	return old.close()
}

// copyInto puts the completions that keep approves of, in order, at the start
// of r. Both locks are held.
func (c *CQ) copyInto(r *Ring, keep func(*CQE) bool) {
	old := c.ring
	n := uint32(0)
	for i := old.cons().Load(); i != old.prod().Load(); i++ {
		if e := old.cqe(i); keep == nil || keep(e) {
			*r.cqe(n) = *e
			n++
		}
	}
	r.cons().Store(0)
	r.prod().Store(n)
}

// clean removes the completions of a QP, as destroying or resetting it does.
func (c *CQ) clean(num wire.QPN) {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	c.emu.Lock()
	defer c.emu.Unlock()
	if c.closed {
		return
	}
	r := c.ring
	w := r.cons().Load()
	for i := w; i != r.prod().Load(); i++ {
		if e := r.cqe(i); wire.QPN(e.QPN) != num {
			if w != i {
				*r.cqe(w) = *e
			}
			w++
		}
	}
	r.prod().Store(w)
}

// Close gives the ring's memory back. The CQ is empty from then on.
func (c *CQ) Close() error {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	c.emu.Lock()
	defer c.emu.Unlock()
	if c.closed {
		return ErrState
	}
	c.closed = true
	return c.ring.close()
}
