// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
import "C"

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/cm"
	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/wire"
)

// Identifiers of RDMA CM and their events: what the kernel's rdma_cm and rdma_ucm are to
// librdmacm.so.1. An identifier's own lock is never held while the provider is called, which
// tells of events with the baton held.

// Events of an identifier, with the numbers of enum rdma_cm_event_type.
const (
	cmAddrResolved    = 0
	cmAddrError       = 1
	cmRouteResolved   = 2
	cmConnectRequest  = 4
	cmConnectResponse = 5
	cmUnreachable     = 7
	cmRejected        = 8
	cmEstablished     = 9
	cmDisconnected    = 10
	cmDeviceRemoval   = 11
	cmMulticastJoin   = 12
	cmTimewaitExit    = 15
)

// cmState is how far an identifier is; the names are the kernel's.
type cmState uint8

const (
	cmIdle cmState = iota
	cmAddrBound
	cmAddrQuery
	cmAddrDone
	cmRouteDone
	cmConnect // until the connection ends
	cmDisconnect
	cmListen
)

// cmEvent waits in a channel.
type cmEvent struct {
	id      *cmID
	typ     int
	status  int
	child   *cmID // of a connect request
	group   *cmGroup
	private []byte
	told    bool // the other end has told of its queue pair
}

// cmChannel is an event channel.
type cmChannel struct {
	events tokens[cmEvent]
}

// cmID is an identifier.
type cmID struct {
	c      *ectx
	ps     wire.PortSpace
	qpType uint32
	psn    wire.PSN // that the other end is to send with
	// passive identifiers come with a request.
	passive bool

	mu     sync.Mutex
	ch     *cmChannel
	cookie C.tv_cookie
	state  cmState
	dead   bool
	// src and dst are as the program has them: IPv4 mapped into IPv6 stays so.
	src, dst   netip.AddrPort
	scope      [2]C.uint32_t // of src and dst
	port       bool          // src's is ours
	expected   uint64        // a service that the device was told of; 0: none
	bound      bool          // to the device
	route      cm.Route
	stop       context.CancelFunc // of resolving
	k          *provider.CMConn
	listener   *provider.CMListener
	me         cm.Params
	taken      bool // a request that the program has
	answered   bool // and has accepted or rejected
	tos        uint8
	ackTimeout uint8 // 0: ours
}

// cmGroup is a multicast group that an identifier has joined.
type cmGroup struct {
	id     *cmID
	cookie C.tv_cookie
	addr   netip.Addr
	sgid   int
	member *provider.Group // the device's membership
}

// cmErrno is errno, for connection management.
func cmErrno(err error) C.int {
	switch {
	case errors.Is(err, cm.ErrInUse):
		return C.int(unix.EADDRINUSE)
	case errors.Is(err, cm.ErrState), errors.Is(err, cm.ErrPrivate), errors.Is(err, cm.ErrAddr):
		return C.int(unix.EINVAL)
	case errors.Is(err, provider.ErrGone):
		return C.int(unix.ENODEV)
	}
	return errno(err)
}

//export tvCMChannel
func tvCMChannel(h C.tv_handle, fd C.int32_t, out *C.tv_handle) C.int {
	stackroom.Reserve()
	ch := &cmChannel{}
	ch.events.fd = int(fd)
	*out = object[*ectx](h).add(rankCMChannel, ch, func() error { return nil })
	return 0
}

// put tells of an event. Called with id.mu held.
func (id *cmID) put(e cmEvent) {
	if e.id = id; !id.dead {
		id.ch.events.put(e)
	}
}

//export tvCMTake
func tvCMTake(h C.tv_handle, out *C.struct_tv_cm_event) C.int {
	stackroom.Reserve()
	e, no := of[*cmChannel](h).events.take()
	if no != 0 {
		return no
	}
	id := e.id
	id.mu.Lock()
	*out = C.struct_tv_cm_event{_type: C.int32_t(e.typ), status: C.int32_t(e.status), id: id.cookie}
	id.mu.Unlock()
	if g := e.group; g != nil {
		out.group = g.cookie
		out.datagram = 1
		out.conn.qpn, out.conn.qkey = C.uint32_t(wire.MulticastQPN), cmQKey
		out.ah = cmAH(g.addr, g.sgid, cm.Route{TrafficClass: id.tos})
		return 0
	}
	if e.child != nil {
		id = e.child
		e.private = id.take(e.private)
		out.request = id.c.add(rankCMID, id, id.destroy)
	}
	if e.told {
		id.tell(out)
	}
	out.conn.private_len = C.uint32_t(copy(unsafe.Slice((*byte)(unsafe.Pointer(&out.conn.private_data)), C.TV_CM_PRIVATE), e.private))
	return 0
}

// tell says what is known of the other end: of what it sends to us and takes from us,
// as we see it.
func (id *cmID) tell(out *C.struct_tv_cm_event) {
	id.mu.Lock()
	k, route := id.k, id.route
	id.mu.Unlock()
	i := k.Info()
	p := i.Peer
	c := &out.conn
	c.qpn, c.qkey, c.ece_vendor, c.ece_options = C.uint32_t(p.QPN), C.uint32_t(p.QKey), C.uint32_t(p.ECEVendor), C.uint32_t(p.ECEOptions)
	c.responder_resources, c.initiator_depth = C.uint8_t(p.Initiator), C.uint8_t(p.Responder)
	c.retry_count, c.rnr_retry_count = C.uint8_t(p.RetryCount), C.uint8_t(p.RNRRetry)
	c.flow_control, c.srq = C.uint8_t(asInt(p.FlowControl)), C.uint8_t(asInt(p.SRQ))
	if i.Transport == cm.UD {
		out.datagram = 1
		_, sgid, _ := id.c.dev.d.Route(i.Local, p.Addr)
		out.ah = cmAH(p.Addr, sgid, route)
	}
}

func asInt(on bool) int {
	if on {
		return 1
	}
	return 0
}

// cmAH is the address vector of a destination.
func cmAH(dst netip.Addr, sgid int, r cm.Route) (a C.struct_tv_ah_attr) {
	for i, b := range provider.GIDOf(dst) {
		a.dgid[i] = C.uint8_t(b)
	}
	a.sgid_index, a.port_num, a.hop_limit = C.uint8_t(sgid), 1, cmHopLimit
	a.flow_label, a.traffic_class = C.uint32_t(r.FlowLabel), C.uint8_t(r.TrafficClass)
	return a
}

// take gives a request to the program, and what of its private data is for that.
func (id *cmID) take(private []byte) []byte {
	i := id.k.Info()
	var head wire.IPCM
	head.Parse(private) // the listener has
	id.mu.Lock()
	_, port, _ := wire.ServicePort(i.Service)
	id.src, id.dst = netip.AddrPortFrom(i.Local, port), netip.AddrPortFrom(i.Peer.Addr, head.SrcPort)
	id.route, id.taken = i.Route, true
	id.route.HopLimit, id.route.AckTimeout = cmHopLimit, cmAckTimeout(i.Peer.RetryCount)
	if i.Transport == cm.UD {
		id.route = cm.Route{MTU: uint8(id.c.dev.d.QueryPort().ActiveMTU), PKey: wire.DefaultPKey, HopLimit: cmHopLimit, AckTimeout: cmAckTimeout(7)}
	}
	if i.Transport == cm.XRC {
		id.qpType = qpTypeXRCRecv
	}
	id.mu.Unlock()
	_ = id.k.Take() // a device that is gone needs no backlog
	return private[wire.IPCMLen:]
}

//export tvCMCreate
func tvCMCreate(h C.tv_handle, cookie C.tv_cookie, ps, qpType C.uint32_t, out *C.tv_handle) C.int {
	stackroom.Reserve()
	switch wire.PortSpace(ps) {
	case wire.PSTCP, wire.PSUDP, wire.PSIPoIB, wire.PSIB:
	default:
		return C.int(unix.EINVAL)
	}
	id := newCMID(ctxOf(h), of[*cmChannel](h))
	id.cookie, id.ps, id.qpType = cookie, wire.PortSpace(ps), uint32(qpType)
	*out = id.c.add(rankCMID, id, id.destroy)
	return 0
}

func newCMID(c *ectx, ch *cmChannel) *cmID {
	return &cmID{c: c, ch: ch, psn: wire.PSN(rand.Uint32() & wire.PSNMask)}
}

//export tvCMAdopt
func tvCMAdopt(h C.tv_handle, cookie C.tv_cookie) C.int {
	stackroom.Reserve()
	id := of[*cmID](h)
	id.mu.Lock()
	id.cookie = cookie
	id.mu.Unlock()
	return 0
}

// destroy ends an identifier and all that is under way.
func (id *cmID) destroy() error {
	id.mu.Lock()
	id.dead = true
	k, l, stop, port, expected := id.k, id.listener, id.stop, id.port, id.expected
	pulled := id.ch.events.pull(func(e *cmEvent) bool { return e.id == id })
	id.mu.Unlock()
	if stop != nil {
		stop()
	}
	if expected != 0 {
		id.c.dev.d.CMExpect(expected, 0)
	}
	if port {
		id.c.dev.ports.release(id)
	}
	// Errors are those of a device that is gone, where nothing is under way.
	for _, e := range pulled {
		if e.child != nil {
			_ = e.child.k.Destroy()
		}
	}
	if l != nil {
		_ = l.Close()
	}
	if k != nil {
		id.end(k)
	}
	return nil
}

// end ends a connection. One that is established ends when the other end knows, which the
// program's end waits for.
func (id *cmID) end(k *provider.CMConn) {
	d := id.c.dev
	d.ending.add(id)
	if err := k.Disconnect(nil); errors.Is(err, cm.ErrState) && k.Ending() {
		return
	} else if err != nil {
		d.ending.remove(id)
		_ = k.Destroy()
	}
}

// cmEnding are connections whose other ends have not heard of their end.
type cmEnding struct {
	mu    sync.Mutex
	ids   map[*cmID]struct{}
	empty chan struct{} // closed when there are none; nil unless somebody waits
}

func (e *cmEnding) add(id *cmID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ids == nil {
		e.ids = map[*cmID]struct{}{}
	}
	e.ids[id] = struct{}{}
}

func (e *cmEnding) remove(id *cmID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.ids, id)
	if len(e.ids) == 0 && e.empty != nil {
		close(e.empty)
		e.empty = nil
	}
}

// wait waits until all have ended, or for a time.
func (e *cmEnding) wait(d time.Duration) {
	e.mu.Lock()
	if len(e.ids) == 0 {
		e.mu.Unlock()
		return
	}
	c := make(chan struct{})
	e.empty = c
	e.mu.Unlock()
	select {
	case <-c:
	case <-time.After(d):
	}
}

// lastWords is how long the end of a program waits for other ends to hear of it: a process
// has no kernel that goes on for it.
const lastWords = time.Second

//export tvCMExit
func tvCMExit(h C.tv_handle) {
	stackroom.Reserve()
	c := object[*ectx](h)
	for _, id := range c.cmIDs() {
		_ = id.destroy()
	}
	c.dev.d.Rest()
	c.dev.ending.wait(lastWords)
}

//export tvCMMigrate
func tvCMMigrate(h, chh C.tv_handle) C.int {
	stackroom.Reserve()
	id, ch := of[*cmID](h), of[*cmChannel](chh)
	id.mu.Lock()
	defer id.mu.Unlock()
	if id.ch == ch {
		return 0
	}
	for _, e := range id.ch.events.pull(func(e *cmEvent) bool { return e.id == id }) {
		if e.child != nil {
			e.child.moved(ch)
		}
		ch.events.put(e)
	}
	id.ch = ch
	return 0
}

// moved: the listener that a request waits at has another channel.
func (id *cmID) moved(ch *cmChannel) {
	id.mu.Lock()
	id.ch = ch
	id.mu.Unlock()
}

//export tvCMOption
func tvCMOption(h C.tv_handle, option, value C.uint32_t) C.int {
	stackroom.Reserve()
	id := of[*cmID](h)
	id.mu.Lock()
	defer id.mu.Unlock()
	switch option {
	case C.TV_CM_TOS:
		id.tos = uint8(value)
		id.route.TrafficClass = id.tos
	case C.TV_CM_ACK_TIMEOUT:
		if id.qpType != qpTypeRC && id.qpType != qpTypeXRCSend || value > 31 {
			return C.int(unix.EINVAL)
		}
		id.ackTimeout = uint8(value)
	case C.TV_CM_REUSEADDR:
		// Once it is bound it can be allowed, and not forbidden.
		if id.state != cmIdle && (value == 0 || id.state == cmListen) {
			return C.int(unix.EINVAL)
		}
		id.c.dev.ports.set(id, func(p *cmPort) { p.reuse = value != 0 })
	case C.TV_CM_AFONLY:
		if id.state != cmIdle && id.state != cmAddrBound {
			return C.int(unix.EINVAL)
		}
		id.c.dev.ports.set(id, func(p *cmPort) { p.afonly = value != 0 })
	}
	return 0
}

func (c *ectx) cmIDs() (ids []*cmID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, it := range c.items {
		if id, ok := it.obj.(*cmID); ok {
			ids = append(ids, id)
		}
	}
	return ids
}

// removeIDs tells all identifiers of a context that the device is gone. Called with dev.mu
// held.
func (c *ectx) removeIDs() {
	for _, id := range c.cmIDs() {
		id.mu.Lock()
		if id.bound {
			id.put(cmEvent{typ: cmDeviceRemoval})
		}
		id.mu.Unlock()
	}
}

// cmPorts says who has which port. A program has a device, so the ports are its own.
type cmPorts struct {
	mu    sync.Mutex
	taken map[cmPortKey][]*cmID
	ids   map[*cmID]*cmPort
}

type cmPortKey struct {
	ps   wire.PortSpace
	port uint16
}

// cmPort is what matters of an identifier for who else may have its port.
type cmPort struct {
	key           cmPortKey
	addr          netip.Addr
	reuse, afonly bool
}

// entry gives an identifier's place. Called with p.mu held.
func (p *cmPorts) entry(id *cmID) *cmPort {
	if p.ids == nil {
		p.taken, p.ids = map[cmPortKey][]*cmID{}, map[*cmID]*cmPort{}
	}
	e := p.ids[id]
	if e == nil {
		e = &cmPort{}
		p.ids[id] = e
	}
	return e
}

// set changes what is to be known of an identifier.
func (p *cmPorts) set(id *cmID, f func(*cmPort)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(p.entry(id))
}

func (p *cmPorts) afonly(id *cmID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.entry(id).afonly
}

const firstEphemeral, lastEphemeral = 32768, 60999

// bind gives an identifier a port, port 0 for any that is free. EADDRINUSE, or
// EADDRNOTAVAIL if the port is at all addresses, or wanted there.
func (p *cmPorts) bind(id *cmID, addr netip.Addr, port uint16) (uint16, unix.Errno) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.entry(id)
	key := cmPortKey{id.ps, port}
	if port == 0 {
		const n = lastEphemeral - firstEphemeral + 1
		from := rand.IntN(n)
		for i := 0; ; i++ {
			if i == n {
				return 0, unix.EADDRNOTAVAIL
			}
			key.port = uint16(firstEphemeral + (from+i)%n)
			if len(p.taken[key]) == 0 {
				break
			}
		}
	}
	e.addr = addr
	if no := p.conflict(id, e, key, e.reuse); no != 0 {
		return 0, no
	}
	e.key = key
	p.taken[key] = append(p.taken[key], id)
	return key.port, 0
}

// conflict looks whether others have a port. Called with p.mu held.
func (p *cmPorts) conflict(id *cmID, e *cmPort, key cmPortKey, reuse bool) unix.Errno {
	for _, other := range p.taken[key] {
		o := p.ids[other]
		switch {
		case other == id, reuse && o.reuse, e.afonly && o.afonly && e.addr.Is4() != o.addr.Is4():
		case e.addr.IsUnspecified() || o.addr.IsUnspecified():
			return unix.EADDRNOTAVAIL
		case e.addr.Unmap() == o.addr.Unmap():
			return unix.EADDRINUSE
		}
	}
	return 0
}

// alone says whether an identifier may listen: nobody else may have its address then.
func (p *cmPorts) alone(id *cmID) unix.Errno {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.entry(id)
	return p.conflict(id, e, e.key, false)
}

func (p *cmPorts) release(id *cmID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.ids[id]
	if e == nil {
		return
	}
	delete(p.ids, id)
	if left := slices.DeleteFunc(p.taken[e.key], func(o *cmID) bool { return o == id }); len(left) == 0 {
		delete(p.taken, e.key)
	} else {
		p.taken[e.key] = left
	}
}
