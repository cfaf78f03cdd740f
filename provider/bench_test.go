// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"fmt"
	"testing"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// hotPath is a connection on which one call of step does one message from A to B
// all through: post, send, receive, acknowledge, poll.
func hotPath(t testing.TB, o harness.ConnOptions, wr func(c *harness.Conn) qp.SendWR) (step func()) {
	return hotPathOf(t, harness.NewPair(t, taptest.Config{}), o, wr)
}

// hotPathOf is hotPath on a pair that is there.
func hotPathOf(t testing.TB, p *harness.Pair, o harness.ConnOptions, wr func(c *harness.Conn) qp.SendWR) (step func()) {
	o.Timeout = 20
	c := p.Connect(o)
	send := []qp.SendWR{wr(c)}
	recv := []qp.RecvWR{{ID: 1, SGL: []qp.SGE{c.B.SGE(0, 1<<16)}}}
	wcs := make([]qp.WC, 4)
	needsRecv := send[0].Opcode == qp.WRSend
	return func() {
		if needsRecv {
			if _, err := c.B.QP.PostRecv(recv); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := c.A.QP.PostSend(send); err != nil {
			t.Fatal(err)
		}
		for a, b := 1, boolInt(needsRecv); a+b > 0; {
			b -= c.B.CQ.Poll(wcs) // B answers inside its poll
			n := c.A.CQ.Poll(wcs)
			a -= n
			if n == 1 && wcs[0].Status != qp.WCSuccess {
				t.Fatalf("completion %+v", wcs[0])
			}
		}
	}
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

var hotOps = []struct {
	name string
	wr   func(c *harness.Conn, n int) qp.SendWR
}{
	{"send", func(c *harness.Conn, n int) qp.SendWR { return c.A.Message(1, 0, n) }},
	{"write", func(c *harness.Conn, n int) qp.SendWR { return c.A.Write(c.B, 1, 0, 0, n) }},
	{"read", func(c *harness.Conn, n int) qp.SendWR { return c.A.Read(c.B, 1, 0, 0, n) }},
}

func TestHotPathAllocatesNothing(t *testing.T) {
	for _, op := range hotOps {
		for _, self := range []bool{false, true} {
			step := hotPath(t, harness.ConnOptions{MTU: qp.MTU4096, Self: self}, func(c *harness.Conn) qp.SendWR { return op.wr(c, 10_000) })
			for range 100 { // pools fill
				step()
			}
			if n := testing.AllocsPerRun(500, step); n != 0 {
				t.Errorf("%s (to oneself: %v): %v allocations per message", op.name, self, n)
			}
		}
	}
}

// TestSuperFramesAllocateNothing is the same where packets leave together. Their link copies
// payload that is elsewhere, which is not the engine's doing: something in between takes it in.
func TestSuperFramesAllocateNothing(t *testing.T) {
	for _, gid := range []int{harness.GIDv4, harness.GIDv6} {
		for _, op := range hotOps {
			super := 0
			cfg := superLink
			cfg.Delay = 0
			p := harness.NewPairWith(t, cfg, func(_ int, d tap.Device) tap.Device { return &joining{Device: d, super: &super} })
			step := hotPathOf(t, p, harness.ConnOptions{MTU: qp.MTU4096, GID: gid}, func(c *harness.Conn) qp.SendWR { return op.wr(c, 60_000) })
			for range 100 { // pools fill
				step()
			}
			super = 0
			if n := testing.AllocsPerRun(200, step); n != 0 {
				t.Errorf("%s over row %d of the GID table: %v allocations per message", op.name, gid, n)
			}
			if super < 200 {
				t.Errorf("%s: %d super-frames", op.name, super)
			}
		}
	}
}

// joining puts frames in pieces together, in memory of its own.
type joining struct {
	tap.Device
	super *int
	buf   [tap.MaxFrame]byte
	one   [1]tap.Frame
}

func (j *joining) WriteBatch(fs []tap.Frame) (int, error) {
	for i, f := range fs {
		if f.GSO != 0 {
			*j.super++
		}
		n := copy(j.buf[:], f.B)
		for _, b := range f.More {
			n += copy(j.buf[n:], b)
		}
		j.one[0] = tap.Frame{B: j.buf[:n], GSO: f.GSO}
		if k, err := j.Device.WriteBatch(j.one[:]); k == 0 {
			return i, err
		}
	}
	return len(fs), nil
}

func BenchmarkMessage(b *testing.B) {
	for _, op := range hotOps {
		for _, n := range []int{8, 4096, 65536} {
			b.Run(fmt.Sprintf("%s/%d", op.name, n), func(b *testing.B) {
				step := hotPath(b, harness.ConnOptions{MTU: qp.MTU4096}, func(c *harness.Conn) qp.SendWR { return op.wr(c, n) })
				b.SetBytes(int64(n))
				b.ReportAllocs()
				for b.Loop() {
					step()
				}
			})
		}
	}
}

// BenchmarkEmptyPoll is what a poll that finds nothing costs.
func BenchmarkEmptyPoll(b *testing.B) {
	p := harness.NewPair(b, taptest.Config{})
	c := p.Connect(harness.ConnOptions{})
	wcs := make([]qp.WC, 1)
	b.ReportAllocs()
	for b.Loop() {
		if c.A.CQ.Poll(wcs) != 0 {
			b.Fatal("completion from nowhere")
		}
	}
}
