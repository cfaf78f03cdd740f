// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"errors"
	"testing"
)

// manTable is the table of the ibv_modify_qp(3) man page for RC, UC and UD: what
// each forward transition needs.
var manTable = []struct {
	t        Type
	from, to State
	req      AttrMask
}{
	{TypeUD, StateReset, StateInit, AttrPKeyIndex | AttrPort | AttrQKey},
	{TypeUD, StateInit, StateRTR, 0},
	{TypeUD, StateRTR, StateRTS, AttrSQPSN},
	{TypeUC, StateReset, StateInit, AttrPKeyIndex | AttrPort | AttrAccess},
	{TypeUC, StateInit, StateRTR, AttrAV | AttrPathMTU | AttrDestQPN | AttrRQPSN},
	{TypeUC, StateRTR, StateRTS, AttrSQPSN},
	{TypeRC, StateReset, StateInit, AttrPKeyIndex | AttrPort | AttrAccess},
	{TypeRC, StateInit, StateRTR, AttrAV | AttrPathMTU | AttrDestQPN | AttrRQPSN | AttrMaxDestRdAtomic | AttrMinRNRTimer},
	{TypeRC, StateRTR, StateRTS, AttrSQPSN | AttrMaxRdAtomic | AttrRetryCnt | AttrRNRRetry | AttrTimeout},
	{TypeRC, StateRTS, StateSQD, 0},
	{TypeRC, StateSQD, StateRTS, 0},
	{TypeUD, StateSQE, StateRTS, 0},
	{TypeUC, StateSQE, StateRTS, 0},
	// XRC is not in the man page; this is what kernel drivers are given to check with.
	{TypeXRCSend, StateReset, StateInit, AttrPKeyIndex | AttrPort | AttrAccess},
	{TypeXRCSend, StateInit, StateRTR, AttrAV | AttrPathMTU | AttrDestQPN | AttrRQPSN},
	{TypeXRCSend, StateRTR, StateRTS, AttrSQPSN | AttrMaxRdAtomic | AttrRetryCnt | AttrRNRRetry | AttrTimeout},
	{TypeXRCSend, StateRTS, StateSQD, 0},
	{TypeXRCSend, StateSQD, StateRTS, 0},
	{TypeXRCRecv, StateReset, StateInit, AttrPKeyIndex | AttrPort | AttrAccess},
	{TypeXRCRecv, StateInit, StateRTR, AttrAV | AttrPathMTU | AttrDestQPN | AttrRQPSN | AttrMaxDestRdAtomic | AttrMinRNRTimer},
	{TypeXRCRecv, StateRTR, StateRTS, AttrSQPSN | AttrTimeout},
	{TypeXRCRecv, StateRTS, StateSQD, 0},
	{TypeXRCRecv, StateSQD, StateRTS, 0},
	{TypeRC, StateInit, StateInit, 0},
	{TypeRC, StateRTS, StateRTS, 0},
	{TypeRC, StateSQD, StateSQD, 0},
}

// TestTransitions: what the man page lists is legal with exactly what it needs,
// and each needed attribute is missed. Everything else but RESET and ERR is not.
func TestTransitions(t *testing.T) {
	type move struct {
		t        Type
		from, to State
	}
	legal := map[move]bool{}
	for _, m := range manTable {
		legal[move{m.t, m.from, m.to}] = true
		if err := Legal(m.t, m.from, m.to, AttrState|m.req); err != nil {
			t.Errorf("%v %v to %v: %v", m.t, m.from, m.to, err)
		}
		for b := AttrMask(1); b <= m.req; b <<= 1 {
			if m.req&b == 0 {
				continue
			}
			if err := Legal(m.t, m.from, m.to, AttrState|m.req&^b); !errors.Is(err, ErrAttrMask) {
				t.Errorf("%v %v to %v without %v: %v", m.t, m.from, m.to, b, err)
			}
		}
		if err := Legal(m.t, m.from, m.to, AttrState|m.req|AttrCap); !errors.Is(err, ErrAttrMask) {
			t.Errorf("%v %v to %v with CAP: %v", m.t, m.from, m.to, err)
		}
	}
	for from := StateReset; from < numStates; from++ {
		for to := StateReset; to < numStates; to++ {
			err := Legal(TypeRC, from, to, AttrState|AttrPKeyIndex)
			switch {
			case to == StateReset || to == StateErr && from != StateReset:
				if err := Legal(TypeRC, from, to, AttrState); err != nil {
					t.Errorf("%v to %v: %v", from, to, err)
				}
			case !legal[move{TypeRC, from, to}] && !errors.Is(err, ErrTransition):
				t.Errorf("%v to %v: %v", from, to, err)
			}
		}
	}
	if err := Legal(Type(77), StateReset, StateInit, AttrState); !errors.Is(err, ErrTransition) {
		t.Error(err)
	}
}

// TestXRCAttributes: attributes of the side that an end of XRC lacks are refused.
func TestXRCAttributes(t *testing.T) {
	for _, c := range []struct {
		t        Type
		from, to State
		mask     AttrMask
		ok       bool
	}{
		{TypeXRCSend, StateRTS, StateRTS, AttrAccess, true},
		{TypeXRCSend, StateRTS, StateRTS, AttrMinRNRTimer, false},
		{TypeXRCRecv, StateRTS, StateRTS, AttrMinRNRTimer, true},
		{TypeXRCSend, StateSQD, StateSQD, AttrRetryCnt | AttrRNRRetry | AttrMaxRdAtomic, true},
		{TypeXRCSend, StateSQD, StateSQD, AttrMaxDestRdAtomic, false},
		{TypeXRCRecv, StateSQD, StateSQD, AttrMaxDestRdAtomic | AttrMinRNRTimer, true},
		{TypeXRCRecv, StateSQD, StateSQD, AttrMaxRdAtomic, false},
		{TypeXRCRecv, StateSQD, StateSQD, AttrRetryCnt, false},
	} {
		if err := Legal(c.t, c.from, c.to, AttrState|c.mask); (err == nil) != c.ok {
			t.Errorf("%v %v to %v with %v: %v", c.t, c.from, c.to, c.mask, err)
		}
	}
	mask := AttrSQPSN | AttrMaxRdAtomic | AttrRetryCnt | AttrRNRRetry | AttrTimeout
	if err := Legal(TypeXRCSend, StateRTR, StateRTS, AttrState|mask|AttrMinRNRTimer); !errors.Is(err, ErrAttrMask) {
		t.Errorf("an initiator takes an RNR timer: %v", err)
	}
}

// TestModifyKeepsOnError: a refused Modify changes nothing.
func TestModifyKeepsOnError(t *testing.T) {
	w := newWorld(t, usual())
	q := w.a.qp
	before := q.Query()
	for _, c := range []struct {
		a    Attr
		mask AttrMask
		want error
	}{
		{Attr{State: StateInit}, AttrState, ErrTransition},
		{Attr{State: StateRTS, MinRNRTimer: 32}, AttrState | AttrMinRNRTimer, ErrAttrValue},
		{Attr{State: StateRTS, Timeout: 3}, AttrState | AttrTimeout, ErrAttrMask},
		{Attr{State: StateRTS, CurState: StateSQD}, AttrState | AttrCurState, ErrState},
	} {
		if err := q.Modify(&c.a, c.mask, testLimits); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.a, err, c.want)
		}
		if q.Query() != before {
			t.Errorf("%+v changed the QP", c.a)
		}
	}
}

// TestRateLimit: a QP keeps to its rate.
func TestRateLimit(t *testing.T) {
	w := newWorld(t, usual())
	const kbps = 100_000
	w.a.modify(Attr{State: StateRTS, RateLimit: kbps}, AttrState|AttrRateLimit)
	const size = 1 << 20
	w.a.post(w.a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: w.a.sgl(0, size), Flags: SendSignaled}, 0))
	w.run()
	w.a.want(WC{ID: 1, Opcode: WCRDMAWrite})
	ns := int64(size) * 8_000_000 / kbps
	if w.now < ns || w.now > ns*12/10 {
		t.Fatalf("%d bytes at %d kbit/s took %d ns, %d are right", size, kbps, w.now, ns)
	}
	if w.a.env.Stats.RetransmittedPkts.Load() != 0 {
		t.Fatal("retransmission")
	}
}
