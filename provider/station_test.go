// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// station is the other end of a device's link, played by the test: it sees and
// sends single frames.
type station struct {
	t     testing.TB
	net   *taptest.Net
	clock *taptest.Clock
	port  *taptest.Port
	dev   *provider.Device
	// answer is called for each frame the device sends while something waits.
	answer func(f []byte)
}

var (
	stationMAC = [6]byte{0x02, 0, 0, 0, 0xbe, 0xef}
	stationV4  = netip.MustParseAddr("10.91.0.77")
	stationV6  = netip.MustParseAddr("fd91::77")
)

func newStation(t testing.TB, gateway ...netip.Addr) *station {
	s := &station{t: t, clock: taptest.NewClock(int64(time.Second))}
	s.net = taptest.New(s.clock, taptest.Config{})
	s.port = s.net.Port(1)
	d, err := provider.Open(provider.Config{
		Device: s.net.Port(0), Addrs: harness.Addrs(0), Gateway: gateway, Clock: s.clock.Now, Manual: true, Idle: s.idle,
		MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	s.dev = d
	t.Cleanup(func() { d.Close() })
	return s
}

// idle passes the device's frames to answer, or time.
func (s *station) idle() {
	if s.dev.Progress() {
		return
	}
	fs := s.read()
	if len(fs) > 0 && s.answer != nil {
		for _, f := range fs {
			s.answer(f)
		}
		return
	}
	at := s.dev.NextDeadline()
	if at == qp.Never {
		s.t.Fatal("the device waits for nothing")
	}
	s.clock.AdvanceTo(at)
}

// read returns the frames that the device has sent.
func (s *station) read() (out [][]byte) {
	for s.dev != nil && s.dev.Progress() {
	}
	for {
		fs := []tap.Frame{{B: make([]byte, 10000)}}
		n, err := s.port.ReadBatch(fs)
		if err != nil {
			s.t.Fatal(err)
		}
		if n == 0 {
			return out
		}
		out = append(out, fs[0].B)
	}
}

// say sends a frame and returns the answers.
func (s *station) say(f []byte) [][]byte {
	s.t.Helper()
	s.read()
	if _, err := s.port.WriteBatch([]tap.Frame{{B: f}}); err != nil {
		s.t.Fatal(err)
	}
	return s.read()
}

func arp(op uint16, dst, senderMAC [6]byte, sender netip.Addr, targetMAC [6]byte, target netip.Addr) []byte {
	b := make([]byte, 42, 60)
	copy(b, dst[:])
	copy(b[6:], senderMAC[:])
	copy(b[12:], []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, byte(op)})
	copy(b[22:], senderMAC[:])
	copy(b[28:], sender.AsSlice())
	copy(b[32:], targetMAC[:])
	copy(b[38:], target.AsSlice())
	return b[:60] // Ethernet's padding
}

var broadcast = [6]byte{255, 255, 255, 255, 255, 255}

func (s *station) mac() [6]byte { return [6]byte(s.dev.MAC()) }

// ip6 wraps body, an ICMPv6 message whose checksum it fills in.
func ip6(dstMAC, srcMAC [6]byte, src, dst netip.Addr, hops byte, body []byte) []byte {
	b := make([]byte, 54, 54+len(body))
	copy(b, dstMAC[:])
	copy(b[6:], srcMAC[:])
	copy(b[12:], []byte{0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, 58, hops})
	binary.BigEndian.PutUint16(b[18:], uint16(len(body)))
	copy(b[22:], src.AsSlice())
	copy(b[38:], dst.AsSlice())
	b = append(b, body...)
	b[56], b[57] = 0, 0
	binary.BigEndian.PutUint16(b[56:], onesComplement(b[22:54], b[54:], uint32(len(body))+58))
	return b
}

// onesComplement is the Internet checksum, written anew so that the device's own
// is not checked against itself.
func onesComplement(a, b []byte, sum uint32) uint16 {
	for _, p := range [][]byte{a, b} {
		for i, v := range p {
			if i%2 == 0 {
				sum += uint32(v) << 8
			} else {
				sum += uint32(v)
			}
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

func ns(target netip.Addr, opts ...byte) []byte {
	return append(append([]byte{135, 0, 0, 0, 0, 0, 0, 0}, target.AsSlice()...), opts...)
}

func na(flags byte, target netip.Addr, opts ...byte) []byte {
	return append(append([]byte{136, 0, 0, 0, flags, 0, 0, 0}, target.AsSlice()...), opts...)
}

func lladdr(kind byte, mac [6]byte) []byte { return append([]byte{kind, 1}, mac[:]...) }

func solicited(a netip.Addr) (netip.Addr, [6]byte) {
	b := a.As16()
	g := [16]byte{0: 0xff, 1: 2, 11: 1, 12: 0xff, 13: b[13], 14: b[14], 15: b[15]}
	return netip.AddrFrom16(g), [6]byte{0x33, 0x33, 0xff, b[13], b[14], b[15]}
}
