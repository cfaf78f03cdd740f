// SPDX-License-Identifier: Apache-2.0

package fabric

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const tunPath = "/dev/net/tun"

// CheckTUN reports whether this process may open /dev/net/tun: nil, or an error
// that is ErrNoTUN or ErrPermission and says what to do.
func CheckTUN() error {
	fd, err := unix.Open(tunPath, unix.O_RDWR|unix.O_CLOEXEC, 0)
	switch err {
	case nil:
		return unix.Close(fd)
	case unix.ENOENT, unix.ENODEV, unix.ENXIO:
		return fmt.Errorf("open %s: %w (load the module: modprobe tun; in a container, pass the device in: --device %s): %w",
			tunPath, err, tunPath, ErrNoTUN)
	case unix.EACCES, unix.EPERM:
		return fmt.Errorf("open %s: %w (run as root, or let root do: chmod 0666 %s): %w", tunPath, err, tunPath, ErrPermission)
	}
	return fmt.Errorf("open %s: %w", tunPath, err)
}

// makeTAP makes a persistent TAP, which waits for its engine, in the network namespace
// of the calling thread. Owner and group are set if there is one only: a user has to
// match what is set, or either of the two, depending on the kernel; and one
// without both is open to everybody on some.
func (f *Fabric) makeTAP(name string) error {
	if err := CheckTUN(); err != nil {
		return err
	}
	fd, err := unix.Open(tunPath, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", tunPath, err)
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	flags := uint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_TUN_EXCL)
	if f.cfg.MultiQueue {
		flags |= unix.IFF_MULTI_QUEUE
	}
	req.SetUint16(flags)
	if err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		if isPermission(err) {
			return fmt.Errorf("make it: %w (needs CAP_NET_ADMIN: run as root, or in a namespace of one's own): %w", err, ErrPermission)
		}
		return fmt.Errorf("make it: %w", err)
	}
	if f.cfg.Owner != 0 || f.cfg.Group == 0 {
		err = unix.IoctlSetInt(fd, unix.TUNSETOWNER, int(f.cfg.Owner))
	}
	if err == nil && f.cfg.Group != 0 {
		err = unix.IoctlSetInt(fd, unix.TUNSETGROUP, int(f.cfg.Group))
	}
	if err != nil {
		return fmt.Errorf("set its owner: %w", err)
	}
	if err := unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 1); err != nil {
		return fmt.Errorf("make it persistent: %w", err)
	}
	return nil
}

// explain says what was being done, and what is missing if it is a privilege.
func (f *Fabric) explain(doing string, err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("fabric %s: %s: %w (needs CAP_NET_ADMIN: run as root, or in a namespace of one's own): %w",
			f.cfg.Name, doing, err, ErrPermission)
	}
	return fmt.Errorf("fabric %s: %s: %w", f.cfg.Name, doing, err)
}

// setForwardDelay turns the spanning tree off and lets ports forward at once, which
// netlink.Bridge has no fields for (IFLA_BR_* of include/uapi/linux/if_link.h). The
// request opens a socket of its own, in the namespace of the calling thread: for New only.
func setForwardDelay(index int) error {
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(index)
	req.AddData(msg)
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("bridge"))
	data := info.AddRtAttr(nl.IFLA_INFO_DATA, nil)
	data.AddRtAttr(nl.IFLA_BR_STP_STATE, nl.Uint32Attr(0))
	data.AddRtAttr(nl.IFLA_BR_FORWARD_DELAY, nl.Uint32Attr(0))
	req.AddData(info)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// noqueue takes the qdisc off a TAP: its driver has the only queue that matters,
// never asks for frames to be held, and a lock less is taken for each.
func (f *Fabric) noqueue(link netlink.Link) error {
	return f.nl.QdiscReplace(&netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Parent: netlink.HANDLE_ROOT},
		QdiscType:  "noqueue",
	})
}

// settle waits until a new TAP without a user is known to have no carrier. Before, its
// state is "unknown", which counts as running, and whoever attaches to it could not
// tell when frames begin to pass. From Linux 6.8 on the first question settles it,
// before that a kernel worker does within about a second.
func (f *Fabric) settle(link netlink.Link) error {
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		l, err := f.nl.LinkByIndex(link.Attrs().Index)
		if err != nil {
			return err
		}
		if l.Attrs().OperState != netlink.OperUnknown {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("its state stays unknown")
		}
	}
}

func (f *Fabric) addAddr(p netip.Prefix, flags int) error {
	return f.nl.AddrAdd(f.bridge, &netlink.Addr{
		IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
		Flags: flags,
	})
}

// Modes of IFLA_INET6_ADDR_GEN_MODE.
const (
	addrGenEUI64 = 0
	addrGenNone  = 1
)

// errNoIPv6: the kernel was built or booted without.
var errNoIPv6 = errors.New("the kernel has no IPv6")

// silence keeps a netdev from taking part in IPv6. The first way does all that is
// needed to keep it quiet (no link-local address, so nothing to solicit or report
// with) and works where /proc/sys is read-only, as in many containers; the second
// is more thorough.
func (f *Fabric) silence(link netlink.Link) error {
	err := f.nl.LinkSetIP6AddrGenMode(link, addrGenNone)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return nil
	}
	if serr := setIPv6(link.Attrs().Name, "disable_ipv6", "1"); serr == nil || errors.Is(serr, errNoIPv6) {
		return nil
	}
	return err
}

// wakeIPv6 undoes silence for a netdev that gets addresses, without duplicate
// address detection: it would keep the addresses unusable for a second or more.
func (f *Fabric) wakeIPv6(link netlink.Link) error {
	name := link.Attrs().Name
	for _, s := range [...]struct {
		key, value string
		must       bool
	}{{"accept_dad", "0", false}, {"accept_ra", "0", false}, {"disable_ipv6", "0", true}} {
		err := setIPv6(name, s.key, s.value)
		if errors.Is(err, errNoIPv6) || err != nil && s.must && !ipv6On(name) {
			return err
		}
	}
	return f.nl.LinkSetIP6AddrGenMode(link, addrGenEUI64)
}

// setIPv6 writes a sysctl of a netdev. /proc/sys/net shows the namespace of the
// thread that opens it.
func setIPv6(name, key, value string) error {
	err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/"+key, []byte(value), 0)
	if errors.Is(err, fs.ErrNotExist) {
		return errNoIPv6
	}
	return err
}

func ipv6On(name string) bool {
	b, err := os.ReadFile("/proc/sys/net/ipv6/conf/" + name + "/disable_ipv6")
	return err == nil && len(b) > 0 && b[0] == '0'
}
