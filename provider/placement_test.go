// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/harness"
)

// arrived is what a message to memory of which no page was there has taken.
type arrived struct {
	placements, pages uint64
	frames, super     uint64 // super: those of the frames that are super-frames
	acks              uint64 // that were sent for them
}

func (a arrived) String() string {
	return fmt.Sprintf("%d placements of %d pages, from %d super-frames of %d frames, %d acknowledgements", a.placements, a.pages, a.super, a.frames, a.acks)
}

// intoCold moves n bytes to memory that is not there, at off of the end that they arrive at.
func intoCold(t *testing.T, c *harness.Conn, op qp.WROpcode, off, n int) (got arrived) {
	t.Helper()
	from, to := c.A, c.B
	if op == qp.WRRead {
		from, to = c.B, c.A
	}
	if err := unix.Madvise(to.Mem, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	harness.Fill(from.Mem[:n], uint64(op)+uint64(off))
	look := func() arrived {
		u, err := to.MR.Usage()
		if err != nil {
			t.Fatal(err)
		}
		st := to.Dev.Stats().Tap
		return arrived{u.Placements, u.FaultsMinor, st.RxFrames, st.RxSuper, to.Dev.Protocol().SentAcks.Load()}
	}
	before := look()
	switch op {
	case qp.WRWrite:
		c.A.Send(c.A.Write(c.B, 1, 0, off, n))
	case qp.WRRead:
		c.A.Send(c.A.Read(c.B, 1, off, 0, n))
	case qp.WRSend:
		c.B.Recv(2, off, n)
		c.A.Send(c.A.Message(1, 0, n))
		c.WaitOK(c.B, 2)
	}
	c.WaitOK(c.A, 1)
	after := look()
	if !bytes.Equal(from.Mem[:n], to.Mem[off:off+n]) {
		t.Fatal("wrong data")
	}
	return arrived{after.placements - before.placements, after.pages - before.pages, after.frames - before.frames,
		after.super - before.super, after.acks - before.acks}
}

// A message of 1 MiB to memory that is not there makes 256 pages. In packets of 4 KiB it is 18 super-frames
// or somewhat more: 15 packets fit into one. The pages of a super-frame are neighbours, and placed by one
// UFFDIO_COPY; those of several that are read together by one for each 64 KiB. What is acknowledged
// in the middle of a super-frame has to be in place before, and makes two of one. So there are no more
// placements than frames and acknowledgements, and no fewer than pieces of 64 KiB. A message that begins in the middle of a page
// takes no more: a page that two super-frames share is there when the second comes.
func TestPlacementPerSuperFrame(t *testing.T) {
	const n = 1 << 20
	for _, mtu := range []qp.MTU{qp.MTU1024, qp.MTU4096} {
		for op, name := range map[qp.WROpcode]string{qp.WRWrite: "WRITE", qp.WRSend: "SEND", qp.WRRead: "READ"} {
			for _, off := range []int{0, 2000} {
				t.Run(fmt.Sprintf("%s/mtu=%d/off=%d", name, mtu.Bytes(), off), func(t *testing.T) {
					c := harness.NewPair(t, superLink).Connect(harness.ConnOptions{MTU: mtu, Mem: n + 4096})
					got := intoCold(t, c, op, off, n)
					t.Log(got)
					if want := uint64(n+off+4095) / 4096; got.pages != want {
						t.Errorf("%d pages, want %d", got.pages, want)
					}
					if got.super == 0 || got.frames > 48 || got.acks > 20 {
						t.Errorf("not in super-frames: %v", got)
					}
					if got.placements > got.frames+got.acks || got.placements < n>>16 {
						t.Error(got)
					}
				})
			}
		}
	}
}

// The same over TAPs. There it depends on how busy the machine is what is read together.
func TestTAPPlacement(t *testing.T) {
	if os.Getenv(harness.EnvFrames) == "single" {
		t.Skip(harness.EnvFrames + ": no super-frames")
	}
	const n = 1 << 20
	p := harness.NewTAPPair(t, harness.TAPOptions{})
	c := p.Connect(harness.ConnOptions{MTU: qp.MTU4096, Mem: n, Timeout: 20}) // 4 s: the machine may be busy
	p.RunUntil(func() bool {                                                  // until then there are none
		a, b := p.Dev[0].Stats(), p.Dev[1].Stats()
		return a.SuperProbes > 0 && b.SuperProbes > 0 && a.SuperAsking+b.SuperAsking == 0
	})
	for op, name := range map[qp.WROpcode]string{qp.WRWrite: "WRITE", qp.WRSend: "SEND", qp.WRRead: "READ"} {
		got := intoCold(t, c, op, 0, n)
		t.Log(name, got)
		if got.pages != n/4096 || got.placements > got.frames+got.acks || got.frames+got.acks > n/4096/2 {
			t.Errorf("%s: %v", name, got)
		}
	}
}
