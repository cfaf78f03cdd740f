// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"strings"
	"testing"
)

// opcodeList is written by hand from the tables of IBA 9.2.1, A14, A17.9.3 and A19,
// not derived from anything in the package: opcode, name, bytes of BTH and extended
// headers, the headers with their offsets, and what the packet is.
const opcodeList = `
00 RC_SEND_FIRST           12 -                          request send first payload recv
01 RC_SEND_MIDDLE          12 -                          request send middle payload recv
02 RC_SEND_LAST            12 -                          request send last payload recv
03 RC_SEND_LAST_IMM        16 ImmDt@12                   request send last imm payload recv
04 RC_SEND_ONLY            12 -                          request send only payload recv
05 RC_SEND_ONLY_IMM        16 ImmDt@12                   request send only imm payload recv
06 RC_WRITE_FIRST          28 RETH@12                    request write first payload
07 RC_WRITE_MIDDLE         12 -                          request write middle payload
08 RC_WRITE_LAST           12 -                          request write last payload
09 RC_WRITE_LAST_IMM       16 ImmDt@12                   request write last imm payload recv
0a RC_WRITE_ONLY           28 RETH@12                    request write only payload
0b RC_WRITE_ONLY_IMM       32 RETH@12,ImmDt@28           request write only imm payload recv
0c RC_READ_REQ             28 RETH@12                    request read only
0d RC_READ_RESP_FIRST      16 AETH@12                    response read first payload
0e RC_READ_RESP_MIDDLE     12 -                          response read middle payload
0f RC_READ_RESP_LAST       16 AETH@12                    response read last payload
10 RC_READ_RESP_ONLY       16 AETH@12                    response read only payload
11 RC_ACK                  16 AETH@12                    response ack only
12 RC_ATOMIC_ACK           24 AETH@12,AtomicAckETH@16    response ack atomic only
13 RC_CMP_SWAP             40 AtomicETH@12               request atomic only
14 RC_FETCH_ADD            40 AtomicETH@12               request atomic only
16 RC_SEND_LAST_INV        16 IETH@12                    request send last inv payload recv
17 RC_SEND_ONLY_INV        16 IETH@12                    request send only inv payload recv
1c RC_FLUSH                32 FETH@12,RETH@16            request flush only
1d RC_ATOMIC_WRITE         28 RETH@12                    request atomicwrite only payload
20 UC_SEND_FIRST           12 -                          request send first payload recv
21 UC_SEND_MIDDLE          12 -                          request send middle payload recv
22 UC_SEND_LAST            12 -                          request send last payload recv
23 UC_SEND_LAST_IMM        16 ImmDt@12                   request send last imm payload recv
24 UC_SEND_ONLY            12 -                          request send only payload recv
25 UC_SEND_ONLY_IMM        16 ImmDt@12                   request send only imm payload recv
26 UC_WRITE_FIRST          28 RETH@12                    request write first payload
27 UC_WRITE_MIDDLE         12 -                          request write middle payload
28 UC_WRITE_LAST           12 -                          request write last payload
29 UC_WRITE_LAST_IMM       16 ImmDt@12                   request write last imm payload recv
2a UC_WRITE_ONLY           28 RETH@12                    request write only payload
2b UC_WRITE_ONLY_IMM       32 RETH@12,ImmDt@28           request write only imm payload recv
64 UD_SEND_ONLY            20 DETH@12                    request send only payload recv
65 UD_SEND_ONLY_IMM        24 DETH@12,ImmDt@20           request send only imm payload recv
81 CNP                     28 -                          only
a0 XRC_SEND_FIRST          16 XRCETH@12                  request send first payload recv
a1 XRC_SEND_MIDDLE         16 XRCETH@12                  request send middle payload recv
a2 XRC_SEND_LAST           16 XRCETH@12                  request send last payload recv
a3 XRC_SEND_LAST_IMM       20 XRCETH@12,ImmDt@16         request send last imm payload recv
a4 XRC_SEND_ONLY           16 XRCETH@12                  request send only payload recv
a5 XRC_SEND_ONLY_IMM       20 XRCETH@12,ImmDt@16         request send only imm payload recv
a6 XRC_WRITE_FIRST         32 XRCETH@12,RETH@16          request write first payload
a7 XRC_WRITE_MIDDLE        16 XRCETH@12                  request write middle payload
a8 XRC_WRITE_LAST          16 XRCETH@12                  request write last payload
a9 XRC_WRITE_LAST_IMM      20 XRCETH@12,ImmDt@16         request write last imm payload recv
aa XRC_WRITE_ONLY          32 XRCETH@12,RETH@16          request write only payload
ab XRC_WRITE_ONLY_IMM      36 XRCETH@12,RETH@16,ImmDt@32 request write only imm payload recv
ac XRC_READ_REQ            32 XRCETH@12,RETH@16          request read only
ad XRC_READ_RESP_FIRST     16 AETH@12                    response read first payload
ae XRC_READ_RESP_MIDDLE    12 -                          response read middle payload
af XRC_READ_RESP_LAST      16 AETH@12                    response read last payload
b0 XRC_READ_RESP_ONLY      16 AETH@12                    response read only payload
b1 XRC_ACK                 16 AETH@12                    response ack only
b2 XRC_ATOMIC_ACK          24 AETH@12,AtomicAckETH@16    response ack atomic only
b3 XRC_CMP_SWAP            44 XRCETH@12,AtomicETH@16     request atomic only
b4 XRC_FETCH_ADD           44 XRCETH@12,AtomicETH@16     request atomic only
b6 XRC_SEND_LAST_INV       20 XRCETH@12,IETH@16          request send last inv payload recv
b7 XRC_SEND_ONLY_INV       20 XRCETH@12,IETH@16          request send only inv payload recv
bc XRC_FLUSH               36 XRCETH@12,FETH@16,RETH@20  request flush only
bd XRC_ATOMIC_WRITE        32 XRCETH@12,RETH@16          request atomicwrite only payload
`

// describe gives an opcode's row as a line of opcodeList, words in its order.
func describe(o Opcode) string {
	i := o.Info()
	type header struct {
		name string
		off  int8
		bit  Mask
	}
	var hs []string
	for _, h := range []header{
		{"XRCETH", i.XRCETH, HasXRCETH}, {"DETH", i.DETH, HasDETH}, {"FETH", i.FETH, HasFETH},
		{"RETH", i.RETH, HasRETH}, {"AtomicETH", i.AtomicETH, HasAtomicETH}, {"AETH", i.AETH, HasAETH},
		{"AtomicAckETH", i.AtomicAckETH, HasAtomicAckETH}, {"ImmDt", i.ImmDt, HasImm}, {"IETH", i.IETH, HasIETH},
	} {
		switch {
		case i.Has(h.bit):
			hs = append(hs, fmt.Sprintf("%s@%d", h.name, h.off))
		case h.off != -1:
			hs = append(hs, h.name+" has an offset and no bit")
		}
	}
	if hs == nil {
		hs = []string{"-"}
	}
	words := []string{fmt.Sprintf("%02x", uint8(o)), o.String(), fmt.Sprint(i.HdrLen), strings.Join(hs, ",")}
	for _, w := range []struct {
		name string
		bit  Mask
	}{
		{"request", Request}, {"response", Response}, {"send", Send}, {"write", Write}, {"read", Read},
		{"ack", Ack}, {"atomic", Atomic}, {"flush", Flush}, {"atomicwrite", AtomicWrite},
		{"first", First}, {"middle", Middle}, {"last", Last}, {"only", Only}, {"imm", Imm}, {"inv", Inv},
		{"payload", Payload}, {"recv", NeedsRecv},
	} {
		if i.Has(w.bit) {
			words = append(words, w.name)
		}
	}
	return strings.Join(words, " ")
}

func TestOpcodeTable(t *testing.T) {
	want := map[Opcode]string{}
	for line := range strings.Lines(strings.TrimSpace(opcodeList)) {
		var o Opcode
		if _, err := fmt.Sscanf(line, "%x", &o); err != nil {
			t.Fatal(err)
		}
		want[o] = strings.Join(strings.Fields(line), " ")
	}
	for n := range 256 {
		o := Opcode(n)
		i := o.Info()
		if i.Service != Service(n/32) || o.Service() != i.Service {
			t.Errorf("%02x: service %v", n, i.Service)
		}
		line, defined := want[o]
		if !defined {
			line = fmt.Sprintf("%02x RESERVED_0x%02x 12 -", n, n)
		}
		if got := describe(o); got != line {
			t.Errorf("opcode table has\n%s, want\n%s", got, line)
		}
		if i.Has(Valid) != defined || (i.Kind != KindNone) != defined {
			t.Errorf("%02x: valid %v, kind %v, want defined %v", n, i.Has(Valid), i.Kind, defined)
		}
		if i.HdrLen-BTHLen > MaxExtLen {
			t.Errorf("%v: headers longer than MaxExtLen", o)
		}
	}
	if len(want) != 65 {
		t.Errorf("list has %d opcodes, want 65", len(want))
	}
}

// TestOpcodeConstants checks the names in code against the names in the table.
func TestOpcodeConstants(t *testing.T) {
	for o, name := range map[Opcode]string{
		RCSendFirst: "RC_SEND_FIRST", RCSendMiddle: "RC_SEND_MIDDLE", RCSendLast: "RC_SEND_LAST",
		RCSendLastImm: "RC_SEND_LAST_IMM", RCSendOnly: "RC_SEND_ONLY", RCSendOnlyImm: "RC_SEND_ONLY_IMM",
		RCWriteFirst: "RC_WRITE_FIRST", RCWriteMiddle: "RC_WRITE_MIDDLE", RCWriteLast: "RC_WRITE_LAST",
		RCWriteLastImm: "RC_WRITE_LAST_IMM", RCWriteOnly: "RC_WRITE_ONLY", RCWriteOnlyImm: "RC_WRITE_ONLY_IMM",
		RCReadRequest: "RC_READ_REQ", RCReadRespFirst: "RC_READ_RESP_FIRST", RCReadRespMiddle: "RC_READ_RESP_MIDDLE",
		RCReadRespLast: "RC_READ_RESP_LAST", RCReadRespOnly: "RC_READ_RESP_ONLY", RCAck: "RC_ACK",
		RCAtomicAck: "RC_ATOMIC_ACK", RCCompareSwap: "RC_CMP_SWAP", RCFetchAdd: "RC_FETCH_ADD",
		RCSendLastInv: "RC_SEND_LAST_INV", RCSendOnlyInv: "RC_SEND_ONLY_INV", RCFlush: "RC_FLUSH",
		RCAtomicWrite: "RC_ATOMIC_WRITE",
		UCSendFirst:   "UC_SEND_FIRST", UCSendMiddle: "UC_SEND_MIDDLE", UCSendLast: "UC_SEND_LAST",
		UCSendLastImm: "UC_SEND_LAST_IMM", UCSendOnly: "UC_SEND_ONLY", UCSendOnlyImm: "UC_SEND_ONLY_IMM",
		UCWriteFirst: "UC_WRITE_FIRST", UCWriteMiddle: "UC_WRITE_MIDDLE", UCWriteLast: "UC_WRITE_LAST",
		UCWriteLastImm: "UC_WRITE_LAST_IMM", UCWriteOnly: "UC_WRITE_ONLY", UCWriteOnlyImm: "UC_WRITE_ONLY_IMM",
		UDSendOnly: "UD_SEND_ONLY", UDSendOnlyImm: "UD_SEND_ONLY_IMM", CNP: "CNP",
		XRCSendFirst: "XRC_SEND_FIRST", XRCSendMiddle: "XRC_SEND_MIDDLE", XRCSendLast: "XRC_SEND_LAST",
		XRCSendLastImm: "XRC_SEND_LAST_IMM", XRCSendOnly: "XRC_SEND_ONLY", XRCSendOnlyImm: "XRC_SEND_ONLY_IMM",
		XRCWriteFirst: "XRC_WRITE_FIRST", XRCWriteMiddle: "XRC_WRITE_MIDDLE", XRCWriteLast: "XRC_WRITE_LAST",
		XRCWriteLastImm: "XRC_WRITE_LAST_IMM", XRCWriteOnly: "XRC_WRITE_ONLY", XRCWriteOnlyImm: "XRC_WRITE_ONLY_IMM",
		XRCReadRequest: "XRC_READ_REQ", XRCReadRespFirst: "XRC_READ_RESP_FIRST",
		XRCReadRespMiddle: "XRC_READ_RESP_MIDDLE", XRCReadRespLast: "XRC_READ_RESP_LAST",
		XRCReadRespOnly: "XRC_READ_RESP_ONLY", XRCAck: "XRC_ACK", XRCAtomicAck: "XRC_ATOMIC_ACK",
		XRCCompareSwap: "XRC_CMP_SWAP", XRCFetchAdd: "XRC_FETCH_ADD", XRCSendLastInv: "XRC_SEND_LAST_INV",
		XRCSendOnlyInv: "XRC_SEND_ONLY_INV", XRCFlush: "XRC_FLUSH", XRCAtomicWrite: "XRC_ATOMIC_WRITE",
	} {
		if o.String() != name {
			t.Errorf("opcode %02x is %v, want %s", uint8(o), o, name)
		}
	}
}

// TestMayFollow goes through all pairs of opcodes of RC with a rule written the
// other way round: which predecessors are inside a message, and which packets
// each of them admits (IBA 9.7.4.1.2).
func TestMayFollow(t *testing.T) {
	sendRest := []Opcode{RCSendMiddle, RCSendLast, RCSendLastImm, RCSendLastInv}
	writeRest := []Opcode{RCWriteMiddle, RCWriteLast, RCWriteLastImm}
	readRest := []Opcode{RCReadRespMiddle, RCReadRespLast}
	inside := map[Opcode][]Opcode{
		RCSendFirst: sendRest, RCSendMiddle: sendRest,
		RCWriteFirst: writeRest, RCWriteMiddle: writeRest,
		RCReadRespFirst: readRest, RCReadRespMiddle: readRest,
	}
	starts := []Opcode{RCSendFirst, RCSendOnly, RCSendOnlyImm, RCSendOnlyInv, RCWriteFirst, RCWriteOnly,
		RCWriteOnlyImm, RCReadRequest, RCReadRespFirst, RCReadRespOnly, RCAck, RCAtomicAck, RCCompareSwap,
		RCFetchAdd, RCFlush, RCAtomicWrite}
	has := func(l []Opcode, o Opcode) bool {
		for _, x := range l {
			if x == o {
				return true
			}
		}
		return false
	}
	for next := range Opcode(0x20) {
		if got, want := next.Info().MayFollow(nil), has(starts, next); got != want {
			t.Errorf("%v at the start: %v", next, got)
		}
		for prev := range Opcode(0x20) {
			admitted, ok := inside[prev]
			if !ok {
				admitted = starts
			}
			if got, want := next.Info().MayFollow(prev.Info()), has(admitted, next); got != want {
				t.Errorf("%v after %v: %v", next, prev, got)
			}
		}
	}
	if UCSendLast.Info().MayFollow(RCSendFirst.Info()) {
		t.Error("UC goes on with a message of RC")
	}
}

func TestNames(t *testing.T) {
	for s, want := range map[fmt.Stringer]string{
		ServiceRC: "RC", ServiceUC: "UC", ServiceRD: "RD", ServiceUD: "UD", ServiceCNP: "CNP", ServiceXRC: "XRC",
		Service(6): "RESERVED", AckOK: "ACK", AckRNR: "RNR_NAK", AckNak: "NAK", AckReserved: "RESERVED",
	} {
		if s.String() != want {
			t.Errorf("%T %d is named %v, want %s", s, s, s, want)
		}
	}
	seen := map[string]bool{}
	for e := Error(1); e < NumErrors; e++ {
		if s := e.Error(); seen[s] || s == Error(NumErrors).Error() {
			t.Errorf("error %d has no words of its own: %s", e, s)
		} else {
			seen[s] = true
		}
	}
	if NumErrors != ErrOpcode+1 {
		t.Errorf("NumErrors is %d", NumErrors)
	}
}
