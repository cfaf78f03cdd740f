// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"errors"
	"unsafe"

	"github.com/tapverbs/tapverbs/mr"
)

// errListShort: a scatter or gather list ends before the data does.
var errListShort = errors.New("scatter/gather list shorter than the data")

// localStatus is how a work request ends whose own memory gave an error (IBA
// 11.6.2).
func localStatus(err error) WCStatus {
	switch err {
	case errListShort:
		return WCLocLenErr
	case mr.ErrMajor, mr.ErrPoisoned:
		return WCLocQPOpErr // the memory is as it should be; its content is not to be had
	}
	return WCLocProtErr
}

// gather reads len(dst) bytes from offset off of a gather list, checking each
// element's key (IBA 10.6.3, 10.7.2.2). moved is mr.Table.Moved at the begin of the
// message. Errors are those of mr, and errListShort.
func (q *QP) gather(moved uint64, sges []SGE, off uint32, dst []byte) error {
	for i := range sges {
		s := &sges[i]
		if off >= s.Length {
			off -= s.Length
			continue
		}
		n := min(s.Length-off, uint32(len(dst)))
		if n == 0 {
			break
		}
		va := s.Addr + uint64(off)
		r, err := q.listCheck(s.LKey, q.init.PD, moved, va, uint64(n), 0)
		if err == nil {
			err = q.env.Mem.Read(r, va, dst[:n])
		}
		if err != nil {
			return err
		}
		dst, off = dst[n:], 0
	}
	if len(dst) > 0 {
		return errListShort
	}
	return nil
}

// lend has the packet begun last borrow n bytes at offset off of a gather list; false if
// they are to be copied, as they are in several of its elements. Errors as for gather.
func (q *QP) lend(moved uint64, sges []SGE, off, n uint32) (bool, error) {
	for i := range sges {
		s := &sges[i]
		if off >= s.Length {
			off -= s.Length
			continue
		}
		if s.Length-off < n {
			return false, nil
		}
		va := s.Addr + uint64(off)
		r, err := q.listCheck(s.LKey, q.init.PD, moved, va, uint64(n), 0)
		if err != nil {
			return false, err
		}
		ok, err := q.env.Mem.Lend(r, va, uint64(n))
		return ok && q.env.Out.Borrow(r, va, int(n)), err
	}
	return false, nil
}

// scatter writes src to offset off of a scatter list of a domain. What is staged for pages
// that are absent is placed by flushing st. Errors as for gather.
func (q *QP) scatter(st *mr.Stage, pd mr.PD, moved uint64, sges []SGE, off uint32, src []byte) error {
	for i := range sges {
		s := &sges[i]
		if off >= s.Length {
			off -= s.Length
			continue
		}
		n := min(s.Length-off, uint32(len(src)))
		if n == 0 {
			break
		}
		va := s.Addr + uint64(off)
		r, err := q.listCheck(s.LKey, pd, moved, va, uint64(n), mr.LocalWrite)
		if err == nil {
			err = q.env.Mem.Write(st, r, va, src[:n])
		}
		if err != nil {
			return err
		}
		src, off = src[n:], 0
	}
	if len(src) > 0 {
		return errListShort
	}
	return nil
}

// listCheck checks the key of a list's element.
func (q *QP) listCheck(k mr.Key, pd mr.PD, moved, va, n uint64, need mr.Access) (*mr.Region, error) {
	r, err := q.env.Keys.Check(k, pd, va, n, need)
	if err == nil && r.MovedSince(moved) {
		return nil, mr.ErrKey
	}
	return r, err
}

// bytesAt is n bytes of the process's memory at an address that a work request
// names.
func bytesAt(addr uint64, n uint32) []byte {
	if n == 0 {
		return nil
	}
	a := uintptr(addr)
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&a)), n)
}
