// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

func TestAnnounce(t *testing.T) {
	s := newStation(t)
	fs := s.read()
	if len(fs) != 4 {
		t.Fatalf("%d frames at open, want one for each address, and for the group of both IPv6 addresses", len(fs))
	}
	var arps, nas, mlds int
	for _, f := range fs {
		switch {
		case f[12] == 8 && f[13] == 6:
			arps++
			if [6]byte(f) != broadcast || [4]byte(f[28:]) != [4]byte(f[38:]) || netip.AddrFrom4([4]byte(f[28:])) != harness.Addrs(0)[0].Addr() {
				t.Errorf("gratuitous ARP % x", f)
			}
		case f[20] == 0 && f[62] == 143:
			mlds++
		case f[54] == 136:
			nas++
			if f[21] != 255 || f[58] != 0x20 || [6]byte(f[80:]) != s.mac() || onesComplement(f[22:54], f[54:], uint32(len(f)-54)+58) != 0 {
				t.Errorf("unsolicited NA % x", f)
			}
		}
	}
	if arps != 1 || nas != 2 || mlds != 1 {
		t.Errorf("%d ARP announcements, %d advertisements, %d listener reports, want 1, 2, 1", arps, nas, mlds)
	}
}

func TestARP(t *testing.T) {
	s := newStation(t)
	mine := harness.Addrs(0)[0].Addr()
	fs := s.say(arp(1, broadcast, stationMAC, stationV4, [6]byte{}, mine))
	if len(fs) != 1 {
		t.Fatalf("%d answers to a request", len(fs))
	}
	f := fs[0]
	if [6]byte(f) != stationMAC || [6]byte(f[6:]) != s.mac() || f[21] != 2 || [6]byte(f[22:]) != s.mac() ||
		netip.AddrFrom4([4]byte(f[28:])) != mine || [6]byte(f[32:]) != stationMAC || netip.AddrFrom4([4]byte(f[38:])) != stationV4 {
		t.Errorf("answer % x", f)
	}
	// A probe (RFC 5227) has no sender address and is answered.
	if fs = s.say(arp(1, broadcast, stationMAC, netip.IPv4Unspecified(), [6]byte{}, mine)); len(fs) != 1 {
		t.Errorf("%d answers to a probe", len(fs))
	}
	if fs = s.say(arp(1, broadcast, stationMAC, stationV4, [6]byte{}, netip.MustParseAddr("10.91.0.99"))); len(fs) != 0 {
		t.Errorf("answered for somebody else")
	}
	if _, ok := s.dev.Neighbour(stationV4); ok {
		t.Error("what was said unasked made an entry")
	}
	// Somebody with our address: defended once, not at each frame.
	for i, want := range []int{1, 0} {
		if fs = s.say(arp(1, broadcast, stationMAC, mine, [6]byte{}, mine)); len(fs) != want {
			t.Errorf("conflict %d: %d frames, want %d", i, len(fs), want)
		}
	}
	good := arp(1, broadcast, stationMAC, stationV4, [6]byte{}, mine)
	for i, bad := range [][]byte{good[:41], mutate(good, 15, 2), mutate(good, 17, 1), mutate(good, 18, 8), mutate(good, 19, 6), mutate(good, 21, 9), mutate(good, 22, 1)} {
		before := s.dev.Stats().Drops[provider.DropBadARP]
		if fs = s.say(bad); len(fs) != 0 || s.dev.Stats().Drops[provider.DropBadARP] != before+1 {
			t.Errorf("bad ARP %d: %d answers, not dropped as such", i, len(fs))
		}
	}
}

func mutate(f []byte, at int, v byte) []byte {
	f = append([]byte(nil), f...)
	f[at] = v
	return f
}

func TestNDP(t *testing.T) {
	s := newStation(t)
	for _, mine := range []netip.Addr{harness.Addrs(0)[1].Addr(), s.dev.GIDs()[0].GID.Addr()} {
		group, gmac := solicited(mine)
		fs := s.say(ip6(gmac, stationMAC, stationV6, group, 255, ns(mine, lladdr(1, stationMAC)...)))
		if len(fs) != 1 {
			t.Fatalf("%d answers to a solicitation for %v", len(fs), mine)
		}
		f := fs[0]
		if [6]byte(f) != stationMAC || f[21] != 255 || netip.AddrFrom16([16]byte(f[22:])) != mine || netip.AddrFrom16([16]byte(f[38:])) != stationV6 ||
			f[54] != 136 || f[58] != 0x60 || netip.AddrFrom16([16]byte(f[62:])) != mine || f[78] != 2 || [6]byte(f[80:]) != s.mac() ||
			onesComplement(f[22:54], f[54:], uint32(len(f)-54)+58) != 0 {
			t.Errorf("answer % x", f)
		}
		// Duplicate address detection is answered to all nodes.
		fs = s.say(ip6(gmac, stationMAC, netip.IPv6Unspecified(), group, 255, ns(mine)))
		if len(fs) != 1 || netip.AddrFrom16([16]byte(fs[0][38:])) != netip.MustParseAddr("ff02::1") || fs[0][58] != 0x20 {
			t.Errorf("answer to duplicate address detection: % x", fs)
		}
	}
	mine := harness.Addrs(0)[1].Addr()
	group, gmac := solicited(mine)
	good := func() []byte {
		return ip6(gmac, stationMAC, stationV6, group, 255, ns(mine, lladdr(1, stationMAC)...))
	}
	for name, bad := range map[string][]byte{
		"hop limit":        ip6(gmac, stationMAC, stationV6, group, 254, ns(mine)),
		"short":            ip6(gmac, stationMAC, stationV6, group, 255, ns(mine)[:20]),
		"code":             ip6(gmac, stationMAC, stationV6, group, 255, mutate(ns(mine), 1, 1)),
		"multicast target": ip6(gmac, stationMAC, stationV6, group, 255, ns(group)),
		"option of length 0": ip6(gmac, stationMAC, stationV6, group, 255,
			ns(mine, 1, 0, 0, 0, 0, 0, 0, 0)),
		"option cut":           ip6(gmac, stationMAC, stationV6, group, 255, ns(mine, 1, 2, 0, 0, 0, 0, 0, 0)),
		"DAD with an option":   ip6(gmac, stationMAC, netip.IPv6Unspecified(), group, 255, ns(mine, lladdr(1, stationMAC)...)),
		"DAD to our address":   ip6(s.mac(), stationMAC, netip.IPv6Unspecified(), mine, 255, ns(mine)),
		"solicited NA to many": ip6([6]byte{0x33, 0x33, 0, 0, 0, 1}, stationMAC, stationV6, netip.MustParseAddr("ff02::1"), 255, na(0x60, stationV6, lladdr(2, stationMAC)...)),
	} {
		before := s.dev.Stats().Drops[provider.DropBadND]
		if fs := s.say(bad); len(fs) != 0 || s.dev.Stats().Drops[provider.DropBadND] != before+1 {
			t.Errorf("%s: %d answers, or not dropped as bad", name, len(fs))
		}
	}
	before := s.dev.Stats().Drops[provider.DropBadICMP]
	if fs := s.say(mutate(good(), 56, good()[56]^1)); len(fs) != 0 || s.dev.Stats().Drops[provider.DropBadICMP] != before+1 {
		t.Errorf("a wrong checksum was accepted")
	}
}

func TestEcho(t *testing.T) {
	s := newStation(t)
	for _, n := range []int{0, 1, 56, 1400, 8972} {
		body := make([]byte, 8+n)
		harness.Fill(body[8:], uint64(n))
		copy(body, []byte{8, 0, 0, 0, 0x12, 0x34, 0, 7})
		binary.BigEndian.PutUint16(body[2:], onesComplement(nil, body, 0))
		f := make([]byte, 34+len(body))
		mac := s.mac()
		copy(f, mac[:])
		copy(f[6:], stationMAC[:])
		copy(f[12:], []byte{8, 0, 0x45, 0, 0, 0, 0, 0, 0, 0, 64, 1})
		binary.BigEndian.PutUint16(f[16:], uint16(20+len(body)))
		copy(f[26:], stationV4.AsSlice())
		copy(f[30:], harness.Addrs(0)[0].Addr().AsSlice())
		binary.BigEndian.PutUint16(f[24:], onesComplement(nil, f[14:34], 0))
		copy(f[34:], body)
		fs := s.say(f)
		if len(fs) != 1 {
			t.Fatalf("%d answers to a ping of %d bytes", len(fs), n)
		}
		r := fs[0]
		if [6]byte(r) != stationMAC || [4]byte(r[26:]) != [4]byte(f[30:]) || [4]byte(r[30:]) != [4]byte(f[26:]) || r[34] != 0 ||
			onesComplement(nil, r[14:34], 0) != 0 || onesComplement(nil, r[34:], 0) != 0 || string(r[38:]) != string(body[4:]) {
			t.Errorf("answer to a ping of %d bytes: % x", n, r[:min(len(r), 60)])
		}
		frag := mutate(f, 20, 0x20)
		frag[24], frag[25] = 0, 0
		binary.BigEndian.PutUint16(frag[24:], onesComplement(nil, frag[14:34], 0))
		if fs := s.say(frag); len(fs) != 0 {
			t.Error("a fragment was answered")
		}
		if fs := s.say(mutate(f, 36, f[36]^1)); len(fs) != 0 {
			t.Error("a wrong checksum was answered")
		}

		b6 := append([]byte{128, 0, 0, 0, 1, 2, 3, 4}, body[8:]...)
		if n > 8950 {
			b6 = b6[:8950]
		}
		for _, dst := range []netip.Addr{harness.Addrs(0)[1].Addr(), s.dev.GIDs()[0].GID.Addr()} {
			fs = s.say(ip6(s.mac(), stationMAC, stationV6, dst, 64, b6))
			if len(fs) != 1 || fs[0][54] != 129 || netip.AddrFrom16([16]byte(fs[0][22:])) != dst || string(fs[0][58:]) != string(b6[4:]) ||
				onesComplement(fs[0][22:54], fs[0][54:], uint32(len(b6))+58) != 0 {
				t.Errorf("answer to a ping of %d bytes over IPv6", n)
			}
		}
	}
	if st := s.dev.Stats(); st.EchoReplies != 15 {
		t.Errorf("%d replies counted", st.EchoReplies)
	}
}

// answerARP makes the station answer requests for its addresses with mac.
func (s *station) answerAs(mac [6]byte, addrs ...netip.Addr) {
	s.answer = func(f []byte) {
		for _, a := range addrs {
			if f[12] == 8 && f[13] == 6 && f[21] == 1 && a.Is4() && [4]byte(f[38:]) == a.As4() {
				s.port.WriteBatch([]tap.Frame{{B: arp(2, s.mac(), mac, a, s.mac(), netip.AddrFrom4([4]byte(f[28:])))}})
			}
			if f[12] == 0x86 && f[54] == 135 && a.Is6() && [16]byte(f[62:]) == a.As16() {
				s.port.WriteBatch([]tap.Frame{{B: ip6(s.mac(), mac, a, netip.AddrFrom16([16]byte(f[22:])), 255, na(0x60, a, lladdr(2, mac)...))}})
			}
		}
	}
}

func (s *station) ah(t *testing.T, to netip.Addr) (*provider.AH, error) {
	t.Helper()
	pd, err := s.dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	i := harness.GIDv4
	if to.Is6() {
		i = harness.GIDv6
	}
	return pd.CreateAH(provider.AHAttr{DGID: provider.GIDOf(to), SGIDIndex: i})
}

func TestResolve(t *testing.T) {
	for _, to := range []netip.Addr{stationV4, stationV6} {
		s := newStation(t)
		start := s.clock.Now()
		if _, err := s.ah(t, to); !errors.Is(err, provider.ErrTimeout) || provider.Errno(err) != syscall.ETIMEDOUT {
			t.Fatalf("silent neighbour: %v", err)
		}
		if d := time.Duration(s.clock.Now() - start); d < time.Second || d > 3*time.Second {
			t.Errorf("gave up after %v", d)
		}
		if st := s.dev.Stats(); st.ARPRequests+st.NDSolicits != 3 || st.ResolveFailures != 1 {
			t.Errorf("asked %d times", st.ARPRequests+st.NDSolicits)
		}
		s.answerAs(stationMAC, to)
		ah, err := s.ah(t, to)
		if err != nil {
			t.Fatal(err)
		}
		if p := ah.Path(); p.DstMAC != stationMAC || p.SrcMAC != s.mac() || p.Dst != to || p.HopLimit != 64 {
			t.Errorf("path %+v", p)
		}
		asked := s.dev.Stats()
		if _, err = s.ah(t, to); err != nil {
			t.Fatal(err)
		}
		if now := s.dev.Stats(); now.ARPRequests != asked.ARPRequests || now.NDSolicits != asked.NDSolicits {
			t.Error("asked again for what is known")
		}
		// The second answer to the third request still counts.
		s2 := newStation(t)
		n := 0
		s2.answerAs(stationMAC, to)
		inner := s2.answer
		s2.answer = func(f []byte) {
			if n++; n > 3 { // the announcements are three, the first request is dropped
				if n > 4 {
					inner(f)
				}
			}
		}
		if _, err := s2.ah(t, to); err != nil {
			t.Errorf("the first request lost: %v", err)
		}
	}
}

func TestRouting(t *testing.T) {
	gw := netip.MustParseAddr("10.91.0.254")
	far := netip.MustParseAddr("192.0.2.9")
	s := newStation(t)
	if _, err := s.ah(t, far); !errors.Is(err, provider.ErrUnreachable) || provider.Errno(err) != syscall.ENETUNREACH {
		t.Errorf("no route: %v", err)
	}
	s = newStation(t, gw)
	s.answerAs(stationMAC, gw)
	ah, err := s.ah(t, far)
	if err != nil {
		t.Fatal(err)
	}
	if p := ah.Path(); p.Dst != far || p.DstMAC != stationMAC {
		t.Errorf("path over the gateway: %+v", p)
	}
	if _, err := s.ah(t, netip.MustParseAddr("2001:db8::1")); !errors.Is(err, provider.ErrUnreachable) {
		t.Errorf("IPv6 over an IPv4 gateway: %v", err)
	}
	if ah, err = s.ah(t, harness.Addrs(0)[0].Addr()); err != nil || ah.Path().DstMAC != s.mac() {
		t.Errorf("path to oneself: %v", err)
	}
	if ah, err = s.ah(t, netip.MustParseAddr("224.1.2.3")); err != nil || ah.Path().DstMAC != [6]byte{1, 0, 0x5e, 1, 2, 3} {
		t.Errorf("IPv4 multicast: %v", err)
	}
	if ah, err = s.ah(t, netip.MustParseAddr("ff0e::1234:5678")); err != nil || ah.Path().DstMAC != [6]byte{0x33, 0x33, 0x12, 0x34, 0x56, 0x78} {
		t.Errorf("IPv6 multicast: %v", err)
	}
	if _, err := provider.Open(provider.Config{Device: taptest.New(nil, taptest.Config{}).Port(0), Addrs: harness.Addrs(0), Gateway: []netip.Addr{far}, Manual: true}); !errors.Is(err, provider.ErrInvalid) {
		t.Errorf("gateway off the link: %v", err)
	}
}

// A neighbour that moves to another MAC takes the paths of those who use it along.
func TestNeighbourMoves(t *testing.T) {
	other := [6]byte{2, 9, 9, 9, 9, 9}
	s := newStation(t)
	s.answerAs(stationMAC, stationV4, stationV6)
	ah4, err := s.ah(t, stationV4)
	if err != nil {
		t.Fatal(err)
	}
	ah6, err := s.ah(t, stationV6)
	if err != nil {
		t.Fatal(err)
	}
	all, allMAC := netip.MustParseAddr("ff02::1"), [6]byte{0x33, 0x33, 0, 0, 0, 1}
	s.say(ip6(allMAC, other, stationV6, all, 255, na(0, stationV6, lladdr(2, other)...)))
	if ah6.Path().DstMAC != stationMAC {
		t.Error("an advertisement without the override flag replaced a MAC (RFC 4861 7.2.5)")
	}
	s.say(arp(1, broadcast, other, stationV4, [6]byte{}, stationV4))
	s.say(ip6(allMAC, other, stationV6, all, 255, na(0x20, stationV6, lladdr(2, other)...)))
	if ah4.Path().DstMAC != other || ah6.Path().DstMAC != other {
		t.Error("paths did not follow the announcements")
	}
	if n := s.dev.Stats().NeighboursChanged; n != 2 {
		t.Errorf("%d changes counted", n)
	}
	if err := ah4.Destroy(); err != nil {
		t.Fatal(err)
	}
	if err := ah4.Destroy(); !errors.Is(err, provider.ErrClosed) {
		t.Errorf("destroyed twice: %v", err)
	}
	// An entry that is old is used at once, but confirmed.
	s.clock.Advance(time.Minute)
	s.answer = nil
	before := s.dev.Stats().ARPRequests
	if _, err := s.ah(t, stationV4); err != nil {
		t.Fatal(err)
	}
	if s.dev.Stats().ARPRequests != before+1 {
		t.Error("an old entry was not confirmed")
	}
	if fs := s.read(); len(fs) != 1 || [6]byte(fs[0]) != other {
		t.Errorf("the confirmation was not asked for directly: % x", fs)
	}
	if err := s.dev.AddNeighbour(stationV4, stationMAC); err != nil {
		t.Fatal(err)
	}
	s.say(arp(1, broadcast, other, stationV4, [6]byte{}, stationV4))
	if mac, ok := s.dev.Neighbour(stationV4); !ok || mac != stationMAC {
		t.Error("a neighbour entered by hand was changed")
	}
}

// A peer that comes back with another MAC without telling anybody is found by
// asking, once a timer of the QP has run out.
func TestPeerMovesSilently(t *testing.T) {
	s := newStation(t)
	s.answerAs(stationMAC, stationV4)
	e := harness.NewEnd(t, s.dev, harness.ConnOptions{Mem: 4096})
	a := harness.ConnOptions{Attr: func(_ int, a *provider.QPAttr) {
		a.AH.DGID, a.DestQPN, a.Timeout = provider.GIDOf(stationV4), 5, 12
	}}.Attrs(0, e)
	if err := harness.Up(e.QP, a, qp.StateRTS); err != nil {
		t.Fatal(err)
	}
	s.clock.Advance(10 * time.Second)
	moved := [6]byte{2, 7, 7, 7, 7, 7}
	s.answerAs(moved, stationV4)
	inner := s.answer
	var after bool
	s.answer = func(f []byte) {
		var p wire.Packet
		if wire.Parse(f, &p) == nil {
			after = after || p.DstMAC() == moved
			return
		}
		// The one who moved does not hear what is sent to its former MAC.
		if [6]byte(f) != stationMAC {
			inner(f)
		}
	}
	e.Send(e.Message(1, 0, 100))
	for e.QP.State() == qp.StateRTS && !after {
		s.idle()
	}
	if !after {
		t.Error("the QP kept sending to the old MAC until its retries were over")
	}
}

func TestGIDs(t *testing.T) {
	s := newStation(t)
	g := s.dev.GIDs()
	want := []string{"fe80::ff:fe00:1", "::ffff:10.91.0.1", "fd91::1"}
	if len(g) != len(want) {
		t.Fatalf("GIDs %v", g)
	}
	for i, w := range want {
		if g[i].GID.String() != w || g[i].Index != i {
			t.Errorf("GID %d is %v, want %s", i, g[i].GID, w)
		}
		if q, err := s.dev.QueryGID(i); err != nil || q != g[i].GID {
			t.Errorf("QueryGID(%d): %v, %v", i, q, err)
		}
	}
	for _, i := range []int{-1, 3} {
		if _, err := s.dev.QueryGID(i); provider.Errno(err) != syscall.EINVAL {
			t.Errorf("QueryGID(%d): %v", i, err)
		}
	}
	pd, err := s.dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []provider.AHAttr{
		{DGID: provider.GIDOf(stationV6), SGIDIndex: harness.GIDv4},
		{DGID: provider.GIDOf(stationV4), SGIDIndex: harness.GIDv6},
		{DGID: provider.GIDOf(stationV4), SGIDIndex: 9},
		{DGID: provider.GIDOf(stationV4), SGIDIndex: harness.GIDv4, PortNum: 2},
		{SGIDIndex: harness.GIDv6},
	} {
		if _, err := pd.CreateAH(a); provider.Errno(err) != syscall.EINVAL {
			t.Errorf("CreateAH(%+v): %v", a, err)
		}
	}
	// As in the kernel, a flow label has 20 bits, whatever else is there.
	h, err := pd.CreateAH(provider.AHAttr{DGID: provider.GIDOf(netip.MustParseAddr("ff0e::1")), SGIDIndex: harness.GIDv6, FlowLabel: 0xfff12345})
	if err != nil {
		t.Fatal(err)
	}
	if a, p := h.Attr(), h.Path(); a.FlowLabel != 0x12345 || p.FlowLabel != 0x12345 {
		t.Errorf("flow label %#x, in the path %#x", a.FlowLabel, p.FlowLabel)
	}
}

// The table is bounded: of those that nobody uses the oldest goes; those in use
// stay, and when there is nobody else, no more come in.
func TestNeighbourTableBound(t *testing.T) {
	if raceDetector {
		t.Skip("long virtual time in one goroutine")
	}
	s := newStation(t)
	addr := func(i int) netip.Addr {
		return netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x91, 8: 1, 14: byte(i >> 8), 15: byte(i)})
	}
	s.answer = func(f []byte) {
		if f[12] == 0x86 && f[54] == 135 {
			a := netip.AddrFrom16([16]byte(f[62:]))
			s.port.WriteBatch([]tap.Frame{{B: ip6(s.mac(), stationMAC, a, netip.AddrFrom16([16]byte(f[22:])), 255, na(0x60, a, lladdr(2, stationMAC)...))}})
		}
	}
	pd, err := s.dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	const bound = 4096
	var ahs []*provider.AH
	for i := range bound + 100 {
		s.clock.Advance(time.Microsecond)
		ah, err := pd.CreateAH(provider.AHAttr{DGID: provider.GIDOf(addr(i)), SGIDIndex: harness.GIDv6})
		if err != nil {
			t.Fatal(i, err)
		}
		if i < 50 { // in use, though old
			ahs = append(ahs, ah)
			continue
		}
		if err := ah.Destroy(); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		i     int
		known bool
	}{{0, true}, {49, true}, {50, false}, {149, false}, {150, true}, {bound + 99, true}} {
		if _, ok := s.dev.Neighbour(addr(tc.i)); ok != tc.known {
			t.Errorf("neighbour %d known: %v", tc.i, ok)
		}
	}
	for i := range bound - len(ahs) {
		if err := s.dev.AddNeighbour(addr(10000+i), stationMAC); err != nil {
			t.Fatal(i, err)
		}
	}
	if err := s.dev.AddNeighbour(addr(9999), stationMAC); !errors.Is(err, provider.ErrNoMem) {
		t.Errorf("one more than the table holds: %v", err)
	}
}
