// SPDX-License-Identifier: Apache-2.0

package taptest

import "fmt"

// Kind is what happened to a frame.
type Kind uint8

const (
	// Sent: WriteBatch took it. Counted at the sender, as all up to Marked are.
	Sent Kind = iota
	// Filtered: the Filter dropped it.
	Filtered
	// TooLong: it was longer than the MTU and dropped.
	TooLong
	// Lost: it vanished by the Loss draw.
	Lost
	// Overflowed: the destination's queue was full and it was dropped.
	Overflowed
	// Duplicated: a second copy was sent after it.
	Duplicated
	// Reordered: it was held back for ReorderDelay.
	Reordered
	// Corrupted: bits of it were flipped.
	Corrupted
	// Marked: it met congestion and says so, see Config.MarkAt.
	Marked
	// Delivered: ReadBatch returned it. Counted at the receiver, as all below are.
	Delivered
	// Overtaken: it was delivered after a frame that was sent later. It is
	// counted besides Delivered, and is a flag of that event, not one of its own.
	Overtaken
	// Truncated: the reader's buffer was too short and it was dropped.
	Truncated
	kinds
)

// String is the name in lower case.
func (k Kind) String() string {
	names := [kinds]string{"sent", "filtered", "too long", "lost", "overflowed", "duplicated",
		"reordered", "corrupted", "marked", "delivered", "overtaken", "truncated"}
	if k >= kinds {
		return fmt.Sprintf("kind %d", uint8(k))
	}
	return names[k]
}

// Event is what Config.Tap sees. One frame may cause several: Sent, Reordered,
// Delivered.
type Event struct {
	Time  int64 // of the Clock, in nanoseconds
	Kind  Kind
	From  int    // sending port
	To    int    // receiving port; -1 where none is chosen yet (Sent, Filtered, TooLong)
	Frame []byte // valid during the call only
	GSO   uint16 // segment size of a super-frame
	// Second marks the second copy of a duplicated frame.
	Second bool
	// Overtaken marks a delivery after a frame that was sent later.
	Overtaken bool
}

// String is one line for a test's log.
func (e Event) String() string {
	s := fmt.Sprintf("%d ns: %d>%d %s: type %#04x, %d bytes", e.Time, e.From, e.To, e.Kind, etherType(e.Frame), len(e.Frame))
	if e.Second {
		s += ", second copy"
	}
	if e.Overtaken {
		s += ", overtaken"
	}
	return s
}

// Counts are numbers of frames (or of copies of frames: a hub and duplication make
// several of one), by what happened to them; see the Kind of the same name.
type Counts struct {
	Sent, Filtered, TooLong, Lost, Overflowed uint64
	Duplicated, Reordered, Corrupted, Marked  uint64
	Delivered, Overtaken, Truncated           uint64
}

// Stats are the counts of a Net.
type Stats struct {
	Counts          // of all ports together
	Ports  []Counts // by port index
}

// Stats returns a snapshot of what the link did so far.
func (n *Net) Stats() Stats {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := Stats{Counts: n.stats, Ports: make([]Counts, len(n.ports))}
	for i, p := range n.ports {
		if p != nil {
			s.Ports[i] = p.stats
		}
	}
	return s
}

// count counts for a port and for the Net.
func (n *Net) count(c *Counts, k Kind) {
	*c.field(k)++
	*n.stats.field(k)++
}

func (c *Counts) field(k Kind) *uint64 {
	switch k {
	case Sent:
		return &c.Sent
	case Filtered:
		return &c.Filtered
	case TooLong:
		return &c.TooLong
	case Lost:
		return &c.Lost
	case Overflowed:
		return &c.Overflowed
	case Duplicated:
		return &c.Duplicated
	case Reordered:
		return &c.Reordered
	case Corrupted:
		return &c.Corrupted
	case Marked:
		return &c.Marked
	case Delivered:
		return &c.Delivered
	case Overtaken:
		return &c.Overtaken
	case Truncated:
		return &c.Truncated
	}
	panic("taptest: no such kind")
}

func (n *Net) event(ev Event) {
	if n.cfg.Tap != nil {
		n.cfg.Tap(ev)
	}
}
