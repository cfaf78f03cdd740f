// SPDX-License-Identifier: Apache-2.0

// Package conformance runs unmodified verbs programs, those of Debian and one that
// is compiled here, on libibverbs.so.1 of this project, each in a private fabric made
// by tapverbs run. README.md has the table of what ran.
package conformance

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/internal/fabric"
)

// Roles of this program when tapverbs run starts it as a copy: asEnv names the role.
const (
	asEnv = "CONFORMANCE_AS"
	// asPair runs the server as rank 0 and the client as the others, once the server listens.
	asPair = "pair"
	// outEnv names a directory with a file for what each rank prints: the outputs of two
	// programs in one pipe mix within lines.
	outEnv = "CONFORMANCE_OUT"
	// asanEnv names the address sanitizer's library, which the programs of pairs then load
	// first.
	asanEnv = "CONFORMANCE_ASAN"
	// asWatch runs ibv_asyncwatch and plays with the port.
	asWatch = "watch"
)

// hang is how long programs may take that have not hung: the machine may be very busy.
const hang = 5 * time.Minute

// built is where TestMain puts what the tests use.
var built string

func bin(name string) string { return filepath.Join(built, "bin", name) }
func libs() string           { return filepath.Join(built, "lib") }

func TestMain(m *testing.M) {
	flag.Parse()
	switch os.Getenv(asEnv) {
	case asPair:
		fail(pair(flag.Args()))
	case asCMPair:
		fail(cmPair(flag.Args()))
	case asWatch:
		fail(watch())
	case asCounters:
		fail(counters(flag.Arg(0)))
	default:
		os.Exit(run(m))
	}
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func run(m *testing.M) int {
	var err error
	if built, err = os.MkdirTemp("", "conformance"); err == nil {
		defer os.RemoveAll(built)
		err = build()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// build makes the libraries, the commands, and the C programs of testdata.
func build() error {
	for _, args := range [][]string{
		{"make", "-s", "-C", "../..", "libs"}, // where they are found by who wants them next
		{"cp", "-a", "../../bin/lib", built},
		{"go", "build", "-o", filepath.Join(built, "bin") + "/", "../../cmd/..."},
		{"sh", "-c", "cc -O2 -g -Wall -Wextra -Werror -o " + bin("verbs") + " testdata/verbs.c testdata/stress.c testdata/later.c testdata/attrs.c testdata/signals.c $(pkg-config --cflags --libs libibverbs) -lpthread"},
		{"sh", "-c", "cc -O2 -g -Wall -Wextra -Werror -o " + bin("keys") + " testdata/keys.c $(pkg-config --cflags --libs libibverbs)"},
		{"sh", "-c", "cc -O2 -g -Wall -Wextra -Werror -o " + bin("xrc") + " testdata/xrc.c $(pkg-config --cflags --libs libibverbs)"},
		{"sh", "-c", "cc -O2 -g -Wall -Wextra -Werror -o " + bin("memory") + " testdata/memory.c $(pkg-config --cflags --libs libibverbs)"},
		{"sh", "-c", "cc -O2 -g -Wall -Wextra -Werror -o " + bin("mesh") + " testdata/mesh.c $(pkg-config --cflags --libs libibverbs)"},
		{"sh", "-c", "cc -O2 -g -Wall -Wextra -Werror -o " + bin("raw") + " testdata/raw.c $(pkg-config --cflags --libs libibverbs)"},
		{"sh", "-c", "cc -O2 -g -Wall -Wextra -Werror -I../../shim/dv -o " + bin("unplug") + " testdata/unplug.c -L" + libs() + " -ltapverbs $(pkg-config --cflags --libs libibverbs) -lpthread"},
		{"sh", "-c", "cc -O2 -g -Wall -Wextra -Werror -I../../shim/dv -o " + bin("regions") + " testdata/regions.c -L" + libs() + " -ltapverbs $(pkg-config --cflags --libs libibverbs) -lpthread"},
		{"sh", "-c", "cc -O2 -g -Wall -Wextra -Werror -I../../shim/dv -o " + bin("regcache") + " testdata/regcache.c -L" + libs() + " -ltapverbs $(pkg-config --cflags --libs libibverbs) -lpthread"},
		{"sh", "-c", "cc -O2 -g -Wall -Wextra -Werror -I../../shim/dv -o " + bin("forks") + " testdata/forks.c -L" + libs() + " -ltapverbs $(pkg-config --cflags --libs libibverbs) -lpthread"},
		{"sh", "-c", "cc -std=gnu11 -O2 -g -Wall -Wextra -Werror -I../../shim/dv -o " + bin("room") + " testdata/room.c $(pkg-config --cflags libibverbs) -lpthread"},
		{"cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", bin("dl"), "testdata/dl.c", "-ldl"},
		{"sh", "-c", "cc -O2 -g -Wall -Wextra -Werror -o " + bin("rsockets") + " testdata/rsockets.c testdata/rsockets_two.c $(pkg-config --cflags --libs libibverbs librdmacm) -lpthread"},
		{"sh", "-c", "cc -O2 -g -Wall -Wextra -Werror -o " + bin("rdmacm") + " testdata/rdmacm.c testdata/rdmacm_conn.c testdata/rdmacm_events.c testdata/rdmacm_queues.c $(pkg-config --cflags --libs libibverbs librdmacm) -lpthread"},
		{"sh", "-c", "cc -std=gnu11 -O2 -g -Wall -Wextra -Werror -o " + bin("cmends") + " testdata/cmends.c $(pkg-config --cflags --libs libibverbs librdmacm)"},
		{"cc", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-o", bin("listening.so"), "testdata/listening.c", "-ldl"},
		{"cc", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-o", bin("patient.so"), "testdata/patient.c", "-ldl"},
		{"cc", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-o", bin("second.so"), "testdata/second.c", "-ldl"},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, out)
		}
	}
	return nil
}

// inFabric runs a command in n copies and gives what they printed; it fails the test
// when the status is not want.
func inFabric(t *testing.T, env []string, want, n int, cmd ...string) string {
	t.Helper()
	return inFabricWith(t, libs(), env, want, n, cmd...)
}

// inFabricWith is inFabric with another directory of libraries.
func inFabricWith(t *testing.T, libs string, env []string, want, n int, cmd ...string) string {
	t.Helper()
	c := exec.Command(bin("tapverbs"), append([]string{"run", "-libs", libs, "-n", fmt.Sprint(n), "--"}, cmd...)...)
	c.Env = append(os.Environ(), env...)
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(hang, func() { _ = c.Process.Signal(syscall.SIGTERM) })
	defer timer.Stop()
	err := c.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if got := c.ProcessState.ExitCode(); got != want {
		t.Fatalf("%s: status %d, want %d:\n%s", strings.Join(cmd, " "), got, want, &out)
	}
	return out.String()
}

// pair starts the program of this rank: its two commands are separated by "--".
func pair(args []string) error {
	cmds := [2][]string{}
	rank := 0
	for _, a := range args {
		if a == "--" {
			rank = 1
			continue
		}
		cmds[rank] = append(cmds[rank], os.ExpandEnv(a))
	}
	cmd := cmds[0]
	if os.Getenv("TAPVERBS_RANK") != "0" {
		if cmd = cmds[1]; len(cmd) == 0 {
			cmd = append(cmds[0], "127.0.0.1")
		}
		for !fabric.Listens(0, 18515) {
			// Nothing tells when another process listens; look again soon.
			time.Sleep(time.Millisecond)
		}
	}
	path, err := exec.LookPath(cmd[0])
	if err != nil {
		return err
	}
	if dir := os.Getenv(outEnv); dir != "" {
		f, err := os.Create(filepath.Join(dir, os.Getenv("TAPVERBS_RANK")))
		for fd := 1; err == nil && fd <= 2; fd++ {
			err = unix.Dup3(int(f.Fd()), fd, 0)
		}
		if err != nil {
			return err
		}
	}
	env := os.Environ()
	if lib := os.Getenv(asanEnv); lib != "" {
		env = append(env, "LD_PRELOAD="+lib)
	}
	return syscall.Exec(path, cmd, env)
}

// watch runs ibv_asyncwatch, takes the idle port down and up and away, and waits for the
// events of that.
func watch() error {
	c := exec.Command("ibv_asyncwatch")
	c.Stderr = os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	defer func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	}()
	var got bytes.Buffer
	until := func(what string) error {
		b := make([]byte, 4096)
		for !strings.Contains(got.String(), what) {
			n, err := out.Read(b)
			got.Write(b[:n])
			if err != nil {
				return fmt.Errorf("%w before %q; ibv_asyncwatch printed: %s", err, what, &got)
			}
		}
		return nil
	}
	if err := until("async event FD"); err != nil {
		return err
	}
	port := os.Getenv("TAPVERBS_PORT")
	if _, err := net.InterfaceByName(port); err != nil {
		return err
	}
	link, err := netlink.LinkByName(port)
	if err != nil {
		return err
	}
	for _, s := range []struct {
		do   func(netlink.Link) error
		want string
	}{
		{netlink.LinkSetDown, "IBV_EVENT_PORT_ERR"}, {netlink.LinkSetUp, "IBV_EVENT_PORT_ACTIVE"},
		{netlink.LinkDel, "IBV_EVENT_DEVICE_FATAL"},
	} {
		if err := s.do(link); err != nil {
			return err
		}
		if err := until(s.want); err != nil {
			return err
		}
	}
	return nil
}
