// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"fmt"
	"math"

	"github.com/tapverbs/tapverbs/wire"
)

// Modify changes attributes and state (ibv_modify_qp(3)); a.Path is the
// resolved path when mask has AttrAV. Nothing is changed when it fails:
// ErrTransition, ErrAttrMask, ErrAttrValue, or ErrState when AttrCurState is
// given and wrong.
func (q *QP) Modify(a *Attr, mask AttrMask, lim Limits) error {
	from := q.State()
	if mask&AttrCurState != 0 && a.CurState != from {
		return fmt.Errorf("%w: QP is in %v, not %v", ErrState, from, a.CurState)
	}
	to := from
	if mask&AttrState != 0 {
		to = a.State
	}
	if err := Legal(q.init.Type, from, to, mask); err != nil {
		return err
	}
	if err := a.checkValues(mask, lim); err != nil {
		return err
	}
	if to == StateReset {
		q.reset()
		return nil
	}
	q.assign(a, mask)
	if from != StateSQD && to == StateSQD {
		q.attr.EnSQDAsync = mask&AttrEnSQDAsync != 0 && a.EnSQDAsync
		q.req.drainAnnounced = false
	}
	switch {
	case to == StateErr:
		q.toError()
		return nil
	case to == StateRTR && from == StateInit:
		if q.tr.datagram { // no path, so no path MTU: what the port takes (IBA 9.8.3.1)
			q.attr.PathMTU, q.mtu = lim.MTU, uint32(lim.MTU.Bytes())
		}
		if q.tr.raw {
			q.mtu = math.MaxUint32 // whatever its length, a frame is one packet
		}
		q.resp.start()
	case to == StateRTS && from == StateRTR:
		q.req.start()
	}
	q.setState(to)
	if to == StateSQD {
		q.req.checkDrained()
	}
	return nil
}

// assign takes over the fields that mask names.
func (q *QP) assign(a *Attr, mask AttrMask) {
	d := &q.attr
	set := func(m AttrMask, f func()) {
		if mask&m != 0 {
			f()
		}
	}
	set(AttrEnSQDAsync, func() { d.EnSQDAsync = a.EnSQDAsync })
	set(AttrAccess, func() { d.Access = a.Access })
	set(AttrPKeyIndex, func() { d.PKeyIndex = a.PKeyIndex })
	set(AttrPort, func() { d.Port = a.Port })
	set(AttrQKey, func() { d.QKey = a.QKey })
	set(AttrAV, func() { d.Path = a.Path })
	set(AttrPathMTU, func() { d.PathMTU = a.PathMTU; q.mtu = uint32(a.PathMTU.Bytes()) })
	set(AttrTimeout, func() { d.Timeout = a.Timeout })
	set(AttrRetryCnt, func() { d.RetryCnt = a.RetryCnt; q.req.retries = a.RetryCnt })
	set(AttrRNRRetry, func() { d.RNRRetry = a.RNRRetry; q.req.rnrRetries = a.RNRRetry })
	set(AttrRQPSN, func() { d.RQPSN = a.RQPSN & wire.PSNMask })
	set(AttrSQPSN, func() { d.SQPSN = a.SQPSN & wire.PSNMask })
	set(AttrMaxRdAtomic, func() { d.MaxRdAtomic = a.MaxRdAtomic })
	set(AttrMaxDestRdAtomic, func() { d.MaxDestRdAtomic = a.MaxDestRdAtomic; q.resp.resize(int(a.MaxDestRdAtomic)) })
	set(AttrMinRNRTimer, func() { d.MinRNRTimer = a.MinRNRTimer })
	set(AttrDestQPN, func() { d.DestQPN = a.DestQPN })
	set(AttrRateLimit, func() { d.RateLimit = a.RateLimit })
}

// SetPath follows a change of the peer's link address: the neighbour's MAC moved.
func (q *QP) SetPath(mac [6]byte) { q.attr.Path.DstMAC = mac }

// Query gives the attributes now in force (ibv_query_qp(3)), with the PSNs the
// QP is at.
func (q *QP) Query() Attr {
	a := q.attr
	a.State = q.State()
	a.CurState = a.State
	a.SQDraining = a.State == StateSQD && !q.req.drainAnnounced
	if a.State >= StateRTR && a.State != StateErr {
		a.RQPSN = q.resp.epsn
	}
	if a.State >= StateRTS && a.State != StateErr {
		a.SQPSN = q.req.end
	}
	return a
}
