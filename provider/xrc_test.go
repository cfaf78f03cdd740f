// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/harness"
)

// must ends the test on an error.
func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// Domains and the files they are named by (ibv_open_xrcd(3)).
func TestXRCD(t *testing.T) {
	d := harness.NewPair(t, link).Dev[0]
	name := filepath.Join(t.TempDir(), "f")
	f := must(os.OpenFile(name, os.O_CREATE|os.O_WRONLY, 0))(t) // writable only: it is not read
	defer f.Close()
	fd := int(f.Fd())
	_, err := d.OpenXRCD(provider.XRCDAttr{FD: fd})
	wantErr(t, "no domain yet", err, provider.ErrNoXRCD, syscall.EAGAIN)
	x := must(d.OpenXRCD(provider.XRCDAttr{FD: fd, Create: true, Exclusive: true}))(t)
	_, err = d.OpenXRCD(provider.XRCDAttr{FD: fd, Create: true, Exclusive: true})
	wantErr(t, "exclusive", err, provider.ErrInvalid, syscall.EINVAL)
	again := must(os.OpenFile(name, os.O_WRONLY, 0))(t)
	y := must(d.OpenXRCD(provider.XRCDAttr{FD: int(again.Fd())}))(t)
	again.Close()
	other := must(d.OpenXRCD(provider.XRCDAttr{FD: -1, Create: true}))(t)

	tgt := must(x.CreateQP(provider.QPInitAttr{Type: qp.TypeXRCRecv}))(t)
	h := must(y.OpenQP(tgt.Num(), nil))(t)
	_, err = other.OpenQP(tgt.Num(), nil)
	wantErr(t, "QP of another domain", err, provider.ErrInvalid, syscall.EINVAL)
	wantErr(t, "close", x.Close(), provider.ErrBusy, syscall.EBUSY)
	wantErr(t, "close", y.Close(), provider.ErrBusy, syscall.EBUSY)
	for _, q := range []*provider.QP{tgt, h} {
		if err := q.Destroy(); err != nil {
			t.Fatal(err)
		}
		wantErr(t, "destroy twice", q.Destroy(), provider.ErrClosed, syscall.EBADF)
	}
	_, err = y.OpenQP(tgt.Num(), nil)
	wantErr(t, "destroyed QP", err, provider.ErrInvalid, syscall.EINVAL)
	for _, x := range []*provider.XRCD{x, y, other} {
		if err := x.Close(); err != nil {
			t.Fatal(err)
		}
		wantErr(t, "close twice", x.Close(), provider.ErrClosed, syscall.EBADF)
	}
	_, err = d.OpenXRCD(provider.XRCDAttr{FD: fd})
	wantErr(t, "closed by all", err, provider.ErrNoXRCD, syscall.EAGAIN)
	if _, err = d.OpenXRCD(provider.XRCDAttr{FD: 1 << 20, Create: true}); provider.Errno(err) != syscall.EBADF {
		t.Errorf("no descriptor: %v", err)
	}
	if _, err = d.OpenXRCD(provider.XRCDAttr{FD: -2, Create: true}); provider.Errno(err) != syscall.EBADF {
		t.Errorf("no descriptor: %v", err)
	}
	x = must(d.OpenXRCD(provider.XRCDAttr{FD: fd, Create: true, Exclusive: true}))(t)
	// What is left goes with the device.
	must(x.CreateQP(provider.QPInitAttr{Type: qp.TypeXRCRecv}))(t)
}

// A file that is gone keeps its domain to itself: no new file gets the same inode
// number while the domain is open.
func TestXRCDFilePinned(t *testing.T) {
	d := harness.NewPair(t, link).Dev[0]
	dir := t.TempDir()
	f := must(os.Create(filepath.Join(dir, "f")))(t)
	must(d.OpenXRCD(provider.XRCDAttr{FD: int(f.Fd()), Create: true}))(t)
	os.Remove(f.Name())
	f.Close()
	for range 50 {
		g := must(os.CreateTemp(dir, "g"))(t)
		if _, err := d.OpenXRCD(provider.XRCDAttr{FD: int(g.Fd())}); err == nil {
			t.Fatal("a new file has the domain of one that was removed")
		}
		g.Close()
		os.Remove(g.Name())
	}
}

// Objects of XRC hold what they use, and SRQs have numbers.
func TestXRCObjects(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{Type: qp.TypeXRCSend, Mem: 4096})
	e, far := c.B, c.A
	if e.Target.PD() != nil || e.Target.Type() != qp.TypeXRCRecv {
		t.Errorf("target %+v", e.Target)
	}
	one := must(e.PD.CreateXRCSRQ(provider.SRQAttr{MaxWR: 1, MaxSGE: 1}, e.XRCD, e.CQ))(t)
	n, m := must(one.Num())(t), must(e.SRQ.Num())(t)
	if n == m || n == 0 || m == 0 || n > 1<<24 {
		t.Errorf("SRQ numbers %#x and %#x", n, m)
	}
	if err := one.Destroy(); err != nil {
		t.Fatal(err)
	}
	for range 100 {
		s := must(e.PD.CreateXRCSRQ(provider.SRQAttr{MaxWR: 1, MaxSGE: 1}, e.XRCD, e.CQ))(t)
		if k := must(s.Num())(t); k == n || k == m {
			t.Fatalf("number %#x again", k)
		}
		if err := s.Destroy(); err != nil {
			t.Fatal(err)
		}
	}
	basic := must(e.PD.CreateSRQ(provider.SRQAttr{MaxWR: 1, MaxSGE: 1}))(t)
	_, err := basic.Num()
	wantErr(t, "number of an SRQ that is not of XRC", err, provider.ErrInvalid, syscall.EINVAL)
	for what, err := range map[string]error{
		"SRQ without domain":               errOf(e.PD.CreateXRCSRQ(provider.SRQAttr{MaxWR: 1}, nil, e.CQ)),
		"SRQ without CQ":                   errOf(e.PD.CreateXRCSRQ(provider.SRQAttr{MaxWR: 1}, e.XRCD, nil)),
		"SRQ with another device's CQ":     errOf(e.PD.CreateXRCSRQ(provider.SRQAttr{MaxWR: 1}, e.XRCD, far.CQ)),
		"SRQ with another device's domain": errOf(far.PD.CreateXRCSRQ(provider.SRQAttr{MaxWR: 1}, e.XRCD, far.CQ)),
		"RC QP with an SRQ of XRC":         errOf(e.PD.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: e.CQ, RecvCQ: e.CQ, SRQ: e.SRQ})),
		"initiator in a domain":            errOf(e.XRCD.CreateQP(provider.QPInitAttr{Type: qp.TypeXRCSend, SendCQ: e.CQ})),
		"multicast":                        e.Target.AttachMcast(provider.GID{}),
	} {
		wantErr(t, what, err, provider.ErrInvalid, syscall.EINVAL)
	}
	wantErr(t, "close", e.XRCD.Close(), provider.ErrBusy, syscall.EBUSY)
	wantErr(t, "destroy CQ", e.CQ.Destroy(), provider.ErrBusy, syscall.EBUSY)
	wantErr(t, "dealloc PD", e.PD.Dealloc(), provider.ErrBusy, syscall.EBUSY)
	// A target does not hold the SRQs of its domain.
	if err := e.SRQ.Destroy(); err != nil {
		t.Fatal(err)
	}
	far.Send(far.Message(1, 0, 10))
	if wc := c.WaitOne(far); wc.Status != qp.WCRemInvReqErr {
		t.Errorf("message to an SRQ that was destroyed: %v", wc.Status)
	}
	if s := e.Target.State(); s != qp.StateErr {
		t.Errorf("target in %v", s)
	}
	for _, f := range []func() error{e.QP.Destroy, e.Target.Destroy, e.XRCD.Close, e.CQ.Destroy, basic.Destroy, e.MR.Dereg, e.PD.Dealloc} {
		if err := f(); err != nil {
			t.Error(err)
		}
	}
	_, err = e.XRCD.CreateQP(provider.QPInitAttr{Type: qp.TypeXRCRecv})
	wantErr(t, "QP in a closed domain", err, provider.ErrClosed, syscall.EBADF)
	if _, err := e.Target.PostSend([]qp.SendWR{{}}); err == nil {
		t.Error("posted to a destroyed target")
	}
}

func errOf[T any](_ T, err error) error { return err }

// A target is one QP for all who have opened it: it is destroyed with the last
// handle, and its events go to each (ibv_open_qp(3)).
func TestXRCSharedTarget(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{Type: qp.TypeXRCSend, Mem: 8192})
	first, num := c.B.Target, c.B.Target.Num()
	h := must(c.B.XRCD.OpenQP(num, "mine"))(t)
	if h.Num() != num || h.Context() != "mine" || h.State() != qp.StateRTS {
		t.Fatalf("handle %#x in %v", uint32(h.Num()), h.State())
	}
	if err := first.Destroy(); err != nil {
		t.Fatal(err)
	}
	a, _, err := h.Query()
	if err != nil || a.DestQPN != c.A.QP.Num() || a.AH.DGID == (provider.GID{}) {
		t.Fatalf("query: %+v, %v", a, err)
	}
	_, _, err = first.Query()
	wantErr(t, "query with a destroyed handle", err, provider.ErrClosed, syscall.EBADF)
	c.B.Recv(1, 4096, 100)
	c.A.Send(c.A.Message(2, 0, 100))
	c.WaitOK(c.B, 1)
	c.WaitOK(c.A, 2)

	g := must(c.B.XRCD.OpenQP(num, nil))(t)
	if err := g.Modify(provider.QPAttr{Attr: qp.Attr{State: qp.StateErr}}, qp.AttrState); err != nil {
		t.Fatal(err)
	}
	if h.State() != qp.StateErr {
		t.Errorf("state by the other handle: %v", h.State())
	}
	got := map[*provider.QP]bool{}
	for {
		ev, ok := c.Dev[1].TryAsyncEvent()
		if !ok {
			break
		}
		if ev.Type == qp.EventQPLastWQE {
			got[ev.QP] = true
		}
		ev.Ack()
	}
	if len(got) != 2 || !got[h] || !got[g] {
		t.Errorf("last WQE events for %d handles", len(got))
	}
	for _, q := range []*provider.QP{h, g} {
		if err := q.Destroy(); err != nil {
			t.Fatal(err)
		}
	}
	_, err = c.B.XRCD.OpenQP(num, nil)
	wantErr(t, "destroyed QP", err, provider.ErrInvalid, syscall.EINVAL)
}

// A CQ that overflows fails the SRQs that complete to it, not other ones.
func TestXRCOverflow(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{Type: qp.TypeXRCSend, Mem: 8192, CQE: 2})
	for i := range 3 {
		c.B.Recv(uint64(i), 0, 10)
		c.A.Send(c.A.Message(uint64(i), 0, 10))
		c.WaitOK(c.A, uint64(i))
	}
	c.A.Send(c.A.Message(9, 0, 10))
	if wc := c.WaitOne(c.A); wc.Status != qp.WCRemOpErr {
		t.Errorf("message to an SRQ whose CQ overflowed: %v", wc.Status)
	}
	var cqErr, srqErr, fatal bool
	for {
		ev, ok := c.Dev[1].TryAsyncEvent()
		if !ok {
			break
		}
		cqErr = cqErr || ev.Type == qp.EventCQErr && ev.CQ == c.B.CQ
		srqErr = srqErr || ev.Type == qp.EventSRQErr && ev.SRQ == c.B.SRQ
		fatal = fatal || ev.Type == qp.EventQPFatal && ev.QP == c.B.Target
		ev.Ack()
	}
	if !cqErr || !srqErr || !fatal {
		t.Errorf("events: CQ %v, SRQ %v, QP %v", cqErr, srqErr, fatal)
	}
	// Nor does one that is made afterwards acknowledge what nobody would hear of.
	o := harness.ConnOptions{Type: qp.TypeXRCSend, Mem: 8192}
	c2 := p.Connect(o)
	late, err := c2.B.PD.CreateXRCSRQ(provider.SRQAttr{MaxWR: 4}, c2.B.XRCD, c.B.CQ)
	if err != nil {
		t.Fatal(err)
	}
	num, err := late.Num()
	if err == nil {
		_, err = late.PostRecv([]qp.RecvWR{{ID: 1, SGL: []qp.SGE{c2.B.SGE(0, 10)}}})
	}
	if err != nil {
		t.Fatal(err)
	}
	wr := c2.A.Message(1, 0, 10)
	wr.RemoteSRQN = num
	c2.A.Send(wr)
	if wc := c2.WaitOne(c2.A); wc.Status != qp.WCRemOpErr {
		t.Errorf("message to an SRQ made for a CQ that overflowed: %v", wc.Status)
	}
}
