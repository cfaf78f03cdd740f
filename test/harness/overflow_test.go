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

// defaultQueue is the txqueuelen of a TAP if nobody changes it; a fabric's are longer.
const defaultQueue = 1000

// The queue of a TAP does not overflow while its reader does something else, whatever is
// sent to it: the netdev counts no drops. Afterwards all goes on.
func TestTAPNoOverflow(t *testing.T) {
	for name, tapo := range map[string]harness.TAPOptions{
		"super-frames": {}, "super-frames to a plain peer": {PlainPeer: true}, "vnet": {Without: tap.USO4 | tap.USO6},
	} {
		for _, conns := range []int{1, 12} {
			t.Run(fmt.Sprintf("%s/%d", name, conns), func(t *testing.T) {
				tapo.Manual = true
				// Both engines take turns in this goroutine. On a busy machine a turn may take long;
				// by a clock that goes by what they do neither takes the other for dead for that.
				var now atomic.Int64
				tapo.Clock = func() int64 { return now.Add(int64(time.Microsecond)) }
				tapo.InNS = func(p *harness.TAPs) error { return overflow(p, conns) }
				harness.NewTAPPair(t, tapo)
			})
		}
	}
}

func overflow(p *harness.TAPs, conns int) error {
	const size, depth = 1 << 19, 2
	for _, port := range p.Ports {
		l, err := netlink.LinkByName(port.Name)
		if err == nil {
			err = netlink.LinkSetTxQLen(l, defaultQueue)
		}
		if err != nil {
			return err
		}
	}
	var all []*harness.Conn
	for range conns {
		// Two seconds: the machine may be busy.
		all = append(all, p.Connect(harness.ConnOptions{MTU: qp.MTU4096, Mem: 2 * size, Timeout: 19}))
	}
	for _, op := range []qp.WROpcode{qp.WRWrite, qp.WRSend, qp.WRRead} {
		for stopped, dev := range p.Dev {
			for _, c := range all {
				// From both sides, so that acknowledgements and READ responses meet requests.
				for i := range uint64(depth) {
					for k, e := range []*harness.End{c.A, c.B} {
						peer := []*harness.End{c.B, c.A}[k]
						switch op {
						case qp.WRWrite:
							e.Send(e.Write(peer, i, 0, size, size))
						case qp.WRSend:
							peer.Recv(i, size, size)
							e.Send(e.Message(i, 0, size))
						case qp.WRRead:
							e.Send(e.Read(peer, i, size, 0, size))
						}
					}
				}
			}
			other := p.Dev[1-stopped]
			dev.Progress() // its requests are on their way, and some answers, too
			for end := time.Now().Add(20 * time.Millisecond); other.Progress() || time.Now().Before(end); {
			}
			want := len(all) * depth * 2
			if op == qp.WRSend {
				want *= 2
			}
			for limit := time.Now().Add(time.Minute); want > 0; {
				dev.Progress()
				other.Progress()
				for _, c := range all {
					for _, e := range []*harness.End{c.A, c.B} {
						for _, wc := range e.Poll() {
							if wc.Status != qp.WCSuccess {
								return fmt.Errorf("opcode %d, device %d stopped: %v", op, stopped, wc.Status)
							}
							want--
						}
					}
				}
				if time.Now().After(limit) {
					return fmt.Errorf("opcode %d, device %d stopped: %d completions are missing", op, stopped, want)
				}
			}
			for i, port := range p.Ports {
				l, err := netlink.LinkByName(port.Name)
				if err != nil {
					return err
				}
				if n := l.Attrs().Statistics.TxDropped; n != 0 {
					return fmt.Errorf("opcode %d, device %d stopped: the netdev of %d has dropped %d frames to its reader", op, stopped, i, n)
				}
			}
		}
	}
	lost := func(d *provider.Device) uint64 {
		s := d.Protocol()
		return s.OutOfSeqRequest.Load() + s.OutOfSeqResponse.Load()
	}
	if n := lost(p.Dev[0]) + lost(p.Dev[1]); n != 0 {
		return fmt.Errorf("%d packets showed that others were lost", n)
	}
	return nil
}
