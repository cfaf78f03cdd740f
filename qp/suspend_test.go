// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// ms is a millisecond of virtual time.
const ms = int64(time.Millisecond)

// runTo lets the world run until a time.
func (w *world) runTo(at int64) {
	w.t.Helper()
	for i := 0; w.step(at); i++ {
		if i > 2_000_000 {
			w.t.Fatal("no end: livelock")
		}
	}
	w.now = max(w.now, at)
}

// suspending gives both nodes regions that allow all there is.
func suspending(t *testing.T, s setup) *world {
	s.access |= mr.FlushGlobal
	if s.caps.SendWR != 0 {
		s.caps.SendWR, s.caps.RecvWR = 1024, 1024
	}
	w := newWorld(t, s)
	for _, n := range []*node{w.a, w.b} {
		if err := n.reg.Deregister(); err != nil {
			t.Fatal(err)
		}
		var err error
		n.reg, err = n.env.Keys.Register(mr.RegAttr{PD: 1, Addr: n.mem.Addr(), Length: uint64(s.memory), Access: allAccess | mr.FlushGlobal | mr.MWBind})
		if err != nil {
			t.Fatal(err)
		}
	}
	if s.typ == TypeXRCSend {
		w.b.srqs = map[uint32]*SRQ{}
		w.b.addSRQ(3, 1, testXRCD, w.b.cq)
	}
	return w
}

func (n *node) suspend() {
	n.w.t.Helper()
	if err := n.reg.Suspend(); err != nil {
		n.w.t.Fatal(err)
	}
}

// resume resumes and does what a device does when it is told.
func (n *node) resume() {
	n.w.t.Helper()
	if err := n.reg.Resume(); err != nil {
		n.w.t.Fatal(err)
	}
	n.w.a.qp.Wake()
	n.w.b.qp.Wake()
}

// receive posts a receive, to the SRQ if there is one.
func (n *node) receive(wr RecvWR) {
	if len(n.srqs) > 0 {
		n.recvSRQ(3, wr)
		return
	}
	n.recv(wr)
}

// suspendOp is an operation under suspension: what is posted, and what must be so then.
type suspendOp struct {
	name   string
	op     WROpcode
	length int
	local  bool // names memory of the requester
	remote bool // and of the responder
}

func suspendOps(typ Type) []suspendOp {
	ops := []suspendOp{
		{"SEND", WRSend, 50_000, true, true}, {"SEND_IMM", WRSendImm, 500, true, true},
		{"WRITE", WRWrite, 50_000, true, true}, {"WRITE short", WRWrite, 9, true, true}, {"WRITE_IMM", WRWriteImm, 50_000, true, true},
		{"READ", WRRead, 200_000, true, true}, {"READ short", WRRead, 100, true, true},
		{"FETCH_ADD", WRAtomicFetchAdd, 8, true, true}, {"CMP_SWAP", WRAtomicCmpSwap, 8, true, true},
		{"ATOMIC_WRITE", WRAtomicWrite, 8, true, true}, {"FLUSH", WRFlush, 0, false, true},
	}
	switch typ {
	case TypeUC:
		return []suspendOp{ops[0], ops[1], ops[2], ops[3], ops[4]}
	case TypeUD:
		return []suspendOp{{"SEND", WRSend, 900, true, true}, ops[1]}
	}
	return ops
}

// midst is how many packets are sent before the operation is in its midst.
func (o *suspendOp) midst() int {
	if o.length > 10_000 {
		return 20
	}
	return 2 // the answer is on its way
}

// suspendAfter suspends a node's region when so many packets were sent, and takes down
// what is in its memory then.
func (w *world) suspendAfter(n *node, packets int) (before *[]byte) {
	before = new([]byte)
	sent := 0
	suspend := func() {
		n.suspend()
		*before = slices.Clone(n.mem.Bytes())
	}
	if packets == 0 {
		suspend()
		return before
	}
	w.filter = func(*wire.Packet, *node) bool {
		if sent++; sent == packets {
			suspend()
		}
		return true
	}
	return before
}

// begin fills memory, posts the operation, and gives a function that checks its effect.
func (o *suspendOp) begin(w *world, id uint64) (wr SendWR, check func()) {
	t, a, b := w.t, w.a, w.b
	mine, theirs := slices.Clone(a.fill(id+1)), slices.Clone(b.fill(id+2))
	var wants []byte // of b's memory, from 8192 on
	wr = a.remote(SendWR{ID: id, Opcode: o.op, Flags: SendSignaled, CompareAdd: 5, Swap: 77, RemoteSRQN: 3}, 8192)
	if o.length > 0 {
		wr.SGL = a.sgl(4096, o.length)
	}
	src := mine[4096 : 4096+o.length]
	switch o.op {
	case WRSend, WRSendImm:
		off := 0
		if a.qp.Type() == TypeUD {
			off = wire.GRHLen
			wr.AH, wr.RemoteQPN, wr.RemoteQKey = goodAH, b.qp.Num(), 0x01234567
		}
		b.receive(RecvWR{ID: id, SGL: []SGE{b.sge(8192-off, 100+off), b.sge(8292, 60_000)}})
		wants = src
	case WRWriteImm:
		b.receive(RecvWR{ID: id})
		wants = src
	case WRWrite, WRAtomicWrite:
		wants = src
	case WRAtomicFetchAdd:
		wants = binary.NativeEndian.AppendUint64(nil, binary.NativeEndian.Uint64(theirs[8192:])+5)
	case WRAtomicCmpSwap:
		wr.CompareAdd = binary.NativeEndian.Uint64(theirs[8192:])
		wants = binary.NativeEndian.AppendUint64(nil, 77)
	case WRFlush:
		wr.Flush = FlushWR{wire.FlushGlobal, wire.FlushRange, 4096}
	}
	return wr, func() {
		t.Helper()
		if got := b.mem.Bytes()[8192 : 8192+len(wants)]; !bytes.Equal(got, wants) {
			t.Error("the responder's memory is wrong")
		}
		switch o.op {
		case WRRead, WRAtomicFetchAdd, WRAtomicCmpSwap:
			if !bytes.Equal(a.mem.Bytes()[4096:4096+o.length], theirs[8192:8192+o.length]) {
				t.Error("the result is wrong")
			}
		}
	}
}

// TestSuspendResponder: each operation, in each mode, on a region that is suspended
// before it begins or in its midst: it takes as long as the suspension and not much more,
// succeeds, and costs what the mode says.
func TestSuspendResponder(t *testing.T) {
	for _, typ := range []Type{TypeRC, TypeXRCSend} {
		for mode := mr.SuspendRNR; mode <= mr.SuspendDrop; mode++ {
			for _, o := range suspendOps(typ) {
				for _, after := range []int{0, o.midst()} { // packets that are sent before
					t.Run(fmt.Sprintf("%v/%v/%s/%d", typ, mode, o.name, after), func(t *testing.T) {
						s := usual()
						s.typ, s.memory = typ, 1<<18
						w := suspending(t, s)
						a, b := w.a, w.b
						if err := b.reg.SetSuspendMode(mode, 2*time.Millisecond); err != nil {
							t.Fatal(err)
						}
						wr, check := o.begin(w, 1)
						before := w.suspendAfter(b, after)
						a.post(wr)
						const long = 300 * ms
						w.runTo(long)
						done := len(a.wcs) > 0
						if done && (after == 0 || o.length > 10_000) {
							t.Fatalf("completed on a suspended region: %+v", a.wcs)
						}
						if !bytes.Equal(*before, b.mem.Bytes()) {
							t.Fatal("memory was written while it was suspended")
						}
						b.resume()
						w.run()
						a.want(WC{ID: 1, Opcode: wrOps[o.op].wc})
						check()
						st, max := a.env.Stats, map[mr.SuspendMode]int64{mr.SuspendRNR: 4 * ms, mr.SuspendHold: ms, mr.SuspendDrop: 100 * ms}[mode]
						if !done && w.now > long+max {
							t.Errorf("went on %d ns after it was resumed", w.now-long)
						}
						timeouts, rnr := st.LocalAckTimeout.Load(), st.RcvdRNRNak.Load()
						switch {
						case done:
						case mode == mr.SuspendRNR && (timeouts != 0 || rnr < 100 || rnr > 160):
							t.Errorf("RNR: %d timeouts, %d RNR NAKs", timeouts, rnr)
						case mode == mr.SuspendHold && (timeouts > 1 || rnr == 0):
							t.Errorf("hold: %d timeouts, %d RNR NAKs", timeouts, rnr)
						case mode == mr.SuspendDrop && (timeouts == 0 || timeouts > 6 || rnr != 0):
							t.Errorf("drop: %d timeouts, %d RNR NAKs", timeouts, rnr)
						}
						if b.reg.Held() != 0 {
							t.Errorf("%d bytes are still held", b.reg.Held())
						}
					})
				}
			}
		}
	}
}

// TestSuspendRequester: each operation whose own memory is suspended waits, sends nothing,
// uses up no retry, and goes on at once when it is resumed. What is posted behind it waits.
func TestSuspendRequester(t *testing.T) {
	for _, typ := range []Type{TypeRC, TypeXRCSend, TypeUC, TypeUD} {
		for _, o := range suspendOps(typ) {
			if !o.local {
				continue
			}
			for _, after := range []int{0, o.midst()} {
				t.Run(fmt.Sprintf("%v/%s/%d", typ, o.name, after), func(t *testing.T) {
					s := usual()
					s.typ, s.memory, s.retry = typ, 1<<18, 1
					w := suspending(t, s)
					a := w.a
					wr, check := o.begin(w, 1)
					before := w.suspendAfter(a, after)
					a.post(wr)
					const long = 2000 * ms
					w.runTo(ms)
					sent := len(w.sent)
					if len(*before) == 0 {
						return // all was sent before, and nobody answers
					}
					w.runTo(long)
					done := len(a.wcs) > 0
					if done && (after == 0 || o.length > 10_000) {
						t.Fatalf("completed: %+v", a.wcs)
					}
					// A READ asks again when it looks by itself, and is answered.
					if n := len(w.sent) - sent; o.op != WRRead && o.op != WRAtomicFetchAdd && o.op != WRAtomicCmpSwap && n > 0 {
						t.Errorf("%d packets were sent", n)
					}
					if !bytes.Equal(*before, a.mem.Bytes()) {
						t.Fatal("memory was written while it was suspended")
					}
					a.resume()
					w.run()
					a.want(WC{ID: 1, Opcode: wrOps[o.op].wc})
					check()
					if !done && w.now > long+2*ms {
						t.Errorf("went on %d ns after it was resumed", w.now-long)
					}
					if st := a.env.Stats; st.LocalAckTimeout.Load()+st.RcvdRNRNak.Load()+st.RetryExceeded.Load() != 0 {
						t.Errorf("%d timeouts, %d RNR NAKs", st.LocalAckTimeout.Load(), st.RcvdRNRNak.Load())
					}
				})
			}
		}
	}
}

// TestSuspendWithoutWake: nobody tells the QPs; they find out by themselves.
func TestSuspendWithoutWake(t *testing.T) {
	for _, side := range []string{"requester", "responder"} {
		w := suspending(t, usual())
		n := w.a
		if side == "responder" {
			n = w.b
			if err := n.reg.SetSuspendMode(mr.SuspendHold, 0); err != nil {
				t.Fatal(err)
			}
		}
		o := suspendOps(TypeRC)[0]
		wr, check := o.begin(w, 1)
		n.suspend()
		w.a.post(wr)
		w.runTo(20 * ms)
		if err := n.reg.Resume(); err != nil {
			t.Fatal(err)
		}
		w.run()
		w.a.want(WC{ID: 1, Opcode: WCSend})
		check()
		if w.now > 20*ms+lookAgain+ms {
			t.Errorf("%s: after %d ns", side, w.now)
		}
	}
}

// TestSuspendUnreliable: datagrams and UC messages are held or lost, whole, and never an
// error; what fits into the buffer comes in order.
func TestSuspendUnreliable(t *testing.T) {
	for _, typ := range []Type{TypeUC, TypeUD} {
		for mode := mr.SuspendRNR; mode <= mr.SuspendDrop; mode++ {
			for _, o := range suspendOps(typ) {
				t.Run(fmt.Sprintf("%v/%v/%s", typ, mode, o.name), func(t *testing.T) {
					s := usual()
					s.typ, s.memory = typ, 1<<18
					w := suspending(t, s)
					a, b := w.a, w.b
					if err := b.reg.SetSuspendMode(mode, 0); err != nil {
						t.Fatal(err)
					}
					wr, check := o.begin(w, 1)
					b.suspend()
					before := slices.Clone(b.mem.Bytes())
					a.post(wr)
					w.runTo(120 * ms)
					if mode == mr.SuspendHold && b.reg.Held() == 0 {
						t.Error("nothing is held")
					}
					a.want(WC{ID: 1, Opcode: wrOps[o.op].wc})
					if len(b.wcs) > 0 || !bytes.Equal(before, b.mem.Bytes()) {
						t.Fatalf("received while suspended: %+v", b.wcs)
					}
					b.resume()
					w.run()
					if mode == mr.SuspendHold {
						check()
					} else if !bytes.Equal(before, b.mem.Bytes()) {
						t.Error("something came of it")
					}
					// The next one finds all as it should be; a receive may be left.
					a.wcs, b.wcs = nil, nil
					wr, check = o.begin(w, 2)
					a.post(wr)
					w.run()
					a.want(WC{ID: 2, Opcode: wrOps[o.op].wc})
					check()
					if b.qp.State() != StateRTS || len(b.events) > 0 || b.reg.Held() != 0 {
						t.Errorf("%v, events %v, %d bytes held", b.qp.State(), b.events, b.reg.Held())
					}
				})
			}
		}
	}
}

// TestHoldBuffer: packets are held up to the region's bound, for all QPs together; the
// reliable ones behind it wait at their sender, unreliable ones are lost.
func TestHoldBuffer(t *testing.T) {
	for _, typ := range []Type{TypeRC, TypeUC, TypeUD} {
		t.Run(typ.String(), func(t *testing.T) {
			s := usual()
			s.typ = typ
			w := suspending(t, s)
			a, b := w.a, w.b
			if err := b.reg.SetSuspendMode(mr.SuspendHold, 3*time.Millisecond); err != nil {
				t.Fatal(err)
			}
			const bound = 20_000
			if err := b.reg.SetHoldBuffer(bound); err != nil {
				t.Fatal(err)
			}
			src := slices.Clone(a.fill(1))
			b.suspend()
			const n = 100
			for i := range n {
				b.recv(RecvWR{ID: uint64(i), SGL: b.sgl(2000*i, 2000)})
				wr := a.datagram(uint64(i), 1000*i, 1000)
				a.post(wr)
			}
			w.runTo(100 * ms)
			if h := b.reg.Held(); h < bound-2000 || h > bound {
				t.Errorf("%d bytes are held", h)
			}
			if len(b.wcs) > 0 {
				t.Fatal("received while suspended")
			}
			b.resume()
			w.run()
			want := n
			if typ != TypeRC {
				want = len(b.wcs)
				if want < 15 || want > 20 {
					t.Errorf("%d were held", want)
				}
			}
			off := 0
			if typ == TypeUD {
				off = wire.GRHLen
			}
			if len(b.wcs) != want {
				t.Fatalf("%d received, want %d", len(b.wcs), want)
			}
			for i, c := range b.wcs {
				if c.ID != uint64(i) || c.Status != WCSuccess || !bytes.Equal(b.mem.Bytes()[2000*i+off:][:1000], src[1000*i:][:1000]) {
					t.Fatalf("receive %d: %+v", i, c)
				}
			}
			if len(a.wcs) != n || b.reg.Held() != 0 {
				t.Errorf("%d sent, %d bytes held", len(a.wcs), b.reg.Held())
			}
		})
	}
}

// TestHoldEnds: what is held is given back when the QP ends, in whatever way, and when the
// region does; then the peer hears of that.
func TestHoldEnds(t *testing.T) {
	for name, end := range map[string]func(w *world){
		"reset":   func(w *world) { w.b.modify(Attr{State: StateReset}, AttrState) },
		"error":   func(w *world) { w.b.modify(Attr{State: StateErr}, AttrState) },
		"destroy": func(w *world) { w.b.modify(Attr{State: StateReset}, AttrState) },
		"eliminate": func(w *world) {
			if err := w.b.reg.Eliminate(); err != nil {
				w.t.Error(err)
			}
			w.b.qp.Wake()
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := suspending(t, usual())
			a, b := w.a, w.b
			if err := b.reg.SetSuspendMode(mr.SuspendHold, 0); err != nil {
				t.Fatal(err)
			}
			b.suspend()
			a.post(a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: a.sgl(0, 20_000), Flags: SendSignaled}, 0))
			w.runTo(5 * ms)
			if b.reg.Held() < 20_000 {
				t.Fatalf("%d bytes are held", b.reg.Held())
			}
			end(w)
			for i := 0; i < 100 && w.step(w.now+ms); i++ {
			}
			if b.reg.Held() != 0 {
				t.Errorf("%d bytes are held", b.reg.Held())
			}
			if b.qp.Deadline() != Never {
				t.Error("still waits for something")
			}
			if name == "eliminate" {
				a.want(WC{ID: 1, Status: WCRemAccessErr})
			}
		})
	}
}

// TestEliminateStatus: each operation that waits for a region which is then eliminated,
// or deregistered, or that is posted afterwards, ends with the status for a bad key.
func TestEliminateStatus(t *testing.T) {
	for _, side := range []string{"local", "remote", "receive"} {
		for _, o := range suspendOps(TypeRC) {
			send := o.op == WRSend || o.op == WRSendImm
			if side == "local" && !o.local || (side == "receive") != send && side != "local" {
				continue
			}
			for _, when := range []string{"waiting", "waiting dereg", "before"} {
				for mode := mr.SuspendRNR; mode <= mr.SuspendDrop; mode++ {
					t.Run(fmt.Sprintf("%s/%s/%s/%v", side, o.name, when, mode), func(t *testing.T) {
						w := suspending(t, usual())
						a, b := w.a, w.b
						n := b
						if side == "local" {
							n = a
						}
						if err := n.reg.SetSuspendMode(mode, 0); err != nil {
							t.Fatal(err)
						}
						wr, _ := o.begin(w, 1)
						end := func() {
							var err error
							if when == "waiting dereg" {
								err = n.reg.Deregister()
							} else {
								err = n.reg.Eliminate()
							}
							if err != nil {
								t.Fatal(err)
							}
							a.qp.Wake()
							b.qp.Wake()
						}
						if when == "before" {
							end()
						} else {
							n.suspend()
						}
						a.post(wr)
						w.runTo(20 * ms)
						if when != "before" {
							a.want()
							end()
						}
						w.run()
						want := WCRemAccessErr
						switch side {
						case "local":
							want = WCLocProtErr
						case "receive":
							want = WCRemOpErr
							b.want(WC{ID: 1, Status: WCLocProtErr})
						}
						a.want(WC{ID: 1, Status: want})
						if when == "waiting dereg" { // for the world's end
							var err error
							if n.reg, err = n.env.Keys.Register(mr.RegAttr{PD: 1, Addr: n.mem.Addr(), Length: 8}); err != nil {
								t.Fatal(err)
							}
						}
					})
				}
			}
		}
	}
}

// TestEliminateMidway: a message of which a part is in place, a part staged, and a part
// still to come is told of at a PSN that the requester waits for.
func TestEliminateMidway(t *testing.T) {
	for _, packets := range []int{1, 2, 3, 10, 65, 77, 200, 290} {
		w := suspending(t, usual())
		a, b := w.a, w.b
		sent := 0
		w.filter = func(_ *wire.Packet, from *node) bool {
			if from == a {
				if sent++; sent == packets {
					b.suspend()
				}
			}
			return true
		}
		a.post(a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: a.sgl(0, 300_000), Flags: SendSignaled}, 77))
		w.runTo(w.now + 30*ms)
		a.want()
		if err := b.reg.Eliminate(); err != nil {
			t.Fatal(err)
		}
		b.qp.Wake()
		w.run()
		a.want(WC{ID: 1, Status: WCRemAccessErr})
		if a.env.Stats.LocalAckTimeout.Load() != 0 {
			t.Errorf("after %d packets: %d timeouts", packets, a.env.Stats.LocalAckTimeout.Load())
		}
	}
}

// TestEliminateStaged: packets that were taken and are staged when the region is suspended
// count as acknowledged by the RNR NAK that follows; what becomes of them is told all the
// same.
func TestEliminateStaged(t *testing.T) {
	w := suspending(t, usual())
	a, b := w.a, w.b
	a.post(a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: a.sgl(0, 300_000), Flags: SendSignaled}, 77))
	for a.qp.Run(64) {
	}
	if len(w.wire) < 20 {
		t.Fatalf("%d packets were sent", len(w.wire))
	}
	// In the midst of what the responder takes in at once.
	w.wire = slices.Insert(w.wire, 10, flight{at: w.wire[10].at, do: func() {
		if !b.qp.resp.stage.Active() {
			t.Error("nothing is staged")
		}
		b.suspend()
	}})
	w.runTo(30 * ms)
	if !b.qp.resp.stage.Active() {
		t.Error("what was staged is gone")
	}
	if err := b.reg.Eliminate(); err != nil {
		t.Fatal(err)
	}
	b.qp.Wake()
	w.run()
	a.want(WC{ID: 1, Status: WCRemAccessErr})
	if n := a.env.Stats.LocalAckTimeout.Load(); n != 0 {
		t.Errorf("%d timeouts", n)
	}
}

// TestResumeEndsRNRWait: a peer that was asked to wait for long goes on when what it waits
// for is acknowledged.
func TestResumeEndsRNRWait(t *testing.T) {
	w := suspending(t, usual())
	a, b := w.a, w.b
	if err := b.reg.SetSuspendMode(mr.SuspendHold, 600*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	b.suspend()
	a.post(a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: a.sgl(0, 5000), Flags: SendSignaled}, 0))
	w.runTo(100 * ms)
	if a.env.Stats.RcvdRNRNak.Load() != 1 {
		t.Fatalf("%d RNR NAKs", a.env.Stats.RcvdRNRNak.Load())
	}
	b.resume()
	a.post(a.remote(SendWR{ID: 2, Opcode: WRWrite, SGL: a.sgl(0, 5000), Flags: SendSignaled}, 0))
	w.run()
	a.want(WC{ID: 1, Opcode: WCRDMAWrite}, WC{ID: 2, Opcode: WCRDMAWrite})
	if w.now > 101*ms {
		t.Errorf("went on %d ns after it was resumed", w.now-100*ms)
	}
}

// TestRNRBudget: a peer that does not retry without end keeps waiting for as long as the
// region's delay times its retries, and no longer.
func TestRNRBudget(t *testing.T) {
	for _, c := range []struct {
		delay time.Duration
		last  int64 // how long it is suspended
		ok    bool
	}{
		{10 * time.Millisecond, 25 * ms, true}, {10 * time.Millisecond, 60 * ms, false},
		{500 * time.Millisecond, 1400 * ms, true}, {0, 3 * ms, true},
	} {
		s := usual()
		s.rnrRetry = 3
		w := suspending(t, s)
		a, b := w.a, w.b
		if err := b.reg.SetSuspendMode(mr.SuspendRNR, c.delay); err != nil {
			t.Fatal(err)
		}
		b.suspend()
		a.post(a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: a.sgl(0, 5000), Flags: SendSignaled}, 0))
		w.runTo(c.last)
		b.resume()
		w.run()
		if c.ok {
			a.want(WC{ID: 1, Opcode: WCRDMAWrite})
		} else {
			a.want(WC{ID: 1, Status: WCRNRRetryExcErr})
		}
	}
	// The QP's own timer, which may be 655 ms, is not what is asked for.
	s := usual()
	s.rnrTimer = 0
	w := suspending(t, s)
	w.b.suspend()
	w.a.post(w.a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: w.a.sgl(0, 5000), Flags: SendSignaled}, 0))
	w.runTo(5 * ms)
	w.b.resume()
	w.run()
	w.a.want(WC{ID: 1, Opcode: WCRDMAWrite})
	if w.now > 10*ms {
		t.Errorf("took %d ns", w.now)
	}
}

// TestAtomicOnce: results that find no place are asked for again, and nothing is executed
// twice.
func TestAtomicOnce(t *testing.T) {
	w := suspending(t, usual())
	a, b := w.a, w.b
	clear(b.mem.Bytes())
	for i := range 5 {
		a.post(a.remote(SendWR{ID: uint64(i), Opcode: WRAtomicFetchAdd, CompareAdd: 1, SGL: a.sgl(8*i, 8), Flags: SendSignaled}, 0))
	}
	a.suspend()
	// The engine reads what it sends; an atomic sends nothing of its list.
	w.runTo(400 * ms)
	if len(a.wcs) > 0 {
		t.Fatal("completed without a place for the result")
	}
	a.resume()
	w.run()
	if len(a.wcs) != 5 || b.mem.Bytes()[0] != 5 {
		t.Fatalf("%d completions, added %d times", len(a.wcs), b.mem.Bytes()[0])
	}
	for i := range 5 {
		if a.mem.Bytes()[8*i] != byte(i) {
			t.Errorf("result %d is %d", i, a.mem.Bytes()[8*i])
		}
	}
	if b.env.Stats.AtomicReplayed.Load() == 0 {
		t.Error("nothing was asked for again")
	}
}

// TestSuspendStorm suspends both ends at random, a hundred times, in the midst of all kinds
// of work in both directions, with and without loss: no error, no byte wrong.
func TestSuspendStorm(t *testing.T) {
	for _, typ := range []Type{TypeRC, TypeXRCSend} {
		for mode := mr.SuspendRNR; mode <= mr.SuspendDrop; mode++ {
			for _, loss := range []float64{0, 0.01} {
				t.Run(fmt.Sprintf("%v/%v/%g", typ, mode, loss), func(t *testing.T) { suspendStorm(t, typ, mode, loss) })
			}
		}
	}
}

func suspendStorm(t *testing.T, typ Type, mode mr.SuspendMode, loss float64) {
	s := usual()
	s.typ, s.memory = typ, 4<<20
	w := suspending(t, s)
	rnd := rand.New(rand.NewPCG(1, uint64(mode)))
	lost := 0
	w.filter = func(*wire.Packet, *node) bool {
		if rnd.Float64() < loss {
			lost++
			return false
		}
		return true
	}
	ends := []*node{w.a, w.b}
	if typ == TypeXRCSend {
		ends = ends[:1]
	}
	model := map[*node][]byte{}
	for i, n := range []*node{w.a, w.b} {
		model[n] = slices.Clone(n.fill(uint64(i)))
		if err := n.reg.SetSuspendMode(mode, time.Millisecond); err != nil {
			t.Fatal(err)
		}
	}
	posted, received := map[*node]int{}, map[*node]int{}
	adds := map[*node]uint64{}
	for _, n := range []*node{w.a, w.b} {
		binary.NativeEndian.PutUint64(n.mem.Bytes(), 0)
	}
	rounds := 100
	if raceDetector {
		rounds = 20 // what is looked for then are races
	}
	for round := range rounds {
		for _, n := range ends {
			for n.qp.sq.Len() < 60 {
				postOne(w, n, rnd, model, posted, received, adds)
			}
		}
		if mode == mr.SuspendDrop {
			w.runTo(w.now + 70*ms) // longer than the timeout that has to run out
		}
		w.runTo(w.now + int64(rnd.IntN(300_000)))
		n := []*node{w.a, w.b}[rnd.IntN(2)]
		n.suspend()
		both := rnd.IntN(4) == 0
		if both {
			n.peer.suspend()
		}
		before := slices.Clone(n.mem.Bytes())
		w.runTo(w.now + int64(rnd.IntN(int(50*ms)))*int64(1-round%2) + int64(rnd.IntN(int(ms))))
		if !bytes.Equal(before, n.mem.Bytes()) {
			t.Fatal("written while suspended")
		}
		n.resume()
		if both {
			n.peer.resume()
		}
	}
	w.run()
	for _, n := range []*node{w.a, w.b} {
		for _, c := range n.wcs {
			if c.Status != WCSuccess {
				t.Fatalf("%+v", c)
			}
		}
		if got, want := len(n.wcs), posted[n]+received[n]; got != want {
			t.Fatalf("%d completions, want %d", got, want)
		}
		binary.NativeEndian.PutUint64(model[n], adds[n])
		for i := range model[n] {
			if n.mem.Bytes()[i] != model[n][i] {
				t.Fatalf("byte %#x is %#x, want %#x", i, n.mem.Bytes()[i], model[n][i])
			}
		}
		if n.reg.Held() != 0 {
			t.Errorf("%d bytes held", n.reg.Held())
		}
	}
	if loss > 0 && lost == 0 {
		t.Error("nothing was lost")
	}
	if posted[w.a] < 5*rounds {
		t.Errorf("only %d operations", posted[w.a])
	}
}

// postOne posts an operation of a random kind. Of the 4 MiB of each node, the first quarter
// is written by the peer, at the start of it a counter; the second takes results; the rest
// is only read.
func postOne(w *world, n *node, rnd *rand.Rand, model map[*node][]byte, posted, received map[*node]int, adds map[*node]uint64) {
	const quarter, room = 1 << 20, 8192
	i := posted[n]
	posted[n]++
	slot := room * (1 + i%(quarter/room-1))
	length, constant := 1+rnd.IntN(room), 2*quarter+rnd.IntN(2*quarter-room)
	wr := SendWR{ID: uint64(i), Flags: SendSignaled, RemoteSRQN: 3}
	at := slot
	switch rnd.IntN(5) {
	case 0, 1:
		wr.Opcode, wr.SGL = WRWrite, n.sgl(constant, length)
		copy(model[n.peer][slot:], model[n][constant:constant+length])
	case 2:
		wr.Opcode, wr.SGL = WRSend, n.sgl(constant, length)
		n.peer.receive(RecvWR{ID: uint64(i), SGL: n.peer.sgl(slot, room)})
		received[n.peer]++
		copy(model[n.peer][slot:], model[n][constant:constant+length])
	case 3:
		// All results go to one place, the last of them last: of this node's own counting.
		wr.Opcode, wr.CompareAdd, at = WRAtomicFetchAdd, 1, 0
		wr.SGL = n.sgl(quarter, 8)
		binary.NativeEndian.PutUint64(model[n][quarter:], adds[n.peer])
		adds[n.peer]++
	case 4:
		wr.Opcode, wr.SGL, at = WRRead, n.sgl(quarter+slot, length), constant
		copy(model[n][quarter+slot:], model[n.peer][constant:constant+length])
	}
	n.post(n.remote(wr, at))
}

// TestSuspendFlushPersistent: a region is suspended while a FLUSH of it is written to its
// disk, and moved: the FLUSH is begun again when it is resumed.
func TestSuspendFlushPersistent(t *testing.T) {
	d := newDurable(t, usual())
	f := persistentRegion(t, d)
	d.a.post(d.a.flush(1, f.RKey(), wire.FlushPersistent, wire.FlushMR, 0, 0))
	d.runTo(ms)
	if len(d.tickets) != 1 {
		t.Fatal("not asked to persist")
	}
	if err := f.Suspend(); err != nil {
		t.Fatal(err)
	}
	d.b.qp.Persisted(d.tickets[0], mr.ErrSuspended)
	d.runTo(500 * ms)
	d.a.want()
	if len(d.tickets) != 1 {
		t.Fatal("begun again while it is suspended")
	}
	if err := f.Resume(); err != nil {
		t.Fatal(err)
	}
	d.b.qp.Wake()
	d.runTo(d.now + ms)
	if len(d.tickets) != 2 || d.tickets[0] != d.tickets[1] || d.asked[0] != d.asked[1] {
		t.Fatalf("asked for %v with %v", d.asked, d.tickets)
	}
	d.b.qp.Persisted(d.tickets[1], nil)
	d.run()
	d.a.want(WC{ID: 1, Opcode: WCFlush})
}

// TestSuspendBehind: work on other memory that is before a work request which is held is
// not held, and what is lost of it is sent again.
func TestSuspendBehind(t *testing.T) {
	w := suspending(t, usual())
	a, b := w.a, w.b
	other, err := a.env.Keys.Register(mr.RegAttr{PD: 1, Addr: a.mem.Addr(), Length: 1 << 20, Access: allAccess})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Deregister()
	src := slices.Clone(a.fill(1))
	dropNth(w, "RC_WRITE_LAST", 0)
	a.suspend()
	list := a.sgl(0, 5000)
	list[0].LKey = other.LKey()
	a.post(a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: list, Flags: SendSignaled}, 0),
		a.remote(SendWR{ID: 2, Opcode: WRWrite, SGL: a.sgl(5000, 5000), Flags: SendSignaled}, 5000))
	w.runTo(500 * ms)
	a.want(WC{ID: 1, Opcode: WCRDMAWrite})
	if n := a.env.Stats.LocalAckTimeout.Load(); n != 1 {
		t.Errorf("%d timeouts", n)
	}
	a.resume()
	w.run()
	a.want(WC{ID: 1, Opcode: WCRDMAWrite}, WC{ID: 2, Opcode: WCRDMAWrite})
	if !bytes.Equal(b.mem.Bytes()[:10_000], src[:10_000]) {
		t.Error("wrong data")
	}
}
