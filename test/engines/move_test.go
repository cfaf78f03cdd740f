// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
)

// TestKernelMovesPages: nothing is pinned, so the kernel moves every page of regions that
// peers read and write at full speed, to other physical memory and to swap. Nothing is lost.
func TestKernelMovesPages(t *testing.T) {
	g := newMemcg(t, 1<<30, 64<<20) // for the swap
	runScenario(t, 2*hang, plainStart, "kernel-moves", runEnv+"="+g.dir)
}

const (
	moveCells = 2
	// moveRounds is how often each page is to have moved.
	moveRounds = 5
	// moveRequests is how many requests each cell is to have answered meanwhile: enough for
	// one of each kind.
	moveRequests = 300
	// Of linux/mman.h, madvise(2).
	madvPageout  = 21
	madvCollapse = 25
)

func kernelMoves() error {
	if err := os.WriteFile(os.Getenv(runEnv)+"/cgroup.procs", fmt.Append(nil, os.Getpid()), 0o600); err != nil {
		return err
	}
	c, err := newCable(moveCells)
	if err != nil {
		return err
	}
	cells, err := beginCells(c, c.lines, 1, false)
	if err != nil {
		return err
	}
	var tally moveTally
	for i, cell := range cells.cells {
		if err := tally.move(cell, cells.stop.Load); err != nil {
			cells.errs <- fmt.Errorf("moving cell %d: %w", i, err)
			break
		}
	}
	err = cells.end()
	fmt.Printf("%+v\n", tally)
	if err == nil && (tally.Collapsed == 0 || tally.SwappedOut == 0 || tally.Moved < moveCells*cellPages*moveRounds) {
		err = errors.New("nothing was tested")
	}
	return errors.Join(err, c.close())
}

// moveSink keeps looks at memory from being left out.
var moveSink byte

// moveTally counts what the kernel did, in pages but for Collapsed.
type moveTally struct{ Collapsed, SwappedOut, Moved int }

// move has the kernel move each page of a cell moveRounds times.
func (m *moveTally) move(s *cell, stop func() bool) error {
	var was [cellPages]uint64
	var moved [cellPages]int
	for least := 0; (least < moveRounds || s.served.Load() < moveRequests) && !stop(); {
		if err := s.advise(madvPageout); err != nil {
			return fmt.Errorf("MADV_PAGEOUT: %w", err)
		}
		frames, err := pagemap(s.addr)
		if err != nil {
			return err
		}
		for _, f := range frames {
			if f&pageSwapped != 0 {
				m.SwappedOut++
			}
		}
		// To a huge page, which the next round takes apart. It has to be on memory that
		// is there, and nobody may look meanwhile: it comes to nothing now and then.
		switch err := s.advise(madvCollapse); {
		case err == nil:
			m.Collapsed++
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOMEM):
			return fmt.Errorf("MADV_COLLAPSE: %w", err)
		}
		for i := 0; i < cellLen; i += page {
			moveSink += s.mem()[i] // all are there
		}
		if frames, err = pagemap(s.addr); err != nil {
			return err
		}
		least = moveRounds
		for i, f := range frames {
			if f&pagePresent == 0 {
				least = min(least, moved[i])
				continue
			}
			if f &= pageFrame; f != was[i] && was[i] != 0 {
				moved[i]++
				m.Moved++
			}
			was[i] = f
			least = min(least, moved[i])
		}
	}
	return nil
}

// TestEveryPageMoves: regions that peers read and write at full speed are evicted whole,
// to limbo (UFFDIO_MOVE of every page) and to the store, and every page of them is replaced
// by another, again and again. Nothing is lost.
func TestEveryPageMoves(t *testing.T) { runScenario(t, 2*hang, plainStart, "moves") }

func moves() error {
	c, err := newCable(moveCells)
	if err != nil {
		return err
	}
	cells, err := beginCells(c, c.lines, 2, false)
	if err != nil {
		return err
	}
	var limbo, stored [moveCells]int
	var rounds [moveCells]int
	var wg sync.WaitGroup
	for i, cell := range cells.cells {
		wg.Go(func() {
			m := cell.region.Load()
			// Some come back before all have gone: how many depends on who has the processor.
			few := func() bool {
				return rounds[i] < moveRounds || limbo[i] < moveRounds*cellPages/2 || stored[i] < moveRounds*cellPages/4
			}
			for ; (few() || cell.served.Load() < moveRequests) && !cells.stop.Load(); rounds[i]++ {
				n, err := m.Evict(m.IOVA(), cellLen, mr.Limbo)
				limbo[i] += n
				if err == nil {
					n, err = m.Evict(m.IOVA(), cellLen, mr.Stored)
					stored[i] += n
				}
				if err == nil {
					err = cell.replaceAll(m)
				}
				time.Sleep(3 * time.Millisecond) // a region that is always suspended serves nobody
				if err != nil {
					cells.stop.Store(true)
					cells.errs <- fmt.Errorf("moving cell %d: %w", i, err)
				}
			}
		})
	}
	wg.Wait()
	err = cells.end()
	fmt.Printf("%v rounds, %v pages to limbo, %v to the store\n", rounds, limbo, stored)
	return errors.Join(err, c.close())
}

// replaceAll puts other pages with the same content in the place of all of a cell's.
func (s *cell) replaceAll(m *provider.MR) error {
	with, err := mmap(0, cellLen, 0)
	if err != nil {
		return err
	}
	defer munmap(with, cellLen)
	s.app.Lock()
	defer s.app.Unlock()
	if err := m.Suspend(); err != nil {
		return err
	}
	copy(at(with, cellLen), s.mem())
	if err := m.Replace(m.IOVA(), cellLen, with); err != nil {
		return err
	}
	if !bytesAreZero(at(with, cellLen)) {
		return errors.New("the pages are still where they were")
	}
	return m.Resume()
}

// advise is an advice about all of a cell.
func (s *cell) advise(advice int) error { return unix.Madvise(s.mem(), advice) }

// Bits of an entry of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst).
const (
	pageFrame   = 1<<55 - 1
	pageSwapped = 1 << 62
	pagePresent = 1 << 63
)

// pagemap is the entries of a cell's pages.
func pagemap(addr uintptr) (out [cellPages]uint64, err error) {
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return out, err
	}
	defer f.Close()
	b := make([]byte, unsafe.Sizeof(out))
	if _, err := f.ReadAt(b, int64(addr/page*8)); err != nil {
		return out, err
	}
	for i := range out {
		out[i] = binary.NativeEndian.Uint64(b[8*i:])
	}
	return out, nil
}
