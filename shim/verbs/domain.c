/* SPDX-License-Identifier: Apache-2.0
 *
 * Thread domains and parent domains. To the engine a parent domain is another handle
 * of the protection domain; the allocators are for this library's part of queue pairs,
 * CQs and SRQs: what posting and polling works with beside the rings, which are the
 * engine's. */
#include <stdlib.h>

#include "tv.h"

enum { OBJECT_ALIGN = 64 }; /* a cache line */

struct ibv_td *tv_alloc_td(struct ibv_context *ctx, struct ibv_td_init_attr *a)
{
	struct tv_td *td;

	TV_THERE(ctx, NULL);
	if (a->comp_mask)
		return tv_null(EINVAL);
	td = calloc(1, sizeof(*td));
	if (!td)
		return NULL;
	td->ibv.context = ctx;
	return &td->ibv;
}

int tv_dealloc_td(struct ibv_td *ibtd)
{
	struct tv_td *td = (struct tv_td *)ibtd;

	if (__atomic_load_n(&td->refs, __ATOMIC_ACQUIRE))
		return tv_fail(EBUSY);
	free(td);
	return 0;
}

struct ibv_pd *tv_alloc_parent_domain(struct ibv_context *ctx, struct ibv_parent_domain_init_attr *a)
{
	bool allocators = a->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS;
	struct tv_parent *p;
	struct tv_pd *pd;
	int rc;

	TV_THERE(ctx, NULL);
	if (!a->pd || a->comp_mask & ~(IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT) ||
	    (allocators && (!a->alloc || !a->free)) || a->pd->context != ctx || (a->td && a->td->context != ctx))
		return tv_null(EINVAL);
	pd = calloc(1, sizeof(*pd));
	p = calloc(1, sizeof(*p));
	rc = pd && p ? tv_e->alloc_parent(((struct tv_pd *)a->pd)->handle, &pd->handle) : ENOMEM;
	if (rc) {
		free(pd);
		free(p);
		return tv_null(rc);
	}
	if (allocators) {
		p->alloc = a->alloc;
		p->free = a->free;
	}
	if (a->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT)
		p->user = a->pd_context;
	p->td = (struct tv_td *)a->td;
	if (p->td)
		__atomic_fetch_add(&p->td->refs, 1, __ATOMIC_ACQ_REL);
	pd->parent = p;
	pd->ibv.context = ctx;
	pd->ibv.handle = pd->handle;
	return &pd->ibv;
}

/* tv_parent_end ends what a parent domain has beside its handle. */
void tv_parent_end(struct tv_parent *p)
{
	if (!p)
		return;
	if (p->td)
		__atomic_fetch_sub(&p->td->refs, 1, __ATOMIC_ACQ_REL);
	free(p);
}

/* tv_object makes an object of a domain, all zeros, with the allocator of a parent
 * domain that has one. */
void *tv_object(struct ibv_pd *pd, size_t size, enum tv_resource type, bool *custom)
{
	struct tv_parent *p = pd ? ((struct tv_pd *)pd)->parent : NULL;
	void *mem;

	*custom = false;
	if (!p || !p->alloc)
		return calloc(1, size);
	mem = p->alloc(pd, p->user, size, OBJECT_ALIGN, type);
	if (mem == IBV_ALLOCATOR_USE_DEFAULT)
		return calloc(1, size);
	if (!mem)
		return tv_null(ENOMEM);
	*custom = true;
	return memset(mem, 0, size); /* it should be, but some allocators forget */
}

void tv_object_free(struct ibv_pd *pd, void *mem, enum tv_resource type, bool custom)
{
	struct tv_parent *p = custom ? ((struct tv_pd *)pd)->parent : NULL;

	if (p)
		p->free(pd, p->user, mem, type);
	else
		free(mem);
}
