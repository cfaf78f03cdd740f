// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

// paths are the ways between two QPs that every service is tried on.
var paths = []struct {
	name string
	o    harness.ConnOptions
}{
	{"v4", harness.ConnOptions{}},
	{"v6", harness.ConnOptions{GID: harness.GIDv6}},
	{"link-local", harness.ConnOptions{Link: true}},
	{"self", harness.ConnOptions{Self: true}},
	{"self-v6", harness.ConnOptions{Self: true, GID: harness.GIDv6}},
	{"srq", harness.ConnOptions{SRQ: true}},
	{"psnwrap", harness.ConnOptions{PSN: [2]uint32{0xfffffe, 0xffffff}}},
}

func TestUC(t *testing.T) {
	for _, tc := range paths {
		for _, mtu := range []qp.MTU{qp.MTU256, qp.MTU4096} {
			t.Run(fmt.Sprintf("%s-%d", tc.name, mtu.Bytes()), func(t *testing.T) {
				tc.o.Type, tc.o.MTU = qp.TypeUC, mtu
				c := harness.NewPair(t, link).Connect(tc.o)
				for _, n := range []int{0, 1, 255, 256, 257, 4096, 4097, 30_000} {
					for _, op := range []qp.WROpcode{qp.WRSend, qp.WRSendImm, qp.WRWrite, qp.WRWriteImm} {
						harness.Fill(c.A.Mem[:n], uint64(n))
						clear(c.B.Mem[dstOff : dstOff+n])
						if op != qp.WRWrite {
							c.B.Recv(1, dstOff, n)
						}
						wr := c.A.Write(c.B, 2, 0, dstOff, n)
						wr.Opcode, wr.Imm = op, 5
						c.A.Send(wr)
						c.WaitOK(c.A, 2)
						if op != qp.WRWrite {
							if wc := c.WaitOK(c.B, 1); int(wc.ByteLen) != n || wc.SrcQP != c.A.QP.Num() {
								t.Fatalf("%+v", wc)
							}
						} else {
							c.Settle()
						}
						if !bytes.Equal(c.A.Mem[:n], c.B.Mem[dstOff:dstOff+n]) {
							t.Fatalf("opcode %d, %d bytes: wrong data", op, n)
						}
					}
				}
				for i, d := range c.Dev {
					if st := d.Stats(); st.Dropped() != 0 || d.Protocol().Dropped.Load() != 0 {
						t.Errorf("device %d dropped %v", i, st.Drops)
					}
				}
			})
		}
	}
}

// On a link that loses, duplicates and reorders, what UC delivers is whole and
// never more than the receiver asked for.
func TestUCOnBadLink(t *testing.T) {
	p := harness.NewPair(t, taptest.Config{Seed: 5, Loss: 0.02, Dup: 0.01, Reorder: 0.01, Delay: link.Delay})
	c := p.Connect(harness.ConnOptions{Type: qp.TypeUC, MTU: qp.MTU256})
	const n, size, each = 400, 2000, 2048
	whole := 0
	posted := 0
	for i := range n {
		for ; posted < i+20 && posted < 500; posted++ {
			c.B.Recv(uint64(posted), posted*each, each)
		}
		harness.Fill(c.A.Mem[:size], uint64(i))
		binary.NativeEndian.PutUint32(c.A.Mem, uint32(i))
		c.A.Send(c.A.Message(uint64(i), 0, size))
		c.WaitOK(c.A, uint64(i))
		p.Settle()
		for _, wc := range c.B.Poll() {
			got := c.B.Mem[int(wc.ID)*each:][:size]
			want := make([]byte, size)
			k := binary.NativeEndian.Uint32(got)
			harness.Fill(want, uint64(k))
			binary.NativeEndian.PutUint32(want, k)
			if wc.Status != qp.WCSuccess || wc.ByteLen != size || !bytes.Equal(got, want) {
				t.Fatalf("message %d: %+v", i, wc)
			}
			whole++
		}
	}
	dropped := c.Dev[1].Protocol().MessagesDropped.Load()
	if whole < n/2 || whole >= n || dropped == 0 {
		t.Errorf("%d of %d messages received, %d dropped in their midst", whole, n, dropped)
	}
}

func TestUCSourceCheck(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{Type: qp.TypeUC, Mem: 4096})
	c.A.Recv(1, 0, 100)
	k := packetFor(c)
	k.bth.Op = wire.UCSendOnly
	k.path.Src = netip.MustParseAddr("10.91.0.3")
	inject(t, p, k.frame())
	if st := c.Dev[0].Stats(); st.Drops[provider.DropSource] != 1 || len(c.A.Poll()) != 0 {
		t.Fatalf("drops %v", st.Drops)
	}
	k.path.Src = harness.Addrs(1)[0].Addr()
	inject(t, p, k.frame())
	if wcs := c.A.Poll(); len(wcs) != 1 || string(c.A.Mem[:5]) != "hello" {
		t.Fatalf("completions %+v", wcs)
	}
}

// A QP takes packets of its own service only (IBA 9.6.1.1.2).
func TestServices(t *testing.T) {
	ops := map[qp.Type]wire.Opcode{qp.TypeRC: wire.RCSendOnly, qp.TypeUC: wire.UCSendOnly, qp.TypeUD: wire.UDSendOnly}
	for typ := range ops {
		for of, op := range ops {
			p := harness.NewPair(t, link)
			c := p.Connect(harness.ConnOptions{Type: typ, Mem: 4096})
			c.A.Recv(1, 0, 100)
			k := packetFor(c)
			k.bth.Op, k.ext = op, nil
			if of == qp.TypeUD {
				k.ext = make([]byte, wire.DETHLen)
				wire.DETH{QKey: harness.QKey, SrcQP: 5}.Put(k.ext)
			}
			inject(t, p, k.frame())
			wcs, st := c.A.Poll(), c.Dev[0].Stats()
			if (len(wcs) == 1) != (of == typ) || (st.Drops[provider.DropService] == 1) != (of != typ) {
				t.Errorf("%v packet to a %v QP: completions %+v, drops %v", of, typ, wcs, st.Drops)
			}
		}
	}
}

func TestUD(t *testing.T) {
	for _, tc := range paths {
		t.Run(tc.name, func(t *testing.T) {
			tc.o.Type = qp.TypeUD
			c := harness.NewPair(t, link).Connect(tc.o)
			for _, n := range []int{0, 1, 2, 3, 4, 1023, 1024, 4095, 4096} {
				harness.Fill(c.A.Mem[:n], uint64(n))
				c.B.Recv(1, dstOff, n+wire.GRHLen)
				wr := c.A.Datagram(c.B, 2, 0, n)
				wr.Opcode, wr.Imm = qp.WRSendImm, uint32(n)
				c.A.Send(wr)
				c.WaitOK(c.A, 2)
				wc := c.WaitOK(c.B, 1)
				if int(wc.ByteLen) != n+wire.GRHLen || wc.SrcQP != c.A.QP.Num() || wc.Flags != qp.WCGRH|qp.WCWithImm || wc.Imm != uint32(n) {
					t.Fatalf("%d bytes: %+v", n, wc)
				}
				if !bytes.Equal(c.A.Mem[:n], c.B.Mem[dstOff+wire.GRHLen:][:n]) {
					t.Fatalf("%d bytes: wrong data", n)
				}
				// The GRH area is good for an answer.
				a, err := c.B.Dev.AHFromGRH(c.B.Mem[dstOff:][:wire.GRHLen])
				if err != nil {
					t.Fatal(err)
				}
				if want := c.B.AH.Attr(); a.DGID != want.DGID || a.SGIDIndex != want.SGIDIndex || a.HopLimit != 64 {
					t.Fatalf("answer by %+v, want %+v", a, want)
				}
			}
			big := c.A.Datagram(c.B, 3, 0, 4097)
			c.A.Send(big, c.A.Datagram(c.B, 4, 0, 1))
			if wc := c.WaitOne(c.A); wc.Status != qp.WCLocLenErr || c.A.QP.State() != qp.StateSQE {
				t.Fatalf("%+v in %v", wc, c.A.QP.State())
			}
			if wc := c.WaitOne(c.A); wc.ID != 4 || wc.Status != qp.WCWRFlushErr {
				t.Fatalf("%+v behind what failed", wc)
			}
			for i, d := range c.Dev {
				if st := d.Stats(); st.Dropped() != 0 || d.Protocol().Dropped.Load() != 0 {
					t.Errorf("device %d dropped %v", i, st.Drops)
				}
			}
		})
	}
}

func TestUDQKeyViolation(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{Type: qp.TypeUD, Mem: 4096})
	c.B.Recv(1, 0, 200)
	wr := c.A.Datagram(c.B, 2, 0, 100)
	wr.RemoteQKey++
	c.A.Send(wr)
	c.WaitOK(c.A, 2)
	c.Settle()
	if n := c.Dev[1].QueryPort().QKeyViolations; n != 1 || len(c.B.Poll()) != 0 {
		t.Fatalf("%d violations", n)
	}
	wr.RemoteQKey = 1 << 31 // the QP's own
	c.A.Send(wr)
	c.WaitOK(c.B, 1)
}

// Handles name destinations as long as they live, and in their domain only.
func TestAHIndex(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{Type: qp.TypeUD, Mem: 4096})
	pd, err := c.Dev[0].AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	other, err := pd.CreateAH(c.A.AH.Attr())
	if err != nil {
		t.Fatal(err)
	}
	old := c.A.AH.Index()
	if err := c.A.AH.Destroy(); err != nil {
		t.Fatal(err)
	}
	again, err := c.A.PD.CreateAH(other.Attr())
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name  string
		index uint32
		want  qp.WCStatus
	}{
		{"none", 0, qp.WCLocQPOpErr}, {"destroyed", old, qp.WCLocQPOpErr}, {"of another domain", other.Index(), qp.WCLocQPOpErr},
		{"out of range", 1 << 31, qp.WCLocQPOpErr}, {"its successor", again.Index(), qp.WCSuccess},
	} {
		wr := c.A.Datagram(c.B, 1, 0, 10)
		wr.AH = tc.index
		c.A.Send(wr)
		if wc := c.WaitOne(c.A); wc.Status != tc.want {
			t.Errorf("%s: %v", tc.name, wc.Status)
		}
		if tc.want != qp.WCSuccess {
			if err := c.A.QP.Modify(provider.QPAttr{Attr: qp.Attr{State: qp.StateRTS}}, qp.AttrState); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Datagrams follow a neighbour that moves to another MAC: at once when it says so,
// and when it does not, after asking.
func TestAHFollowsNeighbour(t *testing.T) {
	s := newStation(t)
	mac := stationMAC
	sent := map[[6]byte]int{}
	asked := 0
	s.answer = func(f []byte) {
		switch {
		case f[12] == 8 && f[13] == 6 && f[21] == 1 && netip.AddrFrom4([4]byte(f[38:])) == stationV4:
			asked++
			if dst := [6]byte(f); dst != broadcast && dst != mac {
				return // to where the station was
			}
			s.port.WriteBatch([]tap.Frame{{B: arp(2, s.mac(), mac, stationV4, s.mac(), harness.Addrs(0)[0].Addr())}})
		case f[12] == 8 && f[13] == 0 && f[23] == 17:
			sent[[6]byte(f)]++
		}
	}
	e := harness.NewEnd(t, s.dev, harness.ConnOptions{Type: qp.TypeUD, Mem: 4096})
	if err := harness.Up(e.QP, provider.QPAttr{Attr: qp.Attr{Port: 1, QKey: 1}}, qp.StateRTS); err != nil {
		t.Fatal(err)
	}
	ah, err := e.PD.CreateAH(provider.AHAttr{DGID: provider.GIDOf(stationV4), SGIDIndex: harness.GIDv4})
	if err != nil {
		t.Fatal(err)
	}
	send := func() {
		t.Helper()
		wr := e.Message(1, 0, 10)
		wr.AH, wr.RemoteQPN = ah.Index(), 5
		e.Send(wr)
		if wcs := e.Poll(); len(wcs) != 1 || wcs[0].Status != qp.WCSuccess {
			t.Fatalf("%+v", wcs)
		}
		for _, f := range s.read() {
			s.answer(f)
		}
		s.read()
	}
	send()
	if sent[mac] != 1 {
		t.Fatalf("datagrams to %v", sent)
	}
	was := mac
	mac[5]++
	s.say(arp(1, broadcast, mac, stationV4, [6]byte{}, stationV4))
	send()
	if sent[mac] != 1 || sent[was] != 1 {
		t.Fatalf("after an announcement: datagrams to %v", sent)
	}
	asked = 0
	mac[5]++ // in silence
	s.clock.Advance(40e9)
	send()
	for range 5 {
		if at := s.dev.NextDeadline(); at != qp.Never {
			s.clock.AdvanceTo(at)
		}
		for _, f := range s.read() {
			s.answer(f)
		}
		s.read()
	}
	before := sent[mac]
	send()
	if asked < 2 || sent[mac] != before+1 {
		t.Fatalf("asked %d times; datagrams to %v", asked, sent)
	}
}

func TestUnreliableAllocatesNothing(t *testing.T) {
	for _, typ := range []qp.Type{qp.TypeUC, qp.TypeUD} {
		for _, self := range []bool{false, true} {
			n := 10_000
			if typ == qp.TypeUD {
				n = 4096
			}
			step := hotPath(t, harness.ConnOptions{Type: typ, MTU: qp.MTU4096, Self: self}, func(c *harness.Conn) qp.SendWR {
				if typ == qp.TypeUD {
					return c.A.Datagram(c.B, 1, 0, n)
				}
				return c.A.Message(1, 0, n)
			})
			for range 100 {
				step()
			}
			if n := testing.AllocsPerRun(500, step); n != 0 {
				t.Errorf("%v (to oneself: %v): %v allocations per message", typ, self, n)
			}
		}
	}
}

func TestAHFromGRH(t *testing.T) {
	p := harness.NewPair(t, link)
	v4 := make([]byte, 40)
	copy(v4[20:], []byte{0x45, 7, 0, 0, 0, 0, 0, 0, 33, 17, 0, 0, 10, 91, 0, 2, 10, 91, 0, 1})
	a, err := p.Dev[0].AHFromGRH(v4)
	if err != nil || a.DGID.Addr() != harness.Addrs(1)[0].Addr() || a.SGIDIndex != harness.GIDv4 || a.TrafficClass != 7 || a.HopLimit != 33 {
		t.Errorf("%+v, %v", a, err)
	}
	copy(v4[36:], []byte{239, 1, 2, 3})
	if a, err = p.Dev[0].AHFromGRH(v4); err != nil || a.SGIDIndex != harness.GIDv4 {
		t.Errorf("sent to a group: %+v, %v", a, err)
	}
	copy(v4[36:], []byte{10, 91, 0, 9})
	for name, b := range map[string][]byte{"short": v4[:39], "zero": make([]byte, 40), "not ours": v4} {
		if _, err := p.Dev[0].AHFromGRH(b); !errors.Is(err, provider.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// capture reads the frames of a capture of the kernel's soft-RoCE.
func capture(t testing.TB, name string) [][]byte {
	t.Helper()
	frames, err := taptest.Capture("../wire/testdata/" + name + ".pcap")
	if err != nil {
		t.Fatal(err)
	}
	return frames
}

// rxeHost is a device in the place of the captures' receiving host, 10.77.0.2.
func rxeHost(t testing.TB, numbered byte) (dev *provider.Device, say func(f []byte), read func() [][]byte) {
	t.Helper()
	clock := taptest.NewClock(1e9)
	net := taptest.New(clock, taptest.Config{})
	port := net.Port(1)
	d, err := provider.Open(provider.Config{
		Device: net.Port(0), MAC: []byte{0x52, 0x54, 0, 0x77, 0, numbered}, Clock: clock.Now, Manual: true,
		Addrs: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 77, 0, numbered}), 24),
			netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x77, 15: numbered}), 64)},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	s := &station{t: t, net: net, clock: clock, port: port, dev: d}
	s.read()
	return d, func(f []byte) {
		if _, err := port.WriteBatch([]tap.Frame{{B: f}}); err != nil {
			t.Fatal(err)
		}
		for d.Progress() {
		}
	}, s.read
}

// retarget seals a captured packet anew for a QP of ours. It changes nothing else
// but, for WRITEs, where they go.
func retarget(t testing.TB, f []byte, e *harness.End) *wire.Packet {
	t.Helper()
	p := &wire.Packet{}
	if err := wire.Parse(f, p); err != nil {
		t.Fatal(err)
	}
	if !p.ICRCValid() {
		t.Fatal("ICRC of the capture")
	}
	if p.BTH.DestQP != wire.MulticastQPN {
		p.BTH.DestQP = e.QP.Num()
	}
	p.BTH.Put(p.Frame[p.BTHOff:])
	if p.Info.Has(wire.HasRETH) {
		h := p.RETH()
		h.VA, h.RKey = e.Addr, uint32(e.MR.RKey())
		h.Put(p.Frame[p.BTHOff+int(p.Info.RETH):])
	}
	wire.Seal(p.Frame, wire.EthLen)
	return p
}

// The datagrams that the kernel's soft-RoCE has sent are received.
func TestUDCaptures(t *testing.T) {
	for _, name := range []string{"ud-send-v4", "ud-send-v6", "ud-wrong-qkey-v4", "app-ibv_ud_pingpong-v4"} {
		t.Run(name, func(t *testing.T) {
			dev, say, read := rxeHost(t, 2)
			e := harness.NewEnd(t, dev, harness.ConnOptions{Type: qp.TypeUD, Mem: 1 << 16})
			frames := capture(t, name)
			var first wire.Packet
			if err := wire.Parse(frames[0], &first); err != nil {
				t.Fatal(err)
			}
			key := first.DETH().QKey
			wrong := name == "ud-wrong-qkey-v4"
			if wrong {
				key++
			}
			if err := harness.Up(e.QP, provider.QPAttr{Attr: qp.Attr{Port: 1, QKey: key}}, qp.StateRTS); err != nil {
				t.Fatal(err)
			}
			got := 0
			for _, f := range frames {
				if [6]byte(f) != [6]byte(dev.MAC()) {
					continue
				}
				e.Recv(7, 0, 2048)
				p := retarget(t, f, e)
				say(f)
				wcs := e.Poll()
				if wrong {
					if len(wcs) != 0 || dev.Protocol().QKeyViolations.Load() != 1 {
						t.Fatalf("%+v", wcs)
					}
					got++
					continue
				}
				if len(wcs) != 1 || wcs[0].Status != qp.WCSuccess || int(wcs[0].ByteLen) != 40+len(p.Payload) || wcs[0].SrcQP != p.DETH().SrcQP ||
					(wcs[0].Flags&qp.WCWithImm != 0) != p.Info.Has(wire.HasImm) || !bytes.Equal(e.Mem[40:40+len(p.Payload)], p.Payload) {
					t.Fatalf("%s of %d bytes: %+v", p.Info.Name, len(p.Payload), wcs)
				}
				got++
			}
			if got == 0 {
				t.Fatal("the capture has nothing for us")
			}
			if fs := read(); len(fs) != 0 {
				t.Errorf("%d answers to datagrams", len(fs))
			}
		})
	}
}

// What the kernel's soft-RoCE has sent on a UC connection is executed.
func TestUCCapture(t *testing.T) {
	dev, say, read := rxeHost(t, 2)
	e := harness.NewEnd(t, dev, harness.ConnOptions{Type: qp.TypeUC, Mem: 1 << 16})
	frames := capture(t, "uc-send-write-v4")
	var first wire.Packet
	if err := wire.Parse(frames[0], &first); err != nil {
		t.Fatal(err)
	}
	peer := first.Src()
	if err := dev.AddNeighbour(peer, first.SrcMAC()); err != nil {
		t.Fatal(err)
	}
	if err := harness.Up(e.QP, provider.QPAttr{
		Attr: qp.Attr{Port: 1, PathMTU: qp.MTU1024, RQPSN: first.BTH.PSN, DestQPN: 3, Access: mr.RemoteWrite},
		AH:   provider.AHAttr{DGID: provider.GIDOf(peer), SGIDIndex: 1},
	}, qp.StateRTS); err != nil {
		t.Fatal(err)
	}
	var message []byte
	messages, receives := 0, 0
	for _, f := range frames {
		p := retarget(t, f, e)
		if p.Info.Mask&wire.Start != 0 {
			message = message[:0]
			clear(e.Mem)
			e.Recv(7, 0, 4096)
		}
		message = append(message, p.Payload...)
		say(f)
		if p.Info.Mask&wire.End == 0 {
			continue
		}
		messages++
		for _, wc := range e.Poll() {
			if wc.Status != qp.WCSuccess || int(wc.ByteLen) != len(message) {
				t.Fatalf("%s: %+v", p.Info.Name, wc)
			}
			receives++
		}
		if !bytes.Equal(e.Mem[:len(message)], message) {
			t.Fatalf("%s: wrong data", p.Info.Name)
		}
	}
	// The two plain WRITEs complete nothing.
	if pr := dev.Protocol(); messages != 8 || receives != 6 || pr.Dropped.Load() != 0 || pr.OutOfSeqRequest.Load() != 0 {
		t.Errorf("%d messages, %d receives", messages, receives)
	}
	if fs := read(); len(fs) != 0 {
		t.Errorf("%d answers", len(fs))
	}
}
