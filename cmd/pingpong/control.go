// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// Two pingpongs talk through SENDs on the QP of the exchange: the client asks, the
// server answers each request with one reply, both as JSON.

// controlLen bounds a control message in bytes: room for 256 queue pairs.
const controlLen = 16 << 10

// verb says what a request asks for.
type verb string

const (
	verbHello verb = "hello" // connect the data QPs
	verbBegin verb = "begin" // get memory for a measurement
	verbRound verb = "round" // get ready for messages, then play along
	verbCheck verb = "check" // verify what the round brought
	verbEnd   verb = "end"   // give the measurement's memory back
	verbBye   verb = "bye"   // tell about this process and leave
)

// peerQP is one end of a data QP.
type peerQP struct {
	QPN wire.QPN `json:"q"`
	PSN wire.PSN `json:"p"`
}

// remote names memory of the peer.
type remote struct {
	Addr uint64 `json:"a"`
	Key  mr.Key `json:"k"`
}

// at names the memory n bytes further on.
func (r remote) at(n int) uint64 { return r.Addr + uint64(n) }

// request is what the client sends; which fields mean something follows from Verb.
type request struct {
	Verb verb `json:"verb"`

	// hello
	Plan *plan    `json:"plan,omitempty"`
	QPs  []peerQP `json:"qps,omitempty"`
	// Flag is where the peer writes a word behind each WRITE to cold or evicting memory.
	Flag remote `json:"flag"`

	// begin
	Row   rowSpec  `json:"row"`
	Phase phase    `json:"phase"`
	Slots slotting `json:"slots"`

	// round: messages First to First+Count-1; pongs land at Land.
	First uint64 `json:"first"`
	Count int    `json:"count"`
	Land  remote `json:"land"`
}

// reply is what the server answers.
type reply struct {
	Err string `json:"err,omitempty"`

	// hello
	QPs     []peerQP `json:"qps,omitempty"`
	Pattern remote   `json:"pattern"`
	Flag    remote   `json:"flag"`
	// PinLimit is how many bytes this end may lock; 0 is no limit.
	PinLimit int `json:"pin_limit"`

	// begin, hello: which way memory is paged
	Paging string `json:"paging,omitempty"`
	// round
	Land remote `json:"land"`
	// check
	Bad string `json:"bad,omitempty"` // what was wrong; empty: every byte is right
	// end
	Use usage `json:"use"`
	// bye
	End *endReport `json:"end,omitempty"`
}

// usage is what a measurement cost one end.
type usage struct {
	Faults uint64 `json:"faults"` // pages that a message found absent
	Locked int64  `json:"locked"` // KiB, at its end
	moves
}

// moves is what happened to the pages of evicting and suspending memory, and what
// requests noticed of it.
type moves struct {
	Minor     uint64 `json:"faults_minor"` // pages found absent or in limbo, or overwritten whole
	Major     uint64 `json:"faults_major"` // pages that the store had to give back
	Evictions uint64 `json:"evictions"`    // pages
	RNRs      uint64 `json:"rnr_naks"`     // sent for the region's sake
	Suspends  uint64 `json:"suspends"`
}

func (m *moves) add(n moves) {
	m.Minor += n.Minor
	m.Major += n.Major
	m.Evictions += n.Evictions
	m.RNRs += n.RNRs
	m.Suspends += n.Suspends
}

func (u *usage) add(v usage) {
	u.Faults += v.Faults
	u.moves.add(v.moves)
	u.Locked = max(u.Locked, v.Locked)
}

func encodeControl(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err == nil && len(b) > controlLen {
		err = fmt.Errorf("control message of %d bytes is longer than %d", len(b), controlLen)
	}
	return b, err
}
