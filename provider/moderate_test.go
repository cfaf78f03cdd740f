// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"errors"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// Events of a moderated CQ come after so many completions, or when the engine's
// timer says so.
func TestModeration(t *testing.T) {
	p := harness.NewPair(t, taptest.Config{Delay: 3 * time.Microsecond})
	d := p.Dev[0]
	c := p.Connect(harness.ConnOptions{Channel: true})
	cq, ch := c.A.CQ, c.A.Ch
	events := func() (n int) {
		for {
			if _, ok := ch.TryWait(); !ok {
				return n
			}
			cq.AckEvents(1)
			n++
		}
	}
	write := func(n int) {
		for i := range n {
			c.A.Send(c.A.Write(c.B, uint64(i), 0, 0, 64))
		}
		got := 0
		p.RunUntil(func() bool { got += len(c.A.Poll()); return got == n })
	}
	a := d.Query()
	for _, bad := range []struct {
		n int
		p time.Duration
	}{{-1, 0}, {a.MaxCQModCount + 1, 0}, {0, -1}, {0, a.MaxCQModPeriod + 1}} {
		if err := cq.Moderate(bad.n, bad.p); !errors.Is(err, provider.ErrInvalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	if err := cq.Moderate(4, 300*time.Microsecond); err != nil {
		t.Fatal(err)
	}
	cq.ReqNotify(false)
	write(3)
	if n := events(); n != 0 {
		t.Fatalf("%d events after 3 completions of 4", n)
	}
	write(1)
	if n := events(); n != 1 {
		t.Fatalf("%d events after 4 completions", n)
	}
	cq.ReqNotify(false)
	write(2)
	if n := events(); n != 0 {
		t.Fatalf("%d events", n)
	}
	due := d.NextDeadline()
	if due == qp.Never {
		t.Fatal("no timer runs")
	}
	start := p.Clock.Now()
	p.RunUntil(func() bool { return events() == 1 })
	if now := p.Clock.Now(); now < due || now-start > int64(300*time.Microsecond) {
		t.Errorf("it took %v", time.Duration(now-start))
	}
	// With a CQ that goes, its timer goes.
	cq.ReqNotify(false)
	write(1)
}
