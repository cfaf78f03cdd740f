/* SPDX-License-Identifier: Apache-2.0
 *
 * The end of a socket: rshutdown and rclose. What was written is with the peer when they
 * return, unless the peer is gone or has not taken anything for long. */
#include "rs.h"

/* drain waits until all that was sent is acknowledged, or for limit ns in which nothing was.
 * Called with the lock. */
static void drain(struct rsock *s, int64_t limit)
{
	struct timespec now = rs_now(), end = rs_after(&now, limit);
	uint32_t left = s->sq_free + s->ctrl_used;

	for (;;) {
		rs_progress(s);
		if (rs_all_sent(s))
			return;
		if (left != (uint32_t)s->sq_free + s->ctrl_used) {
			left = s->sq_free + s->ctrl_used;
			now = rs_now();
			end = rs_after(&now, limit);
		}
		if (rs_sleep(s, &end) && errno != EINTR)
			return;
	}
}

/* say sends a control message, and waits for room for it. */
static void say(struct rsock *s, enum rs_ctrl what, int64_t limit)
{
	struct timespec now = rs_now(), end = rs_after(&now, limit);

	while (s->state == RS_CONNECTED && rs_send_ctrl(s, what) && errno == EAGAIN) {
		if (rs_sleep(s, &end) && errno != EINTR)
			return;
		rs_progress(s);
	}
}

static void bid_farewell(struct rsock *s, int64_t limit)
{
	if (s->farewell)
		return;
	s->farewell = true; /* no more credits from now on */
	say(s, RS_CTRL_DISCONNECT, limit);
}

/* heard: what was accepted has been established, or never will be. */
static bool heard(struct rsock *s)
{
	return s->state != RS_ACCEPTING;
}

static int shut_stream(struct rsock *s, int how)
{
	rs_progress(s);
	if (s->state < RS_CONNECTED && s->state != RS_ACCEPTING)
		return rs_error(ENOTCONN);
	if (rs_wait(s, heard, false, NULL))
		return -1;
	if (how == SHUT_RD || how == SHUT_RDWR)
		s->read_shut = true;
	if (how == SHUT_WR || how == SHUT_RDWR) {
		bool first = !s->write_shut;

		s->write_shut = true;
		if (first && !s->read_shut && !s->peer_shut)
			say(s, RS_CTRL_SHUTDOWN, RS_LINGER_NS);
	}
	if (s->write_shut && (s->read_shut || s->peer_shut))
		bid_farewell(s, RS_LINGER_NS);
	rs_rouse(s);
	if (s->write_shut)
		drain(s, RS_LINGER_NS);
	return 0;
}

int rshutdown(int socket, int how)
{
	struct rsock *s = rs_get(socket);
	int rc;

	if (!s)
		return -1;
	pthread_mutex_lock(&s->lock);
	if (how != SHUT_RD && how != SHUT_WR && how != SHUT_RDWR) {
		rc = rs_error(EINVAL);
	} else if (s->type == SOCK_STREAM) {
		rc = shut_stream(s, how);
	} else {
		s->read_shut |= how != SHUT_WR;
		s->write_shut |= how != SHUT_RD;
		rs_rouse(s);
		rc = s->peer.sa.sa_family ? 0 : rs_error(ENOTCONN);
	}
	pthread_mutex_unlock(&s->lock);
	rs_put(s);
	return rc;
}

/* take_leave is what closing a stream says to the peer. With SO_LINGER and a time of 0 it is
 * nothing; with a longer one it waits no longer than that. */
static void take_leave(struct rsock *s)
{
	int64_t limit = RS_LINGER_NS;
	struct timespec longest;
	int rc;

	if (s->linger.l_onoff)
		limit = s->linger.l_linger * 1000000000ll;
	if (!limit)
		return;
	longest = (struct timespec){limit / 1000000000, 0};
	while ((rc = rs_wait(s, heard, false, &longest)) && errno == EINTR)
		;
	if (rc || s->state < RS_CONNECTED || s->state == RS_FAILED)
		return;
	bid_farewell(s, limit);
	drain(s, limit);
}

int rclose(int socket)
{
	struct rsock *s = rs_get(socket);

	if (!s)
		return -1;
	if (!rs_leave(s)) {
		rs_put(s);
		return rs_error(EBADF);
	}
	pthread_mutex_lock(&s->lock);
	s->closed = true;
	rs_unserve(s);
	rs_rouse(s); /* calls under way end with EBADF */
	if (s->type == SOCK_STREAM)
		take_leave(s);
	pthread_mutex_unlock(&s->lock);
	rs_put(s); /* the table's */
	rs_put(s);
	return 0;
}
