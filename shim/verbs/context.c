/* SPDX-License-Identifier: Apache-2.0
 *
 * Contexts: opening and closing a device, and what can be asked of it. */
#define _GNU_SOURCE
#include <endian.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "tv.h"

static int compat_query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *a);

struct ibv_context *ibv_open_device(struct ibv_device *ibv)
{
	struct ibv_context *ctx;
	/* A descriptor as programs expect one, with an inode by which ibv_import_device knows it. */
	int fd, err;

	TV_ALIVE(NULL);
	if (!ibv)
		return tv_null(EINVAL);
	fd = memfd_create("tapverbs-cmd", MFD_CLOEXEC);
	if (fd < 0)
		return NULL;
	pthread_mutex_lock(&tv_mutex);
	ctx = tv_ctx_new((struct tv_dev *)ibv, fd, NULL);
	err = errno;
	pthread_mutex_unlock(&tv_mutex);
	if (!ctx) {
		close(fd);
		errno = err;
	}
	return ctx;
}

/* tv_ctx_new opens a context, which then has cmd_fd, or imports it from another. Called
 * with tv_mutex held. */
struct ibv_context *tv_ctx_new(struct tv_dev *d, int cmd_fd, struct tv_ctx *of)
{
	struct verbs_context *v;
	struct tv_ctx *c;
	int rc;

	c = calloc(1, sizeof(*c));
	if (!c)
		return NULL;
	v = &c->vctx;
	c->dev = d;
	pthread_mutex_init(&c->events, NULL);
	pthread_cond_init(&c->acked, NULL);
	v->sz = sizeof(*v);
	v->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
	v->context.device = &d->ibv;
	v->context.num_comp_vectors = 1;
	v->context.cmd_fd = cmd_fd;
	v->context.async_fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	pthread_mutex_init(&v->context.mutex, NULL);
	v->context.ops.alloc_mw = tv_alloc_mw;
	v->context.ops.dealloc_mw = tv_dealloc_mw;
	v->context.ops.bind_mw = tv_bind_mw;
	v->context.ops.poll_cq = tv_poll_cq;
	v->context.ops.req_notify_cq = tv_req_notify_cq;
	v->context.ops.post_send = tv_post_send;
	v->context.ops.post_recv = tv_post_recv;
	v->context.ops.post_srq_recv = tv_post_srq_recv;
	v->context.ops._compat_query_device = ibv_query_device;
	v->context.ops._compat_query_port = compat_query_port;
	v->query_port = tv_query_port;
	v->query_device_ex = tv_query_device_ex;
	v->query_rt_values = tv_query_rt_values;
	v->create_cq_ex = tv_create_cq_ex;
	v->modify_cq = tv_modify_cq;
	v->modify_qp_rate_limit = tv_modify_qp_rate_limit;
	v->create_qp_ex = tv_create_qp_ex;
	v->create_srq_ex = tv_create_srq_ex;
	v->ibv_create_flow = tv_create_flow;
	v->ibv_destroy_flow = tv_destroy_flow;
	v->create_counters = tv_create_counters;
	v->destroy_counters = tv_destroy_counters;
	v->attach_counters_point_flow = tv_attach_counters;
	v->read_counters = tv_read_counters;
	v->open_xrcd = tv_open_xrcd;
	v->close_xrcd = tv_close_xrcd;
	v->get_srq_num = tv_get_srq_num;
	v->open_qp = tv_open_qp;

	v->alloc_td = tv_alloc_td;
	v->dealloc_td = tv_dealloc_td;
	v->alloc_parent_domain = tv_alloc_parent_domain;
	v->alloc_null_mr = tv_alloc_null_mr;
	v->advise_mr = tv_advise_mr;
	v->alloc_dm = tv_alloc_dm;
	v->free_dm = tv_free_dm;
	v->reg_dm_mr = tv_reg_dm_mr;

	rc = v->context.async_fd < 0 ? errno : tv_dev_open(d);
	if (!rc)
		rc = of ? tv_e->ctx_import(of->handle, v->context.async_fd, &c->handle) :
			  tv_e->ctx_open(d->handle, v->context.async_fd, &c->handle);
	if (rc) {
		if (v->context.async_fd >= 0)
			close(v->context.async_fd);
		free(c);
		return tv_null(rc);
	}
	d->refs++;
	d->opens++;
	tv_ctx_list(c);
	return &v->context;
}

int ibv_close_device(struct ibv_context *ctx)
{
	struct tv_ctx *c = tv_ctx(ctx);

	if (!tv_forked) {
		pthread_mutex_lock(&tv_mutex);
		tv_ctx_unlist(c);
		pthread_mutex_unlock(&tv_mutex);
		tv_e->ctx_close(c->handle);
		pthread_mutex_lock(&tv_mutex);
		c->dev->opens--;
		tv_dev_put(c->dev);
		pthread_mutex_unlock(&tv_mutex);
	}
	close(ctx->cmd_fd);
	close(ctx->async_fd);
	pthread_mutex_destroy(&ctx->mutex);
	pthread_mutex_destroy(&c->events);
	pthread_cond_destroy(&c->acked);
	free(c);
	return 0;
}

int ibv_query_device(struct ibv_context *ctx, struct ibv_device_attr *o)
{
	struct tv_device_attr a;
	int rc;

	TV_THERE(ctx, EIO);
	rc = tv_e->query_device(tv_ctx_handle(ctx), &a);
	if (rc)
		return rc;
	memset(o, 0, sizeof(*o));
	snprintf(o->fw_ver, sizeof(o->fw_ver), "tapverbs");
	o->node_guid = htobe64(a.node_guid);
	o->sys_image_guid = htobe64(a.sys_image_guid);
	o->max_mr_size = a.max_mr_size;
	o->page_size_cap = a.page_size_cap;
	o->vendor_id = 0xffffff; /* no vendor's OUI, as rdma_rxe has it */
	o->max_qp = a.max_qp;
	o->max_raw_ethy_qp = a.max_qp;
	o->max_qp_wr = a.max_qp_wr;
	o->device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_CURR_QP_STATE_MOD |
			      IBV_DEVICE_BAD_QKEY_CNTR | IBV_DEVICE_UD_AV_PORT_ENFORCE | IBV_DEVICE_SRQ_RESIZE |
			      IBV_DEVICE_PORT_ACTIVE_EVENT | IBV_DEVICE_SYS_IMAGE_GUID |
			      IBV_DEVICE_XRC | IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B |
			      IBV_DEVICE_MANAGED_FLOW_STEERING;
	o->max_sge = a.max_sge;
	o->max_sge_rd = a.max_sge;
	o->max_cq = a.max_cq;
	o->max_cqe = a.max_cqe;
	o->max_mr = a.max_mr;
	o->max_mw = a.max_mw;
	o->max_pd = a.max_pd;
	o->max_qp_rd_atom = a.max_qp_rd_atom;
	o->max_res_rd_atom = a.max_qp_rd_atom;
	o->max_qp_init_rd_atom = a.max_qp_init_rd_atom;
	o->atomic_cap = a.atomic_cap;
	o->max_mcast_grp = a.max_mcast_grp;
	o->max_mcast_qp_attach = a.max_mcast_qp_attach;
	o->max_total_mcast_qp_attach = a.max_total_mcast_qp_attach;
	o->max_ah = a.max_ah;
	o->max_srq = a.max_srq;
	o->max_srq_wr = a.max_srq_wr;
	o->max_srq_sge = a.max_srq_sge;
	o->max_pkeys = a.max_pkeys;
	o->local_ca_ack_delay = a.local_ca_ack_delay;
	o->phys_port_cnt = a.phys_port_cnt;
	return 0;
}

int tv_query_device_ex(struct ibv_context *ctx, const struct ibv_query_device_ex_input *in,
		       struct ibv_device_attr_ex *o, size_t size)
{
	struct ibv_device_attr_ex a = { 0 };
	struct tv_device_attr d;
	int rc;

	if (in && in->comp_mask)
		return EINVAL;
	if (size < sizeof(a.orig_attr))
		return EINVAL;
	rc = ibv_query_device(ctx, &a.orig_attr);
	if (!rc)
		rc = tv_e->query_device(tv_ctx_handle(ctx), &d);
	if (rc)
		return rc;
	if (d.odp) {
		/* Regions are paged on demand, with the flag and without it. */
		a.odp_caps.general_caps = IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT;
		a.odp_caps.per_transport_caps.rc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV |
			IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_ATOMIC | IBV_ODP_SUPPORT_SRQ_RECV |
			TV_ODP_SUPPORT_FLUSH | TV_ODP_SUPPORT_ATOMIC_WRITE;
		a.xrc_odp_caps = a.odp_caps.per_transport_caps.rc_odp_caps;
		a.odp_caps.per_transport_caps.uc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV |
			IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_SRQ_RECV;
		a.odp_caps.per_transport_caps.ud_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV |
			IBV_ODP_SUPPORT_SRQ_RECV;
	}
	a.packet_pacing_caps.qp_rate_limit_min = 1; /* kbit/s: any rate that there is */
	a.packet_pacing_caps.qp_rate_limit_max = UINT32_MAX;
	a.packet_pacing_caps.supported_qpts = 1 << IBV_QPT_RC | 1 << IBV_QPT_UC | 1 << IBV_QPT_UD | 1 << IBV_QPT_XRC_SEND |
					     1 << IBV_QPT_RAW_PACKET;
	a.cq_mod_caps.max_cq_count = d.max_cq_mod_count;
	a.cq_mod_caps.max_cq_period = d.max_cq_mod_us;
	a.completion_timestamp_mask = UINT64_MAX;
	a.hca_core_clock = 1000000; /* kHz: timestamps are nanoseconds */
	a.device_cap_flags_ex = a.orig_attr.device_cap_flags | TV_DEVICE_FLUSH_GLOBAL | TV_DEVICE_FLUSH_PERSISTENT |
				TV_DEVICE_ATOMIC_WRITE;
	a.pci_atomic_caps.fetch_add = IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP;
	a.pci_atomic_caps.compare_swap = IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP;
	a.phys_port_cnt_ex = a.orig_attr.phys_port_cnt;
	a.max_dm_size = d.max_dm_size;
	if (size > sizeof(a)) {
		memset((char *)o + sizeof(a), 0, size - sizeof(a));
		size = sizeof(a);
	}
	memcpy(o, &a, size);
	return 0;
}

int tv_query_rt_values(struct ibv_context *ctx, struct ibv_values_ex *v)
{
	uint64_t ns;
	int rc;

	TV_THERE(ctx, EIO);
	if (!v->comp_mask || v->comp_mask & ~IBV_VALUES_MASK_RAW_CLOCK)
		return EINVAL;
	rc = tv_e->query_clock(tv_ctx_handle(ctx), &ns);
	/* Raw clock counts: the timestamps' unit, as providers give it. */
	v->raw_clock.tv_sec = ns / 1000000000;
	v->raw_clock.tv_nsec = ns % 1000000000;
	return rc;
}

int tv_query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *o, size_t size)
{
	struct ibv_port_attr a = { 0 };
	struct tv_port_attr p;
	int rc;

	TV_THERE(ctx, EIO);
	if (port != 1)
		return EINVAL;
	rc = tv_e->query_port(tv_ctx_handle(ctx), &p);
	if (rc)
		return rc;
	a.state = p.state;
	a.max_mtu = p.max_mtu;
	a.active_mtu = p.active_mtu;
	a.gid_tbl_len = p.gid_tbl_len;
	a.port_cap_flags = IBV_PORT_IP_BASED_GIDS;
	a.max_msg_sz = p.max_msg_sz;
	a.qkey_viol_cntr = p.qkey_violations;
	a.pkey_tbl_len = p.pkey_tbl_len;
	a.active_width = 2;                                /* 4x */
	a.active_speed = 4;                                /* 10 Gbit/s a lane */
	a.phys_state = p.state == IBV_PORT_ACTIVE ? 5 : 3; /* link up, disabled */
	a.max_vl_num = 1;
	a.link_layer = IBV_LINK_LAYER_ETHERNET;
	if (size > sizeof(a)) {
		memset((char *)o + sizeof(a), 0, size - sizeof(a));
		size = sizeof(a);
	}
	memcpy(o, &a, size);
	return 0;
}

/* The struct of programs from before port_cap_flags2 ends before it. */
static int compat_query_port(struct ibv_context *ctx, uint8_t port, struct _compat_ibv_port_attr *a)
{
	return tv_query_port(ctx, port, (struct ibv_port_attr *)a, offsetof(struct ibv_port_attr, port_cap_flags2));
}

int ibv_query_port(struct ibv_context *ctx, uint8_t port, struct _compat_ibv_port_attr *a)
{
	return compat_query_port(ctx, port, a);
}

int ibv_query_gid(struct ibv_context *ctx, uint8_t port, int index, union ibv_gid *gid)
{
	int rc = EINVAL;

	TV_THERE(ctx, -1);
	if (port == 1 && index >= 0)
		rc = tv_e->query_gid(tv_ctx_handle(ctx), index, gid->raw);
	if (!rc)
		return 0;
	errno = rc;
	return -1;
}

/* Of rdma-core's own programs: 0 is IB and RoCE v1, 1 is RoCE v2. */
int ibv_query_gid_type(struct ibv_context *ctx, uint8_t port, unsigned int index, unsigned int *type)
{
	union ibv_gid g;

	if (ibv_query_gid(ctx, port, index, &g))
		return -1;
	*type = 1;
	return 0;
}

int _ibv_query_gid_ex(struct ibv_context *ctx, uint32_t port, uint32_t index, struct ibv_gid_entry *e,
		      uint32_t flags, size_t size)
{
	struct ibv_gid_entry g = { .gid_index = index, .port_num = port, .gid_type = IBV_GID_TYPE_ROCE_V2 };

	if (flags || size < sizeof(g))
		return flags ? EOPNOTSUPP : EINVAL;
	if (port != 1 || index > INT32_MAX)
		return EINVAL;
	if (ibv_query_gid(ctx, 1, index, &g.gid))
		return errno == EINVAL ? ENODATA : errno;
	memset(e, 0, size);
	memcpy(e, &g, sizeof(g));
	return 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *ctx, struct ibv_gid_entry *e, size_t max, uint32_t flags, size_t size)
{
	struct tv_port_attr p;
	int rc;

	TV_THERE(ctx, -EIO);
	if (flags)
		return -EOPNOTSUPP;
	if (size < sizeof(*e))
		return -EINVAL;
	rc = tv_e->query_port(tv_ctx_handle(ctx), &p);
	if (rc)
		return -rc;
	if ((size_t)p.gid_tbl_len > max)
		return -EINVAL;
	for (int i = 0; i < p.gid_tbl_len; i++) {
		rc = _ibv_query_gid_ex(ctx, 1, i, (struct ibv_gid_entry *)((char *)e + i * size), 0, size);
		if (rc)
			return -rc;
	}
	return p.gid_tbl_len;
}

/* One partition: the default one, with full membership. */
int ibv_query_pkey(struct ibv_context *ctx, uint8_t port, int index, __be16 *pkey)
{
	TV_THERE(ctx, -1);
	if (port != 1 || index != 0) {
		errno = EINVAL;
		return -1;
	}
	*pkey = htobe16(0xffff);
	return 0;
}

int ibv_get_pkey_index(struct ibv_context *ctx, uint8_t port, __be16 pkey)
{
	TV_THERE(ctx, -1);
	if (port != 1 || pkey != htobe16(0xffff)) {
		errno = EINVAL;
		return -1;
	}
	return 0;
}

TV_LATEST(ibv_close_device);
TV_LATEST(ibv_open_device);
TV_LATEST(ibv_query_device);
TV_LATEST(ibv_query_gid);
TV_LATEST(ibv_query_pkey);
TV_LATEST(ibv_query_port);
