// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"errors"
	"math"
	"syscall"
	"testing"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/harness"
)

// TestImplicitRegion: a peer's WRITE and READ, and lists of one's own, by the key of
// all memory; and what an address does that is not mapped.
func TestImplicitRegion(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{})
	all := mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead | mr.RemoteAtomic | mr.OnDemand
	im, err := c.B.PD.Register(provider.MRAttr{Length: math.MaxUint64, Access: all})
	if err != nil || im.Paging() != mr.Implicit {
		t.Fatal(err)
	}
	mine, err := c.A.PD.Register(provider.MRAttr{Length: math.MaxUint64, Access: all})
	if err != nil {
		t.Fatal(err)
	}
	later, err := mr.Alloc(1 << 16) // mapped after the registration, and in no region
	if err != nil {
		t.Fatal(err)
	}
	harness.Fill(c.A.Mem[:1<<16], 1)
	w := c.A.Write(c.B, 1, 0, 0, 1<<16)
	w.RemoteAddr, w.RKey, w.SGL[0].LKey = uint64(later.Addr()), im.RKey(), mine.LKey()
	c.A.Send(w)
	c.WaitOK(c.A, 1)
	if !bytes.Equal(later.Bytes(), c.A.Mem[:1<<16]) {
		t.Error("WRITE: wrong data")
	}
	r := c.A.Read(c.B, 2, 1<<17, 0, 1<<16)
	r.RemoteAddr, r.RKey, r.SGL[0].LKey = uint64(later.Addr()), im.RKey(), mine.LKey()
	c.A.Send(r)
	c.WaitOK(c.A, 2)
	if !bytes.Equal(c.A.Mem[1<<17:][:1<<16], c.A.Mem[:1<<16]) {
		t.Error("READ: wrong data")
	}
	if err := later.Close(); err != nil {
		t.Fatal(err)
	}
	w.ID = 3
	c.A.Send(w)
	if wc := c.WaitOne(c.A); wc.ID != 3 || wc.Status != qp.WCRemAccessErr {
		t.Errorf("WRITE to what is unmapped: %+v", wc)
	}
}

// TestNullRegion: zeros are sent from it, and what is received there is gone, in the
// middle of lists.
func TestNullRegion(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{})
	null, err := c.A.PD.AllocNullMR()
	if err != nil {
		t.Fatal(err)
	}
	sink, err := c.B.PD.AllocNullMR()
	if err != nil {
		t.Fatal(err)
	}
	harness.Fill(c.A.Mem[:3000], 1)
	harness.Fill(c.B.Mem[:9000], 2)
	want := append([]byte(nil), c.B.Mem[:9000]...)
	copy(want[:1000], c.A.Mem[:1000])
	clear(want[1000:2000])
	copy(want[2000:2500], c.A.Mem[1500:2000])
	void := func(r *provider.MR, n uint32) qp.SGE { return qp.SGE{Addr: 1 << 60, Length: n, LKey: r.LKey()} }
	_, err = c.B.QP.PostRecv([]qp.RecvWR{{ID: 1, SGL: []qp.SGE{c.B.SGE(0, 2000), void(sink, 500), c.B.SGE(2000, 2000)}}})
	if err != nil {
		t.Fatal(err)
	}
	c.A.Send(qp.SendWR{ID: 2, Opcode: qp.WRSend, Flags: qp.SendSignaled,
		SGL: []qp.SGE{c.A.SGE(0, 1000), void(null, 1000), c.A.SGE(1000, 1000)}})
	c.WaitOK(c.B, 1)
	c.WaitOK(c.A, 2)
	if !bytes.Equal(c.B.Mem[:9000], want) {
		t.Error("wrong data")
	}
	w := c.A.Write(c.B, 3, 0, 0, 8)
	w.RKey = sink.RKey()
	c.A.Send(w)
	if wc := c.WaitOne(c.A); wc.Status != qp.WCRemAccessErr {
		t.Errorf("a peer's WRITE: %+v", wc)
	}
}

func TestDeviceMemory(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{})
	d, most := c.B.Dev, c.B.Dev.Query().MaxDMSize
	bad := func(what string, err, want error, no syscall.Errno) { t.Helper(); wantErr(t, what, err, want, no) }
	_, err := d.AllocDM(0, 0)
	bad("no bytes", err, provider.ErrInvalid, syscall.EINVAL)
	_, err = d.AllocDM(most+1, 0)
	bad("more than there is", err, provider.ErrNoMem, syscall.ENOMEM)
	_, err = d.AllocDM(math.MaxUint64, 0)
	bad("very much", err, provider.ErrNoMem, syscall.ENOMEM)
	_, err = d.AllocDM(64, 40)
	bad("aligned to much", err, provider.ErrInvalid, syscall.EINVAL)
	for log := range 27 {
		m, err := d.AllocDM(100, log)
		if err != nil {
			t.Fatalf("aligned to 1<<%d: %v", log, err)
		}
		if m.Addr()&(1<<log-1) != 0 {
			t.Errorf("aligned to 1<<%d: %#x", log, m.Addr())
		}
		if err := m.Free(); err != nil {
			t.Error(err)
		}
		bad("free twice", m.Free(), provider.ErrClosed, syscall.EBADF)
		bad("copy after free", m.CopyTo(0, make([]byte, 4)), provider.ErrClosed, syscall.EBADF)
	}
	m, err := d.AllocDM(most-64, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.AllocDM(65, 0)
	bad("more than is left", err, provider.ErrNoMem, syscall.ENOMEM)
	small, err := d.AllocDM(64, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := small.Free(); err != nil {
		t.Error(err)
	}

	zero := mr.ZeroBased
	for _, r := range []struct {
		off, n uint64
		access mr.Access
	}{{0, 64, mr.LocalWrite}, {0, 64, zero | mr.OnDemand}, {0, 64, zero | mr.MWBind}, {0, 64, zero | mr.RemoteWrite},
		{0, most, zero}, {most - 64, 1, zero}, {64, math.MaxUint64, zero}} {
		_, err := c.B.PD.RegDM(m, r.off, r.n, r.access)
		if provider.Errno(err) != syscall.EINVAL {
			t.Errorf("region of %d bytes at %d with access %#x: %v", r.n, r.off, r.access, err)
		}
	}
	_, err = c.A.PD.RegDM(m, 0, 64, zero)
	bad("another device's domain", err, provider.ErrInvalid, syscall.EINVAL)
	reg, err := c.B.PD.RegDM(m, 4096, 1<<16, zero|mr.LocalWrite|mr.RemoteWrite|mr.RemoteRead|mr.RemoteAtomic)
	if err != nil {
		t.Fatal(err)
	}
	none, err := c.B.PD.RegDM(m, m.Len(), 0, zero)
	if err != nil {
		t.Fatal(err)
	}
	if err := none.Dereg(); err != nil {
		t.Error(err)
	}
	bad("free with a region", m.Free(), provider.ErrBusy, syscall.EBUSY)
	for _, p := range [][2]uint64{{1, 4}, {4, 3}, {most - 64, 4}, {math.MaxUint64 - 3, 4}} {
		bad("copy", m.CopyTo(p[0], make([]byte, p[1])), provider.ErrInvalid, syscall.EINVAL)
		bad("copy", m.CopyFrom(make([]byte, p[1]), p[0]), provider.ErrInvalid, syscall.EINVAL)
	}

	harness.Fill(c.A.Mem[:1<<16], 3)
	w := c.A.Write(c.B, 1, 0, 0, 1<<16)
	w.RemoteAddr, w.RKey = 0, reg.RKey()
	c.A.Send(w)
	c.WaitOK(c.A, 1)
	got := make([]byte, 1<<16)
	if err := m.CopyFrom(got, 4096); err != nil || !bytes.Equal(got, c.A.Mem[:1<<16]) {
		t.Errorf("WRITE to device memory: %v", err)
	}
	harness.Fill(got, 4)
	if err := m.CopyTo(4096, got); err != nil {
		t.Error(err)
	}
	r := c.A.Read(c.B, 2, 0, 0, 1<<16)
	r.RemoteAddr, r.RKey = 0, reg.RKey()
	c.A.Send(r)
	c.WaitOK(c.A, 2)
	if !bytes.Equal(got, c.A.Mem[:1<<16]) {
		t.Error("READ of device memory: wrong data")
	}
	if p := reg.Paging(); p != mr.DeviceMemory {
		t.Errorf("paged by %v", p)
	}
	if err := reg.Dereg(); err != nil {
		t.Error(err)
	}
	if err := m.Free(); err != nil {
		t.Error(err)
	}
	if _, err := c.B.PD.RegDM(m, 0, 64, zero); !errors.Is(err, provider.ErrClosed) {
		t.Errorf("region of freed memory: %v", err)
	}
}

func TestAdviseErrors(t *testing.T) {
	p := harness.NewPair(t, link)
	e := harness.NewEnd(t, p.Dev[0], harness.ConnOptions{Mem: 1 << 16})
	other, err := p.Dev[0].AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	reg := func(a mr.Access) *provider.MR {
		m, err := e.PD.RegMR(e.Mem, a)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	odp, readOnly := reg(mr.OnDemand|mr.LocalWrite), reg(mr.OnDemand)
	null, err := e.PD.AllocNullMR()
	if err != nil {
		t.Fatal(err)
	}
	of := func(m *provider.MR, off, n int) []qp.SGE {
		return []qp.SGE{{Addr: e.Addr + uint64(off), Length: uint32(n), LKey: m.LKey()}}
	}
	whole := of(odp, 0, 1<<16)
	for _, c := range []struct {
		what   string
		pd     *provider.PD
		advice mr.Advice
		flags  uint32
		ranges []qp.SGE
		want   syscall.Errno
	}{
		{"unknown advice", e.PD, 3, 0, whole, syscall.EOPNOTSUPP},
		{"unknown flags", e.PD, mr.Prefetch, 2, whole, syscall.EINVAL},
		{"no range", e.PD, mr.Prefetch, 1, nil, syscall.EINVAL},
		{"unknown key", e.PD, mr.Prefetch, 1, []qp.SGE{{Addr: e.Addr, Length: 1, LKey: odp.LKey() + 1}}, syscall.EFAULT},
		{"another domain", other, mr.Prefetch, 1, whole, syscall.EPERM},
		{"not on demand", e.PD, mr.Prefetch, 1, of(e.MR, 0, 1), syscall.EINVAL},
		{"null region", e.PD, mr.Prefetch, 1, of(null, 0, 1), syscall.EINVAL},
		{"not writable", e.PD, mr.PrefetchWrite, 1, of(readOnly, 0, 1), syscall.EPERM},
		{"too long", e.PD, mr.Prefetch, 1, of(odp, 1, 1<<16), syscall.EFAULT},
		{"before it", e.PD, mr.Prefetch, 1, of(odp, -1, 1), syscall.EFAULT},
		{"second of two", e.PD, mr.Prefetch, 0, append(of(odp, 0, 1), of(odp, 1<<16, 1)...), syscall.EFAULT},
	} {
		if err := c.pd.AdviseMR(c.advice, c.flags, c.ranges); provider.Errno(err) != c.want {
			t.Errorf("%s: %v, want %v", c.what, err, c.want)
		}
	}
	if n := odp.Stats().PagePrefetch; n != 0 {
		t.Errorf("%d pages were prefetched for advice that made no sense", n)
	}
	for _, flags := range []uint32{provider.AdviseFlush, 0} {
		for _, a := range []mr.Advice{mr.PrefetchNoFault, mr.Prefetch, mr.PrefetchWrite} {
			ranges := append(of(odp, 0, 4096), of(odp, 4096, 1)...)
			if err := e.PD.AdviseMR(a, flags, append(ranges, qp.SGE{Addr: e.Addr, LKey: odp.LKey()})); err != nil {
				t.Errorf("advice %d, flags %d: %v", a, flags, err)
			}
		}
		if n := odp.Stats().PagePrefetch; n != 2 {
			t.Errorf("%d pages were prefetched, want 2", n)
		}
	}
	if err := odp.Dereg(); err != nil {
		t.Error(err)
	}
}

// TestParentDomain: what is made in it works with what is made in its domain, and
// neither goes before its objects.
func TestParentDomain(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{})
	parent, err := c.B.PD.AllocParent()
	if err != nil {
		t.Fatal(err)
	}
	reg, err := parent.RegMR(c.B.Mem, mr.LocalWrite|mr.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	harness.Fill(c.A.Mem[:5000], 3)
	w := c.A.Write(c.B, 1, 0, 0, 5000)
	w.RKey = reg.RKey()
	c.A.Send(w)
	c.WaitOK(c.A, 1)
	if !bytes.Equal(c.A.Mem[:5000], c.B.Mem[:5000]) {
		t.Error("wrong data")
	}
	wantErr(t, "dealloc a parent with a region", parent.Dealloc(), provider.ErrBusy, syscall.EBUSY)
	base, err := p.Dev[0].AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	above, err := base.AllocParent()
	if err != nil {
		t.Fatal(err)
	}
	wantErr(t, "dealloc a domain with a parent", base.Dealloc(), provider.ErrBusy, syscall.EBUSY)
	for _, err := range []error{reg.Dereg(), parent.Dealloc(), above.Dealloc(), base.Dealloc()} {
		if err != nil {
			t.Error(err)
		}
	}
	if _, err := base.AllocParent(); !errors.Is(err, provider.ErrClosed) {
		t.Errorf("parent of a domain that is gone: %v", err)
	}
}

// TestAdviseLong: what is longer than a piece is prefetched whole, and a device that is
// closed meanwhile leaves it.
func TestAdviseLong(t *testing.T) {
	p := harness.NewPair(t, link)
	const n = 40<<20 + 4096
	mem, err := mr.Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	d := p.Dev[0]
	pd, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	reg, err := pd.RegMR(mem.Bytes(), mr.OnDemand|mr.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	whole := []qp.SGE{{Addr: uint64(mem.Addr()), Length: n, LKey: reg.LKey()}}
	if err := pd.AdviseMR(mr.Prefetch, provider.AdviseFlush, whole); err != nil {
		t.Fatal(err)
	}
	if got := reg.Stats().PagePrefetch; got != n/4096 {
		t.Errorf("%d pages were prefetched, want %d", got, n/4096)
	}
	if err := pd.AdviseMR(mr.PrefetchWrite, 0, whole); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	wantErr(t, "advice after close", pd.AdviseMR(mr.Prefetch, provider.AdviseFlush, whole), provider.ErrClosed, syscall.EBADF)
}
