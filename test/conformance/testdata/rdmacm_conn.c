/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of librdmacm: connections, made, refused and ended. */
#include "rdmacm.h"

/* refused: nobody listens, or who listens does not want. */
void refused(void)
{
	struct end l = listening(RDMA_PS_TCP, own(), 8), a;
	struct rdma_cm_event *ev;
	struct rdma_conn_param p = { 0 };
	char data[64];

	/* Nobody is there. */
	a = resolved(RDMA_PS_TCP, own(), 7);
	make_qp(a.id);
	CHECK(!rdma_connect(a.id, NULL));
	wait_for(&a, RDMA_CM_EVENT_REJECTED, 8);
	struct ibv_qp_attr at;
	struct ibv_qp_init_attr in;
	CHECK(!ibv_query_qp(a.id->qp, &at, IBV_QP_STATE, &in) && at.qp_state == IBV_QPS_ERR);
	rdma_destroy_qp(a.id);
	end_it(&a);

	/* Not with these parameters. */
	struct ibv_device_attr dev;
	a = resolved(RDMA_PS_TCP, own(), port_of(&l));
	FAILS(rdma_connect(a.id, NULL), EINVAL); /* there is no queue pair to tell of */
	CHECK(!ibv_query_device(a.id->verbs, &dev));
	p.responder_resources = dev.max_qp_rd_atom + 1;
	FAILS(rdma_connect(a.id, &p), EINVAL);
	p.responder_resources = 0;
	p.initiator_depth = dev.max_qp_init_rd_atom + 1;
	FAILS(rdma_connect(a.id, &p), EINVAL);
	p.initiator_depth = 0;
	p.private_data = data;
	memset(data, 'a', sizeof(data));
	p.private_data_len = 57; /* RDMA CM's own header leaves 56 of 92 */
	FAILS(rdma_connect(a.id, &p), EINVAL);
	quiet(l.ch);

	/* The other end refuses, and says why. */
	p.private_data_len = 56;
	p.qp_num = 0x4321;
	CHECK(!rdma_connect(a.id, &p));
	FAILS(rdma_connect(a.id, &p), EINVAL); /* it is under way */
	ev = get(l.ch, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	CHECK(ev->param.conn.qp_num == 0x4321 && ev->param.conn.private_data_len >= 56 && !memcmp(ev->param.conn.private_data, data, 56));
	struct rdma_cm_id *child = ev->id;
	CHECK(!rdma_ack_cm_event(ev));
	CHECK(!rdma_reject(child, "no, thanks", 10));
	FAILS(rdma_reject(child, NULL, 0), EINVAL);
	FAILS(rdma_accept(child, &p), EINVAL);
	ev = get(a.ch, RDMA_CM_EVENT_REJECTED, 28);
	CHECK(ev->id == a.id && ev->param.conn.private_data_len >= 10 && !memcmp(ev->param.conn.private_data, "no, thanks", 10));
	CHECK(!rdma_ack_cm_event(ev) && !rdma_destroy_id(child));
	end_it(&a);

	/* For its options. */
	p.private_data = NULL;
	p.private_data_len = 0;
	struct ibv_ece ece = { .vendor_id = 0x1f, .options = 0x55 }, got;
	a = resolved(RDMA_PS_TCP, own(), port_of(&l));
	CHECK(!rdma_set_local_ece(a.id, &ece));
	CHECK(!rdma_connect(a.id, &p));
	ev = get(l.ch, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	CHECK(!rdma_get_remote_ece(ev->id, &got) && got.vendor_id == 0x1f && got.options == 0x55);
	CHECK(!rdma_reject_ece(ev->id, NULL, 0));
	CHECK(!rdma_destroy_id(ev->id) && !rdma_ack_cm_event(ev));
	wait_for(&a, RDMA_CM_EVENT_REJECTED, 35);
	end_it(&a);

	/* The listener ends with the request in it. */
	a = resolved(RDMA_PS_TCP, own(), port_of(&l));
	CHECK(!rdma_connect(a.id, &p));
	CHECK(readable(l.ch, -1) == 1);
	end_it(&l);
	wait_for(&a, RDMA_CM_EVENT_REJECTED, 28);
	end_it(&a);
}

/* connected: data goes both ways, and both ends hear of the end, and of the end of that. */
void connected(void)
{
	struct end l = listening(RDMA_PS_TCP, own(), 8), a = resolved(RDMA_PS_TCP, own(), port_of(&l));
	struct ibv_wc wc;
	char buf[64] = "hello", out[64];
	struct ibv_mr *mr, *mr2;

	FAILS(rdma_disconnect(a.id), EINVAL); /* of what? */
	make_qp(a.id);
	FAILS(rdma_establish(a.id), EINVAL); /* the library does that */
	FAILS(rdma_notify(a.id, IBV_EVENT_COMM_EST), EINVAL);
	CHECK(!rdma_connect(a.id, NULL));
	struct rdma_cm_id *b = accepted(&l, true);
	wait_for(&a, RDMA_CM_EVENT_ESTABLISHED, 0);
	struct rdma_cm_event *ev = get(l.ch, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(ev->id == b && !rdma_ack_cm_event(ev));
	FAILS(rdma_accept(b, NULL), EINVAL);
	FAILS(rdma_notify(b, IBV_EVENT_COMM_EST), EISCONN);
	FAILS(rdma_notify(b, IBV_EVENT_PORT_ERR), EINVAL);

	CHECK(mr = rdma_reg_msgs(a.id, buf, sizeof(buf)));
	CHECK(mr2 = rdma_reg_msgs(b, out, sizeof(out)));
	CHECK(!rdma_post_recv(b, NULL, out, sizeof(out), mr2));
	CHECK(!rdma_post_send(a.id, NULL, buf, sizeof(buf), mr, IBV_SEND_SIGNALED));
	CHECK(rdma_get_recv_comp(b, &wc) == 1 && wc.status == IBV_WC_SUCCESS && !strcmp(out, "hello"));
	CHECK(rdma_get_send_comp(a.id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);

	/* What was posted is flushed, at both ends. */
	CHECK(!rdma_post_recv(a.id, NULL, buf, sizeof(buf), mr));
	CHECK(!rdma_post_recv(b, NULL, out, sizeof(out), mr2));
	CHECK(!rdma_disconnect(a.id));
	CHECK(rdma_get_recv_comp(a.id, &wc) == 1 && wc.status == IBV_WC_WR_FLUSH_ERR);
	ev = get(l.ch, RDMA_CM_EVENT_DISCONNECTED, 0);
	CHECK(ev->id == b && !rdma_ack_cm_event(ev));
	CHECK(!rdma_disconnect(b)); /* is the answer, which may have been given */
	CHECK(rdma_get_recv_comp(b, &wc) == 1 && wc.status == IBV_WC_WR_FLUSH_ERR);
	wait_for(&a, RDMA_CM_EVENT_DISCONNECTED, 0);
	wait_for(&a, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
	ev = get(l.ch, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
	CHECK(ev->id == b && !rdma_ack_cm_event(ev));
	quiet(l.ch);
	quiet(a.ch);
	CHECK(!rdma_dereg_mr(mr) && !rdma_dereg_mr(mr2));
	rdma_destroy_qp(a.id);
	rdma_destroy_qp(b);
	CHECK(!rdma_destroy_id(b));
	end_it(&a);
	end_it(&l);
}

/* untold: one end says by itself when it is ready (rdma_establish), and the other finds out by
 * data that comes before it is told (rdma_notify). */
void untold(void)
{
	struct end l = listening(RDMA_PS_TCP, own(), 8), a = resolved(RDMA_PS_TCP, own(), port_of(&l));
	struct rdma_conn_param p = { .qp_num = 0x77 };
	struct rdma_cm_event *ev;

	FAILS(rdma_establish(a.id), EINVAL);
	CHECK(!rdma_connect(a.id, &p));
	struct rdma_cm_id *b = accepted(&l, false);
	ev = get(a.ch, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
	CHECK(ev->id == a.id && ev->param.conn.qp_num == 0x1234 && !rdma_ack_cm_event(ev));
	quiet(l.ch);
	CHECK(!rdma_notify(b, IBV_EVENT_COMM_EST));
	ev = get(l.ch, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(ev->id == b && !rdma_ack_cm_event(ev));
	FAILS(rdma_notify(b, IBV_EVENT_COMM_EST), EISCONN);
	CHECK(!rdma_establish(a.id)); /* is too late to be news */
	CHECK(!rdma_disconnect(b));
	wait_for(&a, RDMA_CM_EVENT_DISCONNECTED, 0);
	ev = get(l.ch, RDMA_CM_EVENT_DISCONNECTED, 0);
	CHECK(ev->id == b && !rdma_ack_cm_event(ev) && !rdma_destroy_id(b));
	end_it(&a);

	/* Told in the ordinary way; and refused after it was accepted. */
	for (int no = 0; no < 2; no++) {
		a = resolved(RDMA_PS_TCP, own(), port_of(&l));
		CHECK(!rdma_connect(a.id, &p));
		b = accepted(&l, false);
		wait_for(&a, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
		CHECK(!(no ? rdma_reject(a.id, "sorry", 5) : rdma_establish(a.id)));
		ev = get(l.ch, no ? RDMA_CM_EVENT_REJECTED : RDMA_CM_EVENT_ESTABLISHED, no ? 28 : 0);
		CHECK(ev->id == b && (!no || !memcmp(ev->param.conn.private_data, "sorry", 5)));
		CHECK(!rdma_ack_cm_event(ev) && !rdma_destroy_id(b));
		if (!no)
			wait_for(&a, RDMA_CM_EVENT_DISCONNECTED, 0); /* the end of the identifier is that of the connection */
		end_it(&a);
	}
	end_it(&l);
}

/* waiting is how many events a channel has; its descriptor is an eventfd. */
static int waiting(struct rdma_event_channel *ch)
{
	char path[64], line[128];
	unsigned int n = 0, found = 0;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", ch->fd);
	CHECK(f = fopen(path, "r"));
	while (fgets(line, sizeof(line), f))
		found += sscanf(line, "eventfd-count: %x", &n) == 1;
	fclose(f);
	CHECK(found == 1);
	return n;
}

/* backlog: as many requests wait as the listener said; others ask again until there is room. */
void backlog(void)
{
	struct end l = listening(RDMA_PS_TCP, own(), 2), other = listening(RDMA_PS_TCP, own(), 2), a[4], marker;
	struct rdma_conn_param p = { .qp_num = 0x77 };
	struct rdma_cm_event *ev;

	for (int i = 0; i < 4; i++) {
		a[i] = resolved(RDMA_PS_TCP, own(), port_of(&l));
		p.qp_num++; /* one queue pair has one connection */
		CHECK(!rdma_connect(a[i].id, &p));
	}
	/* One that was sent after them has come. */
	marker = resolved(RDMA_PS_TCP, own(), port_of(&other));
	p.qp_num++;
	CHECK(!rdma_connect(marker.id, &p));
	ev = get(other.ch, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	CHECK(!rdma_destroy_id(ev->id) && !rdma_ack_cm_event(ev));
	wait_for(&marker, RDMA_CM_EVENT_REJECTED, 28);
	CHECK(waiting(l.ch) == 2);
	for (int i = 0; i < 4; i++) {
		ev = get(l.ch, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
		CHECK(!rdma_reject(ev->id, NULL, 0) && !rdma_destroy_id(ev->id) && !rdma_ack_cm_event(ev));
	}
	for (int i = 0; i < 4; i++) {
		wait_for(&a[i], RDMA_CM_EVENT_REJECTED, 28);
		end_it(&a[i]);
	}
	end_it(&marker);
	end_it(&other);
	end_it(&l);
}

/* datagrams: the other end's queue pair is found, or not. */
void datagrams(void)
{
	struct end l = listening(RDMA_PS_UDP, own(), 8), a = resolved(RDMA_PS_UDP, own(), 7);
	struct rdma_conn_param p = { .private_data = "who?", .private_data_len = 4 };
	struct rdma_cm_event *ev;

	/* What is said is the service's status: 1, there is none; 2, it does not want. */
	make_qp(a.id);
	CHECK(!rdma_connect(a.id, NULL));
	wait_for(&a, RDMA_CM_EVENT_UNREACHABLE, 1);
	rdma_destroy_qp(a.id);
	end_it(&a);
	a = resolved(RDMA_PS_UDP, own(), port_of(&l));
	make_qp(a.id);
	CHECK(!rdma_connect(a.id, &p));
	ev = get(l.ch, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	CHECK(ev->param.ud.private_data_len >= 4 && !memcmp(ev->param.ud.private_data, "who?", 4));
	CHECK(!rdma_reject(ev->id, NULL, 0));
	CHECK(!rdma_destroy_id(ev->id) && !rdma_ack_cm_event(ev));
	wait_for(&a, RDMA_CM_EVENT_UNREACHABLE, 2);
	rdma_destroy_qp(a.id);
	end_it(&a);

	a = resolved(RDMA_PS_UDP, own(), port_of(&l));
	make_qp(a.id);
	CHECK(!rdma_connect(a.id, NULL));
	struct rdma_cm_id *b = accepted(&l, true);
	ev = get(a.ch, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(ev->param.ud.qp_num == b->qp->qp_num && ev->param.ud.qkey == RDMA_UDP_QKEY);
	union ibv_gid gid;
	CHECK(!ibv_query_gid(b->verbs, 1, 1, &gid) && !memcmp(&gid, &ev->param.ud.ah_attr.grh.dgid, 16));
	CHECK(!rdma_ack_cm_event(ev));
	rdma_destroy_qp(b);
	rdma_destroy_qp(a.id);
	CHECK(!rdma_destroy_id(b));

	/* Joining wants an address, and a way to join. */
	struct rdma_cm_join_mc_attr_ex j = { .comp_mask = RDMA_CM_JOIN_MC_ATTR_RESERVED, .addr = addr("239.91.7.7", 0) };
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	FAILS(rdma_join_multicast_ex(l.id, &j, NULL), ENOTSUP);
	j.comp_mask = RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
	FAILS(rdma_join_multicast_ex(l.id, &j, NULL), EINVAL);
	j.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS;
	FAILS(rdma_join_multicast_ex(l.id, &j, NULL), EINVAL);
	j.comp_mask |= RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
	j.join_flags = RDMA_MC_JOIN_FLAG_RESERVED;
	FAILS(rdma_join_multicast_ex(l.id, &j, NULL), EINVAL);
	FAILS(rdma_join_multicast(l.id, &none, NULL), EINVAL);
	FAILS(rdma_join_multicast(l.id, addr("239.91.7.7", 0), NULL), EINVAL); /* it listens */
	FAILS(rdma_leave_multicast(l.id, &none), EINVAL);
	FAILS(rdma_leave_multicast(l.id, addr("239.91.7.7", 0)), EADDRNOTAVAIL);
	end_it(&a);
	end_it(&l);
}
