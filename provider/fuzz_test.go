// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"net/netip"
	"testing"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

// FuzzFrame throws frames at a device with a connected QP, both ends of XRC, and a QP
// for datagrams that is in two groups: nothing may panic, what the device answers must
// be well formed, and a frame is counted as one.
func FuzzFrame(f *testing.F) {
	dst := [6]byte{2, 0, 0, 0, 0, 1}
	mine4, mine6 := harness.Addrs(0)[0].Addr(), harness.Addrs(0)[1].Addr()
	group, gmac := solicited(mine6)
	f.Add(arp(1, broadcast, stationMAC, stationV4, [6]byte{}, mine4))
	f.Add(arp(2, dst, stationMAC, stationV4, dst, mine4))
	f.Add(ip6(gmac, stationMAC, stationV6, group, 255, ns(mine6, lladdr(1, stationMAC)...)))
	f.Add(ip6(dst, stationMAC, stationV6, mine6, 255, na(0x60, stationV6, lladdr(2, stationMAC)...)))
	f.Add(ip6(dst, stationMAC, stationV6, mine6, 64, []byte{128, 0, 0, 0, 1, 2, 3, 4, 5}))
	path := wire.Path{SrcMAC: stationMAC, DstMAC: dst, Src: stationV4, Dst: mine4, SrcPort: 0xc000, HopLimit: 64}
	for _, op := range []wire.Opcode{wire.RCSendOnly, wire.RCWriteOnly, wire.RCReadRequest, wire.RCAck, wire.RCFetchAdd, wire.RCReadRespOnly, wire.CNP, wire.UDSendOnly,
		wire.RCFlush, wire.RCAtomicWrite, wire.RCSendOnlyInv, wire.XRCSendOnly, wire.XRCWriteOnlyImm, wire.XRCReadRequest, wire.XRCFetchAdd, wire.XRCSendFirst, wire.XRCAck} {
		b := make([]byte, 256)
		bth := wire.BTH{Op: op, PKey: 0xffff, DestQP: 0x22, AckReq: true}
		ext := make([]byte, op.Info().HdrLen-wire.BTHLen)
		if op.Info().XRCETH >= 0 {
			wire.XRCETH{SRQ: 1}.Put(ext) // the first SRQ of XRC that a device makes
		}
		n := wire.Encode(b, &path, 1, &bth, ext, []byte("payload!"))
		f.Add(b[:n])
	}
	f.Add(igmp(systems, 1, query4(3, 10, anyGroup4)))
	f.Add(igmp(systems, 1, query4(2, 10, anyGroup4)))
	f.Add(igmp(group4, 1, append([]byte{0x16, 0, 0, 0}, group4.AsSlice()...)))
	f.Add(mld(linkLocalRouter, group6, 1, true, query6(2, 0, group6)))
	f.Add(mld(linkLocalRouter, group6, 1, true, query6(1, 100, anyGroup6)))
	for _, to := range []netip.Addr{mine4, group4} {
		path.Dst = to
		b := make([]byte, 256)
		bth := wire.BTH{Op: wire.UDSendOnlyImm, PKey: 0xffff, DestQP: wire.MulticastQPN}
		n := wire.Encode(b, &path, 1, &bth, []byte{0x11, 0x11, 0x11, 0x11, 0, 0, 0, 9, 1, 2, 3, 4}, []byte("payload!"))
		f.Add(b[:n])
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, frame []byte) {
		if len(frame) < tap.EthHeaderLen || len(frame) > 9014 {
			return // the device below does not deliver such
		}
		s := newStation(t)
		e := harness.NewEnd(t, s.dev, harness.ConnOptions{Mem: 4096})
		if err := s.dev.AddNeighbour(stationV4, stationMAC); err != nil {
			t.Fatal(err)
		}
		a := harness.ConnOptions{Attr: func(_ int, a *provider.QPAttr) {
			a.AH.DGID, a.DestQPN = provider.GIDOf(stationV4), 5
		}}.Attrs(0, e)
		if err := harness.Up(e.QP, a, qp.StateRTS); err != nil {
			t.Fatal(err)
		}
		e.Recv(1, 0, 4096)
		x := harness.NewEnd(t, s.dev, harness.ConnOptions{Type: qp.TypeXRCSend, Mem: 4096})
		for _, q := range []*provider.QP{x.QP, x.Target} {
			if err := harness.Up(q, a, qp.StateRTS); err != nil {
				t.Fatal(err)
			}
		}
		x.Recv(1, 0, 4096)
		ud := datagramEnd(t, s.dev, group4)
		attach(t, ud, group4)
		attach(t, ud, group6)
		ud.Recv(1, 0, 4096)
		raw := rawEnd(t, s.dev)
		raw.Recv(1, 0, 1<<15)
		flow(t, raw, provider.FlowAttr{DontTrap: true, Specs: []provider.FlowSpec{provider.IPv6Spec{}, provider.UDPSpec{Mask: provider.PortFilter{Dst: 1}}}})
		flow(t, raw, provider.FlowAttr{Type: provider.FlowAllDefault})
		flow(t, raw, provider.FlowAttr{Type: provider.FlowSniffer})
		// A RoCE packet is made to fit the QP, so that the fuzzer gets past the
		// number and the ICRC, which it can not guess.
		var p wire.Packet
		frame = append([]byte(nil), frame...)
		if wire.Parse(frame, &p) == nil && p.BTH.DestQP > 1 {
			switch {
			case p.Info.Service == wire.ServiceXRC && p.Info.Mask&wire.Request != 0:
				p.BTH.DestQP = x.Target.Num()
			case p.Info.Service == wire.ServiceXRC:
				p.BTH.DestQP = x.QP.Num()
			case p.Info.Service != wire.ServiceUD:
				p.BTH.DestQP = e.QP.Num()
			case !p.Dst().IsMulticast():
				p.BTH.DestQP = ud.QP.Num()
			}
			p.BTH.Put(p.Frame[p.BTHOff:])
			wire.Seal(p.Frame, p.L3)
		}
		before := s.dev.Stats().RxFrames
		for _, r := range s.say(frame) {
			wellFormed(t, r)
		}
		if got := s.dev.Stats().RxFrames - before; got != 1 {
			t.Fatalf("%d frames counted", got)
		}
		if st := s.dev.Stats(); st.DeviceErrors != 0 || st.TxErrors != 0 {
			t.Fatalf("device errors: %+v", st)
		}
	})
}

// wellFormed checks the checksums of a frame that a device sent.
func wellFormed(t *testing.T, f []byte) {
	t.Helper()
	var p wire.Packet
	switch err := wire.Parse(f, &p); {
	case err == nil:
		if !p.ICRCValid() {
			t.Fatal("sent a packet with a wrong ICRC")
		}
	case err != wire.ErrNotRoCE:
		t.Fatalf("sent a packet that does not parse: %v", err)
	}
	bad := false
	switch l4 := 14 + int(f[14]&0xf)*4; {
	case f[12] == 0x86 && f[20] == 0: // with a router alert
		bad = onesComplement(f[22:54], f[62:], uint32(len(f)-62)+58) != 0
	case f[12] == 0x86 && f[20] == 58:
		bad = onesComplement(f[22:54], f[54:], uint32(len(f)-54)+58) != 0
	case f[12] == 8 && f[13] == 0 && f[23] != 17:
		bad = onesComplement(nil, f[14:l4], 0) != 0 || onesComplement(nil, f[l4:], 0) != 0
	}
	if bad {
		t.Fatalf("sent a frame with a wrong checksum: % x", f)
	}
}
