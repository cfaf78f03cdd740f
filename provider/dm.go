// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"
	"unsafe"

	"github.com/tapverbs/tapverbs/mr"
)

// Limits of device memory.
const (
	maxDMSize  = 64 << 20 // bytes, of all that a device has given out
	dmAlign    = 4        // what ibv_memcpy_to_dm and its inverse take, as the first devices with such memory do
	dmGranule  = 64       // allocations are of whole granules, and begin at one
	maxDMAlign = 26       // log2 of maxDMSize
	dmAccess   = mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead | mr.RemoteAtomic | mr.ZeroBased | mr.RelaxedOrdering
)

// DM is device memory (ibv_alloc_dm(3)): memory that belongs to the device and not to
// the application, of which it can be given a bounded amount. It begins as zeros.
type DM struct {
	d     *Device
	mem   *mr.Memory
	bytes []byte
	size  int  // what counts against maxDMSize; guarded by d.mu, as are
	refs  int  // regions, and
	dead  bool // that it was freed
}

// AllocDM gives n bytes of device memory, aligned to 1<<logAlign bytes
// (ibv_alloc_dm(3)). ErrInvalid for no bytes or an alignment beyond 64 MiB, ErrNoMem
// when there are not so many left of the device's MaxDMSize.
func (d *Device) AllocDM(n uint64, logAlign int) (*DM, error) {
	if err := d.alive(); err != nil {
		return nil, err
	}
	if n == 0 || logAlign < 0 || logAlign > maxDMAlign {
		return nil, fmt.Errorf("%d bytes of device memory, aligned to 1<<%d: %w", n, logAlign, ErrInvalid)
	}
	if n > maxDMSize {
		return nil, fmt.Errorf("%d bytes of device memory, at most %d: %w", n, maxDMSize, ErrNoMem)
	}
	size := (int(n) + dmGranule - 1) &^ (dmGranule - 1)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed.Load() { // since alive looked
		return nil, ErrClosed
	}
	if d.dmUsed+size > maxDMSize {
		return nil, fmt.Errorf("%d bytes of device memory, %d of %d are in use: %w", n, d.dmUsed, maxDMSize, ErrNoMem)
	}
	// Mappings begin at pages: for more, memory is mapped from which a piece is cut.
	align := uintptr(1) << logAlign
	slack := 0
	if align > uintptr(4096) {
		slack = int(align)
	}
	mem, err := mr.Alloc(size + slack)
	if err != nil {
		return nil, fmt.Errorf("device memory: %w", err)
	}
	off := int(-mem.Addr() & (align - 1))
	m := &DM{d: d, mem: mem, bytes: mem.Bytes()[off : off+int(n) : off+int(n)], size: size}
	d.dmUsed += size
	d.dms[m] = struct{}{}
	return m, nil
}

// Len is how many bytes the memory has.
func (m *DM) Len() uint64 { return uint64(len(m.bytes)) }

// Addr is where the memory is, for a driver that copies to and from it by itself.
func (m *DM) Addr() uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(m.bytes))) }

// CopyTo copies to offset off of device memory (ibv_memcpy_to_dm(3)). ErrInvalid
// beyond its end, and unless offset and length are multiples of 4.
func (m *DM) CopyTo(off uint64, src []byte) error {
	b, err := m.part(off, len(src))
	copy(b, src)
	return err
}

// CopyFrom is the inverse of CopyTo (ibv_memcpy_from_dm(3)).
func (m *DM) CopyFrom(dst []byte, off uint64) error {
	b, err := m.part(off, len(dst))
	copy(dst, b)
	return err
}

func (m *DM) part(off uint64, n int) ([]byte, error) {
	m.d.mu.Lock()
	defer m.d.mu.Unlock()
	switch {
	case m.dead || m.d.closed.Load():
		return nil, ErrClosed
	case m.d.sh.gone.Load():
		return nil, ErrGone
	case off%dmAlign != 0 || n%dmAlign != 0 || off > m.Len() || uint64(n) > m.Len()-off:
		return nil, fmt.Errorf("%d bytes at %d of device memory: %w", n, off, ErrInvalid)
	}
	return m.bytes[off:][:n], nil
}

// RegDM makes a memory region of n bytes at offset off of device memory
// (ibv_reg_dm_mr(3)). Requests address it from 0, as access must say by mr.ZeroBased.
// No bytes are a region too. ErrInvalid for that, for access flags that device memory does not have and for a
// range that it has not; otherwise as RegMR.
func (p *PD) RegDM(m *DM, off, n uint64, access mr.Access) (*MR, error) {
	if m == nil || m.d != p.d || access&mr.ZeroBased == 0 || access&^dmAccess != 0 ||
		off > m.Len() || n > m.Len()-off {
		return nil, fmt.Errorf("region of device memory: %w", ErrInvalid)
	}
	return p.admit(m, func() (*mr.Region, error) {
		if m.dead {
			return nil, ErrClosed
		}
		return p.d.keys.Register(mr.RegAttr{PD: p.num, Addr: m.Addr() + uintptr(off), Length: n, Access: access, Device: true})
	})
}

// Free gives the memory back (ibv_free_dm(3)). ErrBusy while it has regions, ErrClosed
// twice.
func (m *DM) Free() error {
	d := m.d
	if d.closed.Load() {
		return ErrClosed
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case m.dead:
		return ErrClosed
	case m.refs > 0:
		return fmt.Errorf("device memory has %d regions: %w", m.refs, ErrBusy)
	}
	return m.teardown()
}

// teardown is called with d.mu held.
func (m *DM) teardown() error {
	m.dead = true
	m.d.dmUsed -= m.size
	delete(m.d.dms, m)
	return m.mem.Close()
}
