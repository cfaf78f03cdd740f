/* SPDX-License-Identifier: Apache-2.0
 *
 * Keys that change: memory windows, and regions that are registered anew. */
#include <stdlib.h>

#include "tv.h"

struct ibv_mw *tv_alloc_mw(struct ibv_pd *ibpd, enum ibv_mw_type type)
{
	struct tv_mw *mw;
	int rc;

	TV_THERE(ibpd->context, NULL);
	if (type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2)
		return tv_null(EINVAL);
	mw = calloc(1, sizeof(*mw));
	if (!mw)
		return NULL;
	rc = tv_e->alloc_mw(((struct tv_pd *)ibpd)->handle, type, &mw->handle, &mw->ibv.rkey);
	if (rc) {
		free(mw);
		return tv_null(rc);
	}
	mw->ibv.context = ibpd->context;
	mw->ibv.pd = ibpd;
	mw->ibv.handle = mw->handle;
	mw->ibv.type = type;
	return &mw->ibv;
}

int tv_dealloc_mw(struct ibv_mw *ibmw)
{
	struct tv_mw *mw = (struct tv_mw *)ibmw;
	int rc;

	TV_ALIVE(EIO);
	rc = tv_e->destroy(mw->handle);
	if (rc)
		return tv_fail(rc);
	free(mw);
	return 0;
}

/* put_bind fills a slot for a bind (qp/manage.go says what goes where). The key has to be
 * one of the window's: other bits than the low 8 are not for the program to choose. */
static int put_bind(struct tv_send_wqe *w, const struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *b)
{
	if ((rkey ^ mw->rkey) & ~0xffu || (!b->mr && (b->addr || b->length)))
		return EINVAL;
	w->rkey = rkey;
	w->imm_or_key = b->mr ? b->mr->lkey : 0;
	w->remote_addr = b->addr;
	w->compare_add = b->length;
	w->swap = b->mw_access_flags & ~TV_IGNORED_ACCESS;
	return 0;
}

/* tv_put_bind is put_bind for a work request that the program posts: windows of type 2
 * are bound so (ibv_post_send(3)). */
int tv_put_bind(struct tv_send_wqe *w, const struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *b)
{
	if (!mw || mw->type != IBV_MW_TYPE_2)
		return EINVAL;
	return put_bind(w, mw, rkey, b);
}

/* Windows of type 1. The new key is in mw from now on, whatever the bind comes to
 * (ibv_bind_mw(3)); the lock of the send queue keeps two binds apart. */
int tv_bind_mw(struct ibv_qp *ibqp, struct ibv_mw *mw, struct ibv_mw_bind *b)
{
	struct tv_qp *qp = (struct tv_qp *)ibqp;
	struct tv_send_wqe *w;
	uint32_t p, key;
	int rc = 0;

	TV_THERE(ibqp->context, EIO);
	if (!(qp->ops & 1u << IBV_WR_BIND_MW) || b->bind_info.mw_access_flags & IBV_ACCESS_ZERO_BASED)
		return EINVAL;
	tv_lock(&qp->lock);
	p = tv_load(&qp->sq, TV_RING_PROD);
	if (tv_load(&qp->sq, TV_RING_STATE) <= TV_STATE_RTR)
		rc = EINVAL;
	else if (p - tv_load(&qp->sq, TV_RING_CONS) > qp->sq.mask)
		rc = ENOMEM;
	if (!rc) {
		w = tv_slot(&qp->sq, p);
		*w = (struct tv_send_wqe){ .id = b->wr_id, .opcode = IBV_WR_BIND_MW,
					   .flags = b->send_flags & (IBV_SEND_FENCE | IBV_SEND_SIGNALED) };
		key = ibv_inc_rkey(mw->rkey);
		rc = put_bind(w, mw, key, &b->bind_info);
	}
	if (!rc) {
		mw->rkey = key;
		tv_store(&qp->sq, TV_RING_PROD, p + 1);
	}
	tv_unlock(&qp->lock);
	if (!rc)
		tv_posted(qp, 1);
	return rc;
}

enum { REREG_ALL = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS };

/* The region is as it was when this fails, so all failures are of the input kind. */
int ibv_rereg_mr(struct ibv_mr *ibmr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct tv_mr *mr = (struct tv_mr *)ibmr;
	struct tv_reg r = { .addr = (uintptr_t)addr, .length = length };
	int rc;

	TV_THERE(ibmr->context, IBV_REREG_MR_ERR_INPUT);
	r.access = access & ~TV_IGNORED_ACCESS;
	if (!flags || flags & ~REREG_ALL || (flags & IBV_REREG_MR_CHANGE_PD && !pd) ||
	    (flags & IBV_REREG_MR_CHANGE_TRANSLATION && (!addr || !length)) ||
	    (access && !(flags & IBV_REREG_MR_CHANGE_ACCESS)))
		rc = EINVAL;
	else
		rc = tv_e->rereg_mr(mr->handle, flags, flags & IBV_REREG_MR_CHANGE_PD ? ((struct tv_pd *)pd)->handle : 0, &r);
	if (rc) {
		errno = rc;
		return IBV_REREG_MR_ERR_INPUT;
	}
	if (flags & IBV_REREG_MR_CHANGE_PD)
		ibmr->pd = pd;
	if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
		ibmr->addr = addr;
		ibmr->length = length;
	}
	return 0;
}
