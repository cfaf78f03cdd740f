// SPDX-License-Identifier: Apache-2.0

package tap

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// dev is a TAP's descriptor, plain or with a vnet header. The reader owns rx, the
// writer tx; each is held by its mutex, which is there so that Close never takes
// the descriptor away under a system call (its number might be another file's by
// then). Nobody waits on them otherwise.
type dev struct {
	name string
	off  Offload
	mtu  int          // fixed MTU of a device in another namespace; 0: ask ctl
	ctl  int          // socket of the namespace, for SIOCGIFMTU
	fd   atomic.Int32 // -1 after Unplug and Close
	// held is the number of a descriptor that Unplug took the TAP out of; -1: none.
	// Guarded by rx and tx.
	held int
	// claim is a socket by which the first of several queues keeps the port its own; -1: none.
	claim   int
	steered bool // Steer was called; guarded by tx

	rx struct {
		sync.Mutex
		hdr [vnetHdrLen]byte
		// spare takes the first byte that did not fit: the kernel cuts a frame
		// to the room it is given and says so only by filling all of it.
		spare [1]byte
		iov   [3]unix.Iovec // header, frame, spare
	}
	tx struct {
		sync.Mutex
		hdr   [vnetHdrLen]byte // all zero: nothing to check, nothing to split
		super [vnetHdrLen]byte
		iov   [2 + MaxPieces]unix.Iovec // header, frame, further pieces
	}
	stats struct {
		rxFrames, rxBytes, rxSuper, rxTruncated, rxMalformed atomic.Uint64
		txFrames, txBytes, txSuper, txFull                   atomic.Uint64
	}
}

var (
	_ Device      = (*dev)(nil)
	_ StatsReader = (*dev)(nil)
	_ Unplugger   = (*dev)(nil)
	_ Steerer     = (*dev)(nil)
)

// newDev takes fd over; on an error it is closed.
func newDev(fd int, name string, off Offload) (*dev, error) {
	ctl, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == unix.EAFNOSUPPORT {
		ctl, err = unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("open tap %q: open a socket to query it: %w", name, err)
	}
	d := &dev{name: name, off: off, ctl: ctl, held: -1, claim: -1}
	d.fd.Store(int32(fd))
	d.rx.iov[0] = unix.Iovec{Base: &d.rx.hdr[0], Len: vnetHdrLen}
	d.rx.iov[2] = unix.Iovec{Base: &d.rx.spare[0], Len: 1}
	d.tx.iov[0] = unix.Iovec{Base: &d.tx.hdr[0], Len: vnetHdrLen}
	return d, nil
}

// awaitLink waits until the netdev passes frames. Attaching switches the carrier on,
// but the qdisc and a bridge hear of that from a kernel worker, and what is sent
// before then is lost. A link that is down is not waited for. The wait is bounded:
// a link that does not come up is its owner's business.
func (d *dev) awaitLink() {
	for end := time.Now().Add(time.Second); time.Now().Before(end); time.Sleep(20 * time.Microsecond) {
		// From Linux 6.8 on the question makes the worker's step happen at
		// once; before that it is answered without, and the flags tell.
		_, _ = linkState(d.ctl, d.name)
		req, err := unix.NewIfreq(d.name)
		if err != nil || unix.IoctlIfreq(d.ctl, unix.SIOCGIFFLAGS, req) != nil {
			return
		}
		flags := req.Uint16()
		if flags&unix.IFF_UP == 0 {
			return
		}
		if flags&unix.IFF_RUNNING != 0 {
			// The worker sets this first and the rest after, all under the rtnl
			// lock: once an ioctl has had the lock, the worker is done.
			_, _ = getIff(d.FD())
			return
		}
	}
}

// FromFD takes over the descriptor of a TAP that is attached already, as one
// inherited from the process that set up a fabric. It must have been attached with
// IFF_NO_PI; whether it carries a vnet header is asked of the kernel, and offloads
// are negotiated anew. mtu is the netdev's MTU in bytes if the process is in
// another network namespace than the TAP; with 0 it is asked of the netdev. On
// success the descriptor belongs to the device; on an error it stays the caller's.
func FromFD(fd int, mtu int) (Device, error) {
	req := new(unix.Ifreq)
	if err := unix.IoctlIfreq(fd, unix.TUNGETIFF, req); err != nil {
		return nil, fmt.Errorf("use descriptor %d as a tap: %w: %w", fd, err, ErrNotTAP)
	}
	name, flags := req.Name(), req.Uint16()
	if flags&unix.IFF_TAP == 0 || flags&unix.IFF_NO_PI == 0 {
		return nil, fmt.Errorf("use descriptor %d (%s) as a tap: it must be attached with IFF_TAP and IFF_NO_PI: %w", fd, name, ErrNotTAP)
	}
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, fmt.Errorf("use descriptor %d (%s) as a tap: make it non-blocking: %w", fd, name, err)
	}
	var (
		off Offload
		err error
	)
	if flags&unix.IFF_VNET_HDR != 0 {
		off, err = negotiate(fd, name, 0)
	} else {
		err = resetOffloads(fd, name)
	}
	if err != nil {
		return nil, err
	}
	// newDev closes what it is given when it fails; the caller's stays open.
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("use descriptor %d (%s) as a tap: %w", fd, name, err)
	}
	d, err := newDev(own, name, off)
	if err != nil {
		return nil, err
	}
	d.mtu = mtu
	if mtu == 0 {
		// A netdev of the same name may exist in this namespace while the TAP is
		// in another; the kernel's word for "the same" is the MAC address.
		mine, err := hwaddr(own, name)
		theirs, err2 := hwaddr(d.ctl, name)
		if err != nil || err2 != nil || mine != theirs {
			d.Close()
			return nil, fmt.Errorf("use descriptor %d (%s) as a tap: the netdev is in another network namespace, so its MTU must be given", fd, name)
		}
	}
	unix.Close(fd)
	d.awaitLink()
	return d, nil
}

func (d *dev) Name() string      { return d.name }
func (d *dev) FD() int           { return int(d.fd.Load()) }
func (d *dev) Offloads() Offload { return d.off }

// Descriptors are all that keep the port from others: a child after fork(2) closes them.
func (d *dev) Descriptors() []int {
	if d.claim >= 0 {
		return []int{d.FD(), d.claim}
	}
	return []int{d.FD()}
}

// MTU asks the netdev, whose MTU may be changed from outside at any time; 0 when
// it is gone.
func (d *dev) MTU() int {
	if d.mtu != 0 {
		return d.mtu
	}
	req, err := unix.NewIfreq(d.name)
	if err != nil {
		return 0
	}
	if err := unix.IoctlIfreq(d.ctl, unix.SIOCGIFMTU, req); err != nil {
		return 0
	}
	return int(req.Uint32())
}

func (d *dev) setMTU(mtu int) error {
	if d.MTU() == mtu {
		return nil // so that an ordinary user may ask for what is there
	}
	req, err := unix.NewIfreq(d.name)
	if err == nil {
		req.SetUint32(uint32(mtu))
		err = unix.IoctlIfreq(d.ctl, unix.SIOCSIFMTU, req)
	}
	if err == unix.EINVAL {
		return fmt.Errorf("set the MTU of tap %q to %d: %w (68 to 65521 is possible)", d.name, mtu, err)
	}
	if err != nil {
		return explain(fmt.Sprintf("set the MTU to %d of tap", mtu), d.name, err)
	}
	return nil
}

// ReadBatch implements Device. Each frame is one readv straight into the caller's
// buffer. The descriptor does not block, so the raw system call is right, and
// spares the scheduler's book-keeping.
func (d *dev) ReadBatch(fs []Frame) (n int, err error) {
	d.rx.Lock()
	defer d.rx.Unlock()
	fd := d.fd.Load()
	if fd < 0 {
		return 0, d.closed("read")
	}
	vnet := d.off.Has(VnetHdr)
	iov, hdr := d.rx.iov[1:], 0
	if vnet {
		iov, hdr = d.rx.iov[:], vnetHdrLen
	}
	var bytes, super, truncated, malformed uint64
	for n < len(fs) {
		f := &fs[n]
		room := cap(f.B)
		buf := f.B[:room]
		d.rx.iov[1] = unix.Iovec{Base: unsafe.SliceData(buf), Len: uint64(room)}
		r, _, errno := syscall.RawSyscall(unix.SYS_READV, uintptr(fd), uintptr(unsafe.Pointer(&iov[0])), uintptr(len(iov)))
		if errno != 0 {
			if errno != unix.EAGAIN && errno != unix.EINTR {
				err = d.fault("read", errno)
			}
			break
		}
		size := int(r) - hdr
		if size > room {
			truncated++
			continue
		}
		if size < EthHeaderLen {
			malformed++
			continue
		}
		buf = buf[:size]
		var gso uint16
		if vnet {
			h := &d.rx.hdr
			if h[vnetGSOType] != 0 {
				gso = binary.NativeEndian.Uint16(h[vnetGSOSize:])
			} else if h[vnetFlags]&vnetNeedsCsum != 0 &&
				!complete(buf, int(binary.NativeEndian.Uint16(h[vnetCsumStart:])), int(binary.NativeEndian.Uint16(h[vnetCsumOffset:]))) {
				malformed++
				continue
			}
		}
		f.B, f.GSO = buf, gso
		if gso != 0 {
			super++
		}
		bytes += uint64(size)
		n++
	}
	d.rx.iov[1].Base = nil // the buffer is the caller's again
	if n > 0 {
		d.stats.rxFrames.Add(uint64(n))
		d.stats.rxBytes.Add(bytes)
	}
	if super|truncated|malformed != 0 {
		d.stats.rxSuper.Add(super)
		d.stats.rxTruncated.Add(truncated)
		d.stats.rxMalformed.Add(malformed)
	}
	return n, err
}

// WriteBatch implements Device: one write, or one writev with a vnet header, for each
// frame.
func (d *dev) WriteBatch(fs []Frame) (n int, err error) {
	d.tx.Lock()
	defer d.tx.Unlock()
	fd := d.fd.Load()
	if fd < 0 {
		return 0, d.closed("write")
	}
	vnet := d.off.Has(VnetHdr)
	var bytes uint64
	most := 2 // entries of iov in use
	for ; n < len(fs); n++ {
		f := &fs[n]
		size := len(f.B)
		for _, b := range f.More {
			size += len(b)
		}
		if len(f.B) < EthHeaderLen || size > MaxFrame || len(f.More) > MaxPieces {
			err = fmt.Errorf("write %s: %d bytes: %w", d.name, size, ErrFrameLen)
			break
		}
		hdr := &d.tx.hdr
		if f.GSO != 0 {
			hdr = &d.tx.super
			if !d.superHeader(hdr, f) {
				err = fmt.Errorf("write %s: %w", d.name, ErrSuperFrame)
				break
			}
		}
		var errno syscall.Errno
		if vnet || len(f.More) > 0 {
			d.tx.iov[0].Base = &hdr[0]
			iov := d.tx.iov[1:]
			if vnet {
				iov = d.tx.iov[:]
			}
			d.tx.iov[1] = unix.Iovec{Base: &f.B[0], Len: uint64(len(f.B))}
			k := len(iov) - MaxPieces
			for _, b := range f.More {
				iov[k] = unix.Iovec{Base: unsafe.SliceData(b), Len: uint64(len(b))}
				k++
			}
			most = max(most, k+1)
			_, _, errno = syscall.RawSyscall(unix.SYS_WRITEV, uintptr(fd), uintptr(unsafe.Pointer(&iov[0])), uintptr(k))
		} else {
			_, _, errno = syscall.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&f.B[0])), uintptr(len(f.B)))
		}
		if errno != 0 {
			switch errno {
			case unix.EAGAIN, unix.ENOBUFS, unix.ENOMEM, unix.EINTR:
				// No room for the frame now, there will be.
				d.stats.txFull.Add(1)
			default:
				err = d.fault("write", errno)
			}
			break
		}
		bytes += uint64(size)
		if f.GSO != 0 {
			d.stats.txSuper.Add(1)
		}
	}
	clear(d.tx.iov[1:min(most, len(d.tx.iov))])
	if n > 0 {
		d.stats.txFrames.Add(uint64(n))
		d.stats.txBytes.Add(bytes)
	}
	return n, err
}

// superHeader makes the vnet header of a super-frame: false if the kernel does not know
// such, or the frame is none of UDP.
func (d *dev) superHeader(h *[vnetHdrLen]byte, f *Frame) bool {
	l4, want := 0, Offload(0)
	if len(f.B) > EthHeaderLen {
		switch binary.BigEndian.Uint16(f.B[12:]) {
		case 0x0800:
			l4, want = EthHeaderLen+int(f.B[EthHeaderLen]&0xf)*4, USO4
		case 0x86dd:
			l4, want = EthHeaderLen+40, USO6
		}
	}
	if l4 == 0 || len(f.B) < l4+8 || !d.off.Has(want) {
		return false
	}
	h[vnetFlags], h[vnetGSOType] = vnetNeedsCsum, vnetGSOUDP
	binary.NativeEndian.PutUint16(h[vnetHdrLenOff:], uint16(l4+8))
	binary.NativeEndian.PutUint16(h[vnetGSOSize:], f.GSO)
	binary.NativeEndian.PutUint16(h[vnetCsumStart:], uint16(l4))
	binary.NativeEndian.PutUint16(h[vnetCsumOffset:], 6)
	return true
}

// fault is the error for what a read or write answered.
func (d *dev) fault(doing string, errno syscall.Errno) error {
	switch errno {
	case unix.EIO:
		// tun_get_user refuses frames while the netdev is not up.
		return fmt.Errorf("%s %s: %w: %w (%w)", doing, d.name, errno, ErrDown, ErrGone)
	case unix.EBADFD, unix.ENODEV, unix.EBADF:
		return fmt.Errorf("%s %s: %w: %w", doing, d.name, errno, ErrGone)
	}
	return fmt.Errorf("%s %s: %w", doing, d.name, errno)
}

func (d *dev) closed(doing string) error {
	return fmt.Errorf("%s %s: closed: %w", doing, d.name, ErrGone)
}

// Unplug implements Unplugger: what the descriptor stands for is replaced under its
// number.
func (d *dev) Unplug() error {
	d.rx.Lock()
	defer d.rx.Unlock()
	d.tx.Lock()
	defer d.tx.Unlock()
	fd := int(d.fd.Load())
	if fd < 0 {
		return d.closed("unplug")
	}
	idle, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err == nil {
		err = unix.Dup3(idle, fd, unix.O_CLOEXEC)
		unix.Close(idle)
	}
	if err != nil {
		return fmt.Errorf("unplug %s: %w", d.name, err)
	}
	d.fd.Store(-1)
	d.held = fd
	d.unclaim()
	return nil
}

// Steer implements Steerer.
func (d *dev) Steer(prog int) error {
	d.tx.Lock()
	defer d.tx.Unlock()
	fd := int(d.fd.Load())
	if fd < 0 {
		return d.closed("steer")
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETSTEERINGEBPF, prog); err != nil {
		return explain("steer tap", d.name, err)
	}
	d.steered = prog >= 0
	return nil
}

func (d *dev) unclaim() {
	if d.claim >= 0 {
		unix.Close(d.claim)
		d.claim = -1
	}
}

// Close implements Device. It waits for a batch call that is running. A second
// call does nothing.
func (d *dev) Close() error {
	d.rx.Lock()
	defer d.rx.Unlock()
	d.tx.Lock()
	defer d.tx.Unlock()
	fd := d.fd.Swap(-1)
	if fd < 0 {
		fd, d.held = int32(d.held), -1
	}
	if fd < 0 {
		return nil
	}
	unix.Close(d.ctl)
	d.unclaim()
	if d.steered { // or a persistent TAP keeps it; one that was taken away has none
		_ = unix.IoctlSetPointerInt(int(fd), unix.TUNSETSTEERINGEBPF, -1)
	}
	if err := unix.Close(int(fd)); err != nil {
		return fmt.Errorf("close %s: %w", d.name, err)
	}
	return nil
}

// Stats implements StatsReader.
func (d *dev) Stats() Stats {
	s := &d.stats
	return Stats{
		RxFrames: s.rxFrames.Load(), RxBytes: s.rxBytes.Load(), RxSuper: s.rxSuper.Load(),
		RxTruncated: s.rxTruncated.Load(), RxMalformed: s.rxMalformed.Load(),
		TxFrames: s.txFrames.Load(), TxBytes: s.txBytes.Load(), TxSuper: s.txSuper.Load(), TxFull: s.txFull.Load(),
	}
}
