/* SPDX-License-Identifier: Apache-2.0 */
/* What threads of the application have waited for. Written by the pager thread alone. */
#ifndef TAPVERBS_THREADS_H
#define TAPVERBS_THREADS_H
#include <stdint.h>

#define TV_THREADS 256

struct tv_thread {
	uint32_t tid; /* 0: nobody's */
	uint32_t pad;
	uint64_t minor, major; /* faults */
	uint64_t ns;           /* from when they were read to when they were answered */
};

struct tv_threads {
	uint32_t seq; /* odd while a thread's place is given to another */
	uint32_t pad;
	struct tv_thread others; /* those whose place was given away, and where the kernel does not tell whose a fault is */
	struct tv_thread at[TV_THREADS];
};

/* tv_count_thread adds to, or takes from, what a thread has waited for. */
void tv_count_thread(struct tv_threads *all, uint32_t tid, uint64_t minor, uint64_t major, uint64_t ns);
#endif
