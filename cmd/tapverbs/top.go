// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/tapverbs/tapverbs/internal/top"
	"github.com/tapverbs/tapverbs/provider"
)

const topUsage = `tapverbs top [flags] [PID]

shows the regions of a running process and where their pages are, its queue pairs and
counters. Without PID it is the only process that can be looked at; if there are several,
they are listed. Only a process's own user, and root, can look at it, and not at those
that run with TAPVERBS_MONITOR=off.

A process in a mount namespace with files of its own is not in the list, and can be looked
at by its PID.

Flags:
`

// topOptions is what the command line of top says.
type topOptions struct {
	once, json bool
	interval   time.Duration
	port       string
	pid        int
}

// topParts is how many parts the maps of top -json have.
const topParts = 64

func topFlags(fs *flag.FlagSet) func([]string, io.Writer) (int, error) {
	o := &topOptions{}
	fs.BoolVar(&o.once, "once", false, "print what there is now as text, and end")
	fs.BoolVar(&o.json, "json", false, "print what there is now as JSON, and end")
	fs.DurationVar(&o.interval, "interval", time.Second, "`time` between looks")
	fs.StringVar(&o.port, "port", "", "`name` of the device's TAP port, for a process that has several")
	return func(args []string, stdout io.Writer) (int, error) {
		if err := o.check(args); err != nil {
			return statusUsage, err
		}
		return 0, o.run(stdout)
	}
}

func (o *topOptions) check(args []string) error {
	switch {
	case len(args) > 1:
		return usageErrorf("%q: one process at a time", args[1])
	case o.once && o.json:
		return usageErrorf("-once and -json: one of them")
	case o.interval < 10*time.Millisecond:
		return usageErrorf("-interval %v: 10ms at least", o.interval)
	}
	if len(args) == 1 {
		pid, err := strconv.Atoi(args[0])
		if err != nil || pid <= 0 {
			return usageErrorf("%q is not the number of a process", args[0])
		}
		o.pid = pid
	}
	return nil
}

func (o *topOptions) run(stdout io.Writer) error {
	t, err := o.target(stdout)
	if err != nil || t == nil {
		return err
	}
	parts := top.TextParts
	if o.json {
		parts = topParts
	}
	if o.once || o.json {
		sn, line, err := t.Ask(parts)
		if err != nil {
			return err
		}
		if o.json {
			_, err = fmt.Fprintf(stdout, "%s\n", line)
			return err
		}
		return top.Text(stdout, sn)
	}
	if f, ok := stdout.(*os.File); !ok || !isTerminal(f) || !isTerminal(os.Stdin) {
		return errors.New("this is not a terminal: tapverbs top -once prints text, and -json JSON")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	tick := time.NewTicker(o.interval)
	defer tick.Stop()
	err = top.View(ctx, func(parts int) (*provider.Snapshot, error) {
		sn, _, err := t.Ask(parts)
		return sn, err
	}, tick.C, nil)
	if errors.Is(err, top.ErrEnded) {
		_, err = fmt.Fprintf(stdout, "%v\n", err)
	}
	return err
}

// target is the device to look at; nil if there are several, which are listed then.
func (o *topOptions) target(stdout io.Writer) (*top.Target, error) {
	all, err := top.Find(o.pid)
	if err != nil {
		return nil, err
	}
	var ts []top.Target
	for _, t := range all {
		if o.port == "" || t.Port() == o.port {
			ts = append(ts, t)
		}
	}
	switch {
	case len(ts) == 1:
		return &ts[0], nil
	case len(ts) == 0 && o.pid != 0:
		return nil, fmt.Errorf("process %d has no device that can be looked at%s: it may not use tapverbs, belong to somebody else, or run with %s=off", o.pid, onPort(o.port), provider.EnvMonitor)
	case len(ts) == 0:
		return nil, fmt.Errorf("no process has a device that can be looked at%s", onPort(o.port))
	}
	lines := make([]string, len(ts))
	for i, t := range ts {
		lines[i] = t.String()
	}
	if o.once || o.json {
		return nil, fmt.Errorf("there are several, so say which (tapverbs top [-port NAME] PID): %s", strings.Join(lines, "; "))
	}
	_, err = fmt.Fprintf(stdout, "There are several, so say which: tapverbs top [-port NAME] PID\n%s\n", strings.Join(lines, "\n"))
	return nil, err
}

func onPort(name string) string {
	if name == "" {
		return ""
	}
	return " on " + name
}
