// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// monitored is a pair of devices of which the first can be looked at; its socket's path.
func monitored(t *testing.T) (*harness.Pair, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "m")
	p := harness.NewLivePair(t, taptest.Config{}, func(i int, c *provider.Config) {
		if i == 0 {
			c.Monitor = dir
		}
	})
	return p, socketIn(t, dir)
}

// socketIn is the one socket in a directory.
func socketIn(t *testing.T, dir string) string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(names) != 1 {
		t.Fatalf("sockets: %q, %v", names, err)
	}
	return names[0]
}

// dialMonitor connects by a short path: a socket's has 107 bytes at most.
func dialMonitor(t *testing.T, path string) net.Conn {
	t.Helper()
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	c, err := net.Dial("unix", fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), filepath.Base(path)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// asks asks on a connection, and gives the answer.
func asks(t *testing.T, c net.Conn, line string) (sn provider.Snapshot, problem string) {
	t.Helper()
	if _, err := io.WriteString(c, line); err != nil {
		t.Fatal(err)
	}
	b, err := bufio.NewReaderSize(c, 1<<20).ReadBytes('\n')
	if err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	var a struct {
		provider.Snapshot
		Error string
	}
	if err := json.Unmarshal(b, &a); err != nil {
		t.Fatalf("%q: %v: %s", line, err, b)
	}
	if a.Version != provider.SnapshotVersion {
		t.Errorf("version %d", a.Version)
	}
	return a.Snapshot, a.Error
}

func TestMonitorIsItsOwnersAlone(t *testing.T) {
	p, path := monitored(t)
	for name, want := range map[string]fs.FileMode{path: fs.ModeSocket | 0o600, filepath.Dir(path): fs.ModeDir | 0o700} {
		if st, err := os.Stat(name); err != nil || st.Mode() != want {
			t.Errorf("%s: mode %v, want %v, %v", name, st.Mode(), want, err)
		}
	}
	if want := fmt.Sprintf("%d-%s.sock", os.Getpid(), p.Dev[0].Name()); filepath.Base(path) != want {
		t.Errorf("%s, want %s", path, want)
	}
	if err := p.Dev[0].Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after Close: %v", err)
	}
}

// TestMonitorRefuses: who is neither the owner nor root is sent away without an answer,
// even if he got through to the socket.
func TestMonitorRefuses(t *testing.T) {
	me := uint32(os.Geteuid())
	for uid, want := range map[uint32]bool{me: true, 0: true, me + 1: false, 65534: false, ^uint32(0): false} {
		restore := provider.FakePeer(uid)
		p, path := monitored(t)
		c := dialMonitor(t, path)
		if want {
			asks(t, c, "snapshot 0\n")
		} else {
			_, _ = io.WriteString(c, "snapshot 0\n") // refused before or after
			if b, err := io.ReadAll(c); len(b) > 0 || err != nil && !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("user %d: answered %q, %v", uid, b, err)
			}
		}
		if err := p.Dev[0].Close(); err != nil { // nobody is asked who he is any more
			t.Error(err)
		}
		restore()
	}
}

// TestMonitorOfAnotherUser: the kernel keeps others from the socket.
func TestMonitorOfAnotherUser(t *testing.T) {
	const as = "TAPVERBS_TEST_DIAL"
	if path := os.Getenv(as); path != "" {
		if err := unix.Setresuid(65534, 65534, 65534); err != nil {
			t.Fatal(err)
		}
		_, err := net.Dial("unix", path)
		if !errors.Is(err, unix.EACCES) {
			t.Fatalf("connected as somebody else: %v", err)
		}
		fmt.Println("refused")
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become somebody else")
	}
	dir, err := os.MkdirTemp("/tmp", "tv")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	harness.NewLivePair(t, taptest.Config{}, func(i int, c *provider.Config) {
		if i == 0 {
			c.Monitor = filepath.Join(dir, "m")
		}
	})
	cmd := exec.Command("/proc/self/exe", "-test.run", "^TestMonitorOfAnotherUser$")
	cmd.Env = append(os.Environ(), as+"="+socketIn(t, filepath.Join(dir, "m")))
	if out, err := cmd.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("refused")) {
		t.Errorf("%v: %s", err, out)
	}
}

func TestMonitorGarbage(t *testing.T) {
	_, path := monitored(t)
	c := dialMonitor(t, path)
	for _, line := range []string{"\n", "snapshot\n", "snapshot -1\n", "snapshot 1 2\n", "snapshot 99999999999\n", "drop tables\n", "\x00\xff\n"} {
		if _, problem := asks(t, c, line); problem == "" {
			t.Errorf("%q was answered", line)
		}
	}
	asks(t, c, "snapshot 0\n") // the connection lives on
	long := dialMonitor(t, path)
	_, _ = long.Write(bytes.Repeat([]byte{'x'}, 1<<20)) // it may be closed before all is written
	if b, err := io.ReadAll(long); len(b) > 0 || err != nil && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("a line of 1 MiB: %q, %v", b, err)
	}
	asks(t, dialMonitor(t, path), "snapshot 0\n")
}

// TestMonitorSlowClients: many who say nothing, say half a line, or do not take their
// answer keep nobody out.
func TestMonitorSlowClients(t *testing.T) {
	p, path := monitored(t)
	for i := range 10 * provider.MonitorConns {
		c := dialMonitor(t, path)
		if i%3 > 0 {
			_, _ = io.WriteString(c, []string{"", "snaps", strings.Repeat("snapshot 1\n", 1000)}[i%3])
		}
		if i%provider.MonitorConns == 0 {
			asks(t, dialMonitor(t, path), "snapshot 0\n")
		}
	}
	asks(t, dialMonitor(t, path), "snapshot 0\n")
	if err := p.Dev[0].Close(); err != nil {
		t.Error(err)
	}
}

// TestMonitorStale: what a dead process has left is removed; what lives is not.
func TestMonitorStale(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "m")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	dead := exec.Command("true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	listen := func(name string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s", f.Fd(), name), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		return l
	}
	// Left behind by a dead process, by one that had this one's number, and by nobody:
	// it listens still.
	listen(fmt.Sprintf("%d-tv0.sock", dead.Process.Pid)).Close()
	elsewhere := fmt.Sprintf("%d-tv1.sock", dead.Process.Pid)
	l := listen(elsewhere)
	defer l.Close()
	other := "notes.txt"
	if err := os.WriteFile(filepath.Join(dir, other), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	own := fmt.Sprintf("%d-%s.sock", os.Getpid(), taptest.New(nil, taptest.Config{}).Port(0).Name())
	listen(own).Close()
	harness.NewLivePair(t, taptest.Config{}, func(i int, c *provider.Config) {
		if i == 0 {
			c.Monitor = dir
		}
	})
	names, err := f.Readdirnames(-1)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, n := range names {
		got[n] = true
	}
	if len(got) != 3 || !got[own] || !got[elsewhere] || !got[other] {
		t.Errorf("there are %q, want %s, %s and %s", names, own, elsewhere, other)
	}
	asks(t, dialMonitor(t, filepath.Join(dir, own)), "snapshot 0\n")
}

// TestMonitorCannotBe: a device opens without one, and nothing is made where others look.
func TestMonitorCannotBe(t *testing.T) {
	open := filepath.Join(t.TempDir(), "open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o755); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{open, link, file, "/nowhere/at/all"} {
		p := harness.NewLivePair(t, taptest.Config{}, func(_ int, c *provider.Config) { c.Monitor = dir })
		if names, _ := filepath.Glob(filepath.Join(dir, "*")); len(names) > 0 {
			t.Errorf("%s: %q", dir, names)
		}
		if err := p.Dev[0].Close(); err != nil {
			t.Errorf("%s: %v", dir, err)
		}
	}
}

func TestMonitorFromEnv(t *testing.T) {
	for value, want := range map[string]string{"": provider.MonitorAuto, "on": provider.MonitorAuto, "off": "", "/a/b": "/a/b"} {
		cfg, err := provider.ConfigFromEnv(func(name string) string {
			if name == provider.EnvMonitor {
				return value
			}
			return ""
		})
		if err != nil || cfg.Monitor != want {
			t.Errorf("%q: %q, %v; want %q", value, cfg.Monitor, err, want)
		}
	}
	if _, err := provider.MonitorFromEnv(func(string) string { return "a/b" }); !errors.Is(err, provider.ErrInvalid) {
		t.Errorf("a relative path: %v", err)
	}
	t.Setenv("XDG_RUNTIME_DIR", "/run/mine")
	if d := provider.MonitorDirs(provider.OuterUID()); d[0] != "/run/mine/tapverbs" || len(d) < 2 {
		t.Errorf("%q", d)
	}
	if d := provider.MonitorDirs(12345); len(d) != 2 || d[0] != "/run/user/12345/tapverbs" || d[1] != "/tmp/tapverbs-12345" {
		t.Errorf("of somebody else: %q", d)
	}
}

// TestSnapshot: what is told is so: pages that are there and pages that are not, a QP and
// what it met, counters; and it moves.
func TestSnapshot(t *testing.T) {
	p, path := monitored(t)
	look := dialMonitor(t, path)
	const page, all, part = 4096, 256, 32 // pages of the region, and of a part of its map
	c := p.Connect(harness.ConnOptions{Timeout: 17, Mem: all * page})
	evict(t, c.A, 2*part*page, part*page)
	harness.Fill(c.B.Mem, 7)
	c.B.Send(c.B.Write(c.A, 1, 0, 0, 16*page))
	c.WaitOK(c.B, 1)

	sn, problem := asks(t, look, "snapshot 8\n")
	if problem != "" || sn.PID != os.Getpid() || sn.Port != p.Dev[0].Name() || sn.NumQPs != 1 || len(sn.QPs) != 1 || sn.NumRegions != 1 || len(sn.Regions) != 1 {
		t.Fatalf("%s: %+v", problem, sn)
	}
	r, q := sn.Regions[0], sn.QPs[0]
	want := map[int]mr.Residency{0: {Present: 16 * page}, 2: {Stored: part * page}}
	for i, m := range r.Map {
		w := want[i]
		w.Size = part * page
		if m != w {
			t.Errorf("part %d: %+v, want %+v", i, m, w)
		}
	}
	u := r.Usage
	if len(r.Map) != 8 || r.Key != uint32(c.A.MR.LKey()) || r.Addr != c.A.Addr || r.Length != all*page || r.Suspended ||
		u.Present != 16*page || u.Stored != part*page || u.FaultsMinor != 16 || u.FaultsMajor != 0 || u.Evictions < part {
		t.Errorf("the region: %+v", r)
	}
	if q.Num != uint32(c.A.QP.Num()) || q.Type != "RC" || q.State != "RTS" || q.PeerQP != uint32(c.B.QP.Num()) || q.Peer == "" ||
		q.Progress.Received != 1 || q.Progress.Faults != (mr.Faults{Minor: 16}) || c.A.QP.Faults() != q.Progress.Faults || q.Progress.RetriesLeft != 7 {
		t.Errorf("the QP: %+v", q)
	}

	c.B.Send(c.B.Read(c.A, 2, 0, 2*part*page, page))
	c.WaitOK(c.B, 2)
	if err := c.A.MR.Suspend(); err != nil {
		t.Fatal(err)
	}
	next, _ := asks(t, look, "snapshot 0\n")
	r, q = next.Regions[0], next.QPs[0]
	if r.Map != nil || !r.Suspended || r.Usage.FaultsMajor == 0 || r.Usage.Stored >= part*page {
		t.Errorf("a page has come back, and the region is suspended: %+v", r)
	}
	if q.Progress.Faults.Major == 0 || q.Progress.Received != 2 || q.Progress.Expected == sn.QPs[0].Progress.Expected {
		t.Errorf("the QP after a READ: %+v", q)
	}
	if next.Counters["rcvd_pkts"] <= sn.Counters["rcvd_pkts"] {
		t.Errorf("rcvd_pkts: %d, then %d", sn.Counters["rcvd_pkts"], next.Counters["rcvd_pkts"])
	}
	if err := c.A.MR.Resume(); err != nil {
		t.Fatal(err)
	}
}

// TestSnapshotIsBounded: the maps of many regions have fewer parts.
func TestSnapshotIsBounded(t *testing.T) {
	p, path := monitored(t)
	pd, err := p.Dev[0].AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	mem, err := mr.Alloc(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	const n = 300
	for i := range n {
		m, err := pd.RegMR(mem.Bytes()[:1<<20-i], mr.LocalWrite)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = m.Dereg() })
	}
	sn, problem := asks(t, dialMonitor(t, path), "snapshot 1000000\n")
	if problem != "" || sn.NumRegions != n || len(sn.Regions) != 256 || len(sn.Regions[0].Map) != 64 {
		t.Errorf("%s: %d regions, of which %d, the first with %d parts", problem, sn.NumRegions, len(sn.Regions), len(sn.Regions[0].Map))
	}
	if sn.Regions[0].Length != 1<<20 || sn.Regions[1].Length != 1<<20-1 {
		t.Errorf("lengths %d, %d: the longest are first", sn.Regions[0].Length, sn.Regions[1].Length)
	}
}
