/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A ping-pong over TCP, as plain as it can be: tcpping poll|sleep SIZE COUNT PORT [ADDRESS]
 *
 * Without an address it is the server. With "poll" both ends spin in recv(2) with
 * MSG_DONTWAIT, with "sleep" they block in it. The client prints p50, p99, p99.9 and mean of
 * the half round trips in microseconds.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

/* 0 at the end of the connection. */
static int take(int fd, char *b, size_t n, int flags)
{
	size_t got = 0;

	while (got < n) {
		ssize_t k = recv(fd, b + got, n - got, flags);

		if (k == 0)
			return 0;
		if (k < 0 && errno != EAGAIN && errno != EINTR)
			die("recv");
		if (k > 0)
			got += k;
	}
	return 1;
}

static void give(int fd, const char *b, size_t n, int flags)
{
	while (n > 0) {
		ssize_t k = send(fd, b, n, flags);

		if (k < 0 && errno != EAGAIN && errno != EINTR)
			die("send");
		if (k > 0) {
			b += k;
			n -= k;
		}
	}
}

static int less(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	struct sockaddr_in a = {.sin_family = AF_INET};
	int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);

	if (argc < 5 || argc > 6) {
		fprintf(stderr, "usage: tcpping poll|sleep SIZE COUNT PORT [ADDRESS]\n");
		return 2;
	}
	int flags = strcmp(argv[1], "poll") ? 0 : MSG_DONTWAIT;
	size_t size = atol(argv[2]), count = atol(argv[3]);
	char *b = calloc(1, size);

	a.sin_port = htons(atoi(argv[4]));
	if (argc == 5) {
		int l = fd;

		setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
		if (bind(l, (struct sockaddr *)&a, sizeof(a)) || listen(l, 1))
			die("listen");
		fd = accept(l, NULL, NULL);
		if (fd < 0)
			die("accept");
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		while (take(fd, b, size, flags))
			give(fd, b, size, flags);
		return 0;
	}
	if (!inet_aton(argv[5], &a.sin_addr) || connect(fd, (struct sockaddr *)&a, sizeof(a)))
		die("connect");
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));

	size_t warm = count / 10;
	double *t = calloc(count, sizeof(*t)), sum = 0, last = now();

	for (size_t i = 0; i < warm + count; i++) {
		give(fd, b, size, flags);
		if (!take(fd, b, size, flags))
			die("the server has gone");
		double n = now();

		if (i >= warm)
			sum += t[i - warm] = (n - last) / 2;
		last = n;
	}
	qsort(t, count, sizeof(*t), less);
	printf("%.3f %.3f %.3f %.3f\n", t[count / 2], t[count * 99 / 100], t[count * 999 / 1000], sum / count);
	return 0;
}
