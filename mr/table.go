// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"crypto/rand"
	"encoding/binary"
	"sync"
	"sync/atomic"
)

// Table is the keys of one device. Lookups take no lock.
type Table struct {
	space *Space
	mu    sync.Mutex // writers; binds and windows, too
	hash  atomic.Pointer[keyHash]
	moved atomic.Uint64
	byQP  map[uint32]map[*Window]struct{} // windows of type 2 by the QP they are bound to
}

// keyHash is an open-addressed hash of regions by handle. Handles are random, so
// their low bits spread. Readers load slots atomically; a removed region leaves
// removedRegion behind so that probes go on past it.
type keyHash struct {
	slots []atomic.Pointer[Region]
	used  int // slots ever filled
	live  int
}

// removedRegion marks a slot, is never handed out: its key is 0, and it is invalid.
var removedRegion = func() *Region {
	r := new(Region)
	r.invalid.Store(true)
	return r
}()

// NewTable makes the key table of a device whose regions lie in space.
func NewTable(space *Space) *Table {
	t := &Table{space: space, byQP: map[uint32]map[*Window]struct{}{}}
	t.hash.Store(&keyHash{slots: make([]atomic.Pointer[Region], 64)})
	return t
}

// Space is the memory the table's regions lie in.
func (t *Table) Space() *Space { return t.space }

// find gives the region whose handle is a key's, whatever the tag.
func (t *Table) find(handle uint32) *Region {
	h := t.hash.Load()
	mask := uint32(len(h.slots) - 1)
	for i := handle & mask; ; i = (i + 1) & mask {
		r := h.slots[i].Load()
		if r == nil {
			return nil
		}
		if r != removedRegion && r.key.handle() == handle {
			return r
		}
	}
}

// probe gives the region with a key, perhaps one that is invalid; nil if there is none.
func (t *Table) probe(k Key) *Region {
	h := t.hash.Load()
	mask := uint32(len(h.slots) - 1)
	for i := k.handle() & mask; ; i = (i + 1) & mask {
		if r := h.slots[i].Load(); r == nil || r.key == k {
			return r
		}
	}
}

// Lookup gives the region with a key; nil if there is none.
func (t *Table) Lookup(k Key) *Region {
	r := t.probe(k)
	if r == nil || r.invalid.Load() {
		return nil
	}
	return r
}

// Check is what local access goes through (IBA 10.6.3): the key is known and a
// region's, belongs to the protection domain, allows what is needed, and n > 0 bytes at
// iova lie in the region. Errors: ErrKey, ErrPD, ErrAccess, ErrRange.
func (t *Table) Check(k Key, pd PD, iova, n uint64, need Access) (*Region, error) {
	r := t.probe(k)
	if r == nil || r.invalid.Load() || r.win != nil {
		return nil, ErrKey
	}
	if err := r.check(pd, iova, n, need); err != nil {
		return nil, err
	}
	return r, nil
}

// CheckRemote is Check for a request that came to a QP: its key may be a window's,
// too, as long as that is open to the QP (IBA 10.6.7.2).
func (t *Table) CheckRemote(k Key, pd PD, qp uint32, iova, n uint64, need Access) (*Region, error) {
	r := t.probe(k)
	if r == nil || r.invalid.Load() || r.qp != 0 && r.qp != qp {
		return nil, ErrKey
	}
	if err := r.check(pd, iova, n, need); err != nil {
		return nil, err
	}
	return r, nil
}

func (r *Region) check(pd PD, iova, n uint64, need Access) error {
	have, off := r.rights.Load(), iova-r.attr.IOVA
	switch {
	case have.pd() != pd:
		return ErrPD
	case have.access()&need != need:
		return ErrAccess
	case iova < r.attr.IOVA || off > r.attr.Length || n > r.attr.Length-off:
		return ErrRange
	}
	return nil
}

// insert gives a region its key: random, so that none tells anything about
// another.
func (t *Table) insert(r *Region) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.hash.Load()
	if h.live >= 1<<22 {
		return ErrNoMem // a quarter of all handles: guessing must stay hard
	}
	for {
		var b [4]byte
		if _, err := rand.Read(b[:]); err != nil {
			return err
		}
		r.key = Key(binary.LittleEndian.Uint32(b[:]))
		if hd := r.key.handle(); hd != 0 && t.find(hd) == nil {
			break
		}
	}
	if 2*(h.used+1) > len(h.slots) {
		h = t.rehash(h)
	}
	h.put(r)
	return nil
}

func (h *keyHash) put(r *Region) {
	mask := uint32(len(h.slots) - 1)
	i := r.key.handle() & mask
	for h.slots[i].Load() != nil {
		i = (i + 1) & mask
	}
	h.slots[i].Store(r)
	h.used++
	h.live++
}

// rehash copies the live regions into a table of fitting size.
func (t *Table) rehash(old *keyHash) *keyHash {
	n := 64
	for n < 4*(old.live+1) {
		n *= 2
	}
	h := &keyHash{slots: make([]atomic.Pointer[Region], n)}
	for i := range old.slots {
		if r := old.slots[i].Load(); r != nil && r != removedRegion {
			h.put(r)
		}
	}
	t.hash.Store(h)
	return h
}

// hashRemove takes a region's key away. It is called with t.mu held, as hashReplace.
func (t *Table) hashRemove(r *Region) {
	if s := t.slot(r); s != nil {
		s.Store(removedRegion)
		t.hash.Load().live--
	}
}

// hashReplace puts another region of the same handle in a region's place.
func (t *Table) hashReplace(r, by *Region) {
	if s := t.slot(r); s != nil {
		s.Store(by)
	}
}

// slot is where a region is; nil if it is not there.
func (t *Table) slot(r *Region) *atomic.Pointer[Region] {
	h := t.hash.Load()
	mask := uint32(len(h.slots) - 1)
	for i := r.key.handle() & mask; ; i = (i + 1) & mask {
		switch h.slots[i].Load() {
		case r:
			return &h.slots[i]
		case nil:
			return nil
		}
	}
}
