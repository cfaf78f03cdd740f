/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that is linked with libtapverbs: as an installed header and pkg-config
 * have it. */
#include <infiniband/tapverbs_dv.h>

#include "verbs.h"

struct ibv_context *ctx;
struct ibv_pd *pd;
struct ibv_mr *mr;
char *buf;

static uint64_t paging(struct ibv_mr *m)
{
	struct tapverbs_dv_mr q = { .present = 77 };

	CHECK(!tapverbs_dv_query_mr(m, &q) && q.comp_mask == 0 && q.present == 77);
	return q.paging;
}

int main(void)
{
	struct tapverbs_dv_mr q = { .comp_mask = ~0ull };
	struct tapverbs_dv_counters before = { 0 }, after = { 0 };

	setup();
	CHECK(tapverbs_dv_is_supported(ctx->device));
	struct ibv_device foreign = { .name = "mlx5_0" };
	struct ibv_context strange = { .device = &foreign };
	struct ibv_mr theirs = { .context = &strange };
	CHECK(!tapverbs_dv_is_supported(&foreign) && tapverbs_dv_query_mr(&theirs, &q) == EOPNOTSUPP);
	CHECK(tapverbs_dv_query_counters(&strange, &before) == EOPNOTSUPP);

	/* A peer's WRITE of 3 pages to memory that nobody has touched. */
	CHECK(!tapverbs_dv_query_counters(ctx, &before) && !tapverbs_dv_query_mr(mr, &q));
	CHECK(q.comp_mask == (TAPVERBS_DV_MR_MASK_PRESENT | TAPVERBS_DV_MR_MASK_USAGE) && q.paging == TAPVERBS_DV_PAGING_USERFAULT);
	CHECK(!q.page_faults && !q.page_faults_handled && !q.page_prefetch && !q.present);
	struct end a = make(NULL, 64), b = make(NULL, 64);
	join(&a, &b);
	CHECK(!send_wr(a.qp, 1, IBV_WR_RDMA_WRITE, 0, 3 * 4096, IBV_SEND_SIGNALED));
	CHECK(wait_wc(a.cq).status == IBV_WC_SUCCESS);
	CHECK(!tapverbs_dv_query_mr(mr, &q) && q.present == 6 * 4096 && q.page_faults == 6 && q.page_faults_handled == 6);
	/* A fault of our own, advice, and pages that leave. */
	((volatile char *)buf)[14 * 4096] = 1;
	struct ibv_mr *odp = ibv_reg_mr(pd, buf, SIZE, IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge s = { (uintptr_t)buf + 12 * 4096, 4096, odp->lkey };
	CHECK(odp && !ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_FLAG_FLUSH, &s, 1));
	CHECK(!tapverbs_dv_query_mr(odp, &q) && q.page_prefetch == 1);
	CHECK(!madvise(buf, 4096, MADV_DONTNEED));
	CHECK(!tapverbs_dv_query_counters(ctx, &after) && after.comp_mask == 0);
	CHECK(after.page_faults - before.page_faults == 6 && after.page_faults_handled - before.page_faults_handled == 6);
	CHECK(after.page_prefetch - before.page_prefetch == 1 && after.app_faults - before.app_faults == 1);
	CHECK(after.page_invalidations - before.page_invalidations == 1);
	CHECK(after.rx_frames > before.rx_frames && after.rx_bytes - before.rx_bytes > 3 * 4096);
	end_it(&a);
	end_it(&b);

	struct ibv_alloc_dm_attr want = { .length = 4096 };
	struct ibv_dm *d = ibv_alloc_dm(ctx, &want);
	static char data[4096];
	struct ibv_mr *m[] = {
		ibv_reg_mr(pd, data, sizeof data, 0), ibv_reg_dm_mr(pd, d, 0, 4096, IBV_ACCESS_ZERO_BASED),
		ibv_reg_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND), ibv_alloc_null_mr(pd),
	};
	static const enum tapverbs_dv_paging is[] = {
		TAPVERBS_DV_PAGING_USERFAULT, TAPVERBS_DV_PAGING_DEVICE, TAPVERBS_DV_PAGING_IMPLICIT, TAPVERBS_DV_PAGING_NULL,
	};
	for (int i = 0; i < 4; i++) {
		CHECK(m[i]);
		/* The program's data is part of a file, or not, as the linker has it. */
		CHECK(paging(m[i]) == is[i] || (i == 0 && paging(m[i]) == TAPVERBS_DV_PAGING_KERNEL));
	}
	q.comp_mask = TAPVERBS_DV_MR_MASK_PRESENT;
	CHECK(!tapverbs_dv_query_mr(m[2], &q) && q.present > 1 << 20);
	CHECK(!tapverbs_dv_query_mr(m[3], &q) && q.present == 0);
	for (int i = 0; i < 4; i++)
		CHECK(!ibv_dereg_mr(m[i]));
	CHECK(!ibv_free_dm(d) && !ibv_dereg_mr(odp));
	pid_t child = fork();
	if (!child)
		_exit(tapverbs_dv_query_mr(mr, &q) == EIO && tapverbs_dv_query_counters(ctx, &after) == EIO ? 0 : 1);
	int status;
	CHECK(waitpid(child, &status, 0) == child && !status);
	teardown();
	return 0;
}
