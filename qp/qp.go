// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// Errors of posting and creating.
var (
	// ErrState: the QP's state does not allow the call (EINVAL).
	ErrState = errors.New("QP state does not allow this")
	// ErrOpcode: the work request's opcode is unknown or not for this service (EINVAL).
	ErrOpcode = errors.New("work request opcode not valid for this QP")
	// ErrLength: a message of more than 2 GiB, or an atomic that is not 8 bytes (EINVAL).
	ErrLength = errors.New("message length out of range")
	// ErrHasSRQ: receives are posted to the SRQ, not to the QP, which is of XRC or
	// was made with one (EINVAL).
	ErrHasSRQ = errors.New("the QP has no receive queue of its own")
	// ErrType: the device offers no QPs of that service (EOPNOTSUPP).
	ErrType = errors.New("transport service not offered")
)

// MaxMessage is the longest message in bytes (IBA 9.7.7.1.3: 2^31).
const MaxMessage = 1 << 31

// Never is the Deadline of a QP that waits for nothing.
const Never = int64(math.MaxInt64)

// Egress takes the packets QPs send. Begin and End, or Cancel, come in
// pairs; what Begin returned is valid until then.
type Egress interface {
	// Begin reserves a packet of n bytes, from the BTH to the ICRC, on a path and
	// returns them. nil: no room now; try again in a later Run.
	Begin(path *wire.Path, n int) []byte
	// End takes the packet, filled in up to its ICRC.
	End()
	// Borrow has the packet begun last take the n bytes in front of its ICRC from a region
	// when it leaves, where Accessor.Lend has just found them; what Begin returned ends
	// with the headers then. Such a packet is lost if they are not there any more. false: they
	// have to be copied.
	Borrow(r *mr.Region, iova uint64, n int) bool
	// Cancel gives back what Begin reserved.
	Cancel()
	// Settle sees to it that no packet that has borrowed waits to be sent.
	Settle()
	// Suspect tells that packets on a path seem to be lost again and again.
	Suspect(path *wire.Path)
}

// Env is what QPs need of the shard they live on. All of it is used with the
// shard's baton held.
type Env struct {
	Keys *mr.Table
	Mem  *mr.Accessor
	Out  Egress
	// Now is the engine's clock in nanoseconds.
	Now   func() int64
	Event func(q *QP, ev EventType)
	Stats *Stats
	// AH gives the path of the address handle with this index for a datagram of
	// q; nil if q's protection domain has none. The path is valid until the next call.
	AH func(q *QP, index uint32) *wire.Path
	// Frames takes the frames of RAW_PACKET QPs.
	Frames FrameEgress
	// SRQ gives the SRQ of XRC with this number; nil if there is none.
	SRQ func(num uint32) *SRQ
	// Persist writes n bytes at iova of a region back to where they persist, beside
	// the engine, and then has QP.Persisted called with the ticket and the outcome.
	Persist func(q *QP, r *mr.Region, iova, n uint64, ticket uint32)
	// Advise is asked before a WRITE or READ of a QP begins that has SetAdvised, and says
	// until when it had better wait, as Env.Now; 0: it may go.
	Advise func(q *QP, w *SendWQE) int64
	// got is what Stats is to count of the packets that came since the last EndBatch.
	got struct{ pkts, bytes, recvs uint64 }
	// Window is how many packets all QPs may have out that are not acknowledged, 0 for what
	// the default queue of a TAP device holds with some to spare. Ready is called for a QP that
	// has waited for room among them: it is to be Run.
	Window int32
	Ready  func(q *QP)
	share  share
	// ReadResponses is how many responses with READ data have come.
	ReadResponses uint64
	// sentPkts and sentBytes are to be added to Stats, see count.
	sentPkts, sentBytes uint64
}

// count adds to Stats what requesters have sent.
func (e *Env) count() {
	if e.sentPkts != 0 {
		e.Stats.SentPkts.Add(e.sentPkts)
		e.Stats.SentBytes.Add(e.sentBytes)
		e.sentPkts, e.sentBytes = 0, 0
	}
}

// Caps is what a QP's queues hold: work requests, elements of a list, bytes of
// inline data.
type Caps struct {
	SendWR, RecvWR, SendSGE, RecvSGE, Inline int
}

// Init says what to make (ibv_create_qp(3)). Num is chosen by the device.
type Init struct {
	Type           Type
	Num            wire.QPN
	PD             mr.PD
	SendCQ, RecvCQ *CQ
	SRQ            *SRQ
	// XRCD is the domain of an XRC target, whose PD, CQs, SRQ and Caps mean nothing;
	// an initiator has no RecvCQ and SRQ.
	XRCD XRCD
	Caps Caps
	// SignalAll: every send work request gives a completion.
	SignalAll bool
	// Handle is given back in each CQE, for drivers.
	Handle uint64
	// User is what the device hangs on the QP.
	User any
}

// QP is a queue pair. PostSend, PostRecv, State and the plain getters may be
// called from anywhere; all else only with the shard's baton held.
type QP struct {
	env  *Env
	tr   *transport
	init Init
	caps Caps

	state   atomic.Uint32 // State; written under the baton
	attr    Attr
	mtu     uint32 // attr.PathMTU in bytes
	closed  bool
	policy  mr.FaultPolicy // see SetFaultPolicy
	advised bool           // see SetAdvised
	dest    *Dest          // see SetDest

	faults     mr.Faults // of its requests and work requests
	losses     uint64    // how often it went back after a loss
	rnrsHeeded uint64    // how often because the peer asked it to wait

	requests int  // packets that the responder has had since Run
	acked    bool // just one, and nothing was sent but its acknowledgement
	answers  int  // see HoldAck
	ackLast  bool

	sqmu sync.Mutex // driver's side of the send ring
	sq   *Ring
	rq   *recvRing // nil with an SRQ, and for XRC

	req  requester
	comp completer
	resp responder
}

// New makes a QP in state RESET. Caps are rounded up to what Caps() then says.
// It fails with ErrType, or with the error of allocating the rings.
func New(env *Env, in Init) (*QP, error) {
	tr := transportOf(in.Type)
	if tr == nil {
		return nil, fmt.Errorf("%w: %v", ErrType, in.Type)
	}
	c := in.Caps
	if tr.target {
		c = Caps{}
	}
	c.SendSGE, c.RecvSGE = max(c.SendSGE, 1), max(c.RecvSGE, 1)
	stride := sendStride(c.SendSGE, c.Inline)
	// What rounding left over is the caller's.
	c.SendSGE, c.Inline = max(c.SendSGE, (stride-sendWQESize)/sgeSize), stride-sendWQESize
	c.RecvSGE = (recvStride(c.RecvSGE) - recvWQESize) / sgeSize
	q := &QP{env: env, tr: tr, init: in, policy: mr.FaultByRegion}
	var err error
	if q.sq, err = newRing(max(c.SendWR, 1), stride); err != nil {
		return nil, err
	}
	c.SendWR = q.sq.Slots()
	if in.SRQ == nil && !tr.initiator && !tr.target {
		if q.rq, err = newRecvRing(max(c.RecvWR, 1), c.RecvSGE); err != nil {
			return nil, errors.Join(err, q.sq.close())
		}
		c.RecvWR = q.rq.ring.Slots()
	} else {
		c.RecvWR, c.RecvSGE = 0, 0
	}
	if tr.target {
		c = Caps{} // its send ring is there for the state
	}
	q.caps = c
	q.req.init(q)
	q.comp.init(q)
	q.resp.init(q)
	return q, nil
}

// Num is the QP's number.
func (q *QP) Num() wire.QPN { return q.init.Num }

// Type is the QP's transport service.
func (q *QP) Type() Type { return q.init.Type }

// Caps is what the queues really hold, at least what was asked for.
func (q *QP) Caps() Caps { return q.caps }

// PD is the QP's protection domain.
func (q *QP) PD() mr.PD { return q.init.PD }

// User is what the device gave in Init.
func (q *QP) User() any { return q.init.User }

// State is the QP's state now.
func (q *QP) State() State { return State(q.state.Load()) }

// PKey is the partition key in force: the default partition, full member.
func (q *QP) PKey() uint16 { return wire.DefaultPKey }

// Peer is the path to the peer: what the demux checks senders against.
func (q *QP) Peer() *wire.Path { return &q.attr.Path }

// SendRing and RecvRing are the work queues' rings for drivers in another
// language; RecvRing is nil for a QP with an SRQ.
func (q *QP) SendRing() *Ring { return q.sq }

// RecvRing is described at SendRing.
func (q *QP) RecvRing() *Ring {
	if q.rq == nil {
		return nil
	}
	return q.rq.ring
}

// wrOps says for each send opcode what a work request must look like and what
// its completion is called.
var wrOps = [...]struct {
	svc  svc
	wc   WCOpcode
	kind wire.Kind
}{
	WRWrite:          {svcRel | svcUC, WCRDMAWrite, wire.KindWrite},
	WRWriteImm:       {svcRel | svcUC, WCRDMAWrite, wire.KindWrite},
	WRSend:           {svcRel | svcUC | svcUD | svcRaw, WCSend, wire.KindSend},
	WRSendImm:        {svcRel | svcUC | svcUD, WCSend, wire.KindSend},
	WRRead:           {svcRel, WCRDMARead, wire.KindRead},
	WRAtomicCmpSwap:  {svcRel, WCCompSwap, wire.KindAtomic},
	WRAtomicFetchAdd: {svcRel, WCFetchAdd, wire.KindAtomic},
	WRLocalInv:       {svcRel | svcUC, WCLocalInv, wire.KindNone},
	WRBindMW:         {svcRel | svcUC, WCBindMW, wire.KindNone},
	WRSendInv:        {svcRel, WCSend, wire.KindSend},
	WRFlush:          {svcRel, WCFlush, wire.KindFlush},
	WRAtomicWrite:    {svcRel, WCAtomicWrite, wire.KindAtomicWrite},
}

// PostSend appends work requests to the send queue (ibv_post_send(3)). It
// returns how many were taken and, if not all, why the next was refused:
// ErrState (RESET, INIT, RTR), ErrFull, ErrTooManySGE, ErrOpcode, ErrLength, ErrFlush.
// The device must be told afterwards that there is work.
func (q *QP) PostSend(wrs []SendWR) (n int, err error) {
	q.sqmu.Lock()
	defer q.sqmu.Unlock()
	// Looked at under the lock: Destroy sets RESET, then takes the lock, and only
	// then frees the ring.
	if s := q.State(); s <= StateRTR {
		return 0, fmt.Errorf("%w: post to send queue in %v", ErrState, s)
	}
	p := q.sq.prod().Load()
	for n = range wrs {
		if err = q.putSend(&wrs[n], p); err != nil {
			break
		}
		p++
	}
	if err == nil {
		n = len(wrs)
	}
	q.sq.prod().Store(p)
	return n, err
}

func (q *QP) putSend(wr *SendWR, p uint32) error {
	if p-q.sq.cons().Load() > q.sq.mask {
		return ErrFull
	}
	if int(wr.Opcode) >= len(wrOps) || wrOps[wr.Opcode].svc&q.init.Type.svc() == 0 {
		return ErrOpcode
	}
	op := &wrOps[wr.Opcode]
	w := q.sq.sendWQE(p)
	*w = SendWQE{ID: wr.ID, Opcode: wr.Opcode, Flags: wr.Flags, ImmOrKey: wr.Imm, RemoteAddr: wr.RemoteAddr,
		RKey: wr.RKey, CompareAdd: wr.CompareAdd, Swap: wr.Swap,
		AH: wr.AH, DestQPN: uint32(wr.RemoteQPN), QKey: wr.RemoteQKey, SRQN: wr.RemoteSRQN}
	switch wr.Opcode {
	case WRSendInv:
		w.ImmOrKey = uint32(wr.InvKey)
	case WRLocalInv, WRBindMW:
		return putManaged(wr, w)
	}
	if op.kind == wire.KindFlush {
		return q.putFlush(wr, w)
	}
	if wr.Flags&SendInline != 0 {
		if op.kind == wire.KindRead || op.kind == wire.KindAtomic {
			return ErrOpcode
		}
		return q.putInline(wr, w)
	}
	if len(wr.SGL) > q.caps.SendSGE {
		return ErrTooManySGE
	}
	sum := uint64(0)
	for i := range wr.SGL {
		sum += uint64(wr.SGL[i].Length)
	}
	if sum > MaxMessage || fixed(op.kind) && sum != wire.AtomicLen {
		return ErrLength
	}
	w.Length, w.NumSGE = uint32(sum), uint16(len(wr.SGL))
	copy(w.sges(), wr.SGL)
	return nil
}

// fixed says whether a kind of request is about one word of 8 bytes.
func fixed(k wire.Kind) bool { return k == wire.KindAtomic || k == wire.KindAtomicWrite }

// putInline copies the payload into the slot.
func (q *QP) putInline(wr *SendWR, w *SendWQE) error {
	n := uint64(len(wr.Inline))
	for i := range wr.SGL {
		n += uint64(wr.SGL[i].Length)
	}
	if n > uint64(q.caps.Inline) {
		return ErrTooManySGE
	}
	if fixed(wrOps[w.Opcode].kind) && n != wire.AtomicLen {
		return ErrLength
	}
	w.Length = uint32(n)
	dst := w.inline()
	dst = dst[copy(dst, wr.Inline):]
	for i := range wr.SGL {
		dst = dst[copy(dst, bytesAt(wr.SGL[i].Addr, wr.SGL[i].Length)):]
	}
	return nil
}

// PostRecv appends work requests to the receive queue (ibv_post_recv(3)). It
// returns how many were taken and, if not all, why the next was refused:
// ErrState (RESET), ErrHasSRQ, ErrFull, ErrTooManySGE.
func (q *QP) PostRecv(wrs []RecvWR) (int, error) {
	if q.rq == nil {
		return 0, ErrHasSRQ
	}
	if q.State() == StateReset {
		return 0, fmt.Errorf("%w: post to receive queue in RESET", ErrState)
	}
	return q.rq.post(wrs)
}

// Handle takes one packet for this QP. The caller has checked what does not
// need the QP's inner state: ICRC, partition key, service, source address.
func (q *QP) Handle(p *wire.Packet) {
	q.env.got.pkts++
	q.env.got.bytes += uint64(len(p.Payload))
	q.enter()
	switch s := q.State(); {
	case s < StateRTR || s == StateErr:
		q.env.Stats.Dropped.Add(1)
	case p.Info.Mask&wire.Request != 0 && !q.tr.initiator:
		q.requests++
		q.resp.handle(p)
	case p.Info.Mask&wire.Request == 0 && s >= StateRTS && !q.tr.target:
		q.comp.handle(p)
	default:
		q.env.Stats.Dropped.Add(1)
	}
}

// EndBatch places what the packets of this batch left staged; it is called after the last
// of those that Handle was called with. Acknowledgements
// that wait for it are sent by the Run that follows.
func (q *QP) EndBatch() {
	if got := &q.env.got; got.pkts|got.recvs > 0 {
		s := q.env.Stats
		s.RcvdPkts.Add(got.pkts)
		s.RcvdBytes.Add(got.bytes)
		s.Recvs.Add(got.recvs)
		*got = struct{ pkts, bytes, recvs uint64 }{}
	}
	q.enter()
	q.resp.endBatch()
	q.comp.endBatch()
}

// Requests is how many packets the responder has had since Run.
func (q *QP) Requests() int { return q.requests }

// HoldAck says whether nothing is to be sent but an acknowledgement of the one packet that
// has come since Run, and what was posted after such a packet went before the next came, as
// a rule. Then it may wait a little: the next Run, which the caller sees to, sends it behind
// what was posted until then.
func (q *QP) HoldAck() bool {
	o := &q.resp.out
	if q.answers < sureAnswers || q.requests != 1 || q.State() != StateRTS || o.n != 1 || q.resp.waits() ||
		q.req.rec.probed || q.req.cur != q.sq.prod().Load() {
		return false
	}
	e := o.at(0)
	q.ackLast = e.kind == respKindAck && !e.wait
	return q.ackLast
}

const (
	// HoldAck is for those who have answered so many times, and maxAnswers is how many
	// are remembered.
	sureAnswers, maxAnswers = 4, 8
)

// Run sends up to budget packets: first what the responder owes, then what the
// send queue asks for; after HoldAck the other way round. It says whether more could be
// sent at once.
func (q *QP) Run(budget int) (more bool) {
	psn, n, held := q.req.psn, q.requests, q.ackLast
	q.requests, q.ackLast = 0, false
	more = q.run(budget, held)
	sent := q.req.psn != psn
	switch {
	case sent && (held || q.acked && n == 0):
		q.answers = min(q.answers+1, maxAnswers)
	case held, q.acked && n > 0:
		q.answers = max(q.answers-2, 0)
	}
	if sent || n > 0 {
		q.acked = !sent && n == 1
	}
	return more
}

func (q *QP) run(budget int, ackLast bool) (more bool) {
	s := q.State()
	if s < StateRTR {
		return false
	}
	q.enter()
	if ackLast && s == StateRTS {
		q.req.run(budget)
		s = q.State()
	}
	if s != StateErr && q.resp.waits() {
		q.resp.resume()
		s = q.State()
	}
	switch s {
	case StateErr:
		q.flush()
		return false
	case StateSQE:
		q.flushSend() // what was posted since (IBA 10.3.1.6)
		return false
	}
	left, more := q.resp.run(budget)
	if s >= StateRTS && q.State() != StateErr {
		if left == 0 {
			return true
		}
		more = q.req.run(left) || more
	}
	return more
}

// Deadline is when Tick wants to be called next, in ns of Env.Now; Never if not.
func (q *QP) Deadline() int64 { return min(q.req.deadline(), q.resp.lookAt) }

// Tick acts on timers that have run out.
func (q *QP) Tick() {
	if s := q.State(); s >= StateRTR && s != StateErr { // in RTR: the rate of READ responses
		q.req.tick(q.env.Now())
	}
}

// event reports an asynchronous event of this QP.
func (q *QP) event(ev EventType) {
	if q.env.Event != nil {
		q.env.Event(q, ev)
	}
}

// finishSend completes a send work request: it has release free the slot on the
// ring, and only then shows the completion, so that whoever polls it can post again.
func (q *QP) finishSend(w *SendWQE, st WCStatus, release func()) {
	silent := st == WCSuccess && w.Flags&SendSignaled == 0 && !q.init.SignalAll
	e := CQE{ID: w.ID, Status: st, QPN: uint32(q.init.Num), Timestamp: uint64(q.env.Now()), UserQP: q.init.Handle}
	if int(w.Opcode) < len(wrOps) {
		e.Opcode = wrOps[w.Opcode].wc
		switch k := wrOps[w.Opcode].kind; {
		case st != WCSuccess:
		case k == wire.KindRead || k == wire.KindAtomic:
			e.ByteLen = w.Length
		case k == wire.KindSend:
			q.env.Stats.Sends.Add(1)
		}
	}
	release()
	if !silent {
		q.init.SendCQ.push(&e, false)
	}
}

// failSend puts the QP into the state that follows a send work request's failure:
// ERR, or SQE for services whose send and receive side do not depend on each other
// (IBA 10.3.1.6).
func (q *QP) failSend() {
	if q.tr.acked {
		q.toError()
	} else {
		q.toSQE()
	}
}

// toError is the transition to ERR: everything outstanding is flushed (IBA
// 10.3.1.7).
func (q *QP) toError() {
	if q.State() == StateErr {
		return
	}
	q.setState(StateErr)
	q.req.stop()
	q.comp.stop()
	q.resp.stop()
	q.flush()
	if q.init.SRQ != nil || q.tr.target {
		// IBA 10.2.9.2 / 11.6.3.4: after this no more WQEs are taken off the SRQ.
		q.event(EventQPLastWQE)
	}
}

// flushSend completes every queued send work request with WR_FLUSH_ERR, in order.
func (q *QP) flushSend() {
	for c := q.sq.cons().Load(); c != q.sq.prod().Load(); c++ {
		q.finishSend(q.sq.sendWQE(c), WCWRFlushErr, func() { q.sq.cons().Store(c + 1) })
	}
	q.req.rewind()
}

// flush completes every queued work request with WR_FLUSH_ERR, in order.
func (q *QP) flush() {
	q.flushSend()
	if q.rq == nil {
		return
	}
	for q.rq.take(&q.resp.recv) {
		q.resp.completeRecv(&CQE{Status: WCWRFlushErr, Opcode: WCRecv}, false)
	}
}

// Destroy ends the QP: its queues are freed and its completions taken out of
// the CQs, as ibv_destroy_qp(3) has it.
func (q *QP) Destroy() error {
	if q.closed {
		return ErrState
	}
	q.reset()
	q.closed = true
	q.env.Keys.ReleaseQP(uint32(q.init.Num))
	err := q.sq.close()
	if q.rq != nil {
		err = errors.Join(err, q.rq.close())
	}
	return err
}

// reset empties the QP (IBA 10.3.1.1).
func (q *QP) reset() {
	q.setState(StateReset)
	q.req.stop()
	q.comp.stop()
	q.resp.stop()
	q.sqmu.Lock()
	q.sq.cons().Store(q.sq.prod().Load())
	q.sqmu.Unlock()
	q.req.init(q)
	q.comp.init(q)
	q.resp.init(q)
	if q.rq != nil {
		q.rq.dmu.Lock()
		q.rq.ring.cons().Store(q.rq.ring.prod().Load())
		q.rq.dmu.Unlock()
	}
	if q.init.SendCQ != nil {
		q.init.SendCQ.clean(q.init.Num)
	}
	if q.init.RecvCQ != nil && q.init.RecvCQ != q.init.SendCQ {
		q.init.RecvCQ.clean(q.init.Num)
	}
	q.attr = Attr{}
}
