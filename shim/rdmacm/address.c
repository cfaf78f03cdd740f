/* SPDX-License-Identifier: Apache-2.0
 *
 * Addresses: binding, resolving, and what the program's struct says of them. */
#include <arpa/inet.h>

#include "cm.h"

/* cm_addr_in takes over the program's address. EINVAL for families that are none of ours. */
int cm_addr_in(struct tv_cm_addr *to, const struct sockaddr *from)
{
	const struct sockaddr_in *in = (const void *)from;
	const struct sockaddr_in6 *in6 = (const void *)from;
	const struct sockaddr_ib *ib = (const void *)from;

	memset(to, 0, sizeof(*to));
	switch (from->sa_family) {
	case AF_INET:
		to->family = 4;
		to->port = ntohs(in->sin_port);
		memcpy(to->addr, &in->sin_addr, 4);
		return 0;
	case AF_INET6:
		to->family = 6;
		to->port = ntohs(in6->sin6_port);
		to->scope = in6->sin6_scope_id;
		memcpy(to->addr, &in6->sin6_addr, 16);
		return 0;
	case AF_IB:
		to->family = 128;
		memcpy(to->addr, &ib->sib_addr, 16);
		return 0;
	}
	return EINVAL;
}

static void addr_out(struct sockaddr_storage *to, const struct tv_cm_addr *from)
{
	struct sockaddr_in *in = (void *)to;
	struct sockaddr_in6 *in6 = (void *)to;

	memset(to, 0, sizeof(*to));
	if (from->family == 4) {
		in->sin_family = AF_INET;
		in->sin_port = htons(from->port);
		memcpy(&in->sin_addr, from->addr, 4);
	} else if (from->family == 6) {
		in6->sin6_family = AF_INET6;
		in6->sin6_port = htons(from->port);
		in6->sin6_scope_id = from->scope;
		memcpy(&in6->sin6_addr, from->addr, 16);
	}
}

/* cm_query brings the program's struct up to what the engine knows. */
int cm_query(struct cm_id *id)
{
	struct ibv_sa_path_rec *p = &id->path;
	struct rdma_route *r = &id->id.route;
	struct tv_cm_info i;
	int rc = CM_CALL(id, cm_info, &i);

	if (rc)
		return rc;
	addr_out(&r->addr.src_storage, &i.src);
	addr_out(&r->addr.dst_storage, &i.dst);
	id->id.qp_type = i.qp_type;
	if (!i.bound)
		return 0;
	id->id.verbs = id->dev->verbs;
	id->id.port_num = 1;
	if (!id->id.pd)
		id->id.pd = id->dev->pd;
	memcpy(&r->addr.addr.ibaddr.sgid, i.sgid, 16);
	memcpy(&r->addr.addr.ibaddr.dgid, i.dgid, 16);
	r->addr.addr.ibaddr.pkey = htons(0xffff);
	if (!i.routed)
		return 0;
	*p = (struct ibv_sa_path_rec){
		.flow_label = htonl(i.route.flow_label), .hop_limit = i.route.hop_limit, .traffic_class = i.route.traffic_class,
		.reversible = 1, .numb_path = 1, .pkey = htons(i.route.pkey), .mtu_selector = 2, .mtu = i.route.mtu,
		.rate_selector = 2, .rate = IBV_RATE_10_GBPS, .packet_life_time_selector = 2,
		/* The other way round: a timeout is twice that. */
		.packet_life_time = i.route.ack_timeout ? i.route.ack_timeout - 1 : 0,
	};
	memcpy(&p->sgid, i.sgid, 16);
	memcpy(&p->dgid, i.dgid, 16);
	r->path_rec = p;
	r->num_paths = 1;
	return 0;
}

int rdma_bind_addr(struct rdma_cm_id *ibid, struct sockaddr *addr)
{
	struct cm_id *id = cm_id(ibid);
	struct tv_cm_addr a;
	int rc = cm_addr_in(&a, addr);

	if (!rc && (a.family == 128 || id->dev->dv->lost(id->dev->verbs)))
		rc = ENODEV; /* addresses of InfiniBand are none of RoCE's, and a device that is gone has none */
	if (!rc)
		rc = CM_CALL(id, cm_bind, &a);
	return cm_fail(rc ? rc : cm_query(id));
}

int rdma_resolve_addr(struct rdma_cm_id *ibid, struct sockaddr *src, struct sockaddr *dst, int timeout_ms)
{
	struct cm_id *id = cm_id(ibid);
	struct tv_cm_addr from = { 0 }, to;
	int rc = cm_addr_in(&to, dst);

	if (!rc && src)
		rc = cm_addr_in(&from, src);
	if (!rc && (to.family == 128 || from.family == 128 || id->dev->dv->lost(id->dev->verbs)))
		rc = ENODEV;
	if (!rc)
		rc = CM_CALL(id, cm_resolve_addr, &from, &to, timeout_ms);
	if (rc)
		return cm_fail(rc);
	/* Until it is resolved the address is what was asked for. */
	addr_out(&ibid->route.addr.dst_storage, &to);
	return cm_wait(id);
}

int rdma_resolve_route(struct rdma_cm_id *ibid, int timeout_ms)
{
	struct cm_id *id = cm_id(ibid);
	int rc = CM_CALL(id, cm_resolve_route, NULL);

	(void)timeout_ms; /* there is nobody to ask */
	return rc ? cm_fail(rc) : cm_wait(id);
}

static __be16 port_of(const struct sockaddr_storage *a)
{
	switch (a->ss_family) {
	case AF_INET:
		return ((const struct sockaddr_in *)a)->sin_port;
	case AF_INET6:
		return ((const struct sockaddr_in6 *)a)->sin6_port;
	}
	return 0;
}

__be16 rdma_get_src_port(struct rdma_cm_id *id) { return port_of(&id->route.addr.src_storage); }

__be16 rdma_get_dst_port(struct rdma_cm_id *id) { return port_of(&id->route.addr.dst_storage); }
