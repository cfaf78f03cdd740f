// SPDX-License-Identifier: Apache-2.0

// Package lab is a virtual machine with a stock Debian kernel, its soft-RoCE (rdma_rxe) and
// rdma-core's and perftest's programs, on a bridge where engines of this project can be its
// peers. What it is made of is fetched from Debian's archive, by name, into a cache
// ($TAPVERBS_LAB_CACHE, or tapverbs/lab in the user's cache directory).
//
// A lab is in the network namespace of the process that makes it, which should be a private
// one, and ends with that process. Each has a namespace of its own, so there can be
// several. Emulated guests are slow: some thousand packets a second, milliseconds for a
// message.
package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/test/interop/lab/agent"
)

// Addresses on the bridge, and those of the link for commands.
const (
	GuestAddr  = "10.77.0.1" // GID 1 of rxe0
	GuestAddr6 = "fd77::1"   // GID 2 of rxe0
	// HostAddr and HostAddr6 are the host's, on the bridge: sockets of programs there meet those of
	// the guest.
	HostAddr  = "10.77.0.254"
	HostAddr6 = "fd77::fffe"

	agentLink = "labctl"
	agentAddr = "10.78.0.1"
	hostLink  = "10.78.0.254"
)

// Port is the name of the guest's port on the bridge.
const Port = "lab0p0"

// Config says what guest Up starts.
type Config struct {
	Image  Image // what Build has made
	CPUs   int   // 1 if not set
	Memory int   // MiB, 768 if not set
	MTU    int   // of eth0, 9000 if not set
	KVM    bool  // not emulated, where that works
}

// Lab is a guest that is up.
type Lab struct {
	fab     *fabric.Fabric
	dir     string
	console string
	qemu    *exec.Cmd
	ended   chan struct{} // closed when qemu has
	why     error
}

// boot is how long a guest may take to start: one emulated on a busy machine takes minutes.
const boot = 10 * time.Minute

// Up makes the lab in this process's network namespace. Down, or the end of the process, ends it.
func Up(ctx context.Context, cfg Config) (l *Lab, err error) {
	if err := CheckQEMU(); err != nil {
		return nil, err
	}
	l = &Lab{ended: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Down())
			l = nil
		}
	}()
	if l.dir, err = os.MkdirTemp("", "tapverbs-lab-"); err != nil {
		return l, err
	}
	l.console = filepath.Join(l.dir, "console")
	if err := l.network(); err != nil {
		return l, fmt.Errorf("the lab's network: %w", err)
	}
	hello, err := net.Listen("tcp", fmt.Sprintf("%s:%d", hostLink, agent.HelloPort))
	if err != nil {
		return l, err
	}
	defer hello.Close()
	if err := l.start(cfg); err != nil {
		return l, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, boot, fmt.Errorf("the guest was not up after %v", boot))
	defer cancel()
	came := make(chan error, 1)
	go func() {
		c, err := hello.Accept()
		if err == nil {
			err = c.Close()
		}
		came <- err
	}()
	select {
	case err = <-came:
	case <-l.ended:
		err = l.why
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		err = fmt.Errorf("%w\nthe end of what it said:\n%s", err, l.said())
	}
	return l, err
}

// said is the end of what the guest and QEMU said.
func (l *Lab) said() string {
	b, _ := os.ReadFile(l.console)
	return string(b[max(0, len(b)-4000):])
}

// network makes the bridge with the guest's port, and the link for commands.
func (l *Lab) network() (err error) {
	l.fab, err = fabric.New(fabric.Config{Name: "lab0", V4: netip.MustParsePrefix("10.77.0.0/24"), V6: netip.MustParsePrefix("fd77::/64")})
	if err != nil {
		return err
	}
	if _, err = l.fab.AddPort(0); err != nil {
		return err
	}
	if _, _, err := l.fab.HostAddr(); err != nil {
		return err
	}
	tap, err := newTAP(agentLink)
	if err != nil {
		return err
	}
	addr, err := netlink.ParseAddr(hostLink + "/24")
	if err == nil {
		err = netlink.AddrAdd(tap, addr)
	}
	return err
}

// newTAP makes a TAP that stays, and brings it up.
func newTAP(name string) (netlink.Link, error) {
	tap := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: name, TxQLen: fabric.DefaultTxQueueLen}, Mode: unix.IFF_TAP, Flags: unix.IFF_NO_PI | unix.IFF_VNET_HDR}
	if err := netlink.LinkAdd(tap); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return tap, netlink.LinkSetUp(tap)
}

// NewPort makes a TAP on the bridge of the lab in this network namespace, for an engine.
func NewPort(name string) error {
	bridge, err := netlink.LinkByName("lab0")
	if err != nil {
		return fmt.Errorf("the lab's bridge: %w", err)
	}
	tap, err := newTAP(name)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetMTU(tap, fabric.DefaultMTU); err != nil {
		return err
	}
	return netlink.LinkSetMaster(tap, bridge)
}

const qemuProgram = "qemu-system-x86_64"

// CheckQEMU says what is missing if guests cannot be run.
func CheckQEMU() error {
	if _, err := exec.LookPath(qemuProgram); err != nil {
		return fmt.Errorf("the lab's guest runs in QEMU, and there is no %s here: on Debian and its kin, apt-get install qemu-system-x86", qemuProgram)
	}
	return nil
}

func (l *Lab) start(cfg Config) error {
	or := func(v, instead int) int {
		if v == 0 {
			return instead
		}
		return v
	}
	// Of the processor, what costs most and gives least when emulated is left out.
	accel, cpu := "tcg,thread=multi", "max,la57=off,smap=off,smep=off,pku=off,umip=off,erms=off"
	if cfg.KVM {
		accel, cpu = "kvm", "host"
	}
	line := []string{"console=ttyS0", "quiet", "loglevel=4", "panic=-1", "mitigations=off", "nokaslr", "tsc=reliable", "no_timer_check",
		"rcupdate.rcu_expedited=1", "random.trust_cpu=on", "audit=0", "nowatchdog", "lsm=integrity",
		"init_on_alloc=0", "randomize_kstack_offset=off", "cgroup_disable=memory",
		"lab.addr=" + GuestAddr + "/24," + GuestAddr6 + "/64", fmt.Sprintf("lab.mtu=%d", or(cfg.MTU, fabric.DefaultMTU)),
		"lab.agent=" + agentAddr + "/24", "lab.host=" + hostLink}
	args := []string{"-machine", "pc,usb=off,vmport=off", "-accel", accel, "-cpu", cpu, "-smp", fmt.Sprint(or(cfg.CPUs, 1)),
		"-m", fmt.Sprint(or(cfg.Memory, 768)), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
		"-kernel", cfg.Image.Kernel, "-initrd", cfg.Image.Initramfs, "-append", strings.Join(line, " ")}
	for i, tap := range []string{Port, agentLink} {
		args = append(args, "-netdev", fmt.Sprintf("tap,id=n%d,ifname=%s,script=no,downscript=no", i, tap),
			"-device", fmt.Sprintf("virtio-net-pci,netdev=n%d,mac=52:54:00:77:0%d:01,romfile=,host_mtu=%d", i, i, fabric.DefaultMTU))
	}
	out, err := os.Create(l.console)
	if err != nil {
		return err
	}
	defer out.Close()
	l.qemu = exec.Command(qemuProgram, args...)
	l.qemu.Stdout, l.qemu.Stderr = out, out
	wait, err := fabric.StartHere(l.qemu)
	if err != nil {
		l.qemu = nil
		return err
	}
	go func() {
		l.why = fmt.Errorf("the guest has ended: %w", errors.Join(wait(), errGone))
		close(l.ended)
	}()
	return nil
}

var errGone = errors.New("QEMU is gone")

// Ended is closed when the guest has ended.
func (l *Lab) Ended() <-chan struct{} { return l.ended }

// Why says why the guest has ended, with the end of what it said. It must have.
func (l *Lab) Why() error { return fmt.Errorf("%w\nthe end of what it said:\n%s", l.why, l.said()) }

// Down ends the guest and removes the network. A second call does nothing.
func (l *Lab) Down() error {
	var errs []error
	if l.qemu != nil {
		_ = l.qemu.Process.Kill() // it may have ended by itself
		<-l.ended
		l.qemu = nil
	}
	if l.fab != nil {
		errs = append(errs, l.fab.Close())
		if tap, err := netlink.LinkByName(agentLink); err == nil {
			errs = append(errs, netlink.LinkDel(tap))
		}
		l.fab = nil
	}
	if l.dir != "" {
		errs = append(errs, os.RemoveAll(l.dir))
		l.dir = ""
	}
	return errors.Join(errs...)
}

// StatusError is the exit status of a command that is not 0.
type StatusError int

func (s StatusError) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// Stream runs a line of shell in the guest of the lab in this network namespace. Its exit status
// is a StatusError; when the context ends, the command is killed.
func Stream(ctx context.Context, line string, stdin io.Reader, stdout, stderr io.Writer) error {
	status, err := agent.Run(ctx, fmt.Sprintf("%s:%d", agentAddr, agent.Port), line, stdin, stdout, stderr)
	if err == nil && status != 0 {
		err = StatusError(status)
	}
	return err
}

// Run is Stream that gives what was printed.
func Run(ctx context.Context, line string) (string, error) {
	var out bytes.Buffer
	err := Stream(ctx, line, nil, &out, &out)
	return out.String(), err
}

// Put copies a file into the guest; its directory must be there.
func Put(ctx context.Context, from, to string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	q := "'" + strings.ReplaceAll(to, "'", `'\''`) + "'"
	var errs bytes.Buffer
	if err := Stream(ctx, "cat >"+q+" && chmod 755 "+q, f, io.Discard, &errs); err != nil {
		return fmt.Errorf("put %s: %w %s", to, err, &errs)
	}
	return nil
}
