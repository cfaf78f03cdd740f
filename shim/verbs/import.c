/* SPDX-License-Identifier: Apache-2.0
 *
 * Importing. Here it works within a process, where the engine is: a context is found
 * by its cmd_fd or a duplicate, and its domains, regions and device memory by the
 * handle in their structs. Each import is an object of its own: destroying it destroys
 * what is behind it, for all; unimport ends only itself. */
#include <stdlib.h>
#include <sys/stat.h>

#include "tv.h"

static struct tv_ctx *contexts; /* guarded by tv_mutex */

/* tv_ctx_list and tv_ctx_unlist are called with tv_mutex held. */
void tv_ctx_list(struct tv_ctx *c)
{
	c->next = contexts;
	contexts = c;
}

void tv_ctx_unlist(struct tv_ctx *c)
{
	for (struct tv_ctx **p = &contexts; *p; p = &(*p)->next)
		if (*p == c) {
			*p = c->next;
			return;
		}
}

struct ibv_context *ibv_import_device(int cmd_fd)
{
	struct ibv_context *out = NULL;
	struct stat want, st;

	TV_ALIVE(NULL);
	if (fstat(cmd_fd, &want))
		return NULL;
	pthread_mutex_lock(&tv_mutex);
	errno = EINVAL; /* of no context here */
	for (struct tv_ctx *c = contexts; c; c = c->next)
		if (!fstat(c->vctx.context.cmd_fd, &st) && st.st_ino == want.st_ino && st.st_dev == want.st_dev) {
			out = tv_ctx_new(c->dev, cmd_fd, c);
			break;
		}
	pthread_mutex_unlock(&tv_mutex);
	return out;
}

static int import(struct ibv_context *ctx, struct tv_import *i)
{
	return tv_e->import(tv_ctx_handle(ctx), i);
}

struct ibv_pd *ibv_import_pd(struct ibv_context *ctx, uint32_t handle)
{
	struct tv_import i = { .kind = TV_IMPORT_PD, .number = handle };
	struct tv_pd *pd;
	int rc;

	TV_THERE(ctx, NULL);
	pd = calloc(1, sizeof(*pd));
	if (!pd)
		return NULL;
	rc = import(ctx, &i);
	if (rc) {
		free(pd);
		return tv_null(rc);
	}
	pd->handle = i.handle;
	pd->ibv = (struct ibv_pd){ .context = ctx, .handle = handle };
	return &pd->ibv;
}

void ibv_unimport_pd(struct ibv_pd *ibpd)
{
	struct tv_pd *pd = (struct tv_pd *)ibpd;

	TV_ALIVE();
	tv_e->unimport(pd->handle);
	tv_parent_end(pd->parent);
	free(pd);
}

struct ibv_mr *ibv_import_mr(struct ibv_pd *pd, uint32_t handle)
{
	struct tv_import i = { .kind = TV_IMPORT_MR, .number = handle };
	struct tv_mr *mr;
	int rc;

	TV_THERE(pd->context, NULL);
	mr = calloc(1, sizeof(*mr));
	if (!mr)
		return NULL;
	rc = import(pd->context, &i);
	if (rc) {
		free(mr);
		return tv_null(rc);
	}
	mr->handle = i.handle;
	mr->ibv = (struct ibv_mr){ .context = pd->context, .pd = pd, .length = i.length, .handle = handle,
				   .lkey = i.lkey, .rkey = i.rkey };
	return &mr->ibv;
}

void ibv_unimport_mr(struct ibv_mr *mr)
{
	TV_ALIVE();
	tv_e->unimport(((struct tv_mr *)mr)->handle);
	free(mr);
}

struct ibv_dm *ibv_import_dm(struct ibv_context *ctx, uint32_t handle)
{
	struct tv_import i = { .kind = TV_IMPORT_DM, .number = handle };
	struct ibv_dm *dm;
	int rc;

	TV_THERE(ctx, NULL);
	rc = import(ctx, &i);
	if (rc)
		return tv_null(rc);
	dm = tv_dm_new(ctx, i.handle, handle, i.addr, i.length);
	if (!dm)
		tv_e->unimport(i.handle);
	return dm;
}

void ibv_unimport_dm(struct ibv_dm *dm)
{
	TV_ALIVE();
	tv_e->unimport(((struct tv_dm *)dm)->handle);
	free(dm);
}
