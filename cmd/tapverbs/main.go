// SPDX-License-Identifier: Apache-2.0

// Command tapverbs runs unmodified verbs programs on tapverbs:
//
//	tapverbs run -- ibv_devinfo
//	tapverbs run -n 2 -- sh -c 'if [ $TAPVERBS_RANK = 0 ]; then …'
//
// and makes ports for ordinary users:
//
//	tapverbs up -ports 4 -owner alice
//
// and shows what a running process has and does:
//
//	tapverbs top
//
// See shim/README.md.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
)

// Exit statuses beside those of the program that was run.
const (
	statusFailed = 1
	statusUsage  = 2
)

const usage = `tapverbs runs programs that use libibverbs on tapverbs, without RDMA hardware.

  tapverbs run [flags] -- COMMAND [ARGUMENT...]   run a program, or several copies of it
  tapverbs up [flags]                             make ports that stay, for ordinary users
  tapverbs status                                 list such ports
  tapverbs env PORT                               print the environment for one, for eval
  tapverbs down [flags]                           take them away
  tapverbs top [flags] [PID]                      look at a running process: memory, queue pairs, counters

tapverbs run -h and so on say more.
`

// command is what the first argument names.
type command struct {
	name, usage string
	// flags adds the command's flags to fs, and gives what carries it out once they
	// are parsed. Its int is the exit status if there is no error.
	flags func(fs *flag.FlagSet) func(args []string, stdout io.Writer) (int, error)
}

func commands() []command {
	return []command{
		{"run", runUsage, runFlags}, {"up", upUsage, upFlags}, {"down", downUsage, downFlags},
		{"status", statusUsageText, statusFlags}, {"env", envUsage, envFlags},
		{"top", topUsage, topFlags},
	}
}

func main() {
	if os.Getenv(rankEnv) != "" {
		err := becomeRank(os.Args[1:])
		fmt.Fprintln(os.Stderr, "tapverbs:", err)
		os.Exit(statusFailed)
	}
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// run is main with its arguments and outputs named; it gives the exit status.
func run(args []string, stdout, stderr io.Writer) int {
	status, err := dispatch(args, stdout)
	if err != nil {
		fmt.Fprintf(stderr, "tapverbs: %s\n", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return status
}

// errUsage marks errors of the command line.
type errUsage struct{ error }

func usageErrorf(format string, args ...any) error { return errUsage{fmt.Errorf(format, args...)} }

func dispatch(args []string, stdout io.Writer) (int, error) {
	if len(args) == 0 {
		return statusUsage, errors.New("say what to do: tapverbs run -- COMMAND (see tapverbs -h)")
	}
	switch args[0] {
	case "-h", "-help", "--help", "help":
		fmt.Fprint(stdout, usage)
		return 0, nil
	}
	for _, c := range commands() {
		if c.name != args[0] {
			continue
		}
		fs := flag.NewFlagSet("tapverbs "+c.name, flag.ContinueOnError)
		fs.SetOutput(io.Discard)
		do := c.flags(fs)
		switch err := fs.Parse(args[1:]); {
		case errors.Is(err, flag.ErrHelp):
			fmt.Fprint(stdout, c.usage)
			fs.SetOutput(stdout)
			fs.PrintDefaults()
			return 0, nil
		case err != nil:
			return statusUsage, fmt.Errorf("%w (see tapverbs %s -h)", err, c.name)
		}
		status, err := do(fs.Args(), stdout)
		var wrong errUsage
		if errors.As(err, &wrong) {
			status = statusUsage
		} else if err != nil && status == 0 {
			status = statusFailed
		}
		return status, err
	}
	return statusUsage, fmt.Errorf("%q is not a command: run, up, down, status, env and top are (see tapverbs -h)", args[0])
}

// noArguments is the error for a command that takes flags only.
func noArguments(args []string) error {
	if len(args) > 0 {
		return usageErrorf("%q: no arguments are taken", args[0])
	}
	return nil
}
