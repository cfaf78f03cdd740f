// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// What shards have to tell each other. None waits for another: packets go through rings
// between each two of them, and are lost when one is full, as they are when a TAP's queue
// is; what is rare goes through mailboxes. A bell says so to whoever has the other shard's
// baton, and who has handed something over runs that shard when it gives its own baton
// back, if nobody else does.

// handSlots is how many packets all rings to one shard of a device hold together, with two
// shards: more than all windows of a peer, which is the most that comes at once.
const handSlots = 1024

// Why a frame is handed over.
const (
	handPacket = uint8(iota) // it is for the other shard
	handFlows                // flows have to see it first
	handSent                 // sniffers have to see what was sent
	handLoop   = 0x80        // with one of these: it is our own,
	handSlow   = 0x40        // and whoever has sent it is too fast
)

// handRing holds the packets on their way from one shard to another: the holder of the one
// baton puts them in, the holder of the other takes them out.
type handRing struct {
	slots [][]byte
	how   []uint8
	tail  atomic.Uint32
	_     [60]byte
	head  atomic.Uint32
	next  uint32 // of the one who takes out: what it takes next
	_     [56]byte
}

// push copies a frame into the ring; false if there is no room for it.
func (r *handRing) push(b []byte, how uint8) bool {
	t := r.tail.Load()
	n := uint32(len(r.slots))
	if t-r.head.Load() == n {
		return false
	}
	slot := &r.slots[t%n]
	if len(b) > cap(*slot) {
		return false
	}
	*slot = (*slot)[:copy((*slot)[:len(b)], b)]
	r.how[t%n] = how
	r.tail.Store(t + 1)
	return true
}

// openRings makes the rings from all other shards.
func (s *shard) openRings(frame int) error {
	n := len(s.d.devs)
	if n == 1 {
		return nil
	}
	slots := 2 * handSlots / n
	in := make([]handRing, n)
	mem, err := mr.Alloc((n - 1) * slots * frame)
	if err != nil {
		return fmt.Errorf("buffers between queues: %w", err)
	}
	b := mem.Bytes()
	for i := range in {
		if i == s.id {
			continue
		}
		in[i].slots, in[i].how = make([][]byte, slots), make([]uint8, slots)
		for k := range in[i].slots {
			in[i].slots[k], b = b[:0:frame], b[frame:]
		}
	}
	s.in, s.inMem = in, mem
	return nil
}

func (s *shard) closeRings() error {
	if s.inMem == nil {
		return nil
	}
	return s.inMem.Close()
}

// handOver hands a frame to another shard.
func (s *shard) handOver(to *shard, b []byte, how uint8) {
	if s.looping {
		how |= handLoop
	} else if s.notify && how == handPacket {
		how |= handSlow
		s.notify = false
	}
	if !to.in[s.id].push(b, how) {
		s.cnt.HandoverLost++
	} else {
		s.cnt.HandedOver++
	}
	s.wake(to)
}

// wake has another shard look at what it was left, at the latest when this one's baton is
// given back.
func (s *shard) wake(to *shard) {
	to.bells.ring(mailBell)
	s.nudge |= 1 << to.id
}

// handed says whether other shards have handed something over.
func (s *shard) handed() bool {
	for i := range s.in {
		if r := &s.in[i]; r.tail.Load() != r.head.Load() {
			return true
		}
	}
	return false
}

// receiveHanded handles what other shards have handed over, as much of it as there is when
// it starts. The slots are theirs again with doneHanded: what is staged is still in them.
func (s *shard) receiveHanded() {
	s.acc.Linger()
	defer s.acc.Leave()
	for i := range s.in {
		r := &s.in[i]
		t := r.tail.Load()
		for ; r.next != t; r.next++ {
			k := r.next % uint32(len(r.slots))
			b, how := r.slots[k], r.how[k]
			s.looping = how&handLoop != 0
			s.notify = s.notify || how&handSlow != 0
			switch how &^ (handLoop | handSlow) {
			case handPacket:
				s.accept(b, true)
			case handFlows:
				s.sort(b)
			case handSent:
				if len(s.flows.sniffers) > 0 {
					s.sniff(b)
				}
			}
			s.looping = false
		}
	}
}

// doneHanded gives the slots back.
func (s *shard) doneHanded() {
	for i := range s.in {
		if r := &s.in[i]; r.head.Load() != r.next {
			r.head.Store(r.next)
		}
	}
}

// owner is the shard that a packet is for: that of the QP, for residency messages that of
// the QP they are about, and the first for all else. The packet may be spoiled yet: who it
// is for looks at its ICRC.
func (s *shard) owner(p *wire.Packet) *shard {
	d, n := s.d, p.BTH.DestQP
	switch {
	case s.in == nil:
		return s
	case n == wire.GSIQPN:
		if p.Info.Service == wire.ServiceUD {
			if h, ok := wire.ParseMAD(p.Payload); ok && h.Class == wire.ResidencyClass && wire.ParseResidency(p.Payload, &s.resMsg) {
				return d.shardOf(s.resMsg.Dst)
			}
		}
		return d.sh
	case n <= wire.GSIQPN || n == wire.MulticastQPN || p.Dst().IsMulticast():
		return d.sh
	}
	return d.shardOf(n)
}

// shardOf is the shard of the QPs with a number.
func (d *Device) shardOf(n wire.QPN) *shard {
	return d.shards[uint16(n)>>(16-d.shardBits)]
}

// mailbox holds what others want done by the holder of the baton.
type mailbox struct {
	full atomic.Bool
	mu   sync.Mutex // a leaf
	fns  []func()
}

func (m *mailbox) put(fn func()) {
	m.mu.Lock()
	m.fns = append(m.fns, fn)
	m.full.Store(true)
	m.mu.Unlock()
}

// read does what was asked for; the caller has the baton.
func (m *mailbox) read() {
	m.mu.Lock()
	fns := m.fns
	m.fns = nil
	m.full.Store(false)
	m.mu.Unlock()
	for _, fn := range fns {
		fn()
	}
}

// tell has fn called with this shard's baton; the caller has that of from. A shard that
// tells itself hears it in this iteration or the next.
func (s *shard) tell(from *shard, fn func()) {
	s.mail.put(fn)
	from.wake(s)
}

// tellAny is tell for who does not know which baton it has.
func (s *shard) tellAny(fn func()) {
	s.mail.put(fn)
	s.bells.ring(mailBell)
	s.bg.kick()
}

// rouse runs shards that were given something to do, and those that get something to do by
// that, a few times; then their background goroutines go on. The caller has no baton but
// those of shards that do not have to be run: who has a baton looks before it gives it back.
func (d *Device) rouse(shards uint32) {
	for turns := 4 * len(d.shards); shards != 0; turns-- {
		s := d.shards[bits.TrailingZeros32(shards)]
		shards &= shards - 1
		if turns <= 0 {
			s.bg.kick()
			continue
		}
		if !s.baton.TryLock() {
			continue
		}
		if !s.closing {
			s.progress(false, postRounds)
		}
		shards |= s.giveBack()
	}
}

// allShards takes all batons, to hold the engine still: what was let in and staged is in
// place then.
type allShards struct{ d *Device }

// Lock takes the last shard's first: who has one's baton may wait for that of one before it.
func (a allShards) Lock() {
	for i := len(a.d.shards) - 1; i >= 0; i-- {
		a.d.shards[i].lock()
	}
}

func (a allShards) Unlock() {
	for _, s := range a.d.shards {
		s.release()
	}
}

// each adds up the errors of what is done for each shard.
func (d *Device) each(fn func(s *shard) error) error {
	var errs []error
	for _, s := range d.shards {
		errs = append(errs, fn(s))
	}
	return errors.Join(errs...)
}
