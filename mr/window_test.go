// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"bytes"
	"errors"
	"testing"
)

// The QP and the domain that the tests bind with.
const (
	testQP = 77
	testPD = 1
)

// windowBed is a bed whose region may have windows.
func windowBed(t *testing.T) *bed {
	b := newBed(t, 16*pageSize)
	b.r = register(t, b.tab, b.m.Addr(), 8*pageSize, func(a *RegAttr) { a.Access |= MWBind })
	return b
}

func (b *bed) window(t *testing.T, typ WindowType) *Window {
	t.Helper()
	w, err := b.tab.AllocWindow(testPD, typ)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Dealloc() }) // ErrClosed if the test did it
	return w
}

// binding is a bind of n bytes at off, with the key after the window's.
func (b *bed) binding(w *Window, off, n int, acc Access) *BindAttr {
	k := w.RKey()
	return &BindAttr{Key: k&^0xff | (k+1)&0xff, PD: testPD, QP: testQP, Region: b.r.LKey(), Addr: b.r.IOVA() + uint64(off), Length: uint64(n), Access: acc}
}

func (b *bed) bind(t *testing.T, a *BindAttr) {
	t.Helper()
	if err := b.tab.Bind(a); err != nil {
		t.Fatal(err)
	}
}

// TestWindowCheck looks at what a window opens, and to whom.
func TestWindowCheck(t *testing.T) {
	for _, typ := range []WindowType{Window1, Window2} {
		b := windowBed(t)
		w := b.window(t, typ)
		first := w.RKey()
		if b.tab.Lookup(first) != nil {
			t.Error("a window that was never bound is open")
		}
		a := b.binding(w, 100, 5000, RemoteWrite|LocalWrite)
		b.bind(t, a)
		if w.RKey() != a.Key || a.Key == first {
			t.Errorf("key %#x, then %#x, window says %#x", first, a.Key, w.RKey())
		}
		other := error(nil)
		if typ == Window2 {
			other = ErrKey
		}
		iova := b.r.IOVA() + 100
		for _, c := range []struct {
			name string
			k    Key
			pd   PD
			qp   uint32
			iova uint64
			n    uint64
			need Access
			want error
		}{
			{"all", a.Key, testPD, testQP, iova, 5000, RemoteWrite, nil},
			{"last byte", a.Key, testPD, testQP, iova + 4999, 1, RemoteWrite, nil},
			{"other QP", a.Key, testPD, testQP + 1, iova, 1, RemoteWrite, other},
			{"other domain", a.Key, testPD + 1, testQP, iova, 1, RemoteWrite, ErrPD},
			{"read", a.Key, testPD, testQP, iova, 1, RemoteRead, ErrAccess},
			{"local write", a.Key, testPD, testQP, iova, 1, LocalWrite, ErrAccess},
			{"one before", a.Key, testPD, testQP, iova - 1, 2, RemoteWrite, ErrRange},
			{"one behind", a.Key, testPD, testQP, iova, 5001, RemoteWrite, ErrRange},
			{"the old key", first, testPD, testQP, iova, 1, RemoteWrite, ErrKey},
			{"the next key", a.Key + 1, testPD, testQP, iova, 1, RemoteWrite, ErrKey},
		} {
			if _, err := b.tab.CheckRemote(c.k, c.pd, c.qp, c.iova, c.n, c.need); err != c.want {
				t.Errorf("type %d, %s: %v, want %v", typ, c.name, err, c.want)
			}
		}
		if _, err := b.tab.Check(a.Key, testPD, iova, 1, 0); err != ErrKey {
			t.Errorf("a window's key in a list: %v", err)
		}
	}
}

// TestWindowData moves data through windows, one of them zero based: it lands in the
// region, counts as the region's, and a dead window moves none.
func TestWindowData(t *testing.T) {
	b := windowBed(t)
	w := b.window(t, Window2)
	b.bind(t, b.binding(w, 2*pageSize+10, 2*pageSize, RemoteWrite|RemoteRead|ZeroBased))
	v, err := b.tab.CheckRemote(w.RKey(), testPD, testQP, 0, 2*pageSize, RemoteWrite|RemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	p := pattern(2*pageSize, 3)
	if err := errors.Join(b.a.Write(&b.st, v, 0, p), b.a.Flush(&b.st)); err != nil {
		t.Fatal(err)
	}
	if got := b.m.Bytes()[2*pageSize+10:][:2*pageSize]; !bytes.Equal(got, p) {
		t.Error("the data is not there")
	}
	if n := b.r.Stats().PageFaultsHandled; n != 3 {
		t.Errorf("%d pages counted", n)
	}
	got := make([]byte, 100)
	if err := b.a.Read(v, 7, got); err != nil || !bytes.Equal(got, p[7:107]) {
		t.Errorf("read: %v", err)
	}
	// What is staged when the window goes is not placed.
	if err := b.tab.Invalidate(w.RKey(), testPD, testQP); err != nil {
		t.Fatal(err)
	}
	if err := b.a.Write(&b.st, v, 0, p[:50]); err != ErrKey {
		t.Errorf("write by a dead window: %v", err)
	}
	b.bind(t, b.binding(w, 6*pageSize, 2*pageSize, RemoteWrite))
	v, err = b.tab.CheckRemote(w.RKey(), testPD, testQP, b.r.IOVA()+6*pageSize, 50, RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.a.Write(&b.st, v, b.r.IOVA()+6*pageSize, p[:50]); err != nil || !b.st.Active() {
		t.Fatal(err)
	}
	if err := w.Dealloc(); err != nil {
		t.Fatal(err)
	}
	if err := b.a.Flush(&b.st); err != ErrKey {
		t.Errorf("what was staged by a window that is gone: %v", err)
	}
	b.st.Drop()
	if got := b.m.Bytes()[6*pageSize:][:50]; !bytes.Equal(got, make([]byte, 50)) {
		t.Error("it was placed")
	}
}

// TestBindErrors: what cannot be bound changes nothing.
func TestBindErrors(t *testing.T) {
	for _, typ := range []WindowType{Window1, Window2} {
		b := windowBed(t)
		w := b.window(t, typ)
		reg := func(acc Access) Key {
			return register(t, b.tab, b.m.Addr()+8*pageSize, pageSize, func(a *RegAttr) { a.Access = acc }).LKey()
		}
		foreign := register(t, b.tab, b.m.Addr(), pageSize, func(a *RegAttr) { a.PD, a.Access = 2, allRights|MWBind })
		zero := ErrInvalid
		if typ == Window2 {
			zero = nil
		}
		if typ == Window1 {
			b.bind(t, b.binding(w, 0, 10, RemoteRead))
		}
		for _, c := range []struct {
			name string
			mod  func(*BindAttr)
			want error
		}{
			{"domain of the QP", func(a *BindAttr) { a.PD = 2 }, ErrPD},
			{"domain of the region", func(a *BindAttr) { a.Region = foreign.LKey() }, ErrPD},
			{"no such window", func(a *BindAttr) { a.Key ^= 0x4000 }, ErrKey},
			{"a region as window", func(a *BindAttr) { a.Key = b.r.RKey() }, ErrKey},
			{"no such region", func(a *BindAttr) { a.Region ^= 1 }, ErrKey},
			{"a window as region", func(a *BindAttr) { a.Region = w.RKey() }, ErrKey},
			{"region without the right", func(a *BindAttr) { a.Region = reg(allRights) }, ErrAccess},
			{"region that is not for writing", func(a *BindAttr) { a.Region = reg(MWBind); a.Addr = uint64(b.m.Addr()) + 8*pageSize }, ErrAccess},
			{"region that is zero based", func(a *BindAttr) { a.Region = reg(allRights | MWBind | ZeroBased) }, ErrInvalid},
			{"one byte before", func(a *BindAttr) { a.Addr-- }, ErrRange},
			{"one byte behind", func(a *BindAttr) { a.Length++ }, ErrRange},
			{"a wrap", func(a *BindAttr) { a.Length = ^uint64(0) }, ErrRange},
			{"on demand", func(a *BindAttr) { a.Access |= OnDemand }, ErrInvalid},
			{"bind", func(a *BindAttr) { a.Access |= MWBind }, ErrInvalid},
			{"zero based", func(a *BindAttr) { a.Access |= ZeroBased }, zero},
		} {
			a := b.binding(w, 0, 8*pageSize, RemoteWrite)
			c.mod(a)
			before := w.RKey()
			if err := b.tab.Bind(a); err != c.want {
				t.Errorf("type %d, %s: %v, want %v", typ, c.name, err, c.want)
			} else if err != nil && (w.RKey() != before || typ == Window1 && b.tab.Lookup(before) == nil) {
				t.Errorf("type %d, %s: the window has changed", typ, c.name)
			}
		}
	}
	tab := NewTable(newSpace(t, Options{NoUserFault: true}))
	for _, typ := range []WindowType{0, 3} {
		if _, err := tab.AllocWindow(1, typ); !errors.Is(err, ErrInvalid) {
			t.Errorf("type %d: %v", typ, err)
		}
	}
}

// TestWindowLife: type 1 is bound anew at any time and unbound by length 0; type 2 is
// invalidated before. Regions stay while windows are bound to them.
func TestWindowLife(t *testing.T) {
	b := windowBed(t)
	w1, w2 := b.window(t, Window1), b.window(t, Window2)
	bound := func(w *Window) bool { return b.tab.Lookup(w.RKey()) != nil }
	busy := func() bool {
		err := b.r.Deregister()
		_, rerr := b.r.Reregister(ChangeAccess, RegAttr{Access: LocalWrite}, nil)
		if err != ErrBound || !errors.Is(rerr, ErrBound) {
			t.Logf("%v, %v", err, rerr)
			return false
		}
		return true
	}

	b.bind(t, b.binding(w1, 0, 100, RemoteRead))
	old := w1.RKey()
	b.bind(t, b.binding(w1, 50, 100, RemoteRead))
	if b.tab.Lookup(old) != nil || !bound(w1) {
		t.Error("bound anew: the old key works, or the new one does not")
	}
	if err := b.tab.Invalidate(w1.RKey(), testPD, testQP); err != ErrAccess {
		t.Errorf("type 1 invalidated: %v", err)
	}
	b.bind(t, b.binding(w2, 0, 100, RemoteRead))
	if err := b.tab.Bind(b.binding(w2, 0, 100, RemoteRead)); err != ErrInvalid {
		t.Errorf("type 2 bound twice: %v", err)
	}
	if !busy() {
		t.Error("the region could go with two windows")
	}
	un := b.binding(w1, 0, 0, 0)
	un.Region, un.Addr = 0, 0
	b.bind(t, un)
	if bound(w1) || w1.RKey() != un.Key || !busy() {
		t.Error("unbound: still open, or the key is not the new one, or the region could go")
	}

	k := w2.RKey()
	for _, c := range []struct {
		k    Key
		pd   PD
		qp   uint32
		want error
	}{{k, 2, testQP, ErrPD}, {k, testPD, testQP + 1, ErrAccess}, {k ^ 1, testPD, testQP, ErrKey}, {k, testPD, testQP, nil}, {k, testPD, testQP, nil}} {
		if err := b.tab.Invalidate(c.k, c.pd, c.qp); err != c.want {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if bound(w2) || w2.RKey() != k {
		t.Error("invalidated: still open, or another key")
	}
	b.bind(t, b.binding(w2, 0, 100, RemoteRead))
	b.tab.ReleaseQP(testQP + 1)
	if !bound(w2) {
		t.Error("another QP's end")
	}
	b.tab.ReleaseQP(testQP)
	if bound(w2) || len(b.tab.byQP) != 0 {
		t.Error("its QP's end")
	}
	b.bind(t, b.binding(w2, 0, 100, RemoteRead))
	k = w2.RKey()
	if err := w2.Dealloc(); err != nil || b.tab.Lookup(k) != nil || len(b.tab.byQP[testQP]) != 0 {
		t.Errorf("deallocated: %v", err)
	}
	if err := w2.Dealloc(); err != ErrClosed {
		t.Errorf("twice: %v", err)
	}
	if err := b.r.Deregister(); err != nil {
		t.Errorf("without windows: %v", err)
	}
}

// TestWindowLeavesNoKeys makes and ends windows: the table's slots come free.
func TestWindowLeavesNoKeys(t *testing.T) {
	b := windowBed(t)
	live := b.tab.hash.Load().live
	for range 1000 {
		w := b.window(t, Window1)
		b.bind(t, b.binding(w, 0, 10, RemoteRead))
		if err := w.Dealloc(); err != nil {
			t.Fatal(err)
		}
	}
	if n := b.tab.hash.Load().live; n != live {
		t.Errorf("%d keys, %d before", n, live)
	}
}
