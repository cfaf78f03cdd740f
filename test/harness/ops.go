// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"math/rand/v2"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

func psn(n uint32) wire.PSN { return wire.PSN(n & wire.PSNMask) }

// SGE names n bytes of the end's memory from off.
func (e *End) SGE(off, n int) qp.SGE {
	return qp.SGE{Addr: e.Addr + uint64(off), Length: uint32(n), LKey: e.MR.LKey()}
}

// Send posts work requests and ends the test if any is refused.
func (e *End) Send(wrs ...qp.SendWR) {
	e.t.Helper()
	if n, err := e.QP.PostSend(wrs); err != nil {
		e.t.Fatalf("post send %d of %d: %v", n, len(wrs), err)
	}
}

// Recv posts a receive of n bytes at off, to the SRQ if there is one.
func (e *End) Recv(id uint64, off, n int) {
	e.t.Helper()
	wr := []qp.RecvWR{{ID: id, SGL: []qp.SGE{e.SGE(off, n)}}}
	post := e.QP.PostRecv
	if e.SRQ != nil {
		post = e.SRQ.PostRecv
	}
	if _, err := post(wr); err != nil {
		e.t.Fatalf("post receive: %v", err)
	}
}

// Receiver is the QP that receives: the target of XRC.
func (e *End) Receiver() *provider.QP {
	if e.Target != nil {
		return e.Target
	}
	return e.QP
}

// Poll takes what completions there are, up to 64. What it returns is valid until
// the next call.
func (e *End) Poll() []qp.WC { return e.wcs[:e.CQ.Poll(e.wcs)] }

// WaitOne runs the pair until the end has a completion, and returns it.
func (c *Conn) WaitOne(e *End) (wc qp.WC) {
	c.T.Helper()
	one := e.wcs[:1]
	c.RunUntil(func() bool { return e.CQ.Poll(one) == 1 })
	return one[0]
}

// WaitOK is WaitOne for a completion that must be a success of work request id.
func (c *Conn) WaitOK(e *End, id uint64) qp.WC {
	c.T.Helper()
	wc := c.WaitOne(e)
	if wc.Status != qp.WCSuccess || wc.ID != id {
		c.T.Fatalf("completion %d with status %v, want %d with success", wc.ID, wc.Status, id)
	}
	return wc
}

// Write, Read and Message are work requests from n bytes at off of the end's
// memory to (or from) roff of the peer's, signalled.
func (e *End) Write(peer *End, id uint64, off, roff, n int) qp.SendWR {
	return e.rdma(peer, qp.WRWrite, id, off, roff, n)
}

// Read is described at Write.
func (e *End) Read(peer *End, id uint64, off, roff, n int) qp.SendWR {
	return e.rdma(peer, qp.WRRead, id, off, roff, n)
}

// Message is a SEND; see Write.
func (e *End) Message(id uint64, off, n int) qp.SendWR {
	return qp.SendWR{ID: id, Opcode: qp.WRSend, Flags: qp.SendSignaled, SGL: []qp.SGE{e.SGE(off, n)}, RemoteSRQN: e.SRQN}
}

// Datagram is a SEND to a QP of a datagram service by way of e.AH; see Write.
func (e *End) Datagram(peer *End, id uint64, off, n int) qp.SendWR {
	wr := e.Message(id, off, n)
	wr.AH, wr.RemoteQPN, wr.RemoteQKey = e.AH.Index(), peer.QP.Num(), QKey
	return wr
}

func (e *End) rdma(peer *End, op qp.WROpcode, id uint64, off, roff, n int) qp.SendWR {
	return qp.SendWR{ID: id, Opcode: op, Flags: qp.SendSignaled, SGL: []qp.SGE{e.SGE(off, n)},
		RemoteAddr: peer.Addr + uint64(roff), RKey: peer.MR.RKey(), RemoteSRQN: e.SRQN}
}

// Fill writes bytes that depend on a seed to b.
func Fill(b []byte, seed uint64) {
	r := rand.NewPCG(seed, 0x9e3779b97f4a7c15)
	for i := 0; i < len(b); i += 8 {
		v := r.Uint64()
		for j := i; j < min(i+8, len(b)); j++ {
			b[j] = byte(v)
			v >>= 8
		}
	}
}
