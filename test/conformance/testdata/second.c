/* SPDX-License-Identifier: Apache-2.0
 *
 * Is loaded before both ends of perftest -R (LD_PRELOAD). Its server listens a second time when
 * the first connection has been used to tell what the others will be, and its client
 * connects for the second time without asking whether it does. Refused, as by any device, the
 * client destroys what it goes on to use. Here it waits until the server listens again. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const char *mark(void)
{
	static char path[4096];

	snprintf(path, sizeof(path), "%s/second", getenv("CONFORMANCE_OUT"));
	return path;
}

int rdma_listen(struct rdma_cm_id *id, int backlog)
{
	static int times;
	int (*next)(struct rdma_cm_id *, int) = (int (*)(struct rdma_cm_id *, int))dlsym(RTLD_NEXT, "rdma_listen");
	int rc = next(id, backlog);

	if (!rc && ++times == 2)
		close(open(mark(), O_WRONLY | O_CREAT, 0600));
	return rc;
}

int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *p)
{
	static int times;
	int (*next)(struct rdma_cm_id *, struct rdma_conn_param *) =
		(int (*)(struct rdma_cm_id *, struct rdma_conn_param *))dlsym(RTLD_NEXT, "rdma_connect");

	if (++times > 1)
		while (access(mark(), F_OK))
			usleep(1000); /* nothing tells when another process listens */
	return next(id, p);
}
