/* SPDX-License-Identifier: Apache-2.0
 *
 * What tapverbs_dv.h offers for regions: each check fails when its functions do nothing. */
#define _GNU_SOURCE
#include <infiniband/tapverbs_dv.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "verbs.h"

struct ibv_context *ctx;
struct ibv_pd *pd;
struct ibv_mr *mr;
char *buf;

static struct end a, b;

/* A second region, that is worked on, as the memory of the first is where WRITEs and
 * READs come from and go to. */
static struct ibv_mr *far;
static char *mem;

static char *pages(size_t n)
{
	char *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(p != MAP_FAILED);
	return p;
}

static void begin(void)
{
	setup();
	mem = pages(SIZE);
	CHECK(far = ibv_reg_mr(pd, mem, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
	a = make(NULL, 64);
	b = make(NULL, 64);
	join(&a, &b);
}

static void end(void)
{
	end_it(&a);
	end_it(&b);
	CHECK(!far || !ibv_dereg_mr(far));
	CHECK(!munmap(mem, SIZE));
	teardown();
}

static void post(enum ibv_wr_opcode op, uint64_t iova, int len)
{
	struct ibv_sge s = { (uintptr_t)buf, len, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 3, .sg_list = &s, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { iova, far->rkey } }, *bad;

	CHECK(!ibv_post_send(a.qp, &wr, &bad));
}

static enum ibv_wc_status rdma(enum ibv_wr_opcode op, uint64_t iova, int len)
{
	post(op, iova, len);
	return wait_wc(a.cq).status;
}

/* What the region has at an offset, by a peer's eyes. */
static int reads(size_t off, int len, int byte)
{
	memset(buf, ~byte, len);
	if (rdma(IBV_WR_RDMA_READ, (uintptr_t)mem + off, len) != IBV_WC_SUCCESS)
		return 0;
	for (int i = 0; i < len; i++)
		if (buf[i] != (char)byte)
			return 0;
	return 1;
}

static int quiet(void)
{
	struct ibv_wc wc;

	for (int i = 0; i < 2000; i++)
		if (ibv_poll_cq(a.cq, 1, &wc))
			return 0;
	return 1;
}

static uint64_t milliseconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000ull + t.tv_nsec / 1000000;
}

static void suspend(void)
{
	static const enum tapverbs_dv_suspend_mode modes[] = { TAPVERBS_DV_SUSPEND_RNR, TAPVERBS_DV_SUSPEND_HOLD, TAPVERBS_DV_SUSPEND_DROP };
	struct tapverbs_dv_suspend_attr attr = { .rnr_delay = 1000, .hold_buffer = 1 << 16 };

	CHECK(tapverbs_dv_resume_mr(far) == EINVAL);
	for (int i = 0; i < 3; i++) {
		attr.mode = modes[i];
		CHECK(!tapverbs_dv_set_suspend(far, &attr));
		memset(buf, i + 1, 5000);
		memset(mem, 0, 5000);
		CHECK(!tapverbs_dv_suspend_mr(far) && !tapverbs_dv_suspend_mr(far));
		post(IBV_WR_RDMA_WRITE, (uintptr_t)mem, 5000);
		CHECK(quiet());
		CHECK(!tapverbs_dv_resume_mr(far));
		CHECK(quiet() && mem[0] == 0); /* once more than it was resumed */
		CHECK(!tapverbs_dv_resume_mr(far));
		CHECK(wait_wc(a.cq).status == IBV_WC_SUCCESS);
		CHECK(mem[0] == i + 1 && mem[4999] == i + 1);
	}
	/* 0 leaves the buffer as it is: what is held is not asked to wait, by a peer that does
	 * not ask again. */
	struct tapverbs_dv_mr q = { .comp_mask = TAPVERBS_DV_MR_MASK_USAGE };
	struct end was = a, patient;
	uint64_t rnrs;

	ack_timeout = 0;
	a = make(NULL, 64);
	patient = make(NULL, 64);
	join(&a, &patient);

	attr = (struct tapverbs_dv_suspend_attr){ .mode = TAPVERBS_DV_SUSPEND_HOLD };
	CHECK(!tapverbs_dv_set_suspend(far, &attr));
	/* After 20 ms without a word it does ask again, by a probe: on a busy machine that may be. */
	for (;;) {
		uint64_t begun = milliseconds();

		CHECK(!tapverbs_dv_query_mr(far, &q));
		rnrs = q.usage.rnrs;
		CHECK(!tapverbs_dv_suspend_mr(far));
		post(IBV_WR_RDMA_WRITE, (uintptr_t)mem, 5000);
		CHECK(quiet());
		CHECK(!tapverbs_dv_resume_mr(far) && wait_wc(a.cq).status == IBV_WC_SUCCESS);
		CHECK(!tapverbs_dv_query_mr(far, &q));
		if (q.usage.rnrs == rnrs)
			break;
		CHECK(milliseconds() - begun > 15);
	}
	end_it(&a);
	end_it(&patient);
	a = was;
	attr.mode = 3;
	CHECK(tapverbs_dv_set_suspend(far, &attr) == EINVAL);
	attr = (struct tapverbs_dv_suspend_attr){ .rnr_delay = 655361 };
	CHECK(tapverbs_dv_set_suspend(far, &attr) == EINVAL);
	attr = (struct tapverbs_dv_suspend_attr){ .comp_mask = 1 };
	CHECK(tapverbs_dv_set_suspend(far, &attr) == EINVAL);
	CHECK(tapverbs_dv_resume_mr(far) == EINVAL);
	/* Work requests of this end that name it are held, too. */
	CHECK(!tapverbs_dv_suspend_mr(mr));
	post(IBV_WR_RDMA_WRITE, (uintptr_t)mem, 5000);
	CHECK(quiet());
	CHECK(!tapverbs_dv_resume_mr(mr));
	CHECK(wait_wc(a.cq).status == IBV_WC_SUCCESS);
}

static void replace(void)
{
	char *with = pages(2 * 4096);

	memset(mem, 1, SIZE);
	memset(with, 2, 2 * 4096);
	CHECK(tapverbs_dv_replace_mr(far, (uintptr_t)mem + 4096, 2 * 4096, with) == EINVAL);
	CHECK(!tapverbs_dv_suspend_mr(far));
	CHECK(tapverbs_dv_replace_mr(far, (uintptr_t)mem + 4096, 100, with) == EINVAL);
	CHECK(!tapverbs_dv_replace_mr(far, (uintptr_t)mem + 4096, 2 * 4096, with));
	CHECK(!tapverbs_dv_resume_mr(far));
	CHECK(mem[4095] == 1 && mem[4096] == 2 && mem[3 * 4096 - 1] == 2 && mem[3 * 4096] == 1);
	CHECK(reads(0, 4096, 1) && reads(4096, 2 * 4096, 2) && reads(3 * 4096, 4096, 1));
	CHECK(with[0] == 0); /* its pages are elsewhere now */
	munmap(with, 2 * 4096);
}

static void move(void)
{
	char *to = pages(SIZE);

	memset(mem, 1, SIZE);
	memset(to, 2, SIZE);
	CHECK(tapverbs_dv_move_mr(far, to) == EINVAL);
	CHECK(!tapverbs_dv_suspend_mr(far));
	CHECK(tapverbs_dv_move_mr(far, to + 1) == EINVAL);
	CHECK(!tapverbs_dv_move_mr(far, to));
	CHECK(!tapverbs_dv_resume_mr(far) && far->addr == to);
	/* The same key and the same addresses. */
	CHECK(reads(0, 8192, 2));
	memset(buf, 3, 100);
	CHECK(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)mem, 100) == IBV_WC_SUCCESS && to[99] == 3 && mem[0] == 1);
	/* mremap is followed. */
	CHECK(!tapverbs_dv_suspend_mr(far));
	char *next = mremap(to, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, pages(SIZE));
	CHECK(next != MAP_FAILED);
	CHECK(!tapverbs_dv_resume_mr(far));
	CHECK(reads(0, 100, 3) && reads(4096, 4096, 2));
	CHECK(!ibv_dereg_mr(far) && !munmap(next, SIZE));
	far = NULL;
}

static void eliminate(void)
{
	struct tapverbs_dv_mr q = { 0 };

	memset(mem, 1, SIZE);
	CHECK(reads(0, 100, 1));
	CHECK(!tapverbs_dv_eliminate_mr(far));
	CHECK(tapverbs_dv_eliminate_mr(far) == EINVAL && tapverbs_dv_suspend_mr(far) == EINVAL);
	CHECK(rdma(IBV_WR_RDMA_READ, (uintptr_t)mem, 100) == IBV_WC_REM_ACCESS_ERR);
	CHECK(!tapverbs_dv_query_mr(mr, &q)); /* the others live on */
}

static void *await(void *ch)
{
	struct tapverbs_dv_event ev;

	CHECK(tapverbs_dv_get_event(ch, &ev) == EIO);
	return NULL;
}

static void *dereg(void *m)
{
	CHECK(!ibv_dereg_mr(m));
	return NULL;
}

static void events(void)
{
	struct tapverbs_dv_event_channel *ch, *some;
	struct tapverbs_dv_event ev;
	pthread_t t;
	static const int types[] = { TAPVERBS_DV_EVENT_MR_SUSPENDED, TAPVERBS_DV_EVENT_MR_MOVED, TAPVERBS_DV_EVENT_MR_RESUMED, TAPVERBS_DV_EVENT_MR_ELIMINATED };

	CHECK(!tapverbs_dv_create_event_channel(ctx, 0) && errno == EINVAL);
	CHECK(!tapverbs_dv_create_event_channel(ctx, 1ull << 60) && errno == EINVAL);
	CHECK(ch = tapverbs_dv_create_event_channel(ctx, 15));
	CHECK(some = tapverbs_dv_create_event_channel(ctx, 1 << TAPVERBS_DV_EVENT_MR_ELIMINATED));
	CHECK(!fcntl(ch->fd, F_SETFL, O_NONBLOCK) && ch->context == ctx);
	CHECK(tapverbs_dv_get_event(ch, &ev) == EAGAIN);
	char *to = pages(SIZE);
	CHECK(!tapverbs_dv_suspend_mr(far) && !tapverbs_dv_suspend_mr(far));
	CHECK(!tapverbs_dv_move_mr(far, to));
	CHECK(!tapverbs_dv_resume_mr(far) && !tapverbs_dv_resume_mr(far));
	CHECK(!tapverbs_dv_eliminate_mr(far));
	for (int i = 0; i < 4; i++) {
		struct pollfd p = { .fd = ch->fd, .events = POLLIN };

		CHECK(poll(&p, 1, 0) == 1 && !tapverbs_dv_get_event(ch, &ev));
		CHECK(ev.type == (uint32_t)types[i] && ev.mr == far && !ev.error);
		if (i < 3)
			tapverbs_dv_ack_event(&ev);
	}
	CHECK(tapverbs_dv_get_event(ch, &ev) == EAGAIN && ev.mr == far);
	/* The region lives until the last event that was taken is acknowledged; one that was
	 * not taken goes with it. */
	CHECK(!pthread_create(&t, NULL, dereg, far));
	usleep(20000);
	CHECK(pthread_tryjoin_np(t, NULL) == EBUSY);
	tapverbs_dv_ack_event(&ev);
	CHECK(!pthread_join(t, NULL));
	far = NULL;
	CHECK(!fcntl(some->fd, F_SETFL, O_NONBLOCK) && tapverbs_dv_get_event(some, &ev) == EAGAIN);
	munmap(to, SIZE);
	CHECK(!tapverbs_dv_destroy_event_channel(ch));

	/* A device that is gone wakes those who wait. */
	CHECK(!fcntl(some->fd, F_SETFL, 0));
	CHECK(!pthread_create(&t, NULL, await, some));
	CHECK(!tapverbs_dv_unplug(ctx));
	CHECK(!pthread_join(t, NULL));
	CHECK(tapverbs_dv_get_event(some, &ev) == EIO);
	CHECK(!tapverbs_dv_destroy_event_channel(some));
	CHECK(tapverbs_dv_suspend_mr(mr) == EIO && !tapverbs_dv_create_event_channel(ctx, 1) && errno == EIO);
}

static void policy(void)
{
	for (int p = TAPVERBS_DV_FAULT_HYBRID; p <= TAPVERBS_DV_FAULT_ERROR; p++)
		CHECK(!tapverbs_dv_set_mr_fault_policy(far, p));
	CHECK(tapverbs_dv_set_mr_fault_policy(far, TAPVERBS_DV_FAULT_ERROR + 1) == EINVAL);
	CHECK(tapverbs_dv_set_mr_fault_policy(far, TAPVERBS_DV_FAULT_OF_MR) == EINVAL);
	for (int p = TAPVERBS_DV_FAULT_HYBRID; p <= TAPVERBS_DV_FAULT_ERROR; p++)
		CHECK(!tapverbs_dv_set_qp_fault_policy(a.qp, p));
	CHECK(tapverbs_dv_set_qp_fault_policy(a.qp, TAPVERBS_DV_FAULT_ERROR + 1) == EINVAL);
	CHECK(!tapverbs_dv_set_qp_fault_policy(a.qp, TAPVERBS_DV_FAULT_OF_MR));
}

/* What the hooks were called with last, and how often. */
static struct {
	int sync, invalidate, update, protect, page, released, prot;
	uintptr_t start, end;
} seen;

static void seen_range(uintptr_t start, uintptr_t end)
{
	seen.start = start;
	seen.end = end;
}

static void on_release(void *user) { seen.released += user == &seen; }
static void on_sync(void *user, uintptr_t s, uintptr_t e) { seen.sync += user == &seen; seen_range(s, e); }
static void on_invalidate(void *user, uintptr_t s, uintptr_t e) { seen.invalidate += user == &seen; seen_range(s, e); }
static void on_update(void *user, uintptr_t s, uintptr_t e) { seen.update += user == &seen; seen_range(s, e); }
static void on_protect(void *user, uintptr_t s, uintptr_t e, int prot)
{
	seen.protect += user == &seen;
	seen.prot = prot;
	seen_range(s, e);
}
static void on_page(void *user, uintptr_t addr) { seen.page += user == &seen; seen_range(addr, addr + 4096); }

/* Whether the last hook was about these pages. */
static int about(size_t first, size_t n)
{
	return seen.start == (uintptr_t)mem + first * 4096 && seen.end == seen.start + n * 4096;
}

static void notify(void)
{
	struct tapverbs_dv_notifier_ops ops = { .release = on_release, .sync_range = on_sync, .invalidate_range = on_invalidate,
		.update_range = on_update, .change_protection = on_protect };
	struct tapverbs_dv_notifier *n, *one;
	uintptr_t from = (uintptr_t)mem;
	struct rlimit had, none;

	/* Without a file descriptor for the first. */
	CHECK(!getrlimit(RLIMIT_NOFILE, &had));
	none = (struct rlimit){ .rlim_max = had.rlim_max };
	CHECK(!setrlimit(RLIMIT_NOFILE, &none));
	CHECK(!tapverbs_dv_add_notifier(ctx, &ops, &seen, from, from + 4096) && errno == EMFILE);
	CHECK(!setrlimit(RLIMIT_NOFILE, &had));
	CHECK(!tapverbs_dv_add_notifier(ctx, &ops, &seen, from + 4096, from) && errno == EINVAL);
	ops.comp_mask = 1;
	CHECK(!tapverbs_dv_add_notifier(ctx, &ops, &seen, 0, 0) && errno == EINVAL);
	ops.comp_mask = 0;
	CHECK(n = tapverbs_dv_add_notifier(ctx, &ops, &seen, from, from + SIZE));
	/* The program's own changes. */
	memset(mem, 1, SIZE);
	CHECK(!madvise(mem + 4096, 2 * 4096, MADV_DONTNEED) && !tapverbs_dv_settle_notifiers(ctx));
	CHECK(seen.invalidate == 1 && about(1, 2) && !seen.sync && !seen.update);
	char *other = pages(4096);
	struct ibv_mr *o = ibv_reg_mr(pd, other, 4096, 0);
	CHECK(o && !madvise(other, 4096, MADV_DONTNEED) && !tapverbs_dv_settle_notifiers(ctx));
	CHECK(seen.invalidate == 1); /* not in its range */
	CHECK(!ibv_dereg_mr(o));
	/* Ours: before and after. */
	memset(&seen, 0, sizeof(seen));
	CHECK(!tapverbs_dv_suspend_mr(far));
	CHECK(seen.sync == 1 && seen.invalidate == 1 && !seen.update && about(0, SIZE / 4096));
	CHECK(!tapverbs_dv_resume_mr(far) && !tapverbs_dv_settle_notifiers(ctx));
	CHECK(seen.update == 1 && about(0, SIZE / 4096));
	/* A protection that a request meets. */
	CHECK(!mprotect(mem + 3 * 4096, 4096, PROT_READ) && !seen.protect);
	CHECK(rdma(IBV_WR_RDMA_WRITE, from + 3 * 4096, 100) != IBV_WC_SUCCESS && !tapverbs_dv_settle_notifiers(ctx));
	CHECK(seen.protect == 1 && seen.prot == PROT_READ && about(3, 1));
	CHECK(!mprotect(mem + 3 * 4096, 4096, PROT_READ | PROT_WRITE));
	/* Removed ones are not called; one-page forms are for one page. */
	CHECK(!tapverbs_dv_remove_notifier(n));
	memset(&seen, 0, sizeof(seen));
	ops.invalidate_page = on_page;
	CHECK(one = tapverbs_dv_add_notifier(ctx, &ops, &seen, 0, 0));
	CHECK(!madvise(mem + 5 * 4096, 4096, MADV_DONTNEED) && !tapverbs_dv_settle_notifiers(ctx));
	CHECK(seen.page == 1 && seen.invalidate == 0 && about(5, 1));
	CHECK(!tapverbs_dv_remove_notifier(one) && !seen.released);
	/* One that is left ends with its context. */
	ops = (struct tapverbs_dv_notifier_ops){ .release = on_release };
	struct ibv_context *more = open_dev();
	CHECK(tapverbs_dv_add_notifier(more, &ops, &seen, 0, 0));
	CHECK(!ibv_close_device(more) && seen.released == 1);
}

/* dirty: by the program, by requests; room, clearing, and none when nobody tracks. */
static void dirty(void)
{
	struct tapverbs_dv_range r[16];
	const uint64_t base = (uintptr_t)mem;
	size_t n = 16;
	int rc;

	CHECK(tapverbs_dv_dirty_mr(far, true, r, &n) == EINVAL);
	memset(mem, 1, SIZE);
	rc = tapverbs_dv_track_dirty(far, true);
	if (rc == EOPNOTSUPP) {
		fprintf(stderr, "this kernel does not track\n");
		return;
	}
	CHECK(!rc);
	n = 16;
	CHECK(!tapverbs_dv_dirty_mr(far, true, r, &n) && n == 0);
	mem[2 * 4096] = 2;
	mem[3 * 4096 + 5] = 2;
	CHECK(rdma(IBV_WR_RDMA_WRITE, base + 7 * 4096 + 4000, 200) == IBV_WC_SUCCESS);
	CHECK(reads(10 * 4096, 100, 1));
	for (int i = 0; i < 3; i++) { /* without and with clear, and without room in between */
		n = i == 1 ? 1 : 16;
		memset(r, 0, sizeof(r));
		rc = tapverbs_dv_dirty_mr(far, i, r, &n);
		CHECK(n == 2 && rc == (i == 1 ? ENOSPC : 0));
		if (!rc) {
			CHECK(r[0].iova == base + 2 * 4096 && r[0].length == 2 * 4096);
			CHECK(r[1].iova == base + 7 * 4096 && r[1].length == 2 * 4096);
		}
		CHECK(i != 1 || r[0].length == 0);
	}
	n = 16;
	CHECK(!tapverbs_dv_dirty_mr(far, false, r, &n) && n == 0);
	/* What there was no room for is still told when the rights have changed, but not when
	 * the region is other memory: that counts as written. */
	mem[2 * 4096] = mem[7 * 4096] = 4;
	n = 1;
	CHECK(tapverbs_dv_dirty_mr(far, true, r, &n) == ENOSPC && n == 2);
	CHECK(!ibv_rereg_mr(far, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE));
	n = 16;
	CHECK(!tapverbs_dv_dirty_mr(far, false, r, &n) && n == 2 && r[0].iova == base + 2 * 4096 && r[1].iova == base + 7 * 4096);
	char *other = pages(4 * 4096);

	CHECK(!ibv_rereg_mr(far, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, other, 4 * 4096, 0));
	n = 16;
	CHECK(!tapverbs_dv_dirty_mr(far, true, r, &n) && n == 1 && r[0].iova == (uintptr_t)other && r[0].length == 4 * 4096);
	n = 16;
	CHECK(!tapverbs_dv_dirty_mr(far, true, r, &n) && n == 0);
	other[0] = 3;
	CHECK(!tapverbs_dv_track_dirty(far, false) && tapverbs_dv_dirty_mr(far, false, r, &n) == EINVAL);
}

/* usage: of a region and of the process, and a map of where its pages are. */
static void usage(void)
{
	struct tapverbs_dv_mr q = { .comp_mask = TAPVERBS_DV_MR_MASK_USAGE };
	struct tapverbs_dv_usage all;
	struct tapverbs_dv_residency part[64];
	uint32_t n = 4;

	CHECK(!tapverbs_dv_query_mr(far, &q) && q.comp_mask == TAPVERBS_DV_MR_MASK_USAGE);
	CHECK(q.usage.size == SIZE && q.usage.present == 0 && q.usage.faults_minor == 0 && q.usage.budget == 0);
	CHECK(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)mem, 3 * 4096) == IBV_WC_SUCCESS);
	CHECK(reads(0, 100, buf[0]) && !madvise(mem + 4096, 4096, MADV_DONTNEED) && !tapverbs_dv_settle_notifiers(ctx));
	mem[SIZE - 1] = 1;
	CHECK(!tapverbs_dv_query_mr(far, &q));
	CHECK(q.usage.present == 3 * 4096 && q.usage.faults_minor == 3 && q.usage.faults_major == 0 && q.usage.dirty == 0);
	CHECK(q.usage.app_faults_minor >= 1 && q.usage.invalidations >= 1);
	CHECK(q.usage.app_fault_ns > 0);
	CHECK(!tapverbs_dv_query_usage(ctx, &all));
	CHECK(all.size == 2 * SIZE && all.present > q.usage.present && all.faults_minor >= 3);
	memset(&all, 0xff, sizeof(all));
	CHECK(!tapverbs_dv_query_pd_usage(pd, &all));
	CHECK(all.size == 2 * SIZE && all.present > q.usage.present && all.faults_minor >= 3 && !all.budget && !all.reserved[6]);
	/* Whose the faults were: requests to b, and this thread. */
	struct tapverbs_dv_qp_faults f;
	struct tapverbs_dv_thread_faults t[300];
	uint32_t threads = 300, mine = 0;
	char name[16];
	CHECK(!tapverbs_dv_query_qp_faults(b.qp, &f) && f.minor == 3 && f.major == 0 && f.rnrs == 0);
	CHECK(!tapverbs_dv_query_qp_faults(a.qp, &f) && f.rnrs == 0 && f.major == 0); /* minor: where WRITEs came from */
	CHECK(!prctl(PR_GET_NAME, name) && !tapverbs_dv_query_thread_faults(ctx, t, &threads));
	for (uint32_t i = 0; i < threads && i < 300; i++)
		if (t[i].tid == (uint32_t)gettid())
			CHECK(t[i].minor >= 1 && t[i].ns > 0 && !strcmp(t[i].name, name) && ++mine);
	CHECK(threads && (mine == 1 || t[0].tid == 0)); /* 0: a kernel that does not tell */
	n = 0;
	CHECK(!tapverbs_dv_query_thread_faults(ctx, NULL, &n) && n == threads);
	n = 4;
	CHECK(!tapverbs_dv_query_residency(far, part, &n) && n == 4);
	for (int i = 0; i < 4; i++)
		CHECK(part[i].size == SIZE / 4 && part[i].present == (i == 0 ? 2 : i == 3 ? 1 : 0) * 4096u && !part[i].limbo && !part[i].stored);
	n = 64; /* more than there are pages */
	CHECK(!tapverbs_dv_query_residency(far, part, &n) && n == SIZE / 4096 && part[0].present == 4096 && !part[1].present);
	n = 0;
	CHECK(tapverbs_dv_query_residency(far, part, &n) == EINVAL);
	struct ibv_mr *null = ibv_alloc_null_mr(pd);
	n = 4;
	CHECK(tapverbs_dv_query_residency(null, part, &n) == EOPNOTSUPP && !ibv_dereg_mr(null));
}

/* A store in the program: slots in a table; it can be told to fail. */
static struct {
	char *page[1 << 12];
	int writes, reads, frees, closes, fail;
} shelf;

static int shelf_write(void *user, uint32_t slot, const void *page)
{
	CHECK(user == &shelf && slot < sizeof(shelf.page) / sizeof(*shelf.page));
	if (__atomic_load_n(&shelf.fail, __ATOMIC_SEQ_CST))
		return ENOSPC;
	char *p = malloc(4096);
	memcpy(p, page, 4096);
	p = __atomic_exchange_n(&shelf.page[slot], p, __ATOMIC_SEQ_CST);
	free(p);
	__atomic_fetch_add(&shelf.writes, 1, __ATOMIC_SEQ_CST);
	return 0;
}

/* Serves faults: it touches no memory of regions. */
static int shelf_read(void *user, uint32_t slot, void *page)
{
	char *p = __atomic_load_n(&shelf.page[slot], __ATOMIC_SEQ_CST);

	CHECK(user == &shelf);
	if (!p)
		return ENOENT;
	memcpy(page, p, 4096);
	__atomic_fetch_add(&shelf.reads, 1, __ATOMIC_SEQ_CST);
	return 0;
}

static void shelf_free(void *user, uint32_t slot)
{
	CHECK(user == &shelf);
	free(__atomic_exchange_n(&shelf.page[slot], NULL, __ATOMIC_SEQ_CST));
	__atomic_fetch_add(&shelf.frees, 1, __ATOMIC_SEQ_CST);
}

static void shelf_close(void *user)
{
	CHECK(user == &shelf);
	shelf.closes++;
}

static const struct tapverbs_dv_store a_shelf = { .user = &shelf, .write = shelf_write, .read = shelf_read, .free = shelf_free, .close = shelf_close };

enum { PAGES = SIZE / 4096 };

/* Fills the pages, each with its own byte, and says whether they have it. */
static void fill(void)
{
	for (int i = 0; i < PAGES; i++)
		memset(mem + i * 4096, i + 1, 4096);
}

static int filled(int from, int to)
{
	for (int i = from; i < to; i++)
		for (int k = 0; k < 4096; k += 512)
			if (mem[i * 4096 + k] != i + 1)
				return 0;
	return 1;
}

/* Whether this kernel can evict; else the check ends. */
static int can_evict(void)
{
	uint64_t n;
	int rc = tapverbs_dv_evict_mr(far, (uintptr_t)mem, 4096, TAPVERBS_DV_LEVEL_LIMBO, &n);

	if (rc == EOPNOTSUPP)
		fprintf(stderr, "this kernel moves no pages\n");
	CHECK(!rc || rc == EOPNOTSUPP);
	return !rc;
}

static struct tapverbs_dv_usage used(void)
{
	struct tapverbs_dv_mr q = { .comp_mask = TAPVERBS_DV_MR_MASK_USAGE };

	CHECK(!tapverbs_dv_query_mr(far, &q));
	return q.usage;
}

/* Pages go to limbo and to a store, by hand, and come back by any way. */
static void evicted(int own)
{
	const uint64_t base = (uintptr_t)mem;
	uint64_t n = 77;

	fill();
	if (!can_evict())
		return;
	CHECK(n == 77 && used().limbo == 4096);
	CHECK(tapverbs_dv_set_compressed_store(ctx) == EBUSY);
	CHECK(!tapverbs_dv_evict_mr(far, base, SIZE / 2, TAPVERBS_DV_LEVEL_LIMBO, &n) && n == PAGES / 2 - 1);
	CHECK(used().limbo == SIZE / 2 && used().present == SIZE / 2 && used().stored == 0 && !shelf.writes);
	CHECK(!tapverbs_dv_evict_mr(far, base, SIZE, TAPVERBS_DV_LEVEL_STORED, &n) && n == PAGES);
	CHECK(used().stored == SIZE && used().present == 0 && used().limbo == 0 && used().evictions == PAGES);
	CHECK(!own || shelf.writes == PAGES);
	/* By a thread of the program, by a READ, by a WRITE of all of a page and of a part. */
	CHECK(filled(0, 2) && used().stored == SIZE - 2 * 4096 && used().app_faults_major == 2);
	/* What lies behind is read ahead. */
	CHECK(reads(2 * 4096, 4096, 3) && used().stored < SIZE - 2 * 4096 && used().faults_major >= 1);
	memset(buf, 99, 8192);
	CHECK(rdma(IBV_WR_RDMA_WRITE, base + 3 * 4096, 4096) == IBV_WC_SUCCESS);
	CHECK(rdma(IBV_WR_RDMA_WRITE, base + 4 * 4096, 10) == IBV_WC_SUCCESS);
	CHECK(mem[3 * 4096] == 99 && mem[4 * 4096 + 9] == 99 && mem[4 * 4096 + 10] == 5 && filled(5, PAGES));
	CHECK(used().present == SIZE && used().stored == 0);
	CHECK(!own || shelf.reads >= PAGES - 1);
	CHECK(tapverbs_dv_evict_mr(far, base, SIZE + 1, TAPVERBS_DV_LEVEL_LIMBO, NULL) == EFAULT);
	CHECK(tapverbs_dv_evict_mr(far, base, SIZE, 2, NULL) == EINVAL);
	CHECK(tapverbs_dv_eviction_stopped(ctx, NULL, 0) == 0);
}

static void evict_program(void)
{
	struct tapverbs_dv_store bad = a_shelf;

	bad.comp_mask = 1;
	CHECK(tapverbs_dv_set_store(ctx, &bad) == EINVAL);
	bad.comp_mask = 0;
	bad.read = NULL;
	CHECK(tapverbs_dv_set_store(ctx, &bad) == EINVAL);
	CHECK(!tapverbs_dv_set_store(ctx, &a_shelf));
	evicted(1);
}

static void evict_file(void)
{
	CHECK(tapverbs_dv_set_file_store(ctx, "/no/such/directory") == ENOENT);
	CHECK(!tapverbs_dv_set_store(ctx, &a_shelf) && shelf.closes == 0);
	CHECK(!tapverbs_dv_set_file_store(ctx, NULL) && shelf.closes == 1); /* another one in its place */
	evicted(0);
	CHECK(!shelf.writes);
}

static void evict_compressed(void)
{
	CHECK(!tapverbs_dv_set_compressed_store(ctx));
	evicted(0);
}

/* A store that fails on write: eviction stops, and says so; nothing is lost. */
static void failing(void)
{
	struct tapverbs_dv_event_channel *ch;
	struct tapverbs_dv_event ev = { 0 };
	char why[200] = "";
	uint64_t n;

	CHECK(!tapverbs_dv_set_store(ctx, &a_shelf));
	CHECK(ch = tapverbs_dv_create_event_channel(ctx, 1 << TAPVERBS_DV_EVENT_EVICTION_STOPPED));
	fill();
	if (!can_evict())
		return;
	struct tapverbs_dv_store late = a_shelf;
	CHECK(tapverbs_dv_set_store(ctx, &late) == EBUSY && !shelf.closes); /* it is still ours */
	shelf.fail = 1;
	CHECK(tapverbs_dv_evict_mr(far, (uintptr_t)mem, SIZE, TAPVERBS_DV_LEVEL_STORED, &n) == ENOSPC);
	CHECK(!tapverbs_dv_get_event(ch, &ev) && ev.type == TAPVERBS_DV_EVENT_EVICTION_STOPPED && ev.error == ENOSPC && !ev.mr);
	tapverbs_dv_ack_event(&ev);
	CHECK(tapverbs_dv_eviction_stopped(ctx, why, sizeof(why)) == ENOSPC && strstr(why, "store"));
	CHECK(filled(0, PAGES));
	CHECK(!tapverbs_dv_destroy_event_channel(ch));
}

/* A region, a domain and the process keep to their budgets, and nothing is lost. */
static void budget(void)
{
	const size_t size = 16 << 20, limit = 1 << 20;
	struct tapverbs_dv_usage u;
	int rc;

	CHECK(!ibv_dereg_mr(far));
	munmap(mem, SIZE);
	mem = pages(size);
	CHECK(far = ibv_reg_mr(pd, mem, size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
	CHECK(tapverbs_dv_set_mr_budget(far, 4096) == EINVAL && tapverbs_dv_set_budget(ctx, 1) == EINVAL && tapverbs_dv_set_pd_budget(pd, 1) == EINVAL);
	CHECK(!tapverbs_dv_set_compressed_store(ctx));
	for (int who = 0; who < 3; who++) {
		rc = who == 0 ? tapverbs_dv_set_mr_budget(far, limit) : who == 1 ? tapverbs_dv_set_pd_budget(pd, limit) : tapverbs_dv_set_budget(ctx, limit);
		if (rc == EOPNOTSUPP) {
			fprintf(stderr, "this kernel moves no pages\n");
			break;
		}
		CHECK(!rc);
		CHECK(who != 0 || used().budget == limit);
		for (size_t i = 0; i < size; i += 4096)
			memset(mem + i, i / 4096 % 250 + who, 4096);
		/* What comes in while the evictor works is on top of it, and pages are on their way
		 * meanwhile: this ends with alarm(2) if the evictor never gets there. */
		do
			u = used();
		while (u.present + u.limbo > limit || u.present + u.limbo + u.stored != size);
		for (size_t i = 0; i < size; i += 64 * 4096)
			CHECK(reads(i, 4096, (int)(i / 4096 % 250 + who)));
		for (size_t i = 0; i < size; i += 4096)
			CHECK(mem[i] == (char)(i / 4096 % 250 + who) && mem[i + 4095] == mem[i]);
		CHECK(!(who == 0 ? tapverbs_dv_set_mr_budget(far, 0) : who == 1 ? tapverbs_dv_set_pd_budget(pd, 0) : tapverbs_dv_set_budget(ctx, 0)));
	}
	CHECK(!tapverbs_dv_query_usage(ctx, &u) && u.budget == 0);
	CHECK(!ibv_dereg_mr(far));
	far = NULL;
	CHECK(!munmap(mem + SIZE, size - SIZE));
}

/* The peer tells what is in its store and that it is suspended, and brings it back. */
static void residency(void)
{
	struct tapverbs_dv_residency_attr attr = { .comp_mask = 1 };
	struct tapverbs_dv_remote r = { 0 };
	const uint64_t base = (uintptr_t)mem;

	CHECK(tapverbs_dv_enable_residency(a.qp, &attr) == EINVAL);
	CHECK(tapverbs_dv_query_remote(a.qp, far->rkey, base, SIZE, &r) == EINVAL);
	CHECK(tapverbs_dv_prefetch_remote(a.qp, far->rkey, base, SIZE) == EINVAL);
	attr = (struct tapverbs_dv_residency_attr){ .max_hold = -1 };
	CHECK(!tapverbs_dv_enable_residency(a.qp, &attr));
	CHECK(!tapverbs_dv_query_remote(a.qp, far->rkey, base, SIZE, &r) && !r.agreed && !r.watched && !r.away);
	CHECK(!tapverbs_dv_enable_residency(b.qp, NULL));
	fill();
	if (!can_evict())
		return;
	/* Messages take their time: each of these ends with alarm(2) if one never comes. */
	while (!r.agreed)
		CHECK(!tapverbs_dv_query_remote(a.qp, far->rkey, base, SIZE, &r));
	CHECK(!tapverbs_dv_evict_mr(far, base, SIZE, TAPVERBS_DV_LEVEL_STORED, NULL));
	CHECK(rdma(IBV_WR_RDMA_READ, base, 8) == IBV_WC_SUCCESS); /* the first that names the key */
	while (!r.watched || !r.away)
		CHECK(!tapverbs_dv_query_remote(a.qp, far->rkey, base, SIZE, &r));
	CHECK(r.away <= SIZE && !r.held_off);
	CHECK(!tapverbs_dv_prefetch_remote(a.qp, far->rkey, base, SIZE));
	while (used().stored || r.away)
		CHECK(!tapverbs_dv_query_remote(a.qp, far->rkey, base, SIZE, &r));
	CHECK(!tapverbs_dv_suspend_mr(far));
	while (!r.held_off)
		CHECK(!tapverbs_dv_query_remote(a.qp, far->rkey, base, SIZE, &r));
	CHECK(!tapverbs_dv_resume_mr(far));
	while (r.held_off)
		CHECK(!tapverbs_dv_query_remote(a.qp, far->rkey, base, SIZE, &r));
	CHECK(!tapverbs_dv_disable_residency(a.qp));
	CHECK(tapverbs_dv_query_remote(a.qp, far->rkey, base, SIZE, &r) == EINVAL);
	CHECK(filled(0, PAGES));
}

/* The budget and the store of the environment. */
static void env(void)
{
	struct tapverbs_dv_usage u;

	CHECK(!tapverbs_dv_query_usage(ctx, &u) && u.budget == 3 << 20);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*fn)(void);
	} checks[] = { { "suspend", suspend }, { "replace", replace }, { "move", move }, { "eliminate", eliminate },
		       { "events", events }, { "policy", policy },
		       { "notify", notify }, { "dirty", dirty }, { "usage", usage },
		       { "evict-program", evict_program }, { "evict-file", evict_file }, { "evict-compressed", evict_compressed },
		       { "failing", failing }, { "budget", budget }, { "env", env },
		       { "residency", residency } };

	alarm(240);
	CHECK(argc == 2);
	for (size_t i = 0; i < sizeof(checks) / sizeof(*checks); i++)
		if (!strcmp(argv[1], checks[i].name)) {
			begin();
			checks[i].fn();
			end();
			return 0;
		}
	fprintf(stderr, "no check %s\n", argv[1]);
	return 2;
}
