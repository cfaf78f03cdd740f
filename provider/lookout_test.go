// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/qp"
	"golang.org/x/sys/unix"
)

// answer is how long a wait is for one who looks for frames for so long.
type answer func(look int64) int64

// wakeCost is what being woken adds to a wait.
const wakeCost = int64(30 * time.Microsecond)

// after answers after so many ns, and wakeCost for who sleeps.
func after(ns int64) answer {
	return func(look int64) int64 {
		if look > ns {
			return ns
		}
		return ns + wakeCost
	}
}

// wait has l wait n times, and gives in how many of them it looked, and how long it took.
func wait(l *lookOut, a answer, n int, now *int64) (looked int, took int64) {
	from := *now
	for range n {
		if l.long > 0 {
			looked++
		}
		l.begin(*now)
		*now += a(l.long)
		l.over(*now)
	}
	return looked, *now - from
}

// One whose peer answers soon looks for it, from the first trial on; one whose waits are hardly shorter for
// that tries it more and more seldom; so does one that waits for long.
func TestLookOut(t *testing.T) {
	const n = 100_000
	now := int64(0)
	soon := after(int64(10 * time.Microsecond))
	var l lookOut
	if looked, _ := wait(&l, soon, tryLookOut, &now); looked != 0 {
		t.Errorf("it looked %d times before it could know", looked)
	}
	if looked, took := wait(&l, soon, n, &now); looked < n*99/100 || took > n*11_000 {
		t.Errorf("a peer that answers in 10 µs: it looked in %d of %d waits, %d ns each", looked, n, took/n)
	}
	// The peer takes its time: some waits tell.
	l = lookOut{}
	wait(&l, soon, tryLookOut+lookOuts, &now)
	late := after(int64(300 * time.Microsecond))
	if looked, _ := wait(&l, late, badLooks, &now); looked != badLooks || l.long != 0 {
		t.Errorf("it looked %d times for a peer that is slow now, and would for %d ns", looked, l.long)
	}
	if looked, _ := wait(&l, late, n, &now); looked > 10*lookOuts {
		t.Errorf("a peer that answers in 300 µs: it looked in %d of %d waits", looked, n)
	}
	rare := after(int64(3 * time.Millisecond))
	l = lookOut{}
	if looked, _ := wait(&l, rare, n, &now); looked != 0 {
		t.Errorf("a peer that answers in 3 ms: it looked in %d waits", looked)
	}
	// And back: it is found out again.
	l = lookOut{rest: maxRest}
	if wait(&l, soon, maxRest+tryLookOut+lookOuts, &now); !l.proven() {
		t.Errorf("it does not look, though the peer is quick again: %+v", l)
	}
}

// Who has the processor that the peer needs makes it wait by looking, and does not for long.
func TestLookOutInTheWay(t *testing.T) {
	var l lookOut
	now := int64(0)
	inTheWay := func(look int64) int64 { return look + int64(20*time.Microsecond) }
	if looked, _ := wait(&l, inTheWay, 10_000, &now); looked > 20*(badTries+1) {
		t.Errorf("it looked in %d of 10000 waits", looked)
	}
}

// An alarm that is set for sooner stands; the later one is set when that has rung.
func TestAlarm(t *testing.T) {
	var a alarm
	if err := a.open(); err != nil {
		t.Fatal(err)
	}
	defer a.close()
	armed := func() time.Duration {
		var it unix.ItimerSpec
		if err := unix.TimerfdGettime(a.fd, &it); err != nil {
			t.Fatal(err)
		}
		return time.Duration(it.Value.Nano())
	}
	hour, minute := int64(time.Hour), int64(time.Minute)
	a.by(qp.Never, 0)
	if d := armed(); d != 0 {
		t.Errorf("set to ring in %v, where nothing is due", d)
	}
	a.by(hour, 0)
	a.by(minute, 0)
	if d := armed(); d <= 0 || d > time.Minute {
		t.Errorf("set to ring in %v, not a minute", d)
	}
	a.by(hour, 0)
	if d := armed(); d > time.Minute {
		t.Errorf("set to ring in %v, though it was a minute", d)
	}
	a.by(1, 0)
	fds := []unix.PollFd{{Fd: int32(a.fd), Events: unix.POLLIN}}
	if n, err := unix.Poll(fds, -1); n != 1 {
		t.Fatalf("%d, %v", n, err)
	}
	a.rung()
	if n, _ := unix.Poll(fds, 0); n != 0 || a.at != qp.Never {
		t.Errorf("it rings on: %d, set to %d", n, a.at)
	}
}
