/* SPDX-License-Identifier: Apache-2.0
 *
 * Sockets by their numbers, and the defaults of /etc/rdma/rsocket. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "rs.h"

#define RS_CONFIG "/etc/rdma/rsocket/"
#define ROWS 1024
#define COLUMNS 1024

static pthread_rwlock_t table_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct rsock **table[ROWS];

static struct rs_config config = {
	.mem = 1 << 17,
	.wmem = 1 << 17,
	.polling_us = 10,
	.wake_up_ms = 5000,
	.sq_size = 384,
	.rq_size = 384,
	.inline_size = 64,
};

/* setting reads a file with one number in it. What is not there, or is no such number,
 * leaves the default. */
static uint32_t setting(const char *name, uint32_t otherwise, uint32_t max)
{
	char path[128], line[32], *end;
	unsigned long v;
	FILE *f;

	snprintf(path, sizeof(path), RS_CONFIG "%s", name);
	f = fopen(path, "re");
	if (!f)
		return otherwise;
	if (fgets(line, sizeof(line), f)) {
		errno = 0;
		v = strtoul(line, &end, 0);
		if (end != line && !errno)
			otherwise = v < max ? v : max;
	}
	fclose(f);
	return otherwise;
}

static void configure(void)
{
	uint32_t iomaps;

	config.polling_us = setting("polling_time", config.polling_us, UINT32_MAX);
	config.wake_up_ms = setting("wake_up_interval", config.wake_up_ms, INT32_MAX);
	config.inline_size = setting("inline_default", config.inline_size, UINT16_MAX);
	config.sq_size = setting("sqsize_default", config.sq_size, RS_MAX_QUEUE);
	config.rq_size = setting("rqsize_default", config.rq_size, RS_MAX_QUEUE);
	config.mem = setting("mem_default", config.mem, RS_VALUE_MASK);
	config.wmem = setting("wmem_default", config.wmem, RS_VALUE_MASK);
	iomaps = setting("iomap_size", 0, UINT16_MAX);
	config.iomap_size = rs_unscale(rs_scale(iomaps));
}

const struct rs_config *rs_configuration(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, configure);
	return &config;
}

/* rs_new makes a socket without a number. One that is accepted has the sizes and options of
 * the listening one. */
struct rsock *rs_new(const struct rsock *like, int domain, int type)
{
	const struct rs_config *c = rs_configuration();
	struct rsock *s = calloc(1, sizeof(*s));

	if (!s)
		return NULL;
	s->fd = -1;
	s->refs = 1;
	s->domain = domain;
	s->type = type;
	s->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (s->wake < 0) {
		free(s);
		return NULL;
	}
	pthread_mutex_init(&s->reading, NULL);
	pthread_mutex_init(&s->writing, NULL);
	pthread_mutex_init(&s->lock, NULL);
	if (like) {
		s->sbuf_size = like->sbuf_size;
		s->rbuf_size = like->rbuf_size;
		s->sq_size = like->sq_size;
		s->rq_size = like->rq_size;
		s->inline_size = like->inline_size;
		s->iomap_size = like->iomap_size;
		s->linger = like->linger;
		s->rcvtimeo = like->rcvtimeo;
		s->sndtimeo = like->sndtimeo;
		s->keepalive = like->keepalive;
		s->keep_idle = like->keep_idle;
		s->keep_interval = like->keep_interval;
		s->keep_count = like->keep_count;
		s->nodelay = like->nodelay;
		s->oobinline = like->oobinline;
		s->v6only = like->v6only;
		return s;
	}
	s->sbuf_size = c->wmem;
	s->rbuf_size = c->mem;
	s->sq_size = c->sq_size;
	s->rq_size = c->rq_size;
	s->inline_size = c->inline_size;
	s->iomap_size = c->iomap_size;
	s->keep_idle = 7200; /* tcp(7) */
	s->keep_interval = 75;
	s->keep_count = 9;
	return s;
}

/* rs_enter gives a socket the number of its event channel. Nobody else has that number as
 * long as the channel is open, which is until the socket is freed. */
int rs_enter(struct rsock *s)
{
	struct rsock ***row;
	int fd = s->channel->fd, err = 0;

	if (fcntl(fd, F_SETFL, O_NONBLOCK))
		return -1;
	if (fd / COLUMNS >= ROWS)
		return rs_error(EMFILE);
	pthread_rwlock_wrlock(&table_lock);
	row = &table[fd / COLUMNS];
	if (!*row)
		*row = calloc(COLUMNS, sizeof(**row));
	if (*row) {
		(*row)[fd % COLUMNS] = s;
		s->fd = fd;
	} else {
		err = ENOMEM;
	}
	pthread_rwlock_unlock(&table_lock);
	return err ? rs_error(err) : fd;
}

/* rs_find gives the socket with this number, or NULL: it is another descriptor. The caller
 * gives it back by rs_put. */
struct rsock *rs_find(int fd)
{
	struct rsock *s = NULL;

	if (fd < 0 || fd / COLUMNS >= ROWS)
		return NULL;
	pthread_rwlock_rdlock(&table_lock);
	if (table[fd / COLUMNS])
		s = table[fd / COLUMNS][fd % COLUMNS];
	if (s)
		__atomic_add_fetch(&s->refs, 1, __ATOMIC_RELAXED);
	pthread_rwlock_unlock(&table_lock);
	return s;
}

struct rsock *rs_get(int fd)
{
	struct rsock *s = rs_find(fd);

	if (!s)
		errno = EBADF;
	return s;
}

/* rs_leave takes the number away; only the first who does so closes the socket. */
bool rs_leave(struct rsock *s)
{
	bool mine;

	pthread_rwlock_wrlock(&table_lock);
	mine = table[s->fd / COLUMNS][s->fd % COLUMNS] == s;
	if (mine)
		table[s->fd / COLUMNS][s->fd % COLUMNS] = NULL;
	pthread_rwlock_unlock(&table_lock);
	return mine;
}

/* rs_put gives a reference back, and frees the socket with the last. errno stays. */
void rs_put(struct rsock *s)
{
	int err = errno;

	if (__atomic_sub_fetch(&s->refs, 1, __ATOMIC_ACQ_REL))
		return;
	if (s->type == SOCK_DGRAM)
		rs_free_dgram(s);
	else
		rs_free_endpoint(s);
	rs_free_cq(s);
	if (s->id)
		rdma_destroy_id(s->id);
	if (s->channel)
		rdma_destroy_event_channel(s->channel);
	close(s->wake);
	free(s->route);
	pthread_mutex_destroy(&s->reading);
	pthread_mutex_destroy(&s->writing);
	pthread_mutex_destroy(&s->lock);
	free(s);
	errno = err;
}
