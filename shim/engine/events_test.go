// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"
)

// Events that are kept get their tokens by one write, one for each of those that are still
// there; those that are taken or dropped before that get none.
func TestTokensTogether(t *testing.T) {
	// Its writes stay apart, where those to an eventfd add up.
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	q := tokens[int]{fd: fds[0]}
	wrote := func(want ...uint64) {
		t.Helper()
		for _, w := range want {
			var b [8]byte
			if n, err := unix.Read(fds[1], b[:]); n != 8 || err != nil {
				t.Fatalf("read: %d, %v, want %d", n, err, w)
			}
			if v := binary.NativeEndian.Uint64(b[:]); v != w {
				t.Errorf("%d tokens, want %d", v, w)
			}
		}
		if n, err := unix.Read(fds[1], make([]byte, 8)); err != unix.EAGAIN {
			t.Errorf("one more write: %d, %v", n, err)
		}
	}
	for i := range 20 {
		q.keep(i)
	}
	if wrote(); q.len() != 0 {
		t.Errorf("%d events are there before their tokens", q.len())
	}
	q.settle()
	q.settle()
	wrote(20)
	for i := range 20 {
		if v, no := q.take(); v != i || no != 0 {
			t.Fatalf("event %d: %d, %d", i, v, no)
		}
	}
	q.keep(1)
	q.keep(2)
	q.put(3) // has theirs written, too
	q.settle()
	wrote(3)
	q.keep(4)
	q.keep(5)
	q.drop(func(v *int) bool { return *v == 4 })
	q.settle()
	wrote(1)
	for q.len() > 0 {
		q.take()
	}
	q.keep(6)
	if v, no := q.take(); v != 6 || no != 0 { // with a token of an event that was dropped
		t.Fatal(v, no)
	}
	q.settle()
	wrote()
}

// Whatever comes between a reader's token and its event, with tokens paid later or at once
// and the end in the midst of it: whoever asks after the end is given each event that is
// there, and then EIO as often as it asks. The descriptor is never without a token by then.
func TestTokensEnd(t *testing.T) {
	for seed := range uint64(2000) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		fd, err := unix.Eventfd(0, unix.EFD_SEMAPHORE|unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		q := tokens[int]{fd: fd}
		in, out := 0, 0
		hands := 0 // tokens that were read for events that were not taken yet
		read := func() bool {
			var b [8]byte
			n, _ := unix.Read(fd, b[:])
			return n == 8
		}
		take := func() unix.Errno {
			_, no := q.take()
			if no == 0 {
				out++
			}
			return unix.Errno(no)
		}
		for range 30 {
			switch rnd.IntN(8) {
			case 0:
				q.put(in)
				in++
			case 1, 2:
				q.keep(in)
				in++
			case 3:
				q.settle()
			case 4, 5:
				if read() {
					hands++
				}
			case 6:
				if hands > 0 {
					hands--
					take()
				}
			case 7:
				switch rnd.IntN(4) {
				case 0:
					q.end()
				case 1:
					out += len(q.pull(func(v *int) bool { return *v%3 == 0 }))
				}
			}
		}
		q.end()
		q.settle()
		for ; hands > 0; hands-- {
			take()
		}
		for ends := 0; ends < 3; {
			if !read() {
				t.Fatalf("seed %d: %d of %d events, %d times the end, and nothing is readable", seed, out, in, ends)
			}
			if no := take(); no == unix.EIO {
				ends++
			} else if no != 0 {
				t.Fatalf("seed %d: %v after the end", seed, no)
			}
		}
		if out != in {
			t.Errorf("seed %d: %d events of %d", seed, out, in)
		}
		unix.Close(fd)
	}
}
