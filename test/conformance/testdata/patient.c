/* SPDX-License-Identifier: Apache-2.0
 *
 * Is loaded before fio (LD_PRELOAD). Its sender sends half a second after the connection is made,
 * in the hope that the other end has posted receives by then, and its two ends tell each other not
 * to ask again if not (rnr_retry_count 0): on a busy machine the connection fails, on any device.
 * Here they ask as often as is needed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <rdma/rdma_cma.h>

typedef int (*call)(struct rdma_cm_id *, struct rdma_conn_param *);

int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *p)
{
	p->rnr_retry_count = 7;
	return ((call)dlsym(RTLD_NEXT, "rdma_connect"))(id, p);
}

int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *p)
{
	p->rnr_retry_count = 7;
	return ((call)dlsym(RTLD_NEXT, "rdma_accept"))(id, p);
}
