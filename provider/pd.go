// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"
	"sync/atomic"

	"github.com/tapverbs/tapverbs/mr"
)

// PD is a protection domain: what is made in one works only together with what
// is made in the same (IBA 10.2.3).
type PD struct {
	d    *Device
	num  mr.PD
	base *PD // of a parent domain
	refs int // objects made in it; guarded by d.mu
	dead bool
	// budget: one was set, for all domains with the number.
	budget atomic.Bool
}

// AllocPD makes a protection domain (ibv_alloc_pd(3)). ErrNoMem at MaxPD.
func (d *Device) AllocPD() (*PD, error) {
	if err := d.alive(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed.Load() { // since alive looked
		return nil, ErrClosed
	}
	if len(d.pds) >= maxPD {
		return nil, fmt.Errorf("%d protection domains: %w", maxPD, ErrNoMem)
	}
	d.nextPD++
	pd := &PD{d: d, num: d.nextPD}
	d.pds[pd] = struct{}{}
	return pd, nil
}

// Dealloc gives the domain back (ibv_dealloc_pd(3)); ErrBusy while regions, windows, QPs,
// SRQs or address handles of it exist, ErrClosed twice.
func (p *PD) Dealloc() error {
	if p.d.closed.Load() {
		return ErrClosed
	}
	if err := p.end(); err != nil || p.base != nil || !p.budget.Load() {
		return err
	}
	// Only a notifier's hook is refused, and what it leaves ends with the device.
	_ = p.d.keys.SetBudget(p.num, 0)
	return nil
}

// end is what Dealloc does with d.mu held.
func (p *PD) end() error {
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	switch {
	case p.dead:
		return ErrClosed
	case p.refs > 0:
		return fmt.Errorf("protection domain has %d objects: %w", p.refs, ErrBusy)
	}
	p.dead = true
	delete(p.d.pds, p)
	if p.base != nil {
		p.base.refs--
	}
	return nil
}

// AllocParent makes a parent domain of p (ibv_alloc_parent_domain(3)): what is made in
// the one works with what is made in the other, and it must be gone before p is.
// Errors as for AllocPD.
func (p *PD) AllocParent() (*PD, error) {
	d := p.d
	if err := d.alive(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.pds) >= maxPD {
		return nil, fmt.Errorf("%d protection domains: %w", maxPD, ErrNoMem)
	}
	if err := p.ref(); err != nil {
		return nil, err
	}
	parent := &PD{d: d, num: p.num, base: p}
	d.pds[parent] = struct{}{}
	return parent, nil
}

// Device is the device the domain belongs to.
func (p *PD) Device() *Device { return p.d }

// ref is called with d.mu held by those who make an object in the domain.
func (p *PD) ref() error {
	if p == nil {
		return fmt.Errorf("protection domain: %w", ErrInvalid)
	}
	if p.dead || p.d.closed.Load() {
		return fmt.Errorf("protection domain: %w", ErrClosed)
	}
	p.refs++
	return nil
}
