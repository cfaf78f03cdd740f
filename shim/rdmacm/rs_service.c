/* SPDX-License-Identifier: Apache-2.0
 *
 * What goes on while nobody calls: connecting without waiting, and keepalives. A thread does
 * it, which is begun with the first socket that needs it.
 *
 * A keepalive is a control message after some time (TCP_KEEPIDLE). The answer to it is the
 * acknowledgement: a peer that is gone gives none, and after the queue pair's retries, which
 * take the place of TCP_KEEPINTVL and TCP_KEEPCNT, the connection is broken. */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "rs.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct rsock *served; /* linked by serve_next; each is in the table */
static int bell = -1;        /* the list has changed */
static bool running;

static void ring(void)
{
	uint64_t one = 1;

	if (write(bell, &one, sizeof(one)) < 0)
		return; /* full: it is readable */
}

static void unlink_served(struct rsock *s)
{
	for (struct rsock **p = &served; *p; p = &(*p)->serve_next)
		if (*p == s) {
			*p = s->serve_next;
			return;
		}
}

/* attend does what a socket needs now. */
static void attend(struct rsock *s, const struct timespec *now)
{
	pthread_mutex_lock(&s->lock);
	if (!rs_settled(s))
		rs_handle_events(s);
	if (s->serve_keep && !rs_later(&s->keep_due, now)) {
		rs_progress(s);
		if (s->state == RS_CONNECTED && !s->farewell)
			rs_send_ctrl(s, RS_CTRL_KEEPALIVE);
		s->keep_due = rs_after(now, s->keep_idle * 1000000000ll);
	}
	rs_serve(s);
	pthread_mutex_unlock(&s->lock);
}

/* What the thread looks at in one round. */
struct round {
	struct rsock **s;
	struct pollfd *p; /* the bell first */
	int n, room;
	bool timed;
	struct timespec next;
};

/* collect fills in a round, with a reference to each socket. Called with the lock. */
static void collect(struct round *r)
{
	int n = 0;

	for (struct rsock *s = served; s; s = s->serve_next)
		n++;
	if (n > r->room) {
		void *a = realloc(r->s, n * sizeof(*r->s));

		if (a)
			r->s = a;
		void *b = realloc(r->p, (n + 1) * sizeof(*r->p));

		if (b)
			r->p = b;
		if (a && b)
			r->room = n; /* else some wait for the next round */
	}
	r->n = 0;
	r->timed = false;
	for (struct rsock *s = served; s && r->n < r->room; s = s->serve_next) {
		if (s->serve_keep && (!r->timed || rs_later(&r->next, &s->keep_due))) {
			r->timed = true;
			r->next = s->keep_due;
		}
		__atomic_add_fetch(&s->refs, 1, __ATOMIC_RELAXED); /* it has one as long as it is in the list */
		r->s[r->n++] = s;
		r->p[r->n] = (struct pollfd){.fd = s->serve_connect ? s->channel->fd : -1, .events = POLLIN};
	}
}

static void *serve(void *arg)
{
	struct round r = {.p = arg};
	struct timespec now, left;
	uint64_t count;

	for (;;) {
		pthread_mutex_lock(&lock);
		collect(&r);
		pthread_mutex_unlock(&lock);
		r.p[0] = (struct pollfd){.fd = bell, .events = POLLIN};
		now = rs_now();
		left = (struct timespec){0};
		if (r.timed && rs_later(&r.next, &now))
			left = rs_after(&(struct timespec){r.next.tv_sec - now.tv_sec - 1, r.next.tv_nsec}, 1000000000ll - now.tv_nsec);
		if (ppoll(r.p, r.n + 1, r.timed ? &left : NULL, NULL) > 0 && r.p[0].revents && read(bell, &count, sizeof(count)) < 0)
			count = 0;
		now = rs_now();
		for (int i = 0; i < r.n; i++) {
			attend(r.s[i], &now);
			rs_put(r.s[i]);
		}
	}
	return NULL;
}

/* start begins the thread, with all signals blocked: they are the program's. Called with
 * the lock. Without a thread, calls make the progress that they make. */
static void start(void)
{
	struct pollfd *first = calloc(1, sizeof(*first));
	sigset_t all, old;
	pthread_t t;

	if (bell < 0)
		bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (bell < 0 || !first) {
		free(first);
		return;
	}
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	running = !pthread_create(&t, NULL, serve, first);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (running)
		pthread_detach(t);
	else
		free(first);
}

/* rs_serve has the thread look after the socket if that is needed, and no more if it is not.
 * Called with the socket's lock. */
void rs_serve(struct rsock *s)
{
	bool connecting = !rs_settled(s), keep = s->keepalive && s->state == RS_CONNECTED && !s->closed;
	struct timespec now = rs_now();

	if (s->type != SOCK_STREAM || (connecting == s->serve_connect && keep == s->serve_keep))
		return;
	pthread_mutex_lock(&lock);
	if (s->serve_connect || s->serve_keep)
		unlink_served(s);
	if (keep && !s->serve_keep)
		s->keep_due = rs_after(&now, s->keep_idle * 1000000000ll);
	s->serve_connect = connecting;
	s->serve_keep = keep;
	if (connecting || keep) {
		s->serve_next = served;
		served = s;
		if (!running)
			start();
	}
	if (bell >= 0)
		ring();
	pthread_mutex_unlock(&lock);
}

/* rs_unserve: the socket is being closed. */
void rs_unserve(struct rsock *s)
{
	pthread_mutex_lock(&lock);
	if (s->serve_connect || s->serve_keep)
		unlink_served(s);
	s->serve_connect = s->serve_keep = false;
	pthread_mutex_unlock(&lock);
}
