// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"bytes"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"testing"
)

// TestReregister changes a region in all combinations: what is changed is as asked for,
// what is not is as it was, and the key opens what it should.
func TestReregister(t *testing.T) {
	for what := ChangeTranslation; what <= allRereg; what++ {
		b := newBed(t, 16*pageSize)
		r := register(t, b.tab, b.m.Addr()+100, 5000, func(a *RegAttr) { a.IOVA, a.HaveIOVA = 1<<40, true })
		k := r.RKey()
		n, err := r.Reregister(what, RegAttr{PD: 9, Addr: b.m.Addr() + 8*pageSize, Length: 777, Access: RemoteRead}, nil)
		if err != nil {
			t.Fatalf("%b: %v", what, err)
		}
		t.Cleanup(func() { _ = n.Deregister() })
		pd, acc, iova, length := PD(1), allRights, uint64(1<<40), uint64(5000)
		if what&ChangePD != 0 {
			pd = 9
		}
		if what&ChangeAccess != 0 {
			acc = RemoteRead
		}
		if what&ChangeTranslation != 0 {
			iova, length = uint64(b.m.Addr())+8*pageSize, 777
		}
		if n.RKey() != k || n.PD() != pd || n.Access() != acc || n.IOVA() != iova || n.Length() != length {
			t.Errorf("%b: key %#x, domain %d, rights %#x, %d bytes at %#x", what, n.RKey(), n.PD(), n.Access(), n.Length(), n.IOVA())
		}
		for _, c := range []struct {
			name string
			pd   PD
			iova uint64
			n    uint64
			need Access
			ok   bool
		}{
			{"all of it", pd, iova, length, RemoteRead, true},
			{"one more", pd, iova, length + 1, RemoteRead, false},
			{"write", pd, iova, 1, RemoteWrite, what&ChangeAccess == 0},
			{"old domain", 1, iova, 1, RemoteRead, what&ChangePD == 0},
			{"old place", pd, 1 << 40, 1, RemoteRead, what&ChangeTranslation == 0},
		} {
			got, err := b.tab.CheckRemote(k, c.pd, testQP, c.iova, c.n, c.need)
			if (err == nil) != c.ok || err == nil && got != n {
				t.Errorf("%b, %s: %v", what, c.name, err)
			}
		}
		if moved := what&ChangeTranslation != 0; moved != (n != r) || n.MovedSince(0) != moved || n.MovedSince(b.tab.Moved()) {
			t.Errorf("%b: another region %v, moved %v", what, n != r, n.MovedSince(0))
		}
	}
}

// TestReregisterMemory: by the old region nothing is reached any more, by the new one
// what it says, and pages that nobody has registered go back to the kernel.
func TestReregisterMemory(t *testing.T) {
	b := newBed(t, 32*pageSize)
	if err := b.r.Deregister(); err != nil {
		t.Fatal(err)
	}
	old := register(t, b.tab, b.m.Addr(), 8*pageSize)
	var st Stage
	if err := b.a.Write(&st, old, old.IOVA(), []byte("staged")); err != nil || !st.Active() {
		t.Fatal(err)
	}
	n, err := old.Reregister(ChangeTranslation, RegAttr{Addr: b.m.Addr() + 4*pageSize, Length: 8 * pageSize}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Deregister() })
	if err := b.a.Flush(&st); err != ErrKey {
		t.Errorf("flush for the old one: %v", err)
	}
	st.Drop()
	if err := b.a.Write(&st, old, old.IOVA(), []byte("x")); err != ErrKey {
		t.Errorf("write to the old one: %v", err)
	}
	if err := old.Deregister(); err != ErrClosed {
		t.Errorf("the old one deregistered: %v", err)
	}
	if _, err := old.Reregister(ChangePD, RegAttr{PD: 1}, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("the old one changed: %v", err)
	}
	b.r = n
	p := pattern(3*pageSize, 5)
	b.put(t, 100, p)
	if !bytes.Equal(b.m.Bytes()[4*pageSize+100:][:len(p)], p) {
		t.Error("the data is not there")
	}
	for page, want := range map[int]uint64{1: 0, 9: 1} { // page 1 is nobody's now
		before := b.s.Stats().AppFaults
		b.m.Bytes()[page*pageSize] = 1
		if got := b.s.Stats().AppFaults - before; got != want {
			t.Errorf("page %d: %d faults answered, want %d", page, got, want)
		}
	}
}

// TestReregisterFails: the region is as it was then.
func TestReregisterFails(t *testing.T) {
	b := newBed(t, 16*pageSize)
	r := register(t, b.tab, b.m.Addr(), 4*pageSize)
	hole := alloc(t, pageSize)
	at := hole.Addr()
	if err := hole.Close(); err != nil {
		t.Fatal(err)
	}
	null, err := b.tab.RegisterNull(1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = null.Deregister() })
	all, err := b.tab.Register(RegAttr{PD: 1, Length: math.MaxUint64, Access: OnDemand | LocalWrite})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = all.Deregister() })
	for _, c := range []struct {
		name string
		r    *Region
		what Rereg
		a    RegAttr
		want error
	}{
		{"nothing", r, 0, RegAttr{}, ErrInvalid},
		{"unknown", r, 8, RegAttr{}, ErrInvalid},
		{"rights", r, ChangeAccess, RegAttr{Access: RemoteWrite}, ErrInvalid},
		{"flags", r, ChangeAccess, RegAttr{Access: 1 << 30}, ErrInvalid},
		{"no length", r, ChangeTranslation, RegAttr{Addr: b.m.Addr()}, ErrInvalid},
		{"unmapped", r, allRereg, RegAttr{PD: 2, Addr: at, Length: pageSize}, ErrUnmapped},
		{"implicit", all, ChangeAccess, RegAttr{Access: LocalWrite}, ErrInvalid},
		{"null", null, ChangeAccess, RegAttr{}, ErrInvalid},
	} {
		if got, err := c.r.Reregister(c.what, c.a, nil); !errors.Is(err, c.want) || got != nil {
			t.Errorf("%s: %v, %v, want %v", c.name, got, err, c.want)
		}
	}
	if got, err := b.tab.CheckRemote(r.RKey(), 1, testQP, r.IOVA(), 4*pageSize, allRights); got != r || err != nil {
		t.Errorf("afterwards: %v", err)
	}
	b.r = r
	b.put(t, 0, pattern(100, 1))
}

// TestReregisterZeroBased: the flag moves the addresses, with the range or without.
func TestReregisterZeroBased(t *testing.T) {
	b := newBed(t, 16*pageSize)
	r := register(t, b.tab, b.m.Addr()+5, 1000)
	for _, acc := range []Access{allRights | ZeroBased, allRights, allRights | ZeroBased} {
		n, err := r.Reregister(ChangeAccess, RegAttr{Access: acc}, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = n.Deregister() })
		want := uint64(b.m.Addr()) + 5
		if acc&ZeroBased != 0 {
			want = 0
		}
		if r = n; r.IOVA() != want || r.Addr() != b.m.Addr()+5 || r.Length() != 1000 {
			t.Errorf("%#x: %d bytes at %#x", acc, r.Length(), r.IOVA())
		}
	}
}

// TestReregisterUnderWay has an engine write to a region that moves to and fro and
// changes its rights: each write lands in one of the two places, whole, or fails.
func TestReregisterUnderWay(t *testing.T) {
	b := newBed(t, 4*pageSize)
	r := register(t, b.tab, b.m.Addr(), pageSize)
	k := r.RKey()
	var (
		baton sync.Mutex
		stop  atomic.Bool
		done  = make(chan error, 1)
		wrote [2]int
	)
	page := func(i int) []byte { return b.m.Bytes()[2*i*pageSize:][:pageSize] }
	go func() {
		var st Stage
		for i := 0; !stop.Load() || wrote[0] == 0 || wrote[1] == 0; i++ {
			baton.Lock()
			for side := range 2 {
				iova := uint64(b.m.Addr()) + uint64(2*side*pageSize)
				v, err := b.tab.CheckRemote(k, 1, testQP, iova, 64, RemoteWrite)
				if err != nil {
					continue // it is the other one now, or may not be written
				}
				p := pattern(64, byte(i))
				if err := errors.Join(b.a.Write(&st, v, iova, p), b.a.Flush(&st)); err != nil {
					done <- err
					baton.Unlock()
					return
				}
				if !bytes.Equal(page(side)[:64], p) {
					done <- errors.New("the data is elsewhere")
					baton.Unlock()
					return
				}
				wrote[side]++
			}
			baton.Unlock()
		}
		done <- nil
	}()
	var err error
	for i := 0; i < 2000 && err == nil; i++ {
		a := RegAttr{Addr: b.m.Addr() + uintptr(2*(i&1)*pageSize), Length: pageSize, Access: allRights}
		if r, err = r.Reregister(ChangeTranslation|ChangeAccess, a, &baton); err != nil {
			break
		}
		r, err = r.Reregister(ChangeAccess, RegAttr{Access: RemoteRead}, &baton)
		if err == nil {
			r, err = r.Reregister(ChangeAccess, RegAttr{Access: allRights}, &baton)
		}
	}
	for i := 0; err == nil && len(done) == 0 && i < 1<<20; i++ { // until each side was written once
		r, err = r.Reregister(ChangeTranslation, RegAttr{Addr: b.m.Addr() + uintptr(2*(i&1)*pageSize), Length: pageSize}, &baton)
		stop.Store(true)
	}
	stop.Store(true)
	if err := errors.Join(err, <-done); err != nil {
		t.Error(err)
	}
	if err := r.Deregister(); err != nil {
		t.Error(err)
	}
}

// TestReregisterKeepsCounts: what was counted before is counted still.
func TestReregisterKeepsCounts(t *testing.T) {
	b := newBed(t, 16*pageSize)
	r := register(t, b.tab, b.m.Addr(), 4*pageSize)
	r.handled.Add(5)
	r.major.Add(3)
	r.faultNs.Add(700)
	r.CountRNR()
	r.placements.Add(4)
	n, err := r.Reregister(ChangeTranslation, RegAttr{Addr: b.m.Addr() + 8*pageSize, Length: pageSize}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Deregister() })
	u, err := n.Usage()
	if err != nil || u.FaultsMajor != 3 || u.FaultsMinor != 2 || u.FaultNs != 700 || u.RNRs != 1 || u.Placements != 4 {
		t.Errorf("%+v: %v", u, err)
	}
}
