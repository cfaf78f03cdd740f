// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/test/interop/lab"
)

// Programs of rdma-core and perftest that find each other by RDMA CM, those of this side on
// librdmacm.so.1 of this project.

// serving waits until a server is known to the RDMA CM of its side. Ours are told of by
// listening.so, which is loaded before them and listens at verbsPort then.
func (p *prog) serving(t *testing.T, ctx context.Context) {
	t.Helper()
	if p.where == "guest" {
		p.resolved(t, ctx, "LISTEN")
	} else {
		p.listening(t, ctx, verbsPort)
	}
}

// gatePort is where gate.so waits for a word.
const gatePort = 18516

// listenAgain waits until a program of the guest listens with another ID than those that
// it is known to have listened with, and gives all that it listens with.
func (p *prog) listenAgain(t *testing.T, ctx context.Context, known string) string {
	t.Helper()
	out, err := p.inGuest(ctx, `until now=$(rdma resource show cm_id | grep LISTEN | grep -o 'cm-idn [0-9]*') && test "$now" != '`+known+`'; do sleep 0.05; done; printf %s "$now"`)
	if err != nil {
		t.Fatalf("%s: %s does not listen: %v", p.where, p.line, err)
	}
	return out
}

// perftestClient starts a client of perftest's with -R. The queue pair has a connection of its
// own, for which the server listens when it has been told by the first that the client is about
// to make it, and the client does not wait: to hardware it is always late enough. A client that is
// refused crashes as it tries again. So its second connection waits until the server listens.
func perftestClient(t *testing.T, ctx context.Context, server *prog, line string) *prog {
	t.Helper()
	first := server.listenAgain(t, ctx, "")
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", gatePort))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p := here(t, ctx, line, preload("gate"))
	over := make(chan struct{})
	defer close(over)
	go func() {
		select {
		case <-p.done:
		case <-ctx.Done():
		case <-over:
		}
		_ = l.Close()
	}()
	c, err := l.Accept()
	if err != nil {
		t.Errorf("%s: %s has not come to its second connection", p.where, p.line)
		return p
	}
	defer c.Close()
	server.listenAgain(t, ctx, first)
	return p
}

// cmPrograms are in README.md's table. $A is the server's address.
var cmPrograms = []struct {
	server, client string
	set            set
}{
	{"rping -s -V -C 5 -S 10000 -a $A", "rping -c -V -C 5 -S 10000 -a $A", short},
	{"ucmatose -b $A -c 3 -C 5", "ucmatose -s $A -c 3 -C 5", usual},
	{"udaddy -b $A -c 2 -C 5", "udaddy -s $A -c 2 -C 5", usual},
	{"rdma_server", "rdma_client -s $A", usual},
	{"rstream -b $A -S 2048 -C 8 -I 3 -T v", "rstream -s $A -S 2048 -C 8 -I 3 -T v", usual},
	{"riostream -b $A -S 2048 -C 8 -I 3", "riostream -s $A -S 2048 -C 8 -I 3", usual},
	{"ucmatose -b $A -c 20 -C 3 -S 5000", "ucmatose -s $A -c 20 -C 3 -S 5000", full},
	{"rstream -b $A -S 100000 -C 5 -I 3 -T b -T v", "rstream -s $A -S 100000 -C 5 -I 3 -T b -T v", full},
	{"ib_send_bw -R -F -s 4096 -n 30", "ib_send_bw -R -F -s 4096 -n 30 $A", usual},
	{"ib_atomic_bw -R -F -n 20", "ib_atomic_bw -R -F -n 20 $A", usual},
	{"ib_write_bw -R -F -s 65536 -n 20", "ib_write_bw -R -F -s 65536 -n 20 $A", full},
	{"ib_read_lat -R -F -s 4096 -n 20", "ib_read_lat -R -F -s 4096 -n 20 $A", full},
}

// TestCM: both roles. IPv6 is for the programs that can do it.
func TestCM(t *testing.T) {
	needLab(t, short)
	tap := newCapture(t, t.Context())
	defer tap.finish()
	for _, p := range cmPrograms {
		for _, f := range families {
			if f.name == "IPv6" && !strings.Contains(p.server, "$A") {
				continue
			}
			for _, r := range roles {
				if (f.name == "IPv4") != r.serves && !wanted(max(p.set, usual)) {
					continue
				}
				if !wanted(p.set) {
					continue
				}
				name, _, _ := strings.Cut(strings.ReplaceAll(p.client, "$A", f.name), " -a")
				one(t, name+", "+r.name+", "+f.name, func(t *testing.T, ctx context.Context) {
					cmPair(t, ctx, r.serves, f, p.server, p.client)
				})
			}
		}
	}
}

// cmPair runs a server and a client until both have ended well.
func cmPair(t *testing.T, ctx context.Context, kernelServes bool, f family, server, client string) {
	t.Helper()
	at := f.ours
	if kernelServes {
		at = f.kernel
	}
	server, client = strings.ReplaceAll(server, "$A", at), strings.ReplaceAll(client, "$A", at)
	var first, second *prog
	switch {
	case !kernelServes:
		first = here(t, ctx, server, preload("listening"))
		first.serving(t, ctx)
		second = guest(t, ctx, client)
	case strings.Contains(client, " -R "):
		first = guest(t, ctx, server)
		second = perftestClient(t, ctx, first, client)
	default:
		first = guest(t, ctx, server)
		first.serving(t, ctx)
		second = here(t, ctx, client)
	}
	second.wait(t)
	if t.Failed() {
		first.end()
	}
	first.wait(t)
}

// TestCMMTU: RDMA CM takes the ports' MTU, which is that of Ethernet here: the path's is 1024.
func TestCMMTU(t *testing.T) {
	needLab(t, usual)
	tap := newCapture(t, t.Context())
	defer tap.finish()
	mtu := func(there, ours int) {
		if out, err := lab.Run(context.WithoutCancel(t.Context()), fmt.Sprintf("ip link set eth0 mtu %d && until rdma link show rxe0/1 | grep -q 'state ACTIVE'; do sleep 0.05; done", there)); err != nil {
			t.Fatal(err, out)
		}
		if l, err := netlink.LinkByName(ourPort); err != nil {
			t.Fatal(err)
		} else if err := netlink.LinkSetMTU(l, ours); err != nil {
			t.Fatal(err)
		}
	}
	mtu(1500, 1500)
	t.Cleanup(func() { mtu(fabric.DefaultMTU, fabric.DefaultMTU) })
	for _, f := range families {
		for _, r := range roles {
			one(t, "MTU 1024, rping -V, "+r.name+", "+f.name, func(t *testing.T, ctx context.Context) {
				cmPair(t, ctx, r.serves, f, "rping -s -V -C 5 -S 10000 -a $A", "rping -c -V -C 5 -S 10000 -a $A")
			})
		}
	}
	for _, p := range tap.packets() {
		if n := len(p.data); n > 1024+64 {
			t.Errorf("a packet of %d bytes", n)
		}
	}
}
