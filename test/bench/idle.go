// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// What a device costs that has nothing to do: how often its threads are put onto a processor.

const (
	// idlePort is the TCP port that whoever is idle listens at, so that it can be seen when.
	idlePort = 18603
	// idleAfter is how long what has just been connected may take to be quiet, idleTime how long it
	// is watched.
	idleAfter = 2 * time.Second
	idleTime  = 5 * time.Second
)

// switches is the metric: voluntary and involuntary context switches of all threads (proc(5)).
const switches = "switches/s"

// idleLines are who is idle.
var idleLines = []struct{ name, what string }{
	{"a Go program with connected queue pairs", "go"},
	{"the same on a TAP of two queues", "go, 2 queues"},
	{"a C program with connected queue pairs, under `tapverbs run`", "c"},
}

// idlePart watches them, in the first round alone, as nothing is compared.
func idlePart(r *room, b *book) error {
	if b.round > 0 {
		return nil
	}
	for i, l := range idleLines[:2] {
		b.try("idle", key{Who: "idle", What: l.what}, r.idleGo(b, l.what, i+1))
	}
	b.try("idle", key{Who: "idle", What: "c"}, r.idleC(b))
	return nil
}

// idleGo is one of two processes on a device of so many queues.
func (r *room) idleGo(b *book, what string, queues int) error {
	owner, err := r.shardEnd("shard-owner", 0, queues, "idle").start()
	if err != nil {
		return err
	}
	defer owner.kill()
	if err := owner.listens(pairPort); err != nil {
		return err
	}
	peer, err := r.shardEnd("shard-peer", 1, queues, "idle").start()
	if err != nil {
		return err
	}
	defer peer.kill()
	if err := peer.listens(idlePort); err != nil {
		return err
	}
	return b.watch(what, peer, owner)
}

// idleC is a C program.
func (r *room) idleC(b *book) error {
	program, err := r.compile("idle", "test/bench/testdata/idle.c", "libibverbs")
	if err != nil {
		return err
	}
	c, err := command{at: r.here, args: []string{filepath.Join(r.bin, "tapverbs"), "run", "-port", r.ports[0].Name, "--", program, strconv.Itoa(idlePort)}}.start()
	if err != nil {
		return err
	}
	defer c.kill()
	if err := c.listens(idlePort); err != nil {
		return err
	}
	return b.watch("c", c)
}

// watch counts the context switches of processes and their children while they are idle, and says
// on standard error which threads had any. Of several the busiest counts.
func (b *book) watch(what string, rs ...*running) error {
	time.Sleep(idleAfter)
	before := make([]map[string]int, len(rs))
	for i, r := range rs {
		before[i] = contextSwitches(r.cmd.Process.Pid)
	}
	start := time.Now()
	time.Sleep(idleTime)
	took, most := time.Since(start).Seconds(), 0
	for i, r := range rs {
		select {
		case <-r.done:
			return fmt.Errorf("ended (%v): %s", r.end, lastLines(r.err.String()+r.out.String()))
		default:
		}
		all := 0
		for t, n := range contextSwitches(r.cmd.Process.Pid) {
			if n -= before[i][t]; n > 0 {
				fmt.Fprintf(os.Stderr, "idle, %s: %d context switches of %s in %.0f s\n", what, n, t, took)
				all += n
			}
		}
		most = max(most, all)
	}
	b.add("idle", what, 0, switches, float64(most)/took)
	return nil
}

// contextSwitches counts those of each thread of a process and of its children so far, by names of threads.
func contextSwitches(pid int) map[string]int {
	out := make(map[string]int)
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid)) // none: it has ended
	for _, task := range tasks {
		b, err := os.ReadFile(filepath.Join(task, "status"))
		if err != nil {
			continue // it ends
		}
		name, n := "", 0
		for line := range strings.Lines(string(b)) {
			word, value, _ := strings.Cut(line, ":")
			value = strings.TrimSpace(value)
			switch word {
			case "Name":
				name = value
			case "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches":
				k, _ := strconv.Atoi(value) // 0: the kernel writes numbers
				n += k
			}
		}
		out[name+" "+filepath.Base(task)] = n
		children, _ := os.ReadFile(filepath.Join(task, "children")) // nothing: none
		for _, c := range strings.Fields(string(children)) {
			if child, err := strconv.Atoi(c); err == nil {
				for t, n := range contextSwitches(child) {
					out[t] = n
				}
			}
		}
	}
	return out
}

// printShards prints what shards and idle programs are like.
func (b *book) printShards(w io.Writer, only []string) {
	b.table(w, "queues of each TAP: WRITEs of 64 B of two threads, messages/s", shardQueues, plain, rate, []line{{"two processes, 2 CPUs", "shards", "write"}}, only)
	var lines []line
	for _, l := range simLoads {
		lines = append(lines, line{l.name, simulatedWho, l.what})
	}
	b.table(w, "simulation, a processor for each queue: WRITEs, messages/s", simulated, plain, rate, lines, only)
}

func (b *book) printIdle(w io.Writer, only []string) {
	if !slices.Contains(only, "idle") {
		return
	}
	fmt.Fprint(w, "| idle | context switches a second |\n|---|---:|\n")
	for _, l := range idleLines {
		fmt.Fprintf(w, "| %s | %s |\n", l.name, b.cell(k("idle", l.what, 0, switches)))
	}
}
