// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"errors"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/mr/regcache"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/harness"
)

// TestRegCache: while a peer writes to some pages of a cached registration, others are
// mapped anew. The lookups of these give keys that reach them, and the writes under way
// notice nothing.
func TestRegCache(t *testing.T) {
	const page, pages = 4096, 64
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{})
	if err := c.B.Dev.Space().UserFault(); err != nil {
		t.Skip(err)
	}
	cache, err := provider.NewRegCache(c.B.PD, regcache.Options{MaxEntries: 16})
	if err != nil {
		t.Fatal(err)
	}
	m, err := mr.Alloc(pages * page)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	get := func(at uintptr, n uint64) *provider.RegCacheEntry {
		t.Helper()
		e, err := cache.Get(at, n, mr.LocalWrite|mr.RemoteWrite|mr.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	all := get(m.Addr(), pages*page)
	harness.Fill(c.A.Mem[:16*page], 1)
	id := uint64(0)
	write := func(key mr.Key, off, n int) {
		id++
		w := c.A.Write(c.B, id, 0, 0, n)
		w.RemoteAddr, w.RKey = uint64(m.Addr())+uint64(off), key
		c.A.Send(w)
	}
	for round := range 20 {
		write(all.RKey(), 0, 16*page) // in flight
		at := m.Addr() + uintptr(16+round)*page
		if _, _, e := unix.Syscall6(unix.SYS_MMAP, at, page, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED, ^uintptr(0), 0); e != 0 {
			t.Fatal(e)
		}
		if e := get(m.Addr(), 16*page); e != all {
			t.Fatal("pages that were not changed are registered anew")
		} else {
			cache.Put(e)
		}
		e := get(at, page)
		if e.RKey() == all.RKey() {
			t.Fatal("a stale key")
		}
		write(e.RKey(), (16+round)*page, page)
		c.WaitOK(c.A, id-1)
		c.WaitOK(c.A, id)
		cache.Put(e)
		for off, n := range map[int]int{0: 16 * page, (16 + round) * page: page} {
			if !bytes.Equal(m.Bytes()[off:][:n], c.A.Mem[:n]) {
				t.Fatalf("round %d: wrong data at page %d", round, off/page)
			}
		}
		clear(m.Bytes()[:16*page])
	}
	if st := cache.Stats(); st.Covered+st.Hits != 20 || st.Misses != 21 || st.Invalidated != 20 {
		t.Errorf("%+v", st)
	}
	if err := c.B.PD.Dealloc(); !errors.Is(err, provider.ErrBusy) {
		t.Errorf("domain: %v", err)
	}
	cache.Put(all)
	cache.Close()
	write(all.RKey(), 0, page)
	if wc := c.WaitOne(c.A); wc.Status != qp.WCRemAccessErr {
		t.Errorf("a key of a closed cache: %v", wc.Status)
	}
	heap := make([]byte, 100)
	if _, err := cache.Get(uintptr(unsafe.Pointer(&heap[0])), 100, 0); err != mr.ErrClosed {
		t.Error(err)
	}
}
