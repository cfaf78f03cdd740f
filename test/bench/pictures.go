// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math"
	"os"
)

// What is drawn of the comparison.

// curves are a metric of some lines over x; a line with one point or none is left out.
func (b *book) curves(xs []int, metric string, lines ...line) (cs []curve) {
	for _, l := range lines {
		c := curve{name: l.name}
		for _, x := range xs {
			if v := b.median(l.key(x, metric)); !math.IsNaN(v) {
				c.at = append(c.at, point{float64(x), v})
			}
		}
		if len(c.at) > 1 {
			cs = append(cs, c)
		}
	}
	return cs
}

// level is one number, drawn from end to end; nothing if it is not there.
func (b *book) level(name string, xs []int, key key) []curve {
	v := b.median(key)
	if math.IsNaN(v) {
		return nil
	}
	return []curve{{name, []point{{float64(xs[0]), v}, {float64(xs[len(xs)-1]), v}}}}
}

func ticks(xs []int, name func(int) string) (ts []tick) {
	for _, x := range xs {
		ts = append(ts, tick{float64(x), name(x)})
	}
	return ts
}

// named gives the lines of some names.
func named(lines []line, names ...string) (out []line) {
	for _, n := range names {
		for _, l := range lines {
			if l.name == n {
				out = append(out, l)
			}
		}
	}
	return out
}

// draw draws the plots; one for which nothing was measured is left as it is.
func (b *book) draw(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	bandwidth := b.curves(sizes, gbps, named(bandwidthLines, "raw, super-frames", "raw, single frames", "WRITE", "SEND", "READ", "WRITE to cold memory",
		"ib_write_bw", "TCP, iperf3 -l", "UCX over TCP, put", "libfabric tcp, one at a time")...)
	half := func(metric string) []curve {
		cs := b.curves(sizes, metric, named(latencyLines, "raw, single frames", "WRITE", "SEND", "READ (whole)", "ib_write_lat", "TCP, both poll", "TCP, both sleep")...)
		if metric == p50 {
			cs = append(cs, b.curves(tripSizes, p50, named(latencyLines, "UCX over TCP, tag", "UCX over TCP, put")...)...)
			cs = append(cs, b.curves(tripSizes, mean, line{"libfabric tcp (mean)", "libfabric tcp", "send"})...)
		}
		return cs
	}
	depth := b.curves(depths, rate, depthLines...)
	for _, l := range []struct {
		name string
		key
	}{
		{"raw, super-frames (packets)", k("raw super", "frames", 64, rate)}, {"raw, single frames (packets)", k("raw vnet", "frames", 64, rate)},
		{"UCX over TCP, put", k("ucx tcp", "write", 64, rate)}, {"ib_write_bw -l 64", k("perftest", "write list", 64, rate)},
	} {
		depth = append(depth, b.level(l.name, depths, l.key)...)
	}
	overSize := ticks(sizes, size)
	for _, p := range []struct {
		name string
		picture
	}{
		{"bandwidth", picture{title: "Bandwidth over the size of messages", y: "Gbit/s", logX: true, logY: true, ticks: overSize, curves: bandwidth}},
		{"latency-p50", picture{title: "Half round trip over the size of messages, p50", y: "µs", logX: true, logY: true, ticks: overSize, curves: half(p50)}},
		{"latency-p999", picture{title: "Half round trip over the size of messages, p99.9", y: "µs", logX: true, logY: true, ticks: overSize, curves: half(p999)}},
		{"depth", picture{title: "WRITEs of 64 bytes over how many are in flight", y: "messages/s", logX: true, logY: true, ticks: ticks(depths, plain), curves: depth}},
		{"queue-pairs", picture{title: "CPU of a message over the number of queue pairs", y: "ns, both ends", logX: true, ticks: ticks(manyQPs, plain),
			curves: b.curves(manyQPs, cpuMsg, line{"WRITE of 64 B", "queue pairs", "write"})}},
	} {
		if len(p.curves) == 0 {
			continue
		}
		if err := draw(dir, p.name, p.picture); err != nil {
			return err
		}
	}
	if err := b.drawCPU(dir); err != nil {
		return err
	}
	if err := b.drawShards(dir); err != nil {
		return err
	}
	return b.drawGuest(dir)
}

// drawCPU draws what a GiB costs, of those who said.
func (b *book) drawCPU(dir string) error {
	own, all := bars{name: "both processes"}, bars{name: "the whole machine"}
	var names []string
	for _, l := range cpuLines {
		v, w := b.median(l.of(cpuGiB)), b.median(l.of(allGiB))
		if math.IsNaN(v) || math.IsNaN(w) {
			continue
		}
		names = append(names, l.name)
		own.at, all.at = append(own.at, v), append(all.at, w)
	}
	if names == nil {
		return nil
	}
	return drawBars(dir, "cpu", "CPU for a GiB", "s", names, own, all)
}

// drawGuest draws how many times as fast tapverbs is as the kernel's soft-RoCE in the same guest.
func (b *book) drawGuest(dir string) error {
	names, at := b.ofRXE()
	if names == nil {
		return nil
	}
	return drawBars(dir, "guest", "tapverbs, of the kernel's soft-RoCE in one guest: more is better", "times", names, bars{"as fast as rxe", at})
}

// ofRXE gives how many times as fast each run in the guest is, of those that both have.
func (b *book) ofRXE() (names []string, at []float64) {
	for _, g := range guestRuns {
		ours, theirs := k("guest tapverbs", g.what, g.size, g.metric()), k("guest rxe", g.what, g.size, g.metric())
		if g.metric() == p50 {
			ours, theirs = theirs, ours
		}
		if v := b.ratio(ours, theirs); !math.IsNaN(v) {
			names, at = append(names, g.name()), append(at, v)
		}
	}
	return names, at
}
