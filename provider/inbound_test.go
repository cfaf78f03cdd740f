// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// throng is several devices that keep sending to one, Dev[0], whose queue is that of a TAP
// which nobody has seen to.
type throng struct {
	*harness.Pair
	senders []*provider.Device
	conns   []*harness.Conn // side A sends
	op      qp.WROpcode
	size    int
	posted  []uint64
	done    []uint64
	goal    uint64          // how many messages each may post
	pulls   []*harness.Conn // by which Dev[0] READs, from its side A
	pulled  []uint64        // READs that are over
}

const (
	throngQueue = 1000
	throngDepth = 8
	throngSize  = 32 * 4096
)

// newThrong has each sender have so many connections of a type.
func newThrong(t *testing.T, senders, each int, typ qp.Type, op qp.WROpcode) *throng {
	c := &throng{Pair: harness.NewPair(t, taptest.Config{Delay: time.Microsecond, QueueLen: throngQueue}), op: op, size: throngSize}
	c.add(senders, each, typ)
	return c
}

func (c *throng) add(senders, each int, typ qp.Type) {
	c.senders = append(c.senders, c.Dev[1])
	for len(c.senders) < senders {
		c.senders = append(c.senders, c.AddDevice())
	}
	for _, d := range c.senders {
		for range each {
			c.conns = append(c.conns, c.ConnectDevs(d, c.Dev[0], harness.ConnOptions{Type: typ, MTU: qp.MTU4096, Mem: c.size, Timeout: 18,
				Caps: qp.Caps{SendWR: throngDepth, RecvWR: throngDepth, SendSGE: 1, RecvSGE: 1}}))
		}
	}
	c.posted, c.done = make([]uint64, len(c.conns)), make([]uint64, len(c.conns))
}

// post keeps the connections busy, and takes what is done. It does nothing at Dev[0] but post
// receives, which makes no progress.
func (c *throng) post() {
	for i, conn := range c.conns {
		for _, wc := range conn.A.Poll() {
			if wc.Status != qp.WCSuccess {
				c.T.Fatalf("connection %d: %v", i, wc.Status)
			}
			c.done[i]++
		}
		for c.posted[i]-c.done[i] < throngDepth && c.posted[i] < c.goal {
			c.posted[i]++
			wr := conn.A.Write(conn.B, c.posted[i], 0, 0, c.size)
			if c.op == qp.WRSend {
				conn.B.Recv(c.posted[i], 0, c.size)
				wr = conn.A.Message(c.posted[i], 0, c.size)
			}
			wr.RemoteSRQN = conn.A.SRQN
			conn.A.Send(wr)
		}
	}
}

// serve takes what is done at Dev[0], and has it READ.
func (c *throng) serve() {
	for _, conn := range c.conns {
		conn.B.Poll()
	}
	for i, conn := range c.pulls {
		for _, wc := range conn.A.Poll() {
			if wc.Status != qp.WCSuccess {
				c.T.Fatalf("READ %d: %v", i, wc.Status)
			}
			if c.pulled[i]++; c.pulled[i] >= throngDepth {
				conn.A.Send(conn.A.Read(conn.B, 0, 0, 0, c.size))
			}
		}
	}
}

// pull has Dev[0] READ from all of them, too.
func (c *throng) pull() {
	for _, d := range c.senders {
		conn := c.ConnectDevs(c.Dev[0], d, harness.ConnOptions{MTU: qp.MTU4096, Mem: c.size, Timeout: 18})
		for range throngDepth {
			conn.A.Send(conn.A.Read(conn.B, 0, 0, 0, c.size))
		}
		c.pulls, c.pulled = append(c.pulls, conn), append(c.pulled, 0)
	}
}

// run has everybody go on until each connection has moved n more messages.
func (c *throng) run(n uint64) {
	c.T.Helper()
	c.goal += n
	c.RunUntil(func() bool {
		c.post()
		c.serve()
		for i := range c.done {
			if c.done[i] < c.goal-throngDepth {
				return false
			}
		}
		return true
	})
}

// stop has all but Dev[0] go on for some time, and gives how many frames wait then.
func (c *throng) stop(d time.Duration) int {
	for end := c.Clock.Now() + int64(d); c.Clock.Now() < end; {
		c.post()
		did, at := false, end
		for _, d := range c.senders {
			did = d.Progress() || did
			at = min(at, d.NextDeadline())
		}
		if !did {
			c.Clock.AdvanceTo(max(at, c.Clock.Now()+1))
		}
	}
	return c.Net.Port(0).InFlight()
}

// usualThrong says whether packets are frames and all go into one queue.
func usualThrong() bool { return os.Getenv(harness.EnvQueues)+os.Getenv(harness.EnvFrames) == "" }

// The queue of a receiver that is stopped does not overflow, however many send to it as much
// as they can, also when it goes on and is stopped again; and it holds a good deal. It does
// when the receiver says nothing.
func TestThrong(t *testing.T) {
	type kind struct {
		senders, each int
		typ           qp.Type
		op            qp.WROpcode
		pull, silent  bool
	}
	kinds := []kind{{2, 4, qp.TypeRC, qp.WRWrite, false, true}, {6, 1, qp.TypeRC, qp.WRWrite, false, true}, {6, 1, qp.TypeRC, qp.WRWrite, false, false},
		{2, 4, qp.TypeRC, qp.WRWrite, false, false}, {6, 4, qp.TypeRC, qp.WRSend, false, false},
		{6, 2, qp.TypeXRCSend, qp.WRSend, false, false}, {5, 2, qp.TypeRC, qp.WRWrite, true, false}, {12, 1, qp.TypeRC, qp.WRWrite, false, false}}
	if raceDetector {
		kinds = kinds[1:3]
	}
	usual := usualThrong()
	for _, k := range kinds {
		t.Run(fmt.Sprintf("%d/%d/%v/%d/pull=%v/silent=%v", k.senders, k.each, k.typ, k.op, k.pull, k.silent), func(t *testing.T) {
			c := newThrong(t, k.senders, k.each, k.typ, k.op)
			c.Dev[0].SetSilent(k.silent)
			if k.pull {
				c.pull()
			}
			c.goal = throngDepth
			most := 0
			for range 2 {
				c.run(24)
				for range 2 {
					c.goal += throngDepth
					most = max(most, c.stop(2*time.Second))
				}
			}
			c.run(8)
			lost, st := c.Net.Stats().Overflowed, c.Dev[0].Stats()
			t.Logf("%d frames waited, %d were lost, windows were told %d times", most, lost, st.WindowsTold)
			if k.silent {
				if usual && lost == 0 || st.WindowsTold != 0 {
					t.Errorf("%d frames were lost, and windows told %d times", lost, st.WindowsTold)
				}
				return
			}
			if lost != 0 || usual && most < throngQueue/4 || st.WindowsTold == 0 {
				t.Errorf("%d frames were lost, %d waited, windows were told %d times", lost, most, st.WindowsTold)
			}
		})
	}
}

// Those who begin at once at a receiver that reads nothing begin with so little that its
// queue holds it.
func TestThrongBegins(t *testing.T) {
	c := newThrong(t, 12, 2, qp.TypeRC, qp.WRWrite)
	c.goal = throngDepth
	waiting := c.stop(time.Second)
	c.run(8)
	if lost := c.Net.Stats().Overflowed; lost != 0 || usualThrong() && waiting < throngQueue/2 {
		t.Errorf("%d frames were lost, and %d waited", lost, waiting)
	}
}

// A sender alone is told nothing, nor are two where the queue has room for both. What is known
// of peers goes with the connections.
func TestThrongOfFew(t *testing.T) {
	for _, k := range []struct{ senders, queue int }{{1, throngQueue}, {2, 2 * throngQueue}} {
		p := harness.NewPair(t, taptest.Config{Delay: time.Microsecond, QueueLen: k.queue})
		c := &throng{Pair: p, op: qp.WRWrite, size: throngSize}
		c.add(k.senders, 3, qp.TypeRC)
		c.goal = throngDepth
		c.run(24)
		c.stop(time.Second)
		c.run(24)
		if st := c.Dev[0].Stats(); usualThrong() && st.WindowsTold != 0 || c.Net.Stats().Overflowed != 0 {
			t.Errorf("%d senders, a queue of %d: windows were told %d times, %d frames lost", k.senders, k.queue, st.WindowsTold, c.Net.Stats().Overflowed)
		}
		if r, s := c.Dev[0].Known(); usualThrong() && (r != k.senders || s != k.senders) {
			t.Errorf("%d receivers and %d sources are known, want %d", r, s, k.senders)
		}
		for _, conn := range c.conns {
			if err := conn.B.QP.Destroy(); err != nil {
				t.Error(err)
			}
		}
		if r, s := c.Dev[0].Known(); r != 0 || s != 0 {
			t.Errorf("%d receivers and %d sources are known without a connection", r, s)
		}
	}
}
