// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"errors"
	"sync"
	"testing"
)

func TestCheck(t *testing.T) {
	s := newSpace(t, Options{})
	tab := NewTable(s)
	m := alloc(t, 3*pageSize)
	const iova = 0xfff0_0000_0000_0123
	r := register(t, tab, m.Addr()+100, 5000, func(a *RegAttr) {
		a.PD, a.IOVA, a.HaveIOVA, a.Access = 7, iova, true, LocalWrite|RemoteWrite
	})
	other := register(t, NewTable(s), m.Addr(), 100, func(a *RegAttr) { a.PD = 7 })
	k := r.RKey()
	for _, c := range []struct {
		name string
		k    Key
		pd   PD
		iova uint64
		n    uint64
		need Access
		want error
	}{
		{"all", k, 7, iova, 5000, RemoteWrite, nil},
		{"last byte", k, 7, iova + 4999, 1, LocalWrite, nil},
		{"both rights", k, 7, iova, 1, LocalWrite | RemoteWrite, nil},
		{"one too long", k, 7, iova, 5001, RemoteWrite, ErrRange},
		{"one before", k, 7, iova - 1, 2, RemoteWrite, ErrRange},
		{"behind", k, 7, iova + 5000, 1, RemoteWrite, ErrRange},
		{"length wraps", k, 7, iova + 1, ^uint64(0), RemoteWrite, ErrRange},
		{"low address", k, 7, 0, 1, RemoteWrite, ErrRange},
		{"highest address", k, 7, ^uint64(0), 1, RemoteWrite, ErrRange},
		{"no read", k, 7, iova, 1, RemoteRead, ErrAccess},
		{"one of two rights", k, 7, iova, 1, RemoteRead | RemoteWrite, ErrAccess},
		{"atomic", k, 7, iova, 8, RemoteAtomic, ErrAccess},
		{"other domain", k, 8, iova, 1, RemoteWrite, ErrPD},
		{"other tag", k ^ 1, 7, iova, 1, RemoteWrite, ErrKey},
		{"other handle", k ^ 0x100, 7, iova, 1, RemoteWrite, ErrKey},
		{"another table's key", other.RKey(), 7, uint64(m.Addr()), 1, RemoteWrite, ErrKey},
		{"key 0", 0, 7, iova, 1, RemoteWrite, ErrKey},
	} {
		got, err := tab.Check(c.k, c.pd, c.iova, c.n, c.need)
		if err != c.want || (err == nil) != (got == r) {
			t.Errorf("%s: %v, %v, want %v", c.name, got, err, c.want)
		}
	}
	if err := r.Deregister(); err != nil {
		t.Fatal(err)
	}
	if _, err := tab.Check(k, 7, iova, 1, RemoteWrite); err != ErrKey {
		t.Errorf("after Deregister: %v", err)
	}
	if err := r.Deregister(); err != ErrClosed {
		t.Errorf("second Deregister: %v", err)
	}
}

func TestInvalidate(t *testing.T) {
	s := newSpace(t, Options{})
	tab := NewTable(s)
	m := alloc(t, pageSize)
	r := register(t, tab, m.Addr(), pageSize, func(a *RegAttr) { a.Invalidatable = true })
	plain := register(t, tab, m.Addr(), pageSize)
	if err := tab.Invalidate(plain.RKey(), 1, 17); err != ErrAccess {
		t.Errorf("region that is not for it: %v", err)
	}
	if err := tab.Invalidate(r.RKey(), 2, 17); err != ErrPD {
		t.Errorf("other domain: %v", err)
	}
	if err := tab.Invalidate(r.RKey(), 1, 17); err != nil {
		t.Error(err)
	}
	if tab.Lookup(r.RKey()) != nil {
		t.Error("the key still works")
	}
	if err := tab.Invalidate(r.RKey(), 1, 17); err != ErrKey {
		t.Errorf("twice: %v", err)
	}
	if err := r.Deregister(); err != nil {
		t.Error(err)
	}
}

// TestKeysTellNothing looks at many keys: unique handles, and every bit of a key
// and of the difference of two successive ones is as often 0 as 1.
func TestKeysTellNothing(t *testing.T) {
	s := newSpace(t, Options{NoUserFault: true})
	tab := NewTable(s)
	m := alloc(t, pageSize)
	const n = 20000
	var ones, flips [32]int
	handles := map[uint32]bool{}
	var last Key
	regions := make([]*Region, 0, n)
	for range n {
		r, err := tab.Register(RegAttr{Addr: m.Addr(), Length: 1})
		if err != nil {
			t.Fatal(err)
		}
		regions = append(regions, r)
		k := r.LKey()
		if k != r.RKey() || handles[k.handle()] {
			t.Fatalf("key %#x: twice, or lkey and rkey differ", k)
		}
		handles[k.handle()] = true
		for b := range 32 {
			ones[b] += int(k >> b & 1)
			flips[b] += int((k ^ last) >> b & 1)
		}
		last = k
	}
	// 6 standard deviations of a fair coin: sqrt(n)/2 each.
	const far = 6 * 71
	for b := range 32 {
		if d := ones[b] - n/2; d < -far || d > far {
			t.Errorf("bit %d is 1 in %d of %d keys", b, ones[b], n)
		}
		if d := flips[b] - n/2; d < -far || d > far {
			t.Errorf("bit %d changes in %d of %d keys", b, flips[b], n)
		}
	}
	for i, r := range regions {
		if tab.Lookup(r.LKey()) != r {
			t.Fatalf("region %d is not found", i)
		}
		if i%2 == 0 {
			if err := r.Deregister(); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i, r := range regions {
		if (tab.Lookup(r.LKey()) == r) != (i%2 == 1) {
			t.Fatalf("region %d of which every second was ended: found is wrong", i)
		}
		if i%2 == 1 {
			if err := r.Deregister(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestLookupWhileTableChanges looks one key up while others come and go.
func TestLookupWhileTableChanges(t *testing.T) {
	s := newSpace(t, Options{NoUserFault: true})
	tab := NewTable(s)
	m := alloc(t, pageSize)
	keep := register(t, tab, m.Addr(), pageSize)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if r, err := tab.Check(keep.RKey(), 1, keep.IOVA(), 1, RemoteWrite); r != keep {
					t.Errorf("the key that stays: %v", err)
					return
				}
			}
		})
	}
	for range 200 {
		var rs []*Region
		for range 100 {
			r, err := tab.Register(RegAttr{Addr: m.Addr(), Length: 1})
			if err != nil {
				t.Fatal(err)
			}
			rs = append(rs, r)
		}
		for _, r := range rs {
			if err := r.Deregister(); err != nil {
				t.Fatal(err)
			}
		}
	}
	close(stop)
	wg.Wait()
	if n := len(tab.hash.Load().slots); n > 1024 {
		t.Errorf("the table of at most 101 regions has grown to %d slots", n)
	}
}

func TestRegisterRefuses(t *testing.T) {
	s := newSpace(t, Options{})
	tab := NewTable(s)
	m := alloc(t, 4*pageSize)
	hole, err := mmapAt(0, 3*pageSize, 3, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer munmap(hole, 3*pageSize)
	if err := munmap(hole+pageSize, pageSize); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		a    RegAttr
		want error
	}{
		{"length 0", RegAttr{Addr: m.Addr()}, ErrInvalid},
		{"remote write only", RegAttr{Addr: m.Addr(), Length: 1, Access: RemoteWrite}, ErrInvalid},
		{"remote atomic only", RegAttr{Addr: m.Addr(), Length: 1, Access: RemoteAtomic}, ErrInvalid},
		{"unknown flag", RegAttr{Addr: m.Addr(), Length: 1, Access: 1 << 19}, ErrInvalid},
		{"address wraps", RegAttr{Addr: ^uintptr(0) - 1, Length: 5}, ErrUnmapped},
		{"length wraps", RegAttr{Addr: m.Addr(), Length: ^uint64(0)}, ErrUnmapped},
		{"iova wraps", RegAttr{Addr: m.Addr(), Length: 2, IOVA: ^uint64(0), HaveIOVA: true}, ErrInvalid},
		{"address 0", RegAttr{Length: 1}, ErrUnmapped},
		{"hole", RegAttr{Addr: hole, Length: 3 * pageSize}, ErrUnmapped},
		{"ends in a hole", RegAttr{Addr: hole, Length: pageSize + 1}, ErrUnmapped},
		{"pinned hole", RegAttr{Addr: hole, Length: 3 * pageSize, Pin: true}, ErrUnmapped},
	} {
		r, err := tab.Register(c.a)
		if !errors.Is(err, c.want) || r != nil {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	for _, c := range []RegAttr{
		{Addr: m.Addr(), Length: 1, IOVA: ^uint64(0) - 1, HaveIOVA: true},
		{Addr: hole, Length: pageSize},
	} {
		r, err := tab.Register(c)
		if err != nil {
			t.Errorf("%+v: %v", c, err)
			continue
		}
		if err := r.Deregister(); err != nil {
			t.Error(err)
		}
	}
}
