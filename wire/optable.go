// SPDX-License-Identifier: Apache-2.0

package wire

import "fmt"

// opTable is written once, here, and never again.
var opTable = buildOpTable()

// opRow is one operation as RC, UC and XRC share it (IBA 9.2.1).
type opRow struct {
	op   Opcode // lower five bits
	name string
	kind Kind
	mask Mask
}

// connectedOps lists the operations of connected services. Rows up to 0x0b are
// those that UC has too.
var connectedOps = [...]opRow{
	{0x00, "SEND_FIRST", KindSend, Request | Send | First | Payload | NeedsRecv},
	{0x01, "SEND_MIDDLE", KindSend, Request | Send | Middle | Payload | NeedsRecv},
	{0x02, "SEND_LAST", KindSend, Request | Send | Last | Payload | NeedsRecv},
	{0x03, "SEND_LAST_IMM", KindSend, Request | Send | Last | Payload | NeedsRecv | Imm | HasImm},
	{0x04, "SEND_ONLY", KindSend, Request | Send | Only | Payload | NeedsRecv},
	{0x05, "SEND_ONLY_IMM", KindSend, Request | Send | Only | Payload | NeedsRecv | Imm | HasImm},
	{0x06, "WRITE_FIRST", KindWrite, Request | Write | First | Payload | HasRETH},
	{0x07, "WRITE_MIDDLE", KindWrite, Request | Write | Middle | Payload},
	{0x08, "WRITE_LAST", KindWrite, Request | Write | Last | Payload},
	{0x09, "WRITE_LAST_IMM", KindWrite, Request | Write | Last | Payload | NeedsRecv | Imm | HasImm},
	{0x0a, "WRITE_ONLY", KindWrite, Request | Write | Only | Payload | HasRETH},
	{0x0b, "WRITE_ONLY_IMM", KindWrite, Request | Write | Only | Payload | NeedsRecv | Imm | HasRETH | HasImm},
	{0x0c, "READ_REQ", KindRead, Request | Read | Only | HasRETH},
	{0x0d, "READ_RESP_FIRST", KindReadResp, Response | Read | First | Payload | HasAETH},
	{0x0e, "READ_RESP_MIDDLE", KindReadResp, Response | Read | Middle | Payload},
	{0x0f, "READ_RESP_LAST", KindReadResp, Response | Read | Last | Payload | HasAETH},
	{0x10, "READ_RESP_ONLY", KindReadResp, Response | Read | Only | Payload | HasAETH},
	{0x11, "ACK", KindAck, Response | Ack | Only | HasAETH},
	{0x12, "ATOMIC_ACK", KindAtomicAck, Response | Ack | Atomic | Only | HasAETH | HasAtomicAckETH},
	{0x13, "CMP_SWAP", KindAtomic, Request | Atomic | Only | HasAtomicETH},
	{0x14, "FETCH_ADD", KindAtomic, Request | Atomic | Only | HasAtomicETH},
	{0x16, "SEND_LAST_INV", KindSend, Request | Send | Last | Payload | NeedsRecv | Inv | HasIETH},
	{0x17, "SEND_ONLY_INV", KindSend, Request | Send | Only | Payload | NeedsRecv | Inv | HasIETH},
	{0x1c, "FLUSH", KindFlush, Request | Flush | Only | HasFETH | HasRETH},
	{0x1d, "ATOMIC_WRITE", KindAtomicWrite, Request | AtomicWrite | Only | Payload | HasRETH},
}

// lastUCOp is the last operation that unreliable connections have: no READ, no
// atomics, no invalidate (IBA 9.8).
const lastUCOp = 0x0b

func buildOpTable() [256]OpInfo {
	var t [256]OpInfo
	for i := range t {
		t[i] = newOpInfo(Opcode(i), fmt.Sprintf("RESERVED_0x%02x", i), KindNone, 0)
	}
	put := func(o Opcode, name string, k Kind, m Mask) { t[o] = newOpInfo(o, name, k, m|Valid) }
	for _, r := range connectedOps {
		put(Opcode(ServiceRC)<<5|r.op, "RC_"+r.name, r.kind, r.mask)
		if r.op <= lastUCOp {
			put(Opcode(ServiceUC)<<5|r.op, "UC_"+r.name, r.kind, r.mask)
		}
		m := r.mask
		if m&Request != 0 {
			m |= HasXRCETH // every request names the SRQ, responses do not (IBA A14)
		}
		put(Opcode(ServiceXRC)<<5|r.op, "XRC_"+r.name, r.kind, m)
	}
	const ud = Request | Send | Only | Payload | NeedsRecv | HasDETH
	put(UDSendOnly, "UD_SEND_ONLY", KindSend, ud)
	put(UDSendOnlyImm, "UD_SEND_ONLY_IMM", KindSend, ud|Imm|HasImm)

	put(CNP, "CNP", KindCNP, Only)
	t[CNP].HdrLen = BTHLen + CNPLen
	return t
}

// newOpInfo lays the headers out in the order in which all opcodes have them
// (IBA 9.2.1, 9.3, A14, A19).
func newOpInfo(o Opcode, name string, k Kind, m Mask) OpInfo {
	info := OpInfo{Name: name, Mask: m, Service: o.Service(), Kind: k}
	n := BTHLen
	at := func(has Mask, length int) int8 {
		if m&has == 0 {
			return -1
		}
		off := n
		n += length
		return int8(off)
	}
	info.XRCETH = at(HasXRCETH, XRCETHLen)
	info.DETH = at(HasDETH, DETHLen)
	info.FETH = at(HasFETH, FETHLen)
	info.RETH = at(HasRETH, RETHLen)
	info.AtomicETH = at(HasAtomicETH, AtomicETHLen)
	info.AETH = at(HasAETH, AETHLen)
	info.AtomicAckETH = at(HasAtomicAckETH, AtomicAckETHLen)
	info.ImmDt = at(HasImm, ImmDtLen)
	info.IETH = at(HasIETH, IETHLen)
	info.HdrLen = n
	return info
}
