/* SPDX-License-Identifier: Apache-2.0
 *
 * Budgets, stores, and eviction by hand. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "private.h"

_Static_assert((int)TAPVERBS_DV_EVENT_EVICTION_STOPPED == TV_EVENT_EVICTION_STOPPED, "events");

int tapverbs_dv_set_budget(struct ibv_context *ctx, uint64_t bytes) { return DV_CTX(ctx, set_budget, bytes); }

int tapverbs_dv_set_pd_budget(struct ibv_pd *pd, uint64_t bytes) { return DV_PD(pd, pd_budget, bytes); }

int tapverbs_dv_set_mr_budget(struct ibv_mr *mr, uint64_t bytes) { return DV_MR(mr, mr_budget, bytes); }

int tapverbs_dv_set_file_store(struct ibv_context *ctx, const char *dir)
{
	char *spec;
	int rc;

	if (asprintf(&spec, "file:%s", dir ? dir : "") < 0)
		return ENOMEM;
	rc = DV_CTX(ctx, name_store, spec);
	free(spec);
	return rc;
}

int tapverbs_dv_set_compressed_store(struct ibv_context *ctx)
{
	char spec[] = "compressed";

	return DV_CTX(ctx, name_store, spec);
}

int tapverbs_dv_set_store(struct ibv_context *ctx, const struct tapverbs_dv_store *s)
{
	struct tv_store t = { .user = s->user, .write = s->write, .read = s->read, .free = s->free, .close = s->close };

	return s->comp_mask ? EINVAL : DV_CTX(ctx, set_store, &t);
}

int tapverbs_dv_evict_mr(struct ibv_mr *mr, uint64_t iova, size_t length, enum tapverbs_dv_level to, uint64_t *pages)
{
	uint64_t n = 0;
	int rc = DV_MR(mr, evict_mr, iova, length, to, &n);

	if (pages)
		*pages = n;
	return rc;
}

int tapverbs_dv_eviction_stopped(struct ibv_context *ctx, char *text, size_t len)
{
	return DV_CTX(ctx, eviction_stopped, text, len);
}
