/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A child of fork(2) has copies of the parent's pages, of those that are there: regions
 * stay the parent's, and what is absent or evicted the child has to get. The kernel gives
 * the child's memory a userfaultfd of its own where the parent's had one, and has the
 * parent wait in fork until the pager has read of it (UFFD_EVENT_FORK).
 *
 * What is in limbo is copied into the child there and then. What is stored may be much
 * more than memory holds, and most children exec at once: so the slots are held, a fault
 * of the child's is answered first, and the rest is placed one after the other while there
 * is nothing else to do. Where nothing is evicted the child's memory is unregistered, so
 * that the kernel gives it zeros; and in the end all of it. It is not enough to close the
 * descriptor: another child may have got a copy of it.
 *
 * What the parent's other threads do to memory while one of them is in fork, the child may
 * see or not, as ever. What happens after fork has returned it does not see: engines have
 * been kept out, and nothing was brought back, when the pages were taken note of.
 *
 * A parent that ends has its children's pages placed first (tv_family_end). If it is killed
 * before, pages that a child still waits for read as zeros, as the kernel then drops the
 * userfaultfd. After fork the C library waits until that is only so for much content.
 */
#define _GNU_SOURCE
#include "fork.h"
#include "store.h"
#include "words.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define CHUNK_SHIFT 21 /* what is noted to be armed, as is a leaf */
#define CHUNK (1ull << CHUNK_SHIFT)

enum {
	BATCH = 32,          /* pages placed between looks at whether somebody waits */
	PLACED = UINT32_MAX, /* instead of a slot */
	KEPT = UINT32_MAX - 1, /* so, too: the content is here */
	SPOILED = UINT32_MAX - 2, /* the content is not to be had: the child has to find that out, by a signal */
};

/* A page that is stored, and where the child has it. */
struct page {
	uint64_t va;
	uint32_t slot;
	char *content; /* with KEPT */
};

struct span {
	uint64_t start, end;
};

struct child {
	struct child *next;
	int fd;
	struct page *page; /* by address */
	size_t n, cap, at; /* what is before at has been placed */
	size_t left;       /* that are not placed */
	struct span *moved; /* by the child's mremap: registered there, too */
	size_t nmoved;
	int admitted; /* is among those that are served */
};

struct tv_family {
	struct tv_shared *sh;
	struct child *first;
	int epoll, spare; /* spare: a descriptor that makes room for a child's */
};

void tv_mark_armed(struct tv_shared *sh, uint64_t start, uint64_t end)
{
	for (uint64_t c = start >> CHUNK_SHIFT; c < (end + CHUNK - 1) >> CHUNK_SHIFT;) {
		uint64_t stop = (c | 63) + 1, last = (end + CHUNK - 1) >> CHUNK_SHIFT;
		if (stop > last)
			stop = last;
		uint64_t n = stop - c, bits = (n == 64 ? ~0ull : (1ull << n) - 1) << c % 64;
		if ((load64(&sh->armed[c / 64]) & bits) != bits)
			__atomic_fetch_or(&sh->armed[c / 64], bits, __ATOMIC_SEQ_CST);
		__atomic_fetch_or(&sh->armed_near[c >> 15], 1ull << (c >> 9) % 64, __ATOMIC_SEQ_CST);
		c = stop;
	}
}

struct tv_family *tv_family_new(struct tv_shared *sh)
{
	struct tv_family *f = calloc(1, sizeof *f);
	if (!f)
		return NULL;
	f->sh = sh;
	f->epoll = epoll_create1(EPOLL_CLOEXEC);
	f->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (f->epoll >= 0 && f->spare >= 0)
		return f;
	int err = errno;
	if (f->epoll >= 0)
		close(f->epoll);
	free(f);
	errno = err;
	return NULL;
}

int tv_family_fd(struct tv_family *f) { return f->epoll; }

int tv_family_busy(struct tv_family *f) { return f->first != NULL; }

long tv_family_read(struct tv_family *f, int uffd, void *msg, unsigned long n)
{
	ssize_t got = read(uffd, msg, n);
	if (got < 0 && (errno == EMFILE || errno == ENFILE) && f->spare >= 0) {
		close(f->spare);
		f->spare = -1;
		got = read(uffd, msg, n);
	}
	struct rlimit was, more;
	if (got < 0 && errno == EMFILE && getrlimit(RLIMIT_NOFILE, &was) == 0) {
		/* The limit has been lowered since: it is lifted for the moment. */
		more = was;
		more.rlim_cur = was.rlim_max;
		if (setrlimit(RLIMIT_NOFILE, &more) == 0) {
			got = read(uffd, msg, n);
			setrlimit(RLIMIT_NOFILE, &was);
		}
	}
	return got;
}

/* hold counts those who may read a slot up or down; 0 if there are too many. */
static int hold(struct tv_shared *sh, uint32_t slot, int by)
{
	uint16_t *h = (uint16_t *)load64(&sh->store_held) + slot, was = __atomic_load_n(h, __ATOMIC_SEQ_CST);
	do
		if (by > 0 && was == UINT16_MAX)
			return 0;
	while (!__atomic_compare_exchange_n(h, &was, was + by, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
	return 1;
}

/*
 * over says whether a child has ended. There UNREGISTER has ENOMEM for an answer, as where a
 * mapping cannot be divided; of code it would never say that.
 */
static int over(int fd)
{
	struct uffdio_range r = { .start = (uint64_t)(uintptr_t)over & ~(PAGE - 1), .len = PAGE };
	return ioctl(fd, UFFDIO_UNREGISTER, &r) < 0 && (errno == ENOMEM || errno == ESRCH);
}

/* unregister takes memory of a child out of userfaultfd; what else is there stays as it is. ESRCH: the child has ended. */
static int unregister(int fd, uint64_t start, uint64_t end)
{
	struct uffdio_range r = { .start = start, .len = end - start };
	if (start >= end || ioctl(fd, UFFDIO_UNREGISTER, &r) == 0)
		return 0;
	/* Most children end soon, and what they had may be large. */
	if (errno == ESRCH || (errno == ENOMEM && over(fd)))
		return ESRCH;
	if (end - start <= PAGE)
		return 0;
	/* A part of it is not mapped, or of a kind that cannot be registered. */
	uint64_t mid = start + ((end - start) / 2 & ~(PAGE - 1));
	int err = unregister(fd, start, mid);
	return err ? err : unregister(fd, mid, end);
}

/* unregister_all does so with all that was the parent's, but for chunks that pages are to be placed in. */
static int unregister_all(struct tv_shared *sh, struct child *c, int keep)
{
	uint64_t from = 0, to = 0; /* found so far */
	size_t k = 0;
	for (uint64_t g = 0; g < TV_L1_NODES; g++) {
		if (!load64(&sh->armed_near[g / 64])) {
			g |= 63;
			continue;
		}
		if (!(load64(&sh->armed_near[g / 64]) >> g % 64 & 1))
			continue;
		for (uint64_t i = g * 512; i < (g + 1) * 512; i++) {
			uint64_t start = i << CHUNK_SHIFT;
			if (!(load64(&sh->armed[i / 64]) >> i % 64 & 1))
				continue;
			while (keep && k < c->n && c->page[k].va < start)
				k++;
			if (keep && k < c->n && c->page[k].va < start + CHUNK)
				continue;
			if (start != to) {
				if (unregister(c->fd, from, to))
					return ESRCH;
				from = start;
			}
			to = start + CHUNK;
		}
	}
	return unregister(c->fd, from, to);
}

/*
 * fill has the kernel put something in a child's page: 0 or an errno. EEXIST: it has it.
 * EAGAIN: a change of its mappings has not been read yet.
 *
 * The kernel looks whether there is such a change before it looks for the mapping, so a
 * change that comes in between, an mremap say, is taken for a page that is not mapped:
 * ENOENT. Only who asks again, and has read nothing in between, knows: what hid the page
 * the first time has been read of by now, or the answer is EAGAIN.
 */
static int fill(int fd, unsigned long how, void *arg)
{
	struct timespec t = { 0, 50000 };
	for (int i = 0, absent = 0;; i++) {
		if (ioctl(fd, how, arg) == 0)
			return 0;
		if (errno == ENOENT && !absent) {
			absent = 1;
			continue;
		}
		/* No memory: wait for some, as the child would have to, but not for ever. */
		if (errno != ENOMEM || i >= 100)
			return errno;
		nanosleep(&t, NULL);
	}
}

/* give copies a page into a child, as fill does. */
static int give(int fd, uint64_t va, const void *src)
{
	struct uffdio_copy u = { .dst = va, .src = (uint64_t)(uintptr_t)src, .len = PAGE };
	return fill(fd, UFFDIO_COPY, &u);
}

/* changing says whether a change of a child's mappings is under way, or was not read yet. */
static int changing(int fd)
{
	/* Nothing is ever put there: it is code. */
	struct uffdio_zeropage z = { .range = { .start = (uint64_t)(uintptr_t)over & ~(PAGE - 1), .len = PAGE } };
	return ioctl(fd, UFFDIO_ZEROPAGE, &z) < 0 && errno == EAGAIN;
}

static void wake(int fd, uint64_t va)
{
	struct uffdio_range r = { .start = va, .len = PAGE };
	ioctl(fd, UFFDIO_WAKE, &r);
}

/* poison has the child find out, by a signal, that a page's content is not to be had: zeros would be wrong. */
static int poison(int fd, uint64_t va)
{
	struct poison a = { .start = va, .len = PAGE };
	int err = fill(fd, IOC_POISON, &a);
	if (err != EAGAIN && err != ESRCH)
		wake(fd, va);
	return err;
}

/* drop forgets a page that is to be placed. */
static void drop(struct tv_family *f, struct child *c, struct page *p)
{
	if (p->slot == PLACED)
		return;
	if (p->slot < SPOILED)
		hold(f->sh, p->slot, -1);
	free(p->content);
	p->content = NULL;
	p->slot = PLACED;
	c->left--;
	__atomic_fetch_sub(&f->sh->unplaced, 1, __ATOMIC_SEQ_CST);
}

/* place gives the child a page that is stored; EAGAIN when its mappings are being changed, or there is no memory, ESRCH when it is gone. */
static int place(struct tv_family *f, struct child *c, struct page *p)
{
	char content[TV_STORE_PAGE];
	struct tv_reader *r = (struct tv_reader *)load64(&f->sh->reader);
	if (p->slot == PLACED)
		return 0;
	int err = p->slot < SPOILED ? r ? tv_read(r, p->slot, content) : EIO : 0, lost = err || p->slot == SPOILED;
	if (err == ENOMEM)
		return EAGAIN; /* the store may have it later */
	if (!lost) {
		err = give(c->fd, p->va, p->content ? p->content : content);
		lost = err && err != EAGAIN && err != ESRCH && err != EEXIST && err != ENOENT; /* the last: unmapped */
	}
	if (lost)
		err = poison(c->fd, p->va);
	if (err == EAGAIN || err == ESRCH)
		return err;
	drop(f, c, p);
	return 0;
}

/*
 * add notes a page that a child is to get: the store's, whose slot it holds, KEPT with
 * content to copy, or SPOILED.
 */
static int add(struct tv_family *f, struct child *c, uint64_t va, uint32_t slot, const char *content)
{
	char *copy = NULL;
	if (slot == PLACED)
		return 1;
	if (c->n == c->cap) {
		size_t cap = c->cap ? 2 * c->cap : 256;
		void *n = realloc(c->page, cap * sizeof *c->page);
		if (!n)
			return 0;
		c->page = n;
		c->cap = cap;
	}
	if (slot == KEPT && !(copy = malloc(PAGE)))
		return 0;
	if (copy)
		memcpy(copy, content, PAGE);
	else if (slot < SPOILED && !hold(f->sh, slot, 1))
		return 0;
	c->left++;
	__atomic_fetch_add(&f->sh->unplaced, 1, __ATOMIC_SEQ_CST);
	c->page[c->n++] = (struct page){ .va = va, .slot = slot, .content = copy };
	return 1;
}

/* spoil has a child find out that a page is lost, now or, when its mappings are being changed, later. */
static void spoil(struct tv_family *f, struct child *c, uint64_t va)
{
	if (poison(c->fd, va) == EAGAIN)
		add(f, c, va, SPOILED, NULL);
}

/* inherit gives a child one evicted page, or notes it. ESRCH: the child has ended. */
static int inherit(struct tv_family *f, struct child *c, struct tv_leaf *l, uint64_t va)
{
	char content[TV_STORE_PAGE];
	struct timespec t = { 0, 50000 };
	for (int i = 0; i < 1000; i++) {
		uint32_t word = load32(word_in(l, va)), slot = word >> TV_PAYLOAD;
		switch (word & TV_STATE) {
		case TV_LIMBO:
			/* EFAULT: it is being stored, or was not moved yet and so is the child's by fork. */
			switch (give(c->fd, va, (void *)(uintptr_t)(load64(&f->sh->limbo) + ((uint64_t)slot << TV_PAGE_SHIFT)))) {
			case 0:
			case EEXIST:
			case ENOENT:
				return 0;
			case ESRCH:
				return ESRCH;
			case EFAULT:
				if (load32(word_in(l, va)) == word && i > 2)
					return 0;
				continue;
			case EAGAIN: {
				/* It forks, or the like, already: a child of its own lacks the page, too. */
				struct iovec to = { content, PAGE }, from = { (void *)(uintptr_t)(load64(&f->sh->limbo) + ((uint64_t)slot << TV_PAGE_SHIFT)), PAGE };
				if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != (ssize_t)PAGE)
					continue;
				if (add(f, c, va, KEPT, content))
					return 0;
				break;
			}
			}
			spoil(f, c, va);
			return 0;
		case TV_STORED: {
			struct tv_reader *r = (struct tv_reader *)load64(&f->sh->reader);
			if (r && add(f, c, va, slot, NULL))
				return 0;
			/* No memory for the list: right away. */
			int err = r ? tv_read(r, slot, content) : EIO;
			if (err == ENOMEM) {
				nanosleep(&t, NULL);
				continue;
			}
			if (!err)
				err = give(c->fd, va, content);
			if (err == 0 || err == EEXIST || err == ENOENT)
				return 0;
			spoil(f, c, va);
			return 0;
		}
		case TV_POISONED:
			spoil(f, c, va);
			return 0;
		default:
			return 0;
		}
	}
	spoil(f, c, va);
	return 0;
}

/* leave_alone ends what there is of a child. Its memory is out of userfaultfd, or gone. */
static void leave_alone(struct tv_family *f, struct child *c)
{
	for (size_t i = 0; i < c->n; i++)
		drop(f, c, &c->page[i]);
	for (struct child **at = &f->first; *at; at = &(*at)->next)
		if (*at == c) {
			*at = c->next;
			break;
		}
	close(c->fd); /* and so out of epoll; another child that has a copy is no harm any more */
	free(c->page);
	free(c->moved);
	if (c->admitted)
		__atomic_fetch_sub(&f->sh->unplaced, 1, __ATOMIC_SEQ_CST);
	free(c);
	if (f->spare < 0)
		f->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

static void handle_child(struct tv_family *f, struct child *c, int *gone);

/*
 * release ends userfaultfd's part in a child that has all pages; EAGAIN when its mappings are
 * being changed. A child that waits in a fork of its own, say, has to be heard, and what it
 * moves is registered where it is then. Without the kernel's closing of the descriptor, too:
 * another child may have got a copy of it.
 */
static int release(struct tv_family *f, struct child *c)
{
	int err = changing(c->fd) ? EAGAIN : unregister_all(f->sh, c, 0);
	for (size_t i = 0; !err && i < c->nmoved; i++)
		err = unregister(c->fd, c->moved[i].start, c->moved[i].end);
	/* Of what was under way before, its registered mappings are gone or it is to be read. */
	if (!err && changing(c->fd))
		err = EAGAIN;
	if (err != EAGAIN)
		leave_alone(f, c);
	return err;
}

/* finish places all that is left, and ends. */
static void finish(struct tv_family *f, struct child *c)
{
	struct timespec t = { 0, 50000 };
	int err = 0, gone = 0;
	for (;;) {
		for (size_t i = 0; !err && i < c->n; i++)
			err = place(f, c, &c->page[i]);
		if (err == ESRCH) {
			leave_alone(f, c);
			return;
		}
		if (!err && release(f, c) != EAGAIN)
			return;
		handle_child(f, c, &gone);
		if (gone)
			return;
		nanosleep(&t, NULL);
		err = 0;
	}
}

/* admit puts a child among those that are served, or finishes with it if that cannot be. */
static void admit(struct tv_family *f, struct child *c)
{
	struct epoll_event e = { .events = EPOLLIN, .data.ptr = c };
	c->next = f->first;
	f->first = c;
	c->admitted = 1;
	__atomic_fetch_add(&f->sh->unplaced, 1, __ATOMIC_SEQ_CST);
	if (f->spare < 0)
		f->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (c->left == 0 && release(f, c) != EAGAIN)
		return;
	if (f->spare < 0 || epoll_ctl(f->epoll, EPOLL_CTL_ADD, c->fd, &e) < 0)
		finish(f, c);
}

void tv_family_born(struct tv_family *f, int fd)
{
	struct tv_shared *sh = f->sh;
	struct child *c = calloc(1, sizeof *c), on_stack = { .fd = fd };
	int err = 0;
	if (!c)
		c = &on_stack;
	c->fd = fd;
	for (uint64_t g = 0; g < TV_L1_NODES && !err; g++) {
		uint64_t l2 = load32(&sh->evicted[g]) ? load64(&sh->l1[g]) : 0;
		for (uint64_t i = 0; l2 && i < TV_L2_LEAVES && !err; i++) {
			uint64_t leaf = load64(&((uint64_t *)l2)[i]), va = g << 30 | i << CHUNK_SHIFT;
			if (leaf <= TV_GONE_LEAF || !evicted_in((struct tv_leaf *)leaf))
				continue;
			for (int k = 0; k < TV_LEAF_PAGES && !err; k++)
				err = inherit(f, c, (struct tv_leaf *)leaf, va + k * PAGE);
		}
	}
	if (c == &on_stack) { /* no memory for it: at once */
		for (size_t i = 0; i < c->n; i++)
			if (place(f, c, &c->page[i])) { /* it has ended, or forks itself by now and does not get it */
				poison(fd, c->page[i].va);
				drop(f, c, &c->page[i]);
			}
		unregister_all(sh, c, 0);
		close(fd);
		free(c->page);
		return;
	}
	if (!err)
		err = unregister_all(sh, c, 1);
	if (err)
		leave_alone(f, c);
	else
		admit(f, c);
}

static int by_va(const void *a, const void *b)
{
	uint64_t x = ((const struct page *)a)->va, y = ((const struct page *)b)->va;
	return (x > y) - (x < y);
}

/* born_of_child is tv_family_born for a child's child: what the one waits for the other does, too. */
static void born_of_child(struct tv_family *f, struct child *c, int fd)
{
	struct child *g = calloc(1, sizeof *g);
	int ok = g != NULL;
	if (ok) {
		g->fd = fd;
		g->moved = c->nmoved ? malloc(c->nmoved * sizeof *c->moved) : NULL;
		ok = !c->nmoved || g->moved;
		if (ok) {
			g->nmoved = c->nmoved;
			memcpy(g->moved, c->moved, c->nmoved * sizeof *c->moved);
		}
		for (size_t i = 0; ok && i < c->n; i++)
			ok = add(f, g, c->page[i].va, c->page[i].slot, c->page[i].content);
	}
	if (ok) {
		admit(f, g);
		return;
	}
	/* No memory: without the content, which it must not take zeros for. */
	for (size_t i = 0; i < c->n; i++)
		if (c->page[i].slot != PLACED)
			poison(fd, c->page[i].va);
	struct child alone = { .fd = fd, .page = c->page, .n = c->n };
	unregister_all(f->sh, &alone, 0);
	for (size_t i = 0; i < c->nmoved; i++)
		unregister(fd, c->moved[i].start, c->moved[i].end);
	close(fd);
	for (size_t i = 0; g && i < g->n; i++)
		drop(f, g, &g->page[i]);
	if (g) {
		free(g->page);
		free(g->moved);
		free(g);
	}
}

/* lost forgets pages of a range that the child has dropped or unmapped. */
static void lost(struct tv_family *f, struct child *c, uint64_t start, uint64_t end)
{
	for (size_t i = 0; i < c->n; i++)
		if (c->page[i].va >= start && c->page[i].va < end)
			drop(f, c, &c->page[i]);
}

/* remapped follows the child's mremap. */
static void remapped(struct tv_family *f, struct child *c, uint64_t from, uint64_t to, uint64_t len)
{
	size_t n = 0;
	lost(f, c, to, to + len);
	for (size_t i = 0; i < c->n; i++) {
		if (c->page[i].slot == PLACED)
			continue; /* one that is moved there has its address from now on */
		if (c->page[i].va >= from && c->page[i].va < from + len)
			c->page[i].va += to - from;
		c->page[n++] = c->page[i];
	}
	c->n = n;
	if (n)
		qsort(c->page, n, sizeof *c->page, by_va);
	c->at = 0;
	for (size_t i = 0; i < c->nmoved; i++)
		if (c->moved[i].start <= to && to + len <= c->moved[i].end)
			return;
	struct span *m = realloc(c->moved, (c->nmoved + 1) * sizeof *m);
	if (m) {
		c->moved = m;
		c->moved[c->nmoved++] = (struct span){ to, to + len };
	}
}

/* fault answers a fault of a child's; ESRCH if it is gone. */
static int fault(struct tv_family *f, struct child *c, uint64_t va)
{
	struct page key = { .va = va }, *p = c->n ? bsearch(&key, c->page, c->n, sizeof *c->page, by_va) : NULL;
	if (p && p->slot != PLACED) {
		int err = place(f, c, p);
		if (err == EAGAIN)
			wake(c->fd, va); /* it comes back, and what it waits for has been read then */
		return err;
	}
	struct uffdio_zeropage z = { .range = { .start = va, .len = PAGE } };
	if (ioctl(c->fd, UFFDIO_ZEROPAGE, &z) == 0)
		return 0;
	if (errno == ESRCH)
		return ESRCH;
	wake(c->fd, va);
	return 0;
}

/* handle_child reads what there is to read of a child. */
static void handle_child(struct tv_family *f, struct child *c, int *gone)
{
	struct uffd_msg m;
	for (int i = 0; i < BATCH; i++) {
		ssize_t n = tv_family_read(f, c->fd, &m, sizeof m);
		if (n != sizeof m)
			return;
		switch (m.event) {
		case UFFD_EVENT_PAGEFAULT:
			if (fault(f, c, m.arg.pagefault.address & ~(PAGE - 1)) == ESRCH) {
				leave_alone(f, c);
				*gone = 1;
				return;
			}
			break;
		case UFFD_EVENT_FORK:
			born_of_child(f, c, m.arg.fork.ufd);
			break;
		case UFFD_EVENT_REMOVE:
		case UFFD_EVENT_UNMAP:
			lost(f, c, m.arg.remove.start, m.arg.remove.end);
			break;
		case UFFD_EVENT_REMAP:
			remapped(f, c, m.arg.remap.from, m.arg.remap.to, m.arg.remap.len);
			break;
		}
	}
}

void tv_family_serve(struct tv_family *f)
{
	struct epoll_event e;
	int gone = 0;
	if (epoll_wait(f->epoll, &e, 1, 0) > 0) {
		handle_child(f, e.data.ptr, &gone);
		return; /* the parent's own come next */
	}
	struct child *c = f->first;
	for (int i = 0; c && i < BATCH && c->left; c->at++) {
		if (c->at == c->n)
			c->at = 0;
		if (c->page[c->at].slot == PLACED)
			continue;
		i++;
		switch (place(f, c, &c->page[c->at])) {
		case ESRCH:
			leave_alone(f, c);
			return;
		case EAGAIN:
			/* It is about to say why. */
			epoll_wait(f->epoll, &e, 1, 1);
			return;
		}
	}
	if (c && !c->left && release(f, c) == EAGAIN)
		epoll_wait(f->epoll, &e, 1, 1);
}

void tv_family_end(struct tv_family *f)
{
	while (f->first)
		finish(f, f->first);
	close(f->epoll);
	if (f->spare >= 0)
		close(f->spare);
	free(f);
}
