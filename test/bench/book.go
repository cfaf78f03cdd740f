// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// key names what was measured: who did what, with messages, a depth or a number of
// queue pairs of X, and which of its numbers this is.
type key struct {
	Who    string `json:"who"`
	What   string `json:"what"`
	X      int    `json:"x,omitempty"`
	Metric string `json:"metric"`
}

// The metrics.
const (
	gbps   = "gbps"       // 10^9 bits of payload a second
	rate   = "messages/s" // of the raw device: packets
	p50    = "p50_us"     // of half round trips, unless What says otherwise
	p99    = "p99_us"
	p999   = "p999_us"
	mean   = "mean_us"
	cpuGiB = "cpu_s/GiB"      // user and system time of the processes at both ends
	allGiB = "cpu_all_s/GiB"  // all that the machine was busy, interrupts included
	cpuMsg = "cpu_ns/message" // of both ends' processes
	memory = "bytes/QP"       // resident, of one end
	callNs = "ns"             // of a call
)

// sample is one number of one round.
type sample struct {
	Round int `json:"round"`
	key
	Value float64 `json:"value"`
}

// failure is a benchmark that did not run: all of a part, or, by what is set of the rest, all
// that somebody did, one thing, or that with one size.
type failure struct {
	Round int    `json:"round"`
	Part  string `json:"part"`
	Who   string `json:"who,omitempty"`
	What  string `json:"what,omitempty"`
	X     int    `json:"x,omitempty"`
	Why   string `json:"why"`
}

// book holds what was measured, round by round.
type book struct {
	Started  string            `json:"started"` // RFC 3339
	Commit   string            `json:"commit"`
	Flags    []string          `json:"flags"` // of this program
	Kernel   string            `json:"kernel"`
	Versions map[string]string `json:"versions"` // of what is compared with: Debian's packages
	CPUs     int               `json:"cpus"`
	CPU      string            `json:"cpu"`  // the model's name
	Load     []string          `json:"load"` // before each round: that of the last minute
	Rounds   int               `json:"rounds"`
	Samples  []sample          `json:"samples"`
	Failures []failure         `json:"failures"`

	round int
}

func newBook(rounds int) *book {
	return &book{Rounds: rounds, Samples: []sample{}, Failures: []failure{}}
}

// begin writes down when and where this is, and what is compared.
func (b *book) begin() {
	var u unix.Utsname
	_ = unix.Uname(&u) // an empty name is no harm
	b.Started, b.Flags, b.Commit, b.Versions = time.Now().UTC().Format(time.RFC3339), os.Args[1:], commit(), versions()
	b.Kernel, b.CPUs, b.CPU = unix.ByteSliceToString(u.Release[:]), runtime.NumCPU(), model()
}

// commit is the one that is checked out, and whether files differ from it; "unknown" without git.
func commit() string {
	out, err := exec.Command("git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}

// packages are what this is compared with, and measured by.
var packages = []string{"perftest", "iperf3", "ucx-utils", "libfabric-bin", "linux-perf"}

// versions are those of the packages that this is compared with, where there are any.
func versions() map[string]string {
	vs := make(map[string]string)
	for _, p := range packages {
		vs[p] = "not installed"
		if out, err := exec.Command("dpkg-query", "-W", "-f=${Version}", p).Output(); err == nil && len(out) > 0 {
			vs[p] = string(out)
		}
	}
	return vs
}

// model is what the processor calls itself (proc(5), cpuinfo).
func model() string {
	b, _ := os.ReadFile("/proc/cpuinfo") // nothing: ""
	_, rest, _ := strings.Cut(string(b), "model name")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(strings.TrimLeft(line, "\t :"))
}

func (b *book) add(who, what string, x int, metric string, v float64) {
	b.Samples = append(b.Samples, sample{b.round, key{who, what, x, metric}, v})
}

// try enters an error, if it is one: of a part, and in it of what k names; an empty k is all of it.
func (b *book) try(part string, k key, err error) {
	if err == nil {
		return
	}
	b.Failures = append(b.Failures, failure{b.round, part, k.Who, k.What, k.X, oneLine(err, 300)})
	what := strings.Join(strings.Fields(part+" "+k.Who+" "+k.What), " ")
	if k.X > 0 {
		what += fmt.Sprint(" ", k.X)
	}
	fmt.Fprintf(os.Stderr, "round %d, %s: %s\n", b.round+1, what, oneLine(err, 1000))
}

// values gives what the rounds found, in their order; NaN where one found nothing.
func (b *book) values(k key) []float64 {
	out := make([]float64, b.Rounds)
	for i := range out {
		out[i] = math.NaN()
	}
	for _, s := range b.Samples {
		if s.key == k && s.Round < len(out) {
			out[s.Round] = s.Value
		}
	}
	return out
}

// median is that of the rounds; NaN if there is none.
func (b *book) median(k key) float64 { return median(b.values(k)) }

// ratio is the median of the rounds' ratios of one number to another, for what changes
// from round to round changes both. Of several to compare with, each round's lowest counts.
// NaN if no round has both.
func (b *book) ratio(of key, to ...key) float64 {
	v, w := b.values(of), b.lowest(to)
	for i := range v {
		v[i] /= w[i]
	}
	return median(v)
}

// lowest gives each round's lowest of some numbers; NaN where one is not there, for it might have been that.
func (b *book) lowest(of []key) []float64 {
	w := b.values(of[0])
	for _, k := range of[1:] {
		for i, x := range b.values(k) {
			w[i] = min(w[i], x)
		}
	}
	return w
}

// median leaves out what is no number.
func median(v []float64) float64 {
	v = finite(v)
	if len(v) == 0 {
		return math.NaN()
	}
	slices.Sort(v)
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// finite is what of some numbers is one.
func finite(v []float64) []float64 {
	return slices.DeleteFunc(slices.Clone(v), func(x float64) bool { return math.IsNaN(x) || math.IsInf(x, 0) })
}

// partOf names the part that measures a number.
func partOf(k key) string {
	who, _, _ := strings.Cut(k.Who, " ")
	switch {
	case who == "guest":
		return labPart
	case who == "queue":
		return "many"
	case who == "pingpong" || who == "perftest" || who == "ucx" || who == "libfabric":
		if strings.HasSuffix(k.What, " depth") {
			return "depth"
		}
		if who != "pingpong" && (k.Metric == cpuGiB || k.Metric == allGiB) {
			return "cpu"
		}
	}
	return who
}

// failed gives why a number is not there, and in how many rounds; "" and 0 if nothing failed.
func (b *book) failed(k key) (why string, rounds int) {
	seen := make(map[int]bool)
	for _, f := range b.Failures {
		if f.Part != partOf(k) || f.Who != "" && f.Who != k.Who || f.What != "" && f.What != k.What || f.X != 0 && f.X != k.X {
			continue
		}
		if why == "" {
			why = f.Why
		}
		seen[f.Round] = true
	}
	for _, s := range b.Samples {
		if s.key == k {
			delete(seen, s.Round) // it had been measured before something else failed
		}
	}
	return why, len(seen)
}

// cell is a number for a table: the median; in how many rounds it was measured, if not in all that
// tried; why there is none; or a dash, if nobody wanted to measure it.
func (b *book) cell(k key) string {
	m := b.median(k)
	why, failed := b.failed(k)
	switch {
	case math.IsNaN(m) && failed > 0:
		return "not run: " + short(why)
	case failed > 0:
		n := len(finite(b.values(k)))
		return fmt.Sprintf("%s (%d of %d rounds)", number(m), n, n+failed)
	}
	return number(m)
}

// short is a reason that fits into a cell.
func short(why string) string {
	if r := []rune(why); len(r) > 80 {
		why = string(r[:77]) + "…"
	}
	return strings.ReplaceAll(why, "|", "/")
}

// load reads what save has written.
func load(file string) (*book, error) {
	j, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("the raw data: %w", err)
	}
	b := newBook(0)
	if err := json.Unmarshal(j, b); err != nil {
		return nil, fmt.Errorf("the raw data, %s: %w", file, err)
	}
	return b, nil
}

// save writes everything to a file, as JSON.
func (b *book) save(file string) error {
	j, err := json.MarshalIndent(b, "", " ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return fmt.Errorf("the raw data: %w", err)
	}
	if err := os.WriteFile(file, append(j, '\n'), 0o644); err != nil {
		return fmt.Errorf("the raw data: %w", err)
	}
	return nil
}
