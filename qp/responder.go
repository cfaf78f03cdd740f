// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// The responder executes the peer's requests in PSN order. What it owes the
// peer (acknowledgements, NAKs, READ responses) it queues in response.go, which
// sends it in PSN order too.

// respStep is a step of taking one request.
type respStep uint8

const (
	respCheckPSN respStep = iota
	respDuplicate
	respCheckOp
	respCheckLength
	respCheckResource
	respCheckKey
	respExecute
	respComplete
	respAck
	respDone
)

type responder struct {
	q    *QP
	epsn wire.PSN // expected PSN
	psn  wire.PSN // of the packet in hand: what a NAK names
	msn  uint32   // messages completed, 24 bits

	// Where receives come from and complete to, and the domains of keys: of the QP
	// or, with XRC, of the SRQ that the request names. listPD is that of the
	// receives' lists: an SRQ may be of another domain than its QPs (IBA 10.2.9).
	srq        *SRQ
	cq         *CQ
	pd, listPD mr.PD

	// The message under way, from its FIRST packet on.
	kind    wire.Kind
	prev    *wire.OpInfo // packet before this one; nil between messages
	region  *mr.Region   // target of a WRITE
	va      uint64       // where the next packet of a WRITE goes
	left    uint32       // bytes of the WRITE still to come
	got     uint32       // bytes of the message so far
	recv    recvWork
	hasRecv bool
	moved   uint64 // mr.Table.Moved when the message began
	wants   bool   // the packet under way uses recv

	// quiet: a sequence or RNR NAK is out; no other until the packet it asks
	// for comes (IBA 9.7.5.2.8, 9.9.3).
	quiet  bool
	fatal  bool // a fatal NAK is queued: nothing is executed any more
	commEs bool // the communication established event was given
	stage  mr.Stage
	dirty  bool
	// persisting: a FLUSH that Env.Persist is at; ticket tells it from earlier ones.
	// unwritten: it has failed, and that is still to be told.
	persisting, unwritten bool
	ticket                uint32
	flushing              flushJob          // what persisting is about
	repersist             *flushJob         // to be begun again when its region is resumed
	grh                   [wire.GRHLen]byte // of the datagram under way

	// Of what was put off (postpone.go): the packets that are held, the one in hand and
	// how many PSNs it takes; putBack: it stays the first that is held.
	held    heldPackets
	inHand  inHand
	span    uint32
	putBack bool
	lookAt  int64 // when to look again
	// waitFor is the region that the peer is waiting for since waitSince.
	waitFor   *mr.Region
	waitSince int64
	// taken: packets that count as taken are still staged; what is staged of others waits for
	// them to come again. implied: a NAK has acknowledged them. flushErr is why they are.
	taken, implied bool
	flushErr       error

	out responses
}

func (r *responder) init(q *QP) {
	r.q = q
	r.srq, r.cq, r.pd, r.listPD = q.init.SRQ, q.init.RecvCQ, q.init.PD, q.init.PD
	if r.srq != nil {
		r.listPD = r.srq.pd
	}
	r.epsn, r.msn = 0, 0
	r.quiet, r.fatal, r.commEs = false, false, false
	r.endMessage()
	r.hasRecv = false
	r.stage.Drop()
	r.dirty = false
	r.forgetWaits()
	r.out.init(q)
}

// forgetWaits ends all waiting for memory.
func (r *responder) forgetWaits() {
	r.held.drop()
	r.lookAt, r.waitFor, r.repersist = Never, nil, nil
	r.taken, r.implied = false, false
}

// start is the transition to RTR.
func (r *responder) start() { r.epsn = r.q.attr.RQPSN }

func (r *responder) resize(n int) { r.out.resize(n) }

// stop ends all activity: error or reset. A receive work request that was being
// filled is flushed first, as the oldest.
func (r *responder) stop() {
	r.stage.Drop()
	r.dirty, r.persisting, r.unwritten = false, false, false
	r.forgetWaits()
	r.ticket++
	r.out.stop()
	if r.hasRecv && r.q.State() == StateErr {
		r.completeRecv(&CQE{Status: WCWRFlushErr, Opcode: WCRecv}, false)
	}
	r.hasRecv = false
	r.endMessage()
}

func (r *responder) endMessage() {
	r.prev, r.region, r.got, r.left = nil, nil, 0, 0
}

// run sends what is owed, up to budget packets.
func (r *responder) run(budget int) (left int, more bool) { return r.out.run(r, budget) }

// endBatch places what is staged, so that data becomes visible and buffers are
// free even if the rest of the message is slow to come.
func (r *responder) endBatch() {
	if r.dirty {
		r.psn = r.epsn.Add(wire.PSNMask) // what fails is of the message it belongs to
		if r.implied || !r.taken {
			r.psn = r.epsn // the peer knows of that one's success, or may
		}
		r.flush()
	}
}

// flush places what is staged; on failure a NAK is queued. If it is only too early it
// stays staged, and dirty is still set.
func (r *responder) flush() bool {
	r.dirty = false
	err := r.q.env.Mem.Flush(&r.stage)
	switch {
	case err == nil:
		r.taken, r.implied = false, false
		return true
	case !r.q.failing(err) && (r.q.tr.acked || err != mr.ErrBusy && r.putsOff(r.q.env.Mem.Blocked(), err) == putHold):
		r.dirty, r.flushErr = true, err
		r.lookIn(err)
	case !r.q.tr.acked:
		r.stage.Drop()
		r.unreliableError(err)
	default:
		r.memoryError(err)
	}
	return false
}

func (r *responder) handle(p *wire.Packet) {
	if r.fatal {
		r.q.env.Stats.Dropped.Add(1)
		return
	}
	if !r.commEs {
		r.commEs = true
		if r.q.State() == StateRTR && !r.q.tr.datagram {
			r.q.event(EventCommEst) // IBA 11.6.3.1
		}
	}
	if r.held.n() > 0 && r.behindHeld(p) {
		return
	}
	r.take1(p)
}

// take1 goes through the steps of one packet.
func (r *responder) take1(p *wire.Packet) {
	r.psn, r.inHand, r.span = p.BTH.PSN, inHand{frame: p.Frame}, 1
	for step := respCheckPSN; step != respDone; {
		switch step {
		case respCheckPSN:
			step = r.checkPSN(p)
		case respDuplicate:
			step = r.duplicate(p)
		case respCheckOp:
			step = r.checkOp(p)
		case respCheckLength:
			step = r.checkLength(p)
		case respCheckResource:
			step = r.checkResource(p)
		case respCheckKey:
			step = r.checkKey(p)
		case respExecute:
			step = r.execute(p)
		case respComplete:
			step = r.complete(p)
		case respAck:
			step = r.ack(p)
		}
	}
}

// checkPSN sorts out duplicates and requests after a gap (IBA 9.7.4.1.2, 9.7.5.2.2);
// unreliable services know neither.
func (r *responder) checkPSN(p *wire.Packet) respStep {
	switch {
	case r.q.tr.datagram:
		return r.checkQKey(p)
	case !r.q.tr.acked:
		return r.resync(p)
	}
	d := p.BTH.PSN.Sub(r.epsn)
	switch {
	case d == 0 && r.persisting:
		return r.behindFlush()
	case d == 0:
		r.quiet = false
		return respCheckOp
	case d < 0:
		r.q.env.Stats.DuplicateRequest.Add(1)
		return respDuplicate
	}
	r.q.env.Stats.OutOfSeqRequest.Add(1)
	r.askAgain()
	return respDone
}

// askAgain asks for the expected packet, once.
func (r *responder) askAgain() {
	if !r.quiet {
		r.quiet = true
		r.q.env.Stats.SentNakSeq.Add(1)
		r.out.nak(r.epsn, wire.NakSyndrome(wire.NakPSNSeq), r.msn)
	}
}

// duplicate answers a request that was executed before (IBA 9.7.5.1.4, table 47):
// SENDs and WRITEs are acknowledged again, READs executed again, atomics answered
// with the result that was kept.
func (r *responder) duplicate(p *wire.Packet) respStep {
	r.out.askedAgain(p.BTH.PSN)
	switch p.Info.Kind {
	case wire.KindSend, wire.KindWrite:
		if p.BTH.AckReq || p.Info.Mask&wire.End != 0 {
			r.implied = r.implied || r.dirty
			r.out.ack(r.epsn.Add(wire.PSNMask), r.msn)
		}
	case wire.KindRead:
		r.out.repeatRead(p)
	case wire.KindAtomic:
		r.out.repeatAtomic(p)
	case wire.KindFlush, wire.KindAtomicWrite:
		r.out.repeatEmpty(p)
	default:
		r.q.env.Stats.Dropped.Add(1)
	}
	return respDone
}

// checkOp wants the opcode to continue or start a message (IBA 9.7.4.1.3), to be
// one this QP executes, and its operation to be allowed (table 36).
func (r *responder) checkOp(p *wire.Packet) respStep {
	if !p.Info.MayFollow(r.prev) {
		return r.invalid() // IBA 9.9.3.1, out of sequence opcode
	}
	r.kind, r.wants = p.Info.Kind, p.Info.Mask&wire.NeedsRecv != 0
	need := mr.Access(0)
	switch r.kind {
	case wire.KindSend:
	case wire.KindWrite, wire.KindAtomicWrite:
		need = mr.RemoteWrite
	case wire.KindRead:
		need = mr.RemoteRead
	case wire.KindAtomic:
		need = mr.RemoteAtomic
	case wire.KindFlush:
		var ok bool
		if need, ok = flushAccess(p.FETH()); !ok {
			return r.invalid()
		}
	default:
		return r.invalid() // IBA 9.7.4.1.3: unsupported opcode
	}
	if r.q.attr.Access&need != need {
		return r.invalid() // IBA 9.7.4.1.4 / 10.2.4.2: QP not set up for the operation
	}
	if answeredBy[r.kind] != wire.KindNone {
		if r.out.pendingReads() >= r.out.reads {
			return r.invalid() // IBA 9.7.4.1.5: more than max_dest_rd_atomic
		}
	}
	if r.q.tr.target {
		return r.checkSRQ(p)
	}
	return respCheckLength
}

// checkLength holds packets to the path MTU and WRITEs to their DMA length (IBA
// 9.7.4.1.6).
func (r *responder) checkLength(p *wire.Packet) respStep {
	n, m := uint32(len(p.Payload)), p.Info.Mask
	if m&wire.Payload != 0 {
		switch {
		case n > r.q.mtu:
			return r.invalid()
		case m&(wire.First|wire.Middle) != 0 && n != r.q.mtu:
			return r.invalid()
		case m&wire.Last != 0 && n == 0:
			return r.invalid()
		}
	}
	switch p.Info.Kind {
	case wire.KindWrite:
		left := r.left
		if m&wire.Start != 0 {
			left = p.RETH().Len
			if left > MaxMessage {
				return r.invalid()
			}
		}
		if n > left || m&wire.End != 0 && n != left {
			return r.invalid()
		}
	case wire.KindSend:
		if uint64(r.got)+uint64(n) > MaxMessage {
			return r.invalid()
		}
	case wire.KindRead:
		if p.RETH().Len > MaxMessage {
			return r.invalid()
		}
	case wire.KindAtomic:
		if p.AtomicETH().VA%wire.AtomicLen != 0 {
			return r.invalid() // IBA 9.4.5: naturally aligned
		}
	case wire.KindAtomicWrite:
		if h := p.RETH(); n != wire.AtomicWriteLen || h.Len != n || h.VA%wire.AtomicWriteLen != 0 {
			return r.invalid() // IBA A19
		}
	case wire.KindFlush:
		if p.FETH().Selectivity == wire.FlushRange && p.RETH().Len > MaxMessage {
			return r.invalid()
		}
	}
	return respCheckResource
}

// checkResource takes a receive work request where the packet needs one (IBA
// 9.7.5.2.8).
func (r *responder) checkResource(p *wire.Packet) respStep {
	if p.Info.Mask&wire.Start != 0 {
		r.moved = r.q.env.Keys.Moved()
	}
	if p.Info.Mask&wire.NeedsRecv == 0 || r.hasRecv {
		return respCheckKey
	}
	if !r.takeRecv() {
		return r.notReady(r.q.attr.MinRNRTimer)
	}
	r.hasRecv = true
	return respCheckKey
}

func (r *responder) takeRecv() bool {
	if r.srq != nil {
		return r.srq.take(&r.recv)
	}
	return r.q.rq.take(&r.recv)
}

// notReady answers RNR NAK; the same packet will come again. Unreliable services
// drop it (IBA 9.8.2.2.4).
func (r *responder) notReady(timer uint8) respStep {
	if !r.q.tr.acked {
		r.q.env.Stats.OutOfBuffer.Add(1)
		return r.abandon(WCSuccess)
	}
	r.quiet = true
	r.implied = r.implied || r.stage.Active()
	r.q.env.Stats.SentRNRNak.Add(1)
	r.out.nak(r.psn, wire.RNRSyndrome(timer), r.msn)
	return respDone
}

// busyTimer is the RNR timer for memory whose mapping is changing just now, 0.64 ms:
// what the QP's own timer is set to is meant for receives, and is often 0, 655 ms.
const busyTimer = 12

// checkKey checks the rkey once a message for WRITE and READ (IBA 9.7.4.1.5,
// 10.6.3), and its rights with each packet; a length of 0 names no memory.
func (r *responder) checkKey(p *wire.Packet) respStep {
	var err error
	switch p.Info.Kind {
	case wire.KindWrite:
		if p.Info.Mask&wire.Start != 0 {
			h := p.RETH()
			r.va, r.left = h.VA, h.Len
			if h.Len > 0 {
				r.region, err = r.q.keyCheck(r.pd, mr.Key(h.RKey), h.VA, uint64(h.Len), mr.RemoteWrite)
			}
		} else if r.region != nil {
			err = r.region.Allows(r.pd, mr.RemoteWrite) // it may have changed since
		}
	case wire.KindRead:
		if h := p.RETH(); h.Len > 0 {
			r.region, err = r.q.keyCheck(r.pd, mr.Key(h.RKey), h.VA, uint64(h.Len), mr.RemoteRead)
		}
	case wire.KindAtomic:
		h := p.AtomicETH()
		r.region, err = r.q.keyCheck(r.pd, mr.Key(h.RKey), h.VA, wire.AtomicLen, mr.RemoteAtomic)
	case wire.KindAtomicWrite:
		h := p.RETH()
		r.region, err = r.q.keyCheck(r.pd, mr.Key(h.RKey), h.VA, wire.AtomicWriteLen, mr.RemoteWrite)
	}
	if err != nil {
		return r.memoryError(err)
	}
	return respExecute
}

func (r *responder) execute(p *wire.Packet) respStep {
	n := uint32(len(p.Payload))
	switch p.Info.Kind {
	case wire.KindSend:
		if r.q.tr.datagram {
			if err := r.datagram(p); err != nil {
				return r.memoryError(err)
			}
			break
		}
		if n == 0 {
			break
		}
		if uint64(r.got)+uint64(n) > uint64(r.recv.total) {
			return r.recvError(WCLocLenErr) // IBA 9.7.4.1.6: longer than the buffer
		}
		if err := r.q.scatter(&r.stage, r.listPD, r.moved, r.recv.sges, r.got, p.Payload); err != nil {
			return r.memoryError(err)
		}
		r.dirty = true
	case wire.KindWrite:
		if n == 0 {
			break
		}
		if err := r.q.env.Mem.Write(&r.stage, r.region, r.va, p.Payload); err != nil {
			return r.memoryError(err)
		}
		r.dirty = true
	case wire.KindRead:
		h := p.RETH()
		pkts := r.out.read(p.BTH.PSN, h, r.region)
		r.epsn = r.epsn.Add(pkts)
		r.bumpMSN()
		r.region = nil
		return respDone
	case wire.KindAtomic:
		return r.atomic(p)
	case wire.KindAtomicWrite:
		return r.atomicWrite(p)
	case wire.KindFlush:
		return r.flushRequest(p)
	}
	// What is acknowledged is in place before the packet counts as taken, so that
	// an error still names it.
	end := p.Info.Mask&wire.End != 0
	if r.dirty && (end || p.BTH.AckReq && r.q.tr.acked) && !r.flush() {
		if r.dirty {
			return r.postpone(r.flushErr) // staged bytes wait for the packet to come again
		}
		return respDone
	}
	if end {
		return respComplete
	}
	r.take(p)
	r.prev = p.Info
	return respAck
}

// take counts a packet of a SEND or WRITE as executed.
func (r *responder) take(p *wire.Packet) {
	n := uint32(len(p.Payload))
	r.got += n
	if p.Info.Kind == wire.KindWrite {
		r.va += uint64(n)
		r.left -= n
	}
	r.taken = r.taken || r.dirty
	r.epsn = r.epsn.Next()
	r.waitFor = nil
}

func (r *responder) atomic(p *wire.Packet) respStep {
	h := p.AtomicETH()
	op := mr.FetchAdd
	if p.BTH.Op == r.q.tr.opcode(wire.RCCompareSwap) {
		op = mr.CompareSwap
	}
	old, err := r.q.env.Mem.Atomic(r.region, h.VA, op, h.Compare, h.SwapAdd)
	if err != nil {
		return r.memoryError(err)
	}
	r.epsn = r.epsn.Next()
	r.bumpMSN()
	r.region = nil
	r.out.atomic(p.BTH.PSN, old, r.msn)
	return respDone
}

// complete ends a message whose data is in place.
func (r *responder) complete(p *wire.Packet) respStep {
	m := p.Info.Mask
	e := CQE{Opcode: WCRecv, ByteLen: r.got + uint32(len(p.Payload)), SrcQP: uint32(r.q.attr.DestQPN)}
	if r.q.tr.datagram {
		e.Flags, e.SrcQP = WCGRH, uint32(p.DETH().SrcQP)
	}
	if m&wire.Inv != 0 {
		// IBA 10.6.5.1, 9.4.1.1.3
		r.q.env.Mem.Leave() // who holds the table may wait for sections
		if err := r.q.env.Keys.Invalidate(mr.Key(p.InvKey()), r.pd, uint32(r.q.init.Num)); err != nil {
			return r.badInvalidate()
		}
		e.Flags, e.ImmOrKey = e.Flags|WCWithInv, p.InvKey()
	}
	if m&wire.Imm != 0 {
		e.Flags, e.ImmOrKey = e.Flags|WCWithImm, p.Imm()
	}
	if p.Info.Kind == wire.KindWrite {
		e.Opcode = WCRecvRDMAImm
	} else {
		r.q.env.got.recvs++
	}
	r.take(p)
	r.bumpMSN()
	r.endMessage()
	// One that a dropped UC message left is not for a plain WRITE.
	if r.hasRecv && r.wants {
		r.completeRecv(&e, p.BTH.SE)
	}
	return respAck
}

// completeRecv writes the completion of the receive work request in recv.
func (r *responder) completeRecv(e *CQE, solicited bool) {
	r.hasRecv = false
	if r.q.tr.target && r.srq.isClosed() {
		return // and what was received from it is nobody's any more
	}
	e.ID, e.QPN, e.UserQP = r.recv.id, uint32(r.q.init.Num), r.q.init.Handle
	e.Timestamp = uint64(r.q.env.Now())
	r.cq.push(e, solicited)
}

func (r *responder) ack(p *wire.Packet) respStep {
	if p.BTH.AckReq && r.q.tr.acked {
		r.out.ack(r.epsn.Add(wire.PSNMask), r.msn)
	}
	return respDone
}

func (r *responder) bumpMSN() {
	r.msn = (r.msn + 1) & 0xffffff
	r.waitFor = nil
}

// invalid answers NAK invalid request (IBA 9.9.3.1).
func (r *responder) invalid() respStep {
	if !r.q.tr.acked {
		return r.abandon(WCRemInvReqErr)
	}
	if r.hasRecv && r.kind == wire.KindSend {
		r.completeRecv(&CQE{Status: WCRemInvReqErr, Opcode: WCRecv}, true)
	}
	r.giveUp(wire.NakInvalidRequest, EventQPReqErr)
	return respDone
}

// memoryError answers what an access to the region gave: what goes by asks for
// patience (postpone.go), content that is not to be had is NAK remote operational
// (IBA 9.7.5.2.6), all else NAK remote access (9.7.5.2.4).
func (r *responder) memoryError(err error) respStep {
	if !r.q.failing(err) {
		return r.postpone(err)
	}
	if !r.q.tr.acked {
		return r.unreliableError(err)
	}
	if r.kind == wire.KindSend {
		return r.recvError(localStatus(err))
	}
	r.giveUp(memoryNak(err))
	return respDone
}

// memoryNak is the NAK for memory that a one-sided request could not use, and the event.
func memoryNak(err error) (code uint8, ev EventType) {
	if err == mr.ErrMajor || err == mr.ErrPoisoned {
		return wire.NakRemoteOperational, EventQPFatal
	}
	return wire.NakRemoteAccess, EventQPAccessErr
}

// recvError ends a SEND that the receive buffer can't take: too short is the
// requester's fault (IBA 9.7.4.1.6), a bad list the receiver's (9.7.5.2.6).
func (r *responder) recvError(st WCStatus) respStep {
	if !r.q.tr.acked {
		if st == WCLocLenErr {
			return r.abandon(WCRemInvReqErr)
		}
		return r.localFault(st)
	}
	if r.hasRecv {
		r.completeRecv(&CQE{Status: st, Opcode: WCRecv}, true)
	}
	if st == WCLocLenErr {
		r.giveUp(wire.NakInvalidRequest, EventQPReqErr)
	} else {
		r.giveUp(wire.NakRemoteOperational, EventQPFatal)
	}
	return respDone
}

// badInvalidate ends a SEND whose key can't be invalidated (IBA 9.9.3.1.6, class
// J); the status is the one the kernel's soft-RoCE gives.
func (r *responder) badInvalidate() respStep {
	r.completeRecv(&CQE{Status: WCRemInvReqErr, Opcode: WCRecv}, true)
	r.giveUp(wire.NakRemoteOperational, EventQPAccessErr)
	return respDone
}

// giveUp queues a fatal NAK; when it is sent the QP goes to ERR.
func (r *responder) giveUp(code uint8, ev EventType) {
	r.q.env.Stats.SentNakErr.Add(1)
	r.fatal = true
	r.stage.Drop()
	r.dirty = false
	r.forgetWaits()
	r.out.nak(r.psn, wire.NakSyndrome(code), r.msn)
	// A receive completed with an error says it already; class C errors of
	// one-sided requests show only as an event (IBA 9.9.3.1.3).
	r.q.event(ev)
}
