// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"fmt"
	"testing"

	"github.com/tapverbs/tapverbs/wire"
)

// What goes to a receiver begins with a part of the window, grows to all of it, is what the
// receiver says while that holds, and begins anew after a pause.
func TestDest(t *testing.T) {
	s := usual()
	s.mtu = MTU256
	w := newWorld(t, s)
	d := NewDest(w.a.env)
	w.a.qp.SetDest(d)
	w.b.qp.SetDest(NewDest(w.b.env))
	most := int32(0)
	w.filter = func(*wire.Packet, *node) bool { most = max(most, d.out); return true }
	send := func(n int) int32 {
		t.Helper()
		most = 0
		w.a.wcs = nil
		for range n {
			w.a.post(w.a.remote(SendWR{ID: 1, Opcode: WRWrite, Flags: SendSignaled, SGL: w.a.sgl(0, 1<<18)}, 0))
		}
		w.run()
		if len(w.a.wcs) != n || d.out != 0 || d.active != 0 || d.line.len() != 0 {
			t.Fatalf("%d completions of %d, %+v", len(w.a.wcs), n, d.share)
		}
		for _, wc := range w.a.wcs {
			if wc.Status != WCSuccess {
				t.Fatal(wc.Status)
			}
		}
		return most
	}
	if d.window() != shardWindow/startShare {
		t.Errorf("it begins with %d", d.window())
	}
	if n := send(4); n != maxWindow || d.window() != shardWindow {
		t.Errorf("%d packets were out, and %d may be", n, d.window())
	}
	for _, told := range []int32{100, 20, 1} {
		if !d.Told(told) || d.Told(told+1) {
			t.Errorf("%d: less does not count, or more does at once", told)
		}
		if n := send(1); n != max(told, minTold) {
			t.Errorf("told %d, %d packets were out", told, n)
		}
	}
	// A thousand packets went by: it holds for another thousand, if no more is told.
	if !d.Told(30) || d.window() != 30 {
		t.Errorf("later on more does not count: %d", d.window())
	}
	if n := send(2); n != 30 || d.good != 0 || d.window() != shardWindow {
		t.Errorf("%d packets were out, and %d may be", n, d.window())
	}
	w.now += idleAfter + 1
	w.a.post(w.a.remote(SendWR{ID: 1, Opcode: WRWrite, Flags: SendSignaled, SGL: w.a.sgl(0, 1<<18)}, 0))
	w.a.qp.Run(maxWindow)
	if d.out != shardWindow/startShare {
		t.Errorf("after a pause %d packets went without an answer", d.out)
	}
	w.run()
}

// A QP that waits for room at one receiver and is moved to another goes on there, and what
// it has out is that one's.
func TestDestMoves(t *testing.T) {
	s := usual()
	s.mtu = MTU256
	w := newWorld(t, s)
	d, e := NewDest(w.a.env), NewDest(w.a.env)
	w.a.qp.SetDest(d)
	var ready []*QP
	w.a.env.Ready = func(q *QP) { ready = append(ready, q) }
	d.out = d.window() // others have that
	w.a.post(w.a.remote(SendWR{ID: 1, Opcode: WRWrite, Flags: SendSignaled, SGL: w.a.sgl(0, 1<<16)}, 0))
	w.a.qp.Run(64)
	if d.line.len() != 1 || w.a.qp.req.out != 0 {
		t.Fatalf("%d wait, %d packets are out", d.line.len(), w.a.qp.req.out)
	}
	w.a.qp.Run(64)
	if d.line.len() != 1 {
		t.Errorf("it waits %d times", d.line.len())
	}
	w.a.qp.SetDest(e)
	if d.line.len() != 0 || w.a.qp.req.inDestLine {
		t.Error("it waits for the one that it has left")
	}
	w.a.qp.Run(8)
	if e.out != 8 || e.active != 1 || w.a.env.share.out != 8 {
		t.Errorf("%d packets are out, of %d", e.out, e.active)
	}
	d.out = 0
	w.a.qp.SetDest(d)
	if e.out != 0 || e.active != 0 || d.out != 8 || d.active != 1 {
		t.Errorf("%d and %d packets are out", e.out, d.out)
	}
	w.run()
	w.a.want(WC{ID: 1, Status: WCSuccess, Opcode: WCRDMAWrite})
	// One that is in line when there is room is told, though others are before it who have nothing to send.
	d.out = d.window()
	for range maxWindow {
		d.line.join(&QP{env: w.a.env, closed: true})
	}
	w.a.post(w.a.remote(SendWR{ID: 2, Opcode: WRWrite, Flags: SendSignaled, SGL: w.a.sgl(0, 1<<10)}, 0))
	w.a.qp.Run(8)
	d.out -= 2
	d.admit()
	if len(ready) != 1 || ready[0] != w.a.qp || d.line.len() != 0 {
		t.Errorf("%d were told", len(ready))
	}
	w.run()
	d.out = 0
	w.a.qp.SetDest(nil)
}

// When the window shrinks to what is out or less, and nobody was asked to acknowledge that, one
// more packet asks; then it is waited for.
func TestDestShrinks(t *testing.T) {
	for more := range 3 {
		t.Run(fmt.Sprint(more), func(t *testing.T) { destShrinks(t, more) })
	}
}

func destShrinks(t *testing.T, more int) {
	s := usual()
	s.mtu = MTU256
	w := newWorld(t, s)
	d := NewDest(w.a.env)
	w.a.qp.SetDest(d)
	w.a.env.Ready = func(*QP) {}
	asked := 0
	w.filter = func(p *wire.Packet, from *node) bool {
		if from == w.a && p.BTH.AckReq {
			asked++
		}
		return true
	}
	w.a.post(w.a.remote(SendWR{ID: 1, Opcode: WRWrite, Flags: SendSignaled, SGL: w.a.sgl(0, 1<<16)}, 0))
	w.a.qp.Run(minTold + more)
	out := int32(minTold + more)
	if d.out != out || asked != 0 {
		t.Fatalf("%d packets are out, %d ask", d.out, asked)
	}
	d.Told(minTold)
	for range 3 {
		w.a.qp.Run(8)
		if d.out != out+1 || asked != 1 {
			t.Errorf("%d packets are out, %d ask", d.out, asked)
		}
	}
	w.run()
	w.a.want(WC{ID: 1, Status: WCSuccess, Opcode: WCRDMAWrite})
}
