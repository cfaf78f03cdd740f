// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/cm"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

// attacker is a host on the link of two devices, who hears all that they say to each other and
// sends what he likes: from his own address, or noise from theirs.
type attacker struct {
	*traffic
	rnd     *rand.Rand
	port    *taptest.Port
	heard   [][wire.MADLen]byte
	ids     [][2]uint32 // of connections, client's first
	qpns    []wire.QPN  // of the client and the server, by turns
	sent    int
	last    int // so much is sent
	entries int // most of device 1
}

var (
	attackerMAC  = [6]byte{2, 0, 0, 0, 0xba, 0xd0}
	attackerAddr = netip.MustParseAddr("10.91.0.66")
)

// say sends a MAD to queue pair 1 of a device.
func (x *attacker) say(to int, src netip.Addr, mad []byte) {
	dst := harness.Addrs(to)[0].Addr()
	p := wire.Path{SrcMAC: attackerMAC, DstMAC: [6]byte(x.Dev[to].MAC()), Src: src, Dst: dst, HopLimit: 64, SrcPort: 0xc000}
	bth := wire.BTH{Op: wire.UDSendOnly, PKey: wire.DefaultPKey, DestQP: wire.GSIQPN}
	deth := make([]byte, wire.DETHLen)
	wire.DETH{QKey: wire.GSIQKey, SrcQP: wire.GSIQPN}.Put(deth)
	b := make([]byte, 1024)
	b = b[:wire.Encode(b, &p, 0, &bth, deth, mad)]
	if _, err := x.port.WriteBatch([]tap.Frame{{B: b}}); err != nil {
		x.T.Fatal(err)
	}
	x.sent++
}

type putter interface{ Put(b []byte) }

func cmMAD(attr wire.CMAttr, m putter) []byte {
	b := make([]byte, wire.MADLen)
	h := wire.MADHeader{Class: wire.CMClass, ClassVersion: wire.CMClassVersion, Method: wire.MADSend, TID: 1, Attr: uint16(attr)}
	h.Put(b)
	m.Put(b[wire.MADHeaderLen:])
	return b
}

// hear takes down what the two say to each other.
func (x *attacker) hear(frame []byte) {
	var p wire.Packet
	if wire.Parse(frame, &p) != nil || p.BTH.DestQP != wire.GSIQPN || p.Src() == attackerAddr || p.Dst() == attackerAddr {
		return
	}
	h, ok := wire.ParseMAD(p.Payload)
	if !ok || h.Class != wire.CMClass {
		return
	}
	x.heard = append(x.heard, [wire.MADLen]byte(p.Payload))
	if wire.CMAttr(h.Attr) == wire.CMREP {
		var m wire.CMRep
		m.Parse(p.Payload[wire.MADHeaderLen:])
		x.ids = append(x.ids, [2]uint32{m.RemoteID, m.LocalID})
		x.qpns = append(x.qpns, m.LocalQPN)
	}
}

// ignore drops what is sent to him.
func (x *attacker) ignore() {
	fs := []tap.Frame{{B: make([]byte, 10000)}}
	for {
		n, err := x.port.ReadBatch(fs)
		if err != nil {
			x.T.Fatal(err)
		}
		if n == 0 {
			return
		}
		fs[0].B = fs[0].B[:cap(fs[0].B)]
	}
}

// act is a round of what he does.
func (x *attacker) act() {
	x.ignore()
	x.entries = max(x.entries, x.Dev[1].CMEntries())
	if x.sent >= x.last {
		return
	}
	// Half-open connections: each of its own queue pair, none of which is heard of again.
	for range 3 {
		x.say(1, attackerAddr, cmMAD(wire.CMREQ, &wire.CMReq{LocalID: uint32(x.sent + 1), ServiceID: wire.ServiceID(wire.PSTCP, 7471),
			LocalQPN: wire.QPN(x.sent + 2), MTU: 3, LocalTimeout: 31, RemoteTimeout: 31, MaxCMRetries: 15, RetryCount: 7, RNRRetry: 7,
			Primary: wire.CMPath{LocalGID: attackerAddr.As16(), RemoteGID: harness.Addrs(1)[0].Addr().As16()}}))
	}
	// Noise, from anybody.
	var noise [wire.MADLen]byte
	for i := range noise {
		noise[i] = byte(x.rnd.Uint32())
	}
	x.say(1, harness.Addrs(0)[0].Addr(), noise[:])
	copy(noise[:], cmMAD(wire.CMREQ+wire.CMAttr(x.rnd.IntN(12)), &wire.CMRtu{})[:wire.MADHeaderLen])
	x.say(x.rnd.IntN(2), harness.Addrs(x.rnd.IntN(2))[0].Addr(), noise[:])
	if len(x.heard) > 0 {
		mad := x.heard[x.rnd.IntN(len(x.heard))]
		for range x.rnd.IntN(4) {
			mad[x.rnd.IntN(len(mad))] = byte(x.rnd.Uint32())
		}
		x.say(1, attackerAddr, mad[:])
	}
	if len(x.ids) == 0 {
		return
	}
	// All that a peer knows, of a connection that is there, but another address.
	k := x.rnd.IntN(len(x.ids))
	if x.rnd.IntN(2) == 0 {
		k = len(x.ids) - 1
	}
	to := x.rnd.IntN(2)
	local, remote := x.ids[k][1-to], x.ids[k][to]
	for attr, m := range map[wire.CMAttr]putter{
		wire.CMDREQ: &wire.CMDreq{LocalID: local, RemoteID: remote, RemoteQPN: x.qpns[k]},
		wire.CMREJ:  &wire.CMRej{LocalID: local, RemoteID: remote, Reason: wire.RejStale},
		wire.CMRTU:  &wire.CMRtu{LocalID: local, RemoteID: remote},
		wire.CMMRA:  &wire.CMMra{LocalID: local, RemoteID: remote, ServiceTimeout: 31},
		wire.CMDREP: &wire.CMDrep{LocalID: local, RemoteID: remote},
		wire.CMLAP:  &wire.CMLap{LocalID: local, RemoteID: remote},
	} {
		x.say(to, attackerAddr, cmMAD(attr, m))
	}
}

// TestListenerUnderGarbage: while a listener is flooded with requests of which nothing comes,
// which it accepts, with noise, mutated messages, and forged ones of connections that there
// are, it serves all who mean it, keeps what is established, and its tables have bounds.
func TestListenerUnderGarbage(t *testing.T) {
	x := &attacker{rnd: rand.New(rand.NewPCG(5, 6)), last: 20_000}
	c := newCrowd(t, taptest.Config{Seed: 9, Delay: 20 * time.Microsecond, Filter: func(from int, f []byte) taptest.Verdict {
		if from != 2 {
			x.hear(f)
		}
		return taptest.Pass
	}})
	tr := newTraffic(c, 10)
	x.traffic, x.port = tr, c.Net.Port(2)
	for _, d := range c.Dev {
		if err := d.AddNeighbour(attackerAddr, attackerMAC); err != nil {
			t.Fatal(err)
		}
	}
	tr.stranger = func(r *provider.ConnRequest) {
		// It looks like any other, and is accepted.
		cq, err := c.Dev[1].CreateCQ(4, nil)
		if err != nil {
			t.Fatal(err)
		}
		e := &peerEnd{c: c, pd: tr.pds[1], cq: cq}
		a := e.attr()
		a.Prepare = nil
		if _, err := r.Accept(context.Background(), tr.pds[1], a); err == nil {
			t.Fatal("half a connection is a whole one")
		}
		if err := cq.Destroy(); err != nil {
			t.Error(err)
		}
	}
	c.each = x.act
	// One connection that lasts.
	stays := make([]*provider.Conn, 2)
	c.spawn(func() {
		e, _ := tr.end(0)
		a := e.attr()
		a.Private = []byte("stays")
		var err error
		if stays[0], err = tr.pds[0].Dial(context.Background(), netip.MustParseAddrPort(trafficPort), a); err != nil {
			t.Fatal(err)
		}
	})
	c.spawn(func() {
		e, _ := tr.end(1)
		r, err := tr.l.Accept(context.Background())
		for err == nil && !strings.HasPrefix(string(r.Private), "stays") {
			err = r.Reject(nil)
			if err == nil || errors.Is(err, cm.ErrState) {
				r, err = tr.l.Accept(context.Background())
			}
		}
		if err == nil {
			stays[1], err = r.Accept(context.Background(), tr.pds[1], e.attr())
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	c.run()
	tr.connect(400, 5)
	if x.sent < x.last {
		t.Errorf("only %d messages were sent to disturb", x.sent)
	}
	if most := 5 * (cm.MaxHalfOpen + cm.MaxLingering + 100); x.entries > most || x.entries < cm.MaxHalfOpen {
		t.Errorf("tables had up to %d entries, %d are too many", x.entries, most)
	}
	if len(x.ids) < 400 {
		t.Errorf("he heard of %d connections", len(x.ids))
	}
	st := c.Dev[1].CMStats()
	if st.GivenUp == 0 || st.Stray == 0 || st.Refused == 0 || st.Malformed == 0 {
		t.Errorf("%+v", st)
	}
	for _, s := range stays {
		select {
		case <-s.Done():
			t.Error("the connection that was to last has ended")
		default:
		}
	}
	c.spawn(func() {
		for _, s := range stays {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			tr.until(s)
		}
	})
	c.run()
	for c.Step() { // until nothing is on its way: what he does not read would be for ever
		x.ignore()
	}
	for i, d := range c.Dev {
		if h := d.Holds(); h.CM != 0 || h.QPs != 0 || h.Numbers != 0 || h.Neighbours != 2 || h.Asking != 0 {
			t.Errorf("device %d holds %+v", i, h)
		}
	}
}

// number is what a client says of itself; a stranger says none.
func number(private []byte) (int, bool) {
	k, err := strconv.Atoi(strings.TrimRight(string(private), "\x00"))
	return k, err == nil
}
