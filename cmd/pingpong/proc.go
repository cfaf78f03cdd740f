// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/provider"
)

// procStatus is what /proc/self/status tells about memory, in KiB (proc(5)).
type procStatus struct {
	RSS    int64 // VmRSS: resident now
	Peak   int64 // VmHWM: most that was ever resident
	Locked int64 // VmLck + VmPin: locked by mlock(2), or pinned as RDMA drivers of the kernel do
}

// readStatus reads this process's status. Fields that the kernel does not print
// are 0.
func readStatus() (procStatus, error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return procStatus{}, err
	}
	return parseStatus(b), nil
}

func parseStatus(b []byte) procStatus {
	var s procStatus
	for line := range bytes.Lines(b) {
		name, rest, ok := bytes.Cut(line, []byte(":"))
		if !ok {
			continue
		}
		f := bytes.Fields(rest)
		if len(f) == 0 {
			continue
		}
		n, err := strconv.ParseInt(string(f[0]), 10, 64)
		if err != nil {
			continue
		}
		switch string(name) {
		case "VmRSS":
			s.RSS = n
		case "VmHWM":
			s.Peak = n
		case "VmLck", "VmPin":
			s.Locked += n
		}
	}
	return s
}

// capIPCLock is the bit of CAP_IPC_LOCK in a capability mask (capabilities(7)).
const capIPCLock = 14

// pinLimit is how many bytes this process may lock, 0 for any number: RLIMIT_MEMLOCK
// binds those who have no CAP_IPC_LOCK in the first user namespace (mlock(2)).
func pinLimit() int {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim) != nil || lim.Cur > 1<<40 {
		return 0
	}
	if ids, err := os.ReadFile("/proc/self/uid_map"); err == nil {
		if f := strings.Fields(string(ids)); len(f) == 3 && f[2] == "4294967295" && effective(capIPCLock) {
			return 0
		}
	}
	return max(int(lim.Cur)&^(pageSize-1), 1)
}

// effective says whether this process has a capability in effect.
func effective(bit int) bool {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(b), "CapEff:")
	f := strings.Fields(rest)
	if len(f) == 0 {
		return false
	}
	mask, err := strconv.ParseUint(f[0], 16, 64)
	return err == nil && mask>>bit&1 != 0
}

// counters gives the engine's counters that are not zero, by name: the
// protocol's, and frames that were dropped.
func counters(d *provider.Device) map[string]uint64 {
	out := map[string]uint64{}
	p := reflect.ValueOf(d.Protocol()).Elem()
	for i := range p.NumField() {
		if c, ok := p.Field(i).Addr().Interface().(*atomic.Uint64); ok && c.Load() != 0 {
			out[snake(p.Type().Field(i).Name)] = c.Load()
		}
	}
	st := d.Stats()
	for r, n := range st.Drops {
		if n != 0 {
			out["dropped_"+provider.DropReason(r).String()] = n
		}
	}
	return out
}

// snake turns a name such as RcvdNakSeq into rcvd_nak_seq; a run of capitals is
// one word.
func snake(s string) string {
	upper := func(i int) bool { return i < len(s) && s[i] >= 'A' && s[i] <= 'Z' }
	var b strings.Builder
	for i := range len(s) {
		if upper(i) && i > 0 && (!upper(i-1) || i+1 < len(s) && !upper(i+1)) {
			b.WriteByte('_')
		}
		b.WriteByte(s[i] | 0x20)
	}
	return b.String()
}
