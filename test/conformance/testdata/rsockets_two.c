/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of rsockets: datagrams, and streams between two processes, ranks 0 and 1. The two
 * agree on when to go on by a TCP connection of the kernel's, over loopback. */
#include "rsockets.h"

static int tcp = -1;

static int rank(void)
{
	CHECK(getenv("TAPVERBS_RANK"));
	return atoi(getenv("TAPVERBS_RANK"));
}

/* meet returns when both ranks have called it. The first time it connects them. */
static void meet(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(18515), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	char c = 'm';

	if (tcp < 0 && rank() == 0) {
		int l = socket(AF_INET, SOCK_STREAM, 0), one = 1;

		CHECK(!setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)));
		CHECK(!bind(l, (struct sockaddr *)&a, sizeof(a)) && !listen(l, 1) && (tcp = accept(l, NULL, NULL)) >= 0 && !close(l));
	}
	while (tcp < 0) {
		int s = socket(AF_INET, SOCK_STREAM, 0);

		if (!connect(s, (struct sockaddr *)&a, sizeof(a))) {
			tcp = s;
		} else {
			CHECK(errno == ECONNREFUSED && !close(s)); /* nothing tells when another process listens */
			usleep(1000);
		}
	}
	CHECK(write(tcp, &c, 1) == 1 && read(tcp, &c, 1) == 1);
}

static int dgram_at(const struct sockaddr_in *a)
{
	int s = rsocket(AF_INET, SOCK_DGRAM, 0);

	CHECK(s >= 0 && !rbind(s, (const struct sockaddr *)a, sizeof(*a)));
	return s;
}

static int same(const struct sockaddr_in *a, const struct sockaddr_in *b)
{
	return a->sin_family == b->sin_family && a->sin_port == b->sin_port && a->sin_addr.s_addr == b->sin_addr.s_addr;
}

/* Datagrams of one device to itself. */
void check_dgram(void)
{
	struct sockaddr_in a = at("TAPVERBS_ADDR", 7101), b = at("TAPVERBS_ADDR", 7102), from, any = { .sin_family = AF_INET };
	unsigned char out[5000], in[5000];
	socklen_t len = sizeof(from);
	int s = dgram_at(&a), t = dgram_at(&b), u;
	struct pollfd p = { .fd = t, .events = POLLIN | POLLOUT };

	CHECK(fails(rsend(s, out, 1, 0), EDESTADDRREQ) && fails(rrecv(s, in, 1, MSG_DONTWAIT), EAGAIN));
	CHECK(fails(rlisten(s, 1), EOPNOTSUPP) && fails(raccept(s, NULL, NULL), EOPNOTSUPP));
	CHECK(fails(rsendto(s, out, sizeof(out), 0, (struct sockaddr *)&b, sizeof(b)), EMSGSIZE));
	CHECK(rpoll(&p, 1, 0) == 1 && p.revents == POLLOUT && get_int(s, SOL_SOCKET, SO_TYPE) == SOCK_DGRAM);
	/* The first goes by UDP, which tells of the queue pair; those behind the answer do not. */
	for (int i = 0; i < 50; i++) {
		size_t n = i * 40;

		fill(out, 0, n, i);
		CHECK(rsendto(s, out, n, 0, (struct sockaddr *)&b, sizeof(b)) == (ssize_t)n);
		CHECK(wait_for(t, POLLIN) == POLLIN);
		CHECK(rrecvfrom(t, in, sizeof(in), MSG_PEEK, NULL, NULL) == (ssize_t)n);
		len = sizeof(from);
		CHECK(rrecvfrom(t, in, sizeof(in), 0, (struct sockaddr *)&from, &len) == (ssize_t)n && filled(in, 0, n, i));
		CHECK(len == sizeof(from) && same(&from, &a));
		fill(out, 0, 30, ~i);
		CHECK(rsendto(t, out, 30, 0, (struct sockaddr *)&from, sizeof(from)) == 30);
		CHECK(rrecv(s, in, sizeof(in), 0) == 30 && filled(in, 0, 30, ~i));
	}
	/* What does not fit is cut off. */
	CHECK(rsendto(s, out, 30, 0, (struct sockaddr *)&b, sizeof(b)) == 30);
	{
		struct iovec iov[2] = { { in, 4 }, { in + 10, 6 } };
		struct msghdr m = { .msg_iov = iov, .msg_iovlen = 2, .msg_name = &from, .msg_namelen = sizeof(from) };

		CHECK(rrecvmsg(t, &m, MSG_TRUNC) == 30 && m.msg_flags == MSG_TRUNC && m.msg_namelen == sizeof(from));
		CHECK(!memcmp(in, out, 4) && !memcmp(in + 10, out + 4, 6));
	}
	/* One that is connected hears nobody else; one that is not bound has a port all the same. */
	CHECK(!rconnect(t, (struct sockaddr *)&a, sizeof(a)) && rsend(t, "c", 1, 0) == 1 && rrecv(s, in, 2, 0) == 1 && in[0] == 'c');
	CHECK(!rgetpeername(t, (struct sockaddr *)&from, &len) && same(&from, &a));
	CHECK((u = rsocket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0)) >= 0);
	CHECK(rsendto(u, "u", 1, 0, (struct sockaddr *)&b, sizeof(b)) == 1);
	CHECK(rsendto(u, "v", 1, 0, (struct sockaddr *)&a, sizeof(a)) == 1);
	len = sizeof(from);
	CHECK(rrecvfrom(s, in, 2, 0, (struct sockaddr *)&from, &len) == 1 && in[0] == 'v' && from.sin_addr.s_addr == a.sin_addr.s_addr && from.sin_port);
	CHECK(rsend(t, "w", 1, 0) == 1 && rrecv(s, in, 2, 0) == 1 && in[0] == 'w' && fails(rrecv(t, in, 1, MSG_DONTWAIT), EAGAIN));
	CHECK(!rclose(u) && !rclose(s) && !rclose(t));
	/* The port is free again; a socket of any address hears what is for one of them. */
	any.sin_port = htons(7101);
	s = dgram_at(&any);
	t = dgram_at(&b);
	CHECK(rsendto(t, "any", 3, 0, (struct sockaddr *)&a, sizeof(a)) == 3);
	len = sizeof(from);
	CHECK(rrecvfrom(s, in, 5, 0, (struct sockaddr *)&from, &len) == 3 && same(&from, &b));
	CHECK(rsendto(s, "back", 4, 0, (struct sockaddr *)&b, sizeof(b)) == 4);
	len = sizeof(from);
	CHECK(rrecvfrom(t, in, 5, 0, (struct sockaddr *)&from, &len) == 4 && same(&from, &a));
	CHECK(!rshutdown(s, SHUT_RD) || errno == ENOTCONN);
	CHECK(rrecv(s, in, 1, 0) == 0 && !rclose(s) && !rclose(t));
}

/* Datagrams between two processes, over IPv4 and IPv6. One is under way at a time, and the
 * two agree before the first, so none is lost. */
void check_dgram_peer(void)
{
	unsigned char out[1500], in[1500];

	for (int v6 = 0; v6 < 2; v6++) {
		struct sockaddr_in a4 = at("TAPVERBS_ADDR", 7103), p4 = at("TAPVERBS_PEER", 7103);
		struct sockaddr_in6 a6 = at6("TAPVERBS_ADDR6", 7103), p6 = at6("TAPVERBS_PEER6", 7103);
		struct sockaddr *a = v6 ? (void *)&a6 : (void *)&a4, *p = v6 ? (void *)&p6 : (void *)&p4;
		socklen_t len = v6 ? sizeof(a6) : sizeof(a4), n;
		struct sockaddr_storage from;
		int s = rsocket(v6 ? AF_INET6 : AF_INET, SOCK_DGRAM, 0);

		CHECK(s >= 0 && !rbind(s, a, len));
		meet();
		for (int i = 0; i < 200; i++) {
			size_t size = 1 + i * 7;

			fill(out, 0, size, rank() + i);
			if (rank() == 1)
				CHECK(rsendto(s, out, size, 0, p, len) == (ssize_t)size);
			n = sizeof(from);
			CHECK(rrecvfrom(s, in, sizeof(in), 0, (struct sockaddr *)&from, &n) == (ssize_t)size && filled(in, 0, size, !rank() + i));
			CHECK(n == len);
			if (v6)
				CHECK(!memcmp(&((struct sockaddr_in6 *)&from)->sin6_addr, &p6.sin6_addr, 16) && ((struct sockaddr_in6 *)&from)->sin6_port == p6.sin6_port);
			else
				CHECK(same((struct sockaddr_in *)&from, &p4));
			if (rank() == 0)
				CHECK(rsendto(s, out, size, 0, p, len) == (ssize_t)size);
		}
		meet();
		CHECK(!rclose(s));
	}
}

/* Streams between two processes: IPv4 and IPv6, both ways, in pieces of many sizes. */
void check_peers(void)
{
	for (int v6 = 0; v6 < 2; v6++) {
		struct sockaddr_in a4 = at("TAPVERBS_ADDR", 7104), p4 = at("TAPVERBS_PEER", 7104);
		struct sockaddr_in6 a6 = at6("TAPVERBS_ADDR6", 7104), p6 = at6("TAPVERBS_PEER6", 7104);
		socklen_t len = v6 ? sizeof(a6) : sizeof(a4);
		int l = rsocket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM, 0), s;
		char c;

		if (rank() == 0) {
			CHECK(!rbind(l, v6 ? (void *)&a6 : (void *)&a4, len) && !rlisten(l, 3));
			meet();
			CHECK((s = raccept(l, NULL, NULL)) >= 0 && !rclose(l));
		} else {
			s = l;
			meet();
			CHECK(!rconnect(s, v6 ? (void *)&p6 : (void *)&p4, len));
		}
		for (size_t size = 1, at = 0; size < 3000000; at += size, size = size * 3 + 1) {
			if (rank() == 0) {
				send_all(s, at, size, 7);
				recv_all(s, at, size, 8);
			} else {
				recv_all(s, at, size, 7);
				send_all(s, at, size, 8);
			}
		}
		if (rank() == 0)
			CHECK(!rclose(s));
		else
			CHECK(rrecv(s, &c, 1, 0) == 0 && !rclose(s));
	}
}

/* The peer is killed: a keepalive finds out while nobody sends anything. */
void check_killed(void)
{
	struct sockaddr_in a = at("TAPVERBS_ADDR", 7105), p = at("TAPVERBS_PEER", 7105);
	int l, s, status;
	pid_t child;
	char c;

	if (rank() == 1) {
		meet();
		CHECK((child = fork()) >= 0);
		if (!child) {
			CHECK((s = rsocket(AF_INET, SOCK_STREAM, 0)) >= 0 && !rconnect(s, (struct sockaddr *)&p, sizeof(p)));
			CHECK(rsend(s, "k", 1, 0) == 1 && rrecv(s, &c, 1, 0) == 1);
			kill(getpid(), SIGKILL);
		}
		CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
		meet();
		return;
	}
	CHECK((l = rsocket(AF_INET, SOCK_STREAM, 0)) >= 0 && !set_int(l, SOL_SOCKET, SO_KEEPALIVE, 1) && !set_int(l, IPPROTO_TCP, TCP_KEEPIDLE, 1));
	CHECK(!rbind(l, (struct sockaddr *)&a, sizeof(a)) && !rlisten(l, 1));
	meet();
	CHECK((s = raccept(l, NULL, NULL)) >= 0 && rrecv(s, &c, 1, 0) == 1 && rsend(s, "k", 1, 0) == 1);
	CHECK(fails(rrecv(s, &c, 1, 0), ETIMEDOUT));
	CHECK(fails(rsend(s, &c, 1, MSG_NOSIGNAL), EPIPE) && rrecv(s, &c, 1, 0) == 0 && wait_for(s, POLLIN) & POLLHUP);
	CHECK(!rclose(s) && !rclose(l));
	meet();
}
