/* SPDX-License-Identifier: Apache-2.0
 *
 * What libtapverbs.so.1 asks for: the engine, and the engine's names for objects. */
#include "tv.h"

static int lost(struct ibv_context *ctx) { return tv_lost(ctx) ? EIO : 0; }
static int forked(void) { return tv_forked; }
static tv_handle of_pd(struct ibv_pd *pd) { return ((struct tv_pd *)pd)->handle; }
static tv_handle of_mr(struct ibv_mr *mr) { return ((struct tv_mr *)mr)->handle; }
static void **mr_note(struct ibv_mr *mr) { return &((struct tv_mr *)mr)->note; }
static tv_handle of_qp(struct ibv_qp *qp) { return ((struct tv_qp *)qp)->handle; }

struct ibv_context *tv_dv_ask(struct ibv_device *d, int what)
{
	static struct tv_dv table = {
		.magic = TV_DV_MAGIC, .abi = TV_ABI, .lost = lost, .forked = forked, .ctx = tv_ctx_handle, .pd = of_pd, .mr = of_mr, .qp = of_qp,
		.reg_mr = ibv_reg_mr, .dereg_mr = ibv_dereg_mr, .mr_note = mr_note, .mr_unacked = tv_mr_unacked,
		.channel_new = tv_dv_channel_new, .get_event = tv_dv_get_event, .ack_event = tv_dv_ack_event,
		.channel_end = tv_dv_channel_end,
	};

	(void)d;
	/* There are devices, so the engine is loaded, for good. */
	__atomic_store_n(&table.engine, tv_e, __ATOMIC_RELEASE);
	return what == TV_DV_ASK ? (struct ibv_context *)(uintptr_t)&table : NULL;
}
