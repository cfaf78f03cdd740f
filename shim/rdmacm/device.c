/* SPDX-License-Identifier: Apache-2.0
 *
 * The device. It is opened when somebody asks for it first, and stays open; when it is gone
 * the next who asks is given the port anew, if that can be had. */
#include <fcntl.h>

#include "cm.h"

pthread_mutex_t cm_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t cm_acked = PTHREAD_COND_INITIALIZER;

static struct cm_device *the_device; /* guarded by cm_mutex */
static bool registered;              /* so is this: at_exit will be called */

static const struct tv_dv *table(struct ibv_device *d)
{
	const struct tv_dv *t = d->_ops._dummy1 ? (const struct tv_dv *)d->_ops._dummy1(d, TV_DV_ASK) : NULL;

	return t && t->magic == TV_DV_MAGIC && t->abi == TV_ABI ? t : NULL;
}

/* at_exit ends connections that the program has left: there is no kernel to do it. */
static void at_exit(void)
{
	struct cm_device *d = the_device;

	if (d && !d->dv->lost(d->verbs))
		d->dv->engine->cm_exit(d->ctx);
}

static struct cm_device *open_device(void)
{
	struct cm_device *d = calloc(1, sizeof(*d));
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_device_attr attr;
	int err = ENODEV;

	if (!d || !list || !list[0] || !(d->dv = table(list[0])))
		goto fail;
	d->verbs = ibv_open_device(list[0]);
	if (!d->verbs) {
		err = errno;
		goto fail;
	}
	d->pd = ibv_alloc_pd(d->verbs);
	if (!d->pd || (err = ibv_query_device(d->verbs, &attr))) {
		err = d->pd ? err : errno;
		goto fail;
	}
	d->ctx = d->dv->ctx(d->verbs);
	d->max_responder = attr.max_qp_rd_atom > 255 ? 255 : attr.max_qp_rd_atom;
	d->max_initiator = attr.max_qp_init_rd_atom > 255 ? 255 : attr.max_qp_init_rd_atom;
	ibv_free_device_list(list);
	if (!registered) {
		registered = true;
		atexit(at_exit);
	}
	return d;
fail:
	if (d && d->pd)
		ibv_dealloc_pd(d->pd);
	if (d && d->verbs)
		ibv_close_device(d->verbs);
	if (list)
		ibv_free_device_list(list);
	free(d);
	errno = err;
	return NULL;
}

/* close_device ends one that is gone. What programs have left there keeps it open. */
static void close_device(struct cm_device *d)
{
	if (d->xrcd)
		ibv_close_xrcd(d->xrcd);
	ibv_dealloc_pd(d->pd);
	ibv_close_device(d->verbs);
	free(d);
}

struct cm_device *cm_device_get(void)
{
	struct cm_device *d, *old = NULL;

	pthread_mutex_lock(&cm_mutex);
	d = the_device;
	if (d && d->dv->lost(d->verbs) && !d->dv->forked()) {
		if (!d->refs)
			old = d;
		d = NULL;
	}
	if (!d) {
		if (old)
			close_device(old);
		the_device = d = open_device();
	}
	if (d)
		d->refs++;
	pthread_mutex_unlock(&cm_mutex);
	return d;
}

void cm_device_ref(struct cm_device *d)
{
	pthread_mutex_lock(&cm_mutex);
	d->refs++;
	pthread_mutex_unlock(&cm_mutex);
}

void cm_device_put(struct cm_device *d)
{
	pthread_mutex_lock(&cm_mutex);
	if (!--d->refs && d != the_device)
		close_device(d);
	pthread_mutex_unlock(&cm_mutex);
}

/* cm_device_xrcd is the XRC domain of those who bring none; NULL with errno. */
struct ibv_xrcd *cm_device_xrcd(struct cm_device *d)
{
	struct ibv_xrcd_init_attr attr = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT };

	pthread_mutex_lock(&cm_mutex);
	if (!d->xrcd)
		d->xrcd = ibv_open_xrcd(d->verbs, &attr);
	pthread_mutex_unlock(&cm_mutex);
	return d->xrcd;
}

struct ibv_context **rdma_get_devices(int *num)
{
	struct ibv_context **list = calloc(2, sizeof(*list));
	struct cm_device *d = list ? cm_device_get() : NULL;

	if (num)
		*num = d ? 1 : 0;
	if (!d) {
		free(list);
		return NULL;
	}
	list[0] = d->verbs;
	cm_device_put(d);
	return list;
}

void rdma_free_devices(struct ibv_context **list) { free(list); }
