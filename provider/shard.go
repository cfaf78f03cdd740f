// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/wire"
)

const (
	// rxBatch is how many frames are read at most before they are handled.
	rxBatch = 64
	// rxBytes is how many bytes of frames are handled in one go, about: what is read is
	// to be in the processor's cache yet when it is handled, and acknowledgements are to
	// leave while their sender has something to do.
	rxBytes = 256 << 10
	// runBudget is how many packets a QP sends before the next one's turn, and
	// stepBudget how many all of them send before the TAP is read again.
	runBudget   = 32
	superBudget = 128 // for few QPs whose packets go together
	stepBudget  = 256
	// Rounds bound how long one holder keeps the baton.
	postRounds   = 2
	pollRounds   = 4
	manualRounds = 16

	// firstQPIndex leaves out QPN 0 and 1, which are the management QPs'.
	firstQPIndex = 2
)

// shard is one engine on one queue of the TAP: what it needs to take frames in,
// hand them to QPs and send theirs. All fields but the atomic ones belong to the
// holder of the baton. A device has one for each queue; spread.go says what is whose.
type shard struct {
	d     *Device
	id    int
	load  int    // QPs in it; guarded by d.mu
	local uint16 // mask of a QPN's bits that are an index in this shard
	baton sync.Mutex
	bells *bells
	bg    background

	dev   tap.Device
	link  link
	pub   publisher
	tally tally
	clock func() int64
	now   int64 // of this iteration
	acc   *mr.Accessor
	env   qp.Env
	stats qp.Stats
	cnt   counters

	rxMem *mr.Memory
	rx    []tap.Frame
	rxBuf [][]byte
	batch int  // how many frames the next read asks for
	full  bool // the last read filled its batch: more may wait
	// behind counts the frames read since the TAP was last found empty; notify: a
	// sender is to be told.
	behind  int
	notify  bool
	cnpPath wire.Path // of a notification between Begin and End
	inb     inbound
	pkt     wire.Packet
	super   wire.Super // that is being taken apart

	eg     egress
	table  []*QP   // by index
	gens   []uint8 // generation of the next QP of each index
	free   []uint16
	srqs   srqTable
	timers timerHeap
	nb     neighTable
	ahs    ahTable
	mc     mcastTable
	cm     connManager
	probes prober
	flows  flowTable
	// counters is how many Counters there are.
	counters int
	// in are the packets that other shards hand over, by shard; nil if there is but one.
	// nudge says which shards were given something to do.
	in    []handRing
	inMem *mr.Memory
	nudge uint32
	mail  mailbox
	// igmpOut is the frame between igmpFrame and pushIGMP.
	igmpOut []byte

	madPath wire.Path // of the MAD between sendMAD and End
	madPSN  wire.PSN
	// The QPs with residency messages, when tickResidency is due, and the words of all
	// bitmaps of what is watched.
	res     []*QP
	resDue  int64
	resBits int
	resMsg  wire.Residency // the one that has come

	touched       []*QP // handled packets in this iteration
	active, spare []*QP // have something to send
	overrun       []*CQ // overflowed in this iteration
	held          []*CQ // hold an event back
	heldDue       int64 // when the first of them is due

	readAt uint64         // cnt.TxFrames when the TAP was last looked at
	beside sync.WaitGroup // what goes on beside the engine: FLUSHes to disks, prefetches for peers
	// persisting has one for each of those that it is a thread's turn for.
	persisting chan struct{}
	looping    bool // the packets handled are our own
	closing    bool
	lost       bool        // the device has said that it is gone
	up         bool        // frames pass again after the link was down
	defended   int64       // when one of our addresses was last defended
	gone       atomic.Bool // the TAP was taken away
	down       atomic.Bool // the TAP's link is down
	// lastCall is when an application last posted or polled an empty CQ.
	lastCall atomic.Int64
	// rested: an application has said since that it will sleep.
	rested atomic.Bool
	turn   turn // of threads that poll
	pace   pace
	// look: frames came while the baton was taken; who has it reads them.
	look atomic.Bool
	// posted: work was posted since the last poll. eager is how surely a poll comes soon
	// after that, from -maxEager to maxEager.
	posted bool
	eager  atomic.Int32
	// holds: this iteration is an application's who will call again at once. owes is then
	// the QP with an acknowledgement that goes with what is posted until then.
	holds bool
	owes  *QP
	// leading: the iteration is that of the thread that waits for frames.
	leading bool
}

// maxEager bounds how much of the past counts.
const maxEager = 8

func newShard(d *Device, id int) (*shard, error) {
	s := &shard{d: d, id: id, local: 0xffff >> d.shardBits, bells: new(bells), dev: d.devs[id], clock: d.clock, batch: 1, persisting: make(chan struct{}, maxPersists)}
	s.now = s.clock()
	s.lastCall.Store(longAgo)
	s.pace.init()
	frame := (s.dev.MTU() + tap.EthHeaderLen + tap.VLANTagLen + 63) &^ 63
	var err error
	room := frame
	if s.dev.Offloads()&(tap.USO4|tap.USO6) != 0 {
		room = (tap.MaxFrame + 4095) &^ 4095 // what never comes takes no memory
	}
	if s.rxMem, err = mr.Alloc(rxBatch * room); err != nil {
		return nil, fmt.Errorf("receive buffers: %w", err)
	}
	b := s.rxMem.Bytes()
	s.rx, s.rxBuf = make([]tap.Frame, rxBatch), make([][]byte, rxBatch)
	for i := range s.rxBuf {
		s.rxBuf[i] = b[i*room : (i+1)*room : (i+1)*room]
	}
	if err = s.eg.init(s, frame); err != nil {
		return nil, errors.Join(err, s.rxMem.Close())
	}
	var gen [1]byte
	if _, err = rand.Read(gen[:]); err == nil {
		err = s.openRings(frame)
	}
	if err != nil {
		return nil, errors.Join(err, s.eg.close(), s.rxMem.Close())
	}
	s.table = make([]*QP, firstQPIndex, 64)
	s.gens = append(s.gens, gen[0]) // index 0 has no QP: it keeps the first generation of all others
	s.gens = append(s.gens, gen[0])
	s.acc = d.space.NewAccessor()
	s.env = qp.Env{Persist: s.persist, Keys: d.keys, Mem: s.acc, Out: &s.eg, Frames: &s.eg, Now: func() int64 { return s.now }, Event: s.qpEvent, Stats: &s.stats, AH: s.ahPath, SRQ: s.srqs.find, Advise: s.advise, Ready: s.qpReady}
	s.env.Window = deviceWindow / int32(len(d.devs))
	s.heldDue, s.resDue = qp.Never, qp.Never
	s.inb.init(s.now)
	s.nb.init()
	s.mc.init(d)
	s.cm.init(s)
	s.probes.init(s)
	s.bg.s, s.link.s, s.pub.s = s, s, s
	return s, nil
}

// close gives the shard's memory back. QPs and regions are gone by then.
func (s *shard) close() error {
	s.lock()
	defer s.baton.Unlock()
	s.closing = true
	if !s.gone.Load() {
		s.eg.flush() // the last leaves
	}
	s.acc.Close()
	return errors.Join(s.eg.close(), s.rxMem.Close(), s.closeRings())
}

// lock takes the baton, waiting for it: for control verbs and the background. What was
// left to an application's next call goes first.
func (s *shard) lock() {
	s.baton.Lock()
	if s.owes != nil || !s.bells.quiet() {
		s.progress(false, postRounds)
	}
}

// release gives the baton back. Who posted meanwhile found it taken and went
// away, so the bells are looked at once more afterwards: either that goroutine's
// TryLock came after this Unlock, or this look comes after its bell. The same with
// look, which the background sets. Then it is the turn of other shards that were given
// something to do.
func (s *shard) release() {
	if others := s.giveBack(); others != 0 {
		s.d.rouse(others)
	}
}

// giveBack is release without the other shards, which it names.
func (s *shard) giveBack() (others uint32) {
	for {
		others |= s.nudge
		s.nudge = 0
		at := s.due()
		if s.d.untold.some.Load() {
			s.d.untold.tell()
		}
		if s.tally.asked.Load() {
			s.tallyUp()
		}
		s.baton.Unlock()
		s.bg.kickFor(at) // only now: it may push this thread aside, and is to find the baton free
		look := s.look.Load()
		if s.bells.quiet() && !look && !s.handed() || !s.baton.TryLock() {
			return others
		}
		if s.closing {
			s.baton.Unlock()
			return others
		}
		s.progress(look, postRounds)
		if look && s.full {
			// So many that this thread is not to go on with them.
			s.look.Store(false)
			s.bg.kickFor(s.now)
		}
	}
}

// post is called after n work requests were queued for a QP: it sends them at once if
// nobody else is at it, and they are not left to the next poll.
func (s *shard) post(index uint16, n int) {
	s.bells.ring(index)
	if !s.bells.held(n) {
		s.kick()
	}
}

// kick is called when a bell was rung.
func (s *shard) kick() {
	if s.baton.TryLock() {
		if !s.closing {
			if s.owes != nil {
				s.called()
			}
			s.progress(false, postRounds)
			s.lastCall.Store(s.clock())
			s.posted = true
		}
		s.release()
	}
}

// progress runs iterations until nothing is left to do or rounds are over.
func (s *shard) progress(read bool, rounds int) (did bool) {
	if s.closing {
		return false
	}
	s.settle()
	for range rounds {
		if !s.step(read) {
			break
		}
		did = true
		if !s.pending() {
			break
		}
	}
	return did
}

// readEvery is after how many frames sent the TAP is looked at, whoever sends. One that
// posts and is never short of completions, as with unreliable services, would else
// read nothing: neither what its peer sends meanwhile nor that it is too fast.
const readEvery = 64

// step is one iteration of the engine. read says whether to look at the TAP.
func (s *shard) step(read bool) (did bool) {
	s.now = s.clock()
	if read || s.full || s.cnt.TxFrames-s.readAt >= readEvery {
		did = s.receive()
	}
	if s.eg.loopLen() > 0 {
		did = s.receiveLoop() || did
	}
	if s.handed() {
		s.receiveHanded()
		did = true
	}
	for _, q := range s.touched {
		q.touched = false
		s.count(q)
		q.q.EndBatch()
		if s.holds && s.owes == nil && len(s.touched) == 1 && !q.active && q.q.HoldAck() {
			s.owes = q
			s.schedule(q)
			continue
		}
		s.settle()
		s.activate(q)
	}
	s.touched = s.touched[:0]
	if s.env.ReadResponses != s.inb.reads {
		s.countReads()
	}
	if s.inb.less {
		s.tellAll()
	}
	s.doneHanded()
	did = s.expire() || did
	if !s.bells.quiet() {
		s.bells.sweep(s.rung)
		did = true
	}
	did = s.runActive() || did
	if s.mail.full.Load() {
		s.mail.read()
		did = true
	}
	if len(s.overrun) > 0 {
		s.failOverrun()
	}
	if len(s.eg.dests.wants) > 0 {
		s.askDests()
		did = true
	}
	did = s.eg.flush() || did
	if s.lost {
		s.lose()
		did = true
	}
	if s.up {
		s.linkUp()
	}
	if s.d.untold.some.Load() {
		s.d.untold.tell()
	}
	if did {
		s.d.sh.pub.rouse()
	}
	return did
}

// pending says whether another iteration would find something to do at once.
func (s *shard) pending() bool { return s.full || s.busy() }

// busy is pending without frames that may wait.
func (s *shard) busy() bool {
	return s.lost || s.handed() || len(s.overrun) > 0 || s.eg.loopLen() > 0 || len(s.active) > 0 && !s.eg.blocked || !s.bells.quiet()
}

// next is when the engine has something to do: now, or when a timer runs out.
func (s *shard) next() int64 {
	if s.closing {
		return qp.Never
	}
	if s.full {
		return s.now
	}
	return s.due()
}

// due is when there is something to do but to read frames: of those that come the
// background is told by the TAP, and tells who has the baton by look.
func (s *shard) due() int64 {
	if s.closing {
		return qp.Never
	}
	if s.busy() {
		return s.now
	}
	if s.gone.Load() {
		return s.heldDue // neighbours and groups are no more
	}
	return min(s.timers.next(), s.nb.next(), s.mc.due, s.heldDue, s.resDue, s.cm.due, s.probes.due)
}

// receive reads and handles one batch of frames. Batches start small: asking for
// more frames than there are costs a system call that finds nothing, which
// matters when a single one is waited for.
func (s *shard) receive() bool {
	look := s.look.Load()
	if look {
		s.look.Store(false) // of a device that is gone, too: release goes on until it is
	}
	s.readAt = s.cnt.TxFrames
	if s.gone.Load() {
		return false
	}
	for i := range s.batch {
		s.rx[i].B = s.rxBuf[i]
	}
	n, err := s.dev.ReadBatch(s.rx[:s.batch])
	frames, bytes := 0, 0
	if n > 0 {
		s.acc.Linger()
	}
	for i := range n {
		f := &s.rx[i]
		bytes += len(f.B)
		if f.GSO != 0 {
			frames += s.inputSuper(f.B, int(f.GSO))
		} else {
			s.input(f.B)
			frames++
		}
	}
	s.acc.Leave()
	if n == s.batch {
		if s.full {
			s.batch = min(2*s.batch, rxBatch)
		}
		if bytes > rxBytes/2 {
			s.batch = min(s.batch, max(1, n*rxBytes/bytes))
		}
		s.full = true
	} else {
		s.full = false
		if n > 0 {
			s.batch = n
		} else {
			s.batch = 1
		}
	}
	s.fellBehind(frames, s.full)
	if err != nil {
		s.full = false
		s.deviceError(err)
	}
	if look && s.full {
		s.look.Store(true) // that one may wait yet
	}
	if n > 0 {
		s.passed()
	}
	return n > 0
}

// receiveLoop handles packets to oneself, those queued when it starts.
func (s *shard) receiveLoop() bool {
	n := s.eg.loopLen()
	s.looping = true
	for range n {
		s.input(s.eg.loopFront())
		s.eg.loopPop()
	}
	s.looping = false
	return n > 0
}

// toErrorSoon has a QP moved to the error state by who has its shard's baton next.
func (q *QP) toErrorSoon() {
	q.s.tellAny(func() {
		if !q.gone {
			q.s.toError(q)
			q.s.schedule(q)
		}
	})
}

func (s *shard) toError(q *QP) {
	a := qp.Attr{State: qp.StateErr}
	if err := q.q.Modify(&a, qp.AttrState, s.d.limits()); err == nil {
		s.activate(q)
	}
}

// failOverrun moves the QPs of CQs that overflowed to the error state: they can
// not report completions any more (IBA 11.2.8.1).
func (s *shard) failOverrun() {
	for i := 0; i < len(s.overrun); i++ { // what is flushed may be too much for other CQs
		c := s.overrun[i]
		s.srqs.fail(c)
		for _, q := range s.table {
			if q != nil && (q.init.SendCQ == c || q.init.RecvCQ == c) && q.q.State() != qp.StateReset && q.q.State() != qp.StateErr {
				s.toError(q)
				s.qpEvent(q.q, qp.EventQPFatal)
			}
		}
	}
	s.overrun = s.overrun[:0]
}

// rung is called by sweep for each bell.
func (s *shard) rung(index uint16) {
	switch index {
	case wakeBell:
		s.wakeHeld()
		return
	case mailBell:
		return // it has made somebody look
	}
	if int(index) < len(s.table) {
		if q := s.table[index]; q != nil {
			s.activate(q)
		}
	}
}

// qpReady has a QP run that has waited for room.
func (s *shard) qpReady(q *qp.QP) { s.activate(q.User().(*QP)) }

func (s *shard) activate(q *QP) {
	if !q.active {
		q.active = true
		s.active = append(s.active, q)
	}
}

// runActive lets the QPs that may have something to send do so in turn.
func (s *shard) runActive() (did bool) {
	if len(s.active) == 0 {
		return false
	}
	s.eg.blocked = false
	budget, i := stepBudget, 0
	before := s.eg.sent
	turn := runBudget
	if s.eg.super != 0 {
		turn = max(turn, min(superBudget, stepBudget/len(s.active)))
	}
	kept := s.spare[:0]
	for ; i < len(s.active) && budget > 0 && !s.eg.blocked; i++ {
		q := s.active[i]
		if q.gone {
			q.active = false
			continue
		}
		at := s.eg.sent
		s.eg.bold, s.eg.shy = q.q.Retries()
		more := q.q.Run(turn)
		// A QP that sends nothing still costs a share, so that this loop ends.
		budget -= max(1, int(s.eg.sent-at))
		s.schedule(q)
		if more {
			kept = append(kept, q)
		} else {
			q.active = false
		}
	}
	s.eg.bold, s.eg.shy = false, false
	// Those that had no turn come first next time.
	rest := len(s.active) - i
	copy(s.active, s.active[i:])
	clear(s.active[rest:])
	all := append(s.active[:rest], kept...)
	clear(kept)
	s.spare = kept[:0]
	s.active = all
	return s.eg.sent != before
}

// announce tells the link our addresses, so that neighbours that knew another
// MAC for them learn this one, and switches that we listen for neighbour solicitations.
func (s *shard) announce() {
	for _, a := range s.d.gids.addrs {
		if a.Is4() {
			s.sendGratuitousARP(a)
		} else {
			s.sendUnsolicitedNA(a)
		}
	}
	for _, g := range s.mc.list { // RFC 4861 7.2.1
		g.changes = 1
		s.report(g)
	}
}
