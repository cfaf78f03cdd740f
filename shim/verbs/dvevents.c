/* SPDX-License-Identifier: Apache-2.0
 *
 * Channels for events of regions, which libtapverbs.so.1 offers. As with those of queue
 * pairs, an event that was taken is to be acknowledged before its region can end. */
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "tv.h"

struct tv_dv_channel *tv_dv_channel_new(struct ibv_context *ctx, uint64_t mask)
{
	struct tv_dv_channel *ch = calloc(1, sizeof(*ch));
	int rc;

	if (!ch)
		return NULL;
	ch->context = ctx;
	ch->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	rc = ch->fd < 0 ? errno : tv_e->create_dv_channel(tv_ctx_handle(ctx), ch->fd, mask, &ch->handle);
	if (rc) {
		if (ch->fd >= 0)
			close(ch->fd);
		free(ch);
		return tv_null(rc);
	}
	return ch;
}

int tv_dv_get_event(struct tv_dv_channel *ch, struct tv_dv_event *ev, struct ibv_mr **out)
{
	struct tv_ctx *c = tv_ctx(ch->context);
	struct tv_mr *mr = NULL;
	uint64_t token;
	int rc;

	if (tv_forked)
		return EIO;
	do {
		if (read(ch->fd, &token, sizeof(token)) != sizeof(token))
			return errno;
		pthread_mutex_lock(&c->events);
		rc = tv_e->dv_take(ch->handle, ev);
		if (!rc && ev->has_object) {
			mr = (struct tv_mr *)(uintptr_t)ev->cookie;
			mr->delivered++;
		}
		pthread_mutex_unlock(&c->events);
	} while (rc == EAGAIN); /* its region was deregistered meanwhile */
	*out = mr ? &mr->ibv : NULL;
	return rc;
}

void tv_dv_ack_event(struct ibv_mr *ibmr)
{
	struct tv_ctx *c = tv_ctx(ibmr->context);

	pthread_mutex_lock(&c->events);
	((struct tv_mr *)ibmr)->acked++;
	pthread_cond_broadcast(&c->acked);
	pthread_mutex_unlock(&c->events);
}

int tv_dv_channel_end(struct tv_dv_channel *ch)
{
	int rc = tv_forked ? EIO : tv_e->destroy(ch->handle);

	if (rc)
		return rc;
	close(ch->fd);
	free(ch);
	return 0;
}

/* tv_mr_unacked says whether events of a region were taken and are not acknowledged. */
int tv_mr_unacked(struct ibv_mr *ibmr)
{
	struct tv_ctx *c = tv_ctx(ibmr->context);
	struct tv_mr *mr = (struct tv_mr *)ibmr;
	int rc;

	pthread_mutex_lock(&c->events);
	rc = mr->acked != mr->delivered;
	pthread_mutex_unlock(&c->events);
	return rc;
}

/* tv_mr_settle waits until the events of a region that is no more are acknowledged. */
void tv_mr_settle(struct tv_mr *mr)
{
	struct tv_ctx *c = tv_ctx(mr->ibv.context);

	pthread_mutex_lock(&c->events);
	while (mr->acked != mr->delivered)
		pthread_cond_wait(&c->acked, &c->events);
	pthread_mutex_unlock(&c->events);
}
