// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"context"
	"sync"
)

// fifo is an unbounded queue whose put never blocks, so that the holder of the
// baton can call it, and whose take waits. It allocates only to grow.
type fifo[T any] struct {
	mu     sync.Mutex
	items  []T // ring
	head   int
	n      int
	closed bool
	ready  chan struct{} // capacity 1: something may be there
	done   chan struct{} // closed by close
	// lost is closed when the device is gone: nothing more is to be waited for.
	lost <-chan struct{}
}

func newFIFO[T any](lost <-chan struct{}) *fifo[T] {
	return &fifo[T]{ready: make(chan struct{}, 1), done: make(chan struct{}), lost: lost}
}

func (f *fifo[T]) put(v T) {
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return
	}
	if f.n == len(f.items) {
		items := make([]T, max(8, 2*f.n))
		for i := range f.n {
			items[i] = f.items[(f.head+i)%len(f.items)]
		}
		f.items, f.head = items, 0
	}
	f.items[(f.head+f.n)%len(f.items)] = v
	f.n++
	f.mu.Unlock()
	f.signal()
}

func (f *fifo[T]) len() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n
}

func (f *fifo[T]) signal() {
	select {
	case f.ready <- struct{}{}:
	default:
	}
}

// tryTake takes the first item if there is one. taken runs with the queue still
// locked, so that remove sees an item either in the queue or as taken.
func (f *fifo[T]) tryTake(taken func(T)) (v T, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.n == 0 {
		return v, false
	}
	var zero T
	v, f.items[f.head] = f.items[f.head], zero
	f.head = (f.head + 1) % len(f.items)
	f.n--
	if taken != nil {
		taken(v)
	}
	if f.n > 0 {
		f.signal() // for the next one who waits
	}
	return v, true
}

// take waits for an item: ErrGone when there is none and the device is gone. idle, when
// not nil, is called instead of sleeping.
func (f *fifo[T]) take(ctx context.Context, idle func(), taken func(T)) (T, error) {
	for {
		lost := isClosed(f.lost) // looked at first: what is put before is taken yet
		if v, ok := f.tryTake(taken); ok {
			return v, nil
		}
		var zero T
		if lost {
			return zero, ErrGone
		}
		if idle != nil {
			select {
			case <-ctx.Done():
				return zero, ctx.Err()
			case <-f.done:
				return zero, ErrClosed
			default:
				idle()
			}
			continue
		}
		select {
		case <-f.ready:
		case <-f.lost:
		case <-ctx.Done():
			return zero, ctx.Err()
		case <-f.done:
			return zero, ErrClosed
		}
	}
}

// isClosed says whether a channel that nothing is sent to was closed.
func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// remove drops the items for which drop is true.
func (f *fifo[T]) remove(drop func(T) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var zero T
	kept := 0
	for i := range f.n {
		v := f.items[(f.head+i)%len(f.items)]
		if drop(v) {
			continue
		}
		f.items[(f.head+kept)%len(f.items)] = v
		kept++
	}
	for i := kept; i < f.n; i++ {
		f.items[(f.head+i)%len(f.items)] = zero
	}
	f.n = kept
}

// close makes every take return ErrClosed once the queue is empty.
func (f *fifo[T]) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		f.closed = true
		close(f.done)
	}
}

// acks counts the events of an object that were handed to the application and
// those it has acknowledged: an object is not destroyed between the two
// (ibv_get_cq_event(3), ibv_get_async_event(3)).
type acks struct {
	mu        sync.Mutex
	cond      *sync.Cond
	delivered uint64
	acked     uint64
}

func (a *acks) init() { a.cond = sync.NewCond(&a.mu) }

func (a *acks) deliver() {
	a.mu.Lock()
	a.delivered++
	a.mu.Unlock()
}

func (a *acks) ack(n uint64) {
	a.mu.Lock()
	a.acked += n
	a.cond.Broadcast()
	a.mu.Unlock()
}

// wait blocks until all that was delivered is acknowledged.
func (a *acks) wait() {
	a.mu.Lock()
	for a.acked < a.delivered {
		a.cond.Wait()
	}
	a.mu.Unlock()
}
