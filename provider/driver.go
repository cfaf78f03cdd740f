// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"encoding/binary"
	"math/bits"
	"unsafe"

	"github.com/tapverbs/tapverbs/qp"
)

// What a driver in another language (the C library) needs: it posts and polls on
// the rings by itself, and calls these where a Go program's PostSend and Poll would
// wake or run the engine.

// NodeGUID is the node GUID that a device of this Config would have
// (ibv_get_device_guid(3)), in host byte order. Without MAC and addresses it is
// another one each time. Errors as for Open.
func NodeGUID(cfg Config) (uint64, error) {
	mac, err := engineMAC(cfg.MAC, cfg.Addrs)
	if err != nil {
		return 0, err
	}
	a := linkLocal(mac).As16()
	return binary.BigEndian.Uint64(a[8:]), nil
}

// GIDTable is the GID table that a device of this Config would have. Without MAC and
// addresses its first entry is another one each time. Errors as for Open.
func GIDTable(cfg Config) ([]GIDEntry, error) {
	mac, err := engineMAC(cfg.MAC, cfg.Addrs)
	if err != nil {
		return nil, err
	}
	t, err := newGIDTable(mac, cfg.Addrs, cfg.Gateway)
	if err != nil {
		return nil, err
	}
	return t.entries, nil
}

// Rings gives the rings of the work queues; recv is nil for a QP without a receive
// queue of its own. They are good until Destroy.
func (q *QP) Rings() (send, recv *qp.Ring) { return q.q.SendRing(), q.q.RecvRing() }

// SendOps is the set of send opcodes that the QP takes: bit n for WROpcode n.
func (q *QP) SendOps() uint32 { return q.q.SendOps() }

// Doorbell is the page of bells of the QP's engine, and which one is the QP's. A driver
// that rings it may have no need to Kick; see bells.
func (q *QP) Doorbell() (page unsafe.Pointer, index uint16) {
	return unsafe.Pointer(q.s.bells), q.s.index(q.num)
}

// The page's layout, for a driver's own description of it (bells): offsets in bytes, and
// how many work requests are left to the next poll at most.
const (
	BellTopOffset     = unsafe.Offsetof(bells{}.top)
	BellPatientOffset = unsafe.Offsetof(bells{}.patient)
	BellPollsOffset   = unsafe.Offsetof(bells{}.polls)
	BellSeenOffset    = unsafe.Offsetof(bells{}.seen)
	BellLeftOffset    = unsafe.Offsetof(bells{}.left)
	BellMidOffset     = unsafe.Offsetof(bells{}.mid)
	BellLeafOffset    = unsafe.Offsetof(bells{}.leaf)
	BellMaxLeft       = maxLeft
)

// Kick says that work requests were put into the send ring, or into the receive
// ring of a QP in the state ERR: it rings the doorbell and sends what can be sent.
func (q *QP) Kick() {
	if !q.dead.Load() {
		q.s.bells.ring(q.s.index(q.num))
		q.s.kick()
	}
}

// Ring is the CQ's ring; Resize replaces it. See qp.CQ.Ring for what a driver has
// to mind.
func (c *CQ) Ring() *qp.Ring { return c.q.Ring() }

// Progress makes progress as Poll does for one who found the CQ empty. With rest set
// the caller will sleep until an event comes, rather than poll again: the background
// goroutine takes over.
func (c *CQ) Progress(rest bool) {
	c.home.Load().attend(c.q, !rest)
	for m := c.others(); m != 0 && c.q.Len() == 0; m &= m - 1 {
		c.d.shards[bits.TrailingZeros32(m)].attend(c.q, !rest)
	}
	if rest && c.q.Len() == 0 {
		c.wanted()
	}
}

// Ring is the SRQ's ring.
func (s *SRQ) Ring() *qp.Ring { return s.q.Ring() }

// Rest says that the caller will sleep until something completes: the background
// goroutine takes over.
func (d *Device) Rest() { d.wanted() }

// FDs are the descriptors of the device's port, MaxFDs at most. A child after fork(2) closes
// them: while one has them the port is in use.
func (d *Device) FDs() (fds []int) {
	for _, dev := range d.devs {
		if p, ok := dev.(interface{ Descriptors() []int }); ok {
			fds = append(fds, p.Descriptors()...)
		}
	}
	return fds
}

// MaxFDs is how many descriptors a device has at most.
const MaxFDs = MaxQueues + 1

// What Lead says when the caller is not to wait for frames.
const (
	LeadNot   = -1 // the background goroutine does
	LeadReady = -2 // it need not sleep
)

// Lead says that the caller will sleep until ready, and is for a driver what CQ.Wait does:
// it gives the descriptor that the caller waits for to be readable, beside what it waits
// for, and each time that it is, Led is called. EndLead must follow, but after LeadReady.
func (d *Device) Lead(ready func() bool) (fd int) {
	s := d.sh
	if !s.lead() {
		s.bg.sleepers.Add(1)
		d.wanted()
		return LeadNot
	}
	fd = s.dev.FD()
	if s.lookFor(ready) {
		return fd
	}
	s.endLead()
	if ready() {
		return LeadReady
	}
	return d.Lead(ready)
}

// Led makes progress for the caller of Lead. false: there is no need to sleep any longer.
func (d *Device) Led(ready func() bool) bool {
	d.sh.bg.wakeups.Add(1)
	return d.sh.led(ready)
}

// EndLead ends what Lead began, by what that gave.
func (d *Device) EndLead(fd int) {
	if fd == LeadNot {
		d.sh.bg.sleepers.Add(-1)
	} else {
		d.sh.endLead()
	}
}

// Now is the engine's clock in nanoseconds: what completions' timestamps are of.
func (d *Device) Now() int64 { return d.clock() }
