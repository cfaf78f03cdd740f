// SPDX-License-Identifier: Apache-2.0

package regcache

import "github.com/tapverbs/tapverbs/mr"

// node is a node of a treap of entries by start that is never changed: who inserts or
// removes makes new nodes on the way to the root. So lookups need no lock. maxEnd is the
// largest end of all entries below, by which lookups find ranges that cover another.
type node[R Registration] struct {
	e           *Entry[R]
	maxEnd      uintptr
	left, right *node[R]
}

// priority orders nodes as a heap: as good as random.
func (n *node[R]) priority() uint64 { return n.e.id * 0x9e3779b97f4a7c15 }

func (e *Entry[R]) before(o *Entry[R]) bool {
	return e.start < o.start || e.start == o.start && e.id < o.id
}

func newNode[R Registration](e *Entry[R], left, right *node[R]) *node[R] {
	n := &node[R]{e: e, maxEnd: e.end, left: left, right: right}
	for _, k := range [...]*node[R]{left, right} {
		if k != nil {
			n.maxEnd = max(n.maxEnd, k.maxEnd)
		}
	}
	return n
}

// insert gives the tree with another entry.
func (n *node[R]) insert(e *Entry[R]) *node[R] {
	x := newNode(e, nil, nil)
	switch {
	case n == nil:
		return x
	case x.priority() > n.priority():
		l, r := n.split(e)
		return newNode(e, l, r)
	case e.before(n.e):
		return newNode(n.e, n.left.insert(e), n.right)
	}
	return newNode(n.e, n.left, n.right.insert(e))
}

// split gives what is before an entry, and what is behind it.
func (n *node[R]) split(e *Entry[R]) (l, r *node[R]) {
	switch {
	case n == nil:
		return nil, nil
	case e.before(n.e):
		l, r = n.left.split(e)
		return l, newNode(n.e, r, n.right)
	}
	l, r = n.right.split(e)
	return newNode(n.e, n.left, l), r
}

// remove gives the tree without an entry.
func (n *node[R]) remove(e *Entry[R]) *node[R] {
	switch {
	case n == nil:
		return nil
	case n.e == e:
		return join(n.left, n.right)
	case e.before(n.e):
		return newNode(n.e, n.left.remove(e), n.right)
	}
	return newNode(n.e, n.left, n.right.remove(e))
}

// join gives a tree of two, of which one is before the other.
func join[R Registration](l, r *node[R]) *node[R] {
	switch {
	case l == nil:
		return r
	case r == nil:
		return l
	case l.priority() > r.priority():
		return newNode(l.e, l.left, join(l.right, r))
	}
	return newNode(r.e, join(l, r.left), r.right)
}

// cover finds an entry that serves a range, and takes a reference to it.
func (n *node[R]) cover(start, end uintptr, need mr.Access) *Entry[R] {
	for n != nil && n.maxEnd >= end {
		if n.e.start > start {
			n = n.left
			continue
		}
		if n.e.covers(start, end, need) && n.e.acquire() {
			return n.e
		}
		if e := n.right.cover(start, end, need); e != nil {
			return e
		}
		n = n.left
	}
	return nil
}

// overlapping appends the entries that have something in common with a range.
func (n *node[R]) overlapping(to []*Entry[R], start, end uintptr) []*Entry[R] {
	for n != nil && n.maxEnd > start {
		to = n.left.overlapping(to, start, end)
		if n.e.start >= end {
			return to
		}
		if n.e.end > start {
			to = append(to, n.e)
		}
		n = n.right
	}
	return to
}

// queue is a list of entries, the one to be dropped next first.
type queue[R Registration] struct {
	first, last *Entry[R]
	n           int
}

func (q *queue[R]) push(e *Entry[R]) {
	e.prev, e.next = q.last, nil
	if q.last != nil {
		q.last.next = e
	} else {
		q.first = e
	}
	q.last = e
	q.n++
}

func (q *queue[R]) pop() *Entry[R] {
	e := q.first
	q.remove(e)
	return e
}

func (q *queue[R]) remove(e *Entry[R]) {
	if e.prev != nil {
		e.prev.next = e.next
	} else {
		q.first = e.next
	}
	if e.next != nil {
		e.next.prev = e.prev
	} else {
		q.last = e.prev
	}
	e.prev, e.next = nil, nil
	q.n--
}
