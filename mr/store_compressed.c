/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Evicted pages in memory, compressed by zstd. What a page is compressed to lies in an
 * object of the next size of a class; a slab of 64 KiB holds objects of one class. When a
 * third of a class is free, the objects of its emptiest slab move to others, so that
 * memory is given back however the slots are freed.
 *
 * One lock guards all of it. It is held for a copy of a page's length at most, or for
 * those of one slab, never while something is compressed or memory of the caller is
 * touched: that may be a page which the pager has to bring in, who takes this lock.
 */
#define _GNU_SOURCE
#include "store.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/*
 * Of zstd.h. Package github.com/DataDog/zstd brings the code, and its own flags for the
 * compiler; weak, because cgo links this package alone once, to see what it imports.
 */
#define ZSTD __attribute__((weak))
extern void *ZSTD_createCCtx(void) ZSTD;
extern size_t ZSTD_freeCCtx(void *) ZSTD;
extern size_t ZSTD_compressCCtx(void *, void *dst, size_t cap, const void *src, size_t n, int level) ZSTD;
extern void *ZSTD_createDCtx(void) ZSTD;
extern size_t ZSTD_freeDCtx(void *) ZSTD;
extern size_t ZSTD_decompressDCtx(void *, void *dst, size_t cap, const void *src, size_t n) ZSTD;
extern unsigned ZSTD_isError(size_t) ZSTD;

enum {
	LEVEL = 1,
	SLAB = 64 << 10,
	AREA_SLABS = 128,        /* slabs come from mappings of 8 MiB: a process may have some 65,000 of those */
	STEP = 128,              /* from class to class */
	CLASSES = TV_STORE_PAGE / STEP,
	PACKED = TV_STORE_PAGE - 2 * STEP, /* longer than that is not worth unpacking */
	FILLS = 4,               /* lists of slabs that are less than so many quarters full */
	SPARES = 8,              /* contexts that are kept */
};

enum kind { FREE, WORD, RAW, ZIPPED };

struct slab {
	char *mem;
	struct slab *prev, *next; /* in the list of its fill, if it is not full */
	uint16_t class, n, used;
	uint64_t taken[SLAB / STEP / 64];
	uint32_t owner[]; /* the slot of each object */
};

struct entry {
	union {
		struct slab *slab;
		uint64_t word;
	};
	uint16_t object, length;
	uint32_t kind;
};

struct class {
	struct slab *fill[FILLS];
	uint64_t objects, used;
};

/* Contexts of zstd that nobody uses. One at least has been made, so who gets none can wait. */
struct pool {
	pthread_mutex_t lock;
	pthread_cond_t back;
	void *spare[SPARES];
	int n;
};

struct tv_packed_store {
	pthread_mutex_t lock;
	struct tv_slots entry;
	struct class class[CLASSES];
	uint64_t pages, slabs;
	char **area, **empty; /* mappings, and slabs of them that are not in use */
	size_t nareas, nempty;
	struct pool packers, unpackers;
};

static void *borrow(struct pool *p, void *(*make)(void))
{
	void *c = NULL;
	pthread_mutex_lock(&p->lock);
	if (p->n)
		c = p->spare[--p->n];
	pthread_mutex_unlock(&p->lock);
	if (c || (c = make()))
		return c;
	pthread_mutex_lock(&p->lock);
	while (!p->n)
		pthread_cond_wait(&p->back, &p->lock);
	c = p->spare[--p->n];
	pthread_mutex_unlock(&p->lock);
	return c;
}

static void give_back(struct pool *p, void *c, size_t (*end)(void *))
{
	pthread_mutex_lock(&p->lock);
	if (p->n < SPARES) {
		p->spare[p->n++] = c;
		c = NULL;
		pthread_cond_signal(&p->back);
	}
	pthread_mutex_unlock(&p->lock);
	if (c)
		end(c);
}

/* list is where a slab that is not full belongs. */
static struct slab **list(struct tv_packed_store *s, struct slab *b)
{
	return &s->class[b->class].fill[b->used * FILLS / b->n];
}

static void insert(struct tv_packed_store *s, struct slab *b)
{
	struct slab **l = list(s, b);
	b->prev = NULL;
	b->next = *l;
	if (*l)
		(*l)->prev = b;
	*l = b;
}

static void extract(struct tv_packed_store *s, struct slab *b)
{
	if (b->prev)
		b->prev->next = b->next;
	else
		*list(s, b) = b->next;
	if (b->next)
		b->next->prev = b->prev;
}

static struct slab *new_slab(struct tv_packed_store *s, int class)
{
	uint32_t n = SLAB / ((class + 1) * STEP);
	struct slab *b = calloc(1, sizeof *b + n * sizeof *b->owner);
	if (!b)
		return NULL;
	if (!s->nempty) {
		char **areas = realloc(s->area, (s->nareas + 1) * sizeof *areas);
		if (areas)
			s->area = areas;
		char **empty = areas ? realloc(s->empty, (s->nareas + 1) * AREA_SLABS * sizeof *empty) : NULL;
		if (empty)
			s->empty = empty;
		char *m = empty ? mmap(NULL, (size_t)AREA_SLABS * SLAB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
		if (m == MAP_FAILED) {
			free(b);
			return NULL;
		}
		madvise(m, (size_t)AREA_SLABS * SLAB, MADV_NOHUGEPAGE); /* or what is empty would be held */
		s->area[s->nareas++] = m;
		for (int i = AREA_SLABS; i-- > 0;)
			s->empty[s->nempty++] = m + (size_t)i * SLAB;
	}
	b->mem = s->empty[--s->nempty];
	b->class = class;
	b->n = n;
	s->slabs++;
	s->class[class].objects += n;
	return b;
}

static void end_slab(struct tv_packed_store *s, struct slab *b)
{
	madvise(b->mem, SLAB, MADV_DONTNEED);
	s->empty[s->nempty++] = b->mem;
	s->slabs--;
	s->class[b->class].objects -= b->n;
	free(b);
}

static char *object(struct slab *b, uint16_t i) { return b->mem + (size_t)i * (b->class + 1) * STEP; }

/* take gives e an object, of the fullest slab that has one. */
static int take(struct tv_packed_store *s, int class, uint32_t slot, struct entry *e)
{
	struct slab *b = NULL;
	for (int f = FILLS; !b && f-- > 0;)
		b = s->class[class].fill[f];
	if (b)
		extract(s, b);
	else if (!(b = new_slab(s, class)))
		return ENOMEM;
	uint16_t i = 0;
	while (!~b->taken[i / 64])
		i += 64;
	i += __builtin_ctzll(~b->taken[i / 64]);
	b->taken[i / 64] |= 1ull << i % 64;
	b->owner[i] = slot;
	s->class[class].used++;
	if (++b->used < b->n)
		insert(s, b);
	e->slab = b;
	e->object = i;
	return 0;
}

/* pack moves the objects of the emptiest slab of a class to others, if those have much room. */
static void pack(struct tv_packed_store *s, struct class *c)
{
	struct slab *b = NULL;
	for (int f = 0; !b && f < FILLS; f++)
		b = c->fill[f];
	if (!b || (c->objects - c->used) * 3 < c->objects || c->objects - c->used < 2u * b->n)
		return;
	extract(s, b);
	for (uint16_t i = 0; i < b->n; i++) {
		if (!(b->taken[i / 64] >> i % 64 & 1))
			continue;
		struct entry *e = tv_slot(&s->entry, b->owner[i], 0);
		/* The others have room for all of it: no slab is made, nothing fails. */
		take(s, b->class, b->owner[i], e);
		memcpy(object(e->slab, e->object), object(b, i), e->length);
	}
	c->used -= b->used;
	end_slab(s, b);
}

/* drop ends what a slot has. */
static void drop(struct tv_packed_store *s, struct entry *e)
{
	if (e->kind == FREE)
		return;
	s->pages--;
	if (e->kind != WORD) {
		struct slab *b = e->slab;
		struct class *c = &s->class[b->class];
		if (b->used < b->n)
			extract(s, b);
		b->taken[e->object / 64] &= ~(1ull << e->object % 64);
		c->used--;
		if (--b->used)
			insert(s, b);
		else
			end_slab(s, b);
		e->kind = FREE;
		pack(s, c);
	}
	e->kind = FREE;
}

int tv_packed_store_write(struct tv_packed_store *s, uint32_t slot, const void *page)
{
	struct entry *e = tv_slot(&s->entry, slot, 1);
	char raw[TV_STORE_PAGE], zipped[PACKED], *from = raw;
	uint32_t kind = RAW;
	uint64_t word;
	size_t n = TV_STORE_PAGE;
	int err = 0;
	if (!e)
		return ENOMEM;
	memcpy(raw, page, sizeof raw);
	memcpy(&word, raw, sizeof word);
	if (memcmp(raw, raw + sizeof word, sizeof raw - sizeof word) == 0) {
		kind = WORD;
	} else {
		void *c = borrow(&s->packers, ZSTD_createCCtx);
		size_t z = ZSTD_compressCCtx(c, zipped, sizeof zipped, raw, sizeof raw, LEVEL);
		give_back(&s->packers, c, ZSTD_freeCCtx);
		if (!ZSTD_isError(z)) {
			kind = ZIPPED;
			from = zipped;
			n = z;
		}
	}
	pthread_mutex_lock(&s->lock);
	drop(s, e);
	if (kind == WORD)
		e->word = word;
	else if ((err = take(s, (n + STEP - 1) / STEP - 1, slot, e)) == 0)
		memcpy(object(e->slab, e->object), from, e->length = n);
	if (!err) {
		e->kind = kind;
		s->pages++;
	}
	pthread_mutex_unlock(&s->lock);
	return err;
}

void tv_packed_store_release(struct tv_packed_store *s, uint32_t slot)
{
	struct entry *e = tv_slot(&s->entry, slot, 0);
	if (!e)
		return;
	pthread_mutex_lock(&s->lock);
	drop(s, e);
	pthread_mutex_unlock(&s->lock);
}

static int read_page(void *ctx, uint32_t slot, void *page)
{
	struct tv_packed_store *s = ctx;
	struct entry *e = tv_slot(&s->entry, slot, 0), is = { .kind = FREE };
	char packed[TV_STORE_PAGE], raw[TV_STORE_PAGE];
	if (!e)
		return ENOENT;
	pthread_mutex_lock(&s->lock);
	is = *e;
	if (is.kind == RAW || is.kind == ZIPPED)
		memcpy(packed, object(is.slab, is.object), is.length);
	pthread_mutex_unlock(&s->lock);
	switch (is.kind) {
	case WORD:
		for (size_t i = 0; i < sizeof raw; i += sizeof is.word)
			memcpy((char *)page + i, &is.word, sizeof is.word);
		return 0;
	case RAW:
		memcpy(page, packed, sizeof packed);
		return 0;
	case ZIPPED: {
		void *c = borrow(&s->unpackers, ZSTD_createDCtx);
		size_t n = ZSTD_decompressDCtx(c, raw, sizeof raw, packed, is.length);
		give_back(&s->unpackers, c, ZSTD_freeDCtx);
		if (n != sizeof raw) /* or it is an error: somebody wrote over it */
			return EIO;
		memcpy(page, raw, sizeof raw);
		return 0;
	}
	}
	return ENOENT;
}

void tv_packed_store_usage(struct tv_packed_store *s, struct tv_store_usage *u)
{
	pthread_mutex_lock(&s->lock);
	u->pages = s->pages;
	u->held = s->slabs * SLAB;
	pthread_mutex_unlock(&s->lock);
}

static void end_pool(struct pool *p, size_t (*end)(void *))
{
	while (p->n)
		end(p->spare[--p->n]);
	pthread_mutex_destroy(&p->lock);
	pthread_cond_destroy(&p->back);
}

struct tv_packed_store *tv_packed_store_new(struct tv_reader *r)
{
	struct tv_packed_store *s = ZSTD_createCCtx ? calloc(1, sizeof *s) : NULL;
	if (!s)
		return NULL;
	s->entry.size = sizeof(struct entry);
	pthread_mutex_init(&s->lock, NULL);
	struct pool *pools[] = { &s->packers, &s->unpackers };
	for (int i = 0; i < 2; i++) {
		pthread_mutex_init(&pools[i]->lock, NULL);
		pthread_cond_init(&pools[i]->back, NULL);
		pools[i]->spare[0] = i ? ZSTD_createDCtx() : ZSTD_createCCtx();
		pools[i]->n = pools[i]->spare[0] != NULL;
	}
	if (s->packers.n && s->unpackers.n) {
		*r = (struct tv_reader){ read_page, s };
		return s;
	}
	tv_packed_store_close(s);
	return NULL;
}

void tv_packed_store_close(struct tv_packed_store *s)
{
	for (uint32_t i = 0; i < TV_STORE_SLOTS >> 14; i++)
		for (uint32_t k = 0; s->entry.chunk[i] && k < 1 << 14; k++) {
			struct entry *e = tv_slot(&s->entry, i << 14 | k, 0);
			if ((e->kind == RAW || e->kind == ZIPPED) && --e->slab->used == 0)
				free(e->slab);
		}
	for (size_t i = 0; i < s->nareas; i++)
		munmap(s->area[i], (size_t)AREA_SLABS * SLAB);
	free(s->area);
	free(s->empty);
	end_pool(&s->packers, ZSTD_freeCCtx);
	end_pool(&s->unpackers, ZSTD_freeDCtx);
	tv_slots_free(&s->entry);
	pthread_mutex_destroy(&s->lock);
	free(s);
}
