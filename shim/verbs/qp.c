/* SPDX-License-Identifier: Apache-2.0
 *
 * Queue pairs and shared receive queues. */
#include <stdlib.h>

#include "tv.h"

/* xrcd and cq are of an SRQ for XRC; else NULL. */
static struct ibv_srq *create_srq(struct ibv_pd *ibpd, struct ibv_srq_attr *a, void *user, struct ibv_xrcd *xrcd,
				  struct ibv_cq *cq)
{
	struct tv_srq *srq;
	struct tv_srq_attr t = { .max_wr = a->max_wr, .max_sge = a->max_sge,
				 .xrcd = xrcd ? ((struct tv_xrcd *)xrcd)->handle : 0,
				 .cq = cq ? ((struct tv_cq *)cq)->handle : 0 };
	bool custom;
	int rc;

	TV_THERE(ibpd->context, NULL);
	srq = tv_object(ibpd, sizeof(*srq), TV_RESOURCE_SRQ, &custom);
	if (!srq)
		return NULL;
	srq->custom = custom;
	rc = tv_e->create_srq(((struct tv_pd *)ibpd)->handle, (uintptr_t)srq, &t);
	if (rc) {
		tv_object_free(ibpd, srq, TV_RESOURCE_SRQ, custom);
		return tv_null(rc);
	}
	srq->handle = t.handle;
	srq->num = t.num;
	tv_ring_set(&srq->rq.ring, t.ring);
	srq->rq.max_sge = t.max_sge;
	tv_lock_init(&srq->rq.lock, tv_alone(ibpd));
	srq->ibv.context = ibpd->context;
	srq->ibv.srq_context = user;
	srq->ibv.pd = ibpd;
	srq->ibv.handle = t.handle;
	pthread_mutex_init(&srq->ibv.mutex, NULL);
	pthread_cond_init(&srq->ibv.cond, NULL);
	a->max_wr = t.max_wr;
	a->max_sge = t.max_sge;
	return &srq->ibv;
}

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *a)
{
	return create_srq(pd, &a->attr, a->srq_context, NULL, NULL);
}

struct ibv_srq *tv_create_srq_ex(struct ibv_context *ctx, struct ibv_srq_init_attr_ex *a)
{
	const uint32_t of_xrc = IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
	enum ibv_srq_type type = a->comp_mask & IBV_SRQ_INIT_ATTR_TYPE ? a->srq_type : IBV_SRQT_BASIC;

	(void)ctx;
	if (type != IBV_SRQT_BASIC && type != IBV_SRQT_XRC)
		return tv_null(EOPNOTSUPP);
	if (a->comp_mask & ~(IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | of_xrc))
		return tv_null(EOPNOTSUPP);
	if (!(a->comp_mask & IBV_SRQ_INIT_ATTR_PD) || !a->pd)
		return tv_null(EINVAL);
	if (type == IBV_SRQT_BASIC)
		return create_srq(a->pd, &a->attr, a->srq_context, NULL, NULL);
	if ((a->comp_mask & of_xrc) != of_xrc || !a->xrcd || !a->cq)
		return tv_null(EINVAL);
	return create_srq(a->pd, &a->attr, a->srq_context, a->xrcd, a->cq);
}

int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *a, int mask)
{
	struct tv_srq_attr t = { .max_wr = a->max_wr, .limit = a->srq_limit };
	struct tv_srq *s = (struct tv_srq *)srq;
	int rc;

	TV_THERE(srq->context, EIO);
	tv_lock(&s->rq.lock);
	rc = tv_e->modify_srq(s->handle, &t, mask);
	if (!rc)
		tv_ring_set(&s->rq.ring, t.ring); /* another one if its size was changed */
	tv_unlock(&s->rq.lock);
	return tv_fail(rc);
}

int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *a)
{
	struct tv_srq_attr t = { 0 };
	int rc;

	TV_THERE(srq->context, EIO);
	rc = tv_e->query_srq(((struct tv_srq *)srq)->handle, &t);
	if (!rc)
		*a = (struct ibv_srq_attr){ .max_wr = t.max_wr, .max_sge = t.max_sge, .srq_limit = t.limit };
	return tv_fail(rc);
}

int ibv_destroy_srq(struct ibv_srq *ibsrq)
{
	struct tv_srq *srq = (struct tv_srq *)ibsrq;
	struct tv_ctx *c = tv_ctx(ibsrq->context);
	uint32_t n;
	int rc;

	TV_ALIVE(EIO);
	tv_lock(&srq->rq.lock);
	rc = tv_e->destroy(srq->handle);
	tv_unlock(&srq->rq.lock);
	if (rc)
		return tv_fail(rc);
	pthread_mutex_lock(&c->events);
	n = srq->delivered;
	pthread_mutex_unlock(&c->events);
	pthread_mutex_lock(&srq->ibv.mutex);
	while (srq->ibv.events_completed != n)
		pthread_cond_wait(&srq->ibv.cond, &srq->ibv.mutex);
	pthread_mutex_unlock(&srq->ibv.mutex);
	tv_lock_end(&srq->rq.lock);
	pthread_mutex_destroy(&srq->ibv.mutex);
	pthread_cond_destroy(&srq->ibv.cond);
	tv_object_free(ibsrq->pd, srq, TV_RESOURCE_SRQ, srq->custom);
	return 0;
}

/* tv_qp_set takes over what the engine said of a new QP. */
void tv_qp_set(struct tv_qp *qp, const struct tv_qp_init *in)
{
	qp->handle = in->handle;
	tv_ring_set(&qp->sq, in->send_ring);
	tv_ring_set(&qp->rq.ring, in->recv_ring);
	qp->bells = (char *)(uintptr_t)in->bells;
	qp->bell = in->bell;
	qp->max_sge = in->caps.send_sge;
	qp->max_inline = in->caps.inline_data;
	qp->ops = in->send_ops;
	qp->rq.max_sge = in->caps.recv_sge;
	tv_lock_init(&qp->lock, false);
	tv_lock_init(&qp->rq.lock, false);
	qp->cap = (struct ibv_qp_cap){ .max_send_wr = in->caps.send_wr, .max_recv_wr = in->caps.recv_wr,
				       .max_send_sge = in->caps.send_sge, .max_recv_sge = in->caps.recv_sge,
				       .max_inline_data = in->caps.inline_data };
	qp->ibv.handle = in->handle;
	qp->ibv.qp_num = in->num;
	pthread_mutex_init(&qp->ibv.mutex, NULL);
	pthread_cond_init(&qp->ibv.cond, NULL);
}

/* An XRC target has a domain (xrcd) instead of a PD and CQs; an initiator receives
 * nothing. */
static struct tv_qp *create_qp(struct ibv_context *ctx, struct ibv_pd *ibpd, struct ibv_xrcd *xrcd, void *user,
			       struct ibv_cq *send_cq, struct ibv_cq *recv_cq, struct ibv_srq *srq,
			       struct ibv_qp_cap *cap, enum ibv_qp_type type, int sig_all)
{
	struct tv_qp_init in = {
		.type = type, .sig_all = sig_all,
		.caps = { .send_wr = cap->max_send_wr, .recv_wr = cap->max_recv_wr, .send_sge = cap->max_send_sge,
			  .recv_sge = cap->max_recv_sge, .inline_data = cap->max_inline_data },
	};
	struct tv_qp *qp;
	bool custom;
	int rc;

	TV_THERE(ctx, NULL);
	if (type == IBV_QPT_XRC_RECV) {
		if (!xrcd)
			return tv_null(EINVAL);
		ibpd = NULL;
		send_cq = recv_cq = NULL;
		srq = NULL;
	} else if (type == IBV_QPT_XRC_SEND) {
		recv_cq = NULL;
		srq = NULL;
	}
	if (type != IBV_QPT_XRC_RECV && (!ibpd || !send_cq || (!recv_cq && type != IBV_QPT_XRC_SEND)))
		return tv_null(EINVAL);
	qp = tv_object(ibpd, sizeof(*qp), TV_RESOURCE_QP, &custom);
	if (!qp)
		return NULL;
	qp->custom = custom;
	in.send_cq = send_cq ? ((struct tv_cq *)send_cq)->handle : 0;
	in.recv_cq = recv_cq ? ((struct tv_cq *)recv_cq)->handle : 0;
	in.srq = srq ? ((struct tv_srq *)srq)->handle : 0;
	in.cookie = (uintptr_t)qp;
	rc = tv_e->create_qp(ibpd ? ((struct tv_pd *)ibpd)->handle : ((struct tv_xrcd *)xrcd)->handle, &in);
	if (rc) {
		tv_object_free(ibpd, qp, TV_RESOURCE_QP, custom);
		return tv_null(rc);
	}
	tv_qp_set(qp, &in);
	*cap = qp->cap;
	qp->sig_all = sig_all;
	qp->ibv.context = ctx;
	qp->ibv.qp_context = user;
	qp->ibv.pd = ibpd;
	qp->lock.off = qp->rq.lock.off = tv_alone(ibpd);
	qp->ibv.send_cq = send_cq;
	qp->ibv.recv_cq = recv_cq;
	qp->ibv.srq = srq;
	qp->ibv.state = IBV_QPS_RESET;
	qp->ibv.qp_type = type;
	return qp;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
	struct tv_qp *qp = create_qp(pd->context, pd, NULL, a->qp_context, a->send_cq, a->recv_cq, a->srq, &a->cap,
				     a->qp_type, a->sq_sig_all);

	return qp ? &qp->ibv : NULL;
}

struct ibv_qp *tv_create_qp_ex(struct ibv_context *ctx, struct ibv_qp_init_attr_ex *a)
{
	struct tv_qp *qp;
	int rc;

	if (a->comp_mask & ~(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) ||
	    (a->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS && a->create_flags))
		return tv_null(EOPNOTSUPP);
	qp = create_qp(ctx, a->comp_mask & IBV_QP_INIT_ATTR_PD ? a->pd : NULL,
		       a->comp_mask & IBV_QP_INIT_ATTR_XRCD ? a->xrcd : NULL, a->qp_context, a->send_cq, a->recv_cq, a->srq,
		       &a->cap, a->qp_type, a->sq_sig_all);
	if (!qp)
		return NULL;
	if (a->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) {
		rc = tv_wr_set(qp, a->send_ops_flags);
		if (rc) {
			ibv_destroy_qp(&qp->ibv);
			return tv_null(rc);
		}
	}
	return &qp->ibv;
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *ibqp)
{
	struct tv_qp *qp = (struct tv_qp *)ibqp;

	return qp->is_ex ? &qp->ex : NULL;
}

/* hold takes the locks of all rings that a QP's end or reset changes; drop gives
 * them back. A QP of XRC lacks one CQ or both. */
static void hold(struct tv_qp *qp, struct tv_cq *cqs[2])
{
	struct tv_cq *a = (struct tv_cq *)qp->ibv.send_cq, *b = (struct tv_cq *)qp->ibv.recv_cq;

	cqs[0] = a < b ? a : b;
	cqs[1] = a < b ? b : a;
	tv_lock(&qp->lock);
	tv_lock(&qp->rq.lock);
	if (cqs[0])
		tv_lock(&cqs[0]->lock);
	if (cqs[1] != cqs[0])
		tv_lock(&cqs[1]->lock);
}

static void drop(struct tv_qp *qp, struct tv_cq *cqs[2])
{
	if (cqs[1] != cqs[0])
		tv_unlock(&cqs[1]->lock);
	if (cqs[0])
		tv_unlock(&cqs[0]->lock);
	tv_unlock(&qp->rq.lock);
	tv_unlock(&qp->lock);
}

static void to_ah(struct tv_ah_attr *o, const struct ibv_ah_attr *a)
{
	*o = (struct tv_ah_attr){ .flow_label = a->grh.flow_label, .sgid_index = a->grh.sgid_index,
				  .hop_limit = a->grh.hop_limit, .traffic_class = a->grh.traffic_class, .sl = a->sl,
				  .port_num = a->port_num };
	memcpy(o->dgid, a->grh.dgid.raw, sizeof(o->dgid));
}

/* own_mask drops the attributes of the side that an end of XRC lacks, as the kernel
 * does for its users, who bring both ends up alike. */
static int own_mask(enum ibv_qp_type type, int mask)
{
	switch (type) {
	case IBV_QPT_XRC_SEND:
		return mask & ~(IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	case IBV_QPT_XRC_RECV:
		return mask & ~(IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY);
	default:
		return mask;
	}
}

int ibv_modify_qp(struct ibv_qp *ibqp, struct ibv_qp_attr *a, int mask)
{
	struct tv_qp *qp = (struct tv_qp *)ibqp;
	struct tv_cq *cqs[2];
	struct tv_qp_attr t = {
		.state = a->qp_state, .cur_state = a->cur_qp_state, .path_mtu = a->path_mtu, .qkey = a->qkey,
		.rq_psn = a->rq_psn, .sq_psn = a->sq_psn, .dest_qpn = a->dest_qp_num, .access = a->qp_access_flags,
		.rate_limit = a->rate_limit, .pkey_index = a->pkey_index, .port = a->port_num,
		.en_sqd_async = a->en_sqd_async_notify, .max_rd_atomic = a->max_rd_atomic,
		.max_dest_rd_atomic = a->max_dest_rd_atomic, .min_rnr_timer = a->min_rnr_timer, .timeout = a->timeout,
		.retry_cnt = a->retry_cnt, .rnr_retry = a->rnr_retry,
	};
	int rc;

	TV_THERE(ibqp->context, EIO);
	mask = own_mask(ibqp->qp_type, mask);
	if (mask & IBV_QP_STATE && (unsigned)a->qp_state > IBV_QPS_ERR)
		return tv_fail(EINVAL);
	if (mask & IBV_QP_AV) {
		if (!a->ah_attr.is_global)
			return tv_fail(EINVAL); /* RoCE has no other route (IBA A17.4.1) */
		to_ah(&t.ah, &a->ah_attr);
	}
	if (mask & IBV_QP_STATE && a->qp_state == IBV_QPS_RESET) {
		hold(qp, cqs);
		rc = tv_e->modify_qp(qp->handle, &t, mask);
		drop(qp, cqs);
	} else {
		rc = tv_e->modify_qp(qp->handle, &t, mask);
	}
	if (!rc && mask & IBV_QP_STATE)
		ibqp->state = a->qp_state;
	return tv_fail(rc);
}

int ibv_query_qp(struct ibv_qp *ibqp, struct ibv_qp_attr *a, int mask, struct ibv_qp_init_attr *in)
{
	struct tv_qp *qp = (struct tv_qp *)ibqp;
	struct tv_qp_attr t = { 0 };
	int rc;

	TV_THERE(ibqp->context, EIO);
	(void)mask; /* all of it costs the same */
	rc = tv_e->query_qp(qp->handle, &t);
	if (rc)
		return tv_fail(rc);
	*a = (struct ibv_qp_attr){
		.qp_state = t.state, .cur_qp_state = t.cur_state, .path_mtu = t.path_mtu, .qkey = t.qkey,
		.rq_psn = t.rq_psn, .sq_psn = t.sq_psn, .dest_qp_num = t.dest_qpn, .qp_access_flags = t.access,
		.cap = qp->cap, .rate_limit = t.rate_limit, .pkey_index = t.pkey_index, .port_num = t.port,
		.en_sqd_async_notify = t.en_sqd_async, .sq_draining = t.sq_draining, .max_rd_atomic = t.max_rd_atomic,
		.max_dest_rd_atomic = t.max_dest_rd_atomic, .min_rnr_timer = t.min_rnr_timer, .timeout = t.timeout,
		.retry_cnt = t.retry_cnt, .rnr_retry = t.rnr_retry,
	};
	a->ah_attr = (struct ibv_ah_attr){
		.grh = { .flow_label = t.ah.flow_label, .sgid_index = t.ah.sgid_index, .hop_limit = t.ah.hop_limit,
			 .traffic_class = t.ah.traffic_class },
		.sl = t.ah.sl, .is_global = 1, .port_num = 1,
	};
	memcpy(a->ah_attr.grh.dgid.raw, t.ah.dgid, sizeof(t.ah.dgid));
	*in = (struct ibv_qp_init_attr){
		.qp_context = ibqp->qp_context, .send_cq = ibqp->send_cq, .recv_cq = ibqp->recv_cq, .srq = ibqp->srq,
		.cap = qp->cap, .qp_type = ibqp->qp_type, .sq_sig_all = qp->sig_all,
	};
	ibqp->state = t.state;
	return 0;
}

int ibv_destroy_qp(struct ibv_qp *ibqp)
{
	struct tv_qp *qp = (struct tv_qp *)ibqp;
	struct tv_ctx *c = tv_ctx(ibqp->context);
	struct tv_cq *cqs[2];
	uint32_t n;
	int rc;

	TV_ALIVE(EIO);
	hold(qp, cqs);
	rc = tv_e->destroy(qp->handle);
	drop(qp, cqs);
	if (rc)
		return tv_fail(rc);
	pthread_mutex_lock(&c->events);
	n = qp->delivered;
	pthread_mutex_unlock(&c->events);
	pthread_mutex_lock(&ibqp->mutex);
	while (ibqp->events_completed != n)
		pthread_cond_wait(&ibqp->cond, &ibqp->mutex);
	pthread_mutex_unlock(&ibqp->mutex);
	tv_lock_end(&qp->lock);
	tv_lock_end(&qp->rq.lock);
	pthread_mutex_destroy(&ibqp->mutex);
	pthread_cond_destroy(&ibqp->cond);
	tv_object_free(ibqp->pd, qp, TV_RESOURCE_QP, qp->custom);
	return 0;
}

/* The burst and packet size that pacing would be fine-tuned by are the engine's own. */
int tv_modify_qp_rate_limit(struct ibv_qp *qp, struct ibv_qp_rate_limit_attr *a)
{
	struct ibv_qp_attr t = { .rate_limit = a->rate_limit };

	if (a->comp_mask || a->max_burst_sz || a->typical_pkt_sz)
		return tv_fail(EINVAL);
	return ibv_modify_qp(qp, &t, IBV_QP_RATE_LIMIT);
}

int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
{
	/* Packets are placed in order, the bytes of one as memcpy has it: only the last of
	 * them is sure to come last. */
	(void)qp, (void)op, (void)flags;
	return 0;
}

/* A device without enhancements of a vendor's: there are none, and none can be set.
 * librdmacm goes on without when it hears EOPNOTSUPP about those of a peer. */
int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp;
	*ece = (struct ibv_ece){ 0 };
	return 0;
}

int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp, (void)ece;
	return tv_fail(EOPNOTSUPP);
}

/* RoCE has no LIDs: lid is not looked at. */
static int mcast(struct ibv_qp *qp, const union ibv_gid *gid, int attach)
{
	uint8_t g[16];

	if (attach)
		TV_THERE(qp->context, EIO);
	TV_ALIVE(EIO);
	if (qp->qp_type != IBV_QPT_UD)
		return tv_fail(EINVAL);
	memcpy(g, gid->raw, sizeof(g));
	return tv_fail(tv_e->mcast(((struct tv_qp *)qp)->handle, g, attach));
}

int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	(void)lid;
	return mcast(qp, gid, 1);
}

int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	(void)lid;
	return mcast(qp, gid, 0);
}

TV_LATEST(ibv_attach_mcast);
TV_LATEST(ibv_create_qp);
TV_LATEST(ibv_create_srq);
TV_LATEST(ibv_destroy_qp);
TV_LATEST(ibv_destroy_srq);
TV_LATEST(ibv_detach_mcast);
TV_LATEST(ibv_modify_qp);
TV_LATEST(ibv_modify_srq);
TV_LATEST(ibv_query_qp);
TV_LATEST(ibv_query_srq);
