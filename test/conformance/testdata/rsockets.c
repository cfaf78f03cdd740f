/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of rsockets on one device that is connected to itself; rsockets_two.c has those
 * between two processes. The argument says which. */
#include "rsockets.h"

static void check_errors(void)
{
	struct sockaddr_in a = at("TAPVERBS_ADDR", 7001), nowhere = a, got;
	struct sockaddr_in6 a6 = { .sin6_family = AF_INET6 };
	socklen_t len = sizeof(got);
	struct linger linger = { 1, 3 };
	struct timeval tv = { 3, 500000 };
	char b[8];
	int s, t;

	CHECK(fails(rsocket(AF_UNIX, SOCK_STREAM, 0), ENOTSUP));
	CHECK(fails(rsocket(AF_INET, SOCK_RAW, 0), ENOTSUP));
	CHECK(fails(rsocket(AF_INET, SOCK_STREAM, IPPROTO_UDP), ENOTSUP));
	CHECK(fails(rclose(-1), EBADF) && fails(rclose(0), EBADF) && fails(rrecv(1000000, b, 1, 0), EBADF));
	CHECK((s = rsocket(AF_INET, SOCK_STREAM, IPPROTO_TCP)) > 2);
	CHECK((t = rsocket(AF_INET, SOCK_STREAM, 0)) > 2 && t != s);
	CHECK(fails(rrecv(s, b, 1, 0), ENOTCONN) && fails(rsend(s, b, 1, 0), ENOTCONN) && fails(rshutdown(s, SHUT_WR), ENOTCONN));
	CHECK(fails(rgetpeername(s, (struct sockaddr *)&got, &len), ENOTCONN) && fails(raccept(s, NULL, NULL), EINVAL));
	CHECK(fails(rbind(s, (struct sockaddr *)&a6, sizeof(a6)), EAFNOSUPPORT) && fails(rbind(s, (struct sockaddr *)&a, 3), EINVAL));
	nowhere.sin_addr.s_addr = htonl(0x0a000063);
	CHECK(fails(rbind(s, (struct sockaddr *)&nowhere, sizeof(nowhere)), EADDRNOTAVAIL));
	CHECK(!rbind(s, (struct sockaddr *)&a, sizeof(a)) && fails(rbind(s, (struct sockaddr *)&a, sizeof(a)), EINVAL));
	CHECK(!rgetsockname(s, (struct sockaddr *)&got, &len) && len == sizeof(got));
	CHECK(got.sin_family == AF_INET && got.sin_port == a.sin_port && got.sin_addr.s_addr == a.sin_addr.s_addr);
	CHECK(!rlisten(s, 5) && get_int(s, SOL_SOCKET, SO_ACCEPTCONN) == 1);
	CHECK(fails(rbind(t, (struct sockaddr *)&a, sizeof(a)), EADDRINUSE) || !rbind(t, (struct sockaddr *)&a, sizeof(a)));
	CHECK(fails(rconnect(s, (struct sockaddr *)&a, sizeof(a)), EOPNOTSUPP));
	CHECK(!rfcntl(s, F_SETFL, O_NONBLOCK) && rfcntl(s, F_GETFL) == (O_RDWR | O_NONBLOCK) && fails(raccept(s, NULL, NULL), EAGAIN));
	CHECK(fails(rfcntl(s, F_GETLK, 0), ENOTSUP));
	CHECK(!rclose(s) && fails(rclose(s), EBADF) && !rclose(t));

	CHECK((s = rsocket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) >= 0 && rfcntl(s, F_GETFL) & O_NONBLOCK);
	CHECK(get_int(s, SOL_SOCKET, SO_TYPE) == SOCK_STREAM && get_int(s, SOL_SOCKET, SO_DOMAIN) == AF_INET);
	CHECK(!set_int(s, SOL_SOCKET, SO_RCVBUF, 50000) && get_int(s, SOL_SOCKET, SO_RCVBUF) == 100000);
	CHECK(!set_int(s, SOL_SOCKET, SO_SNDBUF, 40000) && get_int(s, SOL_SOCKET, SO_SNDBUF) == 80000);
	CHECK(!set_int(s, SOL_SOCKET, SO_KEEPALIVE, 1) && get_int(s, SOL_SOCKET, SO_KEEPALIVE) == 1);
	CHECK(!set_int(s, IPPROTO_TCP, TCP_NODELAY, 1) && get_int(s, IPPROTO_TCP, TCP_NODELAY) == 1);
	CHECK(!set_int(s, IPPROTO_TCP, TCP_KEEPIDLE, 9) && get_int(s, IPPROTO_TCP, TCP_KEEPIDLE) == 9);
	CHECK(fails(set_int(s, IPPROTO_TCP, TCP_KEEPIDLE, 0), EINVAL) && get_int(s, IPPROTO_TCP, TCP_MAXSEG) >= 256);
	CHECK(!set_int(s, SOL_RDMA, RDMA_SQSIZE, 100) && get_int(s, SOL_RDMA, RDMA_SQSIZE) == 100);
	CHECK(!set_int(s, SOL_RDMA, RDMA_RQSIZE, 90) && get_int(s, SOL_RDMA, RDMA_RQSIZE) == 90);
	CHECK(!set_int(s, SOL_RDMA, RDMA_INLINE, 32) && get_int(s, SOL_RDMA, RDMA_INLINE) == 32);
	CHECK(!set_int(s, SOL_RDMA, RDMA_IOMAPSIZE, 300) && get_int(s, SOL_RDMA, RDMA_IOMAPSIZE) == 256);
	CHECK(!rsetsockopt(s, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)));
	len = sizeof(linger);
	linger.l_linger = 0;
	CHECK(!rgetsockopt(s, SOL_SOCKET, SO_LINGER, &linger, &len) && linger.l_onoff == 1 && linger.l_linger == 3);
	CHECK(!rsetsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)));
	len = sizeof(tv);
	memset(&tv, 0, sizeof(tv));
	CHECK(!rgetsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &tv, &len) && tv.tv_sec == 3 && tv.tv_usec == 500000);
	CHECK(fails(set_int(s, SOL_SOCKET, SO_BROADCAST, 1), ENOPROTOOPT) && fails(set_int(s, 77, 1, 1), ENOPROTOOPT));
	CHECK(!rclose(s));
}

/* Nobody listens: told at once, and to those who did not wait. */
static void check_refused(void)
{
	struct sockaddr_in a = at("TAPVERBS_ADDR", 7999);
	int s = rsocket(AF_INET, SOCK_STREAM, 0);
	short r;
	char b;

	CHECK(s >= 0 && fails(rconnect(s, (struct sockaddr *)&a, sizeof(a)), ECONNREFUSED));
	CHECK(!rclose(s));
	CHECK((s = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)) >= 0);
	CHECK(rconnect(s, (struct sockaddr *)&a, sizeof(a)) == -1);
	if (errno == EINPROGRESS) {
		r = wait_for(s, POLLOUT);
		CHECK(r & POLLERR && r & POLLOUT && get_int(s, SOL_SOCKET, SO_ERROR) == ECONNREFUSED);
	} else {
		CHECK(errno == ECONNREFUSED); /* it may be known before the call returns */
	}
	CHECK(get_int(s, SOL_SOCKET, SO_ERROR) == 0);
	CHECK(fails(rsend(s, "x", 1, 0), EPIPE) && rrecv(s, &b, 1, 0) == 0);
	CHECK(!rclose(s));
}

static void check_stream(void)
{
	struct sockaddr_in name, peer;
	socklen_t len = sizeof(name);
	unsigned char b[5000];
	struct iovec iov[3] = { { b, 10 }, { b + 100, 0 }, { b + 200, 4000 } };
	int e[2];
	char c;

	connected(7002, e);
	CHECK(!rgetsockname(e[0], (struct sockaddr *)&name, &len) && !rgetpeername(e[1], (struct sockaddr *)&peer, &len));
	CHECK(name.sin_port == peer.sin_port && name.sin_addr.s_addr == peer.sin_addr.s_addr && name.sin_port);
	CHECK(!rgetpeername(e[0], (struct sockaddr *)&peer, &len) && peer.sin_port == htons(7002));
	{
		struct sockaddr_in again = at("TAPVERBS_ADDR", 7002);

		CHECK(fails(rconnect(e[0], (struct sockaddr *)&again, sizeof(again)), EISCONN));
	}
	CHECK(fails(rrecv(e[1], b, 1, MSG_DONTWAIT), EAGAIN));
	CHECK(rrecv(e[1], b, 0, 0) == 0 && rsend(e[0], b, 0, 0) == 0);

	/* A message is read in parts, looked at before, and waited for in whole. */
	fill(b, 0, 3000, 1);
	CHECK(rsend(e[0], b, 3000, 0) == 3000);
	memset(b, 0, sizeof(b));
	CHECK(wait_for(e[1], POLLIN) == POLLIN);
	CHECK(rrecv(e[1], b, 100, MSG_PEEK) == 100 && filled(b, 0, 100, 1));
	CHECK(rrecv(e[1], b, 100, 0) == 100 && filled(b, 0, 100, 1));
	CHECK(rrecv(e[1], b, 1, 0) == 1 && filled(b, 100, 1, 1));
	CHECK(rrecv(e[1], b, 2899, MSG_WAITALL) == 2899 && filled(b, 101, 2899, 1));
	send_all(e[0], 3000, 500, 1);
	send_all(e[0], 3500, 500, 1);
	CHECK(rrecv(e[1], b, 1000, MSG_WAITALL) == 1000 && filled(b, 3000, 1000, 1));

	/* Lists of buffers. */
	fill(b, 0, 10, 2);
	fill(b + 200, 10, 4000, 2);
	CHECK(rwritev(e[1], iov, 3) == 4010);
	memset(b, 0, sizeof(b));
	for (size_t got = 0; got < 4010;) {
		struct iovec in[2] = { { b, 7 }, { b + 7, 4003 - got } };
		ssize_t n = rreadv(e[0], in, 2);

		CHECK(n > 0 && filled(b, got, n, 2));
		got += n;
	}
	{
		struct iovec in = { b, 5 };
		struct msghdr m = { .msg_iov = &in, .msg_iovlen = 1 };
		union {
			struct cmsghdr h;
			char room[100];
		} control = { 0 };

		CHECK(rsendmsg(e[0], &m, 0) == 5 && rrecvmsg(e[1], &m, 0) == 5);
		m.msg_control = &control;
		m.msg_controllen = sizeof(control);
		CHECK(fails(rsendmsg(e[0], &m, 0), EOPNOTSUPP));
	}

	/* One direction ends, the other goes on. */
	CHECK(rwrite(e[0], "last", 4) == 4 && !rshutdown(e[0], SHUT_WR) && fails(rsend(e[0], b, 1, MSG_NOSIGNAL), EPIPE));
	CHECK(rrecv(e[1], b, 10, MSG_WAITALL) == 4 && rread(e[1], b, 10) == 0);
	CHECK(wait_for(e[1], POLLIN | POLLRDHUP) == (POLLIN | POLLRDHUP));
	send_all(e[1], 0, 100000, 3);
	recv_all(e[0], 0, 100000, 3);
	CHECK(!rshutdown(e[1], SHUT_RDWR) && rrecv(e[0], &c, 1, 0) == 0);
	CHECK(wait_for(e[0], POLLIN) & POLLHUP);
	CHECK(!rclose(e[0]) && !rclose(e[1]));

	/* What was sent before the end can be read after it. */
	connected(7003, e);
	send_all(e[0], 0, 50000, 4);
	CHECK(!rclose(e[0]));
	recv_all(e[1], 0, 50000, 4);
	CHECK(rrecv(e[1], &c, 1, 0) == 0 && fails(rsend(e[1], "x", 1, MSG_NOSIGNAL), ECONNRESET));
	CHECK(!rclose(e[1]));
}

/* Both ends fill all that there is in both directions, and then empty it. */
static void check_full(void)
{
	static unsigned char b[9000];
	size_t sent[2] = { 0 }, got[2] = { 0 }, limit;
	struct pollfd p;
	int e[2];

	connected(7004, e);
	CHECK(fails(set_int(e[0], SOL_SOCKET, SO_RCVBUF, 1000), EOPNOTSUPP));
	limit = get_int(e[0], SOL_SOCKET, SO_SNDBUF) + get_int(e[1], SOL_SOCKET, SO_RCVBUF);
	for (int i = 0; i < 2; i++)
		CHECK(!rfcntl(e[i], F_SETFL, O_NONBLOCK));
	for (int round = 0; round < 20; round++) {
		for (int open = 3, i = 0; open; i = !i) {
			size_t n = 1 + (sent[i] * 31 + round) % sizeof(b);
			ssize_t k;

			fill(b, sent[i], n, i);
			k = rsend(e[i], b, n, 0);
			if (k < 0) {
				CHECK(errno == EAGAIN);
				open &= ~(1 << i);
			} else {
				sent[i] += k;
			}
			CHECK(sent[i] - got[!i] <= limit);
		}
		for (int i = 0; i < 2; i++) {
			/* Acknowledgements may bring room for a little more. */
			p = (struct pollfd){ .fd = e[i], .events = POLLIN | POLLOUT };
			CHECK(rpoll(&p, 1, 0) == 1 && p.revents & POLLIN);
		}
		for (int i = 0; i < 2; i++) {
			size_t until = round == 19 ? sent[!i] : got[i] + (sent[!i] - got[i]) * (round % 3 + 1) / 4;

			while (got[i] < until) {
				size_t n = 1 + got[i] * 17 % sizeof(b);
				ssize_t k = rrecv(e[i], b, n < until - got[i] ? n : until - got[i], 0);

				if (k < 0) {
					CHECK(errno == EAGAIN && wait_for(e[i], POLLIN) == POLLIN);
					continue;
				}
				CHECK(filled(b, got[i], k, !i));
				got[i] += k;
			}
		}
	}
	CHECK(sent[0] > 100000 && sent[1] > 100000 && got[0] == sent[1] && got[1] == sent[0]);
	CHECK(!rclose(e[0]) && !rclose(e[1]));
}

static void *one_byte(void *arg)
{
	int fd = *(int *)arg;

	CHECK(write(fd, "p", 1) == 1);
	return NULL;
}

static void *one_byte_r(void *arg)
{
	CHECK(rsend(*(int *)arg, "r", 1, 0) == 1);
	return NULL;
}

/* Sockets and pipes in one list; whoever is first wakes it up. */
static void check_poll(void)
{
	int e[2], pipes[2], l = listener(7005), c;
	struct pollfd p[4];
	struct timeval tv = { 0, 1000 };
	fd_set r, w;
	pthread_t t;
	char b;

	connected(7006, e);
	CHECK(!pipe(pipes));
	p[0] = (struct pollfd){ .fd = pipes[0], .events = POLLIN };
	p[1] = (struct pollfd){ .fd = e[0], .events = POLLIN };
	p[2] = (struct pollfd){ .fd = l, .events = POLLIN };
	p[3] = (struct pollfd){ .fd = -1, .events = POLLIN };
	CHECK(rpoll(p, 4, 0) == 0 && rpoll(p, 4, 1) == 0);
	for (int i = 0; i < 50; i++) {
		CHECK(!pthread_create(&t, NULL, one_byte, &pipes[1]));
		CHECK(rpoll(p, 4, -1) == 1 && p[0].revents == POLLIN && !p[1].revents && !p[2].revents);
		CHECK(read(pipes[0], &b, 1) == 1 && b == 'p' && !pthread_join(t, NULL));
		CHECK(!pthread_create(&t, NULL, one_byte_r, &e[1]));
		CHECK(rpoll(p, 4, -1) == 1 && !p[0].revents && p[1].revents == POLLIN && !p[2].revents);
		CHECK(rrecv(e[0], &b, 1, 0) == 1 && b == 'r' && !pthread_join(t, NULL));
	}
	c = begin(7005);
	CHECK(rpoll(p, 4, -1) == 1 && p[2].revents == POLLIN);
	FD_ZERO(&r);
	FD_ZERO(&w);
	FD_SET(l, &r);
	FD_SET(e[0], &r);
	FD_SET(e[1], &w);
	FD_SET(pipes[0], &r);
	CHECK(rselect(FD_SETSIZE, &r, &w, NULL, NULL) == 2 && FD_ISSET(l, &r) && FD_ISSET(e[1], &w) && !FD_ISSET(e[0], &r));
	FD_ZERO(&r);
	FD_SET(e[0], &r);
	CHECK(rselect(e[0] + 1, &r, NULL, NULL, &tv) == 0 && !FD_ISSET(e[0], &r));
	p[0].fd = 1000000; /* not open */
	CHECK(rpoll(p, 1, 0) == 1 && p[0].revents == POLLNVAL);
	CHECK(!rclose(c) && !rclose(e[0]) && !rclose(e[1]) && !rclose(l) && !close(pipes[0]) && !close(pipes[1]));
}

/* Regions that the peer writes to directly. */
static void check_iomap(void)
{
	static unsigned char here[100000], there[100000], other[5000];
	int e[2], l, c;
	char b;

	l = rsocket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in a = at("TAPVERBS_ADDR", 7007);
	CHECK(!set_int(l, SOL_RDMA, RDMA_IOMAPSIZE, 2) && !rbind(l, (struct sockaddr *)&a, sizeof(a)) && !rlisten(l, 1));
	c = begin(7007);
	CHECK((e[1] = raccept(l, NULL, NULL)) >= 0 && wait_for(c, POLLOUT) == POLLOUT && !rfcntl(c, F_SETFL, 0));
	e[0] = c;
	/* e[1] has a table; so e[0] can map, and e[1] write. */
	CHECK(riomap(e[1], here, sizeof(here), PROT_WRITE, 0, 0) == -1 && errno == ENOMEM);
	CHECK(riomap(e[0], there, sizeof(there), PROT_WRITE, 0, 4096) == 4096);
	CHECK(riomap(e[0], other, sizeof(other), PROT_WRITE, 0, -1) == (off_t)(uintptr_t)other);
	CHECK(riomap(e[0], here, 10, PROT_WRITE, 0, 0) == -1 && errno == ENOMEM);
	CHECK(riomap(e[0], here, 10, PROT_NONE, 0, 1 << 30) == 1 << 30);
	CHECK(riomap(e[0], here, 10, PROT_READ, 0, 0) == -1 && errno == EINVAL);
	CHECK(riowrite(e[1], here, 1, 4096, 0) == 0); /* not told yet */
	CHECK(rsend(e[0], "m", 1, 0) == 1 && rrecv(e[1], &b, 1, 0) == 1);
	fill(here, 0, sizeof(here), 9);
	CHECK(riowrite(e[1], here, sizeof(here), 4096, 0) == sizeof(here));
	CHECK(riowrite(e[1], here, 5000, (uintptr_t)other, 0) == 5000);
	CHECK(riowrite(e[1], here, 10, 4096 + sizeof(there) - 4, 0) == 4); /* as far as it goes */
	CHECK(riowrite(e[1], here, 10, 4096 + sizeof(there), 0) == 0 && riowrite(e[1], here, 10, 4095, 0) == 0);
	CHECK(rsend(e[1], "d", 1, 0) == 1 && rrecv(e[0], &b, 1, 0) == 1);
	CHECK(filled(there, 0, sizeof(there) - 4, 9) && filled(there + sizeof(there) - 4, 0, 4, 9) && filled(other, 0, 5000, 9));
	/* A place that is given up can be had again, and the old offset leads nowhere. */
	CHECK(!riounmap(e[0], other, sizeof(other)) && riounmap(e[0], other, sizeof(other)) == -1 && errno == EINVAL);
	CHECK(rsend(e[0], "u", 1, 0) == 1 && rrecv(e[1], &b, 1, 0) == 1 && riowrite(e[1], here, 1, (uintptr_t)other, 0) == 0);
	CHECK(riomap(e[0], other, 100, PROT_WRITE, 0, 1 << 20) == 1 << 20);
	CHECK(rsend(e[0], "a", 1, 0) == 1 && rrecv(e[1], &b, 1, 0) == 1 && riowrite(e[1], here + 50, 100, 1 << 20, 0) == 100);
	CHECK(rsend(e[1], "d", 1, 0) == 1 && rrecv(e[0], &b, 1, 0) == 1 && filled(other, 50, 100, 9));
	CHECK(!riounmap(e[0], there, sizeof(there)) && !rclose(e[0]) && !rclose(e[1]) && !rclose(l));
}

/* 100 connections at once, each with its own bytes. */
static void check_many(void)
{
	enum { N = 100, LEN = 20000 };
	static struct pollfd c[N], s[N];
	static size_t sent[N], got[N];
	static unsigned char b[LEN];
	int l = listener(7008), up = 0, done = 0, owner[N];

	for (int i = 0; i < N; i++) {
		c[i] = (struct pollfd){ .fd = begin(7008), .events = POLLOUT };
		owner[i] = -1;
	}
	for (up = 0; up < N; up++)
		CHECK((s[up].fd = raccept(l, NULL, NULL)) >= 0 && (s[up].events = POLLIN));
	while (done < N) {
		CHECK(rpoll(c, N, 0) >= 0);
		for (int i = 0; i < N; i++) {
			ssize_t n;

			if (!(c[i].revents & POLLOUT))
				continue;
			CHECK(!(c[i].revents & POLLERR));
			fill(b, sent[i], LEN - sent[i], i);
			if (!sent[i])
				b[0] = i; /* says whose they are */
			n = rsend(c[i].fd, b, LEN - sent[i], 0);
			CHECK(n > 0 || errno == EAGAIN);
			sent[i] += n > 0 ? n : 0;
			if (sent[i] == LEN)
				c[i].events = 0;
		}
		CHECK(rpoll(s, N, 0) >= 0);
		for (int i = 0; i < N; i++) {
			ssize_t n;

			if (!(s[i].revents & POLLIN))
				continue;
			n = rrecv(s[i].fd, b, sizeof(b), 0);
			CHECK(n > 0);
			if (owner[i] < 0) {
				owner[i] = b[0];
				b[0] = byte_at(0, owner[i]);
			}
			CHECK(filled(b, got[i], n, owner[i]));
			got[i] += n;
			done += got[i] == LEN;
		}
	}
	for (int i = 0; i < N; i++) {
		for (int k = 0; k < i; k++)
			CHECK(owner[k] != owner[i]);
		CHECK(!rclose(c[i].fd));
	}
	for (int i = 0; i < N; i++)
		CHECK(rrecv(s[i].fd, b, 1, 0) == 0 && !rclose(s[i].fd));
	CHECK(!rclose(l));
}

static void check_timeouts(void)
{
	struct timeval tv = { 0, 20000 };
	struct linger abrupt = { 1, 0 };
	int e[2], l = listener(7009);
	static char b[1 << 20];
	size_t all = 0;
	ssize_t n;
	char c;

	CHECK(!rsetsockopt(l, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)) && fails(raccept(l, NULL, NULL), EAGAIN) && !rclose(l));
	connected(7010, e);
	CHECK(!rsetsockopt(e[0], SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)) && fails(rrecv(e[0], &c, 1, 0), EAGAIN));
	CHECK(!rsetsockopt(e[0], SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv)));
	/* Nobody reads: when both ends' buffers are full it is over, at once or in several goes. */
	while ((n = rsend(e[0], b, sizeof(b), 0)) > 0)
		CHECK((all += n) < sizeof(b));
	CHECK(n == -1 && errno == EAGAIN);
	/* Breaking off is seen as such. */
	CHECK(!rsetsockopt(e[0], SOL_SOCKET, SO_LINGER, &abrupt, sizeof(abrupt)) && !rclose(e[0]));
	while (rrecv(e[1], b, sizeof(b), 0) > 0)
		;
	CHECK(errno == ECONNRESET && fails(rsend(e[1], b, 1, 0), EPIPE) && rrecv(e[1], b, 1, 0) == 0 && !rclose(e[1]));
}

struct half {
	int fd, seed;
	size_t len;
};

static void *sender(void *arg)
{
	struct half *h = arg;

	send_all(h->fd, 0, h->len, h->seed);
	return NULL;
}

static void *receiver(void *arg)
{
	struct half *h = arg;

	recv_all(h->fd, 0, h->len, h->seed);
	return NULL;
}

static void *closer(void *arg)
{
	int *e = arg;
	char c;

	CHECK(fails(rrecv(e[0], &c, 1, 0), EBADF));
	return NULL;
}

/* Both directions at once from threads of their own, and a socket that is closed under one
 * who reads. */
static void check_threads(void)
{
	enum { LEN = 5000000 };
	pthread_t t[4];
	struct half h[4];
	int e[2];

	connected(7011, e);
	h[0] = (struct half){ e[0], 1, LEN };
	h[1] = (struct half){ e[1], 1, LEN };
	h[2] = (struct half){ e[1], 2, LEN };
	h[3] = (struct half){ e[0], 2, LEN };
	for (int i = 0; i < 4; i++)
		CHECK(!pthread_create(&t[i], NULL, i & 1 ? receiver : sender, &h[i]));
	for (int i = 0; i < 4; i++)
		CHECK(!pthread_join(t[i], NULL));
	CHECK(!pthread_create(&t[0], NULL, closer, e));
	/* It may not sleep yet: then it finds no socket, which is EBADF, too. */
	CHECK(!rclose(e[0]) && !pthread_join(t[0], NULL) && !rclose(e[1]));
}

static volatile sig_atomic_t hits;

static void hit(int sig)
{
	(void)sig;
	hits++;
}

struct blocked {
	int fd, err, done;
	ssize_t got;
};

static void *block(void *arg)
{
	struct blocked *b = arg;
	char c;

	b->got = rrecv(b->fd, &c, 1, 0);
	b->err = errno;
	__atomic_store_n(&b->done, 1, __ATOMIC_RELEASE);
	return NULL;
}

/* Signals to one who reads: the handler's SA_RESTART decides, as with a kernel's socket. */
static void check_signals(void)
{
	struct sigaction sa = { .sa_handler = hit, .sa_flags = SA_RESTART };
	struct timeval minute = { 60, 0 };
	struct blocked b = { 0 };
	pthread_t t;
	int e[2];

	connected(7016, e);
	b.fd = e[0];
	CHECK(!sigaction(SIGUSR1, &sa, NULL) && !pthread_create(&t, NULL, block, &b));
	for (int i = 0; i < 100; i++) {
		CHECK(!pthread_kill(t, SIGUSR1));
		while (hits == i) {
			CHECK(!__atomic_load_n(&b.done, __ATOMIC_ACQUIRE));
			sched_yield();
		}
		usleep(100); /* it sleeps again, mostly */
	}
	CHECK(!__atomic_load_n(&b.done, __ATOMIC_ACQUIRE) && rsend(e[1], "x", 1, 0) == 1 && !pthread_join(t, NULL) && b.got == 1);

	for (int i = 0; i < 2; i++) {
		sa.sa_flags = i ? SA_RESTART : 0; /* with a timeout none is restarted */
		CHECK(!i || !rsetsockopt(e[0], SOL_SOCKET, SO_RCVTIMEO, &minute, sizeof(minute)));
		b.done = 0;
		CHECK(!sigaction(SIGUSR1, &sa, NULL) && !pthread_create(&t, NULL, block, &b));
		while (!__atomic_load_n(&b.done, __ATOMIC_ACQUIRE)) {
			CHECK(!pthread_kill(t, SIGUSR1));
			usleep(1000);
		}
		CHECK(!pthread_join(t, NULL) && b.got == -1 && b.err == EINTR);
	}
	CHECK(!rclose(e[0]) && !rclose(e[1]));
}

/* Small queues and buffers, so that credits and room run out all the time. */
static void check_small(void)
{
	struct sockaddr_in a = at("TAPVERBS_ADDR", 7012);
	struct half out = { 0, 5, 300000 }, in = { 0, 5, 300000 };
	int l = rsocket(AF_INET, SOCK_STREAM, 0), c = rsocket(AF_INET, SOCK_STREAM, 0), s;
	pthread_t t;

	for (int i = 0; i < 2; i++) {
		s = i ? l : c;

		CHECK(!set_int(s, SOL_RDMA, RDMA_SQSIZE, 1) && !set_int(s, SOL_RDMA, RDMA_RQSIZE, 1) && !set_int(s, SOL_RDMA, RDMA_INLINE, 0));
		CHECK(!set_int(s, SOL_SOCKET, SO_RCVBUF, i ? 77 : 1001) && !set_int(s, SOL_SOCKET, SO_SNDBUF, 1));
	}
	CHECK(!rbind(l, (struct sockaddr *)&a, sizeof(a)) && !rlisten(l, 1));
	CHECK(!rfcntl(c, F_SETFL, O_NONBLOCK) && fails(rconnect(c, (struct sockaddr *)&a, sizeof(a)), EINPROGRESS));
	CHECK((in.fd = raccept(l, NULL, NULL)) >= 0 && wait_for(c, POLLOUT) == POLLOUT && !rfcntl(c, F_SETFL, 0));
	CHECK(get_int(in.fd, SOL_RDMA, RDMA_RQSIZE) == 16);
	out.fd = c;
	for (int i = 0; i < 2; i++) {
		CHECK(!pthread_create(&t, NULL, sender, &out));
		receiver(&in);
		CHECK(!pthread_join(t, NULL));
		s = out.fd;
		out.fd = in.fd;
		in.fd = s;
	}
	CHECK(!rclose(out.fd) && !rclose(in.fd) && !rclose(l));
}

/* The path of a connection, given to another one, which does not look for one then. */
static void check_route(void)
{
	struct sockaddr_in a = at("TAPVERBS_ADDR", 7014);
	struct ibv_path_data path[2];
	socklen_t len = sizeof(path);
	int e[2], l, c, s;

	connected(7015, e);
	CHECK(!rgetsockopt(e[0], SOL_RDMA, RDMA_ROUTE, path, &len) && len == sizeof(path[0]) && path[0].path.pkey == 0xffff);
	CHECK(fails(rsetsockopt(e[0], SOL_RDMA, RDMA_ROUTE, path, len), EISCONN));
	l = listener(7014);
	c = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	CHECK(fails(rsetsockopt(c, SOL_RDMA, RDMA_ROUTE, path, len - 1), EINVAL) && !rsetsockopt(c, SOL_RDMA, RDMA_ROUTE, path, len));
	CHECK(fails(rconnect(c, (struct sockaddr *)&a, sizeof(a)), EINPROGRESS) && (s = raccept(l, NULL, NULL)) >= 0);
	CHECK(wait_for(c, POLLOUT) == POLLOUT);
	send_all(c, 0, 5000, 8);
	recv_all(s, 0, 5000, 8);
	CHECK(!rclose(c) && !rclose(s) && !rclose(l) && !rclose(e[0]) && !rclose(e[1]));
}

/* The files of /etc/rdma/rsocket, which are there (TestRsocketDefaults). */
static void check_defaults(void)
{
	int s = rsocket(AF_INET, SOCK_STREAM, 0), e[2];

	CHECK(get_int(s, SOL_SOCKET, SO_RCVBUF) == 30000 && get_int(s, SOL_SOCKET, SO_SNDBUF) == 20000);
	CHECK(get_int(s, SOL_RDMA, RDMA_SQSIZE) == 50 && get_int(s, SOL_RDMA, RDMA_RQSIZE) == 60);
	CHECK(get_int(s, SOL_RDMA, RDMA_INLINE) == 8 && get_int(s, SOL_RDMA, RDMA_IOMAPSIZE) == 5 && !rclose(s));
	connected(7016, e);
	CHECK(riomap(e[0], e, sizeof(e), PROT_WRITE, 0, 7) == 7 && !riounmap(e[0], e, sizeof(e)));
	CHECK(!rfcntl(e[0], F_SETFL, O_NONBLOCK));
	for (size_t sent = 0;;) {
		static char b[1000];
		ssize_t n = rsend(e[0], b, sizeof(b), 0);

		if (n < 0) {
			CHECK(errno == EAGAIN && sent <= 50000);
			break;
		}
		sent += n;
	}
	CHECK(!rclose(e[0]) && !rclose(e[1]));
}

static void check_v6(void)
{
	struct sockaddr_in6 a = at6("TAPVERBS_ADDR6", 7013), got;
	socklen_t len = sizeof(got);
	int l = rsocket(AF_INET6, SOCK_STREAM, 0), c = rsocket(AF_INET6, SOCK_STREAM | SOCK_NONBLOCK, 0), s;

	CHECK(!rbind(l, (struct sockaddr *)&a, sizeof(a)) && !rlisten(l, 1));
	CHECK(fails(rconnect(c, (struct sockaddr *)&a, sizeof(a)), EINPROGRESS));
	CHECK((s = raccept(l, (struct sockaddr *)&got, &len)) >= 0 && len == sizeof(got));
	CHECK(got.sin6_family == AF_INET6 && !memcmp(&got.sin6_addr, &a.sin6_addr, 16) && got.sin6_port);
	CHECK(wait_for(c, POLLOUT) == POLLOUT);
	send_all(c, 0, 50000, 6);
	recv_all(s, 0, 50000, 6);
	CHECK(!rclose(c) && !rclose(s) && !rclose(l));
}

static const struct {
	const char *name;
	void (*run)(void);
} checks[] = {
	{ "errors", check_errors }, { "refused", check_refused }, { "stream", check_stream }, { "full", check_full },
	{ "poll", check_poll }, { "iomap", check_iomap }, { "many", check_many }, { "timeouts", check_timeouts },
	{ "threads", check_threads }, { "signals", check_signals }, { "small", check_small }, { "v6", check_v6 }, { "route", check_route }, { "defaults", check_defaults }, { "dgram", check_dgram },
	{ "dgram-peer", check_dgram_peer }, { "killed", check_killed }, { "peers", check_peers },
};

int main(int argc, char **argv)
{
	CHECK(argc == 2);
	for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]); i++)
		if (!strcmp(argv[1], checks[i].name)) {
			checks[i].run();
			return 0;
		}
	fprintf(stderr, "no such check: %s\n", argv[1]);
	return 2;
}
