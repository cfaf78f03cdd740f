/* SPDX-License-Identifier: Apache-2.0
 *
 * Pages that were written. */
#include "private.h"

_Static_assert(sizeof(struct tapverbs_dv_range) == sizeof(struct tv_range), "ranges are handed on as they are");

int tapverbs_dv_track_dirty(struct ibv_mr *mr, bool on) { return DV_MR(mr, track_dirty, on); }

int tapverbs_dv_dirty_mr(struct ibv_mr *mr, bool clear, struct tapverbs_dv_range *ranges, size_t *n)
{
	uint64_t count = *n;
	int rc = DV_MR(mr, dirty_mr, clear, (struct tv_range *)ranges, &count);

	*n = count;
	return rc;
}
