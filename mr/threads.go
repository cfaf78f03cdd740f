// SPDX-License-Identifier: Apache-2.0

package mr

// #include "pager.h"
import "C"

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"unsafe"
)

// ThreadFaults says what a thread of the application has waited for: pages of regions that
// it touched and that were not in memory.
type ThreadFaults struct {
	TID   int    `json:"tid"` // gettid(2); 0: all those that are not told apart, together
	Name  string `json:"name,omitempty"`
	Minor uint64 `json:"minor"` // pages that were absent, or in limbo
	Major uint64 `json:"major"` // pages that were in the store
	Ns    uint64 `json:"ns"`    // from when the pager read of them to when it had the page
}

// FaultThreads says what threads have waited for, who waited longest first. Up to 256 are
// told apart, ended ones included; the faults of others are in the entry with TID 0, and so
// are all of a kernel that does not tell whose a fault is (UFFD_FEATURE_THREAD_ID, Linux
// 4.14). The sum of them is what AppFaultsMinor, AppFaultsMajor and AppFaultNs of
// Space.Usage are of, for regions that are no more too.
func (s *Space) FaultThreads() []ThreadFaults {
	s.settle()
	all := &s.sh.threads
	seq := (*atomic.Uint32)(unsafe.Pointer(&all.seq))
	load := func(n *C.uint64_t) uint64 { return (*atomic.Uint64)(unsafe.Pointer(n)).Load() }
	var out []ThreadFaults
	add := func(t *C.struct_tv_thread, tid int) {
		if f := (ThreadFaults{TID: tid, Minor: load(&t.minor), Major: load(&t.major), Ns: load(&t.ns)}); f.Minor+f.Major > 0 {
			out = append(out, f)
		}
	}
	for {
		was := seq.Load()
		out = out[:0]
		add(&all.others, 0)
		for i := range all.at {
			if tid := (*atomic.Uint32)(unsafe.Pointer(&all.at[i].tid)).Load(); tid != 0 {
				add(&all.at[i], int(tid))
			}
		}
		if was%2 == 0 && seq.Load() == was {
			break
		}
		runtime.Gosched()
	}
	slices.SortFunc(out, func(a, b ThreadFaults) int { return cmp.Or(cmp.Compare(b.Ns, a.Ns), cmp.Compare(a.TID, b.TID)) })
	for i := range out {
		if out[i].TID != 0 {
			name, _ := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/comm", out[i].TID))
			out[i].Name = string(bytes.TrimSpace(name))
		}
	}
	return out
}
