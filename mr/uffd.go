// SPDX-License-Identifier: Apache-2.0

package mr

// #include "pager.h"
import "C"

import (
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Of linux/userfaultfd.h, ioctl_userfaultfd(2).
const (
	uffdAPI            = 0xaa
	uffdUserModeOnly   = 1
	uffdFeatureFork    = 1 << 1 // its event needs CAP_SYS_PTRACE
	uffdFeatureRemap   = 1 << 2
	uffdFeatureRemove  = 1 << 3
	uffdFeatureShmem   = 1 << 5
	uffdFeatureUnmap   = 1 << 6
	uffdFeatureSigbus  = 1 << 7
	uffdFeatureThread  = 1 << 8  // faults say whose they are
	uffdFeatureWPShmem = 1 << 12 // Linux 5.19
	uffdFeatureWPHoles = 1 << 13 // write protection of absent pages; Linux 6.4
	uffdFeaturePoison  = 1 << 14 // Linux 6.6
	uffdFeatureWPAsync = 1 << 15 // lifted by the kernel, which remembers it; Linux 6.7
	uffdFeatureMove    = 1 << 16 // Linux 6.8
	uffdRegisterMiss   = 1
	uffdRegisterWP     = 2
	uffdCopyDontWake   = 1
	uffdioCopyBit      = 1 << 3
	uffdioZeropageBit  = 1 << 4
	uffdIocNew         = 0xaa00     // USERFAULTFD_IOC_NEW of /dev/userfaultfd
	uffdioAPI          = 0xc018aa3f // ioctl numbers: _IOWR(0xaa, nr, size)
	uffdioRegister     = 0xc020aa00
	uffdioUnregister   = 0x8010aa01
	uffdioCopy         = 0xc028aa03
	uffdioZeropage     = 0xc020aa04
	uffdioMove         = 0xc028aa05
	uffdioWriteProtect = 0xc018aa06
	uffdMoveDontWake   = 1
	uffdMoveHoles      = 2 // pages of the source that are absent leave absent ones
	pageShift          = 12
	pageSize           = 1 << pageShift
	pageMask           = pageSize - 1
	wantedUffdFeatures = uffdFeatureRemap | uffdFeatureRemove | uffdFeatureUnmap
	dirtyUffdFeatures  = uffdFeatureWPShmem | uffdFeatureWPHoles | uffdFeatureWPAsync

	// Features to do without where the kernel does not have them, or not for us.
	optionalUffdFeatures = uffdFeatureFork | uffdFeatureThread | uffdFeatureShmem | uffdFeaturePoison | uffdFeatureMove | dirtyUffdFeatures
)

type uffdRange struct{ start, len uint64 }

type uffdAPIArg struct{ api, features, ioctls uint64 }

type uffdRegisterArg struct {
	r            uffdRange
	mode, ioctls uint64
}

type uffdCopyArg struct {
	dst, src, len, mode uint64
	copied              int64
}

type uffdZeroArg struct {
	r      uffdRange
	mode   uint64
	zeroed int64
}

// openUffd gives a userfaultfd with what the pager needs. Kernel-mode faults (the
// application's system calls on absent pages) need a privilege: CAP_SYS_PTRACE,
// vm.unprivileged_userfaultfd=1 or access to /dev/userfaultfd. With UserModeOnly
// it does without, and such system calls then fail with EFAULT. features are those
// that it has been given.
func openUffd(o Options) (fd int, features uint64, err error) {
	const flags = unix.O_CLOEXEC | unix.O_NONBLOCK
	try := []func() (int, error){
		func() (int, error) { return userfaultfd(flags) },
		func() (int, error) {
			f, err := os.OpenFile("/dev/userfaultfd", os.O_RDWR, 0)
			if err != nil {
				return -1, err
			}
			defer f.Close()
			fd, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uffdIocNew, flags)
			if e != 0 {
				return -1, e
			}
			return int(fd), nil
		},
	}
	if o.UserModeOnly {
		try = append(try, func() (int, error) { return userfaultfd(flags | uffdUserModeOnly) })
	}
	var why error
	for _, open := range try {
		fd, err := open()
		if err != nil {
			why = also(why, err)
			continue
		}
		features, err := handshake(fd, open, o)
		if err == nil {
			return fd, features, nil
		}
		unix.Close(fd)
		why = also(why, fmt.Errorf("the kernel's userfaultfd lacks events for remap, remove and unmap: %w", err))
	}
	return -1, 0, fmt.Errorf("no userfaultfd (be root, or set the sysctl vm.unprivileged_userfaultfd to 1): %w", why)
}

// handshake asks for what is wanted of a userfaultfd, and for what else the kernel has
// (UFFDIO_API: that can be asked for once, so what there is, is asked of another one).
func handshake(fd int, another func() (int, error), o Options) (uint64, error) {
	probe, err := another()
	if err != nil {
		return 0, err
	}
	defer unix.Close(probe)
	has := uffdAPIArg{api: uffdAPI}
	if err := uffdIoctl(probe, uffdioAPI, unsafe.Pointer(&has)); err != nil {
		return 0, err
	}
	want := wantedUffdFeatures | optionalUffdFeatures&has.features
	if o.deafToFork {
		want &^= uffdFeatureFork
	}
	a := uffdAPIArg{api: uffdAPI, features: want}
	err = uffdIoctl(fd, uffdioAPI, unsafe.Pointer(&a))
	if err == unix.EPERM && want&uffdFeatureFork != 0 {
		want &^= uffdFeatureFork
		a = uffdAPIArg{api: uffdAPI, features: want}
		err = uffdIoctl(fd, uffdioAPI, unsafe.Pointer(&a))
	}
	return want, err
}

// also is both errors on one line.
func also(a, b error) error {
	if a == nil {
		return b
	}
	return fmt.Errorf("%w; %w", a, b)
}

func userfaultfd(flags int) (int, error) {
	fd, _, e := unix.Syscall(unix.SYS_USERFAULTFD, uintptr(flags), 0, 0)
	if e != 0 {
		return -1, e
	}
	return int(fd), nil
}

func uffdIoctl(fd int, req uint, arg unsafe.Pointer) error {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(arg)); e != 0 {
		return e
	}
	return nil
}

// registerPages is UFFDIO_REGISTER for pages that the pager may have out. It gives the
// operations that the kernel then knows for them.
func (s *Space) registerPages(fd int, start, end, mode uint64) (uint64, unix.Errno) {
	var ioctls C.uint64_t
	e := C.tv_register(s.sh, C.int(fd), C.uint64_t(start), C.uint64_t(end-start), C.uint64_t(mode), &ioctls)
	return uint64(ioctls), unix.Errno(e)
}

// arm registers pages with userfaultfd. An error means that the kernel can't
// page (all of) them that way, and then none of them is.
func (s *Space) arm(start, end uint64) error {
	ioctls, e := s.registerPages(s.uffd, start, end, uffdRegisterMiss)
	if e != 0 {
		return e
	}
	if need := uint64(uffdioCopyBit | uffdioZeropageBit); ioctls&need != need {
		for _, m := range s.armed.missing(start, end) { // the rest is other regions'
			s.letGo(m)
		}
		return unix.EINVAL
	}
	return nil
}

// disarm gives pages back to the kernel, also the one that the pager may have out
// and is about to put back.
func (s *Space) disarm(start, end uint64) {
	lending := (*atomic.Uint32)(unsafe.Pointer(&s.sh.lending))
	for i := 0; ; i++ {
		was := lending.Load()
		s.unregister(start, end)
		if was%2 == 0 && lending.Load() == was {
			return
		}
		pause(i)
	}
}

// unregister is UFFDIO_UNREGISTER.
func (s *Space) unregister(start, end uint64) { s.unregisterFrom(s.uffd, start, end) }

func (s *Space) unregisterFrom(fd int, start, end uint64) {
	r := uffdRange{start, end - start}
	if uffdIoctl(fd, uffdioUnregister, unsafe.Pointer(&r)) == nil {
		return
	}
	// All of it was unmapped, or something that can't be registered was mapped
	// into it since: do what is left mapping by mapping. An error then means that
	// the mapping was never ours.
	_ = mappings(func(m mapping) bool {
		if c := m.common(span{start, end}); c.start < c.end {
			r = uffdRange{c.start, c.end - c.start}
			_ = uffdIoctl(fd, uffdioUnregister, unsafe.Pointer(&r))
		}
		return m.end < end
	})
}

// bring makes absent pages present, with src as their content or zero if it is nil.
// It returns how many bytes of them, and 0 or the errno that stopped it.
func (s *Space) bring(dst uint64, src unsafe.Pointer, n int) (int, unix.Errno) {
	lending := (*atomic.Uint32)(unsafe.Pointer(&s.sh.lending))
	was := lending.Load()
	for {
		done, e := 0, unix.Errno(0)
		if src == nil {
			done, e = s.zeroPages(dst, n)
		} else {
			done, e = s.placePages(dst, src, n)
		}
		switch {
		case e != unix.ENOENT:
			return done, e
		case n > pageSize:
			// The kernel fills pages of one mapping at a time: the next one begins
			// within the range.
			n = pageSize
		case was%2 == 1 || lending.Load() != was:
			return 0, unix.EAGAIN // perhaps it was the pager that had the page
		default:
			return 0, e
		}
	}
}

// placePages is UFFDIO_COPY without waking (only the pager wakes). It returns how
// many bytes were placed, and 0 or the errno that stopped it.
func (s *Space) placePages(dst uint64, src unsafe.Pointer, n int) (int, unix.Errno) {
	a := uffdCopyArg{dst: dst, src: uint64(uintptr(src)), len: uint64(n), mode: uffdCopyDontWake}
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(s.uffd), uffdioCopy, uintptr(unsafe.Pointer(&a)))
	runtime.KeepAlive(src)
	return ioctlResult(e, a.copied, n)
}

// zeroPages is UFFDIO_ZEROPAGE, otherwise as placePages.
func (s *Space) zeroPages(dst uint64, n int) (int, unix.Errno) {
	a := uffdZeroArg{r: uffdRange{dst, uint64(n)}, mode: uffdCopyDontWake}
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(s.uffd), uffdioZeropage, uintptr(unsafe.Pointer(&a)))
	return ioctlResult(e, a.zeroed, n)
}

func ioctlResult(e unix.Errno, done int64, n int) (int, unix.Errno) {
	switch {
	case e == 0:
		return n, 0
	case done > 0:
		return int(done), 0 // part of it: the next call says what is in the way
	case done < 0:
		return 0, unix.Errno(-done)
	}
	return 0, e
}
