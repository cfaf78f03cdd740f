/* SPDX-License-Identifier: Apache-2.0
 *
 * What rsockets put on the wire (rdma-core, librdmacm/docs/rsocket). Two ends that have
 * made a connection write into each other's memory: data into a ring of two halves, and
 * news of which half is free into a short list of the other end's. Each such RDMA WRITE
 * carries 32 bits of immediate data, a message: 3 bits say what it is.
 *
 * Credits are places in the receiver's queue of messages. They are told as the number,
 * modulo 2^16, of the message that must not be sent any more; the first is 0. Data and
 * iomap messages count, others do not and may meet an empty receive queue, that is RNR. */
#ifndef TAPVERBS_RS_WIRE_H
#define TAPVERBS_RS_WIRE_H

#include <stdint.h>

enum rs_op {
	RS_OP_DATA = 0,  /* bytes that were written behind those before */
	RS_OP_SGL = 4,   /* credits; perhaps a free half was entered in the list, too */
	RS_OP_IOMAP = 6, /* the index of an entry of the iomap that was written */
	RS_OP_CTRL = 7,
};

enum rs_ctrl {
	RS_CTRL_DISCONNECT = 0, /* the sender neither sends nor reads any more */
	RS_CTRL_KEEPALIVE = 1,
	RS_CTRL_SHUTDOWN = 2,   /* the sender sends no more */
};

#define RS_OP_SHIFT 29
#define RS_VALUE_MASK ((1u << RS_OP_SHIFT) - 1)

/* A place in memory. In a list, in the byte order of the list's owner. */
struct rs_place {
	uint64_t addr;
	uint32_t key;
	uint32_t length;
};

/* An entry of the iomap: what the peer may write to by riowrite, behind the list. */
struct rs_mapping {
	uint64_t offset;
	struct rs_place place;
};

#define RS_VERSION 1
#define RS_FLAG_BIG_ENDIAN 1 /* so are the sender's lists */
#define RS_FLAG_IOMAP 2      /* behind the list is an iomap */
#define RS_PLACES 2          /* entries of our list */

/* Private data of REQ and REP, big-endian. */
struct rs_hello {
	uint8_t version, flags;
	uint16_t credits;
	uint8_t reserved[3];
	uint8_t iomap_size; /* entries; above 128 in units of 256 (rs_scale) */
	struct rs_place list; /* its length in entries */
	struct rs_place data; /* the first half of the ring */
} __attribute__((packed));

_Static_assert(sizeof(struct rs_hello) == 40, "layout of the private data");
_Static_assert(sizeof(struct rs_mapping) == 24, "layout of an iomap entry");

/* Datagrams. Until it is known which queue pair has a UDP port they go by UDP, behind
 * this header, which tells of the sender's queue pair; the answer to one is the header
 * alone, with the answerer's. */
#define RS_UDP_TAG 0x55555555u
#define RS_UDP_LEN4 16
#define RS_UDP_LEN6 28

struct rs_udp_hello {
	uint32_t tag;
	uint8_t version; /* 4 or 6 */
	uint8_t op;      /* RS_OP_DATA: user data follows; RS_OP_CTRL: an answer */
	uint8_t length;  /* of this header */
	uint8_t reserved;
	uint32_t qpn;
	uint8_t addr[16]; /* the sender's, 4 or 16 bytes */
};

/* From queue pair to queue pair: who sends. */
#define RS_DGRAM_LEN4 8
#define RS_DGRAM_LEN6 24

struct rs_dgram_hello {
	uint8_t version, length;
	uint16_t port;
	union {
		uint32_t v4;
		struct {
			uint32_t flow;
			uint8_t addr[16];
		} v6;
	};
};

_Static_assert(sizeof(struct rs_udp_hello) == RS_UDP_LEN6, "layout of the header over UDP");
_Static_assert(sizeof(struct rs_dgram_hello) == RS_DGRAM_LEN6, "layout of the header over UD");

/* A datagram with its header fits into so much: the other end's receives have it. */
#define RS_DGRAM_MAX 2048

static inline uint32_t rs_message(enum rs_op op, uint32_t value)
{
	return (uint32_t)op << RS_OP_SHIFT | (value & RS_VALUE_MASK);
}

/* rs_scale is how a number of iomap entries is told in 8 bits; rs_unscale what was meant. */
static inline uint8_t rs_scale(uint16_t n)
{
	return n <= 128 ? n : 0x80 | n >> 8;
}

static inline uint16_t rs_unscale(uint8_t n)
{
	return n <= 128 ? n : (n & 0x7f) << 8;
}

#endif
