// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// world is two QPs joined by a wire of virtual time: what a QP sends arrives
// wireDelay later, unless the test's filter drops it.
type world struct {
	t      *testing.T
	now    int64
	wire   []flight
	filter func(p *wire.Packet, from *node) bool // true: deliver
	a, b   *node
	sent   []string // names of the packets sent, in order
	pace   int64    // how long a packet takes to leave, in ns; 0: no time at all
	delay  int64    // of the link, beyond wireDelay
}

type flight struct {
	at    int64
	to    *node
	frame []byte
	do    func() // instead of a packet: what happens at that time
}

const wireDelay = int64(5 * time.Microsecond)

// linkQueue is how many packets wait for a link that has a pace; then it takes no more.
const linkQueue = 16

// node is a QP with all it needs.
type node struct {
	w         *world
	peer      *node
	env       *Env
	qp        *QP
	cq        *CQ
	mem       block
	reg       *mr.Region
	path      wire.Path
	buf       []byte // reserved by Begin
	free      int64  // when all packets have left that wait for the link
	events    []EventType
	suspected int // how often losses were told of
	wcs       []WC
	srqs      map[uint32]*SRQ // of XRC
}

func (n *node) Begin(p *wire.Path, size int) []byte {
	if n.full() {
		return nil
	}
	h := p.HdrLen()
	n.buf = bytes.Repeat([]byte{0xa5}, h+size)
	p.Put(n.buf, size, 7)
	return n.buf[h:]
}

// full says whether the node's link takes no packet now.
func (n *node) full() bool { return n.free > n.w.now+(linkQueue-1)*n.w.pace }

func (n *node) Cancel() { n.buf = nil }

// Borrow reads at once what leaves at once.
func (n *node) Borrow(r *mr.Region, iova uint64, size int) bool {
	end := len(n.buf) - wire.ICRCLen
	if err := n.env.Mem.Read(r, iova, n.buf[end-size:end]); err != nil {
		n.w.t.Errorf("what was lent is not there: %v", err)
	}
	return true
}

func (n *node) Settle() {}

func (n *node) Suspect(*wire.Path) { n.suspected++ }

func (n *node) End() {
	w := n.w
	n.env.Mem.Shut() // as an egress does that writes
	wire.Seal(n.buf, wire.EthLen)
	var p wire.Packet
	if err := wire.Parse(n.buf, &p); err != nil {
		w.t.Fatalf("sent a packet that does not parse: %v", err)
	}
	if !p.ICRCValid() {
		w.t.Fatal("sent a packet with a wrong ICRC")
	}
	w.sent = append(w.sent, p.Info.Name)
	n.free = max(n.free, w.now) + w.pace // also of one that gets lost
	if w.filter == nil || w.filter(&p, n) {
		w.fly(flight{at: n.free + wireDelay + w.delay, to: n.peer, frame: n.buf})
	}
	n.buf = nil
}

// fly puts something among what is under way, behind all that arrives as early.
func (w *world) fly(f flight) {
	i := len(w.wire)
	for i > 0 && w.wire[i-1].at > f.at {
		i--
	}
	w.wire = slices.Insert(w.wire, i, f)
}

// block is memory whose address is a multiple of something, for runs that must not depend
// on where it happens to lie.
type block struct {
	*mr.Memory
	off, n int
}

func newBlock(n, align int) (block, error) {
	m, err := mr.Alloc(n + align)
	if err != nil {
		return block{}, err
	}
	b := block{m, 0, n}
	if align > 0 {
		b.off = -int(m.Addr()) & (align - 1)
	}
	return b, nil
}

func (b block) Bytes() []byte { return b.Memory.Bytes()[b.off:][:b.n:b.n] }

func (b block) Addr() uintptr { return b.Memory.Addr() + uintptr(b.off) }

// setup is what a test may want otherwise than usual.
type setup struct {
	typ      Type // RC
	qkey     uint32
	mtu      MTU
	psn      wire.PSN
	timeout  uint8
	retry    uint8
	rnrRetry uint8
	rnrTimer uint8
	rdAtomic uint8
	access   mr.Access
	srq      *SRQ
	caps     Caps
	memory   int
	align    int // of the memory; 0: as it comes
	rts      bool
	space    *mr.Space // the process's
}

func usual() setup {
	return setup{typ: TypeRC, qkey: 0x01234567, mtu: MTU1024, psn: 0xfffff0, timeout: 14, retry: 7, rnrRetry: 7, rnrTimer: 12, rdAtomic: 16,
		access: mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead | mr.RemoteAtomic,
		caps:   Caps{SendWR: 128, RecvWR: 128, SendSGE: 4, RecvSGE: 4, Inline: 256}, memory: 1 << 20, rts: true}
}

const allAccess = mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead | mr.RemoteAtomic

func newWorld(t *testing.T, s setup) *world {
	w := &world{t: t}
	w.a, w.b = w.node(s, 1), w.node(s, 2)
	w.a.peer, w.b.peer = w.b, w.a
	w.a.connect(s)
	w.b.connect(s)
	return w
}

func (w *world) node(s setup, i byte) *node {
	t := w.t
	n := &node{w: w}
	n.path = wire.Path{SrcMAC: [6]byte{2, 0, 0, 0, 0, i}, DstMAC: [6]byte{2, 0, 0, 0, 0, 3 - i},
		Src: netip.AddrFrom4([4]byte{10, 0, 0, i}), Dst: netip.AddrFrom4([4]byte{10, 0, 0, 3 - i}), SrcPort: 0xc000, HopLimit: 64}
	space := s.space
	if space == nil {
		space = mr.Process()
	}
	n.env = &Env{Keys: mr.NewTable(space), Mem: space.NewAccessor(), Out: n, Now: func() int64 { return w.now },
		Event: func(_ *QP, ev EventType) { n.events = append(n.events, ev) }, Stats: &Stats{},
		AH: func(_ *QP, i uint32) *wire.Path {
			if i != goodAH {
				return nil
			}
			return &n.path
		},
		SRQ: func(num uint32) *SRQ { return n.srqs[num] }}
	t.Cleanup(func() { n.env.Mem.Close() })
	var err error
	if n.cq, err = NewCQ(4096, nil, func() { t.Error("CQ overflow") }); err != nil {
		t.Fatal(err)
	}
	typ := s.typ
	if typ == TypeXRCSend && i == 2 {
		typ = TypeXRCRecv
	}
	n.qp, err = New(n.env, Init{Type: typ, XRCD: testXRCD, Num: wire.QPN(0x100 + int(i)), PD: 1, SendCQ: n.cq, RecvCQ: n.cq, SRQ: s.srq, Caps: s.caps})
	if err != nil {
		t.Fatal(err)
	}
	if n.mem, err = newBlock(s.memory, s.align); err != nil {
		t.Fatal(err)
	}
	n.reg, err = n.env.Keys.Register(mr.RegAttr{PD: 1, Addr: n.mem.Addr(), Length: uint64(s.memory), Access: allAccess})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.qp.Destroy(); err != nil {
			t.Error(err)
		}
		n.cq.Close()
		if err := n.reg.Deregister(); err != nil {
			t.Error(err)
		}
		n.mem.Close()
	})
	return n
}

var testLimits = Limits{MTU: MTU4096, MaxRdAtomic: 128}

func (n *node) modify(a Attr, m AttrMask) {
	n.w.t.Helper()
	if err := n.qp.Modify(&a, m, testLimits); err != nil {
		n.w.t.Fatal(err)
	}
}

func (n *node) connect(s setup) {
	if s.typ == TypeXRCSend {
		n.connectXRC(s)
		return
	}
	if s.typ != TypeRC {
		n.connectUnreliable(s)
		return
	}
	n.modify(Attr{State: StateInit, Port: 1, Access: s.access}, AttrState|AttrPKeyIndex|AttrPort|AttrAccess)
	n.modify(Attr{State: StateRTR, Path: n.path, PathMTU: s.mtu, DestQPN: n.peer.qp.Num(), RQPSN: s.psn, MaxDestRdAtomic: s.rdAtomic, MinRNRTimer: s.rnrTimer},
		AttrState|AttrAV|AttrPathMTU|AttrDestQPN|AttrRQPSN|AttrMaxDestRdAtomic|AttrMinRNRTimer)
	if s.rts {
		n.toRTS(s)
	}
}

func (n *node) toRTS(s setup) {
	n.modify(Attr{State: StateRTS, Timeout: s.timeout, RetryCnt: s.retry, RNRRetry: s.rnrRetry, SQPSN: s.psn, MaxRdAtomic: s.rdAtomic},
		AttrState|AttrTimeout|AttrRetryCnt|AttrRNRRetry|AttrSQPSN|AttrMaxRdAtomic)
}

// step delivers what is due or, if nothing is, moves time on to the next event
// before limit. It says false when nothing will happen any more.
func (w *world) step(limit int64) bool {
	moved, next := false, Never
	for len(w.wire) > 0 && w.wire[0].at <= w.now {
		f := w.wire[0]
		w.wire = w.wire[1:]
		moved = true
		if f.do != nil {
			f.do()
			continue
		}
		var p wire.Packet
		if err := wire.Parse(f.frame, &p); err != nil {
			w.t.Fatal(err)
		}
		f.to.qp.Handle(&p)
	}
	for _, n := range []*node{w.a, w.b} {
		if n.qp.Deadline() <= w.now {
			n.qp.Tick()
			moved = true
		}
		n.qp.EndBatch()
		more := n.qp.Run(64)
		for more && !n.full() {
			more = n.qp.Run(64)
		}
		if more {
			next = min(next, n.free-(linkQueue-1)*w.pace)
		}
		var wcs [16]WC
		for {
			k := n.cq.Poll(wcs[:])
			n.wcs = append(n.wcs, wcs[:k]...)
			if k == 0 {
				break
			}
			moved = true
		}
	}
	if moved {
		return true
	}
	next = min(next, w.a.qp.Deadline(), w.b.qp.Deadline())
	if len(w.wire) > 0 {
		next = min(next, w.wire[0].at)
	}
	if next > limit {
		return false
	}
	w.now = max(w.now, next)
	return true
}

// run goes on until nothing happens any more.
func (w *world) run() {
	w.t.Helper()
	for i := 0; w.step(Never - 1); i++ {
		if i > 2_000_000 {
			w.t.Fatal("no end: livelock")
		}
	}
}

// sge names n bytes at off of the node's memory.
func (n *node) sge(off, length int) SGE {
	return SGE{uint64(n.mem.Addr()) + uint64(off), uint32(length), n.reg.LKey()}
}

func (n *node) sgl(off, length int) []SGE { return []SGE{n.sge(off, length)} }

func (n *node) post(wrs ...SendWR) {
	n.w.t.Helper()
	if k, err := n.qp.PostSend(wrs); err != nil {
		n.w.t.Fatalf("post %d: %v", k, err)
	}
}

func (n *node) recv(wrs ...RecvWR) {
	n.w.t.Helper()
	if _, err := n.qp.PostRecv(wrs); err != nil {
		n.w.t.Fatal(err)
	}
}

// fill puts a pattern into n's memory.
func (n *node) fill(seed uint64) []byte {
	b := n.mem.Bytes()
	r := rand.NewChaCha8([32]byte{byte(seed)})
	r.Read(b)
	return b
}

// want checks the completions of a node: ID and status, in order.
func (n *node) want(ws ...WC) {
	n.w.t.Helper()
	if len(n.wcs) != len(ws) {
		n.w.t.Fatalf("%d completions, want %d: %+v", len(n.wcs), len(ws), n.wcs)
	}
	for i, w := range ws {
		g := n.wcs[i]
		if g.ID != w.ID || g.Status != w.Status || g.Opcode != w.Opcode && w.Status == WCSuccess {
			n.w.t.Fatalf("completion %d: %d %v %d, want %d %v %d", i, g.ID, g.Status, g.Opcode, w.ID, w.Status, w.Opcode)
		}
	}
}

// remote fills in the peer's memory as target.
func (n *node) remote(wr SendWR, off int) SendWR {
	wr.RemoteAddr = uint64(n.peer.mem.Addr()) + uint64(off)
	wr.RKey = n.peer.reg.RKey()
	return wr
}
