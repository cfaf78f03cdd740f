// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// aim is a row of the last table: a number, what it is compared with, and what the ratio
// should be at least, or at most. Without a number to compare with, the aim is for the number.
type aim struct {
	what   string
	of, to key
	or     []key // compared with the lower of these and to
	atMost bool
	aim    float64
}

func aims() (as []aim) {
	const m = 1 << 20
	super, iperf := k("raw super", "frames", 4096, gbps), k("tcp", "iperf3", 0, gbps)
	for _, w := range []struct{ who, name string }{{"pingpong", "pingpong"}, {"perftest", "ib_write_bw"}} {
		of := k(w.who, "write", m, gbps)
		as = append(as, aim{what: "RC WRITE, 1 MiB, " + w.name + ", of the raw device with super-frames", of: of, to: super, aim: 0.7},
			aim{what: "the same, of iperf3's TCP", of: of, to: iperf, aim: 1.2})
	}
	for _, who := range []string{"pingpong", "perftest"} {
		for _, op := range []string{"read", "send"} {
			as = append(as, aim{what: "RC " + strings.ToUpper(op) + ", 1 MiB, " + who + ", of WRITE", of: k(who, op, m, gbps), to: k(who, "write", m, gbps), aim: 0.9})
		}
	}
	pong, lat := k("pingpong", "write", 8, p50), k("perftest", "write latency", 8, p50)
	ping, asleep := k("raw vnet", "ping-pong", 8, p50), k("tcp", "sleep", 8, p50)
	as = append(as, []aim{
		{what: "WRITE of 64 B, depth 128, in lists of 16, pingpong, messages/s", of: k("pingpong", "write depth", 128, rate), aim: 4e6},
		{what: "the same, in lists of 64, ib_write_bw -l 64", of: k("perftest", "write list", 64, rate), aim: 4e6},
		{what: "WRITE of 64 B, ib_write_bw's own way, messages/s", of: k("perftest", "write", 64, rate), aim: 1.5e6},
		{what: "half round trip of 8 B WRITE, polling, p50, of raw ping-pong", of: pong, to: ping, atMost: true, aim: 2.5},
		{what: "the same, p99.9 of p50", of: k("pingpong", "write", 8, p999), to: pong, atMost: true, aim: 10},
		{what: "the same, ib_write_lat, of raw ping-pong", of: lat, to: ping, atMost: true, aim: 2.5},
		{what: "the same, ib_write_lat, p99.9 of p50", of: k("perftest", "write latency", 8, p999), to: lat, atMost: true, aim: 10},
		{what: "the same, pingpong, of TCP's, polling", of: pong, to: k("tcp", "poll", 8, p50), atMost: true, aim: 0.5},
		{what: "the same, of libfabric tcp's mean", of: pong, to: k("libfabric tcp", "send", 8, mean), atMost: true, aim: 0.5},
		{what: "the same, of UCX over TCP, the faster of put and tag", of: pong, to: k("ucx tcp", "write", 8, p50), or: []key{k("ucx tcp", "send", 8, p50)}, atMost: true, aim: 0.5},
		{what: "8 B, both ends sleeping, WRITE with immediate, of TCP's", of: k("pingpong", "write-imm events", 8, p50), to: asleep, atMost: true, aim: 1},
		{what: "the same, SEND", of: k("pingpong", "send events", 8, p50), to: asleep, atMost: true, aim: 1},
		{what: "the same, ib_send_lat -e", of: k("perftest", "send events", 8, p50), to: asleep, atMost: true, aim: 1},
		{what: "WRITE 1 MiB into cold memory, of resident", of: k("pingpong", "write cold", m, gbps), to: k("pingpong", "write", m, gbps), aim: 0.9},
		{what: "1 % of the packets lost, WRITE 1 MiB, of no loss", of: k("loss", "packets", m, gbps), to: k("loss", "none", m, gbps), aim: 0.4},
		{what: "1 % of the (super-)frames lost, the same", of: k("loss", "frames", m, gbps), to: k("loss", "none", m, gbps), aim: 0.4},
		{what: "CPU per GiB, both processes, ib_write_bw, of iperf3's", of: k("perftest", "write", m, cpuGiB), to: k("tcp", "iperf3", 0, cpuGiB), atMost: true, aim: 1},
		{what: "the same, the whole machine", of: k("perftest", "write", m, allGiB), to: k("tcp", "iperf3", 0, allGiB), atMost: true, aim: 1},
		{what: "two shards on 2 CPUs, 64 B of two threads, messages/s, of one", of: k("shards", "write", 2, rate), to: k("shards", "write", 1, rate), aim: 1},
		{what: "idle, a Go program, context switches a second", of: k("idle", idleLines[0].what, 0, switches), atMost: true},
		{what: "the same, a C program", of: k("idle", "c", 0, switches), atMost: true},
	}...)
	for _, g := range guestRuns {
		as = append(as, aim{what: "in one guest, " + g.name() + ", of rxe's", of: k("guest tapverbs", g.what, g.size, g.metric()),
			to: k("guest rxe", g.what, g.size, g.metric()), atMost: g.metric() == p50, aim: 1})
	}
	return as
}

// others are the numbers that it is compared with.
func (a *aim) others() []key {
	if a.to == (key{}) {
		return nil
	}
	return append([]key{a.to}, a.or...)
}

// printAims prints what was aimed at and what was reached. The ratio is the median of the
// rounds' ratios.
func (b *book) printAims(w io.Writer, only []string) {
	head := "| what | aim | reached | from | to | |\n|---|---:|---:|---:|---:|---|\n"
	for _, a := range aims() {
		if !slices.Contains(only, partOf(a.of)) {
			continue
		}
		sign, got, to := "≥", b.median(a.of), ""
		if a.atMost {
			sign = "≤"
		}
		others := a.others()
		if others != nil {
			got, to = b.ratio(a.of, others...), number(median(b.lowest(others)))+" "+unit(a.to.Metric)
		}
		verdict := "reached"
		switch {
		case math.IsNaN(got):
			verdict = "not run: " + b.reason(append([]key{a.of}, others...), only)
		case a.atMost && got > a.aim, !a.atMost && got < a.aim:
			verdict = "missed"
		}
		if n := b.rounds(append([]key{a.of}, others...)); n != "" && !math.IsNaN(got) {
			verdict += ", " + n
		}
		fmt.Fprintf(w, "%s| %s | %s %s | %s | %s %s | %s | %s |\n", head, a.what, sign, number(a.aim), number(got), number(b.median(a.of)), unit(a.of.Metric), to, verdict)
		head = ""
	}
}

// unit is what a metric is counted in.
func unit(metric string) string {
	switch metric {
	case gbps:
		return "Gbit/s"
	case p50, p99, p999, mean:
		return "µs"
	case cpuGiB, allGiB:
		return "s/GiB"
	}
	return metric
}

// reason says why one of some numbers is missing.
func (b *book) reason(ks []key, only []string) string {
	for _, k := range ks {
		if why, n := b.failed(k); n > 0 {
			return short(why)
		}
		if p := partOf(k); !slices.Contains(only, p) {
			return "the part " + p + " was not asked for"
		}
	}
	return "no round has all that is compared"
}

// rounds says in how many rounds all of some numbers are, if something failed in others.
func (b *book) rounds(ks []key) string {
	failed, n := 0, 0
	for _, k := range ks {
		_, f := b.failed(k)
		failed = max(failed, f)
	}
	for i := range b.Rounds {
		if !slices.ContainsFunc(ks, func(k key) bool { return math.IsNaN(b.values(k)[i]) }) {
			n++
		}
	}
	if failed == 0 {
		return ""
	}
	return fmt.Sprintf("%d of %d rounds", n, n+failed)
}
