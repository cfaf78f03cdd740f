// SPDX-License-Identifier: Apache-2.0

package tap

import (
	"fmt"
	"os"
	"syscall"

	"github.com/songgao/water"
	"golang.org/x/sys/unix"
)

// openPlain opens through songgao/water. What water does not do is done around it:
// it leaks its descriptor when a step fails, so everything that can fail is tried
// on another one first; it sets no O_CLOEXEC, so no fork may happen meanwhile; it
// clears the persist flag of a TAP unless told otherwise, so it is told; and it
// hides the descriptor in an *os.File, so that is duplicated out of it.
func openPlain(cfg Config) (*dev, error) {
	fd, err := openTUN(cfg.Name)
	if err != nil {
		return nil, err
	}
	var flags uint16
	if _, err = setIff(fd, cfg.Name, iffFlags(cfg)); err == nil {
		flags, err = getIff(fd)
	}
	// Let go of the queue before water asks for it.
	unix.Close(fd)
	if err != nil {
		return nil, err
	}
	wcfg := water.Config{DeviceType: water.TAP}
	wcfg.Name = cfg.Name
	wcfg.Persist = flags&unix.IFF_PERSIST != 0
	wcfg.MultiQueue = cfg.Queues > 1

	syscall.ForkLock.RLock()
	ifce, err := water.New(wcfg)
	if err != nil {
		syscall.ForkLock.RUnlock()
		return nil, explain("open tap", cfg.Name, err)
	}
	fd, err = takeFD(ifce)
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, explain("open tap", cfg.Name, err)
	}
	// A persistent TAP keeps the offloads of its former user. Without a vnet header
	// the kernel cannot tell of them, so it must not send any.
	if err := resetOffloads(fd, ifce.Name()); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return newDev(fd, ifce.Name(), 0)
}

// takeFD moves the descriptor out of water's hands, close-on-exec and non-blocking.
func takeFD(ifce *water.Interface) (int, error) {
	defer ifce.Close()
	f, ok := ifce.ReadWriteCloser.(*os.File)
	if !ok {
		return -1, fmt.Errorf("water holds a %T, not a file", ifce.ReadWriteCloser)
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd := -1
	var dupErr error
	if err := conn.Control(func(old uintptr) {
		fd, dupErr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0)
	}); err != nil {
		return -1, err
	}
	if dupErr != nil {
		return -1, dupErr
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}
