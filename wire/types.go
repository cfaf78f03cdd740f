// SPDX-License-Identifier: Apache-2.0

package wire

// Masks of the 24-bit numbers of the BTH (IBA 9.2).
const (
	PSNMask = 0xffffff
	QPNMask = 0xffffff
)

// UDPPort is the UDP destination port of every RoCEv2 packet (IBA A17, IANA).
const UDPPort = 4791

// Lengths of headers on the wire, in bytes.
const (
	EthLen  = 14 // Ethernet II, untagged
	IPv4Len = 20 // without options (RFC 791)
	IPv6Len = 40 // the fixed header (RFC 8200)
	UDPLen  = 8  // RFC 768

	BTHLen          = 12 // IBA 9.2
	RETHLen         = 16 // IBA 9.3.3
	AETHLen         = 4  // IBA 9.3.5
	AtomicETHLen    = 28 // IBA 9.3.4
	AtomicAckETHLen = 8  // IBA 9.3
	ImmDtLen        = 4  // IBA 9.3
	IETHLen         = 4  // IBA 9.3
	DETHLen         = 8  // IBA 9.3.2
	XRCETHLen       = 4  // IBA A14
	FETHLen         = 4  // IBA A19
	CNPLen          = 16 // reserved bytes behind the BTH of a CNP (IBA A17.9.3)
	ICRCLen         = 4  // IBA 7.8.1
	GRHLen          = 40 // IBA 8.3: what a UD receive buffer begins with

	// MaxExtLen is the most that stands between BTH and payload: XRC atomics.
	MaxExtLen = XRCETHLen + AtomicETHLen
	// MaxHdrLen is the most that stands around a payload in a frame, pad and ICRC
	// included: what a buffer needs besides the path MTU.
	MaxHdrLen = EthLen + IPv6Len + UDPLen + BTHLen + MaxExtLen + 3 + ICRCLen
)

// Payload lengths of the memory operations that carry or move one fixed word.
const (
	AtomicLen      = 8 // bytes that a compare-and-swap or fetch-and-add works on (IBA 9.4)
	AtomicWriteLen = 8 // bytes that an ATOMIC WRITE carries (IBA A19)
)

// DefaultPKey is the default full-member partition key, the only one that the
// kernel's soft-RoCE knows (IBA 10.9).
const DefaultPKey = 0xffff

// MulticastQPN is the destination QP of multicast packets (IBA 9.2).
const MulticastQPN QPN = 0xffffff

// GSIQPN is the QP of the general services interface, where connection
// management's MADs go (IBA 13).
const GSIQPN QPN = 1

// GSIQKey is the well-known Q_Key of QP 1 (IBA 10.2).
const GSIQKey = 0x80010000

// PSN is a packet sequence number, 24 bits, counting round (IBA 9.7.1). Compare
// two of them with Sub or Before, never with <.
type PSN uint32

// Add gives the PSN n packets later, modulo 2^24.
func (p PSN) Add(n uint32) PSN { return PSN((uint32(p) + n) & PSNMask) }

// Next gives the PSN of the packet after p.
func (p PSN) Next() PSN { return (p + 1) & PSNMask }

// Sub gives the signed distance p-q, in (-2^23, 2^23] packets: how far p is ahead
// of q. IBA 9.7.1 divides the ring of PSNs into halves in this way.
func (p PSN) Sub(q PSN) int32 {
	d := int32((p - q) & PSNMask)
	if d > 1<<23 {
		d -= 1 << 24
	}
	return d
}

// Before says whether p is earlier than q, that is p.Sub(q) < 0.
func (p PSN) Before(q PSN) bool { return p.Sub(q) < 0 }

// QPN is a queue pair number, 24 bits (IBA 9.2).
type QPN uint32

// Service is a transport service, the upper three bits of an opcode (IBA 9.2.1).
type Service uint8

// The transport services.
const (
	ServiceRC  Service = 0
	ServiceUC  Service = 1
	ServiceRD  Service = 2 // has no opcodes in the table: nobody ever built it
	ServiceUD  Service = 3
	ServiceCNP Service = 4 // congestion notification, not a service of verbs (IBA A17.9.3)
	ServiceXRC Service = 5 // IBA A14
)

// String gives the service's usual short name.
func (s Service) String() string {
	switch s {
	case ServiceRC:
		return "RC"
	case ServiceUC:
		return "UC"
	case ServiceRD:
		return "RD"
	case ServiceUD:
		return "UD"
	case ServiceCNP:
		return "CNP"
	case ServiceXRC:
		return "XRC"
	}
	return "RESERVED"
}

// Error is the reason why [Parse] turned a frame away. The values are small and
// dense, from 1 to NumErrors-1, so that a counter for each can be an array.
type Error uint8

// The reasons. ErrNotRoCE alone means that the frame is none of ours.
const (
	// ErrNotRoCE: another ethertype (VLAN tags included), IP protocol or UDP port.
	ErrNotRoCE Error = iota + 1
	// ErrTruncated: the bytes end before the headers, the IP datagram or what the
	// opcode needs do.
	ErrTruncated
	// ErrMalformed: lengths that contradict each other, a wrong IP version, IPv4
	// options, a length that is not a multiple of 4 (IBA 9.2.4).
	ErrMalformed
	// ErrChecksum: the IPv4 header's or a non-zero UDP checksum is wrong
	// (RFC 791, RFC 768).
	ErrChecksum
	// ErrFragment: an IP fragment of a UDP datagram. RoCEv2 packets are never
	// fragmented: DF is set (IBA A17).
	ErrFragment
	// ErrVersion: the BTH's transport version is not 0 (IBA 9.2.5, 9.6.1.1).
	ErrVersion
	// ErrOpcode: the opcode is reserved (IBA 9.2.1, 9.6.1.1).
	ErrOpcode

	// NumErrors is one more than the last Error, the length for an array of counters.
	NumErrors = iota + 1
)

// Error gives the reason in words.
func (e Error) Error() string {
	switch e {
	case ErrNotRoCE:
		return "wire: not a RoCEv2 packet"
	case ErrTruncated:
		return "wire: packet truncated"
	case ErrMalformed:
		return "wire: packet malformed"
	case ErrChecksum:
		return "wire: wrong IP or UDP checksum"
	case ErrFragment:
		return "wire: IP fragment"
	case ErrVersion:
		return "wire: unknown transport version"
	case ErrOpcode:
		return "wire: unknown opcode"
	}
	return "wire: unknown error"
}
