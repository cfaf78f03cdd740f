// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

const (
	// maxNeighbours bounds the table. Entries that a QP or an address handle uses
	// are never thrown out; of the others the one unused for longest.
	maxNeighbours = 4096
	// resolveTries requests are sent, the first answered within resolveWait, each
	// further one within twice the time of the one before: 1.4 s in all.
	resolveTries = 3
	resolveWait  = int64(200 * time.Millisecond)
	// staleAfter is how old a confirmation may be before a new user of the entry
	// has it confirmed again (30 s: ReachableTime of RFC 4861 10).
	staleAfter = int64(30 * time.Second)
	// doubtAfter is the same when a QP's timer has run out: the peer may have
	// moved to another MAC.
	doubtAfter = int64(time.Second)
)

type neighState uint8

const (
	neighIncomplete neighState = iota // asked, no answer yet
	neighReachable
	neighProbing // known, being confirmed; used meanwhile
)

// neighbour is what is known of the MAC of an address on the link. It belongs to
// the holder of the baton.
type neighbour struct {
	addr  netip.Addr
	src   netip.Addr // our address that asks
	mac   [6]byte
	state neighState
	// static entries were given by the application and never change.
	static    bool
	confirmed int64 // ns, when the MAC was last heard
	used      int64 // ns, when it was last asked for
	tries     int   // requests sent in this state
	deadline  int64 // ns, of the next request; qp.Never in state reachable
	waiters   []chan error
	mads      []waitingMAD // to be sent when the MAC is known
	// users are the paths of QPs and address handles that go over this
	// neighbour; when its MAC changes they change with it.
	// Those of other shards' QPs come with the QP.
	users map[*wire.Path]*QP
}

// neighTable holds neighbours of both families.
type neighTable struct {
	m map[netip.Addr]*neighbour
	// asking are those with a deadline: few, so a list does.
	asking []*neighbour
}

func (t *neighTable) init() { t.m = make(map[netip.Addr]*neighbour) }

// next is the earliest deadline.
func (t *neighTable) next() int64 {
	at := qp.Never
	for _, n := range t.asking {
		at = min(at, n.deadline)
	}
	return at
}

func (t *neighTable) startAsking(n *neighbour) {
	for _, o := range t.asking {
		if o == n {
			return
		}
	}
	t.asking = append(t.asking, n)
}

func (t *neighTable) stopAsking(n *neighbour) {
	n.deadline = qp.Never
	for i, o := range t.asking {
		if o == n {
			last := len(t.asking) - 1
			t.asking[i] = t.asking[last]
			t.asking[last] = nil
			t.asking = t.asking[:last]
			return
		}
	}
}

// add makes room for and enters a neighbour.
func (t *neighTable) add(n *neighbour) error {
	if len(t.m) >= maxNeighbours {
		var oldest *neighbour
		for _, o := range t.m {
			if o.state == neighReachable && !o.static && len(o.users) == 0 && (oldest == nil || o.used < oldest.used) {
				oldest = o
			}
		}
		if oldest == nil {
			return fmt.Errorf("%d neighbours: %w", len(t.m), ErrNoMem)
		}
		delete(t.m, oldest.addr)
	}
	t.m[n.addr] = n
	return nil
}

// ask sends the next request for n and sets the time for the one after it.
func (s *shard) ask(n *neighbour) {
	if n.addr.Is4() {
		s.sendARPRequest(n)
	} else {
		s.sendNS(n)
	}
	n.deadline = s.now + resolveWait<<n.tries
	n.tries++
	s.nb.startAsking(n)
}

// expireNeighbours repeats requests that were not answered, or gives up.
func (s *shard) expireNeighbours() {
	for i := 0; i < len(s.nb.asking); {
		n := s.nb.asking[i]
		switch {
		case n.deadline > s.now:
			i++
		case n.tries < resolveTries:
			s.ask(n)
			i++
		default:
			s.nb.stopAsking(n)
			s.giveUp(n)
		}
	}
}

func (s *shard) giveUp(n *neighbour) {
	if n.state == neighProbing {
		// Silent, but no better address is known: those who use it go on, their
		// transport's own retries say when the peer is dead.
		n.state = neighReachable
		return
	}
	s.cnt.ResolveFailures++
	delete(s.nb.m, n.addr)
	s.answer(n, fmt.Errorf("%v: %w", n.addr, ErrTimeout))
}

// answer tells those who wait for n.
func (s *shard) answer(n *neighbour, err error) {
	for _, w := range n.waiters {
		w <- err // has room for one
	}
	n.waiters = nil
}

// failResolves ends all waiting.
func (s *shard) failResolves(err error) {
	for len(s.nb.asking) > 0 {
		n := s.nb.asking[0]
		s.nb.stopAsking(n)
		if n.state == neighIncomplete {
			delete(s.nb.m, n.addr)
		}
		s.answer(n, err)
	}
}

// heard takes in that addr has said to have mac. Only entries that exist are
// touched, so that what is said unasked cannot fill the table. override is false
// for advertisements that must not replace another MAC (RFC 4861 7.2.5).
func (s *shard) heard(addr netip.Addr, mac [6]byte, override bool) {
	n := s.nb.m[addr]
	if n == nil || n.static || mac[0]&1 != 0 || mac == [6]byte{} {
		return
	}
	if n.state != neighIncomplete && n.mac != mac {
		if !override {
			return
		}
		s.cnt.NeighboursChanged++
	}
	s.nb.stopAsking(n)
	n.state, n.mac, n.confirmed, n.tries = neighReachable, mac, s.now, 0
	for p, q := range n.users {
		if q == nil {
			p.DstMAC = mac
			continue
		}
		q.s.tell(s, func() {
			if q.neigh == n && !q.gone {
				q.q.Peer().DstMAC = mac
			}
		})
	}
	s.answer(n, nil)
	mads := n.mads
	n.mads = nil
	for i := range mads {
		s.cm.send(mads[i].src, mads[i].dst, &mads[i].mad)
	}
}

// use hangs a path on the neighbour n, so that it follows a change of MAC, and
// returns the entry it hangs on: n may have been thrown out of the table, or made
// anew, since it was resolved.
func (s *shard) use(n *neighbour, p *wire.Path) *neighbour { return s.useFor(n, p, nil) }

// useFor is use for the path of a QP of another shard.
func (s *shard) useFor(n *neighbour, p *wire.Path, q *QP) *neighbour {
	if n == nil {
		return nil
	}
	if now := s.nb.m[n.addr]; now == nil {
		if s.nb.add(n) != nil {
			return nil // a full table of neighbours in use: this path stays as it is
		}
	} else if now != n && now.state != neighIncomplete {
		n = now
	}
	if n.users == nil {
		n.users = make(map[*wire.Path]*QP)
	}
	n.users[p] = q
	p.DstMAC = n.mac
	return n
}

// drop is the end of use.
func (n *neighbour) drop(p *wire.Path) {
	if n != nil {
		delete(n.users, p)
	}
}

// probe has a known MAC confirmed if that was longer ago than age: first by its
// owner, or, with everybody, by all on the link at once.
func (s *shard) probe(n *neighbour, age int64, everybody bool) {
	if n.state != neighReachable || n.static || s.now-n.confirmed < age {
		return
	}
	n.state, n.tries = neighProbing, 0
	if everybody {
		n.tries = 1 // the first request is the one that goes to the known MAC
	}
	s.ask(n)
}

// doubt is called when a QP's timer ran out: perhaps the peer's MAC is another by
// now, and the network has not told. Everybody is asked, since the QP's retries
// may be over before a silent owner of the old MAC is.
func (s *shard) doubt(q *QP) {
	n := q.neigh
	switch h := s.d.sh; {
	case n == nil:
	case s == h:
		s.probe(n, doubtAfter, true)
	default:
		h.tell(s, func() { h.probe(n, doubtAfter, true) })
	}
}

// follow hangs the QP's path on a neighbour, whose MAC it takes as it is by now, and no
// longer on the one before. Neighbours are the first shard's; the caller has the QP's baton.
func (q *QP) follow(n *neighbour) {
	h, path, of := q.s.d.sh, q.q.Peer(), (*QP)(nil)
	if q.s != h {
		if q.neigh == nil && n == nil {
			return
		}
		of = q
		h.lock() // batons are taken from the last shard's down
		defer h.release()
	}
	q.neigh.drop(path)
	q.neigh = h.useFor(n, path, of)
}

// resolve finds the neighbour that packets from src to dst go to and waits until
// its MAC is known. It is nil for our own addresses and multicast, whose MAC is
// given. Errors: ErrUnreachable, ErrTimeout, ErrNoMem, ErrGone, ErrClosed, or
// that of the context.
func (d *Device) resolve(ctx context.Context, src, dst netip.Addr) (n *neighbour, mac [6]byte, err error) {
	if d.gids.has(dst) {
		return nil, d.mac, nil
	}
	if dst.IsMulticast() {
		return nil, multicastMAC(dst), nil
	}
	hop, err := d.gids.nextHop(dst)
	if err != nil {
		return nil, mac, err
	}
	s := d.sh
	for {
		s.lock()
		if err := d.alive(); err != nil {
			s.release()
			return nil, mac, err
		}
		s.now = s.clock()
		n = s.nb.m[hop]
		if n == nil {
			n = &neighbour{addr: hop, src: src, deadline: qp.Never}
			if err := s.nb.add(n); err != nil {
				s.release()
				return nil, mac, err
			}
			s.ask(n)
		}
		n.used = s.now
		if n.state != neighIncomplete {
			s.probe(n, staleAfter, false)
			mac = n.mac
			s.eg.flush()
			s.release()
			return n, mac, nil
		}
		w := make(chan error, 1)
		n.waiters = append(n.waiters, w)
		s.eg.flush()
		s.release()
		d.wanted()
		if err := d.await(ctx, w); err != nil {
			return nil, mac, err
		}
	}
}

// await waits for an answer.
func (d *Device) await(ctx context.Context, w chan error) error {
	idle := d.idle()
	for {
		if idle != nil {
			select {
			case err := <-w:
				return err
			case <-ctx.Done():
				return ctx.Err()
			default:
				idle()
			}
			continue
		}
		select {
		case err := <-w:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// AddNeighbour enters a neighbour by hand, as `ip neigh add … nud permanent`
// does: it is never asked for and never changes. The address must be on the link.
func (d *Device) AddNeighbour(addr netip.Addr, mac [6]byte) error {
	if err := d.alive(); err != nil {
		return err
	}
	addr = addr.Unmap().WithZone("")
	if mac[0]&1 != 0 || mac == [6]byte{} || !addr.IsValid() || addr.IsMulticast() || !d.gids.onLink(addr) {
		return fmt.Errorf("neighbour %v: %w", addr, ErrInvalid)
	}
	s := d.sh
	s.lock()
	defer s.release()
	s.now = s.clock()
	if s.nb.m[addr] == nil {
		if err := s.nb.add(&neighbour{addr: addr, deadline: qp.Never}); err != nil {
			return err
		}
	}
	n := s.nb.m[addr]
	n.static = false
	s.heard(addr, mac, true)
	n.static = true
	return nil
}

// Neighbour tells what MAC an address on the link is known to have.
func (d *Device) Neighbour(addr netip.Addr) (mac [6]byte, ok bool) {
	s := d.sh
	s.lock()
	defer s.release()
	n := s.nb.m[addr.Unmap().WithZone("")]
	if n == nil || n.state == neighIncomplete {
		return mac, false
	}
	return n.mac, true
}

// multicastMAC is the Ethernet address of a multicast group (RFC 1112 6.4, RFC 2464 7).
func multicastMAC(a netip.Addr) [6]byte {
	if a.Is4() {
		b := a.As4()
		return [6]byte{0x01, 0x00, 0x5e, b[1] & 0x7f, b[2], b[3]}
	}
	b := a.As16()
	return [6]byte{0x33, 0x33, b[12], b[13], b[14], b[15]}
}
