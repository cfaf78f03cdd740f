// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math"
	"os"
	"path/filepath"
	"testing"
)

// printed is what a program printed once.
func printed(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestParsePerftest(t *testing.T) {
	g, n, err := perftestBW(printed(t, "ib_write_bw.txt"), 64)
	if err != nil || g != 0.046195 || n != 90224 {
		t.Errorf("ib_write_bw: %v Gbit/s, %v messages/s, %v", g, n, err)
	}
	a, c, d, err := perftestLat(printed(t, "ib_write_lat.txt"), 8)
	if err != nil || a != 388.29 || c != 12691.54 || d != 207416.41 {
		t.Errorf("ib_write_lat: %v %v %v, %v", a, c, d, err)
	}
	if _, _, err := perftestBW(printed(t, "ib_write_bw.txt"), 128); err == nil {
		t.Error("a row for a size that there is not")
	}
	if _, _, err := perftestBW(" 64 1000 inf inf inf\n", 64); err == nil {
		t.Error("a row of a misjudged clock is taken")
	}
}

func TestParseIperf3(t *testing.T) {
	g, bytes, err := iperf3Result(printed(t, "iperf3.json"))
	if err != nil || math.Abs(g-7.323978769) > 1e-8 || bytes != 916062208 {
		t.Errorf("%v Gbit/s, %v bytes, %v", g, bytes, err)
	}
	for _, bad := range []string{"", "{}", `{"error": "unable to connect"}`} {
		if _, _, err := iperf3Result(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func TestParseFiPingpong(t *testing.T) {
	for n, want := range map[int][2]float64{8: {229.77, 0.03}, 4096: {11.01, 372.09}, 1 << 20: {418.91, 2503.13}} {
		if v, mb, err := fiPingpong(printed(t, "fi_pingpong.txt"), n); err != nil || v != want[0] || mb != want[1] {
			t.Errorf("%d bytes: %v µs, %v MB/s, %v", n, v, mb, err)
		}
	}
	if _, _, err := fiPingpong(printed(t, "fi_pingpong.txt"), 5); err == nil {
		t.Error("a row for a size that there is not")
	}
}

func TestParseUCX(t *testing.T) {
	r, err := ucxPerftest(printed(t, "ucx_perftest.txt"))
	if err != nil || r.Percentile != 6.933 || r.Mean != 581.863 || r.Rate != 1719 || math.Abs(r.Gbps-83886.08e-9) > 1e-12 {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := ucxPerftest("no such device\n"); err == nil {
		t.Error("nothing is taken for a result")
	}
}

func TestParseTCPPing(t *testing.T) {
	if v, err := tcpPing("4.825 17.4 60.1 7.5\n"); err != nil || v != [4]float64{4.825, 17.4, 60.1, 7.5} {
		t.Errorf("%v, %v", v, err)
	}
	if _, err := tcpPing("recv: Connection reset by peer\n"); err == nil {
		t.Error("an error is taken for a result")
	}
}

func TestBook(t *testing.T) {
	b := newBook(4)
	ours, theirs := key{"a", "write", 8, gbps}, key{"b", "write", 8, gbps}
	// Everything is slow in the third round; in the fourth, the other one did not run.
	for i, v := range [][2]float64{{8, 10}, {9, 10}, {4, 5}, {8, 0}} {
		b.round = i
		b.add(ours.Who, ours.What, ours.X, ours.Metric, v[0])
		if v[1] > 0 {
			b.add(theirs.Who, theirs.What, theirs.X, theirs.Metric, v[1])
		}
	}
	if m := b.median(ours); m != 8 {
		t.Errorf("the median of 8, 9, 4 and 8 is %v", m)
	}
	if m := b.median(theirs); m != 10 {
		t.Errorf("the median of 10, 10 and 5 is %v", m)
	}
	if r := b.ratio(ours, theirs); r != 0.8 {
		t.Errorf("the median of 0.8, 0.9 and 0.8 is %v", r)
	}
	if m := b.median(key{"c", "write", 8, gbps}); !math.IsNaN(m) {
		t.Errorf("nobody's median is %v", m)
	}
}
