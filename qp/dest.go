// SPDX-License-Identifier: Apache-2.0

package qp

// What goes to one receiver is bounded beside what the shard has out: by what that receiver
// says, when there are so many who send to it that the windows of all of them would not fit
// into its queue. Who has not heard of it for a while begins with little, so that many who
// begin at once do not fill the queue before the receiver has seen them.
//
// A receiver that does not say anything, as those of others, is given the whole window as
// soon as it has acknowledged as many packets.

const (
	// A Dest begins, and begins anew after idleAfter ns without a packet out, with a part of the
	// shard's window: one in startShare.
	startShare = 12
	idleAfter  = 100_000_000
	// minTold is the least that a receiver can ask for: anybody can say he is it.
	minTold = 8
	// What was told holds for toldFor packets that are acknowledged. Before half of that is over
	// something greater that is told does not count: several may tell.
	toldFor = 2048
)

// Dest is a receiver: what the QPs of one shard may have out towards it, and have. It belongs
// to the holder of the shard's baton.
type Dest struct {
	share
	env   *Env
	limit int32 // grows by what is acknowledged, up to the shard's window
	told  int32 // what the receiver has said, while
	good  int32 // so many packets are acknowledged; 0: nothing
	// responses are READ responses that have not counted as a packet yet.
	responses int32
	idle      int64 // since when nothing is out
}

// NewDest is a receiver that nothing is known of.
func NewDest(env *Env) *Dest {
	return &Dest{env: env, limit: env.shardWindow() / startShare, share: share{line: line{dest: true}}}
}

// SetDest has the QP be one of those that send to a receiver, or to none whose queue has to
// be thought of (nil). What it has out counts from then on.
func (q *QP) SetDest(d *Dest) {
	r, old := &q.req, q.dest
	if !q.tr.acked || d == old {
		return
	}
	q.dest = d
	if old != nil {
		old.line.leave(q)
		if r.out != 0 {
			old.move(r.out, 0)
			old.admit()
		}
	}
	if d != nil && r.out != 0 {
		d.move(0, r.out)
	}
}

// window is how many packets may be out.
func (d *Dest) window() int32 {
	if d.good > 0 {
		return min(d.told, d.limit)
	}
	return d.limit
}

// move is share's, and begins anew after a pause.
func (d *Dest) move(from, to int32) {
	if d.out == 0 && d.env.Now()-d.idle > idleAfter {
		d.limit = min(d.limit, d.env.shardWindow()/startShare)
	}
	if d.share.move(from, to); d.out == 0 {
		d.idle = d.env.Now()
	}
}

// progress notes that n packets were acknowledged. read: it is responses that have come, for
// which the peer has had a packet for readBurst at most.
func (d *Dest) progress(n int32, read bool) {
	if read {
		d.responses += n
		d.good = max(d.good-d.responses/readBurst, 0)
		d.responses %= readBurst
	} else {
		d.good = max(d.good-n, 0)
	}
	d.limit = min(d.limit+n, d.env.shardWindow())
}

// Told notes that the receiver wants at most so many packets out: its queue holds no more
// from each of those who send to it. It says whether it makes a difference.
func (d *Dest) Told(n int32) bool {
	n = max(n, minTold)
	if d.good > toldFor/2 && n >= d.told {
		return false
	}
	d.told, d.good = n, toldFor
	return true
}

// admit lets those go on for whom there is room now.
func (d *Dest) admit() { d.line.admit(d.window() - d.out) }
