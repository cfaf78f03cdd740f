// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"slices"
	"sort"
	"sync"
)

// coverage counts how many regions want something of each page, as a sorted list
// of disjoint ranges. Overlapping regions register, arm and lock the same pages;
// only the last one to go undoes it. Who changes it holds Space.mu.
type coverage struct {
	mu   sync.Mutex // before nothing
	segs []covered
}

type covered struct {
	span
	n int
}

// split makes at a border between two segments, and returns the index of the
// first that starts at or after it.
func (c *coverage) split(at uint64) int {
	i := sort.Search(len(c.segs), func(i int) bool { return c.segs[i].end > at })
	if i == len(c.segs) || c.segs[i].start >= at {
		return i
	}
	right := c.segs[i]
	right.start = at
	c.segs[i].end = at
	c.segs = slices.Insert(c.segs, i+1, right)
	return i + 1
}

// merge joins neighbours of equal count in and around a range, so that regions that
// come and go leave no fragments.
func (c *coverage) merge(start, end uint64) {
	i := sort.Search(len(c.segs), func(i int) bool { return c.segs[i].end >= start })
	for i+1 < len(c.segs) && c.segs[i].end <= end {
		if a, b := &c.segs[i], c.segs[i+1]; a.end == b.start && a.n == b.n {
			a.end = b.end
			c.segs = slices.Delete(c.segs, i+1, i+2)
			continue
		}
		i++
	}
}

// add counts a range once more.
func (c *coverage) add(start, end uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.merge(start, end)
	i := c.split(start)
	c.split(end)
	for at := start; at < end; i++ {
		if i < len(c.segs) && c.segs[i].start == at {
			c.segs[i].n++
			at = c.segs[i].end
			continue
		}
		stop := end
		if i < len(c.segs) {
			stop = min(stop, c.segs[i].start)
		}
		c.segs = slices.Insert(c.segs, i, covered{span{at, stop}, 1})
		at = stop
	}
}

// remove counts a range once less and returns what nobody wants any more.
func (c *coverage) remove(start, end uint64) (free []span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.merge(start, end)
	i := c.split(start)
	c.split(end)
	for i < len(c.segs) && c.segs[i].start < end {
		if c.segs[i].n--; c.segs[i].n > 0 {
			i++
			continue
		}
		if n := len(free); n > 0 && free[n-1].end == c.segs[i].start {
			free[n-1].end = c.segs[i].end
		} else {
			free = append(free, c.segs[i].span)
		}
		c.segs = slices.Delete(c.segs, i, i+1)
	}
	return free
}

// missing returns the parts of a range that nobody wants.
func (c *coverage) missing(start, end uint64) (out []span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := sort.Search(len(c.segs), func(i int) bool { return c.segs[i].end > start }); i < len(c.segs) && c.segs[i].start < end; i++ {
		if c.segs[i].start > start {
			out = append(out, span{start, c.segs[i].start})
		}
		start = max(start, c.segs[i].end)
	}
	if start < end {
		out = append(out, span{start, end})
	}
	return out
}

// has says whether somebody wants the page at an address.
func (c *coverage) has(at uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := sort.Search(len(c.segs), func(i int) bool { return c.segs[i].end > at })
	return i < len(c.segs) && c.segs[i].start <= at
}
