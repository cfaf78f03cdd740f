// SPDX-License-Identifier: Apache-2.0

package qp

// DCQCN, the reaction point's part: how a queue pair of a reliable service slows down when
// it is told that its packets meet congestion (CNP), and gets faster again. From: Zhu et al.,
// Congestion Control for Large-Scale RDMA Deployments, SIGCOMM 2015, section 3 and figure 14,
// with its constants. It is about all that the queue pair sends: requests and READ
// responses. Unreliable services fall silent instead, see congest.go.
//
// A queue pair that has had no notification has no rate, and pays nothing for all this.
// There are no timers: what they would have done is made up for when the next packet is to
// be sent, or the next notification comes.

const (
	// lineRate is where a rate begins, and where it ends again, in kbit/s: more than a TAP
	// carries. minRate is where it does not go below, whatever comes: 3000 packets of 4 KiB a
	// second, as nobody proves who he is with a notification.
	lineRate = 40_000_000
	minRate  = 100_000

	cutEvery      = 50_000     // ns between cuts at least: that between notifications (N)
	alphaEvery    = 55_000     // ns without notification after which alpha decays (K)
	increaseEvery = 55_000     // ns between increases (T)
	increaseBytes = 10_000_000 // bytes between increases (B)
	alphaShift    = 8          // alpha decays by 1/256 (g)
	fastSteps     = 5          // increases towards the old rate, before that is raised (F)
	additive      = 40_000     // by which it is raised, in kbit/s (R_AI)
	hyper         = 400_000    // and later (R_HAI)

	alphaOne = 1 << 20 // alpha is a fixed-point number
)

// dcqcn is a rate and what led to it.
type dcqcn struct {
	rate, target  int64 // kbit/s; rate 0: no limit
	alpha         int64 // estimate of congestion, up to alphaOne
	cutAt         int64 // when the rate was last cut
	decayAt       int64 // when alpha decays next
	increaseAt    int64 // when time raises the rate next
	bytes         int64 // sent since bytes have raised it
	steps, bsteps int   // increases since the last cut, by time and by bytes
}

// notified takes a notification.
func (d *dcqcn) notified(now int64) {
	if d.rate == 0 {
		if d.cutAt == 0 || now-d.cutAt > alphaEvery<<alphaShift {
			d.alpha = alphaOne
		}
		d.rate, d.cutAt = lineRate, 0
	} else {
		d.pass(now)
		if d.rate == 0 {
			d.rate = lineRate
		}
	}
	if d.cutAt != 0 && now-d.cutAt < cutEvery {
		return
	}
	d.target = d.rate
	d.rate = max(d.rate-d.rate*d.alpha/(2*alphaOne), minRate)
	d.alpha += (alphaOne - d.alpha) >> alphaShift
	d.cutAt, d.decayAt, d.increaseAt = now, now+alphaEvery, now+increaseEvery
	d.bytes, d.steps, d.bsteps = 0, 0, 0
}

// pass makes up for the time that has passed.
func (d *dcqcn) pass(now int64) {
	// After so many steps there is nothing left: alpha is 0.02, the rate that of the line.
	const most = 1024
	if now-d.increaseAt > most*increaseEvery {
		d.rate, d.alpha = 0, 0
		return
	}
	for ; d.decayAt <= now; d.decayAt += alphaEvery {
		d.alpha -= d.alpha >> alphaShift
	}
	for ; d.increaseAt <= now && d.rate != 0; d.increaseAt += increaseEvery {
		d.steps++
		d.increase()
	}
}

// sent notes n bytes.
func (d *dcqcn) sent(n int64) {
	if d.bytes += n; d.bytes >= increaseBytes {
		d.bytes -= increaseBytes
		d.bsteps++
		d.increase()
	}
}

// increase raises the rate: towards what it was before the last cut, and that, too, when
// either time or bytes have done so often enough; by more when both have.
func (d *dcqcn) increase() {
	switch most, least := max(d.steps, d.bsteps), min(d.steps, d.bsteps); {
	case least > fastSteps:
		d.target += hyper * int64(least-fastSteps)
	case most > fastSteps:
		d.target += additive
	}
	d.target = min(d.target, lineRate)
	if d.rate = (d.rate + d.target) / 2; d.rate >= lineRate-lineRate/64 {
		d.rate = 0 // as fast as can be
	}
}
