/* SPDX-License-Identifier: Apache-2.0
 *
 * Flows, which bring frames to RAW_PACKET queue pairs, and their counters. */
#include <endian.h>
#include <stdlib.h>

#include "tv.h"

struct tv_flow {
	struct ibv_flow ibv;
	tv_handle handle;
};

struct tv_flow_counters {
	struct ibv_counters ibv;
	tv_handle handle;
};

static void from_eth(struct tv_flow_filter *o, const struct ibv_flow_eth_filter *f)
{
	memcpy(o->dst_mac, f->dst_mac, sizeof(o->dst_mac));
	memcpy(o->src_mac, f->src_mac, sizeof(o->src_mac));
	o->ether_type = be16toh(f->ether_type);
	o->vlan_tag = be16toh(f->vlan_tag);
}

static void from_ipv4(struct tv_flow_filter *o, const struct ibv_flow_ipv4_filter *f)
{
	memcpy(o->src_ip, &f->src_ip, 4);
	memcpy(o->dst_ip, &f->dst_ip, 4);
}

static void from_ipv4_ext(struct tv_flow_filter *o, const struct ibv_flow_ipv4_ext_filter *f)
{
	memcpy(o->src_ip, &f->src_ip, 4);
	memcpy(o->dst_ip, &f->dst_ip, 4);
	o->proto = f->proto;
	o->tclass = f->tos;
	o->ttl = f->ttl;
	o->flags = f->flags;
}

static void from_ipv6(struct tv_flow_filter *o, const struct ibv_flow_ipv6_filter *f)
{
	memcpy(o->src_ip, f->src_ip, 16);
	memcpy(o->dst_ip, f->dst_ip, 16);
	o->flow_label = be32toh(f->flow_label);
	o->proto = f->next_hdr;
	o->tclass = f->traffic_class;
	o->ttl = f->hop_limit;
}

static void from_ports(struct tv_flow_filter *o, const struct ibv_flow_tcp_udp_filter *f)
{
	o->src_port = be16toh(f->src_port);
	o->dst_port = be16toh(f->dst_port);
}

/* FILTER takes over a spec with value and mask. */
#define FILTER(kind, field, from)                                                                  \
	do {                                                                                       \
		if (size != sizeof(s.field))                                                       \
			return EINVAL;                                                             \
		memcpy(&s.field, at, sizeof(s.field));                                             \
		o->type = kind;                                                                    \
		from(&o->val, &s.field.val);                                                       \
		from(&o->mask, &s.field.mask);                                                     \
	} while (0)

#define ACTION(kind, field)                                                                        \
	do {                                                                                       \
		if (size != sizeof(s.field))                                                       \
			return EINVAL;                                                             \
		memcpy(&s.field, at, sizeof(s.field));                                             \
		o->type = kind;                                                                    \
	} while (0)

/* get_spec reads the spec at a place in the program's buffer, of which it knows only
 * that type and size are there: nothing else is read before the size is what the type
 * asks for. */
static int get_spec(struct tv_flow_spec *o, const char *at, uint16_t *len)
{
	struct ibv_flow_spec s;
	uint32_t type;
	uint16_t size;

	memcpy(&type, at + offsetof(struct ibv_flow_spec, hdr.type), sizeof(type));
	memcpy(&size, at + offsetof(struct ibv_flow_spec, hdr.size), sizeof(size));
	*len = size;
	switch (type) {
	case IBV_FLOW_SPEC_ETH:
		FILTER(TV_FLOW_ETH, eth, from_eth);
		return 0;
	case IBV_FLOW_SPEC_IPV4:
		FILTER(TV_FLOW_IPV4, ipv4, from_ipv4);
		return 0;
	case IBV_FLOW_SPEC_IPV4_EXT:
		FILTER(TV_FLOW_IPV4, ipv4_ext, from_ipv4_ext);
		return 0;
	case IBV_FLOW_SPEC_IPV6:
		FILTER(TV_FLOW_IPV6, ipv6, from_ipv6);
		return 0;
	case IBV_FLOW_SPEC_TCP:
		FILTER(TV_FLOW_TCP, tcp_udp, from_ports);
		return 0;
	case IBV_FLOW_SPEC_UDP:
		FILTER(TV_FLOW_UDP, tcp_udp, from_ports);
		return 0;
	case IBV_FLOW_SPEC_ACTION_TAG:
		ACTION(TV_FLOW_TAG, flow_tag);
		o->tag = s.flow_tag.tag_id;
		return 0;
	case IBV_FLOW_SPEC_ACTION_DROP:
		ACTION(TV_FLOW_DROP, drop);
		return 0;
	case IBV_FLOW_SPEC_ACTION_COUNT:
		ACTION(TV_FLOW_COUNT, flow_count);
		if (!s.flow_count.counters)
			return EINVAL;
		o->counters = ((struct tv_flow_counters *)s.flow_count.counters)->handle;
		return 0;
	case IBV_FLOW_SPEC_ESP:
	case IBV_FLOW_SPEC_VXLAN_TUNNEL:
	case IBV_FLOW_SPEC_GRE:
	case IBV_FLOW_SPEC_MPLS:
	case IBV_FLOW_SPEC_ACTION_HANDLE:
	case IBV_FLOW_SPEC_INNER | IBV_FLOW_SPEC_ETH:
	case IBV_FLOW_SPEC_INNER | IBV_FLOW_SPEC_IPV4:
	case IBV_FLOW_SPEC_INNER | IBV_FLOW_SPEC_IPV4_EXT:
	case IBV_FLOW_SPEC_INNER | IBV_FLOW_SPEC_IPV6:
	case IBV_FLOW_SPEC_INNER | IBV_FLOW_SPEC_TCP:
	case IBV_FLOW_SPEC_INNER | IBV_FLOW_SPEC_UDP:
	case IBV_FLOW_SPEC_INNER | IBV_FLOW_SPEC_MPLS:
		return EOPNOTSUPP;
	}
	return EINVAL;
}

/* As in rdma-core, num_of_specs and the specs' own sizes say how long the buffer is;
 * size of the attributes is not looked at, and many programs leave it wrong. */
struct ibv_flow *tv_create_flow(struct ibv_qp *qp, struct ibv_flow_attr *a)
{
	struct tv_flow_attr t = { .type = a->type, .priority = a->priority, .port = a->port, .num = a->num_of_specs };
	const char *at = (const char *)(a + 1);
	struct tv_flow *flow;
	uint16_t len;
	int rc;

	TV_THERE(qp->context, NULL);
	if (a->comp_mask || a->num_of_specs > TV_FLOW_SPECS || a->flags & ~(IBV_FLOW_ATTR_FLAGS_DONT_TRAP | IBV_FLOW_ATTR_FLAGS_EGRESS))
		return tv_null(EINVAL);
	if (a->flags & IBV_FLOW_ATTR_FLAGS_EGRESS)
		return tv_null(EOPNOTSUPP);
	t.dont_trap = !!(a->flags & IBV_FLOW_ATTR_FLAGS_DONT_TRAP);
	for (int i = 0; i < a->num_of_specs; i++) {
		rc = get_spec(&t.specs[i], at, &len);
		if (rc)
			return tv_null(rc);
		at += len;
	}
	flow = calloc(1, sizeof(*flow));
	if (!flow)
		return NULL;
	rc = tv_e->create_flow(((struct tv_qp *)qp)->handle, &t);
	if (rc) {
		free(flow);
		return tv_null(rc);
	}
	flow->handle = t.handle;
	flow->ibv.context = qp->context;
	flow->ibv.handle = t.handle;
	return &flow->ibv;
}

int tv_destroy_flow(struct ibv_flow *ibflow)
{
	struct tv_flow *flow = (struct tv_flow *)ibflow;
	int rc;

	TV_ALIVE(EIO);
	rc = tv_e->destroy(flow->handle);
	if (rc)
		return tv_fail(rc);
	free(flow);
	return 0;
}

struct ibv_counters *tv_create_counters(struct ibv_context *ctx, struct ibv_counters_init_attr *a)
{
	struct tv_flow_counters *c;
	int rc;

	TV_THERE(ctx, NULL);
	if (a->comp_mask)
		return tv_null(EOPNOTSUPP);
	c = calloc(1, sizeof(*c));
	if (!c)
		return NULL;
	rc = tv_e->create_counters(tv_ctx_handle(ctx), &c->handle);
	if (rc) {
		free(c);
		return tv_null(rc);
	}
	c->ibv.context = ctx;
	return &c->ibv;
}

int tv_destroy_counters(struct ibv_counters *ibc)
{
	struct tv_flow_counters *c = (struct tv_flow_counters *)ibc;
	int rc;

	TV_ALIVE(EIO);
	rc = tv_e->destroy(c->handle);
	if (rc)
		return tv_fail(rc);
	free(c);
	return 0;
}

/* Static attach is what there is: to a flow that exists nothing can be added. */
int tv_attach_counters(struct ibv_counters *c, struct ibv_counter_attach_attr *a, struct ibv_flow *flow)
{
	TV_THERE(c->context, EIO);
	if (flow)
		return tv_fail(ENOTSUP);
	if (a->comp_mask)
		return tv_fail(EOPNOTSUPP);
	return tv_fail(tv_e->attach_counters(((struct tv_flow_counters *)c)->handle, a->counter_desc, a->index));
}

/* There is no cache: the values are always those of now. */
int tv_read_counters(struct ibv_counters *c, uint64_t *values, uint32_t n, uint32_t flags)
{
	uint64_t v[TV_COUNTERS];
	uint32_t m = n < TV_COUNTERS ? n : TV_COUNTERS;
	int rc;

	TV_THERE(c->context, EIO);
	if (flags & ~(uint32_t)IBV_READ_COUNTERS_ATTR_PREFER_CACHED)
		return tv_fail(EINVAL);
	rc = tv_e->read_counters(((struct tv_flow_counters *)c)->handle, v, m);
	if (rc)
		return tv_fail(rc);
	memset(values, 0, n * sizeof(*values));
	memcpy(values, v, m * sizeof(*values));
	return 0;
}
