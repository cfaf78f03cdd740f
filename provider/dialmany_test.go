// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// crowd runs calls that block, many at a time, in the test's goroutine: each goes on until it
// waits, which calls the device's Idle, and when all wait the pair makes a step. So they have
// virtual time, and a run with the same seed is the same run.
type crowd struct {
	*harness.Pair
	tasks []task
	yield func(struct{}) bool // of the task that runs
	each  func()              // called before each step
}

type task struct {
	next func() (struct{}, bool)
	stop func()
}

func newCrowd(t *testing.T, cfg taptest.Config) *crowd {
	c := &crowd{}
	c.Pair = harness.NewPairConfig(t, cfg, func(_ int, cfg *provider.Config) { cfg.Idle = c.wait })
	return c
}

// wait lets the others go on.
func (c *crowd) wait() {
	if c.yield != nil {
		c.yield(struct{}{})
	} else if c.Pair != nil {
		c.Step()
	}
}

func (c *crowd) spawn(f func()) {
	next, stop := iter.Pull(func(yield func(struct{}) bool) { c.yield = yield; f() })
	// The yield is set whenever the task is resumed, not only at its start.
	var mine func(struct{}) bool
	c.tasks = append(c.tasks, task{func() (struct{}, bool) {
		c.yield = mine
		v, ok := next()
		mine, c.yield = c.yield, nil
		return v, ok
	}, stop})
}

// run goes on until no task is left.
func (c *crowd) run() {
	for len(c.tasks) > 0 {
		kept := 0
		for i := 0; i < len(c.tasks); i++ { // which may grow
			if _, more := c.tasks[i].next(); more {
				c.tasks[kept] = c.tasks[i]
				kept++
			}
		}
		clear(c.tasks[kept:])
		c.tasks = c.tasks[:kept]
		// Many are not asked at each step: most wait for another.
		for i := 0; i <= kept/16 && kept > 0; i++ {
			if c.each != nil {
				c.each()
			}
			if !c.Step() && i == 0 {
				c.T.Fatalf("%d tasks wait for something that will never happen", kept)
			}
		}
	}
}

// slotLen is what each of the connections that are open at a time has of the memory, for
// each direction, and so the longest message.
const slotLen = 16 << 10

// peerEnd is one end of a connection while it is used.
type peerEnd struct {
	c   *crowd
	pd  *provider.PD
	cq  *provider.CQ
	mr  *provider.MR
	buf []byte // to receive, and then to send
}

func (e *peerEnd) sge(off, n int) []qp.SGE {
	return []qp.SGE{{Addr: uint64(e.mr.Addr()) + uint64(off), Length: uint32(n), LKey: e.mr.LKey()}}
}

func (e *peerEnd) attr() provider.ConnAttr {
	return provider.ConnAttr{
		QP: provider.QPInitAttr{Type: qp.TypeRC, SendCQ: e.cq, RecvCQ: e.cq, Caps: qp.Caps{SendWR: 2, RecvWR: 2, SendSGE: 1, RecvSGE: 1}},
		Prepare: func(q *provider.QP) error {
			_, err := q.PostRecv([]qp.RecvWR{{ID: 1, SGL: e.sge(0, slotLen)}})
			return err
		},
	}
}

func (e *peerEnd) send(q *provider.QP, n int) error {
	_, err := q.PostSend([]qp.SendWR{{ID: 2, Opcode: qp.WRSend, SGL: e.sge(slotLen, n), Flags: qp.SendSignaled}})
	return err
}

// poll waits for a completion of this kind.
func (e *peerEnd) poll(op qp.WCOpcode) (qp.WC, error) {
	var wcs [1]qp.WC
	for {
		switch n := e.cq.Poll(wcs[:]); {
		case n == 0:
			e.c.wait()
		case wcs[0].Status != qp.WCSuccess:
			return wcs[0], errors.New(wcs[0].Status.String())
		case wcs[0].Opcode == op:
			return wcs[0], nil
		}
	}
}

// traffic is many connections from device 0 to device 1: each has a message sent, checked and
// sent back, checked again, and is closed, by either side.
type traffic struct {
	*crowd
	pds        [2]*provider.PD
	mrs        [2][]*provider.MR // a slot each
	bufs       [2][][]byte
	free       [2][]int
	l          *provider.Listener
	served     int
	begun      int
	answered   int
	alive, top int // servers at a time
	// stranger serves a request that is none of ours.
	stranger func(r *provider.ConnRequest)
}

const trafficPort = "10.91.0.2:7471"

func newTraffic(c *crowd, slots int) *traffic {
	t := c.T
	tr := &traffic{crowd: c}
	for i, d := range c.Dev {
		pd, err := d.AllocPD()
		if err != nil {
			t.Fatal(err)
		}
		tr.pds[i] = pd
		mem, err := mr.Alloc(2 * slots * 2 * slotLen)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { mem.Close() })
		for s := range 2 * slots { // the server's ends may last a little longer
			buf := mem.Bytes()[s*2*slotLen:][:2*slotLen]
			reg, err := pd.RegMR(buf, mr.LocalWrite)
			if err != nil {
				t.Fatal(err)
			}
			tr.mrs[i], tr.bufs[i] = append(tr.mrs[i], reg), append(tr.bufs[i], buf)
			tr.free[i] = append(tr.free[i], s)
		}
	}
	l, err := c.Dev[1].Listen(netip.MustParseAddrPort(trafficPort), 64)
	if err != nil {
		t.Fatal(err)
	}
	tr.l = l
	return tr
}

// end takes a slot, and gives it back by done.
func (tr *traffic) end(i int) (e *peerEnd, done func()) {
	if len(tr.free[i]) == 0 {
		tr.T.Fatalf("side %d has no memory for one more connection", i)
	}
	n := len(tr.free[i]) - 1
	s := tr.free[i][n]
	tr.free[i] = tr.free[i][:n]
	cq, err := tr.Dev[i].CreateCQ(8, nil)
	if err != nil {
		tr.T.Fatal(err)
	}
	e = &peerEnd{c: tr.crowd, pd: tr.pds[i], cq: cq, mr: tr.mrs[i][s], buf: tr.bufs[i][s]}
	return e, func() {
		tr.free[i] = append(tr.free[i], s)
		if err := cq.Destroy(); err != nil {
			tr.T.Error(err)
		}
	}
}

// clientCloses says which side is to end connection k, and length how long its message is.
func clientCloses(k int) bool { return k%2 == 0 }
func length(k int) int        { return 1 + k*977%slotLen }

// connect makes so many connections, this many at a time.
func (tr *traffic) connect(n, atATime int) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	last := tr.begun + n
	running := atATime
	for range atATime {
		tr.spawn(func() {
			for tr.begun < last {
				k := tr.begun
				tr.begun++
				if err := tr.client(ctx, k); err != nil {
					tr.T.Fatalf("connection %d: %v", k, err)
				}
			}
			if running--; running == 0 {
				cancel() // the server is not asked any more
			}
		})
	}
	tr.spawn(func() {
		for {
			r, err := tr.l.Accept(ctx)
			if err != nil {
				return
			}
			tr.spawn(func() {
				tr.alive++
				tr.top = max(tr.top, tr.alive)
				if err := tr.server(ctx, r); err != nil {
					tr.T.Fatalf("a connection from %v: %v", r.RemoteAddr(), err)
				}
				tr.alive--
			})
		}
	})
	tr.run()
}

func (tr *traffic) client(ctx context.Context, k int) error {
	e, done := tr.end(0)
	defer done()
	a := e.attr()
	a.Private = fmt.Appendf(nil, "%d", k)
	c, err := tr.pds[0].Dial(ctx, netip.MustParseAddrPort(trafficPort), a)
	if err != nil {
		return err
	}
	n := length(k)
	harness.Fill(e.buf[slotLen:][:n], uint64(k))
	clear(e.buf[:slotLen])
	if err := e.send(c.QP, n); err != nil {
		return err
	}
	wc, err := e.poll(qp.WCRecv)
	if err != nil {
		return fmt.Errorf("the answer: %w", err)
	}
	if int(wc.ByteLen) != n || !bytes.Equal(e.buf[:n], e.buf[slotLen:][:n]) {
		return errors.New("the answer is another")
	}
	tr.answered++
	if !clientCloses(k) {
		tr.until(c)
	}
	return c.Close()
}

func (tr *traffic) server(_ context.Context, r *provider.ConnRequest) error {
	k, ok := number(r.Private)
	if !ok {
		tr.stranger(r)
		return nil
	}
	e, done := tr.end(1)
	defer done()
	clear(e.buf)
	c, err := r.Accept(context.Background(), tr.pds[1], e.attr())
	if err != nil {
		return err
	}
	wc, err := e.poll(qp.WCRecv)
	if err != nil {
		return fmt.Errorf("the message: %w", err)
	}
	n := length(k)
	want := make([]byte, n)
	harness.Fill(want, uint64(k))
	if int(wc.ByteLen) != n || !bytes.Equal(e.buf[:n], want) {
		return errors.New("the message is another")
	}
	copy(e.buf[slotLen:], e.buf[:n])
	if err := e.send(c.QP, n); err != nil {
		return err
	}
	if clientCloses(k) {
		tr.until(c) // it closes when it has the answer, whether we know of that or not
	} else if _, err := e.poll(qp.WCSend); err != nil {
		return fmt.Errorf("the answer: %w", err)
	}
	tr.served++
	return c.Close()
}

// until waits until a connection has ended.
func (tr *traffic) until(c *provider.Conn) {
	for {
		select {
		case <-c.Done():
			return
		default:
			tr.wait()
		}
	}
}

// over holds both sides to having nothing left of all that.
func (tr *traffic) over() {
	tr.T.Helper()
	tr.Settle()
	if tr.answered != tr.begun || tr.served != tr.begun {
		tr.T.Errorf("%d connections, %d served, %d answered", tr.begun, tr.served, tr.answered)
	}
	for i, d := range tr.Dev {
		if h := d.Holds(); h != (provider.Held{Neighbours: 1}) {
			tr.T.Errorf("device %d holds %+v", i, h)
		}
	}
}

// TestThousandConnections makes 1,000 connections, uses them, and ends them, 10 at a time,
// while 5 % of the packets are lost: none fails, and nothing is left of them on either side.
func TestThousandConnections(t *testing.T) {
	c := newCrowd(t, taptest.Config{Seed: 7, Delay: 20 * time.Microsecond})
	tr := newTraffic(c, 10)
	tr.connect(1, 1) // the neighbours have found each other: ARP has few tries
	c.Net.SetFaults(0.05, 0.01, 0.01, 0)
	tr.connect(999, 10)
	tr.over()
	if tr.top < 9 {
		t.Errorf("no more than %d at a time", tr.top)
	}
	if n := c.Net.Stats().Lost; n < 500 {
		t.Errorf("only %d packets were lost", n)
	}
	if a, b := c.Dev[0].CMStats(), c.Dev[1].CMStats(); a.Resent < 100 || b.Resent < 100 {
		t.Errorf("connection management has sent only %d and %d messages again", a.Resent, b.Resent)
	}
}

// TestConnectionsInARow makes 20,000 connections one after the other, 2,000 with the race
// detector, and nothing piles up: goroutines, descriptors, objects on the heap, entries
// of tables.
func TestConnectionsInARow(t *testing.T) {
	n := 20000
	if raceDetector || testing.Short() {
		n = 2000
	}
	c := newCrowd(t, taptest.Config{Seed: 8, Delay: 20 * time.Microsecond})
	tr := newTraffic(c, 1)
	tr.connect(200, 1)
	tr.over()
	objects := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // what had a finalizer
		runtime.ReadMemStats(&m)
		return m.HeapObjects
	}
	had, before := objects(), harness.CountResources(t)
	tr.connect(n, 1)
	tr.over()
	after := harness.CountResources(t)
	if after.Goroutines > before.Goroutines || after.FDs > before.FDs {
		t.Errorf("after %d connections there are %+v, before %+v", n, after, before)
	}
	if has := objects(); has > had+uint64(n)/4 {
		t.Errorf("after %d connections there are %d objects on the heap, before %d", n, has, had)
	}
}
