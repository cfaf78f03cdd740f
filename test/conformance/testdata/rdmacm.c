/* SPDX-License-Identifier: Apache-2.0
 *
 * A program built against Debian's librdmacm-dev: what the library answers, on one device.
 * Its first argument names the check; it ends with 0, or with 1 and a line that says what
 * was wrong. Here: addresses, ports, options, devices, names. The numbers are those of the
 * man pages, and where these have none, the kernel's. */
#include "rdmacm.h"

/* In the port's network, and nobody there. */
#define NOBODY "10.91.0.77"
/* In a network that there is no way to. */
#define NOWHERE "192.0.2.1"

/* addresses: what can be bound to, and resolved. */
void addresses(void)
{
	struct sockaddr none = { .sa_family = AF_UNSPEC }, file = { .sa_family = AF_UNIX };
	struct end e = make(RDMA_PS_TCP);
	struct rdma_cm_id *id;

	FAILS(rdma_create_id(e.ch, &id, NULL, 0x999), EINVAL);

	/* Binding. */
	FAILS(rdma_bind_addr(e.id, &none), EINVAL);
	FAILS(rdma_bind_addr(e.id, &file), EINVAL);
	FAILS(rdma_bind_addr(e.id, addr(NOWHERE, 0)), EADDRNOTAVAIL);
	FAILS(rdma_bind_addr(e.id, addr("127.0.0.1", 0)), ENODEV);
	CHECK(!rdma_get_src_port(e.id));
	CHECK(!rdma_bind_addr(e.id, addr(own(), 0)));
	CHECK(e.id->verbs && e.id->pd && e.id->port_num == 1 && rdma_get_src_port(e.id));
	CHECK(((struct sockaddr_in *)rdma_get_local_addr(e.id))->sin_addr.s_addr == inet_addr(own()));
	FAILS(rdma_bind_addr(e.id, addr(own(), 0)), EINVAL);

	/* Resolving: what is known at once to be wrong is said at once, and does no harm. */
	FAILS(rdma_resolve_addr(e.id, NULL, &none, PATIENCE), EINVAL);
	FAILS(rdma_resolve_addr(e.id, NULL, addr(own6(), 1), PATIENCE), EINVAL);
	FAILS(rdma_resolve_addr(e.id, NULL, addr(NOWHERE, 1), PATIENCE), ENETUNREACH);
	quiet(e.ch);
	/* Nobody answers for it: the program's time is over. */
	CHECK(!rdma_resolve_addr(e.id, NULL, addr(NOBODY, 1), 100));
	wait_for(&e, RDMA_CM_EVENT_ADDR_ERROR, -ETIMEDOUT);
	/* The way there is one that no device is on. */
	CHECK(!rdma_resolve_addr(e.id, NULL, addr("127.0.0.1", 1), PATIENCE));
	wait_for(&e, RDMA_CM_EVENT_ADDR_ERROR, -ENODEV);
	FAILS(rdma_resolve_route(e.id, PATIENCE), EINVAL);
	CHECK(!rdma_resolve_addr(e.id, NULL, addr(own(), 4711), PATIENCE));
	wait_for(&e, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	CHECK(ntohs(rdma_get_dst_port(e.id)) == 4711);
	CHECK(((struct sockaddr_in *)rdma_get_peer_addr(e.id))->sin_addr.s_addr == inet_addr(own()));
	FAILS(rdma_resolve_addr(e.id, NULL, addr(own(), 4711), PATIENCE), EINVAL);
	make_qp(e.id);
	FAILS(rdma_connect(e.id, NULL), EINVAL); /* there is no route yet */
	CHECK(!rdma_resolve_route(e.id, PATIENCE));
	wait_for(&e, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
	CHECK(e.id->route.num_paths == 1 && e.id->route.path_rec->numb_path == 1);
	FAILS(rdma_resolve_route(e.id, PATIENCE), EINVAL);
	FAILS(rdma_listen(e.id, 1), EINVAL);
	rdma_destroy_qp(e.id);
	end_it(&e);

	/* The ends of a way are of one family. */
	e = make(RDMA_PS_TCP);
	FAILS(rdma_resolve_addr(e.id, addr(own6(), 0), addr(own(), 1), PATIENCE), EINVAL);
	end_it(&e);
	e = make(RDMA_PS_TCP);
	FAILS(rdma_resolve_addr(e.id, &file, addr(own(), 1), PATIENCE), EINVAL);
	CHECK(!rdma_resolve_addr(e.id, addr(own(), 0), addr(own(), 1), PATIENCE));
	wait_for(&e, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	end_it(&e);
	e = make(RDMA_PS_TCP);
	FAILS(rdma_resolve_addr(e.id, addr(NOWHERE, 0), addr(own(), 1), PATIENCE), EADDRNOTAVAIL);
	/* It ends while it is being resolved. */
	CHECK(!rdma_resolve_addr(e.id, NULL, addr(NOBODY, 1), 60000));
	end_it(&e);

	/* A listener without an address has one then. */
	e = make(RDMA_PS_TCP);
	CHECK(!rdma_listen(e.id, 1) && rdma_get_src_port(e.id) && !e.id->verbs);
	FAILS(rdma_listen(e.id, 1), EINVAL);
	end_it(&e);
}

/* a pair of identifiers that want the same port, with an option set for both. */
static void pair(struct end e[2], int option)
{
	int on = 1;

	for (int i = 0; i < 2; i++) {
		e[i] = make(RDMA_PS_TCP);
		if (option >= 0)
			CHECK(!rdma_set_option(e[i].id, RDMA_OPTION_ID, option, &on, sizeof(on)));
	}
}

static void end_both(struct end e[2])
{
	end_it(&e[0]);
	end_it(&e[1]);
}

/* ports: who may have one that another has. */
void ports(void)
{
	const char *any = "0.0.0.0", *any6 = "::";
	struct end e[2], udp;
	int port;

	pair(e, -1);
	CHECK(!rdma_bind_addr(e[0].id, addr(any, 0)));
	CHECK((port = port_of(&e[0])) && !e[0].id->verbs);
	FAILS(rdma_bind_addr(e[1].id, addr(any, port)), EADDRNOTAVAIL);
	FAILS(rdma_bind_addr(e[1].id, addr(own(), port)), EADDRNOTAVAIL);
	FAILS(rdma_bind_addr(e[1].id, addr(any6, port)), EADDRNOTAVAIL);
	udp = make(RDMA_PS_UDP); /* has ports of its own */
	CHECK(!rdma_bind_addr(udp.id, addr(any, port)));
	end_it(&udp);
	CHECK(!rdma_destroy_id(e[0].id)); /* gives it back */
	CHECK(!rdma_bind_addr(e[1].id, addr(own(), port)) && port_of(&e[1]) == port);
	CHECK(!rdma_create_id(e[0].ch, &e[0].id, NULL, RDMA_PS_TCP));
	FAILS(rdma_bind_addr(e[0].id, addr(own(), port)), EADDRINUSE);
	CHECK(!rdma_bind_addr(e[0].id, addr(own6(), port))); /* another address */
	end_both(e);

	/* Several may have it who allow that, until one of them listens. */
	pair(e, RDMA_OPTION_ID_REUSEADDR);
	CHECK(!rdma_bind_addr(e[0].id, addr(own(), 0)));
	CHECK(!rdma_bind_addr(e[1].id, addr(own(), port_of(&e[0]))));
	FAILS(rdma_listen(e[0].id, 1), EADDRINUSE);
	CHECK(!rdma_destroy_id(e[1].id));
	CHECK(!rdma_listen(e[0].id, 1));
	CHECK(!rdma_create_id(e[1].ch, &e[1].id, NULL, RDMA_PS_TCP));
	FAILS(rdma_bind_addr(e[1].id, addr(own(), port_of(&e[0]))), EADDRINUSE); /* did not allow it */
	end_both(e);

	/* Families apart. */
	pair(e, RDMA_OPTION_ID_AFONLY);
	CHECK(!rdma_bind_addr(e[0].id, addr(any6, 0)));
	port = port_of(&e[0]);
	CHECK(!rdma_bind_addr(e[1].id, addr(any, port)));
	CHECK(!rdma_listen(e[0].id, 2) && !rdma_listen(e[1].id, 2));
	struct end a = resolved(RDMA_PS_TCP, own(), port), b = resolved(RDMA_PS_TCP, own6(), port);
	make_qp(a.id);
	make_qp(b.id);
	CHECK(!rdma_connect(a.id, NULL));
	struct rdma_cm_event *ev = get(e[1].ch, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	CHECK(rdma_get_local_addr(ev->id)->sa_family == AF_INET && rdma_get_dst_port(ev->id) == rdma_get_src_port(a.id));
	CHECK(!rdma_destroy_id(ev->id) && !rdma_ack_cm_event(ev)); /* is its refusal */
	wait_for(&a, RDMA_CM_EVENT_REJECTED, 28);
	CHECK(!rdma_connect(b.id, NULL));
	ev = get(e[0].ch, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	CHECK(rdma_get_local_addr(ev->id)->sa_family == AF_INET6);
	CHECK(!rdma_destroy_id(ev->id) && !rdma_ack_cm_event(ev));
	wait_for(&b, RDMA_CM_EVENT_REJECTED, 28);
	rdma_destroy_qp(a.id);
	rdma_destroy_qp(b.id);
	end_it(&a);
	end_it(&b);
	/* With nobody at IPv4's it is refused: the one at IPv6's is for that only. */
	end_it(&e[1]);
	a = resolved(RDMA_PS_TCP, own(), port);
	make_qp(a.id);
	CHECK(!rdma_connect(a.id, NULL));
	wait_for(&a, RDMA_CM_EVENT_REJECTED, 8);
	quiet(e[0].ch);
	rdma_destroy_qp(a.id);
	end_it(&a);
	end_it(&e[0]);

	/* Without the option it is for both. */
	struct end l = listening(RDMA_PS_TCP, any6, 2);
	a = resolved(RDMA_PS_TCP, own(), port_of(&l));
	make_qp(a.id);
	CHECK(!rdma_connect(a.id, NULL));
	ev = get(l.ch, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	CHECK(!rdma_destroy_id(ev->id) && !rdma_ack_cm_event(ev));
	wait_for(&a, RDMA_CM_EVENT_REJECTED, 28);
	rdma_destroy_qp(a.id);
	end_it(&a);
	end_it(&l);
}

/* options: their lengths, values, and times. */
void options(void)
{
	uint8_t tos = 0x20, timeout = 14;
	int on = 1, off = 0;
	struct end e = make(RDMA_PS_TCP), udp = make(RDMA_PS_UDP);
	struct ibv_path_data path[2];

	FAILS(rdma_set_option(e.id, 7, RDMA_OPTION_ID_TOS, &tos, 1), ENOSYS);
	FAILS(rdma_set_option(e.id, RDMA_OPTION_ID, 99, &tos, 1), ENOSYS);
	FAILS(rdma_set_option(e.id, RDMA_OPTION_ID, -1, &tos, 1), ENOSYS);
	FAILS(rdma_set_option(e.id, RDMA_OPTION_IB, 99, path, sizeof(path)), ENOSYS);
	FAILS(rdma_set_option(e.id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &on, sizeof(on)), EINVAL);
	FAILS(rdma_set_option(e.id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 0), EINVAL);
	FAILS(rdma_set_option(e.id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on, 1), EINVAL);
	FAILS(rdma_set_option(e.id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &on, 8), EINVAL);
	FAILS(rdma_set_option(e.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &on, sizeof(on)), EINVAL);
	FAILS(rdma_set_option(udp.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, 1), EINVAL); /* nobody acknowledges */
	end_it(&udp);

	CHECK(!rdma_set_option(e.id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 1));
	CHECK(!rdma_set_option(e.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, 1));
	CHECK(!rdma_bind_addr(e.id, addr(own(), 0)));
	CHECK(!rdma_set_option(e.id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &off, sizeof(off)));
	CHECK(!rdma_set_option(e.id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on, sizeof(on)));
	FAILS(rdma_set_option(e.id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &off, sizeof(off)), EINVAL); /* too late */

	/* A path of the program's own. */
	struct end l = listening(RDMA_PS_TCP, own(), 1);
	FAILS(rdma_set_option(l.id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &on, sizeof(on)), EINVAL);
	memset(path, 0, sizeof(path)); /* the first is of no use: it is for one direction */
	path[0].flags = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_OUTBOUND;
	path[1].flags = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL;
	path[1].path.mtu = 2 << 6 | IBV_MTU_1024;
	path[1].path.tclass = 0x48;
	path[1].path.pkey = htons(0xffff);
	path[1].path.flowlabel_hoplimit = htonl(0x12345 << 8 | 9);
	FAILS(rdma_set_option(e.id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, path, sizeof(path)), EINVAL); /* to where? */
	CHECK(!rdma_resolve_addr(e.id, NULL, addr(own(), port_of(&l)), PATIENCE));
	wait_for(&e, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	FAILS(rdma_set_option(e.id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, path, 0), EINVAL);
	FAILS(rdma_set_option(e.id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, path, sizeof(path) - 1), EINVAL);
	FAILS(rdma_set_option(e.id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, path, sizeof(path[0])), EINVAL);
	CHECK(!rdma_set_option(e.id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, path, sizeof(path)));
	wait_for(&e, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
	CHECK(e.id->route.num_paths == 1);
	struct ibv_sa_path_rec *p = e.id->route.path_rec;
	CHECK(p->mtu == IBV_MTU_1024 && p->traffic_class == 0x48 && ntohl(p->flow_label) == 0x12345 && p->hop_limit == 9);

	/* And what is made of them. */
	make_qp(e.id);
	CHECK(!rdma_connect(e.id, NULL));
	struct rdma_cm_id *server = accepted(&l, true);
	wait_for(&e, RDMA_CM_EVENT_ESTABLISHED, 0);
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr in;
	CHECK(!ibv_query_qp(e.id->qp, &a, IBV_QP_PATH_MTU | IBV_QP_AV | IBV_QP_TIMEOUT, &in));
	CHECK(a.path_mtu == IBV_MTU_1024 && a.timeout == 14 && a.ah_attr.grh.traffic_class == 0x48 && a.ah_attr.grh.flow_label == 0x12345);
	rdma_destroy_qp(server);
	rdma_destroy_qp(e.id);
	CHECK(!rdma_destroy_id(server));
	end_it(&e);
	end_it(&l);

	/* The type of service is the traffic class of a route that is resolved. */
	e = make(RDMA_PS_TCP);
	CHECK(!rdma_set_option(e.id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 1));
	CHECK(!rdma_resolve_addr(e.id, NULL, addr(own(), 1), PATIENCE));
	wait_for(&e, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	CHECK(!rdma_resolve_route(e.id, PATIENCE));
	wait_for(&e, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
	CHECK(e.id->route.path_rec->traffic_class == tos);
	end_it(&e);
}

/* devices: the list of them, whose contexts are those of identifiers. */
void devices(void)
{
	struct ibv_context **list, **again;
	int n = -1;

	CHECK(list = rdma_get_devices(&n));
	CHECK(n == 1 && list[0] && !list[1] && !strcmp(ibv_get_device_name(list[0]->device), "tapverbs0"));
	CHECK(again = rdma_get_devices(NULL));
	CHECK(again[0] == list[0]);
	struct end e = make(RDMA_PS_TCP);
	CHECK(!rdma_bind_addr(e.id, addr(own(), 0)) && e.id->verbs == list[0]);
	rdma_free_devices(list);
	rdma_free_devices(again);
	CHECK(!strcmp(ibv_get_device_name(e.id->verbs->device), "tapverbs0")); /* stays open */
	end_it(&e);
}

static struct rdma_addrinfo *look(const char *node, const char *service, int flags, int family, int ps, int type)
{
	struct rdma_addrinfo hints = { .ai_flags = flags, .ai_family = family, .ai_port_space = ps, .ai_qp_type = type }, *res = NULL;

	CHECK(!rdma_getaddrinfo(node, service, &hints, &res));
	CHECK(res && !res->ai_next && !res->ai_route_len && !res->ai_connect_len);
	return res;
}

/* names: rdma_getaddrinfo(3) and its flags. */
void names(void)
{
	struct rdma_addrinfo *res, hints = { .ai_flags = RAI_NUMERICHOST };
	struct sockaddr_in *in;

	FAILS(rdma_getaddrinfo(NULL, NULL, NULL, &res), EINVAL);
	CHECK(rdma_getaddrinfo("localhost", "7", &hints, &res)); /* is no number */
	hints = (struct rdma_addrinfo){ .ai_port_space = RDMA_PS_TCP, .ai_qp_type = IBV_QPT_UD };
	CHECK(rdma_getaddrinfo(own(), "7", &hints, &res)); /* do not go together */

	res = look(own(), "4711", RAI_NUMERICHOST, 0, RDMA_PS_TCP, 0);
	in = (void *)res->ai_dst_addr;
	CHECK(res->ai_family == AF_INET && res->ai_qp_type == IBV_QPT_RC && res->ai_port_space == RDMA_PS_TCP && !res->ai_src_len);
	CHECK(res->ai_dst_len == sizeof(*in) && in->sin_port == htons(4711) && in->sin_addr.s_addr == inet_addr(own()));
	rdma_freeaddrinfo(res);

	res = look(own6(), "4711", RAI_NUMERICHOST | RAI_NOROUTE, AF_INET6, RDMA_PS_UDP, 0);
	CHECK(res->ai_family == AF_INET6 && res->ai_qp_type == IBV_QPT_UD && res->ai_port_space == RDMA_PS_UDP && res->ai_dst_len == sizeof(struct sockaddr_in6));
	rdma_freeaddrinfo(res);

	res = look(NULL, "4711", RAI_PASSIVE, AF_INET, RDMA_PS_IB, IBV_QPT_RC);
	in = (void *)res->ai_src_addr;
	CHECK(res->ai_flags == RAI_PASSIVE && res->ai_port_space == RDMA_PS_IB && !res->ai_dst_len);
	CHECK(res->ai_src_len == sizeof(*in) && in->sin_port == htons(4711) && !in->sin_addr.s_addr);
	rdma_freeaddrinfo(res);

	res = look(own(), "4711", 0, AF_INET, RDMA_PS_TCP, IBV_QPT_XRC_SEND);
	CHECK(res->ai_qp_type == IBV_QPT_XRC_SEND);
	rdma_freeaddrinfo(res);

	/* Without hints it is what most programs want. */
	CHECK(!rdma_getaddrinfo(own(), "4711", NULL, &res));
	CHECK(res->ai_qp_type == IBV_QPT_RC && res->ai_port_space == RDMA_PS_TCP && res->ai_dst_len && !res->ai_flags);
	rdma_freeaddrinfo(res);

	/* Without names the hints are the answer, with copies of the addresses. */
	hints = (struct rdma_addrinfo){ .ai_family = AF_INET, .ai_port_space = RDMA_PS_TCP, .ai_qp_type = IBV_QPT_RC,
		.ai_src_addr = addr(own(), 0), .ai_src_len = sizeof(*in), .ai_dst_addr = addr(own(), 12), .ai_dst_len = sizeof(*in) };
	CHECK(!rdma_getaddrinfo(NULL, NULL, &hints, &res));
	CHECK(res->ai_src_len == sizeof(*in) && res->ai_dst_len == sizeof(*in) && res->ai_src_addr != hints.ai_src_addr);
	CHECK(!memcmp(res->ai_dst_addr, hints.ai_dst_addr, sizeof(*in)) && !memcmp(res->ai_src_addr, hints.ai_src_addr, sizeof(*in)));
	rdma_freeaddrinfo(res);
	/* The source comes from the hints, the destination from the names. */
	CHECK(!rdma_getaddrinfo(own(), "13", &hints, &res));
	CHECK(res->ai_src_len == sizeof(*in) && ((struct sockaddr_in *)res->ai_dst_addr)->sin_port == htons(13));
	rdma_freeaddrinfo(res);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} checks[] = {
		{ "addresses", addresses }, { "ports", ports }, { "options", options }, { "devices", devices }, { "names", names },
		{ "refused", refused }, { "connected", connected }, { "untold", untold }, { "backlog", backlog }, { "datagrams", datagrams },
		{ "events", events }, { "migrate", migrate }, { "endpoints", endpoints }, { "removal", removal },
		{ "queues", queues }, { "groups", groups },
	};

	for (size_t i = 0; argc == 2 && i < sizeof(checks) / sizeof(checks[0]); i++) {
		if (!strcmp(argv[1], checks[i].name)) {
			checks[i].run();
			return 0;
		}
	}
	fprintf(stderr, "rdmacm CHECK\n");
	return 2;
}
