// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// Work request IDs. A receive's is the number of its message with recvBit; a
// send's is its QP's index, and its number among that QP's sends.
const recvBit = 1 << 63

func sendID(q *dataQP) uint64 { return uint64(q.index)<<32 | uint64(q.sent) }

// wcError is a work completion that says that something went wrong.
type wcError struct {
	status qp.WCStatus
	recv   bool
}

func (e wcError) Error() string {
	if e.status == qp.WCRetryExcErr {
		return "the peer does not answer: " + e.status.String()
	}
	what := "a send"
	if e.recv {
		what = "a receive"
	}
	return fmt.Sprintf("%s completed with: %s", what, e.status)
}

// spinner counts the rounds of a polling loop and looks up now and then.
type spinner struct {
	n     uint
	since time.Time
}

const (
	spinLook  = 1 << 8  // empty polls between two looks at the context
	spinClock = 1 << 14 // and between two at the clock
)

// look is called after each empty poll. It fails when the run is to end, or when
// nothing has come for too long.
func (s *spinner) look(e *endpoint) error {
	s.n++
	if s.n%spinLook != 0 {
		return nil
	}
	if e.ctx.Err() != nil {
		return context.Cause(e.ctx)
	}
	if s.n%spinClock == 0 {
		now := time.Now()
		switch {
		case s.since.IsZero():
			s.since = now
		case now.Sub(s.since) > e.stall:
			return errPeer{fmt.Sprintf("the peer has sent nothing for %v", e.stall)}
		}
	}
	return nil
}

// take waits until cq has completions and gives them: in e.wcs, valid until the
// next call.
func (e *endpoint) take(cq *provider.CQ) ([]qp.WC, error) {
	var s spinner
	for {
		if n := cq.Poll(e.wcs[:]); n > 0 {
			return e.wcs[:n], nil
		}
		if e.ch != nil {
			n, err := e.sleep(cq)
			if err != nil || n > 0 {
				return e.wcs[:n], err
			}
			continue
		}
		if err := s.look(e); err != nil {
			return nil, err
		}
	}
}

// sleep arms cq and sleeps on the completion channel until an event of some CQ
// comes. It returns early with completions that came before the arming.
func (e *endpoint) sleep(cq *provider.CQ) (int, error) {
	cq.ReqNotify(false)
	if n := cq.Poll(e.wcs[:]); n > 0 {
		return n, nil
	}
	ctx, cancel := context.WithTimeout(e.ctx, e.stall)
	defer cancel()
	got, err := e.ch.Wait(ctx)
	switch {
	case e.ctx.Err() != nil:
		return 0, context.Cause(e.ctx)
	case ctx.Err() != nil:
		return 0, errPeer{fmt.Sprintf("the peer has sent nothing for %v", e.stall)}
	case err != nil:
		return 0, err
	}
	got.AckEvents(1)
	return 0, nil
}

// handle accounts for completions of the data CQ.
func (e *endpoint) handle(wcs []qp.WC) error {
	for i := range wcs {
		wc := &wcs[i]
		recv := wc.ID&recvBit != 0
		if wc.Status != qp.WCSuccess {
			return wcError{wc.Status, recv}
		}
		if !recv {
			e.qps[wc.ID>>32].done = uint32(wc.ID)
			continue
		}
		e.received++
		if e.onRecv == nil {
			return errPeer{"the peer sent a message that nobody expects"}
		}
		if err := e.onRecv(wc); err != nil {
			return err
		}
	}
	return nil
}

// step takes and handles at least one completion.
func (e *endpoint) step() error {
	wcs, err := e.take(e.cq)
	if err != nil {
		return err
	}
	return e.handle(wcs)
}

// room waits until n more work requests fit q's depth.
func (e *endpoint) room(q *dataQP, n, depth int) error {
	for int(q.sent-q.done)+n > depth {
		if err := e.step(); err != nil {
			return err
		}
	}
	return nil
}

// waitReceived waits for the n-th receive completion of the round.
func (e *endpoint) waitReceived(n int) error {
	for e.received < n {
		if err := e.step(); err != nil {
			return err
		}
	}
	return nil
}

// drain waits until nothing is in flight on q.
func (e *endpoint) drain(q *dataQP) error { return e.room(q, 0, 0) }

// waitMemory polls memory until arrived says yes, and the CQ beside it: its empty
// polls are what makes the engine take in what is to arrive.
func (e *endpoint) waitMemory(arrived func() bool) error {
	var s spinner
	for !arrived() {
		n := e.cq.Poll(e.wcs[:])
		if n > 0 {
			if err := e.handle(e.wcs[:n]); err != nil {
				return err
			}
			continue
		}
		if err := s.look(e); err != nil {
			return err
		}
	}
	return nil
}

// post posts the first n of e.wrs on q; the last is signaled.
func (e *endpoint) post(q *dataQP, n int) error {
	if k, err := q.PostSend(e.wrs[:n]); err != nil {
		return fmt.Errorf("posting send %d of %d: %w", k+1, n, err)
	}
	return nil
}

// postReceives posts a receive for each message of a round, in order, so that
// message first+i takes one of QP i mod N. A WRITE with immediate data takes one
// without memory.
func (e *endpoint) postReceives(l *landing, first uint64, count, base int) error {
	for q := range e.qps {
		n := 0
		flush := func() error {
			k, err := e.qps[q].PostRecv(e.rwrs[:n])
			if err != nil {
				return fmt.Errorf("posting receive %d of %d: %w", k+1, n, err)
			}
			n = 0
			return nil
		}
		for i := q; i < count; i += len(e.qps) {
			wr := &e.rwrs[n]
			wr.ID = recvBit | (first + uint64(i))
			wr.SGL = e.rsge[n][:0]
			if l.row.Op == opSend {
				wr.SGL = e.rsge[n][:]
				wr.SGL[0] = l.sge(base + i)
			}
			if n++; n == len(e.rwrs) {
				if err := flush(); err != nil {
					return err
				}
			}
		}
		if err := flush(); err != nil {
			return err
		}
	}
	return nil
}
