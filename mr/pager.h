/* SPDX-License-Identifier: Apache-2.0 */
/* What Go and the pager thread share. All of it is accessed atomically. */
#ifndef TAPVERBS_PAGER_H
#define TAPVERBS_PAGER_H
#include <stdint.h>

#include "journal.h"
#include "threads.h"

#define TV_PAGE_SHIFT 12
#define TV_LEAF_PAGES 512 /* a leaf covers 2 MiB */
#define TV_L2_LEAVES 512  /* an L2 node covers 1 GiB */
#define TV_L1_NODES (1u << 18)
#define TV_SECTIONS 256
#define TV_GONE_LEAF 1ull /* instead of a leaf: all its pages are gone */

/* A page's word: its state, and above it what belongs to the state. See pagetable.go. */
enum { TV_UNKNOWN, TV_ABSENT, TV_PRESENT, TV_GONE, TV_LIMBO, TV_STORED, TV_POISONED, TV_STATES };
#define TV_STATE 15u
#define TV_PAYLOAD 4 /* bits below it */

/* The words of 2 MiB, and what is counted of them. */
struct tv_leaf {
	uint32_t word[TV_LEAF_PAGES];
	uint32_t n[TV_STATES]; /* pages in each state from TV_PRESENT on */
	uint32_t lost;         /* pages that were present, or evicted, and were dropped or unmapped */
	uint32_t app_minor, app_major, evictions;
	uint32_t pad0;
	uint64_t app_ns; /* that threads of the application waited */
	uint32_t pad[2];
	uint64_t left[TV_LEAF_PAGES / 64]; /* a bit for each page dropped or evicted since dirty.go last looked: set before it goes */
};

/* seq is odd while the section is open: who waits for it to be over need not stop the next. */
struct tv_section {
	uint32_t seq;
	uint32_t pad[15];
};

#define TV_SUSPENDED 65536

/* The memory of a suspended region: the pager moves at along with mremap; 0: none. */
struct tv_suspended {
	uint64_t at, len;
};

struct tv_shared {
	uint32_t change;      /* how many want no section to be open */
	uint32_t gone;        /* some page may be gone */
	uint32_t turn;        /* odd while the pager reads a message and acts on it */
	uint32_t lending;     /* odd while a page is out of userfaultfd for the moment, see populate in pager.c */
	uint32_t suspended_top; /* entries of suspended that were ever in use */
	uint32_t arrived;     /* the word of a page that arrives now: PRESENT, and the generation of arrivals */
	uint32_t roused;      /* the evictor has been written to and has not looked yet */
	int32_t uffd, limbo_fd, rouse_fd, ask_fd;
	uint32_t registering; /* held by who registers pages with userfaultfd, see tv_register */
	uint32_t pad0[4];
	uint64_t app_faults;
	uint64_t invalidations;
	uint64_t app_major;
	uint64_t pad1[5];
	uint64_t arena, arena_size, arena_next; /* nodes and leaves are cut from here */
	uint64_t pad2[5];
	/* Of eviction, see evict.go; addresses, 0 before the first. */
	uint64_t airlock, limbo, limbo_owner; /* by slot: the page's address */
	uint64_t store_owner; /* by slot: the page's number, and the low 28 bits of how often the slot was used */
	uint64_t store_held;  /* by slot, uint16_t: how many others may read it, beside the page it belongs to */
	uint64_t reader;      /* of the store, see store.h */
	uint64_t back;        /* slots that pages have ceased to need */
	uint64_t pad3;
	uint64_t arrivals;    /* pages that have come to be in place */
	uint64_t wake_at;     /* when there are so many, somebody has to be evicted */
	uint64_t stop_at;     /* when there are so many, that has to be waited for */
	uint64_t pad4[5];
	struct tv_section section[TV_SECTIONS];
	struct tv_section pager;   /* whoever brings pages back in C */
	struct tv_section evictor;
	uint64_t l1[TV_L1_NODES];
	uint32_t evicted[TV_L1_NODES]; /* pages of each GiB in the states from TV_LIMBO on */
	struct tv_suspended suspended[TV_SUSPENDED];
	struct tv_journal journal;
	/* Where userfaultfd is, or was: a bit for each 2 MiB, and one for each GiB with such. See fork.c. */
	uint64_t armed[(1u << 27) / 64], armed_near[TV_L1_NODES / 64];
	struct tv_threads threads;
	uint64_t unplaced; /* pages that children of fork wait for, and one for each child that is served */
};

struct tv_pager; /* the thread */
struct tv_pager *tv_pager_start(int uffd, struct tv_shared *sh, int *err);
void tv_pager_stop(struct tv_pager *p);
void tv_pager_again(struct tv_pager *p); /* faults that wait for Go are to be looked at */

/* tv_register is UFFDIO_REGISTER while no page is out of userfaultfd for the moment. It returns 0 or errno. */
int tv_register(struct tv_shared *sh, int uffd, uint64_t start, uint64_t len, uint64_t mode, uint64_t *ioctls);
void tv_image(uint64_t *start, uint64_t *end);
#endif
