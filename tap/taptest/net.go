// SPDX-License-Identifier: Apache-2.0

// Package taptest is an in-memory link between [tap.Device]s, with faults by
// seed and virtual time that the test owns.
//
// Two ports make a cable: what one writes the other reads. More ports make a
// hub that learns, as a bridge does: a frame to a known unicast address goes to
// the port it was last seen at, any other frame to all ports but its own.
//
// Each copy of a frame on its way to a port draws its fate from a generator that
// belongs to the sending port, always the same number of draws for each frame.
// So the n-th frame of a port meets the same fate in every run with the same
// seed, also when several goroutines send.
package taptest

import (
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/tapverbs/tapverbs/tap"
)

// DefaultMTU is the MTU of ports when Config leaves it 0, as on a real fabric:
// room for RoCE packets with a path MTU of 4096 bytes.
const DefaultMTU = 9000

// DefaultReorderDelay is how long a frame chosen for reordering is held back when
// Config leaves ReorderDelay 0.
const DefaultReorderDelay = 20 * time.Microsecond

// Config says how the link behaves. The zero value is a perfect link without delay.
type Config struct {
	// Seed decides every fault. The same seed and the same frames give the same run.
	Seed int64
	// Loss, Dup, Reorder and Corrupt are probabilities from 0 to 1 for each frame
	// on its way to each destination, drawn independently: the frame vanishes; it
	// arrives twice; it is held back by ReorderDelay, so that later ones overtake
	// it; 1 to 3 of its bits behind the Ethernet header are flipped. The second
	// copy of a duplicated frame is reordered and corrupted by draws of its own.
	Loss, Dup, Reorder, Corrupt float64
	// Delay is the time on the wire; to it comes an evenly distributed time of
	// up to Jitter. Jitter alone never reorders: a frame waits for the one
	// before it. ReorderDelay is added to frames chosen by Reorder.
	Delay, Jitter, ReorderDelay time.Duration
	// QueueLen is how many frames may be on their way to or waiting at a port;
	// more are dropped there, as at a real TAP. 0 means any number.
	QueueLen int
	// Rate is how many bytes a second go to each port, 0 for any number. What is more
	// waits; a frame that finds more than MarkAt bytes waiting is marked as having met
	// congestion (CE), if its sender understands that (RFC 3168 5). MarkAt 0 marks none.
	Rate, MarkAt int64
	// MTU of all ports in bytes after the Ethernet header, DefaultMTU if 0.
	// Longer frames are dropped, as by a bridge.
	MTU int
	// Offloads is what the ports claim. With USO4 or USO6 they carry super-frames
	// as they are; without, WriteBatch refuses them with tap.ErrSuperFrame.
	Offloads tap.Offload
	// NoSuper makes super-frames vanish, as a link does beyond which somebody does not
	// know them; they count as lost.
	NoSuper bool
	// Filter, if set, sees each frame written before any draw and may drop it. It
	// must not keep or change the frame, nor call back into the Net.
	Filter func(from int, frame []byte) Verdict
	// Tap, if set, sees every frame with what happened to it. It is called with
	// the Net locked: it must not call back into it. The frame is valid during
	// the call only.
	Tap func(ev Event)
}

// Verdict is a Filter's answer.
type Verdict uint8

const (
	// Pass lets the frame on to the link, where its draws await it.
	Pass Verdict = iota
	// Drop makes the frame vanish.
	Drop
)

// Net is a link. All methods are safe for concurrent use.
type Net struct {
	clock *Clock
	cfg   Config

	mu     sync.Mutex
	ports  []*Port // by index; nil where none was asked for yet
	owner  map[[6]byte]int
	seq    uint64
	free   [][]byte // buffers not in use, owned by the Net
	stats  Counts
	notify []func() // gathered during a WriteBatch, called after unlock
}

// New returns a link without ports; Port makes them. A clock of nil stands still
// at 0. Probabilities outside of 0 to 1 and negative durations panic.
func New(clock *Clock, cfg Config) *Net {
	for _, p := range []float64{cfg.Loss, cfg.Dup, cfg.Reorder, cfg.Corrupt} {
		if !(p >= 0 && p <= 1) {
			panic("taptest: a probability must be from 0 to 1")
		}
	}
	if cfg.Rate < 0 || cfg.MarkAt < 0 || cfg.Delay < 0 || cfg.Jitter < 0 || cfg.ReorderDelay < 0 || cfg.QueueLen < 0 || cfg.MTU < 0 {
		panic("taptest: negative rate, delay, queue length or MTU")
	}
	if cfg.ReorderDelay == 0 {
		cfg.ReorderDelay = DefaultReorderDelay
	}
	if cfg.MTU == 0 {
		cfg.MTU = DefaultMTU
	}
	if clock == nil {
		clock = new(Clock)
	}
	return &Net{clock: clock, cfg: cfg, owner: make(map[[6]byte]int)}
}

// Clock is the clock given to New.
func (n *Net) Clock() *Clock { return n.clock }

// Port returns port i, making it the first time. Indices start at 0 and should be
// dense. A port receives only what was sent after it was made.
func (n *Net) Port(i int) *Port {
	n.mu.Lock()
	defer n.mu.Unlock()
	for len(n.ports) <= i {
		n.ports = append(n.ports, nil)
	}
	if n.ports[i] == nil {
		n.ports[i] = &Port{
			net:   n,
			index: i,
			rng:   rand.New(rand.NewPCG(uint64(n.cfg.Seed), uint64(i)+0x7461_7074_6573_7400)),
		}
	}
	return n.ports[i]
}

// SetFaults replaces the probabilities from now on, so that a test can let a
// connection come up on a clean link and then spoil it, or the other way round.
func (n *Net) SetFaults(loss, dup, reorder, corrupt float64) {
	for _, p := range []float64{loss, dup, reorder, corrupt} {
		if !(p >= 0 && p <= 1) {
			panic("taptest: a probability must be from 0 to 1")
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cfg.Loss, n.cfg.Dup, n.cfg.Reorder, n.cfg.Corrupt = loss, dup, reorder, corrupt
}

// SetNoSuper changes Config.NoSuper from now on.
func (n *Net) SetNoSuper(on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cfg.NoSuper = on
}

// NextDelivery is the earliest time, in nanoseconds of the Clock, at which a frame
// is or becomes readable at any port; false if none is on its way. A time that is
// not after Now means that a frame waits to be read.
func (n *Net) NextDelivery() (at int64, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, p := range n.ports {
		if p == nil {
			continue
		}
		for i := range len(p.more) + 1 {
			q := p
			if i > 0 {
				q = p.more[i-1]
			}
			if len(q.queue) > 0 && (!ok || q.queue[0].at < at) {
				at, ok = q.queue[0].at, true
			}
		}
	}
	return at, ok
}

// send puts one frame of port from on its way. The Net is locked.
func (n *Net) send(from *Port, f tap.Frame) {
	now := n.clock.Now()
	c := &from.stats
	n.count(c, Sent)
	n.event(Event{Time: now, From: from.index, To: -1, Kind: Sent, Frame: f.B, GSO: f.GSO})
	if n.cfg.Filter != nil && n.cfg.Filter(from.index, f.B) == Drop {
		n.count(c, Filtered)
		n.event(Event{Time: now, From: from.index, To: -1, Kind: Filtered, Frame: f.B, GSO: f.GSO})
		return
	}
	if f.GSO == 0 && len(f.B) > n.cfg.MTU+tap.EthHeaderLen {
		n.count(c, TooLong)
		n.event(Event{Time: now, From: from.index, To: -1, Kind: TooLong, Frame: f.B})
		return
	}
	var dst, src [6]byte
	copy(dst[:], f.B[0:6])
	copy(src[:], f.B[6:12])
	if src[0]&1 == 0 {
		n.owner[src] = from.index
	}
	if dst[0]&1 == 0 {
		if to, ok := n.owner[dst]; ok && to != from.index && n.ports[to] != nil && !n.ports[to].gone {
			n.travel(from, n.ports[to], f, now)
			return
		}
		// The bridge's port of a frame to an address behind that same port
		// drops it; here a second device with that address may exist elsewhere
		// (a cable has no table), so only a true hub does.
		if to, ok := n.owner[dst]; ok && to == from.index && len(n.ports) > 2 {
			return
		}
	}
	for _, to := range n.ports {
		if to != nil && to != from && !to.gone {
			n.travel(from, to, f, now)
		}
	}
}

// fate is what was drawn for one copy of a frame.
type fate struct {
	late, spoil bool
	jitter      int64  // nanoseconds
	bits        uint64 // which bits to flip, see flip
}

func (n *Net) draw(r *rand.Rand) (f fate) {
	f.late = r.Float64() < n.cfg.Reorder
	f.spoil = r.Float64() < n.cfg.Corrupt
	f.jitter = int64(r.Float64() * float64(n.cfg.Jitter))
	f.bits = r.Uint64()
	return f
}

// travel draws the fate of a frame on its way to one port. Every draw is made
// whether or not it matters, so that one setting does not shift the others.
func (n *Net) travel(from, to *Port, f tap.Frame, now int64) {
	lost := from.rng.Float64() < n.cfg.Loss || f.GSO != 0 && n.cfg.NoSuper
	dup := from.rng.Float64() < n.cfg.Dup
	first, second := n.draw(from.rng), n.draw(from.rng)
	n.arrive(from, to, f, now, first, lost, false)
	if dup && !lost {
		n.count(&from.stats, Duplicated)
		n.event(Event{Time: now, From: from.index, To: to.index, Kind: Duplicated, Frame: f.B, GSO: f.GSO})
		n.arrive(from, to, f, now, second, false, true)
	}
}

// arrive queues one copy of a frame at its destination, or loses it.
func (n *Net) arrive(from, to *Port, f tap.Frame, now int64, d fate, lost, second bool) {
	ev := Event{Time: now, From: from.index, To: to.index, Frame: f.B, GSO: f.GSO, Second: second}
	to = to.queueOf(f.B)
	if lost {
		n.count(&from.stats, Lost)
		ev.Kind = Lost
		n.event(ev)
		return
	}
	if n.cfg.QueueLen > 0 && len(to.queue) >= n.cfg.QueueLen {
		n.count(&from.stats, Overflowed)
		ev.Kind = Overflowed
		n.event(ev)
		return
	}
	buf := n.buffer(len(f.B))
	copy(buf, f.B)
	if d.spoil && len(buf) > tap.EthHeaderLen {
		flip(buf[tap.EthHeaderLen:], d.bits)
		n.count(&from.stats, Corrupted)
		ev.Kind, ev.Frame = Corrupted, buf
		n.event(ev)
	}
	if n.cfg.Rate > 0 {
		waits := max(to.free-now, 0)
		if n.cfg.MarkAt > 0 && waits*n.cfg.Rate/1e9 > n.cfg.MarkAt && mark(buf) {
			n.count(&from.stats, Marked)
			ev.Kind, ev.Frame = Marked, buf
			n.event(ev)
		}
		to.free = now + waits + int64(len(buf))*1e9/n.cfg.Rate
	}
	at := max(now, to.free) + int64(n.cfg.Delay) + d.jitter
	if d.late {
		at += int64(n.cfg.ReorderDelay)
		n.count(&from.stats, Reordered)
		ev.Kind, ev.Frame = Reordered, buf
		n.event(ev)
	} else {
		at = max(at, to.lastAt)
		to.lastAt = at
	}
	n.seq++
	to.push(entry{at: at, seq: n.seq, from: from.index, gso: f.GSO, second: second, b: buf})
	if to.onArrival != nil {
		n.notify = append(n.notify, to.onArrival)
	}
}

// mark changes ECT to CE in the header of IPv4 or IPv6, as a router does (RFC 3168 5).
func mark(b []byte) bool {
	const ip, ce = tap.EthHeaderLen, 3
	switch {
	case etherType(b) == 0x0800 && len(b) >= ip+20 && b[ip+1]&ce != 0:
		b[ip+1] |= ce
		b[ip+10], b[ip+11] = 0, 0
		sum := uint32(0)
		for i := 0; i < 20; i += 2 {
			sum += uint32(binary.BigEndian.Uint16(b[ip+i:]))
		}
		sum = sum>>16 + sum&0xffff
		binary.BigEndian.PutUint16(b[ip+10:], ^uint16(sum>>16+sum))
	case etherType(b) == 0x86dd && len(b) >= ip+40 && b[ip+1]>>4&ce != 0:
		b[ip+1] |= ce << 4
	default:
		return false
	}
	return true
}

// flip flips 1 to 3 different bits of b, chosen by random.
func flip(b []byte, random uint64) {
	total := uint64(len(b)) * 8
	count := 1 + random%3
	pcg := rand.NewPCG(random, total)
	var done [3]uint64
	for i := uint64(0); i < min(count, total); {
		bit := pcg.Uint64() % total
		again := false
		for _, d := range done[:i] {
			again = again || d == bit
		}
		if !again {
			b[bit/8] ^= 1 << (bit % 8)
			done[i] = bit
			i++
		}
	}
}

// buffer takes a buffer of n bytes from the pool, or makes one.
func (n *Net) buffer(size int) []byte {
	if k := len(n.free); k > 0 {
		b := n.free[k-1]
		n.free = n.free[:k-1]
		if cap(b) >= size {
			return b[:size]
		}
	}
	return make([]byte, size, max(size, n.cfg.MTU+tap.EthHeaderLen))
}

// release gives a buffer back to the pool.
func (n *Net) release(b []byte) { n.free = append(n.free, b) }

// etherType is 0 of a frame that is too short.
func etherType(b []byte) uint16 {
	if len(b) < tap.EthHeaderLen {
		return 0
	}
	return binary.BigEndian.Uint16(b[12:])
}
