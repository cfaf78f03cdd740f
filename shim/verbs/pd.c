/* SPDX-License-Identifier: Apache-2.0
 *
 * Protection domains, memory regions, address handles. */
#include <stdlib.h>

#include "tv.h"

struct ibv_pd *ibv_alloc_pd(struct ibv_context *ctx)
{
	struct tv_pd *pd;
	int rc;

	TV_THERE(ctx, NULL);
	pd = calloc(1, sizeof(*pd));
	if (!pd)
		return NULL;
	rc = tv_e->alloc_pd(tv_ctx_handle(ctx), &pd->handle);
	if (rc) {
		free(pd);
		return tv_null(rc);
	}
	pd->ibv.context = ctx;
	pd->ibv.handle = pd->handle;
	return &pd->ibv;
}

int ibv_dealloc_pd(struct ibv_pd *ibpd)
{
	struct tv_pd *pd = (struct tv_pd *)ibpd;
	int rc;

	TV_ALIVE(EIO);
	if (pd->parent && __atomic_load_n(&pd->parent->cqs, __ATOMIC_ACQUIRE))
		return tv_fail(EBUSY);
	rc = tv_e->destroy(pd->handle);
	if (rc)
		return tv_fail(rc);
	tv_parent_end(pd->parent);
	free(pd);
	return 0;
}

static struct ibv_mr *reg(struct ibv_pd *ibpd, void *addr, size_t length, uint64_t iova, bool have_iova, unsigned access)
{
	struct tv_reg r = { .addr = (uintptr_t)addr, .length = length, .iova = iova, .have_iova = have_iova };
	struct tv_mr *mr;

	TV_THERE(ibpd->context, NULL);
	r.access = access & ~TV_IGNORED_ACCESS;
	if (access & IBV_ACCESS_ZERO_BASED)
		r.have_iova = 0;
	mr = tv_mr_begin(&r);
	if (!mr)
		return NULL;
	return tv_mr_end(mr, ibpd, tv_e->reg_mr(((struct tv_pd *)ibpd)->handle, &r), &r, addr, length);
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return reg(pd, addr, length, 0, false, access);
}

struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	return reg(pd, addr, length, iova, true, access);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	return reg(pd, addr, length, iova, true, access);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
	(void)pd, (void)offset, (void)length, (void)iova, (void)fd, (void)access;
	return tv_null(EOPNOTSUPP);
}

int ibv_dereg_mr(struct ibv_mr *ibmr)
{
	struct tv_mr *mr = (struct tv_mr *)ibmr;
	int rc;

	TV_ALIVE(EIO);
	rc = tv_e->destroy(mr->handle);
	if (rc)
		return tv_fail(rc);
	tv_mr_settle(mr);
	free(mr);
	return 0;
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *ibpd, struct ibv_ah_attr *a)
{
	struct tv_ah_attr t = { .flow_label = a->grh.flow_label, .sgid_index = a->grh.sgid_index,
				.hop_limit = a->grh.hop_limit, .traffic_class = a->grh.traffic_class,
				.sl = a->sl, .port_num = a->port_num };
	struct tv_ah *ah;
	int rc;

	TV_THERE(ibpd->context, NULL);
	if (!a->is_global || a->port_num != 1)
		return tv_null(EINVAL); /* RoCE has no other route (IBA A17.4.1) */
	memcpy(t.dgid, a->grh.dgid.raw, sizeof(t.dgid));
	ah = calloc(1, sizeof(*ah));
	if (!ah)
		return NULL;
	rc = tv_e->create_ah(((struct tv_pd *)ibpd)->handle, &t, &ah->handle);
	if (rc) {
		free(ah);
		return tv_null(rc);
	}
	ah->number = t.number;
	ah->ibv = (struct ibv_ah){ .context = ibpd->context, .pd = ibpd, .handle = ah->handle };
	return &ah->ibv;
}

int ibv_destroy_ah(struct ibv_ah *ibah)
{
	struct tv_ah *ah = (struct tv_ah *)ibah;
	int rc;

	TV_ALIVE(EIO);
	rc = tv_e->destroy(ah->handle);
	if (rc)
		return tv_fail(rc);
	free(ah);
	return 0;
}

/* ibv_init_ah_from_wc makes the way back to the sender of a datagram from the 40 bytes
 * in front of it: a GRH, or 20 bytes and an IPv4 header (IBA A17.4.5.2). */
int ibv_init_ah_from_wc(struct ibv_context *ctx, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh,
			struct ibv_ah_attr *a)
{
	const uint8_t *b = (const uint8_t *)grh;
	union ibv_gid own, mine = { .raw = { [10] = 0xff, [11] = 0xff } };

	memset(a, 0, sizeof(*a));
	a->dlid = wc->slid;
	a->sl = wc->sl;
	a->src_path_bits = wc->dlid_path_bits;
	a->port_num = port;
	if (!(wc->wc_flags & IBV_WC_GRH))
		return 0;
	a->is_global = 1;
	if (b[0] >> 4 == 6) {
		memcpy(a->grh.dgid.raw, b + 8, 16);
		memcpy(mine.raw, b + 24, 16);
		a->grh.flow_label = (b[1] & 0xf) << 16 | b[2] << 8 | b[3];
		a->grh.traffic_class = (b[0] & 0xf) << 4 | b[1] >> 4;
	} else {
		a->grh.dgid.raw[10] = a->grh.dgid.raw[11] = 0xff;
		memcpy(a->grh.dgid.raw + 12, b + 20 + 12, 4);
		memcpy(mine.raw + 12, b + 20 + 16, 4);
		a->grh.traffic_class = b[21];
	}
	a->grh.hop_limit = 64;
	for (int i = 0; !ibv_query_gid(ctx, port, i, &own); i++) {
		if (!memcmp(own.raw, mine.raw, 16)) {
			a->grh.sgid_index = i;
			return 0;
		}
	}
	/* Sent to a group: any address of the family will do. */
	for (int i = 0; !ibv_query_gid(ctx, port, i, &own); i++) {
		static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

		if (!memcmp(own.raw, mapped, 12) == !memcmp(a->grh.dgid.raw, mapped, 12)) {
			a->grh.sgid_index = i;
			return 0;
		}
	}
	errno = EINVAL;
	return -1;
}

struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh, uint8_t port)
{
	struct ibv_ah_attr a;

	if (ibv_init_ah_from_wc(pd->context, port, wc, grh, &a))
		return NULL;
	return ibv_create_ah(pd, &a);
}

int ibv_resolve_eth_l2_from_gid(struct ibv_context *ctx, struct ibv_ah_attr *a, uint8_t mac[ETHERNET_LL_SIZE], uint16_t *vid)
{
	struct tv_ah_attr t = { .flow_label = a->grh.flow_label, .sgid_index = a->grh.sgid_index, .sl = a->sl, .port_num = a->port_num };
	int rc;

	TV_THERE(ctx, EIO);
	if (!a->is_global || a->port_num != 1)
		return tv_fail(EINVAL);
	memcpy(t.dgid, a->grh.dgid.raw, sizeof(t.dgid));
	rc = tv_e->resolve(tv_ctx_handle(ctx), &t, mac);
	if (!rc && vid)
		*vid = 0xffff; /* frames are not tagged */
	return tv_fail(rc);
}

TV_LATEST(ibv_alloc_pd);
TV_LATEST(ibv_create_ah);
TV_LATEST(ibv_dealloc_pd);
TV_LATEST(ibv_dereg_mr);
TV_LATEST(ibv_destroy_ah);
TV_LATEST(ibv_reg_mr);
