// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// dropNth drops the nth packet (from 0) with that name, once.
func dropNth(w *world, name string, nth int) {
	k := 0
	w.filter = func(p *wire.Packet, _ *node) bool {
		if p.Info.Name != name {
			return true
		}
		k++
		return k != nth+1
	}
}

// TestLossOfEach drops each kind of packet once, in each operation, and wants
// the operation to end as if nothing had happened.
func TestLossOfEach(t *testing.T) {
	probed := func(a, _ *Stats) bool { return a.Probes.Load() == 1 && a.LocalAckTimeout.Load() == 0 }
	for _, c := range []struct {
		op    WROpcode
		drop  string
		nth   int
		check func(a, b *Stats) bool // what must have happened
	}{
		{WRSend, "RC_SEND_FIRST", 0, func(a, b *Stats) bool { return b.SentNakSeq.Load() == 1 && a.LocalAckTimeout.Load() == 0 }},
		{WRSend, "RC_SEND_MIDDLE", 3, func(a, b *Stats) bool { return b.SentNakSeq.Load() == 1 && a.LocalAckTimeout.Load() == 0 }},
		{WRSend, "RC_SEND_LAST", 0, probed},
		{WRSend, "RC_ACK", 0, func(a, b *Stats) bool { return b.DuplicateRequest.Load() > 0 }},
		{WRWrite, "RC_WRITE_FIRST", 0, func(a, b *Stats) bool { return b.SentNakSeq.Load() == 1 }},
		{WRWrite, "RC_WRITE_MIDDLE", 2, func(a, b *Stats) bool { return b.SentNakSeq.Load() == 1 }},
		{WRWrite, "RC_WRITE_LAST", 0, probed},
		{WRRead, "RC_READ_REQ", 0, probed},
		{WRRead, "RC_READ_RESP_FIRST", 0, func(a, b *Stats) bool { return b.ReadReexecuted.Load() == 1 && a.OutOfSeqResponse.Load() > 0 }},
		{WRRead, "RC_READ_RESP_MIDDLE", 4, func(a, b *Stats) bool { return b.ReadReexecuted.Load() == 1 && a.LocalAckTimeout.Load() == 0 }},
		{WRRead, "RC_READ_RESP_LAST", 0, func(a, b *Stats) bool { return b.ReadReexecuted.Load() == 1 && probed(a, b) }},
		{WRAtomicFetchAdd, "RC_FETCH_ADD", 0, func(a, b *Stats) bool { return probed(a, b) && b.AtomicReplayed.Load() == 0 }},
		{WRAtomicFetchAdd, "RC_ATOMIC_ACK", 0, func(a, b *Stats) bool { return b.AtomicReplayed.Load() == 1 }},
	} {
		t.Run(fmt.Sprintf("%d/%s", c.op, c.drop), func(t *testing.T) {
			w := newWorld(t, usual())
			a, b := w.a, w.b
			size := 9999
			if c.op == WRAtomicFetchAdd {
				size = 8
			}
			dropNth(w, c.drop, c.nth)
			src := slices.Clone(a.fill(1)[:size])
			b.fill(2)
			old := slices.Clone(b.mem.Bytes()[:size])
			b.recv(RecvWR{ID: 1, SGL: b.sgl(0, size)})
			a.post(a.remote(SendWR{ID: 1, Opcode: c.op, CompareAdd: 1, SGL: a.sgl(0, size), Flags: SendSignaled}, 0))
			w.run()
			a.want(WC{ID: 1, Opcode: wrOps[c.op].wc})
			if c.op == WRSend && len(b.wcs) != 1 {
				t.Fatalf("delivered %d times", len(b.wcs))
			}
			switch {
			case c.op == WRSend || c.op == WRWrite:
				if !bytes.Equal(b.mem.Bytes()[:size], src) {
					t.Fatal("wrong data")
				}
			case !bytes.Equal(a.mem.Bytes()[:size], old):
				t.Fatal("wrong data")
			case c.op == WRAtomicFetchAdd && b.mem.Bytes()[0] != old[0]+1:
				t.Fatal("added more than once")
			}
			if !c.check(a.env.Stats, b.env.Stats) {
				t.Fatalf("recovered otherwise than expected: sent %v", w.sent)
			}
		})
	}
}

// TestRetryExceeded: retry_cnt retries, each after the local ACK timeout, then
// the oldest request fails and the rest is flushed.
func TestRetryExceeded(t *testing.T) {
	s := usual()
	s.retry, s.timeout = 3, 12
	w := newWorld(t, s)
	w.filter = func(p *wire.Packet, from *node) bool { return false }
	a := w.a
	a.recv(RecvWR{ID: 5})
	a.post(a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: a.sgl(0, 8)}, 0),
		a.remote(SendWR{ID: 2, Opcode: WRRead, SGL: a.sgl(0, 8)}, 0), SendWR{ID: 3, Opcode: WRSend})
	w.run()
	a.want(WC{ID: 1, Status: WCRetryExcErr}, WC{ID: 2, Status: WCWRFlushErr}, WC{ID: 3, Status: WCWRFlushErr}, WC{ID: 5, Status: WCWRFlushErr})
	if a.qp.State() != StateErr || w.now != 4*wire.AckTimeout(12) {
		t.Fatalf("%v after %d ns", a.qp.State(), w.now)
	}
	// What is posted now is flushed too.
	a.post(SendWR{ID: 8, Opcode: WRSend})
	a.recv(RecvWR{ID: 9})
	a.wcs = nil
	w.run()
	a.want(WC{ID: 8, Status: WCWRFlushErr}, WC{ID: 9, Status: WCWRFlushErr})
}

// TestRNR: no receive posted: RNR NAKs with the QP's timer, success when there is
// one, an error after rnr_retry otherwise.
func TestRNR(t *testing.T) {
	for _, code := range []uint8{0, 1, 12, 31} {
		s := usual()
		s.rnrTimer = code
		w := newWorld(t, s)
		a, b := w.a, w.b
		a.post(SendWR{ID: 1, Opcode: WRSend, SGL: a.sgl(0, 3000), Flags: SendSignaled},
			SendWR{ID: 2, Opcode: WRSend, SGL: a.sgl(0, 10), Flags: SendSignaled})
		for w.step(3*wire.RNRDelay(code) + 1) {
		}
		if n := b.env.Stats.SentRNRNak.Load(); n < 2 || n > 4 {
			t.Fatalf("code %d: %d RNR NAKs in three delays", code, n)
		}
		a.want()
		b.recv(RecvWR{ID: 1, SGL: b.sgl(0, 4000)}, RecvWR{ID: 2, SGL: b.sgl(4000, 4000)})
		w.run()
		a.want(WC{ID: 1, Opcode: WCSend}, WC{ID: 2, Opcode: WCSend})
		b.want(WC{ID: 1, Opcode: WCRecv}, WC{ID: 2, Opcode: WCRecv})
		if b.env.Stats.SentNakSeq.Load() != 0 {
			t.Fatal("sequence NAK after RNR NAK")
		}
	}
	for _, retry := range []uint8{0, 2} {
		s := usual()
		s.rnrRetry = retry
		w := newWorld(t, s)
		w.a.post(SendWR{ID: 1, Opcode: WRSend, SGL: w.a.sgl(0, 8)})
		w.run()
		w.a.want(WC{ID: 1, Status: WCRNRRetryExcErr})
		if n := w.b.env.Stats.SentRNRNak.Load(); n != uint64(retry)+1 {
			t.Fatalf("%d RNR NAKs for rnr_retry %d", n, retry)
		}
	}
	// WRITE with immediate needs a receive only at its end; the data is there.
	w := newWorld(t, usual())
	src := w.a.fill(4)
	w.a.post(w.a.remote(SendWR{ID: 1, Opcode: WRWriteImm, SGL: w.a.sgl(0, 5000), Flags: SendSignaled}, 0))
	for w.step(1_000_000) {
	}
	w.a.want()
	w.b.recv(RecvWR{ID: 7})
	w.run()
	w.b.want(WC{ID: 7, Opcode: WCRecvRDMAImm})
	if !bytes.Equal(w.b.mem.Bytes()[:5000], src[:5000]) {
		t.Fatal("wrong data")
	}
}

// TestRemoteErrors: each thing a peer may do wrong gives the NAK the
// specification has for it, the right status, and both QPs in ERR.
func TestRemoteErrors(t *testing.T) {
	type tc struct {
		name   string
		access mr.Access
		wr     func(a *node) SendWR
		status WCStatus
		event  EventType
	}
	big := uint64(1 << 40)
	for _, c := range []tc{
		{"write with a wrong key", allAccess, func(a *node) SendWR { r := a.remote(SendWR{Opcode: WRWrite}, 0); r.RKey ^= 0x100; return r }, WCRemAccessErr, EventQPAccessErr},
		{"write with a wrong tag", allAccess, func(a *node) SendWR { r := a.remote(SendWR{Opcode: WRWrite}, 0); r.RKey ^= 1; return r }, WCRemAccessErr, EventQPAccessErr},
		{"write past the end", allAccess, func(a *node) SendWR { return a.remote(SendWR{Opcode: WRWrite}, 1<<20-2999) }, WCRemAccessErr, EventQPAccessErr},
		{"write before the start", allAccess, func(a *node) SendWR { return a.remote(SendWR{Opcode: WRWrite}, -1) }, WCRemAccessErr, EventQPAccessErr},
		{"write around the address space", allAccess, func(a *node) SendWR {
			r := a.remote(SendWR{Opcode: WRWrite}, 0)
			r.RemoteAddr = ^uint64(0) - 10
			return r
		}, WCRemAccessErr, EventQPAccessErr},
		{"read far away", allAccess, func(a *node) SendWR {
			r := a.remote(SendWR{Opcode: WRRead}, 0)
			r.RemoteAddr += big
			return r
		}, WCRemAccessErr, EventQPAccessErr},
		{"write where the QP forbids", mr.LocalWrite | mr.RemoteRead, func(a *node) SendWR { return a.remote(SendWR{Opcode: WRWrite}, 0) }, WCRemInvReqErr, EventQPReqErr},
		{"read where the QP forbids", mr.LocalWrite | mr.RemoteWrite, func(a *node) SendWR { return a.remote(SendWR{Opcode: WRRead}, 0) }, WCRemInvReqErr, EventQPReqErr},
		{"send longer than the buffer", allAccess, func(a *node) SendWR { return SendWR{Opcode: WRSend} }, WCRemInvReqErr, EventQPReqErr},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := usual()
			s.access = c.access
			w := newWorld(t, s)
			a, b := w.a, w.b
			b.fill(9)
			before := bytes.Clone(b.mem.Bytes())
			b.recv(RecvWR{ID: 1, SGL: b.sgl(0, 100)})
			wr := c.wr(a)
			wr.ID, wr.SGL = 1, a.sgl(0, 3000)
			a.post(wr, SendWR{ID: 2, Opcode: WRSend})
			w.run()
			a.want(WC{ID: 1, Status: c.status}, WC{ID: 2, Status: WCWRFlushErr})
			if a.qp.State() != StateErr || b.qp.State() != StateErr {
				t.Fatalf("states %v, %v", a.qp.State(), b.qp.State())
			}
			if !slices.Equal(b.events, []EventType{c.event}) {
				t.Fatalf("events %v", b.events)
			}
			if wr.Opcode == WRSend {
				b.want(WC{ID: 1, Status: WCLocLenErr})
			} else {
				b.want(WC{ID: 1, Status: WCWRFlushErr})
				if !bytes.Equal(before, b.mem.Bytes()) {
					t.Fatal("memory was changed")
				}
			}
		})
	}
}

// TestRights: a region's own rights count, and its protection domain.
func TestRights(t *testing.T) {
	for _, c := range []struct {
		op     WROpcode
		pd     mr.PD
		access mr.Access
		ok     bool
	}{
		{WRWrite, 1, mr.LocalWrite | mr.RemoteWrite, true},
		{WRWrite, 1, mr.LocalWrite | mr.RemoteRead | mr.RemoteAtomic, false},
		{WRWrite, 2, allAccess, false},
		{WRRead, 1, mr.RemoteRead, true},
		{WRRead, 1, mr.LocalWrite | mr.RemoteWrite, false},
		{WRAtomicFetchAdd, 1, mr.LocalWrite | mr.RemoteAtomic, true},
		{WRAtomicFetchAdd, 1, mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead, false},
	} {
		w := newWorld(t, usual())
		reg, err := w.b.env.Keys.Register(mr.RegAttr{PD: c.pd, Addr: w.b.mem.Addr(), Length: 4096, Access: c.access})
		if err != nil {
			t.Fatal(err)
		}
		w.a.post(SendWR{ID: 1, Opcode: c.op, RemoteAddr: uint64(w.b.mem.Addr()), RKey: reg.RKey(), SGL: w.a.sgl(0, 8), Flags: SendSignaled})
		w.run()
		if got := w.a.wcs[0].Status; (got == WCSuccess) != c.ok || !c.ok && got != WCRemAccessErr {
			t.Errorf("op %d pd %d access %#x: %v", c.op, c.pd, c.access, got)
		}
		reg.Deregister()
	}
}

// TestLocalErrors: a work request's own list is checked too, and fails in its
// turn: what was posted before it completes first.
func TestLocalErrors(t *testing.T) {
	for _, op := range []WROpcode{WRSend, WRRead} {
		w := newWorld(t, usual())
		a, b := w.a, w.b
		b.recv(RecvWR{}, RecvWR{SGL: b.sgl(0, 100)})
		bad := a.sgl(1<<20-4, 8)
		a.post(a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: a.sgl(0, 5000), Flags: SendSignaled}, 0),
			a.remote(SendWR{ID: 2, Opcode: op, SGL: bad}, 0), SendWR{ID: 3, Opcode: WRSend})
		w.run()
		a.want(WC{ID: 1, Opcode: WCRDMAWrite}, WC{ID: 2, Status: WCLocProtErr}, WC{ID: 3, Status: WCWRFlushErr})
	}
	// A receive list that is no good is the receiver's fault.
	w := newWorld(t, usual())
	w.b.recv(RecvWR{ID: 4, SGL: w.b.sgl(1<<20-4, 8)})
	w.a.post(SendWR{ID: 1, Opcode: WRSend, SGL: w.a.sgl(0, 8)})
	w.run()
	w.a.want(WC{ID: 1, Status: WCRemOpErr})
	w.b.want(WC{ID: 4, Status: WCLocProtErr})
}

// TestLyingPackets sends what no honest requester would.
func TestLyingPackets(t *testing.T) {
	for _, c := range []struct {
		name  string
		op    wire.Opcode
		ext   func(b *node) []byte
		bytes int
	}{
		{"middle without first", wire.RCSendMiddle, nil, 1024},
		{"last without first", wire.RCWriteLast, nil, 10},
		{"first that is not full", wire.RCSendFirst, nil, 1000},
		{"more than the path MTU", wire.RCSendOnly, nil, 1028},
		{"write shorter than its length", wire.RCWriteOnly, func(b *node) []byte { return reth(b, 100) }, 50},
		{"write longer than its length", wire.RCWriteOnly, func(b *node) []byte { return reth(b, 50) }, 100},
		{"write of 4 GiB", wire.RCWriteFirst, func(b *node) []byte { return reth(b, 0xffffffff) }, 1024},
		{"read of 4 GiB", wire.RCReadRequest, func(b *node) []byte { return reth(b, 0xffffffff) }, 0},
		{"flush, not offered", wire.RCFlush, func(b *node) []byte { return append(make([]byte, 4), reth(b, 8)...) }, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, usual())
			w.b.recv(RecvWR{ID: 1, SGL: w.b.sgl(0, 4096)})
			var ext []byte
			if c.ext != nil {
				ext = c.ext(w.b)
			}
			frame := make([]byte, 8192)
			bth := wire.BTH{Op: c.op, PKey: 0xffff, DestQP: w.b.qp.Num(), AckReq: true, PSN: usual().psn}
			n := wire.Encode(frame, &w.a.path, 1, &bth, ext, make([]byte, c.bytes))
			w.wire = append(w.wire, flight{to: w.b, frame: frame[:n]})
			w.run()
			if w.b.qp.State() != StateErr || w.b.env.Stats.SentNakErr.Load() != 1 || w.b.events[len(w.b.events)-1] != EventQPReqErr {
				t.Fatalf("%v, events %v", w.b.qp.State(), w.b.events)
			}
		})
	}
}

func reth(b *node, n uint32) []byte {
	e := make([]byte, wire.RETHLen)
	wire.RETH{VA: uint64(b.mem.Addr()), RKey: uint32(b.reg.RKey()), Len: n}.Put(e)
	return e
}

// TestDestAtomicLimit: more READs at once than max_dest_rd_atomic are refused.
func TestDestAtomicLimit(t *testing.T) {
	s := usual()
	s.rdAtomic = 4
	w := newWorld(t, s)
	w.a.qp.attr.MaxRdAtomic = 16 // a requester that does not keep to what was agreed
	for i := range 16 {
		w.a.post(w.a.remote(SendWR{ID: uint64(i), Opcode: WRRead, SGL: w.a.sgl(0, 20000)}, 0))
	}
	w.run()
	last := w.a.wcs[len(w.a.wcs)-1]
	if w.b.env.Stats.SentNakErr.Load() != 1 || last.Status != WCWRFlushErr {
		t.Fatalf("%+v", w.a.wcs)
	}
}

// TestSRQ: QPs that share receives; limit event; last WQE event.
func TestSRQ(t *testing.T) {
	limit := 0
	srq, err := NewSRQ(1, 16, 2, func() { limit++ })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { srq.Close() })
	s := usual()
	s.srq = srq
	w := newWorld(t, s)
	a, b := w.a, w.b
	if _, err := b.qp.PostRecv([]RecvWR{{}}); err != ErrHasSRQ {
		t.Fatal(err)
	}
	for i := range 10 {
		if _, err := srq.PostRecv([]RecvWR{{ID: uint64(i), SGL: b.sgl(100*i, 100)}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := srq.SetLimit(5); err != nil || limit != 0 {
		t.Fatal(err, limit)
	}
	for i := range 8 {
		a.post(SendWR{ID: uint64(i), Opcode: WRSend, SGL: a.sgl(0, 50)})
	}
	w.run()
	if len(b.wcs) != 8 || limit != 1 {
		t.Fatalf("%d received, limit event %d times", len(b.wcs), limit)
	}
	b.modify(Attr{State: StateErr}, AttrState)
	if !slices.Contains(b.events, EventQPLastWQE) {
		t.Fatal("no last WQE event")
	}
}

// TestResetReuses: RESET empties everything and the QP can be used again.
func TestResetReuses(t *testing.T) {
	s := usual()
	w := newWorld(t, s)
	a, b := w.a, w.b
	a.post(a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: a.sgl(0, 300_000), Flags: SendSignaled}, 0))
	b.recv(RecvWR{ID: 1})
	for range 3 {
		w.step(Never - 1)
	}
	for _, n := range []*node{a, b} {
		n.modify(Attr{State: StateReset}, AttrState)
		n.wcs = nil
	}
	w.wire = nil
	a.connect(s)
	b.connect(s)
	b.recv(RecvWR{ID: 2, SGL: b.sgl(0, 8)})
	a.post(SendWR{ID: 2, Opcode: WRSend, SGL: a.sgl(0, 8), Flags: SendSignaled})
	w.run()
	a.want(WC{ID: 2, Opcode: WCSend})
	b.want(WC{ID: 2, Opcode: WCRecv})
}
