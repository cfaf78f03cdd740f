// SPDX-License-Identifier: Apache-2.0

// Command pingpong moves data between two queue pairs, verifies every byte and
// prints latency and bandwidth. Without arguments it is a demo that needs nothing
// but /dev/net/tun: see -h.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/internal/twin"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// Exit statuses beside 0 and twin.StatusInterrupted.
const (
	statusFailed = 1
	statusUsage  = 2
)

// interruptTime is how long an orderly end may take after a signal.
const interruptTime = time.Second

func main() {
	provider.MakeRoom()
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// run is main with its arguments and outputs named; it gives the exit status.
func run(args []string, stdout io.Writer, stderr *os.File) int {
	o, err := parseFlags(args, stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err == nil && !o.byHand() && !twin.Inside():
		status, err := twin.Enter()
		return end(err, status, stderr)
	case err == nil:
		ctx, stop := onSignal()
		defer stop()
		if o.byHand() {
			err = runEnd(ctx, o, stdout, stderr)
		} else {
			err = twin.RunOn(ctx, fabric.Config{MultiQueue: o.queues > 1}, [2]string{"server", "client"}, o.children)
		}
	}
	return end(err, 0, stderr)
}

// end prints the one line about an error and gives the exit status, which is
// status when there is none.
func end(err error, status int, stderr io.Writer) int {
	if err == nil {
		return status
	}
	var usage errUsage
	var peer errPeer
	switch {
	case errors.Is(err, twin.ErrInterrupted):
		return twin.StatusInterrupted
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "pingpong: %s\n", twin.OneLine(err))
		return statusUsage
	case twin.Report(err, errors.As(err, &peer) || isPeerStatus(err)):
		return statusFailed
	}
	fmt.Fprintf(stderr, "pingpong: %s\n", twin.OneLine(err))
	return statusFailed
}

// isPeerStatus says whether a completion's status blames the peer's absence.
func isPeerStatus(err error) bool {
	var wc wcError
	return errors.As(err, &wc) && (wc.status == qp.WCRetryExcErr || wc.status == qp.WCWRFlushErr)
}

// onSignal gives a context that SIGINT, SIGTERM and SIGHUP end. Should something
// not heed it, the process ends all the same.
func onSignal() (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	sigs := make(chan os.Signal, 1)
	signal.Notify(sigs, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		<-sigs
		cancel(twin.ErrInterrupted)
		if twin.Inside() && !twin.Child() {
			return // Run ends its children first
		}
		time.AfterFunc(interruptTime, func() { os.Exit(twin.StatusInterrupted) })
	}()
	return ctx, func() { signal.Stop(sigs) }
}

// children gives the arguments of the demo's two processes.
func (o *options) children(i int, p fabric.Port, addr string) []string {
	args := []string{
		"-port", p.Name, "-addr", p.V4.String(), "-addr", p.V6.String(), "-paging", o.paging,
		"-frames", o.frames, "-queues", strconv.Itoa(o.queues), "-events=" + strconv.FormatBool(o.events),
	}
	if i == 0 {
		return append(args, "-listen", fmt.Sprintf("fd:%d", twin.ListenFD))
	}
	args = append(args, "-connect", addr, "-iters", strconv.Itoa(o.plan.Iters), "-depth", strconv.Itoa(o.plan.Depth),
		"-qp", strconv.Itoa(o.plan.QPs), "-mtu", strconv.Itoa(o.plan.MTU.Bytes()), "-seed", strconv.FormatUint(o.plan.Seed, 10),
		"-budget", strconv.Itoa(o.plan.Budget), "-suspend", o.plan.Suspend.String())
	for _, f := range [...]struct{ name, value string }{
		{"-op", o.opList}, {"-mr", o.memList}, {"-size", o.sizeList}, {"-json", o.json},
	} {
		if f.value != "" {
			args = append(args, f.name, f.value)
		}
	}
	return args
}

// runEnd is one end: of the demo, or by hand.
func runEnd(ctx context.Context, o *options, stdout io.Writer, stderr *os.File) error {
	space, closeSpace, err := openSpace(o)
	if err != nil {
		return err
	}
	defer closeSpace()
	if uerr := space.UserFault(); uerr != nil && o.paging == "userfault" && o.listen == "" {
		needed := slices.ContainsFunc(rows(o.ops, o.mems, o.plan.Sizes), func(r rowSpec) bool { return r.Mem.uffd() })
		if needed {
			return noUserFault(uerr)
		}
		fmt.Fprintf(stderr, "pingpong: note: absent pages are brought in by the kernel: %s\n", twin.OneLine(uerr))
	}
	out, err := newOutput(stdout, stderr, o.json)
	if err != nil {
		return err
	}
	run := runClient
	if o.listen != "" {
		run = runServer
	}
	err = run(ctx, o, space, out)
	out.clear()
	if err != nil && out.json != nil {
		out.abandon()
	}
	return err
}

// noUserFault is the error of a run that is to show what cannot be had.
func noUserFault(err error) error {
	return fmt.Errorf("cold and evicting memory is paged by userfaultfd, which is not to be had: %w; "+
		"do without by -paging kernel, or measure other memory by -mr resident,pinned", err)
}

// openSpace gives the memory to register in. As nothing here hands registered
// memory to system calls, a userfaultfd for user mode's faults alone will do: what
// ordinary users may have.
func openSpace(o *options) (*mr.Space, func(), error) {
	s, err := mr.NewSpace(mr.Options{NoUserFault: o.paging == "kernel", UserModeOnly: true})
	if err != nil {
		return nil, nil, err
	}
	return s, func() { s.Close() }, nil
}
