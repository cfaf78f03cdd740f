// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/interop/lab"
	"github.com/tapverbs/tapverbs/wire"
)

// rounds of rping, and the bytes of each.
const (
	rpingRounds = 5
	rpingSize   = 10000
	rpingPort   = 7174
)

type family struct{ name, kernel, ours string }

// families have the addresses of both sides.
var families = []family{
	{"IPv4", lab.GuestAddr, ourAddr},
	{"IPv6", lab.GuestAddr6, ourAddr6},
}

// inGuest runs a line of shell in the guest while a program runs.
func (p *prog) inGuest(ctx context.Context, line string) (string, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-p.done:
			cancel(fmt.Errorf("it has ended: %w", p.err))
		case <-ctx.Done():
		}
	}()
	return lab.Run(ctx, line)
}

// resolved waits until a program of the guest is known to its RDMA CM in a state.
func (p *prog) resolved(t *testing.T, ctx context.Context, state string) {
	t.Helper()
	if _, err := p.inGuest(ctx, "until rdma resource show cm_id | grep -q "+state+"; do sleep 0.05; done"); err != nil {
		t.Fatalf("%s: %s is not in state %s: %v", p.where, p.line, state, err)
	}
}

// rpingClient is what rping -c does.
func (e *engine) rpingClient(ctx context.Context, c *provider.Conn, size, rounds int, each func()) error {
	data := e.mem.Bytes()[dataAt : dataAt+size]
	where := rpingInfo{uint64(e.mr.Addr()) + dataAt, uint32(e.mr.RKey()), uint32(size)}
	for round := range rounds {
		sent := make([]byte, size)
		for i := range size - 1 { // the server writes up to the first zero
			sent[i] = byte('A' + (round+i)%58)
		}
		copy(data, sent)
		each()
		if err := e.say(ctx, c, where); err != nil {
			return err
		}
		if _, err := e.hear(ctx, c); err != nil {
			return fmt.Errorf("round %d, while the server reads: %w", round, err)
		}
		clear(data)
		each()
		if err := e.say(ctx, c, where); err != nil {
			return err
		}
		if _, err := e.hear(ctx, c); err != nil {
			return fmt.Errorf("round %d, while the server writes: %w", round, err)
		}
		if !bytes.Equal(data, sent) {
			return fmt.Errorf("round %d: the server has written something else", round)
		}
	}
	return nil
}

// rpingServer is what rping -s does.
func (e *engine) rpingServer(ctx context.Context, c *provider.Conn, each func()) error {
	for round := range rpingRounds {
		for _, op := range []struct {
			wr qp.WROpcode
			wc qp.WCOpcode
		}{{qp.WRRead, qp.WCRDMARead}, {qp.WRWrite, qp.WCRDMAWrite}} {
			i, err := e.hear(ctx, c)
			if err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
			each()
			if err := e.post(c.QP, qp.SendWR{Opcode: op.wr, SGL: e.sge(dataAt, int(i.Len)), RemoteAddr: i.Addr, RKey: mr.Key(i.Key)}); err != nil {
				return err
			}
			if _, err := e.completes(ctx, op.wc); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
			if err := e.say(ctx, c, rpingInfo{}); err != nil {
				return err
			}
		}
	}
	return nil
}

// patient checks that we have refused nothing for good, though pages were evicted: a peer may
// be told to wait.
func (c *capture) patient(evicted bool, pages int) {
	c.t.Helper()
	if evicted && pages == 0 {
		c.t.Error("nothing was evicted")
	}
	rnr := 0
	for _, p := range c.packets() {
		if !p.fromUs || p.bth.Op != wire.RCAck {
			continue
		}
		switch a := wire.ParseAETH(p.data); a.Kind() {
		case wire.AckRNR:
			rnr++
		case wire.AckNak:
			c.t.Errorf("we have sent a NAK: code %d", a.Value())
		}
	}
	fmt.Printf("     %d pages evicted, %d RNR NAKs of ours\n", pages, rnr)
}

// TestDial: provider's Dial and Listen with rping in the guest, which checks the data (-V),
// as we do.
func TestDial(t *testing.T) {
	needLab(t, usual)
	for _, f := range families {
		for _, evicted := range []bool{false, true} {
			what := ""
			if evicted {
				what = ", our region evicted before each operation"
			}
			each := func(e *engine, pages *int) func() {
				return func() {
					if evicted {
						*pages += e.evict()
					}
				}
			}
			line := fmt.Sprintf("rping -V -S %d -C %d -p %d -a ", rpingSize, rpingRounds, rpingPort)
			one(t, "Dial to rping -s, "+f.name+what, func(t *testing.T, ctx context.Context) {
				tap := newCapture(t, ctx)
				g := guest(t, ctx, line+f.kernel+" -s")
				g.resolved(t, ctx, "LISTEN")
				e := newEngine(t)
				c, err := e.pd.Dial(ctx, netip.AddrPortFrom(netip.MustParseAddr(f.kernel), rpingPort), e.attr())
				if err != nil {
					t.Fatal(err)
				}
				pages := 0
				if err := e.rpingClient(ctx, c, rpingSize, rpingRounds, each(e, &pages)); err != nil {
					t.Error(err)
				}
				if err := c.Close(); err != nil {
					t.Error(err)
				}
				g.wait(t)
				tap.finish()
				tap.patient(evicted, pages)
			})
			one(t, "Listen, from rping -c, "+f.name+what, func(t *testing.T, ctx context.Context) {
				tap := newCapture(t, ctx)
				e := newEngine(t)
				l, err := e.d.Listen(netip.AddrPortFrom(netip.MustParseAddr(f.ours), rpingPort), 4)
				if err != nil {
					t.Fatal(err)
				}
				g := guest(t, ctx, line+f.ours+" -c")
				r, err := l.Accept(ctx)
				if err != nil {
					t.Fatal(err)
				}
				c, err := r.Accept(ctx, e.pd, e.attr())
				if err != nil {
					t.Fatal(err)
				}
				pages := 0
				if err := e.rpingServer(ctx, c, each(e, &pages)); err != nil {
					t.Error(err)
				}
				g.wait(t)
				select {
				case <-c.Done():
				case <-ctx.Done():
					t.Error("the end of the connection was not heard of")
				}
				if err := c.Close(); err != nil {
					t.Error(err)
				}
				if err := l.Close(); err != nil {
					t.Error(err)
				}
				tap.finish()
				tap.patient(evicted, pages)
			})
		}
	}
}

// TestEvictedMeanwhile: all of our region is evicted again and again while the kernel writes to
// it and reads it, at whatever packet of a message that happens to be. It is never refused.
func TestEvictedMeanwhile(t *testing.T) {
	needLab(t, usual)
	const size, rounds = 65000, 5
	one(t, "our region evicted in the middle of the kernel's messages", func(t *testing.T, ctx context.Context) {
		tap := newCapture(t, ctx)
		g := guest(t, ctx, fmt.Sprintf("rping -s -V -S %d -C %d -p %d -a %s", size, rounds, rpingPort, lab.GuestAddr))
		g.resolved(t, ctx, "LISTEN")
		e := newEngine(t)
		a := e.attr()
		a.MTU = qp.MTU1024
		c, err := e.pd.Dial(ctx, netip.AddrPortFrom(netip.MustParseAddr(lab.GuestAddr), rpingPort), a)
		if err != nil {
			t.Fatal(err)
		}
		// Once in so many packets, that the kernel may get on.
		const every = 10
		pages, times, done := 0, 0, make(chan struct{})
		over, stop := context.WithCancel(ctx)
		go func() {
			defer close(done)
			for seen := 0; over.Err() == nil; {
				if n := len(tap.packets()); n >= seen+every {
					seen = n
					pages += e.evict()
					times++
				}
				select {
				case <-time.After(5 * time.Millisecond): // tcpdump does not tell
				case <-over.Done():
				}
			}
		}()
		err = e.rpingClient(ctx, c, size, rounds, func() {})
		stop()
		<-done
		if err != nil {
			t.Error(err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		g.wait(t)
		tap.finish()
		tap.patient(true, pages)
		inside := 0
		for _, p := range tap.packets() {
			if !p.fromUs && p.bth.Op == wire.RCWriteMiddle {
				inside++
			}
		}
		if inside < rounds*(size/1024-2) {
			t.Errorf("%d packets were in the middle of the kernel's messages", inside)
		}
		fmt.Printf("     evicted %d times\n", times)
	})
}
