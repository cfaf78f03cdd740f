// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/wire"
)

// steer has the kernel put each packet into the queue of the shard it is for. Where that
// is not to be had (it takes CAP_BPF, or kernel.unprivileged_bpf_disabled=0) the kernel
// spreads flows by a hash, and shards hand over what is not theirs.
func (d *Device) steer() error {
	t, ok := d.dev.(tap.Steerer)
	if !ok {
		return fmt.Errorf("port %s can not be steered: %w", d.dev.Name(), ErrNotSupported)
	}
	p, err := ebpf.NewProgramWithOptions(&ebpf.ProgramSpec{
		Name: "tapverbs_steer", Type: ebpf.SocketFilter, License: "Apache-2.0", Instructions: steering(d.shardBits),
	}, ebpf.ProgramOptions{LogDisabled: true})
	if err != nil {
		return fmt.Errorf("load the steering program: %w", err)
	}
	defer p.Close()
	return t.Steer(p.FD())
}

// steering is a program that gives the queue of a frame (TUNSETSTEERINGEBPF): the top bits
// of the index in the number of the queue pair that a RoCE packet is for, and 0 for all
// else. For a super-frame that is its first packet's. A load beyond the end ends it with 0.
func steering(shardBits uint) asm.Instructions {
	const l3 = wire.EthLen
	const ctx, l4 = asm.R6, asm.R7
	return asm.Instructions{
		asm.Mov.Reg(ctx, asm.R1), // where the loads look for it
		asm.LoadAbs(12, asm.Half),
		asm.JEq.Imm(asm.R0, etherIPv6, "ipv6"),
		asm.JNE.Imm(asm.R0, etherIPv4, "first"),

		asm.LoadAbs(l3+9, asm.Byte),
		asm.JNE.Imm(asm.R0, protoUDP, "first"),
		asm.LoadAbs(l3+6, asm.Half),
		asm.And.Imm(asm.R0, 0x1fff),
		asm.JNE.Imm(asm.R0, 0, "first"), // no first fragment
		asm.LoadAbs(l3, asm.Byte),
		asm.And.Imm(asm.R0, 0xf),
		asm.LSh.Imm(asm.R0, 2),
		asm.Mov.Reg(l4, asm.R0),
		asm.Add.Imm(l4, l3),
		asm.Ja.Label("udp"),

		asm.LoadAbs(l3+6, asm.Byte).WithSymbol("ipv6"),
		asm.JNE.Imm(asm.R0, protoUDP, "first"),
		asm.Mov.Imm(l4, l3+wire.IPv6Len),

		asm.LoadInd(asm.R0, l4, 2, asm.Half).WithSymbol("udp"),
		asm.JNE.Imm(asm.R0, wire.UDPPort, "first"),
		asm.LoadInd(asm.R0, l4, wire.UDPLen+4, asm.Word),
		asm.And.Imm(asm.R0, 0xffffff),
		asm.JEq.Imm(asm.R0, int32(wire.MulticastQPN), "first"),
		asm.And.Imm(asm.R0, 0xffff),
		asm.RSh.Imm(asm.R0, int32(16-shardBits)),
		asm.Return(),

		asm.Mov.Imm(asm.R0, 0).WithSymbol("first"),
		asm.Return(),
	}
}
