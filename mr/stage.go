// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// stagePages is how many pages one UFFDIO_COPY places at most. Whole pages that
// arrive in packets of 4 KiB are gathered too, rather than placed one by one from
// where they are: 1.26 µs a page in 16 with the copy that gathers them, against
// 1.61 µs for a page alone (BenchmarkPlacePage, best of 8, Linux 6.18; the copy is
// 0.1 µs of it).
const stagePages = 16

// stageBuf is a staging buffer: outside the Go heap, as the kernel reads it by
// address.
type stageBuf struct {
	mem  *Memory
	data []byte
}

// Stage gathers the consecutive bytes of a message that go to absent pages, so that
// a page is placed once, whole, with the message's bytes as its first content. The
// zero value is ready. One stream of data uses it; it holds a buffer only while
// something is staged.
type Stage struct {
	a    *Accessor
	r    *Region
	buf  *stageBuf
	page uint64 // address of the first page, as requests count
	off  int    // where the bytes start in that page
	n    int    // bytes from there
}

// Active says whether something is staged.
func (st *Stage) Active() bool { return st.n > 0 }

// Drop forgets what is staged.
func (st *Stage) Drop() {
	if st.buf != nil {
		if st.a.closed {
			_ = st.buf.mem.Close() // nothing is registered there
		} else {
			st.a.bufs = append(st.a.bufs, st.buf)
		}
	}
	*st = Stage{}
}

// buffer takes a staging buffer; nil if all are in use.
func (a *Accessor) buffer() *stageBuf {
	if n := len(a.bufs); n > 0 {
		b := a.bufs[n-1]
		a.bufs = a.bufs[:n-1]
		return b
	}
	if a.spare == 0 {
		return nil
	}
	m, err := Alloc(stagePages * pageSize)
	if err != nil {
		return nil
	}
	a.spare--
	return &stageBuf{mem: m, data: m.Bytes()}
}

// stage adds bytes for absent pages and says how many it took.
func (a *Accessor) stage(st *Stage, r *Region, iova uint64, src []byte) (int, error) {
	if st.n > 0 && (st.r != r || st.page+uint64(st.off+st.n) != iova) {
		if err := a.Flush(st); err != nil {
			return 0, err
		}
	}
	if st.n == 0 {
		if len(src) >= stagePages*pageSize && len(src)&pageMask == 0 && r.va(iova)&pageMask == 0 {
			return len(src), a.place(r, iova, 0, src, src) // nothing to gather
		}
	}
	return a.gather(st, r, iova, src)
}

// gather copies bytes to what is staged, or begins with them.
func (a *Accessor) gather(st *Stage, r *Region, iova uint64, src []byte) (int, error) {
	if st.n == 0 {
		b := a.buffer()
		if b == nil {
			return a.stageAlone(r, iova, src)
		}
		off := r.va(iova) & pageMask // wherever the region is moved to
		*st = Stage{a: a, r: r, buf: b, page: iova - off, off: int(off)}
		clear(b.data[:st.off])
	}
	n := copy(st.buf.data[st.off+st.n:], src)
	st.n += n
	if st.off+st.n == len(st.buf.data) {
		return n, a.Flush(st)
	}
	return n, nil
}

// stageAlone places a part of a page for itself when staging buffers have run out:
// the page is brought in, and then written to as a present one.
func (a *Accessor) stageAlone(r *Region, iova uint64, src []byte) (int, error) {
	var wait waiter
	for {
		err := a.bringInPage(r, iova, min(len(src), pageSize-int(r.va(iova)&pageMask)))
		if err == nil {
			return 0, nil
		}
		if err = a.again(r, err, &wait); err != nil {
			return 0, err
		}
	}
}

func (a *Accessor) bringInPage(r *Region, iova uint64, n int) error {
	a.enter()
	defer a.exit()
	va := r.va(iova)
	if _, present, err := a.run(r, va, n); present || err != nil {
		return err
	}
	return a.bringIn(r, va, n)
}

// Flush places what is staged. Callers do so at the end of a message, before they
// acknowledge or complete it, and when they have no more packets. Errors as for
// Write. After ErrBusy, ErrSuspended and ErrMajor all is still staged, for another try:
// the bytes may be of packets that were taken long ago. After anything else nothing is.
// What is staged when a region is suspended waits with it, and goes where the region is
// when it is resumed.
func (a *Accessor) Flush(st *Stage) error {
	if st.n == 0 {
		return nil
	}
	end := st.off + st.n
	pages := (end + pageMask) &^ pageMask
	clear(st.buf.data[end:pages])
	err := a.place(st.r, st.page, st.off, st.buf.data[:pages], st.buf.data[st.off:end])
	if !Postponed(err) {
		st.Drop()
	}
	return err
}

// place makes pages present with content. data is their content in whole pages;
// bytes, at offset off of it, are those that really were sent: where a page turns
// out to be present, only they are written.
func (a *Accessor) place(r *Region, iova uint64, off int, data, bytes []byte) error {
	var wait waiter
	for done := 0; done < len(data); {
		n, err := a.placeSome(r, iova, off, data, bytes, done)
		if err != nil {
			if err = a.again(r, err, &wait); err == nil {
				continue
			}
			return a.s.suspectFault(r, iova+uint64(done), len(data)-done, true, err)
		}
		done += n
	}
	return nil
}

func (a *Accessor) placeSome(r *Region, iova uint64, off int, data, bytes []byte, done int) (int, error) {
	a.enter()
	defer a.exit()
	va := r.va(iova)
	at, n := va+uint64(done), min(len(data)-done, stagePages*pageSize)
	if g := r.gates(); g != 0 {
		if err := a.barred(r, g, at, n); err != nil {
			return 0, err
		}
	}
	if a.s.full() {
		return 0, ErrBusy
	}
	for i := 0; i < n; i += pageSize {
		w := a.s.word(at + uint64(i))
		st := w & stateMask
		if st < pageGone || st == pageLimbo || st == pageStored {
			if st < pageGone || off <= done+i && done+i+pageSize <= off+len(bytes) {
				continue // what an evicted page had is not needed any more
			}
		}
		if i > 0 {
			n = i
			break
		}
		switch {
		case st == pageLimbo:
			if n, err := a.recall(at, pageSize); n == 0 || err != nil {
				return 0, err
			}
			a.countHandled(r, 1)
			return pageSize, touch(va, off, bytes, done)
		case st == pageStored:
			a.wanted, a.wantedWord = at, w
			return 0, errStored
		case st == pagePoisoned:
			return 0, ErrPoisoned
		case r.paging == Implicit:
			return pageSize, touch(va, off, bytes, done)
		}
		return 0, ErrRemoved
	}
	copied, e := a.s.bring(at, unsafe.Pointer(&data[done]), n)
	switch {
	case e == 0:
		a.s.setPresent(at, copied)
		a.countHandled(r, copied>>pageShift)
		r.base.placements.Add(1)
		return copied, nil
	case e == unix.EEXIST || r.kernels(e):
		a.s.found(at, pageSize)
		if st := a.s.state(at); st >= pageLimbo {
			return 0, ErrBusy // about to leave
		}
		return pageSize, touch(va, off, bytes, done)
	}
	return 0, a.uffdError(r, at, e)
}

// touch writes those of bytes, at offset off from va, that go to the page at offset
// page from va.
func touch(va uint64, off int, bytes []byte, page int) error {
	from, to := max(page, off), min(page+pageSize, off+len(bytes))
	if from >= to {
		return nil
	}
	return guardedCopy(memory(va+uint64(from), to-from), bytes[from-off:to-off])
}
