// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"
	"math/bits"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
)

// A device with several queues of a TAP has an engine, a shard, for each. The shard of a
// QP is in its number: the top bits of the 16 that are its index. By that the kernel puts
// a packet into the right queue (steering.go), and senders have it in the UDP source port,
// so that packets for several shards do not share a super-frame. QPs that share a CQ or an SRQ have the same shard if that
// can be, so that who polls the CQ runs one engine and no other.
//
// Reliable and unreliable connections, and XRC initiators, are spread. The first shard has
// all others, since it has what they need: neighbours, address handles, multicast groups,
// flows, XRC SRQs. ARP, ND, ICMP and MADs are its own, too.
//
// Who takes several batons begins with the last shard's.

// MaxQueues is how many queues a device may have; numbers between are powers of two.
const MaxQueues = 16

// deviceWindow is how many unacknowledged packets all shards together may have out: a peer
// may have but one queue.
const deviceWindow = 768

// openPort attaches to cfg.Port, or takes cfg.Device and cfg.MoreQueues.
func openPort(cfg *Config) ([]tap.Device, error) {
	n := max(cfg.Queues, 1)
	if cfg.Device != nil {
		n = 1 + len(cfg.MoreQueues)
	}
	if n > MaxQueues || n&(n-1) != 0 {
		return nil, fmt.Errorf("%d queues: 1, 2, 4, 8 or %d are possible: %w", n, MaxQueues, ErrInvalid)
	}
	if cfg.Device != nil {
		return append([]tap.Device{cfg.Device}, cfg.MoreQueues...), nil
	}
	return tap.OpenQueues(tap.Config{Name: cfg.Port, Plain: cfg.Plain, Without: cfg.Without, Queues: n})
}

// maxQPs is how many QPs there may be in all.
func (d *Device) maxQPs() int {
	return len(d.devs) * (1<<(16-d.shardBits) - firstQPIndex - 1)
}

// How what arrives is spread over several queues.
const (
	SpreadByProgram = "eBPF"      // each packet to the engine of its queue pair
	SpreadByHash    = "flow hash" // the kernel's own way; engines hand over what is not theirs
)

// Queues is how many queues of the TAP the device has, with an engine each, and how what
// arrives is spread over them; "" for a single queue.
func (d *Device) Queues() (n int, by string) {
	switch {
	case len(d.devs) == 1:
		return 1, ""
	case d.steered:
		return len(d.devs), SpreadByProgram
	}
	return len(d.devs), SpreadByHash
}

// place chooses the shard of a QP; d.mu is held.
func (d *Device) place(in *QPInitAttr) *shard {
	if len(d.shards) == 1 || in.Type == qp.TypeUD || in.Type == qp.TypeRaw || in.Type == qp.TypeXRCRecv {
		return d.sh
	}
	best := d.shards[d.nextShard%len(d.shards)]
	for _, s := range d.shards {
		if s.load < best.load {
			best = s
		}
	}
	chosen := best
	switch {
	case in.SRQ != nil && in.SRQ.s != nil:
		chosen = in.SRQ.s
	case in.RecvCQ != nil && in.RecvCQ.feeds.Load() != 0:
		chosen = in.RecvCQ.home.Load()
	case in.SendCQ.feeds.Load() != 0:
		chosen = in.SendCQ.home.Load()
	default:
		d.nextShard++
	}
	if chosen.load >= d.maxQPs()/len(d.shards) {
		return best
	}
	return chosen
}

// bind counts the QP (n is 1) among those of its shard, its CQs and its SRQ, or takes it
// off (-1); d.mu is held.
func (q *QP) bind(n int) {
	q.s.load += n
	q.init.SendCQ.feed(q.s, n)
	if q.init.RecvCQ != nil {
		q.init.RecvCQ.feed(q.s, n)
	}
	if r := q.init.SRQ; r != nil {
		if r.refs == 0 {
			r.s = q.s
		}
		if r.refs += n; r.refs == 0 {
			r.s = nil
		}
	}
}

// feed notes that one more or one less of what is in a shard completes to the CQ; d.mu is
// held. The first gives it its home, and it keeps whom it has met while there is one.
func (c *CQ) feed(s *shard, n int) {
	if c.refs == 0 {
		c.home.Store(s)
	}
	if c.refs += n; c.refs == 0 {
		c.feeds.Store(0)
		return
	}
	c.feeds.Store(c.feeds.Load() | 1<<s.id)
}

// others are the shards, besides its home, in which there may be something for the CQ.
func (c *CQ) others() uint32 {
	d := c.d
	if len(d.shards) == 1 {
		return 0
	}
	m := c.feeds.Load()
	if !d.steered { // what is for its QPs may be in any queue
		m = 1<<len(d.shards) - 1
	}
	return m &^ (1 << c.home.Load().id)
}

// wanted leaves the queues of the shards that the CQ hears of to the background.
func (c *CQ) wanted() {
	c.home.Load().bg.wanted()
	for m := c.others(); m != 0; m &= m - 1 {
		c.d.shards[bits.TrailingZeros32(m)].bg.wanted()
	}
}

// wanted leaves the queues of all shards to the background.
func (d *Device) wanted() {
	for _, s := range d.shards {
		s.bg.wanted()
	}
}
