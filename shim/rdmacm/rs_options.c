/* SPDX-License-Identifier: Apache-2.0
 *
 * rsetsockopt, rgetsockopt, rfcntl. Options that rsockets do not have are ENOPROTOOPT, and
 * sizes cannot be changed any more when the connection has been made. */
#include <endian.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

#include <infiniband/sa.h>

#include "rs.h"

static int get_int(const void *val, socklen_t len, int *v)
{
	if (!val)
		return rs_error(EFAULT);
	if (len < sizeof(*v))
		return rs_error(EINVAL);
	memcpy(v, val, sizeof(*v));
	return 0;
}

static int set_flag(bool *flag, const void *val, socklen_t len)
{
	int v;

	if (get_int(val, len, &v))
		return -1;
	*flag = v;
	return 0;
}

/* fixed says whether the sizes are in use. */
static bool fixed(const struct rsock *s)
{
	return s->cq;
}

/* get_size takes a size, which may be given until the sizes are in use. */
static int get_size(struct rsock *s, const void *val, socklen_t len, int *v)
{
	if (get_int(val, len, v))
		return -1;
	if (*v < 0)
		return rs_error(EINVAL);
	if (fixed(s))
		return rs_error(EOPNOTSUPP);
	return 0;
}

/* set_buffer sets a buffer's size to twice what was asked for, as socket(7) has it. */
static int set_buffer(struct rsock *s, uint32_t *size, const void *val, socklen_t len)
{
	int v;

	if (get_size(s, val, len, &v))
		return -1;
	*size = (uint32_t)v < RS_VALUE_MASK / 2 ? 2 * (uint32_t)v : RS_VALUE_MASK - 1;
	return 0;
}

static int set_size(struct rsock *s, uint16_t *size, const void *val, socklen_t len, int max)
{
	int v;

	if (get_size(s, val, len, &v))
		return -1;
	*size = v < max ? v : max;
	return 0;
}

static int set_time(struct timespec *t, const void *val, socklen_t len)
{
	struct timeval tv;

	if (len < sizeof(tv))
		return rs_error(EINVAL);
	memcpy(&tv, val, sizeof(tv));
	if (tv.tv_sec < 0 || tv.tv_usec < 0 || tv.tv_usec >= 1000000)
		return rs_error(EDOM);
	*t = (struct timespec){tv.tv_sec, tv.tv_usec * 1000};
	return 0;
}

static int set_socket(struct rsock *s, int name, const void *val, socklen_t len)
{
	int rc;

	switch (name) {
	case SO_SNDBUF:
		return set_buffer(s, &s->sbuf_size, val, len);
	case SO_RCVBUF:
		return set_buffer(s, &s->rbuf_size, val, len);
	case SO_LINGER:
		if (len < sizeof(s->linger))
			return rs_error(EINVAL);
		memcpy(&s->linger, val, sizeof(s->linger));
		return 0;
	case SO_KEEPALIVE:
		rc = set_flag(&s->keepalive, val, len);
		if (!rc)
			rs_serve(s);
		return rc;
	case SO_OOBINLINE:
		return set_flag(&s->oobinline, val, len);
	case SO_REUSEADDR:
		return set_flag(&s->reuse, val, len);
	case SO_RCVTIMEO:
		return set_time(&s->rcvtimeo, val, len);
	case SO_SNDTIMEO:
		return set_time(&s->sndtimeo, val, len);
	}
	return rs_error(ENOPROTOOPT);
}

static int set_keep(struct rsock *s, int *field, const void *val, socklen_t len, int max)
{
	int v;

	if (get_int(val, len, &v))
		return -1;
	if (v < 1 || v > max)
		return rs_error(EINVAL);
	*field = v;
	if (s->serve_keep) { /* from now on so */
		rs_unserve(s);
		rs_serve(s);
	}
	return 0;
}

static int set_tcp(struct rsock *s, int name, const void *val, socklen_t len)
{
	int v;

	switch (name) {
	case TCP_NODELAY: /* is always so */
		return set_flag(&s->nodelay, val, len);
	case TCP_MAXSEG: /* a hint: packets are the path's MTU */
		return get_int(val, len, &v);
	case TCP_KEEPIDLE:
		return set_keep(s, &s->keep_idle, val, len, 32767);
	case TCP_KEEPINTVL:
		return set_keep(s, &s->keep_interval, val, len, 32767);
	case TCP_KEEPCNT:
		return set_keep(s, &s->keep_count, val, len, 127);
	}
	return rs_error(ENOPROTOOPT);
}

static int set_route(struct rsock *s, const void *val, socklen_t len)
{
	void *copy;

	if (s->type != SOCK_STREAM || !len || len % sizeof(struct ibv_path_data))
		return rs_error(EINVAL);
	if (s->state > RS_BOUND)
		return rs_error(EISCONN);
	copy = malloc(len);
	if (!copy)
		return -1;
	memcpy(copy, val, len);
	free(s->route);
	s->route = copy;
	s->route_len = len;
	return 0;
}

static int set_rdma(struct rsock *s, int name, const void *val, socklen_t len)
{
	int rc;

	switch (name) {
	case RDMA_SQSIZE:
		return set_size(s, &s->sq_size, val, len, RS_MAX_QUEUE);
	case RDMA_RQSIZE:
		return set_size(s, &s->rq_size, val, len, RS_MAX_QUEUE);
	case RDMA_INLINE:
		return set_size(s, &s->inline_size, val, len, UINT16_MAX);
	case RDMA_IOMAPSIZE:
		rc = set_size(s, &s->iomap_size, val, len, 0x7f00);
		if (!rc)
			s->iomap_size = rs_unscale(rs_scale(s->iomap_size));
		return rc;
	case RDMA_ROUTE:
		return set_route(s, val, len);
	}
	return rs_error(ENOPROTOOPT);
}

int rsetsockopt(int socket, int level, int optname, const void *optval, socklen_t optlen)
{
	struct rsock *s = rs_get(socket);
	int rc;

	if (!s)
		return -1;
	pthread_mutex_lock(&s->lock);
	if (!optval && optlen)
		rc = rs_error(EFAULT);
	else if (level == SOL_SOCKET)
		rc = set_socket(s, optname, optval, optlen);
	else if (level == IPPROTO_TCP && s->type == SOCK_STREAM)
		rc = set_tcp(s, optname, optval, optlen);
	else if (level == IPPROTO_IPV6 && s->domain == AF_INET6 && optname == IPV6_V6ONLY)
		rc = s->state == RS_IDLE ? set_flag(&s->v6only, optval, optlen) : rs_error(EINVAL);
	else if (level == SOL_RDMA)
		rc = set_rdma(s, optname, optval, optlen);
	else
		rc = rs_error(ENOPROTOOPT);
	pthread_mutex_unlock(&s->lock);
	rs_put(s);
	return rc;
}

/* give hands out a value, as much as there is room for. */
static int give(void *val, socklen_t *len, const void *from, socklen_t size)
{
	if (!val || !len)
		return rs_error(EFAULT);
	if (*len > size)
		*len = size;
	memcpy(val, from, *len);
	return 0;
}

static int give_int(void *val, socklen_t *len, int v)
{
	return give(val, len, &v, sizeof(v));
}

static int give_time(void *val, socklen_t *len, const struct timespec *t)
{
	struct timeval tv = {t->tv_sec, t->tv_nsec / 1000};

	return give(val, len, &tv, sizeof(tv));
}

static int get_socket(struct rsock *s, int name, void *val, socklen_t *len)
{
	int err;

	switch (name) {
	case SO_ERROR:
		rs_progress(s);
		err = s->error;
		s->error = 0;
		return give_int(val, len, err);
	case SO_TYPE:
		return give_int(val, len, s->type);
	case SO_DOMAIN:
		return give_int(val, len, s->domain);
	case SO_PROTOCOL:
		return give_int(val, len, s->type == SOCK_STREAM ? IPPROTO_TCP : IPPROTO_UDP);
	case SO_ACCEPTCONN:
		return give_int(val, len, s->state == RS_LISTENING);
	case SO_SNDBUF:
		return give_int(val, len, s->sbuf_size);
	case SO_RCVBUF:
		return give_int(val, len, s->rbuf_size);
	case SO_LINGER:
		return give(val, len, &s->linger, sizeof(s->linger));
	case SO_KEEPALIVE:
		return give_int(val, len, s->keepalive);
	case SO_OOBINLINE:
		return give_int(val, len, s->oobinline);
	case SO_REUSEADDR:
		return give_int(val, len, s->reuse);
	case SO_RCVTIMEO:
		return give_time(val, len, &s->rcvtimeo);
	case SO_SNDTIMEO:
		return give_time(val, len, &s->sndtimeo);
	}
	return rs_error(ENOPROTOOPT);
}

static int get_tcp(struct rsock *s, int name, void *val, socklen_t *len)
{
	switch (name) {
	case TCP_NODELAY:
		return give_int(val, len, s->nodelay);
	case TCP_MAXSEG:
		return give_int(val, len, s->id && s->id->route.num_paths ? 128 << s->id->route.path_rec->mtu : 2048);
	case TCP_KEEPIDLE:
		return give_int(val, len, s->keep_idle);
	case TCP_KEEPINTVL:
		return give_int(val, len, s->keep_interval);
	case TCP_KEEPCNT:
		return give_int(val, len, s->keep_count);
	}
	return rs_error(ENOPROTOOPT);
}

/* path_data is a path as RDMA_ROUTE has it: big-endian, as in a path record. */
static struct ibv_path_data path_data(const struct ibv_sa_path_rec *r)
{
	struct ibv_path_data d = {.flags = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL};

	d.path.dgid = r->dgid;
	d.path.sgid = r->sgid;
	d.path.dlid = r->dlid;
	d.path.slid = r->slid;
	d.path.flowlabel_hoplimit = htobe32(be32toh(r->flow_label) << 8 | r->hop_limit);
	d.path.tclass = r->traffic_class;
	d.path.reversible_numpath = r->reversible << 7 | r->numb_path;
	d.path.pkey = r->pkey;
	d.path.qosclass_sl = htobe16(r->sl);
	d.path.mtu = r->mtu | r->mtu_selector << 6;
	d.path.rate = r->rate | r->rate_selector << 6;
	d.path.packetlifetime = r->packet_life_time | r->packet_life_time_selector << 6;
	return d;
}

static int get_route(struct rsock *s, void *val, socklen_t *len)
{
	struct ibv_path_data d;

	if (s->route)
		return give(val, len, s->route, s->route_len);
	if (!s->id || !s->id->route.num_paths)
		return rs_error(ENODATA);
	d = path_data(s->id->route.path_rec);
	return give(val, len, &d, sizeof(d));
}

static int get_rdma(struct rsock *s, int name, void *val, socklen_t *len)
{
	switch (name) {
	case RDMA_SQSIZE:
		return give_int(val, len, s->sq_size);
	case RDMA_RQSIZE:
		return give_int(val, len, s->rq_size);
	case RDMA_INLINE:
		return give_int(val, len, s->inline_size);
	case RDMA_IOMAPSIZE:
		return give_int(val, len, s->iomap_size);
	case RDMA_ROUTE:
		return get_route(s, val, len);
	}
	return rs_error(ENOPROTOOPT);
}

int rgetsockopt(int socket, int level, int optname, void *optval, socklen_t *optlen)
{
	struct rsock *s = rs_get(socket);
	int rc;

	if (!s)
		return -1;
	pthread_mutex_lock(&s->lock);
	if (level == SOL_SOCKET)
		rc = get_socket(s, optname, optval, optlen);
	else if (level == IPPROTO_TCP && s->type == SOCK_STREAM)
		rc = get_tcp(s, optname, optval, optlen);
	else if (level == IPPROTO_IPV6 && s->domain == AF_INET6 && optname == IPV6_V6ONLY)
		rc = give_int(optval, optlen, s->v6only);
	else if (level == SOL_RDMA)
		rc = get_rdma(s, optname, optval, optlen);
	else
		rc = rs_error(ENOPROTOOPT);
	pthread_mutex_unlock(&s->lock);
	rs_put(s);
	return rc;
}

int rfcntl(int socket, int cmd, ...)
{
	struct rsock *s = rs_get(socket);
	va_list args;
	int arg, rc;

	if (!s)
		return -1;
	va_start(args, cmd);
	arg = va_arg(args, int); /* what is not read if cmd has none */
	va_end(args);
	switch (cmd) {
	case F_GETFL:
		rc = O_RDWR | (s->nonblock ? O_NONBLOCK : 0);
		break;
	case F_SETFL:
		s->nonblock = arg & O_NONBLOCK;
		rc = 0;
		break;
	case F_GETFD:
	case F_SETFD:
		rc = fcntl(s->fd, cmd, arg);
		break;
	default:
		rc = rs_error(ENOTSUP);
	}
	rs_put(s);
	return rc;
}
