// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/wire"
)

// More shards than there are processors here, in a simulation: two devices on a link in memory, with
// virtual time, and for each of their shards a processor of its own. The engines are the real ones, and
// what they do takes no time; instead each packet of data keeps the processor of the shard that writes or
// reads it busy for as long as such a packet was measured to take, acknowledgements and all else
// included. A busy processor reads no frame and writes none. So what is seen is what the shards make one
// another wait for: the window that they share, frames that are another's, queue pairs that are not spread.
// What the kernel makes them wait for, and the processor's caches, are not in it.

// simulated are numbers of queues.
var simulated = []int{1, 2, 4, 8, 16}

// simLoad is what is done, and what of it costs how much.
type simLoad struct {
	what, name  string
	size, depth int           // of a message, in bytes; in flight, of each queue pair
	delay       time.Duration // of the link, one way
	// Costs of a packet in ns: all of them at the sender and at the receiver, and that part of the receiver's that is for
	// reading frames, whosever they are. From the profile in README.md.
	send, receive, read int64
	flows               bool // frames go to queues by a hash of their flow, not to their queue pair's
	oneCQ               bool // all queue pairs have one completion queue
}

// handOver is what it costs on top when a shard reads a packet that is another's, in ns: a copy of it, and a place
// in a ring.
const handOver = 50

// simLoads begin with the one that aims are about. 656 and 586 ns are of WRITEs of 64 bytes in lists, 2059 and
// 1591 of 1 MiB by ib_write_bw; of the latter read(2), with all that it copies, takes 580 at the receiver, 86 of the former.
var simLoads = []simLoad{
	{what: "write", name: "64 B", size: 64, depth: 32, delay: 2 * time.Microsecond, send: 656, receive: 586, read: 86},
	{what: "write 4K", name: "64 KiB", size: 64 << 10, depth: 4, delay: 2 * time.Microsecond, send: 2059, receive: 1591, read: 580},
	{what: "write far", name: "64 B, 50 µs away", size: 64, depth: 128, delay: 50 * time.Microsecond, send: 656, receive: 586, read: 86},
	{what: "write flows", name: "64 B, without the steering program", size: 64, depth: 32, delay: 2 * time.Microsecond, send: 656, receive: 586, read: 86, flows: true},
	{what: "write one CQ", name: "64 B, one completion queue", size: 64, depth: 32, delay: 2 * time.Microsecond, send: 656, receive: 586, read: 86, oneCQ: true},
}

// simulatedWho is who did it, in the book.
const simulatedWho = "shards simulated"

const (
	simulatedQPs = 2                      // for each shard
	warmUp       = 500 * time.Microsecond // of virtual time
	simulateFor  = 2 * time.Millisecond
	tickOfTime   = 100 // ns: what the clock moves by
)

// processor is one shard's.
type processor struct {
	clock *taptest.Clock
	busy  int64 // until then
}

func (p *processor) free() bool { return p.clock.Now() >= p.busy }

func (p *processor) work(ns int64) { p.busy = max(p.busy, p.clock.Now()) + ns }

// processorQueue is a queue of a port, as its shard sees it.
type processorQueue struct {
	tap.Device
	load *simLoad
	own  int          // the shard
	all  []*processor // of the device
}

// QueueLen is that of a port which has been seen to: there is room for all windows.
func (q *processorQueue) QueueLen() int { return provider.PortQueue }

// SetQueueLen does nothing.
func (q *processorQueue) SetQueueLen(int) error { return nil }

// packets says how many packets of data a frame is; 0 for any other.
func packets(f *tap.Frame) int64 {
	h := wire.RoCE(f.B)
	if h == 0 || len(f.B) < h+wire.BTHLen || wire.Opcode(f.B[h]) == wire.RCAck {
		return 0
	}
	if f.GSO == 0 {
		return 1
	}
	n := len(f.B) - h
	for _, m := range f.More {
		n += len(m)
	}
	return int64((n + int(f.GSO) - 1) / int(f.GSO))
}

// ReadBatch reads one frame, if the processor is free.
func (q *processorQueue) ReadBatch(fs []tap.Frame) (int, error) {
	cpu := q.all[q.own]
	if !cpu.free() || len(fs) == 0 {
		return 0, nil
	}
	n, err := q.Device.ReadBatch(fs[:1])
	if n == 0 {
		return n, err
	}
	k := packets(&fs[0])
	owner := shardOf(fs[0].B, len(q.all))
	if owner == q.own {
		cpu.work(k * q.load.receive)
	} else {
		cpu.work(k * (q.load.read + handOver))
		q.all[owner].work(k * (q.load.receive - q.load.read))
	}
	return n, err
}

// WriteBatch writes frames until the processor is busy.
func (q *processorQueue) WriteBatch(fs []tap.Frame) (n int, err error) {
	cpu := q.all[q.own]
	for n < len(fs) && cpu.free() {
		k, err := q.Device.WriteBatch(fs[n : n+1])
		if k == 0 {
			return n, err
		}
		cpu.work(packets(&fs[n]) * q.load.send)
		n++
	}
	return n, nil
}

// shardOf is the shard, of n, of the queue pair that a frame is for: what the steering program does.
func shardOf(frame []byte, n int) int {
	h := wire.RoCE(frame)
	if h == 0 || len(frame) < h+wire.BTHLen {
		return 0
	}
	dest := binary.BigEndian.Uint32(frame[h+4:]) & 0xffffff
	if dest <= uint32(wire.GSIQPN) {
		return 0
	}
	return int(dest&0xffff) * n >> 16
}

// hashOf spreads flows: by the UDP source port, as the kernel does without the program.
func hashOf(frame []byte) int {
	if h := wire.RoCE(frame); h != 0 {
		port := uint32(binary.BigEndian.Uint16(frame[h-wire.UDPLen:]))
		return int(port*2654435761>>16) & 0xff
	}
	return 0
}

// simulation is two devices of n shards.
type simulation struct {
	load  *simLoad
	clock *taptest.Clock
	net   *taptest.Net
	ends  [2]machine
	mem   *mr.Memory
	keys  [2]mr.Key
	lkey  mr.Key
	cqs   []*provider.CQ
	qps   [2][]*provider.QP
	cpus  []*processor // of the first device
	left  []int        // messages that a queue pair has not posted
}

func newSimulation(l *simLoad, n int) (s *simulation, err error) {
	s = &simulation{load: l, clock: taptest.NewClock(int64(time.Second))}
	s.net = taptest.New(s.clock, taptest.Config{Delay: l.delay, Offloads: tap.VnetHdr | tap.USO4 | tap.USO6})
	if s.mem, err = mr.Alloc(l.size); err != nil {
		return nil, err
	}
	clear(s.mem.Bytes())
	for i := range s.ends {
		port := s.net.Port(i)
		more := port.Queues(n, func(f []byte) int {
			if l.flows {
				return hashOf(f) % n
			}
			return shardOf(f, n)
		})
		var cpus []*processor
		var devs []tap.Device
		for k, d := range append([]tap.Device{port}, more...) {
			cpus = append(cpus, &processor{clock: s.clock})
			devs = append(devs, &processorQueue{Device: d, load: l, own: k})
		}
		for _, d := range devs {
			d.(*processorQueue).all = cpus
		}
		if i == 0 {
			s.cpus = cpus
		}
		m := &s.ends[i]
		if m.dev, err = provider.Open(provider.Config{Device: devs[0], MoreQueues: devs[1:], Clock: s.clock.Now, Manual: true, Idle: s.step,
			Addrs: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 91, 0, byte(i + 1)}), 24)}}); err != nil {
			return nil, errors.Join(err, s.close())
		}
	}
	if err := s.connect(n); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *simulation) close() (err error) {
	for i := range s.ends {
		if d := s.ends[i].dev; d != nil {
			err = errors.Join(err, d.Close())
		}
	}
	return errors.Join(err, s.mem.Close())
}

// connect makes queue pairs and connects them; each has a completion queue of its own.
func (s *simulation) connect(n int) (err error) {
	for i := range s.ends {
		m := &s.ends[i]
		if m.pd, err = m.dev.AllocPD(); err != nil {
			return err
		}
		reg, err := m.pd.RegMR(s.mem.Bytes(), allRights)
		if err != nil {
			return err
		}
		s.keys[i] = reg.RKey()
		if i == 0 {
			s.lkey = reg.LKey()
		}
		var cq *provider.CQ
		for range simulatedQPs * n {
			if cq == nil || !s.load.oneCQ {
				if cq, err = m.dev.CreateCQ(2*s.load.depth*simulatedQPs*n, nil); err != nil {
					return err
				}
				if i == 0 {
					s.cqs = append(s.cqs, cq)
				}
			}
			q, err := m.pd.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: cq, RecvCQ: cq,
				Caps: qp.Caps{SendWR: s.load.depth, RecvWR: 1, SendSGE: 1, RecvSGE: 1}})
			if err != nil {
				return err
			}
			s.qps[i] = append(s.qps[i], q)
		}
	}
	for i := range s.ends {
		gid, err := s.ends[1-i].dev.QueryGID(1)
		if err != nil {
			return err
		}
		for k, q := range s.qps[i] {
			if err := s.ends[i].bring(q, end{s.qps[1-i][k].Num(), 0, gid[:]}, 20); err != nil {
				return err
			}
		}
	}
	for s.ends[0].dev.Stats().SuperAsking > 0 {
		s.step()
	}
	s.left = make([]int, len(s.qps[0]))
	for i := range s.left {
		s.left[i] = s.load.depth
	}
	return nil
}

// step moves the clock, and all shards make progress whose processors are free.
func (s *simulation) step() {
	s.clock.Advance(tickOfTime)
	for i := range s.ends {
		s.ends[i].dev.Progress()
	}
}

// cpu is the processor of a queue pair's shard, and of the program that uses it.
func (s *simulation) cpu(i int) *processor {
	return s.cpus[int(s.qps[0][i].Num()&0xffff)*len(s.cpus)>>16]
}

// post gives each queue pair what it has room for.
func (s *simulation) post() error {
	for i, q := range s.qps[0] {
		if s.left[i] == 0 || !s.cpu(i).free() {
			continue
		}
		wrs := make([]qp.SendWR, s.left[i])
		for k := range wrs {
			wrs[k] = qp.SendWR{ID: uint64(i), Opcode: qp.WRWrite, Flags: qp.SendSignaled, RKey: s.keys[1], RemoteAddr: uint64(s.mem.Addr()),
				SGL: []qp.SGE{{Addr: uint64(s.mem.Addr()), Length: uint32(s.load.size), LKey: s.lkey}}}
		}
		n, err := q.PostSend(wrs)
		if err != nil {
			return err
		}
		s.left[i] -= n
	}
	return nil
}

// run gives how many messages a second of virtual time there are.
func (s *simulation) run() (float64, error) {
	done := 0
	var wcs [64]qp.WC
	start := s.clock.Now() + int64(warmUp)
	for end := start + int64(simulateFor); s.clock.Now() < end; {
		if err := s.post(); err != nil {
			return 0, err
		}
		s.step()
		for i, cq := range s.cqs {
			if !s.cpu(i).free() {
				continue
			}
			for _, wc := range wcs[:cq.Poll(wcs[:])] {
				if wc.Status != qp.WCSuccess {
					return 0, fmt.Errorf("a WRITE in the simulation: %v", wc.Status)
				}
				s.left[wc.ID]++
				if s.clock.Now() > start {
					done++
				}
			}
		}
	}
	return float64(done) / simulateFor.Seconds(), nil
}

// simulatePart puts all of it into the book. It comes to the same each time.
func simulatePart(b *book) {
	if b.round > 0 {
		return
	}
	for i := range simLoads {
		l := &simLoads[i]
		for _, n := range simulated {
			v, err := simulate(l, n)
			if err == nil {
				b.add(simulatedWho, l.what, n, rate, v)
			}
			b.try("shards", key{Who: simulatedWho, What: l.what, X: n}, err)
		}
	}
}

// drawShards draws how many times as much so many shards do as one.
func (b *book) drawShards(dir string) error {
	cs := []curve{{name: "as many times as much"}}
	for _, n := range simulated {
		cs[0].at = append(cs[0].at, point{float64(n), float64(n)})
	}
	for _, l := range simLoads {
		c := curve{name: l.name}
		one := b.median(k(simulatedWho, l.what, 1, rate))
		for _, n := range simulated {
			if v := b.median(k(simulatedWho, l.what, n, rate)) / one; !math.IsNaN(v) {
				c.at = append(c.at, point{float64(n), v})
			}
		}
		if len(c.at) > 1 {
			cs = append(cs, c)
		}
	}
	if len(cs) == 1 {
		return nil
	}
	return draw(dir, "shards", picture{title: "WRITEs over shards with a processor each, simulated", x: "shards", y: "times that of one",
		ticks: ticks(simulated, plain), curves: cs})
}

// simulate gives the messages a second of a load with n shards.
func simulate(l *simLoad, n int) (float64, error) {
	s, err := newSimulation(l, n)
	if err != nil {
		return 0, err
	}
	v, err := s.run()
	return v, errors.Join(err, s.close())
}
