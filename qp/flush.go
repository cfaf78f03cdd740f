// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"encoding/binary"
	"errors"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// FLUSH and ATOMIC WRITE (IBA A19). Both are one packet and are answered by an RDMA
// READ response without payload; they count as outstanding like READs.

// FlushWR says what a WRFlush does at the peer: to Length bytes at the work request's
// RemoteAddr, or with Selectivity wire.FlushMR to the whole region of its RKey,
// whatever address and length are.
type FlushWR struct {
	Placement   uint8 // wire.FlushGlobal, wire.FlushPersistent, or both
	Selectivity uint8 // wire.FlushRange or wire.FlushMR
	Length      uint32
}

// ErrFlush: placement types or a selectivity that there are not (EINVAL).
var ErrFlush = errors.New("flush type or level not valid")

// flushKnown are the placement types that there are.
const flushKnown = wire.FlushGlobal | wire.FlushPersistent

// word is the FETH as send WQEs carry it, in ImmOrKey.
func (f *FlushWR) word() uint32 { return uint32(f.Placement) | uint32(f.Selectivity)<<4 }

func fethOf(w *SendWQE) wire.FETH {
	return wire.FETH{Placement: uint8(w.ImmOrKey & 0xf), Selectivity: uint8(w.ImmOrKey >> 4 & 3)}
}

// answeredBy is the kind of response that a kind of request has to itself, which
// a plain acknowledgement does not stand for (IBA 9.7.5.1.2, A19). Such requests are
// what max_rd_atomic counts.
var answeredBy = [...]wire.Kind{
	wire.KindRead:        wire.KindReadResp,
	wire.KindAtomic:      wire.KindAtomicAck,
	wire.KindFlush:       wire.KindReadResp,
	wire.KindAtomicWrite: wire.KindReadResp,
}

func (w *SendWQE) answered() wire.Kind { return answeredBy[wrOps[w.Opcode].kind] }

// gathers is how many bytes of its list, from the first on, a request sends or, a
// READ, asks for. An atomic's list is for its result; FLUSH has none.
func (w *SendWQE) gathers() uint32 {
	switch wrOps[w.Opcode].kind {
	case wire.KindAtomic, wire.KindFlush:
		return 0
	}
	return w.Length
}

// responseLen is how many bytes the READ response to a request carries.
func (w *SendWQE) responseLen() uint32 {
	if wrOps[w.Opcode].kind == wire.KindRead {
		return w.Length
	}
	return 0
}

// putFlush fills in a FLUSH.
func (q *QP) putFlush(wr *SendWR, w *SendWQE) error {
	f := &wr.Flush
	switch {
	case wr.Flags&SendInline != 0 || len(wr.SGL) > 0:
		return ErrTooManySGE
	case f.Placement == 0 || f.Placement&^flushKnown != 0 || f.Selectivity > wire.FlushMR:
		return ErrFlush
	case f.Length > MaxMessage:
		return ErrLength
	}
	w.ImmOrKey, w.Length = f.word(), f.Length
	return nil
}

// flushAccess is what QP and region must allow for a FLUSH; false if it asks for
// nothing, or for what there is not (IBA A19, unsupported request).
func flushAccess(f wire.FETH) (need mr.Access, ok bool) {
	if f.Placement&wire.FlushGlobal != 0 {
		need |= mr.FlushGlobal
	}
	if f.Placement&wire.FlushPersistent != 0 {
		need |= mr.FlushPersistent
	}
	return need, need != 0 && f.Placement&^flushKnown == 0 && f.Selectivity <= wire.FlushMR
}

// flushRegion checks the key of a FLUSH and gives what is to be flushed. A range of
// no bytes needs its key all the same.
func (r *responder) flushRegion(p *wire.Packet) (region *mr.Region, va, n uint64, err error) {
	f, h := p.FETH(), p.RETH()
	need, _ := flushAccess(f)
	va, n = h.VA, uint64(h.Len)
	if f.Selectivity == wire.FlushMR {
		if region = r.q.env.Keys.Lookup(mr.Key(h.RKey)); region == nil {
			return nil, 0, 0, mr.ErrKey
		}
		va, n = region.IOVA(), region.Length()
	}
	region, err = r.q.keyCheck(r.pd, mr.Key(h.RKey), va, n, need)
	return region, va, n, err
}

// flushRequest executes a FLUSH. What came before it is in place: a WRITE counts as
// taken when it is, and that is all that global visibility asks for on a machine
// whose caches agree. Persistence means writing to a disk; the engine does not wait
// for that, but lets nothing behind the FLUSH pass it meanwhile.
func (r *responder) flushRequest(p *wire.Packet) respStep {
	region, va, n, err := r.flushRegion(p)
	if err != nil {
		return r.memoryError(err)
	}
	if region.Suspended() {
		return r.postponeFor(region, mr.ErrSuspended)
	}
	if r.out.full() {
		r.q.env.Stats.Dropped.Add(1)
		return respDone // duplicates have filled it: this one will come again
	}
	r.epsn = r.epsn.Next()
	r.bumpMSN()
	r.region = nil
	e := r.out.empty(wire.KindFlush, p.BTH.PSN, r.msn)
	if n > 0 && p.FETH().Placement&wire.FlushPersistent != 0 {
		e.wait, r.persisting = true, true
		r.flushing = flushJob{region, va, n}
		r.q.env.Persist(r.q, region, va, n, r.ticket)
	}
	return respDone
}

// Persisted ends a FLUSH whose Env.Persist has come to an end. The ticket is the one
// that was given there: a QP that was reset since has others.
func (q *QP) Persisted(ticket uint32, err error) {
	r := &q.resp
	if ticket != r.ticket || !r.persisting {
		return
	}
	if err == mr.ErrSuspended && r.flushing.region != nil {
		r.repersist = &r.flushing
		r.lookIn(err)
		return
	}
	r.ticket++
	// A failure whose FLUSH has lost its place in the outbox is told when that is asked
	// for again; nothing passes it until then.
	r.unwritten = !r.out.persisted(r, err) && err != nil
	r.persisting = r.unwritten
}

// persisted lets the answer to a FLUSH go; false if none waits. When it has failed the
// answer is a NAK, as for memory that can't be reached (IBA 9.7.5.2.4), and what is
// behind it is void.
func (o *responses) persisted(r *responder, err error) bool {
	for i := range o.n {
		e := o.at(i)
		if !e.wait {
			continue
		}
		e.wait = false
		if err != nil {
			r.fatal = true
			r.q.env.Stats.SentNakErr.Add(1)
			*e = response{kind: respKindNak, psn: e.psn, syndrome: wire.NakSyndrome(wire.NakRemoteAccess), msn: e.msn}
			o.n = i + 1
			r.q.event(EventQPAccessErr)
		}
		return true
	}
	return false
}

// behindFlush answers a request behind a FLUSH that is not done: it is to come again. To
// the requester it is lost, and asked for when the FLUSH's answer has gone: who has seen
// to it that receives are there may allow no RNR NAK at all.
func (r *responder) behindFlush() respStep {
	r.askAgain()
	return respDone
}

// atomicWrite executes an ATOMIC WRITE: the 8 bytes become visible together, after
// all that was written before.
func (r *responder) atomicWrite(p *wire.Packet) respStep {
	_, err := r.q.env.Mem.Atomic(r.region, p.RETH().VA, mr.StoreWord, 0, binary.NativeEndian.Uint64(p.Payload))
	if err != nil {
		return r.memoryError(err)
	}
	r.epsn = r.epsn.Next()
	r.bumpMSN()
	r.region = nil
	r.out.empty(wire.KindAtomicWrite, p.BTH.PSN, r.msn)
	return respDone
}

// notYet asks the peer to wait on, when it has asked for a FLUSH again that is not done:
// with an RNR NAK, so that a slow disk costs one of its retries and not all of them. The
// more often, the longer: 0.64 ms, 2.56 ms and so on up to 164 ms.
func (o *responses) notYet(e *response, budget int) (left int, more bool) {
	if !e.again {
		return budget, false
	}
	if budget == 0 {
		return 0, true
	}
	timer := busyTimer + 4*e.told
	if e.held != nil {
		timer = o.q.resp.waitTimer(e.held, mr.ErrSuspended, 1)
	}
	nak := response{psn: e.psn, syndrome: wire.RNRSyndrome(timer), msn: (e.msn - 1) & 0xffffff}
	if !o.sendAck(wire.RCAck, &nak) {
		return 0, true
	}
	o.q.env.Stats.SentRNRNak.Add(1)
	e.again, e.told = false, min(e.told+1, 4)
	return budget - 1, false
}

// empty owes a READ response without payload, and remembers what it answers.
func (o *responses) empty(kind wire.Kind, psn wire.PSN, msn uint32) *response {
	o.keep(keptOp{kind: kind, first: psn, last: psn, msn: msn})
	e := o.push()
	if e != nil {
		*e = response{kind: respKindRead, psn: psn, start: psn, last: psn, msn: msn}
	}
	return e
}

func (o *responses) emptyAgain(k *keptOp) *response {
	e := o.pushAgain(k.first)
	if e != nil {
		*e = response{kind: respKindRead, psn: k.first, start: k.first, last: k.first, msn: k.msn, repeat: true}
	}
	return e
}

// repeatEmpty answers a duplicate FLUSH or ATOMIC WRITE, which is not executed a
// second time (IBA A19, oA19-14).
func (o *responses) repeatEmpty(p *wire.Packet) {
	k := o.find(p.Info.Kind, p.BTH.PSN)
	if k == nil {
		o.q.env.Stats.Dropped.Add(1)
		return
	}
	for i := range o.n {
		if e := o.at(i); e.kind == respKindRead && e.psn == p.BTH.PSN {
			e.again = e.wait
			return // not answered yet: it will be
		}
	}
	r := &o.q.resp
	if !r.persisting || p.BTH.PSN.Next() != r.epsn {
		o.q.env.Stats.AtomicReplayed.Add(1)
		o.emptyAgain(k)
		return
	}
	// A FLUSH that is not done, and was thrown out when a READ before it met memory
	// that was changing: it waits again.
	if e := o.emptyAgain(k); e != nil {
		e.wait, e.again = true, !r.unwritten
		if r.unwritten {
			o.persisted(r, mr.ErrFault)
		}
	}
}
