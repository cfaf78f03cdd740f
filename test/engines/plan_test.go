// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

// zone is a part of a side's memory, by who writes to it:
//
//	source   nobody: SENDs and WRITEs are gathered from it, the peer READs it
//	target   the peer's WRITEs and atomics, in places that overlap; the peer READs it
//	result   the side's own READs and atomics, each to a place of its own
//	landing  the peer's SENDs, each to a place of its own
type zone uint8

const (
	source zone = iota
	target
	result
	landing
	zones
)

const (
	sourceLen = 256 << 10
	targetLen = 384 << 10
	aliases   = 3 // registrations of the same memory with different iovas
	maxSGE    = 4
	maxInline = 64
)

// piece is an element of a list: n bytes at off of a zone, named by one of the
// registrations of the memory.
type piece struct {
	z      zone
	off, n int
	alias  int
}

// planned is a send work request and what must become of it.
type planned struct {
	op     qp.WROpcode
	flags  qp.SendFlags
	list   []piece
	inline []byte
	n      int   // bytes of the message
	remote piece // of the peer, for RDMA and atomics
	imm    uint32
	inv    int // which of the peer's invalidatable keys
	add    uint64
	swap   uint64
	flush  qp.FlushWR
	want   []byte // what the list holds afterwards, for READs and atomics
}

// arrival is a receive work request and the completion it must give.
type arrival struct {
	list []piece
	op   qp.WCOpcode
	n    int
	imm  uint32
	has  qp.WCFlags
	inv  int
	want []byte // what the first n bytes of the list hold then; nil for WRITE with immediate
}

// half is one side's part of a plan.
type half struct {
	sends   []planned
	recvs   []arrival
	mem     [zones][]byte // at the end
	start   [zones][]byte // at the beginning
	invKeys int           // how many invalidatable keys the side has to give away
	reads   []piece       // of this side's READs since its last fence
}

type plan struct {
	half [2]half
}

// mix says what a plan is made of.
type mix struct {
	seed     uint64
	ops      int // of each side
	max      int // bytes of a message
	mtu      qp.MTU
	resident bool // all memory is present and full of something before; else only the source
}

type planner struct {
	*plan
	mix
	r *rand.Rand
}

func newPlan(m mix) *plan {
	p := &planner{plan: new(plan), mix: m, r: rand.New(rand.NewPCG(m.seed, 0x706c616e))}
	for i := range p.half {
		h := &p.half[i]
		h.mem[source] = p.noise(sourceLen)
		h.mem[target] = p.fresh(targetLen)
		h.start[source] = append([]byte(nil), h.mem[source]...)
		h.start[target] = append([]byte(nil), h.mem[target]...)
	}
	for i := range m.ops {
		for k := range p.half {
			p.next(k, i == m.ops-1)
		}
	}
	return p.plan
}

func (p *planner) noise(n int) []byte {
	b := make([]byte, n)
	harness.Fill(b, p.r.Uint64())
	return b
}

// fresh is what memory that nobody has written to holds.
func (p *planner) fresh(n int) []byte {
	if p.resident {
		return p.noise(n)
	}
	return make([]byte, n)
}

// size draws the length of a message: nothing, a few bytes, around multiples of
// the MTU, or anything.
func (p *planner) size() int {
	mtu := p.mtu.Bytes()
	n := 0
	switch p.r.IntN(20) {
	case 0:
	case 1, 2, 3, 4:
		n = 1 + p.r.IntN(maxInline)
	case 5, 6, 7, 8:
		n = 1 + p.r.IntN(mtu)
	case 9, 10, 11, 12:
		n = (1+p.r.IntN(5))*mtu - 1 + p.r.IntN(3)
	case 13, 14, 15, 16, 17, 18:
		n = p.r.IntN(16 << 10)
	default:
		n = p.r.IntN(p.max + 1)
	}
	return min(n, p.max)
}

// split cuts n bytes into the lengths of a list.
func (p *planner) split(n int) []int {
	if n == 0 && p.r.IntN(2) == 0 {
		return nil
	}
	var out []int
	for left := 1 + p.r.IntN(maxSGE); left > 1; left-- {
		k := p.r.IntN(n + 1)
		out, n = append(out, k), n-k
	}
	return append(out, n)
}

func (p *planner) at(z zone, off, n int) piece {
	return piece{z: z, off: off, n: n, alias: p.r.IntN(aliases)}
}

// from draws a gather list in side k's source and gives its bytes.
func (p *planner) from(k, n int) (list []piece, data []byte) {
	for _, n := range p.split(n) {
		off := p.r.IntN(sourceLen - n + 1)
		list = append(list, p.at(source, off, n))
		data = append(data, p.half[k].mem[source][off:off+n]...)
	}
	return list, data
}

// places makes a scatter list of new places at the end of a zone, some adjacent,
// some pages apart, and not always in rising order.
func (p *planner) places(k int, z zone, n int) (list []piece) {
	h := &p.half[k]
	for _, n := range p.split(n) {
		gap := 0
		switch p.r.IntN(4) {
		case 0:
			gap = p.r.IntN(64)
		case 1:
			gap = p.r.IntN(3 * 4096)
		}
		off := len(h.mem[z]) + gap
		list = append(list, p.at(z, off, n))
		b := p.fresh(gap + n)
		h.mem[z], h.start[z] = append(h.mem[z], b...), append(h.start[z], b...)
	}
	return list
}

// scatter writes data to a list of side k's memory in the model.
func (p *planner) scatter(k int, list []piece, data []byte) {
	for _, s := range list {
		data = data[copy(p.half[k].mem[s.z][s.off:s.off+s.n], data):]
	}
}

func overlap(a, b piece) bool {
	return a.z == b.z && a.off < b.off+b.n && b.off < a.off+a.n
}

var opcodes = []qp.WROpcode{qp.WRSend, qp.WRSendImm, qp.WRWrite, qp.WRWriteImm, qp.WRRead, qp.WRRead,
	qp.WRAtomicCmpSwap, qp.WRAtomicFetchAdd, qp.WRSendInv, qp.WRSend, qp.WRWrite,
	qp.WRAtomicWrite, qp.WRFlush}

// next plans one work request of side k.
func (p *planner) next(k int, last bool) {
	me, peer := &p.half[k], &p.half[1-k]
	w := planned{op: opcodes[p.r.IntN(len(opcodes))], imm: p.r.Uint32(), add: p.r.Uint64(), swap: p.r.Uint64()}
	w.n = p.size()
	if last || p.r.IntN(2) == 0 || len(me.sends)%4 == 3 {
		w.flags |= qp.SendSignaled
	}
	if p.r.IntN(16) == 0 {
		w.flags |= qp.SendFence
	}
	if p.r.IntN(4) == 0 {
		w.flags |= qp.SendSolicited
	}
	var data []byte
	switch w.op {
	case qp.WRRead:
		z, size := source, sourceLen
		if p.r.IntN(2) == 0 {
			z, size = target, targetLen
		}
		w.remote = p.at(z, p.r.IntN(size-w.n+1), w.n)
		w.list = p.places(k, result, w.n)
		w.want = append([]byte{}, peer.mem[z][w.remote.off:w.remote.off+w.n]...)
		p.scatter(k, w.list, w.want)
	case qp.WRAtomicCmpSwap, qp.WRAtomicFetchAdd:
		w.n = 8
		// Few words, so that atomics meet each other, and WRITEs.
		w.remote = p.at(target, 8*p.r.IntN(8)+4096*p.r.IntN(8), 8)
		w.list = p.places(k, result, 8)
		if len(w.list) == 0 {
			panic("no list for 8 bytes")
		}
		word := peer.mem[target][w.remote.off:][:8]
		old := binary.NativeEndian.Uint64(word)
		w.want = append([]byte{}, word...)
		p.fence(me, &w)
		if w.op == qp.WRAtomicFetchAdd {
			binary.NativeEndian.PutUint64(word, old+w.add)
		} else {
			if p.r.IntN(2) == 0 {
				w.add = old // the compare value
			}
			if w.add == old {
				binary.NativeEndian.PutUint64(word, w.swap)
			}
		}
		p.scatter(k, w.list, w.want)
	case qp.WRFlush:
		w.remote = p.at(target, p.r.IntN(targetLen-w.n+1), w.n)
		w.flush = qp.FlushWR{Placement: wire.FlushGlobal, Selectivity: uint8(p.r.IntN(2)), Length: uint32(w.n)}
		w.n = 0
	default:
		if w.op == qp.WRAtomicWrite {
			w.n = wire.AtomicWriteLen
		}
		if w.n <= maxInline && p.r.IntN(2) == 0 {
			w.flags |= qp.SendInline
			w.inline = p.noise(w.n)
			data = w.inline
		} else {
			w.list, data = p.from(k, w.n)
		}
	}
	switch w.op {
	case qp.WRAtomicWrite:
		w.remote = p.at(target, 8*p.r.IntN(8)+4096*p.r.IntN(8), w.n)
		p.fence(me, &w)
		copy(peer.mem[target][w.remote.off:], data)
	case qp.WRWrite, qp.WRWriteImm:
		w.remote = p.at(target, p.r.IntN(targetLen-w.n+1), w.n)
		p.fence(me, &w)
		copy(peer.mem[target][w.remote.off:], data)
	}
	a := arrival{n: w.n, imm: w.imm, op: qp.WCRecv}
	switch w.op {
	case qp.WRSendImm:
		a.has = qp.WCWithImm
	case qp.WRSendInv:
		a.has, w.inv, a.inv = qp.WCWithInv, peer.invKeys, peer.invKeys
		peer.invKeys++
	case qp.WRWriteImm:
		a.has, a.op = qp.WCWithImm, qp.WCRecvRDMAImm
	}
	switch w.op {
	case qp.WRSend, qp.WRSendImm, qp.WRSendInv:
		room := w.n
		if p.r.IntN(2) == 0 {
			room += p.r.IntN(300)
		}
		a.list = p.places(1-k, landing, room)
		a.want = data
		p.scatter(1-k, a.list, data)
		peer.recvs = append(peer.recvs, a)
	case qp.WRWriteImm:
		peer.recvs = append(peer.recvs, a)
	}
	if w.flags&qp.SendFence != 0 {
		me.reads = nil
	}
	if w.op == qp.WRRead {
		me.reads = append(me.reads, w.remote)
	}
	me.sends = append(me.sends, w)
}

// fence sets the flag on a request that changes what a READ before it may still be
// reading, or be asked to read again: only the fence orders the two (IBA 10.8.3.3).
func (p *planner) fence(h *half, w *planned) {
	for _, r := range h.reads {
		if overlap(r, w.remote) {
			w.flags |= qp.SendFence
		}
	}
}

// layout says where the zones lie in a side's memory. The source is a page apart,
// so that filling it touches nothing else; the others share pages.
func (h *half) layout() (base [zones]int, size int) {
	for z := range zones {
		base[z] = size
		size += len(h.mem[z])
		if z == source {
			size = (size + 4095) &^ 4095
		} else {
			size = (size + 7) &^ 7
		}
	}
	return base, size
}
