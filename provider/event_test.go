// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
)

// A port that flaps fills no memory, and the end of the device is told all the same.
func TestPortEventsAreBounded(t *testing.T) {
	d, err := Open(Config{Manual: true, Device: taptest.New(nil, taptest.Config{}).Port(0)})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for range 3 * maxPortEvents {
		d.deviceEvent(qp.EventPortErr)
		d.deviceEvent(qp.EventPortActive)
	}
	d.deviceEvent(qp.EventDeviceFatal)
	n, last := 0, qp.EventType(0)
	for {
		e, ok := d.TryAsyncEvent()
		if !ok {
			break
		}
		n, last = n+1, e.Type
		e.Ack()
	}
	if n != maxPortEvents+1 || last != qp.EventDeviceFatal {
		t.Fatalf("%d events, the last %v", n, last)
	}
}

// An event that comes while its object is being destroyed is not told of what is gone.
func TestEventsOfTheDying(t *testing.T) {
	d, err := Open(Config{Manual: true, Device: taptest.New(nil, taptest.Config{}).Port(0)})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	ch, err := d.CreateCompChannel()
	if err != nil {
		t.Fatal(err)
	}
	cq, err := d.CreateCQ(16, ch)
	if err != nil {
		t.Fatal(err)
	}
	pd, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	x, err := d.OpenXRCD(XRCDAttr{FD: -1, Create: true})
	if err != nil {
		t.Fatal(err)
	}
	srqCQ, err := d.CreateCQ(16, nil)
	if err != nil {
		t.Fatal(err)
	}
	srq, err := pd.CreateXRCSRQ(SRQAttr{MaxWR: 4}, x, srqCQ)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range []struct {
		dead    *atomic.Bool
		destroy func() error
		event   func() // of the engine
	}{
		{&cq.dead, cq.Destroy, func() { cq.notify(false); cq.overflow() }},
		{&srq.dead, srq.Destroy, srq.limitReached},
	} {
		d.sh.lock()
		done := make(chan error)
		go func() { done <- o.destroy() }()
		for !o.dead.Load() {
			runtime.Gosched()
		}
		for range 1000 { // it goes on to wait for the baton
			runtime.Gosched()
		}
		o.event()
		d.sh.release()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if ch.q.len() != 0 || d.events.len() != 0 {
			t.Errorf("%d completion events, %d async events", ch.q.len(), d.events.len())
		}
	}
}
