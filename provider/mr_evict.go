// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/tapverbs/tapverbs/mr"
)

// Evict takes pages of the region out of memory, to a level, and says how many have gone;
// see mr.Space.Evict.
func (m *MR) Evict(iova, n uint64, to mr.Level) (pages int, err error) {
	err = m.do("evict pages of", func(r *mr.Region) (err error) {
		pages, err = m.d.space.Evict(r, iova, n, to)
		return err
	})
	return pages, err
}

// SetBudget sets how many bytes of the region may be in memory, 0 for any number; see
// mr.Region.SetBudget.
func (m *MR) SetBudget(bytes uint64) error {
	return m.do("set the budget of", func(r *mr.Region) error { return r.SetBudget(bytes) })
}

// SetBudget sets how many bytes the regions of the domain may take together, 0 for any
// number; see mr.Table.SetBudget. Parent domains share that of their domain. The budget of
// all regions of the process is Device.Space's.
func (p *PD) SetBudget(bytes uint64) error {
	if err := p.d.alive(); err != nil {
		return err
	}
	p.d.mu.Lock()
	dead := p.dead
	p.d.mu.Unlock()
	if dead {
		return ErrClosed
	}
	base := p
	for base.base != nil {
		base = base.base
	}
	base.budget.Store(true)
	if err := p.d.keys.SetBudget(p.num, bytes); err != nil {
		return fmt.Errorf("set the budget of a protection domain: %w", err)
	}
	return nil
}

// NewStore makes the store of evicted pages that a word names: "compressed", "file:DIR", or
// "file" for one in the directory for temporary files. ErrInvalid for another word.
func NewStore(spec string) (mr.Store, error) {
	kind, dir, _ := strings.Cut(spec, ":")
	switch {
	case kind == "file":
		return mr.NewFileStore(dir)
	case spec == "compressed":
		return mr.NewCompressedStore()
	}
	return nil, fmt.Errorf("store %q is neither compressed nor file:DIR: %w", spec, ErrInvalid)
}

// ParseBytes reads a number of bytes, which may end in K, M or G (of 1024, 1024² and
// 1024³). ErrInvalid if it is none.
func ParseBytes(s string) (uint64, error) {
	digits, shift := s, 0
	if i := len(s) - 1; i > 0 {
		if k := strings.IndexByte("KMG", s[i]&^0x20); k >= 0 {
			digits, shift = s[:i], 10*(k+1)
		}
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil || n<<shift>>shift != n {
		return 0, fmt.Errorf("%q is not a number of bytes, such as 256M: %w", s, ErrInvalid)
	}
	return n << shift, nil
}

// limitMemory does what Budget and Store of the Config say.
func (d *Device) limitMemory() error {
	if spec := d.cfg.Store; spec != "" {
		st, err := NewStore(spec)
		if err != nil {
			return err
		}
		if err := d.space.SetStore(st); err != nil {
			err = errors.Join(err, st.Close())
			// The process has one store. Another device has been there before.
			if !errors.Is(err, mr.ErrBusy) {
				return err
			}
		}
	}
	if d.cfg.Budget != 0 {
		if err := d.space.SetBudget(d.cfg.Budget); err != nil {
			return fmt.Errorf("budget of %d bytes: %w", d.cfg.Budget, err)
		}
	}
	return nil
}
