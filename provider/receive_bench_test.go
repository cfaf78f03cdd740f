// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

// replay is a device that gives what was recorded for it, and takes everything.
type replay struct {
	tap.Device
	frames []tap.Frame // to be read next
}

func (r *replay) Offloads() tap.Offload { return tap.VnetHdr | tap.CSUM | tap.USO4 | tap.USO6 }

func (r *replay) ReadBatch(fs []tap.Frame) (n int, err error) {
	if len(r.frames) == 0 {
		return r.Device.ReadBatch(fs)
	}
	n = min(len(fs), len(r.frames))
	for i, f := range r.frames[:n] {
		fs[i].B, fs[i].GSO = append(fs[i].B[:0], f.B...), f.GSO
	}
	r.frames = r.frames[n:]
	return n, nil
}

func (r *replay) WriteBatch(fs []tap.Frame) (int, error) {
	if len(r.frames) == 0 {
		return r.Device.WriteBatch(fs)
	}
	return len(fs), nil
}

// recorder puts packets together to super-frames.
type recorder struct {
	path   wire.Path
	bth    wire.BTH
	id     uint16
	frames []tap.Frame
	run    [][]byte // packets of the super-frame under way
	bytes  int
}

// packet adds the next packet of the flow.
func (r *recorder) packet(op wire.Opcode, ackReq bool, ext, payload []byte) {
	r.bth.Op, r.bth.AckReq = op, ackReq
	f := make([]byte, r.path.FrameLen(op, len(payload)))
	if h := r.path.HdrLen(); len(r.run) == tap.MaxSegments || r.bytes+len(f)-h > 65000 || len(r.run) > 0 && len(f) > len(r.run[0]) {
		r.flush()
	}
	wire.Encode(f, &r.path, r.id, &r.bth, ext, payload)
	r.id++
	r.bth.PSN = r.bth.PSN.Next()
	r.bytes += len(f) - r.path.HdrLen()
	r.run = append(r.run, f)
	if len(f) < len(r.run[0]) {
		r.flush()
	}
}

func (r *recorder) flush() {
	if len(r.run) == 0 {
		return
	}
	b := make([]byte, 100)
	h := wire.PutSuper(b, r.run[0], r.bytes)
	b = b[:h]
	for _, f := range r.run {
		b = append(b, f[h:]...)
	}
	gso := uint16(len(r.run[0]) - h)
	if len(r.run) == 1 {
		b, gso = r.run[0], 0
	}
	r.frames = append(r.frames, tap.Frame{B: b, GSO: gso})
	r.run, r.bytes = nil, 0
}

// BenchmarkReceive is what a packet costs a responder, apart from system calls: super-frames
// of requests to resident memory, with their acknowledgements.
func BenchmarkReceive(b *testing.B) {
	const mtu = 4096
	for _, c := range []struct {
		name string
		size int
		send bool
	}{{"write", 64, false}, {"write", 4096, false}, {"write", 1 << 20, false}, {"send", 64, true}, {"send", 1 << 20, true}} {
		b.Run(fmt.Sprintf("%s/%d", c.name, c.size), func(b *testing.B) {
			var dev *replay
			p := harness.NewPairWith(b, taptest.Config{}, func(i int, d tap.Device) tap.Device {
				if i == 1 {
					dev = &replay{Device: d}
					return dev
				}
				return d
			})
			packets := (c.size + mtu - 1) / mtu
			ring := 8192 // packets that are recorded
			if c.size > 64 {
				ring = 512
			}
			opt := harness.ConnOptions{MTU: qp.MTU4096, Mem: max(1<<20, c.size), CQE: 2 * ring,
				Caps: qp.Caps{SendWR: 1, RecvWR: ring, SendSGE: 1, RecvSGE: 1}}
			k := p.Connect(opt)
			clear(k.B.Mem)
			rec := recorder{bth: wire.BTH{PKey: 0xffff, DestQP: k.B.QP.Num()}, path: wire.Path{
				SrcMAC: [6]byte(p.Dev[0].MAC()), DstMAC: [6]byte(p.Dev[1].MAC()), SrcPort: 50000, HopLimit: 64,
				Src: netip.MustParseAddr("10.91.0.1"), Dst: netip.MustParseAddr("10.91.0.2"),
			}}
			payload := make([]byte, mtu)
			messages := ring / packets
			for m := range messages {
				for i := range packets {
					op := [...]wire.Opcode{wire.RCWriteMiddle, wire.RCWriteFirst, wire.RCWriteLast, wire.RCWriteOnly}
					if c.send {
						op = [...]wire.Opcode{wire.RCSendMiddle, wire.RCSendFirst, wire.RCSendLast, wire.RCSendOnly}
					}
					first, last := i == 0, i == packets-1
					var ext []byte
					if first && !c.send {
						ext = make([]byte, wire.RETHLen)
						wire.RETH{VA: k.B.Addr + uint64(m*c.size)%(1<<20), RKey: uint32(k.B.MR.RKey()), Len: uint32(c.size)}.Put(ext)
					}
					n := min(mtu, c.size-i*mtu)
					rec.packet(op[boolInt(first)+2*boolInt(last)], last || i%64 == 63, ext, payload[:n])
				}
			}
			rec.flush()
			recvs := make([]qp.RecvWR, messages)
			for i := range recvs {
				recvs[i].SGL = []qp.SGE{k.B.SGE(0, c.size)}
			}
			wcs := make([]qp.WC, 256)
			attrs := opt.Attrs(1, k.A)
			b.SetBytes(int64(c.size))
			b.ReportAllocs()
			b.ResetTimer()
			for done := 0; done < b.N; done += messages {
				b.StopTimer()
				if err := k.B.QP.Modify(provider.QPAttr{Attr: qp.Attr{State: qp.StateReset}}, qp.AttrState); err != nil {
					b.Fatal(err)
				}
				if err := harness.Up(k.B.QP, attrs, qp.StateRTS); err != nil {
					b.Fatal(err)
				}
				if c.send {
					if _, err := k.B.QP.PostRecv(recvs); err != nil {
						b.Fatal(err)
					}
				}
				before := p.Dev[1].Stats()
				dev.frames = rec.frames
				b.StartTimer()
				for len(dev.frames) > 0 {
					k.B.CQ.Poll(wcs)
				}
				k.B.CQ.Poll(wcs)
				b.StopTimer()
				for c.send && k.B.CQ.Poll(wcs) > 0 {
				}
				if s := p.Dev[1].Stats(); s.RxFrames-before.RxFrames < uint64(messages*packets) || s.Dropped() != 0 {
					b.Fatalf("%d frames of %d, drops %v", s.RxFrames-before.RxFrames, messages*packets, s.Drops)
				}
				b.StartTimer()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64((b.N+messages-1)/messages*messages*packets), "ns/packet")
		})
	}
}
