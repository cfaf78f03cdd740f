// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// landing is the memory of one end that the messages of a measurement land in:
// slots of row.Size bytes, slots.Stride bytes apart.
type landing struct {
	pd    *provider.PD
	plan  *plan
	row   rowSpec
	slots slotting
	buf   *buffer
	next  int        // first slot never used, of cold memory, or not for longest, of evicting memory
	past  usage      // of memory that was given back
	pause *suspender // of suspending memory
	// evicted is how many pages had been evicted at these addresses before there was buf.
	evicted uint64
}

const landingAccess = mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead | mr.RemoteAtomic

// newLanding gets the memory. Cold memory is not touched, the other kinds are.
func newLanding(pd *provider.PD, p *plan, row rowSpec, s slotting) (*landing, error) {
	l := &landing{pd: pd, plan: p, row: row, slots: s}
	return l, l.open()
}

func (l *landing) open() (err error) {
	l.next = 0
	n := l.slots.Slots * l.slots.Stride
	l.buf, err = newBuffer(l.pd, n, landingAccess, l.row.Mem == memPinned, l.row.Mem != memCold)
	if err != nil || l.row.Mem != memEvicting && l.row.Mem != memSuspending {
		return err
	}
	u, err := l.buf.reg.Usage()
	if err != nil {
		return err
	}
	l.evicted = u.Evictions
	if l.row.Mem == memEvicting {
		return l.buf.reg.SetBudget(max(uint64(n)*uint64(l.plan.Budget)/100, pageSize))
	}
	l.pause, err = suspend(l.buf.reg, l.plan.Suspend)
	return err
}

// take gives the first of n slots for a round. Cold memory that has not so many
// untouched ones left is replaced by new memory.
func (l *landing) take(n int) (base int, err error) {
	if n < 0 || n > l.slots.Slots {
		return 0, fmt.Errorf("a round of %d messages does not fit %d slots", n, l.slots.Slots)
	}
	switch wrap := l.next+n > l.slots.Slots; {
	case !l.row.Mem.apart():
		return 0, nil
	case wrap && l.row.Mem == memEvicting:
		l.next = 0
	case wrap:
		if err := l.shut(); err != nil {
			return 0, err
		}
		if err := l.open(); err != nil {
			return 0, err
		}
	}
	base = l.next
	l.next += n
	return base, nil
}

// cost is what happened so far to memory that was given back.
func (l *landing) cost() usage {
	if l == nil {
		return usage{}
	}
	return l.past
}

func (l *landing) shut() error {
	if l == nil || l.buf == nil {
		return nil
	}
	buf := l.buf
	l.buf = nil
	suspends, err := l.pause.end()
	l.pause = nil
	// Read after the region is closed to the engine, so that no fault is missed.
	err = errors.Join(err, buf.reg.Dereg())
	use := usage{Faults: buf.reg.Stats().PageFaults}
	if l.row.Mem == memEvicting || l.row.Mem == memSuspending {
		u, uerr := buf.reg.Usage()
		err = errors.Join(err, uerr)
		use.moves = moves{Minor: u.FaultsMinor, Major: u.FaultsMajor, Evictions: u.Evictions - l.evicted, RNRs: u.RNRs, Suspends: suspends}
	}
	l.past.add(use)
	return errors.Join(err, buf.mem.Close())
}

// remote names slot base for the peer; the zero value without memory.
func (l *landing) remote(base int) remote {
	if l == nil {
		return remote{}
	}
	return l.buf.remote(base * l.slots.Stride)
}

// slot is the memory of one message.
func (l *landing) slot(i int) []byte {
	o := i * l.slots.Stride
	return l.buf.bytes()[o : o+l.row.Size]
}

// sge names a slot for a work request.
func (l *landing) sge(i int) qp.SGE {
	return qp.SGE{
		Addr: uint64(l.buf.mem.Addr()) + uint64(i*l.slots.Stride), Length: uint32(l.row.Size), LKey: l.buf.reg.LKey(),
	}
}

// Messages of a measurement are numbered from 0 in each direction; datum gives the
// number in the pattern: pings have the even ones, pongs the odd.
func datum(i uint64, pong bool) uint64 {
	n := 2 * i
	if pong {
		n++
	}
	return n
}

// expect makes the last byte of each slot differ from what it will be, for those
// who poll it. Cold and evicting memory is left alone: its pages are not to be touched.
func (l *landing) expect(p pattern, first uint64, count, base int, pong bool) {
	if l.row.Op != opWrite || l.row.Mem.apart() {
		return
	}
	for i := range count {
		b := l.slot(base + i)
		m := p.message(datum(first+uint64(i), pong), l.row.Size)
		b[len(b)-1] = ^m[len(m)-1]
	}
}

// last reads the last byte of a slot as it is now: the engine, another thread,
// stores it after all others. Slots are of whole words, so the word can be read.
func (l *landing) last(i int) byte {
	at := i*l.slots.Stride + l.row.Size - 1
	w := loadWord(l.buf.bytes(), at&^3)
	return (*[4]byte)(unsafe.Pointer(&w))[at&3]
}

func loadWord(b []byte, at int) uint32 {
	return atomic.LoadUint32((*uint32)(unsafe.Pointer(&b[at : at+4][0])))
}

// verify compares what landed with the pattern; "" means that every byte is right.
func (l *landing) verify(p pattern, first uint64, count, base int, pong bool) string {
	for i := range count {
		n := first + uint64(i)
		if at, ok := p.check(datum(n, pong), l.slot(base+i)); !ok {
			return fmt.Sprintf("message %d is wrong from byte %d on", n, at)
		}
		if l.row.Mem == memEvicting && !l.restIsZero(base+i) {
			return fmt.Sprintf("the page behind message %d is not what it was", n)
		}
	}
	return ""
}

// restIsZero says whether the page that a message ends in is as it was behind it: of
// evicting memory, its content has left with the rest of the page, and come back.
func (l *landing) restIsZero(i int) bool {
	for _, b := range l.buf.bytes()[i*l.slots.Stride+l.row.Size : (i+1)*l.slots.Stride] {
		if b != 0 {
			return false
		}
	}
	return true
}

// Atomic operation i works on the 64-bit word in slot i. Even ones are fetch-and-add,
// odd ones compare-and-swap. Cold words begin as zero, others as pattern.

// beforeAtomic and afterAtomic give the word of operation n before and after it.
func beforeAtomic(r rowSpec, p pattern, n uint64) uint64 {
	if r.Mem == memCold {
		return 0
	}
	return p.word(datum(n, true))
}

func afterAtomic(r rowSpec, p pattern, n uint64) uint64 {
	operand := p.word(datum(n, false))
	if n%2 == 0 {
		return beforeAtomic(r, p, n) + operand
	}
	return operand
}

// setWords puts the words of a round in place, unless they are cold. Evicting memory has
// its pages back for that, and they leave again.
func (l *landing) setWords(p pattern, first uint64, count, base int) error {
	if l.row.Mem == memCold {
		return nil
	}
	for i := range count {
		binary.NativeEndian.PutUint64(l.slot(base+i), beforeAtomic(l.row, p, first+uint64(i)))
	}
	if l.row.Mem != memEvicting {
		return nil
	}
	_, err := l.buf.reg.Evict(l.remote(base).Addr, uint64(count*l.slots.Stride), mr.Stored)
	return err
}

// verifyWords compares the words of a round with what the operations make of them.
func (l *landing) verifyWords(p pattern, first uint64, count, base int) string {
	for i := range count {
		n := first + uint64(i)
		if got, want := binary.NativeEndian.Uint64(l.slot(base+i)), afterAtomic(l.row, p, n); got != want {
			return fmt.Sprintf("the word of atomic %d is %#x instead of %#x", n, got, want)
		}
	}
	return ""
}

// verifyResults compares the values that atomics of row r returned.
func (l *landing) verifyResults(r rowSpec, p pattern, first uint64, count, base int) string {
	for i := range count {
		n := first + uint64(i)
		if got, want := binary.NativeEndian.Uint64(l.slot(base+i)), beforeAtomic(r, p, n); got != want {
			return fmt.Sprintf("atomic %d returned %#x instead of %#x", n, got, want)
		}
	}
	return ""
}
