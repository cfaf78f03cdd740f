/* SPDX-License-Identifier: Apache-2.0
 *
 * The thread of Go's runtime that looks after the others, sysmon, sleeps for 20 us at a time while
 * any of them is in C or in a system call when it looks, as threads that poll for completions are,
 * and each look is two switches of threads, and a timer, on a processor that a program computes on.
 * It is given a timer slack instead (prctl(2)), with which it sleeps for as long as it does at most:
 * 10 ms. What it is for can wait that long here: preempting who computes in Go, which nobody
 * does for long, and handing on the places (GOMAXPROCS) of who is in a system call, of
 * which there are more than enough (provider.MakeRoom).
 *
 * The runtime makes its threads by pthread_create(3), which in this library is the function below,
 * hidden to others: the first is the one that starts Go, and the first that that one makes is sysmon. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/prctl.h>

#define SLACK_NS 100000000ul

static atomic_uint created;
static void *(*sysmon)(void *);

static void *seldom(void *arg)
{
	prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0);
	return sysmon(arg);
}

__attribute__((visibility("hidden")))
int pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
	/* Of the program, or of libc: never this one. */
	int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) =
		dlsym(RTLD_DEFAULT, "pthread_create");

	if (atomic_fetch_add(&created, 1) == 1) {
		sysmon = fn;
		fn = seldom;
	}
	return create(t, attr, fn, arg);
}
