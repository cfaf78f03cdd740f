/* SPDX-License-Identifier: Apache-2.0
 *
 * Identifiers, and their options. */
#include <arpa/inet.h>

#include "cm.h"

static struct cm_id *id_alloc(struct cm_device *dev, struct rdma_event_channel *ch, enum rdma_port_space ps, enum ibv_qp_type type)
{
	struct cm_id *id = calloc(1, sizeof(*id));

	if (!id)
		return NULL;
	id->id.channel = ch;
	id->id.ps = ps;
	id->id.qp_type = type;
	id->dev = dev;
	cm_device_ref(dev);
	return id;
}

static void id_free(struct cm_id *id)
{
	cm_device_put(id->dev);
	free(id->qp_attr);
	free(id->connect);
	free(id);
}

/* cm_id_new makes an identifier; with no channel it gets one of its own, and its calls wait. */
int cm_id_new(struct rdma_event_channel *ch, enum rdma_port_space ps, enum ibv_qp_type type, void *context, struct rdma_cm_id **out)
{
	struct rdma_event_channel *own = ch ? NULL : rdma_create_event_channel();
	struct cm_channel *c = (struct cm_channel *)(ch ? ch : own);
	struct cm_id *id;
	int rc;

	if (!c)
		return -1;
	id = id_alloc(c->dev, &c->ch, ps, type);
	if (!id) {
		rc = ENOMEM;
		goto fail;
	}
	id->id.context = context;
	id->sync = !ch;
	rc = c->dev->dv->forked() ? EIO : cm_engine(id)->cm_create(c->handle, (uintptr_t)id, ps, type, &id->handle);
	if (rc) {
		id_free(id);
		goto fail;
	}
	*out = &id->id;
	return 0;
fail:
	if (own)
		rdma_destroy_event_channel(own);
	return cm_fail(rc);
}

int rdma_create_id(struct rdma_event_channel *ch, struct rdma_cm_id **id, void *context, enum rdma_port_space ps)
{
	switch (ps) {
	case RDMA_PS_TCP:
	case RDMA_PS_IB:
		return cm_id_new(ch, ps, IBV_QPT_RC, context, id);
	case RDMA_PS_UDP:
	case RDMA_PS_IPOIB:
		return cm_id_new(ch, ps, IBV_QPT_UD, context, id);
	}
	return cm_fail(EINVAL);
}

/* cm_id_of_request makes the identifier that a request comes with; NULL with errno. */
struct cm_id *cm_id_of_request(struct cm_id *l, tv_handle handle)
{
	struct cm_id *id = id_alloc(l->dev, l->id.channel, l->id.ps, l->id.qp_type);
	int rc;

	if (!id) {
		cm_engine(l)->destroy(handle);
		return NULL;
	}
	id->handle = handle;
	id->id.context = l->id.context;
	rc = CM_CALL(id, cm_adopt, (uintptr_t)id);
	if (!rc)
		rc = cm_query(id);
	if (!rc && l->sync)
		rc = rdma_migrate_id(&id->id, NULL) ? errno : 0;
	if (rc) {
		cm_engine(l)->destroy(handle);
		id_free(id);
		errno = rc;
		return NULL;
	}
	return id;
}

/* cm_settle waits until all events that were taken are acknowledged. */
void cm_settle(const uint32_t *delivered, const uint32_t *acked)
{
	pthread_mutex_lock(&cm_mutex);
	while (*delivered != *acked)
		pthread_cond_wait(&cm_acked, &cm_mutex);
	pthread_mutex_unlock(&cm_mutex);
}

int rdma_destroy_id(struct rdma_cm_id *ibid)
{
	struct cm_id *id = cm_id(ibid);
	int rc;

	cm_leave_all(id);
	rc = CM_CALL(id, destroy);
	if (rc && rc != EIO)
		return cm_fail(rc);
	if (ibid->event)
		rdma_ack_cm_event(ibid->event);
	cm_settle(&id->delivered, &id->acked);
	if (id->sync)
		rdma_destroy_event_channel(ibid->channel);
	id_free(id);
	return 0;
}

int rdma_migrate_id(struct rdma_cm_id *ibid, struct rdma_event_channel *ch)
{
	struct cm_id *id = cm_id(ibid);
	struct rdma_event_channel *old = ibid->channel, *own = NULL;
	int rc;

	if (!ch) {
		if (id->sync)
			return 0;
		ch = own = rdma_create_event_channel();
		if (!ch)
			return -1;
	}
	rc = CM_CALL(id, cm_migrate, ((struct cm_channel *)ch)->handle);
	if (rc) {
		if (own)
			rdma_destroy_event_channel(own);
		return cm_fail(rc);
	}
	/* What was taken of the old channel is to be acknowledged before it is not the
	 * identifier's any more. */
	if (id->sync && ibid->event) {
		rdma_ack_cm_event(ibid->event);
		ibid->event = NULL;
	}
	cm_settle(&id->delivered, &id->acked);
	if (id->sync)
		rdma_destroy_event_channel(old);
	id->sync = own != NULL;
	ibid->channel = ch;
	return 0;
}

/* set_path takes a route from the program instead of resolving one. */
static int set_path(struct cm_id *id, const struct ibv_path_data *p, size_t len)
{
	const uint32_t want = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL;
	struct tv_cm_route r;
	uint32_t flow;

	if (!len || len % sizeof(*p))
		return EINVAL;
	for (; len; p++, len -= sizeof(*p)) {
		if (p->flags != want)
			continue;
		flow = ntohl(p->path.flowlabel_hoplimit);
		r = (struct tv_cm_route){
			.mtu = p->path.mtu & 0x3f, .hop_limit = flow & 0xff, .flow_label = flow >> 8 & 0xfffff,
			.traffic_class = p->path.tclass, .pkey = ntohs(p->path.pkey),
		};
		return CM_CALL(id, cm_resolve_route, &r);
	}
	return EINVAL;
}

int rdma_set_option(struct rdma_cm_id *ibid, int level, int name, void *val, size_t len)
{
	struct cm_id *id = cm_id(ibid);
	const bool wide = name == RDMA_OPTION_ID_REUSEADDR || name == RDMA_OPTION_ID_AFONLY;
	uint32_t v = 0;
	int rc;

	if (level == RDMA_OPTION_IB && name == RDMA_OPTION_IB_PATH) {
		rc = set_path(id, val, len);
		return rc ? cm_fail(rc) : cm_wait(id);
	}
	if (level != RDMA_OPTION_ID || name < RDMA_OPTION_ID_TOS || name > RDMA_OPTION_ID_ACK_TIMEOUT)
		return cm_fail(ENOSYS);
	if (len != (wide ? sizeof(int) : sizeof(uint8_t)))
		return cm_fail(EINVAL);
	if (wide)
		v = *(int *)val != 0;
	else
		v = *(uint8_t *)val;
	static const uint32_t option[] = {
		[RDMA_OPTION_ID_TOS] = TV_CM_TOS, [RDMA_OPTION_ID_REUSEADDR] = TV_CM_REUSEADDR,
		[RDMA_OPTION_ID_AFONLY] = TV_CM_AFONLY, [RDMA_OPTION_ID_ACK_TIMEOUT] = TV_CM_ACK_TIMEOUT,
	};
	return cm_fail(CM_CALL(id, cm_option, option[name], v));
}

int rdma_set_local_ece(struct rdma_cm_id *ibid, struct ibv_ece *ece)
{
	struct cm_id *id = cm_id(ibid);

	if (!ibid || ibid->qp || !ece || ece->comp_mask)
		return cm_fail(EINVAL);
	id->ece = *ece;
	return 0;
}

int rdma_get_remote_ece(struct rdma_cm_id *ibid, struct ibv_ece *ece)
{
	if (!ibid || ibid->qp || !ece)
		return cm_fail(EINVAL);
	*ece = cm_id(ibid)->remote_ece;
	return 0;
}
