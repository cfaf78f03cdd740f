// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"testing"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/test/interop/lab"
)

// routed has the guest be a router between the network of the lab and another one on the same bridge,
// and what it forwards to one address leave it by a slow way: 100 Mbit/s, with a queue that marks what
// can be marked (RED with ECN, tc-red(8)) and has room for more than a queue pair's window. Notifications
// can not be marked, so such a queue would drop them; they go the other way.
const routed = `set -e
ip addr replace 10.79.0.1/24 dev eth0
ip addr replace fd79::1/64 dev eth0 nodad
for f in all eth0; do
	echo 1 >/proc/sys/net/ipv4/conf/$f/forwarding
	echo 0 >/proc/sys/net/ipv4/conf/$f/send_redirects
	echo 1 >/proc/sys/net/ipv6/conf/$f/forwarding
done
tc qdisc replace dev eth0 root handle 1: prio bands 2 priomap 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
tc qdisc replace dev eth0 parent 1:2 handle 2: tbf rate 100mbit burst 64kb limit 8mb
tc qdisc replace dev eth0 parent 2:1 handle 3: red limit 8000000 min 30000 max 90000 avpkt 1100 burst 40 bandwidth 100mbit probability 0.1 ecn
tc filter add dev eth0 parent 1: protocol %s flower dst_ip %s classid 1:2
`

// unmarked takes that queue away, and unrouted the rest.
const (
	unmarked = "tc qdisc del dev eth0 root"
	unrouted = `tc qdisc del dev eth0 root 2>/dev/null
ip addr del 10.79.0.1/24 dev eth0
ip addr del fd79::1/64 dev eth0
for f in all eth0; do
	echo 0 >/proc/sys/net/ipv4/conf/$f/forwarding
	echo 0 >/proc/sys/net/ipv6/conf/$f/forwarding
done
`
)

var redSays = regexp.MustCompile(`marked (\d+) early (\d+) pdrop (\d+)`)

// marks are how many packets the guest's queue has marked, and how many it has dropped.
func marks(t *testing.T, ctx context.Context) (marked, dropped int) {
	t.Helper()
	out, err := lab.Run(ctx, "tc -s qdisc show dev eth0 parent 2:1")
	m := redSays.FindStringSubmatch(out)
	if err != nil || m == nil {
		t.Fatal(err, out)
	}
	var n [3]int
	for i := range n {
		n[i], _ = strconv.Atoi(m[i+1])
	}
	return n[0], n[1] + n[2]
}

// TestMarks: a queue of the kernel's marks packets between two ends of ours, as it fills. The receiver notifies
// the sender of it (CNP), which slows down; when the queue is gone it has no rate any more, and
// all data has arrived.
func TestMarks(t *testing.T) {
	needLab(t, usual)
	for _, f := range []struct {
		name, protocol string
		gid            int
		near, far      string // addresses of ours,
		nearBy, farBy  string // and the guest's, on the same network
		bits           string
	}{
		{"IPv4", "ip", harness.GIDv4, ourAddr, "10.79.0.50", lab.GuestAddr, "10.79.0.1", "/24"},
		{"IPv6", "ipv6", harness.GIDv6, ourAddr6, "fd79::50", lab.GuestAddr6, "fd79::1", "/64"},
	} {
		for op, name := range map[qp.WROpcode]string{qp.WRWrite: "WRITE", qp.WRRead: "READ"} {
			if op != qp.WRWrite && !wanted(full) {
				continue
			}
			one(t, "RED marks, "+name+" by "+f.name, func(t *testing.T, ctx context.Context) {
				to := f.far
				if op == qp.WRRead {
					to = f.near
				}
				t.Cleanup(func() {
					if out, err := lab.Run(context.WithoutCancel(ctx), unrouted); err != nil {
						t.Error(err, out)
					}
				})
				if out, err := lab.Run(ctx, fmt.Sprintf(routed, f.protocol, to)); err != nil {
					t.Fatal(err, out)
				}
				c := between(t, f.gid, [2]provider.Config{
					{Port: ourPort, Addrs: addrs(ourAddr, ourAddr6), Gateway: []netip.Addr{netip.MustParseAddr(f.nearBy)}},
					{Port: farPort, Addrs: addrs("10.79.0.50", "fd79::50"), Gateway: []netip.Addr{netip.MustParseAddr(f.farBy)}},
				})
				s := &flood{ctx: ctx, c: c, op: op, sender: c.Dev[0], receiver: c.Dev[1]}
				if op == qp.WRRead {
					s.sender, s.receiver = s.receiver, s.sender
				}
				s.until(func() bool { return s.slowest != 0 && s.slowest <= 10_000_000 && s.sender.Stats().CNPsHandled >= 20 })
				snd, rcv := s.sender.Stats(), s.receiver.Stats()
				marked, dropped := marks(t, ctx)
				fmt.Printf("  %d MiB: RED has marked %d packets and dropped %d; %d seen, %d notifications, %d heeded; down to %d Mbit/s; %d packets sent again\n", s.moved>>20,
					marked, dropped, rcv.Marked, rcv.CNPsSent, snd.CNPsHandled, s.slowest/1000, s.sender.Protocol().RetransmittedPkts.Load())
				if rcv.Marked == 0 || int(rcv.Marked) > marked || rcv.CNPsSent == 0 || snd.CNPsHandled > rcv.CNPsSent {
					t.Error("not as it should be")
				}
				if out, err := lab.Run(ctx, unmarked); err != nil {
					t.Fatal(err, out)
				}
				end := s.moved + 1<<20 // what was on its way has arrived then
				s.until(func() bool { return s.moved >= end && s.rate() == 0 })
				before := s.receiver.Stats().Marked
				end = s.moved + 4<<20
				s.until(func() bool { return s.moved >= end })
				if now := s.receiver.Stats().Marked; now != before || s.rate() != 0 {
					t.Errorf("%d packets marked without that queue, %d kbit/s", now-before, s.rate())
				}
				s.end()
			})
		}
	}
}

func addrs(v4, v6 string) []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix(v4 + "/24"), netip.MustParsePrefix(v6 + "/64")}
}

// between connects two devices of ours on different networks.
func between(t *testing.T, gid int, cfgs [2]provider.Config) *harness.Conn {
	t.Helper()
	var d [2]*provider.Device
	for i := range d {
		var err error
		if d[i], err = provider.Open(cfgs[i]); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := d[i].Close(); err != nil {
				t.Error(err)
			}
		})
	}
	return harness.LivePair(t, d[0], d[1]).Connect(harness.ConnOptions{GID: gid, MTU: qp.MTU1024, Timeout: 20, // 4 s
		Attr: func(_ int, a *provider.QPAttr) { a.AH.HopLimit = 64 }})
}

// flood keeps a connection busy, with messages of 64 KiB.
type flood struct {
	ctx              context.Context
	c                *harness.Conn
	op               qp.WROpcode
	sender, receiver *provider.Device
	posted, moved    int   // bytes
	slowest          int64 // rate of the sender seen, in kbit/s
}

const (
	floodSize  = 64 << 10
	floodDepth = 8
)

// rate is what the sender is slowed down to, in kbit/s; 0 if it is not.
func (f *flood) rate() int64 {
	sn, err := f.sender.Snapshot(0)
	if err != nil {
		f.c.T.Fatal(err)
	}
	return sn.QPs[0].Progress.Rate
}

// until goes on until done, which is asked after each message.
func (f *flood) until(done func() bool) {
	from, to := f.c.A.Mem, f.c.B.Mem
	if f.op == qp.WRRead {
		from, to = to, from
	}
	for first := true; first || !done(); first = false {
		for f.posted < f.moved+floodDepth*floodSize {
			at := f.posted % (floodDepth * floodSize)
			harness.Fill(from[at:at+floodSize], uint64(f.posted))
			if f.op == qp.WRRead {
				f.c.A.Send(f.c.A.Read(f.c.B, uint64(at), at, at, floodSize))
			} else {
				f.c.A.Send(f.c.A.Write(f.c.B, uint64(at), at, at, floodSize))
			}
			f.posted += floodSize
		}
		f.take(from, to)
		if f.ctx.Err() != nil {
			f.c.T.Fatal(context.Cause(f.ctx))
		}
	}
}

// take waits for the oldest message.
func (f *flood) take(from, to []byte) {
	at := f.moved % (floodDepth * floodSize)
	var wcs [1]qp.WC
	f.c.RunUntil(func() bool {
		f.look()
		return f.c.A.CQ.Poll(wcs[:]) == 1
	})
	if wcs[0].Status != qp.WCSuccess || wcs[0].ID != uint64(at) {
		f.c.T.Fatalf("message at %d: %+v", at, wcs[0])
	}
	if !bytes.Equal(from[at:at+floodSize], to[at:at+floodSize]) {
		f.c.T.Fatal("wrong data")
	}
	f.moved += floodSize
}

// look notes how slow the sender is: it gets faster again between two notifications.
func (f *flood) look() {
	if r := f.rate(); r != 0 && (f.slowest == 0 || r < f.slowest) {
		f.slowest = r
	}
}

// end waits for all that was posted.
func (f *flood) end() {
	from, to := f.c.A.Mem, f.c.B.Mem
	if f.op == qp.WRRead {
		from, to = to, from
	}
	for f.moved < f.posted {
		f.take(from, to)
	}
}
