// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// Progress is how far a QP has come, for people who look.
type Progress struct {
	// Unacked is the oldest PSN that is not acknowledged, Next the one that is sent next,
	// Expected the next one to be received.
	Unacked  wire.PSN `json:"unacked"`
	Next     wire.PSN `json:"next"`
	Expected wire.PSN `json:"expected"`
	// Window is how many packets may be unacknowledged, InFlight how many are. Both are 0
	// for services without acknowledgements.
	Window   int `json:"window"`
	InFlight int `json:"in_flight"`
	// Rate is what congestion on the way has left of it, in kbit/s; 0: nothing was said of any.
	Rate int64 `json:"rate"`
	// Waiting is the work requests of the send queue that are not over, Sent those that
	// are, modulo 2^32, Received the messages of the peer that are, modulo 2^24 (MSN, IBA
	// 9.7.7.1).
	Waiting  uint32 `json:"waiting"`
	Sent     uint32 `json:"sent"`
	Received uint32 `json:"received"`
	// Losses is how often packets were sent again because some were lost, RNRs how often
	// because the peer was not ready. RetriesLeft and RNRRetriesLeft are what is left of
	// retry_cnt and rnr_retry, of which 7 stands for any number.
	Losses         uint64 `json:"losses"`
	RNRs           uint64 `json:"rnrs"`
	RetriesLeft    uint8  `json:"retries_left"`
	RNRRetriesLeft uint8  `json:"rnr_retries_left"`
	// Faults are the absent pages that its requests and work requests met.
	Faults mr.Faults `json:"faults"`
	// Held: it sends nothing because memory is suspended, or being fetched.
	Held bool `json:"held"`
}

// Faults are the absent pages that the QP's requests and work requests met.
func (q *QP) Faults() mr.Faults { return q.faults }

// Progress tells how far the QP has come.
func (q *QP) Progress() Progress {
	r := &q.req
	p := Progress{
		Unacked: r.una, Next: r.psn, Expected: q.resp.epsn, Received: q.resp.msn, Sent: r.head,
		Waiting: q.sq.prod().Load() - r.head, Losses: q.losses, RNRs: q.rnrsHeeded,
		RetriesLeft: r.retries, RNRRetriesLeft: r.rnrRetries, Faults: q.faults, Held: r.held,
	}
	if q.tr.acked {
		p.Window, p.InFlight = int(r.window()), int(r.psn.Sub(r.una))
		if r.rate.rate != 0 {
			r.rate.pass(q.env.Now())
			p.Rate = r.rate.rate
		}
	}
	return p
}
