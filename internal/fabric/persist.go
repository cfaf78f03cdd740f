// SPDX-License-Identifier: Apache-2.0

package fabric

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// What New and AddPort made says so in its alias (ip link shows it), and what the
// addresses of the engine are that opens the port. So other processes find it.
const (
	aliasBridge = "tapverbs fabric"
	aliasPort   = "tapverbs port "
)

// ErrNotFound: there is no fabric or port of that name here.
var ErrNotFound = errors.New("not found")

// NoOwner is Found.Owner of a port that root alone may open.
const NoOwner = ^uint32(0)

// Found is a port that some process made.
type Found struct {
	Port
	Fabric string // name of the bridge
	Owner  uint32 // user who may open it without privileges, or NoOwner
	InUse  bool   // an engine has it open
}

func (p *Port) alias() string { return aliasPort + p.V4.String() + " " + p.V6.String() }

// parseAlias reads the addresses out of a port's alias.
func parseAlias(s string) (v4, v6 netip.Prefix, ok bool) {
	s, ok = strings.CutPrefix(s, aliasPort)
	a, b, two := strings.Cut(s, " ")
	if !ok || !two {
		return v4, v6, false
	}
	var err4, err6 error
	v4, err4 = netip.ParsePrefix(a)
	v6, err6 = netip.ParsePrefix(b)
	return v4, v6, err4 == nil && err6 == nil
}

// Ports lists the ports of all fabrics in the network namespace of the calling thread,
// by fabric and number. It needs no privileges.
func Ports() ([]Found, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list the netdevs: %w", err)
	}
	bridges := map[int]string{}
	for _, l := range links {
		if a := l.Attrs(); l.Type() == "bridge" && a.Alias == aliasBridge {
			bridges[a.Index] = a.Name
		}
	}
	var ports []Found
	for _, l := range links {
		tun, ok := l.(*netlink.Tuntap)
		if !ok {
			continue
		}
		a := tun.Attrs()
		v4, v6, ok := parseAlias(a.Alias)
		bridge := bridges[a.MasterIndex]
		if !ok || bridge == "" {
			continue
		}
		p := Found{Fabric: bridge, Owner: tun.Owner, InUse: a.RawFlags&unix.IFF_RUNNING != 0}
		p.Name, p.V4, p.V6, p.MTU = a.Name, v4, v6, a.MTU
		// A name that somebody has given it since has no number; it goes first.
		_, _ = fmt.Sscanf(strings.TrimPrefix(a.Name, bridge), "p%d", &p.Index)
		p.MAC = macOf(p.Index)
		ports = append(ports, p)
	}
	slices.SortFunc(ports, func(a, b Found) int {
		if c := strings.Compare(a.Fabric, b.Fabric); c != 0 {
			return c
		}
		return a.Index - b.Index
	})
	return ports, nil
}

// Remove takes a fabric that some process made, and its ports, out of the network
// namespace of the calling thread. Engines that have ports open see tap.ErrGone.
// Errors are ErrNotFound and ErrPermission.
func Remove(name string) error {
	f := &Fabric{cfg: Config{Name: name}} // for its way to explain
	links, err := netlink.LinkList()
	if err != nil {
		return f.explain("list the netdevs", err)
	}
	i := slices.IndexFunc(links, func(l netlink.Link) bool { return l.Attrs().Name == name })
	switch {
	case i < 0:
		return fmt.Errorf("fabric %s: %w", name, ErrNotFound)
	case links[i].Type() != "bridge" || links[i].Attrs().Alias != aliasBridge:
		return fmt.Errorf("fabric %s: the netdev of that name was not made by tapverbs: %w", name, ErrNotFound)
	}
	for _, l := range links {
		a := l.Attrs()
		if _, _, ok := parseAlias(a.Alias); !ok || a.MasterIndex != links[i].Attrs().Index {
			continue
		}
		if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
			return f.explain("remove "+a.Name, err)
		}
	}
	if err := netlink.LinkDel(links[i]); err != nil && !errors.Is(err, unix.ENODEV) {
		return f.explain("remove the bridge", err)
	}
	return nil
}

// macOf is the MAC of the engine of a port.
func macOf(i int) [6]byte { return [6]byte{0x02, 't', 'v', 0, byte((i + 1) >> 8), byte(i + 1)} }
