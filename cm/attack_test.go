// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/tapverbs/tapverbs/wire"
)

// TestHalfOpen: an application accepts whatever comes, and thousands who ask are never heard
// of again. Those who mean it are served meanwhile, what is established stays, and no more
// than so many half-open connections are kept.
func TestHalfOpen(t *testing.T) {
	w := newWorld(t, 0, "10.0.0.1", "10.0.0.2", "10.0.0.3")
	a, b, x := w.order[0], w.order[1], w.order[2]
	b.listen(16)
	old, oldServer := w.pair()
	mute := 0
	serve := func() (reply *Conn) {
		for e, ok := b.take(); ok; e, ok = b.take() {
			switch e.Kind {
			case Request:
				if err := e.c.Accept(w.now, b.nextQP()); err != nil {
					t.Fatal(err)
				}
			case Unreachable:
				if e.c.peer.Addr != x.addr {
					t.Fatalf("%v was given up", e.c.peer.Addr)
				}
				mute++
			case Disconnected:
				if e.c == oldServer {
					t.Fatal("an established connection has ended")
				}
			}
		}
		for e, ok := a.take(); ok; e, ok = a.take() {
			switch e.Kind {
			case Reply:
				if err := e.c.Ready(w.now, nil); err != nil {
					t.Fatal(err)
				}
				reply = e.c
			case Rejected, Unreachable:
				t.Fatalf("who meant it hears %+v", e)
			}
		}
		return reply
	}
	w.filter = func(src netip.Addr, m wire.CMAttr) bool { return m != wire.CMREJ || src != x.addr } // mute
	for i := range 5000 {
		x.a.send(x.addr, b.addr, 1, wire.CMREQ, &wire.CMReq{LocalID: uint32(i + 1), ServiceID: service, LocalQPN: wire.QPN(i + 10), MTU: 5,
			Primary: wire.CMPath{LocalGID: x.addr.As16(), RemoteGID: b.addr.As16()}, RemoteTimeout: 31, LocalTimeout: 31, MaxCMRetries: 15})
		if i%100 == 0 {
			c := a.connect(b)
			for got := (*Conn)(nil); got != c; {
				w.run(func() bool { return len(a.events)+len(b.events) > 0 })
				got = serve()
			}
			w.run(func() bool { return len(b.events) > 0 })
			serve()
			c.Destroy(w.now)
		}
		if i%10 == 9 {
			w.run(func() bool { return len(w.queue) == 0 })
			serve()
		}
		if n := b.a.half.Len(); n > MaxHalfOpen {
			t.Fatalf("%d half-open connections", n)
		}
		if n := b.a.Len(); n > MaxHalfOpen+MaxLingering+100 {
			t.Fatalf("%d connections", n)
		}
	}
	if n := b.a.Stats().GivenUp; n == 0 || mute == 0 {
		t.Errorf("%d given up, %d told", n, mute)
	}
	if !old.Open() || !oldServer.Open() {
		t.Error("the first connection has ended")
	}
	oldServer = nil
	old.Destroy(w.now)
	w.run(func() bool { serve(); return false })
	b.events = nil
	w.over()
	if n := b.a.half.Len(); n != 0 {
		t.Errorf("%d half-open connections are left", n)
	}
}

// TestTakenBack: who has had no answer yet and wants none any more says so, by its own ID and
// the GUID of its node, as the kernel does. From elsewhere, or with another GUID, that is nothing.
func TestTakenBack(t *testing.T) {
	w := newWorld(t, 0, "10.0.0.1", "10.0.0.2", "10.0.0.3")
	a, b, x := w.order[0], w.order[1], w.order[2]
	b.listen(1)
	c := a.connect(b)
	s := b.want(Request).c
	forged := wire.CMRej{LocalID: c.id, Reason: wire.RejTimeout, Of: 2, InfoLen: 8}
	binary.BigEndian.PutUint64(forged.Info[:], 1)
	x.a.send(x.addr, b.addr, 1, wire.CMREJ, &forged)
	forged.Info[7]++
	x.a.send(a.addr, b.addr, 1, wire.CMREJ, &forged)
	forged.InfoLen = 0
	x.a.send(a.addr, b.addr, 1, wire.CMREJ, &forged)
	w.run(func() bool { return len(w.queue) == 0 })
	if len(b.events) != 0 || s.state != stateReqRcvd {
		t.Fatalf("taken back by somebody else: %+v", b.events)
	}
	c.Destroy(w.now)
	if e := b.want(Rejected); e.c != s || e.Reason != wire.RejTimeout {
		t.Errorf("%+v", e)
	}
	if err := s.Accept(w.now, b.nextQP()); err != ErrState {
		t.Errorf("accepting what was taken back: %v", err)
	}
	// The backlog has room again; and here the answer crosses with who takes it back.
	w.filter = func(src netip.Addr, m wire.CMAttr) bool { return m != wire.CMREP }
	c = a.connect(b)
	s = b.want(Request).c
	if err := s.Accept(w.now, b.nextQP()); err != nil {
		t.Fatal(err)
	}
	c.Destroy(w.now)
	if e := b.want(Rejected); e.c != s {
		t.Errorf("%+v", e)
	}
	b.want(Gone)
	b.want(Gone)
	w.over()
}

// TestNoise: messages that make no sense for a connection change nothing, and some are answered.
func TestNoise(t *testing.T) {
	w := newWorld(t, 0, "10.0.0.1", "10.0.0.2", "10.0.0.3")
	a, b, x := w.order[0], w.order[1], w.order[2]
	b.listen(4)
	c, s := w.pair()
	// From the peer's own address and with the right IDs, but out of place.
	for _, m := range []struct {
		attr wire.CMAttr
		m    message
	}{
		{wire.CMMRA, &wire.CMMra{LocalID: c.id, RemoteID: s.id, Of: 1, ServiceTimeout: 31}},
		{wire.CMRTU, &wire.CMRtu{LocalID: c.id, RemoteID: s.id}},
		{wire.CMDREP, &wire.CMDrep{LocalID: c.id, RemoteID: s.id}},
		{wire.CMREP, &wire.CMRep{LocalID: c.id, RemoteID: s.id, LocalQPN: 5}},
		{wire.CMSIDRREP, &wire.CMSidrRep{RequestID: s.id}},
		{wire.CMAPR, &wire.CMApr{LocalID: c.id, RemoteID: s.id}},
		{wire.CMREJ, &wire.CMRej{LocalID: c.id, RemoteID: s.id + 1}},
	} {
		a.a.send(a.addr, b.addr, 1, m.attr, m.m)
	}
	// A stranger with all that a peer knows: nothing ends, whatever is asked for.
	for _, m := range []struct {
		attr wire.CMAttr
		m    message
	}{
		{wire.CMDREQ, &wire.CMDreq{LocalID: c.id, RemoteID: s.id, RemoteQPN: s.me.QPN}},
		{wire.CMREJ, &wire.CMRej{LocalID: c.id, RemoteID: s.id, Reason: wire.RejStale}},
		{wire.CMREJ, &wire.CMRej{LocalID: c.id, Reason: wire.RejTimeout}},
		{wire.CMRTU, &wire.CMRtu{LocalID: c.id, RemoteID: s.id}},
		{wire.CMLAP, &wire.CMLap{LocalID: c.id, RemoteID: s.id}},
		{wire.CMREQ, &wire.CMReq{LocalID: c.id, ServiceID: service, LocalQPN: c.me.QPN, MTU: 5,
			Primary: wire.CMPath{LocalGID: a.addr.As16(), RemoteGID: b.addr.As16()}}},
	} {
		x.a.send(x.addr, b.addr, 1, m.attr, m.m)
	}
	w.log = nil
	w.run(func() bool { return len(w.queue) == 0 })
	if !c.Open() || !s.Open() || len(a.events)+len(b.events) != 0 {
		t.Errorf("open %v %v, events %+v %+v", c.Open(), s.Open(), a.events, b.events)
	}
	if !slices.Contains(w.log, "10.0.0.2 APR") {
		t.Errorf("an alternate path for no connection is not refused: %v", w.log)
	}
	if b.a.Len() != 1 || len(b.a.passive) != 1 {
		t.Errorf("%d connections, %d of them asked for by others", b.a.Len(), len(b.a.passive))
	}
	c.Destroy(w.now)
	b.want(Disconnected)
	b.want(Gone)
	w.over()
}

// FuzzReceive hands an agent with a listener, an established connection and one under way
// messages of any content, from the peer and from elsewhere, while time passes. It keeps
// its tables in order, and bounded; a stranger ends nothing.
func FuzzReceive(f *testing.F) {
	seed := seedMessages()
	for _, mad := range seed {
		f.Add(mad)
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, in []byte) {
		w := newWorld(t, 0, "10.0.0.1", "10.0.0.2", "10.0.0.3")
		a, b, x := w.order[0], w.order[1], w.order[2]
		b.listen(2)
		_, s := w.pair()
		waiting := a.connect(b)
		b.want(Request)
		// The input is messages: how far time goes on, who sends, what is put into the
		// places of the IDs, and the MAD behind the header's fixed part.
		for n := 0; len(in) > 3 && n < 8; n++ {
			var mad [wire.MADLen]byte
			h := wire.MADHeader{Class: wire.CMClass, ClassVersion: wire.CMClassVersion, Method: wire.MADSend, TID: uint64(n), Attr: uint16(wire.CMREQ) + uint16(in[0]%12)}
			h.Put(mad[:])
			who, ids, after := in[1], in[2], in[3]
			in = in[4:]
			in = in[copy(mad[wire.MADHeaderLen:], in):]
			body := mad[wire.MADHeaderLen:]
			for i, id := range []uint32{s.remoteID, s.id, waiting.id, waiting.remoteID} {
				if ids>>i&1 != 0 {
					binary.BigEndian.PutUint32(body[4*(i&1):], id)
				}
			}
			open := s.Open()
			src := x.addr
			if who&1 != 0 {
				src = a.addr
			}
			b.a.Receive(w.now, src, b.addr, mad[:])
			if who&1 == 0 && open && !s.Open() {
				t.Fatalf("a stranger's %v has ended a connection", wire.CMAttr(h.Attr))
			}
			if after != 0 {
				w.now += 4096 << (after & 31)
				b.a.Tick(w.now)
			}
			for e, ok := b.take(); ok; e, ok = b.take() {
				if e.Kind == Request && who&2 != 0 {
					if e.c.Transport == UD {
						e.c.AcceptService(w.now, b.nextQP())
					} else {
						e.c.Accept(w.now, b.nextQP())
					}
				}
			}
			if n := b.a.Len(); n > 2+8 {
				t.Fatalf("%d connections after %d messages", n, n+1)
			}
		}
		for _, c := range b.a.conns {
			c.Destroy(w.now)
		}
		w.order = w.order[1:2] // the others are not of interest any more
		b.a.cfg.Send = func(_, _ netip.Addr, _ *[wire.MADLen]byte) {}
		w.queue = nil
		w.over()
	})
}

// seedMessages gives the messages of a conversation as FuzzReceive takes them.
func seedMessages() (seeds [][]byte) {
	put := func(a wire.CMAttr, ids byte, m message) {
		b := make([]byte, 4+wire.CMLen)
		b[0], b[1], b[2], b[3] = byte(a-wire.CMREQ), 3, ids, 10
		m.Put(b[4:])
		seeds = append(seeds, b)
	}
	from, to := netip.MustParseAddr("10.0.0.1").As16(), netip.MustParseAddr("10.0.0.2").As16()
	put(wire.CMREQ, 0, &wire.CMReq{LocalID: 7, ServiceID: service, LocalQPN: 99, MTU: 5, LocalTimeout: 20, RemoteTimeout: 20, MaxCMRetries: 15,
		Primary: wire.CMPath{LocalGID: from, RemoteGID: to}})
	put(wire.CMMRA, 3, &wire.CMMra{Of: 1, ServiceTimeout: 20})
	put(wire.CMREJ, 3, &wire.CMRej{Reason: wire.RejConsumer})
	put(wire.CMREJ, 4, &wire.CMRej{Reason: wire.RejTimeout, InfoLen: 8})
	put(wire.CMREP, 3, &wire.CMRep{LocalQPN: 99})
	put(wire.CMRTU, 3, &wire.CMRtu{})
	put(wire.CMDREQ, 3, &wire.CMDreq{RemoteQPN: 201})
	put(wire.CMDREP, 3, &wire.CMDrep{})
	put(wire.CMSIDRREQ, 0, &wire.CMSidrReq{RequestID: 9, ServiceID: service})
	put(wire.CMSIDRREP, 0, &wire.CMSidrRep{RequestID: 9})
	put(wire.CMLAP, 3, &wire.CMLap{})
	put(wire.CMAPR, 3, &wire.CMApr{})
	seeds = append(seeds, slices.Concat(seeds[0], seeds[6], seeds[0], seeds[5], seeds[6]))
	return seeds
}
