/* SPDX-License-Identifier: Apache-2.0
 *
 * Where the pages of regions are. */
#include "private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(struct tapverbs_dv_residency) == sizeof(struct tv_residency), "parts are handed on as they are");

void dv_usage(struct tapverbs_dv_usage *o, const struct tv_usage *u)
{
	*o = (struct tapverbs_dv_usage){
		.size = u->size, .present = u->present, .limbo = u->limbo, .stored = u->stored, .dirty = u->dirty,
		.budget = u->budget, .faults_minor = u->faults_minor, .faults_major = u->faults_major,
		.app_faults_minor = u->app_faults_minor, .app_faults_major = u->app_faults_major, .fault_ns = u->fault_ns,
		.rnrs = u->rnrs, .evictions = u->evictions, .invalidations = u->invalidations, .prefetches = u->prefetches,
		.app_fault_ns = u->app_fault_ns,
	};
}

int tapverbs_dv_query_usage(struct ibv_context *ctx, struct tapverbs_dv_usage *out)
{
	struct tv_usage u;
	int rc = DV_CTX(ctx, usage, &u);

	if (!rc)
		dv_usage(out, &u);
	return rc;
}

int tapverbs_dv_query_pd_usage(struct ibv_pd *pd, struct tapverbs_dv_usage *out)
{
	struct tv_usage u;
	int rc = DV_PD(pd, pd_usage, &u);

	if (!rc)
		dv_usage(out, &u);
	return rc;
}

int tapverbs_dv_query_qp_faults(struct ibv_qp *qp, struct tapverbs_dv_qp_faults *out)
{
	struct tv_qp_faults f;
	int rc = DV_QP(qp, qp_faults, &f);

	if (!rc)
		*out = (struct tapverbs_dv_qp_faults){ .minor = f.minor, .major = f.major, .ns = f.ns, .rnrs = f.rnrs };
	return rc;
}

int tapverbs_dv_query_thread_faults(struct ibv_context *ctx, struct tapverbs_dv_thread_faults *out, uint32_t *n)
{
	uint32_t room = *n < 1024 ? *n : 1024, all = room;
	struct tv_thread_faults *f = calloc(room ? room : 1, sizeof *f);
	int rc = f ? DV_CTX(ctx, thread_faults, f, &all) : ENOMEM;

	for (uint32_t i = 0; !rc && i < room && i < all; i++) {
		out[i] = (struct tapverbs_dv_thread_faults){ .tid = f[i].tid, .minor = f[i].minor, .major = f[i].major, .ns = f[i].ns };
		memcpy(out[i].name, f[i].name, sizeof out[i].name);
	}
	if (!rc)
		*n = all;
	free(f);
	return rc;
}

int tapverbs_dv_query_residency(struct ibv_mr *mr, struct tapverbs_dv_residency *parts, uint32_t *n)
{
	return DV_MR(mr, residency, (struct tv_residency *)parts, n);
}
