// SPDX-License-Identifier: Apache-2.0

package qp

import "testing"

// held is a CQ whose events and timers a test sees.
type held struct {
	*CQ
	t      *testing.T
	now    int64
	events int
	timers []int64
}

func newHeld(t *testing.T, entries int) *held {
	h := &held{t: t, now: 1000}
	var err error
	if h.CQ, err = NewCQ(entries, func(bool) { h.events++ }, func() { t.Error("overflow") }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Close() })
	return h
}

func (h *held) later(at int64) { h.timers = append(h.timers, at) }

func (h *held) comp(st WCStatus, solicited bool) {
	h.push(&CQE{Status: st, Timestamp: uint64(h.now)}, solicited)
}

func (h *held) want(what string, events, timers int) {
	h.t.Helper()
	if h.events != events || len(h.timers) != timers {
		h.t.Fatalf("%s: %d events, %d timers, want %d and %d", what, h.events, len(h.timers), events, timers)
	}
}

func TestModerate(t *testing.T) {
	h := newHeld(t, 64)
	h.Moderate(3, 500, h.later)
	h.comp(WCSuccess, false)
	h.want("not armed", 0, 0)
	h.Arm(false)
	h.want("armed with one waiting", 0, 0)
	h.comp(WCSuccess, false)
	h.want("first", 0, 1)
	if h.timers[0] != 1500 || h.Due() != 1500 {
		t.Fatal(h.timers, h.Due())
	}
	h.now = 1100
	h.comp(WCSuccess, false)
	h.want("second", 0, 1)
	h.comp(WCSuccess, false)
	h.want("third", 1, 1)
	if h.Due() != Never {
		t.Fatal(h.Due())
	}
	h.comp(WCSuccess, false)
	h.want("not armed any more", 1, 1)

	// The time runs out first.
	h.Arm(false)
	h.comp(WCSuccess, false)
	h.want("first again", 1, 2)
	if h.timers[1] != 1600 {
		t.Fatal(h.timers)
	}
	h.Expire()
	h.want("in time", 2, 2)
	h.Expire()
	h.want("once", 2, 2)

	// Solicited events only: others do not count.
	h.Arm(true)
	h.comp(WCSuccess, false)
	h.want("not solicited", 2, 2)
	h.comp(WCSuccess, true)
	h.comp(WCWRFlushErr, false)
	h.want("two solicited ones", 2, 3)
	h.comp(WCSuccess, true)
	h.want("three", 3, 3)

	// Any number.
	h.Moderate(0, 500, h.later)
	h.Arm(false)
	for range 20 {
		h.comp(WCSuccess, false)
	}
	h.want("twenty", 3, 4)
	if err := h.Resize(128); err != nil {
		t.Fatal(err)
	}
	h.want("resized", 3, 4)

	// What is held back when moderation ends is not lost.
	h.Moderate(0, 0, nil)
	h.want("ended", 4, 4)
	h.Arm(false)
	h.comp(WCSuccess, false)
	h.want("at once", 5, 4)
	h.Moderate(1, 500, h.later)
	h.Arm(false)
	h.comp(WCSuccess, false)
	h.want("a count of one", 6, 4)

	// A CQ that is closed gives no event.
	h.Moderate(9, 500, h.later)
	h.Arm(false)
	h.comp(WCSuccess, false)
	h.want("held", 6, 5)
	_ = h.Close()
	h.Expire()
	h.want("closed", 6, 5)
}

// TestIgnoreOverrun: what finds no room is dropped, what comes later is not.
func TestIgnoreOverrun(t *testing.T) {
	h := newHeld(t, 2)
	h.IgnoreOverrun()
	for range 5 {
		h.comp(WCSuccess, false)
	}
	var wcs [8]WC
	if n := h.Poll(wcs[:]); n != 2 {
		t.Fatalf("%d completions", n)
	}
	h.comp(WCSuccess, false)
	if n := h.Poll(wcs[:]); n != 1 {
		t.Fatalf("%d completions after an overrun", n)
	}
}
