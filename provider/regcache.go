// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/mr/regcache"
)

// RegCache is a cache of a domain's registrations; see package regcache.
type RegCache = regcache.Cache[*MR]

// RegCacheEntry is what RegCache.Get gives, until RegCache.Put.
type RegCacheEntry = regcache.Entry[*MR]

// NewRegCache makes a cache of registrations in a protection domain, which must not be
// deallocated before the cache is closed and all is put back. mr.ErrInvalid for options
// that cannot be.
func NewRegCache(pd *PD, o regcache.Options) (*RegCache, error) {
	return regcache.New(pd.d.Space(), func(addr uintptr, length uint64, access mr.Access) (*MR, error) {
		return pd.Register(MRAttr{Addr: addr, Length: length, Access: access})
	}, o)
}

// Followed says whether what happens to the region's memory is heard of (mr.Region.Followed).
func (m *MR) Followed() bool { return m.region.Load().Followed() }

// Lost calls f with each range of the region's memory that was unmapped (mr.Region.Lost).
func (m *MR) Lost(f func(start, end uintptr)) { m.region.Load().Lost(f) }
