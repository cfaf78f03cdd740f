// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// k is a key in one line.
func k(who, what string, x int, metric string) key { return key{who, what, x, metric} }

// dash is what is not measured.
const dash = "–"

// number prints a value with three digits or so; what is not there is a dash.
func number(v float64) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v) || math.IsInf(v, 0):
		return dash
	case v == 0:
		return "0"
	case a >= 1e6:
		return fmt.Sprintf("%.2f M", v/1e6)
	case a >= 100:
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a < 0.1:
		return fmt.Sprintf("%.3f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}

// line is a row of a table: a name, and where its numbers are.
type line struct {
	name      string
	who, what string
}

// key is a number of the line. The raw device moves packets: messages that are longer than one
// are so many of 4 KiB.
func (l line) key(x int, metric string) key {
	if strings.HasPrefix(l.who, "raw ") && metric == gbps {
		x = min(x, 4096)
	}
	return k(l.who, l.what, x, metric)
}

// table prints a metric of some lines over x, those whose part was asked for.
func (b *book) table(w io.Writer, title string, xs []int, name func(int) string, metric string, lines []line, only []string) {
	var rows strings.Builder
	for _, l := range lines {
		if !slices.Contains(only, partOf(l.key(xs[0], metric))) {
			continue
		}
		row, any, last := "", false, ""
		for _, x := range xs {
			c := b.cell(l.key(x, metric))
			any = any || c != dash
			if c == last && strings.HasPrefix(c, "not run") {
				c = "″"
			} else {
				last = c
			}
			row += " " + c + " |"
		}
		if any { // else it has other numbers
			fmt.Fprintf(&rows, "| %s |%s\n", l.name, row)
		}
	}
	if rows.Len() == 0 {
		return
	}
	fmt.Fprintf(w, "| %s |", title)
	for _, x := range xs {
		fmt.Fprintf(w, " %s |", name(x))
	}
	fmt.Fprintf(w, "\n|---|%s\n%s\n", strings.Repeat("---:|", len(xs)), rows.String())
}

func size(n int) string { return sizeString(uint64(n)) }

func plain(n int) string { return fmt.Sprint(n) }

// The lines of the tables and plots.
var (
	rawLines = []line{
		{"raw, super-frames", "raw super", "frames"},
		{"raw, single frames", "raw vnet", "frames"},
		{"raw, plain frames", "raw plain", "frames"},
	}
	bandwidthLines = append(rawLines[:3:3], []line{
		{"WRITE", "pingpong", "write"},
		{"SEND", "pingpong", "send"},
		{"READ", "pingpong", "read"},
		{"WRITE to cold memory", "pingpong", "write cold"},
		{"ib_write_bw", "perftest", "write"},
		{"ib_write_bw -l 64", "perftest", "write list"},
		{"ib_send_bw", "perftest", "send"},
		{"ib_read_bw", "perftest", "read"},
		{"TCP, iperf3 -l", "tcp", "iperf3 -l"},
		{"UCX over TCP, put", "ucx tcp", "write"},
		{"libfabric tcp, one at a time", "libfabric tcp", "send"},
	}...)
	latencyLines = []line{
		{"raw, single frames", "raw vnet", "ping-pong"},
		{"raw, plain frames", "raw plain", "ping-pong"},
		{"WRITE", "pingpong", "write"},
		{"SEND", "pingpong", "send"},
		{"READ (whole)", "pingpong", "read"},
		{"WRITE with immediate, both sleep", "pingpong", "write-imm events"},
		{"SEND, both sleep", "pingpong", "send events"},
		{"ib_write_lat", "perftest", "write latency"},
		{"ib_send_lat", "perftest", "send latency"},
		{"ib_send_lat -e", "perftest", "send events"},
		{"ib_read_lat", "perftest", "read latency"},
		{"TCP, both poll", "tcp", "poll"},
		{"TCP, both sleep", "tcp", "sleep"},
		{"UCX over TCP, tag", "ucx tcp", "send"},
		{"UCX over TCP, put", "ucx tcp", "write"},
	}
	meanLines = []line{
		{"TCP, both poll", "tcp", "poll"},
		{"libfabric tcp, fi_pingpong", "libfabric tcp", "send"},
		{"UCX over TCP, tag", "ucx tcp", "send"},
		{"UCX over TCP, put", "ucx tcp", "write"},
	}
	depthLines = []line{
		{"WRITE of 64 B, pingpong", "pingpong", "write depth"},
		{"ib_write_bw -s 64 -t", "perftest", "write depth"},
	}
)

// cpuLine is what a GiB costs somebody.
type cpuLine struct {
	name string
	key  // without the metric
}

var cpuLines = []cpuLine{
	{"raw, super-frames", k("raw super", "frames", 4096, "")},
	{"raw, single frames", k("raw vnet", "frames", 4096, "")},
	{"ib_write_bw", k("perftest", "write", 1<<20, "")},
	{"ib_send_bw -e", k("perftest", "send events", 1<<20, "")},
	{"TCP, iperf3", k("tcp", "iperf3", 0, "")},
	{"UCX over TCP, put", k("ucx tcp", "write", 1<<20, "")},
	{"libfabric tcp", k("libfabric tcp", "send", 1<<20, "")},
}

func (l cpuLine) of(metric string) key {
	l.Metric = metric
	return l.key
}

// section is some tables that belong together; README.md has a place for each.
type section struct {
	name  string
	print func(b *book, w io.Writer, only []string)
}

var sections = []section{
	{"run", (*book).printRun},
	{"reached", (*book).printAims},
	{"bandwidth", (*book).printBandwidth},
	{"rate", (*book).printRates},
	{"latency", (*book).printLatency},
	{"cpu", (*book).printCPU},
	{"many", (*book).printMany},
	{"loss", (*book).printLoss},
	{"shards", (*book).printShards},
	{"idle", (*book).printIdle},
	{"c", (*book).printC},
	{"profile", (*book).printProfile},
	{"guest", (*book).printGuest},
}

// print prints everything, what was aimed at last.
func (b *book) print(w io.Writer, only []string) {
	for i := range sections {
		s := sections[(i+2)%len(sections)]
		if text := b.text(s, only); text != "" {
			fmt.Fprintf(w, "\n%s\n", text)
		}
	}
	b.printFailures(w)
}

// printFailures prints what did not run in full, which the cells have no room for.
func (b *book) printFailures(w io.Writer) {
	for _, f := range b.Failures {
		what := strings.Join(strings.Fields(f.Part+" "+f.Who+" "+f.What), " ")
		if f.X > 0 {
			what += fmt.Sprint(" ", f.X)
		}
		fmt.Fprintf(w, "\nround %d, %s: %s\n", f.Round+1, what, f.Why)
	}
}

// text is a section; "" if nothing of it was asked for.
func (b *book) text(s section, only []string) string {
	var w strings.Builder
	s.print(b, &w, only)
	return strings.TrimSpace(w.String())
}

func (b *book) printRun(w io.Writer, _ []string) {
	if b.Started == "" {
		return
	}
	fmt.Fprintf(w, "%s, commit %.12s; Linux %s, %d CPUs (%s), load %s before the rounds, medians of %d rounds",
		b.Started[:10], b.Commit, b.Kernel, b.CPUs, b.CPU, strings.Join(b.Load, ", "), b.Rounds)
	for _, p := range packages {
		fmt.Fprintf(w, ", %s %s", p, b.Versions[p])
	}
	fmt.Fprintln(w, ".")
}

func (b *book) printBandwidth(w io.Writer, only []string) {
	b.table(w, "Gbit/s", sizes, size, gbps, bandwidthLines, only)
	if slices.Contains(only, "tcp") {
		fmt.Fprintf(w, "iperf3 with its defaults (128 KiB at a time): %s Gbit/s.\n", b.cell(k("tcp", "iperf3", 0, gbps)))
	}
}

func (b *book) printRates(w io.Writer, only []string) {
	b.table(w, "messages/s (raw: packets)", []int{8, 64, 512, 4 << 10}, size, rate, bandwidthLines, only)
	b.table(w, "messages/s, by how many are in flight", depths, plain, rate, depthLines, only)
}

func (b *book) printLatency(w io.Writer, only []string) {
	for _, m := range []struct{ title, metric string }{{"half round trip, p50, µs", p50}, {"p99.9, µs", p999}} {
		b.table(w, m.title, tripSizes, size, m.metric, latencyLines, only)
	}
	b.table(w, "half round trip, mean, µs", tripSizes, size, mean, meanLines, only)
}

func (b *book) printCPU(w io.Writer, only []string) {
	var rows strings.Builder
	for _, l := range cpuLines {
		if slices.Contains(only, partOf(l.of(cpuGiB))) {
			fmt.Fprintf(&rows, "| %s | %s | %s |\n", l.name, b.cell(l.of(cpuGiB)), b.cell(l.of(allGiB)))
		}
	}
	if rows.Len() > 0 {
		fmt.Fprintf(w, "| CPU seconds for a GiB | both processes | the whole machine |\n|---|---:|---:|\n%s", rows.String())
	}
}

func (b *book) printMany(w io.Writer, only []string) {
	if !slices.Contains(only, "many") {
		return
	}
	fmt.Fprint(w, "| queue pairs |")
	for _, n := range manyQPs {
		fmt.Fprintf(w, " %d |", n)
	}
	fmt.Fprintf(w, "\n|---|%s\n", strings.Repeat("---:|", len(manyQPs)))
	for _, l := range []struct{ name, what, metric string }{
		{"resident bytes of one, where it is asked", "owner", memory},
		{"resident bytes of one, where it asks", "peer", memory},
		{"WRITEs of 64 B in turn, messages/s", "write", rate},
		{"the same, CPU of both ends, ns a message", "write", cpuMsg},
	} {
		fmt.Fprintf(w, "| %s |", l.name)
		for _, n := range manyQPs {
			fmt.Fprintf(w, " %s |", b.cell(k("queue pairs", l.what, n, l.metric)))
		}
		fmt.Fprintln(w)
	}
}

func (b *book) printLoss(w io.Writer, only []string) {
	b.table(w, "WRITEs of 1 MiB, Gbit/s", []int{recoverySize}, size, gbps, []line{
		{"nothing lost", "loss", "none"}, {"1 % of the packets", "loss", "packets"}, {"1 % of the (super-)frames", "loss", "frames"}}, only)
}

func (b *book) printC(w io.Writer, only []string) {
	if !slices.Contains(only, "c") {
		return
	}
	fmt.Fprint(w, "| the C side, one thread | ns |\n|---|---:|\n")
	for _, c := range cCalls {
		fmt.Fprintf(w, "| %s | %s |\n", c, b.cell(k("c", c, 0, callNs)))
	}
}
