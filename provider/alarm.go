// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"

	"github.com/tapverbs/tapverbs/qp"
	"golang.org/x/sys/unix"
)

// alarm wakes the background goroutine at a time, in place of a timeout for each time that it sleeps. Those would be
// set and taken back for each frame, and to tell a processor of its next timer costs as much as to switch
// threads, or far more where that is a hypervisor's to do. An alarm that was set for sooner is left as it is: it rings
// for nothing, once.
type alarm struct {
	fd   int   // timerfd(2), -1: none
	at   int64 // what it is set to, in ns of the engine's clock
	rang [8]byte
}

func (a *alarm) open() (err error) {
	a.at = qp.Never
	if a.fd, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK); err != nil {
		a.fd = -1
		return fmt.Errorf("timerfd: %w", err)
	}
	return nil
}

func (a *alarm) close() {
	if a.fd >= 0 {
		unix.Close(a.fd)
		a.fd = -1
	}
}

// by has it ring at a time or before. That is in the future; qp.Never is no time.
func (a *alarm) by(at, now int64) {
	if at >= a.at {
		return
	}
	a.at = at
	var t unix.ItimerSpec
	t.Value = unix.NsecToTimespec(max(1, at-now))
	_ = unix.TimerfdSettime(a.fd, 0, &t, nil) // it can but be out of range
}

// rung takes note that it has.
func (a *alarm) rung() {
	unix.Read(a.fd, a.rang[:])
	a.at = qp.Never
}
