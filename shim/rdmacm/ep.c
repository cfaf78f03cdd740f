/* SPDX-License-Identifier: Apache-2.0
 *
 * Endpoints: identifiers whose calls wait, made from what rdma_getaddrinfo gives. */
#include "cm.h"

/* passive binds, and keeps what queue pairs of requests are to be. */
static int passive(struct cm_id *id, struct rdma_addrinfo *res, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	if (rdma_bind_addr(&id->id, res->ai_src_addr))
		return -1;
	if (!attr)
		return 0;
	id->qp_attr = malloc(sizeof(*attr));
	if (!id->qp_attr)
		return cm_fail(ENOMEM);
	*id->qp_attr = *attr;
	id->qp_attr->qp_type = res->ai_qp_type;
	if (pd)
		id->id.pd = pd;
	return 0;
}

static int active(struct cm_id *id, struct rdma_addrinfo *res, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	int rc = rdma_resolve_addr(&id->id, res->ai_src_addr, res->ai_dst_addr, 2000);

	if (!rc && res->ai_route_len)
		rc = rdma_set_option(&id->id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, res->ai_route, res->ai_route_len);
	else if (!rc)
		rc = rdma_resolve_route(&id->id, 2000);
	if (!rc && attr) {
		attr->qp_type = res->ai_qp_type;
		rc = rdma_create_qp(&id->id, pd, attr);
	}
	if (rc || !res->ai_connect_len)
		return rc;
	if (res->ai_connect_len > UINT8_MAX)
		return cm_fail(EINVAL);
	id->connect = malloc(res->ai_connect_len);
	if (!id->connect)
		return cm_fail(ENOMEM);
	memcpy(id->connect, res->ai_connect, res->ai_connect_len);
	id->connect_len = res->ai_connect_len;
	return 0;
}

int rdma_create_ep(struct rdma_cm_id **out, struct rdma_addrinfo *res, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct rdma_cm_id *id;
	int rc;

	if (cm_id_new(NULL, res->ai_port_space, res->ai_qp_type, NULL, &id))
		return -1;
	rc = (res->ai_flags & RAI_PASSIVE ? passive : active)(cm_id(id), res, pd, attr);
	if (rc) {
		rc = errno;
		rdma_destroy_ep(id);
		return cm_fail(rc);
	}
	*out = id;
	return 0;
}

void rdma_destroy_ep(struct rdma_cm_id *id)
{
	if (id->qp)
		rdma_destroy_qp(id);
	if (id->srq && cm_id(id)->own_srq)
		rdma_destroy_srq(id);
	rdma_destroy_id(id);
}
