// SPDX-License-Identifier: Apache-2.0

package provider

import "github.com/tapverbs/tapverbs/mr"

// Usage says where the region's pages are, and what became of them; see mr.Region.Usage.
func (m *MR) Usage() (mr.Usage, error) { return m.region.Load().Usage() }

// Usage says where the pages of all regions of the domain are, and what became of them; see
// mr.Table.Usage. ErrClosed once it is gone.
func (p *PD) Usage() (mr.Usage, error) {
	p.d.mu.Lock()
	dead := p.dead || p.d.closed.Load()
	p.d.mu.Unlock()
	if dead {
		return mr.Usage{}, ErrClosed
	}
	return p.d.keys.Usage(p.num)
}

// Map says where the region's pages are, for so many parts of about the same length; see
// mr.Region.Map.
func (m *MR) Map(parts int) []mr.Residency { return m.region.Load().Map(parts) }
