// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/tapverbs/tapverbs/internal/rawfork"
	"golang.org/x/sys/unix"
)

// offspring is a child of this process that looks at memory when it is told to.
type offspring struct {
	t   testing.TB
	pid int
	say int // a byte, and it goes on; closed: it ends
}

// What a child is told to do.
const (
	end       = iota
	look      // compare memory, then add 1 to each page's first byte
	beget     // fork a child that compares memory
	rearrange // drop the first quarter, unmap the second, and move the last elsewhere: expect that
	shuttle   // move the last quarter elsewhere and back, many times
)

// forkToCompare forks a child that, each time it is told to, compares memory with what it
// was to be when it was forked. Of Go's runtime nothing is left in it but the stack that it
// runs on, which is why these functions are not split: a look at the scheduler would be the last.
func forkToCompare(t testing.TB, mem []byte, want []byte) *offspring {
	t.Helper()
	return forkWith(t, mem, want, func(f func()) { f() })
}

// forkWith is forkToCompare with the fork itself in a function.
func forkWith(t testing.TB, mem []byte, want []byte, with func(f func())) *offspring {
	t.Helper()
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	want = slices.Clone(want)
	runtime.LockOSThread()
	gc := debug.SetGCPercent(-1) // while no thread of the runtime may be waited for
	elsewhere, err := mmapAt(0, len(mem)/4, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	if err != nil {
		t.Fatal(err)
	}
	pid := 0
	with(func() { pid = rawFork(p[0], p[1], ptr(mem), ptr(want), uintptr(len(mem)), elsewhere) })
	_ = munmap(elsewhere, len(mem)/4)
	debug.SetGCPercent(gc)
	runtime.UnlockOSThread()
	runtime.KeepAlive(want)
	unix.Close(p[0])
	if pid < 0 {
		t.Fatalf("fork: %v", unix.Errno(-pid))
	}
	f := &offspring{t, pid, p[1]}
	t.Cleanup(func() {
		if f.say >= 0 {
			f.end()
		}
	})
	return f
}

//go:norace
//go:nosplit
//go:noinline
func rawFork(in, out int, mem, want unsafe.Pointer, n, elsewhere uintptr) int {
	pid, e := rawfork.Fork()
	if e != 0 {
		return -int(e)
	}
	if pid != 0 {
		return int(pid)
	}
	unix.RawSyscall(unix.SYS_CLOSE, uintptr(out), 0, 0)
	var b byte
	moved := false
	for {
		if got, _, _ := unix.RawSyscall(unix.SYS_READ, uintptr(in), uintptr(unsafe.Pointer(&b)), 1); got != 1 {
			unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
		q := n / 4
		switch b {
		case end:
			unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		case beget:
			if pid, _, _ := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0); pid != 0 {
				var ws int32
				unix.RawSyscall6(unix.SYS_WAIT4, pid, uintptr(unsafe.Pointer(&ws)), 0, 0, 0, 0)
				if ws != 0 {
					unix.RawSyscall(unix.SYS_EXIT_GROUP, uintptr(ws>>8|ws&127), 0, 0)
				}
			} else {
				compare(mem, want, n)
				unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
			}
		case rearrange:
			unix.RawSyscall(unix.SYS_MADVISE, uintptr(mem), q, unix.MADV_DONTNEED)
			unix.RawSyscall(unix.SYS_MUNMAP, uintptr(mem)+q, q, 0)
			unix.RawSyscall6(unix.SYS_MREMAP, uintptr(mem)+3*q, q, q, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, elsewhere, 0)
			for i := range q {
				*(*byte)(unsafe.Add(want, i)) = 0
			}
			moved = true
		case shuttle:
			for range 300 {
				unix.RawSyscall6(unix.SYS_MREMAP, uintptr(mem)+3*q, q, q, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, elsewhere, 0)
				unix.RawSyscall6(unix.SYS_MREMAP, elsewhere, q, q, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, uintptr(mem)+3*q, 0)
			}
		case look:
			if moved {
				compare(mem, want, q)
				compare(unsafe.Add(mem, 2*q), unsafe.Add(want, 2*q), q)
				compare(unsafe.Add(nil, elsewhere), unsafe.Add(want, 3*q), q)
				break
			}
			compare(mem, want, n)
			for i := uintptr(0); i < n; i += pageSize {
				*(*byte)(unsafe.Add(mem, i))++
				*(*byte)(unsafe.Add(want, i))++
			}
		}
		// Stopped: it is done.
		pid, _, _ := unix.RawSyscall(unix.SYS_GETPID, 0, 0, 0)
		unix.RawSyscall(unix.SYS_KILL, pid, uintptr(unix.SIGSTOP), 0)
	}
}

// compare ends the process if memory is not what it was to be.
//
//go:norace
//go:nosplit
//go:noinline
func compare(mem, want unsafe.Pointer, n uintptr) {
	for i := uintptr(0); i < n; i++ {
		if *(*byte)(unsafe.Add(mem, i)) != *(*byte)(unsafe.Add(want, i)) {
			unix.RawSyscall(unix.SYS_EXIT_GROUP, 1+i>>pageShift%200, 0, 0)
		}
	}
}

// look has the child look, and waits until it has.
func (f *offspring) look() {
	f.t.Helper()
	f.tell(look)
	f.done()
}

// tell has the child do something.
func (f *offspring) tell(what byte) {
	f.t.Helper()
	if _, err := unix.Write(f.say, []byte{what}); err != nil {
		f.t.Fatal(err)
	}
}

// done waits until it has.
func (f *offspring) done() {
	f.t.Helper()
	var ws unix.WaitStatus
	if _, err := unix.Wait4(f.pid, &ws, unix.WUNTRACED, nil); err != nil {
		f.t.Fatal(err)
	}
	switch {
	case ws.Exited():
		unix.Close(f.say)
		f.say = -1
		f.t.Fatalf("page %d (modulo 200) in the child is not what it was at fork", ws.ExitStatus()-1)
	case !ws.Stopped():
		unix.Close(f.say)
		f.say = -1
		f.t.Fatalf("the child: %#x", uint32(ws))
	}
	if err := unix.Kill(f.pid, unix.SIGCONT); err != nil {
		f.t.Fatal(err)
	}
}

// end ends the child, and waits for that. To close the pipe is not enough: a later child
// has it, too.
func (f *offspring) end() {
	f.t.Helper()
	f.tell(end)
	unix.Close(f.say)
	f.say = -1
	var ws unix.WaitStatus
	for {
		_, err := unix.Wait4(f.pid, &ws, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil || !ws.Exited() || ws.ExitStatus() != 0 {
			f.t.Errorf("the child ended with %#x, %v", uint32(ws), err)
		}
		return
	}
}

// status is a number of a child's /proc/PID/status.
func (f *offspring) status(name string) (n int) {
	f.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", f.pid))
	if err != nil {
		f.t.Fatal(err)
	}
	_, after, ok := strings.Cut(string(b), name+":")
	if _, err := fmt.Sscan(after, &n); err != nil || !ok {
		f.t.Fatalf("%s of %s: %v", name, b, err)
	}
	return n
}

// What is in memory, absent, and was never touched: the child sees it as it was, whatever
// becomes of the parent's; and regions stay the parent's.
func TestFork(t *testing.T) {
	const n = 100 * pageSize
	for _, c := range []struct {
		name string
		mod  func(*RegAttr)
	}{{"paged", func(*RegAttr) {}}, {"pinned", func(a *RegAttr) { a.Pin = true }}} {
		t.Run(c.name, func(t *testing.T) {
			s := newSpace(t, Options{})
			m := alloc(t, n)
			m.Bytes()[0] = 7
			r := register(t, NewTable(s), m.Addr(), n, c.mod)
			b := &bed{s: s, m: m, r: r, a: accessor(t, s)}
			b.put(t, 10*pageSize+5, pattern(20*pageSize, 1))
			want := make([]byte, n)
			want[0] = 7
			copy(want[10*pageSize+5:], pattern(20*pageSize, 1))
			f := forkToCompare(t, m.Bytes(), want)
			if c.name == "pinned" {
				if l := f.status("VmLck"); l != 0 {
					t.Errorf("%d KiB are locked in the child", l)
				}
			}
			now := pattern(n, 3)
			b.put(t, 0, now[:50*pageSize]) // over all kinds of pages
			b.put(t, 60*pageSize, now[60*pageSize:])
			copy(now[50*pageSize:60*pageSize], want[50*pageSize:])
			f.look()
			same(t, "the parent's", m.Bytes(), now) // the child has written to all of it
			same(t, "the parent's, as requests see it", b.get(t, 0, n), now)
			b.put(t, 5, pattern(n-5, 2))
			f.look()
			same(t, "the parent's then", m.Bytes()[5:], pattern(n-5, 2))
			if err := r.Deregister(); err != nil {
				t.Fatal(err)
			}
			f.look()
			f.end()
		})
	}
}

// armed says whether some of a child's memory belongs to a userfaultfd.
func (f *offspring) armed(m *Memory) (yes bool) {
	f.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", f.pid))
	if err != nil {
		f.t.Fatal(err)
	}
	in := false
	for line := range strings.Lines(string(b)) {
		var from, to uintptr
		if n, _ := fmt.Sscanf(line, "%x-%x ", &from, &to); n == 2 {
			in = from < m.Addr()+uintptr(len(m.Bytes())) && m.Addr() < to
		}
		yes = yes || in && strings.HasPrefix(line, "VmFlags:") && strings.Contains(line, " um")
	}
	return yes
}

// placed waits until no child lacks a page.
func placed(s *Space) {
	s.AfterForks()
}

// lay makes a region's first pages be evicted, or not, in all ways, in groups of 8: those
// that were never there, limbo, store, present. It gives what is in them.
func lay(t testing.TB, b *bed) []byte {
	t.Helper()
	if err := b.r.SetFaultPolicy(FaultStall); err != nil {
		t.Fatal(err)
	}
	n := len(b.m.Bytes())
	want := make([]byte, n)
	for off := 0; off < n; off += 8 * pageSize {
		k := min(8*pageSize, n-off)
		to := off / (8 * pageSize) % 4
		if to == 0 {
			continue
		}
		data := pattern(k, byte(off>>15))
		copy(want[off:], data)
		b.put(t, off, data)
		if to == 3 {
			continue
		}
		got, err := b.s.Evict(b.r, b.r.IOVA()+uint64(off), uint64(k), []Level{Limbo, Stored}[to-1])
		if errors.Is(err, ErrNotSupported) {
			t.Skip(err)
		}
		if err != nil || got != k>>pageShift {
			t.Fatalf("%d pages evicted: %v", got, err)
		}
	}
	return want
}

// Evicted pages: the child finds them, whatever the parent does.
func TestForkEvicted(t *testing.T) {
	const n = 256 * pageSize
	for _, deaf := range []bool{false, true} {
		t.Run(fmt.Sprintf("deaf to fork %v", deaf), func(t *testing.T) {
			s := newSpace(t, Options{deafToFork: deaf})
			b := newBedIn(t, s, n)
			if !deaf && !s.TellsFork() {
				t.Skip("the kernel tells of forks those who have CAP_SYS_PTRACE")
			}
			want := lay(t, b)
			var f *offspring
			if deaf {
				after, err := s.BeforeFork()
				if err != nil {
					t.Fatal(err)
				}
				f = forkToCompare(t, b.m.Bytes(), want)
				after()
			} else {
				f = forkToCompare(t, b.m.Bytes(), want)
			}
			// New content over what was in limbo and store, brought back and not.
			now := pattern(n, 3)
			b.put(t, 0, now[:n/2])
			for off := n / 2; off < n; off += pageSize {
				b.m.Bytes()[off]++
			}
			if _, err := s.Evict(b.r, b.r.IOVA(), n, Stored); err != nil {
				t.Fatal(err)
			}
			f.look()
			copy(now[n/2:], want[n/2:])
			for off := n / 2; off < n; off += pageSize {
				now[off]++
			}
			same(t, "the parent's", b.get(t, 0, n), now)
			placed(s)
			f.look()
			if f.armed(b.m) {
				t.Error("memory of the child still belongs to a userfaultfd")
			}
			f.end()
		})
	}
}

// Much is stored: the child has it when it wants it, also in a child of its own, or
// elsewhere, or when the parent's Space is closed meanwhile. Then the slots are free.
func TestForkStored(t *testing.T) {
	const n = 4096 * pageSize
	for i, c := range []struct {
		name string
		do   func(t *testing.T, b *bed, f *offspring)
	}{
		{"looks at once", func(t *testing.T, b *bed, f *offspring) { f.look() }},
		{"has a child", func(t *testing.T, b *bed, f *offspring) { f.tell(beget); f.done(); f.look() }},
		{"changes its mappings", func(t *testing.T, b *bed, f *offspring) { f.tell(rearrange); f.done(); f.look() }},
		{"moves memory to and fro", func(t *testing.T, b *bed, f *offspring) { f.tell(shuttle); f.done(); f.look() }},
		{"has children and changes mappings", func(t *testing.T, b *bed, f *offspring) {
			for _, what := range []byte{beget, beget, rearrange, look} {
				f.tell(what)
				f.done()
			}
		}},
		{"ends", func(t *testing.T, b *bed, f *offspring) { f.end() }},
		{"is one of many", func(t *testing.T, b *bed, f *offspring) {
			want := slices.Clone(b.get(t, 0, n))
			if _, err := b.s.Evict(b.r, b.r.IOVA(), n, Stored); err != nil {
				t.Fatal(err)
			}
			fs := []*offspring{f}
			for range 4 {
				fs = append(fs, forkToCompare(t, b.m.Bytes(), want))
			}
			for _, g := range fs {
				g.tell(look)
			}
			for _, g := range fs {
				g.done()
			}
			for _, g := range fs[1:] {
				g.end()
			}
		}},
		{"and the parent goes", func(t *testing.T, b *bed, f *offspring) {
			if err := b.r.Deregister(); err != nil {
				t.Fatal(err)
			}
			b.a.Close()
			if err := b.s.Close(); err != nil {
				t.Fatal(err)
			}
			f.look()
		}},
		{"and there are no descriptors", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if raceDetector && i%3 != 0 {
				t.Skip("three of these are enough for the race detector")
			}
			s, err := NewSpace(Options{})
			if err != nil {
				t.Fatal(err)
			}
			if !s.TellsFork() {
				t.Skip("the kernel tells of forks those who have CAP_SYS_PTRACE")
			}
			b := &bed{s: s, tab: NewTable(s), m: alloc(t, n)}
			b.r, b.a = register(t, b.tab, b.m.Addr(), n), s.NewAccessor()
			if err := b.r.SetFaultPolicy(FaultStall); err != nil {
				t.Fatal(err)
			}
			want := pattern(n, 1)
			b.put(t, 0, want)
			if _, err := s.Evict(b.r, b.r.IOVA(), n, Stored); errors.Is(err, ErrNotSupported) {
				t.Skip(err)
			} else if err != nil {
				t.Fatal(err)
			}
			fds, _, _ := holdings(t)
			var f *offspring
			if c.do == nil {
				var was unix.Rlimit
				if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
					t.Fatal(err)
				}
				f = forkWith(t, b.m.Bytes(), want, func(fork func()) {
					// As many as there may be, and not one left.
					if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 200, Max: was.Max}); err != nil {
						t.Fatal(err)
					}
					var all []int
					for {
						fd, err := unix.Dup(0)
						if err != nil {
							break
						}
						all = append(all, fd)
					}
					if len(all) == 0 {
						t.Fatal("no descriptors at all")
					}
					defer func() {
						for _, fd := range all {
							unix.Close(fd)
						}
					}()
					fork()
					if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
						t.Fatal(err)
					}
				})
				f.look()
			} else {
				f = forkToCompare(t, b.m.Bytes(), want)
				c.do(t, b, f)
			}
			if s.sh == nil {
				return
			}
			placed(s)
			if f.say >= 0 {
				if f.armed(b.m) {
					t.Error("memory of the child still belongs to a userfaultfd")
				}
				f.end()
			}
			if now, _, _ := holdings(t); now != fds {
				t.Errorf("%d descriptors, %d before the fork", now, fds)
			}
			same(t, "the parent's", b.get(t, 0, n), want)
			for i := range n >> pageShift {
				if h := s.ev.store.heldBy(uint32(i)); h != 0 {
					t.Fatalf("slot %d is held by %d", i, h)
				}
			}
			if err := b.r.Deregister(); err != nil {
				t.Fatal(err)
			}
			b.a.Close()
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}
