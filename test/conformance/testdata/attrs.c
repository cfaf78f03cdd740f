/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of verbs.c's program that are about changing objects and asking about them:
 * SRQ sizes, moderation and overrun of CQs, rate limits, ECE, neighbours, draining. */
#include "verbs.h"

static void srq_size(void)
{
	struct ibv_srq_init_attr in = { .attr = { .max_wr = 8, .max_sge = 2 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &in);
	struct ibv_device_attr d;
	struct ibv_srq_attr s;
	struct ibv_recv_wr *bad;

	CHECK(srq && !ibv_query_device(ctx, &d) && d.device_cap_flags & IBV_DEVICE_SRQ_RESIZE);
	struct end a = make(NULL, DEPTH), b = make_srq(NULL, DEPTH, srq);
	join(&a, &b);
	for (int i = 0; i < 8; i++) {
		struct ibv_sge g = { (uintptr_t)buf + 64 * i, 64, mr->lkey };
		CHECK(!ibv_post_srq_recv(srq, &(struct ibv_recv_wr){ .wr_id = i, .sg_list = &g, .num_sge = 1 }, &bad));
	}
	/* Half of it is used: the other half moves. */
	for (int i = 0; i < 4; i++)
		CHECK(!send_wr(a.qp, i, IBV_WR_SEND, SIZE - 64, 8, 0));
	for (int i = 0; i < 4; i++)
		CHECK(wait_wc(b.cq).wr_id == (uint64_t)i);
	s = (struct ibv_srq_attr){ .max_wr = 3 };
	CHECK(ibv_modify_srq(srq, &s, IBV_SRQ_MAX_WR) == EINVAL); /* 4 are posted */
	s = (struct ibv_srq_attr){ .max_wr = 100, .srq_limit = 101 };
	CHECK(ibv_modify_srq(srq, &s, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) == EINVAL);
	CHECK(!ibv_query_srq(srq, &s) && s.max_wr == 8 && s.srq_limit == 0);
	s = (struct ibv_srq_attr){ .max_wr = d.max_srq_wr + 1 };
	CHECK(ibv_modify_srq(srq, &s, IBV_SRQ_MAX_WR) == EINVAL);
	s = (struct ibv_srq_attr){ .max_wr = 100, .srq_limit = 50 };
	CHECK(!ibv_modify_srq(srq, &s, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT));
	struct ibv_async_event ev;
	CHECK(!ibv_get_async_event(ctx, &ev) && ev.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && ev.element.srq == srq);
	ibv_ack_async_event(&ev);
	CHECK(!ibv_query_srq(srq, &s) && s.max_wr >= 100);
	for (int i = 8; i < 100; i++) {
		struct ibv_sge g = { (uintptr_t)buf + 64 * i, 64, mr->lkey };
		CHECK(!ibv_post_srq_recv(srq, &(struct ibv_recv_wr){ .wr_id = i, .sg_list = &g, .num_sge = 1 }, &bad));
	}
	s.max_wr = 95;
	CHECK(ibv_modify_srq(srq, &s, IBV_SRQ_MAX_WR) == EINVAL); /* 96 are */
	for (int i = 4; i < 100; i++) {
		sprintf(buf + SIZE - 64, "%d", i);
		CHECK(!send_wr(a.qp, i, IBV_WR_SEND, SIZE - 64, 8, 0));
		CHECK(wait_wc(b.cq).wr_id == (uint64_t)i && atoi(buf + 64 * i) == i);
	}
	s.max_wr = 1;
	CHECK(!ibv_modify_srq(srq, &s, IBV_SRQ_MAX_WR) && !ibv_query_srq(srq, &s) && s.max_wr == 1);
	end_it(&a);
	end_it(&b);
	CHECK(!ibv_destroy_srq(srq));
}

static int events(struct ibv_comp_channel *ch, int ms)
{
	struct pollfd p = { .fd = ch->fd, .events = POLLIN };
	struct ibv_cq *cq;
	void *u;

	if (poll(&p, 1, ms) == 0)
		return 0;
	CHECK(!ibv_get_cq_event(ch, &cq, &u));
	ibv_ack_cq_events(cq, 1);
	return 1;
}

static void moderation(void)
{
	struct ibv_comp_channel *ch = ibv_create_comp_channel(ctx);
	struct end a = make(ch, DEPTH), b = make(NULL, DEPTH);
	struct ibv_device_attr_ex d;
	struct ibv_modify_cq_attr m = { .attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = { 4, 65535 } };

	join(&a, &b);
	CHECK(!ibv_query_device_ex(ctx, NULL, &d) && d.cq_mod_caps.max_cq_count == 65535 && d.cq_mod_caps.max_cq_period == 65535);
	CHECK(!ibv_modify_cq(a.cq, &m));
	m.attr_mask = 1 << 1;
	CHECK(ibv_modify_cq(a.cq, &m) == EOPNOTSUPP);
	/* The fourth brings the event, long before the period is over. */
	double start = now();
	CHECK(!ibv_req_notify_cq(a.cq, 0));
	for (int i = 0; i < 4; i++) {
		CHECK(i > 2 || !events(ch, 0));
		CHECK(!send_wr(a.qp, i, IBV_WR_RDMA_WRITE, 0, 8, IBV_SEND_SIGNALED));
		wait_wc(a.cq);
	}
	CHECK(events(ch, 10000) == 1 && now() > start);
	/* One alone brings it when the period is over: 65 ms. */
	start = now();
	CHECK(!ibv_req_notify_cq(a.cq, 0));
	CHECK(!send_wr(a.qp, 4, IBV_WR_RDMA_WRITE, 0, 8, IBV_SEND_SIGNALED));
	CHECK(events(ch, 10000) == 1 && now() - start > 0.065);
	wait_wc(a.cq);
	end_it(&a);
	end_it(&b);
	CHECK(!ibv_destroy_comp_channel(ch));
}

static void overrun(void)
{
	struct ibv_cq_init_attr_ex in = { .cqe = 2, .wc_flags = IBV_WC_STANDARD_FLAGS, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
		.flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN | IBV_CREATE_CQ_ATTR_SINGLE_THREADED };
	struct end a, b = make(NULL, DEPTH);
	struct ibv_cq_ex *cx = ibv_create_cq_ex(ctx, &in);
	struct ibv_cq *replies = ibv_create_cq(ctx, 1, NULL, NULL, 0);
	struct ibv_wc wc[8];

	CHECK(cx && replies);
	a.cq = ibv_cq_ex_to_cq(cx);
	struct ibv_qp_init_attr q = { .send_cq = a.cq, .recv_cq = replies, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_send_sge = 1, .max_recv_wr = 1, .max_recv_sge = 1 } };
	CHECK(a.qp = ibv_create_qp(pd, &q));
	join(&a, &b);
	for (int i = 0; i < 5; i++)
		CHECK(!send_wr(a.qp, i, IBV_WR_RDMA_WRITE, 0, 8, IBV_SEND_SIGNALED));
	/* An answer comes behind the acknowledgement of all of them. */
	CHECK(!recv_one(a.qp, 11, 0, 8) && !recv_one(b.qp, 9, 0, 8) && !send_wr(a.qp, 9, IBV_WR_SEND, 0, 8, 0) && wait_wc(b.cq).wr_id == 9);
	CHECK(!send_wr(b.qp, 12, IBV_WR_SEND, 0, 8, 0) && wait_wc(replies).wr_id == 11);
	CHECK(ibv_poll_cq(a.cq, 8, wc) == 2 && wc[1].wr_id == 1);
	CHECK(!send_wr(a.qp, 10, IBV_WR_RDMA_WRITE, 0, 8, IBV_SEND_SIGNALED));
	CHECK(wait_wc(a.cq).wr_id == 10); /* the CQ has not failed */
	in.flags = 1 << 2;
	CHECK(!ibv_create_cq_ex(ctx, &in) && errno == EOPNOTSUPP);
	/* What a RoCE device has nothing to say about. */
	for (int bit = 0; bit < 13; bit++) {
		in = (struct ibv_cq_init_attr_ex){ .cqe = 2, .wc_flags = 1ull << bit };
		cx = ibv_create_cq_ex(ctx, &in);
		if (1ull << bit & (IBV_WC_EX_WITH_CVLAN | IBV_WC_EX_WITH_TM_INFO) || 1ull << bit > IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
			CHECK(!cx && errno == EOPNOTSUPP);
		else
			CHECK(cx && !ibv_destroy_cq(ibv_cq_ex_to_cq(cx)));
	}
	end_it(&a);
	end_it(&b);
	CHECK(!ibv_destroy_cq(replies));
}

static void answers(void)
{
	struct end a = make(NULL, DEPTH), b = make(NULL, DEPTH);
	struct ibv_qp_rate_limit_attr rate = { .rate_limit = 8000 }; /* 1 MB/s */
	struct ibv_device_attr_ex d;
	struct ibv_ece ece = { 1, 2, 3 };
	struct ibv_qp_attr q;
	struct ibv_qp_init_attr qi;
	uint8_t mac[6] = { 0 };
	uint16_t vid = 0;

	CHECK(ibv_modify_qp_rate_limit(a.qp, &rate) == EINVAL); /* not in RESET */
	join(&a, &b);
	CHECK(!ibv_query_device_ex(ctx, NULL, &d) && d.packet_pacing_caps.supported_qpts & 1 << IBV_QPT_RC && d.packet_pacing_caps.qp_rate_limit_min == 1);
	rate.max_burst_sz = 1;
	CHECK(ibv_modify_qp_rate_limit(a.qp, &rate) == EINVAL);
	rate.max_burst_sz = 0;
	CHECK(!ibv_modify_qp_rate_limit(a.qp, &rate));
	CHECK(!ibv_query_qp(a.qp, &q, IBV_QP_RATE_LIMIT, &qi) && q.rate_limit == 8000);
	/* 20 ms of it; draining meanwhile, what has been started goes on, and is told of. */
	double start = now();
	CHECK(!send_wr(a.qp, 2, IBV_WR_RDMA_WRITE, 0, 20000, IBV_SEND_SIGNALED));
	q = (struct ibv_qp_attr){ .qp_state = IBV_QPS_SQD };
	CHECK(!ibv_modify_qp(a.qp, &q, IBV_QP_STATE));
	CHECK(!ibv_query_qp(a.qp, &q, IBV_QP_STATE, &qi) && q.qp_state == IBV_QPS_SQD && q.sq_draining);
	CHECK(wait_wc(a.cq).wr_id == 2 && now() - start > 0.018);
	CHECK(!ibv_query_qp(a.qp, &q, IBV_QP_STATE, &qi) && q.qp_state == IBV_QPS_SQD && !q.sq_draining);

	CHECK(!ibv_query_ece(a.qp, &ece) && !ece.vendor_id && !ece.options && !ece.comp_mask);
	ece.vendor_id = 0x2c9;
	CHECK(ibv_set_ece(a.qp, &ece) == EOPNOTSUPP);
	CHECK(!ibv_query_qp_data_in_order(a.qp, IBV_WR_RDMA_WRITE, 0));

	struct ibv_ah_attr ah = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 1 } };
	CHECK(!ibv_query_gid(ctx, 1, 1, &ah.grh.dgid));
	CHECK(!ibv_resolve_eth_l2_from_gid(ctx, &ah, mac, &vid) && mac[0] == 0x02 && vid == 0xffff);
	ah.grh.dgid.raw[15] = 200; /* nobody there */
	CHECK(ibv_resolve_eth_l2_from_gid(ctx, &ah, mac, &vid));
	ah.grh.dgid.raw[12] = 239;
	CHECK(!ibv_resolve_eth_l2_from_gid(ctx, &ah, mac, &vid) && mac[0] == 1 && mac[2] == 0x5e);
	ah.is_global = 0;
	CHECK(ibv_resolve_eth_l2_from_gid(ctx, &ah, mac, &vid) == EINVAL);
	end_it(&a);
	end_it(&b);
}

void attrs(void)
{
	srq_size();
	moderation();
	overrun();
	answers();
}
