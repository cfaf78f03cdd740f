// SPDX-License-Identifier: Apache-2.0

package fabric

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// privateEnv holds the inode of the network namespace that the private one was
// made from: the variable alone, inherited by a program that runs elsewhere, proves
// nothing.
const privateEnv = "TAPVERBS_PRIVATE"

// InPrivate reports whether this process runs in a network namespace that Private
// made for it or for one of its ancestors.
func InPrivate() bool {
	outer := os.Getenv(privateEnv)
	if outer == "" {
		return false
	}
	inner, err := netnsInode()
	return err == nil && inner != outer
}

// Private makes cmd start in a new network namespace: directly with CAP_SYS_ADMIN and
// CAP_NET_ADMIN, otherwise as root of a new user namespace as well, to which the
// calling user is mapped. When the thread that starts it dies, cmd is killed
// (Pdeathsig), and with its last process the namespace and all that is in it goes.
// Because of that it is best started by Start, which minds the thread, and whose
// errors are clear too.
//
// Errors are ErrNoTUN, ErrPermission (of /dev/net/tun) and ErrUserNS.
func Private(cmd *exec.Cmd) error {
	if err := CheckTUN(); err != nil {
		return fmt.Errorf("make a private fabric: %w", err)
	}
	inode, err := netnsInode()
	if err != nil {
		return fmt.Errorf("make a private fabric: %w", err)
	}
	if err := namespaces(cmd, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("make a private fabric: %w", err)
	}
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Env = append(cmd.Env, privateEnv+"="+inode)
	return nil
}

// namespaces makes cmd start in new namespaces, with a user namespace where privileges
// are missing, and die with the thread that starts it.
func namespaces(cmd *exec.Cmd, flags uintptr) error {
	attr := cmd.SysProcAttr
	if attr == nil {
		attr = new(syscall.SysProcAttr)
	}
	attr.Cloneflags |= flags
	attr.Pdeathsig = unix.SIGKILL
	if !capable(unix.CAP_SYS_ADMIN) || flags&unix.CLONE_NEWNET != 0 && !capable(unix.CAP_NET_ADMIN) {
		if err := userNSForbidden(); err != nil {
			return err
		}
		attr.Cloneflags |= unix.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
		attr.GidMappingsEnableSetgroups = false
	}
	cmd.SysProcAttr = attr
	return nil
}

// Start is Private and cmd.Start. The returned function is cmd.Wait; it must be
// called, since until then a thread is kept for cmd, whose death would end it.
func Start(cmd *exec.Cmd) (wait func() error, err error) {
	if err := Private(cmd); err != nil {
		return nil, err
	}
	return start(cmd)
}

// StartHere is Start in this network namespace: other namespaces that cmd's SysProcAttr
// asks for are made, with a user namespace where privileges are missing. Its error is
// ErrUserNS if that is not to be had.
func StartHere(cmd *exec.Cmd) (wait func() error, err error) {
	if err := namespaces(cmd, 0); err != nil {
		return nil, err
	}
	return start(cmd)
}

func start(cmd *exec.Cmd) (wait func() error, err error) {
	started, done := make(chan error), make(chan error, 1)
	go func() {
		// Pdeathsig acts on the death of this thread, not of the process.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			done <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, explainStart(cmd, err)
	}
	return func() error { return <-done }, nil
}

// explainStart says what the kernel means by its answer to clone(2).
func explainStart(cmd *exec.Cmd, err error) error {
	err = fmt.Errorf("start %s in a namespace: %w", cmd.Path, err)
	if cmd.SysProcAttr.Cloneflags&unix.CLONE_NEWUSER == 0 {
		return err
	}
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EUSERS):
		return fmt.Errorf("%w (the limit in /proc/sys/user/max_user_namespaces or max_net_namespaces is reached; run as root): %w", err, ErrUserNS)
	case isPermission(err), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("%w (this system does not let ordinary users make namespaces; run as root): %w", err, ErrUserNS)
	}
	return err
}

// userNSForbidden looks at the switches by which systems forbid user namespaces, to
// name the one. nil does not promise that the kernel will allow one.
func userNSForbidden() error {
	for _, s := range [...]struct{ path, bad, remedy string }{
		{"/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"},
		{"/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"},
		{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"},
	} {
		b, err := os.ReadFile(s.path)
		if err == nil && strings.TrimSpace(string(b)) == s.bad {
			return fmt.Errorf("%s is %s (run as root, or let root do: %s): %w", s.path, s.bad, s.remedy, ErrUserNS)
		}
	}
	if _, err := os.Stat("/proc/self/ns/user"); err != nil {
		return fmt.Errorf("%w: %w (run as root)", err, ErrUserNS)
	}
	return nil
}

// capable reports whether the calling thread has a capability in effect.
func capable(bit int) bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return false
	}
	return data[bit/32].Effective&(1<<(bit%32)) != 0
}

func isPermission(err error) bool {
	return errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES)
}

// netnsInode is the identity of the calling thread's network namespace.
func netnsInode() (string, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
		return "", fmt.Errorf("look at the network namespace: %w", err)
	}
	return strconv.FormatUint(st.Dev, 10) + ":" + strconv.FormatUint(st.Ino, 10), nil
}
