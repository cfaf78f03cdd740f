// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"container/list"
	"net/netip"

	"github.com/tapverbs/tapverbs/wire"
)

// Kind is what has happened to a connection.
type Kind uint8

const (
	// Request: somebody asks for a service that is listened for. Accept or Reject answers,
	// AcceptService for a datagram service (Conn.Transport).
	Request Kind = iota
	// Reply: the other end has accepted, and Peer says who it is. Ready makes the connection.
	Reply
	// Established: the other end is ready.
	Established
	// Rejected: the other end says no, or takes its request back.
	Rejected
	// Unreachable: there was no answer.
	Unreachable
	// Disconnected: the other end has ended the connection, or does not know of it any more.
	Disconnected
	// Resolved: where a datagram service is, Peer says; Status is one of wire.SIDROK and so on.
	Resolved
	// Gone: the connection is forgotten, and its queue pair's number may be used again.
	Gone
	// Ended: the other end has heard our Disconnect; or has not answered, if Status is not 0.
	Ended
)

// Event is something that has happened to a connection.
type Event struct {
	Kind    Kind
	Reason  wire.CMReason // of Rejected
	Status  uint8         // of Resolved, Ended
	Private []byte        // the message's, as long as it has room for; the receiver's to keep
}

// Params is what one end of a connection tells the other of itself.
type Params struct {
	Addr netip.Addr
	QPN  wire.QPN
	QKey uint32 // of datagram services
	// PSN is that of the first packet that the other end sends to it: the end that receives
	// says what it expects (IBA 12.7, Starting PSN).
	PSN wire.PSN
	// Responder is how many READs and atomics it takes at a time, Initiator how many it sends.
	Responder, Initiator uint8
	RetryCount, RNRRetry uint8
	FlowControl, SRQ     bool
	AckDelay             uint8 // 4.096 µs * 2^n
	// ECEVendor and ECEOptions are its enhanced connection establishment offer (IBA 12.6.5,
	// release 1.4): 24 bits, and 32. 0: none.
	ECEVendor, ECEOptions uint32
	Private               []byte
}

// Route is what a REQ tells of the way.
type Route struct {
	MTU          uint8 // code of the path MTU: 1 is 256 bytes, 5 is 4096
	AckTimeout   uint8 // 4.096 µs * 2^n, for the queue pairs
	PKey         uint16
	FlowLabel    uint32
	TrafficClass uint8
	HopLimit     uint8
}

// Transport is what queue pairs are for a connection.
type Transport uint8

// The transports. Those of REQs have their codes there (IBA 12.6.5), but for XRC; datagram
// services, UD, are asked for by SIDR_REQs.
const (
	RC Transport = iota
	UC
	XRC
	UD
)

// A REQ's code that means that the extended one says more, and that for XRC.
const (
	transportExt = 3
	extXRC       = 1
)

type state uint8

const (
	stateReqSent state = iota
	stateRepRcvd       // Ready is to come
	stateReqRcvd       // Accept or Reject is to come
	stateRepSent       // RTU is to come
	stateEstablished
	stateDreqSent
	stateSidrSent
	stateSidrRcvd
	stateTimewait // remembered, for messages that come late
	stateGone
)

// Conn is a connection, or a request for one, or a question where a datagram service is.
type Conn struct {
	// Owner is the caller's.
	Owner any
	// Service is the service asked for.
	Service uint64
	// Transport is UD for a datagram service.
	Transport Transport
	Route     Route

	a        *Agent
	state    state
	listener *Listener
	local    netip.Addr
	me, peer Params
	id       uint32 // our communication ID
	remoteID uint32 // 0: not known yet
	tid      uint64
	guid     uint64        // of the peer's node, as its REQ has it
	waiting  *list.List    // the agent's list that it is in: half or lingering
	place    *list.Element // in that

	at  int64 // when due
	pos int   // in timers; -1: not there
	// The message that waits for an answer, or is sent again when the peer repeats itself.
	kept     [wire.MADLen]byte
	keeps    bool
	interval int64 // until it is sent again
	giveUp   int64 // when no answer has come
	// waits is how long the peer is given at most between two tries.
	waits int64
	tries int // how many times that, beside the first
	// quiet: whoever had it does not want to hear of it any more.
	quiet bool
	// acked: the peer has had an MRA for its REQ, and so our ID.
	acked bool
	// taken: it has no place in the listener's backlog any more.
	taken bool
}

// Local is our address, Peer what the other end has told of itself.
func (c *Conn) Local() netip.Addr { return c.local }

// Peer is what is known of the other end: its address, and what its REQ, REP or SIDR_REP
// said.
func (c *Conn) Peer() *Params { return &c.peer }

// Mine is what we told the other end.
func (c *Conn) Mine() *Params { return &c.me }

// Listener is who a request came to; nil for a connection that we asked for.
func (c *Conn) Listener() *Listener { return c.listener }

// Open says whether the connection is established.
func (c *Conn) Open() bool { return c.state == stateEstablished }

// Ending says whether the other end is yet to hear of its end.
func (c *Conn) Ending() bool { return c.state == stateDreqSent }

const (
	// firstInterval is how soon a message is sent again: what is lost on a link that
	// passes some, is so noticed long before the peer's time is up. Each time it doubles.
	firstInterval = int64(100_000_000)
	// responseTimeout, a code, is what we ask the peer to answer in, and promise to: 4.3 s,
	// as the kernel's RDMA CM.
	responseTimeout = 20
	maxRetries      = 15
	// serviceTimeout, a code, is what we ask for with MRA: 69 s, as the kernel's RDMA CM.
	serviceTimeout = 24
	// A connection that has ended is remembered for as long as its queue pairs' timeout, which covers
	// the packets' life on the link and the answer's delay (IBA 12.9.8.4, TimeWait), as by the kernel;
	// but no shorter than the kernel's is for RDMA CM on Ethernet, 2.1 s, nor longer than 8.6 s.
	leastLinger = 19
	mostLinger  = 21
	// maxWait bounds what a peer can ask for with MRA.
	maxWait = int64(70_000_000_000)
)

// codeTime is 4.096 µs * 2^n.
func codeTime(n uint8) int64 { return 4096 << (n & 31) }

// await keeps the message in c.kept, sends it now, and again until there is an answer.
func (c *Conn) await(now int64) {
	c.keeps = true
	c.interval = min(firstInterval, c.waits)
	c.giveUp = now + int64(c.tries+1)*c.waits
	c.transmit()
	c.a.due(c, now+c.interval)
}

// answer keeps a message for when the peer asks again, and sends it.
func (c *Conn) answer(attr wire.CMAttr, mod uint32, m message) {
	c.a.format(&c.kept, c.tid, attr, mod, m)
	c.keeps = true
	c.transmit()
}

func (c *Conn) transmit() {
	c.a.stats.Sent++
	c.a.cfg.Send(c.local, c.peer.Addr, &c.kept)
}

// again sends the kept message once more.
func (c *Conn) again() {
	if c.keeps {
		c.a.stats.Resent++
		c.transmit()
	}
}

// expired is called when a connection is due.
func (c *Conn) expired(now int64) {
	switch c.state {
	case stateTimewait:
		c.forget(true)
	case stateReqRcvd, stateSidrRcvd: // the peer has long given up
		c.tell(Event{Kind: Unreachable})
		c.forget(false)
	case stateReqSent, stateRepSent, stateDreqSent, stateSidrSent:
		if now < c.giveUp {
			c.again()
			c.interval = min(2*c.interval, c.waits)
			c.a.due(c, min(now+c.interval, c.giveUp))
			return
		}
		c.noAnswer(now)
	default:
		c.a.due(c, Never)
	}
}

// noAnswer gives up waiting for one.
func (c *Conn) noAnswer(now int64) {
	was := c.state
	if was == stateRepSent || was == stateReqSent {
		c.rejectWith(wire.RejTimeout, nil)
	}
	if was != stateDreqSent {
		c.tell(Event{Kind: Unreachable})
	} else {
		c.tell(Event{Kind: Ended, Status: 1})
	}
	if was == stateReqSent || was == stateSidrSent {
		c.forget(true)
	} else {
		c.linger(now)
	}
}

// tell reports an event.
func (c *Conn) tell(e Event) {
	if !c.quiet {
		c.a.cfg.Event(c, e)
	}
}

// linger remembers a connection that has ended, for some time.
func (c *Conn) linger(now int64) {
	a := c.a
	c.unpend()
	c.state = stateTimewait
	a.due(c, now+codeTime(min(max(c.Route.AckTimeout, leastLinger), mostLinger)))
	if c.enter(&a.lingering); a.lingering.Len() > MaxLingering {
		a.lingering.Front().Value.(*Conn).forget(true)
	}
}

// forget removes a connection; tell: whoever has it hears of that.
func (c *Conn) forget(tell bool) {
	if c.state == stateGone {
		return
	}
	a := c.a
	c.unpend()
	c.enter(nil)
	c.state, c.keeps = stateGone, false
	a.due(c, Never)
	delete(a.conns, c.id)
	if k := (peerKey{c.peer.Addr, c.remoteID, c.Transport == UD}); a.passive[k] == c {
		delete(a.passive, k)
	}
	c.leaveQP()
	if tell {
		c.tell(Event{Kind: Gone})
	}
}

// unpend gives a place in the listener's backlog back.
func (c *Conn) unpend() {
	if c.state == stateReqRcvd || c.state == stateSidrRcvd {
		c.Take()
	}
}

// Take says that the application has a request, and will answer it in its own time: its place
// in the backlog is another's.
func (c *Conn) Take() {
	if c.listener != nil && !c.taken {
		c.taken = true
		c.listener.pending--
	}
}

// enter puts the connection at the end of one of the agent's lists and takes it off the one
// that it was in; nil: into none.
func (c *Conn) enter(l *list.List) {
	if c.waiting != nil {
		c.waiting.Remove(c.place)
		c.place = nil
	}
	if c.waiting = l; l != nil {
		c.place = l.PushBack(c)
	}
}

func (c *Conn) leaveQP() {
	if k := (qpKey{c.peer.Addr, c.peer.QPN}); c.a.byQP[k] == c {
		delete(c.a.byQP, k)
	}
}

// Destroy ends whatever is under way, as far as the other end is to know, and forgets the
// connection as soon as that may be. No event follows.
func (c *Conn) Destroy(now int64) {
	c.quiet = true
	switch c.state {
	case stateReqRcvd, stateRepRcvd, stateRepSent:
		c.reject(now, wire.RejConsumer, nil)
	case stateSidrRcvd:
		c.replyService(now, wire.SIDRRejected, nil)
	case stateReqSent:
		c.reject(now, wire.RejTimeout, nil)
	case stateEstablished:
		c.Disconnect(now, nil)
	case stateSidrSent:
		c.forget(false)
	}
}

// private checks the length of private data and copies it.
func private(dst, src []byte) error {
	if len(src) > len(dst) {
		return ErrPrivate
	}
	clear(dst[copy(dst, src):])
	return nil
}
