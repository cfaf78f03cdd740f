// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/tapverbs/tapverbs/wire"
)

func TestConnect(t *testing.T) {
	for _, addrs := range [][]string{{"10.0.0.1", "10.0.0.2"}, {"fd00::1", "fd00::2"}} {
		w := newWorld(t, 0, addrs...)
		a, b := w.order[0], w.order[1]
		b.listen(1)
		c, s := w.pair()
		p, q := c.Mine(), s.Peer()
		if q.Addr != a.addr || q.QPN != p.QPN || q.PSN != p.PSN || q.Responder != 3 || q.Initiator != 2 || q.RetryCount != 7 || q.RNRRetry != 6 {
			t.Errorf("the server was told %+v of %+v", q, p)
		}
		p, q = s.Mine(), c.Peer()
		if q.Addr != b.addr || q.QPN != p.QPN || q.PSN != p.PSN || q.Responder != 3 || q.Initiator != 2 || q.RNRRetry != 6 {
			t.Errorf("the client was told %+v of %+v", q, p)
		}
		if s.Route != route {
			t.Errorf("route %+v, want %+v", s.Route, route)
		}
		if !c.Open() || !s.Open() {
			t.Error("not open")
		}
		if err := c.Disconnect(w.now, []byte("bye")); err != nil {
			t.Fatal(err)
		}
		if e := b.want(Disconnected); string(e.Private[:3]) != "bye" {
			t.Errorf("%q", e.Private)
		}
		if err := c.Disconnect(w.now, nil); !errors.Is(err, ErrState) {
			t.Error(err)
		}
		a.want(Ended)
		a.want(Gone)
		b.want(Gone)
		w.over()
	}
}

// TestLoss makes 1,000 connections, 10 at a time, over a link that loses 5 % of the messages
// and doubles some: none is lost, none left over.
func TestLoss(t *testing.T) {
	for _, loss := range []float64{0.05, 0.3} {
		w, a, b := newTwo(t, loss)
		b.listen(10)
		const total = 1000
		started, ended, heard := 0, 0, 0
		open := map[*Conn]bool{}
		for ended < total {
			for len(open) < 10 && started < total {
				open[a.connect(b)] = true
				started++
			}
			if !w.run(func() bool { return len(a.events)+len(b.events) > 0 }) {
				t.Fatalf("nothing happens; %d of %d ended", ended, total)
			}
			for e, ok := b.take(); ok; e, ok = b.take() {
				switch e.Kind {
				case Request:
					if err := e.c.Accept(w.now, b.nextQP()); err != nil {
						t.Fatal(err)
					}
				case Established, Gone:
				case Disconnected:
					heard++
				default:
					t.Fatalf("the server hears %+v", e)
				}
			}
			for e, ok := a.take(); ok; e, ok = a.take() {
				switch e.Kind {
				case Reply:
					if err := e.c.Ready(w.now, nil); err != nil {
						t.Fatal(err)
					}
					if err := e.c.Disconnect(w.now, nil); err != nil {
						t.Fatal(err)
					}
				case Gone:
					if !open[e.c] {
						t.Fatal("twice gone")
					}
					delete(open, e.c)
					ended++
				case Ended:
				default:
					t.Fatalf("the client hears %+v", e)
				}
			}
		}
		w.over()
		if heard != total {
			t.Errorf("%d of %d ends were heard of", heard, total)
		}
		if st := a.a.Stats(); st.Resent == 0 {
			t.Error("nothing was sent again")
		}
	}
}

func TestRefused(t *testing.T) {
	w, a, b := newTwo(t, 0)
	a.connect(b)
	if e := a.want(Rejected); e.Reason != wire.RejInvalidServiceID {
		t.Error(e)
	}
	a.want(Gone)
	l := b.listen(1)
	if _, err := b.a.Listen(service, netip.Addr{}, 1); !errors.Is(err, ErrInUse) {
		t.Error(err)
	}
	a.connect(b)
	if err := b.want(Request).c.Reject(w.now, wire.RejConsumer, []byte("no")); err != nil {
		t.Fatal(err)
	}
	if e := a.want(Rejected); e.Reason != wire.RejConsumer || !bytes.HasPrefix(e.Private, []byte("no\x00")) {
		t.Error(e)
	}
	a.want(Gone)
	b.want(Gone)
	// Who closes a listener has what waits rejected.
	a.connect(b)
	b.want(Request)
	l.Close(w.now)
	a.want(Rejected)
	a.want(Gone)
	// Nobody there.
	if _, err := a.a.Connect(w.now, netip.MustParseAddr("10.0.0.9"), service, RC, a.nextQP(), route); err != nil {
		t.Fatal(err)
	}
	began := w.now
	a.want(Unreachable)
	if s := (w.now - began) / 1e9; s < 60 || s > 80 {
		t.Errorf("gave up after %d s", s)
	}
	a.want(Gone)
	if _, err := a.a.Connect(w.now, netip.MustParseAddr("fd00::1"), service, RC, a.nextQP(), route); !errors.Is(err, ErrAddr) {
		t.Error(err)
	}
	me := a.nextQP()
	me.Private = make([]byte, wire.REQPrivateLen+1)
	if _, err := a.a.Connect(w.now, b.addr, service, RC, me, route); !errors.Is(err, ErrPrivate) {
		t.Error(err)
	}
	w.over()
}

// TestSlowServer: one who takes two minutes to accept is waited for, as his end says so.
func TestSlowServer(t *testing.T) {
	w, a, b := newTwo(t, 0.1)
	b.listen(1)
	a.connect(b)
	e := b.want(Request)
	until := w.now + 120_000_000_000
	w.run(func() bool { return w.now >= until || len(a.events)+len(b.events) > 0 })
	if len(a.events)+len(b.events) > 0 {
		t.Fatalf("%+v %+v after %d s", a.events, b.events, (w.now-until)/1e9+120)
	}
	if err := e.c.Accept(w.now, b.nextQP()); err != nil {
		t.Fatal(err)
	}
	c := a.want(Reply).c
	if err := c.Ready(w.now, nil); err != nil {
		t.Fatal(err)
	}
	b.want(Established)
	c.Destroy(w.now)
	b.want(Disconnected)
	b.want(Gone)
	w.over()
	if len(a.events) != 0 {
		t.Errorf("events after Destroy: %+v", a.events)
	}
}

// TestLostRTU: data that comes says as much as the RTU; and without both the server gives up.
func TestLostRTU(t *testing.T) {
	w, a, b := newTwo(t, 0)
	b.listen(1)
	w.filter = func(_ netip.Addr, m wire.CMAttr) bool { return m != wire.CMRTU }
	for _, notify := range []bool{true, false} {
		c := a.connect(b)
		s := b.want(Request).c
		if err := s.Notify(); !errors.Is(err, ErrState) {
			t.Error(err)
		}
		if err := s.Accept(w.now, b.nextQP()); err != nil {
			t.Fatal(err)
		}
		a.want(Reply)
		if err := c.Ready(w.now, nil); err != nil {
			t.Fatal(err)
		}
		if notify {
			if err := s.Notify(); err != nil {
				t.Fatal(err)
			}
			b.want(Established)
			s.Destroy(w.now)
			a.want(Disconnected)
			a.want(Gone)
			continue
		}
		b.want(Unreachable)
		a.want(Disconnected)
	}
	a.want(Gone)
	b.want(Gone)
	w.over()
}

// TestStale: a peer that has started anew uses a queue pair number again that we have a
// connection with.
func TestStale(t *testing.T) {
	w, a, b := newTwo(t, 0)
	b.listen(4)
	w.pair()
	// The client's process is gone, and comes again.
	old := a.a
	a.a = New(old.cfg)
	a.qpn--
	a.connect(b)
	if e := a.want(Rejected); e.Reason != wire.RejStale {
		t.Error(e)
	}
	b.want(Disconnected)
	a.want(Gone)
	b.want(Gone)
	a.qpn--
	a.connect(b)
	b.want(Request).c.Destroy(w.now)
	a.want(Rejected)
	a.want(Gone)
	w.over()
}

// TestStaleReply: the one who accepts names a queue pair that we have a connection with. It hears
// that its REP is rejected, also if it has to ask twice; whoever asked hears why, and then that the
// connection is gone.
func TestStaleReply(t *testing.T) {
	w, a, b := newTwo(t, 0)
	b.listen(4)
	old, oldServer := w.pair()
	var said []wire.CMRej
	send := a.a.cfg.Send
	a.a.cfg.Send = func(src, dst netip.Addr, mad *[wire.MADLen]byte) {
		if h, _ := wire.ParseMAD(mad[:]); wire.CMAttr(h.Attr) == wire.CMREJ {
			var m wire.CMRej
			m.Parse(mad[wire.MADHeaderLen:])
			if said = append(said, m); len(said) == 1 {
				return // is lost
			}
		}
		send(src, dst, mad)
	}
	c := a.connect(b)
	s := b.want(Request).c
	b.qpn--
	if err := s.Accept(w.now, b.nextQP()); err != nil {
		t.Fatal(err)
	}
	if e := a.want(Rejected); e.c != c || e.Reason != wire.RejStale {
		t.Errorf("%+v", e)
	}
	if e := a.want(Disconnected); e.c != old {
		t.Errorf("%+v", e)
	}
	if e := b.want(Disconnected); e.c != oldServer {
		t.Errorf("%+v", e)
	}
	if e := b.want(Rejected); e.c != s || e.Reason != wire.RejStale {
		t.Errorf("%+v", e)
	}
	if len(said) != 2 || said[1] != said[0] || said[0].Of != 1 || said[0].Reason != wire.RejStale || said[0].LocalID != c.id || said[0].RemoteID != s.id {
		t.Errorf("rejected with %+v", said)
	}
	for range 2 {
		a.want(Gone)
	}
	w.over()
}

// TestForged: who is not the peer ends nothing, whatever he knows.
func TestForged(t *testing.T) {
	w := newWorld(t, 0, "10.0.0.1", "10.0.0.2", "10.0.0.3")
	a, b, x := w.order[0], w.order[1], w.order[2]
	b.listen(4)
	c, s := w.pair()
	for _, src := range []netip.Addr{x.addr, a.addr} {
		for _, m := range []struct {
			attr wire.CMAttr
			m    message
		}{
			{wire.CMDREQ, &wire.CMDreq{LocalID: c.id, RemoteID: s.id, RemoteQPN: s.me.QPN}},
			{wire.CMDREQ, &wire.CMDreq{LocalID: c.id, RemoteID: s.id, RemoteQPN: s.me.QPN + 1}},
			{wire.CMDREQ, &wire.CMDreq{LocalID: c.id + 1, RemoteID: s.id, RemoteQPN: s.me.QPN}},
			{wire.CMREJ, &wire.CMRej{LocalID: c.id, RemoteID: s.id}},
			{wire.CMREJ, &wire.CMRej{LocalID: c.id + 1, RemoteID: s.id}},
		}[min(1, slices.Index([]netip.Addr{x.addr, a.addr}, src)):] {
			if d, ok := m.m.(*wire.CMRej); ok && src == a.addr && d.LocalID == c.id {
				continue // that is what the peer would say
			}
			x.a.send(src, b.addr, 1, m.attr, m.m)
		}
	}
	w.run(func() bool { return false })
	if !s.Open() || len(b.events) != 0 {
		t.Errorf("events %+v", b.events)
	}
	if n := b.a.Stats().Stray; n == 0 {
		t.Error("nothing was stray")
	}
	c.Destroy(w.now)
	b.want(Disconnected)
	b.want(Gone)
	w.over()
}

// TestBacklog: requests beyond the backlog come again, and half-open ones end by themselves.
func TestBacklog(t *testing.T) {
	w := newWorld(t, 0, "10.0.0.1", "10.0.0.2", "10.0.0.3")
	a, b, x := w.order[0], w.order[1], w.order[2]
	b.listen(3)
	for i := range 5000 { // somebody who never goes on, from queue pairs of every number
		x.a.send(x.addr, b.addr, 1, wire.CMREQ, &wire.CMReq{LocalID: uint32(i + 1), ServiceID: service, LocalQPN: wire.QPN(i + 10), MTU: 5,
			Primary: wire.CMPath{LocalGID: x.addr.As16(), RemoteGID: b.addr.As16()}, RemoteTimeout: 20, LocalTimeout: 20, MaxCMRetries: 1})
	}
	c := a.connect(b)
	w.run(func() bool { return len(w.queue) == 0 })
	if n := b.a.Len(); n != 3 {
		t.Errorf("%d connections within a backlog of 3", n)
	}
	for got := false; !got; {
		w.run(func() bool { return len(b.events) > 0 })
		e, ok := b.take()
		if !ok {
			t.Fatal("the one who meant it was never heard")
		}
		if e.Kind == Request && e.c.peer.Addr == a.addr {
			e.c.Destroy(w.now)
			got = true
		}
	}
	a.want(Rejected)
	a.want(Gone)
	_ = c
	w.over()
}

func TestResolve(t *testing.T) {
	w, a, b := newTwo(t, 0.2)
	ask := func() {
		t.Helper()
		if _, err := a.a.Resolve(w.now, a.addr, b.addr, service, wire.DefaultPKey, []byte("who")); err != nil {
			t.Fatal(err)
		}
	}
	ask()
	if e := a.want(Resolved); e.Status != wire.SIDRUnsupported {
		t.Error(e)
	}
	a.want(Gone)
	b.listen(1)
	for _, yes := range []bool{true, false} {
		ask()
		e := b.want(Request)
		if e.c.Transport != UD || string(e.Private[:4]) != "who\x00" || e.c.Accept(w.now, Params{}) != ErrState {
			t.Errorf("%+v", e)
		}
		want := uint8(wire.SIDROK)
		if yes {
			if err := e.c.AcceptService(w.now, Params{QPN: 77, QKey: 0x1234567, Private: []byte("me")}); err != nil {
				t.Fatal(err)
			}
		} else {
			want = wire.SIDRRejected
			e.c.Destroy(w.now)
		}
		r := a.want(Resolved)
		if r.Status != want || yes && (r.c.Peer().QPN != 77 || r.c.Peer().QKey != 0x1234567 || string(r.Private[:3]) != "me\x00") {
			t.Errorf("%+v %+v", r, r.c.Peer())
		}
		a.want(Gone)
		if yes {
			b.want(Gone)
		}
	}
	w.over()
}

func TestXRCAndECE(t *testing.T) {
	w, a, b := newTwo(t, 0)
	b.listen(1)
	me := a.nextQP()
	me.ECEVendor, me.ECEOptions = 0x123456, 0x789abcde
	if _, err := a.a.Connect(w.now, b.addr, service, XRC, me, route); err != nil {
		t.Fatal(err)
	}
	s := b.want(Request).c
	if p := s.Peer(); s.Transport != XRC || p.ECEVendor != 0x123456 || p.ECEOptions != 0x789abcde {
		t.Errorf("%+v", p)
	}
	me = b.nextQP()
	me.ECEVendor, me.ECEOptions = 0x654321, 7
	if err := s.Accept(w.now, me); err != nil {
		t.Fatal(err)
	}
	c := a.want(Reply).c
	if p := c.Peer(); p.ECEVendor != 0x654321 || p.ECEOptions != 7 {
		t.Errorf("%+v", p)
	}
	// An alternate path is declined, and nothing ends for that.
	a.a.send(a.addr, b.addr, 9, wire.CMLAP, &wire.CMLap{LocalID: c.id, RemoteID: s.id})
	c.Destroy(w.now)
	b.want(Rejected)
	b.want(Gone)
	w.over()
	if !slices.Contains(w.log, "10.0.0.2 APR") {
		t.Error(w.log)
	}
}

// TestGarbage: random MADs, and mutated ones of a conversation, while connections are made.
func TestGarbage(t *testing.T) {
	w := newWorld(t, 0, "10.0.0.1", "10.0.0.2", "10.0.0.3")
	b, x := w.order[1], w.order[2]
	b.listen(20)
	rnd := rand.New(rand.NewPCG(3, 4))
	var heard [][wire.MADLen]byte
	w.filter = func(_ netip.Addr, m wire.CMAttr) bool { return true }
	send := w.order[0].a.cfg.Send
	w.order[0].a.cfg.Send = func(src, dst netip.Addr, mad *[wire.MADLen]byte) {
		heard = append(heard, *mad)
		send(src, dst, mad)
	}
	for round := range 300 {
		for range 200 {
			var mad [wire.MADLen]byte
			if len(heard) > 0 && rnd.IntN(3) > 0 {
				mad = heard[rnd.IntN(len(heard))]
				for range rnd.IntN(4) {
					mad[wire.MADHeaderLen+rnd.IntN(wire.CMLen)] = byte(rnd.Uint32())
				}
			} else {
				for i := range mad {
					mad[i] = byte(rnd.Uint32())
				}
				mad[0], mad[1], mad[2], mad[3] = 1, wire.CMClass, wire.CMClassVersion, byte(wire.MADSend)
				mad[16], mad[17] = 0, byte(wire.CMREQ)+byte(rnd.IntN(12))
			}
			b.a.Receive(w.now, x.addr, b.addr, mad[:])
			b.a.Receive(w.now, x.addr, b.addr, mad[:rnd.IntN(wire.MADLen)])
		}
		for e, ok := b.take(); ok; e, ok = b.take() {
			if e.Kind == Request {
				e.c.Destroy(w.now) // the application does not like it
			}
		}
		a := w.order[0]
		c := a.connect(b)
		for !c.Open() && c.state != stateGone {
			w.run(func() bool { return len(a.events)+len(b.events) > 0 })
			for e, ok := b.take(); ok; e, ok = b.take() {
				if e.Kind == Request && e.c.peer.QPN == c.me.QPN {
					if err := e.c.Accept(w.now, b.nextQP()); err != nil {
						t.Fatal(err)
					}
				} else if e.Kind == Request {
					e.c.Destroy(w.now)
				}
			}
			for e, ok := a.take(); ok; e, ok = a.take() {
				if e.Kind == Reply && e.c == c {
					if err := c.Ready(w.now, nil); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		if !c.Open() {
			t.Fatalf("round %d: not connected", round)
		}
		c.Destroy(w.now)
		if b.a.Len() > MaxLingering+100 {
			t.Fatalf("%d connections", b.a.Len())
		}
	}
	w.over()
	if n := b.a.Stats(); n.Stray == 0 || n.Malformed == 0 {
		t.Errorf("%+v", n)
	}
}

// TestClose: who closes tells the other ends, and whoever had a connection.
func TestClose(t *testing.T) {
	w, a, b := newTwo(t, 0)
	b.listen(4)
	c, _ := w.pair()
	asked := a.connect(b)
	b.want(Request)
	b.a.Close(w.now)
	gone := 0
	for e, ok := b.take(); ok; e, ok = b.take() {
		if e.Kind != Gone {
			t.Errorf("%+v", e)
		}
		gone++
	}
	if gone != 2 || b.a.Len() != 0 || b.a.Next() != Never {
		t.Errorf("%d of 2 connections gone, %d left", gone, b.a.Len())
	}
	heard := map[*Conn]Kind{}
	w.run(func() bool { return len(a.events) >= 3 }) // in either order, and one of the two is Gone at once
	for e, ok := a.take(); ok; e, ok = a.take() {
		if e.Kind != Gone {
			heard[e.c] = e.Kind
		}
	}
	if heard[c] != Disconnected || heard[asked] != Rejected {
		t.Errorf("heard %v", heard)
	}
	w.over()
}
