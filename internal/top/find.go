// SPDX-License-Identifier: Apache-2.0

// Package top looks at the devices of running processes, and shows what it sees: as JSON,
// as text, and in a terminal.
package top

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/provider"
)

// Target is a device that can be looked at.
type Target struct {
	// PID is its process: 0 if that is in another PID namespace that cannot be seen
	// from here, and then Name says what its number is there.
	PID     int
	Program string // the process's name, if it can be known
	Name    string // of the socket: PID-PORT.sock
	Dir     string // of the socket
}

// Port is the name of the target's TAP port.
func (t Target) Port() string {
	_, port, _ := strings.Cut(strings.TrimSuffix(t.Name, ".sock"), "-")
	return port
}

// String names the target for people.
func (t Target) String() string {
	pid := strconv.Itoa(t.PID)
	if t.PID == 0 {
		pid, _, _ = strings.Cut(t.Name, "-")
		pid += " (of another namespace)"
	}
	return clean(fmt.Sprintf("process %s, %s, on %s", pid, cmp.Or(t.Program, "?"), t.Port()))
}

// Find gives the devices of this user's processes, for root those of everybody's. With a
// pid it gives those of that process, also if it sees other files than this one does.
func Find(pid int) ([]Target, error) {
	var dirs []string
	if pid != 0 {
		uid, err := owner(pid)
		if err != nil {
			return nil, err
		}
		env := environ(pid)
		dirs = append(env, provider.MonitorDirs(uid)...)
		// The process may be in another mount namespace (proc(5)).
		for _, d := range slices.Clone(dirs) {
			dirs = append(dirs, filepath.Join("/proc", strconv.Itoa(pid), "root", d))
		}
	} else {
		if d := os.Getenv(provider.EnvMonitor); filepath.IsAbs(d) {
			dirs = append(dirs, d)
		}
		dirs = append(dirs, provider.MonitorDirs(provider.OuterUID())...)
		if os.Geteuid() == 0 {
			for _, pattern := range []string{"/run/user/*/tapverbs", "/tmp/tapverbs-*"} {
				found, _ := filepath.Glob(pattern)
				dirs = append(dirs, found...)
			}
		}
	}
	var ts []Target
	seen := map[[2]uint64]bool{} // directories, by device and inode
	for _, dir := range dirs {
		d, err := openDir(dir)
		if err != nil || seen[d.id] {
			d.close()
			continue
		}
		seen[d.id] = true
		ts = append(ts, d.targets(pid)...)
		d.close()
	}
	slices.SortFunc(ts, func(a, b Target) int { return cmp.Or(cmp.Compare(a.PID, b.PID), cmp.Compare(a.Name, b.Name)) })
	return ts, nil
}

// owner is the user that a process belongs to (proc_pid_status(5)).
func owner(pid int) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("there is no process %d", pid)
	}
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		var real, uid int
		if n, _ := fmt.Sscanf(line, "Uid: %d %d", &real, &uid); n == 2 {
			return uid, nil
		}
	}
	return 0, fmt.Errorf("process %d belongs to nobody", pid)
}

// environ gives the directories that a process's environment names.
func environ(pid int) (dirs []string) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "environ"))
	if err != nil {
		return nil
	}
	for v := range bytes.SplitSeq(b, []byte{0}) {
		name, d, _ := strings.Cut(string(v), "=")
		switch {
		case !filepath.IsAbs(d):
		case name == provider.EnvMonitor:
			dirs = append(dirs, d)
		case name == "XDG_RUNTIME_DIR":
			dirs = append(dirs, filepath.Join(d, "tapverbs"))
		}
	}
	return dirs
}

// dir is an open directory of sockets.
type dir struct {
	path string
	fd   int
	uid  int
	id   [2]uint64
}

func openDir(path string) (dir, error) {
	d := dir{path: path, fd: -1}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return d, &os.PathError{Op: "open", Path: path, Err: err}
	}
	d.fd = fd
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return d, err
	}
	d.uid, d.id = int(st.Uid), [2]uint64{uint64(st.Dev), st.Ino}
	return d, nil
}

func (d dir) close() {
	if d.fd >= 0 {
		unix.Close(d.fd)
	}
}

// targets gives the devices whose sockets are in the directory, of one process if pid is
// not 0, and removes sockets at which nobody listens.
func (d dir) targets(pid int) (ts []Target) {
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", d.fd))
	if err != nil {
		return nil
	}
	defer f.Close()
	names, _ := f.Readdirnames(maxSockets)
	for _, name := range names {
		number, _, _ := strings.Cut(name, "-")
		if _, err := strconv.Atoi(number); err != nil || !strings.HasSuffix(name, ".sock") {
			continue
		}
		c, listener, err := d.dial(name)
		if err == nil {
			c.Close()
		}
		t := Target{PID: listener, Name: name, Dir: d.path}
		switch {
		case errors.Is(err, unix.ECONNREFUSED), err == nil && listener != 0 && !alive(listener):
			// A child of fork(2) may have the socket of a process that is no more.
			_ = unix.Unlinkat(d.fd, name, 0)
			continue
		case err != nil || pid != 0 && listener != pid:
			continue
		}
		if listener != 0 {
			t.Program = program(listener)
		}
		ts = append(ts, t)
	}
	return ts
}

// program is a process's name as it was started; by comm a process that has begun as
// /proc/self/exe is called exe.
func program(pid int) string {
	cmd, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if arg0, _, _ := bytes.Cut(cmd, []byte{0}); len(arg0) > 0 {
		return filepath.Base(string(arg0))
	}
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.TrimSpace(string(comm))
}

// maxSockets bounds what is looked at in a directory.
const maxSockets = 4096

func alive(pid int) bool { return unix.Kill(pid, 0) != unix.ESRCH }

// dialTimeout is for a process whose queue of connections is full: one that is stopped.
const dialTimeout = 2 * time.Second

// dial connects to a socket, and tells who listens there. Root does it as the socket's
// owner: from within a user namespace the root outside cannot be told from nobody.
func (d dir) dial(name string) (c *net.UnixConn, listener int, err error) {
	var st unix.Stat_t
	if err := unix.Fstatat(d.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, 0, &os.PathError{Op: "connect", Path: filepath.Join(d.path, name), Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK || int(st.Uid) != d.uid {
		return nil, 0, fmt.Errorf("%s is not a socket of the directory's owner", filepath.Join(d.path, name))
	}
	connect := func() {
		var conn net.Conn
		conn, err = net.DialTimeout("unix", fmt.Sprintf("/proc/self/fd/%d/%s", d.fd, name), dialTimeout)
		if err == nil {
			c = conn.(*net.UnixConn)
		}
	}
	if os.Geteuid() == 0 && d.uid != 0 {
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // for good: the thread ends with the goroutine
			const same = ^uintptr(0)
			_, _, _ = unix.RawSyscall(unix.SYS_SETRESUID, same, uintptr(d.uid), same)
			connect()
		}()
		<-done
	} else {
		connect()
	}
	if err != nil {
		return nil, 0, err
	}
	raw, err := c.SyscallConn()
	if err != nil {
		c.Close()
		return nil, 0, err
	}
	ctl := raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			listener = int(cred.Pid)
		}
	})
	if err = errors.Join(ctl, err); err != nil {
		c.Close()
		return nil, 0, err
	}
	return c, listener, nil
}
