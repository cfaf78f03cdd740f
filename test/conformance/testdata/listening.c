/* SPDX-License-Identifier: Apache-2.0
 *
 * Is loaded before servers of the RDMA CM (LD_PRELOAD), which no table of the kernel has: when
 * one listens, or has joined a multicast group, a TCP socket listens at port 18515 of this
 * namespace, for those who wait. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <rdma/rsocket.h>
#include <sys/syscall.h>
#include <unistd.h>

static void tell(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(18515), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int s = syscall(SYS_socket, AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); /* librspreload has functions of these names */

	if (!syscall(SYS_bind, s, &a, sizeof(a)))
		syscall(SYS_listen, s, 1); /* stays until the process ends */
}

int rdma_listen(struct rdma_cm_id *id, int backlog)
{
	int (*next)(struct rdma_cm_id *, int) = (int (*)(struct rdma_cm_id *, int))dlsym(RTLD_NEXT, "rdma_listen");
	int rc = next(id, backlog);

	if (!rc)
		tell();
	return rc;
}

int rdma_get_cm_event(struct rdma_event_channel *ch, struct rdma_cm_event **ev)
{
	int (*next)(struct rdma_event_channel *, struct rdma_cm_event **) =
		(int (*)(struct rdma_event_channel *, struct rdma_cm_event **))dlsym(RTLD_NEXT, "rdma_get_cm_event");
	int rc = next(ch, ev);

	if (!rc && (*ev)->event == RDMA_CM_EVENT_MULTICAST_JOIN)
		tell();
	return rc;
}

int rlisten(int s, int backlog)
{
	int (*next)(int, int) = (int (*)(int, int))dlsym(RTLD_NEXT, "rlisten");
	int rc = next(s, backlog);

	if (!rc)
		tell();
	return rc;
}

/* Datagram sockets do not listen. */
int rbind(int s, const struct sockaddr *addr, socklen_t len)
{
	int (*next)(int, const struct sockaddr *, socklen_t) = (int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "rbind");
	int rc = next(s, addr, len), type = 0;
	socklen_t n = sizeof(type);

	if (!rc && !rgetsockopt(s, SOL_SOCKET, SO_TYPE, &type, &n) && type == SOCK_DGRAM)
		tell();
	return rc;
}
