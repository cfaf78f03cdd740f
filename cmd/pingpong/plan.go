// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tapverbs/tapverbs/qp"
)

// op is an operation that is measured.
type op uint8

const (
	opSend op = iota
	opWrite
	opWriteImm
	opRead
	opAtomic
	numOps
)

var opNames = [numOps]string{"send", "write", "write-imm", "read", "atomic"}

func (o op) String() string { return opNames[o] }

// twoSided says whether a message takes a receive work request at the peer.
func (o op) twoSided() bool { return o == opSend || o == opWriteImm }

// halves says whether an operation is played as a ping and a pong, so that half
// of the time there and back is reported. READ and atomics bring their answer
// with them: theirs is the time of the whole operation, as in perftest's
// ib_read_lat and ib_atomic_lat.
func (o op) halves() bool { return o != opRead && o != opAtomic }

// memory says what the memory is like in which messages land.
type memory uint8

const (
	memResident   memory = iota // every page touched before
	memCold                     // no page ever touched before a message lands in it
	memPinned                   // mlock'ed
	memEvicting                 // more than its budget: pages leave, and come back for messages
	memSuspending               // its region is suspended and resumed again and again
	numMemories
)

var memoryNames = [numMemories]string{"resident", "cold", "pinned", "evicting", "suspending"}

func (m memory) String() string { return memoryNames[m] }

// apart says whether each message has pages of its own that nobody but the engine
// touches before it lands.
func (m memory) apart() bool { return m == memCold || m == memEvicting }

// uffd says whether the memory is nothing without userfaultfd.
func (m memory) uffd() bool { return m.apart() }

// phase is one of the two measurements of a row.
type phase uint8

const (
	phaseLatency phase = iota
	phaseBandwidth
	numPhases
)

var phaseNames = [numPhases]string{"latency", "bandwidth"}

func (p phase) String() string { return phaseNames[p] }

// plan is what the client decides for both ends.
type plan struct {
	Sizes  []int // message sizes in bytes
	Iters  int   // messages per measurement, 0: by time
	Depth  int   // work requests in flight per QP
	QPs    int
	MTU    qp.MTU
	Seed   uint64
	Events bool
	// Budget is the share of evicting memory that may be in memory, in percent.
	Budget int
	// Suspend is how a suspending region's time goes.
	Suspend rhythm
}

// rhythm is: For so long in each Every.
type rhythm struct{ For, Every time.Duration }

func (r rhythm) String() string { return r.For.String() + "/" + r.Every.String() }

// set reads "1ms/10ms".
func (r *rhythm) set(s string) (err error) {
	a, b, ok := strings.Cut(s, "/")
	if r.For, err = time.ParseDuration(a); err == nil && ok {
		r.Every, err = time.ParseDuration(b)
	}
	if !ok || err != nil || !r.ok() {
		return errors.New("want two times such as 1ms/10ms, the first shorter than the second, at most 1s and 10s")
	}
	return nil
}

// ok: a suspension ends before the peer could think that this end is gone.
func (r rhythm) ok() bool {
	return r.For > 0 && r.For < r.Every && r.For <= time.Second && r.Every <= 10*time.Second
}

// ok says whether an end can do what the plan asks for.
func (p *plan) ok() bool {
	return p.maxSize() <= maxSize && p.QPs >= 1 && p.QPs <= 256 && p.Depth >= 1 && p.Budget >= 1 && p.Budget <= 100 && p.Suspend.ok()
}

// maxSize is the longest message in bytes.
func (p *plan) maxSize() int {
	n := atomicSize
	for _, s := range p.Sizes {
		n = max(n, s)
	}
	return n
}

const (
	pageSize   = 4096
	atomicSize = 8 // bytes (IBA 9.4.5)
	// landingBytes is the memory that bandwidth lands in: 256 MiB.
	landingBytes = 256 << 20
	// evictingBytes is that of evicting memory.
	evictingBytes = 64 << 20
	// latencyBytes bounds the memory that latency lands in.
	latencyBytes = 32 << 20
	// roundMessages bounds the messages of a round that take a receive work
	// request each, or time each: they are posted before the clock runs.
	roundMessages = 4096
)

// rowSpec is one row of the table: an operation on a kind of memory with a size.
type rowSpec struct {
	Op   op
	Mem  memory
	Size int
}

func (r rowSpec) String() string {
	return fmt.Sprintf("%s, %s memory, %s", r.Op, r.Mem, sizeString(r.Size))
}

// rows lists what is measured. Without lists from the command line it is every
// operation on resident memory, and WRITE, whose target takes no part in it, on
// the other two: there the way of paging shows best.
func rows(ops []op, mems []memory, sizes []int) []rowSpec {
	chosen := ops != nil || mems != nil
	if ops == nil {
		for o := range numOps {
			ops = append(ops, o)
		}
	}
	if mems == nil {
		mems = []memory{memResident}
		if !chosen {
			mems = append(mems, memCold, memPinned)
		}
	}
	var out []rowSpec
	for _, o := range ops {
		for _, m := range mems {
			if !chosen && m != memResident && o != opWrite {
				continue
			}
			if o == opAtomic {
				out = append(out, rowSpec{o, m, atomicSize})
				continue
			}
			for _, s := range sizes {
				out = append(out, rowSpec{o, m, s})
			}
		}
	}
	return out
}

// slotting says how a measurement lays its messages out in memory.
type slotting struct {
	Stride int // bytes from one message's slot to the next
	Slots  int // messages that fit in the memory
	Round  int // messages that go between two looks at the data
}

// slots lays out a measurement. Cold memory gives every message pages of its own,
// so that each arrives at pages never touched, and evicting memory too; the others sit
// close.
func slots(r rowSpec, ph phase, limit int) slotting {
	unit := 64
	if r.Mem.apart() {
		unit = pageSize
	}
	var s slotting
	s.Stride = (r.Size + unit - 1) / unit * unit
	total := landingBytes
	switch {
	case ph == phaseLatency:
		total = latencyBytes
	case r.Mem == memEvicting:
		total = evictingBytes
	}
	if limit > 0 {
		total = min(total, limit)
	}
	s.Slots = max(1, total/s.Stride)
	s.Round = s.Slots
	if ph == phaseLatency || r.Op.twoSided() {
		s.Round = min(s.Round, roundMessages)
	}
	if !r.Mem.apart() {
		// Nothing is gained by more slots than a round uses.
		s.Round = min(s.Round, roundMessages)
		s.Slots = s.Round
	}
	return s
}

// pages is the number of pages that one message of a slotting lands in when every
// slot begins a page.
func pages(size int) int { return (size + pageSize - 1) / pageSize }

// sizeString gives a byte count in the largest of B, KiB and MiB that divides it.
func sizeString(n int) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 1<<10 && n%(1<<10) == 0:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d B", n)
}
