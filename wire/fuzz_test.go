// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"testing"
)

// normal gives a copy of a parsed frame with everything put straight that Parse
// accepts in more than one form and Encode writes in only one:
//
//   - IPv4 flags: DF set, the reserved flag clear; the header checksum to match;
//   - the UDP checksum, which may be there: none;
//   - pad bytes, which may be anything: zero;
//   - the ICRC, which Parse does not look at: right;
//   - bytes of a CNP's reserved part are kept.
func normal(p *Packet) []byte {
	b := bytes.Clone(p.Frame)
	if !p.V6 {
		b[20] = 0x40
		sum4(b)
	}
	b[p.L4+6], b[p.L4+7] = 0, 0
	end := len(b) - ICRCLen
	clear(b[end-int(p.BTH.Pad) : end])
	le.PutUint32(b[end:], icrcByTheBook(b))
	return b
}

// tryMAD: what is taken for a management datagram, or for a residency message, is one,
// and comes out again as it was; but for what is reserved, or not looked at.
func tryMAD(t *testing.T, b []byte) {
	h, ok := ParseMAD(b)
	if !ok {
		return
	}
	got := bytes.Clone(b)
	h.Put(got)
	got[6], got[7], got[18], got[19] = b[6], b[7], b[18], b[19] // reserved, class specific
	if !bytes.Equal(got, b) {
		t.Fatalf("MAD put again: %x, was %x", got, b)
	}
	var m, again Residency
	if !ParseResidency(b, &m) {
		return
	}
	m.Put(got)
	if !ParseResidency(got, &again) || again != m {
		t.Fatalf("%+v put and parsed: %+v", m, again)
	}
	for _, r := range m.Ranges[:m.N] {
		if r.Len == 0 || r.IOVA > r.IOVA+r.Len {
			t.Fatalf("range %+v", r)
		}
	}
}

// FuzzParse: Parse never panics nor reads what it is not given; what it accepts is
// consistent, encodes to the same bytes (see normal), and has an ICRC that any
// change of a covered bit makes wrong. Management datagrams in it: see tryMAD.
func FuzzParse(f *testing.F) {
	for i, frame := range goldenSample(f) {
		f.Add(frame, uint32(i*997))
	}
	for op := range 256 {
		f.Add(frame(&path4, Opcode(op), 5), uint32(op))
		f.Add(frame(&path6, Opcode(op), 6), uint32(op))
	}
	f.Add(madFrame(&path4, aMessage()), uint32(1))
	f.Add(madFrame(&path6, Residency{Kind: ResHello, Src: 2, Dst: 3, Own: 1}), uint32(2))
	f.Fuzz(func(t *testing.T, data []byte, flip uint32) {
		data = data[:len(data):len(data)]
		before := bytes.Clone(data)
		var p Packet
		err := Parse(data, &p)
		if err != nil {
			if e, ok := err.(Error); !ok || e == 0 || e >= NumErrors {
				t.Fatalf("error outside the range: %v", err)
			}
			return
		}
		_ = p.ICRCValid()
		if n := len(p.Frame); n > len(data) || &p.Frame[0] != &data[0] || p.BTHOff+p.Info.HdrLen+len(p.Payload)+int(p.BTH.Pad)+ICRCLen != n {
			t.Fatalf("inconsistent view: %+v", p)
		}
		if p.BTH.Op.Info() != p.Info || !p.Info.Has(Valid) || p.BTH.TVer != 0 {
			t.Fatalf("inconsistent BTH: %+v", p.BTH)
		}
		if !bytes.Equal(reencodeExt(&p), p.Ext()) {
			t.Fatalf("extended headers re-encoded to %x, were %x", reencodeExt(&p), p.Ext())
		}
		want := normal(&p)
		if got := reencode(&p); !bytes.Equal(got, want) {
			t.Fatalf("re-encoded to\n%x, want\n%x", got, want)
		}
		p.GRH(make([]byte, GRHLen))
		tryMAD(t, p.Payload)
		if !bytes.Equal(data, before) {
			t.Fatal("Parse or an accessor wrote to the frame")
		}

		var q Packet
		if err := Parse(want, &q); err != nil || !q.ICRCValid() {
			t.Fatalf("%v, ICRC right %v, for what Encode made: %x", err, err == nil, want)
		}
		n := uint32(len(want)-EthLen) * 8
		i, bit := EthLen+int(flip%n/8), uint(flip%8)
		want[i] ^= 1 << bit
		if i == EthLen && bit >= 4 { // the IP version, by which the masks go
			if Parse(want, &p) == nil {
				t.Fatalf("parses with another IP version: %x", want)
			}
		} else if got := q.ICRCValid(); got != masked(&q, i, bit) {
			t.Fatalf("byte %d bit %d flipped: ICRC right is %v: %x", i, bit, got, want)
		}
	})
}
