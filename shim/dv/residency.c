/* SPDX-License-Identifier: Apache-2.0
 *
 * Residency messages. */
#include "private.h"

int tapverbs_dv_enable_residency(struct ibv_qp *qp, const struct tapverbs_dv_residency_attr *attr)
{
	struct tv_residency_attr a = { 0 };

	if (attr) {
		if (attr->comp_mask || attr->reserved || attr->max_hold < -1)
			return EINVAL;
		a.ahead = attr->ahead;
		a.max_hold = attr->max_hold;
	}
	return DV_QP(qp, enable_residency, &a);
}

int tapverbs_dv_disable_residency(struct ibv_qp *qp) { return DV_QP(qp, disable_residency); }

int tapverbs_dv_query_remote(struct ibv_qp *qp, uint32_t rkey, uint64_t iova, uint64_t length, struct tapverbs_dv_remote *out)
{
	struct tv_remote r;
	int rc = DV_QP(qp, query_remote, rkey, iova, length, &r);

	if (!rc)
		*out = (struct tapverbs_dv_remote){ .away = r.away, .agreed = r.agreed, .watched = r.watched, .held_off = r.held_off };
	return rc;
}

int tapverbs_dv_prefetch_remote(struct ibv_qp *qp, uint32_t rkey, uint64_t iova, uint64_t length)
{
	return DV_QP(qp, prefetch_remote, rkey, iova, length);
}
