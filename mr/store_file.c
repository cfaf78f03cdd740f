/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Evicted pages in a file. An entry a slot says whether the slot is in use, whether the
 * file has blocks there, and what the bytes hash to: a disk that failed after the kernel
 * took the bytes must not give other ones back.
 *
 * Blocks are given back by punching holes, some slots at a time, since slots that are
 * freed are often used again soon. Entries change with the lock held; readers take none.
 */
#define _GNU_SOURCE
#include "store.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LIVE = 1, BLOCKS = 2, WRITING = 4, FLAGS = 7 };
#define FREED 1024 /* slots of which the blocks are kept at most: 4 MiB */

struct tv_file_store {
	int fd, no_punch;
	uint64_t pages;
	pthread_mutex_t lock;
	uint32_t nfreed, freed[FREED];
	struct tv_slots entry; /* uint64_t */
};

static uint64_t get(uint64_t *e) { return __atomic_load_n(e, __ATOMIC_SEQ_CST); }
static void set(uint64_t *e, uint64_t v) { __atomic_store_n(e, v, __ATOMIC_SEQ_CST); }

/* digest is 61 bits of a hash of a page; *zero says that there is nothing in it. */
static uint64_t digest(const void *page, int *zero)
{
	const char *p = page;
	uint64_t h[4] = { 0x9e3779b97f4a7c15, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9, 0xd6e8feb86659fd93 }, any = 0, w[4];
	for (size_t i = 0; i < TV_STORE_PAGE; i += sizeof w) {
		memcpy(w, p + i, sizeof w);
		for (int k = 0; k < 4; k++) {
			any |= w[k];
			h[k] = (h[k] ^ w[k]) * 0xff51afd7ed558ccd;
			h[k] ^= h[k] >> 32;
		}
	}
	*zero = !any;
	uint64_t all = h[0];
	for (int k = 1; k < 4; k++)
		all = ((all << 23 | all >> 41) ^ h[k]) * 0xc4ceb9fe1a85ec53;
	return (all ^ all >> 29) & ~(uint64_t)FLAGS;
}

static int read_page(void *ctx, uint32_t slot, void *page)
{
	struct tv_file_store *s = ctx;
	uint64_t *e = tv_slot(&s->entry, slot, 0);
	for (;;) {
		uint64_t was = e ? get(e) : 0;
		if (!(was & LIVE))
			return ENOENT;
		if (!(was & BLOCKS)) {
			memset(page, 0, TV_STORE_PAGE);
			return 0;
		}
		ssize_t n = pread(s->fd, page, TV_STORE_PAGE, (off_t)slot * TV_STORE_PAGE);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return errno;
		int zero;
		if (n == TV_STORE_PAGE && digest(page, &zero) == (was & ~(uint64_t)FLAGS))
			return 0;
		if (get(e) == was)
			return EIO;
	}
}

static int by_number(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
	return x < y ? -1 : x > y;
}

/* punch gives back the blocks of slots that were freed and are so still. */
static void punch(struct tv_file_store *s)
{
	qsort(s->freed, s->nfreed, sizeof *s->freed, by_number);
	for (uint32_t i = 0; i < s->nfreed;) {
		uint32_t first = s->freed[i], n = 0;
		for (; i < s->nfreed && (s->freed[i] == first + n || (n && s->freed[i] == first + n - 1)); i++) {
			uint64_t *e = tv_slot(&s->entry, s->freed[i], 0);
			if ((get(e) & FLAGS) != BLOCKS && s->freed[i] == first + n)
				break;
			if (s->freed[i] == first + n)
				n++;
		}
		if (!n) {
			i++;
			continue;
		}
		if (!s->no_punch && fallocate(s->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)first * TV_STORE_PAGE, (off_t)n * TV_STORE_PAGE) == 0)
			for (uint32_t k = first; k < first + n; k++)
				set(tv_slot(&s->entry, k, 0), 0);
		else if (errno == EOPNOTSUPP || errno == ENOSYS)
			s->no_punch = 1; /* a file system without: blocks stay, and are used again with their slots */
	}
	s->nfreed = 0;
}

/* drop ends what a slot had, with the lock held. */
static void drop(struct tv_file_store *s, uint32_t slot, uint64_t *e)
{
	uint64_t was = get(e);
	s->pages -= (was & LIVE) != 0;
	set(e, was & BLOCKS);
	if (!(was & BLOCKS) || s->no_punch)
		return;
	if (s->nfreed == FREED)
		punch(s);
	s->freed[s->nfreed++] = slot;
}

int tv_file_store_write(struct tv_file_store *s, uint32_t slot, const void *page)
{
	int err = 0, zero, again = 1;
	uint64_t hash = digest(page, &zero), *e = tv_slot(&s->entry, slot, 1), blocks;
	if (!e)
		return ENOMEM;
	pthread_mutex_lock(&s->lock);
	blocks = get(e) & BLOCKS;
	s->pages -= (get(e) & LIVE) != 0;
	set(e, WRITING | blocks);
	pthread_mutex_unlock(&s->lock);
	if (!zero || blocks)
		for (uint32_t done = 0; done < TV_STORE_PAGE;) {
			ssize_t n = pwrite(s->fd, (const char *)page + done, TV_STORE_PAGE - done, (off_t)slot * TV_STORE_PAGE + done);
			if (n > 0) {
				done += n;
				blocks = BLOCKS;
				continue;
			}
			if (n < 0 && errno == EINTR)
				continue;
			err = n < 0 ? errno : EIO;
			if (!again || (err != ENOSPC && err != EDQUOT))
				break;
			/* What was freed and not yet punched may be the room that it takes. */
			again = err = 0;
			pthread_mutex_lock(&s->lock);
			punch(s);
			pthread_mutex_unlock(&s->lock);
		}
	pthread_mutex_lock(&s->lock);
	if (err) {
		set(e, blocks);
		drop(s, slot, e);
	} else {
		set(e, LIVE | blocks | hash);
		s->pages++;
	}
	pthread_mutex_unlock(&s->lock);
	return err;
}

void tv_file_store_release(struct tv_file_store *s, uint32_t slot)
{
	uint64_t *e = tv_slot(&s->entry, slot, 0);
	if (!e)
		return;
	pthread_mutex_lock(&s->lock);
	if (get(e) & LIVE)
		drop(s, slot, e);
	pthread_mutex_unlock(&s->lock);
}

int tv_file_store_usage(struct tv_file_store *s, struct tv_store_usage *u)
{
	struct stat st;
	if (fstat(s->fd, &st) < 0)
		return errno;
	pthread_mutex_lock(&s->lock);
	u->pages = s->pages;
	pthread_mutex_unlock(&s->lock);
	u->held = (uint64_t)st.st_blocks * 512;
	return 0;
}

struct tv_file_store *tv_file_store_new(int fd, struct tv_reader *r)
{
	struct tv_file_store *s = calloc(1, sizeof *s);
	if (!s)
		return NULL;
	s->fd = fd;
	s->entry.size = sizeof(uint64_t);
	pthread_mutex_init(&s->lock, NULL);
	*r = (struct tv_reader){ read_page, s };
	return s;
}

void tv_file_store_close(struct tv_file_store *s)
{
	close(s->fd);
	tv_slots_free(&s->entry);
	pthread_mutex_destroy(&s->lock);
	free(s);
}
