/* SPDX-License-Identifier: Apache-2.0
 *
 * Where datagrams go to: which of our addresses is used, which frame address is next, and,
 * once the peer has told, which queue pair. */
#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

#include "rs_dgram.h"

bool rs_same_addr(const union rs_addr *a, const union rs_addr *b)
{
	if (a->sa.sa_family != b->sa.sa_family)
		return false;
	if (a->sa.sa_family == AF_INET)
		return a->in.sin_port == b->in.sin_port && a->in.sin_addr.s_addr == b->in.sin_addr.s_addr;
	return a->in6.sin6_port == b->in6.sin6_port && !memcmp(&a->in6.sin6_addr, &b->in6.sin6_addr, 16);
}

/* rs_gid is an address as a GID: IPv4 is mapped (IBA A17.4.2). */
union ibv_gid rs_gid(const union rs_addr *a)
{
	union ibv_gid g = {0};

	if (a->sa.sa_family == AF_INET6) {
		memcpy(g.raw, &a->in6.sin6_addr, 16);
		return g;
	}
	g.raw[10] = g.raw[11] = 0xff;
	memcpy(g.raw + 12, &a->in.sin_addr, 4);
	return g;
}

/* rs_gid_index gives where our address is among the port's, or -1. */
int rs_gid_index(struct rs_dgram *d, const union rs_addr *local)
{
	union ibv_gid want = rs_gid(local), g;

	for (int i = 0; i < d->n_gids; i++)
		if (!ibv_query_gid(d->ctx, 1, i, &g) && !memcmp(&g, &want, sizeof(g)))
			return i;
	return rs_error(EADDRNOTAVAIL);
}

struct rs_dest *rs_find_dest(struct rs_dgram *d, const union rs_addr *addr)
{
	struct rs_dest **p, *dest;

	for (p = &d->dests; (dest = *p); p = &dest->next)
		if (rs_same_addr(&dest->addr, addr)) {
			*p = dest->next;
			dest->next = d->dests;
			d->dests = dest;
			return dest;
		}
	return NULL;
}

static void free_dest(struct rs_dest *dest)
{
	if (dest->ah)
		ibv_destroy_ah(dest->ah);
	free(dest);
}

void rs_free_dests(struct rs_dgram *d)
{
	struct rs_dest *dest;

	while ((dest = d->dests)) {
		d->dests = dest->next;
		free_dest(dest);
	}
}

struct rs_dest *rs_add_dest(struct rs_dgram *d, const union rs_addr *addr, const union rs_addr *local, int sgid_index, const uint8_t mac[6])
{
	struct rs_dest *dest = calloc(1, sizeof(*dest)), **last;

	if (!dest)
		return NULL;
	if (d->n_dests == MAX_DESTS) {
		for (last = &d->dests; (*last)->next; last = &(*last)->next)
			;
		free_dest(*last);
		*last = NULL;
		d->n_dests--;
	}
	dest->addr = *addr;
	dest->local = *local;
	dest->sgid_index = sgid_index;
	memcpy(dest->mac, mac, sizeof(dest->mac));
	dest->next = d->dests;
	d->dests = dest;
	d->n_dests++;
	return dest;
}

static struct ibv_ah_attr ah_attr(const union rs_addr *addr, int sgid_index)
{
	struct ibv_ah_attr a = {.is_global = 1, .port_num = 1, .grh = {.dgid = rs_gid(addr), .sgid_index = sgid_index, .hop_limit = 64}};

	return a;
}

/* choose_local asks the connection manager from which address this one is reached. */
static int choose_local(const union rs_addr *addr, union rs_addr *local)
{
	struct rdma_cm_id *id;
	int rc, err;

	if (rdma_create_id(NULL, &id, NULL, RDMA_PS_UDP)) /* without a channel: calls wait */
		return -1;
	rc = rdma_resolve_addr(id, NULL, (struct sockaddr *)addr, RS_RESOLVE_MS);
	err = errno;
	if (!rc)
		memcpy(local, rdma_get_local_addr(id), rs_addrlen(&addr->sa));
	rdma_destroy_id(id);
	return rc ? rs_error(err) : 0;
}

static bool any(const union rs_addr *a)
{
	return a->sa.sa_family == AF_INET ? !a->in.sin_addr.s_addr : IN6_IS_ADDR_UNSPECIFIED(&a->in6.sin6_addr);
}

/* find_out finds out how an address is reached. Called without the lock. */
static int find_out(struct rsock *s, const union rs_addr *addr, union rs_addr *local, int *index, uint8_t mac[6])
{
	struct rs_dgram *d = s->dgram;
	struct ibv_ah_attr attr;
	uint16_t vid;
	int err;

	memcpy(local, rdma_get_local_addr(s->id), sizeof(*local));
	local->sa.sa_family = s->domain;
	if (any(local) && choose_local(addr, local))
		return -1;
	*index = rs_gid_index(d, local);
	if (*index < 0)
		return -1;
	attr = ah_attr(addr, *index);
	err = ibv_resolve_eth_l2_from_gid(d->ctx, &attr, mac, &vid);
	if (err)
		return err < 0 ? -1 : rs_error(err);
	if (s->domain == AF_INET)
		local->in.sin_port = d->port;
	else
		local->in6.sin6_port = d->port;
	return 0;
}

/* make_ah makes the address handle for a peer that has told its queue pair. Without one, UDP
 * goes on. Gives the destination again, which may have made room for another meanwhile. */
static struct rs_dest *make_ah(struct rsock *s, struct rs_dest *dest)
{
	union rs_addr addr = dest->addr;
	struct ibv_ah_attr attr = ah_attr(&addr, dest->sgid_index);
	struct ibv_ah *ah;

	dest->heard = false;
	pthread_mutex_unlock(&s->lock);
	ah = ibv_create_ah(s->dgram->pd, &attr);
	pthread_mutex_lock(&s->lock);
	dest = rs_find_dest(s->dgram, &addr);
	if (dest && !dest->ah)
		dest->ah = ah;
	else if (ah)
		ibv_destroy_ah(ah);
	if (!dest)
		errno = ENOBUFS;
	return dest;
}

/* rs_resolve_dest gives the destination with this address, and finds it out if it is new.
 * The peer, or its neighbour, is asked for its MAC, which may take a while; so the socket's
 * lock is given up meanwhile. */
struct rs_dest *rs_resolve_dest(struct rsock *s, const union rs_addr *addr)
{
	struct rs_dgram *d = s->dgram;
	struct rs_dest *dest = rs_find_dest(d, addr);
	union rs_addr local = {0};
	uint8_t mac[6];
	int index, rc, err;

	if (!dest) {
		pthread_mutex_unlock(&s->lock);
		rc = find_out(s, addr, &local, &index, mac);
		err = errno;
		pthread_mutex_lock(&s->lock);
		if (rc) {
			errno = err;
			return NULL;
		}
		dest = rs_find_dest(d, addr); /* it may have been heard of meanwhile */
		if (!dest)
			dest = rs_add_dest(d, addr, &local, index, mac);
	}
	return dest && dest->heard && !dest->ah ? make_ah(s, dest) : dest;
}

/* rs_learn_qpn: the peer has told which queue pair it has. */
void rs_learn_qpn(struct rs_dest *dest, uint32_t qpn)
{
	dest->heard = !dest->ah;
	dest->qpn = qpn;
}
