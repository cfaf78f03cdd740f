// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"net/netip"
	"reflect"
	"testing"
)

// run makes k frames of one flow that a super-frame can consist of: size bytes of payload
// each, last in the last.
func run(v6 bool, ipid uint16, k, size, last int) (frames [][]byte) {
	p := Path{SrcMAC: [6]byte{2, 1}, DstMAC: [6]byte{2, 2}, SrcPort: 0xc123, TClass: 0xa9, HopLimit: 64,
		Src: netip.MustParseAddr("10.0.0.1"), Dst: netip.MustParseAddr("10.0.0.2")}
	if v6 {
		p.Src, p.Dst, p.FlowLabel = netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2"), 0x12345
	}
	for i := range k {
		n := size
		if i == k-1 {
			n = last
		}
		b := make([]byte, p.FrameLen(RCWriteMiddle, n))
		payload := bytes.Repeat([]byte{byte(i + 1)}, n)
		Encode(b, &p, ipid+uint16(i), &BTH{Op: RCWriteMiddle, PSN: PSN(i)}, nil, payload)
		frames = append(frames, b)
	}
	return frames
}

// join is the super-frame of frames.
func join(frames [][]byte) (b []byte, gso int) {
	h := RoCE(frames[0])
	n := 0
	for _, f := range frames {
		n += len(f) - h
	}
	b = make([]byte, h, h+n)
	if PutSuper(b, frames[0], n) != h {
		panic("another length of headers")
	}
	for _, f := range frames {
		b = append(b, f[h:]...)
	}
	return b, len(frames[0]) - h
}

// A run of packets is joined and taken apart again, and all bytes are what they were.
func TestSuper(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for _, c := range []struct{ k, size, last int }{{2, 4096, 4096}, {15, 4096, 1}, {500, 64, 64}, {500, 64, 0}, {1, 1000, 1000}, {3, 1, 1}} {
			frames := run(v6, 0xfffe, c.k, c.size, c.last)
			b, gso := join(frames)
			h := RoCE(b)
			if l := be.Uint16(b[h-UDPLen+4:]); int(l) != len(b)-h+UDPLen {
				t.Fatalf("%+v: UDP length %d", c, l)
			}
			var s Super
			if err := s.Open(b, gso); err != nil {
				t.Fatalf("%+v: %v", c, err)
			}
			for i, want := range frames {
				if got := s.Next(); !bytes.Equal(got, want) {
					t.Fatalf("%+v: frame %d is %x, was %x", c, i, got, want)
				}
			}
			if s.Next() != nil {
				t.Fatalf("%+v: one more", c)
			}
			checkPackets(t, frames)
		}
	}
}

// checkPackets: NextPacket gives what Parse gives of each frame, and knows a right ICRC from
// a wrong one.
func checkPackets(t *testing.T, frames [][]byte) {
	t.Helper()
	b, gso := join(frames)
	var s Super
	if err := s.Open(b, gso); err != nil || !s.RoCE() {
		t.Fatalf("no super-frame of RoCE: %v", err)
	}
	for i, f := range frames {
		var got, want Packet
		if err := Parse(f, &want); err != nil {
			t.Fatal(err)
		}
		n, more, err := s.NextPacket(&got)
		if n != len(f) || !more || err != nil {
			t.Fatalf("packet %d: %d bytes of %d, %v, %v", i, n, len(f), more, err)
		}
		if !got.ICRCValid() || s.Dst() != want.Dst() {
			t.Fatalf("packet %d: ICRC valid %v, for %v", i, got.ICRCValid(), s.Dst())
		}
		at := len(f) - 1 - i%(BTHLen+ICRCLen) // from the payload's end on, or in the BTH
		got.Frame[at] ^= 4
		if got.ICRCValid() {
			t.Fatalf("packet %d: the ICRC is right with another byte %d", i, at)
		}
		got.Frame[at] ^= 4
		got.crc, got.hasCRC = 0, false
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("packet %d is %+v, was %+v", i, got, want)
		}
	}
	if _, more, _ := s.NextPacket(new(Packet)); more {
		t.Fatal("one more packet")
	}
}

// The checksum of a super-frame is that of its pseudo header: what its segments' sums begin with.
func TestSuperChecksum(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		b, _ := join(run(v6, 7, 3, 100, 100))
		h := RoCE(b)
		l4 := h - UDPLen
		sum := fold(sum16(0, b[l4:])) // with the pseudo header in it once
		be.PutUint16(b[l4+6:], ^sum)
		if !udpChecksumOK(b, v6, l4) {
			t.Errorf("v6 %v: not the sum of the pseudo header", v6)
		}
	}
}

// Headers of a super-frame become those of any of its packets again.
func TestPutSingle(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		frames := run(v6, 0xffff, 3, 100, 7)
		b, _ := join(frames)
		h := RoCE(b)
		for i, f := range frames {
			PutSingle(b[:h], len(f)-h, uint16(0xffff+i))
			if !bytes.Equal(b[:h], f[:h]) {
				t.Errorf("v6 %v: headers of packet %d are %x, were %x", v6, i, b[:h], f[:h])
			}
		}
	}
}

// A Prefix gives the ICRC of any packet of its length, in one piece or in several.
func TestPrefix(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for _, size := range []int{0, 1, 4, 8, 31, 32, 36, 40, 48, 52, 64, 100, 256, 1000, 4096} {
			frames := run(v6, 0xfefe, 300, size, size)
			h := RoCE(frames[0])
			p := PrefixOf(frames[299][:h])
			for i, f := range frames {
				id := uint16(0xfefe + i)
				b := bytes.Clone(f[h:])
				b[4] |= 0x40 * byte(i%3) // FECN, BECN
				want := bytes.Clone(b)
				clear(b[len(b)-ICRCLen:])
				p.Seal(b, id)
				if !bytes.Equal(b, want) {
					t.Fatalf("v6 %v, %d bytes, packet %d: sealed %x, want %x", v6, size, i, b, want)
				}
				if size%4 != 0 {
					continue
				}
				var icrc [4]byte
				p.SealApart(b[:BTHLen], b[BTHLen:len(b)-ICRCLen], icrc[:], id)
				if [4]byte(want[len(want)-ICRCLen:]) != icrc {
					t.Fatalf("v6 %v, %d bytes, packet %d in pieces: %x, want %x", v6, size, i, icrc, want[len(want)-ICRCLen:])
				}
			}
		}
	}
}

// What is no super-frame of UDP is not taken apart.
func TestSuperLies(t *testing.T) {
	b, gso := join(run(false, 9, 4, 100, 50))
	change := func(f func(b []byte)) []byte { c := bytes.Clone(b); f(c); return c }
	for name, c := range map[string]struct {
		b    []byte
		gso  int
		want error
	}{
		"segments of nothing": {b, 0, ErrMalformed},
		"shorter than a BTH":  {b, 15, ErrMalformed},
		"cut":                 {b[:len(b)-1], gso, ErrTruncated},
		"nothing":             {nil, gso, ErrNotRoCE},
		"Ethernet alone":      {b[:14], gso, ErrNotRoCE},
		"not UDP":             {change(func(b []byte) { b[23] = 6 }), gso, ErrNotRoCE},
		"a fragment":          {change(func(b []byte) { b[20] = 0x20 }), gso, ErrNotRoCE},
		"options":             {change(func(b []byte) { b[14] = 0x46 }), gso, ErrNotRoCE},
		"shorter than itself": {change(func(b []byte) { b[16], b[17] = 0, 10 }), gso, ErrTruncated},
	} {
		var s Super
		if err := s.Open(c.b, c.gso); err != c.want {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// What is not RoCE is given a checksum where one is needed.
func TestSuperOfOthers(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		frames := run(v6, 1, 3, 100, 60)
		for _, f := range frames {
			f[RoCE(f)-UDPLen+3]++ // another port
		}
		first := frames[0]
		h := udp(first)
		n := 0
		for _, f := range frames {
			n += len(f) - h
		}
		b := bytes.Clone(first[:h])
		if v6 {
			be.PutUint16(b[18:], uint16(UDPLen+n))
		} else {
			be.PutUint16(b[16:], uint16(IPv4Len+UDPLen+n))
		}
		for _, f := range frames {
			b = append(b, f[h:]...)
		}
		var s Super
		if err := s.Open(b, len(first)-h); err != nil {
			t.Fatal(err)
		}
		for i, want := range frames {
			got := s.Next()
			if !bytes.Equal(got[h:], want[h:]) {
				t.Fatalf("v6 %v, frame %d: another payload", v6, i)
			}
			if sum := be.Uint16(got[h-2:]); v6 && (sum == 0 || !udpChecksumOK(got, true, h-UDPLen)) || !v6 && sum != 0 {
				t.Errorf("v6 %v, frame %d: checksum %#x", v6, i, sum)
			}
		}
	}
}

// FuzzSuper: whatever comes is taken apart without a panic, into frames that together have
// all of it, each no longer than it may be.
func FuzzSuper(f *testing.F) {
	for _, v6 := range []bool{false, true} {
		b, gso := join(run(v6, 0xffff, 5, 256, 12))
		f.Add(b, uint16(gso))
		f.Add(b, uint16(16))
		f.Add(b[:70], uint16(gso))
	}
	f.Fuzz(func(t *testing.T, b []byte, gso uint16) {
		var s Super
		own := bytes.Clone(b)
		if s.Open(own, int(gso)) != nil {
			return
		}
		h, sum := s.h, 0
		for fr := s.Next(); fr != nil; fr = s.Next() {
			n := len(fr) - h
			if n <= 0 || n > int(gso) || !bytes.Equal(fr[h:], b[h+sum:h+sum+n]) {
				t.Fatalf("segment of %d bytes at %d", n, sum)
			}
			var p Packet
			_ = Parse(fr, &p)
			sum += n
		}
		if own = bytes.Clone(b); s.Open(own, int(gso)) == nil && s.RoCE() {
			var p, q Packet
			for n, more, err := s.NextPacket(&p); more; n, more, err = s.NextPacket(&p) {
				own := own[s.at-n+h : s.at+h] // what Next has written
				if err2 := Parse(own, &q); err != err2 {
					t.Fatalf("%v, and by itself %v", err, err2)
				} else if err == nil && p.ICRCValid() != q.ICRCValid() {
					t.Fatal("the ICRC is right or not, as one looks at it")
				}
			}
		}
		if h+sum > len(b) || h+sum != len(s.frame) {
			t.Fatalf("%d of %d bytes", h+sum, len(s.frame))
		}
	})
}
