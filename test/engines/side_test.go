// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"fmt"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// iovas of the registrations of a side's memory; the first is its address. The
// second is no page's beginning, and both keep words aligned.
var iovas = [aliases]uint64{1: 0x7_0001_2345_6008}

const allRights = mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead | mr.RemoteAtomic | mr.FlushGlobal

// keys are what the peer must know of a side's memory.
type keys struct {
	Base [aliases]uint64
	Key  [aliases]mr.Key
	Inv  []mr.Key
}

// side carries out one half of a plan.
type side struct {
	half
	base  [zones]int
	qp    *provider.QP
	cq    *provider.CQ
	mem   []byte
	own   keys
	peer  keys
	regs  []*provider.MR
	depth int // work requests that may be outstanding
	recvs int // receives that may be posted; few cause RNR NAKs
	// Of XRC: the QP that receives, where receives are posted, and the peer's SRQ.
	target *provider.QP
	srq    *provider.SRQ
	srqn   uint32

	posted, retired int // of sends; retired counts those before the last completion too
	offered, taken  int // of receives
	wcs             []qp.WC
}

// newSide registers memory that is at least as long as the half's layout, in all
// the ways the plan uses, and writes the plan's first content to it. free ends the
// registrations.
func newSide(h *half, resident bool, pd *provider.PD, q *provider.QP, cq *provider.CQ, mem []byte, addr uintptr) (s *side, free func() error, err error) {
	s = &side{half: *h, qp: q, cq: cq, mem: mem, depth: 16, recvs: 64, wcs: make([]qp.WC, 32)}
	var size int
	s.base, size = h.layout()
	s.mem = mem[:size]
	for z := range zones {
		if z == source || resident {
			copy(s.mem[s.base[z]:], h.start[z])
		}
	}
	free = func() error {
		for _, r := range s.regs {
			if err := r.Dereg(); err != nil {
				return err
			}
		}
		return nil
	}
	register := func(a provider.MRAttr) (mr.Key, error) {
		r, err := pd.Register(a)
		if err != nil {
			return 0, err
		}
		s.regs = append(s.regs, r)
		return r.RKey(), nil
	}
	for i := range aliases {
		a := provider.MRAttr{Addr: addr, Length: uint64(size), Access: allRights}
		s.own.Base[i] = uint64(addr)
		if i > 0 {
			a.IOVA, a.HaveIOVA, s.own.Base[i] = iovas[i], true, iovas[i]
		}
		if s.own.Key[i], err = register(a); err != nil {
			return s, free, err
		}
	}
	for range h.invKeys {
		k, err := register(provider.MRAttr{Addr: addr + uintptr(s.base[target]), Length: targetLen, Access: allRights, Invalidatable: true})
		if err != nil {
			return s, free, err
		}
		s.own.Inv = append(s.own.Inv, k)
	}
	return s, free, nil
}

func (s *side) list(ps []piece) []qp.SGE {
	var l []qp.SGE
	for _, p := range ps {
		l = append(l, qp.SGE{Addr: s.own.Base[p.alias] + uint64(s.base[p.z]+p.off), Length: uint32(p.n), LKey: s.own.Key[p.alias]})
	}
	return l
}

// held is what a list's places hold now, up to n bytes.
func (s *side) held(ps []piece, n int) (b []byte) {
	for _, p := range ps {
		at := s.base[p.z] + p.off
		b = append(b, s.mem[at:at+p.n]...)
	}
	return b[:min(n, len(b))]
}

// offer posts as many receives as may be posted.
func (s *side) offer() error {
	for s.offered < len(s.half.recvs) && s.offered-s.taken < s.recvs {
		wr := qp.RecvWR{ID: uint64(s.offered), SGL: s.list(s.half.recvs[s.offered].list)}
		post := s.qp.PostRecv
		if s.srq != nil {
			post = s.srq.PostRecv
		}
		if _, err := post([]qp.RecvWR{wr}); err != nil {
			return fmt.Errorf("post receive %d: %w", s.offered, err)
		}
		s.offered++
	}
	return nil
}

func (s *side) post() error {
	if err := s.offer(); err != nil {
		return err
	}
	var wrs []qp.SendWR
	for s.posted+len(wrs) < len(s.sends) && s.posted+len(wrs)-s.retired < s.depth {
		i := s.posted + len(wrs)
		p := &s.sends[i]
		wr := qp.SendWR{ID: uint64(i), Opcode: p.op, Flags: p.flags, Imm: p.imm, CompareAdd: p.add, Swap: p.swap,
			Inline: p.inline, SGL: s.list(p.list), Flush: p.flush, RemoteSRQN: s.srqn}
		if p.op == qp.WRSendInv {
			wr.InvKey = s.peer.Inv[p.inv]
		}
		// The layout of both sides differs behind the target only.
		wr.RemoteAddr = s.peer.Base[p.remote.alias] + uint64(s.base[p.remote.z]+p.remote.off)
		wr.RKey = s.peer.Key[p.remote.alias]
		wrs = append(wrs, wr)
	}
	if len(wrs) == 0 {
		return nil
	}
	n, err := s.qp.PostSend(wrs)
	s.posted += n
	if err != nil {
		return fmt.Errorf("post send %d: %w", s.posted, err)
	}
	return nil
}

// done says whether every work request has completed.
func (s *side) done() bool { return s.retired == len(s.sends) && s.taken == len(s.half.recvs) }

// pump posts what may be posted and takes what has completed. It returns an error
// as soon as anything is not as planned.
func (s *side) pump() error {
	for {
		if err := s.post(); err != nil {
			return err
		}
		n := s.cq.Poll(s.wcs)
		for i := range n {
			if err := s.complete(&s.wcs[i]); err != nil {
				return fmt.Errorf("%w (completion %+v)", err, s.wcs[i])
			}
		}
		if n == 0 {
			return nil
		}
	}
}

func (s *side) complete(wc *qp.WC) error {
	q := s.qp
	if s.target != nil && wc.Opcode&qp.WCRecv != 0 {
		q = s.target
	}
	switch {
	case wc.Status != qp.WCSuccess:
		return fmt.Errorf("completed with %v", wc.Status)
	case wc.QPN != q.Num():
		return fmt.Errorf("completion of QP %d, want %d", wc.QPN, q.Num())
	case wc.Opcode&qp.WCRecv != 0:
		return s.received(wc)
	}
	return s.sent(wc)
}

var wcOf = map[qp.WROpcode]qp.WCOpcode{qp.WRSend: qp.WCSend, qp.WRSendImm: qp.WCSend, qp.WRSendInv: qp.WCSend,
	qp.WRWrite: qp.WCRDMAWrite, qp.WRWriteImm: qp.WCRDMAWrite, qp.WRRead: qp.WCRDMARead,
	qp.WRAtomicCmpSwap: qp.WCCompSwap, qp.WRAtomicFetchAdd: qp.WCFetchAdd,
	qp.WRFlush: qp.WCFlush, qp.WRAtomicWrite: qp.WCAtomicWrite}

// sent checks a completion of the send queue: the next signalled one, once, with
// the data of all requests up to it in place.
func (s *side) sent(wc *qp.WC) error {
	i := s.retired
	for i < s.posted && s.sends[i].flags&qp.SendSignaled == 0 {
		i++
	}
	switch {
	case i == s.posted:
		return fmt.Errorf("send completion %d, but nothing is outstanding", wc.ID)
	case wc.ID != uint64(i):
		return fmt.Errorf("send completion %d out of order, want %d", wc.ID, i)
	case wc.Opcode != wcOf[s.sends[i].op]:
		return fmt.Errorf("send completion %d has opcode %d, want %d", i, wc.Opcode, wcOf[s.sends[i].op])
	}
	for ; s.retired <= i; s.retired++ {
		p := &s.sends[s.retired]
		if p.want == nil {
			continue
		}
		if s.retired == i && int(wc.ByteLen) != p.n {
			return fmt.Errorf("send completion %d of %d bytes, want %d", i, wc.ByteLen, p.n)
		}
		if got := s.held(p.list, p.n); !bytes.Equal(got, p.want) {
			return fmt.Errorf("work request %d (opcode %d, %d bytes, remote %+v) brought wrong data, first at byte %d",
				s.retired, p.op, p.n, p.remote, differ(got, p.want))
		}
	}
	return nil
}

// received checks a completion of the receive queue.
func (s *side) received(wc *qp.WC) error {
	if s.taken == s.offered {
		return fmt.Errorf("receive completion %d, but nothing is outstanding", wc.ID)
	}
	a := &s.half.recvs[s.taken]
	switch {
	case wc.ID != uint64(s.taken):
		return fmt.Errorf("receive completion %d out of order, want %d", wc.ID, s.taken)
	case wc.Opcode != a.op || int(wc.ByteLen) != a.n || wc.Flags&(qp.WCWithImm|qp.WCWithInv) != a.has:
		return fmt.Errorf("receive %d, want opcode %d, %d bytes, flags %d", s.taken, a.op, a.n, a.has)
	case a.has == qp.WCWithImm && wc.Imm != a.imm:
		return fmt.Errorf("receive %d has immediate %#x, want %#x", s.taken, wc.Imm, a.imm)
	case a.has == qp.WCWithInv && wc.InvKey != s.own.Inv[a.inv]:
		return fmt.Errorf("receive %d invalidated %#x, want %#x", s.taken, wc.InvKey, s.own.Inv[a.inv])
	}
	if got := s.held(a.list, a.n); !bytes.Equal(got, a.want) {
		return fmt.Errorf("receive %d of %d bytes has wrong data, first at byte %d", s.taken, a.n, differ(got, a.want))
	}
	s.taken++
	return nil
}

// check compares all of the side's memory with the model's.
func (s *side) check() error {
	for z := range zones {
		got := s.mem[s.base[z]:][:len(s.half.mem[z])]
		if !bytes.Equal(got, s.half.mem[z]) {
			return fmt.Errorf("zone %d is not as planned, first at byte %d of %d", z, differ(got, s.half.mem[z]), len(got))
		}
	}
	return nil
}

func differ(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

// faults is how many pages requests found absent, of several sides' memory.
func faults(ss []*side) (n uint64) {
	for _, s := range ss {
		for _, r := range s.regs {
			n += r.Stats().PageFaults
		}
	}
	return n
}
