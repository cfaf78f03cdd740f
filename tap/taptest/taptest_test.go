// SPDX-License-Identifier: Apache-2.0

package taptest_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
)

// frame numbers its contents from byte 14 on.
func frame(from, to byte, size, n int) []byte {
	b := make([]byte, size)
	copy(b, []byte{2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5})
	binary.BigEndian.PutUint32(b[14:], uint32(n))
	return b
}

func number(f tap.Frame) int { return int(binary.BigEndian.Uint32(f.B[14:])) }

func write(t testing.TB, p *taptest.Port, frames ...[]byte) {
	t.Helper()
	for _, b := range frames {
		if n, err := p.WriteBatch([]tap.Frame{{B: b}}); n != 1 || err != nil {
			t.Fatalf("%d, %v", n, err)
		}
	}
}

// read reads everything that has arrived.
func read(t testing.TB, p *taptest.Port) (fs []tap.Frame) {
	t.Helper()
	for {
		f := []tap.Frame{{B: make([]byte, tap.MaxFrame)}}
		n, err := p.ReadBatch(f)
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			return fs
		}
		fs = append(fs, f[0])
	}
}

// drain moves the clock from delivery to delivery until nothing is on its way.
func drain(t testing.TB, n *taptest.Net, p *taptest.Port) (fs []tap.Frame) {
	t.Helper()
	for {
		at, ok := n.NextDelivery()
		if !ok {
			return fs
		}
		n.Clock().AdvanceTo(at)
		fs = append(fs, read(t, p)...)
	}
}

func TestPerfectCable(t *testing.T) {
	n := taptest.New(taptest.NewClock(5), taptest.Config{})
	a, b := n.Port(0), n.Port(1)
	if a.MTU() != taptest.DefaultMTU || a.FD() != -1 || a.Name() != "mem0" || b.Index() != 1 || a.Offloads() != 0 || n.Port(1) != b {
		t.Fatal("a port's properties")
	}
	sizes := []int{18, 60, 1514, 9014}
	for i, s := range sizes {
		write(t, a, frame(1, 2, s, i))
	}
	if b.Pending() != 4 || a.Pending() != 0 || b.InFlight() != 4 {
		t.Fatalf("pending %d, %d", b.Pending(), a.Pending())
	}
	if at, ok := n.NextDelivery(); at != 5 || !ok {
		t.Fatalf("next %d, %v", at, ok)
	}
	for i, f := range read(t, b) {
		if !bytes.Equal(f.B, frame(1, 2, sizes[i], i)) {
			t.Errorf("frame %d differs", i)
		}
	}
	if _, ok := n.NextDelivery(); ok {
		t.Error("something is left")
	}
	if s := n.Stats(); s.Sent != 4 || s.Delivered != 4 || s.Ports[0].Sent != 4 || s.Ports[1].Delivered != 4 || s.Ports[1].Sent != 0 {
		t.Errorf("%+v", s)
	}
	if s := a.Stats(); s.TxFrames != 4 || s.TxBytes != 18+60+1514+9014 {
		t.Errorf("%+v", s)
	}
}

func TestDelay(t *testing.T) {
	c := new(taptest.Clock)
	n := taptest.New(c, taptest.Config{Delay: time.Millisecond})
	a, b := n.Port(0), n.Port(1)
	write(t, a, frame(1, 2, 60, 0))
	c.Advance(400 * time.Microsecond)
	write(t, a, frame(1, 2, 60, 1))
	if at, ok := n.NextDelivery(); at != 1e6 || !ok {
		t.Fatalf("next %d", at)
	}
	c.AdvanceTo(1e6 - 1)
	if b.Pending() != 0 || len(read(t, b)) != 0 {
		t.Error("a nanosecond early")
	}
	c.AdvanceTo(1e6)
	if fs := read(t, b); len(fs) != 1 || number(fs[0]) != 0 {
		t.Errorf("%d frames", len(fs))
	}
	c.AdvanceTo(10) // in the past: nothing happens
	if c.Now() != 1e6 {
		t.Errorf("now %d", c.Now())
	}
	c.AdvanceTo(1.4e6)
	if fs := read(t, b); len(fs) != 1 || number(fs[0]) != 1 {
		t.Errorf("%d frames", len(fs))
	}
}

// What is more than the rate waits, and is marked if it finds too much waiting, and may be.
func TestRateAndMarks(t *testing.T) {
	c := new(taptest.Clock)
	n := taptest.New(c, taptest.Config{Rate: 1_000_000, MarkAt: 250, Delay: time.Microsecond})
	a, b := n.Port(0), n.Port(1)
	v4 := func(tos byte) []byte {
		f := frame(1, 2, 100, 0)
		copy(f[12:], []byte{8, 0, 0x45, tos, 0, 86, 0, 0, 0x40, 0, 64, 17, 0x12, 0x34, 10, 0, 0, 1, 10, 0, 0, 2})
		return f
	}
	v6 := func(class byte) []byte {
		f := frame(1, 2, 100, 0)
		copy(f[12:], []byte{0x86, 0xdd, 0x60 | class>>4, class << 4})
		return f
	}
	in := [][]byte{v4(2), v4(2), v4(2), v4(2), v4(0x81), v4(0), v4(3), v6(0x42), v6(0), frame(1, 2, 100, 7)}
	write(t, a, in...)
	for i, f := range in {
		c.AdvanceTo(int64(i+1)*100_000 + 999)
		if b.Pending() != 0 {
			t.Fatalf("frame %d is early", i)
		}
		c.Advance(1)
		fs := read(t, b)
		if len(fs) != 1 {
			t.Fatalf("frame %d: %d frames", i, len(fs))
		}
		got := fs[0].B
		ecn := map[int]byte{0: 2, 1: 2, 2: 2, 3: 3, 4: 0x83, 6: 3}
		switch {
		case i < 7:
			if got[15] != ecn[i] {
				t.Errorf("frame %d: TOS %#x, want %#x", i, got[15], ecn[i])
			}
			sum := uint32(0)
			for k := 14; k < 34; k += 2 {
				sum += uint32(got[k])<<8 | uint32(got[k+1])
			}
			if i > 2 && ecn[i] != 0 && sum>>16+sum&0xffff != 0xffff {
				t.Errorf("frame %d: wrong checksum", i)
			}
		case i == 7:
			if got[14]<<4|got[15]>>4 != 0x43 {
				t.Errorf("IPv6: %x", got[14:18])
			}
		default:
			if !bytes.Equal(got, f) {
				t.Errorf("frame %d is changed", i)
			}
		}
	}
	if s := n.Stats(); s.Marked != 4 {
		t.Errorf("%d marked", s.Marked)
	}
}

// Jitter spreads arrivals and never reorders; Reorder does.
func TestJitterAndReorder(t *testing.T) {
	for _, reorder := range []float64{0, 0.2} {
		n := taptest.New(nil, taptest.Config{Seed: 3, Delay: 100, Jitter: 50 * time.Microsecond, Reorder: reorder})
		a, b := n.Port(0), n.Port(1)
		for i := range 1000 {
			write(t, a, frame(1, 2, 60, i))
			n.Clock().Advance(time.Microsecond)
		}
		fs := drain(t, n, b)
		if len(fs) != 1000 {
			t.Fatalf("%d frames", len(fs))
		}
		late, high := 0, -1
		for _, f := range fs {
			if number(f) < high {
				late++
			}
			high = max(high, number(f))
		}
		s := n.Stats()
		if late != int(s.Overtaken) {
			t.Errorf("%d late, counted %d", late, s.Overtaken)
		}
		if reorder == 0 && late != 0 || reorder != 0 && (late < 50 || s.Reordered < 150 || s.Reordered > 250) {
			t.Errorf("reorder %v: %d late, %+v", reorder, late, s.Counts)
		}
	}
}

func TestFaultsMatchProbabilities(t *testing.T) {
	const frames = 20000
	for _, p := range []float64{0.01, 0.05, 0.2} {
		for seed := range int64(3) {
			n := taptest.New(nil, taptest.Config{Seed: seed, Loss: p, Dup: p, Reorder: p, Corrupt: p})
			a, b := n.Port(0), n.Port(1)
			for i := range frames {
				write(t, a, frame(1, 2, 64, i))
			}
			got := drain(t, n, b)
			s := n.Stats()
			near := func(what string, got uint64, of float64) {
				mean := of * p
				if sigma := math.Sqrt(mean * (1 - p)); math.Abs(float64(got)-mean) > 4.5*sigma {
					t.Errorf("p %v, seed %d: %s %d, expected %.0f", p, seed, what, got, mean)
				}
			}
			near("lost", s.Lost, frames)
			near("duplicated", s.Duplicated, float64(frames-s.Lost))
			near("reordered", s.Reordered, float64(frames-s.Lost+s.Duplicated))
			near("corrupted", s.Corrupted, float64(frames-s.Lost+s.Duplicated))
			if s.Sent != frames || s.Delivered != frames-s.Lost+s.Duplicated || int(s.Delivered) != len(got) || s.Overtaken == 0 {
				t.Errorf("p %v: %+v, %d read", p, s.Counts, len(got))
			}
			bad := uint64(0)
			for _, f := range got {
				if i := number(f); i >= frames || !bytes.Equal(f.B, frame(1, 2, 64, i)) {
					bad++
				}
			}
			// A flip inside of the number may give another valid frame, rarely.
			if bad > s.Corrupted || bad < s.Corrupted*8/10 {
				t.Errorf("p %v: %d frames are corrupt, counted %d", p, bad, s.Corrupted)
			}
		}
	}
}

func TestCorruptionFlipsOneToThreeBits(t *testing.T) {
	n := taptest.New(nil, taptest.Config{Corrupt: 1})
	a, b := n.Port(0), n.Port(1)
	var hist [5]int
	bitSeen := make(map[int]bool)
	for range 3000 {
		out := frame(1, 2, 22, 0)
		write(t, a, out)
		f := read(t, b)[0]
		if !bytes.Equal(f.B[:14], out[:14]) {
			t.Fatal("the Ethernet header is changed")
		}
		if !bytes.Equal(out, frame(1, 2, 22, 0)) {
			t.Fatal("the sender's frame is changed")
		}
		flipped := 0
		for i := range f.B {
			d := f.B[i] ^ out[i]
			flipped += bits.OnesCount8(d)
			for k := range 8 {
				if d>>k&1 == 1 {
					bitSeen[8*i+k] = true
				}
			}
		}
		hist[min(flipped, 4)]++
	}
	if hist[0] != 0 || hist[4] != 0 || hist[1] < 800 || hist[2] < 800 || hist[3] < 800 {
		t.Errorf("frames by bits flipped: %v", hist)
	}
	if len(bitSeen) != 64 {
		t.Errorf("only %d of 64 bits were ever flipped", len(bitSeen))
	}
}

// run sends the same frames both ways and tells all that happened.
func run(seed int64, dup float64) string {
	var log strings.Builder
	n := taptest.New(nil, taptest.Config{Seed: seed, Loss: .1, Dup: dup, Reorder: .1, Corrupt: .1, Delay: 10, Jitter: 1000,
		Tap: func(ev taptest.Event) { fmt.Fprintf(&log, "%v %x\n", ev, ev.Frame) }})
	a, b := n.Port(0), n.Port(1)
	in := []tap.Frame{{B: make([]byte, 100)}}
	for i := range 300 {
		a.WriteBatch([]tap.Frame{{B: frame(1, 2, 64, i)}})
		b.WriteBatch([]tap.Frame{{B: frame(2, 1, 40, i)}})
		n.Clock().Advance(300)
		for _, p := range []*taptest.Port{a, b} {
			for {
				if k, _ := p.ReadBatch(in); k == 0 {
					break
				}
			}
		}
	}
	return log.String()
}

func TestSeedDecides(t *testing.T) {
	one := run(1, .1)
	if run(1, .1) != one {
		t.Error("two runs with the same seed differ")
	}
	if run(2, .1) == one {
		t.Error("another seed changes nothing")
	}
	for _, word := range []string{"sent", "lost", "duplicated", "second copy", "reordered", "corrupted", "delivered", "overtaken"} {
		if !strings.Contains(one, word) {
			t.Errorf("the log has no %q", word)
		}
	}
	// One kind of fault does not shift the others.
	lost := func(log string) (s []string) {
		for _, l := range strings.Split(log, "\n") {
			if strings.Contains(l, ">1 lost") || strings.Contains(l, ">0 lost") {
				s = append(s, l)
			}
		}
		return s
	}
	if a, b := lost(one), lost(run(1, 0)); len(a) == 0 || strings.Join(a, "\n") != strings.Join(b, "\n") {
		t.Errorf("with duplication %d frames are lost, without %d, or others", len(a), len(b))
	}
}

// The n-th frame of a port meets its fate no matter what other ports do meanwhile.
func TestFateBelongsToSender(t *testing.T) {
	fate := func(noise int) (lost []int) {
		n := taptest.New(nil, taptest.Config{Seed: 9, Loss: .2, Filter: nil,
			Tap: func(ev taptest.Event) {
				if ev.Kind == taptest.Lost && ev.From == 0 {
					lost = append(lost, number(tap.Frame{B: ev.Frame}))
				}
			}})
		a, b := n.Port(0), n.Port(1)
		for i := range 200 {
			for range noise {
				write(t, b, frame(2, 1, 64, i))
			}
			write(t, a, frame(1, 2, 64, i))
		}
		return lost
	}
	if a, b := fate(0), fate(3); len(a) == 0 || fmt.Sprint(a) != fmt.Sprint(b) {
		t.Errorf("%v\n%v", a, b)
	}
}

func TestSetFaults(t *testing.T) {
	n := taptest.New(nil, taptest.Config{})
	a, b := n.Port(0), n.Port(1)
	write(t, a, frame(1, 2, 60, 0))
	n.SetFaults(1, 0, 0, 0)
	write(t, a, frame(1, 2, 60, 1))
	n.SetFaults(0, 1, 0, 0)
	write(t, a, frame(1, 2, 60, 2))
	if fs := read(t, b); len(fs) != 3 || number(fs[0]) != 0 || number(fs[1]) != 2 || number(fs[2]) != 2 {
		t.Errorf("%d frames", len(fs))
	}
}

func TestFilter(t *testing.T) {
	n := taptest.New(nil, taptest.Config{Filter: func(from int, b []byte) taptest.Verdict {
		if from == 0 && number(tap.Frame{B: b}) == 1 {
			return taptest.Drop
		}
		return taptest.Pass
	}})
	a, b := n.Port(0), n.Port(1)
	for i := range 3 {
		write(t, a, frame(1, 2, 60, i))
		write(t, b, frame(2, 1, 60, i))
	}
	if fs := read(t, b); len(fs) != 2 || number(fs[1]) != 2 {
		t.Errorf("%d frames", len(fs))
	}
	if len(read(t, a)) != 3 || n.Stats().Filtered != 1 || n.Stats().Ports[0].Filtered != 1 {
		t.Errorf("%+v", n.Stats())
	}
}

func TestHubLearns(t *testing.T) {
	n := taptest.New(nil, taptest.Config{})
	var ps []*taptest.Port
	for i := range 3 {
		ps = append(ps, n.Port(i))
	}
	expect := func(what string, want ...int) {
		t.Helper()
		for i, p := range ps {
			if got := len(read(t, p)); got != want[i] {
				t.Errorf("%s: port %d got %d frames, want %d", what, i, got, want[i])
			}
		}
	}
	write(t, ps[0], frame(1, 2, 60, 0))
	expect("unknown address", 0, 1, 1)
	write(t, ps[1], frame(2, 1, 60, 0))
	expect("learned address", 1, 0, 0)
	write(t, ps[0], frame(1, 2, 60, 0))
	expect("both learned", 0, 1, 0)
	write(t, ps[0], frame(1, 1, 60, 0))
	expect("to oneself", 0, 0, 0)
	bc := frame(1, 2, 60, 0)
	copy(bc, "\xff\xff\xff\xff\xff\xff")
	write(t, ps[0], bc)
	expect("broadcast", 0, 1, 1)
	write(t, ps[2], frame(2, 1, 60, 0)) // address 2 has moved
	write(t, ps[0], frame(1, 2, 60, 0))
	expect("moved", 1, 0, 1)
	ps[2].Remove()
	write(t, ps[0], frame(1, 2, 60, 0))
	ps = ps[:2]
	expect("its port is gone", 0, 1)
}

func TestQueueLen(t *testing.T) {
	n := taptest.New(nil, taptest.Config{QueueLen: 3})
	a, b := n.Port(0), n.Port(1)
	for i := range 5 {
		write(t, a, frame(1, 2, 60, i))
	}
	if fs := read(t, b); len(fs) != 3 || number(fs[2]) != 2 {
		t.Errorf("%d frames", len(fs))
	}
	if s := n.Stats(); s.Overflowed != 2 {
		t.Errorf("%+v", s)
	}
}

func TestRefusalsAndDrops(t *testing.T) {
	n := taptest.New(nil, taptest.Config{MTU: 100})
	a, b := n.Port(0), n.Port(1)
	good := frame(1, 2, 60, 0)
	for _, c := range []struct {
		f    tap.Frame
		want error
	}{{tap.Frame{B: good[:13]}, tap.ErrFrameLen}, {tap.Frame{B: make([]byte, tap.MaxFrame+1)}, tap.ErrFrameLen}, {tap.Frame{B: good, GSO: 9}, tap.ErrSuperFrame}} {
		if k, err := a.WriteBatch([]tap.Frame{{B: good}, c.f}); k != 1 || !errors.Is(err, c.want) {
			t.Errorf("%d, %v", k, err)
		}
	}
	read(t, b)
	write(t, a, frame(1, 2, 114, 0), frame(1, 2, 115, 0))
	// Too long for the link, and then too long for the reader.
	if k, err := b.ReadBatch([]tap.Frame{{B: make([]byte, 113)}}); k != 0 || err != nil {
		t.Errorf("%d, %v", k, err)
	}
	if s := n.Stats(); s.TooLong != 1 || s.Truncated != 1 || b.Stats().RxTruncated != 1 {
		t.Errorf("%+v", s)
	}
	a.SetFull(true)
	if k, err := a.WriteBatch([]tap.Frame{{B: good}}); k != 0 || err != nil || a.Stats().TxFull != 1 {
		t.Errorf("full: %d, %v", k, err)
	}
	a.SetFull(false)
	write(t, a, good)
	b.Remove()
	if b.InFlight() != 0 {
		t.Error("frames in a removed port")
	}
	if _, err := b.ReadBatch(nil); !errors.Is(err, tap.ErrGone) {
		t.Error(err)
	}
	if _, err := b.WriteBatch(nil); !errors.Is(err, tap.ErrGone) {
		t.Error(err)
	}
	write(t, a, good) // to nobody
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if _, ok := n.NextDelivery(); ok {
		t.Error("on its way to nobody")
	}
}

func TestSuperFramesPass(t *testing.T) {
	n := taptest.New(nil, taptest.Config{MTU: 1500, Offloads: tap.VnetHdr | tap.USO4 | tap.USO6})
	if k, err := n.Port(0).WriteBatch([]tap.Frame{{B: frame(1, 2, 30000, 4), GSO: 1000}}); k != 1 || err != nil {
		t.Fatal(k, err)
	}
	n.Port(1)
	n.Port(0).WriteBatch([]tap.Frame{{B: frame(1, 2, 30000, 5), GSO: 1000}})
	if fs := read(t, n.Port(1)); len(fs) != 1 || fs[0].GSO != 1000 || len(fs[0].B) != 30000 || number(fs[0]) != 5 {
		t.Errorf("%d frames", len(fs))
	}
}

func TestOnArrival(t *testing.T) {
	n := taptest.New(nil, taptest.Config{})
	a, b := n.Port(0), n.Port(1)
	calls := 0
	b.OnArrival(func() { calls += b.Pending() }) // calling back is allowed
	write(t, a, frame(1, 2, 60, 0))
	if calls != 1 {
		t.Errorf("%d", calls)
	}
	b.OnArrival(nil)
	write(t, a, frame(1, 2, 60, 0))
	if calls != 1 {
		t.Errorf("%d", calls)
	}
}

func TestConcurrentUse(t *testing.T) {
	n := taptest.New(nil, taptest.Config{Seed: 1, Loss: .1, Dup: .1, Reorder: .1, Jitter: 100})
	var wg sync.WaitGroup
	for i := range 3 {
		p := n.Port(i)
		wg.Go(func() {
			for k := range 500 {
				p.WriteBatch([]tap.Frame{{B: frame(byte(i), byte((i+1)%3), 60, k)}})
				n.Clock().Advance(10)
				n.NextDelivery()
			}
		})
		wg.Go(func() {
			in := []tap.Frame{{B: make([]byte, 100)}}
			for range 500 {
				p.ReadBatch(in)
				p.Pending()
				n.Stats()
			}
		})
	}
	wg.Wait()
	n.Clock().Advance(time.Second)
	for i := range 3 {
		read(t, n.Port(i))
	}
	s := n.Stats()
	if s.Sent != 1500 || s.Delivered == 0 {
		t.Errorf("%+v", s)
	}
}

func TestBadConfigPanics(t *testing.T) {
	for _, cfg := range []taptest.Config{{Loss: 1.1}, {Dup: -1}, {Reorder: math.NaN()}, {Delay: -1}, {QueueLen: -1}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%+v is accepted", cfg)
				}
			}()
			taptest.New(nil, cfg)
		}()
	}
}

// Long tests do not churn: once the pool is warm, nothing is allocated.
func TestNoAllocations(t *testing.T) {
	n := taptest.New(nil, taptest.Config{Dup: .1, Reorder: .1, Corrupt: .1, Loss: .1})
	a, b := n.Port(0), n.Port(1)
	out, in := make([]tap.Frame, 8), make([]tap.Frame, 8)
	for i := range out {
		out[i].B, in[i].B = frame(1, 2, 1000, i), make([]byte, 2000)
	}
	step := func() {
		if _, err := a.WriteBatch(out); err != nil {
			panic(err)
		}
		n.Clock().Advance(time.Millisecond)
		for {
			if k, _ := b.ReadBatch(in); k == 0 {
				return
			}
		}
	}
	for range 100 {
		step()
	}
	if k := testing.AllocsPerRun(500, step); k != 0 {
		t.Errorf("%v allocations for a batch", k)
	}
}

func BenchmarkLink(b *testing.B) {
	n := taptest.New(nil, taptest.Config{Loss: .01, Reorder: .01})
	p, q := n.Port(0), n.Port(1)
	out, in := []tap.Frame{{B: frame(1, 2, 4096, 0)}}, []tap.Frame{{B: make([]byte, 9100)}}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := p.WriteBatch(out); err != nil {
			b.Fatal(err)
		}
		n.Clock().Advance(time.Microsecond)
		if _, err := q.ReadBatch(in); err != nil {
			b.Fatal(err)
		}
	}
}
