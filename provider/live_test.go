// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// One-sided operations proceed while the peer's application does nothing, and
// while one's own only sleeps.
func TestBackground(t *testing.T) {
	p := harness.NewLivePair(t, taptest.Config{})
	c := p.Connect(harness.ConnOptions{Timeout: 17})
	harness.Fill(c.A.Mem, 5)
	wcs := make([]qp.WC, 8)
	for i, wr := range []qp.SendWR{c.A.Write(c.B, 0, 0, 0, len(c.A.Mem)), c.A.Read(c.B, 1, 0, 0, len(c.A.Mem))} {
		c.A.Send(wr)
		n, err := c.A.CQ.Wait(context.Background(), wcs)
		if err != nil || n != 1 || wcs[0].Status != qp.WCSuccess || wcs[0].ID != uint64(i) {
			t.Fatalf("wait: %d, %v, %+v", n, err, wcs[0])
		}
		if !bytes.Equal(c.A.Mem, c.B.Mem) {
			t.Fatal("wrong data")
		}
	}
}

// A timer that is set while the background sleeps without one runs out all the
// same when the application only sleeps.
func TestBackgroundTimers(t *testing.T) {
	p := harness.NewLivePair(t, taptest.Config{})
	c := p.Connect(harness.ConnOptions{Timeout: 8, RetryCnt: 2, Mem: 4096})
	p.Net.SetFaults(1, 0, 0, 0)
	time.Sleep(20 * time.Millisecond) // what the connecting left behind is over
	c.A.Send(c.A.Write(c.B, 1, 0, 0, 10))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	wcs := make([]qp.WC, 1)
	if n, err := c.A.CQ.Wait(ctx, wcs); n != 1 || err != nil || wcs[0].Status != qp.WCRetryExcErr {
		t.Fatalf("wait: %d, %v, %+v", n, err, wcs[0])
	}
}

// Several goroutines post to and poll the same and different queues at once.
func TestConcurrent(t *testing.T) {
	p := harness.NewLivePair(t, taptest.Config{})
	const conns, posters, each = 3, 3, 200
	var wg sync.WaitGroup
	fail := make(chan error, conns*(posters+4))
	for range conns {
		c := p.Connect(harness.ConnOptions{Timeout: 17, Mem: 1 << 16})
		harness.Fill(c.A.Mem[:256], 1)
		want := posters * each
		// B receives and its pollers repost; A's pollers count.
		for i := range 64 {
			c.B.Recv(uint64(i), 4096+256*i, 256)
		}
		var mu sync.Mutex
		count := map[*harness.End]int{}
		poller := func(e *harness.End, sleeps bool) {
			defer wg.Done()
			wcs := make([]qp.WC, 16)
			for {
				mu.Lock()
				done := count[e] == want
				mu.Unlock()
				if done {
					return
				}
				n := 0
				if sleeps {
					ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
					n, _ = e.CQ.Wait(ctx, wcs)
					cancel()
				} else {
					n = e.CQ.Poll(wcs)
				}
				for _, wc := range wcs[:n] {
					if wc.Status != qp.WCSuccess {
						fail <- fmt.Errorf("completion %+v", wc)
						return
					}
					if e == c.B {
						e.QP.PostRecv([]qp.RecvWR{{ID: wc.ID, SGL: []qp.SGE{e.SGE(4096+256*int(wc.ID), 256)}}})
					}
				}
				mu.Lock()
				count[e] += n
				mu.Unlock()
			}
		}
		for _, e := range []*harness.End{c.A, c.B} {
			wg.Add(2)
			go poller(e, false)
			go poller(e, true)
		}
		for range posters {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for i := 0; i < each; {
					n, err := c.A.QP.PostSend([]qp.SendWR{c.A.Message(uint64(i), 0, 256)})
					if err != nil && !errors.Is(err, qp.ErrFull) {
						fail <- err
						return
					}
					i += n
				}
			}()
		}
	}
	// Control verbs and queries meanwhile.
	wg.Add(1)
	go func() {
		defer wg.Done()
		for range 50 {
			pd, err := p.Dev[0].AllocPD()
			if err != nil {
				fail <- err
				return
			}
			cq, err := p.Dev[0].CreateCQ(8, nil)
			if err != nil {
				fail <- err
				return
			}
			q, err := pd.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: cq, RecvCQ: cq})
			if err != nil {
				fail <- err
				return
			}
			p.Dev[0].Stats()
			for _, err := range []error{q.Destroy(), cq.Destroy(), pd.Dealloc()} {
				if err != nil {
					fail <- err
				}
			}
		}
	}()
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case err := <-fail:
		t.Fatal(err)
	case <-time.After(2 * time.Minute):
		t.Fatal("not done after two minutes: a doorbell or a wake-up was lost")
	}
	select {
	case err := <-fail:
		t.Fatal(err)
	default:
	}
}

// staysAsleep checks that devices go to sleep and do not wake up by themselves. What was still
// under way may wake them up for the last time, such as the answer to a probe.
func staysAsleep(t *testing.T, devs ...*provider.Device) {
	t.Helper()
	before, woken := make([]uint64, len(devs)), make([]uint64, len(devs))
	for range 5 {
		for i, d := range devs {
			until(t, "asleep", d.Asleep)
			before[i] = d.Stats().Wakeups
		}
		time.Sleep(200 * time.Millisecond) // that nothing happens takes time
		for i, d := range devs {
			woken[i] = d.Stats().Wakeups - before[i]
		}
		if slices.Max(woken) == 0 {
			break
		}
	}
	for i, d := range devs {
		if woken[i] != 0 {
			t.Errorf("device %d wakes up %d times in 200 ms with nothing to do", i, woken[i])
		}
		if d.Stats().Wakeups == 0 {
			t.Errorf("device %d never slept", i)
		}
	}
}

// A device with nothing outstanding sleeps until something happens.
func TestIdle(t *testing.T) {
	p := harness.NewLivePair(t, taptest.Config{})
	c := p.Connect(harness.ConnOptions{Timeout: 17, Mem: 4096})
	wcs := make([]qp.WC, 1)
	c.A.Send(c.A.Write(c.B, 1, 0, 0, 100))
	if n, err := c.A.CQ.Wait(context.Background(), wcs); n != 1 || err != nil || wcs[0].Status != qp.WCSuccess {
		t.Fatal(n, err, wcs[0])
	}
	staysAsleep(t, p.Dev[:]...)
}

// The same on real TAPs.
func TestTAPIdle(t *testing.T) {
	p := harness.NewTAPPair(t, harness.TAPOptions{})
	c := p.Connect(harness.ConnOptions{Timeout: 17})
	c.A.Send(c.A.Write(c.B, 1, 0, 0, 100_000))
	c.WaitOK(c.A, 1)
	staysAsleep(t, p.Dev[:]...)
}

// The TAP is deleted under a running engine.
func TestTAPGone(t *testing.T) {
	p := harness.NewTAPPair(t, harness.TAPOptions{})
	c := p.Connect(harness.ConnOptions{Timeout: 17})
	c.A.Recv(1, 0, 10)
	if err := p.Fabric.RemovePort(p.Ports[0].Index); err != nil {
		t.Fatal(err)
	}
	for down := false; ; {
		e, err := p.Dev[0].AsyncEvent(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		e.Ack()
		if e.Type == qp.EventDeviceFatal {
			break
		}
		if e.Type != qp.EventPortErr || down { // a netdev that is deleted goes down first
			t.Fatalf("event %+v", e)
		}
		down = true
	}
	if wc := c.WaitOne(c.A); wc.ID != 1 || wc.Status != qp.WCWRFlushErr {
		t.Errorf("completion %+v", wc)
	}
	if _, err := c.A.QP.PostSend([]qp.SendWR{c.A.Message(2, 0, 10)}); !errors.Is(err, provider.ErrGone) {
		t.Errorf("post: %v", err)
	}
	staysAsleep(t, p.Dev[0])
}

// While an application polls, the background goroutine stays away from the TAP.
func TestBackgroundStaysAway(t *testing.T) {
	p := harness.NewLivePair(t, taptest.Config{})
	c := p.Connect(harness.ConnOptions{Timeout: 17, Mem: 4096})
	wcs := make([]qp.WC, 1)
	start := time.Now()
	before := p.Dev[0].Stats().Wakeups
	for time.Since(start) < 100*time.Millisecond {
		if n := c.A.CQ.Poll(wcs); n != 0 {
			t.Fatal("completion from nowhere")
		}
	}
	// Without frames it wakes up once a millisecond, not to be kicked for each timer.
	n, took := p.Dev[0].Stats().Wakeups-before, time.Since(start)
	if n > 30+uint64(took/time.Millisecond) {
		t.Errorf("%d wake-ups in %v of polling", n, took)
	}
	// And it is back when somebody sleeps.
	c.A.Send(c.A.Write(c.B, 1, 0, 0, 100))
	if n, err := c.A.CQ.Wait(context.Background(), wcs); n != 1 || err != nil {
		t.Fatal(n, err)
	}
}

// Posting to and polling what is destroyed meanwhile gives errors, no crash.
func TestDestroyUnderUse(t *testing.T) {
	p := harness.NewLivePair(t, taptest.Config{})
	for range 30 {
		c := p.Connect(harness.ConnOptions{Timeout: 17, Mem: 4096, SRQ: true})
		var wg sync.WaitGroup
		stop := make(chan struct{})
		use := func(fn func()) {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for {
					select {
					case <-stop:
						return
					default:
						fn()
					}
				}
			}()
		}
		wcs := make([]qp.WC, 4)
		use(func() { c.A.QP.PostSend([]qp.SendWR{c.A.Write(c.B, 1, 0, 0, 100)}) })
		use(func() { c.A.QP.PostRecv([]qp.RecvWR{{ID: 1, SGL: []qp.SGE{c.A.SGE(0, 10)}}}) })
		use(func() { c.B.SRQ.PostRecv([]qp.RecvWR{{ID: 1, SGL: []qp.SGE{c.B.SGE(0, 10)}}}) })
		use(func() { c.A.CQ.Poll(wcs); c.A.CQ.ReqNotify(false); c.A.CQ.Len() })
		for _, fn := range []func() error{c.A.QP.Destroy, c.B.QP.Destroy, c.A.CQ.Destroy, c.B.CQ.Destroy, c.B.SRQ.Destroy} {
			if err := fn(); err != nil {
				t.Error(err)
			}
		}
		close(stop)
		wg.Wait()
	}
}
