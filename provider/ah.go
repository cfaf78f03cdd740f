// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/tapverbs/tapverbs/wire"
)

// AHAttr is an address vector (struct ibv_ah_attr). RoCE always has a global
// route, so is_global has no field here.
type AHAttr struct {
	DGID GID
	// SGIDIndex selects our own address in the GID table; its family must be that
	// of DGID (an IPv4-mapped DGID goes over IPv4).
	SGIDIndex int
	// HopLimit is the IPv6 hop limit or IPv4 TTL; 0 stands for 64.
	HopLimit     uint8
	TrafficClass uint8  // or IPv4 TOS
	FlowLabel    uint32 // its lower 20 bits; it also chooses the UDP source port, 0 for one made of the QPNs
	// SL is the service level, which RoCEv2 does not send (it has the traffic class).
	SL uint8
	// PortNum is 1; 0 stands for 1.
	PortNum uint8
}

// path makes the path of an address vector, all but its MAC and UDP source port. Of the
// flow label the lower 20 bits count, as in the kernel: UCX says all ones for any.
func (d *Device) path(a *AHAttr) (p wire.Path, err error) {
	if a.PortNum > 1 || a.SL > 15 {
		return p, fmt.Errorf("address vector: port %d, SL %d: %w", a.PortNum, a.SL, ErrInvalid)
	}
	a.FlowLabel &= 0xfffff
	src, err := d.QueryGID(a.SGIDIndex)
	if err != nil {
		return p, err
	}
	p = wire.Path{SrcMAC: d.mac, Src: src.Addr(), Dst: a.DGID.Addr(), TClass: a.TrafficClass, HopLimit: a.HopLimit, FlowLabel: a.FlowLabel}
	if p.HopLimit == 0 {
		p.HopLimit = defaultHopLimit
	}
	p.SrcPort = udpSourcePort(a.FlowLabel, p.Src, p.Dst)
	if p.Dst.IsUnspecified() || p.Dst.Is4() != p.Src.Is4() {
		return p, fmt.Errorf("destination GID %v from %v: %w", a.DGID, src, ErrInvalid)
	}
	return p, nil
}

// ResolveMAC tells the Ethernet address that packets with this address vector go to
// (ibv_resolve_eth_l2_from_gid(3)): that of the neighbour or of the gateway, which is
// asked for it if need be. Errors are those of CreateAH.
func (d *Device) ResolveMAC(ctx context.Context, a AHAttr) (mac [6]byte, err error) {
	if err := d.alive(); err != nil {
		return mac, err
	}
	p, err := d.path(&a)
	if err != nil {
		return mac, err
	}
	if _, mac, err = d.resolve(ctx, p.Src, p.Dst); err != nil {
		return mac, fmt.Errorf("resolve %v: %w", a.DGID, err)
	}
	return mac, nil
}

// udpSourcePort is the UDP source port of a flow (IBA A17.4.5.1: any port that is the same
// for all packets of a connection): from the flow label, if the application has set one,
// in the way of rdma_flow_label_to_udp_sport in the kernel, so that it decides how switches
// spread its flows. Otherwise all queue pairs have the same towards one address, so that
// their packets can leave in one super-frame.
func udpSourcePort(label uint32, src, dst netip.Addr) uint16 {
	if label == 0 {
		v := foldAddr(src) + foldAddr(dst) // the same both ways
		v ^= v >> 40
		v ^= v >> 20
		label = uint32(v)&0xfffff | 1
	}
	return uint16(label&0x3fff^label>>14) | 0xc000
}

// foldAddr makes 64 bits of an address that differ in all places.
func foldAddr(a netip.Addr) uint64 {
	b := a.As16()
	return (binary.BigEndian.Uint64(b[:])*31 + binary.BigEndian.Uint64(b[8:])) * 0x9e3779b97f4a7c15
}

// AH is an address handle: a destination for datagrams (IBA 10.2.2.2). It follows
// when the destination's MAC changes.
type AH struct {
	pd    *PD
	attr  AHAttr
	path  wire.Path // written with the baton held
	index uint32    // in shard.ahs
	neigh *neighbour
	dead  bool // guarded by d.mu
}

// CreateAH makes an address handle (ibv_create_ah(3)). It waits until the
// destination's MAC is known; errors are ErrInvalid, ErrUnreachable, ErrTimeout,
// ErrNoMem at MaxAH.
func (p *PD) CreateAH(a AHAttr) (*AH, error) {
	d := p.d
	if err := d.alive(); err != nil {
		return nil, err
	}
	path, err := d.path(&a)
	if err != nil {
		return nil, err
	}
	n, mac, err := d.resolve(context.Background(), path.Src, path.Dst)
	if err != nil {
		return nil, fmt.Errorf("create AH: %w", err)
	}
	path.DstMAC = mac
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.ahs) >= maxAH {
		return nil, fmt.Errorf("%d address handles: %w", maxAH, ErrNoMem)
	}
	if err := p.ref(); err != nil {
		return nil, err
	}
	h := &AH{pd: p, attr: a, path: path}
	d.sh.lock()
	d.sh.ahs.add(h)
	h.neigh = d.sh.use(n, &h.path)
	d.sh.release()
	d.ahs[h] = struct{}{}
	return h, nil
}

// Index is the number by which send work requests name the handle (qp.SendWR.AH); never 0.
func (h *AH) Index() uint32 { return h.index }

// Attr gives what the handle was made of.
func (h *AH) Attr() AHAttr { return h.attr }

// Path gives the path that datagrams take now. Its UDP source port is that of the
// QP that sent last.
func (h *AH) Path() wire.Path {
	s := h.pd.d.sh
	s.lock()
	defer s.release()
	return h.path
}

// Destroy ends the handle (ibv_destroy_ah(3)); ErrClosed twice.
func (h *AH) Destroy() error {
	d := h.pd.d
	if d.closed.Load() {
		return ErrClosed
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if h.dead {
		return ErrClosed
	}
	h.dead = true
	h.pd.refs--
	delete(d.ahs, h)
	d.sh.lock()
	d.sh.ahs.remove(h)
	h.neigh.drop(&h.path)
	d.sh.release()
	return nil
}
