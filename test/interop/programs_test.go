// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/test/interop/lab"
)

// Programs of rdma-core and perftest, one end in the guest and one here, that tell each other
// by TCP what their queue pairs are.

// verbsPort is where those programs listen.
const verbsPort = 18515

// listening waits until a server listens at a TCP port: nothing tells when another process
// does, so that is looked for again and again.
func (p *prog) listening(t *testing.T, ctx context.Context, port int) {
	t.Helper()
	if p.where == "guest" {
		line := fmt.Sprintf(`until grep -qE ':%04X [0-9A-F]+:0000 0A' /proc/net/tcp /proc/net/tcp6; do sleep 0.05; done`, port)
		if _, err := p.inGuest(ctx, line); err != nil {
			t.Fatalf("%s: %s does not listen: %v", p.where, p.line, err)
		}
		return
	}
	for !fabric.Listens(0, port) {
		select {
		case <-p.done:
			t.Fatalf("%s: %s does not listen: %v", p.where, p.line, p.err)
		case <-ctx.Done():
			t.Fatal(context.Cause(ctx))
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// pair runs a server on one side and a client on the other until both have ended well, and
// gives what they printed.
func pair(t *testing.T, ctx context.Context, kernelServes bool, kernel, ours string, env ...string) (fromGuest, fromHere string) {
	t.Helper()
	var g, h *prog
	if kernelServes {
		g = guest(t, ctx, kernel)
		g.listening(t, ctx, verbsPort)
		h = here(t, ctx, ours+" "+lab.GuestAddr, env...)
	} else {
		h = here(t, ctx, ours, env...)
		h.listening(t, ctx, verbsPort)
		g = guest(t, ctx, kernel+" "+lab.HostAddr)
	}
	// Whoever fails first ends the other, which may wait for ever.
	select {
	case <-g.done:
		if g.err != nil {
			h.end()
		}
	case <-h.done:
		if h.err != nil {
			g.end()
		}
	}
	return g.wait(t), h.wait(t)
}

// roles of the kernel.
var roles = []struct {
	name   string
	serves bool
}{{"to the kernel", true}, {"from the kernel", false}}

// gids are the GIDs of both sides: 1 is IPv4, 2 is IPv6.
var gids = []struct {
	name  string
	index int
}{{"IPv4", 1}, {"IPv6", 2}}

// iters is how many messages, most of which take milliseconds.
const iters = 40

// least is the smallest set that a combination is in whose line of a table is in s. Except in the
// full set IPv4 goes with an MTU of 1024, and IPv6 with 4096; the short set has IPv4 to the
// kernel and IPv6 from the kernel only, and of lines that are sparse the usual set too.
func least(s set, sparse bool, gid, mtu int, kernelServes bool) set {
	switch {
	case (mtu == 1024) != (gid == 1):
		return full
	case (gid == 1) == kernelServes:
		return s
	case sparse:
		return full
	}
	return max(s, usual)
}

// patientThere has an example of libibverbs in the guest wait longer for its peer.
func patientThere(line string) string { return "LD_PRELOAD=/tmp/patient.so " + line }

// TestPingpong: the examples of libibverbs. The data is checked (-c).
func TestPingpong(t *testing.T) {
	needLab(t, short)
	tap := newCapture(t, t.Context())
	defer tap.finish()
	for _, p := range []struct {
		name string
		args string
		mtu  bool
		set  set
	}{
		{"ibv_rc_pingpong", "-c -s 8192", true, short},
		{"ibv_rc_pingpong", "-c -e -s 65536", true, full},
		{"ibv_uc_pingpong", "-c -s 8192", true, usual},
		{"ibv_ud_pingpong", "-c -s 1024", false, usual},
		{"ibv_srq_pingpong", "-c -s 4096 -q 4", true, usual},
		{"ibv_srq_pingpong", "-c -e -s 4096 -q 16", true, full},
	} {
		for _, g := range gids {
			for _, mtu := range []int{1024, 4096} {
				for _, r := range roles {
					// Datagrams have the port's MTU: what is said of it only picks the family.
					if !wanted(least(p.set, false, g.index, mtu, r.serves)) || !p.mtu && (mtu == 1024) != (g.index == 1) {
						continue
					}
					args := fmt.Sprintf(" %s -g %d -n %d", p.args, g.index, iters)
					name := fmt.Sprintf("%s %s, %s, %s", p.name, p.args, r.name, g.name)
					if p.mtu {
						args += fmt.Sprintf(" -m %d", mtu)
						name += fmt.Sprintf(", MTU %d", mtu)
					}
					one(t, name, func(t *testing.T, ctx context.Context) {
						line := p.name + args
						there, ours := pair(t, ctx, r.serves, patientThere(line+" -d rxe0"), line+" -d tapverbs0", preload("patient"))
						for _, out := range []string{there, ours} {
							if !strings.Contains(out, "iters in") || strings.Contains(out, "invalid data") {
								t.Error("a side was not done, or got other data")
							}
						}
					})
				}
			}
		}
	}
}

// TestOurPingpong: cmd/pingpong, which checks the data too, and ibv_rc_pingpong.
func TestOurPingpong(t *testing.T) {
	needLab(t, usual)
	tap := newCapture(t, t.Context())
	defer tap.finish()
	for _, g := range gids {
		addr := ourAddr + "/24"
		if g.index == 2 {
			addr = ourAddr6 + "/64"
		}
		for _, mtu := range []int{1024, 4096} {
			for _, size := range []int{4096, 65536} {
				for _, r := range roles {
					s := least(usual, false, g.index, mtu, r.serves)
					if size != 4096 {
						s = full
					}
					if !wanted(s) {
						continue
					}
					one(t, fmt.Sprintf("pingpong, %s, %s, MTU %d, %d bytes", r.name, g.name, mtu, size), func(t *testing.T, ctx context.Context) {
						// As a server it would only take what its own client sends (-c).
						there := patientThere(fmt.Sprintf("ibv_rc_pingpong -d rxe0 -g %d -m %d -s %d -n %d", g.index, mtu, size, iters))
						ours := fmt.Sprintf("%s -port %s -addr %s -gid 1 -mtu %d -size %d -iters %d", bin("pingpong"), ourPort, addr, mtu, size, iters)
						out := ""
						if r.serves {
							out, _ = pair(t, ctx, true, there, ours+" -op send -mr resident -connect")
						} else {
							out, _ = pair(t, ctx, false, there+" -c", ours+" -listen "+lab.HostAddr)
						}
						if !strings.Contains(out, "iters in") {
							t.Error("ibv_rc_pingpong was not done")
						}
					})
				}
			}
		}
	}
}

// TestPerftest: what it prints about speed means nothing here.
func TestPerftest(t *testing.T) {
	needLab(t, short)
	tap := newCapture(t, t.Context())
	defer tap.finish()
	for _, p := range []struct {
		line   string
		set    set
		sparse bool // usually only to the kernel by IPv4, and from it by IPv6
	}{
		{"ib_send_bw -s 65536 -n 20", usual, true},
		{"ib_send_bw -c UD -s 1024 -n 50", usual, false},
		{"ib_send_bw -c UD -s 4096 -n 50", usual, false},
		{"ib_write_bw -s 65536 -n 20", short, true},
		{"ib_read_bw -s 65536 -n 20", usual, true},
		{"ib_atomic_bw -A FETCH_AND_ADD -n 50", usual, true},
		{"ib_write_lat -s 8 -n 30", usual, true},
		{"ib_send_lat -s 8 -n 30", full, true},
		{"ib_send_lat -c UD -s 4096 -n 30", full, true},
		{"ib_read_lat -s 4096 -n 30", full, true},
		{"ib_atomic_lat -A CMP_AND_SWAP -n 30", usual, true},
		{"ib_send_bw -a -n 5", full, true},
		{"ib_write_bw -a -n 5", full, true},
		{"ib_read_bw -a -n 5", full, true},
		{"ib_send_bw -c UC -s 65536 -n 10", full, true},
		{"ib_write_bw -c UC -s 65536 -n 10", full, true},
		{"ib_send_bw -s 4096 -n 50 -q 4", full, true},
		{"ib_write_bw -s 4096 -n 50 -q 4", full, true},
		{"ib_send_bw -b -s 4096 -n 50", full, true},
		{"ib_write_bw -b -s 4096 -n 50", full, true},
		{"ib_read_bw -b -s 4096 -n 50", full, true},
		{"ib_send_bw -e -s 4096 -n 50", full, true},
		{"ib_read_bw -e -s 4096 -n 50", full, true},
		{"ib_send_bw -I 64 -s 64 -n 50", full, true},
	} {
		for _, g := range gids {
			for _, mtu := range []int{1024, 4096} {
				for _, r := range roles {
					datagrams := strings.Contains(p.line, "-c UD") // which have the port's MTU
					if !wanted(least(p.set, p.sparse, g.index, mtu, r.serves)) || datagrams && (mtu == 1024) != (g.index == 1) {
						continue
					}
					// A local ACK timeout of 1 s (-u 18): an emulated guest may be away for long.
					args := fmt.Sprintf(" -F -x %d -u 18", g.index)
					name := fmt.Sprintf("%s, %s, %s", p.line, r.name, g.name)
					if !datagrams {
						args += fmt.Sprintf(" -m %d", mtu)
						name += fmt.Sprintf(", MTU %d", mtu)
					}
					one(t, name, func(t *testing.T, ctx context.Context) {
						there, ours := pair(t, ctx, r.serves, p.line+args+" -d rxe0", p.line+args+" -d tapverbs0")
						client := there // some servers have nothing to say
						if r.serves {
							client = ours
						}
						if !strings.Contains(client, "#bytes") {
							t.Error("the client has printed no table")
						}
					})
				}
			}
		}
	}
}
