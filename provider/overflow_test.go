// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// alone has device i go on for some time, and nobody else.
func alone(p *harness.Pair, i int, d time.Duration) {
	for end := p.Clock.Now() + int64(d); ; {
		if p.Dev[i].Progress() {
			continue
		}
		at := p.Dev[i].NextDeadline()
		if at > end {
			p.Clock.AdvanceTo(end)
			return
		}
		p.Clock.AdvanceTo(max(at, p.Clock.Now()+1))
	}
}

// The queue of a TAP holds 1000 frames. It does not overflow when a receiver does not read
// it for a quarter of a second, whoever sends as much as he can: one queue pair or a thousand,
// requests or READ responses, large or small. Afterwards all goes on.
func TestNoOverflow(t *testing.T) {
	many := []int{1, 8, 300, 1100}
	if raceDetector {
		many = many[:2]
	}
	for _, conns := range many {
		for _, op := range []qp.WROpcode{qp.WRWrite, qp.WRSend, qp.WRRead} {
			for _, size := range []int{64, 1 << 17} {
				for _, super := range []bool{false, true} {
					if size > 64 && conns > 8 {
						size = 6 * 4096 // enough to fill the queue many times
					}
					if size > 64 && conns > 300 {
						continue
					}
					t.Run(fmt.Sprintf("%d/%d/%d/super=%v", conns, op, size, super), func(t *testing.T) {
						cfg := taptest.Config{Delay: time.Microsecond, QueueLen: 1000}
						if super {
							cfg.Offloads = tap.VnetHdr | tap.USO4 | tap.USO6
						}
						overflow(t, cfg, conns, op, size)
					})
				}
			}
		}
	}
}

func overflow(t *testing.T, cfg taptest.Config, conns int, op qp.WROpcode, size int) {
	const depth = 8
	p := harness.NewPair(t, cfg)
	var all []*harness.Conn
	for range conns {
		all = append(all, p.Connect(harness.ConnOptions{MTU: qp.MTU4096, Mem: size, Timeout: 16,
			Caps: qp.Caps{SendWR: depth, RecvWR: depth, SendSGE: 1, RecvSGE: 1}, CQE: depth}))
	}
	sender := 0
	if op == qp.WRRead {
		sender = 1
	}
	for _, c := range all {
		for i := range uint64(depth) {
			switch op {
			case qp.WRWrite:
				c.A.Send(c.A.Write(c.B, i, 0, 0, size))
			case qp.WRSend:
				c.B.Recv(i, 0, size)
				c.A.Send(c.A.Message(i, 0, size))
			case qp.WRRead:
				c.A.Send(c.A.Read(c.B, i, 0, 0, size))
			}
		}
	}
	p.Clock.Advance(time.Microsecond) // READ requests have arrived
	alone(p, sender, 250*time.Millisecond)
	waiting := p.Net.Port(1 - sender).InFlight()
	done := make([]int, conns)
	p.RunUntil(func() bool {
		left := false
		for i, c := range all {
			for _, wc := range c.A.Poll() {
				if wc.Status != qp.WCSuccess {
					t.Fatalf("connection %d: %v", i, wc.Status)
				}
				done[i]++
			}
			for _, wc := range c.B.Poll() {
				if wc.Status != qp.WCSuccess {
					t.Fatalf("connection %d, receive: %v", i, wc.Status)
				}
			}
			left = left || done[i] < depth
		}
		return !left
	})
	if st := p.Net.Stats(); st.Overflowed != 0 || waiting == 0 {
		t.Errorf("%d frames were lost, %d waited", st.Overflowed, waiting)
	}
	for _, d := range p.Dev {
		if st := d.Stats(); st.Dropped() != 0 {
			t.Errorf("drops: %v", st.Drops)
		}
	}
	sent := func(d *provider.Device) uint64 { return d.Protocol().SentPkts.Load() }
	t.Logf("%d frames waited; %d and %d packets sent, %d of them again", waiting, sent(p.Dev[0]), sent(p.Dev[1]),
		p.Dev[0].Protocol().RetransmittedPkts.Load())
}
