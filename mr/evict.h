/* SPDX-License-Identifier: Apache-2.0 */
/* Pages that leave, and come back. See evict.c. */
#ifndef TAPVERBS_EVICT_H
#define TAPVERBS_EVICT_H
#include "pager.h"

#define TV_BATCH 64 /* pages that tv_evict takes at a time */

/* What has become of a page that was to be evicted. */
enum {
	TV_EVICTED,
	TV_LATER,  /* it is in use, or mappings are being changed */
	TV_SHARED, /* the kernel does not give it away before it is written to, or it is pinned */
	TV_STUCK,  /* its mapping is of a kind that pages cannot be moved out of */
	TV_NOT,    /* it was not there */
};
struct tv_victim {
	uint64_t va;
	uint32_t slot, was, result, pad;
};

/*
 * tv_evict moves pages that are present to slots of the limbo that are free. Pages in a
 * row go fastest to slots in a row. One at a time. EAGAIN if it was not the moment.
 */
int tv_evict(struct tv_shared *sh, struct tv_victim *v, uint32_t n);

/*
 * tv_bring_back brings a page back, in limbo or stored, and wakes nobody. For the pager
 * thread alone. It gives 0 if it is in place, or an errno: EAGAIN while mappings are being
 * changed, EBUSY if it is on its way and whoever wants it has to look again, EIO if its
 * content was lost, ENOSYS if the store cannot be read from C, ENOENT if there is no such
 * page any more.
 */
int tv_bring_back(struct tv_shared *sh, uint64_t va);

/* tv_poison has whoever touches a page find out that its content was lost. */
void tv_poison(struct tv_shared *sh, uint64_t va);

/* tv_carry takes the words of evicted pages along with mremap. */
void tv_carry(struct tv_shared *sh, uint64_t from, uint64_t to, uint64_t len);

/* tv_make_leaf gives a page's leaf and makes what is missing of it; NULL without memory. */
struct tv_leaf *tv_make_leaf(struct tv_shared *sh, uint64_t va);

#define TV_DEAD 256 /* slots that are nobody's any more, before the evictor looks for them */

/* tv_left_slots counts slots that have become nobody's, and rouses the evictor. */
void tv_left_slots(struct tv_shared *sh, uint64_t n);

/* tv_arrive counts pages that come to be in place, and rouses the evictor. */
void tv_arrive(struct tv_shared *sh, uint32_t pages);
#endif
