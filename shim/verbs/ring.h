/* SPDX-License-Identifier: Apache-2.0
 *
 * The rings that the library shares with the engine, as C sees them. qp/ring.go is
 * the description; shim/engine/layout.go compares this file with it, number by
 * number, and does not compile when they differ.
 *
 * Send queue, receive queue, SRQ: the library is the producer, under its own lock
 * of the queue. CQ: the library is the consumer, under its lock of the CQ. A
 * producer fills a slot and then stores its index with release order; a consumer
 * loads it with acquire order, reads, and stores its own with release order.
 */
#ifndef TAPVERBS_RING_H
#define TAPVERBS_RING_H

#include <stddef.h>
#include <stdint.h>

enum {
	TV_RING_PROD = 0,
	TV_RING_CONS = 64,
	TV_RING_ARM = 128,
	TV_RING_STATE = 132,
	TV_RING_COUNT = 192,
	TV_RING_STRIDE = 196,
	TV_RING_SLOTS = 256,
};

/* The page of doorbells, as provider/bells.go has it: a bit for each QP index, 64 to a
 * word of leaf, with a bit for each such word in mid, and for each word of those in top. */
enum {
	TV_BELL_TOP = 0,
	TV_BELL_PATIENT = 64,
	TV_BELL_POLLS = 68,
	TV_BELL_SEEN = 128,
	TV_BELL_LEFT = 132,
	TV_BELL_MID = 192,
	TV_BELL_LEAF = 320,
	TV_BELL_MAX_LEFT = 32,
};

enum { TV_ARM_NONE, TV_ARM_ANY, TV_ARM_SOLICITED };

/* QP states, as in enum ibv_qp_state. */
enum { TV_STATE_RTR = 2, TV_STATE_ERR = 6 };

struct tv_sge {
	uint64_t addr;
	uint32_t length;
	uint32_t lkey;
};

/* Followed by num_sge elements, or by length bytes of inline data. */
struct tv_send_wqe {
	uint64_t id;
	uint8_t opcode;
	uint8_t flags;
	uint16_t num_sge;
	uint32_t imm_or_key; /* immediate data in host order */
	uint64_t remote_addr;
	uint32_t rkey;
	uint32_t length;
	uint64_t compare_add;
	uint64_t swap;
	uint32_t ah, dest_qpn, qkey;
	uint32_t srqn; /* of XRC */
};

/* Followed by num_sge elements. */
struct tv_recv_wqe {
	uint64_t id;
	uint32_t num_sge;
	uint32_t reserved;
};

struct tv_cqe {
	uint64_t id;
	uint8_t status;
	uint8_t opcode;
	uint16_t flags;
	uint32_t vendor_err;
	uint32_t byte_len;
	uint32_t imm_or_key; /* immediate data in host order */
	uint32_t qpn;
	uint32_t src_qp;
	uint64_t timestamp; /* ns of the engine's clock */
	uint64_t user_qp;
	uint16_t pkey_index;
	uint16_t slid;
	uint8_t sl;
	uint8_t path_bits;
	uint8_t reserved[2];
	uint32_t flow_tag;
	uint32_t reserved2;
};

_Static_assert(sizeof(struct tv_sge) == 16, "sge");
_Static_assert(sizeof(struct tv_send_wqe) == 64, "send WQE");
_Static_assert(sizeof(struct tv_recv_wqe) == 16, "receive WQE");
_Static_assert(sizeof(struct tv_cqe) == 64, "CQE");

#endif
