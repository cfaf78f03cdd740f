/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of verbs.c's program that are about the threads beside it: signals, with handlers of signal(3), which have no
 * SA_ONSTACK, and those that the program has blocked; and how often they wake. */
#include <dirent.h>
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

/* number gives what a file of a thread says: the number behind a word, or the first of all. */
static long number(pid_t thread, const char *file, const char *word)
{
	char path[64], line[200];
	long n = -1;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/%s", thread, file);
	f = fopen(path, "r");
	while (f && n < 0 && fgets(line, sizeof(line), f))
		if (!strncmp(line, word, strlen(word)))
			n = atol(line + strlen(word));
	if (f)
		fclose(f);
	return n;
}

/* beside: the thread of the engine's runtime that looks after the others has time: it is the only one that is in no hurry
 * to be woken, and sleeps for a time, as no other does. */
void beside(void)
{
	struct end a = make(NULL, DEPTH), b = make(NULL, DEPTH);
	struct timespec now, end;
	struct ibv_wc wc;
	pid_t lazy = 0;
	long looks = 0, naps = 0;
	DIR *d;

	join(&a, &b);
	while (!lazy) { /* it may not have run yet, or be making a thread */
		CHECK(d = opendir("/proc/self/task"));
		for (struct dirent *e; (e = readdir(d));) {
			pid_t t = atoi(e->d_name);

			if (t > 0 && number(t, "timerslack_ns", "") >= 50000000) {
				CHECK(!lazy);
				lazy = t;
			}
		}
		closedir(d);
	}
	CHECK(lazy != tid());
	clock_gettime(CLOCK_MONOTONIC, &end);
	end.tv_sec++;
	do {
		for (int i = 0; i < 1000; i++)
			CHECK(!ibv_poll_cq(a.cq, 1, &wc));
		looks++;
		naps += number(lazy, "syscall", "") == SYS_nanosleep;
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec < end.tv_sec || (now.tv_sec == end.tv_sec && now.tv_nsec < end.tv_nsec));
	if (naps <= looks / 2)
		fprintf(stderr, "it sleeps in %ld of %ld looks\n", naps, looks);
	CHECK(naps > looks / 2);
	end_it(&a);
	end_it(&b);
}
