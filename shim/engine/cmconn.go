// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
import "C"

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/cm"
	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// Connections of identifiers.

const (
	// cmQKey is RDMA_UDP_QKEY.
	cmQKey = 0x01234567

	qpTypeRC      = uint32(qp.TypeRC)
	qpTypeUC      = uint32(qp.TypeUC)
	qpTypeUD      = uint32(qp.TypeUD)
	qpTypeXRCSend = uint32(qp.TypeXRCSend)
	qpTypeXRCRecv = uint32(qp.TypeXRCRecv)
)

// cmAckTimeout is the queue pairs' timeout, as a code, for so many retries: 268 ms with the seven
// that most programs ask for, and longer with fewer, so that a peer is given up after some two
// seconds. The kernel's is 2.1 s for each, which is long where a packet is lost.
func cmAckTimeout(retries uint8) uint8 {
	switch {
	case retries > 5:
		return 16
	case retries > 2:
		return 17
	case retries > 0:
		return 18
	}
	return 19
}

// wants says whether a request is one for a listener: for queue pairs of its type, and with private
// data that begins as RDMA CM's does.
func (id *cmID) wants(tr cm.Transport, private []byte) bool {
	asked := map[cm.Transport]uint32{cm.RC: qpTypeRC, cm.UC: qpTypeUC, cm.UD: qpTypeUD, cm.XRC: qpTypeXRCRecv}
	var head wire.IPCM
	return id.qpType == asked[tr] && head.Parse(private)
}

// asked hears of requests to a listener, and of what becomes of them. The baton is held.
func (id *cmID) asked(k *provider.CMConn, e cm.Event) {
	if child, ok := k.Owner.(*cmID); ok {
		child.heard(k, e)
		return
	}
	if e.Kind != cm.Request {
		return
	}
	id.mu.Lock()
	defer id.mu.Unlock()
	child := newCMID(id.c, id.ch)
	child.ps, child.qpType, child.passive, child.k = id.ps, id.qpType, true, k
	child.state, child.bound, child.tos = cmConnect, true, id.tos
	k.Owner = child
	id.put(cmEvent{typ: cmConnectRequest, child: child, told: true, private: append([]byte(nil), e.Private...)})
}

// heard hears of a connection. The baton is held.
func (id *cmID) heard(k *provider.CMConn, e cm.Event) {
	if e.Kind == cm.Ended || e.Kind == cm.Gone || e.Kind == cm.Disconnected {
		id.c.dev.ending.remove(id)
	}
	id.mu.Lock()
	defer id.mu.Unlock()
	id.k = k
	if id.passive && !id.answered {
		// The other end has thought better of it. Who has the request hears of that when it
		// is accepted; nobody else is to have it.
		if !id.taken && e.Kind != cm.Gone {
			id.ch.events.drop(func(e *cmEvent) bool { return e.child == id })
		}
		return
	}
	ev := cmEvent{private: append([]byte(nil), e.Private...)}
	switch e.Kind {
	case cm.Reply:
		ev.typ, ev.told = cmConnectResponse, true
	case cm.Established:
		ev.typ, ev.private = cmEstablished, nil
	case cm.Rejected:
		ev.typ, ev.status = cmRejected, int(e.Reason)
	case cm.Unreachable:
		if id.qpType == qpTypeUD && id.passive {
			return // was answered; who asked is told no more
		}
		ev.typ, ev.status = cmUnreachable, -int(unix.ETIMEDOUT)
	case cm.Resolved:
		if ev.typ, ev.told = cmEstablished, true; e.Status != wire.SIDROK {
			ev.typ, ev.told, ev.status = cmUnreachable, false, int(e.Status)
		}
	case cm.Disconnected, cm.Ended:
		if id.state != cmConnect {
			return
		}
		id.state = cmDisconnect
		if ev.typ = cmDisconnected; e.Status != 0 {
			ev.status = -int(unix.ETIMEDOUT)
		}
	case cm.Gone:
		if id.state != cmDisconnect {
			return
		}
		ev.typ = cmTimewaitExit
	default:
		return
	}
	id.put(ev)
}

// params takes over what the program tells the other end.
func (id *cmID) params(c *C.struct_tv_cm_conn) cm.Params {
	return cm.Params{Addr: id.src.Addr().Unmap(), QPN: asQPN(c.qpn), QKey: uint32(c.qkey), PSN: id.psn, Responder: uint8(c.responder_resources),
		Initiator: uint8(c.initiator_depth), RetryCount: min(uint8(c.retry_count), 7), RNRRetry: min(uint8(c.rnr_retry_count), 7),
		FlowControl: c.flow_control != 0, SRQ: c.srq != 0, AckDelay: 15, ECEVendor: uint32(c.ece_vendor), ECEOptions: uint32(c.ece_options),
		Private: private(&c.private_data[0], c.private_len)}
}

func private(p *C.uint8_t, n C.uint32_t) []byte {
	if n == 0 {
		return nil
	}
	return append([]byte(nil), unsafe.Slice((*byte)(unsafe.Pointer(p)), n)...)
}

//export tvCMConnect
func tvCMConnect(h C.tv_handle, c *C.struct_tv_cm_conn) C.int {
	stackroom.Reserve()
	id := of[*cmID](h)
	id.mu.Lock()
	if id.state != cmRouteDone {
		id.mu.Unlock()
		return C.int(unix.EINVAL)
	}
	id.state = cmConnect
	me, dst, r := id.params(c), id.dst, id.route
	if r.AckTimeout = id.ackTimeout; r.AckTimeout == 0 {
		r.AckTimeout = cmAckTimeout(me.RetryCount)
	}
	head := wire.IPCM{SrcPort: id.src.Port(), Src: me.Addr, Dst: dst.Addr().Unmap()}
	all := make([]byte, wire.IPCMLen, wire.IPCMLen+len(me.Private))
	head.Put(all)
	me.Private = append(all, me.Private...)
	id.me, id.route = me, r
	id.mu.Unlock()
	d := id.c.dev.d
	service := wire.ServiceID(id.ps, dst.Port())
	var k *provider.CMConn
	var err error
	if id.qpType == qpTypeUD {
		k, err = d.CMResolve(me.Addr, dst.Addr(), service, me.Private, id.heard)
	} else {
		tr := cm.RC
		switch id.qpType {
		case qpTypeUC:
			tr = cm.UC
		case qpTypeXRCSend:
			tr = cm.XRC
		}
		k, err = d.CMConnect(dst.Addr(), service, tr, me, r, id.heard)
	}
	id.mu.Lock()
	defer id.mu.Unlock()
	if err != nil {
		id.state = cmRouteDone
		return cmErrno(err)
	}
	id.k = k
	return 0
}

// conn is the connection, if there is one.
func (id *cmID) conn() *provider.CMConn {
	id.mu.Lock()
	defer id.mu.Unlock()
	return id.k
}

// answer is conn for the answer to a request.
func (id *cmID) answer() *provider.CMConn {
	id.mu.Lock()
	defer id.mu.Unlock()
	if !id.passive || id.state != cmConnect {
		return nil
	}
	id.answered = true
	return id.k
}

//export tvCMAccept
func tvCMAccept(h C.tv_handle, c *C.struct_tv_cm_conn) C.int {
	stackroom.Reserve()
	id := of[*cmID](h)
	k := id.answer()
	if k == nil {
		return C.int(unix.EINVAL)
	}
	id.mu.Lock()
	me := id.params(c)
	if id.qpType == qpTypeUD && me.QKey == 0 {
		me.QKey = cmQKey
	}
	id.me = me
	id.mu.Unlock()
	return cmErrno(k.Accept(me))
}

//export tvCMReady
func tvCMReady(h C.tv_handle) C.int {
	stackroom.Reserve()
	id := of[*cmID](h)
	k := id.conn()
	if k == nil || id.passive {
		return C.int(unix.EINVAL)
	}
	return cmErrno(k.Ready(nil))
}

//export tvCMReject
func tvCMReject(h C.tv_handle, reason C.uint32_t, data *C.uint8_t, n C.uint32_t) C.int {
	stackroom.Reserve()
	id := of[*cmID](h)
	k := id.conn()
	if id.passive {
		k = id.answer()
	}
	if k == nil {
		return C.int(unix.EINVAL)
	}
	return cmErrno(k.Reject(wire.CMReason(reason), private(data, n)))
}

//export tvCMNotify
func tvCMNotify(h C.tv_handle) C.int {
	stackroom.Reserve()
	k := of[*cmID](h).conn()
	if k == nil {
		return C.int(unix.EINVAL)
	}
	if k.Open() {
		return C.int(unix.EISCONN)
	}
	return cmErrno(k.Notify())
}

//export tvCMDisconnect
func tvCMDisconnect(h C.tv_handle) C.int {
	stackroom.Reserve()
	k := of[*cmID](h).conn()
	if k == nil {
		return C.int(unix.EINVAL)
	}
	err := k.Disconnect(nil)
	if errors.Is(err, cm.ErrState) { // the other end was first
		err = nil
	}
	return cmErrno(err)
}

//export tvCMQPAttr
func tvCMQPAttr(h C.tv_handle, state C.uint32_t, a *C.struct_tv_qp_attr, mask *C.uint32_t) C.int {
	stackroom.Reserve()
	id := of[*cmID](h)
	id.mu.Lock()
	k, me, r, bound, timeout := id.k, id.me, id.route, id.bound, id.ackTimeout
	id.mu.Unlock()
	if !bound {
		return C.int(unix.EINVAL)
	}
	if timeout != 0 {
		r.AckTimeout = timeout
	}
	*a = C.struct_tv_qp_attr{state: state}
	m := qp.AttrState
	datagram := id.qpType == qpTypeUD
	var peer cm.Params
	var sgid int
	if k != nil {
		i := k.Info()
		peer = i.Peer
		var err error
		if _, sgid, err = id.c.dev.d.Route(i.Local, peer.Addr); err != nil {
			return cmErrno(err)
		}
	}
	if id.passive && me.QPN == 0 { // not accepted yet
		me.Responder, me.Initiator = 0xff, 0xff
		me.RNRRetry = peer.RNRRetry // it will be told the same, mostly
	}
	most := id.c.dev.d.Query()
	switch {
	case qp.State(state) == qp.StateInit:
		a.port = 1
		m |= qp.AttrPKeyIndex | qp.AttrPort
		if datagram {
			a.qkey = cmQKey
			m |= qp.AttrQKey
			break
		}
		m |= qp.AttrAccess
		if k != nil {
			a.access = C.uint32_t(mr.RemoteWrite)
			if id.qpType != qpTypeUC && min(me.Responder, peer.Initiator) > 0 {
				a.access |= C.uint32_t(mr.RemoteRead | mr.RemoteAtomic)
			}
		}
	case datagram && qp.State(state) == qp.StateRTR:
	case datagram && qp.State(state) == qp.StateRTS:
		m |= qp.AttrSQPSN
	case k == nil || peer.QPN == 0:
		return C.int(unix.EINVAL)
	case qp.State(state) == qp.StateRTR:
		a.ah = cmAH(peer.Addr, sgid, r)
		a.path_mtu, a.dest_qpn, a.rq_psn = C.uint32_t(r.MTU), C.uint32_t(peer.QPN), C.uint32_t(id.psn)
		m |= qp.AttrAV | qp.AttrPathMTU | qp.AttrDestQPN | qp.AttrRQPSN
		if id.qpType == qpTypeRC || id.qpType == qpTypeXRCRecv {
			a.max_dest_rd_atomic, a.min_rnr_timer = C.uint8_t(min(me.Responder, peer.Initiator, uint8(most.MaxQPRdAtom))), C.uint8_t(provider.ConnMinRNR(me.RNRRetry))
			m |= qp.AttrMaxDestRdAtomic | qp.AttrMinRNRTimer
		}
	case qp.State(state) == qp.StateRTS:
		a.sq_psn = C.uint32_t(peer.PSN)
		m |= qp.AttrSQPSN
		if id.qpType == qpTypeUC {
			break
		}
		a.timeout = C.uint8_t(r.AckTimeout)
		m |= qp.AttrTimeout
		if id.qpType != qpTypeXRCRecv {
			// How often is the client's wish, for both.
			retry := me.RetryCount
			if id.passive {
				retry = peer.RetryCount
			}
			a.max_rd_atomic, a.retry_cnt, a.rnr_retry = C.uint8_t(min(me.Initiator, peer.Responder, uint8(most.MaxQPInitRdAtom))), C.uint8_t(retry), C.uint8_t(peer.RNRRetry)
			m |= qp.AttrMaxRdAtomic | qp.AttrRetryCnt | qp.AttrRNRRetry
		}
	default:
		return C.int(unix.EINVAL)
	}
	*mask = C.uint32_t(m)
	return 0
}
