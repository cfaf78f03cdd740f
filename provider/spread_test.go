// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// queuesPair is a pair of devices with so many queues each; by says which frame goes to which.
func queuesPair(t testing.TB, cfg taptest.Config, n [2]int, by func(n int) func([]byte) int) *harness.Pair {
	return harness.NewPairConfig(t, cfg, func(i int, c *provider.Config) { withQueues(c, n[i], by) })
}

func withQueues(c *provider.Config, n int, by func(n int) func([]byte) int) {
	c.MoreQueues = nil
	if n > 1 {
		c.MoreQueues = c.Device.(*taptest.Port).Queues(n, by(n))
	}
}

func byFlow(int) func([]byte) int { return harness.ByFlow }

// onFirst puts everything into the first queue, as a link that knows nothing of shards.
func onFirst(int) func([]byte) int { return func([]byte) int { return 0 } }

func shardOf(q *provider.QP, queues int) int { return int(q.Num()&0xffff) * queues >> 16 }

// TestQueues: connections live in different shards, and everything works between any
// numbers of queues, whether or not the link knows where a packet belongs.
func TestQueues(t *testing.T) {
	for _, n := range [][2]int{{2, 2}, {1, 2}, {2, 1}, {4, 16}} {
		for name, by := range map[string]func(int) func([]byte) int{"qp": harness.ByQP, "flow": byFlow, "first": onFirst} {
			t.Run(fmt.Sprintf("%d-%d/%s", n[0], n[1], name), func(t *testing.T) {
				p := queuesPair(t, link, n, by)
				var conns []*harness.Conn
				seen := map[int]bool{}
				for range 4 {
					c := p.Connect(harness.ConnOptions{Mem: 1 << 16})
					conns = append(conns, c)
					seen[shardOf(c.A.QP, n[0])] = true
				}
				if len(seen) != min(n[0], 4) {
					t.Errorf("4 QPs with CQs of their own in shards %v of %d", seen, n[0])
				}
				before := [2]provider.Stats{p.Dev[0].Stats(), p.Dev[1].Stats()}
				for i, c := range conns {
					harness.Fill(c.A.Mem, uint64(i))
					c.A.Send(c.A.Write(c.B, 1, 0, 0, 30_000), c.A.Read(c.B, 2, 40_000, 0, 20_000))
					c.B.Recv(3, 60_000, 1000)
					c.A.Send(c.A.Message(4, 0, 1000))
				}
				for _, c := range conns {
					c.WaitOK(c.A, 1)
					c.WaitOK(c.A, 2)
					c.WaitOK(c.A, 4)
					c.WaitOK(c.B, 3)
					if !slices.Equal(c.A.Mem[:30_000], c.B.Mem[:30_000]) || !slices.Equal(c.A.Mem[40_000:60_000], c.A.Mem[:20_000]) {
						t.Error("wrong data")
					}
				}
				for i := range before {
					st := p.Dev[i].Stats()
					handed := st.HandedOver - before[i].HandedOver
					if (name == "first" && n[i] > 1) != (handed > 0) && name != "flow" || st.HandoverLost > 0 {
						t.Errorf("device %d handed over %d packets, and lost %d", i, handed, st.HandoverLost)
					}
				}
			})
		}
	}
}

// TestQueuesBad: numbers of queues that there can not be.
func TestQueuesBad(t *testing.T) {
	for _, n := range []int{3, 17, 32} {
		_, err := provider.Open(provider.Config{Port: "none", Queues: n})
		if !errors.Is(err, provider.ErrInvalid) {
			t.Errorf("%d queues: %v", n, err)
		}
	}
}

// TestSharedOverShards: QPs that share a CQ are in one shard; where that can not be, one CQ
// hears of several, and so does an SRQ.
func TestSharedOverShards(t *testing.T) {
	p := queuesPair(t, link, [2]int{2, 2}, harness.ByQP)
	d := p.Dev[0]
	pd, err := d.AllocPD()
	ok(t, err)
	cq := func() *provider.CQ {
		c, err := d.CreateCQ(16, nil)
		ok(t, err)
		return c
	}
	caps := qp.Caps{SendWR: 4, RecvWR: 4, SendSGE: 1, RecvSGE: 1}
	qpOf := func(s, r *provider.CQ, srq *provider.SRQ, typ qp.Type) *provider.QP {
		q, err := pd.CreateQP(provider.QPInitAttr{Type: typ, SendCQ: s, RecvCQ: r, SRQ: srq, Caps: caps})
		ok(t, err)
		return q
	}
	a, b := cq(), cq()
	q0, q1 := qpOf(a, a, nil, qp.TypeRC), qpOf(b, b, nil, qp.TypeRC)
	if shardOf(q0, 2) == shardOf(q1, 2) {
		t.Error("two CQs have one shard")
	}
	if q := qpOf(a, a, nil, qp.TypeRC); shardOf(q, 2) != shardOf(q0, 2) {
		t.Error("QPs of one CQ have two shards")
	}
	if q := qpOf(a, b, nil, qp.TypeRC); shardOf(q, 2) != shardOf(q1, 2) {
		t.Error("a QP is not where its receive CQ is")
	}
	srq, err := pd.CreateSRQ(provider.SRQAttr{MaxWR: 4, MaxSGE: 1})
	ok(t, err)
	if x, y := qpOf(a, a, srq, qp.TypeRC), qpOf(b, b, srq, qp.TypeRC); shardOf(x, 2) != shardOf(y, 2) {
		t.Error("QPs of one SRQ have two shards")
	}
	for range 3 {
		if q := qpOf(b, b, nil, qp.TypeUD); shardOf(q, 2) != 0 {
			t.Error("a datagram QP is not in the first shard")
		}
	}
}

// TestShardsShare: of K shards with QPs spread over them, each handles its share of packets,
// and none the packets of another: what a machine with K processors gets done at a time.
func TestShardsShare(t *testing.T) {
	for _, k := range []int{1, 2, 4, 8, 16} {
		p := queuesPair(t, link, [2]int{k, k}, harness.ByQP)
		var conns []*harness.Conn
		for range 2 * k {
			conns = append(conns, p.Connect(harness.ConnOptions{Mem: 1 << 16}))
		}
		before := [2][]uint64{p.Dev[0].ShardFrames(), p.Dev[1].ShardFrames()}
		for _, c := range conns {
			c.A.Send(c.A.Write(c.B, 1, 0, 0, 1<<16))
		}
		for _, c := range conns {
			c.WaitOK(c.A, 1)
		}
		for i, d := range p.Dev {
			if n := d.Stats().HandedOver; n != 0 {
				t.Errorf("%d shards hand over %d packets", k, n)
			}
			all, most := uint64(0), uint64(0)
			for s, n := range d.ShardFrames() {
				n -= before[i][s]
				all, most = all+n, max(most, n)
			}
			if most*uint64(k) > all+all/10 {
				t.Errorf("of %d frames, one of %d shards handles %d", all, k, most)
			}
		}
	}
}

// TestShardsAtOnce: threads with CQs of their own work on two shards at a time, and with
// each other's shards, while QPs come and go.
func TestShardsAtOnce(t *testing.T) {
	for name, by := range map[string]func(int) func([]byte) int{"qp": harness.ByQP, "first": onFirst} {
		t.Run(name, func(t *testing.T) {
			p := harness.NewLivePair(t, taptest.Config{}, func(i int, c *provider.Config) { withQueues(c, 2, by) })
			var wg sync.WaitGroup
			for i := range 4 {
				o := harness.ConnOptions{Mem: 1 << 16, Self: i == 3, Timeout: 18}
				c := p.Connect(o)
				wg.Add(1)
				go func() {
					defer wg.Done()
					wcs := []qp.WC{{}}
					for k := range 200 {
						if _, err := c.A.QP.PostSend([]qp.SendWR{c.A.Write(c.B, uint64(k), 0, 0, 20_000)}); err != nil {
							t.Error(err)
							return
						}
						for c.A.CQ.Poll(wcs) == 0 {
							runtime.Gosched() // there may be fewer processors than threads
						}
						if wcs[0].Status != qp.WCSuccess {
							t.Errorf("write %d of %d: %v", k, i, wcs[0].Status)
							return
						}
					}
				}()
			}
			for range 50 { // others come and go
				c := p.Connect(harness.ConnOptions{Mem: 4096})
				c.A.Send(c.A.Write(c.B, 1, 0, 0, 4096))
				if err := c.A.QP.Destroy(); err != nil {
					t.Error(err)
				}
				if err := c.B.QP.Destroy(); err != nil {
					t.Error(err)
				}
			}
			wg.Wait()
		})
	}
}

// TestUnplugShards: a device that is gone has flushed what is in all its shards before
// anybody is told.
func TestUnplugShards(t *testing.T) {
	for _, how := range []string{"unplug", "gone"} {
		t.Run(how, func(t *testing.T) {
			p := queuesPair(t, link, [2]int{4, 1}, harness.ByQP)
			var conns []*harness.Conn
			for range 4 {
				c := p.Connect(harness.ConnOptions{})
				c.A.Recv(7, 0, 100)
				conns = append(conns, c)
			}
			d := p.Dev[0]
			if how == "unplug" {
				ok(t, d.Unplug())
			} else {
				p.Net.Port(0).Remove()
				for {
					if _, ok := d.TryAsyncEvent(); ok {
						break
					}
					d.Progress()
				}
			}
			wcs := make([]qp.WC, 4)
			for _, c := range conns {
				if n := c.A.CQ.Poll(wcs); n != 1 || wcs[0].Status != qp.WCWRFlushErr {
					t.Errorf("%d completions, %v", n, wcs[0].Status)
				}
			}
			if _, err := d.CreateCQ(1, nil); !errors.Is(err, provider.ErrGone) {
				t.Error(err)
			}
			if err := d.Unplug(); !errors.Is(err, provider.ErrGone) {
				t.Error(err)
			}
		})
	}
}

// TestHandoverFull: what finds no room between two shards is lost, counted, and sent again.
func TestHandoverFull(t *testing.T) {
	r := provider.NewHandRing(4, 64)
	for i := range 6 {
		if ok := r.Push(make([]byte, 10+i)); ok != (i < 4) {
			t.Errorf("frame %d: %v", i, ok)
		}
	}
	if r.Push(make([]byte, 65)) {
		t.Error("a frame that is too long")
	}
}
