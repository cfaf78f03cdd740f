// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/wire"
)

// packetLoss is a device that loses packets as they are written, those of super-frames one
// by one, as a wire behind the kernel's segmentation would. A super-frame that loses
// nothing is written as it is; of others what is left goes as single frames.
type packetLoss struct {
	tap.Device
	odds atomic.Uint64 // of a packet to be lost: the bits of a float64
	mu   sync.Mutex    // what follows
	rng  *rand.Rand
	buf  []byte
	sup  wire.Super
}

// set sets the probability.
func (l *packetLoss) set(odds float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.rng == nil {
		l.rng, l.buf = rand.New(rand.NewPCG(1, 2)), make([]byte, 0, tap.MaxFrame)
	}
	l.odds.Store(math.Float64bits(odds))
}

func (l *packetLoss) WriteBatch(fs []tap.Frame) (int, error) {
	odds := math.Float64frombits(l.odds.Load())
	if odds == 0 {
		return l.Device.WriteBatch(fs)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range fs {
		if taken, err := l.write(&fs[i], odds); err != nil || !taken {
			return i, err
		}
	}
	return len(fs), nil
}

// write gives the packets of a frame their fate; false: the device is full.
func (l *packetLoss) write(f *tap.Frame, odds float64) (bool, error) {
	packets := 1
	if f.GSO > 0 {
		l.buf = append(l.buf[:0], f.B...)
		for _, p := range f.More {
			l.buf = append(l.buf, p...)
		}
		if err := l.sup.Open(l.buf, int(f.GSO)); err != nil {
			return false, err
		}
		packets = (len(l.buf) - wire.RoCE(l.buf) + int(f.GSO) - 1) / int(f.GSO)
	}
	var lost uint64 // bit i: packet i is
	for i := range packets {
		if l.rng.Float64() < odds {
			lost |= 1 << i
		}
	}
	switch {
	case lost == 0:
		n, err := l.Device.WriteBatch([]tap.Frame{*f})
		return n == 1, err
	case f.GSO == 0:
		return true, nil
	}
	for i := range packets {
		b := l.sup.Next()
		if lost&(1<<i) != 0 {
			continue
		}
		// A device that is full now loses the rest, too.
		if _, err := l.Device.WriteBatch([]tap.Frame{{B: b}}); err != nil {
			return true, err
		}
	}
	return true, nil
}

// Stats are the device's own.
func (l *packetLoss) Stats() tap.Stats {
	if r, ok := l.Device.(tap.StatsReader); ok {
		return r.Stats()
	}
	return tap.Stats{}
}
