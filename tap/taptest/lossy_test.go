// SPDX-License-Identifier: Apache-2.0

package taptest

import (
	"bytes"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/tap"
)

// read takes all frames that a port can read.
func read(t *testing.T, p *Port) (out [][]byte) {
	t.Helper()
	for {
		f := []tap.Frame{{B: make([]byte, 100)}}
		n, err := p.ReadBatch(f)
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			return out
		}
		out = append(out, f[0].B)
	}
}

func TestLossy(t *testing.T) {
	frame := append(bytes.Repeat([]byte{2}, tap.EthHeaderLen), bytes.Repeat([]byte{7}, 40)...)
	const frames = 1000
	for _, c := range []struct {
		name     string
		cfg      Config
		min, max int // of frames that arrive
		spoilt   bool
	}{
		{"none", Config{}, frames, frames, false},
		{"loss", Config{Loss: 0.2}, 700, 900, false},
		{"dup", Config{Dup: 0.2}, 1100, 1300, false},
		{"corrupt", Config{Corrupt: 0.2}, frames, frames, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			net := New(nil, Config{})
			l := NewLossy(net.Port(0), c.cfg)
			defer l.Close()
			to := net.Port(1)
			got, spoilt := 0, 0
			for range frames {
				if n, err := l.WriteBatch([]tap.Frame{{B: frame}}); n != 1 || err != nil {
					t.Fatal(n, err)
				}
				for _, b := range read(t, to) {
					got++
					if !bytes.Equal(b, frame) {
						spoilt++
					}
				}
			}
			if got < c.min || got > c.max || (spoilt > 0) != c.spoilt {
				t.Errorf("%d frames arrived, %d of them spoilt, want %d to %d", got, spoilt, c.min, c.max)
			}
			s := l.Counts()
			if s.Sent != frames || int(s.Sent-s.Lost+s.Duplicated) != got || int(s.Corrupted) != spoilt {
				t.Errorf("counted %+v, %d arrived, %d spoilt", s, got, spoilt)
			}
		})
	}
}

// A frame that is held back arrives after a later one, and is not changed by what
// its writer does with the buffer.
func TestLossyReorder(t *testing.T) {
	net := New(nil, Config{})
	l := NewLossy(net.Port(0), Config{Reorder: 1, ReorderDelay: time.Millisecond})
	defer l.Close()
	to := net.Port(1)
	arrived := make(chan struct{}, 2)
	to.OnArrival(func() { arrived <- struct{}{} })
	b := bytes.Repeat([]byte{2}, 60)
	b[20] = 1
	if n, err := l.WriteBatch([]tap.Frame{{B: b}}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	b[20] = 9
	l.SetFaults(0, 0, 0, 0)
	c := bytes.Repeat([]byte{2}, 60)
	if n, err := l.WriteBatch([]tap.Frame{{B: c}}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	<-arrived
	<-arrived
	got := read(t, to)
	if len(got) != 2 || got[0][20] != 2 || got[1][20] != 1 {
		t.Fatalf("%d frames: %v", len(got), got)
	}
}

// A device that is full refuses, and the frame's fate waits.
func TestLossyFull(t *testing.T) {
	net := New(nil, Config{})
	l := NewLossy(net.Port(0), Config{})
	defer l.Close()
	net.Port(1)
	net.Port(0).SetFull(true)
	f := []tap.Frame{{B: make([]byte, 60)}}
	if n, err := l.WriteBatch(f); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	net.Port(0).SetFull(false)
	if n, err := l.WriteBatch(f); n != 1 || err != nil || l.Counts().Sent != 1 {
		t.Fatal(n, err, l.Counts())
	}
}
