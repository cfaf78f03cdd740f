/* SPDX-License-Identifier: Apache-2.0
 *
 * Hooks for changes of mappings. */
#include <stdlib.h>

#include "private.h"

struct tapverbs_dv_notifier {
	struct ibv_context *context;
	struct tapverbs_dv_notifier_ops ops;
	void *user;
	tv_handle handle;
};

/* A notifier that ends with its context is freed then. */
static void release(void *arg)
{
	struct tapverbs_dv_notifier *n = arg;

	if (n->ops.release)
		n->ops.release(n->user);
	free(n);
}

#define N(arg) ((struct tapverbs_dv_notifier *)(arg))
static void sync_range(void *n, uintptr_t start, uintptr_t end) { N(n)->ops.sync_range(N(n)->user, start, end); }
static void invalidate_range(void *n, uintptr_t start, uintptr_t end) { N(n)->ops.invalidate_range(N(n)->user, start, end); }
static void update_range(void *n, uintptr_t start, uintptr_t end) { N(n)->ops.update_range(N(n)->user, start, end); }
static void protect(void *n, uintptr_t start, uintptr_t end, int prot) { N(n)->ops.change_protection(N(n)->user, start, end, prot); }
static void sync_page(void *n, uintptr_t addr) { N(n)->ops.sync_page(N(n)->user, addr); }
static void invalidate_page(void *n, uintptr_t addr) { N(n)->ops.invalidate_page(N(n)->user, addr); }
static void update_page(void *n, uintptr_t addr) { N(n)->ops.update_page(N(n)->user, addr); }

struct tapverbs_dv_notifier *tapverbs_dv_add_notifier(struct ibv_context *ctx, const struct tapverbs_dv_notifier_ops *ops,
						      void *user, uintptr_t start, uintptr_t end)
{
	struct tapverbs_dv_notifier *n = calloc(1, sizeof(*n));
	int rc;

	if (!n)
		return NULL;
	*n = (struct tapverbs_dv_notifier){ .context = ctx, .ops = *ops, .user = user };
	struct tv_notifier t = {
		.user = n, .release = release, .sync_range = ops->sync_range ? sync_range : NULL,
		.invalidate_range = ops->invalidate_range ? invalidate_range : NULL,
		.update_range = ops->update_range ? update_range : NULL,
		.change_protection = ops->change_protection ? protect : NULL,
		.sync_page = ops->sync_page ? sync_page : NULL, .invalidate_page = ops->invalidate_page ? invalidate_page : NULL,
		.update_page = ops->update_page ? update_page : NULL,
	};
	rc = ops->comp_mask ? EINVAL : DV_CTX(ctx, add_notifier, &t, start, end, &n->handle);
	if (rc) {
		free(n);
		errno = rc;
		return NULL;
	}
	return n;
}

int tapverbs_dv_remove_notifier(struct tapverbs_dv_notifier *n)
{
	const struct tv_dv *t = dv_table(n->context->device);
	int rc = t->forked() ? EIO : t->engine->remove_notifier(n->handle);

	if (!rc)
		free(n);
	return rc;
}

int tapverbs_dv_settle_notifiers(struct ibv_context *ctx) { return DV_CTX(ctx, settle_notifiers); }
