/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of RAW_PACKET queue pairs, flows and counters: without arguments with the
 * kernel at the other end of the cable, "serve" and "send" between two engines. */
#include "verbs.h"

#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <net/if.h>
#include <netpacket/packet.h>
#include <sys/socket.h>

struct ibv_context *ctx;
struct ibv_pd *pd;
struct ibv_mr *mr;
char *buf;

enum { TYPE = 0x88b5, FRAME = 300, OUT = 0, IN = 8192 };
static const uint8_t other[6] = { 2, 9, 9, 9, 9, 9 }, mcast[6] = { 1, 0, 0x5e, 9, 9, 9 };

static uint64_t own_mac(uint8_t mac[6])
{
	unsigned m[6];
	const char *s = getenv("TAPVERBS_MAC");

	CHECK(s && sscanf(s, "%x:%x:%x:%x:%x:%x", m, m + 1, m + 2, m + 3, m + 4, m + 5) == 6);
	for (int i = 0; i < 6; i++)
		mac[i] = m[i];
	return 0;
}

static struct ibv_cq_ex *make_cq(uint64_t fields)
{
	struct ibv_cq_init_attr_ex a = { .cqe = DEPTH, .wc_flags = fields };
	struct ibv_cq_ex *cq = ibv_create_cq_ex(ctx, &a);

	CHECK(cq);
	return cq;
}

static struct ibv_qp *make_raw(struct ibv_cq_ex *cq)
{
	struct ibv_qp_init_attr_ex in = { .qp_type = IBV_QPT_RAW_PACKET, .send_cq = ibv_cq_ex_to_cq(cq), .recv_cq = ibv_cq_ex_to_cq(cq),
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 400 }, .pd = pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = IBV_QP_EX_WITH_SEND };
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &in);
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	CHECK(qp);
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PORT));
	a.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE));
	a.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE));
	return qp;
}

static void post_recv(struct ibv_qp *qp, uint64_t id, int len)
{
	struct ibv_sge s[2] = { { .addr = (uintptr_t)buf + IN, .length = 100, .lkey = mr->lkey },
				{ .addr = (uintptr_t)buf + IN + 100, .length = len - 100, .lkey = mr->lkey } };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = s, .num_sge = 2 }, *bad;

	CHECK(!ibv_post_recv(qp, &wr, &bad));
}

/* frame fills n bytes at p: header and a pattern. */
static void frame(char *p, const uint8_t *dst, const uint8_t *src, int n)
{
	memcpy(p, dst, 6);
	memcpy(p + 6, src, 6);
	p[12] = (char)(TYPE >> 8);
	p[13] = (char)TYPE;
	for (int i = 14; i < n; i++)
		p[i] = i * 7;
}

static void post_send(struct ibv_qp *qp, uint64_t id, int n)
{
	struct ibv_sge s = { .addr = (uintptr_t)buf + OUT, .length = n, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;

	CHECK(!ibv_post_send(qp, &wr, &bad));
}

/* next waits for a completion, which is the caller's until ibv_end_poll. */
static void next(struct ibv_cq_ex *cq, uint64_t id, enum ibv_wc_status st)
{
	struct ibv_poll_cq_attr a = { 0 };

	while (ibv_start_poll(cq, &a) == ENOENT)
		;
	CHECK(cq->wr_id == id && cq->status == st);
}

static void done(struct ibv_cq_ex *cq, uint64_t id)
{
	next(cq, id, IBV_WC_SUCCESS);
	ibv_end_poll(cq);
}

struct rule {
	struct ibv_flow_attr attr;
	struct ibv_flow_spec_eth eth;
	struct ibv_flow_spec_action_tag tag;
	struct ibv_flow_spec_counter_action count;
};
_Static_assert(sizeof(struct rule) == sizeof(struct ibv_flow_attr) + sizeof(struct ibv_flow_spec_eth) +
	       sizeof(struct ibv_flow_spec_action_tag) + sizeof(struct ibv_flow_spec_counter_action), "no gaps");

static struct rule rule_for(const uint8_t *mac, uint32_t tag, struct ibv_counters *c)
{
	struct rule r = {
		.attr = { .type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(r), .num_of_specs = c ? 3 : 2, .port = 1 },
		.eth = { .type = IBV_FLOW_SPEC_ETH, .size = sizeof(r.eth), .val = { .ether_type = htons(TYPE) }, .mask = { .ether_type = 0xffff } },
		.tag = { .type = IBV_FLOW_SPEC_ACTION_TAG, .size = sizeof(r.tag), .tag_id = tag },
		.count = { .type = IBV_FLOW_SPEC_ACTION_COUNT, .size = sizeof(r.count), .counters = c },
	};

	memcpy(r.eth.val.dst_mac, mac, 6);
	memset(r.eth.mask.dst_mac, 0xff, 6);
	return r;
}

#define FLOW(qp, r) ibv_create_flow(qp, &(r).attr)

/* kernel is a socket of the kernel's at the port's netdev, the other end of the cable.
 * It asks for all types: a bridge takes frames away before sockets for one type. */
static int kernel(void)
{
	struct sockaddr_ll a = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = if_nametoindex(getenv("TAPVERBS_PORT")) };
	int fd = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL));

	CHECK(fd >= 0 && a.sll_ifindex && !bind(fd, (struct sockaddr *)&a, sizeof(a)));
	return fd;
}

/* heard says whether the next frame of our type that arrives there is the one at buf. */
static int heard(int fd, int n)
{
	struct sockaddr_ll from;
	socklen_t len;
	char got[2000];
	int m;

	do {
		len = sizeof(from);
		m = recvfrom(fd, got, sizeof(got), 0, (struct sockaddr *)&from, &len);
		CHECK(m >= 14);
	} while (from.sll_pkttype == PACKET_OUTGOING || memcmp(got + 12, buf + OUT + 12, 2));
	return m == n && !memcmp(got, buf + OUT, n);
}

static void with_kernel(void)
{
	struct ibv_cq_ex *cq = make_cq(IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_FLOW_TAG | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP);
	struct ibv_qp *qp = make_raw(cq), *second = make_raw(cq);
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	struct ibv_counters_init_attr ci = { 0 };
	struct ibv_counters *c = ibv_create_counters(ctx, &ci);
	struct ibv_counter_attach_attr at = { .counter_desc = IBV_COUNTER_PACKETS, .index = 1 };
	uint64_t v[4] = { 9, 9, 9, 9 };
	char got[2000];
	int fd = kernel();

	/* Out: by a list and by a builder, with an address of nobody's as the source. */
	frame(buf + OUT, mcast, other, FRAME);
	post_send(qp, 1, FRAME);
	done(cq, 1);
	CHECK(heard(fd, FRAME));
	ibv_wr_start(ex);
	ex->wr_id = 2;
	ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(ex);
	ibv_wr_set_inline_data(ex, buf + OUT, FRAME - 1);
	CHECK(!ibv_wr_complete(ex));
	done(cq, 2);
	CHECK(heard(fd, FRAME - 1));

	/* In, counted and tagged; a frame that no flow wants does not come. */
	CHECK(c && !ibv_attach_counters_point_flow(c, &at, NULL));
	at = (struct ibv_counter_attach_attr){ .counter_desc = IBV_COUNTER_BYTES, .index = 0 };
	CHECK(!ibv_attach_counters_point_flow(c, &at, NULL));
	struct rule r = rule_for(other, 0xabcdef01, c);
	struct ibv_flow *f = FLOW(qp, r);
	CHECK(f);
	CHECK(ibv_attach_counters_point_flow(c, &at, NULL) == EBUSY && ibv_attach_counters_point_flow(c, &at, f) == ENOTSUP);
	CHECK(ibv_destroy_counters(c) == EBUSY && ibv_destroy_qp(qp) == EBUSY);
	post_recv(qp, 3, 2000);
	frame(got, mcast, other, FRAME);
	CHECK(send(fd, got, FRAME, 0) == FRAME);
	frame(got, other, mcast, FRAME + 5);
	CHECK(send(fd, got, FRAME + 5, 0) == FRAME + 5);
	next(cq, 3, IBV_WC_SUCCESS);
	CHECK(ibv_wc_read_opcode(cq) == IBV_WC_RECV && ibv_wc_read_byte_len(cq) == FRAME + 5 && ibv_wc_read_flow_tag(cq) == 0xabcdef01);
	ibv_end_poll(cq);
	CHECK(!memcmp(buf + IN, got, FRAME + 5));
	CHECK(!ibv_read_counters(c, v, 4, IBV_READ_COUNTERS_ATTR_PREFER_CACHED) && v[0] == FRAME + 5 && v[1] == 1 && !v[2] && !v[3]);
	CHECK(ibv_read_counters(c, v, 1, 0) == EINVAL && ibv_read_counters(c, v, 4, 2) == EINVAL);
	CHECK(!ibv_destroy_flow(f) && !ibv_destroy_counters(c));

	/* To another queue pair of the device, and not to the one that sends. */
	struct rule m = rule_for(mcast, 7, NULL);
	struct ibv_flow *f1 = FLOW(qp, m), *f2 = FLOW(second, m);
	CHECK(f1 && f2);
	post_recv(qp, 4, 2000);
	post_recv(second, 5, 2000);
	frame(buf + OUT, mcast, other, FRAME);
	post_send(qp, 6, FRAME);
	for (int i = 0, seen = 0; i < 2; i++) {
		struct ibv_poll_cq_attr a = { 0 };

		while (ibv_start_poll(cq, &a) == ENOENT)
			;
		seen |= cq->wr_id == 5 && ibv_wc_read_flow_tag(cq) == 7 ? 1 : cq->wr_id == 6 ? 2 : 4;
		CHECK(cq->status == IBV_WC_SUCCESS && (!i || seen == 3));
		ibv_end_poll(cq);
	}
	CHECK(!ibv_destroy_flow(f1) && !ibv_destroy_flow(f2));

	/* Too short for a frame: an error, and the send queue stops. */
	post_send(second, 7, 13);
	next(cq, 7, IBV_WC_LOC_LEN_ERR);
	ibv_end_poll(cq);
	close(fd);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_qp(second) && !ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
}

#define REFUSED(err, ...)                                                                          \
	do {                                                                                       \
		struct rule x = r;                                                                 \
		__VA_ARGS__;                                                                       \
		errno = 0;                                                                         \
		CHECK(!FLOW(qp, x) && errno == (err));                                             \
	} while (0)

static void errors(void)
{
	struct ibv_cq_ex *cq = make_cq(IBV_WC_STANDARD_FLAGS);
	struct ibv_qp *qp = make_raw(cq);
	struct end rc = make(NULL, DEPTH);
	struct rule r = rule_for(other, 1, NULL);
	struct ibv_device_attr_ex d;
	static const int sizes[] = { 0, 8, sizeof(r.eth) - 1, sizeof(r.eth) + 1, 0xffff };
	static const int unknown[] = { 0, 0x21, 0x33, 0x42, 0x1004, 0x7fffffff };
	static const int later[] = { IBV_FLOW_SPEC_ESP, IBV_FLOW_SPEC_VXLAN_TUNNEL, IBV_FLOW_SPEC_GRE, IBV_FLOW_SPEC_MPLS,
				     IBV_FLOW_SPEC_ACTION_HANDLE, IBV_FLOW_SPEC_INNER | IBV_FLOW_SPEC_ETH };

	CHECK(!ibv_query_device_ex(ctx, NULL, &d));
	CHECK(d.orig_attr.device_cap_flags & IBV_DEVICE_MANAGED_FLOW_STEERING && d.orig_attr.max_raw_ethy_qp > 0);
	CHECK(!d.raw_packet_caps && !d.rss_caps.max_rwq_indirection_tables && !d.max_wq_type_rq && !d.tm_caps.max_num_tags);
	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++)
		REFUSED(EINVAL, x.eth.size = sizes[i]);
	for (size_t i = 0; i < sizeof(unknown) / sizeof(*unknown); i++)
		REFUSED(EINVAL, x.eth.type = unknown[i]);
	for (size_t i = 0; i < sizeof(later) / sizeof(*later); i++)
		REFUSED(EOPNOTSUPP, x.eth.type = later[i]);
	REFUSED(EINVAL, x.attr.num_of_specs = 255);
	REFUSED(EINVAL, x.attr.num_of_specs = 3); /* counters that are none */
	REFUSED(EINVAL, x.attr.port = 0);
	REFUSED(EINVAL, x.attr.port = 2);
	REFUSED(EINVAL, x.attr.type = 4);
	REFUSED(EINVAL, x.attr.comp_mask = 1);
	REFUSED(EINVAL, x.attr.flags = 1);
	REFUSED(EINVAL, x.attr.type = IBV_FLOW_ATTR_SNIFFER; x.attr.num_of_specs = 0; x.attr.flags = IBV_FLOW_ATTR_FLAGS_DONT_TRAP);
	REFUSED(EINVAL, x.attr.type = IBV_FLOW_ATTR_ALL_DEFAULT);
	REFUSED(EOPNOTSUPP, x.attr.flags = IBV_FLOW_ATTR_FLAGS_EGRESS);
	CHECK(!FLOW(rc.qp, r) && errno == EINVAL);

	/* A spec whose size is wrong is not read beyond type and size: here the page ends. */
	char *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(page != MAP_FAILED && !mprotect(page + 4096, 4096, PROT_NONE));
	char *at = page + 4096 - sizeof(r.attr) - 8;
	memcpy(at, &r, sizeof(r.attr) + 8);
	((struct ibv_flow_attr *)at)->num_of_specs = 1;
	at[sizeof(r.attr) + 4] = 8;
	CHECK(!ibv_create_flow(qp, (struct ibv_flow_attr *)at) && errno == EINVAL);
	CHECK(!munmap(page, 8192));

	struct ibv_counters_init_attr ci = { .comp_mask = 1 };
	CHECK(!ibv_create_counters(ctx, &ci) && errno == EOPNOTSUPP);
	ci.comp_mask = 0;
	struct ibv_counters *c = ibv_create_counters(ctx, &ci);
	struct ibv_counter_attach_attr a = { .counter_desc = 2 };
	CHECK(c && ibv_attach_counters_point_flow(c, &a, NULL) == ENOTSUP);
	a = (struct ibv_counter_attach_attr){ .index = 1 << 20 };
	CHECK(ibv_attach_counters_point_flow(c, &a, NULL) == EINVAL);
	CHECK(!ibv_destroy_counters(c));

	struct ibv_qp_attr qa = { .qp_state = IBV_QPS_RTS, .qkey = 1 };
	CHECK(ibv_modify_qp(qp, &qa, IBV_QP_STATE | IBV_QP_QKEY) == EINVAL);
	struct ibv_sge s = { .addr = (uintptr_t)buf, .length = 60, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM }, *bad;
	CHECK(ibv_post_send(qp, &wr, &bad) == EINVAL && bad == &wr);
	struct ibv_wq_init_attr wi = { .wq_type = IBV_WQT_RQ, .max_wr = 1, .max_sge = 1, .pd = pd, .cq = ibv_cq_ex_to_cq(cq) };
	CHECK(!ibv_create_wq(ctx, &wi) && errno == EOPNOTSUPP);
	end_it(&rc);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));

	/* What is left open goes with the context. */
	struct ibv_context *other_ctx = open_dev();
	struct ibv_pd *own_pd = pd;
	struct ibv_context *own_ctx = ctx;
	ctx = other_ctx;
	CHECK(pd = ibv_alloc_pd(ctx));
	cq = make_cq(IBV_WC_STANDARD_FLAGS);
	c = ibv_create_counters(ctx, &ci);
	r = rule_for(other, 1, c);
	CHECK(c && FLOW(make_raw(cq), r));
	CHECK(!ibv_close_device(ctx));
	ctx = own_ctx;
	pd = own_pd;
}

/* serve answers the first frame for everybody; its port listening says that it is there. */
static void serve(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(18515), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	static const uint8_t all[6] = { 255, 255, 255, 255, 255, 255 };
	struct ibv_cq_ex *cq = make_cq(IBV_WC_STANDARD_FLAGS);
	struct ibv_qp *qp = make_raw(cq);
	struct rule r = rule_for(all, 0, NULL);
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	uint8_t mac[6];

	own_mac(mac);
	CHECK(FLOW(qp, r));
	post_recv(qp, 1, 2000);
	CHECK(!bind(fd, (struct sockaddr *)&a, sizeof(a)) && !listen(fd, 1));
	done(cq, 1);
	frame(buf + OUT, all, (uint8_t *)buf + IN + 6, FRAME);
	CHECK(!memcmp(buf + OUT, buf + IN, FRAME));
	frame(buf + OUT, (uint8_t *)buf + IN + 6, mac, FRAME + 1);
	post_send(qp, 2, FRAME + 1);
	done(cq, 2);
}

static void send_first(void)
{
	static const uint8_t all[6] = { 255, 255, 255, 255, 255, 255 };
	struct ibv_cq_ex *cq = make_cq(IBV_WC_STANDARD_FLAGS);
	struct ibv_qp *qp = make_raw(cq);
	uint8_t mac[6];

	own_mac(mac);
	struct rule r = rule_for(mac, 0, NULL);
	CHECK(FLOW(qp, r));
	post_recv(qp, 1, 2000);
	frame(buf + OUT, all, mac, FRAME);
	post_send(qp, 2, FRAME);
	done(cq, 2);
	done(cq, 1);
	frame(buf + OUT, mac, (uint8_t *)buf + IN + 6, FRAME + 1);
	CHECK(!memcmp(buf + OUT, buf + IN, FRAME + 1));
	puts("answered");
}

int main(int argc, char **argv)
{
	setup();
	if (argc < 2) {
		with_kernel();
		errors();
		teardown();
	} else if (!strcmp(argv[1], "serve")) {
		serve();
	} else {
		send_first();
	}
	return 0;
}
