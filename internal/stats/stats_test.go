// SPDX-License-Identifier: Apache-2.0

package stats

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestMicrosMatchesSortedSamples(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	l := NewLatency()
	var all []int64
	for range 20000 {
		ns := int64(math.Exp(rnd.NormFloat64()*1.5 + 9))
		all = append(all, ns)
		l.Add(ns)
	}
	slices.Sort(all)
	m := l.Micros()
	near := func(name string, got, q float64) {
		want := float64(all[int(math.Ceil(q*float64(len(all))))-1]) / 1e3
		if math.Abs(got-want) > 0.002*want+0.001 {
			t.Errorf("%s = %g µs, sorted samples say %g µs", name, got, want)
		}
	}
	near("p50", m.P50, 0.5)
	near("p99", m.P99, 0.99)
	near("p99.9", m.P999, 0.999)
	if m.Min != float64(all[0])/1e3 || m.Max != float64(all[len(all)-1])/1e3 {
		t.Errorf("min, max = %g, %g; want exactly %d, %d ns", m.Min, m.Max, all[0], all[len(all)-1])
	}
}

func TestEdges(t *testing.T) {
	l := NewLatency()
	if m := l.Micros(); m != (Micros{}) {
		t.Errorf("empty: %+v", m)
	}
	l.Add(-5)
	l.Add(int64(2 * time.Minute))
	m := l.Micros()
	if m.Min != 0.001 || m.Max != 120e6 || l.Count() != 2 {
		t.Errorf("clamped: %+v, count %d", m, l.Count())
	}
	if !(m.Min <= m.P50 && m.P50 <= m.P99 && m.P99 <= m.P999 && m.P999 <= m.Max) {
		t.Errorf("not in order: %+v", m)
	}
}

func TestAddAllocatesNothing(t *testing.T) {
	l := NewLatency()
	ns := int64(1)
	if n := testing.AllocsPerRun(1000, func() { l.Add(ns); ns = ns*3%1000003 + 1 }); n != 0 {
		t.Errorf("%v allocations per Add", n)
	}
}
