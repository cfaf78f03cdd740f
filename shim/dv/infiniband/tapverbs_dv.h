/* SPDX-License-Identifier: Apache-2.0
 *
 * What tapverbs can do beyond infiniband/verbs.h: tapverbs_dv(7). Link with -ltapverbs
 * (pkg-config libtapverbs). A program that uses it runs with any libibverbs; with
 * another than tapverbs's, nothing here is supported. */
#ifndef INFINIBAND_TAPVERBS_DV_H
#define INFINIBAND_TAPVERBS_DV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether a device is of tapverbs. */
bool tapverbs_dv_is_supported(struct ibv_device *device);

/* Who brings a memory region's absent pages in. */
enum tapverbs_dv_paging {
	TAPVERBS_DV_PAGING_USERFAULT = 0, /* tapverbs, through userfaultfd */
	TAPVERBS_DV_PAGING_KERNEL = 1,    /* the kernel, as for any access */
	TAPVERBS_DV_PAGING_PINNED = 2,    /* nobody needs to: locked in memory */
	TAPVERBS_DV_PAGING_DEVICE = 3,    /* the kernel; the memory is the device's */
	TAPVERBS_DV_PAGING_IMPLICIT = 4,  /* all memory: userfaultfd or kernel, page by page */
	TAPVERBS_DV_PAGING_NULL = 5,      /* a null region has no memory */
};

enum tapverbs_dv_mr_mask {
	TAPVERBS_DV_MR_MASK_PRESENT = 1 << 0,
	TAPVERBS_DV_MR_MASK_USAGE = 1 << 1,
};

/* Where pages are, in bytes, and what became of them: tapverbs_dv_query_usage(3). */
struct tapverbs_dv_usage {
	uint64_t size;
	uint64_t present; /* in memory, by mincore(2) */
	uint64_t limbo;   /* evicted, in memory yet */
	uint64_t stored;  /* evicted to the store */
	uint64_t dirty;   /* written since tapverbs_dv_dirty_mr cleared; 0 if that is not tracked */
	uint64_t budget;  /* what may be in memory; 0: any number */
	/* Pages that were absent or in limbo, and those in the store (major): of requests, and
	 * of the program's own threads. */
	uint64_t faults_minor, faults_major;
	uint64_t app_faults_minor, app_faults_major;
	uint64_t fault_ns;      /* time that requests spent on major faults */
	uint64_t rnrs;          /* RNR NAKs because of a page, or a suspension */
	uint64_t evictions;     /* pages that left for limbo */
	uint64_t invalidations; /* pages that left by munmap, MADV_DONTNEED and the like */
	uint64_t prefetches;    /* pages that were brought in beforehand */
	uint64_t app_fault_ns;  /* time that the program's own threads waited for pages */
	uint64_t reserved[7];
};

struct tapverbs_dv_mr {
	/* In: which of the fields marked so to fill in. Out: which were. */
	uint64_t comp_mask;
	uint32_t paging; /* enum tapverbs_dv_paging */
	uint32_t reserved;
	uint64_t page_faults;         /* pages that requests found absent */
	uint64_t page_faults_handled; /* those of them that were brought in */
	uint64_t page_prefetch;       /* pages that ibv_advise_mr or a peer had brought in */
	uint64_t present;             /* MASK_PRESENT: bytes in memory now; takes time that grows with the region */
	struct tapverbs_dv_usage usage; /* MASK_USAGE: also takes such time */
};

/* Tells about a memory region. 0 or an errno. */
int tapverbs_dv_query_mr(struct ibv_mr *mr, struct tapverbs_dv_mr *out);

/* The same of all regions of the process together. 0 or an errno. */
int tapverbs_dv_query_usage(struct ibv_context *context, struct tapverbs_dv_usage *out);

/* The same of the regions of a protection domain. 0 or an errno. */
int tapverbs_dv_query_pd_usage(struct ibv_pd *pd, struct tapverbs_dv_usage *out);

/* The absent pages that requests to a QP and its own work requests have met. */
struct tapverbs_dv_qp_faults {
	uint64_t minor, major; /* pages, as in struct tapverbs_dv_usage */
	uint64_t ns;           /* time spent waiting in place for the store */
	uint64_t rnrs;         /* RNR NAKs because content was in the store */
	uint64_t reserved[4];
};

int tapverbs_dv_query_qp_faults(struct ibv_qp *qp, struct tapverbs_dv_qp_faults *out);

/* What a thread of the program has waited for. */
struct tapverbs_dv_thread_faults {
	uint32_t tid;  /* gettid(2); 0: all those that are not told apart */
	char name[16]; /* while it lives */
	uint32_t reserved0;
	uint64_t minor, major;
	uint64_t ns;
	uint64_t reserved[4];
};

/* Fills in up to *n threads, those first that have waited longest, and sets *n to how many
 * there are. 0 or an errno. */
int tapverbs_dv_query_thread_faults(struct ibv_context *context, struct tapverbs_dv_thread_faults *out, uint32_t *n);

/* Where the pages of one part of a region are, in bytes; what is nowhere is absent. */
struct tapverbs_dv_residency {
	uint64_t size, present, limbo, stored;
	uint64_t poisoned; /* lost by a store that failed to give it back */
};

/* Divides a region into n parts of about the same size; n becomes how many there are. */
int tapverbs_dv_query_residency(struct ibv_mr *mr, struct tapverbs_dv_residency *parts, uint32_t *n);

struct tapverbs_dv_counters {
	uint64_t comp_mask; /* as above; no optional fields yet */
	/* Page events of all regions of the process, in pages. */
	uint64_t page_faults;
	uint64_t page_faults_handled;
	uint64_t page_invalidations; /* were present, and left: munmap, mremap, MADV_DONTNEED */
	uint64_t page_prefetch;
	uint64_t app_faults; /* by threads of the program, in regions paged by userfaultfd */
	/* Of the device's port. */
	uint64_t rx_frames, rx_bytes;
	uint64_t tx_frames, tx_bytes;
	uint64_t rx_dropped; /* for the device, and not taken */
	uint64_t tx_dropped; /* lost because the link was down */
};

/* Tells the counters of a context's device. 0 or an errno. */
int tapverbs_dv_query_counters(struct ibv_context *context, struct tapverbs_dv_counters *out);

/* Takes a context's device off its port, as though its adapter were pulled out: for all
 * contexts of the process. IBV_EVENT_DEVICE_FATAL comes, work is flushed, calls answer
 * EIO; once all contexts are closed the device can be opened again. 0 or an errno. */
int tapverbs_dv_unplug(struct ibv_context *context);

/* ---- Suspending regions: tapverbs_dv_suspend_mr(3) ---- */

/* What a suspended region has requests of peers do. Work requests of this end are held. */
enum tapverbs_dv_suspend_mode {
	TAPVERBS_DV_SUSPEND_RNR = 0,  /* the peer is asked to wait, by RNR NAK */
	TAPVERBS_DV_SUSPEND_HOLD = 1, /* kept, up to the hold buffer, and executed at resume */
	TAPVERBS_DV_SUSPEND_DROP = 2, /* count as lost, for the peer's timeout */
};

struct tapverbs_dv_suspend_attr {
	uint64_t comp_mask;   /* 0 */
	uint32_t mode;        /* enum tapverbs_dv_suspend_mode */
	uint32_t rnr_delay;   /* what an RNR NAK asks for, in µs up to 655360; 0: 1 ms, growing */
	uint64_t hold_buffer; /* bytes of packets that may be held, 1 MiB at first; 0: as it is */
};

/* 0 or an errno, here and below. Suspensions are counted. */
int tapverbs_dv_set_suspend(struct ibv_mr *mr, const struct tapverbs_dv_suspend_attr *attr);
int tapverbs_dv_suspend_mr(struct ibv_mr *mr);
int tapverbs_dv_resume_mr(struct ibv_mr *mr);
/* Of a suspended region: takes the pages at with in place of those at iova; moves it to
 * other memory of the same length. */
int tapverbs_dv_replace_mr(struct ibv_mr *mr, uint64_t iova, size_t length, void *with);
int tapverbs_dv_move_mr(struct ibv_mr *mr, void *addr);
/* Ends a region by force; the handle stays until ibv_dereg_mr. */
int tapverbs_dv_eliminate_mr(struct ibv_mr *mr);

/* ---- Page faults of requests: tapverbs_dv_set_mr_fault_policy(3) ---- */

enum tapverbs_dv_fault_policy {
	TAPVERBS_DV_FAULT_HYBRID = 0, /* the default: stall when that is short, RNR when not */
	TAPVERBS_DV_FAULT_STALL = 1,  /* wait, with all queue pairs of the device */
	TAPVERBS_DV_FAULT_RNR = 2,    /* fetch in the background; the peer is asked to wait */
	TAPVERBS_DV_FAULT_DROP = 3,   /* the same, but the packet counts as lost */
	TAPVERBS_DV_FAULT_ERROR = 4,  /* the request fails */
	TAPVERBS_DV_FAULT_OF_MR = -1, /* queue pairs: as each region has it; the default */
};

int tapverbs_dv_set_mr_fault_policy(struct ibv_mr *mr, enum tapverbs_dv_fault_policy policy);
int tapverbs_dv_set_qp_fault_policy(struct ibv_qp *qp, enum tapverbs_dv_fault_policy policy);

/* ---- Eviction: tapverbs_dv_set_budget(3) ---- */

/* How many bytes of memory may be taken, 0 for any number, else 256 KiB at least: by all
 * regions of the process, by those of a domain, by one. */
int tapverbs_dv_set_budget(struct ibv_context *context, uint64_t bytes);
int tapverbs_dv_set_pd_budget(struct ibv_pd *pd, uint64_t bytes);
int tapverbs_dv_set_mr_budget(struct ibv_mr *mr, uint64_t bytes);

/* A store of evicted pages: 4096 bytes in each of up to 2^28 slots. Functions return 0 or
 * an errno. They are called by threads of the library's, read by the one that serves page
 * faults: it must not touch memory of regions, nor wait for who does. */
struct tapverbs_dv_store {
	uint64_t comp_mask; /* 0 */
	void *user;
	int (*write)(void *user, uint32_t slot, const void *page);
	int (*read)(void *user, uint32_t slot, void *page);
	void (*free)(void *user, uint32_t slot);
	void (*close)(void *user); /* may be NULL */
};

/* Where content goes: a file in a directory, or NULL for that of temporary files; memory,
 * compressed; the program. Before the first eviction of the process; EBUSY later. */
int tapverbs_dv_set_file_store(struct ibv_context *context, const char *dir);
int tapverbs_dv_set_compressed_store(struct ibv_context *context);
int tapverbs_dv_set_store(struct ibv_context *context, const struct tapverbs_dv_store *store);

enum tapverbs_dv_level {
	TAPVERBS_DV_LEVEL_LIMBO = 0,  /* out of the region, in memory yet */
	TAPVERBS_DV_LEVEL_STORED = 1, /* in the store */
};

/* Evicts pages by hand; says how many left. pages may be NULL. */
int tapverbs_dv_evict_mr(struct ibv_mr *mr, uint64_t iova, size_t length, enum tapverbs_dv_level to, uint64_t *pages);

/* Whether a store has failed to take a page, so that none is evicted any more: 0 if not,
 * or the errno of why, and why in words in the len bytes at text, which may be NULL. */
int tapverbs_dv_eviction_stopped(struct ibv_context *context, char *text, size_t len);

/* ---- Dirty pages: tapverbs_dv_track_dirty(3) ---- */

struct tapverbs_dv_range {
	uint64_t iova, length;
};

int tapverbs_dv_track_dirty(struct ibv_mr *mr, bool on);
/* The pages that were written since tracking began or the last call with clear. In: how
 * many ranges there is room for; out: how many there are. ENOSPC if those are more:
 * nothing is lost then. */
int tapverbs_dv_dirty_mr(struct ibv_mr *mr, bool clear, struct tapverbs_dv_range *ranges, size_t *n);

/* ---- Changes of mappings: tapverbs_dv_add_notifier(3) ---- */

/* Called by a thread of the library's, one at a time: before the change where it is the
 * library that makes it. They must not wait for another thread that evicts or suspends.
 * Any may be NULL. Ranges are of whole pages; end is the first byte behind. */
struct tapverbs_dv_notifier_ops {
	uint64_t comp_mask; /* 0 */
	void (*release)(void *user); /* the context was closed: the notifier is no more */
	void (*sync_range)(void *user, uintptr_t start, uintptr_t end);
	void (*invalidate_range)(void *user, uintptr_t start, uintptr_t end);
	void (*update_range)(void *user, uintptr_t start, uintptr_t end);
	void (*change_protection)(void *user, uintptr_t start, uintptr_t end, int prot);
	void (*sync_page)(void *user, uintptr_t addr);
	void (*invalidate_page)(void *user, uintptr_t addr);
	void (*update_page)(void *user, uintptr_t addr);
};

struct tapverbs_dv_notifier;

/* For changes between the addresses, or of all memory if both are 0. NULL with errno. */
struct tapverbs_dv_notifier *tapverbs_dv_add_notifier(struct ibv_context *context, const struct tapverbs_dv_notifier_ops *ops,
						      void *user, uintptr_t start, uintptr_t end);
/* When it returns none is called any more. */
int tapverbs_dv_remove_notifier(struct tapverbs_dv_notifier *notifier);
/* Waits until the hooks for all changes that were made until now have returned. */
int tapverbs_dv_settle_notifiers(struct ibv_context *context);

/* ---- Generations, and a cache of registrations: tapverbs_dv_create_reg_cache(3) ---- */

/* A word that moves when a mapping of a region changes; NULL with errno. It stays as long
 * as the process. */
const volatile uint64_t *tapverbs_dv_generation(struct ibv_context *context);

/* Whether what was looked up at a generation may be old. No call, and no lock. */
static inline bool tapverbs_dv_moved(const volatile uint64_t *generation, uint64_t seen)
{
	uint64_t now = __atomic_load_n(generation, __ATOMIC_ACQUIRE);

	return now != seen || now & 1;
}

/* A cache of registrations, on ibv_reg_mr: regions are shared by those who ask for what
 * they cover, kept when nobody uses them, and registered anew when their memory was
 * mapped anew. Safe for any number of threads. */
struct tapverbs_dv_reg_cache;

struct tapverbs_dv_reg_cache_attr {
	uint64_t comp_mask; /* 0 */
	uint64_t max_entries, max_bytes; /* of regions that are kept, unless more are in use; 0: no bound */
};

struct tapverbs_dv_reg_cache_stats {
	uint64_t comp_mask;
	uint64_t hits;          /* lookups that found the same range */
	uint64_t covered;       /* lookups that found a region around it */
	uint64_t misses;        /* lookups that registered */
	uint64_t invalidations; /* regions that lost memory, a part or all, as it was unmapped or mapped anew */
	uint64_t evictions;     /* regions dropped because there were too many */
	uint64_t resyncs;
	uint64_t entries, bytes, in_use; /* now */
};

/* NULL with errno; attr may be NULL. */
struct tapverbs_dv_reg_cache *tapverbs_dv_create_reg_cache(struct ibv_pd *pd, const struct tapverbs_dv_reg_cache_attr *attr);
/* A region that covers the range with at least these rights, until put. */
int tapverbs_dv_get_mr(struct tapverbs_dv_reg_cache *cache, void *addr, size_t length, int access, struct ibv_mr **mr);
int tapverbs_dv_put_mr(struct tapverbs_dv_reg_cache *cache, struct ibv_mr *mr);
/* A large area that many small ranges will be asked for in: it is registered as a whole. */
int tapverbs_dv_hint_mr(struct tapverbs_dv_reg_cache *cache, void *addr, size_t length, int access);
/* Takes a hint back; EINVAL if there is none of this very area. */
int tapverbs_dv_unhint_mr(struct tapverbs_dv_reg_cache *cache, void *addr, size_t length);
/* Takes notice of what has changed since the last time; lookups do so by themselves. */
int tapverbs_dv_resync(struct tapverbs_dv_reg_cache *cache);
int tapverbs_dv_query_reg_cache(struct tapverbs_dv_reg_cache *cache, struct tapverbs_dv_reg_cache_stats *stats);
/* EBUSY while a region of it is in use, or has events that were not acknowledged. */
int tapverbs_dv_destroy_reg_cache(struct tapverbs_dv_reg_cache *cache);

/* ---- Both sides know: tapverbs_dv_enable_residency(3) ---- */

struct tapverbs_dv_residency_attr {
	uint64_t comp_mask; /* 0 */
	uint32_t ahead;     /* WRITEs and READs from so many bytes on have the peer bring back what is
			     * away before they begin; 0: 64 KiB */
	uint32_t reserved;  /* 0 */
	int64_t max_hold;   /* how long they wait for that at most, in µs; 0: 10 ms, -1: not at all */
};

/* Has a connected queue pair (RC) tell its peer which pages of regions have left for the
 * store and came back, and hear the same of it: when both ends have enabled it. attr may
 * be NULL. */
int tapverbs_dv_enable_residency(struct ibv_qp *qp, const struct tapverbs_dv_residency_attr *attr);
int tapverbs_dv_disable_residency(struct ibv_qp *qp);

/* What the peer has told of a part of a region of its. */
struct tapverbs_dv_remote {
	uint64_t comp_mask; /* no optional fields yet */
	uint64_t away;      /* bytes in its store */
	uint32_t agreed;    /* the peer speaks residency messages, too */
	uint32_t watched;   /* it has told of this region */
	uint32_t held_off;  /* the region is suspended */
	uint32_t reserved;
};

int tapverbs_dv_query_remote(struct ibv_qp *qp, uint32_t rkey, uint64_t iova, uint64_t length, struct tapverbs_dv_remote *out);
/* Asks the peer to bring a part of its region into memory, 256 MiB at most. */
int tapverbs_dv_prefetch_remote(struct ibv_qp *qp, uint32_t rkey, uint64_t iova, uint64_t length);

/* ---- Events of regions: tapverbs_dv_create_event_channel(3) ---- */

/* The first are numbered as their bits in a mask. */
enum tapverbs_dv_event_type {
	TAPVERBS_DV_EVENT_MR_SUSPENDED = 0,
	TAPVERBS_DV_EVENT_MR_RESUMED = 1,
	TAPVERBS_DV_EVENT_MR_ELIMINATED = 2,
	TAPVERBS_DV_EVENT_MR_MOVED = 3,
	TAPVERBS_DV_EVENT_EVICTION_STOPPED = 16, /* of the process: the store takes no more */
};

struct tapverbs_dv_event_channel {
	struct ibv_context *context;
	int fd; /* readable while there are events; may be set non-blocking */
};

struct tapverbs_dv_event {
	uint32_t type; /* enum tapverbs_dv_event_type */
	int32_t error; /* EVICTION_STOPPED: the errno of why; else 0 */
	struct ibv_mr *mr; /* the region; NULL if it is about none */
};

/* mask has a bit 1 << type for each type that is wanted. NULL with errno. */
struct tapverbs_dv_event_channel *tapverbs_dv_create_event_channel(struct ibv_context *context, uint64_t mask);
/* Waits for an event. Each is to be acknowledged: ibv_dereg_mr waits for that. */
int tapverbs_dv_get_event(struct tapverbs_dv_event_channel *channel, struct tapverbs_dv_event *event);
void tapverbs_dv_ack_event(struct tapverbs_dv_event *event);
int tapverbs_dv_destroy_event_channel(struct tapverbs_dv_event_channel *channel);

/* What the allocators of a parent domain (ibv_alloc_parent_domain(3)) are asked for
 * memory for, as the lower half of resource_type. The upper half is 0. */
enum tapverbs_dv_resource {
	TAPVERBS_DV_RESOURCE_QP = 1,
	TAPVERBS_DV_RESOURCE_CQ = 2,
	TAPVERBS_DV_RESOURCE_SRQ = 3,
};

#ifdef __cplusplus
}
#endif

#endif
