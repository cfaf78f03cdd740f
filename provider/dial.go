// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/tapverbs/tapverbs/cm"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// Connections by address and port: RDMA CM (rdma_cm(7)) in Go, for services in the port
// space of TCP, which rdma_listen(3) and rdma_connect(3) of C programs reach and can be reached
// by.

// ConnAttr says what queue pair a connection gets, and what the other end is told of it.
type ConnAttr struct {
	// QP is what to make; its Type is RC, or UC with Dial, and with what a listener of ListenUC has.
	QP QPInitAttr
	// Prepare, if set, is called with the queue pair before the other end can send to it, to
	// post receives.
	Prepare func(*QP) error
	// Access is what peers may do, beside its regions' rights (IBV_ACCESS_*). 0: RDMA READ and
	// WRITE, and atomics; of UC, WRITE.
	Access mr.Access
	// Private is for the other end: 56 bytes with Dial, 196 with Accept.
	Private []byte
	// Responder is how many READs and atomics the other end may have outstanding, Initiator
	// how many we want to have; 0 with both for as many as the device has, and with Accept for
	// what the other end asks for. Both ends use the smaller of what one wants and the other
	// takes; negative means none.
	Responder, Initiator int
	// RetryCount and RNRRetry are 1 to 7; 0 stands for 7, and RNR NAKs are then waited for
	// for ever.
	RetryCount, RNRRetry uint8
	// MTU is the path MTU that Dial asks for; 0 for the port's.
	MTU qp.MTU
}

// Conn is a connected queue pair.
type Conn struct {
	// QP is ready to send.
	*QP
	// Private is what the other end has sent, zeros behind it.
	Private []byte
	local   netip.AddrPort
	remote  netip.AddrPort
	k       *CMConn
	w       *waiter
}

// LocalAddr and RemoteAddr are the ends' addresses. A port is 0 where it is not known.
func (c *Conn) LocalAddr() netip.AddrPort { return c.local }

// RemoteAddr is the other end's address.
func (c *Conn) RemoteAddr() netip.AddrPort { return c.remote }

// Done is closed when the connection has ended: by the other end, by Close, or with the
// device. The queue pair goes to the error state.
func (c *Conn) Done() <-chan struct{} { return c.w.ended }

// Close disconnects and destroys the queue pair. Work that was outstanding is flushed.
func (c *Conn) Close() error {
	err := c.k.Disconnect(nil)
	if errors.Is(err, cm.ErrState) || errors.Is(err, ErrGone) || errors.Is(err, ErrClosed) {
		err = nil // the other end was first, or there is nobody to tell
	}
	c.w.end()
	return errors.Join(err, c.Destroy())
}

// waiter takes a connection's events. They come with the baton held.
type waiter struct {
	events *fifo[cmEvent] // a connection has few
	once   sync.Once
	ended  chan struct{}
	// qp is what fails when the connection ends.
	qp atomic.Pointer[QP]
}

type cmEvent struct {
	cm.Event
	private []byte
}

func (d *Device) newWaiter() *waiter {
	return &waiter{events: newFIFO[cmEvent](d.lost), ended: make(chan struct{})}
}

func (w *waiter) end() {
	w.once.Do(func() {
		close(w.ended)
		if q := w.qp.Load(); q != nil {
			q.toErrorSoon()
		}
	})
}

func (w *waiter) sink(_ *CMConn, e cm.Event) {
	switch e.Kind {
	case cm.Disconnected, cm.Rejected, cm.Unreachable, cm.Gone:
		w.end()
	}
	w.events.put(cmEvent{e, append([]byte(nil), e.Private...)})
}

// heardOf is what a waiter calls the first message to its queue pair.
const heardOf cm.Kind = 0xff

// next waits for the next event.
func (w *waiter) next(ctx context.Context, d *Device) (cmEvent, error) {
	return w.events.take(ctx, d.idle(), nil)
}

// RejectedError says that the other end did not want the connection.
type RejectedError struct {
	Reason  wire.CMReason
	Private []byte // what it says about that
}

func (e *RejectedError) Error() string {
	switch e.Reason {
	case wire.RejInvalidServiceID:
		return "connection refused: nobody listens on that port"
	case wire.RejConsumer:
		return "connection rejected by the application"
	case wire.RejStale:
		return "connection rejected: the other end has a connection with that queue pair"
	}
	return fmt.Sprintf("connection rejected: %v", e.Reason)
}

// Dial connects a new queue pair to the service at addr, from the device's first address
// that reaches it: one that Listen is for, or ListenUC if the queue pair is of UC. Errors: those of CreateQP and CreateAH, RejectedError, ErrTimeout when
// nobody answers, the context's.
func (p *PD) Dial(ctx context.Context, addr netip.AddrPort, a ConnAttr) (*Conn, error) {
	c, err := p.dial(ctx, addr, a)
	if err != nil {
		return nil, fmt.Errorf("dial %v: %w", addr, err)
	}
	return c, nil
}

func (p *PD) dial(ctx context.Context, addr netip.AddrPort, a ConnAttr) (*Conn, error) {
	d := p.d
	dst := addr.Addr().Unmap().WithZone("")
	src, sgid, err := d.source(netip.Addr{}, dst)
	if err != nil {
		return nil, err
	}
	if err := d.Reach(ctx, src, dst); err != nil {
		return nil, err
	}
	q, err := a.create(p)
	if err != nil {
		return nil, err
	}
	fail := func(err error) (*Conn, error) { return nil, errors.Join(err, q.Destroy()) }
	r := cm.Route{MTU: uint8(min(or(a.MTU, d.mtu), d.mtu)), AckTimeout: connAckTimeout, PKey: wire.DefaultPKey, HopLimit: defaultHopLimit,
		FlowLabel: rand.Uint32() & 0xfffff}
	me := cm.Params{Addr: src, QPN: q.num, PSN: wire.PSN(rand.Uint32() & wire.PSNMask), Responder: depth(a.Responder, maxRdAtomic),
		Initiator: depth(a.Initiator, maxRdAtomic), RetryCount: or(a.RetryCount, 7), RNRRetry: or(a.RNRRetry, 7), FlowControl: true, SRQ: a.QP.SRQ != nil}
	head := wire.IPCM{SrcPort: uint16(49152 + rand.IntN(16384)), Src: src, Dst: dst}
	me.Private = make([]byte, wire.IPCMLen, wire.IPCMLen+len(a.Private))
	head.Put(me.Private)
	me.Private = append(me.Private, a.Private...)
	w := d.newWaiter()
	w.qp.Store(q)
	tr := cm.RC
	if a.QP.Type == qp.TypeUC {
		tr = cm.UC
	}
	k, err := d.CMConnect(dst, wire.ServiceID(portSpace(tr), addr.Port()), tr, me, r, w.sink)
	if err != nil {
		return fail(err)
	}
	e, err := w.next(ctx, d)
	if err == nil {
		switch e.Kind {
		case cm.Reply:
		case cm.Unreachable:
			err = ErrTimeout
		default:
			err = &RejectedError{e.Reason, e.private}
		}
	}
	if err != nil {
		k.Destroy()
		return fail(err)
	}
	peer := k.Info().Peer
	// Each takes what the other has agreed to send.
	me.Responder, me.Initiator = min(me.Responder, peer.Initiator), min(me.Initiator, peer.Responder)
	if err = q.connect(me, peer, r, sgid); err == nil {
		me.RNRRetry = peer.RNRRetry
		err = q.ready(me, peer, r)
	}
	if err == nil {
		err = k.Ready(nil)
	}
	if err != nil {
		k.Reject(wire.RejConsumer, nil)
		return fail(err)
	}
	c := &Conn{QP: q, Private: e.private, local: netip.AddrPortFrom(src, head.SrcPort), remote: addr, k: k, w: w}
	return c, nil
}

const (
	// connAckTimeout is the queue pairs' timeout: 1.1 s, as RDMA CM's. A loss is found long before
	// by a probe; a peer that has no processor must not be given up for that.
	connAckTimeout = 18
	// shortRNR is 0.64 ms, longRNR 655 ms (IBA table 45).
	shortRNR, longRNR = 12, 0
)

// ConnMinRNR is the min_rnr_timer of a connection's queue pair whose owner has told the other end
// to try so often when there is no receive: short if that is for ever (7). Otherwise it is what
// RDMA CM leaves it at, 655 ms: times the number of tries it is what the other end bears.
func ConnMinRNR(told uint8) uint8 {
	if told == 7 {
		return shortRNR
	}
	return longRNR
}

// or gives v, or what stands for 0.
func or[T uint8 | qp.MTU](v, instead T) T {
	if v == 0 {
		return instead
	}
	return v
}

// depth is a number of READs and atomics as a message has it.
func depth(n, instead int) uint8 {
	if n == 0 {
		n = instead
	}
	return uint8(min(max(n, 0), maxRdAtomic))
}

func (a *ConnAttr) access() mr.Access {
	switch {
	case a.Access != 0:
		return a.Access
	case a.QP.Type == qp.TypeUC:
		return mr.RemoteWrite
	}
	return mr.RemoteWrite | mr.RemoteRead | mr.RemoteAtomic
}

// portSpace is where ports of a transport are: RDMA CM has only RC in that of TCP.
func portSpace(tr cm.Transport) wire.PortSpace {
	if tr == cm.UC {
		return wire.PSIB
	}
	return wire.PSTCP
}

// create makes the queue pair and brings it to INIT.
func (a *ConnAttr) create(p *PD) (*QP, error) {
	if a.QP.Type != qp.TypeRC && a.QP.Type != qp.TypeUC {
		return nil, fmt.Errorf("a connection of a %v queue pair: %w", a.QP.Type, ErrInvalid)
	}
	if a.MTU > p.d.mtu || a.RetryCount > 7 || a.RNRRetry > 7 {
		return nil, fmt.Errorf("path MTU %d, retries %d and %d: %w", a.MTU.Bytes(), a.RetryCount, a.RNRRetry, ErrInvalid)
	}
	q, err := p.CreateQP(a.QP)
	if err != nil {
		return nil, err
	}
	err = q.Modify(QPAttr{Attr: qp.Attr{State: qp.StateInit, Port: 1, Access: a.access()}}, qp.AttrState|qp.AttrPKeyIndex|qp.AttrPort|qp.AttrAccess)
	if err == nil && a.Prepare != nil {
		err = a.Prepare(q)
	}
	if err != nil {
		return nil, errors.Join(err, q.Destroy())
	}
	return q, nil
}

// connect brings a queue pair from INIT to RTR; me is what the other end is told.
func (q *QP) connect(me, peer cm.Params, r cm.Route, sgid int) error {
	mask := qp.AttrState | qp.AttrAV | qp.AttrPathMTU | qp.AttrDestQPN | qp.AttrRQPSN
	if q.init.Type == qp.TypeRC {
		mask |= qp.AttrMaxDestRdAtomic | qp.AttrMinRNRTimer
	}
	return q.Modify(QPAttr{
		Attr: qp.Attr{State: qp.StateRTR, PathMTU: qp.MTU(r.MTU), DestQPN: peer.QPN, RQPSN: me.PSN, MaxDestRdAtomic: me.Responder,
			MinRNRTimer: ConnMinRNR(me.RNRRetry)},
		AH: AHAttr{DGID: GIDOf(peer.Addr), SGIDIndex: sgid, HopLimit: r.HopLimit, TrafficClass: r.TrafficClass, FlowLabel: r.FlowLabel},
	}, mask)
}

// ready brings it to RTS.
func (q *QP) ready(me, peer cm.Params, r cm.Route) error {
	mask := qp.AttrState | qp.AttrSQPSN
	if q.init.Type == qp.TypeRC {
		mask |= qp.AttrTimeout | qp.AttrRetryCnt | qp.AttrRNRRetry | qp.AttrMaxRdAtomic
	}
	return q.Modify(QPAttr{Attr: qp.Attr{State: qp.StateRTS, Timeout: r.AckTimeout, RetryCnt: me.RetryCount, RNRRetry: me.RNRRetry,
		SQPSN: peer.PSN, MaxRdAtomic: me.Initiator}}, mask)
}

// Listener takes connections to a port.
type Listener struct {
	d       *Device
	l       *CMListener
	port    uint16
	tr      cm.Transport
	backlog int
	queue   *fifo[*ConnRequest]
}

// Listen takes requests for connections to a port, at one of the device's addresses or at
// all of them (the unspecified address). backlog of them wait at most for Accept. ErrInvalid,
// cm.ErrInUse.
func (d *Device) Listen(addr netip.AddrPort, backlog int) (*Listener, error) {
	return d.listen(addr, cm.RC, backlog)
}

// ListenUC is Listen for connections of UC queue pairs. Their ports are others: they are in
// RDMA CM's port space of InfiniBand (RDMA_PS_IB).
func (d *Device) ListenUC(addr netip.AddrPort, backlog int) (*Listener, error) {
	return d.listen(addr, cm.UC, backlog)
}

func (d *Device) listen(addr netip.AddrPort, tr cm.Transport, backlog int) (*Listener, error) {
	backlog = max(backlog, 1)
	l := &Listener{d: d, port: addr.Port(), tr: tr, backlog: backlog, queue: newFIFO[*ConnRequest](d.lost)}
	a := addr.Addr()
	if a.IsUnspecified() {
		a = netip.Addr{}
	}
	var err error
	wants := func(asked cm.Transport, _ []byte) bool { return asked == tr }
	if l.l, err = d.CMListen(wire.ServiceID(portSpace(tr), addr.Port()), a, backlog, wants, l.sink); err != nil {
		return nil, fmt.Errorf("listen at %v: %w", addr, err)
	}
	return l, nil
}

// sink takes a request, and then what becomes of it.
func (l *Listener) sink(k *CMConn, e cm.Event) {
	w := l.d.newWaiter()
	r := &ConnRequest{l: l, k: k, w: w}
	k.sink = w.sink
	var head wire.IPCM
	if !head.Parse(e.Private) {
		// It comes from no RDMA CM that we know; who it is the message's addresses say.
		r.Private = append([]byte(nil), e.Private...)
	} else {
		r.Private = append([]byte(nil), e.Private[wire.IPCMLen:]...)
	}
	r.port = head.SrcPort
	// The agent bounds those that wait for an answer. Others were taken back.
	if l.queue.len() >= l.backlog {
		l.queue.remove(func(r *ConnRequest) bool { return isClosed(r.w.ended) })
	}
	l.queue.put(r)
}

// Accept waits for the next request. Errors: ErrClosed, ErrGone, the context's.
func (l *Listener) Accept(ctx context.Context) (*ConnRequest, error) {
	for {
		r, err := l.queue.take(ctx, l.d.idle(), nil)
		if err != nil {
			return nil, err
		}
		if !isClosed(r.w.ended) { // else it was taken back
			return r, nil
		}
	}
}

// Close ends listening; requests that were not accepted are rejected.
func (l *Listener) Close() error {
	l.queue.close()
	l.queue.remove(func(*ConnRequest) bool { return true })
	return l.l.Close()
}

// ConnRequest is somebody's wish to connect.
type ConnRequest struct {
	// Private is what it came with, zeros behind it.
	Private []byte
	l       *Listener
	k       *CMConn
	w       *waiter
	port    uint16
}

// RemoteAddr is who asks.
func (r *ConnRequest) RemoteAddr() netip.AddrPort {
	return netip.AddrPortFrom(r.k.Info().Peer.Addr, r.port)
}

// Reject says no; private, up to 148 bytes, says why.
func (r *ConnRequest) Reject(private []byte) error { return r.k.Reject(wire.RejConsumer, private) }

// Accept connects a new queue pair of a domain of the listener's device, and waits until the
// other end is ready. Errors are those of CreateQP and CreateAH; ErrTimeout if the other end is
// not heard of again, RejectedError if it has changed its mind. The request is answered then, too.
func (r *ConnRequest) Accept(ctx context.Context, p *PD, a ConnAttr) (*Conn, error) {
	c, err := r.accept(ctx, p, a)
	if err != nil {
		r.k.Destroy()
		return nil, fmt.Errorf("accept %v: %w", r.RemoteAddr(), err)
	}
	return c, nil
}

func (r *ConnRequest) accept(ctx context.Context, p *PD, a ConnAttr) (*Conn, error) {
	d := r.k.d
	if p.d != d {
		return nil, fmt.Errorf("a protection domain of another device: %w", ErrInvalid)
	}
	if (a.QP.Type == qp.TypeUC) != (r.l.tr == cm.UC) {
		return nil, fmt.Errorf("a %v queue pair for a request of another type: %w", a.QP.Type, ErrInvalid)
	}
	i := r.k.Info()
	src, sgid, err := d.source(i.Local, i.Peer.Addr)
	if err != nil {
		return nil, err
	}
	q, err := a.create(p)
	if err != nil {
		return nil, err
	}
	fail := func(err error) (*Conn, error) { return nil, errors.Join(err, q.Destroy()) }
	if i.Route.MTU > uint8(d.mtu) {
		return fail(errors.Join(&RejectedError{Reason: wire.RejInvalidMTU}, r.k.Reject(wire.RejInvalidMTU, nil)))
	}
	me := cm.Params{Addr: src, QPN: q.num, PSN: wire.PSN(rand.Uint32() & wire.PSNMask),
		Responder: min(depth(a.Responder, maxRdAtomic), i.Peer.Initiator), Initiator: min(depth(a.Initiator, maxRdAtomic), i.Peer.Responder),
		RNRRetry: or(a.RNRRetry, 7), FlowControl: true, SRQ: a.QP.SRQ != nil, AckDelay: 15, Private: a.Private}
	mine := me
	mine.RetryCount, mine.RNRRetry = i.Peer.RetryCount, i.Peer.RNRRetry
	route := i.Route
	route.HopLimit = defaultHopLimit
	if route.AckTimeout == 0 { // for ever, to a queue pair
		route.AckTimeout = connAckTimeout
	}
	q.heard = func() { r.w.events.put(cmEvent{Event: cm.Event{Kind: heardOf}}) }
	if err := q.connect(me, i.Peer, route, sgid); err != nil {
		return fail(err)
	}
	r.w.qp.Store(q)
	if err := r.k.Accept(me); err != nil {
		return fail(err)
	}
	e, err := r.w.next(ctx, d)
	if err == nil && e.Kind == heardOf {
		// IBA 12.9.6: what it sends says that it is ready; the RTU is late, or lost.
		_ = r.k.Notify() // or it has just come
		e, err = r.w.next(ctx, d)
	}
	if err == nil {
		switch e.Kind {
		case cm.Established:
			err = q.ready(mine, i.Peer, route)
		case cm.Unreachable:
			err = ErrTimeout
		default:
			err = &RejectedError{e.Reason, e.private}
		}
	}
	if err != nil {
		return fail(err)
	}
	c := &Conn{QP: q, Private: r.Private, local: netip.AddrPortFrom(i.Local, r.l.port), remote: r.RemoteAddr(), k: r.k, w: r.w}
	return c, nil
}
