// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"
)

var (
	path4 = Path{
		SrcMAC: [6]byte{2, 1, 1, 1, 1, 1}, DstMAC: [6]byte{2, 2, 2, 2, 2, 2},
		Src: netip.MustParseAddr("10.1.2.3"), Dst: netip.MustParseAddr("10.4.5.6"),
		SrcPort: 0xc123, TClass: 0x6a, HopLimit: 33,
	}
	path6 = Path{
		SrcMAC: [6]byte{2, 1, 1, 1, 1, 1}, DstMAC: [6]byte{2, 2, 2, 2, 2, 2},
		Src: netip.MustParseAddr("fd77::1"), Dst: netip.MustParseAddr("fd77::2"),
		SrcPort: 0xc123, TClass: 0x6a, HopLimit: 33, FlowLabel: 0xabcde,
	}
)

// frame builds a packet over path with n bytes of payload.
func frame(path *Path, op Opcode, n int) []byte {
	payload := make([]byte, n)
	for i := range payload {
		payload[i] = byte(i*7 + 1)
	}
	bth := BTH{Op: op, PKey: DefaultPKey, DestQP: 0x123456, AckReq: true, PSN: 0xabcdef}
	ext := filled(op.Info().HdrLen - BTHLen)
	b := filled(path.FrameLen(op, n))
	if Encode(b, path, 0x4321, &bth, ext, payload) != len(b) {
		panic("Encode and FrameLen disagree")
	}
	return b
}

// TestEveryOpcode builds, parses and verifies a packet of each opcode, with every
// pad, over both IP versions.
func TestEveryOpcode(t *testing.T) {
	for _, path := range []*Path{&path4, &path6} {
		for n := range 256 {
			op := Opcode(n)
			for size := range 9 {
				if size > 0 && !op.Info().Has(Payload) {
					break
				}
				f := frame(path, op, size)
				var p Packet
				if err := Parse(f, &p); !op.Info().Has(Valid) {
					if err != ErrOpcode {
						t.Fatalf("%v: %v", op, err)
					}
					continue
				} else if err != nil {
					t.Fatalf("%v with %d bytes: %v", op, size, err)
				}
				if !p.ICRCValid() || icrcByTheBook(f) != ICRC(f, EthLen) {
					t.Fatalf("%v with %d bytes: wrong ICRC", op, size)
				}
				if p.Path() != *path || p.V6 != (path == &path6) || p.DstMAC() != path.DstMAC || p.Info != op.Info() {
					t.Fatalf("%v: path %+v", op, p.Path())
				}
				if len(p.Payload) != size || int(p.BTH.Pad) != -size&3 || cap(p.Payload) != size {
					t.Fatalf("%v with %d bytes: payload %d of capacity %d, pad %d", op, size, len(p.Payload), cap(p.Payload), p.BTH.Pad)
				}
				if p.BTH.DestQP != 0x123456 || p.BTH.PSN != 0xabcdef || !p.BTH.AckReq || p.BTH.PKey != 0xffff {
					t.Fatalf("%v: %+v", op, p.BTH)
				}
				if !bytes.Equal(reencode(&p), f) || !bytes.Equal(reencodeExt(&p), p.Ext()) {
					t.Fatalf("%v with %d bytes: re-encoded otherwise", op, size)
				}
			}
		}
	}
}

// TestAccessors reads headers with known values through Packet.
func TestAccessors(t *testing.T) {
	build := func(op Opcode, ext ...interface{ Put([]byte) }) *Packet {
		i := op.Info()
		b := make([]byte, i.HdrLen-BTHLen)
		for _, h := range ext {
			var off int8
			switch h.(type) {
			case RETH:
				off = i.RETH
			case AETH:
				off = i.AETH
			case AtomicETH:
				off = i.AtomicETH
			case AtomicAckETH:
				off = i.AtomicAckETH
			case ImmDt:
				off = i.ImmDt
			case IETH:
				off = i.IETH
			case DETH:
				off = i.DETH
			case XRCETH:
				off = i.XRCETH
			case FETH:
				off = i.FETH
			}
			h.Put(b[off-BTHLen:])
		}
		f := make([]byte, path4.FrameLen(op, 0))
		Encode(f, &path4, 1, &BTH{Op: op}, b, nil)
		p := new(Packet)
		if err := Parse(f, p); err != nil {
			t.Fatalf("%v: %v", op, err)
		}
		return p
	}
	reth, aeth, imm := RETH{1 << 40, 7, 1 << 31}, AETH{0x1f, 9}, ImmDt(0x11223344)
	if p := build(XRCWriteOnlyImm, XRCETH{5, 0}, reth, imm); p.RETH() != reth || p.Imm() != uint32(imm) || p.XRCETH() != (XRCETH{5, 0}) {
		t.Error("XRC WRITE ONLY with immediate", p.RETH(), p.Imm(), p.XRCETH())
	}
	if p := build(RCAtomicAck, aeth, AtomicAckETH{1 << 63}); p.AETH() != aeth || p.AtomicAckETH() != (AtomicAckETH{1 << 63}) {
		t.Error("ATOMIC ACK", p.AETH(), p.AtomicAckETH())
	}
	if p := build(RCCompareSwap, AtomicETH{8, 2, 3, 4}); p.AtomicETH() != (AtomicETH{8, 2, 3, 4}) {
		t.Error("CMP SWAP", p.AtomicETH())
	}
	if p := build(RCSendOnlyInv, IETH(77)); p.InvKey() != 77 {
		t.Error("SEND ONLY INV", p.InvKey())
	}
	if p := build(UDSendOnlyImm, DETH{1, 2, 0}, imm); p.DETH() != (DETH{1, 2, 0}) || p.Imm() != uint32(imm) {
		t.Error("UD SEND ONLY IMM", p.DETH(), p.Imm())
	}
	if p := build(RCFlush, FETH{3, 1, 0}, reth); p.FETH() != (FETH{3, 1, 0}) || p.RETH() != reth {
		t.Error("FLUSH", p.FETH(), p.RETH())
	}
}

// sum4 sets a right IPv4 header checksum.
func sum4(f []byte) []byte {
	n := int(f[14]&15) * 4
	f[24], f[25] = 0, 0
	var s uint32
	for i := 14; i < 14+n; i += 2 {
		s += uint32(f[i])<<8 | uint32(f[i+1])
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	f[24], f[25] = byte(^s>>8), byte(^s)
	return f
}

// sumUDP sets a right UDP checksum.
func sumUDP(f []byte) []byte {
	l4, addr := 34, f[26:34]
	if f[14]>>4 == 6 {
		l4, addr = 54, f[22:54]
	}
	f[l4+6], f[l4+7] = 0, 0
	b := append(bytes.Clone(addr), 0, 17, f[l4+4], f[l4+5])
	b = append(b, f[l4:]...)
	if len(b)%2 != 0 {
		b = append(b, 0)
	}
	var s uint32
	for i := 0; i < len(b); i += 2 {
		s += uint32(b[i])<<8 | uint32(b[i+1])
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	if s == 0xffff {
		s = 0 // 0 is sent as its other form, all ones
	}
	f[l4+6], f[l4+7] = byte(^s>>8), byte(^s)
	return f
}

// withOptions puts n words of IPv4 options (no-operation) in.
func withOptions(f []byte, n int) []byte {
	b := append(bytes.Clone(f[:34]), bytes.Repeat([]byte{1}, 4*n)...)
	b = append(b, f[34:]...)
	b[14] += byte(n)
	be.PutUint16(b[16:], be.Uint16(b[16:])+uint16(4*n))
	return sum4(b)
}

// withFragHeader puts an IPv6 fragment header for proto in.
func withFragHeader(f []byte, proto byte) []byte {
	b := append(bytes.Clone(f[:54]), proto, 0, 0, 1, 0, 0, 0, 9)
	b = append(b, f[54:]...)
	b[20] = protoFrag
	be.PutUint16(b[18:], be.Uint16(b[18:])+8)
	return b
}

// TestParseReasons changes a good packet in one way at a time.
func TestParseReasons(t *testing.T) {
	set := func(kv ...int) func([]byte) []byte { // offset, value, …; IPv4 checksum kept right
		return func(f []byte) []byte {
			for i := 0; i < len(kv); i += 2 {
				f[kv[i]] = byte(kv[i+1])
			}
			if f[14]>>4 == 4 && f[14]&15 >= 5 {
				sum4(f)
			}
			return f
		}
	}
	const size = 10 // bytes of payload; pad 2
	for _, c := range []struct {
		name string
		path *Path
		edit func([]byte) []byte
		want error
	}{
		{"v4 good", &path4, set(), nil},
		{"v6 good", &path6, set(), nil},
		{"v4 good with UDP checksum", &path4, sumUDP, nil},
		{"v6 good with UDP checksum", &path6, sumUDP, nil},
		{"Ethernet padding", &path4, func(f []byte) []byte { return append(f, filled(9)...) }, nil},
		{"no DF", &path4, set(20, 0), nil},
		{"reserved IPv4 flag", &path4, set(20, 0x80), nil},
		{"reserved BTH bits", &path4, set(46, 0xff, 50, 0xff), nil},

		{"ARP", &path4, set(12, 8, 13, 6), ErrNotRoCE},
		{"VLAN", &path4, set(12, 0x81, 13, 0), ErrNotRoCE},
		{"RoCE v1", &path4, set(12, 0x89, 13, 0x15), ErrNotRoCE},
		{"IEEE 802.3 length", &path4, set(12, 0, 13, 46), ErrNotRoCE},
		{"v4 TCP", &path4, set(23, 6), ErrNotRoCE},
		{"v4 ICMP fragment", &path4, set(23, 1, 20, 0x20), ErrNotRoCE},
		{"v4 IGMP with options", &path4, func(f []byte) []byte { f[23] = 2; return withOptions(f, 1) }, ErrNotRoCE},
		{"v6 ICMP", &path6, set(20, 58), ErrNotRoCE},
		{"v6 hop-by-hop", &path6, set(20, 0), ErrNotRoCE},
		{"v6 ICMP fragment", &path6, func(f []byte) []byte { return withFragHeader(f, 58) }, ErrNotRoCE},
		{"v4 other port", &path4, set(37, 0xb8), ErrNotRoCE},
		{"v6 other port", &path6, set(57, 0xb8), ErrNotRoCE},
		{"v4 other port with options", &path4, func(f []byte) []byte { f[37]++; return withOptions(f, 2) }, ErrNotRoCE},
		{"v4 other port, bad header checksum", &path4, func(f []byte) []byte { f[37]++; f[24]++; return f }, ErrNotRoCE},

		{"v4 says v6", &path4, set(14, 0x65), ErrMalformed},
		{"v6 says v4", &path6, set(14, 0x45), ErrMalformed},
		{"IHL 4", &path4, set(14, 0x44), ErrMalformed},
		{"v4 options", &path4, func(f []byte) []byte { return withOptions(f, 1) }, ErrMalformed},
		{"v4 options 15", &path4, func(f []byte) []byte { return withOptions(f, 10) }, ErrMalformed},
		{"v4 UDP length short", &path4, set(39, 31), ErrMalformed},
		{"v4 UDP length long", &path4, set(39, 80), ErrMalformed},
		{"v6 UDP length short", &path6, set(59, 31), ErrMalformed},
		{"v4 total length below the headers", &path4, set(16, 0, 17, 27), ErrMalformed},
		{"v4 total length 0", &path4, set(16, 0, 17, 0), ErrMalformed},
		{"v6 payload length 0", &path6, set(18, 0, 19, 0), ErrMalformed},
		{"v6 payload length 7", &path6, set(18, 0, 19, 7, 58, 0, 59, 7), ErrMalformed},
		{"not a multiple of 4", &path4, func(f []byte) []byte {
			path4.Put(f, len(f)-42-1, 1)
			return f
		}, ErrMalformed},

		{"v4 header checksum", &path4, func(f []byte) []byte { f[25] ^= 1; return f }, ErrChecksum},
		{"v4 header changed", &path4, func(f []byte) []byte { f[22]--; return f }, ErrChecksum},
		{"v4 UDP checksum", &path4, func(f []byte) []byte { sumUDP(f); f[60] ^= 1; return f }, ErrChecksum},
		{"v6 UDP checksum", &path6, func(f []byte) []byte { sumUDP(f); f[53] ^= 1; return f }, ErrChecksum},
		{"UDP checksum set by chance", &path4, set(40, 0, 41, 1), ErrChecksum},
		{"UDP checksum with a low byte of 0", &path4, set(40, 1, 41, 0), ErrChecksum},

		{"v4 first fragment", &path4, set(20, 0x20), ErrFragment},
		{"v4 later fragment", &path4, set(20, 0, 21, 100), ErrFragment},
		{"v4 last fragment far off", &path4, set(20, 0x1f, 21, 0), ErrFragment},
		{"v6 fragment", &path6, func(f []byte) []byte { return withFragHeader(f, 17) }, ErrFragment},

		{"transport version", &path4, set(43, 0x01), ErrVersion},
		{"transport version 15", &path6, set(63, 0x0f), ErrVersion},
		{"opcode", &path4, set(42, 0x15), ErrOpcode},
		{"opcode of RD", &path6, set(62, 0x44), ErrOpcode},

		{"v4 IP length beyond the frame", &path4, func(f []byte) []byte { path4.Put(f, len(f)-42+4, 1); return f }, ErrTruncated},
		{"v6 IP length beyond the frame", &path6, func(f []byte) []byte { path6.Put(f, len(f)-62+4, 1); return f }, ErrTruncated},
		{"opcode needs more", &path4, set(42, 0x13), ErrTruncated},
		{"BTH alone", &path4, func(f []byte) []byte { path4.Put(f, 12, 1); return f[:54] }, ErrTruncated},
		{"nothing behind UDP", &path6, func(f []byte) []byte { path6.Put(f, 0, 1); return f[:62] }, ErrTruncated},
		{"empty", &path4, func(f []byte) []byte { return nil }, ErrTruncated},
	} {
		f := c.edit(frame(c.path, RCSendOnly, size))
		p := Packet{V6: c.path == &path4} // whatever was there before must not matter
		if err := Parse(f, &p); err != c.want {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
			continue
		}
		if c.want == nil {
			if covered := strings.Contains(c.name, "DF") || strings.Contains(c.name, "reserved"); p.ICRCValid() == covered {
				t.Errorf("%s: ICRC right is %v", c.name, !covered)
			}
			if end := len(frame(c.path, RCSendOnly, size)); len(p.Frame) != end || cap(p.Frame) != end {
				t.Errorf("%s: frame of %d bytes, capacity %d, want %d", c.name, len(p.Frame), cap(p.Frame), end)
			}
			if len(p.Payload) != size {
				t.Errorf("%s: payload of %d bytes", c.name, len(p.Payload))
			}
		}
	}
	// A pad that is more than what there is.
	f := frame(&path4, RCAck, 0)
	f[43] = 0x30
	if err := Parse(f, new(Packet)); err != ErrTruncated {
		t.Errorf("pad of 3 on an ACK: %v", err)
	}
}

// TestPathPut compares the headers with bytes written by hand.
func TestPathPut(t *testing.T) {
	for _, c := range []struct {
		name string
		path *Path
		want string
	}{
		{"v4", &path4, "020202020202" + "020101010101" + "0800" +
			"456a0030" + "43214000" + "2111" + "fb24" + "0a010203" + "0a040506" + "c12312b7" + "001c0000"},
		{"v6", &path6, "020202020202" + "020101010101" + "86dd" + "66aabcde" + "001c" + "11" + "21" +
			"fd770000000000000000000000000001" + "fd770000000000000000000000000002" + "c12312b7" + "001c0000"},
	} {
		want := unhex(t, c.want)
		b := filled(len(want) + 8)
		if n := c.path.Put(b, 20, 0x4321); n != len(want) || n != c.path.HdrLen() {
			t.Errorf("%s: %d bytes, HdrLen %d, want %d", c.name, n, c.path.HdrLen(), len(want))
		}
		if !bytes.Equal(b[:len(want)], want) || !bytes.Equal(b[len(want):], filled(8)) {
			t.Errorf("%s:\n%x, want\n%x", c.name, b, want)
		}
	}
	// Zones are not on the wire.
	z := path6
	z.Src = netip.MustParseAddr("fd77::1%eth0")
	a, b := filled(70), filled(70)
	z.Put(a, 20, 0)
	path6.Put(b, 20, 0)
	if !bytes.Equal(a, b) {
		t.Error("a zone changes the packet")
	}
}

func TestGRH(t *testing.T) {
	for _, path := range []*Path{&path4, &path6} {
		f := frame(path, UDSendOnly, 5)
		var p Packet
		if err := Parse(f, &p); err != nil {
			t.Fatal(err)
		}
		b := filled(GRHLen + 4)
		p.GRH(b)
		want := f[14:54]
		if !p.V6 {
			want = append(make([]byte, 20), f[14:34]...)
		}
		if !bytes.Equal(b[:GRHLen], want) || !bytes.Equal(b[GRHLen:], filled(4)) {
			t.Errorf("GRH\n%x, want\n%x", b, want)
		}
	}
}

func TestICRCSeed(t *testing.T) {
	// The plain computation over every length that has its own way through the code.
	for _, path := range []*Path{&path4, &path6} {
		for n := range 200 {
			f := frame(path, RCSendOnly, n)
			if got, want := ICRC(f, EthLen), icrcByTheBook(f); got != want {
				t.Fatalf("%d bytes: ICRC %08x, want %08x", n, got, want)
			}
		}
	}
	// Another offset of the IP header: the ICRC starts there, whatever stands before.
	f := frame(&path4, RCSendOnly, 33)
	if ICRC(f[14:], 0) != ICRC(f, EthLen) || ICRC(append(filled(4), f...), EthLen+4) != ICRC(f, EthLen) {
		t.Error("the ICRC depends on what stands before the IP header")
	}
}

func TestPadLen(t *testing.T) {
	for n, want := range []int{0, 3, 2, 1, 0, 3, 2, 1} {
		if PadLen(n) != want {
			t.Errorf("%d bytes get a pad of %d", n, PadLen(n))
		}
	}
}

// TestMaxHdrLen: no packet has more around its payload than the constant says.
func TestMaxHdrLen(t *testing.T) {
	most := 0
	for n := range 256 {
		most = max(most, path6.FrameLen(Opcode(n), 1)-1)
	}
	if most != MaxHdrLen {
		t.Errorf("up to %d bytes around a payload, MaxHdrLen is %d", most, MaxHdrLen)
	}
}
