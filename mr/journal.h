/* SPDX-License-Identifier: Apache-2.0 */
/* What changes of mappings leave behind for those who remember something of them. */
#ifndef TAPVERBS_JOURNAL_H
#define TAPVERBS_JOURNAL_H
#include <stdint.h>

#define TV_CHANGES 4096 /* entries of the ring */

/* Kinds of changes, see journal.go; TV_BEFORE: it is about to happen. */
enum {
	TV_UNMAP = 1,
	TV_REMAP,
	TV_REMOVE,
	TV_EVICT,
	TV_SUSPEND,
	TV_RESUME,
	TV_REPLACE,
	TV_MOVED,
	TV_ELIMINATE,
	TV_PROTECT,
	TV_BEFORE = 0x100,
};

/* An entry. seq is written last, and 0 while the rest changes. */
struct tv_change {
	uint64_t seq; /* from 1 */
	uint64_t kind, start, end, to;
	uint64_t pad[3];
};

struct tv_journal {
	uint64_t generation; /* address of the word: alone in a page, which is mapped elsewhere to be read */
	uint64_t head;       /* seq of the last entry */
	uint32_t lock;       /* taken in C only, where no garbage collection stops a thread */
	uint32_t listening;  /* somebody waits for fd */
	int32_t fd;          /* eventfd */
	uint32_t pad[9];
	struct tv_change ring[TV_CHANGES];
};

/* Around reading and acting on a message of the kernel's: the word is odd meanwhile. */
void tv_generation_begin(struct tv_journal *j);
void tv_generation_end(struct tv_journal *j, int changed);

/* tv_record enters a change and gives its seq; tv_changed does, and moves the word. */
uint64_t tv_record(struct tv_journal *j, uint64_t kind, uint64_t start, uint64_t end, uint64_t to);
uint64_t tv_changed(struct tv_journal *j, uint64_t kind, uint64_t start, uint64_t end, uint64_t to);
#endif
