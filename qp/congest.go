// SPDX-License-Identifier: Apache-2.0

package qp

import "github.com/tapverbs/tapverbs/wire"

// Congestion notification (IBA A17.9.3 leaves open how one reacts to it). Reliable
// services have a window, so that unacknowledged packets fit into the receiver's queue; for
// queues on the way they have a rate (dcqcn.go). Unreliable ones have no window, so a sender
// that is faster than its receiver fills that queue, and then all further packets are lost.

const (
	// A pause is a quarter of the time since the notification before, between these
	// two, in ns; twice as long for each that follows soon, up to the double of it.
	minPause = 1_000_000
	maxPause = 100_000_000
	// soonAfter is what counts as soon, beside four times the time between the
	// two notifications before.
	soonAfter = 20_000_000
	// freePackets are sent after each pause, whatever is notified: nobody proves who
	// he is with a notification, and a flood of them must not silence a sender for good.
	freePackets = 64
)

// congestion is what the notifications have told.
type congestion struct {
	began      int64 // of the pause
	quietUntil int64 // end of the pause
	last       int64 // when the last notification came
	between    int64 // time between the last two
	strikes    uint  // notifications that followed each other soon, up to 3
	free       uint  // packets to be sent before there is another pause
	rest       int64 // until when that one is to last; it was asked for too soon
}

// notified takes a notification. The receiver sends one each so many packets while
// it has more of them waiting, so the time between two is what it needs for that
// many, however busy its machine is: a pause of that length gives it as much again.
func (c *congestion) notified(now int64) {
	gap := now - c.last
	if c.last == 0 || gap > soonAfter+4*c.between {
		c.strikes, gap = 0, minPause
	} else if c.strikes < 3 {
		c.strikes++
	}
	c.last, c.between = now, gap
	end := now + min(max(minPause, gap<<c.strikes/4), maxPause)
	switch {
	case now < c.quietUntil: // what is still waiting at the receiver: go on, but not for ever
		c.quietUntil = min(end, c.began+maxPause)
	case c.free == 0:
		c.pause(now, end)
	default:
		c.rest = end
	}
}

func (c *congestion) pause(now, end int64) {
	c.began, c.quietUntil, c.free, c.rest = now, end, freePackets, 0
}

// sent notes that a packet has left.
func (c *congestion) sent(clock func() int64) {
	if c.free == 0 {
		return
	}
	if c.free--; c.free == 0 && c.rest != 0 {
		if now := clock(); now < c.rest {
			c.pause(now, c.rest)
		}
	}
}

// Congested is called with a notification for the QP: its packets meet congestion, or their
// receiver does not keep up. A QP of an unreliable service falls silent for a while, one of
// a reliable service slows down. It says false if the QP sends nothing in its state.
func (q *QP) Congested() bool {
	switch s := q.State(); {
	case s < StateRTR || s > StateSQD:
		return false
	case q.tr.acked:
		q.req.rate.notified(q.env.Now())
	case s == StateRTR:
		return false
	default:
		q.req.cong.notified(q.env.Now())
	}
	return true
}

// DestQPN is the QP at the other end of a connection.
func (q *QP) DestQPN() wire.QPN { return q.attr.DestQPN }
