/* SPDX-License-Identifier: Apache-2.0
 *
 * The cache of registrations of tapverbs_dv.h where regions cannot be had: built with its
 * source, on a table that registers nothing and says ENOMEM when it is told to. */
#include "../../../shim/dv/regcache.c"

#include <stdio.h>

#define CHECK(cond)                                                                                \
	do {                                                                                       \
		if (!(cond)) {                                                                     \
			fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #cond, errno); \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

enum { PAGE = 4096 };

struct region {
	struct ibv_mr ibv;
	void *note;
	int unacked;
};

static struct ibv_context ctx;
static struct ibv_pd pd = { .context = &ctx };
static uint64_t word;
static cache *it;
static size_t live, most, longest = SIZE_MAX; /* regions: how many there are and may be; how long one may be */

static struct ibv_mr *reg_mr(struct ibv_pd *p, void *addr, size_t length, int access)
{
	struct region *r;

	(void)access;
	if (live == most || length > longest) {
		errno = ENOMEM;
		return NULL;
	}
	CHECK(r = calloc(1, sizeof(*r)));
	r->ibv = (struct ibv_mr){ .context = p->context, .pd = p, .addr = addr, .length = length };
	live++;
	return &r->ibv;
}

static int mr_unacked(struct ibv_mr *mr) { return ((struct region *)mr)->unacked; }

/* As it may wait for another thread, which may look something up, the lock must be free;
 * and there must be nothing to wait for that this thread does. */
static int dereg_mr(struct ibv_mr *mr)
{
	CHECK(!pthread_rwlock_trywrlock(&it->lock) && !pthread_rwlock_unlock(&it->lock));
	CHECK(!mr_unacked(mr));
	live--;
	free(mr);
	return 0;
}

static void **mr_note(struct ibv_mr *mr) { return &((struct region *)mr)->note; }
static tv_handle handle_of_mr(struct ibv_mr *mr) { return (uintptr_t)mr; }
static tv_handle handle_of_ctx(struct ibv_context *c) { return (uintptr_t)c; }

static int mr_lost(tv_handle h, struct tv_lost *l)
{
	*l = (struct tv_lost){ .addr = (uintptr_t)((struct ibv_mr *)(uintptr_t)h)->addr, .followed = 1 };
	return 0;
}

static int changes(tv_handle h, struct tv_changed *ch)
{
	(void)h;
	ch->n = ch->more = 0;
	return 0;
}

static int generation(tv_handle h, uint64_t *addr)
{
	(void)h;
	*addr = (uintptr_t)&word;
	return 0;
}

static struct tv_engine engine = { .mr_lost = mr_lost, .changes = changes, .generation = generation };
static const struct tv_dv table = { .engine = &engine, .ctx = handle_of_ctx, .mr = handle_of_mr,
	.reg_mr = reg_mr, .dereg_mr = dereg_mr, .mr_note = mr_note, .mr_unacked = mr_unacked };

const struct tv_dv *dv_table(struct ibv_device *d)
{
	(void)d;
	return &table;
}

const struct tv_dv *dv_there(struct ibv_context *c, int *rc)
{
	(void)c, (void)rc;
	return &table;
}

static char *const base = (char *)(uintptr_t)(1ull << 32);

static int get(int page, int pages, struct ibv_mr **mr)
{
	return tapverbs_dv_get_mr(it, base + page * PAGE, (size_t)pages * PAGE, 0, mr);
}

static struct ibv_mr *touch(int page, int pages)
{
	struct ibv_mr *mr;

	CHECK(!get(page, pages, &mr) && !tapverbs_dv_put_mr(it, mr));
	return mr;
}

static struct tapverbs_dv_reg_cache_stats stats(void)
{
	struct tapverbs_dv_reg_cache_stats s = { 0 };

	CHECK(!tapverbs_dv_query_reg_cache(it, &s));
	return s;
}

static void begin(size_t regions)
{
	most = regions;
	CHECK(it = tapverbs_dv_create_reg_cache(&pd, NULL));
}

static void end(void)
{
	CHECK(!tapverbs_dv_destroy_reg_cache(it) && live == 0);
	longest = SIZE_MAX;
}

int main(void)
{
	struct ibv_mr *a, *b, *c;

	/* Those that nobody uses make room. */
	begin(4);
	CHECK(!get(0, 1, &a));
	for (int i = 1; i < 5; i++)
		touch(i, 1);
	CHECK(stats().misses == 5 && stats().evictions == 3 && stats().entries == 2 && live == 2);
	CHECK(!get(1, 1, &b) && !get(2, 1, &c) && live == 4);
	touch(0, 1);
	CHECK(stats().misses == 7 && !tapverbs_dv_put_mr(it, b));
	CHECK(!get(5, 1, &b)); /* in the place of one that is idle */
	most = 3;
	CHECK(get(6, 1, &c) == ENOMEM && stats().misses == 9);
	CHECK(!tapverbs_dv_put_mr(it, a) && !tapverbs_dv_put_mr(it, b));
	CHECK(tapverbs_dv_destroy_reg_cache(it) == EBUSY); /* page 2 */
	CHECK(!get(2, 1, &c) && !tapverbs_dv_put_mr(it, c) && !tapverbs_dv_put_mr(it, c));
	end();

	/* A hinted area for which there is no room does not cost what there is. */
	begin(100);
	longest = 10 * PAGE;
	CHECK(!tapverbs_dv_hint_mr(it, base, 64 * PAGE, 0) && !tapverbs_dv_hint_mr(it, base, 32 * PAGE, 0));
	for (int i = 0; i < 8; i++)
		touch(i, 1);
	CHECK(stats().entries == 8 && stats().evictions == 0);
	/* Nor is it asked for when the hint was taken back. */
	longest = SIZE_MAX;
	CHECK(tapverbs_dv_unhint_mr(it, base, 63 * PAGE) == EINVAL && !tapverbs_dv_unhint_mr(it, base, 64 * PAGE));
	CHECK(tapverbs_dv_unhint_mr(it, base, 64 * PAGE) == EINVAL);
	CHECK(touch(40, 1)->length == PAGE && touch(20, 1)->length == 32 * PAGE);
	end();

	/* A thread that has yet to acknowledge an event is not waited for. */
	begin(1);
	a = touch(0, 1);
	((struct region *)a)->unacked = 1;
	CHECK(get(1, 1, &b) == ENOMEM && live == 1);
	CHECK(tapverbs_dv_destroy_reg_cache(it) == EBUSY);
	((struct region *)a)->unacked = 0;
	touch(1, 1);
	end();
	return 0;
}
