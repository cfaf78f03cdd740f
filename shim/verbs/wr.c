/* SPDX-License-Identifier: Apache-2.0
 *
 * The builders of work requests (ibv_wr_post(3)). The send queue's lock is held from
 * wr_start to wr_complete or wr_abort; slots are filled in place, and the producer
 * index moves in wr_complete. The first error stays until then. */
#include <endian.h>

#include "tv.h"

static struct tv_qp *of(struct ibv_qp_ex *ex) { return (struct tv_qp *)ex; }

static void start(struct ibv_qp_ex *ex)
{
	struct tv_qp *qp = of(ex);

	tv_lock(&qp->lock);
	qp->wr_prod = tv_load(&qp->sq, TV_RING_PROD);
	qp->wr_cur = NULL;
	qp->wr_err = tv_lost(qp->ibv.context) ? EIO : tv_load(&qp->sq, TV_RING_STATE) <= TV_STATE_RTR ? EINVAL : 0;
}

static int complete(struct ibv_qp_ex *ex)
{
	struct tv_qp *qp = of(ex);
	uint32_t n = qp->wr_prod - tv_load(&qp->sq, TV_RING_PROD);
	int rc = qp->wr_err;

	if (!rc)
		tv_store(&qp->sq, TV_RING_PROD, qp->wr_prod);
	tv_unlock(&qp->lock);
	if (!rc && n)
		tv_posted(qp, n);
	return rc;
}

static void abort_wr(struct ibv_qp_ex *ex) { tv_unlock(&of(ex)->lock); }

/* next begins a work request; NULL when there was an error. */
static struct tv_send_wqe *next(struct ibv_qp_ex *ex, enum ibv_wr_opcode op)
{
	struct tv_qp *qp = of(ex);
	struct tv_send_wqe *w;

	if (qp->wr_err)
		return NULL;
	if (qp->wr_prod - tv_load(&qp->sq, TV_RING_CONS) > qp->sq.mask) {
		qp->wr_err = ENOMEM;
		return NULL;
	}
	w = tv_slot(&qp->sq, qp->wr_prod++);
	*w = (struct tv_send_wqe){ .id = ex->wr_id, .opcode = op, .flags = ex->wr_flags & 0xf & ~IBV_SEND_INLINE };
	qp->wr_cur = w;
	return w;
}

static void rdma(struct ibv_qp_ex *ex, enum ibv_wr_opcode op, uint32_t rkey, uint64_t addr, uint32_t imm)
{
	struct tv_send_wqe *w = next(ex, op);

	if (w) {
		w->rkey = rkey;
		w->remote_addr = addr;
		w->imm_or_key = imm;
	}
}

static void wr_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr) { rdma(ex, IBV_WR_RDMA_WRITE, rkey, addr, 0); }
static void wr_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr) { rdma(ex, IBV_WR_RDMA_READ, rkey, addr, 0); }

static void wr_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, __be32 imm)
{
	rdma(ex, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, addr, be32toh(imm));
}

static void wr_send(struct ibv_qp_ex *ex) { rdma(ex, IBV_WR_SEND, 0, 0, 0); }
static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm) { rdma(ex, IBV_WR_SEND_WITH_IMM, 0, 0, be32toh(imm)); }
static void wr_send_inv(struct ibv_qp_ex *ex, uint32_t rkey) { rdma(ex, IBV_WR_SEND_WITH_INV, 0, 0, rkey); }

static void atomic(struct ibv_qp_ex *ex, enum ibv_wr_opcode op, uint32_t rkey, uint64_t addr, uint64_t a, uint64_t b)
{
	struct tv_send_wqe *w = next(ex, op);

	if (w) {
		w->rkey = rkey;
		w->remote_addr = addr;
		w->compare_add = a;
		w->swap = b;
	}
}

static void wr_cmp_swp(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, uint64_t compare, uint64_t swap)
{
	atomic(ex, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, addr, compare, swap);
}

static void wr_fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, uint64_t add)
{
	atomic(ex, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, addr, add, 0);
}

static void wr_atomic_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, const void *data)
{
	struct tv_send_wqe *w = next(ex, IBV_WR_ATOMIC_WRITE);

	if (w) {
		w->rkey = rkey;
		w->remote_addr = addr;
		w->flags |= IBV_SEND_INLINE;
		w->length = 8;
		memcpy(w + 1, data, 8); /* a slot has room for an element, which is more */
	}
}

static void wr_flush(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, size_t len, uint8_t type, uint8_t level)
{
	struct tv_send_wqe *w = next(ex, (enum ibv_wr_opcode)TV_WR_FLUSH);

	if (!w)
		return;
	if (!type || type > 3 || level > 1 || len > 1u << 31)
		of(ex)->wr_err = EINVAL;
	w->rkey = rkey;
	w->remote_addr = addr;
	w->length = len;
	w->imm_or_key = type | level << 4;
}

/* bare says whether a work request takes no list and no data from setters. */
static bool bare(const struct tv_send_wqe *w)
{
	return w->opcode == TV_WR_FLUSH || w->opcode == IBV_WR_ATOMIC_WRITE || w->opcode == IBV_WR_LOCAL_INV ||
	       w->opcode == IBV_WR_BIND_MW;
}

static void wr_local_inv(struct ibv_qp_ex *ex, uint32_t rkey) { rdma(ex, IBV_WR_LOCAL_INV, 0, 0, rkey); }

static void wr_bind_mw(struct ibv_qp_ex *ex, struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *b)
{
	struct tv_send_wqe *w = next(ex, IBV_WR_BIND_MW);

	if (w)
		of(ex)->wr_err = tv_put_bind(w, mw, rkey, b);
}

static void set_ud(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
	struct tv_qp *qp = of(ex);

	if (qp->wr_err || !qp->wr_cur)
		return;
	qp->wr_cur->ah = ((struct tv_ah *)ah)->number;
	qp->wr_cur->dest_qpn = qpn;
	qp->wr_cur->qkey = qkey;
}

static void set_srqn(struct ibv_qp_ex *ex, uint32_t srqn)
{
	struct tv_qp *qp = of(ex);

	if (!qp->wr_err && qp->wr_cur)
		qp->wr_cur->srqn = srqn;
}

static void set_list(struct ibv_qp_ex *ex, size_t n, const struct ibv_sge *sge)
{
	struct tv_qp *qp = of(ex);
	struct tv_send_wqe *w = qp->wr_cur;
	uint64_t sum = 0;

	if (qp->wr_err || !w)
		return;
	if (n > qp->max_sge || bare(w)) {
		qp->wr_err = EINVAL;
		return;
	}
	for (size_t i = 0; i < n; i++) {
		((struct ibv_sge *)(w + 1))[i] = sge[i];
		sum += sge[i].length;
	}
	if (sum > 1u << 31 || ((w->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || w->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) && sum != 8))
		qp->wr_err = EINVAL;
	w->num_sge = n;
	w->length = sum;
}

static void set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t length)
{
	struct ibv_sge s = { .addr = addr, .length = length, .lkey = lkey };

	set_list(ex, 1, &s);
}

static void set_inline_list(struct ibv_qp_ex *ex, size_t n, const struct ibv_data_buf *buf)
{
	struct tv_qp *qp = of(ex);
	struct tv_send_wqe *w = qp->wr_cur;
	size_t sum = 0;

	if (qp->wr_err || !w)
		return;
	if (bare(w) || w->opcode == IBV_WR_RDMA_READ || w->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || w->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		qp->wr_err = EINVAL;
		return;
	}
	for (size_t i = 0; i < n; i++) {
		if (buf[i].length > qp->max_inline - sum) {
			qp->wr_err = EINVAL;
			return;
		}
		memcpy((char *)(w + 1) + sum, buf[i].addr, buf[i].length);
		sum += buf[i].length;
	}
	w->flags |= IBV_SEND_INLINE;
	w->length = sum;
}

static void set_inline(struct ibv_qp_ex *ex, void *addr, size_t length)
{
	struct ibv_data_buf b = { .addr = addr, .length = length };

	set_inline_list(ex, 1, &b);
}

/* tv_wr_set gives a QP the builders that were asked for; EOPNOTSUPP when one of them
 * is not for its service. */
int tv_wr_set(struct tv_qp *qp, uint64_t ops)
{
	struct ibv_qp_ex *ex = &qp->ex;

	/* Bits and opcodes have the same numbers up to SEND_WITH_INV. */
	uint64_t can = qp->ops & ((IBV_QP_EX_WITH_SEND_WITH_INV << 1) - 1);

	if (qp->ops & 1u << TV_WR_FLUSH)
		can |= TV_QP_EX_WITH_FLUSH;
	if (qp->ops & 1u << IBV_WR_ATOMIC_WRITE)
		can |= IBV_QP_EX_WITH_ATOMIC_WRITE;
	if (ops & ~can)
		return EOPNOTSUPP;
	if (ops & TV_QP_EX_WITH_FLUSH)
		memcpy((char *)ex + TV_WR_FLUSH_AT, &(tv_wr_flush){ wr_flush }, sizeof(tv_wr_flush));
	if (ops & IBV_QP_EX_WITH_ATOMIC_WRITE)
		ex->wr_atomic_write = wr_atomic_write;
	if (ops & IBV_QP_EX_WITH_RDMA_WRITE)
		ex->wr_rdma_write = wr_write;
	if (ops & IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM)
		ex->wr_rdma_write_imm = wr_write_imm;
	if (ops & IBV_QP_EX_WITH_SEND)
		ex->wr_send = wr_send;
	if (ops & IBV_QP_EX_WITH_SEND_WITH_IMM)
		ex->wr_send_imm = wr_send_imm;
	if (ops & IBV_QP_EX_WITH_RDMA_READ)
		ex->wr_rdma_read = wr_read;
	if (ops & IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP)
		ex->wr_atomic_cmp_swp = wr_cmp_swp;
	if (ops & IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)
		ex->wr_atomic_fetch_add = wr_fetch_add;
	if (ops & IBV_QP_EX_WITH_LOCAL_INV)
		ex->wr_local_inv = wr_local_inv;
	if (ops & IBV_QP_EX_WITH_BIND_MW)
		ex->wr_bind_mw = wr_bind_mw;
	if (ops & IBV_QP_EX_WITH_SEND_WITH_INV)
		ex->wr_send_inv = wr_send_inv;
	if (qp->ibv.qp_type == IBV_QPT_UD)
		ex->wr_set_ud_addr = set_ud;
	if (qp->ibv.qp_type == IBV_QPT_XRC_SEND)
		ex->wr_set_xrc_srqn = set_srqn;
	ex->wr_set_inline_data = set_inline;
	ex->wr_set_inline_data_list = set_inline_list;
	ex->wr_set_sge = set_sge;
	ex->wr_set_sge_list = set_list;
	ex->wr_start = start;
	ex->wr_complete = complete;
	ex->wr_abort = abort_wr;
	qp->is_ex = true;
	return 0;
}

_Static_assert((int)IBV_QP_EX_WITH_RDMA_WRITE == 1 << IBV_WR_RDMA_WRITE &&
	       (int)IBV_QP_EX_WITH_SEND_WITH_IMM == 1 << IBV_WR_SEND_WITH_IMM &&
	       (int)IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD == 1 << IBV_WR_ATOMIC_FETCH_AND_ADD &&
	       (int)IBV_QP_EX_WITH_BIND_MW == 1 << IBV_WR_BIND_MW && (int)IBV_QP_EX_WITH_LOCAL_INV == 1 << IBV_WR_LOCAL_INV &&
	       (int)IBV_QP_EX_WITH_SEND_WITH_INV == 1 << IBV_WR_SEND_WITH_INV, "bits are opcodes");
