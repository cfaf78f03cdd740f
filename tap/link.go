// SPDX-License-Identifier: Apache-2.0

package tap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// LinkWatcher is implemented by devices that know of their link without traffic:
// those that were opened in the network namespace of their netdev.
type LinkWatcher interface {
	// Link says whether frames pass now: nil, or an error that is ErrDown (the
	// netdev is down, or its carrier was taken off), or one that is only ErrGone.
	Link() error
	// WatchLink has changed called, on a goroutine of its own, each time the
	// netdev may have changed, until stop, which waits for that goroutine, is called.
	// It costs nothing while nothing changes. The calling thread has to be in the
	// network namespace of the netdev.
	WatchLink(changed func()) (stop func(), err error)
}

var _ LinkWatcher = (*dev)(nil)

// Link implements LinkWatcher.
func (d *dev) Link() error {
	name, err := d.netdev("link of")
	if err != nil {
		return err
	}
	up, err := linkState(d.ctl, name)
	switch {
	case errors.Is(err, unix.ENODEV):
		return fmt.Errorf("link of %s: %w: %w", d.name, err, ErrGone)
	case err == nil && !up:
		return fmt.Errorf("link of %s: %w (%w)", d.name, ErrDown, ErrGone)
	}
	return nil // whoever cannot be asked is taken to be up: reads and writes tell
}

// netdev asks for the name that the netdev has now. The descriptor knows it: it may have been
// renamed. An error is ErrGone.
func (d *dev) netdev(doing string) (string, error) {
	fd := d.fd.Load()
	if fd < 0 {
		return "", d.closed(doing)
	}
	req := new(unix.Ifreq)
	if err := unix.IoctlIfreq(int(fd), unix.TUNGETIFF, req); err != nil {
		return "", fmt.Errorf("%s %s: %w: %w", doing, d.name, err, ErrGone)
	}
	return req.Name(), nil
}

// WatchLink implements LinkWatcher, with a netlink socket that hears of this netdev
// only (rtnetlink(7), RTMGRP_LINK).
func (d *dev) WatchLink(changed func()) (stop func(), err error) {
	if d.mtu != 0 {
		return nil, fmt.Errorf("watch the link of %s: it is in another network namespace", d.name)
	}
	nl, err := linkSocket(d.ctl, d.name)
	if err != nil {
		return nil, fmt.Errorf("watch the link of %s: %w", d.name, err)
	}
	quit, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		unix.Close(nl)
		return nil, fmt.Errorf("watch the link of %s: eventfd: %w", d.name, err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer unix.Close(nl)
		fds := [2]unix.PollFd{{Fd: int32(nl), Events: unix.POLLIN}, {Fd: int32(quit), Events: unix.POLLIN}}
		for {
			if _, err := unix.Ppoll(fds[:], nil, nil); err != nil && err != unix.EINTR {
				return // out of memory: from now on traffic tells
			}
			if fds[1].Revents != 0 {
				return
			}
			if fds[0].Revents != 0 {
				// What the messages say may be old by now: they are thrown away.
				var b [1]byte
				for {
					// ENOBUFS: some were lost, which is as good as having read them.
					if _, _, err := unix.Recvfrom(nl, b[:], 0); err != nil && err != unix.ENOBUFS {
						break
					}
				}
				changed()
			}
		}
	}()
	return sync.OnceFunc(func() {
		var one [8]byte
		binary.NativeEndian.PutUint64(one[:], 1)
		_, _ = unix.Write(quit, one[:])
		<-done
		unix.Close(quit)
	}), nil
}

// linkSocket opens a netlink socket that gets the messages about one netdev.
func linkSocket(ctl int, name string) (fd int, err error) {
	req, err := unix.NewIfreq(name)
	if err == nil {
		err = unix.IoctlIfreq(ctl, unix.SIOCGIFINDEX, req)
	}
	if err != nil {
		return -1, fmt.Errorf("ask for its index: %w", err)
	}
	fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return -1, fmt.Errorf("open netlink: %w", err)
	}
	// ifi_index lies behind struct nlmsghdr and 4 bytes of struct ifinfomsg. A
	// filter loads it as big-endian, whatever it is.
	var index [4]byte
	binary.NativeEndian.PutUint32(index[:], req.Uint32())
	prog := [...]unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: unix.SizeofNlMsghdr + 4},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: binary.BigEndian.Uint32(index[:])},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 16},
		{Code: unix.BPF_RET | unix.BPF_K},
	}
	err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]})
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 << (unix.RTNLGRP_LINK - 1)})
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("listen to netlink: %w", err)
	}
	return fd, nil
}

// linkState asks whether a netdev is up and has a carrier (ETHTOOL_GLINK). Since Linux
// 6.8 that also carries out the link change that a worker has yet to act upon.
func linkState(sock int, name string) (up bool, err error) {
	value := struct{ cmd, data uint32 }{cmd: unix.ETHTOOL_GLINK}
	var req struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}
	copy(req.name[:maxName], name)
	req.data = unsafe.Pointer(&value)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(sock), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req)))
	if errno != 0 {
		return false, errno
	}
	return value.data != 0, nil
}
