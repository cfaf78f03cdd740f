/* SPDX-License-Identifier: Apache-2.0
 *
 * The socket calls, which lead to streams or to datagrams. */
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "rs.h"

/* rsocket makes a socket: AF_INET or AF_INET6, a stream or datagrams. Its number is that of
 * a descriptor of its own, so no file has it. */
int rsocket(int domain, int type, int protocol)
{
	int kind = type & ~(SOCK_NONBLOCK | SOCK_CLOEXEC);
	struct rsock *s;

	if ((domain != AF_INET && domain != AF_INET6) || (kind != SOCK_STREAM && kind != SOCK_DGRAM) ||
	    (protocol && protocol != (kind == SOCK_STREAM ? IPPROTO_TCP : IPPROTO_UDP)))
		return rs_error(ENOTSUP);
	s = rs_new(NULL, domain, kind);
	if (!s)
		return -1;
	s->nonblock = type & SOCK_NONBLOCK;
	s->channel = rdma_create_event_channel();
	if (!s->channel || rdma_create_id(s->channel, &s->id, s, kind == SOCK_STREAM ? RDMA_PS_TCP : RDMA_PS_UDP) ||
	    rs_enter(s) < 0) {
		rs_put(s);
		return -1;
	}
	return s->fd;
}

/* fits says whether an address is one of the socket's family. */
static int fits(const struct rsock *s, const struct sockaddr *addr, socklen_t len)
{
	if (!addr)
		return rs_error(EFAULT);
	if (len < sizeof(struct sockaddr_in))
		return rs_error(EINVAL);
	if (addr->sa_family != s->domain)
		return rs_error(EAFNOSUPPORT);
	return len < rs_addrlen(addr) ? rs_error(EINVAL) : 0;
}

int rbind(int socket, const struct sockaddr *addr, socklen_t addrlen)
{
	struct rsock *s = rs_get(socket);
	int rc;

	if (!s)
		return -1;
	pthread_mutex_lock(&s->lock);
	rc = fits(s, addr, addrlen);
	if (!rc)
		rc = s->type == SOCK_STREAM ? rs_bind_stream(s, addr) : rs_bind_dgram(s, addr);
	pthread_mutex_unlock(&s->lock);
	rs_put(s);
	return rc;
}

int rlisten(int socket, int backlog)
{
	struct rsock *s = rs_get(socket);
	int rc;

	if (!s)
		return -1;
	pthread_mutex_lock(&s->lock);
	rc = s->type == SOCK_STREAM ? rs_listen_stream(s, backlog) : rs_error(EOPNOTSUPP);
	pthread_mutex_unlock(&s->lock);
	rs_put(s);
	return rc;
}

/* give hands out an address, cut off where there is no more room, and its whole length. */
static void give(const union rs_addr *a, struct sockaddr *addr, socklen_t *len)
{
	socklen_t whole = rs_addrlen(&a->sa);

	if (!addr || !len)
		return;
	memcpy(addr, a, *len < whole ? *len : whole);
	*len = whole;
}

/* accept_next waits for a connection. Called with the lock of the listening socket. */
static struct rsock *accept_next(struct rsock *l)
{
	struct timespec now = rs_now(), end = rs_after(&now, l->rcvtimeo.tv_nsec);
	bool forever = !l->rcvtimeo.tv_sec && !l->rcvtimeo.tv_nsec;
	struct rsock *s;

	end.tv_sec += l->rcvtimeo.tv_sec;
	for (;;) {
		if (l->closed) {
			errno = EBADF;
			return NULL;
		}
		if (l->state != RS_LISTENING) {
			errno = l->error ? l->error : EINVAL;
			return NULL;
		}
		s = rs_accept_stream(l);
		if (s || errno != EAGAIN || l->nonblock)
			return s;
		if (rs_sleep(l, forever ? NULL : &end)) {
			if (errno == ETIMEDOUT)
				errno = EAGAIN;
			return NULL;
		}
	}
}

int raccept(int socket, struct sockaddr *addr, socklen_t *addrlen)
{
	struct rsock *l = rs_get(socket), *s;
	int fd = -1;

	if (!l)
		return -1;
	if (l->type != SOCK_STREAM) {
		rs_put(l);
		return rs_error(EOPNOTSUPP);
	}
	pthread_mutex_lock(&l->lock);
	s = accept_next(l);
	pthread_mutex_unlock(&l->lock);
	if (s) {
		fd = s->fd;
		give((const union rs_addr *)rdma_get_peer_addr(s->id), addr, addrlen);
	}
	rs_put(l);
	return fd;
}

static int connect_and_wait(struct rsock *s, const struct sockaddr *addr)
{
	int err;

	if (rs_connect_stream(s, addr)) {
		/* One that was begun without waiting may be waited for. */
		if (errno != EALREADY || s->nonblock)
			return -1;
	}
	rs_handle_events(s);
	if (rs_wait(s, rs_settled, s->nonblock, &s->sndtimeo)) {
		err = errno;
		rs_serve(s); /* it goes on meanwhile */
		return rs_error(err == EAGAIN ? EINPROGRESS : err);
	}
	if (s->state == RS_CONNECTED)
		return 0;
	err = s->error ? s->error : ECONNABORTED;
	s->error = 0;
	return rs_error(s->closed ? EBADF : err);
}

int rconnect(int socket, const struct sockaddr *addr, socklen_t addrlen)
{
	struct rsock *s = rs_get(socket);
	int rc;

	if (!s)
		return -1;
	pthread_mutex_lock(&s->lock);
	if (s->type == SOCK_DGRAM && addr && addrlen >= sizeof(addr->sa_family) && addr->sa_family == AF_UNSPEC) {
		memset(&s->peer, 0, sizeof(s->peer));
		rc = 0;
	} else {
		rc = fits(s, addr, addrlen);
		if (!rc)
			rc = s->type == SOCK_STREAM ? connect_and_wait(s, addr) : rs_connect_dgram(s, addr);
	}
	pthread_mutex_unlock(&s->lock);
	rs_put(s);
	return rc;
}

static ssize_t receive(int socket, struct msghdr *msg, int flags)
{
	struct rsock *s = rs_get(socket);
	ssize_t n;

	if (!s)
		return -1;
	if (s->type == SOCK_DGRAM) {
		n = rs_recv_dgram(s, msg, flags);
	} else {
		n = rs_recv_stream(s, msg->msg_iov, msg->msg_iovlen, flags);
		msg->msg_namelen = 0; /* as TCP's */
		msg->msg_flags = 0;
	}
	msg->msg_controllen = 0;
	rs_put(s);
	return n;
}

static ssize_t transmit(int socket, const struct msghdr *msg, int flags)
{
	struct rsock *s = rs_get(socket);
	ssize_t n = 0;

	if (!s)
		return -1;
	if (msg->msg_control && msg->msg_controllen)
		n = rs_error(EOPNOTSUPP);
	else if (s->type == SOCK_STREAM)
		n = rs_send_stream(s, msg->msg_iov, msg->msg_iovlen, flags); /* an address does not matter, as TCP's */
	else if (msg->msg_name && fits(s, msg->msg_name, msg->msg_namelen))
		n = -1;
	else
		n = rs_send_dgram(s, msg->msg_iov, msg->msg_iovlen, flags, msg->msg_name);
	rs_put(s);
	return n;
}

ssize_t rrecvfrom(int socket, void *buf, size_t len, int flags, struct sockaddr *src_addr, socklen_t *addrlen)
{
	struct iovec iov = {buf, len};
	struct msghdr msg = {.msg_name = addrlen ? src_addr : NULL, .msg_namelen = src_addr && addrlen ? *addrlen : 0,
			     .msg_iov = &iov, .msg_iovlen = 1};
	ssize_t n = receive(socket, &msg, flags);

	if (n >= 0 && src_addr && addrlen)
		*addrlen = msg.msg_namelen;
	return n;
}

ssize_t rrecv(int socket, void *buf, size_t len, int flags)
{
	return rrecvfrom(socket, buf, len, flags, NULL, NULL);
}

ssize_t rrecvmsg(int socket, struct msghdr *msg, int flags)
{
	return receive(socket, msg, flags);
}

ssize_t rread(int socket, void *buf, size_t count)
{
	return rrecv(socket, buf, count, 0);
}

ssize_t rreadv(int socket, const struct iovec *iov, int iovcnt)
{
	struct msghdr msg = {.msg_iov = (struct iovec *)iov, .msg_iovlen = iovcnt};

	return iovcnt < 0 ? rs_error(EINVAL) : receive(socket, &msg, 0);
}

ssize_t rsendto(int socket, const void *buf, size_t len, int flags, const struct sockaddr *dest_addr, socklen_t addrlen)
{
	struct iovec iov = {(void *)buf, len};
	struct msghdr msg = {.msg_name = (void *)dest_addr, .msg_namelen = addrlen, .msg_iov = &iov, .msg_iovlen = 1};

	return transmit(socket, &msg, flags);
}

ssize_t rsend(int socket, const void *buf, size_t len, int flags)
{
	return rsendto(socket, buf, len, flags, NULL, 0);
}

ssize_t rsendmsg(int socket, const struct msghdr *msg, int flags)
{
	return transmit(socket, msg, flags);
}

ssize_t rwrite(int socket, const void *buf, size_t count)
{
	return rsend(socket, buf, count, 0);
}

ssize_t rwritev(int socket, const struct iovec *iov, int iovcnt)
{
	struct msghdr msg = {.msg_iov = (struct iovec *)iov, .msg_iovlen = iovcnt};

	return iovcnt < 0 ? rs_error(EINVAL) : transmit(socket, &msg, 0);
}

int rgetpeername(int socket, struct sockaddr *addr, socklen_t *addrlen)
{
	struct rsock *s = rs_get(socket);
	union rs_addr *a = NULL;

	if (!s)
		return -1;
	pthread_mutex_lock(&s->lock);
	if (s->type == SOCK_DGRAM && s->peer.sa.sa_family)
		a = &s->peer;
	else if (s->type == SOCK_STREAM && (s->state == RS_ACCEPTING || s->state == RS_CONNECTED || s->state == RS_OVER))
		a = (union rs_addr *)rdma_get_peer_addr(s->id);
	if (a)
		give(a, addr, addrlen);
	pthread_mutex_unlock(&s->lock);
	rs_put(s);
	return a ? 0 : rs_error(ENOTCONN);
}

int rgetsockname(int socket, struct sockaddr *addr, socklen_t *addrlen)
{
	struct rsock *s = rs_get(socket);
	union rs_addr a = {0};

	if (!s)
		return -1;
	pthread_mutex_lock(&s->lock);
	memcpy(&a, rdma_get_local_addr(s->id), sizeof(a));
	a.sa.sa_family = s->domain; /* 0 before it is bound */
	give(&a, addr, addrlen);
	pthread_mutex_unlock(&s->lock);
	rs_put(s);
	return 0;
}
