/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads the library by dlopen: no Go before the device list is asked for, and a device
 * afterwards that can be opened. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static int engine(void)
{
	char line[512];
	int found = 0;
	FILE *f = fopen("/proc/self/maps", "r");

	while (f && fgets(line, sizeof(line), f))
		found |= strstr(line, "libtapverbs-engine") != NULL;
	if (f)
		fclose(f);
	return found;
}

int main(void)
{
	int n = -1;
	void *lib = dlopen("libibverbs.so.1", RTLD_NOW);
	if (!lib)
		return fprintf(stderr, "%s\n", dlerror()), 1;
	void **(*list)(int *) = (void **(*)(int *))dlvsym(lib, "ibv_get_device_list", "IBVERBS_1.1");
	void *(*open_dev)(void *) = (void *(*)(void *))dlvsym(lib, "ibv_open_device", "IBVERBS_1.1");
	int (*close_dev)(void *) = (int (*)(void *))dlvsym(lib, "ibv_close_device", "IBVERBS_1.1");
	const char *(*str)(int) = (const char *(*)(int))dlvsym(lib, "ibv_wc_status_str", "IBVERBS_1.1");
	if (!list || !open_dev || !close_dev || !str)
		return fprintf(stderr, "%s\n", dlerror()), 1;
	if (strcmp(str(0), "success") || engine())
		return fprintf(stderr, "the engine is loaded before anybody asked for devices\n"), 1;
	void **l = list(&n);
	if (!l || n != 1 || !engine())
		return fprintf(stderr, "%d devices\n", n), 1;
	void *ctx = open_dev(l[0]);
	return !ctx || close_dev(ctx);
}
