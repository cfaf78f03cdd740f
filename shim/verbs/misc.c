/* SPDX-License-Identifier: Apache-2.0
 *
 * Names, rates, fork, files of sysfs. */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <infiniband/sa.h>
#include <rdma/ib_user_sa.h>
#include <rdma/ib_user_verbs.h>

#include "tv.h"

#define NAME(table, i) ((unsigned)(i) < sizeof(table) / sizeof(*(table)) && (table)[i] ? (table)[i] : "unknown")

const char *ibv_node_type_str(enum ibv_node_type t)
{
	static const char *const s[] = {
		[IBV_NODE_CA] = "InfiniBand channel adapter", [IBV_NODE_SWITCH] = "InfiniBand switch",
		[IBV_NODE_ROUTER] = "InfiniBand router", [IBV_NODE_RNIC] = "iWARP NIC", [IBV_NODE_USNIC] = "usNIC",
		[IBV_NODE_USNIC_UDP] = "usNIC UDP", [IBV_NODE_UNSPECIFIED] = "unspecified",
	};

	return NAME(s, t);
}

const char *ibv_port_state_str(enum ibv_port_state t)
{
	static const char *const s[] = {
		[IBV_PORT_NOP] = "no state change (NOP)", [IBV_PORT_DOWN] = "down", [IBV_PORT_INIT] = "init",
		[IBV_PORT_ARMED] = "armed", [IBV_PORT_ACTIVE] = "active", [IBV_PORT_ACTIVE_DEFER] = "active defer",
	};

	return NAME(s, t);
}

const char *ibv_event_type_str(enum ibv_event_type t)
{
	static const char *const s[] = {
		"CQ error", "local work queue catastrophic error", "invalid request local work queue error",
		"local access violation work queue error", "communication established", "send queue drained",
		"path migrated", "path migration request error", "local catastrophic error", "port active",
		"port error", "LID change", "P_Key change", "SM change", "SRQ catastrophic error",
		"SRQ limit reached", "last WQE reached", "client reregistration", "GID table change",
		"WQ catastrophic error",
	};

	return NAME(s, t);
}

const char *ibv_wc_status_str(enum ibv_wc_status t)
{
	static const char *const s[] = {
		"success", "local length error", "local QP operation error", "local EE context operation error",
		"local protection error", "Work Request Flushed Error", "memory management operation error",
		"bad response error", "local access error", "remote invalid request error", "remote access error",
		"remote operation error", "transport retry counter exceeded", "RNR retry counter exceeded",
		"local RDD violation error", "remote invalid RD request", "aborted error",
		"invalid EE context number", "invalid EE context state", "fatal error", "response timeout error",
		"general error", "TM error", "TM software rendezvous",
	};

	return NAME(s, t);
}

/* Rates: a multiple of 2.5 Gbit/s (IBA 9.11, table of static rates) and Mbit/s. */
static const struct {
	enum ibv_rate rate;
	int mult, mbps;
} rates[] = {
	{ IBV_RATE_2_5_GBPS, 1, 2500 },     { IBV_RATE_5_GBPS, 2, 5000 },       { IBV_RATE_10_GBPS, 4, 10000 },
	{ IBV_RATE_20_GBPS, 8, 20000 },     { IBV_RATE_30_GBPS, 12, 30000 },    { IBV_RATE_40_GBPS, 16, 40000 },
	{ IBV_RATE_60_GBPS, 24, 60000 },    { IBV_RATE_80_GBPS, 32, 80000 },    { IBV_RATE_120_GBPS, 48, 120000 },
	{ IBV_RATE_14_GBPS, 5, 14062 },     { IBV_RATE_56_GBPS, 22, 56250 },    { IBV_RATE_112_GBPS, 45, 112500 },
	{ IBV_RATE_168_GBPS, 67, 168750 },  { IBV_RATE_25_GBPS, 10, 25781 },    { IBV_RATE_100_GBPS, 40, 103125 },
	{ IBV_RATE_200_GBPS, 80, 206250 },  { IBV_RATE_300_GBPS, 120, 309375 }, { IBV_RATE_28_GBPS, 11, 28125 },
	{ IBV_RATE_50_GBPS, 20, 53125 },    { IBV_RATE_400_GBPS, 160, 425000 }, { IBV_RATE_600_GBPS, 240, 637500 },
	{ IBV_RATE_800_GBPS, 320, 850000 }, { IBV_RATE_1200_GBPS, 480, 1275000 },
};
#define NRATES (sizeof(rates) / sizeof(*rates))

int ibv_rate_to_mult(enum ibv_rate r)
{
	for (size_t i = 0; i < NRATES; i++)
		if (rates[i].rate == r)
			return rates[i].mult;
	return -1;
}

enum ibv_rate mult_to_ibv_rate(int m)
{
	for (size_t i = 0; i < NRATES; i++)
		if (rates[i].mult == m)
			return rates[i].rate;
	return IBV_RATE_MAX;
}

int ibv_rate_to_mbps(enum ibv_rate r)
{
	for (size_t i = 0; i < NRATES; i++)
		if (rates[i].rate == r)
			return rates[i].mbps;
	return -1;
}

enum ibv_rate mbps_to_ibv_rate(int m)
{
	for (size_t i = 0; i < NRATES; i++)
		if (rates[i].mbps == m)
			return rates[i].rate;
	return IBV_RATE_MAX;
}

/* No memory is pinned and no device writes to it behind the process's back, so
 * copy-on-write after fork does no harm: the parent goes on as before. */
int ibv_fork_init(void) { return 0; }
enum ibv_fork_status ibv_is_fork_initialized(void) { return IBV_FORK_UNNEEDED; }

int ibv_dontfork_range(void *base, size_t size)
{
	(void)base, (void)size;
	return 0;
}

int ibv_dofork_range(void *base, size_t size)
{
	(void)base, (void)size;
	return 0;
}

const char *ibv_get_sysfs_path(void) { return "/sys"; }

/* Reads a file without the newline at its end; the number of bytes, or -1. */
int ibv_read_sysfs_file(const char *dir, const char *file, char *buf, size_t size)
{
	char path[IBV_SYSFS_PATH_MAX + 64];
	ssize_t n;
	int fd;

	if (snprintf(path, sizeof(path), "%s/%s", dir, file) >= (int)sizeof(path))
		return -1;
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	n = read(fd, buf, size);
	close(fd);
	if (n > 0) {
		if (buf[n - 1] == '\n')
			buf[--n] = 0;
		else if ((size_t)n < size)
			buf[n] = 0;
		else
			return -1;
	}
	return n;
}

/* Between the library's structs and those of the kernel's user ABI (librdmacm). */
void ibv_copy_ah_attr_from_kern(struct ibv_ah_attr *d, struct ib_uverbs_ah_attr *s)
{
	memset(d, 0, sizeof(*d));
	memcpy(d->grh.dgid.raw, s->grh.dgid, sizeof(d->grh.dgid));
	d->grh.flow_label = s->grh.flow_label;
	d->grh.sgid_index = s->grh.sgid_index;
	d->grh.hop_limit = s->grh.hop_limit;
	d->grh.traffic_class = s->grh.traffic_class;
	d->dlid = s->dlid;
	d->sl = s->sl;
	d->src_path_bits = s->src_path_bits;
	d->static_rate = s->static_rate;
	d->is_global = s->is_global;
	d->port_num = s->port_num;
}

void ibv_copy_qp_attr_from_kern(struct ibv_qp_attr *d, struct ib_uverbs_qp_attr *s)
{
	*d = (struct ibv_qp_attr){
		.qp_state = s->qp_state, .cur_qp_state = s->cur_qp_state, .path_mtu = s->path_mtu,
		.path_mig_state = s->path_mig_state, .qkey = s->qkey, .rq_psn = s->rq_psn, .sq_psn = s->sq_psn,
		.dest_qp_num = s->dest_qp_num, .qp_access_flags = s->qp_access_flags,
		.cap = { .max_send_wr = s->max_send_wr, .max_recv_wr = s->max_recv_wr,
			 .max_send_sge = s->max_send_sge, .max_recv_sge = s->max_recv_sge,
			 .max_inline_data = s->max_inline_data },
		.pkey_index = s->pkey_index, .alt_pkey_index = s->alt_pkey_index,
		.en_sqd_async_notify = s->en_sqd_async_notify, .sq_draining = s->sq_draining,
		.max_rd_atomic = s->max_rd_atomic, .max_dest_rd_atomic = s->max_dest_rd_atomic,
		.min_rnr_timer = s->min_rnr_timer, .port_num = s->port_num, .timeout = s->timeout,
		.retry_cnt = s->retry_cnt, .rnr_retry = s->rnr_retry, .alt_port_num = s->alt_port_num,
		.alt_timeout = s->alt_timeout,
	};
	ibv_copy_ah_attr_from_kern(&d->ah_attr, &s->ah_attr);
	ibv_copy_ah_attr_from_kern(&d->alt_ah_attr, &s->alt_ah_attr);
}

#define PATH_FIELDS(d, s)                                                                          \
	do {                                                                                       \
		(d)->dlid = (s)->dlid;                                                             \
		(d)->slid = (s)->slid;                                                             \
		(d)->raw_traffic = (s)->raw_traffic;                                               \
		(d)->flow_label = (s)->flow_label;                                                 \
		(d)->reversible = (s)->reversible;                                                 \
		(d)->mtu = (s)->mtu;                                                               \
		(d)->pkey = (s)->pkey;                                                             \
		(d)->hop_limit = (s)->hop_limit;                                                   \
		(d)->traffic_class = (s)->traffic_class;                                           \
		(d)->numb_path = (s)->numb_path;                                                   \
		(d)->sl = (s)->sl;                                                                 \
		(d)->mtu_selector = (s)->mtu_selector;                                             \
		(d)->rate_selector = (s)->rate_selector;                                           \
		(d)->rate = (s)->rate;                                                             \
		(d)->packet_life_time_selector = (s)->packet_life_time_selector;                   \
		(d)->packet_life_time = (s)->packet_life_time;                                     \
		(d)->preference = (s)->preference;                                                 \
	} while (0)

void ibv_copy_path_rec_from_kern(struct ibv_sa_path_rec *d, struct ib_user_path_rec *s)
{
	memcpy(d->dgid.raw, s->dgid, 16);
	memcpy(d->sgid.raw, s->sgid, 16);
	PATH_FIELDS(d, s);
}

void ibv_copy_path_rec_to_kern(struct ib_user_path_rec *d, struct ibv_sa_path_rec *s)
{
	memcpy(d->dgid, s->dgid.raw, 16);
	memcpy(d->sgid, s->sgid.raw, 16);
	PATH_FIELDS(d, s);
}
