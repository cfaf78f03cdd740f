/* SPDX-License-Identifier: Apache-2.0
 *
 * How streams are connected: a state for each step, and the events of the connection manager
 * that lead from one to the next. Nothing here sleeps; who calls may wait for rs_settled. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rs.h"

socklen_t rs_addrlen(const struct sockaddr *sa)
{
	return sa->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

/* set_options hands over what the id wants to know before it is bound. */
static int set_options(struct rsock *s)
{
	int one = 1, afonly = s->v6only;

	if (s->reuse && rdma_set_option(s->id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &one, sizeof(one)))
		return -1;
	if (s->domain == AF_INET6 && s->v6only)
		return rdma_set_option(s->id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &afonly, sizeof(afonly));
	return 0;
}

int rs_bind_stream(struct rsock *s, const struct sockaddr *addr)
{
	if (s->state != RS_IDLE)
		return rs_error(EINVAL);
	if (set_options(s) || rdma_bind_addr(s->id, (struct sockaddr *)addr))
		return -1;
	s->state = RS_BOUND;
	return 0;
}

int rs_listen_stream(struct rsock *s, int backlog)
{
	union rs_addr any = {.in6 = {.sin6_family = s->domain}};

	if (s->state == RS_LISTENING)
		return 0;
	if (s->state == RS_IDLE && rs_bind_stream(s, &any.sa)) /* a port of the library's choice */
		return -1;
	if (s->state != RS_BOUND)
		return rs_error(EINVAL);
	if (rdma_listen(s->id, backlog))
		return -1;
	s->state = RS_LISTENING;
	return 0;
}

static void fail(struct rsock *s, int err)
{
	s->state = RS_FAILED;
	s->error = err ? err : ECONNABORTED;
}

static void resolve_address(struct rsock *s)
{
	s->state = RS_RESOLVING;
	s->tries++;
	if (rdma_resolve_addr(s->id, NULL, &s->peer.sa, RS_RESOLVE_MS))
		fail(s, errno);
}

static void resolve_route(struct rsock *s)
{
	int rc;

	s->tries = 1;
	if (s->route) /* RDMA_ROUTE: is as good as resolved, and an event says so */
		rc = rdma_set_option(s->id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, s->route, s->route_len);
	else
		rc = rdma_resolve_route(s->id, RS_RESOLVE_MS);
	if (rc)
		fail(s, errno);
}

static void request(struct rsock *s)
{
	struct rdma_conn_param param = {.flow_control = 1, .retry_count = 7, .rnr_retry_count = 7};
	struct rs_hello hello;

	if (rs_make_endpoint(s)) {
		fail(s, errno);
		return;
	}
	rs_write_hello(s, &hello);
	param.private_data = &hello;
	param.private_data_len = sizeof(hello);
	s->state = RS_CONNECTING;
	if (rdma_connect(s->id, &param))
		fail(s, errno);
}

static void established(struct rsock *s, const struct rdma_cm_event *ev)
{
	struct rs_hello hello;

	if (s->state == RS_ACCEPTING) {
		s->state = RS_CONNECTED;
		return;
	}
	if (s->state != RS_CONNECTING)
		return;
	if (!ev->param.conn.private_data || ev->param.conn.private_data_len < sizeof(hello)) {
		fail(s, ENOTSUP); /* not rsockets */
		return;
	}
	memcpy(&hello, ev->param.conn.private_data, sizeof(hello));
	if (rs_read_hello(s, &hello))
		fail(s, errno);
	else
		s->state = RS_CONNECTED;
}

static int reason(const struct rdma_cm_event *ev)
{
	if (ev->event == RDMA_CM_EVENT_REJECTED)
		return ECONNREFUSED;
	if (ev->status < 0)
		return -ev->status;
	switch (ev->event) {
	case RDMA_CM_EVENT_ADDR_ERROR:
		return EHOSTUNREACH;
	case RDMA_CM_EVENT_ROUTE_ERROR:
		return ENETUNREACH;
	case RDMA_CM_EVENT_UNREACHABLE:
		return ETIMEDOUT;
	default:
		return ECONNABORTED;
	}
}

static void failed(struct rsock *s, const struct rdma_cm_event *ev)
{
	int err = reason(ev);

	if (s->state == RS_RESOLVING && err == ETIMEDOUT && s->tries < RS_RESOLVE_TRIES) {
		if (ev->event == RDMA_CM_EVENT_ADDR_ERROR)
			resolve_address(s);
		else if (s->tries++, rdma_resolve_route(s->id, RS_RESOLVE_MS))
			fail(s, errno);
		return;
	}
	if (s->state == RS_ACCEPTING)
		rs_break(s, ECONNRESET);
	else if (s->state == RS_RESOLVING || s->state == RS_CONNECTING)
		fail(s, err);
}

/* disconnected: the peer's side is gone. What it wrote before is there to be read. */
static void disconnected(struct rsock *s)
{
	if (s->state == RS_CONNECTING)
		fail(s, ECONNRESET);
	if (s->state != RS_CONNECTED && s->state != RS_ACCEPTING)
		return;
	rs_progress(s);
	if (s->state == RS_CONNECTED || s->state == RS_ACCEPTING) {
		/* It did not take its leave: it was killed, or has broken off. */
		rs_break(s, ECONNRESET);
		s->peer_shut = true;
	}
}

/* take acts on a copy of an event; the event itself has been acknowledged. */
static void take(struct rsock *s, const struct rdma_cm_event *ev)
{
	switch (ev->event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		if (s->state == RS_RESOLVING)
			resolve_route(s);
		break;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		if (s->state == RS_RESOLVING)
			request(s);
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		established(s, ev);
		break;
	case RDMA_CM_EVENT_ADDR_ERROR:
	case RDMA_CM_EVENT_ROUTE_ERROR:
	case RDMA_CM_EVENT_CONNECT_ERROR:
	case RDMA_CM_EVENT_UNREACHABLE:
	case RDMA_CM_EVENT_REJECTED:
		failed(s, ev);
		break;
	case RDMA_CM_EVENT_DISCONNECTED:
		disconnected(s);
		break;
	case RDMA_CM_EVENT_DEVICE_REMOVAL:
		if (s->state == RS_RESOLVING || s->state == RS_CONNECTING)
			fail(s, ENODEV);
		else
			rs_break(s, ENODEV);
		break;
	default:
		break;
	}
}

/* next_event gives a copy of the next event with its private data, acknowledged; -1 with
 * EAGAIN if there is none. */
static int next_event(struct rsock *s, struct rdma_cm_event *copy, uint8_t *data, size_t room)
{
	struct rdma_cm_event *ev;
	size_t len;

	if (rdma_get_cm_event(s->channel, &ev))
		return -1;
	*copy = *ev;
	len = ev->param.conn.private_data_len < room ? ev->param.conn.private_data_len : room;
	if (ev->param.conn.private_data && len)
		memcpy(data, ev->param.conn.private_data, len);
	copy->param.conn.private_data = ev->param.conn.private_data ? data : NULL;
	copy->param.conn.private_data_len = len;
	rdma_ack_cm_event(ev);
	return 0;
}

/* rs_handle_events takes in all events there are. */
void rs_handle_events(struct rsock *s)
{
	struct rdma_cm_event ev;
	uint8_t data[UINT8_MAX];
	enum rs_state before = s->state;

	while (s->channel && !next_event(s, &ev, data, sizeof(data)))
		take(s, &ev);
	if (s->state != before) {
		s->idle = 0;
		rs_rouse(s);
		if (s->state == RS_CONNECTED) {
			rs_give_credits(s);
			rs_serve(s);
		}
	}
}

/* rs_settled says whether connecting has come to an end. */
bool rs_settled(struct rsock *s)
{
	return s->closed || (s->state != RS_RESOLVING && s->state != RS_CONNECTING);
}

/* rs_connect_stream begins to connect. The outcome shows when rs_settled. */
int rs_connect_stream(struct rsock *s, const struct sockaddr *addr)
{
	switch (s->state) {
	case RS_IDLE:
		if (set_options(s))
			return -1;
		break;
	case RS_BOUND:
		break;
	case RS_RESOLVING:
	case RS_CONNECTING:
		return rs_error(EALREADY);
	case RS_LISTENING:
		return rs_error(EOPNOTSUPP);
	case RS_FAILED:
		return rs_error(ECONNABORTED);
	default:
		return rs_error(EISCONN);
	}
	memcpy(&s->peer, addr, rs_addrlen(addr));
	s->tries = 0;
	resolve_address(s);
	return 0;
}

/* accept_id makes a socket of a connection that was asked for. NULL: it is refused. */
static struct rsock *accept_id(struct rsock *l, struct rdma_cm_id *id, const struct rdma_cm_event *ev)
{
	struct rdma_conn_param param = {.flow_control = 1, .retry_count = 7, .rnr_retry_count = 7};
	struct rs_hello hello;
	struct rsock *s = NULL;

	if (!ev->param.conn.private_data || ev->param.conn.private_data_len < sizeof(hello))
		goto refuse;
	memcpy(&hello, ev->param.conn.private_data, sizeof(hello));
	if (hello.version != RS_VERSION)
		goto refuse;
	s = rs_new(l, l->domain, SOCK_STREAM);
	if (!s)
		goto refuse;
	s->channel = rdma_create_event_channel();
	if (!s->channel || rdma_migrate_id(id, s->channel))
		goto refuse;
	s->id = id;
	id->context = s;
	if (rs_make_endpoint(s) || rs_read_hello(s, &hello))
		goto refuse;
	rs_write_hello(s, &hello);
	param.responder_resources = ev->param.conn.responder_resources;
	param.initiator_depth = ev->param.conn.initiator_depth;
	param.private_data = &hello;
	param.private_data_len = sizeof(hello);
	if (rs_enter(s) < 0)
		goto refuse;
	s->state = RS_ACCEPTING;
	if (rdma_accept(id, &param)) {
		rs_leave(s);
		s->state = RS_FAILED;
		rs_put(s);
		return NULL;
	}
	return s;

refuse:
	rdma_reject(id, NULL, 0);
	if (!s || !s->id)
		rdma_destroy_id(id);
	if (s)
		rs_put(s);
	return NULL;
}

/* rs_accept_stream gives the next connection. EAGAIN if there is none. Called with the
 * lock of the listening socket. */
struct rsock *rs_accept_stream(struct rsock *l)
{
	struct rdma_cm_event ev;
	uint8_t data[UINT8_MAX];
	struct rsock *s;

	while (!next_event(l, &ev, data, sizeof(data))) {
		if (ev.event == RDMA_CM_EVENT_DEVICE_REMOVAL && ev.id == l->id) {
			rs_break(l, ENODEV);
			errno = ENODEV;
			return NULL;
		}
		if (ev.event != RDMA_CM_EVENT_CONNECT_REQUEST)
			continue; /* of a connection that nobody has accepted yet: accepting it fails */
		s = accept_id(l, ev.id, &ev);
		if (s)
			return s;
	}
	return NULL;
}
