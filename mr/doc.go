// SPDX-License-Identifier: Apache-2.0

// Package mr holds memory regions: keys and access checks, and the paging that
// lets peers write to memory that is not pinned.
//
// # How a region is paged
//
// Registering a range pins nothing and touches nothing. The range is registered
// with userfaultfd(2), and the package keeps a page table of its own (one atomic
// state a page) for what it knows of it. Engines never touch a page they do not
// know to be present: data for absent pages is staged and placed by UFFDIO_COPY,
// so that a WRITE is the page's first content. Faults of the application's own
// threads are answered by one C thread (pager.c) that never enters Go.
//
// # Erase first, then change
//
// Engines touch memory only inside sections (section.go), which are short and
// are counted in memory shared with the C thread. One may linger over a batch of accesses,
// and then ends at the next of them once it is waited for. Whoever changes what a page is
// (the pager on munmap, mremap or MADV_DONTNEED; Deregister) first waits until no
// section is open. So when munmap or Deregister has returned, no request reaches
// that memory any more.
//
// What cannot be had: the kernel tells of munmap and MAP_FIXED when they have happened
// and before the call returns. Until it returns a request may still be writing, so if
// another thread is given the same addresses in that time, by an mmap of its own or by
// a MAP_FIXED under way, the bytes land there. After the call has returned none do.
// A hole punched in shared memory by fallocate(2), or a file cut short, is not told at
// all: the next request finds zeros, or gets ErrFault.
//
// # Eviction
//
// Private anonymous memory that userfaultfd pages can be evicted, by hand (Space.Evict) or
// because it has a budget (SetBudget of Region, Table and Space): to the limbo, which is
// memory of this package, and on to a Store. It comes back when a request or the
// application wants it; what a request does in the meantime, if it is in the store, its
// FaultPolicy says. The content of an evicted page moves with mremap(2), is dropped with
// its mapping, and outlives its region (evict.go, budget.go, fetch.go).
//
// What cannot be had: the kernel tells of munmap and mremap late, see above. If meanwhile
// another thread moves evicted memory to the very addresses that became free, what is told
// then is taken to be about that memory, and its evicted content is dropped.
//
// # Keys
//
// A table leads from keys to regions, without locks for those who look. A memory window
// is a key that leads to a view of a region's memory, one for each bind; a region that is
// registered anew elsewhere is a new one behind the same key. What was there before is
// dead from then on, for requests that hold it, too (window.go, rereg.go).
//
// # Suspending
//
// A region can be suspended: its key stays good, requests wait, and its owner changes the
// mapping meanwhile, or puts the region on other memory (suspend.go, replace.go). It can
// be ended by force, too, with work under way. What is in the store of evicted pages makes
// requests wait alike, if they are not to be held up by it (faultpolicy.go).
//
// # Telling others
//
// Whoever remembers something of memory looks at one word (Space.Generation) before using
// it, and reads what has changed from a journal (journal.go); package regcache does. Who
// wants to be called has a Notifier (notify.go).
//
// # Where userfaultfd is not to be had
//
// Where userfaultfd is not to be had, or the mapping does not support it (files,
// hugetlb), or the memory is Go's own heap, a region is paged by the kernel in the
// ordinary way: correct, but page faults are taken in the engine's copy. Paging
// says which.
package mr
