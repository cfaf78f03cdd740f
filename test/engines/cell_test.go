// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// cell is memory in the midst of a storm, with a model that knows what each byte of it
// must be. One goroutine is the peer that works on it and the application that owns it,
// in turn; others (weather_test.go) do meanwhile what must not change a byte.
type cell struct {
	c      *cable
	l      *line
	r      *rand.Rand
	region atomic.Pointer[provider.MR] // nil while there is none
	app    sync.Mutex                  // held by whoever touches the memory as the application does
	addr   uintptr                     // where the memory is now
	places [2]uintptr
	model  []byte
	turns  []deed // the changes that come next
	did    [numDeeds]atomic.Int64
	served atomic.Int64 // requests that were done
}

const (
	// A cell is as long as a huge page, and begins where one can.
	cellPages = 512
	cellLen   = cellPages * page
	// cellStep has room for a cell with a guard page on each side.
	cellStep = 3 * cellLen
	// cellMost is the longest message in bytes. WRITEs are taken from the first half of
	// the line's data, and READs land in the other.
	cellMost = 48 << 10
	readsAt  = lineData / 2
	// cellsAt is far below where the kernel and the Go heap put mappings of their own:
	// what is unmapped there for a moment no other thread's mapping gets.
	cellsAt = 0x4900_0000_0000
)

// deed is something that the goroutine of a cell does.
type deed int

const (
	deedWrite deed = iota
	deedRead
	deedSend
	deedFetchAdd
	deedCompareSwap
	deedLook    // the application compares
	deedStore   // the application writes
	deedDiscard // MADV_DONTNEED
	deedUnmap   // munmap, mmap at the same place, and registered anew
	deedAgain   // deregistered and registered again
	deedLate    // registered again before the old region ends
	firstSuspended
)

var deedNames = [numDeeds]string{"WRITE", "READ", "SEND", "FETCH ADD", "COMPARE SWAP", "look", "store", "discard", "unmap",
	"deregister", "register twice", "replace", "mremap", "move"}

// newCell makes cell number i.
func newCell(c *cable, l *line, i int, seed uint64) (*cell, error) {
	s := &cell{c: c, l: l, r: rand.New(rand.NewPCG(seed, uint64(1000+i))), model: make([]byte, cellLen)}
	for k := range s.places {
		s.places[k] = uintptr(cellsAt + (2*i+k)*cellStep + cellLen)
		if _, err := mmap(s.places[k]-page, cellLen+2*page, unix.MAP_FIXED_NOREPLACE); err != nil {
			return nil, fmt.Errorf("cell %d at %#x: %w", i, s.places[k], err)
		}
		for _, g := range s.guards(k) {
			for j := range g {
				g[j] = guardByte
			}
		}
	}
	// The second place is for moves: nothing is mapped there until then.
	if err := munmap(s.places[1], cellLen); err != nil {
		return nil, err
	}
	s.addr = s.places[0]
	region, err := s.register()
	if err != nil {
		return nil, err
	}
	s.region.Store(region)
	return s, nil
}

func (s *cell) guards(k int) [2][]byte {
	return [2][]byte{at(s.places[k]-page, page), at(s.places[k]+cellLen, page)}
}

func (s *cell) mem() []byte { return at(s.addr, cellLen) }

// register registers the memory with addresses of its own, which stay when it moves.
func (s *cell) register() (*provider.MR, error) {
	return s.c.pd[1].Register(provider.MRAttr{Addr: s.addr, Length: cellLen, IOVA: 0x10_0000, HaveIOVA: true, Access: allRights | mr.OnDemand})
}

// piece is a part of the cell: mostly small, of any alignment.
func (s *cell) piece() (off, n int) {
	most := cellMost
	if s.r.IntN(2) == 0 {
		most = 5000
	}
	n = 1 + s.r.IntN(most)
	return s.r.IntN(cellLen - n), n
}

// pages is a run of whole pages of the cell.
func (s *cell) pages() (off, n int) {
	n = (1 + s.r.IntN(32)) * page
	return s.r.IntN((cellLen-n)/page+1) * page, n
}

// run works on the cell until stop says so, with changes of the mapping or without.
func (s *cell) run(stop *atomic.Bool, changes bool) error {
	for !stop.Load() {
		d := deed(s.r.IntN(int(deedDiscard)))
		if changes && s.r.IntN(16) == 0 { // changes are rare, so that requests meet what others change
			d = s.turn()
		}
		if err := s.do(d); err != nil {
			return fmt.Errorf("%s: %w", deedNames[d], err)
		}
	}
	return s.finish()
}

// turn is the next change. Each has its turn before one comes again: a slow machine does few
// of them, and all are to happen.
func (s *cell) turn() deed {
	if len(s.turns) == 0 {
		for _, i := range s.r.Perm(int(numDeeds - deedDiscard)) {
			s.turns = append(s.turns, deedDiscard+deed(i))
		}
	}
	d := s.turns[0]
	s.turns = s.turns[1:]
	return d
}

// finish looks at all of it and ends the region.
func (s *cell) finish() error {
	errs := []error{s.compare("at the end", s.mem(), s.model)}
	for k := range s.places {
		for _, g := range s.guards(k) {
			if !bytes.Equal(g, bytes.Repeat([]byte{guardByte}, page)) {
				errs = append(errs, fmt.Errorf("a guard page of place %d was changed", k))
			}
		}
	}
	return errors.Join(append(errs, s.region.Swap(nil).Dereg())...)
}

func (s *cell) compare(what string, got, want []byte) error {
	if bytes.Equal(got, want) {
		return nil
	}
	i := differ(got, want)
	wrong := 0
	for k := range want {
		if got[k] != want[k] {
			wrong++
		}
	}
	return fmt.Errorf("%s: %d of %d bytes are wrong, the first is byte %d: %#x instead of %#x", what, wrong, len(want), i, got[i], want[i])
}

// look has the application compare a part of the memory.
func (s *cell) look(what string, off, n int) error {
	s.app.Lock()
	defer s.app.Unlock()
	return s.compare(fmt.Sprintf("%d bytes %s %d", n, what, off), s.mem()[off:off+n], s.model[off:off+n])
}

// request has the peer do something, which must succeed.
func (s *cell) request(wr qp.SendWR, off int) error {
	m := s.region.Load()
	wr.RemoteAddr, wr.RKey = m.IOVA()+uint64(off), m.RKey()
	wc, err := s.l.do(wr)
	if err == nil && wc.Status != qp.WCSuccess {
		err = fmt.Errorf("completed with %v", wc.Status)
	}
	s.served.Add(1)
	return err
}

func (s *cell) do(d deed) error {
	off, n := s.piece()
	src := s.r.IntN(readsAt - n)
	data := s.l.data.Bytes()
	s.did[d].Add(1)
	switch d {
	case deedWrite:
		copy(s.model[off:], data[src:src+n])
		return s.request(qp.SendWR{Opcode: qp.WRWrite, SGL: []qp.SGE{s.l.sge(src, n)}}, off)
	case deedRead:
		if err := s.request(qp.SendWR{Opcode: qp.WRRead, SGL: []qp.SGE{s.l.sge(readsAt, n)}}, off); err != nil {
			return err
		}
		return s.compare(fmt.Sprintf("READ of %d bytes at %d", n, off), data[readsAt:readsAt+n], s.model[off:off+n])
	case deedSend:
		copy(s.model[off:], data[src:src+n])
		return s.send(off, n, src)
	case deedFetchAdd, deedCompareSwap:
		return s.atomic(off&^7, d == deedFetchAdd)
	case deedLook:
		return s.look("at", off, n)
	case deedStore:
		s.app.Lock()
		defer s.app.Unlock()
		copy(s.mem()[off:], data[src:src+n])
		copy(s.model[off:], data[src:src+n])
		return nil
	}
	return s.change(d)
}

// send has the peer send n bytes that land at off.
func (s *cell) send(off, n, src int) error {
	m := s.region.Load()
	if _, err := s.l.qp[1].PostRecv([]qp.RecvWR{{ID: 7, SGL: []qp.SGE{{Addr: m.IOVA() + uint64(off), Length: uint32(n), LKey: m.LKey()}}}}); err != nil {
		return err
	}
	if err := s.request(qp.SendWR{Opcode: qp.WRSend, SGL: []qp.SGE{s.l.sge(src, n)}}, 0); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), hang)
	defer cancel()
	one := make([]qp.WC, 1)
	if _, err := s.l.rcq.Wait(ctx, one); err != nil {
		return err
	}
	if one[0].Status != qp.WCSuccess || int(one[0].ByteLen) != n {
		return fmt.Errorf("the receive completed with %v and %d bytes of %d", one[0].Status, one[0].ByteLen, n)
	}
	return s.look("received at", off, n)
}

func (s *cell) atomic(off int, add bool) error {
	word := s.model[off : off+8]
	old := binary.NativeEndian.Uint64(word)
	wr := qp.SendWR{Opcode: qp.WRAtomicCmpSwap, SGL: []qp.SGE{s.l.sge(readsAt, 8)}, CompareAdd: old, Swap: s.r.Uint64()}
	if add {
		wr.Opcode, wr.CompareAdd = qp.WRAtomicFetchAdd, wr.Swap
		binary.NativeEndian.PutUint64(word, old+wr.Swap)
	} else {
		binary.NativeEndian.PutUint64(word, wr.Swap)
	}
	if err := s.request(wr, off); err != nil {
		return err
	}
	if got := binary.NativeEndian.Uint64(s.l.data.Bytes()[readsAt:]); got != old {
		return fmt.Errorf("an atomic at %d returned %#x instead of %#x", off, got, old)
	}
	return s.look("of an atomic at", off, 8)
}

// change changes the mapping, or the region.
func (s *cell) change(d deed) error {
	off, n := s.pages()
	switch d {
	case deedDiscard:
		clear(s.model[off : off+n])
		return unix.Madvise(s.mem()[off:off+n], unix.MADV_DONTNEED)
	case deedUnmap:
		// The region ends before its memory does, or afterwards.
		old, late := s.region.Swap(nil), s.r.IntN(2) == 0
		if !late {
			if err := old.Dereg(); err != nil {
				return err
			}
		}
		if err := munmap(s.addr+uintptr(off), n); err != nil {
			return err
		}
		if _, err := mmap(s.addr+uintptr(off), n, unix.MAP_FIXED_NOREPLACE); err != nil {
			return err
		}
		clear(s.model[off : off+n])
		if err := s.enter(); err != nil || !late {
			return err
		}
		return old.Dereg()
	case deedAgain:
		if err := s.region.Swap(nil).Dereg(); err != nil {
			return err
		}
		return s.enter()
	case deedLate:
		old := s.region.Load()
		if err := s.enter(); err != nil {
			return err
		}
		return old.Dereg()
	}
	return s.suspended(d, off, n)
}

// enter registers the memory anew.
func (s *cell) enter() error {
	m, err := s.register()
	if err != nil {
		return err
	}
	if m.Paging() != mr.UserFault {
		return fmt.Errorf("paged by %v", m.Paging())
	}
	s.region.Store(m)
	return nil
}

// stormyCells are the cells of a storm.
type stormyCells struct {
	stop    atomic.Bool
	changes bool
	cells   []*cell
	errs    chan error
	wait    sync.WaitGroup
	blown   [numKinds]atomic.Int64 // of the weather of all cells
}

// beginCells makes a cell for each line and has work begin on it.
func beginCells(c *cable, lines []*line, seed uint64, changes bool) (*stormyCells, error) {
	s := &stormyCells{errs: make(chan error, 16*len(lines)), changes: changes}
	for i, l := range lines {
		cell, err := newCell(c, l, i, seed)
		if err != nil {
			return nil, err
		}
		s.cells = append(s.cells, cell)
	}
	for i, cell := range s.cells {
		s.start(fmt.Sprintf("cell %d", i), func() error { return cell.run(&s.stop, changes) })
		if changes {
			s.start(fmt.Sprintf("weather of cell %d", i), func() error { return cell.weather(s.stop.Load, seed+uint64(i), &s.blown) })
		}
	}
	return s, nil
}

// start runs something until the end of the storm, which its error is, too.
func (s *stormyCells) start(name string, f func() error) {
	s.wait.Add(1)
	go func() {
		defer s.wait.Done()
		if err := f(); err != nil {
			s.stop.Store(true)
			s.errs <- fmt.Errorf("%s: %w", name, err)
		}
	}()
}

// end ends the work and says what was wrong; nothing, if everything was done that there is.
func (s *stormyCells) end() error {
	s.stop.Store(true)
	s.wait.Wait()
	close(s.errs)
	var errs []error
	for err := range s.errs {
		errs = append(errs, err)
	}
	did, blown, missing := s.tally()
	for d, n := range did {
		fmt.Printf("%d %s, ", n, deedNames[d])
	}
	for k, n := range blown {
		fmt.Printf("%d %s, ", n, kindNames[k])
	}
	fmt.Println()
	if missing != "" && len(errs) == 0 {
		errs = append(errs, fmt.Errorf("no %s: that was no storm", missing))
	}
	return errors.Join(errs...)
}

// tally is what was done so far, and something that was not.
func (s *stormyCells) tally() (did [numDeeds]int64, blown [numKinds]int64, missing string) {
	for d := range did {
		for _, c := range s.cells {
			did[d] += c.did[d].Load()
		}
		if did[d] == 0 && (s.changes || deed(d) < deedDiscard) {
			missing = deedNames[d]
		}
	}
	for k := range blown {
		if blown[k] = s.blown[k].Load(); blown[k] == 0 && s.changes {
			missing = kindNames[k]
		}
	}
	return did, blown, missing
}

// enough says whether everything was done that there is.
func (s *stormyCells) enough() bool {
	_, _, missing := s.tally()
	return missing == ""
}
