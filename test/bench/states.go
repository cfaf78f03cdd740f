// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
)

const pageSize = 4096

// policies are what a request finds that meets a page in the store.
var policies = [...]string{"hybrid", "stall", "rnr", "drop", "error"}

// use is what requests to a region have cost, in pages.
type use struct{ Minor, Major, Evictions, RNRs uint64 }

func usage(m *provider.MR) (use, error) {
	u, err := m.Usage()
	return use{u.FaultsMinor, u.FaultsMajor, u.Evictions, u.RNRs}, err
}

// since is what came on top of what was there before: evictions are counted by address,
// and regions follow each other at the same.
func (u use) since(v use) use {
	return use{u.Minor - v.Minor, u.Major - v.Major, u.Evictions - v.Evictions, u.RNRs - v.RNRs}
}

// prepare sets what a region is to have before its first use.
func prepare(m *provider.MR, budget uint64, policy string) error {
	if budget > 0 {
		if err := m.SetBudget(budget); err != nil {
			return err
		}
	}
	if policy == "" {
		return nil
	}
	p, err := mr.ParseFaultPolicy(policy)
	if err != nil {
		return err
	}
	return m.SetFaultPolicy(p)
}

// state puts the pages of a range in a state, and sees to it that most are in it.
func (o *owner) state(state string, off, n uint64) error {
	b := o.mem.Bytes()[off : off+n]
	if state == stateAbsent {
		return unix.Madvise(b, unix.MADV_DONTNEED)
	}
	for i := uint64(0); i < n; i += pageSize {
		b[i]++ // it has content, that was there before or not
	}
	var to mr.Level
	switch state {
	case stateResident:
		return nil
	case stateLimbo:
		to = mr.Limbo
	case stateStored:
		to = mr.Stored
	default:
		return fmt.Errorf("no state %q", state)
	}
	if _, err := o.reg.Evict(o.reg.IOVA()+off, n, to); err != nil {
		return err
	}
	u, err := o.reg.Usage()
	if err != nil {
		return err
	}
	if got := map[mr.Level]uint64{mr.Limbo: u.Limbo, mr.Stored: u.Stored}[to]; got < n-n/16 {
		return fmt.Errorf("%d of %d bytes are in %s: %+v", got, n, state, u)
	}
	return nil
}
