/* SPDX-License-Identifier: Apache-2.0
 *
 * Bytes in and out of streams: from the caller's buffers into the ring that is sent from, and
 * out of the ring that the peer writes to. */
#define _GNU_SOURCE
#include <limits.h>
#include <string.h>

#include "rs.h"

/* A place in a list of buffers. */
struct cursor {
	const struct iovec *iov;
	int n;
	size_t off;
};

static void gather(struct cursor *c, uint8_t *to, size_t len)
{
	while (len) {
		size_t part = c->iov->iov_len - c->off;

		if (part > len)
			part = len;
		if (part)
			memcpy(to, (const uint8_t *)c->iov->iov_base + c->off, part);
		to += part;
		len -= part;
		c->off += part;
		if (c->off == c->iov->iov_len) {
			c->iov++;
			c->off = 0;
		}
	}
}

static void scatter(struct cursor *c, const uint8_t *from, size_t len)
{
	while (len) {
		size_t part = c->iov->iov_len - c->off;

		if (part > len)
			part = len;
		if (part)
			memcpy((uint8_t *)c->iov->iov_base + c->off, from, part);
		from += part;
		len -= part;
		c->off += part;
		if (c->off == c->iov->iov_len) {
			c->iov++;
			c->off = 0;
		}
	}
}

/* total sums the lengths up. -1 with EINVAL if that is more than a call can answer. */
static ssize_t total(const struct iovec *iov, int n)
{
	size_t sum = 0;

	if (n < 0 || n > IOV_MAX)
		return rs_error(EINVAL);
	for (int i = 0; i < n; i++) {
		if (iov[i].iov_len > SSIZE_MAX - sum)
			return rs_error(EINVAL);
		sum += iov[i].iov_len;
	}
	return sum;
}

/* take_error gives what SO_ERROR would, once. */
static int take_error(struct rsock *s)
{
	int err = s->error;

	s->error = 0;
	return err;
}

/* why_not_write says why a socket that may not be waited for cannot be written to. */
static int why_not_write(struct rsock *s)
{
	int err;

	if (s->closed)
		return EBADF;
	if (s->write_shut)
		return EPIPE;
	if (s->state < RS_RESOLVING)
		return ENOTCONN;
	err = take_error(s);
	if (err)
		return err;
	return s->state == RS_OVER ? ECONNRESET : EPIPE;
}

static int why_not_read(struct rsock *s)
{
	if (s->closed)
		return EBADF;
	if (s->state < RS_RESOLVING)
		return ENOTCONN;
	return take_error(s); /* 0: the end */
}

/* lock_for takes the lock of readers or writers. One who must not wait does not. */
static int lock_for(pthread_mutex_t *m, bool nonblock)
{
	if (!nonblock)
		return pthread_mutex_lock(m);
	return pthread_mutex_trylock(m) ? rs_error(EAGAIN) : 0;
}

/* rs_copy_out puts len bytes into the ring and gives what to send, in one piece or two. */
static int ring_in(struct rsock *s, struct cursor *c, uint32_t len, struct ibv_sge *sge)
{
	uint32_t first = s->sbuf_size - s->s_head;

	if (first > len)
		first = len;
	gather(c, s->sbuf + s->s_head, first);
	sge[0] = (struct ibv_sge){(uintptr_t)s->sbuf + s->s_head, first, s->smr->lkey};
	s->s_head = (s->s_head + first) % s->sbuf_size;
	if (first == len)
		return 1;
	gather(c, s->sbuf, len - first);
	sge[1] = (struct ibv_sge){(uintptr_t)s->sbuf, len - first, s->smr->lkey};
	s->s_head = len - first;
	return 2;
}

/* rs_send_bytes sends len bytes to addr, as much as there is room for: by a write with a
 * message if message says which kind, else by a bare one. Returns how many, or -1. */
static ssize_t send_some(struct rsock *s, struct cursor *c, size_t len, uint64_t addr, uint32_t key, bool message)
{
	struct ibv_sge sge[2];
	int n;

	if (len > RS_MAX_CHUNK)
		len = RS_MAX_CHUNK;
	if (len > s->s_free)
		len = s->s_free;
	n = ring_in(s, c, len, sge);
	s->s_free -= len;
	s->sq_free--;
	if (rs_post(s, rs_message(RS_OP_DATA, len), message, sge, n, addr, key, RS_WR_DATA | len, len <= s->inline_size))
		return -1;
	return len;
}

static ssize_t send_locked(struct rsock *s, struct cursor *c, size_t len, bool nonblock)
{
	size_t left = len;
	ssize_t n;

	while (left) {
		if (rs_wait(s, rs_may_write, nonblock, &s->sndtimeo))
			break;
		if (!rs_writable(s)) {
			errno = why_not_write(s);
			break;
		}
		if (s->iomap_untold && rs_tell_iomap(s, nonblock))
			break;
		if (!rs_writable(s))
			continue; /* what was told took the room */
		n = left < s->target.length ? left : s->target.length;
		s->s_seq++;
		n = send_some(s, c, n, s->target.addr, s->target.key, true);
		if (n < 0)
			break;
		s->target.addr += n;
		s->target.length -= n;
		left -= n;
	}
	return left == len && len ? -1 : (ssize_t)(len - left);
}

/* rs_send_stream sends all of it if it may wait, else as much as there is room for. */
ssize_t rs_send_stream(struct rsock *s, const struct iovec *iov, int n, int flags)
{
	struct cursor c = {iov, n, 0};
	bool nonblock = s->nonblock || flags & MSG_DONTWAIT;
	ssize_t len = total(iov, n), sent;

	if (len < 0)
		return -1;
	if (flags & MSG_OOB)
		return rs_error(EOPNOTSUPP);
	if (lock_for(&s->writing, nonblock))
		return -1;
	pthread_mutex_lock(&s->lock);
	sent = send_locked(s, &c, len, nonblock);
	pthread_mutex_unlock(&s->lock);
	pthread_mutex_unlock(&s->writing);
	return sent;
}

/* rs_send_direct writes to where the peer's iomap says, as far as that region goes; for
 * riowrite. Credits do not matter, as there is no message. */
ssize_t rs_send_direct(struct rsock *s, const void *buf, size_t count, uint64_t offset, int flags)
{
	struct iovec iov = {(void *)buf, count};
	struct cursor c = {&iov, 1, 0};
	bool nonblock = s->nonblock || flags & MSG_DONTWAIT;
	struct rs_mapping m;
	size_t left = count, len;
	ssize_t n;
	int failed = 0;

	if (lock_for(&s->writing, nonblock))
		return -1;
	pthread_mutex_lock(&s->lock);
	if (s->state == RS_RESOLVING || s->state == RS_CONNECTING || s->state == RS_ACCEPTING || s->iomap_untold) {
		failed = rs_wait(s, rs_may_write, nonblock, &s->sndtimeo);
		if (!failed && s->iomap_untold && rs_writable(s))
			failed = rs_tell_iomap(s, nonblock);
	}
	while (!failed && left) {
		failed = rs_wait(s, rs_may_write_direct, nonblock, &s->sndtimeo);
		if (failed)
			break;
		if (s->state != RS_CONNECTED || s->write_shut || s->closed) {
			errno = why_not_write(s);
			failed = -1;
			break;
		}
		if (!rs_find_mapping(s, offset, &m))
			break;
		len = m.offset + m.place.length - offset;
		n = send_some(s, &c, left < len ? left : len, m.place.addr + (offset - m.offset), m.place.key, false);
		if (n < 0) {
			failed = -1;
			break;
		}
		left -= n;
		offset += n;
	}
	pthread_mutex_unlock(&s->lock);
	pthread_mutex_unlock(&s->writing);
	return failed && left == count ? -1 : (ssize_t)(count - left);
}

/* copy_out copies up to len bytes that have arrived. With peek they stay. */
static size_t copy_out(struct rsock *s, struct cursor *c, size_t len, bool peek)
{
	uint32_t head = s->r_head, n;
	size_t done;

	if (len > s->r_unread)
		len = s->r_unread;
	for (done = 0; done < len; done += n) {
		n = s->rbuf_size - head;
		if (n > len - done)
			n = len - done;
		scatter(c, s->rbuf + head, n);
		head = (head + n) % s->rbuf_size;
	}
	if (peek)
		return len;
	s->r_head = head;
	s->r_unread -= len;
	s->r_unpublished += len;
	/* A message of which all is read is a credit again. */
	for (done = len; done;) {
		uint32_t *m = &s->messages[s->m_head];

		n = *m < done ? *m : done;
		*m -= n;
		done -= n;
		if (*m)
			break;
		s->m_head = s->m_head == s->rq_size ? 0 : s->m_head + 1;
		s->r_seq++;
	}
	rs_give_credits(s);
	return len;
}

static ssize_t recv_locked(struct rsock *s, struct cursor *c, size_t len, int flags, bool nonblock)
{
	size_t got = 0;
	int err;

	do {
		if (rs_wait(s, rs_may_read, nonblock, &s->rcvtimeo))
			return got ? (ssize_t)got : -1;
		if (!s->r_unread) {
			if (got)
				return got;
			err = why_not_read(s);
			return err ? rs_error(err) : 0;
		}
		got += copy_out(s, c, len - got, flags & MSG_PEEK);
	} while (got < len && flags & MSG_WAITALL && !(flags & MSG_PEEK));
	return got;
}

/* rs_recv_stream waits for something to read if it may, and gives what is there. */
ssize_t rs_recv_stream(struct rsock *s, const struct iovec *iov, int n, int flags)
{
	struct cursor c = {iov, n, 0};
	bool nonblock = s->nonblock || flags & MSG_DONTWAIT;
	ssize_t len = total(iov, n), got;

	if (len < 0)
		return -1;
	if (flags & (MSG_OOB | MSG_ERRQUEUE))
		return rs_error(EOPNOTSUPP);
	if (lock_for(&s->reading, nonblock))
		return -1;
	pthread_mutex_lock(&s->lock);
	got = len ? recv_locked(s, &c, len, flags, nonblock) : 0;
	pthread_mutex_unlock(&s->lock);
	pthread_mutex_unlock(&s->reading);
	return got;
}
