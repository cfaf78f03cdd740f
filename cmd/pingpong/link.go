// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"net"
	"time"
)

// errPeer is what ends a run when the other end is to blame, or gone.
type errPeer struct{ msg string }

func (e errPeer) Error() string { return e.msg }

const (
	heartbeat = 500 * time.Millisecond
	// silence is how many heartbeats may fail to come in a row: 3 s.
	silence = 6
)

// watch looks after the TCP connection of the exchange while two pingpongs work:
// a byte goes each way every heartbeat. It cancels with an errPeer when the peer
// closes it (its process ended) or is silent for too long (it was stopped, or its
// machine is gone). Closing the connection, or ctx's end, ends the watch.
func watch(ctx context.Context, conn net.Conn, cancel context.CancelCauseFunc) {
	go func() {
		t := time.NewTicker(heartbeat)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
				if _, err := conn.Write([]byte{'.'}); err != nil {
					return // the reader says why
				}
			}
		}
	}()
	go func() {
		b := make([]byte, 64)
		// Timeouts are counted one by one, not as one long time: a process that
		// was stopped itself (^Z) does not blame its peer when it goes on.
		for missed := 0; ; {
			if conn.SetReadDeadline(time.Now().Add(heartbeat)) != nil {
				return
			}
			_, err := conn.Read(b)
			var ne net.Error
			switch {
			case err == nil:
				missed = 0
			case ctx.Err() != nil || errors.Is(err, net.ErrClosed):
				return
			case errors.As(err, &ne) && ne.Timeout():
				if missed++; missed >= silence {
					cancel(errPeer{"the peer has been silent for 3 s"})
					return
				}
			default:
				cancel(errPeer{"the peer is gone: " + errText(err, "")})
				return
			}
		}
	}()
}
