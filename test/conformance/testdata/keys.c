/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of keys that change: memory windows of both types, invalidation here and by the
 * peer, and regions that are registered anew. */
#include <stdbool.h>

#include "verbs.h"

struct ibv_context *ctx;
struct ibv_pd *pd;
struct ibv_mr *mr;
char *buf;

enum { ALL = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC, KEYS = 4096 };

/* Windows are of wmr: the second half of buf, which nobody has remote rights to. */
static struct ibv_mr *wmr;
static char *area;

static struct end make_ex(void)
{
	struct end e;
	struct ibv_qp_init_attr_ex in = { .qp_type = IBV_QPT_RC, .pd = pd,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_RDMA_WRITE };

	CHECK(e.cq = ibv_create_cq(ctx, 2 * DEPTH, NULL, NULL, 0));
	in.send_cq = in.recv_cq = e.cq;
	CHECK(e.qp = ibv_create_qp_ex(ctx, &in));
	return e;
}

/* again brings two queue pairs back from an error. */
static void again(struct end *a, struct end *b)
{
	struct ibv_qp_attr r = { .qp_state = IBV_QPS_RESET };
	struct ibv_wc wc;

	CHECK(!ibv_modify_qp(a->qp, &r, IBV_QP_STATE) && !ibv_modify_qp(b->qp, &r, IBV_QP_STATE));
	CHECK(!ibv_poll_cq(a->cq, 1, &wc) && !ibv_poll_cq(b->cq, 1, &wc));
	join(a, b);
}

/* by does one operation on len bytes at off of what a key opens, and gives its status. */
static enum ibv_wc_status by(struct end *e, enum ibv_wr_opcode op, uint32_t key, uint64_t addr, int len)
{
	struct ibv_sge s = { (uintptr_t)buf, len, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 5, .sg_list = &s, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED }, *bad;

	if (op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = addr;
		wr.wr.atomic.rkey = key;
		wr.wr.atomic.compare_add = 1;
	} else {
		wr.wr.rdma.remote_addr = addr;
		wr.wr.rdma.rkey = key;
	}
	CHECK(!ibv_post_send(e->qp, &wr, &bad));
	return wait_wc(e->cq).status;
}

/* reaches says that the peer can write len bytes by a key, and that they arrive. */
static void reaches(struct end *e, uint32_t key, uint64_t addr, char *where, int len)
{
	static char seed;

	seed++;
	for (int i = 0; i < len; i++)
		buf[i] = seed + i;
	CHECK(by(e, IBV_WR_RDMA_WRITE, key, addr, len) == IBV_WC_SUCCESS);
	CHECK(!memcmp(where, buf, len));
}

/* refused says that an operation ends with a remote access error and touches nothing. */
static void refused(struct end *a, struct end *b, enum ibv_wr_opcode op, uint32_t key, uint64_t addr, int len)
{
	static char was[SIZE / 2];

	memcpy(was, area, sizeof(was));
	memset(buf, 0x5a, len);
	CHECK(by(a, op, key, addr, len) == IBV_WC_REM_ACCESS_ERR);
	CHECK(!memcmp(was, area, sizeof(was)));
	again(a, b);
}

static struct ibv_wc bind1(struct end *e, struct ibv_mw *mw, struct ibv_mr *m, uint64_t off, uint64_t len, unsigned access)
{
	struct ibv_mw_bind b = { .wr_id = 77, .send_flags = IBV_SEND_SIGNALED,
		.bind_info = { .mr = m, .addr = m ? (uintptr_t)m->addr + off : 0, .length = len, .mw_access_flags = access } };
	uint32_t old = mw->rkey;
	struct ibv_wc wc;

	CHECK(!ibv_bind_mw(e->qp, mw, &b));
	CHECK(mw->rkey == ibv_inc_rkey(old));
	wc = wait_wc(e->cq);
	CHECK(wc.wr_id == 77 && (wc.status != IBV_WC_SUCCESS || wc.opcode == IBV_WC_BIND_MW));
	return wc;
}

static void type1(void)
{
	struct end a = make(NULL, 2 * DEPTH), b = make(NULL, 2 * DEPTH);
	struct ibv_mw *mw;
	struct ibv_mw_bind bad = { .bind_info = { .mr = wmr, .addr = (uintptr_t)area, .length = 8, .mw_access_flags = IBV_ACCESS_ZERO_BASED } };
	uint64_t at = (uintptr_t)area + 100;
	uint32_t old;

	CHECK(mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1));
	CHECK(mw->type == IBV_MW_TYPE_1 && mw->pd == pd && mw->context == ctx);
	CHECK(ibv_bind_mw(b.qp, mw, &bad) == EINVAL);
	bad.bind_info.mw_access_flags = 0;
	old = mw->rkey;
	CHECK(ibv_bind_mw(b.qp, mw, &bad) == EINVAL && mw->rkey == old); /* RESET */
	join(&a, &b);
	refused(&a, &b, IBV_WR_RDMA_READ, mw->rkey, at, 1);

	CHECK(bind1(&b, mw, wmr, 100, 3000, ALL).status == IBV_WC_SUCCESS);
	reaches(&a, mw->rkey, at, area + 100, 3000);
	reaches(&a, mw->rkey, at + 2999, area + 3099, 1);
	memset(buf, 0, 3000);
	CHECK(by(&a, IBV_WR_RDMA_READ, mw->rkey, at, 3000) == IBV_WC_SUCCESS && !memcmp(buf, area + 100, 3000));
	CHECK(by(&a, IBV_WR_ATOMIC_FETCH_AND_ADD, mw->rkey, (at + 7) & ~7ull, 8) == IBV_WC_SUCCESS);
	refused(&a, &b, IBV_WR_RDMA_WRITE, mw->rkey, at - 1, 2);
	refused(&a, &b, IBV_WR_RDMA_WRITE, mw->rkey, at, 3001);
	refused(&a, &b, IBV_WR_RDMA_READ, mw->rkey, at + 3000, 1);
	refused(&a, &b, IBV_WR_RDMA_WRITE, old, at, 1);
	refused(&a, &b, IBV_WR_RDMA_WRITE, wmr->rkey, at, 1); /* the region itself is closed */

	/* It counts as the region's: that stays. */
	CHECK(ibv_dereg_mr(wmr) == EBUSY && errno == EBUSY);
	CHECK(ibv_rereg_mr(wmr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT && errno == EBUSY);
	CHECK(ibv_dealloc_pd(pd) == EBUSY);

	/* Bound anew, with fewer rights. */
	old = mw->rkey;
	CHECK(bind1(&b, mw, wmr, 100, 3000, IBV_ACCESS_REMOTE_READ).status == IBV_WC_SUCCESS);
	CHECK(by(&a, IBV_WR_RDMA_READ, mw->rkey, at, 3000) == IBV_WC_SUCCESS);
	refused(&a, &b, IBV_WR_RDMA_WRITE, mw->rkey, at, 1);
	refused(&a, &b, IBV_WR_ATOMIC_FETCH_AND_ADD, mw->rkey, (at + 7) & ~7ull, 8);
	refused(&a, &b, IBV_WR_RDMA_READ, old, at, 1);

	/* What cannot be bound: the queue pair is in error, the window as it was. */
	old = mw->rkey;
	CHECK(bind1(&b, mw, wmr, 100, SIZE, IBV_ACCESS_REMOTE_READ).status == IBV_WC_MW_BIND_ERR);
	mw->rkey = old;
	again(&a, &b);
	CHECK(bind1(&b, mw, mr, 100, 8, IBV_ACCESS_REMOTE_READ).status == IBV_WC_MW_BIND_ERR);
	mw->rkey = old;
	again(&a, &b);
	CHECK(by(&a, IBV_WR_RDMA_READ, old, at, 3000) == IBV_WC_SUCCESS);

	/* A SEND with invalidate does nothing to it, but to the connection. */
	CHECK(!recv_one(b.qp, 1, 0, 64));
	struct ibv_send_wr inv = { .opcode = IBV_WR_SEND_WITH_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = old }, *w;
	CHECK(!ibv_post_send(a.qp, &inv, &w));
	CHECK(wait_wc(a.cq).status == IBV_WC_REM_OP_ERR && wait_wc(b.cq).status == IBV_WC_REM_INV_REQ_ERR);
	again(&a, &b);
	CHECK(by(&a, IBV_WR_RDMA_READ, old, at, 1) == IBV_WC_SUCCESS);

	/* Unbound by length 0. */
	CHECK(bind1(&b, mw, NULL, 0, 0, 0).status == IBV_WC_SUCCESS);
	refused(&a, &b, IBV_WR_RDMA_READ, mw->rkey, at, 1);
	CHECK(bind1(&b, mw, wmr, 0, 8, IBV_ACCESS_REMOTE_READ).status == IBV_WC_SUCCESS);
	old = mw->rkey;
	CHECK(!ibv_dealloc_mw(mw));
	refused(&a, &b, IBV_WR_RDMA_READ, old, (uintptr_t)area, 1);
	end_it(&a);
	end_it(&b);
}

static int post_bind(struct end *e, struct ibv_mw *mw, uint32_t key, uint64_t off, uint64_t len, unsigned access)
{
	struct ibv_send_wr wr = { .wr_id = 78, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED }, *bad;

	wr.bind_mw.mw = mw;
	wr.bind_mw.rkey = key;
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){ .mr = wmr, .addr = (uintptr_t)area + off, .length = len, .mw_access_flags = access };
	return ibv_post_send(e->qp, &wr, &bad);
}

static enum ibv_wc_status local_inv(struct end *e, uint32_t key)
{
	struct ibv_send_wr wr = { .wr_id = 79, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = key }, *bad;
	struct ibv_wc wc;

	CHECK(!ibv_post_send(e->qp, &wr, &bad));
	wc = wait_wc(e->cq);
	CHECK(wc.wr_id == 79 && (wc.status != IBV_WC_SUCCESS || wc.opcode == IBV_WC_LOCAL_INV));
	return wc.status;
}

static void type2(void)
{
	struct end a = make(NULL, 2 * DEPTH), b = make_ex(), c = make(NULL, 2 * DEPTH), d = make(NULL, 2 * DEPTH);
	struct ibv_qp_ex *bx = ibv_qp_to_qp_ex(b.qp);
	struct ibv_mw *mw, *one;
	struct ibv_mw_bind bad = { .wr_id = 1 };
	struct ibv_wc wc;
	uint32_t key;

	CHECK(!ibv_alloc_mw(pd, 3) && errno == EINVAL);
	CHECK(mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2));
	CHECK(one = ibv_alloc_mw(pd, IBV_MW_TYPE_1));
	join(&a, &b);
	join(&c, &d);
	CHECK(ibv_bind_mw(b.qp, mw, &bad) == EINVAL);
	CHECK(post_bind(&b, one, ibv_inc_rkey(one->rkey), 0, 8, 0) == EINVAL); /* of type 1 */
	CHECK(post_bind(&b, mw, mw->rkey ^ 0x100, 0, 8, 0) == EINVAL);         /* another window's key */

	/* Keys are used again and again: as storage does. */
	key = mw->rkey;
	for (int i = 0; i < 300; i++) {
		key = ibv_inc_rkey(key);
		CHECK(!post_bind(&b, mw, key, i, 3000, IBV_ACCESS_REMOTE_WRITE));
		wc = wait_wc(b.cq);
		CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == 78 && wc.opcode == IBV_WC_BIND_MW);
		reaches(&a, key, (uintptr_t)area + i, area + i, 3000);
		if (i % 2) {
			CHECK(local_inv(&b, key) == IBV_WC_SUCCESS);
			continue;
		}
		CHECK(!recv_one(b.qp, 9, 0, 64));
		struct ibv_send_wr inv = { .opcode = IBV_WR_SEND_WITH_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = key }, *w;
		CHECK(!ibv_post_send(a.qp, &inv, &w));
		CHECK(wait_wc(a.cq).status == IBV_WC_SUCCESS);
		wc = wait_wc(b.cq);
		CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.wc_flags & IBV_WC_WITH_INV && wc.invalidated_rkey == key);
	}
	refused(&a, &b, IBV_WR_RDMA_WRITE, key, (uintptr_t)area + 299, 1);

	/* It is open to the queue pair that bound it, and no other; what that may not do. */
	key = ibv_inc_rkey(key);
	CHECK(!post_bind(&b, mw, key, 0, 100, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ZERO_BASED));
	CHECK(wait_wc(b.cq).status == IBV_WC_SUCCESS);
	memset(area, 0x33, 100);
	CHECK(by(&a, IBV_WR_RDMA_READ, key, 0, 100) == IBV_WC_SUCCESS && buf[0] == 0x33 && buf[99] == 0x33);
	refused(&c, &d, IBV_WR_RDMA_READ, key, 0, 1);
	refused(&a, &b, IBV_WR_RDMA_READ, key, 0, 101);
	refused(&a, &b, IBV_WR_RDMA_READ, key, (uintptr_t)area, 1);
	refused(&a, &b, IBV_WR_RDMA_WRITE, key, 0, 1);
	CHECK(local_inv(&d, key) == IBV_WC_MW_BIND_ERR); /* not its own */
	again(&c, &d);
	CHECK(local_inv(&b, wmr->rkey) == IBV_WC_MW_BIND_ERR); /* a plain region */
	again(&a, &b);
	CHECK(!post_bind(&b, mw, ibv_inc_rkey(key), 0, 8, 0));
	CHECK(wait_wc(b.cq).status == IBV_WC_MW_BIND_ERR); /* bound */
	again(&a, &b);
	CHECK(by(&a, IBV_WR_RDMA_READ, key, 0, 100) == IBV_WC_SUCCESS);
	CHECK(local_inv(&b, key) == IBV_WC_SUCCESS && local_inv(&b, key) == IBV_WC_SUCCESS);

	/* Builders: bind, tell the peer with a SEND behind it, all in one go. */
	struct ibv_mw_bind_info info = { .mr = wmr, .addr = (uintptr_t)area, .length = 64, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE };
	key = ibv_inc_rkey(key);
	ibv_wr_start(bx);
	bx->wr_id = 80;
	bx->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_bind_mw(bx, mw, key, &info);
	bx->wr_id = 81;
	ibv_wr_rdma_write(bx, mr->rkey, (uintptr_t)buf + 64);
	ibv_wr_set_sge(bx, mr->lkey, (uintptr_t)buf, 8);
	bx->wr_id = 82;
	bx->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE;
	ibv_wr_local_inv(bx, key);
	key = ibv_inc_rkey(key);
	bx->wr_id = 83;
	ibv_wr_bind_mw(bx, mw, key, &info);
	CHECK(!ibv_wr_complete(bx));
	for (int i = 80; i < 84; i++) {
		wc = wait_wc(b.cq);
		CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)i);
	}
	reaches(&a, key, (uintptr_t)area, area, 64);
	ibv_wr_start(bx);
	ibv_wr_bind_mw(bx, one, ibv_inc_rkey(one->rkey), &info);
	CHECK(ibv_wr_complete(bx) == EINVAL);

	/* It goes with its queue pair. */
	CHECK(ibv_dereg_mr(wmr) == EBUSY);
	end_it(&b);
	b = make(NULL, 2 * DEPTH);
	again(&a, &b);
	refused(&a, &b, IBV_WR_RDMA_WRITE, key, (uintptr_t)area, 1);
	CHECK(!ibv_dealloc_mw(mw) && !ibv_dealloc_mw(one));
	end_it(&a);
	end_it(&b);
	end_it(&c);
	end_it(&d);
}

static void rereg(void)
{
	enum { T = IBV_REREG_MR_CHANGE_TRANSLATION, P = IBV_REREG_MR_CHANGE_PD, A = IBV_REREG_MR_CHANGE_ACCESS };
	struct end a = make(NULL, 2 * DEPTH), b = make(NULL, 2 * DEPTH);
	struct ibv_pd *other;
	char *second = apart(SIZE);
	const int rw = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

	CHECK(other = ibv_alloc_pd(ctx));
	join(&a, &b);
	for (int what = 1; what <= (T | P | A); what++) {
		struct ibv_mr *m = ibv_reg_mr(pd, area, KEYS, rw);
		uint32_t key;

		CHECK(m);
		key = m->rkey;
		reaches(&a, key, (uintptr_t)area, area, 3000);
		CHECK(!ibv_rereg_mr(m, what, what & P ? other : NULL, what & T ? second : NULL, what & T ? 2 * KEYS : 0, what & A ? IBV_ACCESS_LOCAL_WRITE : 0));
		CHECK(m->rkey == key && m->lkey == key && m->pd == (what & P ? other : pd));
		CHECK(m->addr == (what & T ? second : area) && m->length == (what & T ? 2 * KEYS : KEYS));
		if (what & (P | A))
			refused(&a, &b, IBV_WR_RDMA_WRITE, key, (uintptr_t)m->addr, 10);
		else
			reaches(&a, key, (uintptr_t)second + KEYS, second + KEYS, KEYS);
		if (what & T)
			refused(&a, &b, IBV_WR_RDMA_WRITE, key, (uintptr_t)area, 10);
		/* And back. */
		CHECK(!ibv_rereg_mr(m, T | P | A, pd, area, KEYS, rw));
		reaches(&a, key, (uintptr_t)area, area, KEYS);
		CHECK(!ibv_dereg_mr(m));
	}
	CHECK(!ibv_dealloc_pd(other)); /* nothing is in it */

	static const struct {
		int flags;
		bool pd, addr;
		size_t length;
		int access;
	} bad[] = { { 0, false, false, 0, 0 }, { 8, false, false, 0, 0 }, { P, false, false, 0, 0 }, { T, false, false, KEYS, 0 }, { T, false, true, 0, 0 },
		    { P, true, false, 0, IBV_ACCESS_LOCAL_WRITE }, { A, false, false, 0, IBV_ACCESS_REMOTE_WRITE } };
	struct ibv_mr *m = ibv_reg_mr(pd, area, KEYS, rw);
	CHECK(m);
	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
		errno = 0;
		CHECK(ibv_rereg_mr(m, bad[i].flags, bad[i].pd ? pd : NULL, bad[i].addr ? second : NULL, bad[i].length, bad[i].access) == IBV_REREG_MR_ERR_INPUT);
		CHECK(errno == EINVAL);
	}
	CHECK(!munmap(second, SIZE));
	CHECK(ibv_rereg_mr(m, T | A, NULL, second, KEYS, rw) == IBV_REREG_MR_ERR_INPUT && (errno == EFAULT || errno == ENOMEM));
	reaches(&a, m->rkey, (uintptr_t)area, area, KEYS); /* the old region is as it was */
	CHECK(!ibv_dereg_mr(m));
	end_it(&a);
	end_it(&b);
}

static void start(void)
{
	setup();
	area = buf + SIZE / 2;
	CHECK(wmr = ibv_reg_mr(pd, area, SIZE / 2, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND));
}

/* left: windows that are bound do not keep a context from being closed. */
static void left(void)
{
	struct end a = make(NULL, 2 * DEPTH), b = make(NULL, 2 * DEPTH);
	struct ibv_mw *one, *two;

	CHECK((one = ibv_alloc_mw(pd, IBV_MW_TYPE_1)) && (two = ibv_alloc_mw(pd, IBV_MW_TYPE_2)));
	join(&a, &b);
	CHECK(bind1(&b, one, wmr, 0, 100, ALL).status == IBV_WC_SUCCESS);
	CHECK(!post_bind(&b, two, ibv_inc_rkey(two->rkey), 0, 8, 0) && wait_wc(b.cq).status == IBV_WC_SUCCESS);
	CHECK(!ibv_close_device(ctx) && !munmap(buf, SIZE));
	start();
}

/* xrc: what the man page allows an initiator. */
static void xrc(void)
{
	struct ibv_cq *cq = ibv_create_cq(ctx, DEPTH, NULL, NULL, 0);
	struct ibv_qp_init_attr_ex in = { .qp_type = IBV_QPT_XRC_SEND, .pd = pd, .send_cq = cq, .cap = { .max_send_wr = DEPTH, .max_send_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD };
	struct end e = { .cq = cq };
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_xrcd_init_attr xa = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT };
	struct ibv_xrcd *xrcd = ibv_open_xrcd(ctx, &xa);
	struct ibv_qp_init_attr_ex tin = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd };
	struct ibv_qp *target;

	CHECK(cq && mw && xrcd && (e.qp = ibv_create_qp_ex(ctx, &in)) && (target = ibv_create_qp_ex(ctx, &tin)));
	to_init(e.qp);
	connect_to(e.qp, target->qp_num);
	CHECK(!post_bind(&e, mw, ibv_inc_rkey(mw->rkey), 0, 100, IBV_ACCESS_REMOTE_READ) && wait_wc(cq).status == IBV_WC_SUCCESS);
	CHECK(local_inv(&e, ibv_inc_rkey(mw->rkey)) == IBV_WC_SUCCESS);
	CHECK(!ibv_dealloc_mw(mw) && !ibv_destroy_qp(target) && !ibv_close_xrcd(xrcd));
	end_it(&e);
}

int main(void)
{
	struct ibv_device_attr dev;

	start();
	CHECK(!ibv_query_device(ctx, &dev) && dev.max_mw > 0);
	CHECK(dev.device_cap_flags & IBV_DEVICE_MEM_WINDOW && dev.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B);
	CHECK(!(dev.device_cap_flags & (IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_MGT_EXTENSIONS)));
	type1();
	type2();
	rereg();
	xrc();
	left();
	CHECK(!ibv_dereg_mr(wmr));
	teardown();
	return 0;
}
