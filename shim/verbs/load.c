/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading the engine, and the list of devices. The engine, a Go library, is looked
 * for beside this one and loaded when a device list is asked for: a program that
 * only links verbs has no Go runtime. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <endian.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tv.h"

#define ENGINE "libtapverbs-engine.so"

struct tv_engine *tv_e;
pthread_mutex_t tv_mutex = PTHREAD_MUTEX_INITIALIZER;
int tv_forked;
uint32_t tv_trouble;

static struct tv_dev *the_dev; /* guarded by tv_mutex; NULL when nobody holds it */
static int32_t port_fds[TV_MAX_FDS]; /* of the open port */
static uint32_t num_port_fds;
static struct tv_dev *port_of;       /* whose that is */
static char said[512];         /* what was last said, so that it is said once */

/* say tells the user why there is no device: one line. */
static void say(const char *what, const char *why)
{
	char line[512];

	snprintf(line, sizeof(line), "libibverbs (tapverbs): %s%s%s\n", what, *why ? ": " : "", why);
	if (!strcmp(line, said))
		return;
	memcpy(said, line, sizeof(line));
	fputs(line, stderr);
}

/* Only the forking thread lives in a child, so the engine does not, and the mutexes
 * are as the other threads left them. A port that a child had open as well could not
 * be opened again by anybody while that child lives. So the child closes it, and the
 * parent waits until it has: until the pipe that both have has its end. The engine sees
 * to it that a child finds the memory of regions, wherever that is. */
static int with_child[2];
static tv_handle forking; /* 0: the engine has nothing to do with it */
static int had_children;

static void before_fork(void)
{
	pthread_mutex_lock(&tv_mutex);
	forking = 0;
	if (!tv_forked && the_dev && the_dev->handle && tv_e->fork_begin(&forking))
		say("memory that is evicted cannot all be brought back: a child of fork finds zeros there", "");
	if (!num_port_fds || pipe2(with_child, O_CLOEXEC))
		with_child[0] = -1;
}

static void in_parent(void)
{
	if (with_child[0] >= 0) {
		struct pollfd p = { .fd = with_child[0] };

		close(with_child[1]);
		poll(&p, 1, 1000); /* a child that is stopped by a debugger is not waited for */
		close(with_child[0]);
	}
	if (forking) {
		tv_e->fork_end(forking);
		had_children = 1;
	}
	pthread_mutex_unlock(&tv_mutex);
}

/* at_exit has children find what was evicted when they were forked. */
static void at_exit(void)
{
	if (had_children && !tv_forked)
		tv_e->fork_finish();
}

static void in_child(void)
{
	tv_forked = 1;
	tv_trouble = 1;
	for (uint32_t i = 0; i < num_port_fds; i++)
		close(port_fds[i]);
	num_port_fds = 0;
	if (with_child[0] >= 0) {
		close(with_child[0]);
		close(with_child[1]);
	}
	pthread_mutex_init(&tv_mutex, NULL);
}

/* open_engine loads the engine with signals blocked, which the threads of its runtime
 * inherit: signals are for the program's own threads, and those that it has blocked in
 * all of them stay pending. Not blocked are faults, which the engine's own code may
 * have, and what the runtime uses itself. */
static void *open_engine(const char *path)
{
	static const int own[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF, SIGURG };
	sigset_t most, old;
	void *lib;

	sigfillset(&most);
	for (size_t i = 0; i < sizeof(own) / sizeof(*own); i++)
		sigdelset(&most, own[i]);
	pthread_sigmask(SIG_BLOCK, &most, &old);
	/* It stays for ever: a Go runtime cannot be unloaded. */
	lib = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return lib;
}

/* load finds and loads the engine. Called with tv_mutex held. */
static int load(void)
{
	char path[PATH_MAX];
	Dl_info self;
	const char *slash;
	void *lib;
	struct tv_engine *(*get)(void);
	struct tv_engine *e;

	if (tv_e)
		return 0;
	if (!dladdr((void *)load, &self) || !self.dli_fname || !(slash = strrchr(self.dli_fname, '/')))
		snprintf(path, sizeof(path), "%s", ENGINE);
	else
		snprintf(path, sizeof(path), "%.*s/%s", (int)(slash - self.dli_fname), self.dli_fname, ENGINE);
	lib = open_engine(path);
	if (!lib) {
		say("cannot load the engine (make install-libs puts it beside libibverbs.so.1)", dlerror());
		return ENODEV;
	}
	get = (struct tv_engine * (*)(void))(uintptr_t)dlsym(lib, TV_ENGINE_SYMBOL);
	e = get ? get() : NULL;
	if (!e || e->abi != TV_ABI) {
		say("the engine is of another version than libibverbs.so.1 (install both from one build)", path);
		return ENODEV;
	}
	pthread_atfork(before_fork, in_parent, in_child);
	atexit(at_exit);
	__atomic_store_n(&tv_e, e, __ATOMIC_RELEASE);
	return 0;
}

static const char *set(const char *name)
{
	const char *v = getenv(name);

	return v && *v ? v : NULL;
}

static void config(struct tv_config *c, char *err, size_t err_len)
{
	*err = 0;
	*c = (struct tv_config){
		.port = (char *)set("TAPVERBS_PORT"), .addrs = (char *)set("TAPVERBS_ADDR"),
		.addrs6 = (char *)set("TAPVERBS_ADDR6"),
		.mac = (char *)set("TAPVERBS_MAC"), .gateway = (char *)set("TAPVERBS_GATEWAY"),
		.sysfs = (char *)set("TAPVERBS_SYSFS"),
		.budget = (char *)set("TAPVERBS_BUDGET"), .store = (char *)set("TAPVERBS_STORE"),
		.monitor = (char *)set("TAPVERBS_MONITOR"), .frames = (char *)set("TAPVERBS_FRAMES"),
		.ecn = (char *)set("TAPVERBS_ECN"),
		.queues = (char *)set("TAPVERBS_QUEUES"),
		.err = err, .err_len = err_len,
	};
}

/* open_port makes the engine open the port. Called with tv_mutex held. */
static int open_port(struct tv_dev *d, struct tv_config *c)
{
	int rc;

	c->gone = &d->gone;
	c->trouble = &tv_trouble;
	rc = tv_e->open(c, &d->handle);
	if (!rc) {
		memcpy(port_fds, c->fds, sizeof(port_fds));
		num_port_fds = c->num_fds;
		port_of = d;
	}
	return rc;
}

/* close_port gives the port back. Called with tv_mutex held. */
static void close_port(struct tv_dev *d)
{
	if (!d->handle)
		return;
	if (port_of == d)
		num_port_fds = 0;
	tv_e->close(d->handle);
	d->handle = 0;
}

static bool is_gone(struct tv_dev *d) { return __atomic_load_n(&d->gone, __ATOMIC_ACQUIRE); }

/* find makes the device, or takes a reference of the one there is. NULL when there
 * is none to be had: that has been said. Called with tv_mutex held. */
static struct tv_dev *find(void)
{
	char err[400];
	struct tv_config c;
	struct tv_dev *d = the_dev;
	int rc;

	/* One that is gone lives as long as its contexts do; who asks for devices then is
	 * given the port anew, as another. */
	if (d && !is_gone(d)) {
		d->refs++;
		return d;
	}
	config(&c, err, sizeof(err));
	if (!c.port) {
		say("no device: set TAPVERBS_PORT to the name of a TAP port and TAPVERBS_ADDR to its address, "
		    "or start the program with: tapverbs run -- PROGRAM", "");
		return NULL;
	}
	if (load())
		return NULL;
	d = calloc(1, sizeof(*d));
	if (!d)
		return NULL;
	rc = open_port(d, &c);
	if (rc == EBUSY && !tv_e->guid(&c, &d->guid))
		rc = 0; /* it is there, though not for us */
	else if (!rc)
		rc = tv_e->guid(&c, &d->guid);
	if (rc) {
		say("no device", err);
		free(d);
		return NULL;
	}
	d->refs = 1;
	d->ibv._ops._dummy1 = tv_dv_ask;
	d->ibv.node_type = IBV_NODE_CA;
	d->ibv.transport_type = IBV_TRANSPORT_IB;
	strcpy(d->ibv.name, "tapverbs0");
	strcpy(d->ibv.dev_name, "uverbs0");
	strcpy(d->ibv.dev_path, "/sys/class/infiniband_verbs/uverbs0");
	strcpy(d->ibv.ibdev_path, "/sys/class/infiniband/tapverbs0");
	the_dev = d;
	return d;
}

/* tv_dev_open makes sure that the engine has the port open. A device that is gone and
 * has no contexts is opened again. Called with tv_mutex held. */
int tv_dev_open(struct tv_dev *d)
{
	char err[400];
	struct tv_config c;
	int rc;

	if (d->handle && is_gone(d) && !d->opens) {
		close_port(d);
		__atomic_store_n(&d->gone, 0, __ATOMIC_RELEASE);
	}
	if (d->handle)
		return 0;
	config(&c, err, sizeof(err));
	rc = open_port(d, &c);
	if (rc)
		say("cannot open the device", err);
	return rc;
}

/* tv_dev_put gives a reference back. Called with tv_mutex held. */
void tv_dev_put(struct tv_dev *d)
{
	if (--d->refs)
		return;
	close_port(d);
	if (the_dev == d)
		the_dev = NULL;
	free(d);
}

struct ibv_device **ibv_get_device_list(int *num)
{
	struct ibv_device **list;
	struct tv_dev *d;

	if (num)
		*num = 0;
	TV_ALIVE(NULL);
	/* One more than needed: the list ends with NULL, and the free looks at what is in it. */
	list = calloc(2, sizeof(*list));
	if (!list)
		return NULL;
	pthread_mutex_lock(&tv_mutex);
	d = find();
	pthread_mutex_unlock(&tv_mutex);
	if (d) {
		list[0] = &d->ibv;
		if (num)
			*num = 1;
	}
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	if (!list)
		return;
	if (list[0] && !tv_forked) {
		pthread_mutex_lock(&tv_mutex);
		tv_dev_put((struct tv_dev *)list[0]);
		pthread_mutex_unlock(&tv_mutex);
	}
	free(list);
}

const char *ibv_get_device_name(struct ibv_device *d) { return d->name; }

__be64 ibv_get_device_guid(struct ibv_device *d) { return htobe64(((struct tv_dev *)d)->guid); }

int ibv_get_device_index(struct ibv_device *d)
{
	(void)d;
	return -1; /* the kernel has no number for it */
}

TV_LATEST(ibv_free_device_list);
TV_LATEST(ibv_get_device_list);

TV_LATEST(ibv_get_device_guid);
TV_LATEST(ibv_get_device_name);
