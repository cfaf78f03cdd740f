// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// asWatched makes this test program one that is looked at.
const asWatched = "TAPVERBS_TEST_WATCHED"

const watchedPage, watchedPages = 4096, 256

// TestWatched is the process that TestTop looks at: a device with a region of 256 pages, of
// which a peer has written 16. With each line that it reads it does the next thing.
func TestWatched(t *testing.T) {
	if os.Getenv(asWatched) == "" {
		t.Skip("is for TestTop")
	}
	p := harness.NewLivePair(t, taptest.Config{}, func(i int, c *provider.Config) {
		if i == 0 {
			c.Monitor, _ = provider.MonitorFromEnv(os.Getenv)
		}
	})
	c := p.Connect(harness.ConnOptions{Timeout: 17, Mem: watchedPages * watchedPage})
	harness.Fill(c.B.Mem, 3)
	next := bufio.NewScanner(os.Stdin)
	for step := 1; ; step++ {
		switch step {
		case 1:
			c.B.Send(c.B.Write(c.A, 1, 0, 0, 16*watchedPage))
			c.WaitOK(c.B, 1)
		case 2:
			if _, err := c.A.MR.Evict(c.A.Addr, 8*watchedPage, mr.Stored); err != nil && !errors.Is(err, mr.ErrNotSupported) {
				t.Error(err)
			}
			c.B.Send(c.B.Write(c.A, 2, 0, 128*watchedPage, 16*watchedPage))
			c.WaitOK(c.B, 2)
		case 3:
			if err := c.A.MR.Suspend(); err != nil {
				t.Error(err)
			}
		}
		fmt.Println("step", step)
		if !next.Scan() {
			return
		}
	}
}

// watched is a process that is looked at.
type watched struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

// startWatched starts one with its socket in a directory.
func startWatched(t *testing.T, dir string) *watched {
	t.Helper()
	w := &watched{t: t, cmd: exec.Command("/proc/self/exe", "-test.run", "^TestWatched$", "-test.v")}
	w.cmd.Env = append(os.Environ(), asWatched+"=1", provider.EnvMonitor+"="+dir)
	w.cmd.Stderr = os.Stderr
	in, err := w.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	w.in, w.out = in, bufio.NewScanner(out)
	if err := w.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = w.cmd.Process.Kill()
		_ = w.cmd.Wait()
	})
	w.wait(1)
	return w
}

func (w *watched) pid() string { return strconv.Itoa(w.cmd.Process.Pid) }

// wait waits for a step.
func (w *watched) wait(step int) {
	w.t.Helper()
	for w.out.Scan() {
		if w.out.Text() == fmt.Sprint("step ", step) {
			return
		}
	}
	w.t.Fatalf("it has ended before step %d", step)
}

// goOn has it take a step.
func (w *watched) goOn(step int) {
	w.t.Helper()
	if _, err := io.WriteString(w.in, "\n"); err != nil {
		w.t.Fatal(err)
	}
	w.wait(step)
}

// topSays runs tapverbs top in this process.
func topSays(t *testing.T, want int, args ...string) (stdout, stderr string) {
	t.Helper()
	return says(t, want, append([]string{"top"}, args...)...)
}

func snapshotOf(t *testing.T, args ...string) (sn provider.Snapshot) {
	t.Helper()
	out, _ := topSays(t, 0, append([]string{"-json"}, args...)...)
	if err := json.Unmarshal([]byte(out), &sn); err != nil || strings.Count(out, "\n") != 1 {
		t.Fatalf("%v: %q", err, out)
	}
	return sn
}

func TestTop(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "m")
	w := startWatched(t, dir)
	sn := snapshotOf(t, w.pid())
	if strconv.Itoa(sn.PID) != w.pid() || len(sn.Regions) != 1 || len(sn.QPs) != 1 {
		t.Fatalf("%+v", sn)
	}
	was, q := sn.Regions[0], sn.QPs[0].Progress
	if was.Length != watchedPages*watchedPage || len(was.Map) != 64 || was.Usage.Present != 16*watchedPage || was.Map[0].Present != was.Map[0].Size || was.Map[32].Present != 0 {
		t.Errorf("the region: %+v", was)
	}
	w.goOn(2)
	sn = snapshotOf(t, w.pid())
	r := sn.Regions[0]
	if r.Map[32].Present != r.Map[32].Size || sn.QPs[0].Progress.Expected == q.Expected || sn.QPs[0].Progress.Received != q.Received+1 {
		t.Errorf("after a second WRITE: %+v, %+v", r, sn.QPs[0])
	}
	stored := r.Usage.Stored == 8*watchedPage // where there is eviction
	if stored && (r.Map[0].Stored != r.Map[0].Size || r.Map[3].Present != r.Map[3].Size || r.Usage.Present != 24*watchedPage) {
		t.Errorf("after 8 pages were evicted: %+v", r)
	}
	w.goOn(3)
	text, _ := topSays(t, 0, "-once", w.pid())
	want := []string{"process " + w.pid(), "SUSPENDED", "▚", fmt.Sprintf("%08x", r.Key), fmt.Sprintf("%x", r.Addr), fmt.Sprintf("%06x", sn.QPs[0].Num), "rcvd_pkts"}
	if stored {
		want = append(want, "░░▚▚", "32K")
	} else {
		t.Log("no pages can be evicted here")
	}
	for _, s := range want {
		if !strings.Contains(text, s) {
			t.Errorf("no %q in\n%s", s, text)
		}
	}

	// The only one; not the only one; then, with one that was killed, the only one again.
	t.Setenv(provider.EnvMonitor, dir)
	t.Setenv("XDG_RUNTIME_DIR", "")
	other := startWatched(t, dir)
	for _, args := range [][]string{{"-once"}, {"-json"}} {
		if _, stderr := topSays(t, statusFailed, args...); !strings.Contains(stderr, "process "+w.pid()+",") || !strings.Contains(stderr, "process "+other.pid()+",") {
			t.Errorf("two processes: %s", stderr)
		}
	}
	if out, _ := topSays(t, 0); !strings.Contains(out, "process "+w.pid()+",") || !strings.Contains(out, "process "+other.pid()+",") {
		t.Errorf("two processes: %s", out)
	}
	if err := other.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = other.cmd.Wait()
	if _, stderr := topSays(t, statusFailed, other.pid()); !strings.Contains(stderr, "no process "+other.pid()) {
		t.Errorf("a dead process: %s", stderr)
	}
	if out, err := tapverbs(t, "top", w.pid()).CombinedOutput(); err == nil || !bytes.Contains(out, []byte("-once")) {
		t.Errorf("without a terminal: %v, %s", err, out)
	}
	if _, stderr := topSays(t, statusFailed, "-once", "-port", "nothing", w.pid()); !strings.Contains(stderr, "on nothing") {
		t.Errorf("another port: %s", stderr)
	}
	if _, stderr := topSays(t, statusFailed, "-once", strconv.Itoa(os.Getpid())); !strings.Contains(stderr, provider.EnvMonitor+"=off") {
		t.Errorf("a process without devices: %s", stderr)
	}
	if err := unix.Access(filepath.Join(dir, other.pid()+"-"+sn.Port+".sock"), unix.F_OK); err == nil {
		// Whoever looks at the list takes away what the dead have left.
		_, _ = topSays(t, 0, "-once", w.pid())
		if err := unix.Access(filepath.Join(dir, other.pid()+"-"+sn.Port+".sock"), unix.F_OK); err == nil {
			t.Error("the socket of a dead process is still there")
		}
	}
}
