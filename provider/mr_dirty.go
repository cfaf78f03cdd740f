// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"

	"github.com/tapverbs/tapverbs/mr"
)

// TrackDirty begins or ends to note which pages of the region are written; see
// mr.Region.TrackDirty, also for errors.
func (m *MR) TrackDirty(on bool) error {
	if err := m.region.Load().TrackDirty(on); err != nil {
		return fmt.Errorf("track what is written: %w", err)
	}
	return nil
}

// Dirty lists what was written of the region since it was tracked or last asked for with
// clear set, by the application or by requests; see mr.Region.Dirty, also for errors.
func (m *MR) Dirty(clear bool) ([]mr.Range, error) {
	rs, err := m.region.Load().Dirty(clear)
	if err != nil {
		return nil, fmt.Errorf("ask what was written: %w", err)
	}
	return rs, nil
}
