// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

var (
	group4 = netip.MustParseAddr("239.1.2.3")
	group6 = netip.MustParseAddr("ff15::abcd:1")
)

// datagramEnd is a UD QP that can send and receive, with a handle to a group.
func datagramEnd(t testing.TB, d *provider.Device, group netip.Addr) *harness.End {
	t.Helper()
	e := harness.NewEnd(t, d, harness.ConnOptions{Type: qp.TypeUD, Mem: 1 << 16})
	if err := harness.Up(e.QP, provider.QPAttr{Attr: qp.Attr{Port: 1, QKey: harness.QKey}}, qp.StateRTS); err != nil {
		t.Fatal(err)
	}
	gid := harness.GIDv4
	if group.Is6() {
		gid = harness.GIDv6
	}
	ah, err := e.PD.CreateAH(provider.AHAttr{DGID: provider.GIDOf(group), SGIDIndex: gid})
	if err != nil {
		t.Fatal(err)
	}
	e.AH = ah
	return e
}

func toGroup(e *harness.End, id uint64, n int) qp.SendWR {
	wr := e.Message(id, 0, n)
	wr.AH, wr.RemoteQPN, wr.RemoteQKey = e.AH.Index(), wire.MulticastQPN, harness.QKey
	return wr
}

func attach(t testing.TB, e *harness.End, group netip.Addr) {
	t.Helper()
	if err := e.QP.AttachMcast(provider.GIDOf(group)); err != nil {
		t.Fatal(err)
	}
}

// Three devices on a hub: who is attached receives, on the sender's device, too, but
// not the sender; who is not does not.
func TestMulticast(t *testing.T) {
	for _, group := range []netip.Addr{group4, group6} {
		t.Run(group.String(), func(t *testing.T) {
			p := harness.NewPair(t, link)
			devs := []*provider.Device{p.Dev[0], p.Dev[1], p.AddDevice()}
			// Two QPs a device; of the last device only one is attached.
			var ends []*harness.End
			for _, d := range devs {
				for range 2 {
					e := datagramEnd(t, d, group)
					ends = append(ends, e)
					if len(ends) < 6 {
						attach(t, e, group)
						attach(t, e, group) // a second time changes nothing
					}
				}
			}
			p.Settle()
			for from, a := range ends {
				for _, n := range []int{0, 1, 4096} {
					for _, e := range ends {
						e.Recv(1, 8192, n+40)
					}
					harness.Fill(a.Mem[:n], uint64(n))
					a.Send(toGroup(a, 2, n))
					p.Settle()
					for i, e := range ends {
						var want []qp.WCOpcode
						if i == from {
							want = append(want, qp.WCSend)
						} else if i < 5 {
							want = append(want, qp.WCRecv)
						}
						wcs := e.Poll()
						if len(wcs) != len(want) {
							t.Fatalf("%d bytes from %d: %d has %+v", n, from, i, wcs)
						}
						for j, wc := range wcs {
							if wc.Status != qp.WCSuccess || wc.Opcode != want[j] {
								t.Fatalf("%d bytes from %d: %d has %+v", n, from, i, wc)
							}
							if wc.Opcode == qp.WCRecv && (int(wc.ByteLen) != n+40 || wc.SrcQP != a.QP.Num() || !bytes.Equal(e.Mem[8192+40:][:n], a.Mem[:n])) {
								t.Fatalf("%d bytes from %d: %d received %+v", n, from, i, wc)
							}
						}
						// The buffer that was not used: empty the queue for the next round.
						if err := reset(e); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			for i, d := range devs {
				if st := d.Stats(); st.Dropped() != 0 {
					t.Errorf("device %d dropped %v", i, st.Drops)
				}
			}
			// After the last one has left nothing is delivered.
			for _, e := range ends[2:4] {
				if err := e.QP.DetachMcast(provider.GIDOf(group)); err != nil {
					t.Fatal(err)
				}
				if err := e.QP.DetachMcast(provider.GIDOf(group)); !errors.Is(err, provider.ErrInvalid) {
					t.Errorf("detach twice: %v", err)
				}
				e.Recv(1, 0, 100)
			}
			ends[0].Send(toGroup(ends[0], 1, 10))
			p.Settle()
			for _, e := range ends[2:4] {
				if wcs := e.Poll(); len(wcs) != 0 {
					t.Errorf("detached, but received %+v", wcs)
				}
			}
			if st := devs[1].Stats(); st.Drops[provider.DropMulticast] != 1 {
				t.Errorf("drops %v", st.Drops)
			}
		})
	}
}

// reset empties a QP's queues. It stays attached (IBA 10.5.2).
func reset(e *harness.End) error {
	if err := e.QP.Modify(provider.QPAttr{Attr: qp.Attr{State: qp.StateReset}}, qp.AttrState); err != nil {
		return err
	}
	return harness.Up(e.QP, provider.QPAttr{Attr: qp.Attr{Port: 1, QKey: harness.QKey}}, qp.StateRTS)
}

func TestMulticastErrors(t *testing.T) {
	p := harness.NewPair(t, link)
	ud := datagramEnd(t, p.Dev[0], group4)
	rc := harness.NewEnd(t, p.Dev[0], harness.ConnOptions{Mem: 4096})
	gid := provider.GIDOf(group4)
	for name, err := range map[string]error{
		"RC":         rc.QP.AttachMcast(gid),
		"unicast":    ud.QP.AttachMcast(provider.GIDOf(netip.MustParseAddr("10.91.0.1"))),
		"unicast v6": ud.QP.AttachMcast(provider.GIDOf(netip.MustParseAddr("fd91::1"))),
		"detach":     ud.QP.DetachMcast(gid),
	} {
		if !errors.Is(err, provider.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	attach(t, ud, group4)
	if err := ud.QP.Destroy(); !errors.Is(err, provider.ErrBusy) {
		t.Errorf("destroy while attached: %v", err)
	}
	if err := ud.QP.DetachMcast(gid); err != nil {
		t.Error(err)
	}
	if err := ud.QP.Destroy(); err != nil {
		t.Error(err)
	}
	if err := ud.QP.AttachMcast(gid); !errors.Is(err, provider.ErrClosed) {
		t.Errorf("attach after destroy: %v", err)
	}
}

func TestMulticastLimits(t *testing.T) {
	p := harness.NewPair(t, link)
	e := datagramEnd(t, p.Dev[0], group4)
	a := p.Dev[0].Query()
	group := func(i int) provider.GID {
		return provider.GID{0: 0xff, 1: 0x15, 14: byte(i >> 8), 15: byte(i)}
	}
	for i := range a.MaxMcastGrp {
		if err := e.QP.AttachMcast(group(i)); err != nil {
			t.Fatalf("group %d: %v", i, err)
		}
	}
	if err := e.QP.AttachMcast(group(a.MaxMcastGrp)); !errors.Is(err, provider.ErrNoMem) {
		t.Errorf("one group too many: %v", err)
	}
	for i := range a.MaxMcastQPAttach {
		q, err := e.PD.CreateQP(provider.QPInitAttr{Type: qp.TypeUD, SendCQ: e.CQ, RecvCQ: e.CQ})
		if err != nil {
			t.Fatal(err)
		}
		want := error(nil)
		if i == a.MaxMcastQPAttach-1 { // e.QP is one of them
			want = provider.ErrNoMem
		}
		if err := q.AttachMcast(group(5)); !errors.Is(err, want) {
			t.Fatalf("QP %d: %v", i, err)
		}
	}
	if err := e.QP.DetachMcast(group(7)); err != nil {
		t.Fatal(err)
	}
	if err := e.QP.AttachMcast(group(a.MaxMcastGrp)); err != nil {
		t.Errorf("room again: %v", err)
	}
}

// Packets to a group that are not what they should be reach nobody.
func TestMulticastDemux(t *testing.T) {
	for _, tc := range []struct {
		name   string
		why    provider.DropReason // 0: delivered
		change func(k *rcPacket, f []byte)
	}{
		{"good", 0, nil},
		{"ICRC", provider.DropICRC, func(_ *rcPacket, f []byte) {
			if f != nil {
				f[len(f)-1] ^= 1
			}
		}},
		{"unicast QPN", provider.DropMulticast, func(k *rcPacket, _ []byte) { k.bth.DestQP = 0x123456 }},
		{"RC", provider.DropService, func(k *rcPacket, _ []byte) { k.bth.Op, k.ext = wire.RCSendOnly, nil }},
		{"another group", provider.DropMulticast, func(k *rcPacket, _ []byte) { k.path.Dst = netip.MustParseAddr("239.1.2.4") }},
		{"the multicast QPN at our address", provider.DropMulticast, func(k *rcPacket, _ []byte) {
			k.path.Dst = harness.Addrs(0)[0].Addr()
		}},
		{"our own, sent back", provider.DropWrongMAC, func(k *rcPacket, _ []byte) { k.path.SrcMAC = k.path.DstMAC }},
		{"partition", provider.DropPKey, func(k *rcPacket, _ []byte) { k.bth.PKey = 0x8001 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := harness.NewPair(t, link)
			e := datagramEnd(t, p.Dev[0], group4)
			attach(t, e, group4)
			p.Settle()
			e.Recv(1, 0, 100)
			k := rcPacket{
				path: wire.Path{SrcMAC: [6]byte(p.Dev[1].MAC()), DstMAC: [6]byte(p.Dev[0].MAC()), Src: harness.Addrs(1)[0].Addr(), Dst: group4, SrcPort: 0xc001, HopLimit: 64},
				bth:  wire.BTH{Op: wire.UDSendOnly, PKey: 0xffff, DestQP: wire.MulticastQPN},
				ext:  make([]byte, wire.DETHLen), body: []byte("hello"),
			}
			wire.DETH{QKey: harness.QKey, SrcQP: e.QP.Num()}.Put(k.ext) // the same number elsewhere is another QP
			if tc.change != nil {
				tc.change(&k, nil)
			}
			k.path.DstMAC = [6]byte{1, 0, 0x5e, 1, 2, 3}
			f := k.frame()
			if tc.change != nil {
				tc.change(&rcPacket{}, f)
			}
			before := p.Dev[0].Stats()
			inject(t, p, f)
			after := p.Dev[0].Stats()
			for r := range provider.NumDropReasons {
				want := before.Drops[r]
				if r == tc.why && r != 0 {
					want++
				}
				if after.Drops[r] != want {
					t.Errorf("drops for reason %v: %d, want %d", r, after.Drops[r], want)
				}
			}
			if wcs := e.Poll(); (len(wcs) == 1) != (tc.why == 0) {
				t.Errorf("completions %+v", wcs)
			}
		})
	}
}

// The membership reports are those of the kernel, byte for byte, and its datagrams
// to the group arrive.
func TestMulticastCapture(t *testing.T) {
	frames := capture(t, "ud-multicast-mckey-v4")
	var reports, data [][]byte
	for _, f := range frames {
		switch {
		case f[23] == 17:
			data = append(data, f)
		case f[11] == 2: // from 10.77.0.2
			reports = append(reports, f)
		}
	}
	if len(reports) != 3 || len(data) != 5 {
		t.Fatalf("%d reports and %d datagrams in the capture", len(reports), len(data))
	}
	dev, say, read := rxeHost(t, 2)
	e := harness.NewEnd(t, dev, harness.ConnOptions{Type: qp.TypeUD, Mem: 1 << 16})
	var first wire.Packet
	if err := wire.Parse(data[0], &first); err != nil {
		t.Fatal(err)
	}
	if err := harness.Up(e.QP, provider.QPAttr{Attr: qp.Attr{Port: 1, QKey: first.DETH().QKey}}, qp.StateRTS); err != nil {
		t.Fatal(err)
	}
	attach(t, e, group4)
	joined := read()
	for _, f := range data {
		e.Recv(1, 0, 4096)
		p := retarget(t, f, e)
		say(f)
		wcs := e.Poll()
		if len(wcs) != 1 || wcs[0].Imm != p.Imm() || int(wcs[0].ByteLen) != 40+len(p.Payload) || !bytes.Equal(e.Mem[40:40+len(p.Payload)], p.Payload) {
			t.Fatalf("%+v", wcs)
		}
	}
	if err := e.QP.DetachMcast(provider.GIDOf(group4)); err != nil {
		t.Fatal(err)
	}
	left := read()
	if len(joined) != 1 || !bytes.Equal(joined[0], reports[0]) || len(left) != 1 || !bytes.Equal(left[0], reports[2]) {
		t.Errorf("reports\n% x\n% x\nwant\n% x\n% x", joined, left, reports[0], reports[2])
	}
}

func TestMulticastAllocatesNothing(t *testing.T) {
	p := harness.NewPair(t, link)
	a, b, c := datagramEnd(t, p.Dev[0], group4), datagramEnd(t, p.Dev[1], group4), datagramEnd(t, p.Dev[0], group4)
	for _, e := range []*harness.End{a, b, c} {
		attach(t, e, group4)
	}
	p.Settle()
	send := []qp.SendWR{toGroup(a, 1, 4000)}
	recv := []qp.RecvWR{{ID: 1, SGL: []qp.SGE{b.SGE(0, 4096)}}}
	recvC := []qp.RecvWR{{ID: 1, SGL: []qp.SGE{c.SGE(0, 4096)}}}
	wcs := make([]qp.WC, 4)
	step := func() {
		b.QP.PostRecv(recv)
		c.QP.PostRecv(recvC)
		a.QP.PostSend(send)
		for n := 0; n < 3; {
			n += a.CQ.Poll(wcs) + b.CQ.Poll(wcs) + c.CQ.Poll(wcs)
			if n < 3 && !p.Step() {
				t.Fatalf("%d of 3 completions", n)
			}
		}
	}
	for range 100 {
		step()
	}
	if n := testing.AllocsPerRun(300, step); n != 0 {
		t.Errorf("%v allocations per message", n)
	}
}

// Joining, leaving and handles that come and go, from several goroutines, while
// datagrams fly.
func TestMulticastLive(t *testing.T) {
	p := harness.NewLivePair(t, taptest.Config{})
	a, b := datagramEnd(t, p.Dev[0], group4), datagramEnd(t, p.Dev[1], group4)
	done := make(chan error, 3)
	const rounds = 300
	go func() {
		var err error
		for range rounds {
			err = errors.Join(err, b.QP.AttachMcast(provider.GIDOf(group4)), b.QP.DetachMcast(provider.GIDOf(group4)))
		}
		done <- err
	}()
	go func() {
		var err error
		for range rounds {
			ah, e := a.PD.CreateAH(a.AH.Attr())
			if e == nil {
				e = ah.Destroy()
			}
			err = errors.Join(err, e)
		}
		done <- err
	}()
	go func() {
		wcs := make([]qp.WC, 1)
		for range rounds {
			if _, err := a.QP.PostSend([]qp.SendWR{toGroup(a, 1, 100)}); err != nil {
				done <- err
				return
			}
			for a.CQ.Poll(wcs) == 0 {
				runtime.Gosched()
			}
			if wcs[0].Status != qp.WCSuccess {
				done <- fmt.Errorf("%+v", wcs[0])
				return
			}
		}
		done <- nil
	}()
	for range 3 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	// After all that an ordinary datagram to the group arrives.
	attach(t, b, group4)
	b.Recv(1, 0, 200)
	a.Send(toGroup(a, 2, 100))
	p.RunUntil(func() bool { return len(b.Poll()) == 1 })
}
