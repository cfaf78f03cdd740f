// SPDX-License-Identifier: Apache-2.0

package tap_test

import (
	"errors"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/tapverbs/tapverbs/tap"
)

// TestLink: an idle device hears what happens to its netdev, and to no other.
func TestLink(t *testing.T) {
	both(t, func(t *testing.T, plain bool) {
		inNS(t, func() error {
			other, err := tap.Open(tap.Config{Name: "l1"})
			if err != nil {
				return err
			}
			defer other.Close()
			d, err := tap.Open(tap.Config{Name: "l0", Plain: plain})
			if err != nil {
				return err
			}
			defer d.Close()
			w := d.(tap.LinkWatcher)
			if err := w.Link(); !errors.Is(err, tap.ErrDown) {
				t.Errorf("before up: %v", err)
			}
			changed := make(chan struct{}, 100)
			stop, err := w.WatchLink(func() { changed <- struct{}{} })
			if err != nil {
				return err
			}
			defer stop()
			// await waits for a call after which the link is as wanted.
			await := func(doing string, want error) {
				t.Helper()
				for {
					select {
					case <-changed:
						if err := w.Link(); errors.Is(err, want) {
							return
						}
					case <-time.After(time.Minute):
						t.Fatalf("%s: nobody was told; the link is %v", doing, w.Link())
					}
				}
			}
			l, err := netlink.LinkByName("l0")
			if err != nil {
				return err
			}
			for range 3 {
				if err := netlink.LinkSetUp(l); err != nil {
					return err
				}
				await("up", nil)
				if err := netlink.LinkSetDown(l); err != nil {
					return err
				}
				await("down", tap.ErrDown)
			}
			// The other's messages come before the one that ends this.
			o, err := netlink.LinkByName("l1")
			if err != nil {
				return err
			}
			for len(changed) > 0 {
				<-changed
			}
			for range 5 {
				if err := errors.Join(netlink.LinkSetUp(o), netlink.LinkSetDown(o)); err != nil {
					return err
				}
			}
			stop()
			if n := len(changed); n != 0 {
				t.Errorf("%d calls for another netdev", n)
			}
			if stop, err = w.WatchLink(func() { changed <- struct{}{} }); err != nil {
				return err
			}
			defer stop()
			if err := netlink.LinkDel(l); err != nil {
				return err
			}
			await("removal", tap.ErrGone)
			if errors.Is(w.Link(), tap.ErrDown) {
				t.Errorf("removed is not down: %v", w.Link())
			}
			return nil
		})
	})
}
