// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// goldenRow is a line of the table in testdata/README.md.
type goldenRow struct {
	roce, wrong, others int
	ops, said           map[string]int // packets by opcode; NAKs and MADs by name
}

func goldenTable(t *testing.T) map[string]goldenRow {
	t.Helper()
	text, err := os.ReadFile("testdata/README.md")
	if err != nil {
		t.Fatal(err)
	}
	number := func(s string) int {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatalf("testdata/README.md: %v", err)
		}
		return n
	}
	counts := func(s string) map[string]int {
		m := map[string]int{}
		for item := range strings.SplitSeq(s, ",") {
			if item = strings.TrimSpace(item); item != "" {
				i := strings.LastIndexByte(item, ' ')
				m[item[:i]] = number(item[i+1:])
			}
		}
		return m
	}
	table := map[string]goldenRow{}
	for line := range strings.Lines(string(text)) {
		c := strings.Split(line, "|")
		if len(c) != 9 || !strings.Contains(c[1], ".pcap") {
			continue
		}
		for i := range c {
			c[i] = strings.TrimSpace(c[i])
		}
		table[c[1]] = goldenRow{number(c[3]), number(c[4]), number(c[5]), counts(c[6]), counts(c[7])}
	}
	return table
}

// said names what a NAK or a communication management MAD says, "" for all else.
func said(p *Packet) string {
	if p.Info.Has(HasAETH) {
		a := p.AETH()
		switch a.Kind() {
		case AckRNR:
			return fmt.Sprintf("RNR %d", a.Value())
		case AckNak:
			return "NAK " + map[uint8]string{NakPSNSeq: "PSN_SEQ", NakInvalidRequest: "INVALID_REQ",
				NakRemoteAccess: "REM_ACCESS", NakRemoteOperational: "REM_OP"}[a.Value()]
		}
		return ""
	}
	if p.Info.Has(HasDETH) && p.BTH.DestQP == GSIQPN && p.DETH().QKey == GSIQKey && p.Payload[1] == 7 {
		return "CM " + map[uint16]string{0x10: "REQ", 0x12: "REJ", 0x13: "REP", 0x14: "RTU", 0x15: "DREQ",
			0x16: "DREP", 0x17: "SIDR_REQ", 0x18: "SIDR_REP"}[be.Uint16(p.Payload[16:])]
	}
	return ""
}

// reencode builds p's frame anew from what was parsed, in a buffer full of garbage.
func reencode(p *Packet) []byte {
	path := p.Path()
	n := path.FrameLen(p.BTH.Op, len(p.Payload))
	buf := filled(n + 8)
	m := Encode(buf, &path, p.IPID(), &p.BTH, p.Ext(), p.Payload)
	if m != n || !bytes.Equal(buf[n:], filled(8)) {
		return nil
	}
	return buf[:m]
}

// reencodeExt builds the extended headers anew from their decoded values.
func reencodeExt(p *Packet) []byte {
	i := p.Info
	b := filled(i.HdrLen)
	if i.Has(HasRETH) {
		p.RETH().Put(b[i.RETH:])
	}
	if i.Has(HasAETH) {
		p.AETH().Put(b[i.AETH:])
	}
	if i.Has(HasAtomicETH) {
		p.AtomicETH().Put(b[i.AtomicETH:])
	}
	if i.Has(HasAtomicAckETH) {
		p.AtomicAckETH().Put(b[i.AtomicAckETH:])
	}
	if i.Has(HasImm) {
		ImmDt(p.Imm()).Put(b[i.ImmDt:])
	}
	if i.Has(HasIETH) {
		IETH(p.InvKey()).Put(b[i.IETH:])
	}
	if i.Has(HasDETH) {
		p.DETH().Put(b[i.DETH:])
	}
	if i.Has(HasXRCETH) {
		p.XRCETH().Put(b[i.XRCETH:])
	}
	if i.Has(HasFETH) {
		p.FETH().Put(b[i.FETH:])
	}
	if p.BTH.Op == CNP {
		copy(b[BTHLen:], p.Ext()) // reserved bytes, kept as they are
	}
	return b[BTHLen:]
}

// TestGolden holds every packet that the kernel's soft-RoCE sent to: it parses, its
// ICRC is right, and what was parsed gives the same bytes again.
func TestGolden(t *testing.T) {
	table := goldenTable(t)
	files := goldenFiles(t)
	if len(files) != len(table) || len(files) != 61 {
		t.Errorf("%d captures, %d in the table, want 61", len(files), len(table))
	}
	total := 0
	for _, name := range files {
		base := filepath.Base(name)
		want, ok := table[base]
		if !ok {
			t.Errorf("%s is not in testdata/README.md", base)
			continue
		}
		t.Run(strings.TrimSuffix(base, ".pcap"), func(t *testing.T) {
			got := goldenRow{ops: map[string]int{}, said: map[string]int{}}
			for i, f := range goldenFrames(t, name) {
				var p Packet
				if err := Parse(f, &p); errors.Is(err, ErrNotRoCE) {
					got.others++
					continue
				} else if err != nil {
					t.Errorf("frame %d: %v", i, err)
					continue
				}
				got.roce++
				got.ops[p.Info.Name]++
				if s := said(&p); s != "" {
					got.said[s]++
				}
				same := len(f)
				if !p.ICRCValid() {
					got.wrong++
					if base != "host-requester-flush-awrite-v4.pcap" || p.BTH.Op != RCFlush {
						t.Errorf("frame %d: %v: wrong ICRC", i, p.BTH.Op)
					}
					same -= ICRCLen
				}
				if icrcByTheBook(f) != ICRC(f, EthLen) {
					t.Errorf("frame %d: ICRC differs from the plain computation", i)
				}
				again := reencode(&p)
				if len(again) != len(f) || !bytes.Equal(again[:same], f[:same]) {
					t.Errorf("frame %d: %v: re-encoded to\n%x, was\n%x", i, p.BTH.Op, again, f)
				}
				if ext := reencodeExt(&p); !bytes.Equal(ext, p.Ext()) {
					t.Errorf("frame %d: %v: extended headers re-encoded to\n%x, were\n%x", i, p.BTH.Op, ext, p.Ext())
				}
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("counted\n%+v, want\n%+v", got, want)
			}
			total += got.roce
		})
	}
	t.Logf("%d RoCEv2 packets in %d captures", total, len(files))
}

// TestGoldenTruncated cuts every golden packet at every length.
func TestGoldenTruncated(t *testing.T) {
	for _, name := range goldenFiles(t) {
		for i, f := range goldenFrames(t, name) {
			var p Packet
			whole := Parse(f, &p)
			for n := range f {
				// Capacity cut too: reading behind the end would panic.
				err := Parse(f[:n:n], &p)
				if whole == nil && err != ErrTruncated {
					t.Fatalf("%s frame %d cut to %d of %d bytes: %v", name, i, n, len(f), err)
				}
				if err == nil {
					t.Fatalf("%s frame %d cut to %d of %d bytes parses", name, i, n, len(f))
				}
			}
		}
	}
}

// TestGoldenShortened cuts golden packets and makes the lengths in IP and UDP agree
// with the cut, so that only the opcode's own lengths can tell.
func TestGoldenShortened(t *testing.T) {
	for _, f := range goldenSample(t) {
		var p Packet
		if err := Parse(f, &p); err != nil {
			t.Fatal(err)
		}
		path, ipid, bthOff := p.Path(), p.IPID(), p.BTHOff
		need := p.Info.HdrLen + int(p.BTH.Pad) + ICRCLen
		for n := range len(f) - bthOff {
			b := bytes.Clone(f[:bthOff+n])
			path.Put(b, n, ipid)
			err := Parse(b, &p)
			switch {
			case n < need && err != ErrTruncated:
				t.Fatalf("%v with %d bytes behind UDP: %v, want truncated", p.BTH.Op, n, err)
			case n >= need && n%4 != 0 && err != ErrMalformed:
				t.Fatalf("%v with %d bytes behind UDP: %v, want malformed", p.BTH.Op, n, err)
			case n >= need && n%4 == 0 && (err != nil || p.ICRCValid()):
				t.Fatalf("%v with %d bytes behind UDP: %v, ICRC right %v", p.BTH.Op, n, err, err == nil)
			}
		}
	}
}

// TestGoldenBitFlips flips every bit of a sample of golden packets: one that the
// ICRC covers makes it wrong, one that it does not cover leaves it right.
func TestGoldenBitFlips(t *testing.T) {
	for _, f := range goldenSample(t) {
		b := bytes.Clone(f)
		Seal(b, EthLen) // the FLUSH packets that rxe sealed wrongly
		var orig, p Packet
		if err := Parse(b, &orig); err != nil || !orig.ICRCValid() {
			t.Fatalf("%v: %v", orig.BTH.Op, err)
		}
		for i := EthLen; i < len(b); i++ {
			for bit := range uint(8) {
				b[i] ^= 1 << bit
				// The CRC itself, whatever Parse thinks of the packet; a changed IP
				// version changes what is masked and is for Parse alone.
				if i != EthLen || bit < 4 {
					if got, want := orig.ICRCValid(), masked(&orig, i, bit); got != want {
						t.Fatalf("%v: byte %d bit %d flipped: ICRC right is %v", orig.BTH.Op, i, bit, got)
					}
				} else if Parse(b, &p) == nil {
					t.Fatalf("%v: IP version bit %d flipped: parses", orig.BTH.Op, bit)
				}
				b[i] ^= 1 << bit
			}
		}
	}
}
