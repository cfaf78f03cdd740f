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

/* woken is how often all threads but this one have gone to sleep. */
static long woken(void)
{
	DIR *d = opendir("/proc/self/task");
	long sum = 0, n;

	CHECK(d);
	for (struct dirent *e; (e = readdir(d));) {
		char path[300], line[200];
		FILE *f;

		if (atoi(e->d_name) <= 0 || atoi(e->d_name) == tid())
			continue;
		snprintf(path, sizeof(path), "/proc/self/task/%s/status", e->d_name);
		f = fopen(path, "r");
		while (f && fgets(line, sizeof(line), f))
			if (sscanf(line, "voluntary_ctxt_switches: %ld", &n) == 1)
				sum += n;
		if (f)
			fclose(f);
	}
	closedir(d);
	return sum;
}

/* beside: a program that polls has its processor for itself. A thread of the engine's runtime would look after it each
 * 20 us, and others would wait for each other's places: 15,000 switches a second. What is left are windows
 * of the background thread's, each 4 ms, and 10 looks a second. */
void beside(void)
{
	struct end a = make(NULL, DEPTH), b = make(NULL, DEPTH);
	struct timespec now, end;
	struct ibv_wc wc;
	long before;

	join(&a, &b);
	for (int second = 0; second < 2; second++) { /* the first is for it to get used to that */
		before = woken();
		clock_gettime(CLOCK_MONOTONIC, &end);
		end.tv_sec++;
		do {
			CHECK(!ibv_poll_cq(a.cq, 1, &wc));
			clock_gettime(CLOCK_MONOTONIC, &now);
		} while (now.tv_sec < end.tv_sec || (now.tv_sec == end.tv_sec && now.tv_nsec < end.tv_nsec));
	}
	before = woken() - before;
	if (before > 3000)
		fprintf(stderr, "the engine's threads slept %ld times in a second\n", before);
	CHECK(before <= 3000);
	end_it(&a);
	end_it(&b);
}
