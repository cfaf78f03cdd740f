// SPDX-License-Identifier: Apache-2.0

// Guest is the first program of the lab's guest (/init), and its agent. It mounts what
// programs expect, loads the modules listed in /lib/modules/boot, gives the network devices their
// addresses, makes rxe0, and tells the host that it is up. The kernel's command line says what
// the addresses are:
//
//	lab.addr=A/N,...   of eth0, which rxe0 is on   lab.mtu=N
//	lab.agent=A/N      of eth1, the agent's link   lab.host=A   the host's address there
package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/test/interop/lab/agent"
)

func main() {
	if os.Getpid() != 1 {
		fail(serve())
		return
	}
	if err := boot(); err != nil {
		fail(err)
		// The host sees the machine go, and what was said on the console.
		_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	}
	// Whoever loses its parent becomes a child of this process.
	for {
		var s unix.WaitStatus
		if pid, err := unix.Wait4(-1, &s, 0, nil); errors.Is(err, unix.ECHILD) || pid > 0 && pid == agentPID() {
			fail(errors.New("the agent has ended"))
			_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
		}
	}
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "guest:", err)
	}
}

// agentPID reads what boot has written.
func agentPID() int {
	b, _ := os.ReadFile(pidFile)
	pid, _ := strconv.Atoi(string(b))
	return pid
}

const pidFile = "/run/agent.pid"

var mounts = []struct{ kind, at string }{
	{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"devpts", "/dev/pts"}, {"tmpfs", "/dev/shm"}, {"tmpfs", "/tmp"},
	{"tmpfs", "/run"}, {"debugfs", "/sys/kernel/debug"},
}

func boot() error {
	for _, m := range mounts {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, m.at, m.kind, 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s: %w", m.at, err)
		}
	}
	if err := modules(); err != nil {
		return err
	}
	if err := network(); err != nil {
		return err
	}
	// Programs pin what they register.
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}); err != nil {
		return err
	}
	c := exec.Command("/init")
	c.Env = []string{"PATH=/usr/bin:/bin:/usr/sbin:/sbin", "HOME=/tmp"}
	c.Stdout, c.Stderr = os.Stdout, os.Stderr
	if err := c.Start(); err != nil {
		return err
	}
	return os.WriteFile(pidFile, []byte(strconv.Itoa(c.Process.Pid)), 0o600)
}

// modules loads what is listed, dependencies first.
func modules() error {
	f, err := os.Open("/lib/modules/boot")
	if err != nil {
		return err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		m, err := os.Open(s.Text())
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(m.Fd()), "", 0)
		_ = m.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load %s: %w", s.Text(), err)
		}
	}
	return nil
}

// options are those of the kernel's command line that are the lab's.
func options() map[string]string {
	o := map[string]string{}
	b, _ := os.ReadFile("/proc/cmdline")
	for _, w := range strings.Fields(string(b)) {
		if k, v, ok := strings.Cut(w, "="); ok {
			o[k] = v
		}
	}
	return o
}

func network() error {
	o := options()
	if err := unix.Sethostname([]byte("guest")); err != nil {
		return err
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	mtu, _ := strconv.Atoi(o["lab.mtu"])
	if err := device("eth1", 0, o["lab.agent"]); err != nil {
		return err
	}
	if err := device("eth0", mtu, o["lab.addr"]); err != nil {
		return err
	}
	if err := netlink.RdmaLinkAdd("rxe0", "rxe", "eth0"); err != nil {
		return fmt.Errorf("rxe0: %w", err)
	}
	return nil
}

// device brings a network device up. Addresses are good at once: there is nobody to have the
// same.
func device(name string, mtu int, addrs string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for _, set := range []string{"accept_dad", "router_solicitations"} {
		_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/"+set, []byte("0"), 0) // the module may be without IPv6
	}
	if mtu != 0 {
		if err := netlink.LinkSetMTU(l, mtu); err != nil {
			return fmt.Errorf("%s: MTU %d: %w", name, mtu, err)
		}
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for a := range strings.SplitSeq(addrs, ",") {
		addr, err := netlink.ParseAddr(a)
		if err == nil {
			if addr.IP.To4() == nil {
				addr.Flags = unix.IFA_F_NODAD
			}
			err = netlink.AddrAdd(l, addr)
		}
		if err != nil {
			return fmt.Errorf("%s: address %q: %w", name, a, err)
		}
	}
	return nil
}

// serve is the agent. It says hello when commands can come.
func serve() error {
	l, err := net.Listen("tcp", fmt.Sprint(":", agent.Port))
	if err != nil {
		return err
	}
	hello, err := net.DialTimeout("tcp", net.JoinHostPort(options()["lab.host"], strconv.Itoa(agent.HelloPort)), 30*time.Second)
	if err != nil {
		return fmt.Errorf("telling the host: %w", err)
	}
	if err := hello.Close(); err != nil {
		return err
	}
	return agent.Serve(l)
}
