/* SPDX-License-Identifier: Apache-2.0
 *
 * What a stream needs to move data, made when its device is known: CQ, queue pair, rings
 * and their regions, receives; and what the two ends tell each other of it. */
#include <byteswap.h>
#include <endian.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "rs.h"

#define IOMAP(s) ((volatile struct rs_mapping *)((s)->list + RS_PLACES))

static void *pages(size_t len)
{
	void *p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

static size_t sbuf_len(const struct rsock *s)
{
	return s->sbuf_size + RS_CTRL_ROOM * sizeof(struct rs_mapping);
}

/* rs_make_cq makes the one CQ of a socket, with its channel. */
int rs_make_cq(struct rsock *s, struct ibv_context *ctx, int entries)
{
	s->events = ibv_create_comp_channel(ctx);
	if (!s->events)
		return -1;
	if (fcntl(s->events->fd, F_SETFL, O_NONBLOCK))
		return -1;
	s->cq = ibv_create_cq(ctx, entries, NULL, s->events, 0);
	return s->cq ? 0 : -1;
}

void rs_free_cq(struct rsock *s)
{
	if (s->cq) {
		ibv_ack_cq_events(s->cq, s->unacked);
		ibv_destroy_cq(s->cq);
	}
	if (s->events)
		ibv_destroy_comp_channel(s->events);
}

static uint16_t clamp(uint16_t v, int max)
{
	if (max > RS_MAX_QUEUE)
		max = RS_MAX_QUEUE;
	if (v > max)
		v = max;
	return v < RS_MIN_QUEUE ? RS_MIN_QUEUE : v;
}

static int make_buffers(struct rsock *s, struct ibv_pd *pd)
{
	s->messages = calloc(s->rq_size + 1, sizeof(*s->messages));
	s->list_len = RS_PLACES * sizeof(*s->list) + s->iomap_size * sizeof(*s->iomap);
	s->list = pages(s->list_len);
	s->sbuf = pages(sbuf_len(s));
	s->rbuf = pages(s->rbuf_size);
	if (!s->messages || !s->list || !s->sbuf || !s->rbuf)
		return rs_error(ENOMEM);
	s->iomap = IOMAP(s);
	s->ctrl_buf = s->sbuf + s->sbuf_size;
	s->smr = ibv_reg_mr(pd, s->sbuf, sbuf_len(s), 0);
	if (!s->smr)
		return -1;
	s->list_mr = ibv_reg_mr(pd, (void *)s->list, s->list_len, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	if (!s->list_mr)
		return -1;
	s->rmr = ibv_reg_mr(pd, s->rbuf, s->rbuf_size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	return s->rmr ? 0 : -1;
}

/* rs_make_endpoint makes all of it on the device of the id. */
int rs_make_endpoint(struct rsock *s)
{
	struct ibv_recv_wr wr = {.wr_id = RS_WR_RECV}, *bad;
	struct ibv_qp_init_attr attr = {.qp_type = IBV_QPT_RC, .sq_sig_all = 1};
	struct ibv_device_attr dev;
	int err;

	err = ibv_query_device(s->id->verbs, &dev);
	if (err)
		return rs_error(err);
	s->sq_size = clamp(s->sq_size, dev.max_qp_wr);
	s->rq_size = clamp(s->rq_size, dev.max_qp_wr);
	if (s->sbuf_size < 2 * RS_LOW_WATER)
		s->sbuf_size = 2 * RS_LOW_WATER;
	s->rbuf_size = (s->rbuf_size + 1) & ~1u; /* two halves */
	if (s->rbuf_size < 2)
		s->rbuf_size = 2;
	if (rs_make_cq(s, s->id->verbs, s->sq_size + s->rq_size))
		return -1;
	attr.send_cq = attr.recv_cq = s->cq;
	attr.cap.max_send_wr = s->sq_size;
	attr.cap.max_recv_wr = s->rq_size;
	attr.cap.max_send_sge = 2;
	attr.cap.max_recv_sge = 1;
	attr.cap.max_inline_data = s->inline_size;
	if (rdma_create_qp(s->id, NULL, &attr))
		return -1;
	s->inline_size = attr.cap.max_inline_data < UINT16_MAX ? attr.cap.max_inline_data : UINT16_MAX;
	if (make_buffers(s, s->id->qp->pd))
		return -1;
	s->s_free = s->sbuf_size;
	s->sq_free = s->sq_size - RS_CTRL_ROOM;
	s->r_unpublished = s->rbuf_size / 2; /* the hello tells of the first half */
	s->r_publish = 1;
	s->r_told = 0;
	for (int i = 0; i < s->rq_size; i++) {
		err = ibv_post_recv(s->id->qp, &wr, &bad);
		if (err)
			return rs_error(err);
	}
	return 0;
}

static void unmap(volatile void *p, size_t len)
{
	if (p)
		munmap((void *)p, len);
}

/* rs_free_endpoint ends the connection, if there is one, before the memory goes that the
 * peer may write to. */
void rs_free_endpoint(struct rsock *s)
{
	struct rs_iomr *m;

	if (s->id && s->id->qp) {
		if (s->state >= RS_CONNECTING && s->state != RS_FAILED)
			rdma_disconnect(s->id); /* whether or not the peer has done so */
		rdma_destroy_qp(s->id);
	}
	while ((m = s->iomrs)) {
		s->iomrs = m->next;
		if (m->mr)
			ibv_dereg_mr(m->mr);
		free(m);
	}
	free(s->iomap_taken);
	if (s->smr)
		ibv_dereg_mr(s->smr);
	if (s->list_mr)
		ibv_dereg_mr(s->list_mr);
	if (s->rmr)
		ibv_dereg_mr(s->rmr);
	unmap(s->sbuf, sbuf_len(s));
	unmap(s->list, s->list_len);
	unmap(s->rbuf, s->rbuf_size);
	free(s->messages);
}

/* rs_write_hello fills in the private data of our REQ or REP. */
void rs_write_hello(struct rsock *s, struct rs_hello *h)
{
	memset(h, 0, sizeof(*h));
	h->version = RS_VERSION;
	h->flags = RS_FLAG_IOMAP | (__BYTE_ORDER == __BIG_ENDIAN ? RS_FLAG_BIG_ENDIAN : 0);
	h->credits = htobe16(s->rq_size);
	h->iomap_size = rs_scale(s->iomap_size);
	h->list.addr = htobe64((uintptr_t)s->list);
	h->list.key = htobe32(s->list_mr->rkey);
	h->list.length = htobe32(RS_PLACES);
	h->data.addr = htobe64((uintptr_t)s->rbuf);
	h->data.key = htobe32(s->rmr->rkey);
	h->data.length = htobe32(s->rbuf_size / 2);
}

/* rs_read_hello takes in the peer's. EPROTO if it makes no sense. */
int rs_read_hello(struct rsock *s, const struct rs_hello *h)
{
	uint32_t n = be32toh(h->list.length);

	if (h->version != RS_VERSION)
		return rs_error(ENOTSUP);
	if (!n || n > UINT16_MAX)
		return rs_error(EPROTO);
	s->swap = !!(h->flags & RS_FLAG_BIG_ENDIAN) != (__BYTE_ORDER == __BIG_ENDIAN);
	s->s_limit = be16toh(h->credits);
	s->peer_list.addr = be64toh(h->list.addr);
	s->peer_list.key = be32toh(h->list.key);
	s->peer_list.length = n;
	s->peer_index = n > 1; /* the data buffer of the hello was in the first */
	s->target.addr = be64toh(h->data.addr);
	s->target.key = be32toh(h->data.key);
	s->target.length = be32toh(h->data.length);
	s->target_index = 1;
	if (h->flags & RS_FLAG_IOMAP) {
		s->peer_iomap = s->peer_list.addr + (uint64_t)n * sizeof(struct rs_place);
		s->remote_iomaps = rs_unscale(h->iomap_size);
	}
	if (s->remote_iomaps) {
		s->iomap_taken = calloc(s->remote_iomaps, 1);
		if (!s->iomap_taken)
			return rs_error(ENOMEM);
	}
	return 0;
}
