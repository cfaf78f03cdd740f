// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"bytes"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

// WRITEs to a file, FLUSHes to persistence and ATOMIC WRITEs behind them, many at once;
// then a device is closed while FLUSHes are at the disk.
func TestPersistentFlush(t *testing.T) {
	const size, rounds = 1 << 20, 20
	name := filepath.Join(t.TempDir(), "log")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	mem, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := syscall.Munmap(mem); err != nil {
			t.Error(err)
		}
	}()
	const access = mr.LocalWrite | mr.RemoteWrite | mr.FlushGlobal | mr.FlushPersistent
	p := harness.NewLivePair(t, taptest.Config{})
	// Writing to a page that is on its way to the disk waits for the disk: 1 s, seven times.
	c := p.Connect(harness.ConnOptions{Mem: size, Timeout: 18, Access: mr.LocalWrite | mr.RemoteWrite | mr.RemoteRead})
	if err := c.B.QP.Modify(provider.QPAttr{Attr: qp.Attr{Access: access}}, qp.AttrAccess); err != nil {
		t.Fatal(err)
	}
	file, err := c.B.PD.RegMR(mem, access)
	if err != nil {
		t.Fatal(err)
	}
	at := func(off int, wr qp.SendWR) qp.SendWR {
		wr.RemoteAddr, wr.RKey = uint64(file.Addr())+uint64(off), file.RKey()
		return wr
	}
	harness.Fill(c.A.Mem, 1)
	done := 0
	for i := range rounds {
		off := 8 + i*10000
		c.A.Send(at(off, qp.SendWR{ID: 1, Opcode: qp.WRWrite, SGL: []qp.SGE{c.A.SGE(off, 10000)}}),
			at(off, qp.SendWR{ID: 2, Opcode: qp.WRFlush, Flush: qp.FlushWR{Placement: wire.FlushPersistent, Length: 10000}}),
			at(0, qp.SendWR{ID: 3, Opcode: qp.WRAtomicWrite, Flags: qp.SendSignaled | qp.SendInline, Inline: []byte{byte(i), 2, 3, 4, 5, 6, 7, 8}}))
		if i%4 == 3 {
			p.RunUntil(func() bool {
				for _, wc := range c.A.Poll() {
					if wc.Status != qp.WCSuccess || wc.Opcode != qp.WCAtomicWrite {
						t.Fatalf("%+v", wc)
					}
					done++
				}
				return done == i+1
			})
			if mem[0] != byte(i) || !bytes.Equal(mem[8:off+10000], c.A.Mem[8:off+10000]) {
				t.Fatalf("round %d: wrong data", i)
			}
		}
	}
	for range 8 {
		c.A.Send(at(0, qp.SendWR{Opcode: qp.WRFlush, Flush: qp.FlushWR{Placement: wire.FlushPersistent, Selectivity: wire.FlushMR}}))
		mem[4096]++
	}
	if err := c.B.Dev.Close(); err != nil {
		t.Error(err)
	}
}
