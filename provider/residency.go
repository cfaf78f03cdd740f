// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// Residency messages: both ends of a connection know which pages of a region are in
// memory. The responder tells the requester which pages have left for the store and which
// came back, and that a region is suspended; the requester, before a large transfer, asks
// for what is away to be brought back, and waits for it or for the region, instead of
// finding out by RNR NAK.
//
// They are MADs of a class of our own (wire.Residency), to queue pair 1 of the peer. Who
// does not know them drops them; to find out, a QP that has them enabled says hello a few
// times and then keeps silent until its peer does. They are advice: they may get lost, and
// nothing that is done or not done because of one makes a request fail.
//
//	requester            responder
//	Hello ─────────────▶            each end has a cookie that it tells the other: who does
//	      ◀───────────── Agree      not see what they send cannot speak for either
//	Agree ─────────────▶
//	Watch ─────────────▶            the first time that a work request names an rkey
//	      ◀───────────── Away, Back as pages leave and come back
//	Prefetch ──────────▶            before a transfer of what is away
//	      ◀───────────── HoldOff, GoOn   suspend, resume
//	      ◀───────────── Ended    the region is no more what the rkey opens
//
// All state is touched with the baton held.

const (
	helloFirst = int64(10 * time.Millisecond)
	maxHellos  = 8 // each after twice the time: the last after 1.3 s

	defaultAhead   = 64 << 10
	defaultMaxHold = 10 * time.Millisecond
	// longestHoldOff is how long a region is kept off for by one message at most, and
	// tellHoldOff for how long we ask: more of it is asked for before that is over, and
	// when the word that it goes on is lost, the peer waits no longer.
	longestHoldOff = 10 * time.Second
	tellHoldOff    = time.Second
)

// ResidencyOptions say what a requester does with what it knows.
type ResidencyOptions struct {
	// Ahead is from how many bytes on a WRITE or READ has what is away brought back before
	// it begins; 0: 64 KiB.
	Ahead uint32
	// MaxHold is how long it waits for that at most; 0: 10 ms, negative: not at all.
	MaxHold time.Duration
}

// residency is what a QP with residency messages knows.
type residency struct {
	opts ResidencyOptions
	// own is our cookie, peer that of the other end, 0 if we have not heard it; proven:
	// it has shown to know ours.
	own, peer uint64
	proven    bool
	hellos    int
	helloAt   int64
	seq       uint32 // of our last message
	heard     uint32 // of the peer's last

	watched []*watched // what the peer wants to be told of
	lookAt  int64      // when to look at it next, and how long after that
	every   int64
	remote  map[uint32]*remoteState // what we know of the peer's regions, by rkey
	order   []uint32                // of remote, oldest first
	holding int64                   // since when a work request waits for what is away; 0: none does
}

func (r *residency) agreed() bool { return r.proven && r.peer != 0 }

// EnableResidency turns residency messages on for a connected QP (RC), in both directions;
// they flow when the peer has done so too, see ResidencyAgreed. Calling it again changes
// the options. ErrInvalid for other services and before the QP knows its peer (RTR); reset
// turns them off.
func (q *QP) EnableResidency(o ResidencyOptions) error {
	if err := q.s.d.alive(); err != nil {
		return err
	}
	if q.init.Type != qp.TypeRC {
		return fmt.Errorf("residency messages of a QP of type %v: %w", q.init.Type, ErrInvalid)
	}
	if o.Ahead == 0 {
		o.Ahead = defaultAhead
	}
	if o.MaxHold == 0 {
		o.MaxHold = defaultMaxHold
	}
	var cookie [8]byte
	if _, err := rand.Read(cookie[:]); err != nil {
		return fmt.Errorf("residency messages: %w", err)
	}
	s := q.s
	s.lock()
	defer s.release()
	if q.gone {
		return ErrClosed
	}
	if st := q.q.State(); st < qp.StateRTR || st == qp.StateErr {
		return fmt.Errorf("residency messages in state %v: %w", st, ErrInvalid)
	}
	if q.res == nil {
		s.now = s.clock()
		q.res = &residency{own: binary.NativeEndian.Uint64(cookie[:]) | 1, remote: map[uint32]*remoteState{}, helloAt: s.now}
		s.res = append(s.res, q)
		q.q.SetAdvised(true)
		s.resDue = s.now
		s.progress(false, postRounds)
	}
	q.res.opts = o
	return nil
}

// DisableResidency turns residency messages off; what the peer sends is dropped then.
func (q *QP) DisableResidency() {
	q.s.lock()
	defer q.s.release()
	q.endResidency()
}

// endResidency is called with the baton held, also when the QP is reset or ends.
func (q *QP) endResidency() {
	if q.res == nil {
		return
	}
	s := q.s
	for _, w := range q.res.watched {
		s.resBits -= len(w.told)
	}
	q.res = nil
	q.q.SetAdvised(false)
	q.q.Wake()
	s.activate(q)
	for i, o := range s.res {
		if o == q {
			s.res = append(s.res[:i:i], s.res[i+1:]...)
			break
		}
	}
}

// ResidencyAgreed says whether the peer speaks residency messages, too.
func (q *QP) ResidencyAgreed() bool {
	q.s.lock()
	defer q.s.release()
	return q.res != nil && q.res.agreed()
}

// tickResidency does what is due: hellos, and looks at what is watched.
func (s *shard) tickResidency() {
	s.resDue = qp.Never
	looking := 0 // how many share the leaves that are looked at
	for _, q := range s.res {
		if len(q.res.watched) > 0 && s.now >= q.res.lookAt {
			looking++
		}
	}
	for _, q := range s.res {
		r := q.res
		if r.proven && r.peer != 0 {
			if len(r.watched) > 0 && q.q.State() != qp.StateErr {
				if s.now >= r.lookAt {
					// The less there is to tell, the seldomer.
					leaves := min(max(r.every/lookEvery, 1)*lookLeaves, maxLookLeaves)
					r.every = min(2*r.every, maxLookEvery)
					if s.lookAround(q, max(int(leaves)/looking, 1)) || r.every == 0 {
						r.every = lookEvery
					}
					r.lookAt = s.now + r.every
				}
				s.resDue = min(s.resDue, r.lookAt)
			}
			continue
		}
		if r.hellos < maxHellos && s.now >= r.helloAt {
			if st := q.q.State(); st >= qp.StateRTR && st != qp.StateErr {
				s.tellPeer(q, &wire.Residency{Kind: wire.ResHello, Own: r.own})
			}
			r.helloAt = s.now + helloFirst<<r.hellos
			r.hellos++
		}
		if r.hellos < maxHellos {
			s.resDue = min(s.resDue, r.helloAt)
		}
	}
}

// tellPeer sends a message to a QP's peer; false if there is no room for it.
func (s *shard) tellPeer(q *QP, m *wire.Residency) bool {
	b := s.sendMAD(q.q.Peer())
	if b == nil {
		return false
	}
	r := q.res
	r.seq++
	m.Src, m.Dst, m.Cookie, m.Seq = q.num, q.q.DestQPN(), r.peer, r.seq
	m.Put(b)
	s.eg.End()
	s.cnt.ResidencySent++
	return true
}

// inputResidency takes a residency message; false if it is none for anybody here: none
// that makes sense, for a QP that does not exist or has not enabled them, not from its
// peer, or without its cookie.
func (s *shard) inputResidency(p *wire.Packet) bool {
	if len(s.res) == 0 {
		return false
	}
	m := &s.resMsg
	if !wire.ParseResidency(p.Payload, m) {
		return false
	}
	q, _ := s.lookup(m.Dst)
	if q == nil || q.res == nil || m.Src != q.q.DestQPN() {
		return false
	}
	if path := q.q.Peer(); p.Src() != path.Dst || p.Dst() != path.Src {
		return false
	}
	r := q.res
	switch {
	case m.Kind == wire.ResHello:
		// Anybody on the link may have sent it. It is answered, to the peer; its cookie is
		// not taken for the peer's before somebody has shown to know ours.
		peer := r.peer
		r.peer = m.Own
		s.tellPeer(q, &wire.Residency{Kind: wire.ResAgree, Own: r.own, Arg: known(r.proven && peer == m.Own)})
		if peer != 0 && r.proven {
			r.peer = peer
		}
		s.cnt.ResidencyReceived++
		return true
	case m.Cookie != r.own:
		return false
	}
	s.cnt.ResidencyReceived++
	if m.Kind == wire.ResAgree {
		if m.Own == 0 {
			return true
		}
		if !r.proven || r.peer != m.Own {
			// A peer that has begun anew knows nothing of what was before.
			r.proven, r.peer, r.heard = true, m.Own, m.Seq
			s.unwatchAll(q)
			clear(r.remote)
			r.order = r.order[:0]
		} else if int32(m.Seq-r.heard) > 0 {
			r.heard = m.Seq
		}
		if m.Arg&wire.ResKnown == 0 {
			s.tellPeer(q, &wire.Residency{Kind: wire.ResAgree, Own: r.own, Arg: wire.ResKnown})
		}
		return true
	}
	if !r.agreed() {
		// The peer thinks so: its Agree got lost. It answers this one.
		s.tellPeer(q, &wire.Residency{Kind: wire.ResAgree, Own: r.own})
		return true
	}
	if int32(m.Seq-r.heard) <= 0 {
		return true // it comes too late
	}
	gap := m.Seq != r.heard+1
	r.heard = m.Seq
	switch m.Kind {
	case wire.ResWatch:
		s.watch(q, m)
	case wire.ResPrefetch:
		s.prefetchFor(q, m)
	case wire.ResAway, wire.ResBack:
		s.learn(q, m, gap)
	case wire.ResHoldOff, wire.ResGoOn:
		s.holdOff(q, m)
	case wire.ResEnded:
		s.forget(q, m)
	}
	return true
}

func known(proven bool) uint32 {
	if proven {
		return wire.ResKnown
	}
	return 0
}
