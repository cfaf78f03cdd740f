/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pages leave regions, and come back. UFFDIO_MOVE takes a page out of a region into the
 * limbo, an area of our own, and back: the content is not copied, and nobody can touch
 * the page meanwhile. Where it is, the page's word says, and it says so before the page
 * goes: who meets such a word tries to bring the page back, and the kernel says if it
 * has not gone yet (EEXIST) or is on its way (ENOENT).
 *
 * An engine that has seen a page to be present may use it until its section is over. So
 * the words of a batch are changed first; then all sections that are open have to be
 * over once; then the pages move. It waits for that for so long and no longer, since a
 * section may belong to a thread that is stopped: then the words are as they were. Nor
 * is any of it Go code, which could be stopped in the middle.
 *
 * Who brings a page back does that inside a section too (the pager thread has one of its
 * own), from looking at its word on: so it cannot leave anew in between, and a slot that
 * the word names cannot have come to hold something else.
 *
 * The way out leads through the airlock, which belongs to the regions' userfaultfd: while
 * an event about mappings is unread the kernel moves nothing there, so that it is not
 * another mapping's page that is taken where a region's was. The limbo belongs to another
 * userfaultfd, which has no events, and answers a touch with a signal: what is read there
 * by a system call while its page vanishes ends with EFAULT, rather than wait.
 */
#define _GNU_SOURCE
#include "evict.h"
#include "store.h"
#include "words.h"

#include <errno.h>
#include <linux/userfaultfd.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* UFFDIO_MOVE, of Linux 6.8. */
struct move {
	uint64_t dst, src, len, mode;
	int64_t moved;
};
#define IOC_MOVE _IOWR(UFFDIO, 0x05, struct move)
#define MODE_DONTWAKE 1

#define WAIT_NS 1000000 /* for sections to be over */

static uint64_t limbo_at(struct tv_shared *sh, uint32_t slot) { return sh->limbo + ((uint64_t)slot << TV_PAGE_SHIFT); }

static uint64_t *limbo_owner(struct tv_shared *sh, uint32_t slot) { return &((uint64_t *)sh->limbo_owner)[slot]; }

static uint64_t *store_owner(struct tv_shared *sh, uint32_t slot) { return &((uint64_t *)sh->store_owner)[slot]; }

static uint32_t payload(uint32_t word) { return word >> TV_PAYLOAD; }

/* move gives how many bytes were moved; none: *err says why. */
static uint64_t move(int fd, uint64_t dst, uint64_t src, uint64_t len, uint64_t mode, int *err)
{
	struct move m = { .dst = dst, .src = src, .len = len, .mode = mode };
	*err = ioctl(fd, IOC_MOVE, &m) == 0 ? 0 : errno;
	if (*err == 0)
		return len;
	if (m.moved > 0) {
		*err = 0;
		return m.moved;
	}
	return 0;
}

/* passed waits until all sections that are open now are over; false if it takes too long. */
static int passed(struct tv_shared *sh)
{
	uint32_t seq[TV_SECTIONS + 1];
	struct tv_section *open[TV_SECTIONS + 1];
	int n = 0;
	for (int i = 0; i <= TV_SECTIONS; i++) {
		struct tv_section *s = i < TV_SECTIONS ? &sh->section[i] : &sh->pager;
		uint32_t q = load32(&s->seq);
		if (q & 1) {
			open[n] = s;
			seq[n++] = q;
		}
	}
	uint64_t until = 0;
	for (int k = 0; n > 0; k++) {
		while (n > 0 && load32(&open[n - 1]->seq) != seq[n - 1])
			n--;
		if (n == 0)
			break;
		if (k < 100) {
			relax();
			continue;
		}
		uint64_t t = now();
		if (!until)
			until = t + WAIT_NS;
		/* The pager may have a fault to answer that the section waits for. */
		if (t > until || load32(&sh->change))
			return 0;
		struct timespec ts = { 0, 5000 };
		nanosleep(&ts, NULL);
	}
	return 1;
}

/* stay has the words of pages that were to go be what they were. */
static void stay(struct tv_shared *sh, struct tv_victim *v, uint32_t n, uint32_t why)
{
	for (uint32_t i = 0; i < n; i++) {
		struct tv_leaf *l = leaf_of(sh, v[i].va);
		if (l)
			become(sh, l, v[i].va, v[i].slot << TV_PAYLOAD | TV_LIMBO,
			       why == TV_LATER ? v[i].was : load32(&sh->arrived)); /* others have their turn before it is tried again */
		v[i].result = why;
	}
}

/* air makes the airlock empty. */
static void air(struct tv_shared *sh)
{
	struct uffdio_register g = { .range = { .start = sh->airlock, .len = TV_BATCH * PAGE }, .mode = UFFDIO_REGISTER_MODE_MISSING };
	ioctl(sh->uffd, UFFDIO_UNREGISTER, &g.range); /* or the pager would hear of it */
	madvise((void *)(uintptr_t)sh->airlock, TV_BATCH * PAGE, MADV_DONTNEED);
	ioctl(sh->uffd, UFFDIO_REGISTER, &g);
}

/*
 * through moves pages on from the airlock; or back, when the kernel has no memory for that
 * (a page table of the limbo's). One of both works sooner or later, and nothing is lost.
 */
static void through(struct tv_shared *sh, struct tv_victim *v, uint32_t n)
{
	struct timespec ts = { 0, 50000 };
	int err;
	for (uint32_t i = 0; i < n;) {
		uint64_t at = sh->airlock + i * PAGE, done = move(sh->limbo_fd, limbo_at(sh, v[i].slot), at, (n - i) * PAGE, MODE_DONTWAKE, &err);
		for (uint64_t k = 0; k < done; k += PAGE)
			v[i++].result = TV_EVICTED;
		if (done)
			continue;
		if (err == EAGAIN) {
			relax();
			continue;
		}
		/*
		 * EEXIST: a request has put new content there; ENOENT, twice: it was unmapped, and
		 * not in this moment moved elsewhere (see fill in fork.c), with its word to follow.
		 */
		if (move(sh->uffd, v[i].va, at, PAGE, 0, &err) || err == EEXIST ||
		    (err == ENOENT && (move(sh->uffd, v[i].va, at, PAGE, 0, &err) || err == EEXIST || err == ENOENT))) {
			stay(sh, &v[i], 1, TV_LATER);
			i++;
			continue;
		}
		nanosleep(&ts, NULL);
	}
}

/* out moves pages in a row to slots in a row. */
static void out(struct tv_shared *sh, struct tv_victim *v, uint32_t n)
{
	int err, one = 0, aired = 0;
	for (uint32_t i = 0; i < n;) {
		uint32_t k = one ? 1 : n - i;
		uint64_t done = move(sh->uffd, sh->airlock, v[i].va, k * PAGE, MODE_DONTWAKE, &err) >> TV_PAGE_SHIFT;
		if (done) {
			through(sh, &v[i], done);
			i += done;
			one = 0;
			continue;
		}
		if (err == EINVAL && !one && k > 1) {
			one = 1; /* they may be of more than one mapping */
			continue;
		}
		if (err == EEXIST && !aired) {
			air(sh);
			aired = 1;
			continue;
		}
		switch (err) {
		case ENOENT: { /* it has gone already: an event will tell, or has told */
			struct tv_leaf *l = leaf_of(sh, v[i].va);
			if (l)
				become(sh, l, v[i].va, v[i].slot << TV_PAYLOAD | TV_LIMBO, TV_ABSENT);
			v[i].result = TV_NOT;
			break;
		}
		case EBUSY:
			stay(sh, &v[i], 1, TV_SHARED);
			break;
		case EINVAL:
			stay(sh, &v[i], 1, TV_STUCK);
			break;
		case EAGAIN:
			if (aired < 16) { /* also when somebody else has the page in hand */
				aired++;
				continue;
			}
			/* fall through */
		default:
			stay(sh, &v[i], n - i, TV_LATER);
			return;
		}
		i++;
		one = 0;
	}
}

int tv_evict(struct tv_shared *sh, struct tv_victim *v, uint32_t n)
{
	open_section(&sh->evictor);
	if (load32(&sh->change)) {
		close_section(&sh->evictor);
		return EAGAIN;
	}
	for (uint32_t i = 0; i < n; i++) {
		struct tv_leaf *l = leaf_of(sh, v[i].va);
		v[i].result = TV_NOT;
		if (!l)
			continue;
		v[i].was = load32(word_in(l, v[i].va));
		if ((v[i].was & TV_STATE) != TV_PRESENT)
			continue;
		__atomic_store_n(limbo_owner(sh, v[i].slot), v[i].va, __ATOMIC_SEQ_CST);
		left(l, v[i].va, v[i].va + PAGE);
		if (become(sh, l, v[i].va, v[i].was, v[i].slot << TV_PAYLOAD | TV_LIMBO))
			v[i].result = TV_LATER;
	}
	int go = passed(sh);
	for (uint32_t i = 0; i < n;) {
		uint32_t k = i + 1;
		if (v[i].result == TV_NOT) {
			i = k;
			continue;
		}
		while (k < n && v[k].result != TV_NOT && v[k].va == v[k - 1].va + PAGE && v[k].slot == v[k - 1].slot + 1)
			k++;
		if (go)
			out(sh, v + i, k - i);
		else
			stay(sh, v + i, k - i, TV_LATER);
		i = k;
	}
	for (uint32_t i = 0; i < n; i++) {
		struct tv_leaf *l = v[i].result == TV_EVICTED ? leaf_of(sh, v[i].va) : NULL;
		if (l)
			__atomic_fetch_add(&l->evictions, 1, __ATOMIC_SEQ_CST);
	}
	close_section(&sh->evictor);
	return 0;
}

/*
 * back notes that a page is in place that was somewhere else. While the section that it
 * was brought in has been open it cannot have left again; but it may have been stored.
 */
static void back(struct tv_shared *sh, uint64_t va, uint32_t was)
{
	struct tv_leaf *l = leaf_of(sh, va);
	if ((was & TV_STATE) == TV_STORED)
		tv_left_slots(sh, 1);
	while (l && !become(sh, l, va, was, load32(&sh->arrived))) {
		was = load32(word_in(l, va));
		if ((was & TV_STATE) != TV_STORED)
			return;
	}
	tv_arrive(sh, 1);
}

/* copy puts content where an evicted page was; an errno otherwise, EEXIST if it is there. */
static int copy(struct tv_shared *sh, uint64_t va, const void *src)
{
	struct uffdio_copy c = { .dst = va, .src = (uint64_t)(uintptr_t)src, .len = PAGE, .mode = UFFDIO_COPY_MODE_DONTWAKE };
	return ioctl(sh->uffd, UFFDIO_COPY, &c) == 0 ? 0 : errno;
}

/* from_limbo is tv_bring_back for a page in limbo, inside a section. */
static int from_limbo(struct tv_shared *sh, uint64_t va, uint32_t word)
{
	uint64_t src = limbo_at(sh, payload(word));
	int err;
	for (int i = 0; i < 4; i++) {
		if (move(sh->uffd, va, src, PAGE, MODE_DONTWAKE, &err)) {
			back(sh, va, word);
			return 0;
		}
		if (err != EAGAIN)
			break;
	}
	switch (err) {
	case EAGAIN:
		return EAGAIN;
	case EEXIST: /* about to go, or brought back by somebody else, who will say so */
	case ENOENT: /* on its way, or stored meanwhile */
	case EBUSY:  /* being read, in order to be stored */
		return EBUSY;
	}
	/* Read-only by now, say: then the content has to do. */
	err = copy(sh, va, (void *)(uintptr_t)src);
	if (err == 0)
		back(sh, va, word);
	return err == EEXIST || err == EFAULT ? EBUSY : err;
}

/* from_store is tv_bring_back for a page that is stored. No section is open while it is read. */
static int from_store(struct tv_shared *sh, uint64_t va, uint32_t word)
{
	char page[TV_STORE_PAGE]; /* no thread-local: the C library loads this late, with little room for that */
	uint32_t slot = payload(word);
	struct tv_reader *r = (struct tv_reader *)load64(&sh->reader);
	uint64_t owner = load64(store_owner(sh, slot));
	if (!r)
		return ENOSYS;
	int lost = tv_read(r, slot, page), err = EBUSY;
	open_section(&sh->pager);
	/* The owner's number says that the slot is what it was when it was read. */
	if (word_of(sh, va) == word && load64(store_owner(sh, slot)) == owner) {
		if (lost) {
			struct tv_leaf *l = leaf_of(sh, va);
			if (lost == ENOMEM)
				err = EBUSY;
			else if (l && become(sh, l, va, word, TV_POISONED))
				err = EIO;
		} else {
			err = copy(sh, va, page);
			if (err == 0 || err == EEXIST)
				back(sh, va, word);
			if (err == EEXIST || err == ENOMEM)
				err = EBUSY;
		}
	}
	close_section(&sh->pager);
	return err;
}

int tv_bring_back(struct tv_shared *sh, uint64_t va)
{
	int err = EBUSY;
	open_section(&sh->pager);
	uint32_t word = word_of(sh, va);
	if ((word & TV_STATE) == TV_LIMBO)
		err = from_limbo(sh, va, word);
	close_section(&sh->pager);
	if ((word & TV_STATE) == TV_STORED)
		err = from_store(sh, va, word);
	else if ((word & TV_STATE) == TV_POISONED)
		err = EIO;
	return err;
}

void tv_poison(struct tv_shared *sh, uint64_t va)
{
	struct poison a = { .start = va, .len = PAGE };
	if (ioctl(sh->uffd, IOC_POISON, &a) == 0 || errno == EEXIST || errno == EAGAIN)
		return;
	/* A kernel without it: the next best that is not other content. */
	mprotect((void *)(uintptr_t)va, PAGE, PROT_NONE);
}

struct tv_leaf *tv_make_leaf(struct tv_shared *sh, uint64_t va)
{
	if (va >> 48)
		return NULL;
	if (!load64(&sh->l1[va >> 30])) {
		uint64_t n = TV_L2_LEAVES * sizeof(uint64_t), at = __atomic_fetch_add(&sh->arena_next, n, __ATOMIC_SEQ_CST), none = 0;
		if (at + n > sh->arena_size)
			return NULL;
		__atomic_compare_exchange_n(&sh->l1[va >> 30], &none, sh->arena + at, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	}
	uint64_t *slot = leaf_slot(sh, va), leaf = load64(slot);
	if (leaf > TV_GONE_LEAF)
		return (struct tv_leaf *)leaf;
	struct tv_leaf *l = new_leaf(sh);
	if (!l)
		return NULL;
	for (int i = 0; leaf == TV_GONE_LEAF && i < TV_LEAF_PAGES; i++)
		l->word[i] = TV_GONE;
	l->n[TV_GONE] = leaf == TV_GONE_LEAF ? TV_LEAF_PAGES : 0;
	if (!__atomic_compare_exchange_n(slot, &leaf, (uint64_t)l, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		return (struct tv_leaf *)leaf;
	return l;
}

/*
 * carry_page does so for one page. Meanwhile what is in limbo may be stored, and its slot
 * given to another page: the word is looked at again if the owner is not the page any more.
 */
static void carry_page(struct tv_shared *sh, struct tv_leaf *l, uint64_t va, uint64_t there)
{
	for (;;) {
		uint32_t w = load32(word_in(l, va));
		struct tv_leaf *d = (w & TV_STATE) < TV_LIMBO ? NULL : tv_make_leaf(sh, there);
		if (!d)
			return;
		/* The word there first: from then on it is the owner that says whose the slot is. */
		count(sh, d, there, __atomic_exchange_n(word_in(d, there), w, __ATOMIC_SEQ_CST), w);
		if ((w & TV_STATE) == TV_LIMBO) {
			uint64_t was = va;
			if (!__atomic_compare_exchange_n(limbo_owner(sh, payload(w)), &was, there, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
				continue;
		} else if ((w & TV_STATE) == TV_STORED) {
			uint64_t *o = store_owner(sh, payload(w));
			__atomic_store_n(o, there >> TV_PAGE_SHIFT << 28 | (load64(o) & ((1 << 28) - 1)), __ATOMIC_SEQ_CST);
		}
		if (become(sh, l, va, w, TV_GONE))
			return;
	}
}

void tv_carry(struct tv_shared *sh, uint64_t from, uint64_t to, uint64_t len)
{
	uint64_t leaf_bytes = TV_LEAF_PAGES * PAGE;
	for (uint64_t va = from; va < from + len;) {
		uint64_t next = (va / leaf_bytes + 1) * leaf_bytes;
		if (next > from + len)
			next = from + len;
		if (!load32(&sh->evicted[va >> 30])) {
			va = ((va >> 30) + 1) << 30;
			continue;
		}
		struct tv_leaf *l = leaf_of(sh, va);
		for (; l && evicted_in(l) && va < next; va += PAGE) {
			carry_page(sh, l, va, va - from + to);
		}
		va = next;
	}
}

static void rouse(struct tv_shared *sh)
{
	uint64_t one = 1;
	if (!__atomic_exchange_n(&sh->roused, 1, __ATOMIC_SEQ_CST) && write(sh->rouse_fd, &one, sizeof one) < 0)
		__atomic_store_n(&sh->roused, 0, __ATOMIC_SEQ_CST);
}

void tv_arrive(struct tv_shared *sh, uint32_t pages)
{
	if (__atomic_add_fetch(&sh->arrivals, pages, __ATOMIC_SEQ_CST) >= load64(&sh->wake_at))
		rouse(sh);
}

void tv_left_slots(struct tv_shared *sh, uint64_t n)
{
	if (n && __atomic_add_fetch(&sh->back, n, __ATOMIC_SEQ_CST) >= TV_DEAD)
		rouse(sh);
}
