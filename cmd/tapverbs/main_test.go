// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// asMain makes this test program tapverbs, in all of its processes.
const asMain = "TAPVERBS_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asMain) != "" {
		main()
	}
	os.Exit(m.Run())
}

// command is tapverbs with arguments. Programs that it runs here use no library.
func tapverbs(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe, args...)
	c.Env = append(os.Environ(), asMain+"=1")
	// A test that hangs should say where.
	timer := time.AfterFunc(3*time.Minute, func() { _ = c.Process.Signal(syscall.SIGTERM) })
	t.Cleanup(func() { timer.Stop() })
	return c
}

// runs runs tapverbs run and wants a status.
func runs(t *testing.T, want int, args ...string) (stdout, stderr string) {
	t.Helper()
	c := tapverbs(t, append([]string{"run", "-libs", t.TempDir()}, args...)...)
	var out, err bytes.Buffer
	c.Stdout, c.Stderr = &out, &err
	_ = c.Run()
	if got := c.ProcessState.ExitCode(); got != want {
		t.Fatalf("%q: status %d, want %d:\n%s%s", args, got, want, &out, &err)
	}
	return out.String(), err.String()
}

// TestCommandLine: what is wrong is said in one line, with status 2; help goes to stdout.
func TestCommandLine(t *testing.T) {
	for _, c := range []struct {
		args, want string
	}{
		{"", "say what to do"},
		{"walk", `"walk" is not a command`},
		{"run", "no command"},
		{"run --", "no command"},
		{"run -n 0 -- true", "-n 0"},
		{"run -n 254 -- true", "-n 254"},
		{"run -n x -- true", "tapverbs run -h"},
		{"run -x -- true", "-x"},
		{"run -addr 10.0.0.1/24 -- true", "-addr"},
		{"run -port a,a -- true", "twice"},
		{"run -port a,b -addr 10.0.0.1 -- true", "-addr"},
		{"run -port a -n 2 -- true", "-n 2"},
		{"run -port a -mtu 1500 -- true", "-mtu"},
		{"up -ports 0", "-ports 0"},
		{"up -addr 10.0.0.1", "-addr"},
		{"up x", `"x"`},
		{"down x", `"x"`},
		{"status x", `"x"`},
		{"env", "PORT"},
		{"top x", `"x"`},
		{"top 1 2", "one process"},
		{"top -1", "-1"},
		{"top -once -json", "one of them"},
		{"top -interval 1ms", "-interval"},
	} {
		var stdout, stderr bytes.Buffer
		status := run(strings.Fields(c.args), &stdout, &stderr)
		if status != statusUsage || !strings.Contains(stderr.String(), c.want) || strings.Count(stderr.String(), "\n") != 1 || stdout.Len() > 0 {
			t.Errorf("%q: status %d, %q, %q; want %q", c.args, status, &stdout, &stderr, c.want)
		}
	}
	for _, args := range []string{"-h", "help", "run -h", "up --help", "down -h", "status -h", "env -h", "top -h"} {
		var stdout, stderr bytes.Buffer
		if status := run(strings.Fields(args), &stdout, &stderr); status != 0 || !strings.Contains(stdout.String(), "tapverbs") || stderr.Len() > 0 {
			t.Errorf("%q: status %d, %q, %q", args, status, &stdout, &stderr)
		}
	}
}

// TestCannotRun: errors of tapverbs itself have status 1.
func TestCannotRun(t *testing.T) {
	for _, c := range []struct {
		want string
		args []string
	}{
		{"no-such-program", []string{"--", "no-such-program"}},
		{"-addr", []string{"-port", "tvnone", "--", "true"}},
		{"not an address", []string{"-port", "tvnone", "-addr", "10.0.0.300", "--", "true"}},
	} {
		if _, stderr := runs(t, statusFailed, c.args...); !strings.Contains(stderr, c.want) || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%q: %q", c.args, stderr)
		}
	}
	// What is for the inside is not for anybody else.
	t.Setenv(rankEnv, "x")
	c := tapverbs(t, "true")
	if out, err := c.CombinedOutput(); err == nil || !strings.Contains(string(out), rankEnv) {
		t.Errorf("%v: %s", err, out)
	}
}

// TestRanks: what the copies find, who has the standard input, and whose device they see.
func TestRanks(t *testing.T) {
	c := tapverbs(t, "run", "-n", "3", "-libs", t.TempDir(), "--", "sh", "-c",
		`echo "$TAPVERBS_RANK $TAPVERBS_SIZE $TAPVERBS_PORT $TAPVERBS_ADDR $TAPVERBS_ADDR6 $TAPVERBS_PEER $TAPVERBS_PEER6" \
		$(cat) $(ls /sys/class/infiniband) $(ls $TAPVERBS_SYSFS/device/net) $(cat $TAPVERBS_SYSFS/ports/1/gids/1)`)
	c.Stdin = strings.NewReader("typed\n")
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	slices.Sort(lines)
	want := []string{
		"0 3 tv0p0 10.91.0.1 fd91::1 10.91.0.2 fd91::2 typed tapverbs0 tv0p0 0000:0000:0000:0000:0000:ffff:0a5b:0001",
		"1 3 tv0p1 10.91.0.2 fd91::2 10.91.0.1 fd91::1 tapverbs0 tv0p1 0000:0000:0000:0000:0000:ffff:0a5b:0002",
		"2 3 tv0p2 10.91.0.3 fd91::3 10.91.0.1 fd91::1 tapverbs0 tv0p2 0000:0000:0000:0000:0000:ffff:0a5b:0003",
	}
	if !slices.Equal(lines, want) {
		t.Errorf("%q,\nwant %q", lines, want)
	}
}

// TestFirstFailure: it ends the others, which would stay for ever, and is the status.
func TestFirstFailure(t *testing.T) {
	for _, c := range []struct {
		do     string
		status int
	}{{"exit 7", 7}, {"kill -9 $$", 128 + 9}, {"exec sh -c 'exit 3'", 3}} {
		_, stderr := runs(t, c.status, "-n", "3", "--", "sh", "-c", "[ $TAPVERBS_RANK = 1 ] && { "+c.do+"; }; exec sleep 1000")
		if !strings.Contains(stderr, fmt.Sprintf("rank 1 ended with status %d", c.status)) {
			t.Errorf("%s: %q", c.do, stderr)
		}
	}
	// What a shell has started ends, too: it has the pipe that this waits for.
	runs(t, 6, "-n", "2", "--", "sh", "-c", "[ $TAPVERBS_RANK = 1 ] && { setsid sh -c 'sleep 1000 & sleep 1000' & exit 6; }; sleep 1000; true")
	// A copy that does not listen to SIGTERM is killed.
	runs(t, 5, "-n", "2", "--", "sh", "-c", "[ $TAPVERBS_RANK = 1 ] && exit 5; trap '' TERM; exec sleep 1000")
}

// TestSignals: one that tapverbs gets ends the copies.
func TestSignals(t *testing.T) {
	c := tapverbs(t, "run", "-n", "2", "-libs", t.TempDir(), "--", "sh", "-c", "trap 'echo told; exit 0' TERM; echo ready; while :; do sleep 0.01; done")
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	var all []byte
	b := make([]byte, 1000)
	for sent := false; ; {
		n, err := out.Read(b)
		all = append(all, b[:n]...)
		if !sent && bytes.Count(all, []byte("ready")) == 2 {
			sent = true
			if err := c.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
		}
		if err != nil {
			break
		}
	}
	_ = c.Wait()
	if got := c.ProcessState.ExitCode(); got != 128+15 || bytes.Count(all, []byte("told")) != 2 {
		t.Errorf("status %d: %s", got, all)
	}
}

// terminal opens a pseudo terminal.
func terminal(t *testing.T) (ours, theirs *os.File) {
	t.Helper()
	ours, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.Close() })
	fd := int(ours.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		theirs, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	return ours, theirs
}

// TestTerminal: on a terminal, lines tell whose they are, unless there is one copy only.
func TestTerminal(t *testing.T) {
	for n, want := range map[string][]string{
		"2": {"[0] err", "[0] out 0", "[0] part", "[1] err", "[1] out 1", "[1] part"},
		"1": {"err", "out 0", "part"},
	} {
		ours, theirs := terminal(t)
		c := tapverbs(t, "run", "-n", n, "-libs", t.TempDir(), "--", "sh", "-c", "echo out $TAPVERBS_RANK; echo err >&2; printf part")
		c.Stdout, c.Stderr = theirs, theirs
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		theirs.Close()
		var all []byte
		b := make([]byte, 1000)
		for {
			k, err := ours.Read(b)
			all = append(all, b[:k]...)
			if err != nil {
				if !errors.Is(err, syscall.EIO) { // the last one has closed it
					t.Error(err)
				}
				break
			}
		}
		if err := c.Wait(); err != nil {
			t.Error(err)
		}
		lines := strings.Split(strings.TrimRight(string(all), "\r\n"), "\r\n")
		slices.Sort(lines)
		if !slices.Equal(lines, want) {
			t.Errorf("%s copies: %q, want %q", n, lines, want)
		}
	}
}
