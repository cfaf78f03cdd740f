// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

// cable is two engines in real time, each with its background goroutine, on a link
// in memory without faults.
type cable struct {
	dev   [2]*provider.Device
	pd    [2]*provider.PD
	lines []*line
}

// line is a pair of connected QPs; the first one's side begins.
type line struct {
	qp   [2]*provider.QP
	cq   *provider.CQ // of the first
	rcq  *provider.CQ // of the second
	gid  [2]provider.GID
	data *mr.Memory
	mr   *provider.MR
	id   uint64
}

const lineData = 1 << 20

func newCable(lines int) (*cable, error) {
	c := new(cable)
	net := taptest.New(nil, harness.Frames(taptest.Config{}))
	net.Port(0)
	net.Port(1)
	var err error
	for i := range c.dev {
		if c.dev[i], err = provider.Open(provider.Config{Device: net.Port(i), Addrs: harness.Addrs(i)}); err != nil {
			return nil, err
		}
		if c.pd[i], err = c.dev[i].AllocPD(); err != nil {
			return nil, err
		}
	}
	for range lines {
		l := new(line)
		if l.data, err = mr.Alloc(lineData); err != nil {
			return nil, err
		}
		harness.Fill(l.data.Bytes(), uint64(len(c.lines)))
		if l.mr, err = c.pd[0].RegMR(l.data.Bytes(), mr.LocalWrite); err != nil {
			return nil, err
		}
		for i, d := range c.dev {
			cq, err := d.CreateCQ(64, nil)
			if err != nil {
				return nil, err
			}
			if i == 0 {
				l.cq = cq
			} else {
				l.rcq = cq
			}
			if l.gid[i], err = d.QueryGID(harness.GIDv4); err != nil {
				return nil, err
			}
			if l.qp[i], err = c.pd[i].CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: cq, RecvCQ: cq,
				Caps: qp.Caps{SendWR: 16, RecvWR: 1, SendSGE: 1, RecvSGE: 1}}); err != nil {
				return nil, err
			}
		}
		if err := l.connect(); err != nil {
			return nil, err
		}
		c.lines = append(c.lines, l)
	}
	return c, nil
}

// connect brings both QPs through RESET to RTS, and to Starting PSNs far from those before:
// the last connection's packets may still be under way, a probe of a WRITE that was refused
// say, and with the same numbers they would be this one's.
func (l *line) connect() error {
	for _, q := range l.qp {
		if err := q.Modify(provider.QPAttr{Attr: qp.Attr{State: qp.StateReset}}, qp.AttrState); err != nil {
			return fmt.Errorf("to RESET: %w", err)
		}
	}
	psn := [2]wire.PSN{wire.PSN(rand.Uint32N(1 << 24)), wire.PSN(rand.Uint32N(1 << 24))}
	for i, q := range l.qp {
		a := provider.QPAttr{
			Attr: qp.Attr{PathMTU: qp.MTU4096, DestQPN: l.qp[1-i].Num(), RQPSN: psn[1-i], SQPSN: psn[i], Access: allRights, Port: 1,
				MaxRdAtomic: 4, MaxDestRdAtomic: 4, MinRNRTimer: 1, Timeout: 16, RetryCnt: 7, RNRRetry: 7},
			AH: provider.AHAttr{DGID: l.gid[1-i], SGIDIndex: harness.GIDv4, PortNum: 1},
		}
		if err := harness.Up(q, a, qp.StateRTS); err != nil {
			return err
		}
	}
	return nil
}

// write writes the line's first n bytes and waits for the completion.
func (l *line) write(to *provider.MR, addr uintptr, n int) (wc qp.WC, err error) {
	return l.do(qp.SendWR{Opcode: qp.WRWrite, SGL: []qp.SGE{l.sge(0, n)}, RemoteAddr: uint64(addr), RKey: to.RKey()})
}

// sge names n bytes of the line's data.
func (l *line) sge(off, n int) qp.SGE {
	return qp.SGE{Addr: uint64(l.data.Addr()) + uint64(off), Length: uint32(n), LKey: l.mr.LKey()}
}

// do posts a work request and waits for its completion.
func (l *line) do(wr qp.SendWR) (wc qp.WC, err error) {
	l.id++
	wr.ID, wr.Flags = l.id, qp.SendSignaled
	if _, err := l.qp[0].PostSend([]qp.SendWR{wr}); err != nil {
		return wc, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), hang)
	defer cancel()
	one := make([]qp.WC, 1)
	if _, err := l.cq.Wait(ctx, one); err != nil {
		return wc, fmt.Errorf("wait for %v (QPs in %v and %v): %w", wr, l.qp[0].State(), l.qp[1].State(), err)
	}
	if one[0].ID != l.id {
		return wc, fmt.Errorf("completion %d, want %d", one[0].ID, l.id)
	}
	return one[0], nil
}

func (c *cable) close() error {
	var errs []error
	for _, d := range c.dev {
		errs = append(errs, d.Close())
	}
	for _, l := range c.lines {
		errs = append(errs, l.data.Close())
	}
	return errors.Join(errs...)
}

// A Go application touches cold memory with copy while garbage is collected without
// a pause and the engines write to other cold memory.
func TestCollectorStorm(t *testing.T) { runScenario(t, 2*hang, plainStart, "collect") }

func collect() error {
	const (
		part    = 4 << 20
		writers = 2
		copiers = 3
		piece   = 20_000 // bytes, not a number of pages
	)
	c, err := newCable(writers)
	if err != nil {
		return err
	}
	var done atomic.Bool
	var collections int
	var gc sync.WaitGroup
	gc.Add(1)
	go func() {
		defer gc.Done()
		for !done.Load() {
			runtime.GC()
			collections++
		}
	}()
	rounds := 0
	for end := time.Now().Add(1500 * time.Millisecond); rounds == 0 || time.Now().Before(end); rounds++ {
		mem, err := mr.Alloc(part * (writers + copiers))
		if err != nil {
			return err
		}
		region, err := c.pd[1].RegMR(mem.Bytes(), allRights)
		if err != nil {
			return err
		}
		if region.Paging() != mr.UserFault {
			return fmt.Errorf("memory is paged by %v", region.Paging())
		}
		errs := make([]error, writers+copiers)
		var wg sync.WaitGroup
		for i := range writers + copiers {
			wg.Add(1)
			go func() {
				defer wg.Done()
				src := c.lines[0].data.Bytes()
				if i < writers {
					src = c.lines[i].data.Bytes()
				}
				b := mem.Bytes()[i*part : (i+1)*part]
				for _, k := range rand.Perm(part / piece) {
					dst := b[k*piece : (k+1)*piece]
					if i >= writers {
						copy(dst, src[:piece])
					} else if wc, err := c.lines[i].write(region, mem.Addr()+uintptr(i*part+k*piece), piece); err != nil || wc.Status != qp.WCSuccess {
						errs[i] = fmt.Errorf("%w: %+v", err, wc)
						return
					}
				}
				for k := range part / piece {
					if d := differ(b[k*piece:(k+1)*piece], src); d != piece {
						errs[i] = fmt.Errorf("part %d has wrong data at byte %d", i, k*piece+d)
						return
					}
				}
			}()
		}
		wg.Wait()
		if err := errors.Join(append(errs, region.Dereg(), mem.Close())...); err != nil {
			return err
		}
	}
	done.Store(true)
	gc.Wait()
	st := c.dev[1].Space().Stats()
	fmt.Printf("%d rounds, %d collections, %+v\n", rounds, collections, st)
	if collections < 3 || st.AppFaults == 0 || st.PageFaults == 0 {
		return fmt.Errorf("%d collections, %+v: nothing was tested", collections, st)
	}
	return c.close()
}
