// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os/user"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/provider"
)

const upUsage = `tapverbs up [flags]

makes a bridge with TAP ports in this network namespace, which stay until tapverbs down.
It needs root (CAP_NET_ADMIN). The user named by -owner may use the ports without any
privileges. It prints a line for each port, which sets the environment for it:

  eval "$(tapverbs env tv0p0)"       # later, for the first one
  tapverbs run -port tv0p0 -- COMMAND

A port belongs to one process at a time.

Flags:
`

const downUsage = `tapverbs down [flags]

takes a bridge that tapverbs up made away, with its ports. Programs that use one get
IBV_EVENT_DEVICE_FATAL. It needs root (CAP_NET_ADMIN).

Flags:
`

const statusUsageText = `tapverbs status

lists the ports that tapverbs up made in this network namespace.
`

const envUsage = `tapverbs env PORT

prints a line that sets the environment for a port that tapverbs up made:

  eval "$(tapverbs env tv0p0)"
`

func upFlags(fs *flag.FlagSet) func([]string, io.Writer) (int, error) {
	ports := fs.Int("ports", 2, "how many `ports` to make")
	owner := fs.String("owner", "", "`user` who may use them, by name or number (default: root alone)")
	name := fs.String("name", fabric.DefaultName, "`name` of the bridge; ports are called after it: tv0p0, tv0p1")
	addr := fs.String("addr", "10.91.0.0/24,fd91::/64", "`networks` that ports get their addresses from, IPv4, IPv6 or both, separated by a comma")
	mtu := fs.Int("mtu", fabric.DefaultMTU, "MTU of bridge and ports in `bytes`")
	queues := fs.Int("queues", 1, "how many `queues` a program may use of a port, with an engine each: 1, 2, 4, 8 or 16")
	return func(args []string, stdout io.Writer) (int, error) {
		if err := noArguments(args); err != nil {
			return statusUsage, err
		}
		cfg := fabric.Config{Name: *name, MTU: *mtu, MultiQueue: *queues > 1}
		if err := checkQueues(*queues); err != nil {
			return statusUsage, err
		}
		if *ports < 1 {
			return statusUsage, usageErrorf("-ports %d: at least one", *ports)
		}
		for s := range strings.SplitSeq(*addr, ",") {
			p, err := netip.ParsePrefix(strings.TrimSpace(s))
			switch {
			case err != nil:
				return statusUsage, usageErrorf("-addr %s: %q is not a network, such as 10.91.0.0/24", *addr, s)
			case p.Addr().Is4():
				cfg.V4 = p
			default:
				cfg.V6 = p
			}
		}
		var err error
		if cfg.Owner, err = lookupOwner(*owner); err != nil {
			return statusFailed, err
		}
		return 0, up(cfg, *ports, *queues, stdout)
	}
}

// lookupOwner gives the number of a user, 0 for "".
func lookupOwner(s string) (uint32, error) {
	if s == "" {
		return 0, nil
	}
	if n, err := strconv.ParseUint(s, 10, 32); err == nil && uint32(n) != fabric.NoOwner {
		return uint32(n), nil
	}
	u, err := user.Lookup(s)
	if err != nil {
		return 0, fmt.Errorf("-owner %s: there is no such user", s)
	}
	n, err := strconv.ParseUint(u.Uid, 10, 32)
	return uint32(n), err
}

func up(cfg fabric.Config, n, queues int, stdout io.Writer) error {
	f, err := fabric.New(cfg)
	if errors.Is(err, fabric.ErrExists) {
		return fmt.Errorf("%w (if it is of an earlier tapverbs up: tapverbs down -name %s)", err, cfg.Name)
	}
	if err != nil {
		return err
	}
	lines := make([]string, n)
	for i := range lines {
		p, err := f.AddPort(i)
		if err != nil {
			return errors.Join(err, f.Close())
		}
		lines[i] = envLine(p)
		if queues > 1 {
			lines[i] += fmt.Sprintf(" %s=%d", provider.EnvQueues, queues)
		}
	}
	// The fabric is not closed: it stays.
	fmt.Fprintln(stdout, strings.Join(lines, "\n"))
	return nil
}

// checkQueues says what is wrong with a number of queues.
func checkQueues(n int) error {
	if n < 1 || n > provider.MaxQueues || n&(n-1) != 0 {
		return usageErrorf("-queues %d: 1, 2, 4, 8 or %d", n, provider.MaxQueues)
	}
	return nil
}

// envLine is for a shell to eval.
func envLine(p fabric.Port) string {
	return fmt.Sprintf("export %s=%s %s=%s %s=%s", provider.EnvPort, p.Name, provider.EnvAddr, p.V4, provider.EnvAddr6, p.V6)
}

func downFlags(fs *flag.FlagSet) func([]string, io.Writer) (int, error) {
	name := fs.String("name", fabric.DefaultName, "`name` of the bridge")
	return func(args []string, _ io.Writer) (int, error) {
		if err := noArguments(args); err != nil {
			return statusUsage, err
		}
		err := fabric.Remove(*name)
		if errors.Is(err, fabric.ErrNotFound) {
			err = fmt.Errorf("%w (tapverbs status lists what there is)", err)
		}
		return 0, err
	}
}

func statusFlags(*flag.FlagSet) func([]string, io.Writer) (int, error) {
	return func(args []string, stdout io.Writer) (int, error) {
		if err := noArguments(args); err != nil {
			return statusUsage, err
		}
		ports, err := fabric.Ports()
		if err != nil || len(ports) == 0 {
			return 0, err
		}
		w := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
		fmt.Fprintln(w, "PORT\tBRIDGE\tOWNER\tADDRESSES\tMTU\tSTATE")
		for _, p := range ports {
			state := "free"
			if p.InUse {
				state = "in use"
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s,%s\t%d\t%s\n", p.Name, p.Fabric, ownerName(p.Owner), p.V4, p.V6, p.MTU, state)
		}
		return 0, w.Flush()
	}
}

func ownerName(uid uint32) string {
	if uid == fabric.NoOwner {
		uid = 0
	}
	s := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(s); err == nil {
		return u.Username
	}
	return s
}

func envFlags(*flag.FlagSet) func([]string, io.Writer) (int, error) {
	return func(args []string, stdout io.Writer) (int, error) {
		if len(args) != 1 {
			return statusUsage, usageErrorf("name one port: tapverbs env PORT")
		}
		ports, err := fabric.Ports()
		if err != nil {
			return statusFailed, err
		}
		for _, p := range ports {
			if p.Name == args[0] {
				fmt.Fprintln(stdout, envLine(p.Port))
				return 0, nil
			}
		}
		return statusFailed, fmt.Errorf("port %s: %w (tapverbs status lists what there is)", args[0], fabric.ErrNotFound)
	}
}
