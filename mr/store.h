/* SPDX-License-Identifier: Apache-2.0 */
/* Stores of evicted pages, as C sees them. See store.go. */
#ifndef TAPVERBS_STORE_H
#define TAPVERBS_STORE_H
#include <pthread.h>
#include <stdint.h>

#define TV_STORE_PAGE 4096u
#define TV_STORE_SLOTS (1u << 28) /* what the payload of a page word can name */

/*
 * How the pager thread reads a store without Go. read fills the 4096 bytes at page and
 * gives 0, or gives an errno and leaves them undefined. It may be called by any thread,
 * while others write, read and free, until the store is closed, and takes no lock that
 * is held by Go code or while a page can fault. A slot that is freed or written
 * meanwhile gives an error, or either content: who asks looks whether the slot is still
 * the page's before it believes an error or the bytes.
 */
struct tv_reader {
	int (*read)(void *ctx, uint32_t slot, void *page);
	void *ctx;
};

/* One entry a slot, in chunks that come with the first slot of theirs and stay. */
struct tv_slots {
	size_t size; /* of an entry */
	char *chunk[TV_STORE_SLOTS >> 14];
};
/* tv_slot is the entry of a slot; NULL if it has none, or, with make, no memory for it. */
void *tv_slot(struct tv_slots *t, uint32_t slot, int make);
void tv_slots_free(struct tv_slots *t);

/* What a store has: slots in use, and what those take up in bytes. */
struct tv_store_usage {
	uint64_t pages, held;
};

struct tv_file_store *tv_file_store_new(int fd, struct tv_reader *r);
int tv_file_store_write(struct tv_file_store *s, uint32_t slot, const void *page);
void tv_file_store_release(struct tv_file_store *s, uint32_t slot);
int tv_file_store_usage(struct tv_file_store *s, struct tv_store_usage *u);
void tv_file_store_close(struct tv_file_store *s);

struct tv_packed_store *tv_packed_store_new(struct tv_reader *r);
int tv_packed_store_write(struct tv_packed_store *s, uint32_t slot, const void *page);
void tv_packed_store_release(struct tv_packed_store *s, uint32_t slot);
void tv_packed_store_usage(struct tv_packed_store *s, struct tv_store_usage *u);
void tv_packed_store_close(struct tv_packed_store *s);

static inline int tv_read(struct tv_reader *r, uint32_t slot, void *page)
{
	return r->read(r->ctx, slot, page);
}
#endif
