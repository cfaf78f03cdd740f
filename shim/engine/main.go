// SPDX-License-Identifier: Apache-2.0

// Command engine is libtapverbs-engine.so (go build -buildmode=c-shared): the Go
// engine behind libibverbs.so.1, which loads it when a program asks for devices for
// the first time. What the two say to each other is shim/verbs/engine.h.
//
// Objects that C holds are cgo handles. Memory of the application's is never
// touched here: attributes come and go through structs on the library's stack.
package main

// #cgo CFLAGS: -I${SRCDIR}/../verbs -Wall -Wextra
// #include "engine.h"
import "C"

import (
	"errors"
	"runtime/cgo"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/tapverbs/tapverbs/internal/stackroom"
	"github.com/tapverbs/tapverbs/provider"
)

func main() {}

func init() {
	if provider.MakeRoom() {
		provider.SlowSysmon() // see sysmon.c
	}
}

// errno is what a verb returns.
func errno(err error) C.int { return C.int(provider.Errno(err)) }

// object gives what a handle stands for.
func object[T any](h C.tv_handle) T { return cgo.Handle(h).Value().(T) }

// device is an opened port. Contexts share it: a TAP can be attached to once.
type device struct {
	d *provider.Device

	mu   sync.Mutex
	ctxs map[*ectx]struct{}
	// owners says whom events of an object belong to. An object that is being
	// destroyed is not in it any more, and its events go nowhere.
	owners map[any]owner
	gone   bool // unplugged: no more contexts
	ports  cmPorts
	ending cmEnding
	done   chan struct{} // closed when dispatch has ended

	// Where the library wants to read that the device is gone.
	goneAt, troubleAt *uint32
}

type owner struct {
	ctx    *ectx
	cookie C.tv_cookie
}

// config reads what the environment said. The library asks it, with getenv(3): Go's
// copy does not know what the program has set since.
func config(c *C.struct_tv_config) (provider.Config, error) {
	vars := map[string]*C.char{
		provider.EnvPort: c.port, provider.EnvAddr: c.addrs, provider.EnvAddr6: c.addrs6,
		provider.EnvMAC: c.mac, provider.EnvGateway: c.gateway, provider.EnvSysfs: c.sysfs,
		provider.EnvBudget: c.budget, provider.EnvStore: c.store,
		provider.EnvMonitor: c.monitor, provider.EnvFrames: c.frames, provider.EnvECN: c.ecn,
		provider.EnvQueues: c.queues,
	}
	return provider.ConfigFromEnv(func(name string) string { return C.GoString(vars[name]) })
}

// explain puts an error's text where people will see it.
func explain(c *C.struct_tv_config, err error) C.int {
	giveText(c.err, c.err_len, err)
	return errno(err)
}

// giveText puts an error's text into n bytes of C's, as one line.
func giveText(text *C.char, n C.uint64_t, err error) {
	if err != nil && text != nil && n > 0 {
		dst := unsafe.Slice((*byte)(unsafe.Pointer(text)), int(n))
		dst[copy(dst[:len(dst)-1], strings.ReplaceAll(err.Error(), "\n", "; "))] = 0
	}
}

//export tvOpen
func tvOpen(c *C.struct_tv_config, out *C.tv_handle) C.int {
	stackroom.Reserve()
	cfg, err := config(c)
	if err != nil {
		return explain(c, err)
	}
	d, err := provider.Open(cfg)
	if err != nil {
		return explain(c, err)
	}
	dev := &device{d: d, ctxs: map[*ectx]struct{}{}, owners: map[any]owner{}, done: make(chan struct{}),
		goneAt: (*uint32)(unsafe.Pointer(c.gone)), troubleAt: (*uint32)(unsafe.Pointer(c.trouble))}
	go dev.dispatch()
	*out = C.tv_handle(cgo.NewHandle(dev))
	for _, fd := range d.FDs() {
		c.fds[c.num_fds] = C.int32_t(fd)
		c.num_fds++
	}
	return 0
}

//export tvUnplug
func tvUnplug(h C.tv_handle) C.int {
	stackroom.Reserve()
	return errno(object[*ectx](h).dev.d.Unplug())
}

//export tvGUID
func tvGUID(c *C.struct_tv_config, out *C.uint64_t) C.int {
	stackroom.Reserve()
	cfg, err := config(c)
	if err != nil {
		return explain(c, err)
	}
	guid, err := provider.NodeGUID(cfg)
	*out = C.uint64_t(guid)
	return explain(c, err)
}

//export tvClose
func tvClose(h C.tv_handle) C.int {
	stackroom.Reserve()
	dev := object[*device](h)
	dev.mu.Lock()
	n := len(dev.ctxs)
	dev.mu.Unlock()
	if n > 0 {
		return errno(provider.ErrBusy)
	}
	err := dev.d.Close()
	<-dev.done
	cgo.Handle(h).Delete()
	return errno(err)
}

// Ranks of objects: what a context leaves behind is destroyed in this order, users
// before what they use.
const (
	rankCMGroup = iota
	rankCMID
	rankCMChannel
	rankNotifier
	rankDVChannel
	rankFlow
	rankCounters
	rankQP
	rankAH
	rankSRQ
	rankXRCD
	rankMW
	rankMR
	rankDM
	rankCQ
	rankChannel
	rankParent
	rankPD
	numRanks
)

// item is an object of a context.
type item struct {
	ctx      atomic.Pointer[ectx]
	rank     int
	obj      any // as the owners know it, and those that use it
	destroy  func() error
	imported bool // another handle of an object that has one
	dirty    told // of a region
}

// ectx is an opened context (struct ibv_context).
type ectx struct {
	dev    *device
	group  *group
	events tokens[C.struct_tv_event]

	mu    sync.Mutex
	items map[C.tv_handle]*item
}

// add enters a new object and gives its handle.
func (c *ectx) add(rank int, obj any, destroy func() error) C.tv_handle {
	return c.enter(&item{rank: rank, obj: obj, destroy: destroy})
}

func (c *ectx) enter(it *item) C.tv_handle {
	it.ctx.Store(c)
	h := C.tv_handle(cgo.NewHandle(it))
	c.mu.Lock()
	c.items[h] = it
	c.mu.Unlock()
	return h
}

// of gives the object behind an item's handle; the zero value for handle 0.
func of[T any](h C.tv_handle) (v T) {
	if h == 0 {
		return v
	}
	return object[*item](h).obj.(T)
}

// own lets events of an object go to a context.
func (c *ectx) own(obj any, cookie C.tv_cookie) {
	c.dev.mu.Lock()
	c.dev.owners[obj] = owner{c, cookie}
	c.dev.mu.Unlock()
}

//export tvDestroy
func tvDestroy(h C.tv_handle) C.int {
	stackroom.Reserve()
	return errno(destroy(h))
}

// name is what the owners know an object by: regions by their keys, which is how events
// name them.
func (it *item) name() any {
	if m, ok := it.obj.(*provider.MR); ok {
		return m.LKey()
	}
	return it.obj
}

func destroy(h C.tv_handle) error {
	it := object[*item](h)
	dev := it.ctx.Load().dev
	name := it.name()
	dev.mu.Lock()
	o, owned := dev.owners[name]
	delete(dev.owners, name)
	dev.mu.Unlock()
	if err := it.destroy(); err != nil && !errors.Is(err, provider.ErrClosed) {
		if owned {
			dev.mu.Lock()
			dev.owners[name] = o
			dev.mu.Unlock()
		}
		return err
	}
	switch {
	case owned && it.rank == rankMR:
		it.ctx.Load().forgetRegion(o.cookie)
	case owned:
		it.ctx.Load().events.drop(func(e *C.struct_tv_event) bool { return e.has_object != 0 && e.cookie == o.cookie })
	}
	forget(h, it)
	return nil
}

// forget ends an object's handle.
func forget(h C.tv_handle, it *item) {
	c := it.ctx.Load()
	c.mu.Lock()
	delete(c.items, h)
	c.mu.Unlock()
	cgo.Handle(h).Delete()
}

//export tvCtxOpen
func tvCtxOpen(h C.tv_handle, fd C.int32_t, out *C.tv_handle) C.int {
	stackroom.Reserve()
	return openCtx(object[*device](h), &group{ctxs: map[*ectx]struct{}{}}, fd, out)
}

func openCtx(dev *device, g *group, fd C.int32_t, out *C.tv_handle) C.int {
	c := &ectx{dev: dev, group: g, items: map[C.tv_handle]*item{}}
	c.events.fd = int(fd)
	dev.mu.Lock()
	defer dev.mu.Unlock()
	if dev.gone {
		return errno(provider.ErrGone)
	}
	dev.ctxs[c] = struct{}{}
	g.ctxs[c] = struct{}{}
	*out = C.tv_handle(cgo.NewHandle(c))
	return 0
}

//export tvCtxClose
func tvCtxClose(h C.tv_handle) C.int {
	stackroom.Reserve()
	c := object[*ectx](h)
	c.bequeath()
	for rank := range numRanks {
		c.mu.Lock()
		var left []C.tv_handle
		for h, it := range c.items {
			if it.rank == rank {
				left = append(left, h)
			}
		}
		c.mu.Unlock()
		for _, h := range left {
			// An object of another context that uses this one keeps it alive: that
			// context's end is the end of both.
			_ = destroy(h)
		}
	}
	c.dev.mu.Lock()
	delete(c.dev.ctxs, c)
	c.dev.mu.Unlock()
	cgo.Handle(h).Delete()
	return 0
}
