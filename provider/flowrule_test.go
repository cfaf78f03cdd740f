// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"encoding/binary"
	"testing"
)

// specsOf are filters with the values of a frame that has been parsed.
func specsOf(v *frameView) (e EthFilter, i4 IPv4Filter, i6 IPv6Filter, p PortFilter) {
	b := v.b
	e = EthFilter{Dst: [6]byte(b), Src: [6]byte(b[6:]), EtherType: v.ether, VLANTag: v.tci}
	switch h := b[v.l3:]; v.ver {
	case 4:
		i4 = IPv4Filter{Src: [4]byte(h[12:]), Dst: [4]byte(h[16:]), Proto: h[9], TOS: h[1], TTL: h[8], Flags: h[6] >> 5}
	case 6:
		i6 = IPv6Filter{Src: [16]byte(h[8:]), Dst: [16]byte(h[24:]), FlowLabel: binary.BigEndian.Uint32(h), NextHdr: h[6],
			TClass: h[0]<<4 | h[1]>>4, HopLimit: h[7]}
	}
	if v.l4 != 0 {
		p = PortFilter{Src: binary.BigEndian.Uint16(b[v.l4:]), Dst: binary.BigEndian.Uint16(b[v.l4+2:])}
	}
	return e, i4, i6, p
}

// FuzzFlowRule parses any frame: what it finds lies in the frame; filters made of the
// frame itself match it under any mask; and they do not when a bit differs that a mask
// has.
func FuzzFlowRule(f *testing.F) {
	f.Add([]byte{1, 0, 0x5e, 1, 2, 3, 2, 0, 0, 0, 0, 1, 8, 0, 0x46, 8, 0, 32, 0, 1, 0x40, 0, 9, 17, 0, 0, 10, 1, 1, 1, 10, 2, 2, 2, 1, 1, 1, 1, 3, 0xe8, 7, 0xd0, 0, 8}, uint64(0xffff), uint16(3))
	f.Add([]byte{1, 0, 0x5e, 1, 2, 3, 2, 0, 0, 0, 0, 1, 0x88, 0xa8, 1, 2, 0x81, 0, 3, 4, 8, 0, 0x45, 8, 0, 20, 0, 1, 0, 5, 9, 17, 0, 0, 10, 1, 1, 1, 10, 2, 2, 2}, uint64(1), uint16(300))
	ext := make([]byte, 14+40+8+8+24+4)
	copy(ext[12:], []byte{0x86, 0xdd, 0x60, 0, 0, 0, 0, 44, 0, 64})
	copy(ext[54:], []byte{44, 0, 0, 0, 0, 0, 0, 0, 60, 0, 0, 1, 0, 0, 0, 0, 6, 2})
	f.Add(ext, uint64(7), uint16(9))
	f.Fuzz(func(t *testing.T, b []byte, seed uint64, flip uint16) {
		if len(b) < 14 {
			return
		}
		var v frameView
		v.parse(b)
		switch {
		case v.ver == 0:
			if v.l3|v.l4 != 0 {
				t.Fatalf("headers without IP: %+v", v)
			}
		case v.l3 < 14 || v.l3+20*int(v.ver/2-1) > len(b) || v.l4 != 0 && (v.l4 < v.l3+20 || v.l4+4 > len(b)):
			t.Fatalf("%+v of %d bytes", v, len(b))
		}
		e, i4, i6, p := specsOf(&v)
		ones := uint64(0)
		next := func() uint64 { // of any seed, some sparse, some dense
			ones = ones*6364136223846793005 + seed + 1442695040888963407
			return ones>>32 | ones<<32
		}
		var em EthFilter
		binary.Encode(em.Dst[:], binary.LittleEndian, uint32(next()))
		binary.Encode(em.Src[:], binary.LittleEndian, uint32(next()))
		em.EtherType = uint16(next())
		if v.tagged {
			em.VLANTag = uint16(next())
		}
		rules := []FlowSpec{EthSpec{e, em}}
		var m4 IPv4Filter
		var m6 IPv6Filter
		switch v.ver {
		case 4:
			m4.Proto, m4.TOS, m4.TTL, m4.Flags = uint8(next()), uint8(next()), uint8(next()), uint8(next())&7
			binary.Encode(m4.Src[:], binary.LittleEndian, uint32(next()))
			binary.Encode(m4.Dst[:], binary.LittleEndian, uint32(next()))
			rules = append(rules, IPv4Spec{i4, m4})
		case 6:
			m6.FlowLabel, m6.NextHdr, m6.TClass, m6.HopLimit = uint32(next())&0xfffff, uint8(next()), uint8(next()), uint8(next())
			binary.Encode(m6.Src[:], binary.LittleEndian, next())
			binary.Encode(m6.Dst[:], binary.LittleEndian, next())
			rules = append(rules, IPv6Spec{i6, m6})
		}
		pm := PortFilter{}
		if v.l4 != 0 {
			pm = PortFilter{Dst: uint16(next()), Src: uint16(next())}
		}
		switch v.proto {
		case protoTCP:
			rules = append(rules, TCPSpec{p, pm})
		case protoUDP:
			rules = append(rules, UDPSpec{p, pm})
		}
		var r flowRule
		for _, s := range rules {
			if err := s.addTo(&r); err != nil {
				t.Fatal(err)
			}
		}
		if !r.matches(&v) {
			t.Fatalf("%+v does not match its own frame % x", r, b)
		}
		// A bit of the link header, which needs no parsing to be found.
		i := int(flip) % 96
		byteMask := append(append([]byte(nil), em.Dst[:]...), em.Src[:]...)[i/8]
		b[i/8] ^= 1 << (i % 8)
		if r.matches(&v) != (byteMask>>(i%8)&1 == 0) {
			t.Fatalf("bit %d, mask %#x: %v", i, byteMask, r.matches(&v))
		}
		b[i/8] ^= 1 << (i % 8)
		if r.ip4 != nil && m4.Proto != 0 {
			r.ip4.Val.Proto ^= m4.Proto & -m4.Proto
			if r.matches(&v) {
				t.Fatal("another protocol matches")
			}
		}
	})
}
