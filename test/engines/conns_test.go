// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// TestConnections: two processes with a TAP each make 1,000 connections by address and port, 10
// at a time, while 5 % of the frames are lost. Each brings a message there and back; none is lost,
// and nothing is left of them on either side.
func TestConnections(t *testing.T) {
	runScenario(t, 4*hang, fabric.Start, "conns", runEnv+"=1000")
}

func conns() error     { return twins("conns-peer", connSide) }
func connsPeer() error { return peerOf(connSide) }

const (
	connsAtATime = 10
	connPort     = 7471
	connMax      = 16 << 10 // bytes of a message
)

// who is what the sides tell each other before they begin.
type who struct {
	Addr netip.Addr
	MAC  []byte
}

func connSide(i int, port fabric.Port, in io.Reader, out io.Writer) (err error) {
	n, err := strconv.Atoi(os.Getenv(runEnv))
	if err != nil {
		return err
	}
	enc, dec := json.NewEncoder(out), json.NewDecoder(in)
	raw, err := tap.Open(tap.Config{Name: port.Name})
	if err != nil {
		return err
	}
	lossy := taptest.NewLossy(raw, taptest.Config{Seed: int64(i) + 1})
	d, err := provider.Open(provider.Config{Device: lossy, Addrs: []netip.Prefix{port.V4, port.V6}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	pd, err := d.AllocPD()
	if err != nil {
		return err
	}
	l, err := d.Listen(netip.AddrPortFrom(netip.IPv6Unspecified(), connPort), connsAtATime)
	if err != nil {
		return err
	}
	peer, err := dialogue(enc, dec, who{port.V4.Addr(), d.MAC()})
	if err != nil {
		return err
	}
	// ARP has few tries.
	if err := d.AddNeighbour(peer.Addr, [6]byte(peer.MAC)); err != nil {
		return err
	}
	lossy.SetFaults(0.05, 0, 0, 0)
	before := runtime.NumGoroutine()
	e := &connEnd{d: d, pd: pd}
	if i == 0 {
		err = e.dialAll(netip.AddrPortFrom(peer.Addr, connPort), n)
	} else {
		err = e.acceptAll(l, n)
	}
	if err != nil {
		return err
	}
	// Ended connections are remembered for seconds; then there are none.
	for d.CMStats().Known > 0 || runtime.NumGoroutine() > before {
		time.Sleep(time.Millisecond)
	}
	if _, err := dialogue(enc, dec, "done"); err != nil {
		return err
	}
	st := d.CMStats()
	fmt.Fprintf(os.Stderr, "side %d: %d connections, %d frames lost, %+v\n", i, e.done.Load(), lossy.Counts().Lost, st)
	if e.done.Load() != int64(n) || lossy.Counts().Lost == 0 || st.Resent == 0 {
		return fmt.Errorf("%d connections of %d; %d frames were lost, %d messages sent again", e.done.Load(), n, lossy.Counts().Lost, st.Resent)
	}
	return l.Close()
}

// connEnd is one process's part.
type connEnd struct {
	d    *provider.Device
	pd   *provider.PD
	done atomic.Int64
}

// dialAll makes n connections, several at a time.
func (e *connEnd) dialAll(to netip.AddrPort, n int) error {
	var next atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, connsAtATime)
	for w := range errs {
		wg.Go(func() {
			for errs[w] == nil {
				k := int(next.Add(1)) - 1
				if k >= n {
					return
				}
				errs[w] = e.dial(to, k)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// acceptAll serves n connections.
func (e *connEnd) acceptAll(l *provider.Listener, n int) error {
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range errs {
		r, err := l.Accept(context.Background())
		if err != nil {
			return err
		}
		wg.Go(func() { errs[i] = e.serve(r) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// connection is memory and a completion queue for one, with a receive posted before it is made.
func (e *connEnd) connection(f func(a provider.ConnAttr, b *connBuf) error) error {
	mem, err := mr.Alloc(2 * connMax)
	if err != nil {
		return err
	}
	defer mem.Close()
	reg, err := e.pd.RegMR(mem.Bytes(), mr.LocalWrite)
	if err != nil {
		return err
	}
	cq, err := e.d.CreateCQ(8, nil)
	if err != nil {
		return err
	}
	b := &connBuf{cq: cq, reg: reg, in: mem.Bytes()[:connMax], out: mem.Bytes()[connMax:]}
	err = f(provider.ConnAttr{
		QP: provider.QPInitAttr{Type: qp.TypeRC, SendCQ: cq, RecvCQ: cq, Caps: qp.Caps{SendWR: 2, RecvWR: 2, SendSGE: 1, RecvSGE: 1}},
		Prepare: func(q *provider.QP) error {
			_, err := q.PostRecv([]qp.RecvWR{{ID: 1, SGL: b.sge(0, connMax)}})
			return err
		},
	}, b)
	e.done.Add(1)
	return errors.Join(err, cq.Destroy(), reg.Dereg())
}

type connBuf struct {
	cq      *provider.CQ
	reg     *provider.MR
	in, out []byte
}

func (b *connBuf) sge(off, n int) []qp.SGE {
	return []qp.SGE{{Addr: uint64(b.reg.Addr()) + uint64(off), Length: uint32(n), LKey: b.reg.LKey()}}
}

func (b *connBuf) send(q *provider.QP, n int) error {
	_, err := q.PostSend([]qp.SendWR{{ID: 2, Opcode: qp.WRSend, SGL: b.sge(connMax, n), Flags: qp.SendSignaled}})
	return err
}

// wait waits for a completion of this kind.
func (b *connBuf) wait(op qp.WCOpcode) (int, error) {
	var wcs [1]qp.WC
	for {
		if _, err := b.cq.Wait(context.Background(), wcs[:]); err != nil {
			return 0, err
		}
		if wcs[0].Status != qp.WCSuccess {
			return 0, errors.New(wcs[0].Status.String())
		}
		if wcs[0].Opcode == op {
			return int(wcs[0].ByteLen), nil
		}
	}
}

func connLen(k int) int { return 1 + k*977%connMax }

// dial makes connection k; those of even number it ends itself.
func (e *connEnd) dial(to netip.AddrPort, k int) error {
	return e.connection(func(a provider.ConnAttr, b *connBuf) error {
		a.Private = binary.BigEndian.AppendUint32(nil, uint32(k))
		c, err := e.pd.Dial(context.Background(), to, a)
		if err != nil {
			return fmt.Errorf("connection %d: %w", k, err)
		}
		n := connLen(k)
		harness.Fill(b.out[:n], uint64(k))
		if err := b.send(c.QP, n); err != nil {
			return err
		}
		got, err := b.wait(qp.WCRecv)
		if err == nil && (got != n || !bytes.Equal(b.in[:n], b.out[:n])) {
			err = errors.New("it is another")
		}
		if err != nil {
			return fmt.Errorf("connection %d: the answer: %w", k, err)
		}
		if k%2 != 0 {
			<-c.Done()
		}
		return c.Close()
	})
}

func (e *connEnd) serve(r *provider.ConnRequest) error {
	return e.connection(func(a provider.ConnAttr, b *connBuf) error {
		k := int(binary.BigEndian.Uint32(r.Private))
		c, err := r.Accept(context.Background(), e.pd, a)
		if err != nil {
			return fmt.Errorf("connection %d: %w", k, err)
		}
		n, want := connLen(k), make([]byte, connMax)
		harness.Fill(want[:n], uint64(k))
		got, err := b.wait(qp.WCRecv)
		if err == nil && (got != n || !bytes.Equal(b.in[:n], want[:n])) {
			err = errors.New("it is another")
		}
		if err != nil {
			return fmt.Errorf("connection %d: the message: %w", k, err)
		}
		copy(b.out, b.in[:n])
		if err := b.send(c.QP, n); err != nil {
			return err
		}
		if k%2 == 0 {
			<-c.Done() // the client has the answer, whether we know of that or not
		} else if _, err := b.wait(qp.WCSend); err != nil {
			return fmt.Errorf("connection %d: the answer: %w", k, err)
		}
		return c.Close()
	})
}
