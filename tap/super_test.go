// SPDX-License-Identifier: Apache-2.0

package tap_test

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/wire"
)

// packets are RoCE packets of one flow to nobody in particular, the last shorter.
func packets(v6 bool, k, size, last int) (out [][]byte) {
	p := wire.Path{SrcMAC: [6]byte{2, 0, 0, 0, 1, 1}, DstMAC: [6]byte{2, 0, 0, 0, 1, 2}, SrcPort: 0xc001, HopLimit: 64,
		Src: netip.MustParseAddr("10.92.0.1"), Dst: netip.MustParseAddr("10.92.0.2")}
	if v6 {
		p.Src, p.Dst = netip.MustParseAddr("fd92::1"), netip.MustParseAddr("fd92::2")
	}
	for i := range k {
		n := size
		if i == k-1 {
			n = last
		}
		b := make([]byte, p.FrameLen(wire.RCWriteMiddle, n))
		wire.Encode(b, &p, uint16(0xfffe+i), &wire.BTH{Op: wire.RCWriteMiddle, PSN: wire.PSN(i)}, nil, payloadOf(n))
		out = append(out, b)
	}
	return out
}

// superOf is the super-frame of packets, in pieces.
func superOf(ps [][]byte) tap.Frame {
	h := wire.RoCE(ps[0])
	f := tap.Frame{GSO: uint16(len(ps[0]) - h)}
	n := 0
	for _, p := range ps {
		f.More = append(f.More, p[h:])
		n += len(p) - h
	}
	f.B = make([]byte, h)
	wire.PutSuper(f.B, ps[0], n)
	return f
}

// A super-frame reaches who takes such as it is, and others as the packets that it is of:
// with the same ICRC, whoever took it apart.
func TestSuperFramesOut(t *testing.T) {
	_, ds := onBridge(t, fabric.Config{}, tap.Config{}, tap.Config{}, tap.Config{Plain: true}, tap.Config{Without: tap.USO4 | tap.USO6})
	if !ds[0].Offloads().Has(tap.USO4 | tap.USO6) {
		t.Skip("the kernel knows no UDP segmentation offload (Linux 6.2)")
	}
	for _, v6 := range []bool{false, true} {
		for _, c := range []struct{ k, size, last int }{{2, 4096, 4096}, {15, 4096, 8}, {tap.MaxSegments, 64, 64}, {3, 1024, 0}} {
			ps := packets(v6, c.k, c.size, c.last)
			f := superOf(ps)
			if n, err := ds[0].WriteBatch([]tap.Frame{f}); n != 1 || err != nil {
				t.Fatalf("%+v: %d, %v", c, n, err)
			}
			in := readUDP(t, ds[1], 1)
			var s wire.Super
			if err := s.Open(in[0].B, int(in[0].GSO)); in[0].GSO != f.GSO || err != nil {
				t.Fatalf("%+v: segments of %d bytes, want %d; %v", c, in[0].GSO, f.GSO, err)
			}
			for i, want := range ps {
				if got := s.Next(); !bytes.Equal(got, want) {
					t.Fatalf("%+v: packet %d of a whole super-frame: %x, want %x", c, i, got, want)
				}
			}
			for k, d := range ds[2:] {
				for i, got := range readUDP(t, d, c.k) {
					var p wire.Packet
					if err := wire.Parse(got.B, &p); err != nil || got.GSO != 0 || !p.ICRCValid() {
						t.Fatalf("%+v: packet %d at device %d: %v, segments of %d, ICRC right: %v", c, i, k+2, err, got.GSO, err == nil && p.ICRCValid())
					}
					h := p.BTHOff
					if !bytes.Equal(got.B[h:], ps[i][h:]) {
						t.Fatalf("%+v: packet %d at device %d: other bytes", c, i, k+2)
					}
				}
			}
		}
	}
	if s := ds[0].(tap.StatsReader).Stats(); s.TxSuper != 8 || s.TxFrames != 8 {
		t.Errorf("%+v", s)
	}
}

// Super-frames are refused where the kernel would not know what they are, and when they are
// none; and nothing is written.
func TestSuperFramesRefused(t *testing.T) {
	_, ds := onBridge(t, fabric.Config{}, tap.Config{}, tap.Config{Plain: true}, tap.Config{Without: tap.USO4 | tap.USO6})
	good := superOf(packets(false, 3, 100, 100))
	for i, d := range ds {
		if d.Offloads().Has(tap.USO4) {
			continue
		}
		if n, err := d.WriteBatch([]tap.Frame{good}); n != 0 || !errors.Is(err, tap.ErrSuperFrame) {
			t.Errorf("device %d: %d, %v", i, n, err)
		}
	}
	if !ds[0].Offloads().Has(tap.USO4) {
		return
	}
	arp := make([]byte, 64)
	arp[12], arp[13] = 8, 6
	cut := good
	cut.B = cut.B[:40]
	many := good
	many.More = make([][]byte, tap.MaxPieces+1)
	for name, f := range map[string]tap.Frame{"ARP": {B: arp, GSO: 10}, "half a header": cut} {
		if n, err := ds[0].WriteBatch([]tap.Frame{f}); n != 0 || !errors.Is(err, tap.ErrSuperFrame) {
			t.Errorf("%s: %d, %v", name, n, err)
		}
	}
	if n, err := ds[0].WriteBatch([]tap.Frame{many}); n != 0 || !errors.Is(err, tap.ErrFrameLen) {
		t.Errorf("too many pieces: %d, %v", n, err)
	}
	long := superOf(packets(false, 16, 4096, 4096))
	if n, err := ds[0].WriteBatch([]tap.Frame{long}); n != 0 || !errors.Is(err, tap.ErrFrameLen) {
		t.Errorf("more than 64 KiB: %d, %v", n, err)
	}
}

// A frame in pieces is one frame, on both kinds of devices.
func TestPieces(t *testing.T) {
	both(t, func(t *testing.T, plain bool) {
		_, ds := onBridge(t, fabric.Config{}, tap.Config{Plain: plain}, tap.Config{Plain: plain})
		p := packets(false, 1, 1000, 1000)[0]
		if n, err := ds[0].WriteBatch([]tap.Frame{{B: p[:100], More: [][]byte{p[100:101], nil, p[101:]}}}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		if got := readUDP(t, ds[1], 1)[0]; !bytes.Equal(got.B, p) {
			t.Errorf("%x, want %x", got.B, p)
		}
	})
}
