// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/wire"
)

// flush writes what is queued and says whether anything was written.
func (e *egress) flush() (did bool) {
	e.open = false
	e.s.acc.Shut() // writing takes a while
	if e.s.gone.Load() {
		e.drop()
		return false
	}
	for e.head < e.tail {
		n, err := e.write()
		if n > 0 {
			did = true
			e.s.passed()
		}
		if err != nil {
			e.s.deviceError(err)
			if errors.Is(err, tap.ErrGone) { // down, too: a frame on a dead line is lost
				e.drop()
				return did
			}
			e.s.cnt.TxErrors++
			if r := &e.runs[e.head]; e.together(r) > 1 && !errors.Is(err, unix.EFAULT) {
				e.refused(r.family()) // the kernel does not like them: one by one, then, for good
			} else {
				e.consume(1) // the packet that the device does not like
			}
			continue
		}
		if n == 0 {
			e.blocked = true
			return did
		}
	}
	e.reset()
	return did
}

// write writes what one call can, and says how many packets that were: 0 without an error
// if the device is full, and -1 if one is lost instead, as its memory is not to be had.
func (e *egress) write() (packets int, err error) {
	if e.runs[e.head].lents > 0 {
		return e.writeLent()
	}
	k := 0
	for i := e.head; i < e.tail && k < outAt && e.runs[i].lents == 0; i++ {
		r := &e.runs[i]
		n := e.together(r)
		if r.h > 0 {
			e.putHeaders(r, n)
		}
		e.out[k] = tap.Frame{B: e.buf[r.at:e.endOf(r, n)], GSO: r.gso(n)}
		k++
		if n < r.n {
			break // the rest of it comes first
		}
	}
	taken, err := e.s.dev.WriteBatch(e.out[:k])
	for range taken {
		n := e.together(&e.runs[e.head])
		packets += n
		e.consume(n)
	}
	return packets, err
}

// together is how many packets of a run go as one frame.
func (e *egress) together(r *run) int {
	if r.n == 1 || !e.super.Has(r.family()) {
		return 1
	}
	return r.n
}

// family is the kind of super-frame that a run of several packets is.
func (r *run) family() tap.Offload { return familyOf(r.h) }

// familyOf is the kind of super-frame that packets behind h bytes of headers make.
func familyOf(h int) tap.Offload {
	if h == wire.EthLen+wire.IPv4Len+wire.UDPLen {
		return tap.USO4
	}
	return tap.USO6
}

// refused has no more super-frames of a kind made, as the kernel takes none.
func (e *egress) refused(kind tap.Offload) {
	e.super &^= kind
	e.open = false
	e.s.cnt.SuperRefused++
	e.s.d.refused.Or(uint32(kind))
}

// gso is what a tap.Frame of the run's first n packets says.
func (r *run) gso(n int) uint16 {
	if n == 1 {
		return 0
	}
	return uint16(r.first)
}

// putHeaders writes the headers for the first n packets of a run.
func (e *egress) putHeaders(r *run, n int) {
	head := e.buf[r.at : r.at+r.h]
	switch {
	case n > 1:
		wire.PutSuper(head, head, min(n*r.first, r.size))
	case r.n > 1:
		wire.PutSingle(head, r.first, r.id)
	}
}

// endOf is where the first n packets of a run end in buf.
func (e *egress) endOf(r *run, n int) int {
	if n == r.n {
		return r.end
	}
	end := r.at + r.h + n*r.first
	for _, l := range e.lent[r.lent : r.lent+r.lents] {
		if l.packet-r.gone < n {
			end -= l.n
		}
	}
	return end
}

// consume takes packets off the first run, and it off the queue with the last.
func (e *egress) consume(n int) {
	r := &e.runs[e.head]
	e.waiting -= n
	if n == r.n {
		e.head++
		return
	}
	at := e.endOf(r, n) - r.h
	copy(e.buf[at:], e.buf[r.at:r.at+r.h])
	r.at = at
	r.n, r.gone, r.size, r.id = r.n-n, r.gone+n, r.size-n*r.first, r.id+uint16(n)
	for r.lents > 0 && e.lent[r.lent].packet < r.gone {
		r.lent++
		r.lents--
	}
	r.first = min(r.first, r.size)
	wire.PutSingle(e.buf[at:at+r.h], r.first, r.id)
}

// writeLent writes the first run, which has payloads that are read where they are: by the
// ICRC, and at once, while they are in the processor's cache, by the kernel.
func (e *egress) writeLent() (packets int, err error) {
	r := &e.runs[e.head]
	e.s.acc.Open()
	_ = mr.Guard(e.seal) // sealed says how far it came
	n := min(e.together(r), e.sealed)
	if n == 0 {
		e.s.acc.Shut()
		e.consume(1)
		e.s.cnt.TxDropped++
		return -1, nil
	}
	e.putHeaders(r, n)
	end, k := e.endOf(r, n), 0
	f := tap.Frame{B: e.buf[r.at:end], GSO: r.gso(n)}
	last := &f.B
	for j, l := range e.lent[r.lent : r.lent+r.lents] {
		if l.packet-r.gone >= n {
			break
		}
		*last = (*last)[:len(*last)-(end-l.at)]
		e.pieces[k], e.pieces[k+1] = e.views[j], e.buf[l.at:end]
		last = &e.pieces[k+1]
		k += 2
	}
	f.More = e.pieces[:k]
	e.out[0] = f
	taken, err := e.s.dev.WriteBatch(e.out[:1])
	e.s.acc.Shut()
	clear(e.pieces[:k])
	e.out[0] = tap.Frame{}
	if taken == 0 {
		return 0, err
	}
	e.consume(n)
	return n, err
}

// sealFirst writes the ICRCs of the packets of the first run that are written together,
// as far as their payloads are to be had.
func (e *egress) sealFirst() {
	r := &e.runs[e.head]
	n := e.together(r)
	for j := range r.lents {
		l := &e.lent[r.lent+j]
		e.sealed = l.packet - r.gone
		if e.sealed >= n {
			break
		}
		view, err := e.s.acc.View(l.region, l.iova, l.n)
		if err != nil {
			return
		}
		l.prefix.SealApart(e.buf[l.start:l.at], view, e.buf[l.at:l.at+wire.ICRCLen], l.id)
		e.views[j] = view
	}
	e.sealed = n
}
