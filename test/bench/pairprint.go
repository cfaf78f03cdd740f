// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
)

func printLatency(w io.Writer, rows []latencyRow) {
	fmt.Fprint(w, "\n| one request | resident: p50 µs (p99) |")
	for _, s := range states[1:] {
		fmt.Fprintf(w, " %s: p50 µs (p99) | added | a page |", s)
	}
	fmt.Fprint(w, "\n|---|---:|")
	for range states[1:] {
		fmt.Fprint(w, "---:|---:|---:|")
	}
	fmt.Fprintln(w)
	for _, r := range rows {
		pages := max(1, r.Size/pageSize)
		fmt.Fprintf(w, "| %s, %s | %.1f (%.1f) |", r.Op, sizeString(uint64(r.Size)), r.States[0].P50, r.States[0].P99)
		for _, s := range r.States[1:] {
			added := s.P50 - r.States[0].P50
			fmt.Fprintf(w, " %.1f (%.1f) | %.1f | %.2f |", s.P50, s.P99, added, added/float64(pages))
		}
		fmt.Fprintln(w)
	}
}

// plotLatency draws what is added, for each page of the request.
func plotLatency(dir string, rows []latencyRow) error {
	var cs []curve
	for _, r := range rows {
		c := curve{name: fmt.Sprintf("%s, %s", r.Op, sizeString(uint64(r.Size)))}
		for i, s := range r.States[1:] {
			c.at = append(c.at, point{float64(i), max(0, s.P50-r.States[0].P50) / float64(max(1, r.Size/pageSize))})
		}
		cs = append(cs, c)
	}
	return draw(dir, "latency", picture{title: "Latency added by a page that is not resident, a page, p50", y: "µs", names: states[1:], curves: cs})
}

func budgetName(percent int) string {
	if percent == 0 {
		return "none"
	}
	return fmt.Sprintf("%d %%", percent)
}

func orderName(random bool) string {
	if random {
		return "random"
	}
	return "in order"
}

func printThroughput(w io.Writer, rows []throughputRow) {
	fmt.Fprintf(w, "\n| %s in messages of %s | budget | Gbit/s | of no budget | minor faults | major faults | evictions |\n|---|---:|---:|---:|---:|---:|---:|\n",
		sizeString(workingSet), sizeString(streamSize))
	none := 0.0
	for _, r := range rows {
		if r.Percent == 0 {
			none = r.Gbps
		}
		fmt.Fprintf(w, "| %s, %s | %s | %.2f | %.2f | %d | %d | %d |\n", r.Op, orderName(r.Random), budgetName(r.Percent), r.Gbps, r.Gbps/none,
			r.Use.Minor, r.Use.Major, r.Use.Evictions)
	}
}

func plotThroughput(dir string, rows []throughputRow) error {
	var cs []curve
	for _, r := range rows {
		if r.Percent == 0 {
			cs = append(cs, curve{name: r.Op + ", " + orderName(r.Random)})
			continue
		}
		c := &cs[len(cs)-1]
		c.at = append(c.at, point{float64(r.Percent), r.Gbps})
	}
	return draw(dir, "throughput", picture{title: "Throughput against the budget", x: "budget, % of the working set", y: "Gbit/s",
		ticks: []tick{{25, "25"}, {50, "50"}, {75, "75"}, {100, "100"}}, curves: cs})
}

func printReuse(w io.Writer, rows []reuseRow) {
	fmt.Fprintf(w, "\n| %s, WRITEs of %s | ", sizeString(reuseRegion), sizeString(streamSize))
	for _, m := range reuseMarks {
		fmt.Fprintf(w, "%d passes: Gbit/s | of resident |", m)
	}
	fmt.Fprint(w, "\n|---|")
	for range reuseMarks {
		fmt.Fprint(w, "---:|---:|")
	}
	fmt.Fprintln(w)
	for _, r := range rows {
		fmt.Fprintf(w, "| %s |", r.State)
		for i, g := range r.Gbps {
			fmt.Fprintf(w, " %.2f | %.2f |", g, g/rows[0].Gbps[i])
		}
		fmt.Fprintln(w)
	}
}

func plotReuse(dir string, rows []reuseRow) error {
	var cs []curve
	var ts []tick
	for _, n := range reuseMarks {
		ts = append(ts, tick{float64(n), fmt.Sprint(n)})
	}
	for _, r := range rows {
		c := curve{name: r.State}
		for i, g := range r.Gbps {
			c.at = append(c.at, point{float64(reuseMarks[i]), g})
		}
		cs = append(cs, c)
	}
	return draw(dir, "reuse", picture{title: "Throughput against reuse of a region that begins cold", x: "passes", y: "Gbit/s, on average so far",
		logX: true, ticks: ts, curves: cs})
}

// name is the kind of memory.
func (r lossRow) name() string {
	if r.Policy == "" {
		return "resident"
	}
	return "store, " + r.Policy
}

func printLoss(w io.Writer, rows []lossRow) {
	fmt.Fprintf(w, "\n| %s, %g %% of the frames lost | without loss: p50 µs | p99.9 | with loss: p50 µs | p99 | p99.9 | max | p99.9 of loss alone | max | failed |\n", sizeString(lossSize), 100*lossRate)
	fmt.Fprintln(w, "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
	for i := 0; i < len(rows); i += 2 * (len(policies) + 1) {
		lossy, clean := rows[i:i+len(policies)+1], rows[i+len(policies)+1:]
		for k, r := range lossy {
			c, alone := clean[k].Times, lossy[0].Times
			fmt.Fprintf(w, "| %s, %s | %.0f | %.0f | %.0f | %.0f | %.0f | %.0f | %.2f | %.2f | %d |\n", r.Op, r.name(), c.P50, c.P999,
				r.Times.P50, r.Times.P99, r.Times.P999, r.Times.Max, r.Times.P999/alone.P999, r.Times.Max/alone.Max, r.Failed)
		}
	}
}

// plotLoss draws the tails under loss.
func plotLoss(dir string, rows []lossRow) error {
	var cs []curve
	names := []string{"resident"}
	for _, p := range policies {
		names = append(names, "store, "+p)
	}
	for i := 0; i < len(rows); i += 2 * len(names) {
		p999, most := curve{name: rows[i].Op + ", p99.9"}, curve{name: rows[i].Op + ", max"}
		for k, r := range rows[i : i+len(names)] {
			p999.at = append(p999.at, point{float64(k), r.Times.P999 / 1e3})
			most.at = append(most.at, point{float64(k), r.Times.Max / 1e3})
		}
		cs = append(cs, p999, most)
	}
	return draw(dir, "loss", picture{title: "Tail of requests with 1 % of the frames lost", y: "ms", names: names, curves: cs})
}
