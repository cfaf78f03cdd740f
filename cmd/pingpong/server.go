// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/tapverbs/tapverbs/internal/twin"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
)

// server answers the client's requests.
type server struct {
	e      *endpoint
	ctl    *control
	m      *measure // measurement in progress
	plan   plan
	flag   remote // the client's
	before procStatus
	use    usage
	bye    bool
	// the round in progress
	first uint64
	count int
	base  int
}

// runServer is -listen: it waits for one client and serves it to its end.
func runServer(ctx context.Context, o *options, space *mr.Space, out *output) (err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	e, err := openEndpoint(ctx, o, space)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	l, err := listen(o.listen)
	if err != nil {
		return err
	}
	defer l.Close()
	ctl, err := newControl(e)
	if err != nil {
		return err
	}
	if !twin.Child() {
		out.note("waiting for a client at %s", l.Addr())
	}
	conn, peer, err := accept(ctx, l)
	if err != nil {
		return err
	}
	defer conn.Close()
	l.Close()
	if !peer.ours() {
		return runForeign(e, ctl, o, out, false, peer, func(connect func() error) error {
			if err := connect(); err != nil {
				return err
			}
			return answer(conn, ctl.mine)
		})
	}
	if err = ctl.connect(peer); err != nil {
		return err
	}
	if err = answer(conn, ctl.mine); err != nil {
		return err
	}
	watch(ctx, conn, cancel)
	s := &server{e: e, ctl: ctl}
	if err = s.serve(); err != nil {
		return err
	}
	// The client closes the connection, for then it has read the answer to its
	// goodbye. Were this end the first, the client's watch might see that before
	// its control QP is polled, and call a peer gone that had said goodbye.
	<-ctx.Done()
	return nil
}

// serve answers requests until the client says goodbye.
func (s *server) serve() error {
	for !s.bye {
		var req request
		if err := s.ctl.receive(&req); err != nil {
			return err
		}
		rep, err := s.do(&req)
		if err != nil {
			// The client gets to know why before this end leaves.
			return errors.Join(err, s.ctl.send(&reply{Err: err.Error()}), s.ctl.flush())
		}
		if err := s.ctl.send(rep); err != nil {
			return err
		}
		if req.Verb == verbRound {
			if err := s.play(); err != nil {
				return err
			}
		}
	}
	// The client leaves as soon as it has the answer to its goodbye, so it may be
	// gone before its ACK is seen. Had it not got it, it would say so itself.
	_ = s.ctl.flush()
	return nil
}

// do answers one request.
func (s *server) do(req *request) (*reply, error) {
	switch req.Verb {
	case verbHello:
		return s.hello(req)
	case verbBegin:
		var err error
		if s.m != nil {
			return nil, errors.New("begin inside of a measurement")
		}
		s.m, err = newMeasure(s.e, &s.plan, req.Row, req.Phase, req.Slots, false)
		if err != nil {
			return nil, err
		}
		s.m.peerFlag = s.flag
		rep := &reply{}
		if s.m.land != nil {
			rep.Paging = s.m.land.buf.reg.Paging().String()
		}
		return rep, nil
	case verbBye:
		s.bye = true
		end, err := endOf(s.e, s.before, s.use)
		return &reply{End: end}, err
	}
	if s.m == nil {
		return nil, fmt.Errorf("request %q outside of a measurement", req.Verb)
	}
	switch req.Verb {
	case verbRound:
		s.first, s.count = req.First, req.Count
		s.m.peerLand = req.Land
		var err error
		if s.base, err = s.m.prepare(req.First, req.Count, false); err != nil {
			return nil, err
		}
		return &reply{Land: s.m.land.remote(s.base)}, nil
	case verbCheck:
		return &reply{Bad: s.m.verify(s.first, s.count, s.base, false)}, nil
	case verbEnd:
		use, err := s.m.end()
		s.m = nil
		s.use.add(use)
		return &reply{Use: use}, err
	}
	return nil, fmt.Errorf("unknown request %q", req.Verb)
}

// hello makes and connects the data QPs.
func (s *server) hello(req *request) (*reply, error) {
	if req.Plan == nil || s.e.qps != nil {
		return nil, errors.New("the hello makes no sense")
	}
	s.plan, s.flag = *req.Plan, req.Flag
	if !s.plan.ok() {
		return nil, fmt.Errorf("cannot do messages of %d bytes on %d QPs of depth %d, budget %d %%, suspended %v", s.plan.maxSize(),
			s.plan.QPs, s.plan.Depth, s.plan.Budget, s.plan.Suspend)
	}
	var err error
	if s.before, err = readStatus(); err != nil {
		return nil, err
	}
	if err := s.e.makeBuffers(s.plan.maxSize(), s.plan.Seed); err != nil {
		return nil, err
	}
	if err := s.e.makeQPs(s.plan.QPs, s.plan.Depth); err != nil {
		return nil, err
	}
	if err := s.e.connectAll(req.QPs, s.plan.MTU); err != nil {
		return nil, err
	}
	return &reply{
		QPs: s.e.ends(), Pattern: s.e.src.remote(0), Flag: s.e.flag.remote(0), PinLimit: pinLimit(),
		Paging: s.e.src.reg.Paging().String(),
	}, nil
}

// play takes the server's part in a round.
func (s *server) play() error {
	switch {
	case s.m.phase == phaseLatency && s.m.row.Op.halves():
		return s.m.pong(s.first, s.count, s.base, s.plan.Depth)
	case s.m.row.Op.twoSided():
		return s.e.waitReceived(s.count)
	}
	return nil // one-sided: this end has nothing to do but to be there
}

// endOf sums up a process.
func endOf(e *endpoint, before procStatus, use usage) (*endReport, error) {
	after, err := readStatus()
	if err != nil {
		return nil, err
	}
	return &endReport{
		PageFaults: use.Faults, Locked: use.Locked,
		RSS:      rssReport{Before: before.RSS, After: after.RSS, Peak: after.Peak},
		Counters: counters(e.dev),
	}, nil
}

// destString says where a queue pair is, as ibv_rc_pingpong prints it.
func destString(d dest) string {
	return fmt.Sprintf("QPN 0x%06x, PSN 0x%06x, GID %s", uint32(d.QPN), uint32(d.PSN), provider.GID(d.GID))
}
