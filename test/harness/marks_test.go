// SPDX-License-Identifier: Apache-2.0

package harness_test

import (
	"testing"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/harness"
)

// rate is that of the one queue pair of a device, in kbit/s; 0: nothing slows it down.
func rate(t *testing.T, c *harness.Conn) int64 {
	t.Helper()
	sn, err := c.Dev[0].Snapshot(0)
	if err != nil {
		t.Fatal(err)
	}
	return sn.QPs[0].Progress.Rate
}

// The kernel marks what the bridge hands to a port, in super-frames and in single ones: who gets it notifies
// the sender, which slows down for as long as that goes on, and has no rate again some time after the last
// mark. Nothing is lost, and nothing is sent again.
func TestTAPMarks(t *testing.T) {
	for name, gid := range map[string]int{"v4": harness.GIDv4, "v6": harness.GIDv6} {
		t.Run(name, func(t *testing.T) {
			p := harness.NewTAPPair(t, harness.TAPOptions{})
			c := p.Connect(harness.ConnOptions{GID: gid, MTU: qp.MTU4096, Timeout: 20}) // 4 s
			if p.Dev[0].Offloads().Has(harness.Super) {
				settled(p.Pair)
			}
			written(c, 1)
			if st := p.Dev[1].Stats(); st.Marked+st.CNPsSent != 0 || rate(t, c) != 0 {
				t.Fatalf("%d marked, %d notifications, %d kbit/s without marks", st.Marked, st.CNPsSent, rate(t, c))
			}
			f := p.Filter(1, harness.Mark)
			slowest := int64(1) << 62
			goesOn(c, func() bool {
				if r := rate(t, c); r != 0 {
					slowest = min(slowest, r)
				}
				return slowest <= 20_000_000 // half of what it begins with
			})
			f.Remove()
			p.RunUntil(func() bool { return p.Dev[1].Stats().Marked >= f.Hits() })
			a, b := p.Dev[0].Stats(), p.Dev[1].Stats()
			t.Logf("%d frames, %d packets were marked, %d notifications; down to %d kbit/s", f.Hits(), b.Marked, b.CNPsSent, slowest)
			if b.CNPsSent == 0 || b.CNPsSent > b.Marked || a.CNPsHandled == 0 || a.CNPsHandled != a.CNPs || a.CNPs > b.CNPsSent {
				t.Errorf("%d frames and %d packets were marked, %d notifications sent, %d received, %d heeded", f.Hits(), b.Marked, b.CNPsSent, a.CNPs, a.CNPsHandled)
			}
			goesOn(c, func() bool { return rate(t, c) == 0 })
			sn, err := p.Dev[1].Snapshot(0)
			if err != nil {
				t.Fatal(err)
			}
			if st := p.Dev[1].Stats(); sn.Counters["np_cnp_sent"] != st.CNPsSent || sn.Counters["np_ecn_marked_roce_packets"] != st.Marked {
				t.Errorf("told: %v", sn.Counters)
			}
		})
	}
}
