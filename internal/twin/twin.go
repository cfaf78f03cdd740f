// SPDX-License-Identifier: Apache-2.0

// Package twin runs the calling program as two more processes, each with a TAP
// port of its own on a private fabric: three generations of the same program.
//
//	the one the user started  Enter: a network namespace, waits, passes signals on
//	└ inside of it            Run: the bridge, two TAPs, starts the two, sums up
//	  ├ child 0               listens on the socket with descriptor ListenFD
//	  └ child 1               connects to it
//
// Each dies with its parent (Pdeathsig), and the namespace goes with the last, so
// nothing is left behind however they end.
package twin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/tapverbs/tapverbs/internal/fabric"
)

const (
	// insideEnv marks the second generation, reportEnv the third: it holds the
	// number of the descriptor that Report writes to.
	insideEnv = "TAPVERBS_TWIN_INSIDE"
	reportEnv = "TAPVERBS_TWIN_REPORT"

	reportFD = 3
	// ListenFD is the descriptor of child 0's listening TCP socket.
	ListenFD = 4
)

// StatusInterrupted is the exit status of a program that a signal ended, and of
// Enter when one did: 128 + SIGINT, as shells have it.
const StatusInterrupted = 130

// ErrInterrupted says that a signal, or a child that said so, ended Run.
var ErrInterrupted = errors.New("interrupted")

const (
	// grace is how long the other child has to notice that one is gone, and to
	// say what it saw, before it is killed.
	grace = 300 * time.Millisecond
	// leave is how long both have after a SIGTERM.
	leave = 2 * time.Second
)

// Inside says whether this process is the second generation, which calls Run.
func Inside() bool { return os.Getenv(insideEnv) != "" && fabric.InPrivate() }

// Child says whether this process is one of the two that Run started.
func Child() bool { return os.Getenv(reportEnv) != "" }

// Enter starts the calling program once more, with the same arguments, in a
// private namespace, and gives its exit status. SIGINT, SIGTERM and SIGHUP are
// passed on. An error says why it could not be started.
func Enter() (status int, err error) {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	sigs := make(chan os.Signal, 1)
	signal.Notify(sigs, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(sigs)
	wait, err := fabric.Start(cmd)
	if err != nil {
		return 1, err
	}
	done := make(chan error, 1)
	go func() { done <- wait() }()
	interrupted := false
	for {
		select {
		case <-sigs:
			interrupted = true
			// An error means that it has ended, which done tells.
			_ = cmd.Process.Signal(syscall.SIGTERM)
		case err := <-done:
			return exitStatus(err, interrupted)
		}
	}
}

func exitStatus(err error, interrupted bool) (int, error) {
	var exit *exec.ExitError
	switch {
	case interrupted:
		return StatusInterrupted, nil
	case err == nil:
		return 0, nil
	case errors.As(err, &exit) && exit.Exited():
		return exit.ExitCode(), nil
	}
	return 1, fmt.Errorf("the process in the private namespace: %w", err)
}

// Report hands the error that ends a child to Run, which prints one line for both.
// peer says that the other child is to blame. It reports false in a process that
// is no child: it has to print the error itself.
func Report(err error, peer bool) bool {
	fd, convErr := strconv.Atoi(os.Getenv(reportEnv))
	if convErr != nil {
		return false
	}
	f := os.NewFile(uintptr(fd), "report")
	defer f.Close()
	blame := "own "
	if peer {
		blame = "peer "
	}
	_, werr := io.WriteString(f, blame+OneLine(err))
	return werr == nil
}

// OneLine gives an error's text with its line breaks replaced.
func OneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// child is one of the two processes.
type child struct {
	name   string
	cmd    *exec.Cmd
	report []byte // valid after it has ended
	err    error
	killed bool // by us
	ended  bool
}

// Run makes a fabric and starts the calling program twice, with the arguments that
// args gives for child 0 and 1, its port, and the address that child 0 listens at.
// It returns when both have ended: nil when both did well, else the error of the
// one that failed of its own. When ctx ends, so do they, and it is ErrInterrupted.
func Run(ctx context.Context, names [2]string, args func(i int, p fabric.Port, addr string) []string) error {
	return RunOn(ctx, fabric.Config{}, names, args)
}

// RunOn is Run with a fabric of another kind.
func RunOn(ctx context.Context, cfg fabric.Config, names [2]string, args func(i int, p fabric.Port, addr string) []string) (err error) {
	f, err := fabric.New(cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer l.Close()
	lf, err := l.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	defer lf.Close()
	var cs [2]*child
	ends := make(chan *child, len(cs))
	running := 0
	for i := range cs {
		p, perr := f.AddPort(i)
		if perr == nil {
			cs[i], perr = start(names[i], args(i, p, l.Addr().String()), lf, ends)
		}
		if perr != nil {
			cs[0].kill()
			for range running {
				<-ends
			}
			return perr
		}
		running++
	}
	return wait(ctx, cs, ends)
}

// wait waits for both children and says how they ended.
func wait(ctx context.Context, cs [2]*child, ends <-chan *child) error {
	done := ctx.Done()
	var kill <-chan time.Time
	for running := len(cs); running > 0; {
		select {
		case c := <-ends:
			c.ended = true
			running--
			if c.err != nil && kill == nil {
				kill = time.After(grace)
			}
		case <-done:
			done = nil
			for _, c := range cs {
				c.signal(syscall.SIGTERM)
			}
			kill = time.After(leave)
		case <-kill:
			for _, c := range cs {
				c.kill()
			}
		}
	}
	if ctx.Err() != nil {
		return ErrInterrupted
	}
	return verdict(cs)
}

// verdict picks the error to show: a child that was killed by others comes before
// one that failed, and both before one that blames its peer.
func verdict(cs [2]*child) error {
	var best error
	rank := 0
	for _, c := range cs {
		if r, err := c.verdict(); r > rank {
			rank, best = r, err
		}
	}
	return best
}

func (c *child) verdict() (rank int, err error) {
	if c.err == nil {
		return 0, nil
	}
	var exit *exec.ExitError
	blame, text, _ := strings.Cut(string(c.report), " ")
	switch {
	case !errors.As(c.err, &exit):
		return 4, fmt.Errorf("the %s: %w", c.name, c.err)
	case exit.ExitCode() == StatusInterrupted:
		return 5, ErrInterrupted
	case !exit.Exited() && !c.killed:
		return 4, fmt.Errorf("the %s was killed half-way (%v)", c.name, exit)
	case blame == "own":
		return 3, errors.New(text)
	case blame == "peer":
		return 2, fmt.Errorf("the %s: %s", c.name, text)
	}
	return 1, fmt.Errorf("the %s ended without a word (%v)", c.name, exit)
}

// start starts a child; its end is sent to ends.
func start(name string, args []string, listener *os.File, ends chan<- *child) (*child, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer w.Close()
	c := &child{name: name, cmd: exec.Command("/proc/self/exe", args...)}
	c.cmd.Args[0] = os.Args[0]
	c.cmd.Stdout, c.cmd.Stderr = os.Stdout, os.Stderr
	c.cmd.ExtraFiles = []*os.File{reportFD - 3: w, ListenFD - 3: listener}
	c.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", reportEnv, reportFD))
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		// Pdeathsig acts when this thread ends, not the process: so it stays.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer r.Close()
		err := c.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		// The pipe ends with the child, which has the only other end.
		c.report, _ = io.ReadAll(io.LimitReader(r, 4<<10))
		c.err = c.cmd.Wait()
		ends <- c
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting the %s: %w", name, err)
	}
	return c, nil
}

// signal sends a signal; to a child that has ended it does nothing.
func (c *child) signal(s os.Signal) {
	if c != nil && !c.ended {
		_ = c.cmd.Process.Signal(s)
	}
}

func (c *child) kill() {
	if c != nil && !c.ended {
		c.killed = true
		_ = c.cmd.Process.Kill()
	}
}
