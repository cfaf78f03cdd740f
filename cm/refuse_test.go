// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"net/netip"
	"testing"

	"github.com/tapverbs/tapverbs/wire"
)

// heard keeps what a port sends, beside that it goes its way.
func (p *port) heard() *[][wire.MADLen]byte {
	all := &[][wire.MADLen]byte{}
	send := p.a.cfg.Send
	p.a.cfg.Send = func(src, dst netip.Addr, mad *[wire.MADLen]byte) {
		*all = append(*all, *mad)
		send(src, dst, mad)
	}
	return all
}

// last is the last message that was sent, which is to be one of these.
func last(t *testing.T, all *[][wire.MADLen]byte, want wire.CMAttr, m interface{ Parse(b []byte) }) {
	t.Helper()
	if len(*all) == 0 {
		t.Fatalf("nothing is said, want %v", want)
	}
	mad := (*all)[len(*all)-1]
	*all = nil
	if h, _ := wire.ParseMAD(mad[:]); wire.CMAttr(h.Attr) != want {
		t.Fatalf("%v is said, want %v", wire.CMAttr(h.Attr), want)
	}
	m.Parse(mad[wire.MADHeaderLen:])
}

// TestReasons: a REQ that cannot be accepted is rejected with the reason that the specification
// has for that (IBA 12.6.7.2), and so is a REP for nobody.
func TestReasons(t *testing.T) {
	w, a, b := newTwo(t, 0)
	b.a.cfg.MTU = 4
	l := b.listen(1)
	said := b.heard()
	for name, c := range map[string]struct {
		change func(m *wire.CMReq)
		reason wire.CMReason
		info   []byte
	}{
		"nobody listens":           {func(m *wire.CMReq) { m.ServiceID++ }, wire.RejInvalidServiceID, nil},
		"reliable datagrams":       {func(m *wire.CMReq) { m.Transport = 2 }, wire.RejInvalidTransport, nil},
		"no such transport":        {func(m *wire.CMReq) { m.Transport, m.ExtTransport = 3, 2 }, wire.RejInvalidTransport, nil},
		"another's GID":            {func(m *wire.CMReq) { m.Primary.LocalGID[15]++ }, wire.RejInvalidGID, gidOf("10.0.0.2")},
		"for another's GID":        {func(m *wire.CMReq) { m.Primary.RemoteGID[15]++ }, wire.RejInvalidGID, gidOf("10.0.0.2")},
		"MTU of 0":                 {func(m *wire.CMReq) { m.MTU = 0 }, wire.RejInvalidMTU, nil},
		"more than our MTU":        {func(m *wire.CMReq) { m.MTU = 5 }, wire.RejInvalidMTU, nil},
		"not what is listened for": {func(m *wire.CMReq) { m.Transport = 1 }, wire.RejConsumer, nil},
	} {
		l.Wants = func(tr Transport, _ []byte) bool { return tr != UC }
		m := wire.CMReq{LocalID: 77, ServiceID: service, LocalQPN: 99, MTU: 4, RemoteTimeout: 20, LocalTimeout: 20, MaxCMRetries: 1,
			Primary: wire.CMPath{LocalGID: a.addr.As16(), RemoteGID: b.addr.As16()}}
		c.change(&m)
		a.a.send(a.addr, b.addr, 1, wire.CMREQ, &m)
		w.run(func() bool { return len(w.queue) == 0 })
		var r wire.CMRej
		last(t, said, wire.CMREJ, &r)
		if r.Reason != c.reason || r.Of != 0 || r.LocalID != 0 || r.RemoteID != 77 || string(r.Info[:r.InfoLen]) != string(c.info) {
			t.Errorf("%s: %+v", name, r)
		}
		if len(b.events) != 0 {
			t.Errorf("%s: %+v", name, b.events)
		}
	}
	a.a.send(a.addr, b.addr, 1, wire.CMREP, &wire.CMRep{LocalID: 5, RemoteID: 6, LocalQPN: 7})
	w.run(func() bool { return len(w.queue) == 0 })
	var r wire.CMRej
	last(t, said, wire.CMREJ, &r)
	if r.Reason != wire.RejInvalidCommID || r.Of != 1 || r.LocalID != 6 || r.RemoteID != 5 {
		t.Errorf("a REP for nobody: %+v", r)
	}
	// What the application says, it says.
	a.connect(b) // by a route whose MTU is 4096
	if e := a.want(Rejected); e.Reason != wire.RejInvalidMTU {
		t.Errorf("%+v", e)
	}
	a.want(Gone)
	b.a.cfg.MTU = 5
	a.connect(b)
	if err := b.want(Request).c.Reject(w.now, wire.RejVendorOption, nil); err != nil {
		t.Fatal(err)
	}
	if e := a.want(Rejected); e.Reason != wire.RejVendorOption {
		t.Errorf("%+v", e)
	}
	a.want(Gone)
	b.want(Gone)
	w.over()
}

func gidOf(a string) []byte {
	g := netip.MustParseAddr(a).As16()
	return g[:]
}

// TestUC: a connection of UC is one to both ends.
func TestUC(t *testing.T) {
	w, a, b := newTwo(t, 0)
	b.listen(1)
	c, err := a.a.Connect(w.now, b.addr, service, UC, a.nextQP(), route)
	if err != nil {
		t.Fatal(err)
	}
	if s := b.want(Request).c; s.Transport != UC || c.Transport != UC {
		t.Errorf("transport %v", s.Transport)
	}
	if _, err := a.a.Connect(w.now, b.addr, service, UD, a.nextQP(), route); err != ErrState {
		t.Error(err)
	}
	c.Destroy(w.now)
	b.want(Rejected)
	b.want(Gone)
	w.over()
}

// TestPathOffered: an alternate path is declined, with why (IBA 12.8.2.1).
func TestPathOffered(t *testing.T) {
	w, a, b := newTwo(t, 0)
	b.listen(1)
	c, s := w.pair()
	said := b.heard()
	for remote, status := range map[uint32]uint8{s.id: wire.APRNotSupported, s.id + 1: wire.APRInvalidComm} {
		a.a.send(a.addr, b.addr, 9, wire.CMLAP, &wire.CMLap{LocalID: c.id, RemoteID: remote})
		w.run(func() bool { return len(w.queue) == 0 })
		var m wire.CMApr
		if last(t, said, wire.CMAPR, &m); m.Status != status || m.LocalID != remote || m.RemoteID != c.id {
			t.Errorf("%+v, want status %d", m, status)
		}
	}
	if !c.Open() || !s.Open() {
		t.Error("that has ended the connection")
	}
	c.Destroy(w.now)
	b.want(Disconnected)
	b.want(Gone)
	w.over()
}

// TestTakenBackReasons: who gives up a connection half-way says so as the kernel does: by a
// timeout while it has no answer, else as its application's wish, of the message that it has had.
func TestTakenBackReasons(t *testing.T) {
	for name, c := range map[string]struct {
		of     func(asking, asked *Conn) *Conn
		rtu    bool // the REP has arrived
		reason wire.CMReason
		which  uint8
	}{
		"asking":         {func(asking, _ *Conn) *Conn { return asking }, false, wire.RejTimeout, 2},
		"answered":       {func(asking, _ *Conn) *Conn { return asking }, true, wire.RejConsumer, 1},
		"having replied": {func(_, asked *Conn) *Conn { return asked }, true, wire.RejConsumer, 2},
	} {
		w, a, b := newTwo(t, 0)
		b.listen(1)
		asking := a.connect(b)
		asked := b.want(Request).c
		if c.rtu {
			if err := asked.Accept(w.now, b.nextQP()); err != nil {
				t.Fatal(err)
			}
			a.want(Reply)
		}
		at, peer := a, b
		who := c.of(asking, asked)
		if who == asked {
			at, peer = b, a
		}
		said := at.heard()
		who.Destroy(w.now)
		var m wire.CMRej
		if last(t, said, wire.CMREJ, &m); m.Reason != c.reason || m.Of != c.which || m.LocalID != who.id {
			t.Errorf("%s: %+v", name, m)
		}
		if e := peer.want(Rejected); e.Reason != c.reason {
			t.Errorf("%s: the other end hears %+v", name, e)
		}
		peer.want(Gone)
		w.over()
	}
}

// TestTimewait: what has ended is remembered for as long as its queue pairs wait for an answer,
// within bounds.
func TestTimewait(t *testing.T) {
	for code, want := range map[uint8]int64{0: 2_147_483_648, 14: 2_147_483_648, 19: 2_147_483_648, 20: 4_294_967_296, 21: 8_589_934_592, 31: 8_589_934_592} {
		w, a, b := newTwo(t, 0)
		b.listen(1)
		r := route
		r.AckTimeout = code
		c, err := a.a.Connect(w.now, b.addr, service, RC, a.nextQP(), r)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.want(Request).c.Accept(w.now, b.nextQP()); err != nil {
			t.Fatal(err)
		}
		a.want(Reply)
		if err := c.Ready(w.now, nil); err != nil {
			t.Fatal(err)
		}
		b.want(Established)
		if err := c.Disconnect(w.now, nil); err != nil {
			t.Fatal(err)
		}
		b.want(Disconnected)
		ended := w.now
		b.want(Gone)
		if got := w.now - ended; got != want {
			t.Errorf("timeout %d: remembered for %d ns, want %d", code, got, want)
		}
		a.want(Ended)
		a.want(Gone)
		w.over()
	}
}

// TestMoreTime: who has not answered yet asks for 69 s, as the kernel does, and is not asked again
// before.
func TestMoreTime(t *testing.T) {
	w, a, b := newTwo(t, 0)
	b.listen(1)
	said := b.heard()
	c := a.connect(b)
	s := b.want(Request).c
	w.run(func() bool { return len(*said) > 0 })
	var m wire.CMMra
	if last(t, said, wire.CMMRA, &m); m.ServiceTimeout != 24 || m.Of != 0 || m.LocalID != s.id || m.RemoteID != c.id {
		t.Errorf("%+v", m)
	}
	since := w.now
	w.run(func() bool { return len(*said) > 0 })
	if d := w.now - since; d < 68_000_000_000 || d > 71_000_000_000 {
		t.Errorf("asked again after %d ns", d)
	}
	c.Destroy(w.now)
	b.want(Rejected)
	b.want(Gone)
	w.over()
}
