// SPDX-License-Identifier: Apache-2.0

package tap_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/tap"
)

// needTAP ends a test on a machine that cannot have TAPs at all.
func needTAP(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make network namespaces")
	}
	if err := fabric.CheckTUN(); err != nil {
		t.Skip(err)
	}
}

// inNS runs fn in a network namespace that ends with the test's descriptors.
func inNS(t testing.TB, fn func() error) {
	t.Helper()
	needTAP(t)
	if err := fabric.WithNS(fn); err != nil {
		t.Fatal(err)
	}
}

// onBridge opens a device for each config on the ports of a new fabric.
func onBridge(t testing.TB, fcfg fabric.Config, cfgs ...tap.Config) (*fabric.Fabric, []tap.Device) {
	t.Helper()
	var (
		f  *fabric.Fabric
		ds []tap.Device
	)
	inNS(t, func() (err error) {
		if f, err = fabric.New(fcfg); err != nil {
			return err
		}
		t.Cleanup(func() {
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		})
		for i, cfg := range cfgs {
			p, err := f.AddPort(i)
			if err != nil {
				return err
			}
			cfg.Name = p.Name
			d, err := tap.Open(cfg)
			if err != nil {
				return err
			}
			t.Cleanup(func() { d.Close() })
			ds = append(ds, d)
		}
		return nil
	})
	return f, ds
}

// frame makes a frame of size bytes from one port's engine to another's, with an
// EtherType that no host acts on and contents that depend on tag.
func frame(from, to, size, tag int) []byte {
	b := make([]byte, size)
	copy(b, []byte{2, 't', 'v', 0, 0, byte(to + 1), 2, 't', 'v', 0, 0, byte(from + 1), 0x88, 0xb5})
	r := rand.New(rand.NewPCG(uint64(tag), uint64(size)))
	for i := tap.EthHeaderLen; i < size; i++ {
		b[i] = byte(r.Uint32())
	}
	return b
}

func buffers(n, size int) []tap.Frame {
	fs := make([]tap.Frame, n)
	for i := range fs {
		fs[i].B = make([]byte, size)
	}
	return fs
}

// await blocks until the device can be read (or reports an error), for 10 s at most.
func await(t testing.TB, d tap.Device) int16 {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(d.FD()), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 10000)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			t.Fatalf("poll %s: %d, %v", d.Name(), n, err)
		}
		return fds[0].Revents
	}
}

// readAll reads until there are n frames.
func readAll(t testing.TB, d tap.Device, n int) []tap.Frame {
	t.Helper()
	fs := buffers(n, tap.MaxFrame)
	for got := 0; got < n; {
		await(t, d)
		k, err := d.ReadBatch(fs[got:])
		if err != nil {
			t.Fatal(err)
		}
		got += k
	}
	return fs
}

var modes = []struct {
	name string
	a, b tap.Config
}{
	{"plain-plain", tap.Config{Plain: true}, tap.Config{Plain: true}},
	{"vnet-vnet", tap.Config{}, tap.Config{}},
	{"plain-vnet", tap.Config{Plain: true}, tap.Config{}},
	{"vnet-plain", tap.Config{}, tap.Config{Plain: true}},
}

func TestFramesBothWays(t *testing.T) {
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			_, ds := onBridge(t, fabric.Config{}, m.a, m.b)
			mtu := ds[0].MTU()
			if mtu != fabric.DefaultMTU {
				t.Fatalf("MTU %d", mtu)
			}
			var sizes []int
			for _, s := range []int{14, 15, 59, 60, 61, 1514, 4096 + 80, mtu + 13, mtu + 14} {
				sizes = append(sizes, s, s)
			}
			for way := range 2 {
				from, to := ds[way], ds[1-way]
				var out []tap.Frame
				total := 0
				for i, s := range sizes {
					out = append(out, tap.Frame{B: frame(way, 1-way, s, i)})
					total += s
				}
				if n, err := from.WriteBatch(out); n != len(out) || err != nil {
					t.Fatalf("wrote %d of %d: %v", n, len(out), err)
				}
				for i, f := range readAll(t, to, len(out)) {
					if !bytes.Equal(f.B, out[i].B) || f.GSO != 0 {
						t.Fatalf("way %d, frame %d: %d bytes (gso %d) differ from the %d sent", way, i, len(f.B), f.GSO, len(out[i].B))
					}
				}
				if n, err := to.ReadBatch(buffers(1, 64)); n != 0 || err != nil {
					t.Fatalf("after the last frame: %d, %v", n, err)
				}
				tx, rx := from.(tap.StatsReader).Stats(), to.(tap.StatsReader).Stats()
				if tx.TxFrames != uint64(len(out)) || tx.TxBytes != uint64(total) || rx.RxFrames != uint64(len(out)) || rx.RxBytes != uint64(total) {
					t.Fatalf("stats: sent %+v, received %+v, want %d frames, %d bytes", tx, rx, len(out), total)
				}
			}
		})
	}
}

// A frame longer than the reader's buffer, by one byte or by many, is dropped and
// counted; the frames around it arrive in the slots of the batch.
func TestTruncatedIsDropped(t *testing.T) {
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			_, ds := onBridge(t, fabric.Config{}, m.a, m.b)
			var out []tap.Frame
			for i, s := range []int{100, 101, 100, 5000, 99} {
				out = append(out, tap.Frame{B: frame(0, 1, s, i)})
			}
			if n, err := ds[0].WriteBatch(out); n != len(out) || err != nil {
				t.Fatal(n, err)
			}
			await(t, ds[1])
			in := buffers(5, 100)
			n, err := ds[1].ReadBatch(in)
			if n != 3 || err != nil {
				t.Fatalf("%d frames, %v", n, err)
			}
			for i, want := range []int{0, 2, 4} {
				if !bytes.Equal(in[i].B, out[want].B) {
					t.Errorf("slot %d is not frame %d", i, want)
				}
			}
			if s := ds[1].(tap.StatsReader).Stats(); s.RxTruncated != 2 || s.RxFrames != 3 {
				t.Errorf("%+v", s)
			}
		})
	}
}

func TestReceiverQueueFull(t *testing.T) {
	const room = 16
	_, ds := onBridge(t, fabric.Config{TxQueueLen: room}, tap.Config{}, tap.Config{})
	var out []tap.Frame
	for i := range 100 {
		out = append(out, tap.Frame{B: frame(0, 1, 200, i)})
	}
	// The sender is not told: the kernel drops at the receiving TAP.
	if n, err := ds[0].WriteBatch(out); n != len(out) || err != nil {
		t.Fatal(n, err)
	}
	in := buffers(len(out), 300)
	n, err := ds[1].ReadBatch(in)
	if n != room || err != nil {
		t.Fatalf("%d frames of a queue of %d, %v", n, room, err)
	}
	for i := range n {
		if !bytes.Equal(in[i].B, out[i].B) {
			t.Fatalf("frame %d differs", i)
		}
	}
}

func TestWriteRefuses(t *testing.T) {
	for _, plain := range []bool{true, false} {
		_, ds := onBridge(t, fabric.Config{}, tap.Config{Plain: plain}, tap.Config{Plain: plain})
		good := frame(0, 1, 60, 0)
		for _, c := range []struct {
			bad  tap.Frame
			want error
		}{
			{tap.Frame{}, tap.ErrFrameLen},
			{tap.Frame{B: good[:13]}, tap.ErrFrameLen},
			{tap.Frame{B: make([]byte, tap.MaxFrame+1)}, tap.ErrFrameLen},
			{tap.Frame{B: good, GSO: 30}, tap.ErrSuperFrame},
		} {
			n, err := ds[0].WriteBatch([]tap.Frame{{B: good}, c.bad, {B: good}})
			if n != 1 || !errors.Is(err, c.want) {
				t.Errorf("%d bytes, gso %d: %d, %v", len(c.bad.B), c.bad.GSO, n, err)
			}
		}
	}
}

// A reader and a writer on each device at once, more frames than the queues hold
// (so each side waits for the other's word), then Close underneath both.
func TestConcurrent(t *testing.T) {
	_, ds := onBridge(t, fabric.Config{}, tap.Config{}, tap.Config{Plain: true})
	const frames, window = 5000, 512
	var wg sync.WaitGroup
	for me := range 2 {
		credit := make(chan struct{}, window)
		for range window {
			credit <- struct{}{}
		}
		wg.Go(func() {
			for i := range frames {
				<-credit
				b := frame(me, 1-me, 64, 0)
				binary.BigEndian.PutUint32(b[14:], uint32(i))
				if n, err := ds[me].WriteBatch([]tap.Frame{{B: b}}); n != 1 || err != nil {
					t.Errorf("write %d: %d, %v", i, n, err)
					return
				}
			}
		})
		wg.Go(func() {
			in := buffers(32, 128)
			for got := uint32(0); got < frames; {
				if await(t, ds[1-me])&unix.POLLIN == 0 {
					t.Error("no POLLIN")
					return
				}
				n, err := ds[1-me].ReadBatch(in)
				if err != nil {
					t.Error(err)
					return
				}
				for _, f := range in[:n] {
					if seq := binary.BigEndian.Uint32(f.B[14:]); seq != got {
						t.Errorf("frame %d, want %d", seq, got)
						return
					}
					got++
					credit <- struct{}{}
				}
			}
		})
	}
	wg.Wait()
	gone := make(chan error, 2)
	started := make(chan struct{}, 2)
	spin := func(step func() error) {
		started <- struct{}{}
		for {
			if err := step(); err != nil {
				gone <- err
				return
			}
		}
	}
	in, out := buffers(4, 128), []tap.Frame{{B: frame(0, 1, 64, 0)}}
	go spin(func() error { _, err := ds[0].ReadBatch(in); return err })
	go spin(func() error { _, err := ds[0].WriteBatch(out); return err })
	<-started
	<-started
	if err := ds[0].Close(); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := <-gone; !errors.Is(err, tap.ErrGone) {
			t.Error(err)
		}
	}
}

func TestNoAllocations(t *testing.T) {
	for _, plain := range []bool{true, false} {
		_, ds := onBridge(t, fabric.Config{}, tap.Config{Plain: plain}, tap.Config{Plain: plain})
		out := make([]tap.Frame, 8)
		for i := range out {
			out[i].B = frame(0, 1, 1000, i)
		}
		in := buffers(16, 2000)
		var got, sent int
		n := testing.AllocsPerRun(200, func() {
			k, err := ds[0].WriteBatch(out)
			if err != nil {
				panic(err)
			}
			sent += k
			for {
				k, err := ds[1].ReadBatch(in)
				if err != nil {
					panic(err)
				}
				got += k
				if k == 0 {
					break
				}
			}
		})
		if n != 0 {
			t.Errorf("plain %v: %v allocations for a batch", plain, n)
		}
		if got != sent || got == 0 {
			t.Errorf("plain %v: %d of %d frames", plain, got, sent)
		}
	}
}

func TestOffloadString(t *testing.T) {
	for o, want := range map[tap.Offload]string{
		0: "none", tap.VnetHdr: "vnet", tap.VnetHdr | tap.CSUM | tap.USO4 | tap.USO6: "vnet,csum,uso4,uso6",
	} {
		if got := fmt.Sprint(o); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
