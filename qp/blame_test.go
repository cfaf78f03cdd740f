// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"testing"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// Errors must end the request they belong to, and that one only.

// noAcks drops what b acknowledges, NAKs excepted.
func noAcks(w *world) {
	w.filter = func(p *wire.Packet, from *node) bool {
		return from != w.b || p.Info.Kind != wire.KindAck || p.AETH().Kind() != wire.AckOK
	}
}

// TestNakMeetsLocalError: a NAK acknowledges the request before one that has failed
// here already. Both say that it failed; it ends once.
func TestNakMeetsLocalError(t *testing.T) {
	for _, rnr := range []bool{false, true} {
		w := newWorld(t, usual())
		a := w.a
		noAcks(w)
		bad := a.sge(1024, 2048)
		bad.LKey ^= 0x5500
		second := a.remote(SendWR{ID: 2, Opcode: WRWrite, SGL: []SGE{a.sge(0, 1024), bad}, Flags: SendSignaled}, 0)
		second.RKey ^= 0x7700
		if rnr {
			second.Opcode = WRSend // and there is no receive
		}
		a.post(a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: a.sgl(0, 8), Flags: SendSignaled}, 0), second,
			SendWR{ID: 3, Opcode: WRSend})
		w.run()
		a.want(WC{ID: 1, Opcode: WCRDMAWrite}, WC{ID: 2, Status: WCLocProtErr}, WC{ID: 3, Status: WCWRFlushErr})
		if a.qp.Deadline() != Never {
			t.Fatal("a QP in ERR waits for a timer")
		}
	}
}

// TestBlame: what fails at the end of a message, after its packets were taken, is
// told of that message, whether more is on the way or not.
func TestBlame(t *testing.T) {
	for _, more := range []bool{false, true} {
		w := newWorld(t, usual())
		a, b := w.a, w.b
		b.recv(RecvWR{ID: 7, SGL: b.sgl(0, 5000)}, RecvWR{ID: 8, SGL: b.sgl(0, 64)})
		wrs := []SendWR{{ID: 1, Opcode: WRSendInv, SGL: a.sgl(0, 5000), InvKey: b.reg.RKey()}} // a key that stays
		want := []WC{{ID: 1, Status: WCRemOpErr}}
		if more {
			wrs = append(wrs, SendWR{ID: 2, Opcode: WRSend, SGL: a.sgl(0, 8)})
			want = append(want, WC{ID: 2, Status: WCWRFlushErr})
		}
		a.post(wrs...)
		w.run()
		a.want(want...)
		b.want(WC{ID: 7, Status: WCRemInvReqErr}, WC{ID: 8, Status: WCWRFlushErr})
	}
}

// TestBlamePlacement: memory goes away after bytes for it were staged and before
// they are placed: the WRITE fails, whether its last packet came or not.
func TestBlamePlacement(t *testing.T) {
	for _, size := range []int{500, 3000, 100_000} {
		for _, more := range []bool{false, true} {
			w := newWorld(t, usual())
			a, b := w.a, w.b
			m, err := mr.Alloc(1 << 17)
			if err != nil {
				t.Fatal(err)
			}
			reg, err := b.env.Keys.Register(mr.RegAttr{PD: 1, Addr: m.Addr(), Length: 1 << 17, Access: allAccess})
			if err != nil {
				t.Fatal(err)
			}
			w.filter = func(p *wire.Packet, from *node) bool {
				if from == a && m != nil && p.Info.Mask&(wire.Last|wire.Only) != 0 {
					// The packets before it are delivered and staged by now, or on
					// their way; either way the memory is gone when it comes.
					if err := m.Close(); err != nil {
						t.Error(err)
					}
					m = nil
				}
				return true
			}
			wrs := []SendWR{{ID: 1, Opcode: WRWrite, SGL: a.sgl(0, size), RemoteAddr: uint64(reg.Addr()), RKey: reg.RKey()}}
			want := []WC{{ID: 1, Status: WCRemAccessErr}}
			if more {
				wrs = append(wrs, SendWR{ID: 2, Opcode: WRWrite, SGL: a.sgl(0, 8), RemoteAddr: uint64(b.mem.Addr()), RKey: b.reg.RKey()})
				want = append(want, WC{ID: 2, Status: WCWRFlushErr})
			}
			a.post(wrs...)
			w.run()
			a.want(want...)
			if err := reg.Deregister(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestBlameRepeatedRead: the region of a READ goes away before the READ is asked for
// again.
func TestBlameRepeatedRead(t *testing.T) {
	w := newWorld(t, usual())
	a, b := w.a, w.b
	reg, err := b.env.Keys.Register(mr.RegAttr{PD: 1, Addr: b.mem.Addr(), Length: 4096, Access: allAccess})
	if err != nil {
		t.Fatal(err)
	}
	w.filter = func(p *wire.Packet, from *node) bool {
		if from == b && p.Info.Kind == wire.KindReadResp {
			reg.Deregister() // twice is an error that does not matter here
			return false
		}
		return true
	}
	b.recv(RecvWR{ID: 9, SGL: b.sgl(0, 8)})
	a.post(SendWR{ID: 1, Opcode: WRRead, SGL: a.sgl(0, 8), RemoteAddr: uint64(b.mem.Addr()), RKey: reg.RKey()})
	w.run()
	a.want(WC{ID: 1, Status: WCRemAccessErr})
	b.want() // whether the peer still needed it b cannot know
}

// TestLateRepeatedRead: the network asks once more for a READ that has had its answer, when
// its region has gone. Nothing fails for that.
func TestLateRepeatedRead(t *testing.T) {
	w := newWorld(t, usual())
	a, b := w.a, w.b
	reg, err := b.env.Keys.Register(mr.RegAttr{PD: 1, Addr: b.mem.Addr(), Length: 4096, Access: allAccess})
	if err != nil {
		t.Fatal(err)
	}
	var request []byte
	naks := 0
	w.filter = func(p *wire.Packet, from *node) bool {
		if from == a && p.Info.Kind == wire.KindRead {
			request = append([]byte(nil), p.Frame...)
		}
		if from == b && p.Info.Kind == wire.KindAck && p.AETH().Kind() == wire.AckNak {
			naks++
		}
		return true
	}
	a.post(SendWR{ID: 1, Opcode: WRRead, Flags: SendSignaled, SGL: a.sgl(0, 8), RemoteAddr: uint64(b.mem.Addr()), RKey: reg.RKey()})
	w.run()
	a.want(WC{ID: 1, Opcode: WCRDMARead, ByteLen: 8})
	if err := reg.Deregister(); err != nil {
		t.Fatal(err)
	}
	w.fly(flight{at: w.now + wireDelay, to: b, frame: request})
	w.run()
	if naks != 1 {
		t.Errorf("%d NAKs", naks)
	}
	a.post(a.remote(SendWR{ID: 2, Opcode: WRWrite, Flags: SendSignaled, SGL: a.sgl(0, 8)}, 0))
	w.run()
	a.want(WC{ID: 1, Opcode: WCRDMARead}, WC{ID: 2, Opcode: WCRDMAWrite})
}

// TestDrainAgain: the drained event comes for each drain that asks for it.
func TestDrainAgain(t *testing.T) {
	w := newWorld(t, usual())
	a := w.a
	for i, ask := range []bool{true, true, false, true} {
		a.events = nil
		a.modify(Attr{State: StateSQD, EnSQDAsync: ask}, AttrState|AttrEnSQDAsync)
		w.run()
		if (len(a.events) == 1) != ask {
			t.Fatalf("drain %d: events %v", i, a.events)
		}
		a.modify(Attr{State: StateRTS}, AttrState)
	}
}

// TestRNRForEver: all 32 timers, and rnr_retry 7 is no number.
func TestRNRForEver(t *testing.T) {
	for code := uint8(0); code < 32; code++ {
		s := usual()
		s.rnrTimer = code
		w := newWorld(t, s)
		w.a.post(SendWR{ID: 1, Opcode: WRSend, SGL: w.a.sgl(0, 8), Flags: SendSignaled})
		const naks = 20
		for w.b.env.Stats.SentRNRNak.Load() < naks && w.step(Never-1) {
		}
		if min := (naks - 1) * wire.RNRDelay(code); w.now < min || w.now > min+naks*10*wireDelay {
			t.Fatalf("code %d: %d NAKs in %d ns", code, naks, w.now)
		}
		w.b.recv(RecvWR{ID: 1, SGL: w.b.sgl(0, 8)})
		w.run()
		w.a.want(WC{ID: 1, Opcode: WCSend})
	}
}
