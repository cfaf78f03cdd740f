/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of the RDMA CM that look at both ends, which are this process's: what their queue
 * pairs have after unequal wishes, UC, listeners of another type, groups joined without a queue
 * pair, error numbers of addresses, and many connections one after the other. */
#include "verbs.h"

#include <infiniband/sa.h>
#include <linux/capability.h>
#include <linux/if_ether.h>
#include <net/if.h>
#include <netpacket/packet.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <sys/syscall.h>

struct ibv_context *ctx;
struct ibv_pd *pd;
struct ibv_mr *mr;
char *buf;

static struct rdma_event_channel *active, *passive;

static struct sockaddr_in at(int port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };

	CHECK(getenv("TAPVERBS_ADDR") && inet_pton(AF_INET, getenv("TAPVERBS_ADDR"), &a.sin_addr) == 1);
	return a;
}

/* want waits for the next event of a channel, which is to be this one. */
static struct rdma_cm_event *want(struct rdma_event_channel *ch, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *e;

	CHECK(!rdma_get_cm_event(ch, &e));
	if (e->event != type) {
		fprintf(stderr, "%s, status %d, where %s is to come\n", rdma_event_str(e->event), e->status, rdma_event_str(type));
		exit(1);
	}
	return e;
}

static void pass(struct rdma_event_channel *ch, enum rdma_cm_event_type type)
{
	CHECK(!rdma_ack_cm_event(want(ch, type)));
}

/* wishes are what the ends ask for; what is 0 of mtu and timeout is not asked for. */
struct wishes {
	enum rdma_port_space ps;
	enum ibv_qp_type type;
	struct { uint8_t responder, initiator, retry, rnr; } client, server;
	uint8_t mtu, timeout;
};

static const int port = 7500;

static struct rdma_cm_id *listener(const struct wishes *w)
{
	struct sockaddr_in a = at(port);
	struct rdma_addrinfo i = { .ai_flags = RAI_PASSIVE, .ai_family = AF_INET, .ai_qp_type = w->type, .ai_port_space = w->ps,
		.ai_src_len = sizeof(a), .ai_src_addr = (struct sockaddr *)&a };
	struct rdma_cm_id *id;

	CHECK(!rdma_create_ep(&id, &i, NULL, NULL));
	CHECK(!rdma_migrate_id(id, passive));
	CHECK(!rdma_listen(id, 4));
	return id;
}

static struct rdma_cm_id *client(const struct wishes *w)
{
	struct sockaddr_in a = at(port);
	struct ibv_path_data path = { .flags = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL,
		.path = { .mtu = w->mtu, .flowlabel_hoplimit = htonl(64), .pkey = 0xffff } };
	struct rdma_addrinfo i = { .ai_family = AF_INET, .ai_qp_type = w->type, .ai_port_space = w->ps,
		.ai_dst_len = sizeof(a), .ai_dst_addr = (struct sockaddr *)&a };
	struct rdma_cm_id *id;

	if (w->mtu) {
		i.ai_route = &path;
		i.ai_route_len = sizeof(path);
	}
	CHECK(!rdma_create_ep(&id, &i, NULL, NULL));
	CHECK(!rdma_migrate_id(id, active));
	if (w->timeout)
		CHECK(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, (void *)&w->timeout, 1));
	return id;
}

static void make_qp(struct rdma_cm_id *id, enum ibv_qp_type type)
{
	struct ibv_qp_init_attr in = { .qp_type = type, .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };

	CHECK(!rdma_create_qp(id, NULL, &in));
}

/* connect_both makes a connection to a listener, and gives its ends. */
static void connect_both(const struct wishes *w, struct rdma_cm_id **c, struct rdma_cm_id **s)
{
	struct rdma_conn_param p = { .responder_resources = w->client.responder, .initiator_depth = w->client.initiator,
		.retry_count = w->client.retry, .rnr_retry_count = w->client.rnr };
	struct rdma_cm_event *e;

	*c = client(w);
	make_qp(*c, w->type);
	CHECK(!rdma_connect(*c, &p));
	e = want(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
	/* As the server sees it. */
	CHECK(e->param.conn.initiator_depth == w->client.responder && e->param.conn.responder_resources == w->client.initiator);
	CHECK(e->param.conn.retry_count == w->client.retry && e->param.conn.rnr_retry_count == w->client.rnr);
	*s = e->id;
	CHECK((*s)->qp_type == w->type);
	make_qp(*s, w->type);
	p = (struct rdma_conn_param){ .responder_resources = w->server.responder, .initiator_depth = w->server.initiator,
		.rnr_retry_count = w->server.rnr };
	CHECK(!rdma_accept(*s, &p));
	CHECK(!rdma_ack_cm_event(e));
	pass(active, RDMA_CM_EVENT_ESTABLISHED);
	pass(passive, RDMA_CM_EVENT_ESTABLISHED);
}

static void disconnect_both(struct rdma_cm_id *c, struct rdma_cm_id *s)
{
	CHECK(!rdma_disconnect(c));
	pass(passive, RDMA_CM_EVENT_DISCONNECTED);
	pass(active, RDMA_CM_EVENT_DISCONNECTED);
	rdma_destroy_ep(c);
	rdma_destroy_ep(s);
}

static uint8_t least(uint8_t a, uint8_t b) { return a < b ? a : b; }

/* timeout_of is how long one try of so many takes: see the engine's cmAckTimeout. */
static uint8_t timeout_of(uint8_t retries) { return retries > 5 ? 16 : retries > 2 ? 17 : retries ? 18 : 19; }

static void agreed(const struct wishes *w)
{
	struct rdma_cm_id *l = listener(w), *c, *s;
	struct ibv_qp_attr a, b;
	struct ibv_qp_init_attr in;
	struct ibv_port_attr at_port;

	connect_both(w, &c, &s);
	CHECK(!ibv_query_qp(c->qp, &a, IBV_QP_STATE, &in) && !ibv_query_qp(s->qp, &b, IBV_QP_STATE, &in));
	CHECK(in.qp_type == w->type && a.qp_state == IBV_QPS_RTS && b.qp_state == IBV_QPS_RTS);
	CHECK(a.dest_qp_num == s->qp->qp_num && b.dest_qp_num == c->qp->qp_num);
	CHECK(a.sq_psn == b.rq_psn && a.rq_psn == b.sq_psn);
	CHECK(!ibv_query_port(c->verbs, 1, &at_port));
	CHECK(a.path_mtu == (w->mtu ? w->mtu : at_port.active_mtu) && b.path_mtu == a.path_mtu);
	if (w->type == IBV_QPT_RC) {
		/* No more READs and atomics than one end wants to have and the other one takes. */
		CHECK(a.max_rd_atomic == least(w->client.initiator, w->server.responder) && b.max_dest_rd_atomic == a.max_rd_atomic);
		CHECK(b.max_rd_atomic == least(w->server.initiator, w->client.responder) && a.max_dest_rd_atomic == b.max_rd_atomic);
		CHECK(a.retry_cnt == w->client.retry && b.retry_cnt == w->client.retry);
		CHECK(a.rnr_retry == w->server.rnr && b.rnr_retry == w->client.rnr);
		CHECK(a.timeout == (w->timeout ? w->timeout : timeout_of(w->client.retry)) && b.timeout == timeout_of(w->client.retry));
		/* Endless retries may be frequent ones; others come as seldom as the kernel's (655 ms). */
		CHECK(a.min_rnr_timer == (w->client.rnr == 7 ? 12 : 0) && b.min_rnr_timer == a.min_rnr_timer);
	}
	disconnect_both(c, s);
	rdma_destroy_ep(l);
}

/* other_type: a listener is asked for by another type of queue pair. */
static void other_type(void)
{
	struct wishes w = { .ps = RDMA_PS_IB, .type = IBV_QPT_RC };
	struct rdma_cm_id *l = listener(&w), *c;
	struct rdma_conn_param p = { 0 };
	struct rdma_cm_event *e;

	w.type = IBV_QPT_UC;
	c = client(&w);
	make_qp(c, w.type);
	CHECK(!rdma_connect(c, &p));
	e = want(active, RDMA_CM_EVENT_REJECTED);
	CHECK(e->status == 28);
	CHECK(!rdma_ack_cm_event(e));
	rdma_destroy_ep(c);
	rdma_destroy_ep(l);
}

/* reported waits until the device says by IGMP that it has joined (4) or left (3) a group, and
 * checks that it says nothing of another one. */
static void reported(int fd, struct in_addr group, struct in_addr other, int type)
{
	unsigned char f[2048];

	for (;;) {
		ssize_t n = recv(fd, f, sizeof(f), 0);

		CHECK(n > 0);
		if (n < 14 + 24 + 16 || f[12] != 8 || f[13] != 0 || f[14 + 9] != IPPROTO_IGMP)
			continue;
		unsigned char *m = f + 14 + 4 * (f[14] & 15);

		if (m[0] != 0x22) /* a report of version 3 (RFC 3376) */
			continue;
		int records = m[6] << 8 | m[7];

		for (unsigned char *r = m + 8; records-- && r + 8 <= f + n; r += 8) {
			CHECK(memcmp(r + 4, &other, 4));
			if (r[0] == type && !memcmp(r + 4, &group, 4))
				return;
		}
	}
}

static void groups(void)
{
	struct sockaddr_in a = at(0), group = { .sin_family = AF_INET }, only = { .sin_family = AF_INET };
	struct sockaddr_ll ll = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL) };
	struct rdma_cm_join_mc_attr_ex send_only = { .comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS,
		.join_flags = RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER, .addr = (struct sockaddr *)&only };
	int fd = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL));
	struct rdma_cm_event *e;
	struct rdma_cm_id *id;

	CHECK(fd >= 0 && getenv("TAPVERBS_PORT"));
	ll.sll_ifindex = if_nametoindex(getenv("TAPVERBS_PORT"));
	CHECK(ll.sll_ifindex && !bind(fd, (struct sockaddr *)&ll, sizeof(ll)));
	CHECK(inet_pton(AF_INET, "239.91.7.7", &group.sin_addr) == 1 && inet_pton(AF_INET, "239.91.7.8", &only.sin_addr) == 1);
	CHECK(!rdma_create_id(active, &id, NULL, RDMA_PS_UDP));
	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&a));
	/* Who only sends tells nobody. */
	CHECK(!rdma_join_multicast_ex(id, &send_only, NULL));
	pass(active, RDMA_CM_EVENT_MULTICAST_JOIN);
	CHECK(!rdma_join_multicast(id, (struct sockaddr *)&group, &group));
	e = want(active, RDMA_CM_EVENT_MULTICAST_JOIN);
	CHECK(e->param.ud.private_data == &group && e->param.ud.qp_num == 0xffffff && e->param.ud.qkey == RDMA_UDP_QKEY);
	CHECK(!rdma_ack_cm_event(e));
	reported(fd, group.sin_addr, only.sin_addr, 4);
	CHECK(!rdma_leave_multicast(id, (struct sockaddr *)&group));
	reported(fd, group.sin_addr, only.sin_addr, 3);
	/* The end of an identifier leaves, too. */
	CHECK(!rdma_join_multicast(id, (struct sockaddr *)&group, NULL));
	pass(active, RDMA_CM_EVENT_MULTICAST_JOIN);
	reported(fd, group.sin_addr, only.sin_addr, 4);
	CHECK(!rdma_destroy_id(id));
	reported(fd, group.sin_addr, only.sin_addr, 3);
	CHECK(!close(fd));
}

/* low_ports takes the right to ports below 1024, or gives it back. */
static void low_ports(bool on)
{
	struct __user_cap_header_struct h = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct d[2];

	CHECK(!syscall(SYS_capget, &h, d));
	if (on)
		d[0].effective |= 1 << CAP_NET_BIND_SERVICE;
	else
		d[0].effective &= ~(1 << CAP_NET_BIND_SERVICE);
	CHECK(!syscall(SYS_capset, &h, d));
}

static void addresses(void)
{
	struct sockaddr_in6 local = { .sin6_family = AF_INET6, .sin6_addr = { { { 0xfe, 0x80, [15] = 9 } } } };
	struct sockaddr_in low = at(1023), high = at(1024);
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(active, &id, NULL, 0x0107) == -1 && errno == EINVAL);
	CHECK(!rdma_create_id(active, &id, NULL, RDMA_PS_TCP));
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&local) == -1 && errno == EINVAL);
	local.sin6_scope_id = 1;
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&local) == -1 && errno == EADDRNOTAVAIL); /* is not ours */
	low_ports(false);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&low) == -1 && errno == EACCES);
	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&high));
	low_ports(true);
	CHECK(!rdma_destroy_id(id));
	CHECK(!rdma_create_id(active, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&low));
	CHECK(!rdma_destroy_id(id));
}

/* in_a_row: connections one after the other leave no descriptor and no memory behind. */
static void in_a_row(void)
{
	struct wishes w = { .ps = RDMA_PS_TCP, .type = IBV_QPT_RC, .client = { .retry = 7 } };
	struct rdma_cm_id *l = listener(&w), *c, *s;
	int fds = 0;
	long bytes = 0;

	for (int i = 0; i < 1000; i++) {
		if (i == 200) {
			fds = descriptors();
			bytes = resident();
		}
		connect_both(&w, &c, &s);
		disconnect_both(c, s);
	}
	CHECK(descriptors() == fds);
	CHECK(resident() - bytes < 32 << 20);
	rdma_destroy_ep(l);
}

int main(void)
{
	static const struct wishes wishes[] = {
		{ RDMA_PS_TCP, IBV_QPT_RC, { 3, 9, 5, 4 }, { 7, 2, 0, 6 }, IBV_MTU_1024, 0 },
		{ RDMA_PS_TCP, IBV_QPT_RC, { 12, 1, 7, 7 }, { 5, 6, 0, 1 }, 0, 14 },
		{ RDMA_PS_TCP, IBV_QPT_RC, { 0, 4, 1, 2 }, { 4, 4, 0, 3 }, IBV_MTU_512, 0 },
		{ RDMA_PS_IB, IBV_QPT_RC, { 4, 0, 0, 0 }, { 4, 5, 0, 7 }, 0, 0 },
		{ RDMA_PS_IB, IBV_QPT_UC, { 0, 0, 0, 0 }, { 0, 0, 0, 0 }, IBV_MTU_2048, 0 },
	};

	CHECK((active = rdma_create_event_channel()) && (passive = rdma_create_event_channel()));
	for (size_t i = 0; i < sizeof(wishes) / sizeof(*wishes); i++)
		agreed(&wishes[i]);
	other_type();
	groups();
	addresses();
	in_a_row();
	rdma_destroy_event_channel(active);
	rdma_destroy_event_channel(passive);
	return 0;
}
