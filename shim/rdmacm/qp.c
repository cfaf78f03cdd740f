/* SPDX-License-Identifier: Apache-2.0
 *
 * Queue pairs and SRQs of identifiers, with the CQs and channels that programs do not bring,
 * and their way through the states. */
#include "cm.h"

int rdma_init_qp_attr(struct rdma_cm_id *ibid, struct ibv_qp_attr *o, int *mask)
{
	struct tv_qp_attr a;
	uint32_t m;
	int rc = CM_CALL(cm_id(ibid), cm_qp_attr, o->qp_state, &a, &m);

	if (rc)
		return cm_fail(rc);
	*o = (struct ibv_qp_attr){
		.qp_state = a.state, .path_mtu = a.path_mtu, .qkey = a.qkey, .rq_psn = a.rq_psn, .sq_psn = a.sq_psn,
		.dest_qp_num = a.dest_qpn, .qp_access_flags = a.access, .pkey_index = a.pkey_index, .port_num = a.port,
		.max_rd_atomic = a.max_rd_atomic, .max_dest_rd_atomic = a.max_dest_rd_atomic, .min_rnr_timer = a.min_rnr_timer,
		.timeout = a.timeout, .retry_cnt = a.retry_cnt, .rnr_retry = a.rnr_retry,
	};
	if (m & IBV_QP_AV) {
		o->ah_attr.is_global = 1;
		o->ah_attr.port_num = 1;
		memcpy(&o->ah_attr.grh.dgid, a.ah.dgid, 16);
		o->ah_attr.grh.sgid_index = a.ah.sgid_index;
		o->ah_attr.grh.hop_limit = a.ah.hop_limit;
		o->ah_attr.grh.traffic_class = a.ah.traffic_class;
		o->ah_attr.grh.flow_label = a.ah.flow_label;
	}
	*mask = m;
	return 0;
}

/* modify brings the queue pair to a state, with no more READs and atomics than depth. */
static int modify(struct cm_id *id, enum ibv_qp_state state, const uint8_t *depth)
{
	struct ibv_qp_attr a = { .qp_state = state };
	int mask;

	if (rdma_init_qp_attr(&id->id, &a, &mask))
		return errno;
	if (depth && mask & IBV_QP_MAX_DEST_RD_ATOMIC && a.max_dest_rd_atomic > *depth)
		a.max_dest_rd_atomic = *depth;
	if (depth && mask & IBV_QP_MAX_QP_RD_ATOMIC && a.max_rd_atomic > *depth)
		a.max_rd_atomic = *depth;
	return ibv_modify_qp(id->id.qp, &a, mask);
}

/* cm_modify brings a connection's queue pair to RTR or RTS. Before RTR it is told what the
 * other end may do, which was not known when it was made. */
int cm_modify(struct cm_id *id, enum ibv_qp_state state, const uint8_t *depth)
{
	int rc = 0;

	if (state == IBV_QPS_RTR)
		rc = modify(id, IBV_QPS_INIT, NULL);
	return rc ? rc : modify(id, state, depth);
}

int cm_modify_err(struct cm_id *id)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_ERR };

	return id->id.qp ? ibv_modify_qp(id->id.qp, &a, IBV_QP_STATE) : 0;
}

static void end_cq(struct ibv_cq **cq, struct ibv_comp_channel **ch)
{
	if (*cq)
		ibv_destroy_cq(*cq);
	if (*ch)
		ibv_destroy_comp_channel(*ch);
	*cq = NULL;
	*ch = NULL;
}

/* end_cqs ends the CQs that nothing uses any more. */
static void end_cqs(struct rdma_cm_id *id)
{
	if (id->qp)
		return;
	end_cq(&id->send_cq, &id->send_cq_channel);
	if (!id->srq || !cm_id(id)->own_srq || id->qp_type != IBV_QPT_XRC_RECV)
		end_cq(&id->recv_cq, &id->recv_cq_channel);
}

static int make_cq(struct rdma_cm_id *id, uint32_t entries, struct ibv_cq **cq, struct ibv_comp_channel **ch)
{
	if (!entries || *cq)
		return 0;
	*ch = ibv_create_comp_channel(id->verbs);
	if (*ch)
		*cq = ibv_create_cq(id->verbs, entries, id, *ch, 0);
	if (*cq)
		return 0;
	int rc = errno;

	end_cq(cq, ch);
	return rc;
}

static int start(struct cm_id *id)
{
	int rc = modify(id, IBV_QPS_INIT, NULL);

	if (rc || id->id.qp_type != IBV_QPT_UD)
		return rc;
	rc = modify(id, IBV_QPS_RTR, NULL);
	return rc ? rc : modify(id, IBV_QPS_RTS, NULL);
}

int rdma_create_qp_ex(struct rdma_cm_id *ibid, struct ibv_qp_init_attr_ex *attr)
{
	struct cm_id *id = cm_id(ibid);
	struct ibv_qp *qp;
	int rc = 0;

	if (ibid->qp || !ibid->verbs)
		return cm_fail(EINVAL);
	if ((ibid->send_cq && attr->send_cq && ibid->send_cq != attr->send_cq) || (ibid->recv_cq && attr->recv_cq && ibid->recv_cq != attr->recv_cq))
		return cm_fail(EINVAL);
	if (!(attr->comp_mask & IBV_QP_INIT_ATTR_PD) || !attr->pd) {
		attr->comp_mask |= IBV_QP_INIT_ATTR_PD;
		attr->pd = ibid->pd;
	} else if (attr->pd->context != ibid->verbs) {
		return cm_fail(EINVAL);
	}
	if (attr->qp_type == IBV_QPT_XRC_RECV && !(attr->comp_mask & IBV_QP_INIT_ATTR_XRCD)) {
		attr->xrcd = cm_device_xrcd(id->dev);
		if (!attr->xrcd)
			return -1;
		attr->comp_mask |= IBV_QP_INIT_ATTR_XRCD;
	}
	if (!attr->send_cq)
		rc = make_cq(ibid, attr->cap.max_send_wr, &ibid->send_cq, &ibid->send_cq_channel);
	if (!rc && !attr->recv_cq)
		rc = make_cq(ibid, attr->cap.max_recv_wr, &ibid->recv_cq, &ibid->recv_cq_channel);
	if (rc)
		goto fail;
	if (!attr->srq)
		attr->srq = ibid->srq;
	if (!attr->send_cq)
		attr->send_cq = ibid->send_cq;
	if (!attr->recv_cq)
		attr->recv_cq = ibid->recv_cq;
	if (attr->qp_type == IBV_QPT_XRC_RECV)
		attr->comp_mask &= ~IBV_QP_INIT_ATTR_PD;
	qp = ibv_create_qp_ex(ibid->verbs, attr);
	if (!qp) {
		rc = errno;
		goto fail;
	}
	ibid->qp = qp;
	rc = start(id);
	if (rc) {
		ibid->qp = NULL;
		ibv_destroy_qp(qp);
		goto fail;
	}
	if (qp->pd)
		ibid->pd = qp->pd;
	return 0;
fail:
	end_cqs(ibid);
	return cm_fail(rc);
}

int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp_init_attr_ex ex;
	int rc;

	memset(&ex, 0, sizeof(ex));
	memcpy(&ex, attr, sizeof(*attr));
	ex.comp_mask = IBV_QP_INIT_ATTR_PD;
	ex.pd = pd ? pd : id->pd;
	rc = rdma_create_qp_ex(id, &ex);
	if (!rc)
		memcpy(attr, &ex, sizeof(*attr));
	return rc;
}

void rdma_destroy_qp(struct rdma_cm_id *id)
{
	for (struct cm_group *g = cm_id(id)->groups; g; g = g->next) {
		if (g->attached && !ibv_detach_mcast(id->qp, &g->mgid, 0))
			g->attached = false;
	}
	ibv_destroy_qp(id->qp);
	id->qp = NULL;
	end_cqs(id);
}

int rdma_create_srq_ex(struct rdma_cm_id *ibid, struct ibv_srq_init_attr_ex *attr)
{
	struct cm_id *id = cm_id(ibid);
	int rc = 0;

	if (ibid->srq || !ibid->verbs || !(attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE))
		return cm_fail(EINVAL);
	if (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_PD) || !attr->pd) {
		attr->pd = ibid->pd;
		attr->comp_mask |= IBV_SRQ_INIT_ATTR_PD;
	}
	if (attr->srq_type == IBV_SRQT_XRC) {
		if (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_XRCD) || !attr->xrcd) {
			attr->xrcd = cm_device_xrcd(id->dev);
			if (!attr->xrcd)
				return -1;
		}
		if (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_CQ) || !attr->cq) {
			rc = make_cq(ibid, attr->attr.max_wr, &ibid->recv_cq, &ibid->recv_cq_channel);
			if (rc)
				return cm_fail(rc);
			attr->cq = ibid->recv_cq;
		}
		attr->comp_mask |= IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
	}
	ibid->srq = ibv_create_srq_ex(ibid->verbs, attr);
	if (!ibid->srq) {
		rc = errno;
		end_cqs(ibid);
		return cm_fail(rc);
	}
	id->own_srq = true;
	ibid->pd = ibid->srq->pd;
	return 0;
}

int rdma_create_srq(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	struct ibv_srq_init_attr_ex ex;
	int rc;

	memset(&ex, 0, sizeof(ex));
	memcpy(&ex, attr, sizeof(*attr));
	ex.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
	ex.srq_type = id->qp_type == IBV_QPT_XRC_RECV || id->qp_type == IBV_QPT_XRC_SEND ? IBV_SRQT_XRC : IBV_SRQT_BASIC;
	ex.pd = pd;
	rc = rdma_create_srq_ex(id, &ex);
	if (!rc)
		memcpy(attr, &ex, sizeof(*attr));
	return rc;
}

void rdma_destroy_srq(struct rdma_cm_id *id)
{
	ibv_destroy_srq(id->srq);
	id->srq = NULL;
	cm_id(id)->own_srq = false;
	end_cqs(id);
}
