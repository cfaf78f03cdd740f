/* SPDX-License-Identifier: Apache-2.0
 *
 * What the checks of rdmacm*.c share: identifiers of both ends of a connection, which are
 * in one process here, on the device's own address. */
#ifndef CONFORMANCE_RDMACM_H
#define CONFORMANCE_RDMACM_H
#define _GNU_SOURCE
#include "check.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/ib.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* FAILS: a call fails as librdmacm's do, with a number. */
#define FAILS(call, number)                                                                        \
	do {                                                                                       \
		errno = 0;                                                                         \
		int failed_rc_ = (call);                                                           \
		int failed_errno_ = errno;                                                         \
		errno = failed_errno_;                                                             \
		CHECK(failed_rc_ == -1 && failed_errno_ == (number));                              \
	} while (0)

/* How long may be looked for what is there, in ms: as long as a busy machine needs. */
#define PATIENCE 60000

/* An end of what is tried: an identifier and a channel for its events. */
struct end {
	struct rdma_event_channel *ch;
	struct rdma_cm_id *id;
};

/* Addresses as text, 10.91.0.1 or so, are AF_INET's or AF_INET6's. */
static inline struct sockaddr *addr(const char *text, int port)
{
	static __thread struct sockaddr_storage all[8];
	static __thread unsigned int next;
	struct sockaddr_storage *a = &all[next++ % 8];
	struct sockaddr_in *in = (void *)a;
	struct sockaddr_in6 *in6 = (void *)a;

	memset(a, 0, sizeof(*a));
	if (strchr(text, ':')) {
		in6->sin6_family = AF_INET6;
		in6->sin6_port = htons(port);
		CHECK(inet_pton(AF_INET6, text, &in6->sin6_addr) == 1);
	} else {
		in->sin_family = AF_INET;
		in->sin_port = htons(port);
		CHECK(inet_pton(AF_INET, text, &in->sin_addr) == 1);
	}
	return (struct sockaddr *)a;
}

static inline const char *own(void) { return getenv("TAPVERBS_ADDR"); }
static inline const char *own6(void) { return getenv("TAPVERBS_ADDR6"); }

static inline struct end make(enum rdma_port_space ps)
{
	struct end e;

	CHECK(e.ch = rdma_create_event_channel());
	CHECK(!rdma_create_id(e.ch, &e.id, &e, ps));
	CHECK(e.id->channel == e.ch && e.id->ps == ps && !e.id->qp && !e.id->verbs);
	return e;
}

static inline void end_it(struct end *e)
{
	CHECK(!rdma_destroy_id(e->id));
	rdma_destroy_event_channel(e->ch);
}

/* get waits for an event, which is to be acknowledged. */
static inline struct rdma_cm_event *get(struct rdma_event_channel *ch, enum rdma_cm_event_type type, int status)
{
	struct rdma_cm_event *ev;

	CHECK(!rdma_get_cm_event(ch, &ev));
	if (ev->event != type || ev->status != status) {
		fprintf(stderr, "%s with status %d, not %s with %d\n", rdma_event_str(ev->event), ev->status, rdma_event_str(type), status);
		exit(1);
	}
	return ev;
}

/* wait_for waits for an event of an end's identifier, and acknowledges it. */
static inline void wait_for(struct end *e, enum rdma_cm_event_type type, int status)
{
	struct rdma_cm_event *ev = get(e->ch, type, status);

	CHECK(ev->id == e->id);
	CHECK(!rdma_ack_cm_event(ev));
}

static inline int readable(struct rdma_event_channel *ch, int timeout)
{
	struct pollfd p = { .fd = ch->fd, .events = POLLIN };

	return poll(&p, 1, timeout);
}

static inline void nonblock(struct rdma_event_channel *ch)
{
	CHECK(!fcntl(ch->fd, F_SETFL, fcntl(ch->fd, F_GETFL) | O_NONBLOCK));
}

static inline void quiet(struct rdma_event_channel *ch) { CHECK(readable(ch, 0) == 0); }

/* listening is a listener at the device's own address, or at any if where says so. */
static inline struct end listening(enum rdma_port_space ps, const char *where, int backlog)
{
	struct end e = make(ps);

	CHECK(!rdma_bind_addr(e.id, addr(where, 0)));
	CHECK(!rdma_listen(e.id, backlog));
	return e;
}

static inline int port_of(struct end *e) { return ntohs(rdma_get_src_port(e->id)); }

/* resolved is an identifier that may connect to a port of an address. */
static inline struct end resolved(enum rdma_port_space ps, const char *where, int port)
{
	struct end e = make(ps);

	CHECK(!rdma_resolve_addr(e.id, NULL, addr(where, port), PATIENCE));
	wait_for(&e, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	CHECK(!rdma_resolve_route(e.id, PATIENCE));
	wait_for(&e, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
	return e;
}

static inline void make_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr in = { .qp_type = id->ps == RDMA_PS_UDP ? IBV_QPT_UD : IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 } };

	CHECK(!rdma_create_qp(id, NULL, &in));
}

/* accepted: the other end's request is taken and accepted; it is the identifier of that. */
static inline struct rdma_cm_id *accepted(struct end *listener, bool with_qp)
{
	struct rdma_conn_param p = { .qp_num = 0x1234 };
	struct rdma_cm_event *ev = get(listener->ch, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	struct rdma_cm_id *id = ev->id;

	CHECK(ev->listen_id == listener->id && id->channel == listener->ch && id->context == listener->id->context);
	CHECK(!rdma_ack_cm_event(ev));
	if (with_qp)
		make_qp(id);
	CHECK(!rdma_accept(id, &p));
	return id;
}

/* An event that another thread acknowledges, some time later. */
struct late {
	struct rdma_cm_event *ev;
	volatile bool acked;
	pthread_t thread;
};

static inline void *ack(void *arg)
{
	struct late *l = arg;

	usleep(100000); /* so that who does not wait for this is before it */
	l->acked = true;
	CHECK(!rdma_ack_cm_event(l->ev));
	return NULL;
}

static inline void ack_later(struct late *l, struct rdma_cm_event *ev)
{
	l->ev = ev;
	l->acked = false;
	CHECK(!pthread_create(&l->thread, NULL, ack, l));
}

/* rdmacm.c */
void addresses(void);
void ports(void);
void options(void);
void devices(void);
void names(void);

/* rdmacm_conn.c */
void refused(void);
void connected(void);
void untold(void);
void backlog(void);
void datagrams(void);

/* rdmacm_events.c */
void events(void);
void migrate(void);
void endpoints(void);
void removal(void);

/* rdmacm_queues.c */
void queues(void);
void groups(void);

#endif
