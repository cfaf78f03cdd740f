// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"
	"sync"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/qp"
)

// MW is a memory window (IBA 10.6.7): a remote key to a part of a region, which a work
// request binds.
type MW struct {
	w    *mr.Window
	pd   *PD
	dead bool // guarded by d.mu

	mu   sync.Mutex
	last mr.Key // of the last bind that BindMW has posted
}

// AllocMW makes a memory window (ibv_alloc_mw(3)). Errors: mr.ErrInvalid for an unknown
// type, ErrNoMem at MaxMW.
func (p *PD) AllocMW(typ mr.WindowType) (*MW, error) {
	d := p.d
	if err := d.alive(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.mws) >= maxMW {
		return nil, fmt.Errorf("%d memory windows: %w", maxMW, ErrNoMem)
	}
	if err := p.ref(); err != nil {
		return nil, err
	}
	w, err := d.keys.AllocWindow(p.num, typ)
	if err != nil {
		p.refs--
		return nil, fmt.Errorf("allocate memory window: %w", err)
	}
	m := &MW{w: w, pd: p, last: w.RKey()}
	d.mws[m] = struct{}{}
	return m, nil
}

// RKey is the window's key now: that of the last bind that was executed.
func (m *MW) RKey() mr.Key { return m.w.RKey() }

// Type is the window's type.
func (m *MW) Type() mr.WindowType { return m.w.Type() }

// PD is the domain the window belongs to.
func (m *MW) PD() *PD { return m.pd }

// NextKey is the key after k for a window: the low 8 bits are one more
// (ibv_inc_rkey(3)).
func NextKey(k mr.Key) mr.Key { return k&^0xff | (k+1)&0xff }

// Dealloc ends the window (ibv_dealloc_mw(3)), bound or not. When it returns, no request
// reaches memory through it. ErrClosed twice.
func (m *MW) Dealloc() error {
	d := m.pd.d
	if d.closed.Load() {
		return ErrClosed
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if m.dead {
		return ErrClosed
	}
	delete(d.mws, m)
	return m.teardown()
}

// teardown is called with d.mu held.
func (m *MW) teardown() error {
	m.dead = true
	m.pd.refs--
	return m.w.Dealloc()
}

// BindMW posts a work request that binds a window of type 1 to a part of a region, or
// unbinds it if b.Length is 0 (ibv_bind_mw(3)); b.RKey and b.LKey are filled in. It
// returns the key that the window has once that has completed. ErrInvalid for a window
// of type 2, which WRBindMW is for; other errors as of PostSend.
func (q *QP) BindMW(m *MW, region *MR, id uint64, flags qp.SendFlags, b qp.Bind) (mr.Key, error) {
	if m.Type() != mr.Window1 {
		return 0, fmt.Errorf("bind a window of type %d: %w", m.Type(), ErrInvalid)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b.RKey, b.LKey = NextKey(m.last), 0
	if region != nil {
		b.LKey = region.LKey()
	}
	if _, err := q.PostSend([]qp.SendWR{{ID: id, Opcode: qp.WRBindMW, Flags: flags, Bind: b}}); err != nil {
		return 0, err
	}
	m.last = b.RKey
	return b.RKey, nil
}
