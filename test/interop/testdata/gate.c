/* SPDX-License-Identifier: Apache-2.0
 *
 * Is loaded before perftest's clients with -R (LD_PRELOAD). Their server listens again for each
 * queue pair's connection, at a time that they do not ask about. The second connection waits
 * until whoever listens at TCP port 18516 of this namespace has accepted, and closed. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <rdma/rdma_cma.h>
#include <unistd.h>

static void wait_for_word(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(18516), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	char c;

	if (!connect(s, (struct sockaddr *)&a, sizeof(a)))
		while (read(s, &c, 1) < 0 && errno == EINTR)
			;
	close(s);
}

int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *p)
{
	int (*next)(struct rdma_cm_id *, struct rdma_conn_param *) =
		(int (*)(struct rdma_cm_id *, struct rdma_conn_param *))dlsym(RTLD_NEXT, "rdma_connect");
	static int calls;

	if (calls++ == 1)
		wait_for_word();
	return next(id, p);
}
