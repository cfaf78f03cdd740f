/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of librdmacm: queue pairs and what they need, made for identifiers, and multicast
 * groups. */
#include "rdmacm.h"

/* queues: what the program brings is used and left to it, what it does not is made and ended. */
void queues(void)
{
	struct end e = make(RDMA_PS_TCP);
	struct ibv_qp_init_attr in = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp_init_attr_ex ex;
	struct ibv_srq_init_attr_ex srq = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_context *other;
	struct ibv_device **list;
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT };
	struct ibv_pd *pd, *foreign;
	struct ibv_cq *cq, *second;
	int mask;

	FAILS(rdma_create_qp(e.id, NULL, &in), EINVAL); /* on which device? */
	FAILS(rdma_init_qp_attr(e.id, &a, &mask), EINVAL);
	CHECK(!rdma_bind_addr(e.id, addr(own(), 0)));

	CHECK(!rdma_create_qp(e.id, NULL, &in));
	CHECK(e.id->qp && e.id->send_cq && e.id->recv_cq && e.id->send_cq != e.id->recv_cq && e.id->send_cq_channel && e.id->recv_cq_channel);
	CHECK(in.send_cq == e.id->send_cq && in.recv_cq == e.id->recv_cq && in.cap.max_send_wr >= 4);
	CHECK(e.id->send_cq->cq_context == e.id && e.id->qp->pd == e.id->pd && e.id->qp->state == IBV_QPS_INIT);
	FAILS(rdma_create_qp(e.id, NULL, &in), EINVAL);
	rdma_destroy_qp(e.id);
	CHECK(!e.id->qp && !e.id->send_cq && !e.id->recv_cq && !e.id->send_cq_channel && !e.id->recv_cq_channel);

	/* The program's own domain and queues. */
	CHECK(list = ibv_get_device_list(NULL));
	CHECK(other = ibv_open_device(list[0]));
	ibv_free_device_list(list);
	CHECK(foreign = ibv_alloc_pd(other));
	CHECK(pd = ibv_alloc_pd(e.id->verbs));
	CHECK(cq = ibv_create_cq(e.id->verbs, 8, NULL, NULL, 0));
	CHECK(second = ibv_create_cq(e.id->verbs, 8, NULL, NULL, 0));
	in = (struct ibv_qp_init_attr){ .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 }, .send_cq = cq, .recv_cq = cq };
	FAILS(rdma_create_qp(e.id, foreign, &in), EINVAL);
	CHECK(!rdma_create_qp(e.id, pd, &in));
	CHECK(e.id->qp->pd == pd && e.id->pd == pd && e.id->qp->send_cq == cq && !e.id->send_cq && !e.id->recv_cq_channel);
	rdma_destroy_qp(e.id);
	e.id->recv_cq = cq; /* it may say so here, too; but not both, and different */
	in.recv_cq = second;
	FAILS(rdma_create_qp(e.id, pd, &in), EINVAL);
	e.id->recv_cq = NULL;
	CHECK(!ibv_destroy_cq(cq) && !ibv_destroy_cq(second));

	/* A shared receive queue is that of all that follow. */
	FAILS(rdma_create_srq_ex(e.id, &srq), EINVAL); /* of which type? */
	CHECK(!rdma_create_srq(e.id, pd, &(struct ibv_srq_init_attr){ .attr = { .max_wr = 4, .max_sge = 1 } }));
	CHECK(e.id->srq && e.id->srq->pd == pd);
	memset(&ex, 0, sizeof(ex));
	ex.qp_type = IBV_QPT_RC;
	ex.cap = (struct ibv_qp_cap){ 4, 4, 1, 1, 0 };
	CHECK(!rdma_create_qp_ex(e.id, &ex));
	CHECK(ex.pd && ex.comp_mask & IBV_QP_INIT_ATTR_PD && e.id->qp->srq == e.id->srq);
	rdma_destroy_qp(e.id);
	rdma_destroy_srq(e.id);
	CHECK(!e.id->srq);

	/* And the states that it may be brought to. */
	CHECK(!rdma_init_qp_attr(e.id, &a, &mask));
	CHECK(mask == (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) && a.port_num == 1);
	a.qp_state = IBV_QPS_RTR;
	FAILS(rdma_init_qp_attr(e.id, &a, &mask), EINVAL); /* to whom? */
	end_it(&e);
	CHECK(!ibv_dealloc_pd(pd) && !ibv_dealloc_pd(foreign) && !ibv_close_device(other));
}

static void join(struct end *e, const char *group, uint16_t flags, void *context)
{
	struct rdma_cm_join_mc_attr_ex j = { .comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS,
		.join_flags = flags, .addr = addr(group, 0) };

	CHECK(!rdma_join_multicast_ex(e->id, &j, context));
}

/* groups: joined, left, and left behind. */
void groups(void)
{
	const char *one = "239.91.7.1", *two = "239.91.7.2";
	struct end e = make(RDMA_PS_UDP), tcp = make(RDMA_PS_TCP);
	struct rdma_cm_event *ev;
	struct late late;
	union ibv_gid gid;
	int context;

	FAILS(rdma_join_multicast(e.id, addr(one, 0), NULL), EINVAL); /* where? */
	CHECK(!rdma_bind_addr(e.id, addr(own(), 0)) && !rdma_bind_addr(tcp.id, addr(own(), 0)));
	FAILS(rdma_join_multicast(tcp.id, addr(one, 0), NULL), EINVAL); /* connections have two ends */
	end_it(&tcp);
	make_qp(e.id);
	FAILS(rdma_join_multicast(e.id, addr(own(), 0), NULL), EINVAL); /* is no group */
	CHECK(!rdma_join_multicast(e.id, addr(one, 0), &context));
	ev = get(e.ch, RDMA_CM_EVENT_MULTICAST_JOIN, 0);
	CHECK(ev->id == e.id && ev->param.ud.private_data == &context && ev->param.ud.qp_num == 0xffffff && ev->param.ud.qkey == RDMA_UDP_QKEY);
	CHECK(ev->param.ud.ah_attr.is_global && ev->param.ud.ah_attr.port_num == 1);
	gid = ev->param.ud.ah_attr.grh.dgid; /* is the group's address, as RoCE has them */
	CHECK(gid.raw[10] == 0xff && gid.raw[11] == 0xff && gid.raw[12] == 239 && gid.raw[15] == 1);
	struct ibv_ah *ah = ibv_create_ah(e.id->pd, &ev->param.ud.ah_attr);
	CHECK(ah && !ibv_destroy_ah(ah));

	/* To leave is to wait for who still looks at the event. */
	ack_later(&late, ev);
	CHECK(!rdma_leave_multicast(e.id, addr(one, 0)) && late.acked);
	pthread_join(late.thread, NULL);
	FAILS(rdma_leave_multicast(e.id, addr(one, 0)), EADDRNOTAVAIL);

	/* An event that nobody took goes with its group, or with the identifier. */
	join(&e, one, RDMA_MC_JOIN_FLAG_FULLMEMBER, NULL);
	CHECK(readable(e.ch, -1) == 1);
	CHECK(!rdma_leave_multicast(e.id, addr(one, 0)));
	nonblock(e.ch);
	FAILS(rdma_get_cm_event(e.ch, &ev), EAGAIN);
	join(&e, one, RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER, NULL);
	join(&e, two, RDMA_MC_JOIN_FLAG_FULLMEMBER, NULL);
	CHECK(readable(e.ch, -1) == 1);
	rdma_destroy_qp(e.id);
	end_it(&e);

	/* The call that waits. */
	struct rdma_cm_id *id;
	CHECK(!rdma_create_id(NULL, &id, NULL, RDMA_PS_UDP));
	CHECK(!rdma_bind_addr(id, addr(own6(), 0)));
	make_qp(id);
	CHECK(!rdma_join_multicast(id, addr("ff0e::91:7", 0), NULL));
	CHECK(id->event->event == RDMA_CM_EVENT_MULTICAST_JOIN);
	CHECK(!rdma_leave_multicast(id, addr("ff0e::91:7", 0)) && !id->event);
	rdma_destroy_ep(id);
}
