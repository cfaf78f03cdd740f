// SPDX-License-Identifier: Apache-2.0

// Package rawfork makes children by fork(2) alone, as C programs do, for tests of what
// becomes of memory regions then. The standard library always executes a program.
package rawfork

import (
	"syscall"
	_ "unsafe" // for linkname
)

//go:linkname entersyscall runtime.entersyscall
func entersyscall()

//go:linkname exitsyscall runtime.exitsyscall
func exitsyscall()

// Fork makes a child process: 0 in the child, in the parent the child's process ID, or an
// errno. The child has one of the parent's threads, and no Go runtime: up to its end its
// code must neither grow the stack, nor allocate, nor return to a caller that does, and
// have no instrumentation of the race detector's (go:nosplit, go:norace).
//
// The parent's fork waits until the pager has read of it, which may wait for goroutines:
// so it gives its scheduler slot away meanwhile, as an ordinary system call does and a raw
// one does not.
//
//go:norace
//go:nosplit
//go:noinline
func Fork() (pid uintptr, e syscall.Errno) {
	entersyscall()
	pid, _, e = syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	if e != 0 || pid != 0 {
		exitsyscall()
	}
	return pid, e
}

// Exit makes a child that ends at once.
//
//go:norace
//go:nosplit
func Exit() (pid uintptr, e syscall.Errno) {
	pid, e = Fork()
	if e == 0 && pid == 0 {
		for {
			syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 0, 0, 0)
		}
	}
	return pid, e
}
