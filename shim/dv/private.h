/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of libtapverbs.so.1 share. All is done by the engine that libibverbs.so.1
 * has loaded, by way of the table that its device gives; see ../verbs/dv.h. Fields that
 * were not in the first version of a struct are written only if the caller's comp_mask
 * asks for them: its struct may end before. */
#ifndef TAPVERBS_DV_PRIVATE_H
#define TAPVERBS_DV_PRIVATE_H

#include <errno.h>
#include <stddef.h>

#include "infiniband/tapverbs_dv.h"

#include "../verbs/dv.h"

#define HIDDEN __attribute__((visibility("hidden")))

/* dv_table is what a device of tapverbs has to say; NULL if it is another's. */
HIDDEN const struct tv_dv *dv_table(struct ibv_device *d);

/* dv_there is dv_table for calls that need the device; NULL with *rc if that is not to be
 * had. */
HIDDEN const struct tv_dv *dv_there(struct ibv_context *ctx, int *rc);

/* dv_usage puts numbers into the program's struct. */
HIDDEN void dv_usage(struct tapverbs_dv_usage *o, const struct tv_usage *u);

/* DV_MR(mr, fn, ...) has the engine's fn do something to a region, and gives its answer;
 * DV_QP, DV_PD and DV_CTX the same for other objects. */
#define DV_CALL(ctx_, handle, fn, ...)                                                             \
	({                                                                                         \
		int rc_;                                                                           \
		const struct tv_dv *t_ = dv_there(ctx_, &rc_);                                     \
		t_ ? t_->engine->fn(t_->handle, ##__VA_ARGS__) : rc_;                              \
	})
#define DV_MR(m, fn, ...) DV_CALL((m)->context, mr(m), fn, ##__VA_ARGS__)
#define DV_QP(q, fn, ...) DV_CALL((q)->context, qp(q), fn, ##__VA_ARGS__)
#define DV_PD(p, fn, ...) DV_CALL((p)->context, pd(p), fn, ##__VA_ARGS__)
#define DV_CTX(c, fn, ...) DV_CALL(c, ctx(c), fn, ##__VA_ARGS__)

#endif
