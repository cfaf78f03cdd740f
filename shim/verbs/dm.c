/* SPDX-License-Identifier: Apache-2.0
 *
 * Device memory. It is the engine's; copying to and from it happens here. */
#include <stdlib.h>

#include "tv.h"

enum { DM_ALIGN = 4 }; /* of offsets and lengths, as the first devices with such memory have it */

/* part finds a piece of device memory; NULL if it is not such a piece. */
static void *part(struct ibv_dm *ibdm, uint64_t offset, size_t length)
{
	struct tv_dm *dm = (struct tv_dm *)ibdm;

	if (offset % DM_ALIGN || length % DM_ALIGN || offset > dm->length || length > dm->length - offset)
		return NULL;
	return dm->addr + offset;
}

static int to_dm(struct ibv_dm *dm, uint64_t offset, const void *host, size_t length)
{
	void *p = part(dm, offset, length);

	if (tv_lost(dm->context) || !p)
		return tv_lost(dm->context) ? EIO : EINVAL;
	memcpy(p, host, length);
	return 0;
}

static int from_dm(void *host, struct ibv_dm *dm, uint64_t offset, size_t length)
{
	const void *p = part(dm, offset, length);

	if (tv_lost(dm->context) || !p)
		return tv_lost(dm->context) ? EIO : EINVAL;
	memcpy(host, p, length);
	return 0;
}

/* tv_dm_new makes the library's part of device memory that the engine has given. */
struct ibv_dm *tv_dm_new(struct ibv_context *ctx, tv_handle handle, uint32_t number, uint64_t addr, uint64_t length)
{
	struct tv_dm *dm = calloc(1, sizeof(*dm));

	if (!dm)
		return NULL;
	dm->handle = handle;
	dm->addr = (char *)(uintptr_t)addr;
	dm->length = length;
	dm->ibv = (struct ibv_dm){ .context = ctx, .memcpy_to_dm = to_dm, .memcpy_from_dm = from_dm,
				   .comp_mask = IBV_DM_MASK_HANDLE, .handle = number };
	return &dm->ibv;
}

struct ibv_dm *tv_alloc_dm(struct ibv_context *ctx, struct ibv_alloc_dm_attr *a)
{
	struct tv_dm_attr t = { .length = a->length, .log_align = a->log_align_req };
	struct ibv_dm *dm;
	int rc;

	TV_THERE(ctx, NULL);
	if (a->comp_mask || a->log_align_req > 63)
		return tv_null(EINVAL);
	rc = tv_e->alloc_dm(tv_ctx_handle(ctx), &t);
	if (rc)
		return tv_null(rc);
	dm = tv_dm_new(ctx, t.handle, t.handle, t.addr, t.length);
	if (!dm)
		tv_e->destroy(t.handle);
	return dm;
}

int tv_free_dm(struct ibv_dm *ibdm)
{
	struct tv_dm *dm = (struct tv_dm *)ibdm;
	int rc;

	if (tv_forked)
		return EIO;
	rc = tv_e->destroy(dm->handle);
	if (rc)
		return tv_fail(rc);
	free(dm);
	return 0;
}

struct ibv_mr *tv_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t offset, size_t length, unsigned int access)
{
	struct tv_reg r = { .addr = offset, .length = length, .access = access & ~TV_IGNORED_ACCESS };
	struct tv_mr *mr;

	TV_THERE(pd->context, NULL);
	mr = tv_mr_begin(&r);
	if (!mr)
		return NULL;
	return tv_mr_end(mr, pd, tv_e->dm_mr(((struct tv_pd *)pd)->handle, ((struct tv_dm *)dm)->handle, &r), &r, NULL, length);
}
