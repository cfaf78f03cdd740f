/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside rsockets: a socket, and what their files use of each other. All of it is built on
 * rdma/rdma_cma.h and infiniband/verbs.h alone.
 *
 * Locks. reading and writing are held for the whole of a call that receives or sends, so
 * that calls do not mix; lock guards all else of a socket and is never held in sleep.
 * Order: writing or reading, then lock. The locks of the table and of rs_service.c are leaves. */
#ifndef TAPVERBS_RS_H
#define TAPVERBS_RS_H

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <time.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>

#include "rs_wire.h"

#define RS_MIN_QUEUE 16
#define RS_MAX_QUEUE 0xfffe
#define RS_CTRL_ROOM 4      /* control messages under way, of our own */
#define RS_LOW_WATER 2048   /* a socket is writable with so much room (man rsocket: as TCP's) */
#define RS_MAX_CHUNK 65536  /* one RDMA WRITE of rsend */
#define RS_RESOLVE_MS 2000  /* for an address, for a route */
#define RS_RESOLVE_TRIES 3
#define RS_LINGER_NS 20000000000ll /* close waits no longer than that without progress */

enum rs_state {
	RS_IDLE,
	RS_BOUND,
	RS_LISTENING,
	RS_RESOLVING, /* address or route */
	RS_CONNECTING,
	RS_ACCEPTING, /* accepted, and the peer has not been heard of since */
	RS_CONNECTED,
	RS_FAILED,    /* to connect */
	RS_OVER,      /* both directions ended, by either end */
	RS_BROKEN,    /* by an error */
};

union rs_addr {
	struct sockaddr sa;
	struct sockaddr_in in;
	struct sockaddr_in6 in6;
};

/* What /etc/rdma/rsocket says, or nothing. */
struct rs_config {
	uint32_t mem, wmem, polling_us, wake_up_ms;
	uint16_t sq_size, rq_size, inline_size, iomap_size;
};

/* A region that was given to riomap. */
struct rs_iomr {
	struct rs_iomr *next;
	struct ibv_mr *mr;
	uint64_t offset;
	int index;    /* in the peer's iomap; -1: for this end alone */
	bool untold;  /* the peer's entry has to be written */
	bool gone;    /* and with nothing in it: the region is unmapped */
};

struct rs_dgram;

struct rsock {
	int fd; /* the event channel's, and the socket's number */
	int domain, type;
	int refs; /* one is the table's; under the table's lock */

	pthread_mutex_t reading, writing, lock;

	enum rs_state state;
	bool nonblock;
	bool closed;    /* rclose was called */
	bool read_shut, write_shut; /* by rshutdown */
	bool peer_shut; /* the peer sends no more */
	int error;      /* to be told once: SO_ERROR */
	int wake;       /* eventfd for those in rs_sleep or rpoll */
	int sleepers, stale; /* how many sleep; how many of them since before the last rs_rouse */
	unsigned epoch;
	unsigned idle;  /* polls that found nothing */

	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
	union rs_addr peer; /* of rconnect */
	int tries;
	uint16_t remote_iomaps;

	struct ibv_comp_channel *events;
	struct ibv_cq *cq;
	bool armed;
	unsigned unacked;

	/* Options. */
	uint32_t sbuf_size, rbuf_size;
	uint16_t sq_size, rq_size, inline_size, iomap_size;
	struct linger linger;
	struct timespec rcvtimeo, sndtimeo; /* 0: for ever */
	bool keepalive, nodelay, oobinline, reuse, v6only;
	int keep_idle, keep_interval, keep_count;
	void *route; /* RDMA_ROUTE */
	size_t route_len;

	/* Sending. */
	struct ibv_mr *smr;
	uint8_t *sbuf, *ctrl_buf;
	uint32_t s_head, s_free; /* the ring's: where next, and how much */
	uint16_t sq_free;        /* places for data in the send queue */
	uint8_t ctrl_used;
	uint8_t ctrl_next;       /* of RS_CTRL_ROOM places in ctrl_buf */
	uint16_t s_seq, s_limit; /* messages: the next, and the first without credit */
	struct rs_place target;  /* where data goes at the peer's */
	int target_index;        /* where the next target will be told */
	bool farewell;           /* DISCONNECT was sent */

	/* What the peer writes: its news, and data. */
	struct ibv_mr *list_mr, *rmr;
	volatile struct rs_place *list;
	volatile struct rs_mapping *iomap;
	size_t list_len;
	struct rs_place peer_list;
	uint64_t peer_iomap;
	uint32_t peer_index;     /* which entry of its list is the next to be written */
	bool swap;               /* the peer has another byte order */
	uint8_t *rbuf;
	uint32_t r_head;         /* where the next byte to be read is */
	uint32_t r_unread, r_unpublished;
	uint32_t r_publish;      /* which half is the next to be published */
	uint16_t r_seq, r_told;  /* messages consumed, and of which the peer was told */
	uint32_t *messages;      /* lengths; a ring of rq_size + 1 */
	uint16_t m_head, m_tail;

	struct rs_iomr *iomrs;
	uint8_t *iomap_taken;    /* entries of the peer's iomap */
	bool iomap_untold;

	/* Of the thread that serves sockets (rs_service.c). */
	bool serve_connect, serve_keep;
	struct timespec keep_due;
	struct rsock *serve_next;

	struct rs_dgram *dgram;
};

/* rs_table.c */
const struct rs_config *rs_configuration(void);
struct rsock *rs_new(const struct rsock *like, int domain, int type);
int rs_enter(struct rsock *s);
struct rsock *rs_get(int fd);
struct rsock *rs_find(int fd);
void rs_put(struct rsock *s);
bool rs_leave(struct rsock *s);

static inline int rs_error(int err)
{
	errno = err;
	return -1;
}

/* rs_wait.c */
struct timespec rs_now(void);
bool rs_later(const struct timespec *a, const struct timespec *b);
struct timespec rs_after(const struct timespec *t, int64_t ns);
void rs_rouse(struct rsock *s);
int rs_sleep(struct rsock *s, const struct timespec *deadline);
int rs_watch(struct rsock *s, struct pollfd *p, unsigned *epoch);
void rs_unwatch(struct rsock *s, const struct pollfd *p, int n, unsigned epoch);
int rs_wait(struct rsock *s, bool (*ready)(struct rsock *), bool nonblock, const struct timespec *timeout);

/* rs_endpoint.c */
int rs_make_endpoint(struct rsock *s);
void rs_free_endpoint(struct rsock *s);
void rs_write_hello(struct rsock *s, struct rs_hello *h);
int rs_read_hello(struct rsock *s, const struct rs_hello *h);
int rs_make_cq(struct rsock *s, struct ibv_context *ctx, int entries);
void rs_free_cq(struct rsock *s);

/* rs_connect.c */
int rs_bind_stream(struct rsock *s, const struct sockaddr *addr);
int rs_listen_stream(struct rsock *s, int backlog);
struct rsock *rs_accept_stream(struct rsock *s);
int rs_connect_stream(struct rsock *s, const struct sockaddr *addr);
void rs_handle_events(struct rsock *s);
bool rs_settled(struct rsock *s);
socklen_t rs_addrlen(const struct sockaddr *sa);

/* rs_stream.c */
void rs_progress(struct rsock *s);
void rs_break(struct rsock *s, int err);
bool rs_writable(struct rsock *s);
bool rs_may_write(struct rsock *s);
bool rs_may_read(struct rsock *s);
bool rs_all_sent(struct rsock *s);
void rs_give_credits(struct rsock *s);
int rs_send_ctrl(struct rsock *s, enum rs_ctrl what);
int rs_post(struct rsock *s, uint32_t message, bool immediate, struct ibv_sge *sge, int n,
	    uint64_t addr, uint32_t key, uint64_t wr_id, bool inlined);

/* Kinds of send work requests: the top byte of wr_id, above how much of the ring it has. */
#define RS_WR_RECV (1ull << 56)
#define RS_WR_DATA (2ull << 56)
#define RS_WR_CTRL (3ull << 56)
#define RS_WR_FAREWELL (4ull << 56)
#define RS_WR_KIND (0xffull << 56)

/* rs_dgram.c */
int rs_bind_dgram(struct rsock *s, const struct sockaddr *addr);
int rs_connect_dgram(struct rsock *s, const struct sockaddr *addr);
ssize_t rs_send_dgram(struct rsock *s, const struct iovec *iov, int n, int flags, const struct sockaddr *to);
ssize_t rs_recv_dgram(struct rsock *s, struct msghdr *msg, int flags);
short rs_revents_dgram(struct rsock *s, short events);
void rs_progress_dgram(struct rsock *s);
void rs_free_dgram(struct rsock *s);

/* rs_service.c */
void rs_serve(struct rsock *s);
void rs_unserve(struct rsock *s);

/* rs_iomap.c */
bool rs_may_write_direct(struct rsock *s);
bool rs_find_mapping(struct rsock *s, uint64_t offset, struct rs_mapping *m);
int rs_tell_iomap(struct rsock *s, bool nonblock);

/* rs_data.c */
ssize_t rs_send_direct(struct rsock *s, const void *buf, size_t count, uint64_t offset, int flags);
ssize_t rs_send_stream(struct rsock *s, const struct iovec *iov, int n, int flags);
ssize_t rs_recv_stream(struct rsock *s, const struct iovec *iov, int n, int flags);

/* rs_poll.c */
short rs_revents(struct rsock *s, short events);

#endif
