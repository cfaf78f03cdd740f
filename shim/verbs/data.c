/* SPDX-License-Identifier: Apache-2.0
 *
 * The data path: posting and polling on the rings. Into Go go: a posted send, to kick
 * the engine, unless that polls soon; a receive posted to a QP in the state ERR, which is to be flushed; an
 * empty poll, to make progress. */
#include <endian.h>

#include "tv.h"

void tv_ring_set(struct tv_ring *r, uint64_t base)
{
	r->base = (char *)(uintptr_t)base;
	if (!r->base)
		return;
	r->mask = *(uint32_t *)(r->base + TV_RING_COUNT) - 1;
	r->stride = *(uint32_t *)(r->base + TV_RING_STRIDE);
}

_Static_assert(sizeof(struct ibv_sge) == sizeof(struct tv_sge), "SGEs are copied as they are");
_Static_assert(offsetof(struct ibv_sge, length) == offsetof(struct tv_sge, length), "length");
_Static_assert(offsetof(struct ibv_sge, lkey) == offsetof(struct tv_sge, lkey), "lkey");

enum { MAX_MESSAGE = 1u << 31, ATOMIC_LEN = 8, SEND_FLAGS = 0xf };

/* OPS_xxx are sets of opcodes. */
#define OP(x) (1u << IBV_WR_##x)
enum {
	OPS_RDMA = OP(RDMA_WRITE) | OP(RDMA_WRITE_WITH_IMM) | OP(RDMA_READ) | OP(ATOMIC_WRITE),
	OPS_ATOMIC = OP(ATOMIC_CMP_AND_SWP) | OP(ATOMIC_FETCH_AND_ADD),
	OPS_KEYS = OP(LOCAL_INV) | OP(BIND_MW),
	OPS_NO_INLINE = OP(RDMA_READ) | OPS_ATOMIC,
	OPS_WORD = OPS_ATOMIC | OP(ATOMIC_WRITE),
};

/* put_send fills a slot; an errno if the work request cannot be (ibv_post_send(3)). */
static int put_send(struct tv_qp *qp, const struct ibv_send_wr *wr, struct tv_send_wqe *w)
{
	uint64_t sum = 0;
	uint32_t op;

	if (TV_UNLIKELY((unsigned)wr->opcode > 31 || wr->num_sge < 0))
		return EINVAL;
	op = 1u << wr->opcode;
	/* A FLUSH does not fit into struct ibv_send_wr: wr_flush makes them. */
	if (TV_UNLIKELY(!(qp->ops & op & ~(1u << TV_WR_FLUSH))))
		return EINVAL;
	w->id = wr->wr_id;
	w->opcode = wr->opcode;
	w->flags = wr->send_flags & SEND_FLAGS;
	w->imm_or_key = wr->opcode == IBV_WR_SEND_WITH_INV ? wr->invalidate_rkey : be32toh(wr->imm_data);
	w->num_sge = 0;
	if (TV_UNLIKELY(op & OPS_KEYS)) {
		w->length = 0;
		w->flags &= ~IBV_SEND_INLINE;
		if (wr->opcode == IBV_WR_BIND_MW)
			return tv_put_bind(w, wr->bind_mw.mw, wr->bind_mw.rkey, &wr->bind_mw.bind_info);
		w->imm_or_key = wr->invalidate_rkey;
		return 0;
	}
	if (op & OPS_RDMA) {
		w->remote_addr = wr->wr.rdma.remote_addr;
		w->rkey = wr->wr.rdma.rkey;
	} else if (op & OPS_ATOMIC) {
		w->remote_addr = wr->wr.atomic.remote_addr;
		w->rkey = wr->wr.atomic.rkey;
		w->compare_add = wr->wr.atomic.compare_add;
		w->swap = wr->wr.atomic.swap;
	}
	if (qp->ibv.qp_type == IBV_QPT_UD) {
		if (!wr->wr.ud.ah)
			return EINVAL;
		w->ah = ((struct tv_ah *)wr->wr.ud.ah)->number;
		w->dest_qpn = wr->wr.ud.remote_qpn;
		w->qkey = wr->wr.ud.remote_qkey;
	}
	if (qp->ibv.qp_type == IBV_QPT_XRC_SEND)
		w->srqn = wr->qp_type.xrc.remote_srqn;
	if (wr->send_flags & IBV_SEND_INLINE) {
		char *dst = (char *)(w + 1);

		if (op & OPS_NO_INLINE)
			return EINVAL;
		for (int i = 0; i < wr->num_sge; i++) {
			sum += wr->sg_list[i].length;
			if (sum > qp->max_inline)
				return EINVAL;
			memcpy(dst, (void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
			dst += wr->sg_list[i].length;
		}
		if (op & OPS_WORD && sum != ATOMIC_LEN)
			return EINVAL;
		w->length = sum;
		return 0;
	}
	if (TV_UNLIKELY((uint32_t)wr->num_sge > qp->max_sge))
		return EINVAL;
	for (int i = 0; i < wr->num_sge; i++) {
		sum += wr->sg_list[i].length;
		((struct ibv_sge *)(w + 1))[i] = wr->sg_list[i];
	}
	if (TV_UNLIKELY(sum > MAX_MESSAGE || (op & OPS_WORD && sum != ATOMIC_LEN)))
		return EINVAL;
	w->length = sum;
	w->num_sge = wr->num_sge;
	return 0;
}

/* A bit that is seen set need not be set again: who takes it looks below afterwards. */
static void set_bit(char *word, uint32_t bit)
{
	uint64_t *w = (uint64_t *)word, b = 1ull << (bit & 63);

	if (!(__atomic_load_n(w, __ATOMIC_SEQ_CST) & b))
		__atomic_fetch_or(w, b, __ATOMIC_SEQ_CST);
}

/* held says whether n work requests whose bell was rung are left to the next poll:
 * bells.held in provider/bells.go. */
static bool held(char *bells, uint32_t n)
{
	uint32_t *seen = (uint32_t *)(bells + TV_BELL_SEEN), *left = (uint32_t *)(bells + TV_BELL_LEFT), polls;

	if (!__atomic_load_n((uint32_t *)(bells + TV_BELL_PATIENT), __ATOMIC_SEQ_CST))
		return false;
	polls = __atomic_load_n((uint32_t *)(bells + TV_BELL_POLLS), __ATOMIC_RELAXED);
	if (__atomic_load_n(seen, __ATOMIC_RELAXED) != polls) {
		__atomic_store_n(seen, polls, __ATOMIC_RELAXED);
		n = TV_BELL_MAX_LEFT;
	} else {
		n += __atomic_load_n(left, __ATOMIC_RELAXED);
	}
	__atomic_store_n(left, n < TV_BELL_MAX_LEFT ? n : 0, __ATOMIC_RELAXED);
	return n < TV_BELL_MAX_LEFT;
}

/* tv_posted rings a QP's bell after n work requests were put into its send queue, and
 * calls the engine if it does not look soon by itself. */
void tv_posted(struct tv_qp *qp, uint32_t n)
{
	/* Who sweeps the bell away that we see set must find what we have posted. */
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	set_bit(qp->bells + TV_BELL_LEAF + (qp->bell >> 6) * 8, qp->bell);
	set_bit(qp->bells + TV_BELL_MID + (qp->bell >> 12) * 8, qp->bell >> 6);
	set_bit(qp->bells + TV_BELL_TOP, qp->bell >> 12);
	if (!held(qp->bells, n))
		tv_e->kick(qp->handle);
}

int tv_post_send(struct ibv_qp *ibqp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct tv_qp *qp = (struct tv_qp *)ibqp;
	uint32_t first, p;
	int rc = 0;

	if (TV_UNLIKELY(tv_lost(ibqp->context))) {
		*bad = wr;
		return EIO;
	}
	tv_lock(&qp->lock);
	p = first = tv_load(&qp->sq, TV_RING_PROD);
	if (TV_UNLIKELY(tv_load(&qp->sq, TV_RING_STATE) <= TV_STATE_RTR))
		rc = EINVAL;
	for (; !rc && wr; wr = wr->next) {
		if (p - tv_load(&qp->sq, TV_RING_CONS) > qp->sq.mask)
			rc = ENOMEM;
		else
			rc = put_send(qp, wr, tv_slot(&qp->sq, p));
		if (TV_UNLIKELY(rc))
			break;
		p++;
	}
	tv_store(&qp->sq, TV_RING_PROD, p);
	tv_unlock(&qp->lock);
	if (p != first)
		tv_posted(qp, p - first);
	if (rc)
		*bad = wr;
	return rc;
}

/* post_recv appends receive work requests to a queue. */
static int post_recv(struct tv_rq *q, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct tv_recv_wqe *w;
	uint32_t p;
	int rc = 0;

	tv_lock(&q->lock);
	p = tv_load(&q->ring, TV_RING_PROD);
	for (; wr; wr = wr->next) {
		if (TV_UNLIKELY(p - tv_load(&q->ring, TV_RING_CONS) > q->ring.mask)) {
			rc = ENOMEM;
			break;
		}
		if (TV_UNLIKELY((uint32_t)wr->num_sge > q->max_sge)) {
			rc = EINVAL;
			break;
		}
		w = tv_slot(&q->ring, p);
		w->id = wr->wr_id;
		w->num_sge = wr->num_sge;
		for (int i = 0; i < wr->num_sge; i++)
			((struct ibv_sge *)(w + 1))[i] = wr->sg_list[i];
		p++;
	}
	tv_store(&q->ring, TV_RING_PROD, p);
	tv_unlock(&q->lock);
	if (rc)
		*bad = wr;
	return rc;
}

int tv_post_recv(struct ibv_qp *ibqp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct tv_qp *qp = (struct tv_qp *)ibqp;
	int rc;

	if (TV_UNLIKELY(tv_lost(ibqp->context) || !qp->rq.ring.base || !tv_load(&qp->sq, TV_RING_STATE))) {
		*bad = wr;
		return tv_lost(ibqp->context) ? EIO : EINVAL;
	}
	rc = post_recv(&qp->rq, wr, bad);
	/* The engine sets ERR and then flushes; we post and then look: one of the two
	 * sees the other. */
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	if (TV_UNLIKELY(tv_load(&qp->sq, TV_RING_STATE) == TV_STATE_ERR))
		tv_e->kick(qp->handle);
	return rc;
}

int tv_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	if (TV_UNLIKELY(tv_lost(srq->context))) {
		*bad = wr;
		return EIO;
	}
	return post_recv(&((struct tv_srq *)srq)->rq, wr, bad);
}

static void get_wc(struct ibv_wc *wc, const struct tv_cqe *e)
{
	wc->wr_id = e->id;
	wc->status = e->status;
	wc->opcode = e->opcode;
	wc->vendor_err = e->vendor_err;
	wc->byte_len = e->byte_len;
	wc->imm_data = e->flags & IBV_WC_WITH_INV ? e->imm_or_key : htobe32(e->imm_or_key);
	wc->qp_num = e->qpn;
	wc->src_qp = e->src_qp;
	wc->wc_flags = e->flags;
	wc->pkey_index = e->pkey_index;
	wc->slid = e->slid;
	wc->sl = e->sl;
	wc->dlid_path_bits = e->path_bits;
}

/* drain takes completions, and says whether the CQ is armed: who has armed it will
 * sleep if nothing is found. */
static int drain(struct tv_cq *cq, int max, struct ibv_wc *wc, bool *armed)
{
	uint32_t c, n;

	tv_lock(&cq->lock);
	c = tv_load(&cq->ring, TV_RING_CONS);
	n = tv_load(&cq->ring, TV_RING_PROD) - c;
	if (n > (uint32_t)max)
		n = max;
	for (uint32_t i = 0; i < n; i++)
		get_wc(&wc[i], tv_slot(&cq->ring, c + i));
	if (n)
		tv_store(&cq->ring, TV_RING_CONS, c + n);
	*armed = tv_load(&cq->ring, TV_RING_ARM) != TV_ARM_NONE;
	tv_unlock(&cq->lock);
	return n;
}

int tv_poll_cq(struct ibv_cq *ibcq, int max, struct ibv_wc *wc)
{
	struct tv_cq *cq = (struct tv_cq *)ibcq;
	bool armed;
	int n;

	if (TV_UNLIKELY(tv_forked || max < 0))
		return -1;
	n = drain(cq, max, wc, &armed);
	if (n || !max)
		return n;
	tv_e->progress(cq->handle, armed);
	return drain(cq, max, wc, &armed);
}

int tv_req_notify_cq(struct ibv_cq *ibcq, int solicited_only)
{
	struct tv_cq *cq = (struct tv_cq *)ibcq;
	uint32_t *arm, none = TV_ARM_NONE;

	if (TV_UNLIKELY(tv_lost(ibcq->context)))
		return EIO;
	tv_lock(&cq->lock);
	arm = (uint32_t *)(cq->ring.base + TV_RING_ARM);
	/* A request for any completion is not weakened by a later one. */
	if (solicited_only)
		__atomic_compare_exchange_n(arm, &none, TV_ARM_SOLICITED, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	else
		__atomic_store_n(arm, TV_ARM_ANY, __ATOMIC_SEQ_CST);
	tv_unlock(&cq->lock);
	return 0;
}
