// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// adopt makes this process the parent of what its children leave behind, so that
// killOrphans finds them (PR_SET_CHILD_SUBREAPER of prctl(2)).
func adopt() { _ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }

// killOrphans kills the processes that copies have started and left, such as those of a
// shell that a signal ended. The copies themselves have been waited for.
func killOrphans() {
	for {
		pids := children()
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		for _, pid := range pids {
			_, _ = unix.Wait4(pid, nil, 0, nil)
		}
		if len(pids) == 0 { // theirs have become ours
			return
		}
	}
}

// children lists the processes whose parent this one is.
func children() (pids []int) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	self := strconv.Itoa(os.Getpid())
	for _, s := range stats {
		b, err := os.ReadFile(s)
		if err != nil {
			continue // ended since
		}
		// proc_pid_stat(5): pid (name) state ppid; the name may hold anything.
		f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(s)))
		if err == nil && len(f) > 1 && f[1] == self {
			pids = append(pids, pid)
		}
	}
	return pids
}
