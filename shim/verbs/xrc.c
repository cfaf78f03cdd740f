/* SPDX-License-Identifier: Apache-2.0
 *
 * Extended reliable connections: domains, numbers of SRQs, shared target QPs. SRQs
 * and QPs are made in qp.c. */
#include <fcntl.h>
#include <stdlib.h>

#include "tv.h"

struct ibv_xrcd *tv_open_xrcd(struct ibv_context *ctx, struct ibv_xrcd_init_attr *a)
{
	const uint32_t needed = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
	struct tv_xrcd *x;
	int rc;

	TV_THERE(ctx, NULL);
	if (a->comp_mask & ~needed)
		return tv_null(EOPNOTSUPP);
	if (a->comp_mask != needed)
		return tv_null(EINVAL); /* other oflags mean nothing to the kernel either */
	x = calloc(1, sizeof(*x));
	if (!x)
		return NULL;
	rc = tv_e->open_xrcd(tv_ctx_handle(ctx), a->fd, !!(a->oflags & O_CREAT), !!(a->oflags & O_EXCL), &x->handle);
	if (rc) {
		free(x);
		return tv_null(rc);
	}
	x->ibv.context = ctx;
	return &x->ibv;
}

int tv_close_xrcd(struct ibv_xrcd *xrcd)
{
	int rc;

	TV_ALIVE(EIO);
	rc = tv_e->destroy(((struct tv_xrcd *)xrcd)->handle);
	if (rc)
		return tv_fail(rc);
	free(xrcd);
	return 0;
}

int tv_get_srq_num(struct ibv_srq *srq, uint32_t *num)
{
	if (tv_lost(srq->context))
		return EIO;
	if (!((struct tv_srq *)srq)->num)
		return tv_fail(EINVAL); /* not of XRC */
	*num = ((struct tv_srq *)srq)->num;
	return 0;
}

struct ibv_qp *tv_open_qp(struct ibv_context *ctx, struct ibv_qp_open_attr *a)
{
	const uint32_t needed = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
	struct tv_qp_init in = { .type = a->qp_type, .num = a->qp_num };
	void *user = a->comp_mask & IBV_QP_OPEN_ATTR_CONTEXT ? a->qp_context : NULL;
	struct tv_qp *qp;
	int rc;

	TV_THERE(ctx, NULL);
	if (a->comp_mask & ~(needed | IBV_QP_OPEN_ATTR_CONTEXT))
		return tv_null(EOPNOTSUPP);
	if ((a->comp_mask & needed) != needed || !a->xrcd || a->qp_type != IBV_QPT_XRC_RECV)
		return tv_null(EINVAL);
	qp = calloc(1, sizeof(*qp));
	if (!qp)
		return NULL;
	in.cookie = (uintptr_t)qp;
	rc = tv_e->open_qp(((struct tv_xrcd *)a->xrcd)->handle, &in);
	if (rc) {
		free(qp);
		return tv_null(rc);
	}
	qp->ibv.context = ctx;
	qp->ibv.qp_context = user;
	qp->ibv.qp_type = a->qp_type;
	tv_qp_set(qp, &in);
	qp->ibv.state = tv_load(&qp->sq, TV_RING_STATE);
	return &qp->ibv;
}
