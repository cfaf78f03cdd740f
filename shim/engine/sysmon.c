/* SPDX-License-Identifier: Apache-2.0
 *
 * The thread of Go's runtime that looks after the others, sysmon, sleeps for 20 us at a time while
 * any of them is in C or in a system call when it looks, as threads that poll for completions are,
 * and each look is two switches of threads, and a timer, on a processor that a program computes on; and
 * each time it has who has run for 10 ms scheduled anew, which wakes more. It is given a timer slack (prctl(2)):
 * it sleeps for up to 50 ms, unless something else interrupts its processor. What it is for can wait that
 * long here: preempting who computes in Go, which nobody does for long, and handing on the places
 * (GOMAXPROCS) of who is in a system call, of which there are more than enough (provider.MakeRoom, and room).
 *
 * The runtime makes its threads by pthread_create(3), which in this library is the function below,
 * hidden to others: the first is the one that starts Go, and the first that that one makes is sysmon. What sysmon makes
 * itself would inherit the slack. Who says how many places there are (GOMAXPROCS) may have said too few
 * for it to look seldom. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/prctl.h>

#define SLACK_NS 50000000ul

static atomic_uint created;
static void *(*sysmon)(void *);
static unsigned long usual;
static _Thread_local int seldom_looks;

static void *seldom(void *arg)
{
	const char *places = getenv("GOMAXPROCS");

	if (!places || !*places) {
		usual = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
		seldom_looks = !prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0);
	}
	return sysmon(arg);
}

__attribute__((visibility("hidden")))
int pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
	/* Of the program, or of libc: never this one. */
	int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) =
		dlsym(RTLD_DEFAULT, "pthread_create");
	int rc;

	if (atomic_load(&created) == 1) {
		sysmon = fn;
		fn = seldom;
	}
	if (seldom_looks)
		prctl(PR_SET_TIMERSLACK, usual, 0, 0, 0);
	rc = create(t, attr, fn, arg);
	if (seldom_looks)
		prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0);
	if (!rc)
		atomic_fetch_add(&created, 1);
	return rc;
}
