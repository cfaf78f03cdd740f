/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of a stream that is connected: completions, credits, control messages. All of it
 * is called with the socket's lock. What the peer says is not believed: a message that says
 * more than it may ends the connection. */
#include <arpa/inet.h>
#include <byteswap.h>
#include <string.h>

#include "rs.h"

#define BATCH 16
#define EVENTS_EVERY 64 /* polls that find nothing before the event channel is looked at */

static bool up(const struct rsock *s)
{
	return s->state == RS_CONNECTED || s->state == RS_ACCEPTING;
}

/* rs_break ends a connection by an error, which is told once. */
void rs_break(struct rsock *s, int err)
{
	if (s->state == RS_OVER || s->state == RS_BROKEN || s->state == RS_FAILED)
		return;
	s->error = err;
	s->state = RS_BROKEN;
}

/* rs_post posts one write, with the message as its immediate data or none. */
int rs_post(struct rsock *s, uint32_t message, bool immediate, struct ibv_sge *sge, int n,
	    uint64_t addr, uint32_t key, uint64_t wr_id, bool inlined)
{
	struct ibv_send_wr wr = {
		.wr_id = wr_id,
		.sg_list = sge,
		.num_sge = n,
		.opcode = immediate ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE,
		.send_flags = inlined ? IBV_SEND_INLINE : 0,
		.imm_data = htonl(message),
		.wr.rdma = {.remote_addr = addr, .rkey = key},
	}, *bad;
	int err = ibv_post_send(s->id->qp, &wr, &bad);

	if (err) {
		rs_break(s, err == ENOMEM ? ENOBUFS : ECONNRESET);
		return rs_error(err);
	}
	return 0;
}

/* take_target takes the next place for data out of the list once the last one is full. The
 * entry is emptied before anything is sent there: the peer fills it again afterwards. */
static void take_target(struct rsock *s)
{
	volatile struct rs_place *e = &s->list[s->target_index];
	uint32_t len;

	if (s->target.length)
		return;
	len = __atomic_load_n(&e->length, __ATOMIC_ACQUIRE); /* is written last */
	if (!len)
		return;
	s->target.addr = e->addr;
	s->target.key = e->key;
	s->target.length = len;
	__atomic_store_n(&e->length, 0, __ATOMIC_RELEASE);
	s->target_index = (s->target_index + 1) % RS_PLACES;
}

static void over(struct rsock *s)
{
	s->peer_shut = true;
	if (up(s))
		s->state = RS_OVER;
}

/* got_message acts on the immediate data of a write. */
static void got_message(struct rsock *s, uint32_t m)
{
	uint32_t value = m & RS_VALUE_MASK;
	uint16_t next;

	switch (m >> RS_OP_SHIFT) {
	case RS_OP_DATA:
		next = s->m_tail == s->rq_size ? 0 : s->m_tail + 1;
		if (next == s->m_head || value > s->rbuf_size - s->r_unpublished - s->r_unread) {
			rs_break(s, EPROTO); /* more than it was told that there is room for */
			return;
		}
		if (!value) {
			s->r_seq++;
			return;
		}
		s->messages[s->m_tail] = value;
		s->m_tail = next;
		s->r_unread += value;
		return;
	case RS_OP_SGL:
		s->s_limit = value;
		return;
	case RS_OP_IOMAP: /* is in place */
		s->r_seq++;
		return;
	case RS_OP_CTRL:
		if (value == RS_CTRL_DISCONNECT) {
			over(s);
		} else if (value == RS_CTRL_SHUTDOWN) {
			s->peer_shut = true;
			if (s->write_shut)
				over(s);
		}
		return;
	}
}

static int failure(enum ibv_wc_status status)
{
	return status == IBV_WC_RETRY_EXC_ERR ? ETIMEDOUT : ECONNRESET;
}

static void got_completion(struct rsock *s, const struct ibv_wc *wc)
{
	struct ibv_recv_wr wr = {.wr_id = RS_WR_RECV}, *bad;

	switch (wc->wr_id & RS_WR_KIND) {
	case RS_WR_RECV:
		if (wc->status)
			break;
		if (s->state == RS_ACCEPTING) { /* it has been heard of */
			s->state = RS_CONNECTED;
			rs_serve(s);
		}
		if (ibv_post_recv(s->id->qp, &wr, &bad) && up(s)) {
			rs_break(s, ECONNRESET);
			return;
		}
		if (wc->wc_flags & IBV_WC_WITH_IMM && s->state != RS_BROKEN)
			got_message(s, ntohl(wc->imm_data));
		return;
	case RS_WR_DATA:
		s->sq_free++;
		s->s_free += wc->wr_id & ~RS_WR_KIND;
		break;
	case RS_WR_FAREWELL:
		s->ctrl_used--;
		over(s);
		break;
	case RS_WR_CTRL:
		s->ctrl_used--;
		break;
	}
	if (wc->status && up(s))
		rs_break(s, failure(wc->status));
}

/* rs_progress takes in completions, and events of the connection now and then. idle is 0
 * afterwards if there were any. */
void rs_progress(struct rsock *s)
{
	struct ibv_wc wc[BATCH];
	bool found = false;
	int n;

	if (s->type == SOCK_DGRAM) {
		rs_progress_dgram(s);
		return;
	}
	if (s->cq && s->id && s->id->qp) {
		/* One batch leaves room for what comes of it before the next. */
		while ((n = ibv_poll_cq(s->cq, BATCH, wc)) > 0) {
			found = true;
			for (int i = 0; i < n; i++)
				got_completion(s, &wc[i]);
			if (n < BATCH)
				break;
		}
		if (n < 0)
			rs_break(s, EIO);
		if (found && s->list)
			take_target(s);
		rs_give_credits(s);
	}
	if (found)
		s->idle = 0;
	else
		s->idle++;
	if (s->state == RS_RESOLVING || s->state == RS_CONNECTING || s->state == RS_ACCEPTING ||
	    (s->state == RS_CONNECTED && s->idle % EVENTS_EVERY == 0 && s->idle))
		rs_handle_events(s);
	if (!s->idle)
		rs_rouse(s);
}

static bool room_for_data(const struct rsock *s)
{
	return s->sq_free && s->s_seq != s->s_limit && s->target.length;
}

/* rs_writable says whether a write would take at least some of what it is given. */
bool rs_writable(struct rsock *s)
{
	uint32_t low = s->sbuf_size / 2 < RS_LOW_WATER ? s->sbuf_size / 2 : RS_LOW_WATER;

	return s->state == RS_CONNECTED && !s->write_shut && room_for_data(s) && s->s_free >= low;
}

/* rs_may_write and rs_may_read say whether a call need not wait any more, be it that it fails. */
bool rs_may_write(struct rsock *s)
{
	return rs_writable(s) || s->closed || s->write_shut || s->state < RS_RESOLVING || s->state >= RS_FAILED;
}

bool rs_may_read(struct rsock *s)
{
	return s->r_unread || s->closed || s->read_shut || s->peer_shut || s->state < RS_RESOLVING || s->state >= RS_FAILED;
}

/* rs_all_sent says whether the peer has acknowledged all that was sent, or never will. */
bool rs_all_sent(struct rsock *s)
{
	return !up(s) || (s->sq_free == s->sq_size - RS_CTRL_ROOM && !s->ctrl_used);
}

/* rs_send_ctrl sends a control message. EAGAIN if too many are under way. */
int rs_send_ctrl(struct rsock *s, enum rs_ctrl what)
{
	if (s->ctrl_used == RS_CTRL_ROOM)
		return rs_error(EAGAIN);
	s->ctrl_used++;
	return rs_post(s, rs_message(RS_OP_CTRL, what), true, NULL, 0, 0, 0,
		       what == RS_CTRL_DISCONNECT ? RS_WR_FAREWELL : RS_WR_CTRL, false);
}

/* rs_give_credits tells the peer of the half that has become free, and of places in our
 * queue of messages once half of them are to be told of. */
void rs_give_credits(struct rsock *s)
{
	uint32_t half = s->rbuf_size / 2, message;
	bool publish = s->r_unpublished >= half;
	struct rs_place *p;
	struct ibv_sge sge;

	if (s->state != RS_CONNECTED || s->farewell || s->peer_shut || s->ctrl_used == RS_CTRL_ROOM)
		return;
	if (!publish && (uint16_t)(s->r_seq - s->r_told) < s->rq_size / 2)
		return;
	s->ctrl_used++;
	s->r_told = s->r_seq;
	message = rs_message(RS_OP_SGL, (uint16_t)(s->r_seq + s->rq_size));
	if (!publish) {
		rs_post(s, message, true, NULL, 0, 0, 0, RS_WR_CTRL, false);
		return;
	}
	/* The place in ctrl_buf is free: no more than RS_CTRL_ROOM are under way. */
	p = (struct rs_place *)(s->ctrl_buf + s->ctrl_next * sizeof(struct rs_mapping));
	s->ctrl_next = (s->ctrl_next + 1) % RS_CTRL_ROOM;
	p->addr = (uintptr_t)s->rbuf + s->r_publish * half;
	p->key = s->rmr->rkey;
	p->length = half;
	if (s->swap)
		*p = (struct rs_place){bswap_64(p->addr), bswap_32(p->key), bswap_32(p->length)};
	sge = (struct ibv_sge){.addr = (uintptr_t)p, .length = sizeof(*p), .lkey = s->smr->lkey};
	s->r_unpublished -= half;
	s->r_publish = !s->r_publish;
	rs_post(s, message, true, &sge, 1, s->peer_list.addr + s->peer_index * sizeof(*p), s->peer_list.key,
		RS_WR_CTRL, s->inline_size >= sizeof(*p));
	s->peer_index = (s->peer_index + 1) % s->peer_list.length;
}
