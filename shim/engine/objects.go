// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
import "C"

import (
	"context"
	"time"
	"unsafe"

	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// address is where a ring lies; 0 for none.
func address(r *qp.Ring) C.uint64_t {
	if r == nil {
		return 0
	}
	return C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(r.Memory()))))
}

func ctxOf(h C.tv_handle) *ectx { return object[*item](h).ctx.Load() }

//export tvQueryDevice
func tvQueryDevice(h C.tv_handle, o *C.struct_tv_device_attr) C.int {
	stackroom.Reserve()
	d := object[*ectx](h).dev.d
	a := d.Query()
	*o = C.struct_tv_device_attr{
		node_guid: C.uint64_t(a.NodeGUID), sys_image_guid: C.uint64_t(a.SysImageGUID),
		max_mr_size: C.uint64_t(a.MaxMRSize), page_size_cap: C.uint64_t(a.PageSizeCap),
		max_qp: C.int32_t(a.MaxQP), max_qp_wr: C.int32_t(a.MaxQPWR), max_sge: C.int32_t(a.MaxSGE),
		max_cq: C.int32_t(a.MaxCQ), max_cqe: C.int32_t(a.MaxCQE), max_mr: C.int32_t(a.MaxMR), max_mw: C.int32_t(a.MaxMW), max_pd: C.int32_t(a.MaxPD),
		max_qp_rd_atom: C.int32_t(a.MaxQPRdAtom), max_qp_init_rd_atom: C.int32_t(a.MaxQPInitRdAtom),
		atomic_cap: C.int32_t(a.AtomicCap), max_ah: C.int32_t(a.MaxAH),
		max_srq: C.int32_t(a.MaxSRQ), max_srq_wr: C.int32_t(a.MaxSRQWR), max_srq_sge: C.int32_t(a.MaxSRQSGE),
		max_mcast_grp: C.int32_t(a.MaxMcastGrp), max_mcast_qp_attach: C.int32_t(a.MaxMcastQPAttach),
		max_total_mcast_qp_attach: C.int32_t(a.MaxTotalMcastQPAttach),
		max_cq_mod_count:          C.int32_t(a.MaxCQModCount), max_cq_mod_us: C.int32_t(a.MaxCQModPeriod.Microseconds()),
		max_pkeys: C.int32_t(a.MaxPKeys), local_ca_ack_delay: C.int32_t(a.LocalCAAckDelay),
		phys_port_cnt: C.int32_t(a.PhysPortCnt),
	}
	o.max_dm_size = C.uint64_t(a.MaxDMSize)
	o.odp = 1 // nothing is pinned: absent pages come by userfaultfd, or by the kernel's own paging
	return 0
}

//export tvQueryPort
func tvQueryPort(h C.tv_handle, o *C.struct_tv_port_attr) C.int {
	stackroom.Reserve()
	a := object[*ectx](h).dev.d.QueryPort()
	*o = C.struct_tv_port_attr{
		state: C.int32_t(a.State), max_mtu: C.int32_t(a.MaxMTU), active_mtu: C.int32_t(a.ActiveMTU),
		gid_tbl_len: C.int32_t(a.GIDTblLen), pkey_tbl_len: C.int32_t(a.PKeyTblLen), max_msg_sz: C.uint64_t(a.MaxMsgSz),
		qkey_violations: C.int32_t(a.QKeyViolations),
	}
	return 0
}

//export tvQueryGID
func tvQueryGID(h C.tv_handle, index C.uint32_t, out *C.uint8_t) C.int {
	stackroom.Reserve()
	g, err := object[*ectx](h).dev.d.QueryGID(int(index))
	if err == nil {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(out)), len(g)), g[:])
	}
	return errno(err)
}

//export tvResolve
func tvResolve(h C.tv_handle, a *C.struct_tv_ah_attr, out *C.uint8_t) C.int {
	stackroom.Reserve()
	mac, err := object[*ectx](h).dev.d.ResolveMAC(context.Background(), ahAttr(a))
	if err == nil {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(out)), len(mac)), mac[:])
	}
	return errno(err)
}

//export tvQueryClock
func tvQueryClock(h C.tv_handle, out *C.uint64_t) C.int {
	stackroom.Reserve()
	*out = C.uint64_t(object[*ectx](h).dev.d.Now())
	return 0
}

//export tvAllocPD
func tvAllocPD(h C.tv_handle, out *C.tv_handle) C.int {
	stackroom.Reserve()
	c := object[*ectx](h)
	pd, err := c.dev.d.AllocPD()
	if err != nil {
		return errno(err)
	}
	*out = c.add(rankPD, pd, pd.Dealloc)
	return 0
}

//export tvRegMR
func tvRegMR(h C.tv_handle, r *C.struct_tv_reg) C.int {
	stackroom.Reserve()
	m, err := of[*provider.PD](h).Register(provider.MRAttr{Addr: uintptr(r.addr), Length: uint64(r.length),
		IOVA: uint64(r.iova), HaveIOVA: r.have_iova != 0, Access: mr.Access(r.access)})
	return entered(h, r, m, err)
}

//export tvReregMR
func tvReregMR(h C.tv_handle, what C.uint32_t, pd C.tv_handle, r *C.struct_tv_reg) C.int {
	stackroom.Reserve()
	if what > 0xff {
		return errno(provider.ErrInvalid)
	}
	it := object[*item](h)
	it.dirty.mu.Lock()
	defer it.dirty.mu.Unlock()
	m := it.obj.(*provider.MR)
	iova := m.IOVA()
	err := m.Reregister(mr.Rereg(what), of[*provider.PD](pd),
		provider.MRAttr{Addr: uintptr(r.addr), Length: uint64(r.length), Access: mr.Access(r.access)})
	if err == nil && (mr.Rereg(what)&mr.ChangeTranslation != 0 || m.IOVA() != iova) {
		it.dirty.left = nil // of addresses it had; all of what it has now counts as written
	}
	return errno(err)
}

//export tvAllocMW
func tvAllocMW(h C.tv_handle, typ C.uint32_t, out *C.tv_handle, rkey *C.uint32_t) C.int {
	stackroom.Reserve()
	if typ > 0xff {
		return errno(provider.ErrInvalid)
	}
	m, err := of[*provider.PD](h).AllocMW(mr.WindowType(typ))
	if err != nil {
		return errno(err)
	}
	*out, *rkey = ctxOf(h).add(rankMW, m, m.Dealloc), C.uint32_t(m.RKey())
	return 0
}

// ahAttr takes over an address vector.
func ahAttr(a *C.struct_tv_ah_attr) (o provider.AHAttr) {
	o = provider.AHAttr{SGIDIndex: int(a.sgid_index), HopLimit: uint8(a.hop_limit), TrafficClass: uint8(a.traffic_class),
		FlowLabel: uint32(a.flow_label), SL: uint8(a.sl), PortNum: uint8(a.port_num)}
	for i := range o.DGID {
		o.DGID[i] = byte(a.dgid[i])
	}
	return o
}

//export tvCreateAH
func tvCreateAH(h C.tv_handle, a *C.struct_tv_ah_attr, out *C.tv_handle) C.int {
	stackroom.Reserve()
	ah, err := of[*provider.PD](h).CreateAH(ahAttr(a))
	if err != nil {
		return errno(err)
	}
	a.number = C.uint32_t(ah.Index())
	*out = ctxOf(h).add(rankAH, ah, ah.Destroy)
	return 0
}

//export tvCreateCQ
func tvCreateCQ(h C.tv_handle, entries C.uint32_t, chh C.tv_handle, cookie C.tv_cookie, out *C.struct_tv_cq_info) C.int {
	stackroom.Reserve()
	c := object[*ectx](h)
	var pch *provider.CompChannel
	ch := of[*channel](chh)
	if ch != nil {
		pch = ch.ch
	}
	cq, err := c.dev.d.CreateCQ(int(entries), pch)
	if err != nil {
		return errno(err)
	}
	if ch != nil {
		ch.mu.Lock()
		ch.cqs[cq] = cookie
		ch.mu.Unlock()
	}
	c.own(cq, cookie)
	out.handle = c.add(rankCQ, cq, func() error {
		if err := cq.Destroy(); err != nil || ch == nil {
			return err
		}
		ch.mu.Lock()
		delete(ch.cqs, cq)
		ch.mu.Unlock()
		ch.events.drop(func(k *C.tv_cookie) bool { return *k == cookie })
		return nil
	})
	out.ring = address(cq.Ring())
	return 0
}

//export tvModifyCQ
func tvModifyCQ(h C.tv_handle, a *C.struct_tv_cq_attr) C.int {
	stackroom.Reserve()
	cq := of[*provider.CQ](h)
	if a.mask&C.TV_CQ_IGNORE_OVERRUN != 0 {
		cq.IgnoreOverrun()
	}
	if a.mask&C.TV_CQ_MODERATE != 0 {
		return errno(cq.Moderate(int(a.count), time.Duration(a.period_us)*time.Microsecond))
	}
	return 0
}

//export tvResizeCQ
func tvResizeCQ(h C.tv_handle, entries C.uint32_t, out *C.struct_tv_cq_info) C.int {
	stackroom.Reserve()
	cq := of[*provider.CQ](h)
	if err := cq.Resize(int(entries)); err != nil {
		return errno(err)
	}
	out.ring = address(cq.Ring())
	return 0
}

//export tvCreateSRQ
func tvCreateSRQ(h C.tv_handle, cookie C.tv_cookie, s *C.struct_tv_srq_attr) C.int {
	stackroom.Reserve()
	c := ctxOf(h)
	a := provider.SRQAttr{MaxWR: int(s.max_wr), MaxSGE: int(s.max_sge)}
	var srq *provider.SRQ
	var err error
	if s.xrcd != 0 {
		srq, err = of[*provider.PD](h).CreateXRCSRQ(a, of[*provider.XRCD](s.xrcd), of[*provider.CQ](s.cq))
	} else {
		srq, err = of[*provider.PD](h).CreateSRQ(a)
	}
	if err != nil {
		return errno(err)
	}
	if s.xrcd != 0 {
		num, _ := srq.Num()
		s.num = C.uint32_t(num)
	}
	c.own(srq, cookie)
	s.handle = c.add(rankSRQ, srq, srq.Destroy)
	s.ring = address(srq.Ring())
	return querySRQ(srq, s)
}

//export tvModifySRQ
func tvModifySRQ(h C.tv_handle, s *C.struct_tv_srq_attr, mask C.uint32_t) C.int {
	stackroom.Reserve()
	srq := of[*provider.SRQ](h)
	err := srq.Modify(provider.SRQAttr{MaxWR: int(s.max_wr), Limit: int(s.limit)}, provider.SRQAttrMask(mask))
	s.ring = address(srq.Ring())
	return errno(err)
}

//export tvQuerySRQ
func tvQuerySRQ(h C.tv_handle, s *C.struct_tv_srq_attr) C.int {
	stackroom.Reserve()
	return querySRQ(of[*provider.SRQ](h), s)
}

func querySRQ(srq *provider.SRQ, s *C.struct_tv_srq_attr) C.int {
	a, err := srq.Query()
	s.max_wr, s.max_sge, s.limit = C.uint32_t(a.MaxWR), C.uint32_t(a.MaxSGE), C.uint32_t(a.Limit)
	return errno(err)
}

//export tvCreateQP
func tvCreateQP(h C.tv_handle, in *C.struct_tv_qp_init) C.int {
	stackroom.Reserve()
	if in._type > 255 {
		return errno(provider.ErrInvalid)
	}
	attr := provider.QPInitAttr{
		Type: qp.Type(in._type), SendCQ: of[*provider.CQ](in.send_cq), RecvCQ: of[*provider.CQ](in.recv_cq),
		SRQ: of[*provider.SRQ](in.srq), SQSigAll: in.sig_all != 0,
		Caps: qp.Caps{SendWR: int(in.caps.send_wr), RecvWR: int(in.caps.recv_wr), SendSGE: int(in.caps.send_sge),
			RecvSGE: int(in.caps.recv_sge), Inline: int(in.caps.inline_data)},
	}
	var q *provider.QP
	var err error
	if attr.Type == qp.TypeXRCRecv {
		q, err = of[*provider.XRCD](h).CreateQP(attr)
	} else {
		q, err = of[*provider.PD](h).CreateQP(attr)
	}
	if err != nil {
		return errno(err)
	}
	ctxOf(h).addQP(q, in)
	return 0
}

// addQP enters a new QP and fills in what the library is told of it.
func (c *ectx) addQP(q *provider.QP, in *C.struct_tv_qp_init) {
	c.own(q, in.cookie)
	in.handle = c.add(rankQP, q, q.Destroy)
	k := q.Caps()
	in.caps = C.struct_tv_caps{send_wr: C.uint32_t(k.SendWR), recv_wr: C.uint32_t(k.RecvWR), send_sge: C.uint32_t(k.SendSGE),
		recv_sge: C.uint32_t(k.RecvSGE), inline_data: C.uint32_t(k.Inline)}
	in.num, in.send_ops = C.uint32_t(q.Num()), C.uint32_t(q.SendOps())
	send, recv := q.Rings()
	in.send_ring, in.recv_ring = address(send), address(recv)
	page, bell := q.Doorbell()
	in.bells, in.bell = C.uint64_t(uintptr(page)), C.uint32_t(bell)
}

//export tvModifyQP
func tvModifyQP(h C.tv_handle, a *C.struct_tv_qp_attr, mask C.uint32_t) C.int {
	stackroom.Reserve()
	o := provider.QPAttr{AH: ahAttr(&a.ah)}
	o.State, o.CurState, o.PathMTU = qp.State(a.state), qp.State(a.cur_state), qp.MTU(a.path_mtu)
	o.QKey, o.DestQPN, o.Access, o.RateLimit = uint32(a.qkey), asQPN(a.dest_qpn), mr.Access(a.access), uint32(a.rate_limit)
	o.RQPSN, o.SQPSN = asPSN(a.rq_psn), asPSN(a.sq_psn)
	o.PKeyIndex, o.Port, o.EnSQDAsync = uint16(a.pkey_index), uint8(a.port), a.en_sqd_async != 0
	o.MaxRdAtomic, o.MaxDestRdAtomic, o.MinRNRTimer = uint8(a.max_rd_atomic), uint8(a.max_dest_rd_atomic), uint8(a.min_rnr_timer)
	o.Timeout, o.RetryCnt, o.RNRRetry = uint8(a.timeout), uint8(a.retry_cnt), uint8(a.rnr_retry)
	return errno(of[*provider.QP](h).Modify(o, qp.AttrMask(mask)))
}

//export tvQueryQP
func tvQueryQP(h C.tv_handle, o *C.struct_tv_qp_attr) C.int {
	stackroom.Reserve()
	a, _, err := of[*provider.QP](h).Query()
	if err != nil {
		return errno(err)
	}
	*o = C.struct_tv_qp_attr{
		state: C.uint32_t(a.State), cur_state: C.uint32_t(a.CurState), path_mtu: C.uint32_t(a.PathMTU),
		qkey: C.uint32_t(a.QKey), rq_psn: C.uint32_t(a.RQPSN), sq_psn: C.uint32_t(a.SQPSN), dest_qpn: C.uint32_t(a.DestQPN),
		access: C.uint32_t(a.Access), rate_limit: C.uint32_t(a.RateLimit),
		pkey_index: C.uint16_t(a.PKeyIndex), port: C.uint8_t(a.Port),
		max_rd_atomic: C.uint8_t(a.MaxRdAtomic), max_dest_rd_atomic: C.uint8_t(a.MaxDestRdAtomic),
		min_rnr_timer: C.uint8_t(a.MinRNRTimer), timeout: C.uint8_t(a.Timeout),
		retry_cnt: C.uint8_t(a.RetryCnt), rnr_retry: C.uint8_t(a.RNRRetry),
	}
	if a.EnSQDAsync {
		o.en_sqd_async = 1
	}
	if a.SQDraining {
		o.sq_draining = 1
	}
	o.ah = C.struct_tv_ah_attr{flow_label: C.uint32_t(a.AH.FlowLabel), sgid_index: C.uint8_t(a.AH.SGIDIndex),
		hop_limit: C.uint8_t(a.AH.HopLimit), traffic_class: C.uint8_t(a.AH.TrafficClass), sl: C.uint8_t(a.AH.SL), port_num: 1}
	for i, b := range a.AH.DGID {
		o.ah.dgid[i] = C.uint8_t(b)
	}
	return 0
}

//export tvMcast
func tvMcast(h C.tv_handle, gid *C.uint8_t, attach C.int32_t) C.int {
	stackroom.Reserve()
	var g provider.GID
	copy(g[:], unsafe.Slice((*byte)(unsafe.Pointer(gid)), len(g)))
	q := of[*provider.QP](h)
	if attach != 0 {
		return errno(q.AttachMcast(g))
	}
	return errno(q.DetachMcast(g))
}

//export tvKick
func tvKick(h C.tv_handle) {
	stackroom.Reserve()
	of[*provider.QP](h).Kick()
}

//export tvProgress
func tvProgress(h C.tv_handle, rest C.int32_t) {
	stackroom.Reserve()
	of[*provider.CQ](h).Progress(rest != 0)
}

//export tvRest
func tvRest(h C.tv_handle) {
	stackroom.Reserve()
	object[*ectx](h).dev.d.Rest()
}
