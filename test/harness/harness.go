// SPDX-License-Identifier: Apache-2.0

// Package harness joins two devices by an in-memory link with virtual time, for
// tests that need whole engines: packets, losses, timers and memory, but no TAP,
// no thread and no waiting.
//
//	p := harness.NewPair(t, taptest.Config{Seed: 1, Loss: 0.05, Delay: 5 * time.Microsecond})
//	c := p.Connect(harness.ConnOptions{})
//	c.A.PostSend(…)
//	p.RunUntil(func() bool { wcs = append(wcs, c.A.Poll()...); return len(wcs) == n })
//
// Everything happens in the goroutine of the test, so a run with the same seed is
// the same run.
package harness

import (
	"encoding/binary"
	"math"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/wire"
)

// Rows of the GID table of both devices.
const (
	GIDLinkLocal = 0
	GIDv4        = 1
	GIDv6        = 2
)

// QKey is that of all QPs of a datagram service, unless ConnOptions.Attr changes it.
const QKey = 0x11111111

// maxSteps bounds RunUntil: no test needs as many.
const maxSteps = 50_000_000

// Pair is two devices on a link. Dev[0] is at port 0 and has 10.91.0.1 and
// fd91::1, Dev[1] at port 1 has 10.91.0.2 and fd91::2.
type Pair struct {
	T     testing.TB
	Clock *taptest.Clock
	Net   *taptest.Net
	Dev   [2]*provider.Device
	more  []*provider.Device // AddDevice's
	cfg   taptest.Config
	// Limit is the time after which RunUntil gives up, from its start: an hour of
	// virtual time, or two minutes of a live pair's, unless set.
	Limit time.Duration
	// live: the devices have their background goroutines and real time.
	live bool
}

// Addrs are the addresses of device i.
func Addrs(i int) []netip.Prefix {
	return []netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 91, 0, byte(i + 1)}), 24),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x91, 15: byte(i + 1)}), 64),
	}
}

// NewPair opens two devices on a new link and closes them when the test ends. The
// devices have announced themselves; nothing else has happened.
func NewPair(t testing.TB, cfg taptest.Config) *Pair {
	t.Helper()
	return NewPairWith(t, cfg, func(_ int, d tap.Device) tap.Device { return d })
}

// NewPairWith is NewPair with something between the devices and their ports: wrap
// is called for each.
func NewPairWith(t testing.TB, cfg taptest.Config, wrap func(i int, d tap.Device) tap.Device) *Pair {
	t.Helper()
	return NewPairConfig(t, cfg, func(i int, c *provider.Config) { c.Device = wrap(i, c.Device) })
}

// NewPairConfig is NewPair with devices that are opened otherwise than usual: change is
// called for each.
func NewPairConfig(t testing.TB, cfg taptest.Config, change func(i int, c *provider.Config)) *Pair {
	t.Helper()
	cfg = Frames(cfg)
	p := &Pair{T: t, Clock: taptest.NewClock(int64(time.Second)), cfg: cfg, Limit: time.Hour}
	p.Net = taptest.New(p.Clock, cfg)
	for i := range p.Dev {
		p.Net.Port(i)
	}
	for i := range p.Dev {
		c := provider.Config{Device: p.Net.Port(i), MoreQueues: queues(p.Net.Port(i), i), Addrs: Addrs(i), Clock: p.Clock.Now, Manual: true, Idle: p.idle}
		change(i, &c)
		p.open(i, c)
	}
	return p
}

// EnvQueues has devices of pairs have several queues: "2" is how many, "2,1" says so for
// each of the two. After a colon, "qp" for a link that knows which queue a queue pair's packets go to, as
// with the steering program, or "flow" for one that spreads flows; "qp" if nothing is said.
const EnvQueues = "TAPVERBS_TEST_QUEUES"

// EnvFrames has links in memory carry super-frames, "super", where a test does not say so itself, and
// TAPs none, "single". If nothing is said TAPs do and links in memory do not.
const EnvFrames = "TAPVERBS_TEST_FRAMES"

// Super is what a link offers that carries super-frames.
const Super = tap.VnetHdr | tap.USO4 | tap.USO6

// Frames is a link's configuration as EnvFrames wants it.
func Frames(cfg taptest.Config) taptest.Config {
	if os.Getenv(EnvFrames) == "super" && cfg.Offloads == 0 {
		cfg.Offloads = Super
	}
	return cfg
}

func queues(p *taptest.Port, i int) []tap.Device {
	ns, how, _ := strings.Cut(os.Getenv(EnvQueues), ":")
	list := strings.Split(ns, ",")
	n, _ := strconv.Atoi(list[min(i, len(list)-1)])
	if n < 2 {
		return nil
	}
	if how == "flow" {
		return p.Queues(n, ByFlow)
	}
	return p.Queues(n, ByQP(n))
}

// ByQP gives the queue of the shard that a packet's queue pair is in, of n: what the
// steering program does.
func ByQP(n int) func(frame []byte) int {
	return func(frame []byte) int {
		h := wire.RoCE(frame)
		if h == 0 || len(frame) < h+wire.BTHLen {
			return 0
		}
		dest := binary.BigEndian.Uint32(frame[h+4:]) & 0xffffff
		if dest <= uint32(wire.GSIQPN) || dest == uint32(wire.MulticastQPN) {
			return 0
		}
		return int(dest&0xffff) * n >> 16
	}
}

// ByFlow spreads packets by the UDP source port.
func ByFlow(frame []byte) int {
	if h := wire.RoCE(frame); h != 0 {
		return int(binary.BigEndian.Uint16(frame[h-wire.UDPLen:])*31) >> 4 & 0xff
	}
	return len(frame)
}

// AddDevice opens one more device on the link, which makes the cable a hub: the
// first is at port 2 and has 10.91.0.3 and fd91::3. Not for live pairs.
func (p *Pair) AddDevice() *provider.Device {
	p.T.Helper()
	i := len(p.Dev) + len(p.more)
	d, err := provider.Open(provider.Config{
		Device: p.Net.Port(i), MoreQueues: queues(p.Net.Port(i), i), Addrs: Addrs(i), Clock: p.Clock.Now, Manual: true, Idle: p.idle,
	})
	must(p.T, d, err)
	p.more = append(p.more, d)
	p.T.Cleanup(func() {
		if err := d.Close(); err != nil && err != provider.ErrClosed {
			p.T.Errorf("close device %d: %v", i, err)
		}
	})
	return d
}

// idle is what calls that block do meanwhile.
func (p *Pair) idle() {
	if !p.Step() {
		p.T.Fatal("a call waits for something that will never happen: no frame is on its way, no timer runs")
	}
}

// Step makes progress on both devices; when neither has anything to do, it moves
// the clock to what happens next, a frame's arrival or a timer. It is false when
// nothing will ever happen any more.
func (p *Pair) Step() bool {
	if p.live {
		runtime.Gosched()
		return true
	}
	did := false
	for _, devs := range [...][]*provider.Device{p.Dev[:], p.more} {
		for _, d := range devs {
			if d != nil {
				did = d.Progress() || did
			}
		}
	}
	if did {
		return true
	}
	now := p.Clock.Now()
	at := int64(math.MaxInt64)
	for _, devs := range [...][]*provider.Device{p.Dev[:], p.more} {
		for _, d := range devs {
			if d != nil {
				at = min(at, d.NextDeadline())
			}
		}
	}
	if t, ok := p.Net.NextDelivery(); ok {
		at = min(at, t)
	}
	if at == math.MaxInt64 {
		return false
	}
	// A deadline that is due already but led to nothing must not stop the clock.
	p.Clock.AdvanceTo(max(at, now+1))
	return true
}

// RunUntil steps until cond holds. The test fails when it does not within Limit
// of virtual time, or can not any more.
func (p *Pair) RunUntil(cond func() bool) {
	p.T.Helper()
	if p.live {
		for end := time.Now().Add(p.Limit); !cond(); p.Step() {
			if time.Now().After(end) {
				p.T.Fatalf("condition does not hold after %v", p.Limit)
			}
		}
		return
	}
	end := p.Clock.Now() + int64(p.Limit)
	for range maxSteps {
		if cond() {
			return
		}
		if !p.Step() {
			if cond() {
				return
			}
			p.T.Fatal("nothing happens any more, and the condition does not hold")
		}
		if p.Clock.Now() > end {
			p.T.Fatalf("condition does not hold after %v", p.Limit)
		}
	}
	p.T.Fatalf("condition does not hold after %d steps", maxSteps)
}

// settleFrames steps until the devices know whether super-frames get to each other.
func (p *Pair) settleFrames() {
	p.T.Helper()
	if p.live || p.cfg.Offloads&(tap.USO4|tap.USO6) == 0 {
		return
	}
	p.RunUntil(func() bool {
		for _, devs := range [...][]*provider.Device{p.Dev[:], p.more} {
			for _, d := range devs {
				if d != nil && d.Stats().SuperAsking > 0 {
					return false
				}
			}
		}
		return true
	})
}

// Settle steps until nothing is on its way and no timer runs. Not for live pairs.
func (p *Pair) Settle() {
	p.T.Helper()
	for range maxSteps {
		if !p.Step() {
			return
		}
	}
	p.T.Fatal("the pair does not come to rest")
}

// ConnOptions says how to connect two QPs. The zero value is good for most tests.
type ConnOptions struct {
	Type   qp.Type // RC; with TypeXRCSend both sides have a target, too
	GID    int     // row of the GID table on both sides; GIDv4 if 0 and not LinkLocal
	Link   bool    // use GIDLinkLocal
	Caps   qp.Caps // 128 work requests each, 4 elements, 64 bytes inline
	MTU    qp.MTU  // 1024
	PSN    [2]uint32
	Access mr.Access // of QPs and regions; everything
	// Timeout and the others are those of ibv_modify_qp(3): 8 (about 1 ms), 7, 7, 1
	// (10 µs), 16. Those that are 0 on purpose are set by Attr.
	Timeout, RetryCnt, RNRRetry, MinRNRTimer, RdAtomic uint8
	// Attr may change the attributes of side i before it is used.
	Attr func(i int, a *provider.QPAttr)
	// Mem is how many bytes each side has registered; 1 MiB.
	Mem    int
	SigAll bool
	// SRQ makes side B receive from an SRQ.
	SRQ bool
	// Channel gives each side a completion channel.
	Channel bool
	CQE     int // 1024
	// Self connects two QPs of device 0 with each other.
	Self bool
}

// End is one side of a connection with what belongs to it.
type End struct {
	t   testing.TB
	Dev *provider.Device
	PD  *provider.PD
	CQ  *provider.CQ
	Ch  *provider.CompChannel
	SRQ *provider.SRQ
	QP  *provider.QP
	MR  *provider.MR
	// AH is the way to the other side, of a datagram service.
	AH *provider.AH
	// Target is what an XRC initiator of the other side sends to, and XRCD its domain;
	// SRQN is the other side's SRQ.
	Target *provider.QP
	XRCD   *provider.XRCD
	SRQN   uint32
	// Mem is the registered memory, Addr its address and iova.
	Mem  []byte
	Addr uint64
	wcs  []qp.WC
}

// Conn is a pair of connected QPs in state RTS.
type Conn struct {
	*Pair
	A, B *End
	opt  ConnOptions
}

func (o *ConnOptions) defaults() {
	def := func(v *uint8, d uint8) {
		if *v == 0 {
			*v = d
		}
	}
	if o.Type == 0 {
		o.Type = qp.TypeRC
	}
	if o.GID == 0 && !o.Link {
		o.GID = GIDv4
	}
	if o.Caps == (qp.Caps{}) {
		o.Caps = qp.Caps{SendWR: 128, RecvWR: 128, SendSGE: 4, RecvSGE: 4, Inline: 64}
	}
	if o.MTU == 0 {
		o.MTU = qp.MTU1024
	}
	if o.Access == 0 {
		o.Access = mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead | mr.RemoteAtomic | mr.FlushGlobal
	}
	def(&o.Timeout, 8)
	def(&o.RetryCnt, 7)
	def(&o.RNRRetry, 7)
	def(&o.MinRNRTimer, 1)
	def(&o.RdAtomic, 16)
	if o.Mem == 0 {
		o.Mem = 1 << 20
	}
	if o.CQE == 0 {
		o.CQE = 1024
	}
}

// must ends the test on an error.
func must[T any](t testing.TB, v T, err error) T {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// NewEnd makes all that one side of a connection needs, on any device.
func NewEnd(t testing.TB, d *provider.Device, o ConnOptions) *End {
	t.Helper()
	o.defaults()
	e := &End{t: t, Dev: d, wcs: make([]qp.WC, 64)}
	e.PD = must(t, e.pd(), nil)
	if o.Channel {
		ch, err := d.CreateCompChannel()
		e.Ch = must(t, ch, err)
	}
	cq, err := d.CreateCQ(o.CQE, e.Ch)
	e.CQ = must(t, cq, err)
	mem, err := mr.Alloc((o.Mem + os.Getpagesize() - 1) &^ (os.Getpagesize() - 1))
	must(t, mem, err)
	t.Cleanup(func() {
		// The region goes with the device at the latest; the memory after it.
		if err := e.MR.Dereg(); err != nil && err != provider.ErrClosed {
			t.Errorf("deregister: %v", err)
		}
		if err := mem.Close(); err != nil {
			t.Errorf("free memory: %v", err)
		}
	})
	e.Mem = mem.Bytes()[:o.Mem]
	e.Addr = uint64(mem.Addr())
	reg, err := e.PD.RegMR(e.Mem, o.Access)
	e.MR = must(t, reg, err)
	in := provider.QPInitAttr{Type: o.Type, SendCQ: e.CQ, RecvCQ: e.CQ, Caps: o.Caps, SQSigAll: o.SigAll}
	if o.Type == qp.TypeXRCSend {
		x, err := d.OpenXRCD(provider.XRCDAttr{FD: -1, Create: true})
		e.XRCD = must(t, x, err)
		srq, err := e.PD.CreateXRCSRQ(provider.SRQAttr{MaxWR: o.Caps.RecvWR, MaxSGE: o.Caps.RecvSGE}, x, e.CQ)
		e.SRQ = must(t, srq, err)
		q, err := x.CreateQP(provider.QPInitAttr{Type: qp.TypeXRCRecv})
		e.Target = must(t, q, err)
	}
	if o.SRQ {
		srq, err := e.PD.CreateSRQ(provider.SRQAttr{MaxWR: o.Caps.RecvWR, MaxSGE: o.Caps.RecvSGE})
		in.SRQ = must(t, srq, err)
		e.SRQ = in.SRQ
	}
	q, err := e.PD.CreateQP(in)
	e.QP = must(t, q, err)
	return e
}

func (e *End) pd() *provider.PD {
	pd, err := e.Dev.AllocPD()
	return must(e.t, pd, err)
}

// Attrs are the attributes that side i of a connection to peer is brought up
// with, together for all transitions.
func (o ConnOptions) Attrs(i int, peer *End) provider.QPAttr {
	o.defaults()
	gid, err := peer.Dev.QueryGID(o.GID)
	must(peer.t, gid, err)
	a := provider.QPAttr{
		Attr: qp.Attr{
			PathMTU: o.MTU, RQPSN: psn(o.PSN[1-i]), SQPSN: psn(o.PSN[i]), DestQPN: peer.QP.Num(), Access: o.Access, Port: 1,
			MaxRdAtomic: o.RdAtomic, MaxDestRdAtomic: o.RdAtomic, MinRNRTimer: o.MinRNRTimer,
			Timeout: o.Timeout, RetryCnt: o.RetryCnt, RNRRetry: o.RNRRetry, QKey: QKey,
		},
		AH: provider.AHAttr{DGID: gid, SGIDIndex: o.GID, PortNum: 1},
	}
	if o.Attr != nil {
		o.Attr(i, &a)
	}
	return a
}

// Masks of the transitions of an RC QP with exactly what each requires.
const (
	MaskInit = qp.AttrState | qp.AttrPKeyIndex | qp.AttrPort | qp.AttrAccess
	MaskRTR  = qp.AttrState | qp.AttrAV | qp.AttrPathMTU | qp.AttrDestQPN | qp.AttrRQPSN | qp.AttrMaxDestRdAtomic | qp.AttrMinRNRTimer
	MaskRTS  = qp.AttrState | qp.AttrTimeout | qp.AttrRetryCnt | qp.AttrRNRRetry | qp.AttrSQPSN | qp.AttrMaxRdAtomic
)

// masks are those of the transitions to INIT, RTR and RTS.
func masks(t qp.Type) [3]qp.AttrMask {
	switch t {
	case qp.TypeUC:
		return [3]qp.AttrMask{MaskInit, qp.AttrState | qp.AttrAV | qp.AttrPathMTU | qp.AttrDestQPN | qp.AttrRQPSN, qp.AttrState | qp.AttrSQPSN}
	case qp.TypeXRCSend:
		return [3]qp.AttrMask{MaskInit, qp.AttrState | qp.AttrAV | qp.AttrPathMTU | qp.AttrDestQPN | qp.AttrRQPSN, MaskRTS}
	case qp.TypeXRCRecv:
		return [3]qp.AttrMask{MaskInit, MaskRTR, qp.AttrState | qp.AttrTimeout | qp.AttrSQPSN}
	case qp.TypeUD:
		return [3]qp.AttrMask{qp.AttrState | qp.AttrPKeyIndex | qp.AttrPort | qp.AttrQKey, qp.AttrState, qp.AttrState | qp.AttrSQPSN}
	}
	return [3]qp.AttrMask{MaskInit, MaskRTR, MaskRTS}
}

// Up brings a QP from RESET to a state: INIT, RTR or RTS.
func Up(q *provider.QP, a provider.QPAttr, to qp.State) error {
	m := masks(q.Type())
	for _, s := range []struct {
		st   qp.State
		mask qp.AttrMask
	}{{qp.StateInit, m[0]}, {qp.StateRTR, m[1]}, {qp.StateRTS, m[2]}} {
		if s.st > to {
			break
		}
		a.State = s.st
		if err := q.Modify(a, s.mask); err != nil {
			return err
		}
	}
	return nil
}

// Connect makes two QPs and connects them. The link has no faults meanwhile, so
// that the neighbours find each other.
func (p *Pair) Connect(o ConnOptions) *Conn {
	p.T.Helper()
	b := p.Dev[1]
	if o.Self {
		b = p.Dev[0]
	}
	return p.ConnectDevs(p.Dev[0], b, o)
}

// ConnectDevs is Connect for any two devices of the link: a has side A.
func (p *Pair) ConnectDevs(a, b *provider.Device, o ConnOptions) *Conn {
	p.T.Helper()
	if p.Net != nil {
		p.Net.SetFaults(0, 0, 0, 0)
	}
	ao := o
	ao.SRQ = false
	c := &Conn{Pair: p, A: NewEnd(p.T, a, ao), B: NewEnd(p.T, b, o), opt: o}
	if o.Type == qp.TypeXRCSend {
		n, err := c.B.SRQ.Num()
		c.A.SRQN = must(p.T, n, err)
		n, err = c.A.SRQ.Num()
		c.B.SRQN = must(p.T, n, err)
	}
	c.Bring(qp.StateRTS)
	p.settleFrames()
	if p.Net != nil {
		p.Net.SetFaults(p.cfg.Loss, p.cfg.Dup, p.cfg.Reorder, p.cfg.Corrupt)
	}
	return c
}

// Bring takes both QPs from RESET to a state.
func (c *Conn) Bring(to qp.State) {
	c.T.Helper()
	for i, e := range []*End{c.A, c.B} {
		peer := []*End{c.B, c.A}[i]
		a := c.opt.Attrs(i, peer)
		if e.Target != nil {
			if err := Up(e.Target, a, to); err != nil {
				c.T.Fatal(err)
			}
			a.DestQPN = peer.Target.Num()
		}
		if err := Up(e.QP, a, to); err != nil {
			c.T.Fatal(err)
		}
	}
	if c.opt.Type == qp.TypeUD {
		c.opt.Handle(c.A, c.B)
		c.opt.Handle(c.B, c.A)
	}
}

// Handle makes from's address handle to another end, as the options say.
func (o ConnOptions) Handle(from, to *End) {
	o.defaults()
	ah, err := from.PD.CreateAH(o.Attrs(0, to).AH)
	from.AH = must(from.t, ah, err)
}
