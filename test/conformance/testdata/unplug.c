/* SPDX-License-Identifier: Apache-2.0
 *
 * The device is taken away from a program at work, which polls or waits for events: its
 * TAP is deleted, or the program unplugs it. "unplug poll" or "unplug events", and how
 * many times. */
#include <infiniband/tapverbs_dv.h>

#include "verbs.h"

struct ibv_context *ctx;
struct ibv_pd *pd;
struct ibv_mr *mr;
char *buf;

enum { WRITES, SILENT, RECEIVER, PAIRS };

static struct end ends[PAIRS][2];
static bool events;

static void shell(const char *cmd)
{
	char line[256];

	snprintf(line, sizeof(line), cmd, getenv("TAPVERBS_PORT"));
	CHECK(!system(line));
}

/* Takes completions until count have come, and says how many were flushed. */
static int take(struct ibv_cq *cq, int count)
{
	struct ibv_wc wc[8];
	int flushed = 0, n;

	for (; count > 0; count -= n) {
		CHECK((n = ibv_poll_cq(cq, 8, wc)) >= 0);
		for (int i = 0; i < n; i++) {
			CHECK(wc[i].status == IBV_WC_SUCCESS || wc[i].status == IBV_WC_WR_FLUSH_ERR);
			flushed += wc[i].status == IBV_WC_WR_FLUSH_ERR;
		}
	}
	CHECK(!count && !ibv_poll_cq(cq, 8, wc));
	return flushed;
}

/* WRITEs at full speed until the device takes no more; each that it took completes. */
static void *traffic(void *arg)
{
	struct end *e = arg;
	int posted = 0, done = 0, rc, n;
	struct ibv_wc wc[8];

	for (;;) {
		rc = send_wr(e->qp, posted, IBV_WR_RDMA_WRITE, 0, 4000, IBV_SEND_SIGNALED);
		if (rc == EIO)
			break;
		CHECK(!rc || rc == ENOMEM);
		posted += !rc;
		CHECK((n = ibv_poll_cq(e->cq, 8, wc)) >= 0);
		done += n;
		for (int i = 0; i < n; i++)
			CHECK(wc[i].status == IBV_WC_SUCCESS || wc[i].status == IBV_WC_WR_FLUSH_ERR);
	}
	take(e->cq, posted - done);
	return NULL;
}

/* Waits for the event of each completion, and after the last for one that never comes. */
static void *wait_comp(void *arg)
{
	struct ibv_comp_channel *ch = arg;
	struct ibv_cq *cq;
	void *user;

	for (;;) {
		errno = 0;
		if (ibv_get_cq_event(ch, &cq, &user)) {
			CHECK(errno == EIO);
			return NULL;
		}
		CHECK(user == (void *)0x77);
		ibv_ack_cq_events(cq, 1);
		int rc = ibv_req_notify_cq(cq, 0);
		CHECK(!rc || rc == EIO);
	}
}

static void *wait_async(void *arg)
{
	struct ibv_async_event ev;
	int fatal = 0;

	(void)arg;
	for (;;) {
		errno = 0;
		if (ibv_get_async_event(ctx, &ev)) {
			CHECK(errno == EIO && fatal == 1);
			return NULL;
		}
		/* A netdev that is deleted goes down first; the QP of an SRQ says that it is empty. */
		CHECK(ev.event_type == IBV_EVENT_DEVICE_FATAL || ev.event_type == IBV_EVENT_PORT_ERR ||
		      (ev.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && ev.element.qp == ends[RECEIVER][1].qp));
		fatal += ev.event_type == IBV_EVENT_DEVICE_FATAL;
		ibv_ack_async_event(&ev);
	}
}

/* Every call that needs the device says that it is gone. */
static void refused(struct ibv_srq *srq, struct ibv_comp_channel *ch, struct ibv_dm *dm, struct ibv_mw *mw)
{
	struct end *e = &ends[SILENT][0];
	struct ibv_device_attr da;
	struct ibv_port_attr pa;
	struct ibv_qp_attr qa = { .qp_state = IBV_QPS_ERR };
	struct ibv_qp_init_attr qi = { .send_cq = e->cq, .recv_cq = e->cq, .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };
	struct ibv_srq_attr sa = { .srq_limit = 1 };
	struct ibv_srq_init_attr si = { .attr = { .max_wr = 1, .max_sge = 1 } };
	struct ibv_modify_cq_attr ca = { .attr_mask = IBV_CQ_ATTR_MODERATE };
	struct ibv_ah_attr aa = { .is_global = 1, .port_num = 1 };
	struct ibv_recv_wr rwr = { 0 }, *bad = NULL;
	struct ibv_values_ex v = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	struct ibv_alloc_dm_attr dma = { .length = 64 };
	struct ibv_mw_bind bind = { .bind_info = { .mr = mr } };
	struct ibv_sge s = { (uintptr_t)buf, 64, mr->lkey };
	struct ibv_counters_init_attr cia = { 0 };
	struct ibv_xrcd_init_attr xa = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT };
	struct ibv_gid_entry ge;
	struct tapverbs_dv_mr q = { 0 };
	struct tapverbs_dv_counters c = { 0 };
	union ibv_gid gid;
	uint8_t mac[6];
	__be16 pkey;
	char word[4];

#define NONE(call) CHECK((errno = 0, !(call)) && errno == EIO)
#define MINUS(call) CHECK((errno = 0, (call) == -1) && errno == EIO)
#define SAYS(call) CHECK((call) == EIO)
	NONE(ibv_alloc_pd(ctx));
	NONE(ibv_reg_mr(pd, buf, SIZE, IBV_ACCESS_LOCAL_WRITE));
	NONE(ibv_alloc_null_mr(pd));
	NONE(ibv_create_cq(ctx, 4, NULL, NULL, 0));
	NONE(ibv_create_comp_channel(ctx));
	NONE(ibv_create_qp(pd, &qi));
	NONE(ibv_create_srq(pd, &si));
	NONE(ibv_create_ah(pd, &aa));
	NONE(ibv_alloc_mw(pd, IBV_MW_TYPE_1));
	NONE(ibv_alloc_dm(ctx, &dma));
	NONE(ibv_alloc_td(ctx, &(struct ibv_td_init_attr){ 0 }));
	NONE(ibv_create_counters(ctx, &cia));
	NONE(ibv_open_xrcd(ctx, &xa));
	NONE(ibv_open_device(ctx->device)); /* contexts of the one that is gone are open */
	MINUS(ibv_query_gid(ctx, 1, 0, &gid));
	MINUS(ibv_query_pkey(ctx, 1, 0, &pkey));
	CHECK(ibv_query_gid_table(ctx, &ge, 1, 0) == -EIO);
	SAYS(ibv_query_device(ctx, &da));
	SAYS(ibv_query_port(ctx, 1, &pa));
	SAYS(ibv_query_rt_values_ex(ctx, &v));
	SAYS(ibv_query_qp(e->qp, &qa, IBV_QP_STATE, &qi));
	SAYS(ibv_modify_qp(e->qp, &qa, IBV_QP_STATE));
	SAYS(ibv_query_srq(srq, &sa));
	SAYS(ibv_modify_srq(srq, &sa, IBV_SRQ_LIMIT));
	SAYS(ibv_post_srq_recv(srq, &rwr, &bad));
	CHECK(bad == &rwr);
	SAYS(ibv_resize_cq(e->cq, 4));
	SAYS(ibv_modify_cq(e->cq, &ca));
	SAYS(ibv_req_notify_cq(e->cq, 0));
	SAYS(ibv_bind_mw(e->qp, mw, &bind));
	SAYS(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &s, 1));
	SAYS(ibv_memcpy_to_dm(dm, 0, word, sizeof(word)));
	SAYS(ibv_memcpy_from_dm(word, dm, 0, sizeof(word)));
	SAYS(ibv_attach_mcast(e->qp, &gid, 0) == EIO ? EIO : 0);
	SAYS(ibv_resolve_eth_l2_from_gid(ctx, &aa, mac, NULL));
	CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT && errno == EIO);
	SAYS(send_wr(e->qp, 1, IBV_WR_RDMA_WRITE, 0, 64, 0));
	SAYS(recv_one(e->qp, 1, 0, 64));
	SAYS(tapverbs_dv_query_mr(mr, &q));
	SAYS(tapverbs_dv_query_counters(ctx, &c));
	SAYS(tapverbs_dv_unplug(ctx));
	/* Descriptors are readable, and who asks hears the same again and again. */
	for (int i = 0; i < 2; i++) {
		struct pollfd p[] = { { .fd = ctx->async_fd, .events = POLLIN }, { .fd = ch->fd, .events = POLLIN } };
		struct ibv_async_event ev;
		struct ibv_cq *cq;
		void *user;

		CHECK(poll(p, 2, 0) == 2);
		MINUS(ibv_get_async_event(ctx, &ev));
		MINUS(ibv_get_cq_event(ch, &cq, &user));
	}
}

static void one(bool deleted)
{
	struct ibv_comp_channel *ch = NULL, *idle;
	struct ibv_srq_init_attr si = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_recv_wr rwr = { .wr_id = 5 }, *bad;
	struct ibv_alloc_dm_attr dma = { .length = 64 };
	pthread_t t[5];
	struct ibv_cq *quiet;
	struct ibv_srq *srq;
	struct ibv_dm *dm;
	struct ibv_mw *mw;
	int n = 0;

	CHECK(pd = ibv_alloc_pd(ctx));
	CHECK(mr = ibv_reg_mr(pd, buf, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND));
	if (events)
		CHECK(ch = ibv_create_comp_channel(ctx));
	CHECK(idle = ibv_create_comp_channel(ctx));
	CHECK(quiet = ibv_create_cq(ctx, 4, (void *)0x77, idle, 0));
	CHECK(!ibv_req_notify_cq(quiet, 0));
	CHECK(srq = ibv_create_srq(pd, &si));
	CHECK(dm = ibv_alloc_dm(ctx, &dma));
	CHECK(mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1));
	for (int i = 0; i < PAIRS; i++) {
		ends[i][0] = make(i == WRITES ? NULL : ch, 3 * DEPTH);
		ends[i][1] = make_srq(NULL, DEPTH, i == RECEIVER ? srq : NULL);
		join(&ends[i][0], &ends[i][1]);
	}
	/* The device works, and the memory has kept its place in it. */
	memset(buf, deleted + 1, 100);
	memset(buf + SIZE / 2, 0, 100);
	CHECK(!send_wr(ends[WRITES][0].qp, 1, IBV_WR_RDMA_WRITE, 0, 100, IBV_SEND_SIGNALED));
	CHECK(wait_wc(ends[WRITES][0].cq).status == IBV_WC_SUCCESS && !memcmp(buf, buf + SIZE / 2, 100));

	/* SENDs that find no receive, receives that nothing comes for, and those of an SRQ. */
	if (events)
		CHECK(!ibv_req_notify_cq(ends[SILENT][0].cq, 0) && !ibv_req_notify_cq(ends[RECEIVER][0].cq, 0));
	for (int i = 0; i < 10; i++) {
		CHECK(!send_wr(ends[SILENT][0].qp, i, IBV_WR_SEND, 0, 64, IBV_SEND_SIGNALED));
		CHECK(!recv_one(ends[RECEIVER][0].qp, i, 0, 64));
		if (i < 4)
			CHECK(!ibv_post_srq_recv(srq, &rwr, &bad));
	}
	CHECK(!pthread_create(&t[n++], NULL, traffic, &ends[WRITES][0]));
	CHECK(!pthread_create(&t[n++], NULL, wait_async, NULL));
	CHECK(!pthread_create(&t[n++], NULL, wait_comp, idle));
	if (events)
		CHECK(!pthread_create(&t[n++], NULL, wait_comp, ch));
	usleep(2000 + 1000 * (rand() % 8)); /* so that it is taken away in all kinds of moments */
	if (deleted)
		shell("ip link del %s");
	else
		CHECK(!tapverbs_dv_unplug(ctx));
	for (int i = 0; i < n; i++)
		CHECK(!pthread_join(t[i], NULL));

	CHECK(take(ends[SILENT][0].cq, 10) == 10);
	CHECK(take(ends[RECEIVER][0].cq, 10) == 10);
	CHECK(take(ends[RECEIVER][1].cq, 0) == 0); /* an SRQ's receives stay in it */
	refused(srq, idle, dm, mw);

	for (int i = 0; i < PAIRS; i++) {
		end_it(&ends[i][0]);
		end_it(&ends[i][1]);
	}
	CHECK(!ibv_destroy_cq(quiet) && !ibv_destroy_comp_channel(idle));
	CHECK(!ibv_destroy_srq(srq) && !ibv_free_dm(dm) && !ibv_dealloc_mw(mw));
	CHECK(!ch || !ibv_destroy_comp_channel(ch));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd));
	if (deleted)
		shell("ip tuntap add dev %1$s mode tap && ip link set %1$s up");
}

int main(int argc, char **argv)
{
	struct ibv_device **list;
	int n;

	alarm(240);
	CHECK(argc == 3);
	events = !strcmp(argv[1], "events");
	buf = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(list = ibv_get_device_list(&n));
	CHECK(n == 1);
	for (int i = 0; i < atoi(argv[2]); i++) {
		/* A program that holds its list opens the device again by it. One that asks
		 * for a new list has another device while it holds the old one. */
		bool held = i / 2 % 2;
		struct ibv_device **next;

		CHECK(ctx = ibv_open_device(list[0]));
		one(i % 2);
		CHECK(held || (next = ibv_get_device_list(&n)));
		CHECK(!ibv_close_device(ctx));
		if (!held) {
			CHECK(n == 1 && next[0] != list[0]);
			ibv_free_device_list(list);
			list = next;
		}
	}
	ibv_free_device_list(list);
	return 0;
}
