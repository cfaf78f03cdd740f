/* SPDX-License-Identifier: Apache-2.0
 *
 * rdma_getaddrinfo(3): names and services are getaddrinfo(3)'s, routes the device's. */
#include <netdb.h>
#include <netinet/in.h>

#include "cm.h"

/* copy makes a copy of an address; false if there is no memory. */
static bool copy(struct sockaddr **to, socklen_t *len, const struct sockaddr *from, socklen_t n)
{
	if (!n)
		return true;
	*to = malloc(n);
	if (!*to)
		return false;
	memcpy(*to, from, n);
	*len = n;
	return true;
}

static bool name(char **to, const char *from)
{
	if (!from)
		return true;
	*to = strdup(from);
	return *to != NULL;
}

/* look asks getaddrinfo(3). What it answers is the result, EAI_MEMORY or so. */
static int look(const char *node, const char *service, const struct rdma_addrinfo *hints, struct rdma_addrinfo *out)
{
	const int ps = hints ? hints->ai_port_space : 0;
	struct addrinfo want = { 0 }, *ai;
	bool ud;
	int rc;

	if (hints) {
		if (hints->ai_flags & RAI_PASSIVE)
			want.ai_flags |= AI_PASSIVE;
		if (hints->ai_flags & RAI_NUMERICHOST)
			want.ai_flags |= AI_NUMERICHOST;
		if (hints->ai_family != AF_IB)
			want.ai_family = hints->ai_family;
	}
	ud = ps == RDMA_PS_UDP || ps == RDMA_PS_IPOIB;
	want.ai_protocol = ud ? IPPROTO_UDP : ps == RDMA_PS_TCP ? IPPROTO_TCP : 0;
	if (hints && hints->ai_qp_type)
		ud = hints->ai_qp_type == IBV_QPT_UD; /* if it does not go with the port space, getaddrinfo says so */
	want.ai_socktype = ud ? SOCK_DGRAM : SOCK_STREAM;
	rc = getaddrinfo(node, service, &want, &ai);
	if (rc)
		return rc;
	out->ai_family = ai->ai_family;
	out->ai_qp_type = hints && hints->ai_qp_type ? hints->ai_qp_type : ud ? IBV_QPT_UD : IBV_QPT_RC;
	out->ai_port_space = ps ? ps : ud ? RDMA_PS_UDP : RDMA_PS_TCP;
	out->ai_flags = want.ai_flags & AI_PASSIVE ? RAI_PASSIVE : 0;
	if (want.ai_flags & AI_PASSIVE)
		rc = !copy(&out->ai_src_addr, &out->ai_src_len, ai->ai_addr, ai->ai_addrlen) || !name(&out->ai_src_canonname, ai->ai_canonname);
	else
		rc = !copy(&out->ai_dst_addr, &out->ai_dst_len, ai->ai_addr, ai->ai_addrlen) || !name(&out->ai_dst_canonname, ai->ai_canonname);
	freeaddrinfo(ai);
	return rc ? EAI_MEMORY : 0;
}

int rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints, struct rdma_addrinfo **res)
{
	struct cm_device *dev;
	struct rdma_addrinfo *ai;
	int rc = 0;

	if (!node && !service && !hints)
		return cm_fail(EINVAL);
	dev = cm_device_get();
	if (!dev)
		return -1;
	cm_device_put(dev);
	ai = calloc(1, sizeof(*ai));
	if (!ai)
		return cm_fail(ENOMEM);
	if (node || service) {
		rc = look(node, service, hints, ai);
	} else {
		ai->ai_flags = hints->ai_flags;
		ai->ai_family = hints->ai_family;
		ai->ai_qp_type = hints->ai_qp_type;
		ai->ai_port_space = hints->ai_port_space;
		if (!copy(&ai->ai_dst_addr, &ai->ai_dst_len, hints->ai_dst_addr, hints->ai_dst_len))
			rc = cm_fail(ENOMEM);
	}
	if (!rc && !ai->ai_src_len && hints && !copy(&ai->ai_src_addr, &ai->ai_src_len, hints->ai_src_addr, hints->ai_src_len))
		rc = cm_fail(ENOMEM);
	if (rc) {
		rdma_freeaddrinfo(ai);
		return rc;
	}
	*res = ai;
	return 0;
}

void rdma_freeaddrinfo(struct rdma_addrinfo *ai)
{
	while (ai) {
		struct rdma_addrinfo *next = ai->ai_next;

		free(ai->ai_connect);
		free(ai->ai_route);
		free(ai->ai_src_canonname);
		free(ai->ai_dst_canonname);
		free(ai->ai_src_addr);
		free(ai->ai_dst_addr);
		free(ai);
		ai = next;
	}
}
