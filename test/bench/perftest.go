// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
)

// perftest, Debian's, unmodified, on libibverbs.so.1: tapverbs run makes it one end on a port.

// perfRun is a run of one of perftest's programs.
type perfRun struct {
	what string
	size int
	args string
}

// perfRuns are the runs of a round: WRITE over all sizes, the others where there is an aim. The
// messages of a run are so many that it takes a good fraction of a second.
func perfRuns() (runs []perfRun) {
	for _, n := range sizes {
		runs = append(runs, perfRun{"write", n, fmt.Sprintf("ib_write_bw -n %d", min(200000, 640<<20/n))})
	}
	runs = append(runs,
		perfRun{"send", 1 << 20, "ib_send_bw -n 1000"},
		perfRun{"read", 1 << 20, "ib_read_bw -n 1000"},
		perfRun{"write list", 64, "ib_write_bw -n 409600 -l 64 -t 128"})
	for _, n := range sizes[:5] {
		runs = append(runs, perfRun{"write latency", n, "ib_write_lat -n 5000"})
	}
	return append(runs,
		perfRun{"send latency", 8, "ib_send_lat -n 10000"},
		perfRun{"send events", 8, "ib_send_lat -n 5000 -e"},
		perfRun{"read latency", 8, "ib_read_lat -n 10000"})
}

// perf runs one of perftest's programs between the two ports.
func (r *room) perf(p perfRun) (outcome, error) {
	if err := there(strings.Fields(p.args)[0]); err != nil {
		return outcome{}, err
	}
	end := func(i int, more ...string) command {
		return command{at: r.here, args: append(r.perfLine(p, i), more...)}
	}
	return pair(end(0), end(1, "127.0.0.1"), oobPort)
}

// perfLine is the command of one end.
func (r *room) perfLine(p perfRun, i int) []string {
	args := []string{filepath.Join(r.bin, "tapverbs"), "run", "-port", r.ports[i].Name, "--"}
	args = append(args, strings.Fields(p.args)...)
	args = append(args, "-F", "-x", "1", "-s", strconv.Itoa(p.size))
	if strings.Contains(p.args, "_bw") {
		args = append(args, "--report_gbits")
	}
	return args
}

// enter puts what a program of perftest printed into the book.
func (p perfRun) enter(b *book, who, out string) error {
	if strings.Contains(p.args, "_bw") {
		g, n, err := perftestBW(out, p.size)
		if err == nil {
			b.add(who, p.what, p.size, gbps, g)
			b.add(who, p.what, p.size, rate, n)
		}
		return err
	}
	a, c, d, err := perftestLat(out, p.size)
	if err == nil {
		b.add(who, p.what, p.size, p50, a)
		b.add(who, p.what, p.size, p99, c)
		b.add(who, p.what, p.size, p999, d)
	}
	return err
}

// perftestPart measures all; a run that fails leaves the others alone.
func perftestPart(r *room, b *book) error {
	for _, p := range perfRuns() {
		o, err := r.perf(p)
		if err == nil {
			err = p.enter(b, "perftest", o.client)
		}
		b.try("perftest", key{Who: "perftest", What: p.what, X: p.size}, err)
	}
	return nil
}

// perfDepth is ib_write_bw with so many messages of 64 bytes in flight.
func (r *room) perfDepth(b *book, depth int) error {
	n := 100000
	if depth < 16 {
		n = 20000
	}
	o, err := r.perf(perfRun{size: 64, args: fmt.Sprintf("ib_write_bw -n %d -t %d", n, depth)})
	if err != nil {
		return err
	}
	_, v, err := perftestBW(o.client, 64)
	if err == nil {
		b.add("perftest", "write depth", depth, rate, v)
	}
	return err
}
