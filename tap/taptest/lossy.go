// SPDX-License-Identifier: Apache-2.0

package taptest

import (
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/tapverbs/tapverbs/tap"
)

// Lossy is a tap.Device, such as a real TAP, with the faults of a Config on the
// frames that are written to it. It lives in real time: a frame that is held back
// is written by a timer. Delay, Jitter, QueueLen, Filter and Tap do not apply.
type Lossy struct {
	tap.Device
	mu     sync.Mutex // the device's writer, and what follows
	cfg    Config
	rng    *rand.Rand
	stats  Counts
	closed bool
}

var _ tap.Device = (*Lossy)(nil)

// NewLossy puts faults in front of dev, which Close closes.
func NewLossy(dev tap.Device, cfg Config) *Lossy {
	if cfg.ReorderDelay == 0 {
		cfg.ReorderDelay = DefaultReorderDelay
	}
	return &Lossy{Device: dev, cfg: cfg, rng: rand.New(rand.NewPCG(uint64(cfg.Seed), 0x6c6f737379))}
}

// SetFaults replaces the probabilities from now on; see Net.SetFaults.
func (l *Lossy) SetFaults(loss, dup, reorder, corrupt float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cfg.Loss, l.cfg.Dup, l.cfg.Reorder, l.cfg.Corrupt = loss, dup, reorder, corrupt
}

// Counts says what happened to the frames written so far.
func (l *Lossy) Counts() Counts {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stats
}

// WriteBatch writes the frames, each to its fate. See tap.Device. Frames that
// vanish or are held back are taken; second copies and those held back are lost
// when the device is full at that moment.
func (l *Lossy) WriteBatch(fs []tap.Frame) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, f := range fs {
		taken, err := l.write(f)
		if err != nil || !taken {
			return i, err
		}
	}
	return len(fs), nil
}

// write gives one frame its fate; false: the device is full.
func (l *Lossy) write(f tap.Frame) (bool, error) {
	if l.rng.Float64() < l.cfg.Loss {
		l.stats.Sent++
		l.stats.Lost++
		return true, nil
	}
	out := f
	spoil := l.rng.Float64() < l.cfg.Corrupt && len(f.B) > tap.EthHeaderLen
	late := l.rng.Float64() < l.cfg.Reorder
	if spoil || late {
		out.B = append([]byte(nil), f.B...)
	}
	if spoil {
		flip(out.B[tap.EthHeaderLen:], l.rng.Uint64())
	}
	if late {
		l.stats.Reordered++
		time.AfterFunc(l.cfg.ReorderDelay, func() { l.later(out) })
	} else if n, err := l.Device.WriteBatch([]tap.Frame{out}); n == 0 || err != nil {
		return false, err
	}
	l.stats.Sent++
	if spoil {
		l.stats.Corrupted++
	}
	if l.rng.Float64() < l.cfg.Dup {
		if n, err := l.Device.WriteBatch([]tap.Frame{f}); n == 1 && err == nil {
			l.stats.Duplicated++
		}
	}
	return true, nil
}

// later writes a frame that was held back.
func (l *Lossy) later(f tap.Frame) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	if n, err := l.Device.WriteBatch([]tap.Frame{f}); n == 0 || err != nil {
		l.stats.Overflowed++
	}
}

// OnArrival is passed on to a device that has it, as a Port.
func (l *Lossy) OnArrival(fn func()) {
	if d, ok := l.Device.(interface{ OnArrival(func()) }); ok {
		d.OnArrival(fn)
	}
}

// Stats are the device's own.
func (l *Lossy) Stats() tap.Stats {
	if r, ok := l.Device.(tap.StatsReader); ok {
		return r.Stats()
	}
	return tap.Stats{}
}

// Close closes the device; frames held back are lost.
func (l *Lossy) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return errors.New("taptest: Lossy closed twice")
	}
	l.closed = true
	return l.Device.Close()
}
