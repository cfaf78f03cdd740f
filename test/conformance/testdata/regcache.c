/* SPDX-License-Identifier: Apache-2.0
 *
 * The cache of registrations of tapverbs_dv.h. */
#define _GNU_SOURCE
#include <infiniband/tapverbs_dv.h>

#include <pthread.h>
#include <sys/mman.h>

#include "verbs.h"

struct ibv_context *ctx;
struct ibv_pd *pd;
struct ibv_mr *mr;
char *buf;

enum {
	PAGE = 4096,
	RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
};

static struct end a, b;
static struct tapverbs_dv_reg_cache *cache;

static char *map(void *at, size_t n)
{
	char *p = mmap(at, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED : 0), -1, 0);

	CHECK(p != MAP_FAILED);
	return p;
}

static void begin(uint64_t entries, uint64_t bytes)
{
	struct tapverbs_dv_reg_cache_attr attr = { 0, entries, bytes };

	setup();
	a = make(NULL, 64);
	b = make(NULL, 64);
	join(&a, &b);
	CHECK(cache = tapverbs_dv_create_reg_cache(pd, &attr));
}

static void end(void)
{
	CHECK(!tapverbs_dv_destroy_reg_cache(cache));
	end_it(&a);
	end_it(&b);
	teardown();
}

static struct ibv_mr *get(const void *at, size_t n)
{
	struct ibv_mr *m;

	CHECK(!tapverbs_dv_get_mr(cache, (void *)at, n, RIGHTS, &m));
	CHECK((char *)m->addr <= (const char *)at && (const char *)at + n <= (char *)m->addr + m->length);
	return m;
}

static void put(struct ibv_mr *m) { CHECK(!tapverbs_dv_put_mr(cache, m)); }

/* The rkey of what is got and put back. */
static uint32_t touch(const void *at, size_t n)
{
	struct ibv_mr *m = get(at, n);

	put(m);
	return m->rkey;
}

/* reaches: what a peer writes with a key is what is in memory there. */
static int reaches(uint32_t rkey, volatile char *at, char byte)
{
	struct ibv_sge s = { (uintptr_t)buf, 1, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 3, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { (uintptr_t)at, rkey } }, *bad;

	*buf = byte;
	CHECK(!ibv_post_send(a.qp, &wr, &bad));
	return wait_wc(a.cq).status == IBV_WC_SUCCESS && *at == byte;
}

static struct tapverbs_dv_reg_cache_stats stats(void)
{
	struct tapverbs_dv_reg_cache_stats s = { 0 };

	CHECK(!tapverbs_dv_query_reg_cache(cache, &s));
	return s;
}

static void lookups(void)
{
	struct ibv_mr *m, *n;
	struct tapverbs_dv_reg_cache_stats s;
	char *p;
	uint32_t k;

	begin(0, 0);
	p = map(NULL, 64 * PAGE);
	k = touch(p + 100, 5000);
	CHECK(touch(p + 100, 5000) == k && touch(p + 101, 4999) == k && touch(p + 3000, 1) == k);
	CHECK(touch(p + 99, 5000) != k && touch(p + 101, 5000) != k);
	s = stats();
	CHECK(s.hits == 1 && s.covered == 2 && s.misses == 3 && s.entries == 3 && s.bytes == 15000 && !s.in_use && !s.invalidations);
	CHECK(tapverbs_dv_get_mr(cache, p, 0, RIGHTS, &m) == EINVAL);
	CHECK(tapverbs_dv_get_mr(cache, p, SIZE_MAX, RIGHTS, &m) == EINVAL);
	CHECK(tapverbs_dv_get_mr(cache, p, 8, IBV_ACCESS_ZERO_BASED, &m) == EINVAL);
	CHECK(tapverbs_dv_get_mr(cache, p, 8, IBV_ACCESS_REMOTE_WRITE, &m) == EINVAL);
	CHECK(!tapverbs_dv_get_mr(cache, p + 8 * PAGE, PAGE, IBV_ACCESS_REMOTE_READ, &m));
	CHECK(!tapverbs_dv_get_mr(cache, p + 8 * PAGE, PAGE, IBV_ACCESS_ON_DEMAND, &n) && n == m);
	put(n);
	CHECK(!tapverbs_dv_get_mr(cache, p + 8 * PAGE, PAGE, IBV_ACCESS_LOCAL_WRITE, &n) && n != m);
	CHECK(touch(p + 8 * PAGE, PAGE) != n->rkey); /* neither has remote writes */
	CHECK(tapverbs_dv_destroy_reg_cache(cache) == EBUSY);
	CHECK(stats().in_use == 2);
	put(m);
	put(n);
	CHECK(tapverbs_dv_put_mr(cache, mr) == EINVAL);
	end();
	CHECK(!munmap(p, 64 * PAGE));
}

static void stale(void)
{
	const volatile uint64_t *word;
	struct ibv_mr *all, *m;
	uint64_t seen;
	char *p, *q;
	uint32_t k;

	begin(0, 0);
	CHECK(word = tapverbs_dv_generation(ctx));
	p = map(NULL, 64 * PAGE);
	q = map(NULL, 64 * PAGE);
	all = get(p, 64 * PAGE);
	do
		seen = *word;
	while (seen & 1);
	CHECK(!tapverbs_dv_moved(word, seen));
	map(p + 10 * PAGE, PAGE);
	CHECK(tapverbs_dv_moved(word, seen));
	/* The rest is served on, with writes that go there. */
	CHECK(touch(p, 10 * PAGE) == all->rkey && touch(p + 11 * PAGE, 53 * PAGE) == all->rkey);
	CHECK(reaches(all->rkey, p + 9 * PAGE, 1));
	k = touch(p + 10 * PAGE + 5, 10);
	CHECK(k != all->rkey && reaches(k, p + 10 * PAGE + 5, 2));
	CHECK(touch(p + 9 * PAGE, 2 * PAGE) != all->rkey);
	CHECK(stats().invalidations == 1);
	/* Away, something else in its place; and what it is put over. */
	touch(q, PAGE);
	CHECK(mremap(p + 20 * PAGE, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, q) == q);
	map(p + 20 * PAGE, PAGE);
	CHECK(reaches(touch(p + 20 * PAGE, 8), p + 20 * PAGE, 3));
	CHECK(reaches(touch(q, 8), q, 4));
	/* Piece by piece, all of it; what is in use stays registered. */
	map(p, 32 * PAGE);
	map(p + 32 * PAGE, 32 * PAGE);
	CHECK(!tapverbs_dv_resync(cache));
	m = get(p, 64 * PAGE);
	CHECK(m != all && reaches(m->rkey, p + 40 * PAGE, 5));
	put(all);
	CHECK(touch(p, 64 * PAGE) == m->rkey);
	/* More changes than the journal holds. */
	q = map(q, 64 * PAGE);
	k = touch(q, 64 * PAGE);
	map(p + 7 * PAGE, PAGE);
	for (int i = 0; i < 5000; i++)
		CHECK(!madvise(q, PAGE, MADV_DONTNEED));
	CHECK(touch(q, 64 * PAGE) == k && touch(p, 7 * PAGE) == m->rkey);
	CHECK(touch(p + 7 * PAGE, 8) != m->rkey);
	CHECK(reaches(touch(p + 7 * PAGE, 8), p + 7 * PAGE, 6));
	/* A region that ends by force. */
	CHECK(!tapverbs_dv_eliminate_mr(m));
	CHECK(touch(p, PAGE) != m->rkey && reaches(touch(p, PAGE), p, 7));
	put(m);
	end();
	CHECK(!munmap(p, 64 * PAGE) && !munmap(q, 64 * PAGE));
}

static void bounds(void)
{
	struct tapverbs_dv_reg_cache_stats s;
	struct ibv_mr *m[6];
	char *p;
	uint32_t k;

	begin(3, 100 * PAGE);
	p = map(NULL, 256 * PAGE);
	k = touch(p, PAGE);
	touch(p + 1 * PAGE, PAGE);
	touch(p + 2 * PAGE, PAGE);
	touch(p, PAGE);
	touch(p + 3 * PAGE, PAGE);
	s = stats();
	CHECK(s.evictions == 1 && s.entries == 3 && touch(p, PAGE) == k);
	for (int i = 0; i < 6; i++)
		m[i] = get(p + (20 + i) * PAGE, PAGE);
	CHECK(stats().entries == 6);
	for (int i = 0; i < 6; i++)
		put(m[i]);
	CHECK(stats().entries == 3);
	touch(p + 100 * PAGE, 99 * PAGE);
	touch(p + 200 * PAGE, 2 * PAGE);
	CHECK(stats().bytes == 2 * PAGE);

	/* Too many holes are the end of a region. */
	k = touch(p + 150 * PAGE, 64 * PAGE);
	for (int i = 0; i < 20; i++)
		map(p + (151 + 2 * i) * PAGE, PAGE);
	CHECK(touch(p + 150 * PAGE, PAGE) != k);

	/* A hinted area. */
	CHECK(tapverbs_dv_hint_mr(cache, p, 0, RIGHTS) == EINVAL);
	CHECK(!tapverbs_dv_hint_mr(cache, p, 90 * PAGE, RIGHTS));
	k = touch(p + 5 * PAGE, 10);
	for (int i = 0; i < 80; i++)
		CHECK(touch(p + i * PAGE + i, 300) == k);
	map(p + 50 * PAGE, PAGE);
	CHECK(touch(p, 8) == k && touch(p + 50 * PAGE, 8) != k);
	k = touch(p + 50 * PAGE, 8);
	CHECK(touch(p, 8) == k && reaches(k, p + 50 * PAGE, 1));
	CHECK(tapverbs_dv_unhint_mr(cache, p, 89 * PAGE) == EINVAL && !tapverbs_dv_unhint_mr(cache, p, 90 * PAGE));
	CHECK(tapverbs_dv_unhint_mr(cache, p, 90 * PAGE) == EINVAL);
	map(p + 60 * PAGE, PAGE);
	m[0] = get(p + 60 * PAGE + 1, 300);
	CHECK(m[0]->length == 300);
	put(m[0]);
	end();
	CHECK(!munmap(p, 256 * PAGE));
}

/* A thread that has taken an event of a region, and not acknowledged it, has the cache drop
 * that region. */
static void events(void)
{
	struct tapverbs_dv_event_channel *ch;
	struct tapverbs_dv_event ev;
	struct ibv_mr *m;
	char *p;

	begin(1, 0);
	p = map(NULL, 2 * PAGE);
	CHECK(ch = tapverbs_dv_create_event_channel(ctx, 1 << TAPVERBS_DV_EVENT_MR_SUSPENDED));
	m = get(p, PAGE);
	CHECK(!tapverbs_dv_suspend_mr(m) && !tapverbs_dv_resume_mr(m));
	CHECK(!tapverbs_dv_get_event(ch, &ev) && ev.mr == m);
	put(m);
	touch(p + PAGE, PAGE);
	CHECK(stats().evictions == 1 && stats().entries == 1);
	CHECK(tapverbs_dv_destroy_reg_cache(cache) == EBUSY);
	tapverbs_dv_ack_event(&ev);
	CHECK(!tapverbs_dv_destroy_event_channel(ch));
	end();
	CHECK(!munmap(p, 2 * PAGE));
}

/* Threads with memory of their own, that is mapped anew all the time, in one cache. */
static void *worker(void *arg)
{
	char *p = arg;

	for (int i = 0; i < 3000; i++) {
		char *at = p + (i * 7 % 13) * PAGE;
		struct ibv_mr *m;

		if (i % 3 == 0)
			map(at, PAGE);
		m = get(at, 3 * PAGE);
		if (i % 16 == 0)
			map(at + PAGE, PAGE); /* while it is in use */
		put(m);
	}
	return NULL;
}

static void crowd(void)
{
	pthread_t t[4];
	char *p[4];
	struct tapverbs_dv_reg_cache_stats s;

	begin(20, 0);
	for (int i = 0; i < 4; i++) {
		p[i] = map(NULL, 16 * PAGE);
		CHECK(!pthread_create(&t[i], NULL, worker, p[i]));
	}
	for (int i = 0; i < 4; i++)
		CHECK(!pthread_join(t[i], NULL));
	s = stats();
	CHECK(s.hits + s.covered + s.misses == 12000 && s.hits && s.misses && s.invalidations && !s.in_use && s.entries <= 20);
	for (int i = 0; i < 4; i++)
		for (int k = 0; k < 16; k++)
			CHECK(reaches(touch(p[i] + k * PAGE, 8), p[i] + k * PAGE, 1 + k + 16 * i));
	end();
}

int main(int argc, char **argv)
{
	alarm(240);
	CHECK(argc == 2);
	if (!strcmp(argv[1], "lookups"))
		lookups();
	else if (!strcmp(argv[1], "stale"))
		stale();
	else if (!strcmp(argv[1], "bounds"))
		bounds();
	else if (!strcmp(argv[1], "events"))
		events();
	else if (!strcmp(argv[1], "threads"))
		crowd();
	else
		CHECK(!"a check of this name");
	return 0;
}
