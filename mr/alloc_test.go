// SPDX-License-Identifier: Apache-2.0

package mr

import "testing"

// TestNothingAllocates: what engines call for each packet takes nothing from the Go
// heap, errors included.
func TestNothingAllocates(t *testing.T) {
	const runs = 1000
	b := newBed(t, 4*runs*pageSize)
	page, odd, dst := pattern(pageSize, 1), pattern(3000, 2), make([]byte, 5000)
	present := b.r.IOVA()
	b.put(t, 0, pattern(3*pageSize, 1))
	short := register(t, b.tab, b.m.Addr(), 10, func(a *RegAttr) { a.Access = 0 })
	dead := register(t, b.tab, b.m.Addr(), 10)
	if err := dead.Deregister(); err != nil {
		t.Fatal(err)
	}
	at := present + 8*pageSize
	next := func(n uint64) uint64 { at += n; return at - n }
	check := func(k Key, pd PD, n uint64, need Access) func() error {
		return func() error { _, err := b.tab.Check(k, pd, present, n, need); return err }
	}
	// The first use of a staging buffer maps it.
	if err := b.a.Write(&b.st, b.r, next(pageSize), odd); err != nil {
		t.Fatal(err)
	}
	if err := b.a.Flush(&b.st); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		want error
		f    func() error
	}{
		{"write present", nil, func() error { return b.a.Write(&b.st, b.r, present+5, odd) }},
		{"write absent page", nil, func() error { return b.a.Write(&b.st, b.r, next(pageSize), page) }},
		{"write absent, staged", nil, func() error { return b.a.Write(&b.st, b.r, next(3000), odd) }},
		{"flush", nil, func() error {
			if err := b.a.Write(&b.st, b.r, next(3000), odd); err != nil {
				return err
			}
			return b.a.Flush(&b.st)
		}},
		{"read", nil, func() error { return b.a.Read(b.r, present+5, dst) }},
		{"atomic", nil, func() error { _, err := b.a.Atomic(b.r, present, FetchAdd, 0, 1); return err }},
		{"check", nil, check(b.r.RKey(), 1, 100, RemoteWrite)},
		{"check, key", ErrKey, check(dead.RKey(), 1, 100, RemoteWrite)},
		{"check, domain", ErrPD, check(b.r.RKey(), 2, 100, RemoteWrite)},
		{"check, right", ErrAccess, check(short.RKey(), 1, 5, RemoteWrite)},
		{"check, range", ErrRange, check(short.RKey(), 1, 11, 0)},
		{"write, deregistered", ErrKey, func() error { return b.a.Write(&b.st, dead, present, odd) }},
	} {
		var err error
		if n := testing.AllocsPerRun(runs/2, func() {
			if e := c.f(); e != c.want {
				err = e
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations", c.name, n)
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if e := b.a.Flush(&b.st); e != nil {
			t.Errorf("%s: %v", c.name, e)
		}
	}
	// Faults are counted, so the writes above did find absent pages.
	if got := b.r.Stats().PageFaults; got < runs/2 {
		t.Errorf("only %d page faults", got)
	}
}
