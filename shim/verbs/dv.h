/* SPDX-License-Identifier: Apache-2.0
 *
 * What libtapverbs.so.1 finds in a device of this library. libibverbs exports what
 * rdma-core's does and no more, so the way is a member of struct ibv_device that
 * rdma-core leaves NULL in each of its devices: device->_ops._dummy1(device, TV_DV_ASK)
 * gives the address of a struct tv_dv. */
#ifndef TAPVERBS_PRIVATE_DV_H
#define TAPVERBS_PRIVATE_DV_H

#include <infiniband/verbs.h>

#include "engine.h"

#define TV_DV_MAGIC 0x74617076657262ull /* "tapverb" */
#define TV_DV_ASK 0x7476                /* where once a descriptor was expected */

/* What a parent domain's allocators are told; see tapverbs_dv.h. */
enum tv_resource { TV_RESOURCE_QP = 1, TV_RESOURCE_CQ, TV_RESOURCE_SRQ };

struct tv_dv {
	uint64_t magic;
	uint32_t abi; /* TV_ABI: the libraries are of one build */
	struct tv_engine *engine;
	int (*lost)(struct ibv_context *ctx); /* EIO: forked, or the device is gone; else 0 */
	int (*forked)(void);                  /* for what is to work on a device that is gone */
	/* Objects by the engine's names for them. */
	tv_handle (*ctx)(struct ibv_context *ctx);
	tv_handle (*pd)(struct ibv_pd *pd);
	tv_handle (*mr)(struct ibv_mr *mr);
	tv_handle (*qp)(struct ibv_qp *qp);

	/* Registering, and a word of libtapverbs's for each region. */
	struct ibv_mr *(*reg_mr)(struct ibv_pd *pd, void *addr, size_t length, int access);
	int (*dereg_mr)(struct ibv_mr *mr);
	void **(*mr_note)(struct ibv_mr *mr);
	int (*mr_unacked)(struct ibv_mr *mr); /* whether dereg_mr would wait */

	/* Events of regions. Those that were taken are acknowledged before the region ends. */
	struct tv_dv_channel *(*channel_new)(struct ibv_context *ctx, uint64_t mask);
	int (*get_event)(struct tv_dv_channel *ch, struct tv_dv_event *ev, struct ibv_mr **mr);
	void (*ack_event)(struct ibv_mr *mr);
	int (*channel_end)(struct tv_dv_channel *ch);
};

/* Begins as struct tapverbs_dv_event_channel does. */
struct tv_dv_channel {
	struct ibv_context *context;
	int fd;
	tv_handle handle;
};

#endif
