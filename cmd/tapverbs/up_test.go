// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/tap"
)

// inNS calls fn in a new network namespace.
func inNS(t *testing.T, fn func()) {
	t.Helper()
	if err := fabric.WithNS(func() error { fn(); return nil }); err != nil {
		t.Fatal(err)
	}
}

// says runs a command in this process, in the namespace of this thread.
func says(t *testing.T, want int, args ...string) (stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	if got := run(args, &out, &err); got != want {
		t.Errorf("%q: status %d, want %d: %s", args, got, want, &err)
	}
	return out.String(), err.String()
}

// TestUpDown: ports come, are listed, can be used, and go.
func TestUpDown(t *testing.T) {
	inNS(t, func() {
		out, _ := says(t, 0, "up", "-ports", "2", "-owner", "65534", "-addr", "10.3.4.0/22, fd03::/64", "-mtu", "4200")
		want := "export TAPVERBS_PORT=tv0p0 TAPVERBS_ADDR=10.3.4.1/22 TAPVERBS_ADDR6=fd03::1/64\n" +
			"export TAPVERBS_PORT=tv0p1 TAPVERBS_ADDR=10.3.4.2/22 TAPVERBS_ADDR6=fd03::2/64\n"
		if out != want {
			t.Errorf("up: %q", out)
		}
		if _, stderr := says(t, statusFailed, "up"); !strings.Contains(stderr, "tapverbs down") {
			t.Errorf("again: %s", stderr)
		}
		says(t, 0, "up", "-name", "other", "-ports", "1", "-addr", "10.4.0.0/24")
		// What somebody else made is not ours, whatever it is called.
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "foreign"}}); err != nil {
			t.Error(err)
		}
		d, err := tap.OpenVnet("tv0p1")
		if err != nil {
			t.Error(err)
			return
		}
		out, _ = says(t, 0, "status")
		for _, want := range []string{"otherp0", "10.4.0.1/24", "root", "10.3.4.2/22,fd03::2/64", "4200"} {
			if !strings.Contains(out, want) {
				t.Errorf("status does not say %q:\n%s", want, out)
			}
		}
		for line := range strings.Lines(out) {
			if f := strings.Fields(line); f[0] != "PORT" && (f[0] == "tv0p1") != strings.HasSuffix(line, "in use\n") {
				t.Errorf("status: %s", line)
			}
		}
		d.Close()
		if out, _ := says(t, 0, "env", "tv0p1"); out != strings.SplitAfter(want, "\n")[1] {
			t.Errorf("env: %q", out)
		}
		says(t, statusFailed, "env", "tv0p2")
		for _, name := range []string{"foreign", "nowhere", "tv0p0"} {
			if _, stderr := says(t, statusFailed, "down", "-name", name); !strings.Contains(stderr, "not found") {
				t.Errorf("down %s: %s", name, stderr)
			}
		}
		says(t, 0, "down")
		says(t, 0, "down", "-name", "other")
		if out, _ := says(t, 0, "status"); out != "" {
			t.Errorf("status after down: %s", out)
		}
		links, err := netlink.LinkList()
		if err != nil {
			t.Error(err)
		}
		for _, l := range links {
			if n := l.Attrs().Name; strings.HasPrefix(n, "tv") || strings.HasPrefix(n, "other") {
				t.Errorf("%s is left", n)
			}
		}
	})
}

// TestUpFails: it says why, and leaves nothing.
func TestUpFails(t *testing.T) {
	inNS(t, func() {
		for _, c := range []struct {
			want string
			args []string
		}{
			{"no such user", []string{"-owner", "nobody-of-that-name"}},
			{"at most 11", []string{"-name", "abcdefghijkl"}},
			{"MTU", []string{"-mtu", "100"}},
			{"room for ports", []string{"-addr", "10.0.0.0/31"}},
			{"addresses for ports", []string{"-addr", "10.0.0.0/29", "-ports", "6"}},
		} {
			if _, stderr := says(t, statusFailed, append([]string{"up"}, c.args...)...); !strings.Contains(stderr, c.want) || strings.Count(stderr, "\n") != 1 {
				t.Errorf("%q: %q", c.args, stderr)
			}
		}
		links, err := netlink.LinkList()
		if err != nil || len(links) != 1 {
			t.Errorf("%d netdevs, %v", len(links), err)
		}
		says(t, 0, "up")
		// As an ordinary user.
		exe, err := os.Executable()
		if err != nil {
			t.Error(err)
			return
		}
		b, err := os.ReadFile(exe)
		if err != nil {
			t.Error(err)
			return
		}
		// The test program lies where others may not look.
		copied := t.TempDir() + "/tapverbs"
		if err := os.WriteFile(copied, b, 0o755); err != nil {
			t.Error(err)
			return
		}
		for dir := copied; len(dir) > len(os.TempDir())+1; dir = dir[:strings.LastIndexByte(dir, '/')] {
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Error(err)
			}
		}
		for _, args := range [][]string{{"up", "-name", "mine"}, {"down"}} {
			c := exec.Command(copied, args...)
			c.Env = append(os.Environ(), asMain+"=1")
			c.Dir = "/"
			c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			out, err := c.CombinedOutput()
			if err == nil || c.ProcessState.ExitCode() != statusFailed || !strings.Contains(string(out), "run as root") {
				t.Errorf("%q as an ordinary user: %v, %s", args, err, out)
			}
		}
	})
}
