/* SPDX-License-Identifier: Apache-2.0
 *
 * Asynchronous events. The context's descriptor holds one token for each. */
#include <poll.h>
#include <unistd.h>

#include "tv.h"

static enum { OF_PORT, OF_CQ, OF_QP, OF_SRQ } object_of(enum ibv_event_type t)
{
	switch (t) {
	case IBV_EVENT_CQ_ERR:
		return OF_CQ;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		return OF_QP;
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		return OF_SRQ;
	default:
		return OF_PORT;
	}
}

int ibv_get_async_event(struct ibv_context *ctx, struct ibv_async_event *ev)
{
	struct tv_ctx *c = tv_ctx(ctx);
	struct pollfd p = { .fd = ctx->async_fd, .events = POLLIN };
	struct tv_event e;
	uint64_t token;
	void *obj;
	int rc;

	TV_ALIVE(-1);
	do {
		if (poll(&p, 1, 0) == 0)
			tv_e->rest(c->handle);
		if (read(ctx->async_fd, &token, sizeof(token)) != sizeof(token))
			return -1;
		pthread_mutex_lock(&c->events);
		rc = tv_e->event_take(c->handle, &e);
		if (!rc) {
			ev->event_type = e.type;
			obj = (void *)(uintptr_t)e.cookie;
			switch (object_of(e.type)) {
			case OF_CQ:
				ev->element.cq = obj;
				((struct tv_cq *)obj)->async_delivered++;
				break;
			case OF_QP:
				ev->element.qp = obj;
				((struct tv_qp *)obj)->delivered++;
				break;
			case OF_SRQ:
				ev->element.srq = obj;
				((struct tv_srq *)obj)->delivered++;
				break;
			case OF_PORT:
				ev->element.port_num = 1;
			}
		}
		pthread_mutex_unlock(&c->events);
	} while (rc == EAGAIN); /* its object was destroyed meanwhile */
	if (rc) {
		errno = rc;
		return -1;
	}
	return 0;
}

static void ack(pthread_mutex_t *m, pthread_cond_t *c, uint32_t *n)
{
	pthread_mutex_lock(m);
	++*n;
	pthread_cond_signal(c);
	pthread_mutex_unlock(m);
}

void ibv_ack_async_event(struct ibv_async_event *ev)
{
	switch (object_of(ev->event_type)) {
	case OF_CQ:
		ack(&ev->element.cq->mutex, &ev->element.cq->cond, &ev->element.cq->async_events_completed);
		break;
	case OF_QP:
		ack(&ev->element.qp->mutex, &ev->element.qp->cond, &ev->element.qp->events_completed);
		break;
	case OF_SRQ:
		ack(&ev->element.srq->mutex, &ev->element.srq->cond, &ev->element.srq->events_completed);
		break;
	case OF_PORT:
		break;
	}
}

TV_LATEST(ibv_ack_async_event);
TV_LATEST(ibv_get_async_event);
