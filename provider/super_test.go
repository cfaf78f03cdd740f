// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"fmt"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

// superLink is link with super-frames.
var superLink = taptest.Config{Seed: 1, Delay: 3 * time.Microsecond, Offloads: tap.VnetHdr | tap.USO4 | tap.USO6}

// between stands between a device and its port and sees what is written.
type between struct {
	tap.Device
	// hook, if set, is called with each frame; what it gives instead of nil is the answer.
	hook func(f *tap.Frame) error
}

func (b *between) WriteBatch(fs []tap.Frame) (n int, err error) {
	for n = range fs {
		if b.hook != nil {
			if err := b.hook(&fs[n]); err == errFull {
				return n, nil
			} else if err != nil {
				return n, err
			}
		}
		if k, err := b.Device.WriteBatch(fs[n : n+1]); k == 0 {
			return n, err
		}
	}
	return len(fs), nil
}

var errFull = fmt.Errorf("the device is full")

// hooked is a connection over superLink with something between.
func hooked(t *testing.T, o harness.ConnOptions) (*harness.Conn, [2]*between) {
	var bs [2]*between
	c := harness.NewPairWith(t, superLink, func(i int, d tap.Device) tap.Device {
		bs[i] = &between{Device: d}
		return bs[i]
	}).Connect(o)
	return c, bs
}

// retransmitted is how many packets both devices have sent again.
func retransmitted(c *harness.Conn) (n uint64) {
	for _, d := range c.Dev {
		n += d.Protocol().RetransmittedPkts.Load() + d.Protocol().ReadReexecuted.Load()
	}
	return n
}

// Payload of a message goes to the device from where it is, not from a copy; its last packet,
// datagrams and what is for oneself are copied.
func TestPayloadInPlace(t *testing.T) {
	for _, gid := range []int{harness.GIDv4, harness.GIDv6} {
		c, bs := hooked(t, harness.ConnOptions{GID: gid, MTU: qp.MTU4096})
		inside := func(e *harness.End, b []byte) bool {
			return addressOf(b) >= e.Addr && addressOf(b) < e.Addr+uint64(len(e.Mem))
		}
		lent := 0
		for i, e := range []*harness.End{c.A, c.B} {
			bs[i].hook = func(f *tap.Frame) error {
				for _, b := range f.More {
					if inside(e, b) {
						lent += len(b)
					}
				}
				return nil
			}
		}
		const n = 40*4096 + 5
		for _, op := range []qp.WROpcode{qp.WRSend, qp.WRWrite, qp.WRRead} {
			lent = 0
			harness.Fill(c.A.Mem[:n], 1)
			harness.Fill(c.B.Mem[dstOff:dstOff+n], 2)
			if op == qp.WRRead {
				c.A.Send(c.A.Read(c.B, 1, 0, dstOff, n))
			} else if op == qp.WRSend {
				c.B.Recv(2, dstOff, n)
				c.A.Send(c.A.Message(1, 0, n))
				c.WaitOK(c.B, 2)
			} else {
				c.A.Send(c.A.Write(c.B, 1, 0, dstOff, n))
			}
			c.WaitOK(c.A, 1)
			if !bytes.Equal(c.A.Mem[:n], c.B.Mem[dstOff:dstOff+n]) {
				t.Fatalf("%v: wrong data", op)
			}
			if lent != 40*4096 {
				t.Errorf("%v: %d bytes of payload from where they are, want %d", op, lent, 40*4096)
			}
		}
		if n := retransmitted(c); n != 0 {
			t.Errorf("%d packets were sent again", n)
		}
	}
}

// What is written to while it is being sent is sent again, as a copy: nothing goes on for
// ever, and nobody waits for a timeout.
func TestPayloadChanges(t *testing.T) {
	for _, op := range []qp.WROpcode{qp.WRWrite, qp.WRRead} {
		c, bs := hooked(t, harness.ConnOptions{MTU: qp.MTU1024})
		from, e := bs[0], c.A
		wr := c.A.Write(c.B, 1, 0, dstOff, 100_000)
		if op == qp.WRRead {
			from, e = bs[1], c.B
			wr = c.A.Read(c.B, 1, 0, dstOff, 100_000)
		}
		changes := 0
		from.hook = func(f *tap.Frame) error {
			for _, b := range f.More { // each time: the copies are not touched by that
				if at := addressOf(b); at >= e.Addr && at < e.Addr+uint64(len(e.Mem)) {
					b[len(b)/2]++
					changes++
				}
			}
			return nil
		}
		c.A.Send(wr)
		c.WaitOK(c.A, 1)
		if changes == 0 {
			t.Fatalf("%v: no payload from where it is", op)
		}
		if n := c.Dev[0].Protocol().LocalAckTimeout.Load(); n != 0 {
			t.Errorf("%v: %d timeouts", op, n)
		}
		if retransmitted(c) == 0 {
			t.Errorf("%v: nothing was sent again", op)
		}
		if !bytes.Equal(c.A.Mem[:100_000], c.B.Mem[dstOff:dstOff+100_000]) {
			t.Errorf("%v: wrong data", op)
		}
	}
}

// Whatever the device answers to a super-frame with payload from where it is, the
// message arrives.
func TestSuperFrameRefused(t *testing.T) {
	for _, answer := range []error{unix.EINVAL, unix.EFAULT, tap.ErrSuperFrame, errFull} {
		for _, gid := range []int{harness.GIDv4, harness.GIDv6} {
			t.Run(fmt.Sprint(answer, gid), func(t *testing.T) {
				c, bs := hooked(t, harness.ConnOptions{GID: gid})
				refused, super := 0, 0
				for _, b := range bs {
					b.hook = func(f *tap.Frame) error {
						if f.GSO == 0 {
							return nil
						}
						if super++; super%3 == 2 && (answer != unix.EFAULT || refused < 3) {
							refused++
							return answer
						}
						return nil
					}
				}
				for _, n := range []int{1024, 5000, 100_000} {
					operations(t, c, n)
				}
				if refused == 0 || (answer == unix.EINVAL || answer == tap.ErrSuperFrame) && refused > 2 {
					t.Errorf("%d super-frames refused", refused)
				}
				if answer == errFull && retransmitted(c) != 0 {
					t.Error("a full device loses packets")
				}
			})
		}
	}
}

// A region that goes away while packets of its payload wait for the device costs that
// request, and nothing else.
func TestPayloadGoesAway(t *testing.T) {
	c, bs := hooked(t, harness.ConnOptions{})
	full := true
	bs[0].hook = func(f *tap.Frame) error {
		if full {
			return errFull
		}
		return nil
	}
	m, err := c.A.PD.RegMR(c.A.Mem[1<<16:1<<17], mr.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	wr := c.A.Write(c.B, 1, 1<<16, dstOff, 1<<16)
	wr.SGL[0].LKey = m.LKey()
	c.A.Send(wr)
	for c.Dev[0].Progress() {
	}
	if err := m.Dereg(); err != nil {
		t.Fatal(err)
	}
	full = false
	if wc := c.WaitOne(c.A); wc.Status != qp.WCLocProtErr {
		t.Fatalf("completion %+v", wc)
	}
}

// Small messages of several queue pairs to one peer leave together.
func TestManyInOneFrame(t *testing.T) {
	p := harness.NewPair(t, superLink)
	var conns []*harness.Conn
	for range 20 {
		conns = append(conns, p.Connect(harness.ConnOptions{Mem: 1 << 16}))
	}
	before := p.Dev[0].Stats()
	p.Dev[0].Hold(func() {
		for _, c := range conns {
			c.A.Send(c.A.Write(c.B, 1, 0, 0, 64), c.A.Write(c.B, 2, 64, 64, 64))
		}
	})
	done := 0
	p.RunUntil(func() bool {
		for _, c := range conns {
			done += len(c.A.Poll())
		}
		return done == 2*len(conns)
	})
	after := p.Dev[0].Stats()
	if n, frames := after.TxFrames-before.TxFrames, after.Tap.TxFrames-before.Tap.TxFrames; n != 40 || frames != 1 {
		t.Errorf("%d packets in %d frames, want 40 in one", n, frames)
	}
}

// A link that loses super-frames alone is found out, by who sends requests and by who
// answers them, and super-frames are tried again later.
func TestSuperFramesLost(t *testing.T) {
	for _, op := range []qp.WROpcode{qp.WRWrite, qp.WRRead} {
		t.Run(fmt.Sprint(op), func(t *testing.T) {
			p := harness.NewPair(t, superLink)
			c := p.Connect(harness.ConnOptions{})
			wr := c.A.Write(c.B, 1, 0, dstOff, 50_000)
			from := c.Dev[0]
			if op == qp.WRRead {
				wr, from = c.A.Read(c.B, 1, 0, dstOff, 50_000), c.Dev[1]
			}
			p.Net.SetNoSuper(true)
			for range 20 {
				c.A.Send(wr)
				c.WaitOK(c.A, 1)
			}
			st := from.Stats()
			if st.SingleFallbacks != 1 {
				t.Errorf("%d times single frames instead, want once", st.SingleFallbacks)
			}
			p.Net.SetNoSuper(false)
			p.Clock.Advance(10 * time.Minute)
			c.A.Send(wr)
			c.WaitOK(c.A, 1)
			p.RunUntil(func() bool { return from.Stats().SuperAsking == 0 })
			st = from.Stats()
			c.A.Send(wr)
			c.WaitOK(c.A, 1)
			if now := from.Stats(); now.Tap.TxSuper == st.Tap.TxSuper {
				t.Error("super-frames are not tried again")
			}
		})
	}
}

// addressOf is where bytes are.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// A kind of super-frame that the kernel refuses is given up, and the other is not; that is
// counted, and shown.
func TestSuperFrameRefusedByFamily(t *testing.T) {
	c4, bs := hooked(t, harness.ConnOptions{GID: harness.GIDv4})
	c6 := c4.Pair.Connect(harness.ConnOptions{GID: harness.GIDv6})
	d, super6 := c4.Dev[0], 0
	bs[0].hook = func(f *tap.Frame) error {
		switch {
		case f.GSO == 0:
		case f.B[12] == 0x08: // IPv4
			return unix.EINVAL
		default:
			super6++
		}
		return nil
	}
	operations(t, c4, 100_000)
	operations(t, c6, 100_000)
	if super6 == 0 {
		t.Error("no super-frames of IPv6 either")
	}
	if n := d.Stats().SuperRefused; n != 1 {
		t.Errorf("%d super-frames refused, want one", n)
	}
	if off := d.Offloads(); off != tap.VnetHdr|tap.USO6 {
		t.Errorf("offloads %v", off)
	}
	sn, err := d.Snapshot(0)
	if err != nil {
		t.Fatal(err)
	}
	if sn.Refused != "uso4" || sn.Counters["super_refused"] != 1 {
		t.Errorf("snapshot says %q, %d", sn.Refused, sn.Counters["super_refused"])
	}
}

// sendTwenty sends messages of one packet in one go, and says how many super-frames they
// were and how many of them arrived.
func sendTwenty(t *testing.T, p *harness.Pair, c *harness.Conn, typ qp.Type) (super uint64, arrived int) {
	t.Helper()
	before := p.Dev[0].Stats().Tap.TxSuper
	harness.Fill(c.A.Mem[:20*256], 3)
	clear(c.B.Mem[dstOff : dstOff+20*256])
	var wrs []qp.SendWR
	for i := range 20 {
		if typ == qp.TypeUD {
			c.B.Recv(0, dstOff+i*256, 40+128)
			wrs = append(wrs, c.A.Datagram(c.B, 0, i*256, 128))
		} else {
			wrs = append(wrs, c.A.Write(c.B, 0, i*256, dstOff+i*256+40, 128))
		}
	}
	p.Dev[0].Hold(func() { c.A.Send(wrs...) })
	for done := 0; done < len(wrs); done++ {
		c.WaitOK(c.A, 0)
	}
	p.Settle()
	c.B.Poll()
	for i := range 20 {
		if bytes.Equal(c.A.Mem[i*256:i*256+128], c.B.Mem[dstOff+i*256+40:dstOff+i*256+168]) {
			arrived++
		}
	}
	return p.Dev[0].Stats().Tap.TxSuper - before, arrived
}

// Services that nobody answers use super-frames towards a destination that has said that it gets
// them, and single frames, all of which arrive, towards one that does not get them; so do
// those with few retries.
func TestSuperFramesAsked(t *testing.T) {
	for _, typ := range []qp.Type{qp.TypeRC, qp.TypeUC, qp.TypeUD, qp.TypeXRCSend} {
		for _, gid := range []int{harness.GIDv4, harness.GIDv6} {
			for _, lost := range []bool{false, true} {
				t.Run(fmt.Sprint(typ, gid, lost), func(t *testing.T) {
					cfg := superLink
					cfg.NoSuper = lost
					p := harness.NewPair(t, cfg)
					c := p.Connect(harness.ConnOptions{Type: typ, GID: gid, Attr: func(_ int, a *provider.QPAttr) { a.RetryCnt = 0 }})
					for range 2 { // the destination of datagrams is asked when two of them could have left together
						super, arrived := sendTwenty(t, p, c, typ)
						if arrived != 20 || lost && super > 8 { // which are the questions
							t.Errorf("%d of 20 messages arrived, %d super-frames", arrived, super)
						}
					}
					super, arrived := sendTwenty(t, p, c, typ)
					if arrived != 20 || (super != 0) == lost {
						t.Errorf("%d of 20 messages arrived, %d super-frames", arrived, super)
					}
					if n := retransmitted(c); n != 0 {
						t.Errorf("%d packets were sent again", n)
					}
					st := p.Dev[0].Stats()
					if (st.SingleFallbacks == 1) != lost || st.SuperProbes == 0 || (st.SuperProven != 0) == lost {
						t.Errorf("%d times single frames instead, %d questions, %d answers", st.SingleFallbacks, st.SuperProbes, st.SuperProven)
					}
					sn, err := p.Dev[0].Snapshot(0)
					if err != nil {
						t.Fatal(err)
					}
					if (len(sn.Single) == 1) != lost {
						t.Errorf("snapshot says %q", sn.Single)
					}
				})
			}
		}
	}
}

// When a path that did carry super-frames does not any more, those whose losses nobody notices
// find out by asking again, and a connection with a single retry lives.
func TestSuperFramesLostLater(t *testing.T) {
	for _, typ := range []qp.Type{qp.TypeRC, qp.TypeUC, qp.TypeUD} {
		t.Run(fmt.Sprint(typ), func(t *testing.T) {
			p := harness.NewPair(t, superLink)
			c := p.Connect(harness.ConnOptions{Type: typ, RetryCnt: 1})
			for range 2 {
				sendTwenty(t, p, c, typ)
			}
			if super, arrived := sendTwenty(t, p, c, typ); super == 0 || arrived != 20 {
				t.Fatalf("%d of 20 messages arrived, %d super-frames", arrived, super)
			}
			p.Net.SetNoSuper(true)
			lost := 0
			for range 20 {
				_, arrived := sendTwenty(t, p, c, typ)
				if arrived < 20 {
					lost++
				}
				p.Clock.Advance(2 * time.Second)
			}
			// The first may be lost, and the one with which the destination is asked.
			if lost > 2 || typ == qp.TypeRC && lost > 0 || typ != qp.TypeRC && lost == 0 {
				t.Errorf("%d of 20 times something did not arrive", lost)
			}
			if typ == qp.TypeRC { // what answers to a READ, too
				for range 20 {
					c.A.Send(c.A.Read(c.B, 7, 0, dstOff, 50_000))
					c.WaitOK(c.A, 7)
				}
			}
		})
	}
}

// A destination that answers nothing gets super-frames from connections that have retries
// left, and from nobody else.
func TestSuperFramesMute(t *testing.T) {
	for _, typ := range []qp.Type{qp.TypeRC, qp.TypeUD} {
		for _, retries := range []uint8{1, 7} {
			t.Run(fmt.Sprint(typ, retries), func(t *testing.T) {
				cfg := superLink
				cfg.Filter = func(_ int, b []byte) taptest.Verdict {
					if h := wire.RoCE(b); h != 0 && b[h+7] == 1 && b[h+5] == 0 && b[h+6] == 0 { // to queue pair 1
						return taptest.Drop
					}
					return taptest.Pass
				}
				p := harness.NewPair(t, cfg)
				c := p.Connect(harness.ConnOptions{Type: typ, RetryCnt: retries})
				for range 2 {
					sendTwenty(t, p, c, typ)
				}
				super, arrived := sendTwenty(t, p, c, typ)
				if arrived != 20 || (super != 0) != (typ == qp.TypeRC && retries == 7) {
					t.Errorf("%d of 20 messages arrived, %d super-frames", arrived, super)
				}
			})
		}
	}
}
