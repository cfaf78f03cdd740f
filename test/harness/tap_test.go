// SPDX-License-Identifier: Apache-2.0

package harness_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
	"github.com/vishvananda/netlink"
)

// The engines over real TAPs and a bridge: every operation, both families, MTUs, with and
// without vnet header, with super-frames, and with those that the kernel takes apart.
func TestTAPOperations(t *testing.T) {
	for name, tapo := range map[string]harness.TAPOptions{
		"super-frames": {}, "super-frames to a plain peer": {PlainPeer: true}, "vnet": {Without: tap.USO4 | tap.USO6}, "plain": {Plain: true},
	} {
		for _, o := range []harness.ConnOptions{{GID: harness.GIDv4, MTU: qp.MTU4096}, {GID: harness.GIDv6}, {Link: true, MTU: qp.MTU256}} {
			t.Run(fmt.Sprintf("%s/gid=%d/mtu=%d", name, o.GID, o.MTU.Bytes()), func(t *testing.T) {
				p := harness.NewTAPPair(t, tapo)
				o.Timeout = 17 // half a second: the machine may be busy
				c := p.Connect(o)
				wcs := make([]qp.WC, 8)
				wait := func(e *harness.End, id uint64) {
					t.Helper()
					n, err := e.CQ.Wait(context.Background(), wcs[:1])
					if err != nil || n != 1 || wcs[0].Status != qp.WCSuccess || wcs[0].ID != id {
						t.Fatalf("completion of %d: %d, %v, %+v", id, n, err, wcs[0])
					}
				}
				const half = 1 << 19
				for i, n := range []int{0, 1, 100, 4096, 100_001, half} {
					seed := uint64(3 * i)
					harness.Fill(c.A.Mem[:n], seed)
					c.A.Send(c.A.Write(c.B, 1, 0, half, n))
					wait(c.A, 1)
					harness.Fill(c.A.Mem[:n], seed+1)
					c.B.Recv(2, 0, n)
					c.A.Send(c.A.Message(3, 0, n))
					wait(c.B, 2)
					wait(c.A, 3)
					if !bytes.Equal(c.B.Mem[:n], c.A.Mem[:n]) {
						t.Fatalf("SEND of %d bytes: wrong data", n)
					}
					// What the WRITE brought comes back by READ.
					c.A.Send(c.A.Read(c.B, 4, 0, half, n))
					wait(c.A, 4)
					want := make([]byte, n)
					harness.Fill(want, seed)
					if !bytes.Equal(c.A.Mem[:n], want) {
						t.Fatalf("WRITE and READ of %d bytes: wrong data", n)
					}
				}
				for i, d := range c.Dev {
					if st := d.Stats(); st.Dropped() != 0 || st.DeviceErrors != 0 {
						t.Errorf("device %d: drops %v, errors %d", i, st.Drops, st.DeviceErrors)
					} else if super := d.Offloads().Has(tap.USO4 | tap.USO6); super != (st.Tap.TxSuper > 0) {
						t.Errorf("device %d: super-frames %v, %d sent", i, super, st.Tap.TxSuper)
					}
				}
			})
		}
	}
}

// The kernel's ping reaches an engine: ARP and ND, small and large packets.
func TestPing(t *testing.T) {
	if _, err := exec.LookPath("ping"); err != nil {
		t.Fatal("no ping: install iputils-ping")
	}
	pings := uint64(0)
	p := harness.NewTAPPair(t, harness.TAPOptions{Host: true, InNS: func(p *harness.TAPs) error {
		addrs := []string{p.Ports[0].V4.Addr().String()}
		if p.HostV6.IsValid() {
			addrs = append(addrs, p.Ports[0].V6.Addr().String())
		}
		for _, a := range addrs {
			for _, size := range []string{"0", "56", "1400", "8900"} {
				// -M do: no fragments; three replies.
				pings += 3
				out, err := exec.Command("ping", "-n", "-q", "-c", "3", "-i", "0.01", "-W", "20", "-M", "do", "-s", size, a).CombinedOutput()
				if err != nil {
					return fmt.Errorf("ping %s with %s bytes: %w\n%s", a, size, err, out)
				}
			}
		}
		return nil
	}})
	if n := p.Dev[0].Stats().EchoReplies; n != pings {
		t.Errorf("%d echo replies to %d", n, pings)
	}
	// Both engines and the host know each other now; the host's address is found
	// by an engine as well.
	pd, err := p.Dev[1].AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pd.CreateAH(provider.AHAttr{DGID: provider.GIDOf(p.HostV4.Addr()), SGIDIndex: harness.GIDv4}); err != nil {
		t.Errorf("resolve the host: %v", err)
	}
	// Nobody has this one.
	_, err = pd.CreateAH(provider.AHAttr{DGID: provider.GIDOf(p.HostV4.Addr().Prev()), SGIDIndex: harness.GIDv4})
	if !errors.Is(err, provider.ErrTimeout) {
		t.Errorf("resolve nobody: %v", err)
	}
}

// The link goes down and comes back up: the port says so, and what was under way
// goes on.
func TestLinkDownAndUp(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	event := func(d *provider.Device, want qp.EventType) error {
		e, err := d.AsyncEvent(ctx)
		if err != nil {
			return fmt.Errorf("waiting for %v: %w", want, err)
		}
		e.Ack()
		if e.Type != want {
			return fmt.Errorf("event %v, want %v", e.Type, want)
		}
		return nil
	}
	harness.NewTAPPair(t, harness.TAPOptions{InNS: func(p *harness.TAPs) error {
		c := p.Connect(harness.ConnOptions{Timeout: 17})
		tap0, err := netlink.LinkByName(p.Ports[0].Name)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetDown(tap0); err != nil {
			return err
		}
		harness.Fill(c.A.Mem[:10_000], 1)
		c.A.Send(c.A.Write(c.B, 1, 0, 0, 10_000))
		if err := event(p.Dev[0], qp.EventPortErr); err != nil {
			return err
		}
		if st := p.Dev[0].QueryPort().State; st != provider.PortDown {
			return fmt.Errorf("port is %v with its link down", st)
		}
		if err := netlink.LinkSetUp(tap0); err != nil {
			return err
		}
		if err := event(p.Dev[0], qp.EventPortActive); err != nil {
			return err
		}
		wcs := make([]qp.WC, 1)
		if n, err := c.A.CQ.Wait(ctx, wcs); err != nil || n != 1 || wcs[0].Status != qp.WCSuccess {
			return fmt.Errorf("completion: %d, %w, %+v", n, err, wcs[0])
		}
		if !bytes.Equal(c.A.Mem[:10_000], c.B.Mem[:10_000]) {
			return errors.New("wrong data")
		}
		return nil
	}})
}

// UC, UD and multicast over real TAPs and a bridge, which passes on what is sent to
// a group.
func TestTAPUnreliable(t *testing.T) {
	for _, gid := range []int{harness.GIDv4, harness.GIDv6} {
		p := harness.NewTAPPair(t, harness.TAPOptions{})
		uc := p.Connect(harness.ConnOptions{GID: gid, Type: qp.TypeUC, MTU: qp.MTU4096})
		const n = 100_000
		harness.Fill(uc.A.Mem[:n], 1)
		uc.B.Recv(1, 0, n)
		uc.A.Send(uc.A.Message(2, 0, n))
		uc.WaitOK(uc.B, 1)
		uc.WaitOK(uc.A, 2)
		if !bytes.Equal(uc.A.Mem[:n], uc.B.Mem[:n]) {
			t.Fatal("UC: wrong data")
		}

		ud := p.Connect(harness.ConnOptions{GID: gid, Type: qp.TypeUD})
		group := provider.GID{0: 0xff, 1: 0x15, 15: 0x77}
		if gid == harness.GIDv4 {
			group = provider.GID{10: 0xff, 11: 0xff, 12: 239, 13: 200, 14: 1, 15: 2}
		}
		if err := ud.B.QP.AttachMcast(group); err != nil {
			t.Fatal(err)
		}
		all, err := ud.A.PD.CreateAH(provider.AHAttr{DGID: group, SGIDIndex: gid})
		if err != nil {
			t.Fatal(err)
		}
		for i, size := range []int{0, 1, 1000, 4096} {
			wr := ud.A.Datagram(ud.B, 4, 0, size)
			if i%2 == 1 {
				wr.AH, wr.RemoteQPN = all.Index(), wire.MulticastQPN
			}
			harness.Fill(ud.A.Mem[:size], uint64(i))
			ud.B.Recv(3, 8192, size+wire.GRHLen)
			ud.A.Send(wr)
			ud.WaitOK(ud.B, 3)
			ud.WaitOK(ud.A, 4)
			if !bytes.Equal(ud.A.Mem[:size], ud.B.Mem[8192+wire.GRHLen:][:size]) {
				t.Fatalf("datagram of %d bytes: wrong data", size)
			}
		}
		if err := ud.B.QP.DetachMcast(group); err != nil {
			t.Fatal(err)
		}
		for i, d := range p.Dev {
			if st := d.Stats(); st.Dropped() != 0 || st.DeviceErrors != 0 {
				t.Errorf("device %d: drops %v, errors %d", i, st.Drops, st.DeviceErrors)
			}
		}
	}
}

// Opening and closing on a real TAP leaves nothing.
func TestTAPLeaks(t *testing.T) {
	f, port := (*fabric.Fabric)(nil), fabric.Port{}
	err := fabric.WithNS(func() (err error) {
		if f, err = fabric.New(fabric.Config{}); err != nil {
			return err
		}
		if port, err = f.AddPort(0); err != nil {
			return err
		}
		defer f.Close()
		harness.CheckLeaks(t, func() {
			d, err := provider.Open(provider.Config{Port: port.Name})
			if err != nil {
				t.Error(err)
				return
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// BenchmarkTAP measures half a round trip and the time of a message over two TAPs
// on a bridge, both engines in this process and polled by turns.
func BenchmarkTAP(b *testing.B) {
	for _, plain := range []bool{false, true} {
		p := harness.NewTAPPair(b, harness.TAPOptions{Plain: plain})
		c := p.Connect(harness.ConnOptions{Timeout: 17, MTU: qp.MTU4096})
		wcs := make([]qp.WC, 4)
		for _, n := range []int{8, 4096, 65536} {
			b.Run(fmt.Sprintf("plain=%v/write/%d", plain, n), func(b *testing.B) {
				wr := []qp.SendWR{c.A.Write(c.B, 1, 0, 0, n)}
				b.SetBytes(int64(n))
				b.ReportAllocs()
				for b.Loop() {
					if _, err := c.A.QP.PostSend(wr); err != nil {
						b.Fatal(err)
					}
					for c.A.CQ.Poll(wcs) == 0 {
						c.B.CQ.Poll(wcs)
					}
				}
			})
		}
	}
}
