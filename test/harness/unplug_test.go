// SPDX-License-Identifier: Apache-2.0

package harness_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

const (
	unplugMem  = 1 << 18
	unplugHalf = unplugMem / 2
)

// side is one end of a connection in TestUnplug, and who works on it.
type side struct {
	*harness.End
	dev *provider.Device
	reg *provider.MR // of the memory that outlives the device
	mem []byte
	// mute is connected with a QP that is not there and has no timeout: what is posted to
	// it is outstanding until the device is gone, however far all other work is by then.
	mute *provider.QP

	sent, received    atomic.Int64 // work requests that were taken
	sends, receives   atomic.Int64 // that have completed
	success, lost     atomic.Int64 // lost: the mute QP's that were flushed
	unexpected, stray atomic.Int64 // neither a success nor flushed; the mute QP's that were not flushed
}

// muteWork is how many work requests are posted to each queue of a mute QP.
const muteWork = 3

// plug connects a side's QPs.
func (s *side) plug(a provider.QPAttr, caps qp.Caps) (err error) {
	if err = harness.Up(s.QP, a, qp.StateRTS); err != nil {
		return err
	}
	if s.mute, err = s.PD.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: s.CQ, RecvCQ: s.CQ, Caps: caps, SQSigAll: true}); err != nil {
		return err
	}
	a.DestQPN, a.Timeout = wire.QPNMask-1, 0
	if err = harness.Up(s.mute, a, qp.StateRTS); err != nil {
		return err
	}
	for range muteWork {
		if _, err = s.mute.PostSend([]qp.SendWR{{Opcode: qp.WRSend, SGL: s.sge(0, 200)}}); err != nil {
			return err
		}
		if _, err = s.mute.PostRecv([]qp.RecvWR{{SGL: s.sge(0, 256)}}); err != nil {
			return err
		}
	}
	return nil
}

func (s *side) sge(off, n int) []qp.SGE {
	return []qp.SGE{{Addr: s.reg.IOVA() + uint64(off), Length: uint32(n), LKey: s.reg.LKey()}}
}

func (s *side) recv() error {
	n, err := s.QP.PostRecv([]qp.RecvWR{{ID: 1 << 32, SGL: s.sge(0, 256)}})
	s.received.Add(int64(n))
	return err
}

// post sends everything at full speed until the device does not take it any more.
func (s *side) post(peer *side, stop *atomic.Bool) error {
	ops := [...]qp.SendWR{{Opcode: qp.WRWrite, SGL: s.sge(0, 20_000)}, {Opcode: qp.WRSend, SGL: s.sge(0, 200)}, {Opcode: qp.WRRead, SGL: s.sge(unplugHalf, 9_000)}}
	for i := 0; !stop.Load(); i++ {
		wr := ops[i%len(ops)]
		wr.Flags = qp.SendSignaled
		if wr.Opcode != qp.WRSend {
			wr.RemoteAddr, wr.RKey = peer.reg.IOVA()+unplugHalf, peer.reg.RKey()
		}
		n, err := s.QP.PostSend([]qp.SendWR{wr})
		s.sent.Add(int64(n))
		switch {
		case errors.Is(err, qp.ErrFull):
			runtime.Gosched()
		case err != nil:
			return err
		}
	}
	return nil
}

// wait takes completions until there will be no more.
func (s *side) wait(ctx context.Context) error {
	wcs := make([]qp.WC, 32)
	for {
		n, err := s.CQ.Wait(ctx, wcs)
		s.count(wcs[:n])
		if err != nil {
			return err
		}
	}
}

func (s *side) count(wcs []qp.WC) {
	for _, wc := range wcs {
		switch {
		case wc.QPN == s.mute.Num():
			if wc.Status == qp.WCWRFlushErr {
				s.lost.Add(1)
			} else {
				s.stray.Add(1)
			}
			continue
		case wc.Status == qp.WCSuccess:
			s.success.Add(1)
		case wc.Status != qp.WCWRFlushErr && wc.Status != qp.WCRetryExcErr: // the other end may be gone already
			s.unexpected.Add(1)
		}
		if wc.ID == 0 {
			s.sends.Add(1)
			continue
		}
		s.receives.Add(1)
		if wc.Status == qp.WCSuccess {
			_ = s.recv() // refused by a device that is gone
		}
	}
}

// unplugged is what the application of a device that is gone finds.
func (s *side) unplugged() error {
	wcs := make([]qp.WC, 32)
	for end := time.Now().Add(time.Minute); s.sends.Load() != s.sent.Load() || s.receives.Load() != s.received.Load() || s.lost.Load() < 2*muteWork; {
		s.count(wcs[:s.CQ.Poll(wcs)])
		if time.Now().After(end) {
			return fmt.Errorf("%d of %d sends and %d of %d receives completed, %d of %d were flushed that nobody answers", s.sends.Load(), s.sent.Load(),
				s.receives.Load(), s.received.Load(), s.lost.Load(), 2*muteWork)
		}
	}
	if n := s.CQ.Poll(wcs); n != 0 {
		return fmt.Errorf("%d completions too many: %+v", n, wcs[0])
	}
	if s.unexpected.Load() > 0 || s.stray.Load() > 0 {
		return fmt.Errorf("%d ended in another error than being flushed, %d that nobody answers", s.unexpected.Load(), s.stray.Load())
	}
	if e, ok := s.dev.TryAsyncEvent(); ok {
		return fmt.Errorf("a second event: %+v", e)
	}
	_, pd := s.dev.AllocPD()
	_, cq := s.dev.CreateCQ(4, nil)
	_, ch := s.dev.CreateCompChannel()
	_, reg := s.PD.RegMR(s.mem, mr.LocalWrite)
	_, q := s.PD.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: s.CQ, RecvCQ: s.CQ})
	_, gid := s.dev.QueryGID(0)
	_, _, query := s.QP.Query()
	_, wait := s.CQ.Wait(context.Background(), wcs)
	_, event := s.dev.AsyncEvent(context.Background())
	_, send := s.QP.PostSend([]qp.SendWR{{}})
	_, recv := s.QP.PostRecv([]qp.RecvWR{{}})
	for what, err := range map[string]error{
		"PD": pd, "CQ": cq, "channel": ch, "region": reg, "QP": q, "GID": gid, "query": query, "wait": wait, "event": event,
		"send": send, "receive": recv, "resize": s.CQ.Resize(64), "modify": s.QP.Modify(provider.QPAttr{Attr: qp.Attr{State: qp.StateErr}}, qp.AttrState),
		"advise": s.PD.AdviseMR(mr.Prefetch, 0, s.sge(0, 1)), "unplug": s.dev.Unplug(),
		"reregister": s.reg.Reregister(mr.ChangeAccess, nil, provider.MRAttr{}),
	} {
		if provider.Errno(err) != syscall.EIO {
			return fmt.Errorf("%s: %v (%v)", what, err, provider.Errno(err))
		}
	}
	if st := s.dev.QueryPort().State; st != provider.PortDown {
		return fmt.Errorf("the port is %v", st)
	}
	return nil
}

// TestUnplug takes devices away under full traffic, again and again: their TAPs are
// deleted or their owner unplugs them, one end or both. Everything that was posted
// completes, those who wait are woken up, all calls say that the device is gone; and the
// next devices, on the next TAPs or the same, work with the same memory.
func TestUnplug(t *testing.T) {
	rounds := 24
	if testing.Short() {
		rounds = 8
	}
	var mems [2]*mr.Memory
	for i := range mems {
		m, err := mr.Alloc(unplugMem)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		mems[i] = m
	}
	err := fabric.WithNS(func() error {
		f, err := fabric.New(fabric.Config{})
		if err != nil {
			return err
		}
		defer f.Close()
		var ports [2]fabric.Port
		for i := range ports {
			if ports[i], err = f.AddPort(i); err != nil {
				return err
			}
		}
		for round := range rounds {
			deleted := round%2 == 0
			victims := [...]int{1, 2, 3}[round/2%3] // bits of the ends
			if err := unplugRound(t, f, &ports, &mems, uint64(round), victims, deleted); err != nil {
				return fmt.Errorf("round %d, ends %#b, deleted %v: %w", round, victims, deleted, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func unplugRound(t *testing.T, f *fabric.Fabric, ports *[2]fabric.Port, mems *[2]*mr.Memory, seed uint64, victims int, deleted bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var ends [2]*side
	o := harness.ConnOptions{Timeout: 17, Mem: 4096, Caps: qp.Caps{SendWR: 64, RecvWR: 64, SendSGE: 1, RecvSGE: 1}, MTU: qp.MTU4096,
		Access: mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead, GID: harness.GIDv4}
	for i := range ends {
		d, err := provider.Open(provider.Config{Port: ports[i].Name, MAC: ports[i].MAC[:], Addrs: []netip.Prefix{ports[i].V4, ports[i].V6}})
		if err != nil {
			return fmt.Errorf("open: %w", err)
		}
		defer d.Close()
		s := &side{End: harness.NewEnd(t, d, o), dev: d, mem: mems[i].Bytes()}
		if s.reg, err = s.PD.RegMR(s.mem, o.Access); err != nil {
			return fmt.Errorf("register: %w", err)
		}
		ends[i] = s
	}
	for i, s := range ends {
		a := o.Attrs(i, ends[1-i].End)
		a.RetryCnt, a.RNRRetry, a.MinRNRTimer, a.MaxRdAtomic, a.MaxDestRdAtomic = 7, 7, 1, 4, 4
		if err := s.plug(a, o.Caps); err != nil {
			return fmt.Errorf("connect: %w", err)
		}
	}
	// The device works.
	a, b := ends[0], ends[1]
	harness.Fill(a.mem[:unplugHalf], seed)
	wcs := make([]qp.WC, 1)
	if _, err := a.QP.PostSend([]qp.SendWR{{Opcode: qp.WRWrite, Flags: qp.SendSignaled, SGL: a.sge(0, unplugHalf), RemoteAddr: b.reg.IOVA() + unplugHalf, RKey: b.reg.RKey()}}); err != nil {
		return err
	}
	if n, err := a.CQ.Wait(ctx, wcs); n != 1 || err != nil || wcs[0].Status != qp.WCSuccess {
		return fmt.Errorf("WRITE: %d, %w, %+v", n, err, wcs[0])
	}
	if !bytes.Equal(a.mem[:unplugHalf], b.mem[unplugHalf:]) {
		return errors.New("WRITE: wrong data")
	}

	// Traffic, and those who only wait.
	var stop atomic.Bool
	type result struct {
		end  int
		what string
		err  error
	}
	results := make(chan result, 16)
	var left [2]int
	start := func(i int, what string, fn func() error) {
		left[i]++
		go func() { results <- result{i, what, fn()} }()
	}
	for i, s := range ends {
		for range 32 {
			if err := s.recv(); err != nil {
				return err
			}
		}
		ch, err := s.dev.CreateCompChannel()
		if err != nil {
			return err
		}
		cq, err := s.dev.CreateCQ(4, ch)
		if err != nil {
			return err
		}
		cq.ReqNotify(false)
		start(i, "post", func() error { return s.post(ends[1-i], &stop) })
		start(i, "poll", func() error { return s.wait(ctx) })
		start(i, "wait for a channel", func() error { _, err := ch.Wait(ctx); return err })
		start(i, "wait for an event", func() error {
			for fatal := 0; ; {
				e, err := s.dev.AsyncEvent(ctx)
				switch {
				case err == nil && e.Type == qp.EventDeviceFatal:
					fatal++
				case err == nil && e.Type == qp.EventPortErr: // a netdev that is deleted goes down first
				case errors.Is(err, provider.ErrGone) && fatal != 1:
					return fmt.Errorf("%d fatal events", fatal)
				default:
					return errors.Join(err, ctx.Err())
				}
				e.Ack()
			}
		})
	}
	for a.success.Load() < 200 || b.success.Load() < 200 {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		runtime.Gosched()
	}
	for i := range ends {
		switch {
		case victims&(1<<i) == 0:
		case deleted:
			if err := f.RemovePort(ports[i].Index); err != nil {
				return err
			}
		default:
			if err := ends[i].dev.Unplug(); err != nil {
				return err
			}
		}
	}
	for i := range ends {
		if victims&(1<<i) == 0 {
			continue
		}
		for left[i] > 0 {
			r := <-results
			left[r.end]--
			if victims&(1<<r.end) != 0 && !errors.Is(r.err, provider.ErrGone) {
				return fmt.Errorf("end %d: %s: %w", r.end, r.what, r.err)
			}
		}
		if err := ends[i].unplugged(); err != nil {
			return fmt.Errorf("end %d: %w", i, err)
		}
		for _, fn := range []func() error{ends[i].QP.Destroy, ends[i].mute.Destroy, ends[i].CQ.Destroy, ends[i].reg.Dereg} {
			if err := fn(); err != nil {
				return err
			}
		}
	}
	// A port that was given up is there for others at once, before its device is closed.
	if !deleted && victims&1 != 0 {
		d, err := provider.Open(provider.Config{Port: ports[0].Name})
		if err != nil {
			return fmt.Errorf("open the port that was given up: %w", err)
		}
		if err := d.Close(); err != nil {
			return err
		}
	}
	stop.Store(true)
	for i, s := range ends {
		if err := s.dev.Close(); err != nil {
			return fmt.Errorf("close: %w", err)
		}
		if deleted && victims&(1<<i) != 0 {
			var err error
			if ports[i], err = f.AddPort(ports[i].Index); err != nil {
				return err
			}
		}
	}
	for left[0]+left[1] > 0 {
		left[(<-results).end]--
	}
	return nil
}
