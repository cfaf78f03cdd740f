// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/hex"
	"math/rand/v2"
	"testing"
)

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestHeaders compares every header with bytes written by hand, all fields
// different, reserved ones set too.
func TestHeaders(t *testing.T) {
	bth := func(b []byte) any { return ParseBTH(b) }
	for _, c := range []struct {
		name  string
		bytes string
		value any
		put   func([]byte)
		parse func([]byte) any
	}{
		{"BTH plain", "04" + "00" + "ffff" + "00000011" + "00000000",
			BTH{Op: RCSendOnly, PKey: 0xffff, DestQP: 0x11}, nil, bth},
		{"BTH full", "17" + "f5" + "8123" + "ff" + "abcdef" + "ff" + "fedcba",
			BTH{Op: RCSendOnlyInv, SE: true, MigReq: true, Pad: 3, TVer: 5, PKey: 0x8123, FECN: true, BECN: true,
				Resv6: 0x3f, DestQP: 0xabcdef, AckReq: true, Resv7: 0x7f, PSN: 0xfedcba}, nil, bth},
		{"BTH SE", "0080000000000000" + "00000000", BTH{SE: true}, nil, bth},
		{"BTH M", "0040000000000000" + "00000000", BTH{MigReq: true}, nil, bth},
		{"BTH pad 1", "0010000000000000" + "00000000", BTH{Pad: 1}, nil, bth},
		{"BTH FECN", "0000000080000000" + "00000000", BTH{FECN: true}, nil, bth},
		{"BTH BECN", "0000000040000000" + "00000000", BTH{BECN: true}, nil, bth},
		{"BTH ack", "0000000000000000" + "80000000", BTH{AckReq: true}, nil, bth},
		{"RETH", "0102030405060708" + "090a0b0c" + "0d0e0f10", RETH{0x0102030405060708, 0x090a0b0c, 0x0d0e0f10},
			RETH{0x0102030405060708, 0x090a0b0c, 0x0d0e0f10}.Put, func(b []byte) any { return ParseRETH(b) }},
		{"AETH", "62010203", AETH{0x62, 0x010203}, AETH{0x62, 0x010203}.Put, func(b []byte) any { return ParseAETH(b) }},
		{"AtomicETH", "0102030405060708" + "090a0b0c" + "1112131415161718" + "2122232425262728",
			AtomicETH{0x0102030405060708, 0x090a0b0c, 0x1112131415161718, 0x2122232425262728},
			AtomicETH{0x0102030405060708, 0x090a0b0c, 0x1112131415161718, 0x2122232425262728}.Put,
			func(b []byte) any { return ParseAtomicETH(b) }},
		{"AtomicAckETH", "f1f2f3f4f5f6f7f8", AtomicAckETH{0xf1f2f3f4f5f6f7f8}, AtomicAckETH{0xf1f2f3f4f5f6f7f8}.Put,
			func(b []byte) any { return ParseAtomicAckETH(b) }},
		{"ImmDt", "01020304", ImmDt(0x01020304), ImmDt(0x01020304).Put, func(b []byte) any { return ParseImmDt(b) }},
		{"IETH", "05060708", IETH(0x05060708), IETH(0x05060708).Put, func(b []byte) any { return ParseIETH(b) }},
		{"DETH", "80010000" + "7f" + "000001", DETH{0x80010000, 1, 0x7f}, DETH{0x80010000, 1, 0x7f}.Put,
			func(b []byte) any { return ParseDETH(b) }},
		{"XRCETH", "7f" + "abcdef", XRCETH{0xabcdef, 0x7f}, XRCETH{0xabcdef, 0x7f}.Put,
			func(b []byte) any { return ParseXRCETH(b) }},
		{"FETH", "00000012", FETH{Placement: FlushPersistent, Selectivity: FlushMR},
			FETH{Placement: FlushPersistent, Selectivity: FlushMR}.Put, func(b []byte) any { return ParseFETH(b) }},
		{"FETH full", "ffffffff", FETH{15, 3, 0x3ffffff}, FETH{15, 3, 0x3ffffff}.Put,
			func(b []byte) any { return ParseFETH(b) }},
	} {
		want := unhex(t, c.bytes)
		if h, ok := c.value.(BTH); ok {
			c.put = h.Put
		}
		got := filled(len(want) + 4)
		c.put(got)
		if !bytes.Equal(got[:len(want)], want) {
			t.Errorf("%s: put %x, want %x", c.name, got[:len(want)], want)
		}
		if !bytes.Equal(got[len(want):], filled(4)) {
			t.Errorf("%s: put more than its %d bytes", c.name, len(want))
		}
		if v := c.parse(want); v != c.value {
			t.Errorf("%s: parsed %+v, want %+v", c.name, v, c.value)
		}
	}
}

// TestHeadersRoundTrip: any bytes, parsed and put, are the same bytes. No header
// loses a bit.
func TestHeadersRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	b := make([]byte, AtomicETHLen)
	for range 10_000 {
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		bth := ParseBTH(b)
		for _, h := range []struct {
			n   int
			put func([]byte)
		}{
			{BTHLen, bth.Put}, {RETHLen, ParseRETH(b).Put}, {AETHLen, ParseAETH(b).Put},
			{AtomicETHLen, ParseAtomicETH(b).Put}, {AtomicAckETHLen, ParseAtomicAckETH(b).Put},
			{ImmDtLen, ParseImmDt(b).Put}, {IETHLen, ParseIETH(b).Put}, {DETHLen, ParseDETH(b).Put},
			{XRCETHLen, ParseXRCETH(b).Put}, {FETHLen, ParseFETH(b).Put},
		} {
			got := filled(h.n)
			h.put(got)
			if !bytes.Equal(got, b[:h.n]) {
				t.Fatalf("%d bytes %x became %x", h.n, b[:h.n], got)
			}
		}
	}
}

// TestFieldsAreCut: a field too wide for its place does not spill into the next.
func TestFieldsAreCut(t *testing.T) {
	h := BTH{Pad: 0xff, TVer: 0xf0, Resv6: 0xc0, Resv7: 0x80, DestQP: 0xff000001, PSN: 0xff000002}
	b := filled(BTHLen)
	h.Put(b)
	if want := unhex(t, "003000000000000100000002"); !bytes.Equal(b, want) {
		t.Errorf("BTH %x, want %x", b, want)
	}
	b = filled(4)
	AETH{0, 0xff000001}.Put(b)
	if !bytes.Equal(b, []byte{0, 0, 0, 1}) {
		t.Errorf("AETH %x", b)
	}
	FETH{Placement: 0xf0, Selectivity: 0xfc}.Put(b)
	if !bytes.Equal(b, make([]byte, 4)) {
		t.Errorf("FETH %x", b)
	}
	XRCETH{SRQ: 0xff000001}.Put(b)
	if !bytes.Equal(b, []byte{0, 0, 0, 1}) {
		t.Errorf("XRCETH %x", b)
	}
}

func TestPSN(t *testing.T) {
	for _, c := range []struct {
		p, q PSN
		d    int32
	}{
		{0, 0, 0}, {1, 0, 1}, {0, 1, -1}, {0, 0xffffff, 1}, {0xffffff, 0, -1}, {5, 0xfffffb, 10}, {0xfffffb, 5, -10},
		{0x800000, 0, 1 << 23}, {0, 0x800000, 1 << 23}, // the far point counts as ahead from both sides
		{0x7fffff, 0, 1<<23 - 1}, {0x800001, 0, -(1<<23 - 1)}, {0, 0x800001, 1<<23 - 1},
		{0xffffff, 0x7fffff, 1 << 23}, {0xfffffe, 0x7fffff, 1<<23 - 1}, {0x7fffff, 0xfffffe, -(1<<23 - 1)},
	} {
		if got := c.p.Sub(c.q); got != c.d {
			t.Errorf("%06x - %06x = %d, want %d", c.p, c.q, got, c.d)
		}
		if got := c.p.Before(c.q); got != (c.d < 0) {
			t.Errorf("%06x before %06x is %v", c.p, c.q, got)
		}
	}
	if p := PSN(0xfffffe).Next().Next(); p != 0 {
		t.Errorf("after 0xfffffe come 0xffffff and %06x", p)
	}
	r := rand.New(rand.NewPCG(3, 4))
	for range 100_000 {
		p, n := PSN(r.Uint32N(1<<24)), r.Uint32()
		q := p.Add(n)
		if q > PSNMask {
			t.Fatalf("%06x + %d = %x", p, n, q)
		}
		if d := q.Sub(p); uint32(d)&PSNMask != n&PSNMask || d <= -(1<<23) || d > 1<<23 {
			t.Fatalf("%06x + %d is %d ahead", p, n, d)
		}
		if n&PSNMask != 1<<23 && q.Sub(p) != -p.Sub(q) {
			t.Fatalf("%06x and %06x disagree about their distance", p, q)
		}
	}
}
