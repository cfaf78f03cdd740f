/* SPDX-License-Identifier: Apache-2.0
 *
 * The names of the first ABI, IBVERBS_1.0: programs linked before 2007. The structs
 * were others then. There is no device for such a program: its list is empty, and
 * every other call fails.
 *
 * ibv_register_driver@IBVERBS_1.1 was for providers of that time; nothing calls back. */
#include "tv.h"

#define OLD(name, version) __asm__(".symver old_" #name "," #name "@" version)

static void *old_null(void) { return tv_null(ENOSYS); }
static int old_errno(void) { return tv_fail(ENOSYS); }
static int old_minus(void)
{
	errno = ENOSYS;
	return -1;
}
static uint64_t old_zero(void) { return 0; }
static void old_void(void) {}

#define NULL_OF(name) void *old_##name(void) __attribute__((alias("old_null"), used))
#define ERRNO_OF(name) int old_##name(void) __attribute__((alias("old_errno"), used))
#define MINUS_OF(name) int old_##name(void) __attribute__((alias("old_minus"), used))
#define ZERO_OF(name) uint64_t old_##name(void) __attribute__((alias("old_zero"), used))
#define VOID_OF(name) void old_##name(void) __attribute__((alias("old_void"), used))

VOID_OF(ibv_ack_async_event);
OLD(ibv_ack_async_event, "IBVERBS_1.0");
VOID_OF(ibv_ack_cq_events);
OLD(ibv_ack_cq_events, "IBVERBS_1.0");
NULL_OF(ibv_alloc_pd);
OLD(ibv_alloc_pd, "IBVERBS_1.0");
ERRNO_OF(ibv_attach_mcast);
OLD(ibv_attach_mcast, "IBVERBS_1.0");
ERRNO_OF(ibv_close_device);
OLD(ibv_close_device, "IBVERBS_1.0");
NULL_OF(ibv_create_ah);
OLD(ibv_create_ah, "IBVERBS_1.0");
NULL_OF(ibv_create_cq);
OLD(ibv_create_cq, "IBVERBS_1.0");
NULL_OF(ibv_create_qp);
OLD(ibv_create_qp, "IBVERBS_1.0");
NULL_OF(ibv_create_srq);
OLD(ibv_create_srq, "IBVERBS_1.0");
ERRNO_OF(ibv_dealloc_pd);
OLD(ibv_dealloc_pd, "IBVERBS_1.0");
ERRNO_OF(ibv_dereg_mr);
OLD(ibv_dereg_mr, "IBVERBS_1.0");
ERRNO_OF(ibv_destroy_ah);
OLD(ibv_destroy_ah, "IBVERBS_1.0");
ERRNO_OF(ibv_destroy_cq);
OLD(ibv_destroy_cq, "IBVERBS_1.0");
ERRNO_OF(ibv_destroy_qp);
OLD(ibv_destroy_qp, "IBVERBS_1.0");
ERRNO_OF(ibv_destroy_srq);
OLD(ibv_destroy_srq, "IBVERBS_1.0");
ERRNO_OF(ibv_detach_mcast);
OLD(ibv_detach_mcast, "IBVERBS_1.0");
VOID_OF(ibv_free_device_list);
OLD(ibv_free_device_list, "IBVERBS_1.0");
MINUS_OF(ibv_get_async_event);
OLD(ibv_get_async_event, "IBVERBS_1.0");
MINUS_OF(ibv_get_cq_event);
OLD(ibv_get_cq_event, "IBVERBS_1.0");
ZERO_OF(ibv_get_device_guid);
OLD(ibv_get_device_guid, "IBVERBS_1.0");
NULL_OF(ibv_get_device_name);
OLD(ibv_get_device_name, "IBVERBS_1.0");
ERRNO_OF(ibv_modify_qp);
OLD(ibv_modify_qp, "IBVERBS_1.0");
ERRNO_OF(ibv_modify_srq);
OLD(ibv_modify_srq, "IBVERBS_1.0");
NULL_OF(ibv_open_device);
OLD(ibv_open_device, "IBVERBS_1.0");
ERRNO_OF(ibv_query_device);
OLD(ibv_query_device, "IBVERBS_1.0");
MINUS_OF(ibv_query_gid);
OLD(ibv_query_gid, "IBVERBS_1.0");
MINUS_OF(ibv_query_pkey);
OLD(ibv_query_pkey, "IBVERBS_1.0");
ERRNO_OF(ibv_query_port);
OLD(ibv_query_port, "IBVERBS_1.0");
ERRNO_OF(ibv_query_qp);
OLD(ibv_query_qp, "IBVERBS_1.0");
ERRNO_OF(ibv_query_srq);
OLD(ibv_query_srq, "IBVERBS_1.0");
NULL_OF(ibv_reg_mr);
OLD(ibv_reg_mr, "IBVERBS_1.0");
VOID_OF(ibv_register_driver);
OLD(ibv_register_driver, "IBVERBS_1.1");
ERRNO_OF(ibv_resize_cq);
OLD(ibv_resize_cq, "IBVERBS_1.0");

struct ibv_device **old_ibv_get_device_list(int *num) __attribute__((used));
struct ibv_device **old_ibv_get_device_list(int *num)
{
	if (num)
		*num = 0;
	return tv_null(ENOSYS);
}
OLD(ibv_get_device_list, "IBVERBS_1.0");
