// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"testing"
)

var benchSizes = []int{0, 64, 1024, 4096}

func benchPaths(b *testing.B, run func(b *testing.B, f []byte)) {
	for _, v := range []struct {
		name string
		path *Path
	}{{"v4", &path4}, {"v6", &path6}} {
		for _, n := range benchSizes {
			b.Run(fmt.Sprintf("%s/%d", v.name, n), func(b *testing.B) {
				f := frame(v.path, RCWriteOnly, n)
				b.ReportAllocs()
				b.SetBytes(int64(len(f)))
				run(b, f)
			})
		}
	}
}

func BenchmarkParse(b *testing.B) {
	benchPaths(b, func(b *testing.B, f []byte) {
		var p Packet
		for b.Loop() {
			if Parse(f, &p) != nil {
				b.Fatal("does not parse")
			}
		}
	})
}

func BenchmarkParseAndVerify(b *testing.B) {
	benchPaths(b, func(b *testing.B, f []byte) {
		var p Packet
		for b.Loop() {
			if Parse(f, &p) != nil || !p.ICRCValid() {
				b.Fatal("does not parse or verify")
			}
		}
	})
}

func BenchmarkICRC(b *testing.B) {
	benchPaths(b, func(b *testing.B, f []byte) {
		for b.Loop() {
			ICRC(f, EthLen)
		}
	})
}

func BenchmarkSeal(b *testing.B) {
	benchPaths(b, func(b *testing.B, f []byte) {
		for b.Loop() {
			Seal(f, EthLen)
		}
	})
}

// BenchmarkHeaders is what a packet costs besides payload and ICRC.
func BenchmarkHeaders(b *testing.B) {
	for _, v := range []struct {
		name string
		path *Path
	}{{"v4", &path4}, {"v6", &path6}} {
		b.Run(v.name, func(b *testing.B) {
			buf := make([]byte, 128)
			bth := BTH{Op: RCWriteOnly, PKey: DefaultPKey, DestQP: 17}
			b.ReportAllocs()
			for b.Loop() {
				n := v.path.Put(buf, 36, 1)
				bth.PSN = bth.PSN.Next()
				bth.Put(buf[n:])
				RETH{1, 2, 3}.Put(buf[n+BTHLen:])
			}
		})
	}
}

func BenchmarkEncode(b *testing.B) {
	benchPaths(b, func(b *testing.B, f []byte) {
		var p Packet
		if err := Parse(f, &p); err != nil {
			b.Fatal(err)
		}
		path, buf := p.Path(), make([]byte, len(f))
		for b.Loop() {
			Encode(buf, &path, 1, &p.BTH, p.Ext(), p.Payload)
		}
	})
}

// TestNoAllocs: nothing on a packet's way allocates.
func TestNoAllocs(t *testing.T) {
	for _, path := range []*Path{&path4, &path6} {
		f := frame(path, RCWriteOnlyImm, 1000)
		bad := frame(path, Opcode(0x1f), 0)
		buf, grh := make([]byte, len(f)), make([]byte, GRHLen)
		var p Packet
		if n := testing.AllocsPerRun(200, func() {
			if Parse(f, &p) != nil || !p.ICRCValid() || Parse(bad, &Packet{}) != ErrOpcode {
				t.Fatal("does not parse")
			}
			r, imm, at := p.RETH(), p.Imm(), p.Path()
			p.GRH(grh)
			n := at.Put(buf, len(f)-at.HdrLen(), p.IPID())
			p.BTH.Put(buf[n:])
			r.Put(buf[n+int(p.Info.RETH):])
			ImmDt(imm).Put(buf[n+int(p.Info.ImmDt):])
			copy(buf[n+p.Info.HdrLen:], p.Payload)
			Seal(buf, EthLen)
			Encode(buf, &at, 1, &p.BTH, p.Ext(), p.Payload)
		}); n != 0 {
			t.Errorf("%v allocations for each packet", n)
		}
	}
}
