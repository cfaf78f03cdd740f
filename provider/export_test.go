// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"net"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// Dozing says whether what keeps the files of Config.Sysfs up to date sleeps until
// something happens.
func (d *Device) Dozing() bool {
	return d.sh.pub.dozing.Load()
}

// Hold calls f with the baton held: what is posted meanwhile is seen afterwards, at once.
func (d *Device) Hold(f func()) {
	d.sh.lock()
	f()
	d.sh.release()
}

// SetSilent has the device tell no sender how much of its queue is his, or do so again.
func (d *Device) SetSilent(on bool) {
	for _, s := range d.shards {
		s.lock()
		s.inb.silent = on
		s.release()
	}
}

// Known is how many receivers and sources of requests the device remembers.
func (d *Device) Known() (receivers, sources int) {
	for _, s := range d.shards {
		s.lock()
		receivers, sources = receivers+len(s.inb.receivers), sources+len(s.inb.sources)
		s.release()
	}
	return receivers, sources
}

// Region is the region behind the keys.
func (m *MR) Region() *mr.Region { return m.region.Load() }

// Asleep says whether nothing but a frame or a call of the application will wake the
// background goroutine up: it sleeps without a time to wake up at, or is about to, nothing
// has come that it has not seen, and a further look would find nothing to do.
func (d *Device) Asleep() bool {
	for _, s := range d.shards {
		if !s.asleep() {
			return false
		}
	}
	return true
}

func (s *shard) asleep() bool {
	s.lock()
	defer s.release()
	b := &s.bg
	if s.due() != qp.Never || !s.bells.quiet() || b.away.Load() || b.sleepUntil.Load() != qp.Never ||
		s.clock()-s.lastCall.Load() < lively {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	fds := []unix.PollFd{{Fd: int32(b.ep), Events: unix.POLLIN}}
	if b.leader.Load() { // the other half of what is in ep was not looked at
		fds[0].Fd = int32(b.lep)
	}
	if s.gone.Load() {
		fds[0].Fd = int32(b.fd) // the TAP's descriptor says for ever that it is gone
	}
	n, err := unix.Poll(fds, 0)
	return n == 0 && err == nil
}

// MonitorConns is how many may look at a time.
const MonitorConns = monitorConns

// FakePeer has who connects to monitors be a user, until restore.
func FakePeer(uid uint32) (restore func()) {
	was := peerCred
	peerCred = func(*net.UnixConn) (*unix.Ucred, error) { return &unix.Ucred{Uid: uid}, nil }
	return func() { peerCred = was }
}

// LatePrefetch is a prefetch of a range that the QP's peer has asked for just now; it is
// done, and told of, when done is called.
func (q *QP) LatePrefetch(rkey mr.Key, iova, n uint64) (done func()) {
	q.s.lock()
	defer q.s.release()
	who := q.asker()
	back := wire.Residency{Kind: wire.ResBack, RKey: uint32(rkey), N: 1}
	back.Ranges[0] = wire.ResidencyRange{IOVA: iova, Len: n}
	return func() {
		q.s.lock()
		defer q.s.release()
		q.s.tellBack(who, &back)
	}
}

// Assume has the QP take a range of the peer's for away, or for back.
func (q *QP) Assume(rkey mr.Key, iova, n uint64, away bool) {
	s := q.s
	s.lock()
	defer s.release()
	q.res.state(uint32(rkey)).set(iova, iova+n, away)
	if !away && q.q.Wake() {
		s.activate(q)
	}
	s.progress(false, postRounds)
}

// BudgetLeft is the domain's budget in bytes, also when it is gone.
func (p *PD) BudgetLeft() uint64 {
	u, _ := p.d.keys.Usage(p.num)
	return u.Budget
}

// Congested is a congestion notification for the QP.
func (q *QP) Congested() {
	s := q.s
	s.lock()
	defer s.release()
	s.now = s.clock()
	q.q.Congested()
	s.schedule(q)
}

// ShardFrames is how many frames each shard has read and written.
func (d *Device) ShardFrames() (n []uint64) {
	for _, s := range d.shards {
		s.lock()
		n = append(n, s.cnt.RxFrames+s.cnt.TxFrames)
		s.release()
	}
	return n
}

// HandRing is the ring between two shards.
type HandRing struct{ r handRing }

func NewHandRing(slots, frame int) *HandRing {
	h := &HandRing{}
	h.r.slots, h.r.how = make([][]byte, slots), make([]uint8, slots)
	for i := range h.r.slots {
		h.r.slots[i] = make([]byte, 0, frame)
	}
	return h
}

func (h *HandRing) Push(b []byte) bool { return h.r.push(b, handPacket) }

// IsLed says whether a thread of the application's waits for frames.
func (d *Device) IsLed() bool { return d.sh.bg.leader.Load() }

// BePatient has a device without background goroutine take the application for one that
// polls all the time.
func (d *Device) BePatient() {
	d.sh.bg.away.Store(true)
	d.sh.eager.Store(maxEager)
}

// Held is what a device has of things that connections could leave behind.
type Held struct{ CM, QPs, Numbers, CQs, Neighbours, Asking int }

// CMEntries is how many entries the tables of connection management have.
func (d *Device) CMEntries() int {
	d.sh.lock()
	defer d.sh.release()
	return d.sh.cm.agent.Entries()
}

// Holds counts that.
func (d *Device) Holds() (h Held) {
	d.mu.Lock()
	h.QPs, h.CQs = len(d.qps), len(d.cqs)
	d.mu.Unlock()
	for _, s := range d.shards {
		s.lock()
		for _, q := range s.table {
			if q != nil {
				h.Numbers++
			}
		}
		s.release()
	}
	s := d.sh
	s.lock()
	defer s.release()
	h.CM, h.Neighbours, h.Asking = s.cm.agent.Entries(), len(s.nb.m), len(s.nb.asking)
	return h
}

// AcksSent is how many acknowledgements were sent. It does not take the baton.
func (d *Device) AcksSent() uint64 { return d.sh.stats.SentAcks.Load() }
