/* SPDX-License-Identifier: Apache-2.0
 *
 * Direct placement (man rsocket): regions that the peer may write to at offsets. Whoever maps
 * one writes an entry into the peer's table, before the next bytes it sends; whoever writes
 * looks the offset up in its own table, which the peer fills. */
#include <byteswap.h>
#include <stdlib.h>
#include <string.h>

#include "rs.h"

/* rs_may_write_direct is rs_may_write for writes that need no credit. */
bool rs_may_write_direct(struct rsock *s)
{
	return (s->sq_free && s->s_free >= s->sbuf_size / 2) || s->closed || s->write_shut || s->state < RS_RESOLVING || s->state >= RS_FAILED;
}

/* rs_find_mapping copies the entry that has this offset. */
bool rs_find_mapping(struct rsock *s, uint64_t offset, struct rs_mapping *m)
{
	for (int i = 0; i < s->iomap_size; i++) {
		volatile struct rs_mapping *e = &s->iomap[i];

		m->offset = e->offset;
		m->place.addr = e->place.addr;
		m->place.key = e->place.key;
		m->place.length = e->place.length;
		if (offset >= m->offset && offset - m->offset < m->place.length)
			return true;
	}
	return false;
}

static struct rs_iomr *untold(struct rsock *s)
{
	struct rs_iomr *m;

	for (m = s->iomrs; m && !m->untold; m = m->next)
		;
	return m;
}

static void forget(struct rsock *s, struct rs_iomr *m)
{
	struct rs_iomr **p;

	for (p = &s->iomrs; *p != m; p = &(*p)->next)
		;
	*p = m->next;
	if (m->index >= 0)
		s->iomap_taken[m->index] = 0;
	free(m);
}

static void swap(struct rs_mapping *m)
{
	m->offset = bswap_64(m->offset);
	m->place.addr = bswap_64(m->place.addr);
	m->place.key = bswap_32(m->place.key);
	m->place.length = bswap_32(m->place.length);
}

/* rs_tell_iomap writes the entries that the peer does not have yet. An entry goes by way of
 * the ring, as data does, and takes a credit. */
int rs_tell_iomap(struct rsock *s, bool nonblock)
{
	struct rs_mapping e;
	struct rs_iomr *m;

	while ((m = untold(s))) {
		struct ibv_sge sge;
		uint32_t room = s->sbuf_size - s->s_head, skipped = 0;

		if (!rs_writable(s)) {
			if (rs_wait(s, rs_may_write, nonblock, &s->sndtimeo))
				return -1;
			if (!rs_writable(s))
				return rs_error(ECONNRESET);
			continue; /* the lock was given up: look again */
		}
		memset(&e, 0, sizeof(e));
		if (!m->gone) {
			e.offset = m->offset;
			e.place.addr = (uintptr_t)m->mr->addr;
			e.place.key = m->mr->rkey;
			e.place.length = m->mr->length;
		}
		if (s->swap)
			swap(&e);
		if (room < sizeof(e)) { /* in one piece: what is left of the ring is given up */
			skipped = room;
			s->s_head = 0;
		}
		memcpy(s->sbuf + s->s_head, &e, sizeof(e));
		sge = (struct ibv_sge){(uintptr_t)s->sbuf + s->s_head, sizeof(e), s->smr->lkey};
		s->s_head = (s->s_head + sizeof(e)) % s->sbuf_size;
		s->s_free -= sizeof(e) + skipped;
		s->sq_free--;
		s->s_seq++;
		if (rs_post(s, rs_message(RS_OP_IOMAP, m->index), true, &sge, 1,
			    s->peer_iomap + m->index * sizeof(e), s->peer_list.key,
			    RS_WR_DATA | (sizeof(e) + skipped), s->inline_size >= sizeof(e)))
			return -1;
		m->untold = false;
		if (m->gone)
			forget(s, m);
	}
	s->iomap_untold = false;
	return 0;
}

off_t riomap(int socket, void *buf, size_t len, int prot, int flags, off_t offset)
{
	struct rsock *s = rs_get(socket);
	struct rs_iomr *m = NULL;
	off_t at = -1;
	int i;

	if (!s)
		return -1;
	pthread_mutex_lock(&s->lock);
	if (s->type != SOCK_STREAM || !len || len > UINT32_MAX || flags || prot & ~PROT_WRITE) {
		errno = EINVAL;
		goto out;
	}
	rs_progress(s);
	if (!s->id || !s->id->qp || !s->peer_list.length) {
		errno = ENOTCONN;
		goto out;
	}
	for (i = 0; i < s->remote_iomaps && s->iomap_taken[i]; i++)
		;
	if (prot & PROT_WRITE && i == s->remote_iomaps) {
		errno = ENOMEM;
		goto out;
	}
	m = calloc(1, sizeof(*m));
	if (!m)
		goto out;
	m->mr = ibv_reg_mr(s->id->qp->pd, buf, len, prot & PROT_WRITE ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE : 0);
	if (!m->mr) {
		free(m);
		goto out;
	}
	m->offset = at = offset == -1 ? (off_t)(uintptr_t)buf : offset;
	m->index = -1;
	if (prot & PROT_WRITE) {
		m->index = i;
		m->untold = s->iomap_untold = true;
		s->iomap_taken[i] = 1;
	}
	m->next = s->iomrs;
	s->iomrs = m;
out:
	pthread_mutex_unlock(&s->lock);
	rs_put(s);
	return at;
}

int riounmap(int socket, void *buf, size_t len)
{
	struct rsock *s = rs_get(socket);
	struct rs_iomr *m;
	int err;

	if (!s)
		return -1;
	pthread_mutex_lock(&s->lock);
	for (m = s->iomrs; m && (m->gone || m->mr->addr != buf || m->mr->length != len); m = m->next)
		;
	err = m ? ibv_dereg_mr(m->mr) : EINVAL;
	if (!err) {
		m->mr = NULL;
		m->gone = true;
		/* The peer's entry leads nowhere now; it is emptied, unless it was never filled. */
		if (m->index < 0 || m->untold)
			forget(s, m);
		else
			m->untold = s->iomap_untold = true;
	}
	pthread_mutex_unlock(&s->lock);
	rs_put(s);
	return err ? rs_error(err) : 0;
}

size_t riowrite(int socket, const void *buf, size_t count, off_t offset, int flags)
{
	struct rsock *s = rs_get(socket);
	ssize_t n;

	if (!s)
		return -1;
	if (s->type == SOCK_STREAM)
		n = rs_send_direct(s, buf, count, offset, flags);
	else
		n = rs_error(EOPNOTSUPP);
	rs_put(s);
	return n;
}
