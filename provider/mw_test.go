// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// TestWindow1 binds a window of type 1 to one region and to another, and unbinds it; the
// peer reaches what is bound at that time.
func TestWindow1(t *testing.T) {
	for _, typ := range []qp.Type{qp.TypeRC, qp.TypeUC} {
		c := harness.NewPair(t, link).Connect(harness.ConnOptions{Type: typ})
		w := must(c.B.PD.AllocMW(mr.Window1))(t)
		reg := must(c.B.PD.Register(provider.MRAttr{Addr: uintptr(c.B.Addr), Length: 1 << 16, Access: mr.LocalWrite | mr.MWBind}))(t)
		all := must(c.B.PD.Register(provider.MRAttr{Length: math.MaxUint64, Access: mr.LocalWrite | mr.MWBind | mr.OnDemand}))(t)
		harness.Fill(c.A.Mem[:1<<16], 1)
		var old mr.Key
		for i, region := range []*provider.MR{reg, all} {
			off := 5000 * (i + 1)
			key, err := c.B.QP.BindMW(w, region, 7, qp.SendSignaled, qp.Bind{Addr: c.B.Addr + uint64(off), Length: 4000, Access: mr.RemoteWrite})
			if err != nil {
				t.Fatal(err)
			}
			if wc := c.WaitOK(c.B, 7); wc.Opcode != qp.WCBindMW || key != w.RKey() || key == old {
				t.Fatalf("%+v, key %#x, window %#x, before %#x", wc, key, w.RKey(), old)
			}
			old = key
			wr := c.A.Write(c.B, 8, 0, off, 4000)
			wr.RKey = key
			c.A.Send(wr)
			c.WaitOK(c.A, 8)
			c.Settle()
			if !bytes.Equal(c.B.Mem[off:][:4000], c.A.Mem[:4000]) {
				t.Errorf("%v, region %d: the data is not there", typ, i)
			}
		}
		wantErr(t, "bound", all.Dereg(), mr.ErrBound, syscall.EBUSY)
		wantErr(t, "bound", all.Reregister(mr.ChangeAccess, nil, provider.MRAttr{Access: mr.OnDemand}), mr.ErrBound, syscall.EBUSY)
		if err := reg.Dereg(); err != nil {
			t.Error(err) // nothing is bound to it any more
		}
		// Two at once, of which the first waits for its turn behind a WRITE.
		c.B.Send(c.B.Write(c.A, 8, 0, 0, 1000))
		before := must(c.B.QP.BindMW(w, all, 9, qp.SendSignaled, qp.Bind{Addr: c.B.Addr, Length: 4000, Access: mr.RemoteWrite}))(t)
		key := must(c.B.QP.BindMW(w, nil, 10, qp.SendSignaled, qp.Bind{}))(t)
		if before == key {
			t.Error("two binds have one key")
		}
		for id := range uint64(3) {
			c.WaitOK(c.B, 8+id)
		}
		wr := c.A.Write(c.B, 10, 0, 10000, 1)
		wr.RKey = key
		c.A.Send(wr)
		want := qp.WCRemAccessErr
		if typ == qp.TypeUC {
			want = qp.WCSuccess // and nobody hears of it
		}
		if wc := c.WaitOne(c.A); wc.Status != want {
			t.Errorf("%v, unbound: %+v", typ, wc)
		}
		for _, f := range []func() error{w.Dealloc, all.Dereg} {
			if err := f(); err != nil {
				t.Error(err)
			}
		}
		wantErr(t, "twice", w.Dealloc(), provider.ErrClosed, syscall.EBADF)
	}
}

// TestWindow2 hands a window's keys to the peer again and again, as storage does: bind,
// WRITE, SEND with invalidate.
func TestWindow2(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{})
	w := must(c.B.PD.AllocMW(mr.Window2))(t)
	reg := must(c.B.PD.Register(provider.MRAttr{Addr: uintptr(c.B.Addr), Length: 1 << 16, Access: mr.LocalWrite | mr.MWBind}))(t)
	_, err := c.B.QP.BindMW(w, reg, 1, 0, qp.Bind{})
	wantErr(t, "BindMW of type 2", err, provider.ErrInvalid, syscall.EINVAL)
	wantErr(t, "domain", c.B.PD.Dealloc(), provider.ErrBusy, syscall.EBUSY)
	key := w.RKey()
	for i := range 300 { // more than there are tags
		key = provider.NextKey(key)
		harness.Fill(c.A.Mem[:100], uint64(i))
		c.B.Recv(1, 1<<16, 10)
		c.B.Send(qp.SendWR{ID: 2, Opcode: qp.WRBindMW, Flags: qp.SendSignaled, Bind: qp.Bind{RKey: key, LKey: reg.LKey(),
			Addr: c.B.Addr + uint64(i), Length: 100, Access: mr.RemoteWrite | mr.ZeroBased}})
		c.WaitOK(c.B, 2)
		wr := c.A.Write(c.B, 3, 0, 0, 100)
		wr.RKey, wr.RemoteAddr = key, 0
		inv := c.A.Message(4, 0, 10)
		inv.Opcode, inv.InvKey = qp.WRSendInv, key
		c.A.Send(wr, inv)
		c.WaitOK(c.A, 3)
		c.WaitOK(c.A, 4)
		if wc := c.WaitOK(c.B, 1); wc.InvKey != key || wc.Flags&qp.WCWithInv == 0 {
			t.Fatalf("%+v", wc)
		}
		if !bytes.Equal(c.B.Mem[i:][:100], c.A.Mem[:100]) {
			t.Fatalf("%d: the data is not there", i)
		}
	}
	if err := errors.Join(reg.Dereg(), w.Dealloc()); err != nil {
		t.Error(err)
	}
	if _, err := c.B.PD.AllocMW(3); provider.Errno(err) != syscall.EINVAL {
		t.Errorf("type 3: %v", err)
	}
}

// TestReregister changes a region's domain and place, with the counts of the domains.
func TestReregister(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{})
	d := c.B.Dev
	pd := must(d.AllocPD())(t)
	foreign := must(c.A.Dev.AllocPD())(t)
	reg := must(pd.Register(provider.MRAttr{Addr: uintptr(c.B.Addr), Length: 1 << 16, Access: mr.LocalWrite | mr.RemoteWrite}))(t)
	key := reg.RKey()
	to := func(off int, id uint64, want qp.WCStatus) {
		t.Helper()
		harness.Fill(c.A.Mem[:3000], id)
		wr := c.A.Write(c.B, id, 0, off, 3000)
		wr.RKey = key
		c.A.Send(wr)
		if wc := c.WaitOne(c.A); wc.ID != id || wc.Status != want {
			t.Errorf("%d: %+v, want %v", id, wc, want)
		}
		if got := bytes.Equal(c.B.Mem[off:][:3000], c.A.Mem[:3000]); got != (want == qp.WCSuccess) {
			t.Errorf("%d: the data is there: %v", id, got)
		}
	}
	for _, p := range []*provider.PD{nil, foreign} {
		wantErr(t, "domain", reg.Reregister(mr.ChangePD, p, provider.MRAttr{}), provider.ErrInvalid, syscall.EINVAL)
	}
	wantErr(t, "length", reg.Reregister(mr.ChangeTranslation|mr.ChangePD, c.B.PD, provider.MRAttr{Addr: 1, Length: 1 << 50}), provider.ErrInvalid, syscall.EINVAL)
	wantErr(t, "unmapped", reg.Reregister(mr.ChangeTranslation|mr.ChangePD, c.B.PD, provider.MRAttr{Addr: 4096, Length: 1}), mr.ErrUnmapped, syscall.EFAULT)
	if reg.PD() != pd {
		t.Error("the domain has changed")
	}
	if err := reg.Reregister(mr.ChangePD, c.B.PD, provider.MRAttr{}); err != nil || reg.PD() != c.B.PD {
		t.Fatal(err)
	}
	if err := pd.Dealloc(); err != nil {
		t.Error(err) // nothing is in it any more
	}
	to(100, 1, qp.WCSuccess)
	if err := reg.Reregister(mr.ChangeTranslation, nil, provider.MRAttr{Addr: uintptr(c.B.Addr) + 1<<17, Length: 1 << 16}); err != nil || reg.RKey() != key {
		t.Fatal(err)
	}
	to(1<<17, 2, qp.WCSuccess)
	if err := reg.Reregister(mr.ChangeAccess, nil, provider.MRAttr{Access: mr.LocalWrite}); err != nil {
		t.Fatal(err)
	}
	to(1<<17+8000, 3, qp.WCRemAccessErr)
	if err := reg.Dereg(); err != nil {
		t.Error(err)
	}
	wantErr(t, "deregistered", reg.Reregister(mr.ChangeAccess, nil, provider.MRAttr{}), provider.ErrClosed, syscall.EBADF)
}

// TestReregisterLive moves a region to and fro, and takes and gives the right to write,
// under a peer's flood of WRITEs. What the region was then stays as it is: once
// Reregister has returned, nothing lands there.
func TestReregisterLive(t *testing.T) {
	c := harness.NewLivePair(t, taptest.Config{}).Connect(harness.ConnOptions{Type: qp.TypeUC, Mem: 2 << 20}) // nothing ends with an error

	const n = 1 << 20 // many packets: some are under way in a change
	open := mr.LocalWrite | mr.RemoteWrite
	reg := must(c.B.PD.Register(provider.MRAttr{Addr: uintptr(c.B.Addr), Length: n, IOVA: 1 << 50, HaveIOVA: true, Access: open}))(t)
	var posted atomic.Uint64
	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(done)
		wcs := make([]qp.WC, 16)
		for i := uint64(0); ; {
			select {
			case <-stop:
				return
			default:
			}
			for j := range 64 {
				c.A.Mem[j*n/64]++
			}
			wr := c.A.Write(c.B, i, 0, 0, n)
			wr.RemoteAddr, wr.RKey = 1<<50, reg.RKey()
			if _, err := c.A.QP.PostSend([]qp.SendWR{wr}); err == nil {
				i++
			}
			for _, wc := range wcs[:c.A.CQ.Poll(wcs)] {
				if wc.Status != qp.WCSuccess {
					done <- fmt.Errorf("%+v", wc)
					return
				}
				posted.Add(1)
			}
		}
	}()
	still := func(what string, side int) {
		t.Helper()
		now := bytes.Clone(c.B.Mem[side*n:][:n])
		// The peer goes on: what is to be seen is seen when some more was sent.
		for was := posted.Load(); posted.Load() < was+4; {
			if len(done) > 0 {
				t.Fatal(<-done)
			}
			runtime.Gosched()
		}
		if !bytes.Equal(now, c.B.Mem[side*n:][:n]) {
			t.Errorf("%s: the memory changes", what)
		}
	}
	change := func(what mr.Rereg, a provider.MRAttr) {
		t.Helper()
		if err := reg.Reregister(what, nil, a); err != nil {
			t.Fatal(err)
		}
	}
	wrote := [2]int{}
	for i := 0; i < 12 || wrote[0] == 0 || wrote[1] == 0; i++ {
		side := i % 2
		was := bytes.Clone(c.B.Mem[(1-side)*n:][:n])
		change(mr.ChangeTranslation, provider.MRAttr{Addr: uintptr(c.B.Addr) + uintptr((1-side)*n), Length: n, IOVA: 1 << 50, HaveIOVA: true})
		still("moved", side)
		change(mr.ChangeAccess, provider.MRAttr{Access: mr.LocalWrite})
		still("no right", 1-side)
		if !bytes.Equal(was, c.B.Mem[(1-side)*n:][:n]) {
			wrote[1-side]++
		}
		change(mr.ChangeAccess, provider.MRAttr{Access: open})
	}
	close(stop)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := reg.Dereg(); err != nil {
		t.Error(err)
	}
}
