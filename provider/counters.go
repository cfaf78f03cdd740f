// SPDX-License-Identifier: Apache-2.0

package provider

import "fmt"

// CounterKind says what a counter counts, with the values of enum
// ibv_counter_description.
type CounterKind uint32

// What is counted of a flow's frames.
const (
	CounterPackets CounterKind = iota
	CounterBytes               // whole frames, without FCS
)

const (
	maxCounters = 4096
	// maxCounterIndex bounds the values of a Counters, maxCounterPoints what adds
	// up to them.
	maxCounterIndex  = 1024
	maxCounterPoints = 64
)

// Counters counts the frames of the flows that name it (ibv_create_counters(3)).
type Counters struct {
	s *shard
	// Of the holder of the baton:
	points []counterPoint
	values []uint64
	bound  int // flows that name it
	dead   bool
}

type counterPoint struct {
	kind  CounterKind
	index uint32
}

// CreateCounters makes counters that count nothing yet (ibv_create_counters(3)).
// ErrNoMem at 4096 of them.
func (d *Device) CreateCounters() (*Counters, error) {
	if err := d.alive(); err != nil {
		return nil, err
	}
	s := d.sh
	s.lock()
	defer s.release()
	if s.counters >= maxCounters {
		return nil, fmt.Errorf("%d counters: %w", maxCounters, ErrNoMem)
	}
	s.counters++
	return &Counters{s: s}, nil
}

// Attach adds a count of packets or bytes to the value at an index
// (ibv_attach_counters_point_flow(3), static attach): flows that name the counters
// from now on are counted. ErrBusy while a flow names them, ErrNotSupported for
// another kind, ErrInvalid for an index from 1024 on, ErrNoMem beyond 64 points.
func (c *Counters) Attach(kind CounterKind, index uint32) error {
	if err := c.s.d.alive(); err != nil {
		return err
	}
	c.s.lock()
	defer c.s.release()
	switch {
	case c.dead:
		return ErrClosed
	case kind > CounterBytes:
		return fmt.Errorf("counter of kind %d: %w", kind, ErrNotSupported)
	case index >= maxCounterIndex:
		return fmt.Errorf("counter at index %d: %w", index, ErrInvalid)
	case c.bound > 0:
		return fmt.Errorf("the counters are part of %d flows: %w", c.bound, ErrBusy)
	case len(c.points) >= maxCounterPoints:
		return fmt.Errorf("%d counter points: %w", maxCounterPoints, ErrNoMem)
	}
	c.points = append(c.points, counterPoint{kind, index})
	if n := int(index) + 1; n > len(c.values) {
		c.values = append(c.values, make([]uint64, n-len(c.values))...)
	}
	return nil
}

// Read fills in the values (ibv_read_counters(3)); those at an index where nothing
// is attached are 0. ErrInvalid if there are more than dst has room for.
func (c *Counters) Read(dst []uint64) error {
	if err := c.s.d.alive(); err != nil {
		return err
	}
	c.s.lock()
	defer c.s.release()
	switch {
	case c.dead:
		return ErrClosed
	case len(dst) < len(c.values):
		return fmt.Errorf("room for %d of %d counters: %w", len(dst), len(c.values), ErrInvalid)
	}
	clear(dst[copy(dst, c.values):])
	return nil
}

// Destroy ends the counters (ibv_destroy_counters(3)): ErrBusy while a flow names
// them, ErrClosed twice.
func (c *Counters) Destroy() error {
	if c.s.d.closed.Load() {
		return ErrClosed
	}
	c.s.lock()
	defer c.s.release()
	switch {
	case c.dead:
		return ErrClosed
	case c.bound > 0:
		return fmt.Errorf("the counters are part of %d flows: %w", c.bound, ErrBusy)
	}
	c.dead = true
	c.s.counters--
	return nil
}

// count counts a frame of n bytes.
func (c *Counters) count(n int) {
	for _, p := range c.points {
		if p.kind == CounterPackets {
			c.values[p.index]++
		} else {
			c.values[p.index] += uint64(n)
		}
	}
}
