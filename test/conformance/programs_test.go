// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// runs is the table of README.md: pairs of the same program, server and client.
var runs = []string{
	"ibv_rc_pingpong -g 1",
	"ibv_rc_pingpong -g 1 -c",
	"ibv_rc_pingpong -g 1 -e",
	"ibv_rc_pingpong -g 1 -e -c",
	"ibv_rc_pingpong -g 1 -o -c",
	"ibv_rc_pingpong -g 1 -o -P -c",
	"ibv_rc_pingpong -g 1 -O -c",
	"ibv_rc_pingpong -g 1 -O -P -c",
	"ibv_rc_pingpong -g 1 -j -c",
	"ibv_rc_pingpong -g 1 -t -c",
	"ibv_rc_pingpong -g 1 -N -c",
	"ibv_rc_pingpong -g 1 -N -j -e -c",
	"ibv_rc_pingpong -d tapverbs0 -i 1 -g 1 -l 3",
	"ibv_rc_pingpong -g 0 -s 65536 -m 4096 -n 300",
	"ibv_rc_pingpong -g 2 -s 1 -n 5000 -r 50",
	"ibv_uc_pingpong -g 1 -s 1024",
	"ibv_uc_pingpong -g 1 -s 1024 -e -c",
	"ibv_uc_pingpong -g 0 -s 16384 -m 4096 -n 200 -r 100 -l 1 -c",
	"ibv_ud_pingpong -g 1",
	"ibv_ud_pingpong -g 1 -e -c",
	"ibv_ud_pingpong -d tapverbs0 -i 1 -g 2 -s 512 -n 3000 -r 200 -l 2 -c",
	"ibv_srq_pingpong -g 1",
	"ibv_srq_pingpong -g 1 -c",
	"ibv_srq_pingpong -g 1 -e -c",
	"ibv_srq_pingpong -g 1 -o -c",
	"ibv_srq_pingpong -g 0 -s 8192 -m 2048 -q 40 -r 900 -n 100 -l 1 -c",
	"ibv_xsrq_pingpong -g 1",
	"ibv_xsrq_pingpong -g 1 -e",
	"ibv_xsrq_pingpong -g 2 -o -s 100000 -m 4096 -n 300",
}

// runPair starts this program as both ranks, which start the two commands, and gives
// what they printed.
func runPair(t *testing.T, args ...string) string {
	t.Helper()
	return runRanks(t, []string{asEnv + "=" + asPair}, args...)
}

// runRanks starts this program as two ranks, in an environment that says as what, and gives
// what they and the commands that they started printed.
func runRanks(t *testing.T, env []string, args ...string) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	printed := func() (all string) {
		for _, rank := range []string{"0", "1"} {
			b, _ := os.ReadFile(filepath.Join(dir, rank)) // not there: it did not get so far
			all += string(b)
		}
		return all
	}
	defer func() {
		if t.Failed() {
			t.Log(printed())
		}
	}()
	out := inFabric(t, append(env, outEnv+"="+dir), 0, 2, append([]string{exe}, args...)...)
	return printed() + out
}

func TestPrograms(t *testing.T) {
	for _, r := range runs {
		t.Run(r, func(t *testing.T) {
			out := runPair(t, append([]string{"--"}, strings.Fields(r)...)...)
			done := "iters in"
			if strings.HasPrefix(r, "ibv_xsrq") {
				done = "success" // with a check of the data before
			}
			if n := strings.Count(out, done); n != 2 || strings.Contains(out, "invalid data") {
				t.Errorf("%d of 2 said that they were done:\n%s", n, out)
			}
		})
	}
}

// TestOurPingpong: cmd/pingpong with ibv_rc_pingpong, either as the server.
func TestOurPingpong(t *testing.T) {
	ours := []string{bin("pingpong"), "-port", "$TAPVERBS_PORT", "-addr", "$TAPVERBS_ADDR/24"}
	theirs := []string{"ibv_rc_pingpong", "-g", "1"}
	for name, args := range map[string][]string{
		"server": append(append(append([]string{"--"}, ours...), "-listen", "127.0.0.1", "--"), append(theirs, "127.0.0.1")...),
		"client": append(append(append([]string{"--"}, theirs...), "--"), append(ours, "-connect", "127.0.0.1")...),
	} {
		t.Run(name, func(t *testing.T) {
			if out := runPair(t, args...); strings.Count(out, "iters in") != 1 {
				t.Errorf("ibv_rc_pingpong was not done:\n%s", out)
			}
		})
	}
}

func TestDevices(t *testing.T) {
	out := inFabric(t, nil, 0, 1, "ibv_devices")
	if !strings.Contains(out, "tapverbs0") || !strings.Contains(out, "007476fffe000001") {
		t.Errorf("ibv_devices:\n%s", out)
	}
	out = inFabric(t, nil, 0, 1, "ibv_devinfo", "-v")
	for _, want := range []string{"hca_id:\ttapverbs0", "PORT_ACTIVE", "Ethernet", "::ffff:10.91.0.1, RoCE v2", "fd91::1, RoCE v2",
		"active_mtu:\t\t4096", "ODP_SUPPORT", "atomic_cap:\t\t\tATOMIC_GLOB"} {
		if !strings.Contains(out, want) {
			t.Errorf("ibv_devinfo -v does not print %q:\n%s", want, out)
		}
	}
}

func TestAsyncWatch(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	inFabric(t, []string{asEnv + "=" + asWatch}, 0, 1, exe)
}

// TestVerbs runs the checks of testdata/verbs.c, which was built with Debian's
// headers and library.
func TestVerbs(t *testing.T) {
	for _, c := range []string{"data", "errors", "events", "extended", "forked", "contexts", "vanish", "many", "threads", "cycles 1000", "later", "attrs", "signals", "beside", "bench"} {
		t.Run(c, func(t *testing.T) {
			if out := inFabric(t, nil, 0, 1, append([]string{bin("verbs")}, strings.Fields(c)...)...); out != "" {
				t.Log(strings.TrimSpace(out))
			}
		})
	}
}

// TestKeys runs the checks of testdata/keys.c: memory windows, ibv_rereg_mr.
func TestKeys(t *testing.T) { inFabric(t, nil, 0, 1, bin("keys")) }

// TestXRC runs the checks of testdata/xrc.c.
func TestXRC(t *testing.T) { inFabric(t, nil, 0, 1, bin("xrc")) }

// TestXRCClients: one server with three clients, each a program of its own.
func TestXRCClients(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out := inFabric(t, []string{asEnv + "=" + asPair}, 0, 4, exe, "--", "ibv_xsrq_pingpong", "-g", "1", "-c", "3", "--", "ibv_xsrq_pingpong", "-g", "1", "127.0.0.1")
	if n := strings.Count(out, "success"); n != 4 {
		t.Errorf("%d of 4 said that they were done:\n%s", n, out)
	}
}

// TestMesh: 1,000 queue pairs on one device between two processes, all moving data.
func TestMesh(t *testing.T) {
	if out := inFabric(t, nil, 0, 2, bin("mesh")); strings.Count(out, "1000 queue pairs") != 2 {
		t.Errorf("not both ends were done:\n%s", out)
	}
}

func TestDlopen(t *testing.T) { inFabric(t, nil, 0, 1, bin("dl")) }

// TestNoDevice: an empty list, and one line that says what to do.
func TestNoDevice(t *testing.T) {
	for _, c := range []struct {
		name, want string
		env        []string
		hide, user bool
		libs       string
	}{
		{name: "no port", want: "TAPVERBS_PORT"},
		{name: "no address", want: "TAPVERBS_ADDR", env: []string{"TAPVERBS_PORT=tvx", "TAPVERBS_ADDR=10.0.0.300/24"}},
		{name: "bad MAC", want: "TAPVERBS_MAC", env: []string{"TAPVERBS_PORT=tvx", "TAPVERBS_MAC=1:2"}},
		{name: "no TUN", want: "/dev/net/tun", env: []string{"TAPVERBS_PORT=tvx", "TAPVERBS_ADDR=10.0.0.3/24"}, hide: true},
		{name: "no rights", want: "tvx", env: []string{"TAPVERBS_PORT=tvx", "TAPVERBS_ADDR=10.0.0.3/24"}, user: true},
		{name: "no engine", want: "make install-libs", env: []string{"TAPVERBS_PORT=tvx"}, libs: t.TempDir()},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := libs()
			if c.libs != "" {
				dir = c.libs
				b, err := os.ReadFile(filepath.Join(libs(), "libibverbs.so.1"))
				if err == nil {
					err = os.WriteFile(filepath.Join(dir, "libibverbs.so.1"), b, 0o755)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			cmd := exec.Command("sh", "-c", "exec ibv_devices")
			if c.hide {
				cmd = exec.Command("sh", "-c", "mount --make-rprivate / && mount -t tmpfs none /dev/net && exec ibv_devices")
			}
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
			if c.user {
				for _, d := range []string{built, dir} {
					if err := os.Chmod(d, 0o755); err != nil {
						t.Fatal(err)
					}
				}
				cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 65534, Gid: 65534}
			}
			cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "LD_LIBRARY_PATH=" + dir}, c.env...)
			var stderr strings.Builder
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			if err != nil || strings.Contains(string(out), "tapverbs0") {
				t.Errorf("%v: %s", err, out)
			}
			if s := stderr.String(); strings.Count(s, "\n") != 1 || !strings.Contains(s, c.want) {
				t.Errorf("stderr is not one line with %q: %q", c.want, s)
			}
		})
	}
}

// TestOrdinaryUser: without privileges, in a user namespace, where /dev/net/tun may be
// opened; absent pages are the kernel's affair then.
func TestOrdinaryUser(t *testing.T) {
	readable(t)
	for _, check := range []string{"data", "events", "vanish"} {
		cmd := exec.Command("sh", "-c", "mount --make-rprivate / && mount -t tmpfs none /dev/net && mknod /dev/net/tun c 10 200 && chmod 666 /dev/net/tun && exec setpriv --reuid 65534 --regid 65534 --clear-groups "+
			bin("tapverbs")+" run -libs "+libs()+" -- "+bin("verbs")+" "+check)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", check, err, out)
		}
	}
}

// TestRun: what tapverbs run promises to several copies.
func TestRun(t *testing.T) {
	out := inFabric(t, nil, 0, 3, "sh", "-c", "echo rank=$TAPVERBS_RANK size=$TAPVERBS_SIZE addr=$TAPVERBS_ADDR peer=$TAPVERBS_PEER")
	for _, want := range []string{
		"rank=0 size=3 addr=10.91.0.1 peer=10.91.0.2\n", "rank=1 size=3 addr=10.91.0.2 peer=10.91.0.1\n",
		"rank=2 size=3 addr=10.91.0.3 peer=10.91.0.1\n",
	} {
		if strings.Count(out, want) != 1 {
			t.Errorf("no line %q in:\n%s", want, out)
		}
	}
	inFabric(t, nil, 7, 3, "sh", "-c", "[ $TAPVERBS_RANK = 1 ] && exit 7; exec sleep 1000")
	inFabric(t, nil, 128+9, 1, "sh", "-c", "kill -9 $$")
}

// TestEngineKeepsItsNamesToItself: its zstd is nobody else's, and nobody else's its.
func TestEngineKeepsItsNamesToItself(t *testing.T) {
	engine := filepath.Join(libs(), "libtapverbs-engine.so")
	names := func(kind string) string {
		out, err := exec.Command("nm", "-D", "--format=just-symbols", kind, engine).Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	if got := names("--defined-only"); got != "tv_engine\n" {
		t.Errorf("it exports %q", got)
	}
	for name := range strings.Lines(names("--undefined-only")) {
		// Those it calls if a program has them, as zstd does anywhere.
		if strings.HasPrefix(name, "ZSTD_") && !strings.HasPrefix(name, "ZSTD_trace_") {
			t.Errorf("it wants %s of others", name)
		}
	}
}

// exports gives a library's symbols, with their kinds and versions.
func exports(t *testing.T, path string) map[string]bool {
	t.Helper()
	out, err := exec.Command("nm", "-D", "--with-symbol-versions", "--defined-only", path).Output()
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]bool{}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) == 3 {
			m[f[1]+" "+f[2]] = true
		}
	}
	return m
}

// TestExports compares names, versions and kinds of all symbols with Debian's libraries.
func TestExports(t *testing.T) {
	for lib, least := range map[string]int{"libibverbs.so.1": 190, "librdmacm.so.1": 71} {
		debian, err := exec.Command("sh", "-c", "ldconfig -p | sed -n 's/.*"+lib+" .*x86-64.*=> //p'").Output()
		if err != nil {
			t.Fatal(err)
		}
		theirs, ours := exports(t, strings.TrimSpace(string(debian))), exports(t, filepath.Join(libs(), lib))
		if len(theirs) < least {
			t.Fatalf("Debian's %s exports %d names only", lib, len(theirs))
		}
		for s := range theirs {
			if !ours[s] {
				t.Errorf("%s lacks %s", lib, s)
			}
		}
		for s := range ours {
			if !theirs[s] {
				t.Errorf("%s has %s, Debian's has not", lib, s)
			}
		}
	}
}
