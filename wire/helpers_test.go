// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"testing"
)

// readPcap gives the frames of a classic, little-endian Ethernet pcap file.
func readPcap(path string) ([][]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	const hdr, rec = 24, 16
	l := binary.LittleEndian
	if len(b) < hdr || l.Uint32(b) != 0xa1b2c3d4 || l.Uint32(b[20:]) != 1 {
		return nil, fmt.Errorf("%s: not a little-endian Ethernet pcap", path)
	}
	var frames [][]byte
	for b = b[hdr:]; len(b) > 0; {
		if len(b) < rec {
			return nil, fmt.Errorf("%s: record header cut short", path)
		}
		n, orig := int(l.Uint32(b[8:])), int(l.Uint32(b[12:]))
		if n != orig || len(b) < rec+n {
			return nil, fmt.Errorf("%s: frame cut short", path)
		}
		frames = append(frames, b[rec:rec+n:rec+n])
		b = b[rec+n:]
	}
	return frames, nil
}

// goldenFiles gives the names of all captures.
func goldenFiles(t testing.TB) []string {
	t.Helper()
	names, err := filepath.Glob("testdata/*.pcap")
	if err != nil || len(names) == 0 {
		t.Fatalf("no captures in testdata: %v", err)
	}
	return names
}

// goldenFrames gives the frames of one capture.
func goldenFrames(t testing.TB, name string) [][]byte {
	t.Helper()
	frames, err := readPcap(name)
	if err != nil {
		t.Fatal(err)
	}
	return frames
}

// goldenSample gives the RoCE frames of all captures, one for each combination of
// opcode, IP version, pad and coarse length.
func goldenSample(t testing.TB) [][]byte {
	t.Helper()
	type key struct {
		op  Opcode
		v6  bool
		pad uint8
		len int
	}
	seen := map[key]bool{}
	var out [][]byte
	for _, name := range goldenFiles(t) {
		for _, f := range goldenFrames(t, name) {
			var p Packet
			if Parse(f, &p) != nil {
				continue
			}
			k := key{p.BTH.Op, p.V6, p.BTH.Pad, len(f) / 512}
			if !seen[k] {
				seen[k] = true
				out = append(out, f)
			}
		}
	}
	return out
}

// filled gives n bytes of 0xa5, so that a field an encoder forgets shows.
func filled(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = 0xa5
	}
	return b
}

// icrcByTheBook computes the ICRC in the plainest way: a masked copy, behind eight
// bytes of ones, through hash/crc32.
func icrcByTheBook(frame []byte) uint32 {
	b := append([]byte{255, 255, 255, 255, 255, 255, 255, 255}, frame[14:len(frame)-4]...)
	ip := b[8:]
	var udp []byte
	if ip[0]>>4 == 4 {
		for _, i := range []int{1, 8, 10, 11} {
			ip[i] = 0xff
		}
		udp = ip[20:]
	} else {
		ip[0] |= 0x0f
		for _, i := range []int{1, 2, 3, 7} {
			ip[i] = 0xff
		}
		udp = ip[40:]
	}
	udp[6], udp[7], udp[8+4] = 0xff, 0xff, 0xff
	return crc32.ChecksumIEEE(b)
}

// masked says whether the ICRC of a packet does not cover bit of byte i of its
// frame (bit 7 is the first on the wire).
func masked(p *Packet, i int, bit uint) bool {
	switch i - p.L4 {
	case 6, 7, 8 + 4: // UDP checksum; FECN, BECN and the reserved bits beside them
		return true
	}
	if p.V6 {
		switch i - p.L3 {
		case 0:
			return bit < 4
		case 1, 2, 3, 7:
			return true
		}
		return false
	}
	switch i - p.L3 {
	case 1, 8, 10, 11:
		return true
	}
	return false
}
