// SPDX-License-Identifier: Apache-2.0

package harness_test

import (
	"testing"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A port that somebody else has made holds 1000 frames. Who may lengthens it when a device
// opens, and never shortens it; who may not works with what there is.
func TestQueueIsLengthened(t *testing.T) {
	if provider.PortQueue != fabric.DefaultTxQueueLen {
		t.Errorf("devices want %d frames, and fabrics make ports of %d", provider.PortQueue, fabric.DefaultTxQueueLen)
	}
	for _, c := range []struct {
		name    string
		len     int // 0: the kernel's
		may     bool
		becomes int
	}{{"as made", 0, true, provider.PortQueue}, {"not permitted", 0, false, defaultQueue}, {"longer", 2 * provider.PortQueue, true, 2 * provider.PortQueue}} {
		t.Run(c.name, func(t *testing.T) {
			err := fabric.WithNS(func() error {
				dev, err := tap.Open(tap.Config{Name: "other0"})
				if err != nil {
					return err
				}
				l, err := netlink.LinkByName("other0")
				if err == nil && c.len != 0 {
					err = netlink.LinkSetTxQLen(l, c.len)
				}
				if err == nil {
					err = netlink.LinkSetUp(l)
				}
				if err == nil && !c.may {
					err = dropNetAdmin()
				}
				if err != nil {
					return err
				}
				d, err := provider.Open(provider.Config{Device: dev, Manual: true})
				if err != nil {
					return err
				}
				defer d.Close()
				if n := dev.(tap.Queue).QueueLen(); n != c.becomes {
					t.Errorf("the port holds %d frames, want %d", n, c.becomes)
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// dropNetAdmin takes CAP_NET_ADMIN from the calling thread, which ends with the namespace's
// function.
func dropNetAdmin() error {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&h, &data[0]); err != nil {
		return err
	}
	for _, set := range []*uint32{&data[0].Effective, &data[0].Permitted, &data[0].Inheritable} {
		*set &^= 1 << unix.CAP_NET_ADMIN
	}
	return unix.Capset(&h, &data[0])
}
