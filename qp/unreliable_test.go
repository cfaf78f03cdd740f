// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// goodAH is the only address handle of a world's nodes: the way to the peer.
const goodAH = 77

func (n *node) connectUnreliable(s setup) {
	if s.typ == TypeUD {
		n.modify(Attr{State: StateInit, Port: 1, QKey: s.qkey}, AttrState|AttrPKeyIndex|AttrPort|AttrQKey)
		n.modify(Attr{State: StateRTR}, AttrState)
	} else {
		n.modify(Attr{State: StateInit, Port: 1, Access: s.access}, AttrState|AttrPKeyIndex|AttrPort|AttrAccess)
		n.modify(Attr{State: StateRTR, Path: n.path, PathMTU: s.mtu, DestQPN: n.peer.qp.Num(), RQPSN: s.psn},
			AttrState|AttrAV|AttrPathMTU|AttrDestQPN|AttrRQPSN)
	}
	if s.rts {
		n.modify(Attr{State: StateRTS, SQPSN: s.psn}, AttrState|AttrSQPSN)
	}
}

func unreliable(t *testing.T, typ Type, change ...func(*setup)) *world {
	s := usual()
	s.typ = typ
	for _, f := range change {
		f(&s)
	}
	return newWorld(t, s)
}

// datagram is a signalled SEND of n bytes at off to the peer.
func (n *node) datagram(id uint64, off, length int) SendWR {
	return SendWR{ID: id, Opcode: WRSend, Flags: SendSignaled, SGL: n.sgl(off, length),
		AH: goodAH, RemoteQPN: n.peer.qp.Num(), RemoteQKey: 0x01234567}
}

// drops drops the sent packets with these numbers, the first being 0.
func (w *world) drops(which ...int) {
	i := 0
	w.filter = func(*wire.Packet, *node) bool {
		n := i
		i++
		for _, d := range which {
			if d == n {
				return false
			}
		}
		return true
	}
}

func TestUCOperations(t *testing.T) {
	for mtu := MTU256; mtu <= MTU4096; mtu++ {
		t.Run(fmt.Sprint(mtu.Bytes()), func(t *testing.T) {
			w := unreliable(t, TypeUC, func(s *setup) { s.mtu = mtu })
			a, b := w.a, w.b
			const off = 100_001
			for i, size := range testSizes {
				for _, op := range []WROpcode{WRSend, WRSendImm, WRWrite, WRWriteImm} {
					src := a.fill(uint64(i))[:size]
					clear(b.fill(0))
					a.wcs, b.wcs = nil, nil
					if op != WRWrite {
						b.recv(RecvWR{ID: 5, SGL: b.sgl(off, size)})
					}
					a.post(a.remote(SendWR{ID: 4, Opcode: op, Imm: 0x1234, Flags: SendSignaled, SGL: a.sgl(0, size)}, off))
					w.run()
					a.want(WC{ID: 4, Opcode: wrOps[op].wc})
					if !bytes.Equal(b.mem.Bytes()[off:off+size], src) {
						t.Fatalf("opcode %d, %d bytes: wrong data", op, size)
					}
					switch op {
					case WRWrite:
						b.want()
					case WRWriteImm:
						b.want(WC{ID: 5, Opcode: WCRecvRDMAImm})
					default:
						b.want(WC{ID: 5, Opcode: WCRecv})
					}
					if op != WRWrite {
						if r := b.wcs[0]; int(r.ByteLen) != size || r.SrcQP != a.qp.Num() || (op == WRSend) != (r.Flags == 0) ||
							op != WRSend && (r.Imm != 0x1234 || r.Flags != WCWithImm) {
							t.Fatalf("opcode %d, %d bytes: %+v", op, size, r)
						}
					}
				}
			}
			if st := b.env.Stats; st.Dropped.Load()+st.OutOfSeqRequest.Load()+st.SentPkts.Load() != 0 {
				t.Error("the receiver dropped or sent something")
			}
			if a.qp.Deadline() != Never || a.env.share.active != 0 {
				t.Error("the sender waits for something")
			}
		})
	}
}

// Whichever packet of a UC message is lost, the message is not received and the one
// behind it is, in the same receive work request.
func TestUCLoss(t *testing.T) {
	for lost := range 3 {
		for _, srq := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d-srq-%v", lost, srq), func(t *testing.T) {
				var q *SRQ
				w := unreliable(t, TypeUC)
				if srq {
					var err error
					if q, err = NewSRQ(1, 8, 1, nil); err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { q.Close() })
					w = unreliable(t, TypeUC, func(s *setup) { s.srq = q })
				}
				a, b := w.a, w.b
				a.fill(1)
				wr := []RecvWR{{ID: 9, SGL: b.sgl(0, 5000)}}
				if srq {
					if _, err := q.PostRecv(wr); err != nil {
						t.Fatal(err)
					}
				} else {
					b.recv(wr...)
				}
				w.drops(lost)
				a.post(SendWR{ID: 1, Opcode: WRSend, Flags: SendSignaled, SGL: a.sgl(0, 3000)},
					SendWR{ID: 2, Opcode: WRSend, Flags: SendSignaled, SGL: a.sgl(7, 2500)})
				w.run()
				a.want(WC{ID: 1}, WC{ID: 2})
				b.want(WC{ID: 9, Opcode: WCRecv})
				if b.wcs[0].ByteLen != 2500 || !bytes.Equal(b.mem.Bytes()[:2500], a.mem.Bytes()[7:2507]) {
					t.Fatal("the second message has wrong data or length")
				}
				if n := b.env.Stats.OutOfSeqRequest.Load(); n == 0 {
					t.Error("the gap was not noticed: was anything lost?")
				}
			})
		}
	}
}

// A plain WRITE after a SEND that was lost in its midst does not complete the
// receive work request that waits for the next SEND.
func TestUCWriteAfterLostSend(t *testing.T) {
	w := unreliable(t, TypeUC)
	a, b := w.a, w.b
	a.fill(1)
	b.recv(RecvWR{ID: 9, SGL: b.sgl(0, 5000)})
	w.drops(2)
	a.post(SendWR{ID: 1, Opcode: WRSend, SGL: a.sgl(0, 3000)},
		a.remote(SendWR{ID: 2, Opcode: WRWrite, SGL: a.sgl(0, 100)}, 10_000))
	w.run()
	b.want()
	if !bytes.Equal(b.mem.Bytes()[10_000:10_100], a.mem.Bytes()[:100]) {
		t.Fatal("the WRITE did not arrive")
	}
	a.post(a.remote(SendWR{ID: 3, Opcode: WRWriteImm, SGL: a.sgl(0, 10), Imm: 3}, 20_000))
	w.run()
	b.want(WC{ID: 9, Opcode: WCRecvRDMAImm})
	b.wcs = nil
	b.modify(Attr{State: StateErr}, AttrState)
	w.run()
	b.want()
}

// A receive work request that a lost message has left is flushed as any other.
func TestUCFlushOfHeldReceive(t *testing.T) {
	w := unreliable(t, TypeUC)
	a, b := w.a, w.b
	b.recv(RecvWR{ID: 8, SGL: b.sgl(0, 5000)}, RecvWR{ID: 9, SGL: b.sgl(0, 5000)})
	w.drops(1)
	a.post(SendWR{ID: 1, Opcode: WRSend, SGL: a.sgl(0, 3000)})
	w.run()
	b.want()
	b.modify(Attr{State: StateErr}, AttrState)
	w.run()
	b.want(WC{ID: 8, Status: WCWRFlushErr}, WC{ID: 9, Status: WCWRFlushErr})
}

// What the responder of an unreliable service can't execute it drops, and takes the
// next message.
func TestUCDrops(t *testing.T) {
	for _, tc := range []struct {
		name string
		wr   func(w *world) SendWR
		recv int // bytes of the receive buffer; 0: none
		own  WC  // with an SRQ
	}{
		{"no receive", func(w *world) SendWR { return SendWR{Opcode: WRSend, SGL: w.a.sgl(0, 3000)} }, 0, WC{}},
		{"too long", func(w *world) SendWR { return SendWR{Opcode: WRSend, SGL: w.a.sgl(0, 3000)} }, 2999, WC{ID: 1, Status: WCRemInvReqErr}},
		{"too long in the first packet", func(w *world) SendWR { return SendWR{Opcode: WRSend, SGL: w.a.sgl(0, 3000)} }, 200, WC{ID: 1, Status: WCRemInvReqErr}},
		{"bad rkey", func(w *world) SendWR {
			wr := w.a.remote(SendWR{Opcode: WRWrite, SGL: w.a.sgl(0, 3000)}, 50_000)
			wr.RKey ^= 0x55
			return wr
		}, 3000, WC{}},
		{"bad rkey, with immediate", func(w *world) SendWR {
			wr := w.a.remote(SendWR{Opcode: WRWriteImm, SGL: w.a.sgl(0, 300)}, 50_000)
			wr.RKey ^= 0x55
			return wr
		}, 3000, WC{ID: 1, Status: WCRemAccessErr}},
		{"out of bounds", func(w *world) SendWR {
			return w.a.remote(SendWR{Opcode: WRWrite, SGL: w.a.sgl(0, 3000)}, 1<<20-100)
		}, 3000, WC{}},
	} {
		for _, srq := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s-srq-%v", tc.name, srq), func(t *testing.T) {
				s := usual()
				s.typ = TypeUC
				if srq {
					q, err := NewSRQ(1, 8, 1, nil)
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { q.Close() })
					s.srq = q
				}
				w := newWorld(t, s)
				a, b := w.a, w.b
				post := b.qp.PostRecv
				if srq {
					post = s.srq.PostRecv
				}
				recv := func(id uint64, n int) {
					t.Helper()
					if _, err := post([]RecvWR{{ID: id, SGL: b.sgl(0, n)}}); err != nil {
						t.Fatal(err)
					}
				}
				if tc.recv > 0 {
					recv(1, tc.recv)
				}
				wr := tc.wr(w)
				wr.Flags = SendSignaled
				a.post(wr)
				w.run()
				a.want(WC{Opcode: wrOps[wr.Opcode].wc})
				next := uint64(1)
				if srq && tc.own.Status != 0 {
					b.want(tc.own)
					next = 2
				} else {
					b.want()
				}
				if b.env.Stats.Dropped.Load() == 0 || tc.recv == 0 && b.env.Stats.OutOfBuffer.Load() == 0 {
					t.Error("not counted")
				}
				if b.qp.State() != StateRTS || b.env.Stats.SentPkts.Load() != 0 {
					t.Fatalf("receiver in %v", b.qp.State())
				}
				a.wcs, b.wcs = nil, nil
				recv(2, 100)
				a.post(SendWR{ID: 3, Opcode: WRSend, SGL: a.sgl(0, 50), Flags: SendSignaled})
				w.run()
				if tc.recv == 0 {
					next = 2
				}
				b.want(WC{ID: next, Opcode: WCRecv})
			})
		}
	}
}

// WRITEs that the QP is not set up for are dropped without a word.
func TestUCNoAccess(t *testing.T) {
	w := unreliable(t, TypeUC, func(s *setup) { s.access = mr.LocalWrite })
	w.a.fill(1)
	w.a.post(w.a.remote(SendWR{Opcode: WRWrite, SGL: w.a.sgl(0, 3000)}, 0))
	w.run()
	if len(bytes.Trim(w.b.mem.Bytes(), "\x00")) != 0 {
		t.Error("written")
	}
	if w.b.env.Stats.Dropped.Load() != 3 || w.b.qp.State() != StateRTS {
		t.Errorf("%d dropped, receiver in %v", w.b.env.Stats.Dropped.Load(), w.b.qp.State())
	}
}

// A bad element in a receive list is the receiver's own fault: an error completion,
// and the QP goes to ERR.
func TestUnreliableReceiveListError(t *testing.T) {
	for _, typ := range []Type{TypeUC, TypeUD} {
		t.Run(typ.String(), func(t *testing.T) {
			w := unreliable(t, typ)
			a, b := w.a, w.b
			bad := b.sgl(0, 200)
			bad[0].LKey ^= 0x77
			b.recv(RecvWR{ID: 1, SGL: bad}, RecvWR{ID: 2, SGL: b.sgl(0, 200)})
			a.post(a.datagram(3, 0, 100))
			w.run()
			a.want(WC{ID: 3})
			b.want(WC{ID: 1, Status: WCLocProtErr}, WC{ID: 2, Status: WCWRFlushErr})
			if b.qp.State() != StateErr {
				t.Errorf("receiver in %v", b.qp.State())
			}
		})
	}
}

// A send that fails moves the QP to SQE: what follows is flushed, the receive side
// goes on, and RTS makes it send again (IBA 10.3.1.6).
func TestSQE(t *testing.T) {
	for _, typ := range []Type{TypeUC, TypeUD} {
		for _, tc := range []struct {
			name  string
			spoil func(wr *SendWR)
			want  WCStatus
		}{
			{"lkey", func(wr *SendWR) { wr.SGL[0].LKey ^= 0x99 }, WCLocProtErr},
			{"bounds", func(wr *SendWR) { wr.SGL[0].Addr += 1 << 20 }, WCLocProtErr},
			{"AH", func(wr *SendWR) { wr.AH = 3 }, WCLocQPOpErr},
			{"longer than the MTU", func(wr *SendWR) { wr.SGL[0].Length = 4097 }, WCLocLenErr},
		} {
			if typ == TypeUC && tc.want != WCLocProtErr {
				continue
			}
			t.Run(fmt.Sprintf("%v-%s", typ, tc.name), func(t *testing.T) {
				w := unreliable(t, typ)
				a, b := w.a, w.b
				for i := range 8 {
					b.recv(RecvWR{ID: uint64(100 + i), SGL: b.sgl(0, 5000)})
					a.recv(RecvWR{ID: uint64(200 + i), SGL: a.sgl(0, 5000)})
				}
				good, bad := a.datagram(1, 0, 100), a.datagram(2, 0, 100)
				tc.spoil(&bad)
				later := a.datagram(3, 0, 100)
				later.Flags = 0 // flushed ones complete all the same
				a.post(good, bad, later)
				w.run()
				a.want(WC{ID: 1}, WC{ID: 2, Status: tc.want}, WC{ID: 3, Status: WCWRFlushErr})
				if a.qp.State() != StateSQE {
					t.Fatalf("QP in %v", a.qp.State())
				}
				a.wcs = nil
				a.post(a.datagram(4, 0, 10)) // flushed, too
				b.post(b.datagram(5, 0, 10)) // received
				w.run()
				a.want(WC{ID: 4, Status: WCWRFlushErr}, WC{ID: 200, Opcode: WCRecv})
				a.wcs, b.wcs = nil, nil
				a.modify(Attr{State: StateRTS, CurState: StateSQE}, AttrState|AttrCurState)
				a.post(a.datagram(6, 0, 10))
				w.run()
				a.want(WC{ID: 6})
				b.want(WC{ID: 101, Opcode: WCRecv})
				if len(a.events)+len(b.events) != 0 {
					t.Errorf("events %v %v", a.events, b.events)
				}
			})
		}
	}
}

// A UC message whose memory goes bad in its midst is never received; what the
// receiver had of it is given up for the next one.
func TestSQEInMidst(t *testing.T) {
	w := unreliable(t, TypeUC)
	a, b := w.a, w.b
	b.recv(RecvWR{ID: 1, SGL: b.sgl(0, 5000)})
	bad := SendWR{ID: 1, Opcode: WRSend, SGL: []SGE{a.sge(0, 1500), a.sge(0, 1500)}}
	bad.SGL[1].LKey ^= 0x99
	a.post(bad)
	w.run()
	a.want(WC{ID: 1, Status: WCLocProtErr})
	a.wcs = nil
	a.modify(Attr{State: StateRTS}, AttrState)
	a.fill(3)
	a.post(SendWR{ID: 2, Opcode: WRSend, SGL: a.sgl(0, 2000), Flags: SendSignaled})
	w.run()
	a.want(WC{ID: 2})
	b.want(WC{ID: 1, Opcode: WCRecv})
	if b.wcs[0].ByteLen != 2000 || !bytes.Equal(b.mem.Bytes()[:2000], a.mem.Bytes()[:2000]) {
		t.Error("wrong data")
	}
	if b.env.Stats.MessagesDropped.Load() != 1 {
		t.Errorf("%d messages dropped", b.env.Stats.MessagesDropped.Load())
	}
}

// SQD of an unreliable QP starts nothing new and says when it is drained.
func TestUnreliableSQD(t *testing.T) {
	w := unreliable(t, TypeUC)
	a, b := w.a, w.b
	b.recv(RecvWR{ID: 1, SGL: b.sgl(0, 100)})
	a.modify(Attr{State: StateSQD, EnSQDAsync: true}, AttrState|AttrEnSQDAsync)
	a.post(SendWR{ID: 1, Opcode: WRSend, SGL: a.sgl(0, 10), Flags: SendSignaled})
	w.run()
	a.want()
	if len(a.events) != 1 || a.events[0] != EventSQDrained {
		t.Fatalf("events %v", a.events)
	}
	a.modify(Attr{State: StateRTS}, AttrState)
	w.run()
	a.want(WC{ID: 1})
	b.want(WC{ID: 1, Opcode: WCRecv})
}

func TestUDOperations(t *testing.T) {
	w := unreliable(t, TypeUD)
	a, b := w.a, w.b
	if m := a.qp.Query().PathMTU; m != testLimits.MTU {
		t.Fatalf("MTU %d", m.Bytes())
	}
	const off = 3001
	for i, size := range []int{0, 1, 2, 3, 4, 5, 64, 255, 1023, 1024, 4095, 4096} {
		for _, imm := range []bool{false, true} {
			src := a.fill(uint64(i))[:size]
			clear(b.fill(0))
			a.wcs, b.wcs = nil, nil
			b.recv(RecvWR{ID: 5, SGL: []SGE{b.sge(off, 17), b.sge(off+17, size+23)}})
			wr := a.datagram(4, 0, size)
			if imm {
				wr.Opcode, wr.Imm = WRSendImm, 0xabcd
			}
			a.post(wr)
			w.run()
			a.want(WC{ID: 4, Opcode: WCSend})
			b.want(WC{ID: 5, Opcode: WCRecv})
			r, m := b.wcs[0], b.mem.Bytes()[off:]
			if int(r.ByteLen) != size+40 || r.SrcQP != a.qp.Num() || r.Flags&WCGRH == 0 || (r.Flags&WCWithImm != 0) != imm || imm && r.Imm != 0xabcd {
				t.Fatalf("%d bytes: %+v", size, r)
			}
			if !bytes.Equal(m[40:40+size], src) || len(bytes.Trim(m[40+size:], "\x00")) != 0 {
				t.Fatalf("%d bytes: wrong data", size)
			}
			// IPv4: 20 bytes of nothing, and the header.
			if len(bytes.Trim(m[:20], "\x00")) != 0 || m[20] != 0x45 || !bytes.Equal(m[32:40], []byte{10, 0, 0, 1, 10, 0, 0, 2}) {
				t.Fatalf("GRH area % x", m[:40])
			}
		}
	}
	if len(w.sent) != 24 {
		t.Errorf("%d packets", len(w.sent))
	}
}

func TestUDInlineAndOwnQKey(t *testing.T) {
	w := unreliable(t, TypeUD, func(s *setup) { s.qkey = 0x80001111 })
	a, b := w.a, w.b
	b.recv(RecvWR{ID: 1, SGL: b.sgl(0, 100)})
	wr := a.datagram(2, 0, 0)
	wr.SGL, wr.Inline, wr.Flags, wr.RemoteQKey = nil, []byte("inline"), SendInline|SendSignaled|SendSolicited, 0xffffffff
	a.post(wr)
	w.run()
	a.want(WC{ID: 2})
	b.want(WC{ID: 1, Opcode: WCRecv})
	if string(b.mem.Bytes()[40:46]) != "inline" {
		t.Error("wrong data")
	}
}

func TestUDDrops(t *testing.T) {
	for _, tc := range []struct {
		name  string
		recv  int
		spoil func(wr *SendWR)
		count func(st *Stats) uint64
		own   bool // uses an SRQ's work request up
	}{
		{"Q_Key", 200, func(wr *SendWR) { wr.RemoteQKey++ }, func(st *Stats) uint64 { return st.QKeyViolations.Load() }, false},
		{"no receive", 0, func(*SendWR) {}, func(st *Stats) uint64 { return st.OutOfBuffer.Load() }, false},
		{"buffer one byte short", 139, func(*SendWR) {}, func(st *Stats) uint64 { return st.Dropped.Load() }, true},
		{"buffer without room for the GRH", 39, func(*SendWR) {}, func(st *Stats) uint64 { return st.Dropped.Load() }, true},
	} {
		for _, srq := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s-srq-%v", tc.name, srq), func(t *testing.T) {
				s := usual()
				s.typ = TypeUD
				if srq {
					q, err := NewSRQ(1, 8, 1, nil)
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { q.Close() })
					s.srq = q
				}
				w := newWorld(t, s)
				a, b := w.a, w.b
				post := b.qp.PostRecv
				if srq {
					post = s.srq.PostRecv
				}
				if tc.recv > 0 {
					post([]RecvWR{{ID: 1, SGL: b.sgl(0, tc.recv)}})
				}
				a.fill(1)
				clear(b.fill(1)) // present, so that every write shows
				wr := a.datagram(1, 0, 100)
				tc.spoil(&wr)
				a.post(wr)
				w.run()
				a.want(WC{ID: 1})
				if srq && tc.own {
					b.want(WC{ID: 1, Status: WCRemInvReqErr})
				} else {
					b.want()
				}
				if tc.count(b.env.Stats) != 1 || b.env.Stats.Dropped.Load() != 1 || b.qp.State() != StateRTS {
					t.Fatalf("counted %d, dropped %d, %v", tc.count(b.env.Stats), b.env.Stats.Dropped.Load(), b.qp.State())
				}
				if len(bytes.Trim(b.mem.Bytes(), "\x00")) != 0 {
					t.Error("something was written")
				}
				// An ordinary datagram comes next, into the same work request if it was kept.
				b.wcs = nil
				post([]RecvWR{{ID: 2, SGL: b.sgl(0, 200)}})
				n := 100
				if tc.recv > 0 && tc.recv < 140 && !srq {
					n = 0
					if tc.recv < 40 {
						return
					}
				}
				a.post(a.datagram(2, 0, n))
				w.run()
				id := uint64(1)
				if tc.recv == 0 || srq && tc.own {
					id = 2
				}
				b.want(WC{ID: id, Opcode: WCRecv})
			})
		}
	}
}

// PSNs of datagrams that are lost or overtaken do not matter.
func TestUDOrder(t *testing.T) {
	w := unreliable(t, TypeUD)
	a, b := w.a, w.b
	w.drops(0, 2)
	for i := range 5 {
		b.recv(RecvWR{ID: uint64(i), SGL: b.sgl(0, 100)})
		a.post(a.datagram(uint64(i), 0, 10))
	}
	w.run()
	a.want(WC{ID: 0}, WC{ID: 1}, WC{ID: 2}, WC{ID: 3}, WC{ID: 4})
	b.want(WC{ID: 0, Opcode: WCRecv}, WC{ID: 1, Opcode: WCRecv}, WC{ID: 2, Opcode: WCRecv})
}

// Operations that a service does not have are refused when posted (IBA table 90).
func TestUnreliableOpcodes(t *testing.T) {
	for _, typ := range []Type{TypeUC, TypeUD} {
		w := unreliable(t, typ)
		for op := WRWrite; op <= WRSendInv; op++ {
			allowed := op == WRSend || op == WRSendImm || typ == TypeUC && (op <= WRSendImm || op == WRLocalInv || op == WRBindMW)
			_, err := w.a.qp.PostSend([]SendWR{{Opcode: op, AH: goodAH}})
			if (err == nil) != allowed {
				t.Errorf("%v opcode %d: %v", typ, op, err)
			}
		}
	}
}

// The first packet in RTR says that the peer is there; datagrams have no peer (IBA
// 11.6.3.1).
func TestUnreliableCommEst(t *testing.T) {
	for typ, want := range map[Type]int{TypeUC: 1, TypeUD: 0} {
		s := usual()
		s.typ = typ
		w := &world{t: t}
		w.a, w.b = w.node(s, 1), w.node(s, 2)
		w.a.peer, w.b.peer = w.b, w.a
		w.a.connect(s)
		s.rts = false
		w.b.connect(s)
		w.b.recv(RecvWR{ID: 1, SGL: w.b.sgl(0, 100)}, RecvWR{ID: 2, SGL: w.b.sgl(0, 100)})
		w.a.post(w.a.datagram(1, 0, 10), w.a.datagram(2, 0, 10))
		w.run()
		w.b.want(WC{ID: 1, Opcode: WCRecv}, WC{ID: 2, Opcode: WCRecv})
		if len(w.b.events) != want {
			t.Errorf("%v: events %v", typ, w.b.events)
		}
	}
}
