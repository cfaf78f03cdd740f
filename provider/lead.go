// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"context"
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
	s.bg.wakeups.Add(1)
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

// endLead ends what lead began.
func (s *shard) endLead() {
	b := &s.bg
	b.busy = 0
	at := s.clock()
	b.ledAt.Store(at)
	b.leader.Store(false)
	if u := b.sleepUntil.Load(); u != awake && (u > at+b.follow.Load() || b.sleepers.Load() > 0) {
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
	for s.led(ready) && !ready() && ctx.Err() == nil {
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
