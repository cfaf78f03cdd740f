/* SPDX-License-Identifier: Apache-2.0
 *
 * Completion queues and channels, and the extended way to poll. */
#include <endian.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "restart.h"
#include "tv.h"

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *ctx)
{
	struct tv_channel *ch;
	int rc;

	TV_THERE(ctx, NULL);
	ch = calloc(1, sizeof(*ch));
	if (!ch)
		return NULL;
	ch->ibv.context = ctx;
	ch->ibv.fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	rc = ch->ibv.fd < 0 ? errno : tv_e->create_channel(tv_ctx_handle(ctx), ch->ibv.fd, &ch->handle);
	if (rc) {
		if (ch->ibv.fd >= 0)
			close(ch->ibv.fd);
		free(ch);
		return tv_null(rc);
	}
	return &ch->ibv;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *ibch)
{
	struct tv_channel *ch = (struct tv_channel *)ibch;
	int rc;

	TV_ALIVE(EIO);
	rc = tv_e->destroy(ch->handle);
	if (rc)
		return tv_fail(rc);
	close(ch->ibv.fd);
	free(ch);
	return 0;
}

static struct tv_cq *create(struct ibv_context *ctx, uint32_t cqe, void *user, struct ibv_comp_channel *ch, int vector,
			    struct ibv_pd *parent)
{
	struct tv_cq_info info = { 0 };
	struct tv_cq *cq;
	bool custom;
	int rc;

	TV_THERE(ctx, NULL);
	if (cqe == 0 || vector < 0 || vector >= ctx->num_comp_vectors)
		return tv_null(EINVAL);
	cq = tv_object(parent, sizeof(*cq), TV_RESOURCE_CQ, &custom);
	if (!cq)
		return NULL;
	rc = tv_e->create_cq(tv_ctx_handle(ctx), cqe, ch ? ((struct tv_channel *)ch)->handle : 0, (uintptr_t)cq, &info);
	if (rc) {
		tv_object_free(parent, cq, TV_RESOURCE_CQ, custom);
		return tv_null(rc);
	}
	cq->custom = custom;
	cq->parent = parent;
	if (parent)
		__atomic_fetch_add(&((struct tv_pd *)parent)->parent->cqs, 1, __ATOMIC_ACQ_REL);
	cq->handle = info.handle;
	tv_ring_set(&cq->ring, info.ring);
	tv_lock_init(&cq->lock, tv_alone(parent));
	cq->ibv.context = ctx;
	cq->ibv.channel = ch;
	cq->ibv.cq_context = user;
	cq->ibv.handle = info.handle;
	cq->ibv.cqe = cq->ring.mask + 1;
	pthread_mutex_init(&cq->ibv.mutex, NULL);
	pthread_cond_init(&cq->ibv.cond, NULL);
	if (ch) {
		pthread_mutex_lock(&ctx->mutex);
		ch->refcnt++;
		pthread_mutex_unlock(&ctx->mutex);
	}
	return cq;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *ctx, int cqe, void *user, struct ibv_comp_channel *ch, int vector)
{
	struct tv_cq *cq;

	if (cqe < 1)
		return tv_null(EINVAL);
	cq = create(ctx, cqe, user, ch, vector, NULL);
	return cq ? &cq->ibv : NULL;
}

struct ibv_cq_ex *tv_create_cq_ex(struct ibv_context *ctx, struct ibv_cq_init_attr_ex *a)
{
	const uint64_t offered = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
				 IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK | IBV_WC_EX_WITH_FLOW_TAG;
	struct ibv_pd *parent = NULL;
	uint32_t flags = 0;
	struct tv_cq *cq;

	if (a->comp_mask & ~(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD))
		return tv_null(EINVAL);
	if (a->wc_flags & ~offered)
		return tv_null(EOPNOTSUPP);
	if (a->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS)
		flags = a->flags;
	if (flags & ~(IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN))
		return tv_null(EOPNOTSUPP);
	if (a->comp_mask & IBV_CQ_INIT_ATTR_MASK_PD)
		parent = a->parent_domain;
	if (parent && (!((struct tv_pd *)parent)->parent || parent->context != ctx))
		return tv_null(EINVAL);
	if (a->cqe > INT32_MAX)
		return tv_null(EINVAL);
	cq = create(ctx, a->cqe, a->cq_context, a->channel, a->comp_vector, parent);
	if (!cq)
		return NULL;
	if (flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED)
		cq->lock.off = true;
	tv_cq_poller(cq, a->wc_flags);
	if (flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN)
		tv_e->modify_cq(cq->handle, &(struct tv_cq_attr){ .mask = TV_CQ_IGNORE_OVERRUN });
	return &cq->ex;
}

int tv_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *a)
{
	struct tv_cq_attr t = { .mask = TV_CQ_MODERATE, .count = a->moderate.cq_count, .period_us = a->moderate.cq_period };

	TV_THERE(cq->context, EIO);
	if (a->attr_mask & ~IBV_CQ_ATTR_MODERATE)
		return EOPNOTSUPP;
	return a->attr_mask ? tv_e->modify_cq(((struct tv_cq *)cq)->handle, &t) : 0;
}

int ibv_resize_cq(struct ibv_cq *ibcq, int cqe)
{
	struct tv_cq *cq = (struct tv_cq *)ibcq;
	struct tv_cq_info info = { 0 };
	int rc;

	TV_THERE(ibcq->context, EIO);
	if (cqe < 1)
		return tv_fail(EINVAL);
	tv_lock(&cq->lock);
	rc = tv_e->resize_cq(cq->handle, cqe, &info);
	if (!rc) {
		tv_ring_set(&cq->ring, info.ring);
		cq->ibv.cqe = cq->ring.mask + 1;
	}
	tv_unlock(&cq->lock);
	return tv_fail(rc);
}

int ibv_destroy_cq(struct ibv_cq *ibcq)
{
	struct tv_cq *cq = (struct tv_cq *)ibcq;
	struct tv_ctx *c = tv_ctx(ibcq->context);
	struct ibv_pd *parent;
	uint32_t comp, async;
	int rc;

	TV_ALIVE(EIO);
	rc = tv_e->destroy(cq->handle);
	if (rc)
		return tv_fail(rc);
	/* No event comes any more; those that were taken are to be acknowledged. */
	pthread_mutex_lock(&c->events);
	comp = cq->comp_delivered;
	async = cq->async_delivered;
	pthread_mutex_unlock(&c->events);
	pthread_mutex_lock(&cq->ibv.mutex);
	while (cq->ibv.comp_events_completed != comp || cq->ibv.async_events_completed != async)
		pthread_cond_wait(&cq->ibv.cond, &cq->ibv.mutex);
	pthread_mutex_unlock(&cq->ibv.mutex);
	if (cq->ibv.channel) {
		pthread_mutex_lock(&ibcq->context->mutex);
		cq->ibv.channel->refcnt--;
		pthread_mutex_unlock(&ibcq->context->mutex);
	}
	tv_lock_end(&cq->lock);
	pthread_mutex_destroy(&cq->ibv.mutex);
	pthread_cond_destroy(&cq->ibv.cond);
	parent = cq->parent;
	tv_object_free(parent, cq, TV_RESOURCE_CQ, cq->custom);
	if (parent)
		__atomic_fetch_sub(&((struct tv_pd *)parent)->parent->cqs, 1, __ATOMIC_ACQ_REL);
	return 0;
}

struct lead {
	tv_handle channel;
	int32_t fd;
};

static void end_lead(void *arg)
{
	struct lead *l = arg;

	tv_e->end_lead(l->channel, l->fd);
}

/* await sleeps until the channel's descriptor is readable, and takes in what comes for the
 * device meanwhile, if no other thread does: that one would have to wake this one. */
static int await(struct tv_channel *ch)
{
	struct lead l = { .channel = ch->handle, .fd = tv_e->lead(ch->handle) };
	struct pollfd p[2] = { { .fd = ch->ibv.fd, .events = POLLIN }, { .fd = l.fd, .events = POLLIN } };
	int n;

	if (l.fd == TV_LEAD_READY)
		return 0;
	pthread_cleanup_push(end_lead, &l);
	do {
		do
			n = poll(p, l.fd < 0 ? 1 : 2, -1);
		while (n < 0 && errno == EINTR && tv_restarted());
	} while (n > 0 && !p[0].revents && tv_e->led(ch->handle));
	pthread_cleanup_pop(1);
	return n < 0 ? -1 : 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *ibch, struct ibv_cq **out, void **user)
{
	struct tv_channel *ch = (struct tv_channel *)ibch;
	struct tv_ctx *c = tv_ctx(ibch->context);
	struct pollfd p = { .fd = ibch->fd, .events = POLLIN };
	tv_cookie cookie = 0;
	uint64_t token;
	struct tv_cq *cq;
	int rc;

	TV_ALIVE(-1);
	do {
		if (poll(&p, 1, 0) == 0) {
			if (fcntl(ibch->fd, F_GETFL) & O_NONBLOCK)
				tv_e->rest(c->handle);
			else if (await(ch))
				return -1;
		}
		if (read(ibch->fd, &token, sizeof(token)) != sizeof(token))
			return -1;
		pthread_mutex_lock(&c->events);
		rc = tv_e->chan_take(ch->handle, &cookie);
		cq = (struct tv_cq *)(uintptr_t)cookie;
		if (!rc)
			cq->comp_delivered++;
		pthread_mutex_unlock(&c->events);
	} while (rc == EAGAIN); /* its CQ was destroyed meanwhile */
	if (rc) {
		errno = rc;
		return -1;
	}
	*out = &cq->ibv;
	*user = cq->ibv.cq_context;
	return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int n)
{
	pthread_mutex_lock(&cq->mutex);
	cq->comp_events_completed += n;
	pthread_cond_signal(&cq->cond);
	pthread_mutex_unlock(&cq->mutex);
}

/* Extended polling. The lock is held from a start_poll that found something to
 * end_poll; the consumer index moves in end_poll. */

static void show(struct tv_cq *cq)
{
	cq->cur = tv_slot(&cq->ring, cq->next++);
	cq->ex.wr_id = cq->cur->id;
	cq->ex.status = cq->cur->status;
}

static bool more(struct tv_cq *cq) { return tv_load(&cq->ring, TV_RING_PROD) != cq->next; }

static int start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *a)
{
	struct tv_cq *cq = (struct tv_cq *)ex;

	if (tv_forked)
		return EIO;
	if (a && a->comp_mask)
		return EINVAL;
	for (int tries = 0; tries < 2; tries++) {
		bool armed;

		tv_lock(&cq->lock);
		cq->next = tv_load(&cq->ring, TV_RING_CONS);
		if (more(cq)) {
			show(cq);
			return 0;
		}
		armed = tv_load(&cq->ring, TV_RING_ARM) != TV_ARM_NONE;
		tv_unlock(&cq->lock);
		if (!tries)
			tv_e->progress(cq->handle, armed);
	}
	return ENOENT;
}

static int next_poll(struct ibv_cq_ex *ex)
{
	struct tv_cq *cq = (struct tv_cq *)ex;

	if (!more(cq))
		return ENOENT;
	show(cq);
	return 0;
}

static void end_poll(struct ibv_cq_ex *ex)
{
	struct tv_cq *cq = (struct tv_cq *)ex;

	tv_store(&cq->ring, TV_RING_CONS, cq->next);
	cq->cur = NULL;
	tv_unlock(&cq->lock);
}

#define CUR(ex) (((struct tv_cq *)(ex))->cur)
static enum ibv_wc_opcode rd_opcode(struct ibv_cq_ex *ex) { return CUR(ex)->opcode; }
static uint32_t rd_vendor_err(struct ibv_cq_ex *ex) { return CUR(ex)->vendor_err; }
static uint32_t rd_byte_len(struct ibv_cq_ex *ex) { return CUR(ex)->byte_len; }
static __be32 rd_imm(struct ibv_cq_ex *ex)
{
	return CUR(ex)->flags & IBV_WC_WITH_INV ? CUR(ex)->imm_or_key : htobe32(CUR(ex)->imm_or_key);
}
static uint32_t rd_qp_num(struct ibv_cq_ex *ex) { return CUR(ex)->qpn; }
static uint32_t rd_src_qp(struct ibv_cq_ex *ex) { return CUR(ex)->src_qp; }
static unsigned int rd_flags(struct ibv_cq_ex *ex) { return CUR(ex)->flags; }
static uint32_t rd_slid(struct ibv_cq_ex *ex) { return CUR(ex)->slid; }
static uint8_t rd_sl(struct ibv_cq_ex *ex) { return CUR(ex)->sl; }
static uint8_t rd_path_bits(struct ibv_cq_ex *ex) { return CUR(ex)->path_bits; }
static uint32_t rd_flow_tag(struct ibv_cq_ex *ex) { return CUR(ex)->flow_tag; }
static uint64_t rd_ts(struct ibv_cq_ex *ex) { return CUR(ex)->timestamp; }
static uint64_t rd_wall(struct ibv_cq_ex *ex) { return CUR(ex)->timestamp + ((struct tv_cq *)ex)->wall; }

void tv_cq_poller(struct tv_cq *cq, uint64_t wc_flags)
{
	struct timespec now;
	uint64_t ns = 0;

	cq->is_ex = true;
	cq->ex.start_poll = start_poll;
	cq->ex.next_poll = next_poll;
	cq->ex.end_poll = end_poll;
	cq->ex.read_opcode = rd_opcode;
	cq->ex.read_vendor_err = rd_vendor_err;
	cq->ex.read_wc_flags = rd_flags;
	if (wc_flags & IBV_WC_EX_WITH_BYTE_LEN)
		cq->ex.read_byte_len = rd_byte_len;
	if (wc_flags & IBV_WC_EX_WITH_IMM)
		cq->ex.read_imm_data = rd_imm;
	if (wc_flags & IBV_WC_EX_WITH_QP_NUM)
		cq->ex.read_qp_num = rd_qp_num;
	if (wc_flags & IBV_WC_EX_WITH_SRC_QP)
		cq->ex.read_src_qp = rd_src_qp;
	if (wc_flags & IBV_WC_EX_WITH_SLID)
		cq->ex.read_slid = rd_slid;
	if (wc_flags & IBV_WC_EX_WITH_SL)
		cq->ex.read_sl = rd_sl;
	if (wc_flags & IBV_WC_EX_WITH_DLID_PATH_BITS)
		cq->ex.read_dlid_path_bits = rd_path_bits;
	if (wc_flags & IBV_WC_EX_WITH_FLOW_TAG)
		cq->ex.read_flow_tag = rd_flow_tag;
	if (wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)
		cq->ex.read_completion_ts = rd_ts;
	if (wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) {
		cq->ex.read_completion_wallclock_ns = rd_wall;
		clock_gettime(CLOCK_REALTIME, &now);
		tv_e->query_clock(tv_ctx_handle(cq->ex.context), &ns);
		cq->wall = now.tv_sec * 1000000000 + now.tv_nsec - (int64_t)ns;
	}
}

TV_LATEST(ibv_ack_cq_events);
TV_LATEST(ibv_create_cq);
TV_LATEST(ibv_destroy_cq);
TV_LATEST(ibv_get_cq_event);
TV_LATEST(ibv_resize_cq);
