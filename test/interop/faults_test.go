// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/interop/lab"
	"github.com/tapverbs/tapverbs/wire"
)

// nak says whether a packet is a NAK of a kind and, of AckNak, with a code.
func (p packet) nak(fromUs bool, kind wire.AckKind, code uint8) bool {
	if p.fromUs != fromUs || p.bth.Op != wire.RCAck {
		return false
	}
	a := wire.ParseAETH(p.data)
	return a.Kind() == kind && (kind != wire.AckNak || a.Value() == code)
}

// dialed is a connection of ours to rping -s in the guest.
func dialed(t *testing.T, ctx context.Context) (*engine, *provider.Conn, *prog) {
	t.Helper()
	g := guest(t, ctx, fmt.Sprintf("rping -s -C 1 -p %d -a %s", rpingPort, lab.GuestAddr))
	g.resolved(t, ctx, "LISTEN")
	e := newEngine(t)
	c, err := e.pd.Dial(ctx, netip.AddrPortFrom(netip.MustParseAddr(lab.GuestAddr), rpingPort), e.attr())
	if err != nil {
		t.Fatal(err)
	}
	return e, c, g
}

// accepted is a connection of rping -c in the guest to us.
func accepted(t *testing.T, ctx context.Context, a func(e *engine) provider.ConnAttr) (*engine, *provider.Conn, *prog) {
	t.Helper()
	e := newEngine(t)
	l, err := e.d.Listen(netip.AddrPortFrom(netip.MustParseAddr(ourAddr), rpingPort), 4)
	if err != nil {
		t.Fatal(err)
	}
	g := guest(t, ctx, fmt.Sprintf("rping -c -V -C %d -p %d -a %s", rpingRounds, rpingPort, ourAddr))
	r, err := l.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	c, err := r.Accept(ctx, e.pd, a(e))
	if err != nil {
		t.Fatal(err)
	}
	return e, c, g
}

// TestViolations: what may not be reached is refused by either side with the right NAK, and the
// other reports it.
func TestViolations(t *testing.T) {
	needLab(t, short)
	// The kernel is rping's server, which reads where it is told to, and then writes.
	for _, op := range []string{"reads", "writes"} {
		for _, v := range []struct {
			name  string
			off   uint64    // added to the address
			key   uint32    // and to the key
			right mr.Access // those of the region
			set   set
		}{
			{"a wrong key", 0, 1 << 20, mr.LocalWrite | mr.RemoteRead | mr.RemoteWrite, short},
			{"an address beyond the region", 1 << 30, 0, mr.LocalWrite | mr.RemoteRead | mr.RemoteWrite, usual},
			{"a region's end in the middle", regionLen - dataAt - 32, 0, mr.LocalWrite | mr.RemoteRead | mr.RemoteWrite, usual},
			{"no right to", 0, 0, map[string]mr.Access{"reads": mr.LocalWrite | mr.RemoteWrite, "writes": mr.RemoteRead}[op], usual},
		} {
			if !wanted(v.set) || op != "reads" && !wanted(usual) {
				continue
			}
			one(t, "the kernel "+op+" with "+v.name, func(t *testing.T, ctx context.Context) {
				tap := newCapture(t, ctx)
				e, c, g := dialed(t, ctx)
				region, err := e.pd.RegMR(e.mem.Bytes(), v.right)
				if err != nil {
					t.Fatal(err)
				}
				if op == "writes" {
					// It writes what it has read, up to the first zero.
					copy(e.mem.Bytes()[dataAt:], bytes.Repeat([]byte("A"), 63))
					if err := e.say(ctx, c, rpingInfo{uint64(e.mr.Addr()) + dataAt, uint32(e.mr.RKey()), 64}); err != nil {
						t.Fatal(err)
					}
					if _, err := e.hear(ctx, c); err != nil {
						t.Fatal(err)
					}
				}
				if err := e.say(ctx, c, rpingInfo{uint64(region.Addr()) + dataAt + v.off, uint32(region.RKey()) + v.key, 64}); err != nil {
					t.Fatal(err)
				}
				// 10 is IBV_WC_REM_ACCESS_ERR.
				if out := g.fails(t); !strings.Contains(out, "cq completion failed status 10") {
					t.Error("rping has not met a remote access error")
				}
				tap.until(ctx, "NAK of ours", func(p packet) bool { return p.nak(true, wire.AckNak, wire.NakRemoteAccess) })
				tap.finish()
			})
		}
	}
	if !wanted(usual) {
		return
	}
	// The kernel is rping's client, whose region may be read and written, and not be the target of
	// atomics.
	for _, v := range []struct {
		name string
		off  uint64
		key  uint32
		op   qp.WROpcode
		len  int
	}{
		{"read with a wrong key", 0, 1 << 20, qp.WRRead, 64},
		{"write with a wrong key", 0, 1 << 20, qp.WRWrite, 64},
		{"read at an address beyond the region", 1 << 30, 0, qp.WRRead, 64},
		{"write at an address beyond the region", 1 << 30, 0, qp.WRWrite, 64},
		{"add with no right to", 0, 0, qp.WRAtomicFetchAdd, 8},
	} {
		one(t, "we "+v.name, func(t *testing.T, ctx context.Context) {
			tap := newCapture(t, ctx)
			e, c, g := accepted(t, ctx, (*engine).attr)
			i, err := e.hear(ctx, c)
			if err != nil {
				t.Fatal(err)
			}
			at := i.Addr + v.off
			if v.op == qp.WRAtomicFetchAdd {
				at = (at + 7) &^ 7
			}
			if err := e.post(c.QP, qp.SendWR{Opcode: v.op, SGL: e.sge(dataAt, v.len), RemoteAddr: at, RKey: mr.Key(i.Key + v.key)}); err != nil {
				t.Fatal(err)
			}
			var wcs [1]qp.WC
			if _, err := e.cq.Wait(ctx, wcs[:]); err != nil {
				t.Fatal(err)
			}
			if wcs[0].Status != qp.WCRemAccessErr {
				t.Errorf("%v: %v", v.op, wcs[0].Status)
			}
			tap.until(ctx, "NAK of the kernel's", func(p packet) bool { return p.nak(false, wire.AckNak, wire.NakRemoteAccess) })
			tap.finish()
			g.end()
			<-g.done
		})
	}
}

// TestRNR: a message for which there is no receive yet is refused for a while by either side,
// and sent again by the other.
func TestRNR(t *testing.T) {
	needLab(t, usual)
	one(t, "the kernel sends, we are not ready", func(t *testing.T, ctx context.Context) {
		tap := newCapture(t, ctx)
		e, c, g := accepted(t, ctx, func(e *engine) provider.ConnAttr {
			a := e.attr()
			a.Prepare = nil
			return a
		})
		tap.until(ctx, "RNR NAK of ours", func(p packet) bool { return p.nak(true, wire.AckRNR, 0) })
		if err := e.receive(c.QP); err != nil {
			t.Fatal(err)
		}
		if err := e.rpingServer(ctx, c, func() {}); err != nil {
			t.Error(err)
		}
		g.wait(t)
		tap.finish()
	})
	one(t, "we send, the kernel is not ready", func(t *testing.T, ctx context.Context) {
		tap := newCapture(t, ctx)
		e, c, _ := dialed(t, ctx)
		// Its receive is for the first message, and it does not post the next while it is stopped.
		if out, err := lab.Run(ctx, "kill -STOP $(pidof rping)"); err != nil {
			t.Fatal(err, out)
		}
		for range 2 {
			if err := e.say(ctx, c, rpingInfo{uint64(e.mr.Addr()) + dataAt, uint32(e.mr.RKey()), 64}); err != nil {
				t.Fatal(err)
			}
		}
		tap.until(ctx, "RNR NAK of the kernel's", func(p packet) bool { return p.nak(false, wire.AckRNR, 0) })
		if out, err := lab.Run(ctx, "kill -CONT $(pidof rping)"); err != nil {
			t.Fatal(err, out)
		}
		for range 2 {
			if _, err := e.completes(ctx, qp.WCSend); err != nil {
				t.Error(err)
			}
		}
		tap.finish()
	})
}

var dropped = regexp.MustCompile(`dropped (\d+)`)

// lossy has a share of the guest's packets lost while a test runs, and gives what counts them.
func lossy(t *testing.T, share string) (lost func() int) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	if out, err := lab.Run(ctx, "tc qdisc add dev eth0 root netem loss "+share); err != nil {
		t.Fatal(err, out)
	}
	t.Cleanup(func() {
		if out, err := lab.Run(ctx, "tc qdisc del dev eth0 root"); err != nil {
			t.Error(err, out)
		}
	})
	return func() int {
		out, err := lab.Run(ctx, "tc -s qdisc show dev eth0")
		m := dropped.FindStringSubmatch(out)
		if err != nil || m == nil {
			t.Fatal(err, out)
		}
		n, _ := strconv.Atoi(m[1])
		return n
	}
}

// someLost ends a test about losses.
func someLost(t *testing.T, lost func() int) {
	t.Helper()
	n := lost()
	if n == 0 {
		t.Error("nothing was lost")
	}
	fmt.Printf("     %d packets were lost\n", n)
}

// TestLoss: one of a hundred packets of the guest's is lost.
func TestLoss(t *testing.T) {
	needLab(t, usual)
	tap := newCapture(t, t.Context())
	defer tap.finish()
	lost := lossy(t, "1%")
	for _, r := range roles {
		for _, line := range []string{
			"ibv_rc_pingpong -c -g 1 -m 1024 -s 16384 -n 60",
			"ib_write_bw -F -x 1 -m 1024 -s 65536 -n 20",
			"ib_read_bw -F -x 1 -m 1024 -s 65536 -n 20",
			"ib_atomic_bw -F -x 1 -n 100",
		} {
			one(t, "1 % lost, "+line+", "+r.name, func(t *testing.T, ctx context.Context) {
				there, ours := pair(t, ctx, r.serves, line+" -d rxe0", line+" -d tapverbs0")
				if strings.Contains(there+ours, "invalid data") {
					t.Error("other data has come")
				}
			})
		}
	}
	someLost(t, lost)
}

// TestLossCM: one of ten is, and connections come up and end nevertheless. The kernel asks again
// after 4.3 seconds.
func TestLossCM(t *testing.T) {
	needLab(t, usual)
	tap := newCapture(t, t.Context())
	defer tap.finish()
	lost := lossy(t, "10%")
	for _, r := range roles {
		for _, p := range []struct{ server, client string }{
			{"ucmatose -b $A -c 4 -C 5 -S 3000", "ucmatose -s $A -c 4 -C 5 -S 3000"},
			{"rping -s -V -C 10 -S 10000 -a $A", "rping -c -V -C 10 -S 10000 -a $A"},
		} {
			one(t, "10 % lost, "+p.client+", "+r.name, func(t *testing.T, ctx context.Context) {
				cmPair(t, ctx, r.serves, families[0], p.server, p.client)
			})
		}
	}
	someLost(t, lost)
}
