// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"net/netip"
	"slices"
	"time"

	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/wire"
)

// What is known of destinations: whether super-frames get there. Towards one of which nothing
// is known packets leave in single frames, and it is asked (probe.go). One that answers what came
// in a super-frame gets such from then on. One that answers nothing at all gets them from those who
// notice that they are lost, and have retries left: reliable queue pairs. One that seems to lose
// them, as it answers what came alone and nothing else, or as a queue pair has lost
// packets again and again, gets single frames for a while, longer each time, and is asked
// before there is another super-frame. Nobody can be asked for a group.

const (
	maxDests = 1024 // that are remembered; of more, any is forgotten
	// singleMin and singleMax are how long a destination that loses super-frames, or does not
	// answer, is left alone.
	singleMin = int64(time.Second)
	singleMax = int64(10 * time.Minute)
	// sureFor is how long an answer is good for those who would not notice a loss.
	sureFor = int64(time.Second)
)

// carriage is what is known of a destination.
type carriage uint8

const (
	carryUnknown carriage = iota
	carryAll              // super-frames get there
	carryMute             // it does not answer
	carryNone             // they do not get there
)

// destKey names a destination: one that has another MAC has another way.
type destKey struct {
	mac [6]byte
	dst netip.Addr
}

func keyOf(path *wire.Path) destKey { return destKey{path.DstMAC, path.Dst} }

type dest struct {
	key    destKey
	known  carriage
	asking bool
	until  int64 // when it is to be asked again
	span   int64 // how long that was put off last
	well   int64 // since when it gets super-frames
}

// dests is a shard's table of destinations. It belongs to the holder of the baton.
type dests struct {
	m      map[destKey]*dest
	last   *dest
	wants  []wire.Path // are to be asked
	asking int         // how many are
}

func (t *dests) find(path *wire.Path) *dest {
	if d := t.last; d != nil && d.key.mac == path.DstMAC && d.key.dst == path.Dst {
		return d
	}
	d := t.m[keyOf(path)]
	if d != nil {
		t.last = d
	}
	return d
}

// of is find, and remembers one that is not known.
func (t *dests) of(path *wire.Path) *dest {
	d := t.find(path)
	if d != nil {
		return d
	}
	if t.m == nil {
		t.m = make(map[destKey]*dest)
	}
	for k, o := range t.m {
		if len(t.m) < maxDests {
			break
		}
		if !o.asking {
			delete(t.m, k)
		}
	}
	d = &dest{key: keyOf(path)}
	t.m[d.key] = d
	t.last = d
	return d
}

// gathers says whether packets on a path may leave together. waiting: one on the same path waits
// to be written, which this one could have joined.
func (e *egress) gathers(path *wire.Path, waiting bool) bool {
	e.trial = false
	if e.filling {
		return true
	}
	if path.DstMAC[0]&1 != 0 {
		return false
	}
	d := e.dests.find(path)
	if d == nil {
		if waiting {
			e.ask(path)
		}
		return false
	}
	if d.known != carryAll && e.s.now >= d.until {
		e.ask(path)
	}
	switch d.known {
	case carryAll:
		return !e.shy
	case carryMute:
		e.trial = true
		return e.bold && !e.shy
	}
	return false
}

// ask has a destination asked, if that is not being done.
func (e *egress) ask(path *wire.Path) {
	if path.DstMAC[0]&1 != 0 || path.DstMAC == e.s.d.mac || !e.super.Has(familyOf(path.HdrLen())) || len(e.dests.wants) == maxProbes {
		return
	}
	if d := e.dests.of(path); !d.asking {
		d.asking = true
		e.dests.asking++
		e.dests.wants = append(e.dests.wants, *path)
	}
}

// confirm has the destination of the open run asked anew, if its answer is old and who sends
// would not notice that super-frames are lost.
func (e *egress) confirm() {
	if d := e.dests.last; !e.bold && !e.filling && d != nil && d.known == carryAll && e.s.now >= d.until {
		e.ask(e.path)
	}
}

// learn notes what has become of a question; carryUnknown: it could not be asked. asked: by this
// shard.
func (e *egress) learn(k destKey, what carriage, asked bool) {
	d := e.dests.m[k]
	if d == nil {
		return
	}
	if d.asking {
		d.asking = false
		e.dests.asking--
	}
	e.open = false
	now := e.s.now
	switch {
	case what == carryUnknown:
		d.until = now + singleMin
	case what == carryMute && d.known == carryAll:
		d.until = now + sureFor // that it is silent says nothing about super-frames
	case what == carryAll:
		if d.known != carryAll {
			d.known, d.well = carryAll, now
		}
		d.until = now + sureFor
	default:
		if what == carryNone && d.known != carryNone && asked {
			e.s.cnt.SingleFallbacks++
		}
		e.putOff(d, what)
	}
}

// putOff has a destination not asked for a while. One that was well for as long as it was
// left alone before begins anew.
func (e *egress) putOff(d *dest, what carriage) {
	now := e.s.now
	if d.known == carryAll && now-d.well > d.span {
		d.span = 0
	}
	d.span = min(max(2*d.span, singleMin), singleMax)
	d.known, d.until = what, now+d.span
}

// Suspect is told that packets on a path are lost again and again. It may be something else
// than super-frames, and may pass.
func (e *egress) Suspect(path *wire.Path) {
	d := e.dests.find(path)
	if d == nil || d.known != carryAll && d.known != carryMute || !e.super.Has(familyOf(path.HdrLen())) {
		return
	}
	e.open = false
	e.putOff(d, carryNone)
	e.s.cnt.SingleFallbacks++
}

// singles adds the addresses of those that are given single frames, as super-frames are lost.
func (e *egress) singles(to []netip.Addr) []netip.Addr {
	for k, d := range e.dests.m {
		if d.known == carryNone && !slices.Contains(to, k.dst) {
			to = append(to, k.dst)
		}
	}
	return to
}

// kinds of super-frames.
const superKinds = tap.USO4 | tap.USO6
