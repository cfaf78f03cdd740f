/* SPDX-License-Identifier: Apache-2.0 */
#include "threads.h"

#include <stddef.h>

enum { NEAR = 8 }; /* places that a thread may have */

static void add(uint64_t *to, uint64_t n)
{
	if (n)
		__atomic_fetch_add(to, n, __ATOMIC_SEQ_CST);
}

static void put(struct tv_thread *t, uint64_t minor, uint64_t major, uint64_t ns)
{
	add(&t->minor, minor);
	add(&t->major, major);
	add(&t->ns, ns);
}

static uint64_t take(uint64_t *from) { return __atomic_exchange_n(from, 0, __ATOMIC_SEQ_CST); }

void tv_count_thread(struct tv_threads *all, uint32_t tid, uint64_t minor, uint64_t major, uint64_t ns)
{
	struct tv_thread *t = &all->others, *least = NULL;
	for (uint32_t i = 0; tid && i < NEAR; i++) {
		struct tv_thread *at = &all->at[(tid + i) % TV_THREADS];
		if (at->tid == tid || !at->tid) {
			least = at;
			break;
		}
		/* Who has waited least has his place taken: mostly one that is no more. */
		if (!least || at->ns < least->ns)
			least = at;
	}
	if (least) {
		t = least;
		if (t->tid != tid) {
			__atomic_fetch_add(&all->seq, 1, __ATOMIC_SEQ_CST);
			put(&all->others, take(&t->minor), take(&t->major), take(&t->ns));
			__atomic_store_n(&t->tid, tid, __ATOMIC_SEQ_CST);
			__atomic_fetch_add(&all->seq, 1, __ATOMIC_SEQ_CST);
		}
	}
	put(t, minor, major, ns);
}
