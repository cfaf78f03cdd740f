// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

func ok(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// elapse runs the pair for a time.
func elapse(c *harness.Conn, d time.Duration) {
	end := c.Clock.Now() + int64(d)
	for c.Clock.Now() < end {
		if !c.Step() {
			c.Clock.AdvanceTo(end)
		}
	}
}

// duplex is traffic in both directions, of all kinds, with a model that knows each byte.
type duplex struct {
	c     *harness.Conn
	r     *rand.Rand
	ends  [2]*harness.End
	model [2][]byte
	open  [2]int // completions that are still to come
	got   atomic.Int64
	adds  [2]uint64
}

const (
	duplexMem  = 1 << 20
	duplexSlot = 8 << 10
	// Slots of the first quarter are written by the peer, those of the second are results;
	// the rest is only read. The first word of each quarter is for atomics.
	duplexQuarter = duplexMem / 4
	duplexSlots   = duplexQuarter/duplexSlot - 1
)

func newDuplex(c *harness.Conn, seed uint64) *duplex {
	d := &duplex{c: c, r: rand.New(rand.NewPCG(seed, 7)), ends: [2]*harness.End{c.A, c.B}}
	for i, e := range d.ends {
		harness.Fill(e.Mem, seed+uint64(i))
		binary.NativeEndian.PutUint64(e.Mem, 0)
		d.model[i] = slices.Clone(e.Mem)
	}
	return d
}

// post posts an operation of one end for each slot.
func (d *duplex) post(i int) {
	e, peer := d.ends[i], d.ends[1-i]
	for s := 1; s <= duplexSlots; s++ {
		slot, n := s*duplexSlot, 1+d.r.IntN(duplexSlot)
		at := 2*duplexQuarter + d.r.IntN(2*duplexQuarter-n)
		switch d.r.IntN(5) {
		case 0, 1:
			copy(d.model[1-i][slot:], d.model[i][at:at+n])
			e.Send(e.Write(peer, uint64(s), at, slot, n))
		case 2:
			copy(d.model[1-i][slot:], d.model[i][at:at+n])
			peer.Recv(uint64(s), slot, n)
			d.open[1-i]++
			e.Send(e.Message(uint64(s), at, n))
		case 3:
			copy(d.model[i][duplexQuarter+slot:], d.model[1-i][at:at+n])
			e.Send(e.Read(peer, uint64(s), duplexQuarter+slot, at, n))
		case 4:
			wr := e.Read(peer, uint64(s), duplexQuarter, 0, 8)
			wr.Opcode, wr.CompareAdd = qp.WRAtomicFetchAdd, 1
			binary.NativeEndian.PutUint64(d.model[i][duplexQuarter:], d.adds[1-i])
			d.adds[1-i]++
			e.Send(wr)
		}
		d.open[i]++
	}
}

// done polls, and says whether all is complete.
func (d *duplex) done() bool {
	for i, e := range d.ends {
		for _, wc := range e.Poll() {
			if wc.Status != qp.WCSuccess {
				d.c.T.Fatalf("end %d: work request %d ended with %v", i, wc.ID, wc.Status)
			}
			d.open[i]--
			d.got.Add(1)
		}
	}
	return d.open == [2]int{}
}

func (d *duplex) check() {
	d.c.T.Helper()
	for i, e := range d.ends {
		binary.NativeEndian.PutUint64(d.model[i], d.adds[i])
		if !bytes.Equal(e.Mem, d.model[i]) {
			for k := range e.Mem {
				if e.Mem[k] != d.model[i][k] {
					d.c.T.Fatalf("end %d: byte %#x is %#x, want %#x", i, k, e.Mem[k], d.model[i][k])
				}
			}
		}
	}
}

// TestSuspendTraffic suspends a region of either end, or both, for a second, a hundred
// times, in the midst of traffic in both directions: no error, and no byte is lost.
func TestSuspendTraffic(t *testing.T) {
	for _, mode := range []mr.SuspendMode{mr.SuspendRNR, mr.SuspendHold, mr.SuspendDrop} {
		for _, loss := range []float64{0, 0.01} {
			t.Run(fmt.Sprintf("%v/%g", mode, loss), func(t *testing.T) {
				cfg := link
				cfg.Seed, cfg.Loss = 3, loss
				o := harness.ConnOptions{Mem: duplexMem, Timeout: 10}
				if mode == mr.SuspendDrop {
					o.Timeout = 17 // seven times half a second
				}
				c := harness.NewPair(t, cfg).Connect(o)
				d := newDuplex(c, 1)
				for _, e := range d.ends {
					ok(t, e.MR.SetSuspendMode(mode, 0))
				}
				before := c.Clock.Now()
				for round := range 100 {
					d.post(0)
					d.post(1)
					for range d.r.IntN(8) {
						c.Step()
					}
					which := [][]*harness.End{{c.A}, {c.B}, {c.A, c.B}}[round%3]
					var was [][]byte
					for _, e := range which {
						ok(t, e.MR.Suspend())
						was = append(was, slices.Clone(e.Mem))
					}
					elapse(c, time.Second)
					for i, e := range which {
						if !bytes.Equal(was[i], e.Mem) {
							t.Fatal("memory changed while it was suspended")
						}
						ok(t, e.MR.Resume())
					}
					c.RunUntil(d.done)
					d.check()
				}
				if lasted := time.Duration(c.Clock.Now() - before); lasted < 100*time.Second {
					t.Errorf("lasted %v", lasted)
				}
			})
		}
	}
}

// TestResumeAtOnce: work that is held goes on when the region is resumed, deregistered or
// eliminated, and not only when somebody looks.
func TestResumeAtOnce(t *testing.T) {
	for _, side := range []string{"requester", "responder"} {
		for what, end := range map[string]func(*provider.MR) error{
			"resume": (*provider.MR).Resume, "eliminate": (*provider.MR).Eliminate, "dereg": (*provider.MR).Dereg} {
			t.Run(side+"/"+what, func(t *testing.T) {
				c := harness.NewPair(t, link).Connect(harness.ConnOptions{})
				e, bad := c.A, qp.WCLocProtErr
				if side == "responder" {
					e, bad = c.B, qp.WCRemAccessErr
				}
				ok(t, e.MR.SetSuspendMode(mr.SuspendHold, 0), e.MR.Suspend())
				c.A.Send(c.A.Write(c.B, 5, 0, 0, 20_000))
				elapse(c, 500*time.Microsecond)
				if len(c.A.Poll()) > 0 {
					t.Fatal("completed while suspended")
				}
				at := c.Clock.Now()
				ok(t, end(e.MR))
				wc := c.WaitOne(c.A)
				want := qp.WCSuccess
				if what != "resume" {
					want = bad
				}
				if wc.Status != want {
					t.Errorf("completed with %v, want %v", wc.Status, want)
				}
				if took := time.Duration(c.Clock.Now() - at); took > time.Millisecond {
					t.Errorf("went on after %v", took)
				}
			})
		}
	}
}

// areasAt is far from where the kernel and the Go heap put mappings: nobody else's comes
// to lie where one has been moved away, to be unmapped at the end.
var areasAt = func() *atomic.Uint64 {
	a := new(atomic.Uint64)
	a.Store(0x4a00_0000_0000)
	return a
}()

// area is memory that a test moves about.
func area(t *testing.T, n int) uintptr {
	t.Helper()
	p := uintptr(areasAt.Add(uint64(n))) - uintptr(n)
	if _, _, e := unix.Syscall6(unix.SYS_MMAP, p, uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE, ^uintptr(0), 0); e != 0 {
		t.Fatal(e)
	}
	t.Cleanup(func() { _, _, _ = unix.Syscall(unix.SYS_MUNMAP, p, uintptr(n), 0) })
	return p
}

func areaBytes(p uintptr, n int) []byte {
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&p)), n)
}

// TestUpdateUnderTraffic: the memory of a region is replaced, moved and remapped again and
// again while the peer writes to it, reads it and counts in it: each byte is where it
// should be.
func TestUpdateUnderTraffic(t *testing.T) {
	const n = 256 << 10
	for _, mode := range []mr.SuspendMode{mr.SuspendRNR, mr.SuspendHold} {
		t.Run(mode.String(), func(t *testing.T) {
			cfg := link
			cfg.Seed, cfg.Loss = 5, 0.005
			c := harness.NewPair(t, cfg).Connect(harness.ConnOptions{Mem: n, Timeout: 12})
			r := rand.New(rand.NewPCG(9, 9))
			at := area(t, n)
			reg := must(c.B.PD.Register(provider.MRAttr{Addr: at, Length: n, Access: mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead | mr.RemoteAtomic | mr.MWBind}))(t)
			win := must(c.B.PD.AllocMW(mr.Window1))(t)
			wkey, err := c.B.QP.BindMW(win, reg, 1, qp.SendSignaled, qp.Bind{Addr: reg.IOVA(), Length: n, Access: mr.RemoteWrite})
			ok(t, err)
			c.WaitOK(c.B, 1)
			ok(t, reg.SetSuspendMode(mode, 500*time.Microsecond))
			iova, model := reg.IOVA(), make([]byte, n)
			harness.Fill(c.A.Mem, 3)
			var adds uint64
			for round := range 120 {
				posted := 0
				for s := 1; s < 30; s++ {
					slot, size := s*8192, 1+r.IntN(8192)
					wr := c.A.Write(c.B, uint64(s), r.IntN(n-size), 0, size)
					wr.RemoteAddr, wr.RKey = iova+uint64(slot), reg.RKey()
					switch r.IntN(4) {
					case 0:
						wr.RKey = wkey
						fallthrough
					case 1, 2:
						copy(model[slot:], c.A.Mem[wr.SGL[0].Addr-c.A.Addr:][:size])
					case 3:
						wr.Opcode, wr.CompareAdd, wr.RemoteAddr, wr.SGL[0].Length, wr.SGL[0].Addr = qp.WRAtomicFetchAdd, 1, iova, 8, c.A.Addr
						adds++
					}
					c.A.Send(wr)
					posted++
				}
				for range r.IntN(8) {
					c.Step()
				}
				ok(t, reg.Suspend())
				switch round % 3 {
				case 0: // page by page, an odd number of them
					from, k := r.IntN(20)*4096, 4096*(1+r.IntN(40))
					y := area(t, k)
					copy(areaBytes(y, k), areaBytes(at+uintptr(from), k))
					clear(areaBytes(at+uintptr(from), k))
					ok(t, reg.Replace(iova+uint64(from), uint64(k), y))
				case 1: // elsewhere; what it leaves must not be written to
					to := area(t, n)
					copy(areaBytes(to, n), areaBytes(at, n))
					ok(t, reg.MoveTo(to))
					ok(t, unix.Mprotect(areaBytes(at, n), unix.PROT_NONE))
					at = to
				case 2:
					to := area(t, n)
					if _, _, e := unix.Syscall6(unix.SYS_MREMAP, at, n, n, 3, to, 0); e != 0 {
						t.Fatal(e)
					}
					at = to
				}
				elapse(c, time.Duration(r.IntN(3000))*time.Microsecond)
				ok(t, reg.Resume())
				c.RunUntil(func() bool {
					for _, wc := range c.A.Poll() {
						if wc.Status != qp.WCSuccess {
							t.Fatalf("round %d: %v", round, wc.Status)
						}
						posted--
					}
					return posted == 0
				})
				binary.NativeEndian.PutUint64(model, adds)
				copy(c.A.Mem, model[:0])
				if reg.Addr() != at {
					t.Fatalf("the region is at %#x, its memory at %#x", reg.Addr(), at)
				}
				if got := areaBytes(at, n); !bytes.Equal(got, model) {
					for i := range got {
						if got[i] != model[i] {
							t.Fatalf("round %d: byte %#x is %#x, want %#x", round, i, got[i], model[i])
						}
					}
				}
			}
			ok(t, win.Dealloc(), reg.Dereg())
		})
	}
}

// TestEliminateLives: a region is eliminated with a window bound and a WRITE under way. That
// fails, and so does what comes by the window; the other regions, and other QPs, live on.
func TestEliminateLives(t *testing.T) {
	p := harness.NewPair(t, link)
	c, other := p.Connect(harness.ConnOptions{}), p.Connect(harness.ConnOptions{})
	reg := must(c.B.PD.Register(provider.MRAttr{Addr: uintptr(c.B.Addr), Length: 1 << 20, Access: mr.LocalWrite | mr.RemoteWrite | mr.MWBind}))(t)
	win := must(c.B.PD.AllocMW(mr.Window1))(t)
	key, err := c.B.QP.BindMW(win, reg, 1, qp.SendSignaled, qp.Bind{Addr: reg.IOVA(), Length: 1 << 20, Access: mr.RemoteWrite})
	ok(t, err)
	c.WaitOK(c.B, 1)
	var kinds []mr.RegionEventKind
	stop := p.Dev[1].OnRegion(func(k mr.Key, kind mr.RegionEventKind) {
		if k == reg.LKey() {
			kinds = append(kinds, kind)
		}
	})
	defer stop()
	wr := c.A.Write(c.B, 2, 0, 0, 1<<20)
	wr.RKey = key
	c.A.Send(wr)
	for range 5 {
		c.Step()
	}
	wantErr(t, "bound", reg.Dereg(), mr.ErrBound, syscall.EBUSY)
	ok(t, reg.Eliminate())
	if wc := c.WaitOne(c.A); wc.Status != qp.WCRemAccessErr {
		t.Errorf("under way: %v", wc.Status)
	}
	if !slices.Equal(kinds, []mr.RegionEventKind{mr.RegionEliminated}) {
		t.Errorf("events %v", kinds)
	}
	wantErr(t, "suspend", reg.Suspend(), mr.ErrClosed, syscall.EINVAL)
	other.A.Send(other.A.Write(other.B, 3, 0, 0, 100_000))
	other.WaitOK(other.A, 3)
	wr = other.A.Write(other.B, 4, 0, 0, 10)
	wr.RKey = reg.RKey()
	other.A.Send(wr)
	if wc := other.WaitOne(other.A); wc.Status != qp.WCRemAccessErr {
		t.Errorf("afterwards: %v", wc.Status)
	}
	ok(t, win.Dealloc(), reg.Dereg())
	wantErr(t, "twice", reg.Dereg(), provider.ErrClosed, syscall.EBADF)
}

// TestSuspendedQPsEnd: QPs that hold work are reset, destroyed, or closed with their device.
func TestSuspendedQPsEnd(t *testing.T) {
	for what, end := range map[string]func(*harness.Conn) error{
		"reset": func(c *harness.Conn) error {
			a := provider.QPAttr{Attr: qp.Attr{State: qp.StateReset}}
			return errors.Join(c.A.QP.Modify(a, qp.AttrState), c.B.QP.Modify(a, qp.AttrState))
		},
		"error": func(c *harness.Conn) error {
			a := provider.QPAttr{Attr: qp.Attr{State: qp.StateErr}}
			return errors.Join(c.A.QP.Modify(a, qp.AttrState), c.B.QP.Modify(a, qp.AttrState))
		},
		"destroy": func(c *harness.Conn) error { return errors.Join(c.A.QP.Destroy(), c.B.QP.Destroy()) },
		"close":   func(c *harness.Conn) error { return errors.Join(c.Dev[0].Close(), c.Dev[1].Close()) },
	} {
		t.Run(what, func(t *testing.T) {
			c := harness.NewPair(t, link).Connect(harness.ConnOptions{})
			for _, e := range []*harness.End{c.A, c.B} {
				ok(t, e.MR.SetSuspendMode(mr.SuspendHold, 0))
			}
			ok(t, c.B.MR.Suspend())
			c.A.Send(c.A.Write(c.B, 1, 0, 0, 20_000), c.A.Read(c.B, 2, 0, 0, 20_000))
			c.B.Send(c.B.Read(c.A, 3, 0, 0, 20_000), c.B.Write(c.A, 4, 0, 0, 20_000))
			elapse(c, 500*time.Microsecond)
			ok(t, end(c))
			if what == "close" {
				wantErr(t, "resume", c.B.MR.Resume(), provider.ErrClosed, syscall.EBADF)
				return
			}
			ok(t, c.B.MR.Resume())
			c.Settle()
			if what == "error" {
				if n := len(c.A.Poll()) + len(c.B.Poll()); n != 4 {
					t.Errorf("%d work requests were flushed", n)
				}
			}
		})
	}
}

// TestSuspendLive suspends and resumes from several goroutines, in real time, while both
// ends work at full speed.
func TestSuspendLive(t *testing.T) {
	c := harness.NewLivePair(t, taptest.Config{}).Connect(harness.ConnOptions{Mem: duplexMem, Timeout: 18})
	d := newDuplex(c, 2)
	for _, e := range d.ends {
		ok(t, e.MR.SetSuspendMode(mr.SuspendHold, 0))
	}
	var suspensions atomic.Int64
	var stop atomic.Bool
	done := make(chan error, 3)
	for i := range 3 {
		go func() {
			for k := 0; !stop.Load(); k++ {
				m := d.ends[(i+k)%2].MR
				if err := errors.Join(m.Suspend(), m.Resume()); err != nil {
					done <- err
					return
				}
				suspensions.Add(1)
				for was := d.got.Load(); d.got.Load() == was && !stop.Load(); {
					runtime.Gosched()
				}
			}
			done <- nil
		}()
	}
	// How many there are while a round lasts is the scheduler's doing.
	for round := 0; round < 5 || suspensions.Load() < 20 && len(done) == 0; round++ {
		d.post(0)
		d.post(1)
		c.RunUntil(d.done)
		d.check()
	}
	stop.Store(true)
	for range 3 {
		ok(t, <-done)
	}
}

// TestQPFaultPolicy sets a QP's policy and takes it back.
func TestQPFaultPolicy(t *testing.T) {
	c := harness.NewPair(t, link).Connect(harness.ConnOptions{})
	q := c.A.QP
	if q.FaultPolicy() != mr.FaultByRegion {
		t.Error(q.FaultPolicy())
	}
	for _, p := range []mr.FaultPolicy{mr.FaultStall, mr.FaultError, mr.FaultByRegion} {
		ok(t, q.SetFaultPolicy(p))
		if q.FaultPolicy() != p {
			t.Errorf("%v, want %v", q.FaultPolicy(), p)
		}
	}
	wantErr(t, "policy", q.SetFaultPolicy(77), provider.ErrInvalid, syscall.EINVAL)
	ok(t, q.Destroy())
	wantErr(t, "destroyed", q.SetFaultPolicy(mr.FaultRNR), provider.ErrClosed, syscall.EBADF)
}
