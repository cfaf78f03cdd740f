/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The generation word and the journal of changes. The pager thread writes to both,
 * and so does whoever changes something in Go. None of it blocks: an entry is written
 * under a lock that is held for a few stores, in C; who reads takes none.
 *
 * The word is even, and has moved by 2 or more when something has changed. It is odd
 * while the pager may be reading of a change: the thread that made it goes on in that
 * moment, and must not find the word as it was.
 */
#include "journal.h"

#include <sched.h>
#include <unistd.h>

static uint64_t *word(struct tv_journal *j) { return (uint64_t *)(uintptr_t)j->generation; }

void tv_generation_begin(struct tv_journal *j) { __atomic_fetch_add(word(j), 1, __ATOMIC_SEQ_CST); }

void tv_generation_end(struct tv_journal *j, int changed)
{
	/* A fault leaves it as it was. */
	__atomic_fetch_add(word(j), changed ? 1 : -1, __ATOMIC_SEQ_CST);
}

uint64_t tv_record(struct tv_journal *j, uint64_t kind, uint64_t start, uint64_t end, uint64_t to)
{
	while (__atomic_exchange_n(&j->lock, 1, __ATOMIC_ACQUIRE))
		sched_yield();
	uint64_t seq = j->head + 1;
	struct tv_change *c = &j->ring[seq % TV_CHANGES];
	__atomic_store_n(&c->seq, 0, __ATOMIC_SEQ_CST);
	__atomic_store_n(&c->kind, kind, __ATOMIC_SEQ_CST);
	__atomic_store_n(&c->start, start, __ATOMIC_SEQ_CST);
	__atomic_store_n(&c->end, end, __ATOMIC_SEQ_CST);
	__atomic_store_n(&c->to, to, __ATOMIC_SEQ_CST);
	__atomic_store_n(&c->seq, seq, __ATOMIC_SEQ_CST);
	__atomic_store_n(&j->head, seq, __ATOMIC_SEQ_CST);
	__atomic_store_n(&j->lock, 0, __ATOMIC_RELEASE);
	if (__atomic_load_n(&j->listening, __ATOMIC_SEQ_CST)) {
		uint64_t one = 1;
		/* It does not block, and fails only when as many wait to be read as go into it. */
		if (write(j->fd, &one, sizeof one) < 0)
			return seq;
	}
	return seq;
}

uint64_t tv_changed(struct tv_journal *j, uint64_t kind, uint64_t start, uint64_t end, uint64_t to)
{
	uint64_t seq = tv_record(j, kind, start, end, to);
	__atomic_fetch_add(word(j), 2, __ATOMIC_SEQ_CST);
	return seq;
}
