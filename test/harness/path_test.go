// SPDX-License-Identifier: Apache-2.0

package harness_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/test/harness"
)

// pathSize is a message of many packets.
const pathSize = 200_000

// settled waits until the first device knows of all destinations whether super-frames get there.
func settled(p *harness.Pair) {
	p.T.Helper()
	p.RunUntil(func() bool { st := p.Dev[0].Stats(); return st.SuperProbes > 0 && st.SuperAsking == 0 })
}

// written has side A write a message, checks that it has arrived, and says how many super-frames
// that were no questions left meanwhile, or one fewer or two if there were questions at that moment.
func written(c *harness.Conn, seed uint64) (super int) {
	c.T.Helper()
	before := c.Dev[0].Stats()
	harness.Fill(c.A.Mem[:pathSize], seed)
	c.A.Send(c.A.Write(c.B, seed, 0, 0, pathSize))
	c.WaitOK(c.A, seed)
	if !bytes.Equal(c.A.Mem[:pathSize], c.B.Mem[:pathSize]) {
		c.T.Fatal("wrong data")
	}
	after := c.Dev[0].Stats().Tap.TxSuper // counted before the questions are
	return int(after-before.Tap.TxSuper) - int(c.Dev[0].Stats().SuperProbes-before.SuperProbes)
}

// goesOn has side A write messages until cond holds, which is asked after each.
func goesOn(c *harness.Conn, cond func() bool) {
	c.T.Helper()
	seed := uint64(1000)
	c.RunUntil(func() bool {
		seed++
		written(c, seed)
		return cond()
	})
}

// told is what a device tells users: destinations that lose super-frames, and how often it has turned
// out that one does.
func told(t *testing.T, d *provider.Device) (single []string, fallbacks uint64) {
	t.Helper()
	sn, err := d.Snapshot(0)
	if err != nil {
		t.Fatal(err)
	}
	return sn.Single, sn.Counters["single_fallbacks"]
}

// fellBack expects that the first device sends single frames to the second, at address to, and
// super-frames to the third.
func fellBack(t *testing.T, c, c3 *harness.Conn, to string) {
	t.Helper()
	if single, n := told(t, c.Dev[0]); !slices.Equal(single, []string{to}) || n == 0 {
		t.Errorf("single frames to %v, %d times; want %s", single, n, to)
	}
	for seed := range uint64(5) {
		before, _ := told(t, c.Dev[0])
		n := written(c, 2*seed)
		// One that does not answer, as its thread gets no processor, may lose some.
		if after, _ := told(t, c.Dev[0]); n > 0 && len(before) != 0 && len(after) != 0 {
			t.Errorf("%d super-frames to where they are dropped", n)
		}
		if n := written(c3, 2*seed+1); n <= 0 {
			t.Error("no super-frames to the other destination")
		}
	}
}

func needSuper(t *testing.T, d *provider.Device) {
	t.Helper()
	if !d.Offloads().Has(tap.USO4 | tap.USO6) {
		t.Skip(harness.EnvFrames + ": no super-frames")
	}
}

// On the way to one destination something drops super-frames. It is asked, and gets single frames, of
// which none is lost; another destination, and the way back, keep super-frames.
func TestTAPSuperFramesDropped(t *testing.T) {
	for _, gid := range []int{harness.GIDv4, harness.GIDv6} {
		t.Run(fmt.Sprintf("gid=%d", gid), func(t *testing.T) {
			p := harness.NewTAPPair(t, harness.TAPOptions{Third: true})
			needSuper(t, p.Dev[0])
			to := p.Ports[1].V4.Addr().String()
			if gid == harness.GIDv6 {
				to = p.Ports[1].V6.Addr().String()
			}
			f := p.Filter(1, harness.DropLong)
			o := harness.ConnOptions{GID: gid, MTU: qp.MTU4096, Timeout: 18} // a second
			c, p3 := p.Connect(o), p.ToThird()
			c3 := p3.Connect(o)
			settled(p.Pair)
			if f.Hits() == 0 {
				t.Error("no question was dropped")
			}
			if p.Dev[0].Stats().SingleFallbacks == 0 { // it did not answer at all: it had no processor
				goesOn(c, func() bool { return p.Dev[0].Stats().SingleFallbacks > 0 })
			}
			lost, asked := f.Hits(), p.Dev[0].Stats().SuperProbes
			fellBack(t, c, c3, to)
			p.RunUntil(func() bool { return p.Dev[1].Stats().SuperAsking == 0 })
			before := p.Dev[1].Stats()
			c.A.Send(c.A.Read(c.B, 1, 0, 0, pathSize))
			c.WaitOK(c.A, 1)
			if st := p.Dev[1].Stats(); st.Tap.TxSuper-before.Tap.TxSuper <= st.SuperProbes-before.SuperProbes || st.SingleFallbacks != 0 {
				t.Errorf("the way back: super-frames from %d to %d; %d times single frames instead", before.Tap.TxSuper, st.Tap.TxSuper, st.SingleFallbacks)
			}
			t.Logf("%d frames were dropped for %d questions, then %d for %d", lost, asked, f.Hits()-lost, p.Dev[0].Stats().SuperProbes-asked)
		})
	}
}

// A path that begins to drop super-frames in the midst of traffic costs no connection: it falls back, and
// goes back to super-frames when they are not dropped any more.
func TestTAPSuperFramesDroppedMeanwhile(t *testing.T) {
	p := harness.NewTAPPair(t, harness.TAPOptions{Third: true})
	needSuper(t, p.Dev[0])
	o := harness.ConnOptions{MTU: qp.MTU4096, Timeout: 18}
	c, p3 := p.Connect(o), p.ToThird()
	c3 := p3.Connect(o)
	settled(p.Pair)
	if n := written(c, 1); n <= 0 {
		t.Fatal("no super-frames")
	}
	const depth = 4 // messages that may be on their way when it happens
	for i := range depth {
		c.A.Send(c.A.Write(c.B, 1, i*pathSize, i*pathSize, pathSize))
	}
	f := p.Filter(1, harness.DropLong)
	for range depth {
		c.WaitOK(c.A, 1)
	}
	goesOn(c, func() bool { return p.Dev[0].Stats().SingleFallbacks > 0 })
	t.Logf("%d frames were dropped until it fell back, %d packets sent again", f.Hits(), p.Dev[0].Protocol().RetransmittedPkts.Load())
	if f.Hits() == 0 {
		t.Error("nothing was dropped")
	}
	fellBack(t, c, c3, p.Ports[1].V4.Addr().String())
	f.Remove()
	before := p.Dev[0].Stats().SuperProven
	goesOn(c, func() bool { return p.Dev[0].Stats().SuperProven > before }) // it is asked again
	if n := written(c, 1); n <= 0 {
		t.Error("no super-frames though they arrive")
	}
	if single, _ := told(t, p.Dev[0]); len(single) != 0 {
		t.Errorf("still single frames to %v", single)
	}
}
