// SPDX-License-Identifier: Apache-2.0

// Package interop has the kernel's soft-RoCE as peer: in a virtual machine with a stock
// Debian kernel (package lab) run its own programs and those of rdma-core, and here, on a port
// of the same bridge, those of this project and the same programs on libibverbs.so.1 of this
// project. README.md has the table of what ran. "make interop" runs it; without
// TAPVERBS_LAB its tests say that they are not run.
package interop

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/test/interop/lab"
)

const (
	// labEnv has the guest's kernel, 6.1 or 6.12.
	labEnv = "TAPVERBS_LAB"
	// setEnv says which cases: "short", "all", or those that are quick.
	setEnv = "TAPVERBS_LAB_SET"
	// insideEnv says that this process is in the network namespace, and where things
	// are: the programs, the kernel, the initramfs.
	insideEnv = "INTEROP_INSIDE"
)

// Our addresses, as the kernel's are in package lab. ourPort is made once for all cases, which
// open it in turn; so is farPort, for what is beyond the guest.
const (
	ourPort  = "tv1"
	farPort  = "tv2"
	ourAddr  = "10.77.0.50"
	ourAddr6 = "fd77::50"
)

// built is where the programs are: make build libs. preloads is a directory with what is loaded
// before some of them: listening.so of test/conformance, which tells of servers that listen by
// RDMA CM, patient.so, which has the examples of libibverbs wait longer, and gate.so, which has
// clients of perftest's wait for their server.
var built, preloads string

func bin(name string) string     { return filepath.Join(built, name) }
func libs() string               { return filepath.Join(built, "lib") }
func preload(name string) string { return "LD_PRELOAD=" + filepath.Join(preloads, name+".so") }

// noGuest is the exit status when there is no guest and nothing was tested, which is another
// thing than a test that fails.
const noGuest = 77

// errNoGuest is why.
type errNoGuest struct{ error }

func (e errNoGuest) Unwrap() error { return e.error }

func TestMain(m *testing.M) {
	flag.Parse()
	kernel, inside := os.Getenv(labEnv), os.Getenv(insideEnv)
	var status int
	var err error
	switch {
	case kernel == "":
		status = m.Run()
	case inside == "":
		status, err = outside(kernel)
	default:
		status, err = run(m, strings.Split(inside, ":"))
	}
	switch {
	case errors.As(err, new(errNoGuest)):
		fmt.Fprintln(os.Stderr, "interop: NO GUEST, nothing was tested:", err)
		status = noGuest
	case err != nil:
		fmt.Fprintln(os.Stderr, "interop:", err)
		status = 1
	}
	os.Exit(status)
}

// outside makes the guest while there is a network to fetch it from, and goes to a private one.
func outside(kernel string) (status int, err error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := lab.CheckQEMU(); err != nil {
		return 1, errNoGuest{err}
	}
	// The libraries that this is about.
	dir, err := filepath.Abs("../../bin")
	if err != nil {
		return 1, err
	}
	for _, need := range []string{"pingpong", "lib/libtapverbs-engine.so"} {
		if _, err := os.Stat(filepath.Join(dir, need)); err != nil {
			return 1, fmt.Errorf("%w; make build libs", err)
		}
	}
	tmp, err := os.MkdirTemp("", "interop")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(tmp)
	for _, c := range []string{"../conformance/testdata/listening.c", "testdata/patient.c", "testdata/gate.c"} {
		so := filepath.Join(tmp, strings.TrimSuffix(filepath.Base(c), ".c")+".so")
		if out, err := exec.CommandContext(ctx, "cc", "-O2", "-fPIC", "-shared", "-o", so, c, "-ldl").CombinedOutput(); err != nil {
			return 1, fmt.Errorf("cc: %w\n%s", err, out)
		}
	}
	image, err := lab.Build(ctx, kernel, func(format string, args ...any) { fmt.Printf("lab: "+format+"\n", args...) })
	if err != nil {
		return 1, errNoGuest{err}
	}
	c := exec.Command("/proc/self/exe", os.Args[1:]...)
	c.Env = append(os.Environ(), insideEnv+"="+strings.Join([]string{dir, tmp, image.Kernel, image.Initramfs}, ":"))
	c.Stdout, c.Stderr = os.Stdout, os.Stderr
	wait, err := fabric.Start(c)
	if err != nil {
		return 1, err
	}
	through := context.AfterFunc(ctx, func() { _ = c.Process.Signal(syscall.SIGTERM) })
	defer through()
	if err := wait(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		return 1, err
	}
	return c.ProcessState.ExitCode(), nil
}

// run has the guest started, and runs the tests.
func run(m *testing.M, inside []string) (status int, err error) {
	built, preloads = inside[0], inside[1]
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	began := time.Now()
	l, err := lab.Up(ctx, lab.Config{Image: lab.Image{Kernel: inside[2], Initramfs: inside[3]}})
	if err != nil {
		return 1, errNoGuest{err}
	}
	defer func() { err = errors.Join(err, l.Down()) }()
	for _, port := range []string{ourPort, farPort} {
		if err := lab.NewPort(port); err != nil {
			return 1, err
		}
	}
	what, err := lab.Run(ctx, "uname -r; rdma link")
	if err != nil {
		return 1, fmt.Errorf("the guest: %w", err)
	}
	if err := lab.Put(ctx, filepath.Join(preloads, "patient.so"), "/tmp/patient.so"); err != nil {
		return 1, fmt.Errorf("the guest: %w", err)
	}
	fmt.Printf("the guest is up after %.0f s: Linux %s\n", time.Since(began).Seconds(), strings.Join(strings.Fields(what), " "))
	// An interrupt ends the guest, and with that all that waits for it.
	through := context.AfterFunc(ctx, func() {
		_ = l.Down()
		os.Exit(130)
	})
	defer through()
	status = m.Run()
	select {
	case <-l.Ended():
		return 1, fmt.Errorf("the guest has not lived to the end of the tests: %w", l.Why())
	default:
		return status, nil
	}
}

// needLab skips a test when there is no guest, or nothing of it is wanted.
func needLab(t *testing.T, s set) {
	t.Helper()
	if os.Getenv(labEnv) == "" {
		t.Skip("the kernel's soft-RoCE in a virtual machine is not asked for: make interop")
	}
	if !wanted(s) {
		t.Skip("INTEROP=short: not in the short set")
	}
}

// set is how much of this is run. Each case has the smallest set that it is in.
type set int

const (
	short set = iota // one of each kind: for CI
	usual            // each row of README.md's table
	full             // all combinations
)

// wanted says whether cases of a set are run.
func wanted(s set) bool {
	switch os.Getenv(setEnv) {
	case "short":
		return s == short
	case "all":
		return true
	default:
		return s <= usual
	}
}

// caseTime is how long one case may take. Messages take milliseconds each; this is for what
// hangs, on a machine that may be busy with other things.
const caseTime = 5 * time.Minute

// one runs a case, and prints a line about it.
func one(t *testing.T, name string, f func(t *testing.T, ctx context.Context)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		ctx, cancel := context.WithTimeoutCause(t.Context(), caseTime, fmt.Errorf("not done after %v", caseTime))
		began := time.Now()
		t.Cleanup(func() { // after all other cleanup
			cancel()
			verdict := "ok  "
			if t.Failed() {
				verdict = "FAIL"
			} else if t.Skipped() {
				verdict = "skip"
			}
			fmt.Printf("%s %5.1f s  %s\n", verdict, time.Since(began).Seconds(), name)
		})
		f(t, ctx)
	})
}

// prog is a program that runs: in the guest, or here.
type prog struct {
	where string
	line  string
	out   buffer
	done  chan struct{}
	err   error
	end   context.CancelFunc
}

// start starts a line of shell. What still runs when the test is over is killed, and printed
// when it failed.
func start(t *testing.T, ctx context.Context, where, line string, run func(ctx context.Context, p *prog) error) *prog {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	p := &prog{where: where, line: line, done: make(chan struct{}), end: cancel}
	go func() {
		defer close(p.done)
		p.err = run(ctx, p)
	}()
	t.Cleanup(func() {
		cancel()
		<-p.done
		if t.Failed() {
			t.Logf("%s: %s: %v\n%s", p.where, p.line, p.err, p.out.String())
		}
	})
	return p
}

// guest starts a line of shell in the guest.
func guest(t *testing.T, ctx context.Context, line string) *prog {
	t.Helper()
	return start(t, ctx, "guest", line, func(ctx context.Context, p *prog) error {
		return lab.Stream(ctx, line, nil, &p.out, &p.out)
	})
}

// here starts a program on this side, on our libraries and port, with more in its environment.
func here(t *testing.T, ctx context.Context, line string, env ...string) *prog {
	t.Helper()
	return start(t, ctx, "here", line, func(ctx context.Context, p *prog) error {
		args := strings.Fields(line)
		c := exec.Command(args[0], args[1:]...)
		c.Env = append(os.Environ(), "LD_LIBRARY_PATH="+libs(), "TAPVERBS_PORT="+ourPort, "TAPVERBS_ADDR="+ourAddr+"/24", "TAPVERBS_ADDR6="+ourAddr6+"/64",
			"TAPVERBS_MONITOR=off")
		c.Env = append(c.Env, env...)
		c.Stdout, c.Stderr = &p.out, &p.out
		wait, err := fabric.StartHere(c)
		if err != nil {
			return err
		}
		stop := context.AfterFunc(ctx, func() { _ = c.Process.Kill() })
		defer stop()
		err = wait()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return err
	})
}

// wait waits for the end, and fails the test if that is not a status of 0.
func (p *prog) wait(t *testing.T) string {
	t.Helper()
	<-p.done
	if p.err != nil {
		t.Errorf("%s: %s: %v", p.where, p.line, p.err)
	}
	return p.out.String()
}

// fails waits for the end, and fails the test if the status is 0.
func (p *prog) fails(t *testing.T) string {
	t.Helper()
	<-p.done
	if status := lab.StatusError(0); p.err == nil || !errors.As(p.err, &status) && !errors.As(p.err, new(*exec.ExitError)) {
		t.Errorf("%s: %s: %v, and should have failed", p.where, p.line, p.err)
	}
	return p.out.String()
}

// buffer is what a program prints.
type buffer struct {
	mu   sync.Mutex
	b    bytes.Buffer
	more chan struct{} // closed when there is more; nil if nobody waits
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.more != nil {
		close(b.more)
		b.more = nil
	}
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// until waits for what, or until done is closed; it says whether what is there.
func (b *buffer) until(what string, done <-chan struct{}) bool {
	for over := false; ; {
		b.mu.Lock()
		there := bytes.Contains(b.b.Bytes(), []byte(what))
		if b.more == nil {
			b.more = make(chan struct{})
		}
		more := b.more
		b.mu.Unlock()
		if there || over {
			return there
		}
		select {
		case <-more:
		case <-done:
			over = true
		}
	}
}
