// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

const (
	// ackTimeout is the QPs' local ACK timeout: 4.096 µs * 2^16 = 268 ms (IBA
	// 9.7.6.1.3). Times retryCount+1 it is 2.1 s until a silent peer is an error.
	ackTimeout = 16
	retryCount = 7
	rnrRetry   = 7  // for ever: the heartbeats tell when the peer is gone
	minRNR     = 12 // 0.64 ms, as ibv_rc_pingpong has it (IBA table 45)
	readsAhead = 16 // READs and atomics in flight per QP
	// silent is how long nothing may come from a peer whose heartbeats do: it may have all
	// of a round to bring back from a slow disk, in order to verify it.
	silent = 2 * time.Minute
	// maxBatch is how many work requests are posted in one list.
	maxBatch = 16
	// maxInline is the bytes that the flag word behind a cold WRITE needs.
	maxInline = 8
)

// connAttr is how a QP is connected beyond where the peer is.
type connAttr struct {
	mtu          qp.MTU
	reads        uint8 // READs and atomics in flight
	gidIndex     int
	mine, theirs wire.PSN
	peer         wire.QPN
	gid          provider.GID
}

// endpoint is one end: the device and what the tests use of it.
type endpoint struct {
	ctx  context.Context // its cause says why the run ends early
	dev  *provider.Device
	pd   *provider.PD
	ch   *provider.CompChannel // nil: poll
	cq   *provider.CQ          // of the data QPs
	qps  []*dataQP
	gid  int
	peer provider.GID

	pat  pattern
	src  *buffer // holds the pattern
	flag *buffer // one page: the word that the peer's cold WRITEs set

	received int // receive completions since the round began
	stall    time.Duration
	// onRecv looks at a receive completion; nil: none is expected.
	onRecv func(wc *qp.WC) error

	wcs  [64]qp.WC
	wrs  [maxBatch]qp.SendWR
	sges [maxBatch][1]qp.SGE
	rwrs [maxBatch]qp.RecvWR
	rsge [maxBatch][1]qp.SGE
	word [8]byte // inline payload of the flag WRITE
}

// dataQP is a queue pair with a count of what is in flight.
type dataQP struct {
	*provider.QP
	index int
	psn   wire.PSN
	// sent and done count work requests, modulo 2^32; those between are in flight.
	sent, done uint32
}

// buffer is registered memory.
type buffer struct {
	mem *mr.Memory
	reg *provider.MR
}

// newBuffer allocates and registers n bytes. With touch they are written first, so
// that all are resident.
func newBuffer(pd *provider.PD, n int, access mr.Access, pin, touch bool) (*buffer, error) {
	mem, err := mr.Alloc(n)
	if err != nil {
		return nil, fmt.Errorf("allocating %s: %w", sizeString(n), err)
	}
	if touch {
		b := mem.Bytes()
		for i := 0; i < len(b); i += pageSize {
			b[i] = 0xa5
		}
	}
	reg, err := pd.Register(provider.MRAttr{Addr: mem.Addr(), Length: uint64(n), Access: access, Pin: pin})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("registering %s: %w", sizeString(n), err), mem.Close())
	}
	return &buffer{mem, reg}, nil
}

func (b *buffer) bytes() []byte { return b.mem.Bytes() }

// remote names the buffer's byte n for the peer.
func (b *buffer) remote(n int) remote {
	return remote{Addr: uint64(b.mem.Addr()) + uint64(n), Key: b.reg.RKey()}
}

// openEndpoint opens the device. The caller closes the endpoint.
func openEndpoint(ctx context.Context, o *options, space *mr.Space) (*endpoint, error) {
	monitor, err := provider.MonitorFromEnv(os.Getenv)
	if err != nil {
		return nil, err
	}
	cfg := provider.Config{Port: o.port, Addrs: o.addrs, Gateway: o.gateways, Queues: o.queues, Space: space, Monitor: monitor}
	if err := cfg.SetFrames(o.frames); err != nil {
		return nil, err
	}
	dev, err := provider.Open(cfg)
	if err != nil {
		return nil, err
	}
	e := &endpoint{ctx: ctx, dev: dev, gid: o.gid, stall: silent}
	for i := range e.wrs {
		e.wrs[i].SGL = e.sges[i][:]
		e.rwrs[i].SGL = e.rsge[i][:]
	}
	if e.pd, err = dev.AllocPD(); err != nil {
		return nil, errors.Join(err, dev.Close())
	}
	if o.events {
		if e.ch, err = dev.CreateCompChannel(); err != nil {
			return nil, errors.Join(err, dev.Close())
		}
	}
	return e, nil
}

// close closes the device with all that was made of it, then gives memory back.
func (e *endpoint) close() error {
	err := e.dev.Close()
	for _, b := range []*buffer{e.src, e.flag} {
		if b != nil {
			err = errors.Join(err, b.mem.Close())
		}
	}
	return err
}

// makeBuffers makes the pattern for messages of up to size bytes and the flag.
func (e *endpoint) makeBuffers(size int, seed uint64) error {
	var err error
	const access = mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead
	if e.src, err = newBuffer(e.pd, patternLen(size), access, false, true); err != nil {
		return err
	}
	e.pat = newPattern(e.src.bytes(), seed)
	e.flag, err = newBuffer(e.pd, pageSize, access, false, true)
	if err == nil {
		clear(e.flag.bytes())
	}
	return err
}

// makeQPs makes n data QPs and their CQ.
func (e *endpoint) makeQPs(n, depth int) error {
	lim := e.dev.Query()
	sendWR := max(depth, 2)
	recvWR := roundMessages/n + 1
	if sendWR > lim.MaxQPWR || recvWR > lim.MaxQPWR {
		return fmt.Errorf("-depth %d: the device takes %d work requests per queue", depth, lim.MaxQPWR)
	}
	var err error
	if e.cq, err = e.dev.CreateCQ(n*(sendWR+recvWR), e.ch); err != nil {
		return fmt.Errorf("creating a CQ for %d QPs of depth %d: %w", n, depth, err)
	}
	for i := range n {
		q, err := e.createQP(e.cq, sendWR, recvWR)
		if err != nil {
			return fmt.Errorf("creating QP %d of %d: %w", i+1, n, err)
		}
		e.qps = append(e.qps, &dataQP{QP: q, index: i, psn: newPSN()})
	}
	return nil
}

func (e *endpoint) createQP(cq *provider.CQ, sendWR, recvWR int) (*provider.QP, error) {
	return e.pd.CreateQP(provider.QPInitAttr{
		Type: qp.TypeRC, SendCQ: cq, RecvCQ: cq,
		Caps: qp.Caps{SendWR: sendWR, RecvWR: recvWR, SendSGE: 1, RecvSGE: 1, Inline: maxInline},
	})
}

// newPSN chooses a first PSN, as random as the next (IBA 9.7.1 leaves it open).
func newPSN() wire.PSN { return wire.PSN(rand.Uint32() & wire.PSNMask) }

// initQP brings a QP to INIT, where receives may be posted.
func initQP(q *provider.QP, access mr.Access) error {
	err := q.Modify(provider.QPAttr{Attr: qp.Attr{State: qp.StateInit, Port: 1, Access: access}},
		qp.AttrState|qp.AttrPKeyIndex|qp.AttrPort|qp.AttrAccess)
	if err != nil {
		return fmt.Errorf("bringing the QP to INIT: %w", err)
	}
	return nil
}

// connectQP brings a QP from INIT to RTS.
func connectQP(q *provider.QP, c connAttr) error {
	err := q.Modify(provider.QPAttr{
		Attr: qp.Attr{
			State: qp.StateRTR, PathMTU: c.mtu, DestQPN: c.peer, RQPSN: c.theirs,
			MaxDestRdAtomic: c.reads, MinRNRTimer: minRNR,
		},
		AH: provider.AHAttr{DGID: c.gid, SGIDIndex: c.gidIndex, HopLimit: 64},
	}, qp.AttrState|qp.AttrAV|qp.AttrPathMTU|qp.AttrDestQPN|qp.AttrRQPSN|qp.AttrMaxDestRdAtomic|qp.AttrMinRNRTimer)
	if err != nil {
		return fmt.Errorf("connecting to %s: %w", c.gid, err)
	}
	err = q.Modify(provider.QPAttr{Attr: qp.Attr{
		State: qp.StateRTS, Timeout: ackTimeout, RetryCnt: retryCount, RNRRetry: rnrRetry, SQPSN: c.mine, MaxRdAtomic: c.reads,
	}}, qp.AttrState|qp.AttrTimeout|qp.AttrRetryCnt|qp.AttrRNRRetry|qp.AttrSQPSN|qp.AttrMaxRdAtomic)
	if err != nil {
		return fmt.Errorf("bringing the QP to RTS: %w", err)
	}
	return nil
}

// connectAll connects the data QPs to the peer's.
func (e *endpoint) connectAll(peers []peerQP, mtu qp.MTU) error {
	if len(peers) != len(e.qps) {
		return errPeer{fmt.Sprintf("the peer made %d QPs instead of %d", len(peers), len(e.qps))}
	}
	if active := e.dev.QueryPort().ActiveMTU; mtu > active {
		return fmt.Errorf("-mtu %d: port %s carries %d at most", mtu.Bytes(), e.dev.Name(), active.Bytes())
	}
	const access = mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead | mr.RemoteAtomic
	for i, q := range e.qps {
		if err := initQP(q.QP, access); err != nil {
			return err
		}
		err := connectQP(q.QP, connAttr{
			mtu: mtu, reads: readsAhead, gidIndex: e.gid, mine: q.psn,
			theirs: peers[i].PSN, peer: peers[i].QPN, gid: e.peer,
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// ends lists the data QPs for the peer.
func (e *endpoint) ends() []peerQP {
	var out []peerQP
	for _, q := range e.qps {
		out = append(out, peerQP{QPN: q.Num(), PSN: q.psn})
	}
	return out
}
