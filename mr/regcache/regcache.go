// SPDX-License-Identifier: Apache-2.0

// Package regcache keeps registrations, so that a program that sends from wherever its
// data lies need not register it each time.
//
// The classic trouble of such caches is memory that is unmapped, and mapped anew at the
// same address, behind the cache's back: its keys then lead to what is not there any more.
// Here each lookup looks at a word that has moved if anything was unmapped since (one
// atomic load; mr.Space.Generation). If it did not move, nothing is stale. If it did, the
// cache goes through the journal of changes, and takes out what these are about, page by
// page: a registration of which one page was mapped anew goes on to serve lookups of its
// other pages, while one that asks for that page registers anew. RDMAs in flight on other
// pages notice nothing, and what was handed out stays registered until it is put back.
//
// A registration serves all lookups that it covers, with its rights or fewer. What nobody
// uses is kept, up to bounds, and the one that was not used for the longest time goes
// first. Memory of which nobody tells what happens to it (mr.Region.Followed: without
// userfaultfd, files, huge pages) is registered at each lookup.
//
// The cache is right for lookups that come after the change of the mapping: in the thread
// that made it, or in one that has heard of it. Whoever looks memory up while another
// thread unmaps it has nothing to rely on, with or without a cache.
package regcache

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tapverbs/tapverbs/mr"
)

// Registration is a memory region as a cache sees it.
type Registration interface {
	LKey() mr.Key
	RKey() mr.Key
	// Addr is where it lies, as mr.Region.Addr.
	Addr() uintptr
	// Followed and Lost are those of mr.Region.
	Followed() bool
	Lost(f func(start, end uintptr))
	// Dereg ends it. With mr.ErrBound it has to be tried again later.
	Dereg() error
}

// Options of a Cache.
type Options struct {
	// MaxEntries and MaxBytes bound what is kept; 0: no bound. What is in use is never
	// dropped, so that many at a time may exceed them.
	MaxEntries int
	MaxBytes   uint64
	// Align, a power of two, has what is registered begin and end at multiples of it, if
	// that is mapped: more lookups are covered then, and peers reach the bytes around
	// what was asked for. 0: what was asked for and no more.
	Align uintptr
}

// Stats counts what has happened, and what there is.
type Stats struct {
	Hits        uint64 // lookups that found their very range
	Covered     uint64 // lookups that found one around it
	Misses      uint64 // lookups that registered
	Uncached    uint64 // those of them that could not be kept
	Invalidated uint64 // registrations that lost memory, or all of it
	Evicted     uint64 // registrations that were dropped for others
	Resyncs     uint64 // times that the word had moved
	Overflows   uint64 // times that everything had to be looked at
	Entries     uint64 // registrations that are kept
	Bytes       uint64 // of these
	InUse       uint64 // of these, not put back
}

// Cache is a registration cache. It is safe for any number of goroutines.
type Cache[R Registration] struct {
	space    *mr.Space
	word     *atomic.Uint64
	register func(addr uintptr, length uint64, access mr.Access) (R, error)
	opts     Options

	seen  atomic.Uint64 // the word, when the last resync was done
	root  atomic.Pointer[node[R]]
	front atomic.Pointer[front[R]]
	epoch atomic.Uint64 // moves with each entry
	over  atomic.Bool   // more is kept than may be

	mu     sync.Mutex
	pos    uint64 // the last change that was seen
	lru    queue[R]
	bytes  uint64
	ids    uint64
	hints  []hint
	dead   []R // to be deregistered
	closed bool
	stats  Stats
}

// New makes a cache of regions in a space, which register makes.
func New[R Registration](space *mr.Space, register func(addr uintptr, length uint64, access mr.Access) (R, error), o Options) (*Cache[R], error) {
	if o.Align&(o.Align-1) != 0 || o.MaxEntries < 0 {
		return nil, fmt.Errorf("%w: cache of %d entries, aligned to %d", mr.ErrInvalid, o.MaxEntries, o.Align)
	}
	c := &Cache[R]{space: space, word: wordOf(space), register: register, opts: o}
	c.front.Store(newFront[R](0))
	c.seen.Store(space.Settled())
	c.pos = space.LastChange()
	return c, nil
}

// Entry is a registration that Get has handed out.
type Entry[R Registration] struct {
	state      atomic.Uint64 // who uses it, and how often it was found; see the constants
	start, end uintptr
	rights     mr.Access
	used       atomic.Uint64 // epoch of the last time
	covered    atomic.Uint64 // how often it was found for a part of it
	holes      atomic.Pointer[[]span]
	reg        R
	lkey, rkey mr.Key

	id         uint64
	stamp      uint64 // used, when it was put where it is in the queue
	prev, next *Entry[R]
}

// Bits of Entry.state: references, times it was found, and that it is not in the cache any
// more: the last reference deregisters it then.
const (
	refMask    = 1<<24 - 1
	foundShift = 24
	foundMask  = 1<<38 - 1
	detached   = 1 << 62
)

// LKey is the key for lists of work requests.
func (e *Entry[R]) LKey() mr.Key { return e.lkey }

// RKey is the key for the peer.
func (e *Entry[R]) RKey() mr.Key { return e.rkey }

// Registration is the region. It must not be deregistered, moved or registered anew.
func (e *Entry[R]) Registration() R { return e.reg }

// Addr and Length are the range that is registered: what was asked for, or more.
func (e *Entry[R]) Addr() uintptr { return e.start }

// Length is described at Addr.
func (e *Entry[R]) Length() uint64 { return uint64(e.end - e.start) }

// hintsOnly are access flags that are no rights.
const hintsOnly = mr.OnDemand | mr.HugeTLB | mr.RelaxedOrdering

// covers says whether the entry serves a range.
func (e *Entry[R]) covers(start, end uintptr, need mr.Access) bool {
	if start < e.start || e.end < end || e.rights&need != need {
		return false
	}
	hs := e.holes.Load()
	return hs == nil || !overlaps(*hs, start, end)
}

// acquire takes a reference; false if the entry is not in the cache any more.
func (e *Entry[R]) acquire() bool {
	for {
		st := e.state.Load()
		if st&detached != 0 || st&refMask == refMask-1 {
			return false
		}
		next := st + 1
		if st>>foundShift&foundMask < foundMask {
			next += 1 << foundShift
		}
		if e.state.CompareAndSwap(st, next) {
			return true
		}
	}
}

// Get gives a registration that covers length > 0 bytes at addr, with these rights at
// least. Put gives it back. Errors: mr.ErrInvalid, also for zero-based regions, mr.ErrClosed,
// and those of registering.
func (c *Cache[R]) Get(addr uintptr, length uint64, access mr.Access) (*Entry[R], error) {
	need, end := access&^hintsOnly, addr+uintptr(length)
	if end > addr && c.word.Load() == c.seen.Load() {
		if e := c.find(addr, end, need); e != nil {
			return e, nil
		}
	}
	return c.miss(addr, length, access)
}

// Put gives an entry back that Get has handed out. Giving it back twice panics.
func (c *Cache[R]) Put(e *Entry[R]) {
	st := e.state.Add(^uint64(0))
	switch {
	case st&refMask == refMask:
		panic("regcache: an entry was put back that nobody has")
	case st&refMask != 0:
	case st&detached != 0:
		c.end(e.reg)
	case c.over.Load():
		c.mu.Lock()
		c.trim()
		c.unlock()
	}
}

// end deregisters.
func (c *Cache[R]) end(r R) {
	if errors.Is(r.Dereg(), mr.ErrBound) {
		c.mu.Lock()
		c.dead = append(c.dead, r)
		c.mu.Unlock()
	}
}

// unlock gives the lock back, and deregisters what has to be.
func (c *Cache[R]) unlock() {
	dead := c.dead
	c.dead = nil
	c.mu.Unlock()
	for _, r := range dead {
		c.end(r)
	}
}

// front is a hash by address of the entries that served it lately, for a lookup without
// a walk down the tree. It may hold entries that are not in the cache any more.
type front[R Registration] struct {
	slots []atomic.Pointer[Entry[R]] // in pairs
	shift uint8
}

// newFront makes one for n entries and some more.
func newFront[R Registration](n int) *front[R] {
	b := max(10, bits.Len(uint(n))+2)
	return &front[R]{make([]atomic.Pointer[Entry[R]], 1<<b), uint8(64 - b)}
}

// pair is where an address is looked for.
func (f *front[R]) pair(addr uintptr) *[2]atomic.Pointer[Entry[R]] {
	i := uint64(addr>>6) * 0x9e3779b97f4a7c15 >> f.shift &^ 1
	return (*[2]atomic.Pointer[Entry[R]])(f.slots[i : i+2])
}

// put has an entry found for an address.
func (f *front[R]) put(addr uintptr, e *Entry[R]) {
	p := f.pair(addr)
	if o := p[0].Load(); o != nil && o.state.Load()&detached == 0 {
		p[1].Store(o)
	}
	p[0].Store(e)
}

// find looks a range up, without a lock.
func (c *Cache[R]) find(start, end uintptr, need mr.Access) *Entry[R] {
	f := c.front.Load()
	p := f.pair(start)
	e := p[0].Load()
	if e == nil || !e.covers(start, end, need) || !e.acquire() {
		e = p[1].Load()
		if e == nil || !e.covers(start, end, need) || !e.acquire() {
			if e = c.root.Load().cover(start, end, need); e == nil {
				return nil
			}
			f.put(start, e)
		}
	}
	if e.start != start || e.end != end {
		e.covered.Add(1)
	}
	if now := c.epoch.Load(); e.used.Load() != now {
		e.used.Store(now)
	}
	return e
}

// miss brings the cache up to date, looks again, and registers if that does not help.
func (c *Cache[R]) miss(addr uintptr, length uint64, access mr.Access) (*Entry[R], error) {
	end := addr + uintptr(length)
	if end <= addr || access&mr.ZeroBased != 0 {
		return nil, fmt.Errorf("%w: %d bytes at %#x with rights %#x", mr.ErrInvalid, length, addr, uint32(access))
	}
	c.mu.Lock()
	defer c.unlock()
	if c.closed {
		return nil, mr.ErrClosed
	}
	c.resync()
	if e := c.find(addr, end, access&^hintsOnly); e != nil {
		return e, nil
	}
	// Registering with the lock held: a change of the mapping that comes now is in the
	// journal behind c.pos, and so takes out what is entered here.
	c.stats.Misses++
	return c.enter(addr, end, access)
}

// enter registers a range, or more, and keeps it. It is called with c.mu held.
func (c *Cache[R]) enter(start, end uintptr, access mr.Access) (*Entry[R], error) {
	e := &Entry[R]{start: start, end: end, rights: access}
	var err error
	all := c.wider(start, end, access)
	for i, at := range all {
		e.start, e.end, e.rights = at.start, at.end, at.rights
		if e.reg, err = c.make(at, i == len(all)-1); err == nil {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	e.rights &^= hintsOnly
	e.lkey, e.rkey = e.reg.LKey(), e.reg.RKey()
	if !e.reg.Followed() {
		c.stats.Uncached++
		e.state.Store(1 | detached)
		return e, nil
	}
	e.state.Store(1)
	c.replace(e)
	c.ids++
	e.id = c.ids
	e.stamp = c.epoch.Add(1)
	e.used.Store(e.stamp)
	c.root.Store(c.root.Load().insert(e))
	c.lru.push(e)
	c.found(start, e)
	c.bytes += uint64(e.end - e.start)
	c.trim()
	return e, nil
}

// make registers. When there is no room for another it drops what nobody uses, if there
// is nothing smaller to try.
func (c *Cache[R]) make(at hint, last bool) (R, error) {
	r, err := c.register(at.start, uint64(at.end-at.start), at.rights)
	if err == nil || !last || !(errors.Is(err, mr.ErrNoMem) || errors.Is(err, mr.ErrMemlock)) {
		return r, err
	}
	for range c.lru.n {
		if e := c.lru.pop(); e.state.Load()&refMask > 0 || !c.drop(e) {
			c.lru.push(e)
		}
	}
	c.dead = slices.DeleteFunc(c.dead, func(r R) bool { return !errors.Is(r.Dereg(), mr.ErrBound) })
	return c.register(at.start, uint64(at.end-at.start), at.rights)
}

// drop evicts an entry that is not in the queue, if nobody uses it.
func (c *Cache[R]) drop(e *Entry[R]) bool {
	for {
		st := e.state.Load()
		if st&refMask != 0 {
			return false
		}
		if e.state.CompareAndSwap(st, st|detached) {
			c.gone(e, st)
			c.dead = append(c.dead, e.reg)
			c.stats.Evicted++
			return true
		}
	}
}

// detach takes an entry out of the cache; it is deregistered when nobody uses it any more.
func (c *Cache[R]) detach(e *Entry[R]) {
	c.lru.remove(e)
	st := e.state.Or(detached)
	c.gone(e, st)
	if st&refMask == 0 {
		c.dead = append(c.dead, e.reg)
	}
}

// gone forgets an entry that was detached, and is not in the queue.
func (c *Cache[R]) gone(e *Entry[R], st uint64) {
	c.root.Store(c.root.Load().remove(e))
	for i := range 2 {
		c.front.Load().pair(e.start)[i].CompareAndSwap(e, nil)
	}
	c.bytes -= uint64(e.end - e.start)
	found, covered := st>>foundShift&foundMask, e.covered.Load()
	c.stats.Hits += found - covered
	c.stats.Covered += covered
}

// found has a new entry found at once, and makes room for as many.
func (c *Cache[R]) found(start uintptr, e *Entry[R]) {
	f := c.front.Load()
	if 4*c.lru.n > len(f.slots) {
		f = newFront[R](c.lru.n)
		for o := c.lru.first; o != nil; o = o.next {
			f.put(o.start, o)
		}
		c.front.Store(f)
	}
	f.put(start, e)
}

// replace takes out what a new entry is better than: of the same range, with fewer rights
// or with holes.
func (c *Cache[R]) replace(by *Entry[R]) {
	for _, e := range c.root.Load().overlapping(nil, by.start, by.end) {
		if e.start == by.start && e.end == by.end && by.rights&e.rights == e.rights {
			c.detach(e)
		}
	}
}

// full says whether more is kept than may be.
func (c *Cache[R]) full() bool {
	return c.opts.MaxEntries > 0 && c.lru.n > c.opts.MaxEntries || c.opts.MaxBytes > 0 && c.bytes > c.opts.MaxBytes
}

// trim drops what was not used for the longest time until the bounds are kept, or all the
// rest is in use. An entry that was used since it was queued is queued anew.
func (c *Cache[R]) trim() {
	for i := 2 * c.lru.n; i > 0 && c.full(); i-- {
		e := c.lru.pop()
		if used := e.used.Load(); e.state.Load()&refMask > 0 || used != e.stamp || !c.drop(e) {
			e.stamp = used
			c.lru.push(e)
		}
	}
	c.over.Store(c.full())
}

// Stats tells what has happened so far.
func (c *Cache[R]) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	st := c.stats
	st.Entries, st.Bytes = uint64(c.lru.n), c.bytes
	for e := c.lru.first; e != nil; e = e.next {
		s, covered := e.state.Load(), e.covered.Load()
		st.Hits += s>>foundShift&foundMask - covered
		st.Covered += covered
		if s&refMask > 0 {
			st.InUse++
		}
	}
	return st
}

// Flush drops all that nobody uses, and lets go of the rest: it is deregistered when it is
// put back.
func (c *Cache[R]) Flush() {
	c.mu.Lock()
	defer c.unlock()
	for c.lru.first != nil {
		c.detach(c.lru.first)
	}
	c.over.Store(false)
}

// Close ends the cache. What is in use is deregistered when it is put back.
func (c *Cache[R]) Close() {
	c.Flush()
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.Flush() // what came in between
}
