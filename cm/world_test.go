// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/tapverbs/tapverbs/wire"
)

// world is some agents on a link that loses, doubles and reorders messages, in virtual time.
type world struct {
	t     *testing.T
	rnd   *rand.Rand
	now   int64
	ports map[netip.Addr]*port
	order []*port
	queue inFlight
	seq   int
	loss  float64
	// filter says which messages pass, beside what is lost.
	filter func(src netip.Addr, a wire.CMAttr) bool
	log    []string
}

// port is an agent with an application.
type port struct {
	w      *world
	addr   netip.Addr
	a      *Agent
	events []happened
	qpn    wire.QPN
}

type happened struct {
	c *Conn
	Event
}

type flight struct {
	at       int64
	seq      int
	src, dst netip.Addr
	mad      [wire.MADLen]byte
}

type inFlight []*flight

func (q inFlight) Len() int { return len(q) }
func (q inFlight) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q inFlight) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *inFlight) Push(x any)   { *q = append(*q, x.(*flight)) }
func (q *inFlight) Pop() any {
	old := *q
	f := old[len(old)-1]
	*q = old[:len(old)-1]
	return f
}

func newWorld(t *testing.T, loss float64, addrs ...string) *world {
	w := &world{t: t, rnd: rand.New(rand.NewPCG(1, 2)), ports: map[netip.Addr]*port{}, loss: loss}
	for i, s := range addrs {
		p := &port{w: w, addr: netip.MustParseAddr(s), qpn: wire.QPN(100 * (i + 1))}
		p.a = New(Config{GUID: uint64(i + 1), Send: w.send, Event: func(c *Conn, e Event) {
			e.Private = append([]byte(nil), e.Private...)
			p.events = append(p.events, happened{c, e})
		}})
		w.ports[p.addr] = p
		w.order = append(w.order, p)
	}
	return w
}

// newTwo is a world of two ports.
func newTwo(t *testing.T, loss float64) (w *world, a, b *port) {
	w = newWorld(t, loss, "10.0.0.1", "10.0.0.2")
	return w, w.order[0], w.order[1]
}

func (w *world) send(src, dst netip.Addr, mad *[wire.MADLen]byte) {
	h, _ := wire.ParseMAD(mad[:])
	if len(w.log) < 1000 {
		w.log = append(w.log, fmt.Sprintf("%v %v", src, wire.CMAttr(h.Attr)))
	}
	if w.filter != nil && !w.filter(src, wire.CMAttr(h.Attr)) {
		return
	}
	for range 2 {
		if w.rnd.Float64() >= w.loss {
			w.seq++
			heap.Push(&w.queue, &flight{w.now + 20_000 + int64(w.rnd.IntN(200_000)), w.seq, src, dst, *mad})
		}
		if w.rnd.Float64() >= w.loss {
			return // else it comes twice, or once more chance
		}
	}
}

// step goes to the next thing that happens; false if nothing does.
func (w *world) step() bool {
	at := int64(Never)
	if len(w.queue) > 0 {
		at = w.queue[0].at
	}
	for _, p := range w.order {
		at = min(at, p.a.Next())
	}
	if at == Never {
		return false
	}
	w.now = max(w.now, at)
	for len(w.queue) > 0 && w.queue[0].at <= w.now {
		f := heap.Pop(&w.queue).(*flight)
		if p := w.ports[f.dst]; p != nil {
			p.a.Receive(w.now, f.src, f.dst, f.mad[:])
		}
	}
	for _, p := range w.order {
		if p.a.Next() <= w.now {
			p.a.Tick(w.now)
		}
	}
	return true
}

// run goes on until done, or nothing happens any more.
func (w *world) run(done func() bool) bool {
	for i := 0; !done(); i++ {
		if i > 5_000_000 {
			w.t.Fatal("no end")
		}
		if !w.step() {
			return done()
		}
	}
	return true
}

// take gives the next event of a port and removes it.
func (p *port) take() (happened, bool) {
	if len(p.events) == 0 {
		return happened{}, false
	}
	e := p.events[0]
	p.events = p.events[1:]
	return e, true
}

// want runs until a port has an event, of this kind.
func (p *port) want(k Kind) happened {
	p.w.t.Helper()
	p.w.run(func() bool { return len(p.events) > 0 })
	e, ok := p.take()
	if !ok || e.Kind != k {
		p.w.t.Fatalf("%v: got %v (%v), want %v; %v", p.addr, e.Kind, ok, k, p.w.log)
	}
	return e
}

// nextQP gives a new queue pair of the application's.
func (p *port) nextQP() Params {
	p.qpn++
	return Params{Addr: p.addr, QPN: p.qpn, PSN: wire.PSN(p.qpn * 7), Responder: 3, Initiator: 2, RetryCount: 7, RNRRetry: 6, Private: []byte("hello")}
}

var route = Route{MTU: 5, AckTimeout: 19, PKey: wire.DefaultPKey, FlowLabel: 0x12345, TrafficClass: 8, HopLimit: 64}

const service = 0x0106_1234

func (p *port) connect(to *port) *Conn {
	p.w.t.Helper()
	c, err := p.a.Connect(p.w.now, to.addr, service, RC, p.nextQP(), route)
	if err != nil {
		p.w.t.Fatal(err)
	}
	return c
}

func (p *port) listen(backlog int) *Listener {
	p.w.t.Helper()
	l, err := p.a.Listen(service, netip.Addr{}, backlog)
	if err != nil {
		p.w.t.Fatal(err)
	}
	return l
}

// pair connects two ports.
func (w *world) pair() (client, server *Conn) {
	w.t.Helper()
	a, b := w.order[0], w.order[1]
	client = a.connect(b)
	server = b.want(Request).c
	if err := server.Accept(w.now, b.nextQP()); err != nil {
		w.t.Fatal(err)
	}
	if c := a.want(Reply).c; c != client {
		w.t.Fatal("a reply to something else")
	}
	if err := client.Ready(w.now, nil); err != nil {
		w.t.Fatal(err)
	}
	b.want(Established)
	return client, server
}

// over lets everything end, and holds both sides to having forgotten all.
func (w *world) over() {
	w.t.Helper()
	w.run(func() bool { return false })
	for _, p := range w.order {
		if n := p.a.Entries(); n != 0 {
			w.t.Errorf("%v still knows of %d connections (%d passive, %d by queue pair, %d timers)", p.addr, p.a.Len(), len(p.a.passive), len(p.a.byQP), len(p.a.timers))
		}
		for _, l := range p.a.listeners {
			if l.pending != 0 {
				w.t.Errorf("%v: %d requests pending", p.addr, l.pending)
			}
		}
	}
}
