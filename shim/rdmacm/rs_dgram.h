/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside datagram sockets. One has two queue pairs on one CQ: UD for datagrams between
 * rsockets, and RAW_PACKET for UDP, with a flow that takes what is for its port. The
 * addresses are the device's, and the kernel does not have them; so a UDP socket of the
 * kernel's would be of no use. */
#ifndef TAPVERBS_RS_DGRAM_H
#define TAPVERBS_RS_DGRAM_H

#include "rs.h"

#define GRH 40
#define RAW_SLOT 2304    /* an Ethernet frame with the largest datagram */
#define RAW_RECVS 64
#define KEPT 64          /* datagrams that came by UDP and have not been read */
#define MAX_DESTS 1024   /* more of them take the place of the one that is not used for longest */

/* Kinds of work requests: the top byte of wr_id, above the number of the slot. */
#define WR_UD_RECV RS_WR_RECV
#define WR_RAW_RECV (2ull << 56)
#define WR_SEND (3ull << 56)

/* Where datagrams go to, or have come from. */
struct rs_dest {
	struct rs_dest *next; /* the most recently used first */
	union rs_addr addr, local;
	uint8_t sgid_index;
	uint8_t mac[6];       /* the next hop's */
	uint32_t qpn;
	struct ibv_ah *ah;    /* NULL: datagrams go by UDP */
	bool heard;           /* the peer has told its queue pair, and there is no ah yet */
};

/* A datagram that waits to be read. */
struct rs_arrival {
	const uint8_t *data;
	uint32_t len;
	int slot;  /* of the UD receives, or behind those of what is kept */
	union rs_addr from;
};

struct rs_dgram {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_qp *ud, *raw;
	struct ibv_flow *flow;
	struct ibv_mr *mr;
	uint8_t *mem;
	size_t mem_len;
	uint8_t *recvs, *raws, *kept, *sends;
	int n_recvs, n_sends;
	int n_gids;
	uint32_t max;       /* bytes of a datagram with its header over UD */
	uint8_t mac[6];     /* our own */
	uint16_t port;      /* ours, big-endian */
	uint16_t ip_id;
	int *free_sends, n_free_sends;
	int *free_kept, n_free_kept;
	struct rs_arrival *queue; /* a ring of n_recvs + KEPT + 1 */
	int head, tail;
	struct rs_dest *dests;
	int n_dests;
};

/* rs_dgram.c */
int rs_take_send_slot(struct rs_dgram *d);
int rs_queue_arrival(struct rsock *s, const uint8_t *data, uint32_t len, int slot, const union rs_addr *from);

/* rs_dgram_open.c */
int rs_open_dgram(struct rsock *s);
int rs_post_ud_recv(struct rs_dgram *d, int slot);
int rs_post_raw_recv(struct rs_dgram *d, int slot);

/* rs_dest.c */
bool rs_same_addr(const union rs_addr *a, const union rs_addr *b);
union ibv_gid rs_gid(const union rs_addr *a);
int rs_gid_index(struct rs_dgram *d, const union rs_addr *local);
struct rs_dest *rs_find_dest(struct rs_dgram *d, const union rs_addr *addr);
struct rs_dest *rs_add_dest(struct rs_dgram *d, const union rs_addr *addr, const union rs_addr *local, int sgid_index, const uint8_t mac[6]);
struct rs_dest *rs_resolve_dest(struct rsock *s, const union rs_addr *addr);
void rs_learn_qpn(struct rs_dest *dest, uint32_t qpn);
void rs_free_dests(struct rs_dgram *d);

/* rs_udp.c */
int rs_send_udp(struct rs_dgram *d, const struct rs_dest *dest, enum rs_op op, int slot, size_t len);
uint8_t *rs_udp_payload(const struct rs_dgram *d, const struct rs_dest *dest, int slot);
void rs_got_frame(struct rsock *s, const uint8_t *frame, uint32_t len);

#endif
