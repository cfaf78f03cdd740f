// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/wire"
)

// A Filter does something to the frames that the bridge hands to one port, before the engine
// there gets them: a program of the kernel's traffic control (tc-bpf(8)), at the egress of the
// port's clsact qdisc, where super-frames are still whole.
type Filter struct {
	t     testing.TB
	count *ebpf.Map
	prog  *ebpf.Program
	nl    *netlink.Handle
	qdisc netlink.Qdisc
}

// FilterKind is what a Filter does.
type FilterKind uint8

const (
	// DropLong drops frames that are longer than the port's MTU: super-frames.
	DropLong FilterKind = iota
	// Mark sets CE in packets that may be marked (RFC 3168), in all of a super-frame.
	Mark
)

// tcOK and tcShot are verdicts: TC_ACT_OK and TC_ACT_SHOT of linux/pkt_cls.h.
const tcOK, tcShot = 0, 2

// Filter begins to do something to the frames for port i. It ends with the test, or when removed.
func (p *TAPs) Filter(i int, kind FilterKind) *Filter {
	p.T.Helper()
	f := &Filter{t: p.T, nl: p.nl}
	count, err := ebpf.NewMap(&ebpf.MapSpec{Name: "tv_count", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	f.count = must(p.T, count, err)
	p.T.Cleanup(func() { f.count.Close() })
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "tv_filter", Type: ebpf.SchedCLS, License: "Apache-2.0", Instructions: f.program(kind, p.Ports[i].MTU),
	})
	f.prog = must(p.T, prog, err)
	p.T.Cleanup(func() { f.prog.Close() })
	link, err := p.nl.LinkByName(p.Ports[i].Name)
	at := netlink.QdiscAttrs{LinkIndex: must(p.T, link, err).Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}
	f.qdisc = &netlink.GenericQdisc{QdiscAttrs: at, QdiscType: "clsact"}
	if err := p.nl.QdiscAdd(f.qdisc); err != nil {
		p.T.Fatalf("clsact at %s: %v", p.Ports[i].Name, err)
	}
	if err := p.nl.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: at.LinkIndex, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1},
		Fd:          f.prog.FD(), Name: fmt.Sprintf("%s-%d", p.Ports[i].Name, kind), DirectAction: true,
	}); err != nil {
		p.T.Fatalf("filter at %s: %v", p.Ports[i].Name, err)
	}
	return f
}

// Hits is how many frames it did something to.
func (f *Filter) Hits() (n uint64) {
	f.t.Helper()
	if err := f.count.Lookup(uint32(0), &n); err != nil {
		f.t.Fatal(err)
	}
	return n
}

// Remove ends it.
func (f *Filter) Remove() {
	f.t.Helper()
	if err := f.nl.QdiscDel(f.qdisc); err != nil {
		f.t.Fatal(err)
	}
}

func (f *Filter) program(kind FilterKind, mtu int) asm.Instructions {
	var is asm.Instructions
	verdict := int32(tcOK)
	switch kind {
	case DropLong:
		verdict = tcShot
		is = asm.Instructions{
			asm.LoadMem(asm.R0, asm.R1, 0, asm.Word), // __sk_buff.len
			asm.JLE.Imm(asm.R0, int32(mtu+wire.EthLen), "pass"),
		}
	case Mark:
		is = asm.Instructions{
			asm.FnSkbEcnSetCe.Call(),
			asm.JEq.Imm(asm.R0, 0, "pass"), // not capable
		}
	}
	return append(is,
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, f.count.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "pass"),
		asm.Mov.Imm(asm.R1, 1),
		asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, 0),
		asm.Mov.Imm(asm.R0, verdict),
		asm.Return(),
		asm.Mov.Imm(asm.R0, tcOK).WithSymbol("pass"),
		asm.Return(),
	)
}
