// SPDX-License-Identifier: Apache-2.0

package qp

// What a driver in another language needs beside the rings: their layout as
// numbers it can compare with its own, the rings themselves, and the state of a
// QP where it can see it.

// The layout of rings, in bytes; ring.go describes it.
const (
	RingProdOffset   = ringProd
	RingConsOffset   = ringCons
	RingArmOffset    = ringArm
	RingStateOffset  = ringState
	RingCountOffset  = ringCount
	RingStrideOffset = ringStride
	RingSlotsOffset  = ringSlots
	SendWQESize      = sendWQESize
	RecvWQESize      = recvWQESize
)

// setState changes the state, and what a driver sees of it: Handle and Run look
// at the one, drivers at the other. The caller has the baton.
func (q *QP) setState(s State) {
	q.sq.word(ringState).Store(uint32(s))
	q.state.Store(uint32(s))
}

// SendOps is the set of send opcodes that the QP takes: bit n for WROpcode n.
func (q *QP) SendOps() (ops uint32) {
	for op := range wrOps {
		if wrOps[op].svc&q.init.Type.svc() != 0 {
			ops |= 1 << op
		}
	}
	return ops
}

// Ring is the CQ's ring, for a driver in another language. Resize replaces it, and
// Resize, resetting and destroying a QP change what is in it from the driver's
// side: such a driver calls them with its own lock of the CQ held.
func (c *CQ) Ring() *Ring {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	return c.ring
}

// Ring is the SRQ's ring, for a driver in another language. Resize replaces it: such a
// driver calls it with its own lock of the SRQ held.
func (s *SRQ) Ring() *Ring {
	s.q.dmu.Lock()
	defer s.q.dmu.Unlock()
	return s.q.ring
}
