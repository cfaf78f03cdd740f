// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/tapverbs/tapverbs/internal/stats"
	"github.com/tapverbs/tapverbs/qp"
)

// With ibv_rc_pingpong at the other end there is one QP, that of the exchange, and
// one kind of message: -iters SENDs of -size bytes each way, the client's first.
//
// That program sends from the buffer it receives into. So as a server it sends
// back what the client sent, and as a client it sends what the server sent last;
// its first message is its buffer as it was filled, which nobody can verify.

const (
	foreignIters = 1000 // ibv_rc_pingpong -n
	foreignSize  = 4096 // ibv_rc_pingpong -s
	foreignMTU   = qp.MTU1024
	foreignRecvs = 64 // receives posted at most
	// foreignStall is how long nothing may come before the peer counts as dead.
	foreignStall = 4 * time.Second
	// foreignLinger is how long the device stays after the last message, for the
	// case that the peer did not get its ACK: the ACK timeout of ibv_rc_pingpong
	// (4.096 µs * 2^14 = 67 ms), twice and some.
	foreignLinger = 150 * time.Millisecond
)

// foreign is a run against ibv_rc_pingpong.
type foreign struct {
	e      *endpoint
	ctl    *control
	client bool
	iters  int
	land   *landing
	times  *stats.Latency

	sent, done, got int
	bad             string
	start, last     time.Time
}

// foreignDefaults puts ibv_rc_pingpong's defaults where the command line says
// nothing.
func foreignDefaults(p plan, sizeGiven, mtuGiven bool) (plan, error) {
	if !sizeGiven {
		p.Sizes = []int{foreignSize}
	}
	if !mtuGiven {
		p.MTU = foreignMTU
	}
	if p.Iters == 0 {
		p.Iters = foreignIters
	}
	if len(p.Sizes) != 1 || p.QPs != 1 {
		return p, errors.New("the peer is ibv_rc_pingpong: it takes one -size and one -qp")
	}
	return p, nil
}

// newForeign gets memory and posts receives; the QP is not connected yet.
func newForeign(e *endpoint, ctl *control, p plan, client bool) (*foreign, error) {
	size := p.Sizes[0]
	if err := e.makeBuffers(size, p.Seed); err != nil {
		return nil, err
	}
	e.stall = foreignStall
	f := &foreign{e: e, ctl: ctl, client: client, iters: p.Iters, times: stats.NewLatency()}
	s := slots(rowSpec{opSend, memResident, size}, phaseLatency, 0)
	s.Slots = min(max(s.Slots, 2), foreignRecvs)
	var err error
	if f.land, err = newLanding(e.pd, &p, rowSpec{opSend, memResident, size}, s); err != nil {
		return nil, err
	}
	for i := range s.Slots {
		if err := f.postRecv(uint64(i)); err != nil {
			return nil, err
		}
	}
	return f, nil
}

func (f *foreign) postRecv(n uint64) error {
	wr := &f.e.rwrs[0]
	wr.ID, wr.SGL = recvBit|n, f.e.rsge[0][:]
	wr.SGL[0] = f.land.sge(int(n) % f.land.slots.Slots)
	_, err := f.ctl.q.PostRecv(f.e.rwrs[:1])
	return err
}

// postSend sends our message number f.sent.
func (f *foreign) postSend() error {
	off := f.e.pat.offset(datum(uint64(f.sent), !f.client))
	sge := qp.SGE{Addr: uint64(f.e.src.mem.Addr()) + uint64(off), Length: uint32(f.land.row.Size), LKey: f.e.src.reg.LKey()}
	wr := &f.e.wrs[0]
	*wr = qp.SendWR{ID: uint64(f.sent), Opcode: qp.WRSend, Flags: qp.SendSignaled, SGL: f.e.sges[0][:]}
	wr.SGL[0] = sge
	f.sent++
	_, err := f.ctl.q.PostSend(f.e.wrs[:1])
	return err
}

// run plays all messages. Like ibv_rc_pingpong, an end sends its next one when its
// last was acknowledged and the peer's came.
func (f *foreign) run() error {
	f.start = time.Now()
	f.last = f.start
	if f.client {
		if err := f.postSend(); err != nil {
			return err
		}
	}
	for f.got < f.iters || f.done < f.iters {
		wcs, err := f.e.take(f.ctl.cq)
		if err != nil {
			return err
		}
		for i := range wcs {
			if err := f.completion(&wcs[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

func (f *foreign) completion(wc *qp.WC) error {
	recv := wc.ID&recvBit != 0
	switch {
	case wc.Status != qp.WCSuccess:
		return wcError{wc.Status, recv}
	case recv:
		now := time.Now()
		if f.client || f.got > 0 {
			f.times.Add(int64(now.Sub(f.last)) / 2)
		}
		f.last = now
		f.check(wc)
		f.got++
		if err := f.postRecv((wc.ID &^ recvBit) + uint64(f.land.slots.Slots)); err != nil {
			return err
		}
	default:
		f.done++
	}
	turn := f.got // messages of ours that may have been sent by now
	if f.client {
		turn++
	}
	if f.sent < f.iters && f.done == f.sent && f.sent < turn {
		return f.postSend()
	}
	return nil
}

// check verifies message number f.got, which is what we sent last.
func (f *foreign) check(wc *qp.WC) {
	size := f.land.row.Size
	if int(wc.ByteLen) != size && f.bad == "" {
		f.bad = fmt.Sprintf("message %d has %d bytes: the peer needs -s %d", f.got, wc.ByteLen, size)
		return
	}
	echo := f.got
	if !f.client {
		if echo--; echo < 0 {
			return
		}
	}
	b := f.land.slot(int((wc.ID &^ recvBit)) % f.land.slots.Slots)
	if at, ok := f.e.pat.check(datum(uint64(echo), !f.client), b); !ok && f.bad == "" {
		f.bad = fmt.Sprintf("message %d is wrong from byte %d on", f.got, at)
	}
}

// row gives the run's line of the table.
func (f *foreign) row() row {
	size := f.land.row.Size
	took := f.last.Sub(f.start).Seconds()
	w := row{
		Op: opSend.String(), Mem: memResident.String(), Size: size, Of: "half round trip", Latency: f.times.Micros(),
		Messages: uint64(f.sent + f.got), Verified: f.bad == "", Problem: f.bad,
		Paging: f.land.buf.reg.Paging().String(), PageFaults: f.land.buf.reg.Stats().PageFaults,
	}
	w.Rate = float64(w.Messages) / took
	w.Gbps = w.Rate * float64(size) * 8 / 1e9
	return w
}

// runForeign plays against ibv_rc_pingpong. exchange connects our QP, by the
// function it is given, at its place in the out-of-band exchange.
func runForeign(e *endpoint, ctl *control, o *options, out *output, client bool, peer dest,
	exchange func(connect func() error) error) error {
	started := time.Now()
	p, err := foreignDefaults(o.plan, o.sizeGiven, o.mtuGiven)
	if err != nil {
		return err
	}
	before, err := readStatus()
	if err != nil {
		return err
	}
	f, err := newForeign(e, ctl, p, client)
	if err != nil {
		return err
	}
	out.note("local  %s", destString(ctl.mine))
	out.note("remote %s", destString(peer))
	if err := exchange(func() error { return ctl.connectQP(peer, p.MTU) }); err != nil {
		return err
	}
	o.plan = p
	rep := newReport(o, e, "ibv_rc_pingpong", started)
	out.begin(rep)
	if err := f.run(); err != nil {
		return err
	}
	w := f.row()
	st, err := readStatus()
	if err != nil {
		return err
	}
	w.Locked = st.Locked
	rep.Paging = w.Paging
	rep.add(w)
	out.row(w)
	select {
	case <-e.ctx.Done():
	case <-time.After(foreignLinger):
	}
	end, err := endOf(e, before, usage{Faults: w.PageFaults, Locked: w.Locked})
	if err != nil {
		return err
	}
	name := "server"
	if client {
		name = "client"
	}
	rep.Ends[name], rep.RSS = end, end.RSS
	rep.Seconds = time.Since(started).Seconds()
	return out.finish(rep)
}
