// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"
)

// Resources counts what a device could leave behind, and the threads, which the Go
// runtime makes as it likes and which have mappings.
type Resources struct {
	Goroutines, FDs, Mappings, Threads int
}

// CountResources counts the process's goroutines, descriptors, mappings and threads.
func CountResources(t testing.TB) Resources {
	t.Helper()
	runtime.GC()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return Resources{runtime.NumGoroutine(), len(fds), bytes.Count(maps, []byte{'\n'}), len(threads)}
}

// leakPatience is how long what has ended may take to be gone.
const leakPatience = 2 * time.Minute

// CheckLeaks runs fn often and fails the test if goroutines, descriptors or
// mappings grow with it. The first runs may start what lives as long as the
// process.
func CheckLeaks(t testing.TB, fn func()) {
	t.Helper()
	const times = 60
	for range 3 {
		fn()
	}
	before := CountResources(t)
	for range times {
		fn()
	}
	var leaks []string
	for end := time.Now().Add(leakPatience); ; time.Sleep(time.Millisecond) {
		if leaks = grown(before, CountResources(t), times); len(leaks) == 0 {
			return
		}
		if time.Now().After(end) { // goroutines take a while from their last word to their end
			break
		}
	}
	for _, l := range leaks {
		t.Errorf("%s more after %d runs", l, times)
	}
}

// grown lists what there is more of than some runs may leave.
func grown(before, after Resources, times int) (leaks []string) {
	if d := after.Goroutines - before.Goroutines; d > 1 {
		leaks = append(leaks, fmt.Sprintf("%d goroutines", d))
	}
	if d := after.FDs - before.FDs; d > 1 {
		leaks = append(leaks, fmt.Sprintf("%d descriptors", d))
	}
	// The Go heap makes a few mappings of its own; a thread has a stack, a guard page, and
	// the C library's memory with one more.
	if d := after.Mappings - before.Mappings; d > times/2+4*max(0, after.Threads-before.Threads) {
		leaks = append(leaks, fmt.Sprintf("%d mappings", d))
	}
	return leaks
}
