// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// The requester turns the send queue into packets. It owns the ring's consumer
// index together with the completer, which retires work requests through
// requester.retire.
//
// PSNs (all mod 2^24) of what it knows:
//
//	una ≤ psn ≤ end      una  oldest PSN not acknowledged
//	                     psn  next PSN to send; below end while retransmitting
//	                     end  first PSN never sent
//
// Work requests (ring indices): head ≤ cur ≤ producer; head is the oldest not
// completed, cur the one psn belongs to (or the next to start).

// sendState is what the requester remembers about a work request under way,
// beside its slot in the ring.
type sendState struct {
	first, last wire.PSN
	started     bool
	// fail is the status with which the request ends once it is the oldest:
	// local errors wait for the work before them (IBA 10.8.3.1).
	fail WCStatus
	// moved is mr.Table.Moved when the request began.
	moved uint64
}

// readReq is an outstanding READ request or atomic: the PSNs of its responses.
type readReq struct{ first, last wire.PSN }

const (
	// maxWindow is how many unacknowledged packets a QP may have out, readBurst
	// how many responses one READ request asks for: longer READs are asked for
	// piece by piece, so that the receiver, not the sender, sets the pace.
	maxWindow = 256
	readBurst = 64
	// shardWindow is shared by the QPs that are sending: the frames that fit
	// into the default queue of a TAP device (1000) with some to spare.
	shardWindow = 768
)

type requester struct {
	q              *QP
	state          []sendState // by ring index & mask
	head, cur      uint32
	una, psn, end  wire.PSN
	sinceAckReq    uint32
	reads          []readReq // outstanding, oldest first; at most MaxRdAtomic
	ackAt, rnrAt   int64     // deadlines in ns, Never if unset
	rateAt         int64     // when the rate limit lets the next packet go; Never: not waiting
	lookAt         int64     // when to look again for the memory that is waited for, see hold
	paidUntil      int64     // up to when the packets sent have used the rate limit up
	cong           congestion
	rec            recovery
	rate           dcqcn
	retries        uint8    // left of RetryCnt
	rnrRetries     uint8    // left of RNRRetry
	recovering     bool     // went back because of a loss; until progress
	nakked         bool     // went back because of a NAK; until progress or a timeout
	twice          bool     // send the oldest packet two times, see tick
	forceAck       bool     // ask for an acknowledgement with the next packet
	inLine         bool     // waits for room of the shard's, see share
	inDestLine     bool     // waits for room of the receiver's, see Dest
	out            int32    // packets out, as the shard has counted them
	asked          wire.PSN // last packet that asked for an acknowledgement
	heldSince      int64    // when what is next was first held; -1: not
	held           bool     // nothing is sent: memory is to be had later
	heldBack       bool     // the memory is for results, and all from una on is to be asked for again
	drainAnnounced bool
}

func (r *requester) init(q *QP) {
	st, rd := r.state, r.reads
	if st == nil {
		st = make([]sendState, q.sq.Slots())
	}
	clear(st)
	*r = requester{q: q, state: st, reads: rd[:0], ackAt: Never, rnrAt: Never, rateAt: Never, lookAt: Never, heldSince: -1, inLine: r.inLine, inDestLine: r.inDestLine}
	r.rec.init()
	r.rewind()
}

// rewind sets the indices to the ring's consumer: nothing is under way.
func (r *requester) rewind() {
	r.head = r.q.sq.cons().Load()
	r.cur = r.head
}

// start is the transition to RTS.
func (r *requester) start() {
	r.una = r.q.attr.SQPSN
	r.psn, r.end = r.una, r.una
	r.asked = r.una.Add(wire.PSNMask)
	r.retries, r.rnrRetries = r.q.attr.RetryCnt, r.q.attr.RNRRetry
	if n := int(r.q.attr.MaxRdAtomic); cap(r.reads) < n {
		r.reads = make([]readReq, 0, n)
	}
}

// stop ends all activity: error or reset.
func (r *requester) stop() {
	r.ackAt, r.rnrAt, r.rateAt, r.lookAt, r.rec.probeAt = Never, Never, Never, Never, Never
	r.probesOver()
	r.held, r.heldBack = false, false
	r.reads = r.reads[:0]
	for i := range r.state {
		r.state[i] = sendState{}
	}
	r.psn, r.una = r.end, r.end
	r.account()
	r.q.env.Out.Settle()
}

func (r *requester) at(i uint32) *sendState { return &r.state[i&r.q.sq.mask] }

func (r *requester) deadline() int64 { return min(r.ackAt, r.rnrAt, r.rateAt, r.lookAt, r.rec.probeAt) }

// run sends what may be sent, up to budget packets.
func (r *requester) run(budget int) (more bool) {
	if r.cur == r.q.sq.prod().Load() && !r.rec.probed {
		return false
	}
	r.q.env.Mem.Linger()
	more = r.sendSome(budget)
	r.q.env.Mem.Leave()
	r.q.env.count()
	return more
}

func (r *requester) sendSome(budget int) (more bool) {
	if r.rnrAt != Never || r.held {
		return false
	}
	if r.rec.probed {
		r.probeAnswered()
	}
	for {
		if r.cur == r.q.sq.prod().Load() {
			return false
		}
		w, s := r.q.sq.sendWQE(r.cur), r.at(r.cur)
		if !r.mayGo(w, s) {
			return false
		}
		if budget == 0 {
			return true
		}
		if wrOps[w.Opcode].kind == wire.KindNone {
			if !r.manage(w, s) {
				r.checkHead()
				return false
			}
			budget--
			continue
		}
		if !r.withinRate() {
			return false
		}
		if !s.started {
			if r.q.advised && !r.adviseGo(w) {
				return false
			}
			r.begin(w, s)
		}
		var sent sendResult
		switch {
		case wrOps[w.Opcode].kind == wire.KindRead:
			sent = r.sendRead(w, s, readBurst)
		case r.q.tr.raw:
			sent = r.sendFrame(w, s)
		default:
			sent = r.send(w, s)
		}
		switch sent {
		case sendFull:
			return true
		case sendBlocked:
			return false
		case sendFailed:
			r.checkHead()
			return false
		}
		budget--
	}
}

type sendResult uint8

const (
	sendOK      sendResult = iota
	sendFull               // the device has no room
	sendBlocked            // window, outstanding reads: wait for a response
	sendFailed             // a local error is noted in the sendState
)

// mayGo says whether the work request at cur may send its next packet, apart
// from windows.
func (r *requester) mayGo(w *SendWQE, s *sendState) bool {
	if s.fail != WCSuccess {
		return false
	}
	if s.started && r.psn != s.first {
		return true
	}
	if !s.started && r.q.State() == StateSQD {
		return false // IBA 10.3.1.5: nothing new is started
	}
	// IBA 10.8.3.3: a fenced request waits for READs and atomics before it.
	// One that is under way has been let through before.
	return w.Flags&SendFence == 0 || s.started || len(r.reads) == 0
}

// begin gives a work request its PSNs.
func (r *requester) begin(w *SendWQE, s *sendState) {
	n := uint32(1)
	if k := w.gathers(); k > 0 {
		n = uint32((uint64(k) + uint64(r.q.mtu) - 1) / uint64(r.q.mtu))
	}
	*s = sendState{started: true, first: r.end, last: r.end.Add(n - 1), moved: r.q.env.Keys.Moved()}
}

// packetOps are the opcodes of a message's packets: only, first, middle, last.
type packetOps struct{ only, first, middle, last wire.Opcode }

// rcPackets has the opcodes of RC; transport.opcode gives those of other services.
var rcPackets = [...]packetOps{
	WRWrite:          {wire.RCWriteOnly, wire.RCWriteFirst, wire.RCWriteMiddle, wire.RCWriteLast},
	WRWriteImm:       {wire.RCWriteOnlyImm, wire.RCWriteFirst, wire.RCWriteMiddle, wire.RCWriteLastImm},
	WRSend:           {wire.RCSendOnly, wire.RCSendFirst, wire.RCSendMiddle, wire.RCSendLast},
	WRSendImm:        {wire.RCSendOnlyImm, wire.RCSendFirst, wire.RCSendMiddle, wire.RCSendLastImm},
	WRAtomicCmpSwap:  {only: wire.RCCompareSwap},
	WRAtomicFetchAdd: {only: wire.RCFetchAdd},
	WRSendInv:        {wire.RCSendOnlyInv, wire.RCSendFirst, wire.RCSendMiddle, wire.RCSendLastInv},
	WRFlush:          {only: wire.RCFlush},
	WRAtomicWrite:    {only: wire.RCAtomicWrite},
}

func (o *packetOps) pick(first, last bool) wire.Opcode {
	switch {
	case first && last:
		return o.only
	case first:
		return o.first
	case last:
		return o.last
	}
	return o.middle
}

// send emits the packet psn of any request but a READ.
func (r *requester) send(w *SendWQE, s *sendState) sendResult {
	q := r.q
	newAtomic := w.answered() != wire.KindNone && r.issued(r.psn) == nil
	if newAtomic && len(r.reads) >= int(q.attr.MaxRdAtomic) {
		return r.readsFull(s)
	}
	room := int32(1)
	if q.tr.acked {
		if room = r.room(); room == 0 {
			return sendBlocked
		}
	}
	path := r.route(w, s)
	if path == nil {
		return sendFailed
	}
	first, last := r.psn == s.first, r.psn == s.last
	op := q.tr.opcode(rcPackets[w.Opcode].pick(first, last))
	info := op.Info()

	off := uint32(r.psn.Sub(s.first)) * q.mtu
	n := min(w.gathers()-off, q.mtu)
	pad := -n & 3
	size := info.HdrLen + int(n+pad) + wire.ICRCLen
	b := q.env.Out.Begin(path, size)
	if b == nil {
		return sendFull
	}
	// The last packet of a message, one every so often, and the last that the
	// window admits ask for an acknowledgement.
	ackReq := q.tr.acked && (last || r.forceAck || room == 1 || r.sinceAckReq >= uint32(r.window())/4)
	var bth wire.BTH // field by field: a literal is built elsewhere, and waited for
	bth.Op, bth.Pad, bth.PKey, bth.DestQP, bth.AckReq, bth.PSN = op, uint8(pad), q.PKey(), r.dest(w), ackReq, r.psn
	bth.SE = last && w.Flags&SendSolicited != 0
	bth.Put(b)
	if info.XRCETH >= 0 {
		wire.XRCETH{SRQ: w.SRQN}.Put(b[info.XRCETH:])
	}
	if info.DETH >= 0 {
		r.deth(w).Put(b[info.DETH:])
	}
	if info.RETH >= 0 {
		wire.RETH{VA: w.RemoteAddr, RKey: uint32(w.RKey), Len: w.Length}.Put(b[info.RETH:])
	}
	if info.FETH >= 0 {
		fethOf(w).Put(b[info.FETH:])
	}
	if info.AtomicETH >= 0 {
		e := wire.AtomicETH{VA: w.RemoteAddr, RKey: uint32(w.RKey), SwapAdd: w.CompareAdd}
		if w.Opcode == WRAtomicCmpSwap {
			e.SwapAdd, e.Compare = w.Swap, w.CompareAdd
		}
		e.Put(b[info.AtomicETH:])
	}
	if info.ImmDt >= 0 {
		wire.ImmDt(w.ImmOrKey).Put(b[info.ImmDt:])
	}
	if info.IETH >= 0 {
		wire.IETH(w.ImmOrKey).Put(b[info.IETH:])
	}
	if n > 0 {
		// A retransmitted packet is copied, and so is the last: should a program change what
		// it has posted, the ICRC of what is borrowed may be wrong. That is then told by what
		// follows, and not so the second time.
		lent, err := false, error(nil)
		if q.tr.acked && !last && r.psn == r.end && w.Flags&SendInline == 0 {
			lent, err = q.lend(s.moved, w.sges(), off, n)
		}
		if err == nil && !lent {
			err = r.gather(w, s, off, b[info.HdrLen:info.HdrLen+int(n)])
			clear(b[info.HdrLen+int(n) : info.HdrLen+int(n+pad)])
		}
		if err != nil {
			q.env.Out.Cancel()
			return r.gatherError(s, err)
		}
	}
	q.env.Out.End()
	if newAtomic {
		r.reads = append(r.reads, readReq{r.psn, r.psn})
	}
	r.pay(int64(n))
	if !q.tr.acked {
		q.env.sentPkts++
		q.env.sentBytes += uint64(n)
		r.done(w)
		return sendOK
	}
	r.sent(1, int(n), ackReq)
	return sendOK
}

// sendRead emits one READ request, for up to so many responses.
func (r *requester) sendRead(w *SendWQE, s *sendState, most int32) sendResult {
	q := r.q
	room := r.room()
	want := s.last.Sub(r.psn) + 1
	var n int32
	again := r.issued(r.psn)
	if again != nil {
		// IBA 9.7.5.1.4: what is asked for once more is a part of one earlier
		// request; the responder need not know more than one of them at a time. All of
		// it: the responses to later requests may be on their way already.
		if n = again.last.Sub(r.psn) + 1; n > most && r.split(r.psn.Add(uint32(most))) {
			n = most
		}
		if n > room && r.psn != r.una {
			return sendBlocked
		}
	} else {
		if len(r.reads) >= int(q.attr.MaxRdAtomic) {
			return r.readsFull(s)
		}
		n = min(want, room, most)
		// A short piece now would cost a request of its own: wait for room unless
		// nothing is out at all.
		if n <= 0 || n < want && n < min(most, r.rec.allowed/2) && r.psn != r.una {
			return sendBlocked
		}
	}
	op := q.tr.opcode(wire.RCReadRequest)
	info := op.Info()
	b := q.env.Out.Begin(&q.attr.Path, info.HdrLen+wire.ICRCLen)
	if b == nil {
		return sendFull
	}
	off := uint32(r.psn.Sub(s.first)) * q.mtu
	length := w.Length - off
	if r.psn.Add(uint32(n-1)) != s.last {
		length = uint32(n) * q.mtu
	}
	bth := wire.BTH{Op: op, PKey: q.PKey(), DestQP: q.attr.DestQPN, AckReq: true, PSN: r.psn}
	bth.Put(b)
	if info.XRCETH >= 0 {
		wire.XRCETH{SRQ: w.SRQN}.Put(b[info.XRCETH:])
	}
	wire.RETH{VA: w.RemoteAddr + uint64(off), RKey: uint32(w.RKey), Len: length}.Put(b[info.RETH:])
	q.env.Out.End()
	if again == nil {
		r.reads = append(r.reads, readReq{r.psn, r.psn.Add(uint32(n - 1))})
	}
	r.payRead(int64(length))
	r.sent(uint32(n), 0, true)
	return sendOK
}

// gatherError is what becomes of a packet whose bytes could not be read.
func (r *requester) gatherError(s *sendState, err error) sendResult {
	switch {
	case err == mr.ErrBusy:
		return sendFull // the mapping is changing: later
	case !r.q.failing(err):
		r.hold(err, false)
		return sendBlocked
	}
	s.fail = localStatus(err)
	return sendFailed
}

// issued gives the READ request or atomic that was sent before for this PSN; nil
// if the PSN is new.
func (r *requester) issued(psn wire.PSN) *readReq {
	for i := range r.reads {
		if q := &r.reads[i]; !psn.Before(q.first) && !q.last.Before(psn) {
			return q
		}
	}
	return nil
}

// readsFull: no further READ or atomic may be outstanding. A QP that may have
// none at all can't execute the request ever (IBA 10.8.3.2, local QP operation
// error).
func (r *requester) readsFull(s *sendState) sendResult {
	if r.q.attr.MaxRdAtomic > 0 {
		return sendBlocked
	}
	s.fail = WCLocQPOpErr
	return sendFailed
}

// sent moves on by n PSNs after a packet has left.
func (r *requester) sent(n uint32, payload int, ackReq bool) {
	r.q.env.sentPkts++
	r.q.env.sentBytes += uint64(payload)
	if r.psn.Before(r.end) {
		r.q.env.Stats.RetransmittedPkts.Add(1)
	}
	oldest := r.psn == r.una
	if r.psn == r.end {
		r.heldSince = -1
		if ackReq && r.rec.timedAt == 0 {
			r.rec.time(r.psn.Add(n-1), r.psn.Sub(r.una)+int32(n), r.q.env.Now())
		}
	}
	r.psn = r.psn.Add(n)
	if r.end.Before(r.psn) {
		r.end = r.psn
	}
	if r.psn.Sub(r.at(r.cur).last) > 0 {
		r.cur++
	}
	if ackReq {
		r.sinceAckReq, r.forceAck, r.asked = 0, false, r.psn.Add(wire.PSNMask)
	} else {
		r.sinceAckReq++
	}
	if r.ackAt == Never && r.rec.probeAt == Never {
		r.armTimer()
	}
	r.account()
	if r.twice && oldest {
		r.twice = false
		r.goBack()
	}
}

// armTimer starts the local ACK timeout anew (IBA 9.7.6.1.3).
func (r *requester) armTimer() {
	r.ackAt, r.rec.probeAt = Never, Never
	if r.una == r.end || r.rnrAt != Never || r.waitsAlone() {
		return
	}
	now := r.q.env.Now()
	if t := r.q.attr.Timeout; t != 0 {
		r.ackAt = now + wire.AckTimeout(t)
	}
	r.armProbe(now)
}

// gather reads part of a send work request's data into dst.
func (r *requester) gather(w *SendWQE, s *sendState, off uint32, dst []byte) error {
	if w.Flags&SendInline != 0 {
		copy(dst, w.inline()[off:])
		return nil
	}
	return r.q.gather(s.moved, w.sges(), off, dst)
}

// acked notes that everything up to and with PSN p is acknowledged by a plain
// acknowledgement, and retires what is complete. It stops at a READ or atomic
// whose response is missing and then says so: IBA 9.7.5.1.2, the response was
// lost.
func (r *requester) acked(p wire.PSN) (lost bool) {
	for r.head != r.q.sq.prod().Load() {
		s := r.at(r.head)
		if !s.started || r.una.Sub(p) > 0 {
			break
		}
		w := r.q.sq.sendWQE(r.head)
		if w.answered() != wire.KindNone {
			return true
		}
		if s.last.Sub(p) > 0 {
			r.advance(p.Next())
			break
		}
		r.advance(s.last.Next())
		r.retire(w)
	}
	return false
}

// advance moves una forward: progress, so retries and timer start anew.
func (r *requester) advance(una wire.PSN) {
	if una == r.una {
		return
	}
	r.probesOver()
	if r.rec.progress(una, una.Sub(r.una), r.q.env.Now()) {
		r.q.losses++
	}
	if d := r.q.dest; d != nil {
		d.progress(una.Sub(r.una), len(r.reads) > 0 && r.reads[0].first.Before(una))
	}
	r.una, r.heldSince = una, -1
	r.rnrAt = Never // what the peer was not ready for it has
	if r.heldBack {
		r.held, r.heldBack, r.lookAt = false, false, Never
	}
	r.recovering, r.nakked, r.twice = false, false, false
	r.retries, r.rnrRetries = r.q.attr.RetryCnt, r.q.attr.RNRRetry
	if r.psn.Before(una) {
		// The peer had more than we remembered when we went back.
		r.psn = una
		for r.cur != r.q.sq.prod().Load() && r.at(r.cur).started && r.at(r.cur).last.Before(una) {
			r.cur++
		}
	}
	for len(r.reads) > 0 && r.reads[0].last.Before(una) {
		r.reads = r.reads[:copy(r.reads, r.reads[1:])]
	}
	r.armTimer()
	r.account()
}

// retire completes the oldest work request with success.
func (r *requester) retire(w *SendWQE) {
	r.q.finishSend(w, WCSuccess, r.drop)
	r.retireManaged()
	r.checkDrained()
	r.checkHead()
}

// drop takes the oldest work request off the ring.
func (r *requester) drop() {
	*r.at(r.head) = sendState{}
	if r.cur == r.head {
		r.cur++
	}
	r.head++
	r.q.sq.cons().Store(r.head)
}

// checkHead ends the QP if the oldest work request has a local error.
func (r *requester) checkHead() {
	if r.head == r.q.sq.prod().Load() {
		return
	}
	if st := r.at(r.head).fail; st != WCSuccess {
		r.failHead(st)
	}
}

// failHead completes the oldest work request with an error and moves the QP to
// ERR or SQE.
func (r *requester) failHead(st WCStatus) {
	if r.head == r.q.sq.prod().Load() {
		return
	}
	w := r.q.sq.sendWQE(r.head)
	r.q.finishSend(w, st, r.drop)
	r.q.failSend()
}

// checkDrained announces that a QP in SQD has finished what it had started
// (IBA 10.3.1.5).
func (r *requester) checkDrained() {
	if r.q.State() != StateSQD || r.drainAnnounced || r.head != r.q.sq.prod().Load() && r.at(r.head).started {
		return
	}
	r.drainAnnounced = true
	if r.q.attr.EnSQDAsync {
		r.q.event(EventSQDrained)
	}
}
