/* SPDX-License-Identifier: Apache-2.0
 *
 * What libibverbs.so.1 and the engine (libtapverbs-engine.so) say to each other.
 * Both sides include this file, so the two always come from one build; TV_ABI is
 * there to notice when they do not.
 *
 * Every int is an errno, 0 for success. Handles are the engine's, 0 is none;
 * cookies are the library's and come back as they were. Structs are of the
 * library's stack: the engine keeps no pointer to them.
 */
#ifndef TAPVERBS_ENGINE_H
#define TAPVERBS_ENGINE_H

#include <stdint.h>

#define TV_ABI 1

typedef uint64_t tv_handle;
typedef uint64_t tv_cookie;

#define TV_MAX_FDS 17

struct tv_config {
	char *port, *addrs, *addrs6, *mac, *gateway, *sysfs, *budget, *store, *monitor, *frames, *ecn, *queues; /* may be NULL */
	char *err;                          /* what went wrong, for people */
	uint64_t err_len;
	/* Words that the engine sets when the device is gone, before anybody can see its
	 * event: they have to live as long as the device is open. May be NULL. */
	uint32_t *gone, *trouble;
	int32_t fds[TV_MAX_FDS];            /* out of open: the port's descriptors, num_fds of them */
	uint32_t num_fds;
};

struct tv_device_attr {
	uint64_t node_guid, sys_image_guid; /* host order */
	uint64_t max_mr_size, page_size_cap;
	int32_t max_qp, max_qp_wr, max_sge, max_cq, max_cqe, max_mr, max_mw, max_pd;
	int32_t max_qp_rd_atom, max_qp_init_rd_atom, atomic_cap, max_ah;
	int32_t max_srq, max_srq_wr, max_srq_sge, max_pkeys;
	int32_t max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach;
	int32_t max_cq_mod_count, max_cq_mod_us;
	int32_t local_ca_ack_delay, phys_port_cnt, odp;
	uint64_t max_dm_size;
};

struct tv_port_attr {
	int32_t state, max_mtu, active_mtu, gid_tbl_len, pkey_tbl_len, qkey_violations;
	uint64_t max_msg_sz;
};

struct tv_ah_attr {
	uint8_t dgid[16];
	uint32_t flow_label;
	uint8_t sgid_index, hop_limit, traffic_class, sl;
	uint8_t port_num;
	uint32_t number; /* out of create_ah: what send WQEs name it by */
};

struct tv_reg {
	uint64_t addr, length, iova;
	uint32_t access;
	int32_t have_iova;
	tv_cookie cookie; /* of the region's events */
	/* out */
	tv_handle handle;
	uint32_t lkey, rkey;
};

struct tv_dm_attr {
	uint64_t length;
	uint32_t log_align;
	/* out */
	tv_handle handle;
	uint64_t addr; /* the memory: the library copies to and from it by itself */
};

/* Kinds of objects that can be imported. */
enum { TV_IMPORT_PD, TV_IMPORT_MR, TV_IMPORT_DM };

struct tv_import {
	uint32_t kind, number; /* number: the lower half of the object's handle */
	/* out */
	tv_handle handle;
	uint64_t addr, length; /* of a region its length, of device memory both */
	uint32_t lkey, rkey;
};

/* How a region is paged: package mr's Paging. */
enum { TV_PAGED_USERFAULT, TV_PAGED_KERNEL, TV_PAGED_PINNED, TV_PAGED_DEVICE, TV_PAGED_IMPLICIT, TV_PAGED_NULL };

struct tv_mr_info {
	uint32_t paging;
	uint64_t present; /* bytes; in: whether to count them */
	uint64_t page_faults, page_faults_handled, page_prefetch;
};

struct tv_counters {
	uint64_t page_faults, page_faults_handled, page_invalidations, page_prefetch, app_faults;
	uint64_t rx_frames, rx_bytes, tx_frames, tx_bytes, rx_dropped, tx_dropped;
};

struct tv_sge;

struct tv_cq_info {
	tv_handle handle;
	uint64_t ring; /* address */
};

/* What modify_cq sets, by bits of mask. */
enum { TV_CQ_MODERATE = 1, TV_CQ_IGNORE_OVERRUN = 2 };
struct tv_cq_attr {
	uint32_t mask;
	uint32_t count, period_us;
};

struct tv_srq_attr {
	uint32_t max_wr, max_sge, limit;
	tv_handle xrcd, cq; /* of XRC; else 0 */
	/* out */
	uint32_t num; /* of XRC; else 0 */
	uint64_t ring;
	tv_handle handle;
};

struct tv_caps {
	uint32_t send_wr, recv_wr, send_sge, recv_sge, inline_data;
};

struct tv_qp_init {
	uint32_t type;
	int32_t sig_all;
	tv_handle send_cq, recv_cq, srq;
	tv_cookie cookie;
	struct tv_caps caps; /* in: wanted; out: what it became */
	/* out */
	tv_handle handle;
	uint32_t num, send_ops;
	uint64_t send_ring, recv_ring; /* recv_ring is 0 with an SRQ */
	uint64_t bells;                /* the page of doorbells; see ring.h */
	uint32_t bell;                 /* the QP's */
};

struct tv_qp_attr {
	uint32_t state, cur_state, path_mtu, qkey, rq_psn, sq_psn, dest_qpn, access, rate_limit;
	uint16_t pkey_index;
	uint8_t port, en_sqd_async, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer;
	uint8_t timeout, retry_cnt, rnr_retry;
	struct tv_ah_attr ah;
};

/* What a flow compares, in host order; see FlowSpec of package provider. */
struct tv_flow_filter {
	uint8_t dst_mac[6], src_mac[6], src_ip[16], dst_ip[16]; /* IPv4: the first four */
	uint32_t flow_label;
	uint16_t ether_type, vlan_tag, src_port, dst_port;
	uint8_t proto, tclass, ttl, flags;
};

enum { TV_FLOW_ETH, TV_FLOW_IPV4, TV_FLOW_IPV6, TV_FLOW_TCP, TV_FLOW_UDP, TV_FLOW_TAG, TV_FLOW_DROP, TV_FLOW_COUNT };

enum {
	TV_FLOW_SPECS = 6, /* link, network, transport, three actions: each may be there once */
	TV_COUNTERS = 1024,
};

struct tv_flow_spec {
	uint32_t type, tag;
	tv_handle counters;
	struct tv_flow_filter val, mask;
};

struct tv_flow_attr {
	uint32_t type, priority, port, num;
	int32_t dont_trap;
	struct tv_flow_spec specs[TV_FLOW_SPECS];
	/* out */
	tv_handle handle;
};

struct tv_event {
	int32_t type;
	int32_t has_object;
	tv_cookie cookie; /* of the object */
};

/* Changes of where addresses lead, from the one with a number on. */
enum { TV_CHANGED_RANGES = 64, TV_LOST_RANGES = 16 };

struct tv_span {
	uint64_t start, end;
};

struct tv_changed {
	uint64_t since;
	/* out */
	uint64_t last; /* the number to go on from */
	uint32_t n;
	int32_t more;  /* there are more */
	struct {
		uint64_t start, end;
		int32_t whole; /* a region that lies there has gone elsewhere, or ended */
	} ranges[TV_CHANGED_RANGES];
};

struct tv_lost {
	/* out */
	uint64_t addr;    /* where the region lies */
	int32_t followed; /* changes of its memory are heard of */
	uint32_t n;       /* of ranges; one more than there may be: more */
	struct tv_span ranges[TV_LOST_RANGES];
};

/* How a region is suspended. */
struct tv_suspend_attr {
	uint32_t mode, rnr_delay; /* µs */
	uint64_t hold_buffer;
};

/* Residency messages: package provider's ResidencyOptions and RemoteResidency. */
struct tv_residency_attr {
	uint32_t ahead;
	int64_t max_hold; /* µs; negative: not at all */
};

struct tv_remote {
	uint64_t away;
	int32_t agreed, watched, held_off;
};

/* Package mr's Usage and Residency. */
struct tv_usage {
	uint64_t size, present, limbo, stored, dirty, budget;
	uint64_t faults_minor, faults_major, app_faults_minor, app_faults_major, fault_ns;
	uint64_t rnrs, evictions, invalidations, prefetches, app_fault_ns;
};

/* Its Faults and ThreadFaults. */
struct tv_qp_faults {
	uint64_t minor, major, ns, rnrs;
};

struct tv_thread_faults {
	uint32_t tid;
	char name[16];
	uint64_t minor, major, ns;
};

struct tv_residency {
	uint64_t size, present, limbo, stored, poisoned;
};

/* A store that is a program's functions; see tapverbs_dv.h. */
struct tv_store {
	void *user;
	int (*write)(void *user, uint32_t slot, const void *page);
	int (*read)(void *user, uint32_t slot, void *page);
	void (*free)(void *user, uint32_t slot);
	void (*close)(void *user);
};

struct tv_range {
	uint64_t iova, length;
};

/* Events of regions and of paging; types are those of tapverbs_dv.h. */
enum { TV_EVENT_MR_SUSPENDED, TV_EVENT_MR_RESUMED, TV_EVENT_MR_ELIMINATED, TV_EVENT_MR_MOVED, TV_EVENT_EVICTION_STOPPED = 16 };

struct tv_dv_event {
	uint32_t type;
	int32_t error;
	int32_t has_object;
	tv_cookie cookie; /* of the region */
};

/* Who wants to know of changes of mappings; any function may be NULL. See tapverbs_dv.h. */
struct tv_notifier {
	void *user;
	void (*release)(void *user);
	void (*sync_range)(void *user, uintptr_t start, uintptr_t end);
	void (*invalidate_range)(void *user, uintptr_t start, uintptr_t end);
	void (*update_range)(void *user, uintptr_t start, uintptr_t end);
	void (*change_protection)(void *user, uintptr_t start, uintptr_t end, int prot);
	void (*sync_page)(void *user, uintptr_t addr);
	void (*invalidate_page)(void *user, uintptr_t addr);
	void (*update_page)(void *user, uintptr_t addr);
};

/* Connection management: what the kernel's RDMA CM is to librdmacm.so.1. Ports are in host
 * order. */
struct tv_cm_addr {
	uint16_t family, port; /* 0: no address; 4; 6; or 128 for a GID of a multicast group */
	uint8_t addr[16];
	uint32_t scope; /* of IPv6 */
};

#define TV_CM_PRIVATE 256

/* What one end of a connection tells the other. */
struct tv_cm_conn {
	uint32_t qpn, qkey, ece_vendor, ece_options;
	uint8_t responder_resources, initiator_depth, flow_control, retry_count, rnr_retry_count, srq;
	uint8_t private_data[TV_CM_PRIVATE];
	uint32_t private_len;
};

/* Types are those of enum rdma_cm_event_type. */
struct tv_cm_event {
	int32_t type, status;
	tv_cookie id;      /* of a connect request: the listener's */
	tv_handle request; /* the new identifier of a connect request; else 0 */
	tv_cookie group;   /* of an event of a multicast join */
	int32_t datagram;  /* conn has qpn and qkey, and ah is set */
	struct tv_cm_conn conn;
	struct tv_ah_attr ah;
};

/* A route, as far as there is one: what a path record says. */
struct tv_cm_route {
	uint8_t mtu, hop_limit, traffic_class, ack_timeout; /* codes */
	uint32_t flow_label;
	uint16_t pkey;
};

struct tv_cm_info {
	struct tv_cm_addr src, dst;
	uint8_t sgid[16], dgid[16];
	int32_t bound;  /* to the device */
	int32_t routed; /* route is set */
	struct tv_cm_route route;
	uint32_t qp_type;
};

enum { TV_CM_TOS, TV_CM_REUSEADDR, TV_CM_AFONLY, TV_CM_ACK_TIMEOUT };

struct tv_cm_join {
	struct tv_cm_addr addr;
	tv_cookie group;
	int32_t send_only;
	int32_t pad;
	/* out */
	tv_handle handle; /* to be destroyed to leave */
};

/* What the engine offers. */
struct tv_engine {
	uint32_t abi;

	/* Opens the port. EBUSY: it is open elsewhere. */
	int (*open)(struct tv_config *cfg, tv_handle *dev);
	int (*close)(tv_handle dev);
	int (*unplug)(tv_handle ctx); /* takes the context's device off its port */
	/* The node GUID that open would give, in host order. */
	int (*guid)(struct tv_config *cfg, uint64_t *guid);

	/* A context's events are tokens in an eventfd (EFD_SEMAPHORE), one for each;
	 * who has read a token calls event_take, which says EAGAIN when the event is
	 * gone since, with its object. When the device is gone and all events were taken it
	 * says EIO, and the descriptor stays readable. */
	int (*ctx_open)(tv_handle dev, int32_t fd, tv_handle *ctx);
	int (*ctx_close)(tv_handle ctx); /* destroys what is left */
	/* Another context of the same objects: they can be imported from one to the
	 * other. Domains, regions and device memory live until the last of them ends. */
	int (*ctx_import)(tv_handle of, int32_t fd, tv_handle *ctx);
	int (*import)(tv_handle ctx, struct tv_import *i); /* ENOENT: no such object */
	int (*unimport)(tv_handle object);                 /* ends the handle, not the object */
	int (*event_take)(tv_handle ctx, struct tv_event *ev);

	int (*query_device)(tv_handle ctx, struct tv_device_attr *a);
	int (*query_port)(tv_handle ctx, struct tv_port_attr *a);
	int (*query_gid)(tv_handle ctx, uint32_t index, uint8_t *gid);
	/* The Ethernet address that packets with this address vector go to, of 6 bytes. */
	int (*resolve)(tv_handle ctx, struct tv_ah_attr *a, uint8_t *mac);
	/* Nanoseconds of the clock that timestamps are of. */
	int (*query_clock)(tv_handle ctx, uint64_t *ns);
	int (*query_counters)(tv_handle ctx, struct tv_counters *c);
	/* Around fork(2) of a process with an open port: begin before it, and in the parent
	 * end, with what begin gave. Finish waits until no child lacks memory. */
	int (*fork_begin)(tv_handle *forking);
	int (*fork_end)(tv_handle forking);
	int (*fork_finish)(void);

	int (*alloc_pd)(tv_handle ctx, tv_handle *pd);
	/* A parent domain: another handle of the domain, to be destroyed first. */
	int (*alloc_parent)(tv_handle pd, tv_handle *parent);
	int (*reg_mr)(tv_handle pd, struct tv_reg *r);
	/* Keys stay, and what is not in what (enum ibv_rereg_mr_flags); when it fails, all. */
	int (*rereg_mr)(tv_handle mr, uint32_t what, tv_handle pd, struct tv_reg *r);
	int (*alloc_mw)(tv_handle pd, uint32_t type, tv_handle *mw, uint32_t *rkey);
	int (*null_mr)(tv_handle pd, struct tv_reg *r);
	int (*advise_mr)(tv_handle pd, uint32_t advice, uint32_t flags, struct tv_sge *sg, uint32_t n);
	int (*query_mr)(tv_handle mr, struct tv_mr_info *i);
	int (*alloc_dm)(tv_handle ctx, struct tv_dm_attr *dm);
	int (*dm_mr)(tv_handle pd, tv_handle dm, struct tv_reg *r); /* addr: offset in dm */
	int (*create_ah)(tv_handle pd, struct tv_ah_attr *a, tv_handle *ah);

	/* Channels: as events, with chan_take giving the CQ's cookie. */
	int (*create_channel)(tv_handle ctx, int32_t fd, tv_handle *ch);
	int (*chan_take)(tv_handle ch, tv_cookie *cq);

	int (*create_cq)(tv_handle ctx, uint32_t entries, tv_handle ch, tv_cookie cookie, struct tv_cq_info *cq);
	int (*modify_cq)(tv_handle cq, struct tv_cq_attr *a);
	int (*resize_cq)(tv_handle cq, uint32_t entries, struct tv_cq_info *info);

	int (*create_srq)(tv_handle pd, tv_cookie cookie, struct tv_srq_attr *srq);
	int (*modify_srq)(tv_handle srq, struct tv_srq_attr *a, uint32_t mask);
	int (*query_srq)(tv_handle srq, struct tv_srq_attr *a);

	/* An XRC target is made in an XRC domain instead of a PD; open_qp opens the one
	 * with in->num. */
	int (*open_xrcd)(tv_handle ctx, int32_t fd, int32_t create, int32_t exclusive, tv_handle *xrcd);
	int (*open_qp)(tv_handle xrcd, struct tv_qp_init *in);

	int (*create_qp)(tv_handle pd, struct tv_qp_init *in);
	int (*modify_qp)(tv_handle qp, struct tv_qp_attr *a, uint32_t mask);
	int (*query_qp)(tv_handle qp, struct tv_qp_attr *a);
	int (*mcast)(tv_handle qp, uint8_t *gid, int32_t attach);

	int (*create_flow)(tv_handle qp, struct tv_flow_attr *a);
	int (*create_counters)(tv_handle ctx, tv_handle *counters);
	int (*attach_counters)(tv_handle counters, uint32_t kind, uint32_t index);
	int (*read_counters)(tv_handle counters, uint64_t *values, uint32_t n); /* n up to TV_COUNTERS */

	/* Regions that are suspended, and what is changed then. */
	int (*set_suspend)(tv_handle mr, struct tv_suspend_attr *a);
	int (*suspend_mr)(tv_handle mr);
	int (*resume_mr)(tv_handle mr);
	int (*replace_mr)(tv_handle mr, uint64_t iova, uint64_t length, uint64_t with);
	int (*move_mr)(tv_handle mr, uint64_t addr);
	int (*eliminate_mr)(tv_handle mr);
	int (*mr_fault_policy)(tv_handle mr, uint32_t policy);
	int (*qp_fault_policy)(tv_handle qp, uint32_t policy); /* UINT32_MAX: as the regions have it */

	/* Hooks, until remove_notifier or the context's end, of which release tells. */
	int (*add_notifier)(tv_handle ctx, struct tv_notifier *n, uint64_t start, uint64_t end, tv_handle *out);
	int (*remove_notifier)(tv_handle notifier);
	int (*settle_notifiers)(tv_handle ctx); /* those for all changes until now have been called */

	/* Eviction. A store is named (package provider's NewStore), or the program's. */
	int (*set_budget)(tv_handle ctx, uint64_t bytes);
	int (*pd_budget)(tv_handle pd, uint64_t bytes);
	int (*mr_budget)(tv_handle mr, uint64_t bytes);
	int (*name_store)(tv_handle ctx, char *spec);
	int (*set_store)(tv_handle ctx, struct tv_store *s);
	int (*evict_mr)(tv_handle mr, uint64_t iova, uint64_t length, uint32_t to, uint64_t *pages);
	int (*eviction_stopped)(tv_handle ctx, char *text, uint64_t len);

	/* Where the pages of a region are, and of all regions; of up to n parts of a region. */
	int (*mr_usage)(tv_handle mr, struct tv_usage *u);
	int (*usage)(tv_handle ctx, struct tv_usage *u);
	int (*pd_usage)(tv_handle pd, struct tv_usage *u);
	int (*qp_faults)(tv_handle qp, struct tv_qp_faults *f);
	/* Up to n threads; there are *n. */
	int (*thread_faults)(tv_handle ctx, struct tv_thread_faults *f, uint32_t *n);
	int (*residency)(tv_handle mr, struct tv_residency *parts, uint32_t *n);

	/* Residency messages. */
	int (*enable_residency)(tv_handle qp, struct tv_residency_attr *a);
	int (*disable_residency)(tv_handle qp);
	int (*query_remote)(tv_handle qp, uint32_t rkey, uint64_t iova, uint64_t length, struct tv_remote *r);
	int (*prefetch_remote)(tv_handle qp, uint32_t rkey, uint64_t iova, uint64_t length);

	/* Pages that were written. When there are more ranges than n there is room for: ENOSPC,
	 * with n as it has to be, and the same again at the next call. */
	int (*track_dirty)(tv_handle mr, int32_t on);
	int (*dirty_mr)(tv_handle mr, int32_t clear, struct tv_range *ranges, uint64_t *n);

	/* What caches of registrations go by: the address of the word that moves with each
	 * change of memory, the changes, and what a region has lost. EOVERFLOW: some
	 * changes were overwritten; last is set. */
	int (*generation)(tv_handle ctx, uint64_t *addr);
	int (*changes)(tv_handle ctx, struct tv_changed *c);
	int (*mr_lost)(tv_handle mr, struct tv_lost *l);

	/* A channel for the events above; see events for its descriptor. mask: 1 << type. */
	int (*create_dv_channel)(tv_handle ctx, int32_t fd, uint64_t mask, tv_handle *ch);
	int (*dv_take)(tv_handle ch, struct tv_dv_event *ev);

	/* Identifiers of connection management, and channels of their events: as events, with
	 * cm_take. Calls are those of rdma_cma.h, and the kernel's errors. Ending an identifier
	 * takes its events back. */
	int (*cm_channel)(tv_handle ctx, int32_t fd, tv_handle *ch);
	int (*cm_take)(tv_handle ch, struct tv_cm_event *ev);
	int (*cm_create)(tv_handle ch, tv_cookie cookie, uint32_t ps, uint32_t qp_type, tv_handle *id);
	int (*cm_adopt)(tv_handle id, tv_cookie cookie); /* an identifier that came with an event */
	int (*cm_migrate)(tv_handle id, tv_handle ch);
	int (*cm_option)(tv_handle id, uint32_t option, uint32_t value);
	int (*cm_bind)(tv_handle id, struct tv_cm_addr *addr);
	int (*cm_listen)(tv_handle id, int32_t backlog);
	int (*cm_resolve_addr)(tv_handle id, struct tv_cm_addr *src, struct tv_cm_addr *dst, int32_t timeout_ms);
	int (*cm_resolve_route)(tv_handle id, struct tv_cm_route *r); /* r: the program's, or NULL */
	int (*cm_info)(tv_handle id, struct tv_cm_info *i);
	/* What a queue pair is to have in a state. */
	int (*cm_qp_attr)(tv_handle id, uint32_t state, struct tv_qp_attr *a, uint32_t *mask);
	int (*cm_connect)(tv_handle id, struct tv_cm_conn *c);
	int (*cm_accept)(tv_handle id, struct tv_cm_conn *c);
	int (*cm_ready)(tv_handle id); /* after a response */
	int (*cm_reject)(tv_handle id, uint32_t reason, uint8_t *data, uint32_t len);
	int (*cm_notify)(tv_handle id);
	int (*cm_disconnect)(tv_handle id);
	int (*cm_join)(tv_handle id, struct tv_cm_join *j);
	/* The process ends: so do all connections, and other ends are given a second to hear of it. */
	void (*cm_exit)(tv_handle ctx);

	/* Ends any object but devices and contexts; EBUSY while it is used. */
	int (*destroy)(tv_handle object);

	/* Work was posted; a CQ was found empty (rest: and the caller will sleep until
	 * an event comes); the caller sleeps now. */
	void (*kick)(tv_handle qp);
	void (*progress)(tv_handle cq, int32_t rest);
	void (*rest)(tv_handle ctx);

	/* The caller sleeps now until the channel has an event: if lead gives a descriptor,
	 * until that is readable, too, and calls led then, which says whether it is to sleep
	 * on. end_lead follows, but after TV_LEAD_READY. */
	int32_t (*lead)(tv_handle channel);
	int (*led)(tv_handle channel);
	void (*end_lead)(tv_handle channel, int32_t fd);
};

enum { TV_LEAD_NOT = -1, TV_LEAD_READY = -2 };

/* The engine's one exported name: struct tv_engine *tv_engine(void). */
#define TV_ENGINE_SYMBOL "tv_engine"

#endif
