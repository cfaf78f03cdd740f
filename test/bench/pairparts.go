// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/tapverbs/tapverbs/internal/stats"
	"github.com/tapverbs/tapverbs/internal/twin"
	"github.com/tapverbs/tapverbs/qp"
)

// The parts of "bench memory" that two processes measure.

// pairResult is what the peer leaves in the file that resultEnv names.
type pairResult struct {
	Latency    []latencyRow    `json:",omitempty"`
	Throughput []throughputRow `json:",omitempty"`
	Reuse      []reuseRow      `json:",omitempty"`
	Loss       []lossRow       `json:",omitempty"`
	Recovery   []recoveryRow   `json:",omitempty"`
}

// pairResults has one part measured.
func pairResults(part string, runs int) (r pairResult, err error) {
	f, err := os.CreateTemp("", "tapverbs-bench-*.json")
	if err != nil {
		return r, err
	}
	defer os.Remove(f.Name())
	if err := f.Close(); err != nil {
		return r, err
	}
	if err := os.Setenv(resultEnv, f.Name()); err != nil {
		return r, err
	}
	if err := os.Setenv(partEnv, fmt.Sprintf("%s %d", part, runs)); err != nil {
		return r, err
	}
	status, err := twin.Enter()
	switch {
	case err != nil:
		return r, err
	case status != 0:
		return r, fmt.Errorf("the measurement ended with status %d", status)
	}
	b, err := os.ReadFile(filepath.Clean(f.Name()))
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(b, &r)
}

// pairPart has one part measured, prints its table and draws its plot.
func pairPart(part string, runs int, plots string) error {
	r, err := pairResults(part, runs)
	if err != nil {
		return err
	}
	switch part {
	case "latency":
		printLatency(os.Stdout, r.Latency)
		return plotLatency(plots, r.Latency)
	case "throughput":
		printThroughput(os.Stdout, r.Throughput)
		return plotThroughput(plots, r.Throughput)
	case "reuse":
		printReuse(os.Stdout, r.Reuse)
		return plotReuse(plots, r.Reuse)
	}
	printLoss(os.Stdout, r.Loss)
	return plotLoss(plots, r.Loss)
}

// measurePair is the peer's part.
func measurePair(m *machine, to, part string, runs int) error {
	p, err := newPeer(m, to)
	if err != nil {
		return err
	}
	defer p.conn.Close()
	var r pairResult
	switch part {
	case "latency":
		r.Latency, err = p.latencies(runs)
	case "throughput":
		r.Throughput, err = p.throughputs(runs)
	case "reuse":
		r.Reuse, err = p.reuses(runs)
	case "loss":
		r.Loss, err = p.losses(runs)
	case "recovery":
		r.Recovery, err = p.recovers(runs)
	default:
		err = fmt.Errorf("no part %q", part)
	}
	if err != nil {
		return err
	}
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return os.WriteFile(os.Getenv(resultEnv), b, 0o600)
}

// States of the owner's pages before a request reaches them.
const (
	stateResident = "resident"
	stateAbsent   = "absent"
	stateLimbo    = "limbo"
	stateStored   = "store"
)

var states = [...]string{stateResident, stateAbsent, stateLimbo, stateStored}

// opName names the two operations that are measured.
func opName(op qp.WROpcode) string {
	if op == qp.WRRead {
		return "READ"
	}
	return "WRITE"
}

// latencyRow is what single requests took.
type latencyRow struct {
	Op     string
	Size   int
	States [len(states)]stats.Micros
}

// latencySizes are what is measured: the operation, its bytes, and the bytes of the
// region that one round goes through.
var latencySizes = [...]struct {
	op     qp.WROpcode
	n      int
	region uint64
}{
	{qp.WRWrite, 4 << 10, 8 << 20},
	{qp.WRWrite, 64, 8 << 20},
	{qp.WRRead, 4 << 10, 8 << 20},
	{qp.WRWrite, 4 << 20, 64 << 20},
	{qp.WRRead, 4 << 20, 64 << 20},
}

// latencies times requests to pages in each state, one at a time, each page once a round.
func (p *peer) latencies(runs int) (out []latencyRow, err error) {
	for _, s := range latencySizes {
		row := latencyRow{Op: opName(s.op), Size: s.n}
		var h [len(states)]*stats.Latency
		for i := range h {
			h[i] = stats.NewLatency()
		}
		if err := p.region(order{Bytes: s.region}); err != nil {
			return nil, err
		}
		// A page a message, or as many as it has, in an order that nobody foresees.
		step := max(s.n, pageSize)
		rnd := rand.New(rand.NewPCG(1, uint64(s.n)))
		for range 4 * runs {
			// In turn, so that what else goes on in the machine meets all states alike.
			for i, st := range states {
				if _, err := p.tell(order{Do: "state", State: st, N: s.region}); err != nil {
					return nil, err
				}
				for _, k := range rnd.Perm(int(s.region) / step) {
					t, err := p.once(s.op, uint64(k*step), s.n)
					if err != nil {
						return nil, fmt.Errorf("%s of %d bytes, %s: %w", row.Op, s.n, st, err)
					}
					h[i].Add(int64(t))
				}
			}
		}
		for i := range h {
			row.States[i] = h[i].Micros()
		}
		out = append(out, row)
	}
	return out, nil
}

// throughputRow is the rate at a budget.
type throughputRow struct {
	Op      string
	Random  bool
	Percent int // of the working set that fits the budget; 0: no budget
	Gbps    float64
	Use     use // what it cost, in pages
}

const (
	workingSet   = 128 << 20
	streamSize   = 64 << 10 // bytes of a message
	streamDepth  = 16
	streamTime   = time.Second
	reuseRegion  = 4 << 20
	reusePasses  = 1000
	lossRegion   = 16 << 20
	lossSize     = 16 << 10
	lossRate     = 0.01
	lossMessages = 1000
)

// percents are the budgets.
var percents = [...]int{0, 100, 75, 50, 25}

// stream keeps streamDepth messages in flight; next gives where each goes, and whether
// there is one more. It gives the bytes that were moved and how long it took.
func (p *peer) stream(op qp.WROpcode, n int, next func() (off uint64, more bool)) (bytes uint64, took time.Duration, err error) {
	return p.streamOf(streamDepth, op, n, next)
}

// streamOf is stream with another number of messages in flight.
func (p *peer) streamOf(depth int, op qp.WROpcode, n int, next func() (off uint64, more bool)) (bytes uint64, took time.Duration, err error) {
	start := time.Now()
	flying := 0
	for more := true; more || flying > 0; {
		for more && flying < depth {
			var off uint64
			if off, more = next(); !more {
				break
			}
			if err := p.post(op, off, n); err != nil {
				return 0, 0, err
			}
			flying++
		}
		if flying == 0 {
			break
		}
		k, err := p.take()
		if err != nil {
			return 0, 0, err
		}
		flying -= k
		bytes += uint64(k * n)
	}
	return bytes, time.Since(start), nil
}

// throughputs moves messages within a working set that fits the budget in part.
func (p *peer) throughputs(runs int) (out []throughputRow, err error) {
	for _, c := range [...]struct {
		op     qp.WROpcode
		random bool
	}{{qp.WRWrite, false}, {qp.WRWrite, true}, {qp.WRRead, true}} {
		for _, pc := range percents {
			row := throughputRow{Op: opName(c.op), Random: c.random, Percent: pc}
			if err := p.region(order{Bytes: workingSet, Budget: uint64(pc) * workingSet / 100}); err != nil {
				return nil, err
			}
			if _, err := p.tell(order{Do: "state", State: stateResident, N: workingSet}); err != nil {
				return nil, err
			}
			rnd := rand.New(rand.NewPCG(2, 2))
			for range runs {
				i, end := -1, time.Now().Add(streamTime)
				bytes, took, err := p.stream(c.op, streamSize, func() (uint64, bool) {
					if i++; c.random {
						i = rnd.IntN(workingSet / streamSize)
					}
					return uint64(i%(workingSet/streamSize)) * streamSize, time.Now().Before(end)
				})
				if err != nil {
					return nil, fmt.Errorf("%s, budget of %d %%: %w", row.Op, pc, err)
				}
				row.Gbps = max(row.Gbps, float64(bytes)*8/float64(took))
			}
			a, err := p.tell(order{Do: "use"})
			if err != nil {
				return nil, err
			}
			row.Use = a.Use
			out = append(out, row)
		}
	}
	return out, nil
}

// reuseRow is the rate over the first passes through a region, from its first byte on.
type reuseRow struct {
	State string
	// Gbps is that over all passes so far, at each of reuseMarks.
	Gbps [len(reuseMarks)]float64
}

var reuseMarks = [...]int{1, 10, 100, reusePasses}

// reuses writes to a small region again and again.
func (p *peer) reuses(runs int) (out []reuseRow, err error) {
	for _, st := range states {
		row := reuseRow{State: st}
		for range runs {
			if err := p.region(order{Bytes: reuseRegion}); err != nil {
				return nil, err
			}
			if _, err := p.tell(order{Do: "state", State: st, N: reuseRegion}); err != nil {
				return nil, err
			}
			var took time.Duration
			mark := 0
			for pass := 1; pass <= reusePasses; pass++ {
				i := -1
				_, t, err := p.stream(qp.WRWrite, streamSize, func() (uint64, bool) {
					i++
					return uint64(i) * streamSize, i < reuseRegion/streamSize
				})
				if err != nil {
					return nil, fmt.Errorf("%s, pass %d, %v: %w", st, pass, took, err)
				}
				took += t
				if pass == reuseMarks[mark] {
					row.Gbps[mark] = max(row.Gbps[mark], float64(pass)*reuseRegion*8/float64(took))
					mark++
				}
			}
		}
		out = append(out, row)
	}
	return out, nil
}

// lossRow is the tail of requests that meet loss and a fault.
type lossRow struct {
	Op     string
	Policy string // of the region; "" for resident memory
	Loss   bool
	Times  stats.Micros
	Failed int // with an error: all with FaultError, and none else
}

// losses times requests on stored pages with frames lost, for each policy, and with
// either of the two alone.
func (p *peer) losses(runs int) (out []lossRow, err error) {
	if err := p.join(lossTimeout); err != nil {
		return nil, err
	}
	for _, op := range []qp.WROpcode{qp.WRWrite, qp.WRRead} {
		for _, loss := range []float64{lossRate, 0} {
			for _, policy := range append([]string{""}, policies[:]...) {
				n := runs * lossMessages
				if policy == "drop" {
					n /= 4 // each costs a timeout
				}
				row, err := p.lossy1(op, policy, loss, n)
				if err != nil {
					return nil, fmt.Errorf("%s, policy %q: %w", opName(op), policy, err)
				}
				out = append(out, row)
			}
		}
	}
	return out, p.faults(0)
}

func (p *peer) lossy1(op qp.WROpcode, policy string, loss float64, messages int) (lossRow, error) {
	row := lossRow{Op: opName(op), Policy: policy, Loss: loss > 0}
	if err := p.faults(0); err != nil {
		return row, err
	}
	if err := p.region(order{Bytes: lossRegion, Policy: policy}); err != nil {
		return row, err
	}
	h := stats.NewLatency()
	state := stateStored
	if policy == "" {
		state = stateResident
	}
	rnd := rand.New(rand.NewPCG(3, 3))
	for sent := 0; sent < messages; {
		if err := p.faults(0); err != nil {
			return row, err
		}
		if _, err := p.tell(order{Do: "state", State: state, N: lossRegion}); err != nil {
			return row, err
		}
		if err := p.faults(loss); err != nil {
			return row, err
		}
		for _, k := range rnd.Perm(lossRegion / lossSize) {
			if sent++; sent > messages {
				break
			}
			// Within the first and last page only a part is written: their content counts.
			t, err := p.once(op, uint64(k*lossSize+8), lossSize-16)
			// With FaultError the answer may be what is lost; it is not given twice.
			if err == badStatus(qp.WCRemOpErr) || err == badStatus(qp.WCRetryExcErr) {
				row.Failed++
				err = p.join(lossTimeout)
			} else {
				h.Add(int64(t))
			}
			if err != nil {
				return row, err
			}
		}
	}
	row.Times = h.Micros()
	return row, nil
}
