// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"testing"
)

// TestContextSwitches: those of all threads of a process are counted.
func TestContextSwitches(t *testing.T) {
	all := func() (n int) {
		for _, k := range contextSwitches(os.Getpid()) {
			n += k
		}
		return n
	}
	before := all()
	// Waiting for a program's end is at least one.
	if err := exec.Command("sleep", "0.01").Run(); err != nil {
		t.Fatal(err)
	}
	if after := all(); after <= before {
		t.Errorf("%d context switches after %d", after, before)
	}
}
