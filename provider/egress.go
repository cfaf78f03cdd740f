// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/wire"
)

const (
	// txBytes and txRuns bound what waits to be written.
	txBytes   = 1 << 20
	txRuns    = 256
	loopSlots = 64
	// flushAt packets are written without waiting for the iteration's end, so that
	// the peer works on them while the next ones are made. Runs that are full do not
	// wait for as many.
	flushAt = 32
	// superFlushAt is the same where they go as super-frames.
	superFlushAt = 128
	// outAt is how many frames and super-frames are written by one call.
	outAt    = 32
	headRoom = 64 // for Ethernet, IP and UDP header
)

// egress queues packets for the TAP, and for ourselves those whose destination is
// our own MAC. It belongs to the holder of the baton. It is the qp.Egress of all
// QPs of the shard.
//
// Packets that can leave as one super-frame are made next to each other, behind one
// Ethernet, IP and UDP header: a run.
type egress struct {
	s   *shard
	mem *mr.Memory
	buf []byte
	pos int // of buf, where what is made next goes to
	// runs[head:tail] wait to be written. They have waiting packets.
	runs    []run
	head    int
	tail    int
	waiting int
	// lent has the payloads that are elsewhere, of all runs.
	lent []lent
	// blocked: the device took less than it was offered; QPs wait.
	blocked bool

	// The last run takes further packets if it is open: of this path, with this prefix of
	// their ICRCs, and most of them at most.
	open     bool
	openPath wire.Path
	prefix   wire.Prefix
	most     int

	out    []tap.Frame // what is written
	pieces [][]byte
	views  [][]byte
	sealed int         // of the first run, how many packets are whole
	seal   func()      // sealFirst, which is made once
	super  tap.Offload // what kinds of super-frames are made
	tested tap.Offload // those that the kernel has taken at start
	dests  dests
	// Of the packets being made: bold, if who sends them notices that super-frames are lost
	// and can send again; shy, if this is the last time; filling, if they are a question (probe.go).
	bold, shy, filling bool
	trial              bool // the last run takes bold packets only

	loop     [][]byte // ring of packets to ourselves
	loopHead uint32
	loopTail uint32

	path   *wire.Path // of the packet between Begin and End
	cur    []byte     // its bytes; those of a frame between BeginFrame and EndFrame
	self   bool       // it goes to loop
	both   bool       // it goes to loop, too: QPs of ours are in its group
	joins  bool       // it goes to the last run
	borrow lent       // its payload, if that is elsewhere
	ipid   uint16
	// Packets of QPs, ever: all of them and their bytes, and those to multicast groups.
	sent, sentBytes, sentGroup uint64

	flushAt  int
	frame    int // the longest
	maxFrame int // of RAW_PACKET QPs, see steer.go
}

// run is what is written as one frame: a frame as it is, or packets of one path that are
// all as long as the first but for the last, which may be shorter.
type run struct {
	at, end int // of buf: headers, packets without the payloads that are lent
	h       int // length of the headers; 0: a frame as it is
	n       int // packets
	first   int // length of a packet from the BTH to the ICRC
	size    int // of all
	id      uint16
	gone    int // how many packets it had before these
	lent    int // index of the first payload that is elsewhere
	lents   int // how many there are
}

// lent is a payload that is read from a region when its packet leaves.
type lent struct {
	region *mr.Region
	iova   uint64
	n      int // 0: none
	packet int // of the run, counted from its first ever
	start  int // of buf: the packet; at is where the payload would be, and the ICRC is
	at     int
	id     uint16
	prefix wire.Prefix
}

func (e *egress) init(s *shard, frame int) error {
	e.s, e.frame = s, frame
	e.maxFrame = s.dev.MTU() + tap.EthHeaderLen
	e.super = s.dev.Offloads() & superKinds
	e.flushAt = flushAt
	if e.super != 0 {
		e.flushAt = superFlushAt
	}
	e.out, e.runs = make([]tap.Frame, outAt), make([]run, txRuns)
	e.pieces, e.views = make([][]byte, tap.MaxPieces), make([][]byte, tap.MaxSegments)
	e.lent = make([]lent, 0, txRuns)
	e.seal = e.sealFirst
	var err error
	if e.mem, err = mr.Alloc(txBytes + loopSlots*frame); err != nil {
		return fmt.Errorf("send buffers: %w", err)
	}
	b := e.mem.Bytes()
	e.buf, b = b[:txBytes:txBytes], b[txBytes:]
	e.loop = make([][]byte, loopSlots)
	for i := range e.loop {
		e.loop[i] = b[i*frame : (i+1)*frame : (i+1)*frame]
	}
	return nil
}

func (e *egress) close() error { return e.mem.Close() }

// room says whether n more bytes, of a run of their own, can be queued.
func (e *egress) room(n int) bool {
	if e.pos+n <= len(e.buf) && e.tail < len(e.runs) && len(e.lent) < cap(e.lent) {
		return true
	}
	e.flush()
	if e.blocked {
		e.compact()
	}
	if e.pos+n > len(e.buf) || e.tail == len(e.runs) || len(e.lent) == cap(e.lent) {
		e.blocked = true
		return false
	}
	return true
}

// slot is room for a frame of n bytes for the TAP; nil: the queue and the
// device are full.
func (e *egress) slot(n int) []byte {
	if n > e.frame || !e.room(n) {
		return nil
	}
	return e.buf[e.pos : e.pos+n : e.pos+n]
}

// Begin reserves a packet of n bytes from the BTH to the ICRC on a path; nil when
// there is no room.
func (e *egress) Begin(path *wire.Path, n int) []byte {
	h := path.HdrLen()
	e.path, e.self, e.borrow.n = path, path.DstMAC == e.s.d.mac, 0
	e.both = path.DstMAC[0]&1 != 0 && e.s.mc.joined(path.Dst)
	if e.self || e.both {
		b := e.loop[e.loopTail%loopSlots]
		if e.loopTail-e.loopHead == loopSlots || h+n > cap(b) {
			return nil
		}
		if e.self {
			e.cur = b[h : h+n]
			return e.cur
		}
	}
	if h+n > e.frame || !e.room(h+n) {
		return nil
	}
	e.joins = e.canJoin(path, n)
	at := e.pos
	if !e.joins {
		at += h
	}
	e.cur = e.buf[at : at+n : at+n]
	return e.cur
}

// canJoin says whether a packet can go to the last run.
func (e *egress) canJoin(path *wire.Path, n int) bool {
	if !e.open || e.shy || e.trial && !e.bold {
		return false
	}
	r := &e.runs[e.tail-1]
	return n <= r.first && r.size+n+r.h <= wire.MaxSuper && *path == e.openPath
}

// Borrow has the packet begun last read its payload, n bytes in front of the ICRC, from a
// region when it leaves. false: it has to be copied.
func (e *egress) Borrow(r *mr.Region, iova uint64, n int) bool {
	if e.self || e.both || n&3 != 0 || e.super == 0 || e.watched() {
		return false
	}
	e.borrow.region, e.borrow.iova, e.borrow.n = r, iova, n
	return true
}

// watched says whether somebody wants to see packets before they leave.
func (e *egress) watched() bool { return e.s.d.sniffing.Load() }

// show lets them see a frame.
func (e *egress) show(b []byte) {
	if e.s.id != 0 {
		e.s.handOver(e.s.d.sh, b, handSent)
		return
	}
	e.s.sniff(b)
}

// End completes the packet begun last and queues it.
func (e *egress) End() {
	h, n := e.path.HdrLen(), len(e.cur)
	id := e.ipid
	e.ipid++
	e.sent++
	e.sentBytes += uint64(h + n)
	e.sentGroup += uint64(e.path.DstMAC[0] & 1)
	if e.self {
		b := e.loop[e.loopTail%loopSlots][:h+n]
		e.path.Put(b, n, id)
		wire.Seal(b, wire.EthLen)
		e.pushLoop(b)
		return
	}
	e.s.cnt.TxFrames++
	e.s.cnt.TxBytes += uint64(h + n)
	if !e.joins {
		e.begin(n, id)
	}
	r := &e.runs[e.tail-1]
	p := e.prefix
	if n < r.first {
		var head [headRoom]byte
		copy(head[:h], e.buf[r.at:])
		wire.PutSingle(head[:h], n, id)
		p = wire.PrefixOf(head[:h])
	}
	at := r.end
	if k := e.borrow.n; k > 0 {
		b := &e.borrow
		b.packet, b.start, b.at, b.id, b.prefix = r.n, at, at+n-wire.ICRCLen-k, id, p
		e.lent = append(e.lent, *b)
		r.lents++
		r.end = b.at + wire.ICRCLen
	} else {
		p.Seal(e.cur, id)
		r.end = at + n
	}
	e.pos = r.end
	r.n++
	r.size += n
	if r.n == 2 {
		e.confirm()
	}
	e.waiting++
	if e.both {
		b := e.loop[e.loopTail%loopSlots][:h+n]
		e.path.Put(b, n, id)
		copy(b[h:], e.cur)
		e.pushLoop(b)
	}
	if e.watched() {
		e.show(e.buf[r.at:r.end])
	}
	full := r.n == e.most || r.size+r.first+r.h > wire.MaxSuper
	e.open = !full && n == r.first
	if (full && e.most > 1 || e.waiting >= e.flushAt) && !e.blocked {
		e.flush()
	}
}

// begin makes a run that begins with the packet in hand.
func (e *egress) begin(n int, id uint16) {
	h := e.path.HdrLen()
	waiting := e.head < e.tail && *e.path == e.openPath
	e.runs[e.tail] = run{at: e.pos, end: e.pos + h, h: h, first: n, id: id, lent: len(e.lent)}
	e.tail++
	head := e.buf[e.pos : e.pos+h]
	e.path.Put(head, n, id)
	e.prefix, e.openPath = wire.PrefixOf(head), *e.path
	e.most = 1
	if e.super.Has(familyOf(h)) && !e.watched() && !e.both && e.gathers(e.path, waiting) {
		e.most = tap.MaxSegments
	}
}

// pushLoop queues the loop's next slot, filled with b.
func (e *egress) pushLoop(b []byte) {
	e.loop[e.loopTail%loopSlots] = b
	e.loopTail++
	e.s.cnt.LoopPackets++
}

// Cancel gives back what Begin reserved.
func (e *egress) Cancel() { e.cur = nil }

// push queues the frame that slot returned last.
func (e *egress) push(b []byte) {
	if e.watched() {
		e.show(b)
	}
	e.queue(b)
}

func (e *egress) queue(b []byte) {
	e.s.cnt.TxFrames++
	e.s.cnt.TxBytes += uint64(len(b))
	e.open = false
	e.runs[e.tail] = run{at: e.pos, end: e.pos + len(b), n: 1, first: len(b), size: len(b), lent: len(e.lent)}
	e.tail++
	e.pos += len(b)
	if e.waiting++; e.waiting >= e.flushAt && !e.blocked {
		e.flush()
	}
}

// control gives room for a frame of ARP, ND or ICMP, nil if there is none: such
// frames may be lost. push queues it.
func (e *egress) control(n int) []byte {
	b := e.slot(n)
	if b == nil {
		e.s.cnt.ControlDropped++
	}
	return b
}

func (e *egress) loopLen() int { return int(e.loopTail - e.loopHead) }

func (e *egress) loopFront() []byte { return e.loop[e.loopHead%loopSlots] }

func (e *egress) loopPop() { e.loopHead++ }

// backlog says whether packets wait for the device to take them.
func (e *egress) backlog() bool { return e.head < e.tail }

// drop forgets what is queued.
func (e *egress) drop() {
	e.s.cnt.TxDropped += uint64(e.waiting)
	e.reset()
}

func (e *egress) reset() {
	clear(e.lent)
	e.head, e.tail, e.pos, e.waiting, e.lent = 0, 0, 0, 0, e.lent[:0]
	e.open, e.blocked = false, false
}

// compact moves what waits to the front.
func (e *egress) compact() {
	if e.head == 0 {
		return
	}
	from, lent := e.runs[e.head].at, e.runs[e.head].lent
	e.pos = copy(e.buf, e.buf[from:e.pos])
	e.tail = copy(e.runs, e.runs[e.head:e.tail])
	e.head = 0
	k := copy(e.lent, e.lent[lent:])
	clear(e.lent[k:])
	e.lent = e.lent[:k]
	for i := range e.runs[:e.tail] {
		r := &e.runs[i]
		r.at, r.end, r.lent = r.at-from, r.end-from, r.lent-lent
	}
	for i := range e.lent {
		e.lent[i].start -= from
		e.lent[i].at -= from
	}
}

// Settle sends what has borrowed payload, or forgets it: whose memory it is may get it back.
func (e *egress) Settle() {
	if len(e.lent) == 0 {
		return
	}
	e.flush()
	kept := e.head
	for i := e.head; i < e.tail; i++ {
		if r := e.runs[i]; r.lents > 0 {
			e.waiting -= r.n
			e.s.cnt.TxDropped += uint64(r.n)
		} else {
			e.runs[kept] = r
			kept++
		}
	}
	if e.tail = kept; e.head == e.tail {
		e.reset()
	}
}
