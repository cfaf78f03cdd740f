// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"bytes"
	"testing"

	"github.com/tapverbs/tapverbs/wire"
)

// A NAK that the network delivers several times costs one retry, not several.
func TestDuplicatedNak(t *testing.T) {
	s := usual()
	s.retry = 1
	w := newWorld(t, s)
	lost, naks := false, 0
	w.filter = func(p *wire.Packet, from *node) bool {
		switch {
		case p.Info.Name == "RC_WRITE_FIRST" && !lost:
			lost = true
			return false
		case p.Info.Kind == wire.KindAck && p.AETH().Kind() == wire.AckNak:
			naks++
			for range 3 {
				w.wire = append(w.wire, flight{at: w.now + wireDelay, to: from.peer, frame: bytes.Clone(from.buf)})
			}
		}
		return true
	}
	src := w.a.fill(1)[:5000]
	w.a.post(w.a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: w.a.sgl(0, 5000), Flags: SendSignaled}, 0))
	w.run()
	w.a.want(WC{ID: 1, Opcode: WCRDMAWrite})
	if !bytes.Equal(w.b.mem.Bytes()[:5000], src) {
		t.Fatal("wrong data")
	}
	if st := w.a.env.Stats; naks != 1 || st.RcvdNakSeq.Load() != 4 || st.RetransmittedPkts.Load() != 5 || st.LocalAckTimeout.Load() != 0 {
		t.Fatalf("%d NAKs, %d received, %d packets sent again, %d timeouts; sent %v", naks, st.RcvdNakSeq.Load(),
			st.RetransmittedPkts.Load(), st.LocalAckTimeout.Load(), w.sent)
	}
}

// From the second timeout in a row on, what is waited for is sent two times.
func TestTwiceAfterTimeouts(t *testing.T) {
	for _, c := range []struct {
		op    WROpcode
		name  string
		lost  int // of the request's packets
		timer uint64
		sent  int
	}{{WRWrite, "RC_WRITE_ONLY", 1, 1, 2}, {WRWrite, "RC_WRITE_ONLY", 2, 2, 4}, {WRWrite, "RC_WRITE_ONLY", 3, 2, 4}, {WRWrite, "RC_WRITE_ONLY", 5, 3, 6},
		{WRRead, "RC_READ_REQ", 3, 2, 4}, {WRAtomicFetchAdd, "RC_FETCH_ADD", 3, 2, 4}} {
		s := usual()
		s.timeout = 6 // so short that there are no probes
		w := newWorld(t, s)
		seen := 0
		w.filter = func(p *wire.Packet, _ *node) bool {
			if p.Info.Name == c.name {
				seen++
				return seen > c.lost
			}
			return true
		}
		w.a.post(w.a.remote(SendWR{ID: 1, Opcode: c.op, CompareAdd: 1, SGL: w.a.sgl(0, 8), Flags: SendSignaled}, 0))
		w.run()
		w.a.want(WC{ID: 1, Opcode: wrOps[c.op].wc})
		if n := w.a.env.Stats.LocalAckTimeout.Load(); n != c.timer || seen != c.sent {
			t.Errorf("%s lost %d times: %d timeouts, sent %d times, want %d and %d", c.name, c.lost, n, seen, c.timer, c.sent)
		}
		if c.op == WRAtomicFetchAdd && w.b.mem.Bytes()[0] != 1 {
			t.Errorf("added %d times", w.b.mem.Bytes()[0])
		}
	}
}

// TestSlotFreeBeforeCompletion: who sees a completion can post again at once, even
// with a send queue of one.
func TestSlotFreeBeforeCompletion(t *testing.T) {
	s := usual()
	s.caps.SendWR = 1
	w := newWorld(t, s)
	a := w.a
	var err error
	posted := 0
	a.cq.notify = func(bool) {
		if posted++; posted < 5 {
			a.cq.Arm(false)
		}
		_, err = a.qp.PostSend([]SendWR{a.remote(SendWR{ID: uint64(posted), Opcode: WRWrite, SGL: a.sgl(0, 8), Flags: SendSignaled}, 0)})
	}
	a.cq.Arm(false)
	a.post(a.remote(SendWR{Opcode: WRWrite, SGL: a.sgl(0, 8), Flags: SendSignaled}, 0))
	w.run()
	if err != nil || len(a.wcs) != 6 {
		t.Fatalf("%v, %d completions", err, len(a.wcs))
	}
}
