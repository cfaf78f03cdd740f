// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/harness"
)

// rawSend is a work request for a frame that is copied into the end's memory.
func rawSend(e *harness.End, id uint64, f []byte) qp.SendWR {
	copy(e.Mem[1<<15:], f)
	return e.Message(id, 1<<15, len(f))
}

func one(t *testing.T, e *harness.End, id uint64, want qp.WCStatus) {
	t.Helper()
	wcs := e.Poll()
	if len(wcs) != 1 || wcs[0].ID != id || wcs[0].Status != want {
		t.Fatalf("completions %+v, want %d with %v", wcs, id, want)
	}
}

// Frames go out as they stand, from lists and inline; what is no frame, or too long for
// the link, is a local length error and stops the send queue (IBA 10.3.1.6).
func TestRawSend(t *testing.T) {
	s := newStation(t)
	e := rawEnd(t, s.dev)
	s.read()
	f := eth(otherMAC, stationMAC, 0x88b5, bytes.Repeat([]byte("frame."), 200)...)
	copy(e.Mem, f)
	e.Send(qp.SendWR{ID: 1, Opcode: qp.WRSend, Flags: qp.SendSignaled, SGL: []qp.SGE{e.SGE(0, 10), e.SGE(10, 0), e.SGE(10, len(f)-10)}})
	if out := s.read(); len(out) != 1 || !bytes.Equal(out[0], f) {
		t.Fatalf("sent %d frames: % x", len(out), out)
	}
	one(t, e, 1, qp.WCSuccess)
	e.Send(qp.SendWR{ID: 2, Opcode: qp.WRSend, Flags: qp.SendSignaled | qp.SendInline, Inline: f[:60]})
	if out := s.read(); len(out) != 1 || !bytes.Equal(out[0], f[:60]) {
		t.Fatalf("sent %d frames: % x", len(out), out)
	}
	one(t, e, 2, qp.WCSuccess)

	mtu := s.port.MTU()
	long := eth(otherMAC, stationMAC, 0x88b5, bytes.Repeat([]byte{7}, mtu+8)...)
	for i, c := range []struct {
		f  []byte
		ok bool
	}{
		{f[:14], true}, {f[:13], false}, {nil, false},
		{long[:mtu+14], true}, {long[:mtu+15], false},
		{vlan(long, 0x8100, 5)[:mtu+18], true}, {vlan(long, 0x8100, 5)[:mtu+19], false},
		{long[:mtu+18], false}, {vlan(long, 0x88a8, 5)[:mtu+18], true},
	} {
		if c.ok {
			before := s.dev.Stats().TxFrames
			e.Send(rawSend(e, 3, c.f))
			// The link under test has no VLANs: it loses what is longer than its MTU.
			if out := s.read(); len(c.f) <= mtu+14 && (len(out) != 1 || !bytes.Equal(out[0], c.f)) || s.dev.Stats().TxFrames != before+1 {
				t.Fatalf("%d: sent %d frames", i, len(out))
			}
			one(t, e, 3, qp.WCSuccess)
			continue
		}
		e.Send(rawSend(e, 4, c.f), rawSend(e, 5, f))
		if out := s.read(); len(out) != 0 {
			t.Fatalf("%d: sent %d frames", i, len(out))
		}
		wcs := e.Poll()
		if len(wcs) != 2 || wcs[0].Status != qp.WCLocLenErr || wcs[1].Status != qp.WCWRFlushErr || e.QP.State() != qp.StateSQE {
			t.Fatalf("%d: %+v in %v", i, wcs, e.QP.State())
		}
		if err := e.QP.Modify(provider.QPAttr{Attr: qp.Attr{State: qp.StateRTS}}, qp.AttrState); err != nil {
			t.Fatal(err)
		}
	}
	e.Send(qp.SendWR{ID: 6, Opcode: qp.WRSend, SGL: []qp.SGE{{Addr: e.Addr, Length: 100, LKey: e.MR.LKey() ^ 0x100}}})
	one(t, e, 6, qp.WCLocProtErr)
	for _, op := range []qp.WROpcode{qp.WRSendImm, qp.WRWrite, qp.WRRead, qp.WRSendInv, qp.WRAtomicFetchAdd} {
		if _, err := e.QP.PostSend([]qp.SendWR{{Opcode: op}}); !errors.Is(err, qp.ErrOpcode) {
			t.Errorf("opcode %d: %v", op, err)
		}
	}
}

// The kernel's state table for RAW_PACKET.
func TestRawStates(t *testing.T) {
	s := newStation(t)
	e := harness.NewEnd(t, s.dev, harness.ConnOptions{Type: qp.TypeRaw, Mem: 4096})
	modify := func(st qp.State, m qp.AttrMask) error {
		return e.QP.Modify(provider.QPAttr{Attr: qp.Attr{State: st, Port: 1, RateLimit: 1 << 20}}, m|qp.AttrState)
	}
	for _, c := range []struct {
		to qp.State
		m  qp.AttrMask
		ok bool
	}{
		{qp.StateRTR, 0, false}, {qp.StateInit, 0, false}, {qp.StateInit, qp.AttrPort | qp.AttrPKeyIndex, false},
		{qp.StateInit, qp.AttrPort | qp.AttrQKey, false}, {qp.StateInit, qp.AttrPort, true}, {qp.StateInit, 0, true},
		{qp.StateRTR, qp.AttrPathMTU, false}, {qp.StateRTR, 0, true}, {qp.StateRTS, qp.AttrSQPSN, false},
		{qp.StateRTS, qp.AttrRateLimit, true}, {qp.StateSQD, qp.AttrEnSQDAsync, false}, {qp.StateSQD, 0, true},
		{qp.StateRTS, 0, true}, {qp.StateErr, 0, true}, {qp.StateRTS, 0, false}, {qp.StateReset, 0, true},
	} {
		if err := modify(c.to, c.m); (err == nil) != c.ok {
			t.Fatalf("to %v with %v from %v: %v", c.to, c.m, e.QP.State(), err)
		}
	}
}

// The rate limit holds for frames, too.
func TestRawRate(t *testing.T) {
	s := newStation(t)
	e := rawEnd(t, s.dev)
	s.read()
	const frames, size, kbps = 20, 1000, 8000 // 1 ms each
	if err := e.QP.Modify(provider.QPAttr{Attr: qp.Attr{State: qp.StateRTS, RateLimit: kbps}}, qp.AttrState|qp.AttrRateLimit); err != nil {
		t.Fatal(err)
	}
	copy(e.Mem, eth(otherMAC, stationMAC, 0x88b5))
	for i := range frames {
		e.Send(qp.SendWR{ID: uint64(i), Opcode: qp.WRSend, SGL: []qp.SGE{e.SGE(0, size)}})
	}
	from, sent := s.clock.Now(), 0
	for sent += len(s.read()); sent < frames; sent += len(s.read()) {
		s.clock.AdvanceTo(s.dev.NextDeadline())
	}
	if took := time.Duration(s.clock.Now() - from); took < (frames-2)*time.Millisecond || took > (frames+2)*time.Millisecond {
		t.Errorf("%d frames of %d bytes at %d kbit/s take %v", frames, size, kbps, took)
	}
}

// A frame that meets no receive is lost and counted; one that is too long ends the
// receive and the QP; so does a bad list.
func TestRawReceiveErrors(t *testing.T) {
	f := eth(engineMAC, stationMAC, 0x88b5, make([]byte, 100)...)
	for _, c := range []struct {
		name string
		recv func(e *harness.End) qp.SGE
		want qp.WCStatus
	}{
		{"short buffer", func(e *harness.End) qp.SGE { return e.SGE(0, len(f)-1) }, qp.WCLocLenErr},
		{"bad key", func(e *harness.End) qp.SGE {
			return qp.SGE{Addr: e.Addr, Length: 2000, LKey: e.MR.LKey() ^ 0x100}
		}, qp.WCLocProtErr},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStation(t)
			e := rawEnd(t, s.dev)
			flow(t, e, provider.FlowAttr{})
			s.say(f)
			if st := s.dev.Protocol(); st.OutOfBuffer.Load() != 1 || len(e.Poll()) != 0 || e.QP.State() != qp.StateRTS {
				t.Fatalf("without a receive: %d counted, %v", st.OutOfBuffer.Load(), e.QP.State())
			}
			if _, err := e.QP.PostRecv([]qp.RecvWR{{ID: 1, SGL: []qp.SGE{c.recv(e)}}}); err != nil {
				t.Fatal(err)
			}
			e.Recv(2, 0, 2000)
			s.say(f)
			wcs := e.Poll()
			if len(wcs) != 2 || wcs[0].ID != 1 || wcs[0].Status != c.want || wcs[1].Status != qp.WCWRFlushErr || e.QP.State() != qp.StateErr {
				t.Fatalf("%+v, %v", wcs, e.QP.State())
			}
			s.say(f) // nobody is hurt
		})
	}
}

// Frames of RAW_PACKET QPs reach other QPs of the device and the peer's; they come back
// to their sender only when they are for the engine's own MAC.
func TestRawAcross(t *testing.T) {
	p := harness.NewPair(t, link)
	a, b, c := rawEnd(t, p.Dev[0]), rawEnd(t, p.Dev[0]), rawEnd(t, p.Dev[1])
	ends := []*harness.End{a, b, c}
	for _, e := range ends {
		flow(t, e, provider.FlowAttr{Specs: []provider.FlowSpec{provider.EthSpec{Val: provider.EthFilter{EtherType: 0x88b5}, Mask: provider.EthFilter{EtherType: 0xffff}}}})
		flow(t, e, provider.FlowAttr{Type: provider.FlowSniffer})
	}
	for _, to := range []struct {
		mac  [6]byte
		want [3]int
	}{
		{broadcast, [3]int{0, 1, 1}}, {otherMAC, [3]int{0, 1, 1}}, {[6]byte(p.Dev[1].MAC()), [3]int{0, 1, 1}},
		{[6]byte(p.Dev[0].MAC()), [3]int{1, 1, 0}},
	} {
		f := eth(to.mac, stationMAC, 0x88b5, bytes.Repeat([]byte{0xab}, 50)...)
		p.Settle()
		for _, e := range ends {
			if err := e.QP.Modify(provider.QPAttr{Attr: qp.Attr{State: qp.StateReset}}, qp.AttrState); err != nil {
				t.Fatal(err)
			}
			e.Poll()
			for _, st := range []qp.State{qp.StateInit, qp.StateRTR, qp.StateRTS} {
				m := qp.AttrState
				if st == qp.StateInit {
					m |= qp.AttrPort
				}
				if err := e.QP.Modify(provider.QPAttr{Attr: qp.Attr{State: st, Port: 1}}, m); err != nil {
					t.Fatal(err)
				}
			}
			e.Recv(1, 0, 2000)
			e.Recv(2, 0, 2000)
		}
		a.Send(rawSend(a, 9, f))
		p.Settle()
		for i, e := range ends {
			n := 0
			for _, wc := range e.Poll() {
				if wc.Status != qp.WCSuccess || wc.Opcode == qp.WCRecv && !bytes.Equal(e.Mem[:wc.ByteLen], f) {
					t.Fatalf("%+v", wc)
				}
				if wc.Opcode == qp.WCRecv {
					n++
				}
			}
			if n != to.want[i] {
				t.Errorf("to %x: QP %d received %d", to.mac, i, n)
			}
		}
	}
}

func TestFlowTagAndCounters(t *testing.T) {
	s := newStation(t)
	e, e2 := rawEnd(t, s.dev), rawEnd(t, s.dev)
	c, err := s.dev.CreateCounters()
	if err != nil {
		t.Fatal(err)
	}
	attach := func(kind provider.CounterKind, index uint32, want error) {
		t.Helper()
		if err := c.Attach(kind, index); !errors.Is(err, want) {
			t.Fatalf("attach %d at %d: %v, want %v", kind, index, err, want)
		}
	}
	read := func(want ...uint64) {
		t.Helper()
		v := make([]uint64, len(want))
		v[len(v)-1] = 99
		if err := c.Read(v); err != nil {
			t.Fatal(err)
		}
		for i := range v {
			if v[i] != want[i] {
				t.Fatalf("read %v, want %v", v, want)
			}
		}
	}
	attach(provider.CounterPackets, 0, nil)
	attach(provider.CounterBytes, 2, nil)
	attach(provider.CounterBytes, 3, nil)
	attach(provider.CounterPackets, 3, nil) // both, summed up
	attach(2, 0, provider.ErrNotSupported)
	attach(provider.CounterBytes, 1024, provider.ErrInvalid)
	if err := c.Read(make([]uint64, 3)); !errors.Is(err, provider.ErrInvalid) {
		t.Errorf("read into too few: %v", err)
	}
	f1 := flow(t, e, provider.FlowAttr{Specs: []provider.FlowSpec{toMAC(otherMAC), provider.CountAction{Counters: c}, provider.TagAction{Tag: 0xfedcba98}}})
	f2 := flow(t, e2, provider.FlowAttr{Specs: []provider.FlowSpec{provider.CountAction{Counters: c}, provider.DropAction{}, toMAC(mcastMAC)}})
	attach(provider.CounterBytes, 1, provider.ErrBusy)
	if err := c.Destroy(); !errors.Is(err, provider.ErrBusy) {
		t.Errorf("destroy bound counters: %v", err)
	}
	if err := e.QP.Destroy(); !errors.Is(err, provider.ErrBusy) {
		t.Errorf("destroy a QP with a flow: %v", err)
	}
	read(0, 0, 0, 0, 0)
	e.Recv(1, 0, 2000)
	s.say(eth(otherMAC, stationMAC, 0x88b5, make([]byte, 86)...)) // received
	s.say(eth(otherMAC, stationMAC, 0x88b5, make([]byte, 36)...)) // no receive left: counted all the same
	s.say(eth(mcastMAC, stationMAC, 0x88b5, make([]byte, 46)...)) // dropped
	s.say(eth(stationMAC, stationMAC, 0x88b5, make([]byte, 46)...))
	read(3, 0, 210, 213, 0)
	if wcs := got(t, e); len(wcs) != 1 || wcs[0].FlowTag != 0xfedcba98 {
		t.Errorf("tagged %+v", wcs)
	}
	if st := s.dev.Stats(); st.FlowDelivered != 2 || st.FlowDropped != 1 {
		t.Errorf("delivered %d, dropped %d", st.FlowDelivered, st.FlowDropped)
	}
	for _, f := range []*provider.Flow{f1, f2} {
		if err := f.Destroy(); err != nil {
			t.Fatal(err)
		}
	}
	attach(provider.CounterPackets, 4, nil)
	read(3, 0, 210, 213, 0)
	if err := errors.Join(c.Destroy(), e.QP.Destroy(), e2.QP.Destroy()); err != nil {
		t.Error(err)
	}
	if err := c.Destroy(); err != provider.ErrClosed {
		t.Errorf("destroy twice: %v", err)
	}
	if err := c.Read(make([]uint64, 9)); err != provider.ErrClosed {
		t.Errorf("read what is destroyed: %v", err)
	}
}

func TestFlowErrors(t *testing.T) {
	s := newStation(t)
	raw := rawEnd(t, s.dev)
	rc, ud := harness.NewEnd(t, s.dev, harness.ConnOptions{Mem: 4096}), harness.NewEnd(t, s.dev, harness.ConnOptions{Type: qp.TypeUD, Mem: 4096})
	c, err := newStation(t).dev.CreateCounters()
	if err != nil {
		t.Fatal(err)
	}
	dead, err := s.dev.CreateCounters()
	if err != nil {
		t.Fatal(err)
	}
	if err := dead.Destroy(); err != nil {
		t.Fatal(err)
	}
	isIP6 := provider.EthSpec{Val: provider.EthFilter{EtherType: 0x86dd}, Mask: provider.EthFilter{EtherType: 0xffff}}
	isTCP := provider.IPv4Spec{Val: provider.IPv4Filter{Proto: 6}, Mask: provider.IPv4Filter{Proto: 0xff}}
	specs := func(s ...provider.FlowSpec) provider.FlowAttr { return provider.FlowAttr{Port: 1, Specs: s} }
	for i, c := range []struct {
		e    *harness.End
		a    provider.FlowAttr
		want error
	}{
		{rc, specs(), provider.ErrInvalid}, {ud, specs(), provider.ErrNotSupported},
		{raw, provider.FlowAttr{}, provider.ErrInvalid}, {raw, provider.FlowAttr{Port: 2}, provider.ErrInvalid},
		{raw, provider.FlowAttr{Port: 1, Type: 4}, provider.ErrInvalid},
		{raw, provider.FlowAttr{Port: 1, Type: provider.FlowSniffer, DontTrap: true}, provider.ErrInvalid},
		{raw, provider.FlowAttr{Port: 1, Type: provider.FlowAllDefault, Specs: []provider.FlowSpec{isIP6}}, provider.ErrInvalid},
		{raw, specs(isIP6, isIP6), provider.ErrInvalid}, {raw, specs(provider.TCPSpec{}, provider.UDPSpec{}), provider.ErrInvalid},
		{raw, specs(provider.IPv4Spec{}, provider.IPv6Spec{}), provider.ErrInvalid}, {raw, specs(isIP6, provider.IPv4Spec{}), provider.ErrInvalid},
		{raw, specs(isTCP, provider.UDPSpec{}), provider.ErrInvalid}, {raw, specs(isTCP, provider.TCPSpec{}), nil},
		{raw, specs(provider.DropAction{}, provider.DropAction{}), provider.ErrInvalid},
		{raw, specs(provider.TagAction{}, provider.TagAction{}), provider.ErrInvalid},
		{raw, specs(provider.CountAction{}), provider.ErrInvalid}, {raw, specs(provider.CountAction{Counters: c}), provider.ErrInvalid},
		{raw, specs(provider.CountAction{Counters: dead}), provider.ErrClosed},
	} {
		if _, err := c.e.QP.CreateFlow(c.a); !errors.Is(err, c.want) {
			t.Errorf("%d: %v, want %v", i, err, c.want)
		}
	}
	// A device can be closed with flows left.
	if err := s.dev.Close(); err != nil {
		t.Error(err)
	}
	if _, err := raw.QP.CreateFlow(specs()); err != provider.ErrClosed {
		t.Errorf("flow on a closed device: %v", err)
	}
}

func TestFlowLimit(t *testing.T) {
	s := newStation(t)
	e := rawEnd(t, s.dev)
	var last *provider.Flow
	n := 0
	for {
		f, err := e.QP.CreateFlow(provider.FlowAttr{Port: 1, Priority: uint16(n * 7919)})
		if err != nil {
			if !errors.Is(err, provider.ErrNoMem) || n != 4096 {
				t.Fatalf("after %d: %v", n, err)
			}
			break
		}
		last = f
		n++
	}
	if err := last.Destroy(); err != nil {
		t.Fatal(err)
	}
	flow(t, e, provider.FlowAttr{})
}

func TestRawAllocatesNothing(t *testing.T) {
	p := harness.NewPair(t, link)
	a, b := rawEnd(t, p.Dev[0]), rawEnd(t, p.Dev[1])
	flow(t, b, provider.FlowAttr{Specs: []provider.FlowSpec{toMAC([6]byte(p.Dev[1].MAC())), provider.IPv4Spec{}, provider.UDPSpec{}, provider.TagAction{Tag: 1}}})
	flow(t, a, provider.FlowAttr{Type: provider.FlowSniffer})
	p.Settle()
	send := []qp.SendWR{rawSend(a, 1, eth([6]byte(p.Dev[1].MAC()), stationMAC, 0x800, ip4(17, bytes.Repeat(ports, 50)...)...))}
	recv := []qp.RecvWR{{ID: 1, SGL: []qp.SGE{b.SGE(0, 2000)}}}
	wcs := make([]qp.WC, 4)
	step := func() {
		if _, err := b.QP.PostRecv(recv); err != nil {
			t.Fatal(err)
		}
		if _, err := a.QP.PostSend(send); err != nil {
			t.Fatal(err)
		}
		for n := 2; n > 0; {
			n -= a.CQ.Poll(wcs)
			n -= b.CQ.Poll(wcs)
			p.Net.Clock().AdvanceTo(p.Net.Clock().Now() + 1000)
		}
	}
	for range 100 {
		step()
	}
	if n := testing.AllocsPerRun(500, step); n != 0 {
		t.Errorf("%v allocations per frame", n)
	}
}
