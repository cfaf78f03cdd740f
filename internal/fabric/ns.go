// SPDX-License-Identifier: Apache-2.0

package fabric

import (
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// in calls fn on a thread that is in the fabric's namespace: a TAP belongs to the
// namespace of the thread that opened /dev/net/tun, and /proc/sys/net shows that of
// the reader.
func (f *Fabric) in(fn func() error) error {
	here, err := netns.Get()
	if err != nil {
		return fmt.Errorf("open the network namespace: %w", err)
	}
	defer here.Close()
	if here.Equal(f.ns) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		return fn()
	}
	// A thread of its own, which ends with the goroutine: nothing to undo.
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := netns.Set(f.ns); err != nil {
			done <- fmt.Errorf("enter the fabric's network namespace: %w", err)
			return
		}
		done <- fn()
	}()
	return <-done
}

// WithNS calls fn in a new network namespace, on a thread of its own that ends
// with it. Descriptors that fn opened (TAPs, sockets, a Fabric) stay good
// afterwards and keep the namespace alive; goroutines that fn starts are not in it.
// It needs CAP_SYS_ADMIN. A panic or t.FailNow in fn ends that goroutine only, so
// tests return errors from it.
func WithNS(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		finished := false
		defer func() {
			if !finished {
				done <- fmt.Errorf("the function in the new network namespace ended its goroutine")
			}
		}()
		// Never unlocked: the thread, with the namespace, is thrown away.
		runtime.LockOSThread()
		var err error
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			err = fmt.Errorf("make a network namespace: %w (needs CAP_SYS_ADMIN)", err)
			if isPermission(err) {
				err = fmt.Errorf("%w: %w", err, ErrPermission)
			}
		} else {
			err = fn()
		}
		finished = true
		done <- err
	}()
	return <-done
}
