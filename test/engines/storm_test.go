// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/tapverbs/tapverbs/internal/rawfork"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"golang.org/x/sys/unix"
)

// plainStart starts a scenario that needs no namespace.
func plainStart(cmd *exec.Cmd) (func() error, error) {
	cmd.SysProcAttr = nil // the thread that starts it may end before it does; its context ends it
	return cmd.Wait, cmd.Start()
}

// The application unmaps, moves, discards and forks under regions while peers write to
// one of them at full speed, and work on others of which a model knows each byte: 60 s of
// it, 15 under the race detector, or as long as TAPVERBS_STORM says (a Go duration).
func TestStorm(t *testing.T) {
	long := time.Minute
	switch s := os.Getenv("TAPVERBS_STORM"); {
	case s != "":
		var err error
		if long, err = time.ParseDuration(s); err != nil {
			t.Fatal(err)
		}
	case testing.Short():
		long = 3 * time.Second
	case raceDetector:
		long = 15 * time.Second
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	runScenario(t, long+2*stormLimit+hang, plainStart, "storm", fmt.Sprintf("%s=%d %d", runEnv, seed, long))
}

const (
	stormTime  = 500 * time.Millisecond // of a round
	stormLimit = hang                   // of what must happen and has not yet
	chunkLen   = 4 << 20
	chunks     = 4 // of the region: discarded, unmapped, moved, and left alone but for forks
	regionLen  = chunks * chunkLen
	guardLen   = 1 << 20
	guardByte  = 0xa7
	stormSides = 3
	stormCells = 3
	// stormAt is where no other thread's mapping gets, as cellsAt.
	stormAt = 0x4800_0000_0000
)

func mmap(addr uintptr, n, flags int) (uintptr, error) {
	a, _, e := unix.Syscall6(unix.SYS_MMAP, addr, uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
		uintptr(unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|flags), ^uintptr(0), 0)
	if e != 0 {
		return 0, e
	}
	return a, nil
}

func munmap(addr uintptr, n int) error {
	if _, _, e := unix.Syscall(unix.SYS_MUNMAP, addr, uintptr(n), 0); e != 0 {
		return e
	}
	return nil
}

// at is n bytes at an address.
func at(addr uintptr, n int) []byte { return unsafe.Slice(*(**byte)(unsafe.Pointer(&addr)), n) }

// saved is memory that is no region's (any more), and what it must hold.
type saved struct {
	addr uintptr
	want []byte
}

type stormer struct {
	start uintptr // of the region
	stop  atomic.Bool
	wg    sync.WaitGroup

	mu     sync.Mutex
	errs   []error
	saved  []saved
	unmaps []saved // all mappings made, to be unmapped: want is nil, n in length
	counts [4]atomic.Int64
}

func (s *stormer) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.errs = append(s.errs, err)
}

func (s *stormer) failed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.errs) > 0
}

// loop runs one kind of change until the storm ends.
func (s *stormer) loop(kind int, seed uint64, change func(r *rand.Rand) (more bool, err error)) {
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		r := rand.New(rand.NewPCG(seed, uint64(kind)))
		for !s.stop.Load() {
			more, err := change(r)
			if err != nil {
				s.fail(fmt.Errorf("change %d: %w", kind, err))
			}
			if !more {
				return
			}
			s.counts[kind].Add(1)
		}
	}()
}

// run of pages within a chunk.
func pages(r *rand.Rand, chunk uintptr, most int) (addr uintptr, n int) {
	n = (1 + r.IntN(most)) * page
	return chunk + uintptr(r.IntN((chunkLen-n)/page+1)*page), n
}

func (s *stormer) begin(seed uint64) {
	s.loop(0, seed, func(r *rand.Rand) (bool, error) {
		a, n := pages(r, s.start, 64)
		// Not back to back: while a discard is pending the kernel lets nobody place
		// pages (EAGAIN of UFFDIO_COPY), and the engines would come to nothing.
		time.Sleep(time.Duration(seed%3) * 100 * time.Microsecond)
		return true, unix.Madvise(at(a, n), unix.MADV_DONTNEED)
	})
	// What is unmapped becomes somebody else's memory at the same address.
	next := 0
	s.loop(1, seed, func(r *rand.Rand) (bool, error) {
		n := (1 + r.IntN(16)) * page
		if next+n > chunkLen {
			return false, nil
		}
		a := s.start + chunkLen + uintptr(next)
		next += n + r.IntN(8)*page
		if err := munmap(a, n); err != nil {
			return false, fmt.Errorf("munmap: %w", err)
		}
		if _, err := mmap(a, n, unix.MAP_FIXED_NOREPLACE); errors.Is(err, unix.EEXIST) {
			return true, nil // another thread was quicker: it is its memory now
		} else if err != nil {
			return false, fmt.Errorf("mmap: %w", err)
		}
		b := at(a, n)
		for i := range b {
			if b[i] != 0 {
				return false, fmt.Errorf("new memory holds %#x at byte %d", b[i], i)
			}
			b[i] = byte(i>>12) ^ 0x5a
		}
		s.save(a, b)
		time.Sleep(500 * time.Microsecond) // the chunk shall last for the storm
		return true, nil
	})
	moved := 0
	s.loop(2, seed, func(r *rand.Rand) (bool, error) {
		n := (1 + r.IntN(16)) * page
		if moved+n > chunkLen {
			return false, nil
		}
		from := s.start + 2*chunkLen + uintptr(moved)
		moved += n + r.IntN(8)*page
		to, err := mmap(0, n, 0)
		if err != nil {
			return false, err
		}
		if _, _, e := unix.Syscall6(unix.SYS_MREMAP, from, uintptr(n), uintptr(n), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, to, 0); e != 0 {
			return false, fmt.Errorf("mremap: %w", e)
		}
		// What it holds now is the application's alone.
		s.save(to, at(to, n))
		s.mu.Lock()
		s.unmaps = append(s.unmaps, saved{to, at(to, n)})
		s.mu.Unlock()
		time.Sleep(500 * time.Microsecond)
		return true, nil
	})
	s.loop(3, seed, func(*rand.Rand) (bool, error) {
		pid, e := rawfork.Exit()
		if e != 0 {
			return false, fmt.Errorf("clone: %w", e)
		}
		_, err := unix.Wait4(int(pid), nil, 0, nil)
		time.Sleep(time.Millisecond)
		return true, err
	})
}

func (s *stormer) save(a uintptr, b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.saved = append(s.saved, saved{a, append([]byte(nil), b...)})
}

// check compares what must not have changed.
func (s *stormer) check() {
	for _, v := range s.saved {
		if got := at(v.addr, len(v.want)); !bytes.Equal(got, v.want) {
			s.fail(fmt.Errorf("%d bytes at %#x that are no region's were changed, first at byte %d", len(v.want), v.addr, differ(got, v.want)))
		}
	}
}

func storm() error {
	var seed uint64
	var long time.Duration
	if _, err := fmt.Sscan(os.Getenv(runEnv), &seed, &long); err != nil {
		return err
	}
	c, err := newCable(stormSides + stormCells)
	if err != nil {
		return err
	}
	cells, err := beginCells(c, c.lines[stormSides:], seed, true)
	if err != nil {
		return err
	}
	var errs []error
	// Enough of everything must happen, however busy the machine is.
	more := func(took time.Duration) bool { return took < long || took < long+stormLimit && !cells.enough() }
	for begun := time.Now(); len(errs) == 0 && more(time.Since(begun)) && !cells.stop.Load(); seed++ {
		if err := stormRound(c, seed); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, cells.end(), c.close())...)
}

// stormRound is one region's storm: some of its memory is gone for good afterwards.
func stormRound(c *cable, seed uint64) error {
	arena, err := mmap(stormAt, guardLen+regionLen+guardLen, unix.MAP_FIXED_NOREPLACE)
	if err != nil {
		return err
	}
	s := &stormer{start: arena + guardLen}
	for _, g := range []uintptr{arena, s.start + regionLen} {
		b := at(g, guardLen)
		for i := range b {
			b[i] = guardByte
		}
		s.save(g, b)
	}
	region, err := c.pd[1].Register(provider.MRAttr{Addr: s.start, Length: regionLen, Access: allRights})
	if err != nil {
		return err
	}
	s.begin(seed)
	var good, bad [stormSides]atomic.Int64
	for i, l := range c.lines[:stormSides] {
		s.wg.Add(1)
		go func() {
			defer s.wg.Done()
			r := rand.New(rand.NewPCG(seed, uint64(100+i)))
			for !s.stop.Load() {
				n := r.IntN(64 << 10)
				off := r.IntN(regionLen - n)
				if r.IntN(8) > 0 { // mostly where it succeeds
					off = r.IntN(chunkLen-n) + r.IntN(2)*3*chunkLen
				}
				wc, err := l.write(region, s.start+uintptr(off), n)
				if err != nil {
					s.fail(err)
					return
				}
				switch {
				case wc.Status == qp.WCSuccess:
					good[i].Add(1)
					continue
				case wc.Status != qp.WCRemAccessErr:
					s.fail(fmt.Errorf("a WRITE of %d bytes at %d of the region ended with %v", n, off, wc.Status))
				case off >= 3*chunkLen || off+n <= chunkLen:
					s.fail(fmt.Errorf("a WRITE of %d bytes at %d, which was never unmapped, ended with %v", n, off, wc.Status))
				}
				bad[i].Add(1)
				if err := l.connect(); err != nil {
					s.fail(fmt.Errorf("QP cannot be used again: %w", err))
					return
				}
			}
		}()
	}
	// Enough of everything must happen, however busy the machine is.
	missing := func() string {
		for i := range good {
			if good[i].Load() == 0 || bad[i].Load() == 0 {
				return "no WRITE of one of the QPs succeeded, or none failed"
			}
		}
		for k := range s.counts {
			if s.counts[k].Load() == 0 {
				return fmt.Sprintf("change %d never happened", k)
			}
		}
		return ""
	}
	for begun := time.Now(); time.Since(begun) < stormTime || missing() != "" && !s.failed() && time.Since(begun) < stormLimit; {
		time.Sleep(stormTime / 10)
	}
	s.stop.Store(true)
	s.wg.Wait()
	s.check()
	// The QPs still work, on what is left of the region.
	for i, l := range c.lines[:stormSides] {
		off := 3*chunkLen + 123*(i+1)
		wc, err := l.write(region, s.start+uintptr(off), 100_000)
		if err != nil || wc.Status != qp.WCSuccess {
			s.fail(fmt.Errorf("after the storm: %v, %+v", err, wc))
		} else if !bytes.Equal(at(s.start+uintptr(off), 100_000), l.data.Bytes()[:100_000]) {
			s.fail(errors.New("after the storm: wrong data"))
		}
	}
	if what := missing(); what != "" {
		s.fail(errors.New(what + ": that was no storm"))
	}
	var done, refused int64
	for i := range good {
		done, refused = done+good[i].Load(), refused+bad[i].Load()
	}
	fmt.Printf("%d WRITEs done, %d refused and QPs reset; %d ranges discarded, %d unmapped, %d moved, %d forks; %+v\n",
		done, refused, s.counts[0].Load(), s.counts[1].Load(), s.counts[2].Load(), s.counts[3].Load(), c.dev[1].Space().Stats())
	s.errs = append(s.errs, region.Dereg(), munmap(arena, guardLen+regionLen+guardLen))
	for _, u := range s.unmaps {
		s.errs = append(s.errs, munmap(u.addr, len(u.want)))
	}
	return errors.Join(s.errs...)
}
