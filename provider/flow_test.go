// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/harness"
)

var (
	engineMAC = [6]byte{2, 0, 0, 0, 0, 1} // of a station's device
	otherMAC  = [6]byte{2, 0, 0, 0, 0, 99}
	mcastMAC  = [6]byte{1, 0, 0x5e, 1, 2, 3}
	full6     = [6]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
)

// rawEnd is a RAW_PACKET QP in RTS with its memory.
func rawEnd(t testing.TB, d *provider.Device) *harness.End {
	t.Helper()
	e := harness.NewEnd(t, d, harness.ConnOptions{Type: qp.TypeRaw, Mem: 1 << 16})
	for _, st := range []qp.State{qp.StateInit, qp.StateRTR, qp.StateRTS} {
		m := qp.AttrState
		if st == qp.StateInit {
			m |= qp.AttrPort
		}
		if err := e.QP.Modify(provider.QPAttr{Attr: qp.Attr{State: st, Port: 1}}, m); err != nil {
			t.Fatal(err)
		}
	}
	return e
}

func flow(t testing.TB, e *harness.End, a provider.FlowAttr) *provider.Flow {
	t.Helper()
	a.Port = 1
	f, err := e.QP.CreateFlow(a)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func toMAC(mac [6]byte) provider.EthSpec {
	return provider.EthSpec{Val: provider.EthFilter{Dst: mac}, Mask: provider.EthFilter{Dst: full6}}
}

// eth is a frame with this type and these bytes.
func eth(dst, src [6]byte, etherType uint16, body ...byte) []byte {
	b := append(append(append([]byte(nil), dst[:]...), src[:]...), byte(etherType>>8), byte(etherType))
	return append(b, body...)
}

// vlan puts a tag into a frame.
func vlan(f []byte, tpid, tci uint16) []byte {
	b := append([]byte(nil), f[:12]...)
	b = append(b, byte(tpid>>8), byte(tpid), byte(tci>>8), byte(tci))
	return append(b, f[12:]...)
}

// ip4 is a packet from 10.1.1.1 to 10.2.2.2, TOS 8, TTL 9, DF.
func ip4(proto byte, body ...byte) []byte {
	n := 20 + len(body)
	h := []byte{0x45, 8, byte(n >> 8), byte(n), 0, 1, 0x40, 0, 9, proto, 0, 0, 10, 1, 1, 1, 10, 2, 2, 2}
	return append(h, body...)
}

// ports are a transport header's first 8 bytes, from 1000 to 2000.
var ports = []byte{3, 0xe8, 7, 0xd0, 0, 8, 0, 0}

// got gives the frames an end has received, by their completions.
func got(t *testing.T, e *harness.End) (wcs []qp.WC) {
	t.Helper()
	for _, wc := range e.Poll() {
		if wc.Opcode == qp.WCRecv {
			if wc.Status != qp.WCSuccess {
				t.Fatalf("receive: %+v", wc)
			}
			wcs = append(wcs, wc)
		}
	}
	return wcs
}

func TestFlowFilters(t *testing.T) {
	src6, dst6 := stationV6.As16(), netip.MustParseAddr("fd91::55").As16()
	v4, v6 := ip4(17, ports...), []byte{0x6a, 0xb1, 0x23, 0x45, 0, 8, 17, 7} // class 0xab, label 0x12345
	v6 = append(append(append(v6, src6[:]...), dst6[:]...), ports...)
	hopopt := append([]byte(nil), v6[:40]...)
	hopopt[6] = 0
	hopopt = append(append(hopopt, 17, 0, 0, 0, 0, 0, 0, 0), ports...)
	later := append([]byte(nil), v4...)
	later[6], later[7] = 0, 5 // a fragment, not the first
	u4, u6 := eth(otherMAC, stationMAC, 0x800, v4...), eth(otherMAC, stationMAC, 0x86dd, v6...)
	tcp4 := eth(otherMAC, stationMAC, 0x800, ip4(6, ports...)...)
	frag := eth(otherMAC, stationMAC, 0x800, later...)
	ext := eth(otherMAC, stationMAC, 0x86dd, hopopt...)
	tagged, twice := vlan(u4, 0x8100, 0xa123), vlan(vlan(u4, 0x8100, 5), 0x88a8, 0xa123)
	short := eth(otherMAC, stationMAC, 0x800, v4[:19]...)
	all := map[string][]byte{"u4": u4, "u6": u6, "tcp4": tcp4, "frag": frag, "ext": ext, "tagged": tagged, "twice": twice, "short": short}
	full4, full16 := [4]byte{255, 255, 255, 255}, [16]byte(bytes.Repeat([]byte{255}, 16))
	both := provider.PortFilter{Dst: 2000, Src: 1000}
	ones := provider.PortFilter{Dst: 0xffff, Src: 0xffff}
	for _, c := range []struct {
		name  string
		specs []provider.FlowSpec
		want  string // frames that match
	}{
		{"nothing", nil, "u4 u6 tcp4 frag ext tagged twice short"},
		{"destination", []provider.FlowSpec{toMAC(otherMAC)}, "u4 u6 tcp4 frag ext tagged twice short"},
		{"another destination", []provider.FlowSpec{toMAC(engineMAC)}, ""},
		{"part of the source", []provider.FlowSpec{provider.EthSpec{Val: provider.EthFilter{Src: [6]byte{9, 9, 9, 9, 0xbe, 0xef}},
			Mask: provider.EthFilter{Src: [6]byte{0, 0, 0, 0, 0xff, 0xff}}}}, "u4 u6 tcp4 frag ext tagged twice short"},
		{"type behind tags", []provider.FlowSpec{provider.EthSpec{Val: provider.EthFilter{EtherType: 0x800}, Mask: provider.EthFilter{EtherType: 0xffff}}},
			"u4 tcp4 frag tagged twice short"},
		{"VLAN", []provider.FlowSpec{provider.EthSpec{Val: provider.EthFilter{VLANTag: 0x123}, Mask: provider.EthFilter{VLANTag: 0xfff}}}, "tagged twice"},
		{"VLAN priority", []provider.FlowSpec{provider.EthSpec{Val: provider.EthFilter{VLANTag: 0x2000}, Mask: provider.EthFilter{VLANTag: 0xe000}}}, ""},
		{"IPv4", []provider.FlowSpec{provider.IPv4Spec{}}, "u4 tcp4 frag tagged twice"},
		{"IPv4 addresses", []provider.FlowSpec{provider.IPv4Spec{Val: provider.IPv4Filter{Src: [4]byte{10, 1, 1, 1}, Dst: [4]byte{10, 2, 2, 2}},
			Mask: provider.IPv4Filter{Src: full4, Dst: full4}}}, "u4 tcp4 frag tagged twice"},
		{"IPv4 other address", []provider.FlowSpec{provider.IPv4Spec{Val: provider.IPv4Filter{Src: [4]byte{10, 1, 1, 2}}, Mask: provider.IPv4Filter{Src: full4}}}, ""},
		{"IPv4 fields", []provider.FlowSpec{provider.IPv4Spec{Val: provider.IPv4Filter{Proto: 17, TOS: 8, TTL: 9, Flags: 2},
			Mask: provider.IPv4Filter{Proto: 255, TOS: 255, TTL: 255, Flags: 7}}}, "u4 tagged twice"},
		{"IPv4 other TTL", []provider.FlowSpec{provider.IPv4Spec{Val: provider.IPv4Filter{TTL: 8}, Mask: provider.IPv4Filter{TTL: 255}}}, ""},
		{"IPv6", []provider.FlowSpec{provider.IPv6Spec{}}, "u6 ext"},
		{"IPv6 fields", []provider.FlowSpec{provider.IPv6Spec{Val: provider.IPv6Filter{Src: src6, Dst: dst6, FlowLabel: 0x12345, NextHdr: 17, TClass: 0xab, HopLimit: 7},
			Mask: provider.IPv6Filter{Src: full16, Dst: full16, FlowLabel: 0xfffff, NextHdr: 255, TClass: 255, HopLimit: 255}}}, "u6"},
		{"IPv6 other label", []provider.FlowSpec{provider.IPv6Spec{Val: provider.IPv6Filter{FlowLabel: 0x12344}, Mask: provider.IPv6Filter{FlowLabel: 0xfffff}}}, ""},
		{"UDP", []provider.FlowSpec{provider.UDPSpec{}}, "u4 u6 frag ext tagged twice"},
		{"UDP ports", []provider.FlowSpec{provider.UDPSpec{Val: both, Mask: ones}}, "u4 u6 ext tagged twice"},
		{"UDP other port", []provider.FlowSpec{provider.UDPSpec{Val: provider.PortFilter{Dst: 1000}, Mask: provider.PortFilter{Dst: 0xffff}}}, ""},
		{"TCP ports", []provider.FlowSpec{provider.TCPSpec{Val: both, Mask: ones}}, "tcp4"},
		{"all three", []provider.FlowSpec{toMAC(otherMAC), provider.IPv6Spec{}, provider.UDPSpec{Val: both, Mask: ones}}, "u6 ext"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStation(t)
			e := rawEnd(t, s.dev)
			flow(t, e, provider.FlowAttr{Specs: c.specs})
			want := map[string]bool{}
			for _, n := range bytes.Fields([]byte(c.want)) {
				want[string(n)] = true
			}
			for name, f := range all {
				e.Recv(1, 0, 2000)
				s.say(f)
				wcs := got(t, e)
				if (len(wcs) == 1) != want[name] {
					t.Errorf("%s: %d received", name, len(wcs))
				}
				if len(wcs) == 1 && (int(wcs[0].ByteLen) != len(f) || !bytes.Equal(e.Mem[:len(f)], f)) {
					t.Errorf("%s: received %+v, % x", name, wcs[0], e.Mem[:len(f)])
				}
			}
		})
	}
}

// Who gets a frame: priorities, copies, and what the engine still sees of it.
func TestFlowOrder(t *testing.T) {
	mine := harness.Addrs(0)[0].Addr()
	u := eth(otherMAC, stationMAC, 0x800, ip4(17, ports...)...)
	m := eth(mcastMAC, stationMAC, 0x800, ip4(17, ports...)...)
	question := arp(1, broadcast, stationMAC, stationV4, [6]byte{}, mine)
	direct := arp(1, engineMAC, stationMAC, stationV4, [6]byte{}, mine)
	at := func(priority uint16, specs ...provider.FlowSpec) *provider.FlowAttr {
		return &provider.FlowAttr{Priority: priority, Specs: append(specs, provider.EthSpec{})}
	}
	through := &provider.FlowAttr{DontTrap: true}
	all, mc, sniff := &provider.FlowAttr{Type: provider.FlowAllDefault}, &provider.FlowAttr{Type: provider.FlowMcastDefault}, &provider.FlowAttr{Type: provider.FlowSniffer}
	for _, c := range []struct {
		name   string
		flows  [3]*provider.FlowAttr // of three QPs
		frame  []byte
		want   [3]int
		answer bool // of the engine, to ARP
	}{
		{"lower number first", [3]*provider.FlowAttr{at(5), at(4), at(6)}, u, [3]int{0, 1, 0}, false},
		{"equal: a copy each", [3]*provider.FlowAttr{at(4), at(4), at(5)}, u, [3]int{1, 1, 0}, false},
		{"do not trap", [3]*provider.FlowAttr{through, at(7), at(8)}, u, [3]int{1, 1, 0}, false},
		{"do not trap the engine's", [3]*provider.FlowAttr{through, nil, nil}, direct, [3]int{1, 0, 0}, true},
		{"drop", [3]*provider.FlowAttr{at(1, provider.DropAction{}), at(2), sniff}, u, [3]int{0, 0, 1}, false},
		{"drop the engine's", [3]*provider.FlowAttr{at(1, provider.DropAction{}), nil, nil}, question, [3]int{}, false},
		{"unicast is taken", [3]*provider.FlowAttr{at(1), all, nil}, direct, [3]int{1, 0, 0}, false},
		{"broadcast is shared", [3]*provider.FlowAttr{at(1), all, mc}, question, [3]int{1, 0, 0}, true},
		{"default", [3]*provider.FlowAttr{all, mc, nil}, u, [3]int{1, 0, 0}, false},
		{"default, multicast", [3]*provider.FlowAttr{all, mc, nil}, m, [3]int{1, 1, 0}, false},
		{"default and ARP", [3]*provider.FlowAttr{all, mc, nil}, direct, [3]int{1, 0, 0}, true},
		{"nobody", [3]*provider.FlowAttr{{Specs: []provider.FlowSpec{toMAC(stationMAC)}}, mc, nil}, u, [3]int{}, false},
		{"sniffer", [3]*provider.FlowAttr{at(1), sniff, sniff}, u, [3]int{1, 1, 1}, false},
		{"sniffer and the answer", [3]*provider.FlowAttr{sniff, nil, nil}, direct, [3]int{2, 0, 0}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStation(t)
			s.read()
			var ends [3]*harness.End
			for i := range ends {
				ends[i] = rawEnd(t, s.dev)
				ends[i].Recv(1, 0, 2000)
				ends[i].Recv(2, 0, 2000)
				if a := c.flows[i]; a != nil {
					flow(t, ends[i], *a)
				}
			}
			answers := s.say(c.frame)
			if (len(answers) == 1) != c.answer || len(answers) > 1 {
				t.Errorf("%d answers", len(answers))
			}
			for i, e := range ends {
				if n := len(got(t, e)); n != c.want[i] {
					t.Errorf("QP %d received %d", i, n)
				}
			}
		})
	}
}

// A QP with two flows for a frame gets it once. What is RoCE for the device does not go
// to default flows, but to normal ones.
func TestFlowRoCE(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{})
	send := func(id uint64) {
		c.B.Recv(id, 0, 100)
		c.A.Send(c.A.Message(id, 0, 100))
	}
	raw := rawEnd(t, p.Dev[1])
	for i := range 100 {
		raw.Recv(uint64(i), 0, 2000)
	}
	flow(t, raw, provider.FlowAttr{Type: provider.FlowAllDefault})
	send(1)
	c.WaitOK(c.A, 1)
	c.WaitOK(c.B, 1)
	if wcs := got(t, raw); len(wcs) != 0 {
		t.Fatalf("default flow has RoCE: %+v", wcs)
	}
	sniffer := flow(t, raw, provider.FlowAttr{Type: provider.FlowSniffer})
	send(2)
	c.WaitOK(c.A, 2)
	c.WaitOK(c.B, 2)
	if wcs := got(t, raw); len(wcs) != 2 { // the message and its acknowledgement
		t.Fatalf("sniffed %+v", wcs)
	}
	// Normal flows take the connection's packets until they are gone.
	udp := provider.UDPSpec{Val: provider.PortFilter{Dst: 4791}, Mask: provider.PortFilter{Dst: 0xffff}}
	f1 := flow(t, raw, provider.FlowAttr{Specs: []provider.FlowSpec{udp}})
	f2 := flow(t, raw, provider.FlowAttr{Specs: []provider.FlowSpec{provider.IPv4Spec{}, udp}})
	send(3)
	p.RunUntil(func() bool { return p.Dev[1].Stats().FlowDelivered == 3 })
	if wcs := got(t, raw); len(wcs) != 1 {
		t.Fatalf("two flows and a sniffer of a QP: %d frames", len(wcs))
	}
	for _, f := range []*provider.Flow{sniffer, f1, f2} {
		if err := f.Destroy(); err != nil {
			t.Fatal(err)
		}
		if err := f.Destroy(); err != provider.ErrClosed {
			t.Fatalf("destroy twice: %v", err)
		}
	}
	c.WaitOK(c.A, 3)
	c.WaitOK(c.B, 3)
}
