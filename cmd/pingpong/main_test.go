// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/internal/twin"
)

// The test binary is pingpong itself when asMain is set, after what the other
// variables ask for.
const (
	asMain = "PINGPONG_TEST_MAIN"
	// hideTUN replaces /dev/net, in a mount namespace of its own: "none" by an
	// empty directory, else by one with a tun device of this mode.
	hideTUN = "PINGPONG_TEST_TUN"
	// asUser changes to an ordinary user then.
	asUser = "PINGPONG_TEST_USER"
	// noUffd lets every way to a userfaultfd fail with EPERM, as containers do.
	noUffd = "PINGPONG_TEST_NO_UFFD"
	// memlock is the limit of locked memory in bytes.
	memlock = "PINGPONG_TEST_MEMLOCK"
)

const nobody = 65534

func TestMain(m *testing.M) {
	if os.Getenv(asMain) == "" {
		os.Exit(m.Run())
	}
	if !twin.Inside() && !twin.Child() {
		if err := disguise(); err != nil {
			fmt.Fprintln(os.Stderr, "test set-up:", err)
			os.Exit(99)
		}
	}
	if os.Getenv(noUffd) != "" {
		if err := forbidUserFault(); err != nil {
			fmt.Fprintln(os.Stderr, "test set-up:", err)
			os.Exit(99)
		}
	}
	main()
}

// disguise makes this process what the environment asks for.
func disguise() error {
	if mode := os.Getenv(hideTUN); mode != "" {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		if err := unix.Mount("tmpfs", "/dev/net", "tmpfs", 0, "mode=755"); err != nil {
			return err
		}
		if bits, err := strconv.ParseUint(mode, 8, 32); err == nil {
			if err := unix.Mknod("/dev/net/tun", unix.S_IFCHR|uint32(bits), int(unix.Mkdev(10, 200))); err != nil {
				return err
			}
			if err := os.Chmod("/dev/net/tun", os.FileMode(bits)); err != nil {
				return err
			}
		}
	}
	if n, err := strconv.ParseUint(os.Getenv(memlock), 10, 64); err == nil {
		if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: n, Max: n}); err != nil {
			return err
		}
	}
	if os.Getenv(asUser) != "" {
		os.Unsetenv(asUser)
		os.Unsetenv(hideTUN)
		cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		err := cmd.Run()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			return err
		}
		os.Exit(cmd.ProcessState.ExitCode())
	}
	return nil
}

// forbidUserFault installs a seccomp filter over userfaultfd(2) and the ioctl of
// /dev/userfaultfd.
func forbidUserFault() error {
	const ioctlNew = 0xaa00
	ld := func(off uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: off}
	}
	eq := func(k uint32, t, f uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jt: t, Jf: f}
	}
	ret := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }
	arg1 := uint32(16 + 8) // the lower half of the second argument in struct seccomp_data
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		arg1 += 4
	}
	prog := []unix.SockFilter{
		ld(0), // the system call's number
		eq(unix.SYS_USERFAULTFD, 3, 0),
		eq(unix.SYS_IOCTL, 0, 3),
		ld(arg1),
		eq(ioctlNew, 0, 1),
		ret(unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)),
		ret(unix.SECCOMP_RET_ALLOW),
	}
	f := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	_, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&f)))
	if e != 0 {
		return e
	}
	return nil
}

// patience is how long tests wait for what has to happen: long enough for any machine.
const patience = 6 * time.Minute

// proc is a pingpong that runs.
type proc struct {
	t      *testing.T
	cmd    *exec.Cmd
	out    lines
	err    lines
	done   chan struct{}
	status int
}

// lines collects an output and lets one wait for a line of it.
type lines struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	more chan struct{} // closed and replaced when something is added
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.more != nil {
		close(l.more)
	}
	l.more = make(chan struct{})
	return l.buf.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// start starts a pingpong in the current namespaces.
func start(t *testing.T, env []string, args ...string) *proc {
	t.Helper()
	p := &proc{t: t, done: make(chan struct{})}
	p.cmd = exec.Command("/proc/self/exe", args...)
	p.cmd.Args[0] = "pingpong"
	p.cmd.Env = append(append(os.Environ(), asMain+"=1"), env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.err
	p.cmd.SysProcAttr = &syscall.SysProcAttr{}
	for _, e := range env {
		if strings.HasPrefix(e, hideTUN) {
			p.cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWNS
		}
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // the status says it
		p.status = p.cmd.ProcessState.ExitCode()
	}()
	t.Cleanup(func() {
		select {
		case <-p.done:
		default:
			_ = p.cmd.Process.Kill()
			<-p.done
		}
	})
	return p
}

// wait waits for the end and gives the exit status.
func (p *proc) wait() int {
	p.t.Helper()
	select {
	case <-p.done:
		return p.status
	case <-time.After(patience):
		p.t.Fatalf("%v still runs after %v\nstdout:\n%s\nstderr:\n%s", p.cmd.Args, patience, p.out.String(), p.err.String())
		return -1
	}
}

// ok waits for the end, which has to be a good one.
func (p *proc) ok() string {
	p.t.Helper()
	if s := p.wait(); s != 0 {
		p.t.Fatalf("%v: status %d\nstdout:\n%s\nstderr:\n%s", p.cmd.Args, s, p.out.String(), p.err.String())
	}
	return p.out.String()
}

// oneLine checks that a process failed with one line on stderr, and gives it.
func (p *proc) oneLine(want ...string) string {
	p.t.Helper()
	s := p.wait()
	text := p.err.String()
	if s == 0 || strings.Count(text, "\n") != 1 || !strings.HasPrefix(text, "pingpong: ") {
		p.t.Fatalf("%v: status %d and stderr:\n%s\nwant a failure and one line", p.cmd.Args, s, text)
	}
	for _, w := range want {
		if !strings.Contains(text, w) {
			p.t.Errorf("%v says %q, want something about %q", p.cmd.Args, text, w)
		}
	}
	return text
}

// find waits for stdout to hold a line with prefix and gives the rest of it.
func (p *proc) find(prefix string) string {
	p.t.Helper()
	timeout := time.After(patience)
	for ended := false; ; {
		p.out.mu.Lock()
		if p.out.more == nil {
			p.out.more = make(chan struct{})
		}
		more, text := p.out.more, p.out.buf.String()
		p.out.mu.Unlock()
		for sc := bufio.NewScanner(strings.NewReader(text)); sc.Scan(); {
			if rest, ok := strings.CutPrefix(sc.Text(), prefix); ok {
				return rest
			}
		}
		select {
		case <-more:
		case <-p.done:
			if !ended { // the line may have come just before
				ended = true
				continue
			}
			p.t.Fatalf("%v ended (%d) without a line %q\nstdout:\n%s\nstderr:\n%s", p.cmd.Args, p.status, prefix, p.out.String(), p.err.String())
		case <-timeout:
			p.t.Fatalf("%v: no line %q within %v", p.cmd.Args, prefix, patience)
		}
	}
}

// family gives the processes below pid, all generations.
func family(pid int) (out []int) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		for _, w := range strings.Fields(string(b)) {
			n, err := strconv.Atoi(w)
			if err == nil {
				out = append(append(out, n), family(n)...)
			}
		}
	}
	return out
}

// member gives the process of a demo that is server or client.
func (p *proc) member(flag string) int {
	p.t.Helper()
	for _, pid := range family(p.cmd.Process.Pid) {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if bytes.Contains(b, []byte("\x00"+flag+"\x00")) {
			return pid
		}
	}
	p.t.Fatalf("no process with %s below %d: %v", flag, p.cmd.Process.Pid, family(p.cmd.Process.Pid))
	return 0
}

// gone waits until processes exist no more.
func gone(t *testing.T, pids []int) {
	t.Helper()
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue // ESRCH
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		for {
			n, err := unix.Poll(fds, 100)
			if n > 0 {
				break
			}
			if ctx.Err() != nil {
				t.Errorf("process %d is left (%v)", pid, err)
				break
			}
		}
		cancel()
		unix.Close(fd)
	}
}
