// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestApplicationFaults: the application's reads and writes of absent pages, and the
// kernel's on its behalf, are answered with zero pages, and counted.
func TestApplicationFaults(t *testing.T) {
	b := newBed(t, 64*pageSize)
	mem := b.m.Bytes()
	for i := range 10 {
		if v := mem[i*pageSize+i]; v != 0 {
			t.Fatalf("page %d reads %d", i, v)
		}
	}
	for i := 10; i < 20; i++ {
		mem[i*pageSize] = byte(i)
	}
	f, err := os.Open("/dev/zero")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if n, err := syscall.Read(int(f.Fd()), mem[20*pageSize:30*pageSize]); n != 10*pageSize || err != nil {
		t.Fatalf("read(2) into absent pages: %d, %v", n, err)
	}
	if got := b.s.Stats(); got.AppFaults != 30 || got.PageFaults != 0 {
		t.Errorf("%+v, want 30 faults of the application", got)
	}
	msg := pattern(35*pageSize, 1)
	b.put(t, 0, msg)
	same(t, "written after", mem[:35*pageSize], msg)
	if got := b.s.Stats(); got.AppFaults != 30 || got.PageFaults != 5 {
		t.Errorf("%+v, want 5 faults of requests", got)
	}
}

// TestSharedMemory: another mapping of the same memory makes pages present without
// the table hearing of it.
func TestSharedMemory(t *testing.T) {
	const n = 40 * pageSize
	b := newBed(t, n, Shared())
	other, err := unix.Mmap(b.m.FD(), 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(other)
	model := make([]byte, n)
	b.put(t, 30*pageSize, []byte{9}) // the table asks about the leaf now
	model[30*pageSize] = 9
	for p := 1; p < 40; p += 3 {
		fill := pattern(pageSize, byte(p))
		copy(other[p*pageSize:], fill)
		copy(model[p*pageSize:], fill)
	}
	same(t, "read", b.get(t, pageSize/2, 5*pageSize), model[pageSize/2:][:5*pageSize])
	msg := pattern(25*pageSize, 7)
	b.put(t, 7*pageSize+100, msg)
	copy(model[7*pageSize+100:], msg)
	same(t, "here", b.m.Bytes(), model)
	same(t, "there", other, model)

	r2 := register(t, b.tab, uintptr(ptr(other)), n)
	if r2.Paging() != UserFault {
		t.Fatal(r2.Paging())
	}
	var st Stage
	if err := b.a.Write(&st, r2, r2.IOVA()+50, msg[:10000]); err != nil {
		t.Fatal(err)
	}
	if err := b.a.Flush(&st); err != nil {
		t.Fatal(err)
	}
	copy(model[50:], msg[:10000])
	same(t, "written there, seen here", b.get(t, 0, n), model)

	// A hole punched in the file raises no event: what was present is found absent.
	if err := unix.Fallocate(b.m.FD(), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4*pageSize); err != nil {
		t.Fatal(err)
	}
	clear(model[:4*pageSize])
	b.put(t, pageSize-3, msg[:6])
	copy(model[pageSize-3:], msg[:6])
	same(t, "after the hole", b.get(t, 0, n), model)
	// A file cut short: no page can be had any more.
	if err := unix.Ftruncate(b.m.FD(), 2*pageSize); err != nil {
		t.Fatal(err)
	}
	err = b.a.Write(&b.st, b.r, b.r.IOVA()+20*pageSize, msg[:8])
	if err == nil {
		err = b.a.Flush(&b.st)
	}
	if !IsFault(err) {
		t.Errorf("write behind the end of the file: %v", err)
	}
	if err := b.a.Read(b.r, b.r.IOVA()+39*pageSize, msg[:8]); !IsFault(err) {
		t.Errorf("read behind the end of the file: %v", err)
	}
}

// TestFaultWhileEventWaits: an event that waits for a section to end keeps the kernel
// from filling pages, and the section may itself wait (for a garbage collection that
// waits) for the thread that faults now. So the fault is answered all the same, and
// the event waits all the same.
func TestFaultWhileEventWaits(t *testing.T) {
	stopWatch := watchdog(t)
	defer stopWatch()
	b := newBed(t, 512*pageSize)
	mem := b.m.Bytes()
	b.put(t, 0, pattern(8*pageSize, 1))
	b.a.enter()
	done := make(chan error)
	go func() { done <- madvise(b.m.Addr(), 4*pageSize, unix.MADV_DONTNEED) }()
	for b.s.change().Load() == 0 { // the pager has seen the event
		runtime.Gosched()
	}
	for i := range 20 {
		if v := mem[(100+i)*pageSize]; v != 0 { // returns, or hangs
			t.Errorf("an absent page reads %d", v)
		}
		mem[(200+i)*pageSize] = 1
	}
	select {
	case <-done:
		t.Error("MADV_DONTNEED ended while a section was open")
	default:
	}
	b.a.exit()
	if err := <-done; err != nil {
		t.Error(err)
	}
	// All of it is followed as before: placed, dropped, and gone when it is gone.
	same(t, "dropped", b.get(t, 0, 4*pageSize), make([]byte, 4*pageSize))
	if err := madvise(b.m.Addr()+100*pageSize, 20*pageSize, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	before := b.s.Stats().PageFaults
	msg := pattern(22*pageSize, 2)
	b.put(t, 99*pageSize, msg)
	same(t, "written", mem[99*pageSize:121*pageSize], msg)
	if got := b.s.Stats().PageFaults - before; got != 22 {
		t.Errorf("%d pages were placed, want 22", got)
	}
	if err := b.m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := b.a.Write(&b.st, b.r, b.r.IOVA()+200*pageSize, msg[:8]); err != ErrRemoved {
		t.Errorf("after munmap: %v", err)
	}
}

// TestCollectionsAndColdMemory is the hang that a pager in Go cannot avoid:
// goroutines touch absent pages with copy while garbage collections run back to
// back, engines write and read at full speed in their sections, and mappings change,
// so that the kernel refuses to fill pages for a time.
func TestCollectionsAndColdMemory(t *testing.T) {
	const n = 8 << 20
	s := newSpace(t, Options{})
	tab := NewTable(s)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(8)) // the kernel switches between them, anywhere
	var stop atomic.Bool
	var app, engine, dropped atomic.Int64
	var progress [8]atomic.Int64
	var wg sync.WaitGroup
	var mems []*Memory
	var regs []*Region
	for range 4 {
		m := alloc(t, n)
		mems = append(mems, m)
		regs = append(regs, register(t, tab, m.Addr(), n))
	}
	wg.Go(func() {
		for ; !stop.Load(); progress[0].Add(1) {
			runtime.GC()
		}
	})
	for g := range 2 {
		wg.Go(func() { // the application
			src := pattern(3*pageSize, byte(g))
			for i := 0; !stop.Load(); i++ {
				mem := mems[g].Bytes()
				at := i * 7 * pageSize % (n - 4*pageSize)
				copy(mem[at:], src)
				app.Add(3)
				runtime.Gosched() // all are on two or three processors
				progress[1+g].Add(1)
			}
		})
		wg.Go(func() { // what it touched goes again, by a thread of its own
			for i := 0; !stop.Load(); i++ {
				at := uintptr(i*512*pageSize) % n
				if err := madvise(mems[i%3].Addr()+at, 512*pageSize, unix.MADV_DONTNEED); err != nil {
					t.Error(err)
					return
				}
				dropped.Add(1)
				runtime.Gosched()
				progress[3+g].Add(1)
			}
		})
		wg.Go(func() { // an engine
			a := s.NewAccessor()
			defer a.Close()
			var st Stage
			src, dst := pattern(6000, 1), make([]byte, 6000)
			for i := 0; !stop.Load(); i++ {
				r := regs[(i+g)%4]
				iova := r.IOVA() + uint64(i*5000%(n-6000))
				err := a.Write(&st, r, iova, src)
				if err == nil && i%3 == 0 {
					err = a.Flush(&st)
				}
				if err == nil {
					err = a.Read(r, r.IOVA()+uint64(i*9000%(n-6000)), dst)
				}
				if err != nil && err != ErrBusy {
					t.Error(err)
					return
				}
				engine.Add(1)
				progress[5+g].Add(1)
			}
			if err := a.Flush(&st); err != nil && err != ErrBusy {
				t.Error(err)
			}
		})
	}
	// Every one of them must get on all the time: a second without is a hang. The
	// watcher is a process of its own, as a hang stops all goroutines.
	stopWatch := watchdog(t)
	storming(t, 4*time.Second, func() bool {
		for i := range 7 {
			if progress[i].Load() == 0 {
				return false
			}
		}
		st := s.Stats()
		return st.AppFaults > 0 && st.PageFaults > 0 && st.PageInvalidations > 0
	})
	stop.Store(true)
	wg.Wait()
	stopWatch()
	st := s.Stats()
	t.Logf("%d collections, %d steps of the application with %d faults, %d of engines with %d faults, %d MADV_DONTNEED, %d pages invalidated",
		progress[0].Load(), app.Load(), st.AppFaults, engine.Load(), st.PageFaults, dropped.Load(), st.PageInvalidations)
	for i := range 7 {
		if progress[i].Load() == 0 {
			t.Errorf("goroutine %d got nowhere", i)
		}
	}
	if st.AppFaults == 0 || st.PageFaults == 0 || st.PageInvalidations == 0 {
		t.Errorf("%+v: nothing was tried", st)
	}
}

// watchdog kills this process, with stacks, if the function it returns is not
// called in time: goroutines may be unable to.
func watchdog(t testing.TB) func() {
	limit := stormTime(t, 4*time.Second) + stormPatience + 2*time.Minute
	proc, err := os.StartProcess("/bin/sh", []string{"sh", "-c",
		fmt.Sprintf("sleep %d; echo 'hang: the storm did not end' >&2; kill -QUIT %d; sleep 5; kill -KILL %d", int(limit.Seconds()), os.Getpid(), os.Getpid())},
		&os.ProcAttr{Files: []*os.File{nil, os.Stdout, os.Stderr}, Sys: &syscall.SysProcAttr{Setpgid: true}})
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		_ = syscall.Kill(-proc.Pid, syscall.SIGKILL)
		_, _ = proc.Wait()
	}
}
