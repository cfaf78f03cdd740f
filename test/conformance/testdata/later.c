/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of verbs.c's program that are about operations of IBA A19: ATOMIC WRITE, and
 * FLUSH, which the headers do not have yet. What newer headers say is written down here,
 * as a program that was built with them has it. */
#include "verbs.h"

enum { WITH_FLUSH = 1 << 11, ACCESS_GLOBAL = 1 << 8, ACCESS_PERSISTENT = 1 << 9, WC_FLUSH = 8, WR_FLUSH = 14 };
enum { GLOBAL = 1, PERSISTENT = 2, RANGE = 0, REGION = 1 };

struct newer_qp_ex {
	struct ibv_qp_ex ex;
	void (*wr_flush)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, size_t len, uint8_t type, uint8_t level);
};
_Static_assert(offsetof(struct newer_qp_ex, wr_flush) == offsetof(struct ibv_qp_ex, wr_atomic_write) + sizeof(void *), "the last of rdma-core 44");

static void flush_one(struct ibv_qp_ex *x, uint32_t rkey, void *addr, size_t len, int type, int level)
{
	ibv_wr_start(x);
	x->wr_id = 5;
	x->wr_flags = IBV_SEND_SIGNALED;
	((struct newer_qp_ex *)x)->wr_flush(x, rkey, (uintptr_t)addr, len, type, level);
}

void later(void)
{
	struct ibv_device_attr_ex d;
	struct end a, b = make(NULL, DEPTH);
	struct ibv_wc wc;
	uint64_t v = 0x1122334455667788;
	char name[] = "/var/tmp/flushXXXXXX";

	CHECK(!ibv_query_device_ex(ctx, NULL, &d) && (d.device_cap_flags_ex >> 38 & 7) == 7);
	CHECK(a.cq = ibv_create_cq(ctx, 16, NULL, NULL, 0));
	struct ibv_qp_init_attr_ex in = { .send_cq = a.cq, .recv_cq = a.cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 2, .max_recv_sge = 1, .max_inline_data = 16 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_ATOMIC_WRITE | WITH_FLUSH };
	CHECK(a.qp = ibv_create_qp_ex(ctx, &in));
	struct ibv_qp_ex *x = ibv_qp_to_qp_ex(a.qp);
	join(&a, &b);
	struct ibv_qp_attr q = { .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | ACCESS_GLOBAL | ACCESS_PERSISTENT };
	CHECK(!ibv_modify_qp(b.qp, &q, IBV_QP_ACCESS_FLAGS));

	/* By builder, which takes the data at once and nothing else. */
	ibv_wr_start(x);
	x->wr_id = 1;
	x->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_atomic_write(x, mr->rkey, (uintptr_t)buf + 64, &v);
	v = 0;
	CHECK(!ibv_wr_complete(x));
	wc = wait_wc(a.cq);
	CHECK(wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_ATOMIC_WRITE);
	CHECK(*(uint64_t *)(buf + 64) == 0x1122334455667788);
	ibv_wr_start(x);
	ibv_wr_atomic_write(x, mr->rkey, (uintptr_t)buf + 64, &v);
	ibv_wr_set_sge(x, mr->lkey, (uintptr_t)buf, 8);
	CHECK(ibv_wr_complete(x) == EINVAL);
	/* By ibv_post_send, to SIZE / 2. */
	memcpy(buf, "8 bytes!", 8);
	CHECK(!send_wr(a.qp, 2, IBV_WR_ATOMIC_WRITE, 0, 8, IBV_SEND_SIGNALED));
	CHECK(wait_wc(a.cq).opcode == IBV_WC_ATOMIC_WRITE && !memcmp(buf + SIZE / 2, "8 bytes!", 8));
	memcpy(buf, "INLINE!!", 8);
	CHECK(!send_wr(a.qp, 2, IBV_WR_ATOMIC_WRITE, 0, 8, IBV_SEND_SIGNALED | IBV_SEND_INLINE));
	CHECK(wait_wc(a.cq).status == IBV_WC_SUCCESS && !memcmp(buf + SIZE / 2, "INLINE!!", 8));
	CHECK(send_wr(a.qp, 2, IBV_WR_ATOMIC_WRITE, 0, 7, 0) == EINVAL && send_wr(a.qp, 2, IBV_WR_ATOMIC_WRITE, 0, 16, IBV_SEND_INLINE) == EINVAL);

	/* FLUSH: a file's pages are on its disk when it is answered. */
	int fd = mkstemp(name);
	CHECK(fd >= 0 && !unlink(name));
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | ACCESS_GLOBAL | ACCESS_PERSISTENT;
	CHECK(!ftruncate(fd, SIZE));
	char *file = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(file != MAP_FAILED);
	CHECK(!ibv_reg_mr(pd, buf, SIZE, access) && errno == EINVAL); /* not a file */
	CHECK(!ibv_reg_mr(pd, file, SIZE, access) && errno == EINVAL); /* nobody could find it again */
	CHECK(!munmap(file, SIZE) && !close(fd));
	CHECK((fd = open(name, O_CREAT | O_RDWR | O_EXCL, 0600)) >= 0 && !ftruncate(fd, SIZE));
	file = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(file != MAP_FAILED);
	struct ibv_mr *fm = ibv_reg_mr(pd, file, SIZE, access);
	CHECK(fm && !unlink(name));
	ibv_wr_start(x);
	x->wr_flags = 0;
	ibv_wr_rdma_write(x, fm->rkey, (uintptr_t)file + 5000);
	ibv_wr_set_sge(x, mr->lkey, (uintptr_t)buf, SIZE / 4);
	x->wr_id = 3;
	((struct newer_qp_ex *)x)->wr_flush(x, fm->rkey, (uintptr_t)file + 5000, SIZE / 4, PERSISTENT | GLOBAL, RANGE);
	x->wr_id = 4;
	x->wr_flags = IBV_SEND_SIGNALED;
	memcpy(&v, "the end.", 8);
	ibv_wr_atomic_write(x, fm->rkey, (uintptr_t)file, &v);
	CHECK(!ibv_wr_complete(x));
	wc = wait_wc(a.cq);
	CHECK(wc.wr_id == 4 && wc.status == IBV_WC_SUCCESS);
	CHECK(!memcmp(file, "the end.", 8) && !memcmp(file + 5000, buf, SIZE / 4));
	flush_one(x, fm->rkey, NULL, 0, GLOBAL, REGION);
	CHECK(!ibv_wr_complete(x));
	wc = wait_wc(a.cq);
	CHECK(wc.wr_id == 5 && wc.status == IBV_WC_SUCCESS && (int)wc.opcode == WC_FLUSH);
	flush_one(x, fm->rkey, file, 8, 0, RANGE);
	CHECK(ibv_wr_complete(x) == EINVAL);
	flush_one(x, fm->rkey, file, 8, 4, RANGE);
	CHECK(ibv_wr_complete(x) == EINVAL);
	flush_one(x, fm->rkey, file, 8, GLOBAL, 2);
	CHECK(ibv_wr_complete(x) == EINVAL);
	flush_one(x, fm->rkey, file, (1ull << 32) + 8, GLOBAL, RANGE);
	CHECK(ibv_wr_complete(x) == EINVAL);
	CHECK(send_wr(a.qp, 6, (enum ibv_wr_opcode)WR_FLUSH, 0, 0, 0) == EINVAL); /* struct ibv_send_wr has no place for it */
	flush_one(x, mr->rkey, buf, 8, GLOBAL, RANGE);
	CHECK(!ibv_wr_complete(x));
	CHECK(wait_wc(a.cq).status == IBV_WC_REM_ACCESS_ERR);
	end_it(&a);
	end_it(&b);
	CHECK(!ibv_dereg_mr(fm) && !munmap(file, SIZE) && !close(fd));
}
