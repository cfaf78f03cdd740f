// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

func wantErr(t *testing.T, what string, err, want error, no syscall.Errno) {
	t.Helper()
	if !errors.Is(err, want) || provider.Errno(err) != no {
		t.Errorf("%s: %v (%v), want %v (%v)", what, err, provider.Errno(err), want, no)
	}
}

func TestOpenErrors(t *testing.T) {
	small := taptest.New(nil, taptest.Config{MTU: 300})
	port := taptest.New(nil, taptest.Config{}).Port(0)
	for name, cfg := range map[string]provider.Config{
		"multicast MAC":     {Device: port, MAC: net.HardwareAddr{1, 2, 3, 4, 5, 6}},
		"short MAC":         {Device: port, MAC: net.HardwareAddr{2, 2}},
		"multicast address": {Device: port, Addrs: []netip.Prefix{netip.MustParsePrefix("224.0.0.1/24")}},
		"no address":        {Device: port, Addrs: []netip.Prefix{{}}},
		"MTU":               {Device: small.Port(0)},
	} {
		_, err := provider.Open(cfg)
		wantErr(t, name, err, provider.ErrInvalid, syscall.EINVAL)
	}
	if _, err := provider.Open(provider.Config{Port: "no/such"}); provider.Errno(err) != syscall.EINVAL {
		t.Errorf("bad port name: %v", err)
	}
}

func TestQuery(t *testing.T) {
	p := harness.NewPair(t, taptest.Config{MTU: 1500})
	a := p.Dev[0].Query()
	if a.MaxQP < 1000 || a.MaxSGE < 4 || a.MaxMRSize < 1<<32 || a.PhysPortCnt != 1 || a.NodeGUID == 0 || a.NodeGUID == p.Dev[1].Query().NodeGUID {
		t.Errorf("device %+v", a)
	}
	pa := p.Dev[0].QueryPort()
	if pa.State != provider.PortActive || pa.ActiveMTU != qp.MTU1024 || pa.MaxMTU != qp.MTU4096 || pa.GIDTblLen != 3 || pa.LinkLayer != provider.LinkLayerEthernet {
		t.Errorf("port %+v", pa)
	}
	if m := harness.NewPair(t, link).Dev[0].QueryPort().ActiveMTU; m != qp.MTU4096 {
		t.Errorf("active MTU on a jumbo link: %d bytes", m.Bytes())
	}
	// A path MTU above the port's is refused.
	e := harness.NewEnd(t, p.Dev[0], harness.ConnOptions{Mem: 4096})
	f := harness.NewEnd(t, p.Dev[1], harness.ConnOptions{Mem: 4096})
	err := harness.Up(e.QP, harness.ConnOptions{MTU: qp.MTU2048}.Attrs(0, f), qp.StateRTR)
	wantErr(t, "path MTU above the port's", err, qp.ErrAttrValue, syscall.EINVAL)
}

// Objects in use can not be destroyed, those destroyed not be used.
func TestBusy(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{SRQ: true, Channel: true, Mem: 4096})
	e := c.B
	wantErr(t, "dealloc PD", e.PD.Dealloc(), provider.ErrBusy, syscall.EBUSY)
	wantErr(t, "destroy CQ", e.CQ.Destroy(), provider.ErrBusy, syscall.EBUSY)
	wantErr(t, "destroy SRQ", e.SRQ.Destroy(), provider.ErrBusy, syscall.EBUSY)
	wantErr(t, "destroy channel", e.Ch.Destroy(), provider.ErrBusy, syscall.EBUSY)
	if err := e.QP.Destroy(); err != nil {
		t.Fatal(err)
	}
	wantErr(t, "destroy QP twice", e.QP.Destroy(), provider.ErrClosed, syscall.EBADF)
	wantErr(t, "dealloc PD", e.PD.Dealloc(), provider.ErrBusy, syscall.EBUSY)
	for _, err := range []error{e.CQ.Destroy(), e.SRQ.Destroy(), e.Ch.Destroy()} {
		if err != nil {
			t.Fatal(err)
		}
	}
	wantErr(t, "dealloc PD", e.PD.Dealloc(), provider.ErrBusy, syscall.EBUSY) // the region
	if err := e.MR.Dereg(); err != nil {
		t.Fatal(err)
	}
	if err := e.PD.Dealloc(); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"CQ": e.CQ.Destroy(), "SRQ": e.SRQ.Destroy(), "channel": e.Ch.Destroy(), "PD": e.PD.Dealloc(), "MR": e.MR.Dereg(),
		"modify": e.QP.Modify(provider.QPAttr{}, 0), "resize": e.CQ.Resize(10),
	} {
		wantErr(t, "second time: "+name, err, provider.ErrClosed, syscall.EBADF)
	}
	if _, _, err := e.QP.Query(); !errors.Is(err, provider.ErrClosed) {
		t.Errorf("query a destroyed QP: %v", err)
	}
	if _, err := e.QP.PostSend([]qp.SendWR{e.Message(1, 0, 1)}); !errors.Is(err, provider.ErrClosed) {
		t.Errorf("post to a destroyed QP: %v", err)
	}
	if _, err := e.SRQ.PostRecv([]qp.RecvWR{{}}); !errors.Is(err, provider.ErrClosed) {
		t.Errorf("post to a destroyed SRQ: %v", err)
	}
	if n := e.CQ.Poll(make([]qp.WC, 1)); n != 0 {
		t.Error("polled a destroyed CQ")
	}
	if _, err := e.PD.RegMR(make([]byte, 10), mr.LocalWrite); !errors.Is(err, provider.ErrClosed) {
		t.Errorf("register in a PD that is gone: %v", err)
	}
}

func TestLimits(t *testing.T) {
	p := harness.NewPair(t, link)
	d := p.Dev[0]
	e := harness.NewEnd(t, d, harness.ConnOptions{Mem: 4096})
	other := harness.NewEnd(t, p.Dev[1], harness.ConnOptions{Mem: 4096})
	a := d.Query()
	create := func(c qp.Caps) error {
		q, err := e.PD.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: e.CQ, RecvCQ: e.CQ, Caps: c})
		if err == nil {
			got := q.Caps()
			if got.SendWR < c.SendWR || got.RecvWR < c.RecvWR || got.SendSGE < c.SendSGE || got.RecvSGE < c.RecvSGE || got.Inline < c.Inline {
				t.Errorf("asked for %+v, got %+v", c, got)
			}
			err = q.Destroy()
		}
		return err
	}
	if err := create(qp.Caps{SendWR: a.MaxQPWR, RecvWR: a.MaxQPWR, SendSGE: a.MaxSGE, RecvSGE: a.MaxSGE, Inline: a.MaxInline}); err != nil {
		t.Errorf("the device's limits: %v", err)
	}
	if err := create(qp.Caps{}); err != nil {
		t.Errorf("no capacities: %v", err)
	}
	for _, c := range []qp.Caps{{SendWR: a.MaxQPWR + 1}, {RecvWR: a.MaxQPWR + 1}, {SendSGE: a.MaxSGE + 1}, {RecvSGE: a.MaxSGE + 1}, {Inline: a.MaxInline + 1}, {SendWR: -1}} {
		wantErr(t, "beyond the limits", create(c), provider.ErrInvalid, syscall.EINVAL)
	}
	for _, n := range []int{0, -1, a.MaxCQE + 1} {
		_, err := d.CreateCQ(n, nil)
		wantErr(t, "CQ size", err, provider.ErrInvalid, syscall.EINVAL)
	}
	for _, s := range []provider.SRQAttr{{}, {MaxWR: a.MaxSRQWR + 1}, {MaxWR: 1, MaxSGE: a.MaxSRQSGE + 1}} {
		_, err := e.PD.CreateSRQ(s)
		wantErr(t, "SRQ size", err, provider.ErrInvalid, syscall.EINVAL)
	}
	for name, in := range map[string]provider.QPInitAttr{
		"no CQ":                {Type: qp.TypeRC, RecvCQ: e.CQ},
		"CQ of another device": {Type: qp.TypeRC, SendCQ: other.CQ, RecvCQ: e.CQ},
		"a service not there":  {Type: 77, SendCQ: e.CQ, RecvCQ: e.CQ},
		"a target of no XRCD":  {Type: qp.TypeXRCRecv, SendCQ: e.CQ, RecvCQ: e.CQ},
	} {
		if _, err := e.PD.CreateQP(in); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := e.PD.Register(provider.MRAttr{Length: a.MaxMRSize + 1}); provider.Errno(err) != syscall.EINVAL {
		t.Errorf("region too large: %v", err)
	}
	if _, err := e.PD.Register(provider.MRAttr{Addr: 4096, Length: 4096}); provider.Errno(err) != syscall.EFAULT {
		t.Errorf("region that is not mapped: %v, errno %v", err, provider.Errno(err))
	}
	if _, err := e.PD.RegMR(make([]byte, 4096), mr.RemoteWrite); provider.Errno(err) != syscall.EINVAL {
		t.Errorf("remote write without local write: %v", err)
	}
	// Failed creations left nothing behind.
	for _, err := range []error{e.QP.Destroy(), e.MR.Dereg(), e.CQ.Destroy(), e.PD.Dealloc()} {
		if err != nil {
			t.Error(err)
		}
	}
}

func TestModifyErrors(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{Mem: 4096})
	q := harness.NewEnd(t, p.Dev[0], harness.ConnOptions{Mem: 4096}).QP
	a := harness.ConnOptions{}.Attrs(0, c.B)
	a.State = qp.StateRTR
	asked := p.Dev[0].Stats().ARPRequests
	a.AH.DGID = provider.GIDOf(netip.MustParseAddr("10.91.0.200"))
	wantErr(t, "RESET to RTR", q.Modify(a, harness.MaskRTR), qp.ErrTransition, syscall.EINVAL)
	if err := harness.Up(q, a, qp.StateInit); err != nil {
		t.Fatal(err)
	}
	wantErr(t, "RTR without RQ_PSN", q.Modify(a, harness.MaskRTR&^qp.AttrRQPSN), qp.ErrAttrMask, syscall.EINVAL)
	wantErr(t, "RTR with SQ_PSN", q.Modify(a, harness.MaskRTR|qp.AttrSQPSN), qp.ErrAttrMask, syscall.EINVAL)
	if p.Dev[0].Stats().ARPRequests != asked {
		t.Error("a transition that is not allowed asked for a neighbour")
	}
	wantErr(t, "silent peer", q.Modify(a, harness.MaskRTR), provider.ErrTimeout, syscall.ETIMEDOUT)
	bad := a
	bad.AH.SGIDIndex = 50
	wantErr(t, "SGID index", q.Modify(bad, harness.MaskRTR), provider.ErrInvalid, syscall.EINVAL)
	bad = a
	bad.AH.DGID = provider.GIDOf(netip.MustParseAddr("224.0.0.9"))
	wantErr(t, "group", q.Modify(bad, harness.MaskRTR), provider.ErrInvalid, syscall.EINVAL)
	bad.AH.DGID = provider.GIDOf(netip.MustParseAddr("192.0.2.1"))
	wantErr(t, "unreachable", q.Modify(bad, harness.MaskRTR), provider.ErrUnreachable, syscall.ENETUNREACH)
	wantErr(t, "alternate path", q.Modify(a, harness.MaskRTR|qp.AttrAltPath), provider.ErrNotSupported, syscall.EOPNOTSUPP)
	bad = harness.ConnOptions{}.Attrs(0, c.B)
	bad.State, bad.MaxDestRdAtomic = qp.StateRTR, 255
	wantErr(t, "max_dest_rd_atomic", q.Modify(bad, harness.MaskRTR), qp.ErrAttrValue, syscall.EINVAL)
	if q.State() != qp.StateInit {
		t.Errorf("failed calls left the QP in %v", q.State())
	}
	if _, err := q.PostSend([]qp.SendWR{{}}); !errors.Is(err, qp.ErrState) {
		t.Errorf("post send in INIT: %v", err)
	}

	got, in, err := c.A.QP.Query()
	if err != nil {
		t.Fatal(err)
	}
	want := harness.ConnOptions{}.Attrs(0, c.B)
	if got.State != qp.StateRTS || got.AH != want.AH || got.DestQPN != c.B.QP.Num() || got.PathMTU != want.PathMTU ||
		got.Timeout != want.Timeout || got.MaxRdAtomic != want.MaxRdAtomic || in.SendCQ != c.A.CQ || in.Caps.SendWR < 128 {
		t.Errorf("query: %+v %+v", got, in)
	}
	if got.Path.SrcPort < 0xc000 || got.Path.DstMAC != [6]byte(p.Dev[1].MAC()) {
		t.Errorf("path %+v", got.Path)
	}
	// RESET empties the QP; it can be brought up again.
	if err := c.A.QP.Modify(provider.QPAttr{Attr: qp.Attr{State: qp.StateReset}}, qp.AttrState); err != nil {
		t.Fatal(err)
	}
	if got, _, _ := c.A.QP.Query(); got.AH != (provider.AHAttr{}) || got.State != qp.StateReset {
		t.Errorf("after RESET: %+v", got)
	}
	if err := c.B.QP.Modify(provider.QPAttr{Attr: qp.Attr{State: qp.StateReset}}, qp.AttrState); err != nil {
		t.Fatal(err)
	}
	c.Bring(qp.StateRTS)
	c.B.Recv(1, 0, 10)
	c.A.Send(c.A.Message(2, 0, 10))
	c.WaitOK(c.B, 1)
	c.WaitOK(c.A, 2)
}

func TestCompletionChannel(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{Channel: true, Mem: 4096})
	ctx := context.Background()
	if cq, ok := c.B.Ch.TryWait(); ok {
		t.Fatalf("event of %v before anything was armed", cq)
	}
	send := func(flags qp.SendFlags) {
		t.Helper()
		c.B.Recv(1, 0, 10)
		wr := c.A.Message(2, 0, 10)
		wr.Flags |= flags
		c.A.Send(wr)
		c.WaitOK(c.A, 2)
	}
	c.B.CQ.ReqNotify(false)
	send(0)
	cq, err := c.B.Ch.Wait(ctx)
	if err != nil || cq != c.B.CQ {
		t.Fatalf("wait: %v, %v", cq, err)
	}
	cq.AckEvents(1)
	send(0)
	if _, ok := c.B.Ch.TryWait(); ok {
		t.Error("a second event for one arming")
	}
	c.B.CQ.ReqNotify(true)
	send(0)
	if _, ok := c.B.Ch.TryWait(); ok {
		t.Error("an event for a completion that is not solicited")
	}
	send(qp.SendSolicited)
	if cq, ok := c.B.Ch.TryWait(); !ok {
		t.Error("no event for a solicited completion")
	} else {
		cq.AckEvents(1)
	}
	if n := len(c.B.Poll()); n != 4 {
		t.Errorf("%d completions", n)
	}
	// Waiting makes progress, also for what arrives later.
	c.B.CQ.ReqNotify(false)
	c.B.Recv(1, 0, 10)
	c.A.Send(c.A.Message(2, 0, 10))
	if cq, err = c.B.Ch.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	// Destroying the CQ waits for the acknowledgement.
	if err := c.B.QP.Destroy(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() { done <- c.B.CQ.Destroy() }()
	select {
	case <-done:
		t.Fatal("CQ destroyed while an event was not acknowledged")
	case <-time.After(20 * time.Millisecond): // that it does not happen takes time
	}
	cq.AckEvents(1)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	expired, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := c.A.Ch.Wait(expired); !errors.Is(err, context.Canceled) {
		t.Errorf("wait with a context that is over: %v", err)
	}
}

func TestCQWait(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{Mem: 4096})
	wcs := make([]qp.WC, 4)
	c.B.Recv(1, 0, 10)
	c.A.Send(c.A.Message(2, 0, 10))
	if n, err := c.B.CQ.Wait(context.Background(), wcs); n != 1 || err != nil || wcs[0].ID != 1 {
		t.Fatalf("wait: %d, %v", n, err)
	}
	if n, err := c.A.CQ.Wait(context.Background(), wcs); n != 1 || err != nil || wcs[0].ID != 2 {
		t.Fatalf("wait: %d, %v", n, err)
	}
}

// A CQ that is too small fails, and its QPs with it.
func TestCQOverrun(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{CQE: 4, Mem: 4096})
	for i := range 6 {
		c.A.Send(c.A.Write(c.B, uint64(i), 0, 0, 10))
		p.Settle()
	}
	types := map[qp.EventType]int{}
	for {
		e, ok := c.A.Dev.TryAsyncEvent()
		if !ok {
			break
		}
		types[e.Type]++
		e.Ack()
	}
	if types[qp.EventCQErr] != 1 || types[qp.EventQPFatal] != 1 || c.A.QP.State() != qp.StateErr {
		t.Errorf("events %v, QP in %v", types, c.A.QP.State())
	}
	if err := c.A.QP.Destroy(); err != nil {
		t.Error(err)
	}
}

// What is flushed when a CQ has overflowed can be too much for another CQ, and then its
// queue pairs fail, too.
func TestCQOverrunSpreads(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{CQE: 4, Mem: 4096})
	small, err := c.A.Dev.CreateCQ(4, nil)
	if err != nil {
		t.Fatal(err)
	}
	create := func(send, recv *provider.CQ) *provider.QP {
		q, err := c.A.PD.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: send, RecvCQ: recv, Caps: qp.Caps{SendWR: 16, RecvWR: 16}})
		if err == nil {
			err = harness.Up(q, harness.ConnOptions{}.Attrs(0, c.B), qp.StateInit)
		}
		for i := range 8 {
			if err == nil {
				_, err = q.PostRecv([]qp.RecvWR{{ID: uint64(i)}})
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		return q
	}
	// Made first, as QPs fail in the order of their making: by when the CQ of the second
	// overflows it has been passed by.
	third, second := create(small, small), create(c.A.CQ, small)
	for i := range 6 {
		c.A.Send(c.A.Write(c.B, uint64(i), 0, 0, 10))
		p.Settle()
	}
	for i, q := range []*provider.QP{c.A.QP, second, third} {
		if s := q.State(); s != qp.StateErr {
			t.Errorf("QP %d is in %v", i, s)
		}
	}
}

func TestCQResize(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{CQE: 16, Mem: 4096})
	for i := range 8 {
		c.A.Send(c.A.Write(c.B, uint64(i), 0, 0, 10))
	}
	p.Settle()
	if err := c.A.CQ.Resize(2); provider.Errno(err) != syscall.EINVAL {
		t.Errorf("resize below what waits: %v", err)
	}
	if err := c.A.CQ.Resize(100); err != nil || c.A.CQ.Entries() < 100 {
		t.Errorf("resize: %v, %d entries", err, c.A.CQ.Entries())
	}
	for i, wc := range c.A.Poll() {
		if wc.ID != uint64(i) {
			t.Errorf("completion %d is of %d", i, wc.ID)
		}
	}
}

func TestSRQLimit(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{SRQ: true, Mem: 4096})
	for i := range 4 {
		c.B.Recv(uint64(i), 0, 10)
	}
	if err := c.B.SRQ.Modify(provider.SRQAttr{Limit: 3}, provider.SRQLimit); err != nil {
		t.Fatal(err)
	}
	if a, err := c.B.SRQ.Query(); err != nil || a.Limit != 3 || a.MaxWR < 128 {
		t.Errorf("query %+v, %v", a, err)
	}
	c.A.Send(c.A.Message(1, 0, 10))
	c.WaitOK(c.A, 1)
	if e, ok := c.B.Dev.TryAsyncEvent(); ok && e.Type == qp.EventSRQLimitReached {
		t.Error("limit event with as many left as the limit")
	}
	c.A.Send(c.A.Message(2, 0, 10))
	c.WaitOK(c.A, 2)
	found := false
	for {
		e, ok := c.B.Dev.TryAsyncEvent()
		if !ok {
			break
		}
		found = found || e.Type == qp.EventSRQLimitReached && e.SRQ == c.B.SRQ
		e.Ack()
	}
	if !found {
		t.Error("no limit event")
	}
	wantErr(t, "resize below what is posted", c.B.SRQ.Modify(provider.SRQAttr{MaxWR: 1}, provider.SRQMaxWR), qp.ErrAttrValue, syscall.EINVAL)
	wantErr(t, "resize too far", c.B.SRQ.Modify(provider.SRQAttr{MaxWR: c.B.Dev.Query().MaxSRQWR + 1}, provider.SRQMaxWR), provider.ErrInvalid, syscall.EINVAL)
	wantErr(t, "limit", c.B.SRQ.Modify(provider.SRQAttr{Limit: 1 << 20}, provider.SRQLimit), qp.ErrAttrValue, syscall.EINVAL)
}

// The TAP is taken away: everything outstanding is flushed, and calls say so.
func TestHotUnplug(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{Mem: 4096, Caps: qp.Caps{SendWR: 8, RecvWR: 8, SendSGE: 1, RecvSGE: 1}})
	c.A.Recv(1, 0, 10)
	p.Net.Port(0).Remove()
	if n, err := c.A.QP.PostSend([]qp.SendWR{c.A.Message(2, 0, 10), c.A.Message(3, 0, 10)}); err != nil || n != 2 {
		t.Fatalf("post before the loss was seen: %d, %v", n, err)
	}
	p.Dev[0].Progress()
	ids := map[uint64]qp.WCStatus{}
	for _, wc := range c.A.Poll() {
		ids[wc.ID] = wc.Status
	}
	for id := uint64(1); id <= 3; id++ {
		if st, ok := ids[id]; !ok || st != qp.WCWRFlushErr {
			t.Errorf("work request %d: %v, %v", id, st, ok)
		}
	}
	e, err := p.Dev[0].AsyncEvent(context.Background())
	if err != nil || e.Type != qp.EventDeviceFatal {
		t.Fatalf("event %+v, %v", e, err)
	}
	e.Ack()
	if _, ok := p.Dev[0].TryAsyncEvent(); ok {
		t.Error("a second event")
	}
	_, err = p.Dev[0].AllocPD()
	wantErr(t, "PD", err, provider.ErrGone, syscall.EIO)
	_, err = c.A.QP.PostSend([]qp.SendWR{c.A.Message(2, 0, 10)})
	wantErr(t, "post send", err, provider.ErrGone, syscall.EIO)
	_, err = c.A.QP.PostRecv([]qp.RecvWR{{}})
	wantErr(t, "post receive", err, provider.ErrGone, syscall.EIO)
	wantErr(t, "modify", c.A.QP.Modify(provider.QPAttr{}, qp.AttrState), provider.ErrGone, syscall.EIO)
	if st := p.Dev[0].QueryPort().State; st != provider.PortDown {
		t.Errorf("port is %v", st)
	}
	if err := c.A.QP.Destroy(); err != nil {
		t.Error(err)
	}
	if p.Dev[0].NextDeadline() != qp.Never {
		t.Error("a device without a port waits for something")
	}
}

func TestCloseLeaksNothing(t *testing.T) {
	harness.CheckLeaks(t, func() {
		n := taptest.New(nil, taptest.Config{})
		n.Port(0)
		n.Port(1)
		var devs []*provider.Device
		for i := range 2 {
			d, err := provider.Open(provider.Config{Device: n.Port(i), Addrs: harness.Addrs(i)})
			if err != nil {
				t.Fatal(err)
			}
			devs = append(devs, d)
		}
		pd, err := devs[0].AllocPD()
		if err != nil {
			t.Fatal(err)
		}
		ch, _ := devs[0].CreateCompChannel()
		cq, err := devs[0].CreateCQ(16, ch)
		if err != nil {
			t.Fatal(err)
		}
		srq, err := pd.CreateSRQ(provider.SRQAttr{MaxWR: 16, MaxSGE: 1})
		if err != nil {
			t.Fatal(err)
		}
		mem, err := mr.Alloc(1 << 16)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pd.RegMR(mem.Bytes(), mr.LocalWrite); err != nil {
			t.Fatal(err)
		}
		if _, err := pd.CreateAH(provider.AHAttr{DGID: provider.GIDOf(harness.Addrs(1)[0].Addr()), SGIDIndex: 1}); err != nil {
			t.Fatal(err)
		}
		for range 4 {
			if _, err := pd.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: cq, RecvCQ: cq, SRQ: srq}); err != nil {
				t.Fatal(err)
			}
		}
		// Those who wait are told.
		waiting := make(chan error, 2)
		go func() { _, err := ch.Wait(context.Background()); waiting <- err }()
		go func() { _, err := devs[0].AsyncEvent(context.Background()); waiting <- err }()
		for _, d := range devs {
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
			if err := d.Close(); !errors.Is(err, provider.ErrClosed) {
				t.Fatalf("closed twice: %v", err)
			}
		}
		for range 2 {
			if err := <-waiting; !errors.Is(err, provider.ErrClosed) {
				t.Fatalf("a wait ended with %v", err)
			}
		}
		if _, err := pd.CreateSRQ(provider.SRQAttr{MaxWR: 1}); !errors.Is(err, provider.ErrClosed) {
			t.Fatalf("a call after Close: %v", err)
		}
		if err := mem.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

func TestErrno(t *testing.T) {
	for err, no := range map[error]syscall.Errno{
		nil: 0, qp.ErrFull: syscall.ENOMEM, qp.ErrType: syscall.EOPNOTSUPP, qp.ErrState: syscall.EINVAL, qp.ErrHasSRQ: syscall.EINVAL,
		qp.ErrLength: syscall.EINVAL, qp.ErrFlush: syscall.EINVAL, qp.ErrOpcode: syscall.EINVAL, mr.ErrNoMem: syscall.ENOMEM, context.Canceled: syscall.ECANCELED,
		syscall.EXDEV: syscall.EXDEV, errors.New("x"): syscall.EIO,
	} {
		if got := provider.Errno(err); got != no {
			t.Errorf("Errno(%v) = %v, want %v", err, got, no)
		}
	}
}
