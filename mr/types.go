// SPDX-License-Identifier: Apache-2.0

package mr

import "errors"

// Key is an lkey or rkey: a random handle of 24 bits and a tag of 8.
type Key uint32

// handle is the part of a key that names the region; the low 8 bits are a tag.
func (k Key) handle() uint32 { return uint32(k) >> 8 }

// PD is the number of a protection domain.
type PD uint32

// Access holds access rights, with the values of enum ibv_access_flags.
type Access uint32

// Access rights (ibv_reg_mr(3)). Local read is always allowed.
const (
	LocalWrite      Access = 1 << 0
	RemoteWrite     Access = 1 << 1
	RemoteRead      Access = 1 << 2
	RemoteAtomic    Access = 1 << 3
	MWBind          Access = 1 << 4
	ZeroBased       Access = 1 << 5
	OnDemand        Access = 1 << 6
	HugeTLB         Access = 1 << 7
	FlushGlobal     Access = 1 << 8 // a peer may FLUSH to global visibility
	FlushPersistent Access = 1 << 9 // and to persistence: for shared mappings of files
	RelaxedOrdering Access = 1 << 20

	allAccess = LocalWrite | RemoteWrite | RemoteRead | RemoteAtomic | MWBind | ZeroBased | OnDemand | HugeTLB | RelaxedOrdering |
		FlushGlobal | FlushPersistent
)

// Paging says who brings a region's absent pages in.
type Paging uint8

const (
	// UserFault: this package, through userfaultfd.
	UserFault Paging = iota
	// KernelPaging: the kernel, in the ordinary way, when the engine touches a page.
	KernelPaging
	// Pinned: nobody needs to; the region is locked in memory with mlock(2).
	Pinned
	// DeviceMemory: the kernel; the memory is the device's (ibv_alloc_dm(3)).
	DeviceMemory
	// Implicit: the region is all memory. Pages that are part of a UserFault region
	// too are brought in as that one's are, others by the kernel.
	Implicit
	// NullMemory: there is no memory. Reads give zeros, writes go nowhere.
	NullMemory
)

func (p Paging) String() string {
	return [...]string{"userfault", "kernel", "pinned", "device", "implicit", "null"}[p]
}

// Errors. Those of requests are preallocated: reporting one costs nothing.
var (
	ErrKey     = errors.New("mr: unknown key")
	ErrPD      = errors.New("mr: key of another protection domain")
	ErrAccess  = errors.New("mr: access not allowed")
	ErrRange   = errors.New("mr: outside the region")
	ErrRemoved = errors.New("mr: memory of the region was unmapped")
	ErrFault   = errors.New("mr: memory of the region cannot be accessed")
	// ErrBusy: the mapping is being changed; the request may be repeated later.
	ErrBusy = errors.New("mr: mapping is being changed")
	// ErrSuspended: the region is suspended; the request may be repeated when it is resumed.
	ErrSuspended = errors.New("mr: region is suspended")
	// ErrMajor: content is in the store and is being fetched; the request may be repeated
	// in about Space.FetchDelay.
	ErrMajor = errors.New("mr: content is being fetched from the store")
	// ErrPoisoned: the store has lost a page's content.
	ErrPoisoned = errors.New("mr: content of the region was lost")
	// ErrEliminated: the region was eliminated.
	ErrEliminated = errors.New("mr: region was eliminated")
	// ErrInvalid: arguments that cannot be (EINVAL).
	ErrInvalid = errors.New("mr: invalid argument")
	// ErrUnmapped: part of the range is not mapped (ENOMEM, as the kernel's ODP says EFAULT).
	ErrUnmapped = errors.New("mr: range is not mapped")
	// ErrNoMem: out of memory or of keys (ENOMEM).
	ErrNoMem = errors.New("mr: out of memory")
	// ErrMemlock: the range can't be locked under RLIMIT_MEMLOCK (ENOMEM).
	ErrMemlock = errors.New("mr: cannot lock memory")
	// ErrBound: memory windows are bound to the region (EBUSY).
	ErrBound = errors.New("mr: memory windows are bound to the region")
	// ErrNotSupported: what the kernel does not have, or not for this memory (EOPNOTSUPP).
	ErrNotSupported = errors.New("mr: not supported")
	// ErrClosed: deregistered or closed before.
	ErrClosed = errors.New("mr: closed")
)

// Counters count page events, with the kernel's names for on-demand paging
// where it has one (rdma statistic: page_faults, page_faults_handled,
// page_invalidations, page_prefetch).
type Counters struct {
	// PageFaults is the pages that requests found absent, PageFaultsHandled
	// those of them that were then brought in.
	PageFaults, PageFaultsHandled uint64
	// PageInvalidations is the pages that were present and left: munmap,
	// mremap, MADV_DONTNEED.
	PageInvalidations uint64
	// PagePrefetch is the pages brought in because somebody asked beforehand: the
	// application, or a peer (residency messages).
	PagePrefetch uint64
	// AppFaults is the faults of the application's own threads that the pager
	// answered. Only counted for a Space.
	AppFaults uint64
}
