// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

// residencyAccess has the regions paged, so that they can be evicted.
const residencyAccess = mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead | mr.OnDemand

func enable(t testing.TB, e *harness.End, o provider.ResidencyOptions) {
	t.Helper()
	if err := e.QP.EnableResidency(o); err != nil {
		t.Fatal(err)
	}
}

// agree enables residency messages on both sides and waits until both know.
func agree(t testing.TB, c *harness.Conn, o provider.ResidencyOptions) {
	t.Helper()
	enable(t, c.A, o)
	enable(t, c.B, o)
	c.RunUntil(func() bool { return c.A.QP.ResidencyAgreed() && c.B.QP.ResidencyAgreed() })
}

// remote is what A knows of B's memory.
func remote(t testing.TB, c *harness.Conn) provider.RemoteResidency {
	t.Helper()
	st, err := c.A.QP.RemoteResidency(c.B.MR.RKey(), c.B.Addr, uint64(len(c.B.Mem)))
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// watch has A know of B's memory, by a small WRITE.
func watch(t testing.TB, c *harness.Conn) {
	t.Helper()
	c.A.Send(c.A.Write(c.B, 1000, 0, 0, 8))
	c.WaitOK(c.A, 1000)
	c.RunUntil(func() bool { return remote(t, c).Known })
}

// evict has pages of an end's memory in the store.
func evict(t testing.TB, e *harness.End, off, n int) {
	t.Helper()
	for at := off; at < off+n; at += 4096 {
		e.Mem[at]++ // a page with content
	}
	set := make([]uint64, (n/4096+63)/64)
	for {
		_, err := mr.Process().Evict(e.MR.Region(), e.Addr+uint64(off), uint64(n), mr.Stored)
		if errors.Is(err, mr.ErrNotSupported) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		e.MR.Region().Stored(off/4096, set)
		stored := 0
		for p := range n / 4096 {
			stored += int(set[p/64] >> (p % 64) & 1)
		}
		if stored == n/4096 {
			return
		}
		runtime.Gosched() // an engine has the rest in use
	}
}

// TestResidencyOneSided: a peer that does not speak residency messages sees a few MADs that
// it drops, and nothing else.
func TestResidencyOneSided(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{Access: residencyAccess})
	enable(t, c.A, provider.ResidencyOptions{})
	for i := range 10 {
		c.A.Send(c.A.Write(c.B, uint64(i), 0, 0, 100_000))
		c.WaitOK(c.A, uint64(i))
	}
	c.Settle() // the hellos end
	a, b := c.Dev[0].Stats(), c.Dev[1].Stats()
	if c.A.QP.ResidencyAgreed() || remote(t, c).Known {
		t.Error("agreed with a peer that is silent")
	}
	if b.ResidencySent != 0 || b.ResidencyReceived != 0 || b.Dropped() != b.Drops[provider.DropMAD] {
		t.Errorf("the peer: %+v", b)
	}
	if n := b.Drops[provider.DropMAD]; n == 0 || n > 8 || n != a.ResidencySent {
		t.Errorf("%d MADs dropped of %d", n, a.ResidencySent)
	}
	if s := c.Dev[1].Protocol(); s.QKeyViolations.Load() != 0 {
		t.Error("Q_Key violations")
	}
	if err := c.A.QP.PrefetchRemote(c.B.MR.RKey(), c.B.Addr, 4096); !errors.Is(err, provider.ErrNotSupported) {
		t.Errorf("prefetch at a peer that is silent: %v", err)
	}
	if err := c.B.QP.PrefetchRemote(c.A.MR.RKey(), c.A.Addr, 4096); !errors.Is(err, provider.ErrInvalid) {
		t.Errorf("prefetch with messages off: %v", err)
	}
	// Much later the other side wants them, too.
	enable(t, c.B, provider.ResidencyOptions{})
	c.RunUntil(func() bool { return c.A.QP.ResidencyAgreed() && c.B.QP.ResidencyAgreed() })
}

// TestResidencyAnew: sides that turn messages off and on find each other again, in
// either order, and hear each other then.
func TestResidencyAnew(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{Access: residencyAccess})
	agree(t, c, provider.ResidencyOptions{})
	watch(t, c)
	for range 3 {
		c.B.QP.DisableResidency()
		enable(t, c.B, provider.ResidencyOptions{})
		c.RunUntil(func() bool { return c.B.QP.ResidencyAgreed() && !remote(t, c).Known })
		watch(t, c)
		c.A.QP.DisableResidency()
		enable(t, c.A, provider.ResidencyOptions{})
		c.RunUntil(c.A.QP.ResidencyAgreed)
		watch(t, c)
	}
}

// TestResidencyTold: the requester learns what leaves and what comes back, whatever happens
// to messages on the way.
func TestResidencyTold(t *testing.T) {
	for _, tc := range []struct {
		name string
		cfg  taptest.Config
	}{
		{"clean", link},
		{"faults", taptest.Config{Seed: 7, Delay: 3 * time.Microsecond, Loss: 0.15, Dup: 0.1, Reorder: 0.2}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := harness.NewPair(t, tc.cfg).Connect(harness.ConnOptions{Access: residencyAccess, Mem: 4 << 20})
			agree(t, c, provider.ResidencyOptions{})
			watch(t, c)
			evict(t, c.B, 10*4096, 11*4096)
			evict(t, c.B, 512*4096, 200*4096)
			small := func() { // whoever sends nothing notices no gap
				c.A.Send(c.A.Write(c.B, 1001, 0, 0, 8))
				c.WaitOK(c.A, 1001)
			}
			c.RunUntil(func() bool { small(); return remote(t, c).Away == 211*4096 })
			for at := 10 * 4096; at < 21*4096; at += 4096 {
				c.B.Mem[at]++ // the application brings it back
			}
			if tc.name == "clean" {
				c.RunUntil(func() bool { return remote(t, c).Away == 200*4096 })
			}
			// More ranges than messages of one look have room for.
			evict(t, c.B, 0, 4<<20)
			for p := 1; p < 1024; p += 2 {
				c.B.Mem[p*4096]++
			}
			c.RunUntil(func() bool { small(); return remote(t, c).Away == 511*4096 }) // the WRITE has brought one back
		})
	}
}

// TestResidencyPrefetchAhead: content in the store costs RNR NAKs without prefetch, and none
// with it.
func TestResidencyPrefetchAhead(t *testing.T) {
	const n = 1 << 20
	run := func(ahead bool) (naks, prefetches uint64) {
		p := harness.NewLivePair(t, taptest.Config{})
		c := p.Connect(harness.ConnOptions{Access: residencyAccess, Mem: n, Timeout: 18})
		if err := c.B.MR.SetFaultPolicy(mr.FaultRNR); err != nil {
			t.Fatal(err)
		}
		if ahead {
			agree(t, c, provider.ResidencyOptions{MaxHold: time.Minute})
			watch(t, c)
		}
		before := p.Dev[1].Protocol().SentRNRNak.Load()
		for i := range 5 {
			evict(t, c.B, 0, n)
			if ahead {
				c.RunUntil(func() bool { return remote(t, c).Away == n })
			}
			harness.Fill(c.A.Mem, uint64(i))
			// Not all of the first page: what is written whole needs no content of the store.
			c.A.Send(c.A.Write(c.B, uint64(i), 8, 8, n-8))
			c.WaitOK(c.A, uint64(i))
			if !bytes.Equal(c.A.Mem[8:], c.B.Mem[8:]) {
				t.Fatal("wrong data")
			}
		}
		return p.Dev[1].Protocol().SentRNRNak.Load() - before, p.Dev[1].Stats().ResidencyPrefetches
	}
	if naks, pre := run(false); naks == 0 || pre != 0 {
		t.Errorf("without: %d RNR NAKs, %d prefetches", naks, pre)
	}
	if naks, pre := run(true); naks != 0 || pre < 5 {
		t.Errorf("with prefetch: %d RNR NAKs, %d prefetches", naks, pre)
	}
}

// TestResidencyHoldOff: a suspended region is left alone until it goes on, or its time is over.
func TestResidencyHoldOff(t *testing.T) {
	for _, lost := range []bool{false, true} {
		c := harness.NewPair(t, link).Connect(harness.ConnOptions{Access: residencyAccess})
		agree(t, c, provider.ResidencyOptions{})
		watch(t, c)
		if err := c.B.MR.Suspend(); err != nil {
			t.Fatal(err)
		}
		c.RunUntil(func() bool { return remote(t, c).HeldOff })
		before := c.Dev[1].Protocol().SentRNRNak.Load()
		harness.Fill(c.A.Mem[:100], 5)
		c.A.Send(c.A.Write(c.B, 1, 0, 0, 100))
		end := c.Clock.Now() + int64(5*time.Second) // longer than one message asks for
		c.RunUntil(func() bool { return c.Clock.Now() > end })
		if len(c.A.Poll()) != 0 || bytes.Equal(c.A.Mem[:100], c.B.Mem[:100]) {
			t.Error("the WRITE went through")
		}
		if lost {
			c.Net.SetFaults(1, 0, 0, 0)
		}
		if err := c.B.MR.Resume(); err != nil {
			t.Fatal(err)
		}
		from := c.Clock.Now()
		if lost {
			c.RunUntil(func() bool { return c.Clock.Now() > from+int64(500*time.Millisecond) })
			c.Net.SetFaults(0, 0, 0, 0)
		}
		c.WaitOK(c.A, 1)
		if took := time.Duration(c.Clock.Now() - from); took > 1500*time.Millisecond || !lost && took > time.Millisecond {
			t.Errorf("it went on after %v", took)
		}
		if n := c.Dev[1].Protocol().SentRNRNak.Load() - before; n != 0 {
			t.Errorf("%d RNR NAKs", n)
		}
	}
}

// TestResidencyPeerDies: what is held goes out when nobody answers, and fails as ever.
func TestResidencyPeerDies(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{Access: residencyAccess})
	agree(t, c, provider.ResidencyOptions{})
	watch(t, c)
	evict(t, c.B, 0, 1<<20)
	c.RunUntil(func() bool { return remote(t, c).Away == 1<<20 })
	c.Net.SetFaults(1, 0, 0, 0)
	c.A.Send(c.A.Write(c.B, 1, 0, 0, 1<<20))
	if wc := c.WaitOne(c.A); wc.Status != qp.WCRetryExcErr {
		t.Errorf("%+v", wc)
	}
	sent := c.Dev[0].Stats().ResidencySent
	end := c.Clock.Now() + int64(time.Minute)
	c.RunUntil(func() bool { return c.Clock.Now() > end })
	if n := c.Dev[0].Stats().ResidencySent - sent; n != 0 {
		t.Errorf("%d messages of a QP in error", n)
	}
}

// tapped notes the residency messages that a device sends.
type tapped struct {
	tap.Device
	said *[]wire.Residency
}

func (d tapped) WriteBatch(fs []tap.Frame) (int, error) {
	for _, f := range fs {
		var p wire.Packet
		var m wire.Residency
		if wire.Parse(f.B, &p) == nil && p.BTH.DestQP == wire.GSIQPN && wire.ParseResidency(p.Payload, &m) {
			*d.said = append(*d.said, m)
		}
	}
	return d.Device.WriteBatch(fs)
}

// TestResidencyLiars: who does not know the cookie is not heard, and who does gets no more
// than its peer may have.
func TestResidencyLiars(t *testing.T) {
	var said []wire.Residency
	p := harness.NewPairWith(t, link, func(i int, d tap.Device) tap.Device {
		if i == 1 {
			return tapped{d, &said}
		}
		return d
	})
	c := p.Connect(harness.ConnOptions{Access: residencyAccess})
	agree(t, c, provider.ResidencyOptions{})
	c.Settle()
	good := said[len(said)-1] // B's last: A's cookie is in it
	other := harness.NewEnd(t, c.Dev[0], harness.ConnOptions{Access: residencyAccess})
	mine := wire.ResidencyRange{IOVA: c.A.Addr, Len: 4096}
	seq := good.Seq + 1
	send := func(change func(m *wire.Residency, k *rcPacket)) (before, after provider.Stats) {
		t.Helper()
		m := wire.Residency{Kind: wire.ResWatch, Src: good.Src, Dst: good.Dst, Cookie: good.Cookie, Seq: seq, RKey: uint32(c.A.MR.RKey()), N: 1}
		m.Ranges[0] = mine
		seq++
		k := packetFor(c)
		k.bth.Op, k.bth.DestQP, k.bth.AckReq = wire.UDSendOnly, wire.GSIQPN, false
		k.ext = make([]byte, wire.DETHLen)
		wire.DETH{QKey: wire.GSIQKey, SrcQP: wire.GSIQPN}.Put(k.ext)
		k.body = nil
		change(&m, &k)
		if k.body == nil {
			k.body = make([]byte, wire.MADLen)
			m.Put(k.body)
		}
		b := make([]byte, 512)
		before = c.Dev[0].Stats()
		if _, err := p.Net.Port(1).WriteBatch([]tap.Frame{{B: b[:wire.Encode(b, &k.path, 1, &k.bth, k.ext, k.body)]}}); err != nil {
			t.Fatal(err)
		}
		end := c.Clock.Now() + int64(10*time.Millisecond)
		c.RunUntil(func() bool { return c.Clock.Now() >= end || !p.Step() })
		return before, c.Dev[0].Stats()
	}
	for _, l := range []struct {
		what   string
		change func(m *wire.Residency, k *rcPacket)
	}{
		{"cookie", func(m *wire.Residency, _ *rcPacket) { m.Cookie ^= 1 }},
		{"no cookie", func(m *wire.Residency, _ *rcPacket) { m.Cookie = 0 }},
		{"cookie of an Agree", func(m *wire.Residency, _ *rcPacket) { m.Kind, m.Cookie, m.Own = wire.ResAgree, 7, 8 }},
		{"cookie of a HoldOff", func(m *wire.Residency, _ *rcPacket) { m.Kind, m.Cookie, m.Arg = wire.ResHoldOff, 7, 1000 }},
		{"source QP", func(m *wire.Residency, _ *rcPacket) { m.Src++ }},
		{"QP that has none", func(m *wire.Residency, _ *rcPacket) { m.Dst = other.QP.Num() }},
		{"QP that there is not", func(m *wire.Residency, _ *rcPacket) { m.Dst ^= 0x800000 }},
		{"management QP", func(m *wire.Residency, _ *rcPacket) { m.Dst = 1 }},
		{"Q_Key", func(_ *wire.Residency, k *rcPacket) { clear(k.ext[:4]) }},
		{"third host", func(_ *wire.Residency, k *rcPacket) { k.path.Src = harness.Addrs(2)[0].Addr() }},
		{"service", func(_ *wire.Residency, k *rcPacket) { k.bth.Op, k.ext = wire.RCSendOnly, nil }},
		{"cut short", func(m *wire.Residency, k *rcPacket) {
			k.body = make([]byte, wire.MADLen)
			m.Put(k.body)
			k.body = k.body[:128]
		}},
		{"no bytes", func(_ *wire.Residency, k *rcPacket) { k.body = []byte{} }},
		{"class", func(m *wire.Residency, k *rcPacket) {
			k.body = make([]byte, wire.MADLen)
			m.Put(k.body)
			k.body[1] = 0x4f
		}},
	} {
		a, b := send(l.change)
		if b.Drops[provider.DropMAD] != a.Drops[provider.DropMAD]+1 || b.ResidencySent != a.ResidencySent || b.ResidencyReceived != a.ResidencyReceived {
			t.Errorf("wrong %s: dropped %d, sent %d, taken %d", l.what, b.Drops[provider.DropMAD]-a.Drops[provider.DropMAD],
				b.ResidencySent-a.ResidencySent, b.ResidencyReceived-a.ResidencyReceived)
		}
	}
	for _, l := range []struct {
		what   string
		change func(m *wire.Residency)
	}{
		{"another domain's rkey", func(m *wire.Residency) {
			m.RKey, m.Ranges[0].IOVA = uint32(other.MR.RKey()), other.Addr
		}},
		{"unknown rkey", func(m *wire.Residency) { m.RKey ^= 0x5a }},
		{"range before the region", func(m *wire.Residency) { m.Ranges[0].IOVA -= 4096 }},
		{"range beyond the region", func(m *wire.Residency) { m.Ranges[0].Len = 1 << 40 }},
		{"no range", func(m *wire.Residency) { m.N = 0 }},
	} {
		for _, kind := range []wire.ResidencyKind{wire.ResWatch, wire.ResPrefetch} {
			a, b := send(func(m *wire.Residency, _ *rcPacket) { m.Kind = kind; l.change(m) })
			if b.ResidencyReceived != a.ResidencyReceived+1 || b.ResidencySent != a.ResidencySent || b.ResidencyPrefetches != a.ResidencyPrefetches {
				t.Errorf("%s, kind %d: %d answers, %d prefetches", l.what, kind, b.ResidencySent-a.ResidencySent, b.ResidencyPrefetches-a.ResidencyPrefetches)
			}
		}
	}
	// Forged Hellos: no more answers than questions, and the peer stays who it is.
	for i := range 100 {
		a, b := send(func(m *wire.Residency, _ *rcPacket) { m.Kind, m.Cookie, m.Own = wire.ResHello, 0, uint64(i)+1 })
		if n := b.ResidencySent - a.ResidencySent; n > 1 {
			t.Fatalf("%d answers to a Hello", n)
		}
	}
	// What the real peer asks for is told, so all that was wrong above was what was changed.
	if a, b := send(func(*wire.Residency, *rcPacket) {}); b.ResidencySent == a.ResidencySent {
		t.Error("nothing is told to the peer")
	}
}

// TestResidencyLatePrefetch: what a former peer has asked for is not told to the next one.
func TestResidencyLatePrefetch(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{Access: residencyAccess})
	agree(t, c, provider.ResidencyOptions{})
	c.Settle()
	late := func() (tell func()) { return c.B.QP.LatePrefetch(c.B.MR.RKey(), c.B.Addr, 4096) }
	told := func(tell func()) bool {
		before := c.Dev[1].Stats().ResidencySent
		tell()
		return c.Dev[1].Stats().ResidencySent != before
	}
	former := late()
	if !told(late()) {
		t.Error("who has asked is told nothing")
	}
	c.B.QP.DisableResidency()
	if told(former) {
		t.Error("told to nobody")
	}
	c.A.QP.DisableResidency()
	agree(t, c, provider.ResidencyOptions{})
	c.Settle()
	if told(former) {
		t.Error("the next peer is told what the former one has asked for")
	}
	if former = late(); !told(former) {
		t.Error("the next peer is told nothing")
	}
	// One that has begun anew is another, too.
	c.A.QP.DisableResidency()
	enable(t, c.A, provider.ResidencyOptions{})
	c.RunUntil(c.A.QP.ResidencyAgreed)
	c.Settle()
	if told(former) {
		t.Error("a peer that has begun anew is told what it asked for before")
	}
}

// TestResidencyPrefetchInParts: of what does not fit into a message, or is more than one may
// ask for, the first part is asked for, and the next when that has come.
func TestResidencyPrefetchInParts(t *testing.T) {
	const page = 4096
	for _, tc := range []struct {
		name           string
		n, step, away  uint64
		messages, last int
	}{
		{"ranges", 1 << 20, 2 * page, page, 12, 7}, // 128 of them, 11 in a message
		{"bytes", 260 << 20, 260 << 20, 260 << 20, 2, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var said []wire.Residency
			p := harness.NewPairWith(t, link, func(i int, d tap.Device) tap.Device {
				if i == 0 {
					return tapped{d, &said}
				}
				return d
			})
			c := p.Connect(harness.ConnOptions{Access: residencyAccess, Mem: int(tc.n)})
			agree(t, c, provider.ResidencyOptions{})
			watch(t, c)
			rkey := c.B.MR.RKey()
			for at := uint64(0); at < tc.n; at += tc.step {
				c.A.QP.Assume(rkey, c.B.Addr+at, tc.away, true)
			}
			said = said[:0]
			c.A.Send(c.A.Read(c.B, 1, 0, 0, int(tc.n)))
			// From here on the clock stands still.
			for i := range tc.messages {
				if len(said) != i+1 || said[i].Kind != wire.ResPrefetch {
					t.Fatalf("%d messages were sent, want %d: %+v", len(said), i+1, said)
				}
				m := said[i]
				if i == tc.messages-1 && m.N != tc.last {
					t.Errorf("%d ranges in the last message", m.N)
				}
				sum := uint64(0)
				for _, g := range m.Ranges[:m.N] {
					sum += g.Len
				}
				if sum > 256<<20 || sum > uint64(m.N)*tc.away {
					t.Errorf("message %d asks for %d bytes", i, sum)
				}
				for k, g := range m.Ranges[:m.N] {
					c.A.QP.Assume(rkey, g.IOVA, g.Len, false)
					if k < m.N-1 && len(said) != i+1 {
						t.Fatal("more is asked for before all has come")
					}
				}
			}
			if len(said) != tc.messages {
				t.Errorf("%d messages, want %d", len(said), tc.messages)
			}
		})
	}
}

// TestResidencyWatchEnds: a region that takes another's place behind an rkey is told of, too.
func TestResidencyWatchEnds(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{Access: residencyAccess})
	agree(t, c, provider.ResidencyOptions{})
	watch(t, c)
	if err := c.B.MR.Reregister(mr.ChangeTranslation, nil, provider.MRAttr{Addr: uintptr(c.B.Addr), Length: uint64(len(c.B.Mem)) - 4096, Access: residencyAccess}); err != nil {
		t.Fatal(err)
	}
	c.RunUntil(func() bool { return !remote(t, c).Known })
	evict(t, c.B, 0, 64<<10)
	watch(t, c)
	c.RunUntil(func() bool { return remote(t, c).Away >= 60<<10 })
}

// TestResidencyRests: while nothing changes, little is done and less is said, also when what
// is watched takes many looks and some of it is away.
func TestResidencyRests(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{Access: residencyAccess, Mem: 1 << 30})
	agree(t, c, provider.ResidencyOptions{})
	watch(t, c)
	evict(t, c.B, 0, 64<<10)
	evict(t, c.B, 900<<20, 64<<10)
	c.RunUntil(func() bool { return remote(t, c).Away == 128<<10 })
	run := func(d time.Duration) (steps int) {
		end := c.Clock.Now() + int64(d)
		c.RunUntil(func() bool { steps++; return c.Clock.Now() >= end })
		return steps
	}
	run(10 * time.Second)
	sent := c.Dev[1].Stats().ResidencySent
	// A look takes three steps: the clock's, the look, and what comes of it.
	if n := run(10 * time.Second); n > 10*5*3 {
		t.Errorf("%d steps in 10 s of rest", n)
	}
	if n := c.Dev[1].Stats().ResidencySent - sent; n > 4 {
		t.Errorf("%d messages in 10 s of rest", n)
	}
	evict(t, c.B, 500<<20, 4096) // and it is awake
	c.RunUntil(func() bool { return remote(t, c).Away == 132<<10 })
}
