// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/qp"
)

// AdviseFlush has AdviseMR return when all is done (IBV_ADVISE_MR_FLAG_FLUSH).
const AdviseFlush uint32 = 1

// maxAdvice is how many advices are followed at the same time by goroutines of their
// own. Beyond that, those who give advice follow it themselves.
const maxAdvice = 4

// AdviseMR gives advice about ranges of regions that were registered on demand
// (ibv_advise_mr(3)). Without AdviseFlush it only looks whether the advice makes
// sense, and what is done goes on after it has returned. Errors: ErrNotSupported for
// an advice that there is not; ErrInvalid for flags, for no range, and for regions that
// were not registered with mr.OnDemand; ErrFault for an unknown key, and ranges outside
// the region or not mapped; ErrPermission for a region of another domain, and for
// mr.PrefetchWrite of one without local write access; ErrNoMem.
func (p *PD) AdviseMR(advice mr.Advice, flags uint32, ranges []qp.SGE) error {
	d := p.d
	switch {
	case d.alive() != nil:
		return d.alive()
	case advice > mr.PrefetchNoFault:
		return fmt.Errorf("advice %d: %w", advice, ErrNotSupported)
	case flags&^AdviseFlush != 0 || len(ranges) == 0:
		return fmt.Errorf("advice with flags %#x about %d ranges: %w", flags, len(ranges), ErrInvalid)
	}
	regions := make([]*mr.Region, len(ranges))
	for i, s := range ranges {
		r := d.keys.Lookup(s.LKey)
		switch {
		case r == nil:
			return fmt.Errorf("advice about unknown key %#x: %w", s.LKey, ErrFault)
		case r.PD() != p.num:
			return fmt.Errorf("advice about another domain's region: %w", ErrPermission)
		case r.Access()&mr.OnDemand == 0:
			return fmt.Errorf("advice about a region that is not on demand: %w", ErrInvalid)
		case advice == mr.PrefetchWrite && r.Access()&mr.LocalWrite == 0:
			return fmt.Errorf("advice to prefetch for writing: %w", ErrPermission)
		}
		if _, err := d.keys.Check(s.LKey, p.num, s.Addr, uint64(s.Length), 0); err != nil {
			return fmt.Errorf("advice about %d bytes at %#x: %w: %w", s.Length, s.Addr, err, ErrFault)
		}
		regions[i] = r
	}
	if flags&AdviseFlush != 0 {
		return d.follow(advice, regions, ranges)
	}
	select {
	case d.advising <- struct{}{}:
	default:
		return d.follow(advice, regions, ranges)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed.Load() { // since alive looked
		return ErrClosed
	}
	d.advisers.Add(1)
	ranges = append([]qp.SGE(nil), ranges...)
	go func() {
		_ = d.follow(advice, regions, ranges) // an advice promises nothing
		<-d.advising
		d.advisers.Done()
	}()
	return nil
}

// advicePiece is how many bytes are prefetched at a time: between pieces others have
// their turn, and a device that closes is not waited for.
const advicePiece = 16 << 20

// follow does what an advice says.
func (d *Device) follow(advice mr.Advice, regions []*mr.Region, ranges []qp.SGE) error {
	for i, r := range regions {
		for at, left := ranges[i].Addr, uint64(ranges[i].Length); left > 0; {
			if err := d.alive(); err != nil {
				return err
			}
			n := min(left, advicePiece)
			switch err := d.space.Prefetch(r, at, n, advice); err {
			case nil, mr.ErrBusy: // an advice promises nothing
			case mr.ErrKey: // deregistered meanwhile
				return fmt.Errorf("prefetch: %w: %w", err, ErrFault)
			default:
				return fmt.Errorf("prefetch: %w", err)
			}
			at, left = at+n, left-n
		}
	}
	return nil
}

// AllocNullMR makes a null region (ibv_alloc_null_mr(3)): what is written to it goes
// nowhere, and zeros are read from it, at any address. Only its LKey is for use: peers
// have no right to it. Errors as for RegMR.
func (p *PD) AllocNullMR() (*MR, error) {
	return p.admit(nil, func() (*mr.Region, error) { return p.d.keys.RegisterNull(p.num) })
}
