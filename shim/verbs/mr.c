/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory regions of a special kind, and advice. Ordinary ones are in pd.c. */
#include <stdlib.h>

#include "tv.h"

/* tv_mr_begin makes the library's part of a region that the engine is about to make, and
 * tv_mr_end completes it, or ends it if rc says that the engine did not. */
struct tv_mr *tv_mr_begin(struct tv_reg *r)
{
	struct tv_mr *mr = calloc(1, sizeof(*mr));

	r->cookie = (uintptr_t)mr;
	return mr;
}

struct ibv_mr *tv_mr_end(struct tv_mr *mr, struct ibv_pd *pd, int rc, const struct tv_reg *r, void *addr, size_t length)
{
	if (rc) {
		free(mr);
		return tv_null(rc);
	}
	mr->handle = r->handle;
	mr->ibv = (struct ibv_mr){ .context = pd->context, .pd = pd, .addr = addr, .length = length, .handle = r->handle,
				   .lkey = r->lkey, .rkey = r->rkey };
	return &mr->ibv;
}

struct ibv_mr *tv_alloc_null_mr(struct ibv_pd *pd)
{
	struct tv_reg r = { 0 };
	struct tv_mr *mr;

	TV_THERE(pd->context, NULL);
	mr = tv_mr_begin(&r);
	if (!mr)
		return NULL;
	return tv_mr_end(mr, pd, tv_e->null_mr(((struct tv_pd *)pd)->handle, &r), &r, NULL, SIZE_MAX);
}

_Static_assert(sizeof(struct ibv_sge) == sizeof(struct tv_sge), "SGEs are handed on as they are");

int tv_advise_mr(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags, struct ibv_sge *sg, uint32_t n)
{
	if (tv_lost(pd->context))
		return EIO;
	if (n && !sg)
		return EINVAL;
	return tv_e->advise_mr(((struct tv_pd *)pd)->handle, advice, flags, (struct tv_sge *)sg, n);
}
