// SPDX-License-Identifier: Apache-2.0

// Lab is package lab as a program:
//
//	lab up [-k 6.1|6.12] [-s CPUS] [-M MEMORY] [-m MTU] [-kvm]   start a guest; the network is a namespace of its own
//	lab run [-t SECONDS] LINE      run a line of shell in the guest; its output and exit status come back (124: too late)
//	lab put 1 FILE PATH            copy a file into the guest
//	lab tap NAME [vnet_hdr]        make a TAP on the guest's bridge, for an engine
//	lab ns COMMAND...              run a command of this machine in the network namespace
//	lab down                       end it
//	lab fetch [-k 6.1|6.12]        only fetch and make what up starts
//
// LAB_NAME names the lab (lab): several can be there at a time.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/test/interop/lab"
)

const usage = `lab up [-k 6.1|6.12] [-s CPUS] [-M MIB] [-m MTU] [-kvm]
lab run [-t SECONDS] LINE
lab put 1 FILE PATH
lab tap NAME [vnet_hdr]
lab ns COMMAND...
lab down
lab fetch [-k 6.1|6.12]
`

func main() {
	if err := run(os.Args[1:]); err != nil {
		var status lab.StatusError
		if errors.As(err, &status) {
			os.Exit(int(status))
		}
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}

var errUsage = errors.New("usage: " + strings.TrimSpace(usage))

func run(args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	switch cmd, args := args[0], args[1:]; {
	case cmd == "up":
		return up(args)
	case cmd == "fetch":
		return fetch(args)
	case cmd == "hold" && len(args) >= 2:
		return hold(args)
	case cmd == "down":
		return down()
	case cmd == "run":
		return inside(func() error { return runLine(args) })
	case cmd == "put" && len(args) == 3 && args[0] == "1":
		return inside(func() error { return lab.Put(context.Background(), args[1], args[2]) })
	case cmd == "tap" && (len(args) == 1 || len(args) == 2 && args[1] == "vnet_hdr"):
		return inside(func() error { return lab.NewPort(args[0]) })
	case cmd == "ns" && len(args) > 0:
		return inside(func() error {
			path, err := exec.LookPath(args[0])
			if err != nil {
				return err
			}
			return syscall.Exec(path, args, os.Environ())
		})
	}
	return errUsage
}

// file holds the number of the process that holds the lab, and is locked by it.
func file() string {
	name := os.Getenv("LAB_NAME")
	if name == "" {
		name = "lab"
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("tapverbs-lab-%d-%s", os.Getuid(), strings.ReplaceAll(name, "/", "_")))
}

var errNone = errors.New("there is no lab; begin with lab up")

// holder is the process that holds the lab.
func holder() (pid int, f *os.File, err error) {
	f, err = os.OpenFile(file(), os.O_RDWR|unix.O_NOFOLLOW, 0)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil, errNone
	}
	if err != nil {
		return 0, nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		// Whoever held it is gone, and the lab with it.
		return 0, nil, errors.Join(errNone, os.Remove(file()), f.Close())
	}
	b, err := io.ReadAll(f)
	if err == nil {
		pid, err = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	if err != nil {
		return 0, nil, fmt.Errorf("%s: %w", file(), errors.Join(err, f.Close()))
	}
	return pid, f, nil
}

// up starts the holder in a network namespace of its own, and waits until the guest is up.
func up(args []string) error {
	if pid, f, err := holder(); err == nil {
		return errors.Join(fmt.Errorf("there is a lab already, of process %d; end it with lab down", pid), f.Close())
	} else if !errors.Is(err, errNone) {
		return err
	}
	o, err := options(args)
	if err != nil {
		return err
	}
	if err := lab.CheckQEMU(); err != nil {
		return err
	}
	began := time.Now()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	// The namespace that the holder is in leads nowhere: what is fetched is fetched here.
	image, err := lab.Build(ctx, o.kernel, say)
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	c := exec.Command("/proc/self/exe", append([]string{"hold", image.Kernel, image.Initramfs}, args...)...)
	c.Stderr = os.Stderr
	c.ExtraFiles = []*os.File{w}
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Setsid: true}
	if err := c.Start(); err != nil {
		return fmt.Errorf("a network namespace: %w", err)
	}
	// An interrupted up leaves nothing behind.
	leave := context.AfterFunc(ctx, func() { _ = c.Process.Signal(unix.SIGTERM) })
	_ = w.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	if string(b) != "up" {
		return fmt.Errorf("no lab: %w", c.Wait())
	}
	leave()
	say("up after %.0f s: Linux %s, %s and %s", time.Since(began).Seconds(), o.kernel, lab.GuestAddr, lab.GuestAddr6)
	return nil
}

func fetch(args []string) error {
	o, err := options(args)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	_, err = lab.Build(ctx, o.kernel, say)
	return err
}

func say(format string, args ...any) { fmt.Fprintf(os.Stderr, "lab: "+format+"\n", args...) }

// upOptions are those of lab up.
type upOptions struct {
	kernel string
	cfg    lab.Config
}

func options(args []string) (o upOptions, err error) {
	fs := flag.NewFlagSet("lab up", flag.ExitOnError)
	fs.StringVar(&o.kernel, "k", "6.1", "`version` of the kernel: 6.1 or 6.12")
	fs.IntVar(&o.cfg.CPUs, "s", 1, "processors")
	fs.IntVar(&o.cfg.Memory, "M", 0, "memory in `MiB`")
	fs.IntVar(&o.cfg.MTU, "m", 0, "MTU of eth0 in `bytes`")
	fs.BoolVar(&o.cfg.KVM, "kvm", false, "use the processor's virtualization")
	guests := fs.Int("n", 1, "guests: 1")
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	if *guests != 1 || fs.NArg() != 0 {
		return o, errUsage
	}
	return o, nil
}

// upFD is where the holder says that the lab is up.
const upFD = 3

// hold has the lab until it is told to end: lab hold KERNEL INITRAMFS, and options of lab up.
func hold(args []string) error {
	unix.CloseOnExec(upFD)
	o, err := options(args[2:])
	if err != nil {
		return err
	}
	o.cfg.Image = lab.Image{Kernel: args[0], Initramfs: args[1]}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	defer stop()
	f, err := os.OpenFile(file(), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("another lab is being started: %w", err)
	}
	defer f.Close() // that is what unlocks it
	defer func() { _ = os.Remove(file()) }()
	if err := f.Truncate(0); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(f, os.Getpid()); err != nil {
		return err
	}
	l, err := lab.Up(ctx, o.cfg)
	if err != nil {
		return err
	}
	told := os.NewFile(upFD, "up")
	if _, err := told.WriteString("up"); err == nil {
		_ = told.Close()
		// Who reads what lab up prints waits for the end of that.
		if null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0); err == nil {
			_ = unix.Dup3(int(null.Fd()), 2, 0)
		}
		select {
		case <-ctx.Done():
		case <-l.Ended():
		}
	}
	return l.Down()
}

// down ends the holder, and waits until all of it is gone.
func down() error {
	pid, f, err := holder()
	if errors.Is(err, errNone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Kill(pid, unix.SIGTERM); err != nil {
		return err
	}
	return unix.Flock(int(f.Fd()), unix.LOCK_EX)
}

// inside calls f on a thread in the lab's network namespace.
func inside(f func() error) error {
	pid, file, err := holder()
	if err != nil {
		return err
	}
	defer file.Close()
	runtime.LockOSThread()
	ns, err := netns.GetFromPid(pid)
	if err == nil {
		err = netns.Set(ns)
	}
	if err != nil {
		return fmt.Errorf("the lab's network namespace: %w", err)
	}
	return f()
}

func runLine(args []string) error {
	fs := flag.NewFlagSet("lab run", flag.ExitOnError)
	seconds := fs.Float64("t", 0, "end it after so many `seconds`")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() == 0 {
		return errUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	defer stop()
	if *seconds > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(*seconds*float64(time.Second)))
		defer cancel()
	}
	err := lab.Stream(ctx, strings.Join(fs.Args(), " "), nil, os.Stdout, os.Stderr)
	if errors.Is(err, context.DeadlineExceeded) {
		return lab.StatusError(124)
	}
	return err
}
