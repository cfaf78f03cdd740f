// SPDX-License-Identifier: Apache-2.0

package main

// #include "engine.h"
import "C"

import (
	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/provider"
)

// group is contexts that were imported from one another (ibv_import_device(3)): to the
// kernel they would be one. Guarded by the device's mu.
type group struct{ ctxs map[*ectx]struct{} }

// importRanks are the ranks of what can be imported.
var importRanks = [...]map[int]bool{
	C.TV_IMPORT_PD: {rankPD: true, rankParent: true},
	C.TV_IMPORT_MR: {rankMR: true},
	C.TV_IMPORT_DM: {rankDM: true},
}

//export tvCtxImport
func tvCtxImport(of C.tv_handle, fd C.int32_t, out *C.tv_handle) C.int {
	stackroom.Reserve()
	c := object[*ectx](of)
	return openCtx(c.dev, c.group, fd, out)
}

// find gives the object of the group that was made with a handle of this number.
func (g *group) find(ranks map[int]bool, number C.uint32_t) *item {
	for c := range g.ctxs {
		c.mu.Lock()
		for h, it := range c.items {
			if C.uint32_t(h) == number && ranks[it.rank] && !it.imported {
				c.mu.Unlock()
				return it
			}
		}
		c.mu.Unlock()
	}
	return nil
}

//export tvImport
func tvImport(h C.tv_handle, i *C.struct_tv_import) C.int {
	stackroom.Reserve()
	c := object[*ectx](h)
	if int(i.kind) >= len(importRanks) {
		return errno(provider.ErrInvalid)
	}
	c.dev.mu.Lock()
	it := c.group.find(importRanks[i.kind], i.number)
	c.dev.mu.Unlock()
	if it == nil {
		return C.int(unix.ENOENT)
	}
	switch o := it.obj.(type) {
	case *provider.MR:
		i.length, i.lkey, i.rkey = C.uint64_t(o.Length()), C.uint32_t(o.LKey()), remoteKey(o)
	case *provider.DM:
		i.addr, i.length = C.uint64_t(o.Addr()), C.uint64_t(o.Len())
	}
	i.handle = c.enter(&item{rank: it.rank, obj: it.obj, destroy: it.destroy, imported: true})
	return 0
}

//export tvUnimport
func tvUnimport(h C.tv_handle) C.int {
	stackroom.Reserve()
	forget(h, object[*item](h))
	return 0
}

// bequeath is called when a context ends. What can be imported goes to another of
// the group, if there is one; what was imported ends here, but not its object.
func (c *ectx) bequeath() {
	c.dev.mu.Lock()
	delete(c.group.ctxs, c)
	var heir *ectx
	for heir = range c.group.ctxs {
		break
	}
	c.dev.mu.Unlock()
	c.mu.Lock()
	left := make(map[C.tv_handle]*item, len(c.items))
	for h, it := range c.items {
		left[h] = it
	}
	c.mu.Unlock()
	for h, it := range left {
		switch {
		case it.imported:
			forget(h, it)
		case heir != nil && (it.rank == rankPD || it.rank == rankParent || it.rank == rankMR || it.rank == rankDM):
			c.mu.Lock()
			delete(c.items, h)
			c.mu.Unlock()
			it.ctx.Store(heir)
			heir.mu.Lock()
			heir.items[h] = it
			heir.mu.Unlock()
		}
	}
}
