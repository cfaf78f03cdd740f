// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

const testXRCD = XRCD(7)

// connectXRC connects an initiator, node a, with a target.
func (n *node) connectXRC(s setup) {
	n.modify(Attr{State: StateInit, Port: 1, Access: s.access}, AttrState|AttrPKeyIndex|AttrPort|AttrAccess)
	rtr := Attr{State: StateRTR, Path: n.path, PathMTU: s.mtu, DestQPN: n.peer.qp.Num(), RQPSN: s.psn, MaxDestRdAtomic: s.rdAtomic, MinRNRTimer: s.rnrTimer}
	mask := AttrState | AttrAV | AttrPathMTU | AttrDestQPN | AttrRQPSN
	if n.qp.Type() == TypeXRCRecv {
		mask |= AttrMaxDestRdAtomic | AttrMinRNRTimer
	}
	n.modify(rtr, mask)
	if s.rts && n.qp.Type() == TypeXRCSend {
		n.toRTS(s)
	}
}

// xrc is a world of an initiator and a target with two SRQs: 3 of PD 1, and 4 of PD
// 2 with its own CQ.
func newXRC(t *testing.T, change func(*setup)) (w *world, other *CQ) {
	s := usual()
	s.typ = TypeXRCSend
	if change != nil {
		change(&s)
	}
	w = newWorld(t, s)
	w.b.srqs = map[uint32]*SRQ{}
	other, err := NewCQ(16, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { other.Close() })
	w.b.addSRQ(3, 1, testXRCD, w.b.cq)
	w.b.addSRQ(4, 2, testXRCD, other)
	return w, other
}

func (n *node) addSRQ(num uint32, pd mr.PD, xrcd XRCD, cq *CQ) *SRQ {
	s, err := NewXRCSRQ(pd, xrcd, cq, 64, 4, nil)
	if err != nil {
		n.w.t.Fatal(err)
	}
	n.srqs[num] = s
	n.w.t.Cleanup(func() {
		if !s.isClosed() {
			s.Close()
		}
	})
	return s
}

func (n *node) recvSRQ(num uint32, wrs ...RecvWR) {
	n.w.t.Helper()
	if _, err := n.srqs[num].PostRecv(wrs); err != nil {
		n.w.t.Fatal(err)
	}
}

// A packet that met memory which was changing, and has a receive of one SRQ, does not
// come again for another SRQ.
func TestXRCOtherSRQ(t *testing.T) {
	w, other := newXRC(t, nil)
	w.b.recvSRQ(3, RecvWR{1, w.b.sgl(0, 100)})
	w.b.recvSRQ(4, RecvWR{2, w.b.sgl(0, 100)})
	r := &w.b.qp.resp
	r.srq, r.cq, r.listPD = w.b.srqs[3], w.b.cq, 1
	if r.hasRecv = r.takeRecv(); !r.hasRecv {
		t.Fatal("no receive")
	}
	w.a.post(SendWR{ID: 5, Opcode: WRSend, SGL: w.a.sgl(0, 10), RemoteSRQN: 4})
	w.run()
	w.a.want(WC{ID: 5, Status: WCRemInvReqErr, Opcode: WCSend})
	w.b.want(WC{ID: 1, Status: WCRemInvReqErr, Opcode: WCRecv})
	if other.Len() != 0 || w.b.srqs[4].q.ring.Len() != 1 {
		t.Errorf("%d completions of another SRQ, %d receives left", other.Len(), w.b.srqs[4].q.ring.Len())
	}
}

// Each operation, of one packet and of several, with packets lost and without.
func TestXRCOperations(t *testing.T) {
	for _, lossy := range []bool{false, true} {
		w, _ := newXRC(t, func(s *setup) { s.access |= mr.FlushGlobal })
		flushable, err := w.b.env.Keys.Register(mr.RegAttr{PD: 1, Addr: w.b.mem.Addr(), Length: 1 << 20, Access: allAccess | mr.FlushGlobal})
		if err != nil {
			t.Fatal(err)
		}
		lost, seen := 0, 0
		if lossy {
			w.filter = func(*wire.Packet, *node) bool {
				if seen++; seen%5 == 0 {
					lost++
					return false
				}
				return true
			}
		}
		for _, n := range []int{0, 100, 1024, 5000} {
			src, dst := w.a.fill(uint64(n)), w.b.mem.Bytes()
			clear(dst)
			inv, err := w.b.env.Keys.Register(mr.RegAttr{PD: 1, Addr: w.b.mem.Addr(), Length: 4096, Access: allAccess, Invalidatable: true})
			if err != nil {
				t.Fatal(err)
			}
			a := w.a
			wr := func(id uint64, op WROpcode, off int) SendWR {
				return a.remote(SendWR{ID: id, Opcode: op, Flags: SendSignaled, SGL: a.sgl(off, n), RemoteSRQN: 3, Imm: 0xabcd}, off)
			}
			w.b.recvSRQ(3, RecvWR{1, w.b.sgl(0, n)}, RecvWR{2, w.b.sgl(10000, n)}, RecvWR{3, nil}, RecvWR{4, w.b.sgl(40000, n)})
			binary.NativeEndian.PutUint64(dst[60000:], 5)
			sendInv := wr(14, WRSendInv, 40000)
			sendInv.InvKey = inv.RKey()
			add, swap := wr(16, WRAtomicFetchAdd, 60000), wr(17, WRAtomicCmpSwap, 60000)
			add.SGL, swap.SGL = a.sgl(50000, 8), a.sgl(50008, 8)
			add.CompareAdd, swap.CompareAdd, swap.Swap = 2, 7, 9
			read := wr(15, WRRead, 30000)
			read.SGL, read.Flags = a.sgl(70000, n), SendSignaled|SendFence
			word, flush := a.atomicWrite(18, 80000, 80000), a.flush(19, flushable.RKey(), wire.FlushGlobal, wire.FlushRange, 0, 4096)
			word.RemoteSRQN, flush.RemoteSRQN = 3, 3
			a.post(wr(10, WRSend, 0), wr(11, WRSendImm, 10000), wr(12, WRWriteImm, 20000), wr(13, WRWrite, 30000), sendInv, read, add, swap, word, flush)
			w.run()
			a.want(WC{ID: 10, Opcode: WCSend}, WC{ID: 11, Opcode: WCSend}, WC{ID: 12, Opcode: WCRDMAWrite}, WC{ID: 13, Opcode: WCRDMAWrite},
				WC{ID: 14, Opcode: WCSend}, WC{ID: 15, Opcode: WCRDMARead}, WC{ID: 16, Opcode: WCFetchAdd}, WC{ID: 17, Opcode: WCCompSwap},
				WC{ID: 18, Opcode: WCAtomicWrite}, WC{ID: 19, Opcode: WCFlush})
			w.b.want(WC{ID: 1, Opcode: WCRecv}, WC{ID: 2, Opcode: WCRecv}, WC{ID: 3, Opcode: WCRecvRDMAImm}, WC{ID: 4, Opcode: WCRecv})
			for i, wc := range w.b.wcs {
				if wc.QPN != w.b.qp.Num() || int(wc.ByteLen) != n || wc.SrcQP != a.qp.Num() || (wc.Imm == 0xabcd) != (i == 1 || i == 2) || (wc.Flags&WCWithInv != 0) != (i == 3) {
					t.Fatalf("completion %+v", wc)
				}
			}
			for _, off := range []int{0, 10000, 20000, 30000, 40000} {
				if !bytes.Equal(src[off:off+n], dst[off:off+n]) {
					t.Fatalf("%d bytes at %d", n, off)
				}
			}
			if !bytes.Equal(src[80000:80008], dst[80000:80008]) {
				t.Fatal("ATOMIC WRITE")
			}
			if !bytes.Equal(src[70000:70000+n], dst[30000:30000+n]) {
				t.Fatal("READ")
			}
			if x, y, z := binary.NativeEndian.Uint64(src[50000:]), binary.NativeEndian.Uint64(src[50008:]), binary.NativeEndian.Uint64(dst[60000:]); x != 5 || y != 7 || z != 9 {
				t.Fatalf("atomics: %d %d %d", x, y, z)
			}
			if err := inv.Deregister(); err != nil {
				t.Fatal(err)
			}
			a.wcs, w.b.wcs = nil, nil
		}
		if err := flushable.Deregister(); err != nil {
			t.Fatal(err)
		}
		if lossy && (lost < 5 || w.b.env.Stats.ReadReexecuted.Load() == 0) {
			t.Fatalf("%d packets lost, %d READs executed again", lost, w.b.env.Stats.ReadReexecuted.Load())
		}
		for _, name := range w.sent {
			if !strings.HasPrefix(name, "XRC_") {
				t.Fatalf("sent %s", name)
			}
		}
	}
}

// The SRQ's domain is the one of the memory, and its CQ gets the completion.
func TestXRCDomains(t *testing.T) {
	w, other := newXRC(t, nil)
	reg, err := w.b.env.Keys.Register(mr.RegAttr{PD: 2, Addr: w.b.mem.Addr(), Length: 4096, Access: allAccess})
	if err != nil {
		t.Fatal(err)
	}
	defer reg.Deregister()
	w.b.recvSRQ(4, RecvWR{5, []SGE{{uint64(w.b.mem.Addr()), 100, reg.LKey()}}})
	write := w.a.remote(SendWR{ID: 2, Opcode: WRWrite, SGL: w.a.sgl(0, 10), RemoteSRQN: 4}, 0)
	write.RKey = reg.RKey()
	w.a.post(SendWR{ID: 1, Opcode: WRSend, SGL: w.a.sgl(0, 100), RemoteSRQN: 4, Flags: SendSignaled}, write,
		w.a.remote(SendWR{ID: 3, Opcode: WRWrite, SGL: w.a.sgl(0, 10), RemoteSRQN: 4}, 0)) // a key of PD 1
	w.run()
	w.a.want(WC{ID: 1, Opcode: WCSend}, WC{ID: 3, Status: WCRemAccessErr})
	var wcs [2]WC
	if n := other.Poll(wcs[:]); n != 1 || wcs[0].ID != 5 || wcs[0].Status != WCSuccess || wcs[0].QPN != w.b.qp.Num() {
		t.Fatalf("%d completions: %+v", n, wcs)
	}
	w.b.want()
}

func TestXRCErrors(t *testing.T) {
	for name, c := range map[string]struct {
		srqn   uint32
		before func(w *world)
		want   WCStatus
		event  EventType
	}{
		"no such SRQ":    {99, nil, WCRemInvReqErr, EventQPReqErr},
		"another domain": {5, func(w *world) { w.b.addSRQ(5, 1, testXRCD+1, w.b.cq) }, WCRemInvReqErr, EventQPReqErr},
		"failed SRQ":     {3, func(w *world) { w.b.srqs[3].Fail() }, WCRemOpErr, EventQPFatal},
	} {
		for _, op := range []WROpcode{WRSend, WRWrite, WRRead, WRAtomicFetchAdd} {
			w, _ := newXRC(t, nil)
			if c.before != nil {
				c.before(w)
			}
			w.b.recvSRQ(3, RecvWR{1, w.b.sgl(0, 100)})
			w.a.post(w.a.remote(SendWR{ID: 1, Opcode: op, SGL: w.a.sgl(0, 8), RemoteSRQN: c.srqn}, 0))
			w.run()
			w.a.want(WC{ID: 1, Status: c.want})
			w.b.want() // no receive is used up
			if w.b.qp.State() != StateErr || !slices.Contains(w.b.events, c.event) || !slices.Contains(w.b.events, EventQPLastWQE) {
				t.Errorf("%s, %v: target in %v with events %v", name, op, w.b.qp.State(), w.b.events)
			}
		}
	}
}

// An SRQ that goes away in the middle of a message: the message fails, and its receive
// completes no more.
func TestXRCVanishingSRQ(t *testing.T) {
	w, _ := newXRC(t, nil)
	w.b.recvSRQ(3, RecvWR{1, w.b.sgl(0, 5000)})
	w.filter = func(p *wire.Packet, _ *node) bool {
		if p.Info.Mask&wire.Last != 0 {
			w.b.srqs[3].Close()
			delete(w.b.srqs, 3)
		}
		return true
	}
	w.a.post(SendWR{ID: 1, Opcode: WRSend, SGL: w.a.sgl(0, 5000), RemoteSRQN: 3})
	w.run()
	w.a.want(WC{ID: 1, Status: WCRemInvReqErr})
	w.b.want()
}

// A message that was under way when the target is stopped is flushed to the SRQ's CQ.
func TestXRCFlush(t *testing.T) {
	w, _ := newXRC(t, nil)
	w.b.recvSRQ(3, RecvWR{1, w.b.sgl(0, 5000)}, RecvWR{2, w.b.sgl(0, 5000)})
	w.filter = func(p *wire.Packet, _ *node) bool { return p.Info.Mask&wire.Last == 0 }
	w.a.post(SendWR{ID: 1, Opcode: WRSend, SGL: w.a.sgl(0, 5000), RemoteSRQN: 3})
	for range 20 {
		w.step(w.now + 10*wireDelay)
	}
	w.b.modify(Attr{State: StateErr}, AttrState)
	w.step(w.now)
	w.b.want(WC{ID: 1, Status: WCWRFlushErr})
	if !slices.Contains(w.b.events, EventQPLastWQE) {
		t.Errorf("events %v", w.b.events)
	}
}

// An RNR NAK where the SRQ is empty, and the limit of patience.
func TestXRCNotReady(t *testing.T) {
	w, _ := newXRC(t, func(s *setup) { s.rnrRetry = 2 })
	w.a.post(SendWR{ID: 1, Opcode: WRSend, SGL: w.a.sgl(0, 10), RemoteSRQN: 3})
	w.run()
	w.a.want(WC{ID: 1, Status: WCRNRRetryExcErr})
	if n := w.b.env.Stats.SentRNRNak.Load(); n != 3 {
		t.Errorf("%d RNR NAKs", n)
	}
}

// What the two ends do not have.
func TestXRCSides(t *testing.T) {
	w, _ := newXRC(t, nil)
	if _, err := w.a.qp.PostRecv([]RecvWR{{}}); !errors.Is(err, ErrHasSRQ) {
		t.Errorf("receive posted to an initiator: %v", err)
	}
	if _, err := w.b.qp.PostRecv([]RecvWR{{}}); !errors.Is(err, ErrHasSRQ) {
		t.Errorf("receive posted to a target: %v", err)
	}
	w.b.modify(Attr{State: StateRTS, SQPSN: 1, Timeout: 1}, AttrState|AttrSQPSN|AttrTimeout)
	if _, err := w.b.qp.PostSend([]SendWR{{Opcode: WRSend}}); !errors.Is(err, ErrOpcode) || w.b.qp.SendOps() != 0 {
		t.Errorf("send posted to a target: %v, opcodes %#x", err, w.b.qp.SendOps())
	}
	if w.b.qp.Caps() != (Caps{}) || w.a.qp.Caps().RecvWR != 0 || w.a.qp.Caps().SendWR == 0 {
		t.Errorf("target %+v, initiator %+v", w.b.qp.Caps(), w.a.qp.Caps())
	}
	// Requests to the initiator and responses to the target are dropped.
	w.b.recvSRQ(3, RecvWR{1, w.b.sgl(0, 10)})
	w.a.post(SendWR{ID: 1, Opcode: WRSend, SGL: w.a.sgl(0, 10), RemoteSRQN: 3, Flags: SendSignaled})
	w.filter = func(p *wire.Packet, from *node) bool {
		q := *p
		from.qp.Handle(&q)
		return true
	}
	w.run()
	w.a.want(WC{ID: 1, Opcode: WCSend})
	w.b.want(WC{ID: 1, Opcode: WCRecv})
	if x, y := w.a.env.Stats.Dropped.Load(), w.b.env.Stats.Dropped.Load(); x != 1 || y != 1 {
		t.Errorf("dropped %d and %d", x, y)
	}
}

// The SRQ's domain is that of receives of any QP (IBA 10.2.9).
func TestSRQDomain(t *testing.T) {
	srq, err := NewSRQ(2, 8, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer srq.Close()
	s := usual()
	s.srq = srq
	w := newWorld(t, s)
	reg, err := w.b.env.Keys.Register(mr.RegAttr{PD: 2, Addr: w.b.mem.Addr(), Length: 4096, Access: allAccess})
	if err != nil {
		t.Fatal(err)
	}
	defer reg.Deregister()
	if _, err := srq.PostRecv([]RecvWR{{1, []SGE{{uint64(w.b.mem.Addr()), 100, reg.LKey()}}}, {2, w.b.sgl(0, 100)}}); err != nil {
		t.Fatal(err)
	}
	w.a.post(SendWR{ID: 1, Opcode: WRSend, SGL: w.a.sgl(0, 100), Flags: SendSignaled}, SendWR{ID: 2, Opcode: WRSend, SGL: w.a.sgl(0, 100)})
	w.run()
	w.a.want(WC{ID: 1, Opcode: WCSend}, WC{ID: 2, Status: WCRemOpErr})
	w.b.want(WC{ID: 1, Opcode: WCRecv}, WC{ID: 2, Status: WCLocProtErr})
}
