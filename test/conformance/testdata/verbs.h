/* SPDX-License-Identifier: Apache-2.0
 *
 * What the checks of verbs.c and stress.c share: a device, and pairs of queue pairs
 * that talk to each other on it. */
#ifndef CONFORMANCE_VERBS_H
#define CONFORMANCE_VERBS_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "check.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { DEPTH = 64, SIZE = 1 << 16 };

struct end {
	struct ibv_qp *qp;
	struct ibv_cq *cq;
};

/* What setup makes: a context, a domain, and SIZE bytes that are registered. */
extern struct ibv_context *ctx;
extern struct ibv_pd *pd;
extern struct ibv_mr *mr;
extern char *buf;

static inline struct ibv_context *open_dev(void)
{
	int n;
	struct ibv_device **l = ibv_get_device_list(&n);

	CHECK(l && n == 1 && !strcmp(ibv_get_device_name(l[0]), "tapverbs0"));
	struct ibv_context *c = ibv_open_device(l[0]);
	CHECK(c);
	ibv_free_device_list(l);
	return c;
}

/* Memory that the kernel puts nowhere by itself: when it is unmapped nothing gets there, whatever other
 * threads map. */
static inline char *apart(size_t n)
{
	static uintptr_t next = 0x4b0000000000;
	char *p = mmap((void *)next, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);

	CHECK(p == (char *)next);
	next += (n + (1 << 24)) & ~(uintptr_t)((1 << 21) - 1);
	return p;
}

static inline void setup(void)
{
	ctx = open_dev();
	CHECK(pd = ibv_alloc_pd(ctx));
	buf = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(mr = ibv_reg_mr(pd, buf, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC));
}

static inline void teardown(void)
{
	CHECK(!ibv_dereg_mr(mr));
	CHECK(!munmap(buf, SIZE));
	CHECK(!ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(ctx));
}

static inline struct end make_srq(struct ibv_comp_channel *ch, int cqe, struct ibv_srq *srq)
{
	struct end e;

	CHECK(e.cq = ibv_create_cq(ctx, cqe, (void *)0x77, ch, 0));
	struct ibv_qp_init_attr in = { .send_cq = e.cq, .recv_cq = e.cq, .srq = srq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 32 } };
	CHECK(e.qp = ibv_create_qp(pd, &in));
	CHECK(in.cap.max_send_wr >= DEPTH && in.cap.max_inline_data >= 32);
	return e;
}

static inline struct end make(struct ibv_comp_channel *ch, int cqe) { return make_srq(ch, cqe, NULL); }

static inline void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
}

/* Of connections that are made from now on: 1 s, so that all retries take longer than any
 * machine leaves a program alone; 0: they never ask again. */
static int ack_timeout = 18;

static inline void connect_to(struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer, .rq_psn = 7,
		.max_dest_rd_atomic = 4, .min_rnr_timer = 12, .ah_attr = { .is_global = 1, .port_num = 1 } };
	a.ah_attr.grh.sgid_index = 1;
	CHECK(!ibv_query_gid(ctx, 1, 1, &a.ah_attr.grh.dgid));
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = ack_timeout, .retry_cnt = 7, .rnr_retry = 7, .sq_psn = 7, .max_rd_atomic = 4 };
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static inline void join(struct end *a, struct end *b)
{
	to_init(a->qp);
	to_init(b->qp);
	connect_to(a->qp, b->qp->qp_num);
	connect_to(b->qp, a->qp->qp_num);
}

static inline void end_it(struct end *e)
{
	CHECK(!ibv_destroy_qp(e->qp));
	CHECK(!ibv_destroy_cq(e->cq));
}

static inline int recv_one(struct ibv_qp *qp, uint64_t id, int off, int len)
{
	struct ibv_sge s = { (uintptr_t)buf + off, len, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &s, .num_sge = 1 }, *bad = NULL;
	int rc = ibv_post_recv(qp, &wr, &bad);

	CHECK(!rc == !bad);
	return rc;
}

static inline int send_wr(struct ibv_qp *qp, uint64_t id, enum ibv_wr_opcode op, int off, int len, int flags)
{
	struct ibv_sge s = { (uintptr_t)buf + off, len, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &s, .num_sge = 1, .opcode = op, .send_flags = flags,
		.imm_data = htonl(0x01020304) }, *bad = NULL;
	if (op == IBV_WR_ATOMIC_CMP_AND_SWP || op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = (uintptr_t)buf + SIZE / 2;
		wr.wr.atomic.rkey = mr->rkey;
		wr.wr.atomic.compare_add = 5;
		wr.wr.atomic.swap = 9;
	} else {
		wr.wr.rdma.remote_addr = (uintptr_t)buf + SIZE / 2;
		wr.wr.rdma.rkey = mr->rkey;
	}
	int rc = ibv_post_send(qp, &wr, &bad);

	CHECK(!rc == !bad);
	return rc;
}

static inline struct ibv_wc wait_wc(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	int n;

	while (!(n = ibv_poll_cq(cq, 1, &wc)))
		;
	CHECK(n == 1);
	return wc;
}

static inline double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

/* signals.c */
void signals(void);
void beside(void);

/* attrs.c */
void attrs(void);

/* later.c */
void later(void);

/* stress.c */
void forked(void);
void contexts(void);
void vanish(void);
void many(void);
void threads(void);
void bench(void);
void cycles(int n);

#endif
