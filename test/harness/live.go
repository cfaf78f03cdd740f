// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
)

// liveLimit bounds RunUntil of a live pair, in real time.
const liveLimit = 2 * time.Minute

// NewLivePair is NewPair with background goroutines and real time, still on the
// in-memory link: for tests with several goroutines. The link has no delay. Options
// change the Config of device i.
func NewLivePair(t testing.TB, cfg taptest.Config, opts ...func(i int, c *provider.Config)) *Pair {
	t.Helper()
	cfg = Frames(cfg)
	p := &Pair{T: t, cfg: cfg, Limit: liveLimit, live: true}
	p.Net = taptest.New(nil, cfg)
	for i := range p.Dev {
		p.Net.Port(i)
	}
	for i := range p.Dev {
		c := provider.Config{Device: p.Net.Port(i), MoreQueues: queues(p.Net.Port(i), i), Addrs: Addrs(i)}
		for _, o := range opts {
			o(i, &c)
		}
		p.open(i, c)
	}
	return p
}

// LivePair is two devices with background goroutines, wherever they are.
func LivePair(t testing.TB, a, b *provider.Device) *Pair {
	return &Pair{T: t, Limit: liveLimit, live: true, Dev: [2]*provider.Device{a, b}}
}

func (p *Pair) open(i int, cfg provider.Config) {
	p.T.Helper()
	d, err := provider.Open(cfg)
	if err != nil {
		p.T.Fatal(err)
	}
	p.Dev[i] = d
	p.T.Cleanup(func() {
		if err := d.Close(); err != nil && err != provider.ErrClosed {
			p.T.Errorf("close device %d: %v", i, err)
		}
	})
}

// TAPs is a fabric in a network namespace of its own with two engines on it.
type TAPs struct {
	*Pair
	Fabric *fabric.Fabric
	Ports  [2]fabric.Port
	More   []*provider.Device
	// HostV4 and HostV6 are addresses of the host on the bridge, if asked for.
	HostV4, HostV6 netip.Prefix
	third          *provider.Device
	nl             *netlink.Handle // in the fabric's namespace
}

// TAPOptions says how to make the fabric.
type TAPOptions struct {
	Plain bool // no vnet header
	// PlainPeer has only the second port without one.
	PlainPeer bool
	// Without names offloads not to ask for.
	Without tap.Offload
	Host    bool // the bridge has addresses, too
	MTU     int  // of the ports; the fabric's default if 0
	// Manual devices have no background goroutine: the test makes their progress.
	Manual bool
	// Clock is the devices', if they are Manual; real time if nil.
	Clock func() int64
	// Queues of each end; the ports are made for several if one is above 1.
	Queues [2]int
	// Third adds a device, see ToThird.
	Third bool
	// More devices on ports of their own, as those that Pair.AddDevice adds: TAPs.More.
	More int
	// InNS, if set, is called in the namespace when all is up.
	InNS func(*TAPs) error
}

// NewTAPPair opens two devices with background goroutines on real TAPs of a
// private fabric. It needs CAP_NET_ADMIN and /dev/net/tun.
func NewTAPPair(t testing.TB, o TAPOptions) *TAPs {
	t.Helper()
	if os.Getenv(EnvFrames) == "single" {
		o.Without |= tap.USO4 | tap.USO6
	}
	p := &TAPs{Pair: &Pair{T: t, Limit: liveLimit, live: true}}
	err := fabric.WithNS(func() error {
		f, err := fabric.New(fabric.Config{MTU: o.MTU, MultiQueue: max(o.Queues[0], o.Queues[1]) > 1})
		if err != nil {
			return err
		}
		p.Fabric = f
		if p.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			return err
		}
		if o.Host {
			if p.HostV4, p.HostV6, err = f.HostAddr(); err != nil {
				return err
			}
		}
		for i := range p.Dev {
			if p.Ports[i], p.Dev[i], err = p.plug(i, &o); err != nil {
				return err
			}
		}
		if o.Third {
			if _, p.third, err = p.plug(len(p.Dev), &o); err != nil {
				return err
			}
		}
		for i := range o.More {
			_, d, err := p.plug(len(p.Dev)+1+i, &o)
			if err != nil {
				return err
			}
			p.More = append(p.More, d)
		}
		if o.InNS != nil {
			return o.InNS(p)
		}
		return nil
	})
	t.Cleanup(func() {
		for i, d := range append([]*provider.Device{p.Dev[0], p.Dev[1], p.third}, p.More...) {
			if d == nil {
				continue
			}
			if err := d.Close(); err != nil && err != provider.ErrClosed {
				t.Errorf("close device %d: %v", i, err)
			}
		}
		if p.Fabric != nil {
			if err := p.Fabric.Close(); err != nil {
				t.Errorf("close the fabric: %v", err)
			}
		}
		if p.nl != nil {
			p.nl.Close()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// plug adds a port to the fabric and opens a device on it.
func (p *TAPs) plug(i int, o *TAPOptions) (port fabric.Port, d *provider.Device, err error) {
	if port, err = p.Fabric.AddPort(i); err != nil {
		return port, nil, err
	}
	queues := 1
	if i < len(o.Queues) {
		queues = o.Queues[i]
	}
	devs, err := tap.OpenQueues(tap.Config{Name: port.Name, Plain: o.Plain || o.PlainPeer && i == 1, Without: o.Without, Queues: queues})
	if err != nil {
		return port, nil, err
	}
	d, err = provider.Open(provider.Config{
		Device: devs[0], MoreQueues: devs[1:], MAC: port.MAC[:], Addrs: []netip.Prefix{port.V4, port.V6},
		Manual: o.Manual, Idle: p.progress, Clock: o.Clock,
	})
	return port, d, err
}

// ToThird is the first device and the third, to be connected.
func (p *TAPs) ToThird() *Pair {
	return LivePair(p.T, p.Dev[0], p.third)
}

// progress is made on all devices, as far as they are there.
func (p *TAPs) progress() {
	for _, d := range append([]*provider.Device{p.Dev[0], p.Dev[1], p.third}, p.More...) {
		if d != nil {
			d.Progress()
		}
	}
}
