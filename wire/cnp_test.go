// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"testing"
)

// A CNP says nothing of a window unless it was given one; then it is a CNP like any, too.
func TestCNPWindow(t *testing.T) {
	for _, n := range []uint16{0, 1, 768, 0xffff} {
		b := bytes.Repeat([]byte{0xa5}, BTHLen+CNPLen+ICRCLen)
		(&BTH{Op: CNP, BECN: true, PKey: DefaultPKey, DestQP: 5}).Put(b)
		PutCNPWindow(b[BTHLen:], n)
		if zero := bytes.Equal(b[BTHLen:BTHLen+CNPLen], make([]byte, CNPLen)); zero != (n == 0) {
			t.Errorf("%d: reserved bytes % x", n, b[BTHLen:BTHLen+CNPLen])
		}
		p := Packet{Frame: b, Info: CNP.Info()}
		if got := p.CNPWindow(); got != n {
			t.Errorf("%d is read as %d", n, got)
		}
		if p.Info = RCAck.Info(); p.CNPWindow() != 0 {
			t.Error("another packet has a window")
		}
	}
}
