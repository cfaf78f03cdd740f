// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"encoding/binary"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/tapverbs/tapverbs/qp"
	"golang.org/x/sys/unix"
)

const (
	// retryFull is how soon a device that was full is tried again when it does
	// not say by itself that it has room, retryDown the same for a link that is down.
	retryFull = int64(time.Millisecond)
	retryDown = int64(50 * time.Millisecond)

	// lively is how long after an application's last call the goroutine sleeps no
	// longer than that: a timer that is set meanwhile runs out later, mostly, so
	// nobody has to kick for it.
	lively = int64(time.Millisecond)

	backgroundRounds = 8
	awake            = math.MinInt64
	longAgo          = math.MinInt64 / 2
)

// background is the goroutine that makes progress when no application does. It
// sleeps until a frame comes, the next timer is due or somebody kicks the eventfd;
// while an application polls, not for frames (watch).
//
// Nothing is missed: it publishes until when it will sleep with the baton held,
// and whoever releases the baton later compares that with what is next (kickFor).
//
// When it finds the baton taken it does not wait for it. Mostly it has just pushed
// aside the thread that has it; waiting would be two switches more, or the rest of
// that thread's time slice. It leaves word (shard.look) and sleeps again: who
// releases the baton reads the TAP. What it sleeps on tells of each frame that comes
// (edge-triggered), not of those that wait.
type background struct {
	s     *shard
	done  chan struct{} // closed when the goroutine has ended; nil if none was started
	watch watch
	// poller is whom watch judges.
	poller poller
	// frames: what woke it up were frames.
	frames bool

	// sleepUntil is the time, in ns of the engine's clock, until which the
	// goroutine sleeps; awake while it does not, and while an application polls:
	// that one lets the timers run out itself.
	sleepUntil atomic.Int64
	// away: it leaves the TAP to an application that polls.
	away atomic.Bool
	quit atomic.Bool

	wakeups atomic.Uint64
	kicks   atomic.Uint64

	mu      sync.Mutex // guards fd: a leaf, so that anyone may kick
	fd      int        // eventfd
	drained [8]byte    // what was read from it
	ep      int        // epoll(7): the eventfd, the alarm, and the TAP edge-triggered
	alarm   alarm

	// leader: a thread of the application's waits for frames (lead.go); calls: and can be
	// woken by a call, through lfd, which is in lep with the TAP. ledAt is when the last
	// one went; sleepers are those who sleep and do not lead.
	leader, calls atomic.Bool
	ledAt         atomic.Int64
	sleepers      atomic.Int32
	// follow is for how long, in ns, the goroutine leaves the TAP to one who may lead again; ledWas is ledAt
	// when that began. following: it sleeps so, or beside a leader. wants counts calls of wanted, ledWants
	// is how many there were when the leader became it.
	follow    atomic.Int64
	ledWas    int64
	following atomic.Bool
	wants     atomic.Uint32
	ledWants  uint32
	lfd, lep  int
	busy      int // how often in a row the leader found the baton taken
	lookOut   lookOut
	ownLook   lookOut // of the goroutine itself
	// came: a port without a descriptor has said that frames arrived.
	came atomic.Bool
}

// start makes the descriptors and starts the goroutine.
func (b *background) start() (err error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	b.lep, b.lfd, b.alarm.fd = -1, -1, -1
	if b.ep, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		unix.Close(fd)
		return fmt.Errorf("epoll: %w", err)
	}
	add := func(fd int, events uint32) {
		if err == nil {
			err = unix.EpollCtl(b.ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)})
		}
	}
	add(fd, unix.EPOLLIN)
	if err == nil {
		err = b.alarm.open()
	}
	add(b.alarm.fd, unix.EPOLLIN)
	if tap := b.s.dev.FD(); tap >= 0 {
		add(tap, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLET)
		if err == nil {
			err = b.startLead(tap)
		}
	}
	if err != nil {
		unix.Close(fd)
		unix.Close(b.ep)
		b.alarm.close()
		return fmt.Errorf("epoll: %w", err)
	}
	b.mu.Lock()
	b.fd = fd
	b.mu.Unlock()
	b.watch = newWatch()
	b.ledAt.Store(longAgo)
	b.follow.Store(maxWindow)
	b.sleepUntil.Store(awake)
	b.done = make(chan struct{})
	// A port without a descriptor says by a call when frames arrive.
	if p, ok := b.s.dev.(interface{ OnArrival(func()) }); ok {
		p.OnArrival(b.arrived)
	}
	go b.run()
	return nil
}

// stop ends the goroutine and waits for it.
func (b *background) stop() {
	if b.done == nil {
		return
	}
	if p, ok := b.s.dev.(interface{ OnArrival(func()) }); ok {
		p.OnArrival(nil)
	}
	b.quit.Store(true)
	b.kick()
	<-b.done
	for b.calls.Load() { // it sees quit
		b.callLeader()
		time.Sleep(10 * time.Microsecond)
	}
	b.mu.Lock()
	if b.lep >= 0 {
		b.stopLead()
	}
	unix.Close(b.ep)
	unix.Close(b.fd)
	b.alarm.close()
	b.fd = -1
	b.mu.Unlock()
}

// oneKick is what adds 1 to an eventfd: a variable, since what unix.Write is given escapes.
var oneKick = binary.NativeEndian.AppendUint64(nil, 1)

// kick wakes the goroutine. It may be called by anyone at any time.
func (b *background) kick() {
	if b.done == nil {
		return
	}
	b.mu.Lock()
	if b.fd >= 0 {
		b.kicks.Add(1)
		unix.Write(b.fd, oneKick) // EAGAIN: it has been kicked 2^64-2 times already
	}
	b.mu.Unlock()
}

// arrived is called when frames come to a port without a descriptor.
func (b *background) arrived() {
	b.came.Store(true)
	if !b.away.Load() {
		b.kick()
	}
}

// kickFor wakes the goroutine if it sleeps beyond a time at which there is something to do. The
// caller holds the baton, or has given it back since there was.
func (b *background) kickFor(at int64) {
	if u := b.sleepUntil.Load(); u != awake && at < u {
		b.sleepUntil.Store(awake) // once is enough
		b.kick()
	}
}

// wanted is called by those who are about to sleep until something completes: the
// TAP is the background's again.
func (b *background) wanted() {
	b.s.lastCall.Store(longAgo)
	b.ledAt.Store(longAgo)
	b.s.rested.Store(true) // whatever it posts before it sleeps
	b.wants.Add(1)
	if b.away.Load() || b.following.Load() {
		b.kick()
	}
}

func (b *background) run() {
	defer close(b.done)
	preferSoon(true)
	urgent, since, slept := true, int64(0), b.wakeups.Load()
	s := b.s
	until := int64(qp.Never)
	var t turn
	var r room
	for !b.quit.Load() {
		top := s.clock()
		if t.over(top) {
			giveWay(urgent)
		}
		r.keep(top)
		if n := b.wakeups.Load(); n != slept {
			slept, since = n, top
		}
		if b.watch.window > 0 && !s.gone.Load() {
			b.stayAway()
			continue
		}
		if may := !b.ownLook.proven() && top-since < maxUrgent; may != urgent {
			urgent = may
			setSoon(urgent)
		}
		woken := b.frames
		b.frames = false
		if !s.baton.TryLock() {
			if woken {
				b.noteFrame(0)
			}
			if !b.leave(until) {
				continue
			}
			woken = false
		}
		if s.link.probing() {
			s.announce() // the frame that gets through ends it
		}
		ago, before := s.clock()-s.lastCall.Load(), s.cnt.RxFrames
		s.progress(true, backgroundRounds)
		came := s.cnt.RxFrames != before
		if woken && !came && ago < s.pace.stretch(longWindow) {
			ago = 0 // somebody else was quicker
		}
		if woken || came && b.ownLook.long > 0 {
			b.noteFrame(ago)
		}
		if came {
			b.ownLook.over(s.now)
		}
		until = s.next()
		if s.pending() {
			s.release()
			continue
		}
		backlog := s.eg.backlog()
		if backlog {
			until = min(until, s.now+retryFull)
		}
		down := s.down.Load()
		if s.link.probing() {
			until = min(until, s.now+retryDown)
		}
		now, wants := s.now, b.wants.Load()
		switch lively := s.pace.stretch(lively); {
		case b.leader.Load() && b.ledAt.Load() == b.ledWas: // it sleeps for long, and kicks when it goes
		case b.follows(now):
			until = min(until, now+b.followFor())
		case now-s.lastCall.Load() < lively:
			until = min(until, now+lively)
		}
		b.sleepUntil.Store(until)
		s.release()
		if s.bells.quiet() {
			rx := !down && !s.gone.Load()
			if rx && !backlog {
				switch {
				case b.leader.Load(): // who kicks when it goes, or comes back soon: it sees sleepUntil
					b.following.Store(true)
					rx = false
				case b.follows(now): // nobody tells when that is over, but who wants it
					b.following.Store(true)
					if rx = b.wants.Load() != wants; !rx {
						until = min(until, now+b.follow.Load())
					}
				}
			}
			if rx && b.lookOn(came, now, until) {
				b.following.Store(false)
				b.sleepUntil.Store(awake)
				continue
			}
			b.sleep(rx, until)
			b.following.Store(false)
		}
		b.sleepUntil.Store(awake)
	}
}

// lookOn says whether to look for frames once more before it sleeps; came, whether there were some just now.
func (b *background) lookOn(came bool, now, until int64) bool {
	l := &b.ownLook
	if came {
		l.begin(now)
	}
	return l.waits && now < until && now-l.from < l.long && b.watch.window == 0
}

// leave leaves the work to who has the baton and sleeps, no longer than until. It
// says true if it has got the baton all the same.
func (b *background) leave(until int64) bool {
	s := b.s
	// Who has it runs the timers that are due, too, when it sees look, and may have set others.
	now := s.clock()
	if soon := now + s.pace.stretch(lively); until <= now || until > soon {
		until = soon
	}
	b.sleepUntil.Store(until)
	s.look.Store(true)
	// Either this fails, and the release that comes sees look, or nobody has it.
	if s.baton.TryLock() {
		b.sleepUntil.Store(awake)
		return true
	}
	led := b.leader.Load()
	b.following.Store(led)
	b.sleep(!led, until)
	b.following.Store(false)
	b.sleepUntil.Store(awake)
	return false
}

// stayAway leaves the TAP to an application that polls, and lets the timers run out,
// for a window; until wanted or a kick at most.
func (b *background) stayAway() {
	s := b.s
	b.poller.begin(s.clock())
	b.away.Store(true)
	if s.eager.Load() > 0 {
		s.bells.patient.Store(1)
	}
	whole := false
	stay := min(s.pace.stretch(b.watch.window), max(longWindow, s.pace.stretch(maxWindow)))
	// Looked at after away was set, as wanted looks at away after it has set rested.
	if !s.rested.Load() {
		fds := [1]unix.PollFd{{Fd: int32(b.fd), Events: unix.POLLIN}}
		ts := unix.NsecToTimespec(stay)
		n, _ := unix.Ppoll(fds[:], &ts, nil)
		b.wakeups.Add(1)
		if n > 0 {
			b.drain()
		}
		whole = n == 0
	}
	b.away.Store(false)
	s.bells.patient.Store(0)
	ago, judged := b.idle(stay) // which looks at the bells
	b.watch.over(s.pace.shrink(ago), whole && judged)
}

// idle is how long ago an application made progress; 0 while it does, in a window of stay ns in
// which it has let no frame wait, or would if it had a processor, which is not judged.
func (b *background) idle(stay int64) (ago int64, judged bool) {
	s := b.s
	if !s.baton.TryLock() {
		return 0, true
	}
	if s.owes != nil {
		s.progress(false, postRounds)
	}
	p, last := &b.poller, s.lastCall.Load()
	who := p.last()
	s.release()
	if s.rested.Load() {
		return -longAgo, true
	}
	ago = s.clock() - last
	window, grace := b.watch.window, s.pace.stretch(endGrace)
	switch {
	case ago < grace:
	case ago < stay/4 && !b.unread():
		ago = 0
	case p.skipped+window <= maxSkipped && who.pushedAside(last, grace):
		p.skipped += window
		return 0, false
	}
	p.skipped = 0
	return ago, true
}

// unread says whether frames wait in the TAP. A port without a descriptor knows only that some came.
func (b *background) unread() bool {
	fd := b.s.dev.FD()
	if fd < 0 {
		return b.came.Load()
	}
	fds := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, _ := unix.Poll(fds[:], 0)
	return n > 0
}

// sleep waits for a kick, for frames or room for them if rx, or until a time, or a bit longer or shorter.
func (b *background) sleep(rx bool, until int64) {
	fds := [2]unix.PollFd{{Fd: int32(b.fd), Events: unix.POLLIN}, {Fd: int32(b.alarm.fd), Events: unix.POLLIN}}
	var events [3]unix.EpollEvent
	now := b.s.clock()
	if until <= now {
		return
	}
	b.alarm.by(until, now)
	b.came.Store(false)
	frame := false
	if !rx {
		if n, _ := unix.Ppoll(fds[:], nil, nil); n > 0 {
			if fds[0].Revents != 0 {
				b.drain()
			}
			if fds[1].Revents != 0 {
				b.alarm.rung()
			}
		}
	} else if n, _, errno := unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(b.ep), uintptr(unsafe.Pointer(&events)), uintptr(len(events)), 0, 0, 0); errno == 0 {
		for _, e := range events[:n] {
			switch int(e.Fd) {
			case b.fd:
				b.drain()
			case b.alarm.fd:
				b.alarm.rung()
			default:
				frame = true // with EPOLLOUT alone if somebody was quicker to read it
			}
		}
	} else if errno != unix.EINTR {
		// Only a kernel out of memory gets here; waiting a little is all one can do.
		time.Sleep(time.Millisecond)
	}
	b.wakeups.Add(1)
	b.frames = frame || b.came.Load()
}

// noteFrame tells watch that a frame woke the goroutine, and how long ago somebody else had polled.
func (b *background) noteFrame(ago int64) {
	b.watch.frame(b.s.pace.shrink(ago))
	if b.watch.about() {
		b.poller.asked.Store(true)
	}
}

// drain takes the kicks out of the eventfd.
func (b *background) drain() {
	unix.Read(b.fd, b.drained[:])
}
