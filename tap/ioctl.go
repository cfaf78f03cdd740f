// SPDX-License-Identifier: Apache-2.0

package tap

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

const tunPath = "/dev/net/tun"

// iffFlags are the flags of TUNSETIFF without the vnet header.
func iffFlags(cfg Config) uint16 {
	flags := uint16(unix.IFF_TAP | unix.IFF_NO_PI)
	if cfg.Queues > 1 {
		flags |= unix.IFF_MULTI_QUEUE
	}
	return flags
}

// openTUN opens the clone device; the descriptor belongs to no TAP yet.
func openTUN(name string) (int, error) {
	fd, err := unix.Open(tunPath, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	switch err {
	case nil:
		return fd, nil
	case unix.ENOENT, unix.ENODEV, unix.ENXIO:
		return -1, fmt.Errorf("open tap %q: open %s: %w (load the module: modprobe tun; in a container, "+
			"pass the device in: --device %s): %w", name, tunPath, err, tunPath, ErrNoTUN)
	case unix.EACCES, unix.EPERM:
		return -1, fmt.Errorf("open tap %q: open %s: %w (run as root, or let root do: chmod 0666 %s): %w",
			name, tunPath, err, tunPath, ErrPermission)
	}
	return -1, fmt.Errorf("open tap %q: open %s: %w", name, tunPath, err)
}

// setIff attaches fd to the TAP.
func setIff(fd int, name string, flags uint16) (*unix.Ifreq, error) {
	// NewIfreq refuses "" but a zero request is what asks for a name.
	req := new(unix.Ifreq)
	if name != "" {
		var err error
		if req, err = unix.NewIfreq(name); err != nil {
			return nil, fmt.Errorf("open tap %q: %w: %w", name, ErrName, err)
		}
	}
	req.SetUint16(flags)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		return nil, explain("open tap", name, err)
	}
	return req, nil
}

// getIff asks for the flags of the TAP that fd is attached to (IFF_TAP,
// IFF_VNET_HDR, IFF_PERSIST, ...).
func getIff(fd int) (uint16, error) {
	req := new(unix.Ifreq)
	if err := unix.IoctlIfreq(fd, unix.TUNGETIFF, req); err != nil {
		return 0, explain("query tap", "", err)
	}
	return req.Uint16(), nil
}

// explain wraps what the kernel said about attaching to a TAP.
func explain(doing, name string, err error) error {
	var sentinel error
	hint := ""
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		sentinel = ErrPermission
		hint = " (needs CAP_NET_ADMIN, or a TAP of one's own: ip tuntap add dev NAME mode tap user USER)"
	case errors.Is(err, unix.EBUSY):
		sentinel = ErrBusy
		hint = " (another process, or another device of this one, holds it; use another port)"
	case errors.Is(err, unix.EINVAL):
		sentinel = ErrNotTAP
		hint = " (the name belongs to something else than a TAP, or to one that was made for one queue, and several are asked for, or the other way round)"
	case errors.Is(err, unix.EBADFD), errors.Is(err, unix.ENODEV):
		sentinel = ErrGone
	default:
		return fmt.Errorf("%s %q: %w", doing, name, err)
	}
	return fmt.Errorf("%s %q: %w%s: %w", doing, name, err, hint, sentinel)
}

// hwaddr asks a descriptor (a TAP's, or a socket with the name set in req) for a
// MAC address. x/sys has no typed accessor for this member of struct ifreq.
func hwaddr(fd int, name string) (mac [6]byte, err error) {
	var req struct {
		name [unix.IFNAMSIZ]byte
		sa   unix.RawSockaddr
		_    [8]byte
	}
	copy(req.name[:maxName], name)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCGIFHWADDR, uintptr(unsafe.Pointer(&req)))
	if errno != 0 {
		return mac, errno
	}
	for i := range mac {
		mac[i] = byte(req.sa.Data[i])
	}
	return mac, nil
}
