// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
import "C"

import (
	"context"
	"encoding/binary"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// tokens is a queue of events with a token in an eventfd (EFD_SEMAPHORE) for each,
// so that the descriptor is readable while there are events. The library made the
// descriptor and reads a token before it takes an event.
type tokens[T any] struct {
	fd int

	mu    sync.Mutex
	items []T
	owed  int // the last of them have no token yet
	ended bool
}

// add adds tokens. It never blocks: only 2^64-2 of them would make it.
func (q *tokens[T]) add(n int) {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], uint64(n))
	_, _ = unix.Write(q.fd, b[:])
}

// put queues an event.
func (q *tokens[T]) put(v T) {
	q.mu.Lock()
	q.items = append(q.items, v)
	q.owed++
	q.pay()
	q.mu.Unlock()
}

// keep is put without a token, which is settle's: one write is for many events then.
// After the end no token may be owed: the end's would be read for the event, and be gone.
func (q *tokens[T]) keep(v T) {
	q.mu.Lock()
	q.items = append(q.items, v)
	q.owed++
	if q.ended {
		q.pay()
	}
	q.mu.Unlock()
}

func (q *tokens[T]) settle() {
	q.mu.Lock()
	q.pay()
	q.mu.Unlock()
}

// pay adds the tokens that are owed. Called with mu held.
func (q *tokens[T]) pay() {
	if q.owed > 0 {
		q.add(q.owed)
		q.owed = 0
	}
}

// take gives the first event. EAGAIN if there is none: it went with its object; EIO when
// there will be no more.
func (q *tokens[T]) take() (v T, no C.int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.items) == 0 {
		if q.ended {
			q.add(1) // the token of the end stays
			return v, C.int(unix.EIO)
		}
		return v, C.int(unix.EAGAIN)
	}
	v = q.items[0]
	q.items = q.items[:copy(q.items, q.items[1:])]
	q.owed = min(q.owed, len(q.items)) // a token of another's, that went while it was read
	return v, 0
}

// len is how many events have their token.
func (q *tokens[T]) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.items) - q.owed
}

// end says that there will be no more events: the descriptor is readable from now on,
// and who finds no event there is told so.
func (q *tokens[T]) end() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.ended {
		q.ended = true
		q.pay()
		q.add(1)
	}
}

// drop removes events, and their tokens as far as nobody has read them.
func (q *tokens[T]) drop(which func(*T) bool) { q.pull(which) }

// pull is drop, and gives what was removed.
func (q *tokens[T]) pull(which func(*T) bool) (pulled []T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	kept := q.items[:0]
	for i := range q.items {
		if which(&q.items[i]) {
			pulled = append(pulled, q.items[i])
		} else {
			kept = append(kept, q.items[i])
		}
	}
	clear(q.items[len(kept):])
	q.items = kept
	free := min(q.owed, len(pulled))
	q.owed -= free
	var b [8]byte
	for range pulled[free:] {
		// The descriptor may be blocking, and another thread may be faster.
		_, _ = unix.Preadv2(q.fd, [][]byte{b[:]}, -1, unix.RWF_NOWAIT)
	}
	return pulled
}

// dispatch hands the device's events to the contexts they belong to: those of
// objects to the object's, those of the port and the device to all.
func (dev *device) dispatch() {
	defer close(dev.done)
	for {
		ev, err := dev.d.AsyncEvent(context.Background())
		if err != nil {
			return
		}
		dev.mu.Lock()
		if ev.Type == qp.EventDeviceFatal {
			dev.mark()
		}
		var obj any
		switch {
		case ev.QP != nil:
			obj = ev.QP
		case ev.CQ != nil:
			obj = ev.CQ
		case ev.SRQ != nil:
			obj = ev.SRQ
		}
		if obj == nil {
			for c := range dev.ctxs {
				c.events.put(C.struct_tv_event{_type: C.int32_t(ev.Type)})
				if ev.Type == qp.EventDeviceFatal {
					c.removeIDs()
				}
			}
		} else if o, ok := dev.owners[obj]; ok {
			o.ctx.events.put(C.struct_tv_event{_type: C.int32_t(ev.Type), has_object: 1, cookie: o.cookie})
		}
		if dev.gone {
			dev.end()
		}
		dev.mu.Unlock()
		// The library counts what it has handed out by itself.
		ev.Ack()
	}
}

// mark tells the library that the device is gone: from now on what it answers by itself
// is EIO. Called with dev.mu held, before the event is seen.
func (dev *device) mark() {
	dev.gone = true
	if dev.goneAt != nil {
		atomic.StoreUint32(dev.goneAt, 1)
	}
	if dev.troubleAt != nil {
		atomic.StoreUint32(dev.troubleAt, 1)
	}
}

// end ends all queues of events of a device that is gone: those who wait there are woken
// up. Called with dev.mu held.
func (dev *device) end() {
	for c := range dev.ctxs {
		c.events.end()
		c.mu.Lock()
		for _, it := range c.items {
			if ch, ok := it.obj.(interface{ end() }); ok {
				ch.end()
			}
		}
		c.mu.Unlock()
	}
}

//export tvEventTake
func tvEventTake(h C.tv_handle, out *C.struct_tv_event) C.int {
	stackroom.Reserve()
	ev, no := object[*ectx](h).events.take()
	if no == 0 {
		*out = ev
	}
	return no
}

// channel is a completion channel: the engine puts the cookies of CQs into it.
type channel struct {
	ch     *provider.CompChannel
	events tokens[C.tv_cookie]
	ready  func() bool // events are there
	mu     sync.Mutex
	cqs    map[*provider.CQ]C.tv_cookie
}

func (ch *channel) end() { ch.events.end() }

//export tvCreateChannel
func tvCreateChannel(h C.tv_handle, fd C.int32_t, out *C.tv_handle) C.int {
	stackroom.Reserve()
	c := object[*ectx](h)
	ch := &channel{cqs: map[*provider.CQ]C.tv_cookie{}}
	ch.events.fd = int(fd)
	ch.ready = func() bool { return ch.events.len() > 0 }
	var err error
	ch.ch, err = c.dev.d.CreateCompChannelFunc(func(cq *provider.CQ) {
		ch.mu.Lock()
		cookie, ok := ch.cqs[cq]
		ch.mu.Unlock()
		if ok {
			ch.events.keep(cookie)
		}
	}, ch.events.settle)
	if err != nil {
		return errno(err)
	}
	*out = c.add(rankChannel, ch, ch.ch.Destroy)
	c.dev.mu.Lock()
	if c.dev.gone { // since the channel was made
		ch.events.end()
	}
	c.dev.mu.Unlock()
	return 0
}

//export tvChanTake
func tvChanTake(h C.tv_handle, out *C.tv_cookie) C.int {
	stackroom.Reserve()
	cookie, no := of[*channel](h).events.take()
	if no == 0 {
		*out = cookie
	}
	return no
}

//export tvLead
func tvLead(h C.tv_handle) C.int32_t {
	stackroom.Reserve()
	return C.int32_t(ctxOf(h).dev.d.Lead(of[*channel](h).ready))
}

//export tvLed
func tvLed(h C.tv_handle) C.int {
	stackroom.Reserve()
	if ctxOf(h).dev.d.Led(of[*channel](h).ready) {
		return 1
	}
	return 0
}

//export tvEndLead
func tvEndLead(h C.tv_handle, fd C.int32_t) {
	stackroom.Reserve()
	ctxOf(h).dev.d.EndLead(int(fd))
}
