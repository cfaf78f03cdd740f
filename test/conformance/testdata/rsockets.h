/* SPDX-License-Identifier: Apache-2.0
 *
 * What the checks of rsockets share: addresses, connected pairs, bytes that can be told. */
#ifndef CONFORMANCE_RSOCKETS_H
#define CONFORMANCE_RSOCKETS_H
#include "verbs.h"

#include <infiniband/sa.h>
#include <netinet/tcp.h>
#include <rdma/rsocket.h>
#include <sys/uio.h>

/* at is an address of this process's engine (or of the peer's, with TAPVERBS_PEER). */
static inline struct sockaddr_in at(const char *env, int port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };

	CHECK(getenv(env) && inet_pton(AF_INET, getenv(env), &a.sin_addr) == 1);
	return a;
}

static inline struct sockaddr_in6 at6(const char *env, int port)
{
	struct sockaddr_in6 a = { .sin6_family = AF_INET6, .sin6_port = htons(port) };

	CHECK(getenv(env) && inet_pton(AF_INET6, getenv(env), &a.sin6_addr) == 1);
	return a;
}

static inline int fails(ssize_t rc, int err)
{
	if (rc == -1 && errno == err)
		return 1;
	fprintf(stderr, "gave %zd, errno %d, not errno %d\n", rc, errno, err);
	return 0;
}

/* byte_at is what is at this place of a stream. */
static inline unsigned char byte_at(size_t i, int seed)
{
	return (i * 2654435761u >> 11) ^ i ^ seed;
}

static inline void fill(unsigned char *p, size_t from, size_t n, int seed)
{
	for (size_t i = 0; i < n; i++)
		p[i] = byte_at(from + i, seed);
}

static inline int filled(const unsigned char *p, size_t from, size_t n, int seed)
{
	for (size_t i = 0; i < n; i++)
		if (p[i] != byte_at(from + i, seed))
			return 0;
	return 1;
}

static inline int set_int(int fd, int level, int name, int v)
{
	return rsetsockopt(fd, level, name, &v, sizeof(v));
}

static inline int get_int(int fd, int level, int name)
{
	int v = -1;
	socklen_t len = sizeof(v);

	CHECK(!rgetsockopt(fd, level, name, &v, &len) && len == sizeof(v));
	return v;
}

/* wait_for waits until the socket has one of the events. */
static inline short wait_for(int fd, short events)
{
	struct pollfd p = { .fd = fd, .events = events };

	CHECK(rpoll(&p, 1, -1) == 1);
	return p.revents;
}

static inline int listener(int port)
{
	struct sockaddr_in a = at("TAPVERBS_ADDR", port);
	int l = rsocket(AF_INET, SOCK_STREAM, 0);

	CHECK(l >= 0 && !rbind(l, (struct sockaddr *)&a, sizeof(a)) && !rlisten(l, 128));
	return l;
}

/* begin begins to connect without waiting. */
static inline int begin(int port)
{
	struct sockaddr_in a = at("TAPVERBS_ADDR", port);
	int c = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);

	CHECK(c >= 0);
	CHECK(!rconnect(c, (struct sockaddr *)&a, sizeof(a)) || errno == EINPROGRESS);
	return c;
}

/* connected makes a pair on one device. Both ends wait from then on. */
static inline void connected(int port, int e[2])
{
	int l = listener(port);

	e[0] = begin(port);
	CHECK((e[1] = raccept(l, NULL, NULL)) >= 0);
	CHECK(wait_for(e[0], POLLOUT) == POLLOUT && get_int(e[0], SOL_SOCKET, SO_ERROR) == 0);
	CHECK(!rfcntl(e[0], F_SETFL, 0) && !rclose(l));
}

/* send_all and recv_all move n bytes of a stream, from a place in it on. */
static inline void send_all(int fd, size_t from, size_t n, int seed)
{
	static __thread unsigned char b[100000];

	while (n) {
		size_t part = n < sizeof(b) ? n : sizeof(b);

		fill(b, from, part, seed);
		CHECK(rsend(fd, b, part, 0) == (ssize_t)part);
		from += part;
		n -= part;
	}
}

static inline void recv_all(int fd, size_t from, size_t n, int seed)
{
	static __thread unsigned char b[77777];

	while (n) {
		ssize_t got = rrecv(fd, b, n < sizeof(b) ? n : sizeof(b), 0);

		CHECK(got > 0 && filled(b, from, got, seed));
		from += got;
		n -= got;
	}
}

void check_dgram(void);
void check_dgram_peer(void);
void check_killed(void);
void check_peers(void);

#endif
