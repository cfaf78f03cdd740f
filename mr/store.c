/* SPDX-License-Identifier: Apache-2.0 */
#include "store.h"

#include <stdlib.h>

void *tv_slot(struct tv_slots *t, uint32_t slot, int make)
{
	if (slot >= TV_STORE_SLOTS)
		return NULL;
	char **at = &t->chunk[slot >> 14], *c = __atomic_load_n(at, __ATOMIC_ACQUIRE);
	if (!c && make) {
		char *n = calloc(1 << 14, t->size);
		if (!n)
			return NULL;
		if (__atomic_compare_exchange_n(at, &c, n, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
			c = n;
		else
			free(n);
	}
	return c ? c + (slot & ((1 << 14) - 1)) * t->size : NULL;
}

void tv_slots_free(struct tv_slots *t)
{
	for (uint32_t i = 0; i < TV_STORE_SLOTS >> 14; i++)
		free(t->chunk[i]);
}
