/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside librdmacm.so.1. The engine has identifiers and their states, and answers as the
 * kernel's RDMA CM does; here is what librdmacm does by itself: the program's structs, the
 * transitions of queue pairs, events that wait to be acknowledged, calls that wait.
 *
 * cm_mutex guards the devices and what counts events: taking an event and counting it are
 * one step, so that who destroys an identifier knows how many to wait for. It is not held
 * while anything waits but for cm_acked. */
#ifndef TAPVERBS_CM_H
#define TAPVERBS_CM_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <infiniband/ib.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#include "../verbs/dv.h"

#ifndef AF_IB
#define AF_IB 27
#endif

#define HIDDEN __attribute__((visibility("hidden")))

/* A device that is open, for as long as the process lives or until it is gone. */
struct cm_device {
	struct ibv_context *verbs;
	struct ibv_pd *pd; /* for programs that bring none */
	struct ibv_xrcd *xrcd;
	const struct tv_dv *dv;
	tv_handle ctx;
	uint32_t max_responder, max_initiator;
	int refs; /* identifiers and channels */
};

struct cm_channel {
	struct rdma_event_channel ch; /* first */
	struct cm_device *dev;
	tv_handle handle;
};

struct cm_group {
	struct cm_id *id;
	struct cm_group *next;
	void *context;
	tv_handle handle;
	struct sockaddr_storage addr;
	union ibv_gid mgid;
	bool send_only, attached;
	uint32_t delivered, acked;
};

struct cm_id {
	struct rdma_cm_id id; /* first */
	struct cm_device *dev;
	tv_handle handle;
	bool sync;         /* its calls wait, on a channel of its own */
	bool failed;       /* connecting did, here: what the other end says to that is no news */
	bool ready;        /* the queue pair is, from the request or the response on */
	uint8_t responder, initiator;
	uint32_t delivered, acked;
	struct cm_group *groups;
	struct ibv_qp_init_attr *qp_attr; /* of a passive endpoint, for its requests */
	void *connect;                    /* private data of rdma_create_ep */
	uint8_t connect_len;
	struct ibv_ece ece, remote_ece;
	struct ibv_sa_path_rec path;
	bool own_srq;
};

struct cm_event {
	struct rdma_cm_event event; /* first */
	struct cm_id *counted;      /* whose it is until it is acknowledged; NULL: the group's */
	struct cm_group *group;
	uint8_t private_data[TV_CM_PRIVATE];
};

/* device.c */
HIDDEN extern pthread_mutex_t cm_mutex;
HIDDEN extern pthread_cond_t cm_acked;
HIDDEN struct cm_device *cm_device_get(void); /* NULL with errno */
HIDDEN void cm_device_ref(struct cm_device *d);
HIDDEN void cm_device_put(struct cm_device *d);
HIDDEN struct ibv_xrcd *cm_device_xrcd(struct cm_device *d);

/* address.c */
HIDDEN int cm_addr_in(struct tv_cm_addr *to, const struct sockaddr *from);
HIDDEN int cm_query(struct cm_id *id);

/* id.c */
HIDDEN int cm_id_new(struct rdma_event_channel *ch, enum rdma_port_space ps, enum ibv_qp_type type, void *context, struct rdma_cm_id **out);
HIDDEN struct cm_id *cm_id_of_request(struct cm_id *listener, tv_handle handle);
HIDDEN void cm_settle(const uint32_t *delivered, const uint32_t *acked);

/* event.c */
HIDDEN int cm_wait(struct cm_id *id);

/* connect.c */
HIDDEN int cm_connected(struct cm_id *id);

/* qp.c */
HIDDEN int cm_modify(struct cm_id *id, enum ibv_qp_state state, const uint8_t *depth);
HIDDEN int cm_modify_err(struct cm_id *id);

/* multicast.c */
HIDDEN int cm_joined(struct cm_group *g, const struct rdma_cm_event *ev);
HIDDEN void cm_leave_all(struct cm_id *id);

static inline struct cm_id *cm_id(struct rdma_cm_id *id) { return (struct cm_id *)id; }
static inline struct tv_engine *cm_engine(struct cm_id *id) { return id->dev->dv->engine; }

/* cm_fail is how calls of this library fail. */
static inline int cm_fail(int err)
{
	if (!err)
		return 0;
	errno = err;
	return -1;
}

/* CM_CALL has the engine do something, as errno. In a child after fork there is none. */
#define CM_CALL(id, fn, ...) ((id)->dev->dv->forked() ? EIO : cm_engine(id)->fn((id)->handle, ##__VA_ARGS__))

#endif
