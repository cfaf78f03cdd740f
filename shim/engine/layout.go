// SPDX-License-Identifier: Apache-2.0

package main

// #include "ring.h"
// #include "engine.h"
import "C"

import (
	"unsafe"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

func asQPN(n C.uint32_t) wire.QPN { return wire.QPN(n) }
func asPSN(n C.uint32_t) wire.PSN { return wire.PSN(n & wire.PSNMask) }

// The rings' layout as qp/ring.go and shim/verbs/ring.h have it. Where the two
// differ, the array types do, and this does not compile.
var (
	_ [C.TV_RING_PROD]byte   = [qp.RingProdOffset]byte{}
	_ [C.TV_RING_CONS]byte   = [qp.RingConsOffset]byte{}
	_ [C.TV_RING_ARM]byte    = [qp.RingArmOffset]byte{}
	_ [C.TV_RING_STATE]byte  = [qp.RingStateOffset]byte{}
	_ [C.TV_RING_COUNT]byte  = [qp.RingCountOffset]byte{}
	_ [C.TV_RING_STRIDE]byte = [qp.RingStrideOffset]byte{}
	_ [C.TV_RING_SLOTS]byte  = [qp.RingSlotsOffset]byte{}

	_ [C.TV_ARM_NONE]byte      = [qp.ArmNone]byte{}
	_ [C.TV_ARM_ANY]byte       = [qp.ArmAny]byte{}
	_ [C.TV_ARM_SOLICITED]byte = [qp.ArmSolicited]byte{}
	_ [C.TV_STATE_RTR]byte     = [qp.StateRTR]byte{}
	_ [C.TV_STATE_ERR]byte     = [qp.StateErr]byte{}

	_ [C.TV_BELL_TOP]byte      = [provider.BellTopOffset]byte{}
	_ [C.TV_BELL_PATIENT]byte  = [provider.BellPatientOffset]byte{}
	_ [C.TV_BELL_POLLS]byte    = [provider.BellPollsOffset]byte{}
	_ [C.TV_BELL_SEEN]byte     = [provider.BellSeenOffset]byte{}
	_ [C.TV_BELL_LEFT]byte     = [provider.BellLeftOffset]byte{}
	_ [C.TV_BELL_MID]byte      = [provider.BellMidOffset]byte{}
	_ [C.TV_BELL_LEAF]byte     = [provider.BellLeafOffset]byte{}
	_ [C.TV_BELL_MAX_LEFT]byte = [provider.BellMaxLeft]byte{}

	_ [-C.TV_LEAD_NOT]byte   = [-provider.LeadNot]byte{}
	_ [-C.TV_LEAD_READY]byte = [-provider.LeadReady]byte{}

	_ [C.sizeof_struct_tv_sge]byte      = [unsafe.Sizeof(qp.SGE{})]byte{}
	_ [C.sizeof_struct_tv_send_wqe]byte = [qp.SendWQESize]byte{}
	_ [C.sizeof_struct_tv_recv_wqe]byte = [qp.RecvWQESize]byte{}
	_ [C.sizeof_struct_tv_cqe]byte      = [unsafe.Sizeof(qp.CQE{})]byte{}
)

// field is a field's place in a struct: its offset and size in bytes.
type field [2]uintptr

// layout lists the fields of the structs in rings, by their names in C: as C has
// them, and as Go has them. A test compares the two.
func layout() (names []string, c, g []field) {
	add := func(name string, cOff, cSize, gOff, gSize uintptr) {
		names = append(names, name)
		c, g = append(c, field{cOff, cSize}), append(g, field{gOff, gSize})
	}
	{
		var a C.struct_tv_sge
		var b qp.SGE
		add("sge.addr", unsafe.Offsetof(a.addr), unsafe.Sizeof(a.addr), unsafe.Offsetof(b.Addr), unsafe.Sizeof(b.Addr))
		add("sge.length", unsafe.Offsetof(a.length), unsafe.Sizeof(a.length), unsafe.Offsetof(b.Length), unsafe.Sizeof(b.Length))
		add("sge.lkey", unsafe.Offsetof(a.lkey), unsafe.Sizeof(a.lkey), unsafe.Offsetof(b.LKey), unsafe.Sizeof(b.LKey))
	}
	{
		var a C.struct_tv_send_wqe
		var b qp.SendWQE
		add("send_wqe.id", unsafe.Offsetof(a.id), unsafe.Sizeof(a.id), unsafe.Offsetof(b.ID), unsafe.Sizeof(b.ID))
		add("send_wqe.opcode", unsafe.Offsetof(a.opcode), unsafe.Sizeof(a.opcode), unsafe.Offsetof(b.Opcode), unsafe.Sizeof(b.Opcode))
		add("send_wqe.flags", unsafe.Offsetof(a.flags), unsafe.Sizeof(a.flags), unsafe.Offsetof(b.Flags), unsafe.Sizeof(b.Flags))
		add("send_wqe.num_sge", unsafe.Offsetof(a.num_sge), unsafe.Sizeof(a.num_sge), unsafe.Offsetof(b.NumSGE), unsafe.Sizeof(b.NumSGE))
		add("send_wqe.imm_or_key", unsafe.Offsetof(a.imm_or_key), unsafe.Sizeof(a.imm_or_key), unsafe.Offsetof(b.ImmOrKey), unsafe.Sizeof(b.ImmOrKey))
		add("send_wqe.remote_addr", unsafe.Offsetof(a.remote_addr), unsafe.Sizeof(a.remote_addr), unsafe.Offsetof(b.RemoteAddr), unsafe.Sizeof(b.RemoteAddr))
		add("send_wqe.rkey", unsafe.Offsetof(a.rkey), unsafe.Sizeof(a.rkey), unsafe.Offsetof(b.RKey), unsafe.Sizeof(b.RKey))
		add("send_wqe.length", unsafe.Offsetof(a.length), unsafe.Sizeof(a.length), unsafe.Offsetof(b.Length), unsafe.Sizeof(b.Length))
		add("send_wqe.compare_add", unsafe.Offsetof(a.compare_add), unsafe.Sizeof(a.compare_add), unsafe.Offsetof(b.CompareAdd), unsafe.Sizeof(b.CompareAdd))
		add("send_wqe.swap", unsafe.Offsetof(a.swap), unsafe.Sizeof(a.swap), unsafe.Offsetof(b.Swap), unsafe.Sizeof(b.Swap))
		add("send_wqe.ah", unsafe.Offsetof(a.ah), unsafe.Sizeof(a.ah), unsafe.Offsetof(b.AH), unsafe.Sizeof(b.AH))
		add("send_wqe.dest_qpn", unsafe.Offsetof(a.dest_qpn), unsafe.Sizeof(a.dest_qpn), unsafe.Offsetof(b.DestQPN), unsafe.Sizeof(b.DestQPN))
		add("send_wqe.qkey", unsafe.Offsetof(a.qkey), unsafe.Sizeof(a.qkey), unsafe.Offsetof(b.QKey), unsafe.Sizeof(b.QKey))
		add("send_wqe.srqn", unsafe.Offsetof(a.srqn), unsafe.Sizeof(a.srqn), unsafe.Offsetof(b.SRQN), unsafe.Sizeof(b.SRQN))
	}
	{
		var a C.struct_tv_recv_wqe
		var b qp.RecvWQE
		add("recv_wqe.id", unsafe.Offsetof(a.id), unsafe.Sizeof(a.id), unsafe.Offsetof(b.ID), unsafe.Sizeof(b.ID))
		add("recv_wqe.num_sge", unsafe.Offsetof(a.num_sge), unsafe.Sizeof(a.num_sge), unsafe.Offsetof(b.NumSGE), unsafe.Sizeof(b.NumSGE))
	}
	{
		var a C.struct_tv_cqe
		var b qp.CQE
		add("cqe.id", unsafe.Offsetof(a.id), unsafe.Sizeof(a.id), unsafe.Offsetof(b.ID), unsafe.Sizeof(b.ID))
		add("cqe.status", unsafe.Offsetof(a.status), unsafe.Sizeof(a.status), unsafe.Offsetof(b.Status), unsafe.Sizeof(b.Status))
		add("cqe.opcode", unsafe.Offsetof(a.opcode), unsafe.Sizeof(a.opcode), unsafe.Offsetof(b.Opcode), unsafe.Sizeof(b.Opcode))
		add("cqe.flags", unsafe.Offsetof(a.flags), unsafe.Sizeof(a.flags), unsafe.Offsetof(b.Flags), unsafe.Sizeof(b.Flags))
		add("cqe.vendor_err", unsafe.Offsetof(a.vendor_err), unsafe.Sizeof(a.vendor_err), unsafe.Offsetof(b.VendorErr), unsafe.Sizeof(b.VendorErr))
		add("cqe.byte_len", unsafe.Offsetof(a.byte_len), unsafe.Sizeof(a.byte_len), unsafe.Offsetof(b.ByteLen), unsafe.Sizeof(b.ByteLen))
		add("cqe.imm_or_key", unsafe.Offsetof(a.imm_or_key), unsafe.Sizeof(a.imm_or_key), unsafe.Offsetof(b.ImmOrKey), unsafe.Sizeof(b.ImmOrKey))
		add("cqe.qpn", unsafe.Offsetof(a.qpn), unsafe.Sizeof(a.qpn), unsafe.Offsetof(b.QPN), unsafe.Sizeof(b.QPN))
		add("cqe.src_qp", unsafe.Offsetof(a.src_qp), unsafe.Sizeof(a.src_qp), unsafe.Offsetof(b.SrcQP), unsafe.Sizeof(b.SrcQP))
		add("cqe.timestamp", unsafe.Offsetof(a.timestamp), unsafe.Sizeof(a.timestamp), unsafe.Offsetof(b.Timestamp), unsafe.Sizeof(b.Timestamp))
		add("cqe.user_qp", unsafe.Offsetof(a.user_qp), unsafe.Sizeof(a.user_qp), unsafe.Offsetof(b.UserQP), unsafe.Sizeof(b.UserQP))
		add("cqe.pkey_index", unsafe.Offsetof(a.pkey_index), unsafe.Sizeof(a.pkey_index), unsafe.Offsetof(b.PKeyIndex), unsafe.Sizeof(b.PKeyIndex))
		add("cqe.slid", unsafe.Offsetof(a.slid), unsafe.Sizeof(a.slid), unsafe.Offsetof(b.SLID), unsafe.Sizeof(b.SLID))
		add("cqe.sl", unsafe.Offsetof(a.sl), unsafe.Sizeof(a.sl), unsafe.Offsetof(b.SL), unsafe.Sizeof(b.SL))
		add("cqe.path_bits", unsafe.Offsetof(a.path_bits), unsafe.Sizeof(a.path_bits), unsafe.Offsetof(b.PathBits), unsafe.Sizeof(b.PathBits))
		add("cqe.flow_tag", unsafe.Offsetof(a.flow_tag), unsafe.Sizeof(a.flow_tag), unsafe.Offsetof(b.FlowTag), unsafe.Sizeof(b.FlowTag))
	}
	return names, c, g
}
