// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// inThread runs f in a thread of its own, which ends with it, and gives its number.
func inThread(f func()) (tid int) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends
		tid = unix.Gettid()
		f()
	}()
	<-done
	return tid
}

func faultsOf(s *Space, tid int) (f ThreadFaults, all ThreadFaults) {
	for _, t := range s.FaultThreads() {
		all.Minor, all.Major, all.Ns = all.Minor+t.Minor, all.Major+t.Major, all.Ns+t.Ns
		if t.TID == tid {
			f = t
		}
	}
	return f, all
}

// TestFaultThreads: the faults of each thread are its own, with what it waited; those of a
// region are the same altogether.
func TestFaultThreads(t *testing.T) {
	b := evicting(t, 64, nil)
	if b.s.features&uffdFeatureThread == 0 {
		t.Skip("the kernel does not tell whose a fault is")
	}
	touch := func(first, n int) func() {
		return func() {
			for i := first; i < first+n; i++ {
				b.m.Bytes()[i*pageSize] = 1
			}
		}
	}
	one := inThread(touch(0, 5))
	b.evict(t, 0, 5, Stored)
	other := inThread(func() {
		touch(0, 3)()   // which the store has
		touch(16, 11)() // which nobody has
		f, _ := faultsOf(b.s, unix.Gettid())
		if f.Name == "" || f.Major != 3 {
			t.Errorf("while it lives: %+v", f)
		}
	})
	f, _ := faultsOf(b.s, one)
	if f.Minor != 5 || f.Major != 0 || f.Ns == 0 {
		t.Errorf("the first thread: %+v", f)
	}
	f, all := faultsOf(b.s, other)
	if f.Minor != 11 || f.Major != 3 || f.Ns == 0 {
		t.Errorf("the second thread: %+v", f)
	}
	if u := b.usage(t); u.AppFaultsMinor != all.Minor || u.AppFaultsMajor != all.Major || u.AppFaultNs != all.Ns {
		t.Errorf("threads %+v, the region %+v", all, u)
	}
}

// TestFaultThreadsMany: of more threads than there is room for none is lost from the sum.
func TestFaultThreadsMany(t *testing.T) {
	const n = 600
	b := newBed(t, n*pageSize)
	for i := range n {
		inThread(func() { b.m.Bytes()[i*pageSize] = 1 })
	}
	_, all := faultsOf(b.s, 0)
	if all.Minor < n { // other threads of this process may touch regions, too
		t.Errorf("%d faults, want %d", all.Minor, n)
	}
	if k := len(b.s.FaultThreads()); k > 257 {
		t.Errorf("%d entries", k)
	}
}
