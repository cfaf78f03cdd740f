// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

const page = 4096

// touched is how many pages n bytes at off lie on.
func touched(off, n int) uint64 {
	if n == 0 {
		return 0
	}
	return uint64((off+n-1)/page - off/page + 1)
}

// connect is two engines whose second memory was never touched.
func connect(t *testing.T, mtu qp.MTU, mem int) *harness.Conn {
	p := harness.NewPair(t, taptest.Config{Seed: 1, Delay: 3 * time.Microsecond})
	return p.Connect(harness.ConnOptions{MTU: mtu, Mem: mem})
}

// only fails unless b is zero but for data at off.
func only(t *testing.T, what string, b []byte, off int, data []byte) {
	t.Helper()
	zero := make([]byte, len(b))
	if !bytes.Equal(b[off:off+len(data)], data) {
		t.Fatalf("%s: wrong data, first at byte %d of %d", what, differ(b[off:], data), len(data))
	}
	if !bytes.Equal(b[:off], zero[:off]) || !bytes.Equal(b[off+len(data):], zero[:len(b)-off-len(data)]) {
		t.Fatalf("%s: memory around the data was changed", what)
	}
}

// Data that starts and ends at every alignment around page borders, on pages that
// nobody has touched: as a WRITE, as a SEND's landing place and as a READ's result.
// Each page touched is one fault, no more.
func TestAlignments(t *testing.T) {
	const room = 5 * page // for each transfer, fresh
	const around = 8
	var offs []int
	for d := -around; d <= around; d++ {
		offs = append(offs, page+d)
	}
	for _, mtu := range []qp.MTU{qp.MTU256, qp.MTU1024, qp.MTU4096} {
		for _, op := range []qp.WROpcode{qp.WRWrite, qp.WRSend, qp.WRRead} {
			t.Run(fmt.Sprintf("%d/op%d", mtu.Bytes(), op), func(t *testing.T) {
				c := connect(t, mtu, room*len(offs)*len(offs)*3)
				// The data comes from A's first pages; B's pages are the ones in
				// question. A READ is B's own.
				data := c.A.Mem[:4*page]
				harness.Fill(data, 99)
				at, id := 0, uint64(0)
				for _, start := range offs {
					for _, end := range offs {
						for span := range 3 {
							n := end + span*page - start
							if n < 0 {
								continue
							}
							id++
							before := c.B.MR.Stats()
							switch op {
							case qp.WRWrite:
								c.A.Send(c.A.Write(c.B, id, 0, at+start, n))
								c.WaitOK(c.A, id)
							case qp.WRSend:
								c.B.Recv(id, at+start, n)
								c.A.Send(c.A.Message(id, 0, n))
								c.WaitOK(c.B, id)
								c.WaitOK(c.A, id)
							case qp.WRRead:
								c.B.Send(c.B.Read(c.A, id, at+start, 0, n))
								c.WaitOK(c.B, id)
							}
							what := fmt.Sprintf("%d bytes at %d", n, start)
							st := c.B.MR.Stats()
							if f, h := st.PageFaults-before.PageFaults, st.PageFaultsHandled-before.PageFaultsHandled; f != touched(start, n) || h != f {
								t.Fatalf("%s: %d page faults, %d handled, want %d", what, f, h, touched(start, n))
							}
							only(t, what, c.B.Mem[at:at+room], start, data[:n])
							at += room
						}
					}
				}
			})
		}
	}
}

// READ of a page that nobody has touched, and then a WRITE of a part of it: one
// fault, zeroes read, and the page zero but for what was written.
func TestWriteAfterRead(t *testing.T) {
	c := connect(t, qp.MTU1024, 1<<20)
	harness.Fill(c.A.Mem[:2*page], 5)
	at := 16 * page
	want := uint64(0)
	for i, n := range []int{1, 8, 100, page - 1, page, page + 1, 2 * page} {
		off := at + 3 + i*37
		got := c.A.Mem[at : at+n]
		harness.Fill(got, 1)
		c.A.Send(c.A.Read(c.B, 1, at, off, n), c.A.Write(c.B, 2, 0, off+n/2, n-n/2))
		c.WaitOK(c.A, 1)
		c.WaitOK(c.A, 2)
		only(t, "what was read", got, 0, make([]byte, n))
		only(t, "what was written", c.B.Mem[at:at+8*page], off+n/2-at, c.A.Mem[:n-n/2])
		want += touched(off, n)
		if f := c.B.MR.Stats().PageFaults; f != want {
			t.Fatalf("%d page faults after %d bytes, want %d", f, n, want)
		}
		at += 8 * page
	}
	// The other way round, and an atomic on a page of its own.
	c.A.Send(c.A.Write(c.B, 3, 0, at+5, 3), c.A.Read(c.B, 4, at, at, page))
	c.WaitOK(c.A, 3)
	c.WaitOK(c.A, 4)
	only(t, "read after write", c.A.Mem[at:at+page], 5, c.A.Mem[:3])
	add := c.A.Read(c.B, 5, at+page, at+page+8, 8)
	add.Opcode, add.CompareAdd = qp.WRAtomicFetchAdd, 1
	c.A.Send(add)
	c.WaitOK(c.A, 5)
	if f := c.B.MR.Stats().PageFaults; f != want+2 {
		t.Fatalf("%d page faults at the end, want %d", f, want+2)
	}
}

func register(t *testing.T, e *harness.End, a provider.MRAttr) *provider.MR {
	t.Helper()
	m, err := e.PD.Register(a)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Dereg(); err != nil && err != provider.ErrClosed {
			t.Error(err)
		}
	})
	return m
}

// rawWrite is a WRITE of n bytes of A's first ones to any address and key.
func rawWrite(c *harness.Conn, id, addr uint64, k mr.Key, n int) qp.SendWR {
	w := c.A.Write(c.B, id, 0, 0, n)
	w.RemoteAddr, w.RKey = addr, k
	return w
}

// Regions that overlap agree on the pages they share: a page is brought in once,
// by whichever is used first, and one region's end leaves the others whole.
func TestOverlappingRegions(t *testing.T) {
	c := connect(t, qp.MTU1024, 64*page)
	harness.Fill(c.A.Mem, 6)
	lo := register(t, c.B, provider.MRAttr{Addr: uintptr(c.B.Addr), Length: 20*page + 100, Access: allRights})
	hi := register(t, c.B, provider.MRAttr{Addr: uintptr(c.B.Addr) + 10*page - 50, Length: 20 * page, Access: allRights})
	at := c.B.Addr + 15*page + 17
	sum := func() uint64 {
		return lo.Stats().PageFaults + hi.Stats().PageFaults + c.B.MR.Stats().PageFaults
	}
	c.A.Send(rawWrite(c, 1, at, lo.RKey(), 1000), rawWrite(c, 2, at+500, hi.RKey(), 2*page), c.A.Write(c.B, 3, 0, 15*page+700, 3*page))
	for id := range uint64(3) {
		c.WaitOK(c.A, id+1)
	}
	want := make([]byte, 30*page)
	copy(want[15*page+17:], c.A.Mem[:1000])
	copy(want[15*page+517:], c.A.Mem[:2*page])
	copy(want[15*page+700:], c.A.Mem[:3*page])
	if !bytes.Equal(c.B.Mem[:30*page], want) {
		t.Fatal("wrong data")
	}
	if n := sum(); n != 4 {
		t.Errorf("%d page faults, want 4", n)
	}
	if err := lo.Dereg(); err != nil {
		t.Fatal(err)
	}
	// Pages behind what is left are still paged: absent ones are placed.
	c.A.Send(rawWrite(c, 4, c.B.Addr+11*page+1, hi.RKey(), 50), c.A.Write(c.B, 5, 0, 3*page+1, 60))
	c.WaitOK(c.A, 4)
	c.WaitOK(c.A, 5)
	copy(want[11*page+1:], c.A.Mem[:50])
	copy(want[3*page+1:], c.A.Mem[:60])
	if !bytes.Equal(c.B.Mem[:30*page], want) {
		t.Fatal("wrong data after a region has ended")
	}
	c.A.Send(rawWrite(c, 6, at, lo.RKey(), 1))
	if wc := c.WaitOne(c.A); wc.Status != qp.WCRemAccessErr {
		t.Fatalf("completion %+v through a region that has ended", wc)
	}
}

// Requests use the iova, whatever the address is, and exactly the region's length.
func TestIOVA(t *testing.T) {
	for _, iova := range []uint64{0, 1, 0x1000, 0x7fff_ffff_fff1, 1<<64 - 1 - 3*page} {
		t.Run(fmt.Sprintf("%#x", iova), func(t *testing.T) {
			c := connect(t, qp.MTU1024, 32*page)
			harness.Fill(c.A.Mem, 7)
			const off, n = 2*page + 333, 3 * page
			r := register(t, c.B, provider.MRAttr{Addr: uintptr(c.B.Addr) + off, Length: n, IOVA: iova, HaveIOVA: true, Access: allRights})
			c.A.Send(rawWrite(c, 1, iova, r.RKey(), 10), rawWrite(c, 2, iova+page, r.RKey(), 2*page))
			c.WaitOK(c.A, 1)
			c.WaitOK(c.A, 2)
			want := make([]byte, 32*page)
			copy(want[off:], c.A.Mem[:10])
			copy(want[off+page:], c.A.Mem[:2*page])
			if !bytes.Equal(c.B.Mem, want) {
				t.Fatal("wrong data")
			}
			if f := r.Stats().PageFaults; f != 4 {
				t.Errorf("%d page faults, want 4", f)
			}
			c.A.Send(rawWrite(c, 3, iova+1, r.RKey(), n)) // one byte too far
			if wc := c.WaitOne(c.A); wc.Status != qp.WCRemAccessErr {
				t.Fatalf("completion %+v for bytes outside of the region", wc)
			}
			if !bytes.Equal(c.B.Mem, want) {
				t.Fatal("a refused WRITE changed memory")
			}
		})
	}
}
