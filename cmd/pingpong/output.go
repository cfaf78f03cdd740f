// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/provider"
)

// errWrong ends a run whose data was wrong somewhere.
var errWrong = errors.New("data was not what was sent")

// output prints the table as rows come, and the progress beside it.
type output struct {
	w    io.Writer
	err  io.Writer
	tty  bool     // err is a terminal: show progress there
	json *os.File // nil: no JSON
	made bool     // the JSON file was not there before
	bar  bool     // a progress line is on the screen
	last string   // op and memory of the row before
}

// newOutput opens the JSON file, so that one that cannot be written is known
// before anything is measured.
func newOutput(w io.Writer, stderr *os.File, jsonFile string) (*output, error) {
	o := &output{w: w, err: stderr, tty: isTerminal(stderr)}
	if jsonFile == "" {
		return o, nil
	}
	var err error
	o.json, err = os.OpenFile(jsonFile, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	o.made = err == nil
	if errors.Is(err, os.ErrExist) {
		o.json, err = os.OpenFile(jsonFile, os.O_WRONLY, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("-json: %w", err)
	}
	return o, nil
}

// abandon removes the JSON file of a run that failed before there was anything to
// write, unless it was there before.
func (o *output) abandon() {
	if st, err := o.json.Stat(); o.made && err == nil && st.Size() == 0 {
		_ = os.Remove(o.json.Name()) // an empty file is no loss
	}
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// progress shows what is going on, on a terminal.
func (o *output) progress(i, of int, r rowSpec, ph phase) {
	if o.tty {
		fmt.Fprintf(o.err, "\r\x1b[K[%d/%d] %s: %s …", i+1, of, r, ph)
		o.bar = true
	}
}

func (o *output) clear() {
	if o.bar {
		fmt.Fprint(o.err, "\r\x1b[K")
		o.bar = false
	}
}

// note prints one line that is not of the table.
func (o *output) note(format string, args ...any) {
	o.clear()
	fmt.Fprintf(o.w, format+"\n", args...)
}

const (
	tableHead  = "%-9s  %-10s  %7s │ %8s %8s %8s %8s %9s │ %8s %10s │ %-5s %11s\n"
	tableRow   = "%-9s  %-10s  %7s │ %8s %8s %8s %8s %9s │ %8s %10.0f │ %-5s %11s\n"
	tableWidth = 9 + 2 + 10 + 2 + 7 + 3 + 8*4 + 9 + 4 + 3 + 8 + 1 + 10 + 3 + 5 + 1 + 11
)

// begin prints what is common to all rows, and the table's head.
func (o *output) begin(r *report) {
	fmt.Fprintf(o.w, "tapverbs pingpong %s · Linux %s · %s · %d CPUs\n", r.Version, r.Kernel, r.Go, r.CPUs)
	fmt.Fprintf(o.w, "RC over RoCEv2, path MTU %d, %d QP, depth %d, %s; TAP %s; absent pages by %s; seed %d\n",
		r.MTU, r.QPs, r.Depth, r.Wait, r.Tap, r.Paging, r.Seed)
	fmt.Fprintf(o.w, "latency in µs: half round trips; of read and atomic the whole operation\n\n")
	fmt.Fprintf(o.w, tableHead, "operation", "memory", "size", "min", "p50", "p99", "p99.9", "max", "Gbit/s", "messages/s",
		"data", "page faults")
}

// row prints one line of the table.
func (o *output) row(w row) {
	o.clear()
	if key := w.Op + w.Mem; key != o.last {
		fmt.Fprintln(o.w, strings.Repeat("─", tableWidth))
		o.last = key
	}
	data := "ok"
	if !w.Verified {
		data = "WRONG"
	}
	faults := "-"
	if w.PageFaults > 0 || w.PagesWritten > 0 {
		faults = fmt.Sprint(w.PageFaults)
	}
	l := w.Latency
	fmt.Fprintf(o.w, tableRow, w.Op, w.Mem, sizeString(w.Size), micros(l.Min), micros(l.P50), micros(l.P99), micros(l.P999),
		micros(l.Max), gbps(w.Gbps), w.Rate, data, faults)
	switch w.Mem {
	case memEvicting.String():
		fmt.Fprintf(o.w, "%*s%d pages evicted; faults: %d minor, %d major; %d RNR NAKs\n", moveIndent, "", w.Evictions, w.Minor, w.Major, w.RNRs)
	case memSuspending.String():
		fmt.Fprintf(o.w, "%*ssuspended %d times; %d RNR NAKs\n", moveIndent, "", w.Suspends, w.RNRs)
	}
}

// moveIndent is where the second line begins of rows that have one.
const moveIndent = 9 + 2 + 10 + 2

// micros prints microseconds with about three digits.
func micros(v float64) string {
	switch {
	case v < 10:
		return fmt.Sprintf("%.2f", v)
	case v < 100:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// gbps prints 10^9 bits a second.
func gbps(v float64) string {
	if v < 1 {
		return fmt.Sprintf("%.3f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// finish prints what stands below the table and writes the JSON file. It fails
// when data was wrong.
func (o *output) finish(r *report) error {
	o.clear()
	fmt.Fprintln(o.w)
	messages, wrong := uint64(0), ""
	bad := 0
	for _, w := range r.Rows {
		messages += w.Messages
		if !w.Verified {
			bad++
			if wrong == "" {
				wrong = fmt.Sprintf("%s, %s memory, %s: %s", w.Op, w.Mem, sizeString(w.Size), w.Problem)
			}
		}
	}
	if bad == 0 {
		fmt.Fprintf(o.w, "%d messages, every byte verified, %.1f s\n", messages, r.Seconds)
	}
	if r.PagesWritten > 0 {
		faults := r.coldFaults()
		fmt.Fprintf(o.w, "cold memory: %d pages written, %d page faults%s\n", r.PagesWritten, faults, pagingRemark(r, faults))
	}
	fmt.Fprintf(o.w, "memory locked: %s at most", kib(r.Locked))
	if r.Locked > 0 {
		fmt.Fprintf(o.w, ", by the pinned rows; %s by the others", kib(lockedUnpinned(r)))
	}
	fmt.Fprintln(o.w)
	for _, name := range []string{"server", "client"} {
		if e := r.Ends[name]; e != nil {
			fmt.Fprintf(o.w, "resident set, %s: %s before, %s at its peak, %s after\n", name,
				kib(e.RSS.Before), kib(e.RSS.Peak), kib(e.RSS.After))
		}
	}
	for _, n := range r.Notes {
		fmt.Fprintln(o.w, "note: "+n)
	}
	if o.json != nil {
		if err := r.write(o.json); err != nil {
			return fmt.Errorf("-json: %w", err)
		}
	}
	if bad > 0 {
		return fmt.Errorf("%w in %d of %d rows; %s", errWrong, bad, len(r.Rows), wrong)
	}
	return nil
}

func pagingRemark(r *report, faults uint64) string {
	switch {
	case r.Paging != "userfault":
		return " (the kernel pages, and does not tell)"
	case faults == r.PagesWritten:
		return ": each page once"
	}
	return ""
}

// lockedUnpinned is the most that was locked while memory was not to be.
func lockedUnpinned(r *report) int64 {
	n := int64(0)
	for _, w := range r.Rows {
		if w.Mem != memPinned.String() {
			n = max(n, w.Locked)
		}
	}
	return n
}

// kib prints a number of KiB in a handy unit.
func kib(n int64) string {
	if n >= 10<<10 {
		return fmt.Sprintf("%d MiB", (n+512)>>10)
	}
	return fmt.Sprintf("%d KiB", n)
}

// newReport fills in what is known before the first row.
func newReport(o *options, e *endpoint, peer string, started time.Time) *report {
	r := &report{
		Program: "pingpong", Version: version(), Started: started.UTC().Format(time.RFC3339), Kernel: kernel(),
		Go: runtime.Version(), Arch: runtime.GOARCH, CPUs: runtime.NumCPU(),
		Peer: peer, MTU: o.plan.MTU.Bytes(), Depth: o.plan.Depth, QPs: o.plan.QPs, Seed: o.plan.Seed, Wait: "poll",
		Paging: "userfault", Tap: tapText(e.dev), Rows: []row{}, Ends: map[string]*endReport{},
		Budget: o.plan.Budget, Suspend: o.plan.Suspend.String(),
	}
	if o.events {
		r.Wait = "events"
	}
	if e.dev.Space().UserFault() != nil {
		r.Paging = "kernel"
	}
	return r
}

// version is the program's version control revision, if it was built from one.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	rev, dirty := "", ""
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			rev = s.Value[:min(12, len(s.Value))]
		case "vcs.modified":
			if s.Value == "true" {
				dirty = "+"
			}
		}
	}
	if rev == "" {
		return info.Main.Version
	}
	return rev + dirty
}

func kernel() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}

// tapText says what was negotiated with the TAP.
func tapText(d *provider.Device) string {
	text := d.Offloads().String()
	switch n, by := d.Queues(); {
	case n == 1:
		return text
	case by == provider.SpreadByProgram:
		return fmt.Sprintf("%s, %d queues, steered by %s", text, n, by)
	default:
		return fmt.Sprintf("%s, %d queues, by %s", text, n, by)
	}
}
