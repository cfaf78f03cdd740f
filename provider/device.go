// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"crypto/rand"
	"errors"
	"fmt"
	"hash/fnv"
	"math/bits"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
)

// Config says how to open a device. Port or Device must be set.
type Config struct {
	// Port is the name of the TAP device to attach to.
	Port string
	// Device is an opened TAP (or an in-memory port) to use instead. Close of the
	// provider's device closes it; an Open that fails does not.
	Device tap.Device
	// MoreQueues are further queues of the port that Device is one of; 1, 3, 7 or 15 of
	// them. What holds for Device holds for them.
	MoreQueues []tap.Device
	// Queues is how many queues of Port to use, each with an engine of its own, so that
	// several threads that post and poll do not wait for each other: 1, 2, 4, 8 or 16; 0
	// is 1. Port must be one of several queues then, or not be there yet.
	Queues int
	// Plain opens Port without a vnet header.
	Plain bool
	// Without names what is not to be asked of the kernel for Port: USO4|USO6 for frames
	// that each hold one packet.
	Without tap.Offload
	// NoECN has connections not say in their packets that they understand marks of
	// congestion, unless the application does (RFC 3168 5: ECT(0)).
	NoECN bool
	// MAC of the engine; not that of the TAP netdev, which is the other end of the
	// cable. When nil it is derived from the first address, so that a process that
	// is started again keeps it; without addresses it is random.
	MAC net.HardwareAddr
	// Addrs are the engine's IPv4 and IPv6 addresses with their on-link prefixes.
	// The link-local address that belongs to the MAC is always there.
	Addrs []netip.Prefix
	// Gateway are next hops for destinations on no prefix, one per family at most
	// being of use.
	Gateway []netip.Addr
	// Sysfs is a directory like that of a device in /sys/class/infiniband: files of
	// PublishedFiles that are there are kept up to date. None when empty, and for
	// Manual devices.
	Sysfs string
	// Monitor is the directory for a socket through which this user, and root, can look
	// at the device (tapverbs top). None when empty, and for Manual devices; with
	// MonitorAuto it is the first of MonitorDirs that can be had. It must be the user's
	// alone: mode 0700; it is made if it is not there.
	Monitor string
	// Space is the memory to register in; mr.Process() when nil.
	Space *mr.Space
	// Budget is how many bytes of memory all regions of the process may take, 0 for any
	// number (mr.Space.SetBudget), and Store where content goes then, as NewStore has it. A
	// process has one of each: they are Space's, and stay when the device is closed. The
	// store of the first device that has evicted something stays.
	Budget uint64
	Store  string
	// Clock gives the time in nanoseconds; monotonic time when nil.
	Clock func() int64
	// Manual leaves out the background goroutine: nothing happens except in calls
	// of Progress, and in those that post and poll. For tests with virtual time.
	Manual bool
	// Idle is called by blocking calls of a Manual device, again and again, until
	// what they wait for has happened. It should make progress on both ends.
	Idle func()
}

// Device is an opened device with one port. All methods may be called by any
// goroutine.
type Device struct {
	cfg   Config
	clock func() int64
	devs  []tap.Device // queues of one port
	dev   tap.Device   // the first of them
	mac   [6]byte
	gids  *gidTable
	mtu   qp.MTU
	space *mr.Space
	keys  *mr.Table
	// shards are the engines, one for each queue, and sh the first of them, see spread.go.
	shards    []*shard
	sh        *shard
	shardBits uint         // log2 of their number
	steered   bool         // by the kernel: what is in a queue is for its shard
	queueLen  atomic.Int32 // frames that the port holds for each of its readers
	flowing   atomic.Bool  // there are flows
	sniffing  atomic.Bool  // among them sniffers
	unplugged atomic.Bool
	untold    untoldChannels
	refused   atomic.Uint32 // kinds of super-frames, as tap.Offload

	events *fifo[*asyncEvent]
	fatal  acks          // events that belong to the device itself
	lost   chan struct{} // closed when the device is gone and all work flushed

	mon *monitor // nil: none

	closed atomic.Bool
	mu     sync.Mutex // what follows, and the refs of all objects
	nextPD mr.PD
	xrcds  map[*XRCD]struct{}
	// xrcFiles are the XRC domains that files stand for.
	xrcFiles  map[inode]*xrcDomain
	nextXRCD  qp.XRCD
	pds       map[*PD]struct{}
	mrs       map[*MR]struct{}
	mws       map[*MW]struct{}
	cqs       map[*CQ]struct{}
	srqs      map[*SRQ]struct{}
	qps       map[*QP]struct{}
	ahs       map[*AH]struct{}
	chans     map[*CompChannel]struct{}
	dms       map[*DM]struct{}
	nextShard int
	dmUsed    int // bytes of device memory

	unheard []func() // end being told of regions

	advising chan struct{} // one for each goroutine that follows an advice
	bringing chan struct{} // one for each that prefetches for a peer
	advisers sync.WaitGroup
}

// Open opens a device (ibv_open_device(3)): it attaches to the TAP, announces its
// addresses to the link and starts the engine. Errors are those of package tap,
// or ErrInvalid for a configuration that makes no sense (an address twice, a
// gateway off the link, a TAP MTU too small for the smallest path MTU).
func Open(cfg Config) (*Device, error) {
	mac, err := engineMAC(cfg.MAC, cfg.Addrs)
	if err != nil {
		return nil, err
	}
	gids, err := newGIDTable(mac, cfg.Addrs, cfg.Gateway)
	if err != nil {
		return nil, err
	}
	if cfg.Manual && cfg.Idle == nil {
		cfg.Idle = func() {}
	}
	devs, err := openPort(&cfg)
	if err != nil {
		return nil, fmt.Errorf("open device: %w", err)
	}
	dev := devs[0]
	d := &Device{
		cfg: cfg, clock: cfg.Clock, devs: devs, dev: dev, shardBits: uint(bits.TrailingZeros(uint(len(devs)))), mac: mac, gids: gids, mtu: activeMTU(dev.MTU()), space: cfg.Space, lost: make(chan struct{}),
		pds: map[*PD]struct{}{}, mrs: map[*MR]struct{}{}, mws: map[*MW]struct{}{}, cqs: map[*CQ]struct{}{}, srqs: map[*SRQ]struct{}{},
		xrcds: map[*XRCD]struct{}{}, xrcFiles: map[inode]*xrcDomain{},
		qps: map[*QP]struct{}{}, ahs: map[*AH]struct{}{}, chans: map[*CompChannel]struct{}{},
		dms: map[*DM]struct{}{}, advising: make(chan struct{}, maxAdvice), bringing: make(chan struct{}, maxBringing),
	}
	d.events = newFIFO[*asyncEvent](d.lost)
	d.fatal.init()
	if err := d.start(); err != nil {
		if cfg.Device == nil {
			for _, dev := range devs {
				err = errors.Join(err, dev.Close())
			}
		}
		return nil, fmt.Errorf("open device %s: %w", dev.Name(), err)
	}
	return d, nil
}

func (d *Device) start() error {
	if d.mtu == 0 {
		return fmt.Errorf("MTU %d of the port is below the %d bytes that a path MTU of 256 needs: %w",
			d.dev.MTU(), qp.MTU256.Bytes()+portOverhead, ErrInvalid)
	}
	if d.clock == nil {
		base := time.Now()
		d.clock = func() int64 { return int64(time.Since(base)) }
	}
	if d.space == nil {
		d.space = mr.Process()
	}
	if err := d.limitMemory(); err != nil {
		return err
	}
	d.lengthen()
	d.keys = mr.NewTable(d.space)
	for i := range d.devs {
		s, err := newShard(d, i)
		if err != nil {
			return errors.Join(err, d.closeShards())
		}
		d.shards = append(d.shards, s)
	}
	d.sh = d.shards[0]
	if len(d.devs) > 1 {
		d.steered = d.steer() == nil
	}
	for _, s := range d.shards {
		d.unheard = append(d.unheard, d.space.OnRegion(s.regionChanged))
	}
	d.sh.lock()
	d.sh.announce()
	d.sh.eg.flush()
	d.sh.eg.testSuper()
	if off := d.refusedOffloads(); off != 0 {
		for _, s := range d.shards {
			s.eg.super &^= off
		}
	}
	d.sh.release()
	if !d.cfg.Manual {
		for _, s := range d.shards {
			if err := s.bg.start(); err != nil {
				d.unhear()
				d.stopBackground()
				return errors.Join(err, d.closeShards())
			}
		}
		d.sh.pub.start(d.cfg.Sysfs)
		d.sh.link.start()
		d.mon = d.startMonitor(d.cfg.Monitor)
	}
	return nil
}

func (d *Device) unhear() {
	for _, f := range d.unheard {
		f()
	}
}

func (d *Device) stopBackground() {
	for _, s := range d.shards {
		s.bg.stop()
	}
}

func (d *Device) closeShards() error { return d.each((*shard).close) }

// engineMAC chooses the engine's address: locally administered, unicast.
func engineMAC(mac net.HardwareAddr, addrs []netip.Prefix) (m [6]byte, err error) {
	switch {
	case mac != nil:
		if len(mac) != 6 || mac[0]&1 != 0 || [6]byte(mac) == [6]byte{} {
			return m, fmt.Errorf("MAC %v of the engine is not a unicast one: %w", mac, ErrInvalid)
		}
		return [6]byte(mac), nil
	case len(addrs) == 0:
		if _, err := rand.Read(m[:]); err != nil {
			return m, err
		}
		m[0] = m[0]&^1 | 2
	default:
		m = [6]byte{0x02, 0x74}
		if a := addrs[0].Addr().Unmap(); a.Is4() {
			b := a.As4()
			copy(m[2:], b[:])
		} else {
			h := fnv.New32a()
			b := a.As16()
			h.Write(b[:])
			h.Sum(m[2:2])
		}
	}
	return m, nil
}

// Name is the name of the TAP port.
func (d *Device) Name() string { return d.dev.Name() }

// MAC is the engine's Ethernet address.
func (d *Device) MAC() net.HardwareAddr { return net.HardwareAddr(append([]byte(nil), d.mac[:]...)) }

// Space is the memory the device registers in.
func (d *Device) Space() *mr.Space { return d.space }

// Offloads tells what was negotiated with the TAP, without the kinds of super-frames that
// the kernel has refused when they were written.
func (d *Device) Offloads() tap.Offload { return d.dev.Offloads() &^ d.refusedOffloads() }

func (d *Device) refusedOffloads() tap.Offload { return tap.Offload(d.refused.Load()) }

// alive is the check every verb starts with.
func (d *Device) alive() error {
	if d.closed.Load() {
		return ErrClosed
	}
	if d.sh.gone.Load() {
		return ErrGone
	}
	return nil
}

// idle is what a blocking call does instead of sleeping; nil: sleep.
func (d *Device) idle() func() {
	if d.cfg.Manual {
		return d.cfg.Idle
	}
	return nil
}

// Progress makes progress by hand, as the background goroutine would: it takes in
// what has arrived, lets timers run out and sends what can be sent. It says
// whether anything happened. It is of use for Manual devices.
func (d *Device) Progress() bool {
	did := false
	for _, s := range d.shards {
		s.lock()
		did = s.progress(true, manualRounds) || did
		s.release()
	}
	return did
}

// NextDeadline is when Progress has something to do next besides frames that
// arrive, in ns of the device's clock; a time that is not after now: at once.
// qp.Never when nothing is outstanding.
func (d *Device) NextDeadline() int64 {
	at := qp.Never
	for _, s := range d.shards {
		s.lock()
		at = min(at, s.next())
		s.release()
	}
	return at
}

// Close destroys everything that is left and closes the device and its TAP. Calls
// that wait return ErrClosed. The memory of regions stays the caller's.
func (d *Device) Close() error {
	if !d.closed.CompareAndSwap(false, true) {
		return ErrClosed
	}
	d.mon.close()
	d.unhear()
	d.sh.link.close()
	d.stopBackground()
	d.events.close()
	defer d.keys.DropBudgets() // without d.mu, for which a notifier's hook may wait
	d.mu.Lock()
	defer d.mu.Unlock()
	d.advisers.Wait()
	for ch := range d.chans {
		ch.q.close()
	}
	d.sh.lock()
	d.sh.cm.agent.Close(d.sh.clock())
	d.sh.leaveGroups()
	d.sh.failResolves(ErrClosed)
	d.sh.release()
	for _, s := range d.shards {
		s.lock()
		s.closing = true
		s.release()
	}
	for _, s := range d.shards {
		s.beside.Wait()
	}
	var errs []error
	for q := range d.qps {
		errs = append(errs, q.teardown())
	}
	for c := range d.cqs {
		errs = append(errs, c.teardown())
	}
	for q := range d.srqs {
		errs = append(errs, q.teardown())
	}
	for x := range d.xrcds {
		errs = append(errs, x.teardown())
	}
	for m := range d.mws {
		errs = append(errs, m.teardown())
	}
	for m := range d.mrs {
		errs = append(errs, m.teardown())
	}
	for m := range d.dms {
		errs = append(errs, m.teardown())
	}
	clear(d.mws)
	d.sh.pub.close()
	clear(d.ahs)
	clear(d.pds)
	errs = append(errs, d.closeShards())
	for _, dev := range d.devs {
		errs = append(errs, dev.Close())
	}
	return errors.Join(errs...)
}
