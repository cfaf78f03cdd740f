// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"bytes"
	"testing"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// windowed is a world whose end b has a window on a region of its memory.
type windowed struct {
	*world
	reg *mr.Region // of b, for windows
	win *mr.Window
}

func newWindowed(t *testing.T, s setup, typ mr.WindowType) *windowed {
	w := &windowed{world: newWorld(t, s)}
	b := w.b
	var err error
	if w.reg, err = b.env.Keys.Register(mr.RegAttr{PD: 1, Addr: b.mem.Addr(), Length: uint64(s.memory), Access: mr.LocalWrite | mr.MWBind}); err != nil {
		t.Fatal(err)
	}
	if w.win, err = b.env.Keys.AllocWindow(1, typ); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.win.Dealloc(); err != nil {
			t.Error(err)
		}
		if err := w.reg.Deregister(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// bind is a work request for b that binds n bytes at off, with the key tag after the
// window's.
func (w *windowed) bind(id uint64, tag mr.Key, off, n int, acc mr.Access) SendWR {
	return SendWR{ID: id, Opcode: WRBindMW, Flags: SendSignaled, Bind: Bind{RKey: w.win.RKey()&^0xff | tag, LKey: w.reg.LKey(),
		Addr: uint64(w.b.mem.Addr()) + uint64(off), Length: uint64(n), Access: acc}}
}

// by is a work request for a that goes through a window.
func (w *windowed) by(key mr.Key, op WROpcode, id uint64, off, n int) SendWR {
	wr := w.a.remote(SendWR{ID: id, Opcode: op, Flags: SendSignaled, SGL: w.a.sgl(off, n)}, off)
	wr.RKey = key
	return wr
}

// TestWindow: the peer writes, reads and does atomics through a window, and no further
// than it goes.
func TestWindow(t *testing.T) {
	const all = mr.RemoteWrite | mr.RemoteRead | mr.RemoteAtomic
	for _, typ := range []mr.WindowType{mr.Window1, mr.Window2} {
		for _, c := range []struct {
			name   string
			acc    mr.Access
			op     WROpcode
			off, n int
			want   WCStatus
		}{
			{"write", all, WRWrite, 4096, 8192, WCSuccess},
			{"write, not all", all, WRWrite, 5000, 3000, WCSuccess},
			{"read", all, WRRead, 4096, 8192, WCSuccess},
			{"atomic", all, WRAtomicFetchAdd, 4096, 8, WCSuccess},
			{"only read", mr.RemoteRead, WRRead, 4096, 100, WCSuccess},
			{"only read: write", mr.RemoteRead, WRWrite, 4096, 100, WCRemAccessErr},
			{"only write: read", mr.RemoteWrite, WRRead, 4096, 100, WCRemAccessErr},
			{"only write: atomic", mr.RemoteWrite, WRAtomicFetchAdd, 4096, 8, WCRemAccessErr},
			{"nothing", 0, WRRead, 4096, 1, WCRemAccessErr},
			{"before", all, WRWrite, 4095, 2, WCRemAccessErr},
			{"behind", all, WRWrite, 4096, 8193, WCRemAccessErr},
		} {
			w := newWindowed(t, usual(), typ)
			w.b.post(w.bind(1, 7, 4096, 8192, c.acc))
			w.run()
			w.b.want(WC{ID: 1, Opcode: WCBindMW})
			w.a.fill(1)
			w.b.fill(2)
			was := bytes.Clone(w.b.mem.Bytes())
			w.a.post(w.by(w.win.RKey(), c.op, 2, c.off, c.n))
			w.run()
			w.a.want(WC{ID: 2, Status: c.want, Opcode: wrOps[c.op].wc})
			switch {
			case c.want != WCSuccess || c.op == WRRead:
				if !bytes.Equal(w.b.mem.Bytes(), was) {
					t.Errorf("type %d, %s: the memory has changed", typ, c.name)
				}
			case c.op == WRWrite:
				copy(was[c.off:], w.a.mem.Bytes()[c.off:c.off+c.n])
				if !bytes.Equal(w.b.mem.Bytes(), was) {
					t.Errorf("type %d, %s: not what was written", typ, c.name)
				}
			}
			if c.op == WRRead && c.want == WCSuccess && !bytes.Equal(w.a.mem.Bytes()[c.off:c.off+c.n], was[c.off:c.off+c.n]) {
				t.Errorf("type %d, %s: not what was there", typ, c.name)
			}
		}
	}
}

// TestManageOrder: binds and invalidations complete in the order of the queue and are
// executed at their turn, on a link that loses packets, too.
func TestManageOrder(t *testing.T) {
	for _, loss := range []bool{false, true} {
		w := newWindowed(t, usual(), mr.Window2)
		if loss {
			w.drops(1, 4, 6)
		}
		w.b.fill(3)
		inv := func(id uint64, tag mr.Key) SendWR {
			return SendWR{ID: id, Opcode: WRLocalInv, Flags: SendSignaled, InvKey: w.win.RKey()&^0xff | tag}
		}
		write := func(id uint64, off int) SendWR {
			return w.b.remote(SendWR{ID: id, Opcode: WRWrite, Flags: SendSignaled, SGL: w.b.sgl(off, 5000)}, off)
		}
		w.b.post(write(1, 0), w.bind(2, 1, 0, 4096, mr.RemoteWrite), write(3, 5000), inv(4, 1), w.bind(5, 2, 0, 100, mr.RemoteRead), inv(6, 2),
			w.bind(7, 3, 0, 100, mr.RemoteRead), write(8, 10000))
		w.run()
		w.b.want(WC{ID: 1, Opcode: WCRDMAWrite}, WC{ID: 2, Opcode: WCBindMW}, WC{ID: 3, Opcode: WCRDMAWrite}, WC{ID: 4, Opcode: WCLocalInv},
			WC{ID: 5, Opcode: WCBindMW}, WC{ID: 6, Opcode: WCLocalInv}, WC{ID: 7, Opcode: WCBindMW}, WC{ID: 8, Opcode: WCRDMAWrite})
		if !bytes.Equal(w.a.mem.Bytes()[:15000], w.b.mem.Bytes()[:15000]) {
			t.Error("the WRITEs did not arrive")
		}
		if k := w.win.RKey(); k&0xff != 3 || w.b.env.Keys.Lookup(k) == nil {
			t.Errorf("the window's key is %#x", k)
		}
		if retried := w.b.env.Stats.RetransmittedPkts.Load() > 0; retried != loss {
			t.Errorf("loss %v, retransmitted %v", loss, retried)
		}
	}
}

// TestManageFence: with the fence, an invalidation waits for READs; without, it does
// not (IBA 10.8.3.3).
func TestManageFence(t *testing.T) {
	for _, fence := range []SendFlags{0, SendFence} {
		w := newWindowed(t, usual(), mr.Window2)
		w.b.post(w.bind(1, 1, 0, 100, mr.RemoteRead))
		w.run()
		k := w.win.RKey()
		w.b.wcs = nil
		w.b.post(w.b.remote(SendWR{ID: 2, Opcode: WRRead, Flags: SendSignaled, SGL: w.b.sgl(0, 3000)}, 0),
			SendWR{ID: 3, Opcode: WRLocalInv, Flags: SendSignaled | fence, InvKey: k})
		w.b.qp.Run(64)
		if open := w.b.env.Keys.Lookup(k) != nil; open != (fence != 0) {
			t.Errorf("fence %d: the key works %v while the READ is under way", fence, open)
		}
		w.run()
		w.b.want(WC{ID: 2, Opcode: WCRDMARead}, WC{ID: 3, Opcode: WCLocalInv})
		if w.b.env.Keys.Lookup(k) != nil {
			t.Errorf("fence %d: the key works", fence)
		}
	}
}

// TestManageErrors: a bind or invalidation that cannot be ends with a memory management
// operation error (IBA 11.6.2) when it is the oldest, and the QP goes to ERR, or SQE.
func TestManageErrors(t *testing.T) {
	for _, typ := range []Type{TypeRC, TypeUC} {
		s := usual()
		s.typ = typ
		w := newWindowed(t, s, mr.Window2)
		bad := map[string]SendWR{
			"invalidate a plain region": {ID: 2, Opcode: WRLocalInv, InvKey: w.b.reg.RKey()},
			"invalidate what is not":    {ID: 2, Opcode: WRLocalInv, InvKey: w.win.RKey() ^ 0x100},
			"bind too much":             w.bind(2, 1, 4096, s.memory, mr.RemoteRead),
			"bind nothing":              w.bind(2, 1, 0, 0, mr.RemoteRead),
		}
		for name, wr := range bad {
			w := newWindowed(t, s, mr.Window2)
			if wr.Opcode == WRBindMW {
				wr.Bind.RKey, wr.Bind.LKey, wr.Bind.Addr = w.win.RKey()+1, w.reg.LKey(), w.reg.IOVA()+wr.Bind.Length
			} else if name == "invalidate a plain region" {
				wr.InvKey = w.b.reg.RKey()
			}
			wr.Flags = 0 // errors complete all the same
			w.b.post(w.b.remote(SendWR{ID: 1, Opcode: WRWrite, Flags: SendSignaled, SGL: w.b.sgl(0, 9000)}, 0), wr,
				w.b.remote(SendWR{ID: 3, Opcode: WRWrite, Flags: SendSignaled, SGL: w.b.sgl(0, 10)}, 0))
			w.run()
			w.b.want(WC{ID: 1, Opcode: WCRDMAWrite}, WC{ID: 2, Status: WCMWBindErr}, WC{ID: 3, Status: WCWRFlushErr})
			want := StateErr
			if typ == TypeUC {
				want = StateSQE
			}
			if got := w.b.qp.State(); got != want {
				t.Errorf("%v, %s: state %v", typ, name, got)
			}
		}
	}
}

// TestRemoteInvalidate: a SEND with invalidate ends a window of type 2 that is bound to
// the QP it comes to, and nothing else.
func TestRemoteInvalidate(t *testing.T) {
	for _, c := range []struct {
		name string
		typ  mr.WindowType
		key  func(w *windowed) mr.Key
		ok   bool
	}{
		{"type 2", mr.Window2, func(w *windowed) mr.Key { return w.win.RKey() }, true},
		{"type 1", mr.Window1, func(w *windowed) mr.Key { return w.win.RKey() }, false},
		{"old tag", mr.Window2, func(w *windowed) mr.Key { return w.win.RKey() ^ 0xff }, false},
		{"region", mr.Window2, func(w *windowed) mr.Key { return w.reg.RKey() }, false},
	} {
		w := newWindowed(t, usual(), c.typ)
		w.b.post(w.bind(1, 1, 0, 4096, mr.RemoteWrite))
		w.run()
		w.b.wcs = nil
		key := c.key(w)
		w.b.recv(RecvWR{ID: 9, SGL: w.b.sgl(8192, 100)})
		w.a.post(w.by(w.win.RKey(), WRWrite, 2, 0, 4096), SendWR{ID: 3, Opcode: WRSendInv, Flags: SendSignaled, SGL: w.a.sgl(0, 10), InvKey: key})
		w.run()
		if !c.ok {
			w.a.want(WC{ID: 2, Opcode: WCRDMAWrite}, WC{ID: 3, Status: WCRemOpErr})
			if w.b.env.Keys.Lookup(w.win.RKey()) == nil {
				t.Errorf("%s: the window is closed", c.name)
			}
			continue
		}
		w.a.want(WC{ID: 2, Opcode: WCRDMAWrite}, WC{ID: 3, Opcode: WCSend})
		w.b.want(WC{ID: 9, Opcode: WCRecv})
		if r := w.b.wcs[0]; r.Flags != WCWithInv || r.InvKey != key {
			t.Errorf("%s: %+v", c.name, r)
		}
		// Bound anew, it is open by its new key only.
		w.b.wcs, w.a.wcs = nil, nil
		w.b.post(w.bind(4, 2, 0, 4096, mr.RemoteWrite))
		w.run()
		w.a.post(w.by(w.win.RKey(), WRWrite, 5, 0, 4096), w.by(key, WRWrite, 6, 0, 1))
		w.run()
		w.a.want(WC{ID: 5, Opcode: WCRDMAWrite}, WC{ID: 6, Status: WCRemAccessErr})
	}
}

// TestWindowGoesWithQP: windows of type 2 end with the QP they are bound to.
func TestWindowGoesWithQP(t *testing.T) {
	for _, typ := range []mr.WindowType{mr.Window1, mr.Window2} {
		w := newWindowed(t, usual(), typ)
		q, err := New(w.b.env, Init{Type: TypeRC, Num: 0x777, PD: 1, SendCQ: w.b.cq, RecvCQ: w.b.cq, Caps: usual().caps})
		if err != nil {
			t.Fatal(err)
		}
		bind := w.bind(1, 1, 0, 10, mr.RemoteRead).Bind
		if err := w.b.env.Keys.Bind(&mr.BindAttr{Key: bind.RKey, PD: 1, QP: 0x777, Region: bind.LKey, Addr: bind.Addr, Length: 10, Access: bind.Access}); err != nil {
			t.Fatal(err)
		}
		if err := q.Destroy(); err != nil {
			t.Fatal(err)
		}
		if open := w.b.env.Keys.Lookup(w.win.RKey()) != nil; open != (typ == mr.Window1) {
			t.Errorf("type %d: open %v", typ, open)
		}
	}
}

// TestRightsChange: a WRITE that is under way when its region may not be written any
// more, or lies elsewhere, ends there.
func TestRightsChange(t *testing.T) {
	for _, c := range []struct {
		name string
		what mr.Rereg
		attr func(w *world) mr.RegAttr
		ok   bool
	}{
		{"no write", mr.ChangeAccess, func(*world) mr.RegAttr { return mr.RegAttr{Access: mr.LocalWrite} }, false},
		{"less, but write", mr.ChangeAccess, func(*world) mr.RegAttr { return mr.RegAttr{Access: mr.LocalWrite | mr.RemoteWrite} }, true},
		{"domain", mr.ChangePD, func(*world) mr.RegAttr { return mr.RegAttr{PD: 2} }, false},
		{"place", mr.ChangeTranslation, func(w *world) mr.RegAttr {
			return mr.RegAttr{Addr: w.b.mem.Addr(), Length: 1 << 19}
		}, false},
	} {
		w := newWorld(t, usual())
		w.a.fill(1)
		w.b.fill(2) // pages that are there: nothing is staged
		n := 0
		change := func() {
			r, err := w.b.reg.Reregister(c.what, c.attr(w), nil)
			if err != nil {
				t.Fatal(err)
			}
			w.b.reg = r
		}
		w.filter = func(_ *wire.Packet, from *node) bool {
			if n++; from == w.a && n == 10 { // nine are before this
				w.wire = append(w.wire, flight{at: w.now + wireDelay, do: change})
			}
			return true
		}
		w.a.post(w.a.remote(SendWR{ID: 1, Opcode: WRWrite, Flags: SendSignaled, SGL: w.a.sgl(0, 20000)}, 0))
		w.run()
		st := WCSuccess
		if !c.ok {
			st = WCRemAccessErr
		}
		w.a.want(WC{ID: 1, Status: st, Opcode: WCRDMAWrite})
		arrived := 0
		for arrived < 20000 && w.a.mem.Bytes()[arrived] == w.b.mem.Bytes()[arrived] {
			arrived++
		}
		if c.ok != (arrived == 20000) || arrived < 9*1024 || !c.ok && arrived >= 11*1024 {
			t.Errorf("%s: %d bytes arrived", c.name, arrived)
		}
	}
}

// TestInvalidateMeanwhile: a WRITE or a READ that is under way when the key of its region
// is invalidated ends there.
func TestInvalidateMeanwhile(t *testing.T) {
	for _, op := range []WROpcode{WRWrite, WRRead} {
		w := newWorld(t, usual())
		w.a.fill(1)
		w.b.fill(2)
		r, err := w.b.env.Keys.Register(mr.RegAttr{PD: 1, Addr: w.b.mem.Addr(), Length: 1 << 20, Access: allAccess, Invalidatable: true})
		if err != nil {
			t.Fatal(err)
		}
		from := map[WROpcode]*node{WRWrite: w.a, WRRead: w.b}[op]
		n, arrived := 0, 0
		w.filter = func(_ *wire.Packet, by *node) bool {
			if by != from {
				return true
			}
			if n++; n == 10 {
				if op == WRWrite { // nine are before this
					w.wire = append(w.wire, flight{at: w.now + wireDelay, do: func() {
						err = w.b.env.Keys.Invalidate(r.RKey(), 1, 0)
					}})
				} else {
					err = w.b.env.Keys.Invalidate(r.RKey(), 1, 0)
				}
			}
			return true
		}
		wr := w.a.remote(SendWR{ID: 1, Opcode: op, Flags: SendSignaled, SGL: w.a.sgl(0, 20000)}, 0)
		wr.RKey = r.RKey()
		w.a.post(wr)
		w.run()
		if err != nil {
			t.Fatal(err)
		}
		w.a.want(WC{ID: 1, Status: WCRemAccessErr, Opcode: wrOps[op].wc})
		for arrived < 20000 && w.a.mem.Bytes()[arrived] == w.b.mem.Bytes()[arrived] {
			arrived++
		}
		if arrived < 9*1024 || arrived >= 11*1024 {
			t.Errorf("opcode %d: %d bytes arrived", op, arrived)
		}
		if err := r.Deregister(); err != nil {
			t.Error(err)
		}
	}
}

// TestListsMove: half a message is not read from where a region was and half from where
// it is, nor written, although both have the same addresses.
func TestListsMove(t *testing.T) {
	for _, c := range []struct {
		name string
		op   WROpcode
		at   func(w *world) *node
		want WCStatus
	}{
		{"sender", WRSend, func(w *world) *node { return w.a }, WCLocProtErr},
		{"receiver", WRSend, func(w *world) *node { return w.b }, WCRemOpErr},
		{"reader", WRRead, func(w *world) *node { return w.a }, WCLocProtErr},
	} {
		s := usual()
		s.timeout = 0
		w := newWorld(t, s)
		elsewhere, err := mr.Alloc(s.memory)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = elsewhere.Close() })
		n := 0
		w.filter = func(p *wire.Packet, _ *node) bool {
			if len(p.Payload) > 0 {
				n++
			}
			if n == 150 && len(p.Payload) > 0 {
				at := c.at(w)
				w.wire = append(w.wire, flight{at: w.now + wireDelay, do: func() {
					r, err := at.reg.Reregister(mr.ChangeTranslation, mr.RegAttr{Addr: elsewhere.Addr(), Length: uint64(s.memory),
						IOVA: uint64(at.mem.Addr()), HaveIOVA: true}, nil)
					if err != nil {
						t.Fatal(err)
					}
					at.reg = r
				}})
			}
			return true
		}
		w.b.recv(RecvWR{ID: 9, SGL: w.b.sgl(0, 600_000)})
		w.a.post(w.a.remote(SendWR{ID: 1, Opcode: c.op, Flags: SendSignaled, SGL: w.a.sgl(0, 600_000)}, 0))
		w.run()
		w.a.want(WC{ID: 1, Status: c.want})
	}
}
