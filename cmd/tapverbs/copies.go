// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/internal/sysfs"
	"github.com/tapverbs/tapverbs/provider"
)

// rankEnv marks the process that becomes a copy; its value is the mount namespace that
// it was started from.
const rankEnv = "TAPVERBS_RUN_RANK"

// The names that libibverbs.so.1 gives the device.
const (
	deviceName = "tapverbs0"
	verbsName  = "uverbs0"
	firmware   = "tapverbs"
)

// leave is how long copies have after a SIGTERM.
const leave = 2 * time.Second

// copies runs one copy on each port. With show, each gets a mount namespace in
// which it sees its device.
func (o *options) copies(ports []port, show bool) (int, error) {
	runtime.LockOSThread() // its death would end the copies
	adopt()
	sigs := make(chan os.Signal, 1)
	signal.Notify(sigs, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	type end struct {
		rank int
		err  error
	}
	ended := make(chan end, len(ports))
	var cmds []*exec.Cmd
	var outs sync.WaitGroup
	for i := range ports {
		cmd, err := o.start(i, ports, show, &outs)
		if err != nil {
			for _, c := range cmds {
				_ = c.Process.Kill()
			}
			return statusFailed, err
		}
		cmds = append(cmds, cmd)
	}
	for i, c := range cmds {
		go func() { ended <- end{i, c.Wait()} }()
	}
	status, failed := 0, error(nil)
	var kill <-chan time.Time
	stop := func(s os.Signal) {
		for _, c := range cmds {
			_ = c.Process.Signal(s)
		}
		if kill == nil {
			kill = time.After(leave)
		}
	}
	for left := len(ports); left > 0; {
		select {
		case s := <-sigs:
			if status == 0 {
				status = 128 + int(s.(syscall.Signal))
			}
			stop(s)
		case <-kill:
			for _, c := range cmds {
				_ = c.Process.Kill()
			}
		case e := <-ended:
			left--
			if st, err := statusOf(e.err); st != 0 && status == 0 {
				status, failed = st, err
				if len(ports) > 1 {
					fmt.Fprintf(os.Stderr, "tapverbs: rank %d ended with status %d\n", e.rank, st)
				}
				stop(syscall.SIGTERM)
			}
		}
	}
	if status != 0 {
		killOrphans()
	}
	outs.Wait()
	return status, failed
}

// start starts the copy of one rank.
func (o *options) start(rank int, ports []port, show bool, outs *sync.WaitGroup) (*exec.Cmd, error) {
	p, peer := ports[rank], ports[0]
	if rank == 0 && len(ports) > 1 {
		peer = ports[1]
	}
	cmd := exec.Command(o.cmd[0], o.cmd[1:]...)
	path := o.libs
	if old := os.Getenv("LD_LIBRARY_PATH"); old != "" {
		path += ":" + old
	}
	cmd.Env = append(os.Environ(),
		"LD_LIBRARY_PATH="+path,
		"TAPVERBS_PEER="+first(peer.addr),
		"TAPVERBS_PEER6="+first(peer.addr6),
		"TAPVERBS_RANK="+strconv.Itoa(rank),
		"TAPVERBS_SIZE="+strconv.Itoa(len(ports)),
		provider.EnvSysfs+"=",
	)
	cmd.Env = append(cmd.Env, p.vars()...)
	if o.ports == "" || o.queue > 1 {
		cmd.Env = append(cmd.Env, provider.EnvQueues+"="+strconv.Itoa(o.queue))
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if show {
		ns, err := sysfs.Namespace()
		if err != nil {
			return nil, err
		}
		cmd.Path, cmd.Args = "/proc/self/exe", append([]string{"tapverbs"}, o.cmd...)
		cmd.Env = append(cmd.Env, rankEnv+"="+ns, provider.EnvSysfs+"="+(&sysfs.Device{Name: deviceName}).Dir())
		cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWNS
	}
	if rank == 0 {
		cmd.Stdin = os.Stdin
	}
	var pipes []io.Closer
	label := func(w *os.File) (*os.File, error) {
		if len(ports) == 1 || !isTerminal(w) {
			return w, nil
		}
		r, child, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		pipes = append(pipes, child)
		outs.Add(1)
		go func() {
			defer outs.Done()
			copyLines(w, r, "["+strconv.Itoa(rank)+"] ")
		}()
		return child, nil
	}
	var err error
	if cmd.Stdout, err = label(os.Stdout); err == nil {
		cmd.Stderr, err = label(os.Stderr)
	}
	if err == nil {
		err = cmd.Start()
	}
	for _, p := range pipes {
		p.Close()
	}
	if err != nil {
		return nil, fmt.Errorf("run %s: %w", o.cmd[0], err)
	}
	return cmd, nil
}

// becomeRank is the process of a copy in its mount namespace: it lets the device be
// seen there, and becomes the command.
func becomeRank(cmd []string) error {
	runtime.LockOSThread()
	if !sysfs.Inside(os.Getenv(rankEnv)) || len(cmd) == 0 {
		return errors.New(rankEnv + " is set, which is for tapverbs run alone: unset it")
	}
	os.Unsetenv(rankEnv)
	if err := showDevice(); err != nil {
		os.Unsetenv(provider.EnvSysfs)
		notShown(err)
	}
	path, err := exec.LookPath(cmd[0])
	if err == nil {
		err = syscall.Exec(path, cmd, os.Environ())
	}
	return fmt.Errorf("run %s: %w", cmd[0], err)
}

// showDevice shows the device that the environment describes.
func showDevice() error {
	cfg, err := provider.ConfigFromEnv(os.Getenv)
	if err != nil {
		return err
	}
	guid, err := provider.NodeGUID(cfg)
	if err != nil {
		return err
	}
	table, err := provider.GIDTable(cfg)
	if err != nil {
		return err
	}
	d := &sysfs.Device{
		Name: deviceName, Verbs: verbsName, GUID: guid, Firmware: firmware, NetDev: cfg.Port, Live: provider.PublishedFiles(),
	}
	for _, e := range table {
		d.GIDs = append(d.GIDs, netip.AddrFrom16(e.GID))
	}
	return sysfs.Show(d)
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// copyLines writes the lines of r to w, each with a label in front and in one call,
// so that those of several ranks do not mix.
func copyLines(w io.Writer, r io.Reader, label string) {
	b := bufio.NewReader(r)
	for {
		line, err := b.ReadBytes('\n')
		if len(line) > 0 {
			if line[len(line)-1] != '\n' {
				line = append(line, '\n')
			}
			_, _ = w.Write(append([]byte(label), line...))
		}
		if err != nil {
			return
		}
	}
}
