/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pager thread: answers page faults of the application's threads and follows
 * what happens to the mappings. It never enters Go: a goroutine that faults keeps
 * its scheduler slot, and a garbage collection would wait for it while the answer
 * waited for the garbage collection.
 *
 * Events are read only while no engine is inside a section: the thread that
 * unmaps is held by the kernel until its event is read, so what it does next
 * happens after engines have stopped using the pages. Faults must be read at any
 * time, sections open or not: an engine in its section may itself wait for the
 * garbage collection that waits for the faulting goroutine. The kernel hands out
 * faults before events, and nobody but this thread wakes faulting threads (engines
 * use the DONTWAKE modes), so when /proc/self/fdinfo says that a fault is pending,
 * what is read next is a fault. (But for one case: a signal interrupts the fault
 * between the two. Then an event is read with a section open, and that section may
 * finish its copy after the munmap has returned.)
 *
 * While an event is unread the kernel fills no page (EAGAIN). A fault that was read
 * then cannot wait for the event if that waits for a section which waits for the
 * faulting thread. Its page is taken out of userfaultfd for the moment, populated
 * by the kernel, and put back: see populate.
 */
#define _GNU_SOURCE
#include "evict.h"
#include "fork.h"
#include "words.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ /* Linux 5.14 */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

/* Whose a fault is, and since when it is known. */
struct asker {
	uint64_t since;
	uint32_t tid;
};

struct tv_pager {
	pthread_t thread;
	int uffd, stop, again, fdinfo;
	struct tv_shared *sh;
	struct tv_family *family;
	struct retry { uint64_t va; int tries, asked; struct asker who; } *retry; /* faults that wait for an event to be read, or for Go */
	size_t nretry, cap;
	int waited;      /* how often an event has been waited with since the last one was read */
};
enum {
	PATIENCE = 20, /* so many waits of 10 us; no section takes that long by itself */
	TRIES = 4,     /* events that a fault waits for: in a stream of them the kernel might never say yes */
};

/* set_range gives all pages of a range a state, and counts those that had content. */
static void set_range(struct tv_shared *sh, uint64_t start, uint64_t end, uint32_t state)
{
	uint64_t lost = 0, dead = 0, leaf_bytes = TV_LEAF_PAGES * PAGE;
	for (uint64_t va = start & ~(PAGE - 1); va < end;) {
		uint64_t next = (va / leaf_bytes + 1) * leaf_bytes, stop = next < end ? next : end;
		uint64_t *slot = leaf_slot(sh, va);
		if (!slot) {
			va = ((va >> 30) + 1) << 30;
			continue;
		}
		uint64_t leaf = load64(slot);
		if (leaf == 0 && state == TV_GONE) {
			if (stop - va == leaf_bytes) {
				__atomic_store_n(slot, TV_GONE_LEAF, __ATOMIC_SEQ_CST);
			} else {
				leaf = (uint64_t)new_leaf(sh);
				/* without room for a leaf all of it counts as gone: safe, not exact */
				__atomic_store_n(slot, leaf ? leaf : TV_GONE_LEAF, __ATOMIC_SEQ_CST);
			}
		}
		if (leaf > TV_GONE_LEAF) {
			struct tv_leaf *l = (struct tv_leaf *)leaf;
			uint32_t n = 0;
			if (state == TV_ABSENT)
				left(l, va, stop);
			for (; va < stop; va += PAGE) {
				uint32_t was = __atomic_exchange_n(word_in(l, va), state, __ATOMIC_SEQ_CST);
				count(sh, l, va, was, state);
				was &= TV_STATE;
				n += was == TV_PRESENT || was >= TV_LIMBO;
				dead += was == TV_LIMBO || was == TV_STORED;
			}
			__atomic_fetch_add(&l->lost, n, __ATOMIC_SEQ_CST);
			lost += n;
		}
		va = stop;
	}
	if (state == TV_GONE)
		__atomic_store_n(&sh->gone, 1, __ATOMIC_SEQ_CST);
	__atomic_fetch_add(&sh->invalidations, lost, __ATOMIC_SEQ_CST);
	tv_left_slots(sh, dead);
}

/*
 * set_present notes that a page is there that was absent as far as is known. One that is
 * gone stays so until a region is registered anew; of one that was evicted those tell who
 * bring it back.
 */
static void set_present(struct tv_shared *sh, uint64_t va)
{
	struct tv_leaf *l = leaf_of(sh, va);
	/* Where pages are evicted all of them have to be known. */
	uint64_t *slot = !l && load64(&sh->limbo) ? leaf_slot(sh, va) : NULL;
	if (slot && !load64(slot))
		l = tv_make_leaf(sh, va);
	if (!l)
		return;
	uint32_t *w = word_in(l, va), was = load32(w), is = load32(&sh->arrived);
	while ((was & TV_STATE) < TV_PRESENT)
		if (__atomic_compare_exchange_n(w, &was, is, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
			count(sh, l, va, was, is);
			tv_arrive(sh, 1);
			return;
		}
}

static void wake(struct tv_pager *p, uint64_t va)
{
	struct uffdio_range r = { .start = va, .len = PAGE };
	ioctl(p->uffd, UFFDIO_WAKE, &r);
}

/*
 * note counts a fault of the application's, or with sign -1 says that it was none: before it
 * is answered, so that who was answered finds it counted.
 */
static void note(struct tv_pager *p, uint64_t va, const struct asker *who, int major, uint64_t ns, uint32_t sign)
{
	uint64_t *slot = leaf_slot(p->sh, va), by = (uint64_t)(int64_t)(int32_t)sign;
	struct tv_leaf *l = slot && !load64(slot) ? tv_make_leaf(p->sh, va) : leaf_of(p->sh, va);
	if (l) {
		__atomic_fetch_add(major ? &l->app_major : &l->app_minor, sign, __ATOMIC_SEQ_CST);
		__atomic_fetch_add(&l->app_ns, by * ns, __ATOMIC_SEQ_CST);
	}
	if (major)
		__atomic_fetch_add(&p->sh->app_major, by, __ATOMIC_SEQ_CST);
	tv_count_thread(&p->sh->threads, who->tid, major ? 0 : by, major ? by : 0, by * ns);
}

static int evicted(struct tv_pager *p, uint64_t va) { return (word_of(p->sh, va) & TV_STATE) >= TV_LIMBO; }

enum { AGAIN, DONE, ASKED };

/* recall is resolve for a page that was evicted. Where only Go can read the store it is asked to, once. */
static int recall(struct tv_pager *p, uint64_t va, int ask, const struct asker *who)
{
	int major = (word_of(p->sh, va) & TV_STATE) == TV_STORED;
	switch (tv_bring_back(p->sh, va)) {
	case 0:
		note(p, va, who, major, now() - who->since, 1);
		break;
	case EAGAIN:
		return AGAIN;
	case ENOSYS:
		if (!ask || write(p->sh->ask_fd, &va, sizeof va) == sizeof va)
			return ASKED;
		break;
	case EIO:
		tv_poison(p->sh, va);
		break;
	}
	wake(p, va); /* which finds it, or tries again */
	return DONE;
}

/*
 * resolve brings a page in for the thread that waits for it; AGAIN: try after the next
 * event. The section keeps a page that is present from being evicted before zeros are
 * put there.
 */
static int resolve(struct tv_pager *p, uint64_t va, int ask, const struct asker *who)
{
	struct uffdio_zeropage z = { .range = { .start = va, .len = PAGE } };
	int err = 0;
	open_section(&p->sh->pager);
	int gone = evicted(p, va);
	if (!gone) {
		uint64_t ns = now() - who->since;
		note(p, va, who, 0, ns, 1);
		err = ioctl(p->uffd, UFFDIO_ZEROPAGE, &z) == 0 ? 0 : errno;
		if (err)
			note(p, va, who, 0, ns, -1);
		if (err == 0 || err == EEXIST)
			set_present(p->sh, va);
	}
	close_section(&p->sh->pager);
	if (gone)
		return recall(p, va, ask, who);
	if (err == EAGAIN)
		return AGAIN;
	if (err) /* Present after all, or no longer ours: the thread tries again and gets what an ordinary access gets. */
		wake(p, va);
	return DONE;
}

/*
 * Only one registers at a time, be it the pager that puts a page back. Else it might find
 * the page that it has out registered by somebody, and wait for itself to answer its own
 * fault. What is done under the lock waits for nobody but the kernel.
 */
static void lock_registering(struct tv_shared *sh)
{
	struct timespec t = { 0, 10000 };
	for (int i = 0; __atomic_exchange_n(&sh->registering, 1, __ATOMIC_ACQUIRE); i++)
		if (i < 100)
			relax();
		else
			nanosleep(&t, NULL);
}

static void unlock_registering(struct tv_shared *sh)
{
	__atomic_store_n(&sh->registering, 0, __ATOMIC_RELEASE);
}

/* A handler of the application's might touch a page that only the pager brings in: none runs meanwhile. */
int tv_register(struct tv_shared *sh, int uffd, uint64_t start, uint64_t len, uint64_t mode, uint64_t *ioctls)
{
	struct uffdio_register g = { .range = { .start = start, .len = len }, .mode = mode };
	sigset_t all, was;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &was);
	lock_registering(sh);
	int err = ioctl(uffd, UFFDIO_REGISTER, &g) < 0 ? errno : 0;
	unlock_registering(sh);
	pthread_sigmask(SIG_SETMASK, &was, NULL);
	*ioctls = g.ioctls;
	return err;
}

/*
 * populate brings a page in while the kernel refuses the ways of userfaultfd. That
 * the page changes hands is over in microseconds; a change of this page's mapping in
 * that time, by yet another thread, would not be heard of; that it is unmapped shows.
 * Go looks at lending when the kernel says that a page is not userfaultfd's. Not for
 * evicted pages, of which the kernel has no content: false.
 */
static int populate(struct tv_pager *p, uint64_t va, const struct asker *who)
{
	struct uffdio_register g = { .range = { .start = va, .len = PAGE }, .mode = UFFDIO_REGISTER_MODE_MISSING };
	void *at = (void *)(uintptr_t)va;
	open_section(&p->sh->pager);
	if (evicted(p, va)) {
		close_section(&p->sh->pager);
		return 0;
	}
	lock_registering(p->sh);
	__atomic_fetch_add(&p->sh->lending, 1, __ATOMIC_SEQ_CST);
	if (ioctl(p->uffd, UFFDIO_UNREGISTER, &g.range) == 0) {
		/* A kernel without it leaves that to the faulting thread, which UNREGISTER has woken. */
		if (madvise(at, PAGE, MADV_POPULATE_WRITE) == 0 || madvise(at, PAGE, MADV_POPULATE_READ) == 0)
			set_present(p->sh, va);
		if (ioctl(p->uffd, UFFDIO_REGISTER, &g) < 0)
			set_range(p->sh, va, va + PAGE, TV_GONE);
	}
	__atomic_fetch_add(&p->sh->lending, 1, __ATOMIC_SEQ_CST);
	unlock_registering(p->sh);
	close_section(&p->sh->pager);
	note(p, va, who, 0, now() - who->since, 1);
	wake(p, va);
	return 1;
}

/* hold_up waits a little for the evictor, if there is too much in memory. */
static void hold_up(struct tv_shared *sh)
{
	struct timespec t = { 0, 50000 };
	for (int i = 0; i < 20 && load64(&sh->arrivals) >= load64(&sh->stop_at); i++)
		nanosleep(&t, NULL);
}

static void fault(struct tv_pager *p, uint64_t va, struct asker who)
{
	__atomic_fetch_add(&p->sh->app_faults, 1, __ATOMIC_SEQ_CST);
	hold_up(p->sh);
	for (size_t i = 0; i < p->nretry; i++)
		if (p->retry[i].va == va && p->retry[i].asked)
			return;
	int how = resolve(p, va, 1, &who);
	if (how == DONE)
		return;
	for (size_t i = 0; i < p->nretry; i++)
		if (p->retry[i].va == va) { /* again, by another thread or after a signal: do not go round in circles */
			populate(p, va, &who);
			return;
		}
	if (how == AGAIN && p->waited > PATIENCE && populate(p, va, &who))
		return;
	if (p->nretry == p->cap) {
		size_t cap = p->cap ? 2 * p->cap : 64;
		void *n = realloc(p->retry, cap * sizeof *p->retry);
		if (!n) { /* the thread faults again and comes back */
			wake(p, va);
			return;
		}
		p->retry = n;
		p->cap = cap;
	}
	p->retry[p->nretry].tries = 0;
	p->retry[p->nretry].asked = how == ASKED;
	p->retry[p->nretry].who = who;
	p->retry[p->nretry++].va = va;
}

static void retry_faults(struct tv_pager *p)
{
	size_t n = 0;
	for (size_t i = 0; i < p->nretry; i++) {
		int how = resolve(p, p->retry[i].va, !p->retry[i].asked, &p->retry[i].who);
		if (how == DONE)
			continue;
		p->retry[i].asked = how == ASKED;
		if (++p->retry[i].tries < TRIES || !populate(p, p->retry[i].va, &p->retry[i].who))
			p->retry[n++] = p->retry[i];
	}
	p->nretry = n;
}

/* lend_all populates what it may of the pages that wait, and says whether one is left that waits for an event. */
static int lend_all(struct tv_pager *p)
{
	size_t n = 0;
	int left = 0;
	for (size_t i = 0; i < p->nretry; i++) {
		if (populate(p, p->retry[i].va, &p->retry[i].who))
			continue;
		left |= !p->retry[i].asked;
		p->retry[n++] = p->retry[i];
	}
	p->nretry = n;
	return left;
}

/* fault_pending says whether a fault waits to be read. */
static int fault_pending(struct tv_pager *p)
{
	char b[512], *s;
	ssize_t n = pread(p->fdinfo, b, sizeof b - 1, 0);
	if (n <= 0)
		return 0;
	b[n] = 0;
	s = strstr(b, "pending:");
	return s && strtoul(s + 8, NULL, 10) > 0;
}

static int sections_open(struct tv_shared *sh)
{
	for (int i = 0; i < TV_SECTIONS; i++)
		if (load32(&sh->section[i].seq) & 1)
			return 1;
	return 0;
}

/*
 * quiesce waits until no section is open, or a fault is what comes next. The evictor is
 * waited for in any case: it is in C, and over soon. A page that was evicted cannot be
 * lent out, and if a section waits for its thread the event must be read although the
 * section is open; it may then finish its copy after the munmap has returned.
 */
static void quiesce(struct tv_pager *p)
{
	struct timespec t = { 0, 10000 };
	for (int i = 0; load32(&p->sh->evictor.seq) & 1; i++)
		if (i < 1000)
			relax();
		else
			nanosleep(&t, NULL);
	for (int i = 0; i < 50; i++) {
		if (!sections_open(p->sh))
			return;
		relax();
	}
	while (sections_open(p->sh) && !fault_pending(p)) {
		nanosleep(&t, NULL);
		if (p->waited++ < PATIENCE)
			continue;
		/* Whom the section waits for may be among these. */
		if (lend_all(p))
			return;
	}
}

/* follow notes where suspended regions go of which mremap has moved all. */
static void follow(struct tv_shared *sh, uint64_t from, uint64_t to, uint64_t len)
{
	uint32_t top = load32(&sh->suspended_top);
	for (uint32_t i = 0; i < top; i++) {
		struct tv_suspended *r = &sh->suspended[i];
		uint64_t at = load64(&r->at), n = load64(&r->len);
		/* Fails when it was resumed meanwhile. */
		if (at && from <= at && at + n <= from + len)
			__atomic_compare_exchange_n(&r->at, &at, at - from + to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	}
}

/* give_up is UFFDIO_UNREGISTER for what has no evicted pages near it. */
static void give_up(struct tv_pager *p, uint64_t start, uint64_t end)
{
	uint64_t leaf_bytes = TV_LEAF_PAGES * PAGE;
	for (uint64_t va = start; va < end;) {
		struct uffdio_range r = { .start = va };
		for (int keep = 0; va < end && !keep;) {
			if (!load32(&p->sh->evicted[va >> 30])) {
				va = ((va >> 30) + 1) << 30;
				continue;
			}
			struct tv_leaf *l = leaf_of(p->sh, va);
			keep = l && evicted_in(l);
			if (!keep)
				va = (va / leaf_bytes + 1) * leaf_bytes;
		}
		r.len = (va < end ? va : end) - r.start;
		if (r.len)
			ioctl(p->uffd, UFFDIO_UNREGISTER, &r);
		if (va < end)
			va = (va / leaf_bytes + 1) * leaf_bytes;
	}
}

/*
 * leave makes what lies in a range the kernel's business again, as no region is there:
 * all but suspended regions, which may move on before they are resumed, and what evicted
 * pages lie in.
 */
static void leave(struct tv_pager *p, uint64_t start, uint64_t end)
{
	struct tv_shared *sh = p->sh;
	uint32_t top = load32(&sh->suspended_top);
	while (start < end) {
		uint64_t skip = 0, stop = end;
		for (uint32_t i = 0; i < top; i++) {
			uint64_t at = load64(&sh->suspended[i].at), to = at + load64(&sh->suspended[i].len);
			if (at <= start && start < to && to > skip)
				skip = to;
			if (at > start && at < stop)
				stop = at;
		}
		if (skip) {
			start = skip;
			continue;
		}
		give_up(p, start, stop);
		start = stop;
	}
}

/*
 * settle waits until no section is open, after a message was read with one open: what it
 * brings back no child would see. Not for ever, as a section may wait for a thread whose
 * fault is to be read.
 */
static void settle(struct tv_pager *p)
{
	struct timespec t = { 0, 10000 };
	for (int i = 0; sections_open(p->sh) && i < 10000; i++)
		nanosleep(&t, NULL);
}

/*
 * handle reads one message, if there is one, and acts on it. The mappings' changes
 * are in the page table before the next section is opened, and before Go code that
 * ran the system call and sees an even turn goes on.
 */
static void handle(struct tv_pager *p)
{
	struct tv_shared *sh = p->sh;
	struct uffd_msg m;
	struct uffdio_range r;
	__atomic_fetch_add(&sh->change, 1, __ATOMIC_SEQ_CST);
	quiesce(p);
	__atomic_fetch_add(&sh->turn, 1, __ATOMIC_SEQ_CST);
	tv_generation_begin(&sh->journal);
	ssize_t n = tv_family_read(p->family, p->uffd, &m, sizeof m);
	if (n == sizeof m)
		switch (m.event) {
		case UFFD_EVENT_REMOVE:
			set_range(sh, m.arg.remove.start, m.arg.remove.end, TV_ABSENT);
			tv_record(&sh->journal, TV_REMOVE, m.arg.remove.start, m.arg.remove.end, 0);
			break;
		case UFFD_EVENT_UNMAP:
			set_range(sh, m.arg.remove.start, m.arg.remove.end, TV_GONE);
			tv_record(&sh->journal, TV_UNMAP, m.arg.remove.start, m.arg.remove.end, 0);
			/* A thread that waits for a page of it must find out. */
			r = (struct uffdio_range){ .start = m.arg.remove.start, .len = m.arg.remove.end - m.arg.remove.start };
			ioctl(p->uffd, UFFDIO_WAKE, &r);
			break;
		case UFFD_EVENT_FORK:
			settle(p);
			tv_family_born(p->family, m.arg.fork.ufd);
			break;
		case UFFD_EVENT_REMAP:
			tv_mark_armed(sh, m.arg.remap.to, m.arg.remap.to + m.arg.remap.len);
			tv_carry(sh, m.arg.remap.from, m.arg.remap.to, m.arg.remap.len);
			set_range(sh, m.arg.remap.from, m.arg.remap.from + m.arg.remap.len, TV_GONE);
			tv_record(&sh->journal, TV_REMAP, m.arg.remap.from, m.arg.remap.from + m.arg.remap.len, m.arg.remap.to);
			follow(sh, m.arg.remap.from, m.arg.remap.to, m.arg.remap.len);
			leave(p, m.arg.remap.to, m.arg.remap.to + m.arg.remap.len);
			r = (struct uffdio_range){ .start = m.arg.remap.from, .len = m.arg.remap.len };
			ioctl(p->uffd, UFFDIO_WAKE, &r);
			break;
		}
	tv_generation_end(&sh->journal, n == sizeof m && m.event != UFFD_EVENT_PAGEFAULT && m.event != UFFD_EVENT_FORK);
	__atomic_fetch_add(&sh->turn, 1, __ATOMIC_SEQ_CST);
	__atomic_fetch_sub(&sh->change, 1, __ATOMIC_SEQ_CST);
	if (n != sizeof m || m.event != UFFD_EVENT_PAGEFAULT)
		p->waited = 0;
	else
		fault(p, m.arg.pagefault.address & ~(PAGE - 1), (struct asker){ .since = now(), .tid = m.arg.pagefault.feat.ptid });
}

static void *run(void *arg)
{
	struct tv_pager *p = arg;
	struct pollfd f[4] = { { .fd = p->uffd, .events = POLLIN }, { .fd = p->stop, .events = POLLIN }, { .fd = p->again, .events = POLLIN },
		{ .fd = tv_family_fd(p->family), .events = POLLIN } };
	uint64_t some;
	prctl(PR_SET_TIMERSLACK, 1ul); /* sleeps in quiesce hold engines up: as short as they say */
	for (;;) {
		if (poll(f, 4, tv_family_busy(p->family) ? 0 : p->nretry ? 1 : -1) < 0) {
			if (errno != EINTR)
				return NULL;
			continue;
		}
		if (f[1].revents)
			return NULL;
		if (f[2].revents && read(p->again, &some, sizeof some) < 0 && errno != EAGAIN)
			return NULL;
		/* Only when there is something: engines' sections wait meanwhile. */
		if (f[0].revents)
			handle(p);
		retry_faults(p);
		if (tv_family_busy(p->family))
			tv_family_serve(p->family);
	}
}

struct tv_pager *tv_pager_start(int uffd, struct tv_shared *sh, int *err)
{
	struct tv_pager *p = calloc(1, sizeof *p);
	char path[64];
	sigset_t all, old;
	if (!p) {
		*err = ENOMEM;
		return NULL;
	}
	p->uffd = uffd;
	p->sh = sh;
	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", uffd);
	p->fdinfo = open(path, O_RDONLY | O_CLOEXEC);
	p->stop = eventfd(0, EFD_CLOEXEC);
	p->again = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	*err = p->fdinfo < 0 || p->stop < 0 || p->again < 0 ? errno : 0;
	if (!*err && !(p->family = tv_family_new(sh)))
		*err = errno;
	if (!*err) {
		/* A signal handled on this thread would enter Go. */
		sigfillset(&all);
		pthread_sigmask(SIG_SETMASK, &all, &old);
		*err = pthread_create(&p->thread, NULL, run, p);
		pthread_sigmask(SIG_SETMASK, &old, NULL);
	}
	if (!*err) {
		pthread_setname_np(p->thread, "tapverbs-pager");
		return p;
	}
	if (p->fdinfo >= 0)
		close(p->fdinfo);
	if (p->stop >= 0)
		close(p->stop);
	if (p->again >= 0)
		close(p->again);
	if (p->family)
		tv_family_end(p->family);
	free(p);
	return NULL;
}

void tv_pager_again(struct tv_pager *p)
{
	uint64_t one = 1;
	if (write(p->again, &one, sizeof one) != sizeof one)
		return; /* so many are waiting to be read */
}

void tv_pager_stop(struct tv_pager *p)
{
	uint64_t one = 1;
	if (write(p->stop, &one, sizeof one) != sizeof one)
		abort(); /* an eventfd of our own takes a 1 */
	pthread_join(p->thread, NULL);
	tv_family_end(p->family);
	close(p->stop);
	close(p->again);
	close(p->fdinfo);
	free(p->retry);
	free(p);
}

/* tv_image gives the executable's (or library's) own range of addresses. */
void tv_image(uint64_t *start, uint64_t *end)
{
	extern char __ehdr_start[] __attribute__((visibility("hidden"))), _end[] __attribute__((visibility("hidden")));
	*start = (uint64_t)__ehdr_start;
	*end = (uint64_t)_end;
}
