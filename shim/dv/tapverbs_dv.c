/* SPDX-License-Identifier: Apache-2.0
 *
 * libtapverbs.so.1: devices, how regions are paged, counters. */
#include "private.h"

_Static_assert((int)TAPVERBS_DV_PAGING_USERFAULT == TV_PAGED_USERFAULT && (int)TAPVERBS_DV_PAGING_KERNEL == TV_PAGED_KERNEL &&
		       (int)TAPVERBS_DV_PAGING_PINNED == TV_PAGED_PINNED && (int)TAPVERBS_DV_PAGING_DEVICE == TV_PAGED_DEVICE &&
		       (int)TAPVERBS_DV_PAGING_IMPLICIT == TV_PAGED_IMPLICIT && (int)TAPVERBS_DV_PAGING_NULL == TV_PAGED_NULL,
	       "paging");
_Static_assert((int)TAPVERBS_DV_RESOURCE_QP == TV_RESOURCE_QP && (int)TAPVERBS_DV_RESOURCE_CQ == TV_RESOURCE_CQ &&
		       (int)TAPVERBS_DV_RESOURCE_SRQ == TV_RESOURCE_SRQ,
	       "resources");

const struct tv_dv *dv_table(struct ibv_device *d)
{
	const struct tv_dv *t;

	if (!d || !d->_ops._dummy1)
		return NULL;
	t = (const struct tv_dv *)d->_ops._dummy1(d, TV_DV_ASK);
	return t && t->magic == TV_DV_MAGIC && t->abi == TV_ABI ? t : NULL;
}

const struct tv_dv *dv_there(struct ibv_context *ctx, int *rc)
{
	const struct tv_dv *t = dv_table(ctx->device);

	*rc = t ? t->lost(ctx) : EOPNOTSUPP;
	return *rc ? NULL : t;
}

bool tapverbs_dv_is_supported(struct ibv_device *d) { return dv_table(d) != NULL; }

int tapverbs_dv_unplug(struct ibv_context *ctx) { return DV_CTX(ctx, unplug); }

int tapverbs_dv_query_mr(struct ibv_mr *mr, struct tapverbs_dv_mr *out)
{
	const uint64_t want = out->comp_mask & (TAPVERBS_DV_MR_MASK_PRESENT | TAPVERBS_DV_MR_MASK_USAGE);
	struct tv_mr_info i = { .present = want & TAPVERBS_DV_MR_MASK_PRESENT };
	int rc = DV_MR(mr, query_mr, &i);
	struct tv_usage u;

	if (!rc && want & TAPVERBS_DV_MR_MASK_USAGE)
		rc = DV_MR(mr, mr_usage, &u);
	if (rc)
		return rc;
	out->comp_mask = want;
	out->paging = i.paging;
	out->reserved = 0;
	out->page_faults = i.page_faults;
	out->page_faults_handled = i.page_faults_handled;
	out->page_prefetch = i.page_prefetch;
	if (want & TAPVERBS_DV_MR_MASK_PRESENT)
		out->present = i.present;
	if (want & TAPVERBS_DV_MR_MASK_USAGE)
		dv_usage(&out->usage, &u);
	return 0;
}

int tapverbs_dv_query_counters(struct ibv_context *ctx, struct tapverbs_dv_counters *out)
{
	struct tv_counters c;
	int rc = DV_CTX(ctx, query_counters, &c);

	if (rc)
		return rc;
	*out = (struct tapverbs_dv_counters){
		.page_faults = c.page_faults, .page_faults_handled = c.page_faults_handled,
		.page_invalidations = c.page_invalidations, .page_prefetch = c.page_prefetch, .app_faults = c.app_faults,
		.rx_frames = c.rx_frames, .rx_bytes = c.rx_bytes, .tx_frames = c.tx_frames, .tx_bytes = c.tx_bytes,
		.rx_dropped = c.rx_dropped, .tx_dropped = c.tx_dropped,
	};
	return 0;
}
