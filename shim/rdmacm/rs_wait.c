/* SPDX-License-Identifier: Apache-2.0
 *
 * Waiting. Who sleeps for a socket watches three descriptors: the event channel, the
 * completion channel, and an eventfd. An event is taken by whoever comes first, and it may
 * not be what that one was waiting for; so who changes anything while others sleep says so
 * on the eventfd, and all of them look again. It is emptied by the last of those who slept
 * when it was written; who comes meanwhile does not get to sleep until then. */
#define _GNU_SOURCE
#include <poll.h>
#include <stdint.h>
#include <unistd.h>

#include "../verbs/restart.h"
#include "rs.h"

#define SECOND 1000000000ll

struct timespec rs_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t;
}

struct timespec rs_after(const struct timespec *t, int64_t ns)
{
	int64_t sum = t->tv_nsec + ns;

	return (struct timespec){t->tv_sec + sum / SECOND, sum % SECOND};
}

bool rs_later(const struct timespec *a, const struct timespec *b)
{
	return a->tv_sec != b->tv_sec ? a->tv_sec > b->tv_sec : a->tv_nsec > b->tv_nsec;
}

/* rs_rouse has those who sleep for the socket look again. Called with its lock. */
void rs_rouse(struct rsock *s)
{
	uint64_t one = 1;

	if (!s->sleepers)
		return;
	s->epoch++;
	s->stale = s->sleepers;
	if (write(s->wake, &one, sizeof(one)) < 0 && errno != EAGAIN) /* full: it is readable */
		rs_break(s, errno);
}

/* rs_watch fills p with what to poll for, and gives how many there are, 3 at most. Events of
 * completions are asked for; so the caller looks once more before it sleeps, with the lock
 * held, and calls rs_unwatch afterwards, with the epoch. */
int rs_watch(struct rsock *s, struct pollfd *p, unsigned *epoch)
{
	int n = 0;

	s->sleepers++;
	*epoch = s->epoch;
	p[n++] = (struct pollfd){.fd = s->wake, .events = POLLIN};
	if (s->channel)
		p[n++] = (struct pollfd){.fd = s->channel->fd, .events = POLLIN};
	if (s->events) {
		p[n++] = (struct pollfd){.fd = s->events->fd, .events = POLLIN};
		if (!s->armed && !ibv_req_notify_cq(s->cq, 0))
			s->armed = true;
	}
	return n;
}

/* rs_unwatch takes in what poll said of rs_watch's descriptors. */
void rs_unwatch(struct rsock *s, const struct pollfd *p, int n, unsigned epoch)
{
	struct ibv_cq *cq;
	uint64_t count;
	void *context;
	bool took = false;

	s->sleepers--;
	if (epoch != s->epoch && s->stale && !--s->stale && read(s->wake, &count, sizeof(count)) < 0 && errno != EAGAIN)
		rs_break(s, errno);
	for (int i = 0; i < n; i++) {
		if (!p[i].revents)
			continue;
		if (s->events && p[i].fd == s->events->fd) {
			if (!ibv_get_cq_event(s->events, &cq, &context)) {
				s->unacked++;
				s->armed = false;
				took = true;
			}
		} else if (s->channel && p[i].fd == s->channel->fd) {
			if (s->state != RS_LISTENING) {
				rs_handle_events(s);
				took = true;
			}
		}
	}
	if (took)
		rs_rouse(s);
}

/* rs_sleep waits until something has happened to the socket, or until the deadline (NULL:
 * none). Called with its lock, which it gives up meanwhile; looks are the caller's. Gives
 * ETIMEDOUT as errno, and EINTR where a blocking recv(2) would: with a timeout always (signal(7)). */
int rs_sleep(struct rsock *s, const struct timespec *deadline)
{
	struct timespec now, left, *timeout = NULL;
	struct pollfd p[3];
	unsigned epoch;
	int n, got, err = 0;

	if (deadline) {
		now = rs_now();
		if (!rs_later(deadline, &now))
			return rs_error(ETIMEDOUT);
		left.tv_sec = deadline->tv_sec - now.tv_sec;
		left.tv_nsec = deadline->tv_nsec - now.tv_nsec;
		if (left.tv_nsec < 0) {
			left.tv_sec--;
			left.tv_nsec += SECOND;
		}
		timeout = &left;
	}
	n = rs_watch(s, p, &epoch);
	rs_progress(s);
	if (s->idle) { /* nothing came between the last look and arming */
		pthread_mutex_unlock(&s->lock);
		got = ppoll(p, n, timeout, NULL);
		err = errno;
		if (got < 0 && err == EINTR && !deadline && tv_restarted())
			got = 0; /* it will be looked what there is */
		pthread_mutex_lock(&s->lock);
	} else {
		got = 0;
		for (int i = 0; i < n; i++)
			p[i].revents = 0;
	}
	rs_unwatch(s, p, got < 0 ? 0 : n, epoch);
	return got < 0 ? rs_error(err) : 0;
}

/* rs_wait makes progress until ready says so. It tries for as long as the configuration
 * says (polling_time) before it sleeps. Called with the lock; gives EAGAIN when it must not
 * sleep, or may no longer, and EINTR. */
int rs_wait(struct rsock *s, bool (*ready)(struct rsock *), bool nonblock, const struct timespec *timeout)
{
	struct timespec start = {0}, now, spin, end;
	bool sleeping = false;

	for (;;) {
		rs_progress(s);
		if (ready(s))
			return 0;
		if (nonblock)
			return rs_error(EAGAIN);
		now = rs_now();
		if (!start.tv_sec && !start.tv_nsec) {
			start = now;
			spin = rs_after(&start, rs_configuration()->polling_us * 1000ll);
			if (timeout && (timeout->tv_sec || timeout->tv_nsec)) {
				end = rs_after(&start, timeout->tv_nsec);
				end.tv_sec += timeout->tv_sec;
			} else {
				timeout = NULL;
			}
		}
		if (!sleeping && !rs_later(&now, &spin)) {
			pthread_mutex_unlock(&s->lock); /* others want to look, too */
			pthread_mutex_lock(&s->lock);
			continue;
		}
		sleeping = true;
		if (rs_sleep(s, timeout ? &end : NULL))
			return errno == ETIMEDOUT ? rs_error(EAGAIN) : -1;
	}
}
