/* SPDX-License-Identifier: Apache-2.0
 *
 * The one name that libibverbs.so.1 looks up in the engine. Filling the table here
 * lets the C compiler compare the Go functions with engine.h. */
#include "_cgo_export.h"

struct tv_engine *tv_engine(void)
{
	static struct tv_engine t = {
		.abi = TV_ABI,
		.open = tvOpen, .close = tvClose, .unplug = tvUnplug, .guid = tvGUID,
		.ctx_open = tvCtxOpen, .ctx_close = tvCtxClose, .event_take = tvEventTake,
		.query_device = tvQueryDevice, .query_port = tvQueryPort, .query_gid = tvQueryGID, .resolve = tvResolve,
		.query_clock = tvQueryClock,
		.ctx_import = tvCtxImport, .import = tvImport, .unimport = tvUnimport,
		.alloc_parent = tvAllocParent, .null_mr = tvNullMR, .advise_mr = tvAdviseMR, .query_mr = tvQueryMR,
		.alloc_dm = tvAllocDM, .dm_mr = tvDMMR, .query_counters = tvQueryCounters,
		.fork_begin = tvForkBegin, .fork_end = tvForkEnd, .fork_finish = tvForkFinish,
		.alloc_pd = tvAllocPD, .reg_mr = tvRegMR, .rereg_mr = tvReregMR, .alloc_mw = tvAllocMW, .create_ah = tvCreateAH,
		.create_channel = tvCreateChannel, .chan_take = tvChanTake,
		.create_cq = tvCreateCQ, .modify_cq = tvModifyCQ, .resize_cq = tvResizeCQ,
		.create_srq = tvCreateSRQ, .modify_srq = tvModifySRQ, .query_srq = tvQuerySRQ,
		.open_xrcd = tvOpenXRCD, .open_qp = tvOpenQP,
		.create_qp = tvCreateQP, .modify_qp = tvModifyQP, .query_qp = tvQueryQP, .mcast = tvMcast,
		.create_flow = tvCreateFlow, .create_counters = tvCreateCounters, .attach_counters = tvAttachCounters,
		.read_counters = tvReadCounters,
		.set_suspend = tvSetSuspend, .suspend_mr = tvSuspendMR, .resume_mr = tvResumeMR, .replace_mr = tvReplaceMR,
		.move_mr = tvMoveMR, .eliminate_mr = tvEliminateMR, .mr_fault_policy = tvMRFaultPolicy,
		.qp_fault_policy = tvQPFaultPolicy, .add_notifier = tvAddNotifier, .remove_notifier = tvRemoveNotifier, .settle_notifiers = tvSettleNotifiers,
		.set_budget = tvSetBudget, .pd_budget = tvPDBudget, .mr_budget = tvMRBudget, .name_store = tvNameStore,
		.set_store = tvSetStore, .evict_mr = tvEvictMR, .eviction_stopped = tvEvictionStopped,
		.enable_residency = tvEnableResidency, .disable_residency = tvDisableResidency,
		.query_remote = tvQueryRemote, .prefetch_remote = tvPrefetchRemote,
		.mr_usage = tvMRUsage, .usage = tvUsage, .pd_usage = tvPDUsage, .qp_faults = tvQPFaults,
		.thread_faults = tvThreadFaults, .residency = tvResidency,
		.track_dirty = tvTrackDirty, .dirty_mr = tvDirtyMR,
		.create_dv_channel = tvCreateDVChannel, .dv_take = tvDVTake,
		.generation = tvGeneration, .changes = tvChanges, .mr_lost = tvMRLost,
		.cm_channel = tvCMChannel, .cm_take = tvCMTake, .cm_create = tvCMCreate, .cm_adopt = tvCMAdopt,
		.cm_migrate = tvCMMigrate, .cm_option = tvCMOption, .cm_bind = tvCMBind, .cm_listen = tvCMListen,
		.cm_resolve_addr = tvCMResolveAddr, .cm_resolve_route = tvCMResolveRoute, .cm_info = tvCMInfo,
		.cm_qp_attr = tvCMQPAttr, .cm_connect = tvCMConnect, .cm_accept = tvCMAccept, .cm_ready = tvCMReady,
		.cm_reject = tvCMReject, .cm_notify = tvCMNotify, .cm_disconnect = tvCMDisconnect, .cm_join = tvCMJoin, .cm_exit = tvCMExit,
		.destroy = tvDestroy,
		.kick = tvKick, .progress = tvProgress, .rest = tvRest,
		.lead = tvLead, .led = tvLed, .end_lead = tvEndLead,
	};
	return &t;
}
