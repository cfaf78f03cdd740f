// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"encoding/binary"
	"os"
	"testing"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// TestLongestMessage moves 2 GiB with one work request, the most there is (IBA
// 9.7.7.1.3): a WRITE, and the READ that brings it back. TAPVERBS_LONG=1 does it at
// path MTU 256, too, where such a message spans half of the PSN space; that takes a
// minute. Under the race detector the message is shorter.
func TestLongestMessage(t *testing.T) {
	mtus := []qp.MTU{qp.MTU4096}
	if os.Getenv("TAPVERBS_LONG") != "" {
		mtus = append(mtus, qp.MTU256)
	}
	for _, mtu := range mtus {
		p := harness.NewPair(t, taptest.Config{})
		// A's memory is read from, mostly untouched, and stays so; B's becomes real.
		c := p.Connect(harness.ConnOptions{MTU: mtu, Mem: longest, PSN: [2]uint32{0xfffffe, 5}, Timeout: 14})
		stamp := func(b []byte, seed uint64) {
			for at := 0; at < len(b); at += 1 << 20 {
				binary.LittleEndian.PutUint64(b[at+at>>20&4095&^7:], seed+uint64(at))
			}
		}
		stamp(c.A.Mem, 1)
		wr := c.A.Write(c.B, 1, 0, 0, longest)
		wr.Flags = qp.SendSignaled
		c.A.Send(wr)
		waitLong(t, c)
		if !bytes.Equal(c.A.Mem, c.B.Mem) {
			t.Fatal("the WRITE moved other bytes")
		}
		stamp(c.B.Mem, 2)
		wr = c.A.Read(c.B, 2, 0, 0, longest)
		wr.Flags = qp.SendSignaled
		c.A.Send(wr)
		waitLong(t, c)
		if !bytes.Equal(c.A.Mem, c.B.Mem) {
			t.Fatal("the READ brought other bytes")
		}
		for i := range 2 {
			if st := p.Dev[i].Protocol(); st.RetransmittedPkts.Load() != 0 || st.DuplicateRequest.Load() != 0 {
				t.Error("sent twice without a loss")
			}
		}
	}
}

// waitLong waits for the one work request, however many steps it takes.
func waitLong(t *testing.T, c *harness.Conn) {
	t.Helper()
	for {
		if wcs := c.A.Poll(); len(wcs) > 0 {
			if wcs[0].Status != qp.WCSuccess {
				t.Fatal(wcs[0].Status)
			}
			return
		}
		if !c.Step() {
			t.Fatal("nothing happens any more")
		}
	}
}
