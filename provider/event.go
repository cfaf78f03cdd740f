// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"context"

	"github.com/tapverbs/tapverbs/qp"
)

// Event is an asynchronous event (struct ibv_async_event). At most one of QP, CQ
// and SRQ is set: the one that Type is about.
type Event struct {
	Type qp.EventType
	QP   *QP
	CQ   *CQ
	SRQ  *SRQ
	acks *acks
}

// Ack acknowledges the event (ibv_ack_async_event(3)): the object it is about may
// be destroyed from then on. Once per event.
func (e Event) Ack() {
	if e.acks != nil {
		e.acks.ack(1)
	}
}

// asyncEvent is an event in the queue.
type asyncEvent struct {
	Event
	acks *acks
}

// AsyncEvent sleeps until there is an asynchronous event (ibv_get_async_event(3)).
// Each is to be acknowledged. Errors: ErrClosed when the device is closed, ErrGone when
// it is gone and that event was taken, or the context's.
func (d *Device) AsyncEvent(ctx context.Context) (Event, error) {
	e, err := d.events.take(ctx, d.idle(), (*asyncEvent).taken)
	if err != nil {
		return Event{}, err
	}
	return e.out(), nil
}

// TryAsyncEvent is AsyncEvent for those who do not want to sleep.
func (d *Device) TryAsyncEvent() (Event, bool) {
	e, ok := d.events.tryTake((*asyncEvent).taken)
	if !ok {
		return Event{}, false
	}
	return e.out(), true
}

func (e *asyncEvent) taken() { e.acks.deliver() }

func (e *asyncEvent) out() Event {
	e.Event.acks = e.acks
	return e.Event
}

// qpEvent is what QPs report events to; the caller holds the baton.
func (s *shard) qpEvent(q *qp.QP, ev qp.EventType) {
	p, ok := q.User().(*QP)
	if !ok || p.gone {
		return
	}
	if ev == qp.EventCommEst && p.heard != nil {
		p.heard() // who connects it waits for that
		return
	}
	if q.Type() == qp.TypeXRCRecv {
		for _, h := range p.handles {
			s.d.events.put(&asyncEvent{Event: Event{Type: ev, QP: h}, acks: &h.asyncs})
		}
		return
	}
	s.d.events.put(&asyncEvent{Event: Event{Type: ev, QP: p}, acks: &p.asyncs})
}

// maxPortEvents bounds the events that wait for a program which does not ask for
// them: those of a port that goes up and down for ever. All others come once.
const maxPortEvents = 1024

// deviceEvent reports an event of the port or the device.
func (d *Device) deviceEvent(ev qp.EventType) {
	if ev != qp.EventDeviceFatal && d.events.len() >= maxPortEvents {
		return
	}
	d.events.put(&asyncEvent{Event: Event{Type: ev}, acks: &d.fatal})
}
