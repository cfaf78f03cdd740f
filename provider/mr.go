// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"
	"math"
	"sync/atomic"
	"unsafe"

	"github.com/tapverbs/tapverbs/mr"
)

// MR is a registered memory region (IBA 10.6).
type MR struct {
	d      *Device
	region atomic.Pointer[mr.Region] // Reregister may put another one here

	// Guarded by d.mu:
	pd   *PD
	dm   *DM    // device memory that it is of; nil mostly
	keep []byte // memory of the Go heap stays reachable
	dead bool
}

// MRAttr says what to register.
type MRAttr struct {
	// Addr and Length are the range in bytes, at any alignment. With address 0, length
	// math.MaxUint64 and mr.OnDemand it is all memory, now and as it will be.
	Addr   uintptr
	Length uint64
	// IOVA is the address that requests use for the first byte when HaveIOVA is
	// set; otherwise Addr.
	IOVA     uint64
	HaveIOVA bool
	Access   mr.Access
	// Pin locks the range into memory (mlock(2)) instead of paging it.
	Pin bool
	// Invalidatable lets a SEND with invalidate of the peer end the region's key
	// (IBA 9.4.1.1.3), which plain regions of libibverbs do not allow.
	Invalidatable bool
}

// RegMR registers the memory of b (ibv_reg_mr(3)). Nothing is touched and nothing
// pinned. Memory that shall be paged by userfaultfd comes from mr.Alloc; memory
// of the Go heap works too, by ordinary paging. Errors are those of
// mr.Table.Register, or ErrNoMem at MaxMR.
func (p *PD) RegMR(b []byte, access mr.Access) (*MR, error) {
	m, err := p.Register(MRAttr{Addr: uintptr(unsafe.Pointer(unsafe.SliceData(b))), Length: uint64(len(b)), Access: access})
	if m != nil {
		m.keep = b
	}
	return m, err
}

// Register registers a range by its address (ibv_reg_mr_iova2(3)).
func (p *PD) Register(a MRAttr) (*MR, error) {
	if a.Length > maxMRSize && (a.Length != math.MaxUint64 || a.Addr != 0) {
		return nil, fmt.Errorf("region of %d bytes, at most %d: %w", a.Length, uint64(maxMRSize), ErrInvalid)
	}
	return p.admit(nil, func() (*mr.Region, error) {
		return p.d.keys.Register(mr.RegAttr{PD: p.num, Addr: a.Addr, Length: a.Length, IOVA: a.IOVA, HaveIOVA: a.HaveIOVA,
			Access: a.Access, Pin: a.Pin, Invalidatable: a.Invalidatable})
	})
}

// admit enters a new region, of device memory if m is not nil, in the device's books.
func (p *PD) admit(m *DM, register func() (*mr.Region, error)) (*MR, error) {
	d := p.d
	if err := d.alive(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.mrs) >= maxMR {
		return nil, fmt.Errorf("%d regions: %w", maxMR, ErrNoMem)
	}
	if err := p.ref(); err != nil {
		return nil, err
	}
	r, err := register()
	if err != nil {
		p.refs--
		return nil, fmt.Errorf("register memory: %w", err)
	}
	region := &MR{d: d, pd: p, dm: m}
	region.region.Store(r)
	if m != nil {
		m.refs++
	}
	d.mrs[region] = struct{}{}
	return region, nil
}

// LKey is the key that names the region in lists of work requests. RKey is the same
// number. Both stay for the region's life.
func (m *MR) LKey() mr.Key { return m.region.Load().LKey() }

// RKey is the key that the peer uses.
func (m *MR) RKey() mr.Key { return m.region.Load().RKey() }

// Addr is where the region starts in memory.
func (m *MR) Addr() uintptr { return m.region.Load().Addr() }

// Length is the region's length in bytes.
func (m *MR) Length() uint64 { return m.region.Load().Length() }

// IOVA is the address that work requests use for the first byte.
func (m *MR) IOVA() uint64 { return m.region.Load().IOVA() }

// Access is the region's rights.
func (m *MR) Access() mr.Access { return m.region.Load().Access() }

// Paging says who brings absent pages in.
func (m *MR) Paging() mr.Paging { return m.region.Load().Paging() }

// Stats counts page events of requests to this region.
func (m *MR) Stats() mr.Counters { return m.region.Load().Stats() }

// Present is how many bytes of the region's pages are in memory now, by mincore(2).
func (m *MR) Present() (uint64, error) { return m.region.Load().Present() }

// PD is the domain the region belongs to.
func (m *MR) PD() *PD {
	m.d.mu.Lock()
	defer m.d.mu.Unlock()
	return m.pd
}

// Reregister changes the region (ibv_rereg_mr(3)): to the domain pd with mr.ChangePD,
// to a.Access with mr.ChangeAccess, to the range of a with mr.ChangeTranslation. Its
// keys stay. Requests find it as it was or as it is. When it fails nothing has changed;
// errors are those of Register, ErrClosed, and mr.ErrBound while memory windows are bound
// to it.
func (m *MR) Reregister(what mr.Rereg, pd *PD, a MRAttr) error {
	d := m.d
	if err := d.alive(); err != nil {
		return err
	}
	attr := mr.RegAttr{Addr: a.Addr, Length: a.Length, IOVA: a.IOVA, HaveIOVA: a.HaveIOVA, Access: a.Access}
	if what&mr.ChangeTranslation != 0 && a.Length > maxMRSize {
		return fmt.Errorf("region of %d bytes, at most %d: %w", a.Length, uint64(maxMRSize), ErrInvalid)
	}
	if what&mr.ChangePD != 0 && (pd == nil || pd.d != d) {
		return fmt.Errorf("protection domain: %w", ErrInvalid)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if m.dead {
		return ErrClosed
	}
	if what&mr.ChangePD != 0 {
		if err := pd.ref(); err != nil {
			return err
		}
		attr.PD = pd.num
	}
	r, err := m.region.Load().Reregister(what, attr, allShards{d})
	switch {
	case err != nil:
		if what&mr.ChangePD != 0 {
			pd.refs--
		}
		return fmt.Errorf("re-register memory: %w", err)
	case what&mr.ChangePD != 0:
		m.pd.refs--
		m.pd = pd
	}
	if what&mr.ChangeTranslation != 0 {
		m.keep = nil
	}
	m.region.Store(r)
	return nil
}

// Dereg ends the registration (ibv_dereg_mr(3)). When it returns, no request
// touches the memory any more. ErrClosed twice, mr.ErrBound while memory windows are
// bound to it.
func (m *MR) Dereg() error {
	d := m.d
	if d.closed.Load() {
		return ErrClosed
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if m.dead {
		return ErrClosed
	}
	return m.teardown()
}

// teardown is called with d.mu held.
func (m *MR) teardown() error {
	if err := m.region.Load().Deregister(); err != nil {
		return fmt.Errorf("deregister memory: %w", err)
	}
	delete(m.d.mrs, m)
	m.dead, m.keep = true, nil
	m.pd.refs--
	if m.dm != nil {
		m.dm.refs--
	}
	return nil
}
