/* SPDX-License-Identifier: Apache-2.0
 *
 * What the checks in C have in common, of whichever library: a condition that must hold, and what
 * this process has open and in memory. */
#ifndef CONFORMANCE_CHECK_H
#define CONFORMANCE_CHECK_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(cond)                                                                                \
	do {                                                                                       \
		if (!(cond)) {                                                                     \
			fprintf(stderr, "%s:%d: %s (errno %d: %s)\n", __FILE__, __LINE__, #cond, errno, strerror(errno)); \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

/* descriptors is how many there are; the one that it looks with is among them. */
static inline int descriptors(void)
{
	DIR *d = opendir("/proc/self/fd");
	int n = 0;

	CHECK(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

/* resident is how much of this process is in memory, in bytes. */
static inline long resident(void)
{
	FILE *f = fopen("/proc/self/statm", "r");
	long all, here;

	CHECK(f && fscanf(f, "%ld %ld", &all, &here) == 2);
	fclose(f);
	return here * sysconf(_SC_PAGESIZE);
}

#endif
