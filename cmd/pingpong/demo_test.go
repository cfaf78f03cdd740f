// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/tapverbs/tapverbs/internal/fabric"
)

var reportFile = flag.String("report", "", "JSON `file` of a pingpong run for TestReport to check, instead of a short run")

// TestReport checks what -json writes: every row there, every byte right, and the
// page faults of cold memory as many as the pages written.
func TestReport(t *testing.T) {
	// A run has evicting and suspending memory when it is asked for.
	file, mems := *reportFile, []string{memResident.String(), memCold.String(), memPinned.String()}
	if file == "" {
		mems = memoryNames[:]
		file = filepath.Join(t.TempDir(), "report.json")
		out := start(t, nil, "-iters", "100", "-mr", "all", "-suspend", "1ms/3ms", "-size", "8,4096,100000", "-json", file).ok()
		for _, want := range []string{"write-imm", "pinned", "every byte verified", "each page once"} {
			if !strings.Contains(out, want) {
				t.Errorf("the table does not have %q:\n%s", want, out)
			}
		}
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	checkKeys(t, b)
	var r report
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	if !r.Verified || r.Paging != "userfault" || r.Peer != "pingpong" || r.MTU != 4096 || r.Seconds <= 0 {
		t.Errorf("report: %+v", r)
	}
	seen := map[string]int{}
	for _, w := range r.Rows {
		seen[w.Op]++
		seen[w.Mem]++
		l := w.Latency
		if !(0 < l.Min && l.Min <= l.P50 && l.P50 <= l.P99 && l.P99 <= l.P999 && l.P999 <= l.Max) {
			t.Errorf("%s %s %d: latencies %+v are not in order", w.Op, w.Mem, w.Size, l)
		}
		if w.Gbps <= 0 || w.Rate <= 0 || !w.Verified {
			t.Errorf("%s %s %d: %+v", w.Op, w.Mem, w.Size, w)
		}
		if got := w.Rate * float64(w.Size) * 8 / 1e9; got < 0.999*w.Gbps || got > 1.001*w.Gbps {
			t.Errorf("%s %s %d: %g messages/s are not %g Gbit/s", w.Op, w.Mem, w.Size, w.Rate, w.Gbps)
		}
		if w.Mem == memEvicting.String() {
			checkEvicting(t, &w)
			continue
		}
		if suspending := w.Mem == memSuspending.String(); suspending != (w.Suspends > 0) {
			t.Errorf("%s %s %d: suspended %d times", w.Op, w.Mem, w.Size, w.Suspends)
		}
		cold := w.Mem == memCold.String()
		if w.PageFaults != w.PagesWritten || cold != (w.PagesWritten > 0) {
			t.Errorf("%s %s %d: %d page faults, %d pages written", w.Op, w.Mem, w.Size, w.PageFaults, w.PagesWritten)
		}
		if pinned := w.Mem == memPinned.String(); pinned != (w.Locked > 0) {
			t.Errorf("%s %s %d: %d KiB locked", w.Op, w.Mem, w.Size, w.Locked)
		}
	}
	for _, want := range slices.Concat(opNames[:], mems) {
		if seen[want] == 0 {
			t.Errorf("no row has %s", want)
		}
	}
	for _, name := range []string{"server", "client"} {
		e := r.Ends[name]
		if e == nil || e.RSS.Before <= 0 || e.RSS.After <= 0 || e.RSS.Peak < e.RSS.After {
			t.Errorf("%s: %+v", name, e)
		}
	}
}

// checkEvicting: pages left, and requests met pages that had.
func checkEvicting(t *testing.T, w *row) {
	t.Helper()
	if w.Evictions == 0 || w.Minor+w.Major == 0 || w.PagesWritten != 0 {
		t.Errorf("%s %s %d: %+v", w.Op, w.Mem, w.Size, w)
	}
}

// checkKeys checks the names that readers of the file rely on.
func checkKeys(t *testing.T, b []byte) {
	t.Helper()
	var r map[string]any
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	need := func(m map[string]any, keys ...string) {
		for _, k := range keys {
			if _, ok := m[k]; !ok {
				t.Errorf("%q is missing", k)
			}
		}
	}
	need(r, "rows", "page_faults", "locked_kib", "rss_kib", "mtu", "depth", "seed", "paging", "kernel")
	rss, _ := r["rss_kib"].(map[string]any)
	need(rss, "before", "after", "peak")
	list, _ := r["rows"].([]any)
	if len(list) == 0 {
		t.Fatal("no rows")
	}
	row, _ := list[0].(map[string]any)
	need(row, "op", "mr", "size", "latency_us", "bandwidth_gbps", "messages_per_s", "verified", "faults_minor", "faults_major",
		"evictions", "rnr_naks", "suspends")
	lat, _ := row["latency_us"].(map[string]any)
	need(lat, "min", "p50", "p99", "p999", "max")
}

// TestColdMemory: WRITEs to 256 MiB of untouched memory, each page faulted in once,
// nothing locked, and no more memory than was written.
func TestColdMemory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "report.json")
	start(t, nil, "-op", "write", "-mr", "cold", "-size", "1M", "-json", file).ok()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	if r.PageFaults != r.PagesWritten || r.PagesWritten < landingBytes/pageSize {
		t.Errorf("%d page faults, %d pages written, want equal and at least %d", r.PageFaults, r.PagesWritten, landingBytes/pageSize)
	}
	if r.Locked != 0 {
		t.Errorf("%d KiB locked", r.Locked)
	}
	const slack = 32 << 10 // KiB: pattern, queues, the Go runtime
	if grown := r.RSS.Peak - r.RSS.Before; grown > landingBytes/1024+slack {
		t.Errorf("the server's RSS grew by %d KiB for %d KiB written", grown, landingBytes/1024)
	}
}

// forever are arguments of a run that does not end by itself.
var forever = []string{"-op", "write", "-mr", "resident", "-size", "4096", "-iters", "1000000000"}

// running waits until the demo moves data and gives the processes below.
func (p *proc) running() []int {
	p.t.Helper()
	p.find("operation")
	return family(p.cmd.Process.Pid)
}

func TestPeerDies(t *testing.T) {
	for _, c := range []struct {
		name, flag string
		sig        syscall.Signal
		op         string
		want       string
	}{
		{"server killed", "-listen", syscall.SIGKILL, "write", "the server was killed"},
		{"client killed", "-connect", syscall.SIGKILL, "send", "the client was killed"},
		{"server stopped", "-listen", syscall.SIGSTOP, "send", "peer"},
		{"server stopped under one-sided load", "-listen", syscall.SIGSTOP, "read", "peer"},
		{"client stopped", "-connect", syscall.SIGSTOP, "write", "peer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			args := slices.Clone(forever)
			args[1] = c.op
			p := start(t, nil, args...)
			below := p.running()
			if len(below) != 3 {
				t.Fatalf("processes %v below %d, want 3", below, p.cmd.Process.Pid)
			}
			if err := syscall.Kill(p.member(c.flag), c.sig); err != nil {
				t.Fatal(err)
			}
			p.oneLine(c.want)
			gone(t, below)
		})
	}
}

func TestInterruptLeavesNothing(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			// In a namespace of its own: nobody else makes netdevs there meanwhile.
			err := fabric.WithNS(func() error {
				before := netdevs(t)
				interrupt(t, sig)
				if after := netdevs(t); !slices.Equal(before, after) {
					t.Errorf("netdevs before: %v, after: %v", before, after)
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// interrupt ends a demo with a signal; neither it nor what it has started is left.
func interrupt(t *testing.T, sig syscall.Signal) {
	t.Helper()
	p := start(t, nil, forever...)
	below := p.running()
	// Held open: the number of a namespace that is gone is the next one's.
	held, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", below[0]))
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	ns, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", held.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
	if s := p.wait(); sig != syscall.SIGKILL && s != 130 {
		t.Errorf("status %d, want 130", s)
	}
	gone(t, below)
	if text := p.err.String(); text != "" {
		t.Errorf("stderr: %s", text)
	}
	if left := inNamespace(ns); len(left) > 0 {
		t.Errorf("processes %v are left in the demo's namespace", left)
	}
}

func netdevs(t *testing.T) (names []string) {
	t.Helper()
	ifs, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range ifs {
		names = append(names, i.Name)
	}
	slices.Sort(names)
	return names
}

// inNamespace gives the processes in a network namespace.
func inNamespace(ns string) (pids []string) {
	files, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, f := range files {
		if l, err := os.Readlink(f); err == nil && l == ns {
			pids = append(pids, f)
		}
	}
	return pids
}

// TestCannot: what is missing is said in one line, at once.
func TestCannot(t *testing.T) {
	short := []string{"-op", "write", "-size", "64", "-iters", "10"}
	for _, c := range []struct {
		name string
		env  []string
		args []string
		want string
	}{
		{"no tun device", []string{hideTUN + "=none"}, nil, "/dev/net/tun"},
		{"tun device not ours", []string{hideTUN + "=600", asUser + "=1"}, nil, "/dev/net/tun"},
		{"no userfaultfd", []string{noUffd + "=1"}, nil, "userfaultfd"},
		{"cold without userfaultfd", []string{noUffd + "=1"}, append(short, "-mr", "cold"), "userfaultfd"},
		{"limit of locked memory", []string{hideTUN + "=666", asUser + "=1", memlock + "=65536"},
			[]string{"-op", "write", "-mr", "pinned", "-size", "1M", "-iters", "10"}, "RLIMIT_MEMLOCK"},
		{"json file", nil, append(short, "-json", "/nonexistent/x.json"), "/nonexistent/x.json"},
	} {
		t.Run(c.name, func(t *testing.T) { start(t, c.env, c.args...).oneLine(c.want) })
	}
}

// TestCan: what can be done without is done without.
func TestCan(t *testing.T) {
	short := []string{"-op", "write,send", "-size", "64,8192", "-iters", "100"}
	user := []string{hideTUN + "=666", asUser + "=1"}
	for _, c := range []struct {
		name   string
		env    []string
		args   []string
		stderr string
		stdout string
	}{
		{"ordinary user", user, append(short, "-mr", "resident,cold,evicting,suspending"), "", "each page once"},
		{"ordinary user, little to lock", append(user, memlock+"=65536"), []string{"-size", "64,1M", "-iters", "20"}, "", "ulimit -l"},
		{"resident without userfaultfd", []string{noUffd + "=1"}, append(short, "-mr", "resident"), "userfaultfd", "by kernel"},
		{"cold, paged by the kernel", []string{noUffd + "=1"}, append(short, "-mr", "cold", "-paging", "kernel"), "", "by kernel"},
		{"plain TAP", nil, append(short, "-frames", "plain"), "", "TAP none"},
		{"single frames", nil, append(short, "-frames", "single"), "", "TAP vnet,csum;"},
		{"events", nil, append(short, "-events"), "", "events"},
		{"8 QPs, MTU 256, depth 3", nil, []string{"-qp", "8", "-mtu", "256", "-depth", "3", "-op", "all", "-mr", "all",
			"-size", "1,4097", "-iters", "101"}, "", "path MTU 256, 8 QP, depth 3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := start(t, c.env, c.args...)
			out := p.ok()
			if !strings.Contains(out, "every byte verified") || !strings.Contains(out, c.stdout) {
				t.Errorf("stdout has no %q:\n%s", c.stdout, out)
			}
			if text := p.err.String(); c.stderr == "" && text != "" || !strings.Contains(text, c.stderr) {
				t.Errorf("stderr: %q, want %q", text, c.stderr)
			}
		})
	}
}
