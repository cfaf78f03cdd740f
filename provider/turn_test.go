// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"testing"
	"time"
)

// A goroutine that calls without end takes its turn before the scheduler counts 10 ms.
func TestTurn(t *testing.T) {
	var u turn
	n := 0
	for now := int64(0); now < int64(time.Second); now += int64(time.Millisecond) {
		if u.over(now) {
			n++
		}
	}
	if n != 111 {
		t.Errorf("%d turns in a second, want one each 9 ms", n)
	}
}
