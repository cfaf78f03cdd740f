// SPDX-License-Identifier: Apache-2.0

package taptest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/tapverbs/tapverbs/tap"
)

// Port is one end of a Net. It implements tap.Device and tap.StatsReader; FD is
// -1, because there is nothing to poll: see OnArrival.
type Port struct {
	net   *Net
	index int
	rng   *rand.Rand

	// All of the following belongs to net.mu.
	queue     []entry // binary heap by (at, seq)
	lastAt    int64   // arrival of the last frame that was not held back
	free      int64   // when all that waits for the port has gone there, see Config.Rate
	maxSeq    uint64  // highest seq delivered yet
	onArrival func()
	gone      bool // removed or closed
	full      bool // WriteBatch takes nothing
	stats     Counts
	dev       tap.Stats

	// Of ports with several queues: the further ones, and who chooses; of such a queue, its
	// port.
	more   []*Port
	choose func(frame []byte) int
	main   *Port
}

// Queues makes the port one of n queues, as a TAP that is opened so often: it is the first
// of them, and the others are returned. choose says which queue a frame to the port
// goes to. A queue that is removed or closed is the port's end.
func (p *Port) Queues(n int, choose func(frame []byte) int) (more []tap.Device) {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	p.choose = choose
	for len(p.more) < n-1 {
		p.more = append(p.more, &Port{net: p.net, index: p.index, rng: p.rng, main: p})
	}
	for _, q := range p.more {
		more = append(more, q)
	}
	return more
}

// port is the port that a queue is of.
func (p *Port) port() *Port {
	if p.main != nil {
		return p.main
	}
	return p
}

// queueOf is the queue that a frame to the port goes to. The Net is locked.
func (p *Port) queueOf(frame []byte) *Port {
	if len(p.more) > 0 {
		if i := p.choose(frame) % (len(p.more) + 1); i > 0 {
			return p.more[i-1]
		}
	}
	return p
}

// entry is a frame on its way to, or waiting at, a port.
type entry struct {
	at     int64
	seq    uint64
	from   int
	gso    uint16
	second bool
	b      []byte // of the Net's pool
}

func (e *entry) before(o *entry) bool {
	return e.at < o.at || e.at == o.at && e.seq < o.seq
}

var (
	_ tap.Device      = (*Port)(nil)
	_ tap.StatsReader = (*Port)(nil)
	_ tap.Queue       = (*Port)(nil)
)

// Index is the number the port was asked for with.
func (p *Port) Index() int { return p.index }

// Name is "mem" and the index.
func (p *Port) Name() string { return fmt.Sprintf("mem%d", p.index) }

// MTU is that of the Net's Config, in bytes after the Ethernet header.
func (p *Port) MTU() int { return p.net.cfg.MTU }

// QueueLen is that of the Net's Config; without a bound it is as long as it can be.
func (p *Port) QueueLen() int {
	if n := p.net.cfg.QueueLen; n > 0 {
		return n
	}
	return math.MaxInt32
}

// SetQueueLen is not permitted.
func (p *Port) SetQueueLen(int) error {
	return fmt.Errorf("set the queue length of %s: %w", p.Name(), tap.ErrPermission)
}

// FD is -1.
func (p *Port) FD() int { return -1 }

// Offloads is what the Net's Config says.
func (p *Port) Offloads() tap.Offload { return p.net.cfg.Offloads }

// OnArrival sets a function that is called after each WriteBatch that put frames
// on their way to this port (once per frame, from the writer's goroutine, with
// nothing locked). The frames are readable when their delay has passed. nil ends it.
func (p *Port) OnArrival(fn func()) {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	p.onArrival = fn
}

// SetFull makes WriteBatch take nothing, as a device that is full, until it is
// called with false.
func (p *Port) SetFull(full bool) {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	p.full = full
}

// Remove takes the device away underneath its user: later calls of ReadBatch and
// WriteBatch return tap.ErrGone, and frames on their way to it are lost.
func (p *Port) Remove() {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	p = p.port()
	p.remove()
	for _, q := range p.more {
		q.remove()
	}
}

func (p *Port) remove() {
	p.gone = true
	for i := range p.queue {
		p.net.release(p.queue[i].b)
		p.queue[i] = entry{}
	}
	p.queue = p.queue[:0]
}

// Close is Remove; it never fails.
func (p *Port) Close() error {
	p.Remove()
	return nil
}

// Pending is how many frames can be read now.
func (p *Port) Pending() int {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	now, k := p.net.clock.Now(), 0
	for i := range p.queue {
		if p.queue[i].at <= now {
			k++
		}
	}
	return k
}

// InFlight is how many frames are on their way to the port or wait to be read.
func (p *Port) InFlight() int {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	return len(p.queue)
}

// ReadBatch delivers the frames that have arrived by now, in order of their time
// and then of their sending. See tap.Device.
func (p *Port) ReadBatch(fs []tap.Frame) (int, error) {
	n := p.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if p.gone {
		return 0, fmt.Errorf("read %s: %w", p.Name(), tap.ErrGone)
	}
	now, k := n.clock.Now(), 0
	for k < len(fs) && len(p.queue) > 0 && p.queue[0].at <= now {
		e := p.pop()
		ev := Event{Time: now, From: e.from, To: p.index, Kind: Delivered, Frame: e.b, GSO: e.gso, Second: e.second}
		if cap(fs[k].B) < len(e.b) {
			p.dev.RxTruncated++
			ev.Kind = Truncated
			n.count(&p.stats, Truncated)
			n.event(ev)
			n.release(e.b)
			continue
		}
		fs[k].B = fs[k].B[:len(e.b)]
		copy(fs[k].B, e.b)
		fs[k].GSO = e.gso
		k++
		p.dev.RxFrames++
		p.dev.RxBytes += uint64(len(e.b))
		if e.gso != 0 {
			p.dev.RxSuper++
		}
		n.count(&p.stats, Delivered)
		if e.seq < p.maxSeq {
			ev.Overtaken = true
			n.count(&p.stats, Overtaken)
		}
		p.maxSeq = max(p.maxSeq, e.seq)
		n.event(ev)
		n.release(e.b)
	}
	return k, nil
}

// WriteBatch sends the frames. See tap.Device.
func (p *Port) WriteBatch(fs []tap.Frame) (int, error) {
	k, notify, err := p.write(fs)
	for _, fn := range notify {
		fn()
	}
	return k, err
}

func (p *Port) write(fs []tap.Frame) (int, []func(), error) {
	n := p.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if p.gone {
		return 0, nil, fmt.Errorf("write %s: %w", p.Name(), tap.ErrGone)
	}
	if p.full && len(fs) > 0 {
		p.dev.TxFull++
		return 0, nil, nil
	}
	var err error
	k := 0
	for ; k < len(fs); k++ {
		f := fs[k]
		if f.More != nil {
			f.B, f.More = slices.Concat(append([][]byte{f.B}, f.More...)...), nil
		}
		if len(f.B) < tap.EthHeaderLen || len(f.B) > tap.MaxFrame {
			err = fmt.Errorf("write %s: %d bytes: %w", p.Name(), len(f.B), tap.ErrFrameLen)
			break
		}
		if f.GSO != 0 && n.cfg.Offloads&(tap.USO4|tap.USO6) == 0 {
			err = fmt.Errorf("write %s: %w", p.Name(), tap.ErrSuperFrame)
			break
		}
		n.send(p.port(), f)
		if f.GSO != 0 {
			p.dev.TxSuper++
		}
		p.dev.TxFrames++
		p.dev.TxBytes += uint64(len(f.B))
	}
	notify := n.notify
	n.notify = nil
	return k, notify, err
}

// Stats are the device's counters, as a real TAP would count them: frames lost on
// the link were sent. What the link did is in Net.Stats.
func (p *Port) Stats() tap.Stats {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	return p.dev
}

func (p *Port) push(e entry) {
	p.queue = append(p.queue, e)
	q := p.queue
	for i := len(q) - 1; i > 0; {
		up := (i - 1) / 2
		if !q[i].before(&q[up]) {
			break
		}
		q[i], q[up] = q[up], q[i]
		i = up
	}
}

func (p *Port) pop() entry {
	q := p.queue
	top, last := q[0], len(q)-1
	q[0], q[last] = q[last], entry{}
	q = q[:last]
	p.queue = q
	for i := 0; ; {
		c := 2*i + 1
		if c >= last {
			break
		}
		if c+1 < last && q[c+1].before(&q[c]) {
			c++
		}
		if !q[c].before(&q[i]) {
			break
		}
		q[i], q[c] = q[c], q[i]
		i = c
	}
	return top
}
