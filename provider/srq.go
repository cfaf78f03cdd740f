// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/tapverbs/tapverbs/qp"
)

// SRQAttr is what a shared receive queue is (struct ibv_srq_attr): how many work
// requests it holds, of how many elements each, and the armed limit, 0 for none.
type SRQAttr struct {
	MaxWR, MaxSGE, Limit int
}

// SRQAttrMask says which fields of an SRQAttr are meant, with the values of enum
// ibv_srq_attr_mask.
type SRQAttrMask uint32

// Masks of SRQ.Modify.
const (
	SRQMaxWR SRQAttrMask = 1 << 0
	SRQLimit SRQAttrMask = 1 << 1
)

// SRQ is a shared receive queue (IBA 10.2.9).
type SRQ struct {
	pd     *PD
	q      *qp.SRQ
	refs   int // QPs; guarded by d.mu
	dead   atomic.Bool
	asyncs acks
	s      *shard // of its QPs, the first of which has chosen it; guarded by d.mu

	// Of SRQs for XRC.
	xrcd *XRCD
	cq   *CQ
	num  uint32
}

// CreateSRQ makes a shared receive queue of at least so much (ibv_create_srq(3));
// Query says what it became. The limit is not armed. ErrInvalid beyond MaxSRQWR
// and MaxSRQSGE, ErrNoMem at MaxSRQ.
func (p *PD) CreateSRQ(a SRQAttr) (*SRQ, error) { return p.createSRQ(a, nil, nil) }

func (p *PD) createSRQ(a SRQAttr, x *XRCD, cq *CQ) (*SRQ, error) {
	d := p.d
	if err := d.alive(); err != nil {
		return nil, err
	}
	if a.MaxWR < 1 || a.MaxWR > maxSRQWR || a.MaxSGE < 0 || a.MaxSGE > maxSGE {
		return nil, fmt.Errorf("SRQ of %d work requests with %d elements: %w", a.MaxWR, a.MaxSGE, ErrInvalid)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.srqs) >= maxSRQ {
		return nil, fmt.Errorf("%d shared receive queues: %w", maxSRQ, ErrNoMem)
	}
	if err := p.ref(); err != nil {
		return nil, err
	}
	s := &SRQ{pd: p, xrcd: x, cq: cq}
	s.asyncs.init()
	var err error
	if x != nil {
		s.q, err = qp.NewXRCSRQ(p.num, x.dom.num, cq.q, a.MaxWR, max(a.MaxSGE, 1), s.limitReached)
	} else {
		s.q, err = qp.NewSRQ(p.num, a.MaxWR, max(a.MaxSGE, 1), s.limitReached)
	}
	if err == nil && x != nil {
		if err = s.join(); err != nil {
			err = errors.Join(err, s.q.Close())
		}
	}
	if err != nil {
		p.refs--
		return nil, fmt.Errorf("create SRQ: %w", err)
	}
	d.srqs[s] = struct{}{}
	return s, nil
}

func (s *SRQ) limitReached() {
	s.pd.d.events.put(&asyncEvent{Event: Event{Type: qp.EventSRQLimitReached, SRQ: s}, acks: &s.asyncs})
}

// PostRecv posts receive work requests (ibv_post_srq_recv(3)). It returns how many
// were taken and why the next one was not: qp.ErrFull, qp.ErrTooManySGE, ErrGone.
func (s *SRQ) PostRecv(wrs []qp.RecvWR) (int, error) {
	if s.dead.Load() {
		return 0, ErrClosed
	}
	if s.pd.d.sh.gone.Load() {
		return 0, ErrGone
	}
	return s.q.PostRecv(wrs)
}

// Modify changes the size, or arms the limit (ibv_modify_srq(3)): when fewer work
// requests than that are left, IBV_EVENT_SRQ_LIMIT_REACHED comes once. With SRQMaxWR it
// holds at least a.MaxWR afterwards, and keeps what is posted: ErrInvalid beyond
// MaxSRQWR, qp.ErrAttrValue below what is posted or armed for. Nothing changes when
// it fails.
func (s *SRQ) Modify(a SRQAttr, mask SRQAttrMask) error {
	if err := s.pd.d.alive(); err != nil {
		return err
	}
	switch {
	case s.dead.Load():
		return ErrClosed
	case mask&^(SRQLimit|SRQMaxWR) != 0:
		return fmt.Errorf("SRQ attribute mask %#x: %w", uint32(mask), ErrInvalid)
	}
	if mask&SRQMaxWR != 0 {
		if a.MaxWR < 1 || a.MaxWR > maxSRQWR {
			return fmt.Errorf("SRQ of %d work requests: %w", a.MaxWR, ErrInvalid)
		}
		if mask&SRQLimit != 0 && (a.Limit < 0 || a.Limit > a.MaxWR) {
			return fmt.Errorf("SRQ of %d work requests with limit %d: %w", a.MaxWR, a.Limit, ErrInvalid)
		}
		if err := s.q.Resize(a.MaxWR); err != nil {
			return err
		}
	}
	if mask&SRQLimit != 0 {
		return s.q.SetLimit(a.Limit)
	}
	return nil
}

// Query tells the attributes (ibv_query_srq(3)).
func (s *SRQ) Query() (SRQAttr, error) {
	if s.dead.Load() {
		return SRQAttr{}, ErrClosed
	}
	if err := s.pd.d.alive(); err != nil {
		return SRQAttr{}, err
	}
	var a SRQAttr
	a.MaxWR, a.MaxSGE, a.Limit = s.q.Query()
	return a, nil
}

// Destroy ends the SRQ (ibv_destroy_srq(3)): ErrBusy while QPs receive from it,
// ErrClosed twice. It waits until its async events are acknowledged.
func (s *SRQ) Destroy() error {
	d := s.pd.d
	if d.closed.Load() {
		return ErrClosed
	}
	d.mu.Lock()
	if s.refs > 0 {
		d.mu.Unlock()
		return fmt.Errorf("shared receive queue serves %d QPs: %w", s.refs, ErrBusy)
	}
	if s.dead.Load() {
		d.mu.Unlock()
		return ErrClosed
	}
	delete(d.srqs, s)
	err := s.teardown()
	d.mu.Unlock()
	s.asyncs.wait()
	return err
}

// teardown is called with d.mu held. Events go last: until it is out of the engine, QPs
// of XRC may still take from it.
func (s *SRQ) teardown() error {
	s.dead.Store(true)
	s.pd.refs--
	err := s.end()
	s.pd.d.events.remove(func(e *asyncEvent) bool { return e.SRQ == s })
	return err
}

// end takes the SRQ out of the engine.
func (s *SRQ) end() error {
	s.pd.d.sh.lock()
	defer s.pd.d.sh.release()
	if s.xrcd != nil {
		s.leave()
	}
	return s.q.Close()
}
