// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"strconv"
	"unsafe"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/wire"
)

// DropReason says why a frame that arrived was not taken in. The values up to
// wire.NumErrors are those of wire.Error: what the parser found wrong.
type DropReason uint8

// Reasons beside the parser's. Clauses are those that say to drop silently.
const (
	DropNotRoCE    = DropReason(wire.ErrNotRoCE) // nor ARP, ND or ICMP echo for us
	DropTruncated  = DropReason(wire.ErrTruncated)
	DropMalformed  = DropReason(wire.ErrMalformed)
	DropChecksum   = DropReason(wire.ErrChecksum)
	DropFragment   = DropReason(wire.ErrFragment)
	DropVersion    = DropReason(wire.ErrVersion)
	DropOpcode     = DropReason(wire.ErrOpcode)
	DropSuperFrame = DropReason(wire.NumErrors) + iota - 7 // of anything but UDP, or with segments that make no sense
	DropWrongMAC                                           // destination MAC is another's
	DropWrongIP                                            // destination address is none of our GIDs (IBA A17.4.2)
	DropICRC                                               // IBA 9.6.1.1, 7.8.1
	DropNoQP                                               // no QP of that number (IBA 9.6.1.1.1)
	DropMAD                                                // for QP0, or for QP1 and of no class that is spoken here (IBA 13.5.3.3)
	DropMulticast                                          // for a multicast group that no QP is attached to, or not for the multicast QPN
	DropService                                            // the opcode is not of the QP's service (IBA 9.6.1.1.2)
	DropState                                              // the QP is not in RTR, RTS, SQD or SQE (IBA 10.3.1)
	DropPKey                                               // IBA 9.6.1.1.3
	DropSource                                             // not from the peer the QP is connected to (IBA 9.6.1.2)
	DropBadARP                                             // ARP that makes no sense (RFC 826)
	DropBadND                                              // ND that fails RFC 4861 7.1.1, 7.1.2
	DropBadICMP                                            // ICMP with a wrong checksum or length
	DropBadIGMP                                            // IGMP or MLD that RFC 3376 or RFC 3810 has hosts ignore
	DropFiller                                             // what fills a super-frame that asks whether such arrive
	NumDropReasons
)

var dropNames = [NumDropReasons]string{
	DropNotRoCE: "not_roce", DropTruncated: "truncated", DropMalformed: "malformed", DropChecksum: "checksum",
	DropFragment: "fragment", DropVersion: "version", DropOpcode: "opcode", DropSuperFrame: "super_frame",
	DropWrongMAC: "wrong_mac", DropWrongIP: "wrong_ip", DropICRC: "icrc", DropNoQP: "no_qp", DropMAD: "mad",
	DropMulticast: "multicast", DropService: "service", DropState: "qp_state", DropPKey: "pkey",
	DropSource: "source", DropBadARP: "bad_arp", DropBadND: "bad_nd", DropBadICMP: "bad_icmp", DropBadIGMP: "bad_igmp",
	DropFiller: "filler",
}

// String names the reason as it stands in lists of counters.
func (r DropReason) String() string {
	if r < NumDropReasons && dropNames[r] != "" {
		return dropNames[r]
	}
	return "reason_" + strconv.Itoa(int(r))
}

// counters are what the shard counts beside the protocol. Plain numbers, written
// and read with the baton held.
type counters struct {
	RxFrames, RxBytes uint64
	TxFrames, TxBytes uint64
	// RoCE packets for us whose ICRC is right, and those of them to multicast groups.
	RxPackets, RxPacketBytes, RxGroupPackets uint64

	Drops          [NumDropReasons]uint64
	CNPs           uint64
	CNPsHandled    uint64
	CNPsSent       uint64
	Marked         uint64
	LoopPackets    uint64
	TxErrors       uint64
	TxDropped      uint64
	ControlDropped uint64
	DeviceErrors   uint64
	LinkDowns      uint64
	Timeouts       uint64

	ARPRequests, ARPReplies, ARPConflicts uint64
	NDSolicits, NDAdverts                 uint64
	EchoReplies                           uint64
	IGMPReports, MLDReports               uint64
	McastDelivered                        uint64
	FlowDelivered, FlowDropped            uint64
	NeighboursChanged, ResolveFailures    uint64
	SingleFallbacks, SuperRefused         uint64
	SuperProbes, SuperProven              uint64
	WindowsTold, WindowsHeard             uint64

	ResidencySent, ResidencyReceived, ResidencyPrefetches uint64

	HandedOver, HandoverLost uint64
}

// add adds what another shard has counted: all fields are numbers.
func (c *counters) add(o *counters) {
	const n = unsafe.Sizeof(*c) / 8
	to, from := (*[n]uint64)(unsafe.Pointer(c)), (*[n]uint64)(unsafe.Pointer(o))
	for i := range to {
		to[i] += from[i]
	}
}

// Stats is a snapshot of a device's counters.
type Stats struct {
	RxFrames, RxBytes uint64 // frames read, packets to oneself included
	TxFrames, TxBytes uint64 // frames given to the TAP
	Drops             [NumDropReasons]uint64
	CNPs              uint64 // congestion notifications received (IBA A17.9.3)
	CNPsHandled       uint64 // those of them that slowed a QP down
	CNPsSent          uint64 // congestion notifications sent
	Marked            uint64 // packets received that met congestion on their way (RFC 3168 CE, or FECN)
	LoopPackets       uint64 // packets to oneself
	TxErrors          uint64 // frames the device refused
	TxDropped         uint64 // packets lost because the link was down or gone, or the memory they are in
	ControlDropped    uint64 // ARP, ND or ICMP frames not sent because the device was full
	DeviceErrors      uint64 // reads and writes that failed in a way that is not the link's
	LinkDowns         uint64 // how often the link went down
	Timeouts          uint64 // QP timers that ran out

	ARPRequests, ARPReplies uint64 // sent
	ARPConflicts            uint64 // somebody else uses one of our addresses
	NDSolicits, NDAdverts   uint64 // sent
	EchoReplies             uint64 // sent, ICMP and ICMPv6
	IGMPReports, MLDReports uint64 // sent, leaves included
	McastDelivered          uint64 // copies of multicast packets brought to attached QPs
	FlowDelivered           uint64 // frames that flows brought to RAW_PACKET QPs
	FlowDropped             uint64 // frames that flows dropped
	NeighboursChanged       uint64 // MACs of known neighbours that changed
	ResolveFailures         uint64 // neighbours that did not answer
	SingleFallbacks         uint64 // how often a destination was given no super-frames, as it seemed to lose them
	SuperProbes             uint64 // questions sent to destinations whether super-frames arrive
	SuperProven             uint64 // answers that they do
	SuperAsking             int    // destinations that are being asked now
	SuperRefused            uint64 // super-frames that the kernel refused: there were no more of that kind then

	// Notifications to a sender how many packets there is room for, and those that came. They
	// are among CNPsSent and CNPs.
	WindowsTold, WindowsHeard uint64

	// Residency messages, and prefetches that peers have asked for and were begun.
	ResidencySent, ResidencyReceived, ResidencyPrefetches uint64

	// Frames that shards have handed to each other, and those for which there was no room.
	HandedOver, HandoverLost uint64

	// Wakeups counts how often the background goroutine returned from poll(2),
	// Kicks how often somebody woke it.
	Wakeups, Kicks uint64
	// Tap is what the port itself has counted.
	Tap tap.Stats
}

// Dropped is the sum of all drop counters but those of frames that were not for
// us, other protocols and other stations' addresses, and of fillers.
func (s *Stats) Dropped() (n uint64) {
	for r, c := range s.Drops {
		if r := DropReason(r); r != DropNotRoCE && r != DropWrongMAC && r != DropFiller {
			n += c
		}
	}
	return n
}

// Stats takes a snapshot of the counters.
func (d *Device) Stats() Stats {
	var c counters
	asking := 0
	for _, s := range d.shards {
		s.lock()
		c.add(&s.cnt)
		asking += s.eg.dests.asking
		s.release()
	}
	st := Stats{
		RxFrames: c.RxFrames, RxBytes: c.RxBytes, TxFrames: c.TxFrames, TxBytes: c.TxBytes, Drops: c.Drops,
		CNPs: c.CNPs, CNPsHandled: c.CNPsHandled, CNPsSent: c.CNPsSent, Marked: c.Marked, LoopPackets: c.LoopPackets, TxErrors: c.TxErrors, TxDropped: c.TxDropped,
		ControlDropped: c.ControlDropped, DeviceErrors: c.DeviceErrors, LinkDowns: c.LinkDowns, Timeouts: c.Timeouts,
		ARPRequests: c.ARPRequests, ARPReplies: c.ARPReplies, ARPConflicts: c.ARPConflicts,
		NDSolicits: c.NDSolicits, NDAdverts: c.NDAdverts, EchoReplies: c.EchoReplies,
		IGMPReports: c.IGMPReports, MLDReports: c.MLDReports, McastDelivered: c.McastDelivered,
		FlowDelivered: c.FlowDelivered, FlowDropped: c.FlowDropped,
		NeighboursChanged: c.NeighboursChanged, ResolveFailures: c.ResolveFailures, SingleFallbacks: c.SingleFallbacks, SuperRefused: c.SuperRefused,
		SuperProbes: c.SuperProbes, SuperProven: c.SuperProven, WindowsTold: c.WindowsTold, WindowsHeard: c.WindowsHeard,
		ResidencySent: c.ResidencySent, ResidencyReceived: c.ResidencyReceived, ResidencyPrefetches: c.ResidencyPrefetches,
		HandedOver: c.HandedOver, HandoverLost: c.HandoverLost, SuperAsking: asking,
	}
	for i, s := range d.shards {
		st.Wakeups += s.bg.wakeups.Load()
		st.Kicks += s.bg.kicks.Load()
		if r, ok := d.devs[i].(tap.StatsReader); ok {
			st.Tap.Add(r.Stats())
		}
	}
	return st
}

// Protocol gives the protocol's counters, which move while they are read; with several
// queues it is their sums that one gets, and those do not.
func (d *Device) Protocol() *qp.Stats {
	if len(d.shards) == 1 {
		return &d.sh.stats
	}
	sum := new(qp.Stats)
	for _, s := range d.shards {
		sum.Add(&s.stats)
	}
	return sum
}
