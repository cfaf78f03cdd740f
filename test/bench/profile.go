// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"math"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Where the time of a packet goes: both ends of a run are sampled by perf, by the clock of the
// processor that they are on, 4000 times a second; asleep they are not.

const (
	samplePeriod = "250000" // ns
	// catAll is all of a packet's processor time.
	catAll = "all"
)

// costOf is the metric of a category.
func costOf(category string) string { return "ns/packet: " + category }

// profiled is a run that is sampled.
type profiled struct {
	name  string
	flags []string // of pingpong's client
	// inner is the function of pingpong's client that does what is meant. For perftest it is what writes to the TAP:
	// what counts is from the first frame to the last, without what it does to start and to find out the
	// clock's rate.
	inner   string
	perf    perfRun
	packets float64 // that carry data, at one end: sent, received or both
}

// profiledRuns are sampled. A round trip is a packet out and one in at both ends; a message of
// 1 MiB is 256 packets. The rest of a run, which is there to verify data, is left out.
func profiledRuns() []profiled {
	pong := func(size string, iters int) []string {
		return []string{"-op", "write", "-mr", "resident", "-size", size, "-iters", strconv.Itoa(iters)}
	}
	const ping, stream = "main.(*measure).ping", "main.(*measure).stream"
	const trips, small, page, large, perf = 100000, 300000, 150000, 1500, 3000
	return []profiled{
		{name: "8 B, ping-pong", flags: pong("8", trips), inner: ping, packets: 2 * trips},
		{name: "64 B, in lists", flags: pong("64", small), inner: stream, packets: small},
		{name: "4 KiB", flags: pong("4K", page), inner: stream, packets: page},
		{name: "1 MiB", flags: pong("1M", large), inner: stream, packets: 256 * large},
		{name: "1 MiB, ib_write_bw", inner: "tun_get_user", perf: perfRun{"write", 1 << 20, "ib_write_bw -n " + strconv.Itoa(perf)}, packets: 256 * perf},
	}
}

// profilePart samples each run, in the first round alone: it is not for comparing.
func profilePart(r *room, b *book) error {
	if b.round > 0 {
		return nil
	}
	if err := there("perf"); err != nil {
		return err
	}
	for _, p := range profiledRuns() {
		err := r.profile(b, p)
		for _, who := range profileEnds {
			b.try("profile", key{Who: who, What: p.name}, err)
		}
	}
	return nil
}

// profileEnds are who is asked and who asks.
var profileEnds = [2]string{"profile receiver", "profile sender"}

func (r *room) profile(b *book, p profiled) error {
	at := fmt.Sprintf("127.0.0.1:%d", oobPort)
	var files [2]string
	var ends [2]command
	for i := range ends {
		files[i] = filepath.Join(r.dir, fmt.Sprintf("perf%d.data", i))
		args := []string{"perf", "record", "-q", "-o", files[i], "-k", "CLOCK_MONOTONIC", "-e", "cpu-clock", "-c", samplePeriod, "-g", "--"}
		port := r.ports[i]
		switch {
		case p.flags == nil:
			args = append(args, r.perfLine(p.perf, i)...)
		default:
			args = append(args, filepath.Join(r.bin, "pingpong"), "-port", port.Name, "-addr", port.V4.String())
		}
		switch {
		case p.flags == nil && i == 1:
			args = append(args, "127.0.0.1")
		case i == 0 && p.flags != nil:
			args = append(args, "-listen", at)
		case i == 1:
			args = append(append(args, p.flags...), "-connect", at)
		}
		ends[i] = command{at: r.here, args: args}
	}
	if _, err := pair(ends[0], ends[1], oobPort); err != nil {
		return err
	}
	var hits [2][]hit
	for i, f := range files {
		out, err := exec.Command("perf", "script", "-i", f, "-F", "pid,tid,time,period,ip,sym,dso").Output()
		if err == nil {
			hits[i], err = perfScript(string(out))
		}
		if err != nil {
			return fmt.Errorf("perf script: %w", err)
		}
	}
	when := spans(hits[1], "main.main", p.inner)
	if when == nil {
		return fmt.Errorf("no sample of %d is within %s", len(hits[1]), p.inner)
	}
	for i, who := range profileEnds {
		all := 0.0
		cs := costs(hits[i], when)
		for _, c := range categories {
			b.add(who, p.name, 0, costOf(c), cs[c]/p.packets)
			all += cs[c] / p.packets
		}
		b.add(who, p.name, 0, costOf(catAll), all)
	}
	return nil
}

// printProfile prints ns a packet and shares, of each end.
func (b *book) printProfile(w io.Writer, only []string) {
	if !slices.Contains(only, "profile") {
		return
	}
	runs := profiledRuns()
	for _, end := range []struct{ name, who string }{{"the sender", profileEnds[1]}, {"the receiver", profileEnds[0]}} {
		fmt.Fprintf(w, "| %s: ns a packet |", end.name)
		for _, p := range runs {
			fmt.Fprintf(w, " %s |", p.name)
		}
		fmt.Fprintf(w, "\n|---|%s\n", strings.Repeat("---:|", len(runs)))
		for _, c := range append(categories, catAll) {
			fmt.Fprintf(w, "| %s |", c)
			for _, p := range runs {
				all := k(end.who, p.name, 0, costOf(catAll))
				v := b.median(k(end.who, p.name, 0, costOf(c)))
				switch {
				case c == catAll:
					fmt.Fprintf(w, " %s |", b.cell(all))
				case math.IsNaN(v):
					fmt.Fprintf(w, " %s |", dash)
				default:
					fmt.Fprintf(w, " %.0f (%.0f %%) |", v, 100*v/b.median(all))
				}
			}
			fmt.Fprintln(w)
		}
		fmt.Fprintln(w)
	}
}
