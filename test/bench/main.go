// SPDX-License-Identifier: Apache-2.0

// Command bench compares tapverbs with the raw device, with TCP and with what others make
// of TCP, on one bridge, and with the kernel's soft-RoCE in a guest; it prints tables,
// draws plots, and keeps the raw data. Run it in the root of the module, after make build
// libs.
//
//	go run ./test/bench [-only PART,...] [-rounds N] [-json FILE | -from FILE] [-readme FILE] [-plots DIR] [-lab PROGRAM]
//
// With "memory" it measures what memory costs that is not pinned, prints tables, and
// draws plots; see memory.go.
//
//	go run ./test/bench memory [-runs N] [-only PART,...] [-plots DIR]
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/tapverbs/tapverbs/internal/twin"
	"github.com/tapverbs/tapverbs/provider"
)

// resultEnv names the file that results of "memory" go to.
const resultEnv = "TAPVERBS_BENCH_RESULT"

func main() {
	var err error
	inside := twin.Inside() || twin.Child()
	args := os.Args[1:]
	if len(args) > 0 && args[0] == "end" {
		provider.MakeRoom() // as pingpong does: an end does nothing but verbs
	}
	switch {
	case len(args) > 0 && args[0] == "memory" && inside:
		err = pairMain()
	case len(args) > 0 && args[0] == "memory":
		err = memoryMain(args[1:])
	case len(args) == 4 && args[0] == "end":
		err = rawEnd(args[1], args[2], args[3])
	case len(args) == 6 && args[0] == "end":
		err = shardMain(args[1], args[2], args[3], args[4], args[5])
	case len(args) == 5 && args[0] == "end":
		err = pairEnd(args[1], args[2], args[3], args[4])
	default:
		err = compareMain(args)
	}
	if err == nil {
		return
	}
	if !inside || !twin.Report(err, false) {
		fmt.Fprintln(os.Stderr, "bench:", twin.OneLine(err))
	}
	os.Exit(1)
}

// options are the flags of the comparison.
type options struct {
	bin, json, from, plots, lab, readme string
	rounds                              int
	only                                []string
}

func partNames() (names []string) {
	for _, p := range parts {
		names = append(names, p.name)
	}
	return append(names, labPart)
}

func parse(args []string) (*options, error) {
	o := &options{}
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.StringVar(&o.bin, "bin", "bin", "`directory` of pingpong and tapverbs")
	fs.StringVar(&o.json, "json", "", "`file` for the raw data: each number of each round (default: none)")
	fs.StringVar(&o.from, "from", "", "`file` with the raw data of an earlier run: its tables and plots are made again, and nothing is measured")
	fs.StringVar(&o.plots, "plots", "test/bench/plots", "`directory` for the plots; \"\" draws none")
	fs.StringVar(&o.lab, "lab", "bin/lab", "`program` that runs things in a virtual machine with the kernel's soft-RoCE (see README.md); \"\" for none")
	fs.StringVar(&o.readme, "readme", "", "`file` with places for the tables, such as test/bench/README.md (default: they are printed alone)")
	fs.IntVar(&o.rounds, "rounds", 4, "how often to measure each; medians count")
	only := fs.String("only", "", "`list` of parts: "+strings.Join(partNames(), ", ")+" (default all)")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if fs.NArg() > 0 || o.rounds < 1 {
		return nil, errors.New("usage: bench [-only PART,...] [-rounds N] [-json FILE | -from FILE] [-readme FILE] [-plots DIR] [-lab PROGRAM]")
	}
	o.only = partNames()
	if *only != "" {
		o.only = strings.Split(*only, ",")
		for _, p := range o.only {
			if !slices.Contains(partNames(), p) {
				return nil, fmt.Errorf("no part %q: want some of %s", p, strings.Join(partNames(), ", "))
			}
		}
	}
	return o, nil
}

// compareMain is the comparison: once to make a private namespace, and once inside.
func compareMain(args []string) error {
	o, err := parse(args)
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	if err != nil {
		return err
	}
	if o.from != "" {
		b, err := load(o.from)
		if err != nil {
			return err
		}
		return o.show(b)
	}
	if !twin.Inside() {
		status, err := twin.Enter()
		if err == nil && status != 0 {
			os.Exit(status) // it has said why
		}
		return err
	}
	return o.compare()
}

func (o *options) compare() (err error) {
	r, err := newRoom(o.bin)
	if r != nil {
		defer func() { err = errors.Join(err, r.close()) }()
	}
	if err != nil {
		return err
	}
	b := newBook(o.rounds)
	b.begin()
	start := time.Now()
	for b.round = range o.rounds {
		b.Load = append(b.Load, loadAverage())
		for _, p := range parts {
			if !slices.Contains(o.only, p.name) {
				continue
			}
			since := time.Now()
			b.try(p.name, key{}, p.measure(r, b))
			fmt.Fprintf(os.Stderr, "round %d of %d, %s: %.1f s, load %s\n", b.round+1, o.rounds, p.name, time.Since(since).Seconds(), loadAverage())
		}
	}
	if slices.Contains(o.only, labPart) {
		r.guest(b, o.lab)
	}
	fmt.Fprintf(os.Stderr, "%.0f s\n", time.Since(start).Seconds())
	if o.json != "" {
		if err := b.save(o.json); err != nil {
			return err
		}
	}
	return o.show(b)
}

// show prints the tables and puts them and the plots where they belong.
func (o *options) show(b *book) error {
	b.print(os.Stdout, o.only)
	if o.readme != "" {
		if err := b.write(o.readme, o.only); err != nil {
			return err
		}
	}
	if o.plots == "" {
		return nil
	}
	return b.draw(o.plots)
}

// measure runs a part, if what it needs is there.
func (p part) measure(r *room, b *book) error {
	if p.needs != "" {
		if err := there(p.needs); err != nil {
			return err
		}
	}
	return p.run(r, b)
}

// there is an error if there is no such program.
func there(program string) error {
	if _, err := exec.LookPath(program); err != nil {
		return fmt.Errorf("there is no %s here (make bench-deps)", program)
	}
	return nil
}

// loadAverage is the load average of the last minute.
func loadAverage() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Fields(string(b))[0]
}
