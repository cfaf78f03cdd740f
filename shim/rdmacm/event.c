/* SPDX-License-Identifier: Apache-2.0
 *
 * Event channels. A channel's descriptor is an eventfd with a token for each event, so that
 * programs may poll it, and have it not block. */
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "cm.h"

struct rdma_event_channel *rdma_create_event_channel(void)
{
	struct cm_device *dev = cm_device_get();
	struct cm_channel *c;
	int rc;

	if (!dev)
		return NULL;
	c = calloc(1, sizeof(*c));
	if (!c) {
		cm_device_put(dev);
		errno = ENOMEM;
		return NULL;
	}
	c->dev = dev;
	c->ch.fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	rc = c->ch.fd < 0 ? errno : dev->dv->forked() ? EIO : dev->dv->engine->cm_channel(dev->ctx, c->ch.fd, &c->handle);
	if (rc) {
		if (c->ch.fd >= 0)
			close(c->ch.fd);
		free(c);
		cm_device_put(dev);
		errno = rc;
		return NULL;
	}
	return &c->ch;
}

void rdma_destroy_event_channel(struct rdma_event_channel *ch)
{
	struct cm_channel *c = (struct cm_channel *)ch;

	if (!c->dev->dv->forked())
		c->dev->dv->engine->destroy(c->handle);
	close(ch->fd);
	cm_device_put(c->dev);
	free(c);
}

static void ah_out(struct ibv_ah_attr *to, const struct tv_ah_attr *a)
{
	*to = (struct ibv_ah_attr){ .is_global = 1, .port_num = a->port_num, .sl = a->sl };
	memcpy(&to->grh.dgid, a->dgid, 16);
	to->grh.sgid_index = a->sgid_index;
	to->grh.hop_limit = a->hop_limit;
	to->grh.traffic_class = a->traffic_class;
	to->grh.flow_label = a->flow_label;
}

/* params fills in what the other end has said. */
static void params(struct cm_event *e, const struct tv_cm_event *t)
{
	const struct tv_cm_conn *c = &t->conn;
	struct rdma_cm_event *ev = &e->event;

	memcpy(e->private_data, c->private_data, c->private_len);
	if (t->datagram || (e->counted && e->counted->id.qp_type == IBV_QPT_UD)) {
		struct rdma_ud_param *u = &ev->param.ud;

		u->private_data = c->private_len ? e->private_data : NULL;
		u->private_data_len = c->private_len;
		u->qp_num = c->qpn;
		u->qkey = c->qkey;
		ah_out(&u->ah_attr, &t->ah);
		return;
	}
	struct rdma_conn_param *p = &ev->param.conn;

	p->private_data = c->private_len ? e->private_data : NULL;
	p->private_data_len = c->private_len;
	p->responder_resources = c->responder_resources;
	p->initiator_depth = c->initiator_depth;
	p->flow_control = c->flow_control;
	p->retry_count = c->retry_count;
	p->rnr_retry_count = c->rnr_retry_count;
	p->srq = c->srq;
	p->qp_num = c->qpn;
}

/* done counts an event that the program is not told of, or has acknowledged. */
static void done(struct cm_event *e)
{
	pthread_mutex_lock(&cm_mutex);
	if (e->group)
		e->group->acked++;
	else
		e->counted->acked++;
	pthread_cond_broadcast(&cm_acked);
	pthread_mutex_unlock(&cm_mutex);
	free(e);
}

/* take takes the channel's next event, and counts it. */
static int take(struct cm_channel *c, struct cm_event *e, struct tv_cm_event *t)
{
	int rc;

	pthread_mutex_lock(&cm_mutex);
	rc = c->dev->dv->engine->cm_take(c->handle, t);
	if (!rc && t->group) {
		e->group = (struct cm_group *)(uintptr_t)t->group;
		e->group->delivered++;
	} else if (!rc) {
		e->counted = (struct cm_id *)(uintptr_t)t->id;
		e->counted->delivered++;
	}
	pthread_mutex_unlock(&cm_mutex);
	return rc;
}

static void ece(struct cm_id *id, const struct tv_cm_event *t)
{
	id->remote_ece = (struct ibv_ece){ .vendor_id = t->conn.ece_vendor, .options = t->conn.ece_options };
}

/* act does what the library has to do about an event; false if the program is not to see
 * it. */
static bool act(struct cm_event *e, const struct tv_cm_event *t)
{
	struct rdma_cm_event *ev = &e->event;
	struct cm_id *id = cm_id(ev->id), *l;
	int rc;

	switch (ev->event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		rc = cm_query(id);
		if (rc) {
			ev->event = ev->event == RDMA_CM_EVENT_ADDR_RESOLVED ? RDMA_CM_EVENT_ADDR_ERROR : RDMA_CM_EVENT_ROUTE_ERROR;
			ev->status = -rc;
		}
		break;
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		l = id;
		id = cm_id_of_request(l, t->request);
		if (!id)
			return false; /* it is rejected */
		ev->listen_id = &l->id;
		ev->id = &id->id;
		id->responder = t->conn.responder_resources;
		id->initiator = t->conn.initiator_depth;
		ece(id, t);
		break;
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
		id->responder = t->conn.responder_resources;
		id->initiator = t->conn.initiator_depth;
		ece(id, t);
		if (!ev->id->qp)
			break;
		rc = cm_connected(id);
		ev->event = rc ? RDMA_CM_EVENT_CONNECT_ERROR : RDMA_CM_EVENT_ESTABLISHED;
		ev->status = -rc;
		break;
	case RDMA_CM_EVENT_REJECTED:
		if (id->failed)
			return false;
		cm_modify_err(id);
		break;
	case RDMA_CM_EVENT_DISCONNECTED:
		if (id->failed)
			return false;
		break;
	case RDMA_CM_EVENT_MULTICAST_JOIN:
		ev->param.ud.private_data = e->group->context;
		rc = cm_joined(e->group, ev);
		if (rc) {
			ev->event = RDMA_CM_EVENT_MULTICAST_ERROR;
			ev->status = -rc;
		}
		break;
	default:
		break;
	}
	return true;
}

int rdma_get_cm_event(struct rdma_event_channel *ch, struct rdma_cm_event **out)
{
	struct cm_channel *c = (struct cm_channel *)ch;
	struct pollfd p = { .fd = ch->fd, .events = POLLIN };
	struct tv_cm_event t;
	struct cm_event *e;
	uint64_t token;
	int rc;

	if (!out)
		return cm_fail(EINVAL);
	for (;;) {
		if (c->dev->dv->forked())
			return cm_fail(EIO);
		if (poll(&p, 1, 0) == 0)
			c->dev->dv->engine->rest(c->dev->ctx);
		if (read(ch->fd, &token, sizeof(token)) != sizeof(token))
			return -1;
		e = calloc(1, sizeof(*e));
		if (!e) {
			token = 1; /* the event stays */
			return cm_fail(write(ch->fd, &token, sizeof(token)) == sizeof(token) ? ENOMEM : errno);
		}
		rc = take(c, e, &t);
		if (rc) {
			free(e);
			if (rc == EAGAIN)
				continue; /* it went with its identifier */
			return cm_fail(rc);
		}
		e->event.id = e->group ? &e->group->id->id : &e->counted->id;
		e->event.event = t.type;
		e->event.status = t.status;
		params(e, &t);
		if (act(e, &t)) {
			*out = &e->event;
			return 0;
		}
		done(e);
	}
}

int rdma_ack_cm_event(struct rdma_cm_event *ev)
{
	if (!ev)
		return cm_fail(EINVAL);
	done((struct cm_event *)ev);
	return 0;
}

/* cm_wait is the end of a call: with an identifier that has no channel it waits for the event
 * that answers, and fails as that does. */
int cm_wait(struct cm_id *id)
{
	struct rdma_cm_event *ev;
	int rc;

	if (!id->sync)
		return 0;
	if (id->id.event) {
		rdma_ack_cm_event(id->id.event);
		id->id.event = NULL;
	}
	rc = rdma_get_cm_event(id->id.channel, &id->id.event);
	if (rc)
		return rc;
	ev = id->id.event;
	if (ev->status && ev->event == RDMA_CM_EVENT_REJECTED)
		return cm_fail(ECONNREFUSED);
	return cm_fail(ev->status < 0 ? -ev->status : ev->status);
}

const char *rdma_event_str(enum rdma_cm_event_type event)
{
	static const char *const names[] = {
		[RDMA_CM_EVENT_ADDR_RESOLVED] = "RDMA_CM_EVENT_ADDR_RESOLVED",
		[RDMA_CM_EVENT_ADDR_ERROR] = "RDMA_CM_EVENT_ADDR_ERROR",
		[RDMA_CM_EVENT_ROUTE_RESOLVED] = "RDMA_CM_EVENT_ROUTE_RESOLVED",
		[RDMA_CM_EVENT_ROUTE_ERROR] = "RDMA_CM_EVENT_ROUTE_ERROR",
		[RDMA_CM_EVENT_CONNECT_REQUEST] = "RDMA_CM_EVENT_CONNECT_REQUEST",
		[RDMA_CM_EVENT_CONNECT_RESPONSE] = "RDMA_CM_EVENT_CONNECT_RESPONSE",
		[RDMA_CM_EVENT_CONNECT_ERROR] = "RDMA_CM_EVENT_CONNECT_ERROR",
		[RDMA_CM_EVENT_UNREACHABLE] = "RDMA_CM_EVENT_UNREACHABLE",
		[RDMA_CM_EVENT_REJECTED] = "RDMA_CM_EVENT_REJECTED",
		[RDMA_CM_EVENT_ESTABLISHED] = "RDMA_CM_EVENT_ESTABLISHED",
		[RDMA_CM_EVENT_DISCONNECTED] = "RDMA_CM_EVENT_DISCONNECTED",
		[RDMA_CM_EVENT_DEVICE_REMOVAL] = "RDMA_CM_EVENT_DEVICE_REMOVAL",
		[RDMA_CM_EVENT_MULTICAST_JOIN] = "RDMA_CM_EVENT_MULTICAST_JOIN",
		[RDMA_CM_EVENT_MULTICAST_ERROR] = "RDMA_CM_EVENT_MULTICAST_ERROR",
		[RDMA_CM_EVENT_ADDR_CHANGE] = "RDMA_CM_EVENT_ADDR_CHANGE",
		[RDMA_CM_EVENT_TIMEWAIT_EXIT] = "RDMA_CM_EVENT_TIMEWAIT_EXIT",
	};

	return (unsigned int)event < sizeof(names) / sizeof(*names) ? names[event] : "UNKNOWN EVENT";
}
