// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"encoding/binary"
	"time"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// Limits of a device. Each is enforced where the object is made.
const (
	maxQPWR     = 1 << 15
	maxSGE      = 32
	maxInline   = 1024
	maxCQ       = 1 << 16
	maxCQE      = 1 << 22
	maxMR       = 1 << 20 // of 2^24 handles, so that keys stay sparse
	maxMRSize   = 1 << 46
	maxMW       = 1 << 20
	maxPD       = 1 << 16
	maxSRQ      = 1<<16 - 1 // those of XRC are numbered from 1, with 16 bits
	maxSRQWR    = 1 << 15
	maxXRCD     = 1 << 16
	maxAH       = 1 << 16
	maxGIDs     = 128
	maxRdAtomic = 128
	maxMsgSize  = 1 << 31 // IBA 9.7.7: 2 GiB

	// Of CQ.Moderate, which ibv_modify_cq(3) gives as 16 bits and microseconds.
	maxCQModCount  = 1<<16 - 1
	maxCQModPeriod = (1<<16 - 1) * time.Microsecond

	maxMcastGrp      = 8192
	maxMcastQPAttach = 64
	maxMcastAttach   = 1 << 16
)

// AtomicCap says among whom atomics are atomic, with the values of enum
// ibv_atomic_cap.
type AtomicCap uint8

// AtomicGlob: atomics use the processor's own, so they are atomic against
// everything, the application included (IBA 9.4.5).
const AtomicGlob AtomicCap = 2

// DeviceAttr is what the device is and can do at most (struct ibv_device_attr).
// All limits hold: beyond them calls fail.
type DeviceAttr struct {
	NodeGUID     uint64 // EUI-64 of the MAC
	SysImageGUID uint64
	MaxMRSize    uint64 // bytes
	PageSizeCap  uint64 // bit mask of page sizes in bytes
	MaxQP        int
	MaxQPWR      int // work requests in a send or receive queue
	MaxSGE       int // per work request
	MaxInline    int // bytes
	MaxCQ        int
	MaxCQE       int // completions in a CQ
	// MaxCQModCount and MaxCQModPeriod bound CQ.Moderate.
	MaxCQModCount  int
	MaxCQModPeriod time.Duration
	MaxMR          int
	MaxMW          int // memory windows, of type 1 and 2B
	MaxPD          int
	// MaxQPRdAtom is how many READs and atomics a QP accepts from its peer at
	// once, MaxQPInitRdAtom how many it has outstanding itself.
	MaxQPRdAtom, MaxQPInitRdAtom int
	AtomicCap                    AtomicCap
	MaxAH                        int
	MaxSRQ, MaxSRQWR, MaxSRQSGE  int
	MaxPKeys                     int
	MaxDMSize                    uint64 // bytes of device memory
	// MaxMcastGrp is how many multicast groups may have QPs attached,
	// MaxMcastQPAttach how many QPs a group, MaxTotalMcastQPAttach all groups.
	MaxMcastGrp, MaxMcastQPAttach, MaxTotalMcastQPAttach int
	// LocalCAAckDelay is the device's own delay before it acknowledges:
	// 4.096 µs * 2^value.
	LocalCAAckDelay uint8
	PhysPortCnt     int
}

// PortState is a port's state, with the values of enum ibv_port_state.
type PortState uint8

// Port states.
const (
	PortDown   PortState = 1
	PortActive PortState = 4
)

// String names the state as rdma-core does.
func (s PortState) String() string {
	switch s {
	case PortDown:
		return "PORT_DOWN"
	case PortActive:
		return "PORT_ACTIVE"
	}
	return "invalid state"
}

// LinkLayerEthernet is the link layer of every port (IBV_LINK_LAYER_ETHERNET).
const LinkLayerEthernet = 2

// PortAttr describes the one port (struct ibv_port_attr).
type PortAttr struct {
	State PortState
	// MaxMTU is the largest path MTU of the protocol, ActiveMTU the largest
	// whose packets fit the TAP's MTU.
	MaxMTU, ActiveMTU qp.MTU
	GIDTblLen         int
	PKeyTblLen        int
	MaxMsgSz          uint64 // bytes
	LinkLayer         uint8
	// QKeyViolations counts datagrams dropped for their Q_Key, up to 65535 (IBA
	// 14.2.5.6, Q_KeyViolations).
	QKeyViolations uint16
}

// portOverhead is what a packet with a full payload needs in a frame besides it
// and the Ethernet header: IPv6, UDP, BTH, the longest extended headers that
// travel with payload (XRCETH, RETH, ImmDt) and the ICRC.
const portOverhead = wire.IPv6Len + wire.UDPLen + wire.BTHLen + wire.XRCETHLen + wire.RETHLen + wire.ImmDtLen + wire.ICRCLen

// activeMTU is the largest path MTU that fits a link MTU in bytes; 0 if none does.
func activeMTU(linkMTU int) qp.MTU {
	m := qp.MTU4096
	for m > 0 && m.Bytes()+portOverhead > linkMTU {
		m--
	}
	return m
}

// Query tells the device's attributes (ibv_query_device(3)).
func (d *Device) Query() DeviceAttr {
	a := linkLocal(d.mac).As16()
	guid := binary.BigEndian.Uint64(a[8:])
	return DeviceAttr{
		NodeGUID: guid, SysImageGUID: guid,
		MaxMRSize: maxMRSize, PageSizeCap: 4096,
		MaxQP: d.maxQPs(), MaxQPWR: maxQPWR, MaxSGE: maxSGE, MaxInline: maxInline,
		MaxCQ: maxCQ, MaxCQE: maxCQE, MaxCQModCount: maxCQModCount, MaxCQModPeriod: maxCQModPeriod, MaxMR: maxMR, MaxMW: maxMW, MaxPD: maxPD,
		MaxQPRdAtom: maxRdAtomic, MaxQPInitRdAtom: maxRdAtomic, AtomicCap: AtomicGlob,
		MaxAH: maxAH, MaxSRQ: maxSRQ, MaxSRQWR: maxSRQWR, MaxSRQSGE: maxSGE,
		MaxMcastGrp: maxMcastGrp, MaxMcastQPAttach: maxMcastQPAttach, MaxTotalMcastQPAttach: maxMcastAttach,
		MaxPKeys: 1, MaxDMSize: maxDMSize, LocalCAAckDelay: 15, PhysPortCnt: 1,
	}
}

// QueryPort tells the port's attributes (ibv_query_port(3)).
func (d *Device) QueryPort() PortAttr {
	return PortAttr{
		State: d.sh.portState(), MaxMTU: qp.MTU4096, ActiveMTU: d.mtu, GIDTblLen: len(d.gids.entries), PKeyTblLen: 1,
		MaxMsgSz: maxMsgSize, LinkLayer: LinkLayerEthernet,
		QKeyViolations: uint16(min(d.Protocol().QKeyViolations.Load(), 1<<16-1)),
	}
}

func (s *shard) portState() PortState {
	if s.gone.Load() || s.down.Load() {
		return PortDown
	}
	return PortActive
}
