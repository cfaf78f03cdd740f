// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"math"
	"net/netip"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/wire"
)

// Reliable services have a window for what is not acknowledged, so that the packets of one
// sender fit into the queue of a TAP whose reader does something else. Those of several may not.
// So a receiver knows who sends to it, and when all their windows together exceed its queue,
// tells each of them how much of it is his (wire.CNPWindow). That is about what may be out at a
// time, and not about a rate: the queue can not be filled, and no bandwidth is lost as
// long as it holds more than is read at a time.
//
// Time goes by for who sends only when the TAP was found empty: a receiver that was stopped finds
// in its queue what is left of all of them.

const (
	// PortQueue is how many frames a port had better hold for its reader, as those do that a
	// fabric makes, and shortQueue what it holds if nobody has seen to it, in Linux.
	PortQueue  = 32768
	shortQueue = 1000
	// A source that has sent nothing for one to two turns of this many ns does not count.
	sourceTurn = int64(500_000_000)
	// renewAfter is how many packets of a source come before it is told again: what it was told
	// holds for several times as many (qp.Dest).
	renewAfter = 512
	// leastWindow is what is left for one's own READs.
	leastWindow = 16
)

// lengthen has the port hold PortQueue frames, if it is for us to say (CAP_NET_ADMIN);
// if not, senders are held to what there is.
func (d *Device) lengthen() {
	if q, ok := d.dev.(tap.Queue); ok {
		if n := q.QueueLen(); n > 0 && n < PortQueue {
			_ = q.SetQueueLen(PortQueue)
		}
	}
	d.measureQueue()
}

// measureQueue notes how many frames the port holds. It asks the kernel, which may let it wait: no
// baton is to be held. What is not a TAP, and does not say, holds all.
func (d *Device) measureQueue() {
	n := math.MaxInt32
	if q, ok := d.dev.(tap.Queue); ok {
		if n = q.QueueLen(); n <= 0 {
			n = shortQueue
		}
	}
	d.queueLen.Store(int32(n))
}

// source is an address that requests of reliable services come from. There is one as long
// as there is a QP that had some.
type source struct {
	addr  netip.Addr
	refs  int
	pos   int    // in inbound.list
	q     *QP    // by which it is told: the one it has sent to last; nil: that is gone
	turn  uint32 // when it was last seen; 0: never
	told  int32  // what it was told last; 0: nothing
	since int32  // packets it has sent after that
}

// receiver is an address that QPs are connected to.
type receiver struct {
	addr netip.Addr
	refs int
	dest *qp.Dest
}

// inbound is who sends to a shard, and whom it sends to. It belongs to the holder of the baton.
type inbound struct {
	receivers map[netip.Addr]*receiver
	sources   map[netip.Addr]*source
	list      []*source
	// self stands for the READ responses that come: it is we who have asked for them. reads is
	// how many there were.
	self  source
	reads uint64
	// The current turn, when it began, and whether the TAP was empty since; how many sources
	// were seen in it, and how many in the one before only.
	turn        uint32
	began       int64
	emptied     bool
	seen, older int32
	share       int32 // how much of the queue is each one's; 0: there is room for all
	less        bool  // it is less than it was, and not all have been told
	silent      bool  // nobody is told; for tests
}

func (in *inbound) init(now int64) {
	in.receivers, in.sources = map[netip.Addr]*receiver{}, map[netip.Addr]*source{}
	in.turn, in.began = 1, now
}

// connected counts the QP among those that send to its peer, and no more to the one before.
func (s *shard) connected(q *QP) {
	s.dropSource(q)
	old, to := q.to, (*receiver)(nil)
	if p := q.q.Peer(); p.DstMAC != s.d.mac && (q.init.Type == qp.TypeRC || q.init.Type == qp.TypeXRCSend) {
		if to = s.inb.receivers[p.Dst]; to == nil {
			to = &receiver{addr: p.Dst, dest: qp.NewDest(&s.env)}
			s.inb.receivers[p.Dst] = to
		}
		to.refs++
		q.q.SetDest(to.dest)
	} else {
		q.q.SetDest(nil)
	}
	q.to = to
	s.dropReceiver(old)
}

// disconnected is the end of connected.
func (s *shard) disconnected(q *QP) {
	s.dropSource(q)
	q.q.SetDest(nil)
	s.dropReceiver(q.to)
	q.to = nil
}

func (s *shard) dropReceiver(to *receiver) {
	if to != nil {
		if to.refs--; to.refs == 0 {
			delete(s.inb.receivers, to.addr)
		}
	}
}

func (s *shard) dropSource(q *QP) {
	src, in := q.from, &s.inb
	if q.from = nil; src == nil {
		return
	}
	if src.q == q {
		src.q = nil
	}
	if src.refs--; src.refs > 0 {
		return
	}
	last := len(in.list) - 1
	in.list[src.pos] = in.list[last]
	in.list[src.pos].pos = src.pos
	in.list[last] = nil
	in.list = in.list[:last]
	switch delete(in.sources, src.addr); {
	case src.turn == in.turn:
		in.seen--
	case src.turn == in.turn-1:
		in.older--
	}
	s.divide()
}

// sourceOf is where the requests of a QP's peer come from.
func (s *shard) sourceOf(q *QP) *source {
	if q.from == nil {
		addr := q.q.Peer().Dst
		src := s.inb.sources[addr]
		if src == nil {
			src = &source{addr: addr, pos: len(s.inb.list)}
			s.inb.sources[addr] = src
			s.inb.list = append(s.inb.list, src)
		}
		src.refs++
		q.from = src
	}
	return q.from
}

// count notes what has come to a QP with the last frames.
func (s *shard) count(q *QP) {
	n := q.q.Requests()
	if n == 0 || q.gone || q.init.Type != qp.TypeRC && q.init.Type != qp.TypeXRCRecv || q.q.Peer().DstMAC == s.d.mac {
		return
	}
	src := s.sourceOf(q)
	s.saw(src)
	src.q, src.since = q, int32(min(int(src.since)+n, 1<<20))
	if s.inb.share != 0 && s.tooMuch(src) {
		s.tellWindow(src)
	}
}

// tooMuch says whether a source may have more out than its share, or may soon, by what it
// was told.
func (s *shard) tooMuch(src *source) bool {
	return src.told == 0 || s.inb.share < src.told-src.told/8 || src.since >= renewAfter
}

// tellAll tells all of those who count that it is less now: who has yet to send something fills the queue
// as well.
func (s *shard) tellAll() {
	in := &s.inb
	in.less = false
	for _, src := range in.list {
		if src.q != nil && src.turn >= in.turn-1 && s.tooMuch(src) {
			s.tellWindow(src)
		}
	}
}

// countReads notes that READ responses have come.
func (s *shard) countReads() {
	s.inb.reads = s.env.ReadResponses
	s.saw(&s.inb.self)
}

// saw notes that there was something of a source.
func (s *shard) saw(src *source) {
	in := &s.inb
	if in.emptied && s.now-in.began >= sourceTurn {
		// Two turns are over in any case when nothing has come for as long; but what waits now may
		// be from before, so the second ends when the TAP is empty anew.
		if late := s.now - in.began; late >= 2*sourceTurn {
			in.began = s.now - sourceTurn
		} else {
			in.began = s.now
		}
		in.turn++
		in.older, in.seen, in.emptied = in.seen, 0, false
		s.divide()
	}
	if src.turn == in.turn {
		return
	}
	if src.turn != 0 && src.turn == in.turn-1 {
		in.older--
	}
	src.turn = in.turn
	in.seen++
	s.divide()
}

// divide works out how much of the queue is each source's: of one half, as there are
// those who have not been seen yet, those who have yet to be told that it is less now, and what
// is sent again while the first of it waits.
func (s *shard) divide() {
	in, room := &s.inb, s.queueLen()
	n := int(max(in.seen+in.older, 1))
	own, was := deviceWindow/len(s.d.devs), in.share
	if in.share = 0; n*deviceWindow > room {
		in.share = int32(max(room/2/n, 1))
		in.less = in.less || was == 0 || in.share < was
		if in.self.turn != 0 && in.self.turn >= in.turn-1 && !in.silent {
			own = min(own, max(int(in.share), leastWindow))
		}
	}
	s.env.Window = int32(own)
}

// queueLen is how many frames the queue holds, of what is for QPs of the shard.
func (s *shard) queueLen() int {
	if s.d.cfg.Manual {
		s.d.measureQueue() // nobody watches the link
	}
	n := int(s.d.queueLen.Load())
	if !s.d.steered {
		n /= len(s.d.devs) // all of them may meet in one
	}
	return n
}

// tellWindow tells a source its share.
func (s *shard) tellWindow(src *source) {
	if s.inb.silent {
		return
	}
	q := src.q.q
	peer := q.Peer()
	path := wire.Path{SrcMAC: s.d.mac, DstMAC: peer.DstMAC, Src: peer.Src, Dst: peer.Dst}
	if s.putCNP(&path, q.PKey(), q.DestQPN(), uint16(min(s.inb.share, deviceWindow))) {
		src.told, src.since = s.inb.share, 0
		s.cnt.WindowsTold++
	}
}

// heardWindow takes what a receiver tells, for all shards together.
func (s *shard) heardWindow(q *QP, addr netip.Addr, packets uint16) {
	to := s.inb.receivers[addr]
	if to == nil || q.init.Type == qp.TypeUC || q.init.Type == qp.TypeUD {
		return
	}
	s.cnt.CNPsHandled++
	s.cnt.WindowsHeard++
	n := int32(packets) / int32(len(s.d.devs))
	if !to.dest.Told(n) {
		return
	}
	for _, o := range s.d.shards {
		if o != s {
			o.tell(s, func() {
				if to := o.inb.receivers[addr]; to != nil {
					to.dest.Told(n)
				}
			})
		}
	}
}
