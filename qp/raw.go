// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"encoding/binary"

	"github.com/tapverbs/tapverbs/wire"
)

// RAW_PACKET: a work request is a whole Ethernet frame, without FCS, that goes out
// as it stands, whatever its addresses say (ibv_create_qp(3), IBV_QPT_RAW_PACKET).
// What is received is chosen by flows, which are the device's affair.

// FrameEgress takes the frames of RAW_PACKET QPs. BeginFrame and EndFrame come in
// pairs; what BeginFrame returned is valid until then.
type FrameEgress interface {
	// MaxFrame is the longest frame in bytes, from the Ethernet header on; a VLAN
	// tag may come on top of it.
	MaxFrame() int
	// BeginFrame reserves a frame of n bytes. nil: no room now; try again in a
	// later Run.
	BeginFrame(n int) []byte
	// EndFrame takes the frame, filled in, that q sends.
	EndFrame(q *QP)
	// Cancel gives back what BeginFrame reserved.
	Cancel()
}

const vlanTagLen = 4

// tagged says whether a frame has a VLAN tag (IEEE 802.1Q 9.6).
func tagged(b []byte) bool {
	t := binary.BigEndian.Uint16(b[12:])
	return t == 0x8100 || t == 0x88a8
}

// sendFrame emits the frame of a work request. One that is no frame, or longer than
// the link takes, ends as what does not fit the port does (IBA 11.6.2, local length
// error).
func (r *requester) sendFrame(w *SendWQE, s *sendState) sendResult {
	out := r.q.env.Frames
	limit := out.MaxFrame()
	n := int(w.Length)
	if n < wire.EthLen || n > limit+vlanTagLen {
		s.fail = WCLocLenErr
		return sendFailed
	}
	b := out.BeginFrame(n)
	if b == nil {
		return sendFull
	}
	if err := r.gather(w, s, 0, b); err != nil {
		out.Cancel()
		return r.gatherError(s, err)
	}
	if n > limit && !tagged(b) {
		out.Cancel()
		s.fail = WCLocLenErr
		return sendFailed
	}
	out.EndFrame(r.q)
	r.pay(int64(n))
	r.q.env.Stats.SentPkts.Add(1)
	r.q.env.Stats.SentBytes.Add(uint64(n))
	r.done(w)
	return sendOK
}

// HandleFrame takes a whole frame for a RAW_PACKET QP; tag is that of the flow which
// brought it. It is copied, and nothing is sent.
func (q *QP) HandleFrame(b []byte, tag uint32) {
	st := q.env.Stats
	st.RcvdPkts.Add(1)
	st.RcvdBytes.Add(uint64(len(b)))
	if s := q.State(); s < StateRTR || s == StateErr { // IBA 10.3.1
		st.Dropped.Add(1)
		return
	}
	q.enter()
	if h := &q.resp.held; h.n() > 0 {
		if !h.region.Suspended() {
			q.resp.replay()
		}
		if h.n() > 0 {
			if !h.push(inHand{b, true, tag}, 0) {
				st.Dropped.Add(1)
			}
			return
		}
	}
	q.resp.frame(b, tag)
}

// frame places a frame. One that meets no receive work request is lost; one that is
// longer than the buffer ends the work request, and the QP with it, as other local
// faults of unreliable services do (IBA 9.9.3.1.1).
func (r *responder) frame(b []byte, tag uint32) {
	r.kind, r.wants, r.inHand, r.span = wire.KindSend, true, inHand{b, true, tag}, 0
	if !r.hasRecv && !r.takeRecv() {
		r.q.env.Stats.OutOfBuffer.Add(1)
		r.q.env.Stats.Dropped.Add(1)
		return
	}
	r.hasRecv = true
	if uint64(len(b)) > uint64(r.recv.total) {
		r.q.env.Stats.Dropped.Add(1)
		r.localFault(WCLocLenErr)
		return
	}
	if err := r.q.scatter(&r.stage, r.listPD, r.q.env.Keys.Moved(), r.recv.sges, 0, b); err != nil {
		r.memoryError(err)
		return
	}
	r.dirty = true
	switch {
	case r.flush():
		r.completeRecv(&CQE{Opcode: WCRecv, ByteLen: uint32(len(b)), FlowTag: tag}, false)
	case r.dirty:
		r.postpone(r.flushErr)
	}
}
