// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"container/heap"
	"container/list"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"

	"github.com/tapverbs/tapverbs/wire"
)

// Never is the time of what is not going to happen.
const Never = math.MaxInt64

// Errors of this package's calls.
var (
	ErrInUse   = errors.New("cm: the service has a listener already")
	ErrState   = errors.New("cm: the connection is in another state")
	ErrPrivate = errors.New("cm: private data is longer than the message has room for")
	ErrAddr    = errors.New("cm: the addresses are not of one family")
)

// Config is what an agent is given. Event and Send must not call the agent.
type Config struct {
	GUID uint64 // of the port's node
	MTU  uint8  // code of the largest path MTU; 0: 5, which is 4096
	// Send sends a MAD to queue pair 1 at dst. It may be lost: what matters is sent again.
	Send func(src, dst netip.Addr, mad *[wire.MADLen]byte)
	// Event is told what happens to a connection.
	Event func(c *Conn, e Event)
}

// MaxLingering is how many connections that have ended are remembered at most, for messages
// about them that are still on their way.
const MaxLingering = 4096

// MaxHalfOpen is how many accepted connections may wait for their other ends to be ready.
// One more, and the one that has waited for longest is given up: who asks and is never heard
// of again must not keep others out.
const MaxHalfOpen = 1024

// Agent is the connection manager of one port.
type Agent struct {
	cfg       Config
	conns     map[uint32]*Conn // by our communication ID
	passive   map[peerKey]*Conn
	byQP      map[qpKey]*Conn
	listeners map[listenKey]*Listener
	expected  map[uint64]int64 // services, until when
	timers    timers
	// Of *Conn, oldest first: those in stateRepSent, and those in stateTimewait.
	half, lingering list.List
	out             [wire.MADLen]byte
	stats           Stats
}

// peerKey names a connection that the other end has asked for: two REQs with one are one.
type peerKey struct {
	addr netip.Addr
	id   uint32
	sidr bool
}

// qpKey names the peer's queue pair: it has one connection at a time.
type qpKey struct {
	addr netip.Addr
	qpn  wire.QPN
}

type listenKey struct {
	service uint64
	addr    netip.Addr // unspecified: any of the family; the zero Addr: any
}

// Stats counts what an agent has seen.
type Stats struct {
	Received, Sent, Resent uint64
	// Malformed are MADs that are no messages of CM, Stray those for connections that there
	// are not, Refused requests beyond a backlog.
	// GivenUp connections were one too many that were accepted and not ready.
	Malformed, Stray, Refused, GivenUp uint64
	// Known is how many connections there are, those that have ended and linger included.
	Known int
}

// New makes an agent.
func New(cfg Config) *Agent {
	if cfg.MTU == 0 {
		cfg.MTU = 5
	}
	return &Agent{cfg: cfg, conns: map[uint32]*Conn{}, passive: map[peerKey]*Conn{}, byQP: map[qpKey]*Conn{}, listeners: map[listenKey]*Listener{},
		expected: map[uint64]int64{}}
}

// Stats gives the counts so far.
func (a *Agent) Stats() Stats {
	st := a.stats
	st.Known = a.Len()
	return st
}

// Len is how many connections the agent knows, those that have ended and linger included.
func (a *Agent) Len() int { return len(a.conns) }

// Entries is how many entries its tables have, of connections and what leads to them.
func (a *Agent) Entries() int {
	return len(a.conns) + len(a.passive) + len(a.byQP) + len(a.timers) + a.half.Len() + a.lingering.Len()
}

// newID picks a communication ID that nobody can guess.
func (a *Agent) newID() uint32 {
	for {
		var b [4]byte
		rand.Read(b[:])
		id := binary.NativeEndian.Uint32(b[:])
		if id != 0 && a.conns[id] == nil {
			return id
		}
	}
}

// Listener takes requests for one service.
type Listener struct {
	// Owner is the caller's.
	Owner any
	// Wants, if set, says whether a request for this transport, with this private data, is one;
	// others are rejected.
	Wants   func(tr Transport, private []byte) bool
	a       *Agent
	key     listenKey
	backlog int
	pending int
}

// Listen takes requests for a service that come to addr, to any address of its family if it
// is unspecified, or to any if it is the zero Addr. At most backlog of them wait until the
// application answers them or says that it has them (Conn.Take); those beyond are dropped, and
// come again. ErrInUse.
func (a *Agent) Listen(service uint64, addr netip.Addr, backlog int) (*Listener, error) {
	l := &Listener{a: a, key: listenKey{service, addr}, backlog: max(backlog, 1)}
	if a.listeners[l.key] != nil {
		return nil, fmt.Errorf("%w: %#x at %v", ErrInUse, service, addr)
	}
	a.listeners[l.key] = l
	return l, nil
}

// Close ends listening. Requests that wait for the application to take or to answer them are
// rejected.
func (l *Listener) Close(now int64) {
	if l.a.listeners[l.key] != l {
		return
	}
	delete(l.a.listeners, l.key)
	for _, c := range l.a.conns {
		if c.listener == l && !c.taken { // or answered
			c.Destroy(now)
		}
	}
}

// Expect says that somebody may listen for a service soon, until a time; 0: not any more. Until
// then requests for it are not refused, and come again: there are programs that tell others of
// a port before they listen there.
func (a *Agent) Expect(service uint64, until int64) {
	if until == 0 {
		delete(a.expected, service)
	} else {
		a.expected[service] = until
	}
}

func (a *Agent) listener(service uint64, addr netip.Addr) *Listener {
	family := netip.IPv6Unspecified()
	if addr.Is4() {
		family = netip.IPv4Unspecified()
	}
	for _, at := range [...]netip.Addr{addr, family, {}} {
		if l := a.listeners[listenKey{service, at}]; l != nil {
			return l
		}
	}
	return nil
}

// Receive takes a MAD of class 7 that came to queue pair 1.
func (a *Agent) Receive(now int64, src, dst netip.Addr, mad []byte) {
	h, ok := wire.ParseMAD(mad)
	if !ok || h.Class != wire.CMClass || h.ClassVersion != wire.CMClassVersion || h.Method != wire.MADSend {
		a.stats.Malformed++
		return
	}
	a.stats.Received++
	b := mad[wire.MADHeaderLen:]
	in := arrival{now: now, src: src, dst: dst, tid: h.TID, mod: h.AttrMod}
	switch wire.CMAttr(h.Attr) {
	case wire.CMREQ:
		a.req(in, b)
	case wire.CMMRA:
		a.mra(in, b)
	case wire.CMREJ:
		a.rej(in, b)
	case wire.CMREP:
		a.rep(in, b)
	case wire.CMRTU:
		a.rtu(in, b)
	case wire.CMDREQ:
		a.dreq(in, b)
	case wire.CMDREP:
		a.drep(in, b)
	case wire.CMSIDRREQ:
		a.sidrReq(in, b)
	case wire.CMSIDRREP:
		a.sidrRep(in, b)
	case wire.CMLAP:
		a.lap(in, b)
	default: // APR answers what we never ask
		a.stats.Stray++
	}
}

// arrival is what is known of a message beside its bytes.
type arrival struct {
	now      int64
	src, dst netip.Addr
	tid      uint64
	mod      uint32 // attribute modifier
}

// find gives the connection that a message is about: it names our ID and, if there is one
// yet, the peer's, and comes from where that peer is.
func (a *Agent) find(in arrival, local, remote uint32) *Conn {
	c := a.conns[local]
	if c == nil || c.peer.Addr != in.src || c.local != in.dst || c.remoteID != 0 && c.remoteID != remote {
		a.stats.Stray++
		return nil
	}
	return c
}

// message is a message that can be written.
type message interface{ Put(b []byte) }

// send sends a message that is not kept.
func (a *Agent) send(src, dst netip.Addr, tid uint64, attr wire.CMAttr, m message) {
	a.format(&a.out, tid, attr, 0, m)
	a.stats.Sent++
	a.cfg.Send(src, dst, &a.out)
}

func (a *Agent) format(b *[wire.MADLen]byte, tid uint64, attr wire.CMAttr, mod uint32, m message) {
	h := wire.MADHeader{Class: wire.CMClass, ClassVersion: wire.CMClassVersion, Method: wire.MADSend, TID: tid, Attr: uint16(attr), AttrMod: mod}
	h.Put(b[:])
	m.Put(b[wire.MADHeaderLen:])
}

// Close ends everything: other ends are told once, and who has a connection hears that it is
// Gone. Nothing may be asked of the agent any more.
func (a *Agent) Close(now int64) {
	for _, c := range a.conns {
		quiet := c.quiet
		c.Destroy(now)
		c.quiet = quiet
		c.forget(true)
	}
	clear(a.listeners)
}

// Next is when Tick wants to be called, Never if nothing is waited for.
func (a *Agent) Next() int64 {
	if len(a.timers) == 0 {
		return Never
	}
	return a.timers[0].at
}

// Tick lets what has waited until now happen: messages are sent again, peers given up.
func (a *Agent) Tick(now int64) {
	for len(a.timers) > 0 && a.timers[0].at <= now {
		a.timers[0].expired(now)
	}
}

// timers is a heap of connections by when they are due.
type timers []*Conn

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].at < t[j].at }
func (t timers) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].pos, t[j].pos = i, j
}
func (t *timers) Push(x any) {
	c := x.(*Conn)
	c.pos = len(*t)
	*t = append(*t, c)
}
func (t *timers) Pop() any {
	old := *t
	c := old[len(old)-1]
	old[len(old)-1] = nil
	*t = old[:len(old)-1]
	c.pos = -1
	return c
}

// due sets when a connection is due, Never for not at all.
func (a *Agent) due(c *Conn, at int64) {
	c.at = at
	switch {
	case at == Never && c.pos >= 0:
		heap.Remove(&a.timers, c.pos)
	case at == Never:
	case c.pos >= 0:
		heap.Fix(&a.timers, c.pos)
	default:
		heap.Push(&a.timers, c)
	}
}
