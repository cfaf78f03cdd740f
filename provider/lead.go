// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"context"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// An application that sleeps until something completes is woken twice where the background
// goroutine takes in the frames: that first, and then the application, by an event. So one
// of those that sleep, the leader, waits for frames itself, beside its events; with
// one switch of threads it is awake and has what it has waited for. The background goroutine
// keeps the timers meanwhile, and has the TAP back soon after the leader has gone: if nobody
// else waits, within the time for which it would leave the TAP to one who polls.
//
// No frame is missed: the leader waits for the TAP to be readable, not for it to become so.
// When the leader goes and the background goroutine sleeps for long without the TAP, it is
// kicked: either it has found the leader gone before it slept, or it has said before until
// when it will (sleepUntil), which the leader looks at after it has gone.

// lead makes the caller the leader. false: there is one, or nobody can be: of a device with
// several queues each has a background goroutine, and keeps it.
func (s *shard) lead() bool {
	b := &s.bg
	if len(s.d.shards) != 1 || b.done == nil || s.dev.FD() < 0 || s.gone.Load() || s.down.Load() || b.quit.Load() ||
		!b.leader.CompareAndSwap(false, true) {
		return false
	}
	b.ledWants = b.wants.Load()
	if b.away.Load() { // it is to keep the timers
		s.rested.Store(true)
		b.kick()
	}
	return true
}

// maxBusy is how often in a row a leader finds others at it before it leaves the frames to
// them and to the background goroutine, which knows whether to look (watch).
const maxBusy = 16

// led makes progress for the leader until ready says that it has what it waits for. false:
// it is not to lead any longer, for that or another reason.
func (s *shard) led(ready func() bool) bool {
	if !s.baton.TryLock() {
		s.look.Store(true)
		// Either this fails, and the release that comes sees look, or nobody has it.
		if !s.baton.TryLock() {
			s.bg.busy++
			return !ready() && s.bg.busy < maxBusy
		}
	}
	s.bg.busy = 0
	if s.closing {
		s.release()
		return false
	}
	s.leading = true
	s.polled() // which lets an acknowledgement go that was held back: this thread may sleep for long
	for range pollRounds {
		s.step(true)
		s.lastCall.Store(s.now)
		if ready() || !s.pending() {
			break
		}
	}
	has := ready()
	s.leading = false
	if s.eg.backlog() {
		s.bg.kick() // who sees to it that the frames get out
	}
	s.release()
	return !has && !s.gone.Load() && !s.down.Load() && !s.bg.quit.Load()
}

// lookOut is how long a leader looks for frames before it sleeps. Being woken can take several times as
// long as the answer of a peer that is awake takes, and costs that peer time, too, whose frame does it. Whether looking is
// worth it is found out by trying, now and then: for as long as the waits were of late, which costs no more
// than sleeping does; and it is if waits are shorter by a quarter at least. So a program whose peer takes
// its time sleeps at once, all but always.
//
// It knows no clock. The leaders share one; the background goroutine has its own.
type lookOut struct {
	long  int64 // how long it looks, in ns; 0: it sleeps at once
	from  int64 // when the wait began
	waits bool  // it has not ended yet
	tries bool
	n     int   // waits: asleep, or tried, or in a row that were longer than it looked
	bad   int   // waits that looking made no shorter
	sum   int64 // of how long the waits were, asleep
	since int64 // when it began to look
	rest  int   // how many waits more than tryLookOut it takes to try again, since that has failed
}

const (
	// maxLookOut is how long waits are at most, on average, for it to be tried, in ns.
	maxLookOut = int64(time.Millisecond)
	// tryLookOut is after how many waits it is tried, up to lookOuts of them, of which all but badTries
	// at most must have been worth it. It is tried after four times as many when they were not, up to maxRest.
	tryLookOut, lookOuts, badTries, maxRest = 32, 8, 2, 8192
	// badLooks in a row end it, and lookTime, in ns, after which it is to prove itself again.
	badLooks, lookTime = 4, int64(time.Second)
)

// begin is called when a wait begins, looking or asleep.
func (l *lookOut) begin(now int64) { l.from, l.waits = now, true }

// over learns from a wait that has ended now, if there was one.
func (l *lookOut) over(now int64) {
	if !l.waits {
		return
	}
	l.waits = false
	waited := now - l.from
	switch {
	case l.long == 0:
		if l.n++; l.n <= l.rest {
			return
		}
		l.sum += min(waited, 2*maxLookOut)
		if l.n < l.rest+tryLookOut {
			return
		}
		if mean := l.sum / tryLookOut; mean < maxLookOut {
			*l = lookOut{long: mean, tries: true, rest: l.rest}
			return
		}
	case l.tries:
		if waited >= l.long-l.long/4 {
			l.bad++
		}
		if l.n++; l.n < lookOuts && l.bad <= badTries {
			return
		}
		if l.bad <= badTries {
			*l = lookOut{long: l.long, since: now}
			return
		}
		*l = lookOut{rest: min(max(4*l.rest, tryLookOut), maxRest)}
		return
	default:
		if l.n++; waited < l.long {
			l.n = 0
		}
		if l.n < badLooks && now-l.since < lookTime {
			return
		}
	}
	*l = lookOut{}
}

// proven says whether it looks because that was worth it.
func (l *lookOut) proven() bool { return l.long > 0 && !l.tries }

// lookFor is led for a leader that would sleep next.
func (s *shard) lookFor(ready func() bool) bool {
	if !s.led(ready) {
		return false
	}
	b := &s.bg
	l := &b.lookOut
	l.begin(s.clock())
	for b.busy == 0 && s.clock()-l.from < l.long {
		if !s.led(ready) {
			return false
		}
	}
	return true
}

// endLead ends what lead began.
func (s *shard) endLead() {
	b := &s.bg
	b.busy = 0
	at := s.clock()
	b.lookOut.over(at)
	wanted := b.wants.Load() != b.ledWants // by others, who do not lead
	if !wanted {
		b.ledAt.Store(at)
	}
	b.leader.Store(false)
	if u := b.sleepUntil.Load(); u != awake && (u > at+b.follow.Load() || wanted || b.sleepers.Load() > 0) {
		b.kick()
	}
}

// follows says whether the TAP is somebody else's who sleeps on it, or did just now and may
// do so again: then not while others sleep who do not.
func (b *background) follows(now int64) bool {
	return b.leader.Load() || now-b.ledAt.Load() < b.s.pace.stretch(endGrace) && b.sleepers.Load() == 0
}

// followFor is for how long the goroutine leaves the TAP to who leads: twice as long each time that somebody has led
// meanwhile, up to longWindow.
func (b *background) followFor() int64 {
	least, at := b.s.pace.stretch(maxWindow), b.ledAt.Load()
	stay := least
	if at != b.ledWas {
		stay = max(min(2*b.follow.Load(), longWindow), least)
	}
	b.ledWas = at
	b.follow.Store(stay)
	return stay
}

// sleepLeading sleeps until ready, until the context is done or until the device has
// something to say to all, as the leader. false: it did not sleep, as the background
// goroutine is to take in the frames, or it had to give up. What ready looks at must be changed with the baton
// held, or callLeader be called afterwards.
func (s *shard) sleepLeading(ctx context.Context, ready func() bool) bool {
	if !s.lead() {
		return false
	}
	b := &s.bg
	b.calls.Store(true)
	if ctx.Done() != nil {
		defer context.AfterFunc(ctx, b.callLeader)()
	}
	for again := s.lookFor(ready); again && !ready() && ctx.Err() == nil; again = s.led(ready) {
		b.leaderSleeps()
	}
	slept := b.busy < maxBusy || ready()
	b.calls.Store(false)
	s.endLead()
	return slept
}

// callLeader wakes a leader that sleeps in sleepLeading, to look again.
func (b *background) callLeader() {
	if b.calls.Load() {
		b.mu.Lock()
		if b.lfd >= 0 {
			unix.Write(b.lfd, oneKick)
		}
		b.mu.Unlock()
	}
}

// leaderSleeps waits for frames or a call.
func (b *background) leaderSleeps() {
	var events [2]unix.EpollEvent
	b.wakeups.Add(1)
	n, _, errno := unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(b.lep), uintptr(unsafe.Pointer(&events)), 2, 0, 0, 0)
	if errno != 0 {
		return
	}
	for _, e := range events[:n] {
		if int(e.Fd) == b.lfd {
			var word [8]byte
			unix.Read(b.lfd, word[:])
		}
	}
}

// startLead makes what a leader sleeps on.
func (b *background) startLead(tap int) (err error) {
	if b.lfd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return err
	}
	if b.lep, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		unix.Close(b.lfd)
		b.lep, b.lfd = -1, -1
		return err
	}
	for _, fd := range []int{b.lfd, tap} {
		if err == nil {
			err = unix.EpollCtl(b.lep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
		}
	}
	if err != nil {
		b.stopLead()
	}
	return err
}

func (b *background) stopLead() {
	unix.Close(b.lep)
	unix.Close(b.lfd)
	b.lep, b.lfd = -1, -1
}
