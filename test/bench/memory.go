// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
)

// Memory: what regions cost that are not pinned. One table and one plot for each of
// the parts, which are:
var memoryParts = [...]string{"registration", "latency", "throughput", "reuse", "loss", "recovery"}

const allRights = mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead | mr.RemoteAtomic

const memoryUsage = "usage: bench memory [-runs N] [-only PART,...] [-plots DIR]"

// memoryMain is "bench memory".
func memoryMain(args []string) error {
	fs := flag.NewFlagSet("memory", flag.ContinueOnError)
	fs.SetOutput(os.Stderr)
	runs := fs.Int("runs", 3, "how often to measure each")
	only := fs.String("only", "", "`list` of parts: "+strings.Join(memoryParts[:], ", ")+" (default all)")
	plots := fs.String("plots", "test/bench/plots", "`directory` for the plots")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return errors.New(memoryUsage)
	}
	if fs.NArg() > 0 || *runs < 1 {
		return errors.New(memoryUsage)
	}
	parts := memoryParts[:]
	if *only != "" {
		parts = strings.Split(*only, ",")
		for _, p := range parts {
			if !slices.Contains(memoryParts[:], p) {
				return fmt.Errorf("no part %q: want some of %s", p, strings.Join(memoryParts[:], ", "))
			}
		}
	}
	if err := os.MkdirAll(*plots, 0o755); err != nil {
		return err
	}
	printHead()
	for _, p := range parts {
		fmt.Fprintf(os.Stderr, "%s, load %s\n", p, loadAverage())
		if err := memoryPart(p, *runs, *plots); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	return nil
}

func memoryPart(part string, runs int, plots string) error {
	if part == "registration" {
		rs, err := registrations(runs)
		if err != nil {
			return err
		}
		printRegistrations(os.Stdout, rs)
		return plotRegistrations(plots, rs)
	}
	if part == "recovery" {
		rs, err := recoveries(runs)
		if err != nil {
			return err
		}
		printRecovery(os.Stdout, rs)
		return nil
	}
	return pairPart(part, runs, plots)
}

// printHead says on what was measured.
func printHead() {
	var u unix.Utsname
	_ = unix.Uname(&u) // an empty name is no harm
	thp, _ := os.ReadFile("/sys/kernel/mm/transparent_hugepage/enabled")
	fmt.Printf("Linux %s, %d CPUs, load %s, transparent huge pages: %s\n", unix.ByteSliceToString(u.Release[:]), runtime.NumCPU(), loadAverage(),
		strings.TrimSpace(string(thp)))
}

// sizeString gives a byte count in the largest unit that divides it.
func sizeString(n uint64) string {
	for shift, unit := 30, "GKM"; shift > 0; shift -= 10 {
		if n >= 1<<shift && n%(1<<shift) == 0 {
			return fmt.Sprintf("%d %ciB", n>>shift, unit[(shift/10)%3])
		}
	}
	return fmt.Sprintf("%d B", n)
}

// micros prints a time in µs with about three digits.
func micros(d time.Duration) string {
	switch us := float64(d) / 1e3; {
	case us < 10:
		return fmt.Sprintf("%.2f", us)
	case us < 100:
		return fmt.Sprintf("%.1f", us)
	default:
		return fmt.Sprintf("%.0f", us)
	}
}
