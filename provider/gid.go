// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"
	"net/netip"
)

// GID is a port's 128-bit address (IBA 4.1.1). For RoCEv2 it is an IPv6 address,
// or an IPv4 address mapped into IPv6 (IBA A17.4.2).
type GID [16]byte

// GIDOf gives the GID of an IP address.
func GIDOf(a netip.Addr) GID { return GID(a.As16()) }

// Addr gives the IP address of the GID, IPv4 unmapped.
func (g GID) Addr() netip.Addr { return netip.AddrFrom16(g).Unmap() }

// String prints the GID as rdma-core's programs do (inet_ntop(3) of the 16
// bytes): fe80::2, ::ffff:10.0.0.1.
func (g GID) String() string { return netip.AddrFrom16(g).String() }

// IsZero says whether the GID is all zero, the reserved GID (IBA 4.1.1).
func (g GID) IsZero() bool { return g == GID{} }

// GIDEntry is a row of the port's GID table. Its type is always RoCE v2.
type GIDEntry struct {
	Index int
	GID   GID
	// Prefix is the address with the length of its on-link prefix in bits.
	Prefix netip.Prefix
}

// gidTable holds the addresses of the device; it does not change after Open.
type gidTable struct {
	entries []GIDEntry
	addrs   []netip.Addr // of the entries, unmapped
	gateway []netip.Addr
}

// linkLocal is the IPv6 link-local address of a MAC (RFC 4291 appendix A, modified
// EUI-64), the default GID of a RoCE port (IBA A17.4.2).
func linkLocal(mac [6]byte) netip.Addr {
	return netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80,
		8: mac[0] ^ 2, 9: mac[1], 10: mac[2], 11: 0xff, 12: 0xfe, 13: mac[3], 14: mac[4], 15: mac[5]})
}

func newGIDTable(mac [6]byte, addrs []netip.Prefix, gateway []netip.Addr) (*gidTable, error) {
	t := &gidTable{}
	t.add(netip.PrefixFrom(linkLocal(mac), 64))
	for _, p := range addrs {
		a := p.Addr().Unmap().WithZone("")
		bits := p.Bits()
		if p.Addr().Is4In6() {
			bits -= 96
		}
		if !p.IsValid() || bits < 0 || a.IsMulticast() || a.IsUnspecified() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
			return nil, fmt.Errorf("address %v of the engine: %w", p, ErrInvalid)
		}
		if t.has(a) {
			continue
		}
		t.add(netip.PrefixFrom(a, bits))
	}
	if len(t.entries) > maxGIDs {
		return nil, fmt.Errorf("%d addresses, at most %d: %w", len(addrs), maxGIDs-1, ErrInvalid)
	}
	for _, g := range gateway {
		g = g.Unmap().WithZone("")
		if !g.IsValid() || !t.onLink(g) {
			return nil, fmt.Errorf("gateway %v is on no prefix of the engine: %w", g, ErrInvalid)
		}
		t.gateway = append(t.gateway, g)
	}
	return t, nil
}

func (t *gidTable) add(p netip.Prefix) {
	t.entries = append(t.entries, GIDEntry{Index: len(t.entries), GID: GIDOf(p.Addr()), Prefix: p})
	t.addrs = append(t.addrs, p.Addr())
}

// has says whether a, unmapped, is an address of the device.
func (t *gidTable) has(a netip.Addr) bool {
	for i := range t.addrs {
		if t.addrs[i] == a {
			return true
		}
	}
	return false
}

func (t *gidTable) onLink(a netip.Addr) bool {
	for i := range t.entries {
		if t.entries[i].Prefix.Contains(a) {
			return true
		}
	}
	return a.IsLinkLocalUnicast() && a.Is6()
}

// nextHop gives the address whose MAC a packet to dst needs.
func (t *gidTable) nextHop(dst netip.Addr) (netip.Addr, error) {
	if t.onLink(dst) {
		return dst, nil
	}
	for _, g := range t.gateway {
		if g.Is4() == dst.Is4() {
			return g, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("%v: %w", dst, ErrUnreachable)
}

// GIDs lists the GID table: index 0 is the link-local address made from the MAC,
// then one entry for each address of the Config, in its order.
func (d *Device) GIDs() []GIDEntry { return append([]GIDEntry(nil), d.gids.entries...) }

// QueryGID gives row i of the GID table (ibv_query_gid(3)), or ErrInvalid, or ErrGone.
func (d *Device) QueryGID(i int) (GID, error) {
	if d.sh.gone.Load() {
		return GID{}, ErrGone
	}
	if i < 0 || i >= len(d.gids.entries) {
		return GID{}, fmt.Errorf("GID index %d of %d: %w", i, len(d.gids.entries), ErrInvalid)
	}
	return d.gids.entries[i].GID, nil
}
