// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/wire"
)

// sink counts the packets that are written to it.
type sink struct {
	tap.Device
	packets, super int
	bad            error
}

func (s *sink) WriteBatch(fs []tap.Frame) (int, error) {
	for _, f := range fs {
		if f.GSO > 0 {
			s.super++
			f.B = append([]byte(nil), f.B...)
			for _, p := range f.More {
				f.B = append(f.B, p...)
			}
		} else {
			var p wire.Packet
			if err := wire.Parse(f.B, &p); err != nil {
				s.bad = err
			} else if !p.ICRCValid() {
				s.bad = wire.ErrMalformed
			}
		}
		n, err := count([]tap.Frame{f})
		if err != nil {
			s.bad = err
		}
		s.packets += n
	}
	return len(fs), nil
}

// TestPacketLoss: of super-frames some packets are lost, and the others are as they were.
func TestPacketLoss(t *testing.T) {
	fs, packets := job{Kind: kindSuper, Payload: 1024}.frames(0)
	s := &sink{}
	l := &packetLoss{Device: s}
	const rounds = 200
	sent := rounds * len(fs) * packets
	for _, odds := range []float64{0, 0.01} {
		s.packets, s.super = 0, 0
		l.set(odds)
		for range rounds {
			if n, err := l.WriteBatch(fs); n != len(fs) || err != nil {
				t.Fatalf("%d of %d frames, %v", n, len(fs), err)
			}
		}
		// The generator's seed is always the same.
		lost := sent - s.packets
		if odds == 0 && (lost != 0 || s.super != rounds*len(fs)) {
			t.Errorf("%d of %d packets were lost, and nothing should have been; %d super-frames", lost, sent, s.super)
		}
		if odds > 0 && (lost < sent/200 || lost > sent/50 || s.super == 0 || s.super == rounds*len(fs)) {
			t.Errorf("%d of %d packets were lost, about 1 %% should have been; %d super-frames of %d", lost, sent, s.super, rounds*len(fs))
		}
	}
	if s.bad != nil {
		t.Error(s.bad)
	}
}
