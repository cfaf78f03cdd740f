// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
)

// errQP is a QP that needs no peer: in state ERR, what is posted is flushed.
func errQP(t *testing.T, cfg Config) (*Device, *CQ, *QP) {
	return errQPOn(t, cfg, taptest.New(nil, taptest.Config{}))
}

func errQPOn(t *testing.T, cfg Config, n *taptest.Net) (*Device, *CQ, *QP) {
	t.Helper()
	cfg.Device = n.Port(0)
	d, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	pd, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	cq, err := d.CreateCQ(16, nil)
	if err != nil {
		t.Fatal(err)
	}
	q, err := pd.CreateQP(QPInitAttr{Type: qp.TypeRC, SendCQ: cq, RecvCQ: cq, Caps: qp.Caps{SendWR: 2 * maxLeft}})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []struct {
		a    qp.Attr
		mask qp.AttrMask
	}{
		{qp.Attr{State: qp.StateInit, Port: 1}, qp.AttrState | qp.AttrPKeyIndex | qp.AttrPort | qp.AttrAccess},
		{qp.Attr{State: qp.StateErr}, qp.AttrState},
	} {
		if err := q.Modify(QPAttr{Attr: m.a}, m.mask); err != nil {
			t.Fatal(err)
		}
	}
	return d, cq, q
}

// Who posts while another holds the baton goes away; the other does the work
// before it is done.
func TestDoorbellWhileBatonIsHeld(t *testing.T) {
	d, cq, q := errQP(t, Config{Manual: true})
	d.sh.lock()
	if n, err := q.PostSend([]qp.SendWR{{ID: 5, Opcode: qp.WRSend}}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if d.sh.bells.quiet() || cq.Len() != 0 {
		t.Fatal("the work was done without the baton")
	}
	d.sh.release()
	if !d.sh.bells.quiet() || cq.Len() != 1 {
		t.Error("the doorbell was lost")
	}
}

// Who has the baton of a device that is gone, and is asked to look for frames, is done
// all the same.
func TestLookWhenGone(t *testing.T) {
	n := taptest.New(nil, taptest.Config{})
	d, _, _ := errQPOn(t, Config{Manual: true}, n)
	d.sh.lock()
	d.sh.lost = true
	d.sh.progress(true, 1)
	d.sh.look.Store(true) // the background goroutine found the baton taken
	done := make(chan struct{})
	go func() {
		defer close(done)
		d.sh.release()
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		panic("release does not end") // nor would closing the device
	}
}

// pollWithFrames makes the background goroutine leave the TAP to who polls: frames
// come, and each is polled for. The device's clock must stand still: by it no time passes
// between two polls, however slow the machine is.
func pollWithFrames(t *testing.T, d *Device, cq *CQ, peer *taptest.Port) {
	b := &d.sh.bg
	wcs := make([]qp.WC, 1)
	end := time.Now().Add(60 * time.Second)
	frame := []tap.Frame{{B: make([]byte, 60)}}
	for !b.away.Load() {
		if time.Now().After(end) {
			t.Fatal("the background goroutine does not leave the TAP to who polls")
		}
		if _, err := peer.WriteBatch(frame); err != nil {
			t.Fatal(err)
		}
		for range 10 {
			cq.Poll(wcs)
		}
		runtime.Gosched()
	}
}

// Who goes to sleep calls the background goroutine back to the TAP.
func TestWanted(t *testing.T) {
	n := taptest.New(nil, taptest.Config{})
	d, cq, _ := errQPOn(t, Config{Clock: taptest.NewClock(int64(time.Hour)).Now}, n)
	b := &d.sh.bg
	end := time.Now().Add(60 * time.Second)
	for {
		pollWithFrames(t, d, cq, n.Port(1))
		kicks := b.kicks.Load()
		b.wanted()
		if d.sh.lastCall.Load() != longAgo {
			t.Fatal("somebody still counts as polling")
		}
		if b.kicks.Load() > kicks {
			break
		}
		// It was about to look by itself in that very moment; try again.
		if time.Now().After(end) {
			t.Fatal("the background goroutine was not called")
		}
	}
	for b.sleepUntil.Load() == awake {
		if time.Now().After(end) {
			t.Fatal("the background goroutine did not come back")
		}
		time.Sleep(time.Microsecond)
	}
}

// A frame that comes while an application that has polled all the time does
// something else is answered without it, and so are those after it.
func TestPollingEnds(t *testing.T) {
	n := taptest.New(nil, taptest.Config{})
	clock := taptest.NewClock(int64(time.Hour))
	d, cq, _ := errQPOn(t, Config{Clock: clock.Now}, n)
	pollWithFrames(t, d, cq, n.Port(1))
	before := d.Stats().RxFrames
	frame := []tap.Frame{{B: make([]byte, 60)}}
	end := time.Now().Add(60 * time.Second)
	for range 100 {
		if _, err := n.Port(1).WriteBatch(frame); err != nil {
			t.Fatal(err)
		}
		for before++; d.Stats().RxFrames < before; {
			if time.Now().After(end) {
				t.Fatal("a frame waits for who does not poll")
			}
			clock.Advance(10 * time.Microsecond)
			time.Sleep(time.Microsecond)
		}
	}
}

// Frames that come while somebody has the baton are read by that one, or by the
// background goroutine afterwards: none waits for the next.
func TestLook(t *testing.T) {
	n := taptest.New(nil, taptest.Config{})
	d, _, _ := errQPOn(t, Config{}, n)
	frame := []tap.Frame{{B: make([]byte, 60)}}
	end := time.Now().Add(time.Minute)
	for range 100 {
		before := d.Stats().RxFrames // takes the baton, too
		d.sh.lock()
		for range 3 {
			if _, err := n.Port(1).WriteBatch(frame); err != nil {
				t.Fatal(err)
			}
		}
		for !d.sh.look.Load() {
			if time.Now().After(end) {
				t.Fatal("the background goroutine does not say that frames wait")
			}
			time.Sleep(time.Microsecond)
		}
		d.sh.release()
		for d.Stats().RxFrames < before+3 {
			if time.Now().After(end) {
				t.Fatal("a frame waits for another")
			}
			time.Sleep(time.Microsecond)
		}
	}
}

func TestBells(t *testing.T) {
	var b bells
	want := map[uint16]bool{}
	for range 500 {
		i := uint16(rand.Uint32())
		want[i] = true
		b.ring(i)
	}
	for _, i := range []uint16{0, 63, 64, 4095, 4096, 65535} {
		want[i] = true
		b.ring(i)
	}
	if b.quiet() {
		t.Fatal("quiet with bells rung")
	}
	last := -1
	b.sweep(func(i uint16) {
		if !want[i] || int(i) <= last {
			t.Errorf("bell %d after %d", i, last)
		}
		last = int(i)
		delete(want, i)
	})
	if len(want) != 0 || !b.quiet() {
		t.Errorf("%d bells not swept", len(want))
	}
}

// No ring is lost when rings and sweeps race.
func TestBellsRace(t *testing.T) {
	var b bells
	const ringers, each = 4, 20_000
	done := make(chan struct{})
	for r := range ringers {
		go func() {
			for i := range each {
				b.ring(uint16(r*16000 + i%100))
			}
			done <- struct{}{}
		}()
	}
	seen := map[uint16]bool{}
	for left := ringers; left > 0; {
		b.sweep(func(i uint16) { seen[i] = true })
		select {
		case <-done:
			left--
		default:
		}
	}
	b.sweep(func(i uint16) { seen[i] = true })
	if len(seen) != ringers*100 || !b.quiet() {
		t.Errorf("%d bells seen, want %d", len(seen), ringers*100)
	}
}

// The heap gives the earliest entry, whatever is put in, moved and taken out.
func TestTimerHeap(t *testing.T) {
	var h timerHeap
	qs := make([]*QP, 200)
	for i := range qs {
		qs[i] = &QP{timerPos: -1, timerAt: qp.Never}
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		q := qs[r.IntN(len(qs))]
		if r.IntN(4) == 0 {
			h.remove(q)
		} else {
			h.set(q, r.Int64N(1000))
		}
		want := qp.Never
		n := 0
		for _, q := range qs {
			if q.timerPos >= 0 {
				want = min(want, q.timerAt)
				n++
				if h[q.timerPos] != q {
					t.Fatal("an entry is not where it says")
				}
			} else if q.timerAt != qp.Never {
				t.Fatal("an entry that is out has a time")
			}
		}
		if h.next() != want || len(h) != n {
			t.Fatalf("next is %d, want %d", h.next(), want)
		}
	}
}

// The source port is what the application's flow label says, in the kernel's way; without one
// all flows between two addresses have the same.
func TestUDPSourcePort(t *testing.T) {
	v4, v6 := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	if got, want := udpSourcePort(0x12345, v4, v4.Next()), uint16(0x2345^4|0xc000); got != want {
		t.Errorf("port for label 0x12345: %#x, want %#x", got, want)
	}
	seen := map[uint16]bool{}
	for _, src := range []netip.Addr{v4, v6} {
		dst := src
		for range 100 {
			dst = dst.Next()
			got := udpSourcePort(0, src, dst)
			if got < 0xc000 || got != udpSourcePort(0, dst, src) {
				t.Errorf("port from %v to %v: %#x, and back: %#x", src, dst, got, udpSourcePort(0, dst, src))
			}
			seen[got] = true
		}
	}
	if len(seen) < 190 {
		t.Errorf("%d ports for 200 destinations", len(seen))
	}
}

func TestPKeyMatch(t *testing.T) {
	for _, tc := range []struct {
		a, b uint16
		want bool
	}{
		{0xffff, 0xffff, true}, {0x7fff, 0xffff, true}, {0xffff, 0x7fff, true}, {0x7fff, 0x7fff, false},
		{0x8001, 0xffff, false}, {0x8000, 0x8000, false},
	} {
		if pkeyMatch(tc.a, tc.b) != tc.want {
			t.Errorf("pkeyMatch(%#x, %#x) is not %v", tc.a, tc.b, tc.want)
		}
	}
}
