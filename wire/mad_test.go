// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// aMessage is a residency message with every field set.
func aMessage() Residency {
	m := Residency{Kind: ResPrefetch, Src: 0x123456, Dst: 0xabcdef, Cookie: 0x0102030405060708, Own: 0x1112131415161718,
		Seq: 0x21222324, RKey: 0x31323334, Arg: 0x41424344, N: 2}
	m.Ranges[0] = ResidencyRange{0x5152535455565758, 0x6162636465666768}
	m.Ranges[1] = ResidencyRange{0x7172737475767778, 0x1000}
	return m
}

// TestMADHeader: the header of IBA 13.4.3, byte by byte, and of what the kernel's
// connection manager sent.
func TestMADHeader(t *testing.T) {
	h := MADHeader{Class: 7, ClassVersion: 2, Method: 0x83, Status: 0x0405, TID: 0x0607080910111213, Attr: 0x1415, AttrMod: 0x16171819}
	b := filled(MADLen)
	h.Put(b)
	want := "01070283" + "04050000" + "0607080910111213" + "14150000" + "16171819"
	if got := hex.EncodeToString(b[:MADHeaderLen]); got != want {
		t.Errorf("header %s, want %s", got, want)
	}
	if !bytes.Equal(b[MADHeaderLen:], filled(MADLen-MADHeaderLen)) {
		t.Error("wrote behind the header")
	}
	if got, ok := ParseMAD(b); !ok || got != h {
		t.Errorf("parsed %+v, %v; want %+v", got, ok, h)
	}
	for n := range MADLen {
		if _, ok := ParseMAD(b[:n:n]); ok {
			t.Errorf("%d bytes were taken for a MAD", n)
		}
	}
	if _, ok := ParseMAD(append(b, 0)); ok {
		t.Error("257 bytes were taken for a MAD")
	}
	b[0] = 2
	if _, ok := ParseMAD(b); ok {
		t.Error("base version 2 was taken for a MAD")
	}

	cm := 0
	for _, f := range goldenSample(t) {
		var p Packet
		if Parse(f, &p) != nil || p.BTH.DestQP != GSIQPN {
			continue
		}
		h, ok := ParseMAD(p.Payload)
		if !ok || h.Class != 7 || h.Attr < 0x10 || h.Attr > 0x1a || h.Status != 0 {
			t.Errorf("the kernel's MAD is %+v, %v", h, ok)
		}
		var m Residency
		if ParseResidency(p.Payload, &m) {
			t.Error("a MAD of the connection manager was taken for a residency message")
		}
		cm++
	}
	if cm == 0 {
		t.Error("no MADs in the captures")
	}
}

// TestResidencyGolden: each field has its place, and all else is zero.
func TestResidencyGolden(t *testing.T) {
	m := aMessage()
	b := filled(MADLen)
	m.Put(b)
	want := "014e0103" + "00000000" + "0012345621222324" + "00060000" + "00000000" + // MAD header
		strings.Repeat("00", 12) + "00" + "025456" + // RMPP header, reserved, OUI (IBA 16.5.1)
		"00123456" + "00abcdef" + "0102030405060708" + "1112131415161718" +
		"21222324" + "31323334" + "41424344" + "00000002" +
		"5152535455565758" + "6162636465666768" + "7172737475767778" + "0000000000001000"
	want += strings.Repeat("00", MADLen-len(want)/2)
	if got := hex.EncodeToString(b); got != want {
		t.Errorf("message\n%s, want\n%s", got, want)
	}
	var got Residency
	if !ParseResidency(b, &got) || got != m {
		t.Errorf("parsed %+v, want %+v", got, m)
	}
	full := aMessage()
	for full.N = 0; full.N < MaxResidencyRanges; full.N++ {
		full.Ranges[full.N] = ResidencyRange{uint64(full.N) << 40, ^uint64(0) - uint64(full.N)<<40}
	}
	full.Put(b)
	if !ParseResidency(b, &got) || got != full {
		t.Errorf("parsed %+v, want %+v", got, full)
	}
	if n := testing.AllocsPerRun(100, func() {
		full.Put(b)
		if !ParseResidency(b, &got) {
			t.Error("not parsed")
		}
	}); n != 0 {
		t.Errorf("%v allocations for a message", n)
	}
}

// TestResidencyBad: what is wrong in one place is no message, and leaves nothing behind.
func TestResidencyBad(t *testing.T) {
	const data = MADLen - VendorDataLen
	for _, c := range []struct {
		what string
		at   int
		to   string
	}{
		{"base version", 0, "02"}, {"class", 1, "4f"}, {"class version", 2, "02"}, {"method Get", 3, "01"},
		{"method SendResp", 3, "83"}, {"attribute 0", 16, "0000"}, {"attribute 10", 16, "000a"}, {"attribute 0x100", 16, "0101"},
		{"OUI", data - 3, "02"}, {"OUI's end", data - 1, "57"}, {"QPN of 25 bits", data, "01000000"},
		{"peer's QPN of 32 bits", data + 4, "ffffffff"}, {"ranges", data + 36, "0000000a"}, {"very many ranges", data + 36, "80000000"},
		{"empty range", data + resFixed + 8, "0000000000000000"}, {"range that wraps", data + resFixed + 8, "ffffffffffffffff"},
		{"second range that wraps", data + resFixed + 16, "fffffffffffff001"},
	} {
		m := aMessage()
		b := make([]byte, MADLen)
		m.Put(b)
		to, err := hex.DecodeString(c.to)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Equal(b[c.at:c.at+len(to)], to) && c.what != "OUI" {
			t.Fatalf("%s: the case changes nothing", c.what)
		}
		if c.what == "OUI" {
			to[0] = 0
		}
		copy(b[c.at:], to)
		if ParseResidency(b, &m) {
			t.Errorf("wrong %s: taken as %+v", c.what, m)
		}
	}
	m := aMessage()
	b := make([]byte, MADLen+1)
	m.Put(b)
	for n := range len(b) + 1 {
		if got := ParseResidency(b[:n:n], &m); got != (n == MADLen) {
			t.Errorf("%d bytes: message %v", n, got)
		}
	}
}

// TestResidencyDissected: another program than ours finds a vendor's MAD in it.
func TestResidencyDissected(t *testing.T) {
	tshark, err := exec.LookPath("tshark")
	if err != nil {
		t.Skip("tshark is not installed")
	}
	name := filepath.Join(t.TempDir(), "mad.pcap")
	f := madFrame(&path4, aMessage())
	pcap := []byte{0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 15: 0, 16: 0, 17: 0, 18: 1, 20: 1, 23: 0}
	rec := make([]byte, 16)
	le.PutUint32(rec[8:], uint32(len(f)))
	le.PutUint32(rec[12:], uint32(len(f)))
	if err := os.WriteFile(name, append(append(pcap, rec...), f...), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(tshark, "-r", name, "-T", "fields", "-e", "infiniband.bth.destqp", "-e", "infiniband.mad.baseversion",
		"-e", "infiniband.mad.mgmtclass", "-e", "infiniband.mad.attributeid").Output() // on stderr it warns of being root
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Fields(string(out)); len(got) < 4 || !strings.HasSuffix(got[0], "01") || !strings.HasSuffix(got[2], "4e") || !strings.HasSuffix(got[3], "6") {
		t.Errorf("tshark finds %q", out)
	}
}

// madFrame is a whole frame with a residency message.
func madFrame(p *Path, m Residency) []byte {
	bth := BTH{Op: UDSendOnly, PKey: DefaultPKey, DestQP: GSIQPN, PSN: 1}
	var ext [DETHLen]byte
	DETH{QKey: GSIQKey, SrcQP: GSIQPN}.Put(ext[:])
	payload := make([]byte, MADLen)
	m.Put(payload)
	b := make([]byte, p.FrameLen(UDSendOnly, MADLen))
	Encode(b, p, 0x4321, &bth, ext[:], payload)
	return b
}
