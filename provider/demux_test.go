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

// inject gives a frame to device 0 as if it came over the link.
func inject(t testing.TB, p *harness.Pair, frame []byte) {
	t.Helper()
	if _, err := p.Net.Port(1).WriteBatch([]tap.Frame{{B: frame}}); err != nil {
		t.Fatal(err)
	}
	p.Settle()
}

// rcPacket is what the demux looks at, valid for the QP of c.A unless changed.
type rcPacket struct {
	path wire.Path
	bth  wire.BTH
	ext  []byte
	body []byte
}

func packetFor(c *harness.Conn) rcPacket {
	return rcPacket{
		path: wire.Path{
			SrcMAC: [6]byte(c.Dev[1].MAC()), DstMAC: [6]byte(c.Dev[0].MAC()),
			Src: harness.Addrs(1)[0].Addr(), Dst: harness.Addrs(0)[0].Addr(), SrcPort: 0xc123, HopLimit: 64,
		},
		bth:  wire.BTH{Op: wire.RCSendOnly, MigReq: true, PKey: 0xffff, DestQP: c.A.QP.Num(), AckReq: true},
		body: []byte("hello"),
	}
}

func (k rcPacket) frame() []byte {
	b := make([]byte, 256)
	return b[:wire.Encode(b, &k.path, 1, &k.bth, k.ext, k.body)]
}

func TestDemux(t *testing.T) {
	for _, tc := range []struct {
		name   string
		why    provider.DropReason
		change func(c *harness.Conn, k *rcPacket)
		spoil  func(f []byte) []byte
	}{
		{name: "other ethertype", why: provider.DropNotRoCE, spoil: func(f []byte) []byte { f[12] = 0x88; return f }},
		{name: "other UDP port", why: provider.DropNotRoCE, spoil: func(f []byte) []byte { f[37]++; return f }},
		{name: "truncated", why: provider.DropTruncated, spoil: func(f []byte) []byte { return f[:50] }},
		{name: "shorter than Ethernet's minimum of headers", why: provider.DropTruncated, spoil: func(f []byte) []byte { return f[:20] }},
		{name: "UDP length", why: provider.DropMalformed, spoil: func(f []byte) []byte { f[39] -= 4; return f }},
		{name: "IP checksum", why: provider.DropChecksum, spoil: func(f []byte) []byte { f[24]++; return f }},
		{name: "fragment", why: provider.DropFragment, spoil: func(f []byte) []byte { f[20] |= 0x20; return f }},
		{name: "transport version", why: provider.DropVersion, change: func(_ *harness.Conn, k *rcPacket) { k.bth.TVer = 1 }},
		{name: "opcode", why: provider.DropOpcode, change: func(_ *harness.Conn, k *rcPacket) { k.bth.Op = 0x1f }},
		{name: "MAC", why: provider.DropWrongMAC, change: func(_ *harness.Conn, k *rcPacket) { k.path.DstMAC[5] ^= 0x40 }},
		{name: "destination address", why: provider.DropWrongIP, change: func(_ *harness.Conn, k *rcPacket) {
			k.path.Dst = netip.MustParseAddr("10.91.0.9")
		}},
		{name: "ICRC", why: provider.DropICRC, spoil: func(f []byte) []byte { f[len(f)-1] ^= 1; return f }},
		{name: "payload bit", why: provider.DropICRC, spoil: func(f []byte) []byte { f[len(f)-8] ^= 1; return f }},
		{name: "QP0", why: provider.DropMAD, change: func(_ *harness.Conn, k *rcPacket) { k.bth.DestQP = 0 }},
		{name: "QP1", why: provider.DropMAD, change: func(_ *harness.Conn, k *rcPacket) { k.bth.DestQP = 1 }},
		{name: "multicast QPN", why: provider.DropMulticast, change: func(_ *harness.Conn, k *rcPacket) { k.bth.DestQP = 0xffffff }},
		{name: "no such index", why: provider.DropNoQP, change: func(_ *harness.Conn, k *rcPacket) { k.bth.DestQP += 1000 }},
		{name: "another generation", why: provider.DropNoQP, change: func(_ *harness.Conn, k *rcPacket) { k.bth.DestQP ^= 1 << 16 }},
		{name: "UD to RC", why: provider.DropService, change: func(_ *harness.Conn, k *rcPacket) {
			k.bth.Op, k.ext = wire.UDSendOnly, make([]byte, wire.DETHLen)
		}},
		{name: "UC to RC", why: provider.DropService, change: func(_ *harness.Conn, k *rcPacket) { k.bth.Op = wire.UCSendOnly }},
		{name: "partition", why: provider.DropPKey, change: func(_ *harness.Conn, k *rcPacket) { k.bth.PKey = 0x8001 }},
		{name: "partition 0", why: provider.DropPKey, change: func(_ *harness.Conn, k *rcPacket) { k.bth.PKey = 0x8000 }},
		{name: "another sender", why: provider.DropSource, change: func(_ *harness.Conn, k *rcPacket) {
			k.path.Src = netip.MustParseAddr("10.91.0.3")
		}},
		{name: "another of our addresses", why: provider.DropSource, change: func(_ *harness.Conn, k *rcPacket) {
			k.path.Src, k.path.Dst = harness.Addrs(1)[1].Addr(), harness.Addrs(0)[1].Addr()
		}},
		{name: "QP in INIT", why: provider.DropState, change: func(c *harness.Conn, k *rcPacket) {
			e := harness.NewEnd(c.T, c.Dev[0], harness.ConnOptions{Mem: 4096})
			if err := harness.Up(e.QP, harness.ConnOptions{}.Attrs(0, c.B), qp.StateInit); err != nil {
				c.T.Fatal(err)
			}
			k.bth.DestQP = e.QP.Num()
		}},
		{name: "QP in ERR", why: provider.DropState, change: func(c *harness.Conn, k *rcPacket) {
			if err := c.A.QP.Modify(provider.QPAttr{Attr: qp.Attr{State: qp.StateErr}}, qp.AttrState); err != nil {
				c.T.Fatal(err)
			}
			c.A.Poll()
		}},
		{name: "QP destroyed", why: provider.DropNoQP, change: func(c *harness.Conn, _ *rcPacket) {
			if err := c.A.QP.Destroy(); err != nil {
				c.T.Fatal(err)
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := harness.NewPair(t, link)
			c := p.Connect(harness.ConnOptions{Mem: 4096})
			p.T, c.T = t, t
			c.A.Recv(1, 0, 100)
			k := packetFor(c)
			if tc.change != nil {
				tc.change(c, &k)
			}
			f := k.frame()
			if tc.spoil != nil {
				f = tc.spoil(f)
			}
			p.Settle()
			before := c.Dev[0].Stats()
			proto := c.Dev[0].Protocol().RcvdPkts.Load()
			inject(t, p, f)
			after := c.Dev[0].Stats()
			for r := range provider.NumDropReasons {
				want := before.Drops[r]
				if r == tc.why {
					want++
				}
				if after.Drops[r] != want {
					t.Errorf("drops for reason %v: %d, want %d", r, after.Drops[r], want)
				}
			}
			if after.TxFrames != before.TxFrames {
				t.Error("something was answered: these drops are silent")
			}
			if n := c.Dev[0].Protocol().RcvdPkts.Load(); n != proto {
				t.Error("the packet reached a QP")
			}
		})
	}
}

// The packet that all cases of TestDemux change is one that passes.
func TestDemuxPasses(t *testing.T) {
	for _, pkey := range []uint16{0xffff, 0x7fff} {
		p := harness.NewPair(t, link)
		c := p.Connect(harness.ConnOptions{Mem: 4096})
		c.A.Recv(1, 0, 100)
		k := packetFor(c)
		k.bth.PKey = pkey
		inject(t, p, k.frame())
		if wcs := c.A.Poll(); len(wcs) != 1 || wcs[0].Status != qp.WCSuccess || string(c.A.Mem[:5]) != "hello" {
			t.Fatalf("completions %+v", wcs)
		}
	}
}

func TestCNP(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{Mem: 4096})
	k := packetFor(c)
	k.bth = wire.BTH{Op: wire.CNP, BECN: true, PKey: 0xffff, DestQP: c.A.QP.Num()}
	k.ext, k.body = make([]byte, wire.CNPLen), nil
	if wire.CNP.Info().HdrLen == wire.BTHLen {
		k.ext, k.body = nil, make([]byte, wire.CNPLen)
	}
	inject(t, p, k.frame())
	if st := c.Dev[0].Stats(); st.CNPs != 1 || st.Dropped() != 0 {
		t.Errorf("CNPs %d, drops %v", st.CNPs, st.Drops)
	}
}

// The number of a QP that was destroyed is not given out again soon, and not with
// the same generation.
func TestNumbers(t *testing.T) {
	p := harness.NewPair(t, link)
	e := harness.NewEnd(t, p.Dev[0], harness.ConnOptions{Mem: 4096})
	seen := map[wire.QPN]bool{}
	for range 2000 {
		q, err := e.PD.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: e.CQ, RecvCQ: e.CQ, Caps: qp.Caps{SendWR: 1, RecvWR: 1}})
		if err != nil {
			t.Fatal(err)
		}
		n := q.Num()
		if seen[n] || n <= 1 || n > wire.QPNMask || n == wire.MulticastQPN {
			t.Fatalf("QP number %#x", uint32(n))
		}
		seen[n] = true
		if err := q.Destroy(); err != nil {
			t.Fatal(err)
		}
	}
}
