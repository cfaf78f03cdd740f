// SPDX-License-Identifier: Apache-2.0

// Package wire holds the formats of RoCEv2: the opcode table, the transport
// headers from BTH to FETH, the invariant CRC, and the Ethernet, IP and UDP
// headers they travel in. It has no I/O, no state and no clock, and imports
// only the standard library.
//
// Clauses named "IBA 9.2" are of the InfiniBand Architecture Specification,
// volume 1; "IBA A17" is its annex on RoCEv2, "IBA A14" the one on XRC and
// "IBA A19" the one on memory placement extensions (FLUSH and ATOMIC WRITE).
//
// # The parse contract
//
// [Parse] looks at one Ethernet frame and fills a [Packet]. It never copies,
// never allocates, never panics whatever the bytes are, and reads nothing
// outside the slice it is given. The Packet is a view: Frame and Payload point
// into the caller's buffer and are good for as long as that buffer is. Payload
// has its capacity cut, so that appending to it cannot overwrite the ICRC.
//
// A nil error means all of this holds:
//
//   - Ethernet II, untagged, type 0x0800 or 0x86DD; bytes behind the IP datagram
//     (Ethernet padding) are cut off from Frame.
//   - IPv4: version 4, no options, right header checksum, not a fragment,
//     protocol UDP. IPv6: version 6, UDP right behind the fixed header.
//   - UDP destination port 4791, UDP length equal to the IP payload's length.
//     A UDP checksum that is not zero is right (RFC 768); zero means "none" and
//     is taken over IPv6 too (RFC 6935, IBA A17).
//   - BTH: the transport version is 0, the opcode is one of the table's, and the
//     packet is long enough for all headers of that opcode, its pad and the ICRC.
//   - Headers, payload and pad together are a multiple of 4 bytes (IBA 9.2.4).
//
// Then BTH is decoded, Info is the opcode's row, and each accessor whose Has bit
// is set in Info.Mask may be called.
//
// What Parse leaves to others, on purpose:
//
//   - The ICRC: [Packet.ICRCValid]. It is the dearest of all checks, and a device
//     may want to look at the destination first.
//   - All that needs to know a QP or the path MTU: payload lengths against the
//     MTU, FIRST and MIDDLE being full, payload on opcodes that have none, opcode
//     sequence ([OpInfo.MayFollow] helps), P_Key, Q_Key, PSN. A responder owes a
//     NAK for some of them (IBA 9.7.4.1), so they must reach it.
//   - Reserved bits. They are ignored on receipt, as IBA 9.2 asks, but kept, so
//     that encoding a parsed header gives back the same bytes.
//
// Every failure is one of the [Error] values, small numbers by which a device can
// index its drop counters. [ErrNotRoCE] says that the frame is somebody else's
// (ARP, ICMP, another port); all others say that it was meant for RoCE and is bad.
//
// # The encode contract
//
// Encoders write into the caller's buffer, every byte of what they are to write
// and not one more; the buffer may hold garbage before. They panic, as any index
// out of range does, if it is too short. Fields wider than their place on the
// wire are cut to it.
package wire
