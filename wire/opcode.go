// SPDX-License-Identifier: Apache-2.0

package wire

// Opcode is the BTH's opcode, all 8 bits: transport service in the upper three,
// operation in the lower five (IBA 9.2.1).
type Opcode uint8

// Opcodes of reliable connections. FLUSH and ATOMIC WRITE are of IBA A19.
const (
	RCSendFirst      Opcode = 0x00
	RCSendMiddle     Opcode = 0x01
	RCSendLast       Opcode = 0x02
	RCSendLastImm    Opcode = 0x03
	RCSendOnly       Opcode = 0x04
	RCSendOnlyImm    Opcode = 0x05
	RCWriteFirst     Opcode = 0x06
	RCWriteMiddle    Opcode = 0x07
	RCWriteLast      Opcode = 0x08
	RCWriteLastImm   Opcode = 0x09
	RCWriteOnly      Opcode = 0x0a
	RCWriteOnlyImm   Opcode = 0x0b
	RCReadRequest    Opcode = 0x0c
	RCReadRespFirst  Opcode = 0x0d
	RCReadRespMiddle Opcode = 0x0e
	RCReadRespLast   Opcode = 0x0f
	RCReadRespOnly   Opcode = 0x10
	RCAck            Opcode = 0x11
	RCAtomicAck      Opcode = 0x12
	RCCompareSwap    Opcode = 0x13
	RCFetchAdd       Opcode = 0x14
	RCSendLastInv    Opcode = 0x16
	RCSendOnlyInv    Opcode = 0x17
	RCFlush          Opcode = 0x1c
	RCAtomicWrite    Opcode = 0x1d
)

// Opcodes of unreliable connections.
const (
	UCSendFirst    Opcode = 0x20
	UCSendMiddle   Opcode = 0x21
	UCSendLast     Opcode = 0x22
	UCSendLastImm  Opcode = 0x23
	UCSendOnly     Opcode = 0x24
	UCSendOnlyImm  Opcode = 0x25
	UCWriteFirst   Opcode = 0x26
	UCWriteMiddle  Opcode = 0x27
	UCWriteLast    Opcode = 0x28
	UCWriteLastImm Opcode = 0x29
	UCWriteOnly    Opcode = 0x2a
	UCWriteOnlyImm Opcode = 0x2b
)

// Opcodes of unreliable datagrams.
const (
	UDSendOnly    Opcode = 0x64
	UDSendOnlyImm Opcode = 0x65
)

// CNP is the congestion notification packet (IBA A17.9.3): a BTH whose BECN bit
// is set and 16 reserved bytes.
const CNP Opcode = 0x81

// Opcodes of extended reliable connections (IBA A14): those of RC, with an
// XRCETH in every request.
const (
	XRCSendFirst      Opcode = 0xa0
	XRCSendMiddle     Opcode = 0xa1
	XRCSendLast       Opcode = 0xa2
	XRCSendLastImm    Opcode = 0xa3
	XRCSendOnly       Opcode = 0xa4
	XRCSendOnlyImm    Opcode = 0xa5
	XRCWriteFirst     Opcode = 0xa6
	XRCWriteMiddle    Opcode = 0xa7
	XRCWriteLast      Opcode = 0xa8
	XRCWriteLastImm   Opcode = 0xa9
	XRCWriteOnly      Opcode = 0xaa
	XRCWriteOnlyImm   Opcode = 0xab
	XRCReadRequest    Opcode = 0xac
	XRCReadRespFirst  Opcode = 0xad
	XRCReadRespMiddle Opcode = 0xae
	XRCReadRespLast   Opcode = 0xaf
	XRCReadRespOnly   Opcode = 0xb0
	XRCAck            Opcode = 0xb1
	XRCAtomicAck      Opcode = 0xb2
	XRCCompareSwap    Opcode = 0xb3
	XRCFetchAdd       Opcode = 0xb4
	XRCSendLastInv    Opcode = 0xb6
	XRCSendOnlyInv    Opcode = 0xb7
	XRCFlush          Opcode = 0xbc
	XRCAtomicWrite    Opcode = 0xbd
)

// Mask says in bits what an opcode is and what it carries.
type Mask uint32

// The bits of a Mask.
const (
	Valid       Mask = 1 << iota // the opcode is defined
	Request                      // goes from requester to responder
	Response                     // goes from responder to requester: READ responses, acknowledges
	Send                         // any SEND
	Write                        // any RDMA WRITE (not ATOMIC WRITE)
	Read                         // READ request and responses
	Atomic                       // compare-and-swap, fetch-and-add and their acknowledge
	Ack                          // ACKNOWLEDGE and ATOMIC ACKNOWLEDGE (not READ responses)
	First                        // first of several packets
	Middle                       // neither first nor last
	Last                         // last of several packets
	Only                         // a whole message
	Imm                          // with immediate data
	Inv                          // with invalidate
	Payload                      // may carry payload (of any length its message allows, 0 included)
	NeedsRecv                    // uses a receive WQE: every SEND, and a WRITE with immediate at its end
	Flush                        // FLUSH
	AtomicWrite                  // ATOMIC WRITE

	HasRETH
	HasAETH
	HasAtomicETH
	HasAtomicAckETH
	HasImm
	HasIETH
	HasDETH
	HasXRCETH
	HasFETH
)

// Start and End are the bits of packets that start and that end a message.
const (
	Start = First | Only
	End   = Last | Only
)

// Kind is the sort of message that a packet is part of. MIDDLE and LAST packets
// must follow a FIRST or MIDDLE of their own kind (IBA 9.7.4.1.2).
type Kind uint8

// The kinds of messages.
const (
	KindNone Kind = iota // an undefined opcode
	KindSend
	KindWrite
	KindRead // READ request
	KindReadResp
	KindAck
	KindAtomic // compare-and-swap, fetch-and-add
	KindAtomicAck
	KindFlush
	KindAtomicWrite
	KindCNP
)

// OpInfo is an opcode's row in the table: lengths, offsets and masks, so that
// nothing else has to tell opcodes apart by hand. Offsets are in bytes from the
// start of the BTH, -1 where the opcode lacks the header.
type OpInfo struct {
	Name    string // RC_SEND_FIRST; RESERVED_0x1b for undefined opcodes
	Mask    Mask
	Service Service
	Kind    Kind
	HdrLen  int // BTH and extended headers, in bytes; BTHLen for undefined opcodes

	RETH, AETH, AtomicETH, AtomicAckETH, ImmDt, IETH, DETH, XRCETH, FETH int8
}

// Has says whether all bits of m are set.
func (i *OpInfo) Has(m Mask) bool { return i.Mask&m == m }

// MayFollow says whether a packet of this opcode may come right after one of prev
// on the same QP in the same direction (IBA 9.7.4.1.2): inside a message
// only MIDDLE or LAST of the same kind, otherwise only FIRST or ONLY. prev is nil
// where nothing came before.
func (i *OpInfo) MayFollow(prev *OpInfo) bool {
	if prev == nil || prev.Mask&(First|Middle) == 0 {
		return i.Mask&Start != 0
	}
	return i.Mask&(Middle|Last) != 0 && i.Kind == prev.Kind && i.Service == prev.Service
}

// Info gives the opcode's row. It is never nil: an undefined opcode has a row with
// Mask 0. The row is shared and must not be written to.
func (o Opcode) Info() *OpInfo { return &opTable[o] }

// String gives the opcode's name, as RC_SEND_FIRST.
func (o Opcode) String() string { return opTable[o].Name }

// Service gives the transport service in the opcode's upper bits.
func (o Opcode) Service() Service { return Service(o >> 5) }
