/* SPDX-License-Identifier: Apache-2.0
 *
 * Regions that are suspended and changed, and their events. */
#include "private.h"

_Static_assert((int)TAPVERBS_DV_EVENT_MR_SUSPENDED == TV_EVENT_MR_SUSPENDED && (int)TAPVERBS_DV_EVENT_MR_RESUMED == TV_EVENT_MR_RESUMED &&
		       (int)TAPVERBS_DV_EVENT_MR_ELIMINATED == TV_EVENT_MR_ELIMINATED && (int)TAPVERBS_DV_EVENT_MR_MOVED == TV_EVENT_MR_MOVED,
	       "events");
_Static_assert(offsetof(struct tapverbs_dv_event_channel, fd) == offsetof(struct tv_dv_channel, fd), "channels");

int tapverbs_dv_set_suspend(struct ibv_mr *mr, const struct tapverbs_dv_suspend_attr *attr)
{
	struct tv_suspend_attr a = { .mode = attr->mode, .rnr_delay = attr->rnr_delay, .hold_buffer = attr->hold_buffer };

	return attr->comp_mask ? EINVAL : DV_MR(mr, set_suspend, &a);
}

int tapverbs_dv_suspend_mr(struct ibv_mr *mr) { return DV_MR(mr, suspend_mr); }

int tapverbs_dv_resume_mr(struct ibv_mr *mr) { return DV_MR(mr, resume_mr); }

int tapverbs_dv_replace_mr(struct ibv_mr *mr, uint64_t iova, size_t length, void *with)
{
	return DV_MR(mr, replace_mr, iova, length, (uintptr_t)with);
}

int tapverbs_dv_move_mr(struct ibv_mr *mr, void *addr)
{
	int rc = DV_MR(mr, move_mr, (uintptr_t)addr);

	if (!rc)
		mr->addr = addr;
	return rc;
}

int tapverbs_dv_eliminate_mr(struct ibv_mr *mr) { return DV_MR(mr, eliminate_mr); }

int tapverbs_dv_set_mr_fault_policy(struct ibv_mr *mr, enum tapverbs_dv_fault_policy policy)
{
	return DV_MR(mr, mr_fault_policy, policy);
}

int tapverbs_dv_set_qp_fault_policy(struct ibv_qp *qp, enum tapverbs_dv_fault_policy policy)
{
	return DV_QP(qp, qp_fault_policy, policy);
}

struct tapverbs_dv_event_channel *tapverbs_dv_create_event_channel(struct ibv_context *ctx, uint64_t mask)
{
	int rc;
	const struct tv_dv *t = dv_there(ctx, &rc);

	if (t)
		return (struct tapverbs_dv_event_channel *)t->channel_new(ctx, mask);
	errno = rc;
	return NULL;
}

/* Channels of a device that is gone give the events there are. */
int tapverbs_dv_get_event(struct tapverbs_dv_event_channel *ch, struct tapverbs_dv_event *out)
{
	const struct tv_dv *t = dv_table(ch->context->device);
	struct tv_dv_event ev;
	struct ibv_mr *mr;
	int rc = t->get_event((struct tv_dv_channel *)ch, &ev, &mr);

	if (!rc)
		*out = (struct tapverbs_dv_event){ .type = ev.type, .error = ev.error, .mr = mr };
	return rc;
}

void tapverbs_dv_ack_event(struct tapverbs_dv_event *ev)
{
	if (ev->mr)
		dv_table(ev->mr->context->device)->ack_event(ev->mr);
}

int tapverbs_dv_destroy_event_channel(struct tapverbs_dv_event_channel *ch)
{
	return dv_table(ch->context->device)->channel_end((struct tv_dv_channel *)ch);
}
