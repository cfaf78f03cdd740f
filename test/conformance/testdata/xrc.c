/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of XRC: error numbers, a target and its SRQ shared by two contexts through a
 * file, each operation, and what follows from a wrong SRQ number. */
#include "verbs.h"

struct ibv_context *ctx;
struct ibv_pd *pd;
struct ibv_mr *mr;
char *buf;

static struct ibv_xrcd *open_domain(struct ibv_context *c, int fd, int oflags)
{
	struct ibv_xrcd_init_attr a = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = fd, .oflags = oflags };

	return ibv_open_xrcd(c, &a);
}

static struct ibv_srq *make_xsrq(struct ibv_pd *p, struct ibv_xrcd *x, struct ibv_cq *cq, int mask)
{
	struct ibv_srq_init_attr_ex a = { .attr = { .max_wr = DEPTH, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC, .pd = p, .xrcd = x, .cq = cq,
		.comp_mask = mask };
	struct ibv_srq *s = ibv_create_srq_ex(p->context, &a);

	CHECK(!s || a.attr.max_wr >= DEPTH);
	return s;
}

enum { ALL = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ };

static struct ibv_qp *target(struct ibv_context *c, struct ibv_xrcd *x)
{
	struct ibv_qp_init_attr_ex in = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = x };

	return ibv_create_qp_ex(c, &in);
}

static struct ibv_qp *initiator(struct ibv_cq *cq, uint64_t ops)
{
	struct ibv_qp_init_attr_ex in = { .qp_type = IBV_QPT_XRC_SEND, .pd = pd, .send_cq = cq, .sq_sig_all = 1,
		.comp_mask = IBV_QP_INIT_ATTR_PD | (ops ? IBV_QP_INIT_ATTR_SEND_OPS_FLAGS : 0), .send_ops_flags = ops,
		.cap = { .max_send_wr = DEPTH, .max_send_sge = 2, .max_inline_data = 32 } };
	struct ibv_qp *q = ibv_create_qp_ex(ctx, &in);

	CHECK(!q || (in.cap.max_send_wr >= DEPTH && !in.cap.max_recv_wr));
	return q;
}

static struct ibv_qp *open_target(struct ibv_context *c, struct ibv_xrcd *x, uint32_t num, int type)
{
	struct ibv_qp_open_attr a = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_CONTEXT | IBV_QP_OPEN_ATTR_TYPE,
		.qp_num = num, .xrcd = x, .qp_context = (void *)0x99, .qp_type = type };

	return ibv_open_qp(c, &a);
}

static void errors(void)
{
	struct ibv_device_attr_ex d;
	char name[] = "/tmp/xrcXXXXXX";
	int fd = mkstemp(name);
	uint32_t n;

	CHECK(!ibv_query_device_ex(ctx, NULL, &d) && d.orig_attr.device_cap_flags & IBV_DEVICE_XRC);
	CHECK(d.xrc_odp_caps & IBV_ODP_SUPPORT_SRQ_RECV && d.xrc_odp_caps & IBV_ODP_SUPPORT_ATOMIC);
	CHECK(fd >= 0 && !unlink(name));
	CHECK(!ibv_open_xrcd(ctx, &(struct ibv_xrcd_init_attr){ .comp_mask = IBV_XRCD_INIT_ATTR_FD, .fd = -1 }) && errno == EINVAL);
	CHECK(!ibv_open_xrcd(ctx, &(struct ibv_xrcd_init_attr){ .comp_mask = 64 }) && errno == EOPNOTSUPP);
	CHECK(!open_domain(ctx, fd, 0) && errno == EAGAIN);
	CHECK(!open_domain(ctx, 9999, O_CREAT) && errno == EBADF);
	struct ibv_xrcd *x = open_domain(ctx, fd, O_CREAT | O_EXCL), *y = open_domain(ctx, fd, O_CREAT), *own = open_domain(ctx, -1, O_CREAT);
	CHECK(x && y && own);
	CHECK(!open_domain(ctx, fd, O_CREAT | O_EXCL) && errno == EINVAL);

	struct ibv_cq *cq = ibv_create_cq(ctx, DEPTH, NULL, NULL, 0);
	CHECK(cq);
	CHECK(!make_xsrq(pd, x, cq, ALL & ~IBV_SRQ_INIT_ATTR_XRCD) && errno == EINVAL);
	CHECK(!make_xsrq(pd, x, cq, ALL & ~IBV_SRQ_INIT_ATTR_CQ) && errno == EINVAL);
	CHECK(!make_xsrq(pd, x, cq, ALL & ~IBV_SRQ_INIT_ATTR_PD) && errno == EINVAL);
	CHECK(!make_xsrq(pd, NULL, cq, ALL) && errno == EINVAL);
	CHECK(!make_xsrq(pd, x, cq, ALL | IBV_SRQ_INIT_ATTR_TM) && errno == EOPNOTSUPP);
	struct ibv_srq *s = make_xsrq(pd, x, cq, ALL);
	CHECK(s && !ibv_get_srq_num(s, &n) && n && n < 1 << 24);
	struct ibv_srq *basic = ibv_create_srq(pd, &(struct ibv_srq_init_attr){ .attr = { .max_wr = 4, .max_sge = 1 } });
	CHECK(basic && ibv_get_srq_num(basic, &n) == EINVAL && !ibv_destroy_srq(basic));

	CHECK(!target(ctx, NULL) && errno == EINVAL);
	struct ibv_qp *t = target(ctx, x), *i = initiator(cq, 0);
	CHECK(t && i && !t->pd && t->qp_type == IBV_QPT_XRC_RECV && t->state == IBV_QPS_RESET);
	CHECK(!initiator(NULL, 0) && errno == EINVAL);
	CHECK(!open_target(ctx, own, t->qp_num, IBV_QPT_XRC_RECV) && errno == EINVAL);
	CHECK(!open_target(ctx, x, t->qp_num + 1, IBV_QPT_XRC_RECV) && errno == EINVAL);
	CHECK(!open_target(ctx, x, t->qp_num, IBV_QPT_RC) && errno == EINVAL);
	to_init(t);
	to_init(i);
	connect_to(i, t->qp_num);
	connect_to(t, i->qp_num);
	CHECK(recv_one(t, 1, 0, 8) == EINVAL && recv_one(i, 1, 0, 8) == EINVAL && send_wr(t, 1, IBV_WR_SEND, 0, 8, 0) == EINVAL);

	CHECK(ibv_close_xrcd(x) == EBUSY && ibv_destroy_cq(cq) == EBUSY);
	CHECK(!ibv_destroy_qp(i) && ibv_close_xrcd(x) == EBUSY && !ibv_destroy_qp(t) && ibv_close_xrcd(x) == EBUSY && ibv_destroy_cq(cq) == EBUSY);
	CHECK(!ibv_destroy_srq(s) && !ibv_close_xrcd(x) && !ibv_close_xrcd(y) && !ibv_close_xrcd(own) && !ibv_destroy_cq(cq));
	CHECK(!open_domain(ctx, fd, 0) && errno == EAGAIN);
	CHECK(lseek(fd, 0, SEEK_CUR) == 0 && !close(fd));
}

static void post_srq(struct ibv_srq *s, struct ibv_mr *m, uint64_t id, int off, int len)
{
	struct ibv_sge g = { (uintptr_t)buf + off, len, m->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &g, .num_sge = 1 }, *bad;

	CHECK(!ibv_post_srq_recv(s, &wr, &bad));
}

static void post(struct ibv_qp *q, uint64_t id, enum ibv_wr_opcode op, struct ibv_mr *far, int off, int len, uint32_t srqn)
{
	struct ibv_sge g = { (uintptr_t)buf, len, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &g, .num_sge = 1, .opcode = op, .imm_data = htonl(77), .qp_type.xrc.remote_srqn = srqn }, *bad;

	if (op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = (uintptr_t)buf + off;
		wr.wr.atomic.rkey = far->rkey;
		wr.wr.atomic.compare_add = 5;
	} else {
		wr.wr.rdma.remote_addr = (uintptr_t)buf + off;
		wr.wr.rdma.rkey = far->rkey;
	}
	CHECK(!ibv_post_send(q, &wr, &bad));
}

static struct ibv_wc done(struct ibv_cq *cq, uint64_t id)
{
	struct ibv_wc wc = wait_wc(cq);

	CHECK(wc.wr_id == id && wc.status == IBV_WC_SUCCESS);
	return wc;
}

/* event takes the events of a QP until the one wanted. */
static void event(struct ibv_context *c, struct ibv_qp *q, enum ibv_event_type want)
{
	struct ibv_async_event ev;

	do {
		CHECK(!ibv_get_async_event(c, &ev) && ev.element.qp == q);
		ibv_ack_async_event(&ev);
	} while (ev.event_type != want);
}

static void shared(void)
{
	const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
	struct ibv_context *c2 = open_dev();
	struct ibv_pd *pd2 = ibv_alloc_pd(c2);
	struct ibv_mr *mr2 = ibv_reg_mr(pd2, buf, SIZE, access);
	struct ibv_cq *cq = ibv_create_cq(ctx, DEPTH, NULL, NULL, 0), *cq2 = ibv_create_cq(c2, DEPTH, NULL, NULL, 0);
	char name[] = "/tmp/xrcXXXXXX";
	int fd = mkstemp(name);
	struct ibv_wc wc;
	uint32_t n;

	CHECK(pd2 && mr2 && cq && cq2 && fd >= 0);
	struct ibv_xrcd *x = open_domain(ctx, fd, O_CREAT), *x2 = open_domain(c2, fd, 0);
	CHECK(x && x2);
	struct ibv_srq *s = make_xsrq(pd2, x2, cq2, ALL);
	CHECK(s && !ibv_get_srq_num(s, &n));
	struct ibv_qp *t = target(ctx, x), *i = initiator(cq, IBV_QP_EX_WITH_SEND);
	CHECK(t && i);
	to_init(t);
	to_init(i);
	connect_to(i, t->qp_num);
	connect_to(t, i->qp_num);
	struct ibv_qp *t2 = open_target(c2, x2, t->qp_num, IBV_QPT_XRC_RECV);
	CHECK(t2 && t2->qp_num == t->qp_num && t2->qp_context == (void *)0x99 && t2->state == IBV_QPS_RTS);

	memset(buf, 'x', 4096);
	post_srq(s, mr2, 1, 8192, 4096);
	post(i, 2, IBV_WR_SEND_WITH_IMM, mr2, 0, 4096, n);
	wc = done(cq2, 1);
	CHECK(wc.qp_num == t->qp_num && wc.src_qp == i->qp_num && wc.byte_len == 4096 && wc.wc_flags & IBV_WC_WITH_IMM && wc.imm_data == htonl(77));
	CHECK(done(cq, 2).qp_num == i->qp_num && !memcmp(buf, buf + 8192, 4096));
	post(i, 3, IBV_WR_RDMA_WRITE, mr2, 16384, 4096, n);
	done(cq, 3);
	CHECK(!memcmp(buf, buf + 16384, 4096));
	memset(buf + 16384, 'y', 4096);
	post(i, 4, IBV_WR_RDMA_READ, mr2, 16384, 4096, n);
	done(cq, 4);
	CHECK(!memcmp(buf, buf + 16384, 4096));
	*(uint64_t *)(buf + 16384) = 37;
	post(i, 5, IBV_WR_ATOMIC_FETCH_AND_ADD, mr2, 16384, 8, n);
	done(cq, 5);
	CHECK(*(uint64_t *)buf == 37 && *(uint64_t *)(buf + 16384) == 42);
	post_srq(s, mr2, 6, 0, 0);
	post(i, 7, IBV_WR_RDMA_WRITE_WITH_IMM, mr2, 16384, 100, n);
	CHECK(done(cq2, 6).opcode == IBV_WC_RECV_RDMA_WITH_IMM);
	done(cq, 7);

	/* The builder; and the creator of the target is gone, which others still use. */
	CHECK(!ibv_destroy_qp(t));
	CHECK(ibv_close_xrcd(x) == 0);
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(i);
	CHECK(ex);
	memset(buf, 'z', 100);
	post_srq(s, mr2, 8, 8192, 4096);
	ibv_wr_start(ex);
	ex->wr_id = 9;
	ibv_wr_send(ex);
	ibv_wr_set_xrc_srqn(ex, n);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)buf, 100);
	CHECK(!ibv_wr_complete(ex));
	CHECK(done(cq2, 8).byte_len == 100 && done(cq, 9).status == IBV_WC_SUCCESS && !memcmp(buf, buf + 8192, 100));

	/* An SRQ that is not there: the request is refused, and whoever has the target open
	 * hears of it. */
	struct ibv_qp *t3 = open_target(c2, x2, t2->qp_num, IBV_QPT_XRC_RECV);
	CHECK(t3);
	post(i, 10, IBV_WR_SEND, mr2, 0, 10, n + 1);
	wc = wait_wc(cq);
	CHECK(wc.wr_id == 10 && wc.status == IBV_WC_REM_INV_REQ_ERR);
	event(c2, t2, IBV_EVENT_QP_REQ_ERR);
	CHECK(!ibv_destroy_qp(t2));
	event(c2, t3, IBV_EVENT_QP_LAST_WQE_REACHED);
	CHECK(!ibv_destroy_qp(t3) && !ibv_destroy_qp(i));
	CHECK(!ibv_destroy_srq(s) && !ibv_close_xrcd(x2));
	/* What is left goes with its context. */
	x = open_domain(c2, fd, O_CREAT);
	CHECK(x && target(c2, x) && make_xsrq(pd2, x, cq2, ALL));
	CHECK(!ibv_close_device(c2));
	CHECK(!open_domain(ctx, fd, 0) && errno == EAGAIN);
	CHECK(!ibv_destroy_cq(cq) && !close(fd) && !unlink(name));
}

int main(void)
{
	setup();
	errors();
	shared();
	teardown();
	return 0;
}
