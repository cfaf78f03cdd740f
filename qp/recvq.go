// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/tapverbs/tapverbs/mr"
)

// recvRing is a ring of receive work requests: a QP's own receive queue or the
// body of an SRQ.
type recvRing struct {
	dmu    sync.Mutex // driver's side: several threads may post
	ring   *Ring
	maxSGE int
	max    uint32 // what the driver may have outstanding, ≤ slots
	closed bool   // guarded by dmu, in an SRQ by emu, too
}

func newRecvRing(maxWR, maxSGE int) (*recvRing, error) {
	r, err := newRing(maxWR, recvStride(maxSGE))
	if err != nil {
		return nil, err
	}
	return &recvRing{ring: r, maxSGE: maxSGE, max: uint32(r.Slots())}, nil
}

// post appends work requests; the error says why wrs[n] was refused.
func (q *recvRing) post(wrs []RecvWR) (n int, err error) {
	q.dmu.Lock()
	defer q.dmu.Unlock()
	if q.closed {
		return 0, ErrState
	}
	r := q.ring
	p := r.prod().Load()
	for n = range wrs {
		if err = q.put(&wrs[n], p); err != nil {
			break
		}
		p++
	}
	if err == nil {
		n = len(wrs)
	}
	r.prod().Store(p)
	return n, err
}

// close frees the ring. Who posts afterwards gets ErrState.
func (q *recvRing) close() error {
	q.dmu.Lock()
	defer q.dmu.Unlock()
	q.closed = true
	return q.ring.close()
}

func (q *recvRing) put(wr *RecvWR, p uint32) error {
	if p-q.ring.cons().Load() >= q.max {
		return ErrFull
	}
	if len(wr.SGL) > q.maxSGE {
		return ErrTooManySGE
	}
	w := q.ring.recvWQE(p)
	w.ID, w.NumSGE = wr.ID, uint32(len(wr.SGL))
	copy(w.sges(), wr.SGL)
	return nil
}

// take moves the oldest work request into dst and frees its slot; false if the
// queue is empty. Called by the engine only.
func (q *recvRing) take(dst *recvWork) bool {
	r := q.ring
	c := r.cons().Load()
	if c == r.prod().Load() {
		return false
	}
	w := r.recvWQE(c)
	dst.set(w, q.maxSGE)
	r.cons().Store(c + 1)
	return true
}

// recvWork is a receive work request that the responder is filling: a copy, so
// that the slot is free again for the driver.
type recvWork struct {
	id    uint64
	sges  []SGE // backed by buf, which is made once
	buf   []SGE
	total uint32 // bytes the list holds
}

func (w *recvWork) set(e *RecvWQE, maxSGE int) {
	if cap(w.buf) < maxSGE {
		w.buf = make([]SGE, maxSGE)
	}
	n := min(int(e.NumSGE), maxSGE)
	e.NumSGE = uint32(n)
	w.id, w.sges = e.ID, w.buf[:n]
	copy(w.sges, e.sges())
	sum := uint64(0)
	for i := range w.sges {
		sum += uint64(w.sges[i].Length)
	}
	w.total = uint32(min(sum, 1<<32-1))
}

// SRQ is a shared receive queue (IBA 10.2.9).
type SRQ struct {
	emu   sync.Mutex // engines' side: QPs of several shards take from it
	q     *recvRing
	pd    mr.PD
	limit uint32 // guarded by emu; 0 is disarmed
	event func()

	// Of SRQs for XRC (xrc.go).
	xrcd   XRCD
	cq     *CQ
	failed atomic.Bool
}

// NewSRQ makes an SRQ for at least maxWR work requests of up to maxSGE elements
// in a protection domain. limitReached is called, once per SetLimit, when fewer
// than the limit are left (IBV_EVENT_SRQ_LIMIT_REACHED); the caller holds a
// baton.
func NewSRQ(pd mr.PD, maxWR, maxSGE int, limitReached func()) (*SRQ, error) {
	q, err := newRecvRing(maxWR, maxSGE)
	if err != nil {
		return nil, err
	}
	return &SRQ{q: q, pd: pd, event: limitReached}, nil
}

// PostRecv appends work requests (ibv_post_srq_recv(3)). It returns how many
// were taken and why the next one was not: ErrFull or ErrTooManySGE.
func (s *SRQ) PostRecv(wrs []RecvWR) (int, error) { return s.q.post(wrs) }

// SetLimit arms the limit event (ibv_modify_srq(3)); ErrAttrValue if n is more
// than the queue holds.
func (s *SRQ) SetLimit(n int) error {
	s.emu.Lock()
	if n < 0 || n > int(s.q.max) {
		defer s.emu.Unlock()
		return fmt.Errorf("%w: srq_limit %d of %d", ErrAttrValue, n, s.q.max)
	}
	s.limit = uint32(n)
	fire := s.checkLimit()
	s.emu.Unlock()
	if fire {
		s.event()
	}
	return nil
}

// Resize gives the SRQ room for at least so many work requests and keeps those that are
// posted (ibv_modify_srq(3), IBV_SRQ_MAX_WR). It fails with ErrAttrValue when it would
// hold less than is posted, or than the limit that is armed. Ring is another afterwards.
func (s *SRQ) Resize(maxWR int) error {
	s.emu.Lock()
	defer s.emu.Unlock()
	s.q.dmu.Lock()
	defer s.q.dmu.Unlock()
	if s.q.closed {
		return ErrState
	}
	old := s.q.ring
	if n := max(old.Len(), int(s.limit), 1); maxWR < n {
		return fmt.Errorf("%w: %d work requests where %d are posted and the limit is %d", ErrAttrValue, maxWR, old.Len(), s.limit)
	}
	r, err := newRing(maxWR, int(old.stride))
	if err != nil {
		return err
	}
	n := uint32(0)
	for i := old.cons().Load(); i != old.prod().Load(); i++ {
		copy(unsafe.Slice((*byte)(r.slot(n)), r.stride), unsafe.Slice((*byte)(old.slot(i)), old.stride))
		n++
	}
	r.prod().Store(n)
	s.q.ring, s.q.max = r, uint32(r.Slots())
	return old.close()
}

// Query gives what the SRQ was made for and the armed limit (0: none).
func (s *SRQ) Query() (maxWR, maxSGE, limit int) {
	s.emu.Lock()
	defer s.emu.Unlock()
	return int(s.q.max), s.q.maxSGE, int(s.limit)
}

// Close gives the ring's memory back. Who posts afterwards gets ErrState.
func (s *SRQ) Close() error {
	s.emu.Lock()
	defer s.emu.Unlock()
	return s.q.close()
}

// checkLimit disarms and says true when the limit has been passed.
func (s *SRQ) checkLimit() bool {
	if s.limit == 0 || s.q.closed || uint32(s.q.ring.Len()) >= s.limit {
		return false
	}
	s.limit = 0
	return s.event != nil
}

func (s *SRQ) take(dst *recvWork) bool {
	s.emu.Lock()
	ok := s.q.take(dst)
	fire := ok && s.checkLimit()
	s.emu.Unlock()
	if fire {
		s.event()
	}
	return ok
}
