// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// responses is the responder's outbox: what it owes the peer, sent in the order
// of PSNs (IBA 9.7.5.1.1: an acknowledgement must not overtake a READ response),
// and the memory of READs and atomics that can be asked for again.
type responses struct {
	q     *QP
	queue []response // a ring, which grows to room: most QPs owe little at a time
	first int        // index of the oldest
	n     int
	room  int
	reads int      // max_dest_rd_atomic
	kept  []keptOp // so many, a ring; nil before the first
	next  int      // where the next READ or atomic is kept
	asked wire.PSN // the last request that came again, see askedAgain
	anew  wire.PSN // with what the peer began when it last went back
	poor  uint8    // how often it went back to that
	// back: the peer was asked to wait and to come back to from. What is of later PSNs
	// waits until it has, as it would only look like a loss (IBA 9.7.5.1.2); or until then,
	// as it may have had that already, by an earlier execution, and never come back.
	back bool
	from wire.PSN
	then int64
}

type respKind uint8

const (
	respKindAck respKind = iota
	respKindNak
	respKindRead
	respKindAtomic
)

// response is something owed. A READ is sent over many calls of run.
type response struct {
	kind     respKind
	syndrome uint8
	psn      wire.PSN // of the next packet
	msn      uint32
	orig     uint64 // atomic's result

	// READ only
	start, last wire.PSN // of this execution
	va          uint64   // of psn
	left        uint32
	region      *mr.Region
	pd          mr.PD // in whose name
	repeat      bool  // answers a duplicate
	copied      bool  // was asked for again: its payload is copied
	// Of a FLUSH: it is not done yet; it was asked for again; and how often it was
	// said that it will take a while.
	wait, again bool
	told        uint8
	// held is the region that a READ waits for, suspended in the midst of it; again then
	// counts, too. wanted: it is among what the peer has asked for again last.
	held   *mr.Region
	wanted bool
}

// keptOp is a READ or atomic that was executed and may be requested again (IBA
// 9.7.5.1.4).
type keptOp struct {
	kind        wire.Kind
	first, last wire.PSN
	va          uint64
	length      uint32
	rkey        mr.Key
	pd          mr.PD // in which rkey was good
	orig        uint64
	msn         uint32
}

func (o *responses) init(q *QP) {
	o.q = q
	o.first, o.n, o.next, o.back, o.poor = 0, 0, 0, false, 0
	clear(o.kept)
	clear(o.queue)
	if o.room == 0 {
		o.room = 8
	}
}

// resize makes room for n READs and atomics, each of them possibly asked for
// twice, with acknowledgements between.
func (o *responses) resize(n int) {
	if n == o.reads {
		return
	}
	o.reads, o.room = n, max(4*n+8, o.n)
	o.kept, o.next = nil, 0
}

// grow makes the queue longer: by then all places in it are taken.
func (o *responses) grow() {
	queue := make([]response, min(max(2, 4*o.n), o.room))
	for i := range o.n {
		queue[i] = *o.at(i)
	}
	o.queue, o.first = queue, 0
}

func (o *responses) stop() { o.n, o.back = 0, false; clear(o.queue) }

// tail is the youngest entry; nil if there is none.
func (o *responses) tail() *response {
	if o.n == 0 {
		return nil
	}
	return o.at(o.n - 1)
}

func (o *responses) at(i int) *response {
	if i += o.first; i >= len(o.queue) {
		i -= len(o.queue)
	}
	return &o.queue[i]
}

func (o *responses) full() bool { return o.n >= o.room }

// push adds an entry; nil if the outbox is full, which only duplicates can
// cause: they are then not answered this time.
func (o *responses) push() *response {
	if o.full() {
		return nil
	}
	if o.n == len(o.queue) {
		o.grow()
	}
	o.n++
	e := o.tail()
	*e = response{}
	return e
}

// pushAgain adds an entry that answers a duplicate, before all that is of later PSNs: the
// peer has gone back, and has no use for those before this one. They would be in the way,
// too: what one of them meets would void what is behind it.
func (o *responses) pushAgain(psn wire.PSN) *response {
	if o.push() == nil {
		return nil
	}
	i := o.n - 1
	for ; i > 0 && psn.Before(o.at(i-1).psn); i-- {
		*o.at(i) = *o.at(i - 1)
	}
	e := o.at(i)
	*e = response{psn: psn}
	return e
}

// ack owes an acknowledgement up to psn. Acknowledgements that have not left yet
// become one.
func (o *responses) ack(psn wire.PSN, msn uint32) {
	e := o.tail()
	if e == nil || e.kind != respKindAck {
		if e = o.push(); e == nil {
			return
		}
	}
	e.kind, e.psn, e.msn, e.syndrome = respKindAck, psn, msn, wire.AckSyndrome(wire.NoCredits)
}

func (o *responses) nak(psn wire.PSN, syndrome uint8, msn uint32) {
	e := o.push()
	if e == nil {
		// A NAK must not get lost, an answer to a duplicate may.
		e = o.tail()
		*e = response{}
	}
	e.kind, e.psn, e.msn, e.syndrome = respKindNak, psn, msn, syndrome
}

// keep remembers an operation for its duplicates.
func (o *responses) keep(k keptOp) {
	if o.kept == nil {
		o.kept = make([]keptOp, o.reads)
	}
	o.kept[o.next] = k
	o.next = (o.next + 1) % len(o.kept)
}

// pendingReads is how many READs and atomics are not answered yet.
func (o *responses) pendingReads() int {
	c := 0
	for i := range o.n {
		if e := o.at(i); !e.repeat && (e.kind == respKindRead || e.kind == respKindAtomic) {
			c++
		}
	}
	return c
}

// packets is how many packets carry n bytes.
func (q *QP) packets(n uint32) uint32 {
	return max(1, uint32((uint64(n)+uint64(q.mtu)-1)/uint64(q.mtu)))
}

// read owes the responses to a READ request and says how many PSNs they take.
func (o *responses) read(psn wire.PSN, h wire.RETH, region *mr.Region) uint32 {
	n := o.q.packets(h.Len)
	last := psn.Add(n - 1)
	msn := (o.q.resp.msn + 1) & 0xffffff
	o.keep(keptOp{kind: wire.KindRead, first: psn, last: last, va: h.VA, length: h.Len, rkey: mr.Key(h.RKey), pd: o.q.resp.pd, msn: msn})
	if e := o.push(); e != nil {
		*e = response{kind: respKindRead, start: psn, psn: psn, last: last, va: h.VA, left: h.Len, region: region, msn: msn, pd: o.q.resp.pd}
	}
	return n
}

func (o *responses) atomic(psn wire.PSN, orig uint64, msn uint32) {
	o.keep(keptOp{kind: wire.KindAtomic, first: psn, last: psn, orig: orig, msn: msn})
	if e := o.push(); e != nil {
		*e = response{kind: respKindAtomic, psn: psn, orig: orig, msn: msn, syndrome: wire.AckSyndrome(wire.NoCredits)}
	}
}

// find gives the kept operation that a duplicate request falls into.
func (o *responses) find(kind wire.Kind, psn wire.PSN) *keptOp {
	// Newest first: a PSN comes again after 2^24.
	for i := range o.kept {
		k := &o.kept[(o.next-1-i+len(o.kept))%len(o.kept)]
		if k.kind == kind && !psn.Before(k.first) && !k.last.Before(psn) {
			return k
		}
	}
	return nil
}

// repeatRead executes a READ again, whole or from the middle on, if it asks for
// no more than was asked for (IBA 9.7.5.1.4: same or a subset).
func (o *responses) repeatRead(p *wire.Packet) {
	h, psn := p.RETH(), p.BTH.PSN
	k := o.find(wire.KindRead, psn)
	if k == nil {
		o.q.env.Stats.Dropped.Add(1)
		return
	}
	off := uint64(psn.Sub(k.first)) * uint64(o.q.mtu)
	last := psn.Add(o.q.packets(h.Len) - 1)
	if mr.Key(h.RKey) != k.rkey || h.VA != k.va+off || off+uint64(h.Len) > uint64(k.length) || k.last.Before(last) {
		o.q.env.Stats.Dropped.Add(1)
		return
	}
	var region *mr.Region
	if h.Len > 0 {
		var err error
		region, err = o.q.keyCheck(k.pd, k.rkey, h.VA, uint64(h.Len), mr.RemoteRead)
		if err != nil {
			o.refuseAgain(psn, k.msn, err)
			return
		}
	}
	o.q.env.Stats.ReadReexecuted.Add(1)
	// An execution of the same READ that is still queued is replaced: what it
	// has not sent yet is asked for again here.
	for i := range o.n {
		e := o.at(i)
		if e.kind == respKindRead && !e.last.Before(psn) && !last.Before(e.psn) {
			switch {
			case e.last == last:
				e.psn, e.start, e.va, e.left, e.region, e.pd, e.copied = psn, psn, h.VA, h.Len, region, k.pd, true
			case !e.psn.Before(psn):
				// A part is asked for: the rest has not been sent, and goes on behind it.
				e.left += uint32(e.va - h.VA)
				e.psn, e.start, e.va, e.region, e.pd, e.copied = psn, psn, h.VA, region, k.pd, true
			}
			return
		}
	}
	if e := o.pushAgain(psn); e != nil {
		*e = response{kind: respKindRead, start: psn, psn: psn, last: last, va: h.VA, left: h.Len, region: region, msn: k.msn, pd: k.pd, repeat: true, copied: true}
	}
}

// refuseAgain says that a READ cannot be executed again: its memory has gone since. The peer
// may have had its data by then, and asked because an answer was late, or the network may
// have asked for it; so the connection goes on unless the peer still waits for that.
func (o *responses) refuseAgain(psn wire.PSN, msn uint32, err error) {
	code, _ := memoryNak(err)
	o.q.env.Stats.SentNakErr.Add(1)
	if e := o.pushAgain(psn); e != nil {
		*e = response{kind: respKindNak, psn: psn, syndrome: wire.NakSyndrome(code), msn: msn}
	}
}

func (o *responses) repeatAtomic(p *wire.Packet) {
	k := o.find(wire.KindAtomic, p.BTH.PSN)
	if k == nil {
		o.q.env.Stats.Dropped.Add(1)
		return
	}
	for i := range o.n {
		if e := o.at(i); e.kind == respKindAtomic && e.psn == p.BTH.PSN {
			return // not answered yet: it will be
		}
	}
	o.q.env.Stats.AtomicReplayed.Add(1)
	if e := o.pushAgain(k.first); e != nil {
		*e = response{kind: respKindAtomic, repeat: true, psn: k.first, orig: k.orig, msn: k.msn, syndrome: wire.AckSyndrome(wire.NoCredits)}
	}
}

// run sends what is owed, up to budget packets; more: some is left.
func (o *responses) run(r *responder, budget int) (left int, more bool) {
	for o.n > 0 {
		if budget == 0 {
			return 0, true
		}
		e := o.at(0)
		if o.back && o.from.Before(e.psn) && !r.fatal {
			return budget, false
		}
		if e.wait || e.held != nil && e.held.Suspended() {
			return o.notYet(e, budget)
		}
		done, full := true, false
		switch e.kind {
		case respKindRead:
			if q := o.q; q.req.rate.rate != 0 && !q.req.withinRate() {
				return budget, false
			}
			e.held, e.again, e.wanted = nil, false, false
			if done, full = o.sendRead(r, e); e.held != nil {
				return budget, false
			}
		case respKindAtomic:
			full = !o.sendAck(wire.RCAtomicAck, e)
		default:
			full = !o.sendAck(wire.RCAck, e)
		}
		if full {
			return 0, true
		}
		budget--
		if !done {
			continue
		}
		fatal := r.fatal && e.kind == respKindNak
		if o.n > 0 { // sending may have emptied the outbox
			o.first = (o.first + 1) % len(o.queue)
			o.n--
		}
		if fatal && o.n == 0 {
			r.q.toError() // IBA 9.9.3.1: the NAK first, then the error state
			return budget, false
		}
	}
	return budget, false
}

// sendAck sends an acknowledgement, NAK or result of an atomic.
func (o *responses) sendAck(op wire.Opcode, e *response) bool {
	op = o.q.tr.opcode(op)
	info := op.Info()
	b := o.q.env.Out.Begin(&o.q.attr.Path, info.HdrLen+wire.ICRCLen)
	if b == nil {
		return false
	}
	bth := wire.BTH{Op: op, PKey: o.q.PKey(), DestQP: o.q.attr.DestQPN, PSN: e.psn}
	bth.Put(b)
	wire.AETH{Syndrome: e.syndrome, MSN: e.msn}.Put(b[info.AETH:])
	if info.AtomicAckETH >= 0 {
		wire.AtomicAckETH{Orig: e.orig}.Put(b[info.AtomicAckETH:])
	}
	o.q.env.Out.End()
	o.q.env.Stats.SentPkts.Add(1)
	o.q.env.Stats.SentAcks.Add(1)
	return true
}

var readRespOps = packetOps{wire.RCReadRespOnly, wire.RCReadRespFirst, wire.RCReadRespMiddle, wire.RCReadRespLast}

// sendRead sends one packet of a READ response.
func (o *responses) sendRead(r *responder, e *response) (done, full bool) {
	q := o.q
	first, last := e.psn == e.start, e.psn == e.last
	op := q.tr.opcode(readRespOps.pick(first, last))
	info := op.Info()
	n := min(e.left, q.mtu)
	pad := -n & 3
	b := q.env.Out.Begin(&q.attr.Path, info.HdrLen+int(n+pad)+wire.ICRCLen)
	if b == nil {
		return false, true
	}
	bth := wire.BTH{Op: op, Pad: uint8(pad), PKey: q.PKey(), DestQP: q.attr.DestQPN, PSN: e.psn}
	bth.Put(b)
	if info.AETH >= 0 {
		wire.AETH{Syndrome: wire.AckSyndrome(wire.NoCredits), MSN: e.msn}.Put(b[info.AETH:])
	}
	if n > 0 {
		err := e.region.Allows(e.pd, mr.RemoteRead) // it may have changed since
		lent := false
		if err == nil && !last && !e.copied {
			// What is written to meanwhile is told by what follows, and comes copied then.
			lent, err = q.env.Mem.LendOf(e.region, e.va, uint64(e.left), uint64(n))
			lent = lent && err == nil && q.env.Out.Borrow(e.region, e.va, int(n))
		}
		if err == nil && !lent {
			err = q.env.Mem.ReadOf(e.region, e.va, uint64(e.left), b[info.HdrLen:info.HdrLen+int(n)])
			clear(b[info.HdrLen+int(n) : info.HdrLen+int(n+pad)])
		}
		if err != nil {
			q.env.Out.Cancel()
			return o.readError(r, e, err), false
		}
	}
	q.env.Out.End()
	q.env.Stats.SentPkts.Add(1)
	q.env.Stats.SentBytes.Add(uint64(n))
	if q.req.rate.rate != 0 {
		q.req.pay(int64(n))
	}
	e.psn, e.va, e.left = e.psn.Next(), e.va+uint64(n), e.left-n
	r.waitFor = nil
	return last, false
}

// readError ends a READ whose memory went away while it was being sent: NAK
// remote access at the PSN it had come to (IBA 9.7.5.2.4); what was queued
// behind it is void. One whose memory is to be had later is put off.
func (o *responses) readError(r *responder, e *response, err error) (done bool) {
	var syndrome uint8
	timer := uint8(busyTimer)
	if e.repeat && r.q.failing(err) {
		code, _ := memoryNak(err)
		r.q.env.Stats.SentNakErr.Add(1)
		*e = response{kind: respKindNak, psn: e.psn, syndrome: wire.NakSyndrome(code), msn: e.msn} // see refuseAgain
		return false
	}
	if r.q.failing(err) {
		code, ev := memoryNak(err)
		syndrome = wire.NakSyndrome(code)
		r.fatal = true
		r.forgetWaits()
		r.q.env.Stats.SentNakErr.Add(1)
		r.q.event(ev)
	} else {
		if err != mr.ErrBusy {
			switch r.putsOff(e.region, err) {
			case putHold:
				e.held, e.again = e.region, e.repeat
				r.lookIn(err)
				return false
			case putDrop: // with what is behind it, as if it had been lost
				o.fetchAll(err)
				o.n = 0
				return false
			}
			r.countRNR(e.region, err)
			timer = r.waitTimer(e.region, err, o.fetchAll(err))
		}
		syndrome = wire.RNRSyndrome(timer)
		r.q.env.Stats.SentRNRNak.Add(1)
	}
	*e = response{kind: respKindNak, psn: e.psn, syndrome: syndrome, msn: e.msn}
	o.n = 1
	if !r.fatal {
		o.back, o.from = true, e.psn
		o.then = r.q.env.Now() + 2*wire.RNRDelay(timer) + backGrace
		r.lookAt = min(r.lookAt, o.then)
	}
	return false
}

// fetchAll has the READs that are owed fetched, as the first has met content in the store.
// It says how often the store's delay it takes until that one's is there, about.
func (o *responses) fetchAll(err error) int64 {
	times := int64(1)
	if err != mr.ErrMajor {
		return times
	}
	room := uint64(mr.MaxFetch)
	for i := 0; i < o.n && room > 0; i++ {
		e := o.at(i)
		if e.kind != respKindRead || e.left == 0 {
			continue
		}
		n := min(uint64(e.left), room)
		room -= n
		if deep := o.q.env.Mem.FetchAhead(e.region, e.va, n); i == 0 {
			times = max(deep, 1)
		}
	}
	return times
}

// backGrace is what a peer may need to come back beyond twice what it was asked to wait, in ns.
const backGrace = int64(2 * time.Millisecond)

// lookBack ends the waiting for a peer that should have come back by now.
func (o *responses) lookBack(r *responder) {
	if o.back && r.q.env.Now() >= o.then {
		o.back = false
	} else if o.back {
		r.lookAt = min(r.lookAt, o.then)
	}
}

// askedAgain is told of each request that comes again, before it is answered. Requests do
// so in the order of PSNs, from what the peer waits for on: if it has begun once more, it
// has come back, to wherever it wants. While a
// READ is held it is the first thing owed; if it is asked for again the peer is told to
// wait. If something before it is, or something behind it alone, it is in the way of what
// the peer waits for: that will be asked for again, or was answered by an earlier execution.
func (o *responses) askedAgain(psn wire.PSN) {
	anew := !o.asked.Before(psn)
	o.asked = psn
	if anew {
		// Who goes back to where it was before, or hardly further, does not get what is
		// sent to it.
		if d := psn.Sub(o.anew); d < 0 || d > hardly {
			o.poor = 0
		}
		o.anew = psn
		if o.poor++; o.poor > suspectAfter {
			o.poor = 0
			o.q.env.Out.Suspect(&o.q.attr.Path)
		}
	}
	if anew || !o.from.Before(psn) {
		o.back = false
	}
	if !o.held() {
		return
	}
	e := o.at(0)
	e.wanted = e.wanted && !anew
	switch {
	case !psn.Before(e.start) && !e.last.Before(psn):
		e.again, e.wanted = true, true
	case !e.wanted || psn.Before(e.start):
		o.n = 0
	}
}

// held says whether the oldest entry is a READ that waits for a suspended region.
func (o *responses) held() bool { return o.n > 0 && o.at(0).held != nil }
