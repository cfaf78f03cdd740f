/* SPDX-License-Identifier: Apache-2.0
 *
 * A program built against Debian's libibverbs-dev: it checks what the library answers
 * with one device and two queue pairs that talk to each other. Its first argument
 * names the check; it ends with 0, or with 1 and a line that says what was wrong. */
#include "verbs.h"

struct ibv_context *ctx;
struct ibv_pd *pd;
struct ibv_mr *mr;
char *buf;

/* data: every operation, with immediate data, inline, and two queue pairs. */
static void data(void)
{
	struct end a = make(NULL, 2 * DEPTH), b = make(NULL, 2 * DEPTH);
	struct ibv_wc wc;

	join(&a, &b);
	CHECK(!recv_one(b.qp, 11, SIZE / 2, 100));
	memcpy(buf, "hello there", 12);
	CHECK(!send_wr(a.qp, 12, IBV_WR_SEND_WITH_IMM, 0, 12, IBV_SEND_SIGNALED));
	wc = wait_wc(b.cq);
	CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == 11 && wc.opcode == IBV_WC_RECV && wc.byte_len == 12);
	CHECK(wc.wc_flags & IBV_WC_WITH_IMM && wc.imm_data == htonl(0x01020304) && wc.qp_num == b.qp->qp_num && wc.src_qp == a.qp->qp_num);
	CHECK(!memcmp(buf + SIZE / 2, "hello there", 12));
	wc = wait_wc(a.cq);
	CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == 12 && wc.opcode == IBV_WC_SEND);

	/* Inline data may change at once, and needs no key. */
	memcpy(buf, "abcdefgh", 8);
	struct ibv_sge s[2] = { { (uintptr_t)buf, 3, 0 }, { (uintptr_t)buf + 5, 3, 0 } };
	struct ibv_send_wr wr = { .wr_id = 13, .sg_list = s, .num_sge = 2, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED, .wr.rdma = { (uintptr_t)buf + SIZE / 2, mr->rkey } }, *bad;
	CHECK(!ibv_post_send(a.qp, &wr, &bad));
	memcpy(buf, "xxxxxxxx", 8);
	wc = wait_wc(a.cq);
	CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RDMA_WRITE && !memcmp(buf + SIZE / 2, "abcfgh", 6));

	CHECK(!send_wr(a.qp, 14, IBV_WR_RDMA_READ, 64, 6, IBV_SEND_SIGNALED));
	wc = wait_wc(a.cq);
	CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RDMA_READ && !memcmp(buf + 64, "abcfgh", 6));

	uint64_t *word = (uint64_t *)(buf + SIZE / 2), *res = (uint64_t *)(buf + 128);
	*word = 5;
	CHECK(!send_wr(a.qp, 15, IBV_WR_ATOMIC_CMP_AND_SWP, 128, 8, IBV_SEND_SIGNALED));
	wc = wait_wc(a.cq);
	CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_COMP_SWAP && *res == 5 && *word == 9);
	CHECK(!send_wr(a.qp, 16, IBV_WR_ATOMIC_FETCH_AND_ADD, 128, 8, IBV_SEND_SIGNALED));
	wc = wait_wc(a.cq);
	CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_FETCH_ADD && *res == 9 && *word == 14);

	/* Reset and destroy take the completions with them. */
	CHECK(!recv_one(b.qp, 21, 0, 64));
	CHECK(!send_wr(a.qp, 22, IBV_WR_SEND, 0, 12, IBV_SEND_SIGNALED));
	wc = wait_wc(b.cq);
	CHECK(!send_wr(a.qp, 23, IBV_WR_RDMA_WRITE, 0, 12, IBV_SEND_SIGNALED));
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	CHECK(!ibv_modify_qp(a.qp, &reset, IBV_QP_STATE));
	CHECK(ibv_poll_cq(a.cq, 1, &wc) == 0);
	CHECK(send_wr(a.qp, 24, IBV_WR_SEND, 0, 12, IBV_SEND_SIGNALED) == EINVAL);

	/* ERR flushes what was posted, and what is posted then. */
	struct ibv_qp_attr err = { .qp_state = IBV_QPS_ERR };
	CHECK(!recv_one(b.qp, 31, 0, 64));
	CHECK(!ibv_modify_qp(b.qp, &err, IBV_QP_STATE));
	CHECK(!recv_one(b.qp, 32, 0, 64));
	CHECK(!send_wr(b.qp, 33, IBV_WR_SEND, 0, 12, 0));
	unsigned seen = 0;
	for (int i = 0; i < 3; i++) {
		wc = wait_wc(b.cq);
		CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id >= 31 && wc.wr_id <= 33);
		seen |= 1 << (wc.wr_id - 31);
	}
	CHECK(seen == 7);
	end_it(&a);
	end_it(&b);
}

/* errors: the numbers that the man pages give. */
static void errors(void)
{
	struct end a = make(NULL, 4), b = make(NULL, 2 * DEPTH);
	struct ibv_qp_attr at, rtr = { .qp_state = IBV_QPS_RTR };
	struct ibv_qp_init_attr in;
	struct ibv_port_attr port;
	union ibv_gid gid;
	int n = 0;

	errno = 0;
	CHECK(!ibv_reg_mr(pd, (void *)0xdead0000, 4096, IBV_ACCESS_LOCAL_WRITE) && (errno == EFAULT || errno == ENOMEM));
	CHECK(!ibv_reg_mr(pd, buf, 0, IBV_ACCESS_LOCAL_WRITE) && errno == EINVAL);
	CHECK(!ibv_reg_mr(pd, buf, 64, IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL);
	CHECK(!ibv_reg_mr(pd, (void *)-4096, 8192, 0) && (errno == EFAULT || errno == ENOMEM));
	CHECK(!ibv_create_cq(ctx, 0, NULL, NULL, 0) && errno == EINVAL);
	CHECK(!ibv_create_cq(ctx, 1 << 30, NULL, NULL, 0) && errno == EINVAL);
	CHECK(!ibv_create_cq(ctx, 4, NULL, NULL, 9) && errno == EINVAL);
	CHECK(ibv_destroy_cq(a.cq) == EBUSY);
	CHECK(ibv_dealloc_pd(pd) == EBUSY);
	CHECK(ibv_query_port(ctx, 2, &port) == EINVAL);
	CHECK(ibv_query_gid(ctx, 1, 1000, &gid) == -1 && errno == EINVAL);
	CHECK(ibv_modify_qp(a.qp, &rtr, IBV_QP_STATE) == EINVAL);
	CHECK(ibv_query_qp(a.qp, &at, IBV_QP_STATE, &in) == 0 && at.qp_state == IBV_QPS_RESET && in.cap.max_send_wr >= DEPTH);
	CHECK(recv_one(a.qp, 1, 0, 64) == EINVAL);
	CHECK(send_wr(a.qp, 1, IBV_WR_SEND, 0, 64, 0) == EINVAL);
	join(&a, &b);
	CHECK(send_wr(a.qp, 1, IBV_WR_BIND_MW, 0, 64, 0) == EINVAL);
	CHECK(send_wr(a.qp, 1, IBV_WR_SEND, 0, 4096, IBV_SEND_INLINE) == EINVAL);
	CHECK(send_wr(a.qp, 1, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 4, 0) == EINVAL);
	while (!recv_one(b.qp, n, 0, 64))
		n++;
	CHECK(recv_one(b.qp, n, 0, 64) == ENOMEM && n >= DEPTH);
	/* What is not there says so. */
	CHECK(!ibv_import_device(0) && errno == EINVAL);
	CHECK(ibv_fork_init() == 0);
	/* A key that is none. */
	struct ibv_wc wc;
	struct ibv_sge s = { (uintptr_t)buf, 64, mr->lkey ^ 0x5a00 };
	struct ibv_send_wr wr = { .wr_id = 5, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
	CHECK(!ibv_post_send(a.qp, &wr, &bad));
	wc = wait_wc(a.cq);
	CHECK(wc.status == IBV_WC_LOC_PROT_ERR && wc.wr_id == 5);
	end_it(&a);
	end_it(&b);
}

static void *ack_later(void *cq)
{
	usleep(100000);
	ibv_ack_cq_events(cq, 1);
	return NULL;
}

static void *ack_event(void *ev)
{
	usleep(100000);
	ibv_ack_async_event(ev);
	return NULL;
}

static void nonblock(int fd) { CHECK(!fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK)); }

/* events: completion channels and async events by their descriptors. */
static void events(void)
{
	struct ibv_comp_channel *ch = ibv_create_comp_channel(ctx);
	struct ibv_srq_init_attr sin = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct ibv_async_event ev;
	struct ibv_cq *cq;
	void *user;
	pthread_t th;
	double at;

	CHECK(ch);
	struct end a = make(NULL, 2 * DEPTH), b = make(ch, 2 * DEPTH);
	struct pollfd p = { .fd = ch->fd, .events = POLLIN };
	CHECK(ibv_destroy_comp_channel(ch) == EBUSY);
	join(&a, &b);
	nonblock(ch->fd);
	CHECK(ibv_get_cq_event(ch, &cq, &user) == -1 && errno == EAGAIN);
	for (int i = 0; i < 100; i++) {
		CHECK(!ibv_req_notify_cq(b.cq, 0));
		CHECK(!recv_one(b.qp, i, 0, 64));
		CHECK(poll(&p, 1, 0) == 0);
		CHECK(!send_wr(a.qp, i, IBV_WR_SEND, 0, 12, IBV_SEND_SIGNALED));
		CHECK(poll(&p, 1, 5000) == 1);
		CHECK(ibv_get_cq_event(ch, &cq, &user) == 0 && cq == b.cq && user == (void *)0x77);
		CHECK(ibv_get_cq_event(ch, &cq, &user) == -1 && errno == EAGAIN);
		ibv_ack_cq_events(b.cq, 1);
		CHECK(wait_wc(b.cq).status == IBV_WC_SUCCESS && wait_wc(a.cq).status == IBV_WC_SUCCESS);
	}
	/* Solicited only: the first message gives no event. */
	CHECK(!ibv_req_notify_cq(b.cq, 1) && !recv_one(b.qp, 1, 0, 64) && !recv_one(b.qp, 2, 0, 64));
	CHECK(!send_wr(a.qp, 1, IBV_WR_SEND, 0, 12, IBV_SEND_SIGNALED));
	wait_wc(a.cq);
	CHECK(poll(&p, 1, 50) == 0);
	CHECK(!send_wr(a.qp, 1, IBV_WR_SEND, 0, 12, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED));
	CHECK(poll(&p, 1, 5000) == 1);
	CHECK(!ibv_get_cq_event(ch, &cq, &user));
	CHECK(!ibv_resize_cq(b.cq, 500) && b.cq->cqe >= 500);
	CHECK(wait_wc(b.cq).wr_id == 1 && wait_wc(b.cq).wr_id == 2);
	/* Destroying waits for the acknowledgement. */
	CHECK(!ibv_destroy_qp(b.qp));
	CHECK(!pthread_create(&th, NULL, ack_later, b.cq));
	at = now();
	CHECK(!ibv_destroy_cq(b.cq));
	CHECK(now() - at > 0.09);
	pthread_join(th, NULL);
	/* An event nobody took goes with its CQ, and the descriptor is quiet then. */
	b = make(ch, DEPTH);
	CHECK(!ibv_req_notify_cq(b.cq, 0));
	to_init(b.qp);
	CHECK(!recv_one(b.qp, 1, 0, 64));
	CHECK(!ibv_modify_qp(b.qp, &(struct ibv_qp_attr){ .qp_state = IBV_QPS_ERR }, IBV_QP_STATE));
	CHECK(poll(&p, 1, 5000) == 1);
	end_it(&b);
	CHECK(poll(&p, 1, 0) == 0);
	CHECK(!ibv_destroy_comp_channel(ch));

	/* The SRQ's limit, and the last work request of a queue pair that uses it. */
	struct ibv_srq *srq = ibv_create_srq(pd, &sin);
	struct pollfd pa = { .fd = ctx->async_fd, .events = POLLIN };
	CHECK(srq);
	b = make_srq(NULL, DEPTH, srq);
	CHECK(recv_one(b.qp, 1, 0, 64) == EINVAL);
	nonblock(ctx->async_fd);
	CHECK(ibv_get_async_event(ctx, &ev) == -1 && errno == EAGAIN);
	CHECK(!ibv_modify_srq(srq, &(struct ibv_srq_attr){ .srq_limit = 3 }, IBV_SRQ_LIMIT));
	CHECK(poll(&pa, 1, 5000) == 1);
	CHECK(!ibv_get_async_event(ctx, &ev) && ev.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && ev.element.srq == srq);
	ibv_ack_async_event(&ev);
	CHECK(ibv_destroy_srq(srq) == EBUSY);
	to_init(b.qp);
	CHECK(!ibv_modify_qp(b.qp, &(struct ibv_qp_attr){ .qp_state = IBV_QPS_ERR }, IBV_QP_STATE));
	CHECK(poll(&pa, 1, 5000) == 1);
	CHECK(!ibv_get_async_event(ctx, &ev) && ev.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && ev.element.qp == b.qp);
	CHECK(!pthread_create(&th, NULL, ack_event, &ev));
	at = now();
	CHECK(!ibv_destroy_qp(b.qp));
	CHECK(now() - at > 0.09);
	pthread_join(th, NULL);
	CHECK(!ibv_destroy_cq(b.cq) && !ibv_destroy_srq(srq));
	end_it(&a);
}

/* extended: timestamps by extended polling, work requests by builders. */
static void extended(void)
{
	struct ibv_cq_init_attr_ex ci = { .cqe = 64, .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK };
	struct ibv_cq_ex *cx = ibv_create_cq_ex(ctx, &ci);
	struct end b = make(NULL, DEPTH), a;
	struct ibv_values_ex v = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	struct ibv_device_attr_ex d;
	struct timespec t;

	CHECK(cx);
	CHECK(ibv_start_poll(cx, &(struct ibv_poll_cq_attr){ 0 }) == ENOENT);
	struct ibv_qp_init_attr_ex in = { .send_cq = ibv_cq_ex_to_cq(cx), .recv_cq = ibv_cq_ex_to_cq(cx), .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 2, .max_recv_sge = 1, .max_inline_data = 64 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ };
	a.cq = ibv_cq_ex_to_cq(cx);
	CHECK(a.qp = ibv_create_qp_ex(ctx, &in));
	struct ibv_qp_ex *x = ibv_qp_to_qp_ex(a.qp);
	CHECK(x && x->wr_send_imm && !x->wr_send && !ibv_qp_to_qp_ex(b.qp));
	in.send_ops_flags = IBV_QP_EX_WITH_TSO;
	CHECK(!ibv_create_qp_ex(ctx, &in) && errno == EOPNOTSUPP);
	join(&a, &b);
	CHECK(!recv_one(b.qp, 1, 1024, 64));
	ibv_wr_start(x);
	x->wr_id = 41;
	x->wr_flags = 0;
	ibv_wr_rdma_write(x, mr->rkey, (uintptr_t)buf + 2048);
	ibv_wr_set_inline_data(x, "built", 6);
	x->wr_id = 42;
	x->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send_imm(x, htonl(99));
	strcpy(buf, "by builders");
	ibv_wr_set_sge(x, mr->lkey, (uintptr_t)buf, 12);
	CHECK(!ibv_wr_complete(x));
	struct ibv_wc wc = wait_wc(b.cq);
	CHECK(wc.status == IBV_WC_SUCCESS && wc.imm_data == htonl(99) && !strcmp(buf + 1024, "by builders") && !strcmp(buf + 2048, "built"));
	while (ibv_start_poll(cx, &(struct ibv_poll_cq_attr){ 0 }) == ENOENT)
		;
	CHECK(cx->wr_id == 42 && cx->status == IBV_WC_SUCCESS && ibv_wc_read_opcode(cx) == IBV_WC_SEND && ibv_wc_read_qp_num(cx) == a.qp->qp_num);
	uint64_t ts = ibv_wc_read_completion_ts(cx), wall = ibv_wc_read_completion_wallclock_ns(cx);
	CHECK(ibv_next_poll(cx) == ENOENT);
	ibv_end_poll(cx);
	CHECK(!ibv_query_rt_values_ex(ctx, &v));
	uint64_t clock = v.raw_clock.tv_sec * 1000000000ull + v.raw_clock.tv_nsec;
	CHECK(ts <= clock && clock - ts < 1000000000);
	clock_gettime(CLOCK_REALTIME, &t);
	CHECK(llabs((long long)(t.tv_sec * 1000000000ull + t.tv_nsec - wall)) < 1000000000);
	CHECK(!ibv_query_device_ex(ctx, NULL, &d) && d.orig_attr.max_qp > 1000 && d.hca_core_clock);
	/* An aborted one leaves nothing. */
	ibv_wr_start(x);
	ibv_wr_rdma_write(x, mr->rkey, (uintptr_t)buf + 2048);
	ibv_wr_set_inline_data(x, "never", 6);
	ibv_wr_abort(x);
	ibv_wr_start(x);
	ibv_wr_rdma_write(x, mr->rkey, (uintptr_t)buf + 2048);
	char big[4096];
	ibv_wr_set_inline_data(x, big, sizeof(big));
	CHECK(ibv_wr_complete(x) == EINVAL);
	CHECK(!strcmp(buf + 2048, "built"));
	end_it(&a);
	end_it(&b);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*fn)(void);
	} checks[] = { { "data", data }, { "errors", errors }, { "events", events }, { "extended", extended },
		       { "forked", forked }, { "contexts", contexts },
			{ "vanish", vanish }, { "many", many }, { "threads", threads }, { "bench", bench },
			{ "later", later }, { "attrs", attrs }, { "signals", signals }, { "beside", beside } };

	alarm(240);
	CHECK(argc >= 2);
	if (!strcmp(argv[1], "cycles")) {
		cycles(argc > 2 ? atoi(argv[2]) : 200);
		return 0;
	}
	for (size_t i = 0; i < sizeof(checks) / sizeof(*checks); i++) {
		if (!strcmp(argv[1], checks[i].name)) {
			setup();
			checks[i].fn();
			teardown();
			return 0;
		}
	}
	fprintf(stderr, "no check %s\n", argv[1]);
	return 2;
}
