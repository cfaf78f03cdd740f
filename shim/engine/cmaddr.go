// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
import "C"

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/cm"
	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/wire"
)

// Addresses of identifiers: binding, resolving, listening, joining groups.

const cmHopLimit = 64

// addrPort takes over an address; the zero AddrPort if there is none.
func addrPort(a *C.struct_tv_cm_addr) netip.AddrPort {
	if a == nil {
		return netip.AddrPort{}
	}
	var b [16]byte
	for i := range b {
		b[i] = byte(a.addr[i])
	}
	switch a.family {
	case 4:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[:])), uint16(a.port))
	case 6, 128:
		return netip.AddrPortFrom(netip.AddrFrom16(b), uint16(a.port))
	}
	return netip.AddrPort{}
}

// fill is the other way.
func fill(a *C.struct_tv_cm_addr, from netip.AddrPort, scope C.uint32_t) {
	*a = C.struct_tv_cm_addr{port: C.uint16_t(from.Port()), scope: scope}
	switch addr := from.Addr(); {
	case addr.Is4():
		a.family = 4
		for i, b := range addr.As4() {
			a.addr[i] = C.uint8_t(b)
		}
	case addr.Is6():
		a.family = 6
		for i, b := range addr.As16() {
			a.addr[i] = C.uint8_t(b)
		}
	}
}

// has says whether an address is the device's.
func (id *cmID) has(a netip.Addr) bool {
	for _, g := range id.c.dev.d.GIDs() {
		if g.GID.Addr() == a.Unmap() {
			return true
		}
	}
	return false
}

//export tvCMBind
func tvCMBind(h C.tv_handle, a *C.struct_tv_cm_addr) C.int {
	stackroom.Reserve()
	id := of[*cmID](h)
	id.mu.Lock()
	no := id.bind(addrPort(a), a.scope)
	service := wire.ServiceID(id.ps, id.src.Port())
	id.mu.Unlock()
	if no == 0 {
		id.expect(service)
	}
	return C.int(no)
}

// soon is how long requests for a port that is bound are not refused, though nobody listens
// there yet.
const soon = 5 * time.Second

// expect: the program has chosen a port, and may listen.
func (id *cmID) expect(service uint64) {
	id.c.dev.d.CMExpect(service, soon)
	id.mu.Lock()
	id.expected = service
	id.mu.Unlock()
}

// bind is rdma_bind_addr(3). Called with id.mu held.
func (id *cmID) bind(a netip.AddrPort, scope C.uint32_t) unix.Errno {
	addr := a.Addr()
	switch {
	case id.state != cmIdle, addr.Is6() && addr.IsLinkLocalUnicast() && scope == 0:
		return unix.EINVAL
	case addr.IsUnspecified():
	case addr.Unmap().IsLoopback(): // an interface without a device
		return unix.ENODEV
	case !id.has(addr):
		return unix.EADDRNOTAVAIL
	}
	if p := a.Port(); p != 0 && p < firstFree && !mayBindLow() {
		return unix.EACCES
	}
	port, no := id.c.dev.ports.bind(id, addr, a.Port())
	if no != 0 {
		return no
	}
	id.src, id.scope[0], id.port = netip.AddrPortFrom(addr, port), scope, true
	id.state, id.bound = cmAddrBound, !addr.IsUnspecified()
	return 0
}

// firstFree is the first port that needs no privilege.
const firstFree = 1024

// mayBindLow says whether the thread may have ports below that.
func mayBindLow() bool {
	var caps [2]unix.CapUserData
	err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &caps[0])
	return err == nil && caps[0].Effective>>unix.CAP_NET_BIND_SERVICE&1 != 0
}

// unspecified is the address that stands for any of a family.
func unspecified(like netip.Addr) netip.Addr {
	if like.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

//export tvCMResolveAddr
func tvCMResolveAddr(h C.tv_handle, src, dst *C.struct_tv_cm_addr, timeout C.int32_t) C.int {
	stackroom.Reserve()
	id := of[*cmID](h)
	from, to := addrPort(src), addrPort(dst)
	id.mu.Lock()
	if id.state == cmIdle {
		var scope C.uint32_t
		if from.IsValid() {
			scope = src.scope
		} else {
			from = netip.AddrPortFrom(unspecified(to.Addr()), 0)
		}
		if no := id.bind(from, scope); no != 0 {
			id.mu.Unlock()
			return C.int(no)
		}
	}
	if id.state != cmAddrBound || id.src.Addr().Is4() != to.Addr().Is4() {
		id.mu.Unlock()
		return C.int(unix.EINVAL)
	}
	id.state = cmAddrQuery
	id.scope[1] = dst.scope
	at := id.src.Addr()
	ctx, stop := context.WithCancel(context.Background())
	if timeout >= 0 {
		ctx, stop = context.WithTimeout(context.Background(), time.Duration(timeout)*time.Millisecond)
	}
	id.stop = stop
	id.mu.Unlock()

	// fail goes back to where it was.
	fail := func() {
		id.mu.Lock()
		id.state = cmAddrBound
		id.mu.Unlock()
		stop()
	}
	d := id.c.dev.d
	if at.IsUnspecified() {
		at = netip.Addr{}
	}
	switch {
	case to.Addr().IsUnspecified(): // ourselves
		own := at
		for _, g := range d.GIDs() {
			if a := g.GID.Addr(); !own.IsValid() && a.Is4() == to.Addr().Is4() && !a.IsLinkLocalUnicast() {
				own = a
			}
		}
		if !own.IsValid() {
			own = d.GIDs()[0].GID.Addr()
		}
		to = netip.AddrPortFrom(own, to.Port())
	case to.Addr().Unmap().IsLoopback():
		// There is a route, over an interface that has no device.
		id.resolved(netip.Addr{}, to, unix.ENODEV)
		stop()
		return 0
	}
	found, _, err := d.Route(at, to.Addr())
	if err != nil {
		fail()
		return cmErrno(err)
	}
	go func() {
		defer stop()
		for {
			err := d.Reach(ctx, found, to.Addr())
			if errors.Is(err, provider.ErrTimeout) && ctx.Err() == nil {
				continue // it is asked for until the program's time is over
			}
			if err == nil {
				id.resolved(found, to, 0)
			} else if !errors.Is(err, context.Canceled) { // that is the identifier's end
				id.resolved(found, to, unix.Errno(cmErrno(err)))
			}
			return
		}
	}()
	return 0
}

// resolved is the end of resolving an address.
func (id *cmID) resolved(src netip.Addr, dst netip.AddrPort, no unix.Errno) {
	mtu := uint8(id.c.dev.d.QueryPort().ActiveMTU)
	id.mu.Lock()
	defer id.mu.Unlock()
	if no != 0 {
		id.state = cmAddrBound
		id.dst = dst
		id.put(cmEvent{typ: cmAddrError, status: -int(no)})
		return
	}
	if dst.Addr().Is4In6() {
		src = netip.AddrFrom16(src.As16())
	}
	id.src, id.dst = netip.AddrPortFrom(src, id.src.Port()), dst
	id.c.dev.ports.set(id, func(p *cmPort) { p.addr = src })
	id.bound, id.state = true, cmAddrDone
	id.route = cm.Route{MTU: mtu, AckTimeout: cmAckTimeout(7), PKey: wire.DefaultPKey, FlowLabel: rand.Uint32() & 0xfffff, TrafficClass: id.tos, HopLimit: cmHopLimit}
	id.put(cmEvent{typ: cmAddrResolved})
}

//export tvCMResolveRoute
func tvCMResolveRoute(h C.tv_handle, r *C.struct_tv_cm_route) C.int {
	stackroom.Reserve()
	id := of[*cmID](h)
	mtu := uint8(id.c.dev.d.QueryPort().ActiveMTU)
	id.mu.Lock()
	defer id.mu.Unlock()
	if id.state != cmAddrDone {
		return C.int(unix.EINVAL)
	}
	if r != nil {
		if r.mtu < 1 || uint8(r.mtu) > mtu || r.flow_label > 0xfffff {
			return C.int(unix.EINVAL)
		}
		id.route.MTU, id.route.FlowLabel, id.route.TrafficClass = uint8(r.mtu), uint32(r.flow_label), uint8(r.traffic_class)
		if r.hop_limit != 0 {
			id.route.HopLimit = uint8(r.hop_limit)
		}
	}
	id.state = cmRouteDone
	id.put(cmEvent{typ: cmRouteResolved})
	return 0
}

const (
	cmBacklog = 1024 // at most, and if the program has no wish
)

//export tvCMListen
func tvCMListen(h C.tv_handle, backlog C.int32_t) C.int {
	stackroom.Reserve()
	id := of[*cmID](h)
	id.mu.Lock()
	if id.state == cmIdle {
		if no := id.bind(netip.AddrPortFrom(netip.IPv4Unspecified(), 0), 0); no != 0 {
			id.mu.Unlock()
			return C.int(no)
		}
	}
	if id.state != cmAddrBound {
		id.mu.Unlock()
		return C.int(unix.EINVAL)
	}
	if no := id.c.dev.ports.alone(id); no != 0 {
		id.mu.Unlock()
		return C.int(no)
	}
	id.state = cmListen
	at := id.src
	id.mu.Unlock()
	if backlog <= 0 || backlog > cmBacklog {
		backlog = cmBacklog
	}
	addr := at.Addr().Unmap()
	if addr == netip.IPv6Unspecified() && !id.c.dev.ports.afonly(id) {
		addr = netip.Addr{} // IPv4's, too
	}
	l, err := id.c.dev.d.CMListen(wire.ServiceID(id.ps, at.Port()), addr, int(backlog), id.wants, id.asked)
	id.mu.Lock()
	if err != nil {
		id.state = cmAddrBound
	} else {
		id.listener = l
	}
	id.mu.Unlock()
	return cmErrno(err)
}

//export tvCMInfo
func tvCMInfo(h C.tv_handle, out *C.struct_tv_cm_info) C.int {
	stackroom.Reserve()
	id := of[*cmID](h)
	id.mu.Lock()
	defer id.mu.Unlock()
	*out = C.struct_tv_cm_info{qp_type: C.uint32_t(id.qpType), bound: C.int32_t(asInt(id.bound))}
	fill(&out.src, id.src, id.scope[0])
	fill(&out.dst, id.dst, id.scope[1])
	gid := func(to *[16]C.uint8_t, a netip.Addr) {
		if a.IsValid() {
			for i, b := range provider.GIDOf(a) {
				to[i] = C.uint8_t(b)
			}
		}
	}
	gid(&out.sgid, id.src.Addr())
	gid(&out.dgid, id.dst.Addr())
	if id.passive || id.state == cmRouteDone || id.state == cmConnect || id.state == cmDisconnect {
		r := id.route
		out.routed = 1
		out.route = C.struct_tv_cm_route{mtu: C.uint8_t(r.MTU), hop_limit: C.uint8_t(r.HopLimit), traffic_class: C.uint8_t(r.TrafficClass),
			ack_timeout: C.uint8_t(r.AckTimeout), flow_label: C.uint32_t(r.FlowLabel), pkey: C.uint16_t(r.PKey)}
	}
	return 0
}

//export tvCMJoin
func tvCMJoin(h C.tv_handle, j *C.struct_tv_cm_join) C.int {
	stackroom.Reserve()
	id := of[*cmID](h)
	addr := addrPort(&j.addr).Addr().Unmap()
	id.mu.Lock()
	src := id.src.Addr().Unmap()
	ok := id.bound && id.qpType == qpTypeUD && (id.state == cmAddrBound || id.state == cmAddrDone || id.state == cmRouteDone)
	id.mu.Unlock()
	if !ok || !addr.IsMulticast() {
		return C.int(unix.EINVAL)
	}
	if src.Is4() != addr.Is4() || addr.Is6() && src.IsLinkLocalUnicast() != addr.IsLinkLocalMulticast() {
		src = netip.Addr{} // another of the device's that reaches it
	}
	_, sgid, err := id.c.dev.d.Route(src, addr)
	if err != nil {
		return cmErrno(err)
	}
	member, err := id.c.dev.d.JoinGroup(addr, j.send_only != 0)
	if err != nil {
		return cmErrno(err)
	}
	g := &cmGroup{id: id, cookie: j.group, addr: addr, sgid: sgid, member: member}
	j.handle = id.c.add(rankCMGroup, g, g.leave)
	id.mu.Lock()
	id.put(cmEvent{typ: cmMulticastJoin, group: g})
	id.mu.Unlock()
	return 0
}

// leave ends the device's membership, and takes back what the program has not heard of it.
func (g *cmGroup) leave() error {
	g.id.mu.Lock()
	g.id.ch.events.drop(func(e *cmEvent) bool { return e.group == g })
	g.id.mu.Unlock()
	_ = g.member.Leave() // a device that is gone has left
	return nil
}
