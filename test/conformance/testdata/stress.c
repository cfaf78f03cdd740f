/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of verbs.c's program that are about the process: fork, contexts, memory that
 * goes, many queue pairs, threads, opening and closing; and the cost of calls. */
#include "verbs.h"

/* forked: the child of a program with a device can do no verbs, and knows it. */
void forked(void)
{
	struct end a = make(NULL, DEPTH), b = make(NULL, DEPTH);
	struct ibv_wc wc;
	int status;

	join(&a, &b);
	strcpy(buf, "parent");
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		CHECK(!ibv_alloc_pd(ctx) && errno == EIO);
		CHECK(send_wr(a.qp, 1, IBV_WR_SEND, 0, 12, 0) == EIO);
		CHECK(ibv_poll_cq(a.cq, 1, &wc) < 0);
		CHECK(!ibv_get_device_list(NULL));
		CHECK(!strcmp(buf, "parent"));
		exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CHECK(!send_wr(a.qp, 1, IBV_WR_RDMA_WRITE, 0, 7, IBV_SEND_SIGNALED));
	CHECK(wait_wc(a.cq).status == IBV_WC_SUCCESS && !strcmp(buf + SIZE / 2, "parent"));
	CHECK(system("true") == 0);
	end_it(&a);
	end_it(&b);
	/* One that lives on does not keep the port from being opened again. */
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		pause();
		_exit(0);
	}
	teardown();
	setup();
	CHECK(!kill(pid, SIGKILL) && waitpid(pid, &status, 0) == pid);
}

static int lines(const char *path)
{
	FILE *f = fopen(path, "r");
	int n = 0, c;

	CHECK(f);
	while ((c = fgetc(f)) != EOF)
		n += c == '\n';
	fclose(f);
	return n;
}

/* cycles: opening and closing leaves descriptors, mappings and memory as they were. */
void cycles(int n)
{
	int fd0 = 0, maps0 = 0;
	long bytes = 0;

	for (int i = 0; i < n; i++) {
		if (i == n / 10) {
			fd0 = descriptors();
			maps0 = lines("/proc/self/maps");
			bytes = resident();
		}
		setup();
		struct ibv_comp_channel *ch = ibv_create_comp_channel(ctx);
		struct end a = make(ch, DEPTH), b = make(ch, DEPTH);
		join(&a, &b);
		CHECK(!send_wr(a.qp, 1, IBV_WR_RDMA_WRITE, 0, 7, IBV_SEND_SIGNALED) && wait_wc(a.cq).status == IBV_WC_SUCCESS);
		if (i % 2) { /* every other time everything is left to ibv_close_device */
			end_it(&a);
			end_it(&b);
			CHECK(!ibv_destroy_comp_channel(ch));
			teardown();
		} else {
			int fd = ch->fd;
			CHECK(!ibv_close_device(ctx));
			close(fd);
			CHECK(!munmap(buf, SIZE));
		}
	}
	CHECK(descriptors() == fd0);
	printf("%d cycles: %d descriptors, mappings %d then %d, RSS %ld KiB then %ld\n", n, fd0, maps0, lines("/proc/self/maps"), bytes >> 10, resident() >> 10);
	/* Mappings may join and part by a few; memory of the C structs that close does
	 * not free is the program's. */
	CHECK(abs(lines("/proc/self/maps") - maps0) <= 20 && resident() - bytes < 16 << 20);
}

/* two contexts share the port: events go to the right one, and each closes alone. */
void contexts(void)
{
	struct ibv_context *second = open_dev();
	struct ibv_pd *pd2 = ibv_alloc_pd(second);
	struct end a = make(NULL, DEPTH), b = make(NULL, DEPTH);

	CHECK(pd2 && second != ctx && second->async_fd != ctx->async_fd);
	CHECK(!ibv_close_device(second));
	join(&a, &b);
	CHECK(!send_wr(a.qp, 1, IBV_WR_RDMA_WRITE, 0, 7, IBV_SEND_SIGNALED) && wait_wc(a.cq).status == IBV_WC_SUCCESS);
	end_it(&a);
	end_it(&b);
}

/* vanish: memory that goes while it is registered ends requests, not the process. */
void vanish(void)
{
	char name[] = "/var/tmp/conformanceXXXXXX";
	int fd = mkstemp(name);
	CHECK(fd >= 0 && !unlink(name) && !ftruncate(fd, 8192));
	for (int kind = 0; kind < 2; kind++) {
		struct end a = make(NULL, DEPTH), b = make(NULL, DEPTH);
		char *m = kind ? mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : apart(8192);
		struct ibv_mr *r = ibv_reg_mr(pd, m, 8192, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
		CHECK(m != MAP_FAILED && r);
		join(&a, &b);
		struct ibv_sge s = { (uintptr_t)m, 64, r->lkey };
		struct ibv_send_wr wr = { .wr_id = 1, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
			.wr.rdma = { (uintptr_t)buf, mr->rkey } }, *bad;
		CHECK(!ibv_post_send(a.qp, &wr, &bad) && wait_wc(a.cq).status == IBV_WC_SUCCESS);
		CHECK(kind ? !ftruncate(fd, 0) : !munmap(m, 8192));
		CHECK(!ibv_post_send(a.qp, &wr, &bad));
		CHECK(wait_wc(a.cq).status == IBV_WC_LOC_PROT_ERR);
		end_it(&a);
		end_it(&b);
		a = make(NULL, DEPTH), b = make(NULL, DEPTH);
		join(&a, &b);
		s = (struct ibv_sge){ (uintptr_t)buf, 64, mr->lkey };
		wr.wr.rdma.remote_addr = (uintptr_t)m;
		wr.wr.rdma.rkey = r->rkey;
		CHECK(!ibv_post_send(a.qp, &wr, &bad));
		enum ibv_wc_status st = wait_wc(a.cq).status;
		CHECK(st == IBV_WC_REM_ACCESS_ERR || st == IBV_WC_REM_OP_ERR);
		end_it(&a);
		end_it(&b);
		CHECK(!ibv_dereg_mr(r));
		if (kind)
			CHECK(!munmap(m, 8192));
	}
	close(fd);
}

/* many: 1,000 queue pairs on one device, all moving data. */
void many(void)
{
	enum { PAIRS = 500 };
	static struct end a[PAIRS], b[PAIRS];

	for (int i = 0; i < PAIRS; i++) {
		a[i] = make(NULL, DEPTH);
		b[i] = make(NULL, DEPTH);
		join(&a[i], &b[i]);
	}
	for (int i = 0; i < PAIRS; i++) {
		((int *)buf)[i] = i;
		CHECK(!recv_one(b[i].qp, i, SIZE / 2 + 4 * i, 4));
	}
	for (int i = 0; i < PAIRS; i++)
		CHECK(!send_wr(a[i].qp, i, IBV_WR_SEND, 4 * i, 4, IBV_SEND_SIGNALED));
	for (int i = 0; i < PAIRS; i++) {
		CHECK(wait_wc(a[i].cq).status == IBV_WC_SUCCESS && wait_wc(b[i].cq).wr_id == (uint64_t)i);
		CHECK(((int *)(buf + SIZE / 2))[i] == i);
	}
	for (int i = 0; i < PAIRS; i++) {
		end_it(&a[i]);
		end_it(&b[i]);
	}
}

/* threads: several post and poll, while others make, reset and destroy queue pairs
 * and resize the CQ that all of them use. */
enum { POSTERS = 4, EACH = 2000 };
static struct end shared;
static int posted, polled, stop;

static void *poster(void *qp)
{
	int n;

	while ((n = __atomic_fetch_add(&posted, 1, __ATOMIC_RELAXED)) < POSTERS * EACH) {
		/* The CQ is to hold them all. */
		while (n - __atomic_load_n(&polled, __ATOMIC_RELAXED) > 256)
			sched_yield();
		while (send_wr(qp, 7, IBV_WR_RDMA_WRITE, 0, 64, IBV_SEND_SIGNALED) == ENOMEM)
			;
	}
	return NULL;
}

static void *poller(void *cq)
{
	struct ibv_wc wc[16];

	while (__atomic_load_n(&polled, __ATOMIC_RELAXED) < POSTERS * EACH) {
		int n = ibv_poll_cq(cq, 16, wc), own = 0;
		CHECK(n >= 0);
		for (int i = 0; i < n; i++) {
			/* The others' are flushed. */
			CHECK(wc[i].wr_id == 7 ? wc[i].status == IBV_WC_SUCCESS : wc[i].wr_id == 8);
			own += wc[i].wr_id == 7;
		}
		__atomic_fetch_add(&polled, own, __ATOMIC_RELAXED);
	}
	__atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
	return NULL;
}

static void *maker(void *cq)
{
	struct ibv_qp_init_attr in = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };

	for (int n = 0; !__atomic_load_n(&stop, __ATOMIC_RELAXED); n++) {
		struct ibv_qp *qp = ibv_create_qp(pd, &in);
		CHECK(qp);
		to_init(qp);
		CHECK(!recv_one(qp, 8, 0, 64) && !recv_one(qp, 8, 0, 64));
		CHECK(!ibv_modify_qp(qp, &(struct ibv_qp_attr){ .qp_state = IBV_QPS_ERR }, IBV_QP_STATE));
		CHECK(!recv_one(qp, 8, 0, 64));
		if (n % 2)
			CHECK(!ibv_modify_qp(qp, &(struct ibv_qp_attr){ .qp_state = IBV_QPS_RESET }, IBV_QP_STATE));
		CHECK(!ibv_destroy_qp(qp));
		if (n % 8 == 0)
			CHECK(!ibv_resize_cq(cq, 1024 + n % 1024));
	}
	return NULL;
}

void threads(void)
{
	struct end b = make(NULL, DEPTH);
	pthread_t t[POSTERS + 4];
	int n = 0;

	shared = make(NULL, 1024);
	join(&shared, &b);
	for (int i = 0; i < POSTERS; i++)
		CHECK(!pthread_create(&t[n++], NULL, poster, shared.qp));
	for (int i = 0; i < 2; i++) {
		CHECK(!pthread_create(&t[n++], NULL, poller, shared.cq));
		CHECK(!pthread_create(&t[n++], NULL, maker, shared.cq));
	}
	while (n > 0)
		CHECK(!pthread_join(t[--n], NULL));
	CHECK(polled == POSTERS * EACH);
	end_it(&shared);
	end_it(&b);
}

/* bench: ns per call; the best of some rounds, as others use the machine. */
void bench(void)
{
	enum { ROUNDS = 200, N = DEPTH };
	struct end a = make(NULL, 4 * DEPTH), b = make(NULL, 4 * DEPTH);
	double best[4] = { 1, 1, 1, 1 };
	struct ibv_wc wc;

	join(&a, &b);
	for (int r = 0; r < ROUNDS; r++) {
		double t0 = now();
		for (int i = 0; i < N; i++)
			recv_one(b.qp, i, 0, 64);
		double t1 = now();
		for (int i = 0; i < N; i++)
			send_wr(a.qp, i, IBV_WR_SEND, 0, 12, IBV_SEND_SIGNALED);
		double t2 = now();
		for (int i = 0; i < N; i++)
			wait_wc(a.cq);
		wait_wc(b.cq);
		double t3 = now();
		for (int i = 1; i < N; i++)
			CHECK(ibv_poll_cq(b.cq, 1, &wc) == 1);
		double t4 = now();
		for (int i = 0; i < N; i++)
			CHECK(ibv_poll_cq(a.cq, 1, &wc) == 0);
		double t5 = now();
		double d[4] = { t1 - t0, t2 - t1, t4 - t3, t5 - t4 };
		for (int k = 0; k < 4; k++)
			if (d[k] / N < best[k])
				best[k] = d[k] / N;
	}
	printf("ns per call: ibv_post_recv %.0f, ibv_post_send %.0f (with what the engine does at once), "
	       "ibv_poll_cq with a completion %.0f, without %.0f\n",
	       best[0] * 1e9, best[1] * 1e9, best[2] * 1e9, best[3] * 1e9);
	end_it(&a);
	end_it(&b);
}
