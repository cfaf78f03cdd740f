/* SPDX-License-Identifier: Apache-2.0
 *
 * UDP in whole frames (RFC 768, 791, 8200), as much of it as rsockets need: datagrams that
 * fit into one frame. What comes is looked at with distrust. */
#include <arpa/inet.h>
#include <string.h>

#include "rs_dgram.h"

#define ETH 14
#define IP4 20
#define IP6 40
#define UDP 8
#define PROTO_UDP 17

static uint16_t get16(const uint8_t *p)
{
	return p[0] << 8 | p[1];
}

static void put16(uint8_t *p, uint16_t v)
{
	p[0] = v >> 8;
	p[1] = v;
}

/* add sums up for the checksum of RFC 1071. */
static uint32_t add(uint32_t sum, const uint8_t *p, size_t len)
{
	for (; len > 1; p += 2, len -= 2)
		sum += get16(p);
	return len ? sum + (p[0] << 8) : sum;
}

static uint16_t fold(uint32_t sum)
{
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* udp_sum is the checksum of what is at udp, with the pseudo header. */
static uint16_t udp_sum(const uint8_t *addrs, size_t addrs_len, const uint8_t *udp, size_t len)
{
	return fold(add(add(len + PROTO_UDP, addrs, addrs_len), udp, len));
}

static size_t ip_len(const struct rs_dest *dest)
{
	return dest->addr.sa.sa_family == AF_INET ? IP4 : IP6;
}

static uint8_t hello_len(const struct rs_dest *dest)
{
	return dest->addr.sa.sa_family == AF_INET ? RS_UDP_LEN4 : RS_UDP_LEN6;
}

static uint8_t *slot_at(const struct rs_dgram *d, int slot)
{
	return d->sends + (size_t)slot * RAW_SLOT;
}

/* rs_udp_payload is where user data goes in a slot that is sent by rs_send_udp. */
uint8_t *rs_udp_payload(const struct rs_dgram *d, const struct rs_dest *dest, int slot)
{
	return slot_at(d, slot) + ETH + ip_len(dest) + UDP + hello_len(dest);
}

static void put_hello(uint8_t *p, const struct rs_dgram *d, const struct rs_dest *dest, enum rs_op op)
{
	struct rs_udp_hello h = {.tag = htonl(RS_UDP_TAG), .version = 4, .op = op, .length = hello_len(dest), .qpn = htonl(d->ud->qp_num)};

	if (dest->local.sa.sa_family == AF_INET) {
		memcpy(h.addr, &dest->local.in.sin_addr, 4);
	} else {
		h.version = 6;
		memcpy(h.addr, &dest->local.in6.sin6_addr, 16);
	}
	memcpy(p, &h, h.length);
}

static void put_ip4(uint8_t *ip, struct rs_dgram *d, const struct rs_dest *dest, size_t len)
{
	memset(ip, 0, IP4);
	ip[0] = 0x45;
	put16(ip + 2, IP4 + len);
	put16(ip + 4, d->ip_id++);
	ip[8] = 64;
	ip[9] = PROTO_UDP;
	memcpy(ip + 12, &dest->local.in.sin_addr, 4);
	memcpy(ip + 16, &dest->addr.in.sin_addr, 4);
	put16(ip + 10, fold(add(0, ip, IP4)));
}

static void put_ip6(uint8_t *ip, const struct rs_dest *dest, size_t len)
{
	memset(ip, 0, IP6);
	ip[0] = 0x60;
	put16(ip + 4, len);
	ip[6] = PROTO_UDP;
	ip[7] = 64;
	memcpy(ip + 8, &dest->local.in6.sin6_addr, 16);
	memcpy(ip + 24, &dest->addr.in6.sin6_addr, 16);
}

/* rs_send_udp sends the header, and len bytes that are in the slot already. The slot is free
 * again when the send is done, or at once if it fails. */
int rs_send_udp(struct rs_dgram *d, const struct rs_dest *dest, enum rs_op op, int slot, size_t len)
{
	uint8_t *frame = slot_at(d, slot), *ip = frame + ETH, *udp = ip + ip_len(dest);
	bool v4 = dest->addr.sa.sa_family == AF_INET;
	struct ibv_sge sge = {(uintptr_t)frame, 0, d->mr->lkey};
	struct ibv_send_wr wr = {.wr_id = WR_SEND | slot, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
	uint16_t sum;
	int err;

	memcpy(frame, dest->mac, 6);
	memcpy(frame + 6, d->mac, 6);
	put16(frame + 12, v4 ? 0x0800 : 0x86dd);
	len += UDP + hello_len(dest);
	if (v4)
		put_ip4(ip, d, dest, len);
	else
		put_ip6(ip, dest, len);
	memcpy(udp, &d->port, 2);
	memcpy(udp + 2, v4 ? &dest->addr.in.sin_port : &dest->addr.in6.sin6_port, 2);
	put16(udp + 4, len);
	put16(udp + 6, 0);
	put_hello(udp + UDP, d, dest, op);
	sum = udp_sum(v4 ? ip + 12 : ip + 8, v4 ? 8 : 32, udp, len);
	put16(udp + 6, sum ? sum : 0xffff);
	sge.length = udp + len - frame;
	err = ibv_post_send(d->raw, &wr, &bad);
	if (err) {
		d->free_sends[d->n_free_sends++] = slot;
		return rs_error(err == ENOMEM ? ENOBUFS : EIO);
	}
	return 0;
}

/* udp_of finds the UDP header in a frame, whole and right, and says from where to where the
 * frame goes. NULL: it is none, or a fragment. */
static const uint8_t *udp_of(const uint8_t *f, uint32_t len, union rs_addr *from, union rs_addr *to, size_t *udp_len)
{
	const uint8_t *ip = f + ETH, *udp;
	size_t hl, total;
	uint16_t sum;

	if (len < ETH + IP4 + UDP)
		return NULL;
	len -= ETH;
	if (get16(f + 12) == 0x0800) {
		hl = (ip[0] & 15) * 4;
		total = get16(ip + 2);
		if (ip[0] >> 4 != 4 || hl < IP4 || total > len || total < hl + UDP || get16(ip + 6) & 0x3fff || ip[9] != PROTO_UDP ||
		    fold(add(0, ip, hl)))
			return NULL;
		from->sa.sa_family = to->sa.sa_family = AF_INET;
		memcpy(&from->in.sin_addr, ip + 12, 4);
		memcpy(&to->in.sin_addr, ip + 16, 4);
	} else {
		hl = IP6;
		total = IP6 + (len >= IP6 ? get16(ip + 4) : 0);
		if (get16(f + 12) != 0x86dd || ip[0] >> 4 != 6 || total > len || total < IP6 + UDP || ip[6] != PROTO_UDP)
			return NULL;
		from->sa.sa_family = to->sa.sa_family = AF_INET6;
		memcpy(&from->in6.sin6_addr, ip + 8, 16);
		memcpy(&to->in6.sin6_addr, ip + 24, 16);
	}
	udp = ip + hl;
	*udp_len = get16(udp + 4);
	if (*udp_len < UDP || *udp_len > total - hl)
		return NULL;
	sum = get16(udp + 6);
	if ((!sum && hl == IP6 && to->sa.sa_family == AF_INET6) ||
	    (sum && udp_sum(to->sa.sa_family == AF_INET ? ip + 12 : ip + 8, to->sa.sa_family == AF_INET ? 8 : 32, udp, *udp_len)))
		return NULL;
	memcpy(from->sa.sa_family == AF_INET ? (void *)&from->in.sin_port : (void *)&from->in6.sin6_port, udp, 2);
	memcpy(to->sa.sa_family == AF_INET ? (void *)&to->in.sin_port : (void *)&to->in6.sin6_port, udp + 2, 2);
	return udp;
}

/* keep puts user data that came by UDP where it can be read. It is lost if there is no room. */
static void keep(struct rsock *s, const uint8_t *data, size_t len, const union rs_addr *from)
{
	struct rs_dgram *d = s->dgram;
	uint8_t *place;
	int slot;

	if (!d->n_free_kept || len > RS_DGRAM_MAX)
		return;
	slot = d->free_kept[--d->n_free_kept];
	place = d->kept + (size_t)slot * RS_DGRAM_MAX;
	memcpy(place, data, len);
	if (rs_queue_arrival(s, place, len, d->n_recvs + slot, from))
		d->free_kept[d->n_free_kept++] = slot;
}

/* rs_got_frame acts on a frame that was for our port. */
void rs_got_frame(struct rsock *s, const uint8_t *frame, uint32_t len)
{
	struct rs_dgram *d = s->dgram;
	union rs_addr from = {0}, to = {0};
	struct rs_udp_hello h = {0};
	struct rs_dest *dest;
	const uint8_t *udp;
	size_t n;
	uint8_t want;
	int index, slot;

	udp = udp_of(frame, len, &from, &to, &n);
	if (!udp || from.sa.sa_family != s->domain)
		return;
	want = from.sa.sa_family == AF_INET ? RS_UDP_LEN4 : RS_UDP_LEN6;
	n -= UDP;
	if (n < want)
		return;
	memcpy(&h, udp + UDP, want);
	if (h.tag != htonl(RS_UDP_TAG) || h.length != want || h.version != (from.sa.sa_family == AF_INET ? 4 : 6) ||
	    (h.op != RS_OP_DATA && h.op != RS_OP_CTRL))
		return;
	dest = rs_find_dest(d, &from);
	if (!dest) {
		index = rs_gid_index(d, &to);
		if (index < 0 || h.op == RS_OP_CTRL) /* an answer to what was not asked */
			return;
		dest = rs_add_dest(d, &from, &to, index, frame + 6);
		if (!dest)
			return;
	}
	rs_learn_qpn(dest, ntohl(h.qpn) & 0xffffff);
	if (h.op == RS_OP_CTRL)
		return;
	slot = rs_take_send_slot(d);
	if (slot >= 0) /* else it asks again with its next datagram */
		rs_send_udp(d, dest, RS_OP_CTRL, slot, 0);
	keep(s, udp + UDP + want, n - want, &from);
}
