// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
import "C"

import (
	"time"

	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
)

// Package mr's numbers in tapverbs_dv.h's; this does not compile when they differ.
var (
	_ [C.TV_EVENT_MR_SUSPENDED]byte  = [mr.RegionSuspended]byte{}
	_ [C.TV_EVENT_MR_RESUMED]byte    = [mr.RegionResumed]byte{}
	_ [C.TV_EVENT_MR_ELIMINATED]byte = [mr.RegionEliminated]byte{}
	_ [C.TV_EVENT_MR_MOVED]byte      = [mr.RegionMoved]byte{}
)

//export tvSetSuspend
func tvSetSuspend(h C.tv_handle, a *C.struct_tv_suspend_attr) C.int {
	stackroom.Reserve()
	if a.mode > 0xff || a.hold_buffer > 1<<62 {
		return errno(provider.ErrInvalid)
	}
	m := of[*provider.MR](h)
	if err := m.SetSuspendMode(mr.SuspendMode(a.mode), time.Duration(a.rnr_delay)*time.Microsecond); err != nil {
		return errno(err)
	}
	if a.hold_buffer == 0 {
		return 0
	}
	return errno(m.SetHoldBuffer(int64(a.hold_buffer)))
}

//export tvSuspendMR
func tvSuspendMR(h C.tv_handle) C.int {
	stackroom.Reserve()
	return errno(of[*provider.MR](h).Suspend())
}

//export tvResumeMR
func tvResumeMR(h C.tv_handle) C.int {
	stackroom.Reserve()
	return errno(of[*provider.MR](h).Resume())
}

//export tvReplaceMR
func tvReplaceMR(h C.tv_handle, iova, length, with C.uint64_t) C.int {
	stackroom.Reserve()
	return errno(of[*provider.MR](h).Replace(uint64(iova), uint64(length), uintptr(with)))
}

//export tvMoveMR
func tvMoveMR(h C.tv_handle, addr C.uint64_t) C.int {
	stackroom.Reserve()
	return errno(of[*provider.MR](h).MoveTo(uintptr(addr)))
}

//export tvEliminateMR
func tvEliminateMR(h C.tv_handle) C.int {
	stackroom.Reserve()
	return errno(of[*provider.MR](h).Eliminate())
}

//export tvMRFaultPolicy
func tvMRFaultPolicy(h C.tv_handle, policy C.uint32_t) C.int {
	stackroom.Reserve()
	return errno(of[*provider.MR](h).SetFaultPolicy(mr.FaultPolicy(min(policy, 0xff))))
}

//export tvQPFaultPolicy
func tvQPFaultPolicy(h C.tv_handle, policy C.uint32_t) C.int {
	stackroom.Reserve()
	p := mr.FaultByRegion
	if policy != 1<<32-1 {
		p = mr.FaultPolicy(min(policy, 0xfe))
	}
	return errno(of[*provider.QP](h).SetFaultPolicy(p))
}

// maxDVEvents bounds the events of a channel that nobody asks for them: those that may
// come any number of times are dropped beyond.
const maxDVEvents = 4096

// dvChannel is a channel for events of regions.
type dvChannel struct {
	events tokens[C.struct_tv_dv_event]
	mask   uint64
}

func (ch *dvChannel) end() { ch.events.end() }

func (ch *dvChannel) wants(typ uint32) bool { return ch.mask>>typ&1 != 0 }

//export tvCreateDVChannel
func tvCreateDVChannel(h C.tv_handle, fd C.int32_t, mask C.uint64_t, out *C.tv_handle) C.int {
	stackroom.Reserve()
	c := object[*ectx](h)
	const types = 1<<C.TV_EVENT_MR_SUSPENDED | 1<<C.TV_EVENT_MR_RESUMED | 1<<C.TV_EVENT_MR_ELIMINATED | 1<<C.TV_EVENT_MR_MOVED |
		1<<C.TV_EVENT_EVICTION_STOPPED
	if mask == 0 || mask&^types != 0 {
		return errno(provider.ErrInvalid)
	}
	ch := &dvChannel{mask: uint64(mask)}
	ch.events.fd = int(fd)
	stop := c.dev.d.OnRegion(func(key mr.Key, kind mr.RegionEventKind) {
		if typ := uint32(kind); kind <= mr.RegionMoved && ch.wants(typ) {
			c.tell(ch, key, typ)
		}
	})
	quiet := func() {}
	if ch.wants(C.TV_EVENT_EVICTION_STOPPED) {
		quiet = c.dev.d.Space().OnEvictionStopped(func(err error) {
			ch.events.put(C.struct_tv_dv_event{_type: C.TV_EVENT_EVICTION_STOPPED, error: C.int32_t(errno(err))})
		})
	}
	*out = c.add(rankDVChannel, ch, func() error { stop(); quiet(); return nil })
	c.dev.mu.Lock()
	if c.dev.gone { // since the context was made
		ch.end()
	}
	c.dev.mu.Unlock()
	return 0
}

// tell puts an event of a region of the context's into a channel.
func (c *ectx) tell(ch *dvChannel, key mr.Key, typ uint32) {
	c.dev.mu.Lock()
	defer c.dev.mu.Unlock()
	o, ok := c.dev.owners[key]
	if !ok || o.ctx != c || typ != C.TV_EVENT_MR_ELIMINATED && ch.events.len() >= maxDVEvents {
		return
	}
	ch.events.put(C.struct_tv_dv_event{_type: C.uint32_t(typ), has_object: 1, cookie: o.cookie})
}

//export tvDVTake
func tvDVTake(h C.tv_handle, out *C.struct_tv_dv_event) C.int {
	stackroom.Reserve()
	ev, no := of[*dvChannel](h).events.take()
	if no == 0 {
		*out = ev
	}
	return no
}

// forgetRegion drops the events of a region that is no more.
func (c *ectx) forgetRegion(cookie C.tv_cookie) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, it := range c.items {
		if ch, ok := it.obj.(*dvChannel); ok {
			ch.events.drop(func(e *C.struct_tv_dv_event) bool { return e.has_object != 0 && e.cookie == cookie })
		}
	}
}
