// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

var testSizes = []int{0, 1, 2, 3, 4, 5, 63, 64, 255, 256, 257, 1023, 1024, 1025, 2048, 2049, 4096, 10000, 70000}

// TestOperations moves messages of every size with every operation at every MTU
// and checks data, completions, and that nothing was sent twice.
func TestOperations(t *testing.T) {
	for mtu := MTU256; mtu <= MTU4096; mtu++ {
		t.Run(fmt.Sprint(mtu.Bytes()), func(t *testing.T) {
			s := usual()
			s.mtu = mtu
			w := newWorld(t, s)
			a, b := w.a, w.b
			for i, size := range testSizes {
				src := a.fill(uint64(i))[:size]
				dst := b.fill(99)
				const off = 100_001
				id := uint64(i)
				type op struct {
					wr   SendWR
					recv bool
				}
				for _, o := range []op{
					{SendWR{Opcode: WRSend}, true},
					{SendWR{Opcode: WRSendImm, Imm: 0xdeadbeef}, true},
					{SendWR{Opcode: WRWrite}, false},
					{SendWR{Opcode: WRWriteImm, Imm: 0x12345678}, true},
				} {
					clear(dst)
					a.wcs, b.wcs = nil, nil
					o.wr.ID, o.wr.SGL, o.wr.Flags = id, a.sgl(0, size), SendSignaled
					if o.recv {
						b.recv(RecvWR{ID: id, SGL: b.sgl(off, size)})
					}
					a.post(a.remote(o.wr, off))
					w.run()
					if !bytes.Equal(dst[off:off+size], src) {
						t.Fatalf("opcode %d, %d bytes: wrong data", o.wr.Opcode, size)
					}
					if len(bytes.Trim(dst[:off], "\x00")) != 0 || len(bytes.Trim(dst[off+size:], "\x00")) != 0 {
						t.Fatalf("opcode %d, %d bytes: wrote outside", o.wr.Opcode, size)
					}
					a.want(WC{ID: id, Opcode: wrOps[o.wr.Opcode].wc})
					if !o.recv {
						b.want()
						continue
					}
					r := b.wcs[0]
					if r.Status != WCSuccess || int(r.ByteLen) != size || r.QPN != b.qp.Num() {
						t.Fatalf("receive: %+v", r)
					}
					if imm := o.wr.Imm; imm != 0 && (r.Flags != WCWithImm || r.Imm != imm) {
						t.Fatalf("immediate: %+v", r)
					}
				}
				// READ back
				a.wcs, b.wcs = nil, nil
				a.fill(7)
				a.post(a.remote(SendWR{ID: id, Opcode: WRRead, SGL: a.sgl(3, size), Flags: SendSignaled}, off))
				w.run()
				a.want(WC{ID: id, Opcode: WCRDMARead})
				if !bytes.Equal(a.mem.Bytes()[3:3+size], dst[off:off+size]) {
					t.Fatalf("READ of %d bytes: wrong data", size)
				}
			}
			for _, n := range []*node{a, b} {
				if st := n.env.Stats; st.RetransmittedPkts.Load() != 0 || st.DuplicateRequest.Load() != 0 {
					t.Fatal("retransmission without loss")
				}
			}
		})
	}
}

func TestAtomics(t *testing.T) {
	w := newWorld(t, usual())
	a, b := w.a, w.b
	word := b.mem.Bytes()[64:72]
	res := func(i int) uint64 { return binary.NativeEndian.Uint64(a.mem.Bytes()[8*i:]) }
	binary.NativeEndian.PutUint64(word, 100)
	a.post(a.remote(SendWR{ID: 0, Opcode: WRAtomicFetchAdd, CompareAdd: 5, SGL: a.sgl(0, 8), Flags: SendSignaled}, 64),
		a.remote(SendWR{ID: 1, Opcode: WRAtomicCmpSwap, CompareAdd: 105, Swap: 7, SGL: a.sgl(8, 8), Flags: SendSignaled}, 64),
		a.remote(SendWR{ID: 2, Opcode: WRAtomicCmpSwap, CompareAdd: 105, Swap: 9, SGL: a.sgl(16, 8), Flags: SendSignaled}, 64))
	w.run()
	a.want(WC{ID: 0, Opcode: WCFetchAdd}, WC{ID: 1, Opcode: WCCompSwap}, WC{ID: 2, Opcode: WCCompSwap})
	if res(0) != 100 || res(1) != 105 || res(2) != 7 || binary.NativeEndian.Uint64(word) != 7 {
		t.Fatalf("%d %d %d, memory %d", res(0), res(1), res(2), binary.NativeEndian.Uint64(word))
	}
	// A misaligned one is an invalid request.
	a.wcs = nil
	a.post(a.remote(SendWR{ID: 3, Opcode: WRAtomicFetchAdd, SGL: a.sgl(0, 8)}, 65))
	w.run()
	a.want(WC{ID: 3, Status: WCRemInvReqErr})
}

func TestScatterGatherAndInline(t *testing.T) {
	w := newWorld(t, usual())
	a, b := w.a, w.b
	src := a.fill(1)
	want := slices.Concat(src[5:1505], src[2000:2001], src[4000:6500])
	b.recv(RecvWR{ID: 1, SGL: []SGE{b.sge(10, 7), b.sge(100, 0), b.sge(200, 3000), b.sge(5000, 3000)}})
	a.post(SendWR{ID: 1, Opcode: WRSend, SGL: []SGE{a.sge(5, 1500), a.sge(2000, 1), a.sge(4000, 2500)}})
	w.run()
	a.want() // not signalled
	m := b.mem.Bytes()
	got := slices.Concat(m[10:17], m[200:3200], m[5000:5000+len(want)-3007])
	if !bytes.Equal(got, want) {
		t.Fatal("wrong data")
	}
	b.wcs = nil
	payload := []byte("posted, and overwritten at once")
	b.recv(RecvWR{ID: 2, SGL: b.sgl(0, 100)})
	in := slices.Clone(payload)
	a.post(SendWR{ID: 2, Opcode: WRSend, Flags: SendInline | SendSignaled, Inline: in})
	clear(in)
	w.run()
	a.want(WC{ID: 2, Opcode: WCSend})
	if !bytes.Equal(m[:len(payload)], payload) {
		t.Fatalf("inline: %q", m[:len(payload)])
	}
	if _, err := a.qp.PostSend([]SendWR{{Opcode: WRSend, Flags: SendInline, Inline: make([]byte, a.qp.Caps().Inline+1)}}); err == nil {
		t.Fatal("too much inline data accepted")
	}
}

func TestPostErrors(t *testing.T) {
	s := usual()
	s.caps.SendWR = 8
	w := newWorld(t, s)
	a := w.a
	for _, c := range []struct {
		wr   SendWR
		want error
	}{
		{SendWR{Opcode: 77}, ErrOpcode},
		{SendWR{Opcode: WRSendInv + 1}, ErrOpcode},
		{SendWR{Opcode: WRRead, Flags: SendInline, Inline: []byte{1}}, ErrOpcode},
		{SendWR{Opcode: WRAtomicFetchAdd, SGL: a.sgl(0, 4)}, ErrLength},
		{SendWR{Opcode: WRSend, SGL: make([]SGE, 100)}, ErrTooManySGE},
		{SendWR{Opcode: WRSend, SGL: []SGE{{Length: 1 << 31}, {Length: 1}}}, ErrLength},
	} {
		if n, err := a.qp.PostSend([]SendWR{c.wr}); n != 0 || !bytesEqualErr(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.wr, err, c.want)
		}
	}
	wrs := make([]SendWR, 20)
	for i := range wrs {
		wrs[i] = SendWR{ID: uint64(i), Opcode: WRSend}
	}
	if n, err := a.qp.PostSend(wrs); n != 8 || err != ErrFull {
		t.Fatalf("%d, %v", n, err)
	}
}

func bytesEqualErr(got, want error) bool {
	return got != nil && want != nil && got.Error() == want.Error()
}

// TestPSNWrap starts close to the end of the PSN space (usual does) and moves
// enough to wrap with packets of the smallest MTU.
func TestPSNWrap(t *testing.T) {
	s := usual()
	s.mtu, s.psn = MTU256, 0xffffff
	w := newWorld(t, s)
	a, b := w.a, w.b
	src := a.fill(3)
	a.post(a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: a.sgl(0, 500_000), Flags: SendSignaled}, 0))
	a.post(a.remote(SendWR{ID: 2, Opcode: WRRead, SGL: a.sgl(500_000, 500_000), Flags: SendSignaled}, 0))
	w.run()
	a.want(WC{ID: 1, Opcode: WCRDMAWrite}, WC{ID: 2, Opcode: WCRDMARead})
	if !bytes.Equal(b.mem.Bytes()[:500_000], src[:500_000]) || !bytes.Equal(src[:500_000], src[500_000:1_000_000]) {
		t.Fatal("wrong data")
	}
}

// TestMaxRdAtomic counts outstanding READs and atomics at the wire.
func TestMaxRdAtomic(t *testing.T) {
	for _, limit := range []uint8{1, 2, 5} {
		s := usual()
		s.rdAtomic = limit
		w := newWorld(t, s)
		out, most := 0, 0
		w.filter = func(p *wire.Packet, from *node) bool {
			switch {
			case p.Info.Kind == wire.KindRead || p.Info.Kind == wire.KindAtomic:
				out++
				most = max(most, out)
			case p.Info.Kind == wire.KindAtomicAck || p.Info.Kind == wire.KindReadResp && p.Info.Mask&wire.End != 0:
				out--
			}
			return true
		}
		for i := range 20 {
			w.a.post(w.a.remote(SendWR{ID: uint64(i), Opcode: WRRead, SGL: w.a.sgl(0, 3000), Flags: SendSignaled}, 0),
				w.a.remote(SendWR{ID: uint64(i), Opcode: WRAtomicFetchAdd, SGL: w.a.sgl(8000, 8), Flags: SendSignaled}, 8000))
		}
		w.run()
		if most != int(limit) || len(w.a.wcs) != 40 {
			t.Fatalf("limit %d: %d outstanding, %d completions", limit, most, len(w.a.wcs))
		}
	}
	// None allowed: the request can't be executed, the QP says so.
	s := usual()
	s.rdAtomic = 0
	w := newWorld(t, s)
	w.a.post(w.a.remote(SendWR{ID: 1, Opcode: WRRead, SGL: w.a.sgl(0, 8)}, 0))
	w.run()
	w.a.want(WC{ID: 1, Status: WCLocQPOpErr})
}

// TestFence: a fenced SEND leaves only after the READ before it is complete.
func TestFence(t *testing.T) {
	for _, fence := range []bool{false, true} {
		w := newWorld(t, usual())
		w.b.recv(RecvWR{SGL: w.b.sgl(0, 100)})
		wr := SendWR{Opcode: WRSend, SGL: w.a.sgl(0, 8), Flags: SendSignaled}
		if fence {
			wr.Flags |= SendFence
		}
		w.a.post(w.a.remote(SendWR{Opcode: WRRead, SGL: w.a.sgl(0, 5000), Flags: SendSignaled}, 0), wr)
		w.run()
		send, resp := slices.Index(w.sent, "RC_SEND_ONLY"), slices.Index(w.sent, "RC_READ_RESP_LAST")
		if before := send < resp; before == fence {
			t.Fatalf("fence %v: SEND at %d, response at %d", fence, send, resp)
		}
		w.a.want(WC{Opcode: WCRDMARead}, WC{Opcode: WCSend})
	}
}

// TestAckCoalescing: messages that arrive together are acknowledged together.
func TestAckCoalescing(t *testing.T) {
	w := newWorld(t, usual())
	for i := range 64 {
		w.a.post(w.a.remote(SendWR{ID: uint64(i), Opcode: WRWrite, SGL: w.a.sgl(0, 8), Flags: SendSignaled}, 0))
	}
	w.run()
	if len(w.a.wcs) != 64 {
		t.Fatalf("%d completions", len(w.a.wcs))
	}
	if acks := w.b.env.Stats.SentAcks.Load(); acks != 1 {
		t.Fatalf("%d acknowledgements for a batch of 64", acks)
	}
}

// TestSQDrain: in SQD what was started ends, the rest waits, and the event comes.
func TestSQDrain(t *testing.T) {
	w := newWorld(t, usual())
	a := w.a
	a.post(a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: a.sgl(0, 900_000), Flags: SendSignaled}, 0))
	a.qp.Run(16)
	a.modify(Attr{State: StateSQD, EnSQDAsync: true}, AttrState|AttrEnSQDAsync)
	a.post(a.remote(SendWR{ID: 2, Opcode: WRWrite, SGL: a.sgl(0, 8), Flags: SendSignaled}, 0))
	if len(a.events) != 0 {
		t.Fatal("drained too early")
	}
	w.run()
	a.want(WC{ID: 1, Opcode: WCRDMAWrite})
	if !slices.Equal(a.events, []EventType{EventSQDrained}) {
		t.Fatalf("events %v", a.events)
	}
	a.modify(Attr{State: StateRTS}, AttrState)
	w.run()
	a.want(WC{ID: 1, Opcode: WCRDMAWrite}, WC{ID: 2, Opcode: WCRDMAWrite})
}

// TestCommEst: a QP in RTR that hears from its peer says so, and answers.
func TestCommEst(t *testing.T) {
	s := usual()
	s.rts = false
	w := newWorld(t, s)
	w.a.toRTS(s)
	w.a.post(w.a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: w.a.sgl(0, 8), Flags: SendSignaled}, 0))
	w.run()
	w.a.want(WC{ID: 1, Opcode: WCRDMAWrite})
	if !slices.Equal(w.b.events, []EventType{EventCommEst}) {
		t.Fatalf("events %v", w.b.events)
	}
}

// TestSendInv: SEND with invalidate makes the peer's key unusable.
func TestSendInv(t *testing.T) {
	w := newWorld(t, usual())
	a, b := w.a, w.b
	reg, err := b.env.Keys.Register(mr.RegAttr{PD: 1, Addr: b.mem.Addr(), Length: 4096, Access: allAccess, Invalidatable: true})
	if err != nil {
		t.Fatal(err)
	}
	defer reg.Deregister()
	b.recv(RecvWR{ID: 9, SGL: b.sgl(8192, 5000)})
	a.post(a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: a.sgl(0, 8), Flags: SendSignaled}, 0),
		SendWR{ID: 2, Opcode: WRSendInv, InvKey: reg.RKey(), SGL: a.sgl(0, 5000), Flags: SendSignaled},
		SendWR{ID: 3, Opcode: WRWrite, RemoteAddr: uint64(b.mem.Addr()), RKey: reg.RKey(), SGL: a.sgl(0, 8), Flags: SendSignaled})
	w.run()
	a.want(WC{ID: 1, Opcode: WCRDMAWrite}, WC{ID: 2, Opcode: WCSend}, WC{ID: 3, Status: WCRemAccessErr})
	if r := b.wcs[0]; r.Flags != WCWithInv || r.InvKey != reg.RKey() {
		t.Fatalf("%+v", r)
	}
}
