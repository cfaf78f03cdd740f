// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tapverbs/tapverbs/internal/stats"
	"github.com/tapverbs/tapverbs/mr"
)

const (
	// measureTime is how long a measurement runs when -iters does not say.
	measureTime = 250 * time.Millisecond
	// firstRound is the messages of the first round, from which the speed is learnt.
	firstRound = 64
)

// client drives the tests.
type client struct {
	e     *endpoint
	ctl   *control
	o     *options
	out   *output
	rep   *report
	hello *reply
	use   usage
	// pinLimit is how many bytes both ends may lock; 0: no limit.
	pinLimit int
}

// runClient is -connect: it runs all rows against a server and prints them.
func runClient(ctx context.Context, o *options, space *mr.Space, out *output) (err error) {
	started := time.Now()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	before, err := readStatus()
	if err != nil {
		return err
	}
	e, err := openEndpoint(ctx, o, space)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	ctl, err := newControl(e)
	if err != nil {
		return err
	}
	conn, peer, err := dial(ctx, o.connect, ctl.mine)
	if err != nil {
		return fmt.Errorf("-connect %s: %w", tcpAddr(o.connect), err)
	}
	defer conn.Close()
	if !peer.ours() {
		return runForeign(e, ctl, o, out, true, peer, func(connect func() error) error {
			if err := connect(); err != nil {
				return err
			}
			return finish(conn)
		})
	}
	if err = ctl.connect(peer); err != nil {
		return err
	}
	if err = finish(conn); err != nil {
		return err
	}
	watch(ctx, conn, cancel)
	c := &client{e: e, ctl: ctl, o: o, out: out, rep: newReport(o, e, "pingpong", started)}
	if err = c.greet(); err != nil {
		return err
	}
	if err = c.runRows(); err != nil {
		return err
	}
	bye, err := ctl.call(&request{Verb: verbBye})
	if err != nil {
		return err
	}
	cancel(nil)
	conn.Close() // which the server waits for
	mine, err := endOf(e, before, c.use)
	if err != nil {
		return err
	}
	c.rep.Ends["client"], c.rep.Ends["server"] = mine, bye.End
	c.rep.RSS = bye.End.RSS
	c.rep.Seconds = time.Since(started).Seconds()
	return c.out.finish(c.rep)
}

// greet makes the data QPs of both ends.
func (c *client) greet() error {
	e, p := c.e, &c.o.plan
	if err := e.makeBuffers(p.maxSize(), p.Seed); err != nil {
		return err
	}
	if err := e.makeQPs(p.QPs, p.Depth); err != nil {
		return err
	}
	var err error
	c.hello, err = c.ctl.call(&request{Verb: verbHello, Plan: p, QPs: e.ends(), Flag: e.flag.remote(0)})
	if err != nil {
		return err
	}
	c.rep.Paging = c.hello.Paging
	if c.hello.Paging == "kernel" && c.o.paging == "userfault" && e.dev.Space().UserFault() == nil {
		for _, r := range rows(c.o.ops, c.o.mems, p.Sizes) {
			if r.Mem.uffd() {
				return fmt.Errorf("%s memory is paged by userfaultfd, which the server has not: start it elsewhere, "+
					"or leave such memory out by -mr resident,pinned", r.Mem)
			}
		}
	}
	c.pinLimit = pinLimit()
	if n := c.hello.PinLimit; n > 0 && (c.pinLimit == 0 || n < c.pinLimit) {
		c.pinLimit = n
	}
	return e.connectAll(c.hello.QPs, p.MTU)
}

// runRows measures row after row.
func (c *client) runRows() error {
	list := rows(c.o.ops, c.o.mems, c.o.plan.Sizes)
	c.out.begin(c.rep)
	left := 0
	for i, r := range list {
		if r.Mem == memPinned && c.pinLimit > 0 && r.Size > c.pinLimit && c.o.mems == nil {
			left++
			continue
		}
		w, err := c.row(i, len(list), r)
		if err != nil {
			return fmt.Errorf("%s: %w", r, err)
		}
		c.rep.add(w)
		c.out.row(w)
	}
	if left > 0 {
		c.rep.Notes = append(c.rep.Notes, fmt.Sprintf("rows with pinned memory left out: %d; the limit of locked memory (ulimit -l) is %s",
			left, sizeString(c.pinLimit)))
	}
	return nil
}

// row measures latency and bandwidth of one row.
func (c *client) row(i, of int, r rowSpec) (row, error) {
	w := row{
		Op: r.Op.String(), Mem: r.Mem.String(), Size: r.Size, Of: "half round trip", Paging: c.rep.Paging, Verified: true,
	}
	if !r.Op.halves() {
		w.Of = "whole operation"
	}
	for ph := range numPhases {
		c.out.progress(i, of, r, ph)
		res, err := c.measure(r, ph)
		if err != nil {
			return w, err
		}
		w.Messages += res.messages
		w.PageFaults += res.use.Faults
		w.moves.add(res.use.moves)
		w.PagesWritten += res.pages
		w.Locked = max(w.Locked, res.use.Locked)
		if res.paging != "" {
			w.Paging = res.paging
		}
		if res.bad != "" {
			w.Verified = false
			w.Problem = fmt.Sprintf("%s: %s", ph, res.bad)
		}
		switch s := res.took.Seconds(); ph {
		case phaseLatency:
			w.Latency = res.times.Micros()
		case phaseBandwidth:
			w.Rate = float64(res.messages) / s
			w.Gbps = w.Rate * float64(r.Size) * 8 / 1e9
		}
	}
	return w, nil
}

// result is what a measurement gave.
type result struct {
	times    *stats.Latency
	took     time.Duration // of all rounds together
	messages uint64
	pages    uint64 // cold pages that messages were aimed at
	use      usage  // of both ends
	bad      string
	paging   string
}

// measure runs the rounds of one measurement.
func (c *client) measure(r rowSpec, ph phase) (res result, err error) {
	limit := 0
	if r.Mem == memPinned {
		limit = c.pinLimit
	}
	s := slots(r, ph, limit)
	m, err := newMeasure(c.e, &c.o.plan, r, ph, s, true)
	if err != nil {
		return res, err
	}
	rep, err := c.ctl.call(&request{Verb: verbBegin, Row: r, Phase: ph, Slots: s})
	if err != nil {
		return res, err
	}
	res.paging = rep.Paging
	if m.land != nil && r.Op == opRead {
		res.paging = m.land.buf.reg.Paging().String()
	}
	m.peerPattern, m.peerFlag = c.hello.Pattern, c.hello.Flag
	res.times = stats.NewLatency()
	sent := uint64(0)
	for {
		n := c.next(r, ph, s, sent, res.took)
		if n == 0 {
			break
		}
		bad, took, err := c.round(m, sent, n, res.times)
		if err != nil {
			return res, err
		}
		sent += uint64(n)
		res.took += took
		if bad != "" && res.bad == "" {
			res.bad = bad
		}
	}
	res.messages = sent
	if ph == phaseLatency && r.Op.halves() {
		res.messages *= 2
	}
	res.pages = m.coldPages(sent)
	mine, err := m.end()
	if err != nil {
		return res, err
	}
	if rep, err = c.ctl.call(&request{Verb: verbEnd}); err != nil {
		return res, err
	}
	c.use.add(mine)
	res.use.add(mine)
	res.use.add(rep.Use)
	return res, nil
}

// next gives the messages of the next round, 0 when there is enough. Without
// -iters, bandwidth of cold and evicting memory goes once through all of it; the others go on
// until measureTime is over, in rounds as long as what is left of it.
func (c *client) next(r rowSpec, ph phase, s slotting, sent uint64, took time.Duration) int {
	if n := c.o.plan.Iters; n > 0 {
		return int(min(uint64(n)-sent, uint64(s.Round)))
	}
	if r.Mem.apart() && ph == phaseBandwidth {
		return int(min(uint64(s.Slots)-sent, uint64(s.Round)))
	}
	switch left := measureTime - took; {
	case sent == 0:
		return min(firstRound, s.Round)
	case left <= 0:
		return 0
	default:
		per := max(took/time.Duration(sent), 1)
		return min(max(int(left/per), firstRound), s.Round)
	}
}

// round moves n messages, from number first on, and verifies them at both ends.
func (c *client) round(m *measure, first uint64, n int, h *stats.Latency) (bad string, took time.Duration, err error) {
	base, err := m.prepare(first, n, true)
	if err != nil {
		return "", 0, err
	}
	rep, err := c.ctl.call(&request{Verb: verbRound, First: first, Count: n, Land: m.land.remote(base)})
	if err != nil {
		return "", 0, err
	}
	m.peerLand = rep.Land
	if m.phase == phaseLatency {
		took, err = m.ping(first, n, base, c.o.plan.Depth, h)
	} else {
		took, err = m.stream(first, n, base, c.o.plan.Depth)
	}
	if err != nil {
		return "", 0, err
	}
	if rep, err = c.ctl.call(&request{Verb: verbCheck}); err != nil {
		return "", 0, err
	}
	bad = m.verify(first, n, base, true)
	if bad == "" && rep.Bad != "" {
		bad = "at the server, " + rep.Bad
	}
	return bad, took, nil
}
