// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// The responder's side of residency messages: what its peer watches, and what it asks for.

const (
	// maxWatched is how many regions a peer may watch, and maxWatchBits the words of
	// bitmaps of all of a device: a bit for each page, 16 TiB.
	maxWatched   = 64
	maxWatchBits = 1 << 26
	// lookEvery is how often what is watched is looked at, in ns, and lookLeaves at how
	// many times 2 MiB of it each time, for all QPs of a shard: 10 µs if much of it is
	// stored. When it is looked at more seldom more of it is, up to maxLookLeaves.
	lookEvery     = int64(time.Millisecond)
	maxLookEvery  = 256 * lookEvery
	lookLeaves    = 64
	maxLookLeaves = 16 * lookLeaves
	// lookMessages is how many messages one look may send.
	lookMessages = 16
	// wordMessages is how many of them 64 pages may take.
	wordMessages = 8
	// tellAgain is after how long all is told anew: a message may have been lost. If
	// nothing changes, that is twice as long each time.
	tellAgain    = int64(time.Second)
	maxTellAgain = 64 * tellAgain
	// holdOffAgain is after how long a region's suspension is told again.
	holdOffAgain = int64(tellHoldOff / 3)
	// goOns is how often it is told that it goes on.
	goOns = 4
)

const leafWords = 8 // a leaf of the page table has 512 pages

// watched is a region that the peer of a QP watches. What was told to be away is a set of
// pages, from the one in which the region begins.
type watched struct {
	region  *mr.Region
	rkey    uint32
	told    []uint64
	fresh   bool  // the peer knows nothing of it
	at      int   // the word to be looked at next
	round   int64 // when all that is away was last told
	pause   int64 // after how long that is to be done again
	again   bool  // that is being done
	all     bool  // and what is there, too
	wanted  bool  // that is to be done next
	heldOff bool
	heldAt  int64
	goOns   int // how often it is yet to be told that it goes on
}

// remoteRegion is the region that an rkey opens for reading or writing to a QP's peer.
func (s *shard) remoteRegion(q *QP, rkey uint32, iova, n uint64) *mr.Region {
	pd, num := q.pd.num, uint32(q.num)
	r, err := s.d.keys.CheckRemote(mr.Key(rkey), pd, num, iova, n, mr.RemoteWrite)
	if err != nil {
		if r, err = s.d.keys.CheckRemote(mr.Key(rkey), pd, num, iova, n, mr.RemoteRead); err != nil {
			return nil
		}
	}
	return r
}

// watch notes that the peer wants to be told of a region. The first range of the message is
// one that it may read or write: who knows no more than a number learns nothing.
func (s *shard) watch(q *QP, m *wire.Residency) {
	if m.N == 0 {
		return
	}
	region := s.remoteRegion(q, m.RKey, m.Ranges[0].IOVA, m.Ranges[0].Len)
	if region == nil || region.Paging() != mr.UserFault {
		return
	}
	r := q.res
	for _, w := range r.watched {
		if w.rkey == m.RKey && w.region == region {
			w.wanted, w.heldOff = true, false // it has lost something
			r.lookNow(s)
			return
		}
	}
	words := int((region.Pages() + 63) / 64)
	if s.resBits+words > maxWatchBits {
		return
	}
	if len(r.watched) == maxWatched {
		s.resBits -= len(r.watched[0].told)
		r.watched = append(r.watched[:0], r.watched[1:]...)
	}
	w := &watched{region: region, rkey: m.RKey, told: make([]uint64, words)}
	w.begin()
	s.resBits += words
	r.watched = append(r.watched, w)
	r.lookNow(s)
	s.tellSuspensions(q)
}

// lookNow has what is watched be looked at in this iteration or the next.
func (r *residency) lookNow(s *shard) { r.lookAt, r.every, s.resDue = s.now, 0, s.now }

// begin has all told again: first that everything is there, and then what is not.
func (w *watched) begin() {
	clear(w.told)
	w.at, w.fresh, w.wanted, w.heldOff, w.goOns, w.pause = 0, true, false, false, 0, tellAgain
}

func (s *shard) unwatchAll(q *QP) {
	for _, w := range q.res.watched {
		s.resBits -= len(w.told)
	}
	q.res.watched = nil
}

// lookAround goes on looking at what a peer watches, and tells it what has changed. What
// gets lost on the way, or finds no room, is told again later. It looks at no more than some
// leaves, and says whether to go on soon: something has changed, or the peer waits for more.
func (s *shard) lookAround(q *QP, leaves int) (soon bool) {
	r := q.res
	soon = s.tellSuspensions(q)
	messages, next := lookMessages, 0
	for i := 0; i < len(r.watched); i++ {
		w := r.watched[i]
		if !s.stillOpen(q, w) {
			s.tellPeer(q, &wire.Residency{Kind: wire.ResEnded, RKey: w.rkey})
			s.resBits -= len(w.told)
			r.watched = append(r.watched[:i], r.watched[i+1:]...)
			i--
			continue
		}
		if messages > wordMessages && leaves > 0 {
			changed := s.lookAt(q, w, &messages, &leaves)
			soon, next = soon || changed, i+1
		}
		soon = soon || w.fresh || w.wanted || w.all && w.at < len(w.told)
	}
	if next < len(r.watched) || leaves == 0 { // the others first, next time
		r.watched = append(r.watched[next:len(r.watched):len(r.watched)], r.watched[:next]...)
	}
	return soon || messages <= wordMessages
}

// stillOpen says whether the peer may still know of a region.
func (s *shard) stillOpen(q *QP, w *watched) bool {
	return s.d.keys.Lookup(mr.Key(w.rkey)) == w.region &&
		(w.region.Allows(q.pd.num, mr.RemoteWrite) == nil || w.region.Allows(q.pd.num, mr.RemoteRead) == nil)
}

// lookAt looks at the next part of a watched region, and tells what differs from what was
// told, in so many messages at most, and looks at so many leaves. It says whether anything
// has changed.
func (s *shard) lookAt(q *QP, w *watched, messages, leaves *int) (changed bool) {
	away := wire.Residency{Kind: wire.ResAway, RKey: w.rkey}
	back := wire.Residency{Kind: wire.ResBack, RKey: w.rkey}
	lost := false
	send := func(m *wire.Residency) {
		*messages--
		lost = !s.tellPeer(q, m) || lost
		m.N = 0
	}
	add := func(m *wire.Residency, w *watched, first, pages int) {
		iova, n := w.region.PagesAt(w.at*64+first, pages)
		if n == 0 {
			return
		}
		if m.N > 0 && m.Ranges[m.N-1].IOVA+m.Ranges[m.N-1].Len == iova {
			m.Ranges[m.N-1].Len += n
			return
		}
		if m.N == len(m.Ranges) {
			send(m)
		}
		m.Ranges[m.N] = wire.ResidencyRange{IOVA: iova, Len: n}
		m.N++
	}
	switch {
	case w.fresh:
		iova, n := w.region.PagesAt(0, int(w.region.Pages()))
		back.Ranges[0], back.N = wire.ResidencyRange{IOVA: iova, Len: n}, 1
		*messages--
		if !s.tellPeer(q, &back) {
			return false
		}
		back.N = 0
		w.fresh, w.all, w.at, w.round = false, false, 0, s.now
		changed = true
	case w.at >= len(w.told):
		w.at, w.again, w.all, w.wanted = 0, false, w.wanted, false
		if w.all || s.now-w.round >= w.pause {
			w.round, w.again, w.pause = s.now, true, min(2*w.pause, maxTellAgain)
		}
	}
	var now [leafWords]uint64
	for ; *leaves > 0 && w.at < len(w.told) && *messages > wordMessages; *leaves-- {
		n := min(leafWords-w.at%leafWords, len(w.told)-w.at)
		w.region.Stored(w.at*64, now[:n])
		for k := 0; k < n && *messages > wordMessages; k++ {
			told, is := w.told[w.at], now[k]
			gone, came := is&^told, told&^is
			if gone|came != 0 {
				changed, w.pause = true, tellAgain
			}
			if w.again {
				gone = is
			}
			if w.all {
				came = ^is
			}
			if gone|came != 0 {
				mr.Runs([]uint64{gone}, func(first, n int) { add(&away, w, first, n) })
				mr.Runs([]uint64{came}, func(first, n int) { add(&back, w, first, n) })
			}
			w.told[w.at] = is
			w.at++
		}
	}
	for _, m := range []*wire.Residency{&away, &back} {
		if m.N > 0 {
			send(m)
		}
	}
	if lost {
		w.wanted = true // all of it is told again, in the next round
	}
	return changed
}

// tellSuspensions tells a QP's peer which regions that it watches were suspended or go on.
// It says whether there is more of that to tell soon.
func (s *shard) tellSuspensions(q *QP) (more bool) {
	for _, w := range q.res.watched {
		is := w.region.Suspended()
		m := wire.Residency{Kind: wire.ResGoOn, RKey: w.rkey}
		switch {
		case is && (!w.heldOff || s.now-w.heldAt >= holdOffAgain):
			m.Kind, m.Arg = wire.ResHoldOff, uint32(tellHoldOff/time.Millisecond)
		case is:
			continue
		case w.heldOff:
			w.goOns = goOns
		case w.goOns == 0:
			continue
		}
		if s.tellPeer(q, &m) {
			w.heldOff, w.heldAt = is, s.now
			w.goOns = max(w.goOns-1, 0)
		}
		more = more || w.goOns > 0
	}
	return more
}

const (
	// maxPrefetch is how many bytes a message may ask for; what goes beyond is left out.
	maxPrefetch = 256 << 20
	// maxBringing is how many prefetches for peers of a device go on at a time, apart from
	// advices (ibv_advise_mr(3)), which are the application's.
	maxBringing = 2
	// peerPiece is how many bytes are brought back before others have their turn, or a
	// device that closes: 64 pages, from a store that may be slow.
	peerPiece = 256 << 10
)

// prefetchFor brings back what the peer asks for, beside the engine; when too much of that
// is going on it does nothing.
func (s *shard) prefetchFor(q *QP, m *wire.Residency) {
	d := s.d
	regions := make([]*mr.Region, 0, m.N)
	ranges := make([]wire.ResidencyRange, 0, m.N)
	rkey, sum := m.RKey, uint64(0)
	for _, g := range m.Ranges[:m.N] {
		if g.Len = min(g.Len, maxPrefetch-sum); g.Len == 0 {
			break // the rest is asked for anew, or not at all
		}
		region := s.remoteRegion(q, m.RKey, g.IOVA, g.Len)
		if region == nil {
			return
		}
		sum += g.Len
		regions, ranges = append(regions, region), append(ranges, g)
	}
	if len(regions) == 0 {
		return
	}
	select {
	case d.bringing <- struct{}{}:
	default:
		return
	}
	s.cnt.ResidencyPrefetches++
	who := q.asker()
	s.beside.Add(1)
	go func() {
		defer s.beside.Done()
		back := wire.Residency{Kind: wire.ResBack, RKey: rkey}
		for i, r := range regions {
			var err error
			for at, left := ranges[i].IOVA, ranges[i].Len; left > 0 && d.alive() == nil; {
				n := min(left, peerPiece)
				if err = d.space.PrefetchForPeer(r, at, n); err != nil {
					break // it promises nothing
				}
				at, left = at+n, left-n
			}
			if err == nil {
				back.Ranges[back.N] = ranges[i]
				back.N++
			}
		}
		<-d.bringing
		s.lock()
		s.tellBack(who, &back)
		s.release()
	}()
}

// asker is who has asked for a prefetch. By the time that it is done the QP may have been
// reset and be another peer's, who is not to be told of what is not its own.
type asker struct {
	q    *QP
	res  *residency
	peer uint64
}

func (q *QP) asker() asker { return asker{q, q.res, q.res.peer} }

// tellBack tells who has asked for them that ranges are back.
func (s *shard) tellBack(who asker, back *wire.Residency) {
	if who.q.res != who.res || who.res.peer != who.peer || s.closing {
		return
	}
	s.now = s.clock()
	if back.N > 0 {
		s.tellPeer(who.q, back)
		s.eg.flush()
	}
	who.res.lookNow(s)
}
