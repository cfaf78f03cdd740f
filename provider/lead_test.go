// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// sleeper has a goroutine wait for completions; the result is that of Wait.
func sleeper(ctx context.Context, e *harness.End) <-chan error {
	done := make(chan error, 1)
	go func() {
		_, err := e.CQ.Wait(ctx, make([]qp.WC, 1))
		done <- err
	}()
	return done
}

func ended(t *testing.T, done <-chan error) error {
	t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(time.Minute):
		t.Fatal("it sleeps on")
	}
	return nil
}

// Who sleeps until something completes waits for the frames itself, is woken by what
// completes, by the end of its context and by that of the device, and wakes for nothing else.
func TestLeader(t *testing.T) {
	p := harness.NewTAPPair(t, harness.TAPOptions{})
	c := p.Connect(harness.ConnOptions{Timeout: 17})
	d := p.Dev[0]
	c.A.Recv(1, 0, 64)
	// Who goes to sleep while others are at it leaves it to them.
	staysAsleep(t, p.Dev[:]...)
	done := sleeper(context.Background(), c.A)
	until(t, "led", d.IsLed)
	staysAsleep(t, p.Dev[:]...)
	c.B.Send(c.B.Message(1, 0, 64))
	if err := ended(t, done); err != nil {
		t.Fatal(err)
	}
	if d.IsLed() {
		t.Error("it leads, and does not sleep")
	}
	// The background goroutine is back: it answers a WRITE.
	c.B.Send(c.B.Write(c.A, 2, 0, 0, 64))
	c.WaitOK(c.B, 1)
	c.WaitOK(c.B, 2)

	ctx, cancel := context.WithCancel(context.Background())
	done = sleeper(ctx, c.A)
	until(t, "led again", d.IsLed)
	cancel()
	if err := ended(t, done); !errors.Is(err, context.Canceled) {
		t.Errorf("after its context's end: %v", err)
	}
	done = sleeper(context.Background(), c.A)
	until(t, "led once more", d.IsLed)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := ended(t, done); !errors.Is(err, provider.ErrClosed) {
		t.Errorf("after the device's end: %v", err)
	}
}

// Nobody wakes beside one who sleeps for long, though others have just led and there was traffic.
func TestLeaderSleepsLong(t *testing.T) {
	p := harness.NewTAPPair(t, harness.TAPOptions{})
	c := p.Connect(harness.ConnOptions{Timeout: 17})
	for i := range uint64(50) {
		c.A.Recv(i, 0, 64)
		done := sleeper(context.Background(), c.A)
		c.B.Send(c.B.Message(i, 0, 64))
		if err := ended(t, done); err != nil {
			t.Fatal(err)
		}
		c.WaitOK(c.B, i)
	}
	c.A.Recv(50, 0, 64)
	done := sleeper(context.Background(), c.A)
	staysAsleep(t, p.Dev[:]...)
	c.B.Send(c.B.Message(50, 0, 64))
	if err := ended(t, done); err != nil {
		t.Fatal(err)
	}
}

// A leader whose TAP is taken away is told.
func TestLeaderGone(t *testing.T) {
	p := harness.NewTAPPair(t, harness.TAPOptions{})
	c := p.Connect(harness.ConnOptions{Timeout: 17})
	staysAsleep(t, p.Dev[:]...)
	done := sleeper(context.Background(), c.A)
	until(t, "led", p.Dev[0].IsLed)
	if err := p.Fabric.RemovePort(p.Ports[0].Index); err != nil {
		t.Fatal(err)
	}
	if err := ended(t, done); !errors.Is(err, provider.ErrGone) {
		t.Errorf("%v", err)
	}
}

// Many who sleep, and some who poll: one leads at a time, each goes
// on when its message has come, and none sleeps for ever.
func TestLeaders(t *testing.T) {
	p := harness.NewTAPPair(t, harness.TAPOptions{})
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	const rounds = 100
	var wg sync.WaitGroup
	for i := range 4 {
		c := p.Connect(harness.ConnOptions{Timeout: 17, Mem: 4096})
		for side, e := range []*harness.End{c.A, c.B} {
			e.Recv(0, 0, 64)
			wg.Go(func() {
				wcs := make([]qp.WC, 1)
				take := func(want int) {
					for want > 0 {
						n := e.CQ.Poll(wcs[:want])
						if n == 0 && (i+side)%4 != 3 {
							var err error
							if n, err = e.CQ.Wait(ctx, wcs[:want]); err != nil {
								t.Errorf("connection %d, side %d: %v", i, side, err)
								cancel()
								return
							}
						}
						want -= n
						if ctx.Err() != nil {
							return
						}
					}
				}
				for range rounds {
					if side == 1 {
						take(1)
						e.Recv(0, 0, 64)
					}
					e.Send(e.Message(1, 0, 64))
					take(1)
					if side == 0 {
						take(1)
						e.Recv(0, 0, 64)
					}
				}
			})
		}
	}
	wg.Wait()
}

// An acknowledgement goes behind the answer, where there has been one each time; it does
// not wait for one that does not come.
func TestAckBehindAnswer(t *testing.T) {
	p := harness.NewPair(t, taptest.Config{})
	c := p.Connect(harness.ConnOptions{Timeout: 17, Mem: 4096})
	d := p.Dev[1]
	c.B.Recv(0, 0, 64)
	// come has a message come to B, and says whether its acknowledgement was sent.
	come := func() bool {
		t.Helper()
		d.BePatient() // settling takes a time in which nobody polls
		acks := d.AcksSent()
		c.B.Recv(0, 0, 64)
		c.A.Send(c.A.Message(1, 0, 8))
		if n := len(c.B.Poll()); n != 1 {
			t.Fatalf("%d completions", n)
		}
		return d.AcksSent() > acks
	}
	answer := func() {
		c.A.Recv(0, 0, 64)
		c.B.Send(c.B.Message(2, 0, 8))
		p.Settle()
		c.A.Poll()
		c.A.Poll()
		c.B.Poll()
	}
	for range 8 {
		come()
		answer()
	}
	acks := d.AcksSent()
	if come() {
		t.Error("it was acknowledged before it was answered")
	}
	answer()
	if n := d.AcksSent() - acks; n != 1 {
		t.Errorf("%d acknowledgements of one message", n)
	}
	// The next poll, or a control verb, does not wait.
	come()
	before := d.AcksSent()
	c.B.Poll()
	if d.AcksSent() != before+1 {
		t.Error("it was not acknowledged by the next poll")
	}
	answer()
	come()
	before = d.AcksSent()
	if d.Stats(); d.AcksSent() != before+1 {
		t.Error("it was not acknowledged by a control verb")
	}
	// Who does not answer is not waited for.
	for range 8 {
		come()
		p.Settle()
	}
	if !come() {
		t.Error("an answer is waited for where none comes")
	}
}
