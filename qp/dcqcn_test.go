// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"bytes"
	"testing"
)

// The first notification halves the rate, and the more come, the lower it gets, but not for
// good; without, it comes back, to what it was in some steps and then beyond, and ends.
func TestDCQCN(t *testing.T) {
	var d dcqcn
	now := int64(1e9)
	d.notified(now)
	if d.rate != lineRate/2 {
		t.Fatalf("the first notification leaves %d kbit/s", d.rate)
	}
	d.notified(now + cutEvery - 1)
	if d.rate != lineRate/2 {
		t.Fatalf("one that comes too soon leaves %d kbit/s", d.rate)
	}
	for range 1000 {
		now += cutEvery
		before := d.rate
		if d.notified(now); d.rate >= before && before != minRate || d.rate < minRate {
			t.Fatalf("from %d to %d kbit/s", before, d.rate)
		}
	}
	if d.rate != minRate {
		t.Fatalf("after 1000 notifications: %d kbit/s", d.rate)
	}
	d.target = 1_000_000
	for range fastSteps {
		now += increaseEvery
		d.pass(now)
	}
	if d.rate < 950_000 || d.rate > 1_000_000 {
		t.Errorf("after %d steps: %d kbit/s", fastSteps, d.rate)
	}
	before := d.rate
	for range 100 {
		now += increaseEvery
		d.pass(now)
	}
	if d.rate < before+90*additive || d.rate > before+110*additive {
		t.Errorf("after a hundred more: from %d to %d kbit/s", before, d.rate)
	}
	// Bytes raise it, too; and faster when both have.
	before = d.rate
	for range 20 {
		d.sent(increaseBytes)
	}
	if d.rate < before+20*hyper || d.rate > lineRate {
		t.Errorf("after 200 MB: from %d to %d kbit/s", before, d.rate)
	}
	alpha := d.alpha
	for d.rate != 0 {
		now += increaseEvery
		if d.pass(now); now > 3e9 {
			t.Fatalf("%d kbit/s after 2 s", d.rate)
		}
	}
	if d.alpha > alpha || d.alpha == 0 {
		t.Errorf("alpha went from %d to %d", alpha, d.alpha)
	}
	// Soon after, it is remembered how bad it was; much later, nothing.
	later := d
	d.notified(now + increaseEvery)
	later.notified(now + 1e9)
	if d.rate <= later.rate || later.rate != lineRate/2 {
		t.Errorf("%d kbit/s soon after, %d much later", d.rate, later.rate)
	}
	// A pause of any length ends the limit at once.
	if d.pass(now + 1e12); d.rate != 0 {
		t.Errorf("%d kbit/s after a long time", d.rate)
	}
}

// Who sends slows down, be it the requester or, of READ responses, the responder, which may
// be in RTR; who receives does not.
func TestNotifiedWhoSends(t *testing.T) {
	const n = 1 << 20
	for _, c := range []struct {
		op   WROpcode
		b    bool // who is told
		slow bool
	}{{WRWrite, false, true}, {WRWrite, true, false}, {WRRead, true, true}, {WRRead, false, false}} {
		s := usual()
		s.mtu, s.memory, s.rts = MTU4096, n, false
		w := newWorld(t, s)
		w.pace = 1000
		w.a.toRTS(s)
		src, dst := w.a, w.b
		if c.op == WRRead {
			src, dst = dst, src
		}
		want := bytes.Clone(src.fill(3))
		told := w.a
		if c.b {
			told = w.b
		}
		w.now = 1_000_000_000
		for range 8 { // 156 Mbit/s
			w.now += cutEvery
			if !told.qp.Congested() {
				t.Fatal("the notification is ignored")
			}
		}
		began := w.now
		w.a.post(w.a.remote(SendWR{ID: 1, Opcode: c.op, SGL: w.a.sgl(0, n), Flags: SendSignaled}, 0))
		w.run()
		w.a.want(WC{ID: 1, Opcode: wrOps[c.op].wc})
		if !bytes.Equal(dst.mem.Bytes(), want) {
			t.Errorf("%d: wrong data", c.op)
		}
		if took := w.now - began; took > 1_500_000 != c.slow {
			t.Errorf("%d, responder told: %v: took %d ns", c.op, c.b, took)
		}
		if r := w.a.env.Stats.RetransmittedPkts.Load(); r != 0 {
			t.Errorf("%d, responder told: %v: %d packets sent again", c.op, c.b, r)
		}
	}
}
