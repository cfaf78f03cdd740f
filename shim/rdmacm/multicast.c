/* SPDX-License-Identifier: Apache-2.0
 *
 * Multicast groups. The device is a member of what is joined, also where no queue pair is
 * attached. */
#include "cm.h"

/* size_of is 0 for addresses of other families. */
static size_t size_of(const struct sockaddr *addr)
{
	switch (addr->sa_family) {
	case AF_INET:
		return sizeof(struct sockaddr_in);
	case AF_INET6:
		return sizeof(struct sockaddr_in6);
	case AF_IB:
		return sizeof(struct sockaddr_ib);
	}
	return 0;
}

static int join(struct cm_id *id, struct sockaddr *addr, uint32_t flags, void *context)
{
	struct tv_cm_join j = { 0 };
	struct cm_group *g;
	int rc = addr ? cm_addr_in(&j.addr, addr) : EINVAL;

	if (rc)
		return rc;
	g = calloc(1, sizeof(*g));
	if (!g)
		return ENOMEM;
	g->id = id;
	g->context = context;
	g->send_only = flags == RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER;
	memcpy(&g->addr, addr, size_of(addr));
	j.group = (uintptr_t)g;
	j.send_only = g->send_only;
	pthread_mutex_lock(&cm_mutex);
	g->next = id->groups;
	id->groups = g;
	pthread_mutex_unlock(&cm_mutex);
	rc = CM_CALL(id, cm_join, &j);
	pthread_mutex_lock(&cm_mutex);
	g->handle = j.handle;
	if (rc) {
		for (struct cm_group **p = &id->groups; *p; p = &(*p)->next) {
			if (*p == g) {
				*p = g->next;
				break;
			}
		}
		free(g);
	}
	pthread_mutex_unlock(&cm_mutex);
	return rc;
}

int rdma_join_multicast_ex(struct rdma_cm_id *ibid, struct rdma_cm_join_mc_attr_ex *a, void *context)
{
	int rc;

	if (a->comp_mask >= RDMA_CM_JOIN_MC_ATTR_RESERVED)
		return cm_fail(ENOTSUP);
	if (a->comp_mask != (RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS) || a->join_flags >= RDMA_MC_JOIN_FLAG_RESERVED)
		return cm_fail(EINVAL);
	rc = join(cm_id(ibid), a->addr, a->join_flags, context);
	return rc ? cm_fail(rc) : cm_wait(cm_id(ibid));
}

int rdma_join_multicast(struct rdma_cm_id *ibid, struct sockaddr *addr, void *context)
{
	int rc = join(cm_id(ibid), addr, RDMA_MC_JOIN_FLAG_FULLMEMBER, context);

	return rc ? cm_fail(rc) : cm_wait(cm_id(ibid));
}

/* cm_joined is for the event of a join. */
int cm_joined(struct cm_group *g, const struct rdma_cm_event *ev)
{
	int rc;

	g->mgid = ev->param.ud.ah_attr.grh.dgid;
	if (!g->id->id.qp || g->send_only)
		return 0;
	rc = ibv_attach_mcast(g->id->id.qp, &g->mgid, 0);
	g->attached = !rc;
	return rc;
}

/* leave ends a group that is in no list any more. */
static int leave(struct cm_group *g)
{
	int rc = 0;

	if (g->attached && g->id->id.qp)
		rc = ibv_detach_mcast(g->id->id.qp, &g->mgid, 0);
	if (!g->id->dev->dv->forked())
		cm_engine(g->id)->destroy(g->handle);
	if (g->id->sync && g->id->id.event && ((struct cm_event *)g->id->id.event)->group == g) {
		rdma_ack_cm_event(g->id->id.event); /* of the join, which waited for it */
		g->id->id.event = NULL;
	}
	cm_settle(&g->delivered, &g->acked);
	free(g);
	return rc;
}

int rdma_leave_multicast(struct rdma_cm_id *ibid, struct sockaddr *addr)
{
	struct cm_id *id = cm_id(ibid);
	size_t len = size_of(addr);
	struct cm_group **p, *g;

	if (!len)
		return cm_fail(EINVAL);
	pthread_mutex_lock(&cm_mutex);
	for (p = &id->groups; (g = *p); p = &g->next) {
		if (!memcmp(&g->addr, addr, len))
			break;
	}
	if (g)
		*p = g->next;
	pthread_mutex_unlock(&cm_mutex);
	return cm_fail(g ? leave(g) : EADDRNOTAVAIL);
}

/* cm_leave_all is for an identifier that ends. */
void cm_leave_all(struct cm_id *id)
{
	struct cm_group *g;

	while ((g = id->groups)) {
		id->groups = g->next;
		leave(g);
	}
}
