/* SPDX-License-Identifier: Apache-2.0
 *
 * Connecting, from either end. */
#include "cm.h"

/* valid says whether what the program wants is to be had. */
static bool valid(struct cm_id *id, const struct rdma_conn_param *p)
{
	if (id->id.ps != RDMA_PS_TCP)
		return true;
	if (!p)
		return id->id.qp != NULL;
	return (p->responder_resources == RDMA_MAX_RESP_RES || p->responder_resources <= id->dev->max_responder) &&
	       (p->initiator_depth == RDMA_MAX_INIT_DEPTH || p->initiator_depth <= id->dev->max_initiator);
}

/* tell makes what the other end is told. EINVAL if private data is too long. */
static int tell(struct cm_id *id, struct tv_cm_conn *c, const struct rdma_conn_param *p)
{
	memset(c, 0, sizeof(*c));
	c->responder_resources = id->responder;
	c->initiator_depth = id->initiator;
	c->retry_count = c->rnr_retry_count = 7;
	c->ece_vendor = id->ece.vendor_id;
	c->ece_options = id->ece.options;
	c->flow_control = 1;
	if (id->id.qp) {
		c->qpn = id->id.qp->qp_num;
		c->srq = id->id.qp->srq != NULL;
	} else if (p) {
		c->qpn = p->qp_num;
		c->srq = p->srq;
	}
	if (id->connect_len) {
		memcpy(c->private_data, id->connect, id->connect_len);
		c->private_len = id->connect_len;
	}
	if (!p)
		return 0;
	c->flow_control = p->flow_control;
	c->retry_count = p->retry_count;
	c->rnr_retry_count = p->rnr_retry_count;
	if (p->private_data && p->private_data_len) {
		if (c->private_len + p->private_data_len > TV_CM_PRIVATE)
			return EINVAL;
		memcpy(c->private_data + c->private_len, p->private_data, p->private_data_len);
		c->private_len += p->private_data_len;
	}
	return 0;
}

int rdma_connect(struct rdma_cm_id *ibid, struct rdma_conn_param *p)
{
	struct cm_id *id = cm_id(ibid);
	struct tv_cm_conn c;
	int rc;

	if (!valid(id, p))
		return cm_fail(EINVAL);
	id->initiator = p && p->initiator_depth != RDMA_MAX_INIT_DEPTH ? p->initiator_depth : id->dev->max_initiator;
	id->responder = p && p->responder_resources != RDMA_MAX_RESP_RES ? p->responder_resources : id->dev->max_responder;
	rc = tell(id, &c, p);
	if (!rc)
		rc = CM_CALL(id, cm_connect, &c);
	return rc ? cm_fail(rc) : cm_wait(id);
}

/* cm_connected is for the response to rdma_connect: the queue pair is made ready, and the
 * other end told. */
int cm_connected(struct cm_id *id)
{
	int rc = cm_modify(id, IBV_QPS_RTR, NULL);

	if (!rc)
		rc = cm_modify(id, IBV_QPS_RTS, NULL);
	if (!rc)
		rc = CM_CALL(id, cm_ready);
	if (!rc)
		return 0;
	cm_modify_err(id);
	id->failed = true;
	CM_CALL(id, cm_reject, 28, NULL, 0);
	return rc;
}

int rdma_establish(struct rdma_cm_id *ibid)
{
	if (ibid->qp)
		return cm_fail(EINVAL);
	return cm_fail(CM_CALL(cm_id(ibid), cm_ready));
}

int rdma_listen(struct rdma_cm_id *ibid, int backlog)
{
	struct cm_id *id = cm_id(ibid);
	int rc = CM_CALL(id, cm_listen, backlog);

	return cm_fail(rc ? rc : cm_query(id));
}

int rdma_get_request(struct rdma_cm_id *listen, struct rdma_cm_id **out)
{
	struct cm_id *l = cm_id(listen);
	struct ibv_qp_init_attr attr;
	struct rdma_cm_event *ev;
	int rc;

	if (!l->sync)
		return cm_fail(EINVAL);
	if (listen->event) {
		rdma_ack_cm_event(listen->event);
		listen->event = NULL;
	}
	if (rdma_get_cm_event(listen->channel, &ev))
		return -1;
	if (ev->status) {
		rc = ev->status < 0 ? -ev->status : ev->status;
		goto fail;
	}
	if (ev->event != RDMA_CM_EVENT_CONNECT_REQUEST) {
		rc = EINVAL;
		goto fail;
	}
	if (l->qp_attr) {
		attr = *l->qp_attr;
		if (rdma_create_qp(ev->id, listen->pd, &attr)) {
			rc = errno;
			rdma_destroy_id(ev->id);
			goto fail;
		}
	}
	*out = ev->id;
	(*out)->event = ev;
	return 0;
fail:
	listen->event = ev;
	return cm_fail(rc);
}

static uint8_t least(uint8_t a, uint8_t b) { return a < b ? a : b; }

int rdma_accept(struct rdma_cm_id *ibid, struct rdma_conn_param *p)
{
	struct cm_id *id = cm_id(ibid);
	struct tv_cm_conn c;
	int rc;

	if (!valid(id, p))
		return cm_fail(EINVAL);
	/* Without a wish it is what the other end asks for. */
	if (!p || p->initiator_depth == RDMA_MAX_INIT_DEPTH)
		id->initiator = least(id->initiator, id->dev->max_initiator);
	else
		id->initiator = p->initiator_depth;
	if (!p || p->responder_resources == RDMA_MAX_RESP_RES)
		id->responder = least(id->responder, id->dev->max_responder);
	else
		id->responder = p->responder_resources;
	rc = tell(id, &c, p);
	if (rc)
		return cm_fail(rc);
	if (ibid->qp && ibid->qp_type != IBV_QPT_UD) {
		rc = cm_modify(id, IBV_QPS_RTR, &id->responder);
		if (!rc)
			rc = cm_modify(id, IBV_QPS_RTS, &id->initiator);
		if (rc)
			return cm_fail(rc);
		c.responder_resources = id->responder;
		c.initiator_depth = id->initiator;
	}
	rc = CM_CALL(id, cm_accept, &c);
	if (rc) {
		cm_modify_err(id);
		return cm_fail(rc);
	}
	if (ibid->qp_type != IBV_QPT_UD)
		return cm_wait(id);
	/* That was all. */
	if (id->sync && ibid->event) {
		rdma_ack_cm_event(ibid->event);
		ibid->event = NULL;
	}
	return 0;
}

int rdma_reject(struct rdma_cm_id *ibid, const void *data, uint8_t len)
{
	return cm_fail(CM_CALL(cm_id(ibid), cm_reject, 28 /* by the consumer */, (uint8_t *)data, data ? len : 0));
}

int rdma_reject_ece(struct rdma_cm_id *ibid, const void *data, uint8_t len)
{
	return cm_fail(CM_CALL(cm_id(ibid), cm_reject, 35 /* its vendor's option is not supported */, (uint8_t *)data, data ? len : 0));
}

int rdma_notify(struct rdma_cm_id *ibid, enum ibv_event_type event)
{
	if (event != IBV_EVENT_COMM_EST)
		return cm_fail(EINVAL); /* there are no alternate paths */
	return cm_fail(CM_CALL(cm_id(ibid), cm_notify));
}

int rdma_disconnect(struct rdma_cm_id *ibid)
{
	struct cm_id *id = cm_id(ibid);
	int rc = cm_modify_err(id);

	if (!rc)
		rc = CM_CALL(id, cm_disconnect);
	return rc ? cm_fail(rc) : cm_wait(id);
}
