// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/wire"
)

// captureEnv names a file for the frames at rank 0's port, each behind 4 bytes of length.
const captureEnv = "CONFORMANCE_CAPTURE"

// sniffer hears all frames at the rank's port, which are kept for it by the kernel.
func sniffer() (int, error) {
	port, err := net.InterfaceByName(os.Getenv("TAPVERBS_PORT"))
	if err != nil {
		return -1, err
	}
	all := uint16(unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(all))
	if err != nil {
		return -1, err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20); err != nil {
		return -1, err
	}
	return fd, unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: port.Index})
}

// writeCapture writes what a sniffer has heard.
func writeCapture(fd int, file string) error {
	var out []byte
	b := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(fd, b, 0)
		if errors.Is(err, unix.EAGAIN) {
			return os.WriteFile(file, out, 0o600)
		}
		if err != nil {
			return err
		}
		out = append(binary.LittleEndian.AppendUint32(out, uint32(n)), b[:n]...)
	}
}

// A place in memory as rsockets tell of it.
type rsPlace struct {
	addr        uint64
	key, length uint32
}

// rsEnd is what one end of a connection of rsockets has said so far.
type rsEnd struct {
	hello  []byte // 40 bytes of private data
	list   rsPlace
	places []rsPlace // that it has told of, and are not full yet
	next   int       // entry of the peer's list that it writes next
	seen   map[uint32]bool
	data   int // bytes
	story  []string
}

// rsStory follows a connection of rsockets through frames, and gives what each end said: the
// active one first. Every WRITE has to go where the other end said that it may.
func rsStory(frames [][]byte) (ends [2]rsEnd, err error) {
	var active string
	for i := range ends {
		ends[i].next = 1
		ends[i].seen = map[uint32]bool{}
	}
	for _, f := range frames {
		if len(f) < 14+20+8+12+4 || f[12] != 8 || f[13] != 0 || f[14] != 0x45 || f[23] != 17 || binary.BigEndian.Uint16(f[36:]) != wire.UDPPort {
			continue
		}
		bth, src := f[42:], string(f[26:30])
		b := bth[12 : len(bth)-4]
		switch bth[0] {
		case 0x64: // UD SEND only: a MAD
			if len(b) < 8+wire.MADLen || binary.BigEndian.Uint32(bth[4:])&0xffffff != 1 {
				continue
			}
			body := b[8+wire.MADHeaderLen:]
			switch wire.CMAttr(binary.BigEndian.Uint16(b[8+16:])) {
			case wire.CMREQ:
				active = src
				err = ends[0].introduce(body[wire.CMLen-wire.REQPrivateLen+36:])
			case wire.CMREP:
				err = ends[1].introduce(body[wire.CMLen-wire.REPPrivateLen:])
			}
		case 0x0b: // RC WRITE only with immediate
			from := 0
			if src != active {
				from = 1
			}
			err = ends[from].says(&ends[1-from], binary.BigEndian.Uint32(bth[8:])&0xffffff, b)
		case 0x06, 0x07, 0x08, 0x09, 0x0a:
			err = fmt.Errorf("opcode %#x", bth[0])
		}
		if err != nil {
			return ends, err
		}
	}
	return ends, nil
}

// introduce takes in a hello: 2 bytes, credits, 3 reserved bytes, size of the iomap, list, data.
func (e *rsEnd) introduce(b []byte) error {
	h := b[:40]
	place := func(b []byte) rsPlace {
		return rsPlace{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:])}
	}
	e.hello, e.list, e.places = h, place(h[8:]), []rsPlace{place(h[24:])}
	if e.list.length != 2 || e.list.addr == 0 || e.places[0].addr == 0 {
		return fmt.Errorf("hello % x", h)
	}
	return nil
}

// says takes in a WRITE with immediate: RETH, immediate data, payload.
func (e *rsEnd) says(to *rsEnd, psn uint32, b []byte) error {
	if e.seen[psn] {
		return nil // once more
	}
	e.seen[psn] = true
	va, key, n := binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:])
	imm := binary.BigEndian.Uint32(b[16:])
	op, value, payload := imm>>29, imm&(1<<29-1), b[20:20+n]
	switch op {
	case 0:
		if len(to.places) == 0 {
			return errors.New("data without a place for it")
		}
		p := &to.places[0]
		if va != p.addr || key != p.key || n != value || n > p.length {
			return fmt.Errorf("%d bytes of data at %#x, key %#x: the place is %#x, key %#x, %d bytes, and the message says %d", n, va, key, p.addr, p.key, p.length, value)
		}
		p.addr += uint64(n)
		if p.length -= n; p.length == 0 {
			to.places = to.places[1:]
		}
		e.data += int(n)
		e.story = append(e.story, fmt.Sprintf("data %d", n))
	case 4:
		s := fmt.Sprintf("credits %d", value)
		if n != 0 {
			if want := to.list.addr + 16*uint64(e.next); n != 16 || va != want || key != to.list.key {
				return fmt.Errorf("%d bytes of news at %#x, not %#x", n, va, want)
			}
			p := rsPlace{binary.LittleEndian.Uint64(payload), binary.LittleEndian.Uint32(payload[8:]), binary.LittleEndian.Uint32(payload[12:])}
			e.places = append(e.places, p)
			s += fmt.Sprintf(", entry %d: %d bytes", e.next, p.length)
			e.next = 1 - e.next
		}
		e.story = append(e.story, s)
	case 7:
		if n != 0 {
			return fmt.Errorf("a control message of %d bytes", n)
		}
		e.story = append(e.story, fmt.Sprintf("control %d", value))
	default:
		return fmt.Errorf("message %#x", imm)
	}
	return nil
}

// plainHello is a hello without what is an end's own: addresses and keys.
func plainHello(h []byte) string {
	return fmt.Sprintf("% x, list of %d, data %d", h[:8], binary.BigEndian.Uint32(h[20:]), binary.BigEndian.Uint32(h[36:]))
}

// frames splits a file into records whose header of n bytes has the length at off.
func frames(t *testing.T, file string, skip, n, off int) (f [][]byte) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for b = b[skip:]; len(b) > 0; {
		l := int(binary.LittleEndian.Uint32(b[off:]))
		f = append(f, b[n:n+l])
		b = b[n+l:]
	}
	return f
}

// TestRsocketsOnTheWire: two ends of ours say to each other what two of rdma-core's do, of
// whom there is a capture, when the program and its arguments are the same.
func TestRsocketsOnTheWire(t *testing.T) {
	file := t.TempDir() + "/frames"
	out := runCM(t, []string{captureEnv + "=" + file, "TAPVERBS_FRAMES=plain"}, "rstream -S 2048 -C 8 -I 3 -b $TAPVERBS_ADDR", "rstream -S 2048 -C 8 -I 3 -s $TAPVERBS_PEER")
	ours, err := rsStory(frames(t, file, 0, 4, 0))
	if err != nil {
		t.Fatalf("ours: %v\n%s", err, out)
	}
	theirs, err := rsStory(frames(t, "../../wire/testdata/cm-rstream-v4.pcap", 24, 16, 8))
	if err != nil {
		t.Fatalf("theirs: %v", err)
	}
	leaves := 0
	for i, who := range []string{"active", "passive"} {
		if got, want := plainHello(ours[i].hello), plainHello(theirs[i].hello); got != want {
			t.Errorf("the %s end's hello is %s, not %s", who, got, want)
		}
		// Who hears the other's farewell first need not say it.
		if n := len(ours[i].story); n > 0 && ours[i].story[n-1] == "control 0" {
			leaves++
			ours[i].story = ours[i].story[:n-1]
		}
		want := slices.DeleteFunc(theirs[i].story, func(s string) bool { return s == "control 0" })
		if !slices.Equal(ours[i].story, want) || theirs[i].data != 16+3*8*2048 {
			t.Errorf("the %s end said:\n%s\nand not:\n%s", who, strings.Join(ours[i].story, "\n"), strings.Join(want, "\n"))
		}
	}
	if leaves == 0 {
		t.Error("nobody took leave")
	}
}

// TestDatagramsOnTheWire: the first datagram goes by UDP behind a header that tells which
// queue pair the sender has, and so does an answer; then queue pairs talk to each other, with
// a header that says from which address and port. The bytes are those of rdma-core's
// documentation (librdmacm/docs/rsocket).
func TestDatagramsOnTheWire(t *testing.T) {
	file := t.TempDir() + "/frames"
	out := runCM(t, []string{captureEnv + "=" + file, foreverEnv + "=1", "TAPVERBS_FRAMES=plain"}, "udpong -T b -b $TAPVERBS_ADDR", "udpong -T b -T e -S 1000 -C 300 -s $TAPVERBS_PEER")
	told := map[string]uint32{} // the queue pair that an address and port have
	byUDP, byUD, answers := 0, 0, 0
	for _, f := range frames(t, file, 0, 4, 0) {
		if len(f) < 42 || f[12] != 8 || f[13] != 0 || f[14] != 0x45 || f[23] != 17 {
			continue
		}
		src, p := string(f[26:30]), f[42:14+binary.BigEndian.Uint16(f[16:])]
		switch dst := binary.BigEndian.Uint16(f[36:]); {
		case dst != wire.UDPPort && len(p) >= 16 && binary.BigEndian.Uint32(p) == 0x55555555:
			if p[4] != 4 || p[6] != 16 || p[7] != 0 || string(p[12:16]) != src || p[5] == 7 && len(p) != 16 || p[5] != 0 && p[5] != 7 {
				t.Errorf("a header over UDP: % x, and %d bytes", p[:16], len(p)-16)
			}
			told[src+string(f[34:36])] = binary.BigEndian.Uint32(p[8:])
			byUDP++
			if p[5] == 7 {
				answers++
			}
		case dst == wire.UDPPort && p[0] == 0x64 && binary.BigEndian.Uint32(p[4:])&0xffffff != 1:
			deth, h := p[12:], p[20:]
			if h[0] != 4 || h[1] != 8 || string(h[4:8]) != src || binary.BigEndian.Uint32(deth) != 0x01234567 {
				t.Errorf("a header over UD: % x, with Q_Key %x", h[:8], deth[:4])
			}
			if qpn := binary.BigEndian.Uint32(deth[4:]); told[src+string(h[2:4])] != qpn {
				t.Errorf("queue pair %#x talks; %#x was told", qpn, told[src+string(h[2:4])])
			}
			byUD++
		}
	}
	if byUDP < 2 || answers < 1 || byUD < 2*300 {
		t.Errorf("%d over UDP, of them %d answers; %d over UD\n%s", byUDP, answers, byUD, out)
	}
}
