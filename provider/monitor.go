// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A device can be looked at from outside (tapverbs top) through a socket that only its
// owner and root can open: it lies in a directory of the owner's, and who connects is
// asked who he is. A line "snapshot PARTS" is answered by a Snapshot, one line of JSON;
// what cannot be answered by an object with "error". It can be looked at, and nothing else.
//
// Nothing runs while nobody looks, but a goroutine that waits for connections. There are
// at most monitorConns of these. One more takes the place of the one that has been silent
// for longest, so that nobody is kept out by those who do nothing.
//
// The socket's name goes with Close. A process that dies leaves it behind: the user's next
// device removes it, or whoever finds that nobody listens.
const (
	monitorConns  = 8
	monitorIdle   = 60 * time.Second // a connection that asks nothing for so long is closed
	monitorAnswer = 10 * time.Second // for taking an answer
	monitorLine   = 64               // bytes of a request
)

// MonitorDirs are the directories in which a user's processes may have their sockets, the
// one of choice first: MonitorDirs of another user does not know his environment. The user
// is as the parent of the user namespace knows him, so that programs in user namespaces are
// found from outside.
func MonitorDirs(uid int) []string {
	var dirs []string
	if d := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(d) && uid == OuterUID() {
		dirs = append(dirs, filepath.Join(d, "tapverbs"))
	}
	for _, d := range []string{fmt.Sprintf("/run/user/%d/tapverbs", uid), fmt.Sprintf("/tmp/tapverbs-%d", uid)} {
		if !slices.Contains(dirs, d) {
			dirs = append(dirs, d)
		}
	}
	return dirs
}

// OuterUID is what the parent of this process's user namespace calls its user
// (user_namespaces(7), uid_map).
func OuterUID() int {
	uid := os.Geteuid()
	b, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return uid
	}
	for line := range strings.Lines(string(b)) {
		var in, out, n int
		if _, err := fmt.Sscan(line, &in, &out, &n); err == nil && uid >= in && uid-in < n {
			return out + uid - in
		}
	}
	return uid
}

// MonitorAuto as Config.Monitor stands for the first of MonitorDirs that can be had.
const MonitorAuto = "auto"

// openMonitorDir opens the directory, which it makes if need be, and sees to it that it
// is this user's alone.
func openMonitorDir(dir string) (int, error) {
	var st unix.Stat_t
	parent := filepath.Dir(dir)
	if err := unix.Stat(parent, &st); err != nil {
		return -1, &os.PathError{Op: "stat", Path: parent, Err: err}
	}
	// XDG_RUNTIME_DIR may still be that of who became root: nothing is made there.
	if st.Mode&unix.S_ISVTX != 0 || int(st.Uid) == os.Geteuid() {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return -1, err
		}
	}
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	if err = unix.Fstat(fd, &st); err == nil && (int(st.Uid) != os.Geteuid() || st.Mode&0o077 != 0) {
		err = fmt.Errorf("%s is not this user's alone (mode 0700 is needed): %w", dir, os.ErrPermission)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// monitor lets people look at a device.
type monitor struct {
	d    *Device
	dir  int    // descriptor
	name string // of the socket, in dir
	l    *net.UnixListener

	busy  sync.Mutex // one looks at a time
	mu    sync.Mutex
	ended bool
	conns []*net.UnixConn // those that have been silent for longest first
	wg    sync.WaitGroup
}

// startMonitor opens the socket in a directory. A device that cannot be looked at is no
// reason to have none, so nil is what comes of errors.
func (d *Device) startMonitor(dir string) *monitor {
	var dirs []string
	switch dir {
	case "":
	case MonitorAuto:
		dirs = MonitorDirs(OuterUID())
	default:
		dirs = []string{dir}
	}
	fd := -1
	for _, dir := range dirs {
		var err error
		if fd, err = openMonitorDir(dir); err == nil {
			break
		}
	}
	if fd < 0 {
		return nil
	}
	m := &monitor{d: d, dir: fd}
	m.sweep()
	if err := m.listen(); err != nil {
		unix.Close(fd)
		return nil
	}
	m.wg.Go(m.serve)
	return m
}

// at is the address of a socket in the directory. The path leads through the descriptor,
// which is the directory that was looked at; and the kernel takes paths of 107 bytes only
// (unix(7)).
func (m *monitor) at(name string) *net.UnixAddr {
	return &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s", m.dir, name), Net: "unix"}
}

// abandoned says whether nobody listens at a socket, and removes it then.
func (m *monitor) abandoned(name string) bool {
	c, err := net.DialUnix("unix", nil, m.at(name))
	if err == nil {
		c.Close()
	}
	return errors.Is(err, unix.ECONNREFUSED) && unix.Unlinkat(m.dir, name, 0) == nil
}

// sweepLimit is how many sockets a new device looks at.
const sweepLimit = 1000

// sweep removes sockets that processes have left behind that are no more. A number that
// is no process's here may be one's in another PID namespace: its socket tells.
func (m *monitor) sweep() {
	dir, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", m.dir))
	if err != nil {
		return
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(sweepLimit)
	for _, name := range names {
		pid, ok := monitorPID(name)
		if ok && pid != os.Getpid() && unix.Kill(pid, 0) == unix.ESRCH {
			m.abandoned(name)
		}
	}
}

// monitorPID is the process that a socket's name says, in its PID namespace.
func monitorPID(name string) (int, bool) {
	s, rest, ok := strings.Cut(name, "-")
	pid, err := strconv.Atoi(s)
	return pid, ok && err == nil && pid > 0 && strings.HasSuffix(rest, ".sock")
}

// listen makes the socket.
func (m *monitor) listen() error {
	for i := range 100 {
		m.name = fmt.Sprintf("%d-%s", os.Getpid(), m.d.Name())
		if i > 0 {
			m.name += fmt.Sprintf("-%d", i)
		}
		m.name += ".sock"
		l, err := net.ListenUnix("unix", m.at(m.name))
		// Elsewhere, in another PID namespace, there may be a process of that number.
		if errors.Is(err, unix.EADDRINUSE) && m.abandoned(m.name) {
			l, err = net.ListenUnix("unix", m.at(m.name))
		}
		if errors.Is(err, unix.EADDRINUSE) {
			continue
		}
		if err != nil {
			return err
		}
		l.SetUnlinkOnClose(false) // close does it
		if err := unix.Fchmodat(m.dir, m.name, 0o600, 0); err != nil {
			return errors.Join(err, unix.Unlinkat(m.dir, m.name, 0), l.Close())
		}
		m.l = l
		return nil
	}
	return unix.EADDRINUSE
}

func (m *monitor) serve() {
	slots := make(chan struct{}, monitorConns)
	for {
		c, err := m.l.AcceptUnix()
		if err != nil {
			m.mu.Lock()
			ended := m.ended
			m.mu.Unlock()
			if ended {
				return
			}
			time.Sleep(100 * time.Millisecond) // out of descriptors, say
			continue
		}
		if !welcome(c) {
			c.Close()
			continue
		}
		select {
		case slots <- struct{}{}:
		default:
			m.dismiss()
			slots <- struct{}{} // when what it asked last is answered
		}
		if !m.enter(c) {
			c.Close()
			return
		}
		m.wg.Go(func() {
			m.answer(c)
			c.Close()
			m.leave(c)
			<-slots
		})
	}
}

// enter adds a connection.
func (m *monitor) enter(c *net.UnixConn) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ended {
		return false
	}
	m.conns = append(m.conns, c)
	return true
}

// leave takes a connection out.
func (m *monitor) leave(c *net.UnixConn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if i := slices.Index(m.conns, c); i >= 0 {
		m.conns = slices.Delete(m.conns, i, i+1)
	}
}

// dismiss closes the connection that has been silent for longest.
func (m *monitor) dismiss() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.conns) > 0 {
		m.conns[0].Close()
	}
}

// heard notes that a connection has asked something.
func (m *monitor) heard(c *net.UnixConn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if i := slices.Index(m.conns, c); i >= 0 {
		m.conns = append(slices.Delete(m.conns, i, i+1), c)
	}
}

// peerCred tells who connected (SO_PEERCRED, unix(7)).
var peerCred = func(c *net.UnixConn) (*unix.Ucred, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	ctl := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	return cred, errors.Join(ctl, err)
}

// welcome says whether who connected is the user of this process, or root.
func welcome(c *net.UnixConn) bool {
	cred, err := peerCred(c)
	return err == nil && (cred.Uid == 0 || int(cred.Uid) == os.Geteuid())
}

// answer answers the requests of one connection.
func (m *monitor) answer(c *net.UnixConn) {
	in := bufio.NewReaderSize(c, monitorLine)
	for {
		if c.SetReadDeadline(time.Now().Add(monitorIdle)) != nil {
			return
		}
		line, err := in.ReadSlice('\n') // a longer one is an error
		if err != nil {
			return
		}
		m.heard(c)
		b, err := m.reply(string(line))
		if err != nil {
			b, _ = json.Marshal(map[string]any{"version": SnapshotVersion, "error": err.Error()})
		}
		if c.SetWriteDeadline(time.Now().Add(monitorAnswer)) != nil {
			return
		}
		if _, err := c.Write(append(b, '\n')); err != nil {
			return
		}
	}
}

func (m *monitor) reply(line string) ([]byte, error) {
	f := strings.Fields(line)
	if len(f) != 2 || f[0] != "snapshot" {
		return nil, errors.New("say: snapshot PARTS")
	}
	parts, err := strconv.ParseUint(f[1], 10, 31)
	if err != nil {
		return nil, fmt.Errorf("parts: %w", err)
	}
	m.busy.Lock()
	defer m.busy.Unlock()
	sn, err := m.d.Snapshot(int(parts))
	if err != nil {
		return nil, err
	}
	return json.Marshal(sn)
}

// close ends it; nobody looks any more when it returns.
func (m *monitor) close() {
	if m == nil {
		return
	}
	m.mu.Lock()
	m.ended = true
	for _, c := range m.conns {
		c.Close()
	}
	m.mu.Unlock()
	_ = unix.Unlinkat(m.dir, m.name, 0)
	m.l.Close()
	m.wg.Wait()
	unix.Close(m.dir)
}
