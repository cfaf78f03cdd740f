// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// The requester's side of residency messages: what it has been told of the peer's regions,
// and what it makes of that.

const (
	maxRemote = 64  // regions of a peer that a QP remembers
	maxAway   = 512 // ranges of a region; with more, neighbours become one
	// askEvery is how soon a peer is asked once more for the same, in ns.
	askEvery = int64(50 * time.Millisecond)
	// watchEvery is how soon a peer that tells of a region is asked to once more, in ns:
	// word that it does so no longer may have been lost.
	watchEvery = int64(10 * time.Second)
)

// remoteState is what is known of a region of the peer.
type remoteState struct {
	away   []awayRange // sorted, apart from each other
	told   bool        // the peer tells of it
	asked  int64       // when it was last asked to
	offTil int64       // until when nothing is to be sent to it
}

// awayRange is a range of addresses, as requests name them: start ≤ x < end.
type awayRange struct {
	start, end uint64
	asked      int64 // when a Prefetch for it was sent; 0: none was
}

// remote is what is known of the region behind an rkey; it is made if need be.
func (r *residency) state(rkey uint32) *remoteState {
	if st := r.remote[rkey]; st != nil {
		return st
	}
	if len(r.order) == maxRemote {
		delete(r.remote, r.order[0])
		r.order = append(r.order[:0], r.order[1:]...)
	}
	st := &remoteState{}
	r.remote[rkey] = st
	r.order = append(r.order, rkey)
	return st
}

// set notes that a range is away, or there.
func (st *remoteState) set(start, end uint64, away bool) {
	i := sort.Search(len(st.away), func(i int) bool { return st.away[i].end >= start })
	j := i
	var in []awayRange
	for ; j < len(st.away) && st.away[j].start <= end; j++ {
		a := st.away[j]
		switch {
		case away:
			start, end = min(start, a.start), max(end, a.end)
		default:
			if a.start < start {
				in = append(in, awayRange{a.start, start, a.asked})
			}
			if a.end > end {
				in = append(in, awayRange{end, a.end, a.asked})
			}
		}
	}
	if away {
		in = append(in, awayRange{start: start, end: end})
	}
	st.replace(i, j, in)
}

// replace puts others in the place of ranges i to j, and bounds how many there are.
func (st *remoteState) replace(i, j int, in []awayRange) {
	st.away = slices.Replace(st.away, i, j, in...)
	for len(st.away) > maxAway { // those with the least between them
		at, gap := 1, ^uint64(0)
		for k := 1; k < len(st.away); k++ {
			if g := st.away[k].start - st.away[k-1].end; g < gap {
				at, gap = k, g
			}
		}
		st.away[at-1].end = st.away[at].end
		st.away = slices.Delete(st.away, at, at+1)
	}
}

// note notes when what is away in a range was asked for.
func (st *remoteState) note(start, end uint64, at int64) {
	i := sort.Search(len(st.away), func(i int) bool { return st.away[i].end > start })
	j := i
	var in []awayRange
	for ; j < len(st.away) && st.away[j].start < end; j++ {
		a := st.away[j]
		if a.start < start {
			in = append(in, awayRange{a.start, start, a.asked})
		}
		in = append(in, awayRange{max(a.start, start), min(a.end, end), at})
		if a.end > end {
			in = append(in, awayRange{end, a.end, a.asked})
		}
	}
	st.replace(i, j, in)
}

// within gives the ranges that are away in a range.
func (st *remoteState) within(start, end uint64) []awayRange {
	i := sort.Search(len(st.away), func(i int) bool { return st.away[i].end > start })
	j := i
	for j < len(st.away) && st.away[j].start < end {
		j++
	}
	return st.away[i:j]
}

// learn takes what the peer says of its pages. gap: it has said something that was lost.
func (s *shard) learn(q *QP, m *wire.Residency, gap bool) {
	r := q.res
	st := r.remote[m.RKey]
	if st == nil {
		return // nothing was asked for
	}
	st.told = true
	for _, g := range m.Ranges[:m.N] {
		st.set(g.IOVA, g.IOVA+g.Len, m.Kind == wire.ResAway)
	}
	if gap {
		for _, st := range r.remote {
			st.told = false // asked for again with the next request
		}
	}
	if m.Kind == wire.ResBack && q.q.Wake() {
		s.activate(q)
	}
}

// forget takes word that the peer tells of a region no longer: there is none behind the
// rkey any more, or another one.
func (s *shard) forget(q *QP, m *wire.Residency) {
	st := q.res.remote[m.RKey]
	if st == nil {
		return
	}
	*st = remoteState{} // asked for again with the next request
	if q.q.Wake() {
		s.activate(q)
	}
}

// holdOff takes word that nothing is to be sent to a region for a while, or that it goes on.
func (s *shard) holdOff(q *QP, m *wire.Residency) {
	st := q.res.remote[m.RKey]
	if st == nil {
		return
	}
	st.offTil = 0
	if m.Kind == wire.ResHoldOff {
		st.offTil = s.now + min(int64(m.Arg)*int64(time.Millisecond), int64(longestHoldOff))
	} else if q.q.Wake() {
		s.activate(q)
	}
}

// advise says until when a WRITE or READ had better wait: until its region goes on, or until
// what it needs is back, which it asks for.
func (s *shard) advise(o *qp.QP, w *qp.SendWQE) int64 {
	q, ok := o.User().(*QP)
	if !ok || q.res == nil || !q.res.agreed() || w.Length == 0 {
		return 0
	}
	r := q.res
	st := r.state(uint32(w.RKey))
	if since := s.now - st.asked; st.asked == 0 || since >= watchEvery || !st.told && since >= askEvery {
		st.asked = s.now
		s.tellPeer(q, &wire.Residency{Kind: wire.ResWatch, RKey: uint32(w.RKey), N: 1,
			Ranges: [wire.MaxResidencyRanges]wire.ResidencyRange{{IOVA: w.RemoteAddr, Len: uint64(w.Length)}}})
	}
	if st.offTil > s.now {
		return st.offTil
	}
	if w.Length < r.opts.Ahead {
		return 0
	}
	asked := s.askFor(q, st, uint32(w.RKey), w.RemoteAddr, w.RemoteAddr+uint64(w.Length))
	if asked == 0 || r.opts.MaxHold < 0 {
		r.holding = 0
		return 0
	}
	if r.holding == 0 {
		r.holding = asked // however many times more is asked for
	}
	until := r.holding + int64(r.opts.MaxHold)
	if until <= s.now {
		r.holding = 0
	}
	return until
}

// askFor has the peer bring back what is away in a range, once: what has not come back for
// long is forgotten, and asked for when the peer tells of it again. What a message has no room
// for is asked for when what is in front of it has come. It says when the last of it was
// asked for, 0 if nothing is waited for.
func (s *shard) askFor(q *QP, st *remoteState, rkey uint32, start, end uint64) (asked int64) {
	patience := max(askEvery, int64(q.res.opts.MaxHold))
	m := wire.Residency{Kind: wire.ResPrefetch, RKey: rkey}
	late, room := false, uint64(maxPrefetch)
	for _, a := range st.within(start, end) {
		if a.asked != 0 {
			if s.now-a.asked < patience {
				asked = max(asked, a.asked)
			} else {
				late = true
			}
			continue
		}
		from, to := max(a.start, start), min(a.end, end)
		if n := min(to-from, room); n > 0 && m.N < len(m.Ranges) {
			m.Ranges[m.N] = wire.ResidencyRange{IOVA: from, Len: n}
			m.N++
			room -= n
		}
	}
	if late {
		st.away = slices.DeleteFunc(st.away, func(a awayRange) bool { return a.asked != 0 && s.now-a.asked >= patience })
	}
	if m.N > 0 && asked == 0 && s.tellPeer(q, &m) {
		asked = s.now
		for _, g := range m.Ranges[:m.N] {
			st.note(g.IOVA, g.IOVA+g.Len, s.now)
		}
	}
	return asked
}

// RemoteResidency is what is known of a range of a peer's region.
type RemoteResidency struct {
	// Known: the peer tells of the region. It does so some time after the first WRITE,
	// READ, or PrefetchRemote that names it.
	Known bool
	// Away is how many bytes are in the peer's store.
	Away uint64
	// HeldOff: the region is suspended.
	HeldOff bool
}

// RemoteResidency says what the peer has told of n bytes at iova of the region behind an
// rkey. ErrInvalid if the QP has no residency messages.
func (q *QP) RemoteResidency(rkey mr.Key, iova, n uint64) (RemoteResidency, error) {
	q.s.lock()
	defer q.s.release()
	if q.res == nil {
		return RemoteResidency{}, fmt.Errorf("residency messages are not enabled: %w", ErrInvalid)
	}
	st := q.res.remote[uint32(rkey)]
	if st == nil || iova+n < iova {
		return RemoteResidency{}, nil
	}
	out := RemoteResidency{Known: st.told, HeldOff: st.offTil > q.s.clock()}
	for _, a := range st.within(iova, iova+n) {
		out.Away += min(a.end, iova+n) - max(a.start, iova)
	}
	return out, nil
}

// PrefetchRemote asks the peer to bring n bytes at iova of its region into memory, 256 MiB
// at most, and to tell of the region from then on. Nothing says whether it does. ErrInvalid
// if the QP has no residency messages or the range is none, ErrNotSupported while the peer
// has not agreed to them.
func (q *QP) PrefetchRemote(rkey mr.Key, iova, n uint64) error {
	s := q.s
	if err := s.d.alive(); err != nil {
		return err
	}
	if n == 0 || n > maxPrefetch || iova+n < iova {
		return fmt.Errorf("prefetch of %d bytes at %#x: %w", n, iova, ErrInvalid)
	}
	s.lock()
	defer s.release()
	switch {
	case q.res == nil:
		return fmt.Errorf("residency messages are not enabled: %w", ErrInvalid)
	case !q.res.agreed():
		return fmt.Errorf("the peer has not agreed to residency messages: %w", ErrNotSupported)
	}
	s.now = s.clock()
	st := q.res.state(uint32(rkey))
	whole := wire.Residency{RKey: uint32(rkey), N: 1}
	whole.Ranges[0] = wire.ResidencyRange{IOVA: iova, Len: n}
	if !st.told {
		st.asked = s.now
		m := whole
		m.Kind = wire.ResWatch
		s.tellPeer(q, &m)
	}
	whole.Kind = wire.ResPrefetch
	s.tellPeer(q, &whole)
	s.progress(false, postRounds)
	return nil
}
