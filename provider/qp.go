// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// QPInitAttr says what QP to make (struct ibv_qp_init_attr).
type QPInitAttr struct {
	Type           qp.Type
	SendCQ, RecvCQ *CQ
	// SRQ, if set, is where receives come from; Caps.RecvWR and RecvSGE are then
	// of no meaning. An XRC initiator receives nothing: RecvCQ, SRQ and these have no
	// meaning for it.
	SRQ  *SRQ
	Caps qp.Caps
	// SQSigAll: every send work request gives a completion.
	SQSigAll bool
	// Context is the application's own; see QP.Context.
	Context any
}

// QPAttr is what QP.Modify sets and QP.Query gives (struct ibv_qp_attr). The
// masks are qp.AttrMask's; qp.AttrAV stands for AH, and the Path of the embedded
// Attr is the device's own affair.
type QPAttr struct {
	qp.Attr
	AH AHAttr
}

// QP is a queue pair (IBA 10.2.4).
type QP struct {
	s    *shard
	pd   *PD
	q    *qp.QP
	num  wire.QPN
	init QPInitAttr
	dead atomic.Bool
	// asyncs are the QP's async events.
	asyncs acks
	// heard, if set, is called with the baton held when the first message comes to the QP in
	// state RTR; there is no event then.
	heard func()
	// Of XRC targets (xrc.go): the domain; of a handle, its QP; of the QP, its handles,
	// which change with d.mu and the baton held.
	xrcd    *XRCD
	target  *QP
	handles []*QP

	// Of the holder of the baton:
	gone     bool // destroyed
	touched  bool // in shard.touched
	active   bool // in shard.active
	timerPos int  // in shard.timers, -1: not there
	timerAt  int64
	cnpAt    int64 // when the peer may be told of marked packets again
	neigh    *neighbour
	to       *receiver // whom it sends to, and where its peer's requests come from; see inbound.go
	from     *source
	ah       AHAttr
	groups   int // multicast groups it is attached to
	flows    int
	res      *residency // nil: it has no residency messages
	round    uint64     // of the frame that it got last; see flowTable
}

// CreateQP makes a queue pair in state RESET (ibv_create_qp(3)); Query says what
// its capacities became. Errors: ErrInvalid (no CQ, objects of another device,
// capacities beyond the device's), qp.ErrType (EOPNOTSUPP) for a service that is
// not offered, ErrNoMem at MaxQP.
func (p *PD) CreateQP(in QPInitAttr) (*QP, error) {
	d := p.d
	if err := d.alive(); err != nil {
		return nil, err
	}
	c := in.Caps
	switch in.Type {
	case qp.TypeXRCSend:
		in.RecvCQ, in.SRQ = nil, nil
	case qp.TypeXRCRecv:
		return nil, fmt.Errorf("an XRC target is made in an XRC domain: %w", ErrInvalid)
	}
	if in.SRQ != nil || in.Type == qp.TypeXRCSend {
		c.RecvWR, c.RecvSGE = 0, 0
	}
	if min(c.SendWR, c.RecvWR, c.SendSGE, c.RecvSGE, c.Inline) < 0 || max(c.SendWR, c.RecvWR) > maxQPWR ||
		max(c.SendSGE, c.RecvSGE) > maxSGE || c.Inline > maxInline {
		return nil, fmt.Errorf("QP capacities %+v: %w", c, ErrInvalid)
	}
	if in.SendCQ == nil || in.SendCQ.d != d || in.SRQ != nil && in.SRQ.pd.d != d ||
		in.Type != qp.TypeXRCSend && (in.RecvCQ == nil || in.RecvCQ.d != d) {
		return nil, fmt.Errorf("QP needs send and receive CQ of its device: %w", ErrInvalid)
	}
	if in.SRQ != nil && in.SRQ.xrcd != nil {
		return nil, fmt.Errorf("an SRQ of XRC with a %v QP: %w", in.Type, ErrInvalid)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if in.SendCQ.dead.Load() || in.RecvCQ != nil && in.RecvCQ.dead.Load() || in.SRQ != nil && in.SRQ.dead.Load() {
		return nil, fmt.Errorf("QP's CQ or SRQ: %w", ErrClosed)
	}
	if err := p.ref(); err != nil {
		return nil, err
	}
	q := &QP{s: d.place(&in), pd: p, init: in, timerPos: -1, timerAt: qp.Never}
	q.asyncs.init()
	q.bind(1)
	if err := q.open(c); err != nil {
		q.bind(-1)
		p.refs--
		return nil, fmt.Errorf("create QP: %w", err)
	}
	d.qps[q] = struct{}{}
	return q, nil
}

// open takes a number and makes the QP behind it.
func (q *QP) open(c qp.Caps) error {
	s := q.s
	s.lock()
	num, err := s.takeNumber()
	s.release()
	if err != nil {
		return err
	}
	q.num = num
	in := qp.Init{Type: q.init.Type, Num: num, Caps: c, SignalAll: q.init.SQSigAll, Handle: uint64(num), User: q}
	if q.xrcd != nil {
		in.XRCD = q.xrcd.dom.num
	} else {
		in.PD, in.SendCQ = q.pd.num, q.init.SendCQ.q
	}
	if q.init.RecvCQ != nil {
		in.RecvCQ = q.init.RecvCQ.q
	}
	if q.init.SRQ != nil {
		in.SRQ = q.init.SRQ.q
	}
	inner, err := qp.New(&s.env, in)
	s.lock()
	defer s.release()
	if err != nil {
		s.freeNumber(num)
		return err
	}
	q.q = inner
	s.table[s.index(num)] = q
	return nil
}

// reuseAfter numbers are kept free before one is given out again: with the
// generation in its upper bits a late packet does not meet the next owner.
const reuseAfter = 32

// takeNumber gives a QP number: a generation of 8 bits, and of 16 the shard's number and
// an index in it.
func (s *shard) takeNumber() (wire.QPN, error) {
	var i uint16
	switch fresh := len(s.table) < int(s.local); { // index 0xffff would meet the multicast QPN
	case fresh && len(s.free) <= reuseAfter:
		i = uint16(len(s.table))
		s.table = append(s.table, nil)
		s.gens = append(s.gens, s.gens[0])
	case len(s.free) > 0:
		i = s.free[0]
		s.free = s.free[1:]
	default:
		return 0, fmt.Errorf("%d queue pairs: %w", s.d.maxQPs(), ErrNoMem)
	}
	n := wire.QPN(s.gens[i])<<16 | wire.QPN(s.id)<<(16-s.d.shardBits) | wire.QPN(i)
	s.gens[i]++
	return n, nil
}

func (s *shard) freeNumber(n wire.QPN) {
	i := s.index(n)
	s.table[i] = nil
	s.free = append(s.free, i)
}

// index is where a QP of the shard is in its table, and its bell.
func (s *shard) index(n wire.QPN) uint16 { return uint16(n) & s.local }

// Num is the QP's number.
func (q *QP) Num() wire.QPN { return q.num }

// Type is the QP's transport service.
func (q *QP) Type() qp.Type { return q.init.Type }

// State is the QP's state now.
func (q *QP) State() qp.State { return q.q.State() }

// Caps is what the queues hold, at least what was asked for.
func (q *QP) Caps() qp.Caps { return q.q.Caps() }

// PD is the domain the QP belongs to; nil for an XRC target.
func (q *QP) PD() *PD { return q.pd }

// Context is what the application gave in QPInitAttr.
func (q *QP) Context() any { return q.init.Context }

// limits bounds the attribute values of QPs.
func (d *Device) limits() qp.Limits { return qp.Limits{MTU: d.mtu, MaxRdAtomic: maxRdAtomic} }

// Modify changes the QP's attributes and state (ibv_modify_qp(3)). With
// qp.AttrAV it waits until the peer's MAC is known. Nothing changes when it fails:
// qp.ErrTransition, qp.ErrAttrMask, qp.ErrAttrValue, qp.ErrState (all EINVAL),
// ErrInvalid for an address vector that makes no sense, ErrUnreachable,
// ErrTimeout when the neighbour is silent, ErrNotSupported for alternate paths.
func (q *QP) Modify(a QPAttr, mask qp.AttrMask) error {
	d := q.s.d
	if err := d.alive(); err != nil {
		return err
	}
	if q.dead.Load() {
		return ErrClosed
	}
	if mask&(qp.AttrAltPath|qp.AttrPathMigState) != 0 {
		return fmt.Errorf("alternate paths: %w", ErrNotSupported)
	}
	var n *neighbour
	if mask&qp.AttrAV != 0 {
		// What is not allowed fails before anybody is asked for a MAC.
		from := q.q.State()
		to := from
		if mask&qp.AttrState != 0 {
			to = a.State
		}
		if err := qp.Legal(q.init.Type, from, to, mask); err != nil {
			return err
		}
		var err error
		if a.Path, err = d.path(&a.AH); err != nil {
			return err
		}
		if a.Path.Dst.IsMulticast() {
			return fmt.Errorf("connect to the group %v: %w", a.AH.DGID, ErrInvalid)
		}
		if !d.cfg.NoECN && a.Path.TClass&ecnCE == 0 && q.init.Type != qp.TypeUC {
			a.Path.TClass |= ecnECT0
		}
		if n, a.Path.DstMAC, err = d.resolve(context.Background(), a.Path.Src, a.Path.Dst); err != nil {
			return fmt.Errorf("modify QP: %w", err)
		}
	}
	return q.base().modify(&a, mask, n)
}

func (q *QP) modify(a *QPAttr, mask qp.AttrMask, n *neighbour) error {
	s := q.s
	s.lock()
	defer s.release()
	if q.gone {
		return ErrClosed
	}
	if s.gone.Load() { // since alive looked: nobody would flush what is posted
		return ErrGone
	}
	s.now = s.clock()
	if mask&qp.AttrAV != 0 && a.AH.FlowLabel == 0 {
		// What goes to different shards of the peer is of different flows: it does not
		// share a super-frame, and a peer without a steering program gets it spread.
		remote := a.DestQPN
		if mask&qp.AttrDestQPN == 0 {
			remote = q.q.DestQPN()
		}
		a.Path.SrcPort ^= uint16(remote) >> 12
	}
	if err := q.q.Modify(&a.Attr, mask, s.d.limits()); err != nil {
		return err
	}
	reset := mask&qp.AttrState != 0 && a.State == qp.StateReset
	if mask&qp.AttrAV != 0 {
		q.ah = a.AH
		q.follow(n)
		s.connected(q)
		s.eg.ask(q.q.Peer())
	} else if reset {
		q.follow(nil)
	}
	if reset {
		s.disconnected(q)
		q.ah = AHAttr{}
		q.endResidency()
	}
	s.activate(q)
	s.schedule(q)
	s.progress(false, postRounds)
	return nil
}

// Query tells the QP's attributes and what it was made of (ibv_query_qp(3)).
func (q *QP) Query() (QPAttr, QPInitAttr, error) {
	s, b := q.s, q.base()
	if err := s.d.alive(); err != nil {
		return QPAttr{}, QPInitAttr{}, err
	}
	s.lock()
	defer s.release()
	if q.dead.Load() || b.gone {
		return QPAttr{}, QPInitAttr{}, ErrClosed
	}
	in := q.init
	in.Caps = q.q.Caps()
	return QPAttr{Attr: q.q.Query(), AH: b.ah}, in, nil
}

// Faults are the absent pages that requests to the QP, and its work requests, met so far,
// and what they cost. It stays to be had when the QP is destroyed.
func (q *QP) Faults() mr.Faults {
	q.s.lock()
	defer q.s.release()
	return q.q.Faults()
}

// PostSend appends work requests to the send queue and sends what can be sent
// (ibv_post_send(3)). It returns how many were taken and why the next one was
// not; errors are those of qp.QP.PostSend and ErrGone. In state ERR work requests
// are taken and flushed.
func (q *QP) PostSend(wrs []qp.SendWR) (int, error) {
	if q.dead.Load() {
		return 0, ErrClosed
	}
	if q.s.gone.Load() {
		return 0, ErrGone
	}
	n, err := q.q.PostSend(wrs)
	if n > 0 {
		q.s.post(q.s.index(q.num), n)
	}
	return n, err
}

// PostRecv appends work requests to the receive queue (ibv_post_recv(3)). It
// returns how many were taken and why the next one was not; errors are those of
// qp.QP.PostRecv and ErrGone. In state ERR work requests are taken and flushed.
func (q *QP) PostRecv(wrs []qp.RecvWR) (int, error) {
	if q.dead.Load() {
		return 0, ErrClosed
	}
	if q.s.gone.Load() {
		return 0, ErrGone
	}
	n, err := q.q.PostRecv(wrs)
	// Only an engine that flushes needs to be told; the state is looked at after
	// the posting, as the transition to ERR flushes after it has set the state.
	if n > 0 && q.q.State() == qp.StateErr {
		q.Kick()
	}
	return n, err
}

// Destroy ends the QP (ibv_destroy_qp(3)): ErrClosed twice. Its completions that
// were not polled are lost. It waits until its async events are acknowledged. ErrBusy
// while the QP is attached to a multicast group or has flows.
func (q *QP) Destroy() error {
	d := q.s.d
	if d.closed.Load() {
		return ErrClosed
	}
	d.mu.Lock()
	if q.dead.Load() {
		d.mu.Unlock()
		return ErrClosed
	}
	if q.attached() {
		d.mu.Unlock()
		return fmt.Errorf("QP %#x is attached to a multicast group, or has flows: %w", uint32(q.num), ErrBusy)
	}
	delete(d.qps, q)
	err := q.teardown()
	d.mu.Unlock()
	q.asyncs.wait()
	return err
}

func (q *QP) attached() bool {
	q.s.lock()
	defer q.s.release()
	return q.groups > 0 || q.flows > 0
}

// teardown is called with d.mu held.
func (q *QP) teardown() error {
	if q.target != nil {
		return q.drop()
	}
	err := q.end()
	q.pd.refs--
	q.bind(-1)
	if err != nil {
		return errors.Join(fmt.Errorf("destroy QP %#x", uint32(q.num)), err)
	}
	return nil
}

// end takes the QP out of the engine.
func (q *QP) end() error {
	q.dead.Store(true)
	s := q.s
	s.lock()
	q.gone = true
	q.endResidency()
	s.timers.remove(q)
	q.follow(nil)
	s.now = s.clock()
	s.detachAll(q)
	s.dropFlows(q)
	s.freeNumber(q.num)
	s.disconnected(q)
	err := q.q.Destroy()
	s.release()
	s.d.events.remove(func(e *asyncEvent) bool { return e.QP == q })
	return err
}
