// SPDX-License-Identifier: Apache-2.0

package mr

import "fmt"

// WindowType is a memory window's type, with the values of enum ibv_mw_type.
type WindowType uint8

// Types of memory windows (IBA 10.6.7.2).
const (
	// Window1 is open to all QPs of its protection domain, and bound anew at any time.
	Window1 WindowType = 1
	// Window2 is type 2B: open to the QP that bound it, and to be invalidated before
	// it is bound anew.
	Window2 WindowType = 2
)

// windowRights are the rights that a window may give; windowFlags is what else a bind
// may say.
const (
	windowRights = RemoteWrite | RemoteRead | RemoteAtomic
	windowFlags  = LocalWrite | ZeroBased | RelaxedOrdering // local access is never by a window
)

// Window is a memory window: a remote key to a part of a region, with rights of its
// own. In the table of keys stands a Region for each bind, a view of the memory of the
// region that is its base. A bind puts a new view there, and the old one is dead from
// then on; so a request that was let in by it can't go on in what is bound now.
type Window struct {
	table *Table
	typ   WindowType
	pd    PD
	view  *Region // in the table; guarded by table.mu
}

// AllocWindow makes a window, which is not bound (ibv_alloc_mw(3)). Errors:
// ErrInvalid for an unknown type, ErrNoMem.
func (t *Table) AllocWindow(pd PD, typ WindowType) (*Window, error) {
	if typ != Window1 && typ != Window2 {
		return nil, fmt.Errorf("%w: memory window of type %d", ErrInvalid, typ)
	}
	w := &Window{table: t, typ: typ, pd: pd}
	w.view = w.closed(0)
	if err := t.insert(w.view); err != nil {
		return nil, err
	}
	return w, nil
}

// closed is the view of a window that is not bound: its key is known and opens nothing.
func (w *Window) closed(k Key) *Region {
	v := &Region{table: w.table, win: w, key: k}
	v.invalid.Store(true)
	return v
}

// RKey is the window's key now: a bind changes its low 8 bits.
func (w *Window) RKey() Key {
	w.table.mu.Lock()
	defer w.table.mu.Unlock()
	return w.view.key
}

// Type is the window's type.
func (w *Window) Type() WindowType { return w.typ }

// PD is the window's protection domain.
func (w *Window) PD() PD { return w.pd }

// Dealloc ends the window, bound or not (ibv_dealloc_mw(3)). When it returns, no
// request reaches memory through it. ErrClosed if it was ended before.
func (w *Window) Dealloc() error {
	t := w.table
	t.mu.Lock()
	if w.view == nil {
		t.mu.Unlock()
		return ErrClosed
	}
	t.unbind(w.view)
	t.hashRemove(w.view)
	w.view = nil
	t.mu.Unlock()
	t.space.quiesce()()
	return nil
}

// BindAttr is what a bind asks for (IBA 11.4.1.1, ibv_bind_mw(3)).
type BindAttr struct {
	// Key is the window's new key: the handle names the window, the tag is new.
	Key Key
	// PD and QP are those of the queue pair that binds.
	PD PD
	QP uint32
	// Region is the lkey of the region; without a Length none is looked at.
	Region Key
	// Addr and Length are the range in the region, by the region's addresses.
	Addr, Length uint64
	// Access is remote rights, and ZeroBased for a window whose first byte has
	// address 0.
	Access Access
}

// Bind binds a window, or unbinds one of type 1 if the length is 0 (IBA 10.6.7.2).
// What cannot be is ErrKey (no such window, no such region), ErrPD, ErrAccess (the
// region was not registered for MWBind, or for writing), ErrRange, ErrInvalid (a window
// of type 2 that is bound, or without a length; one of type 1 that is zero based; a
// region that is), and then nothing changes.
func (t *Table) Bind(b *BindAttr) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.find(b.Key.handle())
	if old == nil || old.win == nil {
		return ErrKey
	}
	w := old.win
	switch {
	case w.pd != b.PD:
		return ErrPD // IBA C10-72
	case b.Access&^(windowRights|windowFlags) != 0:
		return ErrInvalid
	case w.typ == Window1 && b.Access&ZeroBased != 0:
		return ErrInvalid // IBA o10-36.2.2
	case w.typ == Window2 && (old.base != nil || b.Length == 0):
		return ErrInvalid // IBA o10-37.2.30, o10-37.2.40
	}
	var view *Region
	if b.Length == 0 {
		view = w.closed(b.Key)
	} else {
		var err error
		if view, err = t.view(w, b); err != nil {
			return err
		}
	}
	t.unbind(old)
	t.hashReplace(old, view)
	w.view = view
	return nil
}

// view makes what a bind puts into the table, if the region allows it. It is called
// with t.mu held.
func (t *Table) view(w *Window, b *BindAttr) (*Region, error) {
	r := t.Lookup(b.Region)
	if r == nil || r.win != nil {
		return nil, ErrKey
	}
	rights := r.rights.Load()
	switch {
	case rights.pd() != b.PD:
		return nil, ErrPD // IBA C10-72
	case rights.access()&ZeroBased != 0:
		return nil, ErrInvalid // its addresses mean nothing to a window
	case rights.access()&MWBind == 0:
		return nil, ErrAccess // IBA C10-73
	case b.Access&(RemoteWrite|RemoteAtomic) != 0 && rights.access()&LocalWrite == 0:
		return nil, ErrAccess // IBA C10-74
	case !r.contains(b.Addr, b.Length):
		return nil, ErrRange // IBA C10-75
	}
	v := &Region{table: t, win: w, base: r, key: b.Key, paging: r.paging, attr: RegAttr{Length: b.Length, IOVA: b.Addr}}
	if b.Access&ZeroBased != 0 {
		v.attr.IOVA = 0
	}
	v.skew = b.Addr - r.attr.IOVA - v.attr.IOVA
	v.rights.Store(w.pd, b.Access&windowRights)
	r.windows++
	if w.typ == Window2 {
		v.qp = b.QP
		if t.byQP[b.QP] == nil {
			t.byQP[b.QP] = map[*Window]struct{}{}
		}
		t.byQP[b.QP][w] = struct{}{}
	}
	return v, nil
}

// unbind lets no request through a window's view any more. It is called with t.mu held;
// a request that is inside a section goes on until it leaves it.
func (t *Table) unbind(v *Region) {
	v.gate.set(gateDead)
	if v.base == nil {
		return
	}
	v.base.windows--
	delete(t.byQP[v.qp], v.win)
}

// ReleaseQP invalidates the windows of type 2 that are bound to a QP, which ends.
func (t *Table) ReleaseQP(qp uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for w := range t.byQP[qp] {
		t.closeWindow(w.view)
	}
	delete(t.byQP, qp)
}

// closeWindow makes a window one that is not bound; its key stays. It is called with
// t.mu held.
func (t *Table) closeWindow(v *Region) {
	t.unbind(v)
	c := v.win.closed(v.key)
	t.hashReplace(v, c)
	v.win.view = c
}

// Invalidate makes a key unusable: LOCAL_INV of QP qp asks for it, or a SEND with
// invalidate that came to it (IBA 9.4.1.1.3, 10.6.5). A window of type 2 can be bound
// anew then; one that is not bound stays so. A region is over with, and has to have
// been registered for that. Errors: ErrKey, ErrPD, ErrAccess (a plain region, one with
// windows, a window of type 1, one of another QP).
func (t *Table) Invalidate(k Key, pd PD, qp uint32) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.find(k.handle())
	switch {
	case r == nil || r.key != k:
		return ErrKey
	case r.win != nil:
		return t.invalidateWindow(r, pd, qp)
	case r.invalid.Load():
		return ErrKey
	case r.PD() != pd:
		return ErrPD
	case !r.attr.Invalidatable || r.windows > 0:
		return ErrAccess
	}
	r.invalid.Store(true)
	return nil
}

func (t *Table) invalidateWindow(v *Region, pd PD, qp uint32) error {
	switch {
	case v.win.pd != pd:
		return ErrPD
	case v.win.typ != Window2:
		return ErrAccess // IBA o10-37.2.26
	case v.base == nil:
		return nil
	case v.qp != qp:
		return ErrAccess
	}
	t.closeWindow(v)
	return nil
}
