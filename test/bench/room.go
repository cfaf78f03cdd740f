// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/internal/fabric"
)

// The room where everything is measured: a private network namespace with one bridge.
// On it are two TAPs, for engines and for raw frames, and two hosts: network namespaces
// with a veth each, for everybody who uses the kernel's TCP.

// thread is where programs are started: it is never given up, as they die with it.
type thread chan func()

func newThread(prepare func() error) (thread, error) {
	t, ready := make(thread), make(chan error)
	go func() {
		runtime.LockOSThread()
		err := prepare()
		if ready <- err; err != nil {
			return
		}
		for f := range t {
			f()
		}
	}()
	return t, <-ready
}

// host is a network namespace on the bridge.
type host struct {
	thread
	addr string
}

// queueLen is how many frames a TAP holds for its reader: the kernel's own number for a
// new TAP, and not what internal/fabric gives those that tests and the demo use. All that is
// compared here keeps less than that in flight.
const queueLen = 1000

type room struct {
	fab   *fabric.Fabric
	ports [2]fabric.Port
	// queues is another bridge, with TAPs of several queues: these cannot be opened in another way.
	queues *fabric.Fabric
	queued [2]fabric.Port
	here   thread // the namespace of the bridge
	hosts  [2]host
	bin    string // directory of the project's programs
	dir    string // for files; removed at the end
	self   string // this program
}

func newRoom(bin string) (r *room, err error) {
	r = &room{bin: bin, self: "/proc/self/exe"}
	if r.dir, err = os.MkdirTemp("", "tapverbs-bench-"); err != nil {
		return nil, err
	}
	if r.fab, err = fabric.New(fabric.Config{TxQueueLen: queueLen}); err != nil {
		return r, err
	}
	if r.queues, err = fabric.New(fabric.Config{Name: "tvq", TxQueueLen: queueLen, MultiQueue: true}); err != nil {
		return r, err
	}
	for i := range r.ports {
		if r.ports[i], err = r.fab.AddPort(i); err != nil {
			return r, err
		}
		if r.queued[i], err = r.queues.AddPort(i); err != nil {
			return r, err
		}
	}
	if r.here, err = newThread(func() error { return nil }); err != nil {
		return r, err
	}
	bridge, err := netlink.LinkByName(r.fab.Name())
	if err != nil {
		return r, err
	}
	for i := range r.hosts {
		if r.hosts[i], err = newHost(i, bridge); err != nil {
			return r, fmt.Errorf("a host on the bridge: %w", err)
		}
	}
	return r, nil
}

func (r *room) close() error {
	errs := []error{os.RemoveAll(r.dir)}
	if r.fab != nil {
		errs = append(errs, r.fab.Close())
	}
	if r.queues != nil {
		errs = append(errs, r.queues.Close())
	}
	return errors.Join(errs...)
}

// newHost makes a network namespace that a veth joins to the bridge, with defaults for
// all but the MTU, which is the bridge's.
func newHost(i int, bridge netlink.Link) (h host, err error) {
	h.addr = fmt.Sprintf("10.91.0.%d", 101+i)
	outer, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return h, err
	}
	defer outer.Close()
	h.thread, err = newThread(func() error {
		// Some programs look for their interfaces in /sys, which shows those of the
		// namespace where it was mounted.
		if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		if err := unix.Mount("sysfs", "/sys", "sysfs", 0, ""); err != nil {
			return fmt.Errorf("mount /sys: %w", err)
		}
		ns, err := netns.Get()
		if err != nil {
			return err
		}
		defer ns.Close()
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.MasterIndex = fmt.Sprintf("tv0h%d", i), bridge.Attrs().MTU, bridge.Attrs().Index
		const inner = "eth0"
		if err := outer.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: inner, PeerNamespace: netlink.NsFd(ns)}); err != nil {
			return fmt.Errorf("make a veth: %w", err)
		}
		link, err := outer.LinkByName(attrs.Name)
		if err == nil {
			err = outer.LinkSetUp(link)
		}
		if err != nil {
			return err
		}
		nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer nl.Close()
		for _, name := range []string{"lo", inner} {
			l, err := nl.LinkByName(name)
			if err != nil {
				return err
			}
			if name == inner {
				addr, err := netlink.ParseAddr(h.addr + "/24")
				if err == nil {
					err = nl.LinkSetMTU(l, attrs.MTU)
				}
				if err == nil {
					err = nl.AddrAdd(l, addr)
				}
				if err != nil {
					return err
				}
			}
			if err := nl.LinkSetUp(l); err != nil {
				return err
			}
		}
		return nil
	})
	return h, err
}

// command is a program to run.
type command struct {
	at   thread
	args []string
	env  []string
}

// name is the program's, without what measures it or makes it run here.
func (c command) name() string {
	args := c.args
	if i := slices.Index(args, "--"); i >= 0 && filepath.Base(args[0]) == "perf" {
		args = args[i+1:]
	}
	if i := slices.Index(args, "--"); i >= 0 && filepath.Base(args[0]) == "tapverbs" {
		args = args[i+1:]
	}
	if args[0] == "/proc/self/exe" {
		return args[2]
	}
	return filepath.Base(args[0])
}

// running is a program that was started.
type running struct {
	cmd      *exec.Cmd
	out, err bytes.Buffer
	done     chan struct{}
	end      error // valid once done is closed
}

func (c command) start() (*running, error) {
	r := &running{cmd: exec.Command(c.args[0], c.args[1:]...), done: make(chan struct{})}
	r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.err
	r.cmd.Env = append(os.Environ(), c.env...)
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	started := make(chan error)
	c.at <- func() { started <- r.cmd.Start() }
	if err := <-started; err != nil {
		return nil, err
	}
	go func() {
		r.end = r.cmd.Wait()
		close(r.done)
	}()
	return r, nil
}

// wait waits for the end of a program, at most so long; then it is ended.
func (r *running) wait(most time.Duration) error {
	select {
	case <-r.done:
		if r.end != nil {
			return fmt.Errorf("%w: %s", r.end, lastLines(r.err.String()+r.out.String()))
		}
		return nil
	case <-time.After(most):
		r.kill()
		return fmt.Errorf("still running after %v: %s", most, lastLines(r.err.String()+r.out.String()))
	}
}

func (r *running) kill() {
	_ = r.cmd.Process.Kill() // an error: it has ended
	<-r.done
}

// cpu is the user and system time in seconds that it took, with those it waited for.
func (r *running) cpu() float64 {
	s := r.cmd.ProcessState
	return (s.UserTime() + s.SystemTime()).Seconds()
}

// outcome is what a pair of programs printed and cost.
type outcome struct {
	server, client string
	cpu            float64 // user and system seconds of both processes
	busy           float64 // seconds that the machine's processors were busy meanwhile, with all they did
}

// longest is how long a pair may take.
const longest = 60 * time.Second

// pair runs a server, and a client as soon as the server listens at a TCP port of its
// namespace, until both end.
func pair(server, client command, port int) (o outcome, err error) {
	fail := func(who string, c command, err error) error {
		return fmt.Errorf("%s %s: %w", c.name(), who, err)
	}
	before := busy()
	s, err := server.start()
	if err != nil {
		return o, fail("(server)", server, err)
	}
	defer s.kill()
	if err := s.listens(port); err != nil {
		return o, fail("(server)", server, err)
	}
	c, err := client.start()
	if err != nil {
		return o, fail("(client)", client, err)
	}
	defer c.kill()
	if err := c.wait(longest); err != nil {
		return o, fail("(client)", client, err)
	}
	if err := s.wait(5 * time.Second); err != nil {
		return o, fail("(server)", server, err)
	}
	return outcome{s.out.String(), c.out.String(), s.cpu() + c.cpu(), busy() - before}, nil
}

// listens waits until somebody listens at a TCP port of the program's namespace.
func (r *running) listens(port int) error {
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		if fabric.Listens(r.cmd.Process.Pid, port) {
			return nil
		}
		select {
		case <-r.done:
			return fmt.Errorf("ended before it listened at port %d (%v): %s", port, r.end, lastLines(r.err.String()+r.out.String()))
		case <-time.After(5 * time.Millisecond): // nothing tells when another process listens
		}
	}
	return fmt.Errorf("does not listen at port %d: %s", port, lastLines(r.err.String()+r.out.String()))
}

// busy is how many seconds the processors have been busy since the machine started, with
// anything: the first line of /proc/stat without idle and iowait, in 1/100 s (proc(5)).
func busy() (s float64) {
	b, _ := os.ReadFile("/proc/stat") // nothing: 0
	line, _, _ := strings.Cut(string(b), "\n")
	for i, w := range strings.Fields(line) {
		if i == 0 || i == 4 || i == 5 || i > 8 {
			continue // the name, idle, iowait, and guests, who are in user, too
		}
		n, _ := strconv.ParseFloat(w, 64)
		s += n / 100
	}
	return s
}

// lastLines is the end of what a program printed, in one line, and what it said of errors before.
func lastLines(s string) string {
	var lines []string
	for line := range strings.Lines(s) {
		if line = strings.TrimSpace(line); strings.Trim(line, "-*+ ") != "" {
			lines = append(lines, line)
		}
	}
	end := max(0, len(lines)-3)
	var out []string
	for i, line := range lines {
		if i >= end || strings.Contains(line, "rror") || strings.Contains(line, "ailed") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "; ")
}

// oneLine is an error's text without line breaks, up to so many bytes.
func oneLine(err error, most int) string {
	s := strings.Join(strings.Fields(err.Error()), " ")
	return s[:min(len(s), most)]
}
