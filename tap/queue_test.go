// SPDX-License-Identifier: Apache-2.0

package tap_test

import (
	"errors"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/tap"
)

// The length of a port's queue is the netdev's, also when that has another name by then; an
// ordinary user can ask for it and not change it.
func TestQueueLen(t *testing.T) {
	both(t, func(t *testing.T, plain bool) {
		inNS(t, func() error {
			d, err := tap.Open(tap.Config{Name: "q0", Plain: plain})
			if err != nil {
				return err
			}
			defer d.Close()
			l, err := netlink.LinkByName("q0")
			if err != nil {
				return err
			}
			q := d.(tap.Queue)
			if err := netlink.LinkSetTxQLen(l, 77); err != nil {
				return err
			}
			if n := q.QueueLen(); n != 77 {
				t.Errorf("the queue holds %d, want 77", n)
			}
			if err := netlink.LinkSetName(l, "q1"); err != nil {
				return err
			}
			if err := q.SetQueueLen(88); err != nil {
				t.Error(err)
			}
			if l, err = netlink.LinkByName("q1"); err != nil {
				return err
			}
			if n := l.Attrs().TxQLen; n != 88 || q.QueueLen() != n {
				t.Errorf("the queue holds %d, and says %d; want 88", n, q.QueueLen())
			}
			// This thread only; it ends with the function.
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, 65534, 65534, 65534); errno != 0 {
				return errno
			}
			if err := q.SetQueueLen(99); !errors.Is(err, tap.ErrPermission) || q.QueueLen() != 88 {
				t.Errorf("%v, and the queue holds %d", err, q.QueueLen())
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			if n := q.QueueLen(); n != 0 {
				t.Errorf("a closed one holds %d", n)
			}
			return nil
		})
	})
}
