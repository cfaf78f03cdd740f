// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"errors"
	"fmt"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// Errors of Modify. They stand for EINVAL in the C library.
var (
	// ErrTransition: the state table has no such transition for this service.
	ErrTransition = errors.New("no such QP state transition")
	// ErrAttrMask: an attribute that the transition needs is missing, or one
	// that it does not allow is given.
	ErrAttrMask = errors.New("attribute mask does not fit the transition")
	// ErrAttrValue: an attribute's value is out of range.
	ErrAttrValue = errors.New("attribute value out of range")
)

// AttrMask says which fields of an Attr are meant, with the values of enum
// ibv_qp_attr_mask.
type AttrMask uint32

// Attribute masks (ibv_modify_qp(3)).
const (
	AttrState           AttrMask = 1 << 0
	AttrCurState        AttrMask = 1 << 1
	AttrEnSQDAsync      AttrMask = 1 << 2
	AttrAccess          AttrMask = 1 << 3
	AttrPKeyIndex       AttrMask = 1 << 4
	AttrPort            AttrMask = 1 << 5
	AttrQKey            AttrMask = 1 << 6
	AttrAV              AttrMask = 1 << 7
	AttrPathMTU         AttrMask = 1 << 8
	AttrTimeout         AttrMask = 1 << 9
	AttrRetryCnt        AttrMask = 1 << 10
	AttrRNRRetry        AttrMask = 1 << 11
	AttrRQPSN           AttrMask = 1 << 12
	AttrMaxRdAtomic     AttrMask = 1 << 13
	AttrAltPath         AttrMask = 1 << 14
	AttrMinRNRTimer     AttrMask = 1 << 15
	AttrSQPSN           AttrMask = 1 << 16
	AttrMaxDestRdAtomic AttrMask = 1 << 17
	AttrPathMigState    AttrMask = 1 << 18
	AttrCap             AttrMask = 1 << 19
	AttrDestQPN         AttrMask = 1 << 20
	AttrRateLimit       AttrMask = 1 << 25
)

var attrNames = map[AttrMask]string{
	AttrState: "STATE", AttrCurState: "CUR_STATE", AttrEnSQDAsync: "EN_SQD_ASYNC_NOTIFY", AttrAccess: "ACCESS_FLAGS",
	AttrPKeyIndex: "PKEY_INDEX", AttrPort: "PORT", AttrQKey: "QKEY", AttrAV: "AV", AttrPathMTU: "PATH_MTU",
	AttrTimeout: "TIMEOUT", AttrRetryCnt: "RETRY_CNT", AttrRNRRetry: "RNR_RETRY", AttrRQPSN: "RQ_PSN",
	AttrMaxRdAtomic: "MAX_QP_RD_ATOMIC", AttrAltPath: "ALT_PATH", AttrMinRNRTimer: "MIN_RNR_TIMER",
	AttrSQPSN: "SQ_PSN", AttrMaxDestRdAtomic: "MAX_DEST_RD_ATOMIC", AttrPathMigState: "PATH_MIG_STATE",
	AttrCap: "CAP", AttrDestQPN: "DEST_QPN", AttrRateLimit: "RATE_LIMIT",
}

// String lists the masks by their names in ibv_modify_qp(3), without IBV_QP_.
func (m AttrMask) String() string {
	if m == 0 {
		return "none"
	}
	s := ""
	for b := AttrMask(1); b != 0 && b <= m; b <<= 1 {
		if m&b == 0 {
			continue
		}
		if s != "" {
			s += "|"
		}
		if n, ok := attrNames[b]; ok {
			s += n
		} else {
			s += fmt.Sprintf("%#x", uint32(b))
		}
	}
	return s
}

// Attr holds a QP's attributes (struct ibv_qp_attr). The path itself (address
// vector) is resolved by the device and given as Path.
type Attr struct {
	State, CurState State
	PathMTU         MTU
	QKey            uint32
	RQPSN, SQPSN    wire.PSN
	DestQPN         wire.QPN
	Access          mr.Access
	PKeyIndex       uint16
	Port            uint8
	EnSQDAsync      bool
	// MaxRdAtomic is how many READs and atomics may be outstanding as
	// requester, MaxDestRdAtomic as responder.
	MaxRdAtomic, MaxDestRdAtomic uint8
	// MinRNRTimer is the RNR timer code (0..31) sent in RNR NAKs; IBA table 45.
	MinRNRTimer uint8
	// Timeout is the local ACK timeout: 4.096 µs * 2^Timeout, 0 for none.
	Timeout uint8
	// RetryCnt (0..7) bounds retries after timeouts and sequence NAKs;
	// RNRRetry (0..7) those after RNR NAKs, 7 is for ever.
	RetryCnt, RNRRetry uint8
	// Path is the resolved path to the peer; see AttrAV.
	Path wire.Path
	// RateLimit is in kbit/s; 0 is none.
	RateLimit uint32
	// SQDraining, of Query only: in SQD, and what had been started is not over yet.
	SQDraining bool
}

// svc is a set of transport services, for the transition table.
type svc uint8

const (
	svcRC svc = 1 << iota
	svcUC
	svcUD
	svcXRCSend
	svcXRCRecv
	svcRaw
	svcRel  = svcRC | svcXRCSend // those that READs, atomics and invalidations start from
	svcConn = svcRC | svcUC | svcXRCSend | svcXRCRecv
	svcAll  = svcConn | svcUD // but RAW_PACKET, whose rows are few
)

func (t Type) svc() svc {
	switch t {
	case TypeRC:
		return svcRC
	case TypeUC:
		return svcUC
	case TypeUD:
		return svcUD
	case TypeRaw:
		return svcRaw
	case TypeXRCSend:
		return svcXRCSend
	case TypeXRCRecv:
		return svcXRCRecv
	}
	return 0
}

// transition is a row of the table of IBA 10.3.1: what a move from one state to
// another needs and allows for some services.
type transition struct {
	from, to State
	svc      svc
	req, opt AttrMask
}

// transitions holds what ibv_modify_qp(3) and IBA tables 91-94 say. Moves to
// RESET and ERR from anywhere are added in legal.
var transitions = [...]transition{
	{StateReset, StateInit, svcConn, AttrPKeyIndex | AttrPort | AttrAccess, 0},
	{StateReset, StateInit, svcUD, AttrPKeyIndex | AttrPort | AttrQKey, 0},
	{StateInit, StateInit, svcConn, 0, AttrPKeyIndex | AttrPort | AttrAccess},
	{StateInit, StateInit, svcUD, 0, AttrPKeyIndex | AttrPort | AttrQKey},
	{StateInit, StateRTR, svcRC | svcXRCRecv,
		AttrAV | AttrPathMTU | AttrDestQPN | AttrRQPSN | AttrMaxDestRdAtomic | AttrMinRNRTimer,
		AttrAltPath | AttrAccess | AttrPKeyIndex},
	{StateInit, StateRTR, svcUC | svcXRCSend, AttrAV | AttrPathMTU | AttrDestQPN | AttrRQPSN,
		AttrAltPath | AttrAccess | AttrPKeyIndex},
	{StateInit, StateRTR, svcUD, 0, AttrPKeyIndex | AttrQKey},
	{StateRTR, StateRTS, svcRC,
		AttrTimeout | AttrRetryCnt | AttrRNRRetry | AttrSQPSN | AttrMaxRdAtomic,
		AttrCurState | AttrAltPath | AttrAccess | AttrMinRNRTimer | AttrPathMigState | AttrRateLimit},
	{StateRTR, StateRTS, svcXRCSend,
		AttrTimeout | AttrRetryCnt | AttrRNRRetry | AttrSQPSN | AttrMaxRdAtomic,
		AttrCurState | AttrAltPath | AttrAccess | AttrPathMigState | AttrRateLimit},
	{StateRTR, StateRTS, svcXRCRecv, AttrTimeout | AttrSQPSN,
		AttrCurState | AttrAltPath | AttrAccess | AttrMinRNRTimer | AttrPathMigState | AttrRateLimit},
	{StateRTR, StateRTS, svcUC, AttrSQPSN, AttrCurState | AttrAltPath | AttrAccess | AttrPathMigState | AttrRateLimit},
	{StateRTR, StateRTS, svcUD, AttrSQPSN, AttrCurState | AttrQKey | AttrRateLimit},
	{StateRTS, StateRTS, svcRC | svcXRCRecv, 0,
		AttrCurState | AttrAccess | AttrMinRNRTimer | AttrAltPath | AttrPathMigState | AttrRateLimit},
	{StateRTS, StateRTS, svcUC | svcXRCSend, 0, AttrCurState | AttrAccess | AttrAltPath | AttrPathMigState | AttrRateLimit},
	{StateRTS, StateRTS, svcUD, 0, AttrCurState | AttrQKey | AttrRateLimit},
	{StateRTS, StateSQD, svcAll, 0, AttrEnSQDAsync},
	{StateSQD, StateRTS, svcRC | svcXRCRecv, 0,
		AttrCurState | AttrAltPath | AttrAccess | AttrMinRNRTimer | AttrPathMigState | AttrRateLimit},
	{StateSQD, StateRTS, svcUC | svcXRCSend, 0, AttrCurState | AttrAltPath | AttrAccess | AttrPathMigState | AttrRateLimit},
	{StateSQD, StateRTS, svcUD, 0, AttrCurState | AttrQKey | AttrRateLimit},
	{StateSQD, StateSQD, svcRC, 0,
		AttrAV | AttrTimeout | AttrRetryCnt | AttrRNRRetry | AttrMaxRdAtomic | AttrMaxDestRdAtomic |
			AttrAltPath | AttrAccess | AttrPKeyIndex | AttrMinRNRTimer | AttrPathMigState | AttrRateLimit},
	{StateSQD, StateSQD, svcXRCSend, 0,
		AttrAV | AttrTimeout | AttrRetryCnt | AttrRNRRetry | AttrMaxRdAtomic |
			AttrAltPath | AttrAccess | AttrPKeyIndex | AttrPathMigState},
	{StateSQD, StateSQD, svcXRCRecv, 0,
		AttrAV | AttrTimeout | AttrMaxDestRdAtomic | AttrAltPath | AttrAccess | AttrPKeyIndex |
			AttrMinRNRTimer | AttrPathMigState},
	{StateSQD, StateSQD, svcUC, 0, AttrAV | AttrAltPath | AttrAccess | AttrPKeyIndex | AttrPathMigState},
	{StateSQD, StateSQD, svcUD, 0, AttrPKeyIndex | AttrQKey},
	{StateSQE, StateRTS, svcUC, 0, AttrCurState | AttrAccess},
	{StateSQE, StateRTS, svcUD, 0, AttrCurState | AttrQKey},
	// RAW_PACKET has next to no attributes; these are the kernel's rows (ib_modify_qp_is_ok).
	{StateReset, StateInit, svcRaw, AttrPort, 0},
	{StateInit, StateInit, svcRaw, 0, 0},
	{StateInit, StateRTR, svcRaw, 0, 0},
	{StateRTR, StateRTS, svcRaw, 0, AttrRateLimit},
	{StateRTS, StateRTS, svcRaw, 0, AttrRateLimit},
	{StateRTS, StateSQD, svcRaw, 0, 0},
	{StateSQD, StateSQD, svcRaw, 0, 0},
	{StateSQD, StateRTS, svcRaw, 0, 0},
	{StateSQE, StateRTS, svcRaw, 0, 0},
}

// Legal says whether a QP of type t may go from one state to another with the
// attributes in mask (AttrState itself is understood). The error wraps
// ErrTransition or ErrAttrMask and names what is wrong (IBA 10.3.1,
// ibv_modify_qp(3)).
func Legal(t Type, from, to State, mask AttrMask) error {
	if to >= numStates || from >= numStates || t.svc() == 0 {
		return fmt.Errorf("%w: %v %v to %v", ErrTransition, t, from, to)
	}
	req, opt := AttrMask(0), AttrMask(0)
	found := to == StateReset || to == StateErr && from != StateReset
	if found {
		opt = AttrCurState
	} else {
		for i := range transitions {
			if r := &transitions[i]; r.from == from && r.to == to && r.svc&t.svc() != 0 {
				req, opt, found = r.req, r.opt, true
				break
			}
		}
	}
	if !found {
		return fmt.Errorf("%w: %v %v to %v", ErrTransition, t, from, to)
	}
	mask &^= AttrState
	if miss := req &^ mask; miss != 0 {
		return fmt.Errorf("%w: %v %v to %v needs %v", ErrAttrMask, t, from, to, miss)
	}
	if extra := mask &^ (req | opt); extra != 0 {
		return fmt.Errorf("%w: %v %v to %v does not take %v", ErrAttrMask, t, from, to, extra)
	}
	return nil
}

// checkValues refuses attribute values outside the ranges of ibv_modify_qp(3).
func (a *Attr) checkValues(mask AttrMask, lim Limits) error {
	bad := func(cond bool, m AttrMask, what string, v any) error {
		if mask&m != 0 && cond {
			return fmt.Errorf("%w: %s %v", ErrAttrValue, what, v)
		}
		return nil
	}
	return errors.Join(
		bad(a.Port != 1, AttrPort, "port", a.Port),
		bad(a.PKeyIndex != 0, AttrPKeyIndex, "pkey_index", a.PKeyIndex),
		bad(a.PathMTU.Bytes() == 0 || a.PathMTU > lim.MTU, AttrPathMTU, "path_mtu", a.PathMTU.Bytes()),
		bad(a.DestQPN > wire.QPNMask, AttrDestQPN, "dest_qp_num", uint32(a.DestQPN)),
		bad(a.MinRNRTimer > 31, AttrMinRNRTimer, "min_rnr_timer", a.MinRNRTimer),
		bad(a.Timeout > 31, AttrTimeout, "timeout", a.Timeout),
		bad(a.RetryCnt > 7, AttrRetryCnt, "retry_cnt", a.RetryCnt),
		bad(a.RNRRetry > 7, AttrRNRRetry, "rnr_retry", a.RNRRetry),
		bad(int(a.MaxRdAtomic) > lim.MaxRdAtomic, AttrMaxRdAtomic, "max_rd_atomic", a.MaxRdAtomic),
		bad(int(a.MaxDestRdAtomic) > lim.MaxRdAtomic, AttrMaxDestRdAtomic, "max_dest_rd_atomic", a.MaxDestRdAtomic),
	)
}

// Limits bounds attribute values by what the device offers.
type Limits struct {
	// MTU is the port's active MTU.
	MTU MTU
	// MaxRdAtomic is max_qp_rd_atom of the device.
	MaxRdAtomic int
}
