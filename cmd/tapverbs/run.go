// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/internal/sysfs"
	"github.com/tapverbs/tapverbs/provider"
)

const runUsage = `tapverbs run [flags] -- COMMAND [ARGUMENT...]

makes a private network (a bridge with TAP ports in a namespace of its own; root, or
user namespaces, are needed) and starts COMMAND in it with the library path, port and
addresses set. With -n N it starts N copies, which share the network and its loopback
interface; each finds TAPVERBS_RANK (0 to N-1), TAPVERBS_SIZE (N), TAPVERBS_ADDR (its
address) and TAPVERBS_PEER (the address of rank 0, or of rank 1 for rank 0) in its
environment. Each sees its device in /sys/class/infiniband, and no other. The first copy
to fail ends the others, and its status is the result.

With -port the copies get ports that are there already, such as those of tapverbs up, one
each, in the network as it is.

Flags:
`

// insideEnv marks the process in the private namespaces; its value is the mount
// namespace that it was started from.
const insideEnv = "TAPVERBS_RUN_INSIDE"

// options is what the command line of run says.
type options struct {
	n     int
	mtu   int
	queue int // queues of each port
	libs  string
	ports string
	addr  string
	cmd   []string
}

// maxRanks is how many addresses the fabric has (10.91.0.0/24).
const maxRanks = 253

func runFlags(fs *flag.FlagSet) func([]string, io.Writer) (int, error) {
	o := &options{}
	fs.IntVar(&o.n, "n", 1, "how many `copies` to start (default 1, or one for each -port)")
	fs.IntVar(&o.mtu, "mtu", fabric.DefaultMTU, "MTU of the private network in `bytes`")
	fs.IntVar(&o.queue, "queues", 1, "how many `queues` of its port each copy uses, with an engine each: 1, 2, 4, 8 or 16;\na -port must have been made for several (tapverbs up -queues)")
	fs.StringVar(&o.libs, "libs", "", "`directory` of libibverbs.so.1 and its engine (default: lib beside this program or one level up)")
	fs.StringVar(&o.ports, "port", "", "`names` of the TAP ports to use, separated by commas, instead of a private network")
	fs.StringVar(&o.addr, "addr", "", "`addresses` of the engine on -port, separated by commas, such as 10.91.0.1/24 (default: those that tapverbs up gave it)")
	return func(args []string, _ io.Writer) (int, error) {
		set := map[string]bool{}
		fs.Visit(func(f *flag.Flag) { set[f.Name] = true })
		o.cmd = args
		if err := o.check(set); err != nil {
			return statusUsage, err
		}
		return o.run()
	}
}

// check completes what was said; set holds the flags that were.
func (o *options) check(set map[string]bool) error {
	if len(o.cmd) == 0 {
		return usageErrorf("no command to run: tapverbs run -- COMMAND")
	}
	if err := checkQueues(o.queue); err != nil {
		return err
	}
	if o.n < 1 || o.n > maxRanks {
		return usageErrorf("-n %d: from 1 to %d copies", o.n, maxRanks)
	}
	if o.ports == "" {
		if o.addr != "" {
			return usageErrorf("-addr is for a -port; a private network has addresses of its own")
		}
		return nil
	}
	names := strings.Split(o.ports, ",")
	for i, name := range names {
		for _, other := range names[:i] {
			if other == name {
				return usageErrorf("-port %s: a port belongs to one copy, and %s is there twice", o.ports, name)
			}
		}
	}
	switch {
	case set["mtu"]:
		return usageErrorf("-mtu is for a private network; a -port has its own")
	case set["n"] && o.n != len(names):
		return usageErrorf("-n %d: -port names %d", o.n, len(names))
	case o.addr != "" && len(names) > 1:
		return usageErrorf("-addr is for a single -port")
	}
	o.n = len(names)
	return nil
}

// statusOf gives a program's exit status as shells have it: 128 and the signal's
// number for one that a signal ended.
func statusOf(err error) (int, error) {
	var exit *exec.ExitError
	if err == nil {
		return 0, nil
	}
	if !errors.As(err, &exit) {
		return statusFailed, err
	}
	if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal()), nil
	}
	return exit.ExitCode(), nil
}

func (o *options) run() (int, error) {
	if o.libs == "" {
		o.libs = findLibs()
	}
	if o.libs == "" {
		return statusFailed, errors.New("libibverbs.so.1 and libtapverbs-engine.so are neither in lib beside this program nor one level up; build them (make libs), or name their directory: -libs DIR")
	}
	libs, err := filepath.Abs(o.libs)
	if err != nil {
		return statusFailed, err
	}
	o.libs = libs
	if _, err := exec.LookPath(o.cmd[0]); err != nil {
		return statusFailed, fmt.Errorf("run %s: %w", o.cmd[0], err)
	}
	if sysfs.Inside(os.Getenv(insideEnv)) {
		return o.inside()
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	outer, err := sysfs.Namespace()
	if err != nil {
		return statusFailed, err
	}
	cmd.Env = append(os.Environ(), insideEnv+"="+outer)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	var ports []port
	start := fabric.Start
	if o.ports != "" {
		// Found here, where errors are this program's own.
		if ports, err = o.namedPorts(); err != nil {
			return statusFailed, err
		}
		start = fabric.StartHere
	}
	sigs := make(chan os.Signal, 1)
	signal.Notify(sigs, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	wait, err := start(cmd)
	if err != nil && o.ports != "" && errors.Is(err, fabric.ErrUserNS) {
		// The port does not need namespaces; the files do.
		notShown(err)
		return o.copies(ports, false)
	}
	if err != nil {
		return statusFailed, err
	}
	done := make(chan error, 1)
	go func() { done <- wait() }()
	for {
		select {
		case s := <-sigs:
			_ = cmd.Process.Signal(s) // an error means that it has ended, which done tells
		case err := <-done:
			return statusOf(err)
		}
	}
}

// findLibs looks for the libraries around this program.
func findLibs() string {
	exe, err := os.Executable()
	if err != nil {
		return ""
	}
	if exe, err = filepath.EvalSymlinks(exe); err != nil {
		return ""
	}
	dir := filepath.Dir(exe)
	for _, d := range []string{filepath.Join(dir, "lib"), filepath.Join(filepath.Dir(dir), "lib")} {
		if _, err := os.Stat(filepath.Join(d, "libtapverbs-engine.so")); err == nil {
			return d
		}
	}
	return ""
}

// port is a TAP port and the engine on it, in the form of the environment.
type port struct {
	name, mac, addr, addr6 string
}

// vars are the variables that say so.
func (p port) vars() []string {
	return []string{provider.EnvPort + "=" + p.name, provider.EnvMAC + "=" + p.mac, provider.EnvAddr + "=" + p.addr, provider.EnvAddr6 + "=" + p.addr6}
}

// first is the first of the addresses, without the length of its network.
func first(addrs string) string {
	a, _, _ := strings.Cut(addrs, ",")
	a, _, _ = strings.Cut(a, "/")
	return a
}

// plain is an address without the length of its network if that is what goes without
// saying: programs take TAPVERBS_ADDR for an address.
func plain(p netip.Prefix, bits int) string {
	if p.Bits() == bits {
		return p.Addr().String()
	}
	return p.String()
}

// namedPorts are those that -port names.
func (o *options) namedPorts() ([]port, error) {
	found, err := fabric.Ports()
	if err != nil {
		return nil, err
	}
	var ports []port
	for name := range strings.SplitSeq(o.ports, ",") {
		p := port{name: name, addr: o.addr}
		for _, f := range found {
			if f.Name == name && o.addr == "" {
				p.addr, p.addr6 = plain(f.V4, 24), plain(f.V6, 64)
			}
		}
		if p.addr == "" {
			return nil, fmt.Errorf("-port %s: tapverbs up did not make it, so say what the engine's address is: -addr", name)
		}
		get := map[string]string{provider.EnvAddr: p.addr, provider.EnvAddr6: p.addr6}
		if _, err := provider.ConfigFromEnv(func(name string) string { return get[name] }); err != nil {
			return nil, fmt.Errorf("-addr %s: %w", o.addr, err)
		}
		ports = append(ports, p)
	}
	return ports, nil
}

// privatePorts makes the fabric in this namespace, which goes with this process: there
// is nothing to undo.
func (o *options) privatePorts() ([]port, error) {
	f, err := fabric.New(fabric.Config{MTU: o.mtu, MultiQueue: o.queue > 1})
	if err != nil {
		return nil, err
	}
	ports := make([]port, o.n)
	for i := range ports {
		p, err := f.AddPort(i)
		if err != nil {
			return nil, err
		}
		m := p.MAC
		ports[i] = port{
			name: p.Name, addr: p.V4.Addr().String(), addr6: p.V6.Addr().String(),
			mac: fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5]),
		}
	}
	return ports, nil
}

// inside is the process in the private namespaces: it makes the fabric, if there is to
// be one, and runs the copies.
func (o *options) inside() (int, error) {
	// Mounts and the network namespace of /sys are this thread's; copies are killed
	// when the thread that started them ends (Pdeathsig).
	runtime.LockOSThread()
	os.Unsetenv(insideEnv)
	show := true
	if err := sysfs.Prepare(o.ports == ""); err != nil {
		notShown(err)
		show = false
	}
	find := o.privatePorts
	if o.ports != "" {
		find = o.namedPorts
	}
	ports, err := find()
	if err != nil {
		return statusFailed, err
	}
	return o.copies(ports, show)
}

// notShown says that programs will not find their device in /sys/class/infiniband.
func notShown(err error) {
	fmt.Fprintf(os.Stderr, "tapverbs: the program does not see its device in %s (the library has it all the same): %v\n",
		sysfs.ClassDir, err)
}
