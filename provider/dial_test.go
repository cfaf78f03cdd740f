// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"sync"
	"testing"

	"github.com/tapverbs/tapverbs/cm"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

// party is one end's objects for connections.
type party struct {
	t   *testing.T
	d   *provider.Device
	pd  *provider.PD
	cq  *provider.CQ
	mr  *provider.MR
	mem *mr.Memory
}

func newParty(t *testing.T, d *provider.Device) *party {
	t.Helper()
	p := &party{t: t, d: d}
	var err error
	if p.pd, err = d.AllocPD(); err == nil {
		p.cq, err = d.CreateCQ(64, nil)
	}
	if err == nil {
		p.mem, err = mr.Alloc(1 << 16)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.mem.Close() })
	if p.mr, err = p.pd.RegMR(p.mem.Bytes(), mr.LocalWrite|mr.RemoteWrite|mr.RemoteRead); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *party) sge(off, n int) []qp.SGE {
	return []qp.SGE{{Addr: uint64(p.mr.Addr()) + uint64(off), Length: uint32(n), LKey: p.mr.LKey()}}
}

// attr is of a connection with one receive posted.
func (p *party) attr() provider.ConnAttr {
	return provider.ConnAttr{
		QP:      provider.QPInitAttr{Type: qp.TypeRC, SendCQ: p.cq, RecvCQ: p.cq, Caps: qp.Caps{SendWR: 4, RecvWR: 4, SendSGE: 1, RecvSGE: 1}},
		Private: []byte("how do you do"),
		Prepare: func(q *provider.QP) error {
			_, err := q.PostRecv([]qp.RecvWR{{ID: 1, SGL: p.sge(4096, 4096)}})
			return err
		},
	}
}

// wait polls until a completion of this opcode.
func (p *party) wait(ctx context.Context, op qp.WCOpcode) error {
	var wcs [1]qp.WC
	for {
		if n := p.cq.Poll(wcs[:]); n == 1 {
			if wcs[0].Status != qp.WCSuccess {
				return errors.New(wcs[0].Status.String())
			}
			if wcs[0].Opcode == op {
				return nil
			}
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// TestDial connects by address and port, over both families, with and without loss, sends a
// message each way, and ends it from either side.
func TestDial(t *testing.T) {
	for name, loss := range map[string]float64{"clean": 0, "lossy": 0.2} {
		t.Run(name, func(t *testing.T) {
			p := harness.NewLivePair(t, taptest.Config{Seed: 1, Loss: loss})
			a, b := newParty(t, p.Dev[0]), newParty(t, p.Dev[1])
			ctx := context.Background()
			if loss > 0 { // ARP has few tries
				for i, other := range []*party{b, a} {
					for _, at := range harness.Addrs(1 - i) {
						if err := []*party{a, b}[i].d.AddNeighbour(at.Addr(), [6]byte(other.d.MAC())); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			l, err := b.d.Listen(netip.MustParseAddrPort("[::]:4791"), 4)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := b.d.Listen(netip.MustParseAddrPort("[::]:4791"), 4); err == nil {
				t.Error("two listeners for one port")
			}
			for i, addr := range []string{"10.91.0.2:4791", "[fd91::2]:4791"} {
				var wg sync.WaitGroup
				var s *provider.Conn
				wg.Go(func() {
					r, err := l.Accept(ctx)
					if err != nil {
						t.Error(err)
						return
					}
					if !bytes.HasPrefix(r.Private, []byte("how do you do\x00")) || r.RemoteAddr().Addr() != harness.Addrs(0)[i].Addr() || r.RemoteAddr().Port() == 0 {
						t.Errorf("%q from %v", r.Private, r.RemoteAddr())
					}
					if s, err = r.Accept(ctx, b.pd, b.attr()); err != nil {
						t.Error(err)
					}
				})
				c, err := a.pd.Dial(ctx, netip.MustParseAddrPort(addr), a.attr())
				if err != nil {
					t.Fatal(err)
				}
				// What the client sends says that it is ready, too.
				copy(a.mem.Bytes(), "over the connection")
				if _, err := c.PostSend([]qp.SendWR{{ID: 2, Opcode: qp.WRSend, SGL: a.sge(0, 19), Flags: qp.SendSignaled}}); err != nil {
					t.Fatal(err)
				}
				wg.Wait()
				if t.Failed() {
					return
				}
				if err := errors.Join(b.wait(ctx, qp.WCRecv), a.wait(ctx, qp.WCSend)); err != nil {
					t.Fatal(err)
				}
				if got := b.mem.Bytes()[4096:][:19]; string(got) != "over the connection" {
					t.Errorf("%q", got)
				}
				if c.RemoteAddr().String() != addr || s.LocalAddr().String() != addr || c.LocalAddr() != s.RemoteAddr() {
					t.Errorf("%v to %v, %v to %v", c.LocalAddr(), c.RemoteAddr(), s.RemoteAddr(), s.LocalAddr())
				}
				first, second := c, s
				if i == 1 {
					first, second = s, c
				}
				if err := first.Close(); err != nil {
					t.Error(err)
				}
				<-second.Done()
				if err := second.Close(); err != nil {
					t.Error(err)
				}
				for a.cq.Poll(make([]qp.WC, 8))+b.cq.Poll(make([]qp.WC, 8)) > 0 {
				}
			}
			if err := l.Close(); err != nil {
				t.Error(err)
			}
			if _, err := l.Accept(ctx); !errors.Is(err, provider.ErrClosed) {
				t.Error(err)
			}
		})
	}
}

// TestDialClose: a device that is closed ends its connections, on both sides.
func TestDialClose(t *testing.T) {
	p := harness.NewLivePair(t, taptest.Config{Seed: 1})
	a, b := newParty(t, p.Dev[0]), newParty(t, p.Dev[1])
	ctx := context.Background()
	l, err := b.d.Listen(netip.MustParseAddrPort("[fd91::2]:7"), 1)
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan *provider.Conn, 1)
	go func() {
		r, err := l.Accept(ctx)
		if err != nil {
			t.Error(err)
		}
		s, err := r.Accept(ctx, b.pd, b.attr())
		if err != nil {
			t.Error(err)
		}
		accepted <- s
	}()
	c, err := a.pd.Dial(ctx, netip.MustParseAddrPort("[fd91::2]:7"), a.attr())
	if err != nil {
		t.Fatal(err)
	}
	s := <-accepted
	if err := b.d.Close(); err != nil {
		t.Fatal(err)
	}
	<-s.Done()
	<-c.Done()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// TestDialRefused: nobody listens, the application says no, nobody is there.
func TestDialRefused(t *testing.T) {
	p := harness.NewLivePair(t, taptest.Config{Seed: 1})
	a, b := newParty(t, p.Dev[0]), newParty(t, p.Dev[1])
	ctx := context.Background()
	var no *provider.RejectedError
	_, err := a.pd.Dial(ctx, netip.MustParseAddrPort("10.91.0.2:1"), a.attr())
	if !errors.As(err, &no) || no.Reason != wire.RejInvalidServiceID {
		t.Errorf("%v", err)
	}
	l, err := b.d.Listen(netip.MustParseAddrPort("10.91.0.2:1"), 1)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var wg sync.WaitGroup
	wg.Go(func() {
		r, err := l.Accept(ctx)
		if err == nil {
			err = r.Reject([]byte("not today"))
		}
		if err != nil {
			t.Error(err)
		}
	})
	_, err = a.pd.Dial(ctx, netip.MustParseAddrPort("10.91.0.2:1"), a.attr())
	if !errors.As(err, &no) || no.Reason != wire.RejConsumer || !bytes.HasPrefix(no.Private, []byte("not today\x00")) {
		t.Errorf("%v", err)
	}
	wg.Wait()
	if _, err = a.pd.Dial(ctx, netip.MustParseAddrPort("10.91.0.77:1"), a.attr()); !errors.Is(err, provider.ErrTimeout) {
		t.Errorf("%v", err)
	}
	if _, err = a.pd.Dial(ctx, netip.MustParseAddrPort("192.0.2.1:1"), a.attr()); !errors.Is(err, provider.ErrUnreachable) {
		t.Errorf("%v", err)
	}
	bad := a.attr()
	bad.QP.Type = qp.TypeUD
	if _, err = a.pd.Dial(ctx, netip.MustParseAddrPort("10.91.0.2:1"), bad); !errors.Is(err, provider.ErrInvalid) {
		t.Errorf("%v", err)
	}
	// Who gives up waiting takes the request back.
	short, cancel := context.WithCancel(ctx)
	wg.Go(func() {
		if _, err := a.pd.Dial(short, netip.MustParseAddrPort("10.91.0.2:1"), a.attr()); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	})
	r, err := l.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	wg.Wait()
	// As seen by the server: either before it answers, or by its answer.
	if _, err := r.Accept(ctx, b.pd, b.attr()); err == nil {
		t.Error("accepted what was taken back")
	}
	if _, err := b.d.Listen(netip.MustParseAddrPort("10.91.0.9:1"), 1); !errors.Is(err, provider.ErrInvalid) {
		t.Errorf("%v", err)
	}
}

// TestDialAttributes: both queue pairs have what the ends have agreed on: of READs and atomics no
// more than one wants to have and the other takes, each the other's RNR retries, with the long
// RNR timer of RDMA CM if they end, the rest as who dials wants it.
func TestDialAttributes(t *testing.T) {
	p := harness.NewLivePair(t, taptest.Config{Seed: 1})
	a, b := newParty(t, p.Dev[0]), newParty(t, p.Dev[1])
	ctx := context.Background()
	at := netip.AddrPortFrom(harness.Addrs(1)[0].Addr(), 19)
	l, err := b.d.Listen(at, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	most := int(a.d.Query().MaxQPRdAtom)
	type wish struct{ responder, initiator, retry, rnr int }
	type got struct{ in, out, retry, rnr int }
	for _, c := range []struct {
		client, server wish
		mtu            qp.MTU
		// What the client has, and the server.
		c, s got
	}{
		{client: wish{3, 9, 5, 4}, server: wish{7, 2, 0, 6}, mtu: qp.MTU1024, c: got{2, 7, 5, 6}, s: got{7, 2, 5, 4}},
		{client: wish{12, 1, 1, 7}, server: wish{5, 6, 0, 1}, mtu: qp.MTU512, c: got{6, 1, 1, 1}, s: got{1, 6, 1, 7}},
		{client: wish{-1, 4, 7, 2}, server: wish{-1, 4, 0, 3}, c: got{0, 0, 7, 3}, s: got{0, 0, 7, 2}},
		{client: wish{4, 3, 0, 0}, server: wish{}, c: got{4, 3, 7, 7}, s: got{3, 4, 7, 7}}, // what the other asks for
		{c: got{most, most, 7, 7}, s: got{most, most, 7, 7}},
	} {
		attr := func(p *party, w wish) provider.ConnAttr {
			a := p.attr()
			a.Responder, a.Initiator, a.RetryCount, a.RNRRetry = w.responder, w.initiator, uint8(w.retry), uint8(w.rnr)
			return a
		}
		var wg sync.WaitGroup
		var server *provider.Conn
		wg.Go(func() {
			r, err := l.Accept(ctx)
			if err == nil {
				server, err = r.Accept(ctx, b.pd, attr(b, c.server))
			}
			if err != nil {
				t.Error(err)
			}
		})
		ca := attr(a, c.client)
		ca.MTU = c.mtu
		client, err := a.pd.Dial(ctx, at, ca)
		if err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if t.Failed() {
			return
		}
		var psn [2][2]wire.PSN
		for i, end := range []struct {
			c, peer *provider.Conn
			want    got
			told    int // how often the other end is to try
		}{{client, server, c.c, c.s.rnr}, {server, client, c.s, c.c.rnr}} {
			q, _, err := end.c.Query()
			if err != nil {
				t.Fatal(err)
			}
			if g := (got{int(q.MaxDestRdAtomic), int(q.MaxRdAtomic), int(q.RetryCnt), int(q.RNRRetry)}); g != end.want {
				t.Errorf("client wants %v, server %v: end %d has %v, want %v", c.client, c.server, i, g, end.want)
			}
			mtu := c.mtu
			if mtu == 0 {
				mtu = a.d.QueryPort().ActiveMTU
			}
			timer := uint8(0)
			if end.told == 7 {
				timer = 12
			}
			if q.State != qp.StateRTS || q.PathMTU != mtu || q.Timeout != 18 || q.MinRNRTimer != timer || q.DestQPN != end.peer.Num() {
				t.Errorf("end %d: %+v", i, q)
			}
			psn[i] = [2]wire.PSN{q.SQPSN, q.RQPSN}
		}
		if psn[0] != [2]wire.PSN{psn[1][1], psn[1][0]} {
			t.Errorf("PSNs to send and to receive with: %v", psn)
		}
		if err := errors.Join(client.Close(), server.Close()); err != nil {
			t.Error(err)
		}
	}
}

// TestDialUC: connections of unreliable queue pairs, whose ports are not those of reliable ones.
func TestDialUC(t *testing.T) {
	p := harness.NewLivePair(t, taptest.Config{Seed: 1})
	a, b := newParty(t, p.Dev[0]), newParty(t, p.Dev[1])
	ctx := context.Background()
	at := netip.AddrPortFrom(harness.Addrs(1)[1].Addr(), 20)
	l, err := b.d.ListenUC(at, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	attr := func(p *party) provider.ConnAttr {
		a := p.attr()
		a.QP.Type = qp.TypeUC
		a.MTU = qp.MTU1024
		return a
	}
	var no *provider.RejectedError
	if _, err := a.pd.Dial(ctx, at, a.attr()); !errors.As(err, &no) || no.Reason != wire.RejInvalidServiceID {
		t.Errorf("an RC queue pair: %v", err)
	}
	var wg sync.WaitGroup
	var server *provider.Conn
	wg.Go(func() {
		r, err := l.Accept(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		if server, err = r.Accept(ctx, b.pd, attr(b)); err != nil {
			t.Error(err)
		}
	})
	client, err := a.pd.Dial(ctx, at, attr(a))
	if err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	for i, c := range []*provider.Conn{client, server} {
		if q, in, err := c.Query(); err != nil || in.Type != qp.TypeUC || q.State != qp.StateRTS || q.PathMTU != qp.MTU1024 {
			t.Errorf("end %d: %+v, %+v, %v", i, q, in, err)
		}
	}
	copy(a.mem.Bytes(), "for what it is worth")
	if _, err := client.PostSend([]qp.SendWR{{ID: 2, Opcode: qp.WRSend, SGL: a.sge(0, 20), Flags: qp.SendSignaled}}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(a.wait(ctx, qp.WCSend), b.wait(ctx, qp.WCRecv)); err != nil {
		t.Fatal(err)
	}
	if got := b.mem.Bytes()[4096:][:20]; string(got) != "for what it is worth" {
		t.Errorf("%q", got)
	}
	if err := client.Close(); err != nil {
		t.Error(err)
	}
	<-server.Done()
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	// An RC queue pair is nothing to accept with.
	wg.Go(func() {
		r, err := l.Accept(ctx)
		if err == nil {
			_, err = r.Accept(ctx, b.pd, b.attr())
		}
		if !errors.Is(err, provider.ErrInvalid) {
			t.Errorf("accepted with an RC queue pair: %v", err)
		}
	})
	if _, err := a.pd.Dial(ctx, at, attr(a)); !errors.As(err, &no) || no.Reason != wire.RejConsumer {
		t.Errorf("%v", err)
	}
	wg.Wait()
}

// TestDialStale: the other end accepts with a queue pair that there is a connection with: who
// dials hears why there is none, and what there was has ended.
func TestDialStale(t *testing.T) {
	p := harness.NewLivePair(t, taptest.Config{Seed: 1})
	a := newParty(t, p.Dev[0])
	ctx := context.Background()
	const port = 18
	requests := make(chan *provider.CMConn, 2)
	l, err := p.Dev[1].CMListen(wire.ServiceID(wire.PSTCP, port), netip.Addr{}, 4, nil, func(k *provider.CMConn, e cm.Event) {
		if e.Kind == cm.Request {
			requests <- k
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var wg sync.WaitGroup
	dial := func() (*provider.Conn, error) {
		wg.Go(func() {
			if err := (<-requests).Accept(cm.Params{QPN: 0x1234, PSN: 5}); err != nil {
				t.Error(err)
			}
		})
		c, err := a.pd.Dial(ctx, netip.AddrPortFrom(harness.Addrs(1)[0].Addr(), port), a.attr())
		wg.Wait()
		return c, err
	}
	old, err := dial()
	if err != nil {
		t.Fatal(err)
	}
	var no *provider.RejectedError
	if _, err := dial(); !errors.As(err, &no) || no.Reason != wire.RejStale {
		t.Errorf("%v", err)
	}
	<-old.Done()
	if err := old.Close(); err != nil {
		t.Error(err)
	}
}
