// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

const (
	ctlReceives = 4 // receives kept posted for control messages
	ctlSends    = 4 // send buffers in turn
	ctlMTU      = qp.MTU1024
)

// control carries control messages over the QP of the out-of-band exchange.
type control struct {
	e    *endpoint
	q    *provider.QP
	cq   *provider.CQ
	buf  *buffer
	mine dest
	sent uint64
	done uint64  // sends completed
	got  []qp.WC // receives that came, not yet read
}

// newControl makes the QP in state INIT. No receives are posted: which ones
// depends on who the peer turns out to be.
func newControl(e *endpoint) (*control, error) {
	c := &control{e: e}
	var err error
	if c.cq, err = e.dev.CreateCQ(foreignRecvs+ctlSends, e.ch); err != nil {
		return nil, err
	}
	if c.q, err = e.createQP(c.cq, ctlSends, foreignRecvs); err != nil {
		return nil, err
	}
	if c.buf, err = newBuffer(e.pd, (ctlReceives+ctlSends)*controlLen, mr.LocalWrite, false, true); err != nil {
		return nil, err
	}
	if err = initQP(c.q, mr.LocalWrite); err != nil {
		return nil, err
	}
	gid, err := e.dev.QueryGID(e.gid)
	if err != nil {
		return nil, err
	}
	c.mine = dest{LID: tapverbsLID, QPN: c.q.Num(), PSN: newPSN(), GID: gid}
	return c, nil
}

// connect posts the receives for control messages and connects the QP to the
// peer's.
func (c *control) connect(peer dest) error {
	for i := range ctlReceives {
		if err := c.post(i); err != nil {
			return err
		}
	}
	return c.connectQP(peer, ctlMTU)
}

func (c *control) connectQP(peer dest, mtu qp.MTU) error {
	c.e.peer = provider.GID(peer.GID)
	return connectQP(c.q, connAttr{
		mtu: mtu, reads: 1, gidIndex: c.e.gid, mine: c.mine.PSN, theirs: peer.PSN, peer: peer.QPN, gid: c.e.peer,
	})
}

func (c *control) sge(slot, n int) qp.SGE {
	return qp.SGE{Addr: uint64(c.buf.mem.Addr()) + uint64(slot*controlLen), Length: uint32(n), LKey: c.buf.reg.LKey()}
}

func (c *control) bytes(slot int) []byte { return c.buf.bytes()[slot*controlLen:][:controlLen] }

// post posts the receive of buffer i, 0 to ctlReceives-1.
func (c *control) post(i int) error {
	_, err := c.q.PostRecv([]qp.RecvWR{{ID: recvBit | uint64(i), SGL: []qp.SGE{c.sge(i, controlLen)}}})
	return err
}

// send sends a message. It does not wait for it to arrive.
func (c *control) send(v any) error {
	b, err := encodeControl(v)
	if err != nil {
		return err
	}
	for c.sent-c.done >= ctlSends {
		if err := c.take(); err != nil {
			return err
		}
	}
	slot := ctlReceives + int(c.sent%ctlSends)
	copy(c.bytes(slot), b)
	c.sent++
	_, err = c.q.PostSend([]qp.SendWR{{
		ID: c.sent, Opcode: qp.WRSend, Flags: qp.SendSignaled, SGL: []qp.SGE{c.sge(slot, len(b))},
	}})
	return err
}

// take waits for completions and sorts them.
func (c *control) take() error {
	wcs, err := c.e.take(c.cq)
	if err != nil {
		return err
	}
	for _, wc := range wcs {
		recv := wc.ID&recvBit != 0
		switch {
		case wc.Status != qp.WCSuccess:
			return wcError{wc.Status, recv}
		case recv:
			c.got = append(c.got, wc)
		default:
			c.done = wc.ID
		}
	}
	return nil
}

// receive waits for a message and reads it into v.
func (c *control) receive(v any) error {
	for len(c.got) == 0 {
		if err := c.take(); err != nil {
			return err
		}
	}
	wc := c.got[0]
	c.got = c.got[1:]
	i := int(wc.ID &^ recvBit)
	if err := json.Unmarshal(c.bytes(i)[:wc.ByteLen], v); err != nil {
		return errPeer{fmt.Sprintf("control message of %d bytes: %v", wc.ByteLen, err)}
	}
	return c.post(i)
}

// call sends a request and waits for its reply.
func (c *control) call(req *request) (*reply, error) {
	if err := c.send(req); err != nil {
		return nil, err
	}
	r := &reply{}
	if err := c.receive(r); err != nil {
		return nil, err
	}
	if r.Err != "" {
		return nil, errPeer{"the server: " + r.Err}
	}
	return r, nil
}

// flush waits until the peer has taken all that was sent.
func (c *control) flush() error {
	for c.done < c.sent {
		if err := c.take(); err != nil {
			return err
		}
	}
	return nil
}
