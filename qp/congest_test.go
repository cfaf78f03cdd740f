// SPDX-License-Identifier: Apache-2.0

package qp

import "testing"

// The pauses follow the pace of the receiver, and are forgotten when it keeps up.
func TestCongestion(t *testing.T) {
	const ms = 1_000_000
	var c congestion
	now := int64(1000 * ms)
	pause := func() int64 {
		for range freePackets {
			c.sent(func() int64 { return now })
		}
		c.notified(now)
		return c.quietUntil - now
	}
	if p := pause(); p != minPause {
		t.Errorf("the first pause takes %d ns", p)
	}
	for i, want := range []int64{4 * ms, 8 * ms, 16 * ms, 16 * ms} {
		now += 8 * ms
		if p := pause(); p != want {
			t.Errorf("after %d notifications each 8 ms the pause takes %d ns, want %d", i+2, p, want)
		}
	}
	now += 10_000 * ms
	if p := pause(); p != minPause {
		t.Errorf("after a long time the pause takes %d ns", p)
	}
	for range 5 {
		now += 60 * ms
		if p := pause(); p > maxPause {
			t.Errorf("a pause of %d ns", p)
		}
	}
}

// However many notifications come, a pause ends, and packets go before the next one.
func TestCongestionFlood(t *testing.T) {
	for _, every := range []int64{1000, minPause / 2, minPause, 3 * minPause, maxPause - 1} {
		var c congestion
		sent, longest := 0, int64(0)
		for now, from := int64(1), int64(1); now < 20*maxPause; now += every {
			for range 3 {
				c.notified(now)
			}
			if now < c.quietUntil {
				longest = max(longest, now-from)
				continue
			}
			from = now
			sent++
			c.sent(func() int64 { return now })
		}
		if longest > maxPause+every || sent < freePackets && every < maxPause/10 {
			t.Errorf("notifications each %d ns: the longest silence is %d ns, %d packets are sent", every, longest, sent)
		}
	}
}

// A notification that comes soon after a pause makes another, when some packets have gone.
func TestCongestionSoonAgain(t *testing.T) {
	var c congestion
	now := int64(1e9)
	clock := func() int64 { return now }
	c.notified(now)
	now = c.quietUntil
	c.sent(clock)
	c.notified(now)
	for i := range freePackets - 1 {
		if now < c.quietUntil {
			t.Fatalf("silent after %d packets", i+1)
		}
		c.sent(clock)
	}
	if pause := c.quietUntil - now; pause < minPause || pause > maxPause {
		t.Errorf("the pause takes %d ns", pause)
	}
}
