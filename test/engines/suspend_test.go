// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/harness"
)

// TestSuspendAtFullSpeed: two engines on real TAPs write to each other as fast as they can
// while regions at both ends are suspended: no error, no byte lost, nothing written
// meanwhile. 20 times for 10 ms in each mode that keeps a connection alive for ever; with
// TAPVERBS_LONG=1 a hundred times for a second. provider.TestSuspendTraffic does the latter
// in virtual time.
func TestSuspendAtFullSpeed(t *testing.T) {
	times, long := 20, 10*time.Millisecond
	if os.Getenv("TAPVERBS_LONG") != "" {
		times, long = 100, time.Second
	}
	for _, mode := range []mr.SuspendMode{mr.SuspendRNR, mr.SuspendHold} {
		t.Run(mode.String(), func(t *testing.T) { suspendAtFullSpeed(t, mode, times, long) })
	}
}

const (
	speedMessage = 64 << 10
	speedSlots   = 32 // that are written to, and as many that are written from
	speedDepth   = 16
)

// flow is one direction.
type flow struct {
	from, to *harness.End
	r        *rand.Rand
	last     [speedSlots]int // what each slot was last written from
	posted   int
	done     atomic.Int64
}

// post posts one WRITE more.
func (f *flow) post() error {
	src, dst := f.r.IntN(speedSlots), f.posted%speedSlots
	f.last[dst] = src
	f.posted++
	_, err := f.from.QP.PostSend([]qp.SendWR{f.from.Write(f.to, uint64(f.posted), (speedSlots+src)*speedMessage, dst*speedMessage, speedMessage)})
	return err
}

// run writes until stop says so, and then waits for all to be done.
func (f *flow) run(stop *atomic.Bool) error {
	wcs := make([]qp.WC, speedDepth)
	for open := 0; open > 0 || !stop.Load(); {
		for ; open < speedDepth && !stop.Load(); open++ {
			if err := f.post(); err != nil {
				return err
			}
		}
		n := f.from.CQ.Poll(wcs)
		for _, wc := range wcs[:n] {
			if wc.Status != qp.WCSuccess {
				return fmt.Errorf("WRITE %d of %d: %v", wc.ID, f.posted, wc.Status)
			}
		}
		open -= n
		f.done.Add(int64(n))
	}
	return nil
}

func suspendAtFullSpeed(t *testing.T, mode mr.SuspendMode, times int, long time.Duration) {
	c := harness.NewTAPPair(t, harness.TAPOptions{}).Connect(harness.ConnOptions{
		Mem: 2 * speedSlots * speedMessage, MTU: qp.MTU4096, Timeout: 18})
	ends := []*harness.End{c.A, c.B}
	var stop atomic.Bool
	errs := make(chan error, 2)
	var flows []*flow
	for i, e := range ends {
		harness.Fill(e.Mem[speedSlots*speedMessage:], uint64(i))
		if err := e.MR.SetSuspendMode(mode, 0); err != nil {
			t.Fatal(err)
		}
		flows = append(flows, &flow{from: e, to: ends[1-i], r: rand.New(rand.NewPCG(1, uint64(i)))})
	}
	begun := time.Now()
	for _, f := range flows {
		go func() { errs <- f.run(&stop) }()
	}
	// progress waits until both directions have gone on.
	progress := func() {
		for _, f := range flows {
			was := f.done.Load()
			c.RunUntil(func() bool { return f.done.Load() > was+speedDepth || len(errs) > 0 })
		}
	}
	for i := range times {
		progress()
		e := ends[i%2]
		if err := e.MR.Suspend(); err != nil {
			t.Fatal(err)
		}
		was := bytes.Clone(e.Mem)
		time.Sleep(long) // that is what is tested, not waited for
		if !bytes.Equal(was, e.Mem) {
			t.Fatal("memory was written while it was suspended")
		}
		if err := e.MR.Resume(); err != nil {
			t.Fatal(err)
		}
	}
	progress()
	stop.Store(true)
	for range flows {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
	took := time.Since(begun)
	for i, f := range flows {
		for dst, src := range f.last {
			want := f.from.Mem[(speedSlots+src)*speedMessage:][:speedMessage]
			if got := f.to.Mem[dst*speedMessage:][:speedMessage]; !bytes.Equal(got, want) {
				t.Errorf("direction %d, slot %d: byte %d is wrong", i, dst, differ(got, want))
			}
		}
	}
	sum := flows[0].done.Load() + flows[1].done.Load()
	t.Logf("%d suspensions of %v, %d WRITEs of %d KiB in %v", times, long, sum, speedMessage>>10, took.Round(time.Millisecond))
}
