// SPDX-License-Identifier: Apache-2.0

// Package stats sums up measured times.
package stats

import (
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Longest is the longest time that a Latency tells apart, in nanoseconds; what is
// longer counts as this long in the percentiles, not in Max.
const Longest = int64(60 * time.Second)

// Latency collects times in nanoseconds. Percentiles are those of a histogram
// with three significant digits (0.1 %), Min and Max are exact. Adding allocates
// nothing. It is for one goroutine at a time.
type Latency struct {
	h        *hdrhistogram.Histogram
	min, max int64
}

// NewLatency gives an empty collection.
func NewLatency() *Latency {
	return &Latency{h: hdrhistogram.New(1, Longest, 3)}
}

// Add records one time of ns nanoseconds; what is below 1 counts as 1.
func (l *Latency) Add(ns int64) {
	ns = max(ns, 1)
	if l.h.TotalCount() == 0 || ns < l.min {
		l.min = ns
	}
	l.max = max(l.max, ns)
	// The only error is a value out of range, which min rules out.
	_ = l.h.RecordValue(min(ns, Longest))
}

// Count is the number of recorded times.
func (l *Latency) Count() int64 { return l.h.TotalCount() }

// Micros is a summary in microseconds, with the field names of the JSON report.
type Micros struct {
	Min  float64 `json:"min"`
	P50  float64 `json:"p50"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p999"`
	Max  float64 `json:"max"`
}

// Micros sums up what was added; all zero when nothing was. Percentiles are held
// between the exact Min and Max, so that Min ≤ P50 ≤ P99 ≤ P999 ≤ Max always.
func (l *Latency) Micros() Micros {
	if l.Count() == 0 {
		return Micros{}
	}
	at := func(q float64) float64 {
		return float64(min(max(l.h.ValueAtQuantile(q), l.min), l.max)) / 1e3
	}
	return Micros{
		Min: float64(l.min) / 1e3, P50: at(50), P99: at(99), P999: at(99.9),
		Max: float64(l.max) / 1e3,
	}
}
