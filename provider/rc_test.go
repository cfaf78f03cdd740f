// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
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

// link is a link without faults on which time passes.
var link = taptest.Config{Seed: 1, Delay: 3 * time.Microsecond}

func TestOperations(t *testing.T) {
	type opt struct {
		name  string
		o     harness.ConnOptions
		super bool
	}
	for _, o := range []opt{
		{"super v4", harness.ConnOptions{}, true},
		{"super v6", harness.ConnOptions{GID: harness.GIDv6, MTU: qp.MTU256}, true},
		{"super srq", harness.ConnOptions{SRQ: true, PSN: [2]uint32{0xfffff0, 0xffffff}}, true},
		{"v4", harness.ConnOptions{}, false},
		{"v6", harness.ConnOptions{GID: harness.GIDv6}, false},
		{"link-local", harness.ConnOptions{Link: true}, false},
		{"self", harness.ConnOptions{Self: true}, false},
		{"mtu256-psnwrap", harness.ConnOptions{MTU: qp.MTU256, PSN: [2]uint32{0xfffff0, 0xffffff}}, false},
		{"mtu4096", harness.ConnOptions{MTU: qp.MTU4096}, false},
		{"srq", harness.ConnOptions{SRQ: true}, false},
		{"xrc", harness.ConnOptions{Type: qp.TypeXRCSend}, false},
		{"xrc-self", harness.ConnOptions{Type: qp.TypeXRCSend, Self: true}, false},
	} {
		t.Run(o.name, func(t *testing.T) {
			on := link
			if o.super {
				on.Offloads = tap.VnetHdr | tap.USO4 | tap.USO6
			}
			c := harness.NewPair(t, on).Connect(o.o)
			for _, n := range []int{0, 1, 7, 255, 256, 257, 4096, 4097, 100_000} {
				t.Run(fmt.Sprint(n), func(t *testing.T) { operations(t, c, n) })
			}
			for i, d := range c.Dev {
				if s := d.Protocol(); s.RetransmittedPkts.Load() != 0 || s.SentNakSeq.Load() != 0 {
					t.Errorf("device %d: packets retransmitted on a link without faults", i)
				}
				st := d.Stats()
				if st.Dropped() != 0 {
					t.Errorf("device %d dropped %v", i, st.Drops)
				}
				if o.super != (st.Tap.TxSuper > 0) || o.super && st.Tap.TxFrames > st.TxFrames/2 {
					t.Errorf("device %d: %d super-frames, %d frames of %d packets", i, st.Tap.TxSuper, st.Tap.TxFrames, st.TxFrames)
				}
			}
			if o.o.Self && c.Dev[0].Stats().LoopPackets == 0 {
				t.Error("packets to oneself did not take the loop")
			}
		})
	}
}

const (
	srcOff = 1 << 10
	dstOff = 1 << 19
)

// operations runs each operation once with n bytes from A to B.
func operations(t *testing.T, c *harness.Conn, n int) {
	t.Helper()
	seed := uint64(n)
	src := c.A.Mem[srcOff : srcOff+n]
	dst := c.B.Mem[dstOff : dstOff+n]
	check := func(what string, got, want []byte) {
		t.Helper()
		if !bytes.Equal(got, want) {
			t.Fatalf("%s of %d bytes: wrong data", what, n)
		}
	}
	fill := func() {
		seed++
		harness.Fill(src, seed)
		clear(dst)
	}

	fill()
	c.B.Recv(1, dstOff, n)
	c.A.Send(c.A.Message(2, srcOff, n))
	if wc := c.WaitOK(c.B, 1); wc.Opcode != qp.WCRecv || int(wc.ByteLen) != n || wc.QPN != c.B.Receiver().Num() {
		t.Fatalf("receive completion %+v", wc)
	}
	c.WaitOK(c.A, 2)
	check("SEND", dst, src)

	fill()
	c.B.Recv(3, dstOff, n)
	wr := c.A.Message(4, srcOff, n)
	wr.Opcode, wr.Imm = qp.WRSendImm, 0xcafe0001
	c.A.Send(wr)
	if wc := c.WaitOK(c.B, 3); wc.Flags&qp.WCWithImm == 0 || wc.Imm != 0xcafe0001 {
		t.Fatalf("receive completion %+v", wc)
	}
	c.WaitOK(c.A, 4)
	check("SEND with immediate", dst, src)

	fill()
	c.A.Send(c.A.Write(c.B, 5, srcOff, dstOff, n))
	c.WaitOK(c.A, 5)
	check("WRITE", dst, src)

	fill()
	c.B.Recv(6, 0, 0)
	wr = c.A.Write(c.B, 7, srcOff, dstOff, n)
	wr.Opcode, wr.Imm = qp.WRWriteImm, 77
	c.A.Send(wr)
	if wc := c.WaitOK(c.B, 6); wc.Opcode != qp.WCRecvRDMAImm || wc.Imm != 77 || int(wc.ByteLen) != n {
		t.Fatalf("receive completion %+v", wc)
	}
	c.WaitOK(c.A, 7)
	check("WRITE with immediate", dst, src)

	fill()
	harness.Fill(dst, seed+99)
	c.A.Send(c.A.Read(c.B, 8, srcOff, dstOff, n))
	if wc := c.WaitOK(c.A, 8); wc.Opcode != qp.WCRDMARead || int(wc.ByteLen) != n {
		t.Fatalf("read completion %+v", wc)
	}
	check("READ", src, dst)

	word := c.B.Mem[dstOff : dstOff+8]
	binary.NativeEndian.PutUint64(word, 40)
	add := c.A.Read(c.B, 9, srcOff, dstOff, 8)
	add.Opcode, add.CompareAdd = qp.WRAtomicFetchAdd, 2
	cas := add
	cas.ID, cas.Opcode, cas.CompareAdd, cas.Swap = 10, qp.WRAtomicCmpSwap, 42, 7
	c.A.Send(add, cas)
	c.WaitOK(c.A, 9)
	c.WaitOK(c.A, 10)
	if old, now := binary.NativeEndian.Uint64(c.A.Mem[srcOff:]), binary.NativeEndian.Uint64(word); old != 42 || now != 7 {
		t.Fatalf("atomics left %d and returned %d, want 7 and 42", now, old)
	}
}

// Several QPs between the same devices, all at once, both ways, gathered from and
// scattered to several pieces.
func TestManyQPs(t *testing.T) {
	p := harness.NewPair(t, link)
	const qps, size = 20, 3000
	var conns []*harness.Conn
	for i := range qps {
		conns = append(conns, p.Connect(harness.ConnOptions{GID: 1 + i%2, Mem: 1 << 16}))
	}
	for i, c := range conns {
		for k, e := range []*harness.End{c.A, c.B} {
			harness.Fill(e.Mem[:size], uint64(2*i+k))
			if _, err := e.QP.PostRecv([]qp.RecvWR{{ID: 1, SGL: []qp.SGE{e.SGE(20000, 10), e.SGE(30000, 2500), e.SGE(21000, 1000)}}}); err != nil {
				t.Fatal(err)
			}
			e.Send(qp.SendWR{ID: 2, Opcode: qp.WRSend, Flags: qp.SendSignaled, SGL: []qp.SGE{e.SGE(0, 1000), e.SGE(1000, 1), e.SGE(1001, size-1001)}})
		}
	}
	done := 0
	p.RunUntil(func() bool {
		for _, c := range conns {
			for _, e := range []*harness.End{c.A, c.B} {
				for _, wc := range e.Poll() {
					if wc.Status != qp.WCSuccess {
						t.Fatalf("completion %+v", wc)
					}
					done++
				}
			}
		}
		return done == 4*qps
	})
	want := make([]byte, size)
	for i, c := range conns {
		for k, e := range []*harness.End{c.B, c.A} { // A's data arrived at B
			harness.Fill(want, uint64(2*i+k))
			got := bytes.Join([][]byte{e.Mem[20000:20010], e.Mem[30000:32500], e.Mem[21000:21490]}, nil)
			if !bytes.Equal(got, want) {
				t.Fatalf("connection %d: wrong data at side %d", i, 1-k)
			}
		}
	}
}

func TestLoss(t *testing.T) {
	cfg := link
	cfg.Loss, cfg.Dup, cfg.Reorder, cfg.Corrupt = 0.05, 0.05, 0.05, 0.02
	p := harness.NewPair(t, cfg)
	c := p.Connect(harness.ConnOptions{})
	x := p.Connect(harness.ConnOptions{Type: qp.TypeXRCSend})
	for n := 1; n <= 100_000; n *= 10 {
		operations(t, c, n)
		operations(t, x, n)
	}
	st := p.Net.Stats()
	if st.Lost == 0 || st.Duplicated == 0 || st.Reordered == 0 || st.Corrupted == 0 {
		t.Fatalf("the link had no faults: %+v", st)
	}
	if c.Dev[0].Protocol().RetransmittedPkts.Load() == 0 {
		t.Error("nothing was retransmitted")
	}
	if bad := c.Dev[0].Stats().Drops[provider.DropICRC] + c.Dev[1].Stats().Drops[provider.DropICRC]; bad == 0 {
		t.Error("no corrupted packet was found by its ICRC")
	}
}

// A device that is full for a while loses nothing and needs no retransmission.
func TestDeviceFull(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{Timeout: 20})
	harness.Fill(c.A.Mem[:500_000], 3)
	c.Net.Port(0).SetFull(true)
	c.A.Send(c.A.Write(c.B, 1, 0, 0, 500_000))
	for range 10 {
		c.Dev[0].Progress()
	}
	if n := c.A.CQ.Len(); n != 0 {
		t.Fatal("completed through a device that takes nothing")
	}
	c.Net.Port(0).SetFull(false)
	c.WaitOK(c.A, 1)
	if !bytes.Equal(c.A.Mem[:500_000], c.B.Mem[:500_000]) {
		t.Fatal("wrong data")
	}
	if n := c.Dev[0].Protocol().RetransmittedPkts.Load(); n != 0 {
		t.Errorf("%d packets retransmitted", n)
	}
}

// narrow is a device that takes a few frames at a time, then none, then a few.
type narrow struct {
	tap.Device
	calls int
}

func (n *narrow) WriteBatch(fs []tap.Frame) (int, error) {
	n.calls++
	return n.Device.WriteBatch(fs[:min(len(fs), n.calls%4)])
}

// A device that takes only a part of each batch gets every frame, once and in order.
func TestDeviceNarrow(t *testing.T) {
	p := harness.NewPairWith(t, link, func(i int, d tap.Device) tap.Device { return &narrow{Device: d} })
	c := p.Connect(harness.ConnOptions{Timeout: 20, MTU: qp.MTU256})
	second := p.Connect(harness.ConnOptions{Timeout: 20, MTU: qp.MTU256})
	for n := 1; n <= 1_000_000; n *= 10 {
		harness.Fill(c.A.Mem[:n], uint64(n))
		harness.Fill(second.B.Mem[:n], uint64(n+1))
		c.A.Send(c.A.Write(c.B, 1, 0, 0, n))
		second.A.Send(second.A.Read(second.B, 2, 0, 0, n))
		c.WaitOK(c.A, 1)
		c.WaitOK(second.A, 2)
		if !bytes.Equal(c.A.Mem[:n], c.B.Mem[:n]) || !bytes.Equal(second.A.Mem[:n], second.B.Mem[:n]) {
			t.Fatalf("%d bytes: wrong data", n)
		}
	}
	for i, d := range p.Dev {
		if n := d.Protocol().RetransmittedPkts.Load(); n != 0 {
			t.Errorf("device %d: %d packets retransmitted", i, n)
		}
	}
}

// What has arrived of a message is in memory before the rest is.
func TestPartOfMessage(t *testing.T) {
	cfg := link
	cfg.Filter = func(from int, f []byte) taptest.Verdict {
		var p wire.Packet
		if from == 0 && wire.Parse(f, &p) == nil && p.Info.Mask&(wire.Middle|wire.Last) != 0 {
			return taptest.Drop
		}
		return taptest.Pass
	}
	c := harness.NewPair(t, cfg).Connect(harness.ConnOptions{MTU: qp.MTU1024, RetryCnt: 1})
	harness.Fill(c.A.Mem[:5000], 1)
	c.A.Send(c.A.Write(c.B, 1, 0, 0, 5000))
	if wc := c.WaitOne(c.A); wc.Status != qp.WCRetryExcErr {
		t.Fatalf("completion %+v", wc)
	}
	if !bytes.Equal(c.B.Mem[:1024], c.A.Mem[:1024]) {
		t.Error("the first packet's data is not in memory")
	}
}

func TestRetryExceeded(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{RetryCnt: 2})
	p.Net.SetFaults(1, 0, 0, 0)
	c.A.Send(c.A.Message(1, 0, 10), c.A.Message(2, 0, 10))
	if wc := c.WaitOne(c.A); wc.ID != 1 || wc.Status != qp.WCRetryExcErr {
		t.Fatalf("completion %+v", wc)
	}
	if wc := c.WaitOne(c.A); wc.ID != 2 || wc.Status != qp.WCWRFlushErr {
		t.Fatalf("completion %+v", wc)
	}
	if st := c.A.QP.State(); st != qp.StateErr {
		t.Errorf("QP is in %v", st)
	}
	// What is posted to a QP in ERR is flushed, on both queues.
	c.A.Send(c.A.Message(3, 0, 10))
	c.A.Recv(4, 0, 10)
	got := map[uint64]bool{}
	for range 2 {
		wc := c.WaitOne(c.A)
		if wc.Status != qp.WCWRFlushErr {
			t.Fatalf("completion %+v", wc)
		}
		got[wc.ID] = true
	}
	if !got[3] || !got[4] {
		t.Errorf("flushed %v", got)
	}
}

func TestRemoteAccessError(t *testing.T) {
	p := harness.NewPair(t, link)
	c := p.Connect(harness.ConnOptions{})
	wr := c.A.Write(c.B, 1, 0, 0, 100)
	wr.RKey++
	c.A.Send(wr)
	if wc := c.WaitOne(c.A); wc.Status != qp.WCRemAccessErr {
		t.Fatalf("completion %+v", wc)
	}
	e, ok := c.B.Dev.TryAsyncEvent()
	if !ok || e.Type != qp.EventQPAccessErr || e.QP != c.B.QP {
		t.Fatalf("event %+v, %v", e, ok)
	}
	e.Ack()
	// A region that was deregistered is none any more.
	c2 := p.Connect(harness.ConnOptions{Mem: 4096, Access: mr.LocalWrite | mr.RemoteWrite})
	if err := c2.B.MR.Dereg(); err != nil {
		t.Fatal(err)
	}
	c2.A.Send(c2.A.Write(c2.B, 1, 0, 0, 100))
	if wc := c2.WaitOne(c2.A); wc.Status != qp.WCRemAccessErr {
		t.Fatalf("completion %+v", wc)
	}
}
