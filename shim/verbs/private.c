/* SPDX-License-Identifier: Apache-2.0
 *
 * IBVERBS_PRIVATE_34: what rdma-core's providers (libmlx5 and its kin, which programs
 * may be linked with) use of their libibverbs. Registering a provider works and has no
 * effect, as there is no kernel device for it; what only a kernel driver could do
 * answers EOPNOTSUPP. Their prototypes are not in public headers: arguments are not
 * looked at. ibv_query_gid_type is in context.c. */
#include "tv.h"

bool verbs_allow_disassociate_destroy;

void verbs_register_driver_34(const void *ops) { (void)ops; }
void verbs_set_ops(void *ctx, const void *ops) { (void)ctx, (void)ops; }
void verbs_uninit_context(void *ctx) { (void)ctx; }
void *verbs_open_device(struct ibv_device *d, void *priv)
{
	(void)d, (void)priv;
	return tv_null(EOPNOTSUPP);
}

void *_verbs_init_and_alloc_context(struct ibv_device *d, int fd, size_t size, void *ctx, uint32_t id)
{
	(void)d, (void)fd, (void)size, (void)ctx, (void)id;
	return tv_null(EOPNOTSUPP);
}

void verbs_init_cq(struct ibv_cq *cq, struct ibv_context *ctx, struct ibv_comp_channel *ch, void *user)
{
	cq->context = ctx;
	cq->channel = ch;
	cq->cq_context = user;
	cq->comp_events_completed = 0;
	cq->async_events_completed = 0;
	pthread_mutex_init(&cq->mutex, NULL);
	pthread_cond_init(&cq->cond, NULL);
}

void __verbs_log(void *ctx, uint32_t level, const char *fmt, ...) { (void)ctx, (void)level, (void)fmt; }

unsigned int __ioctl_final_num_attrs(unsigned int n, void *link)
{
	(void)link;
	return n;
}

int ibv_read_ibdev_sysfs_file(char *buf, size_t size, void *dev, const char *fmt, ...)
{
	(void)buf, (void)size, (void)dev, (void)fmt;
	errno = EOPNOTSUPP;
	return -1;
}

static int unsupported(void) { return tv_fail(EOPNOTSUPP); }

#define UNSUPPORTED(name) int name(void) __attribute__((alias("unsupported")))

UNSUPPORTED(execute_ioctl);
UNSUPPORTED(ibv_cmd_advise_mr);
UNSUPPORTED(ibv_cmd_alloc_dm);
UNSUPPORTED(ibv_cmd_alloc_mw);
UNSUPPORTED(ibv_cmd_alloc_pd);
UNSUPPORTED(ibv_cmd_attach_mcast);
UNSUPPORTED(ibv_cmd_close_xrcd);
UNSUPPORTED(ibv_cmd_create_ah);
UNSUPPORTED(ibv_cmd_create_counters);
UNSUPPORTED(ibv_cmd_create_cq);
UNSUPPORTED(ibv_cmd_create_cq_ex);
UNSUPPORTED(ibv_cmd_create_flow);
UNSUPPORTED(ibv_cmd_create_flow_action_esp);
UNSUPPORTED(ibv_cmd_create_qp);
UNSUPPORTED(ibv_cmd_create_qp_ex);
UNSUPPORTED(ibv_cmd_create_qp_ex2);
UNSUPPORTED(ibv_cmd_create_rwq_ind_table);
UNSUPPORTED(ibv_cmd_create_srq);
UNSUPPORTED(ibv_cmd_create_srq_ex);
UNSUPPORTED(ibv_cmd_create_wq);
UNSUPPORTED(ibv_cmd_dealloc_mw);
UNSUPPORTED(ibv_cmd_dealloc_pd);
UNSUPPORTED(ibv_cmd_dereg_mr);
UNSUPPORTED(ibv_cmd_destroy_ah);
UNSUPPORTED(ibv_cmd_destroy_counters);
UNSUPPORTED(ibv_cmd_destroy_cq);
UNSUPPORTED(ibv_cmd_destroy_flow);
UNSUPPORTED(ibv_cmd_destroy_flow_action);
UNSUPPORTED(ibv_cmd_destroy_qp);
UNSUPPORTED(ibv_cmd_destroy_rwq_ind_table);
UNSUPPORTED(ibv_cmd_destroy_srq);
UNSUPPORTED(ibv_cmd_destroy_wq);
UNSUPPORTED(ibv_cmd_detach_mcast);
UNSUPPORTED(ibv_cmd_free_dm);
UNSUPPORTED(ibv_cmd_get_context);
UNSUPPORTED(ibv_cmd_modify_cq);
UNSUPPORTED(ibv_cmd_modify_flow_action_esp);
UNSUPPORTED(ibv_cmd_modify_qp);
UNSUPPORTED(ibv_cmd_modify_qp_ex);
UNSUPPORTED(ibv_cmd_modify_srq);
UNSUPPORTED(ibv_cmd_modify_wq);
UNSUPPORTED(ibv_cmd_open_qp);
UNSUPPORTED(ibv_cmd_open_xrcd);
UNSUPPORTED(ibv_cmd_poll_cq);
UNSUPPORTED(ibv_cmd_post_recv);
UNSUPPORTED(ibv_cmd_post_send);
UNSUPPORTED(ibv_cmd_post_srq_recv);
UNSUPPORTED(ibv_cmd_query_context);
UNSUPPORTED(ibv_cmd_query_device_any);
UNSUPPORTED(ibv_cmd_query_mr);
UNSUPPORTED(ibv_cmd_query_port);
UNSUPPORTED(ibv_cmd_query_qp);
UNSUPPORTED(ibv_cmd_query_srq);
UNSUPPORTED(ibv_cmd_read_counters);
UNSUPPORTED(ibv_cmd_reg_dm_mr);
UNSUPPORTED(ibv_cmd_reg_dmabuf_mr);
UNSUPPORTED(ibv_cmd_reg_mr);
UNSUPPORTED(ibv_cmd_req_notify_cq);
UNSUPPORTED(ibv_cmd_rereg_mr);
UNSUPPORTED(ibv_cmd_resize_cq);
