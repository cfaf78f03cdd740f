// SPDX-License-Identifier: Apache-2.0

package mr

import "testing"

func usage(t *testing.T, r *Region) Usage {
	t.Helper()
	u, err := r.Usage()
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func TestUsageSaysWherePagesAre(t *testing.T) {
	const n = 1024 // pages, of two leaves or three
	b := newBed(t, n*pageSize)
	if u := usage(t, b.r); u != (Usage{Size: n * pageSize}) {
		t.Errorf("nothing has happened: %+v", u)
	}
	b.put(t, 0, pattern(10*pageSize, 1))
	b.m.Bytes()[20*pageSize] = 1 // a fault of the application's
	u := usage(t, b.r)
	if u.Present != 11*pageSize || u.FaultsMinor != 10 || u.Placements != 1 || u.AppFaultsMinor+u.AppFaultsMajor > 1 {
		t.Errorf("11 pages: %+v", u)
	}
	if err := madvise(b.m.Addr(), 3*pageSize, 4 /* MADV_DONTNEED */); err != nil {
		t.Fatal(err)
	}
	if u := usage(t, b.r); u.Present != 8*pageSize || u.Invalidations != 3 {
		t.Errorf("three were dropped: %+v", u)
	}
	// Another region over the same pages counts once.
	register(t, b.tab, b.m.Addr(), n*pageSize/2)
	all, err := b.s.Usage()
	if err != nil || all.Size != n*pageSize || all.Present != 8*pageSize || all.FaultsMinor != 10 {
		t.Errorf("all: %+v, %v", all, err)
	}
}

func TestMapSaysWherePagesAre(t *testing.T) {
	const n = 1000
	b := newBed(t, n*pageSize)
	b.put(t, 0, pattern(100*pageSize, 1))
	b.put(t, 950*pageSize, pattern(20*pageSize, 1))
	m := b.r.Map(10)
	if len(m) != 10 {
		t.Fatalf("%d parts", len(m))
	}
	for i, p := range m {
		want := map[int]uint64{0: 100, 9: 20}[i] * pageSize
		if p != (Residency{Size: 100 * pageSize, Present: want}) {
			t.Errorf("part %d: %+v, want %d present", i, p, want)
		}
	}
	// What evictions leave in the words; the kernel says that these are not in place.
	for i, w := range []uint32{pageLimbo, pageLimbo, pageStored, pagePoisoned} {
		va := uint64(b.m.Addr()) + uint64(200+i)*pageSize
		l := b.s.leaf(va)
		if !b.s.become(l, va, l.word[pageIndex(va)].Load(), w) {
			t.Fatal("the word changed")
		}
	}
	if p := b.r.Map(5)[1]; p != (Residency{Size: 200 * pageSize, Limbo: 2 * pageSize, Stored: pageSize, Poisoned: pageSize}) {
		t.Errorf("evicted pages: %+v", p)
	}
	if u := usage(t, b.r); u.Limbo != 2*pageSize || u.Stored != pageSize {
		t.Errorf("evicted pages: %+v", u)
	}
	for i := range 4 {
		va := uint64(b.m.Addr()) + uint64(200+i)*pageSize
		b.s.become(b.s.leaf(va), va, b.s.leaf(va).word[pageIndex(va)].Load(), pageAbsent)
	}
	if m := b.r.Map(5000); len(m) != n || m[99].Present != pageSize || m[100].Present != 0 {
		t.Errorf("a part a page: %d of them", len(m))
	}
	if b.r.Map(0) != nil {
		t.Error("no parts")
	}
	if err := munmap(b.m.Addr()+400*pageSize, 300*pageSize); err != nil {
		t.Fatal(err)
	}
	if p := b.r.Map(2); len(p) != 2 || p[0].Present != 100*pageSize || p[1].Present != 20*pageSize {
		t.Errorf("with a hole: %+v", p)
	}
}
