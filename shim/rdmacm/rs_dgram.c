/* SPDX-License-Identifier: Apache-2.0
 *
 * Datagram sockets: sending, receiving, and what is between. */
#include <string.h>
#include <sys/uio.h>

#include "rs_dgram.h"

int rs_bind_dgram(struct rsock *s, const struct sockaddr *addr)
{
	return rs_bind_stream(s, addr) ? -1 : rs_open_dgram(s);
}

/* rs_connect_dgram sets where datagrams go and come from. */
int rs_connect_dgram(struct rsock *s, const struct sockaddr *addr)
{
	union rs_addr a = {0};

	memcpy(&a, addr, rs_addrlen(addr));
	if (rs_open_dgram(s) || !rs_resolve_dest(s, &a))
		return -1;
	s->peer = a;
	return 0;
}

/* rs_take_send_slot gives a slot to send from, or -1. */
int rs_take_send_slot(struct rs_dgram *d)
{
	return d->n_free_sends ? d->free_sends[--d->n_free_sends] : -1;
}

static int queue_len(const struct rs_dgram *d)
{
	return d->n_recvs + KEPT + 1;
}

/* rs_queue_arrival puts a datagram behind those to be read. -1: it is not for us, as the
 * socket is connected to somebody else. There is room for all slots. */
int rs_queue_arrival(struct rsock *s, const uint8_t *data, uint32_t len, int slot, const union rs_addr *from)
{
	struct rs_dgram *d = s->dgram;

	if (s->read_shut || (s->peer.sa.sa_family && !rs_same_addr(&s->peer, from)))
		return -1;
	d->queue[d->tail] = (struct rs_arrival){data, len, slot, *from};
	d->tail = (d->tail + 1) % queue_len(d);
	return 0;
}

static void free_slot(struct rsock *s, int slot)
{
	struct rs_dgram *d = s->dgram;
	int err;

	if (slot >= d->n_recvs) {
		d->free_kept[d->n_free_kept++] = slot - d->n_recvs;
		return;
	}
	err = rs_post_ud_recv(d, slot);
	if (err)
		rs_break(s, err);
}

/* got_datagram reads the header that is in front of a datagram from a queue pair. */
static void got_datagram(struct rsock *s, int slot, uint32_t len)
{
	struct rs_dgram *d = s->dgram;
	const uint8_t *p = d->recvs + (size_t)slot * (GRH + RS_DGRAM_MAX) + GRH;
	union rs_addr from = {0};
	struct rs_dgram_hello h;
	uint8_t want = s->domain == AF_INET ? RS_DGRAM_LEN4 : RS_DGRAM_LEN6;

	if (len >= GRH + (uint32_t)want) {
		memcpy(&h, p, want);
		if (h.length == want && h.version == (s->domain == AF_INET ? 4 : 6)) {
			from.sa.sa_family = s->domain;
			if (s->domain == AF_INET) {
				from.in.sin_port = h.port;
				from.in.sin_addr.s_addr = h.v4;
			} else {
				from.in6.sin6_port = h.port;
				from.in6.sin6_flowinfo = h.v6.flow;
				memcpy(&from.in6.sin6_addr, h.v6.addr, 16);
			}
			if (!rs_queue_arrival(s, p + want, len - GRH - want, slot, &from))
				return;
		}
	}
	free_slot(s, slot);
}

static void got_completion(struct rsock *s, const struct ibv_wc *wc)
{
	struct rs_dgram *d = s->dgram;
	int slot = wc->wr_id & ~RS_WR_KIND, err;

	switch (wc->wr_id & RS_WR_KIND) {
	case WR_UD_RECV:
		if (wc->status == IBV_WC_SUCCESS)
			got_datagram(s, slot, wc->byte_len);
		else if (wc->status != IBV_WC_WR_FLUSH_ERR)
			free_slot(s, slot);
		break;
	case WR_RAW_RECV:
		if (wc->status == IBV_WC_WR_FLUSH_ERR)
			break;
		if (wc->status == IBV_WC_SUCCESS)
			rs_got_frame(s, d->raws + (size_t)slot * RAW_SLOT, wc->byte_len);
		err = rs_post_raw_recv(d, slot);
		if (err)
			rs_break(s, err);
		break;
	case WR_SEND:
		d->free_sends[d->n_free_sends++] = slot;
		break;
	}
	if (wc->status == IBV_WC_WR_FLUSH_ERR)
		rs_break(s, ENETDOWN); /* the device is gone */
}

void rs_progress_dgram(struct rsock *s)
{
	struct ibv_wc wc[16];
	bool found = false;
	int n;

	if (s->dgram && s->dgram->flow) {
		while ((n = ibv_poll_cq(s->cq, 16, wc)) > 0) {
			found = true;
			for (int i = 0; i < n; i++)
				got_completion(s, &wc[i]);
			if (n < 16)
				break;
		}
		if (n < 0)
			rs_break(s, EIO);
	}
	s->idle = found ? 0 : s->idle + 1;
	if (found)
		rs_rouse(s);
}

static bool have(const struct rsock *s)
{
	return s->dgram && s->dgram->head != s->dgram->tail;
}

static bool may_read(struct rsock *s)
{
	return have(s) || s->error || s->closed || s->read_shut || s->state == RS_BROKEN;
}

static bool may_write(struct rsock *s)
{
	return (s->dgram && s->dgram->n_free_sends) || s->error || s->closed || s->write_shut || s->state == RS_BROKEN;
}

short rs_revents_dgram(struct rsock *s, short events)
{
	short r = 0;

	if (may_read(s) && s->dgram)
		r |= events & (POLLIN | POLLRDNORM);
	if (!s->dgram || may_write(s))
		r |= events & (POLLOUT | POLLWRNORM);
	if (s->error || s->state == RS_BROKEN)
		r |= POLLERR;
	return r;
}

static int trouble(struct rsock *s, bool shut)
{
	int err = s->error;

	s->error = 0;
	if (s->closed)
		return EBADF;
	if (err)
		return err;
	if (s->state == RS_BROKEN)
		return ENETDOWN;
	return shut ? EPIPE : 0;
}

static size_t total(const struct iovec *iov, int n)
{
	size_t sum = 0;

	for (int i = 0; i < n; i++) {
		if (iov[i].iov_len > RS_DGRAM_MAX)
			return SIZE_MAX;
		sum += iov[i].iov_len;
	}
	return sum;
}

static void gather(uint8_t *to, const struct iovec *iov, int n)
{
	for (int i = 0; i < n; i++) {
		if (iov[i].iov_len)
			memcpy(to, iov[i].iov_base, iov[i].iov_len);
		to += iov[i].iov_len;
	}
}

/* send_ud sends a datagram to a queue pair. */
static int send_ud(struct rsock *s, const struct rs_dest *dest, int slot, const struct iovec *iov, int n, size_t len)
{
	struct rs_dgram *d = s->dgram;
	uint8_t *p = d->sends + (size_t)slot * RAW_SLOT;
	struct rs_dgram_hello h = {.version = 4, .length = RS_DGRAM_LEN4, .port = d->port};
	struct ibv_sge sge = {(uintptr_t)p, 0, d->mr->lkey};
	struct ibv_send_wr wr = {.wr_id = WR_SEND | slot, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				 .wr.ud = {.ah = dest->ah, .remote_qpn = dest->qpn, .remote_qkey = RDMA_UDP_QKEY}}, *bad;
	int err;

	if (dest->local.sa.sa_family == AF_INET) {
		h.v4 = dest->local.in.sin_addr.s_addr;
	} else {
		h.version = 6;
		h.length = RS_DGRAM_LEN6;
		h.v6.flow = 0;
		memcpy(h.v6.addr, &dest->local.in6.sin6_addr, 16);
	}
	memcpy(p, &h, h.length);
	gather(p + h.length, iov, n);
	sge.length = h.length + len;
	if (sge.length <= s->inline_size)
		wr.send_flags = IBV_SEND_INLINE;
	err = ibv_post_send(d->ud, &wr, &bad);
	if (err) {
		d->free_sends[d->n_free_sends++] = slot;
		return rs_error(err == ENOMEM ? ENOBUFS : EIO);
	}
	return 0;
}

static ssize_t send_locked(struct rsock *s, const struct iovec *iov, int n, bool nonblock, const union rs_addr *to)
{
	struct rs_dgram *d;
	struct rs_dest *dest;
	size_t len = total(iov, n);
	int err, slot;

	if (s->closed || s->write_shut)
		return rs_error(trouble(s, true));
	if (!to->sa.sa_family)
		return rs_error(EDESTADDRREQ);
	if (rs_open_dgram(s))
		return -1;
	d = s->dgram;
	if (len > d->max - (s->domain == AF_INET ? RS_DGRAM_LEN4 : RS_DGRAM_LEN6))
		return rs_error(EMSGSIZE);
	if (rs_wait(s, may_write, nonblock, &s->sndtimeo))
		return -1;
	err = trouble(s, s->write_shut);
	if (err)
		return rs_error(err);
	dest = rs_resolve_dest(s, to);
	if (!dest)
		return -1;
	slot = rs_take_send_slot(d);
	if (slot < 0) /* an answer took it meanwhile */
		return rs_error(ENOBUFS);
	if (dest->ah)
		return send_ud(s, dest, slot, iov, n, len) ? -1 : (ssize_t)len;
	gather(rs_udp_payload(d, dest, slot), iov, n);
	return rs_send_udp(d, dest, RS_OP_DATA, slot, len) ? -1 : (ssize_t)len;
}

ssize_t rs_send_dgram(struct rsock *s, const struct iovec *iov, int n, int flags, const struct sockaddr *to)
{
	bool nonblock = s->nonblock || flags & MSG_DONTWAIT;
	union rs_addr a = {0};
	ssize_t sent;

	if (flags & MSG_OOB)
		return rs_error(EOPNOTSUPP);
	if (pthread_mutex_trylock(&s->writing)) {
		if (nonblock)
			return rs_error(EAGAIN);
		pthread_mutex_lock(&s->writing);
	}
	pthread_mutex_lock(&s->lock);
	if (to)
		memcpy(&a, to, rs_addrlen(to));
	else
		a = s->peer;
	sent = send_locked(s, iov, n, nonblock, &a);
	pthread_mutex_unlock(&s->lock);
	pthread_mutex_unlock(&s->writing);
	return sent;
}

/* hand_out copies a datagram, as much as there is room for, and says from whom it is. */
static ssize_t hand_out(const struct rs_arrival *a, struct msghdr *msg, int flags)
{
	socklen_t len = rs_addrlen(&a->from.sa);
	size_t done = 0;

	for (size_t i = 0; i < msg->msg_iovlen && done < a->len; i++) {
		size_t part = msg->msg_iov[i].iov_len;

		if (part > a->len - done)
			part = a->len - done;
		if (part)
			memcpy(msg->msg_iov[i].iov_base, a->data + done, part);
		done += part;
	}
	msg->msg_flags = done < a->len ? MSG_TRUNC : 0;
	if (msg->msg_name) {
		memcpy(msg->msg_name, &a->from, msg->msg_namelen < len ? msg->msg_namelen : len);
		msg->msg_namelen = len;
	} else {
		msg->msg_namelen = 0;
	}
	return flags & MSG_TRUNC ? a->len : done;
}

ssize_t rs_recv_dgram(struct rsock *s, struct msghdr *msg, int flags)
{
	bool nonblock = s->nonblock || flags & MSG_DONTWAIT;
	struct rs_arrival *a;
	ssize_t n = -1;
	int err;

	if (flags & (MSG_OOB | MSG_ERRQUEUE))
		return rs_error(EOPNOTSUPP);
	if (pthread_mutex_trylock(&s->reading)) {
		if (nonblock)
			return rs_error(EAGAIN);
		pthread_mutex_lock(&s->reading);
	}
	pthread_mutex_lock(&s->lock);
	if (!rs_open_dgram(s) && !rs_wait(s, may_read, nonblock, &s->rcvtimeo)) {
		err = trouble(s, false);
		if (err) {
			errno = err;
		} else if (!have(s)) {
			n = 0; /* rshutdown */
		} else {
			a = &s->dgram->queue[s->dgram->head];
			n = hand_out(a, msg, flags);
			if (!(flags & MSG_PEEK)) {
				s->dgram->head = (s->dgram->head + 1) % queue_len(s->dgram);
				free_slot(s, a->slot);
			}
		}
	}
	pthread_mutex_unlock(&s->lock);
	pthread_mutex_unlock(&s->reading);
	return n;
}
