// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/internal/twin"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/wire"
)

// Two processes on a fabric of their own: the owner has the region that is measured,
// the peer reads and writes it and takes the times. The peer says over TCP what the
// owner shall do, and both spin while a measurement runs.

const (
	// ackTimeout is the queue pairs' local ACK timeout, 4.096 µs * 2^16 = 268 ms (IBA
	// 9.7.6.1.3): a process that has no processor for a moment is not to count as loss.
	// lossTimeout, 17 ms, is that where frames are lost.
	ackTimeout  = 16
	lossTimeout = 12
	sendDepth   = 64
	// peerMem is the peer's own memory in bytes: what it writes, and where READs land.
	peerMem = 4 << 20
)

// order is what the peer tells the owner to do; which fields count follows from Do.
type order struct {
	Do string

	End     end     // connect
	Timeout uint8   // connect
	Loss    float64 // loss: of frames
	Packets float64 // loss: of packets
	Bytes   uint64  // region
	Budget  uint64  // region; 0: none
	Policy  string  // region
	State   string  // state: of the pages of the range
	Off, N  uint64  // state; N of receive, too
	Ends    []end   // many
}

// end is where a queue pair is.
type end struct {
	QPN wire.QPN
	PSN wire.PSN
	GID []byte
}

// answer is the owner's.
type answer struct {
	Err  string
	End  end
	Addr uint64
	Key  mr.Key
	Use  use
	Ends []end
	RSS  int64         // many: bytes that came on top
	CPU  time.Duration // cpu: that this process took so far
}

// machine is one process's device and queue pair.
type machine struct {
	dev     *provider.Device
	lossy   *taptest.Lossy
	packets *packetLoss
	pd      *provider.PD
	cq      *provider.CQ
	qp      *provider.QP
	many    []*provider.QP
	psn     wire.PSN
	wcs     [sendDepth]qp.WC
}

func openMachine(port string, addrs []netip.Prefix) (*machine, error) {
	var cfg provider.Config
	err := cfg.SetFrames(os.Getenv(provider.EnvFrames))
	if err != nil {
		return nil, err
	}
	raw, err := tap.Open(tap.Config{Name: port, Plain: cfg.Plain, Without: cfg.Without})
	if err != nil {
		return nil, err
	}
	packets := &packetLoss{Device: raw}
	m := &machine{packets: packets, lossy: taptest.NewLossy(packets, taptest.Config{Seed: 1}), psn: wire.PSN(rand.Uint32() & wire.PSNMask)}
	if m.dev, err = provider.Open(provider.Config{Device: m.lossy, Addrs: addrs}); err != nil {
		return nil, err
	}
	if err := m.dev.Space().UserFault(); err != nil {
		return nil, err
	}
	if m.pd, err = m.dev.AllocPD(); err != nil {
		return nil, err
	}
	if m.cq, err = m.dev.CreateCQ(2*sendDepth, nil); err != nil {
		return nil, err
	}
	return m, m.newQP()
}

// newQP makes the queue pair, anew if there was one.
func (m *machine) newQP() (err error) {
	if m.qp != nil {
		if err := m.qp.Destroy(); err != nil {
			return err
		}
	}
	m.qp, err = m.pd.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: m.cq, RecvCQ: m.cq,
		Caps: qp.Caps{SendWR: sendDepth, RecvWR: sendDepth, SendSGE: 1, RecvSGE: 1}})
	return err
}

func (m *machine) end() (end, error) {
	gid, err := m.dev.QueryGID(1)
	return end{m.qp.Num(), m.psn, gid[:]}, err
}

// connect brings the queue pair to RTS.
func (m *machine) connect(to end, timeout uint8) error { return m.bring(m.qp, to, timeout) }

func (m *machine) bring(q *provider.QP, to end, timeout uint8) error {
	if len(to.GID) != 16 {
		return errors.New("a GID has 16 bytes")
	}
	steps := [...]struct {
		a    provider.QPAttr
		mask qp.AttrMask
	}{
		{provider.QPAttr{Attr: qp.Attr{State: qp.StateInit, Port: 1, Access: allRights}},
			qp.AttrState | qp.AttrPKeyIndex | qp.AttrPort | qp.AttrAccess},
		{provider.QPAttr{Attr: qp.Attr{State: qp.StateRTR, PathMTU: qp.MTU4096, DestQPN: to.QPN, RQPSN: to.PSN, MaxDestRdAtomic: 16, MinRNRTimer: 1},
			AH: provider.AHAttr{DGID: [16]byte(to.GID), SGIDIndex: 1, PortNum: 1}},
			qp.AttrState | qp.AttrAV | qp.AttrPathMTU | qp.AttrDestQPN | qp.AttrRQPSN | qp.AttrMaxDestRdAtomic | qp.AttrMinRNRTimer},
		{provider.QPAttr{Attr: qp.Attr{State: qp.StateRTS, Timeout: timeout, RetryCnt: 7, RNRRetry: 7, SQPSN: m.psn, MaxRdAtomic: 16}},
			qp.AttrState | qp.AttrTimeout | qp.AttrRetryCnt | qp.AttrRNRRetry | qp.AttrSQPSN | qp.AttrMaxRdAtomic},
	}
	for _, s := range steps {
		if err := q.Modify(s.a, s.mask); err != nil {
			return err
		}
	}
	return nil
}

// partEnv names the part that is measured, and how often.
const partEnv = "TAPVERBS_BENCH_PART"

// pairMain is the second generation, the fabric, and the third, the two processes.
func pairMain() error {
	if !twin.Child() {
		return twin.Run(context.Background(), [2]string{"owner", "peer"}, func(i int, p fabric.Port, addr string) []string {
			return []string{"memory", p.Name, p.V4.String(), fmt.Sprint(i), addr}
		})
	}
	if len(os.Args) != 6 {
		return errors.New(memoryUsage)
	}
	addr, err := netip.ParsePrefix(os.Args[3])
	if err != nil {
		return err
	}
	m, err := openMachine(os.Args[2], []netip.Prefix{addr})
	if err != nil {
		return err
	}
	defer m.dev.Close()
	if os.Args[4] == "0" {
		l, err := net.FileListener(os.NewFile(twin.ListenFD, "listener"))
		if err != nil {
			return err
		}
		return (&owner{machine: m}).serve(l)
	}
	var part string
	var runs int
	if _, err := fmt.Sscan(os.Getenv(partEnv), &part, &runs); err != nil {
		return err
	}
	return measurePair(m, os.Args[5], part, runs)
}

// owner is the process with the region.
type owner struct {
	*machine
	mem   *mr.Memory
	reg   *provider.MR
	was   use       // when the region began
	again qp.RecvWR // what receives are posted with
}

// serve does what the peer says until it hangs up. Between the orders it polls its
// completion queue, which is how the engine gets a processor at once.
func (o *owner) serve(l net.Listener) error {
	conn, err := l.Accept()
	if err != nil {
		return err
	}
	orders := make(chan order)
	go func() {
		defer close(orders)
		for dec := json.NewDecoder(conn); ; {
			var r order
			if dec.Decode(&r) != nil {
				return // no more orders
			}
			orders <- r
		}
	}()
	for enc := json.NewEncoder(conn); ; {
		select {
		case r, ok := <-orders:
			if !ok {
				return nil
			}
			var a answer
			if err := o.do(&r, &a); err != nil {
				a.Err = twin.OneLine(err)
			}
			if err := enc.Encode(a); err != nil {
				return err
			}
		default:
			if err := o.taken(o.wcs[:o.cq.Poll(o.wcs[:])]); err != nil {
				return err
			}
		}
	}
}

func (o *owner) do(r *order, a *answer) (err error) {
	switch r.Do {
	case "connect":
		if err := o.newQP(); err != nil {
			return err
		}
		if a.End, err = o.end(); err != nil {
			return err
		}
		return o.connect(r.End, r.Timeout)
	case "loss":
		o.lossy.SetFaults(r.Loss, 0, 0, 0)
		o.packets.set(r.Packets)
		return nil
	case "many":
		return o.manyQPs(r, a)
	case "cpu":
		a.CPU, err = processorTime()
		return err
	case "region":
		if err := o.region(r); err != nil {
			return err
		}
		a.Addr, a.Key = uint64(o.mem.Addr()), o.reg.RKey()
		return nil
	case "state":
		return o.state(r.State, r.Off, r.N)
	case "receive":
		return o.receive(r.N)
	case "use":
		a.Use, err = usage(o.reg)
		a.Use = a.Use.since(o.was)
		return err
	}
	return fmt.Errorf("unknown order %q", r.Do)
}

// manyQPs makes and connects as many queue pairs as the peer has, in the place of those before.
func (o *owner) manyQPs(r *order, a *answer) error {
	if err := o.endMany(); err != nil {
		return err
	}
	before, err := resident()
	if err != nil {
		return err
	}
	if a.Ends, err = o.makeMany(len(r.Ends)); err != nil {
		return err
	}
	if err := o.bringMany(r.Ends); err != nil {
		return err
	}
	after, err := resident()
	a.RSS = after - before
	return err
}

// region makes a region of memory never touched in the place of the one before.
func (o *owner) region(r *order) error {
	if o.reg != nil {
		if err := errors.Join(o.reg.Dereg(), o.mem.Close()); err != nil {
			return err
		}
	}
	var err error
	if o.mem, err = mr.Alloc(int(r.Bytes)); err != nil {
		return err
	}
	if o.reg, err = o.pd.RegMR(o.mem.Bytes(), allRights); err != nil {
		return err
	}
	if o.was, err = usage(o.reg); err != nil {
		return err
	}
	return prepare(o.reg, r.Budget, r.Policy)
}

// peer is the process that measures.
type peer struct {
	*machine
	conn net.Conn
	in   *bufio.Reader
	mem  *mr.Memory
	reg  *provider.MR
	// remote is the owner's region.
	remote answer
	next   uint64 // work request
}

func newPeer(m *machine, to string) (*peer, error) {
	conn, err := net.Dial("tcp", to)
	if err != nil {
		return nil, err
	}
	p := &peer{machine: m, conn: conn, in: bufio.NewReader(conn)}
	if p.mem, err = mr.Alloc(peerMem); err != nil {
		return nil, err
	}
	for i := range p.mem.Bytes() {
		p.mem.Bytes()[i] = byte(i>>3) ^ byte(i>>11) // touched, and not easily compressed away
	}
	if p.reg, err = m.pd.RegMR(p.mem.Bytes(), mr.LocalWrite); err != nil {
		return nil, err
	}
	return p, p.join(ackTimeout)
}

// tell has the owner do something.
func (p *peer) tell(o order) (a answer, err error) {
	b, err := json.Marshal(o)
	if err != nil {
		return a, err
	}
	if _, err := p.conn.Write(append(b, '\n')); err != nil {
		return a, err
	}
	line, err := p.in.ReadBytes('\n')
	if err != nil {
		if err == io.EOF {
			err = errors.New("the owner has gone")
		}
		return a, err
	}
	if err := json.Unmarshal(line, &a); err != nil {
		return a, err
	}
	if a.Err != "" {
		return a, fmt.Errorf("the owner, at %q: %s", o.Do, a.Err)
	}
	return a, nil
}

// join connects new queue pairs of both ends.
func (p *peer) join(timeout uint8) error {
	if err := p.newQP(); err != nil {
		return err
	}
	e, err := p.end()
	if err != nil {
		return err
	}
	a, err := p.tell(order{Do: "connect", End: e, Timeout: timeout})
	if err != nil {
		return err
	}
	return p.connect(a.End, timeout)
}

// region has the owner make one.
func (p *peer) region(o order) (err error) {
	o.Do = "region"
	p.remote, err = p.tell(o)
	return err
}

// faults sets the loss of frames in both directions.
func (p *peer) faults(loss float64) error { return p.lose(loss, 0) }

// lose is faults, of frames, super-frames among them, and of the packets that frames hold.
func (p *peer) lose(frames, packets float64) error {
	p.lossy.SetFaults(frames, 0, 0, 0)
	p.packets.set(packets)
	_, err := p.tell(order{Do: "loss", Loss: frames, Packets: packets})
	return err
}

// post posts a READ or WRITE of n bytes at off of the owner's region.
func (p *peer) post(op qp.WROpcode, off uint64, n int) error {
	p.next++
	wr := [1]qp.SendWR{{ID: p.next, Opcode: op, Flags: qp.SendSignaled,
		SGL: []qp.SGE{{Addr: uint64(p.mem.Addr()), Length: uint32(n), LKey: p.reg.LKey()}}, RemoteAddr: p.remote.Addr + off, RKey: p.remote.Key}}
	_, err := p.qp.PostSend(wr[:])
	return err
}

// stuck is how long a completion may stay away.
const stuck = 30 * time.Second

// take waits for completions and gives how many there are, and the first bad status.
func (p *peer) take() (n int, bad error) {
	var since time.Time
	for spins := 1; ; spins++ {
		if n = p.cq.Poll(p.wcs[:]); n > 0 {
			break
		}
		if spins%4096 == 0 {
			switch now := time.Now(); {
			case since.IsZero():
				since = now
			case now.Sub(since) > stuck:
				return 0, fmt.Errorf("no completion for %v", stuck)
			}
		}
	}
	for _, wc := range p.wcs[:n] {
		if wc.Status != qp.WCSuccess {
			return n, badStatus(wc.Status)
		}
	}
	return n, nil
}

// badStatus is the status of a work request that failed.
type badStatus qp.WCStatus

func (s badStatus) Error() string { return "a work request completed with: " + qp.WCStatus(s).String() }

// once does one READ or WRITE and gives the time from posting to completion.
func (p *peer) once(op qp.WROpcode, off uint64, n int) (time.Duration, error) {
	t := time.Now()
	if err := p.post(op, off, n); err != nil {
		return 0, err
	}
	_, err := p.take()
	return time.Since(t), err
}
