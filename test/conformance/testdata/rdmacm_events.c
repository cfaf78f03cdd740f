/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of librdmacm: event channels, identifiers that move between them or whose calls
 * wait, and a device that is taken away. */
#include "rdmacm.h"

/* events: the descriptor of a channel, and who waits for acknowledgements. */
void events(void)
{
	struct end e = make(RDMA_PS_TCP), l, a;
	struct rdma_cm_event *ev;
	struct late late;

	FAILS(rdma_get_cm_event(e.ch, NULL), EINVAL);
	FAILS(rdma_ack_cm_event(NULL), EINVAL);
	CHECK(!strcmp(rdma_event_str(RDMA_CM_EVENT_TIMEWAIT_EXIT), "RDMA_CM_EVENT_TIMEWAIT_EXIT"));
	CHECK(!strcmp(rdma_event_str(-1), "UNKNOWN EVENT") && !strcmp(rdma_event_str(99), "UNKNOWN EVENT"));
	nonblock(e.ch);
	FAILS(rdma_get_cm_event(e.ch, &ev), EAGAIN);
	quiet(e.ch);
	CHECK(!rdma_resolve_addr(e.id, NULL, addr(own(), 1), PATIENCE));
	CHECK(readable(e.ch, -1) == 1);
	CHECK(readable(e.ch, -1) == 1); /* it stays until it is taken */
	ev = get(e.ch, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	CHECK(ev->id == e.id && !ev->listen_id);
	quiet(e.ch);
	FAILS(rdma_get_cm_event(e.ch, &ev), EAGAIN);

	/* The end of an identifier waits for what was taken, and takes along what was not. */
	ack_later(&late, ev);
	CHECK(!rdma_resolve_route(e.id, PATIENCE));
	CHECK(readable(e.ch, -1) == 1);
	CHECK(!rdma_destroy_id(e.id) && late.acked);
	pthread_join(late.thread, NULL);
	quiet(e.ch);
	FAILS(rdma_get_cm_event(e.ch, &ev), EAGAIN);
	rdma_destroy_event_channel(e.ch);

	/* The event of a request is the listener's, not the new identifier's. */
	struct rdma_conn_param p = { .qp_num = 0x77 };
	l = listening(RDMA_PS_TCP, own(), 8);
	a = resolved(RDMA_PS_TCP, own(), port_of(&l));
	CHECK(!rdma_connect(a.id, &p));
	ev = get(l.ch, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	CHECK(!rdma_destroy_id(ev->id)); /* does not wait */
	ack_later(&late, ev);
	CHECK(!rdma_destroy_id(l.id) && late.acked);
	pthread_join(late.thread, NULL);
	rdma_destroy_event_channel(l.ch);
	wait_for(&a, RDMA_CM_EVENT_REJECTED, 28);
	end_it(&a);
}

/* migrate: identifiers move to other channels with what waits for them, or to none. */
void migrate(void)
{
	struct end e = make(RDMA_PS_TCP), l, a;
	struct rdma_event_channel *to = rdma_create_event_channel();
	struct rdma_cm_event *ev;
	struct late late;

	CHECK(to);
	CHECK(!rdma_resolve_addr(e.id, NULL, addr(own(), 1), PATIENCE));
	CHECK(readable(e.ch, -1) == 1);
	CHECK(!rdma_migrate_id(e.id, to) && e.id->channel == to);
	quiet(e.ch);
	ev = get(to, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	CHECK(ev->id == e.id);
	/* It waits for what was taken of the old channel. */
	ack_later(&late, ev);
	CHECK(!rdma_migrate_id(e.id, e.ch) && late.acked && e.id->channel == e.ch);
	pthread_join(late.thread, NULL);
	rdma_destroy_event_channel(to);

	/* To none: its calls wait for their events, which are there for the program to see. */
	CHECK(!rdma_migrate_id(e.id, NULL) && e.id->channel && e.id->channel != e.ch && !e.id->event);
	CHECK(!rdma_resolve_route(e.id, PATIENCE));
	CHECK(e.id->event && e.id->event->event == RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK(!rdma_migrate_id(e.id, e.ch) && e.id->channel == e.ch && !e.id->event);
	quiet(e.ch);
	end_it(&e);

	/* A request goes with its listener. */
	struct rdma_conn_param p = { .qp_num = 0x77 };
	l = listening(RDMA_PS_TCP, own(), 8);
	a = resolved(RDMA_PS_TCP, own(), port_of(&l));
	CHECK(!rdma_connect(a.id, &p));
	CHECK(readable(l.ch, -1) == 1);
	CHECK(to = rdma_create_event_channel());
	CHECK(!rdma_migrate_id(l.id, to));
	quiet(l.ch);
	ev = get(to, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	CHECK(ev->id->channel == to && ev->listen_id == l.id);
	/* And the new identifier may go another way. */
	struct rdma_cm_id *b = ev->id;
	CHECK(!rdma_ack_cm_event(ev) && !rdma_migrate_id(b, l.ch));
	p.qp_num++;
	CHECK(!rdma_accept(b, &p));
	wait_for(&a, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
	CHECK(!rdma_establish(a.id));
	ev = get(l.ch, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(ev->id == b && !rdma_ack_cm_event(ev) && !rdma_destroy_id(b) && !rdma_destroy_id(l.id));
	quiet(to);
	rdma_destroy_event_channel(to);
	rdma_destroy_event_channel(l.ch);
	wait_for(&a, RDMA_CM_EVENT_DISCONNECTED, 0);
	end_it(&a);
}

static struct ibv_qp_init_attr qp_attr(void)
{
	return (struct ibv_qp_init_attr){ .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 }, .sq_sig_all = 1 };
}

static struct rdma_cm_id *endpoint(const char *node, int port, int flags)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = flags }, *res;
	struct ibv_qp_init_attr attr = qp_attr();
	struct rdma_cm_id *id;
	char service[8];

	snprintf(service, sizeof(service), "%d", port);
	CHECK(!rdma_getaddrinfo(node, service, &hints, &res));
	CHECK(!rdma_create_ep(&id, res, NULL, &attr));
	rdma_freeaddrinfo(res);
	return id;
}

struct client {
	int port;
	bool refused;
	pthread_t thread;
};

/* The client of endpoints: each of its calls waits. */
static void *client(void *arg)
{
	struct client *c = arg;
	struct rdma_cm_id *id = endpoint(own(), c->port, 0);
	struct ibv_wc wc;
	struct ibv_mr *mr;
	char buf[16];

	CHECK(id->qp && id->event && id->event->event == RDMA_CM_EVENT_ROUTE_RESOLVED);
	if (c->refused) {
		FAILS(rdma_connect(id, NULL), ECONNREFUSED);
		CHECK(id->event->event == RDMA_CM_EVENT_REJECTED && id->event->status == 28);
		rdma_destroy_ep(id);
		return NULL;
	}
	CHECK(mr = rdma_reg_msgs(id, buf, sizeof(buf)));
	CHECK(!rdma_post_recv(id, NULL, buf, sizeof(buf), mr));
	CHECK(!rdma_connect(id, NULL) && id->event->event == RDMA_CM_EVENT_ESTABLISHED);
	CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS && !strcmp(buf, "welcome"));
	CHECK(!rdma_disconnect(id) && id->event->event == RDMA_CM_EVENT_DISCONNECTED);
	CHECK(!rdma_dereg_mr(mr));
	rdma_destroy_ep(id);
	return NULL;
}

/* endpoints: the synchronous style. */
void endpoints(void)
{
	struct rdma_cm_id *l = endpoint(own(), 0, RAI_PASSIVE), *id;
	struct end e = make(RDMA_PS_TCP);
	struct client c = { 0 };
	struct ibv_wc wc;

	FAILS(rdma_get_request(e.id, &id), EINVAL); /* has a channel of the program's */
	end_it(&e);
	CHECK(!rdma_listen(l, 4));
	c.port = ntohs(rdma_get_src_port(l));
	CHECK(c.port);
	for (int i = 0; i < 2; i++) {
		c.refused = i;
		CHECK(!pthread_create(&c.thread, NULL, client, &c));
		CHECK(!rdma_get_request(l, &id));
		CHECK(id->qp && id->channel != l->channel && id->event->event == RDMA_CM_EVENT_CONNECT_REQUEST && id->event->listen_id == l);
		if (c.refused) {
			CHECK(!rdma_reject(id, NULL, 0));
		} else {
			char buf[16] = "welcome";
			struct ibv_mr *mr = rdma_reg_msgs(id, buf, sizeof(buf));

			CHECK(mr);
			CHECK(!rdma_accept(id, NULL) && id->event->event == RDMA_CM_EVENT_ESTABLISHED);
			CHECK(!rdma_post_send(id, NULL, buf, sizeof(buf), mr, 0));
			CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
			CHECK(!rdma_disconnect(id) && id->event->event == RDMA_CM_EVENT_DISCONNECTED);
			CHECK(!rdma_dereg_mr(mr));
		}
		pthread_join(c.thread, NULL);
		rdma_destroy_ep(id);
	}
	rdma_destroy_ep(l);

	/* Calls fail as their events say. */
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = RAI_PASSIVE }, *res;
	CHECK(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
	FAILS(rdma_resolve_addr(id, NULL, addr("127.0.0.1", 1), PATIENCE), ENODEV);
	CHECK(id->event->event == RDMA_CM_EVENT_ADDR_ERROR && id->event->status == -ENODEV);
	FAILS(rdma_resolve_addr(id, NULL, addr("10.91.0.77", 1), 50), ETIMEDOUT);
	CHECK(!rdma_resolve_addr(id, NULL, addr(own(), 7), PATIENCE));
	CHECK(!rdma_resolve_route(id, PATIENCE));
	struct rdma_conn_param p = { .qp_num = 0x77 };
	FAILS(rdma_connect(id, &p), ECONNREFUSED);
	CHECK(id->event->status == 8);
	rdma_destroy_ep(id);
	CHECK(!rdma_getaddrinfo("192.0.2.1", "7", &hints, &res));
	FAILS(rdma_create_ep(&id, res, NULL, NULL), EADDRNOTAVAIL);
	rdma_freeaddrinfo(res);
}

/* removal: the port is deleted. Who is on the device hears of it once, and may end. */
void removal(void)
{
	struct end bound = listening(RDMA_PS_TCP, own(), 4), loose = make(RDMA_PS_TCP), a, late;
	char cmd[128];

	a = resolved(RDMA_PS_TCP, own(), port_of(&bound));
	make_qp(a.id);
	CHECK(!rdma_connect(a.id, NULL));
	struct rdma_cm_id *b = accepted(&bound, true);
	wait_for(&a, RDMA_CM_EVENT_ESTABLISHED, 0);
	struct rdma_cm_event *ev = get(bound.ch, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(ev->id == b && !rdma_ack_cm_event(ev));
	CHECK(!rdma_migrate_id(b, (late.ch = rdma_create_event_channel())));
	late.id = b;

	unsetenv("LD_PRELOAD"); /* what is loaded before us is not for ip(8) */
	snprintf(cmd, sizeof(cmd), "ip link delete %s", getenv("TAPVERBS_PORT"));
	CHECK(!system(cmd));
	wait_for(&bound, RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
	wait_for(&a, RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
	wait_for(&late, RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
	quiet(loose.ch);
	quiet(a.ch);

	/* No address is the device's any more; what there was can be ended. */
	FAILS(rdma_bind_addr(loose.id, addr(own(), 0)), ENODEV);
	FAILS(rdma_resolve_addr(loose.id, NULL, addr(own(), 1), PATIENCE), ENODEV);
	rdma_destroy_qp(a.id);
	rdma_destroy_qp(b);
	end_it(&late);
	end_it(&a);
	end_it(&bound);
	end_it(&loose);
	/* The port is there again. */
	snprintf(cmd, sizeof(cmd), "ip tuntap add dev %1$s mode tap && ip link set %1$s up", getenv("TAPVERBS_PORT"));
	CHECK(!system(cmd));
	a = listening(RDMA_PS_TCP, own(), 1);
	CHECK(a.id->verbs);
	end_it(&a);
}
