/* SPDX-License-Identifier: Apache-2.0
 *
 * Is loaded before rdma-core's examples (LD_PRELOAD), here and in the guest. They give up when a
 * peer has not answered for half a second, and have no option for that; an emulated guest on
 * a busy machine is away for longer. With this it is some ten seconds. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>

#define TIMEOUT 18 /* 4.096 us * 2^18: a second, seven times */

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	int (*next)(struct ibv_qp *, struct ibv_qp_attr *, int) =
		(int (*)(struct ibv_qp *, struct ibv_qp_attr *, int))dlsym(RTLD_NEXT, "ibv_modify_qp");

	if (mask & IBV_QP_TIMEOUT)
		attr->timeout = TIMEOUT;
	return next(qp, attr, mask);
}
