// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
)

// joined waits until the guest's port takes frames of a group, which is the last that its kernel
// does when a queue pair is attached to the group: whatever the family, of the Ethernet address
// of IPv6's multicast that goes with the last 32 bits of the GID.
func (p *prog) joined(t *testing.T, ctx context.Context, group string) {
	t.Helper()
	a := netip.MustParseAddr(group).As16()
	if _, err := p.inGuest(ctx, fmt.Sprintf("until grep -q 'eth0.* 3333%08x' /proc/net/dev_mcast; do sleep 0.05; done", a[12:])); err != nil {
		t.Fatalf("%s: %s has not joined %s: %v", p.where, p.line, group, err)
	}
}

// TestMulticast: mckey, whose receivers end when they have got all that was sent. It lets three
// seconds go by before it sends, by its own will. The kernel's RDMA CM joins groups of IPv4 only
// (ENOTSUPP); perftest sends to those of IPv6 without it.
func TestMulticast(t *testing.T) {
	needLab(t, usual)
	tap := newCapture(t, t.Context())
	defer tap.finish()
	const group = "239.77.1.1"
	for _, line := range []string{"-C 20 -S 1000", "-C 10 -S 4000", "-C 10 -c 3 -S 500"} {
		for _, r := range roles {
			if strings.Contains(line, "-c") && !wanted(full) {
				continue
			}
			if !r.serves && os.Getenv(labEnv) != "6.1" {
				// mckey does not wait for what it has posted, and ends: a kernel that sends when it gets
				// round to it has sent one message by then.
				fmt.Printf("skip  mckey -m %s %s, %s: Linux %s sends only the first\n", group, line, r.name, os.Getenv(labEnv))
				continue
			}
			// The receiver is first: it has joined before anything is sent.
			one(t, fmt.Sprintf("mckey -m %s %s, %s", group, line, r.name), func(t *testing.T, ctx context.Context) {
				there := fmt.Sprintf("mckey -m %s -b %s %s", group, families[0].kernel, line)
				ours := fmt.Sprintf("mckey -m %s -b %s %s", group, families[0].ours, line)
				var first, second *prog
				if r.serves {
					first = guest(t, ctx, there)
					first.joined(t, ctx, group)
					second = here(t, ctx, ours+" -s")
				} else {
					first = here(t, ctx, ours, preload("listening"))
					first.serving(t, ctx)
					second = guest(t, ctx, there+" -s")
				}
				second.wait(t)
				if t.Failed() {
					first.end()
				}
				first.wait(t)
			})
		}
	}
	// At a queue pair of the kernel's that is attached without RDMA CM nothing arrives.
	const line = "ib_send_bw -c UD -g -M 255:14:0:0:0:0:0:0:0:0:0:0:0:119:0:2 -F -x 2 -s 1024 -n 30"
	one(t, line+", from the kernel", func(t *testing.T, ctx context.Context) {
		pair(t, ctx, false, line+" -d rxe0", line+" -d tapverbs0")
	})
}
