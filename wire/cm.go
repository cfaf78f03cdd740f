// SPDX-License-Identifier: Apache-2.0

package wire

import "fmt"

// Messages of communication management (IBA 12.6 to 12.8, 12.11): MADs of class 7 to queue
// pair 1, by which two ports agree on a connection, or on where a datagram service is.
// Each has a struct with Put, which writes the 232 bytes behind the MAD header (reserved
// fields as zeros), and Parse, which takes them; any 232 bytes are a message. Private data
// is always of the length that the message has room for: what of it means something is the
// applications' to know.

// The class of CM messages, its version, and their length in bytes behind the MAD header.
const (
	CMClass        = 7
	CMClassVersion = 2
	CMLen          = MADLen - MADHeaderLen
)

// CMAttr says which message a CM MAD holds: its attribute (IBA 16.7.3).
type CMAttr uint16

// The messages of CM.
const (
	CMREQ     CMAttr = 0x10 + iota // request for communication
	CMMRA                          // message receipt acknowledgement
	CMREJ                          // reject
	CMREP                          // reply to REQ
	CMRTU                          // ready to use
	CMDREQ                         // request to end the communication
	CMDREP                         // reply to DREQ
	CMSIDRREQ                      // service ID resolution request
	CMSIDRREP                      // and its response
	CMLAP                          // load alternate path
	CMAPR                          // alternate path response
)

// String is the message's name in the specification.
func (a CMAttr) String() string {
	names := [...]string{"REQ", "MRA", "REJ", "REP", "RTU", "DREQ", "DREP", "SIDR_REQ", "SIDR_REP", "LAP", "APR"}
	if a < CMREQ || a > CMAPR {
		return fmt.Sprintf("attribute 0x%04x", uint16(a))
	}
	return names[a-CMREQ]
}

// Lengths in bytes of the messages' private data, and of the additional reject information,
// additional path information and service data of REJ, APR and SIDR_REP.
const (
	REQPrivateLen     = 92
	MRAPrivateLen     = 222
	REJPrivateLen     = 148
	REPPrivateLen     = 196
	RTUPrivateLen     = 224
	DREQPrivateLen    = 220
	DREPPrivateLen    = 224
	SIDRREQPrivateLen = 216
	SIDRREPPrivateLen = 136
	LAPPrivateLen     = 168
	APRPrivateLen     = 148
	CMInfoLen         = 72
)

// CMPath is one of a REQ's two paths (IBA 12.6.5), or LAP's (12.8.1).
type CMPath struct {
	LocalLID, RemoteLID uint16
	LocalGID, RemoteGID [16]byte
	FlowLabel           uint32 // 20 bits
	Rate                uint8  // 6 bits, IBA 15.2.5.16's code
	TrafficClass        uint8
	HopLimit            uint8
	SL                  uint8 // 4 bits
	SubnetLocal         bool
	AckTimeout          uint8 // 5 bits: 4.096 µs * 2^n
}

// CMReq asks for a connection (IBA 12.6.5).
type CMReq struct {
	LocalID            uint32 // communication ID
	VendorID           uint32 // 24 bits: of enhanced connection establishment; the MAD's modifier has its options
	ServiceID          uint64
	LocalCAGUID        uint64
	LocalQKey          uint32
	LocalQPN           QPN
	ResponderResources uint8 // READs and atomics that the sender takes at a time
	InitiatorDepth     uint8 // those that it sends
	LocalEECN          uint32
	RemoteEECN         uint32
	RemoteTimeout      uint8 // 5 bits: what the receiver has to answer, 4.096 µs * 2^n
	Transport          uint8 // 2 bits: 0 RC, 1 UC, 2 RD, 3 see ExtTransport
	FlowControl        bool  // end to end
	StartingPSN        PSN   // that the receiver of the message is to send with
	LocalTimeout       uint8 // 5 bits: in what time the sender answers
	RetryCount         uint8 // 3 bits
	PKey               uint16
	MTU                uint8 // 4 bits, MTU's code
	RDCExists          bool
	RNRRetry           uint8 // 3 bits
	MaxCMRetries       uint8 // 4 bits
	SRQ                bool
	ExtTransport       uint8 // 3 bits: 1 XRC
	Primary, Alternate CMPath
	Private            [REQPrivateLen]byte
}

// CMMra asks for more time (IBA 12.6.6).
type CMMra struct {
	LocalID, RemoteID uint32
	Of                uint8 // 2 bits: 0 REQ, 1 REP, 2 LAP
	ServiceTimeout    uint8 // 5 bits: how much, 4.096 µs * 2^n
	Private           [MRAPrivateLen]byte
}

// CMRej says no (IBA 12.6.7).
type CMRej struct {
	LocalID, RemoteID uint32
	Of                uint8 // 2 bits: 0 REQ, 1 REP, 2 none
	InfoLen           uint8 // 7 bits
	Reason            CMReason
	Info              [CMInfoLen]byte
	Private           [REJPrivateLen]byte
}

// CMReason is why a REJ was sent (IBA 12.6.7.2).
type CMReason uint16

// The reasons. What a REJ's additional information holds, if there is some, is said with them.
const (
	RejNoQP                  CMReason = 1
	RejNoEEC                 CMReason = 2
	RejNoResources           CMReason = 3
	RejTimeout               CMReason = 4 // the sender's CA GUID, as its peer may not know its ID
	RejUnsupported           CMReason = 5
	RejInvalidCommID         CMReason = 6
	RejInvalidCommInstance   CMReason = 7
	RejInvalidServiceID      CMReason = 8
	RejInvalidTransport      CMReason = 9
	RejStale                 CMReason = 10
	RejNoRDC                 CMReason = 11
	RejInvalidGID            CMReason = 12 // a GID that would do
	RejInvalidLID            CMReason = 13
	RejInvalidSL             CMReason = 14
	RejInvalidTrafficClass   CMReason = 15
	RejInvalidHopLimit       CMReason = 16
	RejInvalidRate           CMReason = 17
	RejInvalidAltGID         CMReason = 18
	RejInvalidAltLID         CMReason = 19
	RejInvalidAltSL          CMReason = 20
	RejInvalidAltClass       CMReason = 21
	RejInvalidAltHopLimit    CMReason = 22
	RejInvalidAltRate        CMReason = 23
	RejRedirectPort          CMReason = 24 // of port and CM
	RejRedirect              CMReason = 25
	RejInvalidMTU            CMReason = 26
	RejInsufficientResources CMReason = 27 // responder resources
	RejConsumer              CMReason = 28
	RejInvalidRNRRetry       CMReason = 29
	RejDuplicateLocalCommID  CMReason = 30
	RejInvalidClassVersion   CMReason = 31
	RejInvalidFlowLabel      CMReason = 32
	RejInvalidAltFlowLabel   CMReason = 33
	RejVendorOption          CMReason = 35 // not supported
)

// String says it in a few words.
func (r CMReason) String() string {
	names := [...]string{RejNoQP: "no queue pair available", RejNoEEC: "no EE context available", RejNoResources: "no resources available",
		RejTimeout: "timed out", RejUnsupported: "unsupported request", RejInvalidCommID: "invalid communication ID",
		RejInvalidCommInstance: "invalid communication instance", RejInvalidServiceID: "invalid service ID",
		RejInvalidTransport: "invalid transport type", RejStale: "stale connection", RejNoRDC: "RDC does not exist", RejInvalidGID: "invalid GID",
		RejInvalidLID: "invalid LID", RejInvalidSL: "invalid SL", RejInvalidTrafficClass: "invalid traffic class",
		RejInvalidHopLimit: "invalid hop limit", RejInvalidRate: "invalid packet rate", RejInvalidAltGID: "invalid alternate GID",
		RejInvalidAltLID: "invalid alternate LID", RejInvalidAltSL: "invalid alternate SL", RejInvalidAltClass: "invalid alternate traffic class",
		RejInvalidAltHopLimit: "invalid alternate hop limit", RejInvalidAltRate: "invalid alternate packet rate",
		RejRedirectPort: "redirected to another port and CM", RejRedirect: "redirected to another port", RejInvalidMTU: "invalid path MTU",
		RejInsufficientResources: "insufficient responder resources", RejConsumer: "rejected by the consumer",
		RejInvalidRNRRetry: "invalid RNR retry count", RejDuplicateLocalCommID: "duplicate local communication ID",
		RejInvalidClassVersion: "invalid class version", RejInvalidFlowLabel: "invalid flow label",
		RejInvalidAltFlowLabel: "invalid alternate flow label", RejVendorOption: "vendor option not supported"}
	if int(r) < len(names) && names[r] != "" {
		return names[r]
	}
	return fmt.Sprintf("reason %d", uint16(r))
}

// CMRep answers a REQ (IBA 12.6.8).
type CMRep struct {
	LocalID, RemoteID  uint32
	LocalQKey          uint32
	LocalQPN           QPN
	LocalEECN          uint32
	StartingPSN        PSN
	ResponderResources uint8
	InitiatorDepth     uint8
	TargetAckDelay     uint8 // 5 bits
	Failover           uint8 // 2 bits
	FlowControl        bool
	RNRRetry           uint8 // 3 bits
	SRQ                bool
	LocalCAGUID        uint64
	VendorID           uint32 // 24 bits, as in REQ
	Private            [REPPrivateLen]byte
}

// CMRtu says that the connection is in use (IBA 12.6.9).
type CMRtu struct {
	LocalID, RemoteID uint32
	Private           [RTUPrivateLen]byte
}

// CMDreq ends a connection (IBA 12.6.10).
type CMDreq struct {
	LocalID, RemoteID uint32
	RemoteQPN         QPN
	Private           [DREQPrivateLen]byte
}

// CMDrep is the answer to a DREQ (IBA 12.6.11).
type CMDrep struct {
	LocalID, RemoteID uint32
	Private           [DREPPrivateLen]byte
}

// CMLap offers an alternate path (IBA 12.8.1).
type CMLap struct {
	LocalID, RemoteID uint32
	RemoteQPN         QPN
	RemoteTimeout     uint8 // 5 bits
	Alternate         CMPath
	Private           [LAPPrivateLen]byte
}

// CMApr answers a LAP (IBA 12.8.2).
type CMApr struct {
	LocalID, RemoteID uint32
	InfoLen           uint8
	Status            uint8 // IBA 12.8.2.1
	Info              [CMInfoLen]byte
	Private           [APRPrivateLen]byte
}

// Statuses of an APR.
const (
	APRLoaded       = 0
	APRInvalidComm  = 1
	APRNotSupported = 2
)

// CMSidrReq asks for the queue pair of a datagram service (IBA 12.11.1).
type CMSidrReq struct {
	RequestID uint32
	PKey      uint16
	ServiceID uint64
	Private   [SIDRREQPrivateLen]byte
}

// CMSidrRep answers that (IBA 12.11.2).
type CMSidrRep struct {
	RequestID uint32
	Status    uint8
	InfoLen   uint8
	QPN       QPN
	ServiceID uint64
	QKey      uint32
	Info      [CMInfoLen]byte
	Private   [SIDRREPPrivateLen]byte
}

// Statuses of a SIDR_REP (IBA 12.11.2.1).
const (
	SIDROK          = 0
	SIDRUnsupported = 1 // service ID not supported
	SIDRRejected    = 2 // by the service provider
	SIDRNoQP        = 3
	SIDRRedirect    = 4
	SIDRVersion     = 5
)
