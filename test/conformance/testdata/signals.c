/* SPDX-License-Identifier: Apache-2.0
 *
 * Check of verbs.c's program that is about signals: handlers of signal(3), which have no
 * SA_ONSTACK, and signals that the program has blocked. */
#include <sys/syscall.h>
#include <sys/time.h>

#include "verbs.h"

static volatile sig_atomic_t seen, strange, urged;

static pid_t tid(void) { return syscall(SYS_gettid); }

/* A handler as programs have them: it needs some stack, of whatever thread it finds
 * itself on. */
static void tick(int sig)
{
	volatile char room[8192];

	(void)sig;
	for (size_t i = 0; i < sizeof(room); i += 64)
		room[i] = 0x5a;
	seen++;
	if (tid() != getpid())
		strange++; /* the engine's threads are none of the program's */
}

/* What the engine's runtime sends to its own threads must not reach the program's, which may
 * be in a poll(2) of theirs by then. */
static void urge(int sig)
{
	(void)sig;
	urged++;
}

/* signals: they come while the program is inside the engine, by the thousand. */
void signals(void)
{
	struct end a = make(NULL, DEPTH), b = make(NULL, DEPTH);
	struct itimerval often = { { 0, 50 }, { 0, 50 } }, never = { { 0, 0 }, { 0, 0 } };
	struct sigaction urgent = { .sa_handler = urge, .sa_flags = SA_RESTART | SA_ONSTACK };
	struct timespec now, end;
	sigset_t usr, pending;

	join(&a, &b);
	sigemptyset(&usr);
	sigaddset(&usr, SIGUSR1);
	CHECK(!sigprocmask(SIG_BLOCK, &usr, NULL));
	CHECK(!kill(getpid(), SIGUSR1)); /* which would end a process that does not block it */
	CHECK(!sigaction(SIGURG, &urgent, NULL));
	CHECK(signal(SIGALRM, tick) != SIG_ERR);
	alarm(0);
	clock_gettime(CLOCK_MONOTONIC, &end);
	end.tv_sec += 2;
	CHECK(!setitimer(ITIMER_REAL, &often, NULL));
	for (uint32_t i = 0;; i++) {
		memset(buf, i, 4096);
		CHECK(!send_wr(a.qp, i, IBV_WR_RDMA_WRITE, 0, 4096, IBV_SEND_SIGNALED));
		CHECK(wait_wc(a.cq).status == IBV_WC_SUCCESS && !memcmp(buf, buf + SIZE / 2, 4096));
		struct ibv_mr *other = ibv_reg_mr(pd, buf, SIZE, IBV_ACCESS_LOCAL_WRITE);
		CHECK(other && !ibv_dereg_mr(other));
		clock_gettime(CLOCK_MONOTONIC, &now);
		if (now.tv_sec > end.tv_sec || (now.tv_sec == end.tv_sec && now.tv_nsec > end.tv_nsec))
			break;
	}
	CHECK(!setitimer(ITIMER_REAL, &never, NULL));
	CHECK(signal(SIGALRM, SIG_DFL) != SIG_ERR);
	alarm(240);
	CHECK(seen > 100 && !strange && !urged);
	CHECK(!sigpending(&pending) && sigismember(&pending, SIGUSR1));
	CHECK(signal(SIGUSR1, SIG_IGN) != SIG_ERR && !sigprocmask(SIG_UNBLOCK, &usr, NULL));
	end_it(&a);
	end_it(&b);
}
