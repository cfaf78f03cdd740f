// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"strconv"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// Type is the transport service of a QP, with the values of enum ibv_qp_type.
type Type uint8

// Transport services (IBA 9.1, ibv_create_qp(3)).
const (
	TypeRC      Type = 2
	TypeUC      Type = 3
	TypeUD      Type = 4
	TypeRaw     Type = 8 // RAW_PACKET: whole Ethernet frames
	TypeXRCSend Type = 9
	TypeXRCRecv Type = 10
)

func (t Type) String() string {
	switch t {
	case TypeRC:
		return "RC"
	case TypeUC:
		return "UC"
	case TypeUD:
		return "UD"
	case TypeRaw:
		return "RAW_PACKET"
	case TypeXRCSend:
		return "XRC_SEND"
	case TypeXRCRecv:
		return "XRC_RECV"
	}
	return "Type(" + strconv.Itoa(int(t)) + ")"
}

// State is a QP's state (IBA 10.3.1), with the values of enum ibv_qp_state.
type State uint8

// QP states.
const (
	StateReset State = iota
	StateInit
	StateRTR
	StateRTS
	StateSQD
	StateSQE
	StateErr
	numStates
)

var stateNames = [...]string{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"}

func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return "State(" + strconv.Itoa(int(s)) + ")"
}

// MTU is a path MTU with the values of enum ibv_mtu: 1 is 256 bytes, 5 is 4096.
type MTU uint8

// Path MTUs.
const (
	MTU256 MTU = 1 + iota
	MTU512
	MTU1024
	MTU2048
	MTU4096
)

// Bytes is the payload a packet of this path MTU carries at most, in bytes; 0 if
// m is not one of the five.
func (m MTU) Bytes() int {
	if m < MTU256 || m > MTU4096 {
		return 0
	}
	return 128 << m
}

// MTUOf gives the MTU value for a number of bytes (256, 512, 1024, 2048, 4096),
// and whether there is one.
func MTUOf(bytes int) (MTU, bool) {
	for m := MTU256; m <= MTU4096; m++ {
		if m.Bytes() == bytes {
			return m, true
		}
	}
	return 0, false
}

// WROpcode is what a send work request asks for, with the values of enum
// ibv_wr_opcode (ibv_post_send(3)).
type WROpcode uint8

// Send work request opcodes.
const (
	WRWrite          WROpcode = 0
	WRWriteImm       WROpcode = 1
	WRSend           WROpcode = 2
	WRSendImm        WROpcode = 3
	WRRead           WROpcode = 4
	WRAtomicCmpSwap  WROpcode = 5
	WRAtomicFetchAdd WROpcode = 6
	WRLocalInv       WROpcode = 7
	WRBindMW         WROpcode = 8
	WRSendInv        WROpcode = 9
	WRFlush          WROpcode = 14
	WRAtomicWrite    WROpcode = 15
)

// SendFlags modify a send work request, with the values of enum ibv_send_flags.
type SendFlags uint8

// Send flags.
const (
	SendFence     SendFlags = 1 << 0
	SendSignaled  SendFlags = 1 << 1
	SendSolicited SendFlags = 1 << 2
	SendInline    SendFlags = 1 << 3
)

// WCStatus is the outcome of a work request, with the values of enum
// ibv_wc_status (ibv_poll_cq(3)).
type WCStatus uint8

// Work completion statuses (IBA 11.6.2).
const (
	WCSuccess        WCStatus = 0
	WCLocLenErr      WCStatus = 1
	WCLocQPOpErr     WCStatus = 2
	WCLocEECOpErr    WCStatus = 3
	WCLocProtErr     WCStatus = 4
	WCWRFlushErr     WCStatus = 5
	WCMWBindErr      WCStatus = 6
	WCBadRespErr     WCStatus = 7
	WCLocAccessErr   WCStatus = 8
	WCRemInvReqErr   WCStatus = 9
	WCRemAccessErr   WCStatus = 10
	WCRemOpErr       WCStatus = 11
	WCRetryExcErr    WCStatus = 12
	WCRNRRetryExcErr WCStatus = 13
	WCLocRDDViolErr  WCStatus = 14
	WCRemInvRDReqErr WCStatus = 15
	WCRemAbortErr    WCStatus = 16
	WCInvEECNErr     WCStatus = 17
	WCInvEECStateErr WCStatus = 18
	WCFatalErr       WCStatus = 19
	WCRespTimeoutErr WCStatus = 20
	WCGeneralErr     WCStatus = 21
	numWCStatus               = 22
)

var wcStatusNames = [numWCStatus]string{
	"success", "local length error", "local QP operation error", "local EE context operation error",
	"local protection error", "work request flushed error", "memory management operation error",
	"bad response error", "local access error", "remote invalid request error", "remote access error",
	"remote operation error", "transport retry counter exceeded", "RNR retry counter exceeded",
	"local RDD violation error", "remote invalid RD request", "aborted error", "invalid EE context number",
	"invalid EE context state", "fatal error", "response timeout error", "general error",
}

// String names the status in the words of ibv_wc_status_str(3).
func (s WCStatus) String() string {
	if int(s) < len(wcStatusNames) {
		return wcStatusNames[s]
	}
	return "unknown status " + strconv.Itoa(int(s))
}

// WCOpcode says which kind of work request completed, with the values of enum
// ibv_wc_opcode.
type WCOpcode uint8

// Work completion opcodes.
const (
	WCSend        WCOpcode = 0
	WCRDMAWrite   WCOpcode = 1
	WCRDMARead    WCOpcode = 2
	WCCompSwap    WCOpcode = 3
	WCFetchAdd    WCOpcode = 4
	WCBindMW      WCOpcode = 5
	WCLocalInv    WCOpcode = 6
	WCFlush       WCOpcode = 8
	WCAtomicWrite WCOpcode = 9
	WCRecv        WCOpcode = 128
	WCRecvRDMAImm WCOpcode = 129
)

// WCFlags qualify a completion, with the values of enum ibv_wc_flags.
type WCFlags uint16

// Work completion flags.
const (
	WCGRH     WCFlags = 1 << 0
	WCWithImm WCFlags = 1 << 1
	WCWithInv WCFlags = 1 << 3
)

// SGE is one piece of a gather or scatter list: Length bytes at Addr in the
// region with the local key LKey. It has the layout of struct ibv_sge.
type SGE struct {
	Addr   uint64
	Length uint32
	LKey   mr.Key
}

// SendWR is a work request for a send queue (ibv_post_send(3)).
type SendWR struct {
	ID     uint64
	Opcode WROpcode
	Flags  SendFlags
	SGL    []SGE
	// Inline is the payload when Flags has SendInline and SGL is empty: copied
	// when posted, so it needs no region and may be reused at once. With SGL
	// not empty and SendInline, the bytes are taken from the list's addresses.
	Inline []byte
	// Imm is the immediate data, as the number the peer's completion shows.
	Imm uint32
	// InvKey is the key that WRSendInv invalidates at the peer, WRLocalInv here.
	InvKey mr.Key
	// Bind is what WRBindMW asks for.
	Bind Bind
	// RemoteAddr and RKey name the peer's memory for WRITE, READ and atomics.
	RemoteAddr uint64
	RKey       mr.Key
	// AH, RemoteQPN and RemoteQKey address a datagram: the index of an address
	// handle, the QP it is for (wire.MulticastQPN for a group), and that QP's Q_Key;
	// one with the highest bit set stands for the sending QP's own (IBA 10.2.5).
	AH         uint32
	RemoteQPN  wire.QPN
	RemoteQKey uint32
	// RemoteSRQN is the peer's SRQ that an XRC request is for, of any kind (IBA A14).
	RemoteSRQN uint32
	// CompareAdd and Swap are the operands of the atomics (IBA 9.4.5): for
	// fetch-and-add CompareAdd is what is added.
	CompareAdd, Swap uint64
	// Flush says what a WRFlush is to do; it has no list.
	Flush FlushWR
}

// RecvWR is a work request for a receive queue or SRQ (ibv_post_recv(3)).
type RecvWR struct {
	ID  uint64
	SGL []SGE
}

// WC is a work completion (struct ibv_wc).
type WC struct {
	ID        uint64
	Status    WCStatus
	Opcode    WCOpcode
	Flags     WCFlags
	VendorErr uint32
	// ByteLen is the number of bytes received, read or exchanged. Of a datagram
	// it includes the 40 bytes of the GRH area before the payload.
	ByteLen uint32
	// Imm is the immediate data when Flags has WCWithImm.
	Imm uint32
	// InvKey is the key that the peer invalidated when Flags has WCWithInv.
	InvKey mr.Key
	QPN    wire.QPN
	// SrcQP is who sent what was received.
	SrcQP wire.QPN
	// Timestamp is when the completion was made, in nanoseconds of the
	// engine's clock.
	Timestamp int64
	// FlowTag is that of the flow which brought a frame to a RAW_PACKET QP; 0 without.
	FlowTag uint32
}

// EventType is the kind of an asynchronous event, with the values of enum
// ibv_event_type (ibv_get_async_event(3)).
type EventType uint8

// Asynchronous events (IBA 11.6.3).
const (
	EventCQErr           EventType = 0
	EventQPFatal         EventType = 1
	EventQPReqErr        EventType = 2
	EventQPAccessErr     EventType = 3
	EventCommEst         EventType = 4
	EventSQDrained       EventType = 5
	EventPathMig         EventType = 6
	EventPathMigErr      EventType = 7
	EventDeviceFatal     EventType = 8
	EventPortActive      EventType = 9
	EventPortErr         EventType = 10
	EventLIDChange       EventType = 11
	EventPKeyChange      EventType = 12
	EventSMChange        EventType = 13
	EventSRQErr          EventType = 14
	EventSRQLimitReached EventType = 15
	EventQPLastWQE       EventType = 16
	EventClientRereg     EventType = 17
	EventGIDChange       EventType = 18
	EventWQFatal         EventType = 19
)

var eventNames = [...]string{
	"CQ error", "local work queue catastrophic error", "invalid request local work queue error",
	"local access violation work queue error", "communication established", "send queue drained",
	"path migrated", "path migration request error", "local catastrophic error", "port active",
	"port error", "LID change", "P_Key change", "SM change", "SRQ catastrophic error", "SRQ limit reached",
	"last WQE reached", "client reregistration", "GID table change", "WQ fatal",
}

// String names the event in the words of ibv_event_type_str(3).
func (e EventType) String() string {
	if int(e) < len(eventNames) {
		return eventNames[e]
	}
	return "unknown event " + strconv.Itoa(int(e))
}
