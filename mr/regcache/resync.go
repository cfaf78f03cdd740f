// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"fmt"
	"slices"
	"sort"
	"sync/atomic"
	"unsafe"

	"github.com/tapverbs/tapverbs/mr"
)

// span is a range of addresses: start ≤ x < end.
type span struct{ start, end uintptr }

// maxHoles is how many ranges of its memory an entry can have lost before it is given up.
const maxHoles = 64

func wordOf(s *mr.Space) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(s.Generation()))
}

// Resync takes notice of all that has happened so far. Get does so by itself.
func (c *Cache[R]) Resync() {
	c.mu.Lock()
	defer c.unlock()
	c.resync()
}

// resync is Resync with c.mu held.
func (c *Cache[R]) resync() {
	if c.word.Load() == c.seen.Load() {
		return
	}
	// All that led to this value is in the journal; what comes while it is read shows as
	// another one.
	now := c.space.Settled()
	if now == c.seen.Load() {
		return // it was but a fault
	}
	c.stats.Resyncs++
	last, complete := c.space.Changes(c.pos, c.apply)
	c.pos = last
	if !complete {
		c.stats.Overflows++
		c.lookAtAll()
	}
	c.seen.Store(now)
}

// apply takes out what a change is about. What was dropped, evicted, or is suspended is
// there again when somebody wants it: registrations stay good.
func (c *Cache[R]) apply(ch mr.Change) bool {
	switch ch.Kind {
	case mr.KindUnmap, mr.KindRemap: // what mremap replaces is told of as unmapped
		c.lost(span{ch.Start, ch.End})
	case mr.KindMoved, mr.KindEliminate:
		for _, e := range c.root.Load().overlapping(nil, ch.Start, ch.End) {
			c.stats.Invalidated++
			c.detach(e)
		}
	}
	return true
}

// lookAtAll asks each registration what it has lost.
func (c *Cache[R]) lookAtAll() {
	for e := c.lru.first; e != nil; {
		next := e.next
		if e.reg.Addr() != e.start {
			c.stats.Invalidated++
			c.detach(e)
		} else {
			var all []span
			e.reg.Lost(func(start, end uintptr) { all = append(all, span{start, end}) })
			for _, l := range all {
				if e.state.Load()&detached == 0 {
					c.loses(e, l)
				}
			}
		}
		e = next
	}
}

// lost takes a range out of all entries.
func (c *Cache[R]) lost(l span) {
	for _, e := range c.root.Load().overlapping(nil, l.start, l.end) {
		c.loses(e, l)
	}
}

// loses takes a range out of an entry, or the entry out of the cache if that is all of it.
func (c *Cache[R]) loses(e *Entry[R], l span) {
	l = span{max(l.start, e.start), min(l.end, e.end)}
	if l.start >= l.end {
		return
	}
	var hs []span
	if old := e.holes.Load(); old != nil {
		hs = *old
	}
	now := union(hs, l)
	if slices.Equal(now, hs) {
		return // known
	}
	c.stats.Invalidated++
	if len(now) > maxHoles || now[0] == (span{e.start, e.end}) {
		c.detach(e)
		return
	}
	e.holes.Store(&now)
}

// union adds a range to a sorted list of disjoint ones, in a new list.
func union(hs []span, l span) []span {
	var out []span
	for _, h := range hs {
		switch {
		case h.end < l.start:
			out = append(out, h)
		case l.end < h.start:
			out = append(out, l)
			l = h
		default:
			l = span{min(l.start, h.start), max(l.end, h.end)}
		}
	}
	return append(out, l)
}

// overlaps says whether a part of a range is in one of a sorted list.
func overlaps(hs []span, start, end uintptr) bool {
	i := sort.Search(len(hs), func(i int) bool { return hs[i].end > start })
	return i < len(hs) && hs[i].start < end
}

// hint is an area that is registered as a whole, with rights.
type hint struct {
	start, end uintptr
	rights     mr.Access
}

// Hint says that many ranges within length bytes at addr will be looked up: the first
// lookup in there, and the first of something that it has lost since, registers the area
// as a whole, with these rights, if all of it is mapped; the others are covered. Unhint
// takes it back. mr.ErrInvalid for an area that cannot be.
func (c *Cache[R]) Hint(addr uintptr, length uint64, access mr.Access) error {
	h := hint{addr, addr + uintptr(length), access}
	if h.end <= h.start || access&mr.ZeroBased != 0 {
		return fmt.Errorf("%w: hint of %d bytes at %#x", mr.ErrInvalid, length, addr)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unhint(h)
	c.hints = append(c.hints, h)
	return nil
}

// Unhint is described at Hint; false if there was no such hint.
func (c *Cache[R]) Unhint(addr uintptr, length uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.unhint(hint{addr, addr + uintptr(length), 0})
}

func (c *Cache[R]) unhint(o hint) bool {
	n := len(c.hints)
	c.hints = slices.DeleteFunc(c.hints, func(h hint) bool { return h.start == o.start && h.end == o.end })
	return len(c.hints) < n
}

// wider lists what may be registered for a range, the best first.
func (c *Cache[R]) wider(start, end uintptr, access mr.Access) (out []hint) {
	for _, h := range c.hints {
		if h.start <= start && end <= h.end {
			out = append(out, c.withRights(h.start, h.end, access|h.rights))
		}
	}
	if a := c.opts.Align; a > 1 {
		if s, e := start&^(a-1), (end+a-1)&^(a-1); e > s && (s != start || e != end) {
			out = append(out, c.withRights(s, e, access))
		}
	}
	out = append(out, c.withRights(start, end, access))
	if asked := (hint{start, end, access}); out[len(out)-1] != asked {
		out = append(out, asked)
	}
	return out
}

// withRights adds the rights of what is kept of the same range, so that one registration
// serves for all.
func (c *Cache[R]) withRights(start, end uintptr, access mr.Access) hint {
	for _, e := range c.root.Load().overlapping(nil, start, end) {
		if e.start == start && e.end == end {
			access |= e.rights
		}
	}
	return hint{start, end, access}
}
