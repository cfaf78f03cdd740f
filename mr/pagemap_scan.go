// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// PAGEMAP_SCAN of linux/fs.h (Documentation/admin-guide/mm/pagemap.rst), Linux 6.7.
const (
	pagemapScan     = 0xc0606610 // _IOWR('f', 16, struct pm_scan_arg)
	scanProtect     = 1 << 0     // PM_SCAN_WP_MATCHING: what is found written is clean from then on
	scanCheck       = 1 << 1     // PM_SCAN_CHECK_WPASYNC: EPERM where nothing tells of writes
	pageIsWritten   = 1 << 1
	pageIsPresent   = 1 << 3
	pageIsSwapped   = 1 << 4
	pageIsZero      = 1 << 5 // the kernel's zero page
	scanRanges      = 512    // in a call
	pageIsSomewhere = pageIsPresent | pageIsSwapped
)

type scanArg struct {
	size, flags, start, end, walkEnd, vec, vecLen, maxPages         uint64
	categoryInverted, categoryMask, categoryAnyOfMask, returnedMask uint64
}

// scanned is struct page_region: a range of pages that have the same of what was asked.
type scanned struct{ start, end, categories uint64 }

// scan calls f for the ranges of pages that have all of the categories in all and one of
// those in any (0: no matter), and says which of those in get they have. With scanProtect
// those that were written are clean afterwards.
func (s *Space) scan(p span, flags, all, any, get uint64, buf []scanned, f func(scanned)) unix.Errno {
	for at := p.start; at < p.end; {
		a := scanArg{flags: flags, start: at, end: p.end, vec: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(buf)))), vecLen: uint64(len(buf)),
			categoryMask: all, categoryAnyOfMask: any, returnedMask: get}
		a.size = uint64(unsafe.Sizeof(a))
		n, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(s.pagemap), pagemapScan, uintptr(unsafe.Pointer(&a)))
		if e == unix.EINTR {
			continue
		}
		if e != 0 {
			return e
		}
		for _, r := range buf[:n] {
			f(r)
		}
		if a.walkEnd <= at {
			return unix.EINVAL
		}
		at = a.walkEnd
	}
	return 0
}
