/* SPDX-License-Identifier: Apache-2.0 */
/* Children of fork(2) see what their parent saw. See fork.c. */
#ifndef TAPVERBS_FORK_H
#define TAPVERBS_FORK_H
#include "pager.h"

struct tv_family; /* the children that still wait for pages */

/* tv_family_new gives NULL, and errno. */
struct tv_family *tv_family_new(struct tv_shared *sh);

/* tv_family_fd is to be polled: then, and while tv_family_busy, tv_family_serve is called. */
int tv_family_fd(struct tv_family *f);
int tv_family_busy(struct tv_family *f);
void tv_family_serve(struct tv_family *f);

/* tv_family_end places what children still wait for, and ends. */
void tv_family_end(struct tv_family *f);

/*
 * tv_family_born takes over the userfaultfd of a new child of this process. No page is
 * brought back or evicted meanwhile.
 */
void tv_family_born(struct tv_family *f, int fd);

/*
 * tv_family_read is read(2) of a message, also when the process has no descriptor left
 * for the child's userfaultfd: the parent waits in fork until the message is read.
 */
long tv_family_read(struct tv_family *f, int uffd, void *msg, unsigned long n);

/* tv_mark_armed notes that pages are, or may be, registered with userfaultfd, and so are a child's. */
void tv_mark_armed(struct tv_shared *sh, uint64_t start, uint64_t end);
#endif
