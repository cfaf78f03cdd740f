// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/test/harness"
)

// listener is a device with a QP in a group, alone with the test on its link.
func listener(t *testing.T, group netip.Addr) (s *station, e *harness.End) {
	s = newStation(t)
	e = datagramEnd(t, s.dev, group)
	attach(t, e, group)
	return s, e
}

// said lists the membership messages among frames: what and about which group.
func said(t *testing.T, fs [][]byte) (out []string) {
	t.Helper()
	for _, f := range fs {
		switch {
		case f[12] == 8 && f[13] == 0 && f[23] == 2:
			b := f[38:]
			if f[14] != 0x46 || f[22] != 1 || !bytes.Equal(f[34:38], []byte{0x94, 4, 0, 0}) ||
				onesComplement(f[14:38], nil, 0) != 0 || onesComplement(b, nil, 0) != 0 {
				t.Fatalf("IGMP % x", f)
			}
			dst := netip.AddrFrom4([4]byte(f[30:]))
			m := dst.As4()
			if !bytes.Equal(f[:6], []byte{1, 0, 0x5e, m[1] & 0x7f, m[2], m[3]}) {
				t.Fatalf("MAC of % x", f)
			}
			if b[0] == 0x22 {
				out = append(out, fmt.Sprintf("v3 %d %v to %v", b[8], netip.AddrFrom4([4]byte(b[12:])), dst))
			} else {
				out = append(out, fmt.Sprintf("%#x %v to %v", b[0], netip.AddrFrom4([4]byte(b[4:])), dst))
			}
		case f[12] == 0x86 && f[20] == 0:
			b := f[62:]
			if f[21] != 1 || !bytes.Equal(f[54:62], []byte{58, 0, 5, 2, 0, 0, 1, 0}) || f[22] != 0xfe ||
				onesComplement(f[22:54], b, uint32(len(b))+58) != 0 || !bytes.Equal(f[:2], []byte{0x33, 0x33}) || !bytes.Equal(f[2:6], f[50:54]) {
				t.Fatalf("MLD % x", f)
			}
			dst := netip.AddrFrom16([16]byte(f[38:]))
			if b[0] == 143 {
				out = append(out, fmt.Sprintf("v2 %d %v to %v", b[8], netip.AddrFrom16([16]byte(b[12:])), dst))
			} else {
				out = append(out, fmt.Sprintf("%d %v to %v", b[0], netip.AddrFrom16([16]byte(b[8:])), dst))
			}
		}
	}
	return out
}

// wait lets ns pass and returns what the device said meanwhile.
func (s *station) wait(ns int64) (out [][]byte) {
	end := s.clock.Now() + ns
	for {
		out = append(out, s.read()...)
		at := s.dev.NextDeadline()
		if at > end {
			s.clock.AdvanceTo(end)
			return append(out, s.read()...)
		}
		s.clock.AdvanceTo(at)
	}
}

const second = int64(1e9)

func expect(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// igmp is an IGMP message from the station.
func igmp(dst netip.Addr, ttl byte, body []byte) []byte {
	b := make([]byte, 38, 38+len(body))
	m := dst.As4()
	copy(b, []byte{1, 0, 0x5e, m[1] & 0x7f, m[2], m[3]})
	copy(b[6:], stationMAC[:])
	copy(b[12:], []byte{8, 0, 0x46, 0xc0, 0, byte(24 + len(body)), 0, 0, 0, 0, ttl, 2, 0, 0})
	copy(b[26:], stationV4.AsSlice())
	copy(b[30:], dst.AsSlice())
	copy(b[34:], []byte{0x94, 4, 0, 0})
	binary.BigEndian.PutUint16(b[24:], onesComplement(b[14:38], nil, 0))
	b = append(b, body...)
	b[40], b[41] = 0, 0
	binary.BigEndian.PutUint16(b[40:], onesComplement(b[38:], nil, 0))
	return b
}

func query4(version int, code byte, group netip.Addr) []byte {
	b := append([]byte{0x11, code, 0, 0}, group.AsSlice()...)
	if version == 3 {
		b = append(b, 2, 125, 0, 0)
	}
	return b
}

var (
	systems   = netip.MustParseAddr("224.0.0.1")
	anyGroup4 = netip.IPv4Unspecified()
	anyGroup6 = netip.IPv6Unspecified()

	linkLocalRouter = netip.MustParseAddr("fe80::99")
)

func TestIGMP(t *testing.T) {
	const to22, join, is, leave = " 239.1.2.3 to 224.0.0.22", "v3 4", "v3 2", "v3 3"
	s, e := listener(t, group4)
	expect(t, "join", said(t, s.read())[1:], join+to22) // the first is the link-local address's
	expect(t, "join again", said(t, s.wait(second)), join+to22)
	expect(t, "silence", said(t, s.wait(300*second)))

	expect(t, "at once after a query", said(t, s.say(igmp(systems, 1, query4(3, 100, anyGroup4)))))
	expect(t, "query for all", said(t, s.wait(10*second)), is+to22)
	s.say(igmp(group4, 1, query4(3, 10, group4)))
	expect(t, "query for the group", said(t, s.wait(second)), is+to22)
	s.say(igmp(group4, 1, query4(3, 10, netip.MustParseAddr("239.9.9.9"))))
	expect(t, "query for another group", said(t, s.wait(10*second)))
	late := 0
	for range 8 {
		s.say(igmp(systems, 1, query4(3, 0xb4, anyGroup4))) // (4|16) << (3+3) tenths: 128 s
		got := said(t, s.wait(19*second))                   // as a plain number it would be 18 s
		late += 1 - len(got)
		expect(t, "a long maximum", append(got, said(t, s.wait(110*second))...), is+to22)
	}
	if late == 0 {
		t.Error("all answers to queries with a long maximum come early")
	}

	bad := s.dev.Stats().Drops[provider.DropBadIGMP]
	f := igmp(systems, 1, query4(3, 10, anyGroup4))
	f[38+4]++
	s.say(f)
	s.say(igmp(systems, 2, query4(3, 10, anyGroup4)))
	s.say(igmp(systems, 1, query4(3, 10, stationV4)))
	s.say(igmp(systems, 1, append(query4(2, 10, anyGroup4), 0, 0)))
	expect(t, "bad queries", said(t, s.wait(10*second)))
	if n := s.dev.Stats().Drops[provider.DropBadIGMP] - bad; n != 4 {
		t.Errorf("%d bad messages counted, want 4", n)
	}

	// With a router of version 2 we speak that, and are content with others' answers.
	s.say(igmp(systems, 1, query4(2, 10, anyGroup4)))
	expect(t, "version 2 query", said(t, s.wait(second)), "0x16 239.1.2.3 to 239.1.2.3")
	s.say(igmp(systems, 1, query4(2, 100, anyGroup4)))
	s.say(igmp(group4, 1, append([]byte{0x16, 0, 0, 0}, group4.AsSlice()...)))
	expect(t, "somebody else answered", said(t, s.wait(10*second)))
	if err := e.QP.DetachMcast(provider.GIDOf(group4)); err != nil {
		t.Fatal(err)
	}
	expect(t, "version 2 leave", said(t, s.wait(10*second)), "0x17 239.1.2.3 to 224.0.0.2")
	s.say(igmp(systems, 1, query4(2, 10, anyGroup4)))
	expect(t, "query after leaving", said(t, s.wait(10*second)))

	s.say(igmp(systems, 1, query4(1, 0, anyGroup4)))
	attach(t, e, group4)
	expect(t, "version 1 join", said(t, s.wait(10*second)), "0x12 239.1.2.3 to 239.1.2.3", "0x12 239.1.2.3 to 239.1.2.3")
	if err := e.QP.DetachMcast(provider.GIDOf(group4)); err != nil {
		t.Fatal(err)
	}
	expect(t, "version 1 leave", said(t, s.wait(10*second)))

	s.wait(261 * second) // the old router is forgotten
	attach(t, e, group4)
	expect(t, "join", said(t, s.wait(second)), join+to22, join+to22)
	if err := e.QP.DetachMcast(provider.GIDOf(group4)); err != nil {
		t.Fatal(err)
	}
	expect(t, "leave", said(t, s.wait(second)), leave+to22, leave+to22)
	attach(t, e, systems)
	expect(t, "the group all are in", said(t, s.wait(10*second)))
	if n := s.dev.Stats().IGMPReports; n == 0 {
		t.Error("reports are not counted")
	}
}

// mld is an MLD message from the station.
func mld(src, dst netip.Addr, hops byte, alert bool, body []byte) []byte {
	d := dst.As16()
	inner := ip6([6]byte{0x33, 0x33, d[12], d[13], d[14], d[15]}, stationMAC, src, dst, hops, body)
	ext := []byte{58, 0, 5, 2, 0, 0, 1, 0}
	if !alert {
		copy(ext[2:], []byte{1, 4, 0, 0, 0, 0})
	}
	f := append([]byte(nil), inner[:54]...)
	f[20] = 0
	binary.BigEndian.PutUint16(f[18:], uint16(len(body)+8))
	return append(append(f, ext...), inner[54:]...)
}

func query6(version int, ms uint16, group netip.Addr) []byte {
	b := append([]byte{130, 0, 0, 0, byte(ms >> 8), byte(ms), 0, 0}, group.AsSlice()...)
	if version == 2 {
		b = append(b, 2, 125, 0, 0)
	}
	return b
}

func TestMLD(t *testing.T) {
	router := linkLocalRouter
	nodes := netip.MustParseAddr("ff02::1")
	const to16, join, is, leave = " ff15::abcd:1 to ff02::16", "v2 4", "v2 2", "v2 3"
	const nd = "v2 2 ff02::1:ff00:1 to ff02::16" // the solicited-node group of both addresses
	// both are the answers to a query for all, in the order in which they come.
	both := func(t *testing.T, got []string) {
		t.Helper()
		if len(got) != 2 || got[0] != nd && got[1] != nd || got[0] != is+to16 && got[1] != is+to16 {
			t.Errorf("query for all: %v", got)
		}
	}
	s, e := listener(t, group6)
	expect(t, "join", said(t, s.read()), "v2 4 ff02::1:ff00:1 to ff02::16", join+to16)
	expect(t, "join again", said(t, s.wait(second)), join+to16)
	s.say(mld(router, nodes, 1, true, query6(2, 1000, anyGroup6)))
	both(t, said(t, s.wait(second)))
	s.say(mld(router, group6, 1, true, query6(2, 1000, group6)))
	expect(t, "query for the group", said(t, s.wait(second)), is+to16)
	late := 0
	for range 8 {
		s.say(mld(router, nodes, 1, true, query6(2, 0x9000, anyGroup6))) // 0x1000 << (1+3) ms: 65.5 s
		got := said(t, s.wait(37*second))                                // as a plain number it would be 36.9 s
		late += 2 - len(got)
		both(t, append(got, said(t, s.wait(29*second))...))
	}
	if late == 0 {
		t.Error("all answers to queries with a long maximum come early")
	}

	bad := s.dev.Stats().Drops[provider.DropBadIGMP]
	f := mld(router, nodes, 1, true, query6(2, 1000, anyGroup6))
	f[70]++
	s.say(f)
	s.say(mld(router, nodes, 2, true, query6(2, 1000, anyGroup6)))
	s.say(mld(stationV6, nodes, 1, true, query6(2, 1000, anyGroup6)))
	s.say(mld(router, nodes, 1, false, query6(2, 1000, anyGroup6)))
	s.say(mld(router, nodes, 1, true, query6(2, 1000, stationV6)))
	expect(t, "bad queries", said(t, s.wait(10*second)))
	if n := s.dev.Stats().Drops[provider.DropBadIGMP] - bad; n != 5 {
		t.Errorf("%d bad messages counted, want 5", n)
	}

	s.say(mld(router, group6, 1, true, query6(1, 1000, group6)))
	expect(t, "version 1 query", said(t, s.wait(second)), "131 ff15::abcd:1 to ff15::abcd:1")
	s.say(mld(router, group6, 1, true, query6(1, 10000, group6)))
	s.say(mld(netip.MustParseAddr("fe80::98"), group6, 1, true, append([]byte{131, 0, 0, 0, 0, 0, 0, 0}, group6.AsSlice()...)))
	expect(t, "somebody else answered", said(t, s.wait(10*second)))
	if err := e.QP.DetachMcast(provider.GIDOf(group6)); err != nil {
		t.Fatal(err)
	}
	expect(t, "version 1 leave", said(t, s.wait(10*second)), "132 ff15::abcd:1 to ff02::2")
	s.wait(261 * second)
	attach(t, e, group6)
	expect(t, "join", said(t, s.wait(second)), join+to16, join+to16)
	if err := e.QP.DetachMcast(provider.GIDOf(group6)); err != nil {
		t.Fatal(err)
	}
	expect(t, "leave", said(t, s.wait(second)), leave+to16, leave+to16)
	attach(t, e, nodes)
	attach(t, e, netip.MustParseAddr("ff11::5"))
	expect(t, "groups nobody is told of", said(t, s.wait(10*second)))
}

// Leaving within the second before the join is said again says only that we have
// left, and the other way round.
func TestJoinLeaveJoin(t *testing.T) {
	s, e := listener(t, group4)
	s.read()
	if err := e.QP.DetachMcast(provider.GIDOf(group4)); err != nil {
		t.Fatal(err)
	}
	expect(t, "leave", said(t, s.read()), "v3 3 239.1.2.3 to 224.0.0.22")
	attach(t, e, group4)
	expect(t, "join", said(t, s.wait(5*second)), "v3 4 239.1.2.3 to 224.0.0.22", "v3 4 239.1.2.3 to 224.0.0.22")
}

// A device that is closed leaves its groups.
func TestCloseLeaves(t *testing.T) {
	s, _ := listener(t, group4)
	s.wait(10 * second)
	if err := s.dev.Close(); err != nil {
		t.Fatal(err)
	}
	s.dev = nil
	expect(t, "close", said(t, s.read()), "v3 3 239.1.2.3 to 224.0.0.22")
}

// breakable is a device whose link can be down.
type breakable struct {
	tap.Device
	down bool
}

func (b *breakable) WriteBatch(fs []tap.Frame) (int, error) {
	if b.down {
		return 0, tap.ErrDown
	}
	return b.Device.WriteBatch(fs)
}

// A link that comes back hears of all groups.
func TestLinkUpRejoins(t *testing.T) {
	var cable *breakable
	p := harness.NewPairWith(t, link, func(i int, d tap.Device) tap.Device {
		if i == 0 {
			cable = &breakable{Device: d}
			return cable
		}
		return d
	})
	e := datagramEnd(t, p.Dev[0], group4)
	attach(t, e, group4)
	p.Settle()
	cable.down = true
	e.Send(toGroup(e, 1, 10))
	p.Settle()
	before := p.Dev[0].Stats()
	cable.down = false
	e.Send(toGroup(e, 2, 10))
	p.Settle()
	after := p.Dev[0].Stats()
	// Twice each: the group, and the solicited-node groups of both IPv6 addresses.
	if after.IGMPReports != before.IGMPReports+2 || after.MLDReports != before.MLDReports+4 {
		t.Errorf("%d IGMP and %d MLD reports", after.IGMPReports-before.IGMPReports, after.MLDReports-before.MLDReports)
	}
}
