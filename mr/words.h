/* SPDX-License-Identifier: Apache-2.0 */
/* The page table, as C sees it: see pagetable.go. */
#ifndef TAPVERBS_WORDS_H
#define TAPVERBS_WORDS_H
#include "pager.h"

#include <linux/userfaultfd.h>
#include <stddef.h>
#include <time.h>

#define PAGE (1ull << TV_PAGE_SHIFT)
#if defined(__x86_64__)
#define relax() __builtin_ia32_pause()
#else
#define relax() __asm__ volatile("" ::: "memory")
#endif

/* UFFDIO_POISON, of Linux 6.6, which older headers lack. */
struct poison {
	uint64_t start, len, mode;
	int64_t done;
};
#define IOC_POISON _IOWR(UFFDIO, 0x08, struct poison)

/* now is CLOCK_MONOTONIC in ns. */
static inline uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline uint64_t load64(uint64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static inline uint32_t load32(uint32_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }

/* leaf_slot is where the pointer to a page's leaf stands; NULL if no region was ever near. */
static inline uint64_t *leaf_slot(struct tv_shared *sh, uint64_t va)
{
	if (va >> 48)
		return NULL;
	uint64_t l2 = load64(&sh->l1[va >> 30]);
	return l2 ? &((uint64_t *)l2)[(va >> 21) & (TV_L2_LEAVES - 1)] : NULL;
}

static inline struct tv_leaf *new_leaf(struct tv_shared *sh)
{
	uint64_t n = sizeof(struct tv_leaf), at = __atomic_fetch_add(&sh->arena_next, n, __ATOMIC_SEQ_CST);
	return at + n > sh->arena_size ? NULL : (struct tv_leaf *)(sh->arena + at);
}

static inline uint32_t *word_in(struct tv_leaf *l, uint64_t va) { return &l->word[(va >> TV_PAGE_SHIFT) & (TV_LEAF_PAGES - 1)]; }

/* count keeps the numbers of pages by state. */
static inline void count(struct tv_shared *sh, struct tv_leaf *l, uint64_t va, uint32_t was, uint32_t is)
{
	was &= TV_STATE;
	is &= TV_STATE;
	if (was == is)
		return;
	/* In this order: evicted_in must not miss a page that goes from limbo to the store. */
	if (is >= TV_PRESENT)
		__atomic_fetch_add(&l->n[is], 1, __ATOMIC_SEQ_CST);
	if (was >= TV_PRESENT)
		__atomic_fetch_sub(&l->n[was], 1, __ATOMIC_SEQ_CST);
	if ((was >= TV_LIMBO) != (is >= TV_LIMBO))
		__atomic_fetch_add(&sh->evicted[va >> 30], is >= TV_LIMBO ? 1 : -1, __ATOMIC_SEQ_CST);
}

/* left notes that pages leave, for who asks what was written: before they go. */
static inline void left(struct tv_leaf *l, uint64_t va, uint64_t stop)
{
	for (uint64_t i = (va >> TV_PAGE_SHIFT) & (TV_LEAF_PAGES - 1), end = i + ((stop - va) >> TV_PAGE_SHIFT); i < end; i++)
		__atomic_fetch_or(&l->left[i / 64], 1ull << i % 64, __ATOMIC_SEQ_CST);
}

/* become changes a word if it is what it is thought to be. */
static inline int become(struct tv_shared *sh, struct tv_leaf *l, uint64_t va, uint32_t was, uint32_t is)
{
	if (!__atomic_compare_exchange_n(word_in(l, va), &was, is, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		return 0;
	count(sh, l, va, was, is);
	return 1;
}

/* leaf_of is a page's leaf; NULL if it has none, or all of it is gone. */
static inline struct tv_leaf *leaf_of(struct tv_shared *sh, uint64_t va)
{
	uint64_t *slot = leaf_slot(sh, va), leaf = slot ? load64(slot) : 0;
	return leaf > TV_GONE_LEAF ? (struct tv_leaf *)leaf : NULL;
}

static inline uint32_t word_of(struct tv_shared *sh, uint64_t va)
{
	struct tv_leaf *l = leaf_of(sh, va);
	return l ? load32(word_in(l, va)) : TV_UNKNOWN;
}

/* evicted_in is how many pages of a leaf are evicted, or poisoned. */
static inline uint32_t evicted_in(struct tv_leaf *l)
{
	uint32_t n = load32(&l->n[TV_LIMBO]); /* the way that pages go: none is missed */
	n += load32(&l->n[TV_STORED]);
	return n + load32(&l->n[TV_POISONED]);
}

static inline void open_section(struct tv_section *s) { __atomic_fetch_add(&s->seq, 1, __ATOMIC_SEQ_CST); }
#define close_section open_section
#endif
