/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that is not simply registered: implicit regions, advice, null regions, device
 * memory, domains, and what is imported. Built against Debian's libibverbs-dev, as
 * verbs.c. */
#define _GNU_SOURCE
#include <sys/resource.h>

#include "verbs.h"

struct ibv_context *ctx;
struct ibv_pd *pd;
struct ibv_mr *mr;
char *buf;

enum { RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };

static int present(void *p, int pages)
{
	unsigned char v[64];
	int n = 0;

	CHECK(pages <= 64 && !mincore(p, pages * 4096, v));
	for (int i = 0; i < pages; i++)
		n += v[i] & 1;
	return n;
}

/* rdma posts one WRITE or READ between any two addresses and waits for it. */
static enum ibv_wc_status rdma(struct end *e, enum ibv_wr_opcode op, void *local, uint32_t lkey, uint64_t remote, uint32_t rkey, int len)
{
	struct ibv_sge s = { (uintptr_t)local, len, lkey };
	struct ibv_send_wr wr = { .wr_id = 1, .sg_list = &s, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { remote, rkey } }, *bad;

	CHECK(!ibv_post_send(e->qp, &wr, &bad));
	return wait_wc(e->cq).status;
}

/* implicit: a region of all memory. */
static void implicit(void)
{
	struct end a = make(NULL, 2 * DEPTH), b = make(NULL, 2 * DEPTH);
	struct ibv_device_attr_ex at;
	struct ibv_mr *all;
	char stack[3000], *heap = malloc(100000), *later;
	static char data[20000];

	CHECK(!ibv_query_device_ex(ctx, NULL, &at) && at.odp_caps.general_caps & IBV_ODP_SUPPORT_IMPLICIT);
	CHECK(!ibv_reg_mr(pd, NULL, SIZE_MAX, RIGHTS) && (errno == EINVAL || errno == EFAULT));
	CHECK(!ibv_reg_mr(pd, NULL, SIZE_MAX, RIGHTS | IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB) && errno == EINVAL);
	CHECK(!ibv_reg_mr_iova(pd, NULL, SIZE_MAX, 4096, RIGHTS | IBV_ACCESS_ON_DEMAND) && errno == EINVAL);
	CHECK(all = ibv_reg_mr(pd, NULL, SIZE_MAX, RIGHTS | IBV_ACCESS_ON_DEMAND));
	CHECK(all->length == SIZE_MAX && !all->addr);
	later = apart(1 << 20);
	join(&a, &b);
	for (int i = 0; i < SIZE; i++)
		buf[i] = i * 7;
	struct { char *at; int n; } to[] = { { stack, sizeof stack }, { heap + 1, 90000 - SIZE }, { data, sizeof data }, { later + 100, SIZE }, { buf, 100 } };
	for (unsigned i = 0; i < sizeof to / sizeof *to; i++) {
		int n = to[i].n;

		CHECK(rdma(&a, IBV_WR_RDMA_WRITE, buf, mr->lkey, (uintptr_t)to[i].at, all->rkey, n) == IBV_WC_SUCCESS);
		CHECK(!memcmp(to[i].at, buf, n));
		memset(to[i].at, i, n);
		CHECK(rdma(&a, IBV_WR_RDMA_READ, later + (1 << 19), all->lkey, (uintptr_t)to[i].at, all->rkey, n) == IBV_WC_SUCCESS);
		CHECK(!memcmp(to[i].at, later + (1 << 19), n));
		for (int j = 0; j < SIZE; j++)
			buf[j] = j * 7;
	}
	free(heap);
	/* What is not mapped, or not for writing; and the process lives. */
	CHECK(!munmap(later, 1 << 20));
	uint64_t bad[] = { 0, 8, (uintptr_t)later, 1ull << 47, 1ull << 60, UINT64_MAX - 64, (uintptr_t)"read only" };
	for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
		struct end c = make(NULL, 16), d = make(NULL, 16);

		join(&c, &d);
		CHECK(rdma(&c, IBV_WR_RDMA_WRITE, buf, mr->lkey, bad[i], all->rkey, 8) == IBV_WC_REM_ACCESS_ERR);
		end_it(&c);
		end_it(&d);
	}
	CHECK(rdma(&a, IBV_WR_RDMA_WRITE, later, all->lkey, (uintptr_t)buf, mr->rkey, 8) == IBV_WC_LOC_PROT_ERR);
	end_it(&a);
	end_it(&b);
	CHECK(!ibv_dereg_mr(all));
}

/* advise: its advices, and the numbers that ibv_advise_mr(3) gives. */
static void advise(void)
{
	enum { N = 32 };
	char *p = apart(N * 4096);
	struct ibv_pd *other = ibv_alloc_pd(ctx);
	struct ibv_mr *m = ibv_reg_mr(pd, p, N * 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND);
	struct ibv_mr *ro = ibv_reg_mr(pd, p, N * 4096, IBV_ACCESS_ON_DEMAND);
	struct ibv_mr *all = ibv_reg_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND);
	struct ibv_sge s[2] = { { (uintptr_t)p, 4096, m->lkey }, { (uintptr_t)p + 8 * 4096, 4 * 4096, m->lkey } }, t;
	const int flush = IBV_ADVISE_MR_FLAG_FLUSH;

	CHECK(other && m && ro && all);
#define BAD(change, advice, flags, want)                                                           \
	do {                                                                                       \
		t = s[0];                                                                          \
		change;                                                                            \
		CHECK(ibv_advise_mr(pd, advice, flags, &t, 1) == want);                            \
	} while (0)
	CHECK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT, flush, s, 2) == 0 && present(p, N) == 0);
	BAD(, 7, flush, EOPNOTSUPP);
	BAD(, IBV_ADVISE_MR_ADVICE_PREFETCH, 2, EINVAL);
	BAD(t.lkey = mr->lkey, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, EINVAL);
	BAD(t.lkey ^= 1, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, EFAULT);
	BAD(t.length = N * 4096 + 1, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, EFAULT);
	BAD(t.lkey = ro->lkey, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, flush, EPERM);
	BAD((t.lkey = all->lkey, t.addr = 1 << 12), IBV_ADVISE_MR_ADVICE_PREFETCH, flush, EFAULT);
	CHECK(ibv_advise_mr(other, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, s, 1) == EPERM);
	CHECK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, s, 0) == EINVAL);
	CHECK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, NULL, 1) == EINVAL);
	CHECK(present(p, N) == 0);

	CHECK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, s, 2) == 0 && present(p, N) == 5);
	t = (struct ibv_sge){ (uintptr_t)p, N * 4096 / 2, ro->lkey };
	CHECK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, &t, 1) == 0 && present(p, N) == N / 2);
	t = (struct ibv_sge){ (uintptr_t)p, N * 4096, m->lkey };
	CHECK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, flush, &t, 1) == 0 && present(p, N) == N);
	/* Writable indeed: storing to them is no page fault. */
	struct rusage before, after;
	CHECK(!getrusage(RUSAGE_THREAD, &before));
	for (int i = 0; i < N; i++)
		((volatile char *)p)[i * 4096] = 1;
	CHECK(!getrusage(RUSAGE_THREAD, &after) && after.ru_minflt == before.ru_minflt);
	/* Without the flag it is done when it is done. */
	CHECK(!madvise(p, N * 4096, MADV_DONTNEED));
	CHECK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &t, 1) == 0);
	while (present(p, N) < N)
		sched_yield();
	/* By the key of all memory. */
	char *q = apart(N * 4096);
	t = (struct ibv_sge){ (uintptr_t)q, N * 4096, all->lkey };
	CHECK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, flush, &t, 1) == 0 && present(q, N) == N);
	CHECK(!munmap(p + 4096, 4096));
	t = (struct ibv_sge){ (uintptr_t)p, N * 4096, m->lkey };
	CHECK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, &t, 1) == EFAULT);
	CHECK(!ibv_dereg_mr(m) && !ibv_dereg_mr(ro) && !ibv_dereg_mr(all) && !ibv_dealloc_pd(other));
	CHECK(!munmap(p, N * 4096) && !munmap(q, N * 4096));
}

/* null: zeros come from it, and nothing ever gets there. */
static void null(void)
{
	struct end a = make(NULL, 2 * DEPTH), b = make(NULL, 2 * DEPTH);
	struct ibv_mr *n = ibv_alloc_null_mr(pd);
	struct ibv_sge s[2], r[2];

	CHECK(n && n->lkey && !n->rkey && n->length == SIZE_MAX);
	CHECK(ibv_rereg_mr(n, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE) != 0);
	join(&a, &b);
	memset(buf, 'a', SIZE);
	s[0] = (struct ibv_sge){ (uintptr_t)buf, 100, mr->lkey };
	s[1] = (struct ibv_sge){ 0, 100, n->lkey };
	r[0] = (struct ibv_sge){ 1ull << 50, 50, n->lkey };
	r[1] = (struct ibv_sge){ (uintptr_t)buf + 1000, 500, mr->lkey };
	struct ibv_recv_wr rw = { .wr_id = 2, .sg_list = r, .num_sge = 2 }, *badr;
	struct ibv_send_wr sw = { .wr_id = 1, .sg_list = s, .num_sge = 2, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bads;
	memset(buf + 1000, 'b', 500);
	CHECK(!ibv_post_recv(b.qp, &rw, &badr) && !ibv_post_send(a.qp, &sw, &bads));
	CHECK(wait_wc(a.cq).status == IBV_WC_SUCCESS && wait_wc(b.cq).byte_len == 200);
	for (int i = 0; i < 500; i++)
		CHECK(buf[1000 + i] == (i < 50 ? 'a' : i < 150 ? 0 : 'b'));
	CHECK(rdma(&a, IBV_WR_RDMA_READ, (void *)64, n->lkey, (uintptr_t)buf, mr->rkey, 4096) == IBV_WC_SUCCESS);
	end_it(&a);
	end_it(&b);
	CHECK(!ibv_dereg_mr(n));
}

/* dm: device memory. */
static void dm(void)
{
	struct end a = make(NULL, 2 * DEPTH), b = make(NULL, 2 * DEPTH);
	struct ibv_device_attr_ex at;
	struct ibv_alloc_dm_attr want = { .length = 8192, .log_align_req = 16 };
	struct ibv_dm *d, *d2;
	struct ibv_mr *m;
	char out[8192];

	CHECK(!ibv_query_device_ex(ctx, NULL, &at) && at.max_dm_size == 64 << 20);
	CHECK(d = ibv_alloc_dm(ctx, &want));
	CHECK(d->context == ctx && d->comp_mask == IBV_DM_MASK_HANDLE && d->handle);
	want.comp_mask = 1;
	CHECK(!ibv_alloc_dm(ctx, &want) && errno == EINVAL);
	want = (struct ibv_alloc_dm_attr){ .length = at.max_dm_size };
	CHECK(!ibv_alloc_dm(ctx, &want) && errno == ENOMEM);
	want.length = 0;
	CHECK(!ibv_alloc_dm(ctx, &want) && errno == EINVAL);
	want = (struct ibv_alloc_dm_attr){ .length = 64, .log_align_req = 70 };
	CHECK(!ibv_alloc_dm(ctx, &want) && errno == EINVAL);
	want = (struct ibv_alloc_dm_attr){ .length = at.max_dm_size - 8192 };
	CHECK(d2 = ibv_alloc_dm(ctx, &want));
	CHECK(!ibv_free_dm(d2));

	memset(buf, 'x', 8192);
	CHECK(!ibv_memcpy_from_dm(out, d, 0, 8192) && !out[0] && !out[8191]);
	CHECK(!ibv_memcpy_to_dm(d, 4, buf, 8));
	CHECK(!ibv_memcpy_from_dm(out, d, 0, 16) && !memcmp(out, "\0\0\0\0xxxxxxxx\0\0\0\0", 16));
	CHECK(ibv_memcpy_to_dm(d, 1, buf, 4) == EINVAL && ibv_memcpy_to_dm(d, 0, buf, 3) == EINVAL);
	CHECK(ibv_memcpy_to_dm(d, 8192, buf, 4) == EINVAL && ibv_memcpy_from_dm(out, d, UINT64_MAX - 3, 4) == EINVAL);
	CHECK(!ibv_reg_dm_mr(pd, d, 0, 64, RIGHTS) && errno == EINVAL);
	CHECK(!ibv_reg_dm_mr(pd, d, 8000, 200, RIGHTS | IBV_ACCESS_ZERO_BASED) && errno == EINVAL);
	CHECK(!ibv_reg_dm_mr(pd, d, 0, 64, RIGHTS | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_ON_DEMAND) && errno == EINVAL);
	CHECK(m = ibv_reg_dm_mr(pd, d, 4096, 4096, RIGHTS | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_RELAXED_ORDERING | 1 << 29));
	CHECK(ibv_free_dm(d) == EBUSY);
	join(&a, &b);
	for (int i = 0; i < 4096; i++)
		buf[i] = i * 3;
	CHECK(rdma(&a, IBV_WR_RDMA_WRITE, buf, mr->lkey, 0, m->rkey, 4096) == IBV_WC_SUCCESS);
	CHECK(!ibv_memcpy_from_dm(out, d, 4096, 4096) && !memcmp(out, buf, 4096));
	CHECK(!ibv_memcpy_to_dm(d, 4096, "abcd", 4));
	CHECK(rdma(&a, IBV_WR_RDMA_READ, (void *)8, m->lkey, 0, m->rkey, 4) == IBV_WC_SUCCESS);
	CHECK(!ibv_memcpy_from_dm(out, d, 4104, 4) && !memcmp(out, "abcd", 4));
	CHECK(rdma(&a, IBV_WR_RDMA_WRITE, buf, mr->lkey, 4090, m->rkey, 8) == IBV_WC_REM_ACCESS_ERR);
	end_it(&a);
	end_it(&b);
	CHECK(!ibv_dereg_mr(m) && !ibv_free_dm(d));
}

/* What the allocators of domains have done. */
static int allocs, frees, refuse;
static uint64_t kinds;

static void *alloc(struct ibv_pd *p, void *user, size_t size, size_t align, uint64_t type)
{
	void *mem;

	CHECK(p->context == ctx && user == &allocs && size && !(type >> 32));
	if (refuse)
		return refuse > 0 ? NULL : IBV_ALLOCATOR_USE_DEFAULT;
	allocs++;
	kinds |= 1 << type;
	CHECK(!posix_memalign(&mem, align, size));
	return memset(mem, 0, size);
}

static void release(struct ibv_pd *p, void *user, void *mem, uint64_t type)
{
	CHECK(p->context == ctx && user == &allocs && kinds & 1 << type);
	frees++;
	free(mem);
}

/* domains: parent domains and thread domains. */
static void domains(void)
{
	struct ibv_td_init_attr none = { 0 }, some = { 1 };
	struct ibv_td *td = ibv_alloc_td(ctx, &none);
	struct ibv_parent_domain_init_attr a = { .pd = pd, .td = td, .comp_mask = 3, .alloc = alloc, .free = release, .pd_context = &allocs };
	struct ibv_pd *p, *base;

	CHECK(td && !ibv_alloc_td(ctx, &some) && errno == EINVAL);
	a.comp_mask = 4;
	CHECK(!ibv_alloc_parent_domain(ctx, &a) && errno == EINVAL);
	a.comp_mask = 3;
	a.pd = NULL;
	CHECK(!ibv_alloc_parent_domain(ctx, &a) && errno == EINVAL);
	CHECK(a.pd = base = ibv_alloc_pd(ctx));
	a.free = NULL;
	CHECK(!ibv_alloc_parent_domain(ctx, &a) && errno == EINVAL);
	a.free = release;
	CHECK(p = ibv_alloc_parent_domain(ctx, &a));
	CHECK(ibv_dealloc_td(td) == EBUSY && ibv_dealloc_pd(base) == EBUSY);

	/* What is made in the one works with what is made in the other. */
	struct ibv_cq_init_attr_ex ca = { .cqe = 64, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD | IBV_CQ_INIT_ATTR_MASK_FLAGS,
		.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED, .parent_domain = base };
	CHECK(!ibv_create_cq_ex(ctx, &ca) && errno == EINVAL);
	ca.parent_domain = p;
	refuse = 1;
	CHECK(!ibv_create_cq_ex(ctx, &ca) && errno == ENOMEM);
	refuse = -1;
	struct ibv_cq_ex *plain = ibv_create_cq_ex(ctx, &ca);
	CHECK(plain && !ibv_destroy_cq(ibv_cq_ex_to_cq(plain)) && !allocs && !frees);
	refuse = 0;
	struct ibv_cq_ex *cx = ibv_create_cq_ex(ctx, &ca);
	CHECK(cx);
	struct ibv_cq *cq = ibv_cq_ex_to_cq(cx);
	CHECK(ibv_dealloc_pd(p) == EBUSY);
	struct ibv_srq_init_attr sa = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(p, &sa);
	struct ibv_qp_init_attr in = { .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct end x = { ibv_create_qp(p, &in), cq }, y;
	CHECK(srq && x.qp && x.qp->pd == p && allocs == 3 && kinds == (1 << 1 | 1 << 2 | 1 << 3));
	CHECK(y.cq = ibv_create_cq(ctx, 64, NULL, NULL, 0));
	in.send_cq = in.recv_cq = y.cq;
	in.srq = NULL;
	CHECK(y.qp = ibv_create_qp(base, &in));
	char *mem = apart(8192);
	struct ibv_mr *in_p = ibv_reg_mr(p, mem, 4096, RIGHTS), *in_base = ibv_reg_mr(base, mem + 4096, 4096, RIGHTS);
	CHECK(in_p && in_p->pd == p && in_base);
	join(&x, &y);
	memcpy(mem, "domain", 7);
	CHECK(rdma(&x, IBV_WR_RDMA_WRITE, mem, in_p->lkey, (uintptr_t)mem + 4096, in_base->rkey, 7) == IBV_WC_SUCCESS);
	CHECK(rdma(&y, IBV_WR_RDMA_READ, mem + 5000, in_base->lkey, (uintptr_t)mem, in_p->rkey, 7) == IBV_WC_SUCCESS);
	CHECK(!strcmp(mem + 4096, "domain") && !strcmp(mem + 5000, "domain"));
	/* A region of another domain is none of theirs. */
	CHECK(rdma(&x, IBV_WR_RDMA_WRITE, buf, mr->lkey, (uintptr_t)mem, in_p->rkey, 7) == IBV_WC_LOC_PROT_ERR);

	CHECK(!ibv_destroy_qp(x.qp) && !ibv_destroy_srq(srq) && !ibv_destroy_cq(cq) && frees == 3);
	CHECK(ibv_dealloc_pd(p) == EBUSY);
	CHECK(!ibv_dereg_mr(in_p) && !ibv_dealloc_pd(p));
	CHECK(!ibv_dealloc_td(td));
	CHECK(!ibv_destroy_qp(y.qp) && !ibv_destroy_cq(y.cq) && !ibv_dereg_mr(in_base) && !ibv_dealloc_pd(base));
	CHECK(!munmap(mem, 8192));
}

/* imports: a context by its descriptor, and objects by their handles. */
static void imports(void)
{
	struct ibv_alloc_dm_attr want = { .length = 4096 };
	struct ibv_dm *d = ibv_alloc_dm(ctx, &want), *d2;
	struct ibv_context *c, *other = open_dev();
	struct ibv_pd *p, *own;
	struct ibv_mr *m;
	char word[4];
	int fd = open("/dev/null", O_RDONLY);

	CHECK(d && !ibv_import_device(-1) && errno == EBADF);
	CHECK(!ibv_import_device(fd) && errno == EINVAL);
	close(fd);
	fd = dup(ctx->cmd_fd);
	CHECK(c = ibv_import_device(fd));
	CHECK(c != ctx && c->cmd_fd == fd && c->device == ctx->device);
	CHECK(!ibv_import_pd(c, 0) && errno == ENOENT);
	CHECK(!ibv_import_pd(c, mr->handle) && errno == ENOENT);
	CHECK(!ibv_import_pd(other, pd->handle) && errno == ENOENT);
	CHECK(p = ibv_import_pd(c, pd->handle));
	CHECK(p->context == c && p->handle == pd->handle);
	CHECK(!ibv_import_mr(p, pd->handle) && errno == ENOENT);
	CHECK(m = ibv_import_mr(p, mr->handle));
	CHECK(m->pd == p && m->context == c && m->lkey == mr->lkey && m->rkey == mr->rkey && m->length == mr->length && !m->addr);
	CHECK(d2 = ibv_import_dm(c, d->handle));
	CHECK(!ibv_memcpy_to_dm(d, 0, "wxyz", 4) && !ibv_memcpy_from_dm(word, d2, 0, 4) && !memcmp(word, "wxyz", 4));

	/* A queue pair of the one context with the other's domain and region. */
	struct ibv_context *old = ctx;
	struct ibv_pd *oldpd = pd;
	struct end a = make(NULL, 16), b;
	ctx = c;
	pd = p;
	b = make(NULL, 16);
	join(&a, &b);
	memcpy(buf, "imported", 9);
	CHECK(rdma(&b, IBV_WR_RDMA_WRITE, buf, m->lkey, (uintptr_t)buf + SIZE / 2, mr->rkey, 9) == IBV_WC_SUCCESS);
	CHECK(!strcmp(buf + SIZE / 2, "imported"));
	ctx = old;
	pd = oldpd;
	end_it(&a);
	end_it(&b);

	/* The context that a domain was made in may end first. */
	CHECK(own = ibv_alloc_pd(c));
	struct ibv_pd *mine = ibv_import_pd(ctx, own->handle);
	struct ibv_mr *of = ibv_reg_mr(own, buf, SIZE, RIGHTS), *again;
	CHECK(mine && of && (again = ibv_import_mr(mine, of->handle)));
	uint32_t handle = of->handle;
	ibv_unimport_mr(m);
	ibv_unimport_dm(d2);
	ibv_unimport_pd(p);
	CHECK(!ibv_close_device(c));
	CHECK(fcntl(fd, F_GETFD) < 0);
	free(own); /* with their context closed, nothing else frees these */
	free(of);
	ibv_unimport_mr(again);
	CHECK(again = ibv_import_mr(mine, handle));
	CHECK(ibv_dealloc_pd(mine) == EBUSY);
	CHECK(!ibv_dereg_mr(again));
	CHECK(!ibv_dealloc_pd(mine));

	/* Destroyed by the one, the other's is only to be unimported. */
	CHECK(c = ibv_import_device(dup(ctx->cmd_fd)));
	CHECK(d2 = ibv_import_dm(c, d->handle));
	CHECK(!ibv_free_dm(d2));
	ibv_unimport_dm(d);
	CHECK(!ibv_import_dm(c, d->handle) && errno == ENOENT);
	CHECK(!ibv_close_device(c) && !ibv_close_device(other));
}

int main(int argc, char **argv)
{
	static const struct { const char *name; void (*run)(void); } checks[] = {
		{ "implicit", implicit }, { "advise", advise }, { "null", null }, { "dm", dm },
		{ "domains", domains }, { "imports", imports },
	};

	for (unsigned i = 0; argc == 2 && i < sizeof checks / sizeof *checks; i++)
		if (!strcmp(argv[1], checks[i].name)) {
			setup();
			checks[i].run();
			teardown();
			return 0;
		}
	return 2;
}
