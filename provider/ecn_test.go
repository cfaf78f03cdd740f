// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// A link of 10 Gbit/s, where what finds more than 64 KiB waiting is marked.
var bottleneck = taptest.Config{Rate: 1_250_000_000, MarkAt: 64 << 10, Delay: 10 * time.Microsecond}

// stream keeps connections busy with messages of 64 KiB in one direction, and counts what
// each has moved.
type stream struct {
	*harness.Pair
	conns []*harness.Conn
	op    qp.WROpcode
	moved []int
	most  int // frames on their way or waiting at either port
}

const chunk = 64 << 10

func newStream(t *testing.T, cfg taptest.Config, op qp.WROpcode, conns int, o harness.ConnOptions) *stream {
	s := &stream{Pair: harness.NewPair(t, cfg), op: op, moved: make([]int, conns)}
	o.MTU, o.Mem, o.Timeout = qp.MTU4096, chunk, 16
	for range conns {
		s.conns = append(s.conns, s.Connect(o))
	}
	return s
}

// post gives connection i one more message.
func (s *stream) post(i int) {
	c := s.conns[i]
	switch s.op {
	case qp.WRRead:
		c.A.Send(c.A.Read(c.B, 1, 0, 0, chunk))
	default:
		c.A.Send(c.A.Write(c.B, 1, 0, 0, chunk))
	}
}

// run goes on for some time, with the first n connections busy.
func (s *stream) run(n int, d time.Duration) {
	s.T.Helper()
	clear(s.moved)
	s.most = 0
	end := s.Clock.Now() + int64(d)
	s.RunUntil(func() bool {
		for i, c := range s.conns {
			for _, wc := range c.A.Poll() {
				if wc.Status != qp.WCSuccess {
					s.T.Fatalf("connection %d: %v", i, wc.Status)
				}
				s.moved[i] += chunk
				if i < n && s.Clock.Now() < end {
					s.post(i)
				}
			}
		}
		s.most = max(s.most, s.Net.Port(0).InFlight(), s.Net.Port(1).InFlight())
		return s.Clock.Now() >= end
	})
}

// gbps is the bandwidth of bytes in a time.
func gbps(bytes int, d time.Duration) float64 { return float64(bytes) * 8 / float64(d) }

// Two queue pairs that share a link which marks what has to wait share it evenly, use nearly
// all of it, and do not fill its queue; when one ends the other has it all.
func TestECN(t *testing.T) {
	for _, op := range []qp.WROpcode{qp.WRWrite, qp.WRRead} {
		for gid, family := range map[int]string{harness.GIDv4: "v4", harness.GIDv6: "v6"} {
			if raceDetector && (gid != harness.GIDv4 || op != qp.WRWrite) {
				continue
			}
			t.Run(map[qp.WROpcode]string{qp.WRWrite: "WRITE", qp.WRRead: "READ"}[op]+"/"+family, func(t *testing.T) {
				s := newStream(t, bottleneck, op, 2, harness.ConnOptions{GID: gid})
				for i := range s.conns {
					for range 16 {
						s.post(i)
					}
				}
				s.run(2, 20*time.Millisecond) // it begins at more than the link carries
				const d = 50 * time.Millisecond
				s.run(2, d)
				a, b := gbps(s.moved[0], d), gbps(s.moved[1], d)
				t.Logf("%.2f and %.2f Gbit/s, up to %d frames waiting; %d marked", a, b, s.most, s.Net.Stats().Marked)
				if a+b < 8 || a < 0.6*b || b < 0.6*a {
					t.Errorf("%.2f and %.2f Gbit/s", a, b)
				}
				if s.most > 60 { // 512 packets could be out
					t.Errorf("%d frames waited", s.most)
				}
				s.run(1, 20*time.Millisecond)
				s.run(1, d)
				if a = gbps(s.moved[0], d); a < 8 || s.moved[1] != 0 {
					t.Errorf("alone: %.2f Gbit/s, the other %.2f", a, gbps(s.moved[1], d))
				}
				snd, rcv := s.Dev[0].Stats(), s.Dev[1].Stats()
				if op == qp.WRRead {
					snd, rcv = rcv, snd
				}
				if marked := s.Net.Stats().Marked; rcv.Marked == 0 || rcv.Marked > marked || rcv.CNPsSent == 0 || rcv.CNPsSent > rcv.Marked || snd.CNPsHandled == 0 || snd.CNPs != snd.CNPsHandled {
					t.Errorf("%d packets were marked; receiver: %+v, sender: %+v", marked, rcv, snd)
				}
				// Not more often than every 50 µs to each.
				if most := uint64(2 * s.Clock.Now() / 50_000); rcv.CNPsSent > most {
					t.Errorf("%d notifications in %d ns", rcv.CNPsSent, s.Clock.Now())
				}
				for i, dev := range s.Dev {
					if st := dev.Stats(); st.Dropped() != 0 || dev.Protocol().RetransmittedPkts.Load() != 0 {
						t.Errorf("device %d dropped %v, sent %d packets again", i, st.Drops, dev.Protocol().RetransmittedPkts.Load())
					}
				}
			})
		}
	}
}

// After the marks have stopped a queue pair is as fast as before.
func TestECNEnds(t *testing.T) {
	s := newStream(t, bottleneck, qp.WRWrite, 1, harness.ConnOptions{})
	for range 32 {
		s.post(0)
	}
	const d = 20 * time.Millisecond
	for range 40 {
		s.Clock.Advance(50 * time.Microsecond)
		s.conns[0].A.QP.Congested()
	}
	s.run(1, d/4)
	if got := gbps(s.moved[0], d/4); got > 4 {
		t.Errorf("%.2f Gbit/s at first", got)
	}
	s.run(1, 80*time.Millisecond)
	s.run(1, d)
	if got := gbps(s.moved[0], d); got < 8 {
		t.Errorf("%.2f Gbit/s afterwards", got)
	}
}

// Without marks nobody is notified; and packets say that they can be marked unless that is
// turned off, or the application has said something itself.
func TestECNBits(t *testing.T) {
	for _, c := range []struct {
		name   string
		typ    qp.Type
		off    bool
		class  uint8
		expect uint8
	}{{"RC", qp.TypeRC, false, 0, 2}, {"XRC", qp.TypeXRCSend, false, 0x20, 0x22}, {"set", qp.TypeRC, false, 0x21, 0x21},
		{"off", qp.TypeRC, true, 0x20, 0x20}, {"off, set", qp.TypeRC, true, 2, 2}, {"UC", qp.TypeUC, false, 0, 0}} {
		t.Run(c.name, func(t *testing.T) {
			seen := map[uint8]int{}
			cfg := taptest.Config{Delay: time.Microsecond, Filter: func(_ int, b []byte) taptest.Verdict {
				if len(b) > 42 && b[12] == 8 && b[13] == 0 && b[23] == 17 {
					seen[b[15]]++
				}
				return taptest.Pass
			}}
			p := harness.NewPairConfig(t, cfg, func(_ int, cfg *provider.Config) { cfg.NoECN = c.off })
			conn := p.Connect(harness.ConnOptions{Type: c.typ, Attr: func(_ int, a *provider.QPAttr) { a.AH.TrafficClass = c.class }})
			conn.A.Send(conn.A.Write(conn.B, 1, 0, 0, 4096))
			conn.WaitOK(conn.A, 1)
			p.Settle()
			if len(seen) != 1 || seen[c.expect] == 0 {
				t.Errorf("TOS of packets: %v, want %d", seen, c.expect)
			}
			for i, d := range p.Dev {
				if st := d.Stats(); st.Marked+st.CNPsSent+st.CNPs != 0 {
					t.Errorf("device %d: %+v", i, st)
				}
			}
		})
	}
}
