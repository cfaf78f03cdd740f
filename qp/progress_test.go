// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"testing"

	"github.com/tapverbs/tapverbs/mr"
)

// TestProgress: a QP tells how far it has come, what it had to repeat, and which faults it
// met; the other one does not have these.
func TestProgress(t *testing.T) {
	w := newWorld(t, usual())
	a, b := w.a, w.b
	before, peer := a.qp.Progress(), b.qp.Progress()
	dropNth(w, "RC_SEND_LAST", 0)
	a.fill(1)
	b.recv(RecvWR{ID: 1, SGL: b.sgl(0, 3*4096)})
	a.post(SendWR{ID: 1, Opcode: WRSend, SGL: a.sgl(0, 3*4096), Flags: SendSignaled})
	if p := a.qp.Progress(); p.Waiting != 1 || p.Sent != before.Sent {
		t.Errorf("posted: %+v", p)
	}
	w.run()
	a.want(WC{ID: 1, Opcode: WCSend})
	p, q := a.qp.Progress(), b.qp.Progress()
	if p.Waiting != 0 || p.Sent != before.Sent+1 || p.Losses != 1 || p.RNRs != 0 || p.Unacked == before.Unacked || p.Next != p.Unacked || p.InFlight != 0 || p.Window == 0 || p.Held {
		t.Errorf("who sent: %+v", p)
	}
	if q.Received != peer.Received+1 || q.Expected != p.Next || q.Losses != 0 {
		t.Errorf("who received: %+v", q)
	}
	if q.Faults.Major != 0 || q.Faults.Minor > 3 || q.Faults.Minor == 0 && b.reg.Paging() == mr.UserFault {
		t.Errorf("faults of who received, on memory that nobody had touched: %+v", q.Faults)
	}

	a.post(SendWR{ID: 2, Opcode: WRSend, SGL: a.sgl(0, 8), Flags: SendSignaled})
	for until := w.now + 10_000_000; w.step(until); { // the peer is not ready
	}
	if p := a.qp.Progress(); p.RNRs == 0 || p.Losses != 1 || p.Waiting != 1 || p.RetriesLeft != usual().retry {
		t.Errorf("the peer has no receive: %+v", p)
	}
}
