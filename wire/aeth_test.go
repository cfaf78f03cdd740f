// SPDX-License-Identifier: Apache-2.0

package wire

import "testing"

// rnrTable is IBA table 45 as printed, in hundredths of a millisecond.
var rnrTable = [32]int64{
	65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
	256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
}

func TestRNRDelay(t *testing.T) {
	for code, want := range rnrTable {
		if got := RNRDelay(uint8(code)); got != want*10_000 {
			t.Errorf("timer code %d is %d ns, want %d", code, got, want*10_000)
		}
		if got := RNRDelay(uint8(code) | 0xe0); got != want*10_000 {
			t.Errorf("bits above the code count: %d", got)
		}
		if got := RNRCode(want * 10_000); int(got) != code {
			t.Errorf("code for %d ns is %d, want %d", want*10_000, got, code)
		}
	}
	for ns, want := range map[int64]uint8{-1: 1, 0: 1, 1: 1, 10_001: 2, 60_001: 6, 491_520_001: 0, 1 << 62: 0} {
		if got := RNRCode(ns); got != want {
			t.Errorf("code for %d ns is %d, want %d", ns, got, want)
		}
	}
}

func TestAckTimeout(t *testing.T) {
	for code, want := range map[uint8]int64{0: 0, 1: 8192, 12: 16_777_216, 14: 67_108_864, 31: 4096 << 31, 32: 0} {
		if got := AckTimeout(code); got != want {
			t.Errorf("timeout code %d is %d ns, want %d", code, got, want)
		}
	}
}

func TestCredits(t *testing.T) {
	table := [31]int{0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
		2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768}
	for code, want := range table {
		if got := CreditCount(uint8(code)); got != want {
			t.Errorf("credit code %d is %d, want %d", code, got, want)
		}
		if got := CreditCode(want); int(got) != code {
			t.Errorf("code for %d credits is %d, want %d", want, got, code)
		}
		if want > 0 {
			if got := CreditCode(want - 1); int(got) != code-1 {
				t.Errorf("code for %d credits is %d, want %d", want-1, got, code-1)
			}
		}
	}
	if CreditCount(NoCredits) != -1 || CreditCode(1<<30) != 30 || CreditCode(-1) != 0 {
		t.Error("the ends of the credit table are wrong")
	}
}

// TestSyndrome takes all 256 syndromes apart.
func TestSyndrome(t *testing.T) {
	for n := range 256 {
		s := uint8(n)
		want := AckReserved
		switch {
		case n < 0x20:
			want = AckOK
		case n < 0x40:
			want = AckRNR
		case n >= 0x60 && n < 0x80:
			want = AckNak
		}
		a := AETH{Syndrome: s}
		if a.Kind() != want || a.Value() != s%32 {
			t.Errorf("syndrome %02x: %v %d, want %v %d", s, a.Kind(), a.Value(), want, s%32)
		}
	}
	for code := range uint8(32) {
		if AckSyndrome(code) != code || RNRSyndrome(code) != 0x20+code || NakSyndrome(code) != 0x60+code {
			t.Errorf("code %d: %02x %02x %02x", code, AckSyndrome(code), RNRSyndrome(code), NakSyndrome(code))
		}
	}
	// What the kernel's soft-RoCE sends for each NAK stands in TestGolden.
	for code, want := range map[uint8]uint8{NakPSNSeq: 0x60, NakInvalidRequest: 0x61, NakRemoteAccess: 0x62,
		NakRemoteOperational: 0x63, NakInvalidRD: 0x64} {
		if NakSyndrome(code) != want {
			t.Errorf("NAK code %d has syndrome %02x, want %02x", code, NakSyndrome(code), want)
		}
	}
}
