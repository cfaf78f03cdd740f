// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/harness"
)

// TestJoinGroup: datagrams by what a membership says reach who has joined and attached; the
// link hears of a group when the first joins and when the last leaves, be that a queue pair or not.
func TestJoinGroup(t *testing.T) {
	for _, group := range []netip.Addr{group4, group6} {
		t.Run(group.String(), func(t *testing.T) {
			p := harness.NewPair(t, link)
			a, b := datagramEnd(t, p.Dev[0], group), datagramEnd(t, p.Dev[1], group)
			to, err := p.Dev[0].JoinGroup(group, true)
			if err != nil {
				t.Fatal(err)
			}
			in, err := p.Dev[1].JoinGroup(group, false)
			if err != nil {
				t.Fatal(err)
			}
			if err := in.Attach(b.QP); err != nil {
				t.Fatal(err)
			}
			if to.AH != in.AH || to.QKey != provider.UDPQKey || to.AH.DGID.Addr() != group {
				t.Errorf("%+v and %+v", to, in)
			}
			for _, e := range []*harness.End{a, b} { // the Q_Key is of RDMA CM's programs
				if err := reset(e); err != nil {
					t.Fatal(err)
				}
				q := provider.QPAttr{Attr: qp.Attr{Port: 1, QKey: to.QKey}}
				q.State = qp.StateReset
				if err := errors.Join(e.QP.Modify(q, qp.AttrState), harness.Up(e.QP, q, qp.StateRTS)); err != nil {
					t.Fatal(err)
				}
			}
			ah, err := a.PD.CreateAH(to.AH)
			if err != nil {
				t.Fatal(err)
			}
			send := func() {
				t.Helper()
				wr := a.Message(1, 0, 100)
				wr.AH, wr.RemoteQPN, wr.RemoteQKey = ah.Index(), to.QPN, to.QKey
				a.Send(wr)
				p.Settle()
				if wcs := a.Poll(); len(wcs) != 1 || wcs[0].Status != qp.WCSuccess {
					t.Fatalf("sent: %+v", wcs)
				}
			}
			b.Recv(2, 8192, 140)
			harness.Fill(a.Mem[:100], 5)
			send()
			if wcs := b.Poll(); len(wcs) != 1 || wcs[0].Status != qp.WCSuccess || !bytes.Equal(b.Mem[8192+40:][:100], a.Mem[:100]) {
				t.Errorf("received: %+v", wcs)
			}
			if err := in.Detach(b.QP); err != nil {
				t.Error(err)
			}
			b.Recv(3, 8192, 140)
			send()
			if wcs := b.Poll(); len(wcs) != 0 {
				t.Errorf("received without being attached: %+v", wcs)
			}
			if err := errors.Join(to.Leave(), in.Leave()); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestGroupMembership(t *testing.T) {
	if raceDetector {
		t.Skip("long virtual time in one goroutine")
	}
	s := newStation(t)
	e := datagramEnd(t, s.dev, group4)
	s.wait(10 * second)
	sent, err := s.dev.JoinGroup(group4, true)
	if err != nil {
		t.Fatal(err)
	}
	expect(t, "one that only sends", said(t, s.wait(10*second)))
	first, err := s.dev.JoinGroup(group4, false)
	if err != nil {
		t.Fatal(err)
	}
	expect(t, "joined", said(t, s.wait(10*second)), "v3 4 239.1.2.3 to 224.0.0.22", "v3 4 239.1.2.3 to 224.0.0.22")
	second2, err := s.dev.JoinGroup(group4, false)
	if err != nil {
		t.Fatal(err)
	}
	attach(t, e, group4)
	if err := errors.Join(first.Leave(), second2.Leave(), sent.Leave()); err != nil {
		t.Error(err)
	}
	expect(t, "a queue pair is left", said(t, s.wait(10*second)))
	if err := first.Leave(); !errors.Is(err, provider.ErrClosed) {
		t.Error(err)
	}
	if err := e.QP.DetachMcast(provider.GIDOf(group4)); err != nil {
		t.Error(err)
	}
	expect(t, "left", said(t, s.wait(10*second)), "v3 3 239.1.2.3 to 224.0.0.22", "v3 3 239.1.2.3 to 224.0.0.22")
	for _, a := range []string{"10.1.2.3", "fd00::1", "::"} {
		if _, err := s.dev.JoinGroup(netip.MustParseAddr(a), false); !errors.Is(err, provider.ErrInvalid) {
			t.Errorf("%s: %v", a, err)
		}
	}
	// No more than there may be, and what was left makes room.
	limit := s.dev.Query().MaxMcastGrp
	var all []*provider.Group
	for i := range limit {
		g, err := s.dev.JoinGroup(netip.AddrFrom4([4]byte{239, 9, byte(i >> 8), byte(i)}), false)
		if err != nil {
			t.Fatalf("group %d: %v", i, err)
		}
		all = append(all, g)
	}
	if _, err := s.dev.JoinGroup(group4, false); !errors.Is(err, provider.ErrNoMem) {
		t.Error(err)
	}
	if err := all[0].Leave(); err != nil {
		t.Error(err)
	}
	if _, err := s.dev.JoinGroup(group4, false); err != nil {
		t.Error(err)
	}
	s.wait(second)
	if err := s.dev.Close(); err != nil {
		t.Error(err)
	}
	if n := len(said(t, s.read())); n < limit {
		t.Errorf("a device that is closed has left %d groups of %d", n, limit)
	}
	if err := all[1].Leave(); !errors.Is(err, provider.ErrClosed) {
		t.Error(err)
	}
}
