/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside libibverbs.so.1: the library's objects, which begin with the public ones of
 * infiniband/verbs.h, and what its files use of each other.
 *
 * Locks. A queue's lock guards the driver's side of its ring: sq.lock, rq.lock,
 * srq.rq.lock, cq.lock. Calls that change rings from the driver's side inside the
 * engine (destroying or resetting a QP, resizing a CQ) are made with them held. The
 * engine never calls out with a lock of its own held, so they cannot meet. Order:
 * sq, rq, then CQs by address.
 */
#ifndef TAPVERBS_TV_H
#define TAPVERBS_TV_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <infiniband/verbs.h>

#include "dv.h"
#include "engine.h"
#include "ring.h"

/* verbs.h wraps these names in macros for its users. */
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

/* Names that IBVERBS_1.0 has too (compat.c): this one is the default. */
#define TV_LATEST(name) __asm__(".symver " #name "," #name "@@@IBVERBS_1.1")

#define TV_UNLIKELY(x) __builtin_expect(!!(x), 0)

#define tv_container(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))

/* A device of the list. There is one for a process; the list and the contexts hold
 * references. */
struct tv_dev {
	struct ibv_device ibv; /* first */
	int refs;              /* guarded by tv_mutex */
	int opens;             /* contexts; guarded by tv_mutex */
	uint32_t gone;         /* set by the engine */
	tv_handle handle;      /* 0: open elsewhere when it was listed */
	uint64_t guid;         /* host order */
};

struct tv_ctx {
	struct tv_dev *dev;
	tv_handle handle;
	pthread_mutex_t events; /* taking an event and counting it are one step */
	pthread_cond_t acked;   /* with events: an event of a region was acknowledged */
	struct tv_ctx *next;    /* guarded by tv_mutex */
	struct verbs_context vctx;
};

/* FLUSH, which the headers of rdma-core 44 do not have yet. */
enum { TV_WR_FLUSH = 14, TV_QP_EX_WITH_FLUSH = 1 << 11, TV_ACCESS_FLUSH_GLOBAL = 1 << 8, TV_ACCESS_FLUSH_PERSISTENT = 1 << 9 };
enum { TV_ODP_SUPPORT_FLUSH = 1 << 6, TV_ODP_SUPPORT_ATOMIC_WRITE = 1 << 7 };
#define TV_DEVICE_FLUSH_GLOBAL (1ULL << 38)
#define TV_DEVICE_FLUSH_PERSISTENT (1ULL << 39)
#define TV_DEVICE_ATOMIC_WRITE (1ULL << 40)

/* Where its builder is, behind what was the last one: programs that were built with
 * newer headers look there. */
typedef void (*tv_wr_flush)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, size_t len, uint8_t type, uint8_t level);
enum { TV_WR_FLUSH_AT = offsetof(struct ibv_qp_ex, wr_atomic_write) + sizeof(void (*)(void)) };

/* The lock of a queue. It does nothing where the program has promised to use the queue
 * from one thread at a time: with a thread domain, or IBV_CREATE_CQ_ATTR_SINGLE_THREADED. */
struct tv_lock {
	pthread_mutex_t mutex;
	bool off;
};

static inline void tv_lock(struct tv_lock *l)
{
	if (!l->off)
		pthread_mutex_lock(&l->mutex);
}

static inline void tv_unlock(struct tv_lock *l)
{
	if (!l->off)
		pthread_mutex_unlock(&l->mutex);
}

static inline void tv_lock_init(struct tv_lock *l, bool off)
{
	pthread_mutex_init(&l->mutex, NULL);
	l->off = off;
}

static inline void tv_lock_end(struct tv_lock *l) { pthread_mutex_destroy(&l->mutex); }

/* A ring, and what the driver remembers of it. */
struct tv_ring {
	char *base;
	uint32_t mask, stride;
};

/* A thread domain. */
struct tv_td {
	struct ibv_td ibv;
	int refs; /* parent domains; atomic */
};

/* What a parent domain has beside what a domain has. */
struct tv_parent {
	struct tv_td *td;
	void *(*alloc)(struct ibv_pd *, void *user, size_t size, size_t align, uint64_t type);
	void (*free)(struct ibv_pd *, void *user, void *mem, uint64_t type);
	void *user;
	int cqs; /* made in it; the engine counts the other objects; atomic */
};

struct tv_pd {
	struct ibv_pd ibv;
	tv_handle handle;
	struct tv_parent *parent; /* NULL if it is an ordinary one */
};

struct tv_dm {
	struct ibv_dm ibv;
	tv_handle handle;
	char *addr;
	uint64_t length;
};

struct tv_mr {
	struct ibv_mr ibv;
	tv_handle handle;
	uint32_t delivered, acked; /* events; guarded by ctx->events */
	void *note;                /* libtapverbs.so.1's */
};

struct tv_mw {
	struct ibv_mw ibv;
	tv_handle handle;
};

struct tv_ah {
	struct ibv_ah ibv;
	tv_handle handle;
	uint32_t number; /* in send WQEs */
};

struct tv_channel {
	struct ibv_comp_channel ibv;
	tv_handle handle;
};

struct tv_cq {
	union {
		struct ibv_cq ibv;
		struct ibv_cq_ex ex;
	};
	struct tv_lock lock;
	struct tv_ring ring;
	tv_handle handle;
	uint32_t comp_delivered, async_delivered; /* guarded by ctx->events */
	/* Of ibv_start_poll: the lock is held until ibv_end_poll. */
	const struct tv_cqe *cur;
	uint32_t next;
	int64_t wall; /* wall clock minus the engine's, in ns */
	bool is_ex;
	bool custom;           /* of a parent domain's allocator */
	struct ibv_pd *parent; /* NULL if it was made in none */
};

struct tv_rq {
	struct tv_lock lock;
	struct tv_ring ring; /* base is NULL with an SRQ */
	uint32_t max_sge;
};

struct tv_xrcd {
	struct ibv_xrcd ibv;
	tv_handle handle;
};

struct tv_srq {
	struct ibv_srq ibv;
	struct tv_rq rq;
	tv_handle handle;
	uint32_t num; /* of XRC; else 0 */
	bool custom; /* of a parent domain's allocator */
	uint32_t delivered;
};

struct tv_qp {
	union {
		struct ibv_qp ibv;
		struct ibv_qp_ex ex;
		char room[TV_WR_FLUSH_AT + sizeof(tv_wr_flush)];
	};
	struct tv_lock lock; /* of the send queue */
	struct tv_ring sq;
	char *bells; /* the engine's page of doorbells */
	uint32_t bell;
	uint32_t max_sge, max_inline, ops;
	tv_handle handle;
	struct tv_rq rq;
	struct ibv_qp_cap cap;
	int sig_all;
	uint32_t delivered;
	/* Of ibv_wr_start: the lock is held until ibv_wr_complete or ibv_wr_abort. */
	uint32_t wr_prod;
	struct tv_send_wqe *wr_cur;
	int wr_err;
	bool is_ex;
	bool custom; /* of a parent domain's allocator */
};

/* load.c */
extern struct tv_engine *tv_e; /* NULL until the first device list */
extern pthread_mutex_t tv_mutex;
extern int tv_forked;       /* this process is a child of the one that has the engine */
extern uint32_t tv_trouble; /* it is, or a device is gone: the data path looks closer */
struct ibv_device **tv_list(int *n);
int tv_dev_open(struct tv_dev *dev);
void tv_dev_put(struct tv_dev *dev);

/* What calls that enter the engine begin with. */
#define TV_ALIVE(fail)                                                                             \
	do {                                                                                       \
		if (TV_UNLIKELY(tv_forked)) {                                                      \
			errno = EIO;                                                               \
			return fail;                                                               \
		}                                                                                  \
	} while (0)

/* What calls begin with that have no use for a device that is gone. Those that end
 * objects, and those that take events and completions, have. */
#define TV_THERE(ctx, fail)                                                                        \
	do {                                                                                       \
		if (tv_lost(ctx)) {                                                                \
			errno = EIO;                                                               \
			return fail;                                                               \
		}                                                                                  \
	} while (0)

/* dv.c */
struct ibv_context *tv_dv_ask(struct ibv_device *d, int what);

/* dvevents.c */
struct tv_dv_channel *tv_dv_channel_new(struct ibv_context *, uint64_t mask);
int tv_dv_get_event(struct tv_dv_channel *, struct tv_dv_event *, struct ibv_mr **);
void tv_dv_ack_event(struct ibv_mr *);
int tv_dv_channel_end(struct tv_dv_channel *);
void tv_mr_settle(struct tv_mr *);
int tv_mr_unacked(struct ibv_mr *);

/* domain.c */
struct ibv_td *tv_alloc_td(struct ibv_context *, struct ibv_td_init_attr *);
int tv_dealloc_td(struct ibv_td *);
struct ibv_pd *tv_alloc_parent_domain(struct ibv_context *, struct ibv_parent_domain_init_attr *);
void tv_parent_end(struct tv_parent *p);
void *tv_object(struct ibv_pd *pd, size_t size, enum tv_resource type, bool *custom);
void tv_object_free(struct ibv_pd *pd, void *mem, enum tv_resource type, bool custom);

/* import.c */
void tv_ctx_list(struct tv_ctx *c);
void tv_ctx_unlist(struct tv_ctx *c);

/* mr.c, dm.c. Optional access flags that mean nothing here are there to be ignored. */
#define TV_IGNORED_ACCESS (IBV_ACCESS_OPTIONAL_RANGE & ~IBV_ACCESS_RELAXED_ORDERING)
struct tv_mr *tv_mr_begin(struct tv_reg *r);
struct ibv_mr *tv_mr_end(struct tv_mr *mr, struct ibv_pd *pd, int rc, const struct tv_reg *r, void *addr, size_t length);
struct ibv_mr *tv_alloc_null_mr(struct ibv_pd *);
int tv_advise_mr(struct ibv_pd *, enum ibv_advise_mr_advice, uint32_t flags, struct ibv_sge *, uint32_t n);
struct ibv_dm *tv_alloc_dm(struct ibv_context *, struct ibv_alloc_dm_attr *);
int tv_free_dm(struct ibv_dm *);
struct ibv_mr *tv_reg_dm_mr(struct ibv_pd *, struct ibv_dm *, uint64_t offset, size_t length, unsigned int access);
struct ibv_dm *tv_dm_new(struct ibv_context *, tv_handle, uint32_t number, uint64_t addr, uint64_t length);

/* context.c */
struct ibv_context *tv_ctx_new(struct tv_dev *dev, int cmd_fd, struct tv_ctx *of);
int tv_query_device_ex(struct ibv_context *, const struct ibv_query_device_ex_input *,
		       struct ibv_device_attr_ex *, size_t);
int tv_query_port(struct ibv_context *, uint8_t, struct ibv_port_attr *, size_t);
int tv_query_rt_values(struct ibv_context *, struct ibv_values_ex *);

/* data.c */
void tv_ring_set(struct tv_ring *r, uint64_t base);
void tv_posted(struct tv_qp *qp, uint32_t n);
int tv_post_send(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **);
int tv_post_recv(struct ibv_qp *, struct ibv_recv_wr *, struct ibv_recv_wr **);
int tv_post_srq_recv(struct ibv_srq *, struct ibv_recv_wr *, struct ibv_recv_wr **);
int tv_poll_cq(struct ibv_cq *, int, struct ibv_wc *);
int tv_req_notify_cq(struct ibv_cq *, int);

/* cq.c */
struct ibv_cq_ex *tv_create_cq_ex(struct ibv_context *, struct ibv_cq_init_attr_ex *);
int tv_modify_cq(struct ibv_cq *, struct ibv_modify_cq_attr *);
void tv_cq_poller(struct tv_cq *cq, uint64_t wc_flags);

/* xrc.c */
struct ibv_xrcd *tv_open_xrcd(struct ibv_context *, struct ibv_xrcd_init_attr *);
int tv_close_xrcd(struct ibv_xrcd *);
int tv_get_srq_num(struct ibv_srq *, uint32_t *);
struct ibv_qp *tv_open_qp(struct ibv_context *, struct ibv_qp_open_attr *);

/* mw.c */
struct ibv_mw *tv_alloc_mw(struct ibv_pd *, enum ibv_mw_type);
int tv_dealloc_mw(struct ibv_mw *);
int tv_bind_mw(struct ibv_qp *, struct ibv_mw *, struct ibv_mw_bind *);
int tv_put_bind(struct tv_send_wqe *w, const struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *b);

/* qp.c */
void tv_qp_set(struct tv_qp *qp, const struct tv_qp_init *in);
struct ibv_qp *tv_create_qp_ex(struct ibv_context *, struct ibv_qp_init_attr_ex *);
struct ibv_srq *tv_create_srq_ex(struct ibv_context *, struct ibv_srq_init_attr_ex *);
int tv_modify_qp_rate_limit(struct ibv_qp *, struct ibv_qp_rate_limit_attr *);
int tv_wr_set(struct tv_qp *qp, uint64_t ops);

/* flow.c */
struct ibv_flow *tv_create_flow(struct ibv_qp *, struct ibv_flow_attr *);
int tv_destroy_flow(struct ibv_flow *);
struct ibv_counters *tv_create_counters(struct ibv_context *, struct ibv_counters_init_attr *);
int tv_destroy_counters(struct ibv_counters *);
int tv_attach_counters(struct ibv_counters *, struct ibv_counter_attach_attr *, struct ibv_flow *);
int tv_read_counters(struct ibv_counters *, uint64_t *, uint32_t, uint32_t);

static inline struct tv_ctx *tv_ctx(struct ibv_context *c)
{
	return tv_container(tv_container(c, struct verbs_context, context), struct tv_ctx, vctx);
}

/* tv_lost says whether nothing is to be had of a context any more. */
static inline bool tv_lost(struct ibv_context *c)
{
	if (!TV_UNLIKELY(__atomic_load_n(&tv_trouble, __ATOMIC_ACQUIRE)))
		return false;
	return tv_forked || __atomic_load_n(&tv_ctx(c)->dev->gone, __ATOMIC_ACQUIRE);
}

/* tv_alone says whether what is made in a domain is used by one thread at a time. */
static inline bool tv_alone(const struct ibv_pd *pd)
{
	const struct tv_parent *p = pd ? ((const struct tv_pd *)pd)->parent : NULL;

	return p && p->td;
}

static inline tv_handle tv_ctx_handle(struct ibv_context *c) { return tv_ctx(c)->handle; }

static inline uint32_t tv_load(const struct tv_ring *r, int off)
{
	return __atomic_load_n((uint32_t *)(r->base + off), __ATOMIC_ACQUIRE);
}

static inline void tv_store(const struct tv_ring *r, int off, uint32_t v)
{
	__atomic_store_n((uint32_t *)(r->base + off), v, __ATOMIC_RELEASE);
}

static inline void *tv_slot(const struct tv_ring *r, uint32_t i)
{
	return r->base + TV_RING_SLOTS + (size_t)(i & r->mask) * r->stride;
}

/* The old and the new way to fail: an errno as the result, and NULL with errno. */
static inline void *tv_null(int err)
{
	errno = err;
	return NULL;
}

static inline int tv_fail(int err)
{
	if (err)
		errno = err;
	return err;
}

#endif
