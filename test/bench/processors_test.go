// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

// rates simulates a load with some numbers of shards.
func rates(t *testing.T, what string, ns ...int) map[int]float64 {
	t.Helper()
	out := map[int]float64{}
	for i := range simLoads {
		if l := &simLoads[i]; l.what == what {
			for _, n := range ns {
				v, err := simulate(l, n)
				if err != nil {
					t.Fatalf("%s, %d shards: %v", l.name, n, err)
				}
				out[n] = v
			}
			t.Logf("%s: %v", l.name, out)
		}
	}
	return out
}

// N shards with a processor each do N times as much as one, in virtual time: nothing of what they share makes
// them wait, as long as the window does not.
func TestShardsScale(t *testing.T) {
	most := map[string]int{"write": 16, "write 4K": 4}
	if raceDetector { // it is all one thread
		most = map[string]int{"write": 4}
	}
	for what, most := range most {
		v := rates(t, what, 1, 2, most)
		for n, got := range v {
			if got < 0.9*float64(n)*v[1] || got > 1.1*float64(n)*v[1] {
				t.Errorf("%s: %d shards do %.2f times as much as one", what, n, got/v[1])
			}
		}
	}
	// One does what its processor can.
	if got := rates(t, "write", 1)[1] * 656e-9; got < 0.9 || got > 1.05 {
		t.Errorf("one shard: %.2f of what a processor does", got)
	}
}

// What makes shards wait: a round trip that is longer than the window they share, frames that come to another's
// queue, a completion queue that keeps all queue pairs in one shard.
func TestShardsShareLimits(t *testing.T) {
	if v := rates(t, "write one CQ", 1, 8); v[8] > 1.2*v[1] || v[8] < 0.8*v[1] {
		t.Errorf("one completion queue: %v", v)
	}
	if raceDetector {
		return
	}
	// 768 packets are on their way for 100 µs, and what it takes to write them.
	if v := rates(t, "write far", 1, 8); v[8] > 768/100e-6 || v[8] < 768/150e-6 || v[8] > 0.8*8*v[1] {
		t.Errorf("far away: %v", v)
	}
	if v := rates(t, "write flows", 1, 8); v[8] > 0.8*8*v[1] || v[8] < 2*v[1] {
		t.Errorf("without the program: %v", v)
	}
}
