// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"errors"
	"fmt"
	"time"

	"github.com/tapverbs/tapverbs/mr"
)

// do does something to the region behind m, which Reregister may replace meanwhile.
func (m *MR) do(what string, f func(*mr.Region) error) error {
	if err := m.d.alive(); err != nil {
		return err
	}
	for {
		r := m.region.Load()
		err := f(r)
		if err == nil {
			return nil
		}
		if errors.Is(err, mr.ErrClosed) {
			m.d.mu.Lock() // Reregister has it until both have changed
			again := m.region.Load() != r
			m.d.mu.Unlock()
			if again {
				continue
			}
		}
		return fmt.Errorf("%s memory region: %w", what, err)
	}
}

// SetSuspendMode says what requests of peers do while the region is suspended, and how
// long an RNR NAK asks for, 0 for 1 ms that grow; see mr.Region.SetSuspendMode.
func (m *MR) SetSuspendMode(mode mr.SuspendMode, delay time.Duration) error {
	return m.do("set how to suspend", func(r *mr.Region) error { return r.SetSuspendMode(mode, delay) })
}

// SetHoldBuffer sets how many bytes of packets the region may hold while it is suspended;
// see mr.Region.SetHoldBuffer.
func (m *MR) SetHoldBuffer(bytes int64) error {
	return m.do("set the hold buffer of", func(r *mr.Region) error { return r.SetHoldBuffer(bytes) })
}

// Suspend keeps the device out of the region's memory until as many calls of Resume; see
// mr.Region.Suspend. Work requests that name the region are held, and those of peers do
// as SetSuspendMode says.
func (m *MR) Suspend() error { return m.do("suspend", (*mr.Region).Suspend) }

// Resume ends one Suspend; after the last, all goes on. See mr.Region.Resume.
func (m *MR) Resume() error { return m.do("resume", (*mr.Region).Resume) }

// Replace puts the pages at with in the place of those at iova of the suspended region;
// see mr.Region.Replace.
func (m *MR) Replace(iova, n uint64, with uintptr) error {
	return m.do("replace pages of", func(r *mr.Region) error { return r.Replace(iova, n, with) })
}

// MoveTo puts the suspended region on other memory of the same length; see
// mr.Region.MoveTo.
func (m *MR) MoveTo(addr uintptr) error {
	return m.do("move", func(r *mr.Region) error { return r.MoveTo(addr) })
}

// Eliminate ends the region by force, with windows bound and work under way, which fails;
// see mr.Region.Eliminate. Dereg is still to be called.
func (m *MR) Eliminate() error { return m.do("eliminate", (*mr.Region).Eliminate) }

// SetFaultPolicy sets what requests do that meet content of the region in the store; see
// mr.FaultPolicy.
func (m *MR) SetFaultPolicy(p mr.FaultPolicy) error {
	return m.do("set the fault policy of", func(r *mr.Region) error { return r.SetFaultPolicy(p) })
}

// FaultPolicy is what SetFaultPolicy has set.
func (m *MR) FaultPolicy() mr.FaultPolicy { return m.region.Load().FaultPolicy() }

// OnRegion has f called with what happens to the device's regions, which it knows by their
// keys, as mr.Space.OnRegion does.
func (d *Device) OnRegion(f func(key mr.Key, kind mr.RegionEventKind)) (stop func()) {
	return d.space.OnRegion(func(e mr.RegionEvent) {
		if e.Region.Table() == d.keys {
			f(e.Region.LKey(), e.Kind)
		}
	})
}
