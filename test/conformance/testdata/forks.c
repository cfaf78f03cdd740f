/* SPDX-License-Identifier: Apache-2.0
 *
 * What a child of fork finds in the memory of regions, absent and evicted pages included,
 * while regions stay the parent's. */
#define _GNU_SOURCE
#include <infiniband/tapverbs_dv.h>
#include <linux/capability.h>
#include <sys/syscall.h>

#include "verbs.h"

struct ibv_context *ctx;
struct ibv_pd *pd;
struct ibv_mr *mr;
char *buf;

enum { PAGES = 2048, PAGE = 4096 };

static struct end a, b;
static struct ibv_mr *far;
static unsigned char *mem;

/* what is the byte that a page is filled with; every fourth was never touched. */
static int what(int page) { return page % 4 == 3 ? 0 : page % 251 + 1; }

static void begin(void)
{
	setup();
	mem = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(mem != MAP_FAILED);
	CHECK(far = ibv_reg_mr(pd, mem, PAGES * PAGE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
	a = make(NULL, 64);
	b = make(NULL, 64);
	join(&a, &b);
}

static void end(void)
{
	end_it(&a);
	end_it(&b);
	CHECK(!ibv_dereg_mr(far));
	CHECK(!munmap(mem, PAGES * PAGE));
	teardown();
}

/* lay fills memory and evicts: a third stays, a third is in limbo, a third stored. */
static void lay(void)
{
	uint64_t third = PAGES / 3 * PAGE, n;

	for (int i = 0; i < PAGES; i++)
		if (what(i))
			memset(mem + i * PAGE, what(i), PAGE);
	int rc = tapverbs_dv_evict_mr(far, (uintptr_t)mem, third, TAPVERBS_DV_LEVEL_LIMBO, &n);

	if (rc == EOPNOTSUPP) {
		fprintf(stderr, "this kernel, or this user, moves no pages\n");
		exit(0);
	}
	CHECK(!rc && n > 0);
	CHECK(!tapverbs_dv_evict_mr(far, (uintptr_t)mem + third, third, TAPVERBS_DV_LEVEL_STORED, &n) && n > 0);
}

static int as_laid(void)
{
	for (int i = 0; i < PAGES; i++)
		for (int k = 0; k < PAGE; k += 63)
			if (mem[i * PAGE + k] != what(i))
				return 0;
	return 1;
}

/* write_page is a WRITE of a page of sevens. */
static void write_page(int page)
{
	struct ibv_sge s = { (uintptr_t)buf, PAGE, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 3, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { (uintptr_t)mem + page * PAGE, far->rkey } }, *bad;

	memset(buf, 7, PAGE);
	CHECK(!ibv_post_send(a.qp, &wr, &bad) && wait_wc(a.cq).status == IBV_WC_SUCCESS);
}

static void wait_for(pid_t pid)
{
	int status;

	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* sees: the child, and a child of it, see what was there at fork, whatever becomes of it
 * in the parent; and the parent does not see what they write. */
static void sees(void)
{
	int go[2];
	char c;

	begin();
	lay();
	CHECK(!pipe(go));
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		pid_t grand = fork();

		close(go[1]);
		if (read(go[0], &c, 1) != 0) /* until the parent has closed it */
			_exit(2);
		if (!as_laid() || ibv_alloc_pd(ctx) || errno != EIO)
			_exit(1);
		memset(mem, 9, PAGES * PAGE);
		int status = 0;
		if (grand > 0 && (waitpid(grand, &status, 0) != grand || status))
			_exit(3);
		_exit(grand < 0 ? 4 : 0);
	}
	close(go[0]);
	for (int i = 0; i < PAGES; i += 5) /* over all kinds of pages */
		write_page(i);
	for (int i = 1; i < PAGES; i += 5)
		mem[i * PAGE] = 8;
	close(go[1]);
	wait_for(pid);
	for (int i = 0; i < PAGES; i++)
		CHECK(mem[i * PAGE] == (i % 5 == 0 ? 7 : i % 5 == 1 ? 8 : what(i)) && mem[i * PAGE + 1] == (i % 5 == 0 ? 7 : what(i)));
	/* Programs that are started take nothing along, and wait for nothing. */
	CHECK(system("true") == 0);
	end();
}

/* outlives: the parent leaves at once, as daemon(3) has it. */
static void outlives(void)
{
	int result[2], alive[2];
	char c = 0;

	CHECK(!pipe(result) && !pipe(alive));
	pid_t pid = fork(); /* with no device yet */
	CHECK(pid >= 0);
	if (!pid) {
		begin();
		lay();
		pid = fork();
		CHECK(pid >= 0);
		if (pid)
			_exit(0);
		/* Until its parent is gone, who had the other end. */
		close(alive[1]);
		if (read(alive[0], &c, 1) == 0)
			c = as_laid();
		_exit(write(result[1], &c, 1) != 1);
	}
	close(alive[1]);
	close(result[1]);
	wait_for(pid);
	CHECK(read(result[0], &c, 1) == 1 && c == 1);
}

/* own: after exec a child has a device and regions of its own, once the port is free. */
static void own(const char *self)
{
	int go[2];

	begin();
	lay();
	CHECK(!pipe(go));
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		char fd[16];

		close(go[1]);
		snprintf(fd, sizeof(fd), "%d", go[0]);
		execl(self, self, "anew", fd, NULL);
		_exit(1);
	}
	close(go[0]);
	CHECK(as_laid());
	end();
	close(go[1]);
	wait_for(pid);
}

static void anew(int go)
{
	char c;

	CHECK(read(go, &c, 1) == 0);
	begin();
	lay();
	write_page(3);
	CHECK(mem[3 * PAGE] == 7 && mem[2 * PAGE] == what(2));
	end();
}

/* unprivileged: without CAP_SYS_PTRACE the kernel does not tell of forks. */
static void unprivileged(void)
{
	struct __user_cap_header_struct h = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct d[2];

	CHECK(!syscall(SYS_capget, &h, d));
	d[0].effective &= ~(1u << CAP_SYS_PTRACE);
	d[0].permitted &= ~(1u << CAP_SYS_PTRACE);
	CHECK(!syscall(SYS_capset, &h, d));
	sees();
}

int main(int argc, char **argv)
{
	CHECK(argc > 1);
	if (!strcmp(argv[1], "sees"))
		sees();
	else if (!strcmp(argv[1], "outlives"))
		outlives();
	else if (!strcmp(argv[1], "own"))
		own(argv[0]);
	else if (!strcmp(argv[1], "anew") && argc > 2)
		anew(atoi(argv[2]));
	else if (!strcmp(argv[1], "unprivileged"))
		unprivileged();
	else
		return 2;
	return 0;
}
