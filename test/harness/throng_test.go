// SPDX-License-Identifier: Apache-2.0

package harness_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/vishvananda/netlink"
)

// Six engines send to one whose TAP's queue has the kernel's own length, as much as they can.
// When it reads nothing for a while the queue does not overflow, and nothing is lost; afterwards
// all goes on.
func TestTAPThrong(t *testing.T) {
	for name, without := range map[string]tap.Offload{"super-frames": 0, "single frames": tap.USO4 | tap.USO6} {
		t.Run(name, func(t *testing.T) {
			// Time goes by with what they do, as in TestTAPNoOverflow.
			var now atomic.Int64
			harness.NewTAPPair(t, harness.TAPOptions{Manual: true, Without: without, More: 5,
				Clock: func() int64 { return now.Add(int64(time.Microsecond)) }, InNS: throng})
		})
	}
}

func throng(p *harness.TAPs) error {
	const size, depth = 1 << 19, 2
	port, err := netlink.LinkByName(p.Ports[0].Name)
	if err == nil {
		err = netlink.LinkSetTxQLen(port, defaultQueue)
	}
	if err != nil {
		return err
	}
	rcv, senders := p.Dev[0], append([]*provider.Device{p.Dev[1]}, p.More...)
	var all []*harness.Conn
	for _, d := range senders {
		for range 2 {
			all = append(all, p.ConnectDevs(d, rcv, harness.ConnOptions{MTU: qp.MTU4096, Mem: size, Timeout: 19}))
		}
	}
	for round := range 4 {
		want := 0
		for _, c := range all {
			for i := range uint64(depth) {
				c.A.Send(c.A.Write(c.B, i, 0, 0, size))
				want++
			}
		}
		if round > 0 { // first they get to know each other
			for idle := 0; idle < 100; idle++ {
				for _, d := range senders {
					if d.Progress() {
						idle = 0
					}
				}
			}
		}
		for limit := time.Now().Add(time.Minute); want > 0; {
			for _, d := range append(senders, rcv) {
				d.Progress()
			}
			for _, c := range all {
				for _, wc := range c.A.Poll() {
					if wc.Status != qp.WCSuccess {
						return fmt.Errorf("round %d: %v", round, wc.Status)
					}
					want--
				}
			}
			if time.Now().After(limit) {
				return fmt.Errorf("round %d: %d completions are missing", round, want)
			}
		}
		if port, err = netlink.LinkByName(p.Ports[0].Name); err != nil {
			return err
		}
		if n := port.Attrs().Statistics.TxDropped; n != 0 {
			return fmt.Errorf("round %d: the netdev has dropped %d frames to its reader", round, n)
		}
	}
	for i, d := range senders {
		if st := d.Stats(); st.WindowsHeard == 0 {
			return fmt.Errorf("sender %d was told nothing", i)
		}
		if n := d.Protocol().OutOfSeqRequest.Load() + d.Protocol().OutOfSeqResponse.Load(); n != 0 {
			return fmt.Errorf("sender %d: %d packets showed that others were lost", i, n)
		}
	}
	if n := rcv.Protocol().OutOfSeqRequest.Load(); n != 0 {
		return fmt.Errorf("%d packets showed that others were lost", n)
	}
	return nil
}
