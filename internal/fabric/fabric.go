// SPDX-License-Identifier: Apache-2.0

// Package fabric makes what engines meet on: a bridge with TAP ports in a network
// namespace. Everything is done by netlink; no other program is called.
//
// A frame may be as long as the MTU of the TAP it leaves through (the bridge drops
// longer ones without a word), so both the bridge and its ports get Config.MTU.
// The netdevs take no part in IPv6 themselves: no addresses, no router
// solicitations, no listener reports mix with what a test counts or captures.
package fabric

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// The sentinels of this package; the errors that carry them say what can be done.
var (
	// ErrPermission: CAP_NET_ADMIN, or access to /dev/net/tun, is missing.
	ErrPermission = errors.New("not permitted")
	// ErrNoTUN: this machine (or container) has no usable /dev/net/tun.
	ErrNoTUN = errors.New("no TUN/TAP driver")
	// ErrNoBridge: the kernel has no bridge.
	ErrNoBridge = errors.New("no bridge driver")
	// ErrExists: a netdev of the name is there already.
	ErrExists = errors.New("already exists")
	// ErrUserNS: user namespaces are not to be had, so an ordinary user cannot
	// make a private fabric.
	ErrUserNS = errors.New("user namespaces are not available")
)

// The defaults of Config.
const (
	// DefaultName of the bridge. Ports are named after it: tv0p0, tv0p1, ...
	DefaultName = "tv0"
	// DefaultMTU in bytes holds RoCE packets of path MTU 4096 with all their
	// headers and leaves room for what hosts call a jumbo frame.
	DefaultMTU = 9000
	// DefaultTxQueueLen is how many frames a TAP holds for its reader; the kernel
	// drops what exceeds it. Its own default of 1000 is 4 MiB of RoCE packets:
	// less than arrives while the reader's core serves someone else for one
	// scheduler slice (about 4 ms at a million packets a second). 32768 frames
	// cover the slices of a busy machine, which unreliable services do not make
	// good, and take memory only when they are there.
	DefaultTxQueueLen = 32768
)

// Config says what New makes. The zero value is a fabric with the defaults.
type Config struct {
	// Name of the bridge, up to 11 bytes so that the ports' names fit.
	Name string
	// MTU of the bridge and of the ports, in bytes after the Ethernet header.
	MTU int
	// V4 and V6 are the subnets that ports get their addresses from; 10.91.0.0/24
	// and fd91::/64 if not set.
	V4, V6 netip.Prefix
	// TxQueueLen is how many frames each port holds for its reader.
	TxQueueLen int
	// Owner is the user who may open the ports without privileges, Group the
	// group; 0 is root.
	Owner, Group uint32
	// MultiQueue makes ports that several descriptors can share
	// (IFF_MULTI_QUEUE); they can then be opened in that way only.
	MultiQueue bool
}

// A Fabric is a bridge with TAP ports in the network namespace where New was called.
// Its methods may be called from any goroutine and in any namespace.
type Fabric struct {
	cfg Config
	ns  netns.NsHandle

	mu     sync.Mutex
	nl     *netlink.Handle // bound to ns; nil after Close
	bridge netlink.Link
	ports  map[int]netlink.Link
	host   [2]netip.Prefix // the bridge's own addresses, once it has them
}

// Port is one TAP of a fabric and the addresses of the engine that opens it. The
// netdev itself has none of these: it is the cable, the engine is the host.
type Port struct {
	Index int
	Name  string       // of the TAP
	MAC   [6]byte      // of the engine: locally administered, 02:74:76:00 and the index
	V4    netip.Prefix // of the engine, with the length of its subnet
	V6    netip.Prefix // of the engine, with the length of its subnet
	MTU   int          // in bytes after the Ethernet header
}

// New makes the bridge in the network namespace of the calling thread, without
// spanning tree, forward delay and multicast snooping, and brings it and the
// loopback device up. It needs CAP_NET_ADMIN there. On an error nothing is left.
func New(cfg Config) (*Fabric, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	ns, err := netns.Get()
	if err != nil {
		return nil, fmt.Errorf("fabric %s: open the network namespace: %w", cfg.Name, err)
	}
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("fabric %s: open netlink: %w", cfg.Name, err)
	}
	f := &Fabric{cfg: cfg, ns: ns, nl: nl, ports: make(map[int]netlink.Link)}
	if err := f.build(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (c *Config) fill() error {
	if c.Name == "" {
		c.Name = DefaultName
	}
	if c.MTU == 0 {
		c.MTU = DefaultMTU
	}
	if c.TxQueueLen == 0 {
		c.TxQueueLen = DefaultTxQueueLen
	}
	if !c.V4.IsValid() {
		c.V4 = netip.MustParsePrefix("10.91.0.0/24")
	}
	if !c.V6.IsValid() {
		c.V6 = netip.MustParsePrefix("fd91::/64")
	}
	c.V4, c.V6 = c.V4.Masked(), c.V6.Masked()
	switch {
	case len(c.Name) > 11:
		return fmt.Errorf("fabric %s: the name has %d bytes, at most 11 leave room for the ports' numbers", c.Name, len(c.Name))
	case c.MTU < 1280 || c.MTU > 65521:
		return fmt.Errorf("fabric %s: an MTU of %d bytes is not from 1280 (IPv6 needs it) to 65521", c.Name, c.MTU)
	case c.TxQueueLen < 0:
		return fmt.Errorf("fabric %s: a queue length of %d frames", c.Name, c.TxQueueLen)
	case !c.V4.Addr().Is4() || c.V4.Bits() > 29:
		return fmt.Errorf("fabric %s: %s is not an IPv4 subnet with room for ports (/29 or wider)", c.Name, c.V4)
	case !c.V6.Addr().Is6() || c.V6.Addr().Is4In6() || c.V6.Bits() > 112:
		return fmt.Errorf("fabric %s: %s is not an IPv6 subnet with room for ports (/112 or wider)", c.Name, c.V6)
	}
	return nil
}

func (f *Fabric) build() error {
	name := f.cfg.Name
	lo, err := f.nl.LinkByName("lo")
	if err == nil {
		err = f.nl.LinkSetUp(lo)
	}
	if err != nil {
		return f.explain("bring lo up", err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = name, f.cfg.MTU
	no := false
	bridge := &netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &no}
	if err := f.nl.LinkAdd(bridge); err != nil {
		switch {
		case errors.Is(err, unix.EEXIST):
			return fmt.Errorf("fabric %s: make the bridge: %w (choose another name, or remove it: ip link del %s): %w", name, err, name, ErrExists)
		case errors.Is(err, unix.EOPNOTSUPP):
			return fmt.Errorf("fabric %s: make the bridge: %w (load the module: modprobe bridge): %w", name, err, ErrNoBridge)
		}
		return f.explain("make the bridge", err)
	}
	f.bridge = bridge
	if err := setForwardDelay(bridge.Attrs().Index); err != nil {
		return f.explain("set the bridge's forward delay", err)
	}
	if err := f.in(func() error { return f.silence(bridge) }); err != nil {
		return f.explain("take the bridge out of IPv6", err)
	}
	if err := f.nl.LinkSetAlias(bridge, aliasBridge); err != nil {
		return f.explain("set the bridge's alias", err)
	}
	// Set again: an MTU given at creation follows the ports', one set later stays.
	if err := f.nl.LinkSetMTU(bridge, f.cfg.MTU); err != nil {
		return f.explain(fmt.Sprintf("set the bridge's MTU to %d", f.cfg.MTU), err)
	}
	if err := f.nl.LinkSetUp(bridge); err != nil {
		return f.explain("bring the bridge up", err)
	}
	return nil
}

// MaxPorts is how many ports the subnets have addresses for.
func (f *Fabric) MaxPorts() int {
	// Not the network, the broadcast address and the host.
	n := 1<<min(32-f.cfg.V4.Bits(), 16) - 3
	return min(n, 0xff00)
}

// AddPort makes port i (from 0), a persistent TAP with a noqueue qdisc, and brings it
// up as a port of the bridge. Whoever opens it later needs no privileges if the
// Config's Owner or Group fits and /dev/net/tun may be opened. On an error nothing is left.
func (f *Fabric) AddPort(i int) (Port, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.nl == nil {
		return Port{}, fmt.Errorf("fabric %s: closed", f.cfg.Name)
	}
	if i < 0 || i >= f.MaxPorts() {
		return Port{}, fmt.Errorf("fabric %s: port %d: the subnet %s has addresses for ports 0 to %d", f.cfg.Name, i, f.cfg.V4, f.MaxPorts()-1)
	}
	p := Port{
		Index: i,
		Name:  fmt.Sprintf("%sp%d", f.cfg.Name, i),
		MAC:   macOf(i),
		V4:    nth(f.cfg.V4, uint16(i+1)),
		V6:    nth(f.cfg.V6, uint16(i+1)),
		MTU:   f.cfg.MTU,
	}
	if len(p.Name) > 15 {
		return Port{}, fmt.Errorf("fabric %s: port %d: the name %s has more than 15 bytes", f.cfg.Name, i, p.Name)
	}
	if _, ok := f.ports[i]; ok {
		return Port{}, fmt.Errorf("fabric %s: port %d: %w", f.cfg.Name, i, ErrExists)
	}
	if err := f.in(func() error { return f.plug(p) }); err != nil {
		return Port{}, err
	}
	return p, nil
}

// plug makes the TAP of p. The thread is in the fabric's namespace.
func (f *Fabric) plug(p Port) (err error) {
	if _, err := f.nl.LinkByName(p.Name); err == nil {
		return fmt.Errorf("fabric %s: add port %s: %w (remove it: ip link del %s)", f.cfg.Name, p.Name, ErrExists, p.Name)
	}
	if err := f.makeTAP(p.Name); err != nil {
		return fmt.Errorf("fabric %s: add port %s: %w", f.cfg.Name, p.Name, err)
	}
	tun, err := f.nl.LinkByName(p.Name)
	if err != nil {
		return f.explain("find "+p.Name, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(f.explain("add port "+p.Name, err), f.nl.LinkDel(tun))
		}
	}()
	if err := f.silence(tun); err != nil {
		return fmt.Errorf("take it out of IPv6: %w", err)
	}
	if err := f.nl.LinkSetAlias(tun, p.alias()); err != nil {
		return fmt.Errorf("set the alias: %w", err)
	}
	if err := f.nl.LinkSetMTU(tun, f.cfg.MTU); err != nil {
		return fmt.Errorf("set the MTU to %d: %w", f.cfg.MTU, err)
	}
	if err := f.nl.LinkSetTxQLen(tun, f.cfg.TxQueueLen); err != nil {
		return fmt.Errorf("set the queue length to %d: %w", f.cfg.TxQueueLen, err)
	}
	if err := f.noqueue(tun); err != nil {
		return fmt.Errorf("set the qdisc: %w", err)
	}
	if err := f.nl.LinkSetMaster(tun, f.bridge); err != nil {
		return fmt.Errorf("add it to the bridge: %w", err)
	}
	if err := f.nl.LinkSetUp(tun); err != nil {
		return fmt.Errorf("bring it up: %w", err)
	}
	if err := f.settle(tun); err != nil {
		return fmt.Errorf("wait for its link: %w", err)
	}
	f.ports[p.Index] = tun
	return nil
}

// RemovePort takes port i out of the fabric. An engine that has it open sees
// tap.ErrGone.
func (f *Fabric) RemovePort(i int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	link, ok := f.ports[i]
	if !ok {
		return fmt.Errorf("fabric %s: no port %d", f.cfg.Name, i)
	}
	delete(f.ports, i)
	return f.remove(link)
}

func (f *Fabric) remove(link netlink.Link) error {
	err := f.nl.LinkDel(link)
	if err == nil || errors.Is(err, unix.ENODEV) {
		return nil // ENODEV: someone else removed it
	}
	return f.explain("remove "+link.Attrs().Name, err)
}

// HostAddr gives the bridge addresses of its own, so that this host can reach the
// engines (ping them, or connect to them), and returns them: the last address of the IPv4
// subnet, and …:fffe of the IPv6 subnet; the latter is not valid where the kernel
// has no IPv6. Further calls change nothing.
func (f *Fabric) HostAddr() (v4, v6 netip.Prefix, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.nl == nil {
		return v4, v6, fmt.Errorf("fabric %s: closed", f.cfg.Name)
	}
	if f.host[0].IsValid() {
		return f.host[0], f.host[1], nil
	}
	v4, v6 = nth(f.cfg.V4, uint16(f.MaxPorts()+1)), nth(f.cfg.V6, 0xfffe)
	if err := f.addAddr(v4, 0); err != nil {
		return v4, v6, f.explain("give the bridge "+v4.String(), err)
	}
	switch err := f.in(func() error { return f.wakeIPv6(f.bridge) }); {
	case errors.Is(err, errNoIPv6):
		v6 = netip.Prefix{}
	case err != nil:
		return v4, v6, f.explain("turn on the bridge's IPv6", err)
	default:
		// Nobody else can have it, so it need not be asked for (RFC 4862, 5.4).
		if err := f.addAddr(v6, unix.IFA_F_NODAD); err != nil {
			return v4, v6, f.explain("give the bridge "+v6.String(), err)
		}
	}
	f.host = [2]netip.Prefix{v4, v6}
	return v4, v6, nil
}

// Close removes the ports and the bridge. Engines that have ports open see
// tap.ErrGone. A second call does nothing.
func (f *Fabric) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.nl == nil {
		return nil
	}
	var errs []error
	for i, link := range f.ports {
		delete(f.ports, i)
		errs = append(errs, f.remove(link))
	}
	if f.bridge != nil {
		errs = append(errs, f.remove(f.bridge))
	}
	f.nl.Close()
	f.nl = nil
	errs = append(errs, f.ns.Close())
	return errors.Join(errs...)
}

// Name is that of the bridge.
func (f *Fabric) Name() string { return f.cfg.Name }

// nth is address number n of a subnet, with its length.
func nth(subnet netip.Prefix, n uint16) netip.Prefix {
	b := subnet.Addr().AsSlice()
	low := b[len(b)-2:]
	binary.BigEndian.PutUint16(low, binary.BigEndian.Uint16(low)+n)
	addr, _ := netip.AddrFromSlice(b)
	return netip.PrefixFrom(addr, subnet.Bits())
}
