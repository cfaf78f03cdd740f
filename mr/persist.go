// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"bytes"
	"fmt"

	"golang.org/x/sys/unix"
)

// Persist writes the pages of n bytes at iova back to the file that is mapped there,
// and waits until they are on its disk (msync(2), MS_SYNC). It is for regions with
// FlushPersistent, touches no page, and is not called with a baton held. Errors:
// ErrKey when the region was deregistered, ErrRemoved when the memory is not mapped
// any more, ErrFault when the file could not be written, ErrSuspended.
func (r *Region) Persist(iova, n uint64) error {
	if err := r.living(); err != nil {
		return err
	}
	va := r.va(iova)
	start, end := va&^pageMask, (va+n+pageMask)&^pageMask
	for {
		_, _, e := unix.Syscall(unix.SYS_MSYNC, uintptr(start), uintptr(end-start), unix.MS_SYNC)
		switch e {
		case 0:
			return nil
		case unix.EINTR:
		case unix.ENOMEM:
			if r.Suspended() || r.va(iova) != va {
				return ErrSuspended // it is being moved, or was
			}
			return ErrRemoved
		default:
			return ErrFault
		}
	}
}

// persistable says ErrInvalid unless all of a range is a shared mapping of a file that
// has a name: what is written to anything else ends with the process.
func persistable(p span) error {
	at := p.start
	if err := mappings(func(m mapping) bool {
		if m.end <= at {
			return true
		}
		if m.start > at || m.perms[3] != 's' || !m.file || bytes.HasSuffix(m.path, []byte("(deleted)")) {
			return false
		}
		at = m.end
		return at < p.end
	}); err != nil {
		return fmt.Errorf("persistent flush: %w", err)
	}
	if at >= p.end {
		return nil
	}
	return fmt.Errorf("%w: persistent flush of memory that is not a shared mapping of a file", ErrInvalid)
}
