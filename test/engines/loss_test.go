// SPDX-License-Identifier: Apache-2.0

package engines

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

// world is two engines on a link with several connections, each with a plan.
type world struct {
	*harness.Pair
	sides []*side
}

type worldOptions struct {
	cfg      taptest.Config
	mtus     []qp.MTU // one connection each: RC and XRC in turn
	ops, max int
	recvs    int // receives posted at a time; 0: plenty
	resident bool
}

func newWorld(t testing.TB, o worldOptions) *world {
	t.Helper()
	o.cfg.Delay = 3 * time.Microsecond
	w := &world{Pair: harness.NewPair(t, o.cfg)}
	for i, mtu := range o.mtus {
		pl := newPlan(mix{seed: uint64(o.cfg.Seed)*1000 + uint64(i), ops: o.ops, max: o.max, mtu: mtu, resident: o.resident})
		need := 0
		for k := range pl.half {
			_, n := pl.half[k].layout()
			need = max(need, n)
		}
		typ := qp.TypeRC
		if i%2 == 1 {
			typ = qp.TypeXRCSend
		}
		c := w.Connect(harness.ConnOptions{Type: typ, MTU: mtu, Mem: need, GID: 1 + i%2, MinRNRTimer: 1,
			PSN: [2]uint32{0xffff80 + uint32(i), 0xfffffe}})
		var pair [2]*side
		for k, e := range []*harness.End{c.A, c.B} {
			s, free, err := newSide(&pl.half[k], o.resident, e.PD, e.QP, e.CQ, e.Mem, uintptr(e.Addr))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := free(); err != nil && err != provider.ErrClosed {
					t.Error(err)
				}
			})
			s.target, s.srq, s.srqn = e.Target, e.SRQ, e.SRQN
			if o.recvs > 0 {
				s.recvs = o.recvs
			}
			pair[k] = s
		}
		pair[0].peer, pair[1].peer = pair[1].own, pair[0].own
		w.sides = append(w.sides, pair[:]...)
	}
	return w
}

// run carries out all plans and checks all memory.
func (w *world) run() {
	w.T.Helper()
	w.RunUntil(func() bool {
		done := true
		for i, s := range w.sides {
			if err := s.pump(); err != nil {
				w.T.Fatalf("side %d of connection %d, %d of %d sent, %d of %d received: %v",
					i%2, i/2, s.retired, len(s.sends), s.taken, len(s.half.recvs), err)
			}
			done = done && s.done()
		}
		return done
	})
	// What comes late must change nothing any more.
	w.Settle()
	for i, s := range w.sides {
		if n := s.cq.Poll(s.wcs); n > 0 {
			w.T.Errorf("side %d of connection %d: completed a second time: %+v", i%2, i/2, s.wcs[:n])
		}
		if err := s.check(); err != nil {
			w.T.Errorf("side %d of connection %d: %v", i%2, i/2, err)
		}
	}
}

// sum adds up a counter of both devices.
func (w *world) sum(f func(s *qp.Stats) uint64) (n uint64) {
	for _, d := range w.Dev {
		n += f(d.Protocol())
	}
	return n
}

func retransmitted(s *qp.Stats) uint64 { return s.RetransmittedPkts.Load() }

var allMTUs = []qp.MTU{qp.MTU256, qp.MTU512, qp.MTU1024, qp.MTU2048, qp.MTU4096}

// On a link without faults nothing is sent twice, refused or dropped.
func TestNoFaults(t *testing.T) {
	for _, resident := range []bool{false, true} {
		t.Run(memory(resident), func(t *testing.T) {
			w := newWorld(t, worldOptions{cfg: taptest.Config{Seed: 7}, mtus: allMTUs, ops: 300, max: 200 << 10, resident: resident})
			w.run()
			for i, d := range w.Dev {
				s := d.Protocol()
				for name, n := range map[string]uint64{
					"retransmitted packets": s.RetransmittedPkts.Load(), "duplicate requests": s.DuplicateRequest.Load(),
					"requests out of sequence": s.OutOfSeqRequest.Load(), "responses out of sequence": s.OutOfSeqResponse.Load(),
					"stale responses": s.StaleResponse.Load(), "NAKs": s.SentNakSeq.Load() + s.SentNakErr.Load(),
					"RNR NAKs": s.SentRNRNak.Load(), "timeouts": s.LocalAckTimeout.Load(), "dropped packets": s.Dropped.Load(),
				} {
					if n != 0 {
						t.Errorf("device %d: %d %s", i, n, name)
					}
				}
				if st := d.Stats(); st.Dropped() != 0 {
					t.Errorf("device %d dropped %v", i, st.Drops)
				}
			}
			w.useInvalidated()
			if resident {
				if n := faults(w.sides); n != 0 {
					t.Errorf("%d page faults in resident memory", n)
				}
			} else if faults(w.sides) == 0 {
				t.Error("no page faults in memory that was never touched")
			}
		})
	}
}

// useInvalidated: a key that a SEND with invalidate named opens nothing any more.
func (w *world) useInvalidated() {
	w.T.Helper()
	s, peer := w.sides[0], w.sides[1]
	if len(s.peer.Inv) == 0 {
		w.T.Fatal("the plan invalidated no key")
	}
	// That key's region begins at the target.
	wr := qp.SendWR{ID: 77, Opcode: qp.WRWrite, Inline: []byte("no"), Flags: qp.SendSignaled | qp.SendInline,
		RemoteAddr: s.peer.Base[0] + uint64(peer.base[target]), RKey: s.peer.Inv[len(s.peer.Inv)-1]}
	if _, err := s.qp.PostSend([]qp.SendWR{wr}); err != nil {
		w.T.Fatal(err)
	}
	w.RunUntil(func() bool { return s.cq.Poll(s.wcs[:1]) == 1 })
	if wc := s.wcs[0]; wc.ID != 77 || wc.Status != qp.WCRemAccessErr {
		w.T.Errorf("a WRITE with an invalidated key: %+v", wc)
	}
	if err := peer.check(); err != nil {
		w.T.Errorf("a WRITE with an invalidated key: %v", err)
	}
}

func memory(resident bool) string {
	if resident {
		return "resident"
	}
	return "cold"
}

// Receives that come late: RNR NAKs, for ever if need be.
func TestReceiverNotReady(t *testing.T) {
	w := newWorld(t, worldOptions{cfg: taptest.Config{Seed: 3}, mtus: allMTUs, ops: 150, max: 50 << 10, recvs: 1})
	w.run()
	if n := w.sum(func(s *qp.Stats) uint64 { return s.RcvdRNRNak.Load() }); n == 0 {
		t.Error("no RNR NAK was received")
	}
	if n := w.sum(func(s *qp.Stats) uint64 { return s.SentNakErr.Load() }); n != 0 {
		t.Errorf("%d fatal NAKs", n)
	}
}

func TestFaults(t *testing.T) {
	for _, c := range []struct {
		percent  int
		ops, max int
		seeds    int
	}{{1, 200, 200 << 10, 2}, {5, 150, 150 << 10, 2}, {20, 60, 40 << 10, 4}} {
		p := float64(c.percent) / 100
		for _, kind := range []struct {
			name string
			cfg  taptest.Config
		}{
			{"loss", taptest.Config{Loss: p}},
			{"dup", taptest.Config{Dup: p}},
			{"reorder", taptest.Config{Reorder: p}},
			{"all", taptest.Config{Loss: p, Dup: p, Reorder: p}},
			{"corrupt", taptest.Config{Loss: p / 2, Dup: p / 2, Reorder: p / 2, Corrupt: p / 2}},
		} {
			for seed := range c.seeds + 1 {
				if raceDetector && seed%c.seeds != 0 {
					continue // virtual time in one goroutine: the first and super-frames are enough
				}
				resident := seed%2 == 1
				frames := "single"
				if seed == c.seeds { // what happens to a frame happens to many packets then
					frames = "super"
					kind.cfg.Offloads = tap.VnetHdr | tap.USO4 | tap.USO6
				}
				t.Run(fmt.Sprintf("%s-%d%%/%d/%s/%s", kind.name, c.percent, seed, memory(resident), frames), func(t *testing.T) {
					kind.cfg.Seed = int64(seed + 1)
					mtus := []qp.MTU{allMTUs[seed%5], allMTUs[(seed+2)%5], allMTUs[(seed+4)%5]}
					w := newWorld(t, worldOptions{cfg: kind.cfg, mtus: mtus, ops: c.ops, max: c.max, resident: resident})
					w.run()
					w.checkFaults(kind.cfg)
				})
			}
		}
	}
}

// checkFaults: the link really had the faults that it was told to have, about as
// many as it was told, and the engines had to mend what they did.
func (w *world) checkFaults(cfg taptest.Config) {
	w.T.Helper()
	st := w.Net.Stats()
	for _, f := range []struct {
		name string
		p    float64
		n    uint64
	}{{"lost", cfg.Loss, st.Lost}, {"duplicated", cfg.Dup, st.Duplicated}, {"reordered", cfg.Reorder, st.Reordered},
		{"corrupted", cfg.Corrupt, st.Corrupted}} {
		if float64(f.n) < 0.5*f.p*float64(st.Sent) || f.p > 0 && f.n == 0 {
			w.T.Errorf("%d of %d frames were %s, want about %g", f.n, st.Sent, f.name, f.p*float64(st.Sent))
		}
	}
	if cfg.Reorder > 0 && st.Overtaken == 0 {
		w.T.Error("no frame overtook another")
	}
	retr := w.sum(retransmitted)
	switch {
	case cfg.Loss+cfg.Reorder+cfg.Corrupt > 0 && retr == 0:
		w.T.Error("nothing was retransmitted")
	case cfg.Loss+cfg.Reorder+cfg.Corrupt == 0 && retr+w.sum(func(s *qp.Stats) uint64 { return s.LocalAckTimeout.Load() }) > 0:
		w.T.Errorf("%d packets were retransmitted, or a timer ran out, although nothing was lost", retr)
	}
	if cfg.Dup > 0 && w.sum(func(s *qp.Stats) uint64 { return s.DuplicateRequest.Load() }) == 0 {
		w.T.Error("no duplicate request was noticed")
	}
	if cfg.Corrupt > 0 && w.Dev[0].Stats().Drops[provider.DropICRC]+w.Dev[1].Stats().Drops[provider.DropICRC] == 0 {
		w.T.Error("no corrupted packet was found by its ICRC")
	}
	w.T.Logf("%d frames sent, %d lost, %d duplicated, %d reordered, %d corrupted; %d packets retransmitted, %d timeouts, %d READs again, %d atomics again",
		st.Sent, st.Lost, st.Duplicated, st.Reordered, st.Corrupted, retr, w.sum(func(s *qp.Stats) uint64 { return s.LocalAckTimeout.Load() }),
		w.sum(func(s *qp.Stats) uint64 { return s.ReadReexecuted.Load() }), w.sum(func(s *qp.Stats) uint64 { return s.AtomicReplayed.Load() }))
}
