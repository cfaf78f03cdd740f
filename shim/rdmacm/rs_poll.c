/* SPDX-License-Identifier: Apache-2.0
 *
 * rpoll and rselect, over sockets of ours and other descriptors. All that a call waits for is
 * one list for poll(2): for one of ours, what rs_watch says. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

#include "rs.h"

/* What a call knows of one entry. */
struct entry {
	struct rsock *s; /* NULL: an ordinary descriptor */
	unsigned epoch;
	int at, n;       /* where it is in the list */
};

static bool listening_ready(const struct rsock *s)
{
	struct pollfd p = {.fd = s->channel->fd, .events = POLLIN};

	return poll(&p, 1, 0) > 0;
}

/* rs_revents says what is true of a socket, of events and of what is always told. Called with
 * its lock, after progress. */
short rs_revents(struct rsock *s, short events)
{
	short in = events & (POLLIN | POLLRDNORM), out = events & (POLLOUT | POLLWRNORM), r = 0;

	if (s->closed)
		return POLLNVAL;
	if (s->type == SOCK_DGRAM)
		return rs_revents_dgram(s, events);
	switch (s->state) {
	case RS_IDLE:
	case RS_BOUND:
		return out | POLLHUP; /* as TCP's */
	case RS_LISTENING:
		return listening_ready(s) ? in : 0;
	case RS_RESOLVING:
	case RS_CONNECTING:
	case RS_ACCEPTING:
		return 0;
	case RS_FAILED:
	case RS_BROKEN:
		r = in | out | POLLHUP;
		break;
	case RS_OVER: /* those who stop at POLLHUP are to read what is left first */
		r = in | out | (s->r_unread ? 0 : POLLHUP);
		break;
	case RS_CONNECTED:
		if (rs_may_read(s))
			r |= in;
		if (rs_writable(s) || s->write_shut)
			r |= out;
		if ((s->peer_shut || s->read_shut) && events & POLLRDHUP)
			r |= POLLRDHUP;
		break;
	}
	if (s->error)
		r |= POLLERR;
	if (s->state != RS_CONNECTED && events & POLLRDHUP)
		r |= POLLRDHUP;
	return r;
}

/* look fills in revents of ours, and gives how many have any. */
static int look(struct pollfd *fds, struct entry *e, nfds_t n)
{
	int found = 0;

	for (nfds_t i = 0; i < n; i++) {
		fds[i].revents = 0;
		if (!e[i].s)
			continue;
		pthread_mutex_lock(&e[i].s->lock);
		rs_progress(e[i].s);
		fds[i].revents = rs_revents(e[i].s, fds[i].events);
		pthread_mutex_unlock(&e[i].s->lock);
		if (fds[i].revents)
			found++;
	}
	return found;
}

/* others polls for ordinary descriptors, without waiting. */
static int others(struct pollfd *fds, const struct entry *e, nfds_t n, struct pollfd *list)
{
	int found = 0, count = 0, got;

	for (nfds_t i = 0; i < n; i++)
		if (!e[i].s)
			list[count++] = fds[i];
	if (!count)
		return 0;
	got = poll(list, count, 0);
	if (got <= 0)
		return got;
	count = 0;
	for (nfds_t i = 0; i < n; i++) {
		if (e[i].s)
			continue;
		fds[i].revents = list[count++].revents;
		if (fds[i].revents)
			found++;
	}
	return found;
}

/* sleep_for sleeps until something happens to any of them, or the deadline. -1 with EINTR. */
static int sleep_for(struct pollfd *fds, struct entry *e, nfds_t n, struct pollfd *list, const struct timespec *end)
{
	struct timespec now, left = {0}, longest;
	int64_t cap = rs_configuration()->wake_up_ms * 1000000ll;
	int count = 0, got, err;
	bool ready = false;

	for (nfds_t i = 0; i < n; i++) {
		struct rsock *s = e[i].s;

		e[i].at = count;
		if (!s) {
			list[count++] = fds[i];
			continue;
		}
		pthread_mutex_lock(&s->lock);
		e[i].n = rs_watch(s, &list[count], &e[i].epoch);
		rs_progress(s); /* what came before the completion queue was armed */
		ready |= rs_revents(s, fds[i].events) != 0;
		pthread_mutex_unlock(&s->lock);
		count += e[i].n;
	}
	now = rs_now();
	longest = rs_after(&now, cap);
	if (!end || rs_later(end, &longest))
		end = &longest;
	if (!ready && rs_later(end, &now)) {
		left.tv_sec = end->tv_sec - now.tv_sec;
		left.tv_nsec = end->tv_nsec - now.tv_nsec;
		if (left.tv_nsec < 0) {
			left.tv_sec--;
			left.tv_nsec += 1000000000;
		}
	}
	got = ppoll(list, count, &left, NULL);
	err = errno;
	for (nfds_t i = 0; i < n; i++) {
		if (!e[i].s)
			continue;
		pthread_mutex_lock(&e[i].s->lock);
		rs_unwatch(e[i].s, &list[e[i].at], got < 0 ? 0 : e[i].n, e[i].epoch);
		pthread_mutex_unlock(&e[i].s->lock);
	}
	return got < 0 ? rs_error(err) : 0;
}

static int poll_all(struct pollfd *fds, struct entry *e, nfds_t n, struct pollfd *list, const struct timespec *end)
{
	struct timespec now = rs_now(), spin = rs_after(&now, rs_configuration()->polling_us * 1000ll);
	int found, more;
	bool spun = false;

	for (;;) {
		found = look(fds, e, n);
		if (found || !spun) {
			more = others(fds, e, n, list);
			if (more < 0)
				return -1;
			found += more;
			spun = true;
		}
		now = rs_now();
		if (found || (end && !rs_later(end, &now)))
			return found;
		if (rs_later(&spin, &now))
			continue;
		if (sleep_for(fds, e, n, list, end))
			return -1;
		spun = false;
	}
}

/* poll_until is rpoll with a deadline, NULL for none. */
static int poll_until(struct pollfd *fds, nfds_t n, const struct timespec *end)
{
	struct entry *e = calloc(n + 1, sizeof(*e));
	struct pollfd *list = calloc(3 * n + 1, sizeof(*list));
	int found = -1;

	if (e && list) {
		for (nfds_t i = 0; i < n; i++)
			e[i].s = rs_find(fds[i].fd);
		found = poll_all(fds, e, n, list, end);
		for (nfds_t i = 0; i < n; i++)
			if (e[i].s)
				rs_put(e[i].s);
	}
	free(e);
	free(list);
	return found;
}

int rpoll(struct pollfd *fds, nfds_t nfds, int timeout)
{
	struct timespec now = rs_now(), end = rs_after(&now, timeout * 1000000ll);

	return poll_until(fds, nfds, timeout < 0 ? NULL : &end);
}

/* wanted turns the sets into a list for poll. */
static int wanted(int nfds, const fd_set *r, const fd_set *w, const fd_set *x, struct pollfd *fds)
{
	int n = 0;

	for (int fd = 0; fd < nfds; fd++) {
		short events = 0;

		if (r && FD_ISSET(fd, r))
			events |= POLLIN;
		if (w && FD_ISSET(fd, w))
			events |= POLLOUT;
		if (x && FD_ISSET(fd, x))
			events |= POLLPRI;
		if (events)
			fds[n++] = (struct pollfd){.fd = fd, .events = events};
	}
	return n;
}

int rselect(int nfds, fd_set *readfds, fd_set *writefds, fd_set *exceptfds, struct timeval *timeout)
{
	struct timespec now = rs_now(), end;
	struct pollfd fds[FD_SETSIZE];
	int n, count = 0;

	if (nfds < 0 || nfds > FD_SETSIZE || (timeout && (timeout->tv_sec < 0 || timeout->tv_usec < 0)))
		return rs_error(EINVAL);
	if (timeout) {
		end = rs_after(&now, timeout->tv_usec * 1000ll);
		end.tv_sec += timeout->tv_sec;
	}
	n = wanted(nfds, readfds, writefds, exceptfds, fds);
	if (poll_until(fds, n, timeout ? &end : NULL) < 0)
		return -1;
	for (int i = 0; i < n; i++)
		if (fds[i].revents & POLLNVAL)
			return rs_error(EBADF);
	if (readfds)
		FD_ZERO(readfds);
	if (writefds)
		FD_ZERO(writefds);
	if (exceptfds)
		FD_ZERO(exceptfds);
	/* As select(2) has it: an end of file or an error is readable, an error writable. */
	for (int i = 0; i < n; i++) {
		if (readfds && fds[i].events & POLLIN && fds[i].revents & (POLLIN | POLLHUP | POLLERR)) {
			FD_SET(fds[i].fd, readfds);
			count++;
		}
		if (writefds && fds[i].events & POLLOUT && fds[i].revents & (POLLOUT | POLLERR)) {
			FD_SET(fds[i].fd, writefds);
			count++;
		}
		if (exceptfds && fds[i].events & POLLPRI && fds[i].revents & POLLPRI) {
			FD_SET(fds[i].fd, exceptfds);
			count++;
		}
	}
	return count;
}
