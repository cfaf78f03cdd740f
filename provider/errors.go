// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"context"
	"errors"
	"syscall"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
)

// codeError is a sentinel that knows its errno.
type codeError struct {
	msg   string
	errno syscall.Errno
}

func (e *codeError) Error() string { return e.msg }

// Errors of the verbs. Test with errors.Is; Errno gives their numbers.
var (
	// ErrInvalid: an argument makes no sense (EINVAL).
	ErrInvalid error = &codeError{"invalid argument", syscall.EINVAL}
	// ErrBusy: the object is still used by another one (EBUSY).
	ErrBusy error = &codeError{"object is in use", syscall.EBUSY}
	// ErrClosed: the object or its device was destroyed (EBADF).
	ErrClosed error = &codeError{"object was destroyed", syscall.EBADF}
	// ErrGone: the device's TAP port was taken away (EIO).
	ErrGone error = &codeError{"device is gone", syscall.EIO}
	// ErrNoMem: a limit of the device is reached (ENOMEM); see DeviceAttr.
	ErrNoMem error = &codeError{"device limit reached", syscall.ENOMEM}
	// ErrTimeout: a neighbour does not answer ARP or neighbour solicitations (ETIMEDOUT).
	ErrTimeout error = &codeError{"neighbour does not answer", syscall.ETIMEDOUT}
	// ErrUnreachable: no address of the device is on the destination's link, and
	// no gateway is configured (ENETUNREACH).
	ErrUnreachable error = &codeError{"no route to destination", syscall.ENETUNREACH}
	// ErrPermission: the object does not allow this (EPERM).
	ErrPermission error = &codeError{"not allowed", syscall.EPERM}
	// ErrFault: an address outside the region, or a key that there is not, where memory
	// is named to a verb (EFAULT).
	ErrFault error = &codeError{"bad address", syscall.EFAULT}
	// ErrNotSupported: the device does not offer this (EOPNOTSUPP).
	ErrNotSupported error = &codeError{"not supported", syscall.EOPNOTSUPP}
)

// Errno gives the number that the verb of the C library returns for err: 0 for
// nil, EIO for an error that has none of its own.
func Errno(err error) syscall.Errno {
	if err == nil {
		return 0
	}
	var c *codeError
	if errors.As(err, &c) {
		return c.errno
	}
	for _, m := range [...]struct {
		err error
		no  syscall.Errno
	}{
		{qp.ErrTransition, syscall.EINVAL}, {qp.ErrAttrMask, syscall.EINVAL}, {qp.ErrAttrValue, syscall.EINVAL},
		{qp.ErrState, syscall.EINVAL}, {qp.ErrOpcode, syscall.EINVAL}, {qp.ErrLength, syscall.EINVAL}, {qp.ErrFlush, syscall.EINVAL},
		{qp.ErrHasSRQ, syscall.EINVAL}, {qp.ErrType, syscall.EOPNOTSUPP}, {qp.ErrFull, syscall.ENOMEM}, {qp.ErrTooManySGE, syscall.EINVAL},
		{mr.ErrInvalid, syscall.EINVAL}, {mr.ErrFault, syscall.EFAULT}, {mr.ErrUnmapped, syscall.EFAULT}, {mr.ErrRemoved, syscall.EFAULT}, {mr.ErrNoMem, syscall.ENOMEM},
		{mr.ErrMemlock, syscall.ENOMEM}, {mr.ErrClosed, syscall.EINVAL}, {mr.ErrBound, syscall.EBUSY}, {mr.ErrBusy, syscall.EBUSY}, {mr.ErrNotSupported, syscall.EOPNOTSUPP},
		{mr.ErrSuspended, syscall.EBUSY}, {mr.ErrMajor, syscall.EAGAIN}, {mr.ErrEliminated, syscall.EIDRM}, {mr.ErrPoisoned, syscall.EIO},
		{mr.ErrRange, syscall.EFAULT},
		{tap.ErrPermission, syscall.EPERM}, {tap.ErrNoTUN, syscall.ENODEV}, {tap.ErrBusy, syscall.EBUSY},
		{tap.ErrName, syscall.EINVAL}, {tap.ErrNotTAP, syscall.EINVAL}, {tap.ErrGone, syscall.EIO},
		{context.DeadlineExceeded, syscall.ETIMEDOUT}, {context.Canceled, syscall.ECANCELED},
	} {
		if errors.Is(err, m.err) {
			return m.no
		}
	}
	var no syscall.Errno // what a system call said, below the sentinels
	if errors.As(err, &no) {
		return no
	}
	return syscall.EIO
}
