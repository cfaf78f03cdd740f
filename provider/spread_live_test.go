// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"errors"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/test/harness"
)

// TestTAPQueues: on TAPs of two queues the kernel brings each packet to the shard it is for, if
// it may be told how to, over both families; and where it may not, all arrives the same.
func TestTAPQueues(t *testing.T) {
	for _, queues := range [][2]int{{2, 2}, {4, 1}} {
		p := harness.NewTAPPair(t, harness.TAPOptions{Queues: queues})
		n, by := p.Dev[0].Queues()
		if n != queues[0] {
			t.Fatalf("%d queues of %d", n, queues[0])
		}
		t.Logf("%d queues, by %s", n, by)
		var conns []*harness.Conn
		for i := range 4 {
			o := harness.ConnOptions{Mem: 1 << 20, Timeout: 18}
			if i%2 == 1 {
				o.GID = harness.GIDv6
			}
			conns = append(conns, p.Connect(o))
		}
		before := [2]provider.Stats{p.Dev[0].Stats(), p.Dev[1].Stats()}
		for i, c := range conns {
			harness.Fill(c.A.Mem, uint64(i))
			c.A.Send(c.A.Write(c.B, 1, 0, 0, 1<<20))
		}
		for i, c := range conns {
			c.WaitOK(c.A, 1)
			if !slices.Equal(c.A.Mem, c.B.Mem) {
				t.Error("wrong data")
			}
			harness.Fill(c.B.Mem, uint64(i+10))
			c.A.Send(c.A.Read(c.B, 2, 0, 0, 1<<20))
			c.WaitOK(c.A, 2)
			if !slices.Equal(c.A.Mem, c.B.Mem) {
				t.Error("wrong data read")
			}
		}
		for i, d := range p.Dev {
			st := d.Stats()
			if st.HandoverLost != 0 {
				t.Errorf("%d packets lost between shards", st.HandoverLost)
			}
			if handed := st.HandedOver - before[i].HandedOver; by == provider.SpreadByProgram && handed != 0 {
				t.Errorf("device %d: %d packets came to the wrong shard, of %d", i, handed, st.RxFrames)
			}
		}
	}
}

// TestTAPQueuesClaim: a port of several queues is one program's at a time, which uses one of
// them or several; a port of one has no more than that.
func TestTAPQueuesClaim(t *testing.T) {
	err := fabric.WithNS(func() error {
		f, err := fabric.New(fabric.Config{MultiQueue: true})
		if err != nil {
			return err
		}
		defer f.Close()
		p, err := f.AddPort(0)
		if err != nil {
			return err
		}
		for _, n := range []int{1, 2, 4} {
			d, err := provider.Open(provider.Config{Port: p.Name, Queues: n, Addrs: harness.Addrs(0)})
			if err != nil {
				return err
			}
			for _, n := range []int{1, 2} {
				if _, err := provider.Open(provider.Config{Port: p.Name, Queues: n}); !errors.Is(err, tap.ErrBusy) {
					t.Errorf("the second who opens the port: %v", err)
				}
			}
			if err := d.Close(); err != nil {
				return err
			}
		}
		one, err := fabric.New(fabric.Config{Name: "one"})
		if err != nil {
			return err
		}
		defer one.Close()
		if p, err = one.AddPort(0); err != nil {
			return err
		}
		if _, err := provider.Open(provider.Config{Port: p.Name, Queues: 2}); !errors.Is(err, tap.ErrNotTAP) {
			t.Errorf("two queues of a port of one: %v", err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// BenchmarkTAPShards is a WRITE of 64 bytes, 32 at a time, of two threads that have a QP and
// a CQ each, over TAPs of one queue and of two.
func BenchmarkTAPShards(b *testing.B) {
	for _, n := range []int{1, 2} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			p := harness.NewTAPPair(b, harness.TAPOptions{Queues: [2]int{n, n}})
			var conns []*harness.Conn
			for range 2 {
				conns = append(conns, p.Connect(harness.ConnOptions{Timeout: 18}))
			}
			var wg sync.WaitGroup
			b.ResetTimer()
			for _, c := range conns {
				wg.Add(1)
				go func() {
					defer wg.Done()
					wr := []qp.SendWR{c.A.Write(c.B, 1, 0, 0, 64)}
					wcs := make([]qp.WC, 32)
					for sent, done := 0, 0; done < b.N/2; {
						for ; sent < b.N/2 && sent-done < 32; sent++ {
							if _, err := c.A.QP.PostSend(wr); err != nil {
								b.Error(err)
								return
							}
						}
						for _, wc := range wcs[:c.A.CQ.Poll(wcs)] {
							if wc.Status != qp.WCSuccess {
								b.Error(wc.Status)
								return
							}
							done++
						}
					}
				}()
			}
			wg.Wait()
		})
	}
}
