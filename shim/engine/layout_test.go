// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

// TestLayout compares each field of the structs in rings in C and in Go. Sizes of the
// structs and the ring's own offsets are compared when this package is compiled.
func TestLayout(t *testing.T) {
	names, c, g := layout()
	if len(names) != 35 {
		t.Errorf("%d fields are compared", len(names))
	}
	for i, n := range names {
		if c[i] != g[i] {
			t.Errorf("%s: offset and size %v in C, %v in Go", n, c[i], g[i])
		}
	}
}
