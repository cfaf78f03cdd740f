/* SPDX-License-Identifier: Apache-2.0
 *
 * 1,000 queue pairs on one device between two processes, all moving data both ways
 * at once: in each round each of them WRITEs a block and SENDs a message behind it,
 * and who receives the message checks both. A queue pair goes on to the next round
 * when its SEND is acknowledged and its peer's has come, so none waits for another.
 *
 * A round's WRITE lands in the slot of its parity: the peer is at most one round
 * ahead, as it needs our SEND to go on, and there are two receives posted. */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "verbs.h"

enum { QPS = 1000, ROUNDS = 6, MSG = 256, BLOCK = 8192, PORT = 18516, GID = 1 };

/* What an end says to the other before it starts. */
struct hello {
	uint8_t gid[16];
	uint64_t addr;
	uint32_t rkey;
	uint32_t qpn[QPS];
};

/* The memory of a queue pair. */
struct area {
	unsigned char landing[2][BLOCK]; /* of the peer's WRITEs */
	unsigned char in[2][MSG];
	unsigned char block[BLOCK], out[MSG];
};

static struct ibv_qp *qps[QPS];
static int rounds[QPS], sent[QPS], came[QPS];
static struct area *areas;
static struct ibv_mr *reg;
static struct hello mine, theirs;
static struct ibv_context *dev;
static struct ibv_pd *dom;
static struct ibv_cq *cq;
static int rank, sock;

static void say(const void *p, size_t n) { CHECK(send(sock, p, n, 0) == (ssize_t)n); }
static void hear(void *p, size_t n) { CHECK(recv(sock, p, n, MSG_WAITALL) == (ssize_t)n); }

static void meet(void)
{
	char c = 'x';

	say(&c, 1);
	hear(&c, 1);
}

static void connect_ends(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(PORT), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int s = socket(AF_INET, SOCK_STREAM, 0), on = 1;

	CHECK(s >= 0);
	if (rank == 0) {
		CHECK(!setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)));
		CHECK(!bind(s, (struct sockaddr *)&a, sizeof(a)) && !listen(s, 1));
		CHECK((sock = accept(s, NULL, NULL)) >= 0);
		close(s);
	} else {
		/* Nothing tells when rank 0 listens. */
		while (connect(s, (struct sockaddr *)&a, sizeof(a))) {
			CHECK(errno == ECONNREFUSED);
			close(s);
			usleep(1000);
			CHECK((s = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
		}
		sock = s;
	}
	CHECK(!setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)));
}

/* What a round's bytes are, and how many: one packet for some, several for others. */
static unsigned char byte(int from, int qp, int round, int i) { return from * 101 + qp * 7 + round * 31 + i * 13 + (i >> 8); }
static int block_len(int qp) { return 1 + qp * 37 % BLOCK; }

static void post_recv(int i, int slot)
{
	struct ibv_sge s = { (uintptr_t)areas[i].in[slot], MSG, reg->lkey };
	struct ibv_recv_wr wr = { .wr_id = i, .sg_list = &s, .num_sge = 1 }, *bad;

	CHECK(!ibv_post_recv(qps[i], &wr, &bad));
}

/* go starts a round: the WRITE and the SEND in one list. */
static void go(int i)
{
	int r = rounds[i], n = block_len(i);
	struct area *a = &areas[i];
	struct ibv_sge sb = { (uintptr_t)a->block, n, reg->lkey }, sm = { (uintptr_t)a->out, MSG, reg->lkey };
	struct ibv_send_wr send = { .wr_id = QPS + i, .sg_list = &sm, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM,
		.send_flags = IBV_SEND_SIGNALED, .imm_data = htonl(r) };
	struct ibv_send_wr write = { .wr_id = 2 * QPS + i, .next = &send, .sg_list = &sb, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.wr.rdma = { .remote_addr = theirs.addr + i * sizeof(struct area) + offsetof(struct area, landing[r % 2]), .rkey = theirs.rkey } }, *bad;

	for (int k = 0; k < n; k++)
		a->block[k] = byte(rank, i, r, k);
	for (int k = 0; k < MSG; k++)
		a->out[k] = ~byte(rank, i, r, k);
	CHECK(!ibv_post_send(qps[i], &write, &bad));
}

static void check(int i, const struct ibv_wc *wc)
{
	int r = came[i];
	struct area *a = &areas[i];

	CHECK(wc->byte_len == MSG && wc->wc_flags == IBV_WC_WITH_IMM && ntohl(wc->imm_data) == (uint32_t)r);
	CHECK(wc->qp_num == qps[i]->qp_num);
	for (int k = 0; k < MSG; k++)
		CHECK(a->in[r % 2][k] == (unsigned char)~byte(!rank, i, r, k));
	for (int k = 0; k < block_len(i); k++)
		CHECK(a->landing[r % 2][k] == byte(!rank, i, r, k));
}

static void make_qp(int i)
{
	struct ibv_qp_init_attr in = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };

	CHECK(qps[i] = ibv_create_qp(dom, &in));
	CHECK(!ibv_modify_qp(qps[i], &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	mine.qpn[i] = qps[i]->qp_num;
	post_recv(i, 0);
	post_recv(i, 1);
}

static void join_qp(int i)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = theirs.qpn[i], .rq_psn = i,
		.min_rnr_timer = 12, .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = GID, .hop_limit = 1 } } };

	memcpy(&a.ah_attr.grh.dgid, theirs.gid, 16);
	CHECK(!ibv_modify_qp(qps[i], &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 17, .retry_cnt = 7, .rnr_retry = 0, .sq_psn = i };
	CHECK(!ibv_modify_qp(qps[i], &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

int main(void)
{
	const char *r = getenv("TAPVERBS_RANK");
	struct ibv_wc wc[64];
	int left = QPS;

	alarm(240);
	CHECK(r);
	rank = atoi(r);
	dev = open_dev();
	CHECK(dom = ibv_alloc_pd(dev));
	CHECK(areas = mmap(NULL, QPS * sizeof(struct area), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
	CHECK(reg = ibv_reg_mr(dom, areas, QPS * sizeof(struct area), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	CHECK(cq = ibv_create_cq(dev, 4 * QPS, NULL, NULL, 0));
	union ibv_gid gid;
	CHECK(!ibv_query_gid(dev, 1, GID, &gid));
	memcpy(mine.gid, &gid, 16);
	mine.addr = (uintptr_t)areas;
	mine.rkey = reg->rkey;
	for (int i = 0; i < QPS; i++)
		make_qp(i);
	connect_ends();
	say(&mine, sizeof(mine));
	hear(&theirs, sizeof(theirs));
	for (int i = 0; i < QPS; i++)
		join_qp(i);
	meet();
	for (int i = 0; i < QPS; i++)
		go(i);
	while (left > 0) {
		int n = ibv_poll_cq(cq, 64, wc);
		CHECK(n >= 0);
		for (int k = 0; k < n; k++) {
			int i = wc[k].wr_id % QPS;
			if (wc[k].status != IBV_WC_SUCCESS)
				fprintf(stderr, "rank %d, queue pair %d, round %d: %s\n", rank, i, rounds[i], ibv_wc_status_str(wc[k].status));
			CHECK(wc[k].status == IBV_WC_SUCCESS);
			if (wc[k].opcode == IBV_WC_RECV) {
				check(i, &wc[k]);
				post_recv(i, came[i]++ % 2);
			} else {
				CHECK(wc[k].opcode == IBV_WC_SEND);
				sent[i]++;
			}
			if (sent[i] > rounds[i] && came[i] > rounds[i] && rounds[i] < ROUNDS) {
				if (++rounds[i] < ROUNDS)
					go(i);
				else
					left--;
			}
		}
	}
	CHECK(ibv_poll_cq(cq, 64, wc) == 0);
	meet();
	for (int i = 0; i < QPS; i++) {
		CHECK(sent[i] == ROUNDS && came[i] == ROUNDS);
		CHECK(!ibv_destroy_qp(qps[i]));
	}
	CHECK(!ibv_destroy_cq(cq) && !ibv_dereg_mr(reg) && !ibv_dealloc_pd(dom) && !ibv_close_device(dev));
	printf("%d queue pairs, %d rounds\n", QPS, ROUNDS);
	return 0;
}
