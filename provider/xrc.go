// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// Extended reliable connections (IBA A14): XRC domains, their SRQs, and target QPs,
// of which applications hold handles. All of it belongs to one device, so it is
// shared among the contexts of one process.

// XRCDAttr says which XRC domain to open (struct ibv_xrcd_init_attr).
type XRCDAttr struct {
	// FD is a file that stands for the domain: who names the same file gets the
	// same domain. -1 is a domain of its own. The file is never read.
	FD int
	// Create makes the domain if the file has none, Exclusive refuses one that is
	// there: O_CREAT and O_EXCL.
	Create, Exclusive bool
}

// inode tells files apart.
type inode struct{ dev, ino uint64 }

// xrcDomain is an XRC domain; guarded by d.mu.
type xrcDomain struct {
	num     qp.XRCD
	file    inode
	pin     int // keeps the file's inode number from being given to another one; -1: no file
	opens   int
	targets map[wire.QPN]*QP
}

// XRCD is an opened XRC domain (ibv_open_xrcd(3)).
type XRCD struct {
	d    *Device
	dom  *xrcDomain
	refs int // SRQs and QPs made with it; guarded by d.mu
	dead bool
}

// ErrNoXRCD: the file has no XRC domain, and none is to be made (EAGAIN, as the
// kernel has it).
var ErrNoXRCD error = &codeError{"no XRC domain for this file", unix.EAGAIN}

// OpenXRCD opens an XRC domain (ibv_open_xrcd(3)). Errors: EBADF for a descriptor
// that is none, ErrNoXRCD, ErrInvalid for one that is there and should not be,
// ErrNoMem at the device's limit.
func (d *Device) OpenXRCD(a XRCDAttr) (*XRCD, error) {
	if err := d.alive(); err != nil {
		return nil, err
	}
	var file inode
	if a.FD != -1 {
		var st unix.Stat_t
		if err := unix.Fstat(a.FD, &st); err != nil {
			return nil, fmt.Errorf("file of an XRC domain: %w", err)
		}
		file = inode{st.Dev, st.Ino}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed.Load() { // since alive looked
		return nil, ErrClosed
	}
	var dom *xrcDomain
	if a.FD != -1 {
		dom = d.xrcFiles[file]
		switch {
		case dom == nil && !a.Create:
			return nil, ErrNoXRCD
		case dom != nil && a.Exclusive:
			return nil, fmt.Errorf("the file has an XRC domain already: %w", ErrInvalid)
		}
	}
	if len(d.xrcds) >= maxXRCD {
		return nil, fmt.Errorf("%d XRC domains: %w", maxXRCD, ErrNoMem)
	}
	if dom == nil {
		dom = &xrcDomain{file: file, pin: -1, targets: map[wire.QPN]*QP{}}
		if a.FD != -1 {
			// A path descriptor: closing it leaves the file's locks alone.
			var err error
			if dom.pin, err = unix.Open("/proc/self/fd/"+strconv.Itoa(a.FD), unix.O_PATH|unix.O_CLOEXEC, 0); err != nil {
				return nil, fmt.Errorf("file of an XRC domain: %w", err)
			}
			d.xrcFiles[file] = dom
		}
		d.nextXRCD++
		dom.num = d.nextXRCD
	}
	dom.opens++
	x := &XRCD{d: d, dom: dom}
	d.xrcds[x] = struct{}{}
	return x, nil
}

// Close closes the domain; with the last who has it open it ends
// (ibv_close_xrcd(3)). ErrBusy while SRQs and QPs exist that were made with x,
// ErrClosed twice.
func (x *XRCD) Close() error {
	d := x.d
	if d.closed.Load() {
		return ErrClosed
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case x.dead:
		return ErrClosed
	case x.refs > 0:
		return fmt.Errorf("XRC domain has %d objects: %w", x.refs, ErrBusy)
	}
	return x.teardown()
}

// teardown is called with d.mu held.
func (x *XRCD) teardown() error {
	x.dead = true
	delete(x.d.xrcds, x)
	dom := x.dom
	if dom.opens--; dom.opens > 0 || dom.pin < 0 {
		return nil
	}
	delete(x.d.xrcFiles, dom.file)
	return unix.Close(dom.pin)
}

// ref is called with d.mu held by those who make an object in the domain.
func (x *XRCD) ref(d *Device) error {
	switch {
	case x == nil || x.d != d:
		return fmt.Errorf("XRC domain: %w", ErrInvalid)
	case x.dead || d.closed.Load():
		return fmt.Errorf("XRC domain: %w", ErrClosed)
	}
	x.refs++
	return nil
}

// CreateXRCSRQ makes an SRQ like CreateSRQ, for the target QPs of an XRC domain;
// what is received with it completes to cq (ibv_create_srq_ex(3)). Its Num is what
// the other side names it by. Besides the errors of CreateSRQ: ErrInvalid and
// ErrClosed for x and cq.
func (p *PD) CreateXRCSRQ(a SRQAttr, x *XRCD, cq *CQ) (*SRQ, error) {
	if x == nil || cq == nil || x.d != p.d || cq.d != p.d {
		return nil, fmt.Errorf("an SRQ of XRC needs an XRC domain and a CQ of its device: %w", ErrInvalid)
	}
	return p.createSRQ(a, x, cq)
}

// join takes the domain's and the CQ's side of a new SRQ of XRC; d.mu is held.
func (s *SRQ) join() error {
	if s.cq.dead.Load() {
		return fmt.Errorf("CQ: %w", ErrClosed)
	}
	if err := s.xrcd.ref(s.pd.d); err != nil {
		return err
	}
	sh := s.pd.d.sh
	sh.lock()
	s.num = sh.srqs.add(s)
	if s.cq.overrun.Load() { // it takes no more completions: see srqTable.fail
		s.q.Fail()
	}
	sh.release()
	s.cq.feed(sh, 1)
	return nil
}

// leave is the end of join.
func (s *SRQ) leave() {
	s.pd.d.sh.srqs.remove(s)
	s.xrcd.refs--
	s.cq.feed(s.pd.d.sh, -1)
}

// Num is the number of an SRQ of XRC (ibv_get_srq_num(3)); ErrInvalid for others.
func (s *SRQ) Num() (uint32, error) {
	if s.xrcd == nil {
		return 0, fmt.Errorf("SRQ is not of XRC: %w", ErrInvalid)
	}
	return s.num, nil
}

// srqTable finds SRQs of XRC by their numbers: 16 bits of index, from 1, and a
// generation of 8 above them, as QPs have. It belongs to the holder of the baton.
type srqTable struct {
	table []*SRQ
	gens  []uint8
	free  []uint16
}

// add gives the SRQ a number; there are more indices than maxSRQ.
func (t *srqTable) add(s *SRQ) uint32 {
	if len(t.table) == 0 {
		t.table, t.gens = make([]*SRQ, 1), make([]uint8, 1)
	}
	var i uint16
	if len(t.free) > reuseAfter || len(t.table) > maxSRQ {
		i, t.free = t.free[0], t.free[1:]
		t.gens[i]++
	} else {
		i = uint16(len(t.table))
		t.table, t.gens = append(t.table, nil), append(t.gens, 0)
	}
	t.table[i] = s
	return uint32(t.gens[i])<<16 | uint32(i)
}

func (t *srqTable) remove(s *SRQ) {
	i := uint16(s.num)
	t.table[i] = nil
	t.free = append(t.free, i)
}

// find is Env.SRQ.
func (t *srqTable) find(num uint32) *qp.SRQ {
	i := int(num & 0xffff)
	if i >= len(t.table) || t.table[i] == nil || t.table[i].num != num {
		return nil
	}
	return t.table[i].q
}

// fail puts the SRQs that complete to a CQ which overflowed into the error state:
// what they receive can not be reported any more.
func (t *srqTable) fail(c *CQ) {
	for _, s := range t.table {
		if s != nil && s.cq == c {
			s.q.Fail()
			s.pd.d.events.put(&asyncEvent{Event: Event{Type: qp.EventSRQErr, SRQ: s}, acks: &s.asyncs})
		}
	}
}

// CreateQP makes a target QP in the domain (ibv_create_qp_ex(3), IBV_QPT_XRC_RECV)
// and gives the first handle of it. Of in, only Type and Context are looked at: it has
// neither CQs nor queues. ErrInvalid for another type, ErrNoMem at MaxQP.
func (x *XRCD) CreateQP(in QPInitAttr) (*QP, error) {
	d := x.d
	if err := d.alive(); err != nil {
		return nil, err
	}
	if in.Type != qp.TypeXRCRecv {
		return nil, fmt.Errorf("a QP of type %v in an XRC domain: %w", in.Type, ErrInvalid)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := x.ref(d); err != nil {
		return nil, err
	}
	t := &QP{s: d.sh, xrcd: x, init: QPInitAttr{Type: in.Type}, timerPos: -1, timerAt: qp.Never}
	if err := t.open(qp.Caps{}); err != nil {
		x.refs--
		return nil, fmt.Errorf("create QP: %w", err)
	}
	x.dom.targets[t.num] = t
	return t.handle(x, in.Context), nil
}

// OpenQP gives another handle of a target QP of the domain (ibv_open_qp(3)). Events
// of the QP go to every handle; the QP ends when the last one is destroyed. ErrInvalid
// if the domain has no such QP.
func (x *XRCD) OpenQP(num wire.QPN, context any) (*QP, error) {
	d := x.d
	if err := d.alive(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	t := x.dom.targets[num]
	if t == nil {
		return nil, fmt.Errorf("no QP %#x in the XRC domain: %w", uint32(num), ErrInvalid)
	}
	if err := x.ref(d); err != nil {
		return nil, err
	}
	return t.handle(x, context), nil
}

// handle makes a handle of a target; d.mu is held, and x is referenced.
func (q *QP) handle(x *XRCD, context any) *QP {
	h := &QP{s: q.s, q: q.q, num: q.num, init: q.init, xrcd: x, target: q, timerPos: -1, timerAt: qp.Never}
	h.init.Context = context
	h.asyncs.init()
	q.s.lock()
	q.handles = append(q.handles, h)
	q.s.release()
	q.s.d.qps[h] = struct{}{}
	return h
}

// base is the QP itself, which the engine works with: not a handle of it.
func (q *QP) base() *QP {
	if q.target != nil {
		return q.target
	}
	return q
}

// drop is the end of a handle, and of its QP if it was the last; d.mu is held.
func (q *QP) drop() error {
	q.dead.Store(true)
	t := q.target
	q.s.lock()
	t.handles = slices.DeleteFunc(t.handles, func(h *QP) bool { return h == q })
	last := len(t.handles) == 0
	q.s.release()
	q.s.d.events.remove(func(e *asyncEvent) bool { return e.QP == q })
	var err error
	if last {
		delete(q.xrcd.dom.targets, q.num)
		err = t.end()
	}
	q.xrcd.refs--
	if err != nil {
		return errors.Join(fmt.Errorf("destroy QP %#x", uint32(q.num)), err)
	}
	return nil
}
