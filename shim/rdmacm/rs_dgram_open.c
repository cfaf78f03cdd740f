/* SPDX-License-Identifier: Apache-2.0
 *
 * What a datagram socket has, made when it is first used: its port, queue pairs, receives. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "rs_dgram.h"

int rs_post_ud_recv(struct rs_dgram *d, int slot)
{
	struct ibv_sge sge = {(uintptr_t)d->recvs + (size_t)slot * (GRH + RS_DGRAM_MAX), GRH + RS_DGRAM_MAX, d->mr->lkey};
	struct ibv_recv_wr wr = {.wr_id = WR_UD_RECV | slot, .sg_list = &sge, .num_sge = 1}, *bad;

	return ibv_post_recv(d->ud, &wr, &bad);
}

int rs_post_raw_recv(struct rs_dgram *d, int slot)
{
	struct ibv_sge sge = {(uintptr_t)d->raws + (size_t)slot * RAW_SLOT, RAW_SLOT, d->mr->lkey};
	struct ibv_recv_wr wr = {.wr_id = WR_RAW_RECV | slot, .sg_list = &sge, .num_sge = 1}, *bad;

	return ibv_post_recv(d->raw, &wr, &bad);
}

static struct ibv_qp *make_qp(struct rsock *s, enum ibv_qp_type type, int recvs)
{
	struct rs_dgram *d = s->dgram;
	struct ibv_qp_init_attr init = {.qp_type = type, .send_cq = s->cq, .recv_cq = s->cq, .sq_sig_all = 1,
		.cap = {.max_send_wr = d->n_sends, .max_recv_wr = recvs, .max_send_sge = 1, .max_recv_sge = 1,
			.max_inline_data = type == IBV_QPT_UD ? s->inline_size : 0}};
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = RDMA_UDP_QKEY};
	struct ibv_qp *qp = ibv_create_qp(d->pd, &init);
	bool ud = type == IBV_QPT_UD;
	int err;

	if (!qp)
		return NULL;
	if (ud)
		s->inline_size = init.cap.max_inline_data < UINT16_MAX ? init.cap.max_inline_data : UINT16_MAX;
	err = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PORT | (ud ? IBV_QP_PKEY_INDEX | IBV_QP_QKEY : 0));
	a.qp_state = IBV_QPS_RTR;
	if (!err)
		err = ibv_modify_qp(qp, &a, IBV_QP_STATE);
	a.qp_state = IBV_QPS_RTS;
	if (!err)
		err = ibv_modify_qp(qp, &a, IBV_QP_STATE | (ud ? IBV_QP_SQ_PSN : 0));
	if (err) {
		ibv_destroy_qp(qp);
		errno = err;
		return NULL;
	}
	return qp;
}

static int make_memory(struct rsock *s)
{
	struct rs_dgram *d = s->dgram;
	size_t recvs = (size_t)d->n_recvs * (GRH + RS_DGRAM_MAX), raws = RAW_RECVS * RAW_SLOT, kept = KEPT * RS_DGRAM_MAX;

	d->mem_len = recvs + raws + kept + (size_t)d->n_sends * RAW_SLOT;
	d->mem = mmap(NULL, d->mem_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (d->mem == MAP_FAILED) {
		d->mem = NULL;
		return -1;
	}
	d->recvs = d->mem;
	d->raws = d->recvs + recvs;
	d->kept = d->raws + raws;
	d->sends = d->kept + kept;
	d->queue = calloc(d->n_recvs + KEPT + 1, sizeof(*d->queue));
	d->free_sends = calloc(d->n_sends, sizeof(*d->free_sends));
	d->free_kept = calloc(KEPT, sizeof(*d->free_kept));
	if (!d->queue || !d->free_sends || !d->free_kept)
		return rs_error(ENOMEM);
	while (d->n_free_sends < d->n_sends) {
		d->free_sends[d->n_free_sends] = d->n_free_sends;
		d->n_free_sends++;
	}
	while (d->n_free_kept < KEPT) {
		d->free_kept[d->n_free_kept] = d->n_free_kept;
		d->n_free_kept++;
	}
	d->mr = ibv_reg_mr(d->pd, d->mem, d->mem_len, IBV_ACCESS_LOCAL_WRITE);
	return d->mr ? 0 : -1;
}

/* make_flow has UDP for our port go to the RAW_PACKET queue pair. */
static int make_flow(struct rsock *s, const union rs_addr *local)
{
	struct {
		struct ibv_flow_attr attr;
		struct ibv_flow_spec_ipv4 ip;
		struct ibv_flow_spec_tcp_udp udp;
	} f4 = {
		.attr = {.type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(f4), .num_of_specs = 2, .port = 1},
		.ip = {.type = IBV_FLOW_SPEC_IPV4, .size = sizeof(f4.ip)},
		.udp = {.type = IBV_FLOW_SPEC_UDP, .size = sizeof(f4.udp), .val.dst_port = s->dgram->port, .mask.dst_port = 0xffff},
	};
	struct {
		struct ibv_flow_attr attr;
		struct ibv_flow_spec_ipv6 ip;
		struct ibv_flow_spec_tcp_udp udp;
	} f6 = {
		.attr = {.type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(f6), .num_of_specs = 2, .port = 1},
		.ip = {.type = IBV_FLOW_SPEC_IPV6, .size = sizeof(f6.ip)},
		.udp = f4.udp,
	};

	if (local->sa.sa_family == AF_INET) {
		f4.ip.val.dst_ip = local->in.sin_addr.s_addr;
		f4.ip.mask.dst_ip = f4.ip.val.dst_ip ? UINT32_MAX : 0;
		s->dgram->flow = ibv_create_flow(s->dgram->raw, &f4.attr);
	} else {
		memcpy(f6.ip.val.dst_ip, &local->in6.sin6_addr, 16);
		if (!IN6_IS_ADDR_UNSPECIFIED(&local->in6.sin6_addr))
			memset(f6.ip.mask.dst_ip, 0xff, 16);
		s->dgram->flow = ibv_create_flow(s->dgram->raw, &f6.attr);
	}
	return s->dgram->flow ? 0 : -1;
}

/* own_mac takes the MAC out of GID 0, which is made of it (RFC 4291, appendix A). */
static int own_mac(struct rs_dgram *d)
{
	union ibv_gid g;

	if (ibv_query_gid(d->ctx, 1, 0, &g))
		return -1;
	memcpy(d->mac, g.raw + 8, 3);
	memcpy(d->mac + 3, g.raw + 13, 3);
	d->mac[0] ^= 2;
	return 0;
}

static int find_device(struct rsock *s)
{
	struct ibv_context **list;

	if (s->id->verbs) {
		s->dgram->ctx = s->id->verbs;
		return 0;
	}
	list = rdma_get_devices(NULL); /* bound to any address: a process has one device */
	if (!list)
		return -1;
	s->dgram->ctx = list[0];
	rdma_free_devices(list); /* which stay open */
	return s->dgram->ctx ? 0 : rs_error(ENODEV);
}

static uint16_t count(uint16_t wanted, uint32_t size)
{
	uint32_t n = size / RS_DGRAM_MAX;

	if (n > wanted)
		n = wanted;
	return n < RS_MIN_QUEUE ? RS_MIN_QUEUE : n;
}

/* rs_open_dgram makes all of it, if it is not there. A socket that is not bound gets a port
 * of the library's choice. */
int rs_open_dgram(struct rsock *s)
{
	union rs_addr any = {.in6 = {.sin6_family = s->domain}}, local = {0};
	struct ibv_port_attr port;
	struct rs_dgram *d;
	int err;

	if (s->dgram && s->dgram->flow)
		return 0;
	if (s->dgram)
		return rs_error(ENETDOWN); /* it failed before */
	if (s->state == RS_IDLE && rs_bind_stream(s, &any.sa))
		return -1;
	memcpy(&local, rdma_get_local_addr(s->id), sizeof(local));
	local.sa.sa_family = s->domain;
	d = s->dgram = calloc(1, sizeof(*d));
	if (!d || find_device(s))
		return -1;
	err = ibv_query_port(d->ctx, 1, &port);
	if (err)
		return rs_error(err);
	d->n_gids = port.gid_tbl_len;
	d->max = 128u << port.active_mtu;
	if (d->max > RS_DGRAM_MAX)
		d->max = RS_DGRAM_MAX;
	d->port = rdma_get_src_port(s->id);
	s->rq_size = d->n_recvs = count(s->rq_size, s->rbuf_size);
	s->sq_size = d->n_sends = count(s->sq_size, s->sbuf_size);
	d->pd = ibv_alloc_pd(d->ctx);
	if (!d->pd || own_mac(d) || make_memory(s) || rs_make_cq(s, d->ctx, d->n_recvs + RAW_RECVS + 2 * d->n_sends))
		return -1;
	d->ud = make_qp(s, IBV_QPT_UD, d->n_recvs);
	d->raw = d->ud ? make_qp(s, IBV_QPT_RAW_PACKET, RAW_RECVS) : NULL;
	if (!d->raw)
		return -1;
	for (int i = 0; i < d->n_recvs; i++) {
		err = rs_post_ud_recv(d, i);
		if (err)
			return rs_error(err);
	}
	for (int i = 0; i < RAW_RECVS; i++) {
		err = rs_post_raw_recv(d, i);
		if (err)
			return rs_error(err);
	}
	return make_flow(s, &local);
}

void rs_free_dgram(struct rsock *s)
{
	struct rs_dgram *d = s->dgram;

	if (!d)
		return;
	if (d->flow)
		ibv_destroy_flow(d->flow);
	if (d->raw)
		ibv_destroy_qp(d->raw);
	if (d->ud)
		ibv_destroy_qp(d->ud);
	rs_free_dests(d);
	if (d->mr)
		ibv_dereg_mr(d->mr);
	rs_free_cq(s);
	s->cq = NULL;
	s->events = NULL;
	if (d->pd)
		ibv_dealloc_pd(d->pd);
	if (d->mem)
		munmap(d->mem, d->mem_len);
	free(d->queue);
	free(d->free_sends);
	free(d->free_kept);
	free(d);
}
