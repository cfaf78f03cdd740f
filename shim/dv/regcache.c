/* SPDX-License-Identifier: Apache-2.0
 *
 * A cache of registrations that hears when memory is mapped anew: package regcache, in C,
 * so that a lookup that hits does not enter the engine. Each lookup loads the generation
 * word. When it has moved, the journal of changes is gone through, and registrations lose
 * what they are about, page by page.
 *
 * Lookups share the lock; who registers, drops or brings up to date has it alone. References
 * are taken with the lock shared, and given back without it: an entry that is not in the
 * cache any more ends with its last reference. Regions are deregistered without the lock,
 * since that may wait for the program. */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "private.h"

enum {
	MAX_HOLES = TV_LOST_RANGES, /* of an entry that is kept */
	FRONT = 4096,               /* addresses that are found at once */
	DETACHED = 1u << 31,        /* of refs: not in the cache any more */
	/* Access flags that are no rights. */
	NO_RIGHTS = IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB | IBV_ACCESS_RELAXED_ORDERING,
};

struct span {
	uintptr_t start, end;
};

struct entry {
	uint32_t refs;
	int rights;
	struct span at;
	struct tapverbs_dv_reg_cache *cache;
	struct ibv_mr *mr;
	uint64_t used, stamp; /* when it was found last; when it was queued */
	uint64_t hits, covered;
	struct entry *prev, *next; /* in the queue; next: among the dead */
	int nholes;
	struct span holes[MAX_HOLES];
};

struct hint {
	struct span at;
	int access;
};

struct tapverbs_dv_reg_cache {
	const volatile uint64_t *word;
	uint64_t seen; /* the word when all was up to date */
	uint64_t clock; /* moves with each entry */
	uint32_t over; /* more is kept than may be */
	struct entry *front[FRONT];

	pthread_rwlock_t lock;
	struct ibv_pd *pd;
	const struct tv_dv *dv;
	uint64_t max_entries, max_bytes, pos;
	struct entry **by;  /* sorted by start */
	uintptr_t *reach;   /* the largest end of an entry and all before it */
	size_t n, cap;
	struct entry *first, *last; /* the queue: who is dropped next */
	struct entry *dead;         /* to be deregistered */
	struct hint *hints;
	size_t nhints;
	uint64_t bytes, lent; /* lent: entries that are not in the cache, and were not put back */
	struct tapverbs_dv_reg_cache_stats stats;
};

typedef struct tapverbs_dv_reg_cache cache;

static uint64_t load(const volatile uint64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }

static struct entry **front(cache *c, uintptr_t addr)
{
	return &c->front[(uint64_t)(addr >> 6) * 0x9e3779b97f4a7c15ull >> 52];
}

static int covers(const struct entry *e, uintptr_t start, uintptr_t end, int need)
{
	if (!e || start < e->at.start || e->at.end < end || (e->rights & need) != need)
		return 0;
	for (int i = 0; i < e->nholes; i++)
		if (start < e->holes[i].end && e->holes[i].start < end)
			return 0;
	return 1;
}

/* upto is how many entries start at or before an address. */
static size_t upto(const cache *c, uintptr_t addr)
{
	size_t lo = 0, hi = c->n;

	while (lo < hi) {
		size_t m = (lo + hi) / 2;

		if (c->by[m]->at.start <= addr)
			lo = m + 1;
		else
			hi = m;
	}
	return lo;
}

/* find looks a range up and takes a reference, with the lock held in either way. */
static struct entry *find(cache *c, uintptr_t start, uintptr_t end, int need)
{
	struct entry **f = front(c, start), *e = __atomic_load_n(f, __ATOMIC_RELAXED);
	uint64_t now = __atomic_load_n(&c->clock, __ATOMIC_RELAXED);

	if (!covers(e, start, end, need)) {
		size_t i = upto(c, start);

		for (e = NULL; i > 0 && c->reach[i - 1] >= end; i--)
			if (covers(c->by[i - 1], start, end, need)) {
				e = c->by[i - 1];
				break;
			}
		if (!e)
			return NULL;
		__atomic_store_n(f, e, __ATOMIC_RELAXED);
	}
	__atomic_fetch_add(&e->refs, 1, __ATOMIC_SEQ_CST);
	__atomic_fetch_add(e->at.start == start && e->at.end == end ? &e->hits : &e->covered, 1, __ATOMIC_RELAXED);
	if (__atomic_load_n(&e->used, __ATOMIC_RELAXED) != now)
		__atomic_store_n(&e->used, now, __ATOMIC_RELAXED);
	return e;
}

/* From here on all is with the lock held alone. */

static void queue(cache *c, struct entry *e)
{
	e->prev = c->last;
	e->next = NULL;
	*(c->last ? &c->last->next : &c->first) = e;
	c->last = e;
}

static void unqueue(cache *c, struct entry *e)
{
	*(e->prev ? &e->prev->next : &c->first) = e->next;
	*(e->next ? &e->next->prev : &c->last) = e->prev;
}

/* reaches brings reach up to date from an index. */
static void reaches(cache *c, size_t i)
{
	for (; i < c->n; i++) {
		uintptr_t before = i ? c->reach[i - 1] : 0, end = c->by[i]->at.end;

		c->reach[i] = before > end ? before : end;
	}
}

static int insert(cache *c, struct entry *e)
{
	size_t i;

	if (c->n == c->cap) {
		size_t cap = c->cap ? 2 * c->cap : 64;
		void *by = realloc(c->by, cap * sizeof(*c->by)), *reach;

		if (!by)
			return ENOMEM;
		c->by = by;
		reach = realloc(c->reach, cap * sizeof(*c->reach));
		if (!reach)
			return ENOMEM;
		c->reach = reach;
		c->cap = cap;
	}
	i = upto(c, e->at.start);
	memmove(&c->by[i + 1], &c->by[i], (c->n - i) * sizeof(*c->by));
	c->by[i] = e;
	c->n++;
	reaches(c, i);
	queue(c, e);
	c->bytes += e->at.end - e->at.start;
	return 0;
}

/* detach takes an entry out of the cache: among the dead, if nobody uses it. */
static void detach(cache *c, struct entry *e)
{
	size_t i = upto(c, e->at.start) - 1;

	while (c->by[i] != e)
		i--;
	memmove(&c->by[i], &c->by[i + 1], (c->n - i - 1) * sizeof(*c->by));
	c->n--;
	reaches(c, i);
	unqueue(c, e);
	for (i = 0; i < FRONT; i++)
		if (c->front[i] == e)
			c->front[i] = NULL;
	c->bytes -= e->at.end - e->at.start;
	c->stats.hits += e->hits;
	c->stats.covered += e->covered;
	if (__atomic_fetch_or(&e->refs, DETACHED, __ATOMIC_SEQ_CST) == 0) {
		e->next = c->dead;
		c->dead = e;
	} else {
		__atomic_fetch_add(&c->lent, 1, __ATOMIC_SEQ_CST);
	}
}

static int full(const cache *c)
{
	return (c->max_entries && c->n > c->max_entries) || (c->max_bytes && c->bytes > c->max_bytes);
}

/* trim drops who was not used for the longest time until the bounds are kept, or the rest
 * is in use. Who was used since it was queued is queued anew. */
static void trim(cache *c)
{
	for (size_t i = 2 * c->n; i > 0 && full(c); i--) {
		struct entry *e = c->first;

		if (!__atomic_load_n(&e->refs, __ATOMIC_SEQ_CST) && e->used == e->stamp) {
			detach(c, e);
			c->stats.evictions++;
			continue;
		}
		unqueue(c, e);
		e->stamp = e->used;
		queue(c, e);
	}
	__atomic_store_n(&c->over, full(c), __ATOMIC_SEQ_CST);
}

/* loses takes a range out of an entry, or the entry out of the cache. */
static void loses(cache *c, struct entry *e, uintptr_t start, uintptr_t end)
{
	struct span l = { start > e->at.start ? start : e->at.start, end < e->at.end ? end : e->at.end }, out[MAX_HOLES + 1];
	int n = 0;

	if (l.start >= l.end)
		return;
	for (int i = 0; i < e->nholes; i++) {
		struct span h = e->holes[i];

		if (h.start <= l.start && l.end <= h.end)
			return; /* known */
		if (h.end < l.start || l.end < h.start)
			out[n++] = h;
		else
			l = (struct span){ h.start < l.start ? h.start : l.start, h.end > l.end ? h.end : l.end };
	}
	out[n++] = l;
	c->stats.invalidations++;
	if (n > MAX_HOLES || (l.start == e->at.start && l.end == e->at.end)) {
		detach(c, e);
		return;
	}
	memcpy(e->holes, out, n * sizeof(*out));
	e->nholes = n;
}

/* lost has all entries lose a range; whole: all of what lies in it. */
static void lost(cache *c, uintptr_t start, uintptr_t end, int whole)
{
	/* Those behind i stay where they are when one is taken out. */
	for (size_t i = upto(c, end - 1); i > 0 && c->reach[i - 1] > start; i--) {
		struct entry *e = c->by[i - 1];

		if (e->at.end <= start)
			continue;
		if (whole)
			loses(c, e, e->at.start, e->at.end);
		else
			loses(c, e, start, end);
	}
}

/* look asks a region what it has lost. */
static void look(cache *c, struct entry *e)
{
	struct tv_lost l = { 0 };

	if (c->dv->engine->mr_lost(c->dv->mr(e->mr), &l) || l.n > TV_LOST_RANGES || l.addr != e->at.start) {
		loses(c, e, e->at.start, e->at.end);
		return;
	}
	for (uint32_t i = 0; i < l.n; i++) {
		if (__atomic_load_n(&e->refs, __ATOMIC_SEQ_CST) & DETACHED)
			return;
		loses(c, e, l.ranges[i].start, l.ranges[i].end);
	}
}

static void settle(cache *c)
{
	struct tv_changed ch;
	uint64_t now;

	/* The pager thread is about to have it even again. */
	while ((now = load(c->word)) & 1)
		sched_yield();
	if (now == c->seen)
		return;
	c->stats.resyncs++;
	do {
		ch.since = c->pos;
		if (c->dv->engine->changes(c->dv->ctx(c->pd->context), &ch)) {
			for (struct entry *e = c->first, *next; e; e = next) {
				next = e->next;
				look(c, e);
			}
			ch.n = ch.more = 0;
		}
		c->pos = ch.last;
		for (uint32_t i = 0; i < ch.n; i++)
			lost(c, ch.ranges[i].start, ch.ranges[i].end, ch.ranges[i].whole);
	} while (ch.more);
	__atomic_store_n(&c->seen, now, __ATOMIC_SEQ_CST);
}

/* unlock gives the lock back and deregisters the dead. Those with memory windows bound to
 * them are tried again, and those with events that are to be acknowledged, maybe by the
 * thread that is here: deregistering them would wait for it. */
static void unlock(cache *c)
{
	struct entry *dead = c->dead, *next, *left = NULL, **tail = &left;

	c->dead = NULL;
	pthread_rwlock_unlock(&c->lock);
	for (; dead; dead = next) {
		next = dead->next;
		if (c->dv->mr_unacked(dead->mr) || c->dv->dereg_mr(dead->mr) == EBUSY) {
			*tail = dead;
			tail = &dead->next;
		} else {
			free(dead);
		}
	}
	if (!left)
		return;
	pthread_rwlock_wrlock(&c->lock);
	*tail = c->dead;
	c->dead = left;
	pthread_rwlock_unlock(&c->lock);
}

/* drop_idle makes room for regions, when the lock has been given back. */
static void drop_idle(cache *c)
{
	for (struct entry *e = c->first, *next; e; e = next) {
		next = e->next;
		if (!__atomic_load_n(&e->refs, __ATOMIC_SEQ_CST)) {
			detach(c, e);
			c->stats.evictions++;
		}
	}
}

/* attempt registers a range for an entry, with the rights of what it takes the place of. */
static int attempt(cache *c, struct entry *e, struct span at, int access)
{
	for (size_t i = upto(c, at.start); i > 0 && c->by[i - 1]->at.start == at.start; i--)
		if (c->by[i - 1]->at.end == at.end)
			access |= c->by[i - 1]->rights;
	e->at = at;
	e->rights = access & ~NO_RIGHTS;
	e->mr = c->dv->reg_mr(c->pd, (void *)at.start, at.end - at.start, access);
	return e->mr ? 0 : errno ? errno : ENOMEM;
}

/* enter registers a hinted area around a range, or else the range. */
static int enter(cache *c, struct span at, int access, struct entry **out)
{
	struct entry *e = calloc(1, sizeof(*e));
	struct tv_lost l = { 0 };
	int rc = ENOENT;

	if (!e)
		return ENOMEM;
	e->cache = c;
	for (size_t i = 0; rc && i < c->nhints; i++)
		if (c->hints[i].at.start <= at.start && at.end <= c->hints[i].at.end)
			rc = attempt(c, e, c->hints[i].at, access | c->hints[i].access);
	if (rc)
		rc = attempt(c, e, at, access);
	if (rc) {
		free(e);
		return rc;
	}
	*c->dv->mr_note(e->mr) = e;
	e->refs = 1;
	e->used = e->stamp = __atomic_add_fetch(&c->clock, 1, __ATOMIC_RELAXED);
	*out = e;
	/* Registered with the lock held: a change of the mapping that comes now is in the
	 * journal behind pos, and takes it out again. */
	if (c->dv->engine->mr_lost(c->dv->mr(e->mr), &l) || !l.followed || insert(c, e)) {
		e->refs |= DETACHED; /* registered each time */
		__atomic_fetch_add(&c->lent, 1, __ATOMIC_SEQ_CST);
		return 0;
	}
	for (size_t i = upto(c, e->at.start); i > 0 && c->by[i - 1]->at.start == e->at.start; i--) {
		struct entry *o = c->by[i - 1];

		if (o != e && o->at.end == e->at.end && (e->rights & o->rights) == o->rights)
			detach(c, o);
	}
	*front(c, at.start) = e;
	trim(c);
	return 0;
}

int tapverbs_dv_get_mr(cache *c, void *addr, size_t length, int access, struct ibv_mr **mr)
{
	struct span at = { (uintptr_t)addr, (uintptr_t)addr + length };
	struct entry *e = NULL;
	int rc = 0, room = 0;

	if (at.end <= at.start || access & IBV_ACCESS_ZERO_BASED)
		return EINVAL;
	/* In this order: what is seen with the lock is not older than the word. */
	if (load(c->word) == load(&c->seen)) {
		pthread_rwlock_rdlock(&c->lock);
		e = find(c, at.start, at.end, access & ~NO_RIGHTS);
		pthread_rwlock_unlock(&c->lock);
	}
	while (!e && !rc) {
		if (!dv_there(c->pd->context, &rc))
			return rc;
		pthread_rwlock_wrlock(&c->lock);
		settle(c);
		e = find(c, at.start, at.end, access & ~NO_RIGHTS);
		if (!e) {
			c->stats.misses += !room;
			rc = enter(c, at, access, &e);
			if (rc == ENOMEM && !room) {
				drop_idle(c);
				room = 1;
				rc = 0; /* once more */
			}
		}
		unlock(c);
	}
	if (!rc)
		*mr = e->mr;
	return rc;
}

int tapverbs_dv_put_mr(cache *c, struct ibv_mr *mr)
{
	struct entry *e = *c->dv->mr_note(mr);
	uint32_t refs;

	if (!e || e->cache != c)
		return EINVAL;
	refs = __atomic_load_n(&e->refs, __ATOMIC_SEQ_CST);
	do {
		if (!(refs & ~DETACHED))
			return EINVAL;
	} while (!__atomic_compare_exchange_n(&e->refs, &refs, refs - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
	if (refs == (DETACHED | 1)) {
		pthread_rwlock_wrlock(&c->lock);
		__atomic_fetch_sub(&c->lent, 1, __ATOMIC_SEQ_CST);
		e->next = c->dead;
		c->dead = e;
		unlock(c);
	} else if (refs == 1 && __atomic_load_n(&c->over, __ATOMIC_SEQ_CST)) {
		pthread_rwlock_wrlock(&c->lock);
		trim(c);
		unlock(c);
	}
	return 0;
}

int tapverbs_dv_hint_mr(cache *c, void *addr, size_t length, int access)
{
	struct hint h = { { (uintptr_t)addr, (uintptr_t)addr + length }, access }, *hs;
	int rc = 0;

	if (h.at.end <= h.at.start || access & IBV_ACCESS_ZERO_BASED)
		return EINVAL;
	pthread_rwlock_wrlock(&c->lock);
	for (size_t i = 0; i < c->nhints; i++)
		if (c->hints[i].at.start == h.at.start && c->hints[i].at.end == h.at.end) {
			c->hints[i] = h;
			goto out;
		}
	hs = realloc(c->hints, (c->nhints + 1) * sizeof(*hs));
	if (hs) {
		hs[c->nhints++] = h;
		c->hints = hs;
	} else {
		rc = ENOMEM;
	}
out:
	pthread_rwlock_unlock(&c->lock);
	return rc;
}

int tapverbs_dv_unhint_mr(cache *c, void *addr, size_t length)
{
	struct span at = { (uintptr_t)addr, (uintptr_t)addr + length };
	int rc = EINVAL;

	pthread_rwlock_wrlock(&c->lock);
	for (size_t i = 0; i < c->nhints; i++)
		if (c->hints[i].at.start == at.start && c->hints[i].at.end == at.end) {
			memmove(&c->hints[i], &c->hints[i + 1], (c->nhints - i - 1) * sizeof(*c->hints));
			c->nhints--;
			rc = 0;
			break;
		}
	pthread_rwlock_unlock(&c->lock);
	return rc;
}

int tapverbs_dv_resync(cache *c)
{
	int rc;

	if (!dv_there(c->pd->context, &rc))
		return rc;
	pthread_rwlock_wrlock(&c->lock);
	settle(c);
	unlock(c);
	return 0;
}

int tapverbs_dv_query_reg_cache(cache *c, struct tapverbs_dv_reg_cache_stats *out)
{
	pthread_rwlock_wrlock(&c->lock);
	*out = c->stats;
	for (const struct entry *e = c->first; e; e = e->next) {
		out->hits += e->hits;
		out->covered += e->covered;
		out->in_use += e->refs > 0;
	}
	out->in_use += c->lent;
	out->entries = c->n;
	out->bytes = c->bytes;
	pthread_rwlock_unlock(&c->lock);
	return 0;
}

const volatile uint64_t *tapverbs_dv_generation(struct ibv_context *ctx)
{
	uint64_t addr;
	int rc = DV_CTX(ctx, generation, &addr);

	if (rc) {
		errno = rc;
		return NULL;
	}
	return (const volatile uint64_t *)(uintptr_t)addr;
}

cache *tapverbs_dv_create_reg_cache(struct ibv_pd *pd, const struct tapverbs_dv_reg_cache_attr *attr)
{
	const volatile uint64_t *word = tapverbs_dv_generation(pd->context);
	cache *c;

	if (!word)
		return NULL;
	if (attr && attr->comp_mask) {
		errno = EINVAL;
		return NULL;
	}
	c = calloc(1, sizeof(*c));
	if (!c)
		return NULL;
	if (attr) {
		c->max_entries = attr->max_entries;
		c->max_bytes = attr->max_bytes;
	}
	c->word = word;
	c->seen = ~0ull; /* odd: the first lookup finds where the journal begins */
	c->pd = pd;
	c->dv = dv_table(pd->context->device);
	pthread_rwlock_init(&c->lock, NULL);
	return c;
}

int tapverbs_dv_destroy_reg_cache(cache *c)
{
	pthread_rwlock_wrlock(&c->lock);
	for (const struct entry *e = c->first; e; e = e->next)
		if (__atomic_load_n(&e->refs, __ATOMIC_SEQ_CST))
			goto busy;
	if (__atomic_load_n(&c->lent, __ATOMIC_SEQ_CST))
		goto busy;
	while (c->first)
		detach(c, c->first);
	unlock(c);
	if (c->dead) /* memory windows are bound to them, or events are not acknowledged */
		return EBUSY;
	pthread_rwlock_destroy(&c->lock);
	free(c->by);
	free(c->reach);
	free(c->hints);
	free(c);
	return 0;
busy:
	unlock(c);
	return EBUSY;
}
