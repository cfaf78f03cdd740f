// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/tapverbs/tapverbs/cm"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/wire"
)

// asked gives the queue pairs that the REQs among frames are of, and how often the device asked
// who has an address.
func asked(t *testing.T, frames [][]byte) (qpns []wire.QPN, arps int) {
	t.Helper()
	for _, f := range frames {
		if f[12] == 8 && f[13] == 6 {
			arps++
			continue
		}
		var p wire.Packet
		if wire.Parse(f, &p) != nil || p.BTH.DestQP != wire.GSIQPN {
			continue
		}
		h, ok := wire.ParseMAD(p.Payload)
		if !ok || h.Class != wire.CMClass || wire.CMAttr(h.Attr) != wire.CMREQ {
			continue
		}
		if [6]byte(f) != stationMAC {
			t.Errorf("a REQ to %x", f[:6])
		}
		var m wire.CMReq
		m.Parse(p.Payload[wire.MADHeaderLen:])
		qpns = append(qpns, m.LocalQPN)
	}
	return qpns, arps
}

// TestMADsWait: messages to who is not known wait for his MAC, in their order and no more than
// eight, and go when he says it; the others go when they are sent again. Of who never answers
// nothing is kept.
func TestMADsWait(t *testing.T) {
	s := newStation(t)
	mute := netip.MustParseAddr("10.91.0.88")
	events := map[cm.Kind]int{}
	connect := func(to netip.Addr, qpn wire.QPN) *provider.CMConn {
		t.Helper()
		k, err := s.dev.CMConnect(to, 0x1060001, cm.RC, cm.Params{QPN: qpn}, cm.Route{MTU: 3, AckTimeout: 14, PKey: wire.DefaultPKey},
			func(_ *provider.CMConn, e cm.Event) { events[e.Kind]++ })
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	s.read()
	var all []*provider.CMConn
	for i := range wire.QPN(10) {
		all = append(all, connect(stationV4, 100+i), connect(mute, 200+i))
	}
	if qpns, arps := asked(t, s.read()); len(qpns) != 0 || arps != 2 {
		t.Errorf("before there is an answer: REQs of %v, %d questions of who has the address", qpns, arps)
	}
	got, _ := asked(t, s.say(arp(2, s.mac(), stationMAC, stationV4, s.mac(), netip.MustParseAddr("10.91.0.1"))))
	if want := []wire.QPN{100, 101, 102, 103, 104, 105, 106, 107}; !slices.Equal(got, want) {
		t.Errorf("with the answer: REQs of %v, want %v", got, want)
	}
	got, _ = asked(t, s.wait(second))
	for _, q := range got {
		if q >= 200 {
			t.Errorf("a REQ for who is not known: of %d", q)
		}
	}
	if !slices.Contains(got, 108) || !slices.Contains(got, 109) {
		t.Errorf("REQs that found no room were not sent again: %v", got)
	}
	// Who is known late gets what is sent then, not what waited for one who was given up.
	for _, k := range all {
		if err := k.Destroy(); err != nil {
			t.Error(err)
		}
	}
	s.wait(100 * second)
	got, _ = asked(t, s.say(arp(2, s.mac(), stationMAC, mute, s.mac(), netip.MustParseAddr("10.91.0.1"))))
	if len(got) != 0 {
		t.Errorf("%v were kept for who was given up", got)
	}
	if st := s.dev.CMStats(); st.Known != 0 || len(events) != 0 {
		t.Errorf("%+v; events %v", st, events)
	}
}
