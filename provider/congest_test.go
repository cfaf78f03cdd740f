// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

// congested has side A send so many packets of 1,024 bytes of an unreliable service,
// a full send queue at a time.
func congested(t *testing.T, typ qp.Type, self bool) (*harness.Conn, func(packets int)) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{Type: typ, MTU: qp.MTU1024, Mem: 1 << 17, Self: self})
	return c, func(packets int) {
		t.Helper()
		for left := packets; left > 0; {
			n := min(left, 128)
			left -= n
			if typ == qp.TypeUC {
				c.A.Send(c.A.Write(c.B, 1, 0, 0, n*1024))
			} else {
				for range n {
					c.A.Send(c.A.Datagram(c.B, 1, 0, 1024))
				}
			}
			// Only the sender runs: the receiver does something else.
			for c.Dev[0].Progress() {
			}
			for len(c.A.Poll()) > 0 {
			}
		}
	}
}

// A receiver that does not keep up says so to senders of UC and UD, but not of RC. They
// fall silent for a while, and go on by themselves.
func TestCongested(t *testing.T) {
	for _, typ := range []qp.Type{qp.TypeUC, qp.TypeUD} {
		t.Run(typ.String(), func(t *testing.T) {
			c, send := congested(t, typ, false)
			send(3000)
			if st := c.Dev[0].Stats(); st.TxFrames < 3000 {
				t.Fatalf("%d frames sent, before anything was wrong", st.TxFrames)
			}
			c.Clock.AdvanceTo(c.Clock.Now() + int64(time.Millisecond)) // all have arrived
			for c.Dev[1].Progress() {
			}
			if st := c.Dev[1].Stats(); st.CNPsSent != 1 || st.RxFrames < 3000 {
				t.Fatalf("%d notifications sent, %d frames received", st.CNPsSent, st.RxFrames)
			}
			c.Clock.AdvanceTo(c.Clock.Now() + int64(100*time.Microsecond))
			for c.Dev[0].Progress() {
			}
			before := c.Dev[0].Stats()
			if before.CNPs != 1 || before.Dropped() != 0 {
				t.Fatalf("%d notifications came, drops %v", before.CNPs, before.Drops)
			}
			send(100)
			at := c.Dev[0].NextDeadline()
			if st := c.Dev[0].Stats(); st.TxFrames != before.TxFrames {
				t.Fatalf("%d frames sent in the pause", st.TxFrames-before.TxFrames)
			}
			if pause := at - c.Clock.Now(); pause <= 0 || pause > int64(time.Millisecond) {
				t.Fatalf("the pause ends in %d ns", pause)
			}
			c.Clock.AdvanceTo(at - 1)
			for c.Dev[0].Progress() {
			}
			if st := c.Dev[0].Stats(); st.TxFrames != before.TxFrames {
				t.Fatal("the pause ends too soon")
			}
			c.RunUntil(func() bool { return c.Dev[0].Stats().TxFrames >= before.TxFrames+100 })
			if c.Clock.Now() != at {
				t.Errorf("sent %d ns after the pause", c.Clock.Now()-at)
			}
		})
	}
}

// What a device sends to itself is no reason to tell anybody, and reliable senders
// are held back by what is acknowledged.
func TestNotCongested(t *testing.T) {
	c, send := congested(t, qp.TypeUC, true)
	send(5000)
	c.Settle()
	if st := c.Dev[0].Stats(); st.CNPsSent != 0 || st.LoopPackets < 5000 {
		t.Errorf("%d notifications, %d packets to ourselves", st.CNPsSent, st.LoopPackets)
	}
	r := harness.NewPair(t, link).Connect(harness.ConnOptions{Mem: 1 << 20})
	k := packetFor(r)
	k.bth = wire.BTH{Op: wire.CNP, BECN: true, PKey: 0xffff, DestQP: r.A.QP.Num()}
	k.body = make([]byte, wire.CNPLen)
	inject(t, r.Pair, k.frame())
	r.A.Send(r.A.Write(r.B, 1, 0, 0, 1<<20))
	at := r.Clock.Now()
	r.WaitOK(r.A, 1)
	if took := r.Clock.Now() - at; took > int64(time.Millisecond) {
		t.Errorf("a WRITE takes %d ns", took)
	}
}

// A flood of notifications, of which one never knows who sent them, slows a sender
// down and does not stop it.
func TestCNPFlood(t *testing.T) {
	for _, typ := range []qp.Type{qp.TypeUC, qp.TypeUD} {
		t.Run(typ.String(), func(t *testing.T) {
			c, send := congested(t, typ, false)
			k := packetFor(c)
			k.bth = wire.BTH{Op: wire.CNP, BECN: true, PKey: 0xffff, DestQP: c.A.QP.Num()}
			k.body = make([]byte, wire.CNPLen)
			cnp := k.frame()
			before := c.Dev[0].Stats()
			send(100)
			end := c.Clock.Now() + int64(time.Second)
			for posted := 100; c.Clock.Now() < end; {
				flood(t, c.Pair, cnp)
				if st := c.Dev[0].Stats(); int(st.TxFrames-before.TxFrames) >= posted {
					posted += 100
					send(100)
				}
				c.Clock.AdvanceTo(c.Clock.Now() + int64(200*time.Microsecond))
			}
			st := c.Dev[0].Stats()
			if st.CNPs-before.CNPs < 4000 {
				t.Fatalf("%d notifications came", st.CNPs-before.CNPs)
			}
			if n := st.TxFrames - before.TxFrames; n < 400 {
				t.Errorf("%d packets sent in a second of notifications", n)
			}
		})
	}
}

// flood sends a frame to device 0 and lets it act on it, without time passing.
func flood(t *testing.T, p *harness.Pair, frame []byte) {
	t.Helper()
	if _, err := p.Net.Port(1).WriteBatch([]tap.Frame{{B: frame}}); err != nil {
		t.Fatal(err)
	}
	for p.Dev[0].Progress() {
	}
}

// A program that posts, and finds its completions without asking the engine for more,
// reads what its peer sends all the same.
func TestPostReads(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{Type: qp.TypeUC, MTU: qp.MTU1024, Mem: 1 << 17})
	c.B.Send(c.B.Write(c.A, 1, 0, 0, 8*1024))
	for c.Dev[1].Progress() {
	}
	c.Clock.AdvanceTo(c.Clock.Now() + int64(time.Millisecond)) // all have arrived
	before := c.Dev[0].Stats().RxFrames
	for range 4 {
		c.A.Send(c.A.Write(c.B, 1, 0, 0, 64*1024))
	}
	if n := c.Dev[0].Stats().RxFrames - before; n != 8 {
		t.Errorf("%d of 8 frames read by one that only posts", n)
	}
}
