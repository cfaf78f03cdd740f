// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

// acker is a device that takes everything, and acknowledges it when it is read next.
type acker struct {
	tap.Device
	path  wire.Path
	to    wire.QPN // 0: it does nothing
	psn   wire.PSN
	owed  bool
	n     int // frames taken
	frame [128]byte
}

func (a *acker) Offloads() tap.Offload { return tap.VnetHdr | tap.CSUM | tap.USO4 | tap.USO6 }

func (a *acker) WriteBatch(fs []tap.Frame) (int, error) {
	if a.to == 0 {
		return a.Device.WriteBatch(fs)
	}
	const h = wire.EthLen + wire.IPv4Len + wire.UDPLen
	a.n += len(fs)
	for _, f := range fs {
		if len(f.B) < h || binary.BigEndian.Uint16(f.B[36:]) != wire.UDPPort {
			continue
		}
		n := 1
		if f.GSO != 0 {
			n = (int(binary.BigEndian.Uint16(f.B[16:])) - wire.IPv4Len - wire.UDPLen + int(f.GSO) - 1) / int(f.GSO)
		}
		a.psn, a.owed = wire.ParseBTH(f.B[h:]).PSN.Add(uint32(n-1)), true
	}
	return len(fs), nil
}

func (a *acker) ReadBatch(fs []tap.Frame) (int, error) {
	if !a.owed {
		return a.Device.ReadBatch(fs)
	}
	a.owed = false
	var aeth [wire.AETHLen]byte
	wire.AETH{Syndrome: wire.AckSyndrome(wire.NoCredits)}.Put(aeth[:])
	n := wire.Encode(a.frame[:], &a.path, 0, &wire.BTH{Op: wire.RCAck, PKey: wire.DefaultPKey, DestQP: a.to, PSN: a.psn}, aeth[:], nil)
	fs[0].B, fs[0].GSO = append(fs[0].B[:0], a.frame[:n]...), 0
	return 1, nil
}

// BenchmarkSend is what a message costs a requester that posts lists, apart from system
// calls: super-frames of requests from resident memory, and their acknowledgements.
func BenchmarkSend(b *testing.B) {
	for _, c := range []struct {
		size, list int
	}{{8, 64}, {64, 64}, {64, 1}, {4096, 16}, {65536, 4}, {1 << 20, 1}} {
		b.Run(fmt.Sprintf("%d by %d", c.size, c.list), func(b *testing.B) {
			var dev *acker
			p := harness.NewPairWith(b, taptest.Config{}, func(i int, d tap.Device) tap.Device {
				if i == 0 {
					dev = &acker{Device: d}
					return dev
				}
				return d
			})
			k := p.Connect(harness.ConnOptions{MTU: qp.MTU4096, Mem: max(1<<20, c.size), Caps: qp.Caps{SendWR: 128, RecvWR: 1, SendSGE: 1, RecvSGE: 1}})
			clear(k.A.Mem)
			dev.to = k.A.QP.Num()
			dev.path = wire.Path{SrcMAC: [6]byte(p.Dev[1].MAC()), DstMAC: [6]byte(p.Dev[0].MAC()), SrcPort: 50000, HopLimit: 64,
				Src: netip.MustParseAddr("10.91.0.2"), Dst: netip.MustParseAddr("10.91.0.1")}
			wrs := make([]qp.SendWR, c.list)
			for i := range wrs {
				wrs[i] = k.A.Write(k.B, uint64(i), i*c.size, 0, c.size)
			}
			wcs := make([]qp.WC, 128)
			b.SetBytes(int64(c.size))
			b.ReportAllocs()
			posted, done, frames, packets := 0, 0, dev.n, p.Dev[0].Stats().TxFrames
			for b.Loop() {
				// An iteration is a message; who posts lists does so when there is room for one.
				if posted++; posted%c.list != 0 {
					continue
				}
				k.A.Send(wrs...)
				for posted-done > 128-c.list {
					n := k.A.CQ.Poll(wcs)
					for i := range n {
						if wcs[i].Status != qp.WCSuccess {
							b.Fatalf("completion %+v", wcs[i])
						}
					}
					done += n
				}
			}
			b.ReportMetric(float64(p.Dev[0].Stats().TxFrames-packets)/float64(dev.n-frames), "packets/frame")
		})
	}
}
