// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"errors"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
)

// link is what the shard knows of its port's link. A TAP in this network namespace
// tells when its netdev goes down or up, whether or not there is traffic; of any other
// port it shows when a frame is refused, and when one passes again.
type link struct {
	s       *shard
	watcher tap.LinkWatcher // nil: traffic tells
	stop    func()
}

// start begins to watch, if the port can be watched.
func (l *link) start() {
	w, ok := l.s.dev.(tap.LinkWatcher)
	if !ok {
		return
	}
	l.s.lock() // changed waits until watcher is set
	stop, err := w.WatchLink(l.changed)
	if err == nil {
		l.watcher, l.stop = w, stop
	}
	l.s.release()
	if err == nil {
		l.changed() // what happened before
	}
}

// close ends the watch; the caller does not hold the baton.
func (l *link) close() {
	if l.stop != nil {
		l.stop()
	}
}

// probing says whether to try again and again if frames pass.
func (l *link) probing() bool { return l.s.down.Load() && l.watcher == nil && !l.s.gone.Load() }

// changed is called when the link may have changed.
func (l *link) changed() {
	s := l.s
	s.d.measureQueue()
	s.lock()
	if !s.closing && !s.gone.Load() {
		if err := l.watcher.Link(); err != nil {
			s.deviceError(err)
		} else if s.down.Load() {
			s.announce() // what gets through makes it up (egress.flush)
		}
		s.progress(true, 1)
	}
	s.release()
}

// deviceError is called when reading or writing failed, or the link did.
func (s *shard) deviceError(err error) {
	switch h := s.d.sh; {
	case errors.Is(err, tap.ErrDown):
		if s != h { // the first shard looks after the link
			if !h.down.Load() {
				h.tell(s, func() { h.deviceError(err) })
			}
			return
		}
		if !s.down.Swap(true) {
			s.cnt.LinkDowns++
			s.pub.rouse()
			s.d.deviceEvent(qp.EventPortErr)
		}
	case errors.Is(err, tap.ErrGone):
		// A QP may be in the middle of sending: it is failed when the iteration ends.
		s.lost = true
	default:
		s.cnt.DeviceErrors++
	}
}

// passed is called when frames were read or written.
func (s *shard) passed() {
	if h := s.d.sh; h.down.Load() {
		if s == h {
			s.up = true
			return
		}
		h.tell(s, func() { h.up = h.up || h.down.Load() })
	}
}

// linkUp is called when frames pass again.
func (s *shard) linkUp() {
	s.up = false
	if s.link.watcher != nil && s.link.watcher.Link() != nil {
		return // without a carrier frames are taken, and go nowhere
	}
	s.down.Store(false)
	s.rejoin() // who was told may have forgotten, or be another by now
	s.eg.flush()
	s.pub.rouse()
	s.d.deviceEvent(qp.EventPortActive)
	s.bg.kick() // it may have stopped to listen
}
