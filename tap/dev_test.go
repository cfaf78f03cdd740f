// SPDX-License-Identifier: Apache-2.0

package tap

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"
)

// onSocket makes a device whose descriptor is one end of a datagram socket pair, to
// answer what a kernel's TAP hardly ever does. peer is the other end.
func onSocket(t *testing.T, off Offload) (d *dev, peer int) {
	t.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	if d, err = newDev(p[0], "sock0", off); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.Close()
		unix.Close(p[1])
	})
	return d, p[1]
}

func TestDeviceFull(t *testing.T) {
	for _, off := range []Offload{0, VnetHdr} {
		d, peer := onSocket(t, off)
		hdr := 0
		if off.Has(VnetHdr) {
			hdr = vnetHdrLen
		}
		out := make([]Frame, 4000) // more than any datagram socket queues
		for i := range out {
			out[i].B = make([]byte, 2000)
			binary.BigEndian.PutUint32(out[i].B[14:], uint32(i))
		}
		buf := make([]byte, 3000)
		sent, got := 0, 0
		for rounds := 0; sent < len(out); rounds++ {
			n, err := d.WriteBatch(out[sent:])
			if err != nil || n == 0 {
				t.Fatalf("round %d: %d, %v", rounds, n, err)
			}
			sent += n
			if full := d.Stats().TxFull; sent < len(out) && full != uint64(rounds+1) {
				t.Fatalf("full %d times after %d rounds", full, rounds+1)
			}
			for got < sent {
				n, err := unix.Read(peer, buf)
				if err != nil || n != hdr+2000 || binary.BigEndian.Uint32(buf[hdr+14:]) != uint32(got) {
					t.Fatalf("frame %d: %d bytes, %v", got, n, err)
				}
				for _, b := range buf[:hdr] {
					if b != 0 {
						t.Fatalf("vnet header % x", buf[:hdr])
					}
				}
				got++
			}
		}
		if s := d.Stats(); s.TxFull == 0 || s.TxFrames != 4000 || s.TxBytes != 4000*2000 {
			t.Errorf("%+v", s)
		}
	}
}

func vnetHeader(flags, gsoType byte, gso, start, offset uint16) []byte {
	h := make([]byte, vnetHdrLen)
	h[vnetFlags], h[vnetGSOType] = flags, gsoType
	binary.NativeEndian.PutUint16(h[vnetGSOSize:], gso)
	binary.NativeEndian.PutUint16(h[vnetCsumStart:], start)
	binary.NativeEndian.PutUint16(h[vnetCsumOffset:], offset)
	return h
}

// Headers that point outside of their frame drop the frame, and only that.
func TestMalformedVnetHeader(t *testing.T) {
	d, peer := onSocket(t, VnetHdr|CSUM)
	good := make([]byte, 60)
	packets := [][]byte{
		append(vnetHeader(0, 0, 0, 0, 0), good...),
		append(vnetHeader(vnetNeedsCsum, 0, 0, 34, 25), good...),     // field ends 1 behind the frame
		append(vnetHeader(vnetNeedsCsum, 0, 0, 0xffff, 6), good...),  // start behind the frame
		append(vnetHeader(vnetNeedsCsum, 0, 0, 34, 0xffff), good...), // offset behind the frame
		append(vnetHeader(0, 0, 0, 0, 0), good[:13]...),              // shorter than an Ethernet header
		vnetHeader(0, 0, 0, 0, 0),                                    // nothing but a header
		vnetHeader(0, 0, 0, 0, 0)[:5],                                // less than a header
		append(vnetHeader(vnetNeedsCsum, 0, 0, 34, 24), good...),     // field ends with the frame
		append(vnetHeader(vnetNeedsCsum, 5, 30, 34, 6), good...),     // super-frame: left as it is
	}
	for _, p := range packets {
		if _, err := unix.Write(peer, p); err != nil {
			t.Fatal(err)
		}
	}
	fs := make([]Frame, len(packets))
	for i := range fs {
		fs[i].B = make([]byte, 100)
	}
	n, err := d.ReadBatch(fs)
	if n != 3 || err != nil {
		t.Fatalf("%d, %v", n, err)
	}
	if s := d.Stats(); s.RxMalformed != 6 || s.RxFrames != 3 || s.RxSuper != 1 {
		t.Errorf("%+v", s)
	}
	if fs[1].B[58] != 0xff || fs[1].B[59] != 0xff || fs[1].GSO != 0 {
		t.Errorf("checksum over zeros: % x", fs[1].B[58:])
	}
	if fs[2].GSO != 30 || fs[2].B[40] != 0 {
		t.Errorf("super-frame: %+v", fs[2])
	}
	// No room at all counts as truncated and does not panic.
	if _, err := unix.Write(peer, packets[0]); err != nil {
		t.Fatal(err)
	}
	if n, err := d.ReadBatch([]Frame{{}}); n != 0 || err != nil || d.Stats().RxTruncated != 1 {
		t.Errorf("%d, %v, %+v", n, err, d.Stats())
	}
}

func TestErrnoMapping(t *testing.T) {
	d, _ := onSocket(t, 0)
	for _, c := range []struct {
		errno      unix.Errno
		gone, down bool
	}{{unix.EBADFD, true, false}, {unix.ENODEV, true, false}, {unix.EIO, true, true}, {unix.EFAULT, false, false}} {
		err := d.fault("write", c.errno)
		if errors.Is(err, ErrGone) != c.gone || errors.Is(err, ErrDown) != c.down || !errors.Is(err, c.errno) {
			t.Errorf("%v", err)
		}
	}
}

// complete against the definition, word by word.
func TestComplete(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		b := make([]byte, 20+r.IntN(200))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		if r.IntN(4) == 0 { // many carries
			for i := range b {
				b[i] = 0xff
			}
		}
		start := r.IntN(10)
		offset := 2 * r.IntN(4)
		var want uint32
		for i := start; i < len(b); i += 2 {
			w := uint32(b[i]) << 8
			if i+1 < len(b) {
				w |= uint32(b[i+1])
			}
			want += w
			want = want&0xffff + want>>16
		}
		want = ^want & 0xffff
		if want == 0 {
			want = 0xffff
		}
		if !complete(b, start, offset) {
			t.Fatal("refused")
		}
		if got := binary.BigEndian.Uint16(b[start+offset:]); uint32(got) != want {
			t.Fatalf("%d bytes from %d: %#x, want %#x", len(b), start, got, want)
		}
	}
}

func BenchmarkChecksum4K(b *testing.B) {
	f := make([]byte, 4096+54)
	b.SetBytes(int64(len(f)))
	b.ReportAllocs()
	for b.Loop() {
		complete(f, 34, 6)
	}
}
