// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// Work requests about keys: binding a memory window, invalidating a key. They send
// nothing and have no PSN. Each is executed at its turn, when all before it have been
// sent, so that what is posted later finds the key as it left it; with the fence, READs
// and atomics before it are over, too (IBA 10.8.3.3). It completes in its order.

// Bind is what a work request WRBindMW asks for (IBA 11.4.1.1).
type Bind struct {
	// RKey is the window's new key: it differs from the old one in the low 8 bits.
	RKey mr.Key
	// LKey is the key of the region; it is not looked at when Length is 0, which
	// unbinds a window of type 1.
	LKey mr.Key
	// Addr and Length are the range in the region, in bytes.
	Addr, Length uint64
	// Access is remote rights, and mr.ZeroBased.
	Access mr.Access
}

// putManaged fills in a slot for a work request about keys. A bind goes into the fields
// that other operations have for their like: RKey, RemoteAddr; the region's key is in
// ImmOrKey, the length in CompareAdd, the rights in Swap.
func putManaged(wr *SendWR, w *SendWQE) error {
	w.Flags &^= SendInline
	if wr.Opcode == WRLocalInv {
		w.ImmOrKey = uint32(wr.InvKey)
		return nil
	}
	b := &wr.Bind
	w.RKey, w.ImmOrKey, w.RemoteAddr, w.CompareAdd, w.Swap = b.RKey, uint32(b.LKey), b.Addr, b.Length, uint64(b.Access)
	return nil
}

// manage executes the work request at cur and moves on; false: it failed, which is
// noted. One that was executed before is passed by, when the requester has gone back.
func (r *requester) manage(w *SendWQE, s *sendState) bool {
	q := r.q
	if !s.started {
		q.env.Mem.Leave() // who holds the table may wait for sections
		var err error
		if w.Opcode == WRBindMW {
			err = q.env.Keys.Bind(&mr.BindAttr{Key: w.RKey, PD: q.init.PD, QP: uint32(q.init.Num),
				Region: mr.Key(w.ImmOrKey), Addr: w.RemoteAddr, Length: w.CompareAdd, Access: mr.Access(w.Swap)})
		} else {
			err = q.env.Keys.Invalidate(mr.Key(w.ImmOrKey), q.init.PD, uint32(q.init.Num))
		}
		if err != nil {
			s.fail = WCMWBindErr // IBA 11.6.2: memory management operation error
			return false
		}
		*s = sendState{started: true, first: r.end, last: r.end.Add(wire.PSNMask)}
	}
	if r.cur == r.head {
		r.retire(w)
	} else {
		r.cur++
	}
	return true
}

// retireManaged completes those that were executed and are the oldest now.
func (r *requester) retireManaged() {
	for r.head != r.q.sq.prod().Load() {
		w, s := r.q.sq.sendWQE(r.head), r.at(r.head)
		if !s.started || s.fail != WCSuccess || wrOps[w.Opcode].kind != wire.KindNone {
			return
		}
		r.q.finishSend(w, WCSuccess, r.drop)
	}
}

// keyCheck asks whether a request that came to the QP may do what needs these rights to
// n bytes at iova; errors as of mr.Table.CheckRemote.
func (q *QP) keyCheck(pd mr.PD, k mr.Key, iova, n uint64, need mr.Access) (*mr.Region, error) {
	return q.env.Keys.CheckRemote(k, pd, uint32(q.init.Num), iova, n, need)
}
